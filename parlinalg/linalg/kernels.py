"""What a rank computes on its tiles: BLAS in place, on rows with a leading dimension, and LAPACK by SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.backend.blas import added, substituted


def lapack(name: str, dtype: np.dtype[Any]) -> Any:
    """Return a function of LAPACK for a dtype."""
    from scipy.linalg import get_lapack_funcs

    return get_lapack_funcs((name,), dtype=dtype)[0]


def subtract(y: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """Subtract `x @ w` from y, in place."""
    if y.size and x.size and not added(y, x, w, -1):
        y -= x @ w


def substitute(
    t: np.ndarray, b: np.ndarray, *, right: bool = False, lower: bool = False, adjoint: bool = False,
    unit: bool = False,
) -> None:  # fmt: skip
    """Replace b by the solution x of `op(t) x = b`, with `right` of `x op(t) = b`; see `blas.substituted`."""
    t = np.ascontiguousarray(t)
    if not b.size or substituted(t, b, right=right, lower=lower, adjoint=adjoint, unit=unit):
        return
    from scipy.linalg import solve_triangular

    trans = "C" if adjoint else "N"
    if right:  # x op(t) = b is op(t)ᴴ xᴴ = bᴴ
        trans = "N" if adjoint else "C"
        b[...] = solve_triangular(t, b.conj().T, trans, lower, unit, check_finite=False).conj().T
    else:
        b[...] = solve_triangular(t, b, trans, lower, unit, check_finite=False)


def cholesky(a: np.ndarray) -> int:
    """Replace a by its lower Cholesky factor; return 0, or the order of the first minor that is not positive."""
    found, info = lapack("potrf", a.dtype)(a, lower=1, clean=1)
    a[...] = found if not info else np.nan
    return int(info)


def lu(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return L and U in one matrix, by partial pivoting, and the order of the rows."""
    order = np.arange(len(a))
    if not a.size:
        return a.copy(), order
    found, pivots, _ = lapack("getrf", a.dtype)(a)
    for x, y in enumerate(pivots):
        order[[x, y]] = order[[y, x]]
    return found, order


def qr(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Q and R, reduced, with the rows sorted by size first: else rows of unlike sizes lose accuracy."""
    k = min(a.shape)
    if not k:
        return np.zeros((len(a), 0), a.dtype), np.zeros((0, a.shape[1]), a.dtype)
    order = np.argsort(-np.abs(a).max(axis=1), kind="stable")
    found, tau, _, _ = lapack("geqrf", a.dtype)(a[order])
    generate = lapack("ungqr" if a.dtype.kind == "c" else "orgqr", a.dtype)
    q = np.empty((len(a), k), a.dtype)
    q[order] = generate(np.asfortranarray(found[:, :k]), tau)[0]
    return q, np.triu(found[:k])


def adjoint(a: np.ndarray) -> np.ndarray:
    """Return the conjugate transpose; no copy of a real matrix."""
    return a.T if a.dtype.kind != "c" else a.conj().T
