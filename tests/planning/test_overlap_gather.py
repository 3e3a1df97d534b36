"""Imagined ranks whose steps begin with the gathers of the last step in flight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.autograd import ops
from parlinalg.parallel import GradientReducer, ZeRO, zero
from parlinalg.planning import trace as events
from parlinalg.planning.imagine import imagine
from parlinalg.planning.part_traces import trace_part
from parlinalg.planning.parts import Inputs
from parlinalg.planning.timeline import timeline
from parlinalg.planning.trace import Gemm, Kernel, Span, Start, Wait
from parlinalg.train.config import parse

RANKS, LAYERS = 4, 6


def traces(overlap: bool, stage: int, *steps: int) -> list[Any]:
    """The traces of so many steps each, after two others."""
    with imagine(RANKS, node=1, what_if=pla.WhatIf()) as world:
        grid = pla.Grid({"data": RANKS})
        model = nn.GPT(
            vocab_size=64, max_position_embeddings=64, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
            dtype="float32", scheme=schemes.discover()["data"].SCHEME, grid=grid, seed=0,
        )  # fmt: skip
        GradientReducer(model.parameters(), [ZeRO(stage, overlap_gather=overlap)], 1 << 17, 1 << 17)
        update = optim.AdamW(model.parameters())
        ids = pla.distribute(np.zeros((8 * RANKS, 64), np.int64), grid, model.ids_layout)

        def step() -> None:
            with world.span("forward"):
                loss = ops.cross_entropy(model(ids), ids)
            with world.span("backward"):
                loss.backward()
            with world.span("update"):
                update.step()
                update.zero_grad()

        step()
        step()
        found = []
        for count in steps:
            with world.trace() as trace:
                for _ in range(count):
                    step()
            found.append(trace)
        return found


@pytest.mark.serial
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_is_traced_in_its_steady_state(stage: int) -> None:
    """One step takes what each of several does; gathers are awaited in the forward pass, and nothing else changes."""
    machine = "hosts_200mbit"
    (plain,) = traces(False, stage, 1)
    one, two, three = traces(True, stage, 1, 2, 3)
    for trace in (one, two, three):
        started = [e.call for e in trace.events if isinstance(e, Start)]
        assert len(set(started)) == len(started)
        assert {e.call for e in trace.events if isinstance(e, Wait | events.Test)} <= set(started)
        first = next(i for i, e in enumerate(trace.events) if isinstance(e, Span))
        before = [e for e in trace.events[:first] if isinstance(e, Start)]
        assert [e.op for e in before] == ["all_gather"] * zero.MOST_IN_FLIGHT
        waited = {e.call for e in trace.events if isinstance(e, Wait)}
        assert [c for c in started if c not in waited] == started[-zero.MOST_IN_FLIGHT :]
    work = [Counter(e for e in trace.events if isinstance(e, Gemm | Kernel)) for trace in (plain, one)]
    assert work[0] == work[1]
    seconds = [timeline(trace, machine, on_node=1).seconds for trace in (plain, one, two, three)]
    np.testing.assert_allclose(seconds[3] - seconds[2], seconds[1], rtol=0.02)
    assert seconds[1] < seconds[0]


@pytest.mark.serial
def test_the_ledger_counts_each_gather_once() -> None:
    words = []
    for overlap in (False, True):
        with imagine(RANKS, what_if=pla.WhatIf()) as world:
            grid = pla.Grid({"data": RANKS})
            ps = [pla.Parameter(pla.ones(100, grid, pla.Layout(None)), f"p{i}") for i in range(5)]
            GradientReducer(ps, [ZeRO(1, overlap_gather=overlap)], 1, 1)
            update = optim.SGD(ps, 1.0)
            x = pla.Tensor(pla.ones((6, 1), grid, pla.Layout("data", None)))
            for _ in range(2):
                with pla.ledger(world.comm) as book:
                    sum(((x * p).sum() for p in ps[1:]), start=(x * ps[0]).sum()).backward()
                    update.step()
                    update.zero_grad()
            words.append(dict(book.words))
    assert words[0] == words[1]


@pytest.mark.serial
@pytest.mark.parametrize("given", [{"zero": 1}, {"gradient_handler": [{"type": "ZeRO", "stage": 2}]}], ids=list)
def test_plans_count_the_gathers_to_the_step(given: dict[str, Any]) -> None:
    """The parts from which a plan is made are those without the option."""
    model = {"name": "gpt", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    base = {"model": model, "parallel": {"data": RANKS}, "batch_size": 8}
    late: dict[str, Any] = {}
    for name, value in given.items():
        late[name] = {"stage": 1, "overlap_gather": True} if name == "zero" else [{**value[0], "overlap_gather": True}]
    found = []
    for more in (given, late):
        config = parse({**base, **more})
        found.append(trace_part(config, Inputs.of(config), RANKS, 8))
    assert found[0].trace.events == found[1].trace.events
