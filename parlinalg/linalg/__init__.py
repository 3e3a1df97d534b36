"""Linear algebra on distributed arrays, by the names of the Array API standard's extension `linalg` and of NumPy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.array import contraction
from parlinalg.array import reductions as array_reductions
from parlinalg.array.contraction import multi_dot
from parlinalg.array.core import DistArray, dims_in_order, whole
from parlinalg.array.dispatch import of_arrays, primitive, takes_over
from parlinalg.array.functions import handles
from parlinalg.array.joining import diagonal as _diagonal
from parlinalg.array.namespace import (
    broadcast_to,
    expand_dims,
    eye,
    matrix_transpose,
    moveaxis,
    sum,
    tensordot,
    vecdot,
)
from parlinalg.array.reductions import extreme_size
from parlinalg.array.shapes import reshape
from parlinalg.layout import Layout
from parlinalg.linalg.factors.cholesky import cho_factor, cho_solve, cholesky
from parlinalg.linalg.factors.lu import lu, lu_factor, lu_solve
from parlinalg.linalg.factors.qr import qr, qr_factor
from parlinalg.linalg.general import eig, eigvals, hessenberg, schur
from parlinalg.linalg.iterative.bidiagonalization import lsqr
from parlinalg.linalg.iterative.conjugate_gradients import cg
from parlinalg.linalg.iterative.lanczos import eigsh, svds
from parlinalg.linalg.iterative.locally_optimal import lobpcg
from parlinalg.linalg.iterative.minimal_residuals import gmres, minres
from parlinalg.linalg.iterative.randomized import range_finder, svd_lowrank
from parlinalg.linalg.least_squares import lstsq
from parlinalg.linalg.matrices import LinAlgError, check_order, limits
from parlinalg.linalg.matrix_functions import expm, null_space, orth, polar, sqrtm
from parlinalg.linalg.ranks import cond, matrix_rank, pinv
from parlinalg.linalg.singular import svd, svdvals
from parlinalg.linalg.spectral import eigh, eigvalsh, mirrored
from parlinalg.linalg.systems import det, inv, slogdet, solve, solve_triangular
from parlinalg.matmul import matmul

__all__ = [
    "LinAlgError",
    "cg",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "cond",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigsh",
    "eigvals",
    "eigvalsh",
    "expm",
    "gmres",
    "hessenberg",
    "inv",
    "lobpcg",
    "lsqr",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "minres",
    "multi_dot",
    "norm",
    "null_space",
    "orth",
    "outer",
    "pinv",
    "polar",
    "qr",
    "qr_factor",
    "range_finder",
    "schur",
    "slogdet",
    "solve",
    "solve_triangular",
    "sqrtm",
    "svd",
    "svd_lowrank",
    "svds",
    "svdvals",
    "tensordot",
    "tensorinv",
    "tensorsolve",
    "trace",
    "vecdot",
    "vector_norm",
]


def _matrices(x: DistArray, name: str) -> DistArray:
    if x.ndim < 2:
        raise ValueError(f"{name} takes matrices, arrays of at least two dims, not of shape {x.shape}")
    return x


@of_arrays
def outer(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the products of every element of one vector with every one of another, [m, n].

    Raises
    ------
    ValueError
        If an array is no vector.
    """
    if x1.ndim != 1 or x2.ndim != 1:
        raise ValueError(f"outer takes two vectors, not arrays of shapes {x1.shape} and {x2.shape}")
    return x1[:, None] * x2[None, :]


