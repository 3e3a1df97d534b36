"""`cupyx.scipy.linalg`: what the library uses of it, with CuPy's parameters, orders of elements and silence."""

from __future__ import annotations

from typing import Any
from warnings import warn

import numpy as np
import scipy.linalg
from cupy import cuda
from cupy._array import ndarray, wrap


def _values(a: Any) -> np.ndarray:
    if not isinstance(a, ndarray):
        raise np.linalg.LinAlgError(f"cupy.linalg only supports cupy.ndarray, not {type(a)}")
    a._reachable()
    return a._a


def solve_triangular(
    a: Any, b: Any, trans: Any = 0, lower: bool = False, unit_diagonal: bool = False, overwrite_b: bool = False,
    check_finite: bool = False,
) -> Any:  # fmt: skip
    """The solution in columns; b itself if it lies so and may be overwritten.  The other triangle is not read."""
    t, x = _values(a), _values(b)
    if t.ndim > 2:
        return _stacks_of_triangles(t, x, trans, lower, unit_diagonal)
    if t.ndim != 2 or t.shape[0] != t.shape[1]:
        raise ValueError("expected square matrix")
    if len(t) != len(x):
        raise ValueError("incompatible dimensions")
    if trans not in (0, 1, 2, "N", "T", "C"):
        raise ValueError(f"trans is {trans!r}")
    dtype = t.dtype if t.dtype.char in "fd" else np.promote_types(t.dtype.char, "f")
    in_place = overwrite_b and x.flags.f_contiguous and x.dtype == dtype
    t = np.tril(t) if lower else np.triu(t)
    if unit_diagonal:
        np.fill_diagonal(t, 1)
    with np.errstate(all="ignore"):  # a zero on the diagonal is divided by
        if not t.diagonal().all():
            found = np.full(x.shape, np.nan, dtype, order="F")
        else:
            found = scipy.linalg.solve_triangular(t.astype(dtype), x.astype(dtype), trans, lower, check_finite=False)
    cuda.issued()
    if in_place:
        x[...] = found
        return b
    return wrap(np.asfortranarray(found))


def _stacks_of_triangles(t: np.ndarray, x: np.ndarray, trans: Any, lower: bool, unit: bool) -> Any:
    """By one call of `trsmBatched`; b is not overwritten."""
    if t.shape[-1] != t.shape[-2]:
        raise ValueError("expected a batch of square matrices")
    if t.shape[:-2] != x.shape[: t.ndim - 2]:
        raise ValueError("incompatible batch count")
    if x.ndim != t.ndim or t.shape[-2] != x.shape[-2]:
        raise ValueError("incompatible dimensions")
    if not t.size or not x.size:
        raise ZeroDivisionError("division by zero")
    found = np.empty_like(x)
    for at in np.ndindex(t.shape[:-2]):
        found[at] = solve_triangular(wrap(t[at]), wrap(x[at]), trans, lower, unit)._a
    return wrap(found)


def lu_factor(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> Any:
    """L and U in columns, and pivots counted from 0.  A pivot of 0 gives a warning, and NaNs behind it."""
    t = _values(a)
    if t.ndim != 2:
        raise np.linalg.LinAlgError("Array must be two-dimensional")
    if t.dtype.char not in "fdFD":
        raise NotImplementedError("Only float32, float64, complex64 and complex128 are supported.")
    if check_finite and not np.isfinite(t).all():
        raise ValueError("array must not contain infs or NaNs")
    getrf = scipy.linalg.get_lapack_funcs(("getrf",), dtype=t.dtype)[0]
    found, pivots, info = getrf(t)
    if info > 0:
        found[info:, info - 1 :] = np.nan
        warn(f"Diagonal number {info} is exactly zero. Singular matrix.", RuntimeWarning, stacklevel=2)
    cuda.issued()
    return wrap(np.asfortranarray(found)), wrap(pivots.astype(np.intc))
