"""Iterative methods for linear systems and least squares, which use a matrix by its products alone.

A matrix is a DistArray or a function of vectors.  All decisions are made on sums over the ranks, alike everywhere, and
scalars that one step needs are summed by one all-reduce.  Vectors lie like the right-hand side.

Many systems, stacks of matrices or several right-hand sides, take their steps together: each has scalars of its own,
and those of all systems are summed by the same all-reduce.  A system that has ended keeps its solution.

Where squares would leave the range of the dtype, right-hand sides and matrices are multiplied by powers of two, and
solutions by others at the end, so that results are those of numbers near 1.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.array.shapes import reshape
from parlinalg.linalg.matrices import LinAlgError
from parlinalg.linalg.vectors import (
    Apply,
    Basis,
    Operator,
    Product,
    Scaled,
    Vectors,
    applied,
    assumed_steps,
    check_callback,
    columns,
    met_odd,
    precise,
    product,
    refuse_scipy,
    shifted,
    tolerance,
)
from parlinalg.random.generator import default_rng


class _System:
    """A x = b as a method has it: b, the first x and its residual as vectors, and products that lie like them.

    All are those of a system with numbers near 1, if they are not: A, M and b times powers of two.  `solution` returns
    x as the user has it.
    """

    def __init__(
        self, name: str, a: Any, b: Any, x0: Any, m: Any, rtol: float, atol: float, maxiter: Any, callback: Any
    ) -> None:  # fmt: skip
        check_callback(name, callback)
        rtol, atol = tolerance(f"{name}: rtol", rtol), tolerance(f"{name}: atol", atol)
        maxiter = None if maxiter is None else whole(f"{name}: maxiter", maxiter, 0)
        self.dtype = precise(a, b, x0)
        self.name, self._given = name, {"A": a, "M": m}
        b, self._back = columns(name, b, [v for v in (a, m) if isinstance(v, DistArray)])
        self.b = b = b.astype(self.dtype, copy=False)
        self.layout, n = b.layout, b.shape[0 if b.ndim == 1 else -2]
        self.n, many = n, b.ndim > 1
        self.vectors = Vectors(b)
        self.factor = self.vectors.factor
        self._a = applied(a, name, n, stacks=many)
        self._m = None if m is None else applied(m, f"{name}'s M", n, stacks=many)
        self.times = Scaled(self._product, self.vectors)
        """The function that returns A x."""
        self.preconditioned = Scaled(self._preconditioned, self.vectors)
        """The function that returns M r."""
        self.maxiter = 10 * n if maxiter is None else maxiter
        x0 = None if x0 is None else self._first_guess(x0)
        norm, self.exponents, self.b, x, self.r = _begun(name, self.vectors, b, x0, self.times)
        if x0 is not None and (lost := self._nothing_left(b, norm)).any():  # solutions would have no digits
            self.times.exponents = np.zeros_like(self.times.exponents)
            x0 = self.vectors.chosen(lost, 0 * b, x0)
            norm, self.exponents, self.b, x, self.r = _begun(name, self.vectors, b, x0, self.times)
        self.x = zeros(b.shape, dtype=self.dtype, grid=b.grid, layout=b.layout) if x is None else x
        with np.errstate(over="ignore"):
            self.limit = np.maximum(rtol * norm, np.ldexp(atol, self.exponents))
        if x0 is not None and b.grid.backend.values and (norm == 0).any():  # 0 solves it
            self.x = self.x * self.factor(norm > 0)
            self.r = self.b - self.times(self.x)
        self.norm = norm  # ‖b‖, with M's of `minres` (bᴴ M b)½
        self.best, self.least, self.failed = self.x, norm, np.zeros(self.vectors.systems, bool)
        self.values = b.grid.backend.values
        self.assumed = assumed_steps(b)
        """The steps to be taken where values do not tell; None where they do."""
        if self.assumed is not None:
            self.limit = 0 * norm

    def _nothing_left(self, b: DistArray, norm: np.ndarray) -> np.ndarray:
        """Return of which systems b, of this length beside A x0, is lost in the residual b − A x0."""
        share = np.finfo(self.dtype).eps ** 4
        if not (self.b.grid.backend.values and (small := norm < share).any()):
            return np.zeros(self.vectors.systems, bool)
        (given,), _ = self.vectors.measured(b)
        found: np.ndarray = small & (given > 0) & (norm <= share * self.vectors.norm(self.b - self.r))
        return found

    def _first_guess(self, x0: Any) -> DistArray:
        """Return x0 as vectors; raise ValueError if it has not the solution's shape."""
        shape, one = self._back(self.b).shape, self.b.ndim == 1
        if not isinstance(x0, DistArray):
            raise ValueError(f"{self.name}: x0 is a DistArray of the solution's shape, {shape}, not {reprlib.repr(x0)}")
        if x0.shape not in (shape, *([(self.n,), (self.n, 1)] if one else [])):
            raise ValueError(f"{self.name}: x0 has the shape of the solution, {shape}, not {x0.shape}")
        return self._like(reshape(x0.summed(), self.b.shape), "x0").copy()

    def most(self) -> int:
        """Return the steps to be taken at most, of a method that counts `maxiter` in steps."""
        return self.maxiter if self.assumed is None else min(self.maxiter, self.assumed)

    def _product(self, x: DistArray) -> DistArray:
        y = self._a(x)
        if isinstance(self._a, Product) and y.layout == self.layout and y.dtype == self.dtype:
            return y  # an array of its own, which a function's need not be
        return self._like(y, "A x")

    def _preconditioned(self, r: DistArray) -> DistArray:
        return r if self._m is None else self._like(self._m(r), "M r")

    def _like(self, y: Any, what: str) -> DistArray:
        return product(y, self.b.shape, self.b, self.layout, self.dtype, f"{self.name}: {what}")

    def fit(self, x: DistArray, size: Any) -> bool:
        """Choose the power of A as `Scaled.fit` does; the solution so far is changed accordingly."""
        before = self.times.exponents
        fitted = self.times.fit(x, size)
        self.x = shifted(self.x, before - self.times.exponents)
        return fitted

    def unsolved(
        self, x: DistArray, told: np.ndarray, steps: Any, gap: Any, length: Callable[[DistArray], np.ndarray]
    ) -> tuple[np.ndarray, DistArray]:  # fmt: skip
        """Return which of the systems that x solves, as recurrences tell, are to go on, as it does not; and b − A x.

        They do if their residual is at most half as long as the last one that was computed so.  Others have `failed`,
        and keep their `best` solution; so do those whose x is so long that rounding it makes a residual like b.  What
        rounding x makes of the residual is no reason to go on.

        Parameters
        ----------
        told : array
            True of the systems.
        steps : array of int
            Those that a system has taken since b − A x was computed.
        gap : array
            How far rounding may have brought the residual of recurrences from b − A x.  Within the limit nothing is
            computed; but two steps do not tell: b may be nearly in the null space of A.
        length : function
            Of a residual the length that is compared with the limit.
        """
        told = told & (((steps > 0) & (steps <= 2)) | ~(gap <= self.limit))
        if not told.any():
            return np.zeros_like(self.failed), self.b
        noise = self.noise() * (10 * np.finfo(self.dtype).eps)
        with np.errstate(over="ignore", invalid="ignore"):
            size = length(r := self.b - self.times(x))
            rounded = length(self.times(x * noise))
        lost = told & ~(rounded <= np.maximum(self.limit, self.norm / 2))
        wrong = lost | (told & ~(size <= self.limit + rounded))
        again = wrong & ~lost & (size <= self.least / 2)
        self.failed = self.failed | (wrong & ~again)
        self.best, self.least = self.vectors.chosen(again, x, self.best), np.where(again, size, self.least)
        return again, r

    def noise(self) -> DistArray:
        """Return real vectors of random numbers, like x."""
        x = self.x
        return default_rng(0).normal(size=x.shape, grid=x.grid, layout=x.layout).astype(x.real.dtype)

    def solution(self, x: DistArray) -> DistArray:
        """Return a solution in the shape of b, in the user's units."""
        return self._back(shifted(x, self.times.exponents - self.exponents))

    def result(self, info: int) -> tuple[DistArray, int]:
        """Return the solution in the shape of b, and 0 or the number of iterations that did not suffice."""
        x = self.vectors.chosen(~self.failed, self.x, self.best) if self.failed.any() else self.x
        return self.solution(x), info if self.values else 0

    def finite(self, value: Any, step: int) -> Any:
        """Return numbers that decide; raise an error if one is none."""
        if not np.isfinite(value).all():
            raise met_odd(self.name, f" in iteration {step}{self.at(~np.isfinite(value))}", **self._given)
        return value

    def at(self, wrong: Any) -> str:
        """Return the words that name the first system of those that are wrong; none if there is one system."""
        return f" of system {tuple(int(i) for i in np.argwhere(wrong)[0])}" if np.ndim(wrong) else ""


