"""Buckets: gradients that lie side by side and are summed by one call; of sharded parameters the values too."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter
from parlinalg.autograd.gradients import most_bytes
from parlinalg.backend.shapes import label_memory
from parlinalg.comm import Comm
from parlinalg.comm.base import by_terms, reduction_work
from parlinalg.comm.shared import terms
from parlinalg.errors import ConfigError
from parlinalg.exchange import volume
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, piece, pieces
from parlinalg.parallel.handlers import ReductionPolicy

Block = Any
T = TypeVar("T")
MIB = 1 << 20
FIRST_BUCKET, BUCKET = MIB, 25 * MIB  # bytes from which a bucket is full, the first one early
SHARE, MOST_SHARES = MIB, 256
"""Bytes in a bucket for each of the ranks that sum it, and of how many of them at the most: a ring of p ranks takes the
latency of p - 1 messages for a bucket, whatever its size."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(eq=False)
class Slot:
    """A parameter's place in a bucket: elements `start` to `stop`.

    Attributes
    ----------
    shape : tuple of int
        The shape of the parameter's block.
    held : DistArray or None
        The parameter's `grad`, as long as that is the view into the bucket's data.
    partial : tuple of str
        Axes over which what the bucket's data has here is one of the terms of a sum.
    """

    parameter: Parameter
    bucket: Bucket
    start: int
    stop: int
    shape: tuple[int, ...]
    held: DistArray | None = None
    partial: Cut = ()

    @property
    def view(self) -> Block:
        """The gradient's elements in the bucket's data, which is made for it if there is none."""
        return self.bucket.storage()[self.start : self.stop].reshape(self.shape)

    @property
    def shard(self) -> range:
        """The elements of the flattened block that this rank's part of the bucket has."""
        own, most = self.bucket.own, self.stop - self.start
        return range(min(max(own.start - self.start, 0), most), min(max(own.stop - self.start, 0), most))

    def hold(self, partial: Cut) -> None:
        """Make the data the parameter's gradient, a term of sums over these axes."""
        p = self.parameter
        self.partial = partial
        p.grad = self.held = DistArray(self.view, p.shape, p.layout.with_partial(partial), p.grid)


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype that are summed together, in a flat array.

    Attributes
    ----------
    policy : ReductionPolicy
    axes : tuple of str
        Those over which the gradients are, or have been, partial.
    data : array or None
        The whole gradients; with ZeRO-2 only while they are in flight.
    mine : array or None
        The sums of this rank's part, where gradients are reduce-scattered.
    values : array or None
        The parameters' values, where gradients are reduce-scattered.
    missing : int
        How many gradients have not arrived in this pass.
    gathering : bool
        True while the values that other ranks have updated are on their way.
    """

    grid: Grid
    dtype: np.dtype[Any]
    policy: ReductionPolicy
    axes: Cut
    data: Block = None
    mine: Block = None
    values: Block = None
    slots: list[Slot] = field(default_factory=list)
    missing: int = 0
    gathering: bool = False
    pool: list[Block] = field(default_factory=list)
    """Arrays of this dtype that are not in use, as long as any bucket's data at least."""
    _starts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    @property
    def scatter(self) -> Cut:
        """The axes over which the sums are distributed."""
        return self.policy.scatter

    @property
    def comm(self) -> Comm:
        """The ranks that share the sums."""
        return self.grid.comm(self.scatter)

    @property
    def lengths(self) -> list[int]:
        """The elements of each rank's part."""
        return pieces(self.size, self.comm.size)

    @property
    def own(self) -> range:
        """The elements of this rank's part."""
        return piece(self.size, self.comm.size, self.comm.rank)

    @property
    def transient(self) -> bool:
        """True if whole gradients exist only until their sum is formed, as with ZeRO-2 and ZeRO-3."""
        return bool(self.scatter) and self.policy.stage >= 2

    @property
    def scattered(self) -> bool:
        """True if all of the parameters' gradients so far are in the ranks' parts, summed."""
        settled = all(slot.parameter.storage.settled is not None for slot in self.slots)
        return self.transient and settled and not self.policy.keeps

    def starts(self, coords: Mapping[str, int]) -> list[int]:
        """Return where the parameters begin in the bucket of the rank at these coordinates, and where the last ends.

        All ranks have the same parameters in it, but blocks of them that may differ in size.
        """
        sizes, of = self.grid.sizes, [slot.parameter for slot in self.slots]
        axes = dict.fromkeys(axis for p in of for axis in p.layout.cut_axes)
        key = tuple(coords[axis] for axis in axes)
        if key not in self._starts:
            lengths = (volume(p.layout.block(p.shape, sizes, coords)) for p in of)
            self._starts[key] = list(accumulate(lengths, initial=0))
        return self._starts[key]

    def storage(self) -> Block:
        """Return the data; made if there is none."""
        if self.data is None:
            spare = self.pool.pop() if self.pool else None
            if spare is None or spare.size < self.size:
                spare = self.grid.backend.empty(self.size, self.dtype)
            label_memory(spare, "gradients")
            self.data = spare[: self.size]
        return self.data

    def share(self) -> None:
        """Put the data into shared memory, if all that sum it are on one node.  Collective."""
        if self.axes and not self.scatter and self.grid.inside and self.grid.backend.host_memory:
            self.data = terms(self.grid.comm(self.axes), self.size, self.dtype)

    def release(self) -> None:
        """Leave the data to other buckets."""
        if self.data is not None:
            self.pool.append(self.data if self.data.base is None else self.data.base)
            self.data = None


