"""Eigenvalues, singular values and what follows from them: ranks, condition numbers, pseudoinverses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.array.core import DistArray, truth, whole
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import of_arrays, primitive, takes_over
from parlinalg.array.joining import concatenate, stack
from parlinalg.array.namespace import isfinite, isnan, tril, where
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace
from parlinalg.backend.shapes import has_values
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import bidiagonal, kernels
from parlinalg.linalg.bidiagonal import TALL, Bidiagonal, BidiagonalOfOne, assumed_rank
from parlinalg.linalg.congruence import congruent
from parlinalg.linalg.costs import small_triangle
from parlinalg.linalg.divide import LEAF, SIDES, tridiagonal_vectors
from parlinalg.linalg.eigh import Half, Tridiagonal, blocks, rooms_of_few, tridiagonal_values, vectors, workers
from parlinalg.linalg.factors.cholesky import cho_factor, cholesky
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import QRFactor, by_qr_first, completed
from parlinalg.linalg.factors.tall import nearly_q, tall_r
from parlinalg.linalg.matrices import (
    NONFINITE,
    LinAlgError,
    as_matrix,
    batches,
    check_order,
    distributed,
    limits,
    refuse_nonfinite,
    scaled,
    tiles_for,
)
from parlinalg.linalg.planner import svd_by_one
from parlinalg.linalg.systems import inv, solve_triangular
from parlinalg.linalg.tile_sizes import by_gram
from parlinalg.linalg.tiles import move, transposed
from parlinalg.matmul import matmul


class EighResult(NamedTuple):
    """Eigenvalues, rising, and eigenvectors as columns."""

    eigenvalues: DistArray
    eigenvectors: DistArray


class SVDResult(NamedTuple):
    """U, the singular values, falling, and Vᴴ."""

    U: DistArray
    S: DistArray
    Vh: DistArray


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
    choose = _chooser(x, "eigh", subset_by_index, subset_by_value)
    some = subset_by_index is not None or subset_by_value is not None
    if some and x.ndim == 2 and x.grid.world.size == 1 and kernels.for_scipy(x.block):
        return _some_on_one_rank(x, choose)
    if x.ndim > 2 or _alone(x, subset_by_value):
        every = EighResult(*batches("eigh", lambda xp, a: kernels.eigh(a), eigh, x, lower=True))
        if subset_by_index is None:
            return every
        return EighResult(*(each[..., choose(None)] for each in every))
    reduced, scale = _tridiagonal(x, "eigh")
    tiles, n = reduced.tiles, x.shape[0]
    values, z, at = vectors(reduced, lambda w: choose(_unscaled(w, scale)))
    turned: np.ndarray = z.astype(x.dtype, copy=False)
    if x.grid.inside:
        reduced.times(turned)
    values, layout = _unscaled(values[at], scale), x.layout.with_partial(())
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
        chosen.append(choose(_unscaled(values, scale)))
        return chosen[-1]

    values, found = tridiagonal_vectors(d, e, np.arange(n), x.grid.everyone, noted, leaf=max(LEAF, -(-n // 4)))
    if not kernels.finite(values):
        raise LinAlgError("Eigenvalues did not converge")
    z = found.astype(x.dtype)
    del found
    kernels.turn_back(a, tau, z)
    values = _unscaled(values[chosen[-1]], scale)
    return EighResult(distributed(values, Layout(layout.dims[-1]), x.grid), DistArray(z, z.shape, layout, x.grid))


def _operands(name: str, x: Any, b: Any) -> tuple[DistArray, DistArray | None]:
    """Return A and B of A v = w B v as matrices; without B None."""
    return as_matrix(x, name, square=True), None if b is None else as_matrix(b, name, square=True)


def _unscaled(values: Any, scale: float) -> Any:
    """Return values of a matrix that was multiplied by `scale`, without it; what is out of range is infinite."""
    with np.errstate(over="ignore"):
        return values / scale


@primitive
def eigvalsh(
    x: DistArray, /, b: DistArray | None = None, *, subset_by_index: tuple[int, int] | None = None,
    subset_by_value: tuple[float, float] | None = None,
) -> DistArray:  # fmt: skip
    """Return the eigenvalues [..., n], rising, of Hermitian matrices, of which lower triangles are read; see `eigh`."""
    x, b = _operands("eigvalsh", x, b)
    if b is not None:
        return generalized_values(x, b, subset_by_index=subset_by_index, subset_by_value=subset_by_value)
    choose = _chooser(x, "eigvalsh", subset_by_index, subset_by_value)
    if x.ndim > 2 or _alone(x, subset_by_value):
        every = batches("eigvalsh", lambda xp, a: kernels.eigh(a, vectors=False), eigvalsh, x, lower=True)[0]
        return every if subset_by_index is None else every[..., choose(None)]
    reduced, scale = _tridiagonal(x, "eigvalsh", keep=False)
    found = tridiagonal_values(reduced.d, reduced.e)
    values = _unscaled(found, scale)
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


def _chooser(x: DistArray, name: str, by_index: Any, by_value: Any) -> Callable[[Any], slice]:
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


@primitive
def svd(x: DistArray, /, *, full_matrices: bool = True) -> SVDResult:
    """Return U [..., m, k], the singular values [..., k], falling, and Vᴴ [..., l, n] of matrices [..., m, n].

    Parameters
    ----------
    full_matrices : bool
        k = m and l = n for U and Vᴴ, else both are min(m, n).

    U and Vᴴ lie like `x`, the values like its columns.  No rank holds more than a few times its share of the matrices,
    but of matrices of few columns, at most `tunables.SVD_BY_ONE`, one rank finds all.  Several GPUs find the polar
    decomposition first, and then the eigenvectors of its Hermitian factor (Nakatsukasa and Higham 2013).

    Of a Tensor, derivatives are those of functions that do not depend on which basis the vectors of equal values are,
    as of `eigh`.  Of columns and rows that complete a basis the space counts.
    """
    x = as_matrix(x, "svd")
    if x.ndim == 2 and _alone(x) and (best := _on_one_rank(x, full_matrices)) is not None:
        return best
    if x.ndim > 2 or _alone(x):
        return SVDResult(
            *batches(
                "svd", lambda xp, a: kernels.svd(a, full_matrices),
                lambda a: svd(a, full_matrices=full_matrices), x,
            )
        )  # fmt: skip
    (m, n), layout = x.shape, x.layout.with_partial(())
    if m < n:
        return _turned(svd(x.mT.conj(), full_matrices=full_matrices), layout)
    if not x.grid.backend.cpu:
        found = polar_svd(x, full_matrices)
    else:
        alone, found = svd_by_one((m, n), x.grid.sizes), None
        if not full_matrices and small_triangle((m, n), x.grid.size):
            found = _of_tall(x, alone)
        if found is None and alone:
            found = _by_first_rank(x, full_matrices)
    return _by_bidiagonal(x, full_matrices) if found is None else found


def lean_svd(x: DistArray, full_matrices: bool) -> SVDResult:
    """Decompose a matrix on one rank as `svd` does, in less memory; `by_bidiagonal` is True for it.

    LAPACK's `gesdd` holds three more matrices while it solves the bidiagonal one; here halves of that are solved.
    """
    if x.shape[0] < x.shape[1]:
        return _turned(_by_bidiagonal(x.mT.conj(), full_matrices), x.layout.with_partial(()))
    return _by_bidiagonal(x, full_matrices)


def _by_bidiagonal(x: DistArray, full_matrices: bool) -> SVDResult:
    """Return the singular value decomposition of a matrix [m, n], m ≥ n, by its bidiagonal form."""
    (m, n), layout = x.shape, x.layout.with_partial(())
    reduced, scale, q = _bidiagonal([x], "svd")
    tiles, top = reduced.tiles, reduced.shape[0]
    values, left, right = bidiagonal.vectors(reduced)
    k = m if full_matrices and q is None else n
    parts = tiles.rows(top), tiles.rows(n), tiles.columns(k), tiles.columns(n)
    z: np.ndarray = left.astype(x.dtype, copy=False)
    w: np.ndarray = right.astype(x.dtype, copy=False)
    if x.grid.inside:
        if (top, k) != (n, n):
            rows, columns = parts[0][tiles.i], parts[2][tiles.j]
            z = namespace(left).asarray((rows[:, None] == columns[None, :]).astype(x.dtype))
            z[: left.shape[0], : left.shape[1]] = left
        del left, right
        reduced.left(z)
    u = tiles.home(z, parts[0], parts[2], (top, k), layout)
    del z
    if x.grid.inside:
        reduced.right(w)
    v = tiles.home(w, parts[1], parts[3], (n, n), layout, adjoint=True)
    del w
    if q is not None:
        u = _completed(q, u, m if full_matrices else n, layout)
    return SVDResult(u, distributed(_unscaled(values, scale), Layout(layout.dims[-1]), x.grid), v)


def _turned(found: SVDResult, layout: Layout) -> SVDResult:
    """Return the singular values and vectors of the adjoint matrix, in its layout."""
    first, last = (f.mT.conj().redistribute(layout) for f in (found.Vh, found.U))
    return SVDResult(first, found.S, last)


def _on_one_rank(x: DistArray, full_matrices: bool) -> SVDResult | None:
    """Return what `svd` does, where another way than LAPACK's or cuSOLVER's routine is faster, and finds it; else None.

    Of a matrix of many more rows than columns, or columns than rows, those of R of its QR factorization.
    """
    (m, n), layout = x.shape, x.layout.with_partial(())
    if x.grid.backend.cpu and (full_matrices or not by_qr_first(x)):
        return None
    if m < n:
        found = _on_one_rank(x.mT.conj(), full_matrices)
        return None if found is None else _turned(found, layout)
    alone = x.grid.backend.cpu or n <= tunables.HOST_SVD
    if not full_matrices and (found := _of_tall(x, alone)) is not None:
        return found
    if x.grid.backend.cpu:
        return _by_reflections(x)
    if m == n and n >= tunables.POLAR_SVD[x.real.dtype.itemsize]:
        return polar_svd(x, full_matrices)
    return None


def _of_tall(x: DistArray, alone: bool) -> SVDResult | None:
    """Return what `svd` does, reduced, by R of `tall_qr`, or None; with `alone` by the first rank's vectors of R."""
    if (found := nearly_q(x)) is None:
        return None
    (y, last, r, rest), n, grid, layout = found, x.shape[1], x.grid, x.layout.with_partial(())
    del found
    if alone:
        u, s, vh = _from_first_rank(r, (n, n), grid, layout, "svd")
        if grid.inside:
            kernels.substitute(last, u, lower=True, adjoint=True)
        del r, last
        u = DistArray(y @ u, x.shape, rest, grid)
        del y
        return SVDResult(u.redistribute(layout), s, vh)
    if grid.inside:
        kernels.substitute(last, y, right=True, lower=True, adjoint=True)
    q = DistArray(y, x.shape, rest, grid).redistribute(layout)
    del y, last
    u, s, vh = svd(distributed(r, layout, grid, (n, n)), full_matrices=False)
    return SVDResult(matmul(q, u).redistribute(layout), s, vh)


