"""The tests in other processes: under mpiexec, and, beside the tests of this process, those that start others."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest

from tests.launching import ROOT, launch

LIMIT = 720.0  # seconds a run may take; each of its tests has its own, shorter one
RUNS = [(1, "cupy"), (1, "numpy")]
"""Every commit runs a small part of the tests on these."""
WHOLE = [2, 4]
"""Commits run a large part of the tests on 2 and on 4 ranks in turn."""
WHOLE_SHARES = {2: 10, 4: 22}  # one in so many tests on 2 and on 4 ranks, where they take more than twice as long
HERE_SHARE = 7
"""Of tests that can communicate, and run on one rank without MPI, one in so many if all are to run."""
ALONE_SHARE = 3
"""Of tests that run on so many ranks and no fewer, one in so many runs."""
TURNS = [[(8, "numpy")], [(3, "numpy"), (5, "numpy")], [(4, "cupy")], [(6, "numpy"), (7, "numpy")], [(12, "numpy")]]
"""Of these each commit that runs all tests on 2 ranks takes the next; with --full all run."""
SHARES = {(1, "numpy"): 24, (1, "cupy"): 30, (3, "numpy"): 24, (4, "cupy"): 40,
          (5, "numpy"): 9, (6, "numpy"): 40, (7, "numpy"): 9, (8, "numpy"): 120, (12, "numpy"): 20}  # fmt: skip
"""In these runs one in so many of the tests that also run on other numbers of ranks; with --full and in runs that are
asked for by --runs all of them, or one in --share."""
COMPILED = {2, 6}  # in these runs of NumPy blocks of any size go through compiled loops
CHECKED = {3}  # in these all that ranks are about to do, and what they hand in, is compared (PARLINALG_CHECK)
PROGRAMS = [
    ("tests/array/test_files.py", "tests/backend/test_devices.py", "tests/comm/test_startup.py", "tests/datasets/",
     "tests/linalg/test_failures.py", "tests/offload/", "tests/test_bench.py", "tests/test_docs.py",
     "tests/test_readme.py", "tests/test_tour.py", "tests/train/test_damage.py", "tests/train/test_hybrid.py",
     "tests/train/test_launch.py", "tests/train/test_lock.py"),
    ("tests/comm/test_failures.py", "tests/pipeline/test_pipeline_failures.py", "tests/cli/", "tests/cluster/",
     "tests/planning/test_auto.py", "tests/train/test_kills.py", "tests/test_agreement.py", "tests/test_launching.py",
     "tests/testing/test_users.py"),
]  # fmt: skip
"""Files whose tests start programs and wait for them."""
PROGRAMS_SHARE = 13
"""Of these tests at most one in so many if all are to run; odd, so that each runs at commits of 2 and of 4 ranks."""
HEAVY = ("tests/planning/", "tests/backend/")
"""Files whose tests compile or trace a lot, and start nothing."""
HEAVY_SHARE = 8
"""The same of these."""
APART = [*PROGRAMS, (*HEAVY, "tests/autograd/test_ring.py")]
"""If all tests run, processes of their own run these, each one part: a test is in the first part that names it."""
MANY = 1000  # tests, from which on all are said to run

Files = Callable[[int, str, int], list[str]]
_beside = ThreadPoolExecutor(len(APART))
_files: list[Files] = []  # which files a run reads, known where all tests are to run
_ahead: dict[tuple[int, str], Future[Run]] = {}
_apart: dict[int, Future[Run]] = {}


def chosen(name: str, ranks: int, backend: str, share: int, seed: int) -> bool:
    """Return True if a run that takes one in `share` of the tests takes the one of this name.

    A test is known by the name of its function and its parameters, wherever its file is.  Successive seeds, or those
    whose turn the run is, take each test once in `share` seeds.
    """
    seed //= _period(ranks, backend)
    return (crc32(f"{name} {ranks} {backend}".encode()) + seed) % share == 0


def share_of(name: str, one_in: int = 1) -> int:
    """Return n: if all tests are to run, one in n of the serial tests of this file, or of those so marked, runs.

    The mark of a test that takes long never makes it run more often than its file's others.
    """
    programs = name.startswith((*chain(*PROGRAMS),))
    return max(one_in, PROGRAMS_SHARE if programs else HEAVY_SHARE if name.startswith(HEAVY) else 1)


def whole(seed: int) -> int:
    """Return the number of ranks on which all tests run."""
    return WHOLE[seed % len(WHOLE)]


def runs_of(seed: int) -> list[tuple[int, str]]:
    """Return the runs of a commit: (ranks, backend)."""
    turn = TURNS[seed // len(WHOLE) % len(TURNS)] if whole(seed) == WHOLE[0] else []
    return [*RUNS, (whole(seed), "numpy"), *turn]


@cache
def _period(ranks: int, backend: str) -> int:
    """The number of commits from one that has a run on these ranks to the next; 1 if none has."""
    cycle, run = len(WHOLE) * len(TURNS), (ranks, backend)
    return cycle // (sum(run in runs_of(seed) for seed in range(cycle)) or cycle)


def seed_of(root: Path = ROOT) -> int:
    """Return the seed of the tree at `root`: the number of its commits, so that each commit takes the next part.

    A shallow clone has too few commits to count, and takes its commit's name as a number; a tree without git has 0.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "true":
            return int(git("rev-parse", "HEAD")[:8], 16)
        return int(git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


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


def apart(part: int) -> Run | None:
    """How the tests of a part of `APART` went in a process of their own; None if none do."""
    return _apart[part].result() if part in _apart else None


def begin(items: list[pytest.Item], config: pytest.Config, files: Files) -> None:
    """If all tests are to run, take those of `APART` out; run them, then the runs of one rank, beside the rest.

    Those of `test_runs.py`, which wait for these and then start runs that need all cores, come last.
    `files(ranks, backend, share)` gives the files of a run's tests.
    """
    runs = [item.callspec.params for item in items if getattr(item, "originalname", "") == "test_on_ranks"]
    if len(items) < MANY or not runs or config.getoption("--collect-only"):
        return
    for part, names in enumerate(APART):
        if away := [item for item in items if item.nodeid.startswith(names)]:
            config.hook.pytest_deselected(items=away)
            items[:] = [item for item in items if not item.nodeid.startswith(names)]
            _apart[part] = _beside.submit(_run, 0, "numpy", config, [item.nodeid for item in away])
    items.sort(key=lambda item: item.nodeid.startswith("tests/test_runs.py"))  # which waits, with a core unused
    _files.append(files)
    for ranks, backend in [(run["ranks"], run["backend"]) for run in runs if run["ranks"] == 1]:
        _ahead[ranks, backend] = _beside.submit(_run, ranks, backend, config)


def _run(ranks: int, backend: str, config: pytest.Config, tests: Sequence[str] = ()) -> Run:
    """Run the tests of a number of ranks, or these tests without mpiexec, for which it is 0."""
    full = config.getoption("--full")
    share = SHARES.get((ranks, backend), 1)
    if config.getoption("--runs"):
        share = config.getoption("--share")
    elif (ranks, backend) == (whole(config.getoption("--seed")), "numpy"):
        share = 1
    paths = tests or config.getoption("--run-paths").split()
    arguments = ["-q", "-p", "no:cacheprovider", "--tb=short", "--color=no", "--seed", str(config.getoption("--seed"))]
    if ranks:
        arguments += ["--share", str(share)]
        if _files and backend == "numpy":  # the stand-in for CuPy has tests of its own
            paths = _files[0](ranks, backend, share) or paths
    if expression := config.getoption("-m"):
        arguments += ["-m", expression]
    if full:
        arguments.append("--full")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        env = {"PARLINALG_TEST_BACKEND": backend, "PARLINALG_TEST_REPORT": str(report)}
        env["PARLINALG_TEST_COMPILED"] = str(int(backend == "numpy" and ranks in COMPILED))
        if ranks in CHECKED:
            env["PARLINALG_CHECK"] = "1"
        start = time.monotonic()
        if ranks:
            env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "0"  # these ranks talk all the time, and nothing else runs
        done = launch(ranks, ["-m", "pytest", *paths, *arguments], env=env, timeout=LIMIT * (10 if full else 1))
        seconds = time.monotonic() - start
        told = json.loads(report.read_text()) if report.exists() else {"collected": 0, "outcomes": {}}
    return Run(done, told["collected"], told["outcomes"], seconds)
