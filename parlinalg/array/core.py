"""DistArray: a global array cut into blocks over a processor grid."""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from parlinalg.array import transfer
from parlinalg.array.dispatch import PROTOCOL, flagged, takes_over
from parlinalg.backend import namespace
from parlinalg.backend.views import address
from parlinalg.errors import LayoutError
from parlinalg.grid import Device, Grid
from parlinalg.layout import Layout
from parlinalg.redistribute import fitting, redistribute
from parlinalg.units import ITEMSIZE

Block = Any
Axis = int | tuple[int, ...] | None

FEW_VIEWS = 16
"""Views of an array that are remembered before those that are gone are looked for."""


@flagged
class DistArray(NDArrayOperatorsMixin):
    """A global array of which every rank of a grid holds one block.

    Made by `parlinalg.distribute`, `from_function`, `from_blocks`, `zeros` and the like.  Elementwise ufuncs work block
    by block on equal layouts (see `parlinalg.array.ufuncs`); the functions of NumPy listed in
    `parlinalg.array.functions` work too; everything else is refused, never computed on one rank's block by accident.

    Arrays are values: `B = A.T`, a slice or a change of layout may lie in A's memory for as long as both are only read,
    but an operator in place and `out=` change the array that is named and no other, on any grid and in any layout.
    Where another array would see it, they write to new memory, or leave the other a copy of what it held.

    Attributes
    ----------
    block : array
        This rank's block, an array of the grid's backend.  It is the memory itself: what is written to it directly
        shows in all arrays that lie in the same memory, so write to the block of a `copy()`.
    shape : tuple of int
        The global shape.
    layout : Layout
    grid : Grid
    """

    __slots__ = ("__weakref__", "_owner", "_shape", "_views", "block", "grid", "layout", "order")

    def __init__(
        self, block: Block, shape: Sequence[int], layout: Layout, grid: Grid, order: tuple[int, ...] | None = None
    ) -> None:
        self._shape = tuple(shape)
        self.layout = layout
        self.grid = grid
        self.block = block if grid.backend.values else grid.backend.from_host(block)  # of floats never any
        self.order = order
        """The permutation of dims under which all ranks' blocks lie in C order; None is the identity, or unknown."""
        self._owner: DistArray | None = None  # the array in whose memory this one lies as a view
        self._views: list[weakref.ref[DistArray]] | None = None  # the views in the memory of this one

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._shape

    @shape.setter
    def shape(self, value: Any) -> None:
        raise AttributeError(
            f"the shape of a DistArray is not assigned; the elements may have to move: write A = A.reshape({value!r})"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.block.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the global array, held once."""
        return self.size * self.dtype.itemsize

    @property
    def resident(self) -> Block | None:
        """The block, if it stays in memory; None if `block` brings it there each time it is asked for."""
        return self.block

    def put(self, part: Block, start: int = 0) -> None:
        """Write elements of the block in C order, from number `start` on; those that lie there already stay."""
        block = self.block
        if not block.flags.c_contiguous:
            block[...] = part.reshape(block.shape)
        elif part.size and address(part) != address(block) + start * block.itemsize:
            block.reshape(-1)[start : start + part.size] = part

    def like(self, block: Block, layout: Layout | None = None, shape: Sequence[int] | None = None) -> DistArray:
        """Return an array on the same grid, with the same layout and shape unless given."""
        if isinstance(block, np.generic):  # from an operation on 0-d blocks; it could not be written in place
            block = np.asarray(block)
        return DistArray(
            block, self.shape if shape is None else shape, self.layout if layout is None else layout, self.grid
        )

    def sharing(
        self, block: Block, layout: Layout | None = None, shape: Sequence[int] | None = None,
        order: tuple[int, ...] | None = None,
    ) -> DistArray:  # fmt: skip
        """Return an array, as `like`, whose block may lie in this one's memory until one of the two is written to."""
        result = self.like(block, layout, shape)
        result.order = order
        mine = self.resident  # None where each look at the block is another window into the same file
        known = mine is not None and result.block is not mine and result.block.size
        if known and not self.xp.may_share_memory(result.block, mine):
            return result
        owner = result._owner = self if self._owner is None else self._owner
        views = owner._views
        if views is None:
            owner._views = [weakref.ref(result)]
            return result
        if len(views) >= FEW_VIEWS and not len(views) & (len(views) - 1):  # at powers of two: a constant cost each
            views[:] = [view for view in views if view() is not None]
        views.append(weakref.ref(result))
        return result

    def destination(self) -> Block:
        """Return a block to be overwritten as a whole, which no other array sees; `adopt` makes it this array's.

        It is the array's own, or a new one for a view.  Views in the memory of this array get copies.
        """
        if self.resident is None and not (self._owner is None and self.grid.backend.host_memory):
            raise TypeError("an array that rests in a file or in host memory is not written in place; take a copy()")
        if self._owner is not None:
            return self.xp.empty_like(self.block)
        views, self._views = self._views, None
        for view in views or ():
            other = view()
            if other is not None and other._owner is self:
                other.adopt(other.block.copy(order="K"))
        return self.block

    def writable(self) -> Block:
        """Return the block, to write to a part of it: no other array sees it."""
        if self._owner is not None:
            self.adopt(self.block.copy(order="K"))
            return self.block
        return self.destination()

    def adopt(self, block: Block) -> None:
        """Take `block`, which no other array sees, as this rank's block."""
        if block is not self.block:
            self.block, self._owner = block, None

    # ------------------------------------------------------------------ movement
    def redistribute(self, layout: Layout) -> DistArray:
        """Return the same array in another layout; the one operation that changes where elements lie.

        No rank receives more elements than its new block lacks.  Collective.
        """
        if fitting(layout, self.shape, self.grid) == self.layout:
            return self.sharing(self.block, order=self.order)
        return self.sharing(self.block_in(layout), layout, order=self.order)

    def block_in(self, layout: Layout) -> Block:
        """Return this rank's block of the array in another layout, which may share memory with `block`.  Collective."""
        return redistribute(self.block, self.layout, layout, self.shape, self.grid, order=self.order)

    def gather(self, root: int | None = None) -> Any:
        """Return the global array as a NumPy array on every rank, or on rank `root` alone.  Collective."""
        return transfer.gather(self.block, self.shape, self.layout, self.grid, root)

    def to_grid(self, grid: Grid, layout: Layout) -> DistArray:
        """Return the same array on another grid made from the same ranks, or a part of them.

        Collective over the ranks of both grids; ranks outside a grid hold blocks of size zero.
        """
        fitting(layout, self.shape, grid)
        whole = self.summed()
        block = transfer.to_grid(whole.block, self.shape, whole.layout, self.grid, layout, grid)
        return DistArray(block, self.shape, layout, grid)

    def summed(self) -> DistArray:
        """Return the same array with nothing left to sum: partial axes all-reduced."""
        return self.redistribute(self.layout.with_partial(()))

    # ------------------------------------------------------------------ views
    def transpose(self, *order: Any) -> DistArray:
        """Return the array with its dims permuted; nothing moves, and nothing is copied."""
        dims: Sequence[int] = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
        if not order or dims is None:
            dims = range(self.ndim)[::-1]
        dims = [axis_of(d, self.ndim) for d in dims]
        if sorted(dims) != list(range(self.ndim)):
            raise ValueError(
                f"transpose of an array of {self.ndim} dims takes each of 0 to {self.ndim - 1} once, not {tuple(dims)}"
            )
        old = self.order or range(self.ndim)
        stored: tuple[int, ...] | None = tuple(list(dims).index(d) for d in old)
        if stored == tuple(range(self.ndim)):
            stored = None
        shape = [self.shape[d] for d in dims]
        return self.sharing(self.block.transpose(tuple(dims)), self.layout.permuted(dims), shape, stored)

    @property
    def T(self) -> DistArray:
        """The transposed array; nothing is copied."""
        return self.transpose()

    @property
    def mT(self) -> DistArray:
        """The array with its last two dims exchanged; nothing is copied."""
        if self.ndim < 2:
            raise ValueError(f"mT needs at least two dims, the array has shape {self.shape}")
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    @property
    def H(self) -> DistArray:
        """The conjugate transpose; nothing is copied where the dtype is real."""
        return self.T.conj()

    def conj(self) -> DistArray:
        return self.like(self.block.conj()) if self.dtype.kind == "c" else self.sharing(self.block, order=self.order)

    @property
    def real(self) -> DistArray:
        if self.dtype.kind == "c":
            return self.sharing(self.block.real)
        return self.sharing(self.block, order=self.order)

    @property
    def imag(self) -> DistArray:
        if self.dtype.kind == "c":
            return self.sharing(self.block.imag)
        return self.like(self.xp.zeros_like(self.block))

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = "unsafe", subok: bool = True, copy: bool = True
    ) -> DistArray:
        """Return every element converted to `dtype`.

        A partial array is summed first where the conversion of its terms would not sum up to that of their sum.
        Collective in that case.
        """
        if order not in ("K", "C", "A"):
            raise TypeError(f"astype(order={order!r}): the blocks of a DistArray lie in C order; leave order= out")
        to = native(np.dtype(dtype))
        if self.layout.partial and not terms_add(self.dtype, to) and self.grid.effective(self.layout).partial:
            return self.summed().astype(to, casting=casting, copy=copy)
        if not np.can_cast(self.dtype, to, casting):
            raise TypeError(f"astype: {self.dtype} does not become {to} under casting={casting!r}")
        return self.sharing(self.block.astype(to, copy=copy))

    def copy(self) -> DistArray:
        return self.like(self.block.copy())

    def __copy__(self) -> DistArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> DistArray:
        return self.copy()

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> DistArray:
        """Return the same elements in another shape, where blocks stay blocks (see `parlinalg.array.shapes`)."""
        if order not in ("C", "K", "A") or copy is False:
            given = "copy=False" if copy is False else f"order={order!r}"
            raise TypeError(
                f"reshape({given}) is not defined on distributed arrays, whose elements are read in C order"
            )
        from parlinalg.array.shapes import reshape

        return reshape(self, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)

    def ravel(self, order: str = "C") -> DistArray:
        """Return the same elements in one dim."""
        return _NUMPY.ravel(self, order)

    def flatten(self, order: str = "C") -> DistArray:
        """Return a copy of the elements in one dim."""
        return self.ravel(order).copy()

    def squeeze(self, axis: Axis = None) -> DistArray:
        """Return the array without its dims of one item, or without those of `axis`."""
        return _NUMPY.squeeze(self, axis)

    def swapaxes(self, axis1: int, axis2: int) -> DistArray:
        """Return the array with two dims exchanged; nothing is copied."""
        return _NUMPY.swapaxes(self, axis1, axis2)

    def __getitem__(self, key: Any) -> DistArray:
        from parlinalg.array.indexing import getitem

        return getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        from parlinalg.array.indexing import setitem

        setitem(self, key, value)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[DistArray]:
        if not self.shape:
            raise TypeError("iteration over an array without dims")
        return (self[i] for i in range(self.shape[0]))

    def __contains__(self, value: Any) -> bool:
        equal: Any = self == value
        return bool(equal.any())

    # ------------------------------------------------------------------ reductions
    def sum(
        self, axis: Axis = None, dtype: Any = None, out: DistArray | None = None, keepdims: bool = False,
        initial: Any = np._NoValue, where: Any = True, *, partial: bool = False,
    ) -> DistArray:  # fmt: skip
        """Return the sum over `axis` (default: all dims).

        Over a cut dim the blocks' sums are summed over the axes that cut it: at once, or, with `partial`, left for
        later.
        """
        if initial is not np._NoValue or where is not True:
            return _NUMPY.sum(self, axis, dtype, out, keepdims, initial, where)
        from parlinalg.array.reductions import total

        return total(self, axis, dtype, bool(keepdims), partial, out)

    def _reduce(
        self, name: str, axis: Axis, keepdims: bool, out: DistArray | None, initial: Any = np._NoValue,
        where: Any = True,
    ) -> DistArray:  # fmt: skip
        from parlinalg.array.reductions import reduction

        return reduction(name, self, axis, None, out, bool(keepdims), initial, where)

    def max(
        self, axis: Axis = None, out: DistArray | None = None, keepdims: bool = False, initial: Any = np._NoValue,
        where: Any = True,
    ) -> DistArray:  # fmt: skip
        return self._reduce("max", axis, keepdims, out, initial, where)

    def min(
        self, axis: Axis = None, out: DistArray | None = None, keepdims: bool = False, initial: Any = np._NoValue,
        where: Any = True,
    ) -> DistArray:  # fmt: skip
        return self._reduce("min", axis, keepdims, out, initial, where)

    def any(
        self, axis: Axis = None, out: DistArray | None = None, *, keepdims: bool = False, where: Any = True
    ) -> DistArray:
        return self._reduce("any", axis, keepdims, out, where=where)

    def all(
        self, axis: Axis = None, out: DistArray | None = None, *, keepdims: bool = False, where: Any = True
    ) -> DistArray:
        return self._reduce("all", axis, keepdims, out, where=where)

    def prod(
        self, axis: Axis = None, dtype: Any = None, out: DistArray | None = None, keepdims: bool = False,
        initial: Any = np._NoValue, where: Any = True,
    ) -> DistArray:  # fmt: skip
        from parlinalg.array.reductions import reduction

        return reduction("prod", self, axis, dtype, out, bool(keepdims), initial, where)

    def mean(
        self, axis: Axis = None, dtype: Any = None, out: DistArray | None = None, keepdims: bool = False, *,
        where: Any = True,
    ) -> DistArray:  # fmt: skip
        if where is not True:
            return _NUMPY.mean(self, axis, dtype, out, keepdims, where=where)
        from parlinalg.array.reductions import mean

        return mean(self, axis, dtype, bool(keepdims), out)

    def var(
        self, axis: Axis = None, dtype: Any = None, out: DistArray | None = None, ddof: float = 0,
        keepdims: bool = False, *, where: Any = True, mean: Any = None,
    ) -> DistArray:  # fmt: skip
        return _NUMPY.var(self, axis, dtype, out, ddof, keepdims, where=where, mean=mean)

    def std(
        self, axis: Axis = None, dtype: Any = None, out: DistArray | None = None, ddof: float = 0,
        keepdims: bool = False, *, where: Any = True, mean: Any = None,
    ) -> DistArray:  # fmt: skip
        return _NUMPY.std(self, axis, dtype, out, ddof, keepdims, where=where, mean=mean)

    def trace(
        self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: DistArray | None = None
    ) -> DistArray:
        return _NUMPY.trace(self, offset, axis1, axis2, dtype, out)

    def argmax(self, axis: int | None = None, out: DistArray | None = None, *, keepdims: bool = False) -> DistArray:
        return _NUMPY.argmax(self, axis, out, keepdims=keepdims)

    def argmin(self, axis: int | None = None, out: DistArray | None = None, *, keepdims: bool = False) -> DistArray:
        return _NUMPY.argmin(self, axis, out, keepdims=keepdims)

    def cumsum(self, axis: int | None = None, dtype: Any = None, out: DistArray | None = None) -> DistArray:
        return _NUMPY.cumsum(self, axis, dtype, out)

    def cumprod(self, axis: int | None = None, dtype: Any = None, out: DistArray | None = None) -> DistArray:
        return _NUMPY.cumprod(self, axis, dtype, out)

    # ------------------------------------------------------------------ elements
    def clip(self, min: Any = None, max: Any = None, out: DistArray | None = None) -> DistArray:
        return _NUMPY.clip(self, min, max, out)

    def round(self, decimals: int = 0, out: DistArray | None = None) -> DistArray:
        return _NUMPY.round(self, decimals, out)

    def dot(self, b: Any, out: DistArray | None = None) -> DistArray:
        return _NUMPY.dot(self, b, out)

    def conjugate(self) -> DistArray:
        return self.conj()

    def fill(self, value: Any) -> None:
        """Set all elements to a value."""
        self[...] = value

    def take(self, indices: Any, axis: int | None = None, out: DistArray | None = None) -> DistArray:
        return _NUMPY.take(self, indices, axis, out)

    def compress(self, condition: Any, axis: int | None = None, out: DistArray | None = None) -> DistArray:
        return _NUMPY.compress(condition, self, axis, out)

    def choose(self, choices: Any, out: DistArray | None = None, mode: str = "raise") -> DistArray:
        return _NUMPY.choose(self, choices, out, mode)

    def repeat(self, repeats: Any, axis: int | None = None) -> DistArray:
        return _NUMPY.repeat(self, repeats, axis)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DistArray:
        return _NUMPY.diagonal(self, offset, axis1, axis2)

    def nonzero(self) -> tuple[DistArray, ...]:
        return _NUMPY.nonzero(self)

    def searchsorted(self, v: Any, side: str = "left", sorter: Any = None) -> DistArray:
        return _NUMPY.searchsorted(self, v, side, sorter)

    def sort(self, axis: int = -1, kind: Any = None, order: None = None, *, stable: bool | None = None) -> None:
        """Sort the array in place."""
        delivered(_NUMPY.sort(self, axis, kind, order), self, "sort")

    def argsort(
        self, axis: int | None = -1, kind: Any = None, order: None = None, *, stable: bool | None = None
    ) -> DistArray:
        return _NUMPY.argsort(self, axis, kind, order)

    def partition(self, kth: Any, axis: int = -1, kind: str = "introselect", order: None = None) -> None:
        """Bring elements number `kth` of the sorted lines to their places, in place."""
        delivered(_NUMPY.partition(self, kth, axis, kind, order), self, "partition")

    def argpartition(self, kth: Any, axis: int | None = -1, kind: str = "introselect", order: None = None) -> DistArray:
        return _NUMPY.argpartition(self, kth, axis, kind, order)

    def view(self, dtype: Any = None) -> DistArray:
        """Return the array, with its elements' bytes read as another dtype of equal size.

        As with every DistArray, writing to the result leaves this array as it is.
        """
        kind = self.dtype if dtype is None else native(np.dtype(dtype))
        if kind.itemsize != self.dtype.itemsize:
            raise TypeError(
                f"view({kind}) of elements of {self.dtype}, which have {self.dtype.itemsize} bytes and not "
                f"{kind.itemsize}, would change the shape; use astype({kind}) to convert the values"
            )
        whole = self if kind == self.dtype else self.summed()
        return whole.sharing(whole.block.view(kind), order=whole.order)

    def tolist(self) -> Any:
        """Return the global array as nested lists on every rank.  Collective."""
        return self.gather().tolist()

    def as_linear_operator(self) -> Any:
        """Return the matrix as a `scipy.sparse.linalg.LinearOperator` on vectors that every rank holds whole.

        All ranks call a method of SciPy (`cg`, `gmres`, `lobpcg`, `svds`, `eigsh`, …) with the same arguments, and get
        the same results; every product is collective, and cut as the matrix is.  One that begins with random numbers
        needs the same on all ranks, by `v0=` or `rng=`: ranks whose vectors differ are a CommError.

        Raises
        ------
        ValueError
            If the array is not a matrix.

        Examples
        --------
        >>> import numpy as np, parlinalg as pla
        >>> from scipy.sparse.linalg import cg
        >>> A = 3.0 * pla.eye(4) + pla.ones((4, 4))
        >>> x, info = cg(A.as_linear_operator(), np.ones(4))
        >>> x.round(3), info
        (array([0.143, 0.143, 0.143, 0.143]), 0)
        """
        from parlinalg.array.bridges import linear_operator

        return linear_operator(self)

    def tobytes(self, order: Any = "C") -> bytes:
        """Return the bytes of the global array on every rank.  Collective."""
        return self.gather().tobytes(order)

    # ------------------------------------------------------------------ scalars
    def item(self, *index: Any) -> Any:
        """Return the element of an array of size 1, or the one at an index, as a Python scalar, on every rank.

        Collective unless the array is replicated.
        """
        if len(index) == 1 and isinstance(index[0], tuple):
            index = index[0]
        if len(index) == 1 and self.ndim != 1:
            number = operator.index(index[0])
            if not -self.size <= number < self.size:
                raise IndexError(f"item({number}) of an array of {self.size} elements")
            index = tuple(int(i) for i in np.unravel_index(number % self.size, self.shape))
        if index:
            if len(index) != self.ndim:
                raise ValueError(f"item takes one index, or one for each of {self.ndim} dims, not {len(index)}")
            return self[tuple(operator.index(i) for i in index)].item()
        if self.size != 1:
            raise ValueError(f"item() takes an array of one element; this one has shape {self.shape}: use gather()")
        if self.layout.axes or self.grid.size < self.grid.world.size:
            return self.gather().item()
        return self.grid.backend.to_host(self.block).item()

    def _scalar(self, kind: Callable[[Any], Any]) -> Any:
        if self.ndim:
            raise TypeError(f"only an array without dims becomes a Python scalar; this one has shape {self.shape}")
        return kind(self.item())

    def __float__(self) -> float:
        return self._scalar(float)

    def __int__(self) -> int:
        return self._scalar(int)

    def __complex__(self) -> complex:
        return self._scalar(complex)

    def __round__(self, ndigits: int | None = None) -> Any:
        return self._scalar(lambda number: round(number, ndigits))

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth value of an array of shape {self.shape} is ambiguous; use any() or all()")
        return bool(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"only an integer becomes an index; the array has dtype {self.dtype}")
        return self._scalar(int)

    # ------------------------------------------------------------------ Array API
    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return `parlinalg`, the namespace of distributed arrays."""
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12", "2025.12"):
            raise ValueError(f"parlinalg has the standard's versions up to 2025.12, not {api_version!r}")
        return sys.modules["parlinalg"]

    @property
    def device(self) -> Device:
        """The device of the blocks, "cpu" or "cuda"; arrays made with `device=x.device` live on the grid of x."""
        return self.grid.device

    def to_device(self, device: Any, /, *, stream: Any = None) -> DistArray:
        """Return the array, which must be on this device: its grid decides where blocks are."""
        if device != self.device:
            raise ValueError(f"the blocks of {self.grid!r} are on {self.device!r}; use .to_grid for {device!r}")
        return self

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        """Return the array for another library, such as `np.from_dlpack(A)`: the memory itself on one rank.

        On several ranks it is a copy of the global array, gathered to every one of them.  Collective in that case, and
        a BufferError for `copy=False` and within `explicit()`.
        """
        if self.grid.world.size == 1:
            return self.block.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        from parlinalg.array.align import is_explicit

        if copy is False or is_explicit():
            raise BufferError(
                "the array lies in blocks on several ranks, and another library gets a copy of the global array only: "
                "use pla.asnumpy(x), or .block for this rank's part"
            )
        return self.gather().__dlpack__(max_version=max_version, dl_device=dl_device)

    def __dlpack_device__(self) -> Any:
        return self.block.__dlpack_device__() if self.grid.world.size == 1 else (1, 0)  # the host

    # ------------------------------------------------------------------ NumPy protocols
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # the error of a property, or of a protocol that is not there
        if name in _NUMPY_ATTRIBUTES:
            raise AttributeError(
                f"a DistArray has no {name!r}, which NumPy's arrays have; take the global array by .gather(), or this "
                "rank's part by .block",
                name=name, obj=self,
            )  # fmt: skip
        raise AttributeError(f"a DistArray has no attribute {name!r}", name=name, obj=self)

    def __reduce__(self) -> Any:
        from parlinalg.array.pickling import reduced

        return reduced(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if not self.ndim and copy is not False:  # a number, as float() gives; collective as well
            return np.asarray(self.item(), self.dtype if dtype is None else dtype)
        raise TypeError(
            "a DistArray does not become a NumPy array by itself: this rank holds one block of it. Use pla.asnumpy(x) "
            "or .gather() for the global array, .block for this rank's part; pla.stack([x, y]) for one array of several"
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from parlinalg.array.ufuncs import apply

        if any(takes_over(value) for value in inputs):
            return NotImplemented
        return apply(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from parlinalg.array.functions import call

        if any(hasattr(kind, PROTOCOL) for kind in types):
            return NotImplemented
        return call(function, args, kwargs)

    @property
    def xp(self) -> Any:
        """The namespace of the block: numpy or cupy."""
        return namespace(self.block)

    # ------------------------------------------------------------------ printing
    def __format__(self, spec: str) -> str:
        """Return the text of an f-string: of an array without dims its element in this format.  Collective."""
        if not self.ndim:
            return format(self.item(), spec)
        if spec:
            raise TypeError(
                f"the format {spec!r} is for numbers; this array has shape {self.shape}: format single elements, "
                "or .gather() with np.array2string"
            )
        return str(self)

    def __repr__(self) -> str:
        return f"DistArray(shape={self.shape}, dtype={self.dtype}, layout={self.layout!r}, grid={self.grid!r})"

    def __str__(self) -> str:
        """Return `repr` and a summary of the values.  Collective: all ranks must print, or use `repr`."""
        from parlinalg.array.printing import summary

        return f"{self!r}\n{summary(self)}"


def refused_dtype(name: str) -> TypeError:
    """Return the error for a dtype that blocks cannot have."""
    return TypeError(f"an array of dtype {name} cannot be distributed; it may be one of {', '.join(ITEMSIZE)}")


@cache
def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in the byte order of this machine, in which blocks are kept; a TypeError if none can have it."""
    if dtype.name not in ITEMSIZE:
        raise refused_dtype(dtype.name)
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def axis_of(axis: Any, ndim: int) -> int:
    """Return the dim that NumPy's `axis`, which may be negative, stands for."""
    try:
        dim = operator.index(axis)
    except TypeError:
        raise TypeError(f"an axis is a whole number, not {axis!r}") from None
    if not -ndim <= dim < ndim:
        raise np.exceptions.AxisError(axis, ndim)
    return dim % ndim


