"""Hooks, which a `Trainer` calls at fixed points of a training."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlinalg.comm.streams import Lines, tell
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.train.checkpoint import Checkpoints, better, check_options, removal_error
from parlinalg.train.feed import check_loader
from parlinalg.train.schema import integer, optional, real, refuse

if TYPE_CHECKING:
    from parlinalg.train.trainer import Trainer


class Hook:
    """Does nothing at any point: a subclass overrides the methods of those that it needs.

    Every rank calls every hook, so that hooks may be collective.  Outputs and labels are there on the ranks that hold
    the last stage, for hooks that want them.
    """

    wants_output = False
    """True: the outputs of a batch are kept and joined, for `output` and `label`; else these are None."""
    signals = False
    """True: SIGTERM, SIGINT and SIGUSR1 end a training after the current step; `trainer.signal` names the signal."""
    files: Sequence[str] = ()
    """The paths of files and, with a "/" at the end, folders that the hook leaves."""
    lost: Sequence[str] = ()
    """The paths that others have removed or replaced while the training ran."""
    reports_lost = False
    """True: the hook raises at the end for what all hooks have lost, so that these do not."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in vars(cls):
            if name.startswith(("before_", "after_")) and not hasattr(Hook, name):
                points = [point for point in vars(Hook) if point.startswith(("before_", "after_"))]
                near = difflib.get_close_matches(name, points, n=1, cutoff=0)
                raise ConfigError(
                    f"{cls.__name__}.{name}: there is no such point of a training; did you mean {near[0]!r}?  There "
                    f"are {', '.join(points)}"
                )

    def before_train(self, trainer: Trainer) -> None: ...

    def after_train(self, trainer: Trainer) -> None: ...

    def before_train_epoch(self, trainer: Trainer) -> None: ...

    def after_train_epoch(self, trainer: Trainer) -> None: ...

    def before_train_iter(self, trainer: Trainer) -> None: ...

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None: ...

    def before_test(self, trainer: Trainer) -> None: ...

    def after_test(self, trainer: Trainer) -> None: ...

    def before_test_iter(self, trainer: Trainer) -> None: ...

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None: ...

    def finish(self, trainer: Trainer) -> list[str]:
        """Leave what is to be left of a training that has ended; return lines that say so.  Collective."""
        return []

    def close(self, trainer: Trainer) -> None:
        """Release files and the like, also where the training failed on this rank alone; does not communicate."""


class LogHook(Hook):
    """Says the metrics, on rank 0.

    Parameters
    ----------
    every : int
        Steps from one line to the next.
    to : callable or path
        What takes the line; of a path, the file that gets the metrics of every such step as a line of JSON.  Lines that
        cannot be written, as on a full disk, do not end a training: standard error reports the first one.
    """

    def __init__(self, every: int = 1, to: Callable[[str], object] | str | Path = print) -> None:
        self.every, self.to = integer(1)("LogHook: every", every), to
        self._lines: Lines | None = None
        if not callable(to) and not isinstance(to, str | Path):
            raise ConfigError(f"LogHook: to is a function that takes a line, or the path of a file, not {to!r}")

    def before_train(self, trainer: Trainer) -> None:
        together(trainer.engine.world, lambda: self._open(trainer), "opening the log")

    def _open(self, trainer: Trainer) -> None:
        """Make the file, so that a path that cannot be written is found before the training."""
        if not callable(self.to) and trainer.engine.world.rank == 0:
            Path(self.to).parent.mkdir(parents=True, exist_ok=True)
            Path(self.to).open("a").close()
            self._lines = Lines(Path(self.to))

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None:
        if trainer.step % self.every == 0:
            self._say(trainer)

    def after_test(self, trainer: Trainer) -> None:
        self._say(trainer)

    def _say(self, trainer: Trainer) -> None:
        if trainer.engine.world.rank != 0:
            return
        if callable(self.to):
            numbers = ", ".join(f"{name} {value:.6g}" for name, value in trainer.metrics.items())
            self.to(f"epoch {trainer.epoch}, step {trainer.step}: {numbers}")
            return
        known = {name: v if math.isfinite(v) else None for name, v in trainer.metrics.items()}
        if self._lines is not None:
            self._lines.add(json.dumps({"step": trainer.step, "epoch": trainer.epoch, **known}) + "\n")

    def close(self, trainer: Trainer) -> None:
        if self._lines is not None:
            self._lines.add()


