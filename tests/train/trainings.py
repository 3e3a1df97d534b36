"""Trainings that a configuration describes, as `parlinalg train` runs them: only this file knows how."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from parlinalg.datasets import Batch
from parlinalg.optim import AdamW
from parlinalg.train import Mesh
from parlinalg.train.job import Job
from parlinalg.train.job import train as main
from parlinalg.train.loop import batches
from parlinalg.train.sample import continuation

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
        self.mesh, self.job = mesh, Job(mesh, out, mesh.world if world is None else world)
        self.model, self.optimizer = self.job.task.model, self.job.trainer.optimizer
        self.scheduler, self.saving = self.job.trainer.scheduler, self.job.saving
        self.steps_wanted = self.job.steps

    @property
    def offload(self) -> Any:
        """What lies elsewhere, as `parlinalg.offload.Offload`; None if nothing does."""
        return self.job.offload

    @property
    def made(self) -> int:
        """Steps made."""
        return self.job.trainer.made

    @property
    def skipped(self) -> int:
        """Steps left out."""
        return self.job.trainer.skipped

    def away(self) -> AbstractContextManager[Any]:
        """A context in which that is offloaded which the configuration says."""
        return nullcontext() if self.offload is None else self.offload.apply()

    def batches(self, first: int | None = None, stop: int | None = None) -> Iterator[Sequence[Batch]]:
        """The microbatches of the steps from `first`, by default the next one, to `stop`, by default the last one."""
        start = self.made if first is None else first
        return batches(self.job.task.loader, self.steps_wanted if stop is None else stop, self.job.parts, start)

    def step(self, batch: Sequence[Batch]) -> Any:
        """Make a step; its loss, norm, learning rate and so on."""
        return self.job.trainer.step(batch)

    def steps(self, stop: int | None = None) -> list[Any]:
        """Make the steps to number `stop`, by default all."""
        return [self.step(batch) for batch in self.batches(stop=stop)]

    def held(self) -> dict[str, float]:
        """The measures of the data kept out."""
        return self.job.trainer.test(self.job.task.held)

    def write(self, prompt: str, tokens: int, **options: Any) -> str:
        """A text that a language model writes."""
        return continuation(self.model, self.job.task.data.tokenizer, prompt, tokens, **options)

    def spoil(self, change: Any) -> None:
        """Have the losses of batches be what `change` makes of them."""
        losses = self.job.task.losses
        self.job.task.losses = lambda batch, weight: change(*losses(batch, weight))  # type: ignore[method-assign]

    def state_dict(self) -> dict[str, Any]:
        """Where the training is: optimizer, schedule and loss scale."""
        return self.job.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.job.trainer.load_state_dict(state)

    def save(self, step: int, **more: Any) -> None:
        """Begin a checkpoint of what is now, by the name of a step."""
        self.saving.checkpoints.save(step, {**self.saving.state({}), **more})
