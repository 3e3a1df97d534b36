"""Terms of the loss that modules add to that of the model's output, such as those that balance experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from parlinalg.autograd import Tensor

_collected: ContextVar[list[Tensor] | None] = ContextVar("added_losses", default=None)


class AddedLosses(list[Tensor]):
    """Terms of the loss, each a number that is the same on every rank, with its coefficient.

    Each is a mean over the sequences, or rows, of the batch.
    """

    def total(self) -> Tensor | float:
        """Return their sum; 0.0 where no module adds any."""
        return sum(self, 0.0)

    def added_to(self, total: Tensor, weight: float) -> Tensor:
        """Return a sum of losses with these terms, each of this weight."""
        return sum((term * weight for term in self), total)


@contextmanager
def added_losses(collect: bool = True) -> Iterator[AddedLosses]:
    """Collect the terms that modules add to the loss within this context; outside they are not even computed.

    What is computed again in the backward pass adds nothing twice.

    Parameters
    ----------
    collect : bool
        False: collect nothing, as in evaluation.

    Examples
    --------
    >>> from parlinalg import nn
    >>> with nn.added_losses() as added:  # loss = criterion(model(ids), targets) + added.total()
    ...     pass
    >>> added.total()
    0.0
    """
    found = AddedLosses()
    if not collect:
        yield found
        return
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def term_weights(rows: Sequence[int], counts: Sequence[int]) -> list[float]:
    """Return the weights of the terms of a step's microbatches: `term_weight` of each.

    Parameters
    ----------
    rows, counts : sequence of int
        Of each microbatch: its sequences, and its targets that count.

    >>> term_weights([3, 1], [5, 7])
    [9.0, 3.0]
    """
    return [term_weight(n, sum(rows), sum(counts)) for n in rows]


def term_weight(rows: int, all_rows: int, all_counts: float) -> float:
    """Return the weight of the terms of a microbatch, for losses that are summed and divided by their number.

    A term is a mean over sequences, so that a microbatch's weighs as its rows, whichever of its targets count.
    """
    return rows * max(1, all_counts) / max(1, all_rows)


def collecting() -> bool:
    """Return True within `added_losses`, where terms are asked for."""
    return _collected.get() is not None


def add_loss(term: Tensor) -> None:
    """Add a term to the loss, from a module's `forward`; outside of `added_losses` do nothing.

    Parameters
    ----------
    term : Tensor
        A number that is the same on every rank, with its coefficient: a mean over the sequences, or rows, of the batch.

    Examples
    --------
    >>> from parlinalg import nn
    >>> class SmallOutputs(nn.Linear):
    ...     def forward(self, x):
    ...         y = super().forward(x)
    ...         nn.add_loss((y * y).mean() * 0.01)
    ...         return y
    """
    found = _collected.get()
    if found is not None:
        found.append(term)