def _begun(
    name: str, vectors: Vectors, b: DistArray, x0: DistArray | None, times: Scaled
) -> tuple[np.ndarray, np.ndarray, DistArray, DistArray | None, DistArray]:  # fmt: skip
    """Return ‖b‖, the exponents of the powers of two that bring b and A x0 near 1, and b, x0 and b − A x0, so scaled.

    A is scaled by the powers of `times`, which are chosen here if there is an x0.
    """
    sizes, powers = vectors.measured(b, *([] if x0 is None else [x0]))
    norm, exponents = sizes[0], powers[0]
    if not np.isfinite(norm).all():
        raise ValueError(f"{name} takes finite numbers; the right-hand side has NaNs or infinities")
    if not np.isfinite(sizes).all():
        raise ValueError(f"{name} takes finite numbers; x0 has NaNs or infinities")
    if x0 is None:
        b = shifted(b, exponents)
        return norm, exponents, b, None, b.copy()
    y = times(x := shifted(x0, powers[1]))
    (size,), (own,) = vectors.measured(y)
    changed = times.fit(x, np.ldexp(size, -own))
    image = times.exponents + powers[1]  # these bring A x0 near 1
    exponents = np.where(norm == 0, image, np.where(size == 0, exponents, np.minimum(exponents, image)))
    if changed or (exponents != image).any():
        y = times(x := shifted(x0, exponents - times.exponents))
    b = shifted(b, exponents)
    return np.ldexp(norm, exponents - powers[0]), exponents, b, x, b - y


