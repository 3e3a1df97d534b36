"""Factorizations and triangular solutions of matrices on a GPU, by cuSOLVER and cuBLAS through CuPy's functions.

CuPy says nothing of a matrix that cuSOLVER cannot factor unless it is asked to (`raising`).  `solve`, `qr`, `eigh`,
`eigvalsh`, `svd` and `lstsq` are NumPy's, of matrices or of stacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda.device import get_cusolver_handle
from cupy_backends.cuda.libs import cublas
from cupy_backends.cuda.libs import cusolver as library
from cupyx.scipy.linalg import lu_factor, solve_triangular

from parlinalg.backend.blas import LETTERS

TURNED = {"N": "T", "T": "N"}
FAILURES = {
    "getr": "Singular matrix",
    "potr": "Matrix is not positive definite",
    "gesvd": "SVD did not converge",
    "syev": "Eigenvalues did not converge",
}
"""NumPy's words for the failure of a routine, by a part of its name."""
JACOBI = 32
"""The most rows for which the eigenvectors of a stack by Jacobi's method are as exact as LAPACK's."""


@contextmanager
def raising() -> Iterator[None]:
    """Within it CuPy's functions raise LinAlgError, in NumPy's words, where cuSOLVER or cuBLAS reports a failure."""
    try:
        with cupyx.errstate(linalg="raise"):
            yield
    except np.linalg.LinAlgError as error:
        words = next((words for name, words in FAILURES.items() if name in str(error).partition(" in cu")[0]), "")
        raise np.linalg.LinAlgError(words or str(error)) from None


def _in_range(a: Any) -> tuple[Any, Any]:
    """Return matrices whose squares of elements stay in range, and the powers of two by which they were multiplied.

    LAPACK's drivers do so, cuSOLVER's do not.  None in place of the powers, [..., 1], says that all are 1.
    """
    if not a.size:
        return a, None
    limits, axes = np.finfo(a.dtype), (-2, -1)
    parts = (a.real, a.imag) if a.dtype.kind == "c" else (a,)
    sizes = [cupy.maximum(x.max(axes, keepdims=True), -x.min(axes, keepdims=True)) for x in parts]
    largest = sizes[0] if len(sizes) == 1 else cupy.maximum(*sizes)
    small = float(limits.tiny) ** 0.5 / float(limits.eps)
    odd = (largest > 0) & ((largest < small) | (largest > 1 / small))
    if not bool(odd.any()):
        return a, None
    most = limits.maxexp - 24
    powers = cupy.where(odd, cupy.clip(-cupy.frexp(largest)[1], -most, most), 0)
    scale = cupy.ldexp(cupy.ones_like(largest), powers)
    return a * scale, scale[..., 0]


def cholesky(a: Any) -> int:
    """Replace a by its lower Cholesky factor, and return a number, as `lower` does both."""
    a[...], minor = lower(a)
    return minor


def lower(a: Any) -> tuple[Any, int]:
    """Return the lower Cholesky factor (`potrf`), of which the upper triangle is 0, and 0.

    In place of 0, the order of the first leading minor that is not positive; the factor is NaN then.
    """
    n, letter = len(a), LETTERS[a.dtype.char]
    if not n:
        return a.copy(), 0
    x = a.T.copy()  # the matrix in columns, whose lower triangle cuSOLVER factors in half the time of the upper one
    size, factor = (getattr(library, f"{letter}potrf{part}") for part in ("_bufferSize", ""))
    given = get_cusolver_handle(), cublas.CUBLAS_FILL_MODE_LOWER, n, x.data.ptr, n
    count = size(*given)
    work, info = cupy.empty(count, a.dtype), cupy.empty(1, np.int32)
    factor(*given, work.data.ptr, count, info.data.ptr)
    minor = int(info[0])
    return (cupy.full_like(a, np.nan), minor) if minor else (cupy.ascontiguousarray(cupy.tril(x.T)), 0)


