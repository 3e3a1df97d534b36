"""Attention's blocks of scores from end to end, compiled: products by BLAS, and what lies between them in loops.

One key and value head is computed at a time, and one of its queries after the other.  A list of blocks, int64 [n, 8],
says what: queries from `row` to `row_stop`, keys from `key` to `key_stop`, of which query i sees those with i + upto <
j <= i + after (i and j counted within the block), whether the block is the first of its queries and whether it is the
last.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from parlinalg.backend.blas import AS_IT_IS, ROWS, TURNED
from parlinalg.backend.compiled import AS_WRITTEN, exp, loop
from parlinalg.backend.primitives import bits, float32, float64

_SPAN = 64
"""Keys in whole numbers of which loops go: none are left over for a loop that takes one at a time."""
_SMALL = 1_000_000
"""Products up to this many multiplications are faster: OpenBLAS does not copy their operands."""


@intrinsic
def _gemm(context: Any, address: Any, turn_a: Any, turn_b: Any, m: Any, n: Any, k: Any, alpha: Any, a: Any, lda: Any,
          b: Any, ldb: Any, beta: Any, c: Any, ldc: Any) -> Any:  # fmt: skip
    """Return CBLAS's gemm, which is at this address."""
    flag, size = types.int32, types.int64
    signature = types.void(size, flag, flag, size, size, size, alpha, size, size, size, size, alpha, size, size)

    def call(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number, flag, size = context.get_value_type(alpha), ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(
            ir.VoidType(), [flag, flag, flag, size, size, size, number, size, size, size, size, number, size, size]
        )
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, [ir.Constant(flag, ROWS), *values[1:]])
        return context.get_dummy_value()

    return signature, call


@njit(**AS_WRITTEN)
def _product(gemm, turned, m, n, k, alpha, x, w, beta, y):
    """y = alpha x w + beta y for y [m, n], or xᵀ in place of x; each an address and the elements between its rows."""
    turn = types.int32(TURNED if turned else AS_IT_IS)
    _gemm(gemm, turn, types.int32(AS_IT_IS), m, n, k, alpha, x[0], x[1], w[0], w[1], beta, y[0], y[1])


@njit(**AS_WRITTEN)
def _matrix(x, row, column):
    """Return a contiguous matrix from a row and a column on."""
    width = x.strides[0] // x.itemsize
    return x.ctypes.data + (row * width + column) * x.itemsize, width


@njit(**AS_WRITTEN)
def _line(x, b, i, h, g):
    """Return the index in an array's values of the features of token i."""
    return b * x[1] + i * x[2] + h * x[3] + g * x[4]


@njit(**AS_WRITTEN)
def _at(line, j):
    """Return an index that is not checked for counting from the end."""
    return types.uintp(line) + types.uintp(j)


@njit(**AS_WRITTEN)
def _lines(x, b, i, h, g):
    """Return the matrix of tokens from i on."""
    return x[0].ctypes.data + _line(x, b, i, h, g) * x[0].itemsize, x[2]


