"""Losses and metrics of outputs and labels, and what the microbatches of a step weigh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.backend import namespace
from parlinalg.datasets.collate import leaves, mapped
from parlinalg.errors import EngineError
from parlinalg.grid import Grid
from parlinalg.nn.added_losses import term_weight
from parlinalg.train.feed import placed

#: From outputs and labels to a mean loss, or to the sum of the losses and their number.
Criterion = Callable[[Any, Any], Any]

#: From outputs and labels, both arrays, to a sum over all targets, the same on every rank.
Metric = Callable[[Any, Any], Any]


def placed_label(label: Any, output: Any, grid: Grid) -> Any:
    """Return a label as `DistArray`s: host arrays are cut as the first dims of the output, of a tree its first array.

    Collective.
    """
    first = next(leaves(output), None)
    layout = first.layout if isinstance(first, Tensor | DistArray) else None
    return placed(label, grid, layout)


def sum_of_losses(criterion: Criterion, output: Any, label: Any) -> tuple[Tensor, int]:
    """Return the sum of the losses, and how many they are.  Collective.

    A mean loss counts as one of all elements of the label.
    """
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


# ---------------------------------------------------------------------------------------------- metrics
def accuracy(logits: DistArray, targets: DistArray) -> int:
    """Return how many rows of logits are largest at their target: a metric for `initialize`.  Collective.

    Parameters
    ----------
    logits : DistArray
        [samples, classes]; the classes may be cut.
    targets : DistArray
        [samples], cut as the rows of `logits`.
    """
    grid, block = logits.grid, logits.block
    rows, classes = logits.layout.dims
    xp = namespace(block)
    count = xp.zeros(1, np.int64)
    if grid.inside:
        first = grid.block(logits.layout, logits.shape)[1]
        top = xp.full(block.shape[0], -np.inf, block.dtype)
        if block.shape[1]:
            block.max(axis=1, out=top)
        grid.comm(classes).all_reduce(top, op="max")
        column = targets.block - first.start
        here = xp.nonzero((column >= 0) & (column < len(first)))[0]
        count += (block[here, column[here]] >= top[here]).sum()
        grid.comm((*rows, *classes)).all_reduce(count)
    if grid.size < grid.world.size:
        grid.world.broadcast(count, 0)
    return int(count[0])


def number(name: str, given: Any) -> float:
    """Return the result of a metric as a number."""
    try:
        return float(given.item() if hasattr(given, "item") else given)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"the metric {name!r} gives {type(given).__name__}, not a number: a metric is a function of output and "
            f"label that returns a sum over the targets ({error})"
        ) from error


# ---------------------------------------------------------------------------------------------- trees of arrays
def detached(output: Any) -> Any:
    """Return the arrays of an output, or of a tree of them, without the tape."""
    return mapped(lambda leaf: leaf.data if isinstance(leaf, Tensor) else leaf, output)


def size_of(label: Any) -> int:
    """Return the elements of a label, or of all of them in a tree."""
    return sum(int(leaf.size) for leaf in leaves(label))


# ---------------------------------------------------------------------------------------------- microbatches
class MicrobatchWeights:
    """The microbatches of a step so far, and what each weighs: its loss counts as it has targets.

    Gradients are those of the sum of the losses divided by `reference`; the optimizer's step divides by what is left.

    Attributes
    ----------
    rows : int
    targets : float
    reference : float
        A number of targets that is known before the first backward pass; 0.0 until then.
    """

    def __init__(self) -> None:
        self.rows, self.targets, self.reference = 0, 0.0, 0.0
        self._whole: tuple[int, float] | None = None

    @contextmanager
    def expecting(self, rows: int, targets: int) -> Iterator[None]:
        """Return a context for the microbatches of a batch that has so many rows and targets in all."""
        self._whole = self.rows + rows, self.targets + targets
        try:
            yield
        finally:
            self._whole = None

    def refer_to(self, targets: float) -> None:
        """Use a number of targets as the reference, unless the step has one."""
        self.reference = self.reference or max(1.0, float(targets))

    @property
    def scale(self) -> float:
        """The factor of gradients beside that of the mean over all targets."""
        return max(1.0, self.targets) / self.reference

    def of_terms(self, rows: int, targets: int) -> float:
        """Return the weight of the terms that layers add, beside the sum of the losses of the next microbatch.

        They are means over its rows, so that they weigh as these do among the step's; where it is not known how many
        targets and rows are to come, as many a row are assumed as there were until now.
        """
        every, all_targets = self._whole or (self.rows + rows, self.targets + targets)
        return term_weight(rows, every, all_targets)
