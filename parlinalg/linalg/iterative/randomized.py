"""Bases of ranges and low-rank decompositions by products with random matrices, of stacks at once too."""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import DistArray, whole
from parlinalg.array.dispatch import primitive
from parlinalg.layout import Layout
from parlinalg.linalg.factors.qr import qr
from parlinalg.linalg.iterative.products import Products, count_of, products_with
from parlinalg.linalg.iterative.vectors import (
    Apply,
    met_odd,
)
from parlinalg.linalg.singular import SVDResult, svd
from parlinalg.matmul import matmul
from parlinalg.random.generator import default_rng


@primitive
def range_finder(
    A: DistArray | tuple[Apply, Apply], size: int, *, n_iter: int = 2, seed: int = 0, like: DistArray | None = None
) -> DistArray:  # fmt: skip
    """Return Q [..., m, size] with orthonormal columns that about span what a matrix [..., m, n] mostly maps to.

    Parameters
    ----------
    A : DistArray [..., m, n], or two functions
        Of x [n, s] and of y [m, s] with any number of columns: A x and Aᴴ y.
    size : int
        Some more than the values that are wanted.
    n_iter : int
        Times that A Aᴴ is applied, with orthogonalization between: more for values that fall slowly.
    seed : int
        Of the random matrix, the same on every grid and for every matrix of a stack.
    like : DistArray [n], optional
        Needed with functions: it says n, the dtype and how vectors lie.

    Takes 2 + 2 `n_iter` products of A with `size` columns (Halko, Martinsson and Tropp 2011, algorithm 4.4).
    """
    return _range("range_finder", A, products_with(A, "range_finder", like, "like"), size, n_iter, seed)


def _range(name: str, a: Any, of: Products, size: int, n_iter: int, seed: int) -> DistArray:
    """Return what `range_finder` does for the products of a matrix, and raise the errors of a function of this name."""
    n = of.shape[1]
    size, n_iter = count_of(size, of.shape, name, min(of.shape), "size"), whole(f"{name}: n_iter", n_iter, 0)
    y = default_rng(seed).normal(size=(n, size), grid=of.grid, layout=Layout(of.rows, None))

    def orthonormal(y: DistArray) -> DistArray:
        try:
            return qr(y).Q
        except ValueError:  # NaNs or infinities
            raise met_odd(name, A=a) from None

    q = orthonormal(of.forward(y.astype(of.dtype)))
    for _ in range(n_iter):
        q = orthonormal(of.forward(orthonormal(of.backward(q))))
    return q


@primitive
def svd_lowrank(
    A: DistArray | tuple[Apply, Apply], k: int = 6, *, oversamples: int = 10, n_iter: int = 4, seed: int = 0,
    like: DistArray | None = None,
) -> SVDResult:  # fmt: skip
    """Return about the k largest singular values, falling, of [..., m, n], with U [..., m, k] and Vᴴ [..., k, n].

    By `range_finder` with k + `oversamples` columns, whose other arguments are as there: few products, all with many
    columns.  What is found is as good as the values beyond the k + `oversamples`-th are small; for digits that hold
    take `svds`.
    """
    of = products_with(A, "svd_lowrank", like, "like")
    least = min(of.shape)
    k, oversamples = count_of(k, of.shape, "svd_lowrank", least), whole("svd_lowrank: oversamples", oversamples, 0)
    q = _range("svd_lowrank", A, of, min(least, k + oversamples), n_iter, seed)
    inner = matmul(q.mT.conj(), A) if isinstance(A, DistArray) else of.backward(q).mT.conj()
    u, s, vh = svd(inner, full_matrices=False)
    return SVDResult(matmul(q, u[..., :k]), s[..., :k], vh[..., :k, :])
