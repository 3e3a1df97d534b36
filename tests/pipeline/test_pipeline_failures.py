"""A rank that raises, hangs, leaves or is killed in the middle of a pipeline ends the run everywhere, and the message
names stage, microbatch and rank.

Each test starts its own ranks: a pipeline of 3 stages, whose middle one fails in the second step.
"""

from __future__ import annotations

import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.launching import launch

pytestmark = [pytest.mark.serial, pytest.mark.one_in(3), pytest.mark.timeout(60)]

PROGRAM = """
import os, signal, sys, time
from parlinalg.comm import open_comm, ranks_map
from tests.pipeline.running import pipeline
world = open_comm()
with pipeline(world, "numpy", "{name}", {{"pipeline": 3, "data": 1}}, 4, 3) as p:
    where = ranks_map(world)
    if world.rank == 0:
        print(where, flush=True)
    p.step(0)
    stage = p.model.chunks[0]
    layer, calls = stage.layers[0], []
    def fails(x):
        calls.append(x)
        if len(calls) == 3:
            {what}  # here
        return layer.forward(x)
    if stage.number == 1:
        stage.layers = (layer._replace(forward=fails), *stage.layers[1:])
    p.step(1)
print("done", flush=True)
"""


def run(folder: Path, what: str, name: str = "1f1b", **env: str) -> tuple[CompletedProcess[str], float]:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(name=name, what=what))
    begin = time.monotonic()
    done = launch(3, [str(path)], env={"PARLINALG_TIMEOUT": "2", **env}, timeout=45)
    print(done.stdout, done.stderr)
    assert done.returncode not in (0, 124)
    assert "done" not in done.stdout
    return done, time.monotonic() - begin


def here() -> str:
    lines = PROGRAM.splitlines()
    return f"program.py:{next(i for i, line in enumerate(lines, 1) if '# here' in line)}"


def test_raising(tmp_path: Path) -> None:
    done, seconds = run(tmp_path, "raise ValueError('boom')", PARLINALG_TIMEOUT="30")
    assert "[rank 1] ValueError: boom" in done.stderr
    assert "[rank 1] in the pipeline: stage 1, microbatch 2, forward, rank 1" in done.stderr
    assert seconds < 25


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_hanging(tmp_path: Path, name: str) -> None:
    done, seconds = run(tmp_path, "time.sleep(60)", name)
    assert "parlinalg: rank" in done.stderr
    assert "from 1 over ('pipeline',)" in done.stderr
    assert f"rank 1 never came: it is at {tmp_path}/{here()} (stage 1, microbatch 2, forward), in no" in done.stderr
    assert "stage 0, microbatch " in done.stderr or "stage 2, microbatch 2, forward" in done.stderr
    assert seconds < 25


def test_stopped(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert "rank 1 did not answer" in done.stderr
    assert "stage " in done.stderr


def test_leaving(tmp_path: Path) -> None:
    done, seconds = run(tmp_path, "sys.exit(3)", PARLINALG_TIMEOUT="30")
    assert done.returncode == 3
    assert "rank 1 left early (sys.exit(3)" in done.stderr
    assert "microbatch" in done.stderr
    assert seconds < 25


def test_killed(tmp_path: Path) -> None:
    done, seconds = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", PARLINALG_TIMEOUT="30")
    assert "'rank': 1, 'host'" in done.stdout
    assert seconds < 25
