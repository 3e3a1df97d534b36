"""Factor objects of tensors: solutions, determinants and factors, and their gradients, by one factorization."""

from __future__ import annotations

from typing import Any

from parlinalg import linalg
from parlinalg.array import DistArray
from parlinalg.array.core import whole
from parlinalg.autograd.linalg.factorizations import lower_of_cholesky, lower_of_lu, of_qr, upper_of_lu
from parlinalg.autograd.linalg.least_squares import least_solution
from parlinalg.autograd.linalg.matrices import adjoint, hermitian, known
from parlinalg.autograd.linalg.systems import (
    determinant_of,
    logarithm,
    positive_determinant,
    recorded_solution,
    slogdet_of,
)
from parlinalg.autograd.primitives import as_op
from parlinalg.autograd.tensor import Tensor, as_tensor
from parlinalg.linalg import stacks
from parlinalg.linalg.factors import Factor, SlogdetResult
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import QRFactor


class TensorFactor:
    """A factorization of a tensor in its working form: solutions, and their gradients, come from it.

    Parameters
    ----------
    a : Tensor [..., m, n] or None
        None of a constant matrix.
    factor : Factor or FactorStack
        The factorization of its value.
    """

    def __init__(self, a: Any, factor: Any) -> None:
        self.a, self.factor, self.maker = a, factor, factor.maker
        self.grid, self.shape, self.dtype, self.layout = factor.grid, factor.shape, factor.dtype, factor.layout

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.factor!r})"


class TensorCholesky(TensorFactor):
    """The factorization A = L Lᴴ of a tensor, or of each matrix of a stack; made by `cho_factor`."""

    @property
    def L(self) -> Tensor:
        """The lower triangular factor."""
        return lower_of_cholesky(self.a, self.factor.L, False)

    def det(self) -> Tensor:
        """Return the determinant of A."""
        return positive_determinant(self.a, self.factor.det(), self.factor)

    def slogdet(self) -> SlogdetResult:
        """Return the sign of the determinant, which is 1, and the logarithm of its size."""
        sign, log = self.factor.slogdet()
        return SlogdetResult(sign, logarithm(self.a, log, self.factor, None))

    def solve(self, b: Any) -> Tensor:
        """Return x of A x = b, for b of shape (n,) or (n, k), in the layout of b."""
        b = as_tensor(b)
        if b.ndim == 1:
            return self.solve(b[:, None])[..., 0]
        return _positive_solution(self.a, b, self.factor.solve(b.data), self.factor)


_positive_solution = known(
    "solve", "a b found factor",
    shared=lambda g, factor: factor.solution(g),
    a=lambda g, y: -hermitian(g @ adjoint(y)),
    b=lambda g: g,
)  # fmt: skip


class TensorLU(TensorFactor):
    """The factorization P A = L U of a tensor, or of each matrix of a stack; made by `lu_factor`."""

    def __getattr__(self, name: str) -> Any:
        if name in ("P", "permutation", "zero"):
            return getattr(self.factor, name)
        return object.__getattribute__(self, name)

    def det(self) -> Tensor:
        """Return the determinant of A."""
        return determinant_of(self.a, self.factor if self.a.ndim == 2 else None)

    def slogdet(self) -> SlogdetResult:
        """Return the sign (or phase) of the determinant and the logarithm of its size."""
        return slogdet_of(self.a, self.factor if self.a.ndim == 2 else None)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return L [m, k] and U [k, n] in the layout of A."""
        (l, u), order = self.factor.factors(), self.factor.permutation if self.a.ndim == 2 else self.factor.P
        return lower_of_lu(self.a, l, l, u, order), upper_of_lu(self.a, u, l, u, order)

    def solve(self, b: Any, adjoint: bool = False) -> Tensor:
        """Return x of A x = b, or with `adjoint` of Aᴴ x = b, for b of shape (n,) or (n, k), in the layout of b."""
        b = as_tensor(b)
        if b.ndim == 1:
            return self.solve(b[:, None], adjoint)[..., 0]
        return recorded_solution(self.a, b, self.factor.solve(b.data, adjoint), self.factor, None, adjoint)


class TensorQR(TensorFactor):
    """The factorization A = Q R of a tensor, or of each matrix of a stack; made by `qr_factor`."""

    @property
    def R(self) -> Tensor:
        """The upper triangular factor [k, n] with k = min(m, n)."""
        return of_qr(self.a, self.factor.Q(), self.factor.R, None)[1]()

    def Q(self, columns: int | None = None) -> Tensor:
        """Return the first columns of Q [m, m], by default min(m, n) of them."""
        columns = None if columns is None else whole("columns of Q", columns, 0, self.shape[-2])
        q = self.factor.Q(None if columns is None else max(columns, min(self.shape[-2:])))
        return of_qr(self.a, q, self.factor.R, None)[0](q if columns is None else q[..., :columns])

    def solve(self, b: Any) -> Tensor:
        """Return the x for which ‖A x - b‖ is least, for b of shape (m,) or (m, k), in the layout of b."""
        b = as_tensor(b)
        if b.ndim == 1:
            return self.solve(b[:, None])[..., 0]
        return least_solution(self.a, b, self.factor.solve(b.data), ("tall", self.factor.Q(), self.factor.R, 1.0))


# A factorization of an array solves for tensors too, of which it is a constant.
as_op(LUFactor.solve, stacks.LUStack.solve)(lambda factor, b, adjoint=False: TensorLU(None, factor).solve(b, adjoint))
as_op(Factor.solve)(lambda factor, b: TensorCholesky(None, factor).solve(b))
as_op(QRFactor.solve, stacks.QRStack.solve)(lambda factor, b: TensorQR(None, factor).solve(b))

as_op(linalg.cho_factor)(
    lambda a, block=None, *, depth=None: TensorCholesky(a, linalg.cho_factor(a.data, block, depth=depth))
)
as_op(linalg.qr_factor)(lambda a, block=None: TensorQR(a, linalg.qr_factor(a.data, block)))


@as_op(linalg.lu_factor)
def lu_factor(a: Tensor, block: int | None = None, *, depth: int | None = None) -> TensorLU:
    """Return the LU factorization of a tensor in its working form."""
    return TensorLU(a, linalg.lu_factor(a.data, block, depth=depth))


@as_op(linalg.lu)
def lu(a: Tensor) -> tuple[DistArray, Tensor, Tensor]:
    """Return P, which is a constant, L and U of a matrix A = P L U, of which min(m, n) rows and columns are regular."""
    factor = lu_factor(a)
    return (factor.P, *factor.factors())
