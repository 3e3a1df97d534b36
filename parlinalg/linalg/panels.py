"""Right-looking factorizations on tiles: factor a panel of columns, pass it on, update what is right of it.

A factorization is three steps of a `Panels`; the order in which they run is here.  The next panel is brought up to date
and factored before the rest of the matrix, while nobody waits for it (lookahead 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from parlinalg.comm import Handle
from parlinalg.comm.base import DONE
from parlinalg.linalg.tiles import Tiles

STRIP = 256
"""Columns that are updated at once; between strips messages in progress move on."""


class Panels(ABC):
    """A factorization of this rank's tiles, in place.

    Attributes
    ----------
    a : array
        This rank's rows and columns; with right-hand sides as further columns, which are updated alike.
    rows, columns : array of int
        Their numbers.
    """

    def __init__(self, tiles: Tiles, a: np.ndarray, shape: tuple[int, int], extra: int = 0) -> None:
        self.tiles, self.a, self.shape = tiles, a, shape
        self.every_row, self.every_column = tiles.rows(shape[0]), tiles.columns(shape[1] + extra)
        self.rows, self.columns = self.every_row[tiles.i], self.every_column[tiles.j]

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
        """Factor the whole matrix.  Collective over the grid."""
        n, size = min(self.shape), self.tiles.size
        width = len(self.columns)
        if not n or not self.tiles.grid.inside:
            return
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
        for start in range(first, last, STRIP):
            self.update(step, start, min(start + STRIP, last))
            handle.test()
