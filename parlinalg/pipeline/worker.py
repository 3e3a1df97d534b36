"""The worker, which executes a schedule's instructions in order.

After ShallowSpeed, where a schedule is instructions and a worker looks each up in one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from parlinalg.autograd import Parameter, Tensor, no_grad
from parlinalg.autograd.parameter import settle
from parlinalg.comm import Comm
from parlinalg.datasets import Batch
from parlinalg.errors import CommError, ConfigError
from parlinalg.parallel.clip import Gradients, examine
from parlinalg.parallel.memory import ActivationMemory
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline.activation_memory import activation_memory
from parlinalg.pipeline.model import PipelineModel
from parlinalg.pipeline.p2p import P2P
from parlinalg.pipeline.run import ScheduleRun
from parlinalg.pipeline.schedule import Schedule, forward_only
from parlinalg.pipeline.schedules import of_fewer
from parlinalg.pipeline.simulate import Span, validate
from parlinalg.pipeline.tied import TiedParameters


class Task(Protocol):
    """The loss and its surroundings, as a worker needs them of a training task."""

    def context(self, batch: Batch) -> AbstractContextManager[Sequence[Tensor]]:
        """Return a context manager for each stage's forward pass; it gives the loss terms that layers add."""
        ...

    def losses_of(self, output: Any, batch: Batch) -> tuple[Tensor, int, dict[str, float]]:
        """Return the sum of the losses of a last stage's output, their number, and the sums of further measures."""
        ...


