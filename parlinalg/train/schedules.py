"""Schedules as an engine runs them: a batch of an iterator, in microbatches, forward and backward.

Here training meets pipelines: the engine and `initialize` know schedules, and that a model may be cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from parlinalg.autograd import Tensor
from parlinalg.errors import ConfigError, EngineError
from parlinalg.grid import Grid
from parlinalg.nn.module import Module
from parlinalg.pipeline import AsynchronousWorker, PipelineModel, Schedule, Worker, discover, make_schedule, split
from parlinalg.train.config import ScheduleConfig, TrainingConfig
from parlinalg.train.feed import Feed, Pass, drawn, dtype_of, joined, place_inputs, placement, rows_of
from parlinalg.train.losses import detached
from parlinalg.train.mesh import Mesh
from parlinalg.train.schema import integer, named, optional

if TYPE_CHECKING:
    from parlinalg.train.engine import Engine

#: Output and label where this rank holds the last stage, and the mean loss.
Result = tuple[Any, Any, float | None]


class Passes(NamedTuple):
    """The results of the passes of a batch's microbatches.

    Attributes
    ----------
    targets : float
        Those that count, over which the loss is the mean.
    sums : dict of str to float
        Over them, of the losses, as "loss", and of the metrics.
    outputs, labels : list
        Of the microbatches whose outputs are on this rank, if they are wanted.
    stepped : bool
        Whether the stages have made their steps themselves.
    """

    targets: float
    sums: dict[str, float]
    outputs: list[Any]
    labels: list[Any]
    stepped: bool = False


class BaseSchedule:
    """A way to run an engine over one batch.

    Parameters
    ----------
    num_microbatches : int
        Into which a batch is cut along its first dim.
    """

    def __init__(self, num_microbatches: int = 1) -> None:
        self.num_microbatches: int = integer(1)("num_microbatches", num_microbatches)

    def forward_backward_step(
        self, engine: Engine, data_iter: Iterator[Any], forward_only: bool = False, return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:  # fmt: skip
        """Take the next batch, and run the model over it, forward and backward; `engine.step()` is to follow.

        Collective over all ranks, which iterate the same batches.

        Parameters
        ----------
        engine : Engine
        data_iter : iterator
            Such as `iter(train_dataloader)`.
        forward_only : bool
            No backward pass, no gradients, and no step to follow: with `engine.eval()`, what evaluates.
        return_loss, return_output_label : bool
            Whether to return these; outputs of several microbatches are joined, which moves them and takes memory.

        Returns
        -------
        output : array or None
            The model's output for the batch; on the ranks that hold the last stage, None on others.
        label : array or None
            The batch's labels, where there are outputs.
        loss : float or None
            The mean over the batch, on every rank.

        Raises
        ------
        EngineError
            On all ranks, if the iterator has ended on any, the batch has fewer rows than there are microbatches,
            gradients wait for a step, or the loss is not finite and such steps are not skipped.
        """
        run = self.passes(_engine(engine))
        if not forward_only:
            engine.check_free(f"{type(self).__name__}.forward_backward_step")
        parts = self.batches(engine, data_iter, not forward_only)
        found = run(engine, parts, forward_only, return_output_label)
        loss = engine.record_batch(
            sum(rows_of(x) for x, _ in parts), found.targets, found.sums, computes_gradients=not forward_only,
            stepped=found.stepped,
        )  # fmt: skip
        joint = (joined(found.outputs), joined(found.labels)) if found.outputs else (None, None)
        return *joint, loss if return_loss else None

    def passes(self, engine: Engine) -> Callable[[Engine, Sequence[Any], bool, bool], Passes]:
        """Return the function that runs an engine over microbatches.

        It is given the engine, the microbatches, whether they pass forward only, and whether outputs are wanted.
        """
        raise NotImplementedError

    def order(self, ranks: int) -> Schedule:
        """Return the order of work of so many pipeline ranks."""
        raise ConfigError(
            f"{type(self).__name__} is for models that are not cut into stages, and the pipeline has {ranks} ranks: "
            f"give PipelineSchedule({max(ranks, self.num_microbatches)}), or leave it to the configuration's schedule"
        )

    def batches(self, engine: Engine, data_iter: Iterator[Any], computes_gradients: bool) -> list[Any]:
        """Return the next batch in microbatches; an evaluation may have fewer."""
        check = computes_gradients and engine.steps_done == 0
        parts = drawn(data_iter, self.num_microbatches, engine.world, check=check)
        cut_short = isinstance(data_iter, Pass) and data_iter.cuts  # the last batch of an epoch may be smaller
        if computes_gradients and len(parts) < self.num_microbatches and not cut_short:
            rows = sum(rows_of(x) for x, _ in parts)
            raise EngineError(
                f"a batch of {rows} rows cannot be cut into {self.num_microbatches} microbatches: give batches of at "
                f"least {self.num_microbatches} rows (a last, smaller one of an epoch too), or num_microbatches of at "
                f"most {rows}"
            )
        return parts


class NonPipelineSchedule(BaseSchedule):
    """Microbatches one after the other, on a model that is not cut into stages.

    With one, and `gradient_accumulation` in the configuration, each call takes a further batch into the step.
    """

    def passes(self, engine: Engine) -> Callable[[Engine, Sequence[Any], bool, bool], Passes]:
        if engine.in_stages:
            raise EngineError(
                f"{type(self).__name__}: this model is cut into the stages of a pipeline; use "
                f"PipelineSchedule({max(2, self.num_microbatches)}), or engine.schedule, that of the configuration"
            )
        return one_after_another


class PipelineSchedule(NonPipelineSchedule):
    """Microbatches through the stages of a pipeline.

    On a model that is not cut into stages it runs them one after the other.

    Parameters
    ----------
    num_microbatches : int
    schedule : str
        One of `parlinalg.pipeline.discover()`: "gpipe", "1f1b", "interleaved", "chimera", "zb-h1", "zb-v", …
        Stages of the asynchronous ones ("pipedream", "pipedream-2bw") make their own steps, before `engine.step()`.
    num_model_chunks : int, optional
        Stages that a rank holds, in schedules that let one choose.  The model must have been cut for as many: name the
        schedule in the configuration, or give this to `initialize`.
    every : int, optional
        The microbatches of an optimizer step, in asynchronous schedules.
    """

    def __init__(
        self, num_microbatches: int, schedule: str = "1f1b", num_model_chunks: int | None = None,
        *, every: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_microbatches)
        if schedule not in list(discover()):
            raise ConfigError(f"there is no pipeline schedule {schedule!r}; there are {', '.join(sorted(discover()))}")
        self.name, self.every = schedule, every
        self.num_model_chunks: int | None = optional(integer(1))("num_model_chunks", num_model_chunks)

    def order(self, ranks: int) -> Schedule:
        return make_schedule(self.name, ranks, self.num_microbatches, self.num_model_chunks, every=self.every)

    def passes(self, engine: Engine) -> Callable[[Engine, Sequence[Any], bool, bool], Passes]:
        if not engine.in_stages:
            return super().passes(engine)
        return partial(through_stages, worker_of(engine, self.order(engine.model.topology.size)))

    def __repr__(self) -> str:
        chunks = "" if self.num_model_chunks is None else f", num_model_chunks={self.num_model_chunks}"
        return f"PipelineSchedule({self.num_microbatches}, {self.name!r}{chunks})"


class InterleavedPipelineSchedule(PipelineSchedule):
    """Several stages a rank, each of fewer layers, so that the pipeline fills sooner (Narayanan et al., "Efficient
    large-scale language model training on GPU clusters using Megatron-LM", 2021).

    Parameters
    ----------
    num_microbatches : int
        A multiple of the pipeline's ranks.
    num_model_chunks : int
    """

    def __init__(self, num_microbatches: int, num_model_chunks: int) -> None:
        super().__init__(num_microbatches, "interleaved", num_model_chunks)


class LazyBatch:
    """A microbatch whose inputs are placed on the grid when they are asked for, which the first stage alone does."""

    def __init__(self, engine: Engine, part: Any, offset: int) -> None:
        self._engine, self.offset = engine, offset
        self._given, self.label = part
        self.part = part
        self.y = None
        """Labels are cut when there are outputs, as these."""
        self.count: int = engine.expected(part)

    @cached_property
    def x(self) -> Any:
        """The inputs, on the model's grid.  Collective."""
        return self._engine.placed(self._given)

    def __len__(self) -> int:
        return rows_of(self._given)


class EngineTask:
    """The task of a pipeline's worker, by an engine; see `parlinalg.pipeline.worker.Task`."""

    def __init__(self, engine: Engine, keeps: bool) -> None:
        self._engine, self._keeps = engine, keeps
        self.outputs: dict[int, Any] = {}

    def context(self, batch: LazyBatch) -> AbstractContextManager[Any]:
        """Return the context of a stage's forward pass."""
        return self._engine.context(batch.part)

    def losses_of(self, output: Any, batch: LazyBatch) -> tuple[Tensor, int, dict[str, float]]:
        """Return the sum of the losses, their number, and as measures that number and the sums of the metrics."""
        total, count, measures = self._engine.losses(output, batch.label)
        if self._keeps:
            self.outputs[batch.offset] = detached(output)
        return total, count, {"count": float(count), **measures}


def one_after_another(engine: Engine, parts: Sequence[Any], forward_only: bool, keeps: bool) -> Passes:
    """Run an engine over microbatches one after the other.  Collective."""
    found = []
    with engine.weighting_microbatches(parts, computes_gradients=not forward_only):
        for i, part in enumerate(parts):
            found.append(engine.microbatch(part, last=i == len(parts) - 1, forward_only=forward_only, keeps=keeps))
    sums = dict.fromkeys(("loss", *engine.metrics), 0.0)
    for each in found:
        for name, value in {"loss": each.loss, **each.measures}.items():
            sums[name] += value
    outputs, labels = ([each.output for each in found], [label for _, label in parts]) if keeps else ([], [])
    return Passes(sum(each.targets for each in found), sums, outputs, labels)


def through_stages(worker: Worker, engine: Engine, parts: Sequence[Any], forward_only: bool, keeps: bool) -> Passes:
    """Run the stages of an engine's model over microbatches, by their schedule.  Collective."""
    samples: list[Any] = []
    for part in parts:
        samples.append(LazyBatch(engine, part, sum(map(len, samples))))
    task: Any = EngineTask(engine, keeps)
    stepped = worker.schedule.asynchronous
    if forward_only:
        sums = worker.forward(samples, task)
    else:
        with engine.weighting_microbatches(parts):
            factor = 1.0 if stepped else engine.loss_scale / engine.reference
            sums = worker.step(samples, task, engine.steps_done, factor)
        engine.record_rows(sum(map(len, samples)), sums["count"])
    here = [sample for sample in samples if sample.offset in task.outputs]
    outputs, labels = [task.outputs[sample.offset] for sample in here], [sample.label for sample in here]
    return Passes(sums.pop("count"), sums, outputs, labels, stepped)


def worker_of(engine: Engine, order: Schedule) -> Worker:
    """Return what runs the stages of an engine's model in an order of work.  Collective at the first use of each.

    Raises
    ------
    ConfigError
        If this order cannot train the model, or make steps as the engine's update does.
    """
    if order not in engine.workers:
        model: Any = engine.model
        reducer: Any = next((p.reducer for p in engine.parameters() if p.reducer is not None), None)
        update = engine.update
        if order.asynchronous:
            update.check_asynchronous(order.name)
            engine.workers[order] = AsynchronousWorker(model, order, update.optimizer, reducer, update.of_one_stage)
        else:
            engine.workers[order] = worker = Worker(model, order, reducer)
            update.examine = worker.examine  # looks at all stages
    found: Worker = engine.workers[order]
    return found


def order_of(engine: Engine) -> Schedule | None:
    """Return the order of work of the stages of an engine's model; None where it is not cut into some."""
    if not engine.in_stages or engine.schedule is None:
        return None
    return engine.schedule.order(engine.model.topology.size)


def _engine(given: Any) -> Engine:
    if not hasattr(given, "weighting_microbatches"):
        raise EngineError(
            f"forward_backward_step takes the engine that initialize gives first, then an iterator of batches, not "
            f"{type(given).__name__}"
        )
    engine: Engine = given
    return engine


def check_schedule(where: str, schedule: Any) -> None:
    """Raise a ConfigError unless this is a schedule, or None."""
    if schedule is not None and (isinstance(schedule, type) or not hasattr(schedule, "forward_backward_step")):
        raise ConfigError(
            f"{where}: schedule must be e.g. PipelineSchedule(4) or PipelineSchedule(4, 'gpipe'), not {named(schedule)}"
        )


def schedule_for(engine: Engine, schedule: BaseSchedule | None) -> BaseSchedule:
    """Return the schedule that a trainer is given, or the engine's; raise a ConfigError if there is none."""
    check_schedule("Trainer", schedule)
    if (found := schedule or engine.schedule) is None:
        raise ConfigError("Trainer: neither it nor the engine has a schedule; give schedule=NonPipelineSchedule()")
    return found


def in_microbatches(config: TrainingConfig, mesh: Mesh) -> tuple[TrainingConfig, BaseSchedule | None]:
    """Return the configuration and schedule with which `gradient_accumulation` cuts the batch of a step into
    microbatches, instead of accumulating batches; None where the pipeline cuts it anyway."""
    if mesh.topology.size > 1:
        return config, None
    return replace(config, gradient_accumulation=1), NonPipelineSchedule(config.microbatches(1))


def schedule_of(config: TrainingConfig, mesh: Mesh | None, model: Module) -> BaseSchedule:
    """Return the schedule of a configuration; where it names none, one that runs the chunks of the model."""
    chunks = len(model.chunks) if isinstance(model, PipelineModel) else 1
    if mesh is None or (mesh.topology.size == 1 and not isinstance(model, PipelineModel)):
        return NonPipelineSchedule()
    chosen = config.schedule or (ScheduleConfig() if chunks == 1 else ScheduleConfig("interleaved", chunks=chunks))
    return PipelineSchedule(config.microbatches(mesh.topology.size), chosen.name, chosen.chunks, every=chosen.every)


def cut(model: Module, mesh: Mesh, schedule: BaseSchedule, seed: int, train: Feed | None, sample: Any) -> PipelineModel:
    """Cut a model into the stages of a schedule, and make the values of this rank's.  Collective.

    Parameters
    ----------
    model : Module
    mesh : Mesh
    schedule : schedule
    seed : int
    train, sample
        Data, and the model's inputs of a microbatch, as of `initialize`: the partitions "time" and "flops" need them.
    """
    order = schedule.order(mesh.topology.size)
    if sample is None and train is not None:
        train.place(partial(placement, model, mesh.grid, mesh.world))
        sample = partial(_first, model, mesh.grid, train, order.microbatches)
    elif sample is not None and not callable(sample):
        sample = partial(_placed, model, mesh.grid, sample)
    return split(model, mesh.topology, order, mesh.spec.partition, sample).initialize(seed)


def _first(model: Module, grid: Grid, train: Feed, microbatches: int) -> Any:
    """Return the model's inputs of the first microbatch.  Collective."""
    try:
        x, _ = train.first(microbatches)
    except StopIteration:
        raise ConfigError(
            "initialize: the layers are to be measured or counted with the first batch of train_dataloader, which "
            "gives none: give sample=…, the model's inputs of a microbatch, or another partition"
        ) from None
    return _placed(model, grid, x)


def _placed(model: Module, grid: Grid, x: Any) -> Any:
    rows_of(x)  # raises where they are none
    return place_inputs(model, x, grid, dtype_of(model))
