"""What passes between stages: trees of arrays, from any grid to any other, each element once."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.comm import SingleComm, ledger
from parlinalg.datasets import Batch
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.pipeline import PipelineTopology, Worker, make_schedule, split
from parlinalg.train import launch
from tests.cases import alike, placed
from tests.conftest import SIZE
from tests.models import alone

SHAPE = (5, 3, 7)
ONE, LINE, TOKENS = {"size": 1}, {"size": 2, "mode": "1d"}, {"size": 2, "mode": "1d", "sequence_parallel": True}
FLAT, TALL = {"size": 4, "mode": "2d"}, {"size": 2, "mode": "2d", "shape": (2, 1)}
GRIDS: dict[int, list[tuple[int, list[dict[str, Any]]]]] = {
    2: [(1, [ONE, ONE])],
    3: [(1, [ONE, LINE]), (1, [TALL, ONE]), (1, [TOKENS, ONE])],
    4: [(1, [{"size": 3, "mode": "1d"}, ONE]), (2, [ONE, ONE]), (1, [TOKENS, TALL]), (1, [LINE, LINE])],
    6: [(1, [LINE, FLAT]), (1, [FLAT, TOKENS]), (2, [LINE, ONE]), (1, [ONE, {"size": 5, "mode": "1d"}])],
    8: [(1, [{"size": 2, "mode": "1d"}, {"size": 6, "mode": "2d", "shape": (2, 3)}]), (1, [FLAT, FLAT]),
        (2, [TOKENS, TALL])],
}  # fmt: skip


class Squares:
    """The loss: squares of what the model gives."""

    def context(self, batch: Batch) -> Any:
        return nullcontext(())

    def losses_of(self, output: pla.Tensor, batch: Batch) -> tuple[pla.Tensor, int, dict[str, float]]:
        return (output * output).sum(), batch.count, {}


class Seen(nn.Linear):
    """A product that notes how its input lies, and how its output does."""

    def forward(self, x: Any, **options: Any) -> Any:
        y = super().forward(x, **options)
        self.given, self.gave = x if isinstance(x, pla.DistArray) else x.data, y.data
        return y


class Chain(nn.Sequential):
    """Layers one after the other, of a scheme on a grid."""

    def __init__(self, scheme: Any, grid: Any, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scheme, self.grid = scheme, grid


# ------------------------------------------------------------------ messages
def two_stages(data: int, tensors: list[dict[str, Any]], kinds: tuple[str, str], world: Any, backend: str) -> Any:
    """Two products, one in each stage, on grids of their own."""
    config = {"parallel": {"data": data, "pipeline": {"size": 2, "tensor": tensors}}, "dtype": "float64"}
    mesh = launch(config, world, backend)
    widths = (SHAPE[-1], 9, SHAPE[-1])
    layers = [
        Seen(n, m, mesh.scheme, mesh.grid, kind, dtype="float64")
        for n, m, kind in zip(widths, widths[1:], kinds, strict=False)
    ]
    schedule = make_schedule("gpipe", 2, 2)
    model = split(Chain(mesh.scheme, mesh.grid, *layers), mesh.topology, schedule, [1, 1]).initialize(1)
    return mesh, layers, model, Worker(model, schedule)


def batches_for(mesh: Any, kind: str) -> list[Batch]:
    scheme = mesh.scheme.for_dims(3)
    layout = scheme.residual if kind == "expand" else scheme.inner
    xs = np.random.default_rng(1).normal(size=(2, *SHAPE))
    return [Batch(placed(x, mesh.grid, layout), placed(x[..., 0] * 0, mesh.grid, scheme.tokens), 5 * i)
            for i, x in enumerate(xs)]  # fmt: skip


@pytest.mark.ranks(2, 3, 4, 6, 8)
@pytest.mark.parametrize("kinds", [("expand", "contract"), ("contract", "expand")], ids=" ".join)
def test_every_element_arrives_once_where_it_is_wanted(kinds: tuple[str, str], world: Any, backend: str) -> None:
    """No rank receives more than its block, which lies as the stage there wants it; replicas share the sending."""
    for data, tensors in GRIDS[SIZE]:
        mesh, layers, model, worker = two_stages(data, tensors, kinds, world, backend)
        batches = batches_for(mesh, kinds[0])
        for turn in range(3):
            model.zero_grad()
            with ledger(worker.comm) as book:
                worker.step(batches, Squares(), 0, 1.0)
        mine = layers[mesh.topology.rank]
        block = mine.given if mesh.topology.rank else mine.gave
        key = ("receive", ("pipeline",))
        assert book.words[key] == 2 * block.block.size, (turn, tensors)
        adapted = mesh.scheme.for_dims(3)
        if mesh.topology.rank:
            takes = adapted.residual if kinds[1] == "expand" else adapted.inner
            assert mesh.grid.effective(block.layout) == mesh.grid.effective(takes), tensors
        sizes = [math.prod(each.values()) for each in mesh.topology.sizes]
        if sizes[0] == sizes[1] and tensors[0] == tensors[1]:
            assert book.calls["send", ("pipeline",)] == book.calls[key] == 2, tensors
        everyone = world.share(int(book.calls["send", ("pipeline",)]))
        own = [everyone[r] for r in mesh.topology.ranks[mesh.topology.rank]]
        assert max(own) <= min(own) + 2 * max(1, max(sizes) // min(sizes)), tensors
        state = model.state_dict()
        grads = {n: p.grad.gather() for n, p in model.named_parameters()}
        with alone(world) as grid:
            scheme = schemes.discover()["serial"].SCHEME
            widths = (SHAPE[-1], 9, SHAPE[-1])
            serial = nn.Sequential(*(nn.Linear(n, m, scheme, grid, dtype="float64") for n, m in pairwise(widths)))
            serial.initialize(1)
            serial.load_state_dict(state)
            for x in np.random.default_rng(1).normal(size=(2, *SHAPE)):
                y = serial(pla.Tensor(placed(x, grid, Layout(None, None, None))))
                (y * y).sum().backward()
            for n, p in serial.named_parameters():
                if n in grads:
                    alike(p.grad, grads[n], 1e-12)
        worker.close()
        mesh.close()


class Odd(nn.Module):
    """Gives what cannot pass: an array in a layout that its scheme does not have, or a set."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Any) -> Any:
        return {1, 2} if self.what == "set" else x.redistribute(Layout("t", None, None))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("what", "kind", "told"), [
    ("layout", LayoutError, "residual 3"), ("set", ConfigError, "not a set"),
])  # fmt: skip
def test_what_cannot_pass_is_told(what: str, kind: Any, told: str, world: Any, backend: str) -> None:
    config = {"parallel": {"data": 1, "pipeline": {"size": 2, "tensor": [LINE, ONE]}}, "dtype": "float64"}
    mesh = launch(config, world, backend)
    layers = [nn.Linear(SHAPE[-1], 6, mesh.scheme, mesh.grid, "contract", dtype="float64"), Odd(what),
              nn.Linear(6, 3, mesh.scheme, mesh.grid, dtype="float64")]  # fmt: skip
    model = split(
        Chain(mesh.scheme, mesh.grid, *layers), mesh.topology, make_schedule("gpipe", 2, 2), [2, 1]
    ).initialize(1)
    worker = Worker(model, make_schedule("gpipe", 2, 2))
    if mesh.topology.rank == 0:  # left open: nobody may wait for messages that never come
        with pytest.raises(kind, match=told):
            worker.step(batches_for(mesh, "contract"), Squares(), 0, 1.0)