def largest(parameter: Any, layout: Layout | None = None) -> int:
    """Return the bytes of the largest block of a parameter, in another layout if given: the same on all ranks."""
    return most_bytes(layout or parameter.layout, parameter.shape, parameter.grid.sizes, parameter.dtype.itemsize)


def floats(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that gradients travel in; raise a ConfigError if it is not one of `DTYPES`."""
    try:
        found = dtype_named(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found.name not in DTYPES or not found.isnative:
        raise ConfigError(f"gradients travel in {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, not {dtype!r}")
    return found


def in_order(
    items: Sequence[T], key: Callable[[T], Hashable], nbytes: Callable[[T], int], first: int, limit: Callable[[T], int]
) -> Iterator[list[T]]:
    """Yield the items of each bucket: those with one key, in their order, until they have so many bytes.  Pure.

    The first bucket of each key is full from `first` bytes on, the others from `limit` of their items, which is the
    same for all of a key.  Buckets come in the order in which their last items do.
    """
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    bytes_in: dict[Hashable, int] = {}
    found: list[list[int]] = []
    for i, item in enumerate(items):
        k = key(item)
        open_.setdefault(k, []).append(i)
        bytes_in[k] = bytes_in.get(k, 0) + nbytes(item)
        if bytes_in[k] >= (limit(item) if filled.get(k) else first):
            found.append(open_.pop(k))
            filled[k] = filled.get(k, 0) + 1
            bytes_in[k] = 0
    found.extend(open_.values())
    for bucket in sorted(found, key=lambda b: b[-1]):
        yield [items[i] for i in bucket]


#: Buckets at a time whose sums take memory of their own: when another starts the oldest is waited for.  All ranks do so
#: at the same points, so that what follows it starts in one order too.
MOST_IN_FLIGHT = 2


def most_in_flight(dtype: np.dtype[Any]) -> int:
    """Return how many buckets whose sums take memory are in flight, once one starts that travels in this dtype.

    One in 16 bits, of which the ranks exchange their terms: these take as much memory as the bucket.
    """
    return 1 if by_terms(dtype) else MOST_IN_FLIGHT


class Load(NamedTuple):
    """Bytes of a bucket.

    Attributes
    ----------
    kind : hashable
        Of each kind one bucket is filling at a time.
    kept : int
        Whole gradients that stay from the first microbatch to the last, where between steps there is a part.
    transient : int
        Whole gradients that stay until their sum is formed.
    cast : bool
        Whether they are let go as soon as that starts.
    work : int
        What the sum is formed in: the cast, the terms of 16-bit floats, the part that arrives.
    after : int
        That part, where it stays to the end of the pass to be summed over other axes.
    nbytes : int
        The gradients, wherever they stay.
    most : int
        `most_in_flight` of the dtype that they travel in.
    full : int
        From how many bytes on a bucket of this kind is full, if it is not the first.
    """

    kind: Hashable
    kept: int = 0
    transient: int = 0
    cast: bool = False
    work: int = 0
    after: int = 0
    nbytes: int = 0
    most: int = MOST_IN_FLIGHT
    full: int = BUCKET


def summed(layout: Layout, policy: ReductionPolicy, sizes: Mapping[str, int]) -> list[str]:
    """Return the axes over which the gradient of a parameter in this layout may be a sum: those that do not cut it."""
    return [a for a, size in sizes.items() if size > 1 and (a in policy.scatter or layout.where(a) is None)]


def full_from(layout: Layout, policy: ReductionPolicy, sizes: Mapping[str, int]) -> int:
    """Return from how many bytes on a bucket of parameters in this layout is full, if it is not the first.  Pure.

    Examples
    --------
    >>> from parlinalg.parallel.handlers import policy_of
    >>> sizes = {"data": 128, "tensor": 8}
    >>> cut, whole = Layout(None, "tensor"), Layout(None, None)
    >>> [full_from(each, policy_of((), "w", each, sizes), sizes) // MIB for each in (cut, whole)]
    [128, 256]
    """
    ranks = math.prod(sizes[a] for a in summed(layout, policy, sizes))
    return max(BUCKET, min(ranks, MOST_SHARES) * SHARE)


def bucket_load(
    kind: Hashable, group: Sequence[Parameter], policy: ReductionPolicy, travels: np.dtype[Any] | None
) -> Load:
    """Return the bytes of a bucket of parameters whose gradients travel in a dtype, by default their own."""
    first, n = group[0], sum(int(p.block.size) for p in group)
    sizes, scatter = first.grid.sizes, policy.scatter
    others = [a for a in summed(first.layout, policy, sizes) if a not in scatter]
    nbytes, full = n * first.dtype.itemsize, full_from(first.layout, policy, sizes)
    if not scatter and not others:
        return Load(kind, nbytes=nbytes, full=full)
    dtype = first.dtype if travels is None else travels
    cast, most = dtype != first.dtype, most_in_flight(dtype)
    if not scatter:
        work = dtype.itemsize * (cast * n + reduction_work(n, dtype))
        return Load(kind, work=work, nbytes=nbytes, most=most, full=full)
    whole = nbytes if policy.stage >= 2 else 0
    part = dtype.itemsize * -(-n // math.prod(sizes[a] for a in scatter))
    work = dtype.itemsize * (cast * n + reduction_work(n, dtype, scatter=True)) + (0 if others else part)
    kept, transient = (whole, 0) if policy.keeps else (0, whole)
    return Load(kind, kept, transient, cast, work, part if others else 0, nbytes, most, full)


def transient_bytes(loads: Iterable[Load]) -> int:
    """Return the most bytes that a pass takes for buckets that are filling, in flight, and kept.

    >>> four = [Load("weights", transient=10, work=5)] * 4
    >>> transient_bytes(four), transient_bytes([one._replace(cast=True) for one in four]), transient_bytes(four[:1])
    (40, 20, 15)
    """
    each = list(loads)
    most = max((one.most for one in each), default=0)
    filling = len({one.kind for one in each if one.transient}) + most * any(not one.cast for one in each)
    transient = sorted((one.transient for one in each), reverse=True)[:filling]
    work = sorted((one.work for one in each), reverse=True)[:most]
    return sum(transient) + sum(work) + sum(one.kept + one.after for one in each)


def bytes_in_buckets(
    layers: Sequence[Sequence[Load]], first: int = FIRST_BUCKET, limit: int | None = None
) -> list[int]:
    """Return the most bytes of gradients in buckets, and of their sums, while those of each layer arrive.  Pure.

    Parameters
    ----------
    layers : sequence of sequence of Load
        In the order of the backward pass, each gradient's, whose sums are formed in this pass.
    first, limit : int
        From how many bytes on the first bucket of a kind is full, and the others, by default from those of the loads.

    Examples
    --------
    >>> layer = [Load("weights", transient=10, work=5, nbytes=10)] * 2
    >>> bytes_in_buckets([layer]), bytes_in_buckets([layer] * 3), bytes_in_buckets([layer] * 3, 10, 10)
    ([30], [60, 60, 90], [30, 40, 40])
    """
    arriving = [(i, load) for i, loads in enumerate(layers) for load in loads]
    order = list(range(len(arriving)))
    each = [load for _, load in arriving]
    full = [load.full if limit is None else limit for load in each]
    groups = list(in_order(order, lambda n: each[n].kind, lambda n: each[n].nbytes, first, full.__getitem__))
    bucket_of = {n: b for b, group in enumerate(groups) for n in group}
    sizes = [sum(arriving[n][1].transient for n in group) for group in groups]
    work = [sum(arriving[n][1].work for n in group) for group in groups]
    missing = [len(group) for group in groups]
    most, held, started = [0] * len(layers), 0, 0
    storage: dict[int, int] = {}
    pool: list[int] = []
    pending: list[int] = []

    def complete(b: int) -> int:
        if b in storage:
            pool.append(storage.pop(b))
        return work[b]

    for n in order:
        (i, load), b = arriving[n], bucket_of[n]
        if b not in storage and missing[b] == len(groups[b]):
            spare = pool.pop() if pool else 0
            storage[b] = max(spare, sizes[b])
            held += storage[b] - spare
        missing[b] -= 1
        while started < len(groups) and not missing[started]:
            while len(pending) >= load.most:
                held -= complete(pending.pop(0))
            held += work[started]
            pending.append(started)
            if load.cast:
                pool.append(storage.pop(started))
            started += 1
        most[i] = max(most[i], held)
    return most
