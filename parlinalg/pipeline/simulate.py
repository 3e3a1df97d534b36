"""Simulation of a schedule with given or measured costs: when each rank does what, waits and holds.  Pure."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from operator import le
from statistics import median
from typing import NamedTuple
from weakref import WeakValueDictionary

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import AHEAD, COMPUTE, RECEIVES, SENDS, Instruction, Op, Schedule
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


class SharedCores(NamedTuple):
    """Cores that ranks share, by which they work faster or slower.

    Attributes
    ----------
    kinds : sequence of int
        By rank, its kind, from 0 on: ranks of one kind are as fast as each other.
    speed : callable
        From a kind, and how many ranks of each kind work at once, to the speed of one of them.
    """

    kinds: Sequence[int]
    speed: Callable[[int, Sequence[int]], float]


def simulate(
    schedule: Schedule, costs: Costs | None = None, cores: int | SharedCores | None = None
) -> Simulation:  # fmt: skip
    """Simulate a schedule.

    Parameters
    ----------
    schedule : Schedule
    costs : Costs, optional
        By default a backward pass takes as long as two forward passes, and half of it is its weight part.
    cores : int or SharedCores, optional
        The number of ranks that can work at full speed at once, by default all; more ranks than that share the cores
        equally.

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
    validate_orders(schedule)
    costs.validate(schedule)
    graph = Dependencies.of(schedule)
    begins, ends = graph.apart(costs) if cores is None else graph.together(costs, cores)
    times = graph.times(costs)
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for node, (kind, *_) in enumerate(graph.nodes):
        op = graph.kinds[kind][0]
        if node and op is not None and (op in COMPUTE or times[kind]):
            rank, i = graph.ranks[node], graph.what[node]
            spans[rank].append(Span(rank, op, i.chunk, i.microbatch, begins[node], ends[node]))
    return Simulation(schedule, costs, tuple(s for each in spans for s in each), max(ends), graph.held)


class Moment(NamedTuple):
    """A computation of a pipeline rank, and what the rank holds meanwhile, that of this computation too.

    Attributes
    ----------
    chunk : int
        The number of the chunk, of those of the rank, that computes.
    op : Op
        FORWARD, BACKWARD (also its input part) or BACKWARD_WEIGHT.
    held : tuple of int
        By chunk, of how many microbatches activations are held from the forward pass to the backward pass.
    pending : tuple of int
        By chunk, of how many the gradients of weights have not been computed yet, as those of inputs have.
    ahead : int
        The messages of other ranks for which there is memory before they are due.
    later : tuple of int
        Of a backward pass: by chunk, of how many microbatches that are held the forward pass came after this one's.
    followed : bool
        Of a backward pass: whether the one of its chunk before was followed by another one, as this one is then taken
        to be (`parlinalg.parallel.gatherer.dropped`).  Of gradients of weights: the same of the pass before them, and
        True if that is none of the chunk's backward passes.
    stays : bool
        Of both: whether weights of a chunk's only layer may be held for another pass, as the last time so many
        backward passes came in a row.
    """

    chunk: int
    op: Op
    held: tuple[int, ...]
    pending: tuple[int, ...]
    ahead: int = 0
    later: tuple[int, ...] = ()
    followed: bool = False
    stays: bool = False

    def nbytes(self, kept: Sequence[float], pending: Sequence[float]) -> float:
        """Return the bytes of what is held, by those that one microbatch has in each chunk."""
        both = zip((*self.held, *self.pending), (*kept, *pending), strict=True)
        return sum(n * nbytes for n, nbytes in both if n)


