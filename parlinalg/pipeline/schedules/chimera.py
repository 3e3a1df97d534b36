"""Chimera: two replicas of the model, their pipelines in opposite directions (Li and Hoefler, "Chimera: efficiently
training large-scale neural networks with bidirectional pipelines", 2021).

Microbatch j passes through replica j mod 2: one enters every two slots at each end.  With m = p the bubble fraction is
(p − 2) / (2 m + p − 2) where a backward pass takes as long as a forward pass, (p − 2) / (1.5 m + p − 2) where it takes
twice as long; rank r then holds p / 2 + 1 + min(r, p − 1 − r) microbatches, and two stages' weights, whose gradients
are summed over the replicas.  More microbatches are units of p, the first passes of one in the last bubbles of the one
before.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import Chunk, Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import require_synchronous, require_two_chunks

NAME = "chimera"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule; an even number of ranks, 2 or more microbatches."""
    require_synchronous(NAME, every)
    require_two_chunks(NAME, chunks, "a rank holds a stage of each of the two replicas")
    if ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ScheduleError(f"{NAME} over {ranks} ranks: it takes an even number of them, such as {near}")
    if microbatches < 2:
        raise ScheduleError(
            f"{NAME} with microbatches={microbatches}: it takes 2 or more, one or more for each replica"
        )
    held = tuple((Chunk(rank, 0), Chunk(ranks - 1 - rank, 1)) for rank in range(ranks))
    return complete_schedule(NAME, microbatches, ranks, held, (order(r, ranks, microbatches) for r in range(ranks)))


def order(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield the computations of one rank, by the slots they would have if all took one slot: no two have the same."""
    slots: dict[int, Instruction] = {}
    for j in range(microbatches):
        copy = j % 2
        stage = ranks - 1 - rank if copy else rank
        enters = j // ranks * 2 * ranks + j % ranks // 2 * 2
        slots[enters + stage] = Instruction(Op.FORWARD, copy, j)
        slots[enters + 2 * ranks - 1 - stage] = Instruction(Op.BACKWARD, copy, j)
    for slot in sorted(slots):
        yield slots[slot]
