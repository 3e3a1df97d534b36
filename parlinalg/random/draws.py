"""The current training step, for layers that draw random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Draws:
    """The part of a random number's key that is not a layer's name or an element's index.

    Attributes
    ----------
    step : int
        The training step.
    start : int
        Where in the step's batch the rows of this microbatch begin.
    calls : Counter
        How often each layer has drawn already, by name.  A recomputation starts from a copy of what it was.
    """

    step: int = 0
    start: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def call(self, name: str) -> int:
        """Return the number of this call of the layer, from 0, and count it."""
        self.calls[name] += 1
        return self.calls[name] - 1

    def copy(self) -> Draws:
        return Draws(self.step, self.start, Counter(self.calls))


_current: ContextVar[Draws | None] = ContextVar("draws", default=None)


def current_draws() -> Draws | None:
    """Return the draws of the current training step, or None."""
    return _current.get()


@contextmanager
def using_draws(draws: Draws | None) -> Iterator[None]:
    """Within this context layers draw from these; None: each from its own, as outside of any training step."""
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def training_step(step: int, start: int = 0) -> Iterator[Draws]:
    """Within this context dropout depends on the step's number, and on nothing that came before it.

    Parameters
    ----------
    step : int
    start : int
        Where in the step's batch the rows of this forward pass begin: a microbatch drops what the whole batch would.

    Without it every call of a layer draws anew, and a run that is resumed does not repeat another.
    """
    draws = Draws(step, start)
    with using_draws(draws):
        yield draws
