"""The error function without SciPy: W. J. Cody's rational approximations (Mathematics of Computation 23, 1969)."""

from __future__ import annotations

from typing import Any

Block = Any

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


def erf_into(xp: Any, x: Block, out: Block, s: Block, t: Block, *, relative: bool = True) -> None:
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
