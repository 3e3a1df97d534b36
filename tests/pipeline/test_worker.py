"""What a pipeline's worker does beside plain training: ZeRO, unlike grids, fewer microbatches, use, overflow."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import Book, Handle, ledger
from parlinalg.errors import CommError, ConfigError
from parlinalg.layout import piece
from parlinalg.parallel import GradientReducer, ZeRO, overflowing
from parlinalg.pipeline import Op, make_schedule
from parlinalg.pipeline.p2p import P2P
from parlinalg.pipeline.simulate import simulate
from tests.conftest import SIZE
from tests.pipeline.running import SYNCHRONOUS, Pipeline, differs, pipeline, serial

LAYERS = 3


def same(
    world: Any, backend: str, name: str, parallel: Mapping[str, Any], microbatches: int, steps: int = 2,
    layers: int = LAYERS, model: Mapping[str, Any] | None = None, added: bool = False, **options: Any,
) -> None:  # fmt: skip
    """A pipeline's losses and norms are those of one rank."""
    given = dict(model or {})
    losses, norms = serial(world, layers, 3, 0.5, added, **given)
    with pipeline(world, backend, name, parallel, microbatches, layers, added=added, **options, **given) as p:
        found = [p.step(step, clip=0.5) for step in range(steps)]
    wrong = differs([loss for loss, _ in found], losses[:steps]) + differs([norm for _, norm in found], norms[:steps])
    assert not wrong, wrong


# ------------------------------------------------------------------ ZeRO
@pytest.mark.ranks(4)
@pytest.mark.parametrize("accumulate", ["reduce-scatter", "whole"])
@pytest.mark.parametrize("name", ["1f1b", "chimera", "zb-v"])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(stage: int, name: str, accumulate: str, world: Any, backend: str, full: bool) -> None:
    if full or (name == "1f1b") == (accumulate == "reduce-scatter"):
        same(world, backend, name, {"pipeline": 2, "data": 2}, 4, zero=stage, accumulate=accumulate)


# ------------------------------------------------------------------ grids that differ
UNLIKE: dict[int, list[tuple[int, list[dict[str, Any]]]]] = {
    3: [(1, [{"size": 1}, {"size": 2, "mode": "1d"}]), (1, [{"size": 2, "mode": "2d", "shape": (2, 1)}, {"size": 1}])],
    4: [(1, [{"size": 3, "mode": "1d"}, {"size": 1}])],
    8: [(1, [{"size": 2, "mode": "1d"}, {"size": 6, "mode": "2d", "shape": (2, 3)}]),
        (2, [{"size": 1}, {"size": 3, "mode": "1d", "sequence_parallel": True}])],
}  # fmt: skip


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("zero", [0, 1])
def test_stages_on_unlike_grids(zero: int, world: Any, backend: str, full: bool) -> None:
    for data, tensors in UNLIKE[SIZE]:
        for name in ("1f1b", "chimera") if full else ("zb-v",) if zero else ("interleaved",):
            parallel = {"data": data, "pipeline": {"size": 2, "tensor": tensors}}
            same(world, backend, name, parallel, 2, zero=zero if data > 1 else 0)


