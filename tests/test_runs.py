"""The tests again under mpiexec, on several numbers of ranks, and on the stand-in for CuPy."""

from __future__ import annotations

import pytest

from tests.launching import mpiexec
from tests.runs import LIMIT, Run, apart, outcome

RUNS = [(1, "cupy"), (1, "numpy"), (2, "numpy"), (3, "numpy"), (4, "numpy"), (4, "cupy"), (5, "numpy"), (6, "numpy"),
        (7, "numpy"), (8, "numpy"), (12, "numpy")]  # fmt: skip


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
def test_files_apart(runs_done: list[str]) -> None:
    """Those of `runs.APART`, which a process of their own runs when all tests run."""
    run = apart()
    if run is not None:
        runs_done.append(said(run, "apart"))


@pytest.mark.serial
@pytest.mark.timeout(2 * LIMIT + 60)
def test_on_ranks(ranks: int, backend: str, runs_done: list[str], request: pytest.FixtureRequest) -> None:
    runs_done.append(said(outcome(ranks, backend, request.config), f"{ranks:2} ranks, {backend}"))


def said(run: Run, name: str) -> str:
    """A line about a run that passed; a failure if it did not."""
    tail = f"{run.done.stdout[-12000:]}\n{run.done.stderr[-6000:]}"
    assert run.done.returncode != 124, f"{name}: took longer than {LIMIT:.0f} s:\n{tail}"
    assert run.done.returncode in (0, 5), f"{name}: exit code {run.done.returncode}\n{tail}"
    outcomes = list(run.outcomes.values())
    assert len(outcomes) == run.collected, f"{name}: {run.collected - len(outcomes)} tests did not run:\n{tail}"
    assert name.startswith(("12", " 5", " 7")) or outcomes.count("passed") > 0, f"{name}: no test ran:\n{tail}"
    skipped = len(outcomes) - outcomes.count("passed")
    return f"{name}: {outcomes.count('passed')} passed, {skipped} skipped in {run.seconds:.0f} s"


@pytest.mark.serial
def test_mpiexec_belongs_to_the_mpi_that_mpi4py_loads() -> None:
    assert mpiexec()
