"""A model as this rank has it: whole on its grid, or its stages of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array import zeros
from parlinalg.autograd import Parameter
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import Module
from parlinalg.optim import Optimizer
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline import PipelineModel, Schedule, split
from parlinalg.pipeline.asynchronous import AsynchronousWorker
from parlinalg.pipeline.worker import Worker
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh
from parlinalg.train.pipelines import schedule_for
from parlinalg.train.update import Update


def staged(config: Config, mesh: Mesh, model: Module, schedule: Schedule | None = None, sample: Any = None) -> Any:
    """A model that is declared only, with the values of the configuration's seed: whole, or this rank's stages of it.

    Collective.

    Parameters
    ----------
    schedule : Schedule, optional
        By which it is cut; by default the configuration's.
    sample : array, or callable that makes one
        What the model takes of a microbatch, by which a partition counts or measures.
    """
    schedule = schedule or schedule_for(config, mesh.parallel)
    if schedule is not None:
        model = split(model, mesh.place, schedule, mesh.parallel.partition, sample)
    return model.initialize(config.seed)


def worker_of(
    model: PipelineModel, schedule: Schedule, update: Update, reducer: GradientReducer | None
) -> Worker:  # fmt: skip
    """What runs a model's stages by a schedule; collective.  The update then looks at all stages.

    Raises
    ------
    ConfigError
        If the schedule cannot train this model, or make steps as the update does.
    """
    if schedule.asynchronous:
        update.check_asynchronous(schedule.name)
        return AsynchronousWorker(model, schedule, update.optimizer, reducer, update.of_one_stage)
    worker = Worker(model, schedule, reducer)
    update.examine = worker.examine
    return worker


def optimizer_of(
    make: Callable[[Sequence[Parameter]], Optimizer], parameters: Sequence[Parameter], grid: Grid
) -> Optimizer:  # fmt: skip
    """The optimizer of these parameters; of a stage without any, such as one of an activation, one of none."""
    own = parameters or [Parameter(zeros((0,), grid, Layout(None), np.float32), "none")]
    optimizer = make(own)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the function that is to make an optimizer gives {optimizer!r}: it takes the parameters and returns an "
            "Optimizer, such as lambda parameters: AdamW(parameters, lr=1e-3)"
        )
    if not parameters:
        optimizer.parameters = []
        for group in optimizer.param_groups:
            group["params"] = []
    return optimizer
