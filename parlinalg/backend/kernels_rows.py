"""Fused kernels over rows, which lie along the last dim: norms, gated units, sums over all rows.

On NumPy they go over chunks of rows that stay in the cache, and sum by products with vectors; on a GPU over the whole
block.  Blocks of 16-bit floats are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.kernels import _rows, _sigmoid, spans, work_dtype

Block = Any
Total = Callable[[Block], Block]
"""Sums numbers that every piece of a row has, in place; None where rows are whole."""


def row_sums(rows: Block) -> Block:
    """The sums of all rows over the dims but the last, of a block of floats or of 16-bit floats in float32."""
    xp, work = namespace(rows), work_dtype(rows.dtype)
    flat = _rows(rows)
    out = xp.zeros(flat.shape[1], work)
    for part in spans(flat.shape[0], xp, flat.shape[1]):
        chunk = flat[part].astype(work, copy=False)
        out += xp.ones(chunk.shape[0], work) @ chunk
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
    xp, work = namespace(x), work_dtype(x.dtype)
    rows = _rows(xp.ascontiguousarray(x))
    count, width = rows.shape
    y = xp.empty(rows.shape, x.dtype)
    parts = list(spans(count, xp, width))
    spare = None if work == x.dtype else xp.empty(_largest(parts, width), work)
    gain = weight.astype(work, copy=False)
    shift = None if bias is None else bias.astype(work, copy=False)
    share = xp.full(width, 1 / max(1, n), work)
    mean: Block = xp.empty(count, work) if centred else None
    scale = xp.empty(count, work)

    def room(part: slice) -> Block:
        return y[part] if spare is None else spare[: part.stop - part.start]

    def means(part: slice) -> None:
        mean[part] = rows[part].astype(work, copy=False) @ share

    def centre(part: slice) -> Block:
        chunk = rows[part].astype(work, copy=False)
        return xp.subtract(chunk, mean[part, None], out=room(part)) if centred else chunk

    def squares(part: slice) -> None:
        c = centre(part)
        scale[part] = xp.einsum("ij,ij->i", c, c)

    def finish(part: slice) -> None:
        scale[part] = 1 / xp.sqrt(scale[part] / max(1, n) + eps)
        c = room(part) if centred and total is None else centre(part)
        out = xp.multiply(c, scale[part, None], out=room(part))
        xp.multiply(out, gain, out=out)
        if shift is not None:
            xp.add(out, shift, out=out)
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
    xp, work = namespace(x), work_dtype(x.dtype)
    rows, grads = _rows(xp.ascontiguousarray(x)), _rows(xp.ascontiguousarray(g))
    count, width = rows.shape
    dx = xp.empty(rows.shape, x.dtype)
    dw, db = xp.zeros(width, work), xp.zeros(width, work)
    parts = list(spans(count, xp, width))
    most = _largest(parts, width)
    c, t = xp.empty(most, work), xp.empty(most, work)
    gain = weight.astype(work, copy=False)
    centred = at.mean is not None
    sums = xp.zeros((2, count), work)

    def centre(part: slice) -> Block:
        chunk = rows[part].astype(work, copy=False)
        return xp.subtract(chunk, at.mean[part, None], out=c[: part.stop - part.start]) if centred else chunk

    def terms(part: slice) -> None:
        # with h = (x - mean) scale: dw = sum of g h, db = sum of g; each row's sums of g w and of g w h
        gs, scale = grads[part].astype(work, copy=False), at.scale[part]
        p = xp.multiply(gs, centre(part), out=t[: part.stop - part.start])
        nonlocal dw, db
        dw += scale @ p
        sums[1, part] = p @ gain
        if centred:
            db += xp.ones_like(scale) @ gs
            sums[0, part] = gs @ gain

    def finish(part: slice) -> None:
        # dx = scale (g w - mean of g w - h mean of g w h)
        gs, scale = grads[part].astype(work, copy=False), at.scale[part]
        length = part.stop - part.start
        h = c[:length] if centred and total is None else centre(part)
        h = xp.multiply(h, (scale * scale * scale * sums[1, part] / -max(1, n))[:, None], out=c[:length])
        if centred:
            xp.subtract(h, (scale * sums[0, part] / max(1, n))[:, None], out=h)
        out = xp.multiply(gs, gain, out=dx[part] if work == x.dtype else t[:length])
        xp.multiply(out, scale[:, None], out=out)
        xp.add(out, h, out=out)
        if work != x.dtype:
            dx[part] = out

    _staged(parts, [(terms, sums), (finish, None)], total)
    return dx.reshape(x.shape), dw, db


def _largest(parts: Sequence[slice], width: int) -> tuple[int, int]:
    return max((part.stop - part.start for part in parts), default=0), width


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


def swiglu(z: Block) -> Block:
    """silu(z[..., 0]) z[..., 1]."""
    xp, work = namespace(z), work_dtype(z.dtype)
    pairs = xp.ascontiguousarray(z).reshape((math.prod(z.shape[:-1]), 2))
    out = xp.empty(pairs.shape[0], z.dtype)
    for part in spans(out.size, xp):
        gate, up = pairs[part, 0].astype(work), pairs[part, 1].astype(work)
        s = xp.empty_like(gate)
        _sigmoid(xp, gate, s)
        xp.multiply(s, gate, out=s)
        out[part] = xp.multiply(s, up, out=s)
    return out.reshape(z.shape[:-1])


def swiglu_grad(z: Block, g: Block) -> Block:
    """The gradient of `swiglu` at z times g."""
    xp, work = namespace(z), work_dtype(z.dtype)
    pairs = xp.ascontiguousarray(z).reshape((math.prod(z.shape[:-1]), 2))
    grads = xp.ascontiguousarray(g).reshape(-1)
    out = xp.empty(pairs.shape, z.dtype)
    for part in spans(grads.size, xp):
        gate, up = pairs[part, 0].astype(work), pairs[part, 1].astype(work)
        gs = grads[part].astype(work, copy=False)
        s = xp.empty_like(gate)
        _sigmoid(xp, gate, s)
        xp.multiply(gate, s, out=gate)  # silu
        out[part, 1] = gs * gate
        # d silu = s + silu (1 - s)
        d = xp.subtract(1, s)
        xp.multiply(d, gate, out=d)
        xp.add(d, s, out=d)
        xp.multiply(d, up, out=d)
        out[part, 0] = xp.multiply(d, gs, out=d)
    return out.reshape(z.shape)


# ------------------------------------------------------------------ tables


def look_up(table: Block, ids: Block, start: int, whole: bool) -> Block:
    """Row `id - start` of the table for every id; zeros where it has none, unless the table is `whole`."""
    xp = namespace(table)
    shape = (*ids.shape, table.shape[1])
    flat = ids.reshape(-1) - start
    if whole:
        return xp.take(table, flat, axis=0).reshape(shape)
    out = xp.zeros((flat.size, table.shape[1]), table.dtype)
    at = xp.nonzero((flat >= 0) & (flat < table.shape[0]))[0]
    out[at] = table[flat[at]]
    return out.reshape(shape)


def look_up_grad(g: Block, ids: Block, start: int, rows: int) -> Block:
    """The sums of the rows of g that belong to each of `rows` ids from `start`; in g's dtype.

    The ids are sorted and each run is summed: the same sums, in the same order, on every run.
    """
    xp, work = namespace(g), work_dtype(g.dtype)
    width = g.shape[-1]
    out = xp.zeros((rows, width), g.dtype)
    flat = ids.reshape(-1).astype(np.int64) - start
    at = xp.nonzero((flat >= 0) & (flat < rows))[0]
    if not at.size or not width:
        return out
    order = at[xp.argsort(flat[at], kind="stable")]
    found = flat[order]
    first = xp.ones(found.shape, bool)
    first[1:] = found[1:] != found[:-1]
    starts = xp.nonzero(first)[0]
    grads = g.reshape((flat.size, width))[order].astype(work, copy=False)
    out[found[starts]] = xp.add.reduceat(grads, starts, 0).astype(g.dtype, copy=False)
    return out