def _ratio(x: Any, y: Any, where: Any) -> np.ndarray:
    """Return x / y of the systems where it counts, and 0 of the others."""
    x, y = np.broadcast_arrays(x, y)
    return np.divide(x, y, out=np.zeros(x.shape, np.result_type(x, y, np.float64)), where=np.asarray(where) & (y != 0))


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
    s = _System("cg", A, b, x0, M, rtol, atol, maxiter, callback)
    r, x, vectors = s.r, s.x, s.vectors
    systems, plus = vectors.systems, vectors.plus
    with np.errstate(over="ignore", invalid="ignore"):  # until A and M are in range
        u = s.preconditioned(r)
        w = s.times(u)
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
                m = s.preconditioned(w)
                n = s.times(m)
        before, (gamma, delta, rr, *squares) = gamma, summing().real
        if step == 0 and (fitted := _fitted(s, r, u, w, gamma, delta, rr)) is not None:
            x, (u, w, gamma, delta) = s.x, fitted
            if pipelined:
                m = s.preconditioned(w)
                n = s.times(m)
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
            u = s.preconditioned(r)
            w = s.times(u)
            if step < most:
                continue
        if step == most:
            break
        beta = 0.0 if first else _ratio(gamma, before, active)
        curvature = delta if first else delta - beta * _ratio(gamma, alpha, active)
        wrong = active & ((gamma <= 0) | (curvature <= 0)) & s.values
        if wrong.any() and not first:  # by rounding, if it is so no more with a true product or residual
            curvature, surely = _curvature(s, u, w, plus(u, s.factor(beta), p))
            if (surely := surely & wrong).any():
                raise _indefinite(s, gamma, curvature, np.zeros_like(surely), surely, step)
            r, taken, pipelined = s.b - s.times(x), 0 * taken, False
            u = s.preconditioned(r)
            w, first = s.times(u), True
            continue
        if wrong.any():
            raise _indefinite(s, gamma, curvature, active & (gamma <= 0), wrong, step)
        alpha, old = _ratio(gamma, curvature, active), alpha
        largest = np.maximum(largest, _ratio(1.0, alpha, active) + (0.0 if first else _ratio(beta, old, active)))
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
            u = s.preconditioned(r)
            w = s.times(u)
            if pipelined:
                t = s.preconditioned(q)
                z = s.times(t)
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

    def __init__(self, s: _System) -> None:
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
        if not self._steps and self._s._m is not None:  # u is smooth where M is good, and tells little of ‖A‖
            image = self._s.times(noise := self._s.noise())
            over, under = self._s.vectors.products((image, image), (noise, noise)).real
            self._norm = np.sqrt(_ratio(np.maximum(0, over), under, True))
        with np.errstate(over="ignore", invalid="ignore"):
            x, u, w, p, t = np.sqrt(np.maximum(0, squares))
            self._norm = np.maximum(self._norm, _ratio(w, u, True))
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
        digits = _ratio(np.maximum(self._s.limit, self._eps * self._s.least), self._s.least, active)
        return bool((active & (size > self._s.least * digits**0.25)).any())

    def renewed(self) -> bool:
        """Begin anew, as all vectors are computed anew; return False if the last time was less than 20 steps ago."""
        soon, self._steps, self._fresh = self._steps < 20, 1, True
        return not soon


def _fitted(
    s: _System, r: DistArray, u: DistArray, w: DistArray, gamma: Any, delta: Any, rr: Any
) -> tuple[DistArray, DistArray, Any, Any] | None:  # fmt: skip
    """Choose the powers of two of M and A by u = M r, w = A u, γ = rᴴ u and δ = uᴴ w, and return these anew.

    None where the powers stay as they are.
    """
    active, fitted = np.sqrt(np.maximum(rr, 0)) > s.limit, False
    for operator in ("M", "A"):
        with np.errstate(all="ignore"):
            size = np.where(active, np.abs(gamma / rr if operator == "M" else delta / gamma), 1.0)
        if s.fit(u, size) if operator == "A" else s._m is not None and s.preconditioned.fit(r, size):
            u = s.preconditioned(r)
            w, fitted = s.times(u), True
            gamma, delta = s.vectors.products((r, u), (w, u)).real
    return (u, w, gamma, delta) if fitted else None


def _curvature(s: _System, u: DistArray, w: DistArray, p: DistArray) -> tuple[np.ndarray, np.ndarray]:
    """Return pᴴ A p, and for which systems it is below 0 by more than rounding; w is A u."""
    q = s.times(p)
    curvature, pp, qq, uu, ww = s.vectors.products((p, q), (p, p), (q, q), (u, u), (w, w)).real
    norm = np.sqrt(np.maximum(_ratio(qq, pp, True), _ratio(ww, uu, True)))  # at most ‖A‖
    return curvature, curvature < -s.n * np.finfo(s.dtype).eps * norm * pp


def _indefinite(s: _System, gamma: Any, curvature: Any, m: Any, a: Any, step: int) -> LinAlgError:
    """Return the error of systems for which M, or A, is not positive definite: those where `m`, or `a`, is True."""
    m_power, a_power, b_power = s.preconditioned.exponents, s.times.exponents, s.exponents
    what, values, power, where = "A: pᴴ A p", curvature, -a_power - 2 * (m_power + b_power), a
    if m.any():
        what, values, power, where = "M: rᴴ M r", gamma, -m_power - 2 * b_power, m
    value = np.asarray(np.ldexp(values, power))[np.asarray(where)][0]
    return LinAlgError(f"cg takes positive definite {what} = {value:.3g} in iteration {step + 1}{s.at(where)}")


