"""The engine: losses of one rank on every grid, by the calls users know; what is wrong is told on all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm
from parlinalg.datasets import Loader, Windows
from parlinalg.errors import ConfigError, EngineError
from parlinalg.optim import SGD, AdamW, Scheduler
from parlinalg.optim.schedules import Cosine
from parlinalg.pipeline import build_by_hand, build_pipeline_model_from_cfg
from tests.conftest import SIZE

CLOSE = 1e-12
SIZES = (7, 11, 6, 9, 5)  # of the MLP: no grid divides them
EPOCHS = 2
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "seed": 3, "clip_grad_norm": 0.5, "optimizer": {"name": "adamw", "lr": 1e-2},
}  # fmt: skip
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"parallel": {"data": 2}, "zero": 1}),
    (2, {"parallel": {"pipeline": 2}}),
    (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "interleaved", "chunks": 2, "microbatches": 4}}),
    (3, {"parallel": {"pipeline": 3}, "schedule": {"name": "gpipe", "microbatches": 4}}),
    (4, {"parallel": {"tensor": {"mode": "2d"}}}),
    (4, {"parallel": {"pipeline": 2, "data": 2}, "zero": 2, "schedule": {"name": "zb-h1", "microbatches": 4}}),
    (4, {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "schedule": "chimera"}),
    (6, {"parallel": {"data": 3, "tensor": {"size": 2, "mode": "1d"}}, "zero": 3}),
    (8, {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}}),
]


def samples(n: int = 22) -> tuple[np.ndarray, np.ndarray]:
    """Host arrays, the same on every rank; some labels do not count."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(n, SIZES[0])), rng.integers(0, SIZES[-1], n)
    y[rng.random(n) < 0.2] = -100
    return x, y


def pairs(rows: int = 11) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = samples()
    return [(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)]


def mlp(mesh: Any, dropout: float = 0.25) -> nn.MLP:
    return nn.MLP(SIZES, mesh.scheme, mesh.grid, "gelu", dropout=dropout, dtype=np.float64)


