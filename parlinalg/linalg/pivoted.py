"""QR factorization with column pivoting, A[:, p] = Q R, of whole columns that the ranks hold.

Each step takes the column of which the most is left, as LAPACK's `geqp3` does, and so finds its pivots.  No column
moves: the ranks agree on the largest, and the rank that has it sends its reflection to the others.  The rest of the
matrix is updated after some steps at once (Quintana-Ortí, Sun and Bischof, "A BLAS-3 version of the QR factorization
with column pivoting", 1998).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend.shapes import has_values
from parlinalg.linalg import kernels
from parlinalg.linalg.eigh import TINY, reflector
from parlinalg.linalg.qr import QR, Reflections
from parlinalg.linalg.tiles import Board, Tiles, board

PANEL = 32
"""Steps after which the rest of the matrix is updated; the columns of a tile."""
DIGIT = 4096
"""The base of the two digits of a column's number, which numbers of half the precision hold too."""
LONG = 1.5
"""Rows of a matrix by its columns from which on it is factored without pivoting first, and then its R with."""


class PivotedQR(QR):
    """R replaces the columns of A, which stay where they are, on tiles of whole columns.

    Attributes
    ----------
    order : array of int
        The permutation p, on every rank of the grid.
    places : array of int
        Where this rank's columns stand in A[:, p].
    """

    def __init__(self, tiles: Tiles, a: Any, shape: tuple[int, int]) -> None:
        super().__init__(tiles, a, shape, share_out=True)
        self.order, self.places = np.arange(shape[1]), self.columns.copy()
        self._done = 0  # this rank's columns that were taken, which are the first ones here
        self._norms = self._exact = np.zeros(0)  # of what is left of each column, and when they were last computed

    def run(self) -> None:
        """Factor the whole matrix.  Collective over the grid."""
        (m, n), tiles = self.shape, self.tiles
        if not tiles.grid.inside:
            return
        if has_values(self.a):
            self._norms = lengths(self.a)
            self._exact = self._norms.copy()
        with board(tiles.across, m, self.a.dtype) as lent:
            for k in range(0, min(m, n), tiles.size):
                self._panel(lent, k, min(tiles.size, min(m, n) - k))

    def _panel(self, lent: Board, k: int, b: int) -> None:
        """Factor b columns from place k on, apply A := A - V G to what is right of them, and keep V and T."""
        a, m, xp = self.a, self.shape[0], kernels.on_host(self.tiles.grid.backend)
        v, t, g = xp.zeros((m - k, b), a.dtype), xp.zeros((b, b), a.dtype), xp.zeros((b, a.shape[1]), a.dtype)
        for q in range(b):
            j = k + q
            root, message = self._choose(lent, j, g[:q]), xp.empty(m - j, a.dtype)
            if root == self.tiles.j:
                c = self._done
                message[:], tau, beta = reflector(a[j:, c] - v[q:, :q] @ g[:q, c])
                message[0] = tau  # in place of a one
                a[j:, c] = 0
                a[j, c] = beta
                self._done += 1
            lent.broadcast(message, root)
            tau, v[q:, q] = message[0].copy(), message
            v[q, q] = 1
            inner = kernels.adjoint(v[q:, :q]) @ v[q:, q]
            t[:q, q], t[q, q] = -tau * (t[:q, :q] @ inner), tau
            rest = slice(self._done, None)
            g[q, rest] = tau.conj() * (v[q:, q].conj() @ a[j:, rest] - inner.conj() @ g[:q, rest])
            a[j, rest] -= v[q, : q + 1] @ g[: q + 1, rest]
            self._shorten(j, v[q + 1 :, : q + 1], g[: q + 1])
        kernels.subtract(a[k + b :, self._done :], v[b:], g[:, self._done :])
        own = self.tiles.owner(k)[1] == self.tiles.j
        self.kept.append(Reflections(k, v if own else None, t, None))

    def _choose(self, lent: Board, j: int, g: Any) -> int:
        """Make the largest column number j of A[:, p], and the next one where it lies; return its grid column.

        Of equals it is the first in the order so far.
        """
        tiles, done = self.tiles, self._done
        places, norms = self.places[done:], self._norms[done:]
        mine = kernels.on_host(tiles.grid.backend).full((1, 3), -1, self.a.dtype)
        if len(norms):
            largest = np.flatnonzero(norms == norms.max())
            mine[0] = norms[largest[0]], *divmod(int(places[largest].min()), DIGIT)
        every = lent.gather(mine, [1] * tiles.across.size)
        if has_values(every):
            norm, high, low = every.real.T.tolist()
            place, root = min((DIGIT * high[i] + low[i], i) for i, size in enumerate(norm) if size == max(norm))
        else:
            every.device.assume("pivots", "the choice of pivots")
            root, place = tiles.owner(j)[1], j
        place = int(place)
        self.order[[j, place]] = self.order[[place, j]]
        taken, other = places == place, places == j
        places[other], places[taken] = place, j
        if root == tiles.j and (at := done + int(np.flatnonzero(taken)[0])) != done:
            for each in (self.a, g):
                each[:, [done, at]] = each[:, [at, done]]
            for line in (self.places, self._norms, self._exact):
                if len(line):
                    line[[done, at]] = line[[at, done]]
        return root

    def _shorten(self, j: int, v: Any, g: Any) -> None:
        """Remove row j from the norms; recompute those of which rounding leaves less than half the digits."""
        if not has_values(self.a):
            return
        done, norms, exact = self._done, self._norms[self._done :], self._exact[self._done :]
        size = np.where(norms > 0, norms, 1)
        left = np.maximum(0, 1 - (abs(self.a[j, done:]) / size) ** 2)
        few = np.flatnonzero((norms > 0) & (left * (norms / np.where(exact > 0, exact, 1)) ** 2 <= self._doubt))
        norms *= np.sqrt(left)
        if len(few):
            norms[few] = exact[few] = lengths(self.a[j + 1 :, done + few] - v @ g[:, done + few])

    @property
    def _doubt(self) -> float:
        return math.sqrt(float(np.finfo(self.a.dtype).eps))


def lengths(a: np.ndarray) -> np.ndarray:
    """Return the norms of the columns, in the precision of the matrix."""
    parts = (a.real, a.imag) if a.dtype.kind == "c" else (a,)
    with np.errstate(all="ignore"):
        squares = sum(np.einsum("ij,ij->j", part, part) for part in parts)
        found: np.ndarray = np.sqrt(squares)
    few = np.flatnonzero(~((squares > TINY) & (squares < 1 / TINY)))
    if len(few) and len(a):
        largest = abs(a[:, few]).max(axis=0)
        unit = np.where(largest > 0, largest, 1)
        found[few] = largest * np.linalg.norm(a[:, few] / unit, axis=0)
    return found