def _by_reflections(x: DistArray) -> SVDResult | None:
    """Return what `svd` does, reduced, by R of a Householder QR factorization; None where R is out of range."""
    q = QRFactor(x, name="svd")
    r = q.R
    q.drop_r()
    if not truth(isfinite(r).all(), "finite", "whether the elements are finite"):
        return None
    u, s, vh = svd(r, full_matrices=False)
    return SVDResult(q.times_q(u, last=True), s, vh)


def _by_first_rank(x: DistArray, full_matrices: bool) -> SVDResult:
    """Return what `svd` does of a matrix [m, n] with m ≥ n, which the first rank decomposes, or its R if it is tall."""
    (m, n), grid, layout = x.shape, x.grid, x.layout.with_partial(())
    r, q = _everywhere(x, "svd")
    top, k = (n, n) if q is not None else (m, m if full_matrices else n)
    u, s, vh = _from_first_rank(r, (top, n), grid, layout, "svd", full_matrices)
    u = distributed(u, layout, grid, (top, k))
    return SVDResult(u if q is None else _completed(q, u, m if full_matrices else n, layout), s, vh)


def _everywhere(x: DistArray, name: str, keep: bool = True) -> tuple[Any, QRFactor | None]:
    """Return on all ranks a matrix, or R of its QR factorization if it is tall, and this factorization."""
    if x.shape[0] <= TALL * x.shape[1]:
        return x.redistribute(Layout(None, None)).block, None
    q = QRFactor(x, name=name, keep=keep)
    r = q.whole_r()
    q.drop_r()
    return r, q


