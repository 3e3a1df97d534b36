"""The functions of NumPy that work on distributed arrays, through `__array_function__`.  Others are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array import create, reductions, shapes
from parlinalg.array.core import Axis, DistArray, same_grid
from parlinalg.array.ufuncs import PRODUCT, broadcast_layout, operand
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from parlinalg.redistribute import fitting

HANDLED: dict[Callable[..., Any], Callable[..., Any]] = {}


def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the distributed version of a NumPy function, or refuse it."""
    if function not in HANDLED:
        raise TypeError(
            f"np.{function.__name__} is not defined on distributed arrays; those that are: {', '.join(names())}. Or "
            "take the global array by gather()"
        )
    return HANDLED[function](*args, **kwargs)


def names() -> list[str]:
    """Return the functions of NumPy that take distributed arrays."""
    return sorted({f.__name__ if f is not np.linalg.norm else "linalg.norm" for f in HANDLED})


def _handles(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLED[function] = implementation
        return implementation

    return register


@_handles(np.sum)
def _sum(a: DistArray, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> DistArray:
    return a.sum(axis, dtype, bool(keepdims is True))


@_handles(np.mean)
def _mean(a: DistArray, axis: Axis = None, keepdims: bool = False) -> DistArray:
    return a.mean(axis, keepdims is True)


@_handles(np.var)
def _var(a: DistArray, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> DistArray:
    return reductions.variance(a, axis, ddof, keepdims is True)


@_handles(np.std)
def _std(a: DistArray, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> DistArray:
    return np.sqrt(reductions.variance(a, axis, ddof, keepdims is True))  # type: ignore[return-value]


def _extreme(name: str) -> Callable[..., DistArray]:
    def reduce(a: DistArray, axis: Axis = None, keepdims: bool = False) -> DistArray:
        return reductions.extreme(a, name, axis, keepdims is True)

    return reduce


for _name in ("max", "min", "any", "all", "prod"):
    HANDLED[getattr(np, _name)] = _extreme(_name)


@_handles(np.count_nonzero)
def _count_nonzero(a: DistArray, axis: Axis = None, *, keepdims: bool = False) -> DistArray:
    return (a != 0).sum(axis, np.int64, keepdims)


@_handles(np.linalg.norm)
def _norm(x: DistArray, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> DistArray:
    if ord not in (None, 2, "fro") or (ord == 2 and x.ndim != 1 and not isinstance(axis, int)):
        raise TypeError(
            f"np.linalg.norm(ord={ord!r}) is not defined on distributed arrays; the Euclidean and Frobenius norms are"
        )
    squares = (x * x.conj()).real if x.dtype.kind == "c" else x * x
    return np.sqrt(squares.sum(axis, None, keepdims))


@_handles(np.transpose)
def _transpose(a: DistArray, axes: Sequence[int] | None = None) -> DistArray:
    return a.transpose(axes) if axes is not None else a.T


@_handles(np.swapaxes)
def _swapaxes(a: DistArray, axis1: int, axis2: int) -> DistArray:
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return a.transpose(order)


@_handles(np.moveaxis)
def _moveaxis(a: DistArray, source: int, destination: int) -> DistArray:
    order = [d for d in range(a.ndim) if d != source % a.ndim]
    order.insert(destination % a.ndim, source % a.ndim)
    return a.transpose(order)


@_handles(np.reshape)
def _reshape(a: DistArray, shape: Any) -> DistArray:
    return shapes.reshape(a, shape)


@_handles(np.ravel)
def _ravel(a: DistArray) -> DistArray:
    return shapes.reshape(a, (-1,))


@_handles(np.expand_dims)
def _expand_dims(a: DistArray, axis: int) -> DistArray:
    at = axis % (a.ndim + 1)
    return shapes.reshape(a, (*a.shape[:at], 1, *a.shape[at:]))


@_handles(np.squeeze)
def _squeeze(a: DistArray, axis: Axis = None) -> DistArray:
    drop = [d for d, n in enumerate(a.shape) if n == 1] if axis is None else reductions.dims_of(axis, a.ndim)
    if any(a.shape[d] != 1 for d in drop):
        raise ValueError(f"squeeze takes dims of size 1; axis {axis} of shape {a.shape} is not")
    return shapes.reshape(a, tuple(n for d, n in enumerate(a.shape) if d not in drop))


@_handles(np.where)
def _where(condition: Any, x: Any = None, y: Any = None) -> DistArray:
    if x is None or y is None:
        raise TypeError("np.where(condition) alone is not defined on distributed arrays; give x and y, or gather()")
    values = [operand(v, "where") for v in (condition, x, y)]
    arrays = [reductions.summed(v, "where") for v in values if isinstance(v, DistArray)]
    same_grid(arrays)
    shape, layout = broadcast_layout(arrays, "where")
    block = arrays[0].xp.where(*(v.block if isinstance(v, DistArray) else v for v in values))
    return arrays[0].like(block, layout, shape)


@_handles(np.clip)
def _clip(a: DistArray, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> DistArray:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    a = a if low is None else np.maximum(a, low)
    return a if high is None else np.minimum(a, high)


@_handles(np.concatenate)
def _concatenate(arrays: Sequence[DistArray], axis: int = 0) -> DistArray:
    same_grid(list(arrays))
    first = arrays[0]
    dim = axis % first.ndim
    for a in arrays:
        if a.layout.dims[dim]:
            raise LayoutError(
                f"concatenate along dim {dim}, which {a.layout!r} cuts; redistribute to "
                f"{a.layout.with_dim(dim, None)!r} first"
            )
        rest = [n for d, n in enumerate(a.shape) if d != dim]
        if a.layout != first.layout or rest != [n for d, n in enumerate(first.shape) if d != dim]:
            raise LayoutError(
                f"concatenate takes equal layouts and shapes but for dim {dim}: {a.layout!r} {a.shape} meets "
                f"{first.layout!r} {first.shape}"
            )
    shape = tuple(sum(a.shape[dim] for a in arrays) if d == dim else n for d, n in enumerate(first.shape))
    return first.like(first.xp.concatenate([a.block for a in arrays], axis=dim), shape=shape)


@_handles(np.dot)
def _dot(a: DistArray, b: DistArray) -> DistArray:
    return a * b if not a.ndim or not b.ndim else PRODUCT[0](a, b)


@_handles(np.vdot)
def _vdot(a: DistArray, b: DistArray) -> DistArray:
    return (a.conj() * b).sum()


@_handles(np.trace)
def _trace(a: DistArray) -> DistArray:
    if a.ndim != 2:
        raise ValueError(f"trace takes a matrix, not an array of shape {a.shape}")
    mask = create.from_function(lambda i, j: i == j, a.shape, a.grid, a.layout.with_partial(()), np.bool_)
    return (np.where(mask, a, a.dtype.type(0))).sum()


@_handles(np.isclose)
def _isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> DistArray:
    near = abs(a - b) <= atol + rtol * abs(b)
    same = near | (a == b)
    return same | (np.isnan(a) & np.isnan(b)) if equal_nan else same


@_handles(np.allclose)
def _allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(_isclose(a, b, rtol, atol, equal_nan).all())


@_handles(np.array_equal)
def _array_equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _filled(value: Any) -> Callable[..., DistArray]:
    def make(a: DistArray, dtype: Any = None) -> DistArray:
        dtype = a.dtype if dtype is None else dtype
        block = a.grid.backend.empty(a.block.shape, np.dtype(dtype))
        if value is not None:
            block[...] = value
        return a.like(block, a.layout.with_partial(()))

    return make


HANDLED[np.zeros_like], HANDLED[np.ones_like], HANDLED[np.empty_like] = _filled(0), _filled(1), _filled(None)


@_handles(np.full_like)
def _full_like(a: DistArray, fill_value: Any, dtype: Any = None) -> DistArray:
    return _filled(fill_value)(a, dtype)


@_handles(np.copy)
def _copy(a: DistArray) -> DistArray:
    return a.copy()


@_handles(np.real)
def _real(a: DistArray) -> DistArray:
    return a.real


@_handles(np.imag)
def _imag(a: DistArray) -> DistArray:
    return a.imag


@_handles(np.round)
def _round(a: DistArray, decimals: int = 0) -> DistArray:
    return reductions.summed(a, "round").like(a.block.round(decimals))


@_handles(np.shape)
def _shape(a: DistArray) -> tuple[int, ...]:
    return a.shape


@_handles(np.ndim)
def _ndim(a: DistArray) -> int:
    return a.ndim


@_handles(np.size)
def _size(a: DistArray, axis: int | None = None) -> int:
    return math.prod(a.shape) if axis is None else a.shape[axis]


@_handles(np.broadcast_to)
def _broadcast_to(a: DistArray, shape: Any) -> DistArray:
    shape = tuple(shape)
    extra = len(shape) - a.ndim
    layout = fitting(Layout(*((),) * extra, *a.layout.dims, partial=a.layout.partial), shape, a.grid)
    for d, (n, want) in enumerate(zip(a.shape, shape[extra:], strict=True)):
        if n != want and (n != 1 or a.layout.dims[d]):
            raise ValueError(f"{a!r} does not broadcast to {shape}: dim {d} must be of size 1 and whole")
    block = a.xp.broadcast_to(a.block, a.grid.block_shape(layout, shape))
    return a.like(block, layout, shape)
