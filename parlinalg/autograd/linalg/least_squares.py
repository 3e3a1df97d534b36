"""Derivatives of pseudoinverses and least squares."""

from __future__ import annotations

from typing import Any

from parlinalg import linalg
from parlinalg.array import DistArray
from parlinalg.autograd.linalg.matrices import adjoint, known, less
from parlinalg.autograd.linalg.spectra import of_values
from parlinalg.autograd.primitives import as_op, differentiable
from parlinalg.autograd.tensor import as_tensor
from parlinalg.linalg.least_squares import LstsqResult, least_squares, times
from parlinalg.linalg.matrices import spend


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


least_solution = known("lstsq", "a b found parts", a=of_system, b=lambda g, parts: times(parts, g, adjoint=True))
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
    return LstsqResult(least_solution(a, b, found.x, parts), residuals, found.rank, _values_alone(a, found.s))