@njit(**AS_WRITTEN)
def _step(rows, width):
    """Return the number of keys that fit into a small product."""
    return max(_SPAN, _SMALL // (rows * width) // 16 * 16)


@njit(**AS_WRITTEN)
def _scores(gemm, n, m, alpha, x, kt, at, s):
    """s = alpha x kt, [n, m], with the keys from `at` on."""
    e = kt.shape[0]
    step = _step(n, e)
    for j in range(0, m, step):
        w, y = _matrix(kt, 0, at + j), _matrix(s, 0, j)
        _product(gemm, False, n, min(step, m - j), e, alpha, x, w, s.dtype.type(0), y)


@njit(**AS_WRITTEN)
def _mixed(gemm, n, m, alpha, s, v, at, fresh, y):
    """y = alpha s v, added to what is there unless it is fresh."""
    f, e = s.dtype.type, v.shape[1]
    step = _step(n, e)
    for j in range(0, m, step):
        beta = f(0) if fresh and j == 0 else f(1)
        _product(gemm, False, n, e, min(step, m - j), alpha, _matrix(s, 0, j), _matrix(v, at + j, 0), beta, y)


@njit(**AS_WRITTEN)
def _spread(gemm, n, m, alpha, s, x, d, at):
    """d += alpha sᵀ x, for the keys from `at` on."""
    e = x.shape[1]
    step = _step(n, e)
    for j in range(0, m, step):
        w, y = _matrix(x, 0, 0), _matrix(d, at + j, 0)
        _product(gemm, True, min(step, m - j), e, n, alpha, _matrix(s, 0, j), w, s.dtype.type(1), y)


@njit(**AS_WRITTEN)
def _turn(x, b, i, h, n, y):
    """y = the transposed matrix of n tokens from i on."""
    values = x[0]
    for t in range(n):
        line = _line(x, b, i + t, h, 0)
        for j in range(y.shape[0]):
            y[j, t] = values[_at(line, j)]


@njit(**AS_WRITTEN)
def _copy(x, b, i, h, g, n, y):
    """y = the matrix of n tokens from i on."""
    values = x[0]
    for t in range(n):
        line = _line(x, b, i + t, h, g)
        for j in range(y.shape[1]):
            y[t, j] = values[_at(line, j)]


@njit(**AS_WRITTEN)
def _write(y, add, x, b, i, h, g):
    """Copy the other way round."""
    values = x[0]
    for t in range(y.shape[0]):
        line = _line(x, b, i + t, h, g)
        if add:
            for j in range(y.shape[1]):
                values[_at(line, j)] += y[t, j]
        else:
            for j in range(y.shape[1]):
                values[_at(line, j)] = y[t, j]


@njit(**AS_WRITTEN)
def _clear(x, b, i, h, g, n, e):
    """Zeros for n tokens from i on."""
    values = x[0]
    for t in range(n):
        line = _line(x, b, i + t, h, g)
        for j in range(e):
            values[_at(line, j)] = 0


@njit(**AS_WRITTEN)
def _ordered_32(bits):
    """Return the bits of a float as an integer that compares as the float does, and back."""
    return bits ^ ((bits >> types.int32(31)) & types.int32(0x7FFFFFFF))


@njit(**AS_WRITTEN)
def _ordered_64(bits):
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@njit(**AS_WRITTEN)
def _greatest_32(s, i, start, stop, top):
    best = _ordered_32(bits(top))
    for c in range(start, stop):
        for j in range(_SPAN):
            best = max(best, _ordered_32(bits(s[i, c, j])))
    return float32(_ordered_32(best))


@njit(**AS_WRITTEN)
def _greatest_64(s, i, start, stop, top):
    best = _ordered_64(bits(top))
    for c in range(start, stop):
        for j in range(_SPAN):
            best = max(best, _ordered_64(bits(s[i, c, j])))
    return float64(_ordered_64(best))


def _greatest(s, i, start, stop, top):
    """Return the greatest of a row's spans and `top`; compared as integers, which vectorizes."""
    raise NotImplementedError


@overload(_greatest, jit_options=AS_WRITTEN)
def _greatest_of(s, i, start, stop, top):
    greatest = _greatest_64 if s.dtype == types.float64 else _greatest_32

    def call(s, i, start, stop, top):
        return greatest(s, i, start, stop, top)

    return call


@njit(**AS_WRITTEN)
def _room(rows, keys):
    """Return the shape [rows, spans, keys of a span] of scores; rows are not a power of two apart."""
    spans = -(-keys // _SPAN)
    return rows, spans + (spans + 1) % 2, _SPAN


@njit(**AS_WRITTEN)
def _seen(i, after, upto, m):
    """Return the first and the last key of a block that a query sees, and the spans of `_SPAN` keys that hold them."""
    low = min(max(0, i + upto + 1), m)
    high = max(low, min(m, i + after + 1))
    start = low // _SPAN
    return low, high, start, -(-high // _SPAN) if low < high else start


@njit(**AS_WRITTEN)
def _hide(s, i, m, low, high, start, stop, value):
    """Write a value where a query sees no key of its spans, and zeros beyond them."""
    for c in range(start):
        s[i, c] = 0
    for c in range(stop, -(-m // _SPAN)):
        s[i, c] = 0
    if start < stop:
        for j in range(low % _SPAN):
            s[i, start, j] = value
        for j in range(_SPAN - (stop * _SPAN - high), _SPAN):
            s[i, stop - 1, j] = value


@njit(**AS_WRITTEN)
def _thin(s, n, m, factor, h, g):
    """Rows times the factors of dropout."""
    for i in range(n):
        for c in range(-(-m // _SPAN)):
            for j in range(min(_SPAN, m - c * _SPAN)):
                s[i, c, j] *= factor[h, g, i, _at(c * _SPAN, j)]


@njit(**AS_WRITTEN)
def _reach(blocks):
    """Return the most queries and keys of a block, and the keys of all blocks."""
    rows = keys = low = high = 0
    for t in range(blocks.shape[0]):
        row, row_stop, key, key_stop = blocks[t, 0], blocks[t, 1], blocks[t, 2], blocks[t, 3]
        rows, keys = max(rows, row_stop - row), max(keys, key_stop - key)
        if key < key_stop:
            low, high = key if not high else min(low, key), max(high, key_stop)
    return rows, keys, low, high


@loop(sums=True)
def forward(gemm, blocks, items, group, e, q, k, v, scale, factor, out, top, total):
    """out = softmax(scale q kᵀ) v, and top = the logarithms of the sums of the exponentials.

    Parameters
    ----------
    gemm : int
        The address of CBLAS's gemm.
    blocks : array of int
    items : (int, int)
        The heads from the first to before the second, counted over batch × heads.
    group, e : int
        Queries a head, and features.
    q, k, v, out : (array, int, int, int, int)
        Values, and the elements from one item, token, head and query of a head to the next.
    factor : array
        The factors of dropout for one block, [heads, g, rows, keys]; or empty.
    top, total : array
        Shape [batch, heads, g, s]: what is known so far, from call to call.
    """
    values, heads, results = q[0], top.shape[1], out[0]
    f = values.dtype.type
    rows, keys, low, high = _reach(blocks)
    s = np.empty(_room(rows, keys), values.dtype)
    kt, vs = np.empty((e, high - low + 16), values.dtype), np.empty((high - low, e), values.dtype)
    for item in range(items[0], items[1]):
        b, h = item // heads, item % heads
        _turn(k, b, low, h, high - low, kt)
        _copy(v, b, low, h, 0, high - low, vs)
        for g in range(group):
            for t in range(blocks.shape[0]):
                row, row_stop, key, key_stop, after, upto, first, last = blocks[t]
                n, m = row_stop - row, key_stop - key
                _scores(gemm, n, m, scale, _lines(q, b, row, h, g), kt, key - low, s)
                if first:
                    _clear(out, b, row, h, g, n, 0 if m else e)
                for i in range(n):
                    before = f(-math.inf) if first else top[b, h, g, row + i]
                    low_key, high_key, start, stop = _seen(i, after, upto, m)
                    _hide(s, i, m, low_key, high_key, start, stop, f(-math.inf))
                    now = _greatest(s, i, start, stop, max(before, f(np.finfo(f).min)))
                    sum = f(0)
                    for c in range(start, stop):
                        for j in range(_SPAN):
                            x = exp(s[i, c, j] - now)
                            s[i, c, j] = x
                            sum += x
                    if not first:
                        past = exp(before - now)
                        sum += total[b, h, g, row + i] * past
                        line = _line(out, b, row + i, h, g)
                        for j in range(e):
                            results[_at(line, j)] *= past
                    top[b, h, g, row + i] = now
                    total[b, h, g, row + i] = sum
                if factor.size:
                    _thin(s, n, m, factor, item - items[0], g)
                _mixed(gemm, n, m, f(1), s, vs, key - low, first, _lines(out, b, row, h, g))
                if last:
                    for i in range(n):
                        sum = total[b, h, g, row + i]
                        top[b, h, g, row + i] += math.log(sum)  # -inf where nothing is seen
                        share = f(1) / sum if sum > 0 else f(0)
                        line = _line(out, b, row + i, h, g)
                        for j in range(e):
                            results[_at(line, j)] *= share


@loop(sums=True)
def backward(gemm, blocks, items, group, e, q, k, v, scale, factor, out, lse, dout, dq, dk, dv, tokens, add_q, add_k):
    """Add or write the gradients of q, k and v from that of out; of all `tokens` of k and v.

    Parameters as of `forward`.  With P = exp(scale q kᵀ - lse) and D = the row sums of dout ∘ out:
    dS = P ∘ (dout vᵀ - D), dq = scale dS k, dk = scale dSᵀ q, dv = Pᵀ dout.
    """
    values, heads, results = q[0], lse.shape[1], out[0]
    f = values.dtype.type
    rows, keys, low, high = _reach(blocks)
    p, ds = np.empty(_room(rows, keys), values.dtype), np.empty(_room(rows, keys), values.dtype)
    qs, do = np.empty((rows, e), values.dtype), np.empty((rows, e), values.dtype)
    ks, kt = np.empty((high - low, e), values.dtype), np.empty((e, high - low + 16), values.dtype)
    vt = np.empty((e, high - low + 16), values.dtype)
    dks, dvs = np.empty((high - low, e), values.dtype), np.empty((high - low, e), values.dtype)
    dots = np.empty(rows, values.dtype)
    for item in range(items[0], items[1]):
        b, h = item // heads, item % heads
        _copy(k, b, low, h, 0, high - low, ks)
        _turn(k, b, low, h, high - low, kt)
        _turn(v, b, low, h, high - low, vt)
        dks[:] = 0
        dvs[:] = 0
        for g in range(group):
            for t in range(blocks.shape[0]):
                row, row_stop, key, key_stop, after, upto, first, _last = blocks[t]
                n, m = row_stop - row, key_stop - key
                _copy(q, b, row, h, g, n, qs)
                _copy(dout, b, row, h, g, n, do)
                for i in range(n):
                    line, dot = _line(out, b, row + i, h, g), f(0)
                    for j in range(e):
                        dot += results[_at(line, j)] * do[i, j]
                    dots[i] = dot
                _scores(gemm, n, m, scale, _matrix(qs, 0, 0), kt, key - low, p)
                _scores(gemm, n, m, f(1), _matrix(do, 0, 0), vt, key - low, ds)
                if factor.size:
                    _thin(ds, n, m, factor, item - items[0], g)
                for i in range(n):
                    dot, shift = dots[i], lse[b, h, g, row + i]
                    shift = f(math.inf) if shift == f(-math.inf) else shift  # exp(-inf) is 0 where nothing is seen
                    low_key, high_key, start, stop = _seen(i, after, upto, m)
                    _hide(p, i, m, low_key, high_key, start, stop, f(-math.inf))
                    _hide(ds, i, m, low_key, high_key, start, stop, f(0))
                    for c in range(start, stop):
                        for j in range(_SPAN):
                            x = exp(p[i, c, j] - shift)
                            p[i, c, j] = x
                            ds[i, c, j] = (ds[i, c, j] - dot) * x
                if factor.size:
                    _thin(p, n, m, factor, item - items[0], g)
                _spread(gemm, n, m, f(1), p, do, dvs, key - low)
                _spread(gemm, n, m, scale, ds, qs, dks, key - low)
                _mixed(gemm, n, m, scale, ds, ks, key - low, first and not add_q, _lines(dq, b, row, h, g))
                if first and not add_q:
                    _clear(dq, b, row, h, g, n, 0 if m else e)
        _write(dks, add_k, dk, b, low, h, 0)
        _write(dvs, add_k, dv, b, low, h, 0)
        if not add_k:
            for d in (dk, dv):
                _clear(d, b, 0, h, 0, low, e)
                _clear(d, b, high, h, 0, tokens - high, e)
