"""Optimizer updates, in place over flat arrays.

Each update is a chain of elementwise operations that goes over the arrays a tile at a time, so that on a CPU what
lies between the first and the last stays in the cache.  Parameters and gradients in 16 bits are updated in float32.

Updates whose size depends on norms of whole parameters, LAMB's and LARS's, are two passes: one that gives the terms of
the norms, and one that makes the step.  What lies between the two is computed twice, not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, cuda, namespace
from parlinalg.backend.compiled import loop
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import example, in_tiles, kernel, runs

Array = Any
CAST = 1 << 24
"""Elements of gradients that are cast at a time on a GPU."""


@kernel()
def sgd(
    p: Array, g: Array, m: Array | None, *, lr: float, momentum: float, nesterov: bool, weight_decay: float,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Make a step of gradient descent: `d = factor g + weight_decay p`; `m = momentum m + d`; `p -= lr m`.

    With `nesterov` the step is `p -= lr (d + momentum m)`; without momentum (m None) `p -= lr d`.
    """
    xp = namespace(p)
    for part, (s, t, u) in tiles(p, 3):
        q, d = read(p[part], s.dtype), scaled(g[part], factor, u)
        if weight_decay:
            xp.multiply(q, weight_decay, out=s)
            d = xp.add(d, s, out=s)
        if m is not None:
            v = m[part]
            v *= momentum
            v += d
            if nesterov:
                xp.multiply(v, momentum, out=t)
                t += d
            d = t if nesterov else v
        xp.multiply(d, lr, out=s)
        subtract(p[part], q, s)


def adam(
    p: Array, g: Array, m: Array, v: Array, *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, decoupled: bool, step: int, factor: float = 1.0,
) -> None:  # fmt: skip
    """Make step number `step` (from 1) of Adam (Kingma and Ba, 2015), or `decoupled` AdamW (Loshchilov, Hutter, 2019).

    `m = β₁ m + (1 - β₁) g`; `v = β₂ v + (1 - β₂) g²`; `p -= lr (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + eps)`.  Weight
    decay adds `weight_decay p` to g, or, decoupled, first multiplies p by `1 - lr weight_decay`.  Gradients are
    multiplied by `factor` as they are read.
    """
    b1, b2 = betas
    root = math.sqrt(1 - b2**step)
    rate, tiny = lr / (1 - b1**step) * root, eps * root  # the correction of v, taken out of the root
    decays = (0.0, lr * weight_decay) if decoupled else (weight_decay, 0.0)
    numbers = (b1, 1 - b1, b2, 1 - b2, rate, tiny, *decays, factor)
    if not backend_of(p).cuda or g.dtype == p.dtype or p.dtype != work_dtype(g.dtype):
        adam_step(p, g, m, v, numbers)
        return
    for at in range(0, p.size, CAST):  # masters of 16-bit parameters: the CUDA form reads blocks of one dtype
        part = slice(at, at + CAST)
        adam_step(p[part], g[part].astype(p.dtype), m[part], v[part], numbers)


@kernel(alike=2)
def adam_step(p: Array, g: Array, m: Array, v: Array, numbers: tuple[float, ...]) -> None:
    """Make a step of Adam.

    The numbers are β₁, 1 - β₁, β₂, 1 - β₂, the rate and the ε that hold the corrections, the shares of p that are
    added to g and taken off p, and what g is multiplied by.
    """
    xp = namespace(p)
    b1, c1, b2, c2, rate, tiny, coupled, decay, factor = numbers
    for part, (s, t, u) in tiles(p, 3):
        q, d, mean, square = read(p[part], s.dtype), scaled(g[part], factor, u), m[part], v[part]
        if coupled:
            xp.multiply(q, coupled, out=t)
            d = xp.add(d, t, out=t)
        mean *= b1
        mean += xp.multiply(d, c1, out=s)
        square *= b2
        xp.multiply(d, d, out=s)
        s *= c2
        square += s
        xp.sqrt(square, out=s)
        s += tiny
        xp.divide(mean, s, out=s)
        s *= rate
        if decay:
            s += xp.multiply(q, decay, out=t)
        subtract(p[part], q, s)


@loop()
def _adam_loop(p: Any, g: Any, m: Any, v: Any, numbers: Any) -> None:
    """Every operation is one of the plain form's, so that tiles of any size give the same bits."""
    b1, c1, b2, c2, rate, tiny, coupled, decay, factor = numbers
    for i in range(p.size):
        d = g[i] * factor + coupled * p[i]
        mean = m[i] * b1 + d * c1
        square = v[i] * b2 + d * d * c2
        m[i] = mean
        v[i] = square
        p[i] -= mean / (math.sqrt(square) + tiny) * rate + decay * p[i]


