"""Sums and exponentials of rows, which lie along the last dim: what softmax and the losses are made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, cuda, namespace
from parlinalg.backend.compiled import exp, loop
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import example, in_tiles, kernel, runs, spans
from parlinalg.backend.shapes import ShapesBackend
from parlinalg.backend.views import contiguous_rows, flat, matrix

Block = Any
RUN = 128
"""Rows that are summed by one product with a vector, which takes two thirds of the time of NumPy's sum."""


@kernel()
def row_max(z: Block) -> Block:
    """Return the largest element of every row, -inf where it has none; in the working dtype."""
    xp, work = namespace(z), work_dtype(z.dtype)
    if not z.shape[-1]:
        return xp.full(z.shape[:-1], -math.inf, work)
    return xp.asarray(z.max(axis=-1)).astype(work, copy=False)


@kernel()
def row_exp_sum(z: Block, m: Block) -> Block:
    """Return the sum of exp(z - m) over every row, without a block of exponentials."""
    xp = namespace(z)
    rows, shift = matrix(z), m.reshape(-1, 1)
    out = xp.empty(rows.shape[0], m.dtype)
    for part in spans(rows.shape[0], z, rows.shape[1]):
        e = (
            xp.subtract(rows[part], shift[part], dtype=m.dtype)
            if z.dtype == m.dtype
            else rows[part].astype(m.dtype) - shift[part]
        )
        xp.exp(e, out=e)
        e.sum(axis=-1, out=out[part])
    return out.reshape(m.shape)


@loop(sums=True)
def _row_exp_sum_loop(z: Any, top: Any, out: Any) -> None:
    """out = the sums over rows of exp(z - top)."""
    for i in range(z.shape[0]):
        t = z.dtype.type(0)
        for j in range(z.shape[1]):
            t += exp(z[i, j] - top[i])
        out[i] = t


@row_exp_sum.compiled
def _(z: Block, m: Block) -> Block:
    if m.dtype != z.dtype:
        return NotImplemented
    out = namespace(z).empty(m.shape, m.dtype)
    _row_exp_sum_loop(contiguous_rows(z), flat(m), out.reshape(-1))
    return out


@row_exp_sum.cuda(r"""
extern "C" __global__ void pla_row_exp_sum(const T* z, const W* top, W* out, Int n) {
    Int row = blockIdx.x;
    const T* r = z + row * n;
    W m = top[row], s = 0;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) s += exp((W)r[i] - m);
    s = block_sum(s);
    if (threadIdx.x == 0) out[row] = s;
}
""")
def _(z: Block, m: Block) -> Block:
    xp = namespace(z)
    out = xp.empty(m.shape, m.dtype)
    z, m = xp.ascontiguousarray(z), xp.ascontiguousarray(m)
    cuda.launch_kernel("row_exp_sum", z, (math.prod(z.shape[:-1]),), z, m, out, np.int64(z.shape[-1]))
    return out


@kernel()
def running_sum(x: Block) -> Block:
    """Return the running sums of every row, added one by one from its first element; in x's dtype."""
    xp, work = namespace(x), work_dtype(x.dtype)
    if work == x.dtype or not in_tiles(x):
        return xp.cumsum(x, axis=-1, dtype=work).astype(x.dtype, copy=False)
    out, rows = xp.empty(x.shape, x.dtype), matrix(x)
    for part in spans(len(rows), x, rows.shape[1]):
        matrix(out)[part] = xp.cumsum(rows[part].astype(work), axis=-1)
    return out


@loop()
def _running_sum_loop(x: Any, out: Any) -> None:
    """out = the running sums of rows: the sum stays in a register, which NumPy's goes to memory and back for."""
    for i in range(x.shape[0]):
        t = -x.dtype.type(0)  # plus -0 is -0
        for j in range(x.shape[1]):
            t += x[i, j]
            out[i, j] = t


@running_sum.compiled
def _(x: Block) -> Block:
    out = namespace(x).empty(x.shape, x.dtype)
    _running_sum_loop(contiguous_rows(x), matrix(out))
    return out