@primitive
def minres(
    A: Operator, b: DistArray, x0: DistArray | None = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: Operator | None = None, callback: Callable[[DistArray], Any] | None = None,
) -> tuple[DistArray, int]:  # fmt: skip
    """Solve A x = b for a Hermitian matrix, which may be indefinite, by minimal residuals (Paige and Saunders 1975).

    Arguments and results are those of `cg`; with M, residuals are measured as (rᴴ M r)½.  A step takes one product and
    two all-reduces of one number.

    A singular matrix may have no solution for b.  Then `info` is -1, if not for other systems the number of iterations,
    and x is a least-squares solution, not the shortest one (Choi, Paige and Saunders, "MINRES-QLP", 2011): with r =
    b − A x, ‖A r‖ is at most √eps ‖A‖ ‖r‖ (of M½ A M½ and M½ r, with M), and further steps made r no shorter but x
    ever longer.
    """
    s = _System("minres", A, b, x0, M, rtol, atol, maxiter, callback)
    v, systems = s.r, s.vectors.systems
    z, size = _preconditioned_start(s, v, rtol, atol)
    x = s.x
    s.best, s.least = x, size
    old_v, old_size, left, begun, taken = v, np.ones(systems), size, 0, np.zeros(systems, int)
    w = old_w = nothing = zeros(s.b.shape, dtype=s.dtype, grid=s.b.grid, layout=s.layout)
    c = old_c = np.ones(systems)
    sine = old_sine = norm = np.zeros(systems)
    grown = old_grown = inverse = np.zeros(systems)
    eps = np.finfo(s.dtype).eps
    doubt = lost = np.zeros(systems, bool)  # as A r is small; as there is no solution
    kept, before = x, left
    most = s.most()
    for step in range(most + 1):
        active = ((np.abs(left) > s.limit) & (size > 0) & ~lost & ~s.failed) | (not s.values)
        if not active.any():
            measured = lambda r: _length(s, r, s.preconditioned(r))  # noqa: E731
            gap = 10 * eps * (10 * norm * inverse) ** 2 * s.least  # Sleijpen, van der Vorst and Modersitzki (2000)
            active, v = s.unsolved(x, ~(lost | s.failed), taken, gap, measured)
            if not active.any():
                break
            z, old_v, w, old_w, begun = s.preconditioned(v), nothing, nothing, nothing, step
            left, size = (np.where(active, s.least, each) for each in (left, size))
            c = old_c = np.ones(systems)
            sine = old_sine = grown = old_grown = np.zeros(systems)
            doubt, taken = doubt & ~active, 0 * taken
        if step == most:
            break
        z, taken = z * s.factor(_ratio(1.0, size, active)), taken + active
        known = (s, z, active, v, size, old_v, old_size, step)
        delta, new, following, length = _lanczos_step(*known)
        if step == 0 and s.fit(z, np.where(active, np.hypot(delta, length), 1.0)):
            x = kept = s.x
            delta, new, following, length = _lanczos_step(*known)
        old_v, v = v, new
        old_size, size, current = size, np.where(active, s.finite(length, step), size), size
        first = c * delta - old_c * sine * current
        second, third = sine * delta + old_c * c * current, old_sine * current
        whole = np.hypot(first, size)
        turned = -(second * grown + third * old_grown)  # with Rᴴ y = ±1 for the triangle R, of signs that let y grow
        grown, old_grown = _ratio(turned + np.copysign(1.0, turned), whole, active), grown
        inverse = np.maximum(inverse, np.abs(grown))
        norm = np.maximum(norm, np.sqrt(delta**2 + size**2 + (current**2 if step > begun else 0)))
        if s.values and (small := active & ~doubt & (np.hypot(first, c * size) <= np.sqrt(eps) * norm)).any():
            kept, before = kept * s.factor(~small) + x * s.factor(small), np.where(small, np.abs(left), before)
            doubt, lost = doubt | small, lost | (small & (whole == 0))
            active = active & ~lost
        old_c, c, old_sine, sine = c, _ratio(first, whole, active), sine, _ratio(size, whole, active)
        old_w, w = w, (z - s.factor(third) * old_w - s.factor(second) * w) * s.factor(_ratio(1.0, whole, active))
        x = x + s.factor(np.where(active, c * left, 0)) * w
        left, z = np.where(active, -sine * left, left), following
        doubt = doubt & (np.abs(left) > before / 2)
        if (active & doubt).any():  # x has grown too long where rounding shows in its residual
            r = s.b - s.times(x)
            lost = lost | (active & doubt & ~(_length(s, r, s.preconditioned(r), step) <= 1.01 * np.abs(left)))
        s.x = x
        if callback is not None:
            callback(s.solution(x))
    solved, lost = ((np.abs(left) <= s.limit) | ((size == 0) & ~lost)) & ~s.failed, (lost | doubt) & ~s.failed
    if (lost := lost & ~solved).any():
        s.x = x * s.factor(~lost) + kept * s.factor(lost)
    return s.result(0 if solved.all() else -1 if (solved | lost).all() else max(step, 1))


