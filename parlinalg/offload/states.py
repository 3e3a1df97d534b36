"""Optimizer states in tiles outside of the memory that blocks live in; the optimizer runs over them tile by tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.backend import Backend
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.offload.disk import aligned, whole_pages
from parlinalg.optim.flat import Entry, Run, value_state
from parlinalg.units import parse_bytes

Block = Any
LINE = 64  # elements; a state's part of a tile begins at a multiple


@dataclass(frozen=True)
class TileGroup:
    """Consecutive tiles with the same set of states.

    Each tile stores `per_tile` elements of every state, one state after another.

    Attributes
    ----------
    first : int
        The first tile.
    per_tile, size : int
        Elements in a tile, and in all.
    names : tuple of str
    dtype, value : numpy.dtype
        The dtypes of the states, and of the values that they belong to.
    backend : Backend
        The backend of the values.
    home : bool
        They are states of entries at home (`Entry.home`).
    """

    first: int
    per_tile: int
    size: int
    names: tuple[str, ...]
    dtype: np.dtype[Any]
    value: np.dtype[Any]
    backend: Backend
    home: bool = False

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.size // self.per_tile)

    @property
    def recorded(self) -> bool:
        """True if values are kept with the states: if they are not rounded from one of these."""
        return not self.home and value_state(self.names) is None

    def state(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """Return a state's elements in a tile."""
        n = self.per_tile * self.dtype.itemsize
        at = self.names.index(name) * n
        return buffer[at : at + n].view(self.dtype)

    def values(self, buffer: np.ndarray, at: int) -> np.ndarray:
        """Return the values kept in a tile, whose second part begins at byte `at`."""
        return buffer[at : at + self.per_tile * self.value.itemsize].view(self.value)


@dataclass(frozen=True)
class Piece:
    """The elements of a run or an entry that lie in one tile.

    Attributes
    ----------
    group : TileGroup
    tile : int
    at : int
        Where it begins in the run or entry.
    start, n : int
        Where it begins in the tile, and how many elements it has.
    """

    group: TileGroup
    tile: int
    at: int
    start: int
    n: int

    @property
    def part(self) -> slice:
        """The elements of the run or entry."""
        return slice(self.at, self.at + self.n)

    @property
    def inside(self) -> slice:
        """The elements of the tile."""
        return slice(self.start, self.start + self.n)


