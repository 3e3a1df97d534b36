"""Parameters side by side in flat buffers, with the optimizer's states: what an optimizer updates on this rank.

`FlatParameters` asks the storages of parameters which elements this rank updates, moves values to flat buffers, keeps
masters of 16-bit values, and gives runs of elements (value, gradient, states) to the update rule.  Where states lie is
a matter of its `States`: in memory, or see `parlinalg.offload`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter, Partition
from parlinalg.autograd.storage import owners, together_on
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.shapes import label_memory
from parlinalg.backend.views import address, flat, follows, joined
from parlinalg.errors import ConfigError

Block = Any
Order = list[Parameter]
Result = TypeVar("Result")

#: Bytes of a flat buffer of values: moving there takes no more memory than one at a time.
BUFFER = 1 << 26


class FlatOptions(TypedDict, total=False):
    """Keyword arguments of every optimizer that say how values are kept, whatever the update rule; see `Optimizer`."""

    master: bool | Any


def value_state(names: Iterable[str]) -> str | None:
    """Return the state from which values are rounded, if one of these is."""
    return "master" if "master" in names else None


@dataclass
class Entry:
    """The elements of a parameter that a rank updates.

    Attributes
    ----------
    parameter : Parameter
    data : DistArray
        The parameter's value, which the optimizer knows.
    partition : Partition
        The elements of the flattened block.
    dtype : numpy.dtype
        That of the states.
    names : tuple of str
        The states.
    writes : int
        The parameter's `writes` that the states know of.
    group : int
        The number of its parameter group.
    home : bool
        It has one state of the parameter, `names`, of a shape of its own, which is on this rank alone (see
        `Optimizer.home_states`): `partition` is all of it, and no run has elements of it.
    homed : bool
        The parameter has states that lie whole on some rank: undoing a step takes its values too.
    """

    parameter: Parameter
    data: DistArray
    partition: Partition
    dtype: np.dtype[Any]
    names: tuple[str, ...]
    writes: int = 0
    group: int = 0
    home: bool = False
    homed: bool = False

    @property
    def key(self) -> tuple[int, str]:
        """The identity of an entry: its parameter, and the state that is at home."""
        return id(self.parameter), self.names[0] if self.home else ""

    @property
    def start(self) -> int:
        """The first element in the flattened block."""
        return self.partition.start

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.partition.stop - self.partition.start

    @property
    def value(self) -> Block:
        """The elements of the value, a flat view."""
        return flat(self.data.block)[self.start : self.start + self.size]

    @property
    def shared(self) -> bool:
        """True if the parameter's update is shared as this entry says; the same on all ranks that share it."""
        storage = self.parameter.storage
        return (storage.axes, storage.lengths) == (self.partition.axes, self.partition.lengths)

    def whole(self, block: Block) -> DistArray:
        """Return a state as an array, which is cut as the parameter is, from this rank's flat part.  Collective."""
        data, partition = self.data, self.partition
        if partition.axes:
            part, block = block, data.grid.backend.empty(sum(partition.lengths), block.dtype)
            data.grid.comm(partition.axes).all_gather(part, block, partition.lengths)
        return DistArray(block.reshape(data.block.shape), data.shape, data.layout, data.grid)


@dataclass
class Run:
    """Elements of parameters that lie side by side: flat views of values, gradients and states.

    Attributes
    ----------
    entries : list of Entry
        Those whose elements these are, or, of a window, that have some of them.
    value : array
        The values.
    g : array
        The gradients.
    states : dict of str to array
        In memory, in the dtype of `Entry.dtype`.
    at : int
        Where this begins in the elements of the first entry.
    """

    entries: list[Entry]
    value: Block
    g: Block
    states: dict[str, Block] = field(default_factory=dict)
    at: int = 0

    @property
    def group(self) -> int:
        """The parameter group of all of them."""
        return self.entries[0].group

    @property
    def p(self) -> Block:
        """The elements that `update` changes: the values, or the master of more bits that they are rounded from."""
        return self.states.get("master", self.value)


