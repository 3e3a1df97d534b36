"""Which keys a query sees: causal, within a window, in chosen blocks, or where a mask says so."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from parlinalg.backend import namespace

Block = Any
Span = tuple[int, int]


class Visible:
    """Which keys the queries of this rank see.  Query i stands at position `start + i` of the keys.

    Parameters
    ----------
    causal : bool
        Keys after the query's position are hidden.
    window : int, optional
        Only keys less than so many positions away are seen; the query's own counts.
    start : int
        The position of the first query.
    table : array of bool, optional
        On the host, shape [kv heads or 1, g or 1, rows of blocks, columns of blocks]: the blocks of `size` queries and
        `size` keys that are seen at all; the others are skipped.
    size : int
    keep : array of bool, optional
        Broadcastable to [batch, kv heads, g, queries, keys]: the pairs that are seen.
    """

    def __init__(
        self, *, causal: bool = False, window: int | None = None, start: int = 0, table: np.ndarray | None = None,
        size: int = 0, keep: Block = None,
    ) -> None:  # fmt: skip
        self.causal = causal
        self.window = window
        self.start = start
        self.table = table
        self.size = size
        self.keep = keep
        self._edges: dict[tuple[int, int, int], Block] = {}

    @property
    def alike(self) -> bool:
        """Whether all queries see the same run of keys, apart from single ones."""
        return not self.causal and self.window is None and self.table is None

    @property
    def by_head(self) -> bool:
        """Whether heads see different blocks, so that each is best taken alone."""
        return self.table is not None and self.table.shape[0] > 1

    def spans(self, heads: slice, rows: slice, keys: int, most: int) -> list[Span]:
        """The runs of keys, none longer than `most`, outside of which queries `rows` of these heads see nothing."""
        first, last = self.start + rows.start, self.start + rows.stop - 1
        low, high = 0, keys
        if self.causal:
            high = min(high, last + 1)
        if self.window is not None:
            low = max(low, first - self.window + 1)
            high = min(high, last + self.window)
        runs = [(low, high)] if self.table is None else self._runs(heads, rows, low, high)
        return [(at, min(at + most, stop)) for start, stop in runs for at in range(start, stop, most)]

    def _seen(self, heads: slice, rows: slice) -> np.ndarray:
        """The part of the table that queries `rows` of these heads meet."""
        assert self.table is not None
        here = self.table if self.table.shape[0] == 1 else self.table[heads]
        return here[:, :, rows.start // self.size : -(-rows.stop // self.size)]

    def _runs(self, heads: slice, rows: slice, low: int, high: int) -> list[Span]:
        seen = self._seen(heads, rows).any(axis=(0, 1, 2))
        edges = np.flatnonzero(np.diff(np.concatenate(([False], seen, [False])))) * self.size
        spans = [(max(low, int(a)), min(high, int(b))) for a, b in edges.reshape(-1, 2)]
        return [(a, b) for a, b in spans if a < b]

    def hide(self, scores: Block, batch: slice, heads: slice, rows: slice, keys: slice) -> None:
        """Set the scores of pairs that are not seen to -inf, in place.

        Parameters
        ----------
        scores : array
            Shape [batch, kv heads, g, rows, keys], of the part that the slices name.
        """
        first, last = self.start + rows.start, self.start + rows.stop - 1
        at, stop = keys.start, keys.stop
        if self.causal and stop > first + 1:
            c = max(at, first + 1)
            scores[..., c - at :] += self._edge(scores, last - first + 1, stop - c, c - first)
        if self.window is not None:
            if at < last - self.window + 1:
                c = min(stop, last - self.window + 1)
                # key k is hidden from the query at position p where p - window >= k: mirrored, as the causal edge
                far = self._edge(scores, last - first + 1, c - at, last - self.window - (c - 1) + 1)
                scores[..., : c - at] += far[::-1, ::-1]
            if not self.causal and stop > first + self.window:
                c = max(at, first + self.window)
                scores[..., c - at :] += self._edge(scores, last - first + 1, stop - c, c - first - self.window + 1)
        if self.table is not None:
            self._hide_blocks(scores, heads, rows, keys)
        if self.keep is not None:
            part = self._kept(batch, heads, rows, keys)
            xp = namespace(scores)
            xp.copyto(scores, scores.dtype.type(-math.inf), where=xp.logical_not(part))

    def _edge(self, scores: Block, rows: int, columns: int, ahead: int) -> Block:
        """0, and -inf where column j is beyond row i: j + ahead > i."""
        key = (rows, columns, ahead)
        if key not in self._edges:
            if len(self._edges) > 16:
                self._edges.clear()
            xp = namespace(scores)
            hidden = xp.arange(columns)[None, :] + ahead > xp.arange(rows)[:, None]
            self._edges[key] = xp.where(hidden, scores.dtype.type(-math.inf), scores.dtype.type(0))
        return self._edges[key]

    def _hide_blocks(self, scores: Block, heads: slice, rows: slice, keys: slice) -> None:
        size = self.size
        seen = self._seen(heads, rows)[..., keys.start // size : -(-keys.stop // size)]
        if seen.all():
            return
        xp = namespace(scores)
        down = np.arange(rows.start, rows.stop) // size - rows.start // size
        across = np.arange(keys.start, keys.stop) // size - keys.start // size
        hidden = xp.asarray(~seen[:, :, down][..., across])
        xp.copyto(scores, scores.dtype.type(-math.inf), where=hidden)

    def _kept(self, batch: slice, heads: slice, rows: slice, keys: slice) -> Block:
        parts = (batch, heads, slice(None), rows, keys)
        return self.keep[tuple(p if n > 1 else slice(None) for p, n in zip(parts, self.keep.shape, strict=True))]


def row_spans(rows: int, step: int) -> list[slice]:
    """The rows in runs of `step`."""
    edges = [*range(0, rows, max(1, step)), rows]
    return [slice(a, b) for a, b in pairwise(edges)]
