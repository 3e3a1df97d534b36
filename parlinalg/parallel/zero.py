"""The values of sharded parameters: side by side in buckets, updated a part a rank, and gathered after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import ParameterStorage, Partition, StorageBytes
from parlinalg.backend.shapes import label_memory
from parlinalg.backend.views import address, flat
from parlinalg.comm import Handle
from parlinalg.layout import Cut, index_of, piece, pieces, span_of
from parlinalg.parallel.buckets import Bucket, Slot

Block = Any

#: Buckets gathered at a time.
MOST_IN_FLIGHT = 2


class SharedStorage(ParameterStorage):
    """The storage of a parameter of which ranks that hold the same block update a part each.

    The value lies whole in the owner's buckets.  The settled gradient is that of this rank's part alone, with one dim;
    `grad` holds what `no_sync` left whole.

    Parameters
    ----------
    before : ParameterStorage
    owner : SharedValues
    slot : Slot
        The parameter's place in one of them.

    Attributes
    ----------
    part : Partition
        What this rank updates.
    keeps : bool
        Whether the gradient stays whole between steps (stage 1).
    """

    __slots__ = ("keeps", "mine", "owner", "part", "slot")

    def __init__(self, before: ParameterStorage, owner: SharedValues, slot: Slot) -> None:
        super().__init__(before)
        bucket, mine = slot.bucket, slot.shard
        self.owner, self.slot, self.keeps = owner, slot, not bucket.transient
        lengths = _lengths(bucket.size, bucket.comm.size, slot.start, slot.stop)
        self.part = Partition(mine.start, mine.stop, bucket.scatter, lengths)
        self.mine: Block = None
        """The settled gradient of this rank's part, or None."""

    @property
    def axes(self) -> Cut:  # type: ignore[override]
        return self.part.axes

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.part.lengths

    @property
    def settled(self) -> Block:
        return self.mine

    def forget(self) -> None:
        self.grad = self.mine = None

    def clear(self, data: DistArray) -> None:
        self.mine = data.grid.backend.zeros((self.part.stop - self.part.start,), data.dtype)

    def whole(self, data: DistArray) -> Block:
        block = data.grid.backend.empty(data.block.shape, data.dtype)
        data.grid.comm(self.axes).all_gather(flat(self.mine), block, list(self.part.lengths))
        return block

    def replace(self, block: Block) -> None:
        self.mine[...] = block.reshape(-1)[self.part.start : self.part.stop]

    def partition(self, data: DistArray, rank: int | None = None) -> Partition:
        if rank is None:
            return self.part
        sizes, coords = data.grid.sizes, data.grid.coords_of(rank)
        starts = self.slot.bucket.starts(coords)
        number, ranks = self.slot.bucket.slots.index(self.slot), span_of(self.axes, sizes)
        first, end = starts[number], starts[number + 1]
        mine = piece(starts[-1], ranks, index_of(self.axes, sizes, coords))
        start, stop = (min(max(at, first), end) - first for at in (mine.start, mine.stop))
        return Partition(start, stop, self.axes, _lengths(starts[-1], ranks, first, end))

    def updated(self, data: DistArray) -> tuple[Block, Block]:
        return flat(data.block)[self.part.start : self.part.stop], self.mine

    def nbytes(self, data: DistArray) -> StorageBytes:
        whole = super().nbytes(data)
        mine = (self.part.stop - self.part.start) * data.dtype.itemsize
        return whole._replace(gradient=whole.gradient if self.keeps else mine, updated=mine)


class SharedValues:
    """Owns the values of the parameters in these buckets, in flat arrays that are gathered where they lie.

    Parameters
    ----------
    buckets : sequence of Bucket
        Those whose gradients are reduce-scattered; their parameters get this as their owner.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.storage = SharedStorage(slot.parameter.storage, self, slot)
        self.adopt()

    def adopt(self) -> None:
        """Move the values into the buckets, those that were replaced too."""
        for bucket in self.buckets:
            views = [_view(bucket, slot) for slot in bucket.slots]
            for slot, view in zip(bucket.slots, views, strict=True):
                p = slot.parameter
                if not _lies_in(p.block, view):
                    view[...] = p.block
                    p.data = DistArray(view, p.shape, p.layout, p.grid)

    def gather(self) -> None:
        """Give every rank the parts that the others have updated: an all-gather a bucket.  Collective."""
        pending: list[Handle] = []
        for bucket in self.buckets:
            own = bucket.own
            if len(pending) == MOST_IN_FLIGHT:
                pending.pop(0).wait()
            mine = bucket.values[own.start : own.stop]
            pending.append(bucket.comm.all_gather(mine, bucket.values, bucket.lengths, wait=False))
        for handle in pending:
            handle.wait()

    def moved(self, arrays: Mapping[int, Block]) -> None:
        """Take the values where they lie now; see `parlinalg.autograd.Owner`."""
        for bucket in self.buckets:
            if bucket.values is not None:
                bucket.values = arrays.get(address(bucket.values), bucket.values)

    def leave(self) -> None:
        """Let every rank update the whole parameters again."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.parameter.storage.owner is self:
                    slot.parameter.storage = ParameterStorage(slot.parameter.storage)


def _view(bucket: Bucket, slot: Slot) -> Block:
    """Return a parameter's place among the values."""
    if bucket.values is None:
        bucket.values = bucket.grid.backend.empty(bucket.size, bucket.dtype)
        label_memory(bucket.values, "weights")
    return bucket.values[slot.start : slot.stop].reshape(slot.shape)


def _lies_in(block: Block, view: Block) -> bool:
    """Return True if a block is the same memory as a view."""
    return block.base is view.base and address(block) == address(view)


@lru_cache(maxsize=64)
def _lengths(size: int, ranks: int, start: int, stop: int) -> tuple[int, ...]:
    """Return how many of elements `start` to `stop` of a bucket of this size are in each rank's part of it."""
    found, at = [], 0
    for length in pieces(size, ranks):
        found.append(max(0, min(at + length, stop) - max(at, start)))
        at += length
    return tuple(found)
