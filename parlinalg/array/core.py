"""DistArray: a global array cut into blocks over a processor grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from parlinalg.array import transfer
from parlinalg.backend import namespace
from parlinalg.backend.views import address
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.redistribute import fitting, redistribute

Block = Any
Axis = int | tuple[int, ...] | None


class DistArray(NDArrayOperatorsMixin):
    """A global array of which every rank of a grid holds one block.

    Made by `parlinalg.distribute`, `from_function`, `from_blocks`, `zeros` and the like.  Elementwise ufuncs work block
    by block on equal layouts (see `parlinalg.array.ufuncs`); the functions of NumPy listed in
    `parlinalg.array.functions` work too; everything else is refused, never computed on one rank's block by accident.

    Attributes
    ----------
    block : array
        This rank's block, an array of the grid's backend.
    shape : tuple of int
        The global shape.
    layout : Layout
    grid : Grid
    """

    __slots__ = ("block", "grid", "layout", "order", "shape")

    def __init__(
        self, block: Block, shape: Sequence[int], layout: Layout, grid: Grid, order: tuple[int, ...] | None = None
    ) -> None:
        self.shape = tuple(shape)
        self.layout = layout
        self.grid = grid
        self.block = block
        self.order = order
        """The permutation of dims under which all ranks' blocks lie in C order; None is the identity, or unknown."""

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

    # ------------------------------------------------------------------ movement
    def redistribute(self, layout: Layout) -> DistArray:
        """Return the same array in another layout; the one operation that changes where elements lie.

        No rank receives more elements than its new block lacks.  Collective.
        """
        if fitting(layout, self.shape, self.grid) == self.layout:
            return self
        return DistArray(self.block_in(layout), self.shape, layout, self.grid, self.order)

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
        return self.redistribute(self.layout.with_partial(())) if self.layout.partial else self

    # ------------------------------------------------------------------ views
    def transpose(self, *order: Any) -> DistArray:
        """Dims permuted; a view: nothing moves."""
        dims: Sequence[int] = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
        if not order or dims is None:
            dims = range(self.ndim)[::-1]
        dims = [d % self.ndim if -self.ndim <= d < self.ndim else d for d in dims]
        if sorted(dims) != list(range(self.ndim)):
            raise ValueError(
                f"transpose of an array of {self.ndim} dims takes each of 0 to {self.ndim - 1} once, not {tuple(dims)}"
            )
        old = self.order or range(self.ndim)
        stored: tuple[int, ...] | None = tuple(list(dims).index(d) for d in old)
        if stored == tuple(range(self.ndim)):
            stored = None
        shape = [self.shape[d] for d in dims]
        return DistArray(self.block.transpose(tuple(dims)), shape, self.layout.permuted(dims), self.grid, stored)

    @property
    def T(self) -> DistArray:
        """The transposed array, a view."""
        return self.transpose()

    @property
    def mT(self) -> DistArray:
        """The last two dims exchanged, a view."""
        if self.ndim < 2:
            raise ValueError(f"mT needs at least two dims, the array has shape {self.shape}")
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    @property
    def H(self) -> DistArray:
        """The conjugate transpose; a view where the dtype is real."""
        return self.T.conj()

    def conj(self) -> DistArray:
        return self.like(self.block.conj()) if self.dtype.kind == "c" else self

    @property
    def real(self) -> DistArray:
        return self.like(self.block.real)

    @property
    def imag(self) -> DistArray:
        return self.like(self.block.imag)

    def astype(self, dtype: Any, copy: bool = True) -> DistArray:
        """Return every element converted to `dtype`."""
        return self.like(self.block.astype(dtype, copy=copy))

    def copy(self) -> DistArray:
        return self.like(self.block.copy())

    def reshape(self, *shape: Any) -> DistArray:
        """Return the same elements in another shape, where blocks stay blocks (see `parlinalg.array.shapes`)."""
        from parlinalg.array.shapes import reshape

        return reshape(self, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)

    def __getitem__(self, key: Any) -> DistArray:
        from parlinalg.array.indexing import getitem

        return getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            "a DistArray's elements are not assigned one by one; build it by parlinalg.from_function or where(), or "
            "write to its block"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    # ------------------------------------------------------------------ reductions
    def sum(self, axis: Axis = None, dtype: Any = None, keepdims: bool = False, *, partial: bool = False) -> DistArray:
        """Return the sum over `axis` (default: all dims).

        Over a cut dim the blocks' sums are summed over the axes that cut it: at once, or, with `partial`, left for
        later.
        """
        from parlinalg.array.reductions import total

        return total(self, axis, dtype, keepdims, partial)

    def _reduce(self, name: str, axis: Axis, keepdims: bool) -> DistArray:
        from parlinalg.array.reductions import extreme

        return extreme(self, name, axis, keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        return self._reduce("max", axis, keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        return self._reduce("min", axis, keepdims)

    def any(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        return self._reduce("any", axis, keepdims)

    def all(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        return self._reduce("all", axis, keepdims)

    def prod(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        return self._reduce("prod", axis, keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> DistArray:
        from parlinalg.array.reductions import mean

        return mean(self, axis, keepdims)

    # ------------------------------------------------------------------ scalars
    def item(self) -> Any:
        """Return the element of an array of size 1 as a Python scalar, on every rank.  Collective unless replicated."""
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

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth value of an array of shape {self.shape} is ambiguous; use any() or all()")
        return bool(self.item())

    # ------------------------------------------------------------------ NumPy protocols
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(
            "a DistArray does not become a NumPy array by itself: this rank holds one block of it. Use .gather() for "
            "the global array, .block for this rank's part"
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from parlinalg.array.ufuncs import apply

        return apply(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from parlinalg.array.functions import call

        return call(function, args, kwargs)

    @property
    def xp(self) -> Any:
        """The namespace of the block: numpy or cupy."""
        return namespace(self.block)

    # ------------------------------------------------------------------ printing
    def __repr__(self) -> str:
        return f"DistArray(shape={self.shape}, dtype={self.dtype}, layout={self.layout!r}, grid={self.grid!r})"

    def __str__(self) -> str:
        """`repr` and a summary of the values, alike on every rank.  Collective: all ranks must print, or use `repr`."""
        return f"{self!r}\n{_summary(self)}"


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


def effective(layout: Layout, grid: Grid) -> Layout:
    """Return the layout without axes of one rank, which cut nothing."""
    return grid.effective(layout)


def mismatch(what: str, have: Layout, want: Layout) -> LayoutError:
    return LayoutError(
        f"{what}: {have!r} meets {want!r}; nothing is redistributed implicitly, mend it by .redistribute({want!r})"
    )


EDGE = 3


def _summary(a: DistArray) -> str:
    """Return the values as NumPy prints them; of a large array only the corners are fetched.  Collective."""
    large = a.size > np.get_printoptions()["threshold"]
    cut = [d for d, n in enumerate(a.shape) if large and n > 2 * EDGE]
    if not cut:
        return np.array2string(a.gather(), prefix="")
    corners = _corners(a.summed(), cut)
    return np.array2string(corners, threshold=0, edgeitems=EDGE)


def _corners(a: DistArray, dims: list[int]) -> Any:
    """Return the global array with only the edges of these dims, and one item between, which is not shown."""
    if not dims:
        return a.gather()
    dim, lead = dims[0], (slice(None),) * dims[0]
    first, last = a[(*lead, slice(0, EDGE + 1))], a[(*lead, slice(a.shape[dim] - EDGE, None))]
    return np.concatenate([_corners(first, dims[1:]), _corners(last, dims[1:])], axis=dim)
