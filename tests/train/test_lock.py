"""One training at a time writes to a folder, and what is taken away from it meanwhile is told."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.comm import SingleComm
from parlinalg.errors import CheckpointError, ConfigError
from tests.launching import ROOT, child_environment, launch
from tests.train.trainings import in_update
from tests.train.trainings import main as train

NAME = ".parlinalg.lock"
HOLD = """
import os, sys, time
from parlinalg.comm import SingleComm
from parlinalg.train import Checkpoints
checkpoints = Checkpoints(sys.argv[1], SingleComm(), {})
checkpoints.open(fresh=False)
if len(sys.argv) > 2:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
print("held", flush=True)
time.sleep(60)
"""
TRAIN = """
import json, sys, time
from pathlib import Path
import pytest
from tests.train.trainings import in_update, main
settings, out = json.loads(sys.argv[1]), Path(sys.argv[2])
sys.modules["matplotlib.backends.backend_agg"] = None
def wait():
    while not (out / "go on").exists():
        time.sleep(0.01)
in_update(pytest.MonkeyPatch(), 4, wait)
sys.exit(main(settings, out))
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    env = child_environment({"PARLINALG_MPI": "0"})
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as started:  # fmt: skip
        try:
            yield started
        finally:
            started.kill()


def settings(seven: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": str(seven), "dtype": "float64", "batch_size": 47, "steps": 6, "backend": "numpy",
        "model": {"hidden": (9,)}, "checkpoint": {"every": 2}, **more,
    }  # fmt: skip


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def hold(folder: Path) -> pla.Checkpoints:
    """The right to write to a folder."""
    held = pla.Checkpoints(folder, SingleComm(), {})
    held.open(fresh=False)
    return held


def holder(folder: Path) -> Any:
    """The process that a folder's lock names, and what tells this lock from others."""
    found = json.loads((folder / NAME).read_text())
    return found["pid"], found["token"]


# ---------------------------------------------------------------------------------------------- the lock
@pytest.mark.serial
def test_one_process_has_a_folder_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    for forks in (False, True):
        with process(HOLD, str(tmp_path), *["forks"] * forks) as other:
            assert other.stdout is not None
            child = int(other.stdout.readline()) if forks else None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(CheckpointError) as caught:
                hold(tmp_path)
            for part in (str(tmp_path), f"process {other.pid} on host {socket.gethostname()!r}", "stop it"):
                assert part in str(caught.value)
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            held = hold(tmp_path)  # though its description is there, and a child of it lives
            assert holder(tmp_path)[0] == os.getpid()
            if child is not None:
                os.kill(child, signal.SIGKILL)
            held.release()
        assert not list(tmp_path.iterdir())


@pytest.mark.serial
def test_objects_of_one_process_share_a_lock(tmp_path: Path) -> None:
    first, second = hold(tmp_path), hold(tmp_path)
    before = holder(tmp_path)
    first.release()
    first.release()
    assert holder(tmp_path) == before
    (tmp_path / NAME).unlink()
    third = hold(tmp_path)
    after = holder(tmp_path)
    assert after != before
    second.release()
    assert holder(tmp_path) == after, "a lock that is not in place any more takes no other one away"
    del third
    assert not list(tmp_path.iterdir()), "forgotten ones are given back"
    (tmp_path / NAME).symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="cannot be locked"):
        hold(tmp_path)


@pytest.mark.serial
def test_where_files_cannot_be_locked_the_description_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    hold(tmp_path).release()
    assert not list(tmp_path.iterdir())
    with process(HOLD, str(tmp_path)) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"process {other.pid} on host"):
            hold(tmp_path)
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        hold(tmp_path)
    (tmp_path / NAME).write_text(json.dumps({"pid": 1, "host": "elsewhere", "system": "another", "began": "0"}))
    with pytest.raises(CheckpointError, match=f"on host 'elsewhere'.*remove {tmp_path / NAME}"):
        hold(tmp_path)
    for damaged in ("", "{", "[" * 4000, json.dumps({"pid": 10**30}), "x" * 10000):
        (tmp_path / NAME).write_text(damaged)
        hold(tmp_path)


# ---------------------------------------------------------------------------------------------- trainings
@pytest.mark.serial
def test_a_second_training_leaves_the_first_one_alone(seven: Path, tmp_path: Path, quick: None) -> None:
    given = settings(seven)
    assert train(given, tmp_path / "alone") == 0
    with process(TRAIN, json.dumps(given), str(tmp_path / "out")) as first:
        lines = tmp_path / "out" / "metrics.jsonl"
        until = time.monotonic() + 50
        while not (lines.exists() and len(lines.read_text().splitlines()) == 3):
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        for resume in (False, True):
            with pytest.raises(ConfigError, match=rf"out is in use by another training \(process {first.pid} on host"):
                train({**given, "seed": 1}, tmp_path / "out", resume=resume)
        (tmp_path / "out" / "go on").touch()
        assert first.wait(50) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "alone")
    assert not list((tmp_path / "out").rglob(NAME)), "the locks are given back"
    assert train({**given, "steps": 7}, tmp_path / "out", resume=True) == 0
    assert len(losses(tmp_path / "out")) == 7


