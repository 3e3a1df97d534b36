"""A timeline as text: a line a rank, time to the right."""

from __future__ import annotations

import math
from fractions import Fraction

from parlinalg.pipeline.drawing.lanes import lanes
from parlinalg.pipeline.simulate import Simulation

COLUMNS = 400  # of time at most, where costs have no larger common measure than their shortest


def staircase(simulation: Simulation) -> str:
    """The simulated timeline as text: `F0` is the forward pass of microbatch 0, `-` goes on with it, `.` is idle.

    A column is the greatest common measure of all times; where that would make too many, the shortest computation, and
    times are rounded.

    >>> from parlinalg.pipeline.schedules import make
    >>> from parlinalg.pipeline.simulate import Costs, simulate
    >>> print(staircase(simulate(make("1f1b", 2, 3), Costs(forward=1, backward=2))))
    rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
    rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    """
    rows = lanes(simulation)
    unit = _unit(simulation)
    width = 1 + max((len(box.label) for row in rows for box in row.boxes), default=1)
    name = len(str(simulation.schedule.ranks - 1))
    total = _column(simulation.makespan, unit)
    lines = []
    for row in rows:
        text, at = "", 0
        for box in row.boxes:
            start, stop = _column(box.span.start, unit), _column(box.span.stop, unit)
            if stop > start:
                long = stop - start > 1
                text += _idle(start - at, width)
                text += box.label.ljust((stop - start) * width - 1, "-" if long else " ") + " "
                at = stop
        lines.append(f"rank {row.rank:{name}}  {text}{_idle(total - at, width)}".rstrip())
    return "\n".join(lines)


def _idle(columns: int, width: int) -> str:
    return ".".ljust(width) * columns


def _column(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


def _unit(simulation: Simulation) -> float:
    times = {t for s in simulation.spans for t in (s.start, s.stop) if t > 0}
    if not times:
        return 1.0
    exact = [Fraction(t).limit_denominator(10**6) for t in times]
    common = math.lcm(*(t.denominator for t in exact))
    unit = math.gcd(*(int(t * common) for t in exact)) / common
    if unit > 0 and simulation.makespan / unit <= COLUMNS:
        return unit
    return min(s.stop - s.start for s in simulation.spans if s.stop > s.start)
