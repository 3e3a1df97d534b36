"""Arrays without values: shapes, dtypes, strides and bytes, on which a program runs that is only imagined.

A `ShapeArray` wraps a NumPy array at an address where no memory is: NumPy makes its views (slices, transposes,
reshapes, flags), and nothing reads or writes it.  An operation gives a new array of the right shape and dtype, and
tells the device of its operands what would be computed.  Arrays of integers and booleans stay NumPy's, with values,
while they are small (`SMALL`) and not computed from arrays without: so ids, positions and masks steer a program.

What depends on values is refused by a `ValuesNeeded`, which names the operation and the line of the program.  Where
values decide within the library, such as whether a gradient is finite, the device's `WhatIf` answers, if there is one.

The device imitates a target, "cpu" or "gpu": the library takes the ways, and makes the kernels and the temporary
arrays, that it would with NumPy or CuPy.

The device and its arrays are here; their functions are in `parlinalg.backend.shape_functions`, and factorizations in
`parlinalg.backend.shape_solver`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Protocol, SupportsFloat, SupportsIndex

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
        `lsqr` and `lobpcg`, bases filled by `eigsh` and `svds`, each estimate of a norm by `expm`, and Newton steps of
        each root by `Shampoo` with `root="newton"`.
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
    triangular : bool
        The matrix of `expm` is an upper triangle, if its exponential is found by squares.
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
    triangular: bool = False

    def __post_init__(self) -> None:
        for name in ("finite", "conditioned", "hermitian", "triangular"):
            if not isinstance(given := getattr(self, name), bool | np.bool_):
                raise ConfigError(f"{name}={given!r} should be True or False")
        for name in ("norm", "number", "selected", "condition"):
            if not _is_number(given := getattr(self, name)):
                raise ConfigError(f"{name}={given!r} should be a number")
        for name in ("token", "iterations", "refinements", "balancing"):
            if isinstance(given := getattr(self, name), bool) or not isinstance(given, SupportsIndex):
                raise ConfigError(f"{name}={given!r} should be a whole number")
        if not self.norm >= 0:
            raise ConfigError(f"norm={self.norm} should be at least 0")
        if self.token < 0:
            raise ConfigError(f"token={self.token} should be at least 0")
        if not isinstance(self.routing, str):
            load = tuple(self.routing) if isinstance(self.routing, Iterable) else ()
            if not load or not all(map(_is_number, load)) or min(load) < 0 or not 0 < sum(load) < math.inf:
                raise ConfigError(
                    f"routing={self.routing!r} should be 'even' or the experts' loads, numbers of at least 0"
                )
            object.__setattr__(self, "routing", tuple(map(float, load)))
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


def _is_number(value: object) -> bool:
    """Return True if a value is a real number."""
    return isinstance(value, SupportsFloat) and not isinstance(value, bool | str | ShapeArray)


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
    def factorization(self, name: str, nbytes: int, elements: int, dtype: str, flops: int, width: int) -> None: ...
    def memory(self, category: str, nbytes: int) -> None: ...
    def start(
        self, op: str, axes: tuple[str, ...], ranks: tuple[int, ...], nbytes: int, sent: int, peer: int | None,
        tag: int, dtype: str, most: int,
    ) -> int: ...  # fmt: skip
    def started_before(self, *about: Any) -> int: ...
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
        from parlinalg.backend.shape_functions import Namespace

        if target not in TARGETS:
            raise ConfigError(
                f"target={target!r} cannot be imagined; a target is one of {', '.join(map(repr, TARGETS))}"
            )
        if what_if is not None and not isinstance(what_if, WhatIf):
            raise ConfigError(f"what_if={what_if!r} should be a pla.WhatIf, such as pla.WhatIf(norm=1.0, number=2.5)")
        self.target, self.what_if = target, what_if
        self.device = f"no device (an imagined {target.upper()})"
        self.host_memory = self.cpu = self.adds_products = target == "cpu"
        self.cuda = target == "gpu"
        self.xp: Any = Namespace(self)
        self.live: Counter[str] = Counter()
        self.held = self.peak = 0
        self.recorder: Recorder | None = None
        self._next = 1 << 44
        self._within = self._uncounted = 0
        self._counts: Counter[Any] = Counter()

    def count(self, what: Any) -> int:
        """Return the number of earlier calls with the same argument."""
        self._counts[what] += 1
        return self._counts[what] - 1

    @property
    def fft(self) -> Any:
        from parlinalg.backend.shape_functions import Transforms

        return Transforms(self)

    # -------------------------------------------------------------------------------------- blocks
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.xp.zeros(shape, dtype)

    def staging(self, n: int, dtype: DTypeLike) -> Any:
        return ShapeArray(self, n, dtype, counted=self.host_memory)

    def from_host(self, array: Any) -> Any:
        if isinstance(array, ShapeArray) or keeps_values(array.shape, array.dtype):
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

    def memory_total(self) -> int:
        return 1 << 62

    # -------------------------------------------------------------------------------------- what happens
    def allocate(self, n: int, room: int) -> int:
        """Count n bytes more, and return the address of so much room."""
        self.live["buffers"] += n
        self.held += n
        if self.held > self.peak and not self._uncounted:
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

    def factorization(
        self, name: str, elements: int, dtype: Any, *, nbytes: int, flops: float, width: int
    ) -> None:  # fmt: skip
        """Note what LAPACK computes of blocks: so many operations of real or complex products with the inner dim
        `width`, while so many bytes pass through memory."""
        if self.recorder is not None and not self._within and elements:
            self.recorder.factorization(name, nbytes, elements, _name_of(dtype), int(flops), max(1, width))

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
        """Note nothing within but what is made there and lives on: the work is one kernel's.

        What comes and goes within counts in the peak on a CPU, where it is the kernel's scratch: a GPU's kernel has
        none of what is made in its stead.
        """
        before = self.live.copy() if self._within == 0 and self.recorder is not None else None
        self._within += 1
        self._uncounted += self.cuda
        try:
            yield
        finally:
            self._within -= 1
            self._uncounted -= self.cuda
            if not self._within:
                self.peak = max(self.peak, self.held)
                if before is not None and self.recorder is not None:
                    for category in CATEGORIES:
                        if more := self.live[category] - before[category]:
                            self.recorder.memory(category, more)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Note nothing within."""
        self._within += 1
        self._uncounted += 1
        try:
            yield
        finally:
            self._within -= 1
            self._uncounted -= 1

    @property
    def in_kernel(self) -> bool:
        """True while the work that is computed is one kernel's."""
        return self._within > 0

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


