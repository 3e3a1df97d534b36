"""Asynchronous schedules equal their oracles; weights are stashed while they change."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.datasets import Batch
from parlinalg.parallel import GradientReducer, ZeRO
from parlinalg.parallel import zero as values
from parlinalg.pipeline import AsynchronousWorker, Op, make_schedule, split
from parlinalg.train import launch
from tests.conftest import SIZE
from tests.models import alone
from tests.parallel.test_overlap_gather import Latest
from tests.pipeline.oracles import Delayed, Perceptron, pipedream, two_buffered
from tests.pipeline.running import SERIAL, Text, batches, model_on


def rows(step, count=6, widths=(5, 3)):
    rng = np.random.default_rng(step)
    return [rng.normal(size=(count, n)) for n in widths]


# ------------------------------------------------------------------ the oracles
@pytest.mark.serial
@pytest.mark.parametrize("name", ["pipedream", "2bw", "prompt"])
def test_the_oracles_agree_with_each_other(name):
    makers = {"pipedream": pipedream, "2bw": two_buffered, "prompt": lambda stages, every=1: lambda s, j: j // every}
    by_step, by_microbatch = makers[name](3), makers[name](3, 1 if name == "pipedream" else 2)
    by_hand = Perceptron((5, 4, 4, 3))
    with pla.Grid({"one": 1}) as grid:
        linears = [nn.Linear(*w.shape, SERIAL, grid, bias=False, dtype=np.float64) for w in by_hand.start]
        model = nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2]).initialize(0)
        model.load_state_dict({f"{2 * s}.weight": w for s, w in enumerate(by_hand.start)})

        def losses_of(batch):
            error = model(pla.Tensor(batch.x)) - pla.Tensor(batch.y)
            return (error * error).sum() * 0.5, batch.count

        def placed(a):
            return pla.distribute(a, grid, pla.Layout(None, None))

        given = [rows(t) for t in range(7)]
        cuts = (slice(0, 6),) if name == "pipedream" else (slice(0, 4), slice(4, 6))
        parts = [
            [
                SimpleNamespace(x=placed(x[at]), y=placed(y[at]), offset=at.start, count=at.stop - at.start)
                for at in cuts
            ]
            for x, y in given
        ]
        oracle = Delayed(model, optim.SGD(model.parameters(), 0.1), lambda name: int(name[0]) // 2, losses_of)
        losses = oracle.run(parts, by_microbatch)
        want, weights = by_hand.train(given, 0.1, by_step)
        np.testing.assert_allclose(losses, want, rtol=1e-12)
        for s, w in enumerate(weights):
            np.testing.assert_allclose(oracle.weights()[f"{2 * s}.weight"], w, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------ through a pipeline
VERSIONS = {"pipedream": pipedream, "pipedream-2bw": two_buffered}


class Squares:
    """Half the squared error."""

    def context(self, batch: Batch) -> Any:
        return nullcontext([])

    def losses_of(self, output: Any, batch: Batch) -> Any:
        error = output - pla.Tensor(batch.y)
        return (error * error).sum() * 0.5, batch.count, {}


def perceptron_batches(data, mesh):
    layout, rows = mesh.scheme.for_dims(2).residual, len(data[0][0])
    return [Batch(*(pla.distribute(a, mesh.grid, layout) for a in both), rows * t) for t, both in enumerate(data)]


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize(
    "zero",
    [pytest.param(z, marks=pytest.mark.ranks(*((2, 3, 4) if z is None else (4,)))) for z in (None, 0, 1, 2, "late")],
)
def test_a_perceptron_is_trained_as_by_hand(name, zero, world, backend, monkeypatch):
    """A version stays as it is while the newest one is updated, in shards too."""
    stages = SIZE if zero is None else 2
    by_hand = Perceptron((5, *[4] * (stages - 1), 3))
    schedule = make_schedule(name, stages, 9, every=1 if name == "pipedream" or stages == 2 else 3)
    every = 9 // sum(i.op is Op.STEP for i in schedule.orders[0])
    data = [rows(t) for t in range(9)]
    steps = [[np.concatenate(both) for both in zip(*data[t : t + every], strict=True)] for t in range(0, 9, every)]
    losses, weights = by_hand.train(steps, 0.1, VERSIONS[name](stages))
    with launch({"parallel": {"pipeline": stages}}, world, backend) as mesh:
        linears = [nn.Linear(*w.shape, mesh.scheme, mesh.grid, bias=False, dtype="float64") for w in by_hand.start]
        layers = [layer for linear in linears for layer in (linear, nn.Tanh())][:-1]
        model = split(nn.Sequential(*layers), mesh.topology, schedule, [*[2] * (stages - 1), 1]).initialize(0)
        model.load_state_dict({f"{2 * s}.weight": w for s, w in enumerate(by_hand.start)})
        handlers = [ZeRO(2, overlap_gather=True) if zero == "late" else ZeRO(zero)] if zero else None
        monkeypatch.setattr(values, "_gather", Latest)
        reducer = GradientReducer(model.parameters(), handlers, first_bucket=20, bucket=30)
        worker = AsynchronousWorker(model, schedule, optim.SGD(model.parameters(), 0.1), reducer)
        parts = perceptron_batches(data, mesh)
        kept, update = [], worker.update
        worker.update = lambda: (kept.append(len(worker.stash)), update())
        sums = worker.step(parts, Squares(), 0, factor=3.0)  # of the mean over elements: three times that over rows
        assert max(kept) == schedule.versions[mesh.topology.rank]
        np.testing.assert_allclose(sums["loss"] / (6 * every), sum(losses), rtol=1e-12)
        for s, w in enumerate(weights):
            np.testing.assert_allclose(model.state_dict()[f"{2 * s}.weight"], w, rtol=1e-12, atol=1e-13)
        assert len(worker.stash) == 1
        worker.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_ranks_without_elements_of_a_weight(name, shape, world, backend):
    """Of a layer of one feature the second rank of a stage has none."""
    by_hand = Perceptron((5, 1, 3))
    schedule = make_schedule(name, 2, 4, every=1)
    data = [rows(t) for t in range(4)]
    losses, weights = by_hand.train(data, 0.1, VERSIONS[name](2))
    with launch({"parallel": {"pipeline": 2, "tensor": {"mode": "2d", "shape": shape}}}, world, backend) as mesh:
        linears = [nn.Linear(*w.shape, mesh.scheme, mesh.grid, bias=False, dtype="float64") for w in by_hand.start]
        model = split(nn.Sequential(linears[0], nn.Tanh(), linears[1]), mesh.topology, schedule, [2, 1]).initialize(0)
        model.load_state_dict({f"{2 * s}.weight": w for s, w in enumerate(by_hand.start)})
        reducer = GradientReducer(model.parameters())
        worker = AsynchronousWorker(model, schedule, optim.SGD(model.parameters(), 0.1), reducer)
        sums = worker.step(perceptron_batches(data, mesh), Squares(), 0, factor=3.0)
        np.testing.assert_allclose(sums["loss"] / 6, sum(losses), rtol=1e-12)
        for s, w in enumerate(weights):
            np.testing.assert_allclose(model.state_dict()[f"{2 * s}.weight"], w, rtol=1e-12, atol=1e-13)
        worker.close()


LAYERS, RATE = 3, 0.02
_wanted: dict[str, Any] = {}


def wanted(world: Any, name: str, stages: int, stage_of: Mapping[str, int], runs: list[int], every: int) -> Any:
    """What the oracle says: the loss of each run, and on rank 0 the weights at the end."""
    key = repr((name, stages, runs, every))
    if key not in _wanted:
        means, weights = None, {}
        if world.rank == 0:
            with alone(world) as grid:
                means, weights = _trained_late(grid, VERSIONS[name](stages, every), stage_of, runs, every)
        _wanted[key] = world.share(means)[0], weights
    return _wanted[key]


def _trained_late(grid: Any, version: Any, stage_of: Mapping[str, int], runs: list[int], every: int) -> Any:
    model = model_on(SERIAL, grid, LAYERS, tie_word_embeddings=False).initialize(5)
    update, work = optim.AdamW(model.parameters(), RATE), Text()
    oracle = Delayed(model, update, stage_of.__getitem__, lambda batch: work.losses_of(model(batch.x), batch)[:2])
    means = []
    for run, microbatches in enumerate(runs):
        parts = batches(model, run, microbatches, rows=microbatches + 1)
        steps = [parts[at : at + every] for at in range(0, microbatches, every)]
        losses = oracle.run(steps, version, run)
        counts = [sum(part.count for part in step) for step in steps]
        means.append(float(np.dot(losses, counts)) / sum(counts))
    return means, model.state_dict()


def cases(full: bool) -> list[tuple[str, dict[str, Any], int, int]]:
    """Schedule, grid, stages and microbatches a step."""
    one, two = {"size": 2, "mode": "1d"}, {"size": 4, "mode": "2d"}
    grids: dict[int, list[dict[str, Any]]] = {
        2: [{"pipeline": 2}],
        4: [{"pipeline": 4}, {"pipeline": 2, "data": 2}, {"pipeline": 2, "tensor": one}],
        8: [{"pipeline": 4, "tensor": one}, {"pipeline": 4, "data": 2}, {"pipeline": 2, "tensor": two}],
    }  # fmt: skip
    found = []
    for turn, name in enumerate(VERSIONS):
        for number, parallel in enumerate(grids.get(SIZE, [])):
            stages = parallel["pipeline"]
            least = 1 if name == "pipedream" else max(1, stages - 1)
            if full or stages == SIZE or (number + turn) % 2:
                found += [(name, parallel, stages, every) for every in ((least, least + 1) if full else (least,))]
    return found


@pytest.mark.ranks(2, 4, 8)
def test_asynchronous_schedules_equal_their_oracles(world, backend, full):
    for turn, (name, parallel, stages, every) in enumerate(cases(full)):
        most = every * max(3, 6 // every)
        runs = [most, most - 1]  # the last one is cut short
        schedule = make_schedule(name, stages, runs[0], every=every)
        zero = (turn % 3 if full else 1) if parallel.get("data") else 0
        with launch({"parallel": parallel}, world, backend) as mesh:
            again = "block" if turn % 2 else None
            whole = model_on(mesh.scheme, mesh.grid, LAYERS, tie_word_embeddings=False, recompute=again)
            model = split(whole, mesh.topology, schedule).initialize(5)
            handlers = [ZeRO(zero, "data")] if zero else []
            reducer = GradientReducer(model.parameters(), handlers, first_bucket=2000, bucket=4000)
            worker = AsynchronousWorker(model, schedule, optim.AdamW(model.parameters(), RATE), reducer)
            means = []
            for run, microbatches in enumerate(runs):
                parts = batches(whole, run, microbatches, rows=microbatches + 1)
                sums = worker.step(parts, Text(), run)
                means.append(sums["loss"] / sums["targets"])
            state = model.state_dict()
            assert len(worker.stash) == 1
            stage_of = {n: held.stages[0] for n, held in model.inventory.items()}
            worker.close()
        losses, weights = wanted(world, name, stages, stage_of, runs, every)
        np.testing.assert_allclose(means, losses, rtol=1e-12, err_msg=f"{name}, {parallel}, every {every}")
        for n, w in weights.items():
            if n.endswith("qkv.bias"):  # that of the keys has no gradient but what rounding leaves, which AdamW shows
                w[:, -2] = state[n][:, -2] = 0
            error = np.linalg.norm(state[n] - w) / np.linalg.norm(w)  # AdamW shows the rounding of single elements
            assert error <= 1e-12, f"{name}, {parallel}, every {every}: {n} by {error:.1e}"


@pytest.mark.ranks(2)
def test_what_is_refused(world, backend):
    with launch({"parallel": {"pipeline": 2}}, world, backend) as mesh:

        def made(schedule, **options):
            model = split(model_on(mesh.scheme, mesh.grid, 2, **options), mesh.topology, schedule).initialize(0)
            return AsynchronousWorker(model, schedule, optim.SGD(model.parameters(), 0.1))

        with pytest.raises(pla.ConfigError, match=r"pipedream: 'embedding.weight' is held by stages 0, 1, .* untie it"):
            made(make_schedule("pipedream", 2, 4))
        with pytest.raises(pla.ConfigError, match="'1f1b' is synchronous: it takes a Worker"):
            made(make_schedule("1f1b", 2, 4), tie_word_embeddings=False)
        worker = made(make_schedule("pipedream-2bw", 2, 4, every=2), tie_word_embeddings=False)
        with pytest.raises(pla.ConfigError, match="is of 4 microbatches, and a step is given 5"):
            worker.step(batches(worker.model.full_model, 0, 5), Text(), 0)
        worker.close()
        fetched = split(
            model_on(mesh.scheme, mesh.grid, 2, tie_word_embeddings=False),
            mesh.topology,
            make_schedule("pipedream", 2, 4),
        ).initialize(0)
        for p in fetched.parameters():
            p.storage.gatherer = SimpleNamespace()
        with pytest.raises(pla.ConfigError, match="is fetched ahead of their use; use zero stage 0, 1 or 2"):
            AsynchronousWorker(fetched, make_schedule("pipedream", 2, 4), optim.SGD(fetched.parameters(), 0.1))
        layers = nn.Sequential(nn.Linear(3, 3, mesh.scheme, mesh.grid, dtype="float64"), nn.Tanh())
        bare = split(layers, mesh.topology, make_schedule("pipedream", 2, 4), [1, 1]).initialize(0)
        for p in bare.parameters():
            p.storage.gatherer = SimpleNamespace()
        optimizer: Any = SimpleNamespace(parameters=list(bare.parameters()))
        with pytest.raises(pla.ConfigError, match=r"rank 0, versions of weights: .*'0\.weight' is fetched ahead"):
            AsynchronousWorker(bare, make_schedule("pipedream", 2, 4), optimizer)  # the other stage has no weights


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("more", "right"),
    [
        ({"zero": 3}, "is fetched ahead of their use; use zero stage 0, 1 or 2"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm with the schedule 'pipedream'"),
        ({"skip_nonfinite": True}, "skip_nonfinite with the schedule 'pipedream'"),
        ({"precision": "fp16"}, "a loss scale .* with the schedule 'pipedream'"),
    ],
)
def test_what_is_refused_before_the_first_step(more, right, world, backend):
    parallel = {"pipeline": 2, "data": 2}
    with launch({"parallel": parallel, "schedule": "pipedream", **more}, world, backend) as mesh:
        model = nn.MLP((5, 4, 3), mesh.scheme, mesh.grid, dtype=mesh.config.model_dtype)
        with pytest.raises(pla.ConfigError, match=right):
            pla.initialize(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("name", "every"), [("pipedream", 1), ("pipedream", 3), ("pipedream-2bw", 3)])
def test_fewer_microbatches_end_with_a_step_of_their_own(name, every, world, backend):
    """What each rank does, as its spans tell it, is what the schedule has of these microbatches, and a last step."""
    whole = make_schedule(name, SIZE, 12, every=every)
    with launch({"parallel": {"pipeline": SIZE}}, world, backend) as mesh:
        linears = (nn.Linear(3, 3, mesh.scheme, mesh.grid, dtype="float64") for _ in range(SIZE))
        model = split(nn.Sequential(*linears), mesh.topology, whole).initialize(0)
        worker = AsynchronousWorker(model, whole, optim.SGD(model.parameters(), 1e-3))
        rank, worker.spans = mesh.topology.rank, []
        for count in range(1, 12):
            worker.step(perceptron_batches([rows(t, 2, (3, 3)) for t in range(count)], mesh), Squares(), count)
            done = [(s.op, s.microbatch) for s in worker.spans]
            steps = [j for op, j in done if op is Op.STEP]
            assert steps == [*range(every - 1, count, every), *([count - 1] if count % every else [])]
            passes = [each for each in done if each[0] not in (Op.STEP, Op.REDUCE_GRADIENTS)]
            of_whole = [(i.op, i.microbatch) for i in whole.orders[rank] if i.op.value in ("F", "B")]
            assert passes == [each for each in of_whole if each[1] < count]
            if not count % every:
                due = make_schedule(name, SIZE, count, every=every).orders[rank]
                assert done == [(i.op, i.microbatch) for i in due if "SEND" not in i.op.name and "REC" not in i.op.name]
        worker.close()


class Terms(Squares):
    """No losses but terms that layers add: a power of ten for each microbatch."""

    def context(self, batch):
        term = pla.full((), 10.0**batch.offset, batch.x.grid, pla.Layout(), np.float64)
        return nullcontext([pla.Tensor(term, requires_grad=True)])

    def losses_of(self, output, batch):
        return (output * 0.0).sum(), batch.count, {}


@pytest.mark.ranks(2)
def test_terms_that_layers_add_count_by_the_rows_of_their_step(world, backend):
    """A step's terms weigh as many as its losses, each microbatch's as its rows."""
    schedule = make_schedule("pipedream", SIZE, 6, every=3)
    with launch({"parallel": {"pipeline": SIZE}, "dtype": "float64"}, world, backend) as mesh:
        linears = (nn.Linear(3, 3, mesh.scheme, mesh.grid, dtype="float64") for _ in range(SIZE))
        model = split(nn.Sequential(*linears), mesh.topology, schedule).initialize(0)
        worker = AsynchronousWorker(model, schedule, optim.SGD(model.parameters(), 1e-3))
        two, one = pla.Layout(None, None), pla.Layout(None)
        parts = [
            Batch(
                pla.zeros((n, 3), mesh.grid, two, np.float64), pla.zeros(n, mesh.grid, one, np.int64), j, targets=count
            )
            for j, (n, count) in enumerate(zip([1, 1, 2, 3], [2, 0, 2, 5], strict=True))
        ]  # fmt: skip
        assert [part.count for part in parts] == [2, 0, 2, 5]
        assert worker.step(parts, Terms(), 0)["loss"] == SIZE * (1 + 10 + 2 * 100 + 5 * 1000)
        worker.close()
