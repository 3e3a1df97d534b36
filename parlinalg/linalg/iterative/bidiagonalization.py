"""Least squares by bidiagonalization: `lsqr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.dispatch import primitive
from parlinalg.array.shapes import reshape
from parlinalg.linalg.iterative.systems import begun, ratio
from parlinalg.linalg.iterative.vectors import (
    Apply,
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
from parlinalg.linalg.matrices import LinAlgError


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
        damped = np.where(active, np.hypot(damped, damping * ratio(phi_bar, turned, active)), damped)
        phi_bar = phi_bar * ratio(rho_bar, turned, active)
        rho = np.hypot(turned, g.beta)
        c, s = ratio(turned, rho, active), ratio(g.beta, rho, active)
        theta, rho_bar, phi, phi_bar = s * g.alpha, -c * g.alpha, c * phi_bar, s * phi_bar
        x = x + g.wide.factor(ratio(phi, rho, active)) * shifted(w, ahead - 2 * excess)
        squares = g.wide.products((w, w), (x, x)).real
        directions = directions + np.where(active, squares[0] * ratio(1.0, rho, active) ** 2, 0)
        x_length = np.sqrt(squares[1])
        w = g.v - g.wide.factor(ratio(theta, rho, active)) * w
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
        self.norm, self.exponents, _, start, u = begun("lsqr", self.high, u, start, self.times)
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
        return x * vectors.factor(np.where(size > 0, ratio(1.0, size, True), 1.0)), size


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
