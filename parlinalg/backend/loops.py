"""Loops over host arrays that numba compiles: each reads what it needs once and writes its results once.

Only `parlinalg.backend.compiled` imports this module, where numba is installed.  Arrays of one call have one dtype,
float32 or float64, in which all is computed.  Exponentials are those of Cephes (Moshier, 1989), which vectorize as
the C library's do not: within 2 units in the last place, 0 in place of numbers too small to be normal, inf a little
early.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from parlinalg.backend.erf import FAR, FAR_P, FAR_P0, FAR_Q, NEAR_P, NEAR_P0, NEAR_Q, SPLIT


def loop(*, sums: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call with a dtype, and keep the code on disk where a place for it can be written.

    With `sums` terms may be added in another order, without which sums do not vectorize.  Without, every operation is
    rounded as written, so that a number's result does not depend on where in a block it lies.
    """
    flags = {"reassoc", "contract", "nsz"} if sums else False

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(function, cache=True, nogil=True, error_model="numpy", fastmath=flags)
        except RuntimeError:  # no folder for the code can be written
            return njit(function, nogil=True, error_model="numpy", fastmath=flags)

    return compiled


_AS_WRITTEN = {"forceinline": True, "fastmath": False}
"""For parts of loops: without `fastmath` they would have that of the first loop in which they are compiled."""


@intrinsic
def _bits(context: Any, number: Any) -> Any:
    """The bits of a float as an integer."""
    width = number.bitwidth
    return types.Integer.from_bitwidth(width, True)(number), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(width))


@intrinsic
def _float32(context: Any, bits: Any) -> Any:
    """The float that has these bits."""
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def _float64(context: Any, bits: Any) -> Any:
    """The float that has these bits."""
    return types.float64(types.int64), lambda c, b, s, a: b.bitcast(a[0], ir.DoubleType())


# exp(x) = 2ⁿ exp(r), n the integer nearest x / log 2: adding 1.5 2²³ (1.5 2⁵²) rounds, and leaves n in the lowest bits
_LOG2E, _HIGH, _LOW = 1.4426950408889634, 0.693359375, -2.1219444005469057e-4
_HIGH_64, _LOW_64 = 6.93145751953125e-1, 1.42860682030941723212e-6
_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@njit(**_AS_WRITTEN)
def _exp_32(x):
    f = types.float32
    z = x * f(_LOG2E) + f(12582912.0)
    n = z - f(12582912.0)
    r = x - n * f(_HIGH)
    r = r - n * f(_LOW)
    p = f(_TERMS[0])
    p = p * r + f(_TERMS[1])
    p = p * r + f(_TERMS[2])
    p = p * r + f(_TERMS[3])
    p = p * r + f(_TERMS[4])
    p = p * r + f(_TERMS[5])
    p = p * (r * r) + r + f(1)
    y = p * _float32((_bits(z) + types.int32(127)) << types.int32(23))
    y = f(0) if x < f(-87.3) else y
    return f(math.inf) if x > f(88.37) else y


@njit(**_AS_WRITTEN)
def _exp_64(x):
    z = x * _LOG2E + 6755399441055744.0
    n = z - 6755399441055744.0
    r = x - n * _HIGH_64
    r = r - n * _LOW_64
    p = 1.6059043836821613e-10  # Taylor's, 1/13! to 1/2!: the rest is below 5e-18
    p = p * r + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 0.0001984126984126984
    p = p * r + 0.001388888888888889
    p = p * r + 0.008333333333333333
    p = p * r + 0.041666666666666664
    p = p * r + 0.16666666666666666
    p = p * r + 0.5
    p = p * (r * r) + r + 1.0
    y = p * _float64((_bits(z) + 1023) << 52)
    y = 0.0 if x < -708.0 else y
    return math.inf if x > 709.4 else y


def _exp(x):
    """exp(x), of the dtype of x."""
    raise NotImplementedError


@overload(_exp, jit_options=_AS_WRITTEN)
def _exp_of(x):
    exp = _exp_64 if x == types.float64 else _exp_32

    def call(x):
        return exp(x)

    return call


# ------------------------------------------------------------------ elementwise

_R = 1 / math.sqrt(2)
_N = 1 / math.sqrt(2 * math.pi)
_A = 0.044715
_B = math.sqrt(2 / math.pi)


@njit(**_AS_WRITTEN)
def _half_and_rest(v, f):
    """h = (1 + tanh(u))/2 = 1/(1 + exp(-2u)) for u = √(2/π) (v + 0.044715 v³), and 2 (1 - h) u′."""
    q = v * v
    h = f(1) / (f(1) + _exp(v * (f(-2 * _B) + f(-2 * _A * _B) * q)))
    return h, (f(1) - h) * (f(2 * _B) + f(6 * _A * _B) * q)


@loop()
def gelu_tanh(x, y):
    """y = x h."""
    for i in range(x.size):
        h, _ = _half_and_rest(x[i], x.dtype.type)
        y[i] = x[i] * h


@loop()
def gelu_tanh_slope(x, y, slope):
    """y = x h and its derivative h + 2 y (1 - h) u′."""
    for i in range(x.size):
        h, rest = _half_and_rest(x[i], x.dtype.type)
        w = x[i] * h
        y[i] = w
        slope[i] = h + w * rest


@njit(**_AS_WRITTEN)
def _climbed(p, x, c, f):
    """Horner's rule: (…(p + c₀) x + c₁) x … + c₇."""
    p = (p + f(c[0])) * x
    p = (p + f(c[1])) * x
    p = (p + f(c[2])) * x
    p = (p + f(c[3])) * x
    p = (p + f(c[4])) * x
    p = (p + f(c[5])) * x
    p = (p + f(c[6])) * x
    return p + f(c[7])


