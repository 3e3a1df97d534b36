"""Reductions over dims of a distributed array; over a cut dim they communicate: their meaning is a sum over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.align import is_explicit
from parlinalg.array.core import Axis, DistArray, delivered, dims_in_order, native, terms_add
from parlinalg.array.dispatch import primitive, takes_over
from parlinalg.backend import namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import spans
from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout, span_of
from parlinalg.redistribute import redistribute


def sorted_dims(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the dims of NumPy's `axis` argument in rising order, for None all."""
    return tuple(range(ndim)) if axis is None else tuple(sorted(dims_in_order(axis, ndim)))


def reduced(a: DistArray, dims: tuple[int, ...], keepdims: bool) -> tuple[tuple[int, ...], Layout, Cut]:
    """Return shape and layout (without partial axes) after reducing `dims`, and the axes that cut them."""
    over = tuple(axis for d in dims for axis in a.layout.dims[d])
    if keepdims:
        shape = tuple(1 if d in dims else n for d, n in enumerate(a.shape))
        layout = Layout(*(() if d in dims else cut for d, cut in enumerate(a.layout.dims)))
    else:
        shape = tuple(n for d, n in enumerate(a.shape) if d not in dims)
        layout = Layout(*(cut for d, cut in enumerate(a.layout.dims) if d not in dims))
    return shape, layout, over


@primitive
def total(
    a: DistArray, axis: Axis, dtype: Any = None, keepdims: bool = False, partial: bool = False, out: Any = None
) -> DistArray:
    """Return the sum over `axis`, with `partial` not summed yet over the axes that cut it."""
    dims = sorted_dims(axis, a.ndim)
    given = native(np.dtype(dtype)) if dtype is not None else None
    if a.layout.partial and a.grid.effective(a.layout).partial:
        a = a if terms_add(a.dtype, _sum_dtype(a.dtype) if given is None else given) else a.summed()
    shape, layout, over = reduced(a, dims, keepdims)
    terms = layout.with_partial((*a.layout.partial, *over))
    half = work_dtype(a.dtype) != a.dtype and (given is None or given == a.dtype)  # terms of 16 bits are summed in 32
    block = a.xp.asarray(a.block.sum(axis=dims, dtype=np.float32 if half else given, keepdims=keepdims))
    block = _outside(a, block, shape)
    if not partial:
        block, terms = redistribute(block, terms, layout, shape, a.grid, owned=True), layout
    return delivered(a.like(block.astype(a.dtype) if half else block, terms, shape), out, "sum")


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a sum of items of `dtype`, which is wider for short integers."""
    return np.ones(0, dtype).sum().dtype


def _outside(a: DistArray, block: Any, shape: tuple[int, ...]) -> Any:
    """Return the block of a rank outside the grid: of size zero where the shape has dims."""
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


def settled(a: DistArray, name: str) -> DistArray:
    """Return the array with nothing left to sum; within `explicit()` an error if something is."""
    if is_explicit():
        return summed(a, name)
    return a.summed() if a.layout.partial else a


@primitive
def mean(a: DistArray, axis: Axis, dtype: Any = None, keepdims: bool = False, out: Any = None) -> DistArray:
    """Return the mean over `axis`; of integers in float64, of 16-bit floats computed in float32."""
    count = math.prod(a.shape[d] for d in sorted_dims(axis, a.ndim))
    result, work = _dtypes(a.dtype, dtype)
    sums = total(a, axis, work, keepdims)
    block = sums.block / count if count else sums.block * math.nan
    return delivered(sums.like(_as(block, result)), out, "mean")


@primitive
def variance(
    a: DistArray, axis: Axis = None, ddof: float = 0, keepdims: bool = False, dtype: Any = None, root: bool = False,
    where: Any = True, center: Any = None,
) -> DistArray:  # fmt: skip
    """Return the variance over `axis`, or with `root` the standard deviation: mean first, then the centred squares.

    Parameters
    ----------
    where : bool or DistArray
        The elements that count.
    center : DistArray, optional
        The mean, if it is known; it broadcasts to the array.
    """
    dims = sorted_dims(axis, a.ndim)
    count = math.prod(a.shape[d] for d in dims)
    result, work = _dtypes(a.dtype, dtype)
    a = settled(a, "std" if root else "var")
    known = center is not None
    if center is None:
        center = mean(a, dims, work, True) if where is True else mean_of(a, dims, work, True, None, where)
    if result.kind == "c":
        result = np.empty(0, result).real.dtype
    if where is True and not known and a.ndim and a.grid.inside:
        shape, layout, over = reduced(a, dims, keepdims)
        block = _centred_squares(a.block, center.block, dims, keepdims)
        block = redistribute(block, layout.with_partial(over), layout, shape, a.grid, owned=True)
        block = block / max(0, count - ddof)
        return a.like(_as(a.xp.sqrt(block) if root else block, result), layout, shape)
    centred = a - center
    if where is not True:
        squares = total(chosen_by(where, _squares(centred), 0, "var"), dims, None, keepdims)
        spread = squares / np.maximum(number_of(where, a, dims, keepdims) - ddof, 0.0)
        return (np.sqrt(spread) if root else spread).astype(result, copy=False)
    squares = total(_squares(centred), dims, None, keepdims)
    block = squares.block / max(0, count - ddof)
    return squares.like(_as(a.xp.sqrt(block) if root else block, result))


def _centred_squares(block: Any, center: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    """Return the sums over dims of the squares of `block - center`, taken some rows at a time: they stay in the cache.

    `center` has length 1 in those dims, and that of the block in the others.
    """
    found: list[Any] = []
    for rows in spans(block.shape[0], block, math.prod(block.shape[1:])) or [slice(0)]:
        part = block[rows] - (center if 0 in dims else center[rows])
        part = part.real * part.real + part.imag * part.imag if part.dtype.kind == "c" else part * part
        part = part.sum(axis=dims, keepdims=keepdims)
        if 0 in dims and found:
            found[0] += part
        else:
            found.append(part)
    xp = namespace(found[0])
    return xp.asarray(found[0]) if len(found) == 1 else xp.concatenate(found)


def _dtypes(dtype: np.dtype[Any], given: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype of a mean, and the one in which it is computed."""
    result = native(np.dtype(np.float64 if dtype.kind in "iub" else dtype)) if given is None else np.dtype(given)
    return native(result), work_dtype(native(result))


