"""The method of conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.linalg.iterative.systems import System, ratio
from parlinalg.linalg.iterative.vectors import (
    Operator,
)
from parlinalg.linalg.matrices import LinAlgError


@primitive
def cg(
    A: Operator, b: DistArray, x0: DistArray | None = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: Operator | None = None, callback: Callable[[DistArray], Any] | None = None,
    pipelined: bool = False,
) -> tuple[DistArray, int]:  # fmt: skip
    """Solve A x = b for a Hermitian positive definite matrix by conjugate gradients.

    Parameters
    ----------
    A : DistArray [n, n] or [..., n, n], or function
        A function of a DistArray [n], or of [..., n, k] if b is that, which gives A x of all columns.
    b : DistArray [n] or [..., n, k]
        Every column is a system of its own, and all take their steps together; leading dims are broadcast with those
        of A and M, and a vector [n] is the right-hand side of every matrix.  The solution lies like it.
    x0 : DistArray, optional
        Where to begin, of the solution's shape; zeros by default.
    rtol, atol : float
        It ends when ‖b − A x‖ ≤ max(rtol ‖b‖, atol).
    maxiter : int, optional
        10 n by default.
    M : DistArray or function, optional
        About the inverse of A; Hermitian positive definite.
    callback : function, optional
        Called with x after each iteration, on all ranks.  A system that has ended stays as it is.
    pipelined : bool
        Sum the scalars of a step while the next product is computed (Ghysels and Vanroose 2014).  That takes one
        product more, and eight vectors in place of four.  Recurrences lose digits: as soon as rounding may be √eps
        / 16 of the residual all are computed anew, by four products (Cools, Yetkin, Agullo, Giraud and Vanroose 2018).
        If that is needed again within 20 steps, or x is found not to be a solution, further steps are not pipelined.

    Returns
    -------
    x : DistArray
    info : int
        0, or the number of iterations that did not suffice for some system, but at least 1: `maxiter`, or less where
        rounding lets the residual of x become no smaller, as with a singular A.

    A step takes one product, and one all-reduce of three numbers a system (Chronopoulos and Gear 1989), or of eight if
    pipelined.  Arguments and results are those of `scipy.sparse.linalg.cg`.

    Raises
    ------
    LinAlgError
        If a step finds that A or M is not positive definite.
    """
    s = System("cg", A, b, x0, M, rtol, atol, maxiter, callback)
    r, x, vectors = s.r, s.x, s.vectors
    systems, plus = vectors.systems, vectors.plus
    with np.errstate(over="ignore", invalid="ignore"):  # until A and M are in range
        u, w = s.both(r)
    p = q = z = t = r
    gamma, alpha, first = np.ones(systems), np.ones(systems), True
    active, most, taken = np.ones(systems, bool), s.most(), np.zeros(systems, int)
    largest, longest = np.zeros(systems), np.zeros(systems)  # of the eigenvalues seen, and of their inverses
    gaps, renew = _Gaps(s) if pipelined else None, False
    beta: Any = 0.0
    for step in range(most + 1):
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = [(v, v) for v in (x, u, w, p, t)] if gaps else []
            summing = vectors.begin((r, u), (w, u), (r, r), *lengths, wait=not pipelined)
            if pipelined:
                m, n = s.both(w)
        before, (gamma, delta, rr, *squares) = gamma, summing().real
        if step == 0 and (fitted := _fitted(s, r, u, w, gamma, delta, rr)) is not None:
            x, (u, w, gamma, delta) = s.x, fitted
            if pipelined:
                m, n = s.both(w)
        s.finite(np.abs(gamma) + np.abs(delta) + rr, step)
        s.x, size = x, np.sqrt(np.maximum(0, rr))
        if step == 0:
            s.best, s.least = x, size
        active = active & (size > s.limit)
        if gaps and step:
            gaps.follow(alpha, beta, squares, pipelined)
            renew = pipelined and gaps.wide(active, size)
        if not active.any():
            gap = gaps.r if gaps else 10 * np.finfo(s.dtype).eps * largest * longest * s.least
            active, residual = s.unsolved(x, ~s.failed, taken, gap, vectors.norm)
            if not active.any():
                return s.result(max(step, 1) if s.failed.any() else 0)
            r, taken, first, pipelined = residual, 0 * taken, True, False
            u, w = s.both(r)
            if step < most:
                continue
        if step == most:
            break
        beta = 0.0 if first else ratio(gamma, before, active)
        curvature = delta if first else delta - beta * ratio(gamma, alpha, active)
        wrong = active & ((gamma <= 0) | (curvature <= 0)) & s.values
        if wrong.any() and not first:  # by rounding, if it is so no more with a true product or residual
            curvature, surely = _curvature(s, u, w, plus(u, s.factor(beta), p))
            if (surely := surely & wrong).any():
                raise _indefinite(s, gamma, curvature, np.zeros_like(surely), surely, step)
            r, taken, pipelined = s.b - s.times(x), 0 * taken, False
            (u, w), first = s.both(r), True
            continue
        if wrong.any():
            raise _indefinite(s, gamma, curvature, active & (gamma <= 0), wrong, step)
        alpha, old = ratio(gamma, curvature, active), alpha
        largest = np.maximum(largest, ratio(1.0, alpha, active) + (0.0 if first else ratio(beta, old, active)))
        longest, taken = np.maximum(longest, alpha), taken + active
        along, onward = s.factor(alpha), s.factor(beta)
        p, q = (u, w) if first else (plus(u, onward, p), plus(w, onward, q))
        if pipelined:
            z, t = (n, m) if first else (plus(n, onward, z), plus(m, onward, t))
        first = False
        x, r = plus(x, along, p), plus(r, -along, q)
        if gaps and renew:
            r, q, pipelined = s.b - s.times(x), s.times(p), gaps.renewed()
            first = not pipelined and gaps.early(active, size)
        if pipelined and not renew:
            u, w = plus(u, -along, t), plus(w, -along, z)
        else:
            u, w = s.both(r)
            if pipelined:
                t, z = s.both(q)
        if callback is not None:
            callback(s.solution(x))
    return s.result(max(s.maxiter, 1))


class _Gaps:
    """Estimates of the rounding errors in the recurrences of pipelined `cg` (Cools and others 2018).

    Attributes
    ----------
    r : array [*systems]
        About ‖b − A x − r‖, rather too long.
    """

    def __init__(self, s: System) -> None:
        self._s, self._eps = s, float(np.finfo(s.dtype).eps)
        self.r = self._q = self._w = self._z = self._u = self._p = self._t = np.zeros(s.vectors.systems)
        self._norm, self._steps, self._fresh = self.r, 0, True

    def follow(self, alpha: Any, beta: Any, squares: Any, pipelined: bool) -> None:
        """Add the rounding errors of a step.

        Parameters
        ----------
        alpha, beta : array
            Its factors.
        squares : sequence of array
            Of the lengths of x, u and w after it, and of its p and M q.
        pipelined : bool
            False if u and w are computed anew in each step.
        """
        if not self._steps and self._s.preconditioner is not None:  # u is smooth where M is good, and tells little of A
            image = self._s.times(noise := self._s.noise())
            over, under = self._s.vectors.products((image, image), (noise, noise)).real
            self._norm = np.sqrt(ratio(np.maximum(0, over), under, True))
        with np.errstate(over="ignore", invalid="ignore"):
            x, u, w, p, t = np.sqrt(np.maximum(0, squares))
            self._norm = np.maximum(self._norm, ratio(w, u, True))
            unit, alpha, beta = self._eps * self._norm, np.abs(alpha), np.abs(beta)
            if self._fresh:
                self.r, self._q, self._w, self._z = 2 * unit * x, unit * p, unit * u, unit * t
            else:
                self._z = beta * self._z + unit * (2 * t + 3 * beta * self._t)
                self._q = self._w + beta * self._q + unit * (2 * self._u + 3 * beta * self._p)
                self.r = self.r + alpha * self._q + unit * (2 * x + 3 * alpha * p)
                self._w = self._w + alpha * self._z + unit * (2 * u + 3 * alpha * t)
            if not pipelined:
                self._w, self._z = unit * u, 0 * unit
        self._u, self._p, self._t, self._fresh, self._steps = u, p, t, False, self._steps + 1

    def wide(self, active: np.ndarray, size: np.ndarray) -> bool:
        """Return True if rounding may be more than √eps / 16 of the residual, of this length, of an active system.

        Larger gaps, with √eps, make ill-conditioned systems take up to three times the steps of plain `cg`.
        """
        return bool((active & ~(self.r <= np.sqrt(self._eps) / 16 * size)).any() and self._s.values)

    def early(self, active: np.ndarray, size: np.ndarray) -> bool:
        """Return True if an active system has less than a quarter of its digits: it goes on faster with a new p."""
        digits = ratio(np.maximum(self._s.limit, self._eps * self._s.least), self._s.least, active)
        return bool((active & (size > self._s.least * digits**0.25)).any())

    def renewed(self) -> bool:
        """Begin anew, as all vectors are computed anew; return False if the last time was less than 20 steps ago."""
        soon, self._steps, self._fresh = self._steps < 20, 1, True
        return not soon


def _fitted(
    s: System, r: DistArray, u: DistArray, w: DistArray, gamma: Any, delta: Any, rr: Any
) -> tuple[DistArray, DistArray, Any, Any] | None:  # fmt: skip
    """Choose the powers of two of M and A by u = M r, w = A u, γ = rᴴ u and δ = uᴴ w, and return these anew.

    None where the powers stay as they are.
    """
    active, fitted = np.sqrt(np.maximum(rr, 0)) > s.limit, False
    for operator in ("M", "A"):
        with np.errstate(all="ignore"):
            size = np.where(active, np.abs(gamma / rr if operator == "M" else delta / gamma), 1.0)
        if s.fit(u, size) if operator == "A" else s.preconditioner is not None and s.preconditioned.fit(r, size):
            u = s.preconditioned(r)
            w, fitted = s.times(u), True
            gamma, delta = s.vectors.products((r, u), (w, u)).real
    return (u, w, gamma, delta) if fitted else None


def _curvature(s: System, u: DistArray, w: DistArray, p: DistArray) -> tuple[np.ndarray, np.ndarray]:
    """Return pᴴ A p, and for which systems it is below 0 by more than rounding; w is A u."""
    q = s.times(p)
    curvature, pp, qq, uu, ww = s.vectors.products((p, q), (p, p), (q, q), (u, u), (w, w)).real
    norm = np.sqrt(np.maximum(ratio(qq, pp, True), ratio(ww, uu, True)))  # at most ‖A‖
    return curvature, curvature < -s.n * np.finfo(s.dtype).eps * norm * pp


def _indefinite(s: System, gamma: Any, curvature: Any, m: Any, a: Any, step: int) -> LinAlgError:
    """Return the error of systems for which M, or A, is not positive definite: those where `m`, or `a`, is True."""
    m_power, a_power, b_power = s.preconditioned.exponents, s.times.exponents, s.exponents
    what, values, power, where = "A: pᴴ A p", curvature, -a_power - 2 * (m_power + b_power), a
    if m.any():
        what, values, power, where = "M: rᴴ M r", gamma, -m_power - 2 * b_power, m
    value = np.asarray(np.ldexp(values, power))[np.asarray(where)][0]
    return LinAlgError(f"cg takes positive definite {what} = {value:.3g} in iteration {step + 1}{s.at(where)}")
