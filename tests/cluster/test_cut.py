"""The link of a host is cut: mpiexec and all processes of the run end by the limit, where nobody can tell them too.

MPICH's Abort asks the launcher to end the run and returns; on a host that the launcher no longer reaches a process has
to end itself.  A message to such a host may block its sender, the monitor among them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.conftest import Run

pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]

LIMIT = 3
"""The PARLINALG_TIMEOUT of these runs, in seconds."""

START = """
import os, sys, time
import numpy as np
from parlinalg.comm import open_comm
comm = open_comm().cartesian({"r": 4})
a = np.ones(4)
def cut():
    comm.barrier()
    if comm.rank == 0:
        open(sys.argv[1], "w").close()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
def wait_for_the_cut():
    while os.path.exists(sys.argv[1]):
        time.sleep(0.02)
"""

IN_A_COLLECTIVE = """
cut()
while True:
    comm.all_reduce(a)
    time.sleep(0.01)
"""

AT_THE_END = """
cut()
if comm.rank < 2:
    wait_for_the_cut()
"""

AN_EXCEPTION = """
cut()
wait_for_the_cut()
if comm.rank == 3:
    raise ValueError("boom")
comm.barrier()
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("program", "host"),
    [(IN_A_COLLECTIVE, 1), (AT_THE_END, 2), (AN_EXCEPTION, 2)],
    ids=["in a collective, rank 0 cut off", "at the end of the program", "raising"],
)
def test_all_processes_end(across_hosts: Run, tmp_path: Path, program: str, host: int) -> None:
    script, when = tmp_path / "program.py", tmp_path / "cut"
    script.write_text(START + program)
    options = ["--per-host", "2", "--cut", str(host), "--when", str(when)]
    done = across_hosts(2, [str(script), str(when)], "none", timeout=45, options=options, PARLINALG_TIMEOUT=str(LIMIT))
    took = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert done.returncode not in (0, 124)
    assert len(took) == 3, "two hosts, and mpiexec"
    assert all(seconds is not None and seconds < LIMIT + 20 for seconds in took), (took, done.stderr)  # slow machines
