"""Interleaved 1F1B: each rank holds v chunks, p stages apart (Narayanan et al., "Efficient large-scale language model
training on GPU clusters using Megatron-LM", 2021).

Bubble fraction (p − 1) / (v m + p − 1), for v times the messages; rank r holds
min(v m, 2 (p − r − 1) + (v − 1) p + 1) / v microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import Chunk, Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import require_synchronous

NAME = "interleaved"


def generate(ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None) -> Schedule:
    """Return the schedule; microbatches a multiple of the ranks, two or more chunks (default: 2)."""
    require_synchronous(NAME, every)
    chunks = 2 if chunks is None else chunks
    if chunks < 2:
        raise ScheduleError(f"{NAME} with chunks={chunks}: it takes 2 or more; with one chunk a rank take 1f1b")
    if microbatches % ranks:
        below = microbatches - microbatches % ranks
        near = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise ScheduleError(
            f"{NAME} over {ranks} ranks with microbatches={microbatches}: it takes multiples of {ranks}, such as {near}"
        )
    held = tuple(tuple(Chunk(c * ranks + rank) for c in range(chunks)) for rank in range(ranks))
    orders = (order(r, ranks, microbatches, chunks) for r in range(ranks))
    return complete_schedule(NAME, microbatches, ranks * chunks, held, orders)


def order(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Instruction]:
    """Yield the computations of one rank: chunks take turns, each with p microbatches."""
    total = microbatches * chunks
    ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)

    def passes(op: Op, k: int) -> Instruction:
        turn, within = divmod(k, ranks)
        chunk = turn % chunks if op is Op.FORWARD else chunks - 1 - turn % chunks
        return Instruction(op, chunk, turn // chunks * ranks + within)

    for k in range(ahead):
        yield passes(Op.FORWARD, k)
    for k in range(total):
        if k + ahead < total:
            yield passes(Op.FORWARD, k + ahead)
        yield passes(Op.BACKWARD, k)
