"""Parameters side by side in flat buffers, and what of them one rank updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.views import address, flat, follows, joined
from parlinalg.layout import Cut

Block = Any
Order = list[Parameter]

#: Bytes of a flat buffer of values: moving there takes no more memory than one at a time.
BUFFER = 1 << 26


@dataclass
class Entry:
    """What a rank updates of a parameter: its whole block, or its shard.

    Attributes
    ----------
    parameter : Parameter
    data : DistArray
        The parameter's value, which the optimizer knows.
    size : int
        The number of elements that are updated.
    axes : tuple of str
    lengths : tuple of int
        The axes over which the parameter is sharded, and the elements of each rank along them; none if it is not.
    start : int
        Where they begin in the flattened block.
    dtype : numpy.dtype
        That of the states.
    names : tuple of str
        The states.
    writes : int
        The parameter's `writes` that the states know of.
    group : int
        The number of its parameter group.
    """

    parameter: Parameter
    data: DistArray
    size: int
    axes: Cut
    lengths: tuple[int, ...]
    start: int
    dtype: np.dtype[Any]
    names: tuple[str, ...]
    writes: int = 0
    group: int = 0

    @property
    def value(self) -> Block:
        """What is updated of the value, a flat view."""
        return flat(self.data.block)[self.start : self.start + self.size]

    @property
    def span(self) -> tuple[Cut, tuple[int, ...]]:
        """How the block is shared between ranks; the same on all that share it."""
        return self.axes, self.lengths

    @property
    def current(self) -> bool:
        """Whether the parameter's value and shard still are those of this entry."""
        return self.parameter.data is self.data and span(self.parameter) == self.span

    def whole(self, block: Block) -> DistArray:
        """A state as an array, which is cut as the parameter is, from this rank's flat part.  Collective."""
        data = self.data
        if self.axes:
            part, block = block, data.grid.backend.empty(sum(self.lengths), block.dtype)
            data.grid.comm(self.axes).all_gather(part, block, self.lengths)
        return DistArray(block.reshape(data.block.shape), data.shape, data.layout, data.grid)


@dataclass
class Run:
    """What is updated of parameters that lie side by side, their gradients too: flat views of both and of the states.

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

    def put_back(self) -> None:
        """Values that rest elsewhere take what was changed; they have runs of their own."""
        first = self.entries[0]
        if first.data.RESTS:
            first.data.put(self.value, first.start + self.at)  # type: ignore[attr-defined]

    @property
    def p(self) -> Block:
        """What `update` changes: the values, or the master of more bits that they are rounded from."""
        return self.states.get("master", self.value)


def span(parameter: Parameter) -> tuple[Cut, tuple[int, ...]]:
    """How a parameter's block is shared between ranks: over which axes, and how many elements each has."""
    shard = parameter.shard
    return ((), ()) if shard is None else (shard.axes, shard.lengths)


def flatten(
    parameters: Sequence[Parameter], names: tuple[str, ...], master: np.dtype[Any] | None,
    groups: Mapping[int, int] | None = None,
) -> list[Entry]:  # fmt: skip
    """Entries of the parameters, those of each dtype one after the other in the order in which their gradients lie.

    Whole parameters move into flat buffers; sharded ones lie in those of the shards' owner, and those that rest
    elsewhere stay.

    Parameters
    ----------
    names : tuple of str
        The states.
    master : numpy.dtype or None
        Parameters of fewer bits have a state "master" of this dtype.
    groups : dict of int to int, optional
        The number of the parameter group of each parameter, by its identity.
    """
    of = groups or {}
    alike: dict[tuple[int, str, bool], Order] = {}
    for p in as_gradients_lie(parameters):
        alike.setdefault((id(p.grid.backend), p.dtype.str, p.shard is not None), []).append(p)
    entries = []
    for group in alike.values():
        if group[0].shard is None:
            _move([p for p in group if not p.data.RESTS])
        dtype, mastered = states_of(group[0].dtype, master)
        extra = ("master",) if mastered else names[:0]
        for p in group:
            start = 0 if p.shard is None else p.shard.start
            kept = (*names, *extra)
            entries.append(
                Entry(p, p.data, p.updated[0].size, *span(p), start, dtype, kept, p.writes, of.get(id(p), 0))
            )
    return entries


def states_of(dtype: np.dtype[Any], master: np.dtype[Any] | None) -> tuple[np.dtype[Any], bool]:
    """The dtype of the states of parameters of `dtype`, and whether a master is one of them."""
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
        at = 0
        for p in part:
            view = buffer[at : at + p.block.size].reshape(p.block.shape)
            at += p.block.size
            view[...] = p.block
            p.data = DistArray(view, p.shape, p.layout, p.grid)


def as_gradients_lie(parameters: Sequence[Parameter]) -> Order:
    """The parameters in the order of their gradients in memory, those without one in reverse."""
    bases: dict[int, int] = {}

    def place(indexed: tuple[int, Parameter]) -> tuple[float, int]:
        index, p = indexed
        if p.shard is None and p.grad is not None and p.grad.RESTS:
            return math.inf, index
        lies = p.block if p.shard is not None else None if p.grad is None else p.grad.block
        if lies is None or lies.base is None:
            return math.inf, -index  # gradients arrive in reverse order of use
        base = bases.setdefault(id(lies.base), len(bases))
        return base, address(lies)

    return [p for _, p in sorted(enumerate(parameters), key=place)]


def runs(entries: Sequence[Entry]) -> Iterator[Run]:
    """The entries that have gradients and are not empty, joined where they and their gradients lie side by side.

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
