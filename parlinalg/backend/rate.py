"""How fast one rank multiplies matrices."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from parlinalg.backend import Backend

SIDE = 768  # of square matrices that a core multiplies at its full rate
LONG = 0.002  # seconds: products that take less do not show the full rate of a GPU
MOST_SIDE = 8192


def gemm_rate(backend: Backend, dtype: str, n: int = SIDE, seconds: float = 0.3, *, sustained: bool = False) -> float:
    """Floating-point operations a second of one rank's n×n products, called for so many seconds.

    Parameters
    ----------
    sustained : bool
        Over all calls, as where ranks share cores; by default that of the fastest call.
    """
    a = backend.from_host(np.random.default_rng(0).random((n, n)).astype(dtype))
    b = a.copy()
    a @ b
    backend.synchronize()
    first = before = perf_counter()
    best, calls = float("inf"), 0
    while calls == 0 or before - first < seconds:
        a @ b
        backend.synchronize()
        now = perf_counter()
        best, before, calls = min(best, now - before), now, calls + 1
    return 2 * n**3 / ((before - first) / calls if sustained else best)


def gemm_side(backend: Backend, dtype: str) -> int:
    """The side of square matrices that show the full rate of this backend: 768 on CPUs, more on GPUs."""
    n = SIDE
    while n < MOST_SIDE and 2 * n**3 / gemm_rate(backend, dtype, n, 0.0) < LONG:
        n *= 2
    return n
