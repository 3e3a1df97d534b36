"""Steps of training, and measuring on data kept out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.autograd import Tensor, no_grad, no_sync
from parlinalg.datasets import Batch
from parlinalg.nn import training_step
from parlinalg.optim import Optimizer, Scheduler
from parlinalg.parallel.clip import clip_gradient_value
from parlinalg.parallel.precision import LossScaler, clipping, examine, overflowing
from parlinalg.train.task import Batches, Outcome, Task


@dataclass
class Trainer:
    """A task in training.

    Attributes
    ----------
    task : Task
    optimizer : Optimizer
    scheduler : Scheduler
        Counts the steps that changed parameters.
    clip : float or None
        The largest norm of the gradient of the whole model.
    clip_value : float or None
        The largest element of the gradient.
    scaler : LossScaler or None
    skip_nonfinite : bool
        Whether a step whose loss or gradient is not finite leaves all as it is; with a scaler it always does.
    made, skipped : int
        Steps made, and of these the ones left out.
    """

    task: Task
    optimizer: Optimizer
    scheduler: Scheduler
    clip: float | None = None
    clip_value: float | None = None
    scaler: LossScaler | None = None
    skip_nonfinite: bool = False
    made: int = 0
    skipped: int = 0

    def step(self, parts: Sequence[Batch]) -> Outcome:
        """One step from the microbatches of one batch.  Collective."""
        count = sum(part.count for part in parts)  # known before the first backward pass
        scale = 1.0 if self.scaler is None else self.scaler.scale
        sums: dict[str, float] = defaultdict(float)
        for i, part in enumerate(parts):
            alone = nullcontext() if i == len(parts) - 1 else no_sync()
            told = nullcontext() if self.scaler is None else overflowing()
            with alone, told, training_step(self.made, part.offset):
                loss, _, measures = self.task.losses(part)
                (loss * (scale / max(1, count))).backward()
            _add(sums, loss, measures)
        means = _means(sums, count)
        lr = self.optimizer.lr
        norm, skip = self._update(scale, math.isfinite(means["loss"]))
        self.made += 1
        return Outcome(
            means.pop("loss"),
            count,
            sum(map(len, parts)),
            lr,
            norm,
            None if self.scaler is None else scale,
            skip,
            means,
        )

    def _update(self, scale: float, finite: bool) -> tuple[float, bool]:
        """Change the parameters by their gradients, which hold the scale; the norm, and whether that was left out."""
        parameters = self.optimizer.parameters
        found = examine(parameters, scale)
        finite = finite and found.finite
        skip = not finite and (self.skip_nonfinite or self.scaler is not None)
        if skip:
            self.skipped += 1
        else:
            if self.clip_value is not None and finite:
                most = min(float(np.finfo(np.float32).max), *(_most(p.dtype) for p in parameters))
                clip_gradient_value(parameters, min(self.clip_value * scale, most))
            self.optimizer.step(clipping(found.norm, self.clip) / scale)
            self.scheduler.step()
        if self.scaler is not None:
            self.scaler.update(finite)
        self.optimizer.zero_grad()
        return found.norm, skip

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


def _most(dtype: np.dtype[Any]) -> float:
    """The largest number of a dtype that gradients have."""
    return 65504.0 if dtype == np.float16 else math.inf


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
