"""Parameters that several ranks of a pipeline hold: one sum for all holders, counted once, and equal bits for ever."""

from __future__ import annotations

from contextlib import nullcontext
from hashlib import sha1
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.comm import SingleComm, ledger
from parlinalg.datasets import Batch
from parlinalg.errors import CommError, ConfigError
from parlinalg.layout import Layout
from parlinalg.parallel import GradientReducer, ZeRO
from parlinalg.pipeline import Worker, make_schedule, split
from tests.cases import placed
from tests.conftest import SIZE
from tests.models import alone
from tests.pipeline.running import SERIAL, Text, batches, differs, model_on, pipeline, serial

LAYERS, TABLE = 3, "embedding.weight"
UNLIKE = {3: [{"size": 1}, {"size": 2, "mode": "1d"}], 4: [{"size": 3, "mode": "1d"}, {"size": 1}],
          8: [{"size": 2, "mode": "1d"}, {"size": 6, "mode": "2d", "shape": (2, 3)}]}  # fmt: skip


def expected(world: Any) -> dict[str, np.ndarray]:
    """The gradients of one rank, of the sum of the losses."""
    with alone(world) as grid:
        model = model_on(SERIAL, grid, LAYERS, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0).initialize(5)
        (batch,) = batches(model, 0, 1)
        loss, _, _ = Text().losses_of(model(batch.x), batch)
        loss.backward()
        return {n: p.grad.gather() for n, p in model.named_parameters()}


def differing(p: Any, want: dict[str, np.ndarray]) -> list[str]:
    """The parameters whose gradients, whole or in shards, are not what they should be."""
    wrong = []
    for name, q in p.model.named_parameters():
        part = tuple(slice(r.start, r.stop) for r in q.grid.block(q.layout, q.shape))
        mine = want[name][part].reshape(-1)
        got = q.updated[1]
        mine = mine[slice(*q.storage.partition(q.data)[:2])]
        if not np.abs(q.grid.backend.to_host(got) - mine).max(initial=0) <= 1e-11 * np.abs(want[name]).max():
            wrong.append(name)
    return wrong


def parallel_of(kind: str) -> dict[str, Any]:
    if kind == "unlike":
        return {"data": 1, "pipeline": {"size": 2, "tensor": UNLIKE[SIZE]}}
    return {"data": SIZE // 2, "pipeline": 2}


CASES = [
    *(pytest.param("1f1b", "alike", zero, marks=pytest.mark.ranks(4)) for zero in (0, 1, 2)),
    pytest.param("chimera", "alike", 0, marks=pytest.mark.ranks(2, 4)),
    *(pytest.param("chimera", "alike", zero, marks=pytest.mark.ranks(4)) for zero in (1, 2)),
    *(pytest.param(name, "unlike", 0, marks=pytest.mark.ranks(3, 4, 8)) for name in ("1f1b", "chimera")),
]


@pytest.mark.parametrize(("name", "kind", "zero"), CASES)
def test_holders_have_the_sum(name: str, kind: str, zero: int, world: Any, backend: str) -> None:
    want = expected(world)
    dry = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    with pipeline(world, backend, name, parallel_of(kind), 2, LAYERS, zero=zero, **dry) as p:
        p.worker.step(p.batches(0), p.work, 0, 1.0)
        assert world.share(differing(p, want)) == [[]] * SIZE
        tied = {tie.name for tie in p.worker.tied.parameters}
        assert tied == (set(want) if name == "chimera" else {TABLE})
        owned = [n for n, q in p.model.named_parameters() if p.worker.tied.owns(q)]
        first = [ranks[0] for ranks in p.mesh.topology.ranks]
        everywhere = sorted(n for rank in first for n in world.share(owned)[rank])
        assert everywhere == sorted(want)
        # Chimera's two holders have the same parameters, so their shards are alike; a tied table's are not.
        assert p.worker.tied.alike == (kind == "alike" and (not zero or name == "chimera"))


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(("name", "kind"), [("1f1b", "unlike"), ("chimera", "unlike"), ("chimera", "alike")])
def test_holders_keep_equal_bits(name: str, kind: str, world: Any, backend: str) -> None:
    if kind == "alike" and SIZE == 3:
        return
    with pipeline(world, backend, name, parallel_of(kind), 2, LAYERS) as p:
        for step in range(3):
            p.step(step, clip=0.5)
        mine = {n: sha1(q.gather().tobytes()).hexdigest() for n, q in p.model.named_parameters()}
        for there in world.share(mine):
            assert not [n for n, digest in there.items() if mine.get(n, digest) != digest]


@pytest.mark.ranks(2)
def test_words_of_a_tied_table(world: Any, backend: str) -> None:
    with pipeline(world, backend, "1f1b", {"data": 1, "pipeline": 2}, 2, LAYERS) as p:
        p.step(0)
        with ledger(p.worker.comm) as book:
            p.worker.step(p.batches(1), p.work, 1, 1.0)
        size = 11 * 12
        key = ("all_reduce", ("pipeline",))
        assert book.calls[key] == 1
        assert book.words[key] == 2 * (size - size // 2)
        rows = 9 * 6 * 12  # of all microbatches: one way on each of the two ranks
        assert book.words["receive", ("pipeline",)] == rows


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 2])
def test_another_reducer_needs_another_worker(zero: int, world: Any, backend: str) -> None:
    losses, norms = serial(world, LAYERS, 3)
    with pipeline(world, backend, "1f1b", {"data": 2, "pipeline": 2}, 2, LAYERS, zero=1) as p:
        found = [p.step(0)]
        p.reducer.detach()
        with pytest.raises(ConfigError, match="make another worker"):
            p.step(1)
        with pytest.raises(CommError, match="make another worker"):
            p.step(1)
        p.optimizer.zero_grad()
        reducer = GradientReducer(p.model.parameters(), [ZeRO(zero)] if zero else [])
        p.worker = Worker(p.model, p.schedule, reducer)
        found += [p.step(step) for step in (1, 2)]
    wrong = differs([loss for loss, _ in found], losses) + differs([norm for _, norm in found], norms)
    assert not wrong, wrong


