"""The functions of NumPy that work on distributed arrays, through `__array_function__`.  Others are refused by name.

Each implementation names the arguments that it takes as NumPy's function does.  Arguments are bound by the signature of
that function; one that the implementation does not name may only have a value that changes nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.array import create, joining, products, reductions, shapes, sorting
from parlinalg.array.align import together
from parlinalg.array.core import Axis, DistArray, axis_of, delivered, native, whole
from parlinalg.array.dispatch import flags_of, primitive, refuse_flags, takes_over
from parlinalg.array.ufuncs import operand
from parlinalg.layout import Layout


@dataclass(frozen=True)
class Implementation:
    """The distributed version of a NumPy function.

    Attributes
    ----------
    name : str
        NumPy's name: "linalg.norm".
    run : callable
    positional : tuple of str
        The parameters of NumPy's function that may be given by position.
    taken : frozenset of str
        The parameters that `run` takes.
    several : bool
        It takes any number of arguments by position: `run` gets all arguments as they are.
    flags : tuple of str
        The parameters of `run` that are True or False.
    """

    name: str
    run: Callable[..., Any]
    positional: tuple[str, ...]
    taken: frozenset[str]
    several: bool = False
    flags: tuple[str, ...] = ()


HANDLED: dict[Callable[..., Any], Implementation] = {}

#: Parameters that an implementation may leave out, with the values that change nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "where": (True,), "order": ("C", "K", "A", None), "subok": (True, False), "device": (None, "cpu"),
    "copy": (None, True), "casting": ("same_kind",), "out": (None,), "dtype": (None,), "shape": (None,),
    "kind": (None, "introselect"), "overwrite_input": (True, False), "like": (None,), "interpolation": (None,),
    "weights": (None,),
    "mode": ("raise",), "stable": (None, True, False), "assume_unique": (True, False),
    "sorted": (True, False),
}  # fmt: skip

#: The positional parameters of functions in C, to which NumPy before 2.4 gives no signature, where ours has others.
_WRITTEN: dict[Callable[..., Any], tuple[str, ...]] = {
    np.concatenate: ("arrays", "axis", "out"),
    np.empty_like: ("prototype", "dtype", "order", "subok", "shape"),
    np.bincount: ("x", "weights", "minlength"),
}

#: Functions that stay NumPy's, and what does the same with a distributed array.
_INSTEAD: dict[Callable[..., Any], str] = {
    np.save: "parlinalg.save('a.npy', a)",
    np.savez: "parlinalg.save('a.h5', a, dataset='a')",
    np.savez_compressed: "parlinalg.save('a.h5', a, dataset='a', compression='gzip')",
    np.linspace: "parlinalg.linspace(start, stop, num), which takes numbers and arrays without dims",
    np.array2string: "str(a), on all ranks",
    np.array_str: "str(a), on all ranks",
    np.array_repr: "str(a), on all ranks",
}


def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the distributed version of a NumPy function, or refuse it."""
    found = HANDLED.get(function)
    if found is None:
        if function in _INSTEAD:
            raise TypeError(f"np.{_name(function)} takes no distributed arrays; write {_INSTEAD[function]}")
        raise TypeError(
            f"np.{_name(function)} is not defined on distributed arrays; those that are: {', '.join(names())}. Or "
            "take the global array by gather()"
        )
    if found.several:
        return found.run(*args, **{key: value for key, value in kwargs.items() if value is not np._NoValue})
    given = dict(zip(found.positional, args, strict=False)) | kwargs  # NumPy has found that they fit its signature
    for key in [key for key, value in given.items() if key not in found.taken or value is np._NoValue]:
        value = given.pop(key)
        if value is not np._NoValue and not any(value is idle or _equal(value, idle) for idle in _IDLE.get(key, ())):
            raise TypeError(
                f"np.{found.name}({key}=) is not defined on distributed arrays; leave {key}= out, or take the global "
                "array by gather()"
            )
    refuse_flags(f"np.{found.name}", ((flag, given[flag]) for flag in found.flags if flag in given))
    return found.run(**given)


def _equal(value: Any, idle: Any) -> bool:
    return isinstance(value, str | bool | np.bool_) and isinstance(idle, str | bool) and bool(value == idle)


