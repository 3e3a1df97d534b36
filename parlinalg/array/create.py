"""Making distributed arrays: from a global array, a function, blocks, or a constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array import transfer
from parlinalg.array.core import DistArray, native, refused_dtype, whole
from parlinalg.array.dispatch import of_arrays, primitive, refusing
from parlinalg.array.shapes import shape_of
from parlinalg.backend.shapes import SMALL, has_values
from parlinalg.comm.check import array_checksum, sample_checksum
from parlinalg.errors import LayoutError
from parlinalg.grid import Device, Grid, default_grid
from parlinalg.layout import Layout, cut_lengths, index_of
from parlinalg.redistribute import check_given, check_kinds, fitting, part_of, redistribute
from parlinalg.units import ITEMSIZE

DLPACK_HOST = (1, 3)  #: DLPack's device types of memory that the host reads: kDLCPU and kDLCUDAHost.

Shape = int | Sequence[int]


def distribute(
    array: Any, grid: Grid | None = None, layout: Layout | None = None, root: int | None = None
) -> DistArray:
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
    grid = default_grid() if grid is None else grid
    check_kinds(grid, Layout() if layout is None else layout)
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
    shape, dtype = _agreed(grid.world.share([repr(layout), root, about], others="alike"), root)
    shape, grid, layout = placed(shape, grid, layout)
    cut = layout.with_partial(())
    if root is not None:
        block = transfer.scatter(host, shape, dtype, cut, grid, root)
    else:
        part = tuple(slice(r.start, r.stop) for r in grid.block(cut, shape))
        block = grid.backend.from_host(np.array(host[part], order="C"))
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def _agreed(reported: Sequence[Any], root: int | None) -> tuple[Sequence[int], np.dtype[Any]]:
    """Return the shape and dtype of the array that ranks distribute; raise an error unless they pass the same one.

    Each rank reports the layout, the root and, if it has the array, its shape, the name of its dtype, whether it is
    masked, and a checksum.
    """
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
    return first[0], dtype_named(first[1])


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
    function: Callable[..., Any], shape: Shape, grid: Grid | None = None, layout: Layout | None = None,
    dtype: Any = None,
) -> DistArray:  # fmt: skip
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
    shape, grid, layout = placed(shape, grid, layout)
    return computed("from_function", function, shape, grid, layout, dtype)


def computed(
    what: str, function: Callable[..., Any], shape: Shape, grid: Grid, layout: Layout, dtype: Any
) -> DistArray:
    """Return the array of `from_function`, for the function of this name."""
    shape = shape_of(shape)
    fitting(layout, shape, grid)
    cut = layout.with_partial(())
    held = grid.block_shape(cut, shape)
    if dtype is not None and not grid.backend.values and math.prod(held) > SMALL:
        block = grid.backend.empty(held, dtype_named(dtype))  # without values, whatever the function returns
    else:
        block = grid.backend.from_host(_block_of(what, function, shape, cut, grid, dtype))
    right = (
        "an element should depend on its indices alone, the same on every rank (parlinalg.random makes such numbers)"
    )
    check_given(
        what, block, cut, shape, grid, right, replicas=what in ("from_function", "full"), partial=layout.partial
    )
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def _block_of(
    what: str, function: Callable[..., Any], shape: tuple[int, ...], cut: Layout, grid: Grid, dtype: Any
) -> np.ndarray:
    """Return this rank's block of the array that a function of the indices makes."""
    given = function(*np.ix_(*(np.arange(r.start, r.stop) for r in grid.block(cut, shape))))
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
    return np.array(np.broadcast_to(values, held), order="C")


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
    facts = grid.world.share([list(block.shape), at, block.dtype.name, grid.inside, hidden, part], others="by rank")
    if any(fact[4] for fact in facts):
        raise masked("from_blocks")
    for rank, (theirs, *_) in enumerate(facts):
        if len(theirs) != layout.ndim:
            raise LayoutError(
                f"rank {rank} gives a block of shape {tuple(theirs)}; {layout!r} describes {layout.ndim} dims"
            )
    shape = _sum_of_blocks(facts, layout) if shape is None else shape_of(shape)
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
    _check_replicas([fact[5] for fact in facts], layout)
    check_given("from_blocks", block, layout, shape, grid, "give ranks that hold the same part equal blocks")
    return DistArray(block, shape, layout, grid)


def _sum_of_blocks(facts: Sequence[Any], layout: Layout) -> tuple[int, ...]:
    """Return the global shape of the blocks that ranks report, with the number of each in every dim."""
    lengths: list[dict[int, int]] = [{} for _ in layout.dims]
    for theirs, where, _, inside, *_ in facts:
        if inside:
            for dim, (index, length) in enumerate(zip(where, theirs, strict=True)):
                lengths[dim][index] = length
    return tuple(sum(d.values()) for d in lengths)


