"""Derivatives of eigenvalues, singular values and their vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg import linalg
from parlinalg.array import DistArray, joining
from parlinalg.autograd.linalg.factorizations import of_completed
from parlinalg.autograd.linalg.matrices import (
    adjoint,
    first,
    hermitian,
    known,
    skew,
    times_left,
    times_right,
    unformed,
    wants,
)
from parlinalg.autograd.ops.arithmetic import Frame
from parlinalg.autograd.primitives import as_op, constant, refused
from parlinalg.autograd.tensor import Tensor
from parlinalg.linalg import congruence, ranks, singular, spectral, systems
from parlinalg.linalg.congruence import over_differences
from parlinalg.linalg.matrices import NEGLIGIBLE, as_matrix, spend
from parlinalg.matmul import matmul


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
    choose = spectral.chooser(as_matrix(x.data, "eigh", square=True), "eigh", subset_by_index, subset_by_value)
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