def _as(block: Any, dtype: np.dtype[Any]) -> Any:
    return block if block.dtype == dtype else block.astype(dtype)


def _squares(a: DistArray) -> DistArray:
    """Return the squares of the absolute values."""
    block = a.block
    return a.like(block.real * block.real + block.imag * block.imag if a.dtype.kind == "c" else block * block)


@primitive
def norm(a: DistArray, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return a norm of vectors or matrices, as `np.linalg.norm`; `linalg` has those that need singular values.

    Of integers it is computed in float64, of 16-bit floats in float32.
    """
    if axis is None and (ord is None or (ord in ("f", "fro") and a.ndim == 2) or (ord == 2 and a.ndim == 1)):
        return vector_norm(a, 2, tuple(range(a.ndim)), keepdims)
    dims = tuple(range(a.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    sorted_dims(dims, a.ndim)
    if len(dims) == 1:
        if isinstance(ord, str):
            raise ValueError(f"norm: {ord!r} is a norm of matrices; these are vectors, along axis {dims[0]}")
        return vector_norm(a, 2 if ord is None else ord, dims, keepdims)
    if len(dims) != 2:
        raise ValueError(f"norm of vectors or matrices: axis {dims} names {len(dims)} dims, not one or two")
    row, column = (d % a.ndim for d in dims)
    if ord in (None, "fro", "f"):
        return vector_norm(a, 2, dims, keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        a, finished = _measured(a)
        along, other = (row, column) if abs(ord) == 1 else (column, row)
        largest = extreme_size(total(abs(a), along, None, True), ord, (other,), True)
        return finished(largest if keepdims else np.squeeze(largest, axis=(row, column)))
    raise ValueError(
        f"norm: a norm of matrices has the order None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, not {ord!r}"
    )


def vector_norm(a: DistArray, ord: Any, dims: tuple[int, ...], keepdims: bool) -> DistArray:
    """Return the norms of vectors, whose elements lie along any number of dims.

    Where sums of powers leave the range, they are made again of sizes beside the largest or the smallest one.
    """
    if isinstance(ord, str) or not (np.isscalar(ord) or getattr(ord, "ndim", None) == 0):
        raise ValueError(f"vector_norm takes a number for ord, not {ord!r}, which matrix_norm may know")
    a, finished = _measured(a)
    if ord in (math.inf, -math.inf):
        return finished(extreme_size(abs(a), ord, dims, keepdims))
    if ord == 0:
        return finished(total((a != 0).astype(np.zeros(0, a.dtype).real.dtype), dims, None, keepdims))
    if ord == 1:
        return finished(total(abs(a), dims, None, keepdims))

    def sums(x: DistArray) -> DistArray:
        return total(_squares(x) if ord == 2 else abs(x) ** ord, dims, None, keepdims)

    with np.errstate(over="ignore", under="ignore"):
        found = sums(a)
    if not math.prod(a.shape[d] for d in dims) or not _out_of_range(found):
        return finished(found, 1 / ord)
    sizes = abs(a)  # all ranks that have the same sums
    unit = extreme_size(sizes, ord, dims, True).block
    unit = a.xp.where((unit > 0) & a.xp.isfinite(unit), unit, a.xp.ones_like(unit))
    with np.errstate(all="ignore"):
        found = sums(sizes.like(sizes.block / unit))
        return finished(found, 1 / ord, unit.reshape(found.block.shape))


def _out_of_range(sums: DistArray) -> bool:
    """Return True if some of the sums that this rank has are infinite, or so near underflow that terms lose digits."""
    if not sums.grid.inside or not sums.grid.backend.values:
        return False
    limits, xp = np.finfo(sums.dtype), sums.xp
    return bool(xp.any((sums.block < limits.tiny / limits.eps) | xp.isinf(sums.block)))


def _measured(a: DistArray) -> tuple[DistArray, Callable[..., DistArray]]:
    """Return the array in the dtype in which a norm is computed, and what makes a power of sums, times a unit, it."""
    given, a = a.dtype, settled(a, "linalg.norm")
    if given.kind in "biu":
        given = np.dtype(np.float64)
    a = a.astype(work_dtype(given), copy=False)

    def finished(value: Any, power: float = 1, unit: Any = 1) -> DistArray:
        block = value.block
        root = (a.xp.sqrt(block) if power == 0.5 else block if power == 1 else block**power) * unit
        found: DistArray = value.like(_as(a.xp.asarray(root), given if given.kind != "c" else block.dtype))
        return found

    return a, finished


def extreme_size(sizes: DistArray, ord: float, dims: tuple[int, ...], keepdims: bool = False) -> DistArray:
    """Return the largest sizes, 0 of none, or for an order below 0 the smallest ones."""
    if ord > 0 and not math.prod(sizes.shape[d] for d in dims):
        return total(sizes, dims, None, keepdims)
    return extreme(sizes, "max" if ord > 0 else "min", dims, keepdims)


_IDENTITY = {"max": -math.inf, "min": math.inf, "any": False, "all": True}


@primitive
def extreme(a: DistArray, name: str, axis: Axis, keepdims: bool = False) -> DistArray:
    """Return the max, min, any, all or prod over `axis`."""
    dims, a = sorted_dims(axis, a.ndim), settled(a, name)
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
        parts = [
            a.xp.where(nan, a.xp.asarray(-sign * np.inf, dtype=block.dtype), block), (sign * nan).astype(block.dtype)
        ]  # fmt: skip
        rows = a.xp.ascontiguousarray(a.xp.stack(parts))  # of transposed blocks too
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


_UFUNC: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "any": np.logical_or,
    "all": np.logical_and,
}  # fmt: skip


def reduction(
    name: str, a: DistArray, axis: Axis, dtype: Any = None, out: Any = None, keepdims: bool = False,
    initial: Any = np._NoValue, where: Any = True,
) -> DistArray:  # fmt: skip
    """Return the sum, prod, max, min, any or all over `axis`, of elements where a mask is True and an initial value.

    Parameters
    ----------
    initial : scalar, optional
        The value with which the reduction begins.
    where : bool or DistArray
        It broadcasts to the array.

    Raises
    ------
    ValueError
        If there is a mask and no initial value for a maximum or minimum, which have none by themselves.
    """
    given = initial is not np._NoValue and initial is not None
    if where is not True:
        if name in ("max", "min") and not given:
            raise ValueError(f"np.{name}(where=) needs initial=, the value where the mask is False everywhere")
        neutral = {"sum": 0, "prod": 1, "any": False, "all": True}.get(name, initial)
        if dtype is None and name in ("any", "all"):
            a = a != 0
        a = chosen_by(where, a, neutral, name)
    if name == "sum":
        found = total(a, axis, dtype, keepdims)
    else:
        a = a if dtype is None or dtype == a.dtype else a.astype(dtype)
        if given and name in ("max", "min") and not math.prod(a.shape[d] for d in sorted_dims(axis, a.ndim)):
            shape, layout, _ = reduced(a, sorted_dims(axis, a.ndim), keepdims)
            block = a.grid.backend.empty(a.grid.block_shape(layout, shape), a.dtype)
            block[...] = initial
            found = a.like(block, layout, shape)
        else:
            found = extreme(a, name, axis, keepdims)
            if dtype is not None and found.dtype != dtype:  # NumPy widens short integers
                found = found.astype(dtype)
    if given:
        start = initial.item() if isinstance(initial, DistArray) else initial
        found = _UFUNC[name](found, found.dtype.type(start))
    return delivered(found, out, name)


def chosen_by(where: Any, a: DistArray, other: Any, name: str) -> DistArray:
    """Return the array where a mask, which broadcasts to it, is True, and another value elsewhere."""
    if not isinstance(where, DistArray):
        where = bool(where)
    elif where.dtype.kind != "b":
        raise TypeError(f"np.{name}(where=) takes booleans, not an array of {where.dtype}")
    found: Any = np.where(where, a, a.dtype.type(other))
    if found.shape != a.shape:
        raise ValueError(f"np.{name}(where=): a mask of shape {where.shape} does not broadcast to {a.shape}")
    return found


@primitive
def number_of(where: Any, a: DistArray, axis: Axis, keepdims: bool) -> DistArray:
    """Return how many elements of the array a mask chooses, over `axis`."""
    ones = a.like(a.xp.ones(a.block.shape, np.bool_), a.layout.with_partial(()))
    return total(chosen_by(where, ones, False, "mean"), axis, np.float64, keepdims)


def mean_of(a: DistArray, axis: Axis, dtype: Any, keepdims: bool, out: Any, where: Any) -> DistArray:
    """Return the mean over `axis` of the elements where a mask is True; nan where there are none."""
    result, work = _dtypes(a.dtype, dtype)
    sums = total(chosen_by(where, a, 0, "mean"), axis, work, keepdims)
    found = sums / number_of(where, a, axis, keepdims)
    return delivered(found.astype(result, copy=False), out, "mean")


_BY_UFUNC = {ufunc: name for name, ufunc in _UFUNC.items()}

#: Ufuncs that have a reduction, beside those with a name.
_OTHERS = {
    np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.logical_xor, np.gcd, np.lcm, np.fmax, np.fmin, np.logaddexp,
    np.logaddexp2, np.hypot,
}  # fmt: skip


def reduce_ufunc(ufunc: np.ufunc, a: Any, options: dict[str, Any]) -> DistArray:
    """Return `ufunc.reduce` for ufuncs that are associative."""
    given = {k: v for k, v in options.items() if v is not np._NoValue}
    axis, dtype, keepdims = given.pop("axis", 0), given.pop("dtype", None), bool(given.pop("keepdims", False))
    initial, where = given.pop("initial", np._NoValue), given.pop("where", True)
    (out,) = given.pop("out", (None,))
    if not (isinstance(a, DistArray) or takes_over(a)):
        raise TypeError(f"out= of np.{ufunc.__name__}.reduce is distributed, but its operand is not")
    if given or not (ufunc in _BY_UFUNC or ufunc in _OTHERS):
        raise TypeError(
            f"np.{ufunc.__name__}.reduce{f'({next(iter(given))}=)' if given else ''} is not defined on distributed "
            "arrays; gather() first"
        )
    if ufunc in _BY_UFUNC:
        return reduction(_BY_UFUNC[ufunc], a, axis, dtype, out, keepdims, initial, where)
    if initial is not np._NoValue or where is not True or dtype is not None:
        raise TypeError(f"np.{ufunc.__name__}.reduce on distributed arrays takes axis, out and keepdims only")
    return delivered(_folded(ufunc, a, axis, keepdims), out, f"{ufunc.__name__}.reduce")


def _fold(ufunc: np.ufunc, block: Any, dims: tuple[int, ...], host: bool) -> Any:
    """Return a ufunc's reduction of a block, dims kept; CuPy has none of these, and takes halves of what is left."""
    if host:
        return ufunc.reduce(block, axis=dims, keepdims=True)
    block = block.astype(np.bool_) if ufunc is np.logical_xor else block
    for d in dims:
        lead, n = (slice(None),) * d, block.shape[d]
        if not n:
            shape = tuple(1 if i == d else m for i, m in enumerate(block.shape))
            block = np.full_like(block, ufunc.reduce(np.zeros(0, block.dtype)), shape=shape)
        while (n := block.shape[d]) > 1:
            last = block[(*lead, slice(n - n % 2, None))]
            block = ufunc(block[(*lead, slice(n // 2))], block[(*lead, slice(n // 2, n - n % 2))])
            if n % 2:
                block = np.concatenate([block, last], axis=d)
    return block


def _folded(ufunc: np.ufunc, a: DistArray, axis: Axis, keepdims: bool) -> DistArray:
    """Return the reduction by a ufunc, by way of the ranks' own results, one of each."""
    dims, a, host = sorted_dims(axis, a.ndim), settled(a, ufunc.__name__), a.grid.backend.host_memory
    shape, layout, over = reduced(a, dims, True)
    over = tuple(x for x in a.grid.axes if x in over and a.grid.sizes[x] > 1)
    if over and a.grid.inside and 0 not in shape:
        some = all(a.block.shape[d] for d in dims)
        kind = ufunc.reduce(np.ones(1, a.dtype)).dtype
        ranks, stacked = span_of(over, a.grid.sizes), Layout(over, *layout.dims)
        empty = a.grid.backend.zeros(a.grid.block_shape(layout, shape), kind)
        mine = _fold(ufunc, a.block, dims, host) if some else empty
        filled = redistribute(a.xp.full((1,), some), Layout(over), Layout(None), (ranks,), a.grid)
        every = redistribute(
            mine.astype(kind, copy=False)[None], stacked, stacked.with_dim(0, None), (ranks, *shape), a.grid
        )
        block = _fold(ufunc, every[filled], (0,), host)[0]
    else:
        block = _outside(a, _fold(ufunc, a.block, dims, host), shape)
    found = a.like(a.xp.asarray(block), layout, shape)
    return found if keepdims else found.reshape(tuple(n for d, n in enumerate(a.shape) if d not in dims))
