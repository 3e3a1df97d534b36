"""Short trainings whose every bit is compared."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg import nn, optim, schemes
from parlinalg.parallel import GradientReducer
from tests.models import loss_of, make

SCHEME = schemes.discover()["1d"].SCHEME.with_data("data")


def sizes(ranks: int) -> dict[str, int]:
    """A grid of data and tensor parallelism."""
    tensor = SCHEME.axes[-1] if SCHEME.axes[-1] != "data" else SCHEME.axes[0]
    return {"data": 2 if ranks % 2 == 0 else ranks, tensor: ranks // 2 if ranks % 2 == 0 else 1}


def start(grid, kind="gpt", handlers=(), optimizer=optim.AdamW, *, reduce=True, recompute=False, p=0.0, **options):
    """A model, and its optimizer."""
    master = options.pop("master", False)
    model = make(kind, SCHEME, grid, p=p, **options)
    if recompute:
        for block in model.blocks:
            nn.recompute(block)
    if reduce:
        GradientReducer(model.parameters(), handlers, 2000, 4000)
    return model, optimizer(model.parameters(), 0.01, master=master)


def failing(patch: Any, call: str, fails: Callable[[], bool]) -> None:
    """Have the disk fail where `fails` says so, which is asked at each call of the system: of `pwritev`, `preadv` or
    `fdatasync`, by which offloaded data are written, read and flushed."""
    plain = getattr(os, call)

    def tried(*args: Any) -> Any:
        if fails():
            raise OSError(errno.EIO, "the disk is on fire")
        return plain(*args)

    patch.setattr(os, call, tried)


def go_on(model: Any, optimizer: Any, steps: range) -> list[float]:
    """The losses of steps."""
    losses = []
    for step in steps:
        with nn.training_step(step):
            loss = loss_of(model, step % 3)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """All values and states.  Collective."""
    state = optimizer.state_dict()
    found = {f"{n}.{s}": a for n, arrays in state["states"].items() for s, a in arrays.items()}
    return {**model.state_dict(), **found, "steps": np.array(state["steps"])}


def unlike(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> list[str]:
    """What differs in any bit."""
    assert found.keys() == want.keys()
    return [name for name in want if found[name].tobytes() != want[name].tobytes()]