def _preconditioned_start(s: _System, v: DistArray, rtol: float, atol: float) -> tuple[DistArray, np.ndarray]:
    """Return M v and (vᴴ M v)½ for the first residual v of `minres`; with M, its limit is one of such lengths too."""
    z = s.preconditioned(v)
    size = _length(s, v, z)
    if s._m is None:
        return z, s.finite(size, 0)
    norm = s.vectors.norm(v)
    with np.errstate(all="ignore"):
        gain = np.where(norm > 0, (size / norm) ** 2, 1.0)
    if s.preconditioned.fit(v, gain):
        z = s.preconditioned(v)
        size = _length(s, v, z)
    if (lost := (norm > 0) & (s.finite(size, 0) == 0)).any():
        raise LinAlgError(f"minres takes positive definite M: rᴴ M r = 0 in iteration 1{s.at(lost)}")
    unit = np.sqrt(np.ldexp(1.0, s.preconditioned.exponents))
    with np.errstate(over="ignore"):
        absolute = np.ldexp(atol * unit, s.exponents)
    s.norm = _length(s, s.b, s.preconditioned(s.b))
    s.limit = np.maximum(rtol * s.norm, absolute)
    return z, size


def _lanczos_step(
    s: _System, z: DistArray, active: Any, v: DistArray, size: Any, old_v: DistArray, old_size: Any, step: int
) -> tuple[np.ndarray, DistArray, DistArray, np.ndarray]:  # fmt: skip
    """Return zᴴ A z, the next vector v of Lanczos' recurrence, M v, and (vᴴ M v)½."""
    y = s.times(z)
    with np.errstate(over="ignore", invalid="ignore"):  # callers ask whether numbers are finite
        delta = s.vectors.products((z, y))[0].real
        new = y - s.factor(_ratio(delta, size, active)) * v
        v = new - s.factor(_ratio(size, old_size, active) if step else np.zeros_like(size)) * old_v
        following = s.preconditioned(v)
        return delta, v, following, _length(s, v, following, step)


def _length(s: _System, v: DistArray, z: DistArray, step: int = 0) -> np.ndarray:
    """Return (vᴴ z)½ for z = M v; raise LinAlgError if M is found not to be positive definite."""
    squared = s.vectors.products((v, z))[0].real
    if (squared < 0).any():
        least, at = squared.min(), s.at(squared < 0)
        raise LinAlgError(f"{s.name} takes positive definite M: rᴴ M r = {least:.3g} in iteration {step + 1}{at}")
    return np.sqrt(squared)


@primitive
def gmres(
    A: Operator, b: DistArray, x0: DistArray | None = None, *, rtol: float = 1e-5, atol: float = 0.0,
    restart: int | None = None, maxiter: int | None = None, M: Operator | None = None,
    callback: Callable[[DistArray], Any] | None = None,
) -> tuple[DistArray, int]:  # fmt: skip
    """Solve A x = b for any square matrix by generalized minimal residuals (Saad and Schultz 1986).

    Arguments and results are those of `cg` but for these:

    Parameters
    ----------
    restart : int, optional
        Products after which it begins anew from the solution so far; as many vectors are held.  20 by default.
    maxiter : int, optional
        The most restarts; 10 n by default.
    M : DistArray or function, optional
        About the inverse of A, applied from the right, so that residuals are those of A x = b.  It may differ from step
        to step (Saad 1993), for which its results are held too.
    callback : function, optional
        Called with x after each restart.

    A step takes one product and two all-reduces, of as many numbers as there are vectors.
    """
    s = _System("gmres", A, b, x0, M, rtol, atol, maxiter, callback)
    most = min(20 if restart is None else whole("gmres: restart", restart, 1), max(1, s.n))
    steps, systems = 0, s.vectors.systems
    least, best = np.full(systems, np.inf), s.x
    spoiled = np.zeros(systems, bool)  # by rounding, as of singular A: exact steps make no residual longer
    for turn in range(s.maxiter + 1):
        size = s.vectors.norm(s.r)
        if s.values and turn and (worse := ~(size <= 10 * least)).any():
            spoiled = spoiled | worse
            s.x, s.r = s.vectors.chosen(worse, best, s.x), s.vectors.chosen(worse, 0 * s.b, s.r)
            size = np.where(worse, least, size)
        active = np.array((s.finite(size, steps) > s.limit) & ~spoiled & (steps != s.assumed))
        best, least = s.vectors.chosen(size <= least, s.x, best), np.minimum(size, least)
        if not active.any() or turn == s.maxiter:
            break
        basis, h = Basis(s.vectors, most + 1), _Hessenberg(most, size, s.vectors.dtype)
        directions = basis if M is None else Basis(s.vectors, most)
        basis.append(s.r, np.where(active, size, 0))
        for j in range(most):
            z = s.preconditioned(basis[j])
            if M is not None and steps == 0 and s.preconditioned.fit_image(basis[j], z, active):
                z = s.preconditioned(basis[j])
            if M is not None:
                directions.append(z, np.ones(systems))
            w, column, length = basis.orthogonalized(s.times(z))
            if steps == 0 and s.fit(z, np.where(active, np.hypot(np.abs(column[0]), length), 1.0)):
                w, column, length = basis.orthogonalized(s.times(z))
            h.append(column, s.finite(length, steps), active)
            steps += 1
            if steps == s.assumed:
                break
            if s.values:
                active = active & (h.left > s.limit) & (length > np.finfo(s.dtype).eps * np.abs(column).max(axis=0))
            if not active.any():
                break
            basis.append(w, np.where(active, length, 0))
        with np.errstate(over="ignore", invalid="ignore"):  # the next turn asks whether x is better
            s.x = s.x + directions.combined(h.solution(s.values))
            s.r = s.b - s.times(s.x)
        if callback is not None:
            callback(s.solution(s.x))
    s.x = best
    return s.result(max(steps, 1) if spoiled.any() or active.any() else 0)