def lu(a: Any) -> tuple[Any, np.ndarray] | None:
    """Return L and U in one matrix and LAPACK's pivots, on the host, counted from 0 (`getrf`).

    Returns None where the factors are not finite: cuSOLVER divides by a pivot that is 0.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a pivot that is 0
        found, pivots = lu_factor(a, check_finite=False)
    if not bool(cupy.isfinite(found.sum())) and not bool(cupy.isfinite(found).all()):
        return None
    return found, cupy.asnumpy(pivots)


def substitute(t: Any, b: Any, *, right: bool, lower: bool, adjoint: bool, unit: bool) -> None:
    """Replace b by the solution x of `op(t) x = b`, with `right` of `x op(t) = b` (`trsm`)."""
    op = "N" if not adjoint else "C" if t.dtype.kind == "c" else "T"
    if right:  # that is op(t)ᵀ xᵀ = bᵀ, and rows of b are columns, as cuBLAS has them
        t, op = (t.conj(), "N") if op == "C" else (t, TURNED[op])
    if op != "C" and t.flags.c_contiguous:  # the transpose lies in columns
        t, op, lower = t.T, TURNED[op], not lower
    given = b.T if right else b
    found = solve_triangular(t, given, op, lower, unit, overwrite_b=True, check_finite=False)
    if found is not given:
        b[...] = found.T if right else found


def qr(a: Any, mode: str = "reduced") -> Any:
    """Return Q and R, or with the mode "r" R alone (`geqrf` and `orgqr`)."""
    with cupyx.errstate(linalg="ignore"):  # every matrix has one: between the two nobody waits for a report
        return cupy.linalg.qr(a, mode)


def solve(a: Any, b: Any) -> Any:
    """Return the solution x of `a x = b`, for b of as many dims as a."""
    return cupy.linalg.solve(a, b) if b.size else b.copy()  # CuPy divides by the number of columns


def triangles(t: Any, b: Any, *, lower: bool, adjoint: bool, unit: bool) -> Any:
    """Return the solutions x of `op(t) x = b` of stacks, without zeros on their diagonals (`trsmBatched`)."""
    if not b.size:
        return b.copy()
    op = "N" if not adjoint else "C" if t.dtype.kind == "c" else "T"
    return solve_triangular(t, b, op, lower, unit)


def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """Return U, the singular values and Vᴴ, or the values alone (`gesvd`; `gesvdjBatched` of small ones in stacks)."""
    a, scale = _in_range(a)
    found = cupy.linalg.svd(a, full_matrices, compute_uv)
    if scale is None:
        return found
    return (found[0], found[1] / scale, found[2]) if compute_uv else found / scale


def eigh(a: Any) -> tuple[Any, ...]:
    """Return eigenvalues and eigenvectors by the lower triangles, with zeros above (`syevd`; `syevjBatched`)."""
    return _eigen(cupy.linalg.eigh, a)


def eigvalsh(a: Any) -> Any:
    """Return eigenvalues by the lower triangles, with zeros above."""
    return _eigen(lambda x: (cupy.linalg.eigvalsh(x),), a)[0]


def _eigen(function: Any, a: Any) -> tuple[Any, ...]:
    """Return what a function gives for matrices in range, one by one where Jacobi's method is less exact."""
    a, scale = _in_range(a)
    if a.ndim > 2 and a.shape[-1] > JACOBI and a.size:
        found = zip(*map(function, a.reshape(-1, *a.shape[-2:])), strict=True)
        values, *vectors = (cupy.stack(each).reshape(*a.shape[:-2], *each[0].shape) for each in found)
    else:
        values, *vectors = function(a)
    return values if scale is None else values / scale, *vectors


def lstsq(a: Any, b: Any, rcond: Any = None) -> tuple[Any, ...]:
    """Return x, sums of squares, the rank and the singular values of one matrix (`gesvd`)."""
    a, scale = _in_range(a)
    x, squares, rank, values = cupy.linalg.lstsq(a, b, rcond)
    return (x, squares, rank, values) if scale is None else (x * scale, squares, rank, values / scale)
