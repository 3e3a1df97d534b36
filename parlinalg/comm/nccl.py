"""NCCL through CuPy: collectives between GPUs without a detour through the hosts, one GPU a rank.

NCCL's operations are work on CuPy's current stream: "done" means done in the order of that stream, and a handle is a
CUDA event.  Its numbers of elements are even, so uneven collectives are groups of rooted ones.  What it lacks goes
through the communicator it was made over: NumPy blocks, messages with tags, barriers, and reductions of 16-bit
integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl

from parlinalg import tunables
from parlinalg.comm.base import DONE, Block, Comm, Handle, by_terms, combine_terms
from parlinalg.comm.group import Call
from parlinalg.comm.single import SingleComm
from parlinalg.comm.split import starts
from parlinalg.errors import CommError


def _numbers() -> dict[str, tuple[int, int]]:
    """Return by dtype the NCCL type that reduces it, and how many of those make one element."""
    return {
        "float32": (nccl.NCCL_FLOAT32, 1),
        "float64": (nccl.NCCL_FLOAT64, 1),
        "complex64": (nccl.NCCL_FLOAT32, 2),
        "complex128": (nccl.NCCL_FLOAT64, 2),
        "int8": (nccl.NCCL_INT8, 1),
        "uint8": (nccl.NCCL_UINT8, 1),
        "bool": (nccl.NCCL_UINT8, 1),
        "int32": (nccl.NCCL_INT32, 1),
        "uint32": (nccl.NCCL_UINT32, 1),
        "int64": (nccl.NCCL_INT64, 1),
        "uint64": (nccl.NCCL_UINT64, 1),
    }


class NcclHandle(Handle):
    """Work on a stream and the blocks it uses; whoever waits makes the current stream wait, not the host."""

    __slots__ = ("_blocks", "_event")

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(cupy.cuda.get_current_stream())

    def wait(self) -> None:
        if self._blocks is not None:
            cupy.cuda.get_current_stream().wait_event(self._event)
            self._blocks = None

    def test(self) -> bool:
        if self._blocks is not None and self._event.done:
            self._blocks = None
        return self._blocks is None


class NcclComm(Comm):
    """Ranks that exchange CuPy blocks through NCCL and everything else through `inner`, which this object owns."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner.size, inner.rank, inner.axes, inner.world_ranks, inner.nodes, inner.books, inner.checked)
        self.inner = inner
        unique = nccl.get_unique_id() if inner.rank == 0 else None
        kind, values = inner.share(None if unique is None else [type(unique).__name__, list(unique)], others="alike")[0]
        self._nccl = nccl.NcclCommunicator(inner.size, bytes(values) if kind == "bytes" else tuple(values), inner.rank)
        self._types = _numbers()
        self._ops = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX, "min": nccl.NCCL_MIN}

    def sub(self, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        return over(self.inner.sub(ranks, axes))

    def cartesian(self, sizes: Mapping[str, int]) -> Comm | None:
        made = self.inner.cartesian(sizes)
        return None if made is None else over(made)

    def free(self) -> None:
        cupy.cuda.get_current_stream().synchronize()
        self._nccl.destroy()
        self.inner.free()

    # ------------------------------------------------------------------------------------------------ primitives

    def _all_gather(self, send: Block, recv: Block, counts: Sequence[int], wait: bool) -> Handle:
        if isinstance(send, np.ndarray):
            return self.inner._all_gather(send, recv, counts, wait)
        stream, item, to = _stream(), send.itemsize, recv.data.ptr
        if _even(counts):
            self._nccl.allGather(send.data.ptr, to, send.nbytes, nccl.NCCL_UINT8, stream)
            return self._handle((send, recv), wait)
        with _Group():
            for root, (at, n) in enumerate(zip(starts(counts), counts, strict=True)):
                if n:
                    source = send.data.ptr if root == self.rank else to + at * item
                    self._nccl.broadcast(source, to + at * item, n * item, nccl.NCCL_UINT8, root, stream)
        return self._handle((send, recv), wait)

    def _reduce_scatter(self, send: Block, recv: Block, counts: Sequence[int], op: str, wait: bool) -> Handle:
        if not isinstance(send, np.ndarray) and by_terms(send.dtype):
            own = counts[self.rank]
            terms = cupy.empty((self.size, own), send.dtype)
            self._all_to_all(send, counts, terms, [own] * self.size, True)
            combine_terms(terms, recv.reshape(-1), op)
            return self._handle((terms, recv), wait)
        if isinstance(send, np.ndarray) or send.dtype.name not in self._types:
            return self.inner._reduce_scatter(send, recv, counts, op, wait)
        (kind, parts), stream, step = self._types[send.dtype.name], _stream(), send.itemsize
        if _even(counts):
            self._nccl.reduceScatter(send.data.ptr, recv.data.ptr, recv.size * parts, kind, self._ops[op], stream)
            return self._handle((send, recv), wait)
        with _Group():
            for root, (at, n) in enumerate(zip(starts(counts), counts, strict=True)):
                if n:
                    source = send.data.ptr + at * step
                    into = recv.data.ptr if root == self.rank else source  # read at the root alone
                    self._nccl.reduce(source, into, n * parts, kind, self._ops[op], root, stream)
        return self._handle((send, recv), wait)

    @property
    def packs(self) -> bool:
        return False

    def _joins(self, whole: Block) -> bool:
        return not isinstance(whole, np.ndarray) or whole.nbytes <= tunables.GROUPED_PIECE * self.size

    def _together(self, op: str, calls: Sequence[Call], counts: Sequence[int], reduction: str) -> Handle:
        dtype = calls[0].send.dtype
        summed = op == "reduce_scatter"
        if isinstance(calls[0].send, np.ndarray) or (summed and not by_terms(dtype) and dtype.name not in self._types):
            return super()._together(op, calls, counts, reduction)
        terms = [cupy.empty((self.size, c.recv.size), dtype) for c in calls] if summed and by_terms(dtype) else []
        with _Group():
            for i, (send, recv, each) in enumerate(calls):
                if not summed:
                    self._all_gather(send, recv, each, True)
                elif not terms:
                    self._reduce_scatter(send, recv, each, reduction, True)
                else:
                    self._all_to_all(send, each, terms[i], [recv.size] * self.size, True)
        for call, arrived in zip(calls, terms, strict=False):
            combine_terms(arrived, call.recv.reshape(-1), reduction)
        return self._handle((calls, terms), False)

    def _all_reduce(self, buffer: Block, op: str, wait: bool) -> Handle:
        if not isinstance(buffer, np.ndarray) and by_terms(buffer.dtype):
            n, size = buffer.size, self.size
            counts = [n // size + (r < n % size) for r in range(size)]
            own = cupy.empty(counts[self.rank], buffer.dtype)
            self._reduce_scatter(buffer, own, counts, op, True)
            return self._all_gather(own, buffer, counts, wait)
        if isinstance(buffer, np.ndarray) or buffer.dtype.name not in self._types:
            return self.inner._all_reduce(buffer, op, wait)
        kind, parts = self._types[buffer.dtype.name]
        at = buffer.data.ptr
        self._nccl.allReduce(at, at, buffer.size * parts, kind, self._ops[op], _stream())
        return self._handle(buffer, wait)

    def _broadcast(self, buffer: Block, root: int, wait: bool) -> Handle:
        if isinstance(buffer, np.ndarray):
            return self.inner._broadcast(buffer, root, wait)
        at = buffer.data.ptr
        self._nccl.broadcast(at, at, buffer.nbytes, nccl.NCCL_UINT8, root, _stream())
        return self._handle(buffer, wait)

    def _all_to_all(
        self, send: Block, send_counts: Sequence[int], recv: Block, recv_counts: Sequence[int], wait: bool
    ) -> Handle:
        if isinstance(send, np.ndarray):
            return self.inner._all_to_all(send, send_counts, recv, recv_counts, wait)
        me, stream, item = self.rank, _stream(), send.itemsize
        give_at, get_at = starts(send_counts), starts(recv_counts)
        recv.reshape(-1)[get_at[me] : get_at[me] + recv_counts[me]] = send.reshape(-1)[
            give_at[me] : give_at[me] + send_counts[me]
        ]
        with _Group():
            for peer in range(self.size):
                if peer != me and send_counts[peer]:
                    at = send.data.ptr + give_at[peer] * item
                    self._nccl.send(at, send_counts[peer] * item, nccl.NCCL_UINT8, peer, stream)
                if peer != me and recv_counts[peer]:
                    at = recv.data.ptr + get_at[peer] * item
                    self._nccl.recv(at, recv_counts[peer] * item, nccl.NCCL_UINT8, peer, stream)
        return self._handle((send, recv), wait)

    def _send(self, buffer: Block, to: int, tag: int, wait: bool) -> Handle:
        # NCCL knows no tags, and a send there blocks the stream until its receive comes: two ranks that both send first
        # would wait for ever.
        return self.inner._send(buffer, to, tag, wait)

    def _receive(self, buffer: Block, source: int, tag: int, wait: bool) -> Handle:
        return self.inner._receive(buffer, source, tag, wait)

    def _barrier(self) -> None:
        cupy.cuda.get_current_stream().synchronize()
        self.inner._barrier()

    def _exchange(self, payload: bytes) -> list[bytes]:
        return self.inner._exchange(payload)

    @staticmethod
    def _handle(blocks: Any, wait: bool) -> Handle:
        """Later work on the stream comes after the operation, so one that is waited for needs nothing more."""
        return DONE if wait else NcclHandle(blocks)


class _Group:
    """NCCL calls that start together."""

    def __enter__(self) -> None:
        nccl.groupStart()

    def __exit__(self, *error: object) -> None:
        nccl.groupEnd()


def _stream() -> int:
    return int(cupy.cuda.get_current_stream().ptr)


def _even(counts: Sequence[int]) -> bool:
    return list(counts).count(counts[0]) == len(counts)


def over(comm: Comm) -> Comm:
    """Return a communicator of NCCL over the ranks of `comm`, whose GPUs are known to fit; one of one rank as it is."""
    return comm if isinstance(comm, SingleComm) or comm.size == 1 else NcclComm(comm)


def nccl_over(comm: Comm) -> Comm:
    """Return a communicator over NCCL of the same ranks, for CuPy blocks, which owns `comm`.  Collective.

    Raises
    ------
    CommError
        On every rank, if some rank has no NCCL or no GPU, or two ranks use the same GPU, which NCCL does not allow:
        such ranks talk through `comm` itself.
    """
    found = comm.share(_gpu(), others="by rank")
    problems = [f"rank {rank}: {gpu['problem']}" for rank, gpu in enumerate(found) if "problem" in gpu]
    users: dict[tuple[int, str], list[int]] = {}
    for rank, gpu in enumerate(found):
        if "bus" in gpu:
            users.setdefault((comm.nodes[rank], gpu["bus"]), []).append(rank)
    problems += [f"the ranks {ranks} share the GPU {bus}" for (_, bus), ranks in users.items() if len(ranks) > 1]
    if problems:
        raise CommError(
            f"NCCL needs one GPU a rank: {'; '.join(problems)}; start one rank a GPU, or let the blocks go through MPI"
        )
    return over(comm)


def _gpu() -> dict[str, str]:
    """Return the GPU of this process, or why NCCL cannot use one."""
    if not getattr(nccl, "available", False):
        return {"problem": "CuPy has no NCCL (pip install nvidia-nccl-cu13)"}
    try:
        return {"bus": str(cupy.cuda.Device().pci_bus_id)}
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return {"problem": f"CUDA answers {error}"}