def _fullest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Return the moments of a rank but those for which another of the same kind holds no less of anything."""
    found: defaultdict[tuple[int, Op], list[tuple[tuple[int, ...], Moment]]] = defaultdict(list)
    for m in sorted(
        moments, key=lambda m: -sum(m.held) - sum(m.pending) - m.ahead - sum(m.later) - m.followed - m.stays
    ):
        every, kin = (*m.held, *m.pending, m.ahead, *m.later, m.followed, m.stays), found[m.chunk, m.op]
        if not any(all(map(le, every, other)) for other, _ in kin):
            kin.append((every, m))
    return tuple(m for kin in found.values() for _, m in kin)


def _ahead(order: Sequence[Instruction]) -> list[int]:
    """Return for each instruction of a rank the messages that come after it and have been asked for."""
    found, coming = [], 0
    for i in reversed(order):
        found.append(min(AHEAD, coming))
        coming += i.op in RECEIVES
    return found[::-1]


def _followed(order: Sequence[Instruction]) -> list[tuple[bool, bool]]:
    """Return for each instruction of a rank `Moment.followed` and `Moment.stays`; in a step's first passes as at the
    end of the last."""
    passes = [i for i in order if i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)]
    after = dict(pairwise(passes))
    several = any(i.chunk for i in passes)
    row, before = 0, next((n for n, i in enumerate(reversed(passes)) if i.op is Op.FORWARD), len(passes))
    then: dict[int, bool] = {}
    last: tuple[int, tuple[bool, bool]] | None = None
    found = []
    for i in order:
        flags = False, False
        if i.op is Op.FORWARD:
            row, before, last = 0, row or before, None
        elif i.op is Op.BACKWARD_WEIGHT:
            flags = last[1] if last is not None and last[0] == i.chunk else (True, True)
        elif i.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            row += 1
            flags = then.get(i.chunk, False), several or row < before
            then[i.chunk] = i in after and after[i].op is not Op.FORWARD
            last = i.chunk, flags
        found.append(flags)
    return found


class _Held:
    """Activations of each chunk that a rank holds after each of its computations, and the moments of these."""

    def __init__(self, chunks: int, order: Sequence[Instruction]) -> None:
        self.now, self.pending, self.passed = ([0] * chunks for _ in range(3))  # `passed`: forward passes
        self.before: dict[tuple[int, int], tuple[int, ...]] = {}  # those with which a microbatch's ended
        self.moments: set[Moment] = set()
        self.ahead, self.following = _ahead(order), _followed(order)

    def compute(self, n: int, i: Instruction) -> None:
        """Add the moment of computation i, which is number n of the order."""
        kind = Op.BACKWARD if i.op is Op.BACKWARD_INPUT else i.op
        since: tuple[int, ...] = ()
        if i.op is Op.FORWARD:
            self.now[i.chunk] += 1
            self.passed[i.chunk] += 1
            self.before[i.chunk, i.microbatch] = tuple(self.passed)
        elif kind is Op.BACKWARD:
            then = self.before.pop((i.chunk, i.microbatch))
            since = tuple(min(k, n - m) for k, n, m in zip(self.now, self.passed, then, strict=True))
        self.moments.add(
            Moment(i.chunk, kind, tuple(self.now), tuple(self.pending), self.ahead[n], since, *self.following[n])
        )
        self.now[i.chunk] -= kind is Op.BACKWARD
        self.pending[i.chunk] += (i.op is Op.BACKWARD_INPUT) - (i.op is Op.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Dependencies:
    """The instructions of a schedule that take time, each after all that it waits for.

    One depends on the one before it on its rank, and on one of another rank whose message it needs.  Where ranks do not
    share cores its end is the later of both plus its cost, so that a walk through them is the simulation (`apart`).

    Attributes
    ----------
    nodes : list of (int, int, int, int)
        Of each instruction its kind, the instruction before it, the sender of its message, and the message's edge.
        Instruction 0 is the beginning, edge 0 takes no time.
    kinds : list of (Op or None, int)
        The operation, and the stage, of reductions and steps the rank; None for the arrival of a message.
    edges : list of (int, int)
        Pairs of ranks, from edge 1 on.
    ranks : list of int
        The rank of each.
    what : list of Instruction
    moments : tuple of tuple of Moment
        By rank, the computations in which it holds the most.
    """

    nodes: list[tuple[int, int, int, int]]
    kinds: list[tuple[Op | None, int]]
    edges: list[tuple[int, int]]
    ranks: list[int]
    what: list[Instruction]
    moments: tuple[tuple[Moment, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Dependencies:
        """Return those of a schedule.

        Raises
        ------
        ScheduleError
            If ranks would deadlock, naming all of them and what each waits for.
        """
        nodes, ranks, what = [(0, 0, 0, 0)], [0], [Instruction(Op.STEP)]
        kinds: dict[tuple[Op | None, int], int] = {(None, 0): 0}
        edges: dict[tuple[int, int], int] = {}
        sent: dict[Message, tuple[int, int]] = {}
        waiting: dict[Message, int] = {}
        last, at = [0] * schedule.ranks, [0] * schedule.ranks
        held = [_Held(len(own), order) for own, order in zip(schedule.chunks, schedule.orders, strict=True)]
        ready = deque(range(schedule.ranks))

        def add(rank: int, i: Instruction, kind: tuple[Op | None, int], sender: int, edge: int) -> None:
            nodes.append((kinds.setdefault(kind, len(kinds)), last[rank], sender, edge))
            ranks.append(rank)
            what.append(i)
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
                    if i.op in COMPUTE:
                        held[rank].compute(n, i)
        if waiting:
            raise ScheduleError(_deadlock(schedule, {r: schedule.orders[r][at[r]] for r in waiting.values()}))
        return cls(nodes, list(kinds), list(edges), ranks, what, tuple(_fullest(each.moments) for each in held))

    @property
    def held(self) -> tuple[int, ...]:
        """By rank, the most chunks' activations held at once, as of `Simulation`."""
        return tuple(max((sum(m.held) + sum(m.pending) for m in moments), default=0) for moments in self.moments)

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

    def delays(self, costs: Costs) -> list[float]:
        """Return by edge what a message takes."""
        return [0.0, *(costs.delay(*edge) for edge in self.edges)]

    def ends(self, costs: Costs) -> list[float]:
        """Return when each instruction ends, on ranks that do not share cores."""
        times, delays = self.times(costs), self.delays(costs)
        made = [0.0]
        add = made.append
        nodes = iter(self.nodes)
        next(nodes)
        for kind, before, sender, edge in nodes:
            begin, arrival = made[before], made[sender] + delays[edge]
            add((arrival if arrival > begin else begin) + times[kind])
        return made

    def apart(self, costs: Costs) -> tuple[list[float], list[float]]:
        """Return when each instruction begins, and when it ends, on ranks that do not share cores."""
        ends, delays = self.ends(costs), self.delays(costs)
        begins = [max(ends[before], ends[sender] + delays[edge]) for _, before, sender, edge in self.nodes]
        return begins, ends

    def together(self, costs: Costs, cores: int | SharedCores) -> tuple[list[float], list[float]]:
        """Return when each instruction begins, and when it ends, on ranks that share cores.

        They run from one change of their speeds to the next.
        """
        if isinstance(cores, int):
            most = cores
            cores = SharedCores([0] * len(self.held), lambda _, working: min(1.0, most / working[0]))
        times, delays, nodes = self.times(costs), self.delays(costs), self.nodes
        begins, ends = [0.0] * len(nodes), [math.inf] * len(nodes)
        ends[0] = 0.0
        ranks = [_Rank(number, kind) for number, kind in enumerate(cores.kinds)]
        for node, number in enumerate(self.ranks[1:], 1):
            ranks[number].order.append(node)
        counts, working, speeds = [0] * (max(cores.kinds) + 1), [0], [0.0]  # by kind, of ranks at work
        at_work: dict[_Rank, None] = {}
        waiting: dict[int, list[_Rank]] = defaultdict(list)  # by the instruction whose message they wait for
        arrivals: list[tuple[float, int]] = []  # when messages come, and to which rank
        ready, now = list(ranks), 0.0
        while ready:
            while ready:
                rank = ready.pop()
                if rank.at_work:
                    ends[rank.at_work] = now
                    ready += waiting.pop(rank.at_work, ())
                    rank.at_work = 0
                    del at_work[rank]
                    counts[rank.kind] -= 1
                while rank.next < len(rank.order):
                    node = rank.order[rank.next]
                    kind, _, sender, edge = nodes[node]
                    arrival = ends[sender] + delays[edge]
                    if arrival > now:
                        if arrival == math.inf:
                            waiting[sender].append(rank)
                        else:
                            heappush(arrivals, (arrival, rank.number))
                        break
                    rank.next += 1
                    begins[node] = now
                    if times[kind]:
                        rank.at_work, rank.left, rank.since, rank.speed = node, times[kind], now, 0.0
                        at_work[rank] = None
                        counts[rank.kind] += 1
                        break
                    ends[node] = now
                    ready += waiting.pop(node, ())
            if counts != working:
                working = counts.copy()
                speeds = [cores.speed(kind, counts) if n else 0.0 for kind, n in enumerate(counts)]
            for rank in at_work:
                speed = speeds[rank.kind]
                if speed != rank.speed:
                    rank.left -= (now - rank.since) * rank.speed
                    rank.since, rank.speed = now, speed
                    rank.until = now + rank.left / speed
            now = min([rank.until for rank in at_work] + [at for at, _ in arrivals[:1]], default=math.inf)
            ready = [rank for rank in at_work if rank.until <= now]
            while arrivals and arrivals[0][0] <= now:
                ready.append(ranks[heappop(arrivals)[1]])
        return begins, ends

    def bounds(self, costs: Costs) -> tuple[float, float]:
        """Return the makespan, and the work of all ranks, which do not share cores."""
        work = sum(n * t for n, t in zip(self.counts, self.times(costs), strict=True))
        return max(self.ends(costs)), work


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
    """The state of a rank that shares cores: at work, waiting for a message, or finished.

    At work it has `left` to do, at full speed, from `since` on; at its `speed` that lasts `until` then.
    """

    __slots__ = ("at_work", "kind", "left", "next", "number", "order", "since", "speed", "until")

    def __init__(self, number: int, kind: int) -> None:
        self.number, self.kind = number, kind
        self.order: list[int] = []  # its instructions
        self.next = self.at_work = 0  # the place in the order, and the instruction at work, 0 for none
        self.left = self.since = self.speed = self.until = 0.0


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
    """Return measured spans as if the first one of all ranks began at 0."""
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
