"""Layers: the units into which a pipeline cuts a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from parlinalg.errors import ConfigError
from parlinalg.nn.module import Module


class Layer(NamedTuple):
    """A layer of a model, as a pipeline cuts it.

    Attributes
    ----------
    name : str
        "embedding", "blocks.0", …, "head".
    forward : callable
        From what the layer before gave (the first: the model's inputs).
    modules : tuple of Module
        All that it uses; a tied table is in the first and the last layer's.
    end : bool
        Whether it goes before or after the layers that are counted: an embedding, a head.
    cached : callable or None
        For generation, in place of `forward`: `cached(x, cache, start)`, with the cache of this layer (None where
        `caches` is false) and the place of the first token.
    caches : bool
        Whether it keeps keys and values of earlier tokens.
    """

    name: str
    forward: Callable[..., Any]
    modules: tuple[Module, ...]
    end: bool = False
    cached: Callable[..., Any] | None = None
    caches: bool = False

    def all_modules(self) -> list[Module]:
        """Return `modules` and all within them, each once."""
        return list({id(m): m for own in self.modules for m in own.modules()}.values())


def layers_of(model: Module) -> list[Layer] | None:
    """Return the layers that a model lists by its method `layers()`; None where it has no such method.

    A module in the list is a layer of its own name.  Members under the name "layers", such as a `ModuleList`, do not
    say what the model does before, after and between them, and are no such list.

    Raises
    ------
    ConfigError
        If the method gives no list, an empty one, or something that is neither a `Layer` nor a Module.
    """
    method = getattr(model, "layers", None)
    if not callable(method) or isinstance(method, Module):
        return None
    given = method()
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Layer) else []
    if not listed:
        raise ConfigError(f"{type(model).__name__}.layers() gives {given!r}: it is a list of its layers, one at least")
    return [as_layer(model, each) for each in listed]


def as_layer(model: Module, given: Any) -> Layer:
    """Return an item that a model lists, a `Layer` or a Module, as a layer.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if isinstance(given, Layer):
        return given
    if not isinstance(given, Module):
        raise ConfigError(f"{type(model).__name__} lists a layer {given!r}: a layer is an nn.Layer or a Module")
    name = next((n for n, module in model.named_modules() if module is given), type(given).__name__)
    return Layer(name, given, (given,))
