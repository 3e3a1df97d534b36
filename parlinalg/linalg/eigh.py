"""Eigenvalues and eigenvectors of Hermitian matrices on tiles.

The matrix becomes tridiagonal by reflections, panel by panel, as in LAPACK's `sytrd` and `hetrd`, with two all-reduces
a column.  Divide and conquer gives each rank some rows of the eigenvectors of the tridiagonal matrix (`divide`); they
move to tiles and go back through the reflections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from parlinalg.comm import Comm
from parlinalg.linalg import kernels
from parlinalg.linalg.divide import tridiagonal_vectors
from parlinalg.linalg.qr import reflect
from parlinalg.linalg.tiles import Board, Tiles, board, move

PANEL = 32
"""Columns whose reflections are applied to the rest of the matrix at once."""
TOGETHER = 4
"""Panels whose reflections are applied to vectors at once."""
TINY = 1e-25
"""A square of a length from which on to its inverse lengths are formed by squares, in all dtypes."""


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
        self._kept = Kept(self.rows)
        if tiles.grid.inside:
            with board(tiles.grid.everyone, n, a.dtype) as lent:
                for k in range(0, n, PANEL):
                    self._panel(lent, a, k, min(PANEL, n - k))
            self._kept.close()

    def _panel(self, lent: Board, a: np.ndarray, k: int, b: int) -> None:
        """Reduce b columns from k on, then apply A := A - V Wᴴ - W Vᴴ to what is right of them."""
        tiles, m, rows, columns = self.tiles, self.n - k, self.rows, self.columns
        v, w = np.zeros((b, m), a.dtype), np.zeros((b, m), a.dtype)  # columns of V and W, one in a row
        tau = np.zeros(b, a.dtype)
        down, right = partial(first, rows), partial(first, columns)
        low, here, there = down(k), places(rows[down(k) :] - k), columns[right(k) :] - k
        for q in range(b):
            j = k + q
            x = np.zeros(m, a.dtype)
            if tiles.j == tiles.owner(j)[1]:  # column j, with the reflections of this panel so far
                x[here] = a[low:, right(j)]
                if q:
                    x[here] -= (w[:q, q].conj() @ v[:q] + v[:q, q].conj() @ w[:q])[here]
            x = lent.total(x)
            self.d[j] = x[q].real
            if j == self.n - 1:
                break
            v[q, q + 1 :], tau[q], self.e[j] = reflector(x[q + 1 :])
            if not tau[q]:
                continue
            y = np.zeros(m, a.dtype)
            top, left = down(j + 1), right(j + 1)
            y[places(rows[top:] - k)] = a[top:, left:] @ v[q, places(columns[left:] - k)]
            if q:
                mine = share(q + 1, m, lent.comm)  # each rank corrects its share of the elements
                inner = v[q].conj()
                y[mine] -= (w[:q] @ inner).conj() @ v[:q, mine] + (v[:q] @ inner).conj() @ w[:q, mine]
            y = lent.total(y)
            y[: q + 1] = 0
            y *= tau[q]
            w[q] = y - (0.5 * tau[q] * np.vdot(y, v[q])) * v[q]
        after = k + b
        below, behind = rows[down(after) :] - k, there[right(after) - right(k) :]
        both, other = np.concatenate([v[:, below], w[:, below]]), np.concatenate([w[:, behind], v[:, behind]])
        kernels.subtract(a[down(after) :, right(after) :], both.T, np.conj(other))
        self._kept.add(k, v, tau)

    def times(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        self._kept.times(self.tiles, z)


class Kept:
    """Reflections in the order in which they were found, of some panels together: so that products of them are fast.

    Parameters
    ----------
    rows : array of int
        The numbers of this rank's rows.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._open: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._closed: list[tuple[int, np.ndarray, np.ndarray]] = []  # row number, this rank's rows of V from there, T

    def add(self, k: int, v: np.ndarray, tau: np.ndarray) -> None:
        """Keep the reflections of a panel: row i of v, from element number k of vectors on, and tau[i]."""
        self._open.append((k, v, tau))
        if len(self._open) == TOGETHER:
            self.close()

    def close(self) -> None:
        """Put the panels that came last together."""
        if not self._open:
            return
        k, longest, _ = self._open[0]
        v = np.zeros((sum(len(x) for _, x, _ in self._open), longest.shape[1]), longest.dtype)
        at = 0
        for start, each, _ in self._open:
            v[at : at + len(each), start - k :] = each
            at += len(each)
        t = triangle(v.T, np.concatenate([tau for _, _, tau in self._open]))
        self._closed.append((k, np.ascontiguousarray(v[:, places(self._rows[first(self._rows, k) :] - k)]).T, t))
        self._open = []

    def times(self, tiles: Tiles, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by the product of all reflections and z.  Collective."""
        for k, v, t in reversed(self._closed):
            reflect(tiles, v, t, z[first(self._rows, k) :])


def places(numbers: np.ndarray) -> Any:
    """Return what indexes these places, which rise, the fastest: a slice where they lie side by side."""
    if len(numbers) and int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def share(start: int, stop: int, comm: Comm) -> slice:
    """Return this rank's share of the places from `start` up to `stop`."""
    n = stop - start
    return slice(start + n * comm.rank // comm.size, start + n * (comm.rank + 1) // comm.size)


def first(numbers: np.ndarray, k: int) -> int:
    """Return where the numbers from k on begin."""
    return int(np.searchsorted(numbers, k))


def reflector(x: np.ndarray) -> tuple[np.ndarray, complex, float]:
    """Return v, tau and beta of a reflection H = I - tau v vᴴ with Hᴴ x = (beta, 0, …), v[0] = 1 and beta real.

    This is LAPACK's `larfg`.
    """
    alpha, rest = x[0], x[1:]
    square = np.vdot(rest, rest).real
    if TINY < square < 1 / TINY:
        size = math.sqrt(square + abs(alpha) ** 2)
    else:  # squares under- or overflow
        largest = float(np.abs(x).max())
        size = largest * float(np.linalg.norm(x / largest)) if largest else 0.0
        if not rest.any() and not alpha.imag:
            v = np.zeros_like(x)
            v[0] = 1
            return v, 0, float(alpha.real)
    beta = x.real.dtype.type(-math.copysign(size, alpha.real))
    v = x / (alpha - beta)
    v[0] = 1
    return v, (beta - alpha) / beta, float(beta)


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