def places_of(mask: Any, share: float) -> Any:
    """Return the places where a mask of one dim is True; of one without values, as many as are this share of it."""
    if isinstance(mask, ShapeArray):
        return ShapeArray(mask.device, round(share * mask.size), np.int64)
    found: Any = mask.nonzero()
    return found[0]


def lack_values(arguments: Any) -> bool:
    """Return True if one of these, or of what tuples and lists among them hold, is an array without values."""
    return any(isinstance(v, ShapeArray) or (isinstance(v, (tuple, list)) and lack_values(v)) for v in arguments)


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
    """Return the category of the memory of a block; an empty text for arrays with values."""
    if not isinstance(block, ShapeArray):
        return ""
    return block._category if block._base is None else block._base._category


def keeps_values(shape: Any, dtype: DTypeLike) -> bool:
    """Return True if an array of this shape and dtype has values, because it is small and of integers or booleans."""
    n = shape if isinstance(shape, (int, np.integer)) else math.prod(shape)
    return np.dtype(dtype).kind in "iub" and int(n) <= SMALL


class _At:
    """The array interface of memory of this shape at an address."""

    def __init__(self, shape: tuple[int, ...], typestr: str, at: int) -> None:
        self.__array_interface__ = {"shape": shape, "typestr": typestr, "data": (at, False), "version": 3}


def without_values(shape: Iterable[int], dtype: np.dtype, at: int = 256) -> np.ndarray:
    """Return an array that says it is at an address and takes no memory: its elements cannot be read or written."""
    plain = np.dtype(dtype.str if dtype.kind in "biufc" else f"u{dtype.itemsize}")  # bfloat16 has no typestr
    shape = tuple(shape)
    if math.prod(shape) * dtype.itemsize > sys.maxsize:
        raise ConfigError(f"an array of shape {shape} of {dtype} has more bytes than memory has addresses")
    array = np.asarray(_At(shape, plain.str, at))
    return array if plain == dtype else array.view(dtype)


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
        self._a = without_values(shape, kind, device.allocate(self._n, math.prod(shape) * kind.itemsize))

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

    def view_of(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, strides: tuple[int, ...]
    ) -> ShapeArray:  # fmt: skip
        """Return an array as a view of these bytes."""
        return self._view(np.ndarray(shape, dtype, self._a, offset, strides))

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
            check_fits(getattr(value, "shape", ()), shape)
        several = isinstance(value, (ShapeArray, np.ndarray))
        self.device.kernel("copy", n * self.itemsize * (2 if several else 1), n, self.dtype)

    # -------------------------------------------------------------------------------------- NumPy's protocols
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(hasattr(v, "__array_ufunc__") and not isinstance(v, _ARRAYS) for v in inputs):
            return NotImplemented  # a distributed array decides
        out = kwargs.get("out")
        if isinstance(out, tuple) and len(out) == 1:
            kwargs["out"] = out[0]
        return self.device.xp._ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not all(issubclass(t, _ARRAYS) for t in types):
            return NotImplemented
        module = function.__module__.removeprefix("numpy").lstrip(".")
        where = getattr(self.device.xp, module) if module in ("linalg", "fft") else self.device.xp
        return getattr(where, function.__name__)(*args, **kwargs)


