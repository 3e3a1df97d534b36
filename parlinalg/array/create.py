"""Making distributed arrays: from a global array, a function, blocks, or a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array import transfer
from parlinalg.array.core import DistArray, native, refused_dtype
from parlinalg.array.shapes import shape_of
from parlinalg.comm.check import array_checksum, sample_checksum
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout, cut_lengths, index_of
from parlinalg.redistribute import check_given, check_kinds, fitting, part_of, redistribute
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
        On all ranks, if the layout does not fit the array or the grid, or ranks pass different arrays, layouts or
        roots.  Of large arrays the first and last elements are compared, in checked mode all.
    TypeError
        If the array is masked on any rank, or of another dtype than numbers and bools; on all ranks.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> grid = pla.Grid({"r": 1, "c": 1})
    >>> pla.distribute(np.ones((4, 3)), grid, pla.Layout("r", "c"))
    DistArray(shape=(4, 3), dtype=float64, layout=Layout('r', 'c'), grid=Grid({'r': 1, 'c': 1}, backend='numpy'))
    """
    check_kinds(grid, layout)
    holds = root is None or grid.world.rank == root
    if isinstance(array, DistArray):
        raise TypeError(
            "distribute takes a global array; this is a DistArray already: use .redistribute(layout) or .to_grid(grid, "
            "layout)"
        )
    if root is not None and (not isinstance(root, int | np.integer) or not 0 <= root < grid.world.size):
        raise LayoutError(f"root {root} is not one of the {grid.world.size} ranks, 0 to {grid.world.size - 1}")
    host: Any = _host(array, grid) if holds else None
    about = [list(host.shape), host.dtype.name, np.ma.isMaskedArray(array), _checksum(host, grid)] if holds else None
    reported = grid.world.share([repr(layout), root, about])
    for rank, theirs in enumerate(reported):
        if theirs[:2] != reported[0][:2]:
            raise LayoutError(
                f"ranks call distribute differently: rank 0 with layout {reported[0][0]} and root={reported[0][1]}, "
                f"rank {rank} with {theirs[0]} and root={theirs[1]}; all ranks must make the same array"
            )
    facts = [fact for *_, fact in reported]
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
        raise refused_dtype(first[1])
    shape, dtype = tuple(first[0]), dtype_named(first[1])
    fitting(layout, shape, grid)
    cut = layout.with_partial(())
    if root is not None:
        block = transfer.scatter(host, shape, dtype, cut, grid, root)
    else:
        part = tuple(slice(r.start, r.stop) for r in grid.block(cut, shape))
        block = grid.backend.from_host(np.array(host[part], order="C"))
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def _checksum(host: Any, grid: Grid) -> str:
    """Return the checksum of a host array that should be equal on several ranks: of a large one by a part of it."""
    if host.dtype.name not in ITEMSIZE:
        return ""
    return array_checksum(host) if grid.world.checked else sample_checksum(host)


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
    if not isinstance(array, np.ndarray | np.generic | int | float | complex | list | tuple) and hasattr(
        array, "__cuda_array_interface__"
    ):
        return grid.backend.to_host(array)
    host = np.asarray(array)
    return host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))


def from_function(
    function: Callable[..., Any], shape: Shape, grid: Grid, layout: Layout, dtype: Any = None
) -> DistArray:
    """Return the array whose element at (i, j, …) is `function(i, j, …)`; every rank computes its own block.

    Collective where ranks hold replicas: some of their elements are compared, in checked mode all, so that random
    numbers that differ from rank to rank do not go unnoticed (`parlinalg.random` makes the same on every grid).

    Parameters
    ----------
    function : callable
        Called once with one NumPy index array a dim, open (shaped to broadcast), and must work elementwise.

    Raises
    ------
    CommError
        If ranks that hold the same part compute different elements; on all ranks.
    ValueError
        If the result has not the shape of the block, nor broadcasts to it.
    """
    return computed("from_function", function, shape, grid, layout, dtype)


def computed(
    what: str, function: Callable[..., Any], shape: Shape, grid: Grid, layout: Layout, dtype: Any
) -> DistArray:
    """Return the array of `from_function`, for the function of this name."""
    shape = shape_of(shape)
    fitting(layout, shape, grid)
    cut = layout.with_partial(())
    indices = np.ix_(*(np.arange(r.start, r.stop) for r in grid.block(cut, shape)))
    given = function(*indices)
    if np.ma.isMaskedArray(given):
        raise masked("from_function")
    values = np.asarray(given, dtype=None if dtype is None else dtype_named(dtype))
    values = values.astype(native(values.dtype), copy=False)
    held = grid.block_shape(cut, shape)
    if not _broadcasts(values.shape, held):
        raise ValueError(
            f"{what}: the function returns an array of shape {values.shape} for the block of shape {held} on rank "
            f"{grid.rank}, of a global shape {shape}; it should be elementwise in its indices"
        )
    block = grid.backend.from_host(np.array(np.broadcast_to(values, held), order="C"))
    right = (
        "an element should depend on its indices alone, the same on every rank (parlinalg.random makes such numbers)"
    )
    check_given(what, block, cut, shape, grid, right, replicas=what != "trace", partial=layout.partial)
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    padded = (*(1,) * (len(to) - len(shape)), *shape)
    return len(padded) == len(to) and all(n in (1, m) for n, m in zip(padded, to, strict=True))


