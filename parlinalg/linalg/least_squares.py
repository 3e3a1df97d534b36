"""Least squares: by QR where the rank is full, else by the singular values of R; refined from half the precision.

The matrices of stacks are shared out, or where they are fewer than ranks solved by all ranks one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, same_grid, truth
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.array.shapes import reshape
from parlinalg.backend import backend_of, namespace
from parlinalg.backend.shapes import has_values
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors.qr import QRFactor
from parlinalg.linalg.factors.tall import by_rows
from parlinalg.linalg.iterative.vectors import assumed_steps
from parlinalg.linalg.matrices import LinAlgError, as_matrix, batches, cutoff, distributed, refuse_nonfinite, scalar
from parlinalg.linalg.panels.qr import nearly_orthogonalized
from parlinalg.linalg.planner import by_one
from parlinalg.linalg.ranks import counted, limit_of, solution_of_triangle
from parlinalg.linalg.reductions.bidiagonal import assumed_rank
from parlinalg.linalg.singular import solved_by_bidiagonal, svd, svdvals, values_of_triangle
from parlinalg.linalg.systems import LOWER, triangular_solution
from parlinalg.matmul import matmul

Pseudoinverse = tuple[Any, ...]
"""("tall", Q, R, unit), ("wide", Q, R, unit) of the adjoint matrix, or ("svd", U, values, Vᴴ, unit); of stacks stacks.

