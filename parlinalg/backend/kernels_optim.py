"""Optimizer updates, in place over flat arrays, and the joining of blocks that lie side by side.

Each update is a chain of elementwise operations that goes over the arrays a chunk at a time, so that on a CPU what
lies between the first and the last stays in the cache.  Parameters and gradients in 16 bits are updated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import compiled, cuda, namespace

Array = Any


def work_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype that parameters of `dtype` are updated in, and their states have."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def sgd(
    p: Array, g: Array, m: Array | None, *, lr: float, momentum: float, nesterov: bool, weight_decay: float,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """One step of gradient descent: `d = factor g + weight_decay p`; `m = momentum m + d`; `p -= lr m`.

    With `nesterov` the step is `p -= lr (d + momentum m)`; without momentum (m None) `p -= lr d`.
    """
    xp = namespace(p)
    for part, (s, t, u) in chunks(p, 3):
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
    """Step number `step` (from 1) of Adam (Kingma and Ba, 2015), or, `decoupled`, AdamW (Loshchilov and Hutter, 2019).

    `m = β₁ m + (1 - β₁) g`; `v = β₂ v + (1 - β₂) g²`; `p -= lr (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + eps)`.  Weight
    decay adds `weight_decay p` to g, or, decoupled, first multiplies p by `1 - lr weight_decay`.  Gradients are
    multiplied by `factor` as they are read.
    """
    xp = namespace(p)
    b1, b2 = betas
    root = math.sqrt(1 - b2**step)
    rate, tiny = lr / (1 - b1**step) * root, eps * root  # the correction of v, taken out of the root
    decays = (0.0, lr * weight_decay) if decoupled else (weight_decay, 0.0)
    numbers = (b1, 1 - b1, b2, 1 - b2, rate, tiny, *decays, factor)
    if cuda.adam(p, g, m, v, *numbers):
        return
    if (loops := compiled.loops(p, g, m, v)) is not None and all(a.flags.c_contiguous for a in (p, g, m, v)):
        loops.adam(p, g, m, v, *map(p.dtype.type, numbers))
        return
    for part, (s, t, u) in chunks(p, 3):
        q, d, mean, square = read(p[part], s.dtype), scaled(g[part], factor, u), m[part], v[part]
        if weight_decay and not decoupled:
            xp.multiply(q, weight_decay, out=t)
            d = xp.add(d, t, out=t)
        mean *= b1
        mean += xp.multiply(d, 1 - b1, out=s)
        square *= b2
        xp.multiply(d, d, out=s)
        s *= 1 - b2
        square += s
        xp.sqrt(square, out=s)
        s += tiny
        xp.divide(mean, s, out=s)
        s *= rate
        if weight_decay and decoupled:
            s += xp.multiply(q, lr * weight_decay, out=t)
        subtract(p[part], q, s)


def square_sum(x: Array) -> Array:
    """The sum of squares of a flat array, in float64, as an array without dims on its device."""
    xp = namespace(x)
    total = xp.zeros((), np.float64)
    size = tunables.OPTIMIZER_CHUNK if xp is np else tunables.OPTIMIZER_DEVICE_CHUNK
    for at in range(0, x.size, size):
        part = read(x[at : at + size], work_dtype(x.dtype))
        total += xp.dot(part, part)
    return total


def all_finite(x: Array) -> bool:
    """Whether no element of a flat array is infinite or NaN."""
    xp = namespace(x)
    size = tunables.OPTIMIZER_CHUNK if xp is np else tunables.OPTIMIZER_DEVICE_CHUNK
    return all(bool(xp.isfinite(x[at : at + size]).all()) for at in range(0, x.size, size))


def scale(x: Array, factor: float) -> None:
    """Multiply a flat array by a number in place."""
    x *= x.dtype.type(factor)


def scaled(x: Array, factor: float, out: Array) -> Array:
    """`factor x` in the dtype of `out`: x itself where that is all it is, or else in `out`."""
    if x.dtype == out.dtype and factor == 1.0:
        return x
    if x.dtype == out.dtype:
        return namespace(x).multiply(x, out.dtype.type(factor), out=out)
    out[...] = x
    if factor != 1.0:
        out *= out.dtype.type(factor)
    return out


def read(x: Array, dtype: Any) -> Array:
    """x in this dtype, itself where it has it."""
    return x if x.dtype == dtype else x.astype(dtype)


def subtract(p: Array, q: Array, s: Array) -> None:
    """p = q - s, where q is p in the dtype of s."""
    if q.dtype == p.dtype:
        p -= s
    else:
        q -= s
        p[...] = q


def chunks(p: Array, scratch: int) -> Iterator[tuple[slice, list[Array]]]:
    """The slices of the chunks of a flat array, each with scratch arrays of its length."""
    xp = namespace(p)
    size = min(p.size, tunables.OPTIMIZER_CHUNK if xp is np else tunables.OPTIMIZER_DEVICE_CHUNK)
    spare = [xp.empty(size, work_dtype(p.dtype)) for _ in range(scratch)]
    for at in range(0, p.size, max(1, size)):
        n = min(size, p.size - at)
        yield slice(at, at + n), [s[:n] for s in spare]


def flat(block: Array) -> Array:
    """The elements of a block in C order, as a view where it lies so."""
    return block.reshape(-1) if block.flags.c_contiguous else block.copy(order="C").reshape(-1)


def follows(first: Array, second: Array) -> bool:
    """Whether `second` begins where `first` ends, in the same flat buffer."""
    return (
        first.base is second.base
        and isinstance(first.base, type(first))
        and first.base.dtype == first.dtype == second.dtype
        and first.base.flags.c_contiguous
        and first.flags.c_contiguous
        and second.flags.c_contiguous
        and address(second) == address(first) + first.nbytes
    )


def joined(blocks: Sequence[Array]) -> Array:
    """Blocks of which each `follows` the one before it, as one flat view."""
    if len(blocks) == 1:
        return flat(blocks[0])
    base = blocks[0].base
    start = (address(blocks[0]) - address(base)) // base.itemsize
    return base.reshape(-1)[start : start + sum(b.size for b in blocks)]


def address(block: Array) -> int:
    """Where a block begins in its device's memory."""
    if isinstance(block, np.ndarray):
        return block.__array_interface__["data"][0]
    return int(block.data.ptr)
