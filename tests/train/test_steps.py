"""Steps that are left out, trainings that go on from any step, batches that do not divide by anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import SingleComm
from parlinalg.datasets import Loader, Windows
from parlinalg.errors import EngineError
from parlinalg.layout import Layout
from parlinalg.train import launch
from tests.cases import held
from tests.train.trainings import Training, batches, main

SERIAL = SingleComm()
PARTS = 3
BASE: dict[str, Any] = {
    "dtype": "float64",
    "batch_size": 53,  # of 160 samples: the last batch of an epoch has one, fewer than microbatches or ranks
    "steps": 9,
    "model": {"hidden": (31, 13), "dropout": 0.2, "activation": "gelu"},
    "optimizer": {"name": "adamw", "lr": 5e-3},
    "lr_schedule": {"name": "cosine", "warmup": 3},
    "gradient_accumulation": PARTS,
    "skip_nonfinite": True,
}


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.ranks(2, 3, 4))])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_uneven_batches_and_steps_left_out(zero: int, seven: Path, world: Any, backend: str) -> None:
    """The losses of one rank; after a step that is left out the next one starts from what was."""
    found = []
    for comm, extra in ((world, {"zero": zero}), (SERIAL, {})):
        with launch({**BASE, **extra, "data": str(seven)}, comm, backend if comm is world else "numpy") as mesh:
            training = Training(mesh, seven.parent)

            def worse(loss: Any, count: int, measures: Any, training: Training = training) -> Any:
                return (loss * np.inf if training.made in {2, 5} else loss), count, measures

            training.spoil(worse)
            steps = training.steps()
            assert [s.skipped for s in steps] == [i in (2, 5) for i in range(9)]
            assert [s.samples for s in steps] == [53, 53, 53, 1] * 2 + [53]
            assert (training.skipped, training.scheduler.steps, training.made) == (2, 7, 9)
            assert steps[3].lr == steps[2].lr
            assert steps[4].norm > 0
            found.append([(s.loss, s.norm) for s in steps if not s.skipped])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.ranks(2, 4))])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
def test_a_loss_that_is_not_finite_ends_the_training(
    pipeline: int, seven: Path, folder: Path, world: Any, backend: str
) -> None:  # fmt: skip
    """On all ranks in the same step, unless such steps are left out, which is counted and told."""
    config = {**BASE, "data": str(seven), "optimizer": {"name": "adamw", "lr": 1e300}, "steps": 4}
    config["lr_schedule"] = {"name": "constant"}
    config |= {"parallel": {"pipeline": pipeline}, "backend": backend}
    with pytest.raises(EngineError, match=r"step 2: the loss is nan.*now 1e\+300.*skip_nonfinite=True") as error:
        main({**config, "skip_nonfinite": False}, folder, comm=world)
    assert len(set(world.share(str(error.value)))) == 1
    lines = world.share((folder / "metrics.jsonl").read_text().splitlines())[0]
    assert [json.loads(line)["step"] for line in lines] == [1]
    world.barrier()
    assert main(config, folder, comm=world) == 0
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["skipped_steps"] == 3


@pytest.mark.ranks(1, 2)
def test_elements_are_clipped_at_the_limit_whatever_the_scale_of_the_loss(
    seven: Path, world: Any, backend: str
) -> None:  # fmt: skip
    """The limit is of the gradient, not of what the scale makes of it: powers of two change no bit."""
    plain = {**BASE, "data": str(seven), "optimizer": {"name": "sgd", "lr": 0.5}, "steps": 6}

    def losses(clip: float | None, scale: float | None) -> list[float]:
        config = {**plain, "clip_grad_value": clip, "precision": {"loss_scale": scale}}
        with launch(config, world, backend) as mesh:
            return [step.loss for step in Training(mesh, seven.parent).steps()]

    want = losses(2.0**-8, None)
    assert losses(2.0**-8, 2.0**10) == want
    assert losses(2.0**-8, 2.0**-3) == want
    assert losses(2.0**-7, None) != want, "the limit matters"
    assert losses(2.0**120, 2.0**20) == losses(None, None), "a limit that nothing reaches"


@pytest.mark.parametrize("precision", ["fp16", None])
def test_a_training_goes_on_where_it_was(precision: str | None, seven: Path, world: Any, backend: str) -> None:
    """Bit for bit on the same grid, with loss scale and masters; batches before the step are not read."""
    scale = {"dtype": precision, "loss_scale": {"start": 2.0**17, "growth_every": 3}} if precision else None
    config = {**BASE, "data": str(seven), "dtype": "float32", "precision": scale, "clip_grad_value": 0.01, "zero": 1}
    with launch(config, world, backend) as mesh:
        training = Training(mesh, seven.parent)
        training.steps(4)
        state, weights = training.state_dict(), training.model.state_dict()
        want = training.steps()
    with launch(config, world, backend) as mesh:
        training = Training(mesh, seven.parent)
        training.model.load_state_dict(weights)
        training.load_state_dict(state)
        assert training.made == 4
        assert repr(training.steps()) == repr(want)  # a norm may be nan
    if precision:
        assert {s.scale for s in want} > {2.0**17}, "the scale moved on"


@pytest.mark.serial
def test_batches_go_on_from_any_step_without_reading_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    with launch({}, SERIAL, "numpy") as mesh:
        flat, two = Layout(None), Layout(None, None)
        rows = Loader(random.normal(size=(19, 3)), np.arange(19), 6, mesh.grid, two, flat, seed=3)
        text = Windows(np.arange(300), 7, 6, mesh.grid, two, two, seed=3)
        for loader in (rows, text):
            every = [[(held(b.x), held(b.y), b.offset) for b in parts] for parts in batches(loader, 17, 2)]
            made: list[int] = []
            plain = type(loader).batch

            def batch(self: Any, starts: Any, offset: int = 0, plain: Any = plain, made: Any = made) -> Any:
                made.append(offset)
                return plain(self, starts, offset)

            monkeypatch.setattr(type(loader), "batch", batch)
            for start in (0, 1, 4, 16, 17, 20):
                made.clear()
                found = [[(held(b.x), held(b.y), b.offset) for b in parts] for parts in batches(loader, 17, 2, start)]
                np.testing.assert_equal(found, every[start:])
                assert len(made) <= 2 * len(found) + 2  # one more batch shows that the epoch goes on
