"""Methods that minimize residuals: `minres` of symmetric matrices and `gmres` of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.linalg.iterative.systems import System, ratio
from parlinalg.linalg.iterative.vectors import (
    Basis,
    Operator,
)
from parlinalg.linalg.matrices import LinAlgError


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
    s = System("minres", A, b, x0, M, rtol, atol, maxiter, callback)
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
        z, taken = z * s.factor(ratio(1.0, size, active)), taken + active
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
        grown, old_grown = ratio(turned + np.copysign(1.0, turned), whole, active), grown
        inverse = np.maximum(inverse, np.abs(grown))
        norm = np.maximum(norm, np.sqrt(delta**2 + size**2 + (current**2 if step > begun else 0)))
        if s.values and (small := active & ~doubt & (np.hypot(first, c * size) <= np.sqrt(eps) * norm)).any():
            kept, before = kept * s.factor(~small) + x * s.factor(small), np.where(small, np.abs(left), before)
            doubt, lost = doubt | small, lost | (small & (whole == 0))
            active = active & ~lost
        old_c, c, old_sine, sine = c, ratio(first, whole, active), sine, ratio(size, whole, active)
        old_w, w = w, (z - s.factor(third) * old_w - s.factor(second) * w) * s.factor(ratio(1.0, whole, active))
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


def _preconditioned_start(s: System, v: DistArray, rtol: float, atol: float) -> tuple[DistArray, np.ndarray]:
    """Return M v and (vᴴ M v)½ for the first residual v of `minres`; with M, its limit is one of such lengths too."""
    z = s.preconditioned(v)
    size = _length(s, v, z)
    if s.preconditioner is None:
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
    s: System, z: DistArray, active: Any, v: DistArray, size: Any, old_v: DistArray, old_size: Any, step: int
) -> tuple[np.ndarray, DistArray, DistArray, np.ndarray]:  # fmt: skip
    """Return zᴴ A z, the next vector v of Lanczos' recurrence, M v, and (vᴴ M v)½."""
    y = s.times(z)
    with np.errstate(over="ignore", invalid="ignore"):  # callers ask whether numbers are finite
        delta = s.vectors.products((z, y))[0].real
        new = y - s.factor(ratio(delta, size, active)) * v
        v = new - s.factor(ratio(size, old_size, active) if step else np.zeros_like(size)) * old_v
        following = s.preconditioned(v)
        return delta, v, following, _length(s, v, following, step)


def _length(s: System, v: DistArray, z: DistArray, step: int = 0) -> np.ndarray:
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
    s = System("gmres", A, b, x0, M, rtol, atol, maxiter, callback)
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
        cosine, sine = ratio(last, whole, True), ratio(length, whole, True)
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
