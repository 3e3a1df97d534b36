"""One training stack: what the command line does a user's script does too, by recipes, metrics and hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.datasets import DataLoader, Loader, npz
from parlinalg.errors import CheckpointError, ConfigError, EngineError
from parlinalg.layout import Layout
from parlinalg.optim import SGD, AdamW, Scheduler
from parlinalg.optim.schedules import Cosine, WarmUp
from parlinalg.train import accuracy, recipe
from tests.conftest import SIZE
from tests.train.trainings import main

TIMES = {"samples_per_s", "tokens_per_s", "mfu"}


def told(out: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says, but for times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def parallel(**more: Any) -> dict[str, Any]:
    """A pipeline of 2 where there are ranks for it."""
    return {"pipeline": 2, **more} if SIZE % 2 == 0 else dict(more)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.usefixtures("quick")
def test_a_script_of_ones_own_leaves_what_the_command_line_leaves(
    seven: Path, folder: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Written out, without a recipe: the same numbers bit for bit, the same files, the same words at the end."""
    settings = {
        "data": str(seven), "dtype": "float64", "batch_size": 47, "steps": 9, "validate_every": 4, "seed": 3,
        "model": {"hidden": (31, 13), "dropout": 0.2}, "optimizer": {"name": "adamw", "lr": 5e-3},
        "lr_schedule": {"name": "cosine", "warmup": 2}, "clip_grad_norm": 0.5, "parallel": parallel(),
        "checkpoint": {"every": 4}, "backend": backend, "gradient_accumulation": 2,
    }  # fmt: skip
    assert main(settings, folder / "command", comm=world) == 0
    world.barrier()
    first = capfd.readouterr().out
    data, out = npz(str(seven), seed=3), folder / "script"
    with pla.launch(
        {"parallel": parallel(), "dtype": "float64", "seed": 3, "clip_grad_norm": 0.5}, world, backend
    ) as mesh:
        model = nn.MLP(
            (13, 31, 13, 7), mesh.scheme, mesh.grid, "relu", dropout=0.2, dtype=np.float64
        )  # fmt: skip
        x, y = model.input_layout(), Layout(model.output_layout().dims[0])
        train = Loader(data.x, data.y, 47, mesh.grid, x, y, dtype=np.float64, seed=3)
        test = Loader(data.x_test, data.y_test, 512, mesh.grid, x, y, dtype=np.float64, shuffle=False)
        engine, feed, _, rate = pla.initialize(
            model, lambda p: AdamW(p, lr=5e-3), ops.cross_entropy_sum, train,
            lr_scheduler=lambda o: Scheduler(o, WarmUp(2, Cosine(7))), schedule=pla.PipelineSchedule(2),
            metrics={"accuracy": accuracy},
        )  # fmt: skip
        hooks = [
            pla.RunHook(out, {"data": data}), pla.EvaluateHook(test, 4, last=True),
            pla.ProgressHook(out, curves={"loss": "test_loss"}), pla.CheckpointHook(out / "checkpoints", 4),
        ]  # fmt: skip
        trainer = pla.Trainer(engine, lr_scheduler=rate, hooks=hooks)
        assert trainer.last_step is None
        trainer.fit(feed, steps=9)
        assert trainer.last_step == 9
    world.barrier()
    assert told(out) == told(folder / "command")
    assert [set(m) >= {"test_loss", "test_accuracy"} for m in told(out)] == [i in (4, 8, 9) for i in range(1, 10)]
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (out, folder / "command")]
    assert [n.split(".")[0] for n in names[0]] == [n.split(".")[0] for n in names[1]]
    second = capfd.readouterr().out
    if world.rank == 0:
        counted = [text[text.index("communication of") : text.index("written to")] for text in (first, second)]
        assert counted[0] == counted[1], "the same words"


@pytest.mark.ranks(1, 2, 3)
def test_a_recipe_is_trained_by_hand(seven: Path, folder: Path, world: Any, backend: str) -> None:
    """What a configuration declares goes to `initialize` as it is."""
    settings = {"data": str(seven), "dtype": "float64", "batch_size": 47, "steps": 3, "parallel": parallel(),
                "backend": backend, "model": {"hidden": (9, 8)}}  # fmt: skip
    assert main(settings, folder, comm=world) == 0
    world.barrier()
    with pla.launch(settings, world, backend) as mesh:
        made = recipe(mesh.config, mesh)
        engine, feed, _, _ = pla.initialize(
            made.model, None, made.criterion, made.train, metrics=made.metrics, sample=made.sample
        )
        metrics = pla.Trainer(engine).fit(feed, steps=3)
        assert metrics["loss"] == told(folder)[-1]["loss"]
        assert metrics["accuracy"] == told(folder)[-1]["accuracy"]


# ---------------------------------------------------------------------------------------------- metrics
SIZES = (5, 8, 3)


def pairs(count: int = 3, rows: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(rows, SIZES[0])), rng.integers(0, SIZES[-1], rows)) for _ in range(count)]


def mlp(mesh: Any, **more: Any) -> nn.MLP:
    return nn.MLP(SIZES, mesh.scheme, mesh.grid, dtype=np.float64, **more)


