"""Exchange of the parts of blocks that other ranks want, in bounded pieces: rectangles, or runs of elements."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import Backend
from parlinalg.comm import Comm, Handle
from parlinalg.comm.shared import shared_array

FEW = 16
"""Ranks of one node up to which what they exchange lies in shared memory."""
Block = Any  # an array of the grid's backend
Rect = tuple[range, ...]
Shape = tuple[int, ...]
Corner = tuple[Shape, Shape]  # offsets and sizes


def volume(rect: Rect) -> int:
    return math.prod(len(r) for r in rect)


def rect_at(offsets: Sequence[int], sizes: Sequence[int]) -> Rect:
    """Return the rectangle that begins at these indices and has these lengths, for each dim."""
    return tuple(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))


def rectangles(shape: Shape, start: int, stop: int) -> Iterator[Corner]:
    """Yield the elements `start` to `stop` of a flattened block as rectangles, in their order, each without gaps.

    >>> list(rectangles((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        for offsets, sizes in rectangles(shape[1:], start - first * row, stop - first * row):
            yield (first, *offsets), (1, *sizes)
        return
    whole = -(-start // row), stop // row
    if start % row:
        yield from _in_row(shape, first, start - first * row, row)
    if whole[1] > whole[0]:
        yield (whole[0], *(0,) * (len(shape) - 1)), (whole[1] - whole[0], *shape[1:])
    if stop % row:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Shape, i: int, start: int, stop: int) -> Iterator[Corner]:
    for offsets, sizes in rectangles(shape[1:], start, stop):
        yield (i, *offsets), (1, *sizes)


def piece_size(largest: int) -> int:
    """Return the most elements of a piece of a move whose largest block, of any rank, source or target, has so many.

    A move holds at most one piece that is sent and one that is received beside its source and its target.
    """
    return max(tunables.MOVE_BUFFER, -(-largest // tunables.MOVE_SHARE))


def meet(want: Rect, have: Rect) -> Rect:
    """Return the part of `want` (ranges of any positive step) inside `have` (ranges of step 1)."""
    return tuple(_meet(w, h) for w, h in zip(want, have, strict=True))


def _meet(want: range, have: range) -> range:
    first = max(0, -((want.start - have.start) // want.step))
    last = max(0, -((want.start - have.stop) // want.step))
    return want[first:last]


def local(part: Rect, block: Rect) -> tuple[slice, ...]:
    """Return the slices of `part` in the array of `block`; both ranges of a dim have steps that divide evenly."""
    return tuple(_local(p, b) for p, b in zip(part, block, strict=True))


def _local(part: range, block: range) -> slice:
    if not len(part):
        return slice(0, 0)
    start, step = (part.start - block.start) // block.step, part.step // block.step
    return slice(start, start + (len(part) - 1) * step + 1, step)


def exchange(
    block: Block,
    have: Rect,
    want: Rect,
    sends: Sequence[Rect],
    receives: Sequence[Rect],
    dtype: Any,
    comm: Comm,
    backend: Backend,
    largest: int,
    *,
    wait: bool = True,
    tag: int = 0,
) -> Generator[Handle, None, Block]:
    """Fill a new block of `want` from the blocks of the ranks of `comm`; a generator of handles that returns the block.

    sends[i] is the part of `have` that rank i gets, receives[i] the part of `want` that rank i sends.  `largest` is the
    elements of the largest block involved on any rank of `comm`: up to `tunables.MOVE_BUFFER` all goes in one
    all-to-all, above it pair by pair in pieces of at most `piece_size(largest)`, so that no more than source, target
    and two pieces are ever held.  Ranks of one node that wait for the end hand over smaller pieces in shared memory.
    """
    out, limit = backend.empty(tuple(len(r) for r in want), dtype), piece_size(largest)
    if comm.size == 1:
        out[local(receives[0], want)] = block[local(sends[0], have)]
        return out
    if largest <= tunables.MOVE_BUFFER:
        counts = [volume(r) for r in sends]
        send = backend.empty((sum(counts),), dtype)
        _pack(send, block, have, sends)
        get = [volume(r) for r in receives]
        got = backend.empty((sum(get),), dtype)
        handle = comm.all_to_all(send, counts, got, get, wait=wait)
        if not wait:
            yield handle
        start = 0
        for rect, n in zip(receives, get, strict=True):
            if n:
                out[local(rect, want)] = got[start : start + n].reshape(tuple(len(r) for r in rect))
            start += n
        return out
    me = comm.rank
    if volume(sends[me]):
        out[local(receives[me], want)] = block[local(sends[me], have)]
    if wait and backend.host_memory and comm.size <= FEW:
        piece = max(1, tunables.MOVE_COMMON // comm.size)
        with shared_array(comm, (2, comm.size, comm.size, piece), dtype) as memory:
            if memory is not None:
                _hand_over(memory, block, have, out, want, sends, receives, comm)
                return out
    for shift in range(1, comm.size):
        to, source = (me + shift) % comm.size, (me - shift) % comm.size
        outgoing, incoming = list(_split(sends[to], limit)), list(_split(receives[source], limit))
        for i in range(max(len(outgoing), len(incoming))):
            handles = []
            if i < len(incoming):
                got = backend.empty(tuple(len(r) for r in incoming[i]), dtype)
                handles.append(comm.receive(got, source, tag=tag, wait=False))
            if i < len(outgoing):
                sent = backend.empty(tuple(len(r) for r in outgoing[i]), dtype)
                sent[...] = block[local(outgoing[i], have)]
                handles.append(comm.send(sent, to, tag=tag, wait=False))
            for handle in handles:
                if wait:
                    handle.wait()
                else:
                    yield handle
            if i < len(incoming):
                out[local(incoming[i], want)] = got
    return out


def exchange_blocks(
    block: Block, haves: Sequence[Rect], wants: Sequence[Rect], comm: Comm, backend: Backend, *, wait: bool = True,
    tag: int = 0,
) -> Generator[Handle, None, Block]:  # fmt: skip
    """Fill a new block of this rank's part of `wants` from the blocks `haves` of the ranks of `comm`, as `exchange`.

    The blocks do not overlap; what ranks want may.
    """
    have, want = haves[comm.rank], wants[comm.rank]
    sends, receives = [meet(w, have) for w in wants], [meet(want, h) for h in haves]
    largest = max(map(volume, (*haves, *wants)))
    return (
        yield from exchange(
            block, have, want, sends, receives, block.dtype, comm, backend, largest, wait=wait, tag=tag
        )
    )  # fmt: skip


def _hand_over(
    memory: np.ndarray, block: Block, have: Rect, out: Block, want: Rect, sends: Sequence[Rect],
    receives: Sequence[Rect], comm: Comm,
) -> None:  # fmt: skip
    """Exchange all but this rank's own part through shared memory, [turn, from, to, piece], in pieces in the cache.

    What is written at one turn is read after a barrier, while the next turn's pieces are written beside it.
    """
    me, piece = comm.rank, memory.shape[-1]
    outgoing, incoming = (
        [[] if p == me else list(_split(rect, piece)) for p, rect in enumerate(rects)] for rects in (sends, receives)
    )
    for to, get in zip(outgoing, incoming, strict=True):
        if to:
            comm.count("send", 0, out.itemsize)
        if get:
            comm.count("receive", sum(map(volume, get)), out.itemsize)
    for turn in range(max(comm.share(max(map(len, outgoing)), others="alike"))):
        room = memory[turn % 2]
        for p, parts in enumerate(outgoing):
            for part in parts[turn : turn + 1]:
                _laid(room[me, p], part)[...] = block[local(part, have)]
        comm.barrier()
        for p, parts in enumerate(incoming):
            for part in parts[turn : turn + 1]:
                out[local(part, want)] = _laid(room[p, me], part)


def _laid(flat: np.ndarray, rect: Rect) -> np.ndarray:
    """Return the first elements of a flat array as those of a rectangle."""
    return flat[: volume(rect)].reshape(tuple(len(r) for r in rect))


def _pack(send: Block, block: Block, have: Rect, rects: Sequence[Rect]) -> None:
    start = 0
    for rect in rects:
        if n := volume(rect):
            send[start : start + n].reshape(tuple(len(r) for r in rect))[...] = block[local(rect, have)]
            start += n


def _split(rect: Rect, limit: int) -> Iterator[Rect]:
    """Cut a rectangle into parts of at most `limit` elements, alike for both sides.

    It is cut along its longest dims, and along the last one, in which elements lie together, only where it must be.
    """
    n = volume(rect)
    if n == 0:
        return
    if n <= limit:
        yield rect
        return
    last = len(rect) - 1
    dim = max(range(len(rect)), key=lambda d: (d < last and len(rect[d]) > 1, len(rect[d])))
    rows = max(1, len(rect[dim]) * limit // n)
    for start in range(0, len(rect[dim]), rows):
        yield from _split((*rect[:dim], rect[dim][start : start + rows], *rect[dim + 1 :]), limit)


@dataclass
class Runs:
    """Stretches of elements of an array, numbered in C order: all equally long, first to last.

    Attributes
    ----------
    starts : array of int
        Their first elements, rising.
    length : int
    """

    starts: np.ndarray
    length: int

    @classmethod
    def of(cls, rect: Rect, shape: Sequence[int]) -> Runs:
        """Return the stretches that a rectangle of an array of `shape` consists of."""
        if not volume(rect):
            return cls(np.zeros(0, np.int64), 0)
        strides = [*accumulate(reversed(shape[1:]), int.__mul__, initial=1)][::-1] if shape else []
        outer, length = len(rect), 1
        while outer:  # dims behind the last cut one lie in one stretch
            outer -= 1
            length *= len(rect[outer])
            if len(rect[outer]) < shape[outer]:
                break
        starts = np.zeros((), np.int64)
        for d, (r, stride) in enumerate(zip(rect, strides, strict=True)):
            line = np.asarray(r, np.int64)[: len(r) if d < outer else 1]
            starts = starts[..., None] + line * stride
        return cls(starts.reshape(-1), length)

    def meet(self, other: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the stretches in both: where they start among the elements of this one, of the other, and lengths."""
        first = np.searchsorted(other.starts, self.starts - other.length, side="right")
        counts = np.searchsorted(other.starts, self.starts + self.length, side="left") - first
        mine = np.repeat(np.arange(len(self.starts)), counts)
        theirs = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        a, b = self.starts[mine], other.starts[theirs]
        start = np.maximum(a, b)
        lengths = np.minimum(a + self.length, b + other.length) - start
        return mine * self.length + start - a, theirs * other.length + start - b, lengths


class _Picked:
    """Elements of a flat block: stretches, in order."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.starts, self.stops = starts, np.cumsum(lengths)
        self.begins = self.stops - lengths
        self.size = int(self.stops[-1]) if len(lengths) else 0

    def index(self, start: int, stop: int) -> Any:
        """Return the index of the elements from number `start` to `stop`: a slice where they lie together."""
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.stops, stop, side="left"))
        if first == last:
            at = int(self.starts[first]) + start - int(self.begins[first])
            return slice(at, at + stop - start)
        starts, begins = self.starts[first : last + 1], self.begins[first : last + 1]
        counts = np.minimum(self.stops[first : last + 1], stop) - np.maximum(begins, start)
        return np.repeat(starts - begins, counts) + np.arange(start, stop)


def exchange_runs(flat: Block, haves: Sequence[Runs], wants: Sequence[Runs], comm: Comm, backend: Backend) -> Block:
    """Return the elements of this rank's part of `wants` in order, from the ranks of `comm`, which have `haves`.

    `flat` are this rank's elements.  Beside its source and target a rank holds two pieces, and for elements in short
    stretches their indices.
    """
    me = comm.rank
    have, want = haves[me], wants[me]
    out = backend.empty((len(want.starts) * want.length,), flat.dtype)
    largest = max(len(r.starts) * r.length for r in (*haves, *wants))
    limit = piece_size(largest)

    def index(part: _Picked, start: int) -> Any:
        found = part.index(start, min(part.size, start + limit))
        return found if isinstance(found, slice) or backend.host_memory else backend.from_host(found)

    for shift in range(comm.size):
        to, source = (me + shift) % comm.size, (me - shift) % comm.size
        at, _, lengths = have.meet(wants[to])
        outgoing = _Picked(at, lengths)
        at, _, lengths = want.meet(haves[source])
        incoming = _Picked(at, lengths)
        for start in range(0, max(outgoing.size, incoming.size), limit):
            handles, got = [], None
            if shift and start < incoming.size:
                got = backend.empty((min(limit, incoming.size - start),), flat.dtype)
                handles.append(comm.receive(got, source, wait=False))
            if start < outgoing.size:
                sent = flat[index(outgoing, start)]
                if shift:
                    handles.append(comm.send(backend.xp.ascontiguousarray(sent), to, wait=False))
                else:
                    got = sent
            for handle in handles:
                handle.wait()
            if got is not None:
                out[index(incoming, start)] = got
    return out