@kernel()
def row_exp(z: Block, m: Block, scale: Block | None = None) -> Block:
    """Return exp(z - m), times a number for each row; in z's dtype."""
    xp = namespace(z)
    rows, shift = matrix(z), m.reshape(-1, 1)
    out = xp.empty(rows.shape, z.dtype)
    factor = None if scale is None else scale.reshape(-1, 1)
    for part in spans(rows.shape[0], z, rows.shape[1]):
        e = out[part] if z.dtype == m.dtype else xp.empty(rows[part].shape, m.dtype)
        xp.subtract(rows[part].astype(m.dtype, copy=False), shift[part], out=e)
        xp.exp(e, out=e)
        if factor is not None:
            xp.multiply(e, factor[part], out=e)
        if z.dtype != m.dtype:
            out[part] = e
    return out.reshape(z.shape)


@loop()
def _row_exp_loop(z: Any, top: Any, factor: Any, out: Any) -> None:
    """out = exp(z - top) times a number a row."""
    for i in range(z.shape[0]):
        for j in range(z.shape[1]):
            out[i, j] = exp(z[i, j] - top[i]) * factor[i]


@row_exp.compiled
def _(z: Block, m: Block, scale: Block | None = None) -> Block:
    factors = namespace(z).ones_like(m) if scale is None else scale
    if not m.dtype == factors.dtype == z.dtype:
        return NotImplemented
    out = namespace(z).empty(z.shape, z.dtype)
    _row_exp_loop(contiguous_rows(z), flat(m), flat(factors), matrix(out))
    return out


@row_exp.cuda(r"""
extern "C" __global__ void pla_row_exp(const T* z, const W* top, const W* factor, T* out, Int n, int scaled) {
    Int row = blockIdx.x;
    W m = top[row], f = scaled ? factor[row] : (W)1;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) out[row * n + i] = (T)(exp((W)z[row * n + i] - m) * f);
}
""")
def _(z: Block, m: Block, scale: Block | None = None) -> Block:
    xp = namespace(z)
    out = xp.empty(z.shape, z.dtype)
    z, m = xp.ascontiguousarray(z), xp.ascontiguousarray(m)
    factor = m if scale is None else cuda.numbers(scale, z.dtype)
    rows, width, scaled = math.prod(z.shape[:-1]), np.int64(z.shape[-1]), np.int32(scale is not None)
    cuda.launch_kernel("row_exp", z, (rows,), z, m, factor, out, width, scaled)
    return out


@kernel()
def row_dot(a: Block, b: Block) -> Block:
    """Return the sum of a b over every row, in the working dtype."""
    xp, work = namespace(a), work_dtype(a.dtype)
    p, q = matrix(a), matrix(b)
    if work == a.dtype:
        return xp.einsum("ij,ij->i", p, q).reshape(a.shape[:-1])
    out = xp.empty(p.shape[0], work)
    for part in spans(p.shape[0], a, p.shape[1]):
        out[part] = xp.einsum("ij,ij->i", p[part].astype(work), q[part].astype(work))
    return out.reshape(a.shape[:-1])


@kernel()
def row_sums(block: Block) -> Block:
    """Return the sum of all rows, in the working dtype."""
    rows, work = matrix(block), work_dtype(block.dtype)
    if not backend_of(rows).cpu:
        return rows.sum(axis=0, dtype=work)
    xp = namespace(rows)
    out, ones = xp.zeros(rows.shape[1], work), xp.ones(RUN, work)
    for at in runs(len(rows), RUN, rows):  # sums of sums: thousands of terms one by one would lose digits
        part = rows[at].astype(work, copy=False)
        out += ones[: len(part)] @ part
    return out


