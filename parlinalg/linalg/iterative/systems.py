"""Systems A x = b as iterative methods have them: scaled, with their residuals, and products that lie like them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import zeros
from parlinalg.array.shapes import reshape
from parlinalg.linalg.iterative.vectors import (
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
    shifted,
    tolerance,
)
from parlinalg.random.generator import default_rng


class System:
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
        self.preconditioner = None if m is None else applied(m, f"{name}'s M", n, stacks=many)
        self.times = Scaled(self._product, self.vectors)
        """The function that returns A x."""
        self.preconditioned = Scaled(self._preconditioned, self.vectors)
        """The function that returns M r."""
        self.maxiter = 10 * n if maxiter is None else maxiter
        x0 = None if x0 is None else self._first_guess(x0)
        norm, self.exponents, self.b, x, self.r = begun(name, self.vectors, b, x0, self.times)
        if x0 is not None and (lost := self._nothing_left(b, norm)).any():  # solutions would have no digits
            self.times.exponents = np.zeros_like(self.times.exponents)
            x0 = self.vectors.chosen(lost, 0 * b, x0)
            norm, self.exponents, self.b, x, self.r = begun(name, self.vectors, b, x0, self.times)
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
        return r if self.preconditioner is None else self._like(self.preconditioner(r), "M r")

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

    def both(self, r: DistArray) -> tuple[DistArray, DistArray]:
        """Return M r and A M r."""
        u = self.preconditioned(r)
        return u, self.times(u)

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


def begun(
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


def ratio(x: Any, y: Any, where: Any) -> np.ndarray:
    """Return x / y of the systems where it counts, and 0 of the others."""
    x, y = np.broadcast_arrays(x, y)
    return np.divide(x, y, out=np.zeros(x.shape, np.result_type(x, y, np.float64)), where=np.asarray(where) & (y != 0))
