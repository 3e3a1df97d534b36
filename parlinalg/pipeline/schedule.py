"""A pipeline schedule as data: for each rank, the order of its instructions.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from parlinalg.errors import ScheduleError


class Op(Enum):
    """The operation of an instruction.

    BACKWARD is the whole derivative of a chunk; zero-bubble schedules run its two parts apart: BACKWARD_INPUT, which
    the stage before waits for, and BACKWARD_WEIGHT, for which no stage waits.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "send forward"
    RECEIVE_FORWARD = "receive forward"
    SEND_BACKWARD = "send backward"
    RECEIVE_BACKWARD = "receive backward"
    REDUCE_GRADIENTS = "reduce gradients"
    STEP = "step"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SENDS = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECEIVES = frozenset({Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD})
AHEAD = 2
"""Receives that are posted before they are due."""


@dataclass(frozen=True)
class Chunk:
    """A stage held by a pipeline rank; `copy` numbers the replicas of the model that a schedule trains at once."""

    stage: int
    copy: int = 0


@dataclass(frozen=True)
class Instruction:
    """One step of a rank's order.

    Attributes
    ----------
    op : Op
    chunk : int
        Which of this rank's chunks.  A message of chunk c: SEND_FORWARD sends its output, RECEIVE_FORWARD receives its
        input, SEND_BACKWARD sends the gradient of its input, RECEIVE_BACKWARD receives the gradient of its output.
    microbatch : int
        Of REDUCE_GRADIENTS and STEP in asynchronous schedules: the last one whose gradient is in it; else −1.
    peer : int
        The pipeline rank at the other end of a message; else −1.
    """

    op: Op
    chunk: int = 0
    microbatch: int = -1
    peer: int = -1


@dataclass(frozen=True)
class Schedule:
    """The instructions of every rank of a pipeline, in order.

    A send never blocks, a receive waits for its message.  Messages are matched by their kind, copy, stage of the
    receiver and microbatch.  Neighbouring stages on one rank need none: the worker hands over.

    Attributes
    ----------
    name : str
    ranks, microbatches, stages : int
    chunks : tuple of tuple of Chunk
        By pipeline rank, what it holds.
    orders : tuple of tuple of Instruction
        By pipeline rank.  A synchronous order ends with one REDUCE_GRADIENTS and one STEP, an asynchronous one has them
        inside.
    asynchronous : bool
        True if microbatches are in flight while the weights change.
    versions : tuple of int
        By rank, the versions of the weights it keeps: 1 in synchronous schedules.
    weights : tuple of tuple of int
        By rank and microbatch, the STEPs behind the weights that the microbatch works with, forward and backward; empty
        in synchronous schedules, where there are none before it.
    """

    name: str
    ranks: int
    microbatches: int
    stages: int
    chunks: tuple[tuple[Chunk, ...], ...]
    orders: tuple[tuple[Instruction, ...], ...]
    asynchronous: bool = False
    versions: tuple[int, ...] = ()
    weights: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", (1,) * self.ranks)

    @cached_property
    def copies(self) -> int:
        """The replicas of the model: 2 where microbatches enter at both ends, else 1."""
        return 1 + max((chunk.copy for held in self.chunks for chunk in held), default=0)

    def held(self, rank: int) -> list[int]:
        """Return the stages that a pipeline rank holds, in the order of its chunks."""
        return [chunk.stage for chunk in self.chunks[rank]]

    def copy_of(self, microbatch: int) -> int:
        """Return the replica that a microbatch passes through."""
        return microbatch % self.copies

    @cached_property
    def _holders(self) -> dict[Chunk, int]:
        return {chunk: rank for rank, held in enumerate(self.chunks) for chunk in held}

    def holder(self, stage: int, copy: int = 0) -> int:
        """Return the pipeline rank that holds a stage.

        Raises
        ------
        ScheduleError
            If no rank does.
        """
        try:
            return self._holders[Chunk(stage, copy)]
        except KeyError:
            raise ScheduleError(
                f"no rank of {self.name} holds stage {stage} of copy {copy}: it has stages 0 to {self.stages - 1}, "
                f"copies 0 to {self.copies - 1}"
            ) from None

    def weights_of(self, rank: int, microbatch: int) -> int:
        """Return the STEPs behind the weights that a microbatch works with on a rank."""
        return self.weights[rank][microbatch] if self.weights else 0


def complete_schedule(
    name: str, microbatches: int, stages: int, chunks: Iterable[Iterable[Chunk]],
    computed: Iterable[Iterable[Instruction]], *, asynchronous: bool = False, versions: tuple[int, ...] = (),
    weights: tuple[tuple[int, ...], ...] = (),
) -> Schedule:  # fmt: skip
    """Return the schedule with each rank's computations `computed`, the messages between them, and the synchronous end.

    A chunk's input is received just before it is used, and what it gives is sent as soon as it is there.
    """
    held = tuple(tuple(of_rank) for of_rank in chunks)
    bare = Schedule(name, len(held), microbatches, stages, held, ())
    end = () if asynchronous else (Instruction(Op.REDUCE_GRADIENTS), Instruction(Op.STEP))
    orders = tuple((*_with_messages(bare, rank, of_rank), *end) for rank, of_rank in enumerate(computed))
    return Schedule(name, len(held), microbatches, stages, held, orders, asynchronous, versions, weights)


