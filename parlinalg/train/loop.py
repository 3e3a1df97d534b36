"""Steps of training, and measuring on data kept out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from parlinalg.autograd import Tensor, no_grad, no_sync
from parlinalg.datasets import Batch
from parlinalg.nn import training_step
from parlinalg.optim import Optimizer, Scheduler
from parlinalg.parallel import clip_gradient_norm
from parlinalg.train.task import Batches, Outcome, Task


@dataclass
class Trainer:
    """A task in training.

    Attributes
    ----------
    task : Task
    optimizer : Optimizer
    scheduler : Scheduler
    clip : float or None
        The largest norm of the gradient of the whole model.
    """

    task: Task
    optimizer: Optimizer
    scheduler: Scheduler
    clip: float | None = None

    def step(self, parts: Sequence[Batch]) -> Outcome:
        """One step from the microbatches of one batch.  Collective."""
        count = sum(part.y.size for part in parts)  # known before the first backward pass; none is ignored in training
        lr, norm = self.optimizer.lr, None
        sums: dict[str, float] = defaultdict(float)
        for i, part in enumerate(parts):
            alone = nullcontext() if i == len(parts) - 1 else no_sync()
            with alone, training_step(self.scheduler.steps, part.offset):
                loss, _, measures = self.task.losses(part)
                (loss * (1 / count)).backward()
            _add(sums, loss, measures)
        if self.clip is not None:
            norm = clip_gradient_norm(self.optimizer.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        means = _means(sums, count)
        return Outcome(means.pop("loss"), count, sum(map(len, parts)), lr, norm, means)

    def test(self, held: Iterable[Batch]) -> dict[str, float]:
        """The means of the loss and the measures over all targets of these batches that count.  Collective."""
        self.task.model.eval()
        sums: dict[str, float] = defaultdict(float)
        total = 0
        try:
            with no_grad():
                for batch in held:
                    loss, count, measures = self.task.losses(batch)
                    _add(sums, loss, measures)
                    total += count
        finally:
            self.task.model.train()
        return _means(sums, total)


def _add(sums: dict[str, float], loss: Tensor, measures: Mapping[str, float]) -> None:
    for name, value in {"loss": loss.item(), **measures}.items():
        sums[name] += float(value)


def _means(sums: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: value / max(1, count) for name, value in sums.items()}


def batches(loader: Batches, steps: int, parts: int) -> Iterator[list[Batch]]:
    """The microbatches of so many steps, epoch after epoch."""
    made, epoch = 0, 0
    while True:
        for batch in loader.epoch(epoch, parts):
            if made == steps:
                return
            made += 1
            yield batch
        epoch += 1
