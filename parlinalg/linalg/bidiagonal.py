"""Singular values and vectors of matrices on tiles.

The matrix becomes bidiagonal by reflections from both sides, panel by panel, as in LAPACK's `gebrd`, with four
all-reduces a column.  Every rank finds the singular values of the bidiagonal matrix by divide and conquer, and takes
its tiles of the singular vectors back through the reflections.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from parlinalg.linalg import kernels
from parlinalg.linalg.eigh import PANEL, first, reflector, triangle
from parlinalg.linalg.qr import reflect
from parlinalg.linalg.tiles import Tiles


class Bidiagonal:
    """The reduction A = Q B Pᴴ of a matrix [m, n] with m ≥ n, of which this rank has tiles; overwritten.

    Attributes
    ----------
    d, e : array
        The diagonal of B and what is right of it, on every rank; real.
    """

    def __init__(self, tiles: Tiles, a: np.ndarray, shape: tuple[int, int]) -> None:
        self.tiles, self.shape = tiles, shape
        m, n = shape
        self.rows, self.columns = tiles.rows(m)[tiles.i], tiles.columns(n)[tiles.j]
        self._lines = tiles.rows(n)[tiles.i]  # the rows that this rank has of matrices [n, ...]
        real = a.real.dtype
        self.d, self.e = np.zeros(n, real), np.zeros(max(0, n - 1), real)
        self._left: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._right: list[tuple[int, np.ndarray, np.ndarray]] = []
        if tiles.grid.inside:
            for k in range(0, n, PANEL):
                self._panel(a, k, min(PANEL, n - k))

    def _panel(self, a: np.ndarray, k: int, b: int) -> None:
        """Reduce b columns and rows from k on, then apply A := A - V Yᴴ - X Uᴴ to what is behind them."""
        tiles, (m, n), rows, columns = self.tiles, self.shape, self.rows, self.columns
        every = tiles.grid.everyone
        v, x = np.zeros((m - k, b), a.dtype), np.zeros((m - k, b), a.dtype)
        u, y = np.zeros((n - k, b), a.dtype), np.zeros((n - k, b), a.dtype)
        tau, pi = np.zeros(b, a.dtype), np.zeros(b, a.dtype)
        down, right = partial(first, rows), partial(first, columns)
        here, there = rows[down(k) :] - k, columns[right(k) :] - k
        for q in range(b):
            j = k + q
            column = np.zeros(m - k, a.dtype)
            if tiles.j == tiles.owner(j)[1]:
                column[here] = a[down(k) :, right(j)]
                column[here] -= v[here, :q] @ y[q, :q].conj() + x[here, :q] @ u[q, :q].conj()
            every.all_reduce(column)
            v[q:, q], tau[q], self.d[j] = reflector(column[q:])
            if j == n - 1:
                break
            # y := tau (A - V Yᴴ - X Uᴴ)ᴴ v
            found = np.zeros(n - k, a.dtype)
            low, behind = down(j), right(j + 1)
            found[columns[behind:] - k] = (v[rows[low:] - k, q].conj() @ a[low:, behind:]).conj()
            mine = np.s_[q + 1 + every.rank :: every.size]  # each rank corrects its share of the elements
            found[mine] -= y[mine, :q] @ (v[:, :q].conj().T @ v[:, q]) + u[mine, :q] @ (x[:, :q].conj().T @ v[:, q])
            every.all_reduce(found)
            found[: q + 1] = 0
            y[:, q] = tau[q] * found
            # row j, as a column of its conjugates
            line = np.zeros(n - k, a.dtype)
            if tiles.i == tiles.owner(j)[0]:
                line[there] = a[down(j), right(k) :].conj()
                line[there] -= y[there, : q + 1] @ v[q, : q + 1].conj() + u[there, :q] @ x[q, :q].conj()
            every.all_reduce(line)
            u[q + 1 :, q], pi[q], self.e[j] = reflector(line[q + 1 :])
            # x := pi (A - V Yᴴ - X Uᴴ) u
            found = np.zeros(m - k, a.dtype)
            low = down(j + 1)
            found[rows[low:] - k] = a[low:, behind:] @ u[columns[behind:] - k, q]
            found[mine] -= v[mine, : q + 1] @ (y[:, : q + 1].conj().T @ u[:, q])
            found[mine] -= x[mine, :q] @ (u[:, :q].conj().T @ u[:, q])
            every.all_reduce(found)
            found[: q + 1] = 0
            x[:, q] = pi[q] * found
        after = k + b
        lower, later = here[down(after) - down(k) :], there[right(after) - right(k) :]
        both, other = np.hstack([v[lower], x[lower]]), np.hstack([y[later], u[later]])
        kernels.subtract(a[down(after) :, right(after) :], both, np.ascontiguousarray(kernels.adjoint(other)))
        at = int(np.searchsorted(self._lines, k))
        self._left.append((k, v[here], triangle(v, tau)))
        self._right.append((k, u[self._lines[at:] - k], triangle(u, pi)))

    def left(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        for k, v, t in reversed(self._left):
            reflect(self.tiles, v, t, z[int(np.searchsorted(self.rows, k)) :])

    def right(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the rows that it would have of A's columns, by P z.  Collective."""
        for k, u, t in reversed(self._right):
            reflect(self.tiles, u, t, z[int(np.searchsorted(self._lines, k)) :])


def bidiagonal_svd(d: np.ndarray, e: np.ndarray, vectors: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return U, the singular values, falling, and Vᵀ of a real upper bidiagonal matrix."""
    n = len(d)
    values, off = d.copy(), np.concatenate([e, np.zeros(1, e.dtype)])
    size = n if vectors else 0
    u, vt = (np.zeros((size, size), d.dtype, order="F") for _ in range(2))
    if not n:
        return u, values, vt
    work, steps, unused = np.zeros(3 * n * n + 8 * n, d.dtype), np.zeros(8 * n, np.intc), np.zeros(1, d.dtype)
    kind, lead = "I" if vectors else "N", max(1, size)
    failed = kernels.call(
        "bdsdc", d.dtype, "U", kind, n, values, off, u, lead, vt, lead, unused, np.zeros(1, np.intc), work, steps
    )
    if failed:
        raise np.linalg.LinAlgError("SVD did not converge")
    return u, values, vt
