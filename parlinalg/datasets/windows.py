"""Windows of a text as distributed arrays: every rank cuts its own block, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parlinalg.array import DistArray
from parlinalg.backend.memory import check_memory
from parlinalg.datasets.loader import Batch
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout, piece
from parlinalg.random.counter import check_seed
from parlinalg.redistribute import check_given

IGNORED = -100  # a target that does not count


class Passages:
    """Consecutive windows that predict every token of a text but the first once: what validation takes.

    Parameters
    ----------
    tokens : ndarray
        Ids [n], the same on every rank.
    length : int
        Ids that a window has; for each of them the next one is predicted.
    batch_size : int
        Windows a batch over all ranks; the last one may have fewer.
    grid : Grid
    ids_layout, targets_layout : Layout
        Of [windows, positions].
    order : array of int, optional
        [length]: the order in which the tokens of a window lie (see `parlinalg.sequence_order`).
    starts : array of int, optional
        Where in the text documents begin, ascending from 0: those in a window are packed.  No token predicts the first
        one of another document, and attention is to keep within them.

    The last window is filled up by ids of 0, whose targets do not count (−100).
    """

    least = 2  # tokens of text that it needs

    def __init__(
        self, tokens: np.ndarray, length: int, batch_size: int, grid: Grid, ids_layout: Layout, targets_layout: Layout,
        *, order: np.ndarray | None = None, starts: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        for what, value in (("a window's length", length), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{what} must be at least 1, not {value}")
        self.tokens, self.length, self.batch_size = tokens, length, batch_size
        check_memory(f"a batch of {batch_size} windows of {length} tokens", 8 * batch_size * length // grid.size)
        self.grid, self.ids_layout, self.targets_layout = grid, ids_layout, targets_layout
        self.order, self.document_starts = order, starts
        if order is not None and not np.array_equal(np.sort(order), np.arange(length)):
            raise ConfigError(f"the order of a window's tokens is not a permutation of 0 to {length - 1}")
        shape = (batch_size, length)
        ids_layout.check(shape, grid.sizes)
        targets_layout.check(shape, grid.sizes)
        if len(tokens) < self.least:
            raise ConfigError(
                f"the text has {len(tokens)} tokens, and a window of {length} positions needs {self.least}: give more "
                "text, or a shorter sequence_length"
            )

    def __iter__(self) -> Iterator[Batch]:
        for (batch,) in Passages.epoch(self, 0):
            yield batch

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(range(0, len(self.tokens) - 1, self.length * self.batch_size))

    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        """Yield the batches after the first `skip`, each a list of at most `parts` microbatches."""
        starts = np.arange(0, len(self.tokens) - 1, self.length)
        for first in range(skip * self.batch_size, len(starts), self.batch_size):
            yield self._cut_up(starts[first : first + self.batch_size], parts)

    def _cut_up(self, starts: np.ndarray, parts: int) -> list[Batch]:
        """Return the windows that begin at these tokens, as at most `parts` microbatches of nearly equal size."""
        cuts = (piece(len(starts), parts, i) for i in range(parts))
        return [self.batch(starts[c.start : c.stop], c.start) for c in cuts if c]

    def batch(self, starts: np.ndarray, offset: int = 0) -> Batch:
        """Return the windows that begin at these tokens; `offset` is the first one's index in the whole batch."""
        ids, targets = self._cut(starts, 0, self.ids_layout, 0), self._cut(starts, 1, self.targets_layout, IGNORED)
        if self.document_starts is None:
            ignored = int(np.maximum(starts + self.length - len(self.tokens) + 1, 0).sum())
            return Batch(ids, targets, offset, self.order, None, ignored)
        places = starts[:, None] + self._columns()
        return Batch(
            ids, targets, offset, self.order, self._documents(places), int(np.count_nonzero(~self._counts(places)))
        )

    def _columns(self) -> np.ndarray:
        """Return the column of its window that each token comes from."""
        return np.arange(self.length) if self.order is None else self.order

    def _documents(self, places: np.ndarray) -> np.ndarray:
        """Return the documents of tokens at these places of the text."""
        starts = np.zeros(1, np.int64) if self.document_starts is None else self.document_starts
        return np.searchsorted(starts, places, side="right")

    def _counts(self, places: np.ndarray) -> np.ndarray:
        """Return True for each token that the text follows by another one of the same document."""
        inside: np.ndarray = places < len(self.tokens) - 1
        if self.document_starts is not None:
            inside &= self._documents(places) == self._documents(places + 1)
        return inside

    def _cut(self, starts: np.ndarray, shift: int, layout: Layout, fill: int) -> DistArray:
        """Return this rank's block of the windows, `shift` tokens on; `fill` where the text gives no next token."""
        shape = (len(starts), self.length)
        rows, columns = self.grid.block(layout, shape)
        places = starts[rows.start : rows.stop, None] + self._columns()[columns.start : columns.stop]
        inside = self._counts(places) if shift else places < len(self.tokens) - 1
        found = self.tokens[np.where(inside, places + shift, 0)].astype(np.int64)
        block = self.grid.backend.from_host(np.where(inside, found, fill))
        check_given("windows", block, layout, shape, self.grid, "give the windows of all ranks the same text and seed")
        return DistArray(block, shape, layout, self.grid)


class Windows(Passages):
    """Windows that begin anywhere in a text, drawn by the seed and the step alone: the same on every grid.

    Parameters are those of `Passages`, and `seed`.  The batch of a step needs nothing from the steps before it, so that
    a training can go on from any step.
    """

    def __init__(
        self, tokens: np.ndarray, length: int, batch_size: int, grid: Grid, ids_layout: Layout, targets_layout: Layout,
        *, seed: int = 0, order: np.ndarray | None = None, starts: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.least = length + 1
        super().__init__(tokens, length, batch_size, grid, ids_layout, targets_layout, order=order, starts=starts)
        self.seed = check_seed(seed)

    def __len__(self) -> int:
        """Return the number of steps that read as many tokens as the text has: what counts as an epoch."""
        return max(1, len(self.tokens) // (self.batch_size * self.length))

    def starts(self, step: int) -> np.ndarray:
        """Return the first tokens of the windows of a step, [batch_size]; steps count from 0."""
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed, step], np.uint64)))
        return random.integers(0, len(self.tokens) - self.length, self.batch_size)

    def at(self, step: int, parts: int = 1) -> list[Batch]:
        """Return the batch of a step, as at most `parts` microbatches of nearly equal size."""
        return self._cut_up(self.starts(step), parts)

    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        """Yield the batches of an epoch's steps, but for the first `skip` ones."""
        return (self.at(step, parts) for step in range(epoch * len(self) + skip, (epoch + 1) * len(self)))
