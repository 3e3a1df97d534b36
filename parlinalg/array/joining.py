"""Arrays put together, taken apart, turned and repeated, cut dims included; neighbours exchange only what they must."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from parlinalg.array.align import broadcast_shape, is_explicit, narrowed, spread
from parlinalg.array.core import DistArray, axis_of, dims_in_order, mismatch, same_grid, whole
from parlinalg.array.dispatch import primitive, takes_over
from parlinalg.array.indexing import copy_part, getitem
from parlinalg.array.rows import fetch
from parlinalg.array.shapes import reshape, shape_of
from parlinalg.layout import Cut, Layout

Shape = tuple[int, ...]


def empty_like(a: DistArray, shape: Shape, layout: Layout, dtype: Any = None) -> DistArray:
    """Return an array on the same grid whose elements are yet to be written."""
    held = a.grid.block_shape(layout, shape)
    return a.like(a.grid.backend.empty(held, a.dtype if dtype is None else dtype), layout, shape)


def brought(value: Any, a: DistArray) -> Any:
    """Return what stands for a DistArray as it is, and plain data, the same on all ranks, as one on the grid of `a`."""
    from parlinalg.array.create import asarray

    return value if isinstance(value, DistArray) or takes_over(value) else asarray(np.asarray(value), grid=a.grid)


def full_range(shape: Shape) -> list[range]:
    return [range(n) for n in shape]


@primitive
def concatenate(arrays: Sequence[DistArray], axis: int | None = 0, dtype: Any = None) -> DistArray:
    """Return the arrays one after the other along a dim (None: flattened), in the layout of the largest of them."""
    arrays = list(arrays)
    if not arrays:
        raise ValueError("concatenate takes at least one array")
    if axis is None:
        return concatenate([reshape(a, (a.size,)) for a in arrays], 0, dtype)
    same_grid(arrays)
    first = arrays[0]
    if not first.ndim or any(a.ndim != first.ndim for a in arrays):
        raise ValueError(
            f"concatenate takes arrays of equally many dims, at least one, not {[a.shape for a in arrays]}"
        )
    d = axis_of(axis, first.ndim)
    if any(a.shape[:d] != first.shape[:d] or a.shape[d + 1 :] != first.shape[d + 1 :] for a in arrays):
        raise ValueError(f"concatenate along dim {d}: the other dims of {[a.shape for a in arrays]} differ")
    largest = max(arrays, key=lambda a: a.size)
    layout = largest.layout.with_partial(())
    if is_explicit():
        odd = next((a for a in arrays if a.layout != first.layout), None)
        if odd is not None or layout.dims[d]:
            raise mismatch(f"concatenate along dim {d}", (odd or first).layout, layout.with_dim(d, None))
    arrays = [a.summed() for a in arrays]
    dtype = np.result_type(*(a.dtype for a in arrays)) if dtype is None else np.dtype(dtype)
    shape = tuple(sum(a.shape[d] for a in arrays) if i == d else n for i, n in enumerate(first.shape))
    out, start = empty_like(first, shape, layout, dtype), 0
    for a in arrays:
        places = full_range(shape)
        places[d] = range(start, start + a.shape[d])
        copy_part(out, places, a, full_range(a.shape))
        start += a.shape[d]
    return out


def stack(arrays: Sequence[DistArray], axis: int = 0) -> DistArray:
    """Return arrays of one shape along a new dim."""
    arrays = list(arrays)
    if len({a.shape for a in arrays}) != 1:
        raise ValueError(f"stack takes arrays of one shape, at least one, not {[a.shape for a in arrays]}")
    d = axis_of(axis, arrays[0].ndim + 1)
    return concatenate([expand_dims(a, d) for a in arrays], d)


@primitive
def expand_dims(a: DistArray, axis: int | tuple[int, ...]) -> DistArray:
    """Return the array with new dims of size 1, at these places of the result."""
    n = a.ndim + (len(axis) if isinstance(axis, tuple | list) else 1)
    new = dims_in_order(axis, n)
    old = iter(zip(a.shape, a.layout.dims, strict=True))
    found = [(1, ()) if d in new else next(old) for d in range(n)]
    shape, layout = tuple(m for m, _ in found), Layout(*(c for _, c in found), partial=a.layout.partial)
    block = (
        a.block.reshape(a.grid.block_shape(layout, shape)) if a.grid.inside else a.grid.backend.zeros((0,) * n, a.dtype)
    )
    return a.sharing(block, layout, shape)


@primitive
def flip(a: DistArray, axis: Any = None) -> DistArray:
    """Return the array with the order of elements reversed along these dims (default: all)."""
    dims = range(a.ndim) if axis is None else dims_in_order(axis, a.ndim)
    return getitem(a, tuple(slice(None, None, -1) if d in dims else slice(None) for d in range(a.ndim)))


@primitive
def roll(a: DistArray, shift: Any, axis: Any = None) -> DistArray:
    """Return the array with elements moved along dims, those beyond the end coming in at the begin."""
    if axis is None:
        return reshape(roll(reshape(a, (a.size,)), shift, 0), a.shape, layout=a.layout)
    dims = [axis_of(d, a.ndim) for d in (axis if isinstance(axis, tuple | list) else (axis,))]
    shifts = list(shift) if isinstance(shift, tuple | list) else [shift] * len(dims)
    dims = dims * len(shifts) if len(dims) == 1 else dims
    if len(shifts) != len(dims):
        raise ValueError(f"roll takes as many shifts as dims: {shift} and {axis}")
    parts = []  # for each dim what stays before the end, and what comes in at the begin: (from, to)
    for d, n in enumerate(a.shape):
        by = sum(s for s, e in zip(shifts, dims, strict=True) if e == d) % max(1, n)
        parts.append([(range(n - by), range(by, n)), (range(n - by, n), range(by))] if by else [(range(n), range(n))])
    out = empty_like(a, a.shape, a.layout)
    for part in product(*parts):
        copy_part(out, [to for _, to in part], a, [chosen for chosen, _ in part])
    return out


def take(a: DistArray, indices: Any, axis: int | None = None) -> DistArray:
    """Return the items of a dim that these indices choose (default: of all elements in C order)."""
    if axis is None:
        a, axis = reshape(a, (a.size,)), 0
    d = axis_of(axis, a.ndim)
    if not isinstance(indices, DistArray):
        indices = np.asarray(indices)
        indices = indices.astype(np.int64) if not indices.size else indices
    return getitem(a, (*(slice(None),) * d, indices))


@primitive
def take_along_axis(a: DistArray, indices: Any, axis: int = -1) -> DistArray:
    """Return for each element of `indices` the element of its line along a dim."""
    if not isinstance(indices, DistArray):
        from parlinalg.array.create import distribute

        indices = distribute(np.asarray(indices), a.grid, a.grid.default_layout(np.shape(indices)))
    return fetch(a, range(a.ndim), lines_along(a.shape, indices, axis))


def lines_along(shape: Shape, indices: DistArray, axis: int = -1) -> list[Any]:
    """Return the index arrays of `take_along_axis` for all dims of an array of this shape."""
    ndim = len(shape)
    if indices.ndim != ndim:
        raise ValueError(f"take_along_axis takes indices of {ndim} dims, not of shape {indices.shape}")
    d = axis_of(axis, ndim)
    lead = broadcast_shape([(*shape[:d], 1, *shape[d + 1 :]), (*indices.shape[:d], 1, *indices.shape[d + 1 :])], "take")
    lines: list[Any] = []
    for i, n in enumerate((*lead[:d], indices.shape[d], *lead[d + 1 :])):
        line = np.arange(n) if shape[i] != 1 else np.zeros(n, np.int64)
        lines.append(indices if i == d else line.reshape((-1,) + (1,) * (ndim - i - 1)))
    return lines


@primitive
def broadcast_to(a: DistArray, shape: Any) -> DistArray:
    """Return the array repeated to a shape; axes that cut nothing cut the new dims, so that none is held twice."""
    full = shape_of(shape)
    if broadcast_shape([a.shape, full], "broadcast_to") != full:
        raise ValueError(f"an array of shape {a.shape} does not broadcast to {full}")
    if full == a.shape:
        return a.copy()
    extra, grid = len(full) - a.ndim, a.grid
    kept: list[Cut] = [()] * extra + [
        c if n == m else () for c, n, m in zip(a.layout.dims, a.shape, full[extra:], strict=True)
    ]
    used = {x for c in kept for x in c} | set(a.layout.partial)
    stays = [n == m for n, m in zip((0,) * extra + a.shape, full, strict=True)]
    new = spread([1 if s else n for s, n in zip(stays, full, strict=True)], [x for x in grid.axes if x not in used])
    dims = [c if s else e for c, e, s in zip(kept, new.dims, stays, strict=True)]
    layout = Layout(*dims, partial=a.layout.partial)
    near = a.redistribute(narrowed(layout, a.shape, full).with_partial(a.layout.partial))
    held = grid.block_shape(layout, full)
    block = a.xp.broadcast_to(near.block, held).copy() if grid.inside else grid.backend.zeros(held, a.dtype)
    return a.like(block, layout, full)


def broadcast_arrays(*arrays: DistArray) -> list[DistArray]:
    """Return the arrays repeated to their common shape."""
    shape = broadcast_shape([a.shape for a in arrays], "broadcast_arrays")
    return [broadcast_to(a, shape) for a in arrays]


def repeat(a: DistArray, repeats: Any, axis: int | None = None) -> DistArray:
    """Return the items of a dim (default: all elements) repeated, each `repeats` times or its own number of times."""
    if axis is None:
        a, axis = reshape(a, (a.size,)), 0
    d = axis_of(axis, a.ndim)
    n = a.shape[d]
    if isinstance(repeats, DistArray):
        repeats = repeats.gather()
    times = np.asarray(repeats)
    times = times.astype(np.int64) if not times.size else times
    if times.dtype.kind not in "iu" or times.ndim > 1 or (times.ndim and times.size not in (1, n)) or (times < 0).any():
        raise ValueError(f"repeats is a number of at least 0, or one for each of the {n} items, not {repeats}")
    if times.size == 1:
        from parlinalg.array.create import from_function

        k = int(times.reshape(())[()])
        layout = Layout(a.layout.dims[d])
        index: Any = from_function(lambda i: i // max(1, k), (n * k,), a.grid, layout, np.int64)
    else:
        index = np.repeat(np.arange(n), times)
    return take(a, index, d)


@primitive
def tile(a: DistArray, reps: Any) -> DistArray:
    """Return the array repeated as a whole, `reps` times along each dim."""
    reps = shape_of(reps)
    n = max(a.ndim, len(reps))
    reps = (1,) * (n - len(reps)) + reps
    shape = (1,) * (n - a.ndim) + a.shape
    apart = reshape(a, tuple(m for s in shape for m in (1, s)))
    whole = broadcast_to(apart, tuple(m for r, s in zip(reps, shape, strict=True) for m in (r, s)))
    return reshape(whole, tuple(r * s for r, s in zip(reps, shape, strict=True)))


def unstack(a: DistArray, axis: int = 0) -> tuple[DistArray, ...]:
    """Return the items of a dim; all that move go at once."""
    d = axis_of(axis, a.ndim)
    if isinstance(a, DistArray) and a.layout.dims[d]:
        kept = (() if i == d else cut for i, cut in enumerate(a.layout.dims))
        a = a.redistribute(Layout(*kept, partial=a.layout.partial))
    return tuple(getitem(a, (*(slice(None),) * d, i)) for i in range(a.shape[d]))


def split(a: DistArray, indices_or_sections: Any, axis: int = 0, *, even: bool = True) -> list[DistArray]:
    """Return parts of the array along a dim: so many, or cut at these indices."""
    d = axis_of(axis, a.ndim)
    n = a.shape[d]
    if isinstance(indices_or_sections, int | np.integer):
        k = int(indices_or_sections)
        if k < 1 or (even and n % k):
            raise ValueError(f"{n} items do not fall into {k} equal parts; array_split allows unequal ones")
        stops = np.cumsum([n // k + (i < n % k) for i in range(k)])[:-1]
    else:
        stops = np.asarray(indices_or_sections)
    edges: list[Any] = [None, *(int(s) for s in stops), None]
    return [getitem(a, (*(slice(None),) * d, slice(*edges[i : i + 2]))) for i in range(len(edges) - 1)]


def pad(a: DistArray, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> DistArray:
    """Return the array with more items before and behind each dim, by NumPy's modes that repeat items or a constant."""
    widths = [tuple(map(int, w)) for w in np.broadcast_to(np.asarray(pad_width), (a.ndim, 2))]
    if any(w < 0 for pair in widths for w in pair):
        raise ValueError(f"pad_width has no negative numbers: {pad_width}")
    if mode == "constant":
        return padded(a, widths, constant_values)
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise ValueError(f"pad takes the modes constant, edge, reflect, symmetric and wrap, not {mode!r}")
    for d, pair in enumerate(widths):
        if any(pair):
            a = take(a, np.pad(np.arange(a.shape[d]), pair, mode=mode), d)  # type: ignore[call-overload]
    return a if any(map(any, widths)) else a.copy()


