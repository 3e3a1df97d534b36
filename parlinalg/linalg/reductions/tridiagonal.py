"""Eigenvalues and eigenvectors of Hermitian matrices on tiles.

The matrix becomes tridiagonal by reflections, panel by panel, as in LAPACK's `sytrd` and `hetrd`: for each column the
ranks sum a product with the matrix, of which each reads its half of its tiles, and gather what the sum makes of it.
Divide and conquer gives each rank some rows of the eigenvectors of the tridiagonal matrix (`divide`); they move to
tiles and go back through the reflections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from parlinalg.backend import compiled, memory, namespace, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.comm.shared import SharedCollectives
from parlinalg.linalg import kernels
from parlinalg.linalg.reductions.divide import tridiagonal_vectors
from parlinalg.linalg.reductions.halves import Half
from parlinalg.linalg.reductions.reduction import Reduction
from parlinalg.linalg.reductions.reflections import PANEL, TINY, reflector, share, to_tiles
from parlinalg.linalg.tiles import Deal, Tiles


class Tridiagonal(Reduction):
    """The reduction A = Q T Qᴴ of a Hermitian matrix.

    Parameters
    ----------
    tiles : Tiles
        Where rows lie that are turned by Q.
    workers : Deal
        How the matrix is dealt to the ranks that reduce it: the first ones of the grid (`workers`).
    half : Half or None
        The elements with which this rank computes, of that deal; overwritten.  None on the other ranks.
    keep : bool
        See `Reduction`.
    """

    def __init__(
        self, tiles: Tiles, workers: Deal, half: Half | None, n: int, dtype: np.dtype[Any], keep: bool = True
    ) -> None:  # fmt: skip
        super().__init__(tiles, n, dtype, keep)
        (self._kept,), self._half = self._keepers(workers, n), half
        if tiles.grid.inside:
            self._run(workers, max(n * min(PANEL, n), n + 2 * PANEL))
            self._kept.close()
        self._half = None

    def _keep(self, k: int, message: np.ndarray) -> None:
        self._kept.add(k, message[:, :-1], message[:, -1])

    def _wide(self, k: int) -> int:
        return self.n - k + 1

    def _panel(self, group: SharedCollectives, k: int, b: int) -> np.ndarray | None:
        """Reduce b columns from k on, apply A := A - V Wᴴ - W Vᴴ to what is right of them; return [V, tau].

        Vectors have the elements from number k on in the order of `half`.  Of sums each rank makes its share, and all
        take the same bits: else columns of rounding errors would give each rank reflections of its own.
        """
        half, dtype, m, xp = cast("Half", self._half), self.dtype, self.n - k, self.xp
        at = half.begin(k, less=self.keep and not self._kept.waits)  # which would be there beside the copies
        columns = group.all_reduce(half.columns(k, b))
        both, tau = xp.zeros((2 * b, m), dtype), xp.zeros(b, dtype)  # v and w of each column, one in a row
        mine, term = share(0, m, group.comm), xp.empty(m + 2 * b + 1, dtype)
        counts = [(m * (p + 1) // group.comm.size) - m * p // group.comm.size for p in range(group.comm.size)]
        x, fast, scalars = columns[0], compiled.ready(both, term, tau), xp.empty(2, dtype)
        for q in range(b):
            j, old = k + q, 2 * q
            self.d[j] = x[at[j]].real
            if j == self.n - 1:
                break
            done, after, v, y, size = at[k : j + 1], int(at[j + 1]), both[old], term[:m], m + old + 1
            if fast and _reflector_loop(x, done, after, v, scalars):
                tau[q], self.e[j] = scalars
            else:
                with compiled.as_loop("reflector", both, x, v):
                    x[done] = 0
                    v[:], tau[q], self.e[j] = reflector(x, after)
            half.times(v, y)
            if fast:
                _inner_loop(both, old, mine.start, mine.stop, term)
            else:
                with compiled.as_loop("inner", both, both[: old + 1, mine], term):
                    term[m : size - 1] = (both[:old, mine] @ v[mine].conj()).conj()
                    term[size - 1] = np.vdot(v, y)
            found = group.all_reduce(term[:size])
            pair = xp.empty((mine.stop - mine.start, 1 + (q + 1 < b)), dtype)
            with compiled.as_loop("columns", both, both[: old + 1, mine], pair):
                _columns(pair, found, both[: old + 1], columns[q + 1 : q + 2], mine.start, after, tau[q])
            whole = group.all_gather(pair, counts)
            if fast:
                _parted_loop(whole, both[old + 1], x, done)
                continue
            with compiled.as_loop("parted", both, whole, whole):
                both[old + 1] = whole[:, 0]
                if q + 1 < b:
                    x = whole[:, 1].copy()
                both[old + 1, done] = 0
        del columns, x
        half.update(k + b, both)
        if not self.keep:
            return None
        found = xp.empty((b, m + 1), dtype)
        for line, v in zip(found, both[::2], strict=True):  # one by one, so that no other copy is there
            line[:-1] = v[at[k:]]
        found[:, -1] = tau
        return found

    def times(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        self._kept.times(self.tiles, z)


@compiled.loop(sums=True)
def _reflector_loop(x: Any, done: Any, after: int, v: Any, scalars: Any) -> bool:
    """Set v, and tau and beta in `scalars`, to those of `reflector` of x with zeros at `done`, if squares allow it."""
    for i in done:
        x[i] = 0
    alpha = x[after]
    x[after] = 0
    square = x.dtype.type(0)
    for j in range(len(x)):
        square += x[j] * x[j]
    x[after] = alpha
    if not TINY < square < 1 / TINY:
        return False
    beta = x.dtype.type(-math.copysign(math.sqrt(square + alpha * alpha), alpha))
    for j in range(len(x)):
        v[j] = x[j] / (alpha - beta)
    v[after] = 1
    scalars[0], scalars[1] = (beta - alpha) / beta, beta
    return True


@compiled.loop(sums=True)
def _inner_loop(both: Any, old: int, start: int, stop: int, term: Any) -> None:
    """Put this rank's terms of products with v, row number `old`, behind A v: those of the rows before, and A v's."""
    m = both.shape[1]
    for i in range(old):
        part = both.dtype.type(0)
        for j in range(start, stop):
            part += both[i, j] * both[old, j]
        term[m + i] = part
    part = both.dtype.type(0)
    for j in range(m):
        part += both[old, j] * term[j]
    term[m + old] = part


@compiled.loop()
def _parted_loop(whole: Any, w: Any, x: Any, done: Any) -> None:
    """Part gathered columns into w, with zeros at `done`, and x."""
    for j in range(len(w)):
        w[j] = whole[j, 0]
    for i in done:
        w[i] = 0
    if whole.shape[1] > 1:
        for j in range(len(x)):
            x[j] = whole[j, 1]


def _columns(
    pair: np.ndarray, found: np.ndarray, both: np.ndarray, column: np.ndarray, start: int, after: int, tau: Any
) -> None:
    """Set this rank's share of w := tau (A - V Wᴴ - W Vᴴ) v - |tau|² / 2 (vᴴ (A - V Wᴴ - W Vᴴ) v) v.

    Parameters
    ----------
    pair : array [share, 1 or 2]
        For w and, if there are two, for the share of the next column of A - V Wᴴ - W Vᴴ - v wᴴ - w vᴴ.
    found : array [m + 2 q + 1]
        A v, the products of v with the columns before it, in turn of V and W, and vᴴ A v.
    both : array [2 q + 1, m]
        These columns, and v.
    column : array [1, m] or [0, m]
        The next column of A.
    start, after : int
        Where the share begins, and where the next column has its diagonal.
    """
    if compiled.ready(both, found, column, pair):
        _columns_loop(pair, found, both, column, start, after, tau)
        return
    (old, m), mine, xp = (len(both) - 1, both.shape[1]), slice(start, start + len(pair)), namespace(both)
    own, inner, beside = both[old, mine], found[m : m + old].reshape(-1, 2), both[:old, after]
    coefficients = xp.empty((2, old // 2, 2), both.dtype)
    coefficients[0] = inner[:, ::-1]
    np.conj(beside.reshape(-1, 2)[:, ::-1], out=coefficients[1])
    coefficients = coefficients.reshape(2, old)
    middle = found[m + old].real - 2 * np.vdot(inner[:, 0], inner[:, 1]).real
    less = 0.5 * abs(tau) ** 2 * middle
    known = coefficients @ both[:old, mine]
    w = tau * (found[mine] - known[0]) - less * own
    pair[:, 0] = w
    if len(column):
        corner = tau * (found[after] - coefficients[0] @ beside) - less
        pair[:, 1] = column[0, mine] - known[1] - w - np.conj(corner) * own


@compiled.loop(sums=True)
def _columns_loop(pair: Any, found: Any, both: Any, column: Any, start: int, after: int, tau: Any) -> None:
    """Do what `_columns` does, of real numbers, in one pass over the columns before."""
    old, m, n = len(both) - 1, both.shape[1], len(pair)
    first, second = np.zeros(n, both.dtype), np.zeros(n, both.dtype)
    middle, corner = found[m + old], found[after]
    for i in range(0, old, 2):
        v, w = both[i, start : start + n], both[i + 1, start : start + n]
        p, q, r, s = found[m + i + 1], found[m + i], both[i + 1, after], both[i, after]
        middle -= p * q + p * q
        corner -= p * s + q * r
        for j in range(n):
            first[j] += p * v[j] + q * w[j]
            second[j] += r * v[j] + s * w[j]
    less = tau * tau * middle * both.dtype.type(0.5)
    corner = tau * corner - less
    for j in range(n):
        own = both[old, start + j]
        w_j = tau * (found[start + j] - first[j]) - less * own
        pair[j, 0] = w_j
        if len(column):
            pair[j, 1] = column[0, start + j] - second[j] - w_j - corner * own


def tridiagonal_values(d: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return the eigenvalues of a real tridiagonal matrix, rising; NaNs if they do not converge."""
    if len(d) < 2:
        return d.copy()
    if not has_values(d):
        return shape_solver.tridiagonal_values(d)
    values, info = kernels.lapack("sterf", d.dtype)(d, e)
    return np.full_like(d, np.nan) if info else values


def vectors(reduced: Tridiagonal, choose: Callable[[np.ndarray], slice]) -> tuple[np.ndarray, np.ndarray, slice]:
    """Return all eigenvalues, rising, this rank's tiles of the vectors that are chosen, and which these are.

    Collective over all ranks.
    """
    tiles, n, grid = reduced.tiles, reduced.n, reduced.tiles.grid
    xp, dtype = reduced.xp, reduced.d.dtype
    values, at, z = xp.zeros(n, dtype), slice(0, 0), xp.empty((0, 0), dtype)
    if grid.inside:
        rows = np.arange(grid.rank, n, grid.size)
        memory.give_back(8 * n * len(rows))
        values, z = tridiagonal_vectors(reduced.d, reduced.e, rows, grid.everyone, choose)
        memory.give_back(z.nbytes)
    if grid.inside or not has_values(values):
        at = choose(values)
    failed, start, stop = tiles.worst([not kernels.finite(values), at.start, at.stop])
    if failed:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")
    at = slice(int(start), int(stop))
    return values, to_tiles(z, tiles, n, at.stop - at.start), at
