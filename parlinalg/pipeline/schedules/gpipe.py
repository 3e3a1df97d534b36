"""GPipe: all forward passes, then all backward passes (Huang et al., "GPipe: efficient training of giant neural
networks using pipeline parallelism", 2019).

Bubble fraction (p − 1) / (m + p − 1); every rank holds all m microbatches.  The backward passes go in the forward
order, as in the other schedules, so that gradients are summed in the same order in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.pipeline.schedule import Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import one_stage_each, require_one_chunk, require_synchronous

NAME = "gpipe"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule; any numbers of ranks and microbatches."""
    require_one_chunk(NAME, chunks)
    require_synchronous(NAME, every)
    return complete_schedule(
        NAME, microbatches, ranks, one_stage_each(ranks), (order(microbatches) for _ in range(ranks))
    )


def order(microbatches: int) -> Iterator[Instruction]:
    """Yield the computations of any rank."""
    for op in (Op.FORWARD, Op.BACKWARD):
        for j in range(microbatches):
            yield Instruction(op, 0, j)
