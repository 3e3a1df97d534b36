"""Right-looking factorizations on tiles: factor a panel of columns, pass it on, update what is right of it.

A factorization is three steps of a `Panels`; the order in which they run is here.  The next panel is brought up to date
and factored before the rest of the matrix, while nobody waits for it (lookahead 1).  What the rest is updated with
crosses the grid's columns after what the next panel needs, so that no panel waits for it.

With several layers of ranks (2.5D; Solomonik and Demmel, Euro-Par 2011) panels are dealt among the layers in turn.
Each layer updates its copy of the matrix by its own panels alone, and the layers' terms of a panel are summed when it
is to be factored.  So panels move within a layer, along rows and columns of fewer ranks, while other layers go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.comm import Comm, Handle
from parlinalg.comm.base import DONE
from parlinalg.comm.shared import Meeting, Passing, SharedCollectives, lasting_array, shared_array, shared_collectives
from parlinalg.linalg.tiles import Tiles


class Sum(Handle):
    """A block to which the terms of other ranks of a communicator are added."""

    __slots__ = ("_block", "_terms")

    def __init__(self, block: Any, comm: Comm, ranks: Iterable[int]) -> None:
        self._block, self._terms = block, []
        for rank in ranks:
            term = namespace(block).empty(block.shape, block.dtype)
            self._terms.append((term, comm.receive(term, rank, wait=False)))

    def wait(self) -> None:
        for term, handle in self._terms:
            handle.wait()
            self._block += term
        self._terms = []

    def test(self) -> bool:
        done = [handle.test() for _, handle in self._terms]  # each call lets messages progress
        if not all(done):
            return False
        self.wait()
        return True


LANES = 6
"""Panels in shared memory at once: a rank may be so many behind, less 2, before the others wait for it."""


class Panels(ABC):
    """A factorization of this rank's tiles, in place.

    Attributes
    ----------
    a : array
        This rank's rows and columns, on the host or on a GPU; with right-hand sides as further columns, which are
        updated alike.
    rows, columns : array of int
        Their numbers.
    collectives : SharedCollectives
        Of the ranks of this grid column.
    strip : int
        Columns that are updated at once, at first `STRIP`; between strips messages in progress move on.
    """

    STRIP = 512
    keeps_panels = False
    """True if all panels are needed after the factorization: then ranks of one node keep them in shared memory."""
    shared_panels = False
    """True if they are kept there: where there was room for all."""

    def __init__(self, tiles: Tiles, a: Any, shape: tuple[int, int], extra: int = 0) -> None:
        self.tiles, self.a, self.shape, self.strip = tiles, a, shape, self.STRIP
        self.every_row, self.every_column = tiles.rows(shape[0]), tiles.columns(shape[1] + extra)
        self.rows, self.columns = self.every_row[tiles.i], self.every_column[tiles.j]
        self._lanes: Any = None  # shared memory for panels, of the ranks of a grid row
        self._starts: list[int] = []  # where the places of panels begin there
        self._passing: Any = None  # how they wait for each other
        self.collectives = SharedCollectives(tiles.down, None)
        self._rest: Callable[[], tuple[Any, int]] | None = None
        """Waits for the rest of a step: right factors of the columns after the first so many, and this number."""
        self.at_once = tiles.D > 1  # else columns after the next panel wait until that is factored
        self._sends: list[Handle] = []  # of this layer to others

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
        """Return the update of the columns right of the panel, once the panel is there."""

    def follow(self, k: int, b: int, step: Any) -> Any:
        """Do this layer's part in a panel that another one factors; return what updates the columns right of it.

        `step` is what this layer's last panel updates them with, or None.
        """
        return step

    def finish(self, step: Any) -> Any:
        """Return what updates the columns right of the next panel, for `step`, which updates those of that panel."""
        if step is None or self._rest is None:
            return step
        (left, _, r, c), (right, ahead), self._rest = step, self._rest(), None
        return left, right, r, c + ahead

    @abstractmethod
    def update(self, step: Any, first: int, last: int) -> None:
        """Update this rank's columns from `first` up to `last`."""

    def run(self) -> None:
        """Factor the whole matrix.  Collective over the grid.

        Between ranks of one node panels and gathered rows lie in shared memory, where the others read them.
        """
        n, tiles = min(self.shape), self.tiles
        if not n or not tiles.grid.inside:
            return
        size, wide = tiles.size, max(map(len, self.every_column))
        if not isinstance(self.a, np.ndarray):  # on a GPU, which shares no memory with others
            self._run(n, size)
            return
        with ExitStack() as stack:
            self._find_lanes(n, stack)
            self.collectives = stack.enter_context(shared_collectives(tiles.down, wide * size, self.a.dtype))
            try:
                self._run(n, size)
            finally:
                self._lanes, self._passing, self.collectives = None, None, SharedCollectives(tiles.down, None)

    def _find_lanes(self, n: int, stack: ExitStack) -> None:
        """Find shared memory for all panels if they are kept, and if there is room, else for some at a time.

        Collective.
        """
        size, across, itemsize = self.tiles.size, self.tiles.across, self.a.itemsize
        numbers = Meeting.SPREAD * across.size  # of the counters behind the panels

        def ends_and_room(tops: Iterable[int]) -> tuple[Any, int]:
            """Return where panels from these rows on end, and the room for them, in numbers of 8 bytes."""
            ends = np.cumsum([(len(self.rows) - top + 2 * size + 4) * size for top in tops])
            return ends, -(-int(ends[-1]) * itemsize // 8)

        lanes = None
        if self.keeps_panels:
            ends, room = ends_and_room(map(self.row, range(0, n, size)))
            lanes = lasting_array(across, room + numbers, np.int64)
            self.shared_panels = lanes is not None
        if lanes is None:
            ends, room = ends_and_room([0] * LANES)
            lanes = stack.enter_context(shared_array(across, (room + numbers,), np.int64))
        if lanes is not None:
            places = len(ends) + 3 * self.shared_panels  # of panels that are kept none is written twice
            self._starts = [0, *ends[:-1].tolist()]
            self._passing = Passing(across, lanes[room:], places, seldom=not len(self.columns))
            self._lanes = lanes[:room].view(self.a.dtype)

    def _run(self, n: int, size: int) -> None:
        tiles, width, step = self.tiles, len(self.columns), None
        for k in range(0, n, size):
            b, c = min(size, n - k), self.column(k)
            end = self.column(k + b)
            if step is not None:
                self._strips(step, c, end, DONE)
            root = tiles.layer_of(k)
            handle = self.gather_terms(self.a[self.first_row(k) :, c:end], root, k // size) if end > c else DONE
            if tiles.layer != root:
                step = self.follow(k, b, self.finish(step))
                continue
            # as soon as the terms are there the panel is factored
            panel = None
            for start in range(end, width, self.strip) if step is not None else ():
                if panel is None and handle.test():
                    handle, panel = self.factor(k, b)
                step = self.finish(step)
                self.update(step, start, min(start + self.strip, width))
                handle.test()
            if panel is None:
                handle.wait()
                handle, panel = self.factor(k, b)
            self.finish(step)
            handle.wait()
            self.wait_for_sends()
            step = self.take(k, b, panel)
        if step is not None:
            self._strips(self.finish(step), self.column(n), width, DONE)
        self.wait_for_sends()

    def _strips(self, step: Any, first: int, last: int, handle: Handle) -> None:
        for start in range(first, last, self.strip):
            self.update(step, start, min(start + self.strip, last))
            handle.test()

    # ------------------------------------------------------------------ communication
    def first_row(self, k: int) -> int:
        """Return this rank's first row of the panel from column k on."""
        return self.row(k)

    def ahead(self, k: int, b: int) -> int:
        """Return how many of this rank's columns are in the panel after that of b columns from k on."""
        return self.column(min(k + b + self.tiles.size, *self.shape)) - self.column(k + b)

    def gather_terms(self, block: np.ndarray, root: int, layers: int) -> Handle:
        """Begin to add to a block of layer `root` the terms of the other ones among the first `layers` layers."""
        deep, others = self.tiles.deep, [x for x in range(min(layers, self.tiles.D)) if x != root]
        if self.tiles.layer == root:
            return Sum(block, deep, others) if others else DONE
        if self.tiles.layer in others:
            self._sends.append(deep.send(block.copy(), root, wait=False))
        return DONE

    def wait_for_sends(self) -> None:
        """Wait until what this layer has sent to others is there."""
        for handle in self._sends:
            handle.wait()
        self._sends = []

    def message(self, k: int, size: int) -> Any:
        """Return room for the panel from column k on, of so many elements, flat; it lasts until the next but one."""
        if self._lanes is None:
            return namespace(self.a).empty(size, self.a.dtype)
        self._passing.room(self._number(k), self.tiles.owner(k)[1] == self.tiles.j)
        start = self._starts[self._number(k) % len(self._starts)]
        return self._lanes[start : start + size]

    def pass_on(self, k: int, message: Any, root: int) -> Handle:
        """Begin to give the panel from column k on, in its `message`, from grid column `root` to the others."""
        across = self.tiles.across
        if self._lanes is None:
            return across.broadcast(message, root, wait=False)
        across.count("broadcast", 0 if across.rank == root else message.size, message.itemsize)
        passed: Handle = self._passing.passed(self._number(k), root)
        return passed

    def _number(self, k: int) -> int:
        """Return how many panels of this layer are before the one from column k on."""
        return k // self.tiles.size // self.tiles.D