class States(Protocol):
    """Keeps an optimizer's states.

    An entry has the states `entry.names`, each of `entry.size` elements of `entry.dtype`.  An entry is known by its
    key: after `make`, entries made anew of the same parameters and sizes mean the same states.

    Attributes
    ----------
    steps : int
        The steps made before the current one, as the optimizer counts them; it says so before each.
    """

    steps: int

    def make(self, entries: Sequence[Entry]) -> None:
        """Make room for the states of these entries, in this order, all zero; what was kept before is forgotten."""

    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        """Iterate over the runs, or parts of them, with their states in memory (`Run.states`).

        What is written to a window's states is kept when the next one is asked for, or the iterator ends.  A part has
        the entries it holds elements of, views of `value` and `g`, and `at`, where it begins in the first of them.
        """

    def read(self, entry: Entry, name: str) -> Block:
        """Return a state of an entry as a flat block, which is not to be written to."""

    def write(self, entry: Entry, name: str, block: Block) -> None:
        """Set a state of an entry."""

    def complete(self, steps: int) -> None:
        """Complete step number `steps`: what it wrote counts, or, if that fails, nothing of it does."""

    def undo(self) -> None:
        """Forget what a step that failed wrote, where that can be done."""

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's states, wherever they lie."""


class InMemory:
    """States as views into flat buffers, which lie side by side as the entries do."""

    def __init__(self) -> None:
        self.steps = 0
        self._flats: list[Block] = []
        self._views: dict[tuple[int, str], Block] = {}

    def make(self, entries: Sequence[Entry]) -> None:
        self._flats, self._views = [], {}
        groups: dict[tuple[int, str, tuple[str, ...]], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((id(entry.data.grid.backend), entry.dtype.str, entry.names), []).append(entry)
        for group in groups.values():
            backend = group[0].data.grid.backend
            for name in group[0].names:
                buffer, at = backend.zeros(sum(e.size for e in group), group[0].dtype), 0
                label_memory(buffer, "states")
                self._flats.append(buffer)
                for entry in group:
                    self._views[id(entry.parameter), name] = buffer[at : at + entry.size]
                    at += entry.size

    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        for run in runs:
            names = run.entries[0].names
            states = {name: joined([self.read(entry, name) for entry in run.entries]) for name in names}
            yield Run(run.entries, run.value, run.g, states)

    def read(self, entry: Entry, name: str) -> Block:
        return self._views[id(entry.parameter), name]

    def write(self, entry: Entry, name: str, block: Block) -> None:
        self.read(entry, name)[...] = block

    def complete(self, steps: int) -> None:
        pass

    def undo(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._flats)


class FlatParameters:
    """The elements that an optimizer updates on this rank, with their states.

    Parameters
    ----------
    groups : list of dict
        The optimizer's parameter groups, each with "params".
    by_parts : callable
        Raises a ConfigError if the update cannot be made part by part; given why it would be, and what to do instead.
    master : bool or dtype
        The dtype that parameters of fewer bits are kept in too, as a state "master"; True is float32.

    Attributes
    ----------
    entries : list of Entry
    homes : list of Entry
        The states that lie whole on this rank.
    states : States
        Where the states lie.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], by_parts: Callable[[str, str], None], *, master: bool | Any = False
    ) -> None:  # fmt: skip
        self.groups, self.master, self.by_parts = groups, master_dtype(master), by_parts
        self.entries: list[Entry] = []
        self.homes: list[Entry] = []
        self._asked: list[Any] = []
        self.states: States = InMemory()
        self.check_shared()

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all groups."""
        return [p for group in self.groups for p in group["params"]]

    def check_shared(self) -> None:
        """Raise a ConfigError if ranks share the update of parameters, and it cannot be made part by part."""
        shared = next((p for p in self.parameters if p.storage.axes), None)
        if shared is not None:
            self.by_parts(f"{shared.name!r} is sharded over {shared.storage.axes} (ZeRO)", "no ZeRO")

    # ------------------------------------------------------------------ a step
    def windows(self) -> Iterator[Run]:
        """Iterate over everything that has a gradient, a part at a time, with its states in memory.

        When the next part is asked for, values with a master are rounded from it.
        """
        for run in self.states.windows(runs(self.entries)):
            yield run
            if "master" in run.states:
                run.value[...] = run.p
            first = run.entries[0]
            first.data.put(run.value, first.start + run.at)

    def gather(self) -> None:
        """Give every rank the values that the others have updated.  Collective."""
        for owner in owners(self.parameters):
            owner.gather()

    # ------------------------------------------------------------------ what is updated
    def arrange(self, names: Sequence[tuple[str, ...]], homes: Sequence[HomeState] = ()) -> list[Entry]:
        """Return what this rank updates, with states of these names for each group, and those at home on any rank.

        Values move to flat buffers the first time.  Collective over axes along which it has changed.
        """
        parameters, old = self.parameters, self.entries
        for owner in owners(parameters):
            owner.adopt()
        numbers = self.numbers()
        fewer = len(old) != len(parameters) or not old
        fewer = fewer or not all(set(names[numbers[id(e.parameter)]]) <= set(e.names) for e in old)
        asked = [(id(h.parameter), h.name, h.shape, h.dtype, h.home) for h in homes]
        if fewer or asked != self._asked or not all(e.shared for e in old):
            self.check_shared()
            kept = self._kept([*old, *self.homes])
            entries = flatten(parameters, names, self.master, numbers)
            whole = {id(h.parameter) for h in homes}
            for entry in entries:
                entry.homed = id(entry.parameter) in whole
            mine = [h.entry for h in homes if h.entry is not None]
            self.states.make([*entries, *mine])
            self.entries, self.homes, self._asked = entries, mine, asked
            self.where_they_lie(lambda: self._fill(kept), "making the optimizer's states")
        elif any(e.parameter.data is not e.data for e in old):
            order = [e.parameter for e in old]
            place = {id(p): i for i, p in enumerate(order)}
            fresh = flatten(order, names, self.master, numbers)
            self.entries = sorted(fresh, key=lambda e: place[id(e.parameter)])
            for entry, before in zip(self.entries, old, strict=True):
                entry.writes = before.writes - (entry.data is not before.data)
                entry.homed = before.homed
        for entry in self.homes:
            entry.data = entry.parameter.data  # not the values before they moved, which would stay
        written = [e for e in self.entries if e.writes != e.parameter.writes]
        if any("master" in e.names for e in written):
            self.where_they_lie(lambda: self._take(written), "taking values that were written as masters")
        for entry in written:
            entry.writes = entry.parameter.writes
        return self.entries

    def moved(self) -> None:
        """Take the values where they lie now, side by side as before: they were moved there as they are."""
        for entry in (*self.entries, *self.homes):
            entry.data = entry.parameter.data

    def forget(self) -> None:
        """Set all states to zero.  Collective where they lie on a disk."""
        self.states.make([*self.entries, *self.homes])

    def numbers(self) -> dict[int, int]:
        """Return the number of the group of each parameter, by its identity."""
        return {id(p): i for i, group in enumerate(self.groups) for p in group["params"]}

    def _kept(self, old: list[Entry]) -> dict[tuple[int, str], Block]:
        """Return the states of the elements that this rank updates from now on."""
        kept = {}
        for entry in old:
            storage, data = entry.parameter.storage, entry.parameter.data
            for name in entry.names:
                block = self.where_they_lie(partial(self.states.read, entry, name), "moving the optimizer's states")
                if not entry.home and not entry.shared:
                    partition = storage.partition(data)
                    block = entry.whole(block).block.reshape(-1)
                    block = block[partition.start : partition.stop].copy() if partition.axes else block
                kept[id(entry.parameter), name] = block
        return kept

    def _fill(self, kept: dict[tuple[int, str], Block]) -> None:
        """Write the states that were kept, or the masters of the values."""
        for entry in (*self.entries, *self.homes):
            for name in entry.names:
                if (id(entry.parameter), name) in kept:
                    self.states.write(entry, name, kept.pop((id(entry.parameter), name)))
                elif name == "master":
                    self.states.write(entry, name, entry.value)

    def _take(self, entries: Sequence[Entry]) -> None:
        """Take values that were written to as masters, where they are not what these round to."""
        for entry in entries:
            if "master" in entry.names:
                master = self.states.read(entry, "master").copy()
                changed = master.astype(entry.value.dtype) != entry.value
                master[changed] = entry.value[changed]
                self.states.write(entry, "master", master)

    # ------------------------------------------------------------------ states
    def place(self, states: States) -> None:
        """Keep the states elsewhere from now on; see `Optimizer.place`.  Collective."""
        if not isinstance(states, InMemory):
            self.by_parts(f"{type(states).__name__} bring its parameters tile by tile", "states in memory")
        states.make([*self.entries, *self.homes])

        def move() -> None:
            for entry in (*self.entries, *self.homes):
                for name in entry.names:
                    states.write(entry, name, self.states.read(entry, name))

        self.together(move, "moving the optimizer's states")
        self.states = states

    def whole_states(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the states of each parameter's name as global arrays.  Collective."""
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for name, entry in self.named().items():
            arrays[name] = {}
            for s in entry.names:
                block = self.where_they_lie(partial(self.states.read, entry, s), f"reading the state {name}.{s}")
                arrays[name][s] = entry.whole(block).gather()
        return arrays

    def load(self, given: Mapping[str, Any]) -> None:
        """Take global arrays as states, by "NAME.STATE".  Collective."""

        def load() -> None:
            for name, entry in self.named().items():
                data = entry.data
                part = tuple(slice(r.start, r.stop) for r in data.grid.block(data.layout, data.shape))
                for s in entry.names:
                    mine = np.asarray(given[f"{name}.{s}"])[part].reshape(-1)[entry.start : entry.start + entry.size]
                    block = data.grid.backend.from_host(np.array(mine, entry.dtype, order="C"))
                    self.states.write(entry, s, block)

        self.where_they_lie(load, "loading the optimizer's state")

    def named(self) -> dict[str, Entry]:
        """Return the entries by their parameters' names, in the order of the parameters."""
        entries = {id(e.parameter): e for e in self.entries}
        named = {p.name or str(i): entries[id(p)] for i, p in enumerate(self.parameters)}
        if len(named) < len(entries):
            names = [p.name for p in self.parameters]
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ConfigError(f"parameters share the names {', '.join(twice)}; name them by model.initialize(seed)")
        return named

    def together(self, function: Callable[[], Result], what: str) -> Result:
        """Call a function that does not communicate; if it fails on any rank, fail on all.  Collective."""
        return together_on(self.parameters, function, what)

    def where_they_lie(self, function: Callable[[], Result], what: str) -> Result:
        """Do the same with a function that fails only if the states lie where reading or writing can fail."""
        return function() if isinstance(self.states, InMemory) else self.together(function, what)


@dataclass
class HomeState:
    """A state that is not cut as its parameter is, and lies whole on one rank.

    Attributes
    ----------
    parameter : Parameter
    name : str
    shape : tuple of int
    dtype : numpy.dtype
    home : int
        The rank of the parameter's grid that has it.
    flat : FlatParameters
        Where it is kept.
    entry : Entry or None
        On that rank.
    """

    parameter: Parameter
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    home: int
    flat: FlatParameters
    entry: Entry | None

    @property
    def nbytes(self) -> int:
        """The bytes of it on this rank."""
        return 0 if self.entry is None else self.entry.size * self.dtype.itemsize

    def read(self) -> Any:
        """Return the state as a flat block, which is not to be written to; nothing on ranks that do not have it."""
        if self.entry is None:
            return self.parameter.grid.backend.empty((0,), self.dtype)
        return self.flat.states.read(self.entry, self.name)

    def whole(self) -> np.ndarray:
        """Return the state on all ranks.  Collective over the parameters' grids."""
        grid = self.parameter.grid
        mine = self.flat.where_they_lie(self.read, f"reading the state {self.parameter.name}.{self.name}")
        block = grid.backend.empty(self.shape, self.dtype) if self.entry is None else mine.copy().reshape(self.shape)
        grid.everyone.broadcast(block, self.home)
        return grid.backend.to_host(block)

    def take(self, values: Any) -> None:
        """Set the state where it lies, from host memory."""
        if self.entry is not None:
            host = np.array(values, self.dtype, order="C").reshape(-1)
            self.flat.states.write(self.entry, self.name, self.parameter.grid.backend.from_host(host))


def flatten(
    parameters: Sequence[Parameter], names: Sequence[tuple[str, ...]], master: np.dtype[Any] | None,
    groups: Mapping[int, int],
) -> list[Entry]:  # fmt: skip
    """Return the parameters' entries, those of each dtype and with the same states one after the other in the order in
    which gradients lie.

    Values move to flat buffers; those that lie in an owner's already, and those that do not stay in memory, stay.

    Parameters
    ----------
    names : sequence of tuples of str
        The states of the parameters of each group.
    master : numpy.dtype or None
        Parameters of fewer bits have a state "master" of this dtype.
    groups : dict of int to int
        The number of the parameter group of each parameter, by its identity.
    """
    alike: dict[tuple[int, str, bool, tuple[str, ...]], Order] = {}
    for p in as_gradients_lie(parameters):
        key = id(p.grid.backend), p.dtype.str, bool(p.storage.axes), names[groups[id(p)]]
        alike.setdefault(key, []).append(p)
    entries = []
    for (_, _, _, states), group in alike.items():
        if not group[0].storage.axes:
            _move([p for p in group if p.data.resident is not None])
        dtype, mastered = states_of(group[0].dtype, master)
        kept = (*states, "master") if mastered else states
        for p in group:
            entries.append(Entry(p, p.data, p.storage.partition(p.data), dtype, kept, p.writes, groups[id(p)]))
    return entries


def master_dtype(master: bool | Any) -> np.dtype[Any] | None:
    """Return the dtype that parameters of fewer bits are kept in too."""
    if master is None or isinstance(master, bool):
        return np.dtype(np.float32) if master else None
    try:
        dtype = np.dtype(master)
    except TypeError:
        dtype = None
    if dtype not in (np.float32, np.float64):
        raise ConfigError(f"an optimizer's master is True, False, 'float32' or 'float64', not {master!r}")
    return dtype


def states_of(dtype: np.dtype[Any], master: np.dtype[Any] | None) -> tuple[np.dtype[Any], bool]:
    """Return the dtype of the states of parameters of `dtype`, and whether a master is one of them."""
    if master is not None and master.itemsize > dtype.itemsize:
        return master, True
    return work_dtype(dtype), False


def _move(group: Order) -> None:
    """Move the values into flat buffers, in this order."""
    while group:
        nbytes = taken = 0
        while taken < len(group) and (not taken or nbytes + group[taken].block.nbytes <= BUFFER):
            nbytes += group[taken].block.nbytes
            taken += 1
        part, group = group[:taken], group[taken:]
        buffer = part[0].grid.backend.empty(sum(p.block.size for p in part), part[0].dtype)
        label_memory(buffer, "weights")
        at = 0
        for p in part:
            view = buffer[at : at + p.block.size].reshape(p.block.shape)
            at += p.block.size
            view[...] = p.block
            p.data = DistArray(view, p.shape, p.layout, p.grid)


def as_gradients_lie(parameters: Sequence[Parameter]) -> Order:
    """Return the parameters in the order of their gradients in memory, those without one in reverse."""
    bases: dict[int, int] = {}

    def place(indexed: tuple[int, Parameter]) -> tuple[float, int]:
        index, p = indexed
        like = p.data if p.storage.axes else p.grad  # parts lie as the values do
        block = None if like is None else like.resident
        if like is not None and block is None:
            return math.inf, index
        if block is None or block.base is None:
            return math.inf, -index  # gradients arrive in reverse order of use
        base = bases.setdefault(id(block.base), len(bases))
        return base, address(block)

    return [p for _, p in sorted(enumerate(parameters), key=place)]


def runs(entries: Sequence[Entry]) -> Iterator[Run]:
    """Yield the entries that have gradients and are not empty, joined where they and their gradients lie side by side.

    Values and gradients that come from a disk are asked for a run at a time.
    """
    chain: list[tuple[Entry, Block, Block]] = []
    for entry in entries:
        value, grad = entry.parameter.updated
        if grad is None or not grad.size:
            continue
        if chain:
            last, before, other = chain[-1]
            alike = (last.dtype, last.group) == (entry.dtype, entry.group)
            if not alike or not follows(before, value) or not follows(other, grad):
                yield _run(chain)
                chain.clear()
        chain.append((entry, value, grad))
    if chain:
        yield _run(chain)


def _run(chain: Sequence[tuple[Entry, Block, Block]]) -> Run:
    return Run([e for e, _, _ in chain], joined([v for _, v, _ in chain]), joined([g for _, _, g in chain]))


def segments(run: Run) -> Iterator[tuple[Entry, slice, int]]:
    """Yield the entries of a run, where their elements lie in it, and which of an entry's is the first."""
    at, skipped = 0, run.at
    for entry in run.entries:
        n = min(entry.size - skipped, run.g.size - at)
        yield entry, slice(at, at + n), skipped
        at, skipped = at + n, 0
