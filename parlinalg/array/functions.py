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

from parlinalg.array import create, products, reductions, shapes
from parlinalg.array.core import Axis, DistArray, axis_of, delivered, native, same_grid
from parlinalg.array.ufuncs import broadcast_layout, operand
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from parlinalg.redistribute import fitting


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
    """

    name: str
    run: Callable[..., Any]
    positional: tuple[str, ...]
    taken: frozenset[str]


HANDLED: dict[Callable[..., Any], Implementation] = {}

#: Parameters that an implementation may leave out, with the values that change nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "where": (True,), "order": ("C", "K", "A"), "subok": (True, False), "device": (None, "cpu"), "copy": (None, True),
    "casting": ("same_kind",), "out": (None,), "dtype": (None,), "initial": (), "shape": (None,), "mean": (),
    "correction": (),
}  # fmt: skip

#: The signatures of functions that are written in C; other versions of NumPy do not give them.
_WRITTEN: dict[Callable[..., Any], tuple[str, ...]] = {
    np.where: ("condition", "x", "y"),
    np.concatenate: ("arrays", "axis", "out"),
    np.dot: ("a", "b", "out"),
    np.vdot: ("a", "b"),
    np.empty_like: ("prototype", "dtype", "order", "subok", "shape"),
}


def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the distributed version of a NumPy function, or refuse it."""
    found = HANDLED.get(function)
    if found is None:
        raise TypeError(
            f"np.{_name(function)} is not defined on distributed arrays; those that are: {', '.join(names())}. Or "
            "take the global array by gather()"
        )
    given = dict(zip(found.positional, args, strict=False)) | kwargs  # NumPy has found that they fit its signature
    for key in [key for key, value in given.items() if key not in found.taken or value is np._NoValue]:
        value = given.pop(key)
        if value is not np._NoValue and not any(value is idle or _equal(value, idle) for idle in _IDLE.get(key, ())):
            raise TypeError(
                f"np.{found.name}({key}=) is not defined on distributed arrays; leave {key}= away, or take the global "
                "array by gather()"
            )
    return found.run(**given)


def _equal(value: Any, idle: Any) -> bool:
    return isinstance(value, str | bool | np.bool_) and isinstance(idle, str | bool) and bool(value == idle)


def _name(function: Callable[..., Any]) -> str:
    home = function.__module__.removeprefix("numpy").lstrip(".")
    return f"{home}.{function.__name__}" if home in ("linalg", "fft") else function.__name__


def names() -> list[str]:
    """Return the functions of NumPy that take distributed arrays."""
    return sorted({found.name for found in HANDLED.values()})


