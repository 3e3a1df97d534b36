"""LU factorization with tournament pivoting, P A = L U, on tiles.

The pivots of a panel are the winners of a tournament: each rank of a grid column proposes as many rows as the panel has
columns, by partial pivoting among its own, and the proposals are factored once more on all of them (Grigori, Demmel and
Xiang, "CALU", 2011).  Rows do not travel: winners are swapped to the front of their own rank, so that the rows of L and
U lie where they lay in A, in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.shapes import has_values
from parlinalg.comm import Handle
from parlinalg.linalg import kernels
from parlinalg.linalg.panels import Panels
from parlinalg.linalg.tiles import Numbers, Tiles


class LU(Panels):
    """L (its diagonal of ones left out) and U replace A; further columns become L⁻¹ P B.

    Parameters
    ----------
    given : array, optional
        A of one rank once more, which is read again if pivots are below the normal numbers; by default they are not.

    Attributes
    ----------
    a, further : array
        L and U, and the further columns.
    rows : array of int
        The rows of A that this rank has, in their new order.
    diagonal : array
        U's diagonal, on the host of every rank.
    """

    def __init__(
        self, tiles: Tiles, a: Any, shape: tuple[int, int], extra: int = 0, further: Any = None, given: Any = None
    ) -> None:  # fmt: skip
        super().__init__(tiles, a, shape, extra)
        self.further = a[:, int(np.searchsorted(self.columns, shape[1])) :] if further is None else further
        self._values = self.a[:, : shape[1]] if given is None else given
        self._apart = further is not None  # the further columns lie in an array of their own
        self._in_place = tiles.across.size == 1 and isinstance(a, np.ndarray)  # panels are factored where they lie
        self.rows = self.rows.copy()
        self._diagonals: list[Any] = []  # U's diagonal, of every panel
        self._active = [len(x) for x in self.every_row]  # rows that are no pivots yet, of every grid row
        self._won: list[list[int]] = [[] for _ in self.every_row]  # positions of its pivots, of every grid row

    @property
    def diagonal(self) -> np.ndarray:
        if not self._diagonals:
            return np.zeros(0, self.a.dtype)
        found = namespace(self.a).concatenate(self._diagonals)
        return kernels.to_host(found) if has_values(found) else found

    @property
    def positions(self) -> list[Numbers]:
        """For every grid row the numbers of its rows in P A, rising."""
        after, found = min(self.shape), []
        for won, left in zip(self._won, self._active, strict=True):
            found.append(np.concatenate([np.asarray(won, int), np.arange(after, after + left)]))
            after += left
        return found

    def run(self) -> None:
        """Factor the whole matrix.  Collective over the grid."""
        (m, n), k = self.shape, min(self.shape)
        alone = self.tiles.grid.size == 1 and self.tiles.grid.inside and k
        whole = kernels.regular_lu(self.a[:, :n], given=self._values) if alone else None
        if whole is None:
            if self._apart:  # on a GPU, and the matrices that were given, not those of their own
                self.a = namespace(self.a).hstack([self.a, self.further])
                self.further = self.a[:, n:]
            super().run()
            return
        found, order = whole
        right = self.further[order] if self.further.shape[1] else self.further
        self._diagonals, self.rows = [found.diagonal()], order
        self._won, self._active = [list(range(k))], [m - k]
        kernels.substitute(found[:k, :k], right[:k], lower=True, unit=True)
        kernels.subtract(right[k:], found[k:, :k], right[:k])
        self.a, self.further = found, right

    def factor(self, k: int, b: int) -> tuple[Handle, Any]:
        tiles, j, done, c = self.tiles, self.tiles.owner(k)[1], len(self._won[self.tiles.i]), self.column(k)
        head = 2 * b * 8 // self.a.itemsize
        message = self.message(k, head + b * b + (0 if self._in_place else self._active[tiles.i] * b))
        won_by = message[:head].view(np.int64).reshape(2, b)  # the winners' grid rows, and their places there
        corner, panel = message[head : head + b * b].reshape(b, b), message[head + b * b :].reshape(-1, b)
        if self._in_place:
            panel = self.a[done:, c : c + b]
        elif tiles.j == j:
            panel[...] = self.a[done:, c : c + b]
        if tiles.j == j:
            found, order = kernels.lu(panel)
            mine = order[:b]
            counts = [min(b, n) for n in self._active]
            if tiles.R == 1:  # no rival: all is there
                corner[...], winners = found[:b], np.arange(b)
            else:
                proposed = self.collectives.all_gather(panel[mine], counts)
                factored, ranked = kernels.lu(proposed)
                corner[...], winners = factored[:b], ranked[:b]
            first = np.cumsum([0, *counts])
            if not has_values(panel):
                winners = np.concatenate(
                    [x + np.arange(n) for x, n in zip(first, shares(self._active, b), strict=False)]
                )
            owners, places = np.searchsorted(first, winners, "right") - 1, np.full(b, -1)
            own = np.flatnonzero(owners == tiles.i)
            places[own] = mine[winners[own] - first[tiles.i]]
            won = len(own)
            if tiles.R == 1:
                rows, at = np.arange(len(panel)), np.empty(len(panel), np.intp)
                _to_front(0, places, rows)
                at[order] = np.arange(len(panel))
                panel[...] = found
                other = np.flatnonzero(order != rows)
                panel[other] = found[at[rows[other]]]
            else:
                _to_front(0, places[own], panel)
                panel[:won] = corner[own]
                kernels.substitute(_regular(corner), panel[won:], right=True)  # L[i, k] := A[i, k] U[k, k]⁻¹
            won_by[...] = kernels.beside(np.stack([owners, places]), won_by)
        return self.pass_on(k, message, j), (won_by, corner, panel)

    def take(self, k: int, b: int, panel: Any) -> Any:
        tiles, c, before = self.tiles, self.column(k + b), self.column(k)
        won_by, corner, below = panel
        owners, places = self._winners(b) if not has_values(won_by) else kernels.to_host(won_by)
        if tiles.D > 1:  # the other layers have the same rows, and swap them alike
            message = np.concatenate([np.ravel([owners, places]).view(self.a.dtype), np.diag(corner)])
            self._sends.append(tiles.deep.broadcast(message, tiles.layer, wait=False))
        done, own = len(self._won[tiles.i]), owners == tiles.i
        chosen = places[own] + done
        won, counts = len(chosen), np.bincount(owners, minlength=tiles.R).tolist()
        _to_front(done, chosen, self.a[:, :before], self.rows)
        if tiles.j == tiles.owner(k)[1] and not self._in_place:
            self.a[done:, before:c] = below
        behind = self.a[:, c:]
        top = behind[chosen]
        self.gather_terms(top, tiles.layer, tiles.D).wait()
        _fill(behind, done, chosen)

        def solved(rows: Any, first: int) -> Any:
            """Return U[k, j] := L[k, k]⁻¹ (P A)[k, j] in the columns from `first` on."""
            kernels.substitute(corner, rows, lower=True, unit=True)
            mine = rows if tiles.R == 1 else rows[np.flatnonzero(own)]
            behind[done : done + won, first : first + rows.shape[1]] = mine
            return rows

        if tiles.R == 1:
            right = solved(top, 0)
        else:
            ahead, order = self.ahead(k, b), np.argsort(np.argsort(owners, kind="stable"), kind="stable")
            rows, later = self.collectives.all_gather_in_turn(
                top[:, :ahead], counts, top[:, ahead:], counts, lambda rows: rows[order], self.at_once
            )
            right = solved(rows[order], 0)
            self._rest = lambda: (solved(later(), ahead), ahead)
        self._win(k, owners, counts)
        self._diagonals.append(corner.diagonal().copy())
        left = below[won:]
        return left if tiles.D == 1 else left.copy(), right, done + won, c

    def follow(self, k: int, b: int, step: Any) -> Any:
        tiles, c, root = self.tiles, self.column(k + b), self.tiles.layer_of(k)
        head = 2 * b * 8 // self.a.itemsize
        message = np.empty(head + b, self.a.dtype)
        tiles.deep.broadcast(message, root, wait=False).wait()
        owners, places = message[:head].view(np.int64).reshape(2, b)
        diagonal: Any = message[head:]
        if not has_values(self.a):
            (owners, places), diagonal = self._winners(b), namespace(self.a).empty(b, self.a.dtype)
        done = len(self._won[tiles.i])
        chosen = places[owners == tiles.i] + done
        behind = self.a[:, c:]
        top = behind[chosen]
        if step is not None:  # these rows are brought up to date first
            left, right, _, first = step
            kernels.subtract(top, left[chosen - done], right[:, c - first :])
            _fill(left, 0, chosen - done)
            step = left[len(chosen) :], right, done + len(chosen), first
        self.gather_terms(top, root, tiles.D)
        _to_front(done, chosen, self.a[:, : self.column(k)], self.rows)
        _fill(behind, done, chosen)
        self._win(k, owners, np.bincount(owners, minlength=tiles.R).tolist())
        self._diagonals.append(diagonal)
        return step

    def first_row(self, k: int) -> int:
        return len(self._won[self.tiles.i])

    def _winners(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the grid rows of a panel's pivots, and their places there, where no values choose them."""
        share = shares(self._active, b)
        return np.repeat(np.arange(len(share)), share), np.concatenate([np.arange(n) for n in share])

    def _win(self, k: int, owners: np.ndarray, counts: list[int]) -> None:
        """Note which grid rows have the pivots of a panel."""
        for i, won in enumerate(self._won):
            won += (k + np.flatnonzero(owners == i)).tolist()
            self._active[i] -= counts[i]

    def update(self, step: Any, first: int, last: int) -> None:
        left, right, r, c = step
        kernels.subtract(self.a[r:, first:last], left, right[:, first - c : last - c])


