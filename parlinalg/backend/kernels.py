"""Fused elementwise kernels: chains of operations in chunks whose temporaries stay in the cache.

On NumPy a chunk is 32k elements, with results and scratch by `out=`; on a GPU it is the whole block.  Blocks of 16-bit
floats are computed in float32 and rounded once.  Rows are along the last dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parlinalg.backend import compiled, cuda, namespace
from parlinalg.backend.erf import erf_into

Block = Any

CHUNK = 1 << 15
_A = 0.044715
_C = math.sqrt(2 / math.pi)
_R = 1 / math.sqrt(2)
_N = 1 / math.sqrt(2 * math.pi)


def work_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype in which blocks of `dtype` are computed: float32 for 16-bit floats."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else np.dtype(dtype)


def spans(n: int, xp: Any, unit: int = 1) -> Iterator[slice]:
    """Runs of whole units, of about CHUNK elements on NumPy, that cover n units."""
    step = max(1, CHUNK // max(1, unit)) if xp is np else max(1, n)
    for at in range(0, n, step):
        yield slice(at, min(n, at + step))


def fused(kernel: Callable[..., None], *blocks: Block, scratch: int = 0) -> Block:
    """A new block from blocks of one shape: `kernel(xp, *chunks, out, *scratch)` for every chunk."""
    xp, first = namespace(blocks[0]), blocks[0]
    out = xp.empty(first.shape, first.dtype)
    work = work_dtype(first.dtype)
    flats = [(b if b.flags.c_contiguous else xp.ascontiguousarray(b)).reshape(-1) for b in blocks]
    target, n = out.reshape(-1), out.size
    size = min(n, CHUNK) if xp is np else n
    cast = work != first.dtype
    room = [xp.empty(size, work) for _ in range(scratch + cast)]
    for part in spans(n, xp):
        length = part.stop - part.start
        spare = [r[:length] for r in room]
        into = spare.pop() if cast else target[part]
        kernel(xp, *(f[part].astype(work, copy=False) for f in flats), into, *spare)
        if cast:
            target[part] = into
    return out


def _sigmoid(xp: Any, x: Block, out: Block) -> None:
    xp.negative(x, out=out)
    xp.minimum(out, 700 if x.dtype.itemsize == 8 else 85, out=out)  # exp must not overflow
    xp.exp(out, out=out)
    xp.add(out, 1, out=out)
    xp.divide(1, out, out=out)


def sigmoid(x: Block) -> Block:
    """1 / (1 + exp(-x))."""
    return fused(_sigmoid, x)


def _sigmoid_grad(xp: Any, y: Block, g: Block, out: Block, s: Block) -> None:
    xp.subtract(1, y, out=s)
    xp.multiply(s, y, out=s)
    xp.multiply(s, g, out=out)


def sigmoid_grad(y: Block, g: Block) -> Block:
    """g y (1 - y), from the value y."""
    return fused(_sigmoid_grad, y, g, scratch=1)


def _tanh_grad(xp: Any, y: Block, g: Block, out: Block, s: Block) -> None:
    xp.multiply(y, y, out=s)
    xp.subtract(1, s, out=s)
    xp.multiply(s, g, out=out)


def tanh_grad(y: Block, g: Block) -> Block:
    """g (1 - y²), from the value y."""
    return fused(_tanh_grad, y, g, scratch=1)


def relu(x: Block) -> Block:
    """max(x, 0)."""
    return namespace(x).maximum(x, x.dtype.type(0))


def _relu_grad(xp: Any, y: Block, g: Block, out: Block) -> None:
    xp.multiply(g, y > 0, out=out)


def relu_grad(y: Block, g: Block) -> Block:
    """g where y > 0, else 0; y may be the value or the argument."""
    return fused(_relu_grad, y, g)


def _inner_tanh(xp: Any, x: Block, s: Block, out: Block) -> None:
    """s = x², out = tanh(√(2/π) (x + 0.044715 x³))."""
    xp.multiply(x, x, out=s)
    xp.multiply(s, _A * _C, out=out)
    xp.add(out, _C, out=out)
    xp.multiply(out, x, out=out)
    xp.tanh(out, out=out)


def _phi_tanh(xp: Any, x: Block, out: Block, s: Block) -> None:
    """Φ(x) by tanh; s = x²."""
    _inner_tanh(xp, x, s, out)
    xp.add(out, 1, out=out)
    xp.multiply(out, 0.5, out=out)


def _gelu_tanh(xp: Any, x: Block, out: Block, s: Block) -> None:
    _phi_tanh(xp, x, out, s)
    xp.multiply(out, x, out=out)


def _gelu_tanh_slope(xp: Any, x: Block, y: Block, out: Block, s: Block, t: Block) -> None:
    # y = x h with h = (1 + tanh(u))/2, whose derivative is 2 h (1 - h) u′: that of y is h + 2 y (1 - h) u′
    _phi_tanh(xp, x, out, s)
    xp.multiply(out, x, out=y)
    xp.multiply(s, 6 * _A * _C, out=s)
    xp.add(s, 2 * _C, out=s)
    xp.multiply(s, y, out=s)
    xp.subtract(1, out, out=t)
    xp.multiply(s, t, out=s)
    xp.add(out, s, out=out)


def _gelu_tanh_grad(xp: Any, x: Block, g: Block, out: Block, s: Block, t: Block, y: Block) -> None:
    _gelu_tanh_slope(xp, x, y, out, s, t)
    xp.multiply(out, g, out=out)


def _erf(xp: Any, x: Block, out: Block, s: Block, t: Block) -> None:
    erf_into(xp, x, out, s, t)


def _phi_erf(xp: Any, x: Block, out: Block, s: Block, t: Block, u: Block) -> None:
    """Φ(x); u = x/√2."""
    xp.multiply(x, _R, out=u)
    erf_into(xp, u, out, s, t, relative=x.dtype.itemsize == 8)
    xp.add(out, 1, out=out)
    xp.multiply(out, 0.5, out=out)


def _gelu_erf(xp: Any, x: Block, out: Block, s: Block, t: Block, u: Block) -> None:
    _phi_erf(xp, x, out, s, t, u)
    xp.multiply(out, x, out=out)


def _gelu_erf_slope(xp: Any, x: Block, y: Block, out: Block, s: Block, t: Block, u: Block) -> None:
    # d/dx x Φ(x) = Φ(x) + x φ(x)
    _phi_erf(xp, x, out, s, t, u)
    xp.multiply(out, x, out=y)
    xp.multiply(u, u, out=s)
    xp.negative(s, out=s)
    xp.exp(s, out=s)
    xp.multiply(s, x, out=s)
    xp.multiply(s, _N, out=s)
    xp.add(out, s, out=out)


def _gelu_erf_grad(xp: Any, x: Block, g: Block, out: Block, s: Block, t: Block, u: Block, y: Block) -> None:
    _gelu_erf_slope(xp, x, y, out, s, t, u)
    xp.multiply(out, g, out=out)


def gelu(x: Block, approximate: bool) -> Block:
    """x Φ(x), with Φ the normal distribution's, or its approximation by tanh (Hendrycks and Gimpel, 2016)."""
    if cuda.ready(x):
        return cuda.elementwise("gelu_tanh" if approximate else "gelu_erf", x)
    if (loops := compiled.loops(x)) is not None:
        y = np.empty(x.shape, x.dtype)
        (loops.gelu_tanh if approximate else loops.gelu_erf)(compiled.flat(x), y.reshape(-1))
        return y
    return fused(_gelu_tanh, x, scratch=1) if approximate else fused(_gelu_erf, x, scratch=3)


