"""Solving and factoring by one library, timed: `linalg.py LIBRARY ROUTINE M N REPEATS DTYPE [memory]`.

LAPACK (by SciPy) in one process; parlinalg and Heat under mpiexec; Dask with one thread a rank (`BENCH_WORKERS`).  `qr`
and `pivoted-qr` make Q and R, `solve`, `triangular` and `lstsq` have 16 right-hand sides, `eigh` and `svd` make
vectors, and `cg` is one of 20 iterations.  A repeat takes from a barrier to a rank's end, the longest time of all
ranks, as ScaLAPACK's does, from arrays at rest to arrays at rest.  After each repeat of `cg` all ranks read their parts
of the matrix once, as a product with a vector (`gemv`) and as one long sum of squares (`read`), in seconds.

With `memory` nothing is timed.  The memory of a rank is the most that it holds in a run, above what it held before its
arrays were made, over the bytes of its blocks of the arrays that go in and come out; memory that ranks have in common
counts by shares (PSS).  That of the worst rank is told.

`linalg.py LIBRARY gpu SECONDS LONGEST REPEATS - JOBS` runs jobs [[routine, m, n, dtype], …] one after the other on one
GPU, by parlinalg on one rank, CuPy or PyTorch, and tells a list of lists of seconds.  A repeat ends with the device's
work.  The first run, which may compile kernels, never counts; one that takes a second is the last.  The list of a job
is empty that is not begun: because SECONDS are over, or the job before of its routine and dtype says that a run takes
more than LONGEST.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

COLUMNS = 16
ITERATIONS = 20
SMALL = 512
"""Rows and columns of a matrix by which all that the routine needs is loaded, compiled loops with it, before memory is
measured."""
LONG = 1.0
"""Seconds of a run on a GPU after which there is no other."""
LIBRARY, ROUTINE, DTYPE = sys.argv[1], sys.argv[2], sys.argv[6]
M, N, REPEATS = map(int, sys.argv[3:6])
SIDES = ROUTINE in ("solve", "triangular", "lstsq", "cg")


class Piece(NamedTuple):
    """A routine with its arguments, the bytes of this rank's blocks of them and of a result, and the blocks of `cg`."""

    run: Callable[[], Any]
    inputs: int = 0
    outputs: Callable[[Any], int] = lambda found: 0
    read: Any = None


def lapack(m: int, n: int) -> Piece:
    import numpy as np
    from scipy import linalg

    rng = np.random.default_rng(0)
    a = np.asfortranarray(rng.random((m, n)).astype(DTYPE) * 2 - 1)
    b = np.asfortranarray(rng.random((m, COLUMNS)).astype(DTYPE))
    if ROUTINE in ("cholesky", "cg", "triangular"):
        a.reshape(-1, order="F")[:: n + 1] += 2 * n
    if ROUTINE == "cg":
        from scipy.sparse.linalg import cg

        return Piece(lambda: cg(a.T, b[:, 0], rtol=0, maxiter=ITERATIONS), read=a.T)
    unchecked = {"check_finite": False}
    return Piece({
        "cholesky": lambda: linalg.cholesky(a, lower=True, **unchecked),
        "lu": lambda: linalg.lu_factor(a, **unchecked),
        "solve": lambda: linalg.lu_solve(linalg.lu_factor(a, **unchecked), b, **unchecked),
        "triangular": lambda: linalg.solve_triangular(a, b, **unchecked),
        "qr": lambda: linalg.qr(a, mode="economic", **unchecked),
        "pivoted-qr": lambda: linalg.qr(a, mode="economic", pivoting=True, **unchecked),
        "lstsq": lambda: linalg.lstsq(a, b, lapack_driver="gelsd", **unchecked),
        "eigh": lambda: linalg.eigh(a, driver="evd", **unchecked),
        "svd": lambda: linalg.svd(a, full_matrices=False, **unchecked),
        "pinv": lambda: linalg.pinv(a, **unchecked),
    }[ROUTINE])  # fmt: skip


