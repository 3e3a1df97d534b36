"""Factorizations of stacks of matrices that stay for many solutions.

As many matrices as ranks, or more, are distributed, and each rank factors its own by LAPACK.  Fewer are factored by all
ranks one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import computed
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import stack
from parlinalg.array.namespace import broadcast_to, tril
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import Factor, SlogdetResult
from parlinalg.linalg.factors.cholesky import CholeskyFactor
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import QRFactor
from parlinalg.linalg.matrices import (
    INDEFINITE,
    SINGULAR,
    LinAlgError,
    as_matrix,
    naming,
    raise_first,
    refuse_nonfinite,
)
from parlinalg.linalg.panels.lu import determinant
from parlinalg.linalg.tiles import worst


# ------------------------------------------------------------------------------------------------ of one rank
class Local:
    """A factorization of a matrix that a rank has."""

    _t: np.ndarray
    zero: int | None = None
    problem = ""
    """The reason why the matrix has no such factorization, or nothing."""

    def joined(self, t: np.ndarray) -> Any:
        """Return the factorization with this array."""
        found = copy(self)
        found._t = t
        return found


class LocalWithDeterminant(Local):
    """A factorization with triangles; `diagonal` has the numbers whose product is the determinant, up to its sign."""

    diagonal: np.ndarray
    order: np.ndarray

    def det(self) -> np.ndarray:
        """Return the determinant of A."""
        return np.asarray(determinant(self.diagonal, self.order)[0], self._t.dtype)

    def slogdet(self) -> tuple[Any, Any]:
        """Return the sign (or phase) of the determinant and the logarithm of its size."""
        return determinant(self.diagonal, self.order)[1:]


class LocalCholesky(LocalWithDeterminant):
    """A = L Lᴴ of a matrix that a rank has; `minor` is the order of the first minor that is not positive, or 0."""

    def __init__(self, a: np.ndarray) -> None:
        t = namespace(a).array(a, order="C")
        self.minor = kernels.cholesky(t) if len(a) else 0
        self._t = np.tril(t)
        self.diagonal, self.order = np.repeat(np.diag(self._t).real, 2), np.arange(0)
        if self.minor:
            self.problem = INDEFINITE.format(self.minor)

    def solution(self, b: np.ndarray) -> np.ndarray:
        """Return x of A x = b."""
        x = namespace(b).array(b, order="C")
        for adjoint in (False, True):
            kernels.substitute(self._t, x, lower=True, adjoint=adjoint)
        return x


class LocalLU(LocalWithDeterminant):
    """P A = L U of a matrix that a rank has."""

    def __init__(self, a: np.ndarray) -> None:
        t, self.order = kernels.lu(a)
        self._t = namespace(t).ascontiguousarray(t)
        self.diagonal = np.diag(self._t).copy()
        zeros = kernels.zeros(self.diagonal)
        self.zero = int(zeros[0]) if len(zeros) else None

    def solution(self, b: np.ndarray, adjoint: bool = False) -> np.ndarray:
        """Return x of A x = b, or with `adjoint` of Aᴴ x = b."""
        x = namespace(b).array(b if adjoint else b[self.order], order="C")
        triangles = [(True, True), (False, False)]
        for lower, unit in reversed(triangles) if adjoint else triangles:
            kernels.substitute(self._t, x, lower=lower, adjoint=adjoint, unit=unit)
        if adjoint:
            x[self.order] = x.copy()
        return x

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return L [m, k] and U [k, n]."""
        m, n = self._t.shape
        k = min(m, n)
        return np.tril(self._t[:, :k], -1) + np.eye(m, k, dtype=self._t.dtype), np.triu(self._t[:k])


class LocalQR(Local):
    """A = Q R of a matrix that a rank has."""

    def __init__(self, a: np.ndarray) -> None:
        self.q, self.r = np.linalg.qr(a)
        zeros = kernels.zeros(np.diag(self.r))
        self.zero = int(zeros[0]) if len(zeros) else None

    def Q(self, columns: int) -> np.ndarray:
        """Return the first columns of Q."""
        k = self.q.shape[1]
        if columns <= k:
            return self.q[:, :columns]
        return np.concatenate([self.q, np.linalg.qr(self.q, "complete")[0][:, k:columns]], axis=1)

    def solution(self, b: np.ndarray) -> np.ndarray:
        """Return the x for which ‖A x - b‖ is least, for m ≥ n."""
        x = namespace(b).ascontiguousarray(kernels.adjoint(self.q) @ b)
        kernels.substitute(self.r, x)
        return x


