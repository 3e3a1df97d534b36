"""Steps that are left out, trainings that go on from any step, batches that do not divide by anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import SingleComm
from parlinalg.datasets import Loader, Windows
from parlinalg.layout import Layout
from parlinalg.train import launch
from parlinalg.train.job import Job
from parlinalg.train.loop import batches
from tests.cases import held

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


def outcomes(job: Job, start: int = 0, stop: int = 9) -> list[Any]:
    return [job.trainer.step(batch) for batch in batches(job.task.loader, stop, PARTS, start)]


def spoiled(job: Job, steps: set[int]) -> None:
    """Have the losses of these steps be infinite."""
    losses = job.task.losses

    def worse(batch: Any, weight: float) -> Any:
        loss, count, measures = losses(batch, weight)
        return (loss * np.inf if job.trainer.made in steps else loss), count, measures

    job.task.losses = worse  # type: ignore[method-assign]


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.ranks(2, 3, 4))])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_uneven_batches_and_steps_left_out(zero: int, seven: Path, world: Any, backend: str) -> None:
    """The losses of one rank; after a step that is left out the next one starts from what was."""
    found = []
    for comm, extra in ((world, {"zero": zero}), (SERIAL, {})):
        with launch({**BASE, **extra, "data": str(seven)}, comm, backend if comm is world else "numpy") as mesh:
            job = Job(mesh, seven.parent, mesh.grid.world)
            spoiled(job, {2, 5})
            steps = outcomes(job)
            assert [s.skipped for s in steps] == [i in (2, 5) for i in range(9)]
            assert [s.samples for s in steps] == [53, 53, 53, 1] * 2 + [53]
            assert (job.trainer.skipped, job.trainer.scheduler.steps, job.trainer.made) == (2, 7, 9)
            assert steps[3].lr == steps[2].lr
            assert steps[4].norm > 0
            found.append([(s.loss, s.norm) for s in steps if not s.skipped])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


@pytest.mark.parametrize("precision", ["fp16", None])
def test_a_training_goes_on_where_it_was(precision: str | None, seven: Path, world: Any, backend: str) -> None:
    """Bit for bit on the same grid, with loss scale and masters; batches before the step are not read."""
    scale = {"dtype": precision, "loss_scale": {"start": 2.0**17, "growth_every": 3}} if precision else None
    config = {**BASE, "data": str(seven), "dtype": "float32", "precision": scale, "clip_grad_value": 0.01, "zero": 1}
    with launch(config, world, backend) as mesh:
        job = Job(mesh, seven.parent, mesh.grid.world)
        outcomes(job, 0, 4)
        state, weights = job.trainer.state_dict(), job.task.model.state_dict()
        want = outcomes(job, 4)
    with launch(config, world, backend) as mesh:
        job = Job(mesh, seven.parent, mesh.grid.world)
        job.task.model.load_state_dict(weights)
        job.trainer.load_state_dict(state)
        assert job.trainer.made == 4
        assert repr(outcomes(job, job.trainer.made)) == repr(want)  # a norm may be nan
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