class Worker:
    """This rank's part of a pipeline.  Making it is collective over all ranks of the mesh.

    Microbatches pass from stage to stage in messages for which only the stage that needs them waits; receives are
    posted ahead.  The sums of gradients over a stage's grid start in its last backward pass, as they arrive; after it
    they are settled, and those of parameters that several ranks hold are summed over these.

    Parameters
    ----------
    model : PipelineModel
        Initialized.
    schedule : Schedule
        The one that the model was split for.
    reducer : GradientReducer, optional
        The reducer of the parameters held here.

    Attributes
    ----------
    tied : TiedParameters
        The parameters that several ranks hold.
    spans : list of Span or None
        The times of this rank's instructions in the last step, in seconds since its begin; None unless it is set to a
        list, which the next step fills.
    outputs : dict of int to tree, or None
        On the ranks with the last stage, its outputs by microbatch; None unless it is set to a dict.
    peak_in_flight : int
        The most (chunk, microbatch) pairs that this rank has held between their forward and backward passes, at once.

    Raises
    ------
    ScheduleError
        On all ranks, if the schedule is wrong: it is simulated first.
    ConfigError
        If the model was split for another schedule.
    """

    def __init__(self, model: PipelineModel, schedule: Schedule, reducer: GradientReducer | None = None) -> None:
        validate(schedule)
        self.model, self.schedule, self.reducer = model, schedule, reducer
        self.topology = topology = model.topology
        held = tuple((stage.number, stage.copy) for stage in model.chunks)
        wanted = tuple((chunk.stage, chunk.copy) for chunk in schedule.chunks[topology.rank])
        if schedule.ranks != topology.size or held != wanted or model.stages != schedule.stages:
            raise ConfigError(
                f"pipeline rank {topology.rank} of {topology.size} holds the stages and copies {held} of "
                f"{model.stages} stages, but by the schedule {schedule.name!r} of {schedule.ranks} ranks it is to "
                f"hold {wanted} of {schedule.stages}: split the model for the schedule it runs"
            )
        self.grid = model.grid
        self.position = topology.ranks[topology.rank].index(topology.world.rank)
        self.comm: Comm = topology.world.sub(range(topology.world.size), ("pipeline",))
        self.p2p = P2P.of(model, self.comm)
        self.tied = TiedParameters(model, schedule, self.comm)
        self.spans: list[Span] | None = None
        self.outputs: dict[int, Any] | None = None
        self.peak_in_flight = 0
        self._others: dict[tuple[int, bool], Schedule] = {}
        self._broken = ""

    # ------------------------------------------------------------------ training and use
    def step(self, batches: Sequence[Batch], task: Task, step: int, factor: float) -> dict[str, float]:
        """Run forward and backward passes of all microbatches, and settle the gradients.  Collective.

        Parameters
        ----------
        batches : sequence of Batch
            The microbatches, the same on all ranks, each cut for the rank's own grid: the first stage takes `x` of
            them, the last `y`.  As many as the schedule has, or fewer, as at the end of an epoch.
        task : Task
        step : int
            The number of the step, for dropout.
        factor : float
            Gradients are those of the sum of all losses times it.

        Returns
        -------
        dict of str to float
            The sums of the "loss", with the terms that layers add, and of the measures, over all microbatches; on every
            rank, to the same bits.

        Raises
        ------
        ConfigError
            If there are more microbatches than the schedule has, or none.
        """
        schedule = self._for(len(batches))
        run = self._start(schedule, batches, task)
        run.training(step, factor)
        return self.finish(run)

    def forward(self, batches: Sequence[Batch], task: Task) -> dict[str, float]:
        """Run forward passes alone, of any number of batches, and return the sums as `step` does.  Collective."""
        if not batches:
            return {"loss": 0.0}
        key = len(batches), False
        if key not in self._others:
            self._others[key] = forward_only(self.schedule, len(batches))
        run = self._start(self._others[key], batches, task)
        with no_grad():
            run.evaluating()
        return self.finish(run)

    def activation_memory(self, batches: Mapping[int, Batch], task: Task, rows: int) -> ActivationMemory:
        """Return what this rank keeps of microbatches in a step, for `parlinalg.offload.plan(…, kept=…)`.  Collective.

        A microbatch passes forward, and where the schedule computes gradients of parameters later back to those of
        inputs; the schedule says how many are in flight.  Nothing is changed.

        Parameters
        ----------
        batches : dict of int to Batch
            A microbatch, by the most rows that a rank has of it; or two small ones, from which others are reckoned.
        task : Task
        rows : int
            The most that a rank has of a microbatch.
        """
        return activation_memory(self, batches, task, rows)

    def examine(self, parameters: Sequence[Parameter], scale: float = 1.0) -> Gradients:
        """Return the norm of the model's gradients, shared parameters counted once, and whether all are finite.

        Collective over all ranks; as `parlinalg.parallel.examine`, of the parameters held here.
        """
        return examine(parameters, scale, over=self.comm, owns=self.tied.owns)

    def start_reductions(self, chunk: int) -> None:
        """Start the reductions of the gradients to which the chunk's last pass will not add."""
        if (reducer := self._reduces()) is not None and len(self.model.chunks) > 1:
            reached = {id(p) for p in self.model.chunks[chunk].parameters()}
            reducer.no_more(p for p in reducer.parameters if id(p) not in reached)

    def settle(self) -> None:
        """Sum the gradients over each stage's grid, then over the holders of shared parameters."""
        if (reducer := self._reduces()) is not None:
            reducer.settle()
        settle(list(self.model.parameters()))
        self.tied.sum()

    def _reduces(self) -> GradientReducer | None:
        """Return the reducer, unless it was detached, as from parameters whose gradients are offloaded."""
        reducer = self.reducer
        return reducer if reducer is not None and any(p.reducer is reducer for p in reducer.parameters) else None

    # ------------------------------------------------------------------ one run
    def _for(self, microbatches: int) -> Schedule:
        most = self.schedule.microbatches
        if microbatches == most:
            return self.schedule
        if not 1 <= microbatches < most:
            raise ConfigError(
                f"the schedule {self.schedule.name!r} is of {most} microbatches, and a step is given {microbatches}: "
                f"give {most}, or at the end of an epoch at least 1"
            )
        key = microbatches, True
        if key not in self._others:
            self._others[key] = self._fewer(microbatches)
        return self._others[key]

    def _fewer(self, microbatches: int) -> Schedule:
        found = of_fewer(self.schedule, microbatches)
        validate(found)
        return found

    def _start(self, schedule: Schedule, batches: Sequence[Batch], task: Task) -> ScheduleRun:
        if self._broken:
            raise CommError(
                f"this worker's pipeline was broken off ({self._broken}), and messages may be lost: make another worker"
            )
        return self._run(schedule, batches, task)

    def _run(self, schedule: Schedule, batches: Sequence[Batch], task: Task) -> ScheduleRun:
        return ScheduleRun(self, schedule, batches, task)

    def finish(self, run: ScheduleRun) -> dict[str, float]:
        """Execute a run, and return its sums on all ranks."""
        try:
            run.go()
        except BaseException as error:
            self._broken = run.current
            error.add_note(f"in the pipeline: {run.current}, rank {self.topology.world.rank}")
            raise
        everyone = self.comm.share(run.sums if not self.position else [], others="by rank")
        sums: dict[str, float] = {"loss": 0.0}
        for _, _, found in sorted((each for rank_sums in everyone for each in rank_sums), key=lambda each: each[:2]):
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        """Free the communicators.  Collective."""
        if not self._broken:
            self.tied.close()
            self.comm.free()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # an error on this rank must not wait for the others
            self.close()
