"""What a criterion gives: a mean loss, or the sum of the losses and their number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.errors import EngineError
from parlinalg.grid import Grid
from parlinalg.train.feed import placed
from parlinalg.train.sizes import size_of

#: From outputs and labels to a mean loss, or to the sum of the losses and their number.
Criterion = Callable[[Any, Any], Any]


def counted(criterion: Criterion, output: Any, label: Any, grid: Grid) -> tuple[Tensor, int]:
    """The sum of the losses, and how many they are.  Collective.

    A mean loss counts as one of all elements of the label.  Labels that are host arrays are cut as the first dims of
    the output, of a tree its first array.
    """
    first = output
    while isinstance(first, tuple | list | dict):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    layout = first.layout if isinstance(first, Tensor | DistArray) else None
    label = placed(label, grid, layout)
    found = criterion(output, label)
    if isinstance(found, tuple) and len(found) == 2:
        return check_loss(found[0]), _count(found[1])
    count = size_of(label)
    return check_loss(found) * count, count


def expected(criterion: Criterion, label: Any) -> int:
    """Return how many losses a label gives, as far as that is known before the forward pass.

    A criterion may say so by an attribute `count`, a function of the label.  Else all elements count, but for those of
    host arrays that `cross_entropy_sum` ignores.
    """
    made = criterion if isinstance(criterion, partial) else partial(criterion)
    known = getattr(criterion, "count", getattr(made.func, "count", None))
    if callable(known):
        return _count(known(label))
    if made.func is not cross_entropy_sum or not isinstance(label, np.ndarray):
        return size_of(label)
    given = signature(made).bind_partial()
    given.apply_defaults()
    return int(np.count_nonzero(label != given.arguments["ignore_index"]))


def _count(given: Any) -> int:
    """How many losses are summed."""
    try:
        count = int(given)
    except (TypeError, ValueError):
        count = -1
    if count < 0:
        raise EngineError(
            f"a criterion gives a mean loss, or (the sum of the losses, how many they are), not (…, {given!r})"
        )
    return count


def check_loss(loss: Any) -> Tensor:
    """Raise an EngineError unless this is a Tensor of one element."""
    if not isinstance(loss, Tensor):
        raise EngineError(
            f"a loss is a Tensor of one element, not {type(loss).__name__}; a criterion gives a mean loss, or (sum, "
            "count)"
        )
    if loss.size != 1:
        raise EngineError(
            f"a loss is a Tensor of one element, not of shape {loss.shape}; take its .mean(), or give a criterion that "
            "does"
        )
    return loss
