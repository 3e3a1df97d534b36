"""Pickles of distributed arrays: each rank's holds its block, and the description of the grid.

All ranks pickle an array, and all of them, as many as there were, read it again.  In the process that wrote it an array
returns to its own grid while that is open.  Elsewhere it comes to the default grid, if that has the same axes and
backend, else to a new grid of this description, which arrays that are read later share.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import astuple, dataclass
from itertools import count
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.comm import open_comm
from parlinalg.errors import GridError
from parlinalg.grid import Grid, default_grid
from parlinalg.layout import Layout

_RUN = f"{os.getpid()}-{time.time_ns()}"
_numbers = count()
_known: weakref.WeakValueDictionary[str, Grid] = weakref.WeakValueDictionary()
_made: list[Grid] = []


@dataclass(frozen=True)
class Description:
    """The facts of a grid that an array needs.

    Attributes
    ----------
    sizes : tuple of (str, int)
        The axes and their sizes.
    ranks : int
        All ranks of the communicator that the grid was made from.
    backend : str
    """

    sizes: tuple[tuple[str, int], ...]
    ranks: int
    backend: str

    @classmethod
    def of(cls, grid: Grid) -> Description:
        return cls(tuple(grid.sizes.items()), grid.world.size, grid.backend.name)


def reduced(a: DistArray) -> tuple[Any, ...]:
    """Return the function and the arguments by which `pickle` restores an array on this rank."""
    grid = a.grid
    name = next((name for name, known in _known.items() if known is grid), None)
    if name is None:
        name = f"{_RUN}-{next(_numbers)}"
        _known[name] = grid
    block = np.ascontiguousarray(grid.backend.to_host(a.block)).reshape(a.block.shape)
    return restored, (name, astuple(Description.of(grid)), grid.world.rank, block, a.shape, a.layout)


def restored(
    name: str, description: tuple[Any, ...], rank: int, block: np.ndarray, shape: tuple[int, ...], layout: Layout
) -> DistArray:
    """Return an array that was pickled.  Collective unless its grid is open in this process.

    Raises
    ------
    GridError
        On all ranks, if there are more or fewer ranks than then, or a rank reads the block of another.
    """
    grid = _known.get(name)
    if grid is None or grid._closed:
        grid = _like(Description(*description))
    if any(theirs != mine for mine, theirs in enumerate(grid.world.share(rank, others="by rank"))):
        raise GridError(
            f"the pickle read by rank {grid.world.rank} was written by rank {rank}; every rank reads its own"
        )
    return DistArray(grid.backend.from_host(block.copy()), shape, layout, grid)


def _like(want: Description) -> Grid:
    """Return an open grid of this description: the default one, one that was made here, or a new one."""
    world = open_comm(None)
    try:
        if world.size != want.ranks:
            raise GridError(
                f"the array was pickled on {want.ranks} rank{'s' * (want.ranks > 1)}, on a grid {dict(want.sizes)}; "
                f"there are {world.size}: read it on as many, or keep arrays in files by parlinalg.save"
            )
        for grid in (default_grid(), *_made):
            if not grid._closed and Description.of(grid) == want:
                return grid
        grid = Grid(dict(want.sizes), None, want.backend, idle=True)
    finally:
        world.free()
    _made[:] = [*(g for g in _made if not g._closed), grid]
    return grid
