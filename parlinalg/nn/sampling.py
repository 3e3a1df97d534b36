"""Sampling of the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.nn.checks import whole
from parlinalg.random.counter import RandomStream, stream_key


@dataclass(frozen=True)
class Sampling:
    """Options of choosing the next token.

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
        if not _is(Real, self.temperature) or not self.temperature > 0:
            raise ConfigError(f"temperature is above 0, not {self.temperature!r}; do_sample=False takes the likeliest")
        if self.top_k is not None and not (_is(Integral, self.top_k) and self.top_k >= 1):
            raise ConfigError(f"top_k is a whole number of at least 1, not {self.top_k!r}; None is no limit")
        if self.top_p is not None and not (_is(Real, self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"top_p is above 0 and at most 1, not {self.top_p!r}; None is no limit")
        whole("seed", self.seed, None)

    def choose(self, logits: np.ndarray, rows: Sequence[int], position: int) -> np.ndarray:
        """Return the next token of each row.

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
            Shape [rows]; -1 where the largest logit is not finite.
        """
        logits = logits.astype(np.float64)
        top = logits.max(axis=1)
        chosen = np.argmax(logits, axis=1).astype(np.int64)
        chosen[~np.isfinite(top)] = -1
        if self.do_sample:
            for i in np.flatnonzero(chosen >= 0).tolist():
                with np.errstate(over="ignore"):  # of a low temperature: -inf
                    scores = (logits[i] - top[i]) / self.temperature
                chosen[i] = self._draw(scores, uniform(self.seed, rows[i], position))
        return chosen

    def _draw(self, logits: np.ndarray, u: float) -> int:
        """Draw by logits of which the largest is 0."""
        weights = np.exp(logits)
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


def _is(kind: type, value: Any) -> bool:
    """Return True if a value, whatever its annotation says, is of a kind."""
    return isinstance(value, kind)


def uniform(seed: int, row: int, position: int) -> float:
    """Return the number at least 0 and below 1 that a row draws at a position; on every grid the same."""
    word = RandomStream(stream_key(seed, "generate", row, position)).take(0, 1)[0]
    return float(word >> np.uint64(11)) * 2.0**-53
