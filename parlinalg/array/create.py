"""Making distributed arrays: from a global array, a function, blocks, or a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array import transfer
from parlinalg.array.core import DistArray
from parlinalg.array.shapes import shape_of
from parlinalg.comm.check import array_checksum
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout, cut_lengths, index_of
from parlinalg.redistribute import check_given, fitting, redistribute
from parlinalg.units import ITEMSIZE

Shape = int | Sequence[int]


def distribute(array: Any, grid: Grid, layout: Layout, root: int | None = None) -> DistArray:
    """Cut a global array into blocks over a grid.

    Parameters
    ----------
    array : array_like
        The global array: the same on every rank, of which each keeps a copy of its own part; or, with `root`, on that
        rank alone (the others pass None), which sends every rank its part.
    grid : Grid
    layout : Layout
        The array's layout.  Over partial axes the value stays at coordinate 0, with zeros elsewhere.
    root : int, optional
        A rank of the communicator the grid was made from.

    Raises
    ------
    LayoutError
        If the layout does not fit the array or the grid, on all ranks.
    TypeError
        If the array is masked on any rank, or of another dtype than numbers and bools; on all ranks.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> grid = pla.Grid({"r": 1, "c": 1})
    >>> pla.distribute(np.ones((4, 3)), grid, pla.Layout("r", "c"))
    DistArray(shape=(4, 3), dtype=float64, layout=Layout('r', 'c'), grid=Grid({'r': 1, 'c': 1}, backend='numpy'))
    """
    holds = root is None or grid.world.rank == root
    if isinstance(array, DistArray):
        raise TypeError(
            "distribute takes a global array; this is a DistArray already: use .redistribute(layout) or .to_grid(grid, "
            "layout)"
        )
    if root is not None and not 0 <= root < grid.world.size:
        raise LayoutError(f"root {root} is not one of the {grid.world.size} ranks, 0 to {grid.world.size - 1}")
    host: Any = _host(array, grid) if holds else None
    about = [list(host.shape), host.dtype.name, np.ma.isMaskedArray(array), _checksum(host, grid)] if holds else None
    facts = grid.world.share(about)
    if any(fact[2] for fact in facts if fact is not None):
        raise masked("distribute")
    first = facts[root or 0]
    odd = [rank for rank, fact in enumerate(facts) if root is None and fact != first]
    if odd:
        theirs = facts[odd[0]]
        sums = ["" if theirs[:2] != first[:2] else f" with checksum {fact[3]}" for fact in (first, theirs)]
        raise LayoutError(
            f"ranks pass different arrays to distribute: rank 0 {first[1]}{tuple(first[0])}{sums[0]}, "
            f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} {theirs[1]}{tuple(theirs[0])}{sums[1]}; pass the "
            "same global array, or root= where one rank alone holds it"
        )
    if first[1] not in ITEMSIZE:
        raise TypeError(f"an array of dtype {first[1]} cannot be distributed; it may be one of {', '.join(ITEMSIZE)}")
    shape, dtype = tuple(first[0]), dtype_named(first[1])
    fitting(layout, shape, grid)
    cut = layout.with_partial(())
    if root is not None:
        block = transfer.scatter(host, shape, dtype, cut, grid, root)
    else:
        part = tuple(slice(r.start, r.stop) for r in grid.block(cut, shape))
        block = grid.backend.from_host(np.array(host[part], order="C"))
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


SMALL = 1 << 12
"""Bytes up to which what ranks give is compared without the checked mode too, where they share facts anyway."""


def _checksum(host: Any, grid: Grid) -> str:
    """Return the checksum of a host array that should be equal on several ranks; empty where it is not compared."""
    if host.dtype.name not in ITEMSIZE or not (grid.world.checked or host.nbytes <= SMALL):
        return ""
    return array_checksum(host)


def dtype_named(name: Any) -> np.dtype[Any]:
    """Return the dtype of this name, "bfloat16" among them, or of what else NumPy takes for one.

    Raises
    ------
    ImportError
        If that needs ml_dtypes, and it is not installed.
    """
    if isinstance(name, str) and name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def masked(what: str) -> TypeError:
    """Return the error for an array whose mask would be lost."""
    return TypeError(
        f"{what} takes plain arrays, but this one is masked, and its mask would be lost: give array.filled(value), or "
        "the values and the mask as two arrays"
    )


def _host(array: Any, grid: Grid) -> Any:
    if isinstance(array, np.ndarray | np.generic | int | float | complex | list | tuple):
        return np.asarray(array)
    return grid.backend.to_host(array) if hasattr(array, "__cuda_array_interface__") else np.asarray(array)


def from_function(
    function: Callable[..., Any], shape: Shape, grid: Grid, layout: Layout, dtype: Any = None
) -> DistArray:
    """Return the array whose element at (i, j, …) is `function(i, j, …)`; every rank computes its own block alone.

    Parameters
    ----------
    function : callable
        Called once with one NumPy index array a dim, open (shaped to broadcast), and must work elementwise.
    """
    return _from_function("from_function", function, shape, grid, layout, dtype)


def _from_function(
    what: str, function: Callable[..., Any], shape: Shape, grid: Grid, layout: Layout, dtype: Any
) -> DistArray:
    shape = shape_of(shape)
    fitting(layout, shape, grid)
    cut = layout.with_partial(())
    indices = np.ix_(*(np.arange(r.start, r.stop) for r in grid.block(cut, shape)))
    given = function(*indices)
    if np.ma.isMaskedArray(given):
        raise masked("from_function")
    values = np.asarray(given, dtype=dtype)
    block = grid.backend.from_host(np.array(np.broadcast_to(values, grid.block_shape(cut, shape)), order="C"))
    right = "an element should depend on its indices alone, the same on every rank"
    check_given(what, block, cut, shape, grid, right, partial=layout.partial)
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def from_blocks(block: Any, grid: Grid, layout: Layout, shape: Shape | None = None) -> DistArray:
    """Return an array from the blocks the ranks hold already; nothing is copied.

    Parameters
    ----------
    block : array
        This rank's block, of the shape the layout gives it: balanced pieces of every cut dim, replicas equal.
    shape : tuple of int, optional
        The global shape; by default found from the blocks (collective).

    Raises
    ------
    LayoutError
        On all ranks, if a rank's block has another shape than the layout gives it.
    TypeError
        On all ranks, if a rank's block is masked.
    """
    hidden = np.ma.isMaskedArray(block)
    if not hasattr(block, "flags") or grid.backend.host_memory != isinstance(block, np.ndarray):
        block = grid.backend.from_host(np.asarray(block))
    layout.check((0,) * layout.ndim, grid.sizes)
    at = [index_of(cut, grid.sizes, grid.coords) if grid.inside else -1 for cut in layout.dims]
    facts = grid.world.share([list(block.shape), at, block.dtype.name, grid.inside, hidden])
    if any(fact[4] for fact in facts):
        raise masked("from_blocks")
    for rank, (theirs, *_) in enumerate(facts):
        if len(theirs) != layout.ndim:
            raise LayoutError(
                f"rank {rank} gives a block of shape {tuple(theirs)}; {layout!r} describes {layout.ndim} dims"
            )
    if shape is None:
        lengths: list[dict[int, int]] = [{} for _ in layout.dims]
        for theirs, where, _, inside, _ in facts:
            if inside:
                for dim, (index, length) in enumerate(zip(where, theirs, strict=True)):
                    lengths[dim][index] = length
        shape = tuple(sum(d.values()) for d in lengths)
    shape = shape_of(shape)
    for rank, (theirs, _, dtype, inside, _) in enumerate(facts):
        want = list(layout.block_shape(shape, grid.sizes, grid.coords_of(rank))) if inside else theirs
        if theirs != want:
            pieces = [cut_lengths(n, cut, grid.sizes) for n, cut in zip(shape, layout.dims, strict=True)]
            raise LayoutError(
                f"rank {rank} gives a block of shape {tuple(theirs)}; {layout!r} of a global shape {shape} gives it "
                f"{tuple(want)} (pieces of the dims: {pieces})"
            )
        if inside and dtype != facts[0][2]:
            raise LayoutError(
                f"rank {rank} gives a block of dtype {dtype}, rank 0 one of {facts[0][2]}; all blocks need one dtype"
            )
    check_given("from_blocks", block, layout, shape, grid, "give ranks that hold the same part equal blocks")
    return DistArray(block, shape, layout, grid)


def full(shape: Shape, value: Any, grid: Grid, layout: Layout, dtype: Any = None) -> DistArray:
    """Return an array of one value everywhere."""
    if np.ma.isMaskedArray(value):
        raise masked("full")
    dtype = np.asarray(value).dtype if dtype is None else dtype
    return _from_function("full", lambda *_: np.asarray(value), shape, grid, layout, dtype)


def zeros(shape: Shape, grid: Grid, layout: Layout, dtype: Any = np.float64) -> DistArray:
    """Return an array of zeros."""
    shape = shape_of(shape)
    block = grid.backend.zeros(grid.block_shape(fitting(layout, shape, grid), shape), dtype_named(dtype))
    return DistArray(block, shape, layout, grid)


def ones(shape: Shape, grid: Grid, layout: Layout, dtype: Any = np.float64) -> DistArray:
    """Return an array of ones."""
    return full(shape, 1, grid, layout, dtype)


def empty(shape: Shape, grid: Grid, layout: Layout, dtype: Any = np.float64) -> DistArray:
    """Return an array whose elements are yet to be written."""
    shape = shape_of(shape)
    block = grid.backend.empty(grid.block_shape(fitting(layout, shape, grid), shape), dtype_named(dtype))
    return DistArray(block, shape, layout, grid)


def eye(n: int, grid: Grid, layout: Layout, m: int | None = None, dtype: Any = np.float64) -> DistArray:
    """Ones on the main diagonal of an n × m matrix (m = n by default), zeros elsewhere."""
    return from_function(lambda i, j: i == j, (n, n if m is None else m), grid, layout, dtype)
