"""Shared memory of the ranks of a communicator, where they are on one node.

What a rank writes there the others read in place: a gathered block is written once, not once a rank, and the terms of a
sum are added where they lie.  What is shared for a moment is kept with the communicator and used again, because new
pages cost as much as copies; what stays belongs to who asked for it.  It is an unlinked file in memory whose pages are
reserved before use, so that too little of it (containers often allow 64 MB) means None here and not a signal later.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import namespace
from parlinalg.backend.shapes import ShapeArray
from parlinalg.comm.base import DONE, Comm, Handle, by_terms
from parlinalg.comm.imagined import ImaginedComm

FOLDER = "/dev/shm"
KEPT = 1 << 28
"""The most bytes of a rank's share of an array that lasted which are kept for the next one."""
SMALL = 256
"""Elements of sums below which no shared memory is made for them."""
ORDERED = platform.machine() in ("x86_64", "AMD64")
"""True if other cores see writes in the order in which a core makes them."""


@dataclass
class SharedMemory:
    """The shared memory of one communicator."""

    memory: mmap.mmap | ImaginedMemory | None = None
    refused: float = math.inf
    """The least number of bytes that could not be had."""
    in_use: bool = field(default=False)
    crowded: bool | None = None
    """True if ranks outnumber cores on all ranks' word; None before they are asked."""
    kept: mmap.mmap | ImaginedMemory | None = None
    """The memory of the last array that lasted, for the next one."""
    lasting: Any = None
    """A weak reference to that array, which its views hold."""
    turn: int = 0
    """The number of times that the ranks have met by the counters at the start of the memory (`meet`)."""


