"""Derivatives of solutions, inverses and determinants."""

from __future__ import annotations

from typing import Any

from parlinalg import linalg
from parlinalg.array import DistArray, create, joining
from parlinalg.autograd.functions import np_, of_product
from parlinalg.autograd.linalg.matrices import adjoint, known, wants
from parlinalg.autograd.ops.arithmetic import Frame
from parlinalg.autograd.primitives import as_op, differentiable
from parlinalg.autograd.tensor import Tensor, as_tensor
from parlinalg.layout import Layout
from parlinalg.linalg import systems
from parlinalg.linalg.factors import Identity, SlogdetResult
from parlinalg.linalg.factors.cholesky import CholeskyFactor
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.systems import triangular_solution


def solved_back(g: DistArray, factor: Any, matrices: Any, other: bool) -> DistArray:
    """Return A⁻ᴴ g, with `other` A⁻¹ g, by the factorization of A if there is one."""
    if factor is None:
        return systems.solution(adjoint(matrices), g)
    return factor.solution(g, adjoint=not other)


recorded_solution = known(
    "solve", "a b found factor matrices other",
    shared=solved_back,
    a=lambda g, y, other: -(y @ adjoint(g)) if other else -(g @ adjoint(y)),
    b=lambda g: g,
)  # fmt: skip


@as_op(linalg.solve)
def solve(x1: Any, x2: Any, /, *, refine: bool = False, depth: int | None = None) -> Tensor:
    """Return x of A x = b; the backward pass solves with the factorization that is there.

    It has full precision also with `refine`, if there will be a backward pass.
    """
    a, b = as_tensor(x1), as_tensor(x2)
    if refine and not (wants(a) or wants(b)):
        return Tensor(linalg.solve(a.data, b.data, refine=True, depth=depth))
    if refine:
        systems.refinable(a.data, b.data)
    if b.ndim == 1:
        return solve(a, b[:, None], depth=depth)[..., 0]
    x, factor = systems.solved(a.data, b.data, depth)
    return recorded_solution(a, b, x, factor, a.data if factor is None else None, False)


def of_triangular(
    g: DistArray, y: DistArray, a: DistArray, lower: bool, adjoint: bool, unit_diagonal: bool
) -> DistArray:
    b = triangular_solution(a, g, lower=lower, adjoint=not adjoint, unit_diagonal=unit_diagonal)
    d = -(y @ b.mT.conj()) if adjoint else -(b @ y.mT.conj())
    return joining.triangle(d, (-1 if lower else 1) * bool(unit_diagonal), lower=lower)


_solve_triangular = differentiable(
    linalg.solve_triangular,
    a=of_triangular,
    b=lambda g, a, lower, adjoint, unit_diagonal: triangular_solution(
        a, g, lower=lower, adjoint=not adjoint, unit_diagonal=unit_diagonal
    ),
    conjugate=False,
    moves=True,
)


@as_op(linalg.solve_triangular)
def solve_triangular(a: Any, b: Any, **options: Any) -> Tensor:
    """Return x of A x = b for triangular matrices."""
    a, b = as_tensor(a), as_tensor(b)
    if b.ndim == 1:
        return _solve_triangular(a, b[:, None], **options)[..., 0]
    return _solve_triangular(a, b, **options)


differentiable(linalg.regrouped, x=lambda g, like: linalg.regrouped(g, like.shape), moves=True)
differentiable(linalg.inv, x=lambda g, y: -(y.mT @ g @ y.mT))


def inverse_adjoint(scale: DistArray, like: Frame, factor: Any, matrices: Any) -> DistArray:
    """Return `scale` A⁻ᴴ, for a number or one for every matrix."""
    if factor is None:
        return scale[..., None, None] * adjoint(linalg.inv(matrices))
    layout = Layout(*like.layout.dims[-2:])
    if isinstance(factor, CholeskyFactor | LUFactor):
        n = like.shape[-1]
        return factor.solution(Identity((n, n), layout, scale.summed().block), adjoint=True)
    one = create.eye(like.shape[-1], dtype=factor.dtype, grid=like.grid, layout=layout)
    return factor.solution(one * scale[..., None, None], adjoint=True)


def of_determinant(g: DistArray, y: DistArray, like: Frame, factor: Any, matrices: Any) -> DistArray:
    """Return g times the conjugate of det(A) A⁻ᵀ, or of singular matrices of the cofactors, by singular values."""
    if not bool(np_.any(y == 0)):
        return inverse_adjoint(g * y.conj(), like, factor, matrices)
    u, s, vh = linalg.svd(matrices, full_matrices=False)
    phase = (linalg.det(u) * linalg.det(vh)).conj() * g
    others = of_product(np_.ones_like(s[..., :1]), s, -1, True)
    return phase[..., None, None] * ((u * others[..., None, :]) @ vh)


_determinant = known("det", "x found factor matrices", x=of_determinant)


def determinant_of(a: Tensor, factor: Any) -> Tensor:
    found = linalg.det(a.data) if factor is None else factor.det()
    regular = factor is not None and factor.zero is None and bool(found != 0)
    return _determinant(a, found, factor if regular else None, None if regular else a.data)


@as_op(linalg.det)
def det(x: Tensor, /) -> Tensor:
    """Return the determinants of square matrices; singular ones have derivatives too."""
    return determinant_of(x, factored(x, "det"))


positive_determinant = known(
    "det", "x found factor", x=lambda g, y, like, factor: inverse_adjoint(g * y.conj(), like, factor, None)
)
logarithm = known("slogdet", "x found factor matrices", x=inverse_adjoint)
_phase = known(
    "slogdet", "x found factor matrices",
    x=lambda g, y, like, factor, matrices: inverse_adjoint(1j * (g * y.conj()).imag, like, factor, matrices),
)  # fmt: skip


def slogdet_of(a: Tensor, factor: Any) -> SlogdetResult:
    found = linalg.slogdet(a.data) if factor is None else factor.slogdet()
    held = (factor, a.data if factor is None else None)
    sign = _phase(a, found.sign, *held) if a.dtype.kind == "c" else found.sign
    return SlogdetResult(sign, logarithm(a, found.logabsdet, *held))


@as_op(linalg.slogdet)
def slogdet(x: Tensor, /) -> SlogdetResult:
    """Return the signs of the determinants and the logarithms of their sizes; real signs are constants."""
    return slogdet_of(x, factored(x, "slogdet"))


def factored(x: Tensor, name: str) -> Any:
    """Return the LU factorization of one square matrix; None for stacks of them, and for what is none."""
    return LUFactor(x.data, name=name) if x.ndim == 2 and x.shape[0] == x.shape[1] else None
