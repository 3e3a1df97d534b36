"""Solutions of systems of equations, inverses and determinants of distributed matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, same_grid
from parlinalg.array.dispatch import primitive
from parlinalg.array.namespace import tril, triu
from parlinalg.array.shapes import reshape
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import Factor, Identity, SlogdetResult
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.iterative.minimal_residuals import gmres
from parlinalg.linalg.iterative.vectors import assumed_steps
from parlinalg.linalg.matrices import (
    SINGULAR,
    LinAlgError,
    as_matrix,
    batches,
    checked_tiles,
    refuse_nonfinite,
    tiles_for,
)
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.stacks import LocalLU
from parlinalg.linalg.tiles import count_worst, worst
from parlinalg.matmul import matmul
from parlinalg.redistribute import count

LOWER = {"d": np.dtype(np.float32), "D": np.dtype(np.complex64)}
ROUNDS = 5
"""Times that a solution is refined by each way before the next is tried."""


@primitive
def solve(x1: DistArray, x2: DistArray, /, *, refine: bool = False, depth: int | None = None) -> DistArray:
    """Return x of A x = b for square matrices A = `x1` and b = `x2`, in the layout of b.

    Parameters
    ----------
    x1 : DistArray [..., n, n]
    x2 : DistArray [n] or [..., n, k]
        One vector, or matrices.
    refine : bool
        Factor one matrix of float64 (complex128) in float32 (complex64), which moves half the bytes, and
        refine the solution by residuals of full precision until it is as accurate as without: by GMRES with the
        factors, where they alone do not suffice (Carson and Higham 2017).  A matrix too ill conditioned for that is
        factored once more, in full precision.
    depth : int, optional
        As in `cho_factor`.

    Raises
    ------
    LinAlgError
        If a matrix is singular.
    TypeError
        If `refine` is given for numbers of half the precision, or for stacks.
    """
    return refined(x1, x2, depth) if refine else solved(x1, x2, depth)[0]


def refined(a: DistArray, b: DistArray, depth: int | None = None) -> DistArray:
    """Return x of A x = b by a factorization in half the precision; see `solve`."""
    a, b, dtype = refinable(a, b)
    _, depth = checked_tiles("solve", a, None, depth)
    n = a.shape[-1]
    if b.shape[0] != n:
        raise ValueError(f"solve takes right-hand sides of {n} rows, not of shape {b.shape}")
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    if b.ndim == 1:
        return reshape(refined(a, b[:, None], depth), (n,)).redistribute(b.layout.with_partial(()))
    if not b.size:
        return solved(a, b, depth)[0]
    largest, side = float(abs(a).max()), float(abs(b).max())
    if not largest or not all(map(math.isfinite, (largest, 1 / largest, side))):
        return solved(a, b, depth)[0]
    unit, other = kernels.unit(largest, dtype), kernels.unit(side, dtype)
    if unit != 1 or other != 1:  # sums of elements, by which residuals are judged, are to stay in range
        x = refined(a * unit, b * other, depth)
        with np.errstate(over="ignore"):
            for half in kernels.halves(unit, other):
                x = x * half
            return x
    try:
        factor = LUFactor((a * (1 / largest)).astype(LOWER[dtype.char]), depth=depth, name="solve")
        factor.check()
    except LinAlgError:
        return solved(a, b, depth)[0]

    def approximate(r: DistArray) -> DistArray:
        sizes = abs(r).max(axis=0)
        return factor.solution(kernels.quotients(r, sizes).astype(factor.dtype)).astype(dtype) * (sizes / largest)

    bound = float(abs(a).sum(axis=1).max()) * float(np.finfo(dtype).eps) * math.sqrt(n)
    assumed = assumed_steps(b, "refinements", "how often a solution is corrected")

    def lacking(x: DistArray, r: DistArray, turn: int) -> np.ndarray:
        """Return the columns whose residual is larger than rounding makes it (LAPACK's `dsgesv`)."""
        excess = (abs(r).max(axis=0) - bound * abs(x).max(axis=0)).gather()
        return np.flatnonzero(~(excess <= 0) if assumed is None else np.full(b.shape[1], turn < assumed))

    x = approximate(b)
    for turn in range(2 * ROUNDS):
        r = b - matmul(a, x)
        left = lacking(x, r, turn)
        if not len(left):
            return x.redistribute(b.layout.with_partial(()))
        if turn < ROUNDS:
            x = x + approximate(r)
            continue
        for j in left.tolist():
            step, _ = gmres(a, r[:, j], rtol=1e-6, restart=min(n, 30), maxiter=1, M=approximate)
            x[:, j] += step
    return solved(a, b, depth)[0]


def refinable(a: DistArray, b: DistArray) -> tuple[DistArray, DistArray, np.dtype[Any]]:
    """Return a system that `solve` can refine, and its dtype; raise TypeError of any other."""
    a, b = as_matrix(a, "solve", square=True), as_matrix(b, "solve", vectors=True)
    same_grid([a, b])
    dtype = np.result_type(a.dtype, b.dtype)
    if dtype.char not in LOWER or a.ndim > 2 or b.ndim > 2:
        raise TypeError(
            f"solve(refine=True) takes one matrix of float64 or complex128, not {dtype} of shapes {a.shape}, {b.shape}"
        )
    return a, b, dtype


def solved(a: DistArray, b: DistArray, depth: int | None = None) -> tuple[DistArray, LUFactor | None]:
    """Return x of A x = b, and of one matrix the factorization; of stacks None."""
    a, b = as_matrix(a, "solve", square=True), as_matrix(b, "solve", vectors=True)
    same_grid([a, b])
    if b.shape[: 1 if b.ndim == 1 else -1][-1:] != a.shape[-1:]:
        raise ValueError(f"solve takes right-hand sides of {a.shape[-1]} rows, not of shape {b.shape}")
    dtype = np.result_type(a.dtype, b.dtype)
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    if b.ndim == 1:
        x, factor = solved(a, b[:, None], depth)
        x = reshape(x, (*a.shape[:-1],))
        return (x if a.ndim > 2 else x.redistribute(b.layout.with_partial(()))), factor
    _, depth = checked_tiles("solve", a if a.ndim > 2 else b if b.ndim > 2 else a, None, depth)
    if a.ndim > 2 or b.ndim > 2:
        return batches("solve", _solutions, solve, a, b, like=1)[0], None
    factor = LUFactor(a, b=b, depth=depth, name="solve")  # with the right-hand sides as further columns
    return factor.carried(b), factor


def solution(a: DistArray, b: DistArray) -> DistArray:
    """Return what `solve` does of matrices a and b of fitting shapes; NaNs and infinities of b make NaNs of x."""
    dtype = np.result_type(a.dtype, b.dtype)
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    if a.ndim == b.ndim == 2:
        return LUFactor(a, name="solve").solution(b)
    return batches("solve", _solutions, solution, a, b, like=1, check=False)[0]


def _solutions(xp: Any, a: Any, b: Any) -> Any:
    """Return x of A x = b, of stacks of matrices that a rank has."""
    return _naming_pivot(lambda a: kernels.stacked(kernels.routines(a).solve, _solution, a, b), a)


def _solution(a: Any, b: Any) -> Any:
    """Return x of A x = b, of one matrix on the host."""
    factor = LocalLU(a)
    if factor.zero is not None:
        raise LinAlgError(SINGULAR.format(factor.zero))
    return factor.solution(b)


def _inverses(xp: Any, a: Any) -> Any:
    """Return the inverses of a stack of matrices that a rank has."""
    return _naming_pivot(lambda a: kernels.stacked(xp.linalg.inv, _inverse, a), a)


def _inverse(a: Any) -> Any:
    """Return the inverse of one matrix on the host."""
    return _solution(a, np.eye(len(a), dtype=a.dtype))


def _naming_pivot(function: Callable[[Any], Any], a: Any) -> Any:
    """Return a function of a rank's stack; of a single matrix an error names the first zero pivot."""
    try:
        return function(a)
    except LinAlgError:
        if math.prod(a.shape[:-2]) == 1 and (zero := LocalLU(a.reshape(a.shape[-2:])).zero) is not None:
            raise LinAlgError(SINGULAR.format(zero)) from None
        raise


@primitive
def inv(x: DistArray, /) -> DistArray:
    """Return the inverses of square matrices [..., n, n], in their layout.

    Raises
    ------
    LinAlgError
        If a matrix is singular.
    """
    x = as_matrix(x, "inv", square=True)
    if x.ndim > 2:
        return batches("inv", _inverses, inv, x)[0]
    one = Identity(x.shape, x.layout.with_partial(()))  # type: ignore[arg-type]
    return LUFactor(x, b=one, name="inv").carried(one, last=True)


@primitive
def det(x: DistArray, /) -> DistArray:
    """Return the determinants of square matrices."""
    x = as_matrix(x, "det", square=True)
    if x.ndim > 2:
        return batches("det", lambda xp, a: kernels.stacked(xp.linalg.det, lambda a: LocalLU(a).det(), a), det, x)[0]
    return LUFactor(x, name="det").det()


@primitive
def slogdet(x: DistArray, /) -> SlogdetResult:
    """Return the signs (or phases) of the determinants of square matrices and the logarithms of their sizes."""
    x = as_matrix(x, "slogdet", square=True)
    if x.ndim > 2:

        def local(xp: Any, a: Any) -> Any:
            return tuple(kernels.stacked(xp.linalg.slogdet, lambda a: LocalLU(a).slogdet(), a))

        return SlogdetResult(*batches("slogdet", local, slogdet, x))
    return LUFactor(x, name="slogdet").slogdet()


@primitive
def solve_triangular(
    a: DistArray, b: DistArray, *, lower: bool = False, adjoint: bool = False, unit_diagonal: bool = False
) -> DistArray:
    """Return x of A x = b for triangular matrices, or with `adjoint` of Aᴴ x = b, in the layout of b.

    Parameters
    ----------
    a : DistArray [..., n, n]
        The other triangle is not read.
    b : DistArray [n] or [..., n, k]

    Raises
    ------
    LinAlgError
        If an element of the diagonal is 0, which it names.
    """
    return triangular_solution(a, b, lower=lower, adjoint=adjoint, unit_diagonal=unit_diagonal, check=True)


def triangular_solution(
    a: DistArray, b: DistArray, *, lower: bool = False, adjoint: bool = False, unit_diagonal: bool = False,
    check: bool = False,
) -> DistArray:  # fmt: skip
    """Return what `solve_triangular` does; without `check`, NaNs and infinities make NaNs of x."""
    a, b = as_matrix(a, "solve_triangular", square=True), as_matrix(b, "solve_triangular", vectors=True)
    same_grid([a, b])
    if b.shape[: 1 if b.ndim == 1 else -1][-1:] != a.shape[-1:]:
        raise ValueError(f"solve_triangular takes right-hand sides of {a.shape[-1]} rows, not of shape {b.shape}")
    dtype = np.result_type(a.dtype, b.dtype)
    given = {"lower": bool(lower), "adjoint": bool(adjoint), "unit": bool(unit_diagonal)}
    if a.ndim > 2 or b.ndim > 2:
        return _stacks_of_triangles(a.astype(dtype, copy=False), b.astype(dtype, copy=False), given, check)
    a, b = (x if x.dtype == dtype else x.astype(dtype) for x in (a, b))
    a, n = a.summed() if a.layout.partial else a, a.shape[0]
    few = a.grid.size == 1 or math.prod(b.shape[1:]) <= triangular.FEW
    finite = False  # as far as all ranks know
    with np.errstate(all="ignore"):
        if few:
            x, finite = _at_rest(a, b if b.ndim == 2 else b[:, None], **given)
            x, target = x if b.ndim == 2 else reshape(x, (n,)), b.layout.with_partial(())
            x = x if x.layout == target else x.redistribute(target)
        else:
            held = Factor(a)
            held.tiles = tiles_for(a, None, "solve_triangular")
            rows, columns = held.tiles.rows(n), held.tiles.columns(n)
            y, sides, matrix = held._right_hand_sides(b, rows, n)
            triangular.substitute(held.tiles, held.tiles.bring(a, rows, columns), rows, y, n, sides, **given)
            x = held._home(y, rows, sides, n, matrix, b)
    finite = finite or _alone(a, x, unit_diagonal)
    if not finite:
        refuse_singular(a, x, unit=unit_diagonal, given=b if check else None, lower=lower)
    return x


def _alone(a: DistArray, x: DistArray, unit: bool) -> bool:
    """Return True if one rank finds the solution finite; a zero on the diagonal makes infinities or NaNs."""
    if a.grid.world.size > 1 or not x.size:
        return False
    return kernels.finite(x.block, *([] if unit else [a.block.diagonal()]))


def refuse_singular(
    a: DistArray, x: DistArray, *, unit: bool, given: DistArray | None = None, lower: bool = False
) -> None:  # fmt: skip
    """Raise if a triangle A, by which a solution x was found, is singular; `unit` if its diagonal is taken to be ones.

    With the right-hand sides `given`, NaNs and infinities of these and of the triangle are refused, too.  Collective.
    """
    if _alone(a, x, unit):
        return
    finite, zero = (True, 0) if unit else _diagonal(a)
    nonfinite, zero = map(int, worst(a.grid, [not (finite and kernels.finite(x.block)), zero]))
    if given is not None and (nonfinite or zero):  # by what was given?
        nonfinite = not all(kernels.finite(each.block) for each in ((tril if lower else triu)(a), given))
        refuse_nonfinite(worst(a.grid, [nonfinite])[0], "solve_triangular")
    if zero:
        k = a.shape[0] - zero
        raise LinAlgError(f"the matrix is singular: element [{k}, {k}] of its diagonal is 0")


def _at_rest(a: DistArray, b: DistArray, *, lower: bool, adjoint: bool, unit: bool) -> tuple[DistArray, bool]:
    """Return x of op(A) x = b for few right-hand sides, which move to where A lies.

    The second result is True if all ranks know that x and the diagonal are finite.
    """
    grid, layout, n, sides = a.grid, a.layout, a.shape[0], b.shape[1]
    (first, second), own = layout.dims[::-1] if adjoint else layout.dims, b.layout
    cuts = (first, second)
    if not grid.inside:
        return DistArray(grid.backend.empty((0, 0), a.dtype), (n, sides), own.with_partial(()), grid), False
    t, lower, y = a.block.T if adjoint else a.block, lower != adjoint, b.block.conj() if adjoint else b.block
    if grid.size == 1:
        x = y.copy(order="C")
        kernels.substitute(t, x, lower=lower, unit=unit)
        return DistArray(x.conj() if adjoint else x, b.shape, own.with_partial(()), grid), False
    if not own.partial:
        found = triangular.solved_in_common(
            grid, cuts, t, y, grid.block(own, b.shape), (n, sides), lower=lower, unit=unit
        )  # fmt: skip
        if found is not None:
            x, finite = found
            if grid.everyone.books:
                for src, dst in ((own, Layout(first, None)), (Layout(second, None), own)):
                    count(src, dst, b.shape, grid, a.dtype)
            finite = finite and grid.world.size == grid.size
            if finite:
                count_worst(grid, 2)
            return DistArray(x.conj() if adjoint else x, b.shape, own, grid), finite
    rows, columns, pieces, _, _ = triangular.resting(cuts, tuple(grid.sizes.items()), n, lower)
    down, across = (grid.comm(cut) for cut in cuts)
    b = b.redistribute(Layout(first, None))
    y = b.block.conj() if adjoint else b.block
    x = triangular.solved(down, across, t, (rows, columns), y, pieces, lower=lower, unit=unit, blocks=True)
    return DistArray(x.conj() if adjoint else x, (n, sides), Layout(second, None), grid), False


def _diagonal(a: DistArray) -> tuple[bool, int]:
    """Return of what this rank has of the diagonal whether it is finite, and n less the number of its first 0, or 0."""
    if not a.grid.inside:
        return True, 0
    rows, columns = a.grid.block(a.layout, a.shape)
    first, last = max(rows.start, columns.start), min(rows.stop, columns.stop)
    own = a.block[first - rows.start :, first - columns.start :].diagonal()[: max(0, last - first)]
    zeros = kernels.zeros(own)
    return kernels.finite(own), a.shape[0] - first - int(zeros[0]) if len(zeros) else 0


def _stacks_of_triangles(a: DistArray, b: DistArray, given: dict[str, bool], check: bool) -> DistArray:
    if b.ndim == 1:
        return reshape(_stacks_of_triangles(a, b[:, None], given, check), a.shape[:-1])
    lower, adjoint, unit = given["lower"], given["adjoint"], given["unit"]
    a = (tril if lower else triu)(a, k=(-1 if lower else 1) * unit)  # what is not read may be anything

    def local(xp: Any, p: Any, q: Any) -> Any:
        return kernels.triangles(p, q, **given)

    def one(p: DistArray, q: DistArray) -> DistArray:
        return triangular_solution(p, q, lower=lower, adjoint=adjoint, unit_diagonal=unit, check=check)

    return batches("solve_triangular", local, one, a, b, like=1, check=check)[0]
