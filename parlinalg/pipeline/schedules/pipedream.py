"""PipeDream: 1F1B that steps without a flush; weights are stashed, so that a microbatch's backward pass uses those of
its forward pass (Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019).

No bubbles once all ranks are at work.  With a step every microbatch, stage s does
W_s(t+1) = W_s(t) − η ∇_s f(W_0(t−p+1), …, W_{p−1}(t)), where t < 0 is 0; rank r keeps p − r versions of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.pipeline.schedule import Instruction, Schedule, complete_schedule, versions_kept, with_steps
from parlinalg.pipeline.schedules import one_stage_each, require_one_chunk, steps_per_run
from parlinalg.pipeline.schedules.one_forward_one_backward import order as flushed

NAME = "pipedream"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule of a run of steps, one every so many microbatches (default: 1); any numbers of ranks."""
    require_one_chunk(NAME, chunks)
    every = 1 if every is None else every
    steps_per_run(NAME, microbatches, every)
    weights = tuple(
        tuple(max(0, j - (ranks - rank - 1)) // every for j in range(microbatches)) for rank in range(ranks)
    )
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
