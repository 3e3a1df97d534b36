"""Optimizer states outside of the memory that blocks live in; the optimizer runs over them chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.offload.disk import aligned
from parlinalg.offload.places import Piece, Places
from parlinalg.optim.flat import Entry, Run
from parlinalg.units import parse_bytes

Block = Any


class ChunkedStates(ABC):
    """States in chunks: what `DiskStates` and `HostStates` share."""

    VALUES = False
    """Whether values are kept with the states."""

    def __init__(self, chunk: SupportsIndex | str) -> None:
        self.chunk = max(4096, bytes_of("chunk", chunk))
        self.places = Places((), self.chunk, values=False)
        self.steps = 0
        self._spare: dict[tuple[int, str, str], Block] = {}

    def make(self, entries: Sequence[Entry]) -> None:
        """Make room for the states of these entries, all zero.  Collective."""
        self.places = Places(entries, self.chunk, values=self.VALUES)
        self._spare.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's states."""
        return sum(s.size * len(s.names) * s.dtype.itemsize for s in self.places.stretches)

    @abstractmethod
    def over(self, chunks: Sequence[int], *, values: bool) -> Iterator[tuple[int, np.ndarray]]:
        """The chunks in this order, in host memory; what then is written to one is kept.

        With `values` they come with the values beside the states, since not all of these are written.
        """

    @abstractmethod
    def complete(self, steps: int) -> None:
        """The end of a step.  Collective."""

    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        """The runs chunk by chunk, with their states in the memory of the values."""
        due = [e for e in self.places.entries if _has_gradient(e)]
        chunks = list(dict.fromkeys(piece.chunk for e in due for piece in self.places.of(e)))
        stream = self.over(chunks, values=len(due) < len(self.places.entries))
        chunk, buffer = -1, np.empty(0, np.uint8)
        for run in runs:
            if not run.entries[0].names:
                yield run
                continue
            for piece, window in self.places.of_run(run):
                while piece.chunk != chunk:
                    chunk, buffer = next(stream)
                window.states = {name: self._arrive(piece, name, buffer) for name in piece.stretch.names}
                yield window
                self._leave(piece, window, buffer)
        for _ in stream:  # the last chunk's turn is over
            pass

    def _arrive(self, piece: Piece, name: str, buffer: np.ndarray) -> Block:
        """A piece of a state as the optimizer changes it: in the buffer, or on the device."""
        stretch = piece.stretch
        view = stretch.state(buffer, name)[piece.inside]
        if stretch.backend.host_memory:
            return view
        key = id(stretch.backend), name, stretch.dtype.str
        if key not in self._spare or self._spare[key].size < piece.n:
            self._spare[key] = stretch.backend.empty(stretch.per_chunk, stretch.dtype)
        block = self._spare[key][: piece.n]
        stretch.backend.copy_from_host(view, block)
        return block

    def _leave(self, piece: Piece, run: Run, buffer: np.ndarray) -> None:
        """The optimizer is done with a piece."""
        stretch = piece.stretch
        if not stretch.backend.host_memory:
            for name, block in run.states.items():
                stretch.backend.copy_to_host(block, stretch.state(buffer, name)[piece.inside])
        if self.VALUES and stretch.recorded:
            kept = stretch.values(buffer, self.places.parts[0])[piece.inside]
            stretch.backend.copy_to_host(run.value, kept)

    @abstractmethod
    def desk(self, chunk: int, *, write: bool) -> np.ndarray:
        """A chunk in host memory, until the next one is asked for; with `write` what is written to it is kept."""

    def read(self, entry: Entry, name: str) -> Block:
        """A state of an entry as a flat block."""
        host = np.empty(entry.size, entry.dtype)
        for piece in self.places.of(entry):
            host[piece.part] = piece.stretch.state(self.desk(piece.chunk, write=False), name)[piece.inside]
        return entry.data.grid.backend.from_host(host)

    def write(self, entry: Entry, name: str, block: Block) -> None:
        """Set a state of an entry."""
        host = entry.data.grid.backend.to_host(block).reshape(-1)
        for piece in self.places.of(entry):
            piece.stretch.state(self.desk(piece.chunk, write=True), name)[piece.inside] = host[piece.part]


class HostStates(ChunkedStates):
    """States in page-locked host memory, which come to the GPU a chunk at a time.  Where blocks live in host memory it
    is the same as states in memory.

    Parameters
    ----------
    chunk : int or str
        Bytes of a chunk.
    """

    def __init__(self, chunk: SupportsIndex | str = "64MiB") -> None:
        super().__init__(chunk)
        self._chunks: list[np.ndarray] = []

    def make(self, entries: Sequence[Entry]) -> None:
        super().make(entries)
        made = [(s.backend, self.places.parts[0]) for s in self.places.stretches for _ in range(s.chunks)]
        self._chunks = [aligned(n, backend) for backend, n in made]

    def over(self, chunks: Sequence[int], *, values: bool) -> Iterator[tuple[int, np.ndarray]]:
        for chunk in chunks:
            yield chunk, self._chunks[chunk]

    def desk(self, chunk: int, *, write: bool) -> np.ndarray:
        return self._chunks[chunk]

    def complete(self, steps: int) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Free the memory."""
        self.make(())


def _has_gradient(entry: Entry) -> bool:
    p = entry.parameter
    return (p.grad if p.shard is None else p.shard.grad) is not None


def bytes_of(what: str, amount: SupportsIndex | str) -> int:
    """An amount of memory in bytes.

    Raises
    ------
    ConfigError
        If it is none.
    """
    try:
        return parse_bytes(amount)
    except ValueError as error:
        raise ConfigError(f"offload: {what}: {error}") from None