def gelu_grad(x: Block, g: Block, approximate: bool) -> Block:
    """The gradient of gelu at x times g."""
    if cuda.ready(x, g):
        return cuda.elementwise("gelu_tanh_grad" if approximate else "gelu_erf_grad", x, g)
    return fused(_gelu_tanh_grad, x, g, scratch=3) if approximate else fused(_gelu_erf_grad, x, g, scratch=4)


def gelu_and_slope(x: Block, approximate: bool) -> tuple[Block, Block]:
    """gelu(x), bit for bit as by `gelu`, and its derivative at x; on NumPy, of float32 or float64."""
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    flats = [compiled.flat(b) for b in (x, y, slope)]
    if (loops := compiled.loops(x)) is not None:
        (loops.gelu_tanh_slope if approximate else loops.gelu_erf_slope)(*flats)
        return y, slope
    kernel: Callable[..., None] = _gelu_tanh_slope if approximate else _gelu_erf_slope
    room = np.empty((2 if approximate else 3, min(x.size, CHUNK)), x.dtype)
    for part in spans(x.size, np):
        kernel(np, *(f[part] for f in flats), *(r[: part.stop - part.start] for r in room))
    return y, slope


def erf(x: Block) -> Block:
    """The error function, to about 1e-16."""
    return fused(_erf, x, scratch=2)