def losses_of_a_perceptron(config: dict[str, Any], comm: Any, backend: str) -> list[float]:
    """Two steps of three products with activations between them, five layers in all."""
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(8, 7)), np.arange(8) % 3)] * 2
    with launch({"dtype": "float64", "optimizer": "sgd", **config}, comm, backend) as mesh:
        model = nn.MLP((7, 6, 5, 3), mesh.scheme, mesh.grid, "gelu", dtype=np.float64)
        engine, train, _, _ = pla.initialize(model, train_dataloader=pairs)
        trainer = pla.Trainer(engine)
        return [trainer.fit(train, steps=step)["loss"] for step in (1, 2)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("pair", [LINE, {"size": 2, "mode": "3d", "shape": (1, 1, 2)}], ids=["1d", "3d"])
def test_a_stage_without_products_takes_what_the_next_product_takes(
    pair: dict[str, Any], world: Any, backend: str
) -> None:
    """Stages 1 and 2, on the same ranks, are an activation and a product of the inside of a block."""
    each = {"tensor": [ONE, pair], "partition": [1, 1, 1, 2]}
    found = losses_of_a_perceptron({"parallel": {"pipeline": each}, "schedule": "zb-v"}, world, backend)
    np.testing.assert_allclose(found, losses_of_a_perceptron({}, SingleComm(), "numpy"), rtol=1e-12)


# ------------------------------------------------------------------ models that pass more than one array
class Branching(nn.Module):
    """Passes trees: the stream, one that goes round the layers, integers, a constant, numbers."""

    def __init__(self, scheme: Any, grid: Any, long: int = 0) -> None:
        super().__init__()
        self.scheme, self.grid = scheme, grid
        self.one = nn.Linear(4, 6, scheme, grid, dtype="float64")
        self.two = nn.Linear(6, 6, scheme, grid, dtype="float64")
        self.three = nn.Linear(6, 3, scheme, grid, dtype="float64")
        self.note = "long " * long

    def layers(self) -> list[Any]:
        return [nn.Layer("first", self.first, (self.one,)), nn.Layer("second", self.second, (self.two,)),
                nn.Layer("third", self.third, (self.three,))]  # fmt: skip

    def first(self, x: Any) -> Any:
        y = self.one(pla.Tensor(x))
        whole = pla.DistArray(x.block.astype(np.int64), x.shape, x.layout, x.grid)
        return {"y": y, "skip": (y, y * 2.0), "whole": whole, "note": self.note, "constant": pla.Tensor(y.data)}

    def second(self, tree: Any) -> Any:
        assert tree["note"] == self.note
        assert not tree["constant"].requires_grad
        assert (type(tree["skip"]), type(tree["note"])) == (tuple, str)
        y = self.two(tree["y"]) + tree["skip"][1] + tree["constant"]
        return [y, tree["skip"][0], tree["whole"], y]

    def third(self, each: Any) -> Any:
        assert type(each) is list
        y, skip, whole, again = each
        assert whole.dtype == np.int64
        return self.three(y + skip + again)

    def forward(self, x: Any) -> Any:
        return self.third(self.second(self.first(x)))


def branching_batch(model: Any, rows: slice) -> Batch:
    x = np.random.default_rng(2).normal(size=(7, 4))[rows] * 3
    flat = model.scheme.for_dims(2)
    y = placed(np.zeros(len(x), np.int64), model.grid, flat.tokens)
    return Batch(placed(x, model.grid, flat.residual), y, rows.start)


@pytest.mark.ranks(2, 3, 6)
@pytest.mark.parametrize("long", [0, 3000])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_trees_pass_with_their_gradients(name: str, long: int, world: Any, backend: str) -> None:
    data = schemes.discover()["data"].SCHEME
    stages = 3 if SIZE % 3 == 0 else 2
    place = PipelineTopology.of(world, [{"data": SIZE // stages}] * stages, ("data",))
    grid = Grid(place.sizes[place.rank], place.group, backend)
    schedule = make_schedule(name, stages, 2)
    model = split(Branching(data, grid, long), place, schedule, [1, 1, 1] if stages == 3 else [1, 2]).initialize(1)
    worker = Worker(model, schedule)
    for _ in range(2):  # the second time shapes are known
        model.zero_grad()
        batches = [branching_batch(model.full_model, rows) for rows in (slice(0, 4), slice(4, 7))]
        sums = worker.step(batches, Squares(), 0, 0.5)
    with alone(world) as own:
        serial = Branching(schemes.discover()["serial"].SCHEME, own, long).initialize(1)
        batch = branching_batch(serial, slice(0, 7))
        loss, _, _ = Squares().losses_of(serial(batch.x), batch)
        (loss * 0.5).backward()
        want = {n: p.grad.gather() for n, p in serial.named_parameters()}
    assert abs(sums["loss"] - loss.item()) <= 1e-12 * loss.item()
    for n, p in model.named_parameters():
        alike(p.grad, want[n], 1e-11)
    worker.close()
    grid.close()
    place.close()
