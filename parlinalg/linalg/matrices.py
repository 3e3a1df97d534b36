"""Helpers of all routines of linear algebra: checks of matrices, tiles for them, and stacks distributed over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, truth, whole
from parlinalg.array.dispatch import no_array
from parlinalg.array.joining import stack
from parlinalg.array.namespace import broadcast_to, isnan
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace
from parlinalg.backend.shapes import has_values
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.tile_sizes import arrangement, block_size, layers
from parlinalg.linalg.tiles import SIZE, Tiles, check_depth

LinAlgError = np.linalg.LinAlgError
FLOATING = "fdFD"
CROWDED = 4
"""The most ranks a core for which only as many ranks as cores factor a matrix."""
NONFINITE = "NaNs or infinities"
SINGULAR = "the matrix is singular: U[{0}, {0}] of its factorization is 0"
INDEFINITE = "cholesky takes positive definite matrices; the leading minor of order {} is not positive"
NEGLIGIBLE = 10
"""Up to this size, in units of n ε ‖A‖, negative eigenvalues and differences of eigenvalues count as rounding."""


def as_matrix(x: Any, name: str, square: bool = False, vectors: bool = False) -> DistArray:
    """Return an array of matrices in a floating dtype; refuse anything else."""
    if not isinstance(x, DistArray):
        raise no_array(name, type(x).__name__)
    x.grid.check_open()  # alike on any number of ranks, of which one would not communicate
    if x.ndim < (1 if vectors else 2):
        what = "vectors and matrices as right-hand sides" if vectors else "matrices, arrays of at least two dims"
        raise LinAlgError(f"{name} takes {what}, not of shape {x.shape}")
    if square and x.shape[-1] != x.shape[-2]:
        raise LinAlgError(f"{name} takes square matrices, not of shape {x.shape}")
    if x.dtype.kind in "biu":
        return x.astype(np.float64)
    if x.dtype.char not in FLOATING:
        raise TypeError(f"{name} takes float32, float64, complex64 and complex128, not {x.dtype}; convert by astype()")
    return x


def tiles_for(
    a: DistArray, block: int | None, routine: str, depth: int | None = 1, shape: tuple[int, int] | None = None
) -> Tiles:  # fmt: skip
    """Return the tiles of a matrix, by default of the size and with None of the layers that the planner chooses.

    They are those for a matrix of another `shape`, if it is given; `block` and `depth` are as `checked_tiles` has them.
    """
    grid, (m, n) = a.grid, shape or a.shape[-2:]
    near = in_one_node(grid)
    if depth is None:
        depth = layers(routine, m, n, grid.sizes, near or not grid.backend.host_memory, a.dtype.itemsize)
    workers = at_work(grid, routine) if depth == 1 else grid.size
    tiles = Tiles(grid, block or SIZE, arrangement(routine, m, n, workers, near), depth, workers)
    if block is None:
        tiles.size = block_size(routine, m, n, tiles.R, tiles.C, tiles.D)
    return tiles


def spend(a: DistArray) -> Any:
    """Return the block of an array that nobody needs any more, which keeps nothing of it."""
    block = a.block
    a.adopt(block[:0].copy())
    return block


def in_one_node(grid: Grid) -> bool:
    """Return True if all ranks of a grid are on one node, as far as this rank knows."""
    return not grid.inside or grid.everyone.local_size == grid.size


def at_work(grid: Grid, routine: str) -> int:
    """Return how many ranks factor a matrix: all, or as many as the one node that has them has cores for.

    Where ranks outnumber cores, those beyond would wait for their turn in every step.  But those at work hold more
    then: so only for "cholesky", which needs a triangle, and "pivoted", whose steps are columns, and up to `CROWDED`
    times their share.
    """
    fewer = routine == "pivoted" or (routine == "cholesky" and grid.backend.host_memory)
    return grid.cores if fewer and in_one_node(grid) and grid.cores < grid.size <= CROWDED * grid.cores else grid.size


def checked_tiles(name: str, a: DistArray, block: Any, depth: Any = None) -> tuple[int | None, int | None]:
    """Return the rows and columns of a tile of a matrix, or of a stack's, and its number of layers; None is the plan's.

    Others than the matrix can have are refused by the name of the function that takes them.
    """
    block = None if block is None else whole(f"{name}: block, the rows and columns of a tile,", block, 1)
    if depth is None:
        return block, None
    if a.ndim > 2:  # whose matrices have ranks of their own
        if whole(f"{name}: depth, the number of layers,", depth, 1) != 1:
            raise ValueError(f"{name}: depth={depth!r} is for one matrix; stacks of matrices have no layers")
        return block, None
    check_depth(f"{name}: depth", depth, a.grid.sizes)
    if depth != 1 and not a.grid.backend.host_memory:
        raise ValueError(
            f"{name}: depth={depth!r} is for grids whose arrays lie on the host; on GPUs ranks form one layer"
        )
    return block, int(depth)


def real_number(value: Any) -> float | None:
    """Return a real number, one of Python's or NumPy's or an array without dims, as a float; None of anything else."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, str | bytes | bool) or kind not in "iuf" or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def cutoff(name: str, value: Any) -> float:
    """Return the share of the largest singular value up to which others count as 0, a number."""
    found = real_number(value)
    if found is None:
        raise TypeError(f"{name}: rcond is a number, or None, not {value!r}")
    if math.isnan(found):
        raise ValueError(f"{name}: rcond is a number, or None, not {value!r}")
    return found


