"""Updates whose size depends on norms of whole parameters, LAMB's and LARS's, in place over flat arrays.

Each is two passes: one that gives the terms of the norms, and one that makes the step, a chunk at a time as in
`kernels_optim`.  What lies between the two is computed twice, not kept.
"""

from __future__ import annotations

import math
from typing import Any

from parlinalg.backend import namespace
from parlinalg.backend.kernels_optim import chunks, read, scaled, square_sum, subtract

Array = Any


def lamb_moments(g: Array, m: Array, v: Array, *, betas: tuple[float, float], factor: float) -> None:
    """`m = β₁ m + (1 - β₁) factor g`; `v = β₂ v + (1 - β₂) (factor g)²`."""
    xp = namespace(g)
    b1, b2 = betas
    for part, (s, t) in chunks(m, 2):
        d, mean, square = scaled(g[part], factor, t), m[part], v[part]
        mean *= b1
        mean += xp.multiply(d, 1 - b1, out=s)
        square *= b2
        xp.multiply(d, d, out=s)
        s *= 1 - b2
        square += s


def lamb_step(
    p: Array, m: Array, v: Array, *, rate: float | None, betas: tuple[float, float], eps: float, weight_decay: float,
    step: int,
) -> Array:  # fmt: skip
    """`p -= rate u`, where `u = m̂ / (√v̂ + eps) + weight_decay p`; with no rate, the sum of squares of u.

    m̂ and v̂ are the moments of step number `step` (from 1), corrected for their start at zero.
    """
    xp = namespace(p)
    b1, b2 = betas
    root = math.sqrt(1 - b2**step)
    share, tiny = root / (1 - b1**step), eps * root
    total: Any = 0.0
    for part, (s, t) in chunks(p, 2):
        q = read(p[part], s.dtype)
        xp.sqrt(v[part], out=s)
        s += tiny
        xp.divide(m[part], s, out=s)
        s *= share
        if weight_decay:
            s += xp.multiply(q, weight_decay, out=t)
        if rate is None:
            total = total + square_sum(s)
        else:
            s *= rate
            subtract(p[part], q, s)
    return total


def lars_step(
    p: Array, g: Array, m: Array | None, *, rate: float, momentum: float, weight_decay: float, factor: float
) -> None:
    """`d = rate (factor g + weight_decay p)`; `m = momentum m + d`; `p -= m`, or without momentum `p -= d`."""
    xp = namespace(p)
    for part, (s, t) in chunks(p, 2):
        q = read(p[part], s.dtype)
        d = scaled(g[part], factor, t)
        if weight_decay:
            d = xp.add(d, xp.multiply(q, weight_decay, out=s), out=s)
        d = xp.multiply(d, rate, out=s)
        if m is not None:
            mean = m[part]
            mean *= momentum
            mean += d
            d = mean
        subtract(p[part], q, d)
