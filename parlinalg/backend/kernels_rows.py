"""Fused kernels over rows, which lie along the last dim: norms, gated units, sums over all rows.

On NumPy they go over chunks of rows that stay in the cache, and sum by products with vectors; on a GPU each is one
kernel of `parlinalg.backend.cuda` where it can be compiled.  Blocks of 16-bit floats are computed in float32 and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.backend import compiled, cuda, namespace
from parlinalg.backend.kernels import _rows, spans, work_dtype

Block = Any
Total = Callable[[Block], Block]
"""Sums numbers that every piece of a row has, in place; None where rows are whole."""

CHUNK = 1 << 16
"""Elements of a chunk of rows on NumPy."""
RUN = 128
"""Rows that are summed by one product with a vector, which takes two thirds of the time of NumPy's sum."""


def _parts(rows: Block) -> list[slice]:
    """Runs of rows of a matrix that stay in the cache."""
    count, width = rows.shape
    step = max(1, CHUNK // max(1, width)) if namespace(rows) is np else max(1, count)
    return [slice(at, min(count, at + step)) for at in range(0, count, step)]


def _dots(xp: Any, a: Block, b: Block) -> Block:
    """The product of every row of a with that of b."""
    return np.vecdot(a, b) if xp is np else xp.einsum("ij,ij->i", a, b)


def row_sums(block: Block) -> Block:
    """The sum of all rows, in the working dtype."""
    rows = _rows(block)
    xp, work = namespace(rows), work_dtype(rows.dtype)
    if xp is not np:
        return rows.sum(axis=0, dtype=work)
    out, ones = np.zeros(rows.shape[1], work), np.ones(RUN, work)
    for at in range(0, len(rows), RUN):  # sums of sums: thousands of terms one by one would lose digits
        part = rows[at : at + RUN].astype(work, copy=False)
        out += ones[: len(part)] @ part
    return out


class Moments(NamedTuple):
    """What the backward pass of a norm needs of every row: its mean (None: not subtracted) and 1 / its scale."""

    mean: Block
    scale: Block


def norm(
    x: Block, weight: Block, bias: Block, n: int, eps: float, *, centred: bool, total: Total | None
) -> tuple[Block, Moments]:
    """`(x - mean) / √(mean of (x - mean)² + eps) weight + bias` over rows of n elements; uncentred, the mean is 0.

    The mean is taken first, then the squares of what is left: E[x²] - E[x]² would cancel.
    """
    if total is None and cuda.ready(x):
        value, *moments = cuda.norm(x, weight, bias, eps, centred)
        return value, Moments(*moments)
    if (loops := compiled.loops(x)) is not None:
        return _norm(loops, x, weight, bias, n, eps, centred, total)
    xp, work = namespace(x), work_dtype(x.dtype)
    rows = _rows(xp.ascontiguousarray(x))
    y = xp.empty(rows.shape, x.dtype)
    parts = _parts(rows)
    spare = None if work == x.dtype else _room(xp, parts, rows, work)
    gain = _repeated(xp, weight, parts, work)
    shift = None if bias is None else _repeated(xp, bias, parts, work)
    share = xp.full(rows.shape[1], 1 / max(1, n), work)
    mean: Block = xp.empty(rows.shape[0], work) if centred else None
    scale = xp.empty(rows.shape[0], work)

    def room(part: slice) -> Block:
        return y[part] if spare is None else spare[: part.stop - part.start]

    def means(part: slice) -> None:
        mean[part] = rows[part].astype(work, copy=False) @ share

    def centre(part: slice) -> Block:
        chunk = rows[part].astype(work, copy=False)
        return xp.subtract(chunk, mean[part, None], out=room(part)) if centred else chunk

    def squares(part: slice) -> None:
        c = centre(part)
        scale[part] = _dots(xp, c, c)

    def finish(part: slice) -> None:
        scale[part] = 1 / xp.sqrt(scale[part] / max(1, n) + eps)
        c = room(part) if centred and total is None else centre(part)
        out = xp.multiply(c, scale[part, None], out=room(part))
        xp.multiply(out, gain[: len(out)], out=out)
        if shift is not None:
            xp.add(out, shift[: len(out)], out=out)
        if spare is not None:
            y[part] = out

    _staged(parts, [(means, mean)] * centred + [(squares, scale), (finish, None)], total)
    return y.reshape(x.shape), Moments(mean, scale)


def norm_grad(
    x: Block, g: Block, weight: Block, at: Moments, n: int, *, total: Total | None
) -> tuple[Block, Block, Block]:
    """The gradients of `norm` for x, weight and bias from that of its value; those of weight and bias in the working
    dtype, summed over this block's rows.
    """
    if total is None and cuda.ready(x, g):
        return cuda.norm_grad(x, g, weight, at.mean, at.scale)
    if (loops := compiled.loops(x, g)) is not None:
        return _norm_grad(loops, x, g, weight, at, n, total)
    xp, work = namespace(x), work_dtype(x.dtype)
    rows, grads = _rows(xp.ascontiguousarray(x)), _rows(xp.ascontiguousarray(g))
    count, width = rows.shape
    dx = xp.empty(rows.shape, x.dtype)
    dw, db = xp.zeros(width, work), xp.zeros(width, work)
    parts = _parts(rows)
    c, t = _room(xp, parts, rows, work), _room(xp, parts, rows, work)
    weight = weight.astype(work, copy=False)
    gain = _repeated(xp, weight, parts, work)
    centred = at.mean is not None
    sums = xp.zeros((2, count), work)

    def centre(part: slice) -> Block:
        chunk = rows[part].astype(work, copy=False)
        return xp.subtract(chunk, at.mean[part, None], out=c[: len(chunk)]) if centred else chunk

    def terms(part: slice) -> None:
        # with h = (x - mean) scale: dw = sum of g h, db = sum of g; each row's sums of g w and of g w h / scale
        nonlocal dw, db
        gs, scale = grads[part].astype(work, copy=False), at.scale[part]
        p = xp.multiply(gs, centre(part), out=t[: len(gs)])
        dw += scale @ p
        sums[1, part] = p @ weight
        if centred:
            db += xp.ones_like(scale) @ gs
            sums[0, part] = gs @ weight

    def finish(part: slice) -> None:
        # dx = scale (g w - mean of g w - h mean of g w h)
        gs, scale = grads[part].astype(work, copy=False), at.scale[part]
        h = c[: len(gs)] if centred and total is None else centre(part)
        h = xp.multiply(h, (scale * scale * sums[1, part] / max(1, n))[:, None], out=c[: len(gs)])
        if centred:
            xp.add(h, (sums[0, part] / max(1, n))[:, None], out=h)
        out = xp.multiply(gs, gain[: len(gs)], out=dx[part] if work == x.dtype else t[: len(gs)])
        xp.subtract(out, h, out=out)
        xp.multiply(out, scale[:, None], out=out)
        if work != x.dtype:
            dx[part] = out

    _staged(parts, [(terms, sums), (finish, None)], total)
    return dx.reshape(x.shape), dw, db


def _norm(
    loops: Any, x: Block, weight: Block, bias: Block, n: int, eps: float, centred: bool, total: Total | None
) -> tuple[Block, Moments]:
    """`norm` by compiled loops."""
    rows, dtype = compiled.rows(x), x.dtype
    y, scale = np.empty(rows.shape, dtype), np.empty(len(rows), dtype)
    none = np.empty(0, dtype)
    mean = np.empty(len(rows), dtype) if centred else none
    gain, shift = _vector(weight, dtype), none if bias is None else _vector(bias, dtype)
    count = dtype.type(max(1, n))

    def finish(part: slice) -> None:
        scale[part] = 1 / np.sqrt(scale[part] / count + dtype.type(eps))
        loops.norm(rows[part], mean[part], scale[part], gain, shift, y[part])

    means = (lambda part: loops.row_means(rows[part], count, mean[part]), mean)
    squares = (lambda part: loops.row_squares(rows[part], mean[part], scale[part]), scale)
    _staged(_parts(rows), [means] * centred + [squares, (finish, None)], total)
    return y.reshape(x.shape), Moments(mean if centred else None, scale)


def _norm_grad(
    loops: Any, x: Block, g: Block, weight: Block, at: Moments, n: int, total: Total | None
) -> tuple[Block, Block, Block]:
    """`norm_grad` by compiled loops."""
    rows, grads, dtype = compiled.rows(x), compiled.rows(g), x.dtype
    dx, sums = np.empty(rows.shape, dtype), np.empty((2, len(rows)), dtype)
    dw, db = (np.zeros(rows.shape[1], dtype) for _ in range(2))
    dw_part, db_part = (np.empty(rows.shape[1], dtype) for _ in range(2))
    mean = np.empty(0, dtype) if at.mean is None else at.mean
    gain, count = _vector(weight, dtype), dtype.type(max(1, n))

    def terms(part: slice) -> None:
        nonlocal dw, db
        loops.norm_terms(rows[part], grads[part], mean[part], at.scale[part], gain, sums[:, part], dw_part, db_part)
        dw += dw_part  # sums of sums
        if at.mean is not None:
            db += db_part

    def finish(part: slice) -> None:
        loops.norm_grad(rows[part], grads[part], mean[part], at.scale[part], gain, sums[:, part], count, dx[part])

    _staged(_parts(rows), [(terms, sums), (finish, None)], total)
    return dx.reshape(x.shape), dw, db


def _vector(x: Block, dtype: Any) -> Block:
    return np.ascontiguousarray(x, dtype)


def _room(xp: Any, parts: Sequence[slice], rows: Block, work: Any) -> Block:
    """Scratch for the largest part."""
    return xp.empty((parts[0].stop if parts else 0, rows.shape[1]), work)


def _repeated(xp: Any, vector: Block, parts: Sequence[slice], work: Any) -> Block:
    """A vector for every row of a part: NumPy is twice as fast on blocks of one shape as row by row."""
    wide = vector.astype(work, copy=False)[None]
    if xp is np and len(parts) > 2:
        return np.broadcast_to(wide, (parts[0].stop, vector.size)).copy()
    return xp.broadcast_to(wide, (parts[0].stop if parts else 0, vector.size))


def _staged(
    parts: Sequence[slice], stages: Sequence[tuple[Callable[[slice], None], Block]], total: Total | None
) -> None:
    """All stages of a part before the next part; where rows have pieces all parts of a stage, then its numbers' sum."""
    if total is None:
        for part in parts:
            for stage, _ in stages:
                stage(part)
        return
    for stage, numbers in stages:
        for part in parts:
            stage(part)
        if numbers is not None:
            numbers[...] = total(numbers)


# ------------------------------------------------------------------ gated units


def _pairs(z: Block) -> tuple[Block, Block]:
    """The gates and the values of a block that ends in pairs of both, without the last dim; views where they can be."""
    pairs = namespace(z).ascontiguousarray(z).reshape((math.prod(z.shape[:-1]), 2))
    return pairs[:, 0], pairs[:, 1]


def _half_and_tanh(xp: Any, gate: Block, h: Block, t: Block) -> None:
    """h = gate / 2 and t = tanh(h): silu = h (1 + t), without an exponential that could overflow."""
    h[...] = gate
    xp.multiply(h, 0.5, out=h)
    xp.tanh(h, out=t)


def swiglu(z: Block) -> Block:
    """silu(z[..., 0]) z[..., 1]."""
    if cuda.ready(z):
        return cuda.elementwise("swiglu", z, shape=z.shape[:-1])
    if (loops := compiled.loops(z)) is not None:
        y = np.empty(z.shape[:-1], z.dtype)
        loops.swiglu(compiled.flat(z), y.reshape(-1))
        return y
    xp, work = namespace(z), work_dtype(z.dtype)
    gates, values = _pairs(z)
    out = xp.empty(gates.shape, z.dtype)
    parts = list(spans(out.size, xp))
    h, t = (xp.empty(parts[0].stop if parts else 0, work) for _ in range(2))
    for part in parts:
        h, t = h[: part.stop - part.start], t[: part.stop - part.start]
        _half_and_tanh(xp, gates[part], h, t)
        xp.add(t, 1, out=t)
        xp.multiply(t, h, out=t)
        h[...] = values[part]
        out[part] = xp.multiply(t, h, out=t)
    return out.reshape(z.shape[:-1])


def swiglu_grad(z: Block, g: Block) -> Block:
    """The gradient of `swiglu` at z times g."""
    if cuda.ready(z, g):
        return cuda.elementwise("swiglu_grad", z, g)
    if (loops := compiled.loops(z, g)) is not None:
        dz = np.empty(z.shape, z.dtype)
        loops.swiglu_grad(compiled.flat(z), compiled.flat(g), dz.reshape(-1))
        return dz
    xp, work = namespace(z), work_dtype(z.dtype)
    gates, values = _pairs(z)
    grads = xp.ascontiguousarray(g).reshape(-1)
    out = xp.empty((grads.size, 2), z.dtype)
    parts = list(spans(grads.size, xp))
    h, t, u, d = (xp.empty(parts[0].stop if parts else 0, work) for _ in range(4))
    for part in parts:
        h, t, u, d = (room[: part.stop - part.start] for room in (h, t, u, d))
        _half_and_tanh(xp, gates[part], h, t)
        d[...] = grads[part]
        xp.add(t, 1, out=u)
        # d silu = (1 + t)/2 (1 + h (1 - t))
        xp.subtract(1, t, out=t)
        xp.multiply(t, h, out=t)
        xp.add(t, 1, out=t)
        xp.multiply(u, d, out=u)
        xp.multiply(t, u, out=t)
        xp.multiply(t, 0.5, out=t)
        out[part, 1] = xp.multiply(h, u, out=h)
        h[...] = values[part]
        out[part, 0] = xp.multiply(t, h, out=t)
    return out.reshape(z.shape)
