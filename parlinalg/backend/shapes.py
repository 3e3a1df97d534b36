"""Arrays without values: shapes, dtypes, strides and bytes, on which a program runs that is only imagined.

A `ShapeArray` wraps a NumPy array at an address where no memory is: NumPy makes its views (slices, transposes,
reshapes, flags), and nothing reads or writes it.  An operation gives a new array of the right shape and dtype, and
tells the device of its operands what would be computed.  Arrays of integers and booleans stay NumPy's, with values,
while they are small (`SMALL`) and not computed from arrays without: so ids, positions and masks steer a program.

What depends on values is refused by a `ValuesNeeded`, which names the operation and the line of the program.  Where
values decide within the library, such as whether a gradient is finite, the device's `WhatIf` answers, if there is one.

The device imitates a target, "cpu" or "gpu": the library takes the ways, and makes the kernels and the temporary
arrays, that it would with NumPy or CuPy.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike

from parlinalg.errors import ConfigError, ValuesNeeded, user_line

SMALL = 1 << 24
"""Elements up to which an array of integers or booleans has values."""
TARGETS = ("cpu", "gpu")
CATEGORIES = ("weights", "gradients", "states", "activations", "buffers")
"""The purposes of memory; a new array is a buffer until `label_memory` says otherwise."""


@dataclass(frozen=True)
class WhatIf:
    """The answers to what only values could tell, in a program that runs without them.

    There is none by default: who imagines a program says what is to be assumed.

    Attributes
    ----------
    finite : bool
        No loss, gradient or sum is infinite or NaN.
    norm : float
        The norm of all gradients, to which clipping compares its limit.
    number : float
        Any other number that is read, such as a loss for the log; of the matrix of `expm` the 1-norm, of which those of
        its powers are powers.
    token : int
        The token that is sampled or chosen.
    routing : str or sequence of float
        "even": every expert gets as many tokens as any other, or one more.  Or the load of each expert: numbers in
        proportion to the tokens that it gets.
    iterations : int
        The steps that an iteration takes which would stop where it has converged: products of `cg`, `minres`, `gmres`,
        `lsqr` and `lobpcg`, bases filled by `eigsh` and `svds`, and each estimate of a norm by `expm`.
    refinements : int
        The corrections of a solution by `solve` and `lstsq` with `refine=True`, at most 10 and 5 of them.
    pivots : str
        "even": every grid row has its share of the pivots of each panel of LU, and no rows of a rank are exchanged.
    conditioned : bool
        The columns of matrices are independent enough that products alone orthogonalize panels of QR, and the rank is
        full; if not, each panel goes through a tree, and one singular value counts as 0.
    balancing : int
        The rounds in which `eig` and `eigvals` balance a matrix, at most 20, of which no row isolates an eigenvalue.
    deflation : str
        "none": no merge of divide and conquer (`eigh`, `svd`) finds a vector that it need not compute, the most work.
    selected : float
        The fraction, from 0 to 1, of the eigenvalues that lie within `subset_by_value`; all is the most work.
    condition : float
        ‖A‖ ‖A⁻¹‖ in Frobenius norms of the matrices of `polar`, by which `svd` begins on several GPUs: the steps follow
        from it, and of `lstsq` with `refine=True` those between two corrections.  Matrices that are not `conditioned`
        are singular.
    hermitian : bool
        The matrix of `sqrtm` is Hermitian; if not, its Schur form is asked for, which depends on values.
    """

    finite: bool = True
    norm: float = 1.0
    number: float = 1.0
    token: int = 0
    routing: str | Sequence[float] = "even"
    iterations: int = 10
    refinements: int = 2
    pivots: str = "even"
    conditioned: bool = True
    balancing: int = 1
    deflation: str = "none"
    selected: float = 1.0
    condition: float = 1e4
    hermitian: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.routing, str):
            load = tuple(map(float, self.routing))
            if not load or min(load) < 0 or not 0 < sum(load) < math.inf:
                raise ConfigError(
                    f"routing={self.routing!r} should be 'even' or the experts' loads, numbers of at least 0"
                )
            object.__setattr__(self, "routing", load)
        elif self.routing != "even":
            raise ConfigError(
                f"routing={self.routing!r} is not known; what can be assumed is 'even', or loads of experts"
            )
        for name, known in (("pivots", "even"), ("deflation", "none")):
            if (given := getattr(self, name)) != known:
                raise ConfigError(f"{name}={given!r} is not known; what can be assumed is {known!r}")
        for name in ("iterations", "refinements", "balancing"):
            if (given := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={given} should be at least 1")
        if not 0 <= self.selected <= 1:
            raise ConfigError(f"selected={self.selected} should be a fraction, from 0 to 1")
        if not 1 <= self.condition < math.inf:
            raise ConfigError(f"condition={self.condition} should be a finite number of at least 1")


class Recorder(Protocol):
    """The device's listener: it is told what is computed, sent and held, in program order."""

    def product(
        self, batch: int, m: int, n: int, k: int, dtype: str, calls: int, attention: str = "", fused: bool = False
    ) -> None: ...  # fmt: skip
    def kernel(self, name: str, nbytes: int, elements: int, dtype: str) -> None: ...
    def attention(
        self, name: str, nbytes: int, elements: int, dtype: str, flops: int, width: int, given: str, more: int,
        fused: bool,
    ) -> None: ...  # fmt: skip
    def memory(self, category: str, nbytes: int) -> None: ...
    def start(
        self, op: str, axes: tuple[str, ...], ranks: tuple[int, ...], nbytes: int, sent: int, peer: int | None,
        tag: int, dtype: str, most: int,
    ) -> int: ...  # fmt: skip
    def test(self, call: int) -> None: ...
    def wait(self, call: int) -> None: ...
    def span(self, name: str, begins: bool) -> None: ...