def dims_in_order(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the dims of an argument `axis`, a number or several, in its order; an error for one twice."""
    dims = tuple(axis_of(d, ndim) for d in (axis if isinstance(axis, tuple | list) else (axis,)))
    if len(set(dims)) != len(dims):
        raise ValueError(f"axis {axis} names a dim twice")
    return dims


def whole(what: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number, which may be NumPy's; raise ValueError if it is none, too small or too large.

    >>> whole("k", np.int64(3), 1)
    3
    """
    try:
        found = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        limits = f" of at least {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{what} is a whole number{'' if least is None else limits}, not {value!r}")
    return found


def check_out(out: Any, shape: tuple[int, ...], what: str) -> None:
    """Raise an error unless `out` is distributed and has the shape of the result."""
    if not isinstance(out, DistArray):
        raise TypeError(f"out= of np.{what} is a {type(out).__name__}; the result is distributed, and so must out be")
    if out.shape != shape:
        raise ValueError(f"out= of np.{what} has shape {out.shape}, the result {shape}")


def delivered(result: DistArray, out: Any, what: str) -> DistArray:
    """Return the result; or `out`, if it is given, which then has the result in its own layout and dtype."""
    if out is None:
        return result
    check_out(out, result.shape, what)
    same_grid([result, out])
    if not np.can_cast(result.dtype, out.dtype, "same_kind"):
        raise TypeError(f"out= of np.{what} has dtype {out.dtype}, which does not take a result of {result.dtype}")
    into = out.destination()
    into[...] = result.redistribute(out.layout).block
    out.adopt(into)
    return out


