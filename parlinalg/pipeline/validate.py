"""Validation of a schedule's orders: each instruction once, and after what it needs.  Pure.

What each rank can be told by its own order is checked here; that no ranks wait for each other is found by simulating.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Chunk,
    Instruction,
    Op,
    Schedule,
    gives,
    needs,
    versions_kept,
)

_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)
_LAST = (Op.BACKWARD, Op.BACKWARD_WEIGHT)  # after which a gradient is whole
_PRODUCER = {Op.SEND_FORWARD: (Op.FORWARD,), Op.SEND_BACKWARD: _BACKWARD}
_USER = {Op.RECEIVE_FORWARD: Op.FORWARD, Op.RECEIVE_BACKWARD: Op.BACKWARD}


def validate_orders(schedule: Schedule) -> None:
    """Check which rank holds which stage, and every rank's order on its own.

    Raises
    ------
    ScheduleError
        If a stage is held by no rank or by two; if an instruction is missing, there twice, or before what it needs; if
        a message goes to a wrong rank; if a gradient is reduced, or a step made, before it is whole; if an asynchronous
        rank uses weights that it does not have or keep.
    """
    _check_places(schedule)
    for rank in range(schedule.ranks):
        _Reader(schedule, rank).read()
    _check_steps(schedule)


def instruction_text(schedule: Schedule, rank: int, i: Instruction) -> str:
    """Return an instruction as text: 'FORWARD of microbatch 3 of stage 1'."""
    if i.op not in COMPUTE | SENDS | RECEIVES:
        return i.op.name if i.microbatch < 0 else f"{i.op.name} after microbatch {i.microbatch}"
    chunk = schedule.chunks[rank][i.chunk]
    copy = f" of copy {chunk.copy}" if schedule.copies > 1 else ""
    return f"{i.op.name} of microbatch {i.microbatch} of stage {chunk.stage}{copy}"


def _check_places(schedule: Schedule) -> None:
    name, ranks = schedule.name, schedule.ranks
    for what, found in (("chunks", schedule.chunks), ("orders", schedule.orders), ("versions", schedule.versions)):
        if len(found) != ranks:
            raise ScheduleError(f"{name}: {what} of {len(found)} ranks, where there are {ranks}")
    if schedule.weights and [len(w) for w in schedule.weights] != [schedule.microbatches] * ranks:
        raise ScheduleError(f"{name}: weights are {ranks} ranks' tuples of {schedule.microbatches} microbatches each")
    counts = Counter(chunk for held in schedule.chunks for chunk in held)
    wanted = [Chunk(stage, copy) for copy in range(schedule.copies) for stage in range(schedule.stages)]
    for chunk in [*wanted, *counts]:
        if counts[chunk] != 1 or not 0 <= chunk.stage < schedule.stages:
            raise ScheduleError(
                f"{name}: stage {chunk.stage} of copy {chunk.copy} is held by {counts[chunk]} ranks; each of the "
                f"stages 0 to {schedule.stages - 1} is held by one"
            )


def _check_steps(schedule: Schedule) -> None:
    steps = [[i.microbatch for i in order if i.op is Op.STEP] for order in schedule.orders]
    for rank, found in enumerate(steps):
        if found != steps[0]:
            raise ScheduleError(
                f"{schedule.name}: rank {rank} makes its STEPs after microbatches {found}, rank 0 after {steps[0]}; "
                "all ranks make the same ones"
            )


class _Reader:
    """One rank's order, read from its beginning."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.done: set[tuple[Op, int, int]] = set()
        self.steps = 0
        self.known = 0  # the microbatches whose backward passes are known to be behind
        self.reduced = True  # whether a REDUCE_GRADIENTS has come since the last backward pass
        self.gone = False  # whether the step of a synchronous schedule is behind

    def fail(self, words: str) -> ScheduleError:
        return ScheduleError(f"{self.schedule.name}: rank {self.rank} {words}")

    def name(self, i: Instruction) -> str:
        return instruction_text(self.schedule, self.rank, i)

    def read(self) -> None:
        for i in self.schedule.orders[self.rank]:
            if i.op in (Op.REDUCE_GRADIENTS, Op.STEP):
                self.update(i)
            else:
                self.check_belongs(i)
                self.check_ready(i)
                self.done.add((i.op, i.chunk, i.microbatch))
        for i in self.expected():
            if not self.has(i):
                raise self.fail(f"never does {self.name(i)}")
        if not self.reduced or not self.steps:
            raise self.fail("has no REDUCE_GRADIENTS and STEP after its last backward pass")
        if self.schedule.weights:
            needed = versions_kept(self.schedule.orders[self.rank], self.schedule.weights[self.rank])
            if needed > self.schedule.versions[self.rank]:
                raise self.fail(f"keeps {self.schedule.versions[self.rank]} versions of its weights; it uses {needed}")

    def has(self, i: Instruction) -> bool:
        parts = ((i.op,), (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)) if i.op is Op.BACKWARD else ((i.op,),)
        return any(all((op, i.chunk, i.microbatch) in self.done for op in ops) for ops in parts)

    def expected(self) -> Iterator[Instruction]:
        for c, chunk in enumerate(self.schedule.chunks[self.rank]):
            for j in range(self.schedule.microbatches):
                if self.schedule.copy_of(j) == chunk.copy:
                    for op in (Op.FORWARD, Op.BACKWARD):
                        i = Instruction(op, c, j)
                        yield i
                        if (send := gives(self.schedule, self.rank, i)) is not None:
                            yield send

    def check_belongs(self, i: Instruction) -> None:
        """Refuse what this rank has no part in."""
        held = self.schedule.chunks[self.rank]
        if not 0 <= i.chunk < len(held):
            raise self.fail(f"has {i.op.name} of chunk {i.chunk}; it holds chunks 0 to {len(held) - 1}")
        if not 0 <= i.microbatch < self.schedule.microbatches:
            raise self.fail(f"has {self.name(i)}: there are microbatches 0 to {self.schedule.microbatches - 1}")
        if self.schedule.copy_of(i.microbatch) != held[i.chunk].copy:
            raise self.fail(f"has {self.name(i)}: it passes through copy {self.schedule.copy_of(i.microbatch)}")
        if (i.op, i.chunk, i.microbatch) in self.done:
            raise self.fail(f"does {self.name(i)} twice")
        if self.gone:
            raise self.fail(f"does {self.name(i)} after its STEP")

    def check_ready(self, i: Instruction) -> None:
        """Refuse what comes before something that it needs."""
        key = (i.chunk, i.microbatch)
        if i.op in SENDS:
            self.message(i, gives(self.schedule, self.rank, Instruction(_PRODUCER[i.op][0], *key)))
            self.after(i, *(Instruction(op, *key) for op in _PRODUCER[i.op]))
        elif i.op in RECEIVES:
            self.message(i, needs(self.schedule, self.rank, Instruction(_USER[i.op], *key)))
        elif i.op is Op.BACKWARD_WEIGHT:
            self.after(i, Instruction(Op.BACKWARD_INPUT, *key))
            self.reduced = False
        else:
            self.compute(i)

    def compute(self, i: Instruction) -> None:
        chunk = self.schedule.chunks[self.rank][i.chunk]
        if i.op is Op.FORWARD:
            used = self.schedule.weights_of(self.rank, i.microbatch)
            if used > self.steps:
                raise self.fail(f"does {self.name(i)} with the weights after {used} STEPs: it has made {self.steps}")
        else:
            self.after(i, Instruction(Op.FORWARD, i.chunk, i.microbatch))
            both = {Op.BACKWARD: Op.BACKWARD_INPUT, Op.BACKWARD_INPUT: Op.BACKWARD}[i.op]
            if (both, i.chunk, i.microbatch) in self.done:
                raise self.fail(f"does {self.name(i)} twice: as {both.name} too")
            self.reduced = False
        if (message := needs(self.schedule, self.rank, i)) is not None:
            self.after(i, message)
            return
        before = Chunk(chunk.stage + (-1 if i.op is Op.FORWARD else 1), chunk.copy)
        if 0 <= before.stage < self.schedule.stages:  # handed over on this rank
            c = self.schedule.chunks[self.rank].index(before)
            ops = (Op.FORWARD,) if i.op is Op.FORWARD else _BACKWARD
            self.after(i, *(Instruction(op, c, i.microbatch) for op in ops))

    def message(self, i: Instruction, right: Instruction | None) -> None:
        if right is None:
            raise self.fail(f"has {self.name(i)}, which nobody needs: there is no such neighbour, or it is this rank")
        if i.peer != right.peer:
            raise self.fail(f"has {self.name(i)} with rank {i.peer}; the neighbouring stage is on rank {right.peer}")

    def after(self, i: Instruction, *either: Instruction) -> None:
        if not any((n.op, n.chunk, n.microbatch) in self.done for n in either):
            raise self.fail(f"does {self.name(i)} before {self.name(either[0])}")

    def update(self, i: Instruction) -> None:
        if self.gone:
            raise self.fail(f"does {i.op.name} after its STEP: a synchronous schedule has one of each, at its end")
        if i.op is Op.REDUCE_GRADIENTS:
            self.check_complete(i)
            self.reduced = True
            return
        if not self.reduced:
            raise self.fail("does STEP before REDUCE_GRADIENTS: gradients would be those of this rank's data alone")
        self.check_complete(i)
        self.reduced = True
        self.steps += 1
        self.gone = not self.schedule.asynchronous

    def check_complete(self, i: Instruction) -> None:
        """Refuse to reduce gradients that lack microbatches."""
        last = i.microbatch if self.schedule.asynchronous else self.schedule.microbatches - 1
        for c, chunk in enumerate(self.schedule.chunks[self.rank]):
            for j in range(self.known, last + 1):
                if self.schedule.copy_of(j) == chunk.copy and not any((op, c, j) in self.done for op in _LAST):
                    missing = self.name(Instruction(Op.BACKWARD, c, j))
                    raise self.fail(f"does {i.op.name} before {missing}")
        self.known = max(self.known, last + 1)
