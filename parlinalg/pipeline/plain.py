"""Orders for what a schedule is not made for: passes without a way back, and few microbatches.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from parlinalg.pipeline.schedule import Instruction, Op, Schedule, complete


def passes(schedule: Schedule, microbatches: int) -> Schedule:
    """The forward passes alone of any number of microbatches, on the ranks and chunks of a schedule.

    Units of as many microbatches as there are ranks go through the first chunks, then through the second.
    """
    chunks = schedule.chunks
    orders = [list(_forward(schedule, rank, microbatches)) for rank in range(schedule.ranks)]
    return complete(
        f"{schedule.name}, forward", microbatches, schedule.stages, chunks, orders, asynchronous=True
    )  # fmt: skip


def once(schedule: Schedule) -> Schedule:
    """One microbatch of each copy of the model through all chunks of a schedule; back to the gradients of inputs too,
    where the schedule computes those of parameters apart."""
    count = schedule.copies
    apart = any(i.op is Op.BACKWARD_INPUT for order in schedule.orders for i in order)
    orders = []
    for rank in range(schedule.ranks):
        forward = list(_forward(schedule, rank, count))
        back = [Instruction(Op.BACKWARD_INPUT, i.chunk, i.microbatch) for i in reversed(forward)]
        orders.append([*forward, *(back if apart else ())])
    name = f"{schedule.name}, once"
    return complete(name, count, schedule.stages, schedule.chunks, orders, asynchronous=True)


def flushed(schedule: Schedule, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes in the opposite order, on the ranks and chunks of a schedule: what
    any number of microbatches can do."""
    orders = []
    for rank in range(schedule.ranks):
        forward = list(_forward(schedule, rank, microbatches))
        back = [Instruction(Op.BACKWARD, i.chunk, i.microbatch) for i in reversed(forward)]
        orders.append([*forward, *back])
    return complete(f"{schedule.name}, flushed", microbatches, schedule.stages, schedule.chunks, orders)


def _forward(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Instruction]:
    """A rank's forward passes, in an order that all ranks share, so that none waits for ever."""

    def turn(unit: tuple[int, int]) -> tuple[int, ...]:
        c, j = unit
        stage = schedule.chunks[rank][c].stage
        return j // schedule.ranks, stage // schedule.ranks, j % schedule.ranks, stage % schedule.ranks

    held = schedule.chunks[rank]
    units = [(c, j) for c in range(len(held)) for j in range(microbatches) if held[c].copy == schedule.copy_of(j)]
    for c, j in sorted(units, key=turn):
        yield Instruction(Op.FORWARD, c, j)
