"""`A @ B`: the public product of distributed arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import effective, mismatch, same_grid
from parlinalg.array.ufuncs import PRODUCT
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from parlinalg.matmul.assign import assign
from parlinalg.matmul.stream import within
from parlinalg.plan import Plan


def matmul(
    a: DistArray, b: DistArray, *, plan: Plan | None = None, alpha: complex = 1, beta: complex = 0,
    out: DistArray | None = None, layout: Layout | None = None, memory: int | str | None = None,
) -> DistArray:  # fmt: skip
    """`alpha a @ b + beta out`, with NumPy's rules for shapes.

    Parameters
    ----------
    a : DistArray
        Shape [*lead, m, k], or [k].
    b : DistArray
        Shape [k, n] or [k]; or [*lead, k, n] with the same leading dims as `a`; or with leading dims that `a` lacks.
    plan : Plan, optional
        Which axes cut b, m, n and k at work.  By default each axis of the grid is assigned so that the work is balanced
        to within 10%, and then so that the fewest words move, those that bring a and b from where they rest included
        (`parlinalg.matmul.assign`).
    alpha, beta : number
        With `beta`, `out` must be given.
    out : DistArray, optional
        Receives the result, in its own layout; it is returned.
    layout : Layout, optional
        Where the result rests.  By default an axis that cuts m or n (or a batch dim) at work cuts the same dim of the
        result, and the sum over axes that cut k is scattered over m or n (over whichever has the larger local piece),
        so that nothing is held twice.
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
        If an operand is partial, or does not rest as `plan` says.
    ValueError
        If the shapes do not multiply.
    """
    a, b = _array(a, "a"), _array(b, "b")
    grid = same_grid([a, b])
    for name, x in (("a", a), ("b", b)):
        if effective(x.layout, grid).partial:
            raise LayoutError(
                f"matmul: {name} is {x.layout!r}, not summed yet; sum it by "
                f".redistribute({x.layout.with_partial(())!r})"
            )
    if a.dtype.kind == b.dtype.kind == "b":
        raise TypeError("matmul: a product of two boolean arrays has no sum over ranks; make one .astype(np.int64)")
    if beta and out is None:
        raise ValueError(f"matmul: beta = {beta} needs out=, the array it multiplies")
    if out is not None:
        if layout is not None and effective(layout, grid) != effective(out.layout, grid):
            raise mismatch("matmul: layout= and the layout of out differ", layout, out.layout)
        same_grid([a, out])
        layout = out.layout
    y = _product(a, b, plan, layout, memory, None if beta or alpha != 1 else out)
    if y is out:
        return out
    if alpha != 1:
        y = y.like(y.block * alpha)
    if out is None:
        return y
    if out.shape != y.shape:
        raise ValueError(f"matmul: out has shape {out.shape}, the product {y.shape}")
    if effective(out.layout, grid) != effective(y.layout, grid):
        y = y.redistribute(out.layout)
    if beta:
        y = y.like(y.block + out.block * beta)
    if not np.can_cast(y.dtype, out.dtype, "same_kind"):
        raise TypeError(f"matmul: a result of dtype {y.dtype} does not fit out of dtype {out.dtype}")
    out.block[...] = y.block
    return out


def _array(value: Any, name: str) -> DistArray:
    if not isinstance(value, DistArray):
        raise TypeError(
            f"matmul: {name} is a {type(value).__name__}, not a DistArray; distribute it first: "
            "parlinalg.distribute(array, grid, layout)"
        )
    if not value.ndim:
        raise ValueError(f"matmul: {name} has no dims; multiply by a scalar with *")
    return value


def _product(
    a: DistArray,
    b: DistArray,
    plan: Plan | None,
    layout: Layout | None,
    memory: int | str | None,
    out: DistArray | None = None,
) -> DistArray:
    """The product, in a new array, or in `out` where it can be computed in place."""
    if plan is not None:
        if layout is not None and layout != plan.y:
            plan = replace(plan, y=layout)
        return within(memory, plan, a, b, out)
    if a.ndim == 1 or b.ndim == 1:
        return _with_vector(a, b, layout, memory)
    if b.ndim > 2 and a.ndim == 2:  # y[b, m, n] = a[m, k] b[b, k, n]: transposed, the batch is the left operand's alone
        turned = None if layout is None else layout.permuted((*range(b.ndim - 2), b.ndim - 1, b.ndim - 2))
        return _product(b.mT, a.T, None, turned, memory).mT
    shared = b.ndim - 2
    if shared and (a.ndim != b.ndim or a.shape[:shared] != b.shape[:shared]):
        raise ValueError(
            f"matmul: leading dims of shapes {a.shape} and {b.shape} differ; they must be equal, or missing in one"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: shapes {a.shape} and {b.shape} do not multiply: {a.shape[-1]} columns meet {b.shape[-2]} rows"
        )
    chosen = assign(a.layout, b.layout, a.shape, b.shape, tuple(a.grid.sizes.items()), layout, shared)
    return within(memory, chosen, a, b, out)


def _with_vector(a: DistArray, b: DistArray, layout: Layout | None, memory: int | str | None) -> DistArray:
    """A vector is a matrix with one row (left) or one column (right), whose dim is dropped from the result."""
    rows = a.ndim == 1
    if a.shape[-1] != b.shape[max(0, b.ndim - 2)]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} do not multiply")
    left = a[None] if rows else a
    right = b[:, None] if b.ndim == 1 else b
    want = layout
    if layout is not None:
        dims = list(layout.dims)
        if b.ndim == 1:
            dims.append(())
        if rows:
            dims.insert(len(dims) - 1, ())
        want = Layout(*dims, partial=layout.partial)
    y = _product(left, right, None, want, memory)
    drop = ([y.ndim - 2] if rows else []) + ([y.ndim - 1] if b.ndim == 1 else [])
    cut = y.layout
    for d in drop:  # a dim of one item is whole before it is dropped
        cut = cut.with_dim(d, None)
    y = y.redistribute(cut)
    shape = tuple(n for d, n in enumerate(y.shape) if d not in drop)
    final = Layout(*(c for d, c in enumerate(cut.dims) if d not in drop), partial=cut.partial)
    return y.like(y.block.reshape(y.grid.block_shape(final, shape)), final, shape)


PRODUCT[:] = [matmul]
