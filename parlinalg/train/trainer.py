"""A training loop over an engine, with hooks at its points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any

import numpy as np

from parlinalg.comm.signals import StopSignals
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, EngineError
from parlinalg.optim.schedules import Scheduler
from parlinalg.train.arguments import check_rate, check_schedule, check_state, length_of, whole_number
from parlinalg.train.checkpoint_options import check_kept
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed
from parlinalg.train.hooks import CheckpointHook, EvaluateHook, Hook
from parlinalg.train.pipeline_schedules import BaseSchedule


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
        Called in this order at every point.

    Attributes
    ----------
    epoch, step : int
        Epochs and steps made; a step changes the parameters once.
    metrics : dict of str to float
        The last numbers of all kinds: "loss", "lr", "grad_norm", "samples_per_s", "test_loss" and what hooks add; the
        same on every rank, but for those that measure time.

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
        check_schedule("Trainer", schedule)
        check_rate("Trainer", lr_scheduler, made=True)
        chosen = schedule or engine.schedule
        if chosen is None:
            raise ConfigError("Trainer: neither it nor the engine has a schedule; give schedule=NonPipelineSchedule()")
        if not isinstance(hooks, Iterable):
            raise ConfigError(f"Trainer: hooks is a list of hooks, not {type(hooks).__name__}; write hooks=[…]")
        hooks = list(hooks)
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"Trainer: a hook is a parlinalg.Hook, not {type(hook).__name__}; make it a subclass, which "
                    "overrides the methods that it needs"
                )
        self.engine, self.schedule, self.lr_scheduler = engine, chosen, lr_scheduler
        self.hooks = hooks
        self.epoch = self.step = 0
        self._taken = 0  # batches of the epoch under way
        self.metrics: dict[str, float] = {}
        self.evaluates = False
        """Whether a training evaluates by itself, or by an EvaluateHook."""
        self.why = ""
        """Why the training was stopped, if it was."""
        self.signal = ""
        """The signal that stopped it, if one did; a script that Slurm is to start again ends with 128 + its number."""

    def stop(self, why: str) -> None:
        """End the training after this step, on all ranks, where a hook of any calls it."""
        self.why = why

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
                whole_number(f"Trainer.fit: {name}", value, 0)
        whole_number("Trainer.fit: test_interval", test_interval)
        feed, accumulate = self._feed(train_dataloader), self.engine.accumulate
        if (count := self._batches(feed, "train_dataloader")) < accumulate:
            raise EngineError(
                f"Trainer.fit: the train_dataloader has {count} batches, and gradient_accumulation={accumulate} takes "
                f"{accumulate} a step: give more, or accumulate fewer"
            )
        if test_dataloader is not None:
            test_dataloader = self._feed(test_dataloader)
            self._batches(test_dataloader, "test_dataloader")
        self.evaluates = test_dataloader is not None or any(isinstance(hook, EvaluateHook) for hook in self.hooks)
        end = None if epochs is None else self.epoch + epochs
        self.why = self.signal = ""
        with StopSignals() if self._heeds_signals() else nullcontext() as stop:
            self._train(feed, end, steps, test_dataloader, test_interval, stop)
        return dict(self.metrics)

    def _heeds_signals(self) -> bool:
        """Whether a hook saves the training where a signal ends it, and Python lets this thread take signals."""
        main = current_thread() is main_thread()
        return main and any(isinstance(hook, CheckpointHook) and hook.signals for hook in self.hooks)

    def _train(
        self, feed: Feed, end: int | None, steps: int | None, test_dataloader: Any, test_interval: int,
        stop: StopSignals | None,
    ) -> None:  # fmt: skip
        """The epochs, and what follows each."""
        self.engine.train()
        self._call("before_train")
        self._agree()
        tested = -1
        while not self.why and (end is None or self.epoch < end) and (steps is None or self.step < steps):
            self._epoch(feed, steps, stop)
            if self.signal:  # there may be little time
                break
            last = self.why or (end is not None and self.epoch >= end) or (steps is not None and self.step >= steps)
            if test_dataloader is not None and (last or self.epoch % test_interval == 0) and tested != self.step:
                self.evaluate(test_dataloader)
                tested = self.step
            self._call("after_train_epoch")
            self._agree()
        self._call("after_train")

    def _epoch(self, feed: Feed, steps: int | None, stop: StopSignals | None) -> None:
        """The steps of an epoch, or as many as are left."""
        engine = self.engine
        self._call("before_train_epoch")
        batches, whole = feed.at(self.epoch, self._taken), self._batches(feed, "train_dataloader")
        while self._taken + engine.accumulate <= whole:
            if self.why or (steps is not None and self.step >= steps):
                return
            self._call("before_train_iter")
            began, total, count, rows = perf_counter(), 0.0, 0.0, 0
            for _ in range(engine.accumulate):
                output, label, loss = self.schedule.forward_backward_step(
                    engine, batches, return_output_label=any(hook.wants_output for hook in self.hooks)
                )
                total, count = total + (loss or 0.0) * max(1.0, engine.targets), count + engine.targets
                rows += engine.rows
                lr = engine.optimizer.lr
                changed = engine.step()
            if changed and self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.step, self._taken = self.step + 1, self._taken + engine.accumulate
            self.metrics |= {"loss": total / max(1.0, count), "lr": lr, "grad_norm": engine.gradient_norm or 0.0}
            self.metrics["samples_per_s"] = rows / max(perf_counter() - began, 1e-9)
            self._call("after_train_iter", output, label, self.metrics["loss"])
            if stop is not None and (name := stop.requested(engine.world)):
                self.signal = name
                self.stop(f"stopped by {name}")
            self._agree()
        self.epoch, self._taken = self.epoch + 1, 0

    def evaluate(self, test_dataloader: Iterable[Any]) -> float:
        """The mean loss over all targets of these batches, which is `metrics["test_loss"]` too.  Collective."""
        engine, feed = self.engine, self._feed(test_dataloader)
        number = self._batches(feed, "test_dataloader")
        was = engine.training
        engine.eval()
        self._call("before_test")
        total = count = 0.0
        batches = feed.at(0)
        try:
            for _ in range(number):
                self._call("before_test_iter")
                output, label, loss = self.schedule.forward_backward_step(
                    engine, batches, forward_only=True,
                    return_output_label=any(hook.wants_output for hook in self.hooks),
                )  # fmt: skip
                total, count = total + (loss or 0.0) * engine.targets, count + engine.targets
                self._call("after_test_iter", output, label, loss)
        finally:
            engine.train(was)
        self.metrics["test_loss"] = total / max(1.0, count)
        self._call("after_test")
        return self.metrics["test_loss"]

    def _feed(self, loader: Iterable[Any]) -> Feed:
        return loader if isinstance(loader, Feed) else self.engine.feed(loader)

    def _batches(self, feed: Feed, name: str) -> int:
        """How many batches an epoch has, on all ranks; some."""
        world, why = self.engine.world, f"Trainer: the {name} is to say how many batches an epoch has"
        counts = world.share(together(world, lambda: length_of(feed.source, why)))
        odd = next((rank for rank, n in enumerate(counts) if n != counts[0]), None)
        if odd is not None:
            raise EngineError(
                f"the dataloader of rank {odd} has {counts[odd]} batches, that of rank 0 {counts[0]}: all ranks "
                "iterate the same batches, whole, and each cuts its own block"
            )
        if not counts[0]:
            raise EngineError(f"Trainer: the {name} has no batches")
        return counts[0]

    def _agree(self) -> None:
        """Whether hooks have stopped the training, on whatever ranks.  Collective."""
        if not self.hooks:
            return
        world, flag = self.engine.world, np.array([bool(self.why)], np.int32)
        books, world.books = world.books, []  # the ledger is about the training
        try:
            world.all_reduce(flag, op="max")
            if flag[0]:
                self.why = next(filter(None, world.share(self.why)))
        finally:
            world.books = books

    def _call(self, point: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, point)(self, *arguments)

    # ------------------------------------------------------------------ state
    def progress(self) -> dict[str, Any]:
        """How far the training is, beside parameters and the states of the optimizer: what JSON can carry."""
        rate = self.lr_scheduler
        if rate is not None and not hasattr(rate, "state_dict"):
            raise ConfigError(
                f"Trainer: the lr_scheduler, a {type(rate).__name__}, has no state_dict() and load_state_dict(), which "
                "saving the training takes"
            )
        return {
            "engine": self.engine.progress(),
            "lr_scheduler": None if rate is None else rate.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "batches": self._taken,
        }

    def check_progress(self, progress: Mapping[str, Any]) -> None:
        """Raise an error unless `set_progress` can take this."""
        engine = progress["engine"]
        scaled = self.engine.progress()["scaler"] is not None and engine["scaler"] is not None
        check_kept(progress, ("epoch", "step", "batches"), ())
        check_kept(engine, ("made", "skipped"), ("optimizer", *(["scaler"] if scaled else [])))
        if isinstance(self.lr_scheduler, Scheduler) and progress["lr_scheduler"] is not None:
            check_kept({"scheduler": progress["lr_scheduler"]}, (), ("scheduler",))

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Be as far as `progress` said."""
        self.engine.set_progress(progress["engine"])
        if self.lr_scheduler is not None and progress["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(progress["lr_scheduler"])
        self.epoch, self.step = int(progress["epoch"]), int(progress["step"])
        self._taken = int(progress["batches"])

    def state_dict(self) -> dict[str, Any]:
        """What the training needs to go on as if it had not stopped, between two steps.  Collective."""
        return {"state": self.engine.state_dict(), **self.progress()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.  Collective."""
        check_state("Trainer.load_state_dict", state, ("state", "engine", "lr_scheduler", "epoch", "step", "batches"))
        self.engine.load_state_dict(state["state"])
        self.set_progress(state)
