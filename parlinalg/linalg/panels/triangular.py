"""Forward and backward substitution: on tiles, or where a triangle rests.

For many right-hand sides the triangle's panels go along grid rows to where the sides lie.  For few of them this would
move far more than there is to compute: the triangle stays where it lies, and sums and pieces of the solution move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.backend import namespace
from parlinalg.comm import Comm
from parlinalg.comm.shared import ORDERED, SMALL, SharedCollectives, Steps, shared_array, shared_collectives
from parlinalg.grid import Grid
from parlinalg.layout import Cut, coordinates, cut_lengths, index_of
from parlinalg.linalg import kernels
from parlinalg.linalg.tiles import Numbers, Tiles

FEW = 32
"""Right-hand sides up to which the triangle stays where it lies."""
PIECE = 512
"""The most rows of the solution that are found at once where a triangle rests."""


def substitute(
    tiles: Tiles, t: Any, rows: Sequence[Numbers], b: Any, n: int, sides: Sequence[Numbers], *, lower: bool,
    adjoint: bool = False, unit: bool = False, since: int = 0, split: int = 1,
) -> None:  # fmt: skip
    """Replace b by the solution x of `op(T) x = b`, without warnings of overflow, as BLAS.  Collective over the grid.

    Parameters
    ----------
    t : array
        This rank's rows and columns of T, [n, n]; the columns lie in tiles.  The other triangle is not read.
    rows : sequence of array
        For every grid row the numbers of its rows, rising.
    b : array
        The same rows of the right-hand sides; a grid column's ranks have the same columns.
    sides : sequence of array
        For every grid column the numbers of these columns.
    lower, adjoint, unit : bool
        T is a lower triangle; op(T) is its conjugate transpose; its diagonal is taken to be ones.
    since : int
        Of a lower triangle that is not turned: the rows of b before this number are zeros, and are not computed.
    split : int
        The parts of a tile's columns that are sent apart, so that little of T is held twice.
    """
    if not tiles.grid.inside:
        return
    with np.errstate(all="ignore"):
        if tiles.grid.size == 1:
            kernels.substitute(t[since:, since:n], b[since:], lower=lower, adjoint=adjoint, unit=unit)
        elif sum(map(len, sides)) <= FEW:
            _few(tiles, t, rows, b, n, sides, lower=lower, adjoint=adjoint, unit=unit)
        else:
            _many(tiles, t, rows, b, n, lower=lower, adjoint=adjoint, unit=unit, since=since, split=split)


def _many(
    tiles: Tiles, t: Any, rows: Sequence[Numbers], b: Any, n: int, *, lower: bool, adjoint: bool, unit: bool,
    since: int, split: int,
) -> None:  # fmt: skip
    columns = tiles.columns(n)[tiles.j]
    mine, wide, xp = rows[tiles.i], b.shape[1], namespace(b)
    part = -(-tiles.size // split)
    pieces = [
        (k, min(k + part, first + tiles.size, n)) for first in range(since // tiles.size * tiles.size, n, tiles.size)
        for k in range(first, min(first + tiles.size, n), part)
    ]  # fmt: skip
    for k, end in pieces if lower != adjoint else reversed(pieces):
        size = end - k
        cuts = [np.searchsorted(each, [k, k + size]).tolist() for each in rows]
        lo, hi = cuts[tiles.i]
        j = tiles.owner(k)[1]
        panel = xp.empty((len(mine) - lo if lower else hi, size), b.dtype)  # T[k:, k] or T[:k, k], its corner included
        if tiles.j == j:
            c = int(np.searchsorted(columns, k))
            panel[...] = t[lo:, c : c + size] if lower else t[:hi, c : c + size]
        tiles.across.broadcast(panel, j)
        corner, rest = (panel[: hi - lo], panel[hi - lo :]) if lower else (panel[lo:], panel[:lo])
        others = slice(hi, len(mine)) if lower else slice(0, lo)
        both = SharedCollectives(tiles.down, None).all_gather(xp.hstack([corner, b[lo:hi]]), [v - u for u, v in cuts])
        order = np.argsort(np.concatenate([each[u:v] for each, (u, v) in zip(rows, cuts, strict=True)]))
        diagonal, x = both[order, :size], xp.ascontiguousarray(both[order, size:])
        if adjoint:  # x[k] := op(T[k, k]) (b[k] - sum over i of T[i, k]ᴴ x[i])
            known = xp.ascontiguousarray(kernels.adjoint(rest) @ b[others]) if wide else xp.empty((size, 0), b.dtype)
            tiles.down.all_reduce(known)
            x -= known
        kernels.substitute(diagonal, x, lower=lower, adjoint=adjoint, unit=unit)
        b[lo:hi] = x[mine[lo:hi] - k]
        if not adjoint:  # b[i] := b[i] - T[i, k] x[k]
            kernels.subtract(b[others], rest, x)
        del panel, corner, rest, both, diagonal, x  # before there are others


def _few(
    tiles: Tiles, t: Any, rows: Sequence[Numbers], b: Any, n: int, sides: Sequence[Numbers], *, lower: bool,
    adjoint: bool, unit: bool,
) -> None:  # fmt: skip
    columns, xp = tiles.columns(n), namespace(b)
    t = t[:, : len(columns[tiles.j])]
    first, last = (sum(map(len, sides[:j])) for j in (tiles.j, tiles.j + 1))
    every = _gathered(tiles.across, xp.ascontiguousarray(b.T), sides).T  # all sides, of this rank's rows
    starts = list(range(0, n, tiles.size))
    pieces = [(k, min(k + tiles.size, n)) for k in (starts if lower != adjoint else reversed(starts))]
    if adjoint:
        every = _in_order(_gathered(tiles.down, xp.ascontiguousarray(every), rows), rows)[columns[tiles.j]]
        x = solved(
            tiles.across, tiles.down, t.T, (columns, rows), every.conj(), pieces, lower=not lower, unit=unit
        )  # fmt: skip
        b[...] = x[:, first:last].conj()
    else:
        x = solved(tiles.down, tiles.across, t, (rows, columns), every, pieces, lower=lower, unit=unit)
        x = _in_order(_gathered(tiles.across, x, columns), columns)
        b[...] = x[rows[tiles.i], first:last]


def _gathered(comm: Comm, mine: Any, numbers: Sequence[Numbers]) -> Any:
    """Return the rows of all ranks, one rank's after the other's, of which each has as many as numbers."""
    return SharedCollectives(comm, None).all_gather(mine, [len(x) for x in numbers])


def _in_order(x: Any, numbers: Sequence[Numbers]) -> Any:
    """Return the rows of an array, which have these numbers, in their order."""
    return x[np.argsort(np.concatenate(numbers))]


def solved(
    down: Comm, across: Comm, t: Any, numbers: tuple[Sequence[Numbers], Sequence[Numbers]], b: Any,
    pieces: Sequence[tuple[int, int]], *, lower: bool, unit: bool, blocks: bool = False,
) -> Any:  # fmt: skip
    """Return this rank's rows of the solution x of T x = b, those with the numbers of its columns of T.

    The sum of T's products for a piece of the solution is that of a grid row's ranks; the piece goes to the grid
    column's ranks that have T's columns for it.

    Parameters
    ----------
    down, across : Comm
        This rank's grid column and its grid row.
    t : array
        This rank's rows and columns of T.  The other triangle is not read.
    numbers : pair
        For every grid row the numbers of its rows, and for every grid column those of its columns, rising.
    b : array
        This rank's rows of all right-hand sides, the same on a grid row's ranks.
    pieces : sequence of pairs
        Where the pieces of the solution begin and end, in the order in which they are found.  The rows or the columns
        of each are those of one grid row or grid column.
    lower, unit : bool
        T is a lower triangle; its diagonal is taken to be ones.
    blocks : bool
        Each rank's rows are one range, and its columns, too.
    """
    if down.size == across.size == 1:
        x = namespace(b).ascontiguousarray(b.copy())
        kernels.substitute(t, x, lower=lower, unit=unit)
        return x
    longest = max((end - k for k, end in pieces), default=0)
    most = longest * (b.shape[1] + (0 if blocks else longest))  # at rest no corners are gathered
    if not isinstance(b, np.ndarray):  # shared memory is the host's
        most = 0
    with shared_collectives(down, most, b.dtype) as below, shared_collectives(across, most, b.dtype) as beside:
        return _solved(below, beside, t, numbers, b, pieces, lower=lower, unit=unit, blocks=blocks)


def _solved(
    below: SharedCollectives, beside: SharedCollectives, t: Any, numbers: tuple[Sequence[Numbers], Sequence[Numbers]],
    b: Any, pieces: Sequence[tuple[int, int]], *, lower: bool, unit: bool, blocks: bool,
) -> Any:  # fmt: skip
    (rows, columns), i, j, xp = numbers, below.comm.rank, beside.comm.rank, namespace(b)
    later = len(rows) > len(columns)  # what a piece adds to later rows is taken at once, else when they are needed
    x = xp.empty((len(columns[j]), b.shape[1]), b.dtype)
    left = b.copy() if j == 0 else xp.zeros(b.shape, b.dtype)  # in rows, which BLAS adds to in place
    due = slice(0, 0)  # those of this rank's columns that later rows still need
    for k, end in pieces:
        cuts, sides = ([np.searchsorted(each, [k, end]).tolist() for each in some] for some in numbers)
        (lo, hi), (first, last) = cuts[i], sides[j]
        having = [p for p, (u, v) in enumerate(cuts) if u < v]
        part = xp.ascontiguousarray(left[lo:hi])
        if lo < hi:
            kernels.subtract(part, t[lo:hi, due], x[due])
            part = beside.all_reduce(part)
        if len(having) > 1:  # the ranks of a grid column have the rows
            if first < last:
                both = below.all_gather(xp.hstack([t[lo:hi, first:last], part]), [v - u for u, v in cuts])
                both = _in_order(both, [each[u:v] for each, (u, v) in zip(rows, cuts, strict=True)])
                x[first:last] = both[:, end - k :]
                kernels.substitute(both[:, : end - k], x[first:last], lower=lower, unit=unit)
        else:
            if i in having:
                corner = t[lo:hi, first:last]
                if sum(u < v for u, v in sides) > 1:  # the ranks of a grid row have the columns
                    corner = beside.all_gather(xp.ascontiguousarray(corner.T), [v - u for u, v in sides])
                    corner = _in_order(corner, [each[u:v] for each, (u, v) in zip(columns, sides, strict=True)]).T
                if first < last:
                    kernels.substitute(corner, part, lower=lower, unit=unit)
                    x[first:last] = part[columns[j][first:last] - k]
            if first < last:
                x[first:last] = below.broadcast(xp.ascontiguousarray(x[first:last]), having[0])
        if first == last:
            continue
        if later or (blocks and i not in having):
            others = slice(hi, None) if lower else slice(lo)
            kernels.subtract(left[others], t[others, first:last], x[first:last])
        else:
            due = slice(min(first, due.start), max(last, due.stop)) if due.stop else slice(first, last)
    return x


class Resting(NamedTuple):
    """The layout of a resting triangle, and the pieces of a solution in the order of their computation."""

    rows: list[Numbers]
    """For every grid row the numbers of its rows, which are one range."""
    columns: list[Numbers]
    pieces: list[tuple[int, int]]
    coords: list[tuple[int, int]]
    """The grid row and the grid column of every rank."""
    alone: bool
    """No two ranks have the same part."""


@lru_cache(maxsize=64)
def resting(cuts: tuple[Cut, Cut], axes: tuple[tuple[str, int], ...], n: int, lower: bool) -> Resting:
    """Return where a triangle [n, n] rests whose rows and columns are cut along axes of a grid."""
    sizes = dict(axes)
    rows, columns = (np.split(np.arange(n), np.cumsum(cut_lengths(n, cut, sizes))[:-1]) for cut in cuts)
    every = coordinates(tuple(sizes), sizes)
    coords = [(index_of(cuts[0], sizes, at), index_of(cuts[1], sizes, at)) for at in every]
    pieces = pieces_at_rest(rows, columns, n)[:: 1 if lower else -1]
    return Resting(rows, columns, pieces, coords, len(set(coords)) == len(coords))


class Turn(NamedTuple):
    """The rows and columns with which a rank contributes to one piece of the solution."""

    piece: slice
    rows: slice
    """Those of this rank's rows that are in the piece."""
    columns: slice
    root: int
    """The rank that finds the piece."""
    later: tuple[slice, slice]
    """This rank's rows in the next piece, and those in the pieces after it."""


