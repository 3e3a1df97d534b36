"""The tests again under mpiexec, on several numbers of ranks, and on the stand-in for CuPy."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.launching import launch, mpiexec

RUNS = [(1, "cupy"), (1, "numpy"), (2, "numpy"), (3, "numpy"), (4, "numpy"), (4, "cupy"), (6, "numpy"), (8, "numpy"),
        (12, "numpy")]  # fmt: skip
LIMIT = 600.0  # seconds a run may take; each of its tests has its own, shorter one


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--runs")
    runs = RUNS
    if chosen:
        parts = [part.partition(":") for part in chosen.split(",")]
        runs = [(int(ranks), backend or "numpy") for ranks, _, backend in parts]
    if "ranks" in metafunc.fixturenames:
        metafunc.parametrize(("ranks", "backend"), runs, ids=[f"{n}-{name}" for n, name in runs], scope="session")


@pytest.mark.serial
@pytest.mark.timeout(LIMIT + 60)
def test_on_ranks(
    ranks: int, backend: str, full: bool, runs_done: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    report = tmp_path / "report.json"
    paths = request.config.getoption("--run-paths").split()
    arguments = ["-m", "pytest", *paths, "-q", "-p", "no:cacheprovider", "--tb=short", "--color=no"]
    if expression := request.config.getoption("-m"):
        arguments += ["-m", expression]
    if full:
        arguments.append("--full")
    start = time.monotonic()
    env = {"PARLINALG_TEST_BACKEND": backend, "PARLINALG_TEST_REPORT": str(report)}
    done = launch(ranks, arguments, env=env, timeout=LIMIT * (10 if full else 1))
    seconds = time.monotonic() - start
    tail = f"{done.stdout[-12000:]}\n{done.stderr[-6000:]}"
    assert done.returncode != 124, f"{ranks} ranks took longer than {LIMIT:.0f} s:\n{tail}"
    assert done.returncode in (0, 5), f"{ranks} ranks, {backend}: exit code {done.returncode}\n{tail}"
    told = json.loads(report.read_text())
    outcomes = list(told["outcomes"].values())
    assert len(outcomes) == told["collected"], f"{told['collected'] - len(outcomes)} tests did not run:\n{tail}"
    assert ranks == 12 or outcomes.count("passed") > 0, f"no test ran:\n{tail}"
    skipped = len(outcomes) - outcomes.count("passed")
    runs_done.append(
        f"{ranks:2} ranks, {backend}: {outcomes.count('passed')} passed, {skipped} skipped in {seconds:.0f} s"
    )


@pytest.mark.serial
def test_mpiexec_belongs_to_the_mpi_that_mpi4py_loads() -> None:
    assert mpiexec()
