"""The functions of NumPy and SciPy on arrays without values (`parlinalg.backend.shapes`).

Each gives arrays of the shapes and dtypes that NumPy would give, and notes one kernel or product on the device.  Of
arrays with values it is NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from parlinalg.backend.shape_solver import Factorizations
from parlinalg.backend.shapes import (
    ShapeArray,
    ShapesBackend,
    check_fits,
    keeps_values,
    lack_values,
    values_needed,
)


def _size(x: Any) -> int:
    return x.nbytes if isinstance(x, (ShapeArray, np.ndarray)) else 0


@cache
def _resolved(ufunc: np.ufunc, kinds: tuple[Any, ...], dtype: Any) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes of the results of a function of such operands."""
    if dtype is not None and ufunc.nout == 1:
        found = ufunc.resolve_dtypes((*kinds, None), signature=(None,) * ufunc.nin + (np.dtype(dtype),))
        return found[ufunc.nin :]
    return ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout))[ufunc.nin :]


def _kind(x: Any) -> Any:
    if isinstance(x, bool):
        return np.dtype(np.bool_)
    if type(x) in (int, float, complex):
        return type(x)
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _shape(x: Any) -> tuple[int, ...]:
    return x.shape if hasattr(x, "shape") else np.shape(x)


@cache
def _reduced(name: str, kind: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a reduction or a running one by the function of this name."""
    if name.startswith("logical"):
        return np.dtype(np.bool_)
    if kind.kind not in "biu":
        return kind
    found: np.dtype[Any] = getattr(np, name).resolve_dtypes((None, kind, None), reduction=True)[-1]
    return found


def _axis(axis: int, ndim: int) -> int:
    """Return the number of a dim, counted from the first one."""
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim)
    return axis % ndim


def _axes(axis: Any, ndim: int) -> list[int]:
    if axis is None:
        return list(range(ndim))
    found = [_axis(each, ndim) for each in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if len({*found}) < len(found):
        raise ValueError(f"axis={axis} names a dim twice")
    return found


def _along(a: Any, axis: Any) -> tuple[int, ...]:
    """Return the shape of what runs along a dim; along all elements in a row, if that is None."""
    if axis is None:
        return (a.size,)
    _axis(axis, a.ndim)
    shape: tuple[int, ...] = a.shape
    return shape


def _kinded(x: Any) -> Any:
    """Return what NumPy promotes an operand by: its dtype, or a number itself."""
    return x.dtype if hasattr(x, "dtype") else x


@cache
def _of_some(name: str) -> bool:
    """Return True if the reduction of this name needs an element, as the largest of none is nothing."""
    return name in ("argmax", "argmin") or getattr(getattr(np, name, None), "identity", 0) is None


class Namespace:
    """NumPy's functions; those that make or take arrays without values give such arrays."""

    ndarray = ShapeArray
    __name__ = "parlinalg.backend.shapes"

    def __init__(self, device: ShapesBackend) -> None:
        self._device = device
        self.linalg = Factorizations(device)

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(np, name)
        if isinstance(theirs, np.ufunc):

            def call(*args: Any, **kwargs: Any) -> Any:
                if len(args) > theirs.nin and "out" not in kwargs:
                    args, kwargs["out"] = args[: theirs.nin], args[theirs.nin]
                return self._ufunc(theirs, "__call__", args, kwargs)

            def at(a: Any, index: Any, *values: Any) -> None:
                if not lack_values((a, index, *values)):
                    theirs.at(a, index, *values)
                else:
                    keys = index if isinstance(index, tuple) else (index,)
                    n = max(map(_size, (*keys, *values)), default=0)
                    self._device.kernel(f"{name}.at", n + 2 * a.nbytes, a.size, a.dtype)

            call.at = at  # type: ignore[attr-defined]
            setattr(self, name, call)
            return call
        if not callable(theirs) or isinstance(theirs, type):
            return theirs

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if lack_values((*args, *kwargs.values())):
                raise values_needed(f"{name} of an array")
            return theirs(*args, **kwargs)

        return refuse

    def _ufunc(self, ufunc: np.ufunc, method: str, inputs: Any, kwargs: Any) -> Any:
        device, out = self._device, kwargs.get("out")
        if not lack_values(inputs) and not lack_values((out,)):
            return getattr(ufunc, method)(*inputs, **kwargs)
        if method == "reduce":
            given = {k: v for k, v in kwargs.items() if k in ("axis", "keepdims", "dtype", "out", "initial")}
            return self._reduce(ufunc.__name__, inputs[0], **{"axis": 0, **given})
        if method == "accumulate":
            return self._accumulate(ufunc.__name__, inputs[0], **{"axis": 0, **kwargs})
        if method == "outer":
            a, b = inputs
            return self._ufunc(ufunc, "__call__", (a[(...,) + (None,) * len(_shape(b))], b), kwargs)
        if method != "__call__":
            raise values_needed(f"{ufunc.__name__}.{method}")
        if ufunc is np.matmul:
            return self.matmul(inputs[0], inputs[1], out)
        if ufunc is np.vecdot:
            return self.einsum("...j,...j->...", *inputs)
        dtypes = _resolved(ufunc, tuple(map(_kind, inputs)), kwargs.get("dtype"))
        shape = np.broadcast_shapes(*map(_shape, inputs))
        if out is None and ufunc.nout > 1:
            outs: tuple[Any, ...] = tuple(ShapeArray(device, shape, d) for d in dtypes)
        elif out is None:
            outs = (self._laid_out(shape, dtypes[0], inputs),)
        else:
            outs = out if isinstance(out, tuple) else (out,)
            for each, kind in zip(outs, dtypes, strict=True):
                if each.shape != shape and np.broadcast_shapes(shape, each.shape) != each.shape:
                    raise ValueError(f"{ufunc.__name__} gives an array of shape {shape}, out has {each.shape}")
                rule = kwargs.get("casting", "same_kind")
                if each.dtype != kind and not np.can_cast(kind, each.dtype, rule):
                    raise TypeError(f"{ufunc.__name__} gives {kind}, which casting={rule!r} keeps from {each.dtype}")
        moved = sum(map(_size, inputs)) + sum(o.nbytes for o in outs)
        device.kernel(ufunc.__name__, moved, outs[0].size, outs[0].dtype)
        return outs[0] if len(outs) == 1 else outs

    def _laid_out(self, shape: tuple[int, ...], dtype: Any, inputs: Sequence[Any]) -> ShapeArray:
        """Return a new array for the result: NumPy's lies as the operands do."""
        like = next((x for x in inputs if getattr(x, "shape", None) == shape and isinstance(x, ShapeArray)), None)
        return ShapeArray(self._device, shape, dtype) if like is None else like._like(dtype, "K")

    # -------------------------------------------------------------------------------------- making
    def empty(self, shape: Any, dtype: Any = float, order: Any = "C") -> Any:
        if keeps_values(shape, dtype):
            return np.zeros(shape, dtype, order)
        if order == "F" and not isinstance(shape, (int, np.integer)):
            return self.empty(tuple(shape)[::-1], dtype).T
        return ShapeArray(self._device, shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float, order: Any = "C") -> Any:
        out = self.empty(shape, dtype, order)
        self._device.kernel("zeros", out.nbytes, out.size, out.dtype)
        return out

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Any:
        out = self.zeros(
            shape, np.asarray(value).dtype if dtype is None and not lack_values((value,)) else dtype or value.dtype
        )
        if isinstance(out, np.ndarray):
            out[...] = value
        return out

    def ones(self, shape: Any, dtype: Any = float) -> Any:
        return self.full(shape, 1, dtype)

    def empty_like(self, a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None) -> Any:
        return self.empty(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)

    def zeros_like(self, a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None) -> Any:
        return self.zeros(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)

    def ones_like(self, a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None) -> Any:
        return self.ones(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)

    def full_like(self, a: Any, value: Any, dtype: Any = None, shape: Any = None) -> Any:
        return self.full(a.shape if shape is None else shape, value, a.dtype if dtype is None else dtype)

    def arange(self, *args: Any, dtype: Any = None) -> Any:
        return self._device.from_host(np.arange(*args, dtype=dtype))

    def linspace(self, *args: Any, **kwargs: Any) -> Any:
        return self._device.from_host(np.linspace(*args, **kwargs))

    def eye(self, n: int, m: int | None = None, k: int = 0, dtype: Any = float) -> Any:
        return self.zeros((n, n if m is None else m), dtype)

    def identity(self, n: int, dtype: Any = float) -> Any:
        return self.eye(n, dtype=dtype)

    def tri(self, n: int, m: int | None = None, k: int = 0, dtype: Any = float) -> Any:
        return self._device.from_host(np.tri(n, m, k, dtype))

    def array(self, a: Any, dtype: Any = None, copy: bool = True, order: str = "K", ndmin: int = 0) -> Any:
        if isinstance(a, ShapeArray):
            return a.astype(a.dtype if dtype is None else dtype, copy=bool(copy))
        return self._device.from_host(np.array(a, dtype, ndmin=ndmin))

    def asarray(self, a: Any, dtype: Any = None, order: Any = None, copy: Any = None) -> Any:
        if isinstance(a, ShapeArray):
            return a if dtype is None else a.astype(dtype, copy=bool(copy))
        return self._device.from_host(np.asarray(a, dtype))

    asanyarray = asarray

    def ascontiguousarray(self, a: Any, dtype: Any = None) -> Any:
        if not isinstance(a, ShapeArray):
            return self._device.from_host(np.ascontiguousarray(a, dtype))
        a = a if dtype is None else a.astype(dtype, copy=False)
        return a if a.flags.c_contiguous else a.copy()

    def asfortranarray(self, a: Any, dtype: Any = None) -> Any:
        a = a if dtype is None else a.astype(dtype, copy=False)
        return a if a.flags.f_contiguous else a.copy("F")

    def copy(self, a: Any, order: str = "K") -> Any:
        return a.copy(order)

    # -------------------------------------------------------------------------------------- views
    def broadcast_to(self, a: Any, shape: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.broadcast_to(a, shape)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if np.broadcast_shapes(a.shape, shape) != shape:
            raise ValueError(f"an array of shape {a.shape} cannot be broadcast to {shape}")
        lead = len(shape) - a.ndim
        strides = (0,) * lead + tuple(
            0 if m == 1 != n else s for s, m, n in zip(a.strides, a.shape, shape[lead:], strict=True)
        )
        return a._view(np.lib.stride_tricks.as_strided(a._a, shape, strides))

    def broadcast_arrays(self, *arrays: Any) -> Any:
        shape = np.broadcast_shapes(*map(_shape, arrays))
        return tuple(self.broadcast_to(a, shape) for a in arrays)

    def reshape(self, a: Any, shape: Any, order: str = "C") -> Any:
        return a.reshape(shape, order=order)

    def ravel(self, a: Any, order: str = "C") -> Any:
        return a.reshape(-1, order=order)

    def transpose(self, a: Any, axes: Any = None) -> Any:
        return a.T if axes is None else a.transpose(axes)

    permute_dims = transpose

    def matrix_transpose(self, a: Any) -> Any:
        return a.swapaxes(-1, -2)

    def swapaxes(self, a: Any, i: int, j: int) -> Any:
        return a.swapaxes(i, j)

    def squeeze(self, a: Any, axis: Any = None) -> Any:
        return a.squeeze() if axis is None else a.squeeze(axis)

    def moveaxis(self, a: Any, source: Any, to: Any) -> Any:
        return a._view(np.moveaxis(a._a, source, to)) if isinstance(a, ShapeArray) else np.moveaxis(a, source, to)

    def expand_dims(self, a: Any, axis: Any) -> Any:
        return a._view(np.expand_dims(a._a, axis)) if isinstance(a, ShapeArray) else np.expand_dims(a, axis)

    def flip(self, a: Any, axis: Any = None) -> Any:
        return a._view(np.flip(a._a, axis)) if isinstance(a, ShapeArray) else np.flip(a, axis)

    def diagonal(self, a: Any, *args: Any, **kwargs: Any) -> Any:
        return a._view(a._a.diagonal(*args, **kwargs)) if isinstance(a, ShapeArray) else np.diagonal(a, *args, **kwargs)

    def split(self, a: Any, where: Any, axis: int = 0) -> Any:
        if not isinstance(a, ShapeArray):
            return np.split(a, where, axis)
        return [a._view(part) for part in np.split(a._a, where, axis)]

    def atleast_1d(self, a: Any) -> Any:
        return a if a.ndim else a.reshape(1)

    def atleast_2d(self, a: Any) -> Any:
        return a if a.ndim > 1 else a.reshape(1, -1)

    def real(self, a: Any) -> Any:
        return a.real

    def imag(self, a: Any) -> Any:
        return a.imag

    def shape(self, a: Any) -> tuple[int, ...]:
        return _shape(a)

    def ndim(self, a: Any) -> int:
        return len(_shape(a))

    def result_type(self, *args: Any) -> Any:
        return np.result_type(*(a.dtype if isinstance(a, ShapeArray) else a for a in args))

    def iscomplexobj(self, a: Any) -> bool:
        return _kind(a) is complex or (hasattr(a, "dtype") and a.dtype.kind == "c")

    def may_share_memory(self, a: Any, b: Any) -> bool:
        return self.shares_memory(a, b)

    def shares_memory(self, a: Any, b: Any) -> bool:
        if not (isinstance(a, ShapeArray) and isinstance(b, ShapeArray)):
            return False
        return bool(np.may_share_memory(a._a, b._a))

    # -------------------------------------------------------------------------------------- products
    def matmul(self, a: Any, b: Any, out: Any = None, dtype: Any = None) -> Any:
        if not lack_values((a, b, out)):
            return np.matmul(a, b)
        device = self._device
        if not (a.ndim and b.ndim):
            raise ValueError(f"matmul of arrays of shapes {a.shape} and {b.shape}: each needs a dim")
        x, y = ((1, *a.shape) if a.ndim == 1 else a.shape), ((*b.shape, 1) if b.ndim == 1 else b.shape)
        if x[-1] != y[-2]:
            raise ValueError(
                f"matmul of arrays of shapes {a.shape} and {b.shape}: inner dims {x[-1]} and {y[-2]} differ"
            )
        lead = np.broadcast_shapes(x[:-2], y[:-2])
        shape = (*lead, *(x[-2:-1] if a.ndim > 1 else ()), *(y[-1:] if b.ndim > 1 else ()))
        if out is None:
            alike = dtype is None and a.dtype == b.dtype  # NumPy has no loop for bfloat16 and resolves float32
            out = ShapeArray(device, shape, a.dtype if alike else _resolved(np.matmul, (a.dtype, b.dtype), dtype)[0])
        elif out.shape != shape:
            raise ValueError(f"matmul gives an array of shape {shape}, out has {out.shape}")
        batch = math.prod(lead)
        device.product(batch, x[-2], y[-1], x[-1], out.dtype, batch)
        return out

    def dot(self, a: Any, b: Any, out: Any = None) -> Any:
        if not (_shape(a) and _shape(b)):
            return a * b
        if len(_shape(b)) > 2:
            return self.tensordot(a, b, ((-1,), (-2,)))
        return self.matmul(a, b, out=out)

    def vdot(self, a: Any, b: Any) -> Any:
        return self.matmul(a.reshape(-1), b.reshape(-1))

    def inner(self, a: Any, b: Any) -> Any:
        return self.tensordot(a, b, ((-1,), (-1,)))

    def outer(self, a: Any, b: Any, out: Any = None) -> Any:
        return self.multiply(a.reshape(-1)[:, None], b.reshape(-1)[None], out=out)

    def tensordot(self, a: Any, b: Any, axes: Any = 2) -> Any:
        if isinstance(axes, int):
            axes = (tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes)))
        mine, theirs = (tuple(_axes(given, x.ndim)) for given, x in zip(axes, (a, b), strict=True))
        left = [d for d in range(a.ndim) if d not in mine]
        right = [d for d in range(b.ndim) if d not in theirs]
        if [a.shape[d] for d in mine] != [b.shape[d] for d in theirs]:
            raise ValueError(f"tensordot of arrays of shapes {a.shape} and {b.shape}: dims {mine} and {theirs} differ")
        m, n, k = (math.prod(x.shape[d] for d in dims) for x, dims in ((a, left), (b, right), (a, mine)))
        x = a.transpose((*left, *mine)).reshape(m, k)
        y = b.transpose((*theirs, *right)).reshape(k, n)
        return self.matmul(x, y).reshape((*(a.shape[d] for d in left), *(b.shape[d] for d in right)))

    def einsum(self, rule: str, *operands: Any, out: Any = None, optimize: Any = False, **_: Any) -> Any:
        if not lack_values(operands):
            return np.einsum(rule, *operands, optimize=optimize)
        inputs, _arrow, result = rule.replace(" ", "").partition("->")
        sizes: dict[str, int] = {}
        lead: tuple[int, ...] = ()
        for part, x in zip(inputs.split(","), operands, strict=True):
            before, dots, after = part.partition("...")
            n = len(before) + len(after)
            shape = _shape(x)
            if dots:
                lead = np.broadcast_shapes(lead, shape[len(before) : len(shape) - len(after)])
            elif n != len(shape):
                raise ValueError(f"einsum {rule!r}: an operand of shape {shape} does not have the dims {part!r}")
            for letter, length in zip(
                before + after, (*shape[: len(before)], *shape[len(shape) - len(after) :]), strict=True
            ):
                if sizes.setdefault(letter, length) != length and 1 not in (length, sizes[letter]):
                    raise ValueError(f"einsum {rule!r}: dim {letter!r} is {sizes[letter]} and {length}")
                sizes[letter] = max(sizes[letter], length)
        if not _arrow:
            letters = inputs.replace(",", "").replace("...", "")
            result = ("..." if "..." in inputs else "") + "".join(
                sorted(c for c in set(letters) if letters.count(c) == 1)
            )
        before, dots, after = result.partition("...")
        shape = (*(sizes[c] for c in before), *(lead if dots else ()), *(sizes[c] for c in after))
        dtype = np.result_type(*(x.dtype for x in operands))
        self._device.kernel("einsum", sum(map(_size, operands)), max(x.size for x in operands), dtype)
        return ShapeArray(self._device, shape, dtype) if out is None else out

    # -------------------------------------------------------------------------------------- reductions
    def _reduce(
        self, name: str, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False,
        initial: Any = None,
    ) -> Any:  # fmt: skip
        axes = _axes(axis, a.ndim)
        if _of_some(name) and initial is None and 0 in (a.shape[d] for d in axes):
            raise ValueError(f"{name} of the shape {a.shape} over dims {axes}: there is no element, and no initial one")
        shape = [1 if d in axes else n for d, n in enumerate(a.shape) if keepdims or d not in axes]
        self._device.kernel(name, a.nbytes, a.size, a.dtype)
        if out is not None:
            return out
        return ShapeArray(self._device, shape, _reduced(name, a.dtype) if dtype is None else dtype)

    def sum(
        self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False, **_: Any
    ) -> Any:
        if not isinstance(a, ShapeArray):
            return np.sum(a, axis, dtype, keepdims=keepdims)
        return self._reduce("add", a, axis, dtype, out, keepdims)

    def prod(self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return np.prod(a, axis, dtype, keepdims=keepdims)
        return self._reduce("multiply", a, axis, dtype, out, keepdims)

    def _largest(self, name: str, a: Any, axis: Any, out: Any, keepdims: bool, more: dict[str, Any]) -> Any:
        if not isinstance(a, ShapeArray):
            return getattr(np, name)(a, axis, keepdims=keepdims, **more)
        of = "maximum" if name == "max" else "minimum"
        return self._reduce(of, a, axis, None, out, keepdims, more.get("initial"))

    def max(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:
        return self._largest("max", a, axis, out, keepdims, more)

    def min(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:
        return self._largest("min", a, axis, out, keepdims, more)

    amax, amin = max, min

    def mean(self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return np.mean(a, axis, dtype, keepdims=keepdims)
        kind = dtype or (np.float64 if a.dtype.kind in "biu" else a.dtype)
        return self._reduce("mean", a, axis, kind, out, keepdims)

    def var(
        self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: bool = False
    ) -> Any:
        kind = dtype or (np.float64 if a.dtype.kind in "biu" else a.real.dtype)
        return self._reduce("var", a, axis, kind, out, keepdims)

    std = var

    def _counted(self, name: str, ufunc: str, a: Any, axis: Any, kind: Any, out: Any, keepdims: bool) -> Any:
        if not isinstance(a, ShapeArray):
            return getattr(np, name)(a, axis, keepdims=keepdims)
        return self._reduce(ufunc, a, axis, kind, out, keepdims)

    def any(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._counted("any", "logical_or", a, axis, np.bool_, out, keepdims)

    def all(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._counted("all", "logical_and", a, axis, np.bool_, out, keepdims)

    def count_nonzero(self, a: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return self._counted("count_nonzero", "count_nonzero", a, axis, np.int64, None, keepdims)

    def argmax(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._counted("argmax", "argmax", a, axis, np.int64, out, keepdims)

    def argmin(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._counted("argmin", "argmin", a, axis, np.int64, out, keepdims)

    def trace(self, a: Any, *args: Any) -> Any:
        return self.sum(a.diagonal(*args), axis=-1)

    # -------------------------------------------------------------------------------------- elementwise and the like
    def where(self, condition: Any, *both: Any) -> Any:
        if not lack_values((condition, *both)):
            return self._device.from_host(np.where(condition, *both))
        if len(both) != 2:
            raise values_needed("where() with a condition alone")
        shape = np.broadcast_shapes(*map(_shape, (condition, *both)))
        dtype = np.result_type(*map(_kinded, both))
        moved = sum(map(_size, (condition, *both))) + math.prod(shape) * dtype.itemsize
        self._device.kernel("where", moved, math.prod(shape), dtype)
        return ShapeArray(self._device, shape, dtype)

    def clip(self, a: Any, low: Any = None, high: Any = None, out: Any = None) -> Any:
        if not lack_values((a, low, high, out)):
            return np.clip(a, low, high, out=out)
        given = [x for x in (a, low, high) if x is not None]
        shape = np.broadcast_shapes(*map(_shape, given))
        if out is None:
            out = self._laid_out(shape, np.result_type(*map(_kinded, given)), given)
        self._device.kernel("clip", sum(map(_size, given)) + out.nbytes, out.size, out.dtype)
        return out

    def round(self, a: Any, decimals: int = 0, out: Any = None) -> Any:
        return self.clip(a, out=out)

    around = round

    def _elementwise(self, name: str, dtype: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not lack_values(inputs):
            return getattr(np, name)(*inputs, **kwargs)
        return self._device.made(np.broadcast_shapes(*map(_shape, inputs)), dtype, name)

    def isclose(self, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
        return self._elementwise("isclose", np.bool_, a, b, rtol, atol, equal_nan=equal_nan)

    def isreal(self, a: Any) -> Any:
        return self._elementwise("isreal", np.bool_, a)

    def iscomplex(self, a: Any) -> Any:
        return self._elementwise("iscomplex", np.bool_, a)

    def angle(self, a: Any, deg: bool = False) -> Any:
        real = a.real.dtype
        return self._elementwise("angle", _resolved(np.arctan2, (real, real), None)[0], a, deg=deg)

    def sinc(self, a: Any) -> Any:
        return self._elementwise("sinc", np.result_type(a.dtype, 1.0), a)

    def i0(self, a: Any) -> Any:
        return self._elementwise("i0", np.float64 if a.dtype.kind in "biu" else a.dtype, a)

    def convolve(self, a: Any, v: Any, mode: str = "full") -> Any:
        if not lack_values((a, v)):
            plain: Any = np.convolve
            return plain(a, v, mode)
        n, m = sorted((a.size, v.size))
        self._device.kernel("convolve", a.nbytes + v.nbytes, n * m, a.dtype)
        length = {"full": n + m - 1, "same": m, "valid": m - n + 1}[mode]
        return ShapeArray(self._device, length, np.result_type(a.dtype, v.dtype))

    def histogram(self, a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
        if not lack_values((a, bins, weights)):
            return np.histogram(a, bins, range, density, weights)
        count = len(bins) - 1 if _shape(bins) else int(bins)
        self._device.kernel("histogram", a.nbytes, a.size, a.dtype)
        return ShapeArray(self._device, count, np.int64 if weights is None else weights.dtype), bins

    def histogram2d(
        self, x: Any, y: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
    ) -> Any:
        if not lack_values((x, y, bins, weights)):
            return np.histogram2d(x, y, bins, range, density, weights)
        pair = bins if isinstance(bins, (tuple, list)) and len(bins) == 2 else (bins, bins)
        shape = [len(each) - 1 if _shape(each) else int(each) for each in pair]
        self._device.kernel("histogram2d", 2 * x.nbytes, x.size, x.dtype)
        return ShapeArray(self._device, shape, np.float64), *pair

    def interp(self, x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
        if not lack_values((x, xp, fp)):
            return np.interp(x, xp, fp, left, right, period)
        kind = np.complex128 if np.dtype(getattr(fp, "dtype", float)).kind == "c" else np.float64
        return self._device.made(_shape(x), kind, "interp")

    def nan_to_num(self, a: Any, copy: bool = True, **_: Any) -> Any:
        return self.clip(a, out=None if copy else a)

    def copyto(self, to: Any, source: Any, casting: str = "same_kind", where: Any = True) -> None:
        if not lack_values((to, source, where)):
            np.copyto(to, source, where=where)
            return
        check_fits(_shape(source), to.shape)
        self._device.kernel("copy", to.nbytes + _size(source), to.size, to.dtype)

    def putmask(self, a: Any, mask: Any, values: Any) -> None:
        self._device.kernel("copy", 2 * a.nbytes, a.size, a.dtype)

    def fill_diagonal(self, a: Any, value: Any) -> None:
        self._device.kernel("copy", min(a.shape) * a.itemsize, min(a.shape), a.dtype)

    def tril(self, a: Any, k: int = 0) -> Any:
        if not isinstance(a, ShapeArray):
            return np.tril(a, k)
        square = a if a.ndim != 1 else self.broadcast_to(a, (a.size, a.size))
        return self.where(np.True_, square, square)

    triu = tril

    def diag(self, a: Any, k: int = 0) -> Any:
        if not isinstance(a, ShapeArray):
            return np.diag(a, k)
        if a.ndim not in (1, 2):
            raise ValueError(f"diag of an array of shape {a.shape}: it takes one or two dims")
        return a.diagonal(k) if a.ndim > 1 else self.zeros((a.size + abs(k),) * 2, a.dtype)

    def cumsum(self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        if not isinstance(a, ShapeArray):
            return np.cumsum(a, axis, dtype)
        return self._accumulate("add", a, axis, dtype, out)

    def cumprod(self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        if not isinstance(a, ShapeArray):
            return np.cumprod(a, axis, dtype)
        return self._accumulate("multiply", a, axis, dtype, out)

    def _accumulate(self, name: str, a: Any, axis: Any, dtype: Any = None, out: Any = None) -> Any:
        shape = _along(a, axis)
        self._device.kernel("accumulate", 2 * a.nbytes, a.size, a.dtype)
        if out is not None:
            return out
        return ShapeArray(self._device, shape, _reduced(name, a.dtype) if dtype is None else dtype)

    def diff(self, a: Any, n: int = 1, axis: int = -1) -> Any:
        if not isinstance(a, ShapeArray):
            return np.diff(a, n, axis)
        shape = list(a.shape)
        shape[_axis(axis, a.ndim)] = max(0, shape[axis] - n)
        return self._device.made(shape, a.dtype, "subtract")

    def sort(self, a: Any, axis: Any = -1, **_: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.sort(a, axis)
        return self._device.made(_along(a, axis), a.dtype, "sort")

    def argsort(self, a: Any, axis: Any = -1, **kwargs: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.argsort(a, axis, **kwargs)
        return self._device.made(_along(a, axis), np.int64, "argsort")

    def partition(self, a: Any, kth: Any, axis: int = -1) -> Any:
        return self.sort(a, axis) if isinstance(a, ShapeArray) else np.partition(a, kth, axis)

    def argpartition(self, a: Any, kth: Any, axis: int = -1) -> Any:
        return self.argsort(a, axis) if isinstance(a, ShapeArray) else np.argpartition(a, kth, axis)

    def roll(self, a: Any, shift: Any, axis: Any = None) -> Any:
        return a.copy() if isinstance(a, ShapeArray) else np.roll(a, shift, axis)

    def searchsorted(self, a: Any, v: Any, **kwargs: Any) -> Any:
        if not lack_values((a, v)):
            return np.searchsorted(a, v, **kwargs)
        return self._device.made(_shape(v), np.int64, "searchsorted")

    # -------------------------------------------------------------------------------------- elements
    def take(self, a: Any, at: Any, axis: Any = None, out: Any = None, **_: Any) -> Any:
        if not lack_values((a, at)):
            return np.take(a, at, axis)
        if axis is None:
            shape = _shape(at)
        else:
            axis = _axis(axis, a.ndim)
            shape = (*a.shape[:axis], *_shape(at), *a.shape[axis + 1 :])
        return self._device.made(shape, a.dtype, "take") if out is None else out

    def take_along_axis(self, a: Any, at: Any, axis: int = -1) -> Any:
        if not lack_values((a, at)):
            return np.take_along_axis(a, at, axis)
        lead = np.broadcast_shapes(
            *(tuple(1 if d == axis % a.ndim else n for d, n in enumerate(x.shape)) for x in (a, at))
        )
        shape = tuple(at.shape[d] if d == axis % a.ndim else n for d, n in enumerate(lead))
        return self._device.made(shape, a.dtype, "take")

    def put_along_axis(self, a: Any, at: Any, values: Any, axis: int = -1) -> None:
        if not lack_values((a, at, values)):
            np.put_along_axis(a, at, values, axis)
        else:
            self._device.kernel("copy", 2 * at.size * a.itemsize, at.size, a.dtype)

    def stack(self, parts: Any, axis: int = 0, **_: Any) -> Any:
        parts = list(parts)
        if not lack_values(parts):
            return np.stack(parts, axis)
        shape = list(parts[0].shape)
        if any(list(p.shape) != shape for p in parts):
            raise ValueError(f"arrays of shapes {[p.shape for p in parts]} cannot be stacked: they should be equal")
        shape.insert(_axis(axis, len(shape) + 1), len(parts))
        return self._device.made(shape, np.result_type(*(p.dtype for p in parts)), "copy")

    def concatenate(self, parts: Any, axis: Any = 0, out: Any = None, dtype: Any = None) -> Any:
        parts = list(parts)
        if not lack_values(parts):
            return np.concatenate(parts, axis, dtype=dtype)
        if axis is None:
            parts, axis = [p.reshape(-1) for p in parts], 0
        shape = list(parts[0].shape)
        axis = _axis(axis, len(shape))
        for p in parts:
            if [n for d, n in enumerate(p.shape) if d != axis] != [n for d, n in enumerate(shape) if d != axis]:
                raise ValueError(f"arrays of shapes {[q.shape for q in parts]} cannot be joined along dim {axis}")
        shape[axis] = sum(p.shape[axis] for p in parts)
        kind = np.result_type(*(p.dtype for p in parts)) if dtype is None else dtype
        return self._device.made(shape, kind, "copy") if out is None else out

    concat = concatenate

    def hstack(self, parts: Any) -> Any:
        parts = list(parts)
        return self.concatenate(parts, 0 if parts[0].ndim == 1 else 1)

    def vstack(self, parts: Any) -> Any:
        return self.concatenate([self.atleast_2d(p) for p in parts])

    def tile(self, a: Any, repeats: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.tile(a, repeats)
        given = (repeats,) if isinstance(repeats, int) else tuple(repeats)
        n = max(len(given), a.ndim)
        shape = [x * y for x, y in zip((1,) * (n - a.ndim) + a.shape, (1,) * (n - len(given)) + given, strict=True)]
        return self._device.made(shape, a.dtype, "copy")

    def repeat(self, a: Any, repeats: Any, axis: Any = None) -> Any:
        if not lack_values((a, repeats)):
            return np.repeat(a, repeats, axis)
        if axis is None:
            a, axis = a.reshape(-1), 0
        axis = _axis(axis, a.ndim)
        n = a.shape[axis]
        shape = list(a.shape)
        shape[axis] = n * repeats if isinstance(repeats, (int, np.integer)) else int(np.sum(repeats))
        return self._device.made(shape, a.dtype, "copy")

    def pad(self, a: Any, widths: Any, mode: Any = "constant", **_: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.pad(a, widths, mode)
        both = np.broadcast_to(np.asarray(widths), (a.ndim, 2))
        return self._device.made([n + int(w.sum()) for n, w in zip(a.shape, both, strict=True)], a.dtype, "copy")

    def array_equal(self, a: Any, b: Any) -> bool:
        if not lack_values((a, b)):
            return bool(np.array_equal(a, b))
        raise values_needed("array_equal()")


class Transforms:
    """SciPy's `fft`, by shapes: the functions that transform dims of given lengths."""

    def __init__(self, device: ShapesBackend) -> None:
        self._device = device

    def _made(self, name: str, x: Any, lengths: dict[int, int], dtype: Any) -> ShapeArray:
        shape = [lengths.get(d, n) for d, n in enumerate(x.shape)]
        out = ShapeArray(self._device, shape, dtype)
        self._device.kernel(f"fft.{name}", x.nbytes + out.nbytes, max(x.size, out.size), out.dtype)
        return out

    def fftn(self, x: Any, s: Any = None, axes: Any = None, **_: Any) -> ShapeArray:
        where = _axes(axes, x.ndim)
        lengths = [x.shape[d] for d in where] if s is None else s
        return self._made("fftn", x, dict(zip(where, lengths, strict=True)), np.result_type(x.dtype, np.complex64))

    ifftn = fftn

    def rfft(self, x: Any, n: int | None = None, axis: int = -1, **_: Any) -> ShapeArray:
        axis %= x.ndim
        length = (x.shape[axis] if n is None else n) // 2 + 1
        return self._made("rfft", x, {axis: length}, np.result_type(x.dtype, np.complex64))

    def irfft(self, x: Any, n: int | None = None, axis: int = -1, **_: Any) -> ShapeArray:
        axis %= x.ndim
        length = 2 * (x.shape[axis] - 1) if n is None else n
        return self._made("irfft", x, {axis: length}, x.real.dtype)
