"""Hermitian matrices on tiles of which each rank holds one of each two elements that are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.backend import blas, namespace, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.linalg import kernels
from parlinalg.linalg.reductions.reduction import rooms_of_few
from parlinalg.linalg.reductions.reflections import LESS, first, owned
from parlinalg.linalg.tiles import Deal, Places, Tiles, clear_above, transposed

STRIP = 256
"""Rows of a triangle that are updated at once."""


class Half:
    """The elements of a Hermitian matrix on tiles with which this rank computes: one of each two that are equal.

    Rows and columns are of classes: the number of their tile modulo the least common multiple of R and C.  The tiles
    of two classes lie on one rank, and their adjoints on another one, unless the classes are the same; then they are a
    Hermitian matrix of their own, of which the lower triangle counts.  Of two classes the first rank takes every other
    tile of the later one, and the second rank the rest.  So each element is read once for both of its products, and
    the rest of the matrix, from any row on, is a part of few matrices.

    Parameters
    ----------
    blocks : list
        This rank's parts of the matrix [n, n], as `blocks` returns them.
    """

    def __init__(
        self, deal: Deal, n: int, dtype: np.dtype[Any], blocks: list[_Rectangle | _Triangle], xp: Any
    ) -> None:  # fmt: skip
        self.dtype, self.n, self._blocks, self._xp = dtype, n, blocks, xp
        self._order = np.argsort(np.arange(n) // deal.size % math.lcm(deal.R, deal.C), kind="stable")

    def begin(self, k: int, less: bool) -> np.ndarray:
        """Take the matrix from row and column k on; return where the elements of vectors stand, by their numbers.

        With `less` memory of what is before is given up, for the reflections.
        """
        at = np.full(self.n, -1)
        order = self._order[self._order >= k]
        at[order] = np.arange(len(order))
        for block in self._blocks:
            block.begin(k, at, less)
        return at

    def columns(self, k: int, b: int) -> np.ndarray:
        """Return this rank's elements of b columns from k on, one in a row, else zeros; above the diagonal any."""
        out: np.ndarray = self._xp.zeros((b, self.n - k), self.dtype)
        for block in self._blocks:
            block.columns(out, k, b)
        return out

    def times(self, v: np.ndarray, y: np.ndarray) -> None:
        """Replace y by this rank's term of the product with v."""
        y[:] = 0
        for block in self._blocks:
            block.times(v, y)

    def update(self, k: int, both: np.ndarray) -> None:
        """Subtract V Wᴴ + W Vᴴ from row and column k on; `both` has columns of V and W, in turn, one in a row."""
        for block in self._blocks:
            block.update(k, both)


