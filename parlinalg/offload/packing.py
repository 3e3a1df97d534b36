"""What the rules of values on the tape hold, with its arrays taken out and put back.

Rules are functions: their arrays are in the cells of their closures, alone or in tuples, lists, dicts, distributed
arrays and tensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter, Tensor
from parlinalg.backend import Backend
from parlinalg.backend.kernels_optim import address
from parlinalg.layout import Layout
from parlinalg.offload.extents import Away, Store

Block = Any


class Held(NamedTuple):
    """An array that was taken out.

    Attributes
    ----------
    away : Away
        The memory that it is a view of, or, on a GPU, its elements.
    shape, strides : tuple of int
    offset : int
        In bytes.
    dtype : numpy.dtype
    order : tuple of int or None
        Of an array on a GPU: how its dims lie in memory.
    """

    away: Away
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: np.dtype[Any]
    order: tuple[int, ...] | None


class Packed(NamedTuple):
    """Something whose arrays were taken out: `make` of the parts, once they are back."""

    make: Callable[..., Any]
    parts: tuple[Any, ...]


class Packer:
    """Takes arrays of at least so many bytes out of rules, and puts them into a store.

    Memory that several arrays are views of is put away once, as long as it lives, until `forget`.
    """

    def __init__(self, store: Store, backend: Backend, least: int) -> None:
        self.store, self.backend, self.least = store, backend, least
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[Away]]] = {}
        self._back: weakref.WeakKeyDictionary[Away, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.kept: set[int] = set()
        """The memory that is not to be taken out: the parameters'."""

    def forget(self) -> None:
        """Put away anew what comes: another forward pass begins, and memory may be in use again for something else."""
        self._known.clear()

    # ------------------------------------------------------------------ out
    def rule(self, rule: Any, cells: list[Any], met: set[int]) -> Any:
        """A rule, with the arrays in its cells taken out; `cells` gets those in which something is missing."""
        if isinstance(rule, functools.partial):
            inner = self.rule(rule.func, cells, met)
            return functools.partial(inner, *rule.args, **rule.keywords) if inner is not rule.func else rule
        if not isinstance(rule, FunctionType) or id(rule) in met:
            return rule
        met.add(id(rule))
        for cell in rule.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not bound
                continue
            if isinstance(content, FunctionType | functools.partial):
                self.rule(content, cells, met)
                continue
            packed = content if isinstance(content, Held | Packed) else self.out(content)
            if isinstance(packed, Held | Packed):
                cell.cell_contents = packed
                cells.append(cell)
        return rule

    def out(self, value: Any) -> Any:
        """The value, or what stands for it."""
        if value is None or isinstance(value, int | float | str | Layout | Parameter):
            return value
        if hasattr(value, "nbytes") and hasattr(value, "flags"):
            return self._array(value)
        if isinstance(value, DistArray):
            block = None if value.RESTS else self.out(value.block)
            if not isinstance(block, Held):
                return value
            return Packed(DistArray, (block, value.shape, value.layout, value.grid, value.order))
        if isinstance(value, Tensor):
            data = self.out(value.data)
            if data is value.data:
                return value
            return Packed(_tensor, (data, value.node, value.origin))
        if isinstance(value, tuple | list):
            parts = tuple(self.out(v) for v in value)
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            make = getattr(type(value), "_make", type(value))
            return Packed(_collected, (make, *parts))
        if isinstance(value, dict):
            parts = tuple(self.out(v) for v in value.values())
            if all(a is b for a, b in zip(parts, value.values(), strict=True)):
                return value
            return Packed(_mapped, (tuple(value), *parts))
        return value

    def _array(self, array: Block) -> Any:
        memory = array
        while getattr(memory, "base", None) is not None and isinstance(memory.base, type(memory)):
            memory = memory.base
        if not array.ndim or memory.nbytes < self.least or id(memory) in self.kept or array.dtype.hasobject:
            return array
        if isinstance(array, np.ndarray):
            if memory.base is not None or array.nbytes * 4 < memory.nbytes:  # foreign memory, or little of a lot
                return array
            key: tuple[Any, ...] = (id(memory),)
            offset, order = address(array) - address(memory), None
        else:
            key = (id(memory), address(array), array.shape, array.strides)
            offset, order = 0, tuple(sorted(range(array.ndim), key=lambda d: -array.strides[d]))
        away = self._away(key, memory, array, order)
        return Held(away, array.shape, array.strides, offset, array.dtype, order)

    def _away(self, key: tuple[Any, ...], memory: Block, array: Block, order: tuple[int, ...] | None) -> Away:
        found = self._known.get(key)
        if found is not None and found[0]() is memory and (away := found[1]()) is not None:
            return away
        if order is None:
            raw = _bytes_of(memory)
        else:
            host = np.empty([array.shape[d] for d in order], array.dtype)
            block = array.transpose(order)
            self.backend.copy_to_host(block if block.flags.c_contiguous else block.copy(order="C"), host)
            raw = host.reshape(-1).view(np.uint8)
        away = self.store.put(raw)
        self._known[key] = weakref.ref(memory, lambda _: self._known.pop(key, None)), weakref.ref(away)
        return away

    # ------------------------------------------------------------------ back
    def soon(self, away: Away) -> int:
        """Begin to bring bytes back, unless they are here; how many."""
        reference = self._back.get(away)
        if reference is not None and reference() is not None:
            return 0
        self.store.soon(away)
        return away.nbytes

    def back(self, value: Any) -> Any:
        """The value that something stands for."""
        if isinstance(value, Held):
            return self._restored(value)
        if isinstance(value, Packed):
            return value.make(*(self.back(part) for part in value.parts))
        return value

    def _restored(self, held: Held) -> Block:
        reference = self._back.get(held.away)
        raw = reference() if reference is not None else None
        if held.order is None:
            if raw is None:
                raw = self.store.get(held.away)
                self._back[held.away] = weakref.ref(raw)
            return np.ndarray(held.shape, held.dtype, raw, held.offset, held.strides)
        if raw is None:
            lying = tuple(held.shape[d] for d in held.order)
            raw = self.backend.empty(lying, held.dtype)
            self.backend.copy_from_host(self.store.get(held.away).view(held.dtype).reshape(lying), raw)
            self._back[held.away] = weakref.ref(raw)
        return raw.transpose(tuple(held.order.index(d) for d in range(len(held.order))))

    def held(self, value: Any) -> Iterator[Away]:
        """What was taken out of a value."""
        if isinstance(value, Held):
            yield value.away
        elif isinstance(value, Packed):
            for part in value.parts:
                yield from self.held(part)


def _tensor(data: DistArray, node: Any, origin: Any) -> Tensor:
    made = Tensor(data)
    made._node, made.origin = node, origin
    return made


def _collected(make: Callable[[Any], Any], *parts: Any) -> Any:
    return make(parts)


def _mapped(keys: tuple[Any, ...], *parts: Any) -> dict[Any, Any]:
    return dict(zip(keys, parts, strict=True))


def _bytes_of(memory: np.ndarray) -> np.ndarray:
    """The bytes of an array that owns its memory, in the order in which they lie."""
    order = sorted(range(memory.ndim), key=lambda d: -memory.strides[d])
    return memory.transpose(order).reshape(-1).view(np.uint8)