def best_of_first(output: Any, label: Any) -> float:
    """A metric of one's own: the sum of what the first class gets."""
    return float(output.gather()[:, 0].sum())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_metrics_are_measured_where_the_output_is(accumulate: int, world: Any, backend: str) -> None:
    """Sums over the targets of all microbatches and calls, without joining outputs; those of one batch at once."""

    class Outputs(pla.Hook):
        wants_output = True

        def __init__(self) -> None:
            self.found: list[tuple[float, float]] = []

        def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
            if output is not None:
                logits, y = output.gather(), label
                self.found.append(((logits.argmax(1) == y).mean(), logits[:, 0].mean()))

    config = {"dtype": "float64", "parallel": parallel(), "gradient_accumulation": accumulate}
    with pla.launch(config, world, backend) as mesh:
        engine, *_ = pla.initialize(
            mlp(mesh), lambda p: SGD(p, 0.1), ops.cross_entropy_sum, schedule=pla.PipelineSchedule(3),
            metrics={"accuracy": accuracy, "first": best_of_first},
        )  # fmt: skip
        outputs = Outputs()
        trainer = pla.Trainer(engine, hooks=[outputs])
        trainer.fit(pairs(4), epochs=1)
        assert 0 <= trainer.metrics["accuracy"] <= 1
        assert "test_accuracy" not in trainer.metrics
        trainer.evaluate(pairs(1), "held")
        found = next(filter(None, world.share(outputs.found)))
        np.testing.assert_allclose((trainer.metrics["held_accuracy"], trainer.metrics["held_first"]), found[0])
        assert "held_loss" in trainer.step_metrics


@pytest.mark.ranks(1, 2)
def test_metrics_that_are_none(world: Any, backend: str) -> None:
    with pla.launch({"dtype": "float64"}, world, backend) as mesh:
        for metrics, words in (
            ({"loss": accuracy}, "a metric is not named 'loss', which the trainer gives itself"),
            ({"accuracy": 3}, r"metrics is a dict of functions of output and label, such as \{'accuracy'"),
            ([accuracy], "metrics is a dict of functions"),
        ):
            with pytest.raises(ConfigError, match=words):
                pla.initialize(mlp(mesh), metrics=metrics)  # type: ignore[arg-type]
        engine, *_ = pla.initialize(mlp(mesh), metrics={"all": lambda output, label: output})
        with pytest.raises(EngineError, match=r"the metric 'all' gives .*, not a number: a metric is a function of"):
            engine.execute_schedule(iter(pairs()))


@pytest.mark.ranks(1, 2)
def test_an_evaluation_changes_no_bit_of_the_training(world: Any, backend: str) -> None:
    """Batches of other sizes, with a criterion of their own."""

    def losses(*hooks: pla.Hook) -> list[float]:
        found: list[float] = []

        class Keep(pla.Hook):
            def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
                found.extend((loss, trainer.metrics["grad_norm"]))

        with pla.launch({"dtype": "float64", "parallel": parallel()}, world, backend) as mesh:
            engine, *_ = pla.initialize(
                mlp(mesh, dropout=0.2), lambda p: SGD(p, 0.3),
                lambda o, y: ops.cross_entropy_sum(o, y, label_smoothing=0.2), test_criterion=ops.cross_entropy_sum,
            )  # fmt: skip
            trainer = pla.Trainer(engine, hooks=[*hooks, Keep()])
            trainer.fit(pairs(5), epochs=2)
            if hooks:
                plain = trainer.metrics["test_loss"]
                engine._test_criterion = engine._criterion
                assert trainer.evaluate(pairs(2, 17)) != plain, "evaluations had no smoothing"
        return found

    assert losses(pla.EvaluateHook(pairs(2, 17), 1)) == losses()