def parlinalg(m: int, n: int) -> Piece:
    import numpy as np

    import parlinalg as pla

    rng, linalg = pla.random.default_rng(0), pla.linalg
    a = rng.uniform(-1, 1, size=(m, n), dtype=DTYPE)
    b = rng.uniform(size=(m, COLUMNS), dtype=DTYPE) if SIDES else None
    if ROUTINE in ("cholesky", "cg", "triangular"):  # diagonally dominant, without a second matrix
        rows, columns = a.layout.block(a.shape, a.grid.sizes, a.grid.coords)
        at = np.arange(max(rows.start, columns.start), min(rows.stop, columns.stop))
        a.block[at - rows.start, at - columns.start] += 2 * n

    def held(x: Any) -> int:
        """The bytes of this rank's blocks."""
        if hasattr(x, "apart"):
            return int(x.apart()[0].nbytes)  # a factorization
        return sum(map(held, x)) if isinstance(x, tuple) else int(x.block.nbytes) if hasattr(x, "block") else 0

    run = {
        "cholesky": lambda: linalg.cholesky(a),
        "lu": lambda: linalg.lu_factor(a),
        "solve": lambda: linalg.solve(a, b),
        "triangular": lambda: linalg.solve_triangular(a, b),
        "qr": lambda: linalg.qr(a),
        "pivoted-qr": lambda: linalg.qr(a, pivoting=True),
        "lstsq": lambda: linalg.lstsq(a, b),
        "eigh": lambda: linalg.eigh(a),
        "svd": lambda: linalg.svd(a, full_matrices=False),
        "pinv": lambda: linalg.pinv(a),
        "cg": lambda: linalg.cg(a, b[:, 0], rtol=0, maxiter=ITERATIONS),
    }[ROUTINE]
    return Piece(run, held((a, b)), held, a.block if ROUTINE == "cg" else None)


def heat(m: int, n: int) -> Piece:
    import heat as ht

    ht.random.seed(0)
    a = ht.random.rand(m, n, split=0, dtype=getattr(ht, DTYPE))
    b = ht.random.rand(m, COLUMNS, split=0, dtype=getattr(ht, DTYPE)) if SIDES else None
    if ROUTINE == "eigh":
        a = a + a.T.resplit(0)
    if ROUTINE == "triangular":
        a = ht.triu(a + 2 * n * ht.eye(n, split=0, dtype=a.dtype))

    def held(x: Any) -> int:
        return sum(map(held, x)) if isinstance(x, tuple) else int(x.larray.nbytes) if hasattr(x, "larray") else 0

    run = {
        "triangular": lambda: ht.linalg.solve_triangular(a, b),
        "qr": lambda: ht.linalg.qr(a),
        "eigh": lambda: ht.linalg.eigh(a),
        "svd": lambda: ht.linalg.svd(a),
    }[ROUTINE]
    return Piece(run, held((a, b)), held)