def _listed(block: np.ndarray) -> np.ndarray:
    """Return a stack of matrices along one dim."""
    return block.reshape(math.prod(block.shape[:-2]), *block.shape[-2:])


# ------------------------------------------------------------------------------------------------ of all ranks
class FactorStack(Factor):
    """The factorizations of matrices [..., m, n]."""

    def __init__(self, a: DistArray, name: str, make: Callable[[DistArray], Any], local: Callable[..., Any]) -> None:
        super().__init__(a)
        self.stacks = a.shape[:-2]
        count = math.prod(self.stacks)
        self.together = 0 < count < a.grid.size
        self._cut = a.grid.default_layout(self.stacks)
        self.held: list[Any] = []
        if self.together:
            for at in np.ndindex(*self.stacks):
                with naming(at):
                    self.held.append(make(a[at]))
            self._unite()
            return
        block = a.grid.backend.to_host(a.redistribute(Layout(*self._cut.dims, None, None)).block)
        nonfinite = not kernels.finite(block)
        if a.grid.inside and not nonfinite:
            with np.errstate(all="ignore"):
                self.held = [local(each) for each in _listed(block)]
        reported = a.grid.world.share((nonfinite, self._first(lambda f: f.problem)), others="alike")
        refuse_nonfinite(any(each for each, _ in reported), name)
        raise_first(problem for _, problem in reported)
        self._unite()

    def _unite(self) -> None:
        """Put the arrays of all factorizations into one, which `apart` returns."""
        self._t = np.empty((0, 0, 0), self.dtype)
        if self.held and hasattr(self.held[0], "_t"):
            self._t = np.stack([factor._t for factor in self.held])
            self.held = self.joined(self._t).held

    def joined(self, t: np.ndarray) -> Any:
        """Return the factorizations with these arrays."""
        found = copy(self)
        found._t = t
        found.held = [f.joined(t[i] if len(t) else t) for i, f in enumerate(self.held)]
        return found

    def _first(self, problem: Callable[[Any], str]) -> tuple[list[int], str] | None:
        """Return the index of the first of this rank's matrices with a problem, and the problem; None of none."""
        corner = [r.start for r in self.grid.block(self._cut, self.stacks)] if self.grid.inside else []
        lengths = self.grid.block_shape(self._cut, self.stacks)
        for number, factor in enumerate(self.held):
            if text := problem(factor):
                at = np.unravel_index(number, lengths)
                return [int(c + i) for c, i in zip(corner, at, strict=True)], text
        return None

    def _results(
        self, one: Callable[..., Any], core: tuple[int, ...], dtype: Any = None, rest: Layout | None = None,
        b: DistArray | None = None, check: bool = False,
    ) -> DistArray:  # fmt: skip
        """Return the results of a function of a factorization and of the matrix of b for all of them, [..., *core].

        With `check`, NaNs and infinities of b are refused.
        """
        rest, grid = self.layout if rest is None else rest, self.grid
        dtype = self.dtype if dtype is None else dtype
        shape = (*self.stacks, *core)
        final = Layout(*rest.dims[: len(shape)])
        if self.together:
            indices = np.ndindex(*self.stacks)
            if b is not None:
                b = b.summed()
                self._refuse_nonfinite(check, b.block)
            each = [one(f) if b is None else one(f, b[at]) for f, at in zip(self.held, indices, strict=True)]
            return reshape(stack(each), shape).redistribute(final)
        layout = Layout(*self._cut.dims, *[None] * len(core))
        out = kernels.on_host(grid.backend).empty(grid.block_shape(layout, shape), dtype)
        sides: Any = None
        if b is not None:
            moved = b.redistribute(Layout(*self._cut.dims, None, None))
            self._refuse_nonfinite(check, moved.block)
            sides = _listed(grid.backend.to_host(moved.block))
        flat = out.reshape(len(self.held), *core) if grid.inside else out
        for number, factor in enumerate(self.held):
            flat[number] = one(factor) if b is None else one(factor, sides[number])
        return DistArray(grid.backend.from_host(out), shape, layout, grid).redistribute(final)

    def _matrices_of(self, b: Any, rows: int) -> DistArray:
        """Return b as matrices, one for each factorization."""
        given, b = b, as_matrix(b, "solve", vectors=True)
        b = b[:, None] if b.ndim == 1 else b
        lead = b.shape[:-2]
        fits = len(lead) <= len(self.stacks) and all(
            k in (1, n) for k, n in zip(lead[::-1], self.stacks[::-1], strict=False)
        )
        if b.shape[-2] != rows or b.grid is not self.grid or not fits:
            raise ValueError(
                f"solve takes right-hand sides of shape ({rows},) or (..., {rows}, k) on the grid of these factors of "
                f"shape {self.shape}, not of {b.shape}"
            )
        return broadcast_to(self._of_one_dtype(b, given.dtype), (*self.stacks, *b.shape[-2:]))

    def _refuse_nonfinite(self, check: bool, block: Any) -> None:
        """Raise an error on all ranks if `check` is given and a rank's right-hand sides have NaNs or infinities."""
        if check:
            refuse_nonfinite(worst(self.grid, [not kernels.finite(block)])[0], "solve")

    def _solved(self, b: DistArray, rows: int, n: int, solve: Callable[..., Any], check: bool) -> DistArray:
        sides = self._matrices_of(b, rows)
        x = self._results(solve, (n, sides.shape[-1]), rest=sides.layout.with_partial(()), b=sides, check=check)
        return x[..., 0] if b.ndim == 1 else x

    def _regular(self, problem: str) -> None:
        """Raise an error if a matrix is singular.  Collective."""
        self.grid.check_open()
        if self.together:
            zeros = zip(np.ndindex(*self.stacks), (factor.zero for factor in self.held), strict=True)
            raise_first((list(at), problem.format(zero)) for at, zero in zeros if zero is not None)
            return
        mine = self._first(lambda f: problem.format(f.zero) if f.zero is not None else "")
        raise_first(self.grid.world.share(mine, others="alike"))


