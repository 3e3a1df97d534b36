"""The derivatives of linear algebra: products, and triangular solves with factors that the forward pass made.

By a complex matrix Z = U + iV the gradient of a real number L is ∂L/∂U + i ∂L/∂V, as PyTorch's: G for which
dL = Re tr(Gᴴ dZ).  A function of several results has a rule for each of them, and their gradients add up.  By Hermitian
matrices, of which functions read one triangle, it is Hermitian: all of it counts.

Eigenvectors and singular vectors of equal values are one basis of many of the space that belongs to these values, and a
single vector is unique up to its phase.  Where no derivative exists, 1 / (wⱼ - wᵢ) counts as 0 (`inverses`): values are
equal if they differ by at most 10 n ε of the largest, which rounding makes of equal ones.  Of vectors that complete
others to a basis the space counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg import linalg
from parlinalg.array import DistArray, create, joining
from parlinalg.array.core import truth, whole
from parlinalg.autograd.functions import np_, of_product
from parlinalg.autograd.ops.arithmetic import Frame
from parlinalg.autograd.primitives import as_op, constant, differentiable, refused
from parlinalg.autograd.tape import tracing
from parlinalg.autograd.tensor import Tensor, as_tensor
from parlinalg.layout import Layout
from parlinalg.linalg import congruence, ranks, singular, spectral, stacks, systems
from parlinalg.linalg.congruence import congruent, halve, over_differences
from parlinalg.linalg.factors import Factor, Identity, PivotedQRResult, QRResult, SlogdetResult
from parlinalg.linalg.factors.cholesky import CholeskyFactor
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import QRFactor
from parlinalg.linalg.least_squares import LstsqResult, least_squares, times
from parlinalg.linalg.matrices import NEGLIGIBLE, as_matrix, spend
from parlinalg.linalg.systems import triangular_solution
from parlinalg.matmul import matmul


def adjoint(a: DistArray) -> DistArray:
    return a.mT.conj()


def tril(a: DistArray, k: int = 0) -> DistArray:
    return joining.triangle(a, k, lower=True)


def triu(a: DistArray, k: int = 0) -> DistArray:
    return joining.triangle(a, k, lower=False)


def hermitian(a: DistArray) -> DistArray:
    return (a + adjoint(a)) / 2


def skew(a: DistArray) -> DistArray:
    return (a - adjoint(a)) / 2


def halved(a: DistArray) -> DistArray:
    """Return the lower triangles with half their diagonals."""
    return (tril(a) + tril(a, -1)) / 2


def mirrored(a: DistArray) -> DistArray:
    """Return the Hermitian matrices with these upper triangles; of diagonals the real parts count."""
    return adjoint(halved(adjoint(a))) + halved(adjoint(a))


def divided(a: DistArray, r: DistArray) -> DistArray:
    """Return A R⁻ᴴ for upper triangles R; A is spent."""
    return congruence.divided(a, r) if a.ndim == 2 else adjoint(triangular_solution(r, adjoint(a)))


def widened(a: DistArray, m: int, n: int) -> DistArray:
    """Return the matrices with zeros below and right of them, of shape [..., m, n]."""
    more = m - a.shape[-2], n - a.shape[-1]
    return joining.padded(a, [(0, 0)] * (a.ndim - 2) + [(0, k) for k in more]) if any(more) else a


def first(a: DistArray, k: int, dim: int = -1) -> DistArray:
    """Return the first k columns of matrices, or with dim -2 rows; the array itself if it has no more."""
    if a.shape[dim] == k:
        return a
    return a[..., :k] if dim == -1 else a[..., :k, :]


def less(a: DistArray, b: DistArray) -> DistArray:
    """Return A - B, in the memory of B where it can be."""
    if a.layout != b.layout or a.dtype != b.dtype or a.layout.partial:
        return a - b
    block = b.block
    block *= -1
    block += a.block
    return b


def negated(a: DistArray) -> DistArray:
    """Return -A, in its memory."""
    block = a.block
    block *= -1
    return a


def beside(*matrices: DistArray) -> DistArray:
    """Return the columns of all matrices, those without columns left out."""
    wide = [a for a in matrices if a.shape[-1]] or list(matrices[:1])
    return joining.concatenate(wide, axis=-1) if len(wide) > 1 else wide[0]


def below(*matrices: DistArray) -> DistArray:
    """Return the rows of all matrices."""
    return beside(*(a.mT for a in matrices)).mT


def known(name: str, parameters: str, **rules: Any) -> Any:
    """Return the operation that records a result which is there already, as its argument `found`.

    Parameters
    ----------
    name : str
    parameters : str
        The names of its arguments: tensors, `found`, and what else rules need.
    **rules
        As of `differentiable`.
    """
    names = parameters.split()

    def function(*args: Any) -> DistArray:
        return args[names.index("found")]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__name__ = name
    function.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in names])  # type: ignore[attr-defined]
    return differentiable(function, conjugate=False, **rules)


def unformed(like: DistArray, rows: int, columns: int) -> DistArray:
    """Return a stand-in for matrices [..., rows, columns] in the layout of `like`: steps of a rule, never formed."""
    empty = like.grid.backend.empty((0,) * like.ndim, like.dtype)
    return DistArray(empty, (*like.shape[:-2], rows, columns), like.layout.with_partial(()), like.grid)


def times_left(g: DistArray, u: DistArray, like: Frame) -> DistArray:
    """Return U g, for as many columns of U as g has rows."""
    return matmul(first(u, g.shape[-2]), g, layout=like.layout)


def times_right(g: DistArray, vh: DistArray, like: Frame) -> DistArray:
    """Return g Vᴴ, for as many rows of Vᴴ as g has columns."""
    return matmul(g, first(vh, g.shape[-1], -2), layout=like.layout)


# ------------------------------------------------------------------------------------------------ linear systems
def solved_back(g: DistArray, factor: Any, matrices: Any, other: bool) -> DistArray:
    """Return A⁻ᴴ g, with `other` A⁻¹ g, by the factorization of A if there is one."""
    if factor is None:
        return systems.solution(adjoint(matrices), g)
    return factor.solution(g, adjoint=not other)


_solution = known(
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
    return _solution(a, b, x, factor, a.data if factor is None else None, False)


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


_positive_determinant = known(
    "det", "x found factor", x=lambda g, y, like, factor: inverse_adjoint(g * y.conj(), like, factor, None)
)
_logarithm = known("slogdet", "x found factor matrices", x=inverse_adjoint)
_phase = known(
    "slogdet", "x found factor matrices",
    x=lambda g, y, like, factor, matrices: inverse_adjoint(1j * (g * y.conj()).imag, like, factor, matrices),
)  # fmt: skip


def slogdet_of(a: Tensor, factor: Any) -> SlogdetResult:
    found = linalg.slogdet(a.data) if factor is None else factor.slogdet()
    held = (factor, a.data if factor is None else None)
    sign = _phase(a, found.sign, *held) if a.dtype.kind == "c" else found.sign
    return SlogdetResult(sign, _logarithm(a, found.logabsdet, *held))


@as_op(linalg.slogdet)
def slogdet(x: Tensor, /) -> SlogdetResult:
    """Return the signs of the determinants and the logarithms of their sizes; real signs are constants."""
    return slogdet_of(x, factored(x, "slogdet"))


def factored(x: Tensor, name: str) -> Any:
    """Return the LU factorization of one square matrix; None for stacks of them, and for what is none."""
    return LUFactor(x.data, name=name) if x.ndim == 2 and x.shape[0] == x.shape[1] else None


# ------------------------------------------------------------------------------------------------ factorizations
def of_cholesky(g: DistArray, y: DistArray, upper: bool) -> DistArray:
    if g.ndim == 2:
        e = halve(adjoint(y) @ g) if not upper else halve(y @ adjoint(g))
        spend(g)
        return congruent(e, adjoint(y) if upper else y)
    if upper:
        g, y = adjoint(g), adjoint(y)
    s = triangular_solution(y, halved(adjoint(y) @ g), lower=True, adjoint=True)  # L⁻ᴴ Φ(Lᴴ g)
    return hermitian(adjoint(triangular_solution(y, adjoint(s), lower=True, adjoint=True)))


_cholesky = known("cholesky", "x found upper", takes=True, x=of_cholesky)


@as_op(linalg.cholesky)
def cholesky(x: Tensor, /, *, upper: bool = False, depth: int | None = None) -> Tensor:
    """Return the Cholesky factors of Hermitian positive definite matrices."""
    return _cholesky(x, linalg.cholesky(x.data, upper=upper, depth=depth), upper)


def of_lower(g: DistArray, l: DistArray, u: DistArray, order: Any) -> DistArray:
    """Return P L₁⁻ᴴ [tril(L₁ᴴ g₁, -1) - triu(L₂ᴴ g₂)] U₁⁻ᴴ, and below it g₂ U₁⁻ᴴ; zeros beside them."""
    (m, k), n = l.shape[-2:], u.shape[-1]
    e = tril(adjoint(l[..., :k, :]) @ g[..., :k, :], -1)
    e = e - triu(adjoint(l[..., k:, :]) @ g[..., k:, :]) if m > k else e
    top = triangular_solution(l[..., :k, :], e, lower=True, adjoint=True, unit_diagonal=True)
    return unpermuted(widened(divided(below(top, g[..., k:, :]), u[..., :k]), m, n), order)


def of_upper(g: DistArray, l: DistArray, u: DistArray, order: Any) -> DistArray:
    """Return P L₁⁻ᴴ [triu(g₁ U₁ᴴ) - tril(g₂ U₂ᴴ, -1)] U₁⁻ᴴ, and beside it P L₁⁻ᴴ g₂; zeros below them."""
    (m, k), n = l.shape[-2:], u.shape[-1]
    e = triu(g[..., :k] @ adjoint(u[..., :k]))
    e = e - tril(g[..., k:] @ adjoint(u[..., k:]), -1) if n > k else e
    both = beside(divided(e, u[..., :k]), g[..., k:])
    top = triangular_solution(l[..., :k, :], both, lower=True, adjoint=True, unit_diagonal=True)
    return unpermuted(widened(top, m, n), order)


def unpermuted(a: DistArray, order: Any) -> DistArray:
    """Return P A, for the order of the rows in A, or for P of stacks."""
    if isinstance(order, DistArray):
        return order @ a
    return joining.take(a, np.argsort(order), axis=0)


_lower = known("lu", "a found l u order", a=of_lower)
_upper = known("lu", "a found l u order", a=of_upper)


@as_op(linalg.lu)
def lu(a: Tensor) -> tuple[DistArray, Tensor, Tensor]:
    """Return P, which is a constant, L and U of a matrix A = P L U, of which min(m, n) rows and columns are regular."""
    factor = lu_factor(a)
    return (factor.P, *factor.factors())


def of_completed(g: DistArray, q: DistArray, k: int) -> DistArray:
    """Return the gradient by the first k columns of Q; more of them span what these do not."""
    if g.shape[-1] <= k:
        return widened(g, q.shape[-2], k)
    return g[..., :k] - q[..., k:] @ (adjoint(g[..., k:]) @ q[..., :k])


def in_order(a: DistArray, p: DistArray | None) -> DistArray:
    """Return the matrices whose columns in the order p, if there is one, are those of A."""
    return a if p is None else joining.take_along_axis(a, np_.argsort(p)[..., None, :], axis=-1)


def over_r(g: DistArray, r: DistArray, p: DistArray | None, like: Frame) -> DistArray:
    """Return g R₁⁻ᴴ, and zeros beside it, by the columns in the order p."""
    k = g.shape[-1]
    return in_order(widened(divided(g, first(first(r, k, -2), k)), *like.shape[-2:]), p)


def of_q(g: DistArray, q: DistArray, like: Frame) -> DistArray:
    """Return -Qᴴ g."""
    k = like.shape[-1]
    g = first(widened(g, q.shape[-2], max(k, g.shape[-1])), k)
    return negated(matmul(adjoint(first(q, k)), g, layout=like.layout))


def of_r(g: DistArray, r: DistArray, like: Frame) -> DistArray:
    """Return g₁ R₁ᴴ - R₂ g₂ᴴ."""
    k = like.shape[-1]
    g, r = first(g, k, -2), first(r, k, -2)
    t = matmul(first(g, k), adjoint(first(r, k)), layout=like.layout)
    return t if r.shape[-1] == k else t - r[..., k:] @ adjoint(g[..., k:])


def of_r_beside(g: DistArray, q: DistArray, p: DistArray | None) -> DistArray:
    """Return Q g₂, and zeros before it, by the columns in the order p."""
    k = q.shape[-1]
    return in_order(joining.padded(q @ g[..., k:], [(0, 0)] * (g.ndim - 1) + [(k, 0)]), p)


# A = Q R has the gradient [gq + Q (mirrored(M) + Z)] R₁⁻ᴴ with M = gr₁ R₁ᴴ - Z - Qᴴ gq and Z = R₂ gr₂ᴴ, and beside it
# Q gr₂.  What it is made of are steps, so that what comes from Q and from R is added up before the next product.
_over_r = known("qr", "x found r p", takes=True, x=over_r)
_by_q = known("qr", "h found u", takes=True, h=times_left)
_hermitian_part = known("qr", "m found", takes=True, m=lambda g: congruence.mirrored(g) if g.ndim == 2 else mirrored(g))
_q = known("qr", "h m found q", h=lambda g, q, like: of_completed(g, q, like.shape[-1]), m=of_q)
_r = known("qr", "m found r", takes=True, m=of_r)
_wide_r = known(
    "qr", "x z m found q r p",
    x=of_r_beside, z=lambda g, r, like: r[..., like.shape[-1] :] @ adjoint(g[..., like.shape[-1] :]), m=of_r,
)  # fmt: skip


def of_qr(
    x: Any, q: DistArray, r: DistArray, p: DistArray | None
) -> tuple[Callable[[DistArray], Any], Callable[[], Any]]:
    """Return the functions that record Q, or first columns of it, and R of a tensor."""
    k = min(q.shape[-2], r.shape[-1])
    solved = _over_r(x, unformed(q, q.shape[-2], k), r, p)
    z = _by_q(solved, unformed(r.mT, k, k), q)
    m = _hermitian_part(z, unformed(r.mT, k, k))

    def record_r() -> Any:
        return _r(m, r, r) if r.shape[-1] == k else _wide_r(x, z, m, r, q, r, p)

    return lambda found: _q(solved, m, found, q), record_r


@as_op(linalg.qr)
def qr(x: Tensor, /, *, mode: str = "reduced", pivoting: bool = False) -> Any:
    """Return Q and R of matrices whose first min(m, n) columns are independent, or R; its derivative needs Q.

    With `pivoting` the first ones in the order p, which is a constant and comes last.
    """
    if pivoting:
        return _pivoted_qr(x, mode)
    if mode == "r":
        return qr(x).R if wants(x) else Tensor(linalg.qr(x.data, mode="r"))
    q, r = linalg.qr(x.data, mode=mode)
    record_q, record_r = of_qr(x, q, r, None)
    return QRResult(record_q(q), record_r())


def _pivoted_qr(x: Tensor, mode: str) -> Any:
    """Return what `qr` does with pivoting."""
    if mode == "r" and not wants(x):
        r, p = linalg.qr(x.data, mode="r", pivoting=True)
        return Tensor(r), p
    q, r, p = linalg.qr(x.data, mode="reduced" if mode == "r" else mode, pivoting=True)
    record_q, record_r = of_qr(x, q, r, p)
    return (record_r(), p) if mode == "r" else PivotedQRResult(record_q(q), record_r(), p)


# ------------------------------------------------------------------------------------------------ factor objects
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
        return _cholesky(self.a, self.factor.L, False)

    def det(self) -> Tensor:
        """Return the determinant of A."""
        return _positive_determinant(self.a, self.factor.det(), self.factor)

    def slogdet(self) -> SlogdetResult:
        """Return the sign of the determinant, which is 1, and the logarithm of its size."""
        sign, log = self.factor.slogdet()
        return SlogdetResult(sign, _logarithm(self.a, log, self.factor, None))

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
        return _lower(self.a, l, l, u, order), _upper(self.a, u, l, u, order)

    def solve(self, b: Any, adjoint: bool = False) -> Tensor:
        """Return x of A x = b, or with `adjoint` of Aᴴ x = b, for b of shape (n,) or (n, k), in the layout of b."""
        b = as_tensor(b)
        if b.ndim == 1:
            return self.solve(b[:, None], adjoint)[..., 0]
        return _solution(self.a, b, self.factor.solve(b.data, adjoint), self.factor, None, adjoint)


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
        return _least(self.a, b, self.factor.solve(b.data), ("tall", self.factor.Q(), self.factor.R, 1.0))


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


# ------------------------------------------------------------------------------------------------ spectra
def limit_of(values: DistArray, n: int) -> DistArray:
    """Return the size up to which rounding makes differences of 0: 10 n ε times the largest of `values`, [..., k]."""
    return ranks.limit_of(abs(values), None, NEGLIGIBLE * n)


def inverses(x: DistArray, values: DistArray, n: int) -> DistArray:
    """Return 1 / x, and 0 where rounding makes x of 0: for |x| up to `limit_of` the values."""
    limit = limit_of(values, n)
    limit = limit if x.ndim == values.ndim else limit[..., None]
    return ranks.reciprocals(x, abs(x) > limit)


def differences(w: DistArray) -> DistArray:
    """Return wⱼ - wᵢ in row i and column j."""
    return w[..., None, :] - w[..., :, None]


def of_eigenvalues(g: DistArray, v: DistArray, start: int) -> DistArray:
    """Return V diag(g) Vᴴ, for the vectors from number `start` on."""
    v = v[..., start : start + g.shape[-1]]
    return of_values(g, v, adjoint(v))


def of_eigenvectors(g: DistArray, w: DistArray, v: DistArray, start: int) -> DistArray:
    """Return V (F ∘ skew(Vᴴ g)) Vᴴ with Fᵢⱼ = 1 / (wⱼ - wᵢ), for the gradients by the vectors from `start` on."""
    given = g
    if (k := g.shape[-1]) < (n := w.shape[-1]):
        g = joining.padded(g, [(0, 0)] * (g.ndim - 1) + [(start, n - start - k)])
    if g.ndim == 2:
        inner = adjoint(v) @ g
        spend(given)
        del g
        inner = over_differences(congruence.skew(inner), w, limit_of(w, n))
        found = v @ inner
        del inner
        return found @ adjoint(v)
    return v @ (inverses(differences(w), w, w.shape[-1]) * skew(adjoint(v) @ g)) @ adjoint(v)


def of_left(g: DistArray, u: DistArray, s: DistArray, vh: DistArray, like: Frame) -> DistArray:
    """Return (F + H) ∘ skew(Uᴴ g) with Fᵢⱼ = 1 / (sⱼ - sᵢ), Hᵢⱼ = 1 / (sᵢ + sⱼ), and of more rows - Uᴴ g S⁻¹.

    The terms of both sides' vectors whose sum has no derivative at equal values are those of F; those of H have one.
    """
    k, most = like.shape[-1], max(u.shape[-2], vh.shape[-1])
    inner = matmul(adjoint(first(u, k)), first(g, k), layout=like.layout)
    spend(g)
    less = inner * inverses(s, s, most)[..., None, :] if u.shape[-2] > k else None
    found = over_gaps(inner, s, most, 1)
    return found if less is None else found - less


def of_right(g: DistArray, u: DistArray, s: DistArray, vh: DistArray, like: Frame) -> DistArray:
    """Return the adjoint of what `of_left` finds for the adjoint matrix: (F - H) ∘ skew(Vᴴ gᴴ), and - S⁻¹ g V."""
    k, most = like.shape[-1], max(u.shape[-2], vh.shape[-1])
    inner = matmul(first(vh, k, -2), adjoint(first(g, k, -2)), layout=like.layout)
    spend(g)
    less = adjoint(inner).redistribute(inner.layout) * inverses(s, s, most)[..., :, None] if vh.shape[-1] > k else None
    found = over_gaps(inner, s, most, -1)
    return found if less is None else found - less


def over_gaps(a: DistArray, s: DistArray, most: int, sign: int) -> DistArray:
    """Return (F ± H) ∘ skew(A) of `of_left`, in the memory of one matrix A."""
    if a.ndim == 2:
        return over_differences(congruence.skew(a), s, limit_of(s, most), sums=sign)
    f, h = (inverses(x, s, most) for x in (differences(s), s[..., None, :] + s[..., :, None]))
    return (f + sign * h) * skew(a)


def of_values(g: DistArray, u: DistArray, vh: DistArray) -> DistArray:
    """Return U diag(g) Vᴴ."""
    k = g.shape[-1]
    return (u[..., :k] * g[..., None, :]) @ vh[..., :k, :]


_eigenvalues = known("eigh", "x found v start", x=of_eigenvalues)
_eigenvectors = known("eigh", "x found w v start", takes=True, x=of_eigenvectors)

# A = U S Vᴴ has the gradient U M Vᴴ, in which M adds up what comes from U and from Vᴴ.  Of more rows than columns it is
# (U M + g S⁻¹) Vᴴ, of fewer U (M Vᴴ + S⁻¹ g).
_by_u = known("svd", "h found u", takes=True, h=times_left)
_by_vh = known("svd", "h found vh", takes=True, h=times_right)
_left = known("svd", "m found u s vh", takes=True, m=of_left)
_right = known("svd", "m found u s vh", takes=True, m=of_right)
_tall_left = known(
    "svd", "h m found u s vh", m=of_left,
    h=lambda g, u, s: of_completed(g, u, s.shape[-1]) * inverses(s, s, u.shape[-2])[..., None, :],
)  # fmt: skip
_wide_right = known(
    "svd", "h m found u s vh", m=of_right,
    h=lambda g, s, vh: adjoint(
        of_completed(adjoint(g), adjoint(vh), s.shape[-1]) * inverses(s, s, vh.shape[-1])[..., None, :]
    ),
)  # fmt: skip
_tall_values = known("svd", "h found u", h=lambda g, u: first(u, g.shape[-1]) * g[..., None, :])
_wide_values = known("svd", "h found vh", h=lambda g, vh: first(vh, g.shape[-1], -2) * g[..., :, None])


# A function that reads lower triangles has a Hermitian gradient, which belongs to both triangles.
_mirrored = known("eigh", "x found", x=hermitian)
as_op(spectral.mirrored)(lambda x, name="eigh": _mirrored(x, spectral.mirrored(x.data, name)))


@as_op(linalg.eigh)
def eigh(x: Any, /, b: Any = None, *, subset_by_index: Any = None, subset_by_value: Any = None) -> spectral.EighResult:
    """Return the eigenvalues and eigenvectors of Hermitian matrices; derivatives of some need all vectors."""
    if b is not None:
        return spectral.generalized(x, b, subset_by_index=subset_by_index, subset_by_value=subset_by_value)
    choose = spectral._chooser(as_matrix(x.data, "eigh", square=True), "eigh", subset_by_index, subset_by_value)
    w, v = linalg.eigh(x.data)
    if subset_by_index is subset_by_value is None:
        return spectral.EighResult(_eigenvalues(x, w, v, 0), _eigenvectors(x, v, w, v, 0))
    at = choose(w.gather())
    values, vectors = (a[..., at].redistribute(a.layout) for a in (w, v))
    return spectral.EighResult(_eigenvalues(x, values, v, at.start), _eigenvectors(x, vectors, w, v, at.start))


@as_op(linalg.eigvalsh)
def eigvalsh(x: Any, /, b: Any = None, **subset: Any) -> Any:
    """Return the eigenvalues of Hermitian matrices; their derivatives need the vectors."""
    if b is not None:
        return spectral.generalized_values(x, b, **subset)
    return eigh(x, **subset).eigenvalues if wants(x) else Tensor(linalg.eigvalsh(x.data, **subset))


@as_op(linalg.svd)
def svd(x: Tensor, /, *, full_matrices: bool = True) -> singular.SVDResult:
    """Return U, the singular values and Vᴴ of matrices."""
    lean = wants(x) and x.grid.size == 1 and singular.by_bidiagonal(x.data)  # gradients take memory, too
    u, s, vh = (singular.lean_svd if lean else linalg.svd)(x.data, full_matrices=full_matrices)
    (m, n), k = x.shape[-2:], s.shape[-1]
    if m >= n:
        h = _by_vh(x, unformed(u, m, k), vh)
        values = _tall_values(h, s, u)  # before M, so that its gradient comes later
        inner = _by_u(h, unformed(x.data.mT, k, k), u)
    else:
        h = _by_u(x, unformed(vh, k, n), u)
        values = _wide_values(h, s, vh)
        inner = _by_vh(h, unformed(x.data.mT, k, k), vh)
    left = _tall_left(h, inner, u, u, s, vh) if m > n else _left(inner, u, u, s, vh)
    right = _wide_right(h, inner, vh, u, s, vh) if m < n else _right(inner, vh, u, s, vh)
    return singular.SVDResult(left, values, right)


@as_op(linalg.svdvals)
def svdvals(x: Tensor, /) -> Tensor:
    """Return the singular values of matrices; their derivatives need the vectors."""
    return svd(x, full_matrices=False).S if wants(x) else Tensor(linalg.svdvals(x.data))


def wants(x: Tensor) -> bool:
    return x.requires_grad and tracing()


constant(linalg.matrix_rank, np.linalg.matrix_rank, moves=True)
refused(
    "it stops where an answer is good enough; solve and its kin have derivatives",
    linalg.cg, linalg.minres, linalg.gmres, linalg.lsqr, linalg.eigsh, linalg.svds, linalg.svd_lowrank,
    linalg.range_finder, linalg.lobpcg,
)  # fmt: skip
refused("its factors are those of one order of the eigenvalues; eig has derivatives", linalg.hessenberg, linalg.schur)


def of_general_values(g: DistArray, v: DistArray) -> DistArray:
    """Return V⁻ᴴ diag(g) Vᴴ."""
    return systems.solution(adjoint(v), g[..., :, None] * adjoint(v))


def of_general_vectors(g: DistArray, w: DistArray, v: DistArray) -> DistArray:
    """Return V⁻ᴴ [conj(F) ∘ (Vᴴ g - Vᴴ V Re diag(Vᴴ g))] Vᴴ with Fᵢⱼ = 1 / (wⱼ - wᵢ), for vectors of norm 1."""
    inner = adjoint(v) @ g
    inner = inner - (adjoint(v) @ v) * linalg.diagonal(inner).real[..., None, :]
    f = inverses(differences(w), w, w.shape[-1]).conj()
    return systems.solution(adjoint(v), (f * inner) @ adjoint(v))


_general_values = known("eig", "x found v", x=of_general_values)
_general_vectors = known("eig", "x found w v", x=of_general_vectors)


@as_op(linalg.eig)
def eig(x: Tensor, /) -> Any:
    """Return the eigenvalues and eigenvectors of square matrices."""
    found = linalg.eig(x.data)
    w, v = found
    return type(found)(_general_values(x, w, v), _general_vectors(x, v, w, v))


@as_op(linalg.eigvals)
def eigvals(x: Tensor, /) -> Tensor:
    """Return the eigenvalues of square matrices; their derivatives need the vectors."""
    return eig(x).eigenvalues if wants(x) else Tensor(linalg.eigvals(x.data))


# ------------------------------------------------------------------------------------------------ matrix functions
def along(function: Any, a: DistArray, g: DistArray) -> DistArray:
    """Return the derivative of a function of A along g, a corner of that of [[A, g], [0, A]] (Mathias 1996).

    It is NaN of every matrix with NaNs or infinities in g, which functions of matrices refuse.
    """
    n = a.shape[-1]
    if not n:
        return a
    finite = np_.isfinite(g).all(axis=(-2, -1), keepdims=True)
    g = np_.where(finite, g, g.dtype.type(0))
    both = function(below(beside(a, g), beside(0 * a, a)).redistribute(a.layout))
    return np_.where(finite, both[..., :n, n:], both.dtype.type(np.nan))


def of_root(g: DistArray, y: DistArray, x: DistArray) -> DistArray:
    """Return Z of Yᴴ Z + Z Yᴴ = g."""
    if not truth((x == adjoint(x)).all(), "hermitian", "whether the matrix of sqrtm is Hermitian"):
        return along(linalg.sqrtm, adjoint(x), g)
    _, v = linalg.eigh(x)
    w = (v.conj() * (y @ v)).sum(axis=-2).conj()  # a complex root has imaginary eigenvalues for those of A below 0
    sums = w[..., None, :] + w[..., :, None]
    return v @ (inverses(sums, w, w.shape[-1]) * (adjoint(v) @ g @ v)) @ adjoint(v)


def of_polar(g: DistArray, y: DistArray, x: DistArray) -> DistArray:
    """Return W (H ∘ 2 skew(Wᴴ g V)) Vᴴ with Hᵢⱼ = 1 / (sᵢ + sⱼ), and (1 - W Wᴴ) g V S⁻¹ Vᴴ; P = V S Vᴴ and W = U V."""
    (m, n) = y.shape[-2:]
    if m < n:
        return adjoint(of_polar(adjoint(g), adjoint(y), adjoint(x)))
    s, v = linalg.eigh(hermitian(adjoint(y) @ x))
    w, g = y @ v, g @ v
    inner = adjoint(w) @ g
    found = w @ (2 * inverses(s[..., None, :] + s[..., :, None], s, m) * skew(inner))
    if m > n:
        found = found + (g - w @ inner) * inverses(s, s, m)[..., None, :]
    return found @ adjoint(v)


def of_semidefinite(g: DistArray, u: DistArray, x: DistArray, side: str) -> DistArray:
    """Return the gradient through P, the Hermitian part of Uᴴ A, or of A Uᴴ."""
    g = hermitian(g)
    return u @ g + of_polar(x @ g, u, x) if side == "right" else g @ u + of_polar(g @ x, u, x)


_unitary = known("polar", "x found", x=of_polar)
_semidefinite = known("polar", "x found u side", x=of_semidefinite)

differentiable(linalg.expm, x=lambda g, x: along(linalg.expm, adjoint(x), g), conjugate=False, moves=True)
differentiable(linalg.sqrtm, x=of_root, conjugate=False, moves=True)


@as_op(linalg.polar)
def polar(a: Tensor, side: str = "right") -> Any:
    """Return U and P of matrices A = U P of full rank, or A = P U."""
    found = linalg.polar(a.data, side)
    return type(found)(_unitary(a, found.U), _semidefinite(a, found.P, found.U, side))


differentiable(
    linalg.orth,
    a=lambda g, y, a, rcond: (g - y @ (adjoint(y) @ g)) @ (adjoint(y) @ adjoint(linalg.pinv(a, rtol=rcond))),
    conjugate=False,
    moves=True,
)
differentiable(
    linalg.null_space,
    a=lambda g, y, a, rcond: -(adjoint(linalg.pinv(a, rtol=rcond)) @ g) @ adjoint(y),
    conjugate=False,
    moves=True,
)


# ------------------------------------------------------------------------------------------------ least squares
def of_pinv(g: DistArray, y: DistArray, x: DistArray) -> DistArray:
    """Return -Pᴴ g Pᴴ + (1 - A P) gᴴ P Pᴴ + Pᴴ P gᴴ (1 - P A), for matrices of one rank (Golub and Pereyra 1973)."""
    p, back = adjoint(y), adjoint(g)
    right = (p @ y) @ back
    found = less(right, (right @ y) @ x)
    del right
    left = back @ (y @ p)
    found += left
    inner = y @ left
    del left, back
    found -= x @ inner
    inner = p @ g
    spend(g)
    found -= inner @ p
    return found


differentiable(linalg.pinv, x=of_pinv, conjugate=False, moves=True, takes=True)


def of_system(g: DistArray, y: DistArray, a: DistArray, b: DistArray, parts: Any) -> DistArray:
    """Return -z xᴴ + r (P z)ᴴ + Pᴴ x (g - P A g)ᴴ with z = Pᴴ g and r = b - A x, for the pseudoinverse P of A."""
    z = times(parts, g, adjoint=True)
    found = -z @ adjoint(y)
    if parts[0] != "wide":  # else r = 0
        found = found + (b - a @ y) @ adjoint(times(parts, z))
    if parts[0] != "tall":  # else P A = 1
        found = found + times(parts, y, adjoint=True) @ adjoint(g - times(parts, a @ g))
    return found


_least = known("lstsq", "a b found parts", a=of_system, b=lambda g, parts: times(parts, g, adjoint=True))
_residuals = known(
    "lstsq", "a b x found",
    a=lambda g, a, b, x: -2 * ((b - a @ x) * g[..., None, :]) @ adjoint(x),
    b=lambda g, a, b, x: 2 * ((b - a @ x) * g[..., None, :]),
)  # fmt: skip


def of_singular_values(g: DistArray, x: DistArray) -> DistArray:
    """Return U diag(g) Vᴴ, by singular vectors that are computed for it."""
    u, _, vh = linalg.svd(x, full_matrices=False)
    return of_values(g, u, vh)


_values_alone = known("lstsq", "x found", x=of_singular_values)


@as_op(linalg.lstsq)
def lstsq(a: Any, b: Any, rcond: float | None = None, *, refine: bool = False) -> LstsqResult:
    """Return the x of least norm for which ‖A x - b‖ is least, the residuals, the ranks, and the singular values.

    The factorization is saved for the gradient, and has full precision also with `refine`.
    """
    a, b = as_tensor(a), as_tensor(b)
    if b.ndim == 1:
        x, *others = lstsq(a, b[:, None], rcond)
        return LstsqResult(x.redistribute(x.layout.with_dim(x.ndim - 1, None))[..., 0], *others)
    found, parts = least_squares(a.data, b.data, rcond, keep=True)
    residuals: Any = found.residuals
    if residuals.size:
        residuals = _residuals(a, b, found.x, residuals)
    return LstsqResult(_least(a, b, found.x, parts), residuals, found.rank, _values_alone(a, found.s))
