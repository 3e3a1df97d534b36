"""Cholesky's factorization, A = L Lᴴ, of Hermitian positive definite matrices on tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.comm import Handle
from parlinalg.linalg import kernels
from parlinalg.linalg.panels import Panels
from parlinalg.linalg.tiles import Tiles


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
        gathered = self.board.gather(mine, [len(at) for at in later])
        right = namespace(panel).empty((len(self.columns) - c, b), self.a.dtype)
        right[np.concatenate(later)] = gathered
        return panel[r - self.row(k) :], kernels.adjoint(right), r, c

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
