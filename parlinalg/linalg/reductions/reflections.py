"""Householder reflections: how they are found, kept, and applied some at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from parlinalg.backend import namespace, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.comm import Comm
from parlinalg.comm.shared import meet, shared_collectives
from parlinalg.linalg import kernels
from parlinalg.linalg.panels.qr import reflect
from parlinalg.linalg.tiles import Tiles, indexer, move

PANEL = 32
"""Columns whose reflections are applied to the rest of the matrix at once."""
TOGETHER = 4
"""Panels whose reflections are applied to vectors at once."""
LESS = 1.3
"""Elements by those that are still needed from which on these are copied, and the others given up."""
TINY = 1e-25
"""A square of a length from which on to its inverse lengths are formed by squares, in all dtypes."""


def split(memory: Any, sizes: Sequence[int]) -> list[Any]:
    """Return parts of these sizes, one behind the other."""
    ends = np.cumsum(sizes).tolist()
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def owned(a: Any) -> bool:
    """Return True unless an array lies in memory that cannot be given up for it alone."""
    if not isinstance(a, np.ndarray) or a.flags.owndata:
        return True
    return isinstance(a.base, np.ndarray) and a.base.flags.owndata  # a part of an array, which is given up with it


class Kept:
    """Reflections in the order in which they were found, of some panels together: so that products of them are fast.

    The ranks of a grid row have the same ones.  On one node these lie in shared memory, in which they take turns to
    write.

    Parameters
    ----------
    rows : array of int
        The numbers of this rank's rows.
    tiles : Tiles
        Where these lie.
    room : array or None
        Shared memory of the ranks of the grid row, of `size` elements.
    """

    def __init__(self, rows: np.ndarray, tiles: Tiles, room: Any = None) -> None:
        self._rows, self._tiles, self._room, self._turn = rows, tiles, room, 0
        self._taus: list[np.ndarray] = []
        self._open: list[tuple[int, np.ndarray]] = []
        """The panels to be put together: the element number from which on their vectors are there, one in a row."""
        self._closed: list[tuple[int, np.ndarray, np.ndarray]] = []
        """Row numbers, this rank's rows of V from there on, and the upper triangles T, one row behind the other."""

    @staticmethod
    def size(rows: np.ndarray, n: int) -> int:
        """Return how many elements the reflections of n columns have in these rows."""
        together = PANEL * TOGETHER
        return sum((len(rows) - first(rows, k)) * min(together, n - k) for k in range(0, n, together))

    @property
    def waits(self) -> bool:
        """True while panels wait to be put together."""
        return bool(self._open)

    def add(self, k: int, v: np.ndarray, tau: np.ndarray) -> None:
        """Keep the reflections of a panel: row i of v, from element number k of vectors on, and tau[i].

        The arrays are this object's from now on.
        """
        self._open.append((k, v))
        self._taus.append(tau)
        if len(self._taus) == TOGETHER:
            self.close()

    def close(self) -> None:
        """Put the panels that came last together."""
        if not self._open:
            return
        sizes = [0, *accumulate(len(v) for _, v in self._open)]
        inner = namespace(self._open[0][1]).zeros((sizes[-1], sizes[-1]), self._open[0][1].dtype)
        for (k, v), top in zip(self._open, sizes, strict=False):
            for (j, w), left in zip(self._open, sizes, strict=False):
                if left >= top:
                    inner[top : top + len(v), left : left + len(w)] = kernels.adjoint(v[:, j - k :].T) @ w.T
        t = triangle(inner, np.concatenate(self._taus))[np.triu_indices(len(inner))]
        self._closed.append((self._open[0][0], self._held(sizes).T, t))
        self._open, self._taus = [], []

    def _held(self, sizes: list[int]) -> np.ndarray:
        """Return this rank's rows of the panels, of which so many vectors begin, in shared memory if there is some."""
        start, head = self._open[0]
        numbers, writes, high = self._rows[first(self._rows, start) :], True, sizes[-1]
        if self._room is None:
            found: np.ndarray = namespace(head).empty((high, len(numbers)), head.dtype)
        else:
            found, self._room = self._room[: high * len(numbers)], self._room[high * len(numbers) :]
            found, writes = found.reshape(high, len(numbers)), self._turn % self._tiles.C == self._tiles.j
            self._turn += 1
        for (k, v), top in zip(self._open if writes else (), sizes, strict=False):
            left, part = first(numbers, k), found[top : top + len(v)]
            part[:, :left] = 0
            part[:, left:] = v[:, indexer(numbers[left:] - k)]
        return found

    def times(self, tiles: Tiles, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by the product of all reflections and z.  Collective.

        The reflections are given up one after the other.
        """
        if not self._closed:
            return
        if self._room is not None:
            meet(self._tiles.across)  # all have written their turns
        with shared_collectives(tiles.down, self._closed[0][1].shape[1] * z.shape[1], z.dtype) as group:
            while self._closed:
                k, v, upper = self._closed.pop()
                t = namespace(v).zeros((v.shape[1], v.shape[1]), v.dtype)
                t[np.triu_indices(len(t))] = upper
                reflect(tiles, v, t, z[first(self._rows, k) :], group)


class KeptForAll(Kept):
    """Reflections that a few ranks of a node find, and write for all of them to shared memory, with T.

    Nobody holds them elsewhere.  Ranks at work take turns to write those of the panels that are put together.

    Parameters
    ----------
    every : sequence of array
        For every grid row the numbers of its rows.
    n : int
        The number of reflections.
    memory : array
        Shared memory of all ranks, of `room` elements.
    mine : sequence of bool
        For all panels that are put together True if it is this rank's turn.
    """

    SIZE = PANEL * TOGETHER

    def __init__(self, every: Sequence[np.ndarray], tiles: Tiles, n: int, memory: Any, mine: Sequence[bool]) -> None:
        super().__init__(every[tiles.i], tiles)
        self._every, self._mine = every, mine
        self._places: list[tuple[Any, ...]] = []
        """Row numbers, the rows of V of every grid row from there on, adjoint, and T."""
        for k in range(0, n, self.SIZE):
            sizes = self._sizes(every, n, k)
            *parts, t = split(memory, sizes)
            b, memory = min(self.SIZE, n - k), memory[sum(sizes) :]
            self._places.append((k, *(each.reshape(b, len(each) // b) for each in parts), t))

    @classmethod
    def _sizes(cls, every: Sequence[np.ndarray], n: int, k: int) -> list[int]:
        b = min(cls.SIZE, n - k)
        return [*(b * (len(rows) - first(rows, k)) for rows in every), b * (b + 1) // 2]

    @classmethod
    def room(cls, every: Sequence[np.ndarray], n: int) -> int:
        """Return how many elements n reflections have in the rows of all grid rows, with T."""
        return sum(sum(cls._sizes(every, n, k)) for k in range(0, n, cls.SIZE))

    def add(self, k: int, v: np.ndarray, tau: np.ndarray) -> None:
        turn, at = divmod(k, self.SIZE)
        if not self._mine[turn]:
            return
        start, *parts, t = self._places[turn]
        for part, rows in zip(parts, self._every, strict=True):
            numbers, out = rows[first(rows, start) :], part[at : at + len(v)]
            left = first(numbers, k)
            out[:, :left] = 0
            out[:, left:] = v[:, indexer(numbers[left:] - k)]
        self._taus.append(tau)
        if at + len(v) == len(parts[0]):
            inner = sum(part.conj() @ part.T for part in parts)
            t[:] = triangle(inner, np.concatenate(self._taus))[np.triu_indices(len(inner))]
            self._taus = []

    def close(self) -> None:
        """Find this rank's rows, once those at work have written them."""
        self._closed = [(k, parts[self._tiles.i].T, t) for k, *parts, t in self._places]
        self._places = []


def share(start: int, stop: int, comm: Comm) -> slice:
    """Return this rank's share of the places from `start` up to `stop`."""
    n = stop - start
    return slice(start + n * comm.rank // comm.size, start + n * (comm.rank + 1) // comm.size)


def first(numbers: np.ndarray, k: int) -> int:
    """Return the place of the first number that is at least k."""
    return int(np.searchsorted(numbers, k))


def reflector(x: np.ndarray, at: int = 0) -> tuple[np.ndarray, complex, float]:
    """Return v, tau and beta of a reflection H = I - tau v vᴴ with v[at] = 1; Hᴴ x is beta, real, at `at`, and zeros.

    This is LAPACK's `larfg`.
    """
    if not has_values(x):
        return shape_solver.reflector(x)
    alpha = x[at]
    x[at] = 0
    square = np.vdot(x, x).real
    if TINY < square < 1 / TINY:
        size = math.sqrt(square + abs(alpha) ** 2)
    else:  # squares under- or overflow
        none = not x.any() and not alpha.imag
        x[at] = alpha
        largest = float(np.abs(x).max())
        size = largest * float(np.linalg.norm(x / largest)) if largest else 0.0
        if none:
            v = np.zeros_like(x)
            v[at] = 1
            return v, 0, float(alpha.real)
    x[at] = alpha
    beta = x.real.dtype.type(-math.copysign(size, alpha.real))
    v = x / (alpha - beta)
    v[at] = 1
    return v, (beta - alpha) / beta, float(beta)


def triangle(inner: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Return T of the product of reflections, I - V T Vᴴ (LAPACK's `larft`), by the products `inner`, Vᴴ V."""
    b = len(tau)
    t: np.ndarray = namespace(inner).zeros((b, b), inner.dtype)
    for q in range(b):
        t[:q, q] = -tau[q] * (t[:q, :q] @ inner[:q, q])
        t[q, q] = tau[q]
    return t


def to_tiles(z: np.ndarray, tiles: Tiles, n: int, columns: int) -> np.ndarray:
    """Return this rank's tiles of n rows, of which each rank has those of numbers p, p + size, ….  Collective."""
    size = tiles.grid.size
    have = [(np.arange(p, n, size), np.arange(columns)) for p in range(size)]
    found: np.ndarray = move(z, have, tiles.places(tiles.rows(n), tiles.columns(columns)), tiles.grid)
    return found
