"""A training that was saved goes on on any grid as if it had not stopped: 10 more losses, in float64, dropout on."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parlinalg.comm import SingleComm
from parlinalg.train import Checkpoints
from tests.train import checkpoints as cp
from tests.train.trainings import in_update
from tests.train.trainings import main as train

# What is saved, and by what it is loaded: ranks, `parallel`, stage of ZeRO.
Grid = tuple[int, dict[str, Any], int]
SERIAL: Grid = (1, {}, 0)
STAGES = {"data": 2, "pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
FROM: dict[int, list[Grid]] = {
    2: [(2, {"data": 2}, 2), (2, {"pipeline": 2}, 0)],
    4: [(4, {"data": 2, "pipeline": 2}, 1)],
    8: [(8, STAGES, 1)],
}
TO: dict[int, list[Grid]] = {
    2: [SERIAL],
    4: [SERIAL, (3, {"data": 3}, 3), (4, {"tensor": {"mode": "2d"}}, 0)],
    8: [SERIAL, (4, {"tensor": {"mode": "2d"}}, 0), (8, {"tensor": {"size": 8, "mode": "3d"}}, 0),
        (4, {"pipeline": 4}, 0), (8, {"data": 8}, 3)],
}  # fmt: skip
SAMPLE = {8: [SERIAL, (4, {"pipeline": 4}, 0)]}  # the others with --full


@pytest.fixture(scope="module")
def tale(world: Any) -> Iterator[Path]:
    made = tempfile.mkdtemp(prefix="parlinalg-") if world.rank == 0 else ""
    path = Path(world.share(made)[0]) / "tale.txt"
    if world.rank == 0:
        path.write_text(cp.TEXT)
    world.barrier()
    yield path
    if made:
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.ranks(2, 4, 8)
def test_a_training_goes_on_on_any_grid(tale: Path, folder: Path, world: Any, backend: str, full: bool) -> None:
    more = 10 if full else 3
    for number, (_, parallel, zero) in enumerate(FROM[world.size]):
        settings, out = cp.config(tale, parallel, zero), folder / str(number)
        want = cp.saved(world, settings, out, backend, more)
        assert cp.gone_on(world, settings, out, backend, more) == want, "the same grid goes on bit for bit"
        for ranks, parallel, zero in TO[world.size] if full else SAMPLE.get(world.size, TO[world.size]):
            comm = cp.part_of(world, ranks)
            if comm is not None:
                cp.close(cp.gone_on(comm, cp.config(tale, parallel, zero), out, backend, more), want)
            world.barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [1, 3])
def test_experts_of_groups_go_on_on_any_grid(zero: int, tale: Path, folder: Path, world: Any, backend: str) -> None:
    model = {**cp.MODEL, "num_local_experts": 3}
    settings = cp.config(tale, {"data": 4, "experts": 2}, zero, model=model)
    want = cp.saved(world, settings, folder, backend, 3)
    assert cp.gone_on(world, settings, folder, backend, 3) == want, "the same grid goes on bit for bit"
    others: list[Grid] = [SERIAL, (4, {"data": 4, "experts": 1}, 2), (4, {"data": 2, "pipeline": 2, "experts": 2}, 0),
                          (4, {"tensor": {"mode": "2d"}}, 0)]  # fmt: skip
    for ranks, parallel, stage in others:
        if (comm := cp.part_of(world, ranks)) is not None:
            cp.close(cp.gone_on(comm, cp.config(tale, parallel, stage, model=model), folder, backend, 3), want)
        world.barrier()


# ---------------------------------------------------------------------------------------------- as users start it
KEYS = ("step", "loss", "accuracy", "lr", "grad_norm", "test_loss", "test_accuracy")


def complete(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, as this rank sees it."""
    return Checkpoints(folder, SingleComm(), {}).steps()


def told(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in KEYS} for line in lines]


