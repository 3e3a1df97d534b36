"""Functions of factorizations, written alike for parlinalg and PyTorch, that do not depend on signs and phases.

`la` is `parlinalg.linalg` or `torch.linalg`; the other arguments are tensors of either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from parlinalg import Layout
from tests.autograd.cases import numbers


class Example(NamedTuple):
    """A function of `la` and tensors, and arrays to take as these."""

    function: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    torch: bool = True
    """PyTorch has it too."""


def whole(x: Any) -> Any:
    """The tensor in no pieces, of which rows and columns can be taken."""
    return x.redistribute(Layout(*[None] * x.ndim)) if hasattr(x, "redistribute") else x


def phased(vectors: Any, pivots: Any) -> Any:
    return vectors * (pivots.conj() / abs(pivots))


def columns(vectors: Any) -> Any:
    """Columns times the phases that make their first elements positive."""
    v = whole(vectors)
    return phased(v, v[..., :1, :])


def rows(vectors: Any) -> Any:
    return columns(vectors.mT).mT


def of_r(la: Any, r: Any) -> Any:
    """R, its rows times the phases that make the diagonal positive."""
    r = whole(r)
    return phased(r, la.diagonal(r)[..., None])


def alike(y: Any, x: Any) -> Any:
    """The tensor in the layout of another."""
    return y.redistribute(x.layout) if hasattr(x, "redistribute") else y


def hermitian(x: Any) -> Any:
    y = whole(x)
    return alike((y + y.mT.conj()) / 2, x)


def positive(x: Any) -> Any:
    y = x @ x.mT.conj()
    return y + y


def spaced(*shape: int, seed: int = 0, dtype: Any = float) -> np.ndarray:
    """Matrices whose singular values lie apart from each other and from 0."""
    a = numbers(*shape, seed=seed).astype(dtype)
    if dtype is complex:
        a = a + 1j * numbers(*shape, seed=seed + 1)
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    return (u * (1 + np.arange(s.shape[-1])) / 2) @ vh


SQUARE, TALL, WIDE, STACK = (5, 5), (7, 4), (3, 6), (4, 3, 3)


def each(
    function: Callable[..., Any], *shapes: tuple[int, ...], more: tuple[tuple[int, ...], ...] = (), torch: bool = True
) -> list[Example]:
    """The function of matrices of these shapes, the first and the last also complex; `more` are shapes of others."""
    kinds = [(shape, float) for shape in shapes] + [
        (shape, complex) for shape in dict.fromkeys((shapes[0], shapes[-1]))
    ]
    return [
        Example(
            function,
            (spaced(*shape, dtype=d), *(numbers(*(k or shape[-2] for k in b), seed=5).astype(d) for b in more)),
            torch,
        )
        for shape, d in kinds
    ]


def low_rank(la: Any, x: Any) -> Any:
    """Matrices of rank 2."""
    return alike(whole(x)[..., :2] @ whole(x)[..., :2, :], x)


def of_qr(la: Any, x: Any, mode: str = "reduced") -> Any:
    """Both factors, in one product that has neither's phases but all of their elements."""
    q, r = la.qr(x, mode=mode)
    k = min(x.shape[-2:])
    return columns(whole(q)[..., :k]).sum() * of_r(la, whole(r)[..., :k, :])


def of_pivoted_qr(la: Any, x: Any, mode: str = "reduced") -> Any:
    """R alone, and the factors and A in the order that pivoting gives to the columns."""
    if mode == "r":
        return abs(la.qr(x, mode="r", pivoting=True)[0])
    q, r, _ = la.qr(x, mode=mode, pivoting=True)
    k = min(x.shape[-2:])
    return columns(whole(q)[..., :k]).sum() * of_r(la, whole(r)[..., :k, :]) + ((whole(q) @ whole(r)) ** 3).sum()


def of_svd(la: Any, x: Any) -> Any:
    u, s, vh = la.svd(x, full_matrices=False)
    return columns(u).sum() * whole(s * s)[..., None] * rows(vh)


def polar(u: Any, s: Any, vh: Any) -> Any:
    return whole(u) @ whole(vh)


def of_completed(la: Any, x: Any, mode: str) -> Any:
    """The projection to what the columns do not span, by the vectors that complete them."""
    q, k = whole(la.qr(x, mode="complete")[0] if mode == "qr" else la.svd(x)[0]), min(x.shape[-2:])
    return q[..., k:] @ q[..., k:].mT.conj()