class StackWithDeterminant(FactorStack):
    """Factorizations of matrices that tell the determinants."""

    def det(self) -> DistArray:
        """Return the determinants."""
        self._square("have determinants")
        return self._results(lambda f: f.det(), ())

    def slogdet(self) -> SlogdetResult:
        """Return the signs (or phases) of the determinants and the logarithms of their sizes."""
        self._square("have determinants")
        real = np.empty(0, self.dtype).real.dtype
        return SlogdetResult(
            self._results(lambda f: f.slogdet()[0], ()), self._results(lambda f: f.slogdet()[1], (), real)
        )

    def _square(self, what: str) -> None:
        if self.shape[-2] != self.shape[-1]:
            raise LinAlgError(f"only square matrices {what}, not {self.shape}")


class CholeskyStack(StackWithDeterminant):
    """The factorizations A = L Lᴴ of Hermitian positive definite matrices [..., n, n]; made by `cho_factor`."""

    maker = "cho_factor"

    def __init__(self, a: DistArray, block: int | None = None) -> None:
        a = as_matrix(a, "cholesky", square=True)
        super().__init__(tril(a), "cholesky", lambda x: CholeskyFactor(x, block), LocalCholesky)

    @property
    def L(self) -> DistArray:
        """The lower triangular factors, in the layout of A."""
        return self._results(lambda f: f.L if self.together else f._t, self.shape[-2:])

    def solution(self, b: DistArray, adjoint: bool = False, *, check: bool = False) -> DistArray:
        """Return what `solve` does, with `adjoint` too; without `check`, NaNs and infinities of b make NaNs of x."""
        n = self.shape[-1]
        return self._solved(b, n, n, lambda f, each: f.solution(each), check)


