"""`A @ B`: the public product of distributed arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.align import broadcast_shape, is_explicit
from parlinalg.array.core import delivered, mismatch, same_grid
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import broadcast_to
from parlinalg.array.ufuncs import PRODUCT
from parlinalg.backend.halves import work_dtype
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from parlinalg.matmul.assign import assign
from parlinalg.matmul.execute import check_operands, execute
from parlinalg.plan import Plan, Shape


@primitive
def matmul(
    a: DistArray, b: DistArray, *, plan: Plan | None = None, alpha: complex = 1, beta: complex = 0,
    out: DistArray | None = None, layout: Layout | None = None, memory: int | str | None = None,
) -> DistArray:  # fmt: skip
    """Return `alpha a @ b + beta out`, with NumPy's rules for shapes; of two boolean arrays, where a sum is not 0.

    Parameters
    ----------
    a : DistArray
        Shape [*lead, m, k], or [k].
    b : DistArray
        Shape [k, n] or [k]; or [*lead, k, n], whose leading dims broadcast with those of `a`.
    plan : Plan, optional
        Axes that cut b, m, n and k at work.  By default each axis of the grid is assigned so that the work is balanced
        to within 10%, and then so that the fewest words move, those that bring a and b from where they rest included
        (`parlinalg.matmul.assign`).
    alpha, beta : number
        With `beta`, `out` must be given.
    out : DistArray, optional
        Receives the result, in its own layout; it is returned.
    layout : Layout, optional
        The layout of the result.  By default an axis that cuts m or n (or a batch dim) at work cuts the same dim of the
        result, and the sum over axes that cut k is scattered over m or n (over whichever has the larger local piece),
        so that nothing is held twice.  The product of a matrix and a vector lies as the vector.
    memory : int or str, optional
        Bytes a rank may use beside its blocks of a, b and the result, such as `"64MiB"`.  Where the gathered panels
        would take more, panels are streamed instead (SUMMA); a PlanError says the least that would do.

    Returns
    -------
    DistArray
        On a's grid.

    Raises
    ------
    LayoutError
        If an operand does not rest as `plan` says; within `explicit()` also if one is partial.
    ValueError
        If the shapes do not multiply.
    """
    a, b = _array(a, "a"), _array(b, "b")
    grid = same_grid([a, b])
    if plan is None and not is_explicit():
        a, b = a.summed(), b.summed()
        if layout is None and out is None and 1 in (a.ndim, b.ndim) and {a.ndim, b.ndim} == {1, 2}:
            layout = b.layout if b.ndim == 1 else a.layout
        if a.ndim > 2 < b.ndim and a.shape[:-2] != b.shape[:-2]:
            lead = broadcast_shape([a.shape[:-2], b.shape[:-2]], "matmul")
            a, b = broadcast_to(a, (*lead, *a.shape[-2:])), broadcast_to(b, (*lead, *b.shape[-2:]))
    if a.dtype.kind == b.dtype.kind == "b":
        if alpha != 1 or beta:
            raise TypeError("matmul: alpha and beta are for numbers, not for a product of two boolean arrays")
        counts = matmul(a.astype(np.float32), b.astype(np.float32), plan=plan, layout=layout, memory=memory)
        return delivered(counts != 0, out, "matmul")
    if beta and out is None:
        raise ValueError(f"matmul: beta = {beta} needs out=, the array it multiplies")
    if out is not None:
        if layout is not None and grid.effective(layout) != grid.effective(out.layout):
            raise mismatch("matmul: layout= and the layout of out differ", layout, out.layout)
        same_grid([a, out])
        layout = out.layout
    inside = None if out is None or beta or alpha != 1 else out

    def run(x: DistArray, w: DistArray, plan: Plan, swapped: bool) -> DistArray:
        shape = check_operands(plan, x, w)
        into = None
        if inside is not None and not swapped and _can_write_to(inside, plan, shape, x, w):
            into = inside.destination()
        block = execute(plan, x, w, out=into, memory=memory)
        if inside is None or block is not into:
            return DistArray(block, shape, plan.y, grid)
        inside.adopt(block)
        return inside

    if plan is None:
        y = by_shapes(a, b, run, layout, "ab")
    else:
        _check_summed("ab", (a, b))
        y = run(a, b, plan if layout is None or layout == plan.y else replace(plan, y=layout), False)
    if y is out:
        return out
    if alpha != 1:
        y = y.like(y.block * alpha)
    if out is None:
        return y
    if out.shape != y.shape:
        raise ValueError(f"matmul: out has shape {out.shape}, the product {y.shape}")
    if grid.effective(out.layout) != grid.effective(y.layout):
        y = y.redistribute(out.layout)
    if beta:
        y = y.like(y.block + out.block * beta)
    if not np.can_cast(y.dtype, out.dtype, "same_kind"):
        raise TypeError(f"matmul: a result of dtype {y.dtype} does not fit out of dtype {out.dtype}")
    into = out.destination()
    into[...] = y.block
    out.adopt(into)
    return out


def _array(value: Any, name: str) -> DistArray:
    if not isinstance(value, DistArray):
        raise TypeError(
            f"matmul: {name} is a {type(value).__name__}, not a DistArray; distribute it first: "
            "parlinalg.distribute(array[, grid, layout])"
        )
    return value


def _check_summed(names: str, operands: tuple[Any, Any]) -> None:
    for name, x in zip(names, operands, strict=True):
        if not x.ndim:
            raise ValueError(f"matmul: {name} has no dims; multiply by a scalar with *")
        if x.grid.effective(x.layout).partial:
            raise LayoutError(
                f"matmul: {name} is {x.layout!r}, not summed yet; sum it by "
                f".redistribute({x.layout.with_partial(())!r})"
            )


def _can_write_to(out: DistArray, plan: Plan, shape: Shape, x: DistArray, w: DistArray) -> bool:
    """Return True if the product may be written to the block of `out`."""
    dtype, grid = np.result_type(x.dtype, w.dtype), out.grid
    return (
        grid.backend.host_memory
        and out.shape == shape
        and out.dtype == dtype
        and work_dtype(dtype) == dtype
        and grid.effective(out.layout) == grid.effective(plan.y)
        and out.block.flags.c_contiguous
    )


def by_shapes(
    a: Any, b: Any, run: Callable[[Any, Any, Plan, bool], Any], layout: Layout | None = None, names: str = "xw",
    swapped: bool = False,
) -> Any:  # fmt: skip
    """Return `a @ b` by NumPy's rules for shapes.

    Parameters
    ----------
    a, b : DistArray or Tensor
        Both of one kind.
    run : callable
        Multiplies x[*b, *m, k] and w[*b, k, n] by a plan; given these, the plan, and True if x comes from b and w from
        a.
    layout : Layout, optional
        The layout of the result.
    names : str
        The operands' names in messages.
    """
    _check_summed(names, (a, b))
    if a.ndim == 1 or b.ndim == 1:
        return _with_vector(a, b, run, layout, names)
    if b.ndim > 2 and a.ndim == 2:  # y[b, m, n] = a[m, k] b[b, k, n]: transposed, the batch is the left operand's alone
        turned = None if layout is None else layout.permuted((*range(b.ndim - 2), b.ndim - 1, b.ndim - 2))
        return by_shapes(b.mT, a.T, run, turned, names, swapped=True).mT
    shared = b.ndim - 2
    if shared and (a.ndim != b.ndim or a.shape[:shared] != b.shape[:shared]):
        raise ValueError(
            f"matmul: leading dims of shapes {a.shape} and {b.shape} differ; they must be equal, or missing in one"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: shapes {a.shape} and {b.shape} do not multiply: {a.shape[-1]} columns meet {b.shape[-2]} rows"
        )
    plan = assign(a.layout, b.layout, a.shape, b.shape, tuple(a.grid.sizes.items()), layout, shared)
    return run(a, b, plan, swapped)


def _with_vector(a: Any, b: Any, run: Callable[..., Any], layout: Layout | None, names: str) -> Any:
    """Multiply with a vector as a matrix of one row (left) or one column (right), and drop that dim."""
    row, column = a.ndim == 1, b.ndim == 1
    if a.shape[-1] != b.shape[max(0, b.ndim - 2)]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} do not multiply")
    want = layout
    if layout is not None:
        dims = [*layout.dims, *[()] * column]
        if row:
            dims.insert(len(dims) - 1, ())
        want = Layout(*dims, partial=layout.partial)
    y = by_shapes(a[None] if row else a, b[:, None] if column else b, run, want, names)
    cut = y.layout
    for d in (-2,) * row + (-1,) * column:  # a dim of one item is whole before it is dropped
        cut = cut.with_dim(d, None)
    return y.redistribute(cut)[(..., 0 if row else slice(None), 0 if column else slice(None))]


PRODUCT[:] = [matmul]