def _handles(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        taken = frozenset(inspect.signature(implementation).parameters)
        for function in functions:
            positional = _WRITTEN.get(function)
            if positional is None:
                parameters = inspect.signature(function).parameters.values()
                positional = tuple(p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
            HANDLED[function] = Implementation(_name(function), implementation, positional, taken)
        return implementation

    return register


def _array(value: Any, name: str) -> DistArray:
    """Return the value if it is a DistArray; an error if only another argument is one."""
    if not isinstance(value, DistArray):
        if not isinstance(value, int | float | complex | np.generic):
            operand(value, f"np.{name}")  # its errors say what to do
        raise TypeError(f"np.{name} takes a DistArray here, not {value!r}")
    return value


# ------------------------------------------------------------------ reductions
@_handles(np.sum)
def _sum(a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> DistArray:
    return reductions.total(_array(a, "sum"), axis, dtype, bool(keepdims), out=out)


@_handles(np.mean)
def _mean(a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> DistArray:
    return reductions.mean(_array(a, "mean"), axis, dtype, bool(keepdims), out)


def _spread(name: str, root: bool) -> Callable[..., DistArray]:
    def reduce(
        a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: Any = False,
        correction: Any = None,
    ) -> DistArray:  # fmt: skip
        if correction is not None and ddof:
            raise ValueError("ddof and correction can't be provided simultaneously.")
        ddof = ddof if correction is None else correction
        return delivered(reductions.variance(_array(a, name), axis, ddof, bool(keepdims), dtype, root), out, name)

    return reduce


_handles(np.var)(_spread("var", False))
_handles(np.std)(_spread("std", True))


def _extreme(name: str) -> Callable[..., DistArray]:
    def reduce(a: Any, axis: Axis = None, out: Any = None, keepdims: Any = False) -> DistArray:
        return reductions.extreme(_array(a, name), name, axis, bool(keepdims), out)

    return reduce


_handles(np.max, np.amax)(_extreme("max"))
_handles(np.min, np.amin)(_extreme("min"))
_handles(np.any)(_extreme("any"))
_handles(np.all)(_extreme("all"))


@_handles(np.prod)
def _prod(a: Any, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> DistArray:
    return _array(a, "prod").prod(axis, dtype, out, keepdims)


@_handles(np.count_nonzero)
def _count_nonzero(a: DistArray, axis: Axis = None, keepdims: Any = False) -> DistArray:
    return (a != 0).sum(axis, np.int64, keepdims=keepdims)


@_handles(np.linalg.norm)
def _norm(x: DistArray, ord: Any = None, axis: Axis = None, keepdims: Any = False) -> DistArray:
    return reductions.norm(x, ord, axis, bool(keepdims))


@_handles(np.trace)
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> DistArray:
    if _array(a, "trace").ndim < 2:
        raise ValueError(f"trace takes a matrix, or a stack of them, not an array of shape {a.shape}")
    first, second = axis_of(axis1, a.ndim), axis_of(axis2, a.ndim)
    if first == second:
        raise ValueError(f"trace takes two dims, axis1 and axis2, not {axis1} twice")
    a = a.transpose([d for d in range(a.ndim) if d not in (first, second)] + [first, second])
    layout = Layout(*a.layout.dims[-2:])
    mask = create.computed("trace", lambda i, j: i + offset == j, a.shape[-2:], a.grid, layout, np.bool_)
    diagonal: DistArray = np.where(mask, a, a.dtype.type(0))
    return reductions.total(diagonal, (a.ndim - 2, a.ndim - 1), dtype, out=out)


# ------------------------------------------------------------------ dims and shapes
@_handles(np.transpose)
def _transpose(a: DistArray, axes: Sequence[int] | None = None) -> DistArray:
    return a.transpose(axes) if axes is not None else a.T


@_handles(np.matrix_transpose, np.linalg.matrix_transpose)
def _matrix_transpose(x: DistArray) -> DistArray:
    return x.mT


@_handles(np.swapaxes)
def _swapaxes(a: DistArray, axis1: int, axis2: int) -> DistArray:
    order = list(range(a.ndim))
    first, second = axis_of(axis1, a.ndim), axis_of(axis2, a.ndim)
    order[first], order[second] = second, first
    return a.transpose(order)


@_handles(np.moveaxis)
def _moveaxis(a: DistArray, source: Any, destination: Any) -> DistArray:
    pairs = [each if isinstance(each, tuple | list) else (each,) for each in (source, destination)]
    origins, goals = ([axis_of(d, a.ndim) for d in each] for each in pairs)
    if len(set(origins)) != len(set(goals)) or len(origins) != len(goals) or len(set(origins)) != len(origins):
        raise ValueError(f"moveaxis takes as many different dims to move as places for them: {source} to {destination}")
    order = [d for d in range(a.ndim) if d not in origins]
    for goal, origin in sorted(zip(goals, origins, strict=True)):
        order.insert(goal, origin)
    return a.transpose(order)


@_handles(np.reshape)
def _reshape(a: DistArray, shape: Any = None, newshape: Any = None) -> DistArray:
    return shapes.reshape(a, newshape if shape is None else shape)


@_handles(np.ravel)
def _ravel(a: DistArray) -> DistArray:
    return shapes.reshape(a, (-1,))


@_handles(np.expand_dims)
def _expand_dims(a: DistArray, axis: Any) -> DistArray:
    given = axis if isinstance(axis, tuple | list) else (axis,)
    ndim = a.ndim + len(given)
    new = [axis_of(d, ndim) for d in given]
    if len(set(new)) != len(new):
        raise ValueError(f"expand_dims: axis {axis} names a dim twice")
    old = iter(a.shape)
    return shapes.reshape(a, tuple(1 if d in new else next(old) for d in range(ndim)))


@_handles(np.squeeze)
def _squeeze(a: DistArray, axis: Axis = None) -> DistArray:
    drop = [d for d, n in enumerate(a.shape) if n == 1] if axis is None else reductions.dims_of(axis, a.ndim)
    if any(a.shape[d] != 1 for d in drop):
        raise ValueError(f"squeeze takes dims of size 1; axis {axis} of shape {a.shape} is not")
    return shapes.reshape(a, tuple(n for d, n in enumerate(a.shape) if d not in drop))


@_handles(np.broadcast_to)
def broadcast_to(array: DistArray, shape: Any) -> DistArray:
    """Return the array repeated along new dims in front, and along dims of one item, to this shape."""
    shape = shapes.shape_of(shape)
    extra = len(shape) - array.ndim
    if extra < 0:
        raise ValueError(f"an array of shape {array.shape} does not broadcast to {shape}, which has fewer dims")
    repeated = [d for d, n in enumerate(array.shape) if n != shape[extra + d]]
    if any(array.shape[d] != 1 for d in repeated):
        raise ValueError(f"{array!r} does not broadcast to {shape}: dims {repeated} must be of size 1")
    layout = array.layout
    for d in repeated:
        layout = layout.with_dim(d, None)
    if layout != array.layout:
        array = array.redistribute(layout)
    layout = fitting(Layout(*((),) * extra, *layout.dims, partial=layout.partial), shape, array.grid)
    return array.sharing(array.xp.broadcast_to(array.block, array.grid.block_shape(layout, shape)), layout, shape)


@_handles(np.concatenate)
def _concatenate(arrays: Sequence[DistArray], axis: int | None = 0, out: Any = None, dtype: Any = None,
                 casting: Any = "same_kind") -> DistArray:  # fmt: skip
    arrays = [_array(a, "concatenate") for a in arrays]
    same_grid(arrays)
    if axis is None:
        arrays, axis = [shapes.reshape(a, (-1,)) for a in arrays], 0
    first = arrays[0]
    if not first.ndim:
        raise ValueError("concatenate takes arrays with dims")
    dim = axis_of(axis, first.ndim)
    for a in arrays:
        rest = [n for d, n in enumerate(a.shape) if d != dim]
        if a.ndim == first.ndim and a.layout.dims[dim]:
            raise LayoutError(
                f"concatenate along dim {dim}, which {a.layout!r} cuts; redistribute to "
                f"{a.layout.with_dim(dim, None)!r} first"
            )
        if a.layout != first.layout or rest != [n for d, n in enumerate(first.shape) if d != dim]:
            raise LayoutError(
                f"concatenate takes equal layouts and shapes but for dim {dim}: {a.layout!r} {a.shape} meets "
                f"{first.layout!r} {first.shape}"
            )
    common = np.result_type(*(a.dtype for a in arrays)) if dtype is None else dtype
    blocks = [a.astype(common, casting=casting, copy=False).block for a in arrays]
    shape = tuple(sum(a.shape[dim] for a in arrays) if d == dim else n for d, n in enumerate(first.shape))
    return delivered(first.like(first.xp.concatenate(blocks, axis=dim), shape=shape), out, "concatenate")


# ------------------------------------------------------------------ elementwise
def _elementwise(name: str, function: Callable[..., Any], *values: Any) -> DistArray:
    """Return the result of a function of the operands' blocks, which broadcast."""
    operands = [operand(v, name) for v in values]
    arrays = [reductions.summed(v, name) for v in operands if isinstance(v, DistArray)]
    same_grid(arrays)
    shape, layout = broadcast_layout(arrays, name)
    block = function(*(v.block if isinstance(v, DistArray) else v for v in operands))
    return arrays[0].like(block, layout, shape)


@_handles(np.where)
def _where(condition: Any, x: Any = None, y: Any = None) -> DistArray:
    if x is None or y is None:
        raise TypeError("np.where(condition) alone is not defined on distributed arrays; give x and y, or gather()")
    xp = next(v.xp for v in (condition, x, y) if isinstance(v, DistArray))
    return _elementwise("where", xp.where, condition, x, y)


@_handles(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, min: Any = None, max: Any = None) -> DistArray:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    result = a if low is None else np.maximum(a, low)
    result = +_array(result, "clip") if high is None else np.minimum(result, high)
    return delivered(result, out, "clip")


@_handles(np.round, np.around)
def _round(a: Any, decimals: int = 0, out: Any = None) -> DistArray:
    a = reductions.summed(_array(a, "round"), "round")
    return delivered(a.like(a.block.round(decimals)), out, "round")


@_handles(np.real)
def _real(val: DistArray) -> DistArray:
    return val.real


@_handles(np.imag)
def _imag(val: DistArray) -> DistArray:
    return val.imag


@_handles(np.copy)
def _copy(a: DistArray) -> DistArray:
    return a.copy()


# ------------------------------------------------------------------ comparisons
@_handles(np.isclose)
def _isclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: Any = False) -> DistArray:
    xp = next(v.xp for v in (a, b, rtol, atol) if isinstance(v, DistArray))

    def near(a: Any, b: Any, rtol: Any, atol: Any) -> Any:
        return xp.isclose(a, b, rtol, atol, bool(equal_nan))

    return _elementwise("isclose", near, a, b, rtol, atol)


@_handles(np.allclose)
def _allclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: Any = False) -> bool:
    return bool(_isclose(a, b, rtol, atol, equal_nan).all())


@_handles(np.array_equal)
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


_handles(np.zeros_like)(_filled("zeros_like", 0))
_handles(np.ones_like)(_filled("ones_like", 1))


@_handles(np.empty_like)
def _empty_like(prototype: Any, dtype: Any = None) -> DistArray:
    return _filled("empty_like", None)(prototype, dtype)


@_handles(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None) -> DistArray:
    value = fill_value.item() if isinstance(fill_value, DistArray) else fill_value
    return _filled("full_like", value)(a, dtype)


# ------------------------------------------------------------------ products
_handles(np.dot)(products.dot)
_handles(np.vdot)(products.vdot)


@_handles(np.linalg.vecdot)
def _vecdot(x1: Any, x2: Any, axis: int = -1) -> Any:
    return products.generalized(np.vecdot, (x1, x2), {"axis": axis})


@_handles(np.linalg.matmul)
def _matmul(x1: Any, x2: Any) -> Any:
    return np.matmul(x1, x2)


# ------------------------------------------------------------------ facts
@_handles(np.shape)
def _shape(a: DistArray) -> tuple[int, ...]:
    return a.shape


@_handles(np.ndim)
def _ndim(a: DistArray) -> int:
    return a.ndim


@_handles(np.size)
def _size(a: DistArray, axis: Axis = None) -> int:
    return math.prod(a.shape) if axis is None else math.prod(a.shape[d] for d in reductions.dims_of(axis, a.ndim))
