"""Where the states of an optimizer's entries lie in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from parlinalg.backend import Backend
from parlinalg.errors import OffloadError
from parlinalg.offload.disk import whole_pages
from parlinalg.optim.flat import Entry, Run

Block = Any
LINE = 64  # elements; a state's part of a chunk begins at a multiple


@dataclass(frozen=True)
class Stretch:
    """Chunks whose elements all have the same states: in each chunk those of `per_chunk` elements, state by state.

    Attributes
    ----------
    first : int
        The first chunk.
    per_chunk, size : int
        Elements in a chunk, and in all.
    names : tuple of str
    dtype, value : numpy.dtype
        Of the states, and of the values that they belong to.
    backend : Backend
        Of the values.
    """

    first: int
    per_chunk: int
    size: int
    names: tuple[str, ...]
    dtype: np.dtype[Any]
    value: np.dtype[Any]
    backend: Backend

    @property
    def chunks(self) -> int:
        """How many chunks these are."""
        return -(-self.size // self.per_chunk)

    @property
    def recorded(self) -> bool:
        """Whether values are kept with the states: where no master has them already."""
        return "master" not in self.names

    def state(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """A state's elements in a chunk."""
        n = self.per_chunk * self.dtype.itemsize
        at = self.names.index(name) * n
        return buffer[at : at + n].view(self.dtype)

    def values(self, buffer: np.ndarray, at: int) -> np.ndarray:
        """The values kept in a chunk, whose second part begins at byte `at`."""
        return buffer[at : at + self.per_chunk * self.value.itemsize].view(self.value)


@dataclass(frozen=True)
class Piece:
    """What of a run or an entry lies in one chunk.

    Attributes
    ----------
    stretch : Stretch
    chunk : int
    at : int
        Where it begins in the run or entry.
    start, n : int
        Where it begins in the chunk, and how many elements it has.
    """

    stretch: Stretch
    chunk: int
    at: int
    start: int
    n: int

    @property
    def part(self) -> slice:
        """The elements of the run or entry."""
        return slice(self.at, self.at + self.n)

    @property
    def inside(self) -> slice:
        """The elements of the chunk."""
        return slice(self.start, self.start + self.n)


class Places:
    """Gives entries their places in chunks of at most `nbytes` bytes, in their order.

    Attributes
    ----------
    stretches : list of Stretch
    parts : tuple of two ints
        Bytes of a chunk for states, and for the values kept beside them.
    count : int
        The number of chunks.
    """

    def __init__(self, entries: Sequence[Entry], nbytes: int, *, values: bool) -> None:
        self.entries = list(entries)
        self.stretches: list[Stretch] = []
        self._of: dict[int, tuple[Stretch, int]] = {}
        first = 0
        stretches = [(key, list(group)) for key, group in groupby((e for e in entries if e.names and e.size), _kind)]
        for (_, names, dtype, value), group in stretches:
            size = sum(e.size for e in group)
            per_chunk = max(LINE, nbytes // (len(names) * dtype.itemsize) // LINE * LINE)
            per_chunk = min(per_chunk, -(-size // LINE) * LINE)
            stretch = Stretch(first, per_chunk, size, names, dtype, value, group[0].data.grid.backend)
            self.stretches.append(stretch)
            first += stretch.chunks
            at = 0
            for e in group:
                self._of[id(e.parameter)] = (stretch, at)
                at += e.size
        self.count = first
        states = max((s.per_chunk * len(s.names) * s.dtype.itemsize for s in self.stretches), default=0)
        kept = max((s.per_chunk * s.value.itemsize for s in self.stretches if s.recorded and values), default=0)
        self.parts = whole_pages(states), whole_pages(kept)

    def of(self, entry: Entry) -> Iterator[Piece]:
        """The pieces of an entry."""
        if not entry.size or not entry.names:
            return
        stretch, start = self._found(entry)
        yield from _cut(stretch, start, entry.size)

    def of_run(self, run: Run) -> Iterator[tuple[Piece, Run]]:
        """The pieces of a run, each as the run of its elements, still without states."""
        stretch, start = self._found(run.entries[0])
        ends = np.cumsum([e.size for e in run.entries])
        for piece in _cut(stretch, start, int(ends[-1])):
            i = int(np.searchsorted(ends, piece.at, "right"))
            j = int(np.searchsorted(ends, piece.at + piece.n, "left"))
            before = int(ends[i - 1]) if i else 0
            window = Run(run.entries[i : j + 1], run.value[piece.part], run.g[piece.part], {}, piece.at - before)
            yield piece, window

    def _found(self, entry: Entry) -> tuple[Stretch, int]:
        """Where an entry begins."""
        if id(entry.parameter) not in self._of:
            raise OffloadError(f"there are no states of {entry.parameter.name!r}: they were not made, or are closed")
        return self._of[id(entry.parameter)]

    def label(self) -> list[list[Any]]:
        """What lies where, for those who find the file: name, elements, where they begin in the block, and states."""
        return [
            [e.parameter.name, e.size, e.start, list(e.names), e.dtype.name, e.data.dtype.name]
            for e in self.entries if id(e.parameter) in self._of
        ]  # fmt: skip


def _kind(entry: Entry) -> tuple[int, tuple[str, ...], np.dtype[Any], np.dtype[Any]]:
    return id(entry.data.grid.backend), entry.names, entry.dtype, entry.data.dtype


def _cut(stretch: Stretch, start: int, size: int) -> Iterator[Piece]:
    """Elements from `start` on, chunk by chunk."""
    at = 0
    while at < size:
        chunk, inside = divmod(start + at, stretch.per_chunk)
        n = min(size - at, stretch.per_chunk - inside)
        yield Piece(stretch, stretch.first + chunk, at, inside, n)
        at += n
