"""The latency and bandwidth of collectives on this machine, measured in a few seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from parlinalg.backend import Backend
from parlinalg.backend.blas import gemm_rate
from parlinalg.comm import Comm, open_comm
from parlinalg.grid import Grid
from parlinalg.linalg import blocks
from parlinalg.linalg.blocks import Machine

LATENCY_BYTES, BANDWIDTH_BYTES = 8, 4 * 2**20


def collectives(comm: Comm, backend: Backend) -> list[tuple[str, float, float]]:
    """Return each operation's name, its seconds for 8 bytes a rank, and the bytes a rank receives a second.

    Collective; the slowest rank's time counts.
    """
    rows = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        short = _timed(comm, *_call(comm, backend, name, LATENCY_BYTES), calls=50)
        call, received = _call(comm, backend, name, BANDWIDTH_BYTES)
        rows.append((name, short, received / _timed(comm, call, received, calls=4)))
    return rows


def machine(dtype: str) -> tuple[Machine, float]:
    """Return the constants of the model of factorizations on this machine, and the operations a second of a product.

    Collective over all ranks; the slowest one counts.  On one rank words and calls keep their usual constants.
    """
    comm = open_comm()
    with Grid({"ranks": comm.size}, comm) as grid:
        rate = min(comm.share(gemm_rate(grid.backend, dtype), others="alike"))
        found = blocks.machine()
        if comm.size > 1:
            rows = {name: row for name, *row in collectives(comm, grid.backend)}
            latency, bandwidth = rows["all_gather"][0], min(rows["all_gather"][1], rows["broadcast"][1])
            word = np.dtype(dtype).itemsize / bandwidth
            found = found._replace(word=word * rate, call=latency / math.log2(comm.size) * rate)
    return found, rate


def _call(comm: Comm, backend: Backend, name: str, size: int) -> tuple[Callable[[], Any], int]:
    """A call whose whole buffer has `size` bytes (at least 8 a rank), and the bytes a rank receives in it."""
    p = comm.size
    each = max(1, size // 8 // p)
    whole, own = (backend.zeros(n, np.float64) for n in (each * p, each))
    counts = [each] * p
    received = 8 * each * (p - 1)
    if name == "all_gather":
        return lambda: comm.all_gather(own, whole, counts), received
    if name == "reduce_scatter":
        return lambda: comm.reduce_scatter(whole, own, counts), received
    if name == "all_reduce":
        return lambda: comm.all_reduce(whole), 2 * received
    if name == "broadcast":
        return lambda: comm.broadcast(whole, 0), 8 * each * p
    out = backend.zeros(each * p, np.float64)
    return lambda: comm.all_to_all(whole, counts, out, counts), received


def _timed(comm: Comm, call: Callable[[], Any], received: int, calls: int) -> float:
    """Seconds a call, on the slowest rank: the best of three rounds."""
    call()
    best = float("inf")
    for _ in range(3):
        comm.barrier()
        start = perf_counter()
        for _ in range(calls):
            call()
        best = min(best, max(comm.share((perf_counter() - start) / calls, others="alike")))
    return best
