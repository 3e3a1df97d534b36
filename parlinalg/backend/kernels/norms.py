"""Norms over rows (layer and RMS norm) and over columns (batch norm), with their gradients.

Rows may have pieces on several ranks: `total` sums numbers over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, cuda, namespace
from parlinalg.backend.compiled import loop
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import example, kernel, row_runs
from parlinalg.backend.kernels.rows import row_sums
from parlinalg.backend.views import contiguous, contiguous_rows, matrix

Block = Any
Total = Callable[[Block], Block]
"""Sums numbers that every piece of a row has, in place; None where rows are whole."""


class Moments(NamedTuple):
    """The mean of every row (None: not subtracted) and 1 / its scale, which the backward pass of a norm needs."""

    mean: Block
    scale: Block


@kernel()
def norm(
    x: Block, weight: Block, bias: Block, n: int, eps: float, *, centred: bool, total: Total | None
) -> tuple[Block, Moments]:
    """Return `(x - mean) / √(mean of (x - mean)² + eps) weight + bias`, of rows of n elements; uncentred, mean is 0.

    The mean is taken first, then the squares of what is left: E[x²] - E[x]² would cancel.
    """
    xp, cpu, work = namespace(x), backend_of(x).cpu, work_dtype(x.dtype)
    rows = matrix(xp.ascontiguousarray(x))
    y = xp.empty(rows.shape, x.dtype)
    parts = row_runs(rows)
    spare = None if work == x.dtype else _room(xp, parts, rows, work)
    gain = _repeated(xp, weight, rows, parts, work)
    shift = None if bias is None else _repeated(xp, bias, rows, parts, work)
    share = xp.full(rows.shape[1], 1 / max(1, n), work)
    mean: Block = xp.empty(rows.shape[0], work) if centred else None
    scale = xp.empty(rows.shape[0], work)

    def room(part: slice) -> Block:
        return y[part] if spare is None else spare[: part.stop - part.start]

    def means(part: slice) -> None:
        mean[part] = rows[part].astype(work, copy=False) @ share

    def centre(part: slice) -> Block:
        tile = rows[part].astype(work, copy=False)
        return xp.subtract(tile, mean[part, None], out=room(part)) if centred else tile

    def squares(part: slice) -> None:
        c = centre(part)
        scale[part] = xp.vecdot(c, c) if cpu else xp.einsum("ij,ij->i", c, c)

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


@kernel(alike=2)
def norm_grad(
    x: Block, g: Block, weight: Block, at: Moments, n: int, *, total: Total | None
) -> tuple[Block, Block, Block]:
    """Return the gradients of `norm` for x, weight and bias from that of its value.

    Those of weight and bias are summed over this block's rows, in the working dtype.
    """
    xp, work = namespace(x), work_dtype(x.dtype)
    rows, grads = matrix(xp.ascontiguousarray(x)), matrix(xp.ascontiguousarray(g))
    count, width = rows.shape
    dx = xp.empty(rows.shape, x.dtype)
    dw, db = xp.zeros(width, work), xp.zeros(width, work)
    parts = row_runs(rows)
    c, t = _room(xp, parts, rows, work), _room(xp, parts, rows, work)
    weight = weight.astype(work, copy=False)
    gain = _repeated(xp, weight, rows, parts, work)
    centred = at.mean is not None
    sums = xp.zeros((2, count), work)

    def centre(part: slice) -> Block:
        tile = rows[part].astype(work, copy=False)
        return xp.subtract(tile, at.mean[part, None], out=c[: len(tile)]) if centred else tile

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


def _room(xp: Any, parts: Sequence[slice], rows: Block, work: Any) -> Block:
    """Return scratch for the largest part."""
    return xp.empty((parts[0].stop if parts else 0, rows.shape[1]), work)


def _repeated(xp: Any, vector: Block, rows: Block, parts: Sequence[slice], work: Any) -> Block:
    """Return a vector for every row of a part: NumPy is twice as fast on blocks of one shape as row by row."""
    wide, most = vector.astype(work, copy=False)[None], parts[0].stop if parts else 0
    repeated: Block = xp.broadcast_to(wide, (most, vector.size))
    return repeated.copy() if backend_of(vector).cpu and len(rows) > 2 * most else repeated


def _staged(
    parts: Sequence[slice], stages: Sequence[tuple[Callable[[slice], None], Block]], total: Total | None
) -> None:
    """Run all stages of a part, then the next part; of rows in pieces, one stage of all parts, and sum its numbers."""
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


# ------------------------------------------------------------------ norms of rows, compiled


@loop(sums=True)
def _row_means_loop(x: Any, n: Any, mean: Any) -> None:
    """mean = the sums of rows over n."""
    for i in range(x.shape[0]):
        t = x.dtype.type(0)
        for j in range(x.shape[1]):
            t += x[i, j]
        mean[i] = t / n


@loop(sums=True)
def _row_squares_loop(x: Any, mean: Any, squares: Any) -> None:
    """squares = the sums over rows of (x - mean)²; the mean of all is 0 if there is none (empty)."""
    for i in range(x.shape[0]):
        m = mean[i] if mean.size else x.dtype.type(0)
        t = x.dtype.type(0)
        for j in range(x.shape[1]):
            t += (x[i, j] - m) * (x[i, j] - m)
        squares[i] = t


@loop()
def _norm_loop(x: Any, mean: Any, scale: Any, weight: Any, bias: Any, y: Any) -> None:
    """y = (x - mean) scale weight + bias, without a mean or a bias where they are empty."""
    for i in range(x.shape[0]):
        m = mean[i] if mean.size else x.dtype.type(0)
        r = scale[i]
        if bias.size:
            for j in range(x.shape[1]):
                y[i, j] = (x[i, j] - m) * r * weight[j] + bias[j]
        else:
            for j in range(x.shape[1]):
                y[i, j] = (x[i, j] - m) * r * weight[j]


@loop(sums=True)
def _norm_terms_loop(x: Any, g: Any, mean: Any, scale: Any, weight: Any, sums: Any, dw: Any, db: Any) -> None:
    """With h = (x - mean) scale: rows' sums of g w and of g w h, and the sums of g h and of g over all rows."""
    zero = x.dtype.type(0)
    dw[:] = zero
    db[:] = zero
    for i in range(x.shape[0]):
        m = mean[i] if mean.size else zero
        r = scale[i]
        plain = zero
        along = zero
        for j in range(x.shape[1]):
            h = (x[i, j] - m) * r
            d = g[i, j] * weight[j]
            plain += d
            along += d * h
            dw[j] += g[i, j] * h
            db[j] += g[i, j]
        sums[0, i] = plain
        sums[1, i] = along