@lru_cache(maxsize=64)
def _turns(
    cuts: tuple[Cut, Cut], axes: tuple[tuple[str, int], ...], n: int, lower: bool, rank: int
) -> tuple[list[Turn], list[int]]:
    """Return a rank's part in all pieces, and the ranks of its grid row."""
    rows, columns, pieces, coords, _ = resting(cuts, axes, n, lower)
    i, j = coords[rank]
    inside = [[slice(*np.searchsorted(each, edges).tolist()) for edges in pieces] for each in (rows[i], columns[j])]
    found = []
    for p, ((k, end), high, wide) in enumerate(zip(pieces, *inside, strict=True)):
        row, column = (
            next(u for u, each in enumerate(some) if len(each) and each[0] <= k <= each[-1]) for some in (rows, columns)
        )
        edge = slice(high.stop, high.stop) if lower else slice(high.start, high.start)
        following = inside[0][p + 1] if p + 1 < len(pieces) else edge
        rest = slice(following.stop, len(rows[i])) if lower else slice(0, following.start)
        found.append(Turn(slice(k, end), high, wide, coords.index((row, column)), (following, rest)))
    return found, [p for p, (row, _) in enumerate(coords) if row == i]


def solved_in_common(
    grid: Grid, cuts: tuple[Cut, Cut], t: Any, b: Any, where: Sequence[range], shape: tuple[int, int], *,
    lower: bool, unit: bool,
) -> tuple[Any, bool] | None:  # fmt: skip
    """Return this rank's block of the solution x of T x = b, where T rests; None without shared memory.

    Right-hand sides, sums and solutions lie in shared memory.  A rank waits for the piece of the solution that it needs
    next, or for the sums in the rows of its own piece, never for all ranks.  The ledger counts what `solved` receives.
    The second result is True, on all ranks, if the solution and the diagonal are finite.  Collective over all ranks,
    which get None together.

    Parameters
    ----------
    cuts : pair of tuple of str
        The axes of the grid that cut T's rows, and its columns.
    t : array
        This rank's rows and columns of T.  The other triangle is not read.
    b : array
        This rank's block of the right-hand sides.
    where : pair of ranges
        The rows and columns of the block, and of that of the solution.
    shape : pair of int
        The shape of all right-hand sides.
    lower, unit : bool
        T is a lower triangle; its diagonal is taken to be ones.
    """
    (n, sides), dtype, everyone, axes = shape, t.dtype, grid.everyone, tuple(grid.sizes.items())
    if not (ORDERED and isinstance(b, np.ndarray)) or n * sides < SMALL:
        return None
    rows, columns, pieces, coords, alone = resting(cuts, axes, n, lower)
    if not alone:
        return None
    wide = len(columns)
    room = -(-max((1 + wide) * n * sides * dtype.itemsize, tunables.SHARED_BYTES) // dtype.itemsize)
    with shared_array(everyone, (room,), dtype) as memory:
        if memory is None:
            return None
        x, *sums = memory[: (1 + wide) * n * sides].reshape(1 + wide, n, sides)
        (i, j), steps = coords[everyone.rank], Steps(everyone, 2 * len(pieces) + 1)
        mine = sums[j][rows[i][0] : rows[i][-1] + 1] if len(rows[i]) else sums[j][:0]
        if j:
            mine[...] = 0
        at = tuple(slice(each.start, each.stop) for each in where)
        sums[0][at] = b
        steps.made(1)
        turns, beside = _turns(cuts, axes, n, lower, everyone.rank)
        if everyone.books:
            _counted(grid, cuts, turns, sides, dtype.itemsize)
        _in_turns(steps, turns, beside, t, (x, sums, mine), lower=lower, unit=unit)
        return x[at].copy(), kernels.finite(x[n - 1 if lower else 0])  # which has the terms of all the others


def _counted(grid: Grid, cuts: tuple[Cut, Cut], turns: Sequence[Turn], sides: int, itemsize: int) -> None:
    """Enter in the ledger what `solved` would receive."""
    down, across = (grid.comm(cut) for cut in cuts)
    for turn in turns:
        size, wide = ((each.stop - each.start) * sides for each in (turn.rows, turn.columns))
        if size and across.size > 1:
            across.count("all_reduce", across.all_reduce_words(size), itemsize)
        if wide and down.size > 1:
            down.count("broadcast", wide if grid.everyone.rank != turn.root else 0, itemsize)


def _in_turns(
    steps: Steps, turns: Sequence[Turn], beside: Sequence[int], t: Any, memory: Any, *, lower: bool, unit: bool
) -> None:  # fmt: skip
    """Find the pieces of the solution; `memory` is x, the sums of every grid column, and this rank's rows of them.

    A rank's steps are 2 p + 2 when it has found piece number p, and 2 p + 3 when its sums have the terms of this piece
    in the rows of the next one; 1 when its right-hand sides are there.
    """
    (x, sums, mine), me, began = memory, steps.comm.rank, False
    root = me
    for p, (piece, rows, columns, root, later) in enumerate(turns):
        part = x[piece]
        if me == root:
            if not began:  # all right-hand sides are there
                steps.wait(range(steps.comm.size), 1)
                began = True
            steps.wait(beside, 2 * p + 1)
            part[...] = sums[0][piece]
            for each in sums[1:]:
                part += each[piece]
            if not (unit or kernels.finite(t[rows, columns].diagonal())):
                part[...] = np.nan  # which a pivot that is infinite would hide
            else:
                kernels.substitute(t[rows, columns], part, lower=lower, unit=unit)
            steps.made(2 * p + 2)
        if columns.start < columns.stop:
            steps.wait((root,), 2 * p + 2)
            for at in later:
                kernels.subtract(mine[at], t[at, columns], part)
                steps.made(2 * p + 3)
        else:
            steps.made(2 * p + 3)
    steps.wait((root,), 2 * len(turns))


def pieces_at_rest(rows: Sequence[Numbers], columns: Sequence[Numbers], n: int) -> list[tuple[int, int]]:
    """Return where pieces of a solution begin and end, each of one grid row and of one grid column.

    >>> pieces_at_rest([range(0, 2), range(2, 5)], [range(0, 3), range(3, 5)], 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    edges = sorted({0, n, *(int(x[0]) for x in (*rows, *columns) if len(x))})
    found = []
    for k, end in pairwise(edges):
        parts = -(-(end - k) // PIECE)
        found += list(pairwise(k + (end - k) * p // parts for p in range(parts + 1)))
    return found
