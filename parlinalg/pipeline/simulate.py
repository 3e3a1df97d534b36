"""Simulation of a schedule with given or measured costs: when each rank does what, waits and holds.  Pure."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple
from weakref import WeakValueDictionary

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import COMPUTE, RECEIVES, SENDS, Instruction, Op, Schedule
from parlinalg.pipeline.validate import instruction_text, validate_orders

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times, in any unit; a number for all stages, or one for each.

    Attributes
    ----------
    forward, backward : float or sequence of float
        By stage, of one microbatch; `backward` is both parts.
    weight : float or sequence of float
        By stage, the part of `backward` that is BACKWARD_WEIGHT; the rest is BACKWARD_INPUT.
    latency : float or dict of (int, int) to float
        From a send to the arrival of the message; by (sender's rank, receiver's rank), where an edge left out takes 0.
    reduce, step : float or sequence of float
        By rank, of REDUCE_GRADIENTS and STEP.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    weight: Cost = 1.0
    latency: float | Mapping[tuple[int, int], float] = 0.0
    reduce: Cost = 0.0
    step: Cost = 0.0

    def validate(self, schedule: Schedule) -> None:
        """Refuse costs that are negative, no numbers, or not one for each stage or rank.

        Raises
        ------
        ScheduleError
            With the cost at fault.
        """
        for name, count, of in (
            ("forward", schedule.stages, "stage"), ("backward", schedule.stages, "stage"),
            ("weight", schedule.stages, "stage"), ("reduce", schedule.ranks, "rank"), ("step", schedule.ranks, "rank"),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != count:
                raise ScheduleError(
                    f"{len(value)} costs {name}={list(value)}: {schedule.name} takes one number, or {count}, one for "
                    f"each {of}"
                )
            _check_times(name, value if isinstance(value, Sequence) else [value])
        edges = self.latency.values() if isinstance(self.latency, Mapping) else [self.latency]
        _check_times("latency", list(edges))
        for stage in range(schedule.stages):
            if _at(self.weight, stage) > _at(self.backward, stage):
                raise ScheduleError(
                    f"costs of stage {stage}: weight={_at(self.weight, stage):g} is a part of "
                    f"backward={_at(self.backward, stage):g} and cannot be more"
                )

    def time_of(self, op: Op, place: int) -> float:
        """Return the time an instruction takes at a stage, or a reduction or step at a rank; messages take none."""
        if op in (Op.REDUCE_GRADIENTS, Op.STEP):
            return _at(self.reduce if op is Op.REDUCE_GRADIENTS else self.step, place)
        if op is Op.FORWARD:
            return _at(self.forward, place)
        if op is Op.BACKWARD:
            return _at(self.backward, place)
        if op is Op.BACKWARD_INPUT:
            return _at(self.backward, place) - _at(self.weight, place)
        return _at(self.weight, place) if op is Op.BACKWARD_WEIGHT else 0.0

    def delay(self, sender: int, receiver: int) -> float:
        """Return the time a message takes from a rank to another."""
        if isinstance(self.latency, Mapping):
            return self.latency.get((sender, receiver), 0.0)
        return self.latency


def _at(cost: Cost, place: int) -> float:
    return cost[place] if isinstance(cost, Sequence) else cost


def _check_times(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not (value >= 0 and math.isfinite(value)):
            raise ScheduleError(f"a cost {name}={value}: times are finite numbers of at least 0")


Message = tuple[Op, int, int, int]  # the receive's kind, the copy, the receiver's stage, the microbatch


class Span(NamedTuple):
    """An interval in which a rank did one thing, simulated or measured."""

    rank: int
    op: Op
    chunk: int
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """A simulated schedule.

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
        """Return the spans of a rank."""
        return [s for s in self.spans if s.rank == rank]

    def busy(self, rank: int) -> float:
        """Return the time in which a rank works."""
        return sum(s.stop - s.start for s in self.of_rank(rank))

    def gaps(self, rank: int) -> float:
        """Return the time in which a rank is idle between its first and its last work."""
        spans = self.of_rank(rank)
        return spans[-1].stop - spans[0].start - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The idle time of all ranks over ranks × makespan."""
        whole = self.schedule.ranks * self.makespan
        return (whole - sum(s.stop - s.start for s in self.spans)) / whole if whole else 0.0

    @property
    def peaks(self) -> tuple[float, ...]:
        """By rank, the most microbatches held at once: v chunks' activations count as one, where v chunks are a p-th of
        the model."""
        return tuple(held * self.schedule.ranks / self.schedule.stages for held in self.held)


def simulate(
    schedule: Schedule, costs: Costs | None = None,
    cores: int | Callable[[int, Collection[int]], float] | None = None,
    check: bool = True,
) -> Simulation:  # fmt: skip
    """Simulate a schedule.

    Parameters
    ----------
    schedule : Schedule
    costs : Costs, optional
        By default a backward pass takes as long as two forward passes, and half of it is its weight part.
    cores : int or callable, optional
        The number of ranks that can work at full speed at once, by default all; more ranks than that share the cores
        equally.  A function tells the speed of a rank beside those that work at once, itself among them.
    check : bool
        False where the orders are known to be right, as those of the library's schedules are: checking takes longer.

    Raises
    ------
    ScheduleError
        If the orders are wrong (see `validate_orders`), naming the rank and the instruction; if ranks would deadlock,
        naming all of them and what each waits for; if costs do not fit the schedule.

    >>> from parlinalg.pipeline.schedules import make_schedule
    >>> run = simulate(make_schedule("1f1b", 4, 8), Costs(forward=1, backward=2))
    >>> run.makespan, round(run.bubble, 4), run.peaks
    (33.0, 0.2727, (4.0, 3.0, 2.0, 1.0))
    """
    costs = Costs() if costs is None else costs
    if isinstance(cores, int) and cores < 1:
        raise ScheduleError(f"cores={cores}: ranks work on a whole number of cores of at least 1")
    if check:
        validate_orders(schedule)
    costs.validate(schedule)
    if cores is None:
        return _run_apart(schedule, costs)
    ranks = [_Rank(schedule, rank, costs) for rank in range(schedule.ranks)]
    _run_together(ranks, cores)
    waits = {rank.rank: rank.waits for rank in ranks if rank.waits is not None}
    if waits:
        raise ScheduleError(_deadlock(schedule, waits))
    return Simulation(
        schedule, costs, tuple(s for rank in ranks for s in rank.spans), max(rank.end for rank in ranks),
        tuple(rank.most for rank in ranks),
    )  # fmt: skip


@dataclass(frozen=True)
class Dependencies:
    """The instructions of a schedule that take time, each after all that it waits for.

    One depends on the one before it on its rank, and on one of another rank whose message it needs.  Where ranks do not
    share cores its end is the later of both plus its cost, so that a walk through them is the simulation.

    Attributes
    ----------
    nodes : list of (int, int, int, int)
        Of each instruction its kind, the instruction before it, the sender of its message, and the message's edge.
        Instruction 0 is the beginning, edge 0 takes no time.
    kinds : list of (Op or None, int)
        The operation, and the stage, of reductions and steps the rank; None for the arrival of a message.
    edges : list of (int, int)
        Pairs of ranks, from edge 1 on.
    what : list of (int, Instruction)
        The rank and instruction of each.
    held : tuple of int
        By rank, the most chunks' activations held at once, as of `Simulation`.
    """

    nodes: list[tuple[int, int, int, int]]
    kinds: list[tuple[Op | None, int]]
    edges: list[tuple[int, int]]
    what: list[tuple[int, Instruction]]
    held: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Dependencies:
        """Return those of a schedule.

        Raises
        ------
        ScheduleError
            If ranks would deadlock, naming all of them and what each waits for.
        """
        nodes, what = [(0, 0, 0, 0)], [(0, Instruction(Op.STEP))]
        kinds: dict[tuple[Op | None, int], int] = {(None, 0): 0}
        edges: dict[tuple[int, int], int] = {}
        sent: dict[Message, tuple[int, int]] = {}
        waiting: dict[Message, int] = {}
        last, at = [0] * schedule.ranks, [0] * schedule.ranks
        held, most = [0] * schedule.ranks, [0] * schedule.ranks
        ready = deque(range(schedule.ranks))

        def add(rank: int, i: Instruction, kind: tuple[Op | None, int], sender: int, edge: int) -> None:
            nodes.append((kinds.setdefault(kind, len(kinds)), last[rank], sender, edge))
            what.append((rank, i))
            last[rank] = len(nodes) - 1

        while ready:
            rank = ready.popleft()
            order, stages = schedule.orders[rank], [chunk.stage for chunk in schedule.chunks[rank]]
            arrived: tuple[int, int] | None = None
            for n in range(at[rank], len(order) + 1):
                i = order[n] if n < len(order) else None
                if arrived is not None and (i is None or i.op not in COMPUTE):
                    add(rank, order[n - 1], (None, 0), *arrived)
                    arrived = None
                if i is None:
                    at[rank] = n
                elif i.op in RECEIVES:
                    key = message(schedule, rank, i)
                    if key not in sent:
                        waiting[key], at[rank] = rank, n
                        break
                    arrived = sent[key]
                elif i.op in SENDS:
                    key = message(schedule, rank, i)
                    edge = 0 if i.peer == rank else edges.setdefault((rank, i.peer), len(edges) + 1)
                    sent[key] = last[rank], edge
                    if key in waiting:
                        ready.append(waiting.pop(key))
                else:
                    apart = i.op in (Op.REDUCE_GRADIENTS, Op.STEP)
                    add(rank, i, (i.op, rank if apart else stages[i.chunk]), *(arrived or (0, 0)))
                    arrived = None
                    if i.op is Op.FORWARD:
                        held[rank] += 1
                        most[rank] = max(most[rank], held[rank])
                    elif i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                        held[rank] -= 1
        if waiting:
            raise ScheduleError(_deadlock(schedule, {r: schedule.orders[r][at[r]] for r in waiting.values()}))
        return cls(nodes, list(kinds), list(edges), what, tuple(most))

    @cached_property
    def counts(self) -> list[int]:
        """By kind, how many instructions are of it."""
        found = [0] * len(self.kinds)
        for kind, _, _, _ in self.nodes:
            found[kind] += 1
        return found

    def times(self, costs: Costs) -> list[float]:
        """Return by kind what an instruction takes."""
        return [0.0 if op is None else costs.time_of(op, place) for op, place in self.kinds]

    def ends(self, costs: Costs) -> list[float]:
        """Return when each instruction ends."""
        times = self.times(costs)
        delays = [0.0, *(costs.delay(*edge) for edge in self.edges)]
        made = [0.0]
        add = made.append
        nodes = iter(self.nodes)
        next(nodes)
        for kind, before, sender, edge in nodes:
            begin, arrival = made[before], made[sender] + delays[edge]
            add((arrival if arrival > begin else begin) + times[kind])
        return made

    def bounds(self, costs: Costs) -> tuple[float, float]:
        """Return the makespan, and the work of all ranks."""
        work = sum(n * t for n, t in zip(self.counts, self.times(costs), strict=True))
        return max(self.ends(costs)), work


def _run_apart(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulate ranks that do not share cores."""
    graph = Dependencies.of(schedule)
    ends, times = graph.ends(costs), graph.times(costs)
    delays = [0.0, *(costs.delay(*edge) for edge in graph.edges)]
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for node, stop, (rank, i) in zip(graph.nodes[1:], ends[1:], graph.what[1:], strict=True):
        kind = graph.kinds[node[0]][0]
        if kind in COMPUTE or (kind is not None and times[node[0]]):
            begin = max(ends[node[1]], ends[node[2]] + delays[node[3]])
            spans[rank].append(Span(rank, i.op, i.chunk, i.microbatch, begin, stop))
    return Simulation(schedule, costs, tuple(s for each in spans for s in each), max(ends), graph.held)


