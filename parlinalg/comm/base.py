"""The protocol of communication between ranks.

`Comm` checks, counts and watches every operation once, for all transports; a transport implements the `_…` primitives.
Blocks are C-contiguous arrays of any shape, read and written in flat order; counts are numbers of elements.
"""

from __future__ import annotations

import json
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from parlinalg import tunables
from parlinalg.backend import backend_of, namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import runs
from parlinalg.comm.watch import enrol, library_site, slot
from parlinalg.errors import CommError

if TYPE_CHECKING:
    from parlinalg.comm.group import Call, Group
    from parlinalg.comm.ledger import Book
    from parlinalg.comm.shared import SharedMemory


class Handle(ABC):
    """An operation in progress.  It keeps the operation's buffers alive until it is done.

    The buffers must not be touched before `wait` has returned, or `test` has returned True.  All ranks wait at the same
    point of their program: an operation may need them all to progress.
    """

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Return when the operation is done and its result is in the receiving block.  Any number of calls is fine."""

    @abstractmethod
    def test(self) -> bool:
        """Return True if the operation is done; lets MPI make progress, and finishes the operation if it is."""


class Following(Handle):
    """An operation after which something is still to be done here, by `_finish`, once."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Handle) -> None:
        self._inner: Handle | None = inner

    def wait(self) -> None:
        if self._inner is not None:
            self._inner.wait()
            self._finish()
            self._inner = None

    def test(self) -> bool:
        if self._inner is not None:
            if not self._inner.test():
                return False
            self._finish()
            self._inner = None
        return True

    @abstractmethod
    def _finish(self) -> None:
        """Do what follows the operation, and let the buffers go."""


class _Done(Handle):
    __slots__ = ()

    def wait(self) -> None:
        pass

    def test(self) -> bool:
        return True


DONE: Handle = _Done()
"""The handle of an operation that finished before it returned."""


Block = Any
"""A C-contiguous NumPy or CuPy array."""


def by_terms(dtype: Any) -> bool:
    """Return True if sums in this dtype are formed in a wider one: ranks exchange their terms and combine them."""
    return work_dtype(dtype) != dtype


def reduction_work(size: int, dtype: Any, *, scatter: bool = False) -> int:
    """Return the memory that a reduction of so many elements takes beside its blocks, in elements.

    It holds the ranks' terms of this rank's part of the sum, and in an all-reduce that part, at most a half.
    """
    if not by_terms(dtype):
        return 0
    return size if scatter else size + size // 2


_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}
_SLICE = 1 << 15  # elements added at a time, so that the sums stay in cache


def combine_terms(terms: Any, out: Any, op: str) -> None:
    """Reduce `terms[ranks, n]` over the ranks, in order, to `out[n]`; 16-bit floats in float32."""
    step = _SLICE if backend_of(out).cpu else max(out.size, 1)
    add, work = getattr(namespace(out), _COMBINE[op]), work_dtype(out.dtype)
    for part in runs(out.size, step, out):
        total = terms[0, part].astype(work)
        for term in terms[1:]:
            add(total, term[part].astype(work, copy=False), out=total)
        out[part] = total.astype(out.dtype, copy=False)


def bytes_of_terms(nbytes: float, ranks: int, *, cpu: bool) -> float:
    """Return the bytes that an all-reduce of a block of 16-bit floats takes beside it: the terms of this rank's part of
    the sum, the part, and on a CPU the scratch by which these are combined."""
    own = nbytes / ranks
    return nbytes + own + (2 * 4 * min(own / 2, _SLICE) if cpu else 0)


Others = str | Callable[[int], Any] | None


