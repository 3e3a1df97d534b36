"""The loss of a training is the same on every grid: 20 steps in float64; batch, widths and classes divide by none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import SingleComm
from parlinalg.train import launch
from tests.agreement import once
from tests.conftest import BACKEND
from tests.train.trainings import Training

STEPS = 20
CLOSE = 1e-12  # relative
BASE = {
    "dtype": "float64",
    "batch_size": 47,
    "steps": STEPS,
    "model": {"hidden": (31, 29, 23)},
    "optimizer": {"name": "adamw", "lr": 5e-3},
    "lr_schedule": {"name": "cosine", "warmup": 5},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "model": {"hidden": (193, 97)}},
    "seven classes": {},
    "dropout, microbatches, clipping, momentum": {
        "model": {"hidden": (31,), "dropout": 0.3, "activation": "gelu"},
        "criterion": {"label_smoothing": 0.1},
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9, "nesterov": True},
        "clip_grad_norm": 0.5,
    },
}
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"tensor": {"size": 1, "mode": "3d"}}),
    (2, {"data": 2}),
    (2, {"tensor": {"mode": "2d", "shape": (2, 1)}}),
    (3, {"tensor": {"size": 3, "mode": "2d", "shape": (1, 3)}}),
    (3, {"data": 3}),
    (4, {"tensor": {"size": 4, "mode": "1d"}}),
    (4, {"tensor": {"size": 4, "mode": "1d", "sequence_parallel": True}}),
    (4, {"tensor": {"size": 4, "mode": "sequence"}}),
    (4, {"data": 4}),
    (4, {"data": 2, "tensor": {"size": 2, "mode": "1d"}}),
    (4, {"tensor": {"size": 4, "mode": "2d"}}),
    (6, {"tensor": {"size": 6, "mode": "3d", "shape": (1, 2, 3)}}),
    (6, {"tensor": {"size": 6, "mode": "2.5d", "shape": (3, 1, 2), "depth_on": "k"}}),
    (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}),
    (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2, "depth_on": "k"}}),
    (8, {"tensor": {"size": 8, "mode": "3d"}}),
    (8, {"data": 2, "tensor": {"size": 4, "mode": "2d"}}),
    (12, {"data": 2, "tensor": {"size": 6, "mode": "2d", "shape": (3, 2)}}),
]


def losses(comm: Any, out: Path, config: dict[str, Any], backend: str) -> list[float]:
    with launch(config, comm, backend) as mesh:
        training = Training(mesh, out)
        found = [step.loss for step in training.steps()]
        held = training.held()
        assert 0 <= held["accuracy"] <= 1
        found.append(held["loss"])
    return found


@cache
def serial(variant: str, path: Path) -> list[float]:
    return once(lambda: losses(SingleComm(), path.parent, config(variant, path, {}), "numpy"))


def config(variant: str, path: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, "data": str(path), **VARIANTS[variant], "parallel": parallel}


LAST = dict(GRIDS)  # for each number of ranks the grid that runs all variants
CASES = [
    pytest.param(parallel, variant, marks=pytest.mark.ranks(n), id=f"{n}-{parallel}-{variant}")
    for n, parallel in GRIDS
    for variant in VARIANTS
    if variant == "seven classes" or parallel is LAST[n]
]


@pytest.mark.parametrize(("parallel", "variant"), CASES)
def test_losses_equal_the_serial_ones(
    parallel: dict[str, Any], variant: str, seven: Path, world: Any, backend: str
) -> None:
    settings = config(variant, seven, parallel)
    if "dropout" in variant:
        settings["gradient_accumulation"] = 3
    found = losses(world, seven.parent, settings, backend)
    want = serial(variant, seven)
    assert len(found) == len(want) == STEPS + 1  # the last one is of the test data
    assert want[-2] < 0.95 * want[0]
    np.testing.assert_allclose(found, want, rtol=CLOSE, err_msg=f"backend {BACKEND}")