def _run_together(ranks: list[_Rank], cores: int | Callable[[int, Collection[int]], float]) -> None:
    """Run ranks that share cores from one change of their speeds to the next."""
    arrivals: dict[Message, float] = {}
    now = 0.0
    while now < math.inf:
        while sum(rank.go_on(now, arrivals) for rank in ranks):
            pass
        busy = [rank for rank in ranks if rank.at_work is not None]
        working = [rank.rank for rank in busy]
        for rank in busy:
            speed = min(1.0, cores / len(busy)) if isinstance(cores, int) else cores(rank.rank, working)
            rank.work_at(speed, now)
        now = min(rank.until for rank in ranks)


def validate(schedule: Schedule) -> None:
    """Check a schedule before it is run: its orders, and that no ranks wait for each other.

    Raises
    ------
    ScheduleError
        As `simulate`.
    """
    with _CHECKING:  # ranks that are imagined together check one schedule at the same time
        if _SOUND.get(id(schedule)) is not schedule:
            simulate(schedule)
            _SOUND[id(schedule)] = schedule


_CHECKING = threading.Lock()
_SOUND: WeakValueDictionary[int, Schedule] = WeakValueDictionary()


def message(schedule: Schedule, rank: int, i: Instruction) -> Message:
    """Return a key that a send and its receive have in common."""
    chunk = schedule.chunks[rank][i.chunk]
    if i.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD):
        return Op.RECEIVE_FORWARD, chunk.copy, chunk.stage + (i.op is Op.SEND_FORWARD), i.microbatch
    return Op.RECEIVE_BACKWARD, chunk.copy, chunk.stage - (i.op is Op.SEND_BACKWARD), i.microbatch


