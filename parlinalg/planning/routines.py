"""The time of a planned factorization on a machine: the routine itself runs on imagined ranks, and its trace is timed.

Routines that go column by column have many events: `eigh`, `svd`, `lstsq` by singular values and `qr` with pivoting.
Beyond `MOST_STEPS` steps a routine is not run; then its words and calls take their time on the machine's links, and
its operations that of fast products, one after the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from parlinalg.backend.shapes import WhatIf
from parlinalg.grid import Grid, default_layout
from parlinalg.planning.imagine import imagine
from parlinalg.planning.machine import Machine
from parlinalg.planning.timeline import Timeline, timeline
from parlinalg.planning.trace import Trace
from parlinalg.units import ITEMSIZE, dtype_name, format_seconds

if TYPE_CHECKING:
    from parlinalg.linalg.planner import LinalgPlan

MOST_STEPS = 4096
"""Steps of a routine up to which it runs on imagined ranks: a column of `svd` takes 2 to 3 ms."""
STEPS_OF_ALL = 8192
"""Steps of all ranks of all plans that are compared up to which every rank is imagined, else the first alone."""
COMPARED = 5
"""The most plans that are compared."""


@dataclass(frozen=True)
class RoutineTime:
    """The time of a routine on a machine.

    Attributes
    ----------
    machine : Machine
    seconds : float
    run : Timeline or None
        The run of the routine's trace; None for one with too many steps to be imagined.
    peak : int or None
        The most bytes that an imagined rank held at once, its blocks of the arguments included.
    parts : dict of str to float
        The seconds of parts, where there is no trace.
    """

    machine: Machine
    seconds: float
    run: Timeline | None
    peak: int | None
    parts: dict[str, float]

    def __str__(self) -> str:
        if self.run is not None:
            bound = self.run.bound().replace(" of the step", " of it", 1)
            return f"{format_seconds(self.seconds)} on {self.machine.name}: {bound}"
        shares = ", ".join(f"{name} {100 * part / (self.seconds or 1):.0f}%" for name, part in self.parts.items())
        return f"about {format_seconds(self.seconds)} on {self.machine.name}, by operations, words and calls: {shares}"


def times_on(machine: Machine, plans: Sequence[LinalgPlan]) -> list[RoutineTime]:
    """Return the times of plans on a machine, of as many of the first ones as are compared.

    Raises
    ------
    ConfigError
        If the machine's file has no rate of products for the dtype.
    """
    best = plans[0]
    machine.peak(best.dtype)  # a dtype without a rate is refused before anything runs
    plans = plans[: min(COMPARED, max(1, MOST_STEPS // max(1, steps(best))))]
    return [
        _modelled(machine, plan) if steps(plan) > MOST_STEPS else _traced(machine, plan, len(plans)) for plan in plans
    ]


def _traced(machine: Machine, plan: LinalgPlan, compared: int) -> RoutineTime:
    """Return the time of the routine's trace, where so many plans are compared."""
    every = not by_columns(plan) and plan.ranks * steps(plan) * compared <= STEPS_OF_ALL
    on_node, peaks, traces = machine.ranks_on_node(plan.ranks), [], []
    for rank in range(plan.ranks if every else 1):
        trace, peak = traced(plan, rank, on_node, gpu=machine.gpus)
        traces.append(replace(trace, stands_for=(rank,)) if every else trace)
        peaks.append(peak)
    run = timeline(traces, machine, on_node=on_node)
    return RoutineTime(machine, run.seconds, run, max(peaks), {})