def _from_first_rank(
    a: Any, shape: tuple[int, int], grid: Grid, layout: Layout, name: str, full_matrices: bool = False,
    vectors: bool = True,
) -> Any:  # fmt: skip
    """Return U, the singular values and Vᴴ, or without `vectors` the values, of a matrix that all ranks have.

    U is whole on all ranks; the others are distributed, in the layout of the matrix.  The first rank finds them for
    all, which so have the same bits; the others wait without a core.  Collective.
    """
    (m, n), backend, problem = shape, grid.backend, ""
    sizes = ((m, m if full_matrices else n), (n,), (n, n)) if vectors else ((n,),)
    found = [
        backend.empty(size if grid.inside else (0,) * len(size), a.dtype if len(size) > 1 else a.real.dtype)
        for size in sizes
    ]
    if grid.inside and not kernels.finite(a):
        problem = NONFINITE
    elif grid.inside and grid.everyone.rank == 0:
        try:
            with np.errstate(all="ignore"), kernels.raising(a):
                if not vectors:
                    made: Any = (kernels.small_svd(a, compute_uv=False),)
                else:
                    made = kernels.svd(a, full_matrices) if backend.cpu else kernels.small_svd(a)
                for each, part in zip(found, made, strict=True):
                    each[:] = part
        except LinAlgError as error:
            problem = f"{name}: {error}"
    if grid.inside:
        grid.everyone.barrier()
    reported = grid.world.share(problem, others="alike")
    refuse_nonfinite(NONFINITE in reported, name)
    if wrong := next(filter(None, reported), ""):
        raise LinAlgError(wrong)
    for each in found if grid.inside else ():
        grid.everyone.broadcast(each, 0)
    values = distributed(found[1 if vectors else 0], Layout(layout.dims[-1]), grid, (n,))
    return (found[0], values, distributed(found[2], layout, grid, (n, n))) if vectors else values