They are those of A times a power of two, the unit.  Values that do not count are 0.
"""

Found = tuple[DistArray, int, DistArray]

ROUNDS = 5
"""The most times that the residual is computed anew."""
INNER = 30
"""The most steps of conjugate gradients between two residuals."""
RTOL = 1e-6
"""The residual, beside the first one, with which these steps end."""


class LstsqResult(NamedTuple):
    """The solution, the sums of squared residuals, the rank (of stacks an array of ranks), and the singular values."""

    x: DistArray
    residuals: DistArray
    rank: int | DistArray
    s: DistArray


@primitive
def lstsq(a: DistArray, b: DistArray, rcond: float | None = None, *, refine: bool = False) -> LstsqResult:
    """Return the x of least norm for which ‖A x - b‖ is least, of one matrix or of each matrix of a stack.

    A matrix of full rank is solved by its QR factorization, or by that of its adjoint if it has more columns than rows.
    Only the n × n triangle R is reduced further, for its singular values, which are those of A.  If some of them count
    as 0, x comes from the singular vectors of R, or of its bidiagonal form, as LAPACK's `gelsd` finds it.

    `numpy.linalg.lstsq` takes one matrix.  Of a stack each matrix has the x, the rank and the singular values that it
    would have alone, with one `rcond` for all.  Leading dims are broadcast as by `solve`, and residuals are there or
    not for the whole stack, as `torch.linalg.lstsq` has them.

    Parameters
    ----------
    a : DistArray [..., m, n]
    b : DistArray [m] or [..., m, k]
        One vector, for all matrices, or matrices.
    rcond : float, optional
        Singular values of at most `rcond` times the largest count as 0; by default max(m, n) times the dtype's eps.
        Outside 0 < rcond < 1 it is eps / 2, LAPACK's machine precision, as NumPy's.
    refine : bool
        Factor A of float64 (complex128) in float32 (complex64), which moves half the bytes, and refine x by residuals
        of full precision until its backward error is that of a factorization in full precision.  R of half the
        precision is the preconditioner of conjugate gradients for the corrections (Björck 1987; Carson, Higham and
        Pranesh 2020; Epperly, Meier and Nakatsukasa 2024).  The singular values are those of the factorization in half
        the precision.  A matrix of a condition above about 4e5, with which the rank would be in doubt, matrices that
        have half the precision already, and those of a stack that ranks solve by themselves, where nothing would be
        sent, are factored as without `refine`.

    Returns
    -------
    x : DistArray [..., n] or [..., n, k]
        In the layout of b.
    residuals : DistArray [..., k] or [..., 1]
        The sums of squares of b - A x, in each column; empty, [0], where the rank of a matrix is below n or A has no
        more rows than columns.
    rank : int or DistArray [...]
        A number of one matrix, int64 of stacks.
    s : DistArray [..., min(m, n)]
        The singular values of A, falling.

    Raises
    ------
    LinAlgError
        If A is no matrix, b has other rows, or the leading dims do not fit to each other.
    ValueError
        If A or b has NaNs or infinities.
    """
    return least_squares(a, b, rcond, refine=refine)[0]


def least_squares(
    a: DistArray, b: DistArray, rcond: float | None = None, *, refine: bool = False, keep: bool = False
) -> tuple[LstsqResult, Pseudoinverse]:
    """Return the result of `lstsq`, and with `keep` the parts of the pseudoinverse, which `times` takes."""
    a, b = as_matrix(a, "lstsq"), as_matrix(b, "lstsq", vectors=True)
    if b.shape[: 1 if b.ndim == 1 else -1][-1:] != a.shape[-2:-1]:
        raise LinAlgError(
            f"lstsq takes matrices [..., m, n] and right-hand sides [m] or [..., m, k], not {a.shape} and {b.shape}"
        )
    same_grid([a, b])
    dtype, (m, n) = np.result_type(a.dtype, b.dtype), a.shape[-2:]
    a, sides = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    sides = sides if b.ndim > 1 else sides[:, None]
    limit = float(np.finfo(dtype).eps)
    if rcond is None:
        limit *= max(m, n)
    else:
        given = cutoff("lstsq", rcond)
        limit = given if 0 < given < 1 else limit / 2
    rank: int | DistArray
    if a.ndim == sides.ndim == 2:
        a, sides = a.summed(), sides.summed()
        (x, rank, s), parts = _solved(a, sides, limit, refine, keep)
        squares = _squares(a, sides, x) if rank == n and m > n else None
    else:
        (x, rank, s, squares), parts = _stacked(a, sides, limit, refine, keep)
    residuals = zeros((0,), dtype=s.dtype, grid=a.grid) if squares is None else squares
    if b.ndim == 1:
        x = reshape(x, x.shape[:-1])
    x = x.redistribute(Layout(*[None] * (x.ndim - b.ndim), *b.layout.dims))
    return LstsqResult(x, residuals, rank, s), parts


def _solved(a: DistArray, b: DistArray, limit: float, refine: bool, keep: bool) -> tuple[Found, Pseudoinverse]:
    """Return x, the rank and the singular values of one matrix, and with `keep` the parts of the pseudoinverse."""
    found = refined(a, b, limit) if refine and a.dtype.char in LOWER and not keep else None
    if found is None and not keep:
        found = _products(a, b, limit)
    if found is None and a.grid.size == 1 and a.size and b.size and not keep:
        found = _alone(a, b, limit)
    return _factored(a, b, limit, keep) if found is None else (found, ())


def _squares(a: DistArray, b: DistArray, x: DistArray) -> DistArray:
    """Return the sums of squares of b - A x, in each column, which may be out of range."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: DistArray = (abs(b - matmul(a, x, layout=b.layout.with_partial(()))) ** 2).sum(axis=-2)
        return found


def _alone(a: DistArray, b: DistArray, limit: float) -> Found:
    """Return x, the rank and the singular values by LAPACK's `gelsd`, or the GPU's library, on a grid of one rank."""
    grid, (m, n) = a.grid, a.shape
    problem, rank = "", 0
    x, s = grid.backend.empty(b.block.shape, b.dtype), grid.backend.empty((0,), a.real.dtype)
    if grid.inside:
        if not (kernels.finite(a.block) and kernels.finite(b.block)):
            problem = "nonfinite"
        else:
            (matrix, unit), (sides, other) = (kernels.in_range(each.block[None]) for each in (a, b))
            try:
                with kernels.raising(a.block):
                    x, _, rank, s = kernels.routines(a.block).lstsq(matrix[0], sides[0], rcond=limit)
                if unit != 1 or other != 1:
                    with np.errstate(over="ignore"):
                        s = s / kernels.beside(unit, s)
                        for half in kernels.halves(unit, other):
                            x = x * kernels.beside(half, x)
            except LinAlgError as error:
                problem = f"lstsq: {error}"
    reported = grid.world.share((problem, int(rank)), others="alike")
    refuse_nonfinite(any(p == "nonfinite" for p, _ in reported), "lstsq")
    if wrong := next((p for p, _ in reported if p), ""):
        raise LinAlgError(wrong)
    layout = Layout(None, None)
    values = DistArray(s, (min(m, n),), Layout(None), grid)
    found = max(r for _, r in reported) if grid.backend.values else assumed_rank(grid, min(m, n))
    return DistArray(x, (n, b.shape[1]), layout, grid), found, values