def _modelled(machine: Machine, plan: LinalgPlan) -> RoutineTime:
    """Return the time of the plan's operations, words and calls."""
    itemsize, on_node = ITEMSIZE[plan.dtype], machine.ranks_on_node(plan.ranks)
    real = 4 if plan.dtype.startswith("complex") else 1
    rate = machine.best_rate(plan.dtype) / real / machine.crowd(on_node, plan.ranks)
    found = {"products": plan.time.products / rate, "panels": plan.time.panels / rate}
    found = {name: seconds for name, seconds in found.items() if seconds}
    moves: defaultdict[str, float] = defaultdict(float)
    words, calls = plan.costs.book(plan.busiest)
    for (op, axes), count in calls.items():
        size = math.prod(plan.sizes[a] for a in axes if a in plan.sizes) if axes else plan.ranks
        local = max(1, min(size, on_node // _stride(plan, axes)))
        each = float(words[op, axes] * itemsize) / max(1, count)
        one = machine.transfer(op, each, max(2, size), local, on_node, plan.ranks)
        moves[op.replace("_", "-") + "s"] += count * one.total
    found |= moves
    return RoutineTime(machine, sum(found.values()), None, None, found)


def _stride(plan: LinalgPlan, axes: tuple[str, ...]) -> int:
    """Return how far the ranks that follow each other along some axes are apart."""
    names = list(plan.sizes)
    last = max((names.index(a) for a in axes if a in names), default=len(names) - 1)
    return math.prod(list(plan.sizes.values())[last + 1 :])


def by_columns(plan: LinalgPlan) -> bool:
    """Return True if a routine goes column by column."""
    alone = plan.routine == "svd" and plan.alone
    return plan.ranks > 1 and (plan.pivoting or plan.routine in ("eigh", "svd", "lstsq")) and not alone


def steps(plan: LinalgPlan) -> int:
    """Return the steps of a routine: the columns that ranks reduce or choose one by one, or else the panels."""
    k = min(plan.m, plan.n)
    if not by_columns(plan) or (plan.routine == "lstsq" and plan.alone):
        return -(-k // plan.block)
    return (2 if plan.routine in ("svd", "lstsq") else 1) * k


def traced(plan: LinalgPlan, rank: int, on_node: int, *, gpu: bool = False) -> tuple[Trace, int]:
    """Return the trace of a planned routine on one imagined rank, and the most bytes that it holds at once.

    Parameters
    ----------
    on_node : int
        Ranks of a node.
    gpu : bool
        The machine's ranks are GPUs.
    """
    node = plan.ranks if plan.near else max(1, min(on_node, plan.ranks - 1))
    assumed = imagine(plan.ranks, rank, node=node, target="gpu" if gpu else "cpu", what_if=WhatIf())
    with assumed as world:
        grid = Grid(plan.sizes)
        a = _zeros(grid, (plan.m, plan.n), plan.dtype)
        given = (a, _zeros(grid, (plan.m, plan.sides), plan.dtype)) if plan.routine in ("solve", "lstsq") else (a,)
        del a
        world.reset_peak()
        with world.trace() as trace:
            found = _call(plan, *given)
        peak = world.peak_memory
        del found, given
    return trace, peak


def _zeros(grid: Grid, shape: tuple[int, int], dtype: str) -> Any:
    from parlinalg.array.create import zeros

    return zeros(shape, grid, default_layout(tuple(grid.sizes), shape), dtype=dtype_name(dtype))


def _call(plan: LinalgPlan, *given: Any) -> Any:
    """Call the routine; where its tiles are not those that it chooses, the function that takes a block."""
    from parlinalg import linalg

    name, a = plan.routine, given[0]
    if plan.own_tiles or name in ("eigh", "svd", "lstsq"):  # of which tiles hardly change the time
        options: dict[str, Any] = {"depth": plan.depth} if name in ("cholesky", "solve") else {}
        if name == "svd":
            options = {"full_matrices": False}
        if plan.pivoting:
            options = {"pivoting": True}
        if name == "lu":
            work = linalg.lu_factor(a, depth=plan.depth)
            return (work.P, *work.factors())
        return getattr(linalg, name)(*given, **options)
    if name == "cholesky":
        return linalg.cho_factor(a, plan.block, depth=plan.depth).L
    if name == "qr":
        factor = linalg.qr_factor(a, plan.block)
        return factor.Q, factor.R
    if name == "lu":
        work = linalg.lu_factor(a, plan.block, depth=plan.depth)
        return (work.P, *work.factors())
    return linalg.lu_factor(a, plan.block, depth=plan.depth).solve(given[1])
