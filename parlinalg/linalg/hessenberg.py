"""Schur forms of general matrices on tiles.

The matrix becomes Hessenberg by reflections, panel by panel, as in LAPACK's `gehrd`, with two all-reduces a column and
one a panel.  One rank finds the Schur form of the Hessenberg matrix by LAPACK's multishift QR (`hseqr`; Braman, Byers
and Mathias, 2002) and deals out its vectors, which go back through the reflections in tiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.backend import blas, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.eigh import PANEL, first, reflector
from parlinalg.linalg.qr import reflect
from parlinalg.linalg.tiles import Numbers, Places, Tiles, move, resting

SWEEPS = 20
"""Rounds of balancing."""


class Hessenberg:
    """The reduction A = Q H Qᴴ of a square matrix, of which this rank has tiles; H replaces A.

    Without `keep` the reflections are not kept, and nothing is turned by Q.
    """

    def __init__(self, tiles: Tiles, a: np.ndarray, n: int, keep: bool = True) -> None:
        self.tiles, self.n, self._keep = tiles, n, keep
        self.rows, self.columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
        self._kept: list[tuple[int, np.ndarray, np.ndarray]] = []  # row number, this rank's rows of V from there on, T
        if tiles.grid.inside:
            for k in range(0, n - 2, PANEL):
                self._panel(a, k, min(PANEL, n - 2 - k))

    def _panel(self, a: np.ndarray, k: int, b: int) -> None:
        """Reduce b columns from k on, then apply A := (I - V Tᴴ Vᴴ) (A - Y Vᴴ) to what is right of them."""
        tiles, n, rows, columns = self.tiles, self.n, self.rows, self.columns
        every, right, xp = tiles.grid.everyone, partial(first, columns), kernels.on_host(tiles.grid.backend)
        v, y, t = (xp.zeros((m, b), a.dtype) for m in (n - k - 1, n, b))
        for q in range(b):
            j = k + q
            x = xp.zeros(n, a.dtype)
            mine = tiles.j == tiles.owner(j)[1]
            if mine:  # column j, with the reflections of this panel from the right
                x[rows] = a[:, right(j)]
                if q:
                    x[rows] -= y[rows, :q] @ v[q - 1, :q].conj()
            every.all_reduce(x)
            low = x[k + 1 :]
            low -= v[:, :q] @ (t[:q, :q].conj().T @ (v[:, :q].conj().T @ low))
            v[q:, q], tau, low[q] = reflector(low[q:])
            low[q + 1 :] = 0
            if mine:
                a[:, right(j)] = x[rows]
            found = xp.zeros(n, a.dtype)
            found[rows] = a[:, right(j + 1) :] @ v[columns[right(j + 1) :] - k - 1, q]
            every.all_reduce(found)
            inner = v[:, :q].conj().T @ v[:, q]
            t[:q, q], t[q, q] = -tau * (t[:q, :q] @ inner), tau
            y[:, q] = tau * (found - y[:, :q] @ inner)
        after, top = right(k + b), first(rows, k + 1)
        behind = xp.ascontiguousarray(kernels.adjoint(v[columns[after:] - k - 1]))
        kernels.subtract(a[:, after:], xp.ascontiguousarray(y[rows]), behind)
        below = v[rows[top:] - k - 1]
        reflect(tiles, below, t, a[top:, after:], adjoint=True)
        if self._keep:
            self._kept.append((k + 1, below, t))

    def times(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        for k, v, t in reversed(self._kept):
            reflect(self.tiles, v, t, z[first(self.rows, k) :])


# ------------------------------------------------------------------------------------------------ one rank's work
def on_first_rank(n: int, grid: Grid) -> Places:
    """Return the places of a matrix [n, n] that the first rank has."""
    every, none = np.arange(n), np.zeros(0, np.intp)
    return [(every, every) if p == 0 else (none, none) for p in range(grid.size)]


def sent_home(whole: np.ndarray | None, n: int, dtype: Any, layout: Layout, grid: Grid) -> DistArray:
    """Return a matrix that the first rank has, in a layout.  Collective over the grid."""
    block = kernels.on_host(grid.backend).empty((0, 0), dtype) if whole is None else whole
    rest, _ = resting(layout, (n, n), grid.sizes)
    block = move(block, on_first_rank(n, grid), rest, grid)
    return DistArray(grid.backend.from_host(block), (n, n), layout, grid)


def schur_form(h: np.ndarray, vectors: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return T, Z, the eigenvalues, and LAPACK's `info` of a Hessenberg matrix H = Z T Zᴴ; real of a real one.

    In Fortran's order H is overwritten.  Without `vectors` T and Z are of no use.
    """
    if not has_values(h):
        return shape_solver.schur(h, vectors)
    n, real = len(h), h.dtype.kind != "c"
    t = np.asfortranarray(h)
    z = np.zeros((n, n) if vectors else (1, 1), h.dtype, order="F")
    parts = [np.zeros(n, h.dtype) for _ in range(1 + real)]
    if not n:
        return t, z, np.zeros(0, np.result_type(h.dtype, np.complex64)), 0
    info, work, size = 0, np.zeros(1, h.dtype), -1
    for _ in range(2):  # the first call says what work it needs
        info = kernels.call(
            "hseqr", h.dtype, *(("S", "I") if vectors else ("E", "N")), n, 1, n, t, n, *parts, z, len(z), work, size
        )
        size = max(1, n, int(work[0].real))
        work = np.zeros(size, h.dtype)
    return t, z, parts[0] + 1j * parts[1] if real else parts[0], info


