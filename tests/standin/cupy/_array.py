"""The stand-in's array: NumPy's arithmetic behind a wall, with CuPy's refusals."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import numpy as np

from . import _api, cuda


class Flags:
    """An array's flags; CuPy has these only."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous = flags.c_contiguous
        self.f_contiguous = flags.f_contiguous
        self.owndata = flags.owndata
        self.fnc = flags.fnc
        self.forc = flags.forc

    def __getitem__(self, name: str) -> bool:
        return {"C_CONTIGUOUS": self.c_contiguous, "F_CONTIGUOUS": self.f_contiguous, "OWNDATA": self.owndata}[name]


class MemoryPointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class ndarray:
    """A block of GPU memory that host code cannot reach."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("__weakref__", "_a", "_base", "_device")

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        if memptr is not None or strides is not None:
            raise NotImplementedError("the stand-in makes no arrays on given memory")
        self._take_over(np.empty(shape, dtype, order))  # type: ignore[call-overload]

    def _take_over(self, array: np.ndarray) -> None:
        if array.dtype.char not in _api.DTYPES:
            raise ValueError(f"Unsupported dtype {array.dtype}")
        self._a = array
        self._base: ndarray | None = None
        self._device = cuda.Device()

    # What host code may not do

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        cuda.refuse_unless_aware()
        return {
            "shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "version": 3, "stream": None,
            "strides": None if self._a.flags.c_contiguous else self._a.strides, "data": (self._a.ctypes.data, False),
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if dl_device is None or dl_device[0] == 2:
            raise NotImplementedError("the stand-in has no memory of a GPU to hand out")
        if copy is False:
            raise ValueError("GPU memory cannot be exported to CPU without making a copy")
        return self.get().__dlpack__(max_version=max_version)

    # Attributes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._a.shape

    dtype = property(lambda self: self._a.dtype)
    size = property(lambda self: self._a.size)
    ndim = property(lambda self: self._a.ndim)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    flags = property(lambda self: Flags(self._a.flags))
    device = property(lambda self: self._device)
    base = property(lambda self: self._base)
    data = property(lambda self: MemoryPointer(self._a.ctypes.data))
    T = property(lambda self: self._view(self._a.T))
    mT = property(lambda self: self._view(self._a.mT))

    @property
    def real(self) -> ndarray:
        return self._view(self._a.real)

    @real.setter
    def real(self, value: Any) -> None:
        self._a.real = unwrap(value)

    @property
    def imag(self) -> ndarray:
        return self._view(self._a.imag)

    @imag.setter
    def imag(self, value: Any) -> None:
        self._a.imag = unwrap(value)

    def _view(self, array: np.ndarray) -> ndarray:
        out = wrap(array)
        if np.may_share_memory(out._a, self._a):
            out._base = self if self._base is None else self._base
        return out

    # Between host and device

    def get(
        self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        self._reachable()
        if out is None:
            out = np.empty_like(self._a, order="C" if order == "A" else order)  # type: ignore[call-overload]
        elif not isinstance(out, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be obtained from cupy.ndarray, not {type(out)}")
        elif out.dtype != self.dtype or out.shape != self.shape:
            raise ValueError(f"Shape or dtype mismatch: {self.shape} {self.dtype}, {out.shape} {out.dtype}")
        elif not out.flags.c_contiguous:
            raise RuntimeError("`out` cannot be specified when copying to a non-contiguous array")
        cuda.copy_out(self._a, out, blocking)
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        self._reachable()
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self._a.flags.c_contiguous or self._a.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        cuda.copy_in(arr, self._a)

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __reduce__(self) -> Any:
        return _from_host, (self.get(),)

    def _reachable(self) -> None:
        if self._device != cuda.Device():
            raise RuntimeError(
                f"an array on GPU {self._device.id} is used while GPU {cuda.Device().id} is the current one"
            )

    # Indexing

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Any:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> ndarray:
        self._reachable()
        return self._view(np.asarray(self._a[_index(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._reachable()
        with np.errstate(all="ignore"):
            self._a[_index(key)] = unwrap(value)
        cuda.issued()

    # Methods

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        with np.errstate(all="ignore"):
            out = self._a.astype(dtype, order=order, casting=casting or "unsafe", copy=copy)  # type: ignore[arg-type]
        return self if out is self._a else wrap(out)

    def copy(self, order: str = "C") -> ndarray:
        return wrap(self._a.copy(order))  # type: ignore[arg-type]

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._view(self._a.view() if dtype is None else self._a.view(dtype))

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getattr__(self, name: str) -> Any:
        signature = _api.METHODS.get(name)
        if signature is None or not hasattr(np.ndarray, name):
            raise AttributeError(f"'ndarray' object of CuPy has no attribute {name!r}")

        def method(*args: Any, **kwargs: Any) -> Any:
            _api.check_call(f"ndarray.{name}", signature, args, kwargs)
            self._reachable()
            if name in ("sort", "argsort"):
                kwargs = {"kind": "stable", **kwargs}  # as CuPy's are
            if name in ("argmin", "argmax") and self.dtype.kind in "fcV":
                return call(partial(_last_nan, name), (self, *args), kwargs)
            return call(getattr(self._a, name), args, kwargs, parent=self)

        return method

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        import cupy

        ours = getattr(cupy, ufunc.__name__, None)
        if ours is None:
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return (ours if method == "__call__" else getattr(ours, method))(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        import cupy

        place: Any = cupy
        for part in [*func.__module__.split(".")[1:], func.__name__]:
            place = getattr(place, part, None)
        if place is None or not all(issubclass(t, (ndarray, np.ndarray)) for t in types):
            return NotImplemented
        return place(*args, **kwargs)


def _index(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_index(k) for k in key)
    if isinstance(key, ndarray):
        key._reachable()
        return key._a
    if isinstance(key, slice) and any(isinstance(k, ndarray) for k in (key.start, key.stop, key.step)):
        raise TypeError("slice indices must be integers or None or have an __index__ method, not CuPy arrays")
    return key


def wrap(result: Any) -> Any:
    """A result of NumPy's as CuPy gives it: arrays and scalars become device arrays, sequences of them too."""
    if isinstance(result, (np.ndarray, np.generic)):
        out: ndarray = ndarray.__new__(ndarray)
        out._take_over(np.asarray(result))
        return out
    if isinstance(result, (tuple, list)):
        return type(result)(map(wrap, result)) if type(result) in (tuple, list) else tuple(map(wrap, result))
    return result


