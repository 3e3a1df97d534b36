"""Least squares: by QR where the rank is full, else by the singular values of R; refined from half the precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, same_grid
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace
from parlinalg.backend.shapes import has_values
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.blocks import machine, predicted
from parlinalg.linalg.factors import (
    LOWER,
    LinAlgError,
    QRFactor,
    _matrix,
    _refuse,
    by_rows,
    solve_triangular,
)
from parlinalg.linalg.planner import dealt
from parlinalg.linalg.qr import nearly_orthogonalized
from parlinalg.linalg.spectral import _inverse, _limit, svd, svdvals
from parlinalg.matmul import matmul

Pseudoinverse = tuple[Any, ...]
"""("tall", Q, R), ("wide", Q, R) of the adjoint matrix, or ("svd", U, inverses of the values that count, Vᴴ)."""

Found = tuple[DistArray, int, DistArray]

ROUNDS = 5
"""The most times that the residual is computed anew."""
INNER = 30
"""The most steps of conjugate gradients between two residuals."""


class LstsqResult(NamedTuple):
    """The solution, the sums of squared residuals, the rank, and the singular values."""

    x: DistArray
    residuals: DistArray
    rank: int
    s: DistArray


@primitive
def lstsq(a: DistArray, b: DistArray, rcond: float | None = None, *, refine: bool = False) -> LstsqResult:
    """Return the x of least norm for which ‖A x - b‖ is least.

    A matrix of full rank is solved by its QR factorization, or by that of its adjoint if it has more columns than rows.
    Only the n × n triangle R is reduced further, for its singular values, which are those of A.  If some of them count
    as 0, x comes from the singular vectors of R, as LAPACK's `gelsd` finds it.

    Parameters
    ----------
    a : DistArray [m, n]
    b : DistArray [m] or [m, k]
    rcond : float, optional
        Singular values of at most `rcond` times the largest count as 0; by default max(m, n) times the dtype's eps.
        Outside 0 < rcond < 1 it is eps, as LAPACK's and NumPy's.
    refine : bool
        Factor A of float64 (complex128) in float32 (complex64), which moves half the bytes, and refine x by residuals
        of full precision until its backward error is that of a factorization in full precision.  R of half the
        precision is the preconditioner of conjugate gradients for the corrections (Björck 1987; Carson, Higham and
        Pranesh 2020; Epperly, Meier and Nakatsukasa 2024).  The singular values are those of the factorization in half
        the precision.  A matrix of a condition above about 4e5, with which the rank would be in doubt, and matrices
        that have half the precision already are factored as without `refine`.

    Returns
    -------
    x : DistArray [n] or [n, k]
        In the layout of b.
    residuals : DistArray [k] or [1]
        The sums of squares of b - A x, in each column; empty where the rank is below n or A has no more rows than
        columns, as NumPy's.
    rank : int
    s : DistArray [min(m, n)]
        The singular values of A, falling.

    Raises
    ------
    LinAlgError
        If A is no matrix, or b has other rows.
    ValueError
        If A or b has NaNs or infinities.
    """
    return least_squares(a, b, rcond, refine=refine)[0]


def least_squares(
    a: DistArray, b: DistArray, rcond: float | None = None, *, refine: bool = False, keep: bool = False
) -> tuple[LstsqResult, Pseudoinverse]:
    """Return the result of `lstsq`, and with `keep` the parts of the pseudoinverse, which `times` takes."""
    a, b = _matrix(a, "lstsq"), _matrix(b, "lstsq", vectors=True)
    if a.ndim != 2 or b.ndim > 2 or b.shape[0] != a.shape[0]:
        raise LinAlgError(
            f"lstsq takes a matrix [m, n] and right-hand sides [m] or [m, k], not {a.shape} and {b.shape}"
        )
    same_grid([a, b])
    dtype, (m, n) = np.result_type(a.dtype, b.dtype), a.shape
    a, sides = a.astype(dtype, copy=False).summed(), b.astype(dtype, copy=False).summed()
    sides = sides if b.ndim == 2 else sides[:, None]
    limit = float(np.finfo(dtype).eps)
    if rcond is None:
        limit *= max(m, n)
    elif 0 < rcond < 1:
        limit = float(rcond)
    parts: Pseudoinverse = ()
    found = refined(a, sides, limit) if refine and dtype.char in LOWER and not keep else None
    if found is None and not keep:
        found = _products(a, sides, limit)
    if found is None and a.grid.size == 1 and a.size and sides.size and not keep:
        found = _alone(a, sides, limit)
    if found is None:
        found, parts = _factored(a, sides, limit, keep)
    x, rank, s = found
    residuals = zeros((0,), dtype=s.dtype, grid=a.grid)
    if rank == n and m > n:
        residuals = (abs(sides - matmul(a, x)) ** 2).sum(axis=0)
    x = (x if b.ndim == 2 else reshape(x, (n,))).redistribute(b.layout.with_partial(()))
    return LstsqResult(x, residuals, rank, s), parts


def _alone(a: DistArray, b: DistArray, limit: float) -> Found:
    """Return x, the rank and the singular values by LAPACK's `gelsd`, or the GPU's library, on a grid of one rank."""
    grid, (m, n) = a.grid, a.shape
    problem, rank = "", 0
    x, s = grid.backend.empty(b.block.shape, b.dtype), grid.backend.empty((0,), a.real.dtype)
    if grid.inside:
        xp = a.xp
        if not (kernels.finite(a.block) and kernels.finite(b.block)):
            problem = "odd"
        else:
            try:
                x, _, rank, s = xp.linalg.lstsq(a.block, b.block, rcond=limit)
            except LinAlgError as error:
                problem = f"lstsq: {error}"
    told = grid.world.share((problem, int(rank)), others="alike")
    _refuse(any(p == "odd" for p, _ in told), "lstsq")
    if wrong := next((p for p, _ in told if p), ""):
        raise LinAlgError(wrong)
    layout = Layout(None, None)
    values = DistArray(s, (min(m, n),), Layout(None), grid)
    return DistArray(x, (n, b.shape[1]), layout, grid), max(r for _, r in told), values


def _factored(a: DistArray, b: DistArray, limit: float, keep: bool) -> tuple[Found, Pseudoinverse]:
    """Return x, the rank and the singular values, and with `keep` the parts of the pseudoinverse."""
    wide = a.shape[0] < a.shape[1]
    k = min(a.shape)
    factor = QRFactor(a.mT.conj(), name="lstsq") if wide else QRFactor(a, b=b, name="lstsq")
    if wide:
        _refuse(factor.tiles.worst([not kernels.finite(b.block)])[0], "lstsq")
    r = factor.R
    rank = 0
    # no singular value is above the least |R[i, i]|, and some value is at least the largest |R[i, j]|
    least, most = factor.extremes()
    if k and _maybe_full(a.grid, least, most, limit):
        s = svdvals(r)
        rank = _counted((s > _limit(r, s, limit, 0)).sum(), k)
    if rank == k:
        if not k:
            s = svdvals(r)
        x = factor.turned(factor.substituted(b, adjoint=True)) if wide else factor.carried(b, solve=True)
        return (x, rank, s), ("wide" if wide else "tall", factor.Q(), r) if keep else ()
    u, s, vh = svd(r, full_matrices=False)
    kept = s > _limit(r, s, limit, 0)
    inverse = _inverse(s, kept)
    if wide:  # A = V S Uᴴ Qᴴ
        x = factor.turned(matmul(u, inverse[:, None] * matmul(vh, b)))
    else:
        x = matmul(vh.mT.conj(), inverse[:, None] * matmul(u.mT.conj(), factor.carried(b, solve=False)))
    parts: Pseudoinverse = ()
    if keep:
        left = factor.turned(u)
        parts = ("svd", vh.mT.conj(), inverse, left.mT.conj()) if wide else ("svd", left, inverse, vh)
    return (x, _counted(kept.sum(), k), s), parts


def _maybe_full(grid: Grid, least: float, most: float, limit: float) -> bool:
    """Return True if bounds of singular values do not exclude full rank; it is assumed of imagined matrices."""
    if not grid.backend.values:
        return bool(grid.backend.assume("conditioned", "the rank of a matrix"))
    return least > limit * most


def _counted(count: DistArray, k: int) -> int:
    """Return the number of the k singular values that count; of imagined matrices all, or all but one."""
    backend = count.grid.backend
    if not backend.values:
        return k if backend.assume("conditioned", "the rank of a matrix") else max(0, k - 1)
    return int(count)


def _products(a: DistArray, b: DistArray, limit: float) -> Found | None:
    """Return x, the rank and the singular values of a tall matrix by products alone; None where they do not do.

    Each rank has R for a while.  Its values are found by the first rank, unless it is so large that all are faster.
    """
    n, grid, rest, like = a.shape[1], a.grid, by_rows(a), b.layout.with_partial(())
    if rest is None:
        return None
    alone, backend, sound = _small(n, grid), grid.backend, True
    r = s = x = backend.empty((0, 0), a.dtype)
    if grid.inside:
        y, sides = a.redistribute(rest).block.copy(order="C"), b.redistribute(rest).block
        xp, everyone = namespace(y), grid.everyone
        with np.errstate(all="ignore"):
            r, sound, last = nearly_orthogonalized(y, everyone)
            x = xp.ascontiguousarray(kernels.adjoint(y) @ sides)
            everyone.all_reduce(x)
            kernels.substitute(last, x, lower=True)  # Qᴴ b
        sound = sound and kernels.finite(x) and kernels.finite(r)
        s = backend.empty((n,), a.real.dtype)
        if sound and everyone.rank == 0:
            kernels.substitute(r, x)
            if alone:
                with suppress(LinAlgError), kernels.raising(r):
                    s[:] = 0
                    s[:] = xp.linalg.svd(r, compute_uv=False)
                sound = bool((s > limit * s.max()).all()) if has_values(s) else True  # assumed, or not sound before
    if grid.world.share(sound, others="alike").count(False):
        return None
    if grid.inside:
        grid.everyone.broadcast(x, 0)
        if alone:
            grid.everyone.broadcast(s, 0)
    where = grid.block(like, (n, b.shape[1])) if grid.inside else (range(0), range(0))
    found = DistArray(_part(x, where), (n, b.shape[1]), like, grid)
    if alone:
        values = Layout(a.layout.dims[-1])
        (at,) = grid.block(values, (n,)) if grid.inside else (range(0),)
        return found, n, DistArray(s[at.start : at.stop].copy(), (n,), values, grid)
    layout = a.layout.with_partial(())
    where = grid.block(layout, (n, n)) if grid.inside else (range(0), range(0))
    triangle = DistArray(_part(r, where), (n, n), layout, grid)
    values_of_all = svdvals(triangle)
    if _counted((values_of_all > _limit(triangle, values_of_all, limit, 0)).sum(), n) < n:
        return None
    return found, n, values_of_all


def _part(x: Any, where: tuple[range, ...]) -> Any:
    """Return the rows and columns of a matrix that are this rank's, in an array of their own."""
    rows, columns = where
    return x[rows.start : rows.stop, columns.start : columns.stop].copy(order="C")


