"""Schedules as an engine runs them: a batch of an iterator, in microbatches, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from parlinalg.autograd import Tensor
from parlinalg.datasets import Batch
from parlinalg.errors import ConfigError, EngineError
from parlinalg.nn.module import Module
from parlinalg.pipeline import PipelineModel, Schedule, discover, make_schedule
from parlinalg.train.config import ScheduleConfig, TrainingConfig
from parlinalg.train.feed import Pass, drawn, joined, rows_of
from parlinalg.train.losses import detached
from parlinalg.train.mesh import Mesh
from parlinalg.train.schema import integer, named, optional

if TYPE_CHECKING:
    from parlinalg.train.engine import Engine

#: Output and label where this rank holds the last stage, and the mean loss.
Result = tuple[Any, Any, float | None]


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
        raise NotImplementedError

    def made(self, ranks: int) -> Schedule:
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

    def forward_backward_step(
        self, engine: Engine, data_iter: Iterator[Any], forward_only: bool = False, return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:  # fmt: skip
        if _engine(engine).pipelined:
            raise EngineError(
                f"{type(self).__name__}: this model is cut into the stages of a pipeline; use "
                f"PipelineSchedule({max(2, self.num_microbatches)}), or engine.schedule, that of the configuration"
            )
        if not forward_only:
            engine.check_free(f"{type(self).__name__}.forward_backward_step")
        parts = self.batches(engine, data_iter, not forward_only)
        outputs, labels, count = [], [], 0
        sums = dict.fromkeys(("loss", *engine.metrics), 0.0)
        with engine.weighting_microbatches(parts, computes_gradients=not forward_only):
            for i, part in enumerate(parts):
                made = engine.microbatch(
                    part, last=i == len(parts) - 1, forward_only=forward_only, keeps=return_output_label
                )
                count += made.targets
                for name, value in {"loss": made.loss, **made.measures}.items():
                    sums[name] += value
                if return_output_label:
                    outputs.append(made.output)
                    labels.append(part[1] if not isinstance(part, Batch) else part.y)
        loss = engine.record_batch(sum(rows_of(x) for x, _ in parts), count, sums, computes_gradients=not forward_only)
        joint = (joined(outputs), joined(labels)) if return_output_label else (None, None)
        return *joint, loss if return_loss else None


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

    def made(self, ranks: int) -> Schedule:
        return make_schedule(self.name, ranks, self.num_microbatches, self.num_model_chunks, every=self.every)

    def forward_backward_step(
        self, engine: Engine, data_iter: Iterator[Any], forward_only: bool = False, return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Result:  # fmt: skip
        if not _engine(engine).pipelined:
            return super().forward_backward_step(engine, data_iter, forward_only, return_loss, return_output_label)
        if not forward_only:
            engine.check_free(f"{type(self).__name__}.forward_backward_step")
        worker = engine.worker(self.made(engine.model.topology.size))
        parts = self.batches(engine, data_iter, not forward_only)
        offset = 0
        samples: list[Any] = []
        for part in parts:
            samples.append(Sample(engine, part, offset))
            offset += len(samples[-1])
        task: Any = Stages(engine, return_output_label)
        stepped = worker.schedule.asynchronous
        if forward_only:
            sums = worker.forward(samples, task)
        else:
            with engine.weighting_microbatches(parts):
                factor = 1.0 if stepped else engine.loss_scale / engine.reference
                sums = worker.step(samples, task, engine.steps_done, factor)
            engine.record_rows(offset, sums["count"])
        count = sums.pop("count")
        loss = engine.record_batch(offset, count, sums, computes_gradients=not forward_only, stepped=stepped)
        outputs = [task.outputs[sample.offset] for sample in samples if sample.offset in task.outputs]
        labels = [sample.label for sample in samples if sample.offset in task.outputs]
        joint = (joined(outputs), joined(labels)) if outputs else (None, None)
        return *joint, loss if return_loss else None

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


class Sample:
    """A microbatch as the stages see it; its inputs are cut where they are asked for, in the first one."""

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


class Stages:
    """The engine as the task of a pipeline's worker; see `parlinalg.pipeline.worker.Task`."""

    def __init__(self, engine: Engine, keeps: bool) -> None:
        self._engine, self._keeps = engine, keeps
        self.outputs: dict[int, Any] = {}

    def context(self, batch: Sample) -> AbstractContextManager[Any]:
        """Return the context of a stage's forward pass."""
        return self._engine.context(batch.part)

    def losses_of(self, output: Any, batch: Sample) -> tuple[Tensor, int, dict[str, float]]:
        """Return the sum of the losses, their number, and as measures that number and the sums of the metrics."""
        total, count, measures = self._engine.losses(output, batch.label)
        if self._keeps:
            self.outputs[batch.offset] = detached(output)
        return total, count, {"count": float(count), **measures}


def _engine(given: Any) -> Engine:
    """Return the engine that a schedule is to run; raise an EngineError if it is not an engine."""
    if not hasattr(given, "pipelined"):
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