@loop()
def _norm_grad_loop(x: Any, g: Any, mean: Any, scale: Any, weight: Any, sums: Any, n: Any, dx: Any) -> None:
    """dx = scale (g w - mean of g w - h mean of g w h); without a mean, less the first of the means."""
    zero = x.dtype.type(0)
    for i in range(x.shape[0]):
        m = mean[i] if mean.size else zero
        plain = sums[0, i] / n if mean.size else zero
        r = scale[i]
        along = sums[1, i] / n * r
        for j in range(x.shape[1]):
            dx[i, j] = r * (g[i, j] * weight[j] - plain - (x[i, j] - m) * along)


@norm.compiled
def _(
    x: Block, weight: Block, bias: Block, n: int, eps: float, *, centred: bool, total: Total | None
) -> tuple[Block, Moments]:
    xp, rows, dtype = namespace(x), contiguous_rows(x), x.dtype
    y, scale = xp.empty(rows.shape, dtype), xp.empty(len(rows), dtype)
    none = xp.empty(0, dtype)
    mean = xp.empty(len(rows), dtype) if centred else none
    gain, shift = contiguous(weight, dtype), none if bias is None else contiguous(bias, dtype)
    count = dtype.type(max(1, n))

    def finish(part: slice) -> None:
        scale[part] = 1 / xp.sqrt(scale[part] / count + dtype.type(eps))
        _norm_loop(rows[part], mean[part], scale[part], gain, shift, y[part])

    means = (lambda part: _row_means_loop(rows[part], count, mean[part]), mean)
    squares = (lambda part: _row_squares_loop(rows[part], mean[part], scale[part]), scale)
    _staged(row_runs(rows), [means] * centred + [squares, (finish, None)], total)
    return y.reshape(x.shape), Moments(mean if centred else None, scale)


