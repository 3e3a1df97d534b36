"""Activations and their gradients: elementwise, and gated units over pairs of elements."""

from __future__ import annotations

import math
from typing import Any

from parlinalg.backend import cuda, namespace
from parlinalg.backend.compiled import elementwise, exp, inlined, loop
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import example, fused, kernel, spans
from parlinalg.backend.views import flat

Block = Any


def _sigmoid(xp: Any, x: Block, out: Block) -> None:
    xp.negative(x, out=out)
    xp.minimum(out, 700 if x.dtype.itemsize == 8 else 85, out=out)  # exp must not overflow
    xp.exp(out, out=out)
    xp.add(out, 1, out=out)
    xp.divide(1, out, out=out)


@kernel()
def sigmoid(x: Block) -> Block:
    """Return 1 / (1 + exp(-x))."""
    return fused(_sigmoid, x)


def _sigmoid_grad(xp: Any, y: Block, g: Block, out: Block, s: Block) -> None:
    xp.subtract(1, y, out=s)
    xp.multiply(s, y, out=s)
    xp.multiply(s, g, out=out)


@kernel()
def sigmoid_grad(y: Block, g: Block) -> Block:
    """Return g y (1 - y), the gradient of `sigmoid` from its value y."""
    return fused(_sigmoid_grad, y, g, scratch=1)


def _tanh_grad(xp: Any, y: Block, g: Block, out: Block, s: Block) -> None:
    xp.multiply(y, y, out=s)
    xp.subtract(1, s, out=s)
    xp.multiply(s, g, out=out)


@kernel()
def tanh_grad(y: Block, g: Block) -> Block:
    """Return g (1 - y²), the gradient of tanh from its value y."""
    return fused(_tanh_grad, y, g, scratch=1)


@kernel()
def relu(x: Block) -> Block:
    """Return max(x, 0)."""
    return namespace(x).maximum(x, x.dtype.type(0))


def _relu_grad(xp: Any, y: Block, g: Block, out: Block) -> None:
    xp.multiply(g, y > 0, out=out)


@kernel()
def relu_grad(y: Block, g: Block) -> Block:
    """Return g where y > 0, else 0; y may be the value of `relu` or its argument."""
    return fused(_relu_grad, y, g)


example("sigmoid", sigmoid, "x")
example("sigmoid, gradient", sigmoid_grad, "x", "g")
example("tanh, gradient", tanh_grad, "x", "g")
example("ReLU", relu, "x")
example("ReLU, gradient", relu_grad, "x", "g")


# ------------------------------------------------------------------ the error function
# W. J. Cody's rational approximations (Mathematics of Computation 23, 1969), so that SciPy is not needed

# erf(x) = x P(x²)/Q(x²) for |x| ≤ 0.46875
NEAR_P = (3.16112374387056560e00, 1.13864154151050156e02, 3.77485237685302021e02, 3.20937758913846947e03)
NEAR_P0 = 1.85777706184603153e-1
NEAR_Q = (2.36012909523441209e01, 2.44024637934444173e02, 1.28261652607737228e03, 2.84423683343917062e03)
# erf(x) = 1 - exp(-x²) P(x)/Q(x) for 0.46875 ≤ x ≤ 4, and to 1e-16 of 1 beyond
FAR_P = (
    5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e01, 2.98635138197400131e02,
    8.81952221241769090e02, 1.71204761263407058e03, 2.05107837782607147e03, 1.23033935479799725e03,
)  # fmt: skip
FAR_P0 = 2.15311535474403846e-8
FAR_Q = (
    1.57449261107098347e01, 1.17693950891312499e02, 5.37181101862009858e02, 1.62138957456669019e03,
    3.29079923573345963e03, 4.36261909014324716e03, 3.43936767414372164e03, 1.23033935480374942e03,
)  # fmt: skip
SPLIT = 0.46875
FAR = 6.0  # erf is 1 in double precision beyond 5.93


