"""Positions of tokens in their sequence, and the keys that a query sees.

Keys are seen causally, within a window, of the query's own document, in chosen blocks, or where a mask says so.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from parlinalg.backend import backend_of, namespace

Block = Any
Span = tuple[int, int]

SHORT = 16
"""Positions per run below which positions are compared one by one."""


class TokenRun(NamedTuple):
    """Tokens `start` to `stop - 1` stand at positions `first`, `first + step`, …; step 0: in no order."""

    start: int
    stop: int
    first: int
    step: int


class TokenPositions:
    """The positions of some tokens.

    Parameters
    ----------
    positions : array of int
        On the host, shape [n], in any order.
    """

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = np.asarray(positions, np.int64)
        self._copy: Any = None

    @cached_property
    def runs(self) -> list[TokenRun]:
        """Maximal runs of equal positive steps; one without order if they would be many."""
        at, n = self.positions, len(self.positions)
        if not n:
            return []
        steps = np.diff(at)
        turns = np.flatnonzero(np.diff(steps)) + 1  # before these steps another one was taken
        runs: list[TokenRun] = []
        start = 0
        for turn in (*turns.tolist(), n - 1):
            if turn <= start < n - 1:  # the step out of the last run
                continue
            step = int(steps[start]) if start < n - 1 else 1
            if step <= 0 or len(runs) > 4 + n // SHORT:
                return [TokenRun(0, n, 0, 0)]
            runs.append(TokenRun(start, turn + 1, int(at[start]), step))
            start = turn + 1
        return runs

    def within(self, part: slice) -> TokenRun:
        """Return the run that a part lies in, cut to the part."""
        for start, stop, first, step in self.runs:
            if start <= part.start < stop:
                return TokenRun(part.start, part.stop, first + (part.start - start) * step, step)
        raise IndexError(f"token {part.start} of {len(self.positions)}")

    def spans(self, step: int) -> list[slice]:
        """Return all tokens in pieces of at most `step`, each within a run."""
        return [
            slice(a, b)
            for run in self.runs
            for a, b in pairwise([*range(run.start, run.stop, max(1, step)), run.stop])
        ]  # fmt: skip

    def on(self, xp: Any) -> Any:
        """Return the positions in the memory of a backend."""
        if self._copy is None:
            self._copy = xp.asarray(self.positions)
        return self._copy


class Visible:
    """The keys that the queries of this rank see.

    Parameters
    ----------
    causal : bool
        Keys after the query's position are hidden.
    window : int, optional
        Only keys less than so many positions away are seen; the query's own counts.
    start : int
        The position of the first query, where queries and keys have no `places`: they then stand side by side.
    places : (Places, Places), optional
        The positions of the queries and of the keys.
    documents : (array of int, array of int), optional
        On the host, shapes [batch or 1, queries] and [batch or 1, keys]: only keys of the query's document are seen.
        Numbers from 0.
    table : array of bool, optional
        On the host, shape [kv heads or 1, g or 1, rows of blocks, columns of blocks]: the blocks of `size` queries and
        `size` keys that are seen at all; the others are skipped.  Without `places`.
    size : int
    keep : tuple of array of bool
        Each broadcastable to [batch, kv heads, g, queries, keys]: the pairs that are seen, where all of them say so.
        They are combined in blocks of scores alone.
    """

    def __init__(
        self, *, causal: bool = False, window: int | None = None, start: int = 0,
        places: tuple[TokenPositions, TokenPositions] | None = None,
        documents: tuple[np.ndarray, np.ndarray] | None = None,
        table: np.ndarray | None = None, size: int = 0, keep: tuple[Block, ...] = (),
    ) -> None:  # fmt: skip
        self.causal = causal
        self.window = window
        self.start = start
        self.places = places if causal or window is not None else None
        self.documents = documents
        self.table = table
        self.size = size
        self.keep = keep
        self._edges: dict[tuple[int, int, int], Block] = {}
        self._marks: Block = None
        """The documents in the memory of the scores, where that is not the host's."""
        self._met: dict[tuple[int, int, int, int], np.ndarray] = {}

    @property
    def alike(self) -> bool:
        """True if all queries see the same run of keys, apart from single ones."""
        return not self.causal and self.window is None and self.table is None and self.documents is None

    @property
    def by_places(self) -> bool:
        """True if positions alone say what is seen."""
        return self.table is None and self.documents is None and not self.keep

    @property
    def by_head(self) -> bool:
        """True if heads see different blocks, so that each is best taken alone."""
        return self.table is not None and self.table.shape[0] > 1

    def part(self, batch: slice, heads: slice) -> Visible:
        """Return the same for a part of the batch and of the kv heads."""
        documents, table = self.documents, self.table
        if documents is not None:
            queries, keys = (d if d.shape[0] == 1 else d[batch] for d in documents)
            documents = queries, keys
        if table is not None and table.shape[0] > 1:
            table = table[heads]
        return Visible(
            causal=self.causal, window=self.window, start=self.start, places=self.places, documents=documents,
            table=table, size=self.size, keep=tuple(_within(k, batch, heads) for k in self.keep),
        )  # fmt: skip

    # ------------------------------------------------------------------ what is skipped

    def rows(self, queries: int, most: int) -> list[slice]:
        """Return the queries in runs of at most `most`, each of equal steps."""
        return row_spans(queries, most) if self.places is None else self.places[0].spans(most)

    def spans(self, batch: slice, heads: slice, rows: slice, keys: int, most: int) -> list[Span]:
        """Return the runs of keys, none longer than `most`, that queries `rows` of these items see."""
        runs = [TokenRun(0, keys, 0, 1)] if self.places is None else self.places[1].runs
        found = [self._near(rows, run) for run in runs]
        if self.table is not None:
            found = [span for low, high in found for span in self._runs(heads, rows, low, high)]
        if self.documents is not None:
            met = self._documents_met(batch, rows)
            found = [_trimmed(met[low:high], low) for low, high in found]
        return [(at, min(at + most, stop)) for start, stop in found for at in range(start, stop, most)]

    def _near(self, rows: slice, run: TokenRun) -> Span:
        """Return the part of a run of keys that causality and the window leave to queries `rows`."""
        low, high = run.start, run.stop
        if not self.causal and self.window is None:
            return low, high
        first, last = self._ends(rows)
        ahead = 1 if self.causal else self.window
        assert ahead is not None
        least = None if self.window is None else first - self.window + 1
        if not run.step:
            assert self.places is not None
            here = self.places[1].positions[low:high]
            return _trimmed((here < last + ahead) & (here >= (here if least is None else least)), low)
        if least is not None:
            low = max(low, _before(run, least))
        return low, min(high, _before(run, last + ahead))

    def _ends(self, rows: slice) -> Span:
        """Return the least and the greatest position of queries `rows`."""
        if self.places is None:
            return self.start + rows.start, self.start + rows.stop - 1
        here = self.places[0].positions[rows]
        return int(here.min()), int(here.max())

    def _seen(self, heads: slice, rows: slice) -> np.ndarray:
        """Return the part of the table that queries `rows` of these heads meet."""
        assert self.table is not None
        here = self.table if self.table.shape[0] == 1 else self.table[heads]
        return here[:, :, rows.start // self.size : -(-rows.stop // self.size)]

    def _runs(self, heads: slice, rows: slice, low: int, high: int) -> list[Span]:
        seen = self._seen(heads, rows).any(axis=(0, 1, 2))
        edges = np.flatnonzero(np.diff(np.concatenate(([False], seen, [False])))) * self.size
        spans = [(max(low, int(a)), min(high, int(b))) for a, b in edges.reshape(-1, 2)]
        return [(a, b) for a, b in spans if a < b]

    def _documents_met(self, batch: slice, rows: slice) -> np.ndarray:
        """Return which keys share a document with one of queries `rows` in some item of the batch."""
        key = (batch.start, batch.stop, rows.start, rows.stop)
        if key not in self._met:
            if len(self._met) > 64:
                self._met.clear()
            queries, keys = self._documents(batch)
            count = 1 + max(int(queries.max(initial=-1)), int(keys.max(initial=-1)))
            items = np.arange(queries.shape[0])[:, None]
            here = np.zeros((queries.shape[0], count), np.bool_)
            here[items, queries[:, rows]] = True
            self._met[key] = here[items, keys].any(axis=0)
        return self._met[key]

    def _documents(self, batch: slice) -> tuple[np.ndarray, np.ndarray]:
        assert self.documents is not None
        queries, keys = (d if d.shape[0] == 1 else d[batch] for d in self.documents)
        items = max(len(queries), len(keys))
        return np.broadcast_to(queries, (items, queries.shape[1])), np.broadcast_to(keys, (items, keys.shape[1]))

    # ------------------------------------------------------------------ what is hidden

    def hide(self, scores: Block, batch: slice, heads: slice, rows: slice, keys: slice) -> None:
        """Set the scores of pairs that are not seen to -inf, in place.

        Parameters
        ----------
        scores : array
            Shape [batch, kv heads, g, rows, keys], of the part that the slices name.
        """
        if self.causal or self.window is not None:
            self._hide_far(scores, rows, keys)
        if self.table is not None:
            self._hide_blocks(scores, heads, rows, keys)
        if self.documents is not None:
            self._hide_documents(scores, batch, rows, keys)
        for keep in self.keep:
            seen = _within(keep, batch, heads, slice(None), rows, keys)
            self._hide_where(scores, namespace(scores).logical_not(seen))

    def edges(self, rows: slice, keys: slice) -> Span | None:
        """Return (after, upto): by their positions, query i of a block sees its keys with i + upto < j <= i + after.

        Query i of the block stands at a + i s, key j at b + j s: with lag = a - b, the key is not after the query where
        j <= i + lag // s, and so on.  None where the steps are not alike.
        """
        n, m = rows.stop - rows.start, keys.stop - keys.start
        after, upto = m, -n
        if not self.causal and self.window is None:
            return after, upto
        if self.places is None:
            lag, step = self.start + rows.start - keys.start, 1
        else:
            queries, others = self.places[0].within(rows), self.places[1].within(keys)
            step = others.step if n == 1 else queries.step
            if not (queries.step and others.step) or (step != others.step and m > 1):
                return None
            lag = queries.first - others.first
        if self.causal:
            after = lag // step
        if self.window is not None:
            upto = (lag - self.window) // step
            if not self.causal:
                after = -((-lag - self.window) // step) - 1
        return after, upto

    def band(self, queries: int, keys: int) -> Span | None:
        """Return the edges of the block of all pairs; None where more than two edges say what is seen."""
        if not self.by_places or (self.places is not None and any(len(part.runs) > 1 for part in self.places)):
            return None
        return self.edges(slice(0, queries), slice(0, keys))

    def pairs(self, first: int, last: int, start: int, stop: int) -> int:
        """Return how many pairs causality and the window leave of queries `first` to `last - 1` and keys `start` to
        `stop - 1`."""
        n, m = last - first, stop - start
        if (edges := self.edges(slice(first, last), slice(start, stop))) is None:
            return n * m
        i = np.arange(n)
        return int(np.maximum(0, np.minimum(m, i + edges[0] + 1) - np.maximum(0, i + edges[1] + 1)).sum())

    def _hide_far(self, scores: Block, rows: slice, keys: slice) -> None:
        """Hide what causality and the window hide."""
        edges = self.edges(rows, keys)
        if edges is None:
            self._hide_one_by_one(scores, rows, keys)
            return
        n, m = rows.stop - rows.start, keys.stop - keys.start
        self._hide_after(scores, n, m, edges[0])
        self._hide_up_to(scores, n, m, edges[1])

    def _hide_after(self, scores: Block, n: int, m: int, shift: int) -> None:
        """Hide keys j > i + shift."""
        c = max(0, shift + 1)
        if c < m:
            scores[..., c:] += self._edge(scores, n, m - c, c - shift)

    def _hide_up_to(self, scores: Block, n: int, m: int, shift: int) -> None:
        """Hide keys j <= i + shift: mirrored, as those after."""
        c = min(m, n + shift)
        if c > 0:
            scores[..., :c] += self._edge(scores, n, c, n + shift - c + 1)[::-1, ::-1]

    def _hide_one_by_one(self, scores: Block, rows: slice, keys: slice) -> None:
        assert self.places is not None
        xp = namespace(scores)
        ahead = self.places[1].on(xp)[None, keys] - self.places[0].on(xp)[rows, None]
        hidden = ahead > 0 if self.causal else ahead >= self.window
        if self.window is not None:
            hidden |= ahead <= -self.window
        self._hide_where(scores, hidden)

    def _hide_documents(self, scores: Block, batch: slice, rows: slice, keys: slice) -> None:
        queries, others = self._documents(batch)
        first = queries[:, rows][:, :1]
        if (queries[:, rows] == first).all() and (others[:, keys] == first).all():
            return
        xp = namespace(scores)
        if not backend_of(scores).host_memory:
            assert self.documents is not None
            if self._marks is None:
                self._marks = tuple(xp.asarray(d) for d in self.documents)
            queries, others = (d if d.shape[0] == 1 else d[batch] for d in self._marks)
        apart = queries[:, None, None, rows, None] != others[:, None, None, None, keys]
        self._hide_where(scores, apart)

    @staticmethod
    def _hide_where(scores: Block, hidden: Block) -> None:
        namespace(scores).copyto(scores, scores.dtype.type(-math.inf), where=hidden)

    def _edge(self, scores: Block, rows: int, columns: int, ahead: int) -> Block:
        """Return 0, and -inf where column j is beyond row i: j + ahead > i."""
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
        self._hide_where(scores, xp.asarray(~seen[:, :, down][..., across]))


def _within(keep: Block, *parts: slice) -> Block:
    """Return these parts of the first dims of a mask; dims of size 1 stand for all."""
    return keep[tuple(p if n > 1 else slice(None) for p, n in zip(parts, keep.shape, strict=False))]


def _before(run: TokenRun, position: int) -> int:
    """Return where in a run the keys end that stand before a position; it may be beyond the run."""
    return run.start + max(0, -((run.first - position) // run.step))


def _trimmed(met: np.ndarray, low: int) -> Span:
    """Return the span from the first to the last key that is met; `met` says it of the keys from `low` on."""
    here = np.flatnonzero(met)
    return (low + int(here[0]), low + int(here[-1]) + 1) if here.size else (low, low)


def row_spans(rows: int, step: int) -> list[slice]:
    """Return the rows in runs of `step`."""
    edges = [*range(0, rows, max(1, step)), rows]
    return [slice(a, b) for a, b in pairwise(edges)]