def of_lu(la: Any, x: Any) -> Any:
    _, l, u = la.lu(x)
    return l.sum() * u + (l * l).sum() * u


def of_slogdet(la: Any, x: Any) -> Any:
    sign, log = la.slogdet(x)
    return log * (sign + 2)


def of_lstsq(la: Any, a: Any, b: Any) -> Any:
    found = la.lstsq(a, b)
    return found[0]


def by_lu(la: Any, a: Any, b: Any) -> Any:
    factor = la.lu_factor(a)
    l, u = factor.factors()
    size = factor.slogdet().logabsdet.sum() + l.sum() * u.sum()
    return factor.solve(b) * factor.det().sum() + factor.solve(b, adjoint=True) + size


def by_cholesky(la: Any, a: Any, b: Any) -> Any:
    factor = la.cho_factor(positive(a))
    return factor.solve(b) + factor.L.sum()


def by_qr(la: Any, x: Any) -> Any:
    factor = la.qr_factor(x)
    return columns(factor.Q(2)).sum() * of_r(la, factor.R)


def of_eig(la: Any, x: Any) -> Any:
    """The projections to all eigenvectors, weighted by their values, which may come in any order."""
    w, v = map(whole, la.eig(x))
    return (v * (w * w)[..., None, :]) @ v.mT.conj()


def some_of_eigh(la: Any, x: Any, **subset: Any) -> Any:
    w, v = la.eigh(x, **subset)
    return columns(v) * whole(w)[..., None, :] + whole(la.eigvalsh(x, **subset))[..., None, :]


def of_pencil(la: Any, x: Any, y: Any, **subset: Any) -> Any:
    """Eigenvalues and vectors of A v = w B v."""
    w, v = la.eigh(hermitian(x), positive(y), **subset)
    return columns(v) * whole(w)[..., None, :] + whole(la.eigvalsh(hermitian(x), positive(y), **subset))[..., None, :]


def matrix_exponential(la: Any, x: Any) -> Any:
    return la.expm(x) if hasattr(la, "expm") else la.matrix_exp(x)


def projection(basis: Any) -> Any:
    return basis @ basis.mT.conj()


