"""QR factorization with column pivoting, A[:, p] = Q R, of whole columns that the ranks hold.

Each step takes the column of which the most is left, as LAPACK's `geqp3` does, and so finds its pivots.  No column
moves: every rank proposes its largest with its reflection, and the rank that has the largest of these sends it to the
others, which in shared memory read it where it is.  The rest of the matrix is updated after some steps at once
(Quintana-Ortí, Sun and Bischof, "A BLAS-3 version of the QR factorization with column pivoting", 1998).
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
KEY = 3
"""The numbers by which ranks choose a column: its norm, and two digits of its number."""
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
        super().__init__(tiles, a, shape, hold_once=True)
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
        with board(tiles.across, KEY + m, self.a.dtype) as lent:
            for k in range(0, min(m, n), tiles.size):
                self._panel(lent, k, min(tiles.size, min(m, n) - k))

    def _panel(self, lent: Board, k: int, b: int) -> None:
        """Factor b columns from place k on, apply A := A - V G to what is right of them, and keep V and T."""
        a, m, xp = self.a, self.shape[0], kernels.on_host(self.tiles.grid.backend)
        v, t, g = xp.zeros((m - k, b), a.dtype), xp.zeros((b, b), a.dtype), xp.zeros((b, a.shape[1]), a.dtype)
        for q in range(b):
            j = k + q
            key, message, beta = self._proposal(j, v[q:, :q], g[:q])
            every, offered = lent.proposals(key, message)
            root = self._choose(every, j, g)
            if root == self.tiles.j:
                a[j:, self._done] = 0
                a[j, self._done] = beta
                self._done += 1
            message = offered(root)
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

    def _proposal(self, j: int, v: Any, g: Any) -> tuple[Any, Any, Any]:
        """Return this rank's largest column's norm and place, its reflection with its factor, and what it leaves.

        Of equals it is the first in the order so far.
        """
        a, at, xp = self.a, self._done, kernels.on_host(self.tiles.grid.backend)
        places, norms = self.places[at:], self._norms[at:]
        key, message, beta = xp.full((1, KEY), -1, a.dtype), xp.empty(len(a) - j, a.dtype), None
        if len(norms):
            largest = np.flatnonzero(norms == norms.max())
            first = largest[places[largest].argmin()]
            key[0] = norms[first], *divmod(int(places[first]), DIGIT)
            at += int(first)
        if at < a.shape[1]:
            message[:], tau, beta = reflector(a[j:, at] - v @ g[:, at])
            message[0] = tau  # in place of a one
        return key, message, beta

    def _choose(self, every: Any, j: int, g: Any) -> int:
        """Make the largest column number j of A[:, p], and the next one where it lies; return its grid column."""
        tiles, done = self.tiles, self._done
        places = self.places[done:]
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
