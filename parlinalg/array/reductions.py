"""Reductions over dims of a distributed array; over a cut dim they communicate: their meaning is a sum over it."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from parlinalg.array.core import Axis, DistArray
from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout, span_of
from parlinalg.redistribute import redistribute


def dims_of(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the dims of NumPy's `axis` argument, sorted."""
    if axis is None:
        return tuple(range(ndim))
    dims = tuple(axis) if isinstance(axis, tuple | list) else (operator.index(axis),)
    for d in dims:
        if not -ndim <= d < ndim:
            raise ValueError(f"axis {d} is out of bounds for an array of {ndim} dims")
    found = sorted({d % ndim for d in dims})
    if len(found) != len(dims):
        raise ValueError(f"axis {axis} names a dim twice")
    return tuple(found)


def reduced(a: DistArray, dims: tuple[int, ...], keepdims: bool) -> tuple[tuple[int, ...], Layout, Cut]:
    """Shape and layout (without partial axes) after reducing `dims`, and the axes that cut them."""
    over = tuple(axis for d in dims for axis in a.layout.dims[d])
    if keepdims:
        shape = tuple(1 if d in dims else n for d, n in enumerate(a.shape))
        layout = Layout(*(() if d in dims else cut for d, cut in enumerate(a.layout.dims)))
    else:
        shape = tuple(n for d, n in enumerate(a.shape) if d not in dims)
        layout = Layout(*(cut for d, cut in enumerate(a.layout.dims) if d not in dims))
    return shape, layout, over


def total(a: DistArray, axis: Axis, dtype: Any, keepdims: bool, partial: bool) -> DistArray:
    dims = dims_of(axis, a.ndim)
    shape, layout, over = reduced(a, dims, keepdims)
    terms = layout.with_partial((*a.layout.partial, *over))
    if a.dtype.itemsize == 2 and a.dtype.kind not in "iub" and dtype is None:  # terms of 16 bits are summed in 32
        block = a.xp.asarray(a.block.sum(axis=dims, dtype=np.float32, keepdims=keepdims)).astype(a.dtype)
    else:
        block = a.xp.asarray(a.block.sum(axis=dims, dtype=dtype, keepdims=keepdims))
    block = _outside(a, block, shape)
    if partial:
        return a.like(block, terms, shape)
    return a.like(redistribute(block, terms, layout, shape, a.grid, owned=True), layout, shape)


def _outside(a: DistArray, block: Any, shape: tuple[int, ...]) -> Any:
    """Ranks outside the grid keep blocks of size zero where the shape has dims."""
    return (
        block
        if a.grid.inside
        else a.grid.backend.zeros(a.grid.block_shape(Layout.replicated(len(shape)), shape), block.dtype)
    )


def summed(a: DistArray, name: str) -> DistArray:
    if a.layout.partial:
        raise LayoutError(
            f"{name} of {a.layout!r}, which is not summed yet; sum it by .redistribute({a.layout.with_partial(())!r})"
        )
    return a


def mean(a: DistArray, axis: Axis, keepdims: bool) -> DistArray:
    count = math.prod(a.shape[d] for d in dims_of(axis, a.ndim))
    sums = total(a, axis, np.float64 if a.dtype.kind in "iub" else None, keepdims, False)
    return sums / count if count else sums * float("nan")