def _factored(a: DistArray, b: DistArray, limit: float, keep: bool) -> tuple[Found, Pseudoinverse]:
    """Return x, the rank and the singular values, and with `keep` the parts of the pseudoinverse."""
    wide = a.shape[0] < a.shape[1]
    k = min(a.shape)

    def factored() -> QRFactor:
        if wide:
            return QRFactor(a.mT.conj(), name="lstsq")
        return QRFactor(a, b=b, name="lstsq", keep=keep)

    factor = factored()
    if wide:
        refuse_nonfinite(factor.tiles.worst([not kernels.finite(b.block)])[0], "lstsq")
    # no singular value is above the least |R[i, i]|, and some value is at least the largest |R[i, j]|
    least, most, side = factor.extremes(b) if k else (0.0, 0.0, 1.0)
    unit = kernels.unit(most or _largest(a) if k else 1.0, a.dtype)  # where R overflows `most` is 0
    other = kernels.unit(side, b.dtype)
    parts: Pseudoinverse = ()
    if unit != 1 or other != 1:
        del factor
        (x, rank, s), parts = _factored(a * unit, b * other, limit, keep)
        with np.errstate(over="ignore"):
            for half in kernels.halves(unit, other):
                x = x * half
            return (x, rank, s / unit), (*parts[:-1], unit)[: len(parts)]
    if not k or _maybe_full(a.grid, least, most, limit):
        x = factor.times_q(factor.substituted(b, adjoint=True)) if wide else factor.carried(b, solve=True)
        if not k:
            s = zeros((0,), dtype=a.real.dtype, grid=a.grid)
        else:
            s = values_of_triangle(factor, "lstsq", keep)
        rank = counted((s > limit_of(s, limit, 0)).sum(), k) if k else 0
        if rank == k:
            return (x, rank, s), ("wide" if wide else "tall", factor.Q(), factor.R, 1.0) if keep else ()
        if not keep:
            factor = factored()
    if not keep and solved_by_bidiagonal(k, a.grid):
        right = b if wide else factor.carried(b, solve=False)
        x, s = solution_of_triangle(factor, right, lambda s: s * (s > limit_of(s, limit, 0)), "lstsq", adjoint=wide)
        rank = counted((s > limit_of(s, limit, 0)).sum(), k)
        return (factor.times_q(x, last=True) if wide else x, rank, s), ()
    r = factor.R
    u, s, vh = svd(r, full_matrices=False)
    kept = s > limit_of(s, limit, 0)
    values = s * kept
    if wide:  # A = V S Uᴴ Qᴴ
        x = factor.times_q(matmul(u, kernels.quotients(matmul(vh, b), values[:, None])))
    else:
        right = factor.carried(b, solve=False)
        x = matmul(vh.mT.conj(), kernels.quotients(matmul(u.mT.conj(), right), values[:, None]))
    if keep:
        left = factor.times_q(u)
        parts = ("svd", vh.mT.conj(), values, left.mT.conj(), 1.0) if wide else ("svd", left, values, vh, 1.0)
    return (x, counted(kept.sum(), k), s), parts


