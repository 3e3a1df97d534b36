"""ZB-H1: 1F1B whose backward passes are split, the weight parts in what would be bubbles (Qi et al., "Zero bubble
pipeline parallelism", 2024).

Every rank is idle for (p − 1) (F + I − W), where the weight part W of a backward pass takes no longer than its input
part I and the forward pass F, and m ≥ p; it holds min(p, m) microbatches, as rank r puts its weight parts off by r.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.pipeline.schedule import Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import one_stage_each, require_one_chunk, require_synchronous

NAME = "zb-h1"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule; any numbers of ranks and microbatches."""
    require_one_chunk(NAME, chunks)
    require_synchronous(NAME, every)
    return complete_schedule(
        NAME, microbatches, ranks, one_stage_each(ranks), (order(r, ranks, microbatches) for r in range(ranks))
    )


def order(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield the computations of one rank."""
    ahead = min(ranks - rank - 1, microbatches)
    for j in range(ahead):
        yield Instruction(Op.FORWARD, 0, j)
    for j in range(microbatches + rank):
        if j + ahead < microbatches:
            yield Instruction(Op.FORWARD, 0, j + ahead)
        if j < microbatches:
            yield Instruction(Op.BACKWARD_INPUT, 0, j)
        if j >= rank:
            yield Instruction(Op.BACKWARD_WEIGHT, 0, j - rank)
