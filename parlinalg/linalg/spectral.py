"""Eigenvalues and eigenvectors of Hermitian matrices, also of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.dispatch import primitive
from parlinalg.array.namespace import isfinite, tril
from parlinalg.backend.shapes import has_values
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.congruence import congruent
from parlinalg.linalg.factors.cholesky import cho_factor, cholesky
from parlinalg.linalg.matrices import (
    NONFINITE,
    LinAlgError,
    as_matrix,
    batches,
    distributed,
    scaled,
    tiles_for,
    unscaled,
)
from parlinalg.linalg.reductions.divide import LEAF, tridiagonal_vectors
from parlinalg.linalg.reductions.halves import Half, blocks
from parlinalg.linalg.reductions.reduction import workers
from parlinalg.linalg.reductions.tridiagonal import Tridiagonal, tridiagonal_values, vectors
from parlinalg.linalg.systems import solve_triangular


class EighResult(NamedTuple):
    """Eigenvalues, rising, and eigenvectors as columns."""

    eigenvalues: DistArray
    eigenvectors: DistArray


@primitive
def eigh(
    x: DistArray, /, b: DistArray | None = None, *, subset_by_index: tuple[int, int] | None = None,
    subset_by_value: tuple[float, float] | None = None,
) -> EighResult:  # fmt: skip
    """Return the eigenvalues [..., n], rising, and eigenvectors [..., n, n] of Hermitian matrices.

    Only lower triangles are read.  The vectors lie like `x`, the values like its columns.  No rank holds more than a
    few times its share of the matrix; where ranks of one node outnumber its cores, as many as cores share it.

    Parameters
    ----------
    b : DistArray [..., n, n], optional
        Hermitian and positive definite: then the eigenvalues are those of A v = w B v, as `scipy.linalg.eigh` finds
        them, and Vᴴ B V = I.  By Cholesky's factor of B and triangular solves, which lose as many digits as the
        condition number of B has.
    subset_by_index : (int, int), optional
        The first and the last number of the eigenvalues that are wanted, as `scipy.linalg.eigh` counts: (n - 3, n - 1)
        are the three largest.
    subset_by_value : (float, float), optional
        (low, high): the eigenvalues w with low < w ≤ high, of one matrix.

    Of a Tensor, derivatives are those of functions that do not depend on which basis the vectors of equal values are:
    terms 1 / (wⱼ - wᵢ) of values that differ by at most 10 n ε of the largest count as 0.

    Raises
    ------
    LinAlgError
        If a leading minor of B is not positive, which it names, or eigenvalues of A v = w B v overflow.
    """
    x, b = _operands("eigh", x, b)
    if b is not None:
        return generalized(x, b, subset_by_index=subset_by_index, subset_by_value=subset_by_value)
    choose = chooser(x, "eigh", subset_by_index, subset_by_value)
    some = subset_by_index is not None or subset_by_value is not None
    if some and x.ndim == 2 and x.grid.world.size == 1 and kernels.for_scipy(x.block):
        return _some_on_one_rank(x, choose)
    if x.ndim > 2 or _alone(x, subset_by_value):
        every = EighResult(*batches("eigh", lambda xp, a: kernels.eigh(a), eigh, x, lower=True))
        if subset_by_index is None:
            return every
        return EighResult(*(each[..., choose(None)] for each in every))
    reduced, scale = tridiagonal_form(x, "eigh")
    tiles, n = reduced.tiles, x.shape[0]
    values, z, at = vectors(reduced, lambda w: choose(unscaled(w, scale)))
    turned: np.ndarray = z.astype(x.dtype, copy=False)
    if x.grid.inside:
        reduced.times(turned)
    values, layout = unscaled(values[at], scale), x.layout.with_partial(())
    found = tiles.home(turned, tiles.rows(n), tiles.columns(len(values)), (n, len(values)), layout)
    return EighResult(distributed(values, Layout(layout.dims[-1]), x.grid), found)


def _some_on_one_rank(x: DistArray, choose: Callable[[Any], slice]) -> EighResult:
    """Return some eigenvalues and vectors of a large matrix on one rank: LAPACK reduces it and solves quarters.

    The vectors of the tridiagonal matrix that are not chosen are never formed, those of its halves are.
    """
    tiles, n, layout = tiles_for(x, None, "eigh"), x.shape[0], x.layout.with_partial(())
    a = np.tril(x.block)
    scale = scaled(tiles, [a], x.dtype, "eigh")
    d, e, tau = kernels.tridiagonal(a)
    chosen: list[slice] = []

    def noted(values: Any) -> slice:
        chosen.append(choose(unscaled(values, scale)))
        return chosen[-1]

    values, found = tridiagonal_vectors(d, e, np.arange(n), x.grid.everyone, noted, leaf=max(LEAF, -(-n // 4)))
    if not kernels.finite(values):
        raise LinAlgError("Eigenvalues did not converge")
    z = found.astype(x.dtype)
    del found
    kernels.turn_back(a, tau, z)
    values = unscaled(values[chosen[-1]], scale)
    return EighResult(distributed(values, Layout(layout.dims[-1]), x.grid), DistArray(z, z.shape, layout, x.grid))


def _operands(name: str, x: Any, b: Any) -> tuple[DistArray, DistArray | None]:
    """Return A and B of A v = w B v as matrices; without B None."""
    return as_matrix(x, name, square=True), None if b is None else as_matrix(b, name, square=True)


@primitive
def eigvalsh(
    x: DistArray, /, b: DistArray | None = None, *, subset_by_index: tuple[int, int] | None = None,
    subset_by_value: tuple[float, float] | None = None,
) -> DistArray:  # fmt: skip
    """Return the eigenvalues [..., n], rising, of Hermitian matrices, of which lower triangles are read; see `eigh`."""
    x, b = _operands("eigvalsh", x, b)
    if b is not None:
        return generalized_values(x, b, subset_by_index=subset_by_index, subset_by_value=subset_by_value)
    choose = chooser(x, "eigvalsh", subset_by_index, subset_by_value)
    if x.ndim > 2 or _alone(x, subset_by_value):
        every = batches("eigvalsh", lambda xp, a: kernels.eigh(a, vectors=False), eigvalsh, x, lower=True)[0]
        return every if subset_by_index is None else every[..., choose(None)]
    reduced, scale = tridiagonal_form(x, "eigvalsh", keep=False)
    found = tridiagonal_values(reduced.d, reduced.e)
    values = unscaled(found, scale)
    at = choose(values) if x.grid.inside or not has_values(values) else slice(0, 0)
    failed, *ends = reduced.tiles.worst([not kernels.finite(found), at.start, at.stop])
    if failed:
        raise LinAlgError("Eigenvalues did not converge")
    at = slice(*map(int, ends))
    return distributed(values[at], Layout(x.layout.dims[-1]), x.grid)


def generalized(a: DistArray, b: DistArray, **subset: Any) -> EighResult:
    """Return the eigenvalues and vectors of A v = w B v; the arguments are those of `eigh`."""
    with _overflow_named(a, b, "eigh"):
        c, l = standard(a, b, "eigh")
        w, y = eigh(c, **subset)
    return EighResult(w, solve_triangular(l, y, lower=True, adjoint=True))


def generalized_values(a: DistArray, b: DistArray, **subset: Any) -> DistArray:
    """Return the eigenvalues of A v = w B v; the arguments are those of `eigvalsh`."""
    with _overflow_named(a, b, "eigvalsh"):
        return eigvalsh(standard(a, b, "eigvalsh", last=True)[0], **subset)


@contextmanager
def _overflow_named(a: DistArray, b: DistArray, name: str) -> Iterator[None]:
    """Raise an error that names the cause where L⁻¹ A L⁻ᴴ of finite A and B = L Lᴴ has infinities."""
    try:
        yield
    except ValueError as error:
        if not str(error).endswith(NONFINITE):
            raise
        for which, each in (("a", a), ("b", b)):
            if not bool(isfinite(tril(getattr(each, "data", each))).all()):
                raise ValueError(f"{name} takes finite numbers; {which} has {NONFINITE}") from None
        raise LinAlgError(
            f"{name}: eigenvalues w of a v = w b v are beyond the largest number of {a.dtype}, as is L⁻¹ a L⁻ᴴ with "
            "b = L Lᴴ; multiply a by a small number, or b by a large one"
        ) from None


def standard(a: DistArray, b: DistArray, name: str, last: bool = False) -> tuple[DistArray, DistArray]:
    """Return L⁻¹ A L⁻ᴴ, in the layout of A, and L, for B = L Lᴴ; of both only the lower triangles are read.

    If this is the `last` use of L, one matrix L may have no elements any more.
    """
    if a.shape[-2:] != b.shape[-2:]:
        raise LinAlgError(f"{name} takes matrices a and b of one size, not of shapes {a.shape} and {b.shape}")
    if b.dtype.char in "fF" and a.dtype.char not in "fF":  # of the precision of the result
        b = b.astype(np.float64 if b.dtype.char == "f" else np.complex128)
    try:
        l = cholesky(b) if b.ndim == 2 else cho_factor(b).L  # which names the minor of a stack's matrix
    except LinAlgError as error:
        raise LinAlgError(f"{name} takes a positive definite b: {error}") from None
    if a.ndim == l.ndim == 2 and isinstance(a, DistArray) and isinstance(l, DistArray):
        dtype = np.result_type(a.dtype, l.dtype)
        l = l if l.dtype == dtype else l.astype(dtype)
        return congruent(a.astype(dtype), l, adjoint=False, mirror=True, last=last), l
    half = solve_triangular(l, mirrored(a), lower=True)
    return solve_triangular(l, half.mT.conj(), lower=True).mT.conj(), l


@primitive
def mirrored(x: DistArray, name: str = "eigh") -> DistArray:
    """Return the Hermitian matrices with these lower triangles, in their layout; of diagonals the real parts count."""
    x = as_matrix(x, name, square=True)
    lower = tril(x, k=-1)
    diagonal = tril(x) - lower
    if x.dtype.kind == "c":
        diagonal = diagonal.real.astype(x.dtype)
    return lower + diagonal + lower.mT.conj().redistribute(lower.layout)


def chooser(x: DistArray, name: str, by_index: Any, by_value: Any) -> Callable[[Any], slice]:
    """Return the function from all eigenvalues to where those of a subset are."""
    n = x.shape[-1]
    if by_index is not None and by_value is not None:
        raise ValueError(f"{name} takes subset_by_index or subset_by_value, not both")
    if by_index is not None:
        try:
            low, high = (whole("an index", i, 0, n - 1) for i in by_index)
        except (TypeError, ValueError):
            low, high = n, 0
        if low > high:
            raise ValueError(
                f"{name}: subset_by_index is (first, last), whole numbers with 0 <= first <= last < {n}, not {by_index}"
            )
        return lambda values: slice(low, high + 1)
    if by_value is None:
        return lambda values: slice(0, n)
    try:
        least, most = (float(v) for v in by_value)
    except (TypeError, ValueError):
        least = most = math.nan
    if not least < most:
        raise ValueError(f"{name}: subset_by_value is (low, high) with low < high, not {by_value}")
    if x.ndim > 2:
        given = f"a stack of shape {x.shape}"
        raise ValueError(f"{name}: subset_by_value is of one matrix, not of {given}; take subset_by_index")

    def within(values: np.ndarray) -> slice:
        if not has_values(values):
            part = x.grid.backend.assume("selected", "how many eigenvalues lie within subset_by_value")
            return slice(0, round(part * n))
        return slice(*np.searchsorted(values, [least, most], side="right").tolist())

    return within


def _alone(x: DistArray, subset: Any = None) -> bool:
    """Return True if LAPACK, or the GPU's library, has all it needs on one rank."""
    return x.grid.size == 1 and subset is None


def tridiagonal_form(x: DistArray, name: str, keep: bool = True) -> tuple[Tridiagonal, Any]:
    """Return the reduction of a matrix, with its reflections if they are to `keep`, and by what it was multiplied."""
    tiles, n = tiles_for(x, None, "eigh"), x.shape[0]
    deal, grid = workers(tiles), x.grid
    found = blocks(tiles, deal, x)
    scale = scaled(tiles, [each.a for each in found], x.dtype, name)
    xp, here = kernels.on_host(grid.backend), grid.inside and grid.rank < len(deal.coords)
    half = Half(deal, n, x.dtype, found, xp) if here else None
    del found
    return Tridiagonal(tiles, deal, half, n, x.dtype, keep), scale