def dask(m: int, n: int) -> Piece:
    import dask.array as da
    import dask.base

    workers = int(os.environ.get("BENCH_WORKERS", "1"))
    tall = ROUTINE in ("qr", "svd", "lstsq")  # whole rows in a chunk, in at most as many chunks as it can merge at once
    chunks = (max(-(-m // 32), n), n) if tall else (n // 8, n // 8)
    a = da.random.default_rng(0).random((m, n), chunks=chunks).astype(DTYPE).persist()
    b = da.random.default_rng(1).random((m, COLUMNS), chunks=(chunks[0], COLUMNS)).astype(DTYPE).persist()
    if ROUTINE in ("cholesky", "triangular"):
        a = ((a + a.T) / 2 + 2 * n * da.eye(n, chunks=chunks[0], dtype=DTYPE)).persist()
    linalg = da.linalg
    graphs = {
        "cholesky": lambda: (linalg.cholesky(a, lower=True),),
        "lu": lambda: linalg.lu(a),
        "solve": lambda: (linalg.solve(a, b),),
        "triangular": lambda: (linalg.solve_triangular(a, b),),
        "qr": lambda: linalg.tsqr(a),
        "lstsq": lambda: linalg.lstsq(a, b),
        "svd": lambda: linalg.svd(a),
    }
    return Piece(lambda: dask.base.persist(*graphs[ROUTINE](), scheduler="threads", num_workers=workers))


def cupy(m: int, n: int) -> Piece:
    import cupy
    from cupyx.scipy import linalg as more

    linalg = cupy.linalg
    rng = cupy.random.default_rng(0)
    a, b = rng.random((m, n), DTYPE) * 2 - 1, rng.random((m, COLUMNS), DTYPE)
    if ROUTINE in ("cholesky", "triangular"):
        a += 2 * n * cupy.eye(n, dtype=DTYPE)
    return Piece({
        "cholesky": lambda: linalg.cholesky(a),
        "lu": lambda: more.lu_factor(a, check_finite=False),
        "solve": lambda: linalg.solve(a, b),
        "triangular": lambda: more.solve_triangular(a, b),
        "qr": lambda: linalg.qr(a),
        "lstsq": lambda: linalg.lstsq(a, b),
        "eigh": lambda: linalg.eigh(a),
        "svd": lambda: linalg.svd(a, full_matrices=False),
    }[ROUTINE])  # fmt: skip


def torch(m: int, n: int) -> Piece:
    import torch

    linalg, on = torch.linalg, {"dtype": getattr(torch, DTYPE), "device": "cuda"}
    a, b = torch.rand(m, n, **on) * 2 - 1, torch.rand(m, COLUMNS, **on)
    if ROUTINE in ("cholesky", "triangular"):
        a += 2 * n * torch.eye(n, **on)
    return Piece({
        "cholesky": lambda: linalg.cholesky(a),
        "lu": lambda: linalg.lu_factor(a),
        "solve": lambda: linalg.solve(a, b),
        "triangular": lambda: linalg.solve_triangular(a, b, upper=True),
        "qr": lambda: linalg.qr(a),
        "lstsq": lambda: linalg.lstsq(a, b),
        "eigh": lambda: linalg.eigh(a),
        "svd": lambda: linalg.svd(a, full_matrices=False),
    }[ROUTINE])  # fmt: skip


def on_gpu(jobs: list[tuple[str, int, int, str]], seconds: float, longest: float) -> list[list[float]]:
    """Return the seconds of the repeats of every job."""
    if LIBRARY == "parlinalg":
        import parlinalg as pla

        if not pla.Grid({"rank": 1}).backend.cuda:
            sys.exit("parlinalg finds no GPU that CuPy can use")
    if LIBRARY == "torch":
        from torch.cuda import synchronize
    else:
        from cupy.cuda import runtime

        synchronize = runtime.deviceSynchronize
    library, told = globals()[LIBRARY], []
    last: dict[tuple[str, str], tuple[int, float]] = {}
    end = time.perf_counter() + seconds

    def timed(run: Callable[[], Any]) -> float:
        synchronize()
        start = time.perf_counter()
        found = run()
        synchronize()
        took = time.perf_counter() - start
        del found
        return took

    for routine, m, n, dtype in jobs:
        globals().update(ROUTINE=routine, DTYPE=dtype, SIDES=routine in ("solve", "triangular", "lstsq"))
        size, took = last.get((routine, dtype), (0, 0.0))
        told.append([])
        if time.perf_counter() > end or (size and took * m * n * min(m, n) / size > longest):
            continue
        piece = library(m, n)
        timed(piece.run)
        while len(told[-1]) < REPEATS and max(told[-1], default=0.0) <= LONG:
            told[-1].append(timed(piece.run))
        last[routine, dtype] = m * n * min(m, n), min(told[-1])
        del piece
    return told


def reading(block: Any) -> dict[str, Callable[[], Any]]:
    """Ways to read this process's part of the matrix once; none but for `cg`."""
    if block is None:
        return {}
    import numpy as np

    flat, x, y = block.reshape(-1), np.ones(block.shape[1], block.dtype), np.empty(len(block), block.dtype)
    return {"gemv": lambda: np.dot(block, x, out=y), "read": lambda: np.dot(flat, flat)}


def resident() -> int:
    """The bytes that this process holds, of what it has in common with others its share."""
    with open("/proc/self/smaps_rollup") as file:
        found = re.search(r"^Pss:\s+(\d+) kB", file.read(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


@contextmanager
def watched(most: list[int]) -> Any:
    """Append the most bytes that this process holds within a `with` block."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        most[0] = max(most[0], resident())


def memory(library: Callable[[int, int], Piece], barrier: Callable[[], None]) -> float:
    """The most that this rank holds above its start, over the bytes of its blocks that go in and come out."""
    n = min(SMALL, N)
    library(n * max(1, M // N), n).run()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # parlinalg has glibc keep what is freed
        ctypes.CDLL(None).malloc_trim(0)
    barrier()
    before, most = resident(), [0]
    piece = library(M, N)
    barrier()
    with watched(most):
        found = piece.run()
        barrier()
    return (most[0] - before) / max(1, piece.inputs + piece.outputs(found))


def main() -> None:
    barrier: Callable[[], None] = lambda: None  # noqa: E731
    gather: Callable[[float], list[float]] = lambda x: [x]  # noqa: E731
    rank = 0
    if LIBRARY in ("parlinalg", "heat") and ROUTINE != "gpu":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        barrier, gather, rank = world.Barrier, world.allgather, world.Get_rank()
    if ROUTINE == "gpu":
        print(json.dumps(on_gpu(json.loads(sys.argv[7]), M, N)))
        return
    library = globals()[LIBRARY]
    if sys.argv[7:] == ["memory"]:
        worst = max(gather(memory(library, barrier)))
        if rank == 0:
            print(json.dumps({"memory": worst}))
        return
    piece = library(M, N)

    def timed(action: Callable[[], Any]) -> float:
        barrier()
        start = time.perf_counter()
        found = action()
        took = max(gather(time.perf_counter() - start))
        del found
        return took

    seconds: list[float] = []
    limits: dict[str, list[float]] = {}
    products = ITERATIONS + 1 if ROUTINE == "cg" else 1
    for _ in range(REPEATS + 1):  # the first one is not counted
        seconds.append(timed(piece.run) / products)
        for name, action in reading(piece.read).items():
            limits.setdefault(name, []).append(timed(action))
    if rank == 0:
        print(json.dumps({"seconds": seconds[1:], **{name: values[1:] for name, values in limits.items()}}))


if __name__ == "__main__":
    main()
