"""Wrong use of `initialize`, engine, trainer and hooks is told at once, on all ranks, by what would be right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm
from parlinalg.errors import CheckpointError, ConfigError, EngineError
from parlinalg.optim import SGD, AdamW
from tests.conftest import SIZE
from tests.train.trainings import main

SIZES = (5, 8, 3)


def pairs(count: int = 3, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(6, SIZES[0])), rng.integers(0, SIZES[-1], 6)) for _ in range(count)]


def mlp(mesh: Any, width: int = 8) -> nn.MLP:
    return nn.MLP((SIZES[0], width, SIZES[-1]), mesh.scheme, mesh.grid, dtype=np.float64)


def settings(**more: Any) -> dict[str, Any]:
    """A pipeline of 2 where there are ranks for it."""
    return {"dtype": "float64", "parallel": {"pipeline": 2} if SIZE % 2 == 0 else {}, **more}


def engine_of(mesh: Any, criterion: Any = ops.cross_entropy_sum, optimizer: Any = SGD, **more: Any) -> Any:
    return pla.initialize(mlp(mesh), lambda p: optimizer(p, lr=0.1), criterion, **more)[0]


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"model": None}, "a model, an nn.Module .* not NoneType"),
        ({"model": nn.MLP}, "not the class MLP"),
        ({"mesh": 3}, "mesh is what parlinalg.launch"),
        ({"optimizer": lambda p: None}, r"gives None: it takes the parameters and returns an Optimizer"),
        ({"config": {"offload": {"optimizer": "disk"}}}, "optimizer to the disk needs path="),
        ({"config": {"offload": {"memory": "1GiB"}}}, r"offload.memory=1073741824 .*offload.plan\("),
        ({"criterion": "cross_entropy"}, "criterion is a function .* not 'cross_entropy'"),
        ({"train_dataloader": "digits"}, "a dataloader is an iterable of pairs .* not str"),
        ({"train_dataloader": {"x": 1}}, "not dict"),
        ({"schedule": "1f1b"}, r"schedule must be e\.g\. PipelineSchedule\(4\).* not '1f1b'"),
        ({"schedule": pla.PipelineSchedule}, "not the class PipelineSchedule"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler is an object with step"),
        ({"lr_scheduler": lambda o: 3}, "lr_scheduler makes a int, without step"),
        ({"config": {"parallel": {"tensor": {"size": SIZE, "mode": "1d"}}}}, "but the mesh was launched with parallel"),
        ({"config": {"lr_schedule": "cosine"}, "train_dataloader": iter(pairs())}, "a list_iterator has no len"),
    ],
)  # fmt: skip
@pytest.mark.ranks(1, 2)
def test_what_initialize_is_given(given: dict[str, Any], right: str, world: Any, backend: str) -> None:
    with pla.launch(settings(), world, backend) as mesh, pytest.raises(ConfigError, match=right):
        pla.initialize(**{"model": mlp(mesh), **given})


@pytest.mark.ranks(2)
def test_ranks_that_give_unlike_things(world: Any, backend: str) -> None:
    me = world.rank
    with pla.launch({"parallel": {"pipeline": 2}}, world, backend) as mesh:
        with pytest.raises(ConfigError, match="rank 1 cuts another model than rank 0"):
            pla.initialize(mlp(mesh, 8 + me))
        with pla.launch({}, world, backend) as other, pytest.raises(ConfigError, match="the mesh given has another"):
            pla.initialize(mlp(mesh), mesh=other)
    with pla.launch({}, world, backend) as mesh:
        with pytest.raises(ConfigError, match="the model of rank 1 has other parameters than that of rank 0"):
            pla.initialize(mlp(mesh, 8 + 2 * me))
        with pytest.raises(ConfigError, match=r"rank 1 has the optimizer SGD with lr=1\.1, rank 0 SGD with lr=0\.1"):
            pla.initialize(mlp(mesh), lambda p: SGD(p, lr=0.1 + me))


@pytest.mark.ranks(1, 2)
def test_what_the_model_has_not(world: Any, backend: str) -> None:
    for right, more in {
        "precision is float16, but the model's parameters are float64": {"precision": "fp16"},
        r"names '2\.weigth', and the model has no such parameter; did you mean '2\.weight'": {
            "gradient_handler": [{"type": "SharedParameters", "names": ["0.*", "2.weigth"], "axes": "data"}]
        },
    }.items():
        with pla.launch(settings(**more), world, backend) as mesh, pytest.raises(ConfigError, match=right):
            pla.initialize(mlp(mesh))
    with pytest.raises(ConfigError, match=r"gradient_handler\[0\] \(SharedParameters\) needs 'names' and 'axes'"):
        pla.launch({"gradient_handler": ["SharedParameters"]}, world, backend)


@pytest.mark.ranks(2)
def test_samples(world: Any, backend: str) -> None:
    """By which layers are measured: host arrays too; what is none is told."""
    parallel = {"pipeline": {"size": 2, "partition": "time"}}
    with pla.launch({"parallel": parallel, "dtype": "float64"}, world, backend) as mesh:
        assert sum(pla.initialize(mlp(mesh), sample=pairs()[0][0])[0].model.counts) == 3
        with pytest.raises(EngineError, match="arrays whose first dim counts samples, not 3"):
            pla.initialize(mlp(mesh), sample=3)


@pytest.mark.ranks(2, 4)
def test_batches_of_other_values(world: Any, backend: str) -> None:
    """A loader that shuffles by a seed of its rank is found at the first batch, of a raw iterator too."""
    with pla.launch(settings(), world, backend) as mesh:
        engine, train, _, _ = pla.initialize(mlp(mesh), train_dataloader=pairs(seed=world.rank))
        for batches in (iter(train), iter(pairs(seed=world.rank))):
            with pytest.raises(EngineError, match="rank 1 has other values in its batch than rank 0"):
                engine.execute_schedule(batches)
        with pytest.raises(EngineError, match="rank 1 has other values"):
            next(iter(train))
        (x, y), *_ = pairs()
        mine = (x[:, : 5 - world.rank % 2], y) if world.rank < 2 else (x, y)
        for batches in (iter([mine]), iter(type(train)([mine], world))):
            with pytest.raises(EngineError, match=r"rank 1 has a batch of \(float64\[\d, 4\], int64\[\d\]\), rank 0"):
                engine.execute_schedule(batches)
        order = [pairs()[0], (np.zeros((0, SIZES[0])), np.zeros(0, int))]
        engine.execute_schedule(iter(type(train)(order, world)))  # the same on all: goes


@pytest.mark.ranks(1, 2)
def test_what_an_engine_is_given(world: Any, backend: str) -> None:
    with pla.launch({}, world, backend) as mesh:
        (x, y), *_ = pairs()
        engine = engine_of(mesh)
        with pytest.raises(EngineError, match="a batch of no rows"):
            engine(x[:0])
        with pytest.raises(EngineError, match=r"takes the engine that initialize gives first.* not MLP"):
            pla.PipelineSchedule(2).forward_backward_step(engine.model, iter(pairs()))
        with pytest.raises(TypeError, match=r"this layer takes a Tensor of shape \[\.\.\., 5\], not a dict"):
            engine({"a": x})
        for nothing in ((), {}):
            with pytest.raises(EngineError, match="are an empty tuple, list or dict"):
                engine.execute_schedule(iter([(nothing, y)]))
        for count in (None, -3, "many"):
            wrong = engine_of(mesh, lambda output, label, count=count: (ops.cross_entropy(output, label), count))
            with pytest.raises(EngineError, match=r"a mean loss, or \(the sum of the losses, how many they are\)"):
                wrong.criterion(wrong(x), y)
        with pytest.raises(ConfigError, match=r"load_state_dict takes what state_dict\(\) gave; this lacks optimizer"):
            engine.load_state_dict({"model": {}, "progress": {}})
    with pytest.raises(ConfigError, match="there is no pipeline schedule '1f2b'; there are 1f1b, "):
        pla.PipelineSchedule(4, "1f2b")
    with pytest.raises(ConfigError, match="num_model_chunks must be a whole number of at least 1, not '2'"):
        pla.InterleavedPipelineSchedule(4, "2")  # type: ignore[arg-type]


@pytest.mark.ranks(1, 2)
def test_the_schedule_follows_the_model_and_the_configuration(world: Any, backend: str) -> None:
    """What is cut by hand into chunks runs without a schedule being named, on one rank too; `every` is heeded."""
    layers = [{"type": "Linear", "in_features": 5, "out_features": 5} for _ in range(4)]
    with pla.launch({"parallel": {"pipeline": SIZE}, "dtype": "float64"}, world, backend) as mesh:
        losses = []
        for chunks in (1, 2):
            model = pla.pipeline.build_pipeline_model_from_cfg(layers, chunks, mesh=mesh, seed=1)
            engine, train, _, _ = pla.initialize(model, lambda p: SGD(p, 0.1), train_dataloader=pairs())
            losses.append(engine.execute_schedule(iter(train))[2])
            engine.step()
        np.testing.assert_allclose(*losses, rtol=1e-12)
    if SIZE == 2:
        schedule = {"name": "pipedream", "microbatches": 4, "every": 2}
        with pla.launch({"parallel": {"pipeline": 2}, "schedule": schedule}, world, backend) as mesh:
            engine, train, _, _ = pla.initialize(mlp(mesh), lambda p: SGD(p, 0.1), train_dataloader=pairs())
            engine.execute_schedule(iter(train))
            assert engine.optimizer.steps == 2


@pytest.mark.ranks(1, 2)
def test_what_a_trainer_is_given(world: Any, backend: str, folder: Path) -> None:
    with pla.launch(settings(), world, backend) as mesh:
        engine = engine_of(mesh)

        def refused(right: str, *hooks: Any, kind: Any = ConfigError, data: Any = None, **more: Any) -> None:
            options = {"epochs": 1, **more}
            with pytest.raises(kind, match=right):
                pla.Trainer(engine, hooks=hooks).fit(pairs() if data is None else data, **options)

        refused("epochs must be a whole number of at least 0, not 1.5", epochs=1.5)
        refused("steps must be a whole number of at least 0, not '3'", steps="3")
        refused("test_interval must be a whole number of at least 1, not 0", test_interval=0)
        refused("train_dataloader has no batches", kind=EngineError, data=[])
        refused("test_dataloader has no batches", kind=EngineError, test_dataloader=[])
        refused("the train_dataloader is to say how many .* a generator has no len", data=(p for p in pairs()))
        refused("EarlyStopHook: nothing measures test_loss", pla.EarlyStopHook())
        refused("no metric 'tst_loss' for best; there are loss", pla.CheckpointHook(folder / "a", 9, best="tst_loss"))
        refused("opening the log: |Is a directory", pla.LogHook(to=folder))
        with pytest.raises(ConfigError, match=r"hooks is a list of hooks, not LogHook; write hooks=\[…\]"):
            pla.Trainer(engine, hooks=pla.LogHook())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Trainer takes the engine that initialize gives first, not int"):
            pla.Trainer(3)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Trainer: schedule must be"):
            pla.Trainer(engine, "1f1b")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"lr_scheduler is an object with step\(\), not the class AdamW"):
            pla.Trainer(engine, lr_scheduler=AdamW)
        with pytest.raises(ConfigError, match="this lacks state, engine, lr_scheduler"):
            pla.Trainer(engine).load_state_dict({"epoch": 1, "step": 1, "batches": 0})
    with pla.launch({"gradient_accumulation": 4}, world, backend) as mesh:
        engine = engine_of(mesh)
        refused("has 3 batches, and gradient_accumulation=4 takes 4 a step", kind=EngineError, epochs=None, steps=2)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("point", ["before_train", "after_train_iter", "after_train_epoch"])
def test_one_rank_stops_all(point: str, world: Any, backend: str) -> None:
    """After the same step, with its reason; what a hook of the last rank alone knows, such as the time."""

    def stop(self: Any, trainer: Any, *rest: Any) -> None:
        if world.rank == SIZE - 1 and trainer.step == {"before_train": 0, "after_train_epoch": 3}.get(point, 2):
            trainer.stop("it is late")

    hook = type("Late", (pla.Hook,), {point: stop})()
    with pla.launch(settings(), world, backend) as mesh:
        trainer = pla.Trainer(engine_of(mesh), hooks=[hook])
        trainer.fit(pairs(), 3)
        want = {"before_train": 0, "after_train_epoch": 3}.get(point, 2)
        assert (trainer.step, trainer.why) == (want, "it is late")


@pytest.mark.serial
def test_what_hooks_are_given() -> None:
    with pytest.raises(ConfigError, match=r"after_train_step: there is no such .* did you mean 'after_train_iter'"):

        class Wrong(pla.Hook):
            def after_train_step(self, trainer: Any) -> None: ...

    for right, make in {
        "LogHook: to is a function .* not 3": lambda: pla.LogHook(to=3),  # type: ignore[arg-type]
        "CheckpointHook: the first is a folder": lambda: pla.CheckpointHook(3, 1),  # type: ignore[arg-type]
        "keep must be a whole number of at least 1, not 0": lambda: pla.CheckpointHook("a", 1, keep=0),
        "fall_back says how to resume": lambda: pla.CheckpointHook("a", 1, fall_back=True),
        "background must be True or False": lambda: pla.CheckpointHook("a", 1, background=3),  # type: ignore[arg-type]
        "a dataloader is an iterable": lambda: pla.EvaluateHook(3, 1),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(ConfigError, match=right):
            make()


@pytest.mark.ranks(1, 2)
def test_checkpoints_of_another_training(world: Any, backend: str, folder: Path) -> None:
    """A training that begins in the folder of a longer one keeps its own checkpoints, and sets those aside."""

    def train(epochs: int, optimizer: Any = SGD, **options: Any) -> Any:
        with pla.launch(settings(), world, backend) as mesh:
            hooks = [pla.CheckpointHook(folder / "saved", 2, **options)]
            trainer = pla.Trainer(engine_of(mesh, optimizer=optimizer), hooks=hooks)
            trainer.fit(pairs(), epochs)
            world.barrier()
            return sorted(p.name[-1] for p in (folder / "saved").glob("step-*")), trainer.step

    assert train(3) == (["6", "8", "9"], 9)
    with pla.launch(settings(), world, backend) as mesh:
        found = pla.Trainer(engine_of(mesh), hooks=[pla.CheckpointHook(folder / "saved", 2)])
        found.hooks[0].before_train(found)  # before a step is made: what is broken off here resumes from nothing
        world.barrier()
        assert not list((folder / "saved").glob("step-*"))
        assert sorted(p.name[-1] for p in (folder / "saved.old").iterdir()) == ["6", "8", "9"]
    assert train(1) == (["2", "3"], 3)
    with pytest.raises(CheckpointError, match="has states of SGD, which AdamW cannot go on from"):
        train(2, AdamW, resume=True)
    if world.rank == 0:
        index = folder / "saved" / "step-00000003" / "index.json"
        index.write_bytes(index.read_bytes()[:-9])
    world.barrier()
    with pytest.raises(CheckpointError, match=r"step-00000003/index\.json"):
        train(2, resume=True)
    assert train(2, resume=True, fall_back=True) == (["3", "4", "6"], 6)
    with pla.launch(settings(), world, backend) as mesh:
        engine = engine_of(mesh)
        made = pla.Checkpoints(
            folder / "saved", engine.world, dict(engine.named_parameters()), engine.optimizer, keep=1
        )
        made.load(4)
        made.save(5)  # goes back: step 6 is of another training now
        made.finish()
        assert made.steps() == [5]
        with pytest.raises(CheckpointError, match="step must be a whole number of at least 0, not '7'"):
            made.save("7")  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"is JSON, of texts.* object is not JSON serializable"):
            made.save(7, {"what": object()})
        with pytest.raises(ConfigError, match=r"takes a folder, a Comm such as .* not int and dict"):
            pla.Checkpoints(folder / "saved", 3, {})  # type: ignore[arg-type]
        if world.rank == 0:
            (folder / "file").touch()
        world.barrier()
        trainer = pla.Trainer(engine, hooks=[pla.CheckpointHook(folder / "file", 100)])
        with pytest.raises(CheckpointError, match=r"cannot be written to the folder .*file: it is a file"):
            trainer.fit(pairs(), 1)
        assert trainer.step == 0  # before it begins


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({"epochs": np.zeros(3)}, "epochs must be a whole number of at least 1"),
        ({"clip_grad_norm": np.zeros(3)}, "clip_grad_norm must be a number above 0"),
        ({"optimizer": {"name": []}}, r"optimizer\.name must be one of"),
        ({"gradient_handler": [{"type": []}]}, r"gradient_handler\[0\]\.type must be one of"),
        ({"parallel": {"tensor": 10**30}}, "size must be a whole number of at least 1 and at most 1,000,000"),
        ({"schedule": {"microbatches": 10**30}, "parallel": {"pipeline": 2}}, "microbatches must be .* most 100,000"),
    ],
)
@pytest.mark.serial
def test_configurations_of_what_cannot_be_counted(values: dict[str, Any], right: str) -> None:
    """At once, where a schedule or the shapes of a grid would be counted out for ever."""
    with pytest.raises(ConfigError, match=right):
        pla.launch(values, SingleComm(), "numpy")


@pytest.mark.parametrize(
    ("values", "right"),
    [
        *(({"seed": seed}, "seed must be a whole number of at least 0 and at most 18,446,744,073,709,551,615, not")
          for seed in (2**64, 2**200, 10**5000, -1, 1e300, True)),
        ({"steps": 10**5000}, "steps must be .* and at most 9,007,199,254,740,992, not a int too long to write"),
        ({"epochs": 10**30}, "epochs must be a whole number of at least 1 and at most 9,007,199,254,740,992"),
        ({"batch_size": 10**400}, "batch_size must be a whole number of at least 1 and at most 9,007,199,254,740,992"),
        ({"gradient_accumulation": 10**15}, "gradient_accumulation must be .* at most 100,000"),
        ({"model": {"name": "gpt", "num_hidden_layers": 10**9}}, "num_hidden_layers must be .* at most 100,000"),
        ({"lr_schedule": {"name": "cosine", "warmup": 10**400}}, r"lr_schedule\.warmup must be a whole number"),
        ({"model": {"hidden": 10**12}}, "a model of this size would take .* TiB of this rank's memory"),
        ({"model": {"hidden": [10**9] * 3}}, "a model of this size would take .* PiB of this rank's memory"),
        ({"model": {"name": "gpt", "hidden_size": 10**12}}, "would take .* PiB of this rank's memory"),
        ({"model": {"name": "gpt", "vocab_size": 10**12}}, "a model of this size would take .* of this rank's memory"),
        ({"model": {"name": "llama", "hidden_size": 10**15}}, "would take .* TiB of this rank's memory"),
        ({"model": {"name": "llama", "head_dim": 10**15}}, "would take .* PiB of this rank's memory"),
        ({"model": "gpt", "batch_size": 10**15}, "windows of 128 tokens would take .* PiB of this rank's memory"),
        ({"model": "gpt", "batch_size": 10**9}, "windows of 128 tokens would take .* TiB of this rank's memory"),
        ({"data": {"name": "text", "sequence_length": 10**15}}, "would take .* of this rank's memory"),
    ],
)  # fmt: skip
@pytest.mark.ranks(1, 2)
def test_sizes_that_cannot_be_are_refused_at_once(
    values: dict[str, Any], right: str, folder: Path, world: Any, backend: str
) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=right) as caught:
        main({"backend": backend, **values}, folder / "out", comm=world)
    assert len(str(caught.value)) < 600
    assert time.monotonic() - began < 20
