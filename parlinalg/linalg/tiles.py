"""The working form of factorizations: tiles of a matrix, dealt in turn to the ranks of a grid (block cyclic).

At rest a matrix lies in a `Layout`, in one piece a rank; a factorization would leave the ranks of the first pieces idle
after its first steps.  So it moves to tiles of `size` rows and columns, of which tile (i, j) is that of rank
(i mod R, j mod C), as in ScaLAPACK; one all-to-all goes there and one comes back, and no rank receives an element that
it has already.  What lies where is data: for every rank the numbers of its rows and columns, in any order, so that rows
that pivoting has interchanged go home in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, effective
from parlinalg.comm import Comm
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, index_of, span_of

Numbers = np.ndarray
"""The numbers of rows or columns, in the order in which a rank has them."""
Places = list[tuple[Numbers, Numbers]]
"""For every rank of the grid the rows and the columns it has."""

SIZE = 64
"""Rows and columns of a tile."""


class Tiles:
    """The R × C ranks of a grid and the size of the tiles that they are dealt.

    Parameters
    ----------
    grid : Grid
    size : int
        Rows and columns of a tile.
    shape : {"square", "tall", "wide"}
        R near C, else the axes of the grid all along the rows or all along the columns.

    Attributes
    ----------
    down, across : Comm
        The ranks of this rank's grid column, among which the rows of a matrix are dealt, and of its grid row.
    R, C : int
        Their numbers.
    i, j : int
        This rank's grid row and grid column.
    """

    def __init__(self, grid: Grid, size: int = SIZE, shape: str = "square") -> None:
        self.grid, self.size = grid, size
        self.row_axes, self.column_axes = _parted(grid, shape)
        self.R, self.C = span_of(self.row_axes, grid.sizes), span_of(self.column_axes, grid.sizes)
        self.down: Comm = grid.comm(self.row_axes)
        self.across: Comm = grid.comm(self.column_axes)
        here = grid.coords if grid.inside else dict.fromkeys(grid.axes, 0)
        self.i, self.j = (index_of(axes, grid.sizes, here) for axes in (self.row_axes, self.column_axes))

    @cached_property
    def coords(self) -> list[tuple[int, int]]:
        """The grid row and the grid column of every rank."""
        sizes, every = self.grid.sizes, map(self.grid.coords_of, range(self.grid.size))
        return [(index_of(self.row_axes, sizes, at), index_of(self.column_axes, sizes, at)) for at in every]

    def rows(self, m: int) -> list[Numbers]:
        """Return for every grid row the numbers of its rows of m, in order."""
        return dealt(m, self.size, self.R)

    def columns(self, n: int) -> list[Numbers]:
        """Return for every grid column the numbers of its columns of n, in order."""
        return dealt(n, self.size, self.C)

    def places(self, rows: Sequence[Numbers], columns: Sequence[Numbers]) -> Places:
        """Return what every rank has, from what every grid row and every grid column has."""
        return [(rows[i], columns[j]) for i, j in self.coords]

    def owner(self, k: int) -> tuple[int, int]:
        """Return the grid row and the grid column of row and column number k."""
        return k // self.size % self.R, k // self.size % self.C

    # ------------------------------------------------------------------ between rest and work
    def bring(self, a: DistArray, rows: Sequence[Numbers], columns: Sequence[Numbers]) -> np.ndarray:
        """Return this rank's rows and columns of a matrix, in an array of its own on the host.  Collective."""
        a = a.summed()
        block = self.grid.backend.to_host(a.block)
        rest, free = resting(a.layout, a.shape, self.grid)
        return move(block, rest, self.places(rows, columns), self.grid, free)

    def home(
        self, block: np.ndarray, rows: Sequence[Numbers], columns: Sequence[Numbers], shape: tuple[int, int],
        layout: Layout,
    ) -> DistArray:  # fmt: skip
        """Return the matrix of which every rank has these rows and columns, in a layout.  Collective."""
        rest, _ = resting(layout, shape, self.grid)
        block = move(block, self.places(rows, columns), rest, self.grid)
        return DistArray(self.grid.backend.from_host(block), shape, layout, self.grid)

    # ------------------------------------------------------------------ communication
    def gather(self, comm: Comm, mine: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return the rows of all ranks of `comm`, one rank's after the other's; counts[i] rows are rank i's."""
        if comm.size == 1:
            return np.ascontiguousarray(mine)
        width = mine.shape[1]
        out = np.empty((sum(counts), width), mine.dtype)
        comm.all_gather(np.ascontiguousarray(mine), out, [n * width for n in counts])
        return out

    def worst(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks, those outside the grid included.  Collective."""
        found = np.asarray(values, np.float64)
        self.grid.world.all_reduce(found, op="max")
        return found.tolist()


def dealt(n: int, size: int, parts: int) -> list[Numbers]:
    """Return the numbers 0 to n - 1 in tiles of `size`, dealt in turn.

    >>> [each.tolist() for each in dealt(7, 2, 2)]
    [[0, 1, 4, 5], [2, 3, 6]]
    """
    numbers = np.arange(n)
    return [numbers[numbers // size % parts == p] for p in range(parts)]


def _parted(grid: Grid, shape: str) -> tuple[Cut, Cut]:
    """Return the axes along which rows are dealt, and the others."""
    axes = tuple(a for a, n in grid.sizes.items() if n > 1)
    if shape != "square":
        return (axes, ()) if shape == "tall" else ((), axes)
    found: tuple[Cut, Cut] = ((), axes)
    least = math.inf
    for k in range(len(axes) + 1):
        for rows in combinations(axes, k):
            r = span_of(rows, grid.sizes)
            if (worse := max(r, grid.size // r)) < least:  # of equals the first: fewer rows
                found, least = (rows, tuple(a for a in axes if a not in rows)), worse
    return found


def resting(layout: Layout, shape: tuple[int, ...], grid: Grid) -> tuple[Places, Cut]:
    """Return what every rank has of a matrix in a layout, and the axes along which ranks have the same."""
    cut = effective(layout, grid)
    every = [layout.block(shape, grid.sizes, grid.coords_of(p)) for p in range(grid.size)]
    known: dict[range, Numbers] = {}
    places = [tuple(known.setdefault(r, np.arange(r.start, r.stop)) for r in block) for block in every]
    return places, tuple(a for a, n in grid.sizes.items() if n > 1 and a not in cut.cut_axes)  # type: ignore[return-value]


def move(block: np.ndarray, have: Places, want: Places, grid: Grid, copies: Cut = ()) -> np.ndarray:
    """Return this rank's rows and columns of a matrix of which every rank has others, by one all-to-all.

    Parameters
    ----------
    block : array
        The rows and columns that `have` says of this rank.
    have, want : list
        The rows and columns of every rank, before and after, in any order.
    copies : tuple of str
        The axes along which ranks have the same block; a rank gets what it wants from the one at its own place.

    Each rank receives exactly what it lacks.
    """
    if not grid.inside:
        return np.empty((0, 0), block.dtype)
    if grid.size == 1 and all(np.array_equal(x, y) for x, y in zip(have[0], want[0], strict=True)):
        return np.array(block, order="C")
    me = grid.rank
    at = [tuple(grid.coords_of(p)[a] for a in copies) for p in range(grid.size)]
    memo: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def common(x: Numbers, y: Numbers) -> tuple[np.ndarray, np.ndarray]:
        key = (id(x), id(y))
        if key not in memo:
            memo[key] = np.intersect1d(x, y, assume_unique=True, return_indices=True)[1:]
        return memo[key]

    none = np.zeros(0, np.intp)
    takes = [
        (common(have[me][0], rows)[0], common(have[me][1], columns)[0]) if at[p] == at[me] else (none, none)
        for p, (rows, columns) in enumerate(want)
    ]
    puts = [
        (common(rows, want[me][0])[1], common(columns, want[me][1])[1]) if at[p] == at[me] else (none, none)
        for p, (rows, columns) in enumerate(have)
    ]
    out = np.empty((len(want[me][0]), len(want[me][1])), block.dtype)
    send_counts, counts = ([len(r) * len(c) for r, c in each] for each in (takes, puts))
    if grid.size == 1:
        _put(out, puts[0][0], puts[0][1], _picked(block, takes[0][0], takes[0][1]))
        return out
    send = np.empty(sum(send_counts), block.dtype)
    start = 0
    for (r, c), n in zip(takes, send_counts, strict=True):
        if n:
            _picked(block, r, c, send[start : start + n].reshape(len(r), len(c)))
        start += n
    got = np.empty(sum(counts), block.dtype)
    grid.everyone.all_to_all(send, send_counts, got, counts)
    start = 0
    for (r, c), n in zip(puts, counts, strict=True):
        if n:
            _put(out, r, c, got[start : start + n].reshape(len(r), len(c)))
        start += n
    return out


def stretches(at: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive numbers: where each begins in `at`, its first number, and its length.

    >>> stretches(np.array([4, 5, 6, 2, 3]))
    [(0, 4, 3), (3, 2, 2)]
    """
    begins = np.concatenate([[0], np.flatnonzero(np.diff(at) != 1) + 1, [len(at)]]) if len(at) else np.zeros(1, int)
    return [(int(a), int(at[a]), int(b - a)) for a, b in pairwise(begins)]


def _rows(at: np.ndarray) -> Any:
    """Return what indexes these rows the fastest."""
    return slice(int(at[0]), int(at[0]) + len(at)) if len(at) and (np.diff(at) == 1).all() else at


def _picked(a: np.ndarray, rows: np.ndarray, columns: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    out = np.empty((len(rows), len(columns)), a.dtype) if out is None else out
    down = _rows(rows)
    for begin, first, n in stretches(columns):
        out[:, begin : begin + n] = a[down, first : first + n]
    return out


def _put(a: np.ndarray, rows: np.ndarray, columns: np.ndarray, part: np.ndarray) -> None:
    down = _rows(rows)
    for begin, first, n in stretches(columns):
        a[down, first : first + n] = part[:, begin : begin + n]
