"""Trainings that a configuration describes, as `parlinalg train` runs them: only this file knows how."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parlinalg as pla
from parlinalg.comm import SingleComm
from parlinalg.optim import AdamW
from parlinalg.train import Mesh, run
from parlinalg.train.feed import Feed
from parlinalg.train.language import continuation
from parlinalg.train.recipes import recipe
from parlinalg.train.run import train as main

__all__ = ["Training", "batches", "in_update", "main"]


def in_update(patch: Any, number: int, call: Callable[[], object]) -> None:
    """Have a function be called in the update of a step, counted from now on, of trainings with AdamW."""
    plain, updates = AdamW.step, []

    def step(self: Any, *args: Any, **options: Any) -> Any:
        updates.append(0)
        if len(updates) == number:
            call()
        return plain(self, *args, **options)

    patch.setattr(AdamW, "step", step)


def batches(loader: Any, steps: int, parts: int, start: int = 0) -> Iterator[list[Any]]:
    """The microbatches of so many steps, epoch after epoch, from step `start` on: nothing before it is read."""
    feed, each = Feed(loader, SingleComm()), len(loader)
    while start < steps:
        taken = feed.at(*divmod(start, each))
        for _ in range(min(steps, start - start % each + each) - start):
            yield taken.take(parts)
            start += 1


@dataclass(frozen=True)
class Step:
    """What a step gave: see `Trainer.metrics`."""

    loss: float
    norm: float
    lr: float
    samples: int
    scale: float | None
    skipped: bool


class Training:
    """A training on a mesh, step by step.

    Attributes
    ----------
    model, optimizer, scheduler
    saving
        Its checkpoints.
    steps_wanted : int
        The steps that the configuration asks for.
    """

    def __init__(self, mesh: Mesh, out: Path, world: Any = None) -> None:
        if world is None and mesh.world.size == 1:  # every rank may train alone, and one training writes to a folder
            out = out / f"alone-{os.getpid()}"
        self.mesh, self.out = mesh, out
        self.recipe = recipe(mesh.config, mesh)
        self.trainer, self.feed = run.trainer_of(mesh, self.recipe, out)
        self.engine = self.trainer.engine
        self.model, self.optimizer = self.engine.model, self.engine.optimizer
        self.scheduler: Any = self.trainer.lr_scheduler
        self.steps_wanted = mesh.config.steps_of(len(self.recipe.train))
        self._found: list[Step] = []
        self.trainer.hooks = [_Noting(self._found)]
        self.trainer.fit(self.feed, steps=0)  # the data are known
        self.saving = Saving(self)

    @property
    def offload(self) -> Any:
        """What lies elsewhere, as `parlinalg.offload.OffloadPlan`; None if nothing does."""
        return self.engine.memory_plan

    @property
    def made(self) -> int:
        """Steps made."""
        return self.trainer.step

    @property
    def skipped(self) -> int:
        """Steps left out."""
        return self.engine.skipped

    @contextmanager
    def away(self) -> Iterator[None]:
        """A context at whose end what is offloaded comes back."""
        try:
            yield
        finally:
            self.engine.restore()

    def batches(self, first: int | None = None, stop: int | None = None) -> Iterator[int]:
        """The numbers of the steps to make, each for a call of `step`."""
        start = self.made if first is None else first
        yield from range(start + 1, (self.steps_wanted if stop is None else stop) + 1)

    def step(self, number: int) -> Step:
        """Make the next step; its loss, norm, learning rate and so on."""
        (step,) = self.steps(number)
        return step

    def steps(self, stop: int | None = None) -> list[Step]:
        """Make the steps to number `stop`, by default all."""
        self._found.clear()
        self.trainer.fit(self.feed, steps=self.steps_wanted if stop is None else stop)
        return list(self._found)

    def held(self) -> dict[str, float]:
        """The measures of the data kept out."""
        self.trainer.evaluate(self.recipe.test, "held")
        found = self.trainer.metrics.items()
        return {name.removeprefix("held_"): value for name, value in found if name.startswith("held_")}

    def write(self, prompt: str, tokens: int, **options: Any) -> str:
        """A text that a language model writes."""
        data: Any = self.recipe.lines["data"]
        return continuation(self.model, data.tokenizer, prompt, tokens, **options)

    def spoil(self, change: Any) -> None:
        """Have the losses of batches be what `change` makes of them."""
        criterion = self.engine._criterion
        self.engine._criterion = lambda output, label: change(*criterion(output, label), {})[:2]

    def state_dict(self) -> dict[str, Any]:
        """Where the training is: optimizer, schedule and loss scale."""
        return self.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state)

    def save(self, step: int, **more: Any) -> None:
        """Begin a checkpoint of what is now, by the name of a step."""
        self.saving.checkpoints.save(step, {**self.saving.hook.state(self.trainer), **more})


class _Noting(pla.Hook):
    """Notes what each step gave."""

    def __init__(self, found: list[Step]) -> None:
        self.found = found

    def before_train_iter(self, trainer: Any) -> None:
        self.skipped = trainer.engine.skipped

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
        metrics, skipped = trainer.metrics, trainer.engine.skipped > self.skipped
        rows, scale = trainer.engine.rows, metrics.get("loss_scale")
        self.found.append(Step(loss, metrics["grad_norm"], metrics["lr"], rows, scale, skipped))


class Saving:
    """A training's checkpoints, by the hook that `parlinalg train` has."""

    def __init__(self, training: Training) -> None:
        self.trainer, self.folder = training.trainer, training.out / run.FOLDER
        hooks = run.hooks_of(training.mesh, training.recipe, training.out)
        self.hook: Any = next(hook for hook in hooks if isinstance(hook, pla.CheckpointHook))
        self.checkpoints = self.hook._checkpoints = self.hook.checkpoints(self.trainer)
        training.mesh.ends.callback(self.checkpoints.release)

    @property
    def best(self) -> float | None:
        """The best value of the metric by which checkpoints stay."""
        found: float | None = self.hook.best
        return found

    def resume(self, *, fall_back: bool = False) -> str:
        """Go on from the last checkpoint; what is said of it."""
        self.hook.fall_back = fall_back
        self.checkpoints.open(fresh=False)
        said: str = self.hook.restore(self.trainer, self.checkpoints)
        return said

    def after(self, step: int, metrics: dict[str, float]) -> None:
        """Make a checkpoint if one is due after a step of these metrics."""
        self.trainer.step, self.trainer.step_metrics = step, metrics
        self.hook.after_test(self.trainer)
        self.hook.after_train_iter(self.trainer, None, None, 0.0)

    def close(self) -> list[str]:
        """Wait until everything is written; the checkpoints that others have taken away."""
        return self.checkpoints.close()
