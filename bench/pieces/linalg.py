"""Solving and factoring by one library, timed: `linalg.py LIBRARY ROUTINE M N REPEATS DTYPE`.

LAPACK (by SciPy) in one process; parlinalg and Heat under mpiexec.  `qr` makes Q and R, `solve` and `lstsq` have 16
right-hand sides, `eigh` and `svd` make vectors, and `cg` is one of 20 iterations.  Each repeat is from a barrier to the
last rank's end, from arrays at rest to arrays at rest, and memory is the most that a rank's process held above what it
held at the start.  After each repeat of `cg` all ranks read their parts of the matrix once, as a product with a vector
(`gemv`) and as one long sum of squares (`read`), in seconds.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

COLUMNS = 16
ITERATIONS = 20
LIBRARY, ROUTINE, DTYPE = sys.argv[1], sys.argv[2], sys.argv[6]
M, N, REPEATS = map(int, sys.argv[3:6])
Operation = Callable[[], Any]
BLOCKS: list[Any] = []
"""The part of the matrix that this process reads in an iteration of `cg`."""


def lapack() -> Operation:
    import numpy as np
    from scipy import linalg

    rng = np.random.default_rng(0)
    a = np.asfortranarray(rng.random((M, N)).astype(DTYPE) * 2 - 1)
    b = np.asfortranarray(rng.random((M, COLUMNS)).astype(DTYPE))
    if ROUTINE in ("cholesky", "cg"):
        a.reshape(-1, order="F")[:: N + 1] += 2 * N
    if ROUTINE == "cg":
        from scipy.sparse.linalg import cg

        BLOCKS.append(a.T)
        return lambda: cg(a.T, b[:, 0], rtol=0, maxiter=ITERATIONS)
    unchecked = {"check_finite": False}
    return {
        "cholesky": lambda: linalg.cholesky(a, lower=True, **unchecked),
        "lu": lambda: linalg.lu_factor(a, **unchecked),
        "solve": lambda: linalg.lu_solve(linalg.lu_factor(a, **unchecked), b, **unchecked),
        "qr": lambda: linalg.qr(a, mode="economic", **unchecked),
        "lstsq": lambda: linalg.lstsq(a, b, lapack_driver="gelsd", **unchecked),
        "eigh": lambda: linalg.eigh(a, driver="evd", **unchecked),
        "svd": lambda: linalg.svd(a, full_matrices=False, **unchecked),
    }[ROUTINE]


def parlinalg() -> Operation:
    import parlinalg as pla

    rng = pla.random.default_rng(0)
    a = rng.uniform(-1, 1, size=(M, N)).astype(DTYPE)
    b = rng.uniform(size=(M, COLUMNS)).astype(DTYPE)
    linalg = pla.linalg
    if ROUTINE == "cholesky":
        a = a + 2 * N * pla.eye(N, dtype=a.dtype)
    if ROUTINE == "cg":  # diagonally dominant, without a second matrix
        rows, columns = a.layout.block(a.shape, a.grid.sizes, a.grid.coords)
        for i in range(max(rows.start, columns.start), min(rows.stop, columns.stop)):
            a.block[i - rows.start, i - columns.start] += 2 * N
        BLOCKS.append(a.block)
        return lambda: linalg.cg(a, b[:, 0], rtol=0, maxiter=ITERATIONS)
    return {
        "cholesky": lambda: linalg.cholesky(a),
        "lu": lambda: linalg.lu_factor(a),
        "solve": lambda: linalg.solve(a, b),
        "qr": lambda: linalg.qr(a),
        "lstsq": lambda: linalg.lstsq(a, b),
        "eigh": lambda: linalg.eigh(a),
        "svd": lambda: linalg.svd(a, full_matrices=False),
    }[ROUTINE]


def heat() -> Operation | None:
    import heat as ht

    ht.random.seed(0)
    a = ht.random.rand(M, N, split=0, dtype=getattr(ht, DTYPE))
    return {"qr": lambda: ht.linalg.qr(a), "svd": lambda: ht.linalg.svd(a)}.get(ROUTINE) if M > 4 * N else None


def memory() -> int:
    """The most bytes that this process has held so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    barrier: Operation = lambda: None  # noqa: E731
    rank = 0
    if LIBRARY != "lapack":
        from mpi4py import MPI

        barrier, rank = MPI.COMM_WORLD.Barrier, MPI.COMM_WORLD.Get_rank()
    operation = globals()[LIBRARY]()

    def timed(action: Operation) -> float:
        barrier()
        start = time.perf_counter()
        found = action()
        barrier()
        del found
        return time.perf_counter() - start

    seconds, before = [], memory()
    limits: dict[str, list[float]] = {}
    products = ITERATIONS + 1 if ROUTINE == "cg" else 1
    for _ in range(REPEATS + 1 if operation else 0):
        seconds.append(timed(operation) / products)
        for name, action in reading().items():
            limits.setdefault(name, []).append(timed(action))
    if rank == 0:
        limits = {name: values[1:] for name, values in limits.items()}
        print(json.dumps({"seconds": seconds[1:], "memory": memory() - before, **limits}))


def reading() -> dict[str, Operation]:
    """Ways to read this process's part of the matrix once; none but for `cg`."""
    if not BLOCKS:
        return {}
    import numpy as np

    block = BLOCKS[0]
    flat, x, y = block.reshape(-1), np.ones(block.shape[1], block.dtype), np.empty(len(block), block.dtype)
    return {"gemv": lambda: np.dot(block, x, out=y), "read": lambda: np.dot(flat, flat)}


if __name__ == "__main__":
    main()