def polar_svd(x: DistArray, full_matrices: bool) -> SVDResult | None:
    """Return what `svd` does of one matrix [m, n] with m ≥ n; None where the polar factor is not found.

    A = U P, and P = V S Vᴴ, so that A = (U V) S Vᴴ: of QR and Cholesky factorizations and products, and one `eigh`
    (Nakatsukasa and Higham, "Stable and efficient spectral divide and conquer algorithms", 2013).  A matrix with more
    rows than columns is factored by QR first.
    """
    from parlinalg.linalg.matrix_functions import halley, skewed

    (m, n), layout = x.shape, x.layout.with_partial(())
    if not n:
        return None
    largest, unit = abs(x).max(), x.real.dtype.type(1)
    if x.grid.backend.values:
        unit = kernels.unit(float(largest), x.dtype)  # so that sums stay in range
    x = x * unit if unit != 1 else x
    q = QRFactor(x, name="svd") if m > n else None
    r = x.summed() if q is None else q.R
    refuse_nonfinite(not truth(isfinite(r).all(), "finite", "whether the elements are finite"), "svd")
    u = halley(r)
    if u is None:
        return None
    p = matmul(u.mT.conj(), r)
    turned = p.mT.conj().redistribute(p.layout)
    if skewed(p, turned):
        return None
    w, v = eigh((p + turned) / 2)
    s, v = where(w > 0, w, w.dtype.type(0))[::-1], v[:, ::-1].redistribute(layout)
    u = matmul(u, v)
    u = u.redistribute(layout) if q is None else _completed(q, u, m if full_matrices else n, layout)
    s = s / unit if unit != 1 else s
    return SVDResult(u, s.redistribute(Layout(layout.dims[-1])), v.mT.conj().redistribute(layout))


@primitive
def svdvals(x: DistArray, /) -> DistArray:
    """Return the singular values [..., min(m, n)], falling, of matrices [..., m, n]."""
    x = as_matrix(x, "svdvals")
    if x.ndim > 2 or _alone(x):
        if x.ndim == 2 and by_qr_first(x):
            r = tall_r(x if x.shape[0] > x.shape[1] else x.mT)
            if r is not None:
                return batches("svdvals", lambda xp, a: kernels.small_svd(a, compute_uv=False), svdvals, r)[0]
        return batches("svdvals", lambda xp, a: kernels.routines(a).svd(a, compute_uv=False), svdvals, x)[0]
    return values_of([x if x.shape[0] >= x.shape[1] else x.mT], "svdvals")


def values_of(held: list[DistArray], name: str) -> DistArray:
    """Return the singular values of a matrix [m, n] with m ≥ n, which is taken out of a list and held no longer."""
    (m, n), layout, grid = held[0].shape, held[0].layout.with_partial(()), held[0].grid
    tall = nearly_q(held[0]) if small_triangle((m, n), grid.size) else None
    r = None if tall is None else tall[2]
    del tall
    if svd_by_one((m, n), grid.sizes, vectors=False):
        x = held.pop()
        r = _everywhere(x, name, keep=False)[0] if r is None else r
        del x
        found: DistArray = _from_first_rank(r, (n, n), grid, layout, name, vectors=False)
        return found
    if r is not None:
        held.pop()
        held.append(distributed(r, layout, grid, (n, n)))
        del r
    reduced, scale, _ = _bidiagonal(held, name, keep=False)
    return distributed(_unscaled(bidiagonal.values(reduced), scale), Layout(layout.dims[-1]), grid)