@norm_grad.compiled
def _(x: Block, g: Block, weight: Block, at: Moments, n: int, *, total: Total | None) -> tuple[Block, Block, Block]:
    xp, rows, grads, dtype = namespace(x), contiguous_rows(x), contiguous_rows(g), x.dtype
    dx, sums = xp.empty(rows.shape, dtype), xp.empty((2, len(rows)), dtype)
    dw, db = (xp.zeros(rows.shape[1], dtype) for _ in range(2))
    dw_part, db_part = (xp.empty(rows.shape[1], dtype) for _ in range(2))
    mean = xp.empty(0, dtype) if at.mean is None else at.mean
    gain, count = contiguous(weight, dtype), dtype.type(max(1, n))

    def terms(part: slice) -> None:
        nonlocal dw, db
        _norm_terms_loop(rows[part], grads[part], mean[part], at.scale[part], gain, sums[:, part], dw_part, db_part)
        dw += dw_part  # sums of sums
        if at.mean is not None:
            db += db_part

    def finish(part: slice) -> None:
        _norm_grad_loop(rows[part], grads[part], mean[part], at.scale[part], gain, sums[:, part], count, dx[part])

    _staged(row_runs(rows), [(terms, sums), (finish, None)], total)
    return dx.reshape(x.shape), dw, db


# ------------------------------------------------------------------ norms of rows by CUDA: a block of threads a row


@norm.cuda(r"""
extern "C" __global__ void pla_norm(const T* x, const W* weight, const W* bias, T* y, W* mean, W* scale, Int n, W eps,
                                int centred, int biased) {
    Int row = blockIdx.x;
    const T* r = x + row * n;
    W m = 0;
    if (centred) {
        W s = 0;
        for (Int i = threadIdx.x; i < n; i += blockDim.x) s += (W)r[i];
        m = block_sum(s) / (W)n;
    }
    W q = 0;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) {
        W c = (W)r[i] - m;
        q += c * c;
    }
    W k = (W)1 / sqrt(block_sum(q) / (W)n + eps);
    for (Int i = threadIdx.x; i < n; i += blockDim.x) {
        W v = ((W)r[i] - m) * k * weight[i];
        y[row * n + i] = (T)(biased ? v + bias[i] : v);
    }
    if (threadIdx.x == 0) {
        if (centred) mean[row] = m;
        scale[row] = k;
    }
}
""")
def _(
    x: Block, weight: Block, bias: Block, n: int, eps: float, *, centred: bool, total: Total | None
) -> tuple[Block, Moments]:
    if total is not None:
        return NotImplemented
    xp, work = namespace(x), work_dtype(x.dtype)
    x = xp.ascontiguousarray(x)
    width = x.shape[-1]
    rows = x.size // width
    y, scale = xp.empty(x.shape, x.dtype), xp.empty(rows, work)
    mean = xp.empty(rows, work) if centred else None
    gain = cuda.numbers(weight, work)
    shift = gain if bias is None else cuda.numbers(bias, work)
    cuda.launch_kernel(
        "norm", x, (rows,), x, gain, shift, y, scale if mean is None else mean, scale, np.int64(width),
        work.type(eps), np.int32(centred), np.int32(bias is not None),
    )  # fmt: skip
    return y, Moments(mean, scale)