class Comm(ABC):
    """A group of ranks that exchange blocks.

    Every operation is collective over the group unless it says otherwise: all ranks call the same ones in the same
    order.  With `wait=False` an operation returns at once and its `Handle` says when it is done.

    Attributes
    ----------
    size, rank : int
        The number of ranks, and which of them this process is.
    axes : tuple of str
        The grid axes the group spans; the label of its operations in the ledger and in messages.
    world_ranks : tuple of int
        The members' ranks in the world of all processes started together.
    local_rank, local_size : int
        This process's index among the members on its node, and their number.
    books : list of Book
        The open ledgers; one list shared by all communicators made from one by `sub` and `cartesian`.
    imagined : bool
        True if the other ranks are imagined (`parlinalg.comm.imagined`).
    """

    imagined: ClassVar[bool] = False

    def __init__(
        self,
        size: int,
        rank: int,
        axes: tuple[str, ...],
        world_ranks: tuple[int, ...],
        nodes: tuple[int, ...],
        books: list[Book],
        checked: bool,
    ) -> None:
        self.size = size
        self.rank = rank
        self.axes = axes
        self.world_ranks = world_ranks
        self.nodes = nodes
        """For each member the least world rank on its node."""
        self.books = books
        self.checked = checked
        self._calls = 0
        self._under_way: dict[Handle, None] = {}
        """The handles of nonblocking operations not known to be done, so that dropping one does not drop its blocks."""
        self.key = enrol(self) if size > 1 and not self.imagined else "self"
        """The same on all members, different from other communicators; for the monitor."""
        self._parcels: dict[int, list[Block]] = {}
        self.shared: SharedMemory | None = None
        """The memory that the members share, once they have some (`parlinalg.comm.shared`)."""
        self.terms: list[weakref.ref[Any]] = []
        """Arrays in such memory that sums are taken of where they lie."""
        here = nodes[rank]
        self.local_rank = nodes[:rank].count(here)
        self.local_size = nodes.count(here)
        self.crowded = False
        """True if this node has more ranks than cores, by the ranks of this communicator and its parents."""

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep operations out of the ledgers, which are about the training, within a `with` block."""
        books, self.books = self.books, []
        try:
            yield
        finally:
            self.books = books

    # ------------------------------------------------------------------------------------------------ collectives

    def all_gather(
        self, send: Block, recv: Block, counts: Sequence[int], *, wait: bool = True, group: Group | None = None
    ) -> Handle:
        """Concatenate every rank's `send` (counts[i] elements from rank i) in `recv`, on every rank.

        On all ranks `send` may be the rank's own place in `recv`: then nothing is copied.  With a `group`, and without
        waiting, the operation starts with the others of the group.
        """
        check_counts(self, "all_gather", "recv", recv, counts)
        check_own_count(self, "all_gather", "send", send, counts)
        check_same_dtype(self, "all_gather", send, recv)
        if self.size == 1:
            recv.reshape(-1)[:] = send.reshape(-1)
            return DONE
        if group is not None and not wait and self._joins(recv):
            return group.add(self, "all_gather", send, recv, counts)
        if self.books:
            self._note("all_gather", recv.size - send.size, send.itemsize)
        if self.checked:
            self._agree("all_gather", send.dtype, counts)
        self._calls += 1
        return self._watched("all_gather", self._calls, lambda: self._all_gather(send, recv, counts, wait))

    def reduce_scatter(
        self, send: Block, recv: Block, counts: Sequence[int], *, op: str = "sum", wait: bool = True,
        group: Group | None = None,
    ) -> Handle:  # fmt: skip
        """Reduce all ranks' `send` elementwise and leave the i-th run of counts[i] elements in rank i's `recv`.

        With a `group`, and without waiting, the operation starts with the others of the group.
        """
        check_counts(self, "reduce_scatter", "send", send, counts)
        check_own_count(self, "reduce_scatter", "recv", recv, counts)
        check_same_dtype(self, "reduce_scatter", send, recv)
        check_reduction(self, "reduce_scatter", op, send)
        if self.size == 1:
            recv.reshape(-1)[:] = send.reshape(-1)
            return DONE
        if group is not None and not wait and self._joins(send):
            return group.add(self, "reduce_scatter", send, recv, counts, op)
        if self.books:
            self._note("reduce_scatter", send.size - recv.size, send.itemsize)
        if self.checked:
            self._agree("reduce_scatter", send.dtype, counts, reduction=op)
        self._calls += 1
        return self._watched("reduce_scatter", self._calls, lambda: self._reduce_scatter(send, recv, counts, op, wait))

    def all_reduce(self, buffer: Block, *, op: str = "sum", wait: bool = True) -> Handle:
        """Replace every rank's `buffer` by the elementwise sum, max or min over all ranks."""
        check_contiguous(self, "all_reduce", buffer)
        check_reduction(self, "all_reduce", op, buffer)
        if self.size == 1:
            return DONE
        if self.books:
            self._note("all_reduce", self.all_reduce_words(buffer.size), buffer.itemsize)
        if self.checked:
            self._agree("all_reduce", buffer.dtype, buffer.size, reduction=op, shape=buffer.shape)
        self._calls += 1
        return self._watched("all_reduce", self._calls, lambda: self._all_reduce(buffer, op, wait))

    def broadcast(self, buffer: Block, root: int, *, wait: bool = True) -> Handle:
        """Replace every rank's `buffer` by that of rank `root`."""
        check_contiguous(self, "broadcast", buffer)
        check_peer(self, "broadcast", "root", root)
        if self.size == 1:
            return DONE
        if self.books:
            self._note("broadcast", 0 if self.rank == root else buffer.size, buffer.itemsize)
        if self.checked:
            self._agree("broadcast", buffer.dtype, buffer.size, root=root, shape=buffer.shape)
        self._calls += 1
        return self._watched("broadcast", self._calls, lambda: self._broadcast(buffer, root, wait))

    def all_to_all(
        self, send: Block, send_counts: Sequence[int], recv: Block, recv_counts: Sequence[int], *, wait: bool = True
    ) -> Handle:
        """Send the i-th run of send_counts[i] elements to rank i; `recv` holds the runs received, in rank order."""
        check_counts(self, "all_to_all", "send", send, send_counts)
        check_counts(self, "all_to_all", "recv", recv, recv_counts)
        check_same_dtype(self, "all_to_all", send, recv)
        if self.size == 1:
            if send.size != recv.size:
                raise CommError(
                    f"all_to_all over {self.axes}: one rank sends itself {send.size} elements but expects {recv.size}"
                )
            recv.reshape(-1)[:] = send.reshape(-1)
            return DONE
        if self.books:
            self._note("all_to_all", recv.size - recv_counts[self.rank], recv.itemsize)
        if self.checked:
            self._agree("all_to_all", send.dtype, send_counts, receives=recv_counts)
        self._calls += 1
        return self._watched(
            "all_to_all", self._calls, lambda: self._all_to_all(send, send_counts, recv, recv_counts, wait)
        )

    # ------------------------------------------------------------------------------------------------ groups of calls

    @property
    def packs(self) -> bool:
        """True if calls that start together have to be packed into one, which copies them."""
        return True

    def _joins(self, whole: Block) -> bool:
        """Return True if a gather or a reduce-scatter of this block takes part in a group; the same on all ranks."""
        return not self.packs or whole.nbytes <= tunables.GROUPED_PIECE * self.size

    def start_together(self, op: str, calls: Sequence[Call], reduction: str = "") -> Handle:
        """Start all-gathers or reduce-scatters of one dtype as one call; `parlinalg.comm.group` collects them."""
        dtype = calls[0].send.dtype
        counts = [sum(each) for each in zip(*(call.counts for call in calls), strict=True)]
        if self.books:
            self._note(op, sum(abs(call.recv.size - call.send.size) for call in calls), dtype.itemsize)
        if self.checked:
            self._agree(op, dtype, counts, **({"reduction": reduction} if reduction else {}))
        self._calls += 1
        return self._watched(op, self._calls, lambda: self._together(op, calls, counts, reduction))

    def _together(self, op: str, calls: Sequence[Call], counts: Sequence[int], reduction: str) -> Handle:
        """Start several operations; `counts` are the elements of each rank's pieces of all blocks."""
        if len(calls) > 1:
            from parlinalg.comm.group import start_packed

            return start_packed(self, op, calls, counts, reduction)
        send, recv, counts = calls[0]
        if op == "all_gather":
            return self._all_gather(send, recv, counts, False)
        return self._reduce_scatter(send, recv, counts, reduction, False)

    # ------------------------------------------------------------------------------------------------ one to one

    def send(self, buffer: Block, to: int, *, tag: int = 0, wait: bool = True) -> Handle:
        """Send `buffer` to rank `to`, which receives it with the same tag.  Not collective."""
        check_contiguous(self, "send", buffer)
        check_peer(self, "send", "to", to)
        if to == self.rank:
            self._parcels.setdefault(tag, []).append(buffer.copy())
            return DONE
        if self.books:
            self._note("send", 0, buffer.itemsize)
        return self._watched(f"send to {to}", -1 - to, lambda: self._send(buffer, to, tag, wait))

    def receive(self, buffer: Block, source: int, *, tag: int = 0, wait: bool = True) -> Handle:
        """Fill `buffer` with the block that rank `source` sends with the same tag.  Not collective."""
        check_contiguous(self, "receive", buffer)
        check_peer(self, "receive", "source", source)
        if source == self.rank:
            return _Parcel(self, buffer, tag, wait)
        if self.books:
            self._note("receive", buffer.size, buffer.itemsize)
        return self._watched(f"receive from {source}", -1 - source, lambda: self._receive(buffer, source, tag, wait))

    # ------------------------------------------------------------------------------------------------ agreement

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self.size > 1:
            if self.checked:
                self._agree("barrier", None, 0)
            self._calls += 1
            slot.state = (monotonic(), self, "barrier", self._calls)
            try:
                self._barrier()
            finally:
                slot.state = None

    def attend(self, here: Callable[[], bool], seldom: bool = False) -> None:
        """Return when `here` is true, which all ranks wait for, as in a barrier; the core is others' meanwhile.

        With `seldom` the rank gives its core up at once, and looks again after some milliseconds.
        """
        self._calls += 1
        if here():
            return
        from parlinalg.comm.watch import until

        slot.state = (monotonic(), self, "barrier", self._calls)
        try:
            until(here, seldom)
        finally:
            slot.state = None

    def share(self, value: Any, *, others: Others = None) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank.

        For agreement on setup and errors: values are anything JSON can carry (tuples arrive as lists), and the ledger
        does not count them.

        Parameters
        ----------
        value : object
        others : {"alike", "by rank"} or callable, optional
            For imagined ranks: "alike" if a program that is right has the same value on all ranks, "by rank" if they
            differ; or a function of the rank that gives its value.  Real ranks are asked.

        Raises
        ------
        CommError
            On all ranks, if different functions of parlinalg share here: a rank skipped a call.
        """
        payload = json.dumps(value)
        if self.size == 1:
            return [json.loads(payload)]
        site = library_site(sys._getframe(1))
        if self.checked:
            self._agree("share", None, 0, site=site)
        self._calls += 1
        slot.state = (monotonic(), self, "share", self._calls)
        try:
            parts = [part.partition(b"\n") for part in self._exchange(f"{site}\n{payload}".encode())]
            if any(part[0] != parts[0][0] for part in parts):
                from parlinalg.comm.check import sites_differ

                raise sites_differ(self, [part[0].decode() for part in parts])
            return [json.loads(part[2]) for part in parts]
        finally:
            slot.state = None

    # ------------------------------------------------------------------------------------------------ groups

    @abstractmethod
    def sub(self, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        """Return a communicator of these ranks of this one, numbered in this order.  Called by its members only."""

    @abstractmethod
    def cartesian(self, sizes: Mapping[str, int]) -> Comm | None:
        """Return a communicator of the first ∏ sizes ranks, row-major over the axes; None on the ranks left over.

        Raises
        ------
        CommError
            If there are fewer ranks than the axes need.
        """

    @abstractmethod
    def free(self) -> None:
        """Give the communicator back to MPI (which has about 2,000); it cannot be used any more."""

    # ------------------------------------------------------------------------------------------------ transports

    @abstractmethod
    def _all_gather(self, send: Block, recv: Block, counts: Sequence[int], wait: bool) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, send: Block, recv: Block, counts: Sequence[int], op: str, wait: bool) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, buffer: Block, op: str, wait: bool) -> Handle: ...

    @abstractmethod
    def _broadcast(self, buffer: Block, root: int, wait: bool) -> Handle: ...

    @abstractmethod
    def _all_to_all(
        self, send: Block, send_counts: Sequence[int], recv: Block, recv_counts: Sequence[int], wait: bool
    ) -> Handle: ...

    @abstractmethod
    def _send(self, buffer: Block, to: int, tag: int, wait: bool) -> Handle: ...

    @abstractmethod
    def _receive(self, buffer: Block, source: int, tag: int, wait: bool) -> Handle: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _exchange(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order, on every rank."""

    # ------------------------------------------------------------------------------------------------ checks

    def all_reduce_words(self, n: int) -> int:
        """Return the words that this rank receives in an all-reduce of n elements: 2 (n − own), `own` is its piece."""
        return 2 * (n - n // self.size - (self.rank < n % self.size))

    def count(self, op: str, words: int, itemsize: int) -> None:
        """Enter a call that was made through shared memory in the ledger: `words` as those of the operation `op`."""
        if self.books:
            self._note(op, words, itemsize)

    def _watched(self, op: str, number: int, call: Callable[[], Handle]) -> Handle:
        """Make a call that the monitor knows of, and traces note."""
        began = monotonic()
        slot.state = (began, self, op, number)
        try:
            handle = call()
        except Exception as error:
            if type(error).__module__.startswith("mpi4py"):
                from parlinalg.comm.check import failed_in_mpi

                raise failed_in_mpi(self, op, error) from error
            raise
        finally:
            slot.state = None
        for book in self.books:
            handle = book.watch(op, self.axes, began, handle)
        return handle

    def _note(self, op: str, words: int, itemsize: int) -> None:
        for book in self.books:
            book.note(op, self.axes, words, words * itemsize)

    def _agree(self, op: str, dtype: Any, counts: int | Sequence[int], **more: Any) -> None:
        """Checked mode: raise on all ranks unless all are about to make the same call."""
        from parlinalg.comm.check import check_same_call

        check_same_call(self, op, dtype, counts, more)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, axes={self.axes})"


