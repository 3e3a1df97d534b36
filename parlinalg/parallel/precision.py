"""Mixed precision: weights and gradients in 16 bits, with a scale that keeps small gradients from vanishing.

A model made with a 16-bit dtype computes in it; an optimizer with `master=True` keeps float32 weights that the 16-bit
ones are rounded from; and in float16 the loss is multiplied by a scale, of which the optimizer's step takes out what
the gradients hold (Micikevicius et al., "Mixed precision training", 2018).  bfloat16 has float32's range, and needs no
scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError

START = 2.0**16


class Unscaled:
    """The loss as it is, where its dtype needs no scale: what an update asks in place of a `LossScaler`."""

    scales = False
    scale = 1.0

    def update(self, finite: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float] | None:
        """Return None: there is no state."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class LossScaler(Unscaled):
    """The scale of the loss.

    A dynamic scale grows after steps that went well, and falls where a gradient overflowed: that step is to be skipped,
    on all ranks.  All ranks must be given the same, such as `Gradients.finite`, and then have the same scale.

    Parameters
    ----------
    scale : float
        To start with.
    dynamic : bool
        False: the scale stays.
    growth_every : int
        Good steps after each other after which the scale doubles; an overflow halves it.
    least, most : float
        Between these it stays.

    Attributes
    ----------
    scale : float
        What the loss is to be multiplied by, before the backward pass.
    good : int
        Good steps since the scale changed.
    skipped : int
        Steps that overflowed.

    Examples
    --------
    >>> scaler = LossScaler(8.0, growth_every=2)
    >>> for finite in (True, True, False, True):
    ...     scaler.update(finite)
    ...     print(scaler.scale, scaler.skipped)
    8.0 0
    16.0 0
    8.0 1
    8.0 1
    """

    scales = True

    def __init__(
        self, scale: float = START, *, dynamic: bool = True, growth_every: int = 2000, least: float = 1.0,
        most: float = 2.0**24,
    ) -> None:  # fmt: skip
        for name, value in (("scale", scale), ("least", least), ("most", most)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"a loss scaler's {name} is a number above 0, not {value!r}")
        if dynamic and not least <= scale <= most:
            raise ConfigError(
                f"a loss scale starts between its least, {least:g}, and its most, {most:g}, not at {scale:g}"
            )
        if growth_every < 1:
            raise ConfigError(f"a loss scale grows every so many steps, at least 1, not {growth_every}")
        self.scale = float(scale)
        self.dynamic = dynamic
        self.growth_every = growth_every
        self.least, self.most = float(least), float(most)
        self.good = 0
        self.skipped = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale to a step whose gradients were finite or not; the same on all ranks."""
        if not finite:
            self.skipped += 1
            self.good = 0
            if self.dynamic:
                self.scale = max(self.least, self.scale / 2)
            return
        self.good += 1
        if self.dynamic and self.good >= self.growth_every:
            self.scale, self.good = min(self.most, self.scale * 2), 0

    def state_dict(self) -> dict[str, float]:
        """Return the state with which a training continues as if it had not stopped."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises
        ------
        ConfigError
            If it lacks a key of these.
        """
        if lacking := [key for key in ("scale", "good", "skipped") if key not in state]:
            raise ConfigError(
                f"LossScaler.load_state_dict takes what state_dict gave, with scale, good and skipped; this lacks "
                f"{', '.join(lacking)}, and has {', '.join(map(repr, state)) or 'no keys'}"
            )
        self.scale = float(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])


@contextmanager
def overflowing() -> Iterator[None]:
    """Context without warnings of overflows and invalid values: `examine` finds them, and the scale falls."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield
