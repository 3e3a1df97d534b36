"""Terms of the loss that layers add to that of the model's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from parlinalg.autograd import Tensor

_collected: ContextVar[list[Tensor] | None] = ContextVar("auxiliary", default=None)


class AuxiliaryLosses(list[Tensor]):
    """Terms of the loss, each a number that is the same on every rank, with its coefficient."""

    def total(self) -> Tensor | float:
        """Their sum; 0.0 where no layer adds any."""
        total: Tensor | float = 0.0
        for term in self:
            total = total + term
        return total


@contextmanager
def auxiliary_losses() -> Iterator[AuxiliaryLosses]:
    """Within this context the terms that layers add to the loss are collected; outside they are not even computed.

    They are means over the sequences of the batch.  What is computed again in the backward pass adds nothing twice.

    Examples
    --------
    >>> from parlinalg import nn
    >>> with nn.auxiliary_losses() as auxiliary:  # loss = criterion(model(ids), targets) + auxiliary.total()
    ...     pass
    >>> auxiliary.total()
    0.0
    """
    found = AuxiliaryLosses()
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def term_weights(rows: Sequence[int], counts: Sequence[int]) -> list[float]:
    """Return the weights of the terms of a step's microbatches, for losses that are summed and divided by their number.

    A term is a mean over sequences, so that a microbatch's weighs as its rows, whichever of its targets count.

    Parameters
    ----------
    rows, counts : sequence of int
        Of each microbatch: its sequences, and its targets that count.

    >>> term_weights([3, 1], [5, 7])
    [9.0, 3.0]
    """
    whole, every = max(1, sum(counts)), max(1, sum(rows))
    return [n * whole / every for n in rows]


def collecting() -> bool:
    """Return True within `auxiliary_losses`."""
    return _collected.get() is not None


def add_auxiliary(term: Tensor) -> None:
    """Add a term to the loss, if it is asked for."""
    found = _collected.get()
    if found is not None:
        found.append(term)
