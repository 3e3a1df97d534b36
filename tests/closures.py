"""The arrays that functions hold in their closures, where rules of differentiation are to hold none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from parlinalg import Grid, Layout, Parameter
from parlinalg.autograd.rule import is_array
from parlinalg.autograd.tape import Node
from parlinalg.nn import Module
from parlinalg.random import Bernoulli

#: What is no rule's own: weights, where they are, values on the tape, and the two numbers of a random key.
ELSEWHERE = (Parameter, Module, Grid, Layout, Node, Bernoulli, ModuleType, type, BuiltinFunctionType)


def arrays_held(held: Any, met: set[int] | None = None) -> Iterator[Any]:
    """All arrays that a function keeps alive by closure, default, container or attribute."""
    met = set() if met is None else met
    if isinstance(held, ELSEWHERE) or getattr(held, "resident", held) is None or id(held) in met:
        return
    met.add(id(held))
    if is_array(held):
        yield held
        return
    inside: list[Any] = []
    if isinstance(held, FunctionType):
        if len(met) > 1 and not held.__module__.startswith("parlinalg"):
            return  # a user's function, which an operation was given
        inside = [held.__defaults__, held.__kwdefaults__]
        for cell in held.__closure__ or ():
            try:
                inside.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
    elif isinstance(held, MethodType):
        inside = [held.__self__]
    elif isinstance(held, functools.partial):
        inside = [held.func, held.args, held.keywords]
    elif isinstance(held, dict):
        inside = list(held.values())
    elif isinstance(held, list | tuple | set):
        inside = list(held)
    elif type(held).__module__.startswith("parlinalg"):
        slots = (name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ()))
        inside = [getattr(held, "__dict__", None), *(getattr(held, name, None) for name in slots)]
    for each in inside:
        yield from arrays_held(each, met)


@contextmanager
def none_held() -> Iterator[None]:
    """Fail within it when an operation is recorded whose rule holds an array that it did not save."""
    made = Node.__init__

    def checked(self: Node, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for rule in self.rules():
            for array in arrays_held(rule.function):
                raise AssertionError(
                    f"{self.op}: {name_of(rule.function)} holds an array of shape {array.shape}, {array.dtype}, which "
                    "was not saved for it"
                )

    patch = pytest.MonkeyPatch()
    patch.setattr(Node, "__init__", checked)
    try:
        yield
    finally:
        patch.undo()


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
