"""Saved arrays in a store: the memory that each is a view of, once, and how the view lies in it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from parlinalg.autograd.rule import memory
from parlinalg.backend import Backend
from parlinalg.backend.views import address
from parlinalg.offload.extents import Away, Store

Block = Any


class Held(NamedTuple):
    """An array in a store.

    Attributes
    ----------
    packer : Packer
        The packer that put it there.
    away : Away
        The memory that it is a view of, or, on a GPU, its elements.
    shape, strides : tuple of int
    offset : int
        In bytes.
    dtype : numpy.dtype
    order : tuple of int or None
        Of an array on a GPU: how its dims lie in memory.
    """

    packer: Packer
    away: Away
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: np.dtype[Any]
    order: tuple[int, ...] | None


class Packer:
    """Puts arrays of at least so many bytes into a store, and brings them back bit for bit.

    Memory that several arrays are views of is put away once, as long as it lives, until `forget`.
    """

    def __init__(self, store: Store, backend: Backend, least: int) -> None:
        self.store, self.backend, self.least = store, backend, least
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[Away]]] = {}
        self._back: weakref.WeakKeyDictionary[Away, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.kept: set[int] = set()
        """The memory that is not to be put away: the parameters'."""

    def forget(self) -> None:
        """Put away anew what comes: another forward pass begins, and memory may be in use again for something else."""
        self._known.clear()

    # ------------------------------------------------------------------ out
    def pack(self, array: Block) -> Held | Block:
        """Put an array into the store and return what stands for it, or return the array if it is to stay in memory."""
        whole = memory(array)
        if not array.ndim or whole.nbytes < self.least or id(whole) in self.kept or array.dtype.hasobject:
            return array
        if isinstance(array, np.ndarray):
            if whole.base is not None or array.nbytes * 4 < whole.nbytes:  # foreign memory, or little of a lot
                return array
            key: tuple[Any, ...] = (id(whole),)
            offset, order = address(array) - address(whole), None
        else:
            key = (id(whole), address(array), array.shape, array.strides)
            offset, order = 0, tuple(sorted(range(array.ndim), key=lambda d: -array.strides[d]))
        away = self._away(key, whole, array, order)
        return Held(self, away, array.shape, array.strides, offset, array.dtype, order)

    def _away(self, key: tuple[Any, ...], whole: Block, array: Block, order: tuple[int, ...] | None) -> Away:
        found = self._known.get(key)
        if found is not None and found[0]() is whole and (away := found[1]()) is not None:
            return away
        if order is None:
            raw = _bytes_of(whole)
        else:
            host = np.empty([array.shape[d] for d in order], array.dtype)
            block = array.transpose(order)
            self.backend.copy_to_host(block if block.flags.c_contiguous else block.copy(order="C"), host)
            raw = host.reshape(-1).view(np.uint8)
        away = self.store.put(raw)
        self._known[key] = weakref.ref(whole, lambda _: self._known.pop(key, None)), weakref.ref(away)
        return away

    # ------------------------------------------------------------------ back
    def soon(self, away: Away) -> int:
        """Begin to bring bytes back unless they are here, and return how many."""
        reference = self._back.get(away)
        if reference is not None and reference() is not None:
            return 0
        self.store.soon(away)
        return away.nbytes

    def unpack(self, held: Held | Block) -> Block:
        """Return the array of what `pack` returned."""
        if not isinstance(held, Held):
            return held
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


def _bytes_of(whole: np.ndarray) -> np.ndarray:
    """The bytes of an array that owns its memory, in the order in which they lie."""
    order = sorted(range(whole.ndim), key=lambda d: -whole.strides[d])
    return whole.transpose(order).reshape(-1).view(np.uint8)