@pytest.mark.serial
def test_the_command_says_who_has_the_folder(tmp_path: Path) -> None:
    held = hold(tmp_path)
    done = launch(2, ["-m", "parlinalg", "train", "digits", "--steps", "1", "--out", str(tmp_path)])
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count(f"in use by another training (process {os.getpid()} on host") == 1
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    held.release()


@pytest.mark.ranks(2, 4)
def test_checkpoints_of_another_process_are_left_alone(folder: Path, world: Any, backend: str) -> None:
    """The last rank is the other process."""
    checkpoints = made(folder / "saved", world, backend)
    checkpoints.open(fresh=True)
    checkpoints.save(1)
    checkpoints.finish()
    world.barrier()
    held = hold(folder / "saved") if world.rank == world.size - 1 else None
    world.barrier()
    again = made(folder / "saved", world, backend)
    for call in (lambda: again.open(fresh=True), lambda: again.save(2)):
        with pytest.raises(CheckpointError, match="saved is in use by another training"):
            call()
    assert again.steps() == [1]
    assert again.load().step == 1, "reading is free"
    world.barrier()
    if held is not None:
        held.release()
    world.barrier()
    again.save(2)
    again.finish()
    assert again.steps() == [1, 2]


def made(folder: Path, world: Any, backend: str) -> pla.Checkpoints:
    mesh = pla.launch({}, world, backend)
    model = nn.Linear(5, 3, mesh.scheme, mesh.grid).initialize(0)
    parameters = dict(model.named_parameters())
    return pla.Checkpoints(folder, mesh.world, parameters, optim.AdamW(parameters.values()))


# ---------------------------------------------------------------------------------------------- what is taken away
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("what", "saves", "gone"),
    [
        ("", True, "checkpoints/step-00000002, metrics.jsonl, ranks.json are gone"),
        ("", False, "metrics.jsonl, ranks.json are gone"),
        ("checkpoints", True, "checkpoints/step-00000002 is gone"),
        ("ranks.json", False, "ranks.json is gone"),
    ],
)
def test_a_folder_that_is_removed_during_a_training_is_told(
    what: str, saves: bool, gone: str, seven: Path, folder: Path, world: Any, quick: None, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It goes on, so that its end is not lost too."""
    out = folder / "out"

    def removes() -> None:
        if world.rank == 0:
            (shutil.rmtree if (out / what).is_dir() else os.unlink)(out / what)

    in_update(monkeypatch, 4, removes)
    checkpoint = {"every": 2, "background": False} if saves else False
    with pytest.raises(ConfigError, match=f"out was removed or changed while the training ran: {gone}$"):
        train(settings(seven, checkpoint=checkpoint), out, comm=world)
    world.barrier()
    if saves:
        assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    said = capfd.readouterr().out
    if world.rank == 0:
        (line,) = [line for line in said.splitlines() if line.startswith("written to")]
        assert "ranks.json" not in line.split(": ")[1] or "ranks.json" not in gone
        assert "metrics.jsonl" not in line or "metrics.jsonl" not in gone


@pytest.mark.ranks(1, 2)
def test_a_folder_that_another_training_took_is_not_written_to(
    seven: Path, folder: Path, world: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed, and another training began in it: on two ranks it is the second one's process."""
    out = folder / "out"
    other: list[Any] = []

    def another() -> None:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(out)
            (out / "checkpoints").mkdir(parents=True)
        world.barrier()
        if world.size == 1:
            started = process(HOLD, str(out / "checkpoints"))
            other.append(started)
            assert started.__enter__().stdout.readline() == "held\n"
        elif world.rank == 1:
            other.append(hold(out / "checkpoints"))
        world.barrier()

    in_update(monkeypatch, 4, another)
    with pytest.raises(CheckpointError, match="checkpoints is in use by another training"):
        train(settings(seven), out, comm=world)
    world.barrier()
    assert [p.name for p in (out / "checkpoints").iterdir()] == [NAME]
    world.barrier()
    for each in other:
        each.__exit__(None, None, None) if world.size == 1 else each.release()


@pytest.mark.ranks(1, 2)
def test_checkpoints_that_are_taken_away_are_told(folder: Path, world: Any, backend: str) -> None:
    saved = made(folder / "saved", world, backend)
    for step in (1, 2, 3):
        saved.save(step)
    saved.settle()
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder / "saved" / "step-00000001")  # to make room, say
    world.barrier()
    assert saved.lost() == []
    if world.rank == 0:
        shutil.rmtree(folder / "saved" / "step-00000003")
    world.barrier()
    assert saved.lost() == ["step-00000001", "step-00000003"]
    with pytest.raises(CheckpointError, match=r"step-00000001, step-00000003 are gone"):
        saved.finish()
    saved.finish()  # it was told
    saved.save(4)
    saved.settle()
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder / "saved")
    world.barrier()
    with pytest.raises(CheckpointError, match=r"saved was removed .*step-00000002, step-00000004 are gone"):
        saved.finish()
