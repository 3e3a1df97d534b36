"""Cholesky's factorization, A = L Lᴴ, of Hermitian positive definite matrices on tiles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.backend import namespace
from parlinalg.comm import Handle
from parlinalg.comm.shared import ORDERED, Steps, can_share, shared_array
from parlinalg.linalg import kernels
from parlinalg.linalg.panels import Panels
from parlinalg.linalg.tiles import Tiles, resting


class Cholesky(Panels):
    """The lower factor replaces the lower triangle, the only one that is read.

    A panel of L moves along the grid's rows, to which its rows belong, and then along its columns: each rank gets the
    rows of L that have the numbers of its columns.  A minor that is not positive travels on as NaN, so that no rank
    leaves a collective; `minor` says which, on the rank that found it.

    Parameters
    ----------
    target : (array, range, range), optional
        A block with its rows and columns, to which every panel of L is copied as it passes: for ranks that see whole
        panels, as those of a grid of one row do.  The tiles do not become L then.

    Attributes
    ----------
    minor : int
        The order of the first leading minor that is not positive, as far as this rank knows; 0 for none.
    finite : bool
        The elements of L's diagonal that this rank computed on the host are finite.  They are not if an element of A's
        lower triangle is NaN or infinite.
    """

    def __init__(self, tiles: Tiles, a: Any, n: int, target: tuple[Any, range, range] | None = None):
        super().__init__(tiles, a, (n, n))
        self.minor, self.finite, self._target = 0, True, target
        self.strip = max(1, self.STRIP // tiles.size) * tiles.size  # whole tiles
        self._meet = [np.isin(self.columns, x).nonzero()[0] for x in self.every_row]  # my columns, by their grid row
        self._mine = np.isin(self.rows, self.columns).nonzero()[0]  # my rows that the ranks of my column need
        starts, ends = self.columns[:: tiles.size], self.columns[tiles.size - 1 :: tiles.size] + 1
        self._tops = np.searchsorted(self.rows, starts).tolist()  # my first row of each of my tiles of columns
        self._under = [*np.searchsorted(self.rows, ends).tolist(), len(self.rows)]  # and the first below it

    def run(self) -> None:
        """Factor the whole matrix.  Collective over the grid."""
        if self.tiles.grid.size == 1 and len(self.a):
            self.minor = kernels.cholesky(self.a)
            self._note(self.a)
        else:
            super().run()

    def factor(self, k: int, b: int) -> tuple[Handle, Any]:
        i, j = self.tiles.owner(k)
        r, c, xp = self.row(k), self.column(k), namespace(self.a)
        panel = self.message(k, (len(self.rows) - r) * b).reshape(-1, b)
        if self.tiles.j == j:
            panel[...] = self.a[r:, c : c + b]
            top = b if self.tiles.i == i else 0
            corner = xp.empty((b, b), self.a.dtype)
            if top:
                corner[...] = panel[:b]
                failed = kernels.cholesky(corner)
                self._note(corner)
                self.minor = self.minor or (k + failed if failed else 0)
                panel[:b] = corner = xp.tril(corner)
            self.tiles.down.broadcast(corner, i)  # L[k, k] := A[k, k]
            # L[i, k] := A[i, k] L[k, k]⁻ᴴ
            kernels.substitute(corner, panel[top:], right=True, lower=True, adjoint=True)
            if self._target is None:
                self.a[r:, c : c + b] = panel
        return self.pass_on(k, panel, j), panel

    def _note(self, corner: Any) -> None:
        if isinstance(corner, np.ndarray):
            self.finite = self.finite and kernels.finite(corner.diagonal())

    def take(self, k: int, b: int, panel: Any) -> Any:
        if self._target is not None:
            out, rows, columns = self._target
            first, last = max(k, columns.start), min(k + b, columns.stop)
            if first < last:
                part, top = out[:, first - columns.start : last - columns.start], max(0, k - rows.start)
                part[:top] = 0
                part[top:] = panel[max(k, rows.start) - k : max(k, rows.stop) - k, first - k : last - k]
        r, c = self.row(k + b), self.column(k + b)
        mine = panel[self._mine[np.searchsorted(self._mine, r) :] - self.row(k)]
        if self.tiles.R == 1:  # all the rows, in the order of the columns
            return panel[r - self.row(k) :], kernels.adjoint(mine), r, c
        later = [at[np.searchsorted(at, c) :] - c for at in self._meet]
        ahead = self.ahead(k, b)
        cuts = [int(np.searchsorted(at, ahead)) for at in later]
        cut, others = cuts[self.tiles.i], [len(at) - x for at, x in zip(later, cuts, strict=True)]

        def placed(rows: Any, at: list[Any], size: int) -> Any:
            """Return as columns what belongs to these columns of this rank."""
            right = namespace(panel).empty((size, b), self.a.dtype)
            right[np.concatenate(at)] = rows
            return kernels.adjoint(right)

        def rest(rows: Any) -> Any:
            at = [at[x:] - ahead for at, x in zip(later, cuts, strict=True)]
            return placed(rows, at, len(self.columns) - c - ahead)

        rows, then = self.collectives.all_gather_in_turn(mine[:cut], cuts, mine[cut:], others, rest, self.at_once)
        self._rest = lambda: (then(), ahead)
        right = placed(rows, [at[:x] for at, x in zip(later, cuts, strict=True)], ahead)
        return panel[r - self.row(k) :], right, r, c

    def update(self, step: Any, first: int, last: int) -> None:
        left, right, r, c = step
        if not isinstance(self.a, np.ndarray):  # one large product is faster than many that leave out what is above
            top = self.row(self.columns[first])
            kernels.subtract(self.a[top:, first:last], left[top - r :], right[:, first - c : last - c])
            return
        self._below(step, first // self.tiles.size, -(-last // self.tiles.size), len(self.rows))

    def _below(self, step: Any, tile: int, end: int, bottom: int) -> None:
        """Update what is on and below the diagonal of some of this rank's tiles of columns, in the rows above `bottom`.

        The rows below the last tile are updated in one product of all columns, which is faster than one a tile; then
        those above in the same way for each half of the tiles.
        """
        left, right, r, c = step
        first, last = tile * self.tiles.size, min(end * self.tiles.size, len(self.columns))
        top, under = self._tops[end - 1], self._under[end - 1]
        if under < bottom:
            kernels.subtract(
                self.a[under:bottom, first:last], left[under - r : bottom - r], right[:, first - c : last - c]
            )
        bottom = min(under, bottom)
        if end - tile > 1:
            middle = (tile + end) // 2
            self._below(step, tile, middle, bottom)
            self._below(step, middle, end, bottom)
        elif top < bottom:
            kernels.subtract_square(self.a[top:bottom, first:last], left[top - r : bottom - r])


LINE, ALIASED = 64, 1024
"""Bytes of a line of a cache, and of which rows in shared memory are no multiple: else the same elements of all rows
would push each other out of it."""


class SharedCholesky:
    """The same factorization where all ranks are on one node: in one array, which they share and none sends.

    Each rank copies its block of the lower triangle there.  Panels are dealt in turn, as on tiles; a rank finds each of
    its own from all those left of it (left-looking), so that products are deep and no two ranks write the same
    elements.  It waits for the panel before, never for all ranks, and copies rows of L home meanwhile.  The ledger
    counts what ranks would receive of each other as messages.

    Parameters
    ----------
    tiles : Tiles
        Of one grid row and one layer.
    a : DistArray
        The matrix, on the host, in blocks that are no terms of sums.
    home : bool
        Give every rank its block of L, in the layout of `a`; else its columns, as tiles.
    rows : array [k, n], optional
        Rows X of this rank, which X A⁻¹ replaces, by L where it lies; then L itself is not kept.

    Attributes
    ----------
    found : array
        The block, or the columns, above whose diagonal anything may stand.
    minor, finite
        As of `Cholesky`.
    """

    def __init__(self, tiles: Tiles, a: DistArray, home: bool, rows: Any = None) -> None:
        self.tiles, self.a, self.n, self.home, self._divided = tiles, a, a.shape[0], home, rows
        self.minor, self.finite = 0, True
        self.edges = [*range(0, self.n, tiles.size), self.n]
        self.rows, self.columns = a.grid.block(a.layout, a.shape)
        self.found: Any = None
        self._homed = 0  # tiles of rows that were copied to the block

    def run(self) -> bool:
        """Factor the matrix; return False, on all ranks, if they cannot share memory.  Collective."""
        comm, n, dtype, steps = self.tiles.across, self.n, self.a.dtype, len(self.edges) + 2
        if not ORDERED:
            return False
        with shared_array(comm, (n, _row(n, dtype.itemsize)), dtype) as memory:
            if memory is None:
                return False
            self._s, self._steps = memory, Steps(comm, steps)
            own = self.tiles.columns(n)[self.tiles.j]
            wide = 0 if self._divided is not None else len(own)
            self.found = np.empty(self.a.block.shape if self.home else (n, wide), dtype)
            self._count()
            self._panels()
            for p in range(self._homed if self.home else len(self.edges) - 2, len(self.edges) - 1):
                self._wait(p, seldom=not len(own))
                if self.home:
                    self._copy_home()
            if self._divided is not None:
                for adjoint in (True, False):
                    kernels.substitute(memory[:, :n], self._divided, right=True, lower=True, adjoint=adjoint)
            self._steps.made(steps)
            del self._s, self._steps
        return True

    def _count(self) -> None:
        """Enter in the ledger the words of the trip to tiles and of the panels."""
        tiles, across = self.tiles, self.tiles.across
        tiles.count_bring(self.a, tiles.rows(self.n), tiles.columns(self.n), lower=True)
        for k, end in pairwise(self.edges):
            mine = tiles.owner(k)[1] == tiles.j
            across.count("broadcast", 0 if mine else (self.n - k) * (end - k), self.a.dtype.itemsize)

    def _panels(self) -> None:
        """Find this rank's panels.

        It has made step 1 when its elements of the first panel are in shared memory, 2 when all are, and p + 3 when its
        panel number p is found.
        """
        ranks, C, edges = range(self.tiles.across.size), self.tiles.C, self.edges
        first = self.tiles.j == 0
        self._bring(0, edges[1])
        self._steps.made(1)
        if first:  # others bring the rest meanwhile
            self._steps.wait(ranks, 1)
            self._factor(0)
        self._bring(edges[1], self.n)
        self._steps.made(3 if first else 2)
        for p in range(C if first else self.tiles.j, len(edges) - 1, C) if self.tiles.j < C else ():
            self._steps.wait(ranks, 2)
            done = 0
            for left in range(max(0, p - C), p):  # the last one of its own, and those that others find meanwhile
                self._wait(left, left)
                self._update(p, edges[done], edges[left + 1])
                done = left + 1
            self._factor(p)
            self._steps.made(p + 3)

    def _wait(self, p: int, homed: int = 0, seldom: bool = False) -> None:
        """Return when panel number p is found; copy up to so many tiles of rows home before."""
        owner = (p % self.tiles.C,)
        while self.home and self._homed < homed and not self._steps.there(owner, p + 3):
            self._copy_home()
        self._steps.wait(owner, p + 3, seldom)

    def _bring(self, first: int, last: int) -> None:
        """Copy what this rank has of columns `first` to `last` of the lower triangle, whole tiles at the diagonal."""
        (top, left), grid = (self.rows.start, self.columns.start), self.a.grid
        if any(grid.coords[axis] for axis in resting(self.a.layout, self.a.shape, grid.sizes)[1]):
            return  # another rank has the same block
        first = max(first, left)
        for k, end in pairwise(self.edges):
            k, stop = max(k, top), min(end, last, self.columns.stop)
            end = min(end, self.rows.stop)
            if k < end and first < stop:
                self._s[k:end, first:stop] = self.a.block[k - top : end - top, first - left : stop - left]

    def _update(self, p: int, first: int, last: int) -> None:
        """Subtract from panel number p the products of columns `first` to `last` of L."""
        s, (k, end) = self._s, self.edges[p : p + 2]
        beside = s[k:end, first:last]
        kernels.subtract_square(s[k:end, k:end], beside)
        kernels.subtract(s[end:, k:end], s[end:, first:last], kernels.adjoint(beside))

    def _factor(self, p: int) -> None:
        """Replace panel number p, from which all products are subtracted, by that of L."""
        s, (k, end) = self._s, self.edges[p : p + 2]
        corner = s[k:end, k:end].copy()
        failed = kernels.cholesky(corner)
        self.minor = self.minor or (k + failed if failed else 0)
        self.finite = self.finite and kernels.finite(corner.diagonal())
        s[k:end, k:end] = corner
        kernels.substitute(corner, s[end:, k:end], right=True, lower=True, adjoint=True)
        if not self.home and self._divided is None:
            at = p // self.tiles.C * self.tiles.size
            self.found[k:, at : at + end - k] = s[k:, k:end]

    def _copy_home(self) -> None:
        """Copy the next tile of rows of L to this rank's block, and set what is above the diagonal to 0."""
        k, end = self.edges[self._homed : self._homed + 2]
        self._homed += 1
        k, end, left = max(k, self.rows.start), min(end, self.rows.stop), self.columns.start
        if k >= end:
            return
        out = self.found[k - self.rows.start : end - self.rows.start]
        diagonal, stop = (min(max(x, left), self.columns.stop) for x in (k, end))
        out[:, : stop - left] = self._s[k:end, left:stop]
        out[:, stop - left :] = 0
        corner = out[:, diagonal - left : stop - left]
        corner[...] = np.tril(corner, k - diagonal)


def in_shared_memory(tiles: Tiles, n: int, dtype: Any) -> bool:
    """Return True if ranks factor a matrix [n, n] as `SharedCholesky` does, where they can have the memory for it.

    A rank outside of the grid takes the others to be on one node.
    """
    grid, itemsize = tiles.grid, np.dtype(dtype).itemsize
    if not (ORDERED and grid.backend.host_memory and grid.size > tiles.R * tiles.D == 1):
        return False
    return not grid.inside or can_share(tiles.across, n * _row(n, itemsize) * itemsize)


def _row(n: int, itemsize: int) -> int:
    """Return the length of rows of n elements in shared memory."""
    size = -(-n * itemsize // LINE) * LINE
    return (size + LINE * (size % ALIASED == 0)) // itemsize
