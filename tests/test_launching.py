"""The launcher of ranks leaves nothing behind and hands on what it was given."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launching import launch

pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]


@pytest.mark.parametrize("ranks", [0, 3])
def test_time_limits_end_every_rank(ranks: int, tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "time.sleep(100)"
    )
    start = time.monotonic()
    assert launch(ranks, ["-c", code], timeout=2).returncode == 124
    assert time.monotonic() - start < 40
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == max(1, ranks)
    time.sleep(0.5)
    assert [pid for pid in pids if _alive(pid)] == []


def _alive(pid: str) -> bool:
    try:
        return " Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


def test_ranks_get_one_thread_and_their_environment() -> None:
    told = 'f\'{os.environ["OMP_NUM_THREADS"]} {os.environ["GIVEN"]} {"PARLINALG_MPI" in os.environ}\\n\''
    code = f"import os; os.write(1, ({told}).encode())"  # one write, which other ranks' lines do not break
    done = launch(2, ["-c", code], env={"GIVEN": "x"})
    assert done.stdout.split() == ["1", "x", "False"] * 2, done.stderr


def test_the_return_code_and_both_outputs_come_back() -> None:
    done = launch(0, ["-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
