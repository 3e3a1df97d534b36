"""The functions of the Python Array API standard (2025.12) on distributed arrays; `parlinalg` itself has them all.

Where the standard says no more, a function does what NumPy's of the same name does.  Arrays that are made live on
`grid`, by default the default grid, in `layout`, by default the one of `Grid.default_layout`.  Plain arrays and nested
lists given as data are the same on all ranks.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import contraction, joining, shapes, sorting
from parlinalg.array.core import DistArray, axis_of, whole
from parlinalg.array.create import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from parlinalg.array.dispatch import of_arrays, primitive
from parlinalg.grid import default_grid
from parlinalg.layout import Layout

__array_api_version__ = "2025.12"

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "asin",
    "asinh",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "bool",
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "can_cast",
    "ceil",
    "clip",
    "complex64",
    "complex128",
    "concat",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "divide",
    "e",
    "empty",
    "empty_like",
    "equal",
    "exp",
    "expand_dims",
    "expm1",
    "eye",
    "finfo",
    "flip",
    "float32",
    "float64",
    "floor",
    "floor_divide",
    "from_dlpack",
    "full",
    "full_like",
    "greater",
    "greater_equal",
    "hypot",
    "iinfo",
    "imag",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "isdtype",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "linspace",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "meshgrid",
    "min",
    "minimum",
    "moveaxis",
    "multiply",
    "nan",
    "negative",
    "newaxis",
    "nextafter",
    "nonzero",
    "not_equal",
    "ones",
    "ones_like",
    "permute_dims",
    "pi",
    "positive",
    "pow",
    "prod",
    "real",
    "reciprocal",
    "remainder",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "round",
    "searchsorted",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sort",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "sum",
    "take",
    "take_along_axis",
    "tan",
    "tanh",
    "tensordot",
    "tile",
    "tril",
    "triu",
    "trunc",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]

bool = np.dtype(np.bool_)
int8, int16, int32, int64 = (np.dtype(f"int{n}") for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (np.dtype(f"uint{n}") for n in (8, 16, 32, 64))
float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
complex64, complex128 = np.dtype(np.complex64), np.dtype(np.complex128)
e, pi, inf, nan, newaxis = math.e, math.pi, math.inf, math.nan, None

DTYPES = (
    bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float32, float64, complex64, complex128,
)  # fmt: skip
Shape = Any
Scalar = Any


# ------------------------------------------------------------------------------------------------ inspection
class Info:
    """The inspection functions that `__array_namespace_info__()` returns."""

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities of the namespace."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Return the device of the default grid's arrays."""
        return default_grid().device

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """Return the dtypes of results for which none is given."""
        return {
            "real floating": float64, "complex floating": complex128, "integral": int64, "indexing": int64,
        }  # fmt: skip

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """Return the dtypes by name, of one kind or several."""
        return {np.dtype(t).name: t for t in DTYPES if kind is None or isdtype(t, kind)}

    def devices(self) -> tuple[str, ...]:
        """Return the devices on which arrays of the default grid can be made."""
        return (default_grid().device,)


def __array_namespace_info__() -> Info:
    """Return the inspection functions of the standard."""
    return Info()


@of_arrays
def meshgrid(*arrays: DistArray, indexing: str = "xy") -> tuple[DistArray, ...]:
    """Return arrays of coordinates from one line of each dim."""
    return tuple(joining.meshgrid(*arrays, indexing=indexing))


@of_arrays
def tril(x: DistArray, /, *, k: int = 0) -> DistArray:
    """Return the matrices with zeros above diagonal number k."""
    return joining.triangle(x, k, lower=True)


@of_arrays
def triu(x: DistArray, /, *, k: int = 0) -> DistArray:
    """Return the matrices with zeros below diagonal number k."""
    return joining.triangle(x, k, lower=False)