def _name(function: Callable[..., Any]) -> str:
    home = function.__module__.removeprefix("numpy").lstrip(".")
    return f"{home}.{function.__name__}" if home in ("linalg", "fft") else function.__name__


def names() -> list[str]:
    """Return the functions of NumPy that take distributed arrays."""
    return sorted({found.name for found in HANDLED.values()})


def handles(
    *functions: Callable[..., Any], takes: Sequence[str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function that follows as the distributed version of these functions of NumPy.

    Parameters
    ----------
    takes : sequence of str, optional
        The parameters of NumPy's that it takes, by their names; by default its own.
    """

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        taken = frozenset(inspect.signature(implementation).parameters if takes is None else takes)
        flags = tuple(name for _, name in flags_of(implementation) if name in taken)
        for function in functions:
            positional, several = _WRITTEN.get(function), False
            if positional is None:
                parameters = _signature(function, implementation).parameters.values()
                positional = tuple(p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
                several = any(p.kind == p.VAR_POSITIONAL for p in parameters)
            HANDLED[function] = Implementation(_name(function), implementation, positional, taken, several, flags)
        return implementation

    return register


def _signature(function: Callable[..., Any], implementation: Callable[..., Any]) -> inspect.Signature:
    """Return NumPy's signature of a function, or where NumPy gives it none that of its distributed version."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(implementation)


def _array(value: Any, name: str) -> DistArray:
    """Return the value if it is a DistArray, or takes its place; an error if only another argument is one."""
    if not (isinstance(value, DistArray) or takes_over(value)):
        if not isinstance(value, int | float | complex | np.generic):
            operand(value, f"np.{name}")  # its errors say what to do
        raise TypeError(f"np.{name} takes a DistArray here, not {value!r}")
    return value


# ------------------------------------------------------------------ reductions
def _reduction(name: str) -> Callable[..., DistArray]:
    def reduce(
        a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False,
        initial: Any = np._NoValue, where: Any = True,
    ) -> DistArray:  # fmt: skip
        return reductions.reduction(name, _array(a, name), axis, dtype, out, bool(keepdims), initial, where)

    return reduce


handles(np.sum)(_reduction("sum"))
handles(np.prod)(_reduction("prod"))
handles(np.max, np.amax, takes=("a", "axis", "out", "keepdims", "initial", "where"))(_reduction("max"))
handles(np.min, np.amin, takes=("a", "axis", "out", "keepdims", "initial", "where"))(_reduction("min"))
handles(np.any, takes=("a", "axis", "out", "keepdims", "where"))(_reduction("any"))
handles(np.all, takes=("a", "axis", "out", "keepdims", "where"))(_reduction("all"))


@handles(np.mean)
def _mean(
    a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False, where: Any = True
) -> DistArray:
    a = _array(a, "mean")
    if where is not True:
        return reductions.mean_of(a, axis, dtype, bool(keepdims), out, where)
    return reductions.mean(a, axis, dtype, bool(keepdims), out)


def _spread(name: str, root: bool) -> Callable[..., DistArray]:
    def reduce(
        a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: Any = False,
        correction: Any = None, where: Any = True, mean: Any = None,
    ) -> DistArray:  # fmt: skip
        if correction is not None and ddof:
            raise ValueError("ddof and correction can't be provided simultaneously.")
        ddof = ddof if correction is None else correction
        found = reductions.variance(_array(a, name), axis, ddof, bool(keepdims), dtype, root, where, mean)
        return delivered(found, out, name)

    return reduce


handles(np.var)(_spread("var", False))
handles(np.std)(_spread("std", True))


@handles(np.count_nonzero)
def _count_nonzero(a: DistArray, axis: Axis = None, keepdims: Any = False) -> DistArray:
    return (a != 0).sum(axis, np.int64, keepdims=keepdims)


@handles(np.trace)
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> DistArray:
    if _array(a, "trace").ndim < 2:
        raise ValueError(f"trace takes a matrix, or a stack of them, not an array of shape {a.shape}")
    first, second = axis_of(axis1, a.ndim), axis_of(axis2, a.ndim)
    if first == second:
        raise ValueError(f"trace takes two dims, axis1 and axis2, not {axis1} twice")
    offset = whole("trace: offset, the number of a diagonal,", offset)
    a = a.transpose([d for d in range(a.ndim) if d not in (first, second)] + [first, second])
    layout = Layout(*a.layout.dims[-2:])
    mask = create.computed("trace", lambda i, j: i + offset == j, a.shape[-2:], a.grid, layout, np.bool_)
    diagonal: DistArray = np.where(mask, a, a.dtype.type(0))
    return reductions.total(diagonal, (a.ndim - 2, a.ndim - 1), dtype, out=out)


# ------------------------------------------------------------------ dims and shapes
@handles(np.transpose)
def _transpose(a: DistArray, axes: Sequence[int] | None = None) -> DistArray:
    return a.transpose(axes) if axes is not None else a.T


@handles(np.matrix_transpose, np.linalg.matrix_transpose)
def _matrix_transpose(x: DistArray) -> DistArray:
    return x.mT


@handles(np.swapaxes)
def _swapaxes(a: DistArray, axis1: int, axis2: int) -> DistArray:
    order = list(range(a.ndim))
    first, second = axis_of(axis1, a.ndim), axis_of(axis2, a.ndim)
    order[first], order[second] = second, first
    return a.transpose(order)


@handles(np.moveaxis)
def _moveaxis(a: DistArray, source: Any, destination: Any) -> DistArray:
    pairs = [each if isinstance(each, tuple | list) else (each,) for each in (source, destination)]
    origins, goals = ([axis_of(d, a.ndim) for d in each] for each in pairs)
    if len(set(origins)) != len(set(goals)) or len(origins) != len(goals) or len(set(origins)) != len(origins):
        raise ValueError(f"moveaxis takes as many different dims to move as places for them: {source} to {destination}")
    order = [d for d in range(a.ndim) if d not in origins]
    for goal, origin in sorted(zip(goals, origins, strict=True)):
        order.insert(goal, origin)
    return a.transpose(order)


@handles(np.reshape)
def _reshape(a: DistArray, shape: Any = None, newshape: Any = None) -> DistArray:
    return shapes.reshape(a, newshape if shape is None else shape)


@handles(np.ravel)
def _ravel(a: DistArray) -> DistArray:
    return shapes.reshape(a, (-1,))


@handles(np.squeeze)
def _squeeze(a: DistArray, axis: Axis = None) -> DistArray:
    drop = [d for d, n in enumerate(a.shape) if n == 1] if axis is None else reductions.sorted_dims(axis, a.ndim)
    if any(a.shape[d] != 1 for d in drop):
        raise ValueError(f"squeeze takes dims of size 1; axis {axis} of shape {a.shape} is not")
    return shapes.reshape(a, tuple(n for d, n in enumerate(a.shape) if d not in drop))


# ------------------------------------------------------------------ elementwise
def _elementwise(name: str, function: Callable[..., Any], *values: Any) -> DistArray:
    """Return the result of a function of the operands' blocks, which broadcast."""
    operands = [operand(v, name) for v in values]
    arrays = [v for v in operands if isinstance(v, DistArray)]
    shape, layout, moved = together(arrays, name)
    ready = iter(moved)
    block = function(*(next(ready).block if isinstance(v, DistArray) else v for v in operands))
    return arrays[0].like(block, layout, shape)


@handles(np.where)
@primitive
def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        if x is None and y is None:
            return sorting.nonzero(_array(condition, "where"))
        raise ValueError("np.where takes both x and y, or neither")
    xp = next(v.xp for v in (condition, x, y) if isinstance(v, DistArray))
    if isinstance(condition, int | float | complex):
        condition = np.bool_(condition)  # CuPy asks conditions for their dtype
    return _elementwise("where", xp.where, condition, x, y)


@handles(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, min: Any = None, max: Any = None) -> DistArray:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    result = a if low is None else np.maximum(a, low)
    result = +_array(result, "clip") if high is None else np.minimum(result, high)
    return delivered(result, out, "clip")


@handles(np.round, np.around)
@primitive
def _round(a: Any, decimals: int = 0, out: Any = None) -> DistArray:
    a = reductions.settled(_array(a, "round"), "round")
    return delivered(a.like(a.block.round(decimals)), out, "round")


@handles(np.real)
def _real(val: DistArray) -> DistArray:
    return val.real


@handles(np.imag)
def _imag(val: DistArray) -> DistArray:
    return val.imag


@handles(np.copy)
def _copy(a: DistArray) -> DistArray:
    return a.copy()


# ------------------------------------------------------------------ comparisons
@handles(np.isclose)
def _isclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: Any = False) -> DistArray:
    xp = next(v.xp for v in (a, b, rtol, atol) if isinstance(v, DistArray))

    def near(a: Any, b: Any, rtol: Any, atol: Any) -> Any:
        return xp.isclose(a, b, rtol, atol, bool(equal_nan))

    return _elementwise("isclose", near, a, b, rtol, atol)


@handles(np.allclose)
def _allclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: Any = False) -> bool:
    return bool(_isclose(a, b, rtol, atol, equal_nan).all())


