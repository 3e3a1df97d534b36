"""Factorizations and triangular solutions of matrices on a GPU, by cuSOLVER and cuBLAS through CuPy's functions.

CuPy says nothing of a matrix that cuSOLVER cannot factor unless it is asked to (`raising`).
"""

from __future__ import annotations

import warnings
from typing import Any

import cupy
import cupyx
import numpy as np
from cupyx.scipy.linalg import lu_factor, solve_triangular

TURNED = {"N": "T", "T": "N"}


def raising() -> Any:
    """Return a context in which CuPy's functions raise LinAlgError where cuSOLVER reports a failure."""
    return cupyx.errstate(linalg="raise")


def cholesky(a: Any) -> int:
    """Replace a by its lower Cholesky factor (`potrf`), of which the upper triangle is 0.

    Returns 0, or the order of the first leading minor that is not positive; a is NaN then.
    """
    with raising():
        try:
            a[...] = cupy.linalg.cholesky(a)
            return 0
        except np.linalg.LinAlgError:
            low, high = 0, len(a)  # the minor of order `low` is positive, that of order `high` is not
        while high - low > 1:
            k = (low + high) // 2
            try:
                cupy.linalg.cholesky(a[:k, :k])
                low = k
            except np.linalg.LinAlgError:
                high = k
    a[...] = np.nan
    return high


def lu(a: Any) -> tuple[Any, np.ndarray] | None:
    """Return L and U in one matrix and LAPACK's pivots, on the host, counted from 0 (`getrf`).

    Returns None where the factors are not finite: cuSOLVER divides by a pivot that is 0.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a pivot that is 0
        found, pivots = lu_factor(a, check_finite=False)
    if not bool(cupy.isfinite(found).all()):
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


def qr(a: Any) -> tuple[Any, Any]:
    """Return Q and R, reduced (`geqrf` and `orgqr`)."""
    found: tuple[Any, Any] = cupy.linalg.qr(a)
    return found
