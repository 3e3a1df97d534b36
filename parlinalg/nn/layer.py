"""What a pipeline cuts a model into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
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