class _Hessenberg:
    """The Hessenberg matrices H of `gmres`, one a system, with ‖size e₁ − H y‖ as columns are added; on all ranks.

    Parameters
    ----------
    most : int
        The columns there is room for.
    size : array [*systems]
        The lengths of the first residuals.

    Attributes
    ----------
    left : array [*systems]
        The least such lengths, by Givens' rotations.
    """

    def __init__(self, most: int, size: Any, dtype: np.dtype[Any]) -> None:
        self.size, self.left = size, np.asarray(size)
        systems = self.left.shape
        self._h, self._columns = np.zeros((most + 1, most, *systems), dtype), 0
        self._row = np.ones((1, *systems), dtype)  # the last one of the rotations so far, which make H a triangle
        self._used = np.zeros(systems, int)

    def append(self, column: np.ndarray, length: Any, active: np.ndarray) -> None:
        """Add a column, whose last element is `length`; to systems that are not active it adds nothing."""
        j = self._columns
        self._h[: j + 1, j], self._h[j + 1, j] = column, length
        self._columns, self._used = j + 1, np.where(active, j + 1, self._used)
        last = (self._row * column).sum(axis=0)
        whole = np.hypot(np.abs(last), length)
        cosine, sine = _ratio(last, whole, True), _ratio(length, whole, True)
        self._row = np.concatenate([-sine * self._row, cosine[None]])
        self.left = np.where(active, self.left * sine, self.left)

    def solution(self, values: bool) -> np.ndarray:
        """Return the y of each system, [columns, *systems]; zeros unless there are `values`."""
        y = np.zeros((self._columns, *self._used.shape), self._h.dtype)
        for at in np.ndindex(*self._used.shape) if values else ():
            n = int(self._used[at])
            right = np.zeros(n + 1)
            right[0] = self.size[at]
            y[(slice(n), *at)] = np.linalg.lstsq(self._h[(slice(n + 1), slice(n), *at)], right)[0]
        return y


class LsqrResult(NamedTuple):
    """The result of `lsqr`, in SciPy's order: the solution, why it ended, iterations, and norms.

    `istop` is 0 if x0, by default 0, is the solution, 1 if A x = b is solved to the tolerances, 2 if the least squares
    are, 4 or 5 if these are solved as far as rounding lets them be (with tolerances below eps), 6 if A's condition
    seems to be 1 / eps or more, and 7 if the iterations did not suffice.  `r1norm` is ‖b − A x‖, `r2norm` has the
    damping in it, `anorm` and `acond` estimate A's Frobenius norm and condition, `arnorm` is ‖Aᴴ r‖, `xnorm` ‖x‖.  Of
    many systems all but `itn` are NumPy arrays [..., k], the same on all ranks.
    """

    x: DistArray
    istop: Any
    itn: int
    r1norm: Any
    r2norm: Any
    anorm: Any
    acond: Any
    arnorm: Any
    xnorm: Any


