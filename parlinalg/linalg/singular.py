"""Singular values and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.array.core import DistArray, truth
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import concatenate
from parlinalg.array.namespace import isfinite, where
from parlinalg.backend import namespace
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.costs.orthogonal import small_triangle
from parlinalg.linalg.factors.qr import QRFactor, by_qr_first
from parlinalg.linalg.factors.tall import nearly_q, tall_r
from parlinalg.linalg.matrices import (
    NONFINITE,
    LinAlgError,
    as_matrix,
    batches,
    distributed,
    refuse_nonfinite,
    scaled,
    tiles_for,
    unscaled,
)
from parlinalg.linalg.planner import svd_by_one
from parlinalg.linalg.reductions import bidiagonal
from parlinalg.linalg.reductions.bidiagonal import TALL, Bidiagonal, BidiagonalOfOne
from parlinalg.linalg.reductions.divide import SIDES
from parlinalg.linalg.reductions.reduction import rooms_of_few, workers
from parlinalg.linalg.spectral import eigh
from parlinalg.linalg.tile_sizes import by_gram
from parlinalg.matmul import matmul


class SVDResult(NamedTuple):
    """U, the singular values, falling, and Vᴴ."""

    U: DistArray
    S: DistArray
    Vh: DistArray


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
    if x.ndim == 2 and x.grid.size == 1 and (best := _on_one_rank(x, full_matrices)) is not None:
        return best
    if x.ndim > 2 or x.grid.size == 1:
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
    reduced, scale, q = bidiagonal_form([x], "svd")
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
    return SVDResult(u, distributed(unscaled(values, scale), Layout(layout.dims[-1]), x.grid), v)


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
    if x.ndim > 2 or x.grid.size == 1:
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
    reduced, scale, _ = bidiagonal_form(held, name, keep=False)
    return distributed(unscaled(bidiagonal.values(reduced), scale), Layout(layout.dims[-1]), grid)


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
    return distributed(unscaled(bidiagonal.values(reduced), scale), Layout(layout.dims[-1]), tiles.grid)


def solved_by_bidiagonal(n: int, grid: Grid) -> bool:
    """Return True if all ranks make a matrix [n, n] bidiagonal for its `svd`, on hosts."""
    return grid.size > 1 and grid.backend.cpu and not svd_by_one((n, n), grid.sizes)


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


def bidiagonal_form(
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