def triangular_vectors(t: np.ndarray) -> np.ndarray:
    """Return the right eigenvectors of a Schur form; of a real one the real and imaginary parts of pairs in turn."""
    if not has_values(t):
        return shape_solver.triangular_vectors(t)
    n = len(t)
    x = np.zeros((n, n), t.dtype, order="F")
    more = [np.zeros(n, t.real.dtype)] if t.dtype.kind == "c" else []
    unused, found = np.zeros(1, t.dtype), np.zeros(1, blas.scipy_integer())
    if not n:
        return x
    kernels.call(
        "trevc", t.dtype, "R", "A", np.zeros(n, found.dtype), n, t, n, unused, 1, x, n, n, found,
        np.zeros(3 * n, t.dtype), *more,
    )  # fmt: skip
    return x


# ------------------------------------------------------------------------------------------------ balancing
def isolated(tiles: Tiles, a: np.ndarray, n: int) -> tuple[Numbers, int, int]:
    """Return the order of rows and columns that isolates eigenvalues, as `gebal`, and where the rest begins and ends.

    In that order the matrix is upper triangular before and behind the rest.
    """
    rows, columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
    full = ((a != 0) & (rows[:, None] != columns[None, :])).astype(np.float32)
    front: list[int] = []
    back: list[int] = []
    rest = np.ones(n, bool)
    while rest.any():
        counts = _summed(tiles, n, full @ rest[columns].astype(np.float32), rest[rows].astype(np.float32) @ full)
        empty_row, empty_column = rest & (counts == 0)
        if empty_row.any():
            back = [*np.flatnonzero(empty_row).tolist(), *back]
            rest &= ~empty_row
        elif empty_column.any():
            front += np.flatnonzero(empty_column).tolist()
            rest &= ~empty_column
        else:
            break
    order = np.array([*front, *np.flatnonzero(rest).tolist(), *back], np.intp)
    return order, len(front), n - len(back)


def exponents(tiles: Tiles, a: np.ndarray, n: int, low: int, high: int) -> np.ndarray:
    """Return powers of two for the D with which D⁻¹ A D has rows and columns of like size, from `low` to `high`.

    This is Osborne's iteration, for all rows at once and with half its steps; zeros where it gains less than 5%.
    """
    rows, columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
    size = np.abs(a).astype(np.float64)
    size[(rows[:, None] == columns[None, :]) | (rows < low)[:, None] | (rows >= high)[:, None]] = 0
    size[:, (columns < low) | (columns >= high)] = 0
    most = int(np.finfo(a.dtype).maxexp * 0.45)
    powers, before, backend = np.zeros(n), 0.0, tiles.grid.backend
    assumed = None if backend.values else backend.assume("balancing", "how many rounds balance a matrix")

    def sums(powers: np.ndarray) -> np.ndarray:
        scaled = size * np.exp2(powers[columns][None, :] - powers[rows][:, None])
        return _summed(tiles, n, scaled.sum(axis=1), scaled.sum(axis=0))

    for sweep in range(SWEEPS):
        by_row, by_column = sums(powers)
        before = before if sweep else float(by_row.sum())
        both = (by_row > 0) & (by_column > 0)
        step = np.zeros(n)
        step[both] = np.log2(by_row[both] / by_column[both]) / 4
        powers = np.clip(powers + step, -most, most)
        if np.abs(step).max(initial=0) < 0.5 if assumed is None else sweep + 1 == assumed:
            break
    found = np.round(powers)
    return found if float(sums(found)[0].sum()) < 0.95 * before else np.zeros(n)


def _summed(tiles: Tiles, n: int, by_row: np.ndarray, by_column: np.ndarray) -> np.ndarray:
    """Return the sums of all ranks' numbers, one for each of n rows and columns, [2, n]; ones of arrays without values.

    Collective.
    """
    rows, columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
    found: np.ndarray = kernels.on_host(tiles.grid.backend).zeros((2, n))
    found[0, rows], found[1, columns] = by_row, by_column
    tiles.grid.everyone.all_reduce(found)
    return found if has_values(found) else np.ones((2, n))
