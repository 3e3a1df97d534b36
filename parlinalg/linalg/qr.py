"""QR factorization, A = Q R, on tiles: panels by TSQR, as Householder reflections.

A panel's R comes from a tree of one level over the ranks of a grid column (Demmel, Grigori, Hoemmen and Langou, 2012);
its reflections are then found from its Q (Ballard and others, "Reconstructing Householder vectors", 2014), so that the
rest of the matrix is updated by products, I - Y T Yᴴ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.comm import Handle
from parlinalg.linalg import kernels
from parlinalg.linalg.panels import Panels
from parlinalg.linalg.tiles import Tiles


@dataclass(frozen=True)
class Reflections:
    """The reflections of a panel, I - Y T Yᴴ: row number, this rank's rows of Y from there on, T, and the panel's R."""

    k: int
    y: np.ndarray
    t: np.ndarray
    r: np.ndarray


class QR(Panels):
    """R replaces the upper triangle of A; further columns become Qᴴ B.

    Attributes
    ----------
    kept : list of Reflections
    """

    def __init__(self, tiles: Tiles, a: np.ndarray, shape: tuple[int, int], extra: int = 0) -> None:
        super().__init__(tiles, a, shape, extra)
        self.kept: list[Reflections] = []

    def factor(self, k: int, b: int) -> tuple[Handle, Any]:
        tiles, (i, j) = self.tiles, self.tiles.owner(k)
        at, c = self.row(k), self.column(k)
        message = np.empty((2 * b + len(self.rows) - at, b), self.a.dtype)
        t, r, y = message[:b], message[b : 2 * b], message[2 * b :]
        if tiles.j == j:
            q, mine = kernels.qr(self.a[at:, c : c + b])
            counts = [min(b, len(x) - int(np.searchsorted(x, k))) for x in self.every_row]
            merged, r[...] = kernels.qr(tiles.gather(tiles.down, mine, counts))
            before = sum(counts[: tiles.i])
            y[...] = q @ merged[before : before + counts[tiles.i]]
            top = b if tiles.i == i else 0
            head = np.empty((2 * b + 1, b), self.a.dtype)
            if top:
                head[:b], head[b : 2 * b], head[2 * b] = _reconstruct(y[:b])
            tiles.down.broadcast(head, i)
            t[...] = head[b : 2 * b]
            kernels.substitute(head[:b], y[top:], right=True)
            r *= head[2 * b][:, None]
            self.a[at:, c : c + b] = 0
            if top:
                self.a[at : at + b, c : c + b] = r
        return tiles.across.broadcast(message, j, wait=False), (t, r, y)

    def take(self, k: int, b: int, panel: Any) -> Any:
        t, r, y = panel
        self.kept.append(Reflections(k, y, t, r))
        return self.kept[-1]

    def update(self, step: Any, first: int, last: int) -> None:
        reflect(self.tiles, step.y, kernels.adjoint(step.t), self.a[self.row(step.k) :, first:last])

    def times(self, b: np.ndarray) -> None:
        """Replace b, of which this rank has the same rows, by Q b.  Collective."""
        for each in reversed(self.kept):
            reflect(self.tiles, each.y, each.t, b[self.row(each.k) :])


def reflect(tiles: Tiles, y: np.ndarray, t: np.ndarray, b: np.ndarray) -> None:
    """Replace b by (I - Y T Yᴴ) b; the rows of both lie along the grid's columns."""
    w = np.ascontiguousarray(kernels.adjoint(y) @ b)
    tiles.down.all_reduce(w)
    kernels.subtract(b, y, t @ w)


def _reconstruct(q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replace the top of Q by that of Y; return U, T and signs s.

    Q - diag(s) = Y U, and I - Y T Yᴴ are the reflections.
    """
    b = len(q)
    signs = np.empty(b, q.dtype)
    for j in range(b):
        size = abs(q[j, j])
        signs[j] = -q[j, j] / size if size else -1
        q[j, j] -= signs[j]
        q[j + 1 :, j] /= q[j, j]
        q[j + 1 :, j + 1 :] -= np.outer(q[j + 1 :, j], q[j, j + 1 :])
    u = np.triu(q)
    q[...] = np.tril(q, -1) + np.eye(b, dtype=q.dtype)
    t = -u * signs.conj()
    kernels.substitute(q, t, right=True, lower=True, adjoint=True, unit=True)
    return u, t, signs