def from_blocks(block: Any, grid: Grid, layout: Layout, shape: Shape | None = None) -> DistArray:
    """Return an array from the blocks the ranks hold already; nothing is copied, unless a byte order is foreign.

    Parameters
    ----------
    block : array
        This rank's block, of the shape the layout gives it: balanced pieces of every cut dim, replicas equal.
    shape : tuple of int, optional
        The global shape; by default found from the blocks (collective).

    Raises
    ------
    LayoutError
        On all ranks, if a rank's block has another shape than the layout gives it, or ranks that hold the same part
        give different blocks (of large ones the first and last elements are compared, in checked mode all).
    TypeError
        On all ranks, if a rank's block is masked.
    """
    check_kinds(grid, layout)
    if isinstance(block, DistArray):
        raise TypeError("from_blocks takes this rank's block; this is a DistArray already: give its .block")
    hidden = np.ma.isMaskedArray(block)
    if not hasattr(block, "flags") or grid.backend.host_memory != isinstance(block, np.ndarray):
        block = grid.backend.from_host(np.asarray(block))
    if not block.dtype.isnative:
        block = block.astype(block.dtype.newbyteorder("="))
    layout.check((0,) * layout.ndim, grid.sizes)
    at = [index_of(cut, grid.sizes, grid.coords) if grid.inside else -1 for cut in layout.dims]
    known = grid.inside and block.dtype.name in ITEMSIZE
    part = [part_of(layout, grid), sample_checksum(block)] if known else None
    facts = grid.world.share([list(block.shape), at, block.dtype.name, grid.inside, hidden, part])
    if any(fact[4] for fact in facts):
        raise masked("from_blocks")
    for rank, (theirs, *_) in enumerate(facts):
        if len(theirs) != layout.ndim:
            raise LayoutError(
                f"rank {rank} gives a block of shape {tuple(theirs)}; {layout!r} describes {layout.ndim} dims"
            )
    if shape is None:
        lengths: list[dict[int, int]] = [{} for _ in layout.dims]
        for theirs, where, _, inside, *_ in facts:
            if inside:
                for dim, (index, length) in enumerate(zip(where, theirs, strict=True)):
                    lengths[dim][index] = length
        shape = tuple(sum(d.values()) for d in lengths)
    shape = shape_of(shape)
    for rank, (theirs, _, dtype, inside, *_) in enumerate(facts):
        want = list(layout.block_shape(shape, grid.sizes, grid.coords_of(rank))) if inside else theirs
        if theirs != want:
            pieces = [cut_lengths(n, cut, grid.sizes) for n, cut in zip(shape, layout.dims, strict=True)]
            raise LayoutError(
                f"rank {rank} gives a block of shape {tuple(theirs)}; {layout!r} of a global shape {shape} gives it "
                f"{tuple(want)} (pieces of the dims: {pieces})"
            )
        if dtype not in ITEMSIZE:
            raise refused_dtype(dtype)
        if inside and dtype != facts[0][2]:
            raise LayoutError(
                f"rank {rank} gives a block of dtype {dtype}, rank 0 one of {facts[0][2]}; all blocks need one dtype"
            )
    replicas: dict[str, tuple[int, str]] = {}
    for rank, part in enumerate(fact[5] for fact in facts):
        if part is not None:
            first, text = replicas.setdefault(str(part[0]), (rank, part[1]))
            if text != part[1]:
                raise LayoutError(
                    f"from_blocks: ranks {first} and {rank} hold the same part of {layout!r}, but give different "
                    f"blocks (checksums {text} and {part[1]}); give ranks that hold the same part equal blocks"
                )
    check_given("from_blocks", block, layout, shape, grid, "give ranks that hold the same part equal blocks")
    return DistArray(block, shape, layout, grid)


def full(shape: Shape, value: Any, grid: Grid, layout: Layout, dtype: Any = None) -> DistArray:
    """Return an array of one value everywhere."""
    if np.ma.isMaskedArray(value):
        raise masked("full")
    if isinstance(value, DistArray):
        value = value.item()
    dtype = np.asarray(value).dtype if dtype is None else dtype
    return computed("full", lambda *_: np.asarray(value), shape, grid, layout, dtype)


def zeros(shape: Shape, grid: Grid, layout: Layout, dtype: Any = np.float64) -> DistArray:
    """Return an array of zeros."""
    shape = shape_of(shape)
    fitting(layout, shape, grid)
    block = grid.backend.zeros(grid.block_shape(layout, shape), native(dtype_named(dtype)))
    return DistArray(block, shape, layout, grid)


def ones(shape: Shape, grid: Grid, layout: Layout, dtype: Any = np.float64) -> DistArray:
    """Return an array of ones."""
    return full(shape, 1, grid, layout, dtype)


def empty(shape: Shape, grid: Grid, layout: Layout, dtype: Any = np.float64) -> DistArray:
    """Return an array whose elements are yet to be written."""
    shape = shape_of(shape)
    fitting(layout, shape, grid)
    block = grid.backend.empty(grid.block_shape(layout, shape), native(dtype_named(dtype)))
    return DistArray(block, shape, layout, grid)


def eye(n: int, grid: Grid, layout: Layout, m: int | None = None, dtype: Any = np.float64) -> DistArray:
    """Ones on the main diagonal of an n × m matrix (m = n by default), zeros elsewhere."""
    return from_function(lambda i, j: i == j, (n, n if m is None else m), grid, layout, dtype)
