"""More functions of NumPy on distributed arrays: statistics, products of any dims, selections, sets, shapes.

They are registered as those of `parlinalg.array.functions`; those with a body of some length live in other modules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from parlinalg.array import calculus, contraction, create, joining, reductions, shapes, sorting, statistics
from parlinalg.array.core import Axis, DistArray, axis_of, delivered, truth
from parlinalg.array.functions import (
    _WRITTEN,
    _array,
    _clip,
    _count_nonzero,
    _filled,
    _mean,
    _moveaxis,
    _name,
    _running,
    _trace,
    handles,
)
from parlinalg.array.ufuncs import operand
from parlinalg.backend.shapes import ShapeArray
from parlinalg.layout import Layout

_NUMPY: Any = np  # whose functions return DistArrays, which its types do not know


# ------------------------------------------------------------------ reductions
def _directly(function: Callable[..., Any], implementation: Callable[..., Any], **fixed: Any) -> None:
    """Register an implementation of which the first parameter is the array, with `out=` where NumPy's has it."""
    called = _name(function)
    if "name" in inspect.signature(implementation).parameters:
        fixed["name"] = called
    parameters = [p for p in inspect.signature(implementation).parameters if p not in fixed]
    theirs = inspect.signature(function).parameters if function not in _WRITTEN else _WRITTEN[function]
    first = next(iter(theirs))

    @wraps(implementation)
    def run(**given: Any) -> Any:
        array, out = _array(given.pop(first), called), given.pop("out", None)
        found = implementation(array, **given, **fixed)
        return found if out is None else delivered(found, out, called)

    handles(function, takes=[first, *parameters[1:], *(["out"] if "out" in theirs else [])])(run)


_directly(np.median, statistics.median)
_directly(np.quantile, statistics.quantile)
_directly(np.percentile, statistics.quantile, scale=100)
_directly(np.nanmedian, statistics.median, ignore_nan=True)
_directly(np.nanquantile, statistics.quantile, ignore_nan=True)
_directly(np.nanpercentile, statistics.quantile, ignore_nan=True, scale=100)
_directly(np.bincount, statistics.bincount)
_directly(np.histogram, statistics.histogram)
_directly(np.histogram_bin_edges, statistics.histogram_bin_edges)
_directly(np.histogram2d, statistics.histogram2d)
_directly(np.digitize, statistics.digitize)
_directly(np.average, statistics.average)
_directly(np.cov, statistics.cov)
_directly(np.corrcoef, statistics.corrcoef)
handles(np.gradient)(calculus.gradient)
_directly(np.trapezoid, calculus.trapezoid)
_directly(np.expand_dims, joining.expand_dims)
_directly(np.broadcast_to, joining.broadcast_to)
_directly(np.flip, joining.flip)
_directly(np.fliplr, joining.flip, axis=1)
_directly(np.flipud, joining.flip, axis=0)
_directly(np.rot90, calculus.rot90)
_directly(np.roll, joining.roll)
_directly(np.take, joining.take)
_directly(np.repeat, joining.repeat)
_directly(np.tile, joining.tile)
_directly(np.resize, joining.resize)
_directly(np.pad, joining.pad)
_directly(np.diff, joining.diff)
_directly(np.split, joining.split)
_directly(np.array_split, joining.split, even=False)
_directly(np.unstack, joining.unstack)
_directly(np.tril, joining.triangle, lower=True)
_directly(np.triu, joining.triangle, lower=False)
_directly(np.diagonal, joining.diagonal)
_directly(np.linalg.diagonal, joining.diagonal, axis1=-2, axis2=-1)
_directly(np.nonzero, sorting.nonzero)
handles(np.interp)(calculus.interp)
handles(np.convolve)(calculus.convolve)
handles(np.correlate)(calculus.correlate)


@handles(np.apply_along_axis)
def _apply_along_axis(func1d: Any, axis: int, arr: Any, *args: Any, **kwargs: Any) -> DistArray:
    return calculus.apply_along_axis(func1d, axis, _array(arr, "apply_along_axis"), *args, **kwargs)


