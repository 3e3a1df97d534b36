"""The values of sharded parameters: side by side in buckets, updated a part a rank, and gathered after a step.

The gathers may also go on in the next forward pass, as with `--overlap-param-gather` of Megatron-LM's distributed
optimizer: then a bucket's gather is awaited when the value of one of its parameters is read (`LateArray`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import ParameterStorage, Partition, StorageBytes
from parlinalg.backend.shapes import label_memory
from parlinalg.backend.views import address, flat
from parlinalg.comm import Handle
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, index_of, piece, pieces, span_of
from parlinalg.parallel.buckets import Bucket, Slot

Block = Any

#: Buckets gathered at a time: gathers in flight share the network, and the first one that is needed should end first.
MOST_IN_FLIGHT = 2


class LateArray(DistArray):
    """A parameter's value in a bucket whose gathers may be in flight: whoever asks for `block` waits for them.

    Parameters
    ----------
    block, shape, layout, grid
        As of `DistArray`.
    values : SharedValues
        The owner of the bucket.
    bucket : Bucket
        The bucket in which the block lies.
    """

    __slots__ = ("_block", "bucket", "values")

    def __init__(
        self, block: Block, shape: Sequence[int], layout: Layout, grid: Grid, values: SharedValues, bucket: Bucket
    ) -> None:  # fmt: skip
        self.values, self.bucket = values, bucket
        super().__init__(block, shape, layout, grid)

    @property
    def block(self) -> Block:
        """This rank's block, once it is here.  Collective over the bucket's ranks while its gather is in flight."""
        if self.bucket.gathering:
            self.values.complete(self.bucket)
        return self._block

    @block.setter
    def block(self, block: Block) -> None:
        self._block = block

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._block.dtype


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

    Buckets with `overlap_gather` are gathered from the last one to the first, which is about the order in which a
    forward pass uses them, as the first one has the first gradients of a backward pass.  At most `MOST_IN_FLIGHT` are
    in flight: the next one starts when a value is read whose gather is done with.  All ranks read the same values in
    the same order, so that all start the gathers in one order; progress is made when the grid is polled.

    Parameters
    ----------
    buckets : sequence of Bucket
        Those whose gradients are reduce-scattered; their parameters get this as their owner.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._waiting: deque[Bucket] = deque()
        """Buckets whose gathers have not started, in the order in which they will."""
        self._in_flight: dict[Bucket, Handle] = {}
        """Gathers in flight that are awaited late, in the order in which they started."""
        self._grids = list({id(bucket.grid): bucket.grid for bucket in self.buckets}.values())
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.storage = SharedStorage(slot.parameter.storage, self, slot)
        self.adopt()

    def adopt(self) -> None:
        """Move the values into the buckets, those that were replaced too.  Collective where gathers are in flight."""
        self.finish()
        for bucket in self.buckets:
            views = [_view(bucket, slot) for slot in bucket.slots]
            for slot, view in zip(bucket.slots, views, strict=True):
                p = slot.parameter
                moves = not _lies_in(p.block, view)
                if moves:
                    view[...] = p.block
                if moves or isinstance(p.data, LateArray) != bucket.policy.overlap_gather:
                    p.data = self._array(bucket, slot, view)

    def gather(self) -> None:
        """Give every rank the parts that the others have updated: an all-gather a bucket.  Collective."""
        self.finish()
        pending: list[Handle] = []
        for bucket in self.buckets:
            if bucket.policy.overlap_gather:
                continue
            if len(pending) == MOST_IN_FLIGHT:
                pending.pop(0).wait()
            pending.append(_gather(bucket))
        for handle in pending:
            handle.wait()
        self._waiting.extend(bucket for bucket in reversed(self.buckets) if bucket.policy.overlap_gather)
        if self._waiting:
            for bucket in self._waiting:
                bucket.gathering = True
            for grid in self._grids:
                grid.polled.append(self)
                grid.closing.append(self.finish)
            self._start()

    # ------------------------------------------------------------------ gathers that are awaited late
    @property
    def in_flight(self) -> int:
        """The number of gathers that have started and are not awaited yet."""
        return len(self._in_flight)

    def complete(self, bucket: Bucket) -> None:
        """Wait for a bucket's gather, and start the next ones.  Collective over the ranks of the buckets."""
        while bucket in self._waiting:
            if len(self._in_flight) >= MOST_IN_FLIGHT:
                self._await(next(iter(self._in_flight)))
            self._start()
        self._await(bucket)
        self._start()

    def finish(self) -> None:
        """Wait until all values are here.  Collective where gathers are in flight."""
        while self._in_flight:
            self.complete(next(iter(self._in_flight)))

    def poll(self) -> None:
        """Progress pending gathers: MPI progresses only within its calls."""
        for handle in self._in_flight.values():
            if not handle.test():
                return

    def _start(self) -> None:
        """Start gathers, as many as may be in flight; when none is left, leave the grids' lists."""
        while self._waiting and len(self._in_flight) < MOST_IN_FLIGHT:
            self._in_flight[self._waiting[0]] = _gather(self._waiting[0])
            self._waiting.popleft()
        if not self._in_flight:
            for grid in self._grids:
                grid.polled[:] = [each for each in grid.polled if each is not self]
                grid.closing[:] = [each for each in grid.closing if each != self.finish]

    def _await(self, bucket: Bucket) -> None:
        self._in_flight[bucket].wait()
        del self._in_flight[bucket]
        bucket.gathering = False

    def _array(self, bucket: Bucket, slot: Slot, view: Block) -> DistArray:
        """Return a parameter's value that lies in a bucket."""
        p = slot.parameter
        if bucket.policy.overlap_gather:
            return LateArray(view, p.shape, p.layout, p.grid, self, bucket)
        return DistArray(view, p.shape, p.layout, p.grid)

    def moved(self, arrays: Mapping[int, Block]) -> None:
        """Take the values where they lie now; see `parlinalg.autograd.Owner`."""
        for bucket in self.buckets:
            if bucket.values is not None:
                bucket.values = arrays.get(address(bucket.values), bucket.values)
                for slot in bucket.slots if bucket.policy.overlap_gather else ():
                    if not isinstance(slot.parameter.data, LateArray):
                        slot.parameter.data = self._array(bucket, slot, slot.parameter.block)

    def leave(self) -> None:
        """Let every rank update the whole parameters again.  Collective where gathers are in flight."""
        self.finish()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.parameter.storage.owner is self:
                    slot.parameter.storage = ParameterStorage(slot.parameter.storage)


def _gather(bucket: Bucket) -> Handle:
    """Start the all-gather of a bucket's values."""
    own = bucket.own
    return bucket.comm.all_gather(bucket.values[own.start : own.stop], bucket.values, bucket.lengths, wait=False)


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
