"""What is trained: the part of a training that differs between a classifier and a language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.datasets import Batch
from parlinalg.nn import Module
from parlinalg.nn.auxiliary import AuxiliaryLosses

# From logits and targets to the sum of the losses and their number.
Criterion = Callable[[Tensor, DistArray], tuple[Tensor, int]]


@dataclass(frozen=True)
class Outcome:
    """What one step gave.

    Attributes
    ----------
    loss : float
        The mean over all targets of the step's whole batch.
    count, samples : int
        The targets, and the rows of the batch.
    lr : float
    norm : float
        Of the gradient before clipping.
    scale : float or None
        Of the loss, if it is scaled.
    skipped : bool
        Whether parameters stayed as they were, since the loss or a gradient was not finite.
    means : dict of str to float
        The task's further measures, over all targets.
    """

    loss: float
    count: int
    samples: int
    lr: float
    norm: float
    scale: float | None = None
    skipped: bool = False
    means: Mapping[str, float] = field(default_factory=dict)


class Batches(Protocol):
    """Batches in an order of their own for every epoch."""

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        """The batches of an epoch but for the first `skip`, each as a list of at most `parts` microbatches."""
        ...


class Task(ABC):
    """A model, its data, and the numbers that say how it goes.

    Attributes
    ----------
    data : object
        Printed at the start; has a `name`.
    model : Module
        Whole on its grid, or this rank's stages of it.
    loader : Batches
        To train on.
    held : iterable of Batch
        Kept out of training, to measure on.
    curves : dict of str to str
        What the picture shows: the name of a metric of the steps, and of the metric of the data kept out beside it, or
        an empty text.
    """

    data: Any
    model: Module
    loader: Batches
    held: Iterable[Batch]
    curves: ClassVar[Mapping[str, str]]

    @contextmanager
    def context(self, batch: Batch) -> Iterator[AuxiliaryLosses]:
        """Around the forward pass of a batch, or of each stage; gives the terms of the loss that layers add."""
        yield AuxiliaryLosses()

    @abstractmethod
    def losses_of(self, output: Any, batch: Batch) -> tuple[Tensor, int, dict[str, float]]:
        """Of what the model gives: the sum of the losses, their number, sums of further measures.  Collective."""

    def losses(self, batch: Batch, weight: float | None = None) -> tuple[Tensor, int, dict[str, float]]:
        """The sum of the losses, with the terms that layers add, their number, and the sums of further measures.

        Collective.

        Parameters
        ----------
        batch : Batch
        weight : float, optional
            What the terms are multiplied by (`nn.auxiliary.term_weights`); by default as for a batch of its own.
        """
        with self.context(batch) as auxiliary:
            output = self.model(batch.x)
        total, count, measures = self.losses_of(output, batch)
        if auxiliary:
            total = total + auxiliary.total() * (max(1, count) if weight is None else weight)
        return total, count, measures

    @abstractmethod
    def metrics(self, outcome: Outcome, seconds: float) -> dict[str, float]:
        """The numbers of a step that took so long, for `metrics.jsonl`."""

    @abstractmethod
    def held_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """The numbers of the data kept out, for `metrics.jsonl`, from the means of the loss and of the measures."""

    @abstractmethod
    def layouts(self) -> str:
        """How the arrays that go in and out are cut, in a line."""

    @abstractmethod
    def held_line(self, metrics: Mapping[str, float]) -> str:
        """What the last measurement on the data kept out says, in a line."""

    def opening(self) -> dict[str, str]:
        """Further lines to say at the start: a head and a text each.  Collective."""
        return {}

    def closing(self, history: Sequence[Mapping[str, Any]]) -> list[str]:
        """Further lines to say of a training's steps at its end."""
        return []

    def leave(self, out: Path, speaks: bool, done: bool) -> tuple[list[str], list[str]]:
        """Write what is to be left in `out`, on the rank that speaks.  Collective.

        Parameters
        ----------
        out : Path
        speaks : bool
            Whether this rank writes what one rank writes.
        done : bool
            Whether all steps were made.

        Returns
        -------
        lines, files : list of str
            What to say, and the names of what is in `out`.
        """
        return [], []
