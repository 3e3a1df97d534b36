"""How fast one rank multiplies matrices."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from parlinalg.backend import Backend


def gemm_rate(backend: Backend, dtype: str, n: int = 768, seconds: float = 0.3, *, sustained: bool = False) -> float:
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
    while before - first < seconds:
        a @ b
        backend.synchronize()
        now = perf_counter()
        best, before, calls = min(best, now - before), now, calls + 1
    return 2 * n**3 / ((before - first) / calls if sustained else best)
