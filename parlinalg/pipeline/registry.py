"""Types of layers by name, for models that are given as data."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, overload

from parlinalg import nn
from parlinalg.errors import ConfigError
from parlinalg.nn.module import Module

Maker = Callable[..., Module]
Kind = TypeVar("Kind", bound=Maker)

#: What every layer gets beside its own arguments, where it takes them.
CONTEXT = ("scheme", "grid", "dtype")

_types: dict[str, Maker] = {
    name: kind
    for name in nn.__all__
    if isinstance(kind := getattr(nn, name), type) and issubclass(kind, Module)
    if kind not in (Module, nn.ModuleDict, nn.ModuleList) and name not in nn.models.__all__
}


@overload
def register(kind: Kind, name: str | None = None) -> Kind: ...


@overload
def register(kind: str) -> Callable[[Kind], Kind]: ...


def register(kind: Any, name: str | None = None) -> Any:
    """Add a type of layers, a class or a function that makes one; also as a decorator.

    It is called with the arguments that the data gives, and with `scheme`, `grid` and `dtype` where it takes arguments
    of these names.

    Parameters
    ----------
    kind : callable
        Or, as `@register("Name")`, the name.
    name : str, optional
        By default the callable's own.

    Raises
    ------
    ConfigError
        If another type has the name already.

    Examples
    --------
    >>> @register
    ... class Halves(nn.Module):
    ...     def forward(self, x):
    ...         return x * 0.5
    >>> "Halves" in registered()
    True
    """
    if isinstance(kind, str):
        return lambda made: register(made, kind)
    if not callable(kind):
        raise ConfigError(f"register takes a class, or a function that makes a module, not {kind!r}")
    own = str(name or getattr(kind, "__name__", type(kind).__name__))
    if _types.get(own, kind) is not kind:
        raise ConfigError(f"a type of layers {own!r} is registered already, {_types[own]!r}; give another name")
    _types[own] = kind
    return kind


def registered() -> list[str]:
    """Return the names of all types of layers, ours and those that `register` added, in alphabetical order."""
    return sorted(_types)


def build_layer(given: object, context: Mapping[str, Any], where: str = "layer") -> Module:
    """Build a layer from data: a dict with its `type` and arguments; a module is returned as it is.

    Parameters
    ----------
    given : dict or Module
        A "Sequential" has its layers in `layers`, of the same form.  An argument that makes a layer, such as the `mlp`
        of a "TransformerBlock", is a dict too, with the `type` and further arguments.
    context : dict
        The `scheme`, `grid` and `dtype` of the model, for types that take them.
    where : str
        Names the layer in messages.

    Raises
    ------
    ConfigError
        If the type is unknown, or does not take the arguments; the message says what it takes.
    """
    if isinstance(given, Module):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise ConfigError(
            f"{where} is {given!r}: a layer is a dict with a type, such as dict(type='Linear', in_features=3, "
            "out_features=512), or a module"
        )
    options = {key: value for key, value in given.items() if key != "type"}
    name: str = given["type"]
    if name not in _types:
        lower = {known.lower(): known for known in _types}
        near = difflib.get_close_matches(name.lower(), lower, n=1)
        hint = f"did you mean {lower[near[0]]!r}?  " if near else ""
        raise ConfigError(
            f"{where} has the type {name!r}, which is not registered: {hint}There are {', '.join(registered())}; "
            "pipeline.register adds one"
        )
    if name == "Sequential":
        inner = options.pop("layers", None)
        if options or not isinstance(inner, list | tuple):
            raise ConfigError(f"{where} (Sequential) takes layers=[…], a list of layers, and nothing else")
        return nn.Sequential(*(build_layer(each, context, f"{where}.layers[{i}]") for i, each in enumerate(inner)))
    return _made(name, {key: _argument(each, f"{where}.{key}") for key, each in options.items()}, context, where)


def _argument(value: object, where: str) -> object:
    """Return an argument of a layer; a dict with a `type` becomes what makes such a layer, as a block's `mlp` does."""
    if not isinstance(value, Mapping) or value.get("type") not in _types:
        return value
    options = {key: each for key, each in value.items() if key != "type"}
    _own(value["type"], options, where)
    return partial(_types[value["type"]], **options)


def _own(name: str, options: Mapping[str, Any], where: str) -> list[str]:
    """Return the arguments of a type, those of the context aside; raise a ConfigError if options are not among them."""
    parameters = inspect.signature(_types[name]).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in CONTEXT]
    for key in options:
        if key not in parameters and not anything:
            near = difflib.get_close_matches(str(key), own, n=1)
            hint = f"did you mean {near[0]!r}?  " if near else ""
            raise ConfigError(f"{where} ({name}) has no argument {key!r}: {hint}It takes {', '.join(own) or 'none'}")
    return own


def _made(name: str, options: dict[str, Any], context: Mapping[str, Any], where: str) -> Module:
    kind, own = _types[name], _own(name, options, where)
    signature = inspect.signature(kind)
    parameters = signature.parameters
    given = {**{key: value for key, value in context.items() if key in parameters and value is not None}, **options}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"{where} ({name}): {error}; it takes {', '.join(own) or 'none'}") from error
    try:
        made = kind(**given)
    except Exception as error:
        error.add_note(f"making {where} ({name}) of a model that is given as data")
        raise
    if not isinstance(made, Module):
        raise ConfigError(f"{where} ({name}) makes a {type(made).__name__}: a layer is a Module")
    return made
