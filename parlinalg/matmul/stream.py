"""Products in bounded memory: panels of the operands arrive while the last ones are multiplied (SUMMA).

One matrix stays where the local product needs it; the other two are taken in panels of the dim they share.  With a
stationary y the panels run over k: whoever owns a panel of x broadcasts it along the axes that cut k at rest only, and
likewise for w (van de Geijn and Watts, SUMMA, 1997).  With a stationary x (or w) they run over n (or m), and each panel
of y is reduced to where it rests.  Broadcasts are nonblocking and one panel ahead.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.backend.blas import add_product
from parlinalg.backend.halves import work_dtype
from parlinalg.comm import Handle
from parlinalg.errors import PlanError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, cut_lengths, index_of
from parlinalg.matmul.local import as_matrix, gemm
from parlinalg.moves import moves
from parlinalg.plan import Plan
from parlinalg.redistribute import Move, carry, check_block_replicas, redistribute
from parlinalg.units import parse_bytes

Block = Any
Shape = tuple[int, ...]


def choose(
    plan: Plan, x: Shape, w: Shape, dtype: np.dtype[Any], memory: int | str, grid: Grid
) -> tuple[BufferSize, int]:
    """Return the fastest kernel that takes at most `memory` bytes a rank beside the blocks at rest, and its width.

    The plan says in which layouts x and w, of these global shapes, are; the dtype is the product's.  Without such a
    kernel a PlanError says the least that would do.
    """
    limit = parse_bytes(memory)
    kernels = buffers(plan, x, w, grid)
    fitting = [k for k in kernels if k.elements(1) * dtype.itemsize <= limit]
    if not fitting:
        least = min(k.elements(1) for k in kernels) * dtype.itemsize
        raise PlanError(
            f"this product needs at least {least} bytes a rank beside its blocks at rest; memory={memory!r} is {limit}"
        )
    most = limit // dtype.itemsize
    best = min(fitting, key=lambda k: (k.panels(most), kernels.index(k)))
    return best, best.width(most)


@dataclass(frozen=True)
class BufferSize:
    """Elements a kernel holds on the fullest rank beside the blocks at rest: `whole`, and `line` a unit of width.

    stationary : "x", "w", "y" or None for gathered panels
    extent : the length of the streamed dim
    """

    stationary: str | None
    extent: int
    whole: int
    line: int

    def elements(self, width: int) -> int:
        return self.whole + self.line * min(width, self.extent)

    def width(self, limit: int) -> int:
        """Return the widest panel that `limit` elements allow."""
        return max(1, min(self.extent, (limit - self.whole) // self.line if self.line else self.extent))

    def panels(self, limit: int) -> int:
        return -(-self.extent // self.width(limit)) if self.stationary and self.extent else 0


def buffers(plan: Plan, x: Shape, w: Shape, grid: Grid) -> list[BufferSize]:
    """Return the kernels for a product, the preferred first; the same on all ranks.

    For matrices that rest evenly cut this is what `parlinalg.matmul.planner.Needs` says of a plan.  Beside it a move
    holds two pieces, each of `tunables.MOVE_BUFFER` elements or a sixteenth of its larger block, and a stationary y a
    tile of at most a sixteenth of its size.
    """
    shape = plan.result_shape(x, w)
    fullest = dict.fromkeys(grid.sizes, 0)  # the first rank's pieces are the longest of every dim
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)

    def volume(layout: Layout, of: Shape) -> int:
        return math.prod(layout.block_shape(of, grid.sizes, fullest))

    def extent(layout: Layout, of: Shape, dim: int) -> int:
        return layout.block_shape(of, grid.sizes, fullest)[dim]

    full = {
        "x": volume(plan.x_work, x) if moves(plan.x, plan.x_work, grid.sizes) else 0,
        "w": volume(plan.w_work, w) if moves(plan.w, plan.w_work, grid.sizes) else 0,
        "y": volume(plan.y_work, shape) if moves(plan.y_work, plan.y, grid.sizes) else 0,
    }
    found = [BufferSize(None, 0, sum(full.values()), 0)]
    streams = (
        ("y", (("x", plan.x, plan.x_work, x, nb + nm), ("w", plan.w, plan.w_work, w, nb))),
        ("x", (("w", plan.w, plan.w_work, w, nb + nk), ("y", plan.y, plan.y_work, shape, nb + nm))),
        ("w", (("x", plan.x, plan.x_work, x, nb), ("y", plan.y, plan.y_work, shape, nb))),
    )
    for stationary, moving in streams:
        whole, line, length = full[stationary], 0, 0
        for name, rest, work, of, dim in moving:
            length = extent(work, of, dim)
            if full[name] and not _nested(rest, work, dim, grid):
                whole += full[name]
            elif full[name] and length:
                line += 2 * full[name] // length
        found.append(BufferSize(stationary, length, whole, line))
    return found


def _nested(rest: Layout, work: Layout, dim: int, grid: Grid) -> bool:
    """Return True if the pieces of `dim` at rest are pieces of its pieces at work, by axes that cut nothing else."""
    rest, work = grid.effective(rest), grid.effective(work)
    have, want = rest.dims[dim], work.dims[dim]
    return have[: len(want)] == want and not set(have[len(want) :]) & set(work.cut_axes)


@dataclass
class Operand:
    """An operand of which panels along `dim` are brought from rest to work."""

    block: Block
    rest: Layout
    work: Layout
    shape: Shape
    dim: int
    grid: Grid
    order: tuple[int, ...] | None
    tags: tuple[int, int]
    """The tags of even and of odd panels.  Ranks fetch different numbers of panels where the dim is uneven: so tags are
    taken once an operand, on all ranks alike, not once a panel."""
    fetched: int = 0

    @classmethod
    def of(cls, array: DistArray, work: Layout, dim: int) -> Operand:
        """Return the array as it lies in memory; one whose pieces do not nest is brought to work whole first."""
        grid, order = array.grid, array.order
        block, rest, shape = array.block, grid.effective(array.layout), array.shape
        work = grid.effective(work)
        if grid.world.checked:
            check_block_replicas(block, rest, grid)
        if not _nested(rest, work, dim, grid):
            block, rest = array.block_in(work), work
        if order is not None:
            block, rest, work = block.transpose(order), rest.permuted(order), work.permuted(order)
            shape, dim = tuple(shape[d] for d in order), order.index(dim)
        return cls(block, rest, work, shape, dim, grid, order, (grid.ticket(), grid.ticket()))

    @property
    def outer(self) -> Cut:
        """The axes along which a panel has one owner."""
        return self.rest.dims[self.dim][len(self.work.dims[self.dim]) :]

    def owned_lengths(self) -> list[int]:
        """Return the lengths of the owners' pieces of this rank's stretch of the dim."""
        stretch = len(self.grid.block(self.work, self.shape)[self.dim])
        return cut_lengths(stretch, self.outer, self.grid.sizes)

    def fetch(self, panel: range) -> Move:
        """Start to bring a panel (indices within this rank's stretch, all of one owner) to work.

        Its owners first gather it among themselves, and wait for that: they must post the broadcast when the others do,
        since the next panel's owners may be others.  At most two panels are on their way.
        """
        self.fetched += 1
        return Move(self._fetch(panel, self.tags[self.fetched % 2]))

    def _fetch(self, panel: range, tag: int) -> Generator[Handle, None, Block]:
        grid, dim = self.grid, self.dim
        owner, start = owner_of(panel, self.owned_lengths())
        shape = (*self.shape[:dim], len(panel), *self.shape[dim + 1 :])
        rest, work = self.rest.with_dim(dim, None), self.work.with_dim(dim, None)
        if index_of(self.outer, grid.sizes, grid.coords) == owner:
            lead = (slice(None),) * dim
            mine = self.block[(*lead, slice(panel.start - start, panel.stop - start))]
            out = yield from carry(mine, rest, work, shape, grid, wait=bool(self.outer), tag=tag)
            if self.outer and not out.flags.c_contiguous:
                out = out.copy(order="C")
        else:
            out = grid.backend.empty(grid.block_shape(work, shape), self.block.dtype)
        if self.outer:
            yield grid.comm(self.outer).broadcast(out, owner, wait=False)
        return out if self.order is None else out.transpose(tuple(self.order.index(d) for d in range(out.ndim)))


def owner_of(panel: range, lengths: list[int]) -> tuple[int, int]:
    """Return which of these pieces of a stretch a panel lies in, and where that piece starts."""
    starts = accumulate(lengths, initial=0)
    return next((i, start) for i, (start, n) in enumerate(zip(starts, lengths)) if panel.start < start + n)


def panels(width: int, *lengths: list[int]) -> Iterator[range]:
    """Cut a stretch where any of these lists of pieces is cut, and to at most `width`.

    >>> list(panels(4, [5, 4], [3, 3, 3]))
    [range(0, 3), range(3, 5), range(5, 6), range(6, 9)]
    """
    ends = set()
    for pieces in lengths:
        at = 0
        for length in pieces:
            at += length
            ends.add(at)
    start = 0
    for end in sorted(ends):
        while start < end:
            stop = min(end, start + width)
            yield range(start, stop)
            start = stop


def stream(plan: Plan, x: DistArray, w: DistArray, stationary: str, width: int) -> Block:
    """Return this rank's block of y, with one of x, w and y stationary and the others in panels of at most `width`."""
    dtype, shape = np.result_type(x.dtype, w.dtype), plan.result_shape(x.shape, w.shape)
    if stationary == "y":
        return _over_k(plan, x, w, shape, dtype, width)
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    if stationary == "x":
        xs = as_matrix(x.block_in(plan.x_work), nb, nm)
        right = Operand.of(w, plan.w_work, nb + nk)
        return _streamed(plan, shape, dtype, width, right, nb + nm, lambda ws: gemm(xs, as_matrix(ws, nb, nk), dtype))
    ws = as_matrix(w.block_in(plan.w_work), nb, nk)
    left = Operand.of(x, plan.x_work, nb)
    return _streamed(plan, shape, dtype, width, left, nb, lambda xs: gemm(as_matrix(xs, nb, nm), ws, dtype))


def _over_k(plan: Plan, x: DistArray, w: DistArray, shape: Shape, dtype: Any, width: int) -> Block:
    grid = x.grid
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    left, right = Operand.of(x, plan.x_work, nb + nm), Operand.of(w, plan.w_work, nb)
    local = grid.block_shape(plan.y_work, shape)
    y = grid.backend.zeros(local, work_dtype(dtype))
    target = as_matrix(y, nb, nm)
    for xs, ws in _ahead(panels(width, left.owned_lengths(), right.owned_lengths()), left, right):
        add_product(target, as_matrix(xs, nb, nm), as_matrix(ws, nb, nk))
        del xs, ws  # before the next panels but one are asked for
    if y.dtype != dtype:
        y = y.astype(dtype)
    return redistribute(y, plan.y_work, plan.y, shape, grid, owned=True)


def _ahead(over: Iterator[range], *operands: Operand) -> Iterator[list[Block]]:
    """Yield the operands' panels, while the next ones are already on their way."""
    pending: list[Move] | None = None
    for panel in over:
        following = [o.fetch(panel) for o in operands]
        if pending is not None:
            yield [move.wait() for move in pending]
        pending = following
    if pending is not None:
        yield [move.wait() for move in pending]


def _streamed(
    plan: Plan, shape: Shape, dtype: Any, width: int, operand: Operand, dim: int, multiply: Any
) -> Block:  # fmt: skip
    """Return y in panels along `dim`, each reduced to where it rests as soon as it is computed."""
    grid = operand.grid
    work, rest = grid.effective(plan.y_work), grid.effective(plan.y)
    nested = _nested(plan.y, plan.y_work, dim, grid)
    left = tuple(a for a in work.partial if a not in rest.cut_axes)  # summed at the end, over all panels at once
    goal = rest.with_partial(left) if nested else work
    outer = goal.dims[dim][len(work.dims[dim]) :]
    stretch = len(grid.block(work, shape)[dim])
    lengths = cut_lengths(stretch, outer, grid.sizes)
    mine = index_of(outer, grid.sizes, grid.coords)
    y = grid.backend.empty(grid.block_shape(goal, shape), dtype)
    local, lead = list(grid.block_shape(work, shape)), (slice(None),) * dim
    ranges = list(panels(width, operand.owned_lengths(), lengths))
    for panel, found in zip(ranges, _ahead(iter(ranges), operand), strict=True):
        local[dim] = len(panel)
        term = multiply(found.pop()).reshape(local)
        owner, start = owner_of(panel, lengths)
        term = _reduce_to(term, work, goal, outer, owner, (*shape[:dim], len(panel), *shape[dim + 1 :]), dim, grid)
        if owner == mine:
            y[(*lead, slice(panel.start - start, panel.stop - start))] = term
        del term
    return y if goal == rest else redistribute(y, goal, rest, shape, grid, owned=True)


def _reduce_to(
    term: Block, work: Layout, goal: Layout, outer: Cut, owner: int, shape: Shape, dim: int, grid: Grid
) -> Block:
    """Sum a panel of y, partial as at work: axes of `outer` leave it with their owner, the others as `goal` says."""
    here, there = work.with_dim(dim, None), goal.with_dim(dim, None)
    summed = tuple(a for a in outer if a in work.partial)
    if summed:
        counts = [0] * math.prod(grid.sizes[a] for a in summed)
        at = _coordinates(owner, outer, grid)
        to = index_of(summed, grid.sizes, at)
        counts[to] = term.size
        holds = index_of(summed, grid.sizes, grid.coords) == to
        out = grid.backend.empty(term.shape if holds else (0,), term.dtype)
        grid.comm(summed).reduce_scatter(term if term.flags.c_contiguous else term.copy(order="C"), out, counts)
        if not holds:
            return out
        term, here = out, here.without(summed)
    return Move(carry(term, here, there, shape, grid, wait=True, owned=True)).wait()  # not all ranks may be here


def _coordinates(index: int, axes: Cut, grid: Grid) -> dict[str, int]:
    at = {}
    for axis in reversed(axes):
        index, at[axis] = divmod(index, grid.sizes[axis])
    return at
