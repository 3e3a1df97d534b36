"""Reshaping: where the blocks of the old shape are blocks of the new one, nothing moves; elsewhere it is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, cut_lengths


def reshape(a: DistArray, shape: Any) -> DistArray:
    """Return the array in another shape of equal size.

    Dims are matched in groups of equal products.  Within a group only the first dim may be cut, and its pieces must be
    whole pieces of the group's new first dim too; otherwise a LayoutError says which layout would do.
    """
    new = full_shape(a.shape, shape)
    if new == a.shape:
        return a.sharing(a.block, order=a.order)
    layout = reshaped(a.layout, a.shape, new, a.grid)
    return a.sharing(a.block.reshape(a.grid.block_shape(layout, new)), layout, new)


def shape_of(shape: Any) -> tuple[int, ...]:
    """Return a shape that was given as a whole number or a sequence of them as a tuple of ints.

    Raises
    ------
    TypeError
        If it is neither, such as (3.5, 4), (True, 4) or None.
    ValueError
        If a size is negative, or there would be 2⁶³ elements or more.
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
        raise ValueError(f"an array of shape {shape!r} would have {math.prod(sizes)} elements, more than 2**63 - 1")
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


def reshaped(layout: Layout, old: Sequence[int], new: Sequence[int], grid: Grid) -> Layout:
    """Return the layout after a reshape from `old` to `new`."""
    cuts: list[Cut] = [()] * len(new)
    for before, after in groups(old, new):
        cut_dims = [d for d in before if any(grid.sizes[x] > 1 for x in layout.dims[d])]
        if not cut_dims:
            continue
        first = next((d for d in before if old[d] != 1), before[0])
        target = next((d for d in after if new[d] != 1), after[0] if after else None)
        cut = layout.dims[first]
        ratio_ok = target is not None and cut_dims == [first] and _aligned(old[first], new[target], cut, grid)
        if not ratio_ok:
            whole = layout
            for d in cut_dims:
                if d != first or target is not None:
                    whole = whole.with_dim(d, None)
            raise LayoutError(
                f"reshape {tuple(old)} to {tuple(new)}: {layout!r} cuts dims {cut_dims}, whose pieces are not pieces "
                f"of the new dims; redistribute to {whole!r} first"
            )
        cuts[target] = cut  # type: ignore[index]
    return Layout(*cuts, partial=layout.partial)


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