@primitive
def lsqr(
    A: DistArray | tuple[Apply, Apply], b: DistArray, damp: float = 0.0, atol: float = 1e-6, btol: float = 1e-6,
    *, iter_lim: int | None = None, x0: DistArray | None = None, callback: Callable[[DistArray], Any] | None = None,
) -> LsqrResult:  # fmt: skip
    """Return the x for which ‖b − A x‖² + damp² ‖x − x0‖² is least (Paige and Saunders 1982).

    Parameters
    ----------
    A : DistArray [m, n] or [..., m, n], or two functions
        Of x and of y: A x and Aᴴ y.
    b : DistArray [m] or [..., m, k]
        Every column is a system of its own, as in `cg`.
    damp : float
    atol, btol : float
        It ends when ‖r‖ ≤ btol ‖b‖ + atol ‖A‖ ‖x‖, or ‖Aᴴ r‖ ≤ atol ‖A‖ ‖r‖, or what is left is rounding.
    iter_lim : int, optional
        2 n by default.
    x0 : DistArray, optional
        Where to begin, of the solution's shape; zeros by default.
    callback : function, optional
        Called with x after each iteration.

    A step takes a product with A and one with Aᴴ, and three all-reduces of a number or two a system.
    """
    forward, backward = _both_products(A, b)
    check_callback("lsqr", callback)
    damp, atol, btol = (tolerance(f"lsqr: {k}", v) for k, v in (("damp", damp), ("atol", atol), ("btol", btol)))
    g = _Bidiagonalization(forward, backward, A, b, x0)
    n = g.v.shape[0 if g.v.ndim == 1 else -2]
    iterations = 2 * n if iter_lim is None else whole("lsqr: iter_lim", iter_lim, 0)
    assumed, eps = assumed_steps(g.u), float(np.finfo(g.u.dtype).eps) / 2
    if assumed is not None:
        iterations, atol, btol, eps = min(iterations, assumed), -1.0, -1.0, -1.0  # no test of convergence is passed
    damping, excess = _damping(damp, g)
    ahead = 2 * excess if x0 is None else 0 * excess  # x is held times 2 to this power
    x, w, rho_bar, phi_bar = g.x, g.v.copy(), g.alpha, g.beta
    frobenius = directions = damped = np.zeros(g.high.systems)
    x_length = frobenius if x0 is None else g.wide.norm(x)
    istop = np.where(g.alpha * g.beta > 0, 7, 0)
    done, r2, ar = 0, g.beta, g.alpha * g.beta
    while (istop == 7).any() and done < iterations:
        active, alpha = istop == 7, g.alpha
        done += 1
        g.step()
        frobenius = np.where(active, np.hypot(np.hypot(frobenius, alpha), np.hypot(g.beta, damping)), frobenius)
        turned = np.hypot(rho_bar, damping)
        damped = np.where(active, np.hypot(damped, damping * _ratio(phi_bar, turned, active)), damped)
        phi_bar = phi_bar * _ratio(rho_bar, turned, active)
        rho = np.hypot(turned, g.beta)
        c, s = _ratio(turned, rho, active), _ratio(g.beta, rho, active)
        theta, rho_bar, phi, phi_bar = s * g.alpha, -c * g.alpha, c * phi_bar, s * phi_bar
        x = x + g.wide.factor(_ratio(phi, rho, active)) * shifted(w, ahead - 2 * excess)
        squares = g.wide.products((w, w), (x, x)).real
        directions = directions + np.where(active, squares[0] * _ratio(1.0, rho, active) ** 2, 0)
        x_length = np.sqrt(squares[1])
        w = g.v - g.wide.factor(_ratio(theta, rho, active)) * w
        if callback is not None:
            callback(g.solution(x, ahead))
        r2, ar = np.where(active, np.hypot(phi_bar, damped), r2), np.where(active, g.alpha * abs(s * phi), ar)
        condition = frobenius * np.sqrt(directions)
        istop = np.where(active, _why(g.norm, r2, ar, frobenius, condition, x_length, atol, btol, eps), istop)
    if assumed is not None:
        istop = np.ones_like(istop)
    moved = x_length if x0 is None else g.wide.norm(x - g.x)
    r1 = np.sqrt(np.maximum(0.0, r2**2 - (damping * moved) ** 2))
    a_power, b_power = g.times.exponents, g.exponents  # of the system whose norms these are
    powers = (
        -b_power, -b_power, excess - a_power, 0 * a_power, -a_power - b_power - 2 * excess, a_power - b_power - ahead
    )  # fmt: skip
    numbers = [r1, r2, frobenius, frobenius * np.sqrt(directions), ar, x_length]
    with np.errstate(over="ignore"):
        numbers = [np.ldexp(x, power) for x, power in zip(numbers, powers, strict=True)]
    ended, *lengths = (each if g.high.systems else np.asarray(each).item() for each in (istop, *numbers))
    return LsqrResult(g.solution(x, ahead), ended, done, *lengths)


