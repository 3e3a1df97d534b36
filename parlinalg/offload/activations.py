"""Offloaded activations: arrays saved for the backward pass that rest on a disk or in host memory meanwhile.

The arrays that a block's operations save are written as they are saved; when the backward pass comes to a value, its
arrays are there again, read ahead in the order of the backward pass: last in, first out (Rhu et al., "vDNN:
virtualized deep neural networks", 2016).  In a pipeline several microbatches are in flight: each has a backward pass of
its own, and what only gradients of parameters need stays away until these are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from parlinalg.autograd import saved_arrays_hooks
from parlinalg.autograd.rule import PackedArray, memory
from parlinalg.autograd.tape import Walk, walking
from parlinalg.backend import Backend
from parlinalg.backend.views import address, view_of
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.grid import worlds
from parlinalg.nn import Module
from parlinalg.offload.disk import Closing, process_number
from parlinalg.offload.states import bytes_of
from parlinalg.offload.stores import DiskStore, HostStore, OffloadedBytes, Store
from parlinalg.random.draws import Draws, current_draws

Block = Any
WINDOW = "64MiB"
"""The bytes that wait to be written at most, and that are read ahead."""


Room = Callable[[Sequence[int], np.dtype[Any]], np.ndarray]
"""Makes an array in host memory, of a shape and dtype, for one of a device."""


class Held(NamedTuple):
    """An array in a store.

    Attributes
    ----------
    packer : Packer
        The packer that put it there.
    away : OffloadedBytes
        The memory that it is a view of, or, on a GPU, its elements.
    shape, strides : tuple of int
    offset : int
        In bytes.
    dtype : numpy.dtype
    order : tuple of int or None
        For an array on a GPU: the order of its dims in memory.
    """

    packer: Packer
    away: OffloadedBytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: np.dtype[Any]
    order: tuple[int, ...] | None


class Packer:
    """Puts arrays of at least so many bytes into a store, and brings them back bit for bit.

    Memory that several arrays are views of is offloaded once, as long as it lives, until `forget`.
    """

    def __init__(self, store: Store, backend: Backend, least: int, room: Room) -> None:
        self.store, self.backend, self.least, self.room = store, backend, least, room
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[OffloadedBytes]]] = {}
        self._back: weakref.WeakKeyDictionary[OffloadedBytes, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.kept: set[int] = set()
        """The memory that stays: the parameters'."""

    def forget(self) -> None:
        """Forget what was offloaded: another forward pass begins, and memory may be in use again for something else."""
        self._known.clear()

    # ------------------------------------------------------------------ out
    def pack(self, array: Block) -> Held | Block:
        """Put an array into the store and return what stands for it, or return the array if it is to stay in memory."""
        whole = memory(array)
        if not array.ndim or whole.nbytes < self.least or id(whole) in self.kept or array.dtype.hasobject:
            return array
        if isinstance(array, np.ndarray) or self.backend.host_memory:
            if whole.base is not None or array.nbytes * 4 < whole.nbytes:  # foreign memory, or little of a lot
                return array
            key: tuple[Any, ...] = (id(whole),)
            offset, order = address(array) - address(whole), None
        else:
            key = (id(whole), address(array), array.shape, array.strides)
            offset, order = 0, tuple(sorted(range(array.ndim), key=lambda d: -array.strides[d]))
        away = self._away(key, whole, array, order)
        return Held(self, away, array.shape, array.strides, offset, array.dtype, order)

    def _away(self, key: tuple[Any, ...], whole: Block, array: Block, order: tuple[int, ...] | None) -> OffloadedBytes:
        found = self._known.get(key)
        if found is not None and found[0]() is whole and (away := found[1]()) is not None:
            return away
        if order is None:
            raw = _bytes_of(whole)
        else:
            host = self.room([array.shape[d] for d in order], array.dtype)
            block = array.transpose(order)
            self.backend.copy_to_host(block if block.flags.c_contiguous else block.copy(order="C"), host)
            raw = host.reshape(-1).view(np.uint8)
        away = self.store.put(raw)
        self._known[key] = weakref.ref(whole, lambda _: self._known.pop(key, None)), weakref.ref(away)
        return away

    # ------------------------------------------------------------------ back
    def soon(self, away: OffloadedBytes) -> int:
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
            return view_of(raw, held.shape, held.dtype, held.offset, held.strides)
        if raw is None:
            lying = tuple(held.shape[d] for d in held.order)
            raw = self.backend.empty(lying, held.dtype)
            self.backend.copy_from_host(self.store.get(held.away).view(held.dtype).reshape(lying), raw)
            self._back[held.away] = weakref.ref(raw)
        return raw.transpose(tuple(held.order.index(d) for d in range(len(held.order))))


def _bytes_of(whole: np.ndarray) -> np.ndarray:
    """Return the bytes of an array that owns its memory, in the order in which they lie."""
    order = sorted(range(whole.ndim), key=lambda d: -whole.strides[d])
    return whole.transpose(order).reshape(-1).view(np.uint8)


