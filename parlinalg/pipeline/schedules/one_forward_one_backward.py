"""1F1B: a forward and a backward pass alternately (PipeDream-flush: Narayanan et al., "Memory-efficient
pipeline-parallel DNN training", 2021).

Bubble fraction (p − 1) / (m + p − 1), as GPipe's, but rank r holds only min(p − r, m) microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.pipeline.schedule import Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import one_stage_each, require_one_chunk, require_synchronous

NAME = "1f1b"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule; any numbers of ranks and microbatches."""
    require_one_chunk(NAME, chunks)
    require_synchronous(NAME, every)
    return complete_schedule(
        NAME, microbatches, ranks, one_stage_each(ranks), (order(r, ranks, microbatches) for r in range(ranks))
    )


def order(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield the computations of one rank: later ranks make fewer forward passes before their first backward pass."""
    ahead = min(ranks - rank - 1, microbatches)
    for j in range(ahead):
        yield Instruction(Op.FORWARD, 0, j)
    for j in range(microbatches):
        if j + ahead < microbatches:
            yield Instruction(Op.FORWARD, 0, j + ahead)
        yield Instruction(Op.BACKWARD, 0, j)