def limits(what: str, value: Any, stacks: tuple[int, ...]) -> Any:
    """Return a number, or a DistArray with one for every matrix [*stacks, m, n], as limits of singular values, or None.

    Raises
    ------
    TypeError
        If they are not real, or not distributed.
    ValueError
        If one is NaN, on all ranks, or their shape does not fit to that of the stacks.
    """
    if value is None:
        return None
    text = f"{what} is a number, or one for every matrix, or None, not {value!r}"
    if isinstance(value, DistArray):
        if value.dtype.kind not in "iuf":
            raise TypeError(text)
        if value.dtype.kind == "f" and not truth((~isnan(value)).all(), "finite", "whether a limit is NaN"):
            raise ValueError(text)
        try:
            np.broadcast_shapes(value.shape, stacks)
        except ValueError:
            raise ValueError(f"{what} has one number for every matrix, of shape {stacks}, not {value.shape}") from None
        return value
    if getattr(value, "ndim", 0) or isinstance(value, list | tuple):
        raise TypeError(f"{text}; parlinalg.asarray makes a DistArray of several")
    found = real_number(value)
    if found is None:
        raise TypeError(text)
    if math.isnan(found):
        raise ValueError(text)
    return found


def check_order(what: str, order: Any) -> None:
    """Raise ValueError if this is not the order of a norm of matrices."""
    plain = isinstance(order, str | bool) or (not isinstance(order, DistArray) and real_number(order) is not None)
    if not plain or order not in ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf):
        raise ValueError(f"{what} is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, not {order!r}")


def refuse_nonfinite(nonfinite: bool | float, name: str) -> None:
    """Raise ValueError if an array that a function was given has NaNs or infinities."""
    if nonfinite:
        raise ValueError(f"{name} takes finite numbers; the array has {NONFINITE}")


def scalar(value: Any, dtype: Any, grid: Grid) -> DistArray:
    if not grid.backend.values:
        return DistArray(grid.backend.from_host(np.empty((), dtype)), (), Layout(), grid)
    return DistArray(grid.backend.from_host(np.asarray(value, dtype)), (), Layout(), grid)


def distributed(values: Any, layout: Layout, grid: Grid, shape: tuple[int, ...] | None = None) -> DistArray:
    """Return an array that every rank has as a distributed one; ranks outside the grid need its shape alone."""
    shape = values.shape if shape is None else shape
    where = tuple(slice(each.start, each.stop) for each in grid.block(layout, shape))
    return DistArray(grid.backend.from_host(values[where].copy(order="C")), shape, layout, grid)


def scaled(tiles: Tiles, parts: Sequence[np.ndarray], dtype: np.dtype[Any], name: str) -> Any:
    """Multiply a matrix by a power of two that keeps squares of its elements in range, and return it; refuse NaNs.

    `parts` are what this rank has of it.
    """
    real = np.finfo(dtype).dtype
    finite, largest = all(map(kernels.finite, parts)), 0.0
    if finite:
        for numbers in (t.view(real) for t in parts if t.size and has_values(t)):
            largest = max(largest, float(numbers.max()), -float(numbers.min()))
    nonfinite, largest = tiles.worst([not finite, largest])
    refuse_nonfinite(nonfinite, name)
    scale = kernels.unit(largest, dtype, squares=True)
    if scale != 1:
        for t in parts:
            t *= scale
    return scale


def unscaled(values: Any, scale: float) -> Any:
    """Return values of a matrix that was multiplied by `scale`, without it; what is out of range is infinite."""
    with np.errstate(over="ignore"):
        return values / scale


