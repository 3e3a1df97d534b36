"""Steps of an engine: how many there are for the learning rate, and those left out for what overflows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.errors import ConfigError
from tests.conftest import SIZE

SIZES = (7, 9, 5)


def mlp(mesh: Any) -> nn.MLP:
    return nn.MLP(SIZES, mesh.scheme, mesh.grid, "gelu", dtype=mesh.config.model_dtype)


def pairs(number: int, rows: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(rows, SIZES[0])), rng.integers(0, SIZES[-1], rows)) for _ in range(number)]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("epochs", "accumulation"), [(4, 3), (3, 1), (1, 5)])
def test_the_learning_rate_ends_with_the_training(epochs: int, accumulation: int, world: Any, backend: str) -> None:
    """Batches at an epoch's end that are too few for a step make none; a pipeline cuts each batch instead."""
    settings = {
        "parallel": {"pipeline": SIZE}, "epochs": epochs, "gradient_accumulation": accumulation,
        "lr_schedule": "cosine", "optimizer": {"name": "sgd", "lr": 1e-3},
    }  # fmt: skip
    with pla.launch(settings, world, backend) as mesh:
        engine, train, _, rate = pla.initialize(mlp(mesh), train_dataloader=pairs(5, 6))
        assert train is not None
        trainer = pla.Trainer(engine, lr_scheduler=rate)
        trainer.fit(train, epochs - 1)
        assert engine.optimizer.lr > 1e-5 or epochs == 1
        trainer.fit(train, 1)
        assert trainer.step == epochs * (5 // accumulation if SIZE == 1 else 5)
        assert engine.optimizer.lr == pytest.approx(0, abs=1e-15)


@pytest.mark.ranks(1, 2)
def test_a_forward_pass_that_overflows_is_a_step_left_out(world: Any, backend: str) -> None:
    """Not a warning, whole or in a pipeline."""
    settings = {"parallel": {"pipeline": SIZE}, "precision": "fp16", "optimizer": {"name": "sgd", "lr": 1e-3}}
    with pla.launch(settings, world, backend) as mesh:
        (x, y), rest = pairs(1)[0], np.full((4, SIZES[0]), 6e4, np.float32)
        engine, *_ = pla.initialize(mlp(mesh))
        schedule = pla.PipelineSchedule(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for inputs in (x, rest):
                schedule.forward_backward_step(engine, iter([(inputs, y)]), return_output_label=False)
                engine.step()
            assert engine.skipped == 1
            if SIZE == 1:
                engine.backward(engine.criterion(engine(rest), y))
                assert not engine.step()


PLACES = {"optimizer": "disk", "activations": "disk", "parameters": "disk"}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_offload_of_a_configuration_ends_with_the_mesh(axis: str, folder: Path, world: Any, backend: str) -> None:
    """The losses of a training in memory; values come back, and files go."""

    def losses(**settings: Any) -> list[float]:
        asked = {"dtype": "float64", "parallel": {axis: SIZE}, "optimizer": {"name": "adamw", "lr": 1e-2}, **settings}
        with pla.launch(asked, world, backend) as mesh:
            engine, train, _, _ = pla.initialize(mlp(mesh), train_dataloader=pairs(3))
            assert train is not None
            trainer = pla.Trainer(engine)
            found = [trainer.fit(train, 1)["loss"] for _ in range(2)]
            if settings:
                assert list(folder.iterdir())
        if settings:
            world.barrier()
            assert not list(folder.iterdir())
            assert not any(p.data.resident is None for p in engine.parameters())
        return found

    assert losses(offload={**PLACES, "path": str(folder)}) == losses()


@pytest.mark.serial
def test_offload_ends_where_a_training_fails(folder: Path) -> None:
    def fails() -> None:
        with pla.launch({"offload": {**PLACES, "path": str(folder)}}) as mesh:
            pla.initialize(mlp(mesh))
            assert list(folder.iterdir())
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert not list(folder.iterdir())
    with pla.Grid({"data": 1}) as grid:
        model = nn.MLP(SIZES, schemes.discover()["data"].SCHEME, grid, "gelu")
        with pytest.raises(ConfigError, match="ends with the mesh, and the model's grid was made without one"):
            pla.initialize(model, config={"offload": {"activations": "host"}})
