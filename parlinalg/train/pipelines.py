"""The pipeline schedule that a configuration asks for.  Pure."""

from __future__ import annotations

from parlinalg.errors import ConfigError, ScheduleError
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.train.config import Config
from parlinalg.train.options import Pipelining
from parlinalg.train.parallel import Parallel

__all__ = ["schedule_for"]


def microbatches_of(config: Config, pipeline: int) -> int:
    """Into how many a step's batch is cut: as `schedule.microbatches` says, or `gradient_accumulation`; where neither
    does, into as many as the pipeline has ranks."""
    asked = None if config.schedule is None else config.schedule.microbatches
    if asked is not None:
        return asked
    return config.gradient_accumulation if config.gradient_accumulation > 1 else pipeline


def rows_of_a_microbatch(config: Config, parallel: Parallel) -> int:
    """The most rows of a microbatch, on all data parallel ranks together."""
    parts = microbatches_of(config, parallel.pipeline) if parallel.pipeline > 1 else config.gradient_accumulation
    return -(-config.batch_size // parts)


def schedule_for(config: Config, parallel: Parallel) -> Schedule | None:
    """Return the schedule of a configuration's pipeline, or None where it has one rank.

    Raises
    ------
    ConfigError
        If the schedule cannot take the microbatches, ranks or chunks (the message says which it can), or a partition by
        hand does not have one number for each stage.
    """
    if parallel.pipeline == 1:
        return None
    wish = config.schedule or Pipelining()
    count = microbatches_of(config, parallel.pipeline)
    try:
        made = make_schedule(wish.name, parallel.pipeline, count, wish.chunks, every=wish.every)
    except ScheduleError as error:
        raise ConfigError(f"schedule: {error}") from error
    partition = parallel.partition
    if not isinstance(partition, str) and len(partition) != made.stages:
        chunks = made.stages // made.ranks if made.copies == 1 else 1
        held = f"{made.ranks} ranks" + (f" × {chunks} chunks" if chunks > 1 else "")
        raise ConfigError(
            f"parallel.pipeline.partition={list(partition)} has {len(partition)} numbers, but the schedule "
            f"{wish.name!r} has {made.stages} stages ({held}): give {made.stages} numbers, or a name such as 'uniform'"
        )
    return made
