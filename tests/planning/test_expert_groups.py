"""Plans of groups of data parallel ranks: those that share experts, and those within which ZeRO shards."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.errors import PlanError
from parlinalg.parallel import WeightGatherer
from parlinalg.planning.bounds import Bounds
from parlinalg.planning.candidates import Candidate, MeshShape, Space
from parlinalg.planning.guesses import Guesses
from parlinalg.planning.machine import load_machine
from parlinalg.planning.predictor import Predictor
from parlinalg.planning.traced_model import TracedModel
from parlinalg.train.config import TensorConfig, load
from parlinalg.train.initialize import reducer_for
from parlinalg.train.mesh import resolve
from tests.launching import launch

pytestmark = pytest.mark.serial

MODEL = {
    "name": "gpt", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_local_experts": 4, "recompute": "attention",
}  # fmt: skip
#: Small experts, of which every token takes three, and a shared one.
FINE = {
    **MODEL, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False,
    "shared_expert_intermediate_size": 64, "shared_expert_gate": True,
}  # fmt: skip
GPT: dict[str, Any] = {
    "model": MODEL, "data": {"name": "text", "sequence_length": 16}, "dtype": "float32", "batch_size": 8,
}  # fmt: skip


def space(ranks: int, model: dict[str, Any] = MODEL, **more: Any) -> Space:
    given = {**GPT, "model": model, **more}
    return Space(load(given), given, ranks, 8, model["num_hidden_layers"] + 2, [""])


def choices(made: Space, data: int, **tensor: Any) -> list[tuple[str | None, int | None]]:
    mesh = MeshShape(data, 1, 1, 1, TensorConfig.parse("tensor", tensor or None))
    return list(made.experts(mesh))


def test_ranks_that_share_experts_evenly_are_searched():
    """Never more ranks than experts, unless no number of ranks would share them evenly."""
    assert choices(space(64), 64) == [("data", 4), ("data", 2), ("none", None)]
    assert choices(space(8), 2, size=4, mode="1d") == [("data", 2), ("t", None), ("none", None)]
    assert choices(space(3), 3) == [("data", None), ("none", None)]
    assert choices(space(8, parallel={"experts": 2}), 8) == [(None, 2)]
    assert choices(space(8, {**MODEL, "expert_axis": "data"}), 8) == [(None, None)]
    every = space(8, zero=0, gradient_accumulation=1)
    assert len(every) == len(list(every))
    held = space(8, parallel={"experts": 4})
    assert {c.data for c in held} == {4, 8}
    assert {c.expert_ranks for c in held} == {4}


SMALL = [
    (4, {"zero": 1, "parallel": {"pipeline": 1, "sequence": 1}, "gradient_accumulation": 1}),
    (4, {"parallel": {"data": 4}, "gradient_accumulation": 2}),
    (8, {"zero": 1, "parallel": {"tensor": 1, "sequence": 1, "data": 4}, "schedule": {"microbatches": 2}}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", [MODEL, FINE], ids=["two", "three and a shared one"])
@pytest.mark.parametrize(("ranks", "fixed"), SMALL, ids=str)
def test_the_answer_is_that_of_exhaustive_search(ranks: int, fixed: dict[str, Any], model: dict[str, Any]) -> None:
    options, given = {"ranks": ranks, "machine": "v100", "best": 3}, {**GPT, "model": model, **fixed}
    found, every = (pla.plan_training(given, **options, exhaustive=e) for e in (False, True))
    assert [(p.candidate, p.seconds) for p in found.best] == [(p.candidate, p.seconds) for p in every.best]
    assert found.proven
    assert found.traced <= every.traced == every.candidates
    assert any(p.candidate.expert_ranks for p in every.best)


FORMS: list[tuple[int, dict[str, Any]]] = [
    *((4, {"parallel": {"data": 4}, "zero": zero, "gradient_accumulation": 1}) for zero in range(4)),
    (8, {"parallel": {"data": 4, "tensor": {"size": 2, "mode": "1d"}}, "zero": 3, "gradient_accumulation": 2}),
    (8, {"parallel": {"data": 4, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, "zero": 1,
         "gradient_accumulation": 1}),
    (8, {"parallel": {"data": 4, "pipeline": 2}, "zero": 2, "schedule": {"name": "1f1b", "microbatches": 2}}),
    (8, {"parallel": {"data": 4, "sequence": {"size": 2}, "pipeline": 1}, "zero": 1, "gradient_accumulation": 1}),
    (6, {"parallel": {"data": 3, "tensor": {"size": 2, "mode": "1d"}}, "zero": 1, "gradient_accumulation": 1}),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "model", [MODEL, {**MODEL, "hidden_size": 512}, FINE], ids=["32", "512", "three and a shared one"]
)
@pytest.mark.parametrize(("ranks", "fixed"), FORMS, ids=str)
def test_bounds_are_below_full_traces(ranks: int, fixed: dict[str, Any], model: dict[str, Any]) -> None:
    """Ranks that share experts have larger products of fewer of them, which may be faster than those of one rank."""
    rows = 12 if ranks == 6 else 8
    parallel = {"pipeline": 1, "sequence": 1, "tensor": 1, **fixed["parallel"]}
    given = {**GPT, "model": model, **fixed, "parallel": parallel, "batch_size": rows}
    predictor = Predictor(TracedModel(load(given), ranks, load_machine("v100"), rows))
    bounds = Bounds(predictor.model)
    every = list(Space(load(given), given, ranks, rows, predictor.model.depth, [""]))
    assert len({(c.experts, c.expert_ranks) for c in every}) > 1
    for c in every:
        found = predictor.full(c)
        assert bounds.static_seconds(c) <= bounds.seconds(c) <= found.seconds, c
        assert bounds.static_memory(c) <= found.bytes, c
        assert bounds.within(c, found.bytes)[1] <= found.bytes, c


@pytest.mark.parametrize("model", [MODEL, FINE], ids=["two", "three and a shared one"])
@pytest.mark.parametrize("zero", range(4))
def test_bounds_of_memory_are_near_what_rests(zero: int, model: dict[str, Any]) -> None:
    """Of experts as of all else: on all ranks, or shared by as many as the axis has."""
    config = {**GPT, "model": {**model, "hidden_size": 1024}, "batch_size": 4}
    bare = replace(load_machine("v100"), host=None, disk=None)
    predictor = Predictor(TracedModel(load(config), 4, bare, 4))
    bounds = Bounds(predictor.model)
    for experts, group in (("data", 4), ("data", 2), ("none", None)):
        c = Candidate(
            4, 1, 1, 1, TensorConfig(), zero, 1, None, None, "attention", None, experts, expert_ranks=group
        )  # fmt: skip
        found = predictor.full(c)
        rest = sum(found.memory[name] for name in ("weights", "gradients", "states"))
        assert 0.99 * rest < bounds.static_memory(c) <= found.bytes


@pytest.mark.parametrize("form", [{}, {"data": 4, "zero": 3}, {"pipeline": 4, "schedule": "1f1b"}], ids=str)
def test_the_ends_of_a_model_are_traced_once(form: dict[str, Any]) -> None:
    """They have no experts, and are not computed again: their traces are those of other choices."""
    usual = {"data": 1, "pipeline": 1, "zero": 0, "schedule": None}
    make = {**usual, **form}
    data, pipeline = make["data"], make["pipeline"]
    tensor = TensorConfig(size=4 // data // pipeline, mode="1d")
    c = Candidate(
        data, pipeline, 1, 1, tensor, make["zero"], 4, make["schedule"], None, None, None, "none"
    )  # fmt: skip
    others = [c, replace(c, recompute="block"), replace(c, experts="data" if data > 1 else "none")]
    if data == pipeline == 1:
        others.append(replace(c, experts="t", recompute="attention"))
    whole = TracedModel(load(GPT), 4, load_machine("v100"), 8)
    for other in others:
        alone = TracedModel(load(GPT), 4, load_machine("v100"), 8)
        for made in (TracedModel.layers, TracedModel.layers_of_one_copy):
            found, want = made(whole, other), made(alone, other)
            assert [found[0], found[-1]] == [want[0], want[-1]], other


def test_a_guess_keeps_tokens_within_a_node():
    """All experts on one rank would not fit, and all-to-alls between nodes take longer than within."""
    model = {
        "name": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
    }  # fmt: skip
    given = {
        "model": model, "data": {"name": "text", "sequence_length": 4096}, "batch_size": 1024, "precision": "bfloat16",
    }  # fmt: skip
    config, machine = load(given), load_machine("h100")
    traced = TracedModel(config, 512, machine, 1024)
    made = Space(config, given, 512, 1024, traced.depth, ["bfloat16"])
    guess = Guesses(traced, made)

    def chosen(data: int, pipeline: int, tensor: int) -> tuple[str | None, int | None]:
        form = TensorConfig(size=tensor, mode="1d") if tensor > 1 else TensorConfig()
        mesh = MeshShape(data, pipeline, 1, 1, form)
        return guess(mesh, made.counts(mesh), made.recompute, machine.memory).experts

    assert chosen(64, 8, 1) == ("data", 8)
    assert chosen(32, 8, 2) == ("data", 4)


def test_a_plan_with_groups_is_written_noted_and_trained(tmp_path):
    parallel = {"data": 4, "pipeline": 1, "sequence": 1, "tensor": 1}
    fixed = {"parallel": parallel, "zero": 1, "gradient_accumulation": 1, "dtype": "float32", "steps": 2}
    made = pla.plan_training({**GPT, **fixed}, ranks=4, machine="v100", best=9)
    assert {p.candidate.expert_ranks for p in made.best} == {None, 2, 4}
    assert re.search(r"ZeRO 1, recompute attention, experts on 2 data ranks", made.explain())
    two = next(p for p in made.best if p.candidate.expert_ranks == 2)
    note = json.loads(json.dumps(two.candidate.note()))
    assert Candidate.from_note(note) == two.candidate
    del note["expert_ranks"]  # of a checkpoint of before
    assert Candidate.from_note(note) == replace(two.candidate, expert_ranks=None)
    replace(made, best=(two,)).write(tmp_path / "best.py")
    written = load(tmp_path / "best.py")
    assert written.parallel.experts == 2
    assert resolve(written, 4) == resolve(two.config, 4)
    again = pla.plan_training(written.given(), ranks=4, machine="v100")
    assert {p.candidate.expert_ranks for p in again.best} == {2}
    assert again.best[0].seconds == pytest.approx(two.seconds, rel=1e-12)
    done = launch(4, ["-m", "parlinalg", "train", "best.py"], timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "experts     cut over 2 data parallel ranks, in 2 groups that hold copies" in done.stdout
    with pytest.raises(PlanError, match="4 ranks cannot be used"):
        pla.plan_training({**GPT, **fixed, "parallel": {**parallel, "experts": 3}}, ranks=4, machine="v100")


WIDE = {
    "name": "gpt", "vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "recompute": "attention",
}  # fmt: skip
NODES = {
    "model": WIDE, "data": {"name": "text", "sequence_length": 64}, "dtype": "float32", "batch_size": 32,
    "parallel": {"pipeline": 1, "sequence": 1, "tensor": 1}, "gradient_accumulation": 1,
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("experts", [None, 8])
def test_zero_may_shard_within_nodes(experts: int | None, tmp_path: Any) -> None:
    """On two nodes of 8, where values are gathered faster; the answer is that of exhaustive search."""
    given = {**NODES, "model": {**WIDE, "num_local_experts": experts}} if experts else NODES
    options = {"ranks": 16, "machine": "v100", "best": 40}
    found, every = (pla.plan_training(given, **options, exhaustive=e) for e in (False, True))
    assert [(p.candidate, p.seconds) for p in found.best] == [(p.candidate, p.seconds) for p in every.best]
    assert found.proven
    assert {(p.candidate.zero, p.candidate.within) for p in every.best} == {
        (0, None), *((zero, within) for zero in (1, 2, 3) for within in (None, 8)),
    }  # fmt: skip
    assert all(p.candidate.expert_ranks in (None, 8) for p in every.best if p.candidate.within)
    best = {p.candidate.within: p for p in reversed(every.best) if p.candidate.zero == 3}
    assert experts or best[8].seconds < best[None].seconds
    assert best[8].across < best[None].across
    bounds = Bounds(TracedModel(load(given), 16, load_machine("v100"), 32))
    for p in every.best:
        assert bounds.static_seconds(p.candidate) <= bounds.seconds(p.candidate) <= p.seconds, p.candidate
        assert max(bounds.static_memory(p.candidate), bounds.within(p.candidate, p.bytes)[1]) <= p.bytes, p.candidate
    made = replace(every, best=(best[8],))
    assert "ZeRO 3 within groups of 8" in made.explain()
    assert made.configuration["zero"] == {"stage": 3, "within": 8}
    made.write(tmp_path / "best.py")
    assert resolve(load(tmp_path / "best.py"), 16) == resolve(best[8].config, 16)
    assert Candidate.from_note(json.loads(json.dumps(best[8].candidate.note()))) == best[8].candidate


def test_groups_within_a_node_are_those_of_neighbours():
    def groups(parallel: dict[str, int], ranks: int = 64, **more: Any) -> set[tuple[int | None, int | None]]:
        given = {**GPT, "parallel": {"sequence": 1, **parallel}, **more}
        made = Space(load(given), given, ranks, 64, 8, [""], node=8)
        assert len(made) == len(list(made))
        return {(c.expert_ranks, c.within) for c in made if c.zero}

    plain = {**MODEL, "num_local_experts": 1}
    tensor = {"size": 2, "mode": "1d"}
    assert groups({"pipeline": 1, "tensor": 1}, model=plain) == {(None, None), (None, 8)}
    assert groups({"pipeline": 1, "tensor": tensor}, model=plain) == {(None, None), (None, 4)}
    assert groups({"pipeline": 4, "tensor": 1}, model=plain) == {(None, None), (None, 2)}
    assert groups({"pipeline": 8, "tensor": 1}, model=plain) == {(None, None)}
    assert groups({"pipeline": 1, "tensor": 1}, 8, model=plain) == {(None, None)}
    assert groups({"pipeline": 1, "tensor": 1}, model=plain, zero={"stage": 2, "within": 4}) == {(None, None)}
    both = {(group, None) for group in (None, 2, 4)}
    assert groups({"pipeline": 1, "tensor": tensor}) == both | {(None, 4), (4, 4)}
    assert groups({"pipeline": 4, "tensor": tensor}) == both | {(4, 4)}, "its stages are outside of them"


def test_parameters_and_operations_of_small_experts_and_a_shared_one():
    """Every token passes its three experts, the router, the shared expert and its gate; parameters are all of them."""
    h, i, shared, experts, top, layers, vocabulary, rows, s = 32, 48, 64, 8, 3, 2, 256, 8, 16
    model = TracedModel(load({**GPT, "model": {**FINE, "name": "llama"}}), 4, load_machine("v100"), rows)
    each, dense = 3 * h * i, 4 * h * h + h * experts + 3 * h * shared + h
    per_token = layers * (dense + top * each + 2 * s * h) + vocabulary * h
    assert model.flops == 6 * rows * s * per_token
    norms, tables = (2 * layers + 1) * h, 2 * vocabulary * h
    every = layers * (dense + experts * each) + norms + tables
    assert model.alone(None).weights == 4 * every
    assert model.experts(None) == Fraction(layers * experts * each, every)


def test_weights_of_experts_at_work_stay_cut_by_their_axis():
    """ZeRO's stage 3 gathers them over the ranks that hold a copy; a block's bytes were counted as of all experts."""
    config = load({"parallel": {"data": 4, "experts": 2}, "zero": 3})
    spec = resolve(config, 4)
    with pla.imagine(4):
        model = nn.MixtureOfExperts(16, 32, 4, spec.scheme, pla.Grid(spec.axes), axis="data", bias=False, seed=0)
        reducer_for(config, model.grid, model)
        gatherer = model.expand.storage.gatherer
        assert isinstance(gatherer, WeightGatherer)
        assert model.expand.block.nbytes == 2 * 8 * 32 * 4
        assert gatherer.at_work([model.expand]) == 2 * 16 * 32 * 4