@handles(np.array_equal)
def _array_equal(a1: Any, a2: Any, equal_nan: Any = False) -> bool:
    a, b = operand(a1, "array_equal"), operand(a2, "array_equal")
    if np.shape(a) != np.shape(b):
        return False
    equal: Any = a == b
    if equal_nan and all(np.dtype(type(v) if not hasattr(v, "dtype") else v.dtype).kind not in "biu" for v in (a, b)):
        equal = equal | (np.isnan(a) & np.isnan(b))
    return bool(equal.all())


# ------------------------------------------------------------------ arrays like others
def _filled(name: str, value: Any) -> Callable[..., DistArray]:
    def make(a: Any, dtype: Any = None) -> DistArray:
        a = _array(a, name)
        block = a.grid.backend.empty(a.block.shape, a.dtype if dtype is None else native(create.dtype_named(dtype)))
        if value is not None:
            block[...] = value
        return a.like(block, a.layout.with_partial(()))

    return make


handles(np.zeros_like)(_filled("zeros_like", 0))
handles(np.ones_like)(_filled("ones_like", 1))


@handles(np.empty_like)
def _empty_like(prototype: Any, dtype: Any = None) -> DistArray:
    return _filled("empty_like", None)(prototype, dtype)


@handles(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None) -> DistArray:
    value = fill_value.item() if isinstance(fill_value, DistArray) else fill_value
    return _filled("full_like", value)(a, dtype)