# ---------------------------------------------------------------------------------------------- hooks
@pytest.mark.ranks(1, 2)
def test_hooks_end_in_the_other_order_and_are_closed(world: Any, backend: str) -> None:
    points: list[str] = []

    class Named(pla.Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_train(self, trainer: Any) -> None:
            points.append(f"{self.name} begins")

        def after_train(self, trainer: Any) -> None:
            points.append(f"{self.name} ends")

        def finish(self, trainer: Any) -> list[str]:
            points.append(f"{self.name} finishes")
            return [self.name]

        def close(self, trainer: Any) -> None:
            points.append(f"{self.name} closes")

    class Fails(pla.Hook):
        def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
            raise ConfigError("no")

    with pla.launch({"dtype": "float64"}, world, backend) as mesh:
        engine, *_ = pla.initialize(mlp(mesh), lambda p: SGD(p, 0.1))
        pla.Trainer(engine, hooks=[Named("a"), Named("b")]).fit(pairs(), steps=1)
        want = ["a begins", "b begins", "b ends", "a ends", "a finishes", "b finishes", "a closes", "b closes"]
        assert points == want
        points.clear()
        with pytest.raises(ConfigError, match="no"):
            pla.Trainer(engine, hooks=[Named("a"), Fails()]).fit(pairs(), steps=1)
        assert points == ["a begins", "a closes"]
        with pytest.raises(ConfigError, match="EvaluateHook: give every="):
            pla.EvaluateHook(pairs())


@pytest.mark.ranks(1, 2)
def test_evaluations_after_an_epoch_have_lines_of_their_own(folder: Path, world: Any, backend: str) -> None:
    with pla.launch({"dtype": "float64", "parallel": parallel()}, world, backend) as mesh:
        engine, *_ = pla.initialize(mlp(mesh), lambda p: SGD(p, 0.1), metrics={"accuracy": accuracy})
        hooks = [pla.ProgressHook(folder, columns=["test_accuracy", "loss", "none"])]
        pla.Trainer(engine, hooks=hooks).fit(pairs(2), epochs=2, test_dataloader=pairs(1))
    world.barrier()
    assert [list(m) for m in told(folder)] == [["step", "loss"], ["step", "loss"], ["step", "test_accuracy"]] * 2
    assert [m["step"] for m in told(folder)] == [1, 2, 2, 3, 4, 4]


@pytest.mark.ranks(1, 2)
def test_the_best_checkpoint_is_that_of_the_evaluation(folder: Path, world: Any, backend: str) -> None:
    """Of the weights that were evaluated, also where the evaluation follows the epoch."""
    losses = iter([3.0, 1.0, 2.0, 0.5, 4.0])

    class Fixed(pla.Hook):
        def after_test(self, trainer: Any) -> None:
            trainer.add_metrics({"test_loss": next(losses)})

    with pla.launch({"dtype": "float64", "parallel": parallel()}, world, backend) as mesh:
        engine, *_ = pla.initialize(mlp(mesh), lambda p: SGD(p, 0.1))
        save = pla.CheckpointHook(folder, best="test_loss", keep=1)
        trainer = pla.Trainer(engine, hooks=[Fixed(), save])
        trainer.fit(pairs(2), epochs=5, test_dataloader=pairs(1))
        assert save.best == 0.5
        world.barrier()
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000008", "step-00000010"]
        again = pla.CheckpointHook(folder, best="test_loss", resume=True)
        other = pla.Trainer(engine, hooks=[again])
        other.fit(pairs(2), steps=10)
        assert (other.step, again.best) == (10, 0.5)


@pytest.mark.ranks(1, 2)
def test_data_of_another_order_are_refused(seven: Path, folder: Path, world: Any, backend: str) -> None:
    """As the command line does, whatever the loader tells of its order."""
    rng = np.random.default_rng(0)
    samples = [(rng.normal(size=SIZES[0]), int(rng.integers(SIZES[-1]))) for _ in range(12)]

    def fit(steps: int, loader: Any) -> int:
        with pla.launch({"dtype": "float64", "parallel": parallel()}, world, backend) as mesh:
            engine, feed, *_ = pla.initialize(mlp(mesh), lambda p: SGD(p, 0.1), train_dataloader=loader)
            trainer = pla.Trainer(engine, hooks=[pla.CheckpointHook(folder, resume=True)])
            trainer.fit(feed, steps=steps)
            return trainer.step

    assert fit(2, DataLoader(samples, 4, shuffle=True, seed=1)) == 2
    for loader, words in (
        (DataLoader(samples, 4, shuffle=True, seed=2), "of a training with seed=1, this one has seed=2"),
        (DataLoader(samples, 3, shuffle=True, seed=1), "batch_size=4, this one has batch_size=3"),
        (pairs(4), "batches=3, this one has batches=4"),
    ):
        with pytest.raises(CheckpointError, match=words):
            fit(3, loader)
    assert fit(3, DataLoader(samples, 4, shuffle=True, seed=1)) == 3


# ---------------------------------------------------------------------------------------------- memory
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_a_limit_of_memory_decides_by_the_first_batch(axis: str, folder: Path, world: Any, backend: str) -> None:
    """In `initialize` as on the command line; the losses are those in memory, and `restore` ends it."""

    def run(limit: int | str | None) -> tuple[list[float], Any]:
        config: dict[str, Any] = {
            "dtype": "float64",
            "parallel": {axis: SIZE},
            "optimizer": {"name": "adamw", "lr": 1e-2},
        }
        if limit is not None:
            config["offload"] = {"memory": limit, "path": str(folder)}
        with pla.launch(config, world, backend) as mesh:
            model = nn.MLP((SIZES[0], 300, 200, SIZES[-1]), mesh.scheme, mesh.grid, dtype=np.float64)
            engine, feed, *_ = pla.initialize(model, train_dataloader=pairs(4))
            trainer, found = pla.Trainer(engine), []
            for step in range(1, 4):
                found.append(trainer.fit(feed, steps=step)["loss"])
            plan = engine.memory_plan
            engine.restore()
            assert not any(p.data.resident is None for p in engine.parameters())
            return found, plan

    want, none = run(None)
    assert none is None
    found, plan = run("1GiB")
    assert (found, plan.places) == (want, {})
    assert plan.table.activations > 0, "measured"
    if backend == "numpy":
        found, plan = run(int(0.8 * max(world.share(plan.table.total))))
        assert found == want
        assert any(world.share("optimizer" in plan.places))