def _first_wrong(
    local: Callable[..., Any], blocks: Sequence[Any], corner: Sequence[int], error: Exception
) -> tuple[list[int], str]:  # fmt: skip
    """Return the index of the first matrix of this rank's stacks for which a function fails, and its error."""
    for at in np.ndindex(*blocks[0].shape[: len(corner)]):
        try:
            with np.errstate(all="ignore"), kernels.raising(blocks[0]):
                local(*(block[tuple(slice(i, i + 1) for i in at)] for block in blocks))
        except LinAlgError as alone:
            return [i + c for i, c in zip(at, corner, strict=True)], str(alone)
    return [], str(error)


def raise_first(problems: Iterable[tuple[list[int], str] | None], name: str = "") -> None:
    """Raise the error of the first matrix of a stack among the ones that ranks found: an index and a text each."""
    at, text = min(filter(None, problems), default=([], ""))
    if text:
        raise LinAlgError(f"{name}: " * bool(name) + f"matrix {tuple(at)}: " * bool(at) + text)


@contextmanager
def naming(at: tuple[int, ...]) -> Iterator[None]:
    """Name the matrix of a stack, by its index, in a LinAlgError of what is within."""
    try:
        yield
    except LinAlgError as error:
        raise LinAlgError(f"matrix {at}: {error}" if at else str(error)) from None


def batches(
    name: str, local: Callable[..., Any], one: Callable[..., Any], *arrays: DistArray, like: int = 0,
    lower: bool = False, check: bool = True,
) -> tuple[DistArray, ...]:  # fmt: skip
    """Return what a function of matrices, or with `lower` of lower triangles, gives for stacks of them.

    With `check`, NaNs and infinities are refused.

    As many matrices as ranks, or more, are distributed and computed by each rank alone, by `local(xp, blocks)`; fewer
    are computed one after the other by all ranks, by `one`.
    """
    try:
        stacks = np.broadcast_shapes(*(a.shape[:-2] for a in arrays))
    except ValueError:
        given = " and ".join(str(a.shape) for a in arrays)
        raise LinAlgError(f"the leading dims of {name}'s stacks do not fit to each other: {given}") from None
    arrays = tuple(a if a.shape[:-2] == stacks else broadcast_to(a, (*stacks, *a.shape[-2:])) for a in arrays)
    grid, count = arrays[0].grid, math.prod(stacks)
    rest = arrays[like].layout.with_partial(())
    if count < grid.size and count:
        found = []
        for at in np.ndindex(*stacks):
            with naming(at):
                found.append(one(*(a[at] for a in arrays)))
        parts = list(zip(*(f if isinstance(f, tuple) else (f,) for f in found), strict=True))
        whole = [reshape(stack(list(part)), (*stacks, *part[0].shape)) for part in parts]
        return tuple(x.redistribute(Layout(*rest.dims[: x.ndim])) for x in whole)
    cut = grid.default_layout(stacks)
    layout = Layout(*cut.dims, None, None)
    blocks = [a.redistribute(layout).block for a in arrays]
    lead = len(stacks)
    if not grid.inside:  # no matrices, but of these shapes
        lead = max(1, lead)
        blocks = [grid.backend.empty((*[0] * lead, *a.shape[-2:]), a.dtype) for a in arrays]
    if lower:
        blocks = [namespace(block).tril(block) for block in blocks]
    wrong: tuple[list[int], str] | None = None
    results: Any = ()
    nonfinite = check and not all(map(kernels.finite, blocks))
    try:
        with np.errstate(all="ignore"), kernels.raising(arrays[0].block):
            results = local(arrays[0].xp, *blocks) if not nonfinite else ()
    except LinAlgError as error:
        corner = [r.start for r in grid.block(cut, stacks)]
        wrong = _first_wrong(lambda *one: local(arrays[0].xp, *one), blocks, corner, error)
    blocks = list(results) if isinstance(results, tuple) else [results]
    reported = grid.world.share((nonfinite, wrong), others="alike")
    refuse_nonfinite(any(each for each, _ in reported), name)
    raise_first((each for _, each in reported), name)
    made = []
    for block in blocks:
        core = block.shape[lead:]
        layout, shape = Layout(*cut.dims, *[None] * len(core)), (*stacks, *core)
        block = block if grid.inside else grid.backend.zeros(grid.block_shape(layout, shape), block.dtype)
        x = DistArray(block, shape, layout, grid)
        made.append(x.redistribute(Layout(*rest.dims[: x.ndim])))
    return tuple(made)