def unwrap(value: Any) -> Any:
    """An operand for NumPy; host arrays are refused as CuPy refuses them."""
    if isinstance(value, ndarray):
        value._reachable()
        return value._a
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if type(value) in (tuple, list):
        return type(value)(map(unwrap, value))
    return value


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parent: ndarray | None = None) -> Any:
    """Call a NumPy function on device arrays; an argument that comes back is the same object."""
    own = [*args, *kwargs.values(), parent]
    with np.errstate(all="ignore"):  # a GPU raises no floating-point warnings
        result = function(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})
    cuda.issued()
    for given in own:
        if isinstance(given, ndarray) and given._a is result:
            return given
    return parent._view(result) if parent is not None and isinstance(result, np.ndarray) else wrap(result)


def _last_nan(name: str, a: np.ndarray, axis: int | None = None, **kwargs: Any) -> Any:
    """`argmin` or `argmax`; of several NaNs CuPy may take any, here the last."""
    odd = np.isnan(a)
    last = (odd.size if axis is None else odd.shape[axis]) - 1 - np.flip(odd, axis).argmax(axis, **kwargs)
    return np.where(odd.any(axis, **kwargs), last, getattr(a, name)(axis, **kwargs))


def _from_host(array: np.ndarray) -> ndarray:
    out: ndarray = wrap(array.copy())
    return out


def _binary(name: str, swap: bool = False) -> Any:
    def method(self: ndarray, other: Any) -> Any:
        import cupy

        if not isinstance(other, (ndarray, np.ndarray, np.generic, int, float, complex)):
            return NotImplemented
        return getattr(cupy, name)(*((other, self) if swap else (self, other)))

    return method


def _in_place(name: str) -> Any:
    def method(self: ndarray, other: Any) -> ndarray:
        import cupy

        return getattr(cupy, name)(self, other, out=self)  # type: ignore[no-any-return]

    return method


_OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
for _op, _name in _OPERATORS.items():
    setattr(ndarray, f"__{_op}__", _binary(_name))
    setattr(ndarray, f"__r{_op}__", _binary(_name, swap=True))
    if _op != "matmul":  # CuPy has no in-place product
        setattr(ndarray, f"__i{_op}__", _in_place(_name))
for _op, _name in {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}.items():  # fmt: skip
    setattr(ndarray, f"__{_op}__", _binary(_name))
for _op, _name in {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_op}__", lambda self, _name=_name: operator.attrgetter(_name)(__import__("cupy"))(self))

ndarray.__module__ = "cupy"
