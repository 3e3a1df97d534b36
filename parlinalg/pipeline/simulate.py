"""Running a schedule on paper: when each rank does what, how long it waits, what it holds.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.check import check_orders, told
from parlinalg.pipeline.costs import Costs
from parlinalg.pipeline.schedule import COMPUTE, RECEIVES, SENDS, Instruction, Op, Schedule

Message = tuple[Op, int, int, int]  # the receive's kind, the copy, the receiver's stage, the microbatch


class Span(NamedTuple):
    """What a rank did from one time to another, simulated or measured."""

    rank: int
    op: Op
    chunk: int
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """A schedule on paper.

    Attributes
    ----------
    schedule : Schedule
    costs : Costs
    spans : tuple of Span
        By rank, then by time: computations, and reductions and steps that take time.
    makespan : float
        From 0 to the end of the last.
    held : tuple of int
        By rank, the most chunks' activations held at once: from a forward pass to the end of its backward pass, the
        weight part included.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[Span, ...]
    makespan: float
    held: tuple[int, ...]

    def of_rank(self, rank: int) -> list[Span]:
        """The spans of a rank."""
        return [s for s in self.spans if s.rank == rank]

    def busy(self, rank: int) -> float:
        """The time in which a rank works."""
        return sum(s.stop - s.start for s in self.of_rank(rank))

    def gaps(self, rank: int) -> float:
        """The time in which a rank is idle between its first and its last work."""
        spans = self.of_rank(rank)
        return spans[-1].stop - spans[0].start - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The idle time of all ranks over ranks × makespan."""
        idle = sum(self.makespan - self.busy(rank) for rank in range(self.schedule.ranks))
        return idle / (self.schedule.ranks * self.makespan) if self.makespan else 0.0

    @property
    def peaks(self) -> tuple[float, ...]:
        """By rank, the most microbatches held at once: v chunks' activations count as one, where v chunks are a p-th of
        the model."""
        return tuple(held * self.schedule.ranks / self.schedule.stages for held in self.held)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule on paper.

    Parameters
    ----------
    schedule : Schedule
    costs : Costs, optional
        By default a backward pass takes as long as two forward passes, and half of it is its weight part.

    Raises
    ------
    ScheduleError
        If the orders are wrong (see `check_orders`), naming the rank and the instruction; if ranks would wait for each
        other for ever, naming all of them and what each waits for; if costs do not fit the schedule.

    >>> from parlinalg.pipeline.schedules import make
    >>> run = simulate(make("1f1b", 4, 8), Costs(forward=1, backward=2))
    >>> run.makespan, round(run.bubble, 4), run.peaks
    (33.0, 0.2727, (4.0, 3.0, 2.0, 1.0))
    """
    costs = Costs() if costs is None else costs
    check_orders(schedule)
    costs.check(schedule)
    ranks = [_Rank(schedule, rank, costs) for rank in range(schedule.ranks)]
    arrivals: dict[Message, float] = {}
    moving = True
    while moving:
        moving = sum(rank.run(arrivals) for rank in ranks) > 0
    if any(rank.waits is not None for rank in ranks):
        raise ScheduleError(_deadlock(ranks))
    return Simulation(
        schedule, costs, tuple(s for rank in ranks for s in rank.spans), max(rank.now for rank in ranks),
        tuple(rank.most for rank in ranks),
    )  # fmt: skip


def check(schedule: Schedule) -> None:
    """Check a schedule before it is run: its orders, and that no ranks wait for each other.

    Raises
    ------
    ScheduleError
        As `simulate`.
    """
    simulate(schedule)


def message(schedule: Schedule, rank: int, i: Instruction) -> Message:
    """What a send and its receive have in common."""
    chunk = schedule.chunks[rank][i.chunk]
    if i.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD):
        return Op.RECEIVE_FORWARD, chunk.copy, chunk.stage + (i.op is Op.SEND_FORWARD), i.microbatch
    return Op.RECEIVE_BACKWARD, chunk.copy, chunk.stage - (i.op is Op.SEND_BACKWARD), i.microbatch


class _Rank:
    """A rank under way."""

    def __init__(self, schedule: Schedule, rank: int, costs: Costs) -> None:
        self.schedule, self.rank, self.costs = schedule, rank, costs
        self.next, self.now = 0, 0.0
        self.held = self.most = 0
        self.spans: list[Span] = []

    @property
    def waits(self) -> Instruction | None:
        """The receive it waits at, or None at its end."""
        order = self.schedule.orders[self.rank]
        return order[self.next] if self.next < len(order) else None

    def run(self, arrivals: dict[Message, float]) -> bool:
        """Go on until a message has not come; whether any instruction was done."""
        begun = self.next
        order = self.schedule.orders[self.rank]
        while self.next < len(order):
            i = order[self.next]
            if i.op in RECEIVES:
                arrived = arrivals.get(message(self.schedule, self.rank, i))
                if arrived is None:
                    break
                self.now = max(self.now, arrived)
            elif i.op in SENDS:
                arrivals[message(self.schedule, self.rank, i)] = self.now + self.costs.delay(self.rank, i.peer)
            else:
                self.work(i)
            self.next += 1
        return self.next > begun

    def work(self, i: Instruction) -> None:
        start, self.now = self.now, self.now + self.costs.of(self.schedule, self.rank, i)
        if i.op in COMPUTE or self.now > start:
            self.spans.append(Span(self.rank, i.op, i.chunk, i.microbatch, start, self.now))
        if i.op is Op.FORWARD:
            self.held += 1
            self.most = max(self.most, self.held)
        elif i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            self.held -= 1


def _deadlock(ranks: list[_Rank]) -> str:
    """Which ranks wait for each other, and for what."""
    waits = {rank.rank: rank.waits for rank in ranks if rank.waits is not None}
    seen: list[int] = []
    at = min(waits)
    while at not in seen:
        seen.append(at)
        at = waits[at].peer
    circle = seen[seen.index(at) :]
    parts = [f"rank {r} waits for rank {waits[r].peer} ({told(ranks[r].schedule, r, waits[r])})" for r in circle]
    return f"{ranks[0].schedule.name} would hang: {', '.join(parts)}"
