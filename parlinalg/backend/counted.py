"""How much work attention is, counted in scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Work:
    """How many scores were computed, with those that were then hidden, in the forward and in the backward passes."""

    forward: int = 0
    backward: int = 0

    def flops(self, width: int) -> int:
        """The floating-point operations of their products, with heads of so many features."""
        return width * (4 * self.forward + 10 * self.backward)


_counted: ContextVar[Work | None] = ContextVar("counted", default=None)


@contextmanager
def counting() -> Iterator[Work]:
    """Count the scores that this rank computes while the context is open."""
    work = Work()
    token = _counted.set(work)
    try:
        yield work
    finally:
        _counted.reset(token)


def count(forward: int = 0, backward: int = 0) -> None:
    """Enter scores that were computed."""
    if (work := _counted.get()) is not None:
        work.forward += forward
        work.backward += backward
