"""Derivatives of the factors of Cholesky, LU and QR factorizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg import linalg
from parlinalg.array import DistArray, joining
from parlinalg.autograd.functions import np_
from parlinalg.autograd.linalg.matrices import (
    adjoint,
    below,
    beside,
    divided,
    first,
    halved,
    hermitian,
    known,
    mirrored,
    negated,
    times_left,
    tril,
    triu,
    unformed,
    wants,
    widened,
)
from parlinalg.autograd.ops.arithmetic import Frame
from parlinalg.autograd.primitives import as_op
from parlinalg.autograd.tensor import Tensor
from parlinalg.linalg import congruence
from parlinalg.linalg.congruence import congruent, halve
from parlinalg.linalg.factors import PivotedQRResult, QRResult
from parlinalg.linalg.matrices import spend
from parlinalg.linalg.systems import triangular_solution
from parlinalg.matmul import matmul


def of_cholesky(g: DistArray, y: DistArray, upper: bool) -> DistArray:
    if g.ndim == 2:
        e = halve(adjoint(y) @ g) if not upper else halve(y @ adjoint(g))
        spend(g)
        return congruent(e, adjoint(y) if upper else y)
    if upper:
        g, y = adjoint(g), adjoint(y)
    s = triangular_solution(y, halved(adjoint(y) @ g), lower=True, adjoint=True)  # L⁻ᴴ Φ(Lᴴ g)
    return hermitian(adjoint(triangular_solution(y, adjoint(s), lower=True, adjoint=True)))


lower_of_cholesky = known("cholesky", "x found upper", takes=True, x=of_cholesky)


@as_op(linalg.cholesky)
def cholesky(x: Tensor, /, *, upper: bool = False, depth: int | None = None) -> Tensor:
    """Return the Cholesky factors of Hermitian positive definite matrices."""
    return lower_of_cholesky(x, linalg.cholesky(x.data, upper=upper, depth=depth), upper)


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


lower_of_lu = known("lu", "a found l u order", a=of_lower)
upper_of_lu = known("lu", "a found l u order", a=of_upper)


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