def parts(deal: Deal, n: int, ranks: int) -> Iterator[tuple[bool, Places]]:
    """Yield the rows and columns of the blocks of a `Half`, one block of each of so many ranks at a time.

    With them comes True for matrices of one class, of which the lower triangle counts.
    """
    tile, period = np.arange(n) // deal.size, math.lcm(deal.R, deal.C)
    kind, odd = tile % period, tile // period % 2 == 1
    every, none = (deal.rows(n), deal.columns(n)), np.zeros(0, np.intp)
    for turn in range(period // deal.C):
        found: list[Places] = [[], [], []]
        for i, j in deal.coords:
            rows, columns, each = every[0][i], every[1][j], j + turn * deal.C
            columns = columns[kind[columns] == each]
            found[0].append((rows[kind[rows] == each], columns))
            found[1].append((rows[kind[rows] < each], columns[~odd[columns]]))
            found[2].append((rows[(kind[rows] > each) & odd[rows]], columns))
        for same, places in zip((True, False, False), found, strict=True):
            if any(len(x) and len(y) for x, y in places):
                yield same, places + [(none, none)] * (ranks - len(places))


def blocks(tiles: Tiles, deal: Deal, x: DistArray) -> list[_Rectangle | _Triangle]:
    """Return this rank's blocks of a Hermitian matrix, of which the lower triangle is read.  Collective."""
    found: list[_Rectangle | _Triangle] = []
    x, grid = x.summed(), tiles.grid
    every = list(parts(deal, x.shape[0], grid.size))
    rooms = rooms_of_few(grid, deal, [places for _, places in every], x.dtype)
    for (same, places), room in zip(every, rooms, strict=True):
        rows, columns = places[grid.rank] if grid.inside else places[0]
        stays = same or _Rectangle.wide(rows, columns)
        lower = tiles.bring_to(x, places, lower=True, host=True, out=room if stays else None)
        if not same:
            other = room if room is None or stays else room.reshape(len(columns), len(rows))
            upper = tiles.bring_to(x, transposed(places), lower=True, host=True, out=None if stays else other)
        if grid.inside and lower.size:
            found.append(_Triangle(lower, rows, tiles.size) if same else _Rectangle(lower, upper, rows, columns))
    return found


class _Rectangle:
    """A block of a Hermitian matrix that stands for its adjoint too.

    Parameters
    ----------
    lower, upper : array
        Its elements below the diagonal of the matrix, and the adjoint of those above it; zeros elsewhere.  One of them
        is overwritten.
    """

    def __init__(self, lower: np.ndarray, upper: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        wide = self.wide(rows, columns)
        self.numbers = (rows, columns) if wide else (columns, rows)
        self.a, other = (lower, upper) if wide else (upper, lower)
        self.a += kernels.adjoint(other)

    @staticmethod
    def wide(rows: np.ndarray, columns: np.ndarray) -> bool:
        """Return True if the block itself is kept, else its adjoint: products with wide strips are faster."""
        return len(rows) <= len(columns)

    def begin(self, k: int, at: np.ndarray, less: bool) -> None:
        top, left = (first(numbers, k) for numbers in self.numbers)
        if less and owned(self.a) and LESS * self.a[top:, left:].size <= self.a.size:
            self.a, self.numbers = self.a[top:, left:].copy(), (self.numbers[0][top:], self.numbers[1][left:])
            top = left = 0
        self.at, self.rest, self.corner = at, self.a[top:, left:], (top, left)
        self.here, self.there = at[self.numbers[0][top:]], at[self.numbers[1][left:]]
        self.i, self.j = _run(self.here), _run(self.there)

    def columns(self, out: np.ndarray, k: int, b: int) -> None:
        rows, columns = (len(each) for each in (self.here, self.there))
        i, j = (numbers[len(numbers) - size :] - k for numbers, size in zip(self.numbers, (rows, columns), strict=True))
        i, j = i[: first(i, b)], j[: first(j, b)]
        out[np.ix_(j, self.here)] = self.rest[:, : len(j)].T
        out[np.ix_(i, self.there)] = self.rest[: len(i)].conj()

    def times(self, v: np.ndarray, y: np.ndarray) -> None:
        if not self.rest.size:
            return
        below, right = y[self.i], y[self.j]  # views, or copies
        blas.add_from_both_sides(below, right, self.a, self.corner, v[self.j], v[self.i])
        if not isinstance(self.i, slice):
            y[self.i] = below
        if not isinstance(self.j, slice):
            y[self.j] = right

    def update(self, k: int, both: np.ndarray) -> None:
        top, left = (first(numbers, k) for numbers in self.numbers)
        rows, columns = (self.at[numbers[start:]] for numbers, start in zip(self.numbers, (top, left), strict=True))
        swapped = _swapped(both, columns)
        for start in range(0, len(rows), STRIP // 2):
            at = slice(top + start, top + start + STRIP // 2)
            kernels.subtract(self.a[at, left:], both[:, rows[start : start + STRIP // 2]].T, swapped)


class _Triangle:
    """A Hermitian matrix by its lower triangle; tiles above its diagonal are zeros."""

    def __init__(self, a: np.ndarray, rows: np.ndarray, size: int) -> None:
        self.a, self.numbers = a, rows
        self.whole = not blas.has_hermitian(a.dtype)
        clear_above(a, rows, rows, size)  # it has not been read
        if self.whole:
            self.a += kernels.adjoint(namespace(a).tril(a, -1))

    def begin(self, k: int, at: np.ndarray, less: bool) -> None:
        top = first(self.numbers, k)
        if less and owned(self.a) and LESS * (len(self.a) - top) ** 2 <= self.a.size:
            self.a, self.numbers, top = self.a[top:, top:].copy(), self.numbers[top:], 0
        self.at, self.top, self.rest, self.here = at, top, self.a[top:, top:], at[self.numbers[top:]]
        self.i = slice(int(self.here[0]), int(self.here[-1]) + 1) if len(self.here) else slice(0, 0)

    def columns(self, out: np.ndarray, k: int, b: int) -> None:
        j = self.numbers[len(self.numbers) - len(self.here) :] - k
        j = j[: first(j, b)]
        out[np.ix_(j, self.here)] = self.rest[:, : len(j)].T

    def times(self, v: np.ndarray, y: np.ndarray) -> None:
        if not has_values(y):
            shape_solver.hermitian(self.rest, v[self.i])
        elif self.whole:
            y[self.i] += self.rest @ v[self.i]
        else:
            blas.add_hermitian(y[self.i], self.a, self.top, v[self.i])

    def update(self, k: int, both: np.ndarray) -> None:
        top = first(self.numbers, k)
        rest, at = self.a[top:, top:], self.at[self.numbers[top:]]
        x, w = both[:, at].T, _swapped(both, at)
        for start in range(0, len(rest), STRIP):
            end = len(rest) if self.whole else start + STRIP
            kernels.subtract(rest[start : start + STRIP, :end], x[start : start + STRIP], w[:, :end])


def _swapped(both: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the conjugates of these columns, the two rows of each pair in the other's place."""
    found = namespace(both).empty((len(both), len(columns)), both.dtype)
    for start in (0, 1):
        for line, row in zip(found[1 - start :: 2], both[start::2], strict=True):
            line[:] = kernels.conjugate(row[columns])
    return found


def _run(numbers: np.ndarray) -> Any:
    """Return a slice for numbers that follow one another, else the numbers."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers
