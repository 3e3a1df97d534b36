"""Right-looking factorizations on tiles: factor a panel of columns, pass it on, update what is right of it.

A factorization is three steps of a `Panels`; the order in which they run is here.  The next panel is brought up to date
and factored before the rest of the matrix, while nobody waits for it (lookahead 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from parlinalg.backend import namespace
from parlinalg.comm import Handle
from parlinalg.comm.base import DONE
from parlinalg.comm.shared import common
from parlinalg.linalg.tiles import Board, Tiles, board

if TYPE_CHECKING:
    from parlinalg.comm.mpi import MpiComm

LANES = 3
"""Panels in common memory at once.  The third after a panel takes its place, written by a rank that waited for the
second after it, which no rank passes on or waits for before it has done with the first one."""


class Panels(ABC):
    """A factorization of this rank's tiles, in place.

    Attributes
    ----------
    a : array
        This rank's rows and columns, on the host or on a GPU; with right-hand sides as further columns, which are
        updated alike.
    rows, columns : array of int
        Their numbers.
    board : Board
        Of the ranks of this grid column.
    STRIP : int
        Columns that are updated at once; between strips messages in progress move on.
    """

    STRIP = 512

    def __init__(self, tiles: Tiles, a: Any, shape: tuple[int, int], extra: int = 0) -> None:
        self.tiles, self.a, self.shape = tiles, a, shape
        self.every_row, self.every_column = tiles.rows(shape[0]), tiles.columns(shape[1] + extra)
        self.rows, self.columns = self.every_row[tiles.i], self.every_column[tiles.j]
        self._lanes: Any = None  # common memory for panels, of the ranks of a grid row
        self.board = Board(tiles.down, None)

    def row(self, k: int) -> int:
        """Return this rank's first row from number k on."""
        return int(np.searchsorted(self.rows, k))

    def column(self, k: int) -> int:
        """Return this rank's first column from number k on."""
        return int(np.searchsorted(self.columns, k))

    @abstractmethod
    def factor(self, k: int, b: int) -> tuple[Handle, Any]:
        """Factor the panel of b columns from k on, and begin to send it along the grid's rows."""

    @abstractmethod
    def take(self, k: int, b: int, panel: Any) -> Any:
        """Return what updates the columns right of the panel, once the panel is there."""

    @abstractmethod
    def update(self, step: Any, first: int, last: int) -> None:
        """Update this rank's columns from `first` up to `last`."""

    def run(self) -> None:
        """Factor the whole matrix.  Collective over the grid.

        Between ranks of one node panels and gathered rows lie in common memory, where the others read them.
        """
        n, tiles = min(self.shape), self.tiles
        if not n or not tiles.grid.inside:
            return
        size, wide = tiles.size, max(map(len, self.every_column))
        panel = (len(self.rows) + 2 * size + 4) * size
        if not isinstance(self.a, np.ndarray):  # on a GPU, which has no memory in common with others
            self._run(n, size)
            return
        with ExitStack() as stack:
            self._lanes = stack.enter_context(common(tiles.across, (LANES, panel), self.a.dtype))
            self.board = stack.enter_context(board(tiles.down, wide * size, self.a.dtype))
            try:
                self._run(n, size)
            finally:
                self._lanes, self.board = None, Board(tiles.down, None)

    def _run(self, n: int, size: int) -> None:
        width = len(self.columns)
        handle, panel = self.factor(0, min(size, n))
        for k in range(0, n, size):
            handle.wait()
            after = min(k + size, n)
            step = self.take(k, after - k, panel)
            if after < n:
                end = min(after + size, n)
                self._strips(step, self.column(after), self.column(end), DONE)
                handle, panel = self.factor(after, end - after)
                self._strips(step, self.column(end), width, handle)
            else:
                self._strips(step, self.column(after), width, DONE)

    def _strips(self, step: Any, first: int, last: int, handle: Handle) -> None:
        for start in range(first, last, self.STRIP):
            self.update(step, start, min(start + self.STRIP, last))
            handle.test()

    # ------------------------------------------------------------------ communication
    def message(self, k: int, size: int) -> Any:
        """Return room for the panel from column k on, of so many elements, flat; it lasts until the next but one."""
        if self._lanes is None:
            return namespace(self.a).empty(size, self.a.dtype)
        return self._lanes[k // self.tiles.size % LANES, :size]

    def pass_on(self, message: Any, root: int) -> Handle:
        """Begin to give a panel, which lies in its `message`, from grid column `root` to the others."""
        across = self.tiles.across
        if self._lanes is None:
            return across.broadcast(message, root, wait=False)
        across.count("broadcast", 0 if across.rank == root else message.size, message.itemsize)
        return cast("MpiComm", across).barrier_of("broadcast")  # others have no common memory
