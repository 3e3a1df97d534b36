"""Reading and writing elements by index arrays: requests go to the ranks that hold the elements, and values back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.array.align import broadcast_shape, narrowed, spread
from parlinalg.array.core import DistArray
from parlinalg.exchange import piece_size
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, cut_lengths, span_of

Shape = tuple[int, ...]
Index = Any
"""Integers, the same on all ranks in a NumPy array, or a DistArray."""


class Owners:
    """The places of the elements of an array that index arrays for some of its dims choose.

    Attributes
    ----------
    axes : tuple of str
        The axes of more than one rank that cut the indexed dims, in the grid's order.
    rest : list of int
        The other dims.
    """

    def __init__(self, a: DistArray, dims: Sequence[int]) -> None:
        sizes = a.grid.sizes
        self.a, self.dims = a, list(dims)
        self.rest = [d for d in range(a.ndim) if d not in dims]
        cutting = {x for d in dims for x in a.layout.dims[d] if sizes[x] > 1}
        self.axes: Cut = tuple(x for x in a.grid.axes if x in cutting)
        self.shape = tuple(a.shape[d] for d in dims)

    def split(self, numbers: np.ndarray) -> np.ndarray:
        """Return for each element (its number in C order over the indexed dims) the rank among `axes` that holds it."""
        sizes = self.a.grid.sizes
        strides = {x: span_of(self.axes[i + 1 :], sizes) for i, x in enumerate(self.axes)}
        owner = np.zeros(numbers.shape, np.intp)
        for d, index in zip(self.dims, self._indices(numbers), strict=True):
            cut = tuple(x for x in self.a.layout.dims[d] if sizes[x] > 1)
            stops = np.cumsum(cut_lengths(self.a.shape[d], cut, sizes))
            if len(stops) > 16:
                piece = np.searchsorted(stops, index, side="right")
            else:  # to compare with each is faster
                piece = np.zeros(index.shape, np.intp)
                for stop in stops[:-1]:
                    piece += index >= stop
            rank, left = np.zeros(len(stops), np.intp), np.arange(len(stops))
            for axis in reversed(cut):
                left, at = np.divmod(left, sizes[axis])
                rank += at * strides[axis]
            owner += rank[piece]
        return owner

    def local(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the index arrays of this rank's block for elements that lie there."""
        starts = [r.start for r in self.a.grid.block(self.a.layout, self.a.shape)]
        return tuple(i - starts[d] if starts[d] else i for d, i in zip(self.dims, self._indices(numbers), strict=True))

    def _indices(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        if len(self.dims) == 1:
            return (numbers,)
        return np.unravel_index(numbers, self.shape) if numbers.size else (numbers,) * len(self.dims)

    def front(self) -> Any:
        """Return this rank's block with the indexed dims first."""
        return self.a.block.transpose((*self.dims, *self.rest))


def numbered(owners: Owners, arrays: Sequence[Index], layout: Layout, shape: Shape) -> np.ndarray:
    """Return the numbers of the elements that this rank's part of the index chooses, flat.

    Raises
    ------
    IndexError
        On all ranks, if an index is out of bounds on any.
    """
    grid = owners.a.grid
    held = tuple(slice(r.start, r.stop) for r in grid.block(layout, shape)) if grid.inside else ()
    number: np.ndarray | None = None
    problem = ""
    nothing = np.zeros(grid.block_shape(layout, shape), np.int64)
    for d, n, index in zip(owners.dims, owners.shape, arrays, strict=True):
        if isinstance(index, DistArray):
            index = index.summed().redistribute(narrowed(layout, index.shape, shape))
            known = block = grid.backend.to_host(index.block)
        else:
            known, block = np.asarray(index), np.broadcast_to(index, shape)[held] if grid.inside else nothing
        low = known.min() if known.size else 0
        if all(shape) and known.size and (low < -n or known.max() >= n):  # NumPy forgives where none is looked up
            bad = known[(known < -n) | (known >= n)][0]
            problem = problem or f"index {bad} is out of bounds for dim {d} of size {n}"
        block = block.astype(np.int64, copy=False)
        block = np.where(block < 0, block + n, block) if low < 0 else block
        number = block if number is None else number * n + block
    if any(isinstance(index, DistArray) for index in arrays):
        problem = next(filter(None, grid.world.share(problem)), "")
    if problem:
        raise IndexError(problem)
    return nothing.reshape(-1) if number is None else np.broadcast_to(number, nothing.shape).reshape(-1)


def fetch(a: DistArray, dims: Sequence[int], arrays: Sequence[Index]) -> DistArray:
    """Return `a[arrays]` over `dims`, as [dims of the broadcast index, other dims of a].

    The index's dims are cut as a distributed index is where the other dims of `a` are not cut by these axes, and by the
    axes that cut the indexed dims.  A rank receives what its part of the result lacks, and requests of eight bytes.
    """
    grid = a.grid
    if a.layout.partial:
        a = a.summed()
    owners = Owners(a, dims)
    shape = broadcast_shape([v.shape for v in arrays], "index arrays", IndexError)
    taken = {x for d in owners.rest for x in a.layout.dims[d]}
    given: list[Cut] = [()] * len(shape)
    used: set[str] = set()
    for v in arrays:
        if isinstance(v, DistArray):
            for d, cut in enumerate(v.layout.dims):
                at = d + len(shape) - v.ndim
                if not given[at] and v.shape[d] == shape[at] and not (set(cut) & (taken | used)):
                    given[at] = cut
                    used |= set(cut)
    index = spread(shape, [x for x in owners.axes if x not in used], given)
    layout = Layout(*index.dims, *(a.layout.dims[d] for d in owners.rest))
    full = (*shape, *(a.shape[d] for d in owners.rest))
    numbers = numbered(owners, arrays, index, shape)
    if not grid.inside:
        return DistArray(grid.backend.zeros(grid.block_shape(layout, full), a.dtype), full, layout, grid)
    front = owners.front()
    held = front.shape[len(owners.dims) :]
    if not owners.axes:
        here = tuple(_on(grid, i) for i in owners.local(numbers))
        return DistArray(front[here].reshape(grid.block_shape(layout, full)), full, layout, grid)
    comm, width = grid.comm(owners.axes), math.prod(held)
    out = grid.backend.empty((len(numbers), *held), a.dtype)
    most = math.prod(index.block_shape(shape, grid.sizes, dict.fromkeys(grid.sizes, 0)))
    step = max(1, piece_size(most * max(1, width)) // max(1, width))
    for start in range(0, most, step):
        part = numbers[start : start + step]
        owner = owners.split(part)
        order, counts = by_owner(owner, comm.size)
        asked, received = trade(comm, part[order], counts)
        here = tuple(_on(grid, i) for i in owners.local(asked))
        rows = grid.backend.xp.ascontiguousarray(front[here])
        got = grid.backend.empty((len(part), *held), a.dtype)
        comm.all_to_all(rows, [int(n) * width for n in received], got, [int(n) * width for n in counts])
        out[start + _on(grid, order)] = got
    return DistArray(out.reshape(grid.block_shape(layout, full)), full, layout, grid)


def by_owner(owner: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that brings elements of the same owner together, in their own order, and how many each has."""
    short = owner.astype(np.uint8 if ranks <= 256 else np.uint16 if ranks <= 1 << 16 else np.intp)  # sorted by radix
    return np.argsort(short, kind="stable"), np.bincount(owner, minlength=ranks)


def trade(comm: Any, values: np.ndarray, counts: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Send each rank its run of `values`; return what came, by rank, and how much from each."""
    sent = np.array(counts, np.int64)
    received = np.empty_like(sent)
    ones = [1] * comm.size
    comm.all_to_all(sent, ones, received, ones)
    got = np.empty((int(received.sum()), *values.shape[1:]), values.dtype)
    width = math.prod(values.shape[1:])
    comm.all_to_all(
        np.ascontiguousarray(values), [int(n) * width for n in sent], got, [int(n) * width for n in received]
    )
    return got, received


def _on(grid: Grid, index: np.ndarray) -> Any:
    return index if grid.backend.host_memory else grid.backend.from_host(index)


def store(a: DistArray, dims: Sequence[int], arrays: Sequence[Index], value: Any, *, add: bool = False) -> None:
    """Write `a[arrays] = value` over `dims`; of elements that are chosen twice the last one stays, in C order.

    With `add` the values are added to the elements, each as often as it is chosen.

    Parameters
    ----------
    value : scalar, or DistArray
        It broadcasts to [dims of the broadcast index, other dims of a].
    """
    grid = a.grid
    owners = Owners(a, dims)
    shape = broadcast_shape([v.shape for v in arrays], "index arrays", IndexError)
    lined = (owners.axes, *[()] * (len(shape) - 1)) if shape else ()
    index = Layout(*lined)
    layout = Layout(*index.dims, *(a.layout.dims[d] for d in owners.rest))
    full = (*shape, *(a.shape[d] for d in owners.rest))
    if isinstance(value, DistArray):
        if broadcast_shape([value.shape, full], "setting elements") != full:
            raise ValueError(f"a value of shape {value.shape} does not broadcast to {full}")
        value = value.redistribute(narrowed(layout, value.shape, full))
    numbers = numbered(owners, arrays, index, shape)
    if not grid.inside:
        return
    front = owners.front()
    held = front.shape[len(owners.dims) :]
    rows = None
    if isinstance(value, DistArray):
        rows = grid.backend.xp.broadcast_to(value.block, grid.block_shape(layout, full))
        rows = rows.reshape((len(numbers), *held)).astype(a.dtype, copy=False)
    if shape and owners.axes:
        comm, width = grid.comm(owners.axes), math.prod(held)
        owner = owners.split(numbers)
        order, counts = by_owner(owner, comm.size)
        numbers, received = trade(comm, numbers[order], counts)
        if rows is not None:
            sent = grid.backend.xp.ascontiguousarray(rows[_on(grid, order)])
            rows = grid.backend.empty((len(numbers), *held), a.dtype)
            comm.all_to_all(sent, [int(n) * width for n in counts], rows, [int(n) * width for n in received])
    elif owners.axes:  # one element, which all ranks know
        mine = owners.split(numbers) == grid.comm(owners.axes).rank
        numbers, rows = numbers[mine], None if rows is None else rows[_on(grid, mine)]
    if rows is not None and not (grid.backend.host_memory or add):  # a GPU writes in any order
        last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        numbers, rows = numbers[last], rows[_on(grid, last)]
    a.writable()
    front, here = owners.front(), tuple(_on(grid, i) for i in owners.local(numbers))
    written = value if rows is None else rows
    if add:
        grid.backend.xp.add.at(front, here, written)
    else:
        front[here] = written