def shares(active: Sequence[int] | np.ndarray, b: int) -> np.ndarray:
    """Return how many of b pivots each grid row has, of which so many rows are no pivots yet: each its share."""
    left = np.asarray(active)
    share = np.minimum(left, b * left // max(1, left.sum()))
    for i in np.argsort(-(b * left % max(1, left.sum())), kind="stable")[: b - share.sum()]:
        share[i] += 1
    return share


def _regular(corner: Any) -> Any:
    """Return U's tile with ones for zeros on its diagonal: the columns that they divide are zero as well."""
    if not has_values(corner):  # whoever assumes the pivots takes none for zero
        return corner
    zeros = corner.diagonal() == 0
    return corner + namespace(corner).diag(zeros).astype(corner.dtype) if bool(zeros.any()) else corner


def _fill(a: Any, first: int, chosen: np.ndarray) -> None:
    """Fill the places of the rows `chosen` with those that they replace from row `first` on."""
    pushed, holes = _exchanged(first, chosen)
    a[holes] = a[pushed]


def _to_front(first: int, chosen: np.ndarray, *arrays: Any) -> None:
    """Swap the rows `chosen`, in their order, with those from `first` on."""
    pushed, holes = _exchanged(first, chosen)
    places = np.arange(first, first + len(chosen))
    for a in arrays:
        a[np.concatenate([places, holes])] = a[np.concatenate([chosen, pushed])]


def _exchanged(first: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that leave the front, which begins at `first`, for the rows `chosen`, and the places they get.

    >>> [x.tolist() for x in _exchanged(2, np.array([7, 3, 5]))]
    [[2, 4], [5, 7]]
    """
    later, stay = chosen >= first + len(chosen), np.zeros(len(chosen), bool)
    stay[chosen[~later] - first] = True
    return first + np.flatnonzero(~stay), np.sort(chosen[later])


def parity(order: np.ndarray) -> int:
    """Return the sign of a permutation.

    >>> parity(np.array([1, 0, 2])), parity(np.array([1, 2, 0]))
    (-1, 1)
    """
    seen, sign = np.zeros(len(order), bool), 1
    following = order.tolist()
    for start in range(len(following)):
        at, length = start, 0
        while not seen[at]:
            seen[at] = True
            at, length = following[at], length + 1
        if length and length % 2 == 0:
            sign = -sign
    return sign


def determinant(diagonal: np.ndarray, order: np.ndarray) -> tuple[Any, Any, float]:
    """Return the determinant, its sign (or phase) and the logarithm of its size, of U's diagonal and the rows' order.

    A product that leaves the range of numbers on its way is found by the logarithm.

    >>> value, sign, log = determinant(np.array([1e200, -1e200, 1e-300, 1e-100]), np.arange(4))
    >>> bool(abs(value + 1) < 1e-12), float(sign), bool(abs(log) < 1e-12)
    (True, -1.0, True)
    """
    if not has_values(diagonal):
        return 0, 0, 0.0
    dtype, sizes = diagonal.dtype, np.abs(diagonal).astype(np.float64)
    if not sizes.all():
        return dtype.type(0), dtype.type(0), -math.inf
    with np.errstate(all="ignore"):
        products = np.multiply.accumulate(np.append(dtype.type(parity(order)), diagonal))
        large = diagonal * np.where(sizes < np.finfo(dtype).tiny, 2.0**100, 1.0).astype(sizes.dtype)  # to divide by
        sign = (large / np.abs(large)).astype(dtype).prod(dtype=dtype) * parity(order)
        log = float(np.log(sizes).sum())
        lengths = np.abs(products)
        inside = (lengths >= np.finfo(dtype).tiny) & (lengths < math.inf)  # where all digits are there
        value = products[-1] if inside.all() else (sign * np.exp(log)).astype(dtype)
    return value, sign, log
