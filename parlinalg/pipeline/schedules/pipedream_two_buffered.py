"""PipeDream-2BW: 1F1B that steps without a flush and keeps two versions of the weights ("double-buffered weights";
Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021).

All stages do W(t+1) = W(t) − η ∇f(W(t−1)), where W(−1) is W(0): the microbatches of a step use the weights before the
last step.  Two versions suffice where a step has p − 1 microbatches or more.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import Instruction, Schedule, complete_schedule, versions_kept, with_steps
from parlinalg.pipeline.schedules import one_stage_each, require_one_chunk, steps_per_run
from parlinalg.pipeline.schedules.one_forward_one_backward import order as flushed

NAME = "pipedream-2bw"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule of a run of steps, one every so many microbatches: at least p − 1 (default: all of them)."""
    require_one_chunk(NAME, chunks)
    every = microbatches if every is None else every
    steps = steps_per_run(NAME, microbatches, every)
    least = max(1, ranks - 1)
    if every < least and steps > 1:
        fits = [d for d in range(least, microbatches + 1) if microbatches % d == 0]
        raise ScheduleError(
            f"{NAME} over {ranks} ranks with every={every}: two versions of the weights suffice where a step has at "
            f"least {least} microbatches; of {microbatches} microbatches, every may be "
            f"{', '.join(map(str, fits)) or microbatches}"
        )
    of_microbatch = tuple(max(0, j // every - 1) for j in range(microbatches))
    weights = (of_microbatch,) * ranks
    orders = [tuple(order(rank, ranks, microbatches, every)) for rank in range(ranks)]
    versions = tuple(versions_kept(*both) for both in zip(orders, weights))
    return complete_schedule(
        NAME,
        microbatches,
        ranks,
        one_stage_each(ranks),
        orders,
        asynchronous=True,
        versions=versions,
        weights=weights,
    )


def order(rank: int, ranks: int, microbatches: int, every: int) -> Iterator[Instruction]:
    """Yield the computations and steps of one rank."""
    return with_steps(flushed(rank, ranks, microbatches), every)
