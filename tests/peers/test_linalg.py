"""Gradients of linear algebra are those of `torch.linalg`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, linalg
from tests.autograd.cases import close, numbers, value_and_gradients
from tests.autograd.decompositions import EXAMPLES, Example
from tests.autograd.test_functions import LAYOUTS

pytestmark = [pytest.mark.ranks(1, 4, full=(3, 8)), pytest.mark.timeout(180)]

SHAPES = {1: [(1, 1, 1)], 3: [(3, 1, 1)], 4: [(2, 2, 1), (4, 1, 1)], 8: [(2, 2, 2)]}
PAIRS = [(name, i) for name, every in EXAMPLES.items() for i, each in enumerate(every) if each.torch]


def peer(torch: Any, path: Path) -> None:
    """Write values and gradients of all examples."""
    found = {}
    for name, i in PAIRS:
        example = EXAMPLES[name][i]
        inputs = [torch.tensor(a, requires_grad=True) for a in example.arrays]
        y = example.function(torch.linalg, *inputs)
        y.backward(torch.tensor(numbers(*y.shape, seed=99)).to(y.dtype))
        for k, value in enumerate([y.detach(), *(x.grad for x in inputs)]):
            found[f"{name} {i} {k}"] = value.numpy()
    np.savez(path, **found)


def equal(example: Example, turn: int, known: list[np.ndarray], grid: Grid) -> None:
    layouts = [LAYOUTS[a.ndim][turn % len(LAYOUTS[a.ndim])] for a in example.arrays]
    found = value_and_gradients(lambda *x: example.function(linalg, *x), example.arrays, layouts, grid)
    for mine, right in zip(found, known, strict=True):
        close(mine, right, 1e-10)


def test_gradients(
    torch: Any,
    on_root: Callable[..., None],
    peer_folder: Path,
    world: Any,
    backend: str,
    request: pytest.FixtureRequest,
) -> None:
    """On one rank all examples, on several some of them, without `--full`."""
    some = 1 if world.size == 1 or request.config.getoption("--full") else 3
    path = peer_folder / "linalg.npz"
    on_root(lambda: peer(torch, path))
    grids = [Grid(dict(zip("abc", shape, strict=True)), world, backend) for shape in SHAPES[world.size]]
    with np.load(path) as known:
        for turn, (name, i) in enumerate(PAIRS):
            if (turn + request.config.getoption("--seed")) % some:
                continue
            example = EXAMPLES[name][i]
            right = [known[f"{name} {i} {k}"] for k in range(1 + len(example.arrays))]
            equal(example, turn, right, grids[turn % len(grids)])


def test_equal_values(torch: Any, on_root: Callable[..., None]) -> None:
    """Where PyTorch divides by 0, gradients are finite here."""

    def nothing() -> None:
        x = torch.eye(3, dtype=torch.float64, requires_grad=True)
        torch.linalg.eigh(x)[1].sum().backward()
        assert not torch.isfinite(x.grad).all()

    on_root(nothing)
    x = pla.Tensor(pla.eye(3), requires_grad=True)
    linalg.eigh(x).eigenvectors.sum().backward()
    assert x.grad is not None
    assert not x.grad.gather().any()
