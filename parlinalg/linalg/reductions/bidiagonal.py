"""Singular values and vectors of matrices on tiles.

The matrix becomes bidiagonal by reflections from both sides, panel by panel, as in LAPACK's `gebrd`, with four
all-reduces a column.  Divide and conquer gives each rank some rows of the singular vectors of the bidiagonal matrix
(`divide`); they move to tiles and go back through the reflections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from parlinalg.backend import blas, memory, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.comm.shared import SharedCollectives
from parlinalg.grid import Grid
from parlinalg.linalg import kernels
from parlinalg.linalg.reductions.divide import SIDES, STRIP, Strips, bidiagonal_strips, bidiagonal_vectors
from parlinalg.linalg.reductions.reduction import Reduction
from parlinalg.linalg.reductions.reflections import LESS, PANEL, first, owned, reflector, share, to_tiles, triangle
from parlinalg.linalg.tiles import Deal, Places, Tiles, dealt, indexer, move

LEAST = 8
"""The fewest columns of a panel."""
FEWER = 2.0
"""Shrinkage of the needed part of a matrix from which on a reduction with b copies it and frees the rest."""
TALL = 1.5
"""Rows of a matrix by its columns from which on singular values are those of R of its QR factorization."""


def panel_size(shape: tuple[int, int], ranks: int, share: float | None) -> int:
    """Return how many columns of a matrix [m, n] are reduced before the rest is updated, on so many ranks.

    The vectors of a panel, which every rank has, take at most this `share` of a rank's block, if it is given, or are
    few.
    """
    (m, n), b = shape, PANEL
    while share is not None and b > LEAST and 2 * b * (m + n) * ranks > share * m * n:
        b //= 2
    return b


class Bidiagonal(Reduction):
    """The reduction A = Q B Pᴴ of a matrix [m, n] with m ≥ n.

    Parameters
    ----------
    tiles : Tiles
        Where rows lie that are turned by Q and P.
    workers : Deal
        How the matrix is dealt to the ranks that reduce it: the first ones of the grid (`workers`).
    held : list
        This rank's tiles, of that deal, which are taken out of the list and overwritten.
    keep : bool
        See `Reduction`.
    sides : sequence of {"left", "right"}
        Of which sides reflections are kept, those of Q and of P.
    carried : (str, array), optional
        A side, and columns of right-hand sides that a rank at work has whole.  They become Qᴴ b of the "left" side, or
        Pᴴ b, which needs no reflections to be kept.  Panels are as narrow as for values alone.
    """

    def __init__(
        self, tiles: Tiles, workers: Deal, held: list[np.ndarray], shape: tuple[int, int], keep: bool = True,
        sides: Sequence[str] = SIDES, carried: tuple[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        m, n = self.shape = shape
        a = held.pop()
        super().__init__(tiles, n, a.dtype, keep)
        sides = [side for side in SIDES if side in sides]
        self._kept = dict(zip(sides, self._keepers(workers, *({"left": m, "right": n}[x] for x in sides)), strict=True))
        self._deal, self._a, self._at = workers, a, (0, 0)  # where the tiles that are still needed begin
        del a
        self._carried = carried
        self._one_sided = keep and len(sides) == 1 and carried is None
        part = (None if carried is None else 0.25) if keep else 0.5  # reflections take place too
        self.panel = panel_size(shape, workers.R * workers.C, part)
        if self._one_sided:
            self.panel = panel_size(shape, tiles.grid.size, 0.125)
        if tiles.grid.inside:
            self._run(workers, max(shape))
            for kept in self._kept.values():
                kept.close()
        self._a = self._a[:0].copy()

    def _keep(self, k: int, message: np.ndarray) -> None:
        start = 0
        for number, (side, kept) in enumerate(self._kept.items()):
            end = start + self.shape[SIDES.index(side)] - k
            kept.add(k, message[:, start:end], message[:, number - len(self._kept)])
            start = end

    def _wide(self, k: int) -> int:
        return sum(self.shape[SIDES.index(side)] - k + 1 for side in self._kept)

    def _panel(self, group: SharedCollectives, k: int, b: int) -> np.ndarray | None:
        """Reduce b columns and rows from k on, apply A := A - V Yᴴ - X Uᴴ to what is behind; return [V, U, tau, pi]."""
        (m, n), a, deal = self.shape, self._a, self._deal
        gi, gj = deal.coords[group.comm.rank]
        rows, columns = deal.rows(m)[gi][self._at[0] :], deal.columns(n)[gj][self._at[1] :]
        low, left = first(rows, k), first(columns, k)
        less = LESS if self._carried is None else FEWER
        fewer = self.keep and not self._one_sided and not any(kept.waits for kept in self._kept.values())
        if fewer and owned(a) and less * a[low:, left:].size <= a.size:  # memory is for the reflections now
            self._a = a = a[low:, left:].copy()
            self._at, rows, columns = (self._at[0] + low, self._at[1] + left), rows[low:], columns[left:]
        xp = self.xp
        vx, yu = xp.zeros((2 * b, m - k), a.dtype), xp.zeros((2 * b, n - k), a.dtype)
        v, x, y, u = vx[:b], vx[b:], yu[:b], yu[b:]  # columns of V and X, and of Y and U, one in a row
        tau, pi = xp.zeros(b, a.dtype), xp.zeros(b, a.dtype)
        down, right = partial(first, rows), partial(first, columns)
        low, left = down(k), right(k)
        here, there = indexer(rows[low:] - k), indexer(columns[left:] - k)
        for q in range(b):
            j = k + q
            i, behind = deal.owner(j)
            column = xp.zeros(m - k, a.dtype)
            if gj == behind:
                column[here] = a[low:, right(j)]
                if q:
                    column[here] -= (y[:q, q].conj() @ v[:q] + u[:q, q].conj() @ x[:q])[here]
            column = group.all_reduce(column)
            v[q, q:], tau[q], self.d[j] = reflector(column[q:])
            if j == n - 1:
                break
            # y := tau (A - V Yᴴ - X Uᴴ)ᴴ v
            found, mine = xp.zeros(n - k, a.dtype), share(q + 1, n - k, group.comm)  # each corrects its share
            top, after, inner = down(j), right(j + 1), v[q].conj()
            later = indexer(columns[after:] - k)
            found[later] = (inner[indexer(rows[top:] - k)] @ a[top:, after:]).conj()
            if q:
                found[mine] -= (v[:q] @ inner).conj() @ y[:q, mine] + (x[:q] @ inner).conj() @ u[:q, mine]
            found = group.all_reduce(found)
            found[: q + 1] = 0
            y[q] = tau[q] * found
            # row j, as a column of its conjugates
            line = xp.zeros(n - k, a.dtype)
            if gi == i:
                line[there] = a[down(j), left:].conj()
                line[there] -= (v[: q + 1, q].conj() @ y[: q + 1] + x[:q, q].conj() @ u[:q])[there]
            line = group.all_reduce(line)
            u[q, q + 1 :], pi[q], self.e[j] = reflector(line[q + 1 :])
            # x := pi (A - V Yᴴ - X Uᴴ) u
            found, mine = xp.zeros(m - k, a.dtype), share(q + 1, m - k, group.comm)
            top, inner = down(j + 1), u[q].conj()
            found[indexer(rows[top:] - k)] = a[top:, after:] @ u[q, later]
            found[mine] -= (y[: q + 1] @ inner).conj() @ v[: q + 1, mine] + (u[:q] @ inner).conj() @ x[:q, mine]
            found = group.all_reduce(found)
            found[: q + 1] = 0
            x[q] = pi[q] * found
        below, later = indexer(rows[down(k + b) :] - k), indexer(columns[right(k + b) :] - k)
        kernels.subtract(a[down(k + b) :, right(k + b) :], vx[:, below].T, kernels.conjugate(yu[:, later]))
        found = {"left": (v, tau), "right": (u, pi)}
        if self._carried is not None:
            self._carry(k, *found[self._carried[0]])
        if self._in_place:
            for side, kept in self._kept.items():
                kept.add(k, *found[side])
        if self._in_place or not self.keep:
            return None
        lines, factors = zip(*(found[side] for side in self._kept), strict=True)
        return np.concatenate([*lines, *(each[:, None] for each in factors)], axis=1)

    def _carry(self, k: int, v: np.ndarray, tau: np.ndarray) -> None:
        """Apply the adjoint reflections of a panel to the right-hand sides."""
        assert self._carried is not None
        sides = self._carried[1][k:]
        if sides.shape[1]:
            inner = v.conj()
            kernels.subtract(sides, v.T, kernels.adjoint(triangle(inner @ v.T, tau)) @ (inner @ sides))

    def left(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        self._kept["left"].times(self.tiles, z)

    def right(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the rows that it would have of A's columns, by P z.  Collective."""
        self._kept["right"].times(self.tiles, z)


