"""The trainer calls its hooks at their points, alike on all ranks; logs, checkpoints, evaluations, early stops."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.errors import ConfigError, EngineError
from parlinalg.optim import SGD, AdamW, Scheduler, decay_groups
from parlinalg.optim.schedules import Constant, Step
from tests.conftest import SIZE

SIZES = (5, 8, 3)


def pairs(count: int = 3, rows: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(rows, SIZES[0])), rng.integers(0, SIZES[-1], rows)) for _ in range(count)]


def trainer(mesh: Any, *hooks: pla.Hook, rate: Any = None, lr: float = 0.1, schedule: Any = None) -> Any:
    model = nn.MLP(SIZES, mesh.scheme, mesh.grid, dtype=np.float64)
    engine, _, _, scheduler = pla.initialize(model, lambda p: SGD(p, lr), lr_scheduler=rate)
    return pla.Trainer(engine, schedule, lr_scheduler=scheduler, hooks=hooks)


def settings(**more: Any) -> dict[str, Any]:
    """A pipeline of 2 where there are ranks for it."""
    return {"dtype": "float64", "parallel": {"pipeline": 2} if SIZE % 2 == 0 else {}, **more}


class Notes(pla.Hook):
    """Notes at which points it is called."""

    wants_output = True

    def __init__(self) -> None:
        self.points: list[str] = []
        self.shapes: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith(("before_", "after_")):
            return found

        def called(*arguments: Any) -> None:
            self.points.append(name)
            if len(arguments) > 1:
                self.shapes.append(None if arguments[1] is None else (arguments[1].shape, arguments[2].shape))

        return called


@pytest.mark.ranks(1, 2)
def test_points(world: Any, backend: str) -> None:
    with pla.launch(settings(), world, backend) as mesh:
        notes = Notes()
        found = trainer(mesh, notes, rate=lambda o: Scheduler(o, Step(2, 0.5)))
        metrics = found.fit(pairs(), epochs=2, test_dataloader=pairs(1), test_interval=2)
        iters = ["before_train_iter", "after_train_iter"] * 3
        test = ["before_test", "before_test_iter", "after_test_iter", "after_test"]
        assert notes.points == [
            "before_train", "before_train_epoch", *iters, "after_train_epoch", "before_train_epoch", *iters, *test,
            "after_train_epoch", "after_train",
        ]  # fmt: skip
        last = not found.engine.in_stages or found.engine.model.chunks[-1].last
        assert notes.shapes == [((6, 3), (6,)) if last else None] * 7
        assert (found.epoch, found.step, found.engine.steps_done) == (2, 6, 6)
        assert metrics["lr"] == 0.1 * 0.25
        assert set(metrics) == {"loss", "lr", "grad_norm", "samples_per_s", "test_loss"}
        found.fit(pairs(), steps=8)
        assert (found.epoch, found.step) == (2, 8)
        found.fit(pairs(), steps=10)  # goes on in the epoch
        assert (found.epoch, found.step) == (3, 10)


@pytest.mark.ranks(1, 2)
def test_hooks_that_come_with_it(world: Any, backend: str, folder: Path) -> None:
    saved: list[int] = []
    lines: list[str] = []
    with pla.launch(settings(gradient_accumulation=1), world, backend) as mesh:
        hooks = [
            pla.EvaluateHook(pairs(1), every=4),
            pla.LogHook(2, lines.append),
            pla.LogHook(3, folder / "log.jsonl"),
            pla.CheckpointHook(lambda t: saved.append(t.step), every=4),
        ]
        trainer(mesh, *hooks).fit(pairs(), epochs=3)
        assert saved == [4, 8, 9]
        world.barrier()
        told = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [t["step"] for t in told] == [3, 4, 6, 8, 9]  # after evaluations too
        assert told[1]["test_loss"] > 0
        assert len(lines) == (6 if world.rank == 0 else 0)
        assert all("loss" in line and "step" in line for line in lines)


@pytest.mark.ranks(1, 2)
def test_a_log_that_cannot_be_written_does_not_end_a_training(
    world: Any, backend: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder is away for two steps; their lines follow."""
    log = folder / "logs" / "log.jsonl"

    class Moves(pla.Hook):
        def before_train_iter(self, trainer: Any) -> None:
            if world.rank == 0 and trainer.step in (1, 3):
                there, to = (log.parent, folder / "away")[:: 1 if trainer.step == 1 else -1]
                there.rename(to)

    with pla.launch(settings(), world, backend) as mesh:
        trainer(mesh, Moves(), pla.LogHook(to=log)).fit(pairs(5), epochs=1)
    world.barrier()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert capfd.readouterr().err.count("log.jsonl cannot be written ([Errno 2]") == (world.rank == 0)