@norm_grad.cuda(r"""
extern "C" __global__ void pla_norm_grad(const T* x, const T* g, const W* weight, const W* mean, const W* scale, T* dx,
                                     Int n, int centred) {
    // dx = k (g w - mean of g w - h mean of g w h), h = (x - m) k
    Int row = blockIdx.x;
    const T* r = x + row * n;
    const T* d = g + row * n;
    W m = centred ? mean[row] : (W)0, k = scale[row];
    W a = 0, b = 0;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) {
        W gw = (W)d[i] * weight[i];
        a += gw;
        b += gw * ((W)r[i] - m);
    }
    a = block_sum(a);
    b = block_sum(b);
    W shift = centred ? a / (W)n : (W)0, slope = b * k * k / (W)n;
    for (Int i = threadIdx.x; i < n; i += blockDim.x)
        dx[row * n + i] = (T)(((W)d[i] * weight[i] - shift - ((W)r[i] - m) * slope) * k);
}

extern "C" __global__ void pla_norm_sums(const T* x, const T* g, const W* mean, const W* scale, W* dw, W* db, Int rows,
                                     Int n, Int each, int centred) {
    // sums of g h and of g over `each` rows, a thread a column: dw and db have a row for each blockIdx.y
    Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Int first = (Int)blockIdx.y * each, last = first + each < rows ? first + each : rows;
    W a = 0, b = 0;
    for (Int row = first; row < last; ++row) {
        W d = (W)g[row * n + i], m = centred ? mean[row] : (W)0;
        a += d * ((W)x[row * n + i] - m) * scale[row];
        b += d;
    }
    dw[(Int)blockIdx.y * n + i] = a;
    db[(Int)blockIdx.y * n + i] = b;
}
""")
def _(x: Block, g: Block, weight: Block, at: Moments, n: int, *, total: Total | None) -> tuple[Block, Block, Block]:
    if total is not None:
        return NotImplemented
    xp, work = namespace(x), work_dtype(x.dtype)
    x, g = xp.ascontiguousarray(x), xp.ascontiguousarray(g)
    width = x.shape[-1]
    rows, centred = x.size // width, np.int32(at.mean is not None)
    mean = at.scale if at.mean is None else at.mean
    dx = xp.empty(x.shape, x.dtype)
    gain = cuda.numbers(weight, work)
    cuda.launch_kernel("norm_grad", x, (rows,), x, g, gain, mean, at.scale, dx, np.int64(width), centred)
    each = max(16, -(-rows // 256))
    parts = -(-rows // each)
    dw, db = xp.empty((parts, width), work), xp.empty((parts, width), work)
    cuda.launch_kernel(
        "norm_sums", x, (-(-width // tunables.CUDA_THREADS), parts), x, g, mean, at.scale, dw, db, np.int64(rows),
        np.int64(width), np.int64(each), centred,
    )  # fmt: skip
    return dx, dw.sum(axis=0), db.sum(axis=0)


def _try_norm(x: Block, weight: Block, bias: Block | None) -> Block:
    return norm(x, weight, bias, x.shape[-1], 1e-5, centred=bias is not None, total=None)[0]


def _try_norm_grad(x: Block, g: Block, weight: Block, bias: Block | None) -> tuple[Block, ...]:
    n, centred = x.shape[-1], bias is not None
    _, at = norm(x, weight, bias, n, 1e-5, centred=centred, total=None)
    return norm_grad(x, g, weight, at, n, total=None)[: 2 + centred]


example("layer norm", _try_norm, "x", "weight", "bias")
example("layer norm, gradient", _try_norm_grad, "x", "g", "weight", "bias")
example("RMS norm", lambda x, w: _try_norm(x, w, None), "x", "weight")
example("RMS norm, gradient", lambda x, g, w: _try_norm_grad(x, g, w, None), "x", "g", "weight")


# ------------------------------------------------------------------ norms of columns


def _tiled(rows: Sequence[Block], kernel: Callable[..., None], work: Any) -> None:
    """Call a kernel for every tile of some matrices of equal shapes, of the working dtype."""
    for part in row_runs(rows[0]):
        kernel(part, *(r[part].astype(work, copy=False) for r in rows))


@kernel()
def column_moments(x: Block, n: int, total: Total) -> tuple[Block, Block]:
    """Return the mean and the variance of every column of a matrix of n rows, of which this block has some.

    The mean is taken first, then the squares of what is left: E[x²] - E[x]² would cancel.

    Parameters
    ----------
    total : callable
        Sums a vector over the blocks.
    """
    xp, work = namespace(x), work_dtype(x.dtype)
    mean = total(row_sums(x)) / max(1, n)
    squares = xp.zeros(x.shape[1], work)

    def add(_: slice, tile: Block) -> None:
        nonlocal squares
        c = tile - mean
        squares += row_sums(xp.multiply(c, c, out=c))

    _tiled([x], add, work)
    return mean, total(squares) / max(1, n)


@kernel()
def column_norm(x: Block, mean: Block, scale: Block, weight: Block | None, bias: Block | None) -> Block:
    """Return `(x - mean) scale weight + bias`, of which all but the matrix x are vectors."""
    xp, work = namespace(x), work_dtype(x.dtype)
    out = xp.empty(x.shape, x.dtype)
    gain = scale if weight is None else scale * weight.astype(work, copy=False)
    shift = None if bias is None else bias.astype(work, copy=False)

    def finish(part: slice, tile: Block) -> None:
        c = tile - mean
        xp.multiply(c, gain, out=c)
        if shift is not None:
            xp.add(c, shift, out=c)
        out[part] = c

    _tiled([x], finish, work)
    return out


@kernel()
def column_sums_grad(x: Block, g: Block, mean: Block, scale: Block) -> Block:
    """Return the sums of g and of g times `(x - mean) scale` over the rows: [2, columns], in the working dtype."""
    xp, work = namespace(x), work_dtype(x.dtype)
    sums = xp.zeros((2, x.shape[1]), work)

    def add(_: slice, tile: Block, grads: Block) -> None:
        sums[0] += row_sums(grads)
        c = tile - mean
        sums[1] += row_sums(xp.multiply(c, grads, out=c))

    _tiled([x, g], add, work)
    sums[1] *= scale
    return sums


@kernel()
def column_norm_grad(x: Block, g: Block, mean: Block, scale: Block, weight: Block | None, sums: Block | None) -> Block:
    """Return the gradient of `column_norm` for x from that of its value.

    Parameters
    ----------
    sums : array, optional
        For a norm by the matrix's own moments: `column_sums_grad` over all blocks, divided by the number of rows.
    """
    xp, work = namespace(x), work_dtype(x.dtype)
    out = xp.empty(x.shape, x.dtype)
    gain = scale if weight is None else scale * weight.astype(work, copy=False)
    slope = None if sums is None else sums[1] * scale

    def finish(part: slice, tile: Block, grads: Block) -> None:
        # gain (g - mean of g - h mean of g h), with h = (x - mean) scale
        if sums is None:
            out[part] = grads * gain
            return
        c = tile - mean
        xp.multiply(c, slope, out=c)
        xp.subtract(grads, c, out=c)
        xp.subtract(c, sums[0], out=c)
        out[part] = xp.multiply(c, gain, out=c)

    _tiled([x, g], finish, work)
    return out


def _try_column_norm(x: Block, g: Block, weight: Block, bias: Block) -> tuple[Block, ...]:
    mean, variance = column_moments(x, len(x), lambda numbers: numbers)
    scale = 1 / namespace(x).sqrt(variance + 1e-5)
    sums = column_sums_grad(x, g, mean, scale)
    dx = column_norm_grad(x, g, mean, scale, weight, sums / len(x))
    return column_norm(x, mean, scale, weight, bias), dx, sums


example("batch norm and gradient", _try_column_norm, "x", "g", "weight", "bias")
