"""Steps of training, and the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor, no_grad, no_sync
from parlinalg.datasets import Batch, Loader
from parlinalg.nn import Module, training_step
from parlinalg.optim import Optimizer, Scheduler
from parlinalg.parallel import clip_gradient_norm
from parlinalg.train.metrics import correct

Criterion = Callable[[Tensor, DistArray], tuple[Tensor, int]]


@dataclass(frozen=True)
class Outcome:
    """What one step gave: the mean loss and the share of right answers over the step's whole batch."""

    loss: float
    accuracy: float
    samples: int
    lr: float


@dataclass
class Trainer:
    """A model in training.

    Attributes
    ----------
    model : Module
    optimizer : Optimizer
    scheduler : Scheduler
    criterion : callable
        From logits and targets to the sum of the losses and their number.
    clip : float or None
        The largest norm of the gradient of the whole model.
    """

    model: Module
    optimizer: Optimizer
    scheduler: Scheduler
    criterion: Criterion
    clip: float | None = None

    def step(self, parts: Sequence[Batch]) -> Outcome:
        """One step from the microbatches of one batch.  Collective."""
        samples = sum(len(part) for part in parts)
        lr = self.optimizer.lr
        loss_sum, right = 0.0, 0
        for i, part in enumerate(parts):
            alone = nullcontext() if i == len(parts) - 1 else no_sync()
            with alone, training_step(self.scheduler.steps, part.offset):
                logits = self.model(Tensor(part.x))
                loss, _ = self.criterion(logits, part.y)
                (loss * (1 / samples)).backward()
            loss_sum += float(loss.item())
            right += correct(logits.data, part.y)
        if self.clip is not None:
            clip_gradient_norm(self.optimizer.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return Outcome(loss_sum / samples, right / samples, samples, lr)

    def test(self, loader: Loader) -> float:
        """The share of right answers over all samples of a loader.  Collective."""
        self.model.eval()
        try:
            with no_grad():
                right = sum(correct(self.model(Tensor(batch.x)).data, batch.y) for batch in loader)
        finally:
            self.model.train()
        return right / max(1, len(loader.x))


def batches(loader: Loader, steps: int, parts: int) -> Iterator[list[Batch]]:
    """The microbatches of so many steps, epoch after epoch."""
    made, epoch = 0, 0
    while True:
        for batch in loader.epoch(epoch, parts):
            if made == steps:
                return
            made += 1
            yield batch
        epoch += 1