class Ahead(NamedTuple):
    """The reading ahead of a backward pass.

    Attributes
    ----------
    walk : weak reference to Walk
    later : bool
        Whether the gradients of parameters are left for later.
    upcoming : iterator of PackedArray
        The arrays that the walk will still need, after those in `waiting`.
    waiting : weak dict of OffloadedBytes to int
        The arrays that are being read or were, and have not been needed yet, with their bytes.
    """

    walk: weakref.ref[Walk]
    later: bool
    upcoming: Iterator[PackedArray]
    waiting: weakref.WeakKeyDictionary[OffloadedBytes, int]


class OffloadedActivations(Closing):
    """Arrays that modules save for the backward pass, kept on a disk, or in host memory beside a GPU.

    Parameters
    ----------
    path : str or Path, optional
        The folder of the files, one a rank.  None: host memory, for a grid whose blocks live on a GPU.
    least : int or str
        Arrays of fewer bytes stay.
    pending, ahead : int or str
        Bytes at most that wait to be written, and that are read ahead of the backward pass.
    name : str
        What the files' names begin with.

    Values come back bit for bit.  A module that is recomputed saves only its inputs; these are offloaded.  Calls of the
    modules run within `parlinalg.autograd.saved_arrays_hooks`.
    """

    def __init__(
        self, path: str | Path | None, *, least: SupportsIndex | str = "64KiB", pending: SupportsIndex | str = WINDOW,
        ahead: SupportsIndex | str = WINDOW, name: str = "activations",
    ) -> None:  # fmt: skip
        self.path = None if path is None else Path(path)
        self.name = name
        self.least = bytes_of("least", least)
        self.pending, self.ahead = bytes_of("pending", pending), bytes_of("ahead", ahead)
        self.modules: list[Module] = []
        self._store: Store | None = None
        self._packer: Packer | None = None
        self._draws: Draws | None = None
        self._ahead: Ahead | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def place(self, modules: Iterable[Module]) -> None:
        """Offload what these modules save, as a rule the blocks of a model, from the next forward pass on.  Collective.

        Raises
        ------
        OffloadError
            On all ranks, if the folder cannot be written.
        """
        self.modules = list(modules)
        parameters = [p for m in self.modules for p in m.parameters()]
        if not parameters or self._store is not None:
            raise ConfigError("offloaded activations are placed once, for modules that have parameters")
        grid = parameters[0].grid
        comms = worlds(p.grid for p in parameters)
        number = None if self.path is None else process_number(comms)
        store = self._store = together(
            comms, lambda: self._open(grid.backend, number), f"making {self.path}", (OffloadError, ConfigError)
        )
        self._packer = Packer(store, grid.backend, self.least, self._room)
        self._end = weakref.finalize(self, store.close)
        for module in self.modules:
            module.around = self._around

    @staticmethod
    def _room(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in host memory for one of a device."""
        return np.empty(shape, dtype)

    def _open(self, backend: Backend, number: int | None) -> Store:
        """Return the store of this process, of that number."""
        if self.path is not None:
            return DiskStore(self.path / f"{self.name}.{number}.extents", self.pending)
        if backend.host_memory:
            raise ConfigError("activations already are in host memory; give path=, a folder on a disk")
        return HostStore(backend)

    def _around(self, call: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, and offload what its operations save."""
        packer = self._packer
        if packer is None or walking() is not None:  # a backward pass uses at once what it computes again
            return call(*args, **kwargs)
        packer.kept = {id(memory(b)) for p in module.parameters() if (b := p.data.resident) is not None}
        draws = current_draws()
        if draws is not self._draws:
            self._draws = draws
            packer.forget()
        with saved_arrays_hooks(packer.pack, partial(self._unpack, packer)):
            return call(*args, **kwargs)

    def _unpack(self, packer: Packer, held: Held | Block) -> Block:
        """Return an array, and begin to read those that the backward pass needs next."""
        walk = walking()
        if isinstance(held, Held):
            packer.soon(held.away)
            if walk is not None:
                self._read_ahead(walk, held.away)
        return packer.unpack(held)

    def _read_ahead(self, walk: Walk, now: OffloadedBytes) -> None:
        """Begin to read the arrays that the walk needs next, until `ahead` bytes are waiting for it."""
        ahead = self._ahead
        if ahead is None or ahead.walk() is not walk or ahead.later != walk.later:
            ahead = self._ahead = Ahead(weakref.ref(walk), walk.later, walk.upcoming(), weakref.WeakKeyDictionary())
        ahead.waiting.pop(now, None)
        total = sum(ahead.waiting.values())
        while total <= self.ahead and (each := next(ahead.upcoming, None)) is not None:
            held = each.value
            if isinstance(held, Held) and held.away is not now:
                ahead.waiting[held.away] = nbytes = held.packer.soon(held.away)
                total += nbytes

    def close(self) -> None:
        """Let modules keep everything in memory again, and take the files away."""
        for module in self.modules:
            module.around = None
        self.modules = []
        if self._end is not None:
            self._end()
        self._store = self._packer = self._end = None