def _erf_into(xp: Any, x: Block, out: Block, s: Block, t: Block, *, relative: bool = True) -> None:
    """Write erf(x) to `out`; s and t are scratch, and all four differ.

    Without `relative` the second formula serves everywhere: near 0 it is then right to 5e-12 only.
    """
    xp.abs(x, out=s)
    xp.minimum(s, FAR, out=s)
    xp.multiply(s, FAR_P0, out=out)
    _climb(xp, out, s, FAR_P)
    t[...] = s
    _climb(xp, t, s, FAR_Q)
    xp.divide(out, t, out=out)
    xp.multiply(s, s, out=t)
    xp.negative(t, out=t)
    xp.exp(t, out=t)
    xp.multiply(out, t, out=out)
    xp.subtract(1, out, out=out)
    xp.copysign(out, x, out=out)
    if not relative:
        return
    near = s <= SPLIT
    xp.minimum(s, SPLIT, out=s)
    xp.multiply(s, s, out=s)
    top, bottom = xp.multiply(s, NEAR_P0), t
    bottom[...] = s
    _climb(xp, top, s, NEAR_P)
    _climb(xp, bottom, s, NEAR_Q)
    xp.divide(top, bottom, out=top)
    xp.multiply(top, x, out=top)
    out[...] = xp.where(near, top, out)


def _climb(xp: Any, value: Block, x: Block, coefficients: tuple[float, ...]) -> None:
    """Horner's rule in place: value = (…(value + c₀) x + c₁) x … + c_last."""
    *head, last = coefficients
    for c in head:
        xp.add(value, c, out=value)
        xp.multiply(value, x, out=value)
    xp.add(value, last, out=value)


def _erf(xp: Any, x: Block, out: Block, s: Block, t: Block) -> None:
    _erf_into(xp, x, out, s, t)


@kernel()
def erf(x: Block) -> Block:
    """Return the error function of x, to about 1e-16."""
    return fused(_erf, x, scratch=2)


@erf.cuda(r"""
extern "C" __global__ void pla_erf(const T* x, T* y, Int n) {
    each(x, y, n, [](W v) { return erf(v); });
}
""")
def _(x: Block) -> Block:
    return cuda.elementwise("erf", x, packed=True)


example("erf", erf, "x")


# ------------------------------------------------------------------ GELU

_A = 0.044715
_C = math.sqrt(2 / math.pi)
_R = 1 / math.sqrt(2)
_N = 1 / math.sqrt(2 * math.pi)


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


def _phi_erf(xp: Any, x: Block, out: Block, s: Block, t: Block, u: Block) -> None:
    """Φ(x); u = x/√2."""
    xp.multiply(x, _R, out=u)
    _erf_into(xp, u, out, s, t, relative=x.dtype.itemsize == 8)
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


@kernel()
def gelu(x: Block, approximate: bool) -> Block:
    """Return x Φ(x), with Φ the normal distribution, or its approximation by tanh (Hendrycks and Gimpel, 2016)."""
    return fused(_gelu_tanh, x, scratch=1) if approximate else fused(_gelu_erf, x, scratch=3)


@kernel(alike=2)
def gelu_grad(x: Block, g: Block, approximate: bool) -> Block:
    """Return the gradient of `gelu` at x times g."""
    return fused(_gelu_tanh_grad, x, g, scratch=3) if approximate else fused(_gelu_erf_grad, x, g, scratch=4)


@kernel()
def gelu_and_slope(x: Block, approximate: bool) -> tuple[Block, Block]:
    """Return gelu(x), bit for bit as `gelu` does on CPUs, and its derivative at x."""
    if approximate:
        return fused(_gelu_tanh_slope, x, results=2, scratch=2)
    return fused(_gelu_erf_slope, x, results=2, scratch=3)


@inlined
def _half_and_rest(v: Any, f: Any) -> tuple[Any, Any]:
    """Return h = (1 + tanh(u))/2 = 1/(1 + exp(-2u)) for u = √(2/π) (v + 0.044715 v³), and 2 (1 - h) u′."""
    q = v * v
    h = f(1) / (f(1) + exp(v * (f(-2 * _C) + f(-2 * _A * _C) * q)))
    return h, (f(1) - h) * (f(2 * _C) + f(6 * _A * _C) * q)


@loop()
def _gelu_tanh_loop(x: Any, y: Any) -> None:
    """y = x h."""
    for i in range(x.size):
        h, _ = _half_and_rest(x[i], x.dtype.type)
        y[i] = x[i] * h


@loop()
def _gelu_tanh_slope_loop(x: Any, y: Any, slope: Any) -> None:
    """y = x h and its derivative h + 2 y (1 - h) u′."""
    for i in range(x.size):
        h, rest = _half_and_rest(x[i], x.dtype.type)
        w = x[i] * h
        y[i] = w
        slope[i] = h + w * rest


