"""Terms that modules add to the loss: collected where they are asked for, with every schedule, and once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm
from tests.cases import placed

ROWS, FEATURES, CLASSES, STEPS = 6, 4, 3, 3
SETTINGS: dict[str, Any] = {"dtype": "float64", "optimizer": {"name": "adamw", "lr": 1e-2}}


class SmallOutputs(nn.Module):
    """A module of a user: what it passes on is to be small."""

    def forward(self, x: Any) -> Any:
        nn.add_loss((x * x).mean() * 0.3)
        return x


def model(mesh: Any, recompute: bool = False) -> nn.Sequential:
    def linear(n: int, m: int, kind: Any) -> nn.Linear:
        return nn.Linear(n, m, mesh.scheme, mesh.grid, kind, dtype="float64")

    penalty = nn.recompute(SmallOutputs(), recompute)
    return nn.Sequential(
        linear(FEATURES, 8, "expand"), penalty, nn.Tanh(), linear(8, 8, "contract"), linear(8, CLASSES, "expand")
    )


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(ROWS, FEATURES)), rng.integers(0, CLASSES, ROWS)) for _ in range(STEPS)]


def run(comm: Any, backend: str, parts: int, **settings: Any) -> np.ndarray:
    """The losses and norms of a few steps, by the engine's schedule."""
    with pla.launch({**SETTINGS, **settings}, comm, backend) as mesh:
        engine, train, _, _ = pla.initialize(model(mesh), None, ops.cross_entropy_sum, batches())
        schedule, data, found = pla.PipelineSchedule(parts), iter(train), []
        engine.train()
        for _ in range(STEPS):
            loss = schedule.forward_backward_step(engine, data, return_output_label=False)[2]
            assert engine.step()
            found.append((loss, engine.gradient_norm))
        return np.array(found)


@cache
def alone() -> np.ndarray:
    return run(SingleComm(), "numpy", 1)


@pytest.mark.parametrize(
    ("parallel", "parts"),
    [
        pytest.param(parallel, parts, marks=pytest.mark.ranks(n))
        for n, parallel, parts in [
            (1, {}, 2), (2, {"data": 2}, 3), (2, {"pipeline": 2}, 3), (4, {"data": 2, "pipeline": 2}, 2),
            (4, {"pipeline": 4}, 2),  # a stage without parameters
        ]
    ],
)  # fmt: skip
def test_a_module_of_ones_own_adds_to_the_loss(
    parallel: dict[str, int], parts: int, world: Any, backend: str
) -> None:  # fmt: skip
    np.testing.assert_allclose(run(world, backend, parts, parallel=parallel), alone(), rtol=1e-12)


@pytest.mark.serial
def test_terms_count_once_and_only_where_they_are_asked_for() -> None:
    with pla.launch({}, SingleComm()) as mesh:
        found = []
        for recompute in (False, True):
            module = model(mesh, recompute).initialize(0)
            x = pla.Tensor(placed(batches()[0][0], mesh.grid, pla.Layout(None, None)))
            with nn.added_losses() as added:
                y = module(x)
            (y.sum() + added.total()).backward()
            grads = {name: p.grad.gather() for name, p in module.named_parameters()}
            hidden = x.gather() @ module[0].weight.gather() + module[0].bias.gather()
            assert len(added) == 1
            np.testing.assert_allclose(added.total().item(), 0.3 * (hidden**2).mean(), rtol=1e-13)
            found.append(grads)
            with nn.added_losses(False) as none:
                module(x)
            assert not none
        for name, grad in found[0].items():
            np.testing.assert_array_equal(grad, found[1][name])
