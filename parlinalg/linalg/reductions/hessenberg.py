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
from parlinalg.comm.shared import lasting_array
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.panels.qr import reflect
from parlinalg.linalg.reductions.reflections import PANEL, first, reflector
from parlinalg.linalg.tiles import Numbers, Places, Tiles, move, resting, transposed

SWEEPS = 20
"""Rounds of balancing."""
SOME = 1 << 15
"""Elements of a matrix of which temporary arrays exist at once, while it is balanced."""


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


def on_one(held: list[np.ndarray], tiles: Tiles, n: int) -> np.ndarray:
    """Return a Hessenberg matrix [n, n] on the first rank, in Fortran's order, no elements on others.  Collective.

    Ranks that share memory provide equal parts of it.  The lower left quarter is not moved, and has any elements:
    LAPACK reads none of them, and replaces them by zeros of T.

    Parameters
    ----------
    held : list
        This rank's tiles, which are taken out of the list.
    """
    a, grid = held.pop(), tiles.grid
    if grid.size == 1:
        if isinstance(a, np.ndarray):
            _transpose(a)
        return a.T
    rows, columns, half, xp = tiles.rows(n), tiles.columns(n), n // 2, kernels.on_host(grid.backend)
    low, left = first(rows[tiles.i], half + 1), first(columns[tiles.j], half)
    parts = [a[:low, :left].copy(), a[:, left:].copy()] if grid.inside else [a, a]
    del a
    room = lasting_array(grid.everyone, n * n, parts[0].dtype, keep=False) if grid.inside else None
    size = n if grid.inside and grid.rank == 0 else 0
    found = xp.empty((size, size), parts[0].dtype) if room is None else room[: size * size].reshape(size, size)
    for down, across in (((0, half + 1), (0, half)), ((0, n), (half, n))):  # transposed
        have = [([x[first(x, a) : first(x, b)] for x in each]) for each, (a, b) in ((rows, down), (columns, across))]
        want = [(np.arange(*across), np.arange(*down)) if p == 0 else 2 * (rows[0][:0],) for p in range(grid.size)]
        out = found[across[0] : across[1], : down[1]]
        move(parts.pop(0).T, transposed(tiles.places(*have)), want, grid, out=out)
    return found.T


def _transpose(a: np.ndarray) -> None:
    """Transpose a square matrix in place."""
    for k in range(0, len(a), PANEL):
        corner, right = a[k : k + PANEL, k : k + PANEL], a[k : k + PANEL, k + PANEL :].copy()
        corner[...] = corner.T.copy()
        a[k : k + PANEL, k + PANEL :] = a[k + PANEL :, k : k + PANEL].T
        a[k + PANEL :, k : k + PANEL] = right.T


def sent_home(whole: np.ndarray | None, n: int, dtype: Any, layout: Layout, grid: Grid) -> DistArray:
    """Return a matrix that the first rank has, in a layout.  Collective over the grid."""
    block = kernels.on_host(grid.backend).empty((0, 0), dtype) if whole is None else whole
    rest, _ = resting(layout, (n, n), grid.sizes)
    block = move(block, on_first_rank(n, grid), rest, grid)
    return DistArray(grid.backend.from_host(block), (n, n), layout, grid)


def schur_form(
    h: np.ndarray, vectors: bool, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:  # fmt: skip
    """Return T, Z, the eigenvalues, and LAPACK's `info` of a Hessenberg matrix H = Z T Zᴴ; real of a real one.

    In Fortran's order H is overwritten.  Without `vectors` T and Z are of no use.  With `out`, in Fortran's order, Z is
    written there.
    """
    if not has_values(h):
        return shape_solver.schur(h, vectors)
    n, real = len(h), h.dtype.kind != "c"
    t = np.asfortranarray(h)
    z = np.zeros((n, n) if vectors else (1, 1), h.dtype, order="F") if out is None else out
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


def triangular_vectors(t: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the right eigenvectors of a Schur form; of a real one the real and imaginary parts of pairs in turn.

    With `out`, in Fortran's order, they are written there.
    """
    if not has_values(t):
        return shape_solver.triangular_vectors(t)
    n = len(t)
    x = np.empty((n, n), t.dtype, order="F") if out is None else out
    x[...] = 0
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
    full: np.ndarray = kernels.on_host(tiles.grid.backend).empty(a.shape, np.float32)
    for at in _some_rows(a):
        full[at] = (a[at] != 0) & (rows[at, None] != columns[None, :])
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
    outside, xp = [(x < low) | (x >= high) for x in (rows, columns)], kernels.on_host(tiles.grid.backend)
    most = int(np.finfo(a.dtype).maxexp * 0.45)
    powers, before, backend = np.zeros(n), 0.0, tiles.grid.backend
    assumed = None if backend.values else backend.assume("balancing", "how many rounds balance a matrix")

    def sums(powers: np.ndarray) -> np.ndarray:
        by_row, by_column = (xp.zeros(len(numbers), np.float64) for numbers in (rows, columns))
        for at in _some_rows(a):
            size = np.abs(a[at]).astype(np.float64)
            size[(rows[at, None] == columns[None, :]) | outside[0][at, None] | outside[1][None, :]] = 0
            if powers.any() or not has_values(a):
                size *= np.exp2(powers[columns][None, :] - powers[rows[at]][:, None])
            by_row[at] = size.sum(axis=1)
            by_column += size.sum(axis=0)
        return _summed(tiles, n, by_row, by_column)

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


def balanced(tiles: Tiles, a: np.ndarray, n: int, powers: np.ndarray) -> None:
    """Replace A by D⁻¹ A D, for a diagonal D of these powers of two."""
    rows, columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
    for at in _some_rows(a) if powers.any() or not has_values(a) else ():
        a[at] *= np.exp2(powers[columns][None, :] - powers[rows[at]][:, None]).astype(a.real.dtype)


def _some_rows(a: np.ndarray) -> list[slice]:
    """Return rows of which temporary arrays are small; all of an array without values."""
    step = max(1, SOME // max(1, a.shape[1])) if has_values(a) else max(1, len(a))
    return [slice(start, start + step) for start in range(0, len(a), step)]


def _summed(tiles: Tiles, n: int, by_row: np.ndarray, by_column: np.ndarray) -> np.ndarray:
    """Return the sums of all ranks' numbers, one for each of n rows and columns, [2, n]; ones of arrays without values.

    Collective.
    """
    rows, columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
    found: np.ndarray = kernels.on_host(tiles.grid.backend).zeros((2, n))
    found[0, rows], found[1, columns] = by_row, by_column
    tiles.grid.everyone.all_reduce(found)
    return found if has_values(found) else np.ones((2, n))
