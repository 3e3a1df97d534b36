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

from parlinalg.backend import compiled
from parlinalg.backend.shapes import has_values
from parlinalg.comm.shared import SharedCollectives, shared_collectives
from parlinalg.linalg import kernels
from parlinalg.linalg.panels.qr import QR, Reflections
from parlinalg.linalg.reductions.reflections import TINY, reflector
from parlinalg.linalg.tiles import Tiles

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

    They lie in Fortran's order, for the products of each with a reflection.  Loops that numba compiles make the steps
    of real matrices that are not small, where it is installed.

    Attributes
    ----------
    order : array of int
        The permutation p, on every rank of the grid.
    places : array of int
        Where this rank's columns stand in A[:, p].
    """

    def __init__(self, tiles: Tiles, a: Any, shape: tuple[int, int]) -> None:
        self._lines: Any = kernels.in_columns(a).T if has_values(a) else a.T
        super().__init__(tiles, self._lines.T, shape, hold_once=True)
        self.order, self.places = np.arange(shape[1]), self.columns.copy()
        self._at = np.full(shape[1], -1)  # which of this rank's columns is in a place of A[:, p]
        self._at[self.places] = np.arange(len(self.places))
        self._done = 0  # this rank's columns that were taken, which are the first ones here
        self._norms = self._exact = np.zeros(0)  # of what is left of each column, and when they were last computed
        self._doubt = math.sqrt(float(np.finfo(a.dtype).eps))
        self._fast = compiled.ready(self._lines)

    def run(self) -> None:
        """Factor the whole matrix.  Collective over the grid."""
        (m, n), tiles = self.shape, self.tiles
        if not tiles.grid.inside:
            return
        across, some = tiles.across, tiles.across.size > tiles.C
        panels = [(k, min(tiles.size, min(m, n) - k)) for k in range(0, min(m, n), tiles.size)]
        if tiles.j < tiles.C:
            if has_values(self.a):
                self._norms = lengths(self.a)
                self._exact = self._norms.copy()
            comm = across.sub(range(tiles.C), across.axes) if some else across
            with shared_collectives(comm, KEY + m, self.a.dtype) as group:
                for panel in panels:
                    self._panel(group, *panel)
            if some:
                comm.free()
        if some:
            across.barrier()  # the others wait without a core
            across.broadcast(self.order, 0)
        self._lines = None  # R has its memory
        if tiles.j >= tiles.C:  # Q turns no columns here
            xp = kernels.on_host(tiles.grid.backend)
            self.kept = [Reflections(k, None, xp.zeros((b, b), self.a.dtype), None) for k, b in panels]

    def _panel(self, group: SharedCollectives, k: int, b: int) -> None:
        """Factor b columns from place k on, apply A := A - V G to what is right of them, and keep V and T."""
        lines, xp = self._lines, kernels.on_host(self.tiles.grid.backend)
        v, g = xp.zeros((b, self.shape[0] - k), lines.dtype), xp.zeros((len(lines), b), lines.dtype)  # transposed
        t = xp.zeros((b, b), lines.dtype)
        key, message, beta = self._proposal(k, v[:0], g[:, :0])
        for q in range(b):
            j = k + q
            every, offered = group.proposals(key, message)
            root = self._choose(every, j, g)
            if root == self.tiles.j:
                lines[self._done, j:] = 0
                lines[self._done, j] = beta
                self._done += 1
            v[q, q:] = message = offered(root)
            found = False
            if self._fast:
                message = message[1:]
                found, beta = _step_loop(
                    lines, self.places, self._done, j, q, v, g, t, self._norms, self._exact, self._doubt, key, message
                )
            else:
                self._take(j, q, v, g, t)
            if not found and q + 1 < b:
                key, message, beta = self._proposal(j + 1, v[: q + 1, q + 1 :], g[:, : q + 1])
        kernels.subtract(lines[self._done :, k + b :], g[self._done :], v[:, b:])
        own = self.tiles.owner(k)[1] == self.tiles.j
        self.kept.append(Reflections(k, xp.ascontiguousarray(v.T) if own else None, t, None))

    def _proposal(self, j: int, v: Any, g: Any) -> tuple[Any, Any, Any]:
        """Return this rank's largest column's norm and place, its reflection with its factor, and what it leaves.

        Of equals it is the first in the order so far.
        """
        lines, at, xp = self._lines, self._done, kernels.on_host(self.tiles.grid.backend)
        places, norms = self.places[at:], self._norms[at:]
        key, message, beta = xp.full((1, KEY), -1, lines.dtype), xp.empty(self.shape[0] - j, lines.dtype), None
        if len(norms):
            largest = np.flatnonzero(norms == norms.max())
            first = largest[places[largest].argmin()]
            key[0] = norms[first], *divmod(int(places[first]), DIGIT)
            at += int(first)
        if at < len(lines):
            message[:], tau, beta = reflector(lines[at, j:] - g[at] @ v)
            message[0] = tau  # in place of a one
        return key, message, beta

    def _choose(self, every: Any, j: int, g: Any) -> int:
        """Make the largest column number j of A[:, p], and the next one where it lies; return its grid column."""
        if not has_values(every):
            every.device.assume("pivots", "the choice of pivots")
            return self.tiles.owner(j)[1]
        choose = _choose_loop if self._fast else _choose_loop.function
        moved = self._lines, g, self.places, self._norms, self._exact
        return int(choose(every, j, self._done, self.order, self._at, *moved))

    def _take(self, j: int, q: int, v: Any, g: Any, t: Any) -> None:
        """Complete T and G by reflection number q of a panel, and row j of R, and remove that from the norms.

        In place of its first element, which is 1, the reflection has its factor.
        """
        lines, done, own = self._lines, self._done, v[q, q:]
        tau = own[0].copy()
        own[0] = 1
        inner = v[:q, q:].conj() @ own
        t[:q, q], t[q, q] = -tau * (t[:q, :q] @ inner), tau
        g[done:, q] = tau.conj() * (lines[done:, j:] @ own.conj() - g[done:, :q] @ inner.conj())
        lines[done:, j] -= g[done:, : q + 1] @ v[: q + 1, q]
        if has_values(lines):
            self._shorten(j, v[: q + 1, q + 1 :], g[:, : q + 1])

    def _shorten(self, j: int, v: Any, g: Any) -> None:
        """Remove row j from the norms; recompute those of which rounding leaves less than half the digits."""
        lines, done = self._lines, self._done
        norms, exact = self._norms[done:], self._exact[done:]
        size = np.where(norms > 0, norms, 1)
        left = np.maximum(0, 1 - (abs(lines[done:, j]) / size) ** 2)
        few = np.flatnonzero((norms > 0) & (left * (norms / np.where(exact > 0, exact, 1)) ** 2 <= self._doubt))
        norms *= np.sqrt(left)
        if len(few):
            norms[few] = exact[few] = lengths((lines[done + few, j + 1 :] - g[done + few] @ v).T)


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


@compiled.loop()
def _choose_loop(
    every: Any, j: int, done: int, order: Any, at: Any, lines: Any, g: Any, places: Any, norms: Any, exact: Any
) -> int:  # fmt: skip
    """Do what `PivotedQR._choose` does."""
    root, place, largest = 0, -1, every[0, 0].real
    for i in range(len(every)):
        number, size = int(DIGIT * float(every[i, 1].real) + float(every[i, 2].real)), every[i, 0].real
        if place < 0 or size > largest or (size == largest and number < place):
            root, place, largest = i, number, size
    taken, other = at[place], at[j]
    order[j], order[place] = order[place], order[j]
    at[j], at[place] = taken, other
    if other >= 0:
        places[other] = place
    if taken >= 0:
        places[taken] = j
        if taken != done:
            at[places[done]], at[j] = taken, done
            places[done], places[taken] = places[taken], places[done]
            norms[done], norms[taken] = norms[taken], norms[done]
            exact[done], exact[taken] = exact[taken], exact[done]
            lines[done], lines[taken] = lines[taken].copy(), lines[done].copy()
            g[done], g[taken] = g[taken].copy(), g[done].copy()
    return root


@compiled.loop(sums=True)
def _step_loop(
    lines: Any, places: Any, done: int, j: int, q: int, v: Any, g: Any, t: Any, norms: Any, exact: Any, doubt: float,
    key: Any, message: Any,
) -> tuple[bool, Any]:  # fmt: skip
    """Do what `PivotedQR._take` does, in one pass over each column, and then `_proposal` for the next step of a panel.

    Return False, and no more than the first, at the last step or if squares do not allow the second.
    """
    _take_loop(lines, done, j, q, v, g, t, norms, exact, doubt)
    zero = lines.dtype.type(0)
    if q + 1 == len(v):
        return False, zero
    key[0, :] = -1
    if done == len(lines):
        return True, zero
    best = done
    for c in range(done + 1, len(lines)):
        if norms[c] > norms[best] or (norms[c] == norms[best] and places[c] < places[best]):
            best = c
    key[0, 0], key[0, 1], key[0, 2] = norms[best], places[best] // DIGIT, places[best] % DIGIT
    message[:] = lines[best, j + 1 :]
    _less(message, v[: q + 1, q + 1 :], g[best])
    square = zero
    for i in range(1, len(message)):
        square += message[i] * message[i]
    if not TINY < square < 1 / TINY:
        return False, zero
    alpha = message[0]
    beta = lines.dtype.type(-math.copysign(math.sqrt(square + alpha * alpha), alpha))
    for i in range(1, len(message)):
        message[i] /= alpha - beta
    message[0] = (beta - alpha) / beta
    return True, beta


@compiled.loop(sums=True)
def _take_loop(
    lines: Any, done: int, j: int, q: int, v: Any, g: Any, t: Any, norms: Any, exact: Any, doubt: float
) -> None:  # fmt: skip
    """Do what `PivotedQR._take` does, in one pass over each column."""
    own, inner, rest = v[q, q:], np.empty(q, lines.dtype), np.empty(v.shape[1] - q - 1, lines.dtype)
    tau = own[0]
    own[0] = 1
    for p in range(q):
        inner[p] = _dot(v[p, q:], own)
    for p in range(q):
        total = lines.dtype.type(0)
        for s in range(p, q):
            total += t[p, s] * inner[s]
        t[p, q] = -tau * total
    t[q, q] = tau
    for c in range(done, len(lines)):
        column, factors = lines[c, j:], g[c]
        term = _dot(own, column)
        for p in range(q):
            term -= inner[p] * factors[p]
        factors[q] = tau * term
        top = column[0]
        for p in range(q + 1):
            top -= v[p, q] * factors[p]
        column[0] = top
        if not norms[c] > 0:
            continue
        share = abs(top) / norms[c]
        left = max(lines.dtype.type(0), 1 - share * share)
        share = norms[c] / exact[c]
        if left * share * share > doubt:
            norms[c] *= math.sqrt(left)
            continue
        rest[:] = column[1:]
        _less(rest, v[: q + 1, q + 1 :], factors)
        norms[c] = exact[c] = _length(rest)


@compiled.loop(sums=True)
def _dot(x: Any, y: Any) -> Any:
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled.loop(sums=True)
def _less(x: Any, v: Any, factors: Any) -> None:
    """Subtract the rows of v, each by its factor."""
    for p in range(len(v)):
        row, factor = v[p], factors[p]
        for i in range(len(x)):
            x[i] -= factor * row[i]


@compiled.loop(sums=True)
def _length(x: Any) -> Any:
    """Return the norm of x, also where squares under- or overflow."""
    square = _dot(x, x)
    if TINY < square < 1 / TINY:
        return math.sqrt(square)
    largest = x.dtype.type(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    if largest > 0:
        square = x.dtype.type(0)
        for i in range(len(x)):
            square += (x[i] / largest) ** 2
        largest *= math.sqrt(square)
    return largest
