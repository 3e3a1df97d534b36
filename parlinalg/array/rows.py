"""Reading and writing elements by index arrays: requests go to the ranks that hold the elements, and values back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.array.align import broadcast_shape, narrowed, spread
from parlinalg.array.core import DistArray
from parlinalg.backend import Backend
from parlinalg.exchange import piece_size
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, cut_lengths, span_of

Shape = tuple[int, ...]
Index = Any
"""Integers, the same on all ranks in a NumPy array, or a DistArray."""
ADDED = {"int32", "int64", "uint32", "uint64", "float16", "float32", "float64"}
"""Dtypes of which CuPy's `add.at` takes arrays."""


class Owners:
    """The places of the elements of an array that index arrays for some of its dims choose.

    Attributes
    ----------
    axes : tuple of str
        The axes of more than one rank that cut the indexed dims, in the grid's order.
    rest : list of int
        The other dims.
    """

    def __init__(self, grid: Grid, layout: Layout, shape: Shape, dims: Sequence[int]) -> None:
        self.grid, self.layout, self.whole, self.dims = grid, layout, shape, list(dims)
        self.rest = [d for d in range(len(shape)) if d not in dims]
        cutting = {x for d in dims for x in layout.dims[d] if grid.sizes[x] > 1}
        self.axes: Cut = tuple(x for x in grid.axes if x in cutting)
        self.shape = tuple(shape[d] for d in dims)

    def split(self, numbers: np.ndarray) -> np.ndarray:
        """Return for each element (its number in C order over the indexed dims) the rank among `axes` that holds it."""
        sizes = self.grid.sizes
        strides = {x: span_of(self.axes[i + 1 :], sizes) for i, x in enumerate(self.axes)}
        dtype = _short(span_of(self.axes, sizes))
        owner = np.zeros(numbers.shape, dtype)
        for d, index in zip(self.dims, self._indices(numbers), strict=True):
            cut = tuple(x for x in self.layout.dims[d] if sizes[x] > 1)
            stops = np.cumsum(cut_lengths(self.whole[d], cut, sizes))
            rank, left = np.zeros(len(stops), dtype), np.arange(len(stops))
            for axis in reversed(cut):
                left, at = np.divmod(left, sizes[axis])
                rank += (at * strides[axis]).astype(dtype)
            if len(stops) > FEW:
                owner += rank[np.searchsorted(stops, index, side="right")]
            else:  # to compare with each is faster; steps between ranks add up, modulo 2⁸
                owner += rank[0]
                for stop, step in zip(stops[:-1], np.diff(rank), strict=True):
                    owner += (index >= stop) * step
        return owner

    def local(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the index arrays of this rank's block for elements that lie there."""
        starts = [r.start for r in self.grid.block(self.layout, self.whole)]
        return tuple(i - starts[d] if starts[d] else i for d, i in zip(self.dims, self._indices(numbers), strict=True))

    def first(self) -> np.ndarray:
        """Return the number of the first element that lies in this rank's block, or none."""
        held = self.grid.block(self.layout, self.whole)
        if not all(held[d] for d in self.dims):
            return np.zeros(0, np.int64)
        return np.array([np.ravel_multi_index([held[d].start for d in self.dims], self.shape)])

    def _indices(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        if len(self.dims) == 1:
            return (numbers,)
        return np.unravel_index(numbers, self.shape) if numbers.size else (numbers,) * len(self.dims)

    def front(self, block: Any) -> Any:
        """Return this rank's block with the indexed dims first."""
        return block.transpose((*self.dims, *self.rest))


def numbered(owners: Owners, arrays: Sequence[Index], layout: Layout, shape: Shape, *, looked_up: bool) -> np.ndarray:
    """Return the numbers of the elements that this rank's part of the index chooses, flat.

    Without `looked_up` numbers out of bounds are forgiven, as NumPy does where index arrays choose no element.

    Raises
    ------
    IndexError
        On all ranks, if an index is out of bounds on any.
    """
    grid = owners.grid
    held = tuple(slice(r.start, r.stop) for r in grid.block(layout, shape)) if grid.inside else ()
    number: np.ndarray | None = None
    problem = ""
    mine = grid.block_shape(layout, shape)
    for d, n, index in zip(owners.dims, owners.shape, arrays, strict=True):
        if isinstance(index, DistArray):
            index = index.summed().redistribute(narrowed(layout, index.shape, shape))
            known = block = grid.backend.to_host(index.block)
        else:
            known = np.asarray(index)
            block = np.broadcast_to(index, shape)[held] if grid.inside else np.zeros(mine, np.int64)
        low = known.min() if known.size else 0
        if looked_up and known.size and (low < -n or known.max() >= n):
            bad = known[(known < -n) | (known >= n)][0]
            problem = problem or f"index {bad} is out of bounds for dim {d} of size {n}"
        block = block.astype(np.int64, copy=False)
        block = np.where(block < 0, block + n, block) if low < 0 else block
        number = block if number is None else number * n + block
    if any(isinstance(index, DistArray) for index in arrays):
        problem = next(filter(None, grid.world.share(problem, others="alike")), "")
    if problem:
        raise IndexError(problem)
    return np.broadcast_to(np.zeros((), np.int64) if number is None else number, mine).reshape(-1)


def fetch(a: DistArray, dims: Sequence[int], arrays: Sequence[Index]) -> DistArray:
    """Return `a[arrays]` over `dims`, as [dims of the broadcast index, other dims of a].

    The index's dims are cut as a distributed index is where the other dims of `a` are not cut by these axes, and by the
    axes that cut the indexed dims.  A rank receives what its part of the result lacks, and requests of eight bytes.
    """
    grid = a.grid
    if a.layout.partial:
        a = a.summed()
    owners = Owners(grid, a.layout, a.shape, dims)
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
    numbers = numbered(owners, arrays, index, shape, looked_up=all(shape))
    if not grid.inside:
        return DistArray(grid.backend.zeros(grid.block_shape(layout, full), a.dtype), full, layout, grid)
    front = owners.front(a.block)
    held = front.shape[len(owners.dims) :]
    if not owners.axes:
        rows = _rows(front, owners.local(numbers), grid)
        return DistArray(rows.reshape(grid.block_shape(layout, full)), full, layout, grid)
    comm, width = grid.comm(owners.axes), math.prod(held)
    out = grid.backend.empty((len(numbers), *held), a.dtype)
    most = math.prod(index.block_shape(shape, grid.sizes, dict.fromkeys(grid.sizes, 0)))
    step = max(1, piece_size(most * max(1, width)) // max(1, width))
    starts = range(0, most, step)
    requests = imagined_requests(owners, arrays, index, shape, numbers) if comm.imagined else []
    for i, start in enumerate(starts):
        part, goal = numbers[start : start + step], out[start : start + step]
        shares = by_owner(owners.split(part), comm.size)
        own, shares[comm.rank] = shares[comm.rank], shares[comm.rank][:0]
        order, counts = np.concatenate(shares), [len(share) for share in shares]
        here = [np.array_split(each, len(starts))[i] for each in requests]
        asked, received = trade(comm, part[order], counts, here)
        rows = _rows(front, owners.local(asked), grid)
        got = grid.backend.empty((len(order), *held), a.dtype)
        comm.all_to_all(rows, [int(n) * width for n in received], got, [int(n) * width for n in counts])
        goal[on_device(order, grid.backend)] = got
        goal[on_device(own, grid.backend)] = _rows(front, owners.local(part[own]), grid)
    return DistArray(out.reshape(grid.block_shape(layout, full)), full, layout, grid)


def _rows(front: Any, here: tuple[np.ndarray, ...], grid: Grid) -> Any:
    """Return the rows at these indices of the first dims of a block, which all lie in it, without gaps."""
    if len(here) == 1 and isinstance(front, np.ndarray) and front.flags.c_contiguous:
        return front.take(here[0], axis=0, mode="clip")  # faster than an index
    return grid.backend.xp.ascontiguousarray(front[tuple(on_device(i, grid.backend) for i in here)])


FEW = 16
"""Ranks, or pieces of a dim, up to which elements are compared with each of them."""


def _short(ranks: int) -> type[np.unsignedinteger[Any]]:
    """Return the dtype of numbers of ranks: of short ones passes are fast, and sorts count."""
    return np.uint8 if ranks <= 1 << 8 else np.uint16 if ranks <= 1 << 16 else np.uintp


def by_owner(owner: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return for each rank the places of the elements that it owns, in their order."""
    short = owner.astype(_short(ranks), copy=False)
    if ranks <= FEW:
        return [np.flatnonzero(short == rank) for rank in range(ranks)]
    return np.split(np.argsort(short, kind="stable"), np.cumsum(np.bincount(short, minlength=ranks))[:-1])


def imagined_requests(
    owners: Owners, arrays: Sequence[Index], index: Layout, shape: Shape, numbers: np.ndarray, *, own: bool = False
) -> list[np.ndarray]:
    """Return the numbers of this rank's elements that each rank among `owners.axes` asks for, if ranks are imagined.

    An index that all ranks have tells what they ask for.  Of a distributed one only this rank's part is known: each
    rank is taken to ask this rank for as many elements as this rank asks of it.

    Parameters
    ----------
    index : Layout
        Of the index's dims.
    numbers : array of int
        The elements that this rank's part of the index chooses.
    own : bool
        True if a rank sends requests to itself too.
    """
    grid, comm = owners.grid, owners.grid.comm(owners.axes)
    if any(isinstance(each, DistArray) for each in arrays):
        owner = owners.split(numbers)
        here = numbers[owner == comm.rank] if (owner == comm.rank).any() else owners.first()
        found = [np.resize(here, n if here.size else 0) for n in np.bincount(owner, minlength=comm.size)]
    else:
        every = numbered(owners, arrays, Layout(*[None] * len(shape)), shape, looked_up=False)
        here = np.flatnonzero(owners.split(every) == comm.rank)
        places = Owners(grid, index, shape, range(len(shape)))
        if places.axes == owners.axes:
            found = [every[here[share]] for share in by_owner(places.split(here), comm.size)]
        else:  # one element, for which all ask
            found = [every[here]] * comm.size
    return [each if own or rank != comm.rank else each[:0] for rank, each in enumerate(found)]


def trade(
    comm: Any, values: np.ndarray, counts: Sequence[int] | np.ndarray, imagined: Sequence[np.ndarray] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Send each rank its run of `values`; return what came, by rank, and how much from each.

    From ranks that are imagined comes what `imagined` has for each.
    """
    sent = np.array(counts, np.int64)
    received = np.empty_like(sent)
    ones = [1] * comm.size
    comm.all_to_all(sent, ones, received, ones)
    if imagined:
        received[:] = [len(each) for each in imagined]
    got = np.empty((int(received.sum()), *values.shape[1:]), values.dtype)
    width = math.prod(values.shape[1:])
    comm.all_to_all(
        np.ascontiguousarray(values), [int(n) * width for n in sent], got, [int(n) * width for n in received]
    )
    if imagined:
        got[:] = np.concatenate(imagined)
    return got, received


def on_device(array: np.ndarray, backend: Backend) -> Any:
    """Return an array of the host where the backend computes: itself where that is the host."""
    return array if backend.host_memory else backend.from_host(array)


def store(
    a: DistArray, dims: Sequence[int], arrays: Sequence[Index], value: Any, *, add: bool = False, looked_up: bool = True
) -> None:
    """Write `a[arrays] = value` over `dims`; of elements that are chosen twice the last one stays, in C order.

    With `add` the values are added to the elements, each as often as it is chosen.

    Parameters
    ----------
    value : scalar, or DistArray
        It broadcasts to [dims of the broadcast index, other dims of a].
    looked_up : bool
        As of `numbered`.
    """
    grid = a.grid
    owners = Owners(grid, a.layout, a.shape, dims)
    shape = broadcast_shape([v.shape for v in arrays], "index arrays", IndexError)
    lined = (owners.axes, *[()] * (len(shape) - 1)) if shape else ()
    index = Layout(*lined)
    layout = Layout(*index.dims, *(a.layout.dims[d] for d in owners.rest))
    full = (*shape, *(a.shape[d] for d in owners.rest))
    if isinstance(value, DistArray):
        if broadcast_shape([value.shape, full], "setting elements") != full:
            raise ValueError(f"a value of shape {value.shape} does not broadcast to {full}")
        value = value.redistribute(narrowed(layout, value.shape, full))
    numbers = numbered(owners, arrays, index, shape, looked_up=looked_up)
    if not grid.inside:
        return
    front = owners.front(a.block)
    held = front.shape[len(owners.dims) :]
    rows = None
    if isinstance(value, DistArray):
        rows = grid.backend.xp.broadcast_to(value.block, grid.block_shape(layout, full))
        rows = rows.reshape((len(numbers), *held)).astype(a.dtype, copy=False)
    if shape and owners.axes:
        comm, width = grid.comm(owners.axes), math.prod(held)
        shares = by_owner(owners.split(numbers), comm.size)
        order, counts = np.concatenate(shares), [len(share) for share in shares]
        requests = imagined_requests(owners, arrays, index, shape, numbers, own=True) if comm.imagined else []
        numbers, received = trade(comm, numbers[order], counts, requests)
        if rows is not None:
            sent = grid.backend.xp.ascontiguousarray(rows[on_device(order, grid.backend)])
            rows = grid.backend.empty((len(numbers), *held), a.dtype)
            comm.all_to_all(sent, [int(n) * width for n in counts], rows, [int(n) * width for n in received])
    elif owners.axes:  # one element, which all ranks know
        mine = owners.split(numbers) == grid.comm(owners.axes).rank
        numbers, rows = numbers[mine], None if rows is None else rows[on_device(mine, grid.backend)]
    if rows is not None and not (grid.backend.host_memory or add):  # a GPU writes in any order
        last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        numbers, rows = numbers[last], rows[on_device(last, grid.backend)]
    a.writable()
    front, here = owners.front(a.block), tuple(on_device(i, grid.backend) for i in owners.local(numbers))
    written = value if rows is None else rows
    if add:
        _add_at(grid.backend, front, here, written)
    else:
        front[here] = written


def _add_at(backend: Any, block: Any, index: Any, values: Any) -> None:
    """Add values to the elements of a block, each as often as it is chosen."""
    xp, dtype = backend.xp, block.dtype
    if backend.host_memory or dtype.name in ADDED:
        xp.add.at(block, index, values)
    elif dtype.kind == "c":
        xp.add.at(block.real, index, values.real)
        xp.add.at(block.imag, index, values.imag)
    else:  # bfloat16
        total = backend.zeros(block.shape, np.float32)
        xp.add.at(total, index, values.astype(np.float32))
        block += total.astype(dtype)
