"""Reshaping: where the blocks of the old shape are blocks of the new one nothing moves, else runs of elements do."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.array.align import is_explicit, spread
from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.errors import LayoutError, PlanError
from parlinalg.exchange import Runs, exchange_runs
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, coordinates, cut_lengths

Shape = tuple[int, ...]


@primitive
def reshape(a: DistArray, shape: Any, layout: Layout | None = None) -> DistArray:
    """Return the array in another shape of equal size.

    Dims are matched in groups of equal products.  Where within a group only the first dim is cut, and its pieces are
    whole pieces of the group's new first dim, nothing moves.  Elsewhere the axes that cut the group cut its new dims,
    each in turn the longest one, and every rank receives what its new block lacks.

    Raises
    ------
    LayoutError
        If elements would have to move within `parlinalg.explicit()`.
    """
    new = full_shape(a.shape, shape)
    if new == a.shape:
        return a.sharing(a.block, order=a.order) if layout is None else a.redistribute(layout)
    found = reshaped(a.layout, a.shape, new, a.grid)
    if isinstance(found, Layout):
        held = a.grid.block_shape(found, new)
        block = a.block.reshape(held) if a.grid.inside else a.grid.backend.zeros(held, a.dtype)
        out = a.sharing(block, found, new)
        return out if layout is None else out.redistribute(layout)
    if is_explicit():
        raise found.error
    if a.layout.partial:
        layout = None if layout is None else layout.with_partial(a.layout.partial)
    target = found.layout if layout is None else layout
    return a.like(_moved(a, new, target), target, new)


def _moved(a: DistArray, new: Shape, layout: Layout) -> Any:
    """Return this rank's block of the array in another shape and layout, by an exchange of runs."""
    grid = a.grid
    if not grid.inside:
        return grid.backend.zeros(grid.block_shape(layout, new), a.dtype)
    axes = tuple(x for x in grid.axes if grid.sizes[x] > 1 and x in a.layout.cut_axes)
    peers = [{**grid.coords, **at} for at in coordinates(axes, grid.sizes)]
    haves = [Runs.of(a.layout.block(a.shape, grid.sizes, at), a.shape) for at in peers]
    wants = [Runs.of(layout.block(new, grid.sizes, at), new) for at in peers]
    flat = grid.backend.xp.ascontiguousarray(a.block).reshape(-1)
    out = exchange_runs(flat, haves, wants, grid.comm(axes), grid.backend)
    return out.reshape(grid.block_shape(layout, new))


def shape_of(shape: Any) -> tuple[int, ...]:
    """Return a shape that was given as a whole number or a sequence of them as a tuple of ints.

    Raises
    ------
    TypeError
        If it is neither, such as (3.5, 4), (True, 4) or None.
    ValueError
        If a size is negative, or, as a PlanError, there would be 2⁶³ elements or more.
    """
    try:
        given = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    except TypeError:
        raise TypeError(f"a shape is a whole number or a tuple of whole numbers, not {shape!r}") from None
    sizes = []
    for size in given:
        if isinstance(size, bool | np.bool_) or not isinstance(size, SupportsIndex) or isinstance(size, np.ndarray):
            raise TypeError(f"the shape {shape!r} has the size {size!r}; sizes are whole numbers")
        sizes.append(operator.index(size))
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape has no negative sizes: {shape!r}")
    if math.prod(sizes) >= 2**63:
        raise PlanError(f"an array of shape {shape!r} would have {math.prod(sizes)} elements, more than 2**63 - 1")
    return tuple(sizes)


def full_shape(old: Sequence[int], shape: Any) -> tuple[int, ...]:
    """Return the shape with its -1, if any, filled in."""
    try:
        given = [shape] if isinstance(shape, int | np.integer) else list(shape)
    except TypeError:
        raise TypeError(f"a shape is a whole number or a tuple of whole numbers, not {shape!r}") from None
    new = [-1 if isinstance(n, int | np.integer) and n == -1 else shape_of((n,))[0] for n in given]
    size = math.prod(old)
    if new.count(-1) == 1:
        known = math.prod(n for n in new if n != -1)
        if known and size % known == 0:
            new[new.index(-1)] = size // known
    if math.prod(new) != size or any(n < 0 for n in new):
        raise ValueError(f"an array of shape {tuple(old)}, {size} elements, does not reshape to {shape}")
    return tuple(new)


@dataclass
class Moving:
    """A reshape for which elements move: the layout then, and the error for those who forbid it."""

    layout: Layout
    error: LayoutError


def reshaped(layout: Layout, old: Sequence[int], new: Sequence[int], grid: Grid) -> Layout | Moving:
    """Return the layout after a reshape from `old` to `new`, within `Moving` if elements have to move for it."""
    cuts: list[Cut] = [()] * len(new)
    error = None
    for before, after in groups(old, new):
        cut_dims = [d for d in before if any(grid.sizes[x] > 1 for x in layout.dims[d])]
        if not cut_dims:
            continue
        first = next((d for d in before if old[d] != 1), before[0])
        target = next((d for d in after if new[d] != 1), after[0] if after else None)
        cut = layout.dims[first]
        if target is not None and cut_dims == [first] and _aligned(old[first], new[target], cut, grid):
            cuts[target] = cut
            continue
        whole = layout
        for d in cut_dims:
            if d != first or target is not None:
                whole = whole.with_dim(d, None)
        error = error or LayoutError(
            f"reshape {tuple(old)} to {tuple(new)}: {layout!r} cuts dims {cut_dims}, whose pieces are not pieces "
            f"of the new dims; redistribute to {whole!r} first"
        )
        axes = [x for d in before for x in layout.dims[d]]
        for d, found in zip(after, spread([new[d] for d in after], axes).dims, strict=True):
            cuts[d] = found
    result = Layout(*cuts, partial=layout.partial)
    return result if error is None else Moving(result, error)


def _aligned(old: int, new: int, cut: Cut, grid: Grid) -> bool:
    """Return True if balanced pieces of `old` items are, once split or merged, balanced pieces of `new` items."""
    return all(
        a * new == b * old
        for a, b in zip(cut_lengths(old, cut, grid.sizes), cut_lengths(new, cut, grid.sizes), strict=True)
    )


def groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Return the dims of both shapes in the smallest groups of equal products, in order."""
    if 0 in old:
        same = len(old) == len(new) and list(old) == list(new)
        if not same:
            yield list(range(len(old))), list(range(len(new)))
            return
    i = j = 0
    while i < len(old) or j < len(new):
        before, after, a, b = [], [], 1, 1
        if i < len(old):
            before, a, i = [i], old[i], i + 1
        if j < len(new) and (before == [] or a != 1 or new[j] == 1):
            after, b, j = [j], new[j], j + 1
        while a != b:
            if a < b:
                before.append(i)
                a, i = a * old[i], i + 1
            else:
                after.append(j)
                b, j = b * new[j], j + 1
        yield before, after
