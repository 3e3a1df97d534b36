"""A model as this rank has it: whole on its grid, or its stages of it."""

from __future__ import annotations

from typing import Any

from parlinalg.nn import Module
from parlinalg.pipeline import Schedule
from parlinalg.pipeline.model import split
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh
from parlinalg.train.pipelines import schedule_for


def staged(config: Config, mesh: Mesh, model: Module, schedule: Schedule | None = None) -> Any:
    """A model that is declared only, with the values of the configuration's seed: whole, or this rank's stages of it.

    Collective.

    Parameters
    ----------
    schedule : Schedule, optional
        By which it is cut; by default the configuration's.
    """
    schedule = schedule or schedule_for(config, mesh.parallel)
    if schedule is not None:
        model = split(model, mesh.place, schedule, mesh.parallel.partition)
    return model.initialize(config.seed)