class CheckpointHook(Hook):
    """Saves the training, to go on from on any grid.

    One checkpoint follows the last step, and the step after which a signal stops the training.

    Parameters
    ----------
    to : str, Path or callable
        A folder that all ranks see; or what is called with the trainer instead, on all ranks.
    every : int, optional
        Steps from one checkpoint to the next.
    keep, background
        As of `parlinalg.train.checkpoint.Checkpoints`.
    best : str, optional
        One of the trainer's metrics.  Where an evaluation finds it the best so far there is a checkpoint too, and it
        stays as long as no later one is better.
    resume : bool
        Whether a training begins with the last checkpoint in the folder, where there is one: on this grid or another.
        Else checkpoints that are there are set aside.
    fall_back : bool
        With `resume`: where that one is damaged, begin with the last that is not; else it is an error.
    signals : bool
        Whether SIGTERM, SIGINT and SIGUSR1 end a training after the current step, with a checkpoint; `trainer.signal`
        then names the signal.
    saves : bool
        Whether checkpoints are made; else the training only resumes.
    notes : dict, optional
        What JSON can carry, saved with each checkpoint: how the ranks were used, say.
    """

    def __init__(
        self, to: str | Path | Callable[[Trainer], object], every: int | None = None, *, keep: int | None = 3,
        best: str | None = None, background: bool = True, resume: bool = False, fall_back: bool = False,
        signals: bool = True, saves: bool = True, notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.notes = dict(notes or {})
        if fall_back and not resume:
            raise ConfigError("CheckpointHook: fall_back says how to resume: add resume=True, or leave it out")
        self.signals, self.fall_back, self.resume, self.saves = signals, fall_back, resume, saves
        self.to, self.every = to, None if every is None else integer(1)("CheckpointHook: every", every)
        self.options: dict[str, Any] = {"keep": keep, "best": best, "background": background}
        if not callable(to) and not isinstance(to, str | Path):
            raise ConfigError(f"CheckpointHook: the first is a folder, or a function of the trainer, not {to!r}")
        if not callable(to):
            check_options(**self.options)
            self.files = [f"{to}/"] if saves else []
        self.best: float | None = None
        self._checkpoints: Checkpoints | None = None
        self._saved = -1
        self._improved = False

    def before_train(self, trainer: Trainer) -> None:
        if callable(self.to):
            return
        trainer.progress()  # raises now, if it cannot be saved
        fresh = self._checkpoints is None and not self.resume and trainer.step == 0
        checkpoints = self._checkpoints = self.checkpoints(trainer)
        text = checkpoints.open(fresh=fresh) if self.saves else ""
        if self.resume:
            text = self.restore(trainer, checkpoints)
        if text and trainer.engine.world.rank == 0:
            tell(f"{text}\n")

    def checkpoints(self, trainer: Trainer) -> Checkpoints:
        """Return the checkpoints of a training in the folder."""
        engine = trainer.engine
        held = dict(engine.model.named_state())
        return Checkpoints(str(self.to), engine.world, held, engine.optimizer, **self.options)

    def restore(self, trainer: Trainer, checkpoints: Checkpoints) -> str:
        """Restore the last checkpoint, if there is one; return a line that reports it.  Collective."""
        checkpoints.remove_leftovers()
        found = checkpoints.load(fall_back=self.fall_back, check=lambda state: self._check(trainer, state))
        if found is None:
            return f"there is no checkpoint in {checkpoints.folder} yet: from the start"
        trainer.set_progress(found.training)
        trainer.add_metrics(found.training["metrics"])
        self.best, self._saved = found.training["best"], trainer.step
        passed = [f"{why}; passed over" for why in found.passed_over]
        return "\n".join([*passed, f"going on after step {found.step}, from {found.path}"])

    def _check(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Raise an error unless the training can go on from this."""
        trainer.check_progress(state)
        optional(real(-math.inf))("best", state["best"])
        if not all(isinstance(value, int | float) for value in state["metrics"].values()):
            raise refuse("metrics", state["metrics"], "a dict of numbers")

    def before_train_iter(self, trainer: Trainer) -> None:
        if self._improved:  # as an evaluation after the last step has found
            self._save(trainer)

    def after_test(self, trainer: Trainer) -> None:
        best = self.options["best"]
        if best is not None and better(best, trainer.step_metrics.get(best), self.best):
            self.best, self._improved = trainer.step_metrics[best], True

    def after_train_epoch(self, trainer: Trainer) -> None:
        best, prefixes = self.options["best"], {"test_"}
        prefixes |= {f"{hook.name}_" for hook in trainer.hooks if isinstance(hook, EvaluateHook)}
        known = best is None or best in trainer.metrics or best.startswith(tuple(prefixes))
        if not callable(self.to) and not known:
            raise ConfigError(
                f"CheckpointHook: there is no metric {best!r} for best; there are {', '.join(trainer.metrics)}"
            )

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None:
        if self._checkpoints is not None:
            self._checkpoints.poll()
        if self._improved or (self.every is not None and trainer.step % self.every == 0):
            self._save(trainer)

    def after_train(self, trainer: Trainer) -> None:
        if self._improved or self._saved != trainer.step:
            self._save(trainer)
        if self._checkpoints is None:
            return
        gone = self._checkpoints.close()
        self.lost = [f"{self.to}/{name}" for name in gone]
        if gone and not any(hook.reports_lost for hook in trainer.hooks):
            raise removal_error(str(self.to), gone)

    def close(self, trainer: Trainer) -> None:
        if self._checkpoints is not None:
            self._checkpoints.release()

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return the state of the training that a checkpoint holds beside the arrays."""
        kind = {"kind": type(trainer.engine.optimizer).__name__}  # looked at before states are loaded
        about = {"metrics": trainer.step_metrics, "optimizer": kind, "best": self.best, **trainer.progress()}
        return {**self.notes, **about}

    def _save(self, trainer: Trainer) -> None:
        if self._checkpoints is not None and self.saves:
            self._checkpoints.save(trainer.step, self.state(trainer))
        elif callable(self.to):
            self.to(trainer)
        self._saved, self._improved = trainer.step, False


class EvaluateHook(Hook):
    """Evaluates between steps, for `metrics["test_loss"]`.

    Parameters
    ----------
    dataloader : Feed or iterable
    every : int, optional
        Steps from one evaluation to the next.
    name : str
        Begins the names of what is measured.
    last : bool
        Whether the last step is followed by an evaluation in any case.
    describe : callable, optional
        From the trainer's metrics to a line that reports the last evaluation.
    """

    def __init__(
        self, dataloader: Iterable[Any], every: int | None = None, *, name: str = "test", last: bool = False,
        describe: Callable[[Mapping[str, float]], str] | None = None,
    ) -> None:  # fmt: skip
        self.dataloader, self.every = dataloader, None if every is None else integer(1)("EvaluateHook: every", every)
        if every is None and not last:
            raise ConfigError("EvaluateHook: give every=…, the steps from one evaluation to the next, or last=True")
        self.name, self.last, self.describe = name, last, describe
        check_loader(dataloader)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None:
        due = self.every is not None and trainer.step % self.every == 0
        if due or (self.last and trainer.step == trainer.last_step):
            trainer.evaluate(self.dataloader, self.name)

    def finish(self, trainer: Trainer) -> list[str]:
        measured = not trainer.signal and f"{self.name}_loss" in trainer.metrics
        return [self.describe(trainer.metrics)] if measured and self.describe is not None else []


class EarlyStopHook(Hook):
    """Ends a training that gets no better.

    Parameters
    ----------
    metric : str
        "test_loss" is looked at after every evaluation, others after every epoch.
    patience : int
        How often it may be no better, one time after the other, before the training ends.
    least : float
        By how much it has to change to be better.
    mode : {"min", "max"}
        Whether less is better, or more.

    Attributes
    ----------
    best : float or None
        The best value so far.
    """

    def __init__(
        self, metric: str = "test_loss", patience: int = 3, least: float = 0.0, mode: str = "min"
    ) -> None:  # fmt: skip
        if mode not in ("min", "max"):
            raise ConfigError(f"EarlyStopHook: mode is 'min' or 'max', not {mode!r}")
        self.metric, self.patience, self.least = metric, integer(1)("EarlyStopHook: patience", patience), least
        self.sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.worse = 0

    def after_test(self, trainer: Trainer) -> None:
        if self.metric == "test_loss":
            self._look(trainer)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.metric != "test_loss":
            self._look(trainer)
        elif "test_loss" not in trainer.metrics and not trainer.evaluates:
            raise ConfigError(
                "EarlyStopHook: nothing measures test_loss; give fit(…, test_dataloader=…) or an EvaluateHook, or take "
                "another metric, such as 'loss'"
            )

    def _look(self, trainer: Trainer) -> None:
        if self.metric not in trainer.metrics:
            raise ConfigError(
                f"EarlyStopHook: there is no metric {self.metric!r}; there are {', '.join(trainer.metrics)}"
            )
        value = trainer.metrics[self.metric]
        better = self.best is None or self.sign * value < self.sign * self.best - self.least
        if better and math.isfinite(value):
            self.best, self.worse = value, 0
            return
        self.worse += 1
        if self.worse >= self.patience:
            found = "never a number" if self.best is None else f"no better than {self.best:.6g}"
            trainer.stop(f"{self.metric} was {found} {self.worse} times")