def variance(a: DistArray, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> DistArray:
    """Mean first, then the centred squares."""
    dims = dims_of(axis, a.ndim)
    count = math.prod(a.shape[d] for d in dims)
    centred = summed(a, "var") - mean(a, dims, True)
    squares = centred * centred if a.dtype.kind != "c" else (centred * centred.conj()).real
    return total(squares, dims, None, keepdims, False) / max(0, count - ddof)


_IDENTITY = {"max": -math.inf, "min": math.inf, "any": False, "all": True}


def extreme(a: DistArray, name: str, axis: Axis, keepdims: bool) -> DistArray:
    """max, min, any, all and prod."""
    dims = dims_of(axis, summed(a, name).ndim)
    shape, layout, over = reduced(a, dims, keepdims)
    if name in ("max", "min"):
        if not math.prod(a.shape[d] for d in dims):
            raise ValueError(f"{name} over dims {dims} of an array of shape {a.shape}, which has no elements there")
        if a.dtype.kind == "c":
            raise TypeError(f"{name} of complex numbers, which have no order; use abs() first")
    if math.prod(a.block.shape[d] for d in dims):
        block = a.xp.asarray(getattr(a.block, name)(axis=dims, keepdims=keepdims))
    else:
        block = a.xp.full(
            tuple(1 if d in dims else n for d, n in enumerate(a.block.shape) if keepdims or d not in dims),
            _identity(name, a.dtype),
        )
    block = _outside(a, block, shape)
    over = tuple(axis for axis in a.grid.axes if axis in over and a.grid.sizes[axis] > 1)
    if not over or not a.grid.inside or not math.prod(shape):
        return a.like(block, layout, shape)
    if name == "prod":
        ranks = span_of(over, a.grid.sizes)
        stacked = Layout(over, *layout.dims)
        every = redistribute(block[None], stacked, stacked.with_dim(0, None), (ranks, *shape), a.grid)
        return a.like(a.xp.asarray(every.prod(axis=0, dtype=every.dtype)), layout, shape)
    comm, op = a.grid.comm(over), {"any": "max", "all": "min"}.get(name, name)
    if block.dtype.kind in "fV":  # MPI's max and min may lose a NaN: a second row says where one is
        nan = a.xp.isnan(block)
        sign = 1 if op == "max" else -1
        rows = a.xp.stack(
            [a.xp.where(nan, a.xp.asarray(-sign * np.inf, dtype=block.dtype), block), (sign * nan).astype(block.dtype)]
        )
        comm.all_reduce(rows, op=op)
        return a.like(a.xp.where(rows[1] == sign, a.xp.asarray(np.nan, dtype=block.dtype), rows[0]), layout, shape)
    out = (block.astype(np.uint8) if block.dtype.kind == "b" else block).copy(order="C")
    comm.all_reduce(out, op=op)
    return a.like(out.astype(block.dtype, copy=False), layout, shape)


def _identity(name: str, dtype: np.dtype[Any]) -> Any:
    if name in ("max", "min") and dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(info.min if name == "max" else info.max, dtype=dtype)[()]
    if name in ("any", "all"):
        return np.bool_(_IDENTITY[name])
    if name in ("max", "min") and dtype.kind == "b":
        return np.bool_(name == "min")
    if name == "prod":
        return np.ones(0, dtype).prod()  # in the dtype of a product of items, which is wider for short integers
    return np.asarray(_IDENTITY[name], dtype=dtype)[()]


_BY_UFUNC = {
    np.maximum: "max", np.minimum: "min", np.logical_or: "any", np.logical_and: "all", np.multiply: "prod",
}  # fmt: skip


def reduce_ufunc(
    ufunc: np.ufunc,
    a: DistArray,
    axis: Axis = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: bool = False,
    **other: Any,
) -> DistArray:
    """`ufunc.reduce` for sums, products, extremes and logical and/or."""
    if out is not None and out != (None,):
        raise TypeError(f"np.{ufunc.__name__}.reduce(out=) is not defined on distributed arrays; assign the result")
    unknown = [k for k, v in other.items() if v is not True and v is not np._NoValue]
    if unknown or not (ufunc is np.add or ufunc in _BY_UFUNC):
        raise TypeError(
            f"np.{ufunc.__name__}.reduce{f'({unknown[0]}=)' if unknown else ''} is not defined on distributed arrays; "
            "gather() first"
        )
    if ufunc is np.add:
        return total(a, axis, dtype, keepdims, False)
    return extreme(a if dtype is None else a.astype(dtype), _BY_UFUNC[ufunc], axis, keepdims)