def terms_add(dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Return True if terms that are converted from one dtype to another sum up to the converted sum.

    Floating numbers do, but for rounding.  Integers wrap around, so that their terms know only the last bits of the
    sum, and those that are cut off sum up to no integer.
    """
    if dtype == to:
        return True
    if dtype.kind in "iu" and to.kind in "iu":
        return to.itemsize <= dtype.itemsize
    return dtype.kind in "fcV" and to.kind in "fcV"


def truth(condition: Any, name: str, why: str) -> bool:
    """Return the truth of an array of one boolean, on every rank; without values what `WhatIf` says under this name.

    Collective, unless the array is replicated.
    """
    if condition.grid.backend.values:
        return bool(condition)
    condition.gather()  # imagined ranks ask each other as real ones do
    return bool(condition.grid.backend.assume(name, why))


def same_grid(arrays: Sequence[DistArray]) -> Grid:
    """Return the one grid of all these arrays."""
    grid = arrays[0].grid
    for other in arrays[1:]:
        if other.grid is not grid:
            from parlinalg.errors import GridError

            raise GridError(
                f"arrays on different grids meet: {grid!r} and {other.grid!r}; move one by to_grid(grid, layout)"
            )
    return grid


def mismatch(what: str, have: Layout, want: Layout) -> LayoutError:
    return LayoutError(
        f"{what}: {have!r} meets {want!r}; nothing is redistributed implicitly, mend it by .redistribute({want!r})"
    )


_NUMPY: Any = np  # whose functions return DistArrays, which its types do not know
_NUMPY_ATTRIBUTES = frozenset(name for name in dir(np.ndarray) if not name.startswith("_"))
