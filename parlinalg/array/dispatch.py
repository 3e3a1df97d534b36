"""Functions whose calls another kind of array takes over: tensors, which record them; and what they say to no array."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from inspect import isfunction, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

PROTOCOL = "__parlinalg_function__"
"""The method of a class that takes calls over: it is given the function, its arguments and its keyword arguments."""


def primitive(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one whose calls are taken over by arguments of another kind of array, as NumPy's are.

    The first argument, or item of a list or tuple, whose class has the method `__parlinalg_function__` gets the call.

    Examples
    --------
    >>> class Loud:
    ...     def __parlinalg_function__(self, function, args, kwargs):
    ...         return f"{function.__name__} of something else"
    >>> double = primitive(lambda x: 2 * x)
    >>> double.__name__ = "double"
    >>> double(3), double(Loud())
    (6, 'double of something else')
    """
    flags = flags_of(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if flags:
            refuse_flags(function.__name__, _given_flags(flags, args, kwargs))
        for value in args:
            if (taker := _taker(value)) is not None:
                return taker.__parlinalg_function__(call, args, kwargs)
        for value in kwargs.values():
            if (taker := _taker(value)) is not None:
                return taker.__parlinalg_function__(call, args, kwargs)
        return function(*args, **kwargs)

    return call


def flags_of(function: Callable[..., Any]) -> list[tuple[int, str]]:
    """Return the parameters that are True or False, each with its place, which those by keyword have beyond all others.

    They have such a default or annotation; `where`, which may be a mask, and those that may be a word are none.
    """
    found = []
    for at, (name, parameter) in enumerate(signature(function).parameters.items()):
        kind = str(parameter.annotation)
        flag = isinstance(parameter.default, bool) or kind.startswith("bool")
        if flag and name != "where" and "str" not in kind:
            found.append((at if parameter.kind != parameter.KEYWORD_ONLY else sys.maxsize, name))
    return found


def _given_flags(flags: list[tuple[int, str]], args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for at, flag in flags:
        if flag in kwargs:
            yield flag, kwargs[flag]
        elif at < len(args):
            yield flag, args[at]


def refuse_flags(name: str, given: Iterable[tuple[str, Any]]) -> None:
    """Raise an error that names the function and the argument if an array is given as a flag, True or False.

    Arrays of one element are True or False, as NumPy's are; tensors are not.
    """
    for flag, value in given:
        if value is True or value is False:
            continue
        if (tensor := takes_over(value)) or getattr(value, "size", 1) != 1:
            what = f"{name}: {flag} is True or False, not a {type(value).__name__} of shape {value.shape}"
            raise (TypeError if tensor else ValueError)(f"{what}; take its {'.item()' if tensor else 'any() or all()'}")


def flagged(kind: C) -> C:
    """Let the methods of a class refuse arrays that are given as flags, as functions do."""
    for name, method in list(vars(kind).items()):
        public = isfunction(method) and not (name.startswith("_") or hasattr(method, "__wrapped__"))
        if public and flags_of(method):
            setattr(kind, name, refusing(method))
    return kind


def refusing(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse arrays that are given as flags."""
    flags = flags_of(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_flags(function.__name__, _given_flags(flags, args, kwargs))
        return function(*args, **kwargs)

    return call


def of_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function name what it is given in place of an array: in the first argument, or one annotated as such.

    Examples
    --------
    >>> @of_arrays
    ... def rows(x):
    ...     return x.shape[0]
    >>> rows([1, 2])
    Traceback (most recent call last):
        ...
    TypeError: rows takes DistArrays, not list of int; parlinalg.asarray makes one
    """

    flags = flags_of(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if flags:
            refuse_flags(function.__name__, _given_flags(flags, args, kwargs))
        try:
            return function(*args, **kwargs)
        except AttributeError:
            parameters = signature(function).parameters
            arrays = [name for name, parameter in parameters.items() if parameter.annotation == "DistArray"]
            named = dict(zip(parameters, args, strict=False)) | kwargs
            first, *_ = named.values() or [None]
            items = first if isinstance(first, tuple | list) else ()
            within = f"{type(first).__name__} of " * bool(items)
            given = [(within, x) for x in items or [first]]
            given += [("", x) for name, x in named.items() if name in arrays and x is not first]
            odd = [within + type(x).__name__ for within, x in given if not (takes_over(x) or hasattr(x, "layout"))]
            if not odd:
                raise
        raise no_array(function.__name__, odd[0])

    return call


def no_array(name: str, kind: str) -> TypeError:
    """Return the error of a function that is given another kind of object in place of an array."""
    return TypeError(f"{name} takes DistArrays, not {kind}; parlinalg.asarray makes one")


def takes_over(value: Any) -> bool:
    """Return True if a value takes the calls of primitives over."""
    return hasattr(type(value), PROTOCOL)


def _taker(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return next(_items(value), None)
    return value if takes_over(value) else None


def _items(values: tuple[Any, ...] | list[Any]) -> Iterator[Any]:
    for value in values:
        if takes_over(value):
            yield value
