"""Bounds of what is planned: below the full plan, and near it where nothing is left out of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from parlinalg.pipeline.schedule import Op
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.simulate import Dependencies, Moment
from parlinalg.planning import search
from parlinalg.planning.bounds import Bounds, _activations
from parlinalg.planning.candidates import Candidate, Space
from parlinalg.planning.machine import load_machine
from parlinalg.planning.predictor import Predictor
from parlinalg.planning.traced_model import TracedModel
from parlinalg.train.config import TensorConfig, load
from tests.planning.machines import round_machine

pytestmark = pytest.mark.serial

GPT = {
    "model": {
        "name": "gpt", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "recompute": None, "tie_word_embeddings": False,
    },
    "data": {"name": "text", "sequence_length": 16}, "dtype": "float32", "batch_size": 8,
}  # fmt: skip
WIDE = {
    "model": {**GPT["model"], "hidden_size": 4096, "num_attention_heads": 32},  # type: ignore[dict-item]
    "data": {"name": "text", "sequence_length": 64}, "dtype": "float32", "batch_size": 256,
}  # fmt: skip


def predictor(config: dict[str, Any], ranks: int, machine: Any = "v100") -> Predictor:
    return Predictor(TracedModel(load(config), ranks, load_machine(machine), config["batch_size"]))


def candidate(
    data: int = 1, pipeline: int = 1, tensor: Any = None, sequence: int = 1, ulysses: int = 1, **more: Any
) -> Candidate:  # fmt: skip
    usual = {"zero": 0, "microbatches": 1, "schedule": None, "chunks": None, "recompute": None, "dtype": None}
    return Candidate(data, pipeline, sequence, ulysses, TensorConfig.parse("tensor", tensor), **(usual | more))


@pytest.mark.parametrize(
    "form",
    [
        {}, {"microbatches": 2}, {"data": 4}, {"tensor": {"size": 2, "mode": "1d"}},
        {"pipeline": 2, "schedule": "1f1b", "microbatches": 8}, {"pipeline": 2, "schedule": "gpipe", "microbatches": 8},
    ],
    ids=str,
)  # fmt: skip
def test_bounds_of_time_are_near_a_step_of_large_products(form):
    """Of wide layers the products take nearly all of a step."""
    ranks = form.get("data", 1) * form.get("pipeline", 1) * form.get("tensor", {"size": 1})["size"]
    made, c = predictor(WIDE, ranks), candidate(**form)
    bounds, full = Bounds(made.model), made.full(c)
    assert 0.65 * full.seconds < bounds.static_seconds(c) <= bounds.seconds(c) <= full.seconds
    assert 0.7 * full.seconds < bounds.seconds(c)


@pytest.mark.parametrize(
    "figures", [{"ranks_per_node": 1, "network": 1e6}, {"ranks_per_node": 2, "network": 2e3}], ids=str
)
@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 2), ("1f1b", 4), ("zb-h1", 2)])
def test_bounds_of_time_count_slow_messages(schedule, microbatches, figures):
    """Where they take nearly all of a step, be they between nodes or within one."""
    usual = round_machine(**figures)
    slow = replace(usual, **{name: replace(getattr(usual, name), latency=10.0) for name in ("node", "network")})
    made = predictor(GPT, 2, slow)  # slower than a machine's file may be
    c = candidate(pipeline=2, schedule=schedule, microbatches=microbatches)
    full = made.full(c).seconds
    assert 0.9 * full < Bounds(made.model).seconds(c) <= full


@pytest.mark.parametrize(
    ("form", "near"),
    [
        *(({"data": 4, "zero": zero}, near) for zero, near in enumerate((0.9, 0.9, 0.7, 0.45))),
        ({"tensor": {"size": 4, "mode": "1d"}}, 0.9), ({"pipeline": 4, "schedule": "1f1b", "microbatches": 4}, 0.45),
    ],
    ids=str,
)  # fmt: skip
def test_bounds_of_memory_are_near_what_rests(form, near):
    """Where a step has few rows, what rests takes nearly all of the memory."""
    bare = replace(load_machine("v100"), host=None, disk=None)  # nothing is offloaded
    made, c = predictor(WIDE | {"batch_size": 4}, 4, bare), candidate(**form)
    bounds, full = Bounds(made.model), made.full(c)
    for least in (bounds.static_memory(c), bounds.within(c, full.bytes)[1]):
        assert near * full.bytes < least <= full.bytes


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "form",
    [
        {"sequence": 4}, {"sequence": 4, "ulysses": 4}, {"data": 2, "sequence": 2},
        {"sequence": 4, "order": "contiguous"}, {"data": 2, "sequence": 2, "within": 2},
        {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}},
        {"pipeline": 2, "sequence": 2, "schedule": "1f1b", "microbatches": 2},
    ],
    ids=str,
)  # fmt: skip
def test_bounds_of_memory_where_a_sequence_is_shared(form, zero):
    """ZeRO shards over its ranks too: what rests is a share of all of them; within groups of data ranks they have
    copies."""
    bare = replace(load_machine("v100"), host=None, disk=None)
    made, c = predictor(WIDE | {"batch_size": 4}, 4, bare), candidate(zero=zero, **form)
    bounds, full = Bounds(made.model), made.full(c)
    share = (form.get("data", 1) * form.get("sequence", 1)) if "within" not in form else form["within"]
    ranks = form.get("pipeline", 1) * form.get("tensor", {"size": 1})["size"]
    rest = [n // ranks // (share if zero >= stage else 1) for n, stage in zip(made.model.alone(None), (3, 2, 1))]
    assert bounds.static_memory(c) == pytest.approx(sum(rest), abs=8)
    for least in (bounds.static_memory(c), bounds.within(c, full.bytes)[1]):
        assert 0.4 * full.bytes < least <= full.bytes
    assert bounds.seconds(c) <= full.seconds


def test_the_fullest_rank_of_a_ring_is_planned():
    """The last rank has the most work where tokens are contiguous, and the smallest parts; the first one's are held."""
    config = {**GPT, "model": {**GPT["model"], "hidden_size": 36, "vocab_size": 257, "intermediate_size": 37}}
    made = predictor(config, 5, replace(load_machine("v100"), host=None, disk=None))
    for zero in (1, 2, 3):
        each = [candidate(sequence=5, zero=zero, order=order) for order in ("zigzag", "contiguous")]
        zigzag, contiguous = (made.full(c) for c in each)
        for kind in ("weights", "gradients", "states"):
            assert contiguous.memory[kind] == zigzag.memory[kind]
        assert Bounds(made.model).static_memory(each[1]) <= contiguous.bytes


