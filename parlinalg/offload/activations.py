"""Offloaded activations: arrays saved for the backward pass that rest on a disk or in host memory meanwhile.

The arrays that a block's operations save are written as they are saved; when the backward pass comes to a value, its
arrays are there again, read ahead in the order of the walk: last in, first out (Rhu et al., "vDNN: virtualized deep
neural networks", 2016).  In a pipeline several microbatches are under way: each has a walk of its own, and what only
gradients of parameters need stays away until these are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, SupportsIndex

from parlinalg.autograd import saved_arrays_hooks
from parlinalg.autograd.rule import PackedArray, memory
from parlinalg.autograd.tape import Walk, walking
from parlinalg.backend import Backend
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.nn import Module
from parlinalg.offload.agreement import agree, number, worlds
from parlinalg.offload.extents import Away, DiskStore, HostStore, Store
from parlinalg.offload.packing import Held, Packer
from parlinalg.offload.states import bytes_of
from parlinalg.random.draws import Draws, current_draws

Block = Any


class Ahead(NamedTuple):
    """The reading ahead of a backward pass.

    Attributes
    ----------
    walk : weak reference to Walk
    later : bool
        Whether the gradients of parameters are left for later.
    upcoming : iterator of PackedArray
        The arrays that the walk is still to need, after those in `waiting`.
    waiting : weak dict of Away to int
        The arrays that are being read or were, and have not been needed yet, with their bytes.
    """

    walk: weakref.ref[Walk]
    later: bool
    upcoming: Iterator[PackedArray]
    waiting: weakref.WeakKeyDictionary[Away, int]


class OffloadedActivations:
    """Arrays that modules save for the backward pass, kept on a disk, or in host memory beside a GPU.

    Parameters
    ----------
    path : str or Path, optional
        The folder of the files, one a rank.  None: host memory, for a grid whose blocks live on a GPU.
    least : int or str
        Arrays of fewer bytes stay.
    pending, ahead : int or str
        Bytes at most that wait to be written, and that are read ahead of the walk.
    name : str
        What the files' names begin with.

    Values come back bit for bit.  A module that is recomputed saves only its inputs; these are offloaded.  Calls of the
    modules run within `parlinalg.autograd.saved_arrays_hooks`.
    """

    def __init__(
        self, path: str | Path | None, *, least: SupportsIndex | str = "64KiB", pending: SupportsIndex | str = "64MiB",
        ahead: SupportsIndex | str = "64MiB", name: str = "activations",
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
        problem: OffloadError | None = None
        try:
            self._store = self._open(grid.backend, number(comms))
        except OffloadError as error:
            problem = error
        agree(comms, problem, f"making {self.path}")
        assert self._store is not None
        self._packer = Packer(self._store, grid.backend, self.least)
        self._end = weakref.finalize(self, self._store.close)
        for module in self.modules:
            module.around = self._around

    def _open(self, backend: Backend, number: int) -> Store:
        """What this process, of that number, puts arrays into."""
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
        packer.kept = {id(memory(p.block)) for p in module.parameters() if not p.data.RESTS}
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

    def _read_ahead(self, walk: Walk, now: Away) -> None:
        """Begin to read what the walk needs next, until `ahead` bytes are waiting for it."""
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

    def __enter__(self) -> OffloadedActivations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
