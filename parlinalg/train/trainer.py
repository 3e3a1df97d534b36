"""A training loop over an engine, with hooks at its points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from signal import Signals
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any

import numpy as np

from parlinalg.comm.signals import StopSignals
from parlinalg.comm.together import together
from parlinalg.errors import CheckpointError, ConfigError, EngineError
from parlinalg.optim.schedules import Scheduler
from parlinalg.train.engine import Engine, check_state
from parlinalg.train.feed import Feed, length_of
from parlinalg.train.hooks import EvaluateHook, Hook
from parlinalg.train.schedules import BaseSchedule, schedule_for
from parlinalg.train.schema import check_values, integer, named, real


class _Means:
    """The means of a loss and of metrics over the targets of several batches."""

    def __init__(self) -> None:
        self.count = 0.0
        self.sums: dict[str, float] = {}

    def add(self, engine: Engine) -> None:
        """Add those of the batch that the engine has run."""
        self.count += engine.targets
        for name, value in engine.measures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def __call__(self) -> dict[str, float]:
        return {name: value / max(1.0, self.count) for name, value in self.sums.items()}


class Trainer:
    """Trains an engine epoch after epoch.

    Parameters
    ----------
    engine : Engine
    schedule : schedule, optional
        By default the engine's.
    lr_scheduler : scheduler, optional
        Stepped after every step that changed the parameters.
    hooks : sequence of Hook
        Called in this order at every point but `after_train`, which goes backwards: what began last ends first.

    Attributes
    ----------
    epoch, step : int
        Epochs and steps made; a step changes the parameters once.
    metrics : dict of str to float
        The last numbers of all kinds: "loss", "lr", "grad_norm", "samples_per_s", "test_loss", the engine's metrics
        ("accuracy", "test_accuracy") and what hooks add; the same on every rank, but for those that measure time.
    step_metrics : dict of str to float
        Those of them that were measured in the last step, or on held-out data since.
    targets, seconds : float
        For the last step: the targets that its loss is the mean of, and the time it took.

    Examples
    --------
    >>> trainer = Trainer(engine, lr_scheduler=lr_scheduler, hooks=[LogHook(every=10)])  # doctest: +SKIP
    >>> trainer.fit(train_dataloader, epochs=3, test_dataloader=test_dataloader)  # doctest: +SKIP
    """

    def __init__(
        self, engine: Engine, schedule: BaseSchedule | None = None, *, lr_scheduler: Any = None,
        hooks: Sequence[Hook] = (),
    ) -> None:  # fmt: skip
        if not isinstance(engine, Engine):
            raise ConfigError(f"Trainer takes the engine that initialize gives first, not {type(engine).__name__}")
        self.engine, self.schedule = engine, schedule_for(engine, schedule)
        check_rate("Trainer", lr_scheduler, made=True)
        if not isinstance(hooks, Iterable):
            raise ConfigError(f"Trainer: hooks is a list of hooks, not {type(hooks).__name__}; write hooks=[…]")
        hooks = list(hooks)
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"Trainer: a hook is a parlinalg.Hook, not {type(hook).__name__}; make it a subclass, which "
                    "overrides the methods that it needs"
                )
        self.lr_scheduler = lr_scheduler
        self.hooks = hooks
        self.epoch = self.step = 0
        self._finished = False
        self._taken = 0  # batches of the current epoch
        self.metrics: dict[str, float] = {}
        self.step_metrics: dict[str, float] = {}
        self.targets = self.seconds = 0.0
        self._end: int | None = None  # the epoch, and the step, to end with
        self._steps: int | None = None
        self._batches_an_epoch = 0
        self._order: dict[str, int] = {}
        self.evaluates = False
        """Whether a training evaluates by itself, or by an EvaluateHook."""
        self.why = ""
        """Why the training was stopped, if it was."""
        self.signal = ""
        """The signal that stopped it, if one did; a script that Slurm is to start again ends with 128 + its number."""

    def stop(self, why: str) -> None:
        """End the training after this step, on all ranks, where a hook of any calls it."""
        self.why = why

    def add_metrics(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to those of this step, for what hooks measure."""
        self.metrics |= numbers
        self.step_metrics |= numbers

    @property
    def last_step(self) -> int | None:
        """The number of the last step that `fit` is to make; None before it."""
        ends = [] if self._steps is None else [self._steps]
        if self._end is not None:
            each, taken = self._batches_an_epoch // self.engine.accumulate, self._taken // self.engine.accumulate
            ends.append(self.step + (self._end - self.epoch) * each - taken)
        return min(ends, default=None)

    def fit(
        self, train_dataloader: Iterable[Any], epochs: int | None = None, *, steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None, test_interval: int = 1,
    ) -> dict[str, float]:  # fmt: skip
        """Train, from where the training is: in the middle of an epoch too.  Collective.

        Parameters
        ----------
        train_dataloader : Feed or iterable
            With a length; batches at its end that are too few for `gradient_accumulation` are left out.
        epochs : int, optional
            Passes over it, or until `steps` are made.
        steps : int, optional
            Steps in all, those made before counted.
        test_dataloader : Feed or iterable, optional
            Evaluated after every `test_interval` epochs, and at the end.

        Returns
        -------
        dict of str to float
            The last metrics.
        """
        if epochs is None and steps is None:
            raise ConfigError("Trainer.fit: say how long to train, by epochs or by steps")
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None:
                integer(0)(f"Trainer.fit: {name}", value)
        integer(1)("Trainer.fit: test_interval", test_interval)
        feed, accumulate = self._feed(train_dataloader), self.engine.accumulate
        self._batches_an_epoch = count = self._batches(feed, "train_dataloader")
        if count < accumulate:
            raise EngineError(
                f"Trainer.fit: the train_dataloader has {count} batches, and gradient_accumulation={accumulate} takes "
                f"{accumulate} a step: give more, or accumulate fewer"
            )
        if test_dataloader is not None:
            test_dataloader = self._feed(test_dataloader)
            self._batches(test_dataloader, "test_dataloader")
        self.evaluates = test_dataloader is not None or any(isinstance(hook, EvaluateHook) for hook in self.hooks)
        self._end, self._steps = None if epochs is None else self.epoch + epochs, steps
        self._order = feed.order()
        self.why = self.signal = ""
        try:
            with StopSignals() if self._heeds_signals() else nullcontext() as stop:
                self._train(feed, test_dataloader, test_interval, stop)
        finally:
            for hook in self.hooks:
                hook.close(self)
        return dict(self.metrics)

    def _heeds_signals(self) -> bool:
        """Return True if a hook saves the training where a signal ends it, and Python lets this thread take signals."""
        return current_thread() is main_thread() and any(hook.signals for hook in self.hooks)

    def _train(self, feed: Feed, test_dataloader: Any, test_interval: int, stop: StopSignals | None) -> None:
        self.engine.train()
        self._call("before_train")
        self._agree()
        tested = -1
        while not self.why and not self._done:
            self._epoch(feed, stop)
            if self.signal:  # there may be little time
                break
            last = self.why or self._done
            if test_dataloader is not None and (last or self.epoch % test_interval == 0) and tested != self.step:
                self.evaluate(test_dataloader)
                tested = self.step
            self._call("after_train_epoch")
            self._agree()
        self._finished = False
        self._call("after_train", reverse=True)
        if not self._finished:
            self.finish()

    def finish(self) -> list[str]:
        """Call `Hook.finish` of every hook, at the end of a training; return their lines.  Collective."""
        self._finished = True
        return [line for hook in self.hooks for line in hook.finish(self)]

    @property
    def _done(self) -> bool:
        """True once the epochs or steps that were asked for are made."""
        epochs = self._end is not None and self.epoch >= self._end
        return epochs or (self._steps is not None and self.step >= self._steps)

    def _epoch(self, feed: Feed, stop: StopSignals | None) -> None:
        self._call("before_train_epoch")
        batches, count = feed.at(self.epoch, self._taken), self._batches(feed, "train_dataloader")
        while self._taken + self.engine.accumulate <= count:
            if self.why or (self._steps is not None and self.step >= self._steps):
                return
            self._step(batches)
            self._agree(stop)
        self.epoch, self._taken = self.epoch + 1, 0

    def _step(self, batches: Iterator[Any]) -> None:
        engine = self.engine
        self._call("before_train_iter")
        self.step_metrics = {}
        began, means, rows = perf_counter(), _Means(), 0
        wanted = any(hook.wants_output for hook in self.hooks)
        for _ in range(engine.accumulate):
            output, label, _ = self.schedule.forward_backward_step(engine, batches, return_output_label=wanted)
            means.add(engine)
            rows += engine.rows
            lr, scale = engine.optimizer.lr, engine.loss_scale
            changed = engine.step()
        if changed and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.step, self._taken = self.step + 1, self._taken + engine.accumulate
        self.targets, self.seconds = means.count, max(perf_counter() - began, 1e-9)
        norm = engine.gradient_norm
        self.add_metrics({
            **means(), "lr": lr, "samples_per_s": rows / self.seconds, "grad_norm": math.nan if norm is None else norm,
            **({"loss_scale": scale} if engine.scales_loss else {}),
            **({"skipped_steps": engine.skipped} if engine.skips_nonfinite else {}),
        })  # fmt: skip
        self._call("after_train_iter", output, label, self.metrics["loss"])

    def evaluate(self, test_dataloader: Iterable[Any], name: str = "test") -> float:
        """Return the mean loss over all targets of these batches, also `metrics["test_loss"]`.  Collective.

        Parameters
        ----------
        test_dataloader : Feed or iterable
        name : str
            Begins the names of what is measured: "test" of "test_loss" and of the engine's metrics.
        """
        engine, feed = self.engine, self._feed(test_dataloader)
        number = self._batches(feed, "test_dataloader")
        was, means, batches = engine.training, _Means(), feed.at(0)
        wanted = any(hook.wants_output for hook in self.hooks)
        engine.eval()
        self._call("before_test")
        try:
            for _ in range(number):
                self._call("before_test_iter")
                output, label, loss = self.schedule.forward_backward_step(
                    engine, batches, forward_only=True, return_output_label=wanted
                )
                means.add(engine)
                self._call("after_test_iter", output, label, loss)
        finally:
            engine.train(was)
        found = {f"{name}_{measure}": value for measure, value in means().items()}
        self.add_metrics(found)
        self._call("after_test")
        return found[f"{name}_loss"]

    def _feed(self, loader: Iterable[Any]) -> Feed:
        return loader if isinstance(loader, Feed) else self.engine.feed(loader)

    def _batches(self, feed: Feed, name: str) -> int:
        """Return the number of batches of an epoch, equal on all ranks and not 0.  Collective."""
        world, why = self.engine.world, f"Trainer: the {name} is to say how many batches an epoch has"
        counts = world.share(together(world, lambda: length_of(feed.source, why)), others="alike")
        odd = next((rank for rank, n in enumerate(counts) if n != counts[0]), None)
        if odd is not None:
            raise EngineError(
                f"the dataloader of rank {odd} has {counts[odd]} batches, that of rank 0 {counts[0]}: all ranks "
                "iterate the same batches, whole, and each cuts its own block"
            )
        if not counts[0]:
            raise EngineError(f"Trainer: the {name} has no batches")
        return counts[0]

    def _agree(self, stop: StopSignals | None = None) -> None:
        """Learn whether hooks, or a signal, have stopped the training, on whatever ranks.  Collective."""
        if not self.hooks:
            return
        flags = np.array([bool(self.why), 0 if stop is None else stop.pending], np.int32)
        world = self.engine.world
        with world.uncounted():
            world.all_reduce(flags, op="max")
            if flags[1]:
                self.signal = Signals(int(flags[1])).name
                self.why = f"stopped by {self.signal}"
            elif flags[0]:
                self.why = next(filter(None, world.share(self.why, others="alike")))

    def _call(self, point: str, *arguments: Any, reverse: bool = False) -> None:
        for hook in reversed(self.hooks) if reverse else self.hooks:
            getattr(hook, point)(self, *arguments)

    # ------------------------------------------------------------------ state
    def progress(self) -> dict[str, Any]:
        """Return the position of the training, beside parameters and optimizer states, as plain values for JSON."""
        rate = self.lr_scheduler
        if rate is not None and not hasattr(rate, "state_dict"):
            raise ConfigError(
                f"Trainer: the lr_scheduler, a {type(rate).__name__}, has no state_dict() and load_state_dict(), which "
                "saving the training needs"
            )
        return {
            "engine": self.engine.progress(),
            "lr_scheduler": None if rate is None else rate.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "batches": self._taken,
            "data": self._order,
        }

    def check_progress(self, progress: Mapping[str, Any]) -> None:
        """Raise an error unless `set_progress` can take this, of a training with the same data."""
        for key, was in progress["data"].items():
            if self._order.get(key, was) != was:
                raise CheckpointError(
                    f"it is of a training with {key}={was}, this one has {key}={self._order[key]}: its batches would "
                    "be others; use the same, or train from the start (without --resume, or resume=True)"
                )
        check_values("", progress, {"epoch": integer(0), "step": integer(0), "batches": integer(0)})
        self.engine.check_progress(progress["engine"])
        if isinstance(self.lr_scheduler, Scheduler) and progress["lr_scheduler"] is not None:
            check_values("scheduler", progress["lr_scheduler"], {"steps": integer(0), "base": real(0)})

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Restore the position in the training that `progress` gave."""
        self.engine.set_progress(progress["engine"])
        if self.lr_scheduler is not None and progress["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(progress["lr_scheduler"])
        self.epoch, self.step = int(progress["epoch"]), int(progress["step"])
        self._taken = int(progress["batches"])

    def state_dict(self) -> dict[str, Any]:
        """Return all that the training needs to go on, between two steps.  Collective."""
        return {"state": self.engine.state_dict(), **self.progress()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.  Collective."""
        check_state("Trainer.load_state_dict", state, ("state", "engine", "lr_scheduler", "epoch", "step", "batches"))
        self.engine.load_state_dict(state["state"])
        self.set_progress(state)


def check_rate(where: str, rate: Any, made: bool = False) -> None:
    """Raise a ConfigError unless this steps a learning rate, or is None; or makes one, unless it is `made` already."""
    steps = callable(getattr(rate, "step", None)) and not isinstance(rate, type)
    if rate is not None and not steps and (made or not callable(rate)):
        maker = ", or a function that makes one of the optimizer, such as lambda o: Scheduler(o, Cosine(1000))"
        raise ConfigError(f"{where}: lr_scheduler is an object with step(){'' if made else maker}, not {named(rate)}")