def test_stages_of_zero_are_open_where_a_sequence_alone_is_shared():
    given = {"parallel": {"data": 1, "tensor": 1}}
    space = Space(load(GPT | given), given, 2, 8, 4, [""])
    found = {(m.sequence, zero) for m in space.meshes() for zero, _ in space.zeros(m) if m.pipeline == 1}
    assert found == {(2, zero) for zero in range(4)}


@pytest.mark.parametrize(("schedule", "near"), [("1f1b", 0.85), ("zb-h1", 0.8), ("zb-v", 0.6)])
def test_bounds_of_memory_where_weights_that_were_gathered_are_kept(schedule, near):
    """2D keeps them for the backward pass; where gradients of weights come later they are gone when these are made."""
    config = {"model": {"name": "mlp", "hidden": [36, 114, 53]}, "batch_size": 12, "zero": 2, "dtype": "float32"}
    made = predictor(config, 8, "hosts_200mbit")
    for microbatches in (2, 12):
        c = candidate(
            pipeline=2, tensor={"mode": "2d", "shape": (2, 2)}, zero=2, schedule=schedule, microbatches=microbatches
        )
        full = made.full(c).bytes
        assert near * full < Bounds(made.model).within(c, full)[1] <= full


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera"])
def test_activations_are_bounded_by_the_least_that_any_program_holds(schedule):
    """A chunk may need what it needs while it computes in its forward passes or in its backward ones: of all ways the
    bound is that which takes the least."""
    numbers = random.Random(schedule)
    made = make_schedule(schedule, 2, 4, 2 if schedule == "interleaved" else None)
    for moments, chunks in zip(Dependencies.of(made).moments, made.chunks, strict=True):
        for _ in range(20):
            kept, pending, buffers = ([numbers.randrange(1, 100) for _ in chunks] for _ in range(3))
            held = [(m, 3 * m.ahead + m.nbytes(kept, pending)) for m in moments]
            every = [
                max(nbytes + buffers[m.chunk] * (m.op is needed[m.chunk]) for m, nbytes in held)
                for needed in product((Op.FORWARD, Op.BACKWARD), repeat=len(chunks))
            ]
            assert _activations(moments, 3, kept, pending, buffers) == min(every)


def test_messages_have_memory_before_they_are_due():
    """Two at the most, but none that a rank sends itself, and none where no more come."""

    def fullest(name: str, ranks: int) -> list[Moment]:
        made = Dependencies.of(make_schedule(name, ranks, 4, 2 if name == "interleaved" else None)).moments
        return [max((m for m in moments if m.op is Op.FORWARD), key=lambda m: (m.held, m.ahead)) for moments in made]

    for name in ("zb-v", "interleaved"):
        assert fullest(name, 1)[0].ahead == 0
    assert [m.ahead for m in fullest("gpipe", 2)] == [2, 0]
    assert [m.ahead for m in fullest("1f1b", 2)] == [2, 2]


def test_a_search_beats_the_slowest_of_the_best():
    """What is not among so many as are asked for is not estimated, and no fewer are enough."""
    config = GPT | {"parallel": {"tensor": 1, "sequence": 1}}
    model = predictor(config, 2).model
    space = Space(load(config), config, 2, 8, model.depth, [""])
    made = search._Search(model, space, memory=1 << 40, best=3, exhaustive=False)
    first = made.predictor.estimate(next(iter(space)))
    for number, (c, seconds) in enumerate(zip(space, (3.0, 1.0, 2.0, 5.0), strict=False)):
        made.estimated[c] = replace(first, candidate=c, seconds=seconds)
        assert made._enough() == (float("inf") if number < 2 else 3.0)