EXAMPLES: dict[str, list[Example]] = {
    "qr": [
        *each(of_qr, SQUARE, TALL, WIDE, STACK),
        *each(lambda la, x: of_qr(la, x, "complete"), SQUARE, WIDE),
        *each(lambda la, x: of_qr(la, x, "complete"), TALL, torch=False),
        *each(lambda la, x: of_completed(la, x, "qr"), TALL, torch=False),
        *each(lambda la, x: abs(la.qr(x, mode="r")), TALL, STACK, torch=False),
        *each(of_pivoted_qr, SQUARE, TALL, WIDE, STACK, (9, 4, 6), torch=False),
        *each(lambda la, x: of_pivoted_qr(la, x, "complete"), TALL, WIDE, torch=False),
        *each(lambda la, x: of_pivoted_qr(la, x, "r"), TALL, STACK, torch=False),
    ],
    "qr_factor": [
        *each(by_qr, TALL, SQUARE, STACK, torch=False),
        *each(lambda la, a, b: la.qr_factor(a).solve(b), TALL, SQUARE, STACK, more=((0, 2),), torch=False),
    ],
    "lu": each(of_lu, SQUARE, TALL, WIDE, STACK),
    "lu_factor": each(by_lu, SQUARE, STACK, more=((0, 2),), torch=False),
    "cho_factor": each(by_cholesky, SQUARE, STACK, more=((0, 2),), torch=False),
    "eigh": [
        *each(lambda la, x: columns(la.eigh(hermitian(x))[1]), SQUARE, STACK),
        *each(lambda la, x: la.eigh(hermitian(x))[0] ** 2, SQUARE),
        *each(
            lambda la, x: some_of_eigh(la, hermitian(x), subset_by_index=(1, 3)),
            SQUARE,
            STACK[:-2] + (5, 5),
            torch=False,
        ),
        *each(lambda la, x: some_of_eigh(la, hermitian(x), subset_by_value=(-0.5, 99)), SQUARE, torch=False),
        *each(of_pencil, SQUARE, STACK, more=((0, 0),), torch=False),
        *each(lambda la, x, y: of_pencil(la, x, y, subset_by_index=(1, 2)), SQUARE, more=((0, 0),), torch=False),
    ],
    "eig": [
        *each(of_eig, SQUARE, STACK),
        *each(lambda la, x: (abs(whole(la.eig(x)[0])) ** 3).sum(), SQUARE),
    ],
    "eigvals": each(lambda la, x: (whole(la.eigvals(x)) ** 3).sum(), SQUARE),
    "expm": [
        *each(lambda la, x: matrix_exponential(la, x), SQUARE, STACK),
        *each(lambda la, x: matrix_exponential(la, hermitian(x)), SQUARE),
    ],
    "sqrtm": [
        *each(lambda la, x: la.sqrtm(positive(x)), SQUARE, STACK, torch=False),
        *each(lambda la, x: la.sqrtm(la.matrix_power(x, 2)), (3, 3), torch=False),
    ],
    "polar": [
        *each(lambda la, x: la.polar(x)[0], TALL, WIDE, STACK, torch=False),
        *each(lambda la, x: la.polar(x)[1], TALL, WIDE, STACK, torch=False),
        *each(lambda la, x: la.polar(x, "left")[1], TALL, WIDE, torch=False),
    ],
    "orth": [
        *each(lambda la, x: projection(la.orth(x)), TALL, torch=False),
        *each(lambda la, x: projection(la.orth(low_rank(la, x))), SQUARE, torch=False),
    ],
    "null_space": [
        *each(lambda la, x: projection(la.null_space(x)), WIDE, torch=False),
        *each(lambda la, x: projection(la.null_space(low_rank(la, x))), SQUARE, torch=False),
    ],
    "eigvalsh": each(lambda la, x: la.eigvalsh(hermitian(x)), SQUARE, STACK),
    "svd": [
        *each(of_svd, SQUARE, TALL, WIDE, STACK),
        *each(lambda la, x: polar(*la.svd(x)), SQUARE),
        *each(lambda la, x: of_completed(la, x, "svd"), TALL, torch=False),
    ],
    "svdvals": each(lambda la, x: la.svdvals(x) ** 3, SQUARE, TALL, WIDE, STACK),
    "matrix_norm": each(
        lambda la, x: la.matrix_norm(x, ord=2) + la.matrix_norm(x, ord=-2) ** 2 * la.matrix_norm(x, ord="nuc"),
        TALL,
        WIDE,
        STACK,
    ),
    "cond": [
        *each(lambda la, x: la.cond(x) * la.cond(x, -2) ** 2, TALL, SQUARE, STACK),
        *each(lambda la, x: la.cond(x, 1) + la.cond(x, "fro") + la.cond(x, "nuc"), SQUARE, torch=False),
    ],
    "pinv": [
        *each(lambda la, x: la.pinv(x), SQUARE, TALL, WIDE, STACK),
        *each(lambda la, x: la.pinv(low_rank(la, x)), SQUARE),
    ],
    "lstsq": [
        *each(of_lstsq, TALL, SQUARE, WIDE, more=((0, 2),)),
        *each(of_lstsq, STACK, (3, 4, 2), (2, 2, 4), more=((0, 2),), torch=False),
        *each(lambda la, a, b: la.lstsq(a, whole(b)[:, 0])[0], TALL, (3, 4, 2), more=((0, 2),), torch=False),
        *each(
            lambda la, a, b: la.lstsq(low_rank(la, a), b)[0],
            SQUARE,
            (4, 4, 3),
            (2, 3, 4),
            more=((0, 2),),
            torch=False,
        ),
        *each(lambda la, a, b: la.lstsq(low_rank(la, a), b)[0], WIDE, more=((0, 2),), torch=False),
        *each(
            lambda la, a, b: la.lstsq(a, b)[1] * (la.lstsq(a, b)[3] ** 2).sum(),
            TALL,
            (3, 4, 2),
            more=((0, 2),),
            torch=False,
        ),
    ],
    "slogdet": each(of_slogdet, SQUARE, STACK),
    "det": each(lambda la, x: la.det(x), SQUARE, STACK),
    "inv": each(lambda la, x: la.inv(x), SQUARE, STACK),
    "matrix_power": each(lambda la, x: la.matrix_power(x, -3), SQUARE, STACK),
    "cholesky": each(lambda la, x: la.cholesky(positive(x)), SQUARE, STACK),
    "solve": [
        *each(lambda la, a, b: la.solve(a, b), SQUARE, more=((0, 2),)),
        *each(lambda la, a, b: la.solve(a, whole(b)[:, 0]), SQUARE, more=((0, 2),)),
        *each(lambda la, a, b: la.solve(a, b), STACK, more=((0, 2),)),
    ],
}
