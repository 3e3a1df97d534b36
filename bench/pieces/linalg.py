"""Solving and factoring by one library, timed: `linalg.py LIBRARY ROUTINE M N REPEATS DTYPE`.

LAPACK (by SciPy) in one process; parlinalg and Heat under mpiexec.  `qr` makes Q and R, `solve` and `lstsq` have 16
right-hand sides, `eigh` and `svd` make vectors.  Each repeat is from a barrier to the last rank's end, from arrays at
rest to arrays at rest, and memory is the most that a rank's process held above what it held at the start.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

COLUMNS = 16
LIBRARY, ROUTINE, DTYPE = sys.argv[1], sys.argv[2], sys.argv[6]
M, N, REPEATS = map(int, sys.argv[3:6])
Operation = Callable[[], Any]


def lapack() -> Operation:
    import numpy as np
    from scipy import linalg

    rng = np.random.default_rng(0)
    a = np.asfortranarray(rng.random((M, N)).astype(DTYPE) * 2 - 1)
    b = np.asfortranarray(rng.random((M, COLUMNS)).astype(DTYPE))
    if ROUTINE == "cholesky":
        a += 2 * N * np.eye(N, dtype=DTYPE)
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
    if ROUTINE == "cholesky":
        a = a + 2 * N * pla.eye(N, dtype=a.dtype)
    linalg = pla.linalg
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
    seconds, before = [], memory()
    for _ in range(REPEATS + 1 if operation else 0):
        barrier()
        start = time.perf_counter()
        found = operation()
        barrier()
        seconds.append(time.perf_counter() - start)
        del found
    if rank == 0:
        print(json.dumps({"seconds": seconds[1:], "memory": memory() - before}))


if __name__ == "__main__":
    main()
