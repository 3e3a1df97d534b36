"""Losses and gradients on every kind of grid against a file that a PyTorch program has made: it knows no parlinalg.

The runs speak to public names alone.  Gradients are read from the parameters after one step of plain descent, so that
they are what changes parameters, wherever they were summed, cut or kept.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.datasets import Batch
from tests.conftest import BACKEND, SIZE
from tests.golden.settings import (
    ADAMW,
    CLIP,
    MODELS,
    OPTIMIZERS,
    ROWS,
    SEED,
    SMOOTHING,
    STEPS,
    arguments,
    batch,
    differs,
    load,
    start,
)

GOLDEN = load("losses")["models"]
CLOSE = 1e-12
LONG = 2.0**10  # a step so long that what rounding does to the parameters is nothing beside it
ONE_D, TWO_D = {"size": 2, "mode": "1d"}, {"size": 4, "mode": "2d"}
CUT = {**ONE_D, "sequence_parallel": True}
RING, ULYSSES = {"size": 2}, {"size": 2, "ulysses": 2}
Case = tuple[int, str, dict[str, Any]]


def shaped(mode: str, *shape: int, **options: Any) -> dict[str, Any]:
    return {"mode": mode, "shape": shape, **options}


#: Ranks, a model, and what is parallel: scheme × ZeRO × pipeline × experts × ring × dropout × microbatches.
CASES: list[Case] = [
    *((1, model, {"parts": min(parts, ROWS)}) for parts, model in enumerate(MODELS, 1)),
    (2, "mlp, dropout", {"data": 2, "zero": 1, "parts": 3}),
    (2, "gpt, dropout", {"data": 2, "zero": 2, "parts": 2}),
    (2, "experts", {"data": 2, "zero": 3, "parts": 3}),
    (2, "llama", {"data": 2, "zero": 3}),
    (2, "gpt, dropout", {"pipeline": 2, "schedule": "1f1b", "parts": 3}),
    (2, "experts, dropout", {"pipeline": 2, "schedule": "zb-h1", "parts": 4}),
    (2, "mlp", {"pipeline": 2, "schedule": "gpipe", "parts": 2}),
    (2, "gpt, dropout", {"sequence": RING, "order": "zigzag"}),
    (2, "llama", {"sequence": ULYSSES, "parts": 2}),
    (2, "experts, dropout", {"tensor": ONE_D, "parts": 2}),
    (2, "mlp, dropout", {"tensor": shaped("2d", 1, 2), "parts": 2}),
    (3, "gpt, dropout", {"data": 3, "zero": 2, "parts": 2}),
    (3, "llama", {"sequence": {"size": 3}, "order": "striped"}),
    (3, "experts, dropout", {"data": 3}),
    (3, "mlp, dropout", {"tensor": shaped("2d", 1, 3), "parts": 3}),
    (4, "gpt, dropout", {"tensor": TWO_D, "parts": 2}),
    (4, "experts", {"tensor": TWO_D}),
    (2, "fine experts", {"data": 2, "zero": 2, "parts": 2}),
    (2, "fine experts", {"tensor": ONE_D}),
    (4, "fine experts", {"tensor": TWO_D, "parts": 2}),
    (4, "fine experts", {"data": 2, "pipeline": 2, "zero": 1, "schedule": "1f1b", "parts": 2}),
    (4, "fine experts", {"data": 2, "sequence": RING, "zero": 3, "parts": 2}),
    (8, "fine experts", {"tensor": shaped("2.5d", 2, 2, 2)}),
    (8, "fine experts", {"tensor": shaped("3d", 2, 2, 2), "parts": 2}),
    (4, "llama", {"data": 2, "tensor": CUT, "zero": 3, "parts": 2}),
    (4, "gpt, dropout", {"data": 2, "pipeline": 2, "zero": 1, "schedule": "zb-v", "parts": 4}),
    (4, "experts, dropout", {"data": 2, "pipeline": 2, "zero": 2, "schedule": "1f1b", "parts": 2}),
    (4, "gpt, dropout", {"pipeline": 2, "sequence": RING, "schedule": "1f1b", "parts": 2}),
    (4, "experts, dropout", {"data": 2, "sequence": RING, "zero": 1, "parts": 2}),
    (4, "llama", {"pipeline": 2, "tensor": ONE_D, "schedule": {"name": "interleaved", "chunks": 2}, "parts": 2}),
    (4, "gpt", {"sequence": {"size": 4, "ulysses": 2}, "order": "zigzag"}),
    (4, "gpt, dropout", {"sequence": RING, "tensor": ONE_D, "parts": 3}),
    (4, "mlp, dropout", {"tensor": shaped("3d", 2, 1, 2), "parts": 2}),
    (4, "mlp, dropout", {"tensor": shaped("2.5d", 2, 1, 2, depth_on="k"), "parts": 2}),
    (8, "gpt, dropout", {"tensor": shaped("3d", 2, 2, 2), "parts": 2}),
    (8, "llama", {"tensor": shaped("2.5d", 2, 2, 2)}),
    (8, "experts", {"tensor": shaped("2.5d", 2, 2, 2, depth_on="k")}),
    (8, "gpt, dropout", {"data": 2, "pipeline": 2, "tensor": ONE_D, "zero": 1, "schedule": "1f1b", "parts": 2}),
]  # fmt: skip
MARKED = [
    pytest.param(model, case, marks=pytest.mark.ranks(n), id=f"{n}-{model}-{case}")
    for n, model, case in (CASES if BACKEND == "numpy" else CASES[::4])
]


def criterion(model: str) -> Any:
    smoothing = SMOOTHING if model.startswith("mlp") else 0.0
    return partial(ops.cross_entropy_sum, label_smoothing=smoothing)


def data(model: str, built: Any, order: np.ndarray | None) -> list[Any]:
    """The batches of the steps, their tokens in their order or in another."""
    pairs = [batch(model, step) for step in range(STEPS)]
    if order is None:
        return list(pairs)
    return [
        Batch(
            pla.distribute(x[:, order], built.grid, built.ids_layout),
            pla.distribute(y[:, order], built.grid, built.targets_layout), 0, order, None, int((y == -100).sum()),
        )
        for x, y in pairs
    ]  # fmt: skip


def run(
    world: Any, backend: str, model: str, case: dict[str, Any], optimizer: dict[str, Any], *, steps: int = STEPS,
    clip: float | None = CLIP,
) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """The losses and norms of the steps, and the parameters before and after them."""
    parallel = {axis: case[axis] for axis in ("data", "pipeline", "sequence", "tensor") if axis in case}
    more = {key: case[key] for key in ("zero", "schedule") if key in case}
    config = {"dtype": "float64", "seed": SEED, "parallel": parallel, "optimizer": optimizer, **more}
    parts = case.get("parts", 1)
    if "schedule" in more:
        named = {"name": more["schedule"]} if isinstance(more["schedule"], str) else more["schedule"]
        config["schedule"] = {**named, "microbatches": parts}
    with pla.launch({**config, "clip_grad_norm": clip}, world, backend) as mesh:
        built = getattr(nn, MODELS[model][0])(**arguments(model), scheme=mesh.scheme, grid=mesh.grid, dtype="float64")
        order = None
        if "order" in case:
            order = pla.sequence_order(batch(model, 0)[0].shape[1], case["sequence"]["size"], case["order"])
        schedule = None if "schedule" in case else pla.PipelineSchedule(parts)
        engine, train, _, _ = pla.initialize(
            built, None, criterion(model), data(model, built, order), schedule=schedule
        )  # fmt: skip
        engine.model.load_state_dict({name: start(name, v.shape) for name, v in engine.model.state_dict().items()})
        before, found, batches = engine.model.state_dict(), [], iter(train)
        for _ in range(steps):
            loss = engine.schedule.forward_backward_step(engine, batches, return_output_label=False)[2]
            assert engine.step()
            found.append((loss, engine.gradient_norm))
        return found, before, engine.model.state_dict()


@pytest.mark.parametrize(("model", "case"), MARKED)
def test_gradients_and_ten_steps(model: str, case: dict[str, Any], world: Any, backend: str) -> None:
    want, plain = GOLDEN[model], {"name": "sgd", "lr": LONG, "momentum": 0.0}
    ((loss, norm),), before, after = run(world, backend, model, case, plain, steps=1, clip=None)
    first = want["steps"]["adamw"][0]
    np.testing.assert_allclose((loss, norm), first, rtol=CLOSE)
    assert not differs({name: (value - after[name]) / LONG for name, value in before.items()}, want["gradients"])
    found, _, _ = run(world, backend, model, case, ADAMW)
    np.testing.assert_allclose(found, want["steps"]["adamw"], rtol=CLOSE)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, world: Any, backend: str) -> None:
    case = {1: {"parts": 2}, 2: {"data": 2, "zero": 2}, 4: {"data": 2, "tensor": ONE_D, "zero": 3, "parts": 2}}[SIZE]
    found, _, _ = run(world, backend, "mlp", case, OPTIMIZERS[name])
    np.testing.assert_allclose(found, GOLDEN["mlp"]["steps"][name], rtol=CLOSE)


@pytest.mark.serial
@pytest.mark.parametrize("model", MODELS)
def test_the_program_still_gives_the_files_numbers(model: str) -> None:
    pytest.importorskip("torch", reason="cannot be had here: torch; pip install 'parlinalg[peers]'")
    from tests.golden import programs

    found, want = programs.golden(model), GOLDEN[model]
    assert found["steps"].keys() == want["steps"].keys()
    for name, steps in want["steps"].items():
        np.testing.assert_allclose(found["steps"][name], steps, rtol=CLOSE, err_msg=name)
    assert found["gradients"].keys() == want["gradients"].keys()
    for name, numbers in want["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], numbers, rtol=0, atol=1e-12 * max(1.0, numbers[0]) * 20)


@pytest.mark.serial
def test_the_cases_meet() -> None:
    """Each feature of a training meets each other one in some case."""
    features = [
        {key for key in ("data", "pipeline", "sequence", "tensor", "zero") if key in case}
        | {word for word in ("dropout", "experts") if word in model}
        | ({"parts"} if case.get("parts", 1) > 1 else set())
        for _, model, case in CASES
    ]
    every = sorted(set().union(*features))
    assert not [pair for pair in combinations(every, 2) if not any(found >= {*pair} for found in features)]
    assert {case["zero"] for *_, case in CASES if "zero" in case} == {1, 2, 3}
    assert any(ROWS % case.get("parts", 1) for *_, case in CASES), "microbatches are uneven somewhere"