@handles(np.ptp)
def _ptp(a: Any, axis: Axis = None, out: Any = None, keepdims: Any = False) -> DistArray:
    a = reductions.settled(_array(a, "ptp"), "ptp")
    ends = [reductions.reduction(name, a, axis, keepdims=bool(keepdims)) for name in ("max", "min")]
    return delivered(ends[0] - ends[1], out, "ptp")


def _filled_nan(a: DistArray, value: Any) -> DistArray:
    """Return the array with NaNs replaced; nothing is copied where its dtype has none."""
    if a.dtype.kind not in "fcV":
        return a
    a = reductions.settled(a, "isnan")
    return a.like(a.xp.where(a.xp.isnan(a.block), a.dtype.type(value), a.block))


def _numbers_of(a: DistArray, axis: Axis, keepdims: Any) -> DistArray:
    """Return how many elements are not NaN."""
    return _count_nonzero(_NUMPY.equal(a, a), axis, keepdims)


def _nan_sums(name: str, value: int) -> Callable[..., DistArray]:
    def reduce(
        a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False,
        initial: Any = np._NoValue, where: Any = True,
    ) -> DistArray:  # fmt: skip
        filled = _filled_nan(_array(a, f"nan{name}"), value)
        return reductions.reduction(name, filled, axis, dtype, out, bool(keepdims), initial, where)

    return reduce


def _nan_extremes(name: str, value: float) -> Callable[..., DistArray]:
    def reduce(
        a: Any, axis: Axis = None, out: Any = None, keepdims: Any = False, initial: Any = np._NoValue,
        where: Any = True,
    ) -> DistArray:  # fmt: skip
        a = _array(a, f"nan{name}")
        found = reductions.reduction(name, _filled_nan(a, value), axis, None, None, bool(keepdims), initial, where)
        if a.dtype.kind in "fV" and initial is np._NoValue and where is True:
            found = _NUMPY.where(_numbers_of(a, axis, keepdims), found, found.dtype.type(np.nan))
        return delivered(found, out, f"nan{name}")

    return reduce


def _nan_places(name: str, value: float) -> Callable[..., DistArray]:
    def search(a: Any, axis: int | None = None, out: Any = None, keepdims: Any = False) -> DistArray:
        a = _array(a, f"nan{name}")
        if a.dtype.kind in "fV" and not truth(
            _NUMPY.all(_numbers_of(a, axis, False)), "finite", "whether there are slices of NaNs alone"
        ):
            raise ValueError("All-NaN slice encountered")
        found = sorting.arg_extreme(_filled_nan(a, value), name.removeprefix("arg"), axis, bool(keepdims))
        return delivered(found, out, f"nan{name}")

    return search


handles(np.nansum)(_nan_sums("sum", 0))
handles(np.nanprod)(_nan_sums("prod", 1))
handles(np.nanmax)(_nan_extremes("max", -math.inf))
handles(np.nanmin)(_nan_extremes("min", math.inf))
handles(np.nanargmax)(_nan_places("argmax", -math.inf))
handles(np.nanargmin)(_nan_places("argmin", math.inf))


@handles(np.nanmean)
def _nanmean(
    a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False, where: Any = True
) -> DistArray:
    a = reductions.settled(_array(a, "nanmean"), "nanmean")
    return _mean(a, axis, dtype, out, keepdims, _not_nan(a, where, dtype, "nanmean"))


def _not_nan(a: DistArray, where: Any, dtype: Any, name: str) -> Any:
    """Return the mask of the elements that count; refuse to compute with floating numbers in another kind of dtype."""
    if a.dtype.kind not in "fcV":
        return where
    if dtype is not None and np.dtype(dtype).kind not in "fcV":
        raise TypeError(f"np.{name}: of an array of {a.dtype} dtype is a floating one too, not {np.dtype(dtype)}")
    found = np.equal(a, a)
    return found if where is True else np.logical_and(found, where)