# ------------------------------------------------------------------ products
handles(np.dot)(products.dot)
handles(np.vdot)(products.vdot)


@handles(np.linalg.vecdot)
def _vecdot(x1: Any, x2: Any, axis: int = -1) -> Any:
    return products.generalized(np.vecdot, (x1, x2), {"axis": axis})


@handles(np.linalg.matmul)
def _matmul(x1: Any, x2: Any) -> Any:
    return np.matmul(x1, x2)


# ------------------------------------------------------------------ facts
@handles(np.shape)
def _shape(a: DistArray) -> tuple[int, ...]:
    return a.shape


@handles(np.ndim)
def _ndim(a: DistArray) -> int:
    return a.ndim


@handles(np.size)
def _size(a: DistArray, axis: Axis = None) -> int:
    return math.prod(a.shape) if axis is None else math.prod(a.shape[d] for d in reductions.sorted_dims(axis, a.ndim))


# ------------------------------------------------------------------ joining and moving
@handles(np.concatenate)
def _concatenate(
    arrays: Any, axis: int | None = 0, out: Any = None, dtype: Any = None, casting: Any = "same_kind"
) -> DistArray:
    arrays = [_array(a, "concatenate") for a in arrays]
    common = np.result_type(*(a.dtype for a in arrays)) if arrays and dtype is None else dtype
    if odd := next((a for a in arrays if not np.can_cast(a.dtype, common, casting)), None):
        raise TypeError(f"concatenate: {odd.dtype} does not become {common} under casting={casting!r}")
    return delivered(joining.concatenate(arrays, axis, common), out, "concatenate")


@handles(np.stack)
def _stack(arrays: Any, axis: int = 0, out: Any = None) -> DistArray:
    return delivered(joining.stack([_array(a, "stack") for a in arrays], axis), out, "stack")


