"""The tests again under mpiexec, on several numbers of ranks, and on the stand-in for CuPy."""

from __future__ import annotations

import subprocess
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from tests.launching import launch, mpiexec
from tests.runs import (
    APART,
    HEAVY,
    HEAVY_SHARE,
    LIMIT,
    PROGRAMS,
    PROGRAMS_SHARE,
    RUNS,
    TURNS,
    WHOLE,
    Run,
    apart,
    chosen,
    outcome,
    runs_of,
    seed_of,
    share_of,
    whole,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if chosen := config.getoption("--runs"):
        parts = [part.partition(":") for part in chosen.split(",")]
        runs = [(int(ranks), backend or "numpy") for ranks, _, backend in parts]
    elif config.getoption("--full"):
        runs = list(dict.fromkeys([*RUNS, *((ranks, "numpy") for ranks in WHOLE), *chain(*TURNS)]))
    else:
        runs = runs_of(config.getoption("--seed"))
    if "ranks" in metafunc.fixturenames:
        metafunc.parametrize(("ranks", "backend"), runs, ids=[f"{n}-{name}" for n, name in runs], scope="session")


@pytest.mark.serial
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("part", range(len(APART)))
def test_files_apart(part: int, runs_done: list[str]) -> None:
    """Those of `runs.APART`, which processes of their own run when all tests run."""
    run = apart(part)
    if run is not None:
        runs_done.append(said(run, f"apart, part {part}"))


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


@pytest.mark.serial
def test_successive_seeds_take_every_test_in_turn() -> None:
    names = [f"test_{i}[{i % 7}]" for i in range(500)]
    for share in (1, 3, 8):
        for ranks, step in ((1, 1), (4, len(WHOLE)), (8, len(WHOLE) * len(TURNS))):
            seeds = range(31, 31 + step * share, step)
            times = Counter(name for seed in seeds for name in names if chosen(name, ranks, "numpy", share, seed))
            assert times == Counter(names), (ranks, share)
    taken = {seed: [name for name in names if chosen(name, 4, "numpy", 8, seed)] for seed in (31, 33)}
    assert 30 < len(taken[31]) < 100
    assert not set(taken[31]) & set(taken[33])
    assert taken[31] != [name for name in names if chosen(name, 3, "numpy", 8, 31)], "each run has a part of its own"


@pytest.mark.serial
def test_tests_that_take_long_run_no_more_often_than_their_files_others() -> None:
    for file, share in ((PROGRAMS[0][0], PROGRAMS_SHARE), (HEAVY[0], HEAVY_SHARE), ("tests/nn/", 1)):
        assert share_of(f"{file}::test") == share
        assert [share_of(f"{file}::test", one_in) for one_in in (2, 100)] == [max(2, share), 100]


@pytest.mark.serial
def test_successive_seeds_take_every_run_in_turn() -> None:
    seeds = range(31, 31 + len(WHOLE) * len(TURNS))
    assert Counter(map(whole, seeds)) == dict.fromkeys(WHOLE, len(TURNS))
    assert all(set(RUNS) <= set(runs_of(seed)) for seed in seeds)
    turns = [run for seed in seeds for run in runs_of(seed) if run not in (*RUNS, (whole(seed), "numpy"))]
    assert Counter(turns) == Counter(chain(*TURNS))


@pytest.mark.serial
def test_the_seed_is_the_number_of_commits(tmp_path: Path) -> None:
    assert seed_of(tmp_path) == 0

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    assert seed_of(tmp_path) == 0, "no commit yet"
    for i in range(3):
        git("commit", "-q", "--allow-empty", "-m", str(i))
        assert seed_of(tmp_path) == i + 1
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}", "shallow")
    assert seed_of(tmp_path / "shallow") == int(git("rev-parse", "HEAD")[:8], 16)


@pytest.mark.serial
def test_a_part_is_known_by_the_names_of_the_tests(tmp_path: Path) -> None:
    """Files with the same tests give the same part wherever they are, and another seed another one."""

    def part(path: str, *options: str, **env: str) -> set[str]:
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text("import pytest\n@pytest.mark.parametrize('n', range(30))\ndef test_n(n): pass\n")
        arguments = ["-m", "pytest", "-c", "setup.cfg", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q",
                     "--collect-only", "--share", "3", *options, str(file)]  # fmt: skip
        done = launch(1, arguments, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}

    first = part("a/test_one.py", "--seed", "6")
    assert 0 < len(first) < 30
    assert part("b/test_other.py", PARLINALG_TEST_SEED="6") == first
    assert not first & part("a/test_one.py", "--seed", "7")


@pytest.mark.serial
@pytest.mark.timeout(200)
def test_the_options_of_pytest_mpi() -> None:
    """Every test that is not serial has its marker; pytest-mpi itself, if it is installed, is not loaded."""

    def collected(ranks: int, *options: str) -> set[str]:
        files = ("tests/test_grid.py", "tests/test_launching.py")
        arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *options, *files]
        return {line for line in launch(ranks, arguments).stdout.splitlines() if "::" in line}

    distributed = collected(1, "--with-mpi")
    assert len(distributed) > 5
    assert collected(1, "-m", "mpi") == distributed
    assert collected(0, "--only-mpi") == distributed < collected(0), "mpiexec leaves serial tests out by itself"
    done = launch(2, ["-m", "pytest", "-q", "--with-mpi", "tests/cli"], timeout=100)
    assert done.returncode == 0, f"a folder of serial tests is no error: {done.stdout}"
