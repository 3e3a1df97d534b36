"""Blocks between a grid and the host arrays of its ranks, and between two grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.errors import GridError
from parlinalg.exchange import Rect, exchange, meet, volume
from parlinalg.grid import Grid
from parlinalg.layout import Layout, coordinates
from parlinalg.redistribute import Move, redistribute

Block = Any
Shape = tuple[int, ...]
_NOTHING = range(0)


def gather(block: Block, shape: Shape, layout: Layout, grid: Grid, root: int | None) -> Any:
    """Return the global array on every rank of `grid.world`, or on its rank `root` only."""
    if not shape and root is not None:
        whole = gather(block, shape, layout, grid, None)
        return whole if grid.world.rank == root else None
    whole = Layout.replicated(len(shape))
    if root is not None:
        if not isinstance(root, int | np.integer) or not 0 <= root < grid.world.size:
            raise GridError(f"root {root} is not one of the {grid.world.size} ranks, 0 to {grid.world.size - 1}")
        summed = layout.with_partial(())
        block = redistribute(block, layout, summed, shape, grid)
        everything = tuple(range(n) for n in shape)
        wants = [everything if r == root else tuple(_NOTHING for _ in shape) for r in range(grid.world.size)]
        out = between(block, blocks(summed, shape, grid), wants, grid.world, grid)
        return grid.backend.to_host(out) if grid.world.rank == root else None
    mine, block = block, redistribute(block, layout, whole, shape, grid)
    if not grid.inside:
        block = grid.backend.empty(shape, block.dtype)
    elif not block.flags.c_contiguous:
        block = block.copy(order="C")
    if grid.size < grid.world.size:
        grid.world.broadcast(block, 0)
    host = grid.backend.to_host(block)
    return host.copy() if isinstance(mine, np.ndarray) and np.may_share_memory(host, mine) else host


def scatter(array: Any, shape: Shape, dtype: Any, layout: Layout, grid: Grid, root: int) -> Block:
    """Return this rank's block in `layout` (not partial) of the array that rank `root` of `grid.world` alone holds."""
    if not shape:
        return _scatter_scalar(array, dtype, grid, root)
    everything = tuple(range(n) for n in shape)
    haves = [everything if r == root else tuple(_NOTHING for _ in shape) for r in range(grid.world.size)]
    mine = grid.backend.from_host(array) if grid.world.rank == root else grid.backend.empty((0,) * len(shape), dtype)
    return between(mine, haves, blocks(layout, shape, grid), grid.world, grid)


def _scatter_scalar(array: Any, dtype: Any, grid: Grid, root: int) -> Block:
    line = scatter(None if array is None else np.reshape(array, (1,)), (1,), dtype, Layout(None), grid, root)
    return line.reshape(()) if grid.inside else grid.backend.zeros((), dtype)


def to_grid(block: Block, shape: Shape, src: Layout, old: Grid, dst: Layout, new: Grid) -> Block:
    """Return the block in `dst` on grid `new` of an array that lies in `src` on grid `old`."""
    if not shape:
        held = block.reshape((1,)) if old.inside else old.backend.empty((0,), block.dtype)
        moved = to_grid(held, (1,), Layout(None), old, Layout(None), new)
        whole = moved.reshape(()) if new.inside else new.backend.zeros((), block.dtype)
        return redistribute(whole, dst.with_partial(()), dst, shape, new)
    ranks = set(old.world.world_ranks) | set(new.world.world_ranks)
    comm = next((g.world for g in (new, old) if set(g.world.world_ranks) == ranks), None)
    if comm is None:
        raise GridError(
            f"no communicator covers both grids: {old!r} is made from ranks {list(old.world.world_ranks)}, "
            f"{new!r} from {list(new.world.world_ranks)}; make both from the same communicator (idle=True leaves some "
            "ranks out)"
        )
    haves = blocks(src, shape, old, comm.world_ranks)
    target = dst.with_partial(())
    wants = blocks(target, shape, new, comm.world_ranks)
    if old.backend.xp is not new.backend.xp:
        block = new.backend.from_host(old.backend.to_host(block))
    out = between(block, haves, wants, comm, new)
    return redistribute(out, target, dst, shape, new)


def blocks(layout: Layout, shape: Shape, grid: Grid, order: tuple[int, ...] | None = None) -> list[Rect]:
    """Return the rectangle each rank holds, listed by the ranks of `grid.world`, or by these ranks of the world."""
    inside = [layout.block(shape, grid.sizes, at) for at in coordinates(grid.axes, grid.sizes)]
    empty = tuple(_NOTHING for _ in shape)
    found = dict(zip(grid.world.world_ranks, inside, strict=False))
    return [found.get(r, empty) for r in (order or grid.world.world_ranks)]


def between(block: Block, haves: Sequence[Rect], wants: Sequence[Rect], comm: Any, grid: Grid) -> Block:
    """Exchange where several ranks may hold the same rectangle: a receiver serves itself, else they take turns."""
    me = comm.rank
    holders: dict[Rect, list[int]] = {}
    for rank, have in enumerate(haves):
        if volume(have):
            holders.setdefault(have, []).append(rank)

    def serves(source: int, to: int) -> bool:
        ranks = holders.get(haves[source], [])
        return bool(ranks) and source == (to if to in ranks else ranks[to % len(ranks)])

    nothing = tuple(_NOTHING for _ in haves[me])
    sends = [meet(wants[r], haves[me]) if serves(me, r) else nothing for r in range(comm.size)]
    receives = [meet(wants[me], haves[r]) if serves(r, me) else nothing for r in range(comm.size)]
    largest = max(map(volume, (*haves, *wants)))
    moved = exchange(block, haves[me], wants[me], sends, receives, block.dtype, comm, grid.backend, largest)
    return Move(moved).wait()