class _Rank:
    """The state of a rank: at work, waiting for a message, or finished."""

    def __init__(self, schedule: Schedule, rank: int, costs: Costs) -> None:
        self.schedule, self.rank, self.costs = schedule, rank, costs
        self.order = schedule.orders[rank]
        self.next = 0
        self.until = 0.0  # when it goes on, if that is known
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
        apart = i.op in (Op.REDUCE_GRADIENTS, Op.STEP)
        place = self.rank if apart else self.schedule.chunks[self.rank][i.chunk].stage
        self.left = self.costs.time_of(i.op, place)
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


def _deadlock(schedule: Schedule, waits: Mapping[int, Instruction]) -> str:
    """Return which ranks wait for each other, and for what, as text; by rank the receive that it waits at."""
    seen: list[int] = []
    at = min(waits)
    while at not in seen:
        seen.append(at)
        at = waits[at].peer
    circle = seen[seen.index(at) :]
    parts = [f"rank {r} waits for rank {waits[r].peer} ({instruction_text(schedule, r, waits[r])})" for r in circle]
    return f"{schedule.name} would hang: {', '.join(parts)}"


def shifted(schedule: Schedule, measured: Iterable[Sequence[object]]) -> tuple[Span, ...]:
    """Measured spans as if the first one of all ranks began at 0."""
    spans = [Span(*m) for m in measured]  # type: ignore[arg-type]
    for span in spans:
        if not 0 <= span.rank < schedule.ranks or not 0 <= span.chunk < len(schedule.chunks[span.rank]):
            raise ScheduleError(
                f"a measured span {tuple(span)!r}: {schedule.name} has ranks 0 to {schedule.ranks - 1} with "
                f"{[len(held) for held in schedule.chunks]} chunks"
            )
    first = min((s.start for s in spans), default=0.0)
    moved = (s._replace(start=s.start - first, stop=s.stop - first) for s in spans)
    return tuple(sorted(moved, key=lambda s: (s.rank, s.start)))