class _Parcel(Handle):
    """A block that a rank receives from itself."""

    __slots__ = ("_comm", "_buffer", "_tag", "_done")

    def __init__(self, comm: Comm, buffer: Block, tag: int, wait: bool) -> None:
        self._comm, self._buffer, self._tag, self._done = comm, buffer, tag, False
        if wait:
            self.wait()

    def wait(self) -> None:
        if not self.test():
            raise CommError(
                f"receive from itself: rank {self._comm.rank} has sent itself nothing with tag {self._tag}; send first"
            )

    def test(self) -> bool:
        waiting = self._comm._parcels.get(self._tag)
        if not self._done and waiting:
            parcel = waiting.pop(0)
            if parcel.size != self._buffer.size or parcel.dtype != self._buffer.dtype:
                raise CommError(
                    f"receive from itself: {parcel.size} {parcel.dtype} were sent, "
                    f"but the buffer has {self._buffer.size} {self._buffer.dtype}"
                )
            self._buffer.reshape(-1)[:] = parcel.reshape(-1)
            self._done = True
        return self._done


def check_members(comm: Comm, ranks: tuple[int, ...]) -> None:
    if comm.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < comm.size for r in ranks):
        raise CommError(
            f"rank {comm.rank} of {comm.size} asks for a communicator of the ranks {ranks}: "
            "they should be distinct, in range, and include it"
        )