class Thrice(nn.Sequential):
    """A perceptron that the first, the third and the last layer share, and two of their own."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        made = [nn.MLP((6, n, 6), scheme, grid, "tanh", dtype=np.float64) for n in (8, 5, 7)]
        super().__init__(made[0], made[1], made[0], made[2], made[0])
        self.scheme, self.grid = scheme, grid


THREE = {
    3: [{"size": 1}] * 3,
    4: [{"size": 1}, {"size": 2, "mode": "1d"}, {"size": 1}],
    6: [{"size": 2, "mode": "2d", "shape": (1, 2)}, {"size": 1}, {"size": 3, "mode": "1d"}],
}


class Bypass(nn.Module):
    """Holds a module and does without it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return x


class HeldIdly(nn.Sequential):
    """A perceptron that the first layer uses and the last one only holds."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        made = [nn.MLP((6, n, 6), scheme, grid, "tanh", dtype=np.float64) for n in (8, 5)]
        super().__init__(made[0], made[1], Bypass(made[0]))
        self.scheme, self.grid = scheme, grid


def trained(kind: Any, comm: Any, backend: str, **more: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
    """The losses of four steps, and the parameters after them, whose holders have equal bits."""
    config = {"dtype": "float64", "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}, **more}
    x, y = np.random.default_rng(3).normal(size=(2, 7, 6))
    with pla.launch(config, comm, backend) as mesh:
        model = kind(mesh.scheme, mesh.grid)
        engine, train, _, _ = pla.initialize(model, None, pla.autograd.ops.mse_sum, [(x, y)] * 4)
        batches, losses = iter(train), []
        for _ in range(4):
            losses.append(engine.schedule.forward_backward_step(engine, batches, return_output_label=False)[2])
            engine.step()
        mine = {n: sha1(p.gather().tobytes()).hexdigest() for n, p in engine.named_parameters()}
        for there in comm.share(mine):
            assert not [n for n, digest in there.items() if mine.get(n, digest) != digest]
        return losses, engine.model.state_dict()


def trains_as_one_rank(kind: Any, parallel: dict[str, Any], schedule: str, world: Any, backend: str) -> None:
    more = {"parallel": parallel, "schedule": {"name": schedule, "microbatches": 3}}
    found, after = trained(kind, world, backend, **more)
    losses, want = trained(kind, SingleComm(), "numpy")
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    assert after.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_allclose(after[key], value, rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.ranks(*THREE)
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_three_holders_on_unlike_grids(name: str, world: Any, backend: str) -> None:
    """The parameters of plain descent are those of one rank, and all holders keep equal bits."""
    parallel = {"pipeline": {"size": 3, "tensor": THREE[SIZE], "partition": [2, 2, 1]}}
    trains_as_one_rank(Thrice, parallel, name, world, backend)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_holder_that_no_microbatch_reaches(name: str, world: Any, backend: str) -> None:
    parallel = {"data": SIZE // 2, "pipeline": {"size": 2, "partition": [2, 1]}}
    trains_as_one_rank(HeldIdly, parallel, name, world, backend)


class Squares:
    """What a worker is to do with a model and its targets."""

    def context(self, batch: Batch) -> Any:
        return nullcontext([])

    def losses_of(self, output: Any, batch: Batch) -> tuple[pla.Tensor, int, dict[str, float]]:
        total, count = pla.autograd.ops.mse_sum(output, batch.y)
        return total, count, {}


@pytest.mark.ranks(2)
def test_a_holder_that_no_microbatch_reaches_without_a_reducer(world: Any, backend: str) -> None:
    """Its gradient is that of the holders that are reached."""
    x, y = np.random.default_rng(3).normal(size=(2, 7, 6))
    with pla.launch({"parallel": {"pipeline": 2}, "dtype": "float64"}, world, backend) as mesh:
        schedule = make_schedule("1f1b", 2, 2)
        model = split(HeldIdly(mesh.scheme, mesh.grid), mesh.topology, schedule, [2, 1]).initialize(1)
        given = [[placed(a[rows], mesh.grid, Layout(None, None)) for a in (x, y)] for rows in (slice(4), slice(4, 7))]
        with Worker(model, schedule) as worker:
            worker.step([Batch(*pair, 0) for pair in given], Squares(), 0, 1.0)
        found = world.share({n: p.grad.gather().tolist() for n, p in model.named_parameters()})
    with alone(world) as grid:
        serial = HeldIdly(SERIAL, grid).initialize(1)
        pla.autograd.ops.mse_sum(serial(placed(x, grid, Layout(None, None))), placed(y, grid, Layout(None, None)))[
            0
        ].backward()
        want = {n: p.grad.gather() for n, p in serial.named_parameters()}
    assert found[0].keys() == want.keys() > found[1].keys()
    for there in found:
        for n, gradient in there.items():
            np.testing.assert_allclose(gradient, want[n], rtol=1e-12, atol=1e-13, err_msg=n)