class ShapesBackend:
    """A device whose arrays have no values, and what lives on it.

    Parameters
    ----------
    target : {"cpu", "gpu"}
        The device that it imitates.
    what_if : WhatIf, optional
        The answers where values decide; without it, such questions are errors.

    Attributes
    ----------
    live : Counter
        Bytes that are held now, by category.
    peak : int
        The most bytes that were held at once.
    recorder : Recorder or None
    """

    name = "shapes"
    values = False

    def __init__(self, target: str = "cpu", what_if: WhatIf | None = None) -> None:
        if target not in TARGETS:
            raise ConfigError(
                f"target={target!r} cannot be imagined; a target is one of {', '.join(map(repr, TARGETS))}"
            )
        self.target, self.what_if = target, what_if
        self.device = f"no device (an imagined {target.upper()})"
        self.host_memory = self.cpu = self.adds_products = target == "cpu"
        self.cuda = target == "gpu"
        self.xp: Any = Namespace(self)
        self.live: Counter[str] = Counter()
        self.held = self.peak = 0
        self.recorder: Recorder | None = None
        self._next = 1 << 44
        self._within = 0
        self._counts: Counter[Any] = Counter()

    def count(self, what: Any) -> int:
        """Return how often this was asked for the same thing before."""
        self._counts[what] += 1
        return self._counts[what] - 1

    @property
    def fft(self) -> Any:
        return Transforms(self)

    # -------------------------------------------------------------------------------------- blocks
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.xp.zeros(shape, dtype)

    def staging(self, n: int, dtype: DTypeLike) -> Any:
        return ShapeArray(self, n, dtype, counted=self.host_memory)

    def from_host(self, array: Any) -> Any:
        if isinstance(array, ShapeArray) or _keeps_values(array.shape, array.dtype):
            return array
        return ShapeArray(self, array.shape, array.dtype)

    def to_host(self, block: Any) -> Any:
        return block

    def copy_to_host(self, block: Any, out: Any) -> None:
        self._copied(block, out)

    def copy_from_host(self, array: Any, out: Any) -> None:
        self._copied(array, out)

    def _copied(self, source: Any, out: Any) -> None:
        if isinstance(source, np.ndarray) and isinstance(out, np.ndarray):
            np.copyto(out.reshape(-1), source.reshape(-1), casting="no")
        else:
            self.kernel("copy", 2 * out.nbytes, out.size, out.dtype)

    def synchronize(self) -> None:
        pass

    def memory_used(self) -> int:
        return self.held

    def memory_total(self) -> int:
        return 1 << 62

    # -------------------------------------------------------------------------------------- what happens
    def allocate(self, n: int, room: int) -> int:
        """Count n bytes more, and return the address of so much room."""
        self.live["buffers"] += n
        self.held += n
        if self.held > self.peak and not self._within:
            self.peak = self.held
        if n and self.recorder is not None and not self._within:
            self.recorder.memory("buffers", n)
        at = self._next
        self._next += -(-max(1, room) // 256) * 256
        return at

    def free(self, category: str, n: int) -> None:
        """Count n bytes less."""
        self.live[category] -= n
        self.held -= n
        if n and self.recorder is not None and not self._within:
            self.recorder.memory(category, -n)

    def kernel(self, name: str, nbytes: int, elements: int, dtype: Any) -> None:
        """Note work on blocks that is no product."""
        if self.recorder is not None and not self._within and elements:
            self.recorder.kernel(name, nbytes, elements, _name_of(dtype))

    def attention(
        self, name: str, nbytes: int, elements: int, dtype: Any, flops: int, width: int, given: Any, more: int = 0,
        fused: bool = False,
    ) -> None:  # fmt: skip
        """Note the kernel of attention, after its products: those on the pairs that are seen take so many operations,
        with heads of so many features and queries of the dtype `given`.  Unless it is fused, `more` bytes pass too;
        `fused` says that the library would take a fused kernel."""
        if self.recorder is not None and not self._within and elements:
            self.recorder.attention(name, nbytes, elements, _name_of(dtype), flops, width, _name_of(given), more, fused)

    def product(
        self, batch: int, m: int, n: int, k: int, dtype: Any, calls: int = 1, attention: Any = None,
        fused: bool = False,
    ) -> None:  # fmt: skip
        """Note `batch` products of m×k and k×n matrices by so many calls of BLAS; `attention`, `fused` as of `Gemm`."""
        if self.recorder is not None and not self._within and batch * m * n * k:
            of = "" if attention is None else _name_of(attention)
            self.recorder.product(batch, m, n, k, _name_of(dtype), calls, of, fused)

    def span(self, name: str, begins: bool) -> None:
        """Note that a named stretch of the program begins or ends."""
        if self.recorder is not None and not self._within:
            self.recorder.span(name, begins)

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Note nothing within but what is made there and lives on: the work is one kernel's."""
        held = self.held
        before = self.live.copy() if self._within == 0 and self.recorder is not None else None
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1
            if not self._within:
                self.peak = max(self.peak, held, self.held)
                if before is not None and self.recorder is not None:
                    for category in CATEGORIES:
                        if more := self.live[category] - before[category]:
                            self.recorder.memory(category, more)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Note nothing within."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def made(self, shape: Any, dtype: Any, name: str) -> ShapeArray:
        """Return a new array, which a kernel writes from as many elements as it has."""
        out = ShapeArray(self, shape, dtype)
        self.kernel(name, 2 * out.nbytes, out.size, out.dtype)
        return out

    def assume(self, name: str, why: str) -> Any:
        """Return the answer of the `WhatIf` to the question of this name.

        Raises
        ------
        ValuesNeeded
            If there is no `WhatIf`.
        """
        if self.what_if is None:
            raise values_needed(why, f"imagine(..., what_if=pla.WhatIf({name}=...)) says what to assume")
        return getattr(self.what_if, name)

    def __repr__(self) -> str:
        return f"ShapesBackend({self.target!r})"


@cache
def _name_of(dtype: Any) -> str:
    """Return the name of a dtype; NumPy makes it anew each time, which took a good part of a trace."""
    return np.dtype(dtype).name


def values_needed(what: str, right: str = "run it on real arrays, or leave it out of what is imagined") -> ValuesNeeded:
    """Return the error of an operation that depends on values."""
    return ValuesNeeded(
        f"{what} depends on values, which imagined arrays do not have (at {user_line(sys._getframe(1))}); {right}"
    )


def has_values(block: Any) -> bool:
    """Return False if a block is an array without values."""
    return not isinstance(block, ShapeArray)


def label_memory(block: Any, category: str) -> None:
    """Assign the memory of a block to one of `CATEGORIES`; do nothing on arrays with values."""
    if isinstance(block, ShapeArray):
        owner = block if block._base is None else block._base
        if owner._category != category:
            device, n = owner.device, owner._n
            device.live[owner._category] -= n
            device.live[category] += n
            if n and device.recorder is not None and not device._within:
                device.recorder.memory(owner._category, -n)
                device.recorder.memory(category, n)
            owner._category = category


def memory_label(block: Any) -> str:
    """Return what the memory of a block is held for; an empty text for arrays with values."""
    if not isinstance(block, ShapeArray):
        return ""
    return block._category if block._base is None else block._base._category


def _keeps_values(shape: Any, dtype: DTypeLike) -> bool:
    n = shape if isinstance(shape, (int, np.integer)) else math.prod(shape)
    return np.dtype(dtype).kind in "iub" and int(n) <= SMALL


class _At:
    """The array interface of memory of this shape at an address."""

    def __init__(self, shape: tuple[int, ...], typestr: str, at: int) -> None:
        self.__array_interface__ = {"shape": shape, "typestr": typestr, "data": (at, False), "version": 3}


def _viewed(name: str) -> Any:
    return lambda self, *args: self._view(getattr(self._a, name)(*args))


class ShapeArray(NDArrayOperatorsMixin):
    """An array without values on a `ShapesBackend`."""

    __slots__ = ("__weakref__", "_a", "_base", "_category", "_n", "device")
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100

    def __init__(
        self, device: ShapesBackend, shape: Any, dtype: DTypeLike = np.float64, *, counted: bool = True
    ) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        kind = np.dtype(dtype)
        self.device, self._category = device, "buffers"
        self._base: ShapeArray | None = None
        self._n = math.prod(shape) * kind.itemsize if counted else 0
        plain = np.dtype(kind.str if kind.kind in "biufc" else f"u{kind.itemsize}")  # bfloat16 has no typestr
        array = np.asarray(_At(shape, plain.str, device.allocate(self._n, math.prod(shape) * kind.itemsize)))
        self._a = array if plain == kind else array.view(kind)

    def __del__(self) -> None:
        if getattr(self, "_base", self) is None:
            self.device.free(self._category, self._n)

    def _view(self, array: np.ndarray) -> ShapeArray:
        out = ShapeArray.__new__(ShapeArray)
        out._a, out._n, out._category, out.device = array, 0, "", self.device
        out._base = self if self._base is None else self._base
        return out

    shape, dtype, size, ndim, nbytes, itemsize, strides, flags = (
        property(attrgetter(f"_a.{n}"))
        for n in ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "strides", "flags")
    )
    base = property(lambda self: self._base)
    data = property(lambda self: SimpleNamespace(ptr=self._a.__array_interface__["data"][0]))
    ctypes = property(lambda self: SimpleNamespace(data=self._a.__array_interface__["data"][0]))
    T = property(lambda self: self._view(self._a.T))
    mT = property(lambda self: self._view(self._a.swapaxes(-1, -2)))

    @property
    def real(self) -> ShapeArray:
        return self._view(self._a.real) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> ShapeArray:
        return self._view(self._a.imag) if self.dtype.kind == "c" else self.device.xp.zeros(self.shape, self.dtype)

    # -------------------------------------------------------------------------------------- values, refused
    def _refuse(self, what: str) -> ValuesNeeded:
        return values_needed(what)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise values_needed("a conversion to a NumPy array")

    def __bool__(self) -> bool:
        raise values_needed("the truth of an array")

    def __int__(self) -> int:
        raise values_needed("int() of an array")

    def __index__(self) -> int:
        raise values_needed("an index that is an array")

    def __complex__(self) -> complex:
        raise values_needed("complex() of an array")

    def __float__(self) -> float:
        return self.item()

    def item(self, *_: Any) -> Any:
        if self.size != 1:
            raise ValueError(f"only an array of one element is a number, not one of shape {self.shape}")
        if self.dtype.kind == "b":
            raise values_needed("the truth of an array")
        number = float(self.device.assume("number", "the number that an array has"))
        return number if self.dtype.kind not in "iu" else int(number)

    def tolist(self) -> Any:
        if self.ndim == 0:
            return self.item()
        raise values_needed("tolist()")

    def tobytes(self, *_: Any) -> bytes:
        raise values_needed("tobytes()")

    def __contains__(self, value: object) -> bool:
        raise values_needed("`in` an array")

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"ShapeArray({self.shape}, {self.dtype})"

    def __reduce__(self) -> Any:
        raise values_needed("pickling an array")

    # -------------------------------------------------------------------------------------- views and copies
    def reshape(self, *shape: Any, order: Any = "C") -> ShapeArray:
        wanted = shape[0] if len(shape) == 1 else shape
        try:
            return self._view(self._a.reshape(wanted, order=order, copy=False))
        except ValueError:  # no view, or no such shape, which the second call says
            out = self.copy(order)
            return out._view(out._a.reshape(wanted, order=order, copy=False))

    transpose, swapaxes, view, squeeze, diagonal = (
        _viewed(n) for n in ("transpose", "swapaxes", "view", "squeeze", "diagonal")
    )

    def ravel(self, order: str = "C") -> ShapeArray:
        return self.reshape(-1, order=order)

    def flatten(self, order: str = "C") -> ShapeArray:
        return self.copy(order).reshape(-1, order=order)

    def copy(self, order: str = "C") -> ShapeArray:
        self.device.kernel("copy", 2 * self.nbytes, self.size, self.dtype)
        return self._like(self.dtype, order)

    def __copy__(self) -> ShapeArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ShapeArray:
        return self.copy("K")

    def _like(self, dtype: DTypeLike, order: str) -> ShapeArray:
        """Return a new array of this shape, whose dims lie in memory in this order."""
        if order == "F" or (order in "AK" and self.flags.f_contiguous and not self.flags.c_contiguous):
            out = ShapeArray(self.device, self.shape[::-1], dtype)
            return out._view(out._a.T)
        if order == "K" and not self.flags.c_contiguous and self.ndim > 1 and 0 not in self.strides:
            outer = sorted(range(self.ndim), key=lambda d: -abs(self.strides[d]))
            out = ShapeArray(self.device, [self.shape[d] for d in outer], dtype)
            return out._view(out._a.transpose([outer.index(d) for d in range(self.ndim)]))
        return ShapeArray(self.device, self.shape, dtype)

    def astype(
        self, dtype: DTypeLike, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> ShapeArray:
        if np.dtype(dtype) == self.dtype and not copy:
            return self
        out = self._like(dtype, order)
        self.device.kernel("astype", self.nbytes + out.nbytes, self.size, self.dtype)
        return out

    def fill(self, value: Any) -> None:
        self[...] = value

    # -------------------------------------------------------------------------------------- elements
    def __getitem__(self, key: Any) -> Any:
        if _basic(key):
            return self._view(self._a[_open(key)])
        shape = _picked(self.shape, key)
        return self.device.made(shape, self.dtype, "take")

    def __setitem__(self, key: Any, value: Any) -> None:
        if _basic(key):
            part = self._a[_open(key)]
            if (
                isinstance(value, ShapeArray)
                and value._a.__array_interface__["data"] == part.__array_interface__["data"]
            ):
                return  # x[part] += …: written where it lies
            shape, n = part.shape, part.size
        elif any(isinstance(k, ShapeArray) for k in _keys(key)):
            shape, n = None, self.size
        else:
            shape = _picked(self.shape, key)
            n = math.prod(shape)
        if shape is not None:
            _check_fits(getattr(value, "shape", ()), shape)
        several = isinstance(value, (ShapeArray, np.ndarray))
        self.device.kernel("copy", n * self.itemsize * (2 if several else 1), n, self.dtype)

    # -------------------------------------------------------------------------------------- NumPy's protocols
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if isinstance(out, tuple) and len(out) == 1:
            kwargs["out"] = out[0]
        return self.device.xp._ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        module = function.__module__.removeprefix("numpy").lstrip(".")
        where = getattr(self.device.xp, module) if module in ("linalg", "fft") else self.device.xp
        return getattr(where, function.__name__)(*args, **kwargs)


def _method(name: str) -> Any:
    def call(self: ShapeArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.device.xp, name)(self, *args, **kwargs)

    call.__name__ = name
    return call


_METHODS = (
    "sum", "max", "min", "mean", "prod", "any", "all", "argmax", "argmin", "cumsum", "cumprod", "clip", "round", "conj",
    "conjugate", "take", "repeat", "dot", "trace", "std", "var", "argsort", "nonzero", "searchsorted", "sort",
)  # fmt: skip
for _name in _METHODS:
    if _name != "sort":
        setattr(ShapeArray, _name, _method(_name))


def _sort_in_place(self: ShapeArray, axis: int = -1, kind: Any = None) -> None:
    self.device.kernel("sort", 2 * self.nbytes, self.size, self.dtype)


ShapeArray.sort = _sort_in_place  # type: ignore[attr-defined]


def _check_fits(shape: tuple[int, ...], into: tuple[int, ...]) -> None:
    """Raise unless an array of one shape can be written to one of the other."""
    if shape == into:
        return
    while len(shape) > len(into) and shape[0] == 1:
        shape = shape[1:]
    if np.broadcast_shapes(shape, into) != tuple(into):
        raise ValueError(f"could not broadcast an array of shape {shape} into shape {into}")


def _keys(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _open(key: Any) -> tuple[Any, ...]:
    """Return the key with an ellipsis, so that NumPy gives a view and reads no element."""
    keys = _keys(key)
    for k in keys:
        if k is ...:
            return keys
    return (*keys, ...)


def _basic(key: Any) -> bool:
    for k in _keys(key):
        if k is not None and k is not ... and (not isinstance(k, (slice, int, np.integer)) or isinstance(k, bool)):
            return False
    return True


def _picked(shape: tuple[int, ...], key: Any) -> tuple[int, ...]:
    """Return the shape of what arrays of indices pick."""
    keys: list[Any] = []
    for k in _keys(key):
        if isinstance(k, ShapeArray) and k.dtype.kind == "b":
            raise values_needed("the number of elements that a mask picks")
        if isinstance(k, (list, bool, np.bool_)):
            k = np.asarray(k)
        if isinstance(k, np.ndarray) and k.dtype == np.bool_ and k.ndim:
            keys += [np.broadcast_to(np.int8(0), i.shape) for i in np.nonzero(k)]
        else:
            keys.append(np.broadcast_to(np.int8(0), k.shape) if isinstance(k, (np.ndarray, ShapeArray)) else k)
    if any(k is ... for k in keys):
        at = next(i for i, k in enumerate(keys) if k is ...)
        keys[at : at + 1] = [slice(None)] * (len(shape) - sum(k is not None for k in keys) + 1)
    dims: list[int] = []
    d, first, apart, last = 0, None, False, None
    picks = np.broadcast_shapes(*(k.shape for k in keys if isinstance(k, np.ndarray)))
    for i, k in enumerate(keys):
        if k is None:
            dims.append(1)
        elif isinstance(k, slice):
            dims.append(len(range(*k.indices(shape[d]))))
            d += 1
        else:
            first = len(dims) if first is None else first
            apart = apart or (last is not None and last != i - 1)
            last, d = i, d + 1
    dims += shape[d:]
    at = 0 if apart else first or 0
    return (*dims[:at], *picks, *dims[at:])


# ------------------------------------------------------------------ the namespace


def _size(x: Any) -> int:
    return x.nbytes if isinstance(x, (ShapeArray, np.ndarray)) else 0


def _has(values: Any) -> bool:
    return any(isinstance(v, ShapeArray) or (isinstance(v, (tuple, list)) and _has(v)) for v in values)


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


def _axes(axis: Any, ndim: int) -> list[int]:
    if axis is None:
        return list(range(ndim))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    for each in given:
        if not -ndim <= each < ndim:
            raise np.exceptions.AxisError(each, ndim)
    return [each % ndim for each in given]


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

            setattr(self, name, call)
            return call
        if not callable(theirs) or isinstance(theirs, type):
            return theirs

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if _has((*args, *kwargs.values())):
                raise values_needed(f"{name} of an array")
            return theirs(*args, **kwargs)

        return refuse

    def _ufunc(self, ufunc: np.ufunc, method: str, inputs: Any, kwargs: Any) -> Any:
        device, out = self._device, kwargs.get("out")
        if not _has(inputs) and not _has((out,)):
            return getattr(ufunc, method)(*inputs, **kwargs)
        if method == "reduce":
            given = {k: v for k, v in kwargs.items() if k in ("axis", "keepdims", "dtype", "out")}
            return self._reduce(ufunc.__name__, inputs[0], **{"axis": 0, **given})
        if method == "accumulate":
            return self.cumsum(inputs[0], **{"axis": 0, **kwargs})
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
            for each in outs:
                if each.shape != shape:
                    _check_fits(shape, each.shape)
        moved = sum(map(_size, inputs)) + sum(o.nbytes for o in outs)
        device.kernel(ufunc.__name__, moved, outs[0].size, outs[0].dtype)
        return outs[0] if len(outs) == 1 else outs

    def _laid_out(self, shape: tuple[int, ...], dtype: Any, inputs: Sequence[Any]) -> ShapeArray:
        """Return a new array for the result: NumPy's lies as the operands do."""
        like = next((x for x in inputs if getattr(x, "shape", None) == shape and isinstance(x, ShapeArray)), None)
        return ShapeArray(self._device, shape, dtype) if like is None else like._like(dtype, "K")

    # -------------------------------------------------------------------------------------- making
    def empty(self, shape: Any, dtype: Any = float, order: Any = "C") -> Any:
        if _keeps_values(shape, dtype):
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
            shape, np.asarray(value).dtype if dtype is None and not _has((value,)) else dtype or value.dtype
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
        if not _has((a, b, out)):
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
        x = a.transpose((*left, *mine)).reshape(math.prod(a.shape[d] for d in left), -1)
        y = b.transpose((*theirs, *right)).reshape(-1, math.prod(b.shape[d] for d in right))
        return self.matmul(x, y).reshape((*(a.shape[d] for d in left), *(b.shape[d] for d in right)))

    def einsum(self, rule: str, *operands: Any, out: Any = None, optimize: Any = False, **_: Any) -> Any:
        if not _has(operands):
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
        self, name: str, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        axes = _axes(axis, a.ndim)
        shape = [1 if d in axes else n for d, n in enumerate(a.shape) if keepdims or d not in axes]
        self._device.kernel(name, a.nbytes, a.size, a.dtype)
        if out is not None:
            return out
        kind = a.dtype if dtype is None else np.dtype(dtype)
        if dtype is None and name in ("add", "multiply", "sum", "prod") and kind.kind in "biu" and kind.itemsize < 8:
            kind = np.dtype(np.uint64 if kind.kind == "u" else np.int64)
        return ShapeArray(self._device, shape, kind)

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

    def _largest(self, name: str, a: Any, axis: Any, out: Any, keepdims: bool) -> Any:
        if not isinstance(a, ShapeArray):
            return getattr(np, name)(a, axis, keepdims=keepdims)
        if not a.size and 0 in (a.shape[d] for d in _axes(axis, a.ndim)):
            raise ValueError("an array without elements has no largest one")
        return self._reduce("maximum" if name == "max" else "minimum", a, axis, None, out, keepdims)

    def max(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False, **_: Any) -> Any:
        return self._largest("max", a, axis, out, keepdims)

    def min(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False, **_: Any) -> Any:
        return self._largest("min", a, axis, out, keepdims)

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

    def any(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return np.any(a, axis, keepdims=keepdims)
        return self._reduce("logical_or", a, axis, np.bool_, out, keepdims)

    def all(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return np.all(a, axis, keepdims=keepdims)
        return self._reduce("logical_and", a, axis, np.bool_, out, keepdims)

    def count_nonzero(self, a: Any, axis: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return np.count_nonzero(a, axis, keepdims=keepdims)
        return self._reduce("count_nonzero", a, axis, np.int64, None, keepdims)

    def argmax(self, a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return np.argmax(a, axis, keepdims=keepdims)
        return self._reduce("argmax", a, axis, np.int64, out, keepdims)

    argmin = argmax

    def trace(self, a: Any, *args: Any) -> Any:
        return self.sum(a.diagonal(*args), axis=-1)

    # -------------------------------------------------------------------------------------- elementwise and the like
    def where(self, condition: Any, *both: Any) -> Any:
        if not _has((condition, *both)):
            return self._device.from_host(np.where(condition, *both))
        if len(both) != 2:
            raise values_needed("where() with a condition alone")
        shape = np.broadcast_shapes(*map(_shape, (condition, *both)))
        dtype = np.result_type(*(v.dtype if hasattr(v, "dtype") else v for v in both))
        moved = sum(map(_size, (condition, *both))) + math.prod(shape) * dtype.itemsize
        self._device.kernel("where", moved, math.prod(shape), dtype)
        return ShapeArray(self._device, shape, dtype)

    def clip(self, a: Any, low: Any = None, high: Any = None, out: Any = None) -> Any:
        if not _has((a, low, high, out)):
            return np.clip(a, low, high, out=out)
        self._device.kernel("clip", 2 * a.nbytes, a.size, a.dtype)
        return a._like(a.dtype, "K") if out is None else out

    def round(self, a: Any, decimals: int = 0, out: Any = None) -> Any:
        return self.clip(a, out=out)

    around = round

    def _elementwise(self, name: str, dtype: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not _has(inputs):
            return getattr(np, name)(*inputs, **kwargs)
        return self._device.made(np.broadcast_shapes(*map(_shape, inputs)), dtype, name)

    def isclose(self, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
        return self._elementwise("isclose", np.bool_, a, b, rtol, atol, equal_nan=equal_nan)

    def isreal(self, a: Any) -> Any:
        return self._elementwise("isreal", np.bool_, a)

    def iscomplex(self, a: Any) -> Any:
        return self._elementwise("iscomplex", np.bool_, a)

    def angle(self, a: Any, deg: bool = False) -> Any:
        return self._elementwise("angle", a.real.dtype, a, deg=deg)

    def sinc(self, a: Any) -> Any:
        return self._elementwise("sinc", a.dtype, a)

    def i0(self, a: Any) -> Any:
        return self._elementwise("i0", a.dtype, a)

    def convolve(self, a: Any, v: Any, mode: str = "full") -> Any:
        if not _has((a, v)):
            plain: Any = np.convolve
            return plain(a, v, mode)
        n, m = sorted((a.size, v.size))
        self._device.kernel("convolve", a.nbytes + v.nbytes, n * m, a.dtype)
        length = {"full": n + m - 1, "same": m, "valid": m - n + 1}[mode]
        return ShapeArray(self._device, length, np.result_type(a.dtype, v.dtype))

    def histogram(self, a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
        if not _has((a, bins, weights)):
            return np.histogram(a, bins, range, density, weights)
        count = len(bins) - 1 if _shape(bins) else int(bins)
        self._device.kernel("histogram", a.nbytes, a.size, a.dtype)
        return ShapeArray(self._device, count, np.int64 if weights is None else weights.dtype), bins

    def nan_to_num(self, a: Any, copy: bool = True, **_: Any) -> Any:
        return self.clip(a, out=None if copy else a)

    def copyto(self, to: Any, source: Any, casting: str = "same_kind", where: Any = True) -> None:
        if not _has((to, source, where)):
            np.copyto(to, source, where=where)
            return
        _check_fits(_shape(source), to.shape)
        self._device.kernel("copy", to.nbytes + _size(source), to.size, to.dtype)

    def putmask(self, a: Any, mask: Any, values: Any) -> None:
        self._device.kernel("copy", 2 * a.nbytes, a.size, a.dtype)

    def fill_diagonal(self, a: Any, value: Any) -> None:
        self._device.kernel("copy", min(a.shape) * a.itemsize, min(a.shape), a.dtype)

    def tril(self, a: Any, k: int = 0) -> Any:
        return self.where(np.True_, a, a) if isinstance(a, ShapeArray) else np.tril(a, k)

    triu = tril

    def diag(self, a: Any, k: int = 0) -> Any:
        if not isinstance(a, ShapeArray):
            return np.diag(a, k)
        return a.diagonal(k) if a.ndim > 1 else self.zeros((a.size + abs(k),) * 2, a.dtype)

    def cumsum(self, a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        if not isinstance(a, ShapeArray):
            return np.cumsum(a, axis, dtype)
        kind = a.dtype if dtype is None else np.dtype(dtype)
        if dtype is None and kind.kind in "biu" and kind.itemsize < 8:
            kind = np.dtype(np.int64)
        self._device.kernel("accumulate", 2 * a.nbytes, a.size, a.dtype)
        return ShapeArray(self._device, a.size if axis is None else a.shape, kind) if out is None else out

    cumprod = cumsum

    def diff(self, a: Any, n: int = 1, axis: int = -1) -> Any:
        if not isinstance(a, ShapeArray):
            return np.diff(a, n, axis)
        shape = list(a.shape)
        shape[axis] = max(0, shape[axis] - n)
        return self._device.made(shape, a.dtype, "subtract")

    def sort(self, a: Any, axis: int = -1, **_: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.sort(a, axis)
        return self._device.made(a.shape, a.dtype, "sort")

    def argsort(self, a: Any, axis: Any = -1, **kwargs: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return np.argsort(a, axis, **kwargs)
        return self._device.made(a.shape, np.int64, "argsort")

    def partition(self, a: Any, kth: Any, axis: int = -1) -> Any:
        return self.sort(a, axis) if isinstance(a, ShapeArray) else np.partition(a, kth, axis)

    def argpartition(self, a: Any, kth: Any, axis: int = -1) -> Any:
        return self.argsort(a, axis) if isinstance(a, ShapeArray) else np.argpartition(a, kth, axis)

    def roll(self, a: Any, shift: Any, axis: Any = None) -> Any:
        return a.copy() if isinstance(a, ShapeArray) else np.roll(a, shift, axis)

    def searchsorted(self, a: Any, v: Any, **kwargs: Any) -> Any:
        if not _has((a, v)):
            return np.searchsorted(a, v, **kwargs)
        return self._device.made(_shape(v), np.int64, "searchsorted")

    # -------------------------------------------------------------------------------------- elements
    def take(self, a: Any, at: Any, axis: Any = None, out: Any = None, **_: Any) -> Any:
        if not _has((a, at)):
            return np.take(a, at, axis)
        if axis is None:
            shape = _shape(at)
        else:
            axis %= a.ndim
            shape = (*a.shape[:axis], *_shape(at), *a.shape[axis + 1 :])
        return self._device.made(shape, a.dtype, "take") if out is None else out

    def take_along_axis(self, a: Any, at: Any, axis: int = -1) -> Any:
        if not _has((a, at)):
            return np.take_along_axis(a, at, axis)
        lead = np.broadcast_shapes(
            *(tuple(1 if d == axis % a.ndim else n for d, n in enumerate(x.shape)) for x in (a, at))
        )
        shape = tuple(at.shape[d] if d == axis % a.ndim else n for d, n in enumerate(lead))
        return self._device.made(shape, a.dtype, "take")

    def put_along_axis(self, a: Any, at: Any, values: Any, axis: int = -1) -> None:
        if not _has((a, at, values)):
            np.put_along_axis(a, at, values, axis)
        else:
            self._device.kernel("copy", 2 * at.size * a.itemsize, at.size, a.dtype)

    def stack(self, parts: Any, axis: int = 0, **_: Any) -> Any:
        parts = list(parts)
        if not _has(parts):
            return np.stack(parts, axis)
        shape = list(parts[0].shape)
        shape.insert(axis % (len(shape) + 1), len(parts))
        return self._device.made(shape, np.result_type(*(p.dtype for p in parts)), "copy")

    def concatenate(self, parts: Any, axis: Any = 0, out: Any = None, dtype: Any = None) -> Any:
        parts = list(parts)
        if not _has(parts):
            return np.concatenate(parts, axis, dtype=dtype)
        if axis is None:
            parts, axis = [p.reshape(-1) for p in parts], 0
        shape = list(parts[0].shape)
        axis %= len(shape)
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
        if not _has((a, repeats)):
            return np.repeat(a, repeats, axis)
        if axis is None:
            a, axis = a.reshape(-1), 0
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
        if not _has((a, b)):
            return bool(np.array_equal(a, b))
        raise values_needed("array_equal()")


class Factorizations:
    """NumPy's `linalg`, by shapes."""

    _numpy: Any = np.linalg

    def __init__(self, device: ShapesBackend) -> None:
        self._device = device

    def _factored(
        self, name: str, a: Any, *shapes: tuple[int, ...], real: tuple[int, ...] | None = None, dtype: Any = None
    ) -> Any:
        """Return arrays of these shapes for what a function makes of matrices, and a real one if that is given."""
        self._device.assume("finite", f"whether linalg.{name} of a matrix succeeds")
        self._device.kernel(f"linalg.{name}", 2 * a.nbytes, a.size * min(a.shape[-2:]), a.dtype)
        found = [ShapeArray(self._device, shape, a.dtype if dtype is None else dtype) for shape in shapes]
        if real is not None:
            found.append(ShapeArray(self._device, real, a.real.dtype))
        return found

    def eigh(self, a: Any, UPLO: str = "L") -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eigh(a, UPLO)
        z, w = self._factored("eigh", a, a.shape, real=a.shape[:-1])
        return w, z

    def eigvalsh(self, a: Any, UPLO: str = "L") -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eigvalsh(a, UPLO)
        return self._factored("eigvalsh", a, real=a.shape[:-1])[0]

    def svd(self, a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.svd(a, full_matrices, compute_uv)
        *lead, m, n = a.shape
        k = min(m, n)
        if not compute_uv:
            return self._factored("svd", a, real=(*lead, k))[0]
        left, right = (m, n) if full_matrices else (k, k)
        u, vh, s = self._factored("svd", a, (*lead, m, left), (*lead, right, n), real=(*lead, k))
        return u, s, vh

    def qr(self, a: Any, mode: str = "reduced") -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.qr(a, mode)
        *lead, m, n = a.shape
        k = m if mode == "complete" else min(m, n)
        return tuple(self._factored("qr", a, (*lead, m, k), (*lead, k, n)))

    def eig(self, a: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eig(a)
        return tuple(self._factored("eig", a, a.shape[:-1], a.shape, dtype=np.result_type(a.dtype, np.complex64)))

    def eigvals(self, a: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eigvals(a)
        return self._factored("eigvals", a, a.shape[:-1], dtype=np.result_type(a.dtype, np.complex64))[0]

    def cholesky(self, a: Any) -> Any:
        return self._factored("cholesky", a, a.shape)[0] if isinstance(a, ShapeArray) else self._numpy.cholesky(a)

    def inv(self, a: Any) -> Any:
        return self._factored("inv", a, a.shape)[0] if isinstance(a, ShapeArray) else self._numpy.inv(a)

    def det(self, a: Any) -> Any:
        return self._factored("det", a, a.shape[:-2])[0] if isinstance(a, ShapeArray) else self._numpy.det(a)

    def slogdet(self, a: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.slogdet(a)
        return tuple(self._factored("slogdet", a, a.shape[:-2], real=a.shape[:-2]))

    def solve(self, a: Any, b: Any) -> Any:
        if not _has((a, b)):
            return self._numpy.solve(a, b)
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return self._factored("solve", a, (*lead, *b.shape[-2:]), dtype=np.result_type(a.dtype, b.dtype))[0]

    def lstsq(self, a: Any, b: Any, rcond: Any = None) -> Any:
        if not _has((a, b)):
            return self._numpy.lstsq(a, b, rcond)
        (m, n), k = a.shape, min(a.shape)
        full = self._device.assume("conditioned", "the rank of a matrix")
        x, s = self._factored("lstsq", a, (n, *b.shape[1:]), real=(k,))
        residuals = ShapeArray(self._device, b.shape[1:] if full and m > n else (0,), s.dtype)
        return x, residuals, k if full else max(0, k - 1), s

    def norm(self, a: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.norm(a, ord, axis, keepdims)
        return self._device.xp._reduce("norm", a, axis, a.real.dtype, None, keepdims)

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(np.linalg, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if _has((*args, *kwargs.values())):
                raise values_needed(f"linalg.{name} of an array")
            return theirs(*args, **kwargs)

        return refuse if callable(theirs) and not isinstance(theirs, type) else theirs


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
