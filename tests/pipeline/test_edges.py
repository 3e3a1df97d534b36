"""What passes between stages: trees of arrays, from any grid to any other, each element once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.comm import ledger
from parlinalg.datasets import Batch
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.pipeline import Place, Worker, make, split
from parlinalg.pipeline.edges import Edge, Edges
from parlinalg.pipeline.roles import table_of, translated
from parlinalg.pipeline.route import Route
from parlinalg.pipeline.tree import put_together, take_apart
from tests.cases import alike, placed
from tests.conftest import SIZE
from tests.models import alone

SHAPE = (5, 3, 7)
LAYOUTS = [
    ({"a": 2, "b": 2}, Layout("a", None, "b"), {"c": 4}, Layout(None, None, "c")),
    ({"a": 2, "b": 2}, Layout(("a", "b"), None, None), {"a": 2, "b": 2}, Layout("b", "a", None)),
    ({"a": 3}, Layout("a", None, None), {"b": 2, "c": 2}, Layout(None, "c", "b")),
    ({"a": 3}, Layout(None, None, None), {"b": 2}, Layout("b", None, None)),
    ({"a": 1}, Layout(None, None, None), {"b": 5}, Layout(None, None, None)),
    ({"b": 9}, Layout("b", None, None), {"a": 2}, Layout(None, None, "a")),
    ({"a": 2}, Layout("a", None, None), {"a": 2}, Layout("a", None, None)),
]


# ------------------------------------------------------------------ the way, on paper
@pytest.mark.serial
@pytest.mark.parametrize("shape", [SHAPE, (2, 0, 7), (1, 1, 1)])
@pytest.mark.parametrize(("one", "source", "other", "target"), LAYOUTS)
def test_every_element_arrives_once(one: Any, source: Any, other: Any, target: Any, shape: tuple[int, ...]) -> None:
    for way in (Route(shape, source, one, target, other), Route(shape, target, other, source, one)):
        whole = np.arange(np.prod(shape)).reshape(shape)
        for place, want in enumerate(way.wants):
            got = np.full(shape, -1)
            for sender, part in way.receives(place):
                cut = np.ix_(*part)
                assert (got[cut] == -1).all()
                assert (place, part) in way.sends(sender)
                assert all(set(p) <= set(h) for p, h in zip(part, way.haves[sender], strict=True))
                got[cut] = whole[cut]
            assert (got[np.ix_(*want)] == whole[np.ix_(*want)]).all()
            assert (got == -1).sum() == whole.size - int(np.prod([len(r) for r in want]))
        sent = sum(len(way.sends(place)) for place in range(len(way.haves)))
        assert sent == sum(len(way.receives(place)) for place in range(len(way.wants)))


@pytest.mark.serial
def test_replicas_share_the_sending() -> None:
    way = Route((8,), Layout(None), {"a": 3}, Layout("b"), {"b": 6})
    assert [len(way.sends(place)) for place in range(3)] == [2, 2, 2]
    alike_ = Route((8,), Layout(None), {"a": 3}, Layout(None), {"a": 3})
    assert [alike_.sends(place)[0][0] for place in range(3)] == [0, 1, 2]


@pytest.mark.serial
def test_a_layout_is_translated_by_its_part() -> None:
    found = schemes.discover()
    serial, line, flat = found["serial"].SCHEME, found["1d"].SCHEME, found["2d"].SCHEME
    one, two, four = {"x": 1}, {"t": 2}, {"r": 2, "c": 2}
    tables = {s.name: table_of(s, sizes) for s, sizes in ((serial, one), (line, two), (flat, four))}

    def there(layout: Layout, a: Any, sizes: Any, b: Any, others: Any, takes: str | None = None) -> Layout:
        return translated(layout, sizes, tables[a.name], others, tables[b.name], takes)

    assert there(line.residual, line, two, flat, four) == flat.residual
    assert there(line.inner, line, two, flat, four) == flat.inner
    assert there(flat.tokens, flat, four, line, two) == Layout(None, None)
    whole = Layout(None, None, None)
    assert there(whole, serial, one, flat, four, "residual") == flat.residual
    assert there(whole, serial, one, line, two, "inner") == line.inner
    assert there(flat.residual, flat, four, line, two, "inner") == line.inner
    assert there(Layout(None, None), serial, one, flat, four) == flat.for_dims(2).residual
    assert translated(Layout(None, None), one, tables["serial"], four, tables["2d"], None, False) == flat.tokens
    assert there(Layout(), serial, one, flat, four) == Layout()
    assert there(Layout("t", None), line, two, line, two) == Layout("t", None)
    with pytest.raises(LayoutError, match="residual 3"):
        there(Layout("t", None, None), line, two, flat, four)


@pytest.mark.serial
def test_trees() -> None:
    with Grid({"a": 1}, backend="numpy") as grid:
        x, y = (pla.Tensor(placed(np.ones(n), grid, Layout(None))) for n in (2, 3))
        tree = {"x": x, "more": (1, [y, None, "text"], x), "flag": True}
        form, tensors = take_apart(tree)
        assert tensors == [] or [t is s for t, s in zip(tensors, (x, y, x), strict=True)] == [True] * 3
        again = put_together(form, tensors)
        assert again["more"][1][0] is y
        assert (again["x"] is x, again["flag"], again["more"][1][2], type(again["more"])) == (True, True, "text", tuple)
    with pytest.raises(ConfigError, match="not a set"):
        take_apart([{1, 2}])


# ------------------------------------------------------------------ messages
GRIDS: dict[int, list[tuple[dict[str, int], Layout, dict[str, int], Layout]]] = {
    2: [({"a": 1}, Layout(None, None, None), {"b": 1}, Layout(None, None, None))],
    3: [({"a": 1}, Layout(None, None, None), {"b": 2}, Layout(None, "b", None))],
    4: [({"a": 3}, Layout("a", None, None), {"b": 1}, Layout(None, None, None)),
        ({"a": 2}, Layout("a", None, None), {"a": 2}, Layout("a", None, None)),
        ({"a": 2}, Layout(None, None, "a"), {"b": 2}, Layout("b", None, None))],
    8: [({"a": 2, "b": 3}, Layout("b", None, "a"), {"c": 2}, Layout(None, "c", None)),
        ({"a": 2, "b": 2}, Layout("a", None, None), {"b": 4}, Layout(None, None, "b"))],
}  # fmt: skip


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_there_and_back(dtype: str, world: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one, source, other, target in GRIDS[SIZE]:
        monkeypatch.setattr("parlinalg.pipeline.edges.translated", lambda *_, target=target: target)
        place = Place.of(world, [one, other])
        grid = Grid(place.sizes[place.rank], place.group, backend)
        comm = world.sub(range(SIZE), ("pipeline",))
        edges = Edges(place, comm, grid, [{}, {}], {Edge(1): None})
        rng, edge, wants = np.random.default_rng(1), Edge(1), dtype == "float64"
        for turn in range(3):
            value, back = (rng.normal(size=SHAPE) * 100).astype(dtype), rng.normal(size=SHAPE)
            with ledger(comm) as book:
                if place.rank == 0:
                    sent = pla.Tensor(placed(value, grid, source), wants)
                    edges.send(edge, turn, 1, "like", ["tensor"], [sent])
                    (block,) = edges.take(edges.post_back(edge, turn, 1, "like"))
                    if wants:
                        alike(sent.data.like(block), back)
                else:
                    (block,) = edges.take(edges.post(edge, turn, 0, "like"))
                    leaf = edges.frame(edge, "like").leaves[0]
                    alike(pla.DistArray(block, leaf.shape, leaf.target, grid), value)
                    assert leaf.wants == wants
                    edges.send_back(edge, turn, 0, "like", [placed(back, grid, target) if wants else None])
                edges.finish()
            if turn:  # what passes is known: no rank receives more than its block, and nothing is said ahead
                mine = int(np.prod(grid.block_shape(target if place.rank else source, SHAPE)))
                assert book.words.total() == (mine if place.rank or wants else 0)
        comm.free()
        grid.close()
        place.close()


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
        y = self.two(tree["y"]) + tree["skip"][1] + tree["constant"]
        return [y, tree["skip"][0], tree["whole"], y]

    def third(self, each: Any) -> Any:
        y, skip, whole, again = each
        assert whole.dtype == np.int64
        return self.three(y + skip + again)

    def forward(self, x: Any) -> Any:
        return self.third(self.second(self.first(x)))


class Squares:
    """The loss: squares of what the model gives."""

    def context(self, batch: Batch) -> Any:
        return nullcontext(())

    def losses_of(self, output: pla.Tensor, batch: Batch) -> tuple[pla.Tensor, int, dict[str, float]]:
        return (output * output).sum(), batch.count, {}


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
    place = Place.of(world, [{"data": SIZE // stages}] * stages, ("data",))
    grid = Grid(place.sizes[place.rank], place.group, backend)
    schedule = make(name, stages, 2)
    model = split(Branching(data, grid, long), place, schedule, [1, 1, 1] if stages == 3 else [1, 2]).initialize(1)
    worker = Worker(model, schedule)
    for _ in range(2):  # the second time shapes are known
        model.zero_grad()
        batches = [branching_batch(model.whole, rows) for rows in (slice(0, 4), slice(4, 7))]
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