@inlined
def _climbed(p: Any, x: Any, c: Any, f: Any) -> Any:
    """Horner's rule: (…(p + c₀) x + c₁) x … + c₇."""
    p = (p + f(c[0])) * x
    p = (p + f(c[1])) * x
    p = (p + f(c[2])) * x
    p = (p + f(c[3])) * x
    p = (p + f(c[4])) * x
    p = (p + f(c[5])) * x
    p = (p + f(c[6])) * x
    return p + f(c[7])


@inlined
def _climbed_four(p: Any, x: Any, c: Any, f: Any) -> Any:
    p = (p + f(c[0])) * x
    p = (p + f(c[1])) * x
    p = (p + f(c[2])) * x
    return p + f(c[3])


@inlined
def _erf_and_exp(x: Any, f: Any) -> tuple[Any, Any]:
    """Return erf(x), as above, and exp(-x²)."""
    s = -x if x < f(0) else x
    t = s
    e = exp(-(s * s))
    s = f(FAR) if s > f(FAR) else s
    far = f(1) - _climbed(s * f(FAR_P0), s, FAR_P, f) / _climbed(s, s, FAR_Q, f) * e
    far = -far if x < f(0) else far
    s = f(SPLIT) if s > f(SPLIT) else s
    q = s * s
    near = x * (_climbed_four(q * f(NEAR_P0), q, NEAR_P, f) / _climbed_four(q, q, NEAR_Q, f))
    return (near if t <= f(SPLIT) else far), e


@loop()
def _gelu_erf_loop(x: Any, y: Any) -> None:
    """y = x Φ(x)."""
    f = x.dtype.type
    for i in range(x.size):
        r, _ = _erf_and_exp(x[i] * f(_R), f)
        y[i] = x[i] * (f(0.5) * (r + f(1)))


@loop()
def _gelu_erf_slope_loop(x: Any, y: Any, slope: Any) -> None:
    """y = x Φ(x) and its derivative Φ(x) + x φ(x)."""
    f = x.dtype.type
    for i in range(x.size):
        r, e = _erf_and_exp(x[i] * f(_R), f)
        phi = f(0.5) * (r + f(1))
        y[i] = x[i] * phi
        slope[i] = phi + x[i] * e * f(_N)


@gelu.compiled
def _(x: Block, approximate: bool) -> Block:
    return elementwise(_gelu_tanh_loop if approximate else _gelu_erf_loop, x.shape, x)


@gelu_and_slope.compiled
def _(x: Block, approximate: bool) -> tuple[Block, Block]:
    y, slope = (namespace(x).empty(x.shape, x.dtype) for _ in range(2))
    (_gelu_tanh_slope_loop if approximate else _gelu_erf_slope_loop)(flat(x), y.reshape(-1), slope.reshape(-1))
    return y, slope


@gelu.cuda(r"""
extern "C" __global__ void pla_gelu_tanh(const T* x, T* y, Int n) {
    each(x, y, n, [](W v) {
        return (W)0.5 * v * ((W)1 + tanh((W)0.7978845608028654 * (v + (W)0.044715 * v * v * v)));
    });
}

extern "C" __global__ void pla_gelu_erf(const T* x, T* y, Int n) {
    each(x, y, n, [](W v) { return (W)0.5 * v * erfc(-v * (W)0.7071067811865476); });
}
""")
def _(x: Block, approximate: bool) -> Block:
    return cuda.elementwise("gelu_tanh" if approximate else "gelu_erf", x, packed=True)


@gelu_grad.cuda(r"""
extern "C" __global__ void pla_gelu_tanh_grad(const T* x, const T* g, T* dx, Int n) {
    each_of_two(x, g, dx, n, [](W v, W d) {
        W c = (W)0.7978845608028654, a = (W)0.044715, t = tanh(c * (v + a * v * v * v));
        return d * (W)0.5 * ((W)1 + t + v * ((W)1 - t * t) * c * ((W)1 + (W)3 * a * v * v));
    });
}

extern "C" __global__ void pla_gelu_erf_grad(const T* x, const T* g, T* dx, Int n) {
    each_of_two(x, g, dx, n, [](W v, W d) {
        W slope = (W)0.5 * erfc(-v * (W)0.7071067811865476) + v * (W)0.3989422804014327 * exp((W)-0.5 * v * v);
        return d * slope;
    });
}
""")
def _(x: Block, g: Block, approximate: bool) -> Block:
    return cuda.elementwise("gelu_tanh_grad" if approximate else "gelu_erf_grad", x, g, packed=True)