@primitive
def padded(a: DistArray, widths: Sequence[tuple[int, ...]], constant_values: Any = 0) -> DistArray:
    """Return the array with so many items before and behind each dim, of these values."""
    values = np.broadcast_to(np.asarray(constant_values), (a.ndim, 2))
    for d, (before, behind) in enumerate(widths):
        shape = tuple(n + before + behind if i == d else n for i, n in enumerate(a.shape))
        out = empty_like(a, shape, a.layout.with_partial(()))
        places = full_range(shape)
        places[d] = range(before, before + a.shape[d])
        for at, value in ((slice(0, before), values[d][0]), (slice(shape[d] - behind, None), values[d][1])):
            out[(*(slice(None),) * d, at)] = value
        copy_part(out, places, a.summed(), full_range(a.shape))
        a = out
    return a if a.ndim else a.copy()


def positions(a: DistArray, dim: int) -> Any:
    """Return the global indices of a dim that this rank holds, shaped to broadcast over its block."""
    held = a.grid.block(a.layout, a.shape)[dim]
    return a.xp.arange(held.start, held.stop).reshape((-1,) + (1,) * (a.ndim - dim - 1))


@primitive
def triangle(a: DistArray, k: int = 0, *, lower: bool) -> DistArray:
    """Return the matrices with zeros above (or below) diagonal number k."""
    if a.ndim < 2:
        raise ValueError(f"tril and triu take matrices, or stacks of them, not an array of shape {a.shape}")
    k = whole(f"{'tril' if lower else 'triu'}: k, the number of a diagonal,", k)
    i, j = positions(a, a.ndim - 2), positions(a, a.ndim - 1)
    kept = j <= i + k if lower else j >= i + k
    return a.like(a.xp.where(kept, a.block, a.dtype.type(0)) if a.grid.inside else a.block)