def _check_replicas(parts: Sequence[Any], layout: Layout) -> None:
    """Raise a LayoutError unless ranks that report the same part report the same checksum."""
    known: dict[str, tuple[int, str]] = {}
    for rank, part in enumerate(parts):
        if part is not None:
            first, text = known.setdefault(str(part[0]), (rank, part[1]))
            if text != part[1]:
                raise LayoutError(
                    f"from_blocks: ranks {first} and {rank} hold the same part of {layout!r}, but give different "
                    f"blocks (checksums {text} and {part[1]}); give ranks that hold the same part equal blocks"
                )


def placed(
    shape: Shape, grid: Grid | None, layout: Layout | None, device: Any = None
) -> tuple[tuple[int, ...], Grid, Layout]:
    """Return the shape, grid and layout of an array to be made: the default ones where none are given."""
    if grid is None:
        grid = device.grid if isinstance(device, Device) else default_grid()
    check_kinds(grid, Layout() if layout is None else layout)
    shape = shape_of(shape)
    if device is not None and device != grid.device:
        raise ValueError(f"arrays of {grid!r} are on {grid.device!r}, not on {device!r}")
    return shape, grid, grid.default_layout(shape) if layout is None else fitting(layout, shape, grid)


def full(
    shape: Shape, fill_value: Any, grid: Grid | None = None, layout: Layout | None = None, dtype: Any = None, *,
    device: Any = None,
) -> DistArray:  # fmt: skip
    """Return an array of one value everywhere."""
    if np.ma.isMaskedArray(fill_value):
        raise masked("full")
    shape, grid, layout = placed(shape, grid, layout, device)
    value = fill_value.item() if isinstance(fill_value, DistArray) else fill_value
    if not has_values(value):  # floats have none, whatever is written; an integer is the one that is assumed
        dtype = value.dtype if dtype is None else dtype
        value = np.zeros(value.shape, value.dtype) if value.dtype.kind not in "iub" else value.item()
    dtype = np.asarray(value).dtype if dtype is None else dtype
    return computed("full", lambda *_: np.asarray(value), shape, grid, layout, dtype)


def zeros(
    shape: Shape, grid: Grid | None = None, layout: Layout | None = None, dtype: Any = None, *, device: Any = None
) -> DistArray:
    """Return an array of zeros."""
    return _allocated("zeros", shape, grid, layout, dtype, device)


def ones(
    shape: Shape, grid: Grid | None = None, layout: Layout | None = None, dtype: Any = None, *, device: Any = None
) -> DistArray:
    """Return an array of ones."""
    shape, grid, layout = placed(shape, grid, layout, device)
    return computed("ones", lambda *_: np.ones(()), shape, grid, layout, np.float64 if dtype is None else dtype)


def empty(
    shape: Shape, grid: Grid | None = None, layout: Layout | None = None, dtype: Any = None, *, device: Any = None
) -> DistArray:
    """Return an array whose elements are yet to be written."""
    return _allocated("empty", shape, grid, layout, dtype, device)


def _allocated(
    function: str, shape: Shape, grid: Grid | None, layout: Layout | None, dtype: Any, device: Any
) -> DistArray:  # fmt: skip
    """Return an array of blocks that the backend's function of this name makes."""
    shape, grid, layout = placed(shape, grid, layout, device)
    kind = native(dtype_named(np.float64 if dtype is None else dtype))
    return DistArray(getattr(grid.backend, function)(grid.block_shape(layout, shape), kind), shape, layout, grid)


def eye(
    n_rows: int, n_cols: int | None = None, /, grid: Grid | None = None, layout: Layout | None = None, *, k: int = 0,
    dtype: Any = None, device: Any = None,
) -> DistArray:  # fmt: skip
    """Return a matrix with ones on diagonal number k, zeros elsewhere."""
    k = whole("eye: k, the number of a diagonal,", k)
    shape, grid, layout = placed((n_rows, n_rows if n_cols is None else n_cols), grid, layout, device)
    kind = np.float64 if dtype is None else dtype
    return computed("eye", lambda i, j: j - i == k, shape, grid, layout, kind)


def _like(x: DistArray, value: Any, dtype: Any, device: Any, layout: Layout | None) -> DistArray:
    placed(x.shape, x.grid, layout, device)
    layout = x.layout.with_partial(()) if layout is None else layout
    return full(x.shape, value, x.grid, layout, x.dtype if dtype is None else dtype)


@of_arrays
def zeros_like(x: DistArray, /, *, dtype: Any = None, device: Any = None, layout: Layout | None = None) -> DistArray:
    """Return an array of zeros of the same shape, layout and dtype."""
    return _like(x, 0, dtype, device, layout)


@of_arrays
def ones_like(x: DistArray, /, *, dtype: Any = None, device: Any = None, layout: Layout | None = None) -> DistArray:
    """Return an array of ones of the same shape, layout and dtype."""
    return _like(x, 1, dtype, device, layout)


@of_arrays
def empty_like(x: DistArray, /, *, dtype: Any = None, device: Any = None, layout: Layout | None = None) -> DistArray:
    """Return an array of the same shape, layout and dtype whose elements are yet to be written."""
    return _like(x, 0, dtype, device, layout)


