"""Keys of a configuration that are right alone, and may not go together.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parlinalg.errors import ConfigError
from parlinalg.parallel.handlers import ZeRO
from parlinalg.pipeline.schedules import make

if TYPE_CHECKING:
    from parlinalg.train.config import Config


def check_together(config: Config) -> None:
    """Raise a ConfigError, which says what would be right, if keys contradict each other."""
    if config.precision.dtype is not None and config.dtype not in ("float32", "float64"):
        raise ConfigError(
            f"with precision={config.precision.dtype!r} the optimizer keeps weights of dtype={config.dtype!r}: give "
            "dtype='float32' or 'float64', or leave precision out for a model that is in 16 bits throughout"
        )
    if config.clip_grad_norm is not None and config.clip_grad_value is not None:
        raise ConfigError(
            f"clip_grad_norm={config.clip_grad_norm} and clip_grad_value={config.clip_grad_value}: the norm would be "
            "of what the other clips; give one of them"
        )
    asked = None if config.schedule is None else config.schedule.microbatches
    if asked is not None and config.gradient_accumulation not in (1, asked):
        raise ConfigError(
            f"gradient_accumulation={config.gradient_accumulation} and schedule.microbatches={asked} both say into how "
            "many microbatches a batch is cut; give one of them, or the same number"
        )
    if "parameters" in config.offload and config.zero.stage in (1, 2):
        raise ConfigError(
            f"offload.parameters={config.offload['parameters']!r} with zero stage {config.zero.stage}, whose values "
            "lie in buckets that are gathered whole: use stage 3, which cuts them, or 0, or offload the optimizer alone"
        )
    if config.zero.stage and any(isinstance(h, ZeRO) for h in config.gradient_handler):
        raise ConfigError(f"zero has stage {config.zero.stage}, and gradient_handler names ZeRO too; give one of them")


def over_one_rank(config: Config) -> Config:
    """The configuration, without a schedule where there is no pipeline, or one of one rank: microbatches accumulate.

    So a training goes on without its pipeline, and no key beside `parallel` has to change.
    """
    if config.schedule is None or pipeline_size(config.parallel) != 1:
        return config
    if make(config.schedule.name, ranks=2, microbatches=4).asynchronous:
        raise ConfigError(
            f"schedule={config.schedule.name!r} steps within a batch, and a pipeline of one rank does not: leave the "
            "schedule out, and make batches as small as its microbatches"
        )
    parts = config.schedule.microbatches or config.gradient_accumulation
    return replace(config, schedule=None, gradient_accumulation=parts)


def pipeline_size(parallel: Mapping[str, Any]) -> object:
    """The ranks of the pipeline that the `parallel` dict of a configuration asks for, as it says."""
    pipeline = parallel.get("pipeline", 1)
    if isinstance(pipeline, Mapping):
        each = pipeline.get("tensor")
        return pipeline.get("size", len(each) if isinstance(each, Sequence) else 1)
    return pipeline