@row_sums.cuda(r"""
extern "C" __global__ void pla_row_sums(const T* x, W* sums, Int rows, Int n, Int each) {
    // the sum of `each` rows, a thread a column: sums has a row for each blockIdx.y
    Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Int first = (Int)blockIdx.y * each, last = first + each < rows ? first + each : rows;
    W a = 0;
    for (Int row = first; row < last; ++row) a += (W)x[row * n + i];
    sums[(Int)blockIdx.y * n + i] = a;
}
""")
def _(block: Block) -> Block:
    xp = namespace(block)
    rows = xp.ascontiguousarray(matrix(block))
    count, n = rows.shape
    each = max(16, -(-count // 256))
    sums = xp.empty((-(-count // each), n), work_dtype(block.dtype))
    grid = -(-n // tunables.CUDA_THREADS), len(sums)
    cuda.launch_kernel("row_sums", rows, grid, rows, sums, np.int64(count), np.int64(n), np.int64(each))
    return sums.sum(axis=0)


@row_sums.shapes
def _(device: ShapesBackend, block: Block) -> Block:
    rows, work = matrix(block), work_dtype(block.dtype)
    out = row_sums.imitate(device, block) if device.cpu else device.empty(rows.shape[1], work)
    device.kernel(row_sums.name, block.nbytes + out.nbytes, block.size, block.dtype)
    return out


@kernel(alike=2)
def add_to(block: Block, other: Block) -> None:
    """Add another block to a block, in place: of its shape, or of its last dims' to each of its rows.

    They are one block, or have no memory in common.
    """
    block += other.astype(block.dtype, copy=False)


@add_to.cuda(r"""
extern "C" __global__ void pla_add_to(T* y, const T* x, Int rows, Int n, Int each) {
    // LANES columns of `each` rows a thread
    Int at = ((Int)blockIdx.x * blockDim.x + threadIdx.x) * LANES;
    Int first = (Int)blockIdx.y * each, last = first + each < rows ? first + each : rows;
    if ((rows == 1 || n % LANES == 0) && PACKED(at, n, ADDRESS(y) | ADDRESS(x))) {
        Pack b = *(const Pack*)(x + at);
        for (Int row = first; row < last; ++row) {
            Pack a = *(Pack*)(y + row * n + at);
            for (int i = 0; i < (int)LANES; ++i) a.v[i] = (T)((W)a.v[i] + (W)b.v[i]);
            *(Pack*)(y + row * n + at) = a;
        }
    } else
        for (Int row = first; row < last; ++row)
            for (Int i = at; i < at + LANES && i < n; ++i) y[row * n + i] = (T)((W)y[row * n + i] + (W)x[i]);
}
""")
def _(block: Block, other: Block) -> None:
    n = other.size
    evenly = block.flags.c_contiguous and other.flags.c_contiguous and other.shape == block.shape[-other.ndim :]
    if not (evenly and n and other.ndim):
        return NotImplemented
    rows = block.size // n
    each = max(16, -(-rows // 65535))  # a grid has at most so many blocks in its second dim
    grid = -(-n // (tunables.CUDA_THREADS * cuda.lanes(block.dtype))), -(-rows // each)
    cuda.launch_kernel("add_to", block, grid, block, other, np.int64(rows), np.int64(n), np.int64(each))
    return None


@add_to.shapes
def _(device: ShapesBackend, block: Block, other: Block) -> None:  # a sum as any other, on every device
    block += other.astype(block.dtype, copy=False)


@kernel()
def squared_distance(x: Block, t: Block) -> Block:
    """Return the sum of (x - t)² over a block, in float64, as an array without dims."""
    xp, work = namespace(x), work_dtype(x.dtype)
    a, b = xp.ascontiguousarray(x).reshape(-1), xp.ascontiguousarray(t).reshape(-1)
    total = xp.zeros((), np.float64)
    for part in spans(a.size, x):
        d = a[part].astype(work, copy=False) - b[part].astype(work, copy=False)
        total = total + xp.dot(d, d)
    return xp.asarray(total)


def _softmax(x: Block) -> tuple[Block, Block]:
    top = row_max(x)
    total = row_exp_sum(x, top)
    return total, row_exp(x, top, 1 / total)


def _added(x: Block, other: Block) -> Block:
    total = x.copy()
    add_to(total, other)
    return total


example("softmax", _softmax, "x")
example("products of rows", row_dot, "x", "g")
example("sums of rows", row_sums, "x")
example("sums in place", _added, "x", "g")
example("a vector added to rows", _added, "x", "bias")
example("running sums", running_sum, "x")
example("squared distance", squared_distance, "x", "g")
