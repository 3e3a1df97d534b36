"""Where tokens stand in their sequence: positions in runs of equal steps."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

#: Positions that fall into more runs than one in so many are compared one by one.
SHORT = 16


class Run(NamedTuple):
    """Tokens `start` to `stop - 1` stand at positions `first`, `first + step`, …; step 0: in no order."""

    start: int
    stop: int
    first: int
    step: int


class Places:
    """The positions of some tokens.

    Parameters
    ----------
    positions : array of int
        On the host, shape [n], in any order.
    """

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = np.asarray(positions, np.int64)
        self._copy: Any = None

    @cached_property
    def runs(self) -> list[Run]:
        """Maximal runs of equal positive steps; one without order if they would be many."""
        at, n = self.positions, len(self.positions)
        if not n:
            return []
        steps = np.diff(at)
        turns = np.flatnonzero(np.diff(steps)) + 1  # before these steps another one was taken
        runs: list[Run] = []
        start = 0
        for turn in (*turns.tolist(), n - 1):
            if turn <= start < n - 1:  # the step out of the last run
                continue
            step = int(steps[start]) if start < n - 1 else 1
            if step <= 0 or len(runs) > 4 + n // SHORT:
                return [Run(0, n, 0, 0)]
            runs.append(Run(start, turn + 1, int(at[start]), step))
            start = turn + 1
        return runs

    def within(self, part: slice) -> Run:
        """The run that a part, which lies in one, is."""
        for start, stop, first, step in self.runs:
            if start <= part.start < stop:
                return Run(part.start, part.stop, first + (part.start - start) * step, step)
        raise IndexError(f"token {part.start} of {len(self.positions)}")

    def spans(self, step: int) -> list[slice]:
        """All tokens in pieces of at most `step`, each within a run."""
        return [
            slice(a, b)
            for run in self.runs
            for a, b in pairwise([*range(run.start, run.stop, max(1, step)), run.stop])
        ]  # fmt: skip

    def on(self, xp: Any) -> Any:
        """The positions in the memory of a backend."""
        if self._copy is None:
            self._copy = xp.asarray(self.positions)
        return self._copy
