"""What a rank of a pipeline keeps of its microbatches: measured on one, and counted over the rank's order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from parlinalg.datasets import Batch
from parlinalg.nn.module import buffers_kept
from parlinalg.offload.extents import Away
from parlinalg.offload.table import blocks_of
from parlinalg.offload.weighing import Keeps, WeighedActivations, Weight, reckoned
from parlinalg.pipeline.run import ScheduleRun, Unit
from parlinalg.pipeline.schedule import Instruction, Op, Schedule, one_microbatch

if TYPE_CHECKING:
    from parlinalg.pipeline.worker import Task, Worker

NOTHING = Weight(0, 0)
SMALL = 1 << 16  # bytes of arrays that are not put away


def keeps(worker: Worker, batches: Mapping[int, Batch], work: Task, rows: int) -> Keeps:
    """What this rank keeps in a step of the worker's schedule; see `Worker.keeps`.  Collective."""
    schedule, rank = worker.schedule, worker.topology.rank
    found = {n: _weighed(worker, batch, work, SMALL * n // max(n, rows)) for n, batch in batches.items()}
    forward = {n: run.forward_weights for n, run in found.items()}
    later = {n: run.later_weights for n, run in found.items()}

    def most(i: int) -> int:
        one, two = (
            {c: reckoned({n: by[c][i] for n, by in each.items()}, rows) for c in range(len(schedule.chunks[rank]))}
            for each in (forward, later)
        )
        return peak(schedule.orders[rank], one, two)

    block = reckoned({n: run.weighed.block for n, run in found.items()}, rows)
    return Keeps(most(0), most(1), block, schedule.versions[rank] if schedule.asynchronous else 0)


def _weighed(worker: Worker, batch: Batch, work: Task, least: int) -> WeighingRun:
    """One microbatch on its way; arrays of fewer bytes than `least` would not be put away."""
    parameters = list(worker.model.parameters())
    blocks = blocks_of(worker.model) if parameters else []
    schedule, held = one_microbatch(worker.schedule), worker.held
    with ExitStack() as end:
        weighed = WeighedActivations(parameters, max(1, least))
        if blocks:
            end.enter_context(weighed)
            weighed.place(blocks)
        run = WeighingRun(worker, schedule, [batch] * schedule.microbatches, work, weighed)
        run.training(0, 0.0)
        end.enter_context(buffers_kept(worker.model))
        worker.finish(run)
    worker.held = held
    return run


def peak(order: Iterable[Instruction], forward: Mapping[int, int], later: Mapping[int, int]) -> int:
    """The most that a rank keeps at once.  Pure.

    Parameters
    ----------
    order : iterable of Instruction
        The rank's.
    forward, later : dict of int to int
        By chunk: what is kept of a microbatch from its forward pass on, and from BACKWARD_INPUT to BACKWARD_WEIGHT.

    >>> from parlinalg.pipeline import make_schedule
    >>> [peak(order, {0: 10}, {}) for order in make_schedule("1f1b", 3, 8).orders]
    [30, 20, 10]
    >>> [peak(order, {0: 10}, {0: 7}) for order in make_schedule("zb-h1", 3, 8).orders]
    [30, 27, 24]
    """
    now = most = 0
    for i in order:
        if i.op is Op.FORWARD:
            now += forward[i.chunk]
        elif i.op is Op.BACKWARD_INPUT:
            now += later[i.chunk] - forward[i.chunk]
        elif i.op is Op.BACKWARD:
            now -= forward[i.chunk]
        elif i.op is Op.BACKWARD_WEIGHT:
            now -= later[i.chunk]
        most = max(most, now)
    return most


class WeighingRun(ScheduleRun):
    """Finds what each chunk keeps of a microbatch; gives no gradients of parameters.

    Attributes
    ----------
    forward_weights, later_weights : dict of int to Weight
        By chunk: after the forward pass, and after the gradients of inputs where those of parameters come later.
    """

    def __init__(
        self, worker: Worker, schedule: Schedule, batches: Sequence[Batch], work: Task, weighed: WeighedActivations
    ) -> None:  # fmt: skip
        super().__init__(worker, schedule, batches, work)
        self.weighed = weighed
        self.forward_weights: dict[int, Weight] = {}
        self.later_weights: dict[int, Weight] = dict.fromkeys(range(len(self.held)), NOTHING)
        self.away: dict[Unit, weakref.WeakSet[Away]] = {}
        self.returns = {(i.chunk, i.microbatch) for i in self.order if i.op is Op.BACKWARD_INPUT}

    def forward(self, i: Instruction) -> None:
        unit = i.chunk, i.microbatch
        self.weighed.begin()
        super().forward(i)
        self.away[unit] = self.weighed.away
        self.forward_weights[i.chunk] = self.weigh(unit)
        if unit not in self.returns:
            del self.in_flight[unit]

    def backward(self, i: Instruction, *, later: bool) -> None:
        unit = i.chunk, i.microbatch
        super().backward(i, later=later)
        self.later_weights[i.chunk] = self.weigh(unit)
        del self.in_flight[unit]

    def weigh(self, unit: Unit) -> Weight:
        """What a microbatch of a chunk keeps now."""
        return self.weighed.weigh(self.in_flight[unit].holders(), self.away[unit])