def values_of_triangle(factor: QRFactor, name: str, keep: bool) -> DistArray:
    """Return the singular values of R of a QR factorization [m, n] with m ≥ n, whose tiles without `keep` are lost."""
    tiles, n, layout = factor.tiles, factor.shape[1], factor.layout
    if svd_by_one((n, n), tiles.grid.sizes, vectors=False):
        found: DistArray = _from_first_rank(factor.whole_r(), (n, n), tiles.grid, layout, name, vectors=False)
        return found
    if keep:
        return values_of([factor.R], name)
    t = tiles.grid.backend.to_host(factor.given_up_r())
    scale = scaled(tiles, [t], t.dtype, name)
    held = [t]
    del t
    reduced = Bidiagonal(tiles, tiles, held, (n, n), keep=False)
    return distributed(_unscaled(bidiagonal.values(reduced), scale), Layout(layout.dims[-1]), tiles.grid)


def solved_by_bidiagonal(n: int, grid: Grid) -> bool:
    """Return True if all ranks make a matrix [n, n] bidiagonal for its `svd`, on hosts."""
    return grid.size > 1 and grid.backend.cpu and not svd_by_one((n, n), grid.sizes)


def solution_of_triangle(
    factor: QRFactor, b: DistArray, counting: Callable[[DistArray], DistArray], name: str, adjoint: bool
) -> tuple[DistArray, DistArray]:
    """Return x = R⁺ b, or with `adjoint` (Rᴴ)⁺ b, for R of a QR factorization, and the singular values of R.

    R = Q B Pᴴ is made bidiagonal by all ranks, which carry b along: of its reflections only those of the other side are
    kept, and of singular vectors none but those of B exist, some at a time.  The tiles of R are lost.

    Parameters
    ----------
    b : DistArray [n, k]
    counting : callable
        Returns from the singular values, falling, those that count, and zeros in the places of the others.
    """
    tiles, n, grid, layout = factor.tiles, factor.shape[1], factor.tiles.grid, factor.layout.with_partial(())
    deal, k, dtype = workers(tiles), b.shape[1], b.dtype
    at_work, t = deal.R * deal.C, tiles.grid.backend.to_host(factor.given_up_r())
    if at_work < grid.size:
        want = deal.spread(deal.rows(n), deal.columns(n), grid.size)
        (room,) = rooms_of_few(grid, deal, [want], dtype)
        t = move(t, tiles.places(factor.tops, factor.columns), want, grid, out=room)
    scale = scaled(tiles, [t], dtype, name)
    held = [t]
    del t
    whole, none = np.arange(n), np.arange(0)
    have = [(whole, np.arange(p, k, at_work)) if p < at_work else (none, none) for p in range(grid.size)]
    sides = tiles.bring_to(b, have, host=True)
    before, after = ("right", "left") if adjoint else ("left", "right")
    reduced = Bidiagonal(tiles, deal, held, (n, n), sides=[after], carried=(before, sides))

    def counted_values(values: np.ndarray) -> Any:
        return counting(distributed(values, Layout(None), grid)).redistribute(Layout(None)).block

    values, z = bidiagonal.solution(reduced, sides, have, counted_values, adjoint)
    del sides
    if grid.inside:
        (reduced.left if adjoint else reduced.right)(z)
        if scale != 1:
            with np.errstate(over="ignore"):
                z *= scale
    x = tiles.home(z, tiles.rows(n), tiles.columns(k), (n, k), b.layout.with_partial(()))
    return x, distributed(_unscaled(values, scale), Layout(layout.dims[-1]), grid)


def limit_of(s: DistArray, rtol: Any, least: float) -> DistArray:
    """Return for every matrix the singular value from which on it counts; `rtol` is one of `limits`."""
    rtol = least * float(np.finfo(s.dtype).eps) if rtol is None else rtol
    largest = s.max(axis=-1, keepdims=True) if s.shape[-1] else zeros((*s.shape[:-1], 1), dtype=s.dtype, grid=s.grid)
    if isinstance(rtol, DistArray) and rtol.ndim:
        rtol = reshape(rtol, (*rtol.shape, 1))
    return largest * rtol