@pytest.mark.ranks(1, 2)
def test_early_stop(world: Any, backend: str) -> None:
    with pla.launch(settings(), world, backend) as mesh:
        stop = pla.EarlyStopHook(patience=2)
        found = trainer(mesh, stop, lr=0.0, rate=lambda o: Scheduler(o, Constant()))
        found.fit(pairs(), epochs=9, test_dataloader=pairs(1))
        assert found.epoch == 3  # the first is the best, two are no better
        assert found.why == f"test_loss was no better than {stop.best:.6g} 2 times"
        stop = pla.EarlyStopHook("loss", patience=1, mode="max")
        found = trainer(mesh, stop)
        found.fit(pairs(), epochs=9)
        assert found.epoch < 9  # a loss that falls gets no larger


def grouped(parameters: Any) -> AdamW:
    """Two groups, of two rates."""
    weights, others = decay_groups(parameters, 0.3)
    return AdamW([weights, {**others, "lr": 0.05}], 0.1)


@pytest.mark.ranks(1, 2, 4)
def test_a_training_goes_on_on_another_grid(world: Any, backend: str, folder: Path) -> None:
    """From the middle of an epoch, with the rates and the order of batches that it had."""

    def losses(config: dict[str, Any], steps: int, every: int) -> list[float]:
        found: list[float] = []

        class Keep(pla.Hook):
            def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
                found.append(loss)

        with pla.launch(config, world, backend) as mesh:
            model = nn.MLP(SIZES, mesh.scheme, mesh.grid, dropout=0.3, dtype=np.float64)
            engine, _, _, rate = pla.initialize(model, grouped, lr_scheduler=lambda o: Scheduler(o, Step(2, 0.5)))
            hooks = [Keep(), pla.CheckpointHook(folder, every, resume=True)]
            pla.Trainer(engine, lr_scheduler=rate, hooks=hooks).fit(pairs(4), steps=steps)
        return found

    other = {"dtype": "float64", "zero": 1, "parallel": {}}
    want = losses(settings(), 7, 99)
    assert len(want) == 7
    if world.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path)
    world.barrier()
    first = losses(settings(), 3, 3)
    np.testing.assert_allclose(first + losses(other, 7, 3), want, rtol=1e-12)


@pytest.mark.ranks(1, 2)
def test_what_is_refused(world: Any, backend: str) -> None:
    with pla.launch(settings(), world, backend) as mesh:
        with pytest.raises(ConfigError, match=r"a hook is a parlinalg\.Hook, not str"):
            trainer(mesh, "log")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="say how long to train"):
            trainer(mesh).fit(pairs())
        with pytest.raises(EngineError, match="has no batches"):
            trainer(mesh).fit([], epochs=1)
        with pytest.raises(ConfigError, match="every must be a whole number of at least 1, not 0"):
            pla.LogHook(0)
        with pytest.raises(ConfigError, match="mode is 'min' or 'max', not 'less'"):
            pla.EarlyStopHook(mode="less")
        with pytest.raises(ConfigError, match="there is no metric 'accuracy'; there are loss"):
            trainer(mesh, pla.EarlyStopHook("accuracy")).fit(pairs(), epochs=1)
        if SIZE > 1:
            with pytest.raises(EngineError, match="the dataloader of rank 1 has 2 batches, that of rank 0 3"):
                trainer(mesh).fit(pairs()[: 3 - world.rank], epochs=1)


class Signalled(pla.Hook):
    """A rank gets a signal in a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
        if trainer.step == self.step and trainer.engine.world.rank == self.rank:
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.ranks(1, 2)
def test_a_signal_ends_a_training_with_a_checkpoint(world: Any, backend: str, folder: Path) -> None:
    """On all ranks after the same step, without what would take time; it goes on from there."""
    losses = []
    for name, step in (("whole", 0), ("broken", 4), ("broken", 0)):
        with pla.launch(settings(), world, backend) as mesh:
            notes = Notes()
            hooks = [notes, Signalled(world.size - 1, step), pla.CheckpointHook(folder / name, 3, resume=True)]
            found = trainer(mesh, *hooks)
            metrics = found.fit(pairs(), epochs=3, test_dataloader=pairs(1))
            if step:
                assert (found.signal, found.why, found.step) == ("SIGUSR1", "stopped by SIGUSR1", 4)
                assert notes.points[-2:] == ["after_train_iter", "after_train"]
                world.barrier()
                assert (folder / name / "step-00000004" / "index.json").exists()
            else:
                assert (found.signal, found.why, found.step) == ("", "", 9)
                losses.append(metrics["loss"])
    assert losses[0] == losses[1]
