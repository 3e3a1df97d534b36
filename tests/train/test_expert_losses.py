"""The terms that experts add to the loss: the same however a batch falls into microbatches, whichever targets count."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm

ROWS, LENGTH, VOCABULARY, STEPS = 5, 6, 11, 3
SETTINGS: dict[str, Any] = {"dtype": "float64", "clip_grad_norm": 0.5, "optimizer": {"name": "adamw", "lr": 1e-2}}


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and targets, of which few count; in the last two rows none."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(STEPS):
        x, y = rng.integers(0, VOCABULARY, (2, ROWS, LENGTH))
        y[rng.random(y.shape) < 0.4] = -100
        y[3:] = -100
        found.append((x, y))
    return found


def model(mesh: Any, experts: int | None = 3, coefficient: float = 0.3) -> nn.GPT:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "hidden_size": 12, "num_attention_heads": 4}
    return nn.GPT(
        **sizes, num_hidden_layers=2, num_local_experts=experts, router_aux_loss_coef=coefficient, dtype="float64",
        scheme=mesh.scheme, grid=mesh.grid,
    )  # fmt: skip


def run(
    comm: Any, backend: str, parts: int, criterion: Any = ops.cross_entropy_sum, coefficient: float = 0.3,
    **settings: Any,
) -> np.ndarray:  # fmt: skip
    """The losses and norms of a few steps, by the engine's schedule."""
    with pla.launch({**SETTINGS, **settings}, comm, backend) as mesh:
        engine, train, _, _ = pla.initialize(model(mesh, coefficient=coefficient), None, criterion, pairs())
        schedule = pla.PipelineSchedule(parts)
        engine.train()
        batches, found = iter(train), []
        for _ in range(STEPS):
            loss = schedule.forward_backward_step(engine, batches, return_output_label=False)[2]
            assert engine.step()
            found.append((loss, engine.gradient_norm))
        return np.array(found)


@cache
def whole() -> np.ndarray:
    return run(SingleComm(), "numpy", 1)


WAYS = pytest.mark.parametrize(
    ("parallel", "parts"),
    [
        pytest.param(parallel, parts, marks=pytest.mark.ranks(n))
        for n, parallel, parts in [(1, {}, 1), (1, {}, 2), (1, {}, 5), (2, {"data": 2}, 3), (2, {"pipeline": 2}, 3)]
    ],
)


@WAYS
def test_microbatches_of_an_engine_are_weighed_by_their_rows(
    parallel: dict[str, int], parts: int, world: Any, backend: str
) -> None:
    found = run(world, backend, parts, parallel=parallel)
    np.testing.assert_allclose(found, whole(), rtol=1e-12)


@WAYS
def test_a_criterion_of_ones_own_says_which_targets_count(
    parallel: dict[str, int], parts: int, world: Any, backend: str
) -> None:
    """By `count`, also within a partial; without it the layers' terms weigh as if every target did."""

    def silent(output: Any, label: Any) -> Any:
        return ops.cross_entropy_sum(output, label)

    def telling(output: Any, label: Any, scale: float = 2.0) -> Any:
        total, count = ops.cross_entropy_sum(output, label)
        return total * scale, count

    telling.count = lambda label: int((label != -100).sum())  # type: ignore[attr-defined]
    found = run(world, backend, parts, partial(telling, scale=1.0), parallel=parallel)
    np.testing.assert_allclose(found, whole(), rtol=1e-12)
    y = pairs()[0][1]
    found = run(world, backend, parts, silent, parallel=parallel)
    want = run(world, backend, parts, coefficient=0.3 * y.size / (y != -100).sum(), parallel=parallel)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-12)
    assert abs(found[0, 0] / whole()[0, 0] - 1) > 0.01, "which is not the same"


@pytest.mark.serial
def test_microbatches_by_calls_are_those_of_one_batch() -> None:
    """Where what is to come is not known: one without targets weighs nothing; the terms of even ones are exact."""

    def norm(experts: int | None, parts: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
        with pla.launch({**SETTINGS, "gradient_accumulation": len(parts)}, SingleComm()) as mesh:
            engine, *_ = pla.initialize(model(mesh, experts), None, ops.cross_entropy_sum)
            engine.train()
            for x, y in parts:
                engine.backward(engine.criterion(engine(x), y))
                changed = engine.step()
            assert changed
            return engine.gradient_norm

    x, y = pairs()[0]
    np.testing.assert_allclose(norm(None, [(x, y), (x, np.full_like(y, -100))]), norm(None, [(x, y)]), rtol=1e-12)
    np.testing.assert_allclose(norm(3, [(x[:2], x[:2]), (x[2:], x[2:])]), norm(3, [(x, x)]), rtol=1e-12)