# ------------------------------------------------------------------ models
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_a_head_of_its_own(name: str, world: Any, backend: str) -> None:
    parallel = {"pipeline": 2, "data": SIZE // 2}
    same(world, backend, name, parallel, 2, model={"tie_word_embeddings": False})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recomputed(recompute: str, world: Any, backend: str) -> None:
    name = "zb-h1" if recompute == "block" else "1f1b"
    same(world, backend, name, {"pipeline": 2, "data": 1}, 3, model={"recompute": recompute})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("partition", [[1, 4], [3, 2]])
def test_layers_shared_out_unevenly(partition: list[int], world: Any, backend: str) -> None:
    same(world, backend, "1f1b", {"pipeline": 2, "data": SIZE // 2}, 3, partition=partition)


@pytest.mark.ranks(2, 4)
def test_experts_add_to_the_loss_in_every_stage(world: Any, backend: str, full: bool) -> None:
    recompute = "block" if SIZE == 2 else None
    model = {"num_local_experts": 3, "capacity_factor": None, "recompute": recompute, "router_aux_loss_coef": 0.3}
    for name in ("1f1b", "zb-v") if full else ("zb-v",):
        same(world, backend, name, {"pipeline": 2, "data": SIZE // 2}, 2, model=model, added=True)


# ------------------------------------------------------------------ numbers of microbatches
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb-v"])
def test_fewer_microbatches_at_the_end_of_an_epoch(name: str, world: Any, backend: str) -> None:
    losses, _ = serial(world, LAYERS, 3, clip=0.5)
    with pipeline(world, backend, name, {"pipeline": 2, "data": 1}, 4, LAYERS) as p:
        for step, parts in enumerate((4, 3, 1)):
            batches = p.batches(step, parts)
            count = sum(b.count for b in batches)
            found = p.worker.step(batches, p.work, step, 1 / count)["loss"] / count
            assert abs(found - losses[step]) <= 1e-12 * losses[step], (step, found, losses[step])
            norm = p.worker.examine(p.optimizer.parameters).norm
            p.optimizer.step(min(1.0, 0.5 / (norm + 1e-6)))
            p.optimizer.zero_grad()
        with pytest.raises(ConfigError, match="is of 4 microbatches, and a step is given 5"):
            p.worker.step(p.batches(0, 5), p.work, 0, 1.0)


# ------------------------------------------------------------------ use
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["1f1b", "interleaved"] if SIZE == 4 else ["chimera", "zb-v"])
def test_forward_passes_alone(name: str, world: Any, backend: str) -> None:
    with pipeline(world, backend, name, {"pipeline": SIZE, "data": 1}, 4, 7, embd_pdrop=0.0) as p:
        p.model.eval()
        found = [p.worker.forward(p.batches(0, parts), p.work) for parts in (1, 5, 9)]
        p.worker.outputs = {}
        p.worker.forward(p.batches(0, 3), p.work)
        mine = {j: out.shape for j, out in p.worker.outputs.items()}
        assert p.worker.forward([], p.work) == {"loss": 0.0}
        assert all(q.grad is None for q in p.model.parameters())
    assert not differs([each["loss"] for each in found], [found[0]["loss"]] * 3)
    assert {each["targets"] for each in found} == {found[0]["targets"]}
    assert len({tuple(each) for each in world.share([each["loss"] for each in found])}) == 1
    everywhere = {int(j): tuple(shape) for told in world.share(mine) for j, shape in told.items()}
    assert everywhere == dict.fromkeys(range(3), (3, 6, 11))


# ------------------------------------------------------------------ what goes wrong
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("where", range(2))
def test_an_overflow_in_any_stage_is_known_everywhere(where: int, world: Any, backend: str) -> None:
    with pipeline(world, backend, "1f1b", {"pipeline": 2, "data": SIZE // 2}, 2, LAYERS) as p:
        p.step(0)
        batches = p.batches(1)
        p.worker.step(batches, p.work, 1, 1.0)
        parameters = list(p.model.parameters())
        if p.mesh.topology.rank == where and p.worker.position == 0:
            parameters[-1].grad.block[...] = np.inf
        with overflowing():
            found = p.worker.examine(parameters)
        assert not found.finite
        assert all(not there for there in world.share(found.finite))


@pytest.mark.ranks(2)
def test_an_error_names_the_microbatch_and_the_worker_is_over(world: Any, backend: str) -> None:
    made = pipeline(world, backend, "1f1b", {"pipeline": 2, "data": 1}, 2, LAYERS)
    p: Pipeline = made.__enter__()  # left open: nobody may wait for messages that never come
    stage = p.model.chunks[0]
    layer = stage.layers[-1]
    if stage.first:

        def fails(x: Any) -> Any:
            raise ValueError("a wrong number")

        stage.layers = (*stage.layers[:-1], layer._replace(forward=fails))
        with pytest.raises(ValueError, match="a wrong number") as error:
            p.step(0)
        assert error.value.__notes__ == ["in the pipeline: stage 0, microbatch 0, forward, rank 0"]
        with pytest.raises(CommError, match="broken off"):
            p.step(0)


# ------------------------------------------------------------------ what it tells
@pytest.mark.ranks(2)
def test_spans(world: Any, backend: str) -> None:
    with pipeline(world, backend, "zb-h1", {"pipeline": SIZE, "data": 1}, 4, 3) as p:
        p.worker.spans = []
        p.step(0)
        p.step(1)
        order = [i for i in p.schedule.orders[p.mesh.topology.rank] if i.op.value in ("F", "B", "I", "W")]
        spans = [s for s in p.worker.spans if s.op is not Op.REDUCE_GRADIENTS]
        assert [(s.op, s.chunk, s.microbatch) for s in spans] == [(i.op, i.chunk, i.microbatch) for i in order]
        assert all(s.rank == p.mesh.topology.rank and 0 <= s.start <= s.stop for s in spans)
        assert all(a.stop <= b.start for a, b in pairwise(spans))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_as_many_microbatches_are_held_as_simulated(name: str, world: Any, backend: str) -> None:
    layers = make_schedule(name, SIZE, 4).stages
    with pipeline(world, backend, name, {"pipeline": SIZE, "data": 1}, 4, layers) as p:
        p.step(0)
        assert p.worker.peak_in_flight == simulate(p.schedule).held[p.mesh.topology.rank]


class Awaited(Handle):
    """A receive that tells when it is first waited for."""

    def __init__(self, handle: Handle, told: Callable[[], object]) -> None:
        self.handle, self.told = handle, told

    def test(self) -> bool:
        return self.handle.test()

    def wait(self) -> None:
        self.told()
        self.told = int
        self.handle.wait()


@pytest.mark.ranks(2, 4)
def test_receives_are_posted_before_they_are_due(world: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, when all is known: while one is waited for the next one is posted, and no more."""
    posted: list[int] = []
    under_way: list[int] = []

    def waited() -> None:
        under_way.append(len(posted) - len(under_way))

    with pipeline(world, backend, "1f1b", {"pipeline": SIZE, "data": 1}, 4, 3) as p:
        p.step(0)
        kind = type(p.worker.comm)
        receive = kind.receive

        def receives(self: Any, buffer: Any, source: int, **options: Any) -> Handle:
            posted.append(source)
            return Awaited(receive(self, buffer, source, **options), waited)

        monkeypatch.setattr(kind, "receive", receives)
        p.step(1)
        monkeypatch.undo()
        stages = (p.mesh.topology.rank > 0) + (p.mesh.topology.rank < SIZE - 1)
    assert len(under_way) == 4 * stages
    assert set(under_way[:-1]) == {2}
    assert under_way[-1] == 1


class Noting(list[Any]):
    """The spans of a step; beside each, how many words of gradients it has begun to sum."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book, self.began, self.before = book, list[tuple[Op, int]](), 0

    def append(self, span: Any) -> None:
        sums = (n for (op, axes), n in self.book.words.items() if axes == ("data",) and "reduce" in op)
        self.before, before = sum(sums), self.before
        self.began.append((span.op, self.before - before))
        super().append(span)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "zero"), [("1f1b", 0), ("1f1b", 2), ("zb-h1", 0), ("zb-v", 1)])
def test_sums_start_in_the_last_backward_pass(name: str, zero: int, world: Any, backend: str) -> None:
    """Some buckets are under way when REDUCE_GRADIENTS settles them; none starts before the last pass, but those that
    ZeRO-2 sums in every pass."""
    with pipeline(world, backend, name, {"pipeline": 2, "data": 2}, 4, LAYERS, zero=zero) as p:
        p.step(0)  # on which the buckets are made
        with ledger(p.mesh.grid) as book:
            p.worker.spans = noted = Noting(book)
            p.worker.step(p.batches(1), p.work, 1, 1.0)
        assert len(p.reducer.buckets) > 1
    ends = (Op.BACKWARD_WEIGHT,) if name.startswith("zb") else (Op.BACKWARD,)
    *passes, last = [words for op, words in noted.began if op in ends]
    few = 9  # of the loss
    assert noted.began[-1][0] is Op.REDUCE_GRADIENTS
    assert last > 100
    assert all(words > 100 if zero == 2 else words < few for words in passes), passes
    assert all(words < few for op, words in noted.began[:-1] if op not in ends)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("limit", [1, 1 << 20])
@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_what_is_reduce_scattered_is_not_once_more(name: str, limit: int, world: Any, backend: str) -> None:
    """With ZeRO-2 each microbatch's gradients are, once: no pass sends zeros for a rank's other chunks."""
    model = {"tie_word_embeddings": False}
    with pipeline(world, backend, name, {"pipeline": 2, "data": 2}, 4, LAYERS, zero=2, **model) as p:
        p.reducer.detach()
        chunks = [chunk.parameters() for chunk in p.model.chunks]
        p.worker.reducer = reducer = GradientReducer(p.model.parameters(), [ZeRO(2)], limit, limit, chunks=chunks)
        p.step(0)
        with ledger(p.mesh.grid) as book:
            p.worker.step(p.batches(1), p.work, 1, 1.0)
        assert len(reducer.buckets) == (len(chunks) if limit > 1 else len(reducer.parameters))
        key, mine = ("reduce_scatter", ("data",)), p.mesh.grid.coords["data"]
        assert book.calls[key] == 4 * len(reducer.buckets)
        assert book.words[key] == 4 * sum(b.size - len(piece(b.size, 2, mine)) for b in reducer.buckets)


@pytest.mark.ranks(2)
def test_a_step_leaves_no_messages_behind(world: Any, backend: str, monkeypatch: Any) -> None:
    """What messages arrive in is free after the step, and no array is used twice while somebody has it."""
    with pipeline(world, backend, "1f1b", {"pipeline": 2, "data": 1}, 4, 3) as p:
        arrived: list[weakref.ref[Any]] = []
        take = P2P.take

        def taken(self: P2P, incoming: Any) -> list[Any]:
            blocks = take(self, incoming)
            held = [block for ref in arrived if (block := ref()) is not None]
            assert not any(np.shares_memory(b, h) for b in blocks for h in held if b is not None and backend == "numpy")
            arrived.extend(weakref.ref(block) for block in blocks if block is not None)
            return blocks

        monkeypatch.setattr(P2P, "take", taken)
        for step in range(3):
            p.step(step)
            gc.collect()
            assert arrived
            assert not any(ref() is not None for ref in arrived)
            arrived.clear()