@handles(np.hstack)
def _hstack(tup: Any) -> DistArray:
    arrays = [shapes.reshape(a, (1,)) if not a.ndim else a for a in (_array(a, "hstack") for a in tup)]
    return joining.concatenate(arrays, 0 if arrays and arrays[0].ndim == 1 else 1)


@handles(np.vstack)
def _vstack(tup: Any) -> DistArray:
    arrays = [_array(a, "vstack") for a in tup]
    return joining.concatenate([shapes.reshape(a, (1, a.size)) if a.ndim < 2 else a for a in arrays])


@handles(np.append)
def _append(arr: Any, values: Any, axis: int | None = None) -> DistArray:
    if not (isinstance(arr, DistArray) or takes_over(arr)):
        arr = joining.brought(arr, _array(values, "append"))
    return joining.concatenate([arr, joining.brought(values, arr)], axis)


@handles(np.broadcast_arrays)
def _broadcast_arrays(*args: DistArray, subok: bool = False) -> tuple[DistArray, ...]:
    return tuple(joining.broadcast_arrays(*args))


@handles(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> DistArray:
    arr = _array(arr, "take_along_axis")
    if axis is None:
        arr, axis = shapes.reshape(arr, (arr.size,)), 0
    return joining.take_along_axis(arr, indices, axis)


@handles(np.diag)
def _diag(v: DistArray, k: int = 0) -> DistArray:
    if v.ndim not in (1, 2):
        raise ValueError(f"diag takes a vector or a matrix, not an array of shape {v.shape}")
    k = whole("diag: k, the number of a diagonal,", k)
    return joining.diagonal(v, k) if v.ndim == 2 else joining.diagonal_matrix(v, k)


# ------------------------------------------------------------------ sorting and searching
@handles(np.sort)
def _sort(a: DistArray, axis: int | None = -1, kind: Any = None, stable: Any = None) -> DistArray:
    return sorting.sort(shapes.reshape(a, (a.size,)), 0) if axis is None else sorting.sort(a, axis)


@handles(np.argsort)
def _argsort(a: DistArray, axis: int | None = -1, kind: Any = None, stable: Any = None) -> DistArray:
    return sorting.argsort(shapes.reshape(a, (a.size,)), 0) if axis is None else sorting.argsort(a, axis)


@handles(np.argmax)
def _argmax(a: Any, axis: int | None = None, out: Any = None, keepdims: Any = False) -> DistArray:
    return delivered(sorting.arg_extreme(_array(a, "argmax"), "max", axis, bool(keepdims)), out, "argmax")


@handles(np.argmin)
def _argmin(a: Any, axis: int | None = None, out: Any = None, keepdims: Any = False) -> DistArray:
    return delivered(sorting.arg_extreme(_array(a, "argmin"), "min", axis, bool(keepdims)), out, "argmin")


@handles(np.flatnonzero)
def _flatnonzero(a: DistArray) -> DistArray:
    return sorting.nonzero(shapes.reshape(a, (a.size,)))[0]


@handles(np.searchsorted)
def _searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> DistArray:
    a = _array(a, "searchsorted")
    a = a if sorter is None else joining.take(a, sorter, 0)
    return sorting.searchsorted(a, v if isinstance(v, DistArray) else create.asarray(v, grid=a.grid), side)


@handles(np.unique)
def _unique(
    ar: Any, return_index: Any = False, return_inverse: Any = False, return_counts: Any = False, equal_nan: Any = True
) -> Any:  # fmt: skip
    found = sorting.unique(_array(ar, "unique"), bool(equal_nan))
    wanted = (True, return_index, return_inverse, return_counts)
    kept = tuple(part for part, want in zip(found, wanted, strict=True) if want)
    return kept if len(kept) > 1 else kept[0]


def _running(name: str, ufunc: str) -> Callable[..., DistArray]:
    def run(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> DistArray:
        a = _array(a, name)
        a, axis = (shapes.reshape(a, (a.size,)), 0) if axis is None else (a, axis)
        return delivered(sorting.cumulative(a, axis, ufunc, dtype), out, name)

    return run


handles(np.cumsum)(_running("cumsum", "add"))
handles(np.cumprod)(_running("cumprod", "multiply"))
