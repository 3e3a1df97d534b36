"""Sorting and searching: what depends on the values.  Results of unknown length come out in balanced pieces.

A line along a cut dim is sorted where it lies: each rank sorts its part, exact splitters are found by a search that all
ranks make together, and one all-to-all brings every element to the rank of its place (a sample sort whose splitters are
exact; Axtmann et al., Practical Massively Parallel Sorting, SPAA 2015).  Equal elements keep their order.  Where an
array has as many lines as there are ranks along them, whole lines are brought together instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from parlinalg.array.align import spread
from parlinalg.array.core import DistArray, axis_of
from parlinalg.array.dispatch import primitive
from parlinalg.array.rows import by_owner, on_device, store, trade
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace
from parlinalg.backend.kernels.rows import running_sum
from parlinalg.backend.shapes import has_values, values_needed
from parlinalg.exchange import exchange_blocks
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, cut_lengths
from parlinalg.redistribute import Move

Block = Any
CHUNK = 1 << 15
"""Elements that stay in the cache while several passes are made over them."""


def used(grid: Grid, cut: Cut) -> Cut:
    """Return the axes of more than one rank."""
    return tuple(x for x in cut if grid.sizes[x] > 1)


def on_line(a: DistArray) -> DistArray:
    """Return all elements in C order, one dim, cut by all axes of the grid."""
    axes = tuple(a.grid.axes)
    return (
        reshape(a.summed(), (a.size,), layout=Layout(axes))
        if a.shape != (a.size,)
        else a.summed().redistribute(Layout(axes))
    )


# ------------------------------------------------------------------------------------------------ unknown lengths
def balanced(
    rows: Block, grid: Grid, axes: Cut, rest: Layout, shape: tuple[int, ...], known: Sequence[int] | None = None
) -> DistArray:
    """Return the array of the ranks' rows one after the other, its first dim cut by `axes` into balanced pieces.

    Parameters
    ----------
    rows : array
        Any number of rows, each this rank's part of `shape` in the layout `rest`.
    known : sequence of int, optional
        How many rows each rank has, which imagined ranks cannot tell each other.
    """
    comm = grid.comm(used(grid, axes)) if grid.inside else None
    if comm is not None and comm.size > 1 and not grid.backend.values and known is None:
        raise values_needed("the number of elements that each rank chooses along a dim that is cut")
    counts = np.zeros(1 if comm is None else comm.size, np.int64)
    if comm is not None:
        comm.all_gather(np.array([rows.shape[0]], np.int64), counts, [1] * comm.size)
    if comm is not None and known is not None:
        counts[:] = known
    n = int(counts.sum())
    if grid.size < grid.world.size:
        n = grid.world.share(n, others="alike")[0]
    layout, full = Layout(axes, *rest.dims), (n, *shape)
    if comm is None:
        return DistArray(grid.backend.zeros(grid.block_shape(layout, full), rows.dtype), full, layout, grid)
    stops = np.cumsum(counts)
    behind = tuple(range(m) for m in rows.shape[1:])
    haves = [(range(int(stop - c), int(stop)), *behind) for stop, c in zip(stops, counts, strict=True)]
    pieces = np.cumsum([0, *cut_lengths(n, used(grid, axes), grid.sizes)])
    wants = [(range(int(a), int(b)), *behind) for a, b in pairwise(pieces)]
    rows = grid.backend.xp.ascontiguousarray(rows)
    block = Move(exchange_blocks(rows, haves, wants, comm, grid.backend)).wait()
    return DistArray(block, full, layout, grid)


def compress(mask: DistArray, rows: DistArray) -> DistArray:
    """Return the rows (items of the first dim) where the mask, one dim cut alike, is True."""
    grid, axes = rows.grid, rows.layout.dims[0]
    kept = _chosen(rows.block, mask.block) if grid.inside else rows.block
    return balanced(kept, grid, axes, Layout(*rows.layout.dims[1:]), rows.shape[1:])


def compress_alike(mask: np.ndarray, rows: DistArray) -> DistArray:
    """Return the rows of imagined ranks where a mask of one dim is True that all ranks have whole."""
    grid, cut = rows.grid, used(rows.grid, rows.layout.dims[0])
    parts = np.split(mask, np.cumsum(cut_lengths(len(mask), cut, grid.sizes))[:-1])
    mine = parts[grid.comm(cut).rank] if grid.inside and cut else mask
    kept = rows.block[mine] if grid.inside else rows.block
    known = [int(np.count_nonzero(part)) for part in parts]
    return balanced(kept, grid, rows.layout.dims[0], Layout(*rows.layout.dims[1:]), rows.shape[1:], known)


def _chosen(rows: Block, mask: Block) -> Block:
    """Return the rows where the mask is True, part by part in the cache, which is faster than NumPy's own index."""
    if not isinstance(rows, np.ndarray):
        return rows[mask]
    out = np.empty((int(np.count_nonzero(mask)), *rows.shape[1:]), rows.dtype)
    step, done = max(1, CHUNK // max(1, math.prod(rows.shape[1:]))), 0
    for start in range(0, len(rows), step):
        at = np.flatnonzero(mask[start : start + step])
        rows[start : start + step].take(at, axis=0, out=out[done : done + len(at)], mode="clip")
        done += len(at)
    return out


def numbers(a: DistArray) -> DistArray:
    """Return the number of each element of an array of one dim, cut alike."""
    held = a.grid.block(a.layout, a.shape)[0]
    return a.like(a.xp.arange(held.start, held.stop, dtype=np.int64))


@primitive
def nonzero(a: DistArray) -> tuple[DistArray, ...]:
    """Return for each dim the indices of the elements that are not zero, in C order."""
    if not a.ndim:
        raise ValueError("nonzero takes an array of at least one dim")
    line = on_line(a)
    found = compress(line.like(line.block != 0), numbers(line))
    if not found.grid.inside or not a.size:
        return (found,) * a.ndim
    return tuple(found.like(i.astype(np.int64, copy=False)) for i in a.xp.unravel_index(found.block, a.shape))


# ------------------------------------------------------------------------------------------------ sorting
@primitive
def sort(a: DistArray, axis: int = -1, descending: bool = False) -> DistArray:
    """Return the array sorted along a dim, cut as before; NaNs are the largest."""
    return _sorted(a, axis, descending, False)


@primitive
def argsort(a: DistArray, axis: int = -1, descending: bool = False) -> DistArray:
    """Return the indices that sort the array along a dim; equal elements stay in their order."""
    return _sorted(a, axis, descending, True)


def _sorted(a: DistArray, axis: int, descending: bool, index: bool) -> DistArray:
    a, d = a.summed(), axis_of(axis, a.ndim)
    grid, cut = a.grid, used(a.grid, a.layout.dims[d])
    dtype = np.dtype(np.int64) if index else a.dtype
    if not grid.inside:
        return a.like(a.block.astype(dtype))
    if not cut:
        return a.like(sorted_block(a.block, d, descending, index))
    lines = math.prod(n for i, n in enumerate(a.shape) if i != d)
    ranks = math.prod(grid.sizes[x] for x in cut)
    if lines >= ranks:
        others = [() if i == d else c for i, c in enumerate(a.layout.dims)]
        shape = [0 if i == d else n for i, n in enumerate(a.shape)]  # its own dim is the last to be cut
        whole = a.redistribute(spread(shape, a.layout.dims[d], others))
        return whole.like(sorted_block(whole.block, d, descending, index)).redistribute(a.layout)
    lengths = cut_lengths(a.shape[d], cut, grid.sizes)
    if a.ndim == 1:
        keys, places = sort_line(a.block, lengths, grid.comm(cut), grid, descending=descending, index=index)
        return a.like(a.xp.ascontiguousarray(places if index else keys))
    front = a.xp.moveaxis(a.block, d, -1)
    out = grid.backend.empty(front.shape, dtype)
    for at in np.ndindex(front.shape[:-1]):
        keys, places = sort_line(front[at], lengths, grid.comm(cut), grid, descending=descending, index=index)
        out[at] = places if index else keys
    return a.like(a.xp.ascontiguousarray(a.xp.moveaxis(out, -1, d)))


def sorted_block(block: Block, d: int, descending: bool, index: bool) -> Block:
    """Return a block sorted along a dim, or with `index` the indices that sort it; equal elements keep their order."""
    back = tuple(slice(None, None, -1) if i == d else slice(None) for i in range(block.ndim))
    if descending:
        block = block[back]
    if not index:
        out = _sort(block, d)
    else:
        options = {"kind": "stable"} if isinstance(block, np.ndarray) else {}
        out = block.argsort(axis=d, **options).astype(np.int64, copy=False)
        if descending:
            out = block.shape[d] - 1 - out
    return out[back].copy() if descending else out


def sort_line(
    block: Block, lengths: list[int], comm: Any, grid: Grid, *, descending: bool = False, index: bool = False
) -> tuple[Block, Block]:
    """Return this rank's part of a sorted line, in pieces of these lengths, and with `index` where elements were."""
    xp, backend = grid.backend.xp, grid.backend
    if comm.size > 1 and not backend.values:
        raise values_needed("a sort along a dim that is cut")
    begins = np.cumsum([0, *lengths])
    n, me = int(begins[-1]), comm.rank
    bounds = n - begins[::-1] if descending else begins
    if not index and (found := _sorted_by_samples(block, bounds, comm, backend, descending)) is not None:
        return found, None
    block = block[::-1] if descending else block  # equal elements come in the reverse order then, and are turned back
    order = _argsort(block) if index else None
    keys = xp.ascontiguousarray(_sort(block) if order is None else block[order])
    cuts = _splitters([keys] * (comm.size - 1), [n] * (comm.size - 1), bounds[1:-1], comm, backend, descending)
    counts = np.diff(np.concatenate([[0], cuts, [len(keys)]]))
    if descending:
        counts = counts[::-1]
    starts = np.concatenate([[0], cuts])
    runs = [(int(s), int(c)) for s, c in zip(starts[::-1] if descending else starts, counts, strict=True)]
    values = [keys]
    if order is not None:
        at = int(begins[me]) + (len(keys) - 1 - order if descending else order)
        values.append(xp.ascontiguousarray(at.astype(np.int64)))
    received = np.empty(comm.size, np.int64)
    comm.all_to_all(np.ascontiguousarray(counts, np.int64), [1] * comm.size, received, [1] * comm.size)
    arrived = []
    for value in values:
        send = xp.concatenate([value[s : s + c] for s, c in runs]) if descending else value
        got = backend.empty((lengths[me],), value.dtype)
        comm.all_to_all(xp.ascontiguousarray(send), [c for _, c in runs], got, [int(c) for c in received])
        if descending:  # runs of later ranks first
            ends = np.cumsum(received)
            got = xp.concatenate([got[int(e - c) : int(e)] for e, c in zip(ends[::-1], received[::-1], strict=True)])
        arrived.append(got)
    back = slice(None, None, -1) if descending else slice(None)
    if order is None:
        return _sort(arrived[0])[back], None
    merged = _argsort(arrived[0])
    return arrived[0][merged][back], arrived[1][merged][back]


def _sort(block: Block, d: int = -1) -> Block:
    """Return a block sorted along a dim: equal elements keep their order where they can be told apart.

    Of equal floats only zeros can, by their signs.  To leave the order free makes NumPy's sorts several times as fast.
    """
    out = block.copy()
    if not isinstance(block, np.ndarray) or block.dtype.kind in "biu":
        out.sort(axis=d)
    elif block.ndim == 1 and block.dtype.kind == "f":
        out.sort()
        zeros = slice(*(int(out.searchsorted(out.dtype.type(0), side=side)) for side in ("left", "right")))
        if np.signbit(out[zeros]).any():
            out[zeros] = block[block == 0]
    else:
        out.sort(axis=d, kind="stable" if block.dtype.kind == "c" or _signed_zeros(block) else None)
    return out


def _signed_zeros(block: np.ndarray) -> bool:
    """Return True if a block has negative zeros."""
    return block.dtype.kind == "f" and bool((zeros := block == 0).any() and np.signbit(block[zeros]).any())


def _argsort(block: Block) -> Block:
    return block.argsort(**({"kind": "stable"} if isinstance(block, np.ndarray) else {}))


def _splitters(
    keys: Sequence[Block], sizes: Sequence[int], places: np.ndarray, comm: Any, backend: Any, reverse: bool
) -> np.ndarray:
    """Return how many of this rank's sorted keys lie before places of whole lines: each of a line of its own.

    keys[i] are this rank's keys of the line of place i, of which all ranks together have sizes[i].

    Every round each rank shows some keys, evenly spaced, of what is still undecided; of all ranks' together a few that
    part it into about equal shares are tried.  Of equal keys those of lower ranks come first (of higher ranks, with
    `reverse`).  A round brings each rank about a fiftieth of its part of the line at most, and 1,000 words.
    """
    t, p, n = len(places), comm.size, max(sizes, default=0)
    shown = tried = max(1, min(31, n // max(1, 150 * t * p * p), 300 // max(1, t * p)))
    low, high = np.zeros(t, np.int64), np.array([len(line) for line in keys], np.int64)
    cuts = np.full(t, -1, np.int64)
    while (open_ := np.flatnonzero(cuts < 0)).size:
        k = len(open_)
        weights = gathered(comm, high[open_] - low[open_])
        spaced = (2 * np.arange(shown) + 1) / (2 * shown)
        at = (low[open_, None] + spaced * (high - low)[open_, None]).astype(np.int64)
        mine = np.zeros((k, shown), keys[0].dtype)
        for i, place in enumerate(open_.tolist()):
            if line := len(keys[place]):
                mine[i] = backend.to_host(keys[place][on_device(np.minimum(at[i], line - 1), backend)])
        samples = gathered(comm, mine)
        pivots = np.empty((k, tried), samples.dtype)
        for i in range(k):
            some = np.flatnonzero(weights[:, i])
            if not some.size:  # all keys were passed: the place is at an end, where any pivot decides
                some = np.arange(p)
            candidates = samples[some, i].reshape(-1)
            ranked = np.argsort(candidates, kind="stable")
            share = np.cumsum(np.repeat(weights[some, i], shown)[ranked])
            quantiles = share[-1] * (np.arange(tried) + 1) / (tried + 1)
            pivots[i] = candidates[ranked[np.searchsorted(share, quantiles)]]
        own = np.empty((2, k, tried), np.int64)
        for i, place in enumerate(open_.tolist()):
            on = on_device(pivots[i], backend)
            for j, side in enumerate(("left", "right")):
                own[j, i] = backend.to_host(backend.xp.searchsorted(keys[place], on, side=side))
        (left, right), (lefts, rights) = own, gathered(comm, own).swapaxes(0, 1)
        below, upto, want = lefts.sum(axis=0), rights.sum(axis=0), places[open_, None]
        hit = (below <= want) & (want <= upto)
        for i, place in enumerate(open_.tolist()):
            if hit[i].any():
                j = int(hit[i].argmax())
                equal = (rights - lefts)[:, i, j]
                before = int((equal[comm.rank + 1 :] if reverse else equal[: comm.rank]).sum())
                cuts[place] = left[i, j] + np.clip(want[i, 0] - below[i, j] - before, 0, equal[comm.rank])
                continue
            passed = int((upto[i] < want[i]).sum())  # of the pivots, in order, so many lie before the place
            if passed:
                low[place] = max(low[place], right[i, passed - 1])
            if passed < tried:
                high[place] = min(high[place], left[i, passed])
    return cuts


def _sorted_by_samples(
    block: Block, bounds: np.ndarray, comm: Any, backend: Any, descending: bool
) -> Block | None:  # fmt: skip
    """Return the result of `sort_line` for keys alone; None, on all ranks, if sorting the keys is faster.

    Samples tell between which keys each of `bounds` (of the line in rising order) is likely to lie.  Only the keys
    between them are sorted to part them exactly; all others are sorted once, where they arrive.
    """
    p, me, n = comm.size, comm.rank, int(bounds[-1])
    places = bounds[1:-1]
    if p > 5 or block.dtype.kind not in "iuf" or not backend.host_memory:
        return None
    edges = _likely(block, places, n, comm)
    if edges is None:
        return None
    upto, parts = np.zeros(2 * p, np.int64), []
    signed = False  # of zeros with signs the order is not free
    for chunk in _chunks(block):
        masks = _nested(chunk, edges)
        upto += [np.count_nonzero(mask) for mask in masks]
        parts.append([chunk[np.flatnonzero(masks[i] ^ masks[i + 1])] for i in range(1, 2 * p - 1, 2)])
        signed = signed or _signed_zeros(chunk)
    classes = np.diff(upto)  # below the first two edges, between them, …
    every = gathered(comm, np.array([*classes, signed], np.int64)).sum(axis=0)
    below = np.cumsum(every[:-1])
    if every[-1] or (below[:-1:2] > places).any() or (below[1::2] < places).any() or every[1:-1:2].sum() > n // 2:
        return None
    between = [np.sort(np.concatenate(part)) for part in zip(*parts, strict=True)] or [block] * len(places)
    cuts = _splitters(between, every[1:-1:2].tolist(), places - below[:-1:2], comm, backend, descending).tolist()
    pieces: list[list[Block]] = [[] for _ in range(p)]  # of keys between edges, for each part of the line
    for i, (keys, cut) in enumerate(zip(between, cuts, strict=True)):
        pieces[i].append(keys[:cut])
        pieces[i + 1].append(keys[cut:])
    counts = np.array([classes[2 * j] + sum(map(len, pieces[j])) for j in range(p)], np.int64)
    order = range(p)[::-1] if descending else range(p)  # the part of each rank
    sent, received = counts[order], np.empty(p, np.int64)
    comm.all_to_all(sent, [1] * p, received, [1] * p)
    own = int(sent[me])
    sent[me] = received[me] = 0
    out, send = np.empty(own + int(received.sum()), block.dtype), np.empty(int(sent.sum()), block.dtype)
    starts = np.cumsum(sent) - sent
    _part(block, edges, pieces, [out if r == me else send[starts[r] :] for r in order])
    comm.all_to_all(send, sent.tolist(), out[own:], received.tolist())
    out.sort()
    return out[::-1] if descending else out


def _likely(block: Block, places: np.ndarray, n: int, comm: Any) -> np.ndarray | None:
    """Return for each place of a line of `n` the keys between which its own is likely to lie, from samples.

    None, on all ranks, if there are too few samples, or keys are not numbers or so often equal that places share them.
    """
    each = min(4096, n // (50 * comm.size**2))
    if each < 32:
        return None
    mine = block[(np.arange(each) * len(block)) // each] if len(block) else np.zeros(each, block.dtype)
    samples = np.sort(gathered(comm, mine).reshape(-1))
    m = len(samples)
    at, off = m * places / n, 4 * np.sqrt(m * places * (n - places)) / n + 2  # four standard deviations
    if (at <= off).any() or (at + off >= m).any():
        return None
    edges = samples[np.stack([at - off, at + off], 1).astype(np.int64).reshape(-1)]
    return None if (edges[1:-1:2] >= edges[2::2]).any() or np.isnan(edges).any() else edges


def _part(block: Block, edges: np.ndarray, pieces: list[list[Block]], goals: list[Block]) -> None:
    """Write the keys outside of the pairs of edges, and the `pieces` of those inside, to the goal of each part."""
    for chunk in _chunks(block):
        masks = _nested(chunk, edges)
        for j, goal in enumerate(goals):
            chosen = np.flatnonzero(masks[2 * j] ^ masks[2 * j + 1])
            chunk.take(chosen, out=goal[: len(chosen)], mode="clip")
            goals[j] = goal[len(chosen) :]
    for goal, some in zip(goals, pieces, strict=True):
        start = 0
        for keys in some:
            goal[start : start + len(keys)] = keys
            start += len(keys)


def _chunks(block: Block) -> list[Block]:
    """Return the parts of a block that stay in the cache."""
    return [block[start : start + CHUNK] for start in range(0, len(block), CHUNK)]


def _nested(keys: Block, edges: np.ndarray) -> list[Block]:
    """Return none of the keys, those below the first edge, up to the second, below the third, …, and all: as masks."""
    inner = [keys <= edge if i % 2 else keys < edge for i, edge in enumerate(edges)]
    return [np.zeros(len(keys), np.bool_), *inner, np.ones(len(keys), np.bool_)]


def gathered(comm: Any, mine: np.ndarray) -> np.ndarray:
    """Return all ranks' arrays of equal size, by rank."""
    out = np.empty((comm.size, *mine.shape), mine.dtype)
    comm.all_gather(np.ascontiguousarray(mine), out, [mine.size] * comm.size)
    return out


# ------------------------------------------------------------------------------------------------ sets
@primitive
def unique(a: DistArray, equal_nan: bool = False) -> tuple[DistArray, DistArray, DistArray, DistArray]:
    """Return the distinct values, sorted; where each is first; for each element its value's number; how often it is.

    NaNs are all distinct, or one value with `equal_nan`.
    """
    line = on_line(a)
    grid, axes = line.grid, used(line.grid, line.layout.dims[0])
    n = a.size
    if not grid.inside:
        keys, places = line.block, line.block.astype(np.int64)
    elif axes:
        lengths = cut_lengths(n, axes, grid.sizes)
        keys, places = sort_line(line.block, lengths, grid.comm(axes), grid, index=True)
    else:
        places = _argsort(line.block).astype(np.int64)
        keys = line.block[places]
    xp = grid.backend.xp
    new = xp.ones(keys.shape, np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    before = _last_before(keys, line, axes)
    if before is not None and keys.size:
        new[:1] = keys[:1] != before
    if equal_nan and keys.dtype.kind in "fc":
        lost = xp.isnan(keys)
        new[1:] &= ~(lost[1:] & lost[:-1])
        if before is not None and keys.size:
            new[:1] &= ~(lost[:1] & xp.isnan(before))
    firsts = line.like(new)
    values = compress(firsts, line.like(xp.ascontiguousarray(keys)))
    index = compress(firsts, line.like(xp.ascontiguousarray(places)))
    at = compress(firsts, numbers(line))
    counts = _differences(at, n)
    group = cumulative(firsts.astype(np.int64), 0)
    inverse = line.like(grid.backend.empty(line.block.shape, np.int64))
    store(inverse, [0], [line.like(places)], group - 1)
    return values, index, reshape(inverse, a.shape), counts


def _last_before(keys: Block, line: DistArray, axes: Cut) -> Any:
    """Return the last key of the nearest rank before this one that has any, as an array of one; None for the first."""
    if not axes or not line.grid.inside:
        return None
    backend, comm = line.grid.backend, line.grid.comm(axes)
    last = backend.to_host(keys[-1:]) if keys.size else np.zeros(1, keys.dtype)
    every = gathered(comm, last)
    lengths = cut_lengths(line.size, axes, line.grid.sizes)
    found = [r for r in range(comm.rank) if lengths[r]]
    if not found:
        return None
    return on_device(every[found[-1]], backend)


def _differences(a: DistArray, end: int) -> DistArray:
    """Return the distance of each element to the next one, of the last one to `end`."""
    following = a.like(a.block.copy())
    if a.size:
        from parlinalg.array.indexing import setitem

        if a.size > 1:
            setitem(following, slice(0, -1), a[1:])
        setitem(following, -1, end)
    return following - a


@primitive
def searchsorted(a: DistArray, values: DistArray, side: Any = "left") -> DistArray:
    """Return where values would be inserted into `a`, one dim and sorted: each asks the rank in whose part it lies."""
    if a.ndim != 1:
        raise ValueError(f"searchsorted takes sorted values of one dim, not of shape {a.shape}")
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', not {side!r}")
    a, values = a.summed(), values.summed()
    grid, axes = a.grid, used(a.grid, a.layout.dims[0])
    kind = np.result_type(a.dtype, values.dtype)
    if not grid.inside:
        return values.like(values.block.astype(np.int64))
    keys, asked = a.block.astype(kind, copy=False), values.block.astype(kind, copy=False)
    if not axes:
        return values.like(a.xp.searchsorted(keys, asked, side=side).astype(np.int64))
    comm, backend = grid.comm(axes), grid.backend
    if not backend.values:
        raise values_needed("a search in sorted values along a dim that is cut")
    lengths = np.asarray(cut_lengths(a.size, axes, grid.sizes))
    starts = np.cumsum(lengths) - lengths
    held = np.flatnonzero(lengths)
    lasts = gathered(comm, backend.to_host(keys[-1:]) if keys.size else np.zeros(1, kind))[held, 0]
    flat = backend.to_host(asked).reshape(-1)
    if not held.size:
        return values.like(backend.zeros(values.block.shape, np.int64))
    owner = held[np.minimum(lasts.searchsorted(flat, side=side), len(held) - 1)]
    shares = by_owner(owner, comm.size)
    order, counts = np.concatenate(shares), [len(share) for share in shares]
    wanted, received = trade(comm, flat[order], counts)
    places = backend.to_host(a.xp.searchsorted(keys, on_device(wanted, backend), side=side))
    places = places.astype(np.int64) + int(starts[comm.rank])
    answers = np.empty(len(flat), np.int64)
    comm.all_to_all(places, [int(c) for c in received], answers, [int(c) for c in counts])
    out = np.empty(len(flat), np.int64)
    out[order] = answers
    return values.like(backend.from_host(out.reshape(asked.shape)))


# ------------------------------------------------------------------------------------------------ along a dim
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
"""Dtypes whose running sums a kernel makes; NumPy sums narrower ones in their own."""
SCANS = ("add", "multiply", "maximum", "minimum", "logical_and", "logical_or")
"""The ufuncs whose running results there are."""


@primitive
def cumulative(a: DistArray, axis: int, name: str = "add", dtype: Any = None) -> DistArray:
    """Return the running sums ("add"), or the results of another of `SCANS`, along a dim: by a scan of the ranks."""
    a, d = a.summed(), axis_of(axis, a.ndim)
    grid, cut = a.grid, used(a.grid, a.layout.dims[d])
    ufunc: np.ufunc = getattr(np, name)
    functions = {"add": a.xp.cumsum, "multiply": a.xp.cumprod}
    same = dtype is None or np.dtype(dtype) == a.dtype
    if name == "add" and d == a.ndim - 1 and same and a.dtype in FLOATS:
        block = running_sum(a.block)
    elif name in functions:
        block = functions[name](a.block, axis=d, dtype=dtype)
    else:
        block = _running(ufunc, a.block, d, dtype, grid.backend.host_memory)
    if not cut or not grid.inside:
        return a.like(block)
    lead = (slice(None),) * d
    shape = tuple(1 if i == d else n for i, n in enumerate(block.shape))
    empty = not a.block.shape[d]
    total = grid.backend.zeros(shape, block.dtype) if empty else block[(*lead, slice(-1, None))]
    comm = grid.comm(cut)
    every = grid.backend.empty((comm.size, *shape), block.dtype)
    comm.all_gather(a.xp.ascontiguousarray(total), every, [math.prod(shape)] * comm.size)
    lengths = cut_lengths(a.shape[d], cut, grid.sizes)
    before = [r for r in range(comm.rank) if lengths[r]]
    if before and not empty:
        carried = every[before[0]]
        for r in before[1:]:
            carried = ufunc(carried, every[r])
        ufunc(carried, block, out=block)
    return a.like(block)


def _running(ufunc: np.ufunc, block: Any, axis: int, dtype: Any, host: bool) -> Any:
    """Return a ufunc's running results along a dim of a block; CuPy has no `accumulate`, and takes them by doubling."""
    if host:
        return ufunc.accumulate(block, axis=axis, dtype=dtype)
    lead, n, step = (slice(None),) * axis, block.shape[axis], 1
    kind = dtype if dtype is not None else np.bool_ if ufunc.__name__.startswith("logical") else block.dtype
    out = block.astype(kind, copy=True)
    while step < n:
        out[(*lead, slice(step, None))] = ufunc(out[(*lead, slice(step, None))], out[(*lead, slice(None, -step))])
        step *= 2
    return out


def _arg_extreme(block: Block, name: str, d: int) -> Block:
    """Return the index of the first largest or smallest element along a dim of a block.

    NumPy takes short lines one by one; here many are taken together, an element of each at a time.
    """
    n = block.shape[d]
    if not isinstance(block, np.ndarray):
        found = getattr(block, f"arg{name}")(axis=d)
        if block.dtype.kind not in "fcV" or not has_values(block):
            return found
        xp = namespace(block)
        lost = xp.isnan(xp.take_along_axis(block, xp.expand_dims(found, d), axis=d)).squeeze(d)
        return xp.where(lost, xp.isnan(block).argmax(axis=d), found) if lost.any() else found  # CuPy: any of the NaNs
    if not (1 < n <= 16 and block.size >= 4096 and block.dtype.kind in "iuf"):
        return getattr(block, f"arg{name}")(axis=d)
    lines = np.moveaxis(block, d, -1).reshape(-1, n)
    out, step = np.zeros(len(lines), np.int64), 4096
    for start in range(0, len(lines), step):
        part = np.ascontiguousarray(lines[start : start + step].T)
        best = part.max(axis=0) if name == "max" else part.min(axis=0)
        at = out[start : start + step]
        for i in reversed(range(n)):
            np.putmask(at, part[i] == best, i)
        if (lost := np.flatnonzero(np.isnan(best))).size:  # the first NaN
            at[lost] = np.isnan(part[:, lost]).argmax(axis=0)
    return out.reshape(np.delete(block.shape, d))


@primitive
def arg_extreme(a: DistArray, name: str, axis: int | None, keepdims: bool = False) -> DistArray:
    """Return the index of the first largest ("max") or smallest ("min") element along a dim, of all in C order."""
    if axis is None:
        out = arg_extreme(on_line(a), name, 0)
        return reshape(out, (1,) * a.ndim) if keepdims else out
    a, d = a.summed(), axis_of(axis, a.ndim)
    grid, cut = a.grid, used(a.grid, a.layout.dims[d])
    n = a.shape[d]
    if not n:
        raise ValueError(f"arg{name} over dim {d} of an array of shape {a.shape}, which has no elements there")
    xp = a.xp
    drop = tuple(() if i == d else c for i, c in enumerate(a.layout.dims))
    shape = tuple(1 if i == d else m for i, m in enumerate(a.shape))
    layout = Layout(*drop)
    if not grid.inside:
        block = grid.backend.zeros(grid.block_shape(layout, shape), np.int64)
    elif not cut:
        block = xp.expand_dims(_arg_extreme(a.block, name, d), d).astype(np.int64)
    else:
        comm, lengths = grid.comm(cut), cut_lengths(n, cut, grid.sizes)
        start = grid.block(a.layout, a.shape)[d].start
        held = tuple(1 if i == d else m for i, m in enumerate(a.block.shape))
        if lengths[comm.rank]:
            at = xp.expand_dims(_arg_extreme(a.block, name, d), d)
            best = xp.take_along_axis(a.block, at, axis=d)
            at = at.astype(np.int64) + start
        else:
            best, at = grid.backend.zeros(held, a.dtype), grid.backend.zeros(held, np.int64)
        bests = grid.backend.empty((comm.size, *held), a.dtype)
        places = grid.backend.empty((comm.size, *held), np.int64)
        ones = [math.prod(held)] * comm.size
        comm.all_gather(xp.ascontiguousarray(best), bests, ones)
        comm.all_gather(xp.ascontiguousarray(at), places, ones)
        some = on_device(np.flatnonzero(lengths), grid.backend)  # in order: the first of equals is first in the line
        bests, places = bests[some], places[some]
        which = _arg_extreme(bests, name, 0)
        block = xp.take_along_axis(places, which[None], axis=0)[0]
    out = a.like(block, layout, shape)
    return out if keepdims else reshape(out, tuple(m for i, m in enumerate(a.shape) if i != d))