def _damping(damp: float, g: _Bidiagonalization) -> tuple[np.ndarray, np.ndarray]:
    """Return the damping of A times its powers, divided by powers of two, and the exponents of these.

    They are 0 unless the damping is so much larger than A that x = Aᴴ b / damp² but for rounding, and its square may
    leave the range.  Results of the smaller damping are in proportion.
    """
    mantissa, exponent = np.frexp(damp)
    powers = exponent + g.times.exponents
    limits = np.finfo(g.u.dtype)  # the squares of x, of about 1 / damping², are summed in double precision
    most = np.frexp(g.alpha)[1] + min(limits.maxexp * 2 // 5, 170)
    excess = np.maximum(0, powers - most) if damp else 0 * powers
    return np.ldexp(mantissa, powers - excess), excess


def _why(
    norm: Any, r: Any, ar: Any, frobenius: Any, condition: Any, x: Any, atol: float, btol: float, eps: float
) -> np.ndarray:  # fmt: skip
    """Return `istop` by the tests of Paige and Saunders (1982); 7 of systems that go on.

    They are of ‖b‖, ‖r‖, ‖Aᴴ r‖, ‖A‖, the condition of A and ‖x‖, and half of eps.
    """
    tests = (
        (1, r <= btol * norm + atol * frobenius * x),
        (2, ar <= atol * frobenius * r),
        (4, r <= eps * (norm + frobenius * x)),
        (5, ar <= eps * frobenius * r),
        (6, condition * eps >= 1),
    )
    return np.select([test for _, test in tests], [number for number, _ in tests], 7)


def _both_products(a: Any, b: Any) -> tuple[Apply, Apply]:
    """Return the products by A and by Aᴴ that `lsqr` is given, or those of a matrix.

    Raises
    ------
    TypeError, ValueError, LinAlgError
        If A is neither a matrix nor two functions, or b has other rows.
    """
    if isinstance(a, DistArray):
        rows = b.shape[0 if b.ndim == 1 else -2] if isinstance(b, DistArray) and b.ndim else None
        if rows is None:
            what = f"a DistArray of shape {b.shape}" if isinstance(b, DistArray) else type(b).__name__
            raise ValueError(f"lsqr takes a right-hand side of shape (m,) or (..., m, k), a DistArray, not {what}")
        if a.ndim < 2 or rows != a.shape[-2]:
            raise LinAlgError(
                f"lsqr takes a matrix [m, n] and b [m], or stacks [..., m, n] and [..., m, k], not {a.shape} and "
                f"{b.shape}"
            )
        adjoint = a.summed().mT.conj()
        forward = applied(a, "lsqr", a.shape[-1], False, stacks=True)
        return forward, applied(adjoint, "lsqr", a.shape[-2], False, stacks=True)
    if isinstance(a, tuple) and len(a) == 2 and all(map(callable, a)):
        return a
    refuse_scipy(a, "lsqr")
    raise TypeError(f"lsqr takes a DistArray or two functions (of x and of y: A x, Aᴴ y), not {type(a).__name__}")


class _Bidiagonalization:
    """Unit vectors u and v and numbers α and β with β u = A v − α u and α v = Aᴴ u − β v (Golub and Kahan 1965).

    The first β u is b − A x0.  A and b are multiplied by powers of two where squares would leave the range.

    Attributes
    ----------
    x : DistArray
        The first solution.
    norm : array
        ‖b‖.
    exponents : array of int
        Of the powers by which b is multiplied; those of A are `times.exponents`.
    """

    def __init__(self, forward: Apply, backward: Apply, a: Any, b: Any, x0: Any) -> None:
        dtype = precise(a, b, x0)
        self._given = {"A": a}
        u, self._back = columns("lsqr", b, [a])
        rows, layout, u = u.shape, u.layout, u.astype(dtype, copy=False)
        self.high = Vectors(u)
        self.times = Scaled(lambda x: product(forward(x), rows, b, layout, dtype, "lsqr: A x"), self.high)
        start = None if x0 is None else _first_guess(x0, a, b, u).astype(dtype, copy=False)
        self.norm, self.exponents, _, start, u = _begun("lsqr", self.high, u, start, self.times)
        self.u, self.beta = self._normalized(u, self.high, self.norm if x0 is None else self.high.norm(u))
        found: tuple[int | None, ...] = (None,) if u.ndim == 1 else (*u.shape[:-2], None, u.shape[-1])
        v = product(backward(self.u), found, b, None, dtype, "lsqr: Aᴴ y")
        shape, lie = v.shape, v.layout
        self.wide = Vectors(v)
        self.adjoint = Scaled(lambda y: product(backward(y), shape, b, lie, dtype, "lsqr: Aᴴ y"), self.wide)
        before = self.adjoint.exponents = self.times.exponents
        if before.any():
            v = self.adjoint(self.u)
        with np.errstate(over="ignore", invalid="ignore"):  # until A is in range
            alpha = self.wide.norm(v)
        if self.adjoint.fit(self.u, np.where(self.beta > 0, alpha, 1.0)):
            v = self.adjoint(self.u)
            alpha, self.times.exponents = self.wide.norm(v), self.adjoint.exponents
        self.v, self.alpha = self._normalized(v, self.wide, alpha)
        self.x = v * 0.0 if start is None else start.redistribute(lie).copy()
        self.x = shifted(self.x, before - self.times.exponents)

    def step(self) -> None:
        """Go on to the next u, β, v and α."""
        u = self.times(self.v) - self.high.factor(self.alpha) * self.u
        self.u, self.beta = self._normalized(u, self.high, self.high.norm(u))
        v = self.adjoint(self.u) - self.wide.factor(self.beta) * self.v
        self.v, self.alpha = self._normalized(v, self.wide, self.wide.norm(v))

    def solution(self, x: DistArray, ahead: Any) -> DistArray:
        """Return a solution, held times 2 to the power `ahead`, in the shape of b, in the user's units."""
        return self._back(shifted(x, self.times.exponents - self.exponents - ahead))

    def _normalized(self, x: DistArray, vectors: Vectors, size: np.ndarray) -> tuple[DistArray, np.ndarray]:
        if not np.isfinite(size).all():
            raise met_odd("lsqr", **self._given)
        return x * vectors.factor(np.where(size > 0, _ratio(1.0, size, True), 1.0)), size


def _first_guess(x0: Any, a: Any, b: DistArray, u: DistArray) -> DistArray:
    """Return x0 of `lsqr` as the columns of the systems, which lie like those of the right-hand side u."""
    if not isinstance(x0, DistArray) or not x0.ndim or x0.grid is not b.grid:
        raise ValueError(f"lsqr: x0 is a DistArray of the solution's shape on b's grid, not {x0!r}")
    lead, one = u.shape[:-2], u.ndim == 1
    n = a.shape[-1] if isinstance(a, DistArray) else x0.shape[0 if one or x0.ndim == 1 else -2]
    inner = (n,) if one else (*lead, n, u.shape[-1])
    shape = (n, *b.shape[1:]) if one else (*lead, n) if b.ndim == 1 else inner
    if x0.shape not in (shape, inner):
        raise ValueError(f"lsqr: x0 has the shape of the solution, {shape}, not {x0.shape}")
    return reshape(x0.summed(), inner).redistribute(u.layout)
