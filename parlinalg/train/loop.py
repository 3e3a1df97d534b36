"""Steps of training, and measuring on data kept out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from parlinalg.autograd import Tensor, no_grad, no_sync
from parlinalg.datasets import Batch
from parlinalg.errors import EngineError
from parlinalg.nn import training_step
from parlinalg.nn.auxiliary import term_weights
from parlinalg.optim import Optimizer, Scheduler
from parlinalg.parallel.precision import LossScaler, overflowing
from parlinalg.train.task import Batches, Outcome, Task
from parlinalg.train.update import Update, Updated

if TYPE_CHECKING:
    from parlinalg.pipeline.worker import Worker


@dataclass
class Trainer:
    """A task in training.

    Attributes
    ----------
    task : Task
    update : Update
        What changes the parameters by their gradients.
    scheduler : Scheduler
        Counts the steps that changed parameters.
    worker : Worker or None
        What runs the stages, where the model is in a pipeline.
    made, skipped : int
        Steps made, and of these the ones left out.
    """

    task: Task
    update: Update
    scheduler: Scheduler
    worker: Worker | None = None
    made: int = 0
    skipped: int = 0

    @property
    def optimizer(self) -> Optimizer:
        return self.update.optimizer

    @property
    def scaler(self) -> LossScaler | None:
        return self.update.scaler

    @property
    def asynchronous(self) -> bool:
        """Whether stages make their steps at different times; then one of `step` is all of a batch's."""
        return self.worker is not None and self.worker.schedule.asynchronous

    def step(self, parts: Sequence[Batch]) -> Outcome:
        """One step from the microbatches of one batch.  Collective.

        Raises
        ------
        EngineError
            On all ranks, if the loss is not finite and such steps are not left out.
        """
        count = sum(part.count for part in parts)  # known before the first backward pass
        scale = self.update.scale
        sums = self._backward(parts, 1.0 if self.asynchronous else scale / max(1, count))
        means = _means(sums, count)
        lr = self.optimizer.lr
        if not math.isfinite(means["loss"]) and not self.update.skips:
            self._refuse(means["loss"])
        norm, changed = Updated(math.nan, True)  # of an asynchronous schedule, that made its steps itself
        if not self.asynchronous:
            norm, changed = self.update(math.isfinite(means["loss"]), scale)
        if changed:
            self.scheduler.step()
        else:
            self.skipped += 1
        self.made += 1
        return Outcome(
            means.pop("loss"),
            count,
            sum(map(len, parts)),
            lr,
            norm,
            None if self.scaler is None else scale,
            not changed,
            means,
        )

    def _refuse(self, loss: float) -> None:
        """Raise for a loss that is not finite: every step from here on would be made of nothing else."""
        self.optimizer.zero_grad()
        lr = self.optimizer.lr
        raise EngineError(
            f"step {self.made + 1}: the loss is {loss}, and so would be all that follow; lower the learning rate (now "
            f"{lr:g}), let it rise slowly by lr_schedule=dict(warmup=100), clip by clip_grad_norm=1.0, or leave such "
            "steps out by skip_nonfinite=True"
        )

    def _backward(self, parts: Sequence[Batch], factor: float) -> dict[str, float]:
        """The gradients of the sum of the losses times a factor; the sums of the losses and of further measures."""
        told = nullcontext() if self.scaler is None else overflowing()
        if self.worker is not None:
            with told:
                return self.worker.step(parts, self.task, self.made, factor)
        sums: dict[str, float] = defaultdict(float)
        weights = term_weights([len(part) for part in parts], [part.count for part in parts])
        for i, part in enumerate(parts):
            alone = nullcontext() if i == len(parts) - 1 else no_sync()
            told = nullcontext() if self.scaler is None else overflowing()
            with alone, told, training_step(self.made, part.offset):
                loss, _, measures = self.task.losses(part, weights[i])
                (loss * factor).backward()
            _add(sums, loss, measures)
        return sums

    def test(self, held: Iterable[Batch]) -> dict[str, float]:
        """The means of the loss and the measures over all targets of these batches that count.  Collective."""
        self.task.model.eval()
        sums: dict[str, float] = defaultdict(float)
        total = 0
        try:
            with no_grad():
                for several in _together(held, 1 if self.worker is None else self.worker.schedule.microbatches):
                    total += sum(batch.count for batch in several)
                    for name, value in self._forward(several).items():
                        sums[name] += value
        finally:
            self.task.model.train()
        return _means(sums, total)

    def _forward(self, several: Sequence[Batch]) -> dict[str, float]:
        """The sums of the losses and measures of batches."""
        if self.worker is not None:
            return self.worker.forward(several, self.task)
        sums: dict[str, float] = defaultdict(float)
        for batch in several:
            loss, _, measures = self.task.losses(batch)
            _add(sums, loss, measures)
        return sums

    def state_dict(self) -> dict[str, Any]:
        """What, beside the parameters, a training needs to go on as if it had not stopped, on any grid.  Collective."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "made": self.made,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave: the next batch is `next(batches(…, start=trainer.made))`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.made, self.skipped = int(state["made"]), int(state["skipped"])


def _add(sums: dict[str, float], loss: Tensor, measures: Mapping[str, float]) -> None:
    for name, value in {"loss": loss.item(), **measures}.items():
        sums[name] += float(value)


def _means(sums: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: value / max(1, count) for name, value in sums.items()}


def batches(loader: Batches, steps: int, parts: int, start: int = 0) -> Iterator[list[Batch]]:
    """The microbatches of so many steps, epoch after epoch, from step `start` on: nothing before it is read."""
    made, (epoch, skip) = start, divmod(start, len(loader))
    while True:
        for batch in loader.epoch(epoch, parts, skip):
            if made >= steps:
                return
            made += 1
            yield batch
        epoch, skip = epoch + 1, 0


def _together(held: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    """At most so many batches at a time."""
    iterator = iter(held)
    while several := list(islice(iterator, most)):
        yield several