def needs(schedule: Schedule, rank: int, compute: Instruction) -> Instruction | None:
    """Return the receive that a computation of a rank needs, or None."""
    chunk = schedule.chunks[rank][compute.chunk]
    if compute.op is Op.FORWARD:
        return _message(schedule, rank, compute, Op.RECEIVE_FORWARD, chunk.stage - 1)
    if compute.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return _message(schedule, rank, compute, Op.RECEIVE_BACKWARD, chunk.stage + 1)
    return None


def gives(schedule: Schedule, rank: int, compute: Instruction) -> Instruction | None:
    """Return the send that follows a computation of a rank, or None."""
    chunk = schedule.chunks[rank][compute.chunk]
    if compute.op is Op.FORWARD:
        return _message(schedule, rank, compute, Op.SEND_FORWARD, chunk.stage + 1)
    if compute.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return _message(schedule, rank, compute, Op.SEND_BACKWARD, chunk.stage - 1)
    return None


def _message(schedule: Schedule, rank: int, compute: Instruction, op: Op, stage: int) -> Instruction | None:
    if not 0 <= stage < schedule.stages:
        return None
    peer = schedule.holder(stage, schedule.chunks[rank][compute.chunk].copy)
    return Instruction(op, compute.chunk, compute.microbatch, peer) if peer != rank else None


def _with_messages(schedule: Schedule, rank: int, computed: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield a rank's computations with their messages, which go to the same peers in every microbatch."""
    known: dict[tuple[Op, int], tuple[Instruction | None, Instruction | None]] = {}
    for compute in computed:
        kind = compute.op, compute.chunk
        if kind not in known:
            known[kind] = needs(schedule, rank, compute), gives(schedule, rank, compute)
        before, behind = known[kind]
        if before is not None:
            yield Instruction(before.op, before.chunk, compute.microbatch, before.peer)
        yield compute
        if behind is not None:
            yield Instruction(behind.op, behind.chunk, compute.microbatch, behind.peer)


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Return a schedule of the forward passes alone of any number of microbatches, on a schedule's ranks and chunks.

    Units of as many microbatches as there are ranks go through the first chunks, then through the second.
    """
    chunks = schedule.chunks
    orders = [list(_forward(schedule, rank, microbatches)) for rank in range(schedule.ranks)]
    return complete_schedule(
        f"{schedule.name}, forward", microbatches, schedule.stages, chunks, orders, asynchronous=True
    )  # fmt: skip


def one_microbatch(schedule: Schedule) -> Schedule:
    """Return a schedule of one microbatch of each copy of the model through all chunks of a schedule, and back to the
    gradients of inputs where the schedule computes those of parameters apart.
    """
    count = schedule.copies
    apart = any(i.op is Op.BACKWARD_INPUT for order in schedule.orders for i in order)
    orders = []
    for rank in range(schedule.ranks):
        forward = list(_forward(schedule, rank, count))
        back = [Instruction(Op.BACKWARD_INPUT, i.chunk, i.microbatch) for i in reversed(forward)]
        orders.append([*forward, *(back if apart else ())])
    name = f"{schedule.name}, once"
    return complete_schedule(name, count, schedule.stages, schedule.chunks, orders, asynchronous=True)


FLUSHED = ", flushed"
"""The end of the names that `forward_then_backward` gives."""


def forward_then_backward(schedule: Schedule, microbatches: int) -> Schedule:
    """Return a schedule of all forward passes, then all backward passes in the opposite order, for any number of
    microbatches on a schedule's ranks and chunks.
    """
    orders = []
    for rank in range(schedule.ranks):
        forward = list(_forward(schedule, rank, microbatches))
        back = [Instruction(Op.BACKWARD, i.chunk, i.microbatch) for i in reversed(forward)]
        orders.append([*forward, *back])
    return complete_schedule(schedule.name + FLUSHED, microbatches, schedule.stages, schedule.chunks, orders)


def _forward(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Instruction]:
    """Yield a rank's forward passes, in an order that all ranks share, so that none deadlocks."""

    def turn(unit: tuple[int, int]) -> tuple[int, ...]:
        c, j = unit
        stage = schedule.chunks[rank][c].stage
        return j // schedule.ranks, stage // schedule.ranks, j % schedule.ranks, stage % schedule.ranks

    held = schedule.chunks[rank]
    units = [(c, j) for c in range(len(held)) for j in range(microbatches) if held[c].copy == schedule.copy_of(j)]
    for c, j in sorted(units, key=turn):
        yield Instruction(Op.FORWARD, c, j)


def with_steps(computed: Iterable[Instruction], every: int) -> Iterator[Instruction]:
    """Yield a rank's computations, and a step after every so many backward passes."""
    for instruction in computed:
        yield instruction
        j = instruction.microbatch
        if instruction.op is Op.BACKWARD and (j + 1) % every == 0:
            yield Instruction(Op.REDUCE_GRADIENTS, 0, j)
            yield Instruction(Op.STEP, 0, j)


def versions_kept(order: Iterable[Instruction], weights: Sequence[int]) -> int:
    """Return the most versions a rank keeps at once: the newest one, and all that are still to be used.

    Parameters
    ----------
    order : iterable of Instruction
        The rank's.
    weights : sequence of int
        By microbatch, the steps behind the weights it works with.
    """
    steps, left = 0, Counter(weights)  # left: by version, the microbatches still to use it
    there, most = {0}, 1
    for instruction in order:
        if instruction.op is Op.STEP:
            if not left[steps]:
                there.discard(steps)
            steps += 1
            there.add(steps)
            most = max(most, len(there))
        elif instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            used = weights[instruction.microbatch]
            left[used] -= 1
            if not left[used]:
                there.discard(used)
    return most