def _largest(a: DistArray) -> float:
    """Return the size of the largest element, of complex ones of the largest part: their sizes may be out of range."""
    return max(float(abs(part).max()) for part in ((a.real, a.imag) if a.dtype.kind == "c" else (a,)))


def _maybe_full(grid: Grid, least: float, most: float, limit: float) -> bool:
    """Return True if bounds of singular values do not exclude full rank; it is assumed of imagined matrices."""
    if not grid.backend.values:
        return bool(grid.backend.assume("conditioned", "the rank of a matrix"))
    return least > limit * most


def _products(a: DistArray, b: DistArray, limit: float) -> Found | None:
    """Return x, the rank and the singular values of a well-conditioned tall matrix by products alone; None of others.

    Each rank has R for a while.  The first rank finds its singular values, unless it is so large that all are faster.
    """
    n, grid, rest, like = a.shape[1], a.grid, by_rows(a), b.layout.with_partial(())
    if rest is None:
        return None
    alone, backend, sound = by_one(n, grid.sizes), grid.backend, True
    r = x = backend.empty((0, 0), a.dtype)
    s = backend.empty((0,), a.real.dtype)
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
            sound = kernels.finite(x)  # else `_factored` scales b
            if alone and sound:
                with suppress(LinAlgError), kernels.raising(r):
                    s[:] = 0
                    s[:] = kernels.small_svd(r, compute_uv=False)
                sound = bool((s > limit * s.max()).all()) if has_values(s) else True  # assumed, or not sound before
    if grid.world.share(sound, others="alike").count(False):
        return None
    if grid.inside:
        grid.everyone.broadcast(x, 0)
        if alone:
            grid.everyone.broadcast(s, 0)
    found = distributed(x, like, grid, (n, b.shape[1]))
    if alone:
        return found, n, distributed(s, Layout(a.layout.dims[-1]), grid, (n,))
    triangle = distributed(r, a.layout.with_partial(()), grid, (n, n))
    values_of_all = svdvals(triangle)
    if counted((values_of_all > limit_of(values_of_all, limit, 0)).sum(), n) < n:
        return None
    return found, n, values_of_all


# ------------------------------------------------------------------------------------------------ stacks
def _stacked(
    a: DistArray, b: DistArray, limit: float, refine: bool, keep: bool
) -> tuple[tuple[DistArray, DistArray, DistArray, DistArray | None], Pseudoinverse]:
    """Return x, the ranks, the singular values and sums of squares of matrices [..., m, n], and what `_solved` keeps.

    There are sums of squares if there are more rows than columns and all matrices have full rank.
    """
    (m, n), k = a.shape[-2:], min(a.shape[-2:])

    def local(xp: Any, p: Any, q: Any) -> tuple[Any, ...]:
        found = _of_each(xp, p, q, limit, wide=m < n)
        squares = ((abs(q - p @ found[0]) ** 2).sum(axis=-2),) if m > n else ()
        return found[:3] + squares + (found[3:] if keep else ())

    def one(p: DistArray, q: DistArray) -> tuple[DistArray, ...]:
        p, q = p.summed(), q.summed()
        (x, rank, s), parts = _solved(p, q, limit, refine, keep)
        squares = (_squares(p, q, x),) if m > n else ()
        return (x, scalar(rank, np.int64, a.grid), s, *squares, *_orthogonal(parts, s))

    x, ranks, s, *others = batches("lstsq", local, one, a, b, like=1)
    full = truth((ranks == k).all(), "conditioned", "the rank of a matrix")
    squares = others.pop(0) if m > n else None
    parts: Pseudoinverse = ()
    if others:  # Q R is A times its unit, or the adjoint if A has more columns than rows
        q, r, unit = others
        parts = ("wide" if m < n else "tall", q, r, unit)
        if not full:
            u, values, vh = svd(r, full_matrices=False)
            values, left = values * (values > limit_of(values, limit, 1)), matmul(q, u)
            parts = ("svd", left, values, vh, unit) if m >= n else ("svd", vh.mT.conj(), values, left.mT.conj(), unit)
    return (x, ranks, s, squares if full else None), parts


