"""The schedule of a configuration, and the stages of a model by it."""

from __future__ import annotations

from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.nn import Module
from parlinalg.pipeline import Schedule, make
from parlinalg.pipeline.model import split
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh
from parlinalg.train.options import Pipelining


def microbatches(config: Config, ranks: int) -> int:
    """Into how many microbatches a step's batch is cut.

    Parameters
    ----------
    ranks : int
        Of the pipeline.

    Raises
    ------
    ConfigError
        If the configuration says two different things.
    """
    told = None if config.schedule is None else config.schedule.microbatches
    if told is None:
        return config.gradient_accumulation if config.gradient_accumulation > 1 or ranks == 1 else ranks
    if config.gradient_accumulation not in (1, told):
        raise ConfigError(
            f"schedule.microbatches={told} and gradient_accumulation={config.gradient_accumulation} both say into how "
            "many microbatches a step's batch is cut: give one of them"
        )
    return told


def pipeline_schedule(config: Config, mesh: Mesh) -> Schedule:
    """The schedule of the mesh's pipeline.

    Raises
    ------
    ScheduleError
        If it cannot take these numbers; the message says which it can.
    """
    chosen = config.schedule or Pipelining()
    ranks = mesh.place.size
    return make(chosen.name, ranks, microbatches(config, ranks), chosen.chunks)


def staged(config: Config, mesh: Mesh, model: Module, schedule: Schedule | None = None) -> Any:
    """A model that is declared only, with the values of the configuration's seed: whole, or this rank's stages of it.

    Collective.

    Parameters
    ----------
    schedule : Schedule, optional
        By which it is cut; by default the configuration's.
    """
    if mesh.place.size == 1:
        return model.initialize(config.seed)
    cut = split(model, mesh.place, schedule or pipeline_schedule(config, mesh), mesh.parallel.partition)
    return cut.initialize(config.seed)
