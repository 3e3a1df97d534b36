"""Batches of a data set as distributed arrays: every rank cuts its own block, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.datasets.collate import leaves
from parlinalg.errors import ConfigError, brief
from parlinalg.grid import Grid
from parlinalg.layout import Layout, piece
from parlinalg.random.counter import check_seed
from parlinalg.redistribute import check_given


@dataclass(frozen=True)
class Batch:
    """A batch, or one microbatch of it.

    Attributes
    ----------
    x : DistArray, or a tree of them
        [samples, features]; of text, ids [windows, positions].
    y : DistArray, or a tree of them
        The labels: [samples] of labels, or [windows, positions] of the next ids.
    offset : int
        The place of its first sample in the step's whole batch.
    positions, documents : array, optional
        Of text: where in its window each token comes from, and to which document it belongs, as
        `nn.sequence_positions` takes them.
    ignored : int
        Targets that do not count, of all ranks.
    targets : int, optional
        Those that count, where it is known otherwise than by the elements of y.
    """

    x: Any
    y: Any
    offset: int = 0
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None
    ignored: int = 0
    targets: int | None = None

    @property
    def count(self) -> int:
        """The targets that count, of all ranks."""
        return int(self.y.size) - self.ignored if self.targets is None else self.targets

    def piece(self, rows: range, x: Any, y: Any) -> Batch:
        """Return the microbatch of some rows, with inputs x and targets y."""
        documents = None if self.documents is None else self.documents[rows.start : rows.stop]
        return Batch(x, y, self.offset + rows.start, self.positions, documents)

    def __len__(self) -> int:
        return int(next(leaves(self.x)).shape[0])

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the parts: `x, y = batch`."""
        return iter((self.x, self.y))


class Sampler:
    """The order in which epochs take the samples: it depends on the seed and the epoch alone, and is the same on every
    grid, so that a training goes on in the middle of an epoch without the steps before it.

    A subclass gives another order by overriding `order` (and `__len__`, where it takes other than each sample once).

    Parameters
    ----------
    length : int
        Samples.
    shuffle : bool
        True if every epoch takes them in another order.
    seed : int

    Examples
    --------
    >>> Sampler(4, shuffle=False).order(epoch=0)
    array([0, 1, 2, 3])
    >>> (Sampler(9, seed=1).order(2) == Sampler(9, seed=1).order(2)).all()
    np.True_
    """

    def __init__(self, length: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or not 0 <= length < 1 << 63:
            raise ConfigError(f"Sampler: length is a whole number of at least 0 and below 2⁶³, not {brief(length)}")
        self.length, self.shuffle, self.seed = int(length), bool(shuffle), check_seed(seed)

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.length

    def order(self, epoch: int) -> np.ndarray:
        """Return the numbers of the samples of an epoch, [length]; epochs count from 0."""
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.Generator(np.random.Philox(key=np.array([self.seed, epoch + 1], np.uint64))).permutation(
            self.length
        )


class Loader:
    """Global batches in an order that depends on the seed and the epoch alone: the same on every grid.

    Parameters
    ----------
    x, y : ndarray
        Samples [samples, …] and labels [samples], the same on every rank.
    batch_size : int
        Samples a batch over all ranks; the last one may be smaller.
    grid : Grid
    x_layout, y_layout : Layout
        The layout of a batch of x, with one entry per dim, and of y.
    dtype : dtype
        The dtype of x in the batches.
    seed : int
    shuffle : bool
        True if every epoch takes the samples in another order.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        grid: Grid,
        x_layout: Layout,
        y_layout: Layout,
        *,
        dtype: Any = np.float32,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if len(x) != len(y):
            raise ConfigError(f"x has {len(x)} samples and y {len(y)}; the lengths must agree")
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
        x_layout.check(x.shape, grid.sizes)
        y_layout.check(y.shape, grid.sizes)
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.grid = grid
        self.x_layout, self.y_layout = x_layout, y_layout
        self.dtype = dtype_named(dtype)
        self.sampler = Sampler(len(x), shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return (len(self.x) + self.batch_size - 1) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """Return the order in which an epoch takes the samples."""
        return self.sampler.order(epoch)

    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        """Yield the batches of an epoch, each as a list of at most `parts` microbatches of nearly equal size.

        The first `skip` batches are left out, and not read.
        """
        order = self.order(epoch)
        for start in range(skip * self.batch_size, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            cuts = (piece(len(rows), parts, i) for i in range(parts))
            yield [self.batch(rows[c.start : c.stop], c.start) for c in cuts if c]

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the batches of the first epoch."""
        for (batch,) in self.epoch(0):
            yield batch

    def batch(self, rows: np.ndarray, offset: int = 0) -> Batch:
        """Return the samples with these numbers as a batch."""
        x = self._cut(self.x, rows, self.x_layout, self.dtype)
        y = self._cut(self.y, rows, self.y_layout, self.y.dtype)
        return Batch(x, y, offset)

    def _cut(self, array: np.ndarray, rows: np.ndarray, layout: Layout, dtype: np.dtype[Any]) -> DistArray:
        """Return the block of `array[rows]` that the layout gives this rank."""
        shape = (len(rows), *array.shape[1:])
        mine, *rest = self.grid.block(layout, shape)
        part = array[rows[mine.start : mine.stop]][:, *(slice(r.start, r.stop) for r in rest)]
        block = self.grid.backend.from_host(np.array(part, dtype=dtype, order="C"))
        check_given("a loader", block, layout, shape, self.grid, "give the loaders of all ranks the same data and seed")
        return DistArray(block, shape, layout, self.grid)
