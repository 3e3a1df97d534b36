"""ZeRO over the ranks that share a sequence too: what rests on a rank, what a step moves, and other grids after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.comm import SingleComm
from parlinalg.train import resolve
from parlinalg.train.initialize import memory_lines
from tests.train import checkpoints as cp

RING, ULYSSES, BOTH = {"size": 2}, {"size": 2, "ulysses": 2}, {"size": 4, "ulysses": 2}
FORMS: list[tuple[int, dict[str, Any]]] = [
    (2, {"sequence": RING}), (2, {"sequence": ULYSSES}), (2, {"tensor": {"size": 2, "mode": "sequence"}}),
    (4, {"data": 2, "sequence": RING}), (4, {"data": 2, "sequence": ULYSSES}), (4, {"sequence": BOTH}),
    (6, {"data": 3, "sequence": RING}), (8, {"data": 2, "sequence": BOTH}),
]  # fmt: skip
EACH = [pytest.param(parallel, marks=pytest.mark.ranks(n), id=f"{n}-{parallel}") for n, parallel in FORMS]


def trained(mesh: Any) -> tuple[Any, Any, Any]:
    """A GPT after one step, its engine, and its data."""
    model = nn.GPT(
        vocab_size=37, max_position_embeddings=16, hidden_size=20, num_hidden_layers=2, num_attention_heads=4,
        scheme=mesh.scheme, grid=mesh.grid, seed=0, dtype=np.float64,
    )  # fmt: skip
    engine, train, _, _ = pla.initialize(model, pla.optim.AdamW, train_dataloader=[samples()])
    step(engine, train)
    return model, engine, train


def samples() -> tuple[Any, Any]:
    numbers = np.random.default_rng(0).integers(0, 37, (2, 6, 16))
    return numbers[0], numbers[1]


def step(engine: Any, train: Any) -> None:
    for ids, targets in train:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(ids), targets))
        engine.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("parallel", EACH)
def test_all_ranks_share_what_rests(parallel: dict[str, Any], stage: int, world: Any, backend: str) -> None:
    """Over all ranks each element has its states once, from stage 2 on its gradient, with stage 3 its cut values."""
    with pla.launch({"parallel": parallel, "zero": stage, "dtype": "float64"}, world, backend) as mesh:
        model, engine, _ = trained(mesh)
        parameters = list(model.parameters())
        whole = sum(math.prod(p.shape) for p in parameters)
        cut = sum(math.prod(p.shape) for p in parameters if p.layout.cut_axes)
        held = [p.storage.nbytes(p.data) for p in parameters]
        states = sum(p.updated[0].size for p in parameters)
        mine = states, sum(h.gradient for h in held) // 8, sum(p.block.size for p in parameters)
        found = [sum(column) for column in zip(*world.share(mine), strict=True)]
        copies = whole * world.size
        assert cut > 0.9 * whole if stage == 3 else cut == 0
        assert found == [whole, whole if stage > 1 else copies, copies - cut * (world.size - 1)]
        text = memory_lines(mesh, engine)["zero"]
        assert text.endswith(f" shared by {world.size} ranks")


@pytest.mark.parametrize("parallel", EACH)
def test_the_words_of_a_step(parallel: dict[str, Any], world: Any, backend: str) -> None:
    """Stages 1 and 2 move what an all-reduce over all ranks does, and stage 3 half as much more: a gather for each pass
    and a reduce-scatter of what is cut, one of each for the rest.  A tied table is gathered for the look-up too, and
    its two uses' gradients are reduced apart."""
    for stage in (1, 2, 3):
        with pla.launch({"parallel": parallel, "zero": stage, "dtype": "float64"}, world, backend) as mesh:
            model, engine, train = trained(mesh)
            with pla.ledger(mesh.grid) as book:
                step(engine, train)
            ops = "all_gather", "reduce_scatter"
            mine = [sum(n for (op, _), n in book.words.items() if op == name) for name in ops]
            received = [sum(column) for column in zip(*world.share(mine), strict=True)]
            table = math.prod(model.embedding.weight.shape)
            whole = sum(math.prod(p.shape) for p in model.parameters())
            cut = sum(math.prod(p.shape) for p in model.parameters() if p.layout.cut_axes) - table
            rest, others = whole - cut - table, world.size - 1
            want = [others * whole, others * whole]
            if stage == 3:
                want = [others * (2 * cut + 3 * table + rest), others * (cut + 2 * table + rest)]
            assert received == want


@pytest.mark.ranks(4)
def test_groups_of_data_ranks_leave_sequence_ranks_copies(world: Any, backend: str) -> None:
    config = {"parallel": {"data": 2, "sequence": RING}, "dtype": "float64"}
    for stage in (1, 3):
        with pla.launch({**config, "zero": {"stage": stage, "within": 2}}, world, backend) as mesh:
            model, engine, _ = trained(mesh)
            whole = sum(math.prod(p.shape) for p in model.parameters())
            assert sum(world.share(sum(p.updated[0].size for p in model.parameters()))) == 2 * whole
            assert memory_lines(mesh, engine)["zero"].endswith(" shared by 2 ranks, in 2 groups that hold copies")


def test_axes_of_weights() -> None:
    def cut(ranks: int, zero: Any, **parallel: Any) -> set[str]:
        return set(resolve({"parallel": parallel, "zero": zero}, ranks).scheme.expand.w.cut_axes)

    assert cut(2, 3, sequence=RING) == {"s"}
    assert cut(8, 3, data=2, sequence=BOTH) == {"data", "s", "u"}
    assert cut(8, {"stage": 3, "within": 2}, data=4, sequence=RING) == {"data"}
    assert cut(8, {"stage": 3, "within": 4}, data=4, sequence=RING) == {"data"}
    assert cut(2, {"stage": 3, "within": 2}, sequence=RING) == set()
    assert cut(8, 3, data=4, experts=2, sequence=RING) == {"replica", "data", "s"}


@pytest.fixture
def tale(folder: Path, world: Any) -> Path:
    path = folder / "tale.txt"
    if world.rank == 0:
        path.write_text(cp.TEXT)
    world.barrier()
    return path


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_training_goes_on_on_other_grids(zero: int, tale: Path, folder: Path, world: Any, backend: str) -> None:
    ring = {"data": world.size // 2, "sequence": RING}
    one_d = {"data": world.size // 2, "tensor": {"size": 2, "mode": "1d"}}
    settings, out = cp.config(tale, ring, zero), folder / "out"
    want = cp.saved(world, settings, out, backend, 3)
    assert cp.gone_on(world, settings, out, backend, 3) == want, "the same grid goes on bit for bit"
    for parallel, stage in (({"data": world.size}, 3), (one_d, 1), ({"pipeline": 2, "data": world.size // 2}, 0)):
        cp.close(cp.gone_on(world, cp.config(tale, parallel, stage), out, backend, 3), want)
    if world.rank == 0:
        cp.close(cp.gone_on(SingleComm(), cp.config(tale, {}), out, backend, 3), want)
    world.barrier()
