"""Where the states of an optimizer lie: in memory, unless something else is asked to keep them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from parlinalg.backend.views import joined
from parlinalg.optim.flat import Entry, Run

Block = Any


class States(Protocol):
    """Keeps an optimizer's states.

    An entry has the states `entry.names`, each of `entry.size` elements of `entry.dtype`.  An entry is known by its
    parameter: after `make`, entries made anew of the same parameters and sizes mean the same states.

    Attributes
    ----------
    steps : int
        The steps made before the one under way, as the optimizer counts them; it says so before each.
    """

    steps: int

    def make(self, entries: Sequence[Entry]) -> None:
        """Make room for the states of these entries, in this order, all zero; what was kept before is forgotten."""

    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        """The runs, or parts of them, one after the other, with their states in memory (`Run.states`).

        What is written to a window's states is kept when the next one is asked for, or the iterator ends.  A part has
        the entries it holds elements of, views of `value` and `g`, and `at`, where it begins in the first of them.
        """

    def read(self, entry: Entry, name: str) -> Block:
        """A state of an entry as a flat block, which is not to be written to."""

    def write(self, entry: Entry, name: str, block: Block) -> None:
        """Set a state of an entry."""

    def complete(self, steps: int) -> None:
        """Step number `steps` is made: what its windows wrote counts, or, if that fails, nothing of it does."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's states, wherever they lie."""


class InMemory:
    """States as views into flat buffers, which lie side by side as the entries do."""

    def __init__(self) -> None:
        self.steps = 0
        self._flats: list[Block] = []
        self._views: dict[tuple[int, str], Block] = {}

    def make(self, entries: Sequence[Entry]) -> None:
        self._flats, self._views = [], {}
        groups: dict[tuple[int, str, tuple[str, ...]], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((id(entry.data.grid.backend), entry.dtype.str, entry.names), []).append(entry)
        for group in groups.values():
            backend = group[0].data.grid.backend
            for name in group[0].names:
                buffer, at = backend.zeros(sum(e.size for e in group), group[0].dtype), 0
                self._flats.append(buffer)
                for entry in group:
                    self._views[id(entry.parameter), name] = buffer[at : at + entry.size]
                    at += entry.size

    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        for run in runs:
            names = run.entries[0].names
            states = {name: joined([self.read(entry, name) for entry in run.entries]) for name in names}
            yield Run(run.entries, run.value, run.g, states)

    def read(self, entry: Entry, name: str) -> Block:
        return self._views[id(entry.parameter), name]

    def write(self, entry: Entry, name: str, block: Block) -> None:
        self.read(entry, name)[...] = block

    def complete(self, steps: int) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._flats)
