"""The stand-in's functions: NumPy's, with CuPy's names and parameters only."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from . import _api, cuda
from ._array import call, ndarray, wrap

ADDED = (np.int32, np.int64, np.float16, np.float32, np.float64, np.uint32, np.uint64)
"""Dtypes of `add.at`."""
WEAK_INTS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or")
"""Ufuncs in which Python's integers do not take on the dtypes of others."""


class ufunc:
    """An elementwise function; operands are device arrays and scalars.

    It takes the first of CuPy's loops to whose dtypes the operands can be cast, and NumPy's function of these.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.name = name
        self.nin, self.nout, self._loops = _api.UFUNCS[name]
        self._numpy: Any = getattr(np, name)
        self._loop = cache(self._loop_of)

    @property
    def types(self) -> list[str]:
        return [loop.replace("!", "?") for loop in self._loops]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_keywords(self.name, kwargs, {"out", "where", "dtype", "casting"})
        self._check(args)
        if isinstance(kwargs.get("where", True), bool):
            kwargs.pop("where", None)
        dtype = kwargs.pop("dtype", None)
        taken, made = self._loop(tuple(map(_kind, args[: self.nin])), None if dtype is None else np.dtype(dtype))

        def run(*given: Any, **options: Any) -> Any:
            inputs = [
                x.astype(to, copy=False) if hasattr(x, "astype") else np.array(x, to)
                for x, to in zip(given, taken, strict=False)
            ]
            found = self._numpy(*inputs, *given[self.nin :], **options)
            if self._numpy is np.true_divide and found.dtype.kind == "c":
                np.copyto(found, np.nan * (1 + 1j), where=inputs[1] == 0)
            elif self._numpy is np.power and found.dtype.kind == "f":
                found = np.asarray(found)  # NumPy gives a number of arrays without dims
                finite = np.isfinite(inputs[0]) & np.isfinite(inputs[1]) & np.isfinite(found)
                inexact = finite & (inputs[1] < 0) & (found != 0)  # as CUDA's are
                np.nextafter(found, found.dtype.type(0), out=found, where=inexact)
            if len(given) > self.nin or options.get("out") is not None:
                return found
            if self.nout == 1:
                return found.astype(made[0], copy=False)
            return tuple(x.astype(to, copy=False) for x, to in zip(found, made, strict=True))

        return call(run, args, kwargs)

    def _loop_of(self, kinds: tuple[Any, ...], dtype: np.dtype | None) -> tuple[list[np.dtype], list[np.dtype]]:
        own = list(map(np.dtype, kinds))
        scores = [_score(kind) for kind in own]
        arrays = [score for score, kind in zip(scores, kinds, strict=True) if not isinstance(kind, type)]
        strong = not arrays or max(scores) > max(arrays)  # scalars of a higher kind keep their dtypes
        strong |= self.name in WEAK_INTS and max(scores) < 2

        def takes(kind: Any, to: np.dtype) -> bool:
            if np.can_cast(kind, to):
                return True
            return isinstance(kind, type) and not strong and np.result_type(kind(0), to) == to

        for loop in self._loops:
            taken, made = loop.split("->")
            inputs, outputs = list(map(_dtype, taken)), [] if made == "!" else list(map(_dtype, made))
            if all(map(takes, kinds, inputs)) if dtype is None else outputs == [dtype] * self.nout:
                if made == "!":
                    raise TypeError(f"cupy_{self.name} takes no booleans")
                return inputs, outputs
        raise TypeError(f"Wrong type ({own if dtype is None else dtype}) of arguments for cupy_{self.name}")

    def _check(self, args: tuple[Any, ...]) -> None:
        for arg in args:
            if not isinstance(arg, (ndarray, np.generic, int, float, complex, type(None))):
                raise TypeError(f"Unsupported type {type(arg)}")

    def _method(self, method: str, allowed: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.name not in allowed:
            raise NotImplementedError(f"`{method}` is not supported for `cupy_{self.name}`")
        self._check(args[:1])
        return call(getattr(self._numpy, method), args, kwargs)

    def reduce(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._method("reduce", ("add", "multiply"), (array, axis, dtype, out, keepdims), {})

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        return self._method("accumulate", ("add", "multiply"), (array, axis, dtype, out), {})

    def reduceat(self, array: Any, indices: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        return self._method("reduceat", ("add",), (array, indices, axis, dtype, out), {})

    def outer(self, a: Any, b: Any, **kwargs: Any) -> Any:
        return call(self._numpy.outer, (a, b), kwargs)

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        if self.name == "add" and a.dtype not in ADDED:
            raise TypeError(f"cupy.add.at only supports {', '.join(t.__name__ for t in ADDED)} as data type")
        args = (a, indices) if b is None else (a, indices, b)
        self._method(
            "at", ("add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"), args, {}
        )

    def __repr__(self) -> str:
        return f"<ufunc 'cupy_{self.name}'>"


def _dtype(char: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if char == "E" else char)


def _kind(value: Any) -> Any:
    """The dtype of an operand; of Python's numbers their type."""
    if isinstance(value, bool):
        return np.dtype(bool)
    return getattr(value, "dtype", None) or next(t for t in (int, float, complex) if isinstance(value, t))


