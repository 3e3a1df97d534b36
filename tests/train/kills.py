"""Trainings that are killed at random moments, each in a process of its own forked from this one, which imports once.

python -m tests.train.kills FOLDER TRIALS: half of the kills come during a save.  Tells how it went in JSON.
python -m tests.train.kills memory FOLDER TRIALS MPIEXEC…: kills trainings of two ranks, and tells what stays in
shared memory; run it with a /dev/shm of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.comm import SingleComm
from parlinalg.nn.pretrained import Writer
from tests.train.trainings import main as train

STEPS = 9
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "batch_size": 31, "steps": STEPS, "validate_every": 4,
    "optimizer": {"name": "adamw", "lr": 5e-3},
    "model": {"hidden": (40, 30), "dropout": 0.2}, "checkpoint": {"every": 2, "keep": 2, "best": "test_loss"},
    "backend": "numpy",
}  # fmt: skip
KEYS = ("step", "loss", "accuracy", "lr", "grad_norm", "test_loss", "test_accuracy")


def told(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in KEYS} for line in lines]


def forked(function: Callable[[], Any], watch: Callable[[int], object] = lambda pid: None) -> int:
    """Call a function in a process of its own; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            os._exit(function())
        except BaseException:
            os._exit(99)
    watch(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_in_a_save(moment: int) -> Callable[[Any, str], None]:
    """Has the process killed before or after one of the calls by which saves change files: the one of this number."""
    left = [moment]

    def around(place: Any, name: str) -> None:
        plain = getattr(place, name)

        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                die()
            left[0] -= 1
            found = plain(*args, **options)
            if left[0] == 0:
                die()
            left[0] -= 1
            return found

        setattr(place, name, call)

    return around


def in_a_save(settings: dict[str, Any], out: Path, moment: int) -> int:
    around = dying_in_a_save(moment)
    for name in ("write", "close", "appear"):
        around(Writer, name)
    around(os, "fsync")  # of files, of folders
    around(Path, "replace")
    around(Path, "unlink")
    return train(settings, out, comm=SingleComm())


def anywhere(settings: dict[str, Any], out: Path, seconds: float) -> int:
    """Killed from outside, so many seconds after the first step."""
    return forked(
        lambda: train(settings, out, comm=SingleComm()),
        lambda pid: (_after_first_step(out, pid), time.sleep(seconds), os.kill(pid, signal.SIGKILL)),
    )


def _after_first_step(out: Path, pid: int) -> None:
    while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size):
        time.sleep(0.002)


def trial(number: int, settings: dict[str, Any], folder: Path, draw: random.Random, seconds: float) -> dict[str, Any]:
    """Kill a training, and have it go on to its end."""
    out = folder / f"trial {number}"
    ended, moment = 0, 0.0
    while ended == 0:  # it came to its end before it was killed
        shutil.rmtree(out, ignore_errors=True)
        if number % 2:
            moment = draw.randrange(290)
            ended = forked(lambda: in_a_save(settings, out, int(moment)))
        else:
            moment = draw.uniform(0, seconds)
            ended = anywhere(settings, out, moment)
    complete = sorted(index.parent.name for index in (out / "checkpoints").glob("step-*/index.json"))
    ended_again = forked(lambda: train(settings, out, comm=SingleComm(), resume=True))
    return {
        "during": "a save" if number % 2 else "anything",
        "moment": moment, "killed": ended == -signal.SIGKILL, "ended": ended, "complete": complete,
        "then": ended_again, "metrics": told(out), "left": sorted(p.name for p in (out / "checkpoints").iterdir()),
    }  # fmt: skip


def ranks_of(launcher: int) -> list[int]:
    """The processes that run Python below a launcher."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    below, found = {launcher}, []
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += [pid for pid in sorted(below) if Path(f"/proc/{pid}/cmdline").read_text().startswith(sys.executable)]
    return found


def killed_in_memory(trial: int, command: list[str], out: Path, moment: float) -> dict[str, Any]:
    """Start a training of several ranks, and kill a rank, the launcher or all of them so many seconds later."""
    shutil.rmtree(out, ignore_errors=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(moment)
    ranks, begun = [], (out / "metrics.jsonl").exists()
    try:
        ranks = ranks_of(process.pid)
        victims = {0: ranks[-1:], 1: [process.pid], 2: [process.pid, *ranks]}[trial % 3]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    except OSError:  # ended before
        pass
    code = process.wait(60)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/maps").exists() and Path(f"/proc/{pid}/maps").read_text() for pid in ranks):
        assert time.monotonic() < end, "ranks live on"
        time.sleep(0.02)
    return {"moment": moment, "begun": begun, "code": code, "left": os.listdir("/dev/shm")}


def kills_in_memory(folder: Path, trials: int, mpiexec: list[str]) -> dict[str, Any]:
    """Kill trainings of two ranks, at moments from their start until well after their first step."""
    out, draw = folder / "out", random.Random(1)
    settings = ["parallel.data=2", "batch_size=31", "model=dict(hidden=(40,))", "backend=numpy", "checkpoint=5"]
    command = [*mpiexec, "-n", "2", sys.executable, "-m", "parlinalg", "train", "digits", "--out", str(out)]
    command += [text for setting in settings for text in ("--set", setting)]
    before, start = sorted(os.listdir("/dev/shm")), time.monotonic()
    process = subprocess.Popen([*command, "--steps", "3"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.wait() == 0
    whole = time.monotonic() - start
    endless = [*command, "--steps", "100000"]
    rows = [killed_in_memory(i, endless, out, draw.uniform(0.2, 1.2) * whole) for i in range(trials)]
    left = sorted(os.listdir("/dev/shm"))
    for name in left:
        os.utime(f"/dev/shm/{name}", (0, 0))  # as if that had been a minute ago
    again = subprocess.run([*command, "--steps", "1"], capture_output=True, check=False).returncode
    return {"before": before, "left": left, "again": again, "after": sorted(os.listdir("/dev/shm")), "trials": rows}


def main() -> None:
    if sys.argv[1] == "memory":
        print(json.dumps(kills_in_memory(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
        return
    folder, trials = Path(sys.argv[1]), int(sys.argv[2])
    draws = np.random.default_rng(5)
    y = np.arange(170) % 5
    np.savez(folder / "data.npz", x=draws.normal(size=(170, 9)) + np.eye(5, 9)[y], y=y)
    settings = {**SETTINGS, "data": str(folder / "data.npz")}
    sys.modules["matplotlib.backends.backend_agg"] = None  # type: ignore[assignment]  # no pictures
    sys.modules["tqdm"] = None  # type: ignore[assignment]
    start = time.perf_counter()
    assert forked(lambda: train(settings, folder / "whole", comm=SingleComm())) == 0
    seconds = time.perf_counter() - start
    draw = random.Random(sys.argv[3] if len(sys.argv) > 3 else "1")
    rows = [trial(i, settings, folder, draw, seconds) for i in range(trials)]
    print(json.dumps({"want": told(folder / "whole"), "trials": rows}))


if __name__ == "__main__":
    main()