@njit(**_AS_WRITTEN)
def _climbed_four(p, x, c, f):
    p = (p + f(c[0])) * x
    p = (p + f(c[1])) * x
    p = (p + f(c[2])) * x
    return p + f(c[3])


@njit(**_AS_WRITTEN)
def _erf_and_exp(x, f):
    """erf(x), as by `parlinalg.backend.erf`, and exp(-x²)."""
    s = -x if x < f(0) else x
    t = s
    e = _exp(-(s * s))
    s = f(FAR) if s > f(FAR) else s
    far = f(1) - _climbed(s * f(FAR_P0), s, FAR_P, f) / _climbed(s, s, FAR_Q, f) * e
    far = -far if x < f(0) else far
    s = f(SPLIT) if s > f(SPLIT) else s
    q = s * s
    near = x * (_climbed_four(q * f(NEAR_P0), q, NEAR_P, f) / _climbed_four(q, q, NEAR_Q, f))
    return (near if t <= f(SPLIT) else far), e


@loop()
def gelu_erf(x, y):
    """y = x Φ(x)."""
    f = x.dtype.type
    for i in range(x.size):
        r, _ = _erf_and_exp(x[i] * f(_R), f)
        y[i] = x[i] * (f(0.5) * (r + f(1)))


@loop()
def gelu_erf_slope(x, y, slope):
    """y = x Φ(x) and its derivative Φ(x) + x φ(x)."""
    f = x.dtype.type
    for i in range(x.size):
        r, e = _erf_and_exp(x[i] * f(_R), f)
        phi = f(0.5) * (r + f(1))
        y[i] = x[i] * phi
        slope[i] = phi + x[i] * e * f(_N)


@loop()
def swiglu(z, y):
    """y = silu(gate) value, of flat pairs of both."""
    f = z.dtype.type
    for i in range(y.size):
        gate = z[2 * i]
        y[i] = gate / (f(1) + _exp(-gate)) * z[2 * i + 1]


@loop()
def swiglu_grad(z, g, dz):
    """dz = g times the gradient of `swiglu` at z."""
    f = z.dtype.type
    for i in range(g.size):
        gate = z[2 * i]
        s = f(1) / (f(1) + _exp(-gate))
        y = gate * s
        dz[2 * i] = g[i] * z[2 * i + 1] * (s + y * (f(1) - s))
        dz[2 * i + 1] = g[i] * y


@loop()
def adam(p, g, m, v, b1, c1, b2, c2, rate, tiny, coupled, decay, factor):
    """One step in place; the numbers are those of `cuda.adam`.

    Every operation is one of `kernels_optim.adam`'s, so that chunks of any size give the same bits.
    """
    for i in range(p.size):
        d = g[i] * factor + coupled * p[i]
        mean = m[i] * b1 + d * c1
        square = v[i] * b2 + d * d * c2
        m[i] = mean
        v[i] = square
        p[i] -= mean / (math.sqrt(square) + tiny) * rate + decay * p[i]


# ------------------------------------------------------------------ rows


@loop(sums=True)
def row_means(x, n, mean):
    """mean = the sums of rows over n."""
    for i in range(x.shape[0]):
        t = x.dtype.type(0)
        for j in range(x.shape[1]):
            t += x[i, j]
        mean[i] = t / n


@loop(sums=True)
def row_squares(x, mean, squares):
    """squares = the sums over rows of (x - mean)²; the mean of all is 0 if there is none (empty)."""
    for i in range(x.shape[0]):
        m = mean[i] if mean.size else x.dtype.type(0)
        t = x.dtype.type(0)
        for j in range(x.shape[1]):
            t += (x[i, j] - m) * (x[i, j] - m)
        squares[i] = t


@loop()
def norm(x, mean, scale, weight, bias, y):
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
def norm_terms(x, g, mean, scale, weight, sums, dw, db):
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
def norm_grad(x, g, mean, scale, weight, sums, n, dx):
    """dx = scale (g w - mean of g w - h mean of g w h); without a mean, less the first of the means."""
    zero = x.dtype.type(0)
    for i in range(x.shape[0]):
        m = mean[i] if mean.size else zero
        plain = sums[0, i] / n if mean.size else zero
        r = scale[i]
        along = sums[1, i] / n * r
        for j in range(x.shape[1]):
            dx[i, j] = r * (g[i, j] * weight[j] - plain - (x[i, j] - m) * along)


@loop(sums=True)
def row_exp_sum(z, top, out):
    """out = the sums over rows of exp(z - top)."""
    for i in range(z.shape[0]):
        t = z.dtype.type(0)
        for j in range(z.shape[1]):
            t += _exp(z[i, j] - top[i])
        out[i] = t


@loop()
def row_exp(z, top, factor, out):
    """out = exp(z - top) times a number a row."""
    for i in range(z.shape[0]):
        for j in range(z.shape[1]):
            out[i, j] = _exp(z[i, j] - top[i]) * factor[i]


# ------------------------------------------------------------------ attention


@loop(sums=True)
def exp_and_sum(s, top, sums):
    """s = exp(s - top) in place, with no top (empty) exp(s), and the sums of the rows."""
    for i in range(s.shape[0]):
        m = top[i] if top.size else s.dtype.type(0)
        t = s.dtype.type(0)
        for j in range(s.shape[1]):
            e = _exp(s[i, j] - m)
            s[i, j] = e
            t += e
        sums[i] = t


@loop()
def softmax_grad(p, dp, dot):
    """dp = (dp - dot) p in place."""
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            dp[i, j] = (dp[i, j] - dot[i]) * p[i, j]