class BidiagonalOfOne:
    """The reduction A = Q B Pᴴ of a matrix [m, n] with m ≥ n on a grid of one rank, by LAPACK.

    Parameters
    ----------
    tiles, shape
        See `Bidiagonal`.
    held : list
        The transpose of the matrix, in rows, which is taken out of the list and overwritten.
    """

    def __init__(self, tiles: Tiles, held: list[np.ndarray], shape: tuple[int, int]) -> None:
        self.tiles, self.shape, self.n, self.xp = tiles, shape, shape[1], kernels.on_host(tiles.grid.backend)
        self._a = held.pop().T
        real, n = self._a.real.dtype, self.n
        self.d, self.e = self.xp.zeros(n, real), self.xp.zeros(max(0, n - 1), real)
        if tiles.grid.inside:
            self.d, self.e, self._tau, self._pi = kernels.bidiagonal(self._a)

    def left(self, z: np.ndarray) -> None:
        """Replace z [m, k] by Q z."""
        kernels.reflect_back("Q", self._a, self._tau, z)

    def right(self, z: np.ndarray) -> None:
        """Replace z [n, k] by P z."""
        kernels.reflect_back("P", self._a, self._pi, z)


def singular_values(d: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return the singular values, falling, of a real upper bidiagonal matrix; NaNs if they do not converge."""
    n = len(d)
    if not has_values(d):
        return shape_solver.bidiagonal_values(d)
    values, off = d.copy(), np.concatenate([e, np.zeros(1, e.dtype)])
    if not n:
        return values
    integer = blas.scipy_integer()
    work, steps, unused = np.zeros(8 * n, d.dtype), np.zeros(8 * n, integer), np.zeros(1, d.dtype)
    failed = kernels.call(
        "bdsdc", d.dtype, "U", "N", n, values, off, unused, 1, unused, 1, unused, np.zeros(1, integer), work, steps
    )
    return np.full_like(d, np.nan) if failed else values


def values(reduced: Bidiagonal | BidiagonalOfOne) -> np.ndarray:
    """Return the singular values, falling.  Collective over all ranks, which raise errors together."""
    found = singular_values(reduced.d, reduced.e)
    _refuse_unconverged(reduced, found)
    return found


def _refuse_unconverged(reduced: Bidiagonal | BidiagonalOfOne, values: np.ndarray) -> None:
    if reduced.tiles.worst([not kernels.finite(values)])[0]:
        raise np.linalg.LinAlgError("SVD did not converge")


def vectors(reduced: Bidiagonal | BidiagonalOfOne) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the singular values, falling, and this rank's tiles of the left and of the right vectors, of n rows.

    Collective over all ranks.
    """
    tiles, n, grid = reduced.tiles, reduced.n, reduced.tiles.grid
    values = reduced.xp.zeros(n, reduced.d.dtype)
    left = right = reduced.xp.empty((0, 0), reduced.d.dtype)
    if grid.inside:
        rows = np.arange(grid.rank, n, grid.size)
        memory.give_back(8 * n * len(rows))
        values, left, right = bidiagonal_vectors(reduced.d, reduced.e, rows, grid.everyone)
        memory.give_back(left.nbytes)
    _refuse_unconverged(reduced, values)
    left = to_tiles(left, tiles, n, n)
    return values, left, to_tiles(right, tiles, n, n)


def some_vectors(
    reduced: Bidiagonal | BidiagonalOfOne, side: str, choose: Callable[[np.ndarray], slice]
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Return this rank's tiles of the left or right singular vectors, of n rows, that are chosen, and their number.

    A rank forms its rows of them from those of the two parts of the last merge.  Collective over all ranks.

    Parameters
    ----------
    side : {"left", "right"}
    choose : callable
        Returns from the singular values, falling, where those are whose vectors are wanted, on all ranks alike.
    """
    tiles, n, grid, xp, dtype = reduced.tiles, reduced.n, reduced.tiles.grid, reduced.xp, reduced.d.dtype
    values, strips, mine = xp.zeros(n, dtype), None, dealt(n, 1, grid.size)[grid.rank if grid.inside else 0]
    if grid.inside:
        if grid.size > 1:
            memory.give_back(8 * n * len(mine))
        values, strips = bidiagonal_strips(reduced.d, reduced.e, mine, grid.everyone, [side])
    _refuse_unconverged(reduced, values)
    numbers = np.arange(n)[choose(values)]
    z: np.ndarray = xp.empty((0, 0), dtype)
    if strips is not None:
        z = xp.empty((len(mine), len(numbers)), dtype)
        for start in range(0, len(numbers), STRIP):
            at = numbers[start : start + STRIP]
            (z[:, start : start + len(at)],) = strips(at)
    del strips
    return to_tiles(z, tiles, n, len(numbers)) if grid.size > 1 else z, len(numbers)


def pseudoinverse(
    reduced: Bidiagonal | BidiagonalOfOne, inverses: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:  # fmt: skip
    """Return this rank's tiles of the pseudoinverse [n, n] of the bidiagonal matrix, V S⁺ Uᵀ.

    Of singular vectors a rank forms some columns at a time of its rows.  Those that its tiles need are sent to it, and
    their products are added up.  Collective over all ranks.

    Parameters
    ----------
    inverses : callable
        Returns the diagonal of S⁺ from the singular values, falling; where it is 0 vectors are not formed.
    """
    tiles, n, grid, xp, dtype = reduced.tiles, reduced.n, reduced.tiles.grid, reduced.xp, reduced.d.dtype
    every = dealt(n, 1, grid.size)
    values, strips = _strips(reduced, every)
    found = inverses(values)
    if strips is None:
        return xp.empty((0, 0), dtype)
    rows, columns = tiles.rows(n), tiles.columns(n)
    z: np.ndarray = xp.zeros((len(rows[tiles.i]), len(columns[tiles.j])), dtype)
    for at in _numbers(found, grid):
        left, right = strips(at)
        right *= found[at]
        if grid.size > 1:
            (wide,) = dealt(len(at), len(at), 1)
            have = [(each, wide) for each in every]
            right = move(right, have, [(rows[i], wide) for i, _ in tiles.coords], grid)
            left = move(left, have, [(columns[j], wide) for _, j in tiles.coords], grid)
        blas.add_product(z, right, left.T)
        del left, right
    return z


def solution(
    reduced: Bidiagonal, b: np.ndarray, have: Places, counting: Callable[[np.ndarray], np.ndarray], adjoint: bool
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the singular values of the bidiagonal matrix B [n, n], and this rank's tiles of B⁺ b or (Bᵀ)⁺ b.

    Of singular vectors a rank forms some columns at a time of its rows.  Collective over all ranks.

    Parameters
    ----------
    b : array
        This rank's rows and columns of right-hand sides [n, k], those that `have` says.
    counting : callable
        Returns from the singular values, falling, those that count, and zeros in the places of the others.
    adjoint : bool
        The result is (Bᵀ)⁺ b.
    """
    tiles, n, grid = reduced.tiles, reduced.n, reduced.tiles.grid
    every, k = dealt(n, 1, grid.size), sum(len(columns) for _, columns in have)
    values, strips = _strips(reduced, every)
    counted = counting(values)
    if strips is None:
        return values, reduced.xp.empty((0, 0), b.dtype)
    places = [(rows, np.arange(k)) for rows in every]
    b = move(b, have, places, grid)
    x: np.ndarray = reduced.xp.zeros(b.shape, b.dtype)
    for at in _numbers(counted, grid):
        first, last = strips(at)[:: -1 if adjoint else 1]
        parts = reduced.xp.ascontiguousarray(first.T @ b)
        grid.everyone.all_reduce(parts)
        x += last @ kernels.quotients(parts, counted[at][:, None])
        del first, last
    return values, move(x, places, tiles.places(tiles.rows(n), tiles.columns(k)), grid)


def _strips(reduced: Bidiagonal | BidiagonalOfOne, every: Sequence[np.ndarray]) -> tuple[np.ndarray, Strips | None]:
    """Return the singular values, and a function to the rows of their vectors that are this rank's of `every`.

    Collective over all ranks; there is no function outside of the grid.
    """
    n, grid = reduced.n, reduced.tiles.grid
    values, strips = reduced.xp.zeros(n, reduced.d.dtype), None
    if grid.inside:
        mine = every[grid.rank]
        if grid.size > 1:
            memory.give_back(8 * n * len(mine))
        values, strips = bidiagonal_strips(reduced.d, reduced.e, mine, grid.everyone)
    _refuse_unconverged(reduced, values)
    return values, strips


def assumed_rank(grid: Grid, k: int) -> int:
    """Return the rank of an imagined matrix of k singular values."""
    return k if grid.backend.assume("conditioned", "the rank of a matrix") else max(0, k - 1)


def _numbers(values: np.ndarray, grid: Grid) -> Iterator[np.ndarray]:
    """Yield the places of singular values that are not 0, some at a time."""
    n = len(values)
    numbers = np.flatnonzero(values) if has_values(values) else np.arange(assumed_rank(grid, n))
    step = max(STRIP // 8, min(STRIP, n // grid.size // 8))
    for start in range(0, len(numbers), step):
        yield numbers[start : start + step]
