"""A training that is killed goes on exactly, from its last complete checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, child_environment, launch, mpiexec, with_shared_memory
from tests.train.kills import KEYS, STEPS, told

pytestmark = pytest.mark.serial


@pytest.mark.timeout(600)
def test_after_a_kill_at_any_moment_training_goes_on_exactly(tmp_path: Path, full: bool) -> None:
    trials = 50 if full else 3
    done = launch(0, ["-m", "tests.train.kills", str(tmp_path), str(trials)], env={"PARLINALG_MPI": "0"}, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [m["step"] for m in found["want"]] == list(range(1, STEPS + 1))
    assert found["want"][0].keys() == {*KEYS} - {"test_loss", "test_accuracy"}
    assert len(found["trials"]) == trials
    for trial in found["trials"]:
        assert trial["killed"], trial
        assert trial["then"] == 0, trial
        assert trial["metrics"] == found["want"], trial
        assert set(trial["left"]) >= {"step-00000008", "step-00000009"}, trial
    assert sum(t["during"] == "a save" for t in found["trials"]) == trials // 2
    if full:
        assert len({tuple(t["complete"]) for t in found["trials"]}) > 3, "killed early and late"


@pytest.mark.timeout(300)
def test_after_one_of_two_ranks_was_killed(tmp_path: Path, full: bool) -> None:
    settings = ["parallel.data=2", "zero=1", "dtype=float64", "steps=40", "checkpoint=5", "model=dict(hidden=(40,))"]
    arguments = ["-m", "parlinalg", "train", "digits", *(a for s in settings for a in ("--set", s)), "--out"]
    if not full:
        return
    assert launch(2, [*arguments, str(tmp_path / "whole")]).returncode == 0
    draw = random.Random(3)
    for trial in range(5):
        out = tmp_path / str(trial)
        command = [*mpiexec(), "-n", "2", sys.executable, *arguments, str(out)]
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(command, env=child_environment(), cwd=ROOT, stdout=said, stderr=said)
        while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.8))
        pids = [place["pid"] for place in json.loads((out / "ranks.json").read_text())]
        os.kill(pids[trial % 2], signal.SIGKILL)
        assert process.wait(60) != 0
        assert launch(2, [*arguments, str(out), "--resume"]).returncode == 0
        assert told(out) == told(tmp_path / "whole")


@pytest.mark.timeout(3000)
def test_kills_leave_shared_memory_as_it_was(tmp_path: Path, full: bool) -> None:
    """MPICH's memory has no name once MPI runs; what a kill before that leaves, the next run removes."""
    trials = 200 if full else 3
    arguments = ["-m", "tests.train.kills", "memory", str(tmp_path), str(trials), *mpiexec()]
    env = {"PARLINALG_COMPILED": "0"}
    done = launch(0, arguments, env=env, timeout=2900 if full else 100, command=with_shared_memory("64m"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == found["after"] == []
    assert found["again"] == 0
    killed = [trial for trial in found["trials"] if trial["code"] != 0]
    assert len(killed) == trials
    if full:
        begun = sum(trial["begun"] for trial in killed)
        print(f"{trials} kills, {begun} of them in training; before MPI ran, they left {len(found['left'])} files")
        assert begun > trials / 4
        assert len(found["left"]) < trials / 10


STUCK = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from parlinalg.comm import open_comm
from tests.train.trainings import in_update, main
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
comm = open_comm()

def fail():
    if comm.rank == 1:
        while Path(sys.argv[2], "metrics.jsonl").read_text().count("\\n") < 3:
            time.sleep(0.01)
        print("now", time.monotonic(), flush=True)
        if sys.argv[1] == "raise":
            raise ValueError("boom")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "hang":
            time.sleep(60)

in_update(SimpleNamespace(setattr=setattr), 3, fail)
settings = ["parallel.data=2", "model=dict(hidden=(40,))", "steps=6", "backend=numpy"]
sys.exit(main("digits", Path(sys.argv[2]), settings, comm))
"""


@pytest.mark.parametrize(("how", "codes"), [("raise", [1]), ("hang", [1]), ("kill", [9, 137]), ("nothing", [0])])
def test_a_training_whose_stderr_is_full_ends(tmp_path: Path, how: str, codes: list[int]) -> None:
    """What Python holds back for it, where it does, does not change the code in the end."""
    limit = 30 if how == "nothing" else 3  # a rank may wait while the other draws the picture on a crowded machine
    env = {"PARLINALG_TIMEOUT": str(limit), "PARLINALG_COMPILED": "0", "PYTHONUNBUFFERED": ""}  # as it is elsewhere
    done = launch(2, ["-c", STUCK, how, str(tmp_path)], env=env, timeout=55)
    ended = time.monotonic()
    assert done.returncode in codes, done.stdout
    assert how == "nothing" or ended - float(done.stdout.partition("now ")[2].split()[0]) < limit + 10
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 7 if how == "nothing" else 4))
