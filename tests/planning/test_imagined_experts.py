"""Mixtures of experts on imagined ranks, with an even load or a given one, against real ranks with the same choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.autograd import ops
from parlinalg.autograd.ops import routing
from parlinalg.train import resolve
from parlinalg.train.config import load
from parlinalg.train.initialize import reducer_for
from tests.models import every_scheme
from tests.nn.test_experts import KINDS, cases, passed
from tests.planning.test_imagined import both

LOADS: dict[int, Any] = {3: (2, 1, 1), 7: (0.25, 0.2, 0.2, 0.15, 0.1, 0.1, 0)}


def load_of(kind: str) -> Any:
    """An uneven load of the experts of such a layer, if there is one: of all experts every token takes each."""
    experts = KINDS[kind].get("experts", 3)
    return LOADS[experts] if KINDS[kind]["top_k"] < experts else (1,) * experts


def choosing(load: Any) -> Any:
    """What takes the place of `routing.best` on real ranks: choices as imagined ranks assume them."""

    def best(block: Any, k: int) -> Any:
        *lead, experts = block.shape
        tokens = int(np.prod(lead))
        chosen = routing.in_turn(tokens, k, experts) if load == "even" else routing.by_load(tokens, k, experts, load)
        return chosen.reshape(*lead, k)

    return best


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("even", [True, False], ids=["even", "given"])
def test_ledgers_of_experts_are_those_of_real_ranks(world, even, monkeypatch, full):
    """Under all schemes, where blocks have unlike sizes and experts drop tokens."""
    assumed, travelled = routing.best, 0
    for kind, name, sizes, axis in cases(world.size, full):
        load = "even" if even else load_of(kind)

        def best(block: Any, k: int, load: Any = load) -> Any:
            return (choosing(load) if isinstance(block, np.ndarray) else assumed)(block, k)

        def program(grid: Any, kind: str = kind, name: str = name, axis: Any = axis) -> None:
            passed(every_scheme()[name], grid, axis=axis, **KINDS[kind])

        monkeypatch.setattr(routing, "best", best)
        book = both(world, sizes, program, what_if=pla.WhatIf(routing=load))
        travelled += sum(n for (op, _), n in book.words.items() if op == "all_to_all")
    assert travelled or world.size == 1


FINE = {"num_experts_per_tok": 3, "norm_topk_prob": False, "shared_expert_intermediate_size": 18,
        "shared_expert_gate": True}  # fmt: skip


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("options", [{}, FINE], ids=["two", "three and a shared one"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ledgers_of_groups_that_share_experts_are_those_of_real_ranks(world, zero, options, monkeypatch):
    """Dense parameters are reduced and gathered over all data parallel ranks, experts over those that hold a copy."""
    tensor = {"size": world.size // 4, "mode": "1d"}
    config = load({"parallel": {"data": 4, "experts": 2, "tensor": tensor}, "zero": zero})
    spec, assumed = resolve(config, world.size), routing.best

    def best(block: Any, k: int) -> Any:
        return (choosing("even") if isinstance(block, np.ndarray) else assumed)(block, k)

    def program(grid: Any) -> None:
        model = nn.GPT(
            vocab_size=53, max_position_embeddings=16, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_local_experts=4, **options, scheme=spec.scheme, grid=grid, seed=1,
        )  # fmt: skip
        reducer_for(config, grid, model)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        numbers = np.random.default_rng(0).integers(0, 53, (2, 8, 16))
        ids, targets = (pla.distribute(a, grid, model.ids_layout) for a in numbers)
        for _ in range(2):
            loss, count = ops.cross_entropy_sum(model(ids), targets)
            (loss * (1 / count)).backward()
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(routing, "best", best)
    book = both(world, spec.axes, program, what_if=pla.WhatIf(routing="even"))
    assert book.words["all_to_all", ("data",)]
    for op in ("reduce_scatter", "all_gather") if zero else ():
        over = {frozenset(axes) - {"t"} for (name, axes), n in book.words.items() if name == op and n}
        assert over >= {frozenset({"replica"}), frozenset({"replica", "data"})}, op


@pytest.mark.serial
@pytest.mark.parametrize("k", [1, 2, 3])
def test_choices_have_the_load(k):
    load, tokens = np.array([0.3, 0.3, 0.2, 0.15, 0.05, 0.0]), 2000
    chosen = routing.by_load(tokens, k, 6, load * 7)
    assert all(len(set(each)) == k for each in chosen.tolist())
    np.testing.assert_allclose(np.bincount(chosen.ravel(), minlength=6) / (tokens * k), load, atol=3e-3)
    assert np.ptp(np.bincount(routing.in_turn(tokens, k, 6).ravel())) <= 1


@pytest.mark.serial
@pytest.mark.parametrize(("k", "experts"), [(2, 4), (4, 8), (4, 6), (3, 7), (8, 8)])
@pytest.mark.parametrize("load", ["even", "given"])
def test_experts_are_first_choices_as_often_as_others(k, experts, load):
    """First choices stand before others in the queues, so that the ranks along a sequence exchange tokens."""
    tokens, alike = 60 * experts, (1,) * experts
    given = routing.in_turn(tokens, k, experts) if load == "even" else routing.by_load(tokens, k, experts, alike)
    assert all(len(set(each)) == k for each in given.tolist())
    counts = np.bincount((given * k + np.arange(k)).ravel(), minlength=experts * k)
    np.testing.assert_allclose(counts, tokens / experts, rtol=0.1)


@pytest.mark.ranks(2, 4)
def test_tokens_cross_a_cut_sequence_as_they_are_routed(world):
    """Words where places of queues are cut, of learned routes and of those that are assumed to be even."""

    def program(grid: Any) -> None:
        scheme = pla.schemes.discover()["sequence"].SCHEME
        layer = nn.MixtureOfExperts(32, 16, 8, scheme, grid, top_k=4, capacity_factor=4.0, axis=(), seed=0)
        layer(pla.Tensor(pla.random.normal((4, 64 * grid.size, 32), grid, scheme.residual, seed=3)))

    with pla.ledger(world) as learned:
        program(pla.Grid({"s": world.size}, world, "numpy"))
    with pla.imagine(world.size, world.rank, what_if=pla.WhatIf()) as imagined, pla.ledger(imagined.comm) as even:
        program(pla.Grid({"s": world.size}))
    words = world.share([book.words["all_to_all", ("s",)] for book in (learned, even)])
    real, assumed = (sum(each) for each in zip(*words, strict=True))
    assert assumed == pytest.approx(real, rel=0.25)


@pytest.mark.serial
def test_loads_that_cannot_be_are_refused():
    for given in ("odd", (), (1, -1), (0, 0), (1, float("nan"))):
        with pytest.raises(pla.ConfigError, match="routing="):
            pla.WhatIf(routing=given)

    def run(load: Any) -> None:
        with pla.imagine(2, what_if=pla.WhatIf(routing=load)):
            passed(every_scheme()["data"], pla.Grid({"data": 2}), **KINDS["two"])

    with pytest.raises(pla.ConfigError, match="the load of 2 experts, but the layer has 3"):
        run((1, 1))
    with pytest.raises(pla.ConfigError, match=r"an expert has 0\.6 of all choices; a token that goes to 2 experts"):
        run((3, 1, 1))
    run((2, 1, 1))