def _of_each(xp: Any, a: Any, b: Any, limit: float, wide: bool) -> tuple[Any, ...]:
    """Return x, the ranks and the singular values of matrices that a rank has, and Q, R and units of them.

    Q and R are those of the matrices times their units, or of the adjoints if `wide`.
    """
    *lead, m, n = a.shape
    k, sides, real = min(m, n), b.shape[-1], a.real.dtype
    if not a.size:
        q, r = xp.zeros((*lead, max(m, n), k), a.dtype), xp.zeros((*lead, k, k), a.dtype)
        x, s = xp.zeros((*lead, n, sides), a.dtype), xp.zeros((*lead, k), real)
        return x, xp.zeros(lead, np.int64), s, q, r, xp.ones(lead, real)
    count = math.prod(lead)
    a, b = a.reshape(count, m, n), b.reshape(count, m, sides)
    (a, unit), (b, other) = kernels.in_range(a), kernels.in_range(b)
    q, r = xp.linalg.qr(kernels.adjoint(a) if wide else a)
    s = kernels.routines(r).svd(r, compute_uv=False)
    kept = s > limit * s[:, :1]
    t = kernels.adjoint(r) if wide else r  # x = Q T⁺ b, or T⁺ Qᴴ b
    right = b if wide else kernels.adjoint(q) @ b
    y = xp.zeros((count, k, sides), a.dtype)
    regular = kept.all(axis=1) & (xp.diagonal(r, axis1=1, axis2=2) != 0).all(axis=1)
    some = _chosen(regular, True)
    if len(some):
        y[some] = kernels.triangles(t[some], right[some], lower=wide)
    some = _chosen(regular, False)
    if len(some):
        u, values, vh = kernels.routines(t).svd(t[some], full_matrices=False)
        right = kernels.quotients(kernels.adjoint(u) @ right[some], (values * kept[some])[:, :, None])
        y[some] = kernels.adjoint(vh) @ right
    x, s = q @ y if wide else y, s / kernels.beside(unit, s)[:, None]
    for half in kernels.halves(unit, other):
        x = x * kernels.beside(half, x)[:, None, None]
    found = (x, kept.sum(axis=1), s, q, r, kernels.beside(unit, s))
    return tuple(each.reshape(*lead, *each.shape[1:]) for each in found)


def _chosen(regular: Any, wanted: bool) -> Any:
    """Return the numbers of the matrices that are regular, or not; imagined ones are alike."""
    if has_values(regular):
        return namespace(regular).flatnonzero(regular == wanted)
    full = backend_of(regular).assume("conditioned", "the rank of a matrix")
    return np.arange(len(regular) if full == wanted else 0)


def _orthogonal(parts: Pseudoinverse, s: DistArray) -> tuple[DistArray, ...]:
    """Return Q, R and the unit for the parts of a pseudoinverse: Q R is A times it, or the adjoint of a wide A."""
    if not parts:
        return ()
    kind, left, right, *rest = parts
    unit = scalar(rest[-1], s.dtype, s.grid)
    if kind == "svd":  # A times the unit is U S Vᴴ; R need not be a triangle here
        right = rest[0]
        if left.shape[0] < right.shape[1]:
            left, right = right.mT.conj(), left.mT.conj()
        right = (s * unit)[:, None] * right
    return left, right, unit


def times(parts: Pseudoinverse, b: DistArray, adjoint: bool = False) -> DistArray:
    """Return P b, or with `adjoint` Pᴴ b, for a pseudoinverse P in parts and b [..., m, k], or [..., n, k].

    NaNs and infinities of b make NaNs.
    """
    kind, first, second, *rest = parts
    unit = rest[-1][..., None, None] if isinstance(rest[-1], DistArray) else rest[-1]
    if kind == "svd":
        u, vh = (first, rest[0]) if adjoint else (rest[0].mT.conj(), first.mT.conj())
        found = matmul(u, kernels.quotients(matmul(vh, b), second[..., :, None]))
    elif (kind == "tall") == adjoint:
        found = matmul(first, triangular_solution(second, b, adjoint=True))
    else:
        found = triangular_solution(second, matmul(first.mT.conj(), b))
    return found * unit


