"""The steps that all reductions by reflections share: panels of columns, and the ranks that work on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.comm.shared import SharedCollectives, lasting_array, shared_collectives
from parlinalg.grid import Grid
from parlinalg.linalg import kernels
from parlinalg.linalg.reductions.reflections import PANEL, Kept, KeptForAll, split
from parlinalg.linalg.tiles import Deal, Places, Tiles


class Reduction(ABC):
    """The reduction of a matrix by reflections, some columns at a time, on the ranks of a deal.

    Attributes
    ----------
    d, e : array
        The diagonal of what is left and what is beside it, on every rank; real.
    xp : module
        The namespace of arrays on the host: NumPy, but on imagined ranks.
    keep : bool
        The reflections are kept, which vectors need and values do not.
    """

    def __init__(self, tiles: Tiles, n: int, dtype: np.dtype[Any], keep: bool) -> None:
        self.tiles, self.n, self.dtype, self.keep = tiles, n, dtype, keep
        self.panel = PANEL  # columns
        self._in_place = False  # the ranks at work write reflections where all ranks read them
        real, self.xp = np.zeros(0, dtype).real.dtype, kernels.on_host(tiles.grid.backend)
        self.d, self.e = self.xp.zeros(n, real), self.xp.zeros(max(0, n - 1), real)

    def _keepers(self, workers: Deal, *heights: int) -> list[Kept]:
        """Return what keeps reflections of so many elements each, in shared memory where there is some.  Collective."""
        tiles, n, grid = self.tiles, self.n, self.tiles.grid
        every = [tiles.rows(m) for m in heights]
        if not (isinstance(self.d, np.ndarray) and grid.inside and self.keep):
            return [Kept(rows[tiles.i], tiles) for rows in every]
        ranks = workers.R * workers.C
        if ranks < grid.size:
            sizes = [KeptForAll.room(rows, n) for rows in every]
            memory = lasting_array(grid.everyone, sum(sizes), self.dtype)
            self._in_place = memory is not None
            if self._in_place:
                turns = [[(turn + i) % ranks == grid.rank for turn in range(-(-n // KeptForAll.SIZE))] for i in (0, 1)]
                parts = zip(every, split(memory, sizes), turns, strict=False)
                return [KeptForAll(rows, tiles, n, part, mine) for rows, part, mine in parts]
        sizes = [Kept.size(rows[tiles.i], n) for rows in every]
        memory = lasting_array(tiles.across, sum(sizes), self.dtype)
        rooms = [None] * len(sizes) if memory is None else split(memory, sizes)
        return [Kept(rows[tiles.i], tiles, room) for rows, room in zip(every, rooms, strict=True)]

    @abstractmethod
    def _panel(self, group: SharedCollectives, k: int, b: int) -> np.ndarray | None:
        """Reduce b columns from k on, update what is behind them; return the reflections to keep, [b, `_wide(k)`]."""

    @abstractmethod
    def _keep(self, k: int, message: np.ndarray) -> None:
        """Keep this rank's rows of the reflections of the columns from k on."""

    @abstractmethod
    def _wide(self, k: int) -> int:
        """Return how many numbers the reflections of a column have, in the columns from k on."""

    def _run(self, workers: Deal, most: int) -> None:
        """Reduce the matrix; a column sums and gathers at most so many elements of a rank.  Collective."""
        everyone, ranks = self.tiles.grid.everyone, workers.R * workers.C
        some, xp = ranks < everyone.size, self.xp
        panels = [(k, min(self.panel, self.n - k)) for k in range(0, self.n, self.panel)]
        held: list[np.ndarray] = []
        if everyone.rank < ranks:
            comm = everyone.sub(range(ranks), everyone.axes) if some else everyone
            with shared_collectives(comm, most, self.dtype) as group:
                for turn, (k, b) in enumerate(panels):
                    found = self._panel(group, k, b)
                    if found is None:
                        continue
                    message = xp.ascontiguousarray(found)
                    del found
                    self._keep(k, message)
                    if some and not self._in_place and turn % ranks == everyone.rank:  # which gives it to the others
                        held.append(message.reshape(-1))
                    del message  # before the next panel is made
            if some:
                comm.free()
        if not some:
            return
        everyone.barrier()  # the others wait without a core, then get the reflections
        for line in (self.d, self.e):
            everyone.broadcast(line, 0)
        if not self.keep:
            return
        sizes = [b * self._wide(k) for k, b in panels]
        if self._in_place:
            for start in range(0, len(panels), ranks):
                counts = sizes[start : start + ranks]
                own = counts[everyone.rank] if everyone.rank < len(counts) else 0
                everyone.count("all_gather", sum(counts) - own, self.dtype.itemsize)
            return
        most = max((sum(sizes[start : start + ranks]) for start in range(0, len(panels), ranks)), default=0)
        with shared_collectives(everyone, -(-most // everyone.size), self.dtype) as group:
            for start in range(0, len(panels), ranks):
                counts = sizes[start : start + ranks]
                mine = held.pop(0) if held else xp.empty(0, self.dtype)
                every, at = group.all_gather(mine[:, None], counts + [0] * (everyone.size - len(counts))), 0
                del mine
                if everyone.rank < ranks:
                    continue
                for (k, b), size in zip(panels[start : start + ranks], counts, strict=True):
                    self._keep(k, every[at : at + size].reshape(b, -1).copy())  # of rows of all, valid until the next
                    at += size


def workers(tiles: Tiles) -> Deal:
    """Return the deal of a matrix for its reduction: to all ranks, or to as many ranks of a node as it has cores.

    Where ranks outnumber cores each column's sums would wait for all to have their turn.
    """
    grid = tiles.grid
    if not grid.inside or grid.everyone.local_size < grid.size or grid.cores >= grid.size:
        return tiles
    return Deal({"worker": grid.cores}, tiles.size, "wide")


def rooms_of_few(grid: Grid, deal: Deal, every: Sequence[Places], dtype: np.dtype[Any]) -> list[Any]:
    """Return for each part of a matrix an array for this rank's rows and columns, in memory of all ranks of the node.

    It is for a deal to fewer ranks than the grid has: these have the parts of the others too, which so provide room for
    them.  None for each part if all ranks work, or cannot share memory.  Collective.
    """
    if not grid.inside or grid.size == deal.R * deal.C:
        return [None] * len(every)
    sizes = [[len(rows) * len(columns) for rows, columns in places] for places in every]
    memory = lasting_array(grid.everyone, sum(map(sum, sizes)), dtype, keep=False)
    if memory is None:
        return [None] * len(every)
    rooms = zip(every, sizes, split(memory, list(map(sum, sizes))), strict=True)
    return [split(room, each)[grid.rank].reshape(*map(len, places[grid.rank])) for places, each, room in rooms]
