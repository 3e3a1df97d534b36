"""Eigenvalues and eigenvectors of Hermitian matrices on tiles.

The matrix becomes tridiagonal by reflections, panel by panel, as in LAPACK's `sytrd` and `hetrd`, with two all-reduces
a column.  Divide and conquer gives each rank some rows of the eigenvectors of the tridiagonal matrix (`divide`); they
move to tiles and go back through the reflections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from parlinalg.linalg import kernels
from parlinalg.linalg.divide import tridiagonal_vectors
from parlinalg.linalg.qr import reflect
from parlinalg.linalg.tiles import Tiles, move

PANEL = 32
"""Columns whose reflections are applied to the rest of the matrix at once."""


class Tridiagonal:
    """The reduction A = Q T Qᴴ of a Hermitian matrix, of which this rank has tiles of both triangles; overwritten.

    Attributes
    ----------
    d, e : array
        The diagonal of T and what is below it, on every rank; real.
    """

    def __init__(self, tiles: Tiles, a: np.ndarray, n: int) -> None:
        self.tiles, self.n = tiles, n
        self.rows, self.columns = tiles.rows(n)[tiles.i], tiles.columns(n)[tiles.j]
        real = a.real.dtype
        self.d, self.e = np.zeros(n, real), np.zeros(max(0, n - 1), real)
        self._kept: list[tuple[int, np.ndarray, np.ndarray]] = []  # row number, this rank's rows of V from there on, T
        if tiles.grid.inside:
            for k in range(0, n, PANEL):
                self._panel(a, k, min(PANEL, n - k))

    def _panel(self, a: np.ndarray, k: int, b: int) -> None:
        """Reduce b columns from k on, then apply A := A - V Wᴴ - W Vᴴ to what is right of them."""
        tiles, n, rows, columns = self.tiles, self.n, self.rows, self.columns
        every = tiles.grid.everyone
        v, w = np.zeros((n - k, b), a.dtype), np.zeros((n - k, b), a.dtype)
        tau = np.zeros(b, a.dtype)
        down, right = partial(first, rows), partial(first, columns)
        here, there = rows[down(k) :] - k, columns[right(k) :] - k
        for q in range(b):
            j = k + q
            x = np.zeros(n - k, a.dtype)
            if tiles.j == tiles.owner(j)[1]:  # column j, with the reflections of this panel so far
                x[here] = a[down(k) :, right(j)]
                x[here] -= v[here, :q] @ w[q, :q].conj() + w[here, :q] @ v[q, :q].conj()
            every.all_reduce(x)
            self.d[j] = x[q].real
            if j == n - 1:
                break
            v[q + 1 :, q], tau[q], self.e[j] = reflector(x[q + 1 :])
            if not tau[q]:
                continue
            y = np.zeros(n - k, a.dtype)
            low = down(j + 1)
            y[rows[low:] - k] = a[low:, right(j + 1) :] @ v[columns[right(j + 1) :] - k, q]
            mine = np.s_[q + 1 + every.rank :: every.size]  # each rank corrects its share of the elements
            y[mine] -= v[mine, :q] @ (w[:, :q].conj().T @ v[:, q]) + w[mine, :q] @ (v[:, :q].conj().T @ v[:, q])
            every.all_reduce(y)
            y[: q + 1] = 0
            y *= tau[q]
            w[:, q] = y - (0.5 * tau[q] * np.vdot(y, v[:, q])) * v[:, q]
        after = k + b
        below, behind = here[down(after) - down(k) :], there[right(after) - right(k) :]
        rest = a[down(after) :, right(after) :]
        both, other = np.hstack([v[below], w[below]]), np.hstack([w[behind], v[behind]])
        kernels.subtract(rest, both, np.ascontiguousarray(kernels.adjoint(other)))
        self._kept.append((k, v[here], triangle(v, tau)))

    def times(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        for k, v, t in reversed(self._kept):
            reflect(self.tiles, v, t, z[int(np.searchsorted(self.rows, k)) :])


def first(numbers: np.ndarray, k: int) -> int:
    """Return where the numbers from k on begin."""
    return int(np.searchsorted(numbers, k))


def reflector(x: np.ndarray) -> tuple[np.ndarray, complex, float]:
    """Return v, tau and beta of a reflection H = I - tau v vᴴ with Hᴴ x = (beta, 0, …), v[0] = 1 and beta real.

    This is LAPACK's `larfg`.
    """
    v = np.zeros_like(x)
    v[0] = 1
    alpha, largest = x[0], float(np.abs(x).max())
    if not largest or not (np.any(x[1:]) or alpha.imag):
        return v, 0, float(alpha.real)
    scaled = x / largest
    beta = -np.copysign(np.linalg.norm(scaled), scaled[0].real)
    tau = (beta - scaled[0]) / beta
    v[1:] = scaled[1:] / (scaled[0] - beta)
    return v, tau, float(beta * largest)


def triangle(v: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Return T of the product of reflections, I - V T Vᴴ (LAPACK's `larft`)."""
    b = len(tau)
    t, inner = np.zeros((b, b), v.dtype), v.conj().T @ v
    for q in range(b):
        t[:q, q] = -tau[q] * (t[:q, :q] @ inner[:q, q])
        t[q, q] = tau[q]
    return t


def tridiagonal_values(d: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return the eigenvalues of a real tridiagonal matrix, rising."""
    if len(d) < 2:
        return d.copy()
    values, info = kernels.lapack("sterf", d.dtype)(d, e)
    if info:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")
    return values


def vectors(reduced: Tridiagonal, choose: Callable[[np.ndarray], slice]) -> tuple[np.ndarray, np.ndarray, slice]:
    """Return all eigenvalues, rising, this rank's tiles of the vectors that are chosen, and which these are.

    Collective over all ranks.
    """
    tiles, n, grid = reduced.tiles, reduced.n, reduced.tiles.grid
    values, at, z = np.zeros(n, reduced.d.dtype), slice(0, 0), np.empty((0, 0), reduced.d.dtype)
    if grid.inside:
        rows = np.arange(grid.rank, n, grid.size)
        values, z = tridiagonal_vectors(reduced.d, reduced.e, rows, grid.everyone, choose)
        at = choose(values)
    failed, start, stop = tiles.worst([not np.isfinite(values).all(), at.start, at.stop])
    if failed:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")
    at = slice(int(start), int(stop))
    k = at.stop - at.start
    have = [(np.arange(p, n, grid.size), np.arange(k)) for p in range(grid.size)]
    return values, move(z, have, tiles.places(tiles.rows(n), tiles.columns(k)), grid), at
