"""The product of a plan: operands move from rest to work, one local GEMM, the result moves from work to rest.

This kernel gathers whole panels; `parlinalg.matmul.stream` computes the same in bounded memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import effective, same_grid
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul.local import is_half, local_product
from parlinalg.matmul.node import at_work_for_now, multiplied
from parlinalg.moves import moves
from parlinalg.plan import Plan
from parlinalg.redistribute import redistribute

Block = Any
Shape = tuple[int, ...]


def result_shape(plan: Plan, x: Shape, w: Shape) -> Shape:
    """The global shape of y; a ValueError if b or k differ in x and w."""
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    if len(x) != nb + nm + nk or len(w) != nb + nk + len(plan.n):
        raise ValueError(
            f"a product of shapes {x} and {w} does not fit a plan of {nb} batch dims, {nm} m, {nk} k and {len(plan.n)} "
            "n"
        )
    if x[:nb] != w[:nb] or x[nb + nm :] != w[nb : nb + nk]:
        raise ValueError(
            f"shapes {x} and {w} do not multiply: batch dims {x[:nb]} and {w[:nb]}, contracted dims {x[nb + nm :]} and "
            f"{w[nb : nb + nk]}"
        )
    return (*x[: nb + nm], *w[nb + nk :])


def check_operands(plan: Plan, x: DistArray, w: DistArray) -> Grid:
    """Raise a LayoutError unless x and w rest as the plan says, on one grid."""
    grid = same_grid([x, w])
    for name, array, want in (("x", x, plan.x), ("w", w, plan.w)):
        want.check(array.shape, grid.sizes)
        if effective(array.layout, grid) != effective(want, grid):
            raise LayoutError(
                f"matmul: {name} has {array.layout!r}, the plan takes {want!r}; mend it by .redistribute({want!r})"
            )
    plan.y.check(result_shape(plan, x.shape, w.shape), grid.sizes)
    return grid


def at_work(array: DistArray, work: Layout) -> Block:
    """The block of an operand, moved to where the local product needs it."""
    return redistribute(array.block, array.layout, work, array.shape, array.grid, order=array.order)


def product(plan: Plan, x: DistArray, w: DistArray, out: DistArray | None = None) -> DistArray:
    """`y[*b, *m, *n] = sum over k of x[*b, *m, *k] w[*b, *k, *n]` by gathered panels.

    Collective over the plan's axes.  Holds the blocks at work of x, w and y beside those at rest.

    Parameters
    ----------
    out : DistArray, optional
        Receives y where it can be computed in place: host memory of y's shape, layout and dtype.  The array that holds
        y is returned, which is `out` or a new one.

    Raises
    ------
    LayoutError
        If an operand does not rest as the plan says.
    """
    grid = check_operands(plan, x, w)
    shape = result_shape(plan, x.shape, w.shape)
    dtype = np.result_type(x.dtype, w.dtype)
    if not grid.inside:
        return DistArray(grid.backend.empty((0,) * len(shape), dtype), shape, plan.y, grid)
    with at_work_for_now(x, plan.x_work) as xs, at_work_for_now(w, plan.w_work) as ws:
        if out is not None and _fits(out, plan, shape, dtype, grid):
            local_product(plan, xs, ws, dtype, out=out.block)
            return out
        return DistArray(multiplied(plan, xs, ws, shape, dtype, grid), shape, plan.y, grid)


def _fits(out: DistArray, plan: Plan, shape: Shape, dtype: Any, grid: Grid) -> bool:
    """Whether the local product is y at rest, and may be written to the block of `out`."""
    return (
        grid.backend.host_memory
        and not moves(plan.y_work, plan.y, grid.sizes)
        and out.shape == shape
        and out.dtype == dtype
        and not is_half(dtype)
        and effective(out.layout, grid) == effective(plan.y, grid)
        and out.block.flags.c_contiguous
    )
