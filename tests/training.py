"""A small model trained on any grid, of sizes that no grid divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.grid import factorizations
from parlinalg.parallel import GradientReducer, clip_gradient_norm
from parlinalg.schemes import Scheme

BATCH, SIZES = 13, (7, 11, 5)
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, 0.01, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1),
}


def every_scheme() -> dict[str, Scheme]:
    """All schemes that the folder lists, and all of these within data parallelism."""
    found = {name: file.SCHEME for name, file in schemes.discover().items()}
    more = {f"data × {name}": s.with_data("data") for name, s in found.items() if "data" not in s.axes}
    return found | more


def sizes_for(scheme: Scheme, ranks: int, most: int = 3) -> list[dict[str, int]]:
    """Some grids of the scheme's axes over so many ranks; over further ranks the work is repeated."""
    axes = scheme.axes or ("replica",)
    shapes = factorizations(ranks, len(axes))
    cut = [s for s in shapes if sum(n > 1 for n in s) > 1] + [s for s in shapes if sum(n > 1 for n in s) <= 1]
    return [dict(zip(axes, s, strict=True)) for s in cut[:most]]


def batch(grid: Any, scheme: Scheme, step: int = 0, rows: slice = slice(None)) -> tuple[pla.Tensor, pla.DistArray]:
    """Samples and their classes, laid out as the scheme wants them."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, SIZES[0]))[rows]
    t = np.argmax(x @ np.random.default_rng(99).normal(size=(SIZES[0], SIZES[-1])), axis=1)
    flat = scheme.for_dims(2)
    return pla.Tensor(pla.distribute(x, grid, flat.residual)), pla.distribute(t, grid, flat.tokens)


def mean_loss(model: nn.Module, x: pla.Tensor, t: pla.DistArray) -> pla.Tensor:
    y = model(x)
    return pla.autograd.ops.cross_entropy(y, t.redistribute(pla.Layout(*y.layout.dims[:-1])))


def train(
    grid: Any, scheme: Scheme, optimizer: str, steps: int = 20, *, dropout: float = 0.0, reducer: bool = True,
    clip: float = 0.0, microbatches: int = 1,
) -> tuple[list[float], dict[str, np.ndarray]]:  # fmt: skip
    """The losses of all steps, and the parameters after them."""
    model = nn.MLP(SIZES, scheme, grid, "gelu", dropout=dropout, dtype=np.float64, seed=5)
    if reducer:
        GradientReducer(model.parameters(), first_bucket=200, bucket=400)
    update = OPTIMIZERS[optimizer](model.parameters())
    scheduler = optim.Scheduler(update, optim.schedules.WarmUp(3, optim.schedules.Cosine(17, 0.1)))
    losses = []
    for step in range(steps):
        update.zero_grad()
        losses.append(_step(model, grid, scheme, step, microbatches))
        if clip:
            clip_gradient_norm(model.parameters(), clip)
        update.step()
        scheduler.step()
    return losses, model.state_dict()


def _step(model: nn.Module, grid: Any, scheme: Scheme, step: int, microbatches: int) -> float:
    total = 0.0
    for i in range(microbatches):
        rows = slice(BATCH * i // microbatches, BATCH * (i + 1) // microbatches)
        x, t = batch(grid, scheme, step, rows)
        with nn.training_step(step, rows.start):
            loss = mean_loss(model, x, t) * ((rows.stop - rows.start) / BATCH)
        if i < microbatches - 1:
            with pla.no_sync():
                loss.backward()
        else:
            loss.backward()
        total += loss.item()
    return total


def serial(world: Any, *args: Any, **options: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same training on this rank alone."""
    with pla.Grid({"one": 1}, world.sub((world.rank,), ()), "numpy") as grid:
        return train(grid, schemes.discover()["serial"].SCHEME, *args, **options)


def equal(got: tuple[list[float], dict[str, np.ndarray]], want: tuple[list[float], dict[str, np.ndarray]]) -> None:
    """Losses and parameters agree to 1e-12."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=0, atol=1e-12 * np.abs(value).max())
