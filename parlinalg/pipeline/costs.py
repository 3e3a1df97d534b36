"""What the instructions of a schedule cost.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import Instruction, Op, Schedule

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

    def check(self, schedule: Schedule) -> None:
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

    def of(self, schedule: Schedule, rank: int, i: Instruction) -> float:
        """The time an instruction takes of its rank; messages take none."""
        if i.op in (Op.REDUCE_GRADIENTS, Op.STEP):
            return _at(self.reduce if i.op is Op.REDUCE_GRADIENTS else self.step, rank)
        stage = schedule.chunks[rank][i.chunk].stage
        if i.op is Op.FORWARD:
            return _at(self.forward, stage)
        if i.op is Op.BACKWARD:
            return _at(self.backward, stage)
        if i.op is Op.BACKWARD_INPUT:
            return _at(self.backward, stage) - _at(self.weight, stage)
        return _at(self.weight, stage) if i.op is Op.BACKWARD_WEIGHT else 0.0

    def delay(self, sender: int, receiver: int) -> float:
        """The time a message takes from a rank to another."""
        if isinstance(self.latency, Mapping):
            return self.latency.get((sender, receiver), 0.0)
        return self.latency


def _at(cost: Cost, place: int) -> float:
    return cost[place] if isinstance(cost, Sequence) else cost


def _check_times(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not (value >= 0 and math.isfinite(value)):
            raise ScheduleError(f"a cost {name}={value}: times are finite numbers of at least 0")