# ------------------------------------------------------------------------------------------------ refinement
def refined(a: DistArray, b: DistArray, limit: float) -> Found | None:
    """Return x, the rank and the singular values by a factorization in half the precision; None if that is too little.

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
    if not math.isfinite(1 / largest):
        return None
    scale = 2.0 ** -math.frexp(largest)[1]
    a = a * scale
    b = kernels.quotients(b, sizes)
    factor = QRFactor((a.mT.conj() if wide else a).astype(LOWER[a.dtype.char]), name="lstsq", keep=False)
    s = svdvals(factor.R).astype(np.float64)
    most, least = float(s.max()), float(s.min())  # on ranks outside of the grid too
    doubt = max(20.0, math.sqrt(max(m, n))) * float(np.finfo(np.float32).eps)
    if not _maybe_full(a.grid, least, most, limit + doubt):
        return None
    assumed, steps = assumed_steps(b, "refinements", "how often a solution is corrected"), None
    if assumed is not None:  # the columns of B are orthonormal but for a rounding of A, which the condition enlarges
        condition = a.grid.backend.assume("condition", "how far conjugate gradients get in a step")
        if condition * (limit + doubt) >= 1:
            return None
        steps = max(1, math.ceil(math.log(RTOL) / math.log(condition * float(np.finfo(np.float32).eps) / 2)))
    back = a.mT.conj()
    bound = float(np.finfo(a.dtype).eps) * math.sqrt(k) * most

    def normal(y: DistArray) -> DistArray:
        """Return BᴴB y, or B Bᴴ y."""
        step = factor.substituted(y)
        step = matmul(a, matmul(back, step)) if wide else matmul(back, matmul(a, step))
        return factor.substituted(step, adjoint=True)

    x = zeros((n, b.shape[1]), dtype=a.dtype, grid=a.grid, layout=b.layout)
    r = b
    for turn in range(ROUNDS):
        g = r if wide else matmul(back, r)
        right = factor.substituted(g, adjoint=True)
        y = _conjugate_gradients(normal, right, RTOL, steps)
        step = factor.substituted(y)
        x = x + (matmul(back, step) if wide else step).redistribute(x.layout)
        r = b - matmul(a, x)
        length, left = _lengths(x), _lengths(r)
        if wide:
            good = left <= bound * length
        else:
            g = matmul(back, r)
            good = (_lengths(factor.substituted(g, adjoint=True)) <= bound * length) | (_lengths(g) <= bound * left)
        enough = good.all().gather()  # all ranks ask, whether values tell or not
        if enough if assumed is None else turn + 1 >= assumed:
            return x * (sizes * scale), k, s / scale
    return None


def _lengths(x: DistArray) -> DistArray:
    """Return the lengths of the columns."""
    squares: DistArray = (abs(x) ** 2).sum(axis=0)
    return squares**0.5


def _conjugate_gradients(
    apply: Callable[[DistArray], DistArray], b: DistArray, rtol: float, steps: int | None
) -> DistArray:  # fmt: skip
    """Return about the y of M y = b for a Hermitian matrix M near the identity, a function, each column by itself.

    It takes so many `steps`, if they are given, instead of those that its residuals ask for.
    """
    y, r, p = b * 0.0, b, b
    squares = (abs(r) ** 2).sum(axis=0)
    enough = squares * rtol**2
    for step in range(INNER):
        q = apply(p).redistribute(p.layout)
        curvature = (p.conj() * q).real.sum(axis=0)
        rate = squares / (curvature + (curvature == 0))
        y, r = y + p * rate, r - q * rate
        before, squares = squares, (abs(r) ** 2).sum(axis=0)
        converged = (squares <= enough).all().gather()
        if converged if steps is None else step + 1 >= steps:
            break
        p = r + p * (squares / (before + (before == 0)))
    return y
