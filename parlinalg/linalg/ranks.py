"""Ranks, pseudoinverses, bases and condition numbers, by singular values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, truth
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import of_arrays, primitive, takes_over
from parlinalg.array.joining import stack
from parlinalg.array.namespace import isfinite, isnan, where
from parlinalg.array.shapes import reshape
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.costs.orthogonal import small_triangle
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import QRFactor, by_qr_first, completed
from parlinalg.linalg.factors.tall import tall_r
from parlinalg.linalg.matrices import (
    LinAlgError,
    as_matrix,
    check_order,
    distributed,
    limits,
    scaled,
    unscaled,
)
from parlinalg.linalg.reductions import bidiagonal
from parlinalg.linalg.reductions.bidiagonal import TALL, Bidiagonal, assumed_rank
from parlinalg.linalg.reductions.divide import SIDES
from parlinalg.linalg.reductions.reduction import rooms_of_few, workers
from parlinalg.linalg.singular import bidiagonal_form, by_bidiagonal, svd, svdvals
from parlinalg.linalg.systems import inv
from parlinalg.linalg.tiles import move, transposed
from parlinalg.matmul import matmul


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
    return x, distributed(unscaled(values, scale), Layout(layout.dims[-1]), grid)


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


def _pseudoinverse(x: DistArray, rtol: Any) -> DistArray:
    """Return the pseudoinverse of a matrix without its singular vectors.

    With A = Q B Pᴴ it is P B⁺ Qᴴ: one matrix, that of the bidiagonal one, goes back through the reflections of both
    sides, and of singular vectors none but those of B exist, some at a time.
    """
    wide, least = x.shape[0] < x.shape[1], max(x.shape)
    held = [x.mT.conj() if wide else x]
    layout, dtype, grid = held[0].layout.with_partial(()), x.dtype, x.grid
    reduced, scale, q = bidiagonal_form(held, "svd")

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
    reduced, _, q = bidiagonal_form(held, name, sides=[side])

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