def _score(kind: np.dtype) -> int:
    return 0 if kind.kind == "b" else 1 if kind.kind in "iu" else 2


def _refuse_keywords(name: str, kwargs: dict[str, Any], allowed: set[str]) -> None:
    if unknown := set(kwargs) - allowed:
        raise TypeError(f"Wrong arguments {sorted(unknown)} for cupy_{name}")


def function(name: str) -> Any:
    """The device function of a dotted name such as `linalg.norm`."""
    place: Any = np
    for part in name.split("."):
        place = getattr(place, part)
    signature = _api.FUNCTIONS[name]

    def device_function(*args: Any, **kwargs: Any) -> Any:
        _api.check_call(name, signature, args, kwargs)
        if name == "where" and not isinstance(args[0], (ndarray, np.generic)):
            raise AttributeError(f"'{type(args[0]).__name__}' object has no attribute 'astype'")
        if name in ("argmin", "argmax"):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name == "matmul" and args[0].dtype.char == args[1].dtype.char == "E":
            if args[0].ndim > 2 or args[1].ndim > 2:
                raise TypeError("products of stacks of bfloat16 matrices fail in CuPy 14")
            return call(place, args, kwargs).astype(args[0].dtype)
        return call(place, args, kwargs)

    device_function.__name__ = name
    return device_function


def array(
    obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", subok: bool = False, ndmin: int = 0, *,
    blocking: bool = False,
) -> ndarray:  # fmt: skip
    """A new device array from host or device values."""
    if isinstance(obj, ndarray):
        obj._reachable()
        source = obj._a
    elif isinstance(obj, (list, tuple)) and _holds_device_arrays(obj):
        source = np.array(_strip(obj))
    else:
        source = np.array(obj)
    made = np.array(source, dtype, copy=True if copy else None, order=order, ndmin=ndmin)  # type: ignore[call-overload]
    cuda.issued()
    if isinstance(obj, np.ndarray):
        cuda.copied.append(("in", made.nbytes))
    if isinstance(obj, ndarray) and made is obj._a:
        return obj
    return wrap(made)  # type: ignore[no-any-return]


def _holds_device_arrays(obj: Any) -> bool:
    return any(isinstance(o, ndarray) or (isinstance(o, (list, tuple)) and _holds_device_arrays(o)) for o in obj)


def _strip(obj: Any) -> Any:
    return [o._a if isinstance(o, ndarray) else _strip(o) if isinstance(o, (list, tuple)) else o for o in obj]


def asarray(
    a: Any, dtype: Any = None, order: Any = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    return array(a, dtype, bool(copy), order or "K", blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, False, "C")


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, False, "F")


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray:
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return np.asarray(a, order=order)  # type: ignore[call-overload, no-any-return]


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> ndarray:
    if not isinstance(array, ndarray):
        raise BufferError("CuPy takes memory of a GPU by DLPack only")
    return wrap(array._a.copy() if copy else array._a)  # type: ignore[no-any-return]