# ------------------------------------------------------------------ rows


def _rows(z: Block) -> Block:
    """The block as a matrix of its rows."""
    return z.reshape((math.prod(z.shape[:-1]), z.shape[-1]))


def row_max(z: Block) -> Block:
    """The largest element of every row, -inf where it has none; in the working dtype."""
    xp, work = namespace(z), work_dtype(z.dtype)
    if not z.shape[-1]:
        return xp.full(z.shape[:-1], -math.inf, work)
    return xp.asarray(z.max(axis=-1)).astype(work, copy=False)


def row_exp_sum(z: Block, m: Block) -> Block:
    """The sum of exp(z - m) over every row; no block of exponentials is made."""
    if cuda.ready(z):
        return cuda.row_exp_sum(z, m)
    xp = namespace(z)
    if (loops := compiled.loops(z, m)) is not None:
        out = np.empty(m.shape, m.dtype)
        loops.row_exp_sum(compiled.rows(z), compiled.flat(m), out.reshape(-1))
        return out
    rows, shift = _rows(z), m.reshape(-1, 1)
    out = xp.empty(rows.shape[0], m.dtype)
    for part in spans(rows.shape[0], xp, rows.shape[1]):
        e = (
            xp.subtract(rows[part], shift[part], dtype=m.dtype)
            if z.dtype == m.dtype
            else rows[part].astype(m.dtype) - shift[part]
        )
        xp.exp(e, out=e)
        e.sum(axis=-1, out=out[part])
    return out.reshape(m.shape)


def row_exp(z: Block, m: Block, scale: Block | None = None) -> Block:
    """exp(z - m), times a number a row; in z's dtype."""
    if cuda.ready(z):
        return cuda.row_exp(z, m, scale)
    xp = namespace(z)
    if (loops := compiled.loops(z, m, m if scale is None else scale)) is not None:
        out, factors = np.empty(z.shape, z.dtype), np.ones_like(m) if scale is None else scale
        loops.row_exp(compiled.rows(z), compiled.flat(m), compiled.flat(factors), compiled.rows(out))
        return out
    rows, shift = _rows(z), m.reshape(-1, 1)
    out = xp.empty(rows.shape, z.dtype)
    factor = None if scale is None else scale.reshape(-1, 1)
    for part in spans(rows.shape[0], xp, rows.shape[1]):
        e = out[part] if z.dtype == m.dtype else xp.empty(rows[part].shape, m.dtype)
        xp.subtract(rows[part].astype(m.dtype, copy=False), shift[part], out=e)
        xp.exp(e, out=e)
        if factor is not None:
            xp.multiply(e, factor[part], out=e)
        if z.dtype != m.dtype:
            out[part] = e
    return out.reshape(z.shape)


def row_dot(a: Block, b: Block) -> Block:
    """The sum of a b over every row, in the working dtype."""
    xp, work = namespace(a), work_dtype(a.dtype)
    p, q = _rows(a), _rows(b)
    if work == a.dtype:
        return xp.einsum("ij,ij->i", p, q).reshape(a.shape[:-1])
    out = xp.empty(p.shape[0], work)
    for part in spans(p.shape[0], xp, p.shape[1]):
        out[part] = xp.einsum("ij,ij->i", p[part].astype(work), q[part].astype(work))
    return out.reshape(a.shape[:-1])


def squared_distance(x: Block, t: Block) -> Block:
    """The sum of (x - t)² over a block, in float64, as an array without dims."""
    xp, work = namespace(x), work_dtype(x.dtype)
    a, b = xp.ascontiguousarray(x).reshape(-1), xp.ascontiguousarray(t).reshape(-1)
    total = xp.zeros((), np.float64)
    for part in spans(a.size, xp):
        d = a[part].astype(work, copy=False) - b[part].astype(work, copy=False)
        total = total + xp.dot(d, d)
    return xp.asarray(total)