def predict(
    schedule: Schedule, measured: Costs | Iterable[Sequence[object]], latency: float = 0.0, cores: int | None = None
) -> Simulation:
    """Simulate a schedule with measured costs.

    Parameters
    ----------
    schedule : Schedule
    measured : Costs, or iterable of (rank, op, chunk, microbatch, start, stop)
        The stages' costs, or spans of a run of this schedule, from which they are taken.
    latency : float
        The latency of a message, with spans.
    cores : int, optional
        As in `simulate`.
    """
    costs = measured if isinstance(measured, Costs) else measured_costs(schedule, measured, latency)
    return simulate(schedule, costs, cores)


def measured_costs(
    schedule: Schedule, spans: Iterable[Sequence[object]], latency: float | Mapping[tuple[int, int], float] = 0.0,
    pick: Callable[[list[float]], float] = median,
) -> Costs:  # fmt: skip
    """Return the stages' costs in a run: the median over microbatches (and steps, and copies) of each.

    Parameters
    ----------
    schedule : Schedule
        The one that ran.
    spans : iterable of (rank, op, chunk, microbatch, start, stop)
    latency : float or dict
        As in `Costs`.
    pick : callable
        The statistic in place of the median; `min` where ranks share cores, which makes most passes longer.

    Raises
    ------
    ScheduleError
        If a stage was not measured.
    """
    times: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for span in shifted(schedule, spans):
        updates = span.op in (Op.REDUCE_GRADIENTS, Op.STEP)
        place = span.rank if updates else schedule.chunks[span.rank][span.chunk].stage
        times[span.op, place].append(span.stop - span.start)

    def of(op: Op, place: int) -> float:
        return pick(times[op, place]) if times[op, place] else 0.0

    stages, ranks = range(schedule.stages), range(schedule.ranks)
    for stage in stages:
        if not times[Op.FORWARD, stage] or not (times[Op.BACKWARD, stage] or times[Op.BACKWARD_INPUT, stage]):
            raise ScheduleError(
                f"no measured span of a forward and a backward pass of stage {stage} of {schedule.name}"
            )
    whole = [of(Op.BACKWARD, s) for s in stages]
    parts = [(of(Op.BACKWARD_INPUT, s), of(Op.BACKWARD_WEIGHT, s)) for s in stages]
    return Costs(
        forward=[of(Op.FORWARD, s) for s in stages],
        backward=[b or i + w for b, (i, w) in zip(whole, parts)],
        weight=[w if i or w else b / 2 for b, (i, w) in zip(whole, parts)],
        latency=latency,
        reduce=[of(Op.REDUCE_GRADIENTS, r) for r in ranks],
        step=[of(Op.STEP, r) for r in ranks],
    )
