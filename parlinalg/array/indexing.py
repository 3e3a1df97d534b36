"""Reading and writing parts of arrays: integers, slices, `...`, None, boolean masks, integer arrays, and mixtures.

A slice of a whole dim is local.  A slice of a cut dim is cut again into balanced pieces, so elements move to where they
now belong; an integer on a cut dim leaves the result whole along its axes.  Index arrays fetch from the ranks that hold
the elements; the dims of the index are cut by the axes that cut the dims it indexes.  What a mask picks out comes in C
order, in balanced pieces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from parlinalg.array.align import broadcast_shape
from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.array.rows import fetch, store
from parlinalg.exchange import exchange_blocks, volume
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, coordinates, span
from parlinalg.redistribute import Move

Item = Any
Shape = tuple[int, ...]


@dataclass
class Key:
    """An index, parsed: for every dim of the array a range or an index array, and where new dims go.

    Attributes
    ----------
    ranges : list of range
        For each dim the indices that integers and slices choose; the whole dim where an array chooses.
    picked : list of int
        The dims of which an integer chooses one item.
    arrays : dict of int to array
        Integer index arrays by dim, not yet broadcast.
    order : list of int
        The result's dims: a dim of the array, -1 for a new one, and -2 where the dims of the index arrays go.
    """

    ranges: list[range]
    picked: list[int]
    arrays: dict[int, Any]
    order: list[int]


@primitive
def getitem(a: DistArray, key: Any) -> DistArray:
    """Return the elements chosen by `key`; collective where a cut dim is indexed."""
    items = expanded(key, a)
    if (mask := lone_mask(items)) is not None:
        return masked(a, mask) if mask.ndim else _arranged(a, [-1, *range(a.ndim)])[: int(bool(mask))]
    parsed = parse(items, a)
    sliced = _take(a, parsed.ranges, parsed.picked)
    if not parsed.arrays:
        return _arranged(sliced, parsed.order)
    dims = sorted(parsed.arrays)
    found = fetch(sliced, dims, [parsed.arrays[d] for d in dims])  # [index dims, the other dims]
    n = found.ndim - sliced.ndim + len(dims)
    kept = [d for d in range(a.ndim) if d not in parsed.arrays]
    place = {d: n + i for i, d in enumerate(kept)}
    order: list[int] = []
    for d in parsed.order:
        order += range(n) if d == -2 else [-1 if d < 0 else place[d]]
    return _arranged(found, order)


def _arranged(a: DistArray, order: Sequence[int]) -> DistArray:
    """Return the array with dims in this order; -1 is a new dim, dims that are missing have size 1 and are dropped."""
    stay = [d for d in order if d >= 0]
    drop = [d for d in range(a.ndim) if d not in stay]
    turned = a.transpose((*stay, *drop)) if [*stay, *drop] != list(range(a.ndim)) else a
    taken = iter(range(len(stay)))
    dims = [-1 if d < 0 else next(taken) for d in order]
    shape = tuple(1 if d < 0 else turned.shape[d] for d in dims)
    layout = Layout(*(() if d < 0 else turned.layout.dims[d] for d in dims), partial=a.layout.partial)
    held = a.grid.block_shape(layout, shape)
    block = turned.block.reshape(held) if a.grid.inside else a.grid.backend.zeros(held, a.dtype)
    return a.sharing(block, layout, shape)


def is_mask(item: Any) -> bool:
    """Return True for an array of booleans, of any kind; False for a boolean scalar."""
    return getattr(item, "dtype", None) == np.bool_ and not isinstance(item, np.generic)


def lone_mask(items: Sequence[Item]) -> Any:
    """Return the mask of an index that is one, of the leading dims; else None."""
    whole = all(i is ... or (isinstance(i, slice) and i.start is i.stop is i.step is None) for i in items[1:])
    if not items or not is_mask(items[0]) or not whole:
        return None
    return items[0]


def expanded(key: Any, a: DistArray) -> list[Item]:
    """Return the items of an index with `...` written out, lists as arrays, and a boolean scalar as a mask.

    A `...` that stands for no dims stays: index arrays before and behind it are not adjacent.

    Raises
    ------
    IndexError
        If there are more indices than dims, two `...`, or something that is not an index.
    """
    items: list[Item] = list(key) if isinstance(key, tuple) else [key]
    for i, item in enumerate(items):
        if isinstance(item, list):
            items[i] = np.asarray(item) if item else np.zeros(0, np.intp)
        elif isinstance(item, bool | np.bool_):
            items[i] = np.asarray(bool(item))
        elif isinstance(item, np.integer) or (isinstance(item, DistArray | np.ndarray) and _is_scalar(item)):
            items[i] = operator.index(item)
        if isinstance(items[i], DistArray | np.ndarray) and items[i].dtype.kind not in "iub":
            raise IndexError(f"an index array has integers or booleans, not {items[i].dtype}")
        if not (items[i] is None or isinstance(items[i], slice | EllipsisType | DistArray | np.ndarray)):
            try:
                items[i] = operator.index(item)
            except TypeError:
                raise IndexError(
                    f"an index has integers, slices, ..., None, integer arrays and masks, not {type(item).__name__}"
                ) from None
    given = sum(_indexed(i) for i in items)
    dots = [i for i, item in enumerate(items) if item is ...]
    if given > a.ndim or len(dots) > 1:
        what = f"{given} indices for an array of {a.ndim} dims" if len(dots) < 2 else "an index has one ... at most"
        raise IndexError(what)
    at = dots[0] if dots else len(items)
    between: list[Item] = [slice(None)] * (a.ndim - given)
    return [*items[:at], *(between or items[at : at + 1]), *items[at + 1 :]]


def plain_items(key: Any, a: DistArray) -> list[Item]:
    """Return the items of an index of integers, slices, `...` and None; a TypeError for others."""
    items = [item for item in expanded(key, a) if item is not ...]
    if any(isinstance(item, DistArray | np.ndarray) for item in items):
        raise TypeError("a tensor is indexed by integers, slices, ... and None, not by arrays")
    return items


def _is_scalar(item: Any) -> bool:
    return item.ndim == 0 and item.dtype.kind in "iu"


def _indexed(item: Item) -> int:
    """Return the number of dims that an item indexes."""
    if item is None or item is ...:
        return 0
    return int(item.ndim) if is_mask(item) else 1


def parse(items: Sequence[Item], a: DistArray) -> Key:
    """Return the parsed index; masks become the positions of what they choose.  Collective if there are masks."""
    from parlinalg.array.sorting import nonzero

    key = Key([], [], {}, [])
    advanced = [i for i, item in enumerate(items) if isinstance(item, DistArray | np.ndarray)]
    as_arrays = advanced and any(isinstance(i, int) for i in items)
    chosen = [i for i, item in enumerate(items) if i in advanced or (as_arrays and isinstance(item, int))]
    adjacent = bool(chosen) and chosen == list(range(chosen[0], chosen[-1] + 1))
    put = False
    for i, item in enumerate(items):
        d = len(key.ranges)
        if item is None:
            key.order.append(-1)
            continue
        if item is ...:
            continue
        if i in chosen and adjacent and not put:
            key.order.append(-2)
            put = True
        if isinstance(item, slice):
            n = a.shape[d]
            key.ranges.append(range(*item.indices(n)))
            key.order.append(d)
        elif is_mask(item):
            _check_mask(item, a.shape[d:])
            if not item.ndim:
                raise IndexError("a boolean without dims is an index only at the front, beside slices of whole dims")
            mask = item if isinstance(item, DistArray) else _distributed(item, a)
            for j, positions in enumerate(nonzero(mask)):
                key.arrays[d + j] = positions
                key.ranges.append(range(a.shape[d + j]))
        elif isinstance(item, int):
            n = a.shape[d]
            if not -n <= item < n:
                raise IndexError(f"index {item} is out of bounds for dim {d} of size {n}")
            if i in chosen:
                key.arrays[d] = np.asarray(item % n)
                key.ranges.append(range(n))
            else:
                key.picked.append(d)
                key.ranges.append(range(item % n, item % n + 1))
        else:
            key.arrays[d] = item
            key.ranges.append(range(a.shape[d]))
    if chosen and not adjacent:
        key.order.insert(0, -2)
    return key


def _distributed(array: np.ndarray, a: DistArray) -> DistArray:
    from parlinalg.array.create import distribute

    return distribute(array, a.grid, a.grid.default_layout(array.shape))


def _check_mask(mask: Any, shape: Shape) -> None:
    """Raise an IndexError unless the mask has the leading sizes of `shape`, or 0, as NumPy allows."""
    if mask.ndim > len(shape) or any(n not in (m, 0) for n, m in zip(mask.shape, shape, strict=False)):
        raise IndexError(f"a mask of shape {mask.shape} does not fit dims of shape {shape}")


def _taken_none(a: DistArray, rest: Shape) -> DistArray:
    """Return no elements at all, as a mask without elements chooses them."""
    layout = Layout((), *a.layout.dims[a.ndim - len(rest) :])
    shape = (0, *rest)
    return a.like(a.grid.backend.zeros(a.grid.block_shape(layout, shape), a.dtype), layout, shape)


def masked(a: DistArray, mask: Any) -> DistArray:
    """Return the elements where a mask of the leading dims is True, in C order and balanced pieces."""
    from parlinalg.array.shapes import reshape
    from parlinalg.array.sorting import compress, compress_alike

    rest = a.shape[mask.ndim :]
    _check_mask(mask, a.shape)
    if 0 in mask.shape:
        return _taken_none(a, rest)
    given, mask = mask, mask if isinstance(mask, DistArray) else _distributed(mask, a)
    axes = tuple(x for x in a.grid.axes if not any(x in cut for cut in a.layout.dims[mask.ndim :]))
    lined = Layout(axes, *a.layout.dims[mask.ndim :])
    n = math.prod(mask.shape)
    whole = a.summed()
    chosen, rows = reshape(mask.summed(), (n,), layout=Layout(axes)), reshape(whole, (n, *rest), layout=lined)
    if given is not mask and not a.grid.backend.values:
        return compress_alike(given.reshape(-1), rows)
    return compress(chosen, rows)


# ---------------------------------------------------------------------------------------------------------- setting
def setitem(a: DistArray, key: Any, value: Any, *, add: bool = False) -> None:
    """Write `value`, which broadcasts, to the elements chosen by `key`.  Collective unless both lie alike.

    With `add` values for elements that index arrays choose are added to them, each as often as it is chosen.
    """
    if a.layout.partial:
        from parlinalg.errors import LayoutError

        raise LayoutError(f"elements of an array in {a.layout!r}, which is not summed yet, cannot be set; sum it first")
    items = expanded(key, a)
    value = _brought(value, a)
    mask = lone_mask(items)
    if mask is not None and (not mask.ndim or not isinstance(value, DistArray)):
        return _fill(a, mask, value)
    parsed = parse(items, a)
    if parsed.arrays:
        return _set_by_arrays(a, parsed, value, add)
    shape = tuple(1 if d < 0 else len(parsed.ranges[d]) for d in parsed.order)
    if not isinstance(value, DistArray):
        if a.grid.inside:
            here = _positions(a, parsed.ranges, a.grid.coords)
            a.writable()[_local(a, parsed.ranges, here)] = value
        return None
    value = _fitted(value, shape)
    back = [i for i, d in enumerate(parsed.order) if d >= 0]
    new = [i for i, d in enumerate(parsed.order) if d < 0]
    if new:  # their one item goes to all ranks
        whole = (() if i in new else cut for i, cut in enumerate(value.layout.dims))
        value = value.redistribute(Layout(*whole)).transpose((*back, *new))
    sources = iter(range(len(back)))
    dims = {d: next(sources) for d in parsed.order if d >= 0}
    shape = tuple(value.shape[dims[d]] if d in dims else 1 for d in range(a.ndim))
    layout = Layout(*(value.layout.dims[dims[d]] if d in dims else () for d in range(a.ndim)))
    block = value.block.reshape(a.grid.block_shape(layout, shape)) if a.grid.inside else value.block
    copy_part(a, parsed.ranges, DistArray(block, shape, layout, a.grid), [range(n) for n in shape])
    return None


def _brought(value: Any, a: DistArray) -> Any:
    """Return a value as a DistArray on the grid of `a`, with nothing left to sum, or as a scalar if it has no dims."""
    if not isinstance(value, DistArray):
        if type(value) is int and a.dtype.kind in "iu":
            return a.dtype.type(value)  # out of its range an error on all ranks
        value = np.asarray(value) if not hasattr(value, "dtype") else value
        if not value.ndim:
            return value[()]  # no array of the host, which a GPU does not take
        value = _distributed(value, a)
    elif value.grid is not a.grid:
        value = value.to_grid(a.grid, value.layout.with_partial(()))
    value = value.summed()
    return value if value.ndim else value.dtype.type(value.item())


def _fitted(value: DistArray, shape: Shape) -> DistArray:
    """Return the value with as many dims as `shape`, to which it broadcasts: dims of size 1 stay so."""
    from parlinalg.array.shapes import reshape

    extra = value.ndim - len(shape)
    lead = value.shape[:extra] if extra > 0 else ()
    ours = value.shape[extra:] if extra > 0 else (1,) * -extra + value.shape
    if any(n != 1 for n in lead) or any(n not in (1, m) for n, m in zip(ours, shape, strict=True)):
        raise ValueError(f"a value of shape {value.shape} does not broadcast to the part of shape {shape}")
    if extra > 0:
        return reshape(value, ours)
    layout = Layout(*((),) * -extra, *value.layout.dims)
    return value.like(value.block.reshape(value.grid.block_shape(layout, ours)), layout, ours)


def _fill(a: DistArray, mask: Any, value: Any) -> None:
    """Write a scalar, or to an array without dims any value, where a mask of the leading dims is True."""
    _check_mask(mask, a.shape)
    if 0 in mask.shape:
        return
    if not mask.ndim:
        if bool(mask):
            setitem(a, ..., value)
        return
    mask = mask if isinstance(mask, DistArray) else _distributed(mask, a)
    mask = mask.redistribute(Layout(*a.layout.dims[: mask.ndim]))
    if a.grid.inside:
        a.writable()[mask.block] = value


def _set_by_arrays(a: DistArray, key: Key, value: Any, add: bool) -> None:
    """Write by index arrays: rows where they lead and the other dims are whole, else element by element."""
    index = broadcast_shape([v.shape for v in key.arrays.values()], "index arrays", IndexError)
    rest = [d for d in range(a.ndim) if d not in key.arrays]
    dims = sorted(key.arrays)
    arrays = [key.arrays[d] for d in dims]
    if key.order == [-2, *rest] and all(key.ranges[d] == range(a.shape[d]) for d in rest):
        full = (*index, *(a.shape[d] for d in rest))
    else:
        shape: list[int] = []
        place: dict[int, int] = {}
        for d in key.order:
            place[d] = len(shape)
            shape += index if d == -2 else [1 if d < 0 else len(key.ranges[d])]
        full = tuple(shape)
        behind = len(full) - place[-2] - len(index)
        arrays = [_with_dims(v, behind) for v in arrays]
        arrays[0] = _with_dims(arrays[0], 0, len(full) - arrays[0].ndim)  # new dims of the key that lead
        for d in rest:
            line = np.asarray(key.ranges[d], np.int64)
            arrays.append(line.reshape(-1, *(1,) * (len(full) - place[d] - 1)) if d in place else line.reshape(()))
        dims = [*dims, *rest]
    value = _fitted(value, full) if isinstance(value, DistArray) else value
    store(a, dims, arrays, value, add=add, looked_up=all(index))


def _with_dims(v: Any, behind: int, before: int = 0) -> Any:
    """Return an index array with so many dims of size 1 behind its own, and before them."""
    from parlinalg.array.shapes import reshape

    shape = (*(1,) * before, *v.shape, *(1,) * behind)
    return reshape(v, shape) if isinstance(v, DistArray) else v.reshape(shape)


# ---------------------------------------------------------------------------------------------------------- moving
def _take(a: DistArray, ranges: list[range], picked: list[int]) -> DistArray:
    """Return the sub-array of these global indices, same number of dims; `picked` dims become whole."""
    shape = tuple(len(r) for r in ranges)
    moved = [
        d
        for d, (r, n, cut) in enumerate(zip(ranges, a.shape, a.layout.dims, strict=True))
        if (r != range(n) or d in picked) and is_cut(a.grid, cut)
    ]
    layout = Layout(*(() if d in picked else cut for d, cut in enumerate(a.layout.dims)), partial=a.layout.partial)
    if not picked and all(r == range(n) for r, n in zip(ranges, a.shape, strict=True)):
        return a.sharing(a.block, layout, shape)
    local = tuple(
        slice(None) if d in moved or r == range(n) else as_slice(r)
        for d, (r, n) in enumerate(zip(ranges, a.shape, strict=True))
    )
    if not a.grid.inside:
        return a.like(a.block, layout, shape)
    near = a.like(
        a.block[local], Layout(*a.layout.dims), tuple(a.shape[d] if d in moved else n for d, n in enumerate(shape))
    )
    if not moved:
        return a.sharing(near.block, layout, shape)
    out = a.like(a.grid.backend.empty(a.grid.block_shape(layout, shape), a.dtype), layout, shape)
    sources = [ranges[d] if d in moved else range(n) for d, n in enumerate(shape)]
    copy_part(out, [range(n) for n in shape], near, sources)
    return out


def is_cut(grid: Grid, cut: Cut) -> bool:
    return any(grid.sizes[axis] > 1 for axis in cut)


def as_slice(r: range) -> slice:
    return slice(r.start, r.stop if r.stop >= 0 else None, r.step) if len(r) else slice(0, 0)


def copy_part(target: DistArray, places: Sequence[range], source: DistArray, chosen: Sequence[range]) -> None:
    """Write `source[chosen]` to `target[places]`; a dim of the source that chooses one item is broadcast.

    Parameters
    ----------
    target, source : DistArray
        On one grid, of equally many dims, not partial or partial alike.
    places, chosen : sequence of range
        For each dim global indices of the target, and of the source as many or one; steps of any sign.

    Collective over the axes that cut the source, unless all that a rank needs lies there already.
    """
    grid = target.grid
    if not grid.inside:
        return
    turned = [
        (p[::-1], c[::-1] if len(c) > 1 else c) if p.step < 0 else (p, c) for p, c in zip(places, chosen, strict=True)
    ]
    places, chosen = [p for p, _ in turned], [c for _, c in turned]
    flipped = [d for d, c in enumerate(chosen) if c.step < 0]

    def want(at: dict[str, int]) -> tuple[range, ...]:
        parts = _positions(target, places, at)
        if not all(len(q) for q in parts):
            return tuple(range(0) for _ in parts)
        found = (c if len(c) == 1 else c[q.start : q.stop] for c, q in zip(chosen, parts, strict=True))
        return tuple(r[::-1] if r.step < 0 else r for r in found)

    axes = tuple(x for x in grid.axes if grid.sizes[x] > 1 and x in source.layout.cut_axes)
    peers = [{**grid.coords, **at} for at in coordinates(axes, grid.sizes)]
    haves = [source.layout.block(source.shape, grid.sizes, at) for at in peers]
    wants = [want(at) for at in peers]
    mine, goal = grid.block(source.layout, source.shape), want(grid.coords)
    if all(_within(w, h) for w, h in zip(wants, haves, strict=True)):
        here = source.block[tuple(as_slice_in(w, h) for w, h in zip(goal, mine, strict=True))]
    else:
        here = Move(exchange_blocks(source.block, haves, wants, grid.comm(axes), grid.backend)).wait()
    if flipped:
        here = here[tuple(slice(None, None, -1 if d in flipped else 1) for d in range(here.ndim))]
    if volume(goal):
        target.writable()[_local(target, places, _positions(target, places, grid.coords))] = here


def _within(want: Sequence[range], have: Sequence[range]) -> bool:
    return not all(len(w) for w in want) or all(
        w[0] >= h.start and w[-1] < h.stop for w, h in zip(want, have, strict=True)
    )


def as_slice_in(part: range, block: range) -> slice:
    """Return the slice of `part`, of a positive step, in the piece `block`."""
    return slice(part.start - block.start, part.stop - block.start, part.step) if len(part) else slice(0, 0)


def _positions(a: DistArray, ranges: Sequence[range], at: dict[str, int]) -> tuple[range, ...]:
    """Return for each dim the positions in `ranges` (of any step) whose index the rank at `at` holds."""
    found = []
    for r, n, cut in zip(ranges, a.shape, a.layout.dims, strict=True):
        held = span(n, cut, a.grid.sizes, at)
        if r.step > 0:
            start, stop = -((r.start - held.start) // r.step), -((r.start - held.stop) // r.step)
        else:
            start, stop = -((held.stop - 1 - r.start) // -r.step), -((held.start - 1 - r.start) // -r.step)
        start, stop = max(0, start), min(len(r), stop)
        found.append(range(start, max(start, stop)))
    return tuple(found)


def _local(a: DistArray, ranges: Sequence[range], positions: Sequence[range]) -> tuple[slice, ...]:
    """Return the slices of this rank's block at these positions of `ranges`."""
    mine = a.grid.block(a.layout, a.shape)
    found = []
    for r, q, held in zip(ranges, positions, mine, strict=True):
        part = r[q.start : q.stop]
        found.append(as_slice(range(part.start - held.start, part.stop - held.start, part.step)))
    return tuple(found)