def check_contiguous(comm: Comm, op: str, block: Any) -> None:
    if not block.flags.c_contiguous:
        raise CommError(
            f"{op} over {comm.axes}: the block of shape {block.shape} is not C-contiguous (strides {block.strides}); "
            "pass numpy.ascontiguousarray of it"
        )


def check_same_dtype(comm: Comm, op: str, send: Any, recv: Any) -> None:
    if send.dtype is not recv.dtype and send.dtype != recv.dtype:
        raise CommError(f"{op} over {comm.axes}: send is {send.dtype} but recv {recv.dtype}; they should be the same")
    check_contiguous(comm, op, send)
    check_contiguous(comm, op, recv)


def check_counts(comm: Comm, op: str, name: str, block: Any, counts: Sequence[int]) -> None:
    if len(counts) != comm.size or block.size != sum(counts):
        raise CommError(
            f"{op} over {comm.axes}: {name} has {block.size} elements on {comm.size} ranks, but {len(counts)} counts "
            f"{list(counts)} add up to {sum(counts)}; there should be one count a rank, adding up to {name}.size"
        )


def check_own_count(comm: Comm, op: str, name: str, block: Any, counts: Sequence[int]) -> None:
    if block.size != counts[comm.rank]:
        raise CommError(
            f"{op} over {comm.axes}: {name} has {block.size} elements on rank {comm.rank}, "
            f"but counts[{comm.rank}] is {counts[comm.rank]}; they should be equal"
        )


def check_peer(comm: Comm, op: str, name: str, rank: int) -> None:
    if not 0 <= rank < comm.size:
        raise CommError(f"{op} over {comm.axes}: {name}={rank}, but the ranks are 0 to {comm.size - 1}")


def check_reduction(comm: Comm, op: str, name: str, block: Any) -> None:
    if name == "sum":
        if block.dtype.kind == "b":
            raise CommError(
                f"{op} over {comm.axes}: booleans have no sum; use op='max' (any) or op='min' (all), or send integers"
            )
    elif name not in ("max", "min"):
        raise CommError(f"{op} over {comm.axes}: op={name!r}, but the reductions are 'sum', 'max' and 'min'")
    elif block.dtype.kind == "c":
        raise CommError(f"{op} over {comm.axes}: {block.dtype} has no {name}; the only reduction of it is 'sum'")
