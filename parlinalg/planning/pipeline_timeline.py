"""Timelines of pipelines: a schedule's instructions timed by the traces of its stages, and simulated with them.  Pure.

Where ranks outnumber cores a stage is faster while other stages wait: `sharing` says how much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike

from parlinalg.errors import ConfigError
from parlinalg.pipeline.schedule import Op, Schedule
from parlinalg.pipeline.simulate import Costs, SharedCores, simulate
from parlinalg.planning.machine import Machine, load_machine
from parlinalg.planning.timeline import Timeline, speed_beside, timeline
from parlinalg.planning.trace import Trace


@dataclass(frozen=True)
class Stage:
    """The traces of a pipeline's stage: one microbatch's passes, of a rank that holds it.

    Attributes
    ----------
    forward, backward : Trace
        `backward` is the whole derivative.  Messages in them are waited for by the rank; those of a schedule that sends
        while it computes on are left out, and follow from `message`.
    weight : Trace, optional
        The part of `backward` that gives the parameters' gradients, for schedules that run it apart.
    message : int
        Bytes of a microbatch's output that a rank sends to the next stage; its gradient has as many.
    """

    forward: Trace
    backward: Trace
    weight: Trace | None = None
    message: int = 0


def pipeline_timeline(
    schedule: Schedule, stages: Sequence[Stage], machine: Machine | str | PathLike[str], *,
    reduce: Sequence[Trace] = (), step: Sequence[Trace] = (), places: Sequence[Sequence[int]] | None = None,
    on_node: int | None = None,
    timed: Callable[[Trace, bool], Timeline] | None = None,
) -> Timeline:  # fmt: skip
    """Return the run of a pipeline's step, by the simulation of its schedule with the traced times of its stages.

    Parameters
    ----------
    schedule : Schedule
    stages : sequence of Stage
        One a stage of the schedule.
    machine : Machine, str or path
        As in `timeline`.
    reduce, step : sequence of Trace
        By pipeline rank, the reduction of the gradients and the update after the last microbatch; none: no time.
    places : sequence of sequence of int, optional
        By pipeline rank, the ranks of the world at this place, first the one that is traced; by default equal parts of
        the world one after the other.
    on_node : int, optional
        As in `timeline`.
    timed : callable, optional
        From a trace, and whether messages are pending, to its run, if some are known; by default `timeline`.

    Raises
    ------
    ConfigError
        If there is not one of each for every stage or rank, or no such machine.
    """
    for name, given, count, of in (
        ("stages", stages, schedule.stages, "stage"), ("reduce", reduce, schedule.ranks, "pipeline rank"),
        ("step", step, schedule.ranks, "pipeline rank"),
    ):  # fmt: skip
        if len(given) != count and (given or name == "stages"):
            raise ConfigError(f"{len(given)} traces {name}: {schedule.name} takes {count}, one for each {of}")
    machine, size = load_machine(machine), stages[0].forward.size
    width = max(1, size // schedule.ranks)
    places = [range(r * width, (r + 1) * width) for r in range(schedule.ranks)] if places is None else places
    node = min(size, machine.ranks_per_node if on_node is None else on_node)
    apart = len({ranks[0] // node for ranks in places}) > 1
    known: dict[tuple[int, bool], Timeline] = {}

    def run(trace: Trace | None, passes: bool = True) -> Timeline | None:
        if trace is None or not trace.events:
            return None
        key = id(trace), passes and apart
        if key not in known:
            alone = timeline(trace, machine, on_node=node, pending=key[1]) if timed is None else timed(trace, key[1])
            known[key] = alone
        return known[key]

    def seconds(trace: Trace | None, passes: bool = True) -> float:
        found = run(trace, passes)
        return 0.0 if found is None else found.seconds

    costs = Costs(
        forward=[seconds(s.forward) for s in stages],
        backward=[seconds(s.backward) for s in stages],
        weight=[min(seconds(s.weight) if s.weight else seconds(s.backward) / 2, seconds(s.backward)) for s in stages],
        latency=_latencies(schedule, stages, machine, places, node, size),
        reduce=[seconds(t, passes=False) for t in reduce] or 0.0,
        step=[seconds(t, passes=False) for t in step] or 0.0,
    )  # fmt: skip
    computed = sum(run.compute for run in known.values()) / max(1e-300, sum(run.seconds for run in known.values()))
    faster = sharing(machine, node, size, places, computed)
    simulation = simulate(schedule, costs, faster)
    passes = Counter(
        (span.rank, schedule.chunks[span.rank][span.chunk].stage) for span in simulation.spans if span.op is Op.FORWARD
    )
    causes, flops = {}, 0
    for rank in range(schedule.ranks):
        parts = [
            (passes[rank, c.stage], run(t))
            for c in schedule.chunks[rank]
            for t in (stages[c.stage].forward, stages[c.stage].backward)
        ]
        parts += [(1, run(each[rank], passes=False)) for each in (reduce, step) if each]
        ran = [(times, found) for times, found in parts if found is not None]
        flops += sum(times * found.flops // size * width for times, found in ran)
        busy = simulation.busy(rank) if faster else None
        causes[places[rank][0]] = _causes(ran, simulation.makespan, busy)
    most = max((found for found in known.values()), key=lambda t: t.flops)
    return Timeline(machine, simulation.makespan, (), causes, flops, most.dtype, size, {}, simulation)


def _latencies(
    schedule: Schedule, stages: Sequence[Stage], machine: Machine, places: Sequence[Sequence[int]], node: int, size: int
) -> dict[tuple[int, int], float]:
    """Return the seconds of a message between each two pipeline ranks that hold neighbouring stages."""
    latency = {}
    for rank, held in enumerate(schedule.chunks):
        for chunk in held:
            for other in (chunk.stage - 1, chunk.stage + 1):
                if 0 <= other < schedule.stages:
                    to = schedule.holder(other, chunk.copy)
                    nbytes = stages[min(other, chunk.stage)].message
                    local = 2 if places[rank][0] // node == places[to][0] // node else 1
                    if to != rank and nbytes:
                        latency[rank, to] = machine.transfer("send", nbytes, 2, local, node, size).total
    return latency


def _causes(ran: Sequence[tuple[int, Timeline]], makespan: float, busy: float | None) -> dict[str, float]:
    """Return the seconds of a pipeline rank's step by cause, idle time included.

    Parameters
    ----------
    ran : sequence of (int, Timeline)
        The passes that the rank runs, and how often each.
    makespan : float
        Seconds of the step.
    busy : float, optional
        Seconds that the rank computes, if passes are faster than their timelines, in which all ranks compute at once.
    """
    spent: dict[str, float] = defaultdict(float)
    for times, found in ran:
        for cause, s in next(iter(found.causes.values())).items():
            spent[cause] += times * s
    if busy is not None and (whole := sum(spent.values())):
        spent = defaultdict(float, {cause: s * busy / whole for cause, s in spent.items()})
    spent["idle"] += max(0.0, makespan - sum(spent.values()))
    return {name: s for name, s in spent.items() if s > 0}


def sharing(
    machine: Machine, node: int, size: int, places: Sequence[Sequence[int]], computed: float
) -> SharedCores | None:  # fmt: skip
    """Return how many times as fast pipeline ranks work beside those that work at once, as if all computed.

    Those that wait for messages leave their cores to the others as far as they do not poll; only what is computed, this
    share of a pass, goes faster then.  `places` are the ranks of the world at each place of the pipeline, the slowest
    of which counts; places with as many ranks on each core (on each node where ranks keep none) are of one kind.  None
    where ranks have cores of their own, or poll.
    """
    crowd, polled = machine.crowd(node, size), machine.overlap.receiving
    if crowd <= 1 or polled >= 1:
        return None
    held = [frozenset(Counter(machine.pool(r, node) for r in ranks).items()) for ranks in places]
    kinds = {own: kind for kind, own in enumerate(dict.fromkeys(held))}
    in_pool = [dict(own) for own in kinds]
    every = Counter(kinds[own] for own in held)
    beside = [[k for k, other in enumerate(in_pool) if k == n or own.keys() & other] for n, own in enumerate(in_pool)]
    speeds: dict[tuple[int, ...], float] = {}

    def room(kind: int, working: Sequence[int]) -> float:
        slowest = math.inf
        for pool in in_pool[kind]:
            whole = sum(every[k] * in_pool[k].get(pool, 0) for k in beside[kind])
            load = sum(working[k] * in_pool[k].get(pool, 0) for k in beside[kind])
            slowest = min(slowest, speed_beside(whole - 1, load - 1, polled, machine.pool_cores))
        return crowd * slowest

    def speed(kind: int, working: Sequence[int]) -> float:
        key = kind, *(working[k] for k in beside[kind])
        if key not in speeds:
            speeds[key] = 1 / (computed / room(kind, working) + 1 - computed)
        return speeds[key]

    return SharedCores([kinds[own] for own in held], speed)