example("gelu, tanh", lambda x: gelu(x, True), "x")
example("gelu, tanh, gradient", lambda x, g: gelu_grad(x, g, True), "x", "g")
example("gelu, tanh, and slope", lambda x: gelu_and_slope(x, True), "x")
example("gelu", lambda x: gelu(x, False), "x")
example("gelu, gradient", lambda x, g: gelu_grad(x, g, False), "x", "g")
example("gelu and slope", lambda x: gelu_and_slope(x, False), "x")


# ------------------------------------------------------------------ SwiGLU


def _pairs(z: Block) -> tuple[Block, Block]:
    """Return the gates and the values of a block that ends in pairs of both, flat; views if possible."""
    pairs = namespace(z).ascontiguousarray(z).reshape((math.prod(z.shape[:-1]), 2))
    return pairs[:, 0], pairs[:, 1]


def _half_and_tanh(xp: Any, gate: Block, h: Block, t: Block) -> None:
    """h = gate / 2 and t = tanh(h): silu = h (1 + t), without an exponential that could overflow."""
    h[...] = gate
    xp.multiply(h, 0.5, out=h)
    xp.tanh(h, out=t)


@kernel()
def swiglu(z: Block) -> Block:
    """Return silu(z[..., 0]) z[..., 1]."""
    xp, work = namespace(z), work_dtype(z.dtype)
    gates, values = _pairs(z)
    out = xp.empty(gates.shape, z.dtype)
    parts = spans(out.size, z)
    h, t = (xp.empty(parts[0].stop if parts else 0, work) for _ in range(2))
    for part in parts:
        h, t = h[: part.stop - part.start], t[: part.stop - part.start]
        _half_and_tanh(xp, gates[part], h, t)
        xp.add(t, 1, out=t)
        xp.multiply(t, h, out=t)
        h[...] = values[part]
        out[part] = xp.multiply(t, h, out=t)
    return out.reshape(z.shape[:-1])


@kernel(alike=2)
def swiglu_grad(z: Block, g: Block) -> Block:
    """Return the gradient of `swiglu` at z times g."""
    xp, work = namespace(z), work_dtype(z.dtype)
    gates, values = _pairs(z)
    grads = xp.ascontiguousarray(g).reshape(-1)
    out = xp.empty((grads.size, 2), z.dtype)
    parts = spans(grads.size, z)
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


@loop()
def _swiglu_loop(z: Any, y: Any) -> None:
    """y = silu(gate) value, of flat pairs of both."""
    f = z.dtype.type
    for i in range(y.size):
        gate = z[2 * i]
        y[i] = gate / (f(1) + exp(-gate)) * z[2 * i + 1]


@loop()
def _swiglu_grad_loop(z: Any, g: Any, dz: Any) -> None:
    """dz = g times the gradient of `swiglu` at z."""
    f = z.dtype.type
    for i in range(g.size):
        gate = z[2 * i]
        s = f(1) / (f(1) + exp(-gate))
        y = gate * s
        dz[2 * i] = g[i] * z[2 * i + 1] * (s + y * (f(1) - s))
        dz[2 * i + 1] = g[i] * y


@swiglu.compiled
def _(z: Block) -> Block:
    return elementwise(_swiglu_loop, z.shape[:-1], z)


@swiglu_grad.compiled
def _(z: Block, g: Block) -> Block:
    return elementwise(_swiglu_grad_loop, z.shape, z, g)


@swiglu.cuda(r"""
extern "C" __global__ void pla_swiglu(const T* z, T* y, Int n) {
    ELEMENTS(i, n)
    W gate = (W)z[2 * i], value = (W)z[2 * i + 1];
    y[i] = (T)(gate / ((W)1 + exp(-gate)) * value);
}
""")
def _(z: Block) -> Block:
    return cuda.elementwise("swiglu", z, shape=z.shape[:-1])


@swiglu_grad.cuda(r"""
extern "C" __global__ void pla_swiglu_grad(const T* z, const T* g, T* dz, Int n) {
    ELEMENTS(i, n)
    W gate = (W)z[2 * i], value = (W)z[2 * i + 1], d = (W)g[i];
    W s = (W)1 / ((W)1 + exp(-gate));
    dz[2 * i] = (T)(d * value * s * ((W)1 + gate * ((W)1 - s)));
    dz[2 * i + 1] = (T)(d * gate * s);
}
""")
def _(z: Block, g: Block) -> Block:
    return cuda.elementwise("swiglu_grad", z, g)


example("swiglu", swiglu, "z")
example("swiglu, gradient", swiglu_grad, "z", "g")