_ARRAYS = (ShapeArray, np.ndarray, np.generic)
"""The arrays and numbers of one rank."""


def _method(name: str) -> Any:
    def call(self: ShapeArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.device.xp, name)(self, *args, **kwargs)

    call.__name__ = name
    return call


_METHODS = (
    "sum", "max", "min", "mean", "prod", "any", "all", "argmax", "argmin", "cumsum", "cumprod", "clip", "round", "conj",
    "conjugate", "take", "repeat", "dot", "trace", "std", "var", "argsort", "nonzero", "searchsorted",
)  # fmt: skip
for _name in _METHODS:
    setattr(ShapeArray, _name, _method(_name))


def _sort_in_place(self: ShapeArray, axis: int = -1, kind: Any = None) -> None:
    self.device.kernel("sort", 2 * self.nbytes, self.size, self.dtype)


ShapeArray.sort = _sort_in_place  # type: ignore[attr-defined]


def check_fits(shape: tuple[int, ...], into: tuple[int, ...]) -> None:
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
    """Return the shape of what arrays of indices pick.

    Raises
    ------
    IndexError
        As NumPy does: if there are too many indices, or one that is known is beyond its dim.
    """
    keys = [_index(k) for k in _keys(key)]
    taken = [0 if k is None or k is ... else k.ndim if _is_mask(k) else 1 for k in keys]
    left = len(shape) - sum(taken)
    if left < 0:
        raise IndexError(f"too many indices for an array of shape {shape}: {sum(taken)}")
    at = next((i for i, k in enumerate(keys) if k is ...), len(keys))
    keys[at : at + 1] = [slice(None)] * left
    dims: list[int] = []
    picks: list[tuple[int, ...]] = []
    d, first, apart, last = 0, None, False, None
    for i, k in enumerate(keys):
        if k is None:
            dims.append(1)
        elif isinstance(k, slice):
            dims.append(len(range(*k.indices(shape[d]))))
            d += 1
        else:
            over = k.ndim if _is_mask(k) else 1
            picks.append(_picks(shape[d : d + over], k))
            first = len(dims) if first is None else first
            apart = apart or (last is not None and last != i - 1)
            last, d = i, d + over
    place = 0 if apart else first or 0
    return (*dims[:place], *np.broadcast_shapes(*picks), *dims[place:])


def _index(k: Any) -> Any:
    """Return an index with its list, or its number of True or False, as an array."""
    if isinstance(k, ShapeArray) and k.dtype.kind == "b":
        raise values_needed("the number of elements that a mask picks")
    if isinstance(k, (list, bool, np.bool_)):
        k = np.asarray(k)
        k = k.astype(np.int64) if not k.size else k
    if isinstance(k, (ShapeArray, np.ndarray)) and k.dtype.kind not in "iub":
        raise IndexError(f"an array of {k.dtype} is no index: it should have integers or booleans")
    return k


def _is_mask(k: Any) -> bool:
    return isinstance(k, np.ndarray) and k.dtype == np.bool_


def _picks(extents: tuple[int, ...], k: Any) -> tuple[int, ...]:
    """Return the shape of what one index of some dims picks of them."""
    if _is_mask(k):
        if k.shape != extents and (k.ndim > 1 or k.size):  # NumPy takes a mask of no elements for any dim
            raise IndexError(f"a mask of shape {k.shape} for dims of {extents}")
        return (int(np.count_nonzero(k)),)
    (n,), found = extents, tuple(getattr(k, "shape", ()))
    beyond = not n if isinstance(k, ShapeArray) else np.size(k) and not -n <= np.min(k) <= np.max(k) < n
    if beyond and math.prod(found):
        raise IndexError(f"index {k} is out of bounds for a dim of {n}")
    return found