@of_arrays
def full_like(
    x: DistArray, /, fill_value: Any, *, dtype: Any = None, device: Any = None, layout: Layout | None = None
) -> DistArray:
    """Return an array of one value, of the same shape, layout and dtype."""
    return _like(x, fill_value, dtype, device, layout)


@primitive
def asarray(
    obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None, grid: Grid | None = None,
    layout: Layout | None = None,
) -> DistArray:  # fmt: skip
    """Return data as a distributed array; a DistArray in another dtype, or itself where `copy` is not True.

    Parameters
    ----------
    obj : array_like or DistArray
        Plain data are the same on all ranks: each keeps its own part (`distribute(root=)` takes one rank's).
    """
    if isinstance(obj, DistArray):
        found = obj if grid is None or grid is obj.grid else obj.to_grid(grid, layout or grid.default_layout(obj.shape))
        found = found if layout is None else found.redistribute(layout)
        if dtype is not None and np.dtype(dtype) != found.dtype:
            if copy is False:
                raise ValueError(f"an array of dtype {found.dtype} becomes one of {np.dtype(dtype)} only by a copy")
            return found.astype(dtype)
        return found.copy() if copy else found
    if copy is False:
        raise ValueError("plain data are copied to become a distributed array; copy=False is not possible")
    if isinstance(obj, list | tuple):
        obj = _plain(obj)
    host = np.asarray(obj, dtype=dtype) if not hasattr(obj, "__cuda_array_interface__") else obj
    if dtype is not None and host.dtype != np.dtype(dtype):
        host = host.astype(dtype)
    _, grid, layout = placed(host.shape, grid, layout, device)
    return distribute(host, grid, layout)


@refusing
def array(
    obj: Any, dtype: Any = None, *, copy: bool = True, device: Any = None, grid: Grid | None = None,
    layout: Layout | None = None,
) -> DistArray:  # fmt: skip
    """Return a new distributed array of the same elements: `asarray` with NumPy's other name, and a copy by default."""
    return asarray(obj, dtype=dtype, device=device, copy=copy, grid=grid, layout=layout)


def _plain(data: Any) -> Any:
    """Return nested lists with arrays of no dims as scalars."""
    if isinstance(data, list | tuple):
        return [_plain(x) for x in data]
    return data.dtype.type(data.item()) if isinstance(data, DistArray) and not data.ndim else data


def arange(
    start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None, grid: Grid | None = None,
    layout: Layout | None = None,
) -> DistArray:  # fmt: skip
    """Return the numbers from `start` (0 if only one is given) up to but without `stop`."""
    if stop is None:
        start, stop = 0, start
    if not step:
        raise ValueError("arange takes a step other than 0")
    kind = np.result_type(*(np.asarray(v).dtype for v in (start, stop, step))) if dtype is None else np.dtype(dtype)
    n = max(0, math.ceil((stop - start) / step))
    if _all_integers(start, stop, step):
        n = len(range(int(start), int(stop), int(step)))
    _, grid, layout = placed((n,), grid, layout, device)
    return from_function(lambda i: start + i * step, (n,), grid, layout, kind)


def _all_integers(*values: Any) -> bool:
    return all(isinstance(v, int | np.integer) for v in values)


@refusing
def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True,
    grid: Grid | None = None, layout: Layout | None = None,
) -> DistArray:  # fmt: skip
    """Return `num` numbers at equal distances from `start` to `stop`, which is the last of them with `endpoint`."""
    kind = np.result_type(np.asarray(start).dtype, np.asarray(stop).dtype, np.float64) if dtype is None else dtype
    parts = num - 1 if endpoint else num
    work = np.result_type(kind, np.float64)

    def value(i: Any) -> Any:
        low, high = np.asarray(start, work), np.asarray(stop, work)
        step = (high - low) / parts if parts else high - low
        found = i * step + low
        return np.where(i == num - 1, high, found) if endpoint and num > 1 else found

    _, grid, layout = placed((num,), grid, layout, device)
    return from_function(value, (num,), grid, layout, kind)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> DistArray:
    """Return data of another library, the same on all ranks, as a distributed array on the default grid.

    Data of a GPU stay on it where the grid's arrays are on GPUs; else they are copied to the host.
    """
    if isinstance(x, DistArray):
        return x.copy() if copy else x
    if not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"from_dlpack takes an array of a library that has DLPack, not {type(x).__name__}")
    if x.__dlpack_device__()[0] in DLPACK_HOST:
        return asarray(np.from_dlpack(x), device=device)
    grid = default_grid()
    if not grid.backend.host_memory:
        return asarray(grid.backend.xp.from_dlpack(x), device=device)
    if copy is False:
        raise ValueError(
            f"data of a GPU are copied to arrays of {grid!r}, which are on the host; copy=False is not possible"
        )
    return asarray(np.from_dlpack(x, device="cpu"), device=device)