def counted(count: DistArray, k: int) -> int:
    """Return the number of the k singular values that count; of imagined matrices all, or all but one."""
    found = count.gather()
    return int(found) if count.grid.backend.values else assumed_rank(count.grid, k)


def reciprocals(s: DistArray, kept: DistArray) -> DistArray:
    """Return the inverses of the values that are kept, and zeros."""
    return where(kept, 1 / where(kept, s, s.dtype.type(1)), s.dtype.type(0))


@primitive
def matrix_rank(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the ranks of matrices [..., m, n]: their singular values above `rtol` times the largest.

    `rtol` is max(m, n) times the dtype's eps by default; a number, or one for every matrix.
    """
    x, rtol = as_matrix(x, "matrix_rank"), limits("matrix_rank: rtol", rtol, x.shape[:-2])
    s = svdvals(x)
    return (s > limit_of(s, rtol, max(x.shape[-2:]))).sum(axis=-1, dtype=np.int64)


@primitive
def pinv(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the pseudoinverses [..., n, m] of matrices [..., m, n]; smaller singular values count as 0.

    Those are the ones below `rtol` times the largest, by default max(m, n) times the dtype's eps.
    """
    x, rtol = as_matrix(x, "pinv"), limits("pinv: rtol", rtol, x.shape[:-2])
    if by_bidiagonal(x) and not (isinstance(rtol, DistArray) and rtol.ndim):
        return _pseudoinverse(x, rtol)
    u, s, vh = svd(x, full_matrices=False)
    kept = s > limit_of(s, rtol, max(x.shape[-2:]))
    v = vh.mT.conj()
    del vh
    v = v * reciprocals(s, kept)[..., None, :]
    uh = u.mT.conj()
    del u
    return matmul(v, uh, layout=x.mT.layout.with_partial(()))


def by_bidiagonal(x: DistArray) -> bool:
    """Return True for one matrix on hosts that is reduced to bidiagonal form, by all ranks or LAPACK, for its `svd`.

    Its R is, if all ranks reduce it and it is tall or wide.
    """
    shape = max(x.shape[-2:]), min(x.shape[-2:])
    if x.ndim > 2 or not x.grid.backend.cpu:
        return False
    if x.grid.size == 1:
        return x.size * x.dtype.itemsize >= kernels.LARGE and not by_qr_first(x)
    if svd_by_one(shape, x.grid.sizes):
        return False
    return not (small_triangle(shape, x.grid.size) and by_gram(shape, x.grid.size))


def _pseudoinverse(x: DistArray, rtol: Any) -> DistArray:
    """Return the pseudoinverse of a matrix without its singular vectors.

    With A = Q B Pᴴ it is P B⁺ Qᴴ: one matrix, that of the bidiagonal one, goes back through the reflections of both
    sides, and of singular vectors none but those of B exist, some at a time.
    """
    wide, least = x.shape[0] < x.shape[1], max(x.shape)
    held = [x.mT.conj() if wide else x]
    layout, dtype, grid = held[0].layout.with_partial(()), x.dtype, x.grid
    reduced, scale, q = _bidiagonal(held, "svd")

    def inverses(values: np.ndarray) -> Any:
        s = distributed(values, Layout(None), grid)
        kept = s > limit_of(s, rtol, least)
        return reciprocals(s, kept).redistribute(Layout(None)).block

    (top, n), tiles = reduced.shape, reduced.tiles
    rows, columns, tops = tiles.rows(top), tiles.columns(n), tiles.rows(n)
    z: np.ndarray = bidiagonal.pseudoinverse(reduced, inverses).astype(dtype, copy=False)
    if grid.inside:
        reduced.right(z)
    # (P B⁺)ᴴ, with zeros below it
    z = move(kernels.adjoint(z), transposed(tiles.places(tops, columns)), tiles.places(tops, columns), grid)
    if grid.inside:
        if top > n:
            above, z = z, reduced.xp.zeros((len(rows[tiles.i]), z.shape[1]), dtype)
            z[: len(above)] = above
            del above
        reduced.left(z)
        if scale != 1:
            with np.errstate(over="ignore"):
                z *= scale
    del reduced
    if q is None:
        back = layout if wide else Layout(*layout.dims[::-1])
        return tiles.home(z, rows, columns, x.shape[::-1], back, adjoint=not wide)  # type: ignore[arg-type]
    found = tiles.home(z, rows, columns, (top, n), layout)
    del z
    found = q.times_q(found, last=True)
    return found if wide else found.mT.conj()


def triangle_of(x: DistArray, name: str) -> DistArray:
    """Return R of a tall matrix [m, n], which has the same V, where `svd` factors it by QR first; else the matrix."""
    (m, n), alone = x.shape, x.grid.size == 1
    if not n or m <= TALL * n or (alone and not by_qr_first(x)):
        return x
    r = tall_r(x) if alone or small_triangle((m, n), x.grid.size) else None
    r = QRFactor(x, name=name, keep=False).R if r is None else r
    return r if truth(isfinite(r).all(), "finite", "whether the elements are finite") else x


def basis(x: DistArray, side: str, rank: Callable[[DistArray], int], rest: bool, name: str) -> DistArray:
    """Return singular vectors of one side of a matrix for which `by_bidiagonal` is True, as columns, in its layout.

    Only the reflections of that side are kept, and only these vectors formed.

    Parameters
    ----------
    side : {"left", "right"}
    rank : callable
        Returns how many singular values count.  The first vectors, as many as these, are returned.
    rest : bool
        The vectors behind them are returned instead, with those that complete a basis of the space.
    """
    layout, dtype, grid, given = x.layout.with_partial(()), x.dtype, x.grid, side
    if x.shape[0] < x.shape[1]:
        x, (side,) = x.mT.conj(), (each for each in SIDES if each != given)
    held = [x]
    del x
    reduced, _, q = _bidiagonal(held, name, sides=[side])

    def chosen(values: np.ndarray) -> slice:
        k = rank(distributed(values, Layout(None), grid))
        return slice(k, None) if rest else slice(k)

    (top, n), tiles, left = reduced.shape, reduced.tiles, side == "left"
    found, k = bidiagonal.some_vectors(reduced, side, chosen)
    z: np.ndarray = found.astype(dtype, copy=False)
    del found
    high, wide = (top, k + rest * (top - n)) if left else (n, k)
    rows, columns = tiles.rows(high), tiles.columns(wide)
    if grid.inside and left:
        z = completed(z, rows[tiles.i], columns[tiles.j], (n, k), grid)
        reduced.left(z)
    elif grid.inside:
        reduced.right(z)
    del reduced
    turned = tiles.home(z, rows, columns, (high, wide), layout)
    del z
    return turned if q is None else q.times_q(turned, last=True, complete=rest)


@of_arrays
def cond(x: DistArray, p: Any = None) -> DistArray:
    """Return the condition numbers of matrices, in a norm of `matrix_norm`; None is 2.  Of singular ones it is inf."""
    from parlinalg.linalg import matrix_norm

    if x.ndim < 2:
        raise LinAlgError(f"cond takes matrices, arrays of at least two dims, not of shape {x.shape}")
    if not math.prod(x.shape[-2:]):
        raise LinAlgError(f"cond is not defined on empty matrices, of shape {x.shape}")
    if p is not None:
        check_order("cond: p", p)
    x = _near_one(x)
    if p in (None, 2, -2):
        s = svdvals(x)
        high, low = s.max(axis=-1), s.min(axis=-1)
        with np.errstate(all="ignore"):
            found: DistArray = high / low if p != -2 else low / high
    else:
        if x.shape[-1] != x.shape[-2]:
            raise LinAlgError(f"cond of order {p!r} takes square matrices, not of shape {x.shape}; order 2 takes any")
        if x.ndim == 2 and not takes_over(x):
            found = _by_factors(x, p)
            return where(isnan(found), found.dtype.type(math.inf), found)
        try:
            inverse = inv(x)
        except LinAlgError:
            if x.ndim > 2:  # some are singular
                each = [cond(x[at], p) for at in np.ndindex(*x.shape[:-2])]
                return reshape(stack(each), x.shape[:-2]).redistribute(Layout(*x.layout.dims[:-2]))
            inverse = None
        with np.errstate(all="ignore"):
            if inverse is None:
                found = matrix_norm(x, ord=p) * math.inf
            elif p == "nuc":
                found = _by_values(x)
            else:
                found = matrix_norm(x, ord=p) * matrix_norm(inverse, ord=p)
    return where(isnan(found), found.dtype.type(math.inf), found)  # as of zeros


# ------------------------------------------------------------------------------------------------ helpers
def _by_factors(x: DistArray, p: Any) -> DistArray:
    """Return the condition number of one matrix in a norm of `cond` that takes the inverse, which is never whole."""
    from parlinalg.linalg import matrix_norm, vector_norm

    with np.errstate(all="ignore"):
        size = matrix_norm(x, ord=p)
        factor = LUFactor(x, name="inv")
        if factor.zero is not None:
            return size * math.inf
        if p == "nuc":
            del factor
            return _by_values(x)
        parts = factor.sizes_of_inverse(p)
        return size * (vector_norm(parts) if p == "fro" else parts.max() if p > 0 else parts.min())


def _by_values(x: DistArray) -> DistArray:
    """Return the condition numbers in the nuclear norm.

    The inverses of singular values, beside the largest, are in range where those of x are not.
    """
    s = svdvals(x)
    largest = s.max(axis=-1, keepdims=True)
    found: DistArray = (s / largest).sum(axis=-1) * (largest / s).sum(axis=-1)
    return found


def _near_one(x: DistArray) -> DistArray:
    """Return matrices, times powers of two if squares of their largest elements would leave the range."""
    values = getattr(x, "data", x)  # those of a tensor
    if x.dtype.kind not in "fc":
        return x
    sizes = abs(values).max(axis=(-2, -1), keepdims=True)
    if not values.grid.backend.values:  # imagined elements are of size one
        return x
    units = kernels.units(kernels.to_host(sizes.block), squares=True)
    if x.ndim == 2 and (units == 1).all():
        return x
    return x * sizes.like(values.grid.backend.from_host(units))


def _alone(x: DistArray, subset: Any = None) -> bool:
    """Return True if LAPACK, or the GPU's library, has all it needs on one rank."""
    return x.grid.size == 1 and subset is None


def _tridiagonal(x: DistArray, name: str, keep: bool = True) -> tuple[Tridiagonal, Any]:
    """Return the reduction of a matrix, with its reflections if they are to `keep`, and by what it was multiplied."""
    tiles, n = tiles_for(x, None, "eigh"), x.shape[0]
    deal, grid = workers(tiles), x.grid
    found = blocks(tiles, deal, x)
    scale = scaled(tiles, [each.a for each in found], x.dtype, name)
    xp, here = kernels.on_host(grid.backend), grid.inside and grid.rank < len(deal.coords)
    half = Half(deal, n, x.dtype, found, xp) if here else None
    del found
    return Tridiagonal(tiles, deal, half, n, x.dtype, keep), scale


def _bidiagonal(
    given: list[DistArray], name: str, keep: bool = True, sides: Sequence[str] = SIDES
) -> tuple[Bidiagonal | BidiagonalOfOne, Any, QRFactor | None]:  # fmt: skip
    """Return the reduction of a matrix [m, n] with m ≥ n, its factor, and the QR factorization before it, if any.

    The matrix is taken out of the list.  Without `keep`, for values alone, no reflections are kept, else those of some
    `sides`; without the left one the QR factorization is lost.
    """
    x = given.pop()
    m, n = x.shape
    q = None
    if m > TALL * n and n:
        q = QRFactor(x, name=name, keep=keep and "left" in sides)
        x = q.R
        q.drop_r()
        q = q if keep and "left" in sides else None
    tiles = tiles_for(x, None, "svd")
    deal = workers(tiles) if keep else tiles  # fewer ranks would have more of it than its blocks and vectors take
    want, shape = deal.spread(deal.rows(x.shape[0]), deal.columns(n), x.grid.size), x.shape
    if alone := x.grid.size == 1 and isinstance(x.block, np.ndarray):
        t = kernels.in_columns(x.summed().block).T
    else:
        t = tiles.bring_to(x, want, host=True, out=rooms_of_few(x.grid, deal, [want], x.dtype)[0])
    del x
    scale = scaled(tiles, [t], t.dtype, name)
    held = [t]
    del t
    if alone:
        return BidiagonalOfOne(tiles, held, shape), scale, q  # type: ignore[arg-type]
    return Bidiagonal(tiles, deal, held, shape, keep, sides), scale, q  # type: ignore[arg-type]


def _completed(q: Any, u: DistArray, columns: int, layout: Layout) -> DistArray:
    """Return Q U, with the columns of Q that U does not turn behind it; the factorization has neither Q nor R then."""
    n = u.shape[0]
    whole = q.only_q(columns)
    turned = matmul(whole[:, :n], u).redistribute(layout)
    if columns == n:
        return turned
    return concatenate([turned, whole[:, n:]], axis=1).redistribute(layout)