class TileLayout:
    """The layout of entries, in their order, in tiles of at most `nbytes` bytes.

    Entries without states are left out, unless their values are to be kept for those that lie at home.

    Attributes
    ----------
    groups : list of TileGroup
    parts : tuple of two ints
        Bytes of a tile for states, and for the values kept beside them.
    count : int
        The number of tiles.
    """

    def __init__(self, entries: Sequence[Entry], nbytes: int, *, values: bool) -> None:
        self.entries = list(entries)
        self.groups: list[TileGroup] = []
        self._of: dict[tuple[int, str], tuple[TileGroup, int]] = {}
        first = 0

        def kept_here(e: Entry) -> bool:
            return e.size > 0 and (bool(e.names) or (values and e.homed))

        groups = [(key, list(members)) for key, members in groupby(filter(kept_here, entries), _kind)]
        for (_, names, dtype, value, home), members in groups:
            size = sum(e.size for e in members)
            per_tile = max(LINE, nbytes // (max(1, len(names)) * dtype.itemsize) // LINE * LINE)
            per_tile = min(per_tile, -(-size // LINE) * LINE)
            group = TileGroup(first, per_tile, size, names, dtype, value, members[0].data.grid.backend, home)
            self.groups.append(group)
            first += group.tiles
            at = 0
            for e in members:
                self._of[e.key] = (group, at)
                at += e.size
        self.count = first
        states = max((s.per_tile * len(s.names) * s.dtype.itemsize for s in self.groups), default=0)
        kept = max((s.per_tile * s.value.itemsize for s in self.groups if s.recorded and values), default=0)
        self.parts = whole_pages(states), whole_pages(kept)

    def has(self, entry: Entry) -> bool:
        """Return True if the entry lies in tiles."""
        return entry.key in self._of

    def of(self, entry: Entry) -> Iterator[Piece]:
        """Yield the pieces of an entry."""
        if not entry.size or not (entry.names or self.has(entry)):
            return
        group, start = self._found(entry)
        yield from _cut(group, start, entry.size)

    def of_run(self, run: Run) -> Iterator[tuple[Piece, Run]]:
        """Yield the pieces of a run, each as the run of its elements, still without states."""
        group, start = self._found(run.entries[0])
        ends = np.cumsum([e.size for e in run.entries])
        for piece in _cut(group, start, int(ends[-1])):
            i = int(np.searchsorted(ends, piece.at, "right"))
            j = int(np.searchsorted(ends, piece.at + piece.n, "left"))
            before = int(ends[i - 1]) if i else 0
            window = Run(run.entries[i : j + 1], run.value[piece.part], run.g[piece.part], {}, piece.at - before)
            yield piece, window

    def _found(self, entry: Entry) -> tuple[TileGroup, int]:
        if entry.key not in self._of:
            raise OffloadError(f"there are no states of {entry.parameter.name!r}: they were not made, or are closed")
        return self._of[entry.key]

    def label(self) -> list[list[Any]]:
        """Describe the file: a row of name, elements, their start in the block, states and dtypes for each entry."""
        return [
            [e.parameter.name, e.size, e.start, list(e.names), e.dtype.name, e.data.dtype.name, *["home"] * e.home]
            for e in self.entries if e.key in self._of
        ]  # fmt: skip


def _kind(entry: Entry) -> tuple[int, tuple[str, ...], np.dtype[Any], np.dtype[Any], bool]:
    return id(entry.data.grid.backend), entry.names, entry.dtype, entry.data.dtype, entry.home


def _cut(group: TileGroup, start: int, size: int) -> Iterator[Piece]:
    """Yield the elements from `start` on, tile by tile."""
    at = 0
    while at < size:
        tile, inside = divmod(start + at, group.per_tile)
        n = min(size - at, group.per_tile - inside)
        yield Piece(group, group.first + tile, at, inside, n)
        at += n


class TiledStates(ABC):
    """States in tiles: what `DiskStates` and `HostStates` share."""

    VALUES = False
    """Whether values are kept with the states."""

    def __init__(self, tile: SupportsIndex | str) -> None:
        self.tile = max(4096, bytes_of("tile", tile))
        self.layout = TileLayout((), self.tile, values=False)
        self.steps = 0
        self._spare: dict[tuple[int, str, str], Block] = {}

    def make(self, entries: Sequence[Entry]) -> None:
        """Make room for the states of these entries, all zero.  Collective."""
        self.layout = TileLayout(entries, self.tile, values=self.VALUES)
        self._spare.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's states."""
        return sum(s.size * len(s.names) * s.dtype.itemsize for s in self.layout.groups)

    @abstractmethod
    def iterate_tiles(self, tiles: Sequence[int], *, values: bool) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the tiles in this order as host buffers; changes to a buffer are kept.

        With `values`, the values stored beside the states are read too, because some will not be overwritten.
        """

    @abstractmethod
    def complete(self, steps: int) -> None:
        """End a step.  Collective."""

    @abstractmethod
    def undo(self) -> None:
        """Forget what a step that failed wrote, where that can be done."""

    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        """Yield the runs tile by tile, with their states in the memory of the values."""
        cut = [e for e in self.layout.entries if not e.home]
        due = [e for e in cut if _has_gradient(e)]
        tiles = list(dict.fromkeys(piece.tile for e in due for piece in self.layout.of(e)))
        stream = self.iterate_tiles(tiles, values=len(due) < len(cut))
        tile, buffer = -1, np.empty(0, np.uint8)
        for run in runs:
            if not run.entries[0].names and not self.layout.has(run.entries[0]):
                yield run
                continue
            for piece, window in self.layout.of_run(run):
                while piece.tile != tile:
                    tile, buffer = next(stream)
                window.states = {name: self._arrive(piece, name, buffer) for name in piece.group.names}
                yield window
                self._leave(piece, window, buffer)
        for _ in stream:  # the last tile's turn is over
            pass

    def _arrive(self, piece: Piece, name: str, buffer: np.ndarray) -> Block:
        """Return a piece of a state as the optimizer changes it: in the buffer, or on the device."""
        group = piece.group
        view = group.state(buffer, name)[piece.inside]
        if group.backend.host_memory:
            return view
        key = id(group.backend), name, group.dtype.str
        if key not in self._spare or self._spare[key].size < piece.n:
            self._spare[key] = group.backend.empty(group.per_tile, group.dtype)
        block = self._spare[key][: piece.n]
        group.backend.copy_from_host(view, block)
        return block

    def _leave(self, piece: Piece, run: Run, buffer: np.ndarray) -> None:
        """Take a piece back, with which the optimizer is done."""
        group = piece.group
        if not group.backend.host_memory:
            for name, block in run.states.items():
                group.backend.copy_to_host(block, group.state(buffer, name)[piece.inside])
        if self.VALUES and group.recorded:
            kept = group.values(buffer, self.layout.parts[0])[piece.inside]
            group.backend.copy_to_host(run.value, kept)

    @abstractmethod
    def tile_buffer(self, tile: int, *, write: bool) -> np.ndarray:
        """Return a tile as a host buffer, valid until the next call; with `write`, changes to it are kept."""

    def read(self, entry: Entry, name: str) -> Block:
        """Return a state of an entry as a flat block."""
        host = np.empty(entry.size, entry.dtype)
        for piece in self.layout.of(entry):
            host[piece.part] = piece.group.state(self.tile_buffer(piece.tile, write=False), name)[piece.inside]
        return entry.data.grid.backend.from_host(host)

    def write(self, entry: Entry, name: str, block: Block) -> None:
        """Set a state of an entry."""
        host = entry.data.grid.backend.to_host(block).reshape(-1)
        for piece in self.layout.of(entry):
            piece.group.state(self.tile_buffer(piece.tile, write=True), name)[piece.inside] = host[piece.part]


class HostStates(TiledStates):
    """States in page-locked host memory, which come to the GPU a tile at a time.  Where blocks live in host memory it
    is the same as states in memory.

    Parameters
    ----------
    tile : int or str
        Bytes of a tile.
    """

    def __init__(self, tile: SupportsIndex | str = "64MiB") -> None:
        super().__init__(tile)
        self._tiles: list[np.ndarray] = []

    def make(self, entries: Sequence[Entry]) -> None:
        super().make(entries)
        made = [(s.backend, self.layout.parts[0]) for s in self.layout.groups for _ in range(s.tiles)]
        self._tiles = [aligned(n, backend) for backend, n in made]

    def iterate_tiles(self, tiles: Sequence[int], *, values: bool) -> Iterator[tuple[int, np.ndarray]]:
        for tile in tiles:
            yield tile, self._tiles[tile]

    def tile_buffer(self, tile: int, *, write: bool) -> np.ndarray:
        return self._tiles[tile]

    def complete(self, steps: int) -> None:
        """Do nothing: nothing is left to do."""

    def undo(self) -> None:
        """Leave everything as it is."""

    def close(self) -> None:
        """Free the memory."""
        self.make(())


def _has_gradient(entry: Entry) -> bool:
    p = entry.parameter
    return p.storage.settled is not None


def bytes_of(what: str, amount: SupportsIndex | str) -> int:
    """Return an amount of memory in bytes.

    Raises
    ------
    ConfigError
        If it is not an amount of memory.
    """
    try:
        return parse_bytes(amount)
    except ValueError as error:
        raise ConfigError(f"offload: {what}: {error}") from None
