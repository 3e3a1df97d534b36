"""QR factorization, A = Q R, on tiles: panels by TSQR, as Householder reflections.

A panel is orthogonalized by its Gram matrix, or by a tree of one level over the ranks of a grid column if it is ill
conditioned (Demmel, Grigori, Hoemmen and Langou, 2012).  Its reflections are then found from its Q (Ballard and others,
"Reconstructing Householder vectors", 2014), so that the rest of the matrix is updated by products, I - Y T Yᴴ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from parlinalg.backend import blas, namespace
from parlinalg.backend.shapes import has_values
from parlinalg.comm import Comm, Handle
from parlinalg.comm.shared import SharedCollectives
from parlinalg.linalg import kernels
from parlinalg.linalg.panels import Panels
from parlinalg.linalg.tiles import Tiles

NEAR = 0.1
"""The largest difference of an element between a Gram matrix and I with which one more Cholesky factor makes columns
orthonormal to working precision."""


PART, WIDE = 256, 512
"""The fewest and the most columns that one of several threads of a rank updates at once, if it has so many."""


@dataclass(frozen=True)
class Reflections:
    """The reflections of a panel, I - Y T Yᴴ: row number, this rank's rows of Y from there on, T, and the panel's R."""

    k: int
    y: Any
    t: Any
    r: Any


class QR(Panels):
    """R replaces the upper triangle of A; further columns become Qᴴ B.

    Attributes
    ----------
    kept : list of Reflections
        The reflections of all panels; without `keep`, where Q is not applied to anything else, none.  With `hold_once`
        a rank that has all rows of Y keeps Y only for the panels of its own grid column, and receives the others when
        they are applied.
    trees : list of int
        The first columns of the panels that went through the tree, as far as this rank knows.
    """

    STRIP = 1024  # each strip of columns reads Y twice

    def __init__(
        self,
        tiles: Tiles,
        a: Any,
        shape: tuple[int, int],
        extra: int = 0,
        keep: bool = True,
        hold_once: bool = False,
    ) -> None:
        super().__init__(tiles, a, shape, extra)
        self._keep, self._once = keep, hold_once and tiles.R == 1
        self.keeps_panels = keep and tiles.R == 1 and not hold_once
        self.kept: list[Reflections] = []
        self.trees: list[int] = []

    def _workers(self, width: int) -> AbstractContextManager[blas.Workers]:
        """Return the threads that share this many columns: one, unless a rank has the grid to itself, on the host, and
        enough columns for all threads of its BLAS."""
        alone = self.tiles.grid.size == 1 and isinstance(self.a, np.ndarray)
        return blas.workers(width // (2 * PART) if alone else 1)

    def _shares(self, first: int, width: int, threads: int) -> list[tuple[int, int]]:
        """Return the bounds of columns from the first one on, as threads update them at once."""
        part = min(max(width // (4 * threads), PART), WIDE) if threads > 1 else max(width, 1)
        return [(start, min(start + part, width)) for start in range(first, max(width, 1), part)]

    def _run(self, n: int, size: int) -> None:
        with self._workers(len(self.columns)) as workers:
            if workers.count == 1:
                super()._run(n, size)
                return
            step = None
            for k in range(0, n, size):
                b = min(size, n - k)
                (handle, panel), *_ = workers.run(
                    [partial(self._next, step, k, b), *self._updates(step, k + b, workers.count)]
                )
                handle.wait()
                step = self.take(k, b, panel)
            workers.run(self._updates(step, n, workers.count))

    def _next(self, step: Any, k: int, b: int) -> tuple[Handle, Any]:
        """Bring the panel of b columns from k on up to date, and factor it."""
        if step is not None:
            self.update(step, k, k + b)
        return self.factor(k, b)

    def _updates(self, step: Any, first: int, threads: int) -> list[Callable[[], None]]:
        """Return the updates of this rank's columns from the first one on, as threads share them out."""
        strips = self._shares(first, len(self.columns), threads) if step is not None else []
        return [partial(self.update, step, *strip) for strip in strips]

    def factor(self, k: int, b: int) -> tuple[Handle, Any]:
        tiles, (i, j) = self.tiles, self.tiles.owner(k)
        at, c = self.row(k), self.column(k)
        message = self.message(k, (2 * b + len(self.rows) - at) * b).reshape(-1, b)
        t, r, y = message[:b], message[b : 2 * b], message[2 * b :]
        if tiles.j == j:
            panel = self.a[at:, c : c + b]
            alone = kernels.reflections(panel) if tiles.R == 1 else None
            if alone is not None:
                y[...], t[...], r[...] = alone
            else:
                self._together(k, b, panel, t, r, y)
            self.a[at:, c : c + b] = 0
            if tiles.i == i:
                self.a[at : at + b, c : c + b] = r
        return self.pass_on(k, message, j), message

    def _together(self, k: int, b: int, panel: Any, t: Any, r: Any, y: Any) -> None:
        """Write T, R and this rank's rows of Y for a panel whose rows lie on several ranks, or on a GPU.

        Well conditioned panels are orthogonalized by products alone; others go through the tree.
        """
        tiles, i = self.tiles, self.tiles.owner(k)[0]
        top = b if tiles.i == i else 0
        y[...] = panel
        r[...], sound = orthogonalized(y, tiles.down)
        head = namespace(panel).empty((2 * b + 2, b), self.a.dtype)
        for tree in (False, True):
            if tree:
                self.trees.append(k)
                counts = [min(b, len(x) - int(np.searchsorted(x, k))) for x in self.every_row]
                q, mine = kernels.qr(panel)
                merged, r[...] = kernels.qr(self.collectives.all_gather(mine, counts))
                before = sum(counts[: tiles.i])
                y[...] = q @ merged[before : before + counts[tiles.i]]
            if top:
                head[:b], head[b : 2 * b], head[2 * b] = _reconstruct(y[:b])
                head[2 * b + 1] = tree or sound
            tiles.down.broadcast(head, i)
            if (tree or sound) if not has_values(head) else bool(head[2 * b + 1, 0] != 0):
                break
        t[...] = head[b : 2 * b]
        kernels.substitute(head[:b], y[top:], right=True)
        r *= head[2 * b][:, None]

    def take(self, k: int, b: int, panel: Any) -> Any:
        own = not self._once or self.tiles.owner(k)[1] == self.tiles.j
        if self._keep and own and self._lanes is not None and not self.shared_panels:
            panel = panel.copy()
        found = Reflections(k, panel[2 * b :], panel[:b], panel[b : 2 * b])
        if self._keep:
            self.kept.append(found if own else Reflections(k, None, panel[:b].copy(), None))
        return found

    def update(self, step: Any, first: int, last: int) -> None:
        b = self.a[self.row(step.k) :, first:last]
        w = self.collectives.all_reduce(kernels.adjoint(step.y) @ b)
        kernels.subtract(b, step.y, kernels.multiply(step.t, w, adjoint=True))

    def times(self, b: Any, numbers: np.ndarray | None = None, last: bool = False) -> None:
        """Replace b, of which this rank has the same rows, by Q b.  Collective.

        If b is the identity's columns of these numbers, a reflection turns none before its own.  If this is the
        `last` use of the reflections, they are given up one after the other.
        """
        kept, width = self.kept if last else self.kept.copy(), b.shape[1]
        with self._workers(width) as workers:
            count, strips = workers.count, self._shares(0, width, workers.count)
            lists = [kept, *(kept.copy() for _ in range(1, count))]
            # dealt there and back, as of the identity's columns those further right are turned by more reflections
            dealt = [
                [x for at, x in enumerate(strips) if at % (2 * count) in (i, 2 * count - 1 - i)] for i in range(count)
            ]
            workers.run(partial(self._turn, b, numbers, *each) for each in zip(lists, dealt, strict=True))

    def _turn(
        self, b: Any, numbers: np.ndarray | None, kept: list[Reflections], strips: list[tuple[int, int]]
    ) -> None:  # fmt: skip
        """Replace these columns of b by Q b, and empty a list of the reflections."""
        while kept:
            each = kept.pop()
            first = 0 if numbers is None else int(np.searchsorted(numbers, each.k))
            y, top = self._whole(each), self.row(each.k)
            for start, end in strips:
                reflect(self.tiles, y, each.t, b[top:, max(first, start) : max(first, end)])

    def _whole(self, each: Reflections) -> Any:
        """Return this rank's rows of Y, which one grid column has if all ranks have the same ones.  Collective."""
        if not self._once:
            return each.y
        y = each.y
        if y is None:
            y = namespace(self.a).empty((len(self.rows) - self.row(each.k), len(each.t)), self.a.dtype)
        self.tiles.across.broadcast(y, self.tiles.owner(each.k)[1])
        return y


