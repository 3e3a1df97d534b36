"""Singular values and vectors of matrices on tiles.

The matrix becomes bidiagonal by reflections from both sides, panel by panel, as in LAPACK's `gebrd`, with four
all-reduces a column.  Every rank finds the singular values of the bidiagonal matrix by divide and conquer, and takes
its tiles of the singular vectors back through the reflections.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from parlinalg.linalg import kernels
from parlinalg.linalg.eigh import PANEL, Kept, first, places, reflector, share
from parlinalg.linalg.tiles import Board, Tiles, board

TALL = 1.5
"""Rows of a matrix by its columns from which on singular values are those of R of its QR factorization."""


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
        self._left, self._right = Kept(self.rows), Kept(self._lines)
        if tiles.grid.inside:
            with board(tiles.grid.everyone, max(shape), a.dtype) as lent:
                for k in range(0, n, PANEL):
                    self._panel(lent, a, k, min(PANEL, n - k))
            self._left.close()
            self._right.close()

    def _panel(self, lent: Board, a: np.ndarray, k: int, b: int) -> None:
        """Reduce b columns and rows from k on, then apply A := A - V Yᴴ - X Uᴴ to what is behind them."""
        tiles, (m, n), rows, columns = self.tiles, self.shape, self.rows, self.columns
        v, x = np.zeros((b, m - k), a.dtype), np.zeros((b, m - k), a.dtype)  # columns of V and X, one in a row
        u, y = np.zeros((b, n - k), a.dtype), np.zeros((b, n - k), a.dtype)
        tau, pi = np.zeros(b, a.dtype), np.zeros(b, a.dtype)
        down, right = partial(first, rows), partial(first, columns)
        low, left = down(k), right(k)
        here, there = places(rows[low:] - k), places(columns[left:] - k)
        for q in range(b):
            j = k + q
            i, behind = tiles.owner(j)
            column = np.zeros(m - k, a.dtype)
            if tiles.j == behind:
                column[here] = a[low:, right(j)]
                if q:
                    column[here] -= (y[:q, q].conj() @ v[:q] + u[:q, q].conj() @ x[:q])[here]
            column = lent.total(column)
            v[q, q:], tau[q], self.d[j] = reflector(column[q:])
            if j == n - 1:
                break
            # y := tau (A - V Yᴴ - X Uᴴ)ᴴ v
            found, mine = np.zeros(n - k, a.dtype), share(q + 1, n - k, lent.comm)  # each corrects its share
            top, after, inner = down(j), right(j + 1), v[q].conj()
            later = places(columns[after:] - k)
            found[later] = (inner[places(rows[top:] - k)] @ a[top:, after:]).conj()
            if q:
                found[mine] -= (v[:q] @ inner).conj() @ y[:q, mine] + (x[:q] @ inner).conj() @ u[:q, mine]
            found = lent.total(found)
            found[: q + 1] = 0
            y[q] = tau[q] * found
            # row j, as a column of its conjugates
            line = np.zeros(n - k, a.dtype)
            if tiles.i == i:
                line[there] = a[down(j), left:].conj()
                line[there] -= (v[: q + 1, q].conj() @ y[: q + 1] + x[:q, q].conj() @ u[:q])[there]
            line = lent.total(line)
            u[q, q + 1 :], pi[q], self.e[j] = reflector(line[q + 1 :])
            # x := pi (A - V Yᴴ - X Uᴴ) u
            found, mine = np.zeros(m - k, a.dtype), share(q + 1, m - k, lent.comm)
            top, inner = down(j + 1), u[q].conj()
            found[places(rows[top:] - k)] = a[top:, after:] @ u[q, later]
            found[mine] -= (y[: q + 1] @ inner).conj() @ v[: q + 1, mine] + (u[:q] @ inner).conj() @ x[:q, mine]
            found = lent.total(found)
            found[: q + 1] = 0
            x[q] = pi[q] * found
        below, later = rows[down(k + b) :] - k, columns[right(k + b) :] - k
        both, other = np.concatenate([v[:, below], x[:, below]]), np.concatenate([y[:, later], u[:, later]])
        kernels.subtract(a[down(k + b) :, right(k + b) :], both.T, np.conj(other))
        self._left.add(k, v, tau)
        self._right.add(k, u, pi)

    def left(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        self._left.times(self.tiles, z)

    def right(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the rows that it would have of A's columns, by P z.  Collective."""
        self._right.times(self.tiles, z)


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
