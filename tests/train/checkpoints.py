"""Trainings that are saved on one grid and go on on another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.train import launch
from tests.train.trainings import Training

SAVED = 2
MODEL = {
    "name": "gpt", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10,
    "vocab_size": 259, "max_position_embeddings": 5, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
BASE: dict[str, Any] = {
    "dtype": "float64",
    "batch_size": 5,
    "steps": 20,
    "gradient_accumulation": 2,
    "model": MODEL,
    "optimizer": {"name": "adamw", "lr": 5e-3},
    "lr_schedule": {"name": "cosine", "warmup": 4},
    "clip_grad_norm": 0.7,
}
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom … " * 6


def config(path: Path, parallel: Mapping[str, Any], zero: int = 0, **more: Any) -> dict[str, Any]:
    """A small language model on a text of its own."""
    data = {"name": "text", "path": str(path), "sequence_length": 5, "validation": 0.15}
    return {**BASE, "data": data, "parallel": dict(parallel), "zero": zero, **more}


def part_of(world: Any, ranks: int) -> Any:
    """The first ranks as a communicator; None on the others."""
    if ranks == world.size:
        return world
    return world.sub(tuple(range(ranks)), ()) if world.rank < ranks else None


def steps(training: Training, stop: int) -> list[tuple[float, float]]:
    """Losses and norms."""
    return [(step.loss, step.norm) for step in training.steps(stop)]


def saved(comm: Any, settings: dict[str, Any], out: Path, backend: str, more: int) -> list[tuple[float, float]]:
    """Train and save; the losses of the steps after that."""
    with launch(settings, comm, backend) as mesh:
        training = Training(mesh, out, comm)
        steps(training, SAVED)
        training.save(SAVED)
        found = steps(training, SAVED + more)  # while it is written
        training.saving.close()
    return found


def gone_on(comm: Any, settings: dict[str, Any], out: Path, backend: str, more: int) -> list[tuple[float, float]]:
    """The losses of the steps after the last checkpoint."""
    with launch(settings, comm, backend) as mesh:
        training = Training(mesh, out, comm)
        assert f"after step {SAVED}" in training.saving.resume()
        assert training.made == SAVED
        return steps(training, SAVED + more)


def close(found: Any, want: Any) -> None:
    """To 1e-12, relative."""
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=0)