# ------------------------------------------------------------------------------------------------ dtypes
@of_arrays
def astype(x: DistArray, dtype: Any, /, *, copy: builtins.bool = True, device: Any = None) -> DistArray:
    """Return every element converted."""
    if device is not None and device != x.device:
        raise ValueError(f"the array is on {x.device!r}, not on {device!r}")
    if x.dtype == np.dtype(dtype) and not copy:
        return x
    if x.dtype.kind == "c" and np.dtype(dtype).kind not in "cb":
        raise TypeError(f"a conversion of {x.dtype} to {np.dtype(dtype)} would lose the imaginary parts; take real(x)")
    return x.astype(dtype)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") and not isinstance(x, type) else x  # NumPy's scalar types have one as well


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """Return True if every value of one dtype (or of an array's) is one of the other."""
    return np.can_cast(_dtype(from_), to)


@dataclass(frozen=True)
class FloatLimits:
    """The limits of a floating-point dtype, as Python floats."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: Any


def finfo(type: Any, /) -> FloatLimits:
    """Return the limits of a floating-point dtype (of a complex one's parts)."""
    found = np.finfo(_dtype(type))
    limits = (float(v) for v in (found.eps, found.max, found.min, found.smallest_normal))
    eps, most, least, normal = limits
    return FloatLimits(found.bits, eps, most, least, normal, np.dtype(found.dtype))


def iinfo(type: Any, /) -> Any:
    """Return the limits of an integer dtype."""
    return np.iinfo(_dtype(type))


def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """Return True if a dtype is another, or of a kind such as "integral", or of one of several."""
    return np.isdtype(np.dtype(dtype), kind)


def result_type(*arrays_and_dtypes: Any) -> Any:
    """Return the dtype of a result of arrays, dtypes and Python scalars."""
    return np.result_type(*(_dtype(x) for x in arrays_and_dtypes))


# ------------------------------------------------------------------------------------------------ elementwise
def _elementwise(name: str, ufunc: np.ufunc) -> Callable[..., DistArray]:
    def one(x: DistArray, /) -> DistArray:
        return ufunc(x)

    def two(x1: Any, x2: Any, /) -> DistArray:
        return ufunc(x1, x2)

    call = one if ufunc.nin == 1 else two
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Return `numpy.{ufunc.__name__}` of every element."
    return call


abs = _elementwise("abs", np.absolute)
acos = _elementwise("acos", np.arccos)
acosh = _elementwise("acosh", np.arccosh)
add = _elementwise("add", np.add)
asin = _elementwise("asin", np.arcsin)
asinh = _elementwise("asinh", np.arcsinh)
atan = _elementwise("atan", np.arctan)
atan2 = _elementwise("atan2", np.arctan2)
atanh = _elementwise("atanh", np.arctanh)
bitwise_and = _elementwise("bitwise_and", np.bitwise_and)
bitwise_invert = _elementwise("bitwise_invert", np.invert)
bitwise_left_shift = _elementwise("bitwise_left_shift", np.left_shift)
bitwise_or = _elementwise("bitwise_or", np.bitwise_or)
bitwise_right_shift = _elementwise("bitwise_right_shift", np.right_shift)
bitwise_xor = _elementwise("bitwise_xor", np.bitwise_xor)
ceil = _elementwise("ceil", np.ceil)
conj = _elementwise("conj", np.conjugate)
copysign = _elementwise("copysign", np.copysign)
cos = _elementwise("cos", np.cos)
cosh = _elementwise("cosh", np.cosh)
divide = _elementwise("divide", np.divide)
equal = _elementwise("equal", np.equal)
exp = _elementwise("exp", np.exp)
expm1 = _elementwise("expm1", np.expm1)
floor = _elementwise("floor", np.floor)
floor_divide = _elementwise("floor_divide", np.floor_divide)
greater = _elementwise("greater", np.greater)
greater_equal = _elementwise("greater_equal", np.greater_equal)
hypot = _elementwise("hypot", np.hypot)
isfinite = _elementwise("isfinite", np.isfinite)
isinf = _elementwise("isinf", np.isinf)
isnan = _elementwise("isnan", np.isnan)
less = _elementwise("less", np.less)
less_equal = _elementwise("less_equal", np.less_equal)
log = _elementwise("log", np.log)
log10 = _elementwise("log10", np.log10)
log1p = _elementwise("log1p", np.log1p)
log2 = _elementwise("log2", np.log2)
logaddexp = _elementwise("logaddexp", np.logaddexp)
logical_and = _elementwise("logical_and", np.logical_and)
logical_not = _elementwise("logical_not", np.logical_not)
logical_or = _elementwise("logical_or", np.logical_or)
logical_xor = _elementwise("logical_xor", np.logical_xor)
maximum = _elementwise("maximum", np.maximum)
minimum = _elementwise("minimum", np.minimum)
multiply = _elementwise("multiply", np.multiply)
negative = _elementwise("negative", np.negative)
nextafter = _elementwise("nextafter", np.nextafter)
not_equal = _elementwise("not_equal", np.not_equal)
positive = _elementwise("positive", np.positive)
pow = _elementwise("pow", np.power)
reciprocal = _elementwise("reciprocal", np.reciprocal)
remainder = _elementwise("remainder", np.remainder)
sign = _elementwise("sign", np.sign)
signbit = _elementwise("signbit", np.signbit)
sin = _elementwise("sin", np.sin)
sinh = _elementwise("sinh", np.sinh)
sqrt = _elementwise("sqrt", np.sqrt)
square = _elementwise("square", np.square)
subtract = _elementwise("subtract", np.subtract)
tan = _elementwise("tan", np.tan)
tanh = _elementwise("tanh", np.tanh)
trunc = _elementwise("trunc", np.trunc)


@primitive
@of_arrays
def real(x: DistArray, /) -> DistArray:
    """Return the real parts."""
    return x.real


@primitive
@of_arrays
def imag(x: DistArray, /) -> DistArray:
    """Return the imaginary parts."""
    return x.imag


def round(x: DistArray, /, *, decimals: int = 0) -> DistArray:
    """Return every element rounded, halves to even."""
    return np.round(x, decimals)  # type: ignore[return-value]


@of_arrays
def clip(x: DistArray, /, min: Any = None, max: Any = None) -> DistArray:
    """Return every element moved into the range from `min` to `max`, in the dtype of x."""
    out = x
    if min is not None:
        out = np.maximum(out, min)
    if max is not None:
        out = np.minimum(out, max)
    out = out.copy() if out is x else out
    return out if out.dtype == x.dtype else out.astype(x.dtype)


# ------------------------------------------------------------------------------------------------ manipulation
def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which these broadcast."""
    return np.broadcast_shapes(*shapes)


@of_arrays
def broadcast_to(x: DistArray, /, shape: Any) -> DistArray:
    """Return the array repeated to a shape."""
    return joining.broadcast_to(x, shape)


@of_arrays
def broadcast_arrays(*arrays: DistArray) -> tuple[DistArray, ...]:
    """Return the arrays repeated to their common shape."""
    return tuple(joining.broadcast_arrays(*arrays))


@of_arrays
def concat(arrays: Sequence[DistArray], /, *, axis: int | None = 0) -> DistArray:
    """Return the arrays one after the other along a dim; flattened, if `axis` is None."""
    return joining.concatenate(arrays, axis)


@of_arrays
def expand_dims(x: DistArray, /, axis: Any = 0) -> DistArray:
    """Return the array with new dims of size 1, at these places of the result."""
    try:
        return joining.expand_dims(x, axis)
    except np.exceptions.AxisError as error:
        raise IndexError(str(error)) from None


@of_arrays
def flip(x: DistArray, /, *, axis: Any = None) -> DistArray:
    """Return the array with the order of elements reversed along dims (default: all)."""
    return joining.flip(x, axis)


@of_arrays
def moveaxis(x: DistArray, source: Any, destination: Any, /) -> DistArray:
    """Return the array with dims moved to other places."""
    return np.moveaxis(x, source, destination)  # type: ignore[type-var]


@of_arrays
def permute_dims(x: DistArray, /, axes: tuple[int, ...]) -> DistArray:
    """Return the array with its dims in another order."""
    return x.transpose(axes)


@of_arrays
def repeat(x: DistArray, repeats: Any, /, *, axis: int | None = None) -> DistArray:
    """Return the items of a dim (default: all elements) repeated."""
    return joining.repeat(x, repeats, axis)


@of_arrays
def reshape(x: DistArray, /, shape: Any, *, copy: Any = None, layout: Layout | None = None) -> DistArray:
    """Return the same elements, in C order, in another shape."""
    if copy is False:
        raise ValueError("reshape(copy=False): results never share memory with their source")
    return shapes.reshape(x, shape, layout)


@of_arrays
def roll(x: DistArray, /, shift: Any, *, axis: Any = None) -> DistArray:
    """Return the array with elements moved along dims, those beyond the end coming in at the begin."""
    return joining.roll(x, shift, axis)


@of_arrays
def squeeze(x: DistArray, /, axis: Any = None) -> DistArray:
    """Return the array without these dims, of size 1."""
    return np.squeeze(x, axis)  # type: ignore[return-value]


@of_arrays
def stack(arrays: Sequence[DistArray], /, *, axis: int = 0) -> DistArray:
    """Return arrays of one shape along a new dim."""
    return joining.stack(arrays, axis)


@of_arrays
def tile(x: DistArray, repetitions: tuple[int, ...], /) -> DistArray:
    """Return the array repeated as a whole, so often along each dim."""
    return joining.tile(x, repetitions)


@of_arrays
def unstack(x: DistArray, /, *, axis: int = 0) -> tuple[DistArray, ...]:
    """Return the items of a dim."""
    return joining.unstack(x, axis)


@of_arrays
def take(x: DistArray, indices: Any, /, *, axis: int | None = None) -> DistArray:
    """Return the items of a dim that indices choose."""
    return joining.take(x, indices, axis)


@of_arrays
def take_along_axis(x: DistArray, indices: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return for each element of `indices` the element of its line along a dim."""
    return joining.take_along_axis(x, indices, axis)


# ------------------------------------------------------------------------------------------------ searching
@of_arrays
def argmax(x: DistArray, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the index of the first largest element along a dim, or of all in C order."""
    return sorting.arg_extreme(x, "max", axis, keepdims)


@of_arrays
def argmin(x: DistArray, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the index of the first smallest element along a dim, or of all in C order."""
    return sorting.arg_extreme(x, "min", axis, keepdims)


@of_arrays
def count_nonzero(x: DistArray, /, *, axis: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return how many elements are not zero, over dims."""
    return sum(not_equal(x, 0), axis=axis, dtype=int64, keepdims=keepdims)


@of_arrays
def nonzero(x: DistArray, /) -> tuple[DistArray, ...]:
    """Return for each dim the indices of the elements that are not zero, in C order."""
    return sorting.nonzero(x)


@primitive
@of_arrays
def searchsorted(x1: DistArray, x2: Any, /, *, side: str = "left", sorter: DistArray | None = None) -> DistArray:
    """Return where the values x2 would be inserted into x1, sorted or in the order `sorter`."""
    x1 = x1 if sorter is None else joining.take(x1, sorter, 0)
    return sorting.searchsorted(x1, x2 if isinstance(x2, DistArray) else asarray(x2, grid=x1.grid), side)


def where(condition: DistArray, x1: Any = None, x2: Any = None, /) -> Any:
    """Return elements of x1 where the condition holds, of x2 elsewhere; without the two `nonzero(condition)`."""
    return np.where(condition, x1, x2)


@primitive
@of_arrays
def isin(x1: Any, x2: Any, /, *, invert: builtins.bool = False) -> DistArray:
    """Return True for each element of x1 that is among the elements of x2."""
    grid = (x1 if isinstance(x1, DistArray) else x2).grid
    x1, x2 = (x if isinstance(x, DistArray) else asarray(x, grid=grid) for x in (x1, x2))
    if not x2.size:
        return full_like(x1, invert, dtype=bool)
    kind = np.result_type(x1.dtype, x2.dtype)
    line = sorting.sort(shapes.reshape(x2.astype(kind), (x2.size,)))
    values = x1.astype(kind)
    at = sorting.searchsorted(line, values)
    found = np.minimum(at, x2.size - 1)
    same = np.equal(line[found], values)
    return np.not_equal(same, invert)


@of_arrays
def sort(
    x: DistArray, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> DistArray:
    """Return the array sorted along a dim."""
    return sorting.sort(x, axis, descending)


@of_arrays
def argsort(
    x: DistArray, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> DistArray:
    """Return the indices that sort the array along a dim."""
    return sorting.argsort(x, axis, descending)


class UniqueAllResult(NamedTuple):
    """The result of `unique_all`."""

    values: DistArray
    indices: DistArray
    inverse_indices: DistArray
    counts: DistArray


class UniqueCountsResult(NamedTuple):
    """The result of `unique_counts`."""

    values: DistArray
    counts: DistArray


class UniqueInverseResult(NamedTuple):
    """The result of `unique_inverse`."""

    values: DistArray
    inverse_indices: DistArray


@primitive
@of_arrays
def unique_all(x: DistArray, /) -> UniqueAllResult:
    """Return the distinct values, sorted, where each is first, every element's value's number, and the counts."""
    return UniqueAllResult(*sorting.unique(x))


@primitive
@of_arrays
def unique_counts(x: DistArray, /) -> UniqueCountsResult:
    """Return the distinct values, sorted, and how often each is there."""
    values, _, _, counts = sorting.unique(x)
    return UniqueCountsResult(values, counts)


@primitive
@of_arrays
def unique_inverse(x: DistArray, /) -> UniqueInverseResult:
    """Return the distinct values, sorted, and for every element the number of its value."""
    values, _, inverse, _ = sorting.unique(x)
    return UniqueInverseResult(values, inverse)


@primitive
@of_arrays
def unique_values(x: DistArray, /) -> DistArray:
    """Return the distinct values, sorted."""
    return sorting.unique(x)[0]


# ------------------------------------------------------------------------------------------------ statistics
def max(x: DistArray, /, *, axis: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the largest elements over dims."""
    return np.max(x, axis=axis, keepdims=keepdims)


def min(x: DistArray, /, *, axis: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the smallest elements over dims."""
    return np.min(x, axis=axis, keepdims=keepdims)


def mean(x: DistArray, /, *, axis: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the means over dims."""
    return np.mean(x, axis=axis, keepdims=keepdims)


def _wide(x: DistArray, dtype: Any) -> Any:
    """Return the dtype in which sums and products of an array are made."""
    if dtype is not None:
        return np.dtype(dtype)
    return {"b": int64, "i": int64, "u": uint64}.get(x.dtype.kind, x.dtype)


@of_arrays
def sum(x: DistArray, /, *, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the sums over dims."""
    return np.sum(x, axis=axis, dtype=_wide(x, dtype), keepdims=keepdims)


@of_arrays
def prod(x: DistArray, /, *, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return the products over dims."""
    return np.prod(x, axis=axis, dtype=_wide(x, dtype), keepdims=keepdims)


def var(x: DistArray, /, *, axis: Any = None, correction: float = 0.0, keepdims: builtins.bool = False) -> DistArray:
    """Return the variances over dims, with N - correction in the denominator."""
    return np.var(x, axis=axis, ddof=correction, keepdims=keepdims)


def std(x: DistArray, /, *, axis: Any = None, correction: float = 0.0, keepdims: builtins.bool = False) -> DistArray:
    """Return the standard deviations over dims, with N - correction in the denominator."""
    return np.std(x, axis=axis, ddof=correction, keepdims=keepdims)


def all(x: DistArray, /, *, axis: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return True where all elements over dims are true."""
    return np.all(x, axis=axis, keepdims=keepdims)


def any(x: DistArray, /, *, axis: Any = None, keepdims: builtins.bool = False) -> DistArray:
    """Return True where any element over dims is true."""
    return np.any(x, axis=axis, keepdims=keepdims)


@of_arrays
def cumulative_sum(
    x: DistArray, /, *, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False
) -> DistArray:
    """Return the running sums along a dim, with `include_initial` behind a zero."""
    return _running(x, "add", axis, dtype, include_initial)


@of_arrays
def cumulative_prod(
    x: DistArray, /, *, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False
) -> DistArray:
    """Return the running products along a dim, with `include_initial` behind a one."""
    return _running(x, "multiply", axis, dtype, include_initial)


def _running(x: DistArray, name: str, axis: int | None, dtype: Any, initial: builtins.bool) -> DistArray:
    if axis is None:
        if x.ndim != 1:
            raise ValueError(f"axis= is needed for an array of {x.ndim} dims")
        axis = 0
    out = sorting.cumulative(x, axis, name, _wide(x, dtype))
    if not initial:
        return out
    d = axis_of(axis, x.ndim)
    shape = tuple(1 if i == d else n for i, n in enumerate(x.shape))
    first = full(
        shape,
        0 if name == "add" else 1,
        x.grid,
        Layout(*(() if i == d else c for i, c in enumerate(out.layout.dims))),
        dtype=out.dtype,
    )
    return joining.concatenate([first, out], d)


@of_arrays
def diff(
    x: DistArray, /, n: int = 1, axis: int = -1, prepend: DistArray | None = None, append: DistArray | None = None
) -> DistArray:
    """Return the differences of neighbours along a dim, n times."""
    return joining.diff(x, n, axis, prepend, append)


# ------------------------------------------------------------------------------------------------ linear algebra
@of_arrays
def matrix_transpose(x: DistArray, /) -> DistArray:
    """Return the matrices with rows and columns exchanged."""
    return x.mT


@of_arrays
def vecdot(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the sums of conj(x1) x2 along a dim."""
    if not -builtins.min(x1.ndim, x2.ndim) <= whole("vecdot: axis", axis) < 0:
        raise ValueError(f"vecdot takes an axis from {-builtins.min(x1.ndim, x2.ndim)} to -1, not {axis}")
    if x1.shape[axis] != x2.shape[axis]:
        raise ValueError(f"vecdot: dims of {x1.shape[axis]} and {x2.shape[axis]} elements do not match")
    return np.sum(x1.conj() * x2, axis=axis, dtype=np.result_type(x1.dtype, x2.dtype))


@primitive
@of_arrays
def tensordot(x1: DistArray, x2: DistArray, /, *, axes: Any = 2) -> DistArray:
    """Return the sums of products over the last `axes` dims of x1 and the first of x2, or over two lists of dims."""
    left, right = contraction.pairs_of_dims(x1.shape, x2.shape, axes)
    rows, columns = ([d for d in range(x.ndim) if d not in taken] for x, taken in ((x1, left), (x2, right)))
    m, k = math.prod(x1.shape[d] for d in rows), math.prod(x1.shape[d] for d in left)
    n = math.prod(x2.shape[d] for d in columns)
    a = shapes.reshape(x1.transpose((*rows, *left)), (m, k))
    b = shapes.reshape(x2.transpose((*right, *columns)), (k, n))
    shape = tuple(x1.shape[d] for d in rows) + tuple(x2.shape[d] for d in columns)
    return shapes.reshape(np.matmul(a, b), shape)