class LUStack(StackWithDeterminant):
    """The factorizations P A = L U of matrices [..., m, n]; made by `lu_factor`."""

    maker = "lu_factor"

    def __init__(self, a: DistArray, block: int | None = None) -> None:
        a = as_matrix(a, "lu_factor")
        super().__init__(a, "lu_factor", lambda x: LUFactor(x, block), LocalLU)

    @primitive
    def solve(self, b: DistArray, adjoint: bool = False) -> DistArray:
        """Return x of A x = b, or with `adjoint` of Aᴴ x = b, for b of shape (n,) or (..., n, k), in the layout of b.

        Raises
        ------
        LinAlgError
            If a matrix is singular, which it names.
        ValueError
            If b has NaNs or infinities.
        """
        return self.solution(b, adjoint, check=True)

    def solution(self, b: DistArray, adjoint: bool = False, *, check: bool = False) -> DistArray:
        """Return what `solve` does; without `check`, NaNs and infinities of b make NaNs of x."""
        self._square("have solutions for every right-hand side")
        self._regular(SINGULAR)
        n = self.shape[-1]
        return self._solved(b, n, n, lambda f, each: f.solution(each, adjoint), check)

    @property
    def permutation(self) -> np.ndarray:
        """The rows of A in their order in P A, [..., m]; the same on all ranks.  Collective."""
        m = self.shape[-2]
        if self.together:
            return np.stack([f.permutation for f in self.held]).reshape(*self.stacks, m)
        found: np.ndarray = self._results(lambda f: f.order, (m,), np.int64).gather()
        return found

    @property
    def P(self) -> DistArray:
        """The permutation matrices [..., m, m] of A = P L U, in the layout of A."""
        order, m = self.permutation, self.shape[-2]

        def ones(*at: Any) -> Any:
            *lead, i, j = at
            shape = np.broadcast_shapes(*(np.shape(each) for each in at))
            return order[(*lead, j)] == i if order.size else np.zeros(shape, bool)

        return computed("lu", ones, (*self.stacks, m, m), self.grid, self.layout, self.dtype)

    def factors(self) -> tuple[DistArray, DistArray]:
        """Return L [..., m, k] and U [..., k, n] in the layout of A."""
        (m, n), k = self.shape[-2:], min(self.shape[-2:])
        return (
            self._results(lambda f: f.factors()[0], (m, k)),
            self._results(lambda f: f.factors()[1], (k, n)),
        )


class QRStack(FactorStack):
    """The factorizations A = Q R of matrices [..., m, n]; made by `qr_factor`."""

    def __init__(self, a: DistArray, block: int | None = None) -> None:
        super().__init__(as_matrix(a, "qr"), "qr", lambda x: QRFactor(x, block), LocalQR)

    @property
    def R(self) -> DistArray:
        """The upper triangular factors [..., k, n] with k = min(m, n), in the layout of A."""
        return self._results(lambda f: f.R if self.together else f.r, (min(self.shape[-2:]), self.shape[-1]))

    def Q(self, columns: int | None = None) -> DistArray:
        """Return the first columns of Q [..., m, m], by default min(m, n) of them, in the layout of A."""
        m, k = self.shape[-2], min(self.shape[-2:])
        k = k if columns is None else whole("columns of Q", columns, 0, m)
        return self._results(lambda f: f.Q(k), (m, k))

    @primitive
    def solve(self, b: DistArray) -> DistArray:
        """Return the x for which ‖A x - b‖ is least, for b of shape (m,) or (..., m, k), in the layout of b.

        All matrices are taken to have full rank, as by `QRFactor.solve`; `lstsq` takes any.

        Raises
        ------
        LinAlgError
            If A has more columns than rows, or the columns of a matrix are dependent.
        ValueError
            If b has NaNs or infinities.
        """
        return self.solution(b, check=True)

    def solution(self, b: DistArray, *, check: bool = False) -> DistArray:
        """Return what `solve` does; without `check`, NaNs and infinities of b make NaNs of x."""
        m, n = self.shape[-2:]
        if m < n:
            raise LinAlgError(
                f"the QR factorization of matrices {self.shape} does not give solutions of least norm; lstsq does"
            )
        self._regular("the columns are dependent: R[{0}, {0}] is 0; lstsq takes them")
        return self._solved(b, m, n, lambda f, each: f.solution(each), check)
