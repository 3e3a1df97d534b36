"""A stand-in for `cupy.cuda.nccl` that carries out its calls over MPI, on the addresses it is given.

As in NCCL the calls between the outermost groupStart and groupEnd begin together, in the order in which they were made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

available = True
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT32, NCCL_FLOAT64 = 7, 8
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
TYPES = dict(zip(range(6), (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64), strict=True))
TYPES |= {NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}
OPS = {NCCL_SUM: MPI.SUM, NCCL_MAX: MPI.MAX, NCCL_MIN: MPI.MIN}

group: list[Callable[[], Any]] | None = None
depth = opened = 0


def get_unique_id() -> tuple[int, ...]:
    return tuple(range(-64, 64))


def groupStart() -> None:
    global group, depth
    depth += 1
    if depth == 1:
        group = []


def groupEnd() -> None:
    global group, depth
    depth -= 1
    if depth:
        return
    calls, group = group or [], None
    MPI.Request.Waitall([request for call in calls if (request := call()) is not None])


def at(address: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(TYPES[kind])
    return np.frombuffer((ctypes.c_byte * (count * dtype.itemsize)).from_address(address), dtype)


def soon(call: Callable[[], Any]) -> None:
    if group is not None:
        group.append(call)
    elif (request := call()) is not None:
        request.Wait()


class NcclCommunicator:
    def __init__(self, size: int, unique: tuple[int, ...], rank: int) -> None:
        global opened
        assert unique == get_unique_id()
        self.mpi = members.pop()
        assert (self.mpi.size, self.mpi.rank) == (size, rank)
        opened += 1

    def destroy(self) -> None:
        global opened
        self.mpi.Free()
        opened -= 1

    def allGather(self, send: int, recv: int, n: int, kind: int, stream: int) -> None:
        soon(lambda: self.mpi.Allgather(at(send, n, kind), at(recv, n * self.mpi.size, kind)))

    def reduceScatter(self, send: int, recv: int, n: int, kind: int, op: int, stream: int) -> None:
        soon(lambda: self.mpi.Reduce_scatter_block(at(send, n * self.mpi.size, kind), at(recv, n, kind), OPS[op]))

    def allReduce(self, send: int, recv: int, n: int, kind: int, op: int, stream: int) -> None:
        assert send == recv
        soon(lambda: self.mpi.Allreduce(MPI.IN_PLACE, at(recv, n, kind), OPS[op]))

    def reduce(self, send: int, recv: int, n: int, kind: int, op: int, root: int, stream: int) -> None:
        into = at(recv, n, kind) if self.mpi.rank == root else None
        soon(lambda: self.mpi.Ireduce(at(send, n, kind), into, OPS[op], root))

    def broadcast(self, send: int, recv: int, n: int, kind: int, root: int, stream: int) -> None:
        if self.mpi.rank == root and send != recv:
            at(recv, n, kind)[...] = at(send, n, kind)
        soon(lambda: self.mpi.Ibcast(at(recv, n, kind), root))

    def send(self, address: int, n: int, kind: int, peer: int, stream: int) -> None:
        assert group is not None
        soon(lambda: self.mpi.Isend(at(address, n, kind), peer))

    def recv(self, address: int, n: int, kind: int, peer: int, stream: int) -> None:
        assert group is not None
        soon(lambda: self.mpi.Irecv(at(address, n, kind), peer))


members: list[MPI.Intracomm] = []
"""The communicators over which the next NcclCommunicators talk."""
