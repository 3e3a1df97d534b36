"""MPI through mpi4py: buffer calls only, every count and datatype spelled out.

Blocks on a GPU travel through pinned host memory.  MPI cannot be asked whether it reads GPU memory, so by default it
never sees any.  `PARLINALG_CUDA_AWARE_MPI=1` says that it does: then blocks are handed over as they are, once the
stream that computes them is synchronised.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np
from mpi4py import MPI

from parlinalg import tunables
from parlinalg.backend import backend_of
from parlinalg.backend.blas import cores
from parlinalg.comm import split
from parlinalg.comm.algorithms import Chain, SumInPlace, TwoPhase, all_reduce_in_two, reduce_scatter_terms
from parlinalg.comm.base import DONE, Block, Comm, Following, Handle, by_terms, check_members
from parlinalg.comm.check import failed_in_mpi
from parlinalg.comm.ledger import Book
from parlinalg.comm.shared import beside
from parlinalg.comm.single import SingleComm
from parlinalg.comm.watch import Forming, slot, strike, wait_asleep
from parlinalg.errors import CommError

CARRIERS: dict[int, MPI.Datatype] = {
    1: MPI.UINT8_T,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
"""By item size, the datatype that moves elements of any dtype."""

NUMBERS: dict[str, MPI.Datatype] = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "bool": MPI.UINT8_T,
}
"""The dtypes MPI can reduce; booleans have max and min only."""

SATURATES = MPI.get_vendor()[0] == "Open MPI"
"""True if the MPI library's sums of 8- and 16-bit integers may stop at the largest one, as Open MPI's AVX kernels do
(https://github.com/open-mpi/ompi/issues/8045)."""

READS_GPU = os.environ.get("PARLINALG_CUDA_AWARE_MPI", "0") not in ("", "0")
"""True if MPI is given GPU memory."""

REDUCTIONS: dict[str, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}

_number_of: dict[Any, MPI.Datatype] = {}


def reduction_type(dtype: Any) -> MPI.Datatype:
    """Return the MPI datatype that reduces `dtype`."""
    known = _number_of.get(dtype)
    if known is None:
        if dtype.name not in NUMBERS:
            raise CommError(
                f"MPI cannot reduce arrays of dtype {dtype}; it can reduce {', '.join(NUMBERS)}, float16 and bfloat16"
            )
        known = _number_of[dtype] = NUMBERS[dtype.name]
    return known


def carrier_type(block: Block) -> MPI.Datatype:
    """Return the MPI datatype that moves the elements of `block`."""
    if block.dtype.hasobject or block.itemsize not in CARRIERS:
        raise CommError(
            f"arrays of dtype {block.dtype} cannot be sent; convert to a number type of 1, 2, 4, 8 or 16 bytes"
        )
    return CARRIERS[block.itemsize]


def lies_in(whole: Block, at: int, part: Block) -> bool:
    """Return True if `part` is the part of a block from element `at` on, in the same memory."""
    if part.base is None or not (part.base is whole or part.base is whole.base):
        return False
    if isinstance(whole, np.ndarray):
        return bool(part.ctypes.data == whole.ctypes.data + at * whole.itemsize)
    return bool(part.data.ptr == whole.data.ptr + at * whole.itemsize)


Runs = tuple[Sequence[int], Sequence[int] | None]
"""The counts of the runs of a block, and where each begins (None: one after the other)."""

_HEAD, _MARK = 256, b"\xa7pl"


class MpiHandle(Handle):
    """A nonblocking MPI operation and its blocks (mpi4py lets go of those of an Iallreduce in place)."""

    __slots__ = ("_blocks", "_comm", "_number", "_op", "_request")

    def __init__(self, comm: MpiComm, op: str, request: MPI.Request, blocks: Any, number: int = 0) -> None:
        self._comm = comm
        self._op = op
        self._number = number or comm._calls
        self._request: MPI.Request | None = request
        self._blocks = blocks
        comm._under_way[self] = None
        if comm.local_size < comm.size:
            slot.post()

    def wait(self) -> None:
        request = self._request
        if request is not None:
            slot.state = (monotonic(), self._comm, self._op, self._number)
            try:
                if self._comm.crowded and (self._number < 0 or self._blocks is None):
                    # a message or a barrier: the others' turn to compute, perhaps on this core
                    wait_asleep(request)
                else:
                    request.Wait()
            except MPI.Exception as error:
                raise failed_in_mpi(self._comm, self._op, error) from error
            finally:
                slot.state = None
            self._done()

    def test(self) -> bool:
        request = self._request
        if request is not None:
            if not request.Test():
                return False
            self._done()
        return True

    def _done(self) -> None:
        self._request = None
        self._comm._under_way.pop(self, None)
        if self._comm.local_size < self._comm.size:
            slot.between -= 1
        self._blocks = None


class MpiComm(Comm):
    """Ranks that talk through an MPI communicator, which this object owns."""

    def __init__(
        self, mpi: MPI.Intracomm, axes: tuple[str, ...], nodes: tuple[int, ...], books: list[Book], checked: bool
    ) -> None:
        super().__init__(mpi.size, mpi.rank, axes, world_ranks_of(mpi), nodes, books, checked)
        self.mpi = mpi
        self.first_phases: deque[TwoPhase] = deque()
        """Operations whose second phase has not begun, oldest first."""
        self._shadow: MpiComm | None = None
        self.crowded = self.local_size > len(cores())
        self.chains = 0
        """Broadcasts along a chain that have begun: the same number on all ranks."""

    def sub(self, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        ranks = tuple(ranks)
        check_members(self, ranks)
        if len(ranks) == 1:
            return SingleComm(axes, self.world_ranks[self.rank], self.nodes[self.rank], self.books)
        whole = self.mpi.Get_group()
        group = whole.Incl(ranks)
        slot.state = (monotonic(), Forming(axes, tuple(self.world_ranks[r] for r in ranks)), "making a communicator", 0)
        try:
            made = self.mpi.Create_group(group)
        finally:
            slot.state = None
            group.Free()
            whole.Free()
        part = MpiComm(made, axes, tuple(self.nodes[r] for r in ranks), self.books, self.checked)
        part.crowded |= self.crowded
        return part

    def cartesian(self, sizes: Mapping[str, int]) -> Comm | None:
        need = math.prod(sizes.values())
        if need > self.size:
            raise CommError(
                f"the axes {dict(sizes)} need {need} ranks, but there are {self.size}; start with mpiexec -n {need}"
            )
        if self.rank >= need:
            return None
        made = self.sub(range(need), tuple(sizes))
        if isinstance(made, MpiComm):  # MPI knows the topology too: row-major, not periodic, ranks as they are
            plain, dims = made.mpi, list(sizes.values())
            made.mpi = plain.Create_cart(dims, [False] * len(dims), reorder=False)
            plain.Free()
        return made

    def open_shadow(self) -> MpiComm:
        """Return a second communicator of the same ranks, for the second phases of nonblocking operations."""
        if self._shadow is None:
            self._shadow = MpiComm(self.mpi.Dup(), self.axes, self.nodes, [], False)
        return self._shadow

    def free(self) -> None:
        if isinstance(self.mpi, MPI.Comm):
            while self.first_phases:  # other ranks may have gone on to the second
                self.first_phases[-1].wait()
            for handle in list(self._under_way):
                handle.wait()
            if self._shadow is not None:
                self._shadow.free()
            self.shared = None
            self.terms.clear()
            self.mpi.Free()
            strike(self)
            self.mpi = _Lost(self.axes, "which was freed; keep its Grid open while it is used")  # type: ignore[assignment]

    def lose(self, why: str) -> None:
        """Make every further use of the communicator raise a CommError, without touching MPI."""
        if isinstance(self.mpi, MPI.Comm):
            self.mpi = _Lost(self.axes, why)  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------------ primitives
    # Each begins with its exceptions: blocks on a GPU, terms that the ranks reduce, messages that are too long.

    def _all_gather(self, send: Block, recv: Block, counts: Sequence[int], wait: bool) -> Handle:
        if not isinstance(send, np.ndarray) and not self._reads_gpu(send):
            return through_host(send, recv, lambda s, r: self._all_gather(s, r, counts, wait), wait)
        if recv.size > tunables.MAX_COUNT:
            return split.all_gather(self, send, recv, counts, wait)
        kind = carrier_type(send)
        own = MPI.IN_PLACE if lies_in(recv, sum(counts[: self.rank]), send) else (send, send.size, kind)
        if counts.count(counts[0]) == self.size:
            whole = (recv, send.size, kind)
            if wait:
                self.mpi.Allgather(own, whole)
                return DONE
            return MpiHandle(self, "all_gather", self.mpi.Iallgather(own, whole), (send, recv))
        runs = (recv, counts, None, kind)
        if wait:
            self.mpi.Allgatherv(own, runs)
            return DONE
        return MpiHandle(self, "all_gather", self.mpi.Iallgatherv(own, runs), (send, recv))

    def _reduce_scatter(self, send: Block, recv: Block, counts: Sequence[int], op: str, wait: bool) -> Handle:
        if not isinstance(send, np.ndarray) and (_by_terms(send.dtype, op) or not self._reads_gpu(send)):
            return through_host(send, recv, lambda s, r: self._reduce_scatter(s, r, counts, op, wait), wait)
        if _by_terms(send.dtype, op):
            return reduce_scatter_terms(self, send, recv, counts, op, wait)
        if send.size > tunables.MAX_COUNT:
            return split.reduce_scatter(self, send, recv, counts, op, wait)
        kind = reduction_type(send.dtype)
        own = (recv, recv.size, kind)
        if counts.count(counts[0]) == self.size:
            whole = (send, recv.size, kind)
            if wait:
                self.mpi.Reduce_scatter_block(whole, own, REDUCTIONS[op])
                return DONE
            return MpiHandle(
                self, "reduce_scatter", self.mpi.Ireduce_scatter_block(whole, own, REDUCTIONS[op]), (send, recv)
            )
        whole = (send, send.size, kind)
        if wait:
            self.mpi.Reduce_scatter(whole, own, counts, REDUCTIONS[op])
            return DONE
        return MpiHandle(
            self, "reduce_scatter", self.mpi.Ireduce_scatter(whole, own, counts, REDUCTIONS[op]), (send, recv)
        )

    def _all_reduce(self, buffer: Block, op: str, wait: bool) -> Handle:
        if not isinstance(buffer, np.ndarray) and (_by_terms(buffer.dtype, op) or not self._reads_gpu(buffer)):
            return through_host(buffer, buffer, lambda _, b: self._all_reduce(b, op, wait), wait)
        if _by_terms(buffer.dtype, op):
            return all_reduce_in_two(self, buffer, op, wait)
        if self.terms and op == "sum" and (terms := beside(self, buffer)) is not None:
            handle = SumInPlace(self, terms)
            if wait:
                handle.wait()
            return handle
        if buffer.size > tunables.MAX_COUNT:
            return split.all_reduce(self, buffer, op, wait)
        if wait and buffer.nbytes >= tunables.LONG_SUM and self.local_size < self.size:
            return all_reduce_in_two(self, buffer, op, wait)  # faster on a network than MPICH's own
        spec = (buffer, buffer.size, reduction_type(buffer.dtype))
        if wait:
            self.mpi.Allreduce(MPI.IN_PLACE, spec, REDUCTIONS[op])
            return DONE
        return MpiHandle(self, "all_reduce", self.mpi.Iallreduce(MPI.IN_PLACE, spec, REDUCTIONS[op]), buffer)

    def barrier_of(self, op: str) -> Handle:
        """Return a nonblocking barrier, which is a part of this operation."""
        return MpiHandle(self, op, self.mpi.Ibarrier(), None)

    def _reduce(self, send: Block, recv: Block, root: int, op: str, wait: bool) -> Handle:
        kind = reduction_type(send.dtype)
        own = (recv, recv.size, kind) if self.rank == root else None
        if wait:
            self.mpi.Reduce((send, send.size, kind), own, REDUCTIONS[op], root)
            return DONE
        return MpiHandle(
            self, "reduce", self.mpi.Ireduce((send, send.size, kind), own, REDUCTIONS[op], root), (send, recv)
        )

    def _broadcast(self, buffer: Block, root: int, wait: bool) -> Handle:
        if not isinstance(buffer, np.ndarray) and not self._reads_gpu(buffer):
            if self.rank == root:
                return through_host(buffer, None, lambda b, _: self._broadcast(b, root, wait), wait)
            return through_host(None, buffer, lambda _, b: self._broadcast(b, root, wait), wait)
        if buffer.size > tunables.MAX_COUNT:
            return split.broadcast(self, buffer, root, wait)
        long = min(tunables.LONG_MESSAGE, tunables.CHAIN_LEAST * self.size)
        if buffer.nbytes >= long and self.local_size < self.size > 2 and buffer.flags.c_contiguous:
            chain = Chain(self, buffer, root)
            if wait:
                chain.wait()
            return chain
        spec = (buffer, buffer.size, carrier_type(buffer))
        if wait:
            self.mpi.Bcast(spec, root)
            return DONE
        return MpiHandle(self, "broadcast", self.mpi.Ibcast(spec, root), buffer)

    def _all_to_all(
        self, send: Block, send_counts: Sequence[int], recv: Block, recv_counts: Sequence[int], wait: bool
    ) -> Handle:
        if not isinstance(send, np.ndarray) and not self._reads_gpu(send):
            return through_host(send, recv, lambda s, r: self._all_to_all(s, send_counts, r, recv_counts, wait), wait)
        if send.size > tunables.MAX_COUNT or recv.size > tunables.MAX_COUNT:
            return split.all_to_all(self, send, send_counts, recv, recv_counts, wait)
        return self._exchange_runs(send, (send_counts, None), recv, (recv_counts, None), wait)

    def _exchange_runs(self, send: Block, gives: Runs, recv: Block, gets: Runs, wait: bool) -> Handle:
        kind = carrier_type(send)
        out, into = (send, *gives, kind), (recv, *gets, kind)
        if wait:
            self.mpi.Alltoallv(out, into)
            return DONE
        return MpiHandle(self, "all_to_all", self.mpi.Ialltoallv(out, into), (send, recv))

    def _send(self, buffer: Block, to: int, tag: int, wait: bool) -> Handle:
        if not isinstance(buffer, np.ndarray) and not self._reads_gpu(buffer):
            return through_host(buffer, None, lambda b, _: self._send(b, to, tag, wait), wait)
        if buffer.size > tunables.MAX_COUNT:
            return split.send(self, buffer, to, tag, wait)
        spec = (buffer, buffer.size, carrier_type(buffer))
        if wait:
            self.mpi.Send(spec, to, tag)
            return DONE
        return MpiHandle(self, f"send to {to}", self.mpi.Isend(spec, to, tag), buffer, -1 - to)

    def _receive(self, buffer: Block, source: int, tag: int, wait: bool) -> Handle:
        if not isinstance(buffer, np.ndarray) and not self._reads_gpu(buffer):
            return through_host(None, buffer, lambda _, b: self._receive(b, source, tag, wait), wait)
        if buffer.size > tunables.MAX_COUNT:
            return split.receive(self, buffer, source, tag, wait)
        spec = (buffer, buffer.size, carrier_type(buffer))
        if wait:
            self.mpi.Recv(spec, source, tag)
            return DONE
        return MpiHandle(self, f"receive from {source}", self.mpi.Irecv(spec, source, tag), buffer, -1 - source)

    def _reads_gpu(self, block: Block) -> bool:
        """Return True if MPI may read and write this GPU block itself; makes sure that it is ready."""
        if not READS_GPU:
            return False
        backend_of(block).synchronize()
        return True

    def _barrier(self) -> None:
        if self.crowded:
            wait_asleep(self.mpi.Ibarrier())
        else:
            self.mpi.Barrier()

    def _exchange(self, payload: bytes) -> list[bytes]:
        return exchange_payloads(self.mpi, payload)


def _by_terms(dtype: Any, op: str) -> bool:
    """Return True if the ranks exchange the terms of a reduction and combine them themselves."""
    return by_terms(dtype) or (op == "sum" and SATURATES and dtype.kind in "iu" and dtype.itemsize <= 2)


class _Lost:
    """Stands where the MPI communicator was, so that use after `free` is an error with words, at no cost before."""

    def __init__(self, axes: tuple[str, ...], why: str) -> None:
        self._axes, self._why = axes, why

    def __getattr__(self, name: str) -> Any:
        raise CommError(f"{name} on the communicator over {self._axes}, {self._why}")


def exchange_payloads(mpi: MPI.Comm, payload: bytes) -> list[bytes]:
    """Return every rank's payload, by an all-gather of 256 bytes a rank, and a second one if some payload is longer.

    Raises
    ------
    CommError
        If a rank is in another operation, whose data came instead.
    """
    mine = np.zeros(_HEAD, np.uint8)
    mine[:8] = np.frombuffer(_MARK + len(payload).to_bytes(8 - len(_MARK), "little"), np.uint8)
    head = min(len(payload), _HEAD - 8)
    mine[8 : 8 + head] = np.frombuffer(payload, np.uint8, head)
    everyone = np.empty((mpi.size, _HEAD), np.uint8)
    mpi.Allgather((mine, _HEAD, MPI.UINT8_T), (everyone, _HEAD, MPI.UINT8_T))
    odd = [rank for rank, row in enumerate(everyone) if row[: len(_MARK)].tobytes() != _MARK]
    if odd:
        raise CommError(
            f"rank {mpi.rank} of {mpi.size} got other data than ranks {odd} should have sent: they are in another "
            "operation; PARLINALG_CHECK=1 names the calls"
        )
    lengths = [int.from_bytes(row[len(_MARK) : 8].tobytes(), "little") for row in everyone]
    rests = [max(0, n - (_HEAD - 8)) for n in lengths]
    tails = np.empty(sum(rests), np.uint8)
    if tails.size:
        mpi.Allgatherv(
            (np.frombuffer(payload, np.uint8)[head:], rests[mpi.rank], MPI.UINT8_T), (tails, rests, None, MPI.UINT8_T)
        )
    parts, at = [], 0
    for row, length, rest in zip(everyone, lengths, rests, strict=True):
        parts.append(row[8 : 8 + min(length, _HEAD - 8)].tobytes() + tails[at : at + rest].tobytes())
        at += rest
    return parts


def world_ranks_of(mpi: MPI.Comm) -> tuple[int, ...]:
    """Return the members' ranks in COMM_WORLD (-1 for a process that another job started)."""
    group, world = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(group.size), world)
    group.Free()
    world.Free()
    return tuple(r if r >= 0 else -1 for r in ranks)


def nodes_of(mpi: MPI.Comm) -> tuple[int, ...]:
    """Return for each member the least rank on its node: ranks that share memory share a node."""
    local = mpi.Split_type(MPI.COMM_TYPE_SHARED, key=mpi.rank)
    least = np.array([mpi.rank], np.int64)
    local.Bcast(least, 0)
    local.Free()
    everyone = np.empty(mpi.size, np.int64)
    mpi.Allgather(least, everyone)
    return tuple(int(n) for n in everyone)


# ---------------------------------------------------------------------------------------------- blocks on a GPU
class Staged(Following):
    """An operation on host copies; when it is done, what it received is copied to the GPU."""

    __slots__ = ("_block", "_host")

    def __init__(self, inner: Handle, host: Any, block: Any) -> None:
        super().__init__(inner)
        self._host, self._block = host, block

    def _finish(self) -> None:
        if self._block is not None:
            backend_of(self._block).copy_from_host(self._host, self._block)
        self._host = self._block = None


def to_host(block: Any) -> Any:
    """Return a staging copy of `block`, complete on return."""
    backend = backend_of(block)
    host = backend.staging(block.size, block.dtype)
    backend.copy_to_host(block, host)
    return host


def through_host(read: Any, written: Any, run: Callable[[Any, Any], Handle], wait: bool) -> Handle:
    """Run `run(read, written)` on host copies of these blocks (None where there is none; one block may be both)."""
    host_read = None if read is None else to_host(read)
    if written is None:
        host_written = None
    elif written is read:
        host_written = host_read
    else:
        host_written = backend_of(written).staging(written.size, written.dtype)
    handle = Staged(run(host_read, host_written), (host_read, host_written)[written is not None], written)
    if wait:
        handle.wait()
        return DONE
    return handle