@primitive
def diagonal(a: DistArray, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DistArray:
    """Return a diagonal of the matrices of two dims, as the last dim."""
    d, e = axis_of(axis1, a.ndim), axis_of(axis2, a.ndim)
    if d == e:
        raise ValueError(f"diagonal takes two dims, axis1 and axis2, not {axis1} twice")
    offset = whole("diagonal: offset, the number of a diagonal,", offset)
    order = [i for i in range(a.ndim) if i not in (d, e)]
    turned = a.transpose((*order, d, e))
    n = max(0, min(a.shape[d] + min(offset, 0), a.shape[e] - max(offset, 0)))
    line = np.arange(n)
    found = fetch(turned, [a.ndim - 2, a.ndim - 1], [line + max(0, -offset), line + max(0, offset)])
    return found.transpose((*range(1, found.ndim), 0))


@primitive
def diagonal_matrix(v: DistArray, k: int = 0) -> DistArray:
    """Return the matrix with the elements of `v` on diagonal number k, zeros elsewhere."""
    from parlinalg.array.rows import store

    k = whole("diag: k, the number of a diagonal,", k)
    n = v.shape[0] + abs(k)
    layout = v.grid.default_layout((n, n))
    out = v.like(v.grid.backend.zeros(v.grid.block_shape(layout, (n, n)), v.dtype), layout, (n, n))
    line = np.arange(v.shape[0])
    store(out, [0, 1], [line + max(0, -k), line + max(0, k)], v.summed())
    return out


def meshgrid(*arrays: DistArray, indexing: str = "xy", sparse: bool = False) -> list[DistArray]:
    """Return arrays of coordinates from one line of each dim; "xy" exchanges the first two dims.

    With `sparse` the lines are not broadcast to each other.
    """
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing is 'xy' or 'ij', not {indexing!r}")
    lines = [reshape(a, (a.size,)) for a in arrays]
    n = len(lines)
    order = [1, 0, *range(2, n)] if indexing == "xy" and n > 1 else list(range(n))
    shape = tuple(lines[i].size for i in order)
    found = []
    for i, a in enumerate(lines):
        at = order.index(i)
        line = reshape(a, tuple(a.size if d == at else 1 for d in range(n)))
        found.append(line if sparse else broadcast_to(line, shape))
    return found


def diff(a: DistArray, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> DistArray:
    """Return the differences of neighbours along a dim, n times; only the edges of pieces move."""
    d = axis_of(axis, a.ndim)
    if n < 0:
        raise ValueError(f"diff takes n of at least 0, not {n}")
    if not n:
        return a.copy()
    edge = tuple(1 if i == d else m for i, m in enumerate(a.shape))
    ends = [v if v is None else brought(v, a) for v in (prepend, append)]
    first, last = (v if v is None or v.ndim else broadcast_to(v, edge) for v in ends)
    parts = [p for p in (first, a, last) if p is not None]
    return differences(concatenate(parts, d) if len(parts) > 1 else a, n, d)


@primitive
def differences(a: DistArray, n: int, d: int) -> DistArray:
    """Return the differences of neighbours along dim d, n times."""
    lead = (slice(None),) * d
    for _ in range(n):
        after, before = a[(*lead, slice(1, None))], a[(*lead, slice(0, -1))]
        a = np.not_equal(after, before) if a.dtype.kind == "b" else after - before  # type: ignore[assignment]
    return a


def at_least(a: DistArray, n: int) -> DistArray:
    """Return the array with at least n dims; new ones stand where NumPy's `atleast_3d` and its kin put them."""
    if a.ndim >= n:
        return a.sharing(a.block, order=a.order)
    if n == 3:
        return at_least(expand_dims(at_least(a, 1), -1), 3) if a.ndim == 2 else expand_dims(at_least(a, 1), (0, 2))
    return expand_dims(a, tuple(range(n - a.ndim)))


def block(parts: Any) -> DistArray:
    """Return nested lists of blocks as one array: the innermost lists are joined along the last dim."""

    def depth(part: Any) -> int:
        if not isinstance(part, list):
            return 0
        if not part:
            raise ValueError("block takes no empty lists")
        levels = {depth(p) for p in part}
        if len(levels) > 1:
            raise ValueError(f"block takes lists that are equally deep, not of depths {sorted(levels)}")
        return levels.pop() + 1

    def leaves(part: Any) -> list[DistArray]:
        return [leaf for p in part for leaf in leaves(p)] if isinstance(part, list) else [part]

    levels = depth(parts)
    n = max(levels, *(leaf.ndim for leaf in leaves(parts)))

    def joined(part: Any, level: int) -> DistArray:
        if not isinstance(part, list):
            return expand_dims(part, tuple(range(n - part.ndim))) if part.ndim < n else part
        return concatenate([joined(p, level - 1) for p in part], -level)

    found = joined(parts, levels)
    return found.copy() if any(found is leaf for leaf in leaves(parts)) else found


def _mask(a: DistArray, d: int, chosen: Any) -> DistArray:
    """Return for each item of a dim True, but False for those that an index chooses, cut as the dim."""
    from parlinalg.array.create import full

    keep = full((a.shape[d],), True, a.grid, Layout(a.layout.dims[d]))
    keep[chosen] = False
    return keep


def delete(a: DistArray, chosen: Any, axis: int | None = None) -> DistArray:
    """Return the array without the items of a dim (default: of all elements) that an index, slice or mask chooses."""
    if axis is None:
        a, axis = reshape(a, (a.size,)), 0
    d = axis_of(axis, a.ndim)
    lead = (slice(None),) * d
    if isinstance(chosen, int | np.integer):
        n = a.shape[d]
        if not -n <= chosen < n:
            raise IndexError(f"index {chosen} is out of bounds for axis {d} with size {n}")
        i = int(chosen) % n
        return concatenate([a[(*lead, slice(0, i))], a[(*lead, slice(i + 1, None))]], d)
    if not isinstance(chosen, slice | DistArray):
        chosen = np.asarray(chosen)
        chosen = chosen.astype(np.int64) if not chosen.size else chosen.reshape(-1)
    return a[(*lead, _mask(a, d, chosen))]


def insert(a: DistArray, places: Any, values: Any, axis: int | None = None) -> DistArray:
    """Return the array with values put in before these items of a dim (default: of all elements in C order)."""
    if axis is None:
        a, axis = reshape(a, (a.size,)), 0
    d, n = axis_of(axis, a.ndim), a.shape[axis]
    lead = (slice(None),) * d
    if isinstance(places, DistArray):
        places = places.gather()
    index = np.arange(n)[places] if isinstance(places, slice) else np.asarray(places)
    index = np.flatnonzero(index) if index.dtype.kind == "b" else index.astype(np.int64) if not index.size else index
    if index.size and (index.min() < -n or index.max() > n):
        raise IndexError(f"index {index.reshape(-1)[0]} is out of bounds for axis {d} with size {n}")
    index = np.where(index < 0, index + n, index)
    if not index.ndim:
        values = brought(values, a)
        lone = expand_dims(values, tuple(range(a.ndim - values.ndim))) if values.ndim < a.ndim else values
        lone = lone.transpose([*range(1, d + 1), 0, *range(d + 1, lone.ndim)])
        shape = tuple(lone.shape[d] if i == d else m for i, m in enumerate(a.shape))
        new = broadcast_to(lone.astype(a.dtype, copy=False), shape)
        return concatenate([a[(*lead, slice(0, int(index)))], new, a[(*lead, slice(int(index), None))]], d)
    index = index.reshape(-1)
    order = np.argsort(index, kind="stable")
    at = index.copy()
    at[order] += np.arange(len(index))
    shape = tuple(m + len(index) if i == d else m for i, m in enumerate(a.shape))
    out = empty_like(a.summed(), shape, a.layout.with_partial(()))
    out[(*lead, at)] = values
    out[(*lead, _mask(out, d, at))] = a
    return out


def resize(a: DistArray, new_shape: Any) -> DistArray:
    """Return an array of another size: the elements in C order, repeated as often as needed."""
    new = shape_of(new_shape)
    size = int(np.prod(new, dtype=np.int64))
    flat = reshape(a, (a.size,))
    if not size or not a.size:
        layout = a.grid.default_layout(new)
        return a.like(a.grid.backend.zeros(a.grid.block_shape(layout, new), a.dtype), layout, new)
    if size > a.size:
        flat = tile(flat, -(-size // a.size))
    return reshape(flat[:size].copy(), new)
