"""Indexing by integers, slices, `...` and `None`.

A slice of a whole dim is local.  A slice of a cut dim is cut again into balanced pieces, so elements move to where they
now belong; an integer on a cut dim leaves the result whole along its axes.
"""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.exchange import exchange, meet, volume
from parlinalg.layout import Cut, Layout, coordinates, span
from parlinalg.redistribute import Move

_Item = int | slice | None


def getitem(a: DistArray, key: Any) -> DistArray:
    """Return the elements chosen by `key`; collective where a cut dim is sliced."""
    items = _expand(key, a)
    ranges, dims, picked = [], [], []
    for chosen, n in zip((i for i in items if i is not None), a.shape, strict=True):
        if isinstance(chosen, slice):
            ranges.append(range(*chosen.indices(n)))
        else:
            index = operator.index(chosen)
            if not -n <= index < n:
                raise IndexError(f"index {index} is out of bounds for dim {len(ranges)} of size {n}")
            picked.append(len(ranges))
            ranges.append(range(index % n, index % n + 1))
    sliced = _take(a, ranges, picked)
    taken = iter(range(a.ndim))
    for item in items:
        if item is None:
            dims.append(-1)
        elif (d := next(taken)) not in picked:
            dims.append(d)
    shape = tuple(1 if d < 0 else sliced.shape[d] for d in dims)
    layout = Layout(*(() if d < 0 else sliced.layout.dims[d] for d in dims), partial=a.layout.partial)
    held = a.grid.block_shape(layout, shape)
    block = sliced.block.reshape(held) if a.grid.inside else a.grid.backend.zeros(held, a.dtype)
    return sliced.sharing(block, layout, shape)


def _expand(key: Any, a: DistArray) -> list[_Item]:
    items = list(key) if isinstance(key, tuple) else [key]
    for item in items:
        plain = item is None or isinstance(item, slice | EllipsisType) or hasattr(item, "__index__")
        if not plain or isinstance(item, bool | np.bool_) or bool(getattr(item, "ndim", False)):
            raise TypeError(
                f"a DistArray is indexed by integers, slices, ... and None, not by {type(item).__name__}; gather() "
                "first, or use np.where"
            )
    given = sum(i is not None and i is not ... for i in items)
    if given > a.ndim:
        raise IndexError(f"{given} indices for an array of {a.ndim} dims")
    if items.count(...) > 1:
        raise IndexError("an index has one ... at most")
    at = items.index(...) if ... in items else len(items)
    return [*items[:at], *[slice(None)] * (a.ndim - given), *items[at + 1 :]]


def _take(a: DistArray, ranges: list[range], picked: list[int]) -> DistArray:
    """Return the sub-array of these global indices, same number of dims; `picked` dims become whole."""
    shape = tuple(len(r) for r in ranges)
    moved = [
        d
        for d, (r, n, cut) in enumerate(zip(ranges, a.shape, a.layout.dims, strict=True))
        if (r != range(n) or d in picked) and _cut(a, cut)
    ]
    for d in moved:
        if ranges[d].step < 0:
            raise IndexError(
                f"a negative step on dim {d}, which {a.layout!r} cuts; redistribute to {a.layout.with_dim(d, None)!r} "
                "first"
            )
    layout = Layout(*(() if d in picked else cut for d, cut in enumerate(a.layout.dims)), partial=a.layout.partial)
    local = tuple(
        slice(None) if d in moved or r == range(n) else _slice(r)
        for d, (r, n) in enumerate(zip(ranges, a.shape, strict=True))
    )
    block = a.block[local] if a.grid.inside else a.block
    if not moved or not a.grid.inside:
        return a.sharing(block, layout, shape)
    axes = tuple(x for x in a.grid.axes if a.grid.sizes[x] > 1 and any(x in a.layout.dims[d] for d in moved))
    peers = [{**a.grid.coords, **at} for at in coordinates(axes, a.grid.sizes)]

    def have(at: dict[str, int]) -> tuple[range, ...]:
        return tuple(span(a.shape[d], a.layout.dims[d], a.grid.sizes, at) for d in moved)

    def want(at: dict[str, int]) -> tuple[range, ...]:
        parts = (span(len(ranges[d]), layout.dims[d], a.grid.sizes, at) for d in moved)
        return tuple(ranges[d][p.start : p.stop] for d, p in zip(moved, parts, strict=True))

    # the dims that are not moved come along whole, behind the moved ones
    order = (*moved, *(d for d in range(a.ndim) if d not in moved))
    front = block.transpose(order)
    rest = tuple(range(n) for n in front.shape[len(moved) :])
    haves, wants = [(*have(at), *rest) for at in peers], [(*want(at), *rest) for at in peers]
    mine, goal = (*have(a.grid.coords), *rest), (*want(a.grid.coords), *rest)
    sends, receives = [meet(w, mine) for w in wants], [meet(goal, h) for h in haves]
    largest = max(map(volume, (*haves, *wants)))
    comm, backend = a.grid.comm(axes), a.grid.backend
    out = Move(exchange(front, mine, goal, sends, receives, a.dtype, comm, backend, largest)).wait()
    back = tuple(order.index(d) for d in range(a.ndim))
    return a.like(out.transpose(back), layout, shape)


def _cut(a: DistArray, cut: Cut) -> bool:
    return any(a.grid.sizes[axis] > 1 for axis in cut)


def _slice(r: range) -> slice:
    return slice(r.start, r.stop if r.stop >= 0 else None, r.step)
