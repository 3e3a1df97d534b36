"""The tests under mpiexec, each run once; those of one rank beside the tests of this process, which use one core."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launching import launch

LIMIT = 600.0  # seconds a run may take; each of its tests has its own, shorter one
SHARES = {(1, "numpy"): 4, (1, "cupy"): 4, (3, "numpy"): 4, (4, "numpy"): 2, (4, "cupy"): 4, (6, "numpy"): 4,
          (8, "numpy"): 3}  # fmt: skip
"""In these runs one in so many, others each time, of the tests that run on several numbers of ranks; --full: all."""
MANY = 100  # tests of this process beside which runs of one rank are worth starting

_beside = ThreadPoolExecutor(1)
_ahead: dict[tuple[int, str], Future[Run]] = {}


class Run(NamedTuple):
    """A run that is over."""

    done: subprocess.CompletedProcess[str]
    collected: int
    outcomes: Mapping[str, str]
    seconds: float


def outcome(ranks: int, backend: str, config: pytest.Config) -> Run:
    """How the tests went on so many ranks; waits for a run that is under way."""
    ahead = _ahead.get((ranks, backend))
    return _run(ranks, backend, config) if ahead is None else ahead.result()


def begin(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Start the runs of one rank, one after the other, where many other tests come before them."""
    runs = [item.callspec.params for item in items if getattr(item, "originalname", "") == "test_on_ranks"]
    if len(items) - len(runs) < MANY:
        return
    for run in runs:
        if run["ranks"] == 1:
            _ahead[1, run["backend"]] = _beside.submit(_run, 1, run["backend"], config)


def _run(ranks: int, backend: str, config: pytest.Config) -> Run:
    full = config.getoption("--full")
    arguments = ["-m", "pytest", *config.getoption("--run-paths").split(), "-q", "-p", "no:cacheprovider"]
    arguments += ["--tb=short", "--color=no"]
    if config.getoption("--run-paths") == "tests":
        arguments += ["--share", str(SHARES.get((ranks, backend), 1))]
    if expression := config.getoption("-m"):
        arguments += ["-m", expression]
    if full:
        arguments.append("--full")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        env = {"PARLINALG_TEST_BACKEND": backend, "PARLINALG_TEST_REPORT": str(report)}
        start = time.monotonic()
        done = launch(ranks, arguments, env=env, timeout=LIMIT * (10 if full else 1))
        seconds = time.monotonic() - start
        told = json.loads(report.read_text()) if report.exists() else {"collected": 0, "outcomes": {}}
    return Run(done, told["collected"], told["outcomes"], seconds)