@pytest.fixture
def whole(seven: Path, folder: Path, world: Any, quick: None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A configuration, and the metrics of its training."""
    settings = {
        "data": str(seven), "dtype": "float64", "batch_size": 47, "steps": 9, "validate_every": 3,
        "model": {"hidden": (31, 13), "dropout": 0.2}, "checkpoint": {"every": 2},
    }  # fmt: skip
    assert train(settings, folder / "whole", comm=world) == 0
    world.barrier()
    return settings, told(folder / "whole")


@pytest.mark.parametrize(
    "name", [pytest.param("SIGTERM", marks=pytest.mark.ranks(1)), pytest.param("SIGUSR1", marks=pytest.mark.ranks(2))]
)
def test_a_signal_makes_a_checkpoint_from_which_training_goes_on(
    name: str, whole: Any, folder: Path, world: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The signal comes to one rank, after step 5, where no checkpoint is due."""
    settings, want = whole

    def signals() -> None:
        if world.rank == world.size - 1:
            signal.raise_signal(getattr(signal, name))

    with monkeypatch.context() as patch:
        in_update(patch, 5, signals)
        assert train(settings, folder / "out", comm=world) == 128 + getattr(signal, name)
    world.barrier()
    assert told(folder / "out") == want[:5]
    assert complete(folder / "out" / "checkpoints") == [2, 4, 5]
    world.barrier()
    assert train(settings, folder / "out", comm=world, resume=True) == 0
    world.barrier()
    assert told(folder / "out") == want
    said = capfd.readouterr().out
    if world.rank == 0:
        assert f"stopped by {name} after step 5 of 9" in said
        assert "going on after step 5, from" in said
        assert "4 steps in" in said
        assert "9 in all" in said


@pytest.mark.ranks(1, 2)
def test_steps_after_the_checkpoint_are_made_again_and_told_once(whole: Any, folder: Path, world: Any) -> None:
    settings, want = whole
    out = folder / "whole"
    if world.rank == 0:
        for step in (8, 9):
            shutil.rmtree(out / "checkpoints" / f"step-{step:08}")
        with (out / "metrics.jsonl").open("a") as file:
            file.write('{"step": 10, "lo')  # a process that was killed
        (out / "checkpoints" / "step-00000008").mkdir()
        (out / "checkpoints" / "step-00000008" / "rank-00000.0a1b2c3d.safetensors").touch()
    world.barrier()
    assert train(settings, out, comm=world, resume=True) == 0
    world.barrier()
    assert told(out) == want
    assert complete(out / "checkpoints") == [6, 8, 9]
    world.barrier()
    assert train(settings, out, comm=world, resume=True) == 0, "nothing is left to do"
    assert train({**settings, "steps": 11}, out, comm=world, resume=True) == 0, "more steps"
    world.barrier()
    assert [m["step"] for m in told(out)] == list(range(1, 12))
    assert told(out)[:8] == want[:8]
    world.barrier()
    assert train({**settings, "checkpoint": False}, out, comm=world, resume=True) == 0
    assert train(settings, out, comm=world) == 0, "from the start: what was there is set aside"
    world.barrier()
    assert told(out) == want
    assert complete(out / "checkpoints") == [6, 8, 9]
    assert complete(out / "checkpoints.old") == [9, 10, 11]


@pytest.mark.ranks(2)
def test_a_pipeline_goes_on_without_one(whole: Any, folder: Path, world: Any) -> None:
    """The same file with another `parallel`: its schedule, and a partition, need not be taken out."""
    settings, want = whole
    pipeline = {"size": 2, "partition": [3, 4]}
    settings = {**settings, "parallel": {"pipeline": pipeline}, "schedule": {"name": "gpipe", "microbatches": 3}}
    settings["lr_schedule"] = {"name": "constant"}
    assert train({**settings, "steps": 5}, folder / "out", comm=world) == 0
    world.barrier()
    other = ["parallel.pipeline.size=1", "parallel.data=2"]
    assert train({**settings, "steps": 7}, folder / "out", other, comm=world, resume=True) == 0
    world.barrier()
    assert train({**settings, "parallel": {"data": 2}}, folder / "out", comm=world, resume=True) == 0
    world.barrier()
    found = told(folder / "out")
    assert [m["step"] for m in found] == list(range(1, 10))
    for mine, theirs in zip(found, want, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-12)


@pytest.mark.ranks(1)
def test_without_a_checkpoint_training_begins(whole: Any, folder: Path, world: Any) -> None:
    settings, want = whole
    assert train(settings, folder / "new", comm=world, resume=True) == 0
    world.barrier()
    assert told(folder / "new") == want
