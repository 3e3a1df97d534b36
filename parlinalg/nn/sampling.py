"""Which token comes next, given the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.random.counter import Stream, key


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes
    ----------
    do_sample : bool
        Draw it; else take the likeliest, of several the one with the lowest id.
    temperature : float
        Logits are divided by it.
    top_k : int or None
        Only the k likeliest are drawn (Fan et al., "Hierarchical neural story generation", 2018).
    top_p : float or None
        Only the fewest likeliest are drawn whose probabilities sum to p at least (Holtzman et al., "The curious case of
        neural text degeneration", 2020).
    seed : int
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature is above 0, not {self.temperature}; do_sample=False takes the likeliest")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is at least 1, not {self.top_k}; None is no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is above 0 and at most 1, not {self.top_p}; None is no limit")

    def choose(self, logits: np.ndarray, rows: Sequence[int], position: int) -> np.ndarray:
        """The next token of each row.

        Parameters
        ----------
        logits : array of float
            Shape [rows, vocabulary].
        rows : sequence of int
            The number of each row among all that are generated: what a row draws does not depend on the others.
        position : int
            The position of the tokens to choose, in their rows.

        Returns
        -------
        array of int64
            Shape [rows].
        """
        logits = logits.astype(np.float64)
        if not self.do_sample:
            return np.argmax(logits, axis=1).astype(np.int64)
        chosen = np.empty(len(logits), np.int64)
        for i, row in enumerate(rows):
            chosen[i] = self._draw(logits[i] / self.temperature, uniform(self.seed, row, position))
        return chosen

    def _draw(self, logits: np.ndarray, u: float) -> int:
        weights = np.exp(logits - logits.max())
        if self.top_k is not None or self.top_p is not None:
            order = np.argsort(-logits, kind="stable")[: self.top_k]
            if self.top_p is not None:
                sums = np.cumsum(weights[order])
                order = order[: 1 + int(np.searchsorted(sums, self.top_p * sums[-1]))]
            kept = np.zeros_like(weights)
            kept[order] = weights[order]
            weights = kept
        # In the order of the ids, not of the weights: rounding that differs from grid to grid may change the latter.
        sums = np.cumsum(weights)
        return int(np.searchsorted(sums, u * sums[-1], side="right"))


def uniform(seed: int, row: int, position: int) -> float:
    """The number at least 0 and below 1 that a row draws at a position; on every grid the same."""
    word = Stream(key(seed, "generate", row, position)).take(0, 1)[0]
    return float(word >> np.uint64(11)) * 2.0**-53
