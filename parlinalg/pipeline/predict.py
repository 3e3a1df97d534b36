"""What a schedule would take with the times that were measured.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.costs import Costs
from parlinalg.pipeline.drawing.lanes import shifted
from parlinalg.pipeline.schedule import Op, Schedule
from parlinalg.pipeline.simulate import Simulation, simulate


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
        Of a message, with spans.
    cores : int, optional
        As in `simulate`.
    """
    costs = measured if isinstance(measured, Costs) else costs_of(schedule, measured, latency)
    return simulate(schedule, costs, cores)


def costs_of(
    schedule: Schedule, spans: Iterable[Sequence[object]], latency: float | Mapping[tuple[int, int], float] = 0.0,
    pick: Callable[[list[float]], float] = median,
) -> Costs:  # fmt: skip
    """The stages' costs in a run: of each the median over microbatches (and steps, and copies).

    Parameters
    ----------
    schedule : Schedule
        The one that ran.
    spans : iterable of (rank, op, chunk, microbatch, start, stop)
    latency : float or dict
        As in `Costs`.
    pick : callable
        What to take instead of the median; `min` where ranks share cores, which makes most passes longer.

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