class ImaginedMemory:
    """So many bytes that imagined ranks share, of which this rank counts its part as its own."""

    def __init__(self, comm: ImaginedComm, size: int) -> None:
        self.size, self.device = size, comm.device
        self.own = ShapeArray(comm.device, -(-size // (4 * comm.size)), np.float32)

    def __len__(self) -> int:
        return self.size


def _array(memory: mmap.mmap | ImaginedMemory, dtype: Any, n: int, start: int = 0) -> Any:
    """Return n elements of shared memory, which begin at byte number `start`."""
    if isinstance(memory, ImaginedMemory):
        return ShapeArray(memory.device, n, dtype, counted=False)
    return np.frombuffer(memory, dtype, n, start)


@contextmanager
def shared_array(comm: Comm, shape: tuple[int, ...], dtype: Any) -> Iterator[Any]:
    """Provide an array that every rank of `comm` sees, within a `with` block; None where there is no room for it.

    Collective: all ranks ask for the same shape.  Its elements are whatever was there before; after writing, a barrier
    makes them visible.  No rank may write before all have entered, which entering waits for, nor keep a view of it.
    """
    held = _held(comm)
    size, head = math.prod(shape) * np.dtype(dtype).itemsize, 8 * Meeting.SPREAD * comm.size
    if held is None or held.in_use or not can_share(comm, size) or size >= held.refused:
        yield None
        return
    if held.memory is None or len(held.memory) < head + size:
        held.memory, held.turn = None, 0
        held.memory = _made(comm, head + size, head + size if comm.rank == 0 else 0)
        if held.memory is None:
            held.refused = size
            yield None
            return
        if isinstance(held.memory, mmap.mmap):
            _crowded(comm)  # which is asked once, and known in the tasks that follow
    else:
        meet(comm)  # the others may still read what was there
    held.in_use = True
    try:
        yield _array(held.memory, dtype, math.prod(shape), head).reshape(shape)
    finally:
        held.in_use = False


def meet(comm: Comm) -> None:
    """Return when all ranks of a communicator that has shared memory have called it.

    Where ranks outnumber cores, by counters in that memory: a rank that waits looks at them and yields its core, while
    the rounds of messages of MPI's barrier need a turn each.
    """
    held = comm.shared
    if not (ORDERED and held is not None and isinstance(held.memory, mmap.mmap) and _crowded(comm)):
        comm.barrier()
        return
    held.turn += 1
    counters = memoryview(held.memory)[: 8 * comm.size * Meeting.SPREAD].cast("q")[:: Meeting.SPREAD]
    counters[comm.rank] = turn = held.turn
    comm.attend(lambda: min(counters) >= turn)


class Meeting:
    """Barriers of ranks that outnumber their cores, by counters in shared memory; by MPI where there is none.

    A rank that waits looks at the counters and yields its core, while MPI's rounds of messages need a turn each.

    Parameters
    ----------
    counters : array of int64, at least ``SPREAD * comm.size``, or None
        Shared memory of the ranks, with any values.  Collective: all wait for each other.
    """

    SPREAD = 8
    """Counters from one rank's to the next: they lie on lines of their own."""

    def __init__(self, comm: Comm, counters: Any) -> None:
        self.comm, self._turn = comm, 0
        self._counters: Any = None
        if counters is not None and ORDERED and _crowded(comm):
            counters[comm.rank * self.SPREAD] = 0
            self._counters = memoryview(counters)[: comm.size * self.SPREAD : self.SPREAD]
            meet(comm)

    def wait(self) -> None:
        """Return when all ranks have called it."""
        if self._counters is None:
            self.comm.barrier()
            return
        self._turn += 1
        self._counters[self.comm.rank] = self._turn
        self.comm.attend(self._here)

    def _here(self) -> bool:
        return min(self._counters) >= self._turn


class Steps:
    """Counters of the steps that each rank has made in a task, those of `meet`.

    No rank waits for all of them: each looks at those whose steps it needs.

    Parameters
    ----------
    comm : Comm
        Ranks that have shared memory in use, on a machine that is `ORDERED`.
    last : int
        The number of steps of the task, the same on all ranks, which all of them make.
    """

    def __init__(self, comm: Comm, last: int) -> None:
        held = comm.shared
        assert held is not None, "there is shared memory"
        assert isinstance(held.memory, mmap.mmap), "its ranks are not imagined"
        self.comm, self._base = comm, held.turn
        held.turn += last
        self._counters = memoryview(held.memory)[: 8 * comm.size * Meeting.SPREAD].cast("q")[:: Meeting.SPREAD]

    def made(self, steps: int) -> None:
        """Tell that this rank has made so many steps, and what it wrote before is there."""
        self._counters[self.comm.rank] = self._base + steps

    def there(self, ranks: Sequence[int], steps: int) -> bool:
        """Return True if these ranks have made so many steps."""
        return all(self._counters[p] >= self._base + steps for p in ranks)

    def wait(self, ranks: Sequence[int], steps: int, seldom: bool = False) -> None:
        """Return when these ranks have made so many steps; `seldom` is that of `Comm.attend`."""
        self.comm.attend(lambda: self.there(ranks, steps), seldom)


class Passing:
    """Blocks that ranks of a communicator write one after the other, each for all, in places that are used in turn.

    A rank waits for the one that writes, and that one for those who may still read what was in its place: in no case
    do all wait for all.  Counters in shared memory tell how far each rank is; without them all meet at every block.

    Parameters
    ----------
    counters : array of int64, at least ``Meeting.SPREAD * comm.size``
        Shared memory of the ranks, with any values.  Collective: all wait for each other.
    places : int
        The number of places, 3 or more: the third block after one may be written once it has been read by all.
    seldom : bool
        This rank writes no blocks, and looks for them seldom.
    """

    def __init__(self, comm: Comm, counters: Any, places: int, seldom: bool = False) -> None:
        self.comm, self._places, self._seldom = comm, places, seldom
        self._counters: Any = None
        if ORDERED:
            counters[comm.rank * Meeting.SPREAD] = 0
            self._counters = memoryview(counters)[: comm.size * Meeting.SPREAD : Meeting.SPREAD]
            meet(comm)

    def room(self, number: int, mine: bool) -> None:
        """Return when this rank may write a block, if it is its own, in the place number % places.

        All ranks call it for all blocks, in order.  A rank that passes a block on has read all but the one before it.
        """
        if self._counters is not None:
            least = number - self._places + 3
            self.comm.attend(lambda: not mine or min(self._counters) >= least)

    def passed(self, number: int, root: int) -> Handle:
        """Tell that this rank is at a block, which it has written if it is `root`; the handle waits for the block."""
        if self._counters is None:
            return self.comm.barrier_of("broadcast")  # type: ignore[attr-defined]
        self._counters[self.comm.rank] = number + 1
        return _Passed(self.comm, lambda: self._counters[root] > number, self._seldom)


class _Passed(Handle):
    """A block that another rank writes."""

    __slots__ = ("_comm", "_here", "_seldom", "_waited")

    def __init__(self, comm: Comm, here: Callable[[], bool], seldom: bool) -> None:
        self._comm, self._here, self._seldom, self._waited = comm, here, seldom, False

    def wait(self) -> None:
        if not self._waited:
            self._comm.attend(self._here, self._seldom)
            self._waited = True

    def test(self) -> bool:
        return self._here()


class SharedCollectives:
    """All-gathers, broadcasts and all-reduces of a communicator, in its shared memory where there is some.

    Gathered rows are valid until the next call: once all have come to that, the call after it may write over them.

    Parameters
    ----------
    comm : Comm
    memory : array [2, comm.size, most] or None
        Room for `most` elements of each rank, of which a sum may have no more; gathered rows share it.
    counters : array of int64, optional
        Shared memory of a `Meeting`.
    """

    def __init__(self, comm: Comm, memory: Any, counters: Any = None) -> None:
        self.comm, self._memory, self._turn = comm, memory, 0
        self._meeting = Meeting(comm, counters)

    def _next(self) -> Any:
        self._turn = 1 - self._turn
        return self._memory[self._turn]

    def all_gather(self, mine: Any, counts: Sequence[int]) -> Any:
        """Return the rows of all ranks, one rank's after the other's; counts[i] rows are rank i's.  Collective."""
        comm, (rows, width), total, xp = self.comm, mine.shape, sum(counts), namespace(mine)
        if comm.size == 1:
            return xp.ascontiguousarray(mine)
        if self._memory is None or total * width > self._memory[0].size:
            out = xp.empty((total, width), mine.dtype)
            comm.all_gather(xp.ascontiguousarray(mine), out, [n * width for n in counts])
            return out
        whole: np.ndarray = self._next().reshape(-1)[: total * width].reshape(total, width)
        before = sum(counts[: comm.rank])
        whole[before : before + rows] = mine
        comm.count("all_gather", (total - rows) * width, mine.itemsize)
        self._meeting.wait()
        return whole

    def all_gather_in_turn(
        self, first: Any, counts: Sequence[int], then: Any, later: Sequence[int], use: Callable[[Any], Any],
        at_once: bool,
    ) -> tuple[Any, Callable[[], Any]]:  # fmt: skip
        """Return what `all_gather` does of `first`, and a function that returns what `use` makes of that of `then`.

        The second gather begins in that function, or here, `at_once` or if the first has no elements.  In shared memory
        ranks meet once for both.  Collective, and so may be the function.
        """
        comm, xp, early = self.comm, namespace(first), sum(counts) * first.shape[1]
        shape, sizes = (sum(later), then.shape[1]), [n * then.shape[1] for n in later]
        both = early + sum(sizes)
        if self._memory is None or both > self._memory[0].size:
            gathered = self.all_gather(first, counts) if early else xp.empty((sum(counts), first.shape[1]), first.dtype)
            rest, mine, needed = xp.empty(shape, then.dtype), xp.ascontiguousarray(then), both > early or not early

            def begun(wait: bool) -> Handle:
                return comm.all_gather(mine, rest, sizes, wait=wait) if needed else DONE

            handle = begun(wait=False) if at_once or not early else None

            def finish() -> Any:
                (begun(wait=True) if handle is None else handle).wait()
                return use(rest)

            return gathered, finish
        area = self._next().reshape(-1)
        gathered, rest = area[:early].reshape(sum(counts), first.shape[1]), area[early:both].reshape(shape)
        for mine, each, whole in (first, counts, gathered), (then, later, rest):
            before = sum(each[: comm.rank])
            whole[before : before + len(mine)] = mine
            if whole.size or (whole is rest and not early):
                comm.count("all_gather", whole.size - mine.size, mine.itemsize)
        self._meeting.wait()
        used = use(rest)  # the rows do not stay
        return gathered, lambda: used

    def broadcast(self, mine: Any, root: int) -> Any:
        """Return the array of rank `root`, in the arrays that all ranks give, which are overwritten.  Collective."""
        comm = self.comm
        if self._memory is None or mine.size > self._memory[0].size or comm.size == 1:
            comm.broadcast(mine, root)
            return mine
        given = self._next().reshape(-1)[: mine.size].reshape(mine.shape)
        if comm.rank == root:
            given[...] = mine
        comm.count("broadcast", mine.size if comm.rank != root else 0, mine.itemsize)
        self._meeting.wait()
        if comm.rank != root:
            mine[...] = given
        return mine

    def proposals(self, mine: Any, offer: Any) -> tuple[Any, Callable[[int], Any]]:
        """Return the rows of all ranks, one each, and a function from a rank to the array that it offers.

        In shared memory ranks meet once for both.  Offers are arrays of one shape; this rank's is overwritten.
        Collective, and so is the function, which is to be called before the next collective.
        """
        comm, width, end = self.comm, mine.size, mine.size + offer.size
        if self._memory is None or end > self._memory.shape[2] or comm.size == 1:
            return self.all_gather(mine, [1] * comm.size), lambda root: self.broadcast(offer, root)
        areas = self._next()
        areas[comm.rank, :width], areas[comm.rank, width:end] = mine[0], offer
        comm.count("all_gather", (comm.size - 1) * width, mine.itemsize)
        self._meeting.wait()

        def offered(root: int) -> Any:
            comm.count("broadcast", offer.size if comm.rank != root else 0, offer.itemsize)
            if comm.rank != root:
                offer[...] = areas[root, width:end]
            return offer

        return areas[:, :width], offered

    def all_reduce(self, term: Any) -> Any:
        """Return the sum of the ranks' terms, which it may replace.  Collective."""
        comm = self.comm
        if self._memory is None or term.size > self._memory.shape[2]:
            term = namespace(term).ascontiguousarray(term)
            comm.all_reduce(term)
            return term
        terms = self._next()[:, : term.size].reshape(comm.size, *term.shape)
        terms[comm.rank] = term
        comm.count("all_reduce", comm.all_reduce_words(term.size), term.itemsize)
        self._meeting.wait()
        found: np.ndarray = terms[0] + terms[1]
        for each in terms[2:]:
            found += each
        return found


@contextmanager
def shared_collectives(comm: Comm, most: int, dtype: Any) -> Iterator[SharedCollectives]:
    """Provide collectives in shared memory for at most `most` elements a rank, within a `with` block.  Collective."""
    if most < SMALL:
        yield SharedCollectives(comm, None)
        return
    most = max(most, -(-tunables.SHARED_BYTES // (2 * comm.size * np.dtype(dtype).itemsize)))  # else there is none
    numbers = Meeting.SPREAD * comm.size
    size = 2 * -(-2 * comm.size * most * np.dtype(dtype).itemsize // 16)
    with shared_array(comm, (size + numbers,), np.int64) as memory:
        if memory is None:
            yield SharedCollectives(comm, None)
            return
        room = memory[:size].view(dtype)[: 2 * comm.size * most].reshape(2, comm.size, most)
        yield SharedCollectives(comm, room, memory[size:])


def terms(comm: Comm, size: int, dtype: Any) -> Any:
    """Return an array of so many elements that `comm.all_reduce` sums in place: the others see it too.

    Collective: all ranks ask for the same, and get each its own; None on all where it cannot be had.  Its elements are
    arbitrary.  The memory lasts as long as it, or a view of it, on any rank.  Not for 16-bit floats, whose sums are
    formed in 32.
    """
    own = size * np.dtype(dtype).itemsize
    if not can_share(comm, own) or by_terms(np.dtype(dtype)):
        return None
    memory = _made(comm, comm.size * own, own)
    if memory is None:
        return None
    whole = _array(memory, dtype, comm.size * size)
    comm.terms[:] = [*(ref for ref in comm.terms if ref() is not None), weakref.ref(whole)]
    return whole.reshape(comm.size, size)[comm.rank]


def lasting_array(comm: Comm, size: int, dtype: Any, keep: bool = True) -> Any:
    """Return an array of so many elements that every rank of `comm` sees; None on all where it cannot be had.

    Collective: all ranks ask for the same.  Its elements are arbitrary.  It is its ranks' as long as one of them has it
    or a view of it; then the next one may get the same memory, up to `KEPT`, since new pages cost as much as copies.
    Without `keep` it is freed, and no memory of an earlier one is taken.
    """
    held, own = _held(comm), -(-size * np.dtype(dtype).itemsize // comm.size)
    if held is None or not can_share(comm, own * comm.size):
        return None
    if not keep:
        memory = _made(comm, own * comm.size, own)
        return None if memory is None else _array(memory, dtype, size)
    free = held.kept is not None and held.lasting() is None and len(held.kept) >= own * comm.size
    memory = held.kept
    if not all(comm.share(free, others="alike")):
        held.kept = memory = None
        memory = _made(comm, own * comm.size, own)
    if memory is None:
        return None
    held.kept = memory if own <= KEPT else None
    found = _array(memory, dtype, size)
    held.lasting = weakref.ref(found)
    return found


def beside(comm: Comm, buffer: Any) -> Any:
    """Return, for a part of an array of `terms`, that part on all ranks, in their order: [ranks, n]; else None."""
    whole = buffer.base
    if whole is None or whole.dtype != buffer.dtype or not any(ref() is whole for ref in comm.terms):
        return None
    rows = whole.reshape(comm.size, -1)
    at = (buffer.ctypes.data - rows[comm.rank].ctypes.data) // buffer.itemsize
    return rows[:, at : at + buffer.size]


def can_share(comm: Comm, size: int) -> bool:
    """Return True if an array of so many bytes lies in shared memory, where that can be had: it is not a small one."""
    return _possible(comm) and size >= tunables.SHARED_BYTES


def _possible(comm: Comm) -> bool:
    """Return True if the ranks are on one node, and calls are not each checked."""
    alone = comm.size == 1 or comm.local_size != comm.size
    return not (alone or comm.checked or os.environ.get("PARLINALG_SHARED") == "0")


def _held(comm: Comm) -> SharedMemory | None:
    """Return the communicator's shared memory."""
    if not _possible(comm):
        return None
    if comm.shared is None:
        comm.shared = SharedMemory()
    return comm.shared


def _crowded(comm: Comm) -> bool:
    """Return True if on all ranks of a communicator with shared memory ranks outnumber cores; they are asked once."""
    held = comm.shared
    assert held is not None, "there are counters, so there is shared memory"
    if held.crowded is None:
        held.crowded = all(comm.share(comm.crowded, others="alike"))
    return held.crowded


def _made(comm: Comm, size: int, own: int) -> mmap.mmap | ImaginedMemory | None:
    """So many bytes that all ranks have mapped, or None on all of them.

    Each rank reserves its own bytes, since pages lie near the core that touches them first.
    """
    if isinstance(comm, ImaginedComm):
        return ImaginedMemory(comm, size)
    path = _new(size) if comm.rank == 0 else ""
    path = comm.share(path, others="alike")[0]
    mapped = _mapped(path, size, comm.rank * own, own) if path else None
    everyone = path and all(comm.share(mapped is not None, others="alike"))
    if path and comm.rank == 0:
        os.unlink(path)
    return mapped if everyone else None


def _new(size: int) -> str:
    """Return the path of a new file in memory of so many bytes; empty if there is too little."""
    try:
        room = os.statvfs(FOLDER)
        if room.f_bavail * room.f_frsize < tunables.SHARED_SPARE * size:
            return ""
        descriptor, path = tempfile.mkstemp(prefix="parlinalg-", dir=FOLDER)
    except (OSError, AttributeError):
        return ""
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(descriptor)
    return path


def _mapped(path: str, size: int, start: int, own: int) -> mmap.mmap | None:
    """Return the file's bytes, of which `own` from `start` on are reserved; None if they cannot be."""
    try:
        with open(path, "r+b") as file:
            if own:
                os.posix_fallocate(file.fileno(), start, own)
            memory = mmap.mmap(file.fileno(), size)
    except (OSError, AttributeError):
        return None
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