def _small(n: int, grid: Grid) -> bool:
    """Return True if one rank finds the singular values of a matrix [n, n] sooner than all do together."""
    deal = dealt("svd", n, n, grid.sizes, None, True)
    alone, together = (
        predicted("svd", n, n, rows, columns, deal.size, machine()).total
        for rows, columns in ((1, 1), (deal.R, deal.C))
    )
    return alone <= together


def times(parts: Pseudoinverse, b: DistArray, adjoint: bool = False) -> DistArray:
    """Return P b, or with `adjoint` Pᴴ b, for a pseudoinverse P in parts and b [m, k], or [n, k]."""
    kind, first, second, *rest = parts
    if kind == "svd":
        u, inverse, vh = first, second[:, None], rest[0]
        if adjoint:
            return matmul(u, inverse * matmul(vh, b))
        return matmul(vh.mT.conj(), inverse * matmul(u.mT.conj(), b))
    if (kind == "tall") == adjoint:
        return matmul(first, solve_triangular(second, b, adjoint=True))
    return solve_triangular(second, matmul(first.mT.conj(), b))


# ------------------------------------------------------------------------------------------------ refinement
def refined(a: DistArray, b: DistArray, limit: float) -> Found | None:
    """Return x, the rank and the singular values by a factorization in half the precision; None where it won't do.

    With R of A, or of Aᴴ if A has more columns than rows, B = A R⁻¹, or R⁻ᴴ A, is about orthonormal.  A correction of x
    is R⁻¹ y with BᴴB y = Bᴴ r, or Bᴴ y with B Bᴴ y = R⁻ᴴ r, for the residual r = b - A x.  The backward error of x is
    about ‖R⁻ᴴ Aᴴ r‖ / ‖x‖ or ‖Aᴴ r‖ / ‖r‖, whichever is less (Grcar 2003), or ‖r‖ / ‖x‖.
    """
    m, n = a.shape
    wide, k = m < n, min(a.shape)
    sizes = abs(b).max(axis=0) if b.size else None
    largest = float(abs(a).max()) if a.size else 0.0
    if sizes is None or not largest or not math.isfinite(largest) or not math.isfinite(float(sizes.max())):
        return None
    scale = 2.0 ** -math.frexp(largest)[1]
    if not math.isfinite(scale):
        return None
    a = a * scale
    sizes = sizes + (sizes == 0)
    b = b / sizes
    factor = QRFactor((a.mT.conj() if wide else a).astype(LOWER[a.dtype.char]), name="lstsq")
    s = svdvals(factor.R).astype(np.float64)
    most, least = float(s.max()), float(s.min())  # on ranks outside of the grid too
    doubt = max(20.0, math.sqrt(max(m, n))) * float(np.finfo(np.float32).eps)
    if not least > (limit + doubt) * most:
        return None
    back = a.mT.conj()
    bound = float(np.finfo(a.dtype).eps) * math.sqrt(k) * most

    def normal(y: DistArray) -> DistArray:
        """Return BᴴB y, or B Bᴴ y."""
        step = factor.substituted(y)
        step = matmul(a, matmul(back, step)) if wide else matmul(back, matmul(a, step))
        return factor.substituted(step, adjoint=True)

    x = zeros((n, b.shape[1]), dtype=a.dtype, grid=a.grid, layout=b.layout)
    r = b
    for _ in range(ROUNDS):
        g = r if wide else matmul(back, r)
        right = factor.substituted(g, adjoint=True)
        y = _conjugate_gradients(normal, right)
        step = factor.substituted(y)
        x = x + (matmul(back, step) if wide else step).redistribute(x.layout)
        r = b - matmul(a, x)
        length, left = _lengths(x), _lengths(r)
        if wide:
            good = left <= bound * length
        else:
            g = matmul(back, r)
            good = (_lengths(factor.substituted(g, adjoint=True)) <= bound * length) | (_lengths(g) <= bound * left)
        if bool(good.all()):
            return x * (sizes * scale), k, s / scale
    return None


def _lengths(x: DistArray) -> DistArray:
    """Return the lengths of the columns."""
    squares: DistArray = (abs(x) ** 2).sum(axis=0)
    return squares**0.5


def _conjugate_gradients(apply: Callable[[DistArray], DistArray], b: DistArray, rtol: float = 1e-6) -> DistArray:
    """Return about the y of M y = b for a Hermitian matrix M near the identity, a function, each column by itself."""
    y, r, p = b * 0.0, b, b
    squares = (abs(r) ** 2).sum(axis=0)
    enough = squares * rtol**2
    for _ in range(INNER):
        q = apply(p).redistribute(p.layout)
        curvature = (p.conj() * q).real.sum(axis=0)
        rate = squares / (curvature + (curvature == 0))
        y, r = y + p * rate, r - q * rate
        before, squares = squares, (abs(r) ** 2).sum(axis=0)
        if bool((squares <= enough).all()):
            break
        p = r + p * (squares / (before + (before == 0)))
    return y
