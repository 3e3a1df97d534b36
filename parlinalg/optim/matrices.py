"""The matrices of parameters that an optimizer treats as wholes: where their parts rest, where they are worked on, and
the one exchange between the two.

At rest a rank has the elements that it updates: a block of the parameter, or with ZeRO's stages 1 and 2 a range of its
flattened block.  Both are rectangles of the parameter (`exchange.rectangles`).  At work a matrix lies whole on a rank
that is its home, or in slices of its longer side on all ranks, or in the blocks that its layout cuts.  These are
rectangles too, and so one all-to-all brings the elements of all matrices from rest to work, and one brings them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from parlinalg.autograd import Parameter
from parlinalg.backend import Backend
from parlinalg.comm import Comm
from parlinalg.exchange import Rect, local, meet, rect_at, rectangles, volume
from parlinalg.grid import Grid
from parlinalg.layout import Cut, span
from parlinalg.optim.flat import Entry

Block = Any


@dataclass(frozen=True)
class Matrix:
    """A matrix of a parameter.

    Attributes
    ----------
    tensor : int
        The number of the parameter.
    rect : tuple of ranges
        Its elements in the parameter: one index of each batch dim, and the other dims whole.
    inputs, outputs : tuple of int
        The lengths of the dims that are its rows, and of those that are its columns.
    """

    tensor: int
    rect: Rect
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.inputs)

    @property
    def columns(self) -> int:
        return math.prod(self.outputs)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * self.columns

    @property
    def short(self) -> int:
        """The length of the shorter side."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        """The length of the longer side."""
        return max(self.rows, self.columns)

    def slices(self, start: int, stop: int) -> list[Rect]:
        """Return the rectangles that items `start` to `stop` of the longer side consist of."""
        ahead, behind = self.rect[: -len(self.inputs) - len(self.outputs)], tuple(range(n) for n in self.outputs)
        if self.rows < self.columns:
            ahead += tuple(range(n) for n in self.inputs)
            return [ahead + rect_at(*corner) for corner in rectangles(self.outputs, start, stop)]
        return [ahead + rect_at(*corner) + behind for corner in rectangles(self.inputs, start, stop)]


def split_of(p: Parameter) -> tuple[int, int]:
    """Return the numbers of batch dims and of input dims of a parameter that is updated as matrices."""
    return (0, 1) if p.matrix is None else p.matrix


def matrices_of(number: int, shape: tuple[int, ...], matrix: tuple[int, int]) -> list[Matrix]:
    """Return the matrices of a parameter of this number and shape, which has elements; see `Parameter.matrix`."""
    batch, inputs = matrix
    whole = tuple(range(n) for n in shape[batch:])
    first, second = shape[batch : batch + inputs], shape[batch + inputs :]
    if not math.prod(shape):
        return []
    return [
        Matrix(number, tuple(range(i, i + 1) for i in at) + whole, first, second)
        for at in product(*(range(n) for n in shape[:batch]))
    ]


@dataclass(frozen=True)
class Slot:
    """A rectangle of a parameter in a flat buffer: its elements in C order, from element `at` on."""

    tensor: int
    rect: Rect
    at: int
    matrix: int = -1

    @property
    def size(self) -> int:
        return volume(self.rect)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(r) for r in self.rect)

    def overlap(self, rect: Rect) -> int:
        """Return the elements of another rectangle that are in this one."""
        return volume(meet(rect, self.rect))

    def view(self, buffer: Block) -> Block:
        """Return the rectangle in a buffer."""
        return buffer[self.at : self.at + self.size].reshape(self.shape)


Slots = list[Slot]


def packed(parts: Sequence[tuple[int, Rect, int]]) -> Slots:
    """Return the slots of rectangles, each with the numbers of its parameter and matrix, one after the other."""
    slots, at = [], 0
    for tensor, rect, matrix in parts:
        slots.append(Slot(tensor, rect, at, matrix))
        at += slots[-1].size
    return slots


def extent(slots: Slots) -> int:
    """Return the elements of a buffer that has these slots."""
    return slots[-1].at + slots[-1].size if slots else 0


# ---------------------------------------------------------------------------------------------- where they are
def resting(entries: Sequence[Entry], grid: Grid) -> list[Slots]:
    """Return for every rank of the grid the slots of what it updates."""
    found: list[list[tuple[int, Rect, int]]] = [[] for _ in range(grid.size)]
    blocks: dict[Any, list[Rect]] = {}
    for number, e in enumerate(entries):
        layout, shape = alike = e.data.layout, e.data.shape
        if alike not in blocks:
            blocks[alike] = [layout.block(shape, grid.sizes, grid.coords_of(rank)) for rank in range(grid.size)]
        for rank, (parts, block) in enumerate(zip(found, blocks[alike], strict=True)):
            parts += [(number, rect, -1) for rect in _updated(e, block, rank)]
    return [packed(parts) for parts in found]


def _updated(entry: Entry, block: Rect, rank: int) -> list[Rect]:
    """Return the rectangles that a rank of the grid updates of its block."""
    if not entry.partition.axes:
        return [block] * (volume(block) > 0)
    part = entry.parameter.storage.partition(entry.data, rank)
    lengths, first = tuple(len(r) for r in block), tuple(r.start for r in block)
    return [
        rect_at([a + o for a, o in zip(first, offsets, strict=True)], sizes)
        for offsets, sizes in rectangles(lengths, part.start, part.stop)
    ]


def at_home(matrices: Sequence[Matrix], homes: Sequence[int], ranks: int) -> list[Slots]:
    """Return for every rank the slots of the matrices whose home it is, whole."""
    held: list[list[tuple[int, Rect, int]]] = [[] for _ in range(ranks)]
    for number, (matrix, home) in enumerate(zip(matrices, homes, strict=True)):
        held[home].append((matrix.tensor, matrix.rect, number))
    return [packed(parts) for parts in held]


def in_slices(matrices: Sequence[Matrix], entries: Sequence[Entry], grid: Grid) -> list[Slots]:
    """Return for every rank its slots of slices of the longer sides.

    The axes that cut a longer side at rest cut it first, so that its elements stay where they are as far as can be.
    """
    orders = [_order(m, entries[m.tensor], grid) for m in matrices]
    found = []
    for rank in range(grid.size):
        parts = []
        for number, (m, order) in enumerate(zip(matrices, orders, strict=True)):
            mine = span(m.long, order, grid.sizes, grid.coords_of(rank))
            parts += [(m.tensor, rect, number) for rect in m.slices(mine.start, mine.stop)]
        found.append(packed(parts))
    return found


def _order(m: Matrix, entry: Entry, grid: Grid) -> Cut:
    dims = entry.data.layout.dims
    outputs = len(dims) - len(m.outputs)
    inside = dims[outputs - len(m.inputs) : outputs] if m.rows >= m.columns else dims[outputs:]
    first = tuple(axis for cut in inside for axis in cut)
    return (*first, *(axis for axis in grid.axes if axis not in first))


def in_blocks(entries: Sequence[Entry], grid: Grid) -> list[Slots]:
    """Return for every rank the slots of its blocks."""
    found = []
    for rank in range(grid.size):
        at = grid.coords_of(rank)
        found.append(
            packed([(i, e.data.layout.block(e.data.shape, grid.sizes, at), -1) for i, e in enumerate(entries)])
        )
    return found


def balanced(costs: Sequence[int], ranks: int, held: Callable[[int, int], int] = lambda number, rank: 0) -> list[int]:
    """Return a home for each item: the dearest first, each to the rank that has the least to do so far.  Pure.

    Of ranks with as little to do, it is the one that holds most of the item, and of those the first (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: at most 4/3 of the best).

    Parameters
    ----------
    costs : sequence of int
    ranks : int
    held : callable, optional
        From the number of an item and of a rank, how much of the item the rank holds.

    Examples
    --------
    >>> balanced([5, 4, 3, 3, 3], 2)
    [0, 1, 1, 0, 1]
    """
    loads, homes = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(loads)
        free = [rank for rank in range(ranks) if loads[rank] == least]
        home = max(free, key=lambda rank: (held(number, rank), -rank)) if len(free) > 1 else free[0]
        homes[number] = home
        loads[home] += costs[number]
    return homes


# ---------------------------------------------------------------------------------------------- the exchange
@dataclass(frozen=True)
class _Copy:
    """A rectangle that goes from one slot to another."""

    rect: Rect
    source: Slot
    target: Slot


class Exchange:
    """Brings elements from the slots that ranks have to those that they want, all in one all-to-all.

    No rank receives an element that it has.  Of several ranks that have an element, the one that sends it agrees with
    the receiver in the coordinates along the axes over which the parameter is repeated.

    Parameters
    ----------
    grid : Grid
    sources, targets : list of lists of Slot
        For every rank.
    axes : sequence of tuple of str
        For each parameter the axes over which sources are repeated.
    moves : bool
        False if no rank lacks an element, so that there is no call.
    """

    def __init__(
        self, grid: Grid, sources: list[Slots], targets: list[Slots], axes: Sequence[Cut], *, moves: bool = True
    ) -> None:  # fmt: skip
        self.moves = moves and grid.size > 1
        self.comm: Comm = grid.everyone
        self.size = extent(targets[self.comm.rank])
        """The elements of this rank's targets."""
        me, at = self.comm.rank, [grid.coords_of(rank) for rank in range(grid.size)]

        def copies(source: int, target: int) -> list[_Copy]:
            found = []
            have: dict[int, Slots] = {}
            for slot in sources[source]:
                have.setdefault(slot.tensor, []).append(slot)
            for slot in targets[target]:
                if any(at[source][a] != at[target][a] for a in axes[slot.tensor]):
                    continue
                for other in have.get(slot.tensor, ()):
                    rect = meet(slot.rect, other.rect)
                    if volume(rect):
                        found.append(_Copy(rect, other, slot))
            return found

        self._sends = [copies(me, rank) for rank in range(grid.size)]
        self._receives = [copies(rank, me) for rank in range(grid.size)]

    @cached_property
    def words(self) -> int:
        """The elements that this rank receives."""
        return sum(
            volume(c.rect) for rank, copies in enumerate(self._receives) if rank != self.comm.rank for c in copies
        )

    def run(self, buffer: Block, out: Block, backend: Backend) -> None:
        """Fill a buffer of the targets, `out`, from one of the sources.  Collective over the grid."""
        me = self.comm.rank
        for c in self._sends[me]:
            c.target.view(out)[local(c.rect, c.target.rect)] = c.source.view(buffer)[local(c.rect, c.source.rect)]
        if not self.moves:
            return
        counts, expected = (
            [0 if rank == me else sum(volume(c.rect) for c in copies) for rank, copies in enumerate(rows)]
            for rows in (self._sends, self._receives)
        )
        send, got = (backend.empty((sum(n),), buffer.dtype) for n in (counts, expected))
        for part, c in _through(self._sends, me, send):
            part[...] = c.source.view(buffer)[local(c.rect, c.source.rect)]
        self.comm.all_to_all(send, counts, got, expected)
        for part, c in _through(self._receives, me, got):
            c.target.view(out)[local(c.rect, c.target.rect)] = part


def _through(rows: Sequence[Sequence[_Copy]], me: int, buffer: Block) -> Iterator[tuple[Block, _Copy]]:
    """Yield the rectangles of a packed buffer, but for this rank's own, with what they are."""
    at = 0
    for rank, copies in enumerate(rows):
        for c in copies if rank != me else ():
            n = volume(c.rect)
            yield buffer[at : at + n].reshape(tuple(len(r) for r in c.rect)), c
            at += n