@adam_step.compiled
def _(p: Array, g: Array, m: Array, v: Array, numbers: tuple[float, ...]) -> Any:
    if not m.dtype == v.dtype == p.dtype or not all(a.flags.c_contiguous for a in (p, g, m, v)):
        return NotImplemented
    return _adam_loop(p, g, m, v, tuple(map(p.dtype.type, numbers)))


@adam_step.cuda(r"""
extern "C" __global__ void pla_adam(T* p, const T* g, W* m, W* v, Int n, W b1, W c1, W b2, W c2, W rate, W tiny,
                                    W coupled, W decoupled, W factor) {
    ELEMENTS(i, n)
    W q = (W)p[i], d = factor * (W)g[i] + coupled * q;
    W a = b1 * m[i] + c1 * d, b = b2 * v[i] + c2 * d * d;
    m[i] = a;
    v[i] = b;
    p[i] = (T)(q - rate * a / (sqrt(b) + tiny) - decoupled * q);
}
""")
def _(p: Array, g: Array, m: Array, v: Array, numbers: tuple[float, ...]) -> Any:
    n, work = p.size, work_dtype(p.dtype)
    if not all(a.flags.c_contiguous for a in (p, g, m, v)) or not m.dtype == v.dtype == work:
        return NotImplemented
    return cuda.launch_kernel(
        "adam", p, (-(-n // tunables.CUDA_THREADS),), p, g, m, v, np.int64(n), *map(work.type, numbers)
    )


# ------------------------------------------------------------------ LAMB and LARS


@kernel()
def lamb_moments(g: Array, m: Array, v: Array, *, betas: tuple[float, float], factor: float) -> None:
    """Update the moments: `m = β₁ m + (1 - β₁) factor g`; `v = β₂ v + (1 - β₂) (factor g)²`."""
    xp = namespace(g)
    b1, b2 = betas
    for part, (s, t) in tiles(m, 2):
        d, mean, square = scaled(g[part], factor, t), m[part], v[part]
        mean *= b1
        mean += xp.multiply(d, 1 - b1, out=s)
        square *= b2
        xp.multiply(d, d, out=s)
        s *= 1 - b2
        square += s


@kernel()
def lamb_step(
    p: Array, m: Array, v: Array, *, rate: float | None, betas: tuple[float, float], eps: float, weight_decay: float,
    step: int,
) -> Array:  # fmt: skip
    """Take `rate u` off p, `u = m̂ / (√v̂ + eps) + weight_decay p`; with no rate, return the sum of squares of u.

    m̂ and v̂ are the moments of step number `step` (from 1), corrected for their start at zero.
    """
    xp = namespace(p)
    b1, b2 = betas
    root = math.sqrt(1 - b2**step)
    share, tiny = root / (1 - b1**step), eps * root
    total: Any = 0.0
    for part, (s, t) in tiles(p, 2):
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


@kernel()
def lars_step(
    p: Array, g: Array, m: Array | None, *, rate: float, momentum: float, weight_decay: float, factor: float
) -> None:
    """Make the step `d = rate (factor g + weight_decay p)`; `m = momentum m + d`; `p -= m`, or without m `p -= d`."""
    xp = namespace(p)
    for part, (s, t) in tiles(p, 2):
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


# ------------------------------------------------------------------ updates of matrices


@kernel()
def muon_momentum(g: Array, m: Array, out: Array, *, momentum: float, nesterov: bool, factor: float) -> None:
    """Set `m = momentum m + (1 - momentum) factor g`, and `out` to m, or to `momentum m + (1 - momentum) factor g`."""
    xp = namespace(m)
    for part, (s,) in tiles(m, 1):
        mean, to = m[part], out[part]
        xp.multiply(scaled(g[part], factor, s), 1 - momentum, out=s)
        mean *= momentum
        mean += s
        if nesterov:
            xp.multiply(mean, momentum, out=to)
            to += s
        else:
            to[...] = mean


@kernel()
def matrix_step(p: Array, d: Array, *, rate: float, decay: float) -> None:
    """Make the step `p = (1 - decay) p - rate d`."""
    xp = namespace(p)
    for part, (s, t) in tiles(p, 2):
        q = read(p[part], s.dtype)
        xp.multiply(d[part], rate, out=s)
        if decay:
            s += xp.multiply(q, decay, out=t)
        subtract(p[part], q, s)


# ------------------------------------------------------------------ sums, and work by tiles


@kernel()
def square_sum(x: Array) -> Array:
    """Return the sum of squares of a flat array, in float64, as an array without dims on its device."""
    xp = namespace(x)
    total = xp.zeros((), np.float64)
    for at in runs(x.size, _tile(x), x):
        part = read(x[at], work_dtype(x.dtype))
        total += xp.dot(part, part)
    return total


@kernel()
def all_finite(x: Array) -> bool:
    """Return True if no element of a flat array is infinite or NaN."""
    xp = namespace(x)
    return all(bool(xp.isfinite(x[at]).all()) for at in runs(x.size, _tile(x), x))


@kernel()
def scale(x: Array, factor: float) -> None:
    """Multiply a flat array by a number in place."""
    x *= x.dtype.type(factor)


def _tile(like: Array) -> int:
    if in_tiles(like):
        return tunables.OPTIMIZER_TILE
    return tunables.OPTIMIZER_DEVICE_TILE if backend_of(like).values else max(1, like.size)


def scaled(x: Array, factor: float, out: Array) -> Array:
    """Return `factor x` in the dtype of `out`: x itself where nothing changes, else `out` with the values."""
    if x.dtype == out.dtype and factor == 1.0:
        return x
    if x.dtype == out.dtype:
        return namespace(x).multiply(x, out.dtype.type(factor), out=out)
    out[...] = x
    if factor != 1.0:
        out *= out.dtype.type(factor)
    return out


def read(x: Array, dtype: Any) -> Array:
    """Return x in this dtype, itself where it has it."""
    return x if x.dtype == dtype else x.astype(dtype)


def subtract(p: Array, q: Array, s: Array) -> None:
    """Set p to q - s, where q is p in the dtype of s."""
    if q.dtype == p.dtype:
        p -= s
    else:
        q -= s
        p[...] = q


def tiles(p: Array, scratch: int) -> Iterator[tuple[slice, list[Array]]]:
    """Yield the slices of the tiles of a flat array, each with scratch arrays of its length."""
    xp = namespace(p)
    size = min(p.size, _tile(p))
    spare = [xp.empty(size, work_dtype(p.dtype)) for _ in range(scratch)]
    for part in runs(p.size, max(1, size), p):
        yield part, [s[: part.stop - part.start] for s in spare]


def _tried(step: Callable[..., Any], moments: int) -> Callable[..., tuple[Array, ...]]:
    """Return a call of an update in place, on copies of p and of the moments: m, and m²."""

    def call(p: Array, g: Array, m: Array) -> tuple[Array, ...]:
        mean = m.reshape(-1).astype(work_dtype(p.dtype))
        state = (p.reshape(-1).copy(), *(mean, mean * mean)[:moments])
        step(state[0], g.reshape(-1), *state[1:])
        return state

    return call


def _lamb(p: Array, g: Array, m: Array, v: Array) -> None:
    lamb_moments(g, m, v, betas=(0.9, 0.99), factor=0.5)
    lamb_step(p, m, v, rate=0.01, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.1, step=3)


def _muon(p: Array, g: Array, m: Array) -> None:
    out = m.copy()
    muon_momentum(g, m, out, momentum=0.9, nesterov=True, factor=0.5)
    matrix_step(p, out, rate=0.1, decay=0.01)


def _scaled_sums(x: Array) -> tuple[Array, Array]:
    x = x.reshape(-1).copy()
    scale(x, 0.5 if all_finite(x) else 0.0)
    return x, square_sum(x)


_ADAM = partial(adam, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=3)
_SGD = partial(sgd, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
_LARS = partial(lars_step, rate=0.1, momentum=0.9, weight_decay=0.1, factor=0.5)
example("Adam", _tried(partial(_ADAM, decoupled=False), 2), "x", "g", "m")
example("AdamW", _tried(partial(_ADAM, decoupled=True), 2), "x", "g", "m")
example("SGD", _tried(_SGD, 1), "x", "g", "m")
example("LAMB", _tried(_lamb, 2), "x", "g", "m")
example("LARS", _tried(_LARS, 1), "x", "g", "m")
example("Muon", _tried(_muon, 1), "x", "g", "m")
example("sum of squares", _scaled_sums, "x")