def orthogonalized(y: Any, comm: Comm) -> tuple[Any, bool]:
    """Replace Y, whose rows lie on the ranks of `comm`, by Q of its QR factorization; return R and if Q is orthonormal.

    Cholesky's factor of the Gram matrix, applied twice, makes the columns of well conditioned matrices orthonormal by
    products alone (Fukaya and others, "CholeskyQR2", 2014).  The Gram matrix after the first time shows if they are:
    the same on all ranks, to rounding.  Collective.
    """
    r, sound, last = nearly_orthogonalized(y, comm)
    kernels.substitute(last, y, right=True, lower=True, adjoint=True)
    return r, sound


def nearly_orthogonalized(y: Any, comm: Comm) -> tuple[Any, bool, Any]:
    """Do what `orthogonalized` does but for its last step, Q = Y L⁻ᴴ; return L too."""
    first = _gram(y, comm)
    if minor := kernels.cholesky(first):  # all NaNs now
        first = first[:0].copy()
    else:
        kernels.substitute(first, y, right=True, lower=True, adjoint=True)
    last = _gram(y, comm)
    if minor:
        last[...] = math.nan
        return last, False, last
    if not has_values(last):
        sound = last.device.assume("conditioned", "whether the Gram matrix of columns orthogonalizes them")
    else:
        diagonal = last.reshape(-1)[:: len(last) + 1]
        ones = diagonal.copy()
        diagonal -= 1
        real = last.dtype.kind != "c"  # whose sizes need no array
        sound = not last.size or bool(max(last.max(), -last.min()) < NEAR if real else abs(last).max() < NEAR)
        diagonal[:] = ones
        del diagonal  # a view of what is replaced
    kernels.cholesky(last)
    last = namespace(last).tril(last)
    first = namespace(first).tril(first)
    return kernels.adjoint(first @ last), sound, last


