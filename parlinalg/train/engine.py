"""The engine: a model, its criterion and its optimizer behind the calls of a training loop.

Accumulated gradients, clipping, the scale of the loss and sums over data parallel ranks are handled inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from parlinalg.autograd import Parameter, Tensor, no_grad, no_sync
from parlinalg.comm import Comm
from parlinalg.datasets import Batch
from parlinalg.errors import ConfigError, EngineError
from parlinalg.grid import Grid
from parlinalg.nn import Module, added_losses
from parlinalg.nn.added_losses import AddedLosses
from parlinalg.nn.module import buffers_kept
from parlinalg.optim import Optimizer
from parlinalg.random.draws import Draws, using_draws
from parlinalg.sequence import positions_of
from parlinalg.train.feed import Feed, dtype_of, place_inputs, placement, rows_of, some_rows
from parlinalg.train.losses import (
    Criterion,
    Metric,
    MicrobatchWeights,
    check_loss,
    detached,
    expected,
    number,
    placed_label,
    sum_of_losses,
)
from parlinalg.train.schema import check_values, integer
from parlinalg.train.update import Update

if TYPE_CHECKING:
    from parlinalg.train.schedules import BaseSchedule


class Microbatch(NamedTuple):
    """The results of a microbatch.

    Attributes
    ----------
    loss : float
        The sum of the losses.
    targets : int
        How many they are.
    measures : dict of str to float
        The sums of the engine's metrics.
    output : array, or a tree of them, or None
    """

    loss: float
    targets: int
    measures: dict[str, float]
    output: Any


class Engine:
    """A model with its criterion and optimizer, as `initialize` returns it.

    Attributes
    ----------
    model : Module
    update : Update
        From gradients to parameters, by the optimizer.
    optimizer : Optimizer
    accumulate : int
        Calls of `step` that make one step of the optimizer.
    steps_done, skipped : int
        Optimizer steps so far, skipped ones included, and those skipped since a loss or gradient was not finite.
    schedule : schedule or None
        Run by `execute_schedule`.
    metrics : dict of str to callable
        Measured by schedules beside the loss; see `initialize`.
    memory_plan : OffloadPlan or None
        Where parameters, gradients, states and activations are kept, if not all are in memory.
    resources : ExitStack
        Closed by `restore`.
    workers : dict
        By the order of work, what runs the stages of a model that is cut into some; kept by schedules.
    rows : int
    targets : float
    measures : dict of str to float
        For the last batch that a schedule ran: its rows, the targets that its loss is the mean of, and the sums over
        them of the losses, as "loss", and of the metrics.

    Examples
    --------
    >>> for inputs, labels in train_dataloader:  # doctest: +SKIP
    ...     engine.zero_grad()
    ...     loss = engine.criterion(engine(inputs), labels)
    ...     engine.backward(loss)
    ...     if engine.step():
    ...         lr_scheduler.step()
    """

    def __init__(
        self, model: Module, update: Update, criterion: Criterion, grid: Grid, world: Comm, *, accumulate: int = 1,
        schedule: BaseSchedule | None = None, metrics: Mapping[str, Metric] | None = None,
        test_criterion: Criterion | None = None,
    ) -> None:  # fmt: skip
        self.model, self.grid, self.world = model, grid, world
        self.accumulate, self.schedule = accumulate, schedule
        self.steps_done = self.skipped = 0
        self.metrics = dict(metrics or {})
        self.memory_plan: Any = None
        self.resources = ExitStack()
        self.workers: dict[Any, Any] = {}
        self.rows, self.targets = 0, 0.0
        self.measures: dict[str, float] = {}
        self.update, self._criterion, self._test_criterion = update, criterion, test_criterion or criterion
        self._norm: float | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset the state of a step, before its first microbatch."""
        self._microbatch = 0  # calls of step() in this step of the optimizer
        self._sums = MicrobatchWeights()  # of the microbatches before this one
        self._finite = True
        self._stepped = False  # by a schedule whose stages make their own steps
        self._next_microbatch()

    def _next_microbatch(self) -> None:
        self._draws: Draws | None = None
        self._forwarded = 0  # rows since the last backward pass
        self._counted: int | None = None  # targets since the last backward pass, where the criterion is the engine's
        self._weight: float | None = None  # of this microbatch, once it had a backward pass
        self._added = AddedLosses()

    # ------------------------------------------------------------------ what it is
    @property
    def optimizer(self) -> Optimizer:
        return self.update.optimizer

    @property
    def in_stages(self) -> bool:
        """True if the model is cut into stages, so that only schedules can run it."""
        return self.model.in_stages

    @property
    def training(self) -> bool:
        return self.model.training

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the gradient of the whole model in the last step, before clipping; None before the first."""
        return self._norm

    @property
    def loss_scale(self) -> float:
        """The factor of losses before the backward pass."""
        return self.update.scale

    @property
    def scales_loss(self) -> bool:
        """True if losses are scaled, as for float16."""
        return self.update.scales

    @property
    def skips_nonfinite(self) -> bool:
        """True if steps whose loss or gradient is not finite are skipped."""
        return self.update.skips

    def parameters(self) -> Iterator[Parameter]:
        """Return the parameters of which this rank has blocks."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Return these parameters with their qualified names."""
        return self.model.named_parameters()

    def train(self, mode: bool = True) -> Engine:
        """Set the model to training mode, or with False to evaluation mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model to evaluation mode, without dropout."""
        return self.train(False)

    # ------------------------------------------------------------------ a step
    def __call__(self, inputs: Any) -> Any:
        """Return the output of the model.  Collective.

        Parameters
        ----------
        inputs : array, DistArray, Tensor, a tree of them, or Batch
            Host arrays are the same, unsharded, on every rank; each cuts its own block.  A `Batch` of text also has the
            positions of its tokens.

        Raises
        ------
        EngineError
            If the model is cut into stages.
        """
        if self.in_stages:
            raise EngineError(
                "engine(x): this model is cut into stages, of which this rank holds some; use "
                "schedule.forward_backward_step(engine, data_iter), with forward_only=True to evaluate"
            )
        x = inputs.x if isinstance(inputs, Batch) else inputs
        if not self.training:
            with self.context(inputs):
                return self.model(self.placed(x))
        if self._draws is None:
            self._draws = Draws(self.steps_done, self._sums.rows)
            self._forwarded = some_rows(x)
        with self.context(inputs) as added, using_draws(self._draws), self.update.tolerance():
            output = self.model(self.placed(x))
        self._added += added
        return output

    def placed(self, x: Any) -> Any:
        """Return inputs on the model's grid: host arrays are cut, and floating ones get the model's dtype."""
        return place_inputs(getattr(self.model, "full_model", self.model), x, self.grid, dtype_of(self.model))

    def feed(self, loader: Any) -> Feed:
        """Return a data loader for this engine, each iteration of which is another epoch.  Collective."""
        feed = loader if isinstance(loader, Feed) else Feed(loader, self.world)
        return feed.place(
            lambda: placement(self.model, self.grid, self.world, lambda label: expected(self._criterion, label))
        )

    @contextmanager
    def context(self, batch: Any) -> Iterator[AddedLosses]:
        """Return the context of a forward pass, with the positions of tokens; it yields the loss terms of layers."""
        with positions_of(batch), added_losses(self.training) as found:
            yield found

    def criterion(self, output: Any, label: Any) -> Tensor:
        """Return the mean loss of outputs and labels, with the terms that layers add.  Collective.

        Labels that are host arrays are cut as the first dims of the output.
        """
        total, count, _ = self.losses(output, label, measure=False)
        return self._with_terms(total, count) * (1 / max(1, count))

    def losses(self, output: Any, label: Any, *, measure: bool = True) -> tuple[Tensor, int, dict[str, float]]:
        """Return the sum of the losses, how many they are, and the sums of the metrics.  Collective."""
        label = placed_label(label, output, self.grid)
        with self.update.tolerance():
            total, count = sum_of_losses(self._criterion if self.training else self._test_criterion, output, label)
        measured = self.metrics.items() if measure else ()
        return total, count, {name: number(name, f(detached(output), detached(label))) for name, f in measured}

    def _with_terms(self, total: Tensor, count: int) -> Tensor:
        """Add the terms that layers add to the sum of the losses."""
        self._counted = count + (self._counted or 0)
        added, self._added = self._added, AddedLosses()
        return added.added_to(total, self._sums.of_terms(self._forwarded, count))

    @contextmanager
    def weighting_microbatches(self, parts: Sequence[Any], *, computes_gradients: bool = True) -> Iterator[None]:
        """Context in which each microbatch of a batch is weighted by the batch's total rows and targets."""
        targets = sum(map(self.expected, parts))
        if computes_gradients:
            self._sums.refer_to(targets)
        with self._sums.expecting(sum(rows_of(x) for x, _ in parts), targets), self.update.tolerance():
            yield

    def expected(self, part: Any) -> int:
        """Return the number of targets of a microbatch that count."""
        return part.count if isinstance(part, Batch) else expected(self._criterion, part[1])

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a mean loss, accumulating gradients over the step's microbatches.  Collective.

        Each microbatch is weighted by its number of targets.

        Raises
        ------
        EngineError
            If no forward pass in training went before, the loss depends on no parameter or is used up, or is not
            finite and steps that are not finite are not skipped.
        """
        check_loss(loss)
        if not self._forwarded and self._weight is None:
            raise EngineError(
                "engine.backward(loss) before engine(x): every backward pass follows a forward pass in training "
                "(engine.train()) of its own"
            )
        if loss.node is None:
            raise EngineError(
                "engine.backward(loss): the loss depends on no parameter; compute it from what engine(x) gives, after "
                "engine.train() and outside of no_grad()"
            )
        if loss.node.used:
            raise EngineError(
                "engine.backward(loss): this loss had its backward pass; compute it again for another one"
            )
        if self._weight is None:
            count = self._forwarded if self._counted is None else self._counted
            weight = max(1.0, float(count))
            self._sums.refer_to(weight)
            self._sums.targets += count
        else:
            weight = self._weight
        self.check_finite(loss.item())
        self._backward(loss, weight)
        self._sums.rows += self._forwarded
        self._next_microbatch()
        self._weight = weight

    def _backward(self, loss: Tensor, weight: float = 1.0, last: bool = True) -> None:
        """Make the backward pass of a loss of this weight; `last`: its batch has no further microbatch."""
        syncs = last and self._microbatch == self.accumulate - 1
        with nullcontext() if syncs else no_sync(), self.update.tolerance():
            (loss * (self.update.scale * weight / self._sums.reference)).backward()

    def microbatch(self, part: Any, *, last: bool, forward_only: bool, keeps: bool = False) -> Microbatch:
        """Run a microbatch of a schedule, forward and, unless it is only that, backward.  Collective.

        Parameters
        ----------
        part : pair or Batch
        last : bool
            Whether its batch has no further one.
        forward_only : bool
        keeps : bool
            Whether the output is wanted.
        """
        total, count, measures, output = self._forward(part, forward_only, keeps)
        if not forward_only:
            self._backward(total, last=last)
            self._sums.rows += self._forwarded
            self._sums.targets += count
        self._next_microbatch()
        return Microbatch(float(total.item()), count, measures, output)

    def _forward(
        self, part: Any, forward_only: bool = False, keeps: bool = False
    ) -> tuple[Tensor, int, dict[str, float], Any]:  # fmt: skip
        """Return the sum of the losses of a microbatch with the terms of layers, their number, measures and output."""
        x, label = part
        with no_grad() if forward_only else nullcontext():
            output = self(part if isinstance(part, Batch) else x)
            total, count, measures = self.losses(output, label)
            with self.update.tolerance():
                return self._with_terms(total, count), count, measures, detached(output) if keeps else None

    def check_finite(self, loss: float) -> None:
        """Note whether a loss is finite; raise where steps that are not finite are not skipped."""
        if math.isfinite(loss):
            return
        self._finite = False
        if not self.update.skips:
            of = f" of microbatch {self._microbatch}" if self.accumulate > 1 else ""
            changed = "" if self._stepped else ": nothing has changed"
            self.zero_grad(all=True)
            raise EngineError(
                f"step {self.steps_done + 1}: the loss{of} is {loss}, and so would be all that follow{changed}; lower "
                f"the learning rate (now {self.optimizer.lr:g}), let it rise slowly by lr_schedule=dict(warmup=100), "
                "clip by clip_grad_norm=1.0, or leave such steps out by skip_nonfinite=True"
            )

    def step(self) -> bool:
        """Change the parameters, if this microbatch is the last one of a step.  Collective.

        Returns
        -------
        bool
            Whether the parameters have changed: then `lr_scheduler.step()` is due.

        Raises
        ------
        EngineError
            If there was no backward pass since the last call.
        """
        if self._weight is None:
            raise EngineError(
                "engine.step() without a backward pass since the last one: call engine.backward(loss), or a "
                "schedule's forward_backward_step, before each"
            )
        self._microbatch += 1
        if self._microbatch < self.accumulate:
            self._next_microbatch()
            return False
        if self._stepped:
            self._norm, changed = None, True
        else:
            self._norm, changed = self.update(self._finite, self.update.scale * self._sums.scale)
        self.steps_done += 1
        self.skipped += not changed
        self._begin()
        return changed

    def zero_grad(self, *, all: bool = False) -> None:
        """Forget the gradients, unless they are those of earlier microbatches of the current step.

        `step` forgets them too.

        Parameters
        ----------
        all : bool
            Those of earlier microbatches too: the step begins again.
        """
        if all or (self._microbatch == 0 and self._weight is None):
            self.optimizer.zero_grad()
            self._begin()

    # ------------------------------------------------------------------ schedules
    def execute_schedule(self, data_iter: Iterator[Any], **options: Any) -> tuple[Any, Any, Any]:
        """Run the engine's schedule: its `forward_backward_step(engine, data_iter, …)`."""
        if self.schedule is None:
            raise EngineError("this engine has no schedule; give initialize(…, schedule=…) one")
        return self.schedule.forward_backward_step(self, data_iter, **options)

    @property
    def reference(self) -> float:
        """The number of targets by which the sums of losses of a batch are divided before the backward pass."""
        return self._sums.reference

    def record_batch(
        self, rows: int, targets: float, measures: Mapping[str, float], *, computes_gradients: bool,
        stepped: bool = False,
    ) -> float:  # fmt: skip
        """Record a batch that a schedule has run: its rows, targets and sums; return the mean loss.

        Parameters
        ----------
        rows : int
        targets : float
        measures : dict of str to float
        computes_gradients : bool
            Whether gradients were computed and wait for `step`.
        stepped : bool
            Whether the stages have made their steps themselves.
        """
        self.rows, self.targets, self.measures = rows, float(targets), dict(measures)
        loss = self.measures["loss"] / max(1.0, self.targets)
        if computes_gradients:
            self._weight, self._stepped = self.targets, stepped
            self.check_finite(loss)
        return loss

    def record_rows(self, rows: int, targets: float) -> None:
        """Count the rows and targets of a batch that the stages of a model have run."""
        self._sums.rows += rows
        self._sums.targets += targets

    def check_free(self, what: str) -> None:
        """Raise unless a schedule may run: not with gradients that wait for a step."""
        if self._weight is not None:
            raise EngineError(f"{what} after a backward pass whose step is not made: call engine.step()")

    # ------------------------------------------------------------------ memory
    @contextmanager
    def probing(self, part: Any) -> Iterator[Tensor]:
        """Return a context with the loss of a microbatch from which nothing is learned.  Collective."""
        with buffers_kept(self.model):
            yield self._forward(part)[0]
        self._next_microbatch()

    def restore(self) -> None:
        """Bring offloaded parameters back into memory; offloaded optimizer states are gone.  Collective."""
        self.resources.close()

    # ------------------------------------------------------------------ state
    def progress(self) -> dict[str, Any]:
        """Return the position of the training, beside parameters and optimizer states, as plain values for JSON."""
        return {"made": self.steps_done, "skipped": self.skipped, **self.update.progress()}

    def check_progress(self, progress: Mapping[str, Any]) -> None:
        """Raise an error unless `set_progress` can take this."""
        check_values("", progress, {"made": integer(0), "skipped": integer(0)})
        self.update.check_progress(progress)

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Restore the position that `progress` gave: the next step begins with the first microbatch of its batch."""
        self.update.set_progress(progress)
        self.steps_done, self.skipped = int(progress["made"]), int(progress["skipped"])
        self.zero_grad(all=True)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a training needs to go on.  Collective.

        In a pipeline the optimizer's states are those of this rank's stages, for the same grid; `CheckpointHook` saves
        for any.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.  Collective."""
        check_state("engine.load_state_dict", state, ("model", "optimizer", "progress"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.set_progress(state["progress"])


def check_state(where: str, state: Any, keys: Sequence[str]) -> None:
    """Raise a ConfigError unless this has the keys of a state."""
    lacking = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if lacking:
        raise ConfigError(f"{where} takes what state_dict() gave; this lacks {', '.join(lacking)}")