def _nan_spread(name: str, root: bool) -> Callable[..., DistArray]:
    def reduce(
        a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: Any = False,
        where: Any = True, mean: Any = None, correction: Any = None,
    ) -> DistArray:  # fmt: skip
        a = reductions.settled(_array(a, name), name)
        ddof = ddof if correction is None else correction
        where = _not_nan(a, where, dtype, name)
        found = reductions.variance(a, axis, ddof, bool(keepdims), dtype, root, where, mean)
        if ddof and where is not True:  # NumPy: NaN where there are no more elements than ddof
            few = np.less_equal(reductions.number_of(where, a, axis, bool(keepdims)), ddof)
            found = _NUMPY.where(few, found.dtype.type(np.nan), found)
        return delivered(found, out, name)

    return reduce


handles(np.nanvar)(_nan_spread("nanvar", False))
handles(np.nanstd)(_nan_spread("nanstd", True))


def _nan_running(name: str, ufunc: str, value: int) -> Callable[..., DistArray]:
    run = _running(name, ufunc)

    def scan(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> DistArray:
        return run(_filled_nan(_array(a, name), value), axis, dtype, out)

    return scan


handles(np.nancumsum)(_nan_running("nancumsum", "add", 0))
handles(np.nancumprod)(_nan_running("nancumprod", "multiply", 1))


def _scan(name: str) -> Callable[..., DistArray]:
    def run(
        x: Any, axis: int | None = None, dtype: Any = None, out: Any = None, include_initial: Any = False
    ) -> DistArray:
        from parlinalg.array import namespace

        x = _array(x, f"cumulative_{name}")
        found = getattr(namespace, f"cumulative_{name}")(
            x, axis=axis, dtype=dtype, include_initial=bool(include_initial)
        )
        return delivered(found, out, f"cumulative_{name}")

    return run


handles(np.cumulative_sum)(_scan("sum"))
handles(np.cumulative_prod)(_scan("prod"))


# ------------------------------------------------------------------ products of any dims
handles(np.einsum)(contraction.einsum)
handles(np.einsum_path)(contraction.einsum_path)
handles(np.tensordot)(contraction.tensordot)
handles(np.kron)(contraction.kron)
handles(np.inner)(contraction.inner)
handles(np.cross)(contraction.cross)
handles(np.linalg.multi_dot)(contraction.multi_dot)


@handles(np.outer)
def _outer(a: Any, b: Any, out: Any = None) -> DistArray:
    return delivered(contraction.outer(a, b), out, "outer")


@handles(np.linalg.outer)
def _linalg_outer(x1: DistArray, x2: DistArray) -> DistArray:
    if np.ndim(x1) != 1 or np.ndim(x2) != 1:
        raise ValueError(f"linalg.outer takes two vectors, not arrays of shapes {np.shape(x1)} and {np.shape(x2)}")
    return contraction.outer(x1, x2)


@handles(np.linalg.tensordot)
def _linalg_tensordot(x1: Any, x2: Any, axes: Any = 2) -> DistArray:
    return contraction.tensordot(x1, x2, axes)


@handles(np.linalg.cross)
def _linalg_cross(x1: Any, x2: Any, axis: int = -1) -> DistArray:
    return contraction.cross(x1, x2, axis=axis)


@handles(np.linalg.trace)
def _linalg_trace(x: Any, offset: int = 0, dtype: Any = None) -> DistArray:
    return _trace(x, offset, -2, -1, dtype)


@handles(np.linalg.vector_norm)
def _vector_norm(x: DistArray, axis: Axis = None, keepdims: Any = False, ord: Any = 2) -> DistArray:
    return reductions.vector_norm(x, 2 if ord is None else ord, reductions.sorted_dims(axis, x.ndim), bool(keepdims))


# ------------------------------------------------------------------ elementwise
@handles(np.nan_to_num)
def _nan_to_num(x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> DistArray:
    x = _array(x, "nan_to_num")
    a = reductions.settled(x, "nan_to_num")
    found = a.like(a.xp.nan_to_num(a.block, nan=nan, posinf=posinf, neginf=neginf))
    return found if copy else delivered(found, x, "nan_to_num")


def _blockwise(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a function of NumPy, elementwise, on the blocks of its first argument; the others are plain."""
    name = function.__name__

    def run(*args: Any, **kwargs: Any) -> DistArray:
        a = reductions.settled(_array(args[0], name), name)
        of = getattr(a.xp, name)
        return a.like(a.xp.asarray(of(a.block, *args[1:], **kwargs)).reshape(a.block.shape))

    return run


def _register_blockwise(function: Callable[..., Any]) -> None:
    run, first = _blockwise(function), next(iter(inspect.signature(function).parameters))
    handles(function, takes=[p for p in inspect.signature(function).parameters if p != "out"])(
        wraps(function)(lambda **given: run(given.pop(first), **given))
    )


for _function in (np.angle, np.sinc, np.i0, np.iscomplex, np.isreal):
    _register_blockwise(_function)


@handles(np.fix)
def _fix(x: Any, out: Any = None) -> DistArray:
    return _NUMPY.trunc(_array(x, "fix"), out=out)


@handles(np.isneginf)
def _isneginf(x: Any, out: Any = None) -> DistArray:
    return delivered(_NUMPY.equal(_array(x, "isneginf"), -math.inf), out, "isneginf")


@handles(np.isposinf)
def _isposinf(x: Any, out: Any = None) -> DistArray:
    return delivered(_NUMPY.equal(_array(x, "isposinf"), math.inf), out, "isposinf")


@handles(np.iscomplexobj)
def _iscomplexobj(x: DistArray) -> bool:
    return x.dtype.kind == "c"


@handles(np.isrealobj)
def _isrealobj(x: DistArray) -> bool:
    return x.dtype.kind != "c"


@handles(np.result_type)
def _result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(v.dtype if isinstance(v, DistArray) else v for v in arrays_and_dtypes))


@handles(np.can_cast)
def _can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    kinds = (v.dtype if isinstance(v, DistArray) else v for v in (from_, to))
    return _NUMPY.can_cast(*kinds, casting)


@handles(np.select)
def _select(condlist: Any, choicelist: Any, default: Any = 0) -> DistArray:
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ValueError(
            f"np.select takes as many conditions as choices, at least one, not {len(condlist)} and {len(choicelist)}"
        )
    if odd := next((c for c in condlist if np.dtype(getattr(c, "dtype", type(c))).kind != "b"), None):
        raise TypeError(f"np.select takes booleans as conditions, not {odd!r}")
    kind = np.result_type(*(v.dtype if hasattr(v, "dtype") else v for v in (*choicelist, default)))
    found: Any = kind.type(default.item() if isinstance(default, DistArray) and not default.ndim else default) if not (
        isinstance(default, DistArray) and default.ndim) else default  # fmt: skip
    for condition, choice in zip(condlist[::-1], choicelist[::-1], strict=True):
        found = np.where(condition, choice, found)
    return found.astype(kind, copy=False)


@handles(np.choose)
def _choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> DistArray:
    a = reductions.settled(_array(a, "choose"), "choose")
    n = len(choices)
    if a.dtype.kind not in "biu":
        raise TypeError(f"np.choose takes whole numbers that choose, not {a.dtype}")
    if mode == "raise":
        if a.size and (a.min().item() < 0 or a.max().item() >= n):
            raise ValueError(f"np.choose: numbers from {a.min().item()} to {a.max().item()} for {n} choices")
    elif mode == "wrap":
        a = a % n
    elif mode == "clip":
        a = _clip(a, 0, n - 1)
    else:
        raise ValueError(f"np.choose takes the modes raise, wrap and clip, not {mode!r}")
    found: Any = choices[0]
    for i in range(n):
        found = np.where(np.equal(a, i), choices[i], found)
    return delivered(found, out, "choose")


@handles(np.piecewise)
def _piecewise(x: Any, condlist: Any, funclist: Any, *args: Any, **kw: Any) -> DistArray:
    x = reductions.settled(_array(x, "piecewise"), "piecewise")
    conditions = list(condlist) if isinstance(condlist, list | tuple) else [condlist]
    functions = list(funclist)
    if len(functions) == len(conditions) + 1:
        covered: Any = conditions[0]
        for condition in conditions[1:]:
            covered = np.logical_or(covered, condition)
        conditions.append(np.logical_not(covered))
    if len(functions) != len(conditions):
        raise ValueError(
            f"np.piecewise takes a function for each of {len(conditions)} conditions, and one for the rest"
        )
    found = _filled("piecewise", 0)(x)
    for condition, function in zip(conditions, functions, strict=True):
        if not callable(function):
            found[condition] = function
        elif (part := x[condition]).size:
            found[condition] = function(part, *args, **kw)
    return found


@handles(np.unravel_index)
def _unravel_index(indices: Any, shape: Any, order: str = "C") -> tuple[DistArray, ...]:
    a = reductions.settled(_array(indices, "unravel_index"), "unravel_index")
    if a.size and (a.min().item() < 0 or a.max().item() >= math.prod(shape)):
        raise ValueError(f"np.unravel_index: indices from {a.min().item()} to {a.max().item()} for shape {shape}")
    found = a.xp.unravel_index(a.block, shape, order)
    return tuple(a.like(i.astype(np.int64, copy=False)) for i in found)


@handles(np.ravel_multi_index)
def _ravel_multi_index(multi_index: Any, dims: Any, mode: Any = "raise", order: str = "C") -> DistArray:
    if order != "C" or mode not in ("raise", "wrap", "clip"):
        raise TypeError(f"np.ravel_multi_index(mode={mode!r}, order={order!r}) is not defined on distributed arrays")
    found: Any = 0
    for index, n in zip(multi_index, dims, strict=True):
        if mode == "raise" and np.size(index) and (np.min(index) < 0 or np.max(index) >= n):
            raise ValueError(f"np.ravel_multi_index: an index lies outside of a dim of {n} items")
        index = index % n if mode == "wrap" else np.clip(index, 0, n - 1) if mode == "clip" else index
        found = found * n + index
    return found


@handles(np.vander)
def _vander(x: Any, N: int | None = None, increasing: bool = False) -> DistArray:
    x = reductions.settled(_array(x, "vander"), "vander")
    if x.ndim != 1:
        raise ValueError(f"np.vander takes a vector, not an array of shape {x.shape}")
    n = x.size if N is None else N
    kind = np.promote_types(x.dtype, int)
    powers = np.arange(n) if increasing else np.arange(n)[::-1]
    block = x.block.astype(kind)[:, None] ** x.xp.asarray(powers)[None, :]
    layout = Layout(x.layout.dims[0], None)
    return x.like(block.astype(kind, copy=False), layout, (x.size, n)) if x.grid.inside else x.like(
        x.grid.backend.zeros((0, 0), kind), layout, (x.size, n))  # fmt: skip


@handles(np.polyval)
def _polyval(p: Any, x: Any) -> DistArray:
    coefficients = p.gather() if isinstance(p, DistArray) else p if isinstance(p, ShapeArray) else np.asarray(p)
    found: Any = x * 0
    for c in coefficients:
        found = found * x + c
    return found


# ------------------------------------------------------------------ shapes
for _n in (1, 2, 3):

    @handles(getattr(np, f"atleast_{_n}d"))
    def _atleast(*arys: Any, n: int = _n) -> Any:
        name = f"atleast_{n}d"
        found = tuple(joining.at_least(_array(a, name), n) for a in arys)
        return found if len(found) > 1 else found[0]


@handles(np.column_stack)
def _column_stack(tup: Any) -> DistArray:
    arrays = [_array(a, "column_stack") for a in tup]
    return joining.concatenate([shapes.reshape(a, (a.size, 1)) if a.ndim < 2 else a for a in arrays], 1)


@handles(np.dstack)
def _dstack(tup: Any) -> DistArray:
    return joining.concatenate([joining.at_least(_array(a, "dstack"), 3) for a in tup], 2)


def _split_along(name: str, axis: int) -> Callable[..., list[DistArray]]:
    def split(ary: Any, indices_or_sections: Any) -> list[DistArray]:
        ary = _array(ary, name)
        if ary.ndim < (1 if name == "hsplit" else axis + 1):
            raise ValueError(f"np.{name} takes an array of at least {axis + 1} dims, not of shape {ary.shape}")
        return joining.split(ary, indices_or_sections, 0 if name == "hsplit" and ary.ndim == 1 else axis)

    return split


handles(np.hsplit)(_split_along("hsplit", 1))
handles(np.vsplit)(_split_along("vsplit", 0))
handles(np.dsplit)(_split_along("dsplit", 2))


@handles(np.block)
def _block(arrays: Any) -> DistArray:
    def checked(part: Any) -> Any:
        return [checked(p) for p in part] if isinstance(part, list) else _array(part, "block")

    return joining.block(checked(arrays))


@handles(np.rollaxis)
def _rollaxis(a: DistArray, axis: int, start: int = 0) -> DistArray:
    axis, start = axis_of(axis, a.ndim), start + a.ndim if start < 0 else start
    return _moveaxis(a, axis, start - 1 if axis < start else start)


@handles(np.delete)
def _delete(arr: Any, obj: Any, axis: int | None = None) -> DistArray:
    return joining.delete(reductions.settled(_array(arr, "delete"), "delete"), obj, axis)


@handles(np.insert)
def _insert(arr: Any, obj: Any, values: Any, axis: int | None = None) -> DistArray:
    return joining.insert(reductions.settled(_array(arr, "insert"), "insert"), obj, values, axis)


@handles(np.trim_zeros)
def _trim_zeros(filt: Any, trim: str = "fb", axis: Any = None) -> DistArray:
    a = reductions.settled(_array(filt, "trim_zeros"), "trim_zeros")
    if a.ndim != 1:
        raise TypeError(f"np.trim_zeros takes vectors here, not an array of shape {a.shape}")
    full: Any = np.not_equal(a, 0)
    if not bool(np.any(full)):
        return a[:0]
    first = sorting.arg_extreme(full, "max", 0).item() if "f" in trim.lower() else 0
    last = sorting.arg_extreme(full[::-1], "max", 0).item() if "b" in trim.lower() else 0
    return a[first : a.size - last]


@handles(np.diagflat)
def _diagflat(v: Any, k: int = 0) -> DistArray:
    return joining.diagonal_matrix(shapes.reshape(_array(v, "diagflat"), (v.size,)), k)


@handles(np.ediff1d)
def _ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> DistArray:
    a = shapes.reshape(_array(ary, "ediff1d"), (ary.size,))
    if a.dtype.kind == "b":
        raise TypeError("np.ediff1d of booleans, which are not subtracted; np.diff tells where they differ")
    ends = [None if v is None else v if isinstance(v, DistArray) else create.asarray(v, grid=a.grid)
            for v in (to_begin, to_end)]  # fmt: skip
    begin, end = (None if v is None else shapes.reshape(v, (v.size,)).astype(a.dtype) for v in ends)
    parts = [begin, joining.diff(a, 1, 0) if a.size else a, end]
    return joining.concatenate([p for p in parts if p is not None])


@handles(np.array_equiv)
def _array_equiv(a1: Any, a2: Any) -> bool:
    a, b = operand(a1, "array_equiv"), operand(a2, "array_equiv")
    try:
        np.broadcast_shapes(np.shape(a), np.shape(b))
    except ValueError:
        return False
    return bool(np.all(np.equal(a, b)))


@handles(np.argwhere)
def _argwhere(a: DistArray) -> DistArray:
    if not a.ndim:
        return shapes.reshape(_argwhere(shapes.reshape(a, (1,)))[:, :0], (int(bool(a)), 0))
    return joining.stack(sorting.nonzero(a), 1)


@handles(np.compress)
def _compress(condition: Any, a: Any, axis: int | None = None, out: Any = None) -> DistArray:
    a = _array(a, "compress")
    a, axis = (shapes.reshape(a, (a.size,)), 0) if axis is None else (a, axis_of(axis, a.ndim))
    mask = condition if isinstance(condition, DistArray) else np.asarray(condition)
    if mask.ndim != 1 or mask.shape[0] > a.shape[axis]:
        raise ValueError(f"np.compress takes a vector of at most {a.shape[axis]} conditions, not of shape {mask.shape}")
    lead = (slice(None),) * axis
    a = a[(*lead, slice(0, mask.shape[0]))]
    return delivered(a[(*lead, mask != 0)], out, "compress")


@handles(np.extract)
def _extract(condition: Any, arr: Any) -> DistArray:
    arr, given = _array(arr, "extract"), _array(condition, "extract")
    flat = shapes.reshape(given, (given.size,))
    return shapes.reshape(arr, (arr.size,))[np.not_equal(flat, 0)]


@handles(np.put_along_axis)
def _put_along_axis(arr: Any, indices: Any, values: Any, axis: int | None) -> None:
    arr = _array(arr, "put_along_axis")
    if axis is None:
        raise TypeError("np.put_along_axis(axis=None) is not defined on distributed arrays; name the dim")
    d = axis_of(axis, arr.ndim)
    index = indices if isinstance(indices, DistArray) else create.asarray(indices, grid=arr.grid)
    lines = tuple(
        index if i == d else np.arange(n).reshape((-1,) + (1,) * (arr.ndim - i - 1)) for i, n in enumerate(arr.shape)
    )
    arr[lines] = values


@handles(np.fill_diagonal)
def _fill_diagonal(a: Any, val: Any, wrap: bool = False) -> None:
    a = _array(a, "fill_diagonal")
    if a.ndim < 2 or wrap or (a.ndim > 2 and len(set(a.shape)) > 1):
        raise ValueError(f"np.fill_diagonal takes a matrix (or equal dims), and no wrap=, not shape {a.shape}")
    a[(np.arange(min(a.shape)),) * a.ndim] = val


@handles(np.copyto)
def _copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    dst, number = _array(dst, "copyto"), {bool: "?", int: "u1", float: "f2", complex: "F"}.get(type(src))
    kind = number or (src if hasattr(src, "dtype") else np.asarray(src)).dtype
    if not np.can_cast(kind, dst.dtype, "same_kind" if number and casting != "unsafe" else casting):
        what = repr(src) if number else kind
        raise TypeError(f"np.copyto: {what} does not become {dst.dtype} under casting={casting!r}")
    dst[...] = src if where is True else np.where(where, src, dst)


@handles(np.putmask)
def _putmask(a: Any, mask: Any, values: Any) -> None:
    a = _array(a, "putmask")
    if np.ndim(values) and np.shape(values) != a.shape:
        raise TypeError(f"np.putmask takes values of the shape {a.shape} or a scalar, not of shape {np.shape(values)}")
    a[...] = np.where(mask, values, a)


@handles(np.meshgrid)
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[DistArray, ...]:
    return tuple(joining.meshgrid(*(_array(x, "meshgrid") for x in xi), indexing=indexing, sparse=sparse))


@handles(np.astype, takes=("x", "dtype", "copy"))
def _astype(x: Any, dtype: Any, copy: bool = True) -> DistArray:
    return _array(x, "astype").astype(dtype, copy=copy)


@handles(np.tril_indices_from)
def _tril_indices_from(arr: Any, k: int = 0) -> tuple[np.ndarray, ...]:
    return np.tril_indices(arr.shape[-2], k, arr.shape[-1])


@handles(np.triu_indices_from)
def _triu_indices_from(arr: Any, k: int = 0) -> tuple[np.ndarray, ...]:
    return np.triu_indices(arr.shape[-2], k, arr.shape[-1])


@handles(np.diag_indices_from)
def _diag_indices_from(arr: Any) -> tuple[np.ndarray, ...]:
    if arr.ndim < 2 or len(set(arr.shape)) > 1:
        raise ValueError(f"np.diag_indices_from takes arrays of two or more equal dims, not of shape {arr.shape}")
    return np.diag_indices(arr.shape[0], arr.ndim)


# ------------------------------------------------------------------ sorting and sets
def _partition(name: str, sort: Callable[..., DistArray]) -> Callable[..., DistArray]:
    def run(a: Any, kth: Any, axis: int | None = -1) -> DistArray:
        a = _array(a, name)
        a, axis = (shapes.reshape(a, (a.size,)), 0) if axis is None else (a, axis_of(axis, a.ndim))
        n = a.shape[axis]
        for k in np.atleast_1d(np.asarray(kth)):
            if not -n <= k < n:
                raise ValueError(f"np.{name} takes kth from {-n} to {n - 1}, not {k}")
        return sort(a, axis)

    return run


handles(np.partition)(_partition("partition", sorting.sort))
handles(np.argpartition)(_partition("argpartition", sorting.argsort))


@handles(np.lexsort)
def _lexsort(keys: Any, axis: int = -1) -> DistArray:
    keys = list(joining.unstack(keys) if isinstance(keys, DistArray) else keys)
    keys = [_array(key, "lexsort") for key in keys]
    if len({key.shape for key in keys}) > 1:
        raise ValueError(f"np.lexsort takes keys of one shape, not {[key.shape for key in keys]}")
    order: Any = None
    for key in keys:
        near = key if order is None else joining.take_along_axis(key, order, axis)
        found = sorting.argsort(near, axis)
        order = found if order is None else joining.take_along_axis(order, found, axis)
    return order


@handles(np.isin)
def _isin(element: Any, test_elements: Any, invert: Any = False, kind: Any = None) -> DistArray:
    from parlinalg.array.namespace import isin

    return isin(element, test_elements, invert=bool(invert))


def _standard(name: str) -> Callable[..., Any]:
    """Return the function of this name of the array API standard, for NumPy's of the same name."""

    def run(x: Any) -> Any:
        from parlinalg.array import namespace

        return getattr(namespace, name)(_array(x, name))

    return run


for _name_of_set in ("unique_all", "unique_counts", "unique_inverse", "unique_values"):
    handles(getattr(np, _name_of_set))(_standard(_name_of_set))


def _set_of(ar: Any, grid: Any) -> DistArray:
    a = ar if isinstance(ar, DistArray) else create.asarray(ar, grid=grid)
    return sorting.unique(shapes.reshape(a, (a.size,)), equal_nan=True)[0]


def _two_sets(ar1: Any, ar2: Any) -> tuple[DistArray, DistArray]:
    grid = next(a.grid for a in (ar1, ar2) if isinstance(a, DistArray))
    return _set_of(ar1, grid), _set_of(ar2, grid)


@handles(np.union1d)
def _union1d(ar1: Any, ar2: Any) -> DistArray:
    return sorting.unique(joining.concatenate(_two_sets(ar1, ar2)), equal_nan=True)[0]


@handles(np.intersect1d)
def _intersect1d(ar1: Any, ar2: Any, return_indices: Any = False) -> Any:
    a, b = _two_sets(ar1, ar2)
    kind = np.result_type(a.dtype, b.dtype)
    found = a[_isin(a, b)].astype(kind, copy=False)
    if not return_indices:
        return found
    places = []
    for whole in (ar1, ar2):
        values, first, _, _ = sorting.unique(_array(whole, "intersect1d"), equal_nan=True)
        places.append(first[_isin(values, found)])
    return found, *places


@handles(np.setdiff1d)
def _setdiff1d(ar1: Any, ar2: Any) -> DistArray:
    a, b = _two_sets(ar1, ar2)
    return a[_isin(a, b, invert=True)]


@handles(np.setxor1d)
def _setxor1d(ar1: Any, ar2: Any) -> DistArray:
    a, b = _two_sets(ar1, ar2)
    parts = [a[_isin(a, b, invert=True)], b[_isin(b, a, invert=True)]]
    return sorting.sort(joining.concatenate(parts))