@of_arrays
def cross(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the cross products of the vectors of three elements along a dim, which counts from the last one.

    As in the standard, `axis` is below 0, since the leading dims are broadcast; `np.cross` and `pla.cross` take others.

    Raises
    ------
    ValueError
        If `axis` is not from -1 to the negative of the fewer dims, or has not three elements.
    """
    if not -min(x1.ndim, x2.ndim) <= whole("cross: axis", axis) < 0:
        raise ValueError(f"cross takes an axis from {-min(x1.ndim, x2.ndim)} to -1, not {axis}")
    return contraction.cross(x1, x2, axis=axis)


@of_arrays
def diagonal(x: DistArray, /, *, offset: int = 0) -> DistArray:
    """Return diagonal number `offset` of the matrices of the last two dims, [..., k].

    Raises
    ------
    ValueError
        If there are fewer than two dims, or `offset` is no whole number.
    """
    return _diagonal(_matrices(x, "diagonal"), offset, -2, -1)


@of_arrays
def trace(x: DistArray, /, *, offset: int = 0, dtype: Any = None) -> DistArray:
    """Return the sums of diagonal number `offset` of the matrices of the last two dims, [...].

    Raises
    ------
    ValueError
        If there are fewer than two dims, or `offset` is no whole number.
    """
    offset = whole("trace: offset, the number of a diagonal,", offset)
    return sum(diagonal(_matrices(x, "trace"), offset=offset), axis=-1, dtype=dtype)


@primitive
@of_arrays
def vector_norm(x: DistArray, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> DistArray:
    """Return the vector norms over dims (default: all): (Σ |x|^ord)^(1/ord), or of `ord` 0, inf and -inf.

    Raises
    ------
    ValueError
        If `ord` is no number, or `axis` names a dim twice or one that `x` lacks.
    """
    dims = tuple(range(x.ndim)) if axis is None else dims_in_order(axis, x.ndim)
    return array_reductions.vector_norm(x, ord, dims, bool(keepdims))


@of_arrays
def matrix_norm(x: DistArray, /, *, keepdims: bool = False, ord: Any = "fro") -> DistArray:
    """Return the norms of the matrices of the last two dims: "fro", "nuc", 1, -1, 2, -2, inf or -inf.

    Raises
    ------
    ValueError
        If there are fewer than two dims, or `ord` is none of these.
    """
    _matrices(x, "matrix_norm")
    check_order("matrix_norm: ord", ord)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord not in (1, -1, math.inf, -math.inf):
        s = svdvals(x)
        value = sum(s, axis=-1) if ord == "nuc" else extreme_size(s, ord, (-1,))
        return reshape(value, (*x.shape[:-2], 1, 1)) if keepdims else value
    size = abs(x) if x.dtype.kind not in "biu" else abs(x.astype(np.float64))
    found = extreme_size(sum(size, axis=-2 if abs(ord) == 1 else -1, keepdims=True), ord, (-2, -1), keepdims=True)
    return found if keepdims else reshape(found, x.shape[:-2])


@of_arrays
def matrix_power(x: DistArray, n: int, /) -> DistArray:
    """Return the n-th powers of the square matrices of the last two dims, by repeated squaring.

    Powers below 0 are those of the inverses.  Sums of booleans are True where one term is, as NumPy's.

    Raises
    ------
    LinAlgError
        If the matrices are not square, or n is below 0 and a matrix is singular.
    TypeError
        If n is not a whole number.
    """
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise LinAlgError(f"matrix_power takes square matrices, not of shape {x.shape}")
    try:
        n = whole("n", n)
    except ValueError:
        raise TypeError(f"matrix_power takes a whole number for n, not {n!r}") from None
    if n < 0:
        return matrix_power(inv(x), -n)
    if not n:
        one = eye(x.shape[-1], dtype=x.dtype, grid=x.grid, layout=Layout(*x.layout.dims[-2:]))
        if takes_over(x):  # a tensor, whose derivative is 0
            return x * 0 + one
        return broadcast_to(one, x.shape).redistribute(x.layout.with_partial(())).copy()
    out, square = None, x
    while n:
        if n & 1:
            out = square.copy() if out is None else _product(out, square)
        n >>= 1
        square = _product(square, square) if n else square
    return out  # type: ignore[return-value]


def _product(x: DistArray, y: DistArray) -> DistArray:
    """Return X Y, of booleans too."""
    if x.dtype.kind != "b":
        return x @ y
    return x.astype(np.float32) @ y.astype(np.float32) > 0


handles(np.linalg.solve, takes=("a", "b"))(lambda a, b: solve(a, b))  # noqa: PLW0108 - NumPy's names of arguments
for _function in (inv, det, slogdet, eig, eigvals):
    handles(getattr(np.linalg, _function.__name__), takes=("a",))(lambda a, f=_function: f(a))
handles(np.linalg.svdvals, takes=("x",))(lambda x: svdvals(x))  # noqa: PLW0108
handles(np.linalg.cond)(cond)
handles(np.linalg.lstsq, takes=("a", "b", "rcond"))(lambda a, b, rcond=None: lstsq(a, b, rcond))


def _triangle(a: DistArray, UPLO: str) -> DistArray:
    """Return an array that lies like `a`, whose lower triangles are the ones that NumPy reads."""
    if not isinstance(UPLO, str) or UPLO not in ("L", "l", "U", "u"):
        raise ValueError(f"UPLO argument must be 'L' or 'U', not {UPLO!r}")
    return a if UPLO in "Ll" else a.mT.conj().redistribute(a.layout)


def _given(a: DistArray, hermitian: Any, name: str) -> DistArray:
    """Return the matrices, or with NumPy's `hermitian` the Hermitian ones of which they have the lower triangles."""
    return mirrored(a, name) if hermitian else a


@handles(np.linalg.eigh)
def _eigh(a: DistArray, UPLO: str = "L") -> Any:
    return eigh(_triangle(a, UPLO))


@handles(np.linalg.eigvalsh)
def _eigvalsh(a: DistArray, UPLO: str = "L") -> DistArray:
    return eigvalsh(_triangle(a, UPLO))


@handles(np.linalg.cholesky, takes=("a", "upper"))
def _cholesky(a: DistArray, upper: Any = False) -> DistArray:
    if not upper:
        return cholesky(a)
    return cholesky(_triangle(a, "U"), upper=True)


@handles(np.linalg.norm)
@of_arrays
def norm(x: DistArray, ord: Any = None, axis: Any = None, keepdims: Any = False) -> DistArray:
    """Return norms of vectors or matrices, of all orders that NumPy has.

    Parameters
    ----------
    x : DistArray
    ord : {None, "fro", "nuc", 1, -1, 2, -2, inf, -inf} or float, optional
        Of vectors any number, (Σ |x|^ord)^(1/ord), 0 for how many elements are not 0, and ±inf.  Of matrices "fro" or
        None, the sum "nuc" of the singular values, ±2 the largest and the smallest of them, ±1 and ±inf sums of columns
        and rows.  None without `axis` is the root of all squares.
    axis : int or pair of int, optional
        The dims of the vectors or of the matrices; by default all, of which there are one or two unless `ord` is None.
    keepdims : bool
        These dims stay, of size 1.

    Raises
    ------
    ValueError
        If `axis` names more than two dims, one twice or one that `x` lacks, or `ord` is none of these.
    """
    if getattr(ord, "ndim", 0):
        raise ValueError(f"norm: ord is a number, 'fro', 'nuc' or None, not {ord!r}")
    dims = tuple(range(x.ndim)) if axis is None else axis
    if ord not in (2, -2, "nuc") or not isinstance(dims, tuple) or len(dims) != 2:
        return array_reductions.norm(x, ord, axis, bool(keepdims))
    dims = dims_in_order(dims, x.ndim)
    found = matrix_norm(moveaxis(x, dims, (-2, -1)), ord=ord)
    return expand_dims(found, axis=tuple(sorted(dims))) if keepdims else found


@handles(np.linalg.matrix_norm)
def _matrix_norm(x: DistArray, keepdims: Any = False, ord: Any = "fro") -> DistArray:
    return norm(x, ord, (-2, -1), keepdims)


@handles(np.linalg.svd)
def _svd(a: DistArray, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    a = _given(a, hermitian, "svd")
    return svd(a, full_matrices=bool(full_matrices)) if compute_uv else svdvals(a)


@handles(np.linalg.pinv)
def _pinv(a: DistArray, rcond: Any = None, hermitian: bool = False, rtol: Any = None) -> DistArray:
    if rcond is not None and rtol is not None:
        raise ValueError("np.linalg.pinv takes rcond or rtol, two names of one limit, not both")
    return pinv(_given(a, hermitian, "pinv"), rtol=limits("pinv: rcond", rcond, a.shape[:-2]) if rtol is None else rtol)


@handles(np.linalg.matrix_rank)
def _matrix_rank(A: DistArray, tol: Any = None, hermitian: bool = False, rtol: Any = None) -> DistArray:
    if tol is not None and rtol is not None:
        raise ValueError(
            "np.linalg.matrix_rank takes tol, a limit of singular values, or rtol, beside the largest; not both"
        )
    if A.ndim < 2:  # a vector, or a number, has rank 1, unless it is 0
        return (A != 0).any().astype(np.int64)
    tol, A = limits("matrix_rank: tol", tol, A.shape[:-2]), _given(A, hermitian, "matrix_rank")
    if tol is None:
        return matrix_rank(A, rtol=rtol)
    tol = tol[..., None] if isinstance(tol, DistArray) and tol.ndim else tol  # one for every matrix
    return sum(svdvals(A) > tol, axis=-1, dtype=np.int64)


@handles(np.linalg.qr)
def _qr(a: DistArray, mode: str = "reduced") -> Any:
    if mode == "raw":
        raise ValueError(
            "np.linalg.qr(mode='raw') gives LAPACK's reflections, which distributed matrices do not have; "
            "parlinalg.linalg.qr_factor(a) keeps its own, and has R, Q(columns) and solve(b)"
        )
    return qr(a, mode=mode)


@handles(np.linalg.matrix_power)
def _matrix_power(a: DistArray, n: int) -> DistArray:
    return matrix_power(a, n)


@primitive
def regrouped(x: DistArray, shape: tuple[int, ...]) -> DistArray:
    """Return the same elements in another shape; of tensors too they move where they must."""
    return reshape(x, shape)


@handles(np.linalg.tensorinv)
@of_arrays
def tensorinv(a: DistArray, ind: int = 2) -> DistArray:
    """Return the inverse of an array for `tensordot` over its last dims: b with Σ a[i, k] b[k, j] the identity.

    Parameters
    ----------
    a : DistArray
        Of dims i and k; the dims i have as many elements as the dims k.
    ind : int
        How many dims i there are, at least 1.

    Raises
    ------
    LinAlgError
        If the dims do not have as many elements, or the array is singular.
    """
    ind = whole("tensorinv: ind", ind, 1)
    size = math.prod(a.shape[ind:])
    if math.prod(a.shape[:ind]) != size:
        raise LinAlgError(f"tensorinv takes dims whose first {ind} have as many elements as the others, not {a.shape}")
    return regrouped(inv(regrouped(a, (size, size))), (*a.shape[ind:], *a.shape[:ind]))


@handles(np.linalg.tensorsolve)
@of_arrays
def tensorsolve(a: DistArray, b: DistArray, axes: Any = None) -> DistArray:
    """Return the x for which `tensordot(a, x, x.ndim)` is b.

    Parameters
    ----------
    a : DistArray
        Of b's dims, then of x's, which have as many elements.
    b : DistArray
    axes : tuple of int, optional
        Dims of `a` that are moved behind the others first.

    Raises
    ------
    LinAlgError
        If the dims do not fit, or `a` is singular.
    """
    if axes is not None:
        axes = dims_in_order(axes, a.ndim)
        a = moveaxis(a, axes, tuple(range(a.ndim - len(axes), a.ndim)))
    shape = a.shape[b.ndim :]
    size = math.prod(shape)
    if a.shape[: b.ndim] != b.shape or math.prod(b.shape) != size:
        raise LinAlgError(
            f"tensorsolve takes a of b's dims and others of as many elements, not {a.shape} and {b.shape}"
        )
    return regrouped(solve(regrouped(a, (size, size)), regrouped(b, (size,))), shape)
