"""The gradient reducer: gradients of parameters summed in buckets, while the backward pass runs.

A gradient arrives with its parameter's cuts, partial over some of the axes that do not cut it: data parallelism is the
case where that set is the data axis.  Gradients partial over the same axes share a flat buffer, cut into buckets in the
order in which they arrive; a full bucket's sum starts at once, and the backward pass goes on (Li et al., "PyTorch
Distributed: experiences on accelerating data parallel training", 2020).  Handlers say whether the sum is an all-reduce,
or a reduce-scatter of which each rank keeps a part (ZeRO).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parlinalg.autograd import Parameter, Reducer
from parlinalg.autograd.gradients import GradientAccumulator
from parlinalg.autograd.parameter import distinct
from parlinalg.backend.shapes import label_memory
from parlinalg.comm import Handle
from parlinalg.comm.base import by_terms
from parlinalg.errors import ConfigError
from parlinalg.layout import Cut, Layout
from parlinalg.matmul.local import DeferredGemm, copy_or_add
from parlinalg.parallel.buckets import (
    FIRST_BUCKET,
    Bucket,
    Load,
    Slot,
    bucket_load,
    floats,
    full_from,
    in_order,
    largest,
    most_in_flight,
    transient_bytes,
)
from parlinalg.parallel.handlers import DataParallel, Handler, ReductionPolicy, SequenceParallel, check, policy_of
from parlinalg.parallel.zero import SharedStorage, SharedValues

Block = Any


@dataclass(eq=False)
class Pending:
    """A bucket in flight, and the array where its sums arrive."""

    bucket: Bucket
    handle: Handle
    result: Block


class GradientReducer:
    """Settles the gradients of parameters, and keeps them as views into flat buffers.

    The first backward pass shows over which axes each gradient is partial, and in which order they arrive; the buckets
    are made at its end.  With a ZeRO handler they are made at once, in the reverse order of the parameters.  A bucket's
    nonblocking sum starts as soon as its last gradient has arrived and the buckets before it have started: in the same
    order on every rank.  A parameter that a backward pass does not reach contributes zeros.

    A bucket that is reduce-scattered over some axes and partial over others too is reduce-scattered first, and the part
    is all-reduced after: n (1 - 1/N) + 2 n/N (1 - 1/M) elements, the fewest.

    Parameters
    ----------
    parameters : iterable of Parameter
        They take this reducer as theirs.
    handlers : sequence of DataParallel, SequenceParallel, SharedParameters or ZeRO
        Axes that none of them names are all-reduced.
    first_bucket : int
        Bytes of the first bucket, small so that communication starts early.
    bucket : int, optional
        Bytes of the others.  By default 25 MiB, or 1 MiB for each of the ranks that sum it, but at most 256 MiB.
    dtype : dtype or str, optional
        What gradients travel in: "float16", "bfloat16", "float32" or "float64"; by default their own dtype.  Sums of 16
        bits are formed in 32.
    chunks : iterable of iterables of Parameter
        Where each backward pass reaches some of the parameters, as in a pipeline whose ranks have several chunks of the
        model: those of each pass.  Parameters that different passes reach have no bucket in common, whose other
        gradients ZeRO-2 would reduce-scatter as zeros.

    Raises
    ------
    ConfigError
        If the dtype is another one, or a parameter has a reducer already, or handlers do not fit together or the grid.

    Attributes
    ----------
    buckets : list of Bucket
        In the order in which they start.

    Examples
    --------
    >>> reducer = GradientReducer(model.parameters(), [ZeRO(stage=2)])  # doctest: +SKIP
    >>> optimizer = AdamW(model.parameters())  # doctest: +SKIP
    """

    def __init__(
        self, parameters: Iterable[Parameter], handlers: Iterable[Handler] | None = None,
        first_bucket: int = FIRST_BUCKET, bucket: int | None = None, dtype: Any = None,
        chunks: Iterable[Iterable[Parameter]] = (),
    ) -> None:  # fmt: skip
        self.parameters = [p for p in distinct(parameters) if p.requires_grad]
        self.handlers = tuple(handlers or ())
        self._first, self._limit = first_bucket, bucket
        self.dtype = None if dtype is None else floats(dtype)
        for grid in {id(p.grid): p.grid for p in self.parameters}.values():
            check(self.handlers, grid.sizes)
        for p in self.parameters:
            if p.reducer is not None:
                raise ConfigError(f"parameter {p.name!r} has a gradient reducer already; detach() that one first")
        self._policies = {id(p): policy_of(self.handlers, p.name, p.layout, p.grid.sizes) for p in self.parameters}
        self._chunks: dict[int, tuple[int, ...]] = {}
        """For each parameter the chunks that have it."""
        for number, chunk in enumerate(chunks):
            for p in distinct(chunk):
                self._chunks[id(p)] = (*self._chunks.get(id(p), ()), number)
        self.buckets: list[Bucket] = []
        self._axes: dict[int, Cut] = {}
        """For each parameter the axes over which its gradient has been partial."""
        self._slots: dict[int, Slot] = {}
        self._arrived: dict[int, Parameter] = {}
        self._started = 0
        self._finished: set[Bucket] = set()
        """Buckets that receive nothing more in this pass and have nothing to sum."""
        self._pending: list[Pending] = []
        self._second_sums: list[Pending] = []
        """Parts that are all-reduced after they were reduce-scattered."""
        self._outdated = False
        self._values: SharedValues | None = None
        for p in self.parameters:
            p.reducer = self
        if self._scatters:
            self._make_buckets()
            self._values = SharedValues([b for b in self.buckets if b.scatter])

    def detach(self) -> None:
        """Leave the parameters: the backward pass settles their gradients one by one again, on every rank whole.

        Collective where gathers of values are in flight (`ZeRO.overlap_gather`).
        """
        for p in self.parameters:
            if p.reducer is self:
                p.reducer = None
        if self._values is not None:
            self._values.leave()

    def full_from(self, parameter: Parameter) -> int:
        """Return from how many bytes on a bucket with this parameter is full, if it is not the first of its kind."""
        if self._limit is not None:
            return self._limit
        return full_from(parameter.layout, self._policies[id(parameter)], parameter.grid.sizes)

    @property
    def transient_bytes(self) -> int:
        """The most bytes that a pass holds beside values and gradients as they are between steps."""

        def key(p: Parameter) -> tuple[Any, Cut]:
            return self._key(p), p.layout.cut_axes

        loads: list[tuple[tuple[int, ...], Load]] = []
        for group in in_order(self.parameters[::-1], key, largest, self._first, self.full_from):
            first = group[0]
            load = bucket_load(key(first), group, self._policies[id(first)], self.dtype)
            loads.append((self._chunks.get(id(first), ()), load))

        def reached(by: int) -> Iterable[Load]:
            return (load if by in chunks or not chunks else load._replace(transient=0) for chunks, load in loads)

        passes = {number for chunks, _ in loads for number in chunks} or {0}
        return max(transient_bytes(reached(number)) for number in passes)

    def loads(self) -> list[tuple[Parameter, Load]]:
        """Return the bytes of each gradient, as of a bucket of its own, in the order of a backward pass."""
        each = self.parameters[::-1]
        return [(p, bucket_load(self._key(p)[1:], [p], self._policies[id(p)], self.dtype)) for p in each]

    # ------------------------------------------------------------------ the backward pass
    def ready(self, parameter: Parameter, block: Block, layout: Layout, *, sync: bool = True) -> None:
        """Take a gradient whose last term has arrived; see `parlinalg.autograd.Reducer`."""
        if id(parameter) in self._arrived:  # an error broke the last pass off
            self._begin_again()
        self._arrived[id(parameter)] = parameter
        partial = self._partial(parameter, layout)
        seen = self._axes.get(id(parameter), ())
        if not set(partial) <= set(seen):
            self._axes[id(parameter)] = tuple(sorted(_union(seen, partial)))
            self._outdated = self._values is None
        slot = self._slots.get(id(parameter))
        if slot is None:
            self._keep(parameter, block, layout.with_partial(partial))
            return
        self._place(slot, block, partial)
        slot.bucket.missing -= 1
        if not (sync or not slot.bucket.policy.keeps):
            slot.hold(slot.partial)
        self._start(sync, complete_only=True)

    def no_more(self, parameters: Iterable[Parameter]) -> None:
        """Close parameters for this step: their buckets wait for no further gradients of them.

        Only what earlier passes within `no_sync` left of their gradients is still summed.  A bucket whose gradients are
        all reduced already is finished.
        """
        each = {id(p): p for p in parameters}
        self._finished = {b for b in self.buckets if b.scattered and all(id(s.parameter) in each for s in b.slots)}
        for p in each.values():
            slot, gatherer = self._slots.get(id(p)), p.storage.gatherer
            if slot is None or slot.bucket in self._finished or (gatherer is not None and gatherer.kept):
                continue
            if id(p) in self._arrived:  # an error broke the last pass off
                self._begin_again()
            self._arrived[id(p)] = p
            self._place(slot, None, ())
            slot.bucket.missing -= 1
        self._start(True, complete_only=True)

    def poll(self) -> None:
        """Progress pending communication: MPI progresses only within its calls."""
        for pending in (*self._pending, *self._second_sums):
            if not pending.handle.test():
                return

    def settle(self) -> None:
        """Reduce gradients that `no_sync` passes accumulated, when no synchronizing pass follows.  Collective."""
        gatherers = [p.storage.gatherer for p in self.parameters]
        kept = [each.kept for each in gatherers if each is not None and each.kept]
        for sums in {id(each): each for each in kept}.values():
            for node, terms in list(sums.values()):
                owner = node.owner() if node.owner is not None else None
                if owner is not None and owner.reducer is self:
                    del sums[node.age]
                    self.ready(owner, *terms.summed())
        self.finish()

    def finish(self, *, sync: bool = True) -> None:
        """Start the remaining buckets and wait for all; the backward pass calls this at its end.

        Gradients of parameters that were not reached are reduced as zeros.  Without `sync`, only the gradients that are
        accumulated in parts are reduced.
        """
        if sync and not self._slots:
            self._make_buckets(fill=True)
        for bucket in self.buckets:
            reached = bucket.missing < len(bucket.slots)
            if (reached or not bucket.scattered) if sync else (reached and not bucket.policy.keeps):
                for slot in bucket.slots:
                    if id(slot.parameter) not in self._arrived:
                        self._place(slot, None, ())
                bucket.missing = 0
        self._start(sync, complete_only=False)
        while self._pending:
            self._complete(self._pending.pop(0))
        for pending in self._second_sums:
            pending.handle.wait()
            self._settled(pending.bucket, pending.result)
        self._begin_again()
        if sync and self._outdated:
            self._make_buckets()

    def _begin_again(self) -> None:
        """Reset for another backward pass."""
        for pending in (*self._pending, *self._second_sums):
            pending.handle.wait()
        self._pending.clear()
        self._second_sums.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            bucket.pool.clear()
        self._started = 0
        self._finished.clear()
        self._arrived.clear()

    def _partial(self, parameter: Parameter, layout: Layout) -> Cut:
        """Return the axes over which a gradient is one of the terms of a sum."""
        always = self._policies[id(parameter)].always
        return tuple(a for a in _union(layout.partial, always) if parameter.grid.sizes[a] > 1)

    def _keep(self, parameter: Parameter, block: Block, layout: Layout) -> None:
        """Add a gradient to those that wait for the buckets to be made."""
        held, grid = parameter.grad, parameter.grid
        block = block.formed() if isinstance(block, DeferredGemm) else block
        if held is not None:
            both = GradientAccumulator(parameter.shape, parameter.layout, parameter.dtype, grid)
            both.add((held.block, held.layout), owned=True)
            both.add((block, layout), owned=False)
            block, layout = both.summed()
        parameter.grad = parameter.data.like(block, layout)

    def _place(self, slot: Slot, block: Block, partial: Cut) -> None:
        """Add a gradient, or None, to what the bucket has in its place, as terms of sums over the same axes."""
        p, coords = slot.parameter, slot.parameter.grid.coords
        holds, view = self._held(slot), slot.view
        both = _union(slot.partial, partial) if holds else partial
        if holds and any(coords.get(a) for a in both if a not in slot.partial):
            view[...] = 0  # a whole gradient counts once
        counts = block is not None and not any(coords.get(a) for a in both if a not in partial)
        if not holds:
            copy_or_add(block if counts else 0, view)
        elif counts:
            copy_or_add(block, view, add=True)
        slot.partial = both
        if not slot.bucket.transient:
            p.grad = None
        else:  # what is settled of it stays
            p.storage.grad = None

    def _held(self, slot: Slot) -> bool:
        """Return True if the bucket has a gradient of the parameter already; one that lies elsewhere moves there."""
        p, grad, bucket = slot.parameter, slot.parameter.grad, slot.bucket
        if grad is not None:
            if grad is not slot.held:
                slot.view[...] = grad.block
                slot.partial = self._partial(p, grad.layout)
            return True
        if bucket.transient or not bucket.scatter or p.storage.settled is None:
            return False
        view, part = slot.view.reshape(-1), slot.shard  # of the sum each rank has a part
        view[: part.start] = 0
        view[part.stop :] = 0
        slot.partial = bucket.scatter
        return True

    def _start(self, sync: bool, *, complete_only: bool) -> None:
        """Start the sums of buckets in their order, with `complete_only` to the first that lacks a gradient."""
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            if sync or not bucket.policy.keeps:
                if bucket.missing and complete_only and bucket not in self._finished:
                    return
                if not bucket.missing:
                    self._sum(bucket)
            self._started += 1

    def _sum(self, bucket: Bucket) -> None:
        """Start the sum of a bucket's gradients."""
        for slot in bucket.slots:
            bucket.axes = _union(bucket.axes, slot.partial)
        bucket.axes = (*bucket.scatter, *sorted(a for a in bucket.axes if a not in bucket.scatter))
        for slot in bucket.slots:
            if any(bucket.grid.coords.get(a) for a in bucket.axes if a not in slot.partial):
                slot.view[...] = 0
        if not bucket.axes or not bucket.grid.inside:
            self._settled(bucket, bucket.storage())
            return
        dtype = bucket.dtype if self.dtype is None else self.dtype
        if self.dtype is not None or bucket.scatter or by_terms(dtype):
            while len(self._pending) >= most_in_flight(dtype):
                self._complete(self._pending.pop(0))
        sent = got = bucket.storage() if dtype == bucket.dtype else bucket.storage().astype(dtype)
        if bucket.scatter:
            got = bucket.grid.backend.empty(len(bucket.own), sent.dtype)
            label_memory(got, "gradients")
            handle = bucket.comm.reduce_scatter(sent, got, bucket.lengths, wait=False)
            if sent is not bucket.data and bucket.transient:
                bucket.release()
        else:
            handle = bucket.grid.comm(bucket.axes).all_reduce(sent, wait=False)
        self._pending.append(Pending(bucket, handle, got))

    def _complete(self, pending: Pending) -> None:
        """Wait for a bucket's sum, and start what follows it."""
        pending.handle.wait()
        bucket = pending.bucket
        if bucket.scatter:
            if bucket.transient:
                bucket.release()
            rest = tuple(a for a in bucket.axes if a not in bucket.scatter)
            if rest:
                handle = bucket.grid.comm(rest).all_reduce(pending.result, wait=False)
                self._second_sums.append(Pending(bucket, handle, pending.result))
                return
        self._settled(bucket, pending.result)

    def _settled(self, bucket: Bucket, sums: Block) -> None:
        """Give the parameters the sums, or this rank's parts of them, as their gradients."""
        if not bucket.scatter:
            if sums is not bucket.data:
                bucket.data[...] = sums
            for slot in bucket.slots:
                slot.hold(())
            return
        own = bucket.own
        if not bucket.transient:
            bucket.mine = bucket.storage()[own.start : own.stop]
        elif bucket.mine is None:
            bucket.mine = bucket.grid.backend.empty(len(own), bucket.dtype)
            label_memory(bucket.mine, "gradients")
        for slot in bucket.slots:
            storage, part = slot.parameter.storage, slot.shard
            if not isinstance(storage, SharedStorage):
                continue
            at = slot.start + part.start - own.start if part else 0
            where = slice(at, at + len(part))
            if storage.mine is None:
                bucket.mine[where] = sums[where]
            else:
                storage.mine += sums[where].astype(bucket.dtype, copy=False)
            slot.held, storage.mine = None, bucket.mine[where]

    @property
    def _scatters(self) -> bool:
        return any(each.scatter for each in self._policies.values())

    def _key(self, p: Parameter) -> tuple[int, str, ReductionPolicy, Cut, tuple[int, ...]]:
        """Return the key that the parameters of a bucket have in common."""
        axes = p.layout.cut_axes if self._scatters else self._axes.get(id(p), ())
        return id(p.grid), p.dtype.str, self._policies[id(p)], axes, self._chunks.get(id(p), ())

    def _make_buckets(self, *, fill: bool = False) -> None:
        """Places for all gradients; those that have one move when the next is added to them, or, with `fill`, those
        that have arrived now, so that no more than a bucket's are there twice."""
        order = (*self._arrived.values(), *(p for p in reversed(self.parameters) if id(p) not in self._arrived))
        self._slots, self.buckets = {}, []
        pools: dict[tuple[int, str], list[Block]] = {}
        for group in in_order(order, self._key, largest, self._first, self.full_from):
            grid, dtype = group[0].grid, group[0].dtype
            axes = () if self._scatters else self._axes.get(id(group[0]), ())
            pool = pools.setdefault((id(grid), dtype.str), [])
            bucket, at = Bucket(grid, dtype, self._policies[id(group[0])], axes, pool=pool), 0
            for p in group:
                stop = at + int(p.block.size)
                slot = self._slots[id(p)] = Slot(p, bucket, at, stop, p.block.shape)
                bucket.slots.append(slot)
                at = stop
            bucket.missing = len(group)
            if self.dtype in (None, dtype):
                bucket.share()
            for slot in bucket.slots:
                if fill and id(slot.parameter) in self._arrived:
                    self._place(slot, None, ())
            self.buckets.append(bucket)
        self._outdated = False


def replaceable(reducer: Reducer | None) -> bool:
    """Return True if gradients come out the same when they are settled one by one: without ZeRO and the like."""
    if reducer is None:
        return True
    simple = isinstance(reducer, GradientReducer) and reducer.dtype is None
    return simple and all(isinstance(h, DataParallel | SequenceParallel) for h in reducer.handlers)  # type: ignore


def _union(first: Cut, second: Cut) -> Cut:
    """Return the axes of both, each once."""
    return tuple(dict.fromkeys((*first, *second)))
