"""Derivatives of functions of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg import linalg
from parlinalg.array import DistArray
from parlinalg.array.core import truth
from parlinalg.autograd.functions import np_
from parlinalg.autograd.linalg.matrices import adjoint, below, beside, hermitian, known, skew
from parlinalg.autograd.linalg.spectra import inverses
from parlinalg.autograd.primitives import as_op, differentiable
from parlinalg.autograd.tensor import Tensor


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
