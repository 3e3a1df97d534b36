"""ZB-V: two chunks a rank, placed in a V, and split backward passes (Qi et al., "Pipeline parallelism with controllable
memory", 2024).

Rank r holds stages r and 2 p − 1 − r, so that the first rank is the last one too.  Where F, I and W take the same time
no rank is idle between its first and its last computation, and none holds more than p microbatches, as in 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.pipeline.schedule import Chunk, Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import require_synchronous, require_two_chunks

NAME = "zb-v"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule; any numbers of ranks and microbatches (those below 2 p − 1 leave bubbles)."""
    require_synchronous(NAME, every)
    require_two_chunks(NAME, chunks, "a rank holds the two stages at the same height of the V")
    held = tuple((Chunk(rank), Chunk(2 * ranks - 1 - rank)) for rank in range(ranks))
    orders = ((i for i in order(r, ranks, microbatches) if i.microbatch < microbatches) for r in range(ranks))
    return complete_schedule(NAME, microbatches, 2 * ranks, held, orders)


def order(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield the computations of one rank, of at least the 2 p − 1 microbatches that the pattern is made of."""
    total = max(microbatches, 2 * ranks - 1)
    counts: dict[tuple[Op, int], int] = {}

    def do(op: Op, chunk: int) -> Instruction:
        j = counts.get((op, chunk), 0)
        counts[op, chunk] = j + 1
        return Instruction(op, chunk, j)

    forward, inward, weight = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
    for _ in range(2 * (ranks - rank) - 1):  # down the V
        yield do(forward, 0)
    for _ in range(rank):
        yield do(forward, 1)
        yield do(forward, 0)
    for _ in range(ranks - rank):  # up again, and back from its end
        for op in (forward, inward, weight):
            yield do(op, 1)
    for k in range(total - ranks):
        if k + 2 * ranks - 1 - rank < total:
            yield do(forward, 0)
        for op, chunk in ((inward, 0), (weight, 0), (forward, 1), (inward, 1), (weight, 1)):
            yield do(op, chunk)
    for _ in range(rank):  # the rest: weight parts come last, as nobody waits for them
        yield do(inward, 0)
        yield do(inward, 1)
    for _ in range(ranks - rank):
        yield do(inward, 0)
        yield do(weight, 0)
    for chunk in (1, 0):
        for _ in range(rank):
            yield do(weight, chunk)
