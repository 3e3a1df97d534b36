"""Memory that a rank of a pipeline keeps for its microbatches: measured on one, and counted over the rank's order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from parlinalg.datasets import Batch
from parlinalg.nn.module import buffers_kept
from parlinalg.offload.probe import ActivationProbe, blocks_of, extrapolated
from parlinalg.offload.stores import OffloadedBytes
from parlinalg.parallel.memory import NOTHING, ActivationMemory
from parlinalg.pipeline.run import ScheduleRun, Unit
from parlinalg.pipeline.schedule import Instruction, Op, Schedule, one_microbatch

if TYPE_CHECKING:
    from parlinalg.pipeline.worker import Task, Worker

SMALL = 1 << 16  # bytes of arrays that are not offloaded


def activation_memory(worker: Worker, batches: Mapping[int, Batch], task: Task, rows: int) -> ActivationMemory:
    """Return the memory of activations of this rank in a step; see `Worker.activation_memory`.  Collective."""
    schedule, rank = worker.schedule, worker.topology.rank
    found = {n: _probed(worker, batch, task, SMALL * n // max(n, rows)) for n, batch in batches.items()}
    forward = {n: run.after_forward for n, run in found.items()}
    later = {n: run.after_input for n, run in found.items()}

    chunks = range(len(schedule.chunks[rank]))

    def most(kind: str) -> int:
        one, two = (
            {c: extrapolated({n: getattr(by[c], kind) for n, by in each.items()}, rows) for c in chunks}
            for each in (forward, later)
        )
        return peak(schedule.orders[rank], one, two)

    block = extrapolated({n: run.probe.block for n, run in found.items()}, rows)
    return ActivationMemory(most("most"), most("stays"), block, schedule.versions[rank] if schedule.asynchronous else 0)


def _probed(worker: Worker, batch: Batch, task: Task, least: int) -> ProbeRun:
    """Return the run of one microbatch; arrays of fewer bytes than `least` would not be offloaded."""
    parameters = list(worker.model.parameters())
    blocks = blocks_of(worker.model) if parameters else []
    schedule, peak = one_microbatch(worker.schedule), worker.peak_in_flight
    with ExitStack() as end:
        probe = ActivationProbe(parameters, max(1, least))
        if blocks:
            end.enter_context(probe)
            probe.place(blocks)
        run = ProbeRun(worker, schedule, [batch] * schedule.microbatches, task, probe)
        run.training(0, 0.0)
        end.enter_context(buffers_kept(worker.model))
        worker.finish(run)
    worker.peak_in_flight = peak
    return run


def peak(order: Iterable[Instruction], forward: Mapping[int, int], later: Mapping[int, int]) -> int:
    """Return the most that a rank keeps at one time.  Pure.

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


class ProbeRun(ScheduleRun):
    """A run that measures what each chunk keeps of a microbatch; it gives no gradients of parameters.

    Attributes
    ----------
    after_forward, after_input : dict of int to ActivationMemory
        By chunk: after the forward pass, and after the gradients of inputs where those of parameters come later.
    """

    def __init__(
        self, worker: Worker, schedule: Schedule, batches: Sequence[Batch], task: Task, probe: ActivationProbe
    ) -> None:  # fmt: skip
        super().__init__(worker, schedule, batches, task)
        self.probe = probe
        self.after_forward: dict[int, ActivationMemory] = {}
        self.after_input: dict[int, ActivationMemory] = dict.fromkeys(range(len(self.chunks)), NOTHING)
        self.away: dict[Unit, weakref.WeakSet[OffloadedBytes]] = {}
        self.returns = {(i.chunk, i.microbatch) for i in self.order if i.op is Op.BACKWARD_INPUT}

    def forward(self, i: Instruction) -> None:
        unit = i.chunk, i.microbatch
        self.probe.begin()
        super().forward(i)
        self.away[unit] = self.probe.away
        self.after_forward[i.chunk] = self.measure(unit)
        if unit not in self.returns:
            del self.in_flight[unit]

    def backward(self, i: Instruction, *, later: bool) -> None:
        unit = i.chunk, i.microbatch
        super().backward(i, later=later)
        self.after_input[i.chunk] = self.measure(unit)
        del self.in_flight[unit]

    def measure(self, unit: Unit) -> ActivationMemory:
        """Return the memory that a microbatch of a chunk keeps now."""
        return self.probe.measure(self.in_flight[unit].holders(), self.away[unit])