@cache
def serial(accumulate: int = 1) -> list[float]:
    """Losses of steps of the whole batch, on one rank, written out."""
    with pla.launch(SETTINGS, SingleComm(), "numpy") as mesh:
        model = mlp(mesh).initialize(3)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        rate = Scheduler(optimizer, Cosine(9, 0.1))
        found = []
        every = pairs()
        if accumulate == 2:
            every = [tuple(np.concatenate(a) for a in zip(*every, strict=True))]  # type: ignore[list-item]
        for step, (x, y) in enumerate(every * EPOCHS):
            with nn.training_step(step):
                output = model(pla.distribute(x, mesh.grid, model.input_layout()))
                loss = ops.cross_entropy(output, pla.distribute(y, mesh.grid, pla.Layout(None)))
                loss.backward()
            pla.parallel.clip_gradient_norm(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            found.append(loss.item())
        model.eval()
        x, y = samples()
        with pla.no_grad():
            output = model(pla.distribute(x, mesh.grid, model.input_layout()))
            found.append(ops.cross_entropy(output, pla.distribute(y, mesh.grid, pla.Layout(None))).item())
        return found


def close(found: list[Any], want: list[float]) -> None:
    assert len(found) == len(want)
    assert want[-2] < want[0]
    np.testing.assert_allclose(np.array(found, float), want, rtol=CLOSE)


CASES = [pytest.param(settings, marks=pytest.mark.ranks(n), id=f"{n}-{settings}") for n, settings in GRIDS]


@pytest.mark.parametrize("settings", CASES)
def test_schedules_give_the_losses_of_one_rank(settings: dict[str, Any], world: Any, backend: str) -> None:
    with pla.launch({**SETTINGS, **settings}, world, backend) as mesh:
        engine, train, test, rate = pla.initialize(
            mlp(mesh), lambda p: AdamW(p, lr=1e-2), ops.cross_entropy_sum, pairs(), [samples()],
            lambda optimizer: Scheduler(optimizer, Cosine(9, 0.1)),
        )  # fmt: skip
        assert engine.schedule is not None
        engine.train()
        found: list[Any] = []
        for _ in range(EPOCHS):
            batches = iter(train)
            for x, _ in pairs():
                output, label, loss = engine.schedule.forward_backward_step(engine, batches)
                found.append(loss)
                assert engine.step()
                rate.step()
                last = [s.last for s in getattr(engine.model, "chunks", ())]
                assert (output is not None) == (label is not None)
                assert (output is not None) == (not engine.in_stages or any(last))
                if output is not None and mesh.config.schedule != "chimera":
                    assert label.shape == output.shape[:1]
                    assert output.shape[0] <= len(x)
        engine.eval()
        found.append(engine.execute_schedule(iter(test), forward_only=True)[2])
        close(found, serial())
        assert 0 < (engine.gradient_norm or 0) < 99
        assert (engine.steps_done, engine.skipped) == (4, 0)


@pytest.mark.parametrize("kind", ["pairs", "loader"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.ranks(1, 2, 4)
def test_the_calls_of_a_loop(accumulate: int, kind: str, world: Any, backend: str) -> None:
    """Written out, with accumulated gradients: equal to steps of the joined batches; a criterion of means too."""
    settings = {**SETTINGS, "parallel": {"tensor": {"mode": "2d"}} if SIZE == 4 else {}}
    with pla.launch({**settings, "gradient_accumulation": accumulate}, world, backend) as mesh:
        model = mlp(mesh).initialize(3)
        source: Any = pairs()
        if kind == "loader":
            layout = model.input_layout(), pla.Layout(model.output_layout().dims[0])
            source = Loader(*samples(), 11, mesh.grid, *layout, dtype=np.float64, shuffle=False)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        engine, train, test, rate = pla.initialize(
            model, optimizer, None, source, lr_scheduler=Scheduler(optimizer, Cosine(9, 0.1))
        )
        assert test is None
        found = []
        for _ in range(EPOCHS):
            sums = []
            for x, y in train:
                engine.zero_grad()
                loss = engine.criterion(engine(x), y)
                sums.append((loss.item(), np.count_nonzero(held(y) >= 0)))
                engine.backward(loss)
                if engine.step():
                    rate.step()
                    found.append(sum(a * n for a, n in sums) / sum(n for _, n in sums))
                    sums.clear()
        engine.eval()
        found.append(engine.criterion(engine(samples()[0]), samples()[1]).item())
        close(found, serial(accumulate))


def held(y: Any) -> np.ndarray:
    return y.gather() if isinstance(y, pla.DistArray) else y


@pytest.mark.ranks(2, 3)
def test_gradients_of_microbatches_are_summed_once(world: Any, backend: str) -> None:
    """Two microbatches a step move half of what two steps move."""
    words = []
    for accumulate in (1, 2):
        with pla.launch({**SETTINGS, "gradient_accumulation": accumulate}, world, backend) as mesh:
            engine, train, _, _ = pla.initialize(mlp(mesh), train_dataloader=pairs())
            for epoch in range(2):  # the first shows what the buckets are
                with pla.ledger(mesh.grid) as book:
                    for x, y in train:
                        engine.backward(engine.criterion(engine(x), y))
                        engine.step()
                if epoch:
                    words.append(sum(n for name, n in book.words.items() if "reduce" in str(name)))
    assert words[1] < 0.6 * words[0]


@pytest.mark.ranks(2, 4)
def test_text_in_another_order(world: Any, backend: str) -> None:
    """Windows whose tokens lie in a ring's zigzag order, in a pipeline too: batches tell where they come from."""

    def losses(comm: Any, parallel: dict[str, Any], **more: Any) -> list[Any]:
        config = {"dtype": "float64", "optimizer": {"lr": 1e-2}, "parallel": parallel, **more}
        with pla.launch(config, comm, backend if comm is world else "numpy") as mesh:
            model = nn.GPT(
                vocab_size=13, max_position_embeddings=9, hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
                attn_pdrop=0.2, scheme=mesh.scheme, grid=mesh.grid, dtype="float64",
            )  # fmt: skip
            zigzag = mesh.spec.order_of(causal=True) == "zigzag"
            order = pla.sequence_order(9, mesh.spec.ring, "zigzag") if zigzag else None
            rest = (9, 4, mesh.grid, model.ids_layout, model.targets_layout)
            tokens = np.arange(60) * 7 % 13
            engine, train, _, _ = pla.initialize(model, train_dataloader=Windows(tokens, *rest, seed=2, order=order))
            schedule = pla.PipelineSchedule(2)
            data_iter, found = iter(train), []
            found.append(schedule.forward_backward_step(engine, data_iter, return_output_label=False)[2])
            engine.step()
            engine.eval()
            return [*found, schedule.forward_backward_step(engine, iter(train), forward_only=True)[2]]

    want = losses(SingleComm(), {})
    parallel = {"sequence": 2} if SIZE == 2 else {"sequence": 2, "pipeline": 2}
    np.testing.assert_allclose(losses(world, parallel), want, rtol=CLOSE)


@pytest.mark.ranks(1, 2)
def test_a_criterion_of_means(world: Any, backend: str) -> None:
    """Microbatches count by their labels; the two outputs of a schedule are joined in the order of the rows."""
    x, y = samples()[0], np.random.default_rng(2).normal(size=(22, SIZES[-1]))
    norms, outputs = [], []
    for parts in (1, 4):
        with pla.launch({**SETTINGS, "parallel": {}}, world, backend) as mesh:
            model = mlp(mesh, 0.0)
            engine, train, _, _ = pla.initialize(model, lambda p: SGD(p, 0.1), ops.mse_loss, [(x, y)])
            schedule = pla.PipelineSchedule(parts) if parts > 1 else pla.NonPipelineSchedule()
            output, label, loss = schedule.forward_backward_step(engine, iter(train))
            np.testing.assert_array_equal(held(label), y)
            np.testing.assert_allclose(loss, np.mean((held(output) - y) ** 2), rtol=CLOSE)
            engine.step()
            norms.append(engine.gradient_norm)
            outputs.append(held(output))
    np.testing.assert_allclose(norms[1], norms[0], rtol=CLOSE)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_steps_left_out_and_the_scale(world: Any, backend: str) -> None:
    settings = {**SETTINGS, "dtype": "float32", "precision": "fp16"}
    with pla.launch(settings, world, backend) as mesh:
        model = nn.MLP(SIZES, mesh.scheme, mesh.grid, dtype=np.float16)
        engine, *_ = pla.initialize(model, train_dataloader=pairs())
        assert engine.loss_scale == 2.0**16
        before = engine.state_dict()
        for i in range(30):
            (x, y), *_ = pairs()
            engine.backward(engine.criterion(engine(x * 1e3 if i == 0 else x), y))
            changed = engine.step()
            if changed:
                break
            assert engine.loss_scale == 2.0 ** (15 - i)
        assert changed
        assert engine.skipped == engine.steps_done - 1 > 0
        engine.load_state_dict(before)
        assert (engine.loss_scale, engine.steps_done, engine.skipped) == (2.0**16, 0, 0)


@pytest.mark.ranks(1, 2, 4)
def test_what_is_wrong_is_told(world: Any, backend: str) -> None:
    with pla.launch({**SETTINGS, "gradient_accumulation": 2}, world, backend) as mesh:
        engine, train, _, _ = pla.initialize(mlp(mesh), train_dataloader=pairs())
        with pytest.raises(EngineError, match=r"step\(\) without a backward pass"):
            engine.step()
        x, y = pairs()[0]
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        with pytest.raises(EngineError, match="had its backward pass"):
            engine.backward(loss)
        with pytest.raises(EngineError, match="step is not made"):
            engine.schedule.forward_backward_step(engine, iter(train))
        assert not engine.step()
        with pytest.raises(EngineError, match=r"step\(\) without a backward pass"):
            engine.step()
        with pytest.raises(EngineError, match=r"before engine\(x\)"):
            engine.backward(pla.Tensor(pla.distribute(np.zeros(()), mesh.grid, pla.Layout())))
        engine.zero_grad(all=True)
        with pla.no_grad():
            loss = engine.criterion(engine(x), y)
        with pytest.raises(EngineError, match="depends on no parameter"):
            engine.backward(loss)
        with pytest.raises(EngineError, match="a Tensor of one element, not of shape"):
            engine.backward(engine(x))
        with pytest.raises(EngineError, match="not float"):
            engine.backward(1.0)
        engine.zero_grad(all=True)
        with pytest.raises(EngineError, match=r"step 1: the loss.* is nan.*: nothing has changed"):
            engine.backward(engine.criterion(engine(x), y) * np.nan)


@pytest.mark.ranks(1, 2, 3)
def test_wrong_batches_are_told_on_all_ranks(world: Any, backend: str) -> None:
    """Where one rank alone is wrong, too; in a pipeline and without one."""
    parallel = {"pipeline": SIZE} if SIZE == 2 else {}
    with pla.launch({**SETTINGS, "parallel": parallel}, world, backend) as mesh:
        factor = [1.0]

        def criterion(output: Any, label: Any) -> Any:
            loss, count = ops.cross_entropy_sum(output, label)
            return loss * factor[0], count

        engine, train, _, _ = pla.initialize(mlp(mesh), None, criterion, train_dataloader=pairs())
        schedule = pla.PipelineSchedule(4)
        batches = iter(train)

        def step(given: Any) -> Any:
            return schedule.forward_backward_step(engine, given)

        for _ in pairs():
            step(batches)
            engine.step()
        with pytest.raises(EngineError, match=r"data_iter ends after 2 batches, and a step needs another"):
            step(batches)
        with pytest.raises(EngineError, match=r"a batch of 3 rows cannot be cut into 4 microbatches"):
            step(iter(pairs(3)))
        with pytest.raises(EngineError, match=r"data_iter is an iterator, iter\(train_dataloader\), not list"):
            step(pairs())
        with pytest.raises(EngineError, match=r"pairs \(inputs, labels\), not a ndarray"):
            step(iter([samples()[0]]))
        with pytest.raises(EngineError, match="11 rows of inputs and 10 of labels"):
            step(iter([(pairs()[0][0], pairs()[0][1][:10])]))
        if SIZE > 1:
            with pytest.raises(EngineError, match=r"the batches of rank 1 end, those of other ranks go on"):
                step(iter(pairs()[: world.rank != 1]))
            with pytest.raises(EngineError, match=r"rank 1 has a batch of 8 rows, rank 0 one of 11"):
                step(iter(pairs(8 if world.rank == 1 else 11)))
            feed = type(train)(pairs()[: 1 + (world.rank != 1)], world)
            with pytest.raises(EngineError, match=r"the batches of rank 1 end"):
                list(feed)
        long = type("Long", (list,), {"__len__": lambda self: 3})(pairs())
        with pytest.raises(EngineError, match=r"epoch 0 of the dataloader ends after 2 batches, and its len\(\) is 3"):
            pla.Trainer(engine, schedule).fit(long, 1)
        factor[0] = np.nan
        with pytest.raises(EngineError, match=r"step 5: the loss is nan, and .*: nothing has changed"):
            step(iter(pairs()))
        factor[0] = 1.0
        step(iter(pairs()))
        engine.step()
        if SIZE == 2:
            with pytest.raises(EngineError, match=r"engine\(x\): this model is cut into stages"):
                engine(samples()[0])
            with pytest.raises(EngineError, match=r"NonPipelineSchedule: this model is cut into the stages"):
                pla.NonPipelineSchedule().forward_backward_step(engine, iter(pairs()))
            with pytest.raises(ConfigError, match="split the model for the schedule it runs"):
                pla.InterleavedPipelineSchedule(4, 2).forward_backward_step(engine, iter(pairs()))


@pytest.mark.ranks(1, 2)
def test_what_initialize_refuses(world: Any, backend: str) -> None:
    with pla.launch({**SETTINGS, "parallel": {"pipeline": SIZE}}, world, backend) as mesh:
        other = mlp(mesh).initialize(0)
        why = "is cut into stages here" if SIZE > 1 else "has no values yet"
        with pytest.raises(ConfigError, match=rf"{why}.*give a callable, such as optimizer=lambda parameters: SGD"):
            pla.initialize(mlp(mesh), SGD(other.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match=r"the optimizer has the parameter '0\.weight', which is not the model's"):
            pla.initialize(mlp(mesh), lambda p: SGD(other.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="an Optimizer or a callable that makes one from parameters, not 'adamw'"):
            pla.initialize(mlp(mesh), "adamw")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a dataloader is an iterable of pairs"):
            pla.initialize(mlp(mesh), train_dataloader=3)
        with pytest.raises(ConfigError, match=r"lr_schedule .* needs the number of steps"):
            pla.initialize(mlp(mesh), config={"lr_schedule": "cosine"})
        with pytest.raises(ConfigError, match="num_microbatches must be a whole number of at least 1, not 0"):
            pla.PipelineSchedule(0)
        if SIZE > 1:
            with pytest.raises(ConfigError, match="is for models that are not cut into stages"):
                pla.initialize(mlp(mesh), schedule=pla.NonPipelineSchedule())


@pytest.mark.ranks(2)
def test_models_by_hand_and_as_data(world: Any, backend: str) -> None:
    """What is built for `mesh.rank("pipeline")`, or given as dicts, trains as the model whole on one rank."""
    x, y = pairs()[0]

    def losses(mesh: Any, model: Any) -> list[Any]:
        engine, train, _, _ = pla.initialize(model, lambda p: SGD(p, 0.3), train_dataloader=[(x, y)] * 2)
        data_iter = iter(train)
        return [(engine.execute_schedule(data_iter)[2], engine.step())[0] for _ in range(2)]

    def parts(mesh: Any) -> list[nn.Module]:
        place: Any = {"scheme": mesh.scheme, "grid": mesh.grid, "dtype": np.float64}
        first, last = nn.Linear(SIZES[0], 6, kind="expand", **place), nn.Linear(6, SIZES[-1], kind="contract", **place)
        return [nn.Sequential(first, nn.GELU()), nn.Sequential(last)]

    with pla.launch(SETTINGS, SingleComm(), "numpy") as mesh:
        nested, flat = parts(mesh), [layer for part in parts(mesh) for layer in part]  # type: ignore[attr-defined]
        want = losses(mesh, nn.Sequential(*nested)), losses(mesh, nn.Sequential(*flat))
    with pla.launch({**SETTINGS, "parallel": {"pipeline": 2}}, world, backend) as mesh:
        by_hand = build_by_hand(parts(mesh)[mesh.rank("pipeline")], mesh=mesh)
        np.testing.assert_allclose(losses(mesh, by_hand), want[0], rtol=CLOSE)
        cfg = [
            {"type": "Linear", "in_features": SIZES[0], "out_features": 6}, {"type": "GELU"},
            {"type": "Linear", "in_features": 6, "out_features": SIZES[-1]},
        ]  # fmt: skip
        as_data = build_pipeline_model_from_cfg(cfg, mesh=mesh, dtype="float64")
        np.testing.assert_allclose(losses(mesh, as_data), want[1], rtol=CLOSE)