def _gram(y: Any, comm: Comm) -> Any:
    """Return Yᴴ Y.  Collective."""
    gram = namespace(y).ascontiguousarray(kernels.adjoint(y) @ y)
    comm.all_reduce(gram)
    return gram


def reflect(
    tiles: Tiles, y: Any, t: Any, b: Any, group: SharedCollectives | None = None, *, adjoint: bool = False
) -> None:
    """Replace b by (I - Y T Yᴴ) b, or with `adjoint` by (I - Y Tᴴ Yᴴ) b, for an upper triangle T.

    The rows of Y and b lie along the grid's columns, whose ranks may share memory as `group`.
    """
    w = namespace(y).ascontiguousarray(kernels.adjoint(y) @ b)
    if group is None:
        tiles.down.all_reduce(w)
    else:
        w = group.all_reduce(w)
    kernels.subtract(b, y, kernels.multiply(t, w, adjoint=adjoint))


def _reconstruct(q: Any) -> tuple[Any, Any, Any]:
    """Replace the top of Q by that of Y; return U, T and signs s.

    Q - diag(s) = Y U, and I - Y T Yᴴ are the reflections.
    """
    lower, u, signs = kernels.unpivoted(q)
    q[...] = lower
    t = -u * signs.conj()
    kernels.substitute(q, t, right=True, lower=True, adjoint=True, unit=True)
    return u, t, signs
