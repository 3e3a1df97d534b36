"""The values of sharded parameters: side by side in buckets, updated a part a rank, and gathered after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import Shard
from parlinalg.backend.views import address
from parlinalg.comm import Handle
from parlinalg.parallel.buckets import Bucket, Slot

Block = Any

#: Buckets gathered at a time.
UNDER_WAY = 2


class Values:
    """Owns the values of the parameters in these buckets, in flat arrays that are gathered where they lie.

    Parameters
    ----------
    buckets : sequence of Bucket
        Those whose gradients are reduce-scattered; their parameters get shards.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        for bucket in self.buckets:
            for slot in bucket.slots:
                part = slot.shard
                slot.parameter.shard = Shard(
                    part.start, part.stop, bucket.scatter, lengths=_lengths(bucket, slot), owner=self
                )
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
            if len(pending) == UNDER_WAY:
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
        """Every rank updates the whole parameters again."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.parameter.shard is not None and slot.parameter.shard.owner is self:
                    slot.parameter.shard = None


def _view(bucket: Bucket, slot: Slot) -> Block:
    """A parameter's place among the values."""
    if bucket.values is None:
        bucket.values = bucket.grid.backend.empty(bucket.size, bucket.dtype)
    return bucket.values[slot.start : slot.stop].reshape(slot.shape)


def _lies_in(block: Block, view: Block) -> bool:
    """Whether a block is the same memory as a view."""
    return block.base is view.base and address(block) == address(view)


def _lengths(bucket: Bucket, slot: Slot) -> tuple[int, ...]:
    """How many of a parameter's elements each rank's part of the bucket has."""
    found, at = [], 0
    for length in bucket.lengths:
        found.append(max(0, min(at + length, slot.stop) - max(at, slot.start)))
        at += length
    return tuple(found)
