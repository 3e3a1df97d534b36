"""Running a schedule on paper: when each rank does what, how long it waits, what it holds.  Pure."""

from __future__ import annotations

import math
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


def simulate(schedule: Schedule, costs: Costs | None = None, cores: int | None = None) -> Simulation:
    """Run a schedule on paper.

    Parameters
    ----------
    schedule : Schedule
    costs : Costs, optional
        By default a backward pass takes as long as two forward passes, and half of it is its weight part.
    cores : int, optional
        How many ranks can work at full speed at once, by default all; more than that share the cores equally, as ranks
        do on a machine with fewer cores than ranks.

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
    if cores is not None and cores < 1:
        raise ScheduleError(f"cores={cores}: ranks work on a whole number of cores of at least 1")
    check_orders(schedule)
    costs.check(schedule)
    ranks = [_Rank(schedule, rank, costs) for rank in range(schedule.ranks)]
    arrivals: dict[Message, float] = {}
    now = 0.0
    while now < math.inf:
        while sum(rank.go_on(now, arrivals) for rank in ranks):
            pass
        busy = [rank for rank in ranks if rank.at_work is not None]
        speed = 1.0 if cores is None else min(1.0, cores / max(1, len(busy)))
        for rank in busy:
            rank.work_at(speed, now)
        now = min(rank.until for rank in ranks)
    if any(rank.waits is not None for rank in ranks):
        raise ScheduleError(_deadlock(ranks))
    return Simulation(
        schedule, costs, tuple(s for rank in ranks for s in rank.spans), max(rank.end for rank in ranks),
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
    """A rank under way: at work, waiting for a message, or at its end."""

    def __init__(self, schedule: Schedule, rank: int, costs: Costs) -> None:
        self.schedule, self.rank, self.costs = schedule, rank, costs
        self.order = schedule.orders[rank]
        self.next = 0
        self.until = 0.0  # when it goes on, as far as that is known
        self.at_work: Instruction | None = None
        self.begun = self.since = self.left = self.speed = self.end = 0.0
        self.held = self.most = 0
        self.spans: list[Span] = []

    @property
    def waits(self) -> Instruction | None:
        """The receive it waits at, or None at its end."""
        return self.order[self.next] if self.next < len(self.order) else None

    def go_on(self, now: float, arrivals: dict[Message, float]) -> bool:
        """Do what takes no time, up to the next work or to a message that has not come; whether anything was done."""
        if self.at_work is not None:
            if self.until > now:
                return False
            self.finish(self.at_work, now)
        before = self.next
        self.until = math.inf
        while self.next < len(self.order) and self.at_work is None:
            i = self.order[self.next]
            if i.op in RECEIVES:
                arrived = arrivals.get(message(self.schedule, self.rank, i), math.inf)
                if arrived > now:
                    self.until = arrived
                    break
            elif i.op in SENDS:
                arrivals[message(self.schedule, self.rank, i)] = now + self.costs.delay(self.rank, i.peer)
            else:
                self.begin(i, now)
            self.next += 1
        return self.next > before

    def begin(self, i: Instruction, now: float) -> None:
        self.at_work, self.begun, self.since, self.speed = i, now, now, 0.0
        self.left = self.costs.of(self.schedule, self.rank, i)
        if i.op is Op.FORWARD:
            self.held += 1
            self.most = max(self.most, self.held)
        if not self.left:
            self.finish(i, now)

    def work_at(self, speed: float, now: float) -> None:
        """Work with a part of a core from now on."""
        if speed != self.speed:
            self.left -= (now - self.since) * self.speed
            self.since, self.speed = now, speed
            self.until = now + self.left / speed

    def finish(self, i: Instruction, now: float) -> None:
        self.at_work, self.end = None, now
        if i.op in COMPUTE or now > self.begun:
            self.spans.append(Span(self.rank, i.op, i.chunk, i.microbatch, self.begun, now))
        if i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
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
