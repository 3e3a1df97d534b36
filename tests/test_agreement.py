"""A test that fails on one rank fails on all, in bounded time and with that rank's failure."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.launching import launch

pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]


def run(case: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cases_of_agreement.py"]
    return launch(3, arguments, env={"CASE": case, "PARLINALG_TEST_GRACE": "2"}, timeout=60)


def test_passing() -> None:
    done = run("")
    assert done.returncode == 0
    assert "2 passed" in done.stdout


def test_equal_failures_do_not_stop_the_run() -> None:
    done = run("alike")
    assert all(f"on rank {r} of 3" in done.stdout for r in range(3))
    assert "1 failed, 2 passed" in done.stdout
    assert done.returncode != 0


def test_a_failure_on_one_rank_ends_the_run() -> None:
    done = run("one")
    assert "on rank 1 of 3" in done.stdout
    assert "this is rank 1" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert done.returncode != 0


def test_a_failing_example_is_agreed() -> None:
    done = run("example")
    assert "an example of rank 1" in done.stdout
    assert "FailedElsewhereError" in done.stdout
    assert done.returncode != 0


def test_a_failure_the_others_wait_for_is_told_and_ends_the_run() -> None:
    start = time.monotonic()
    done = run("waiting")
    assert time.monotonic() - start < 30
    assert "rank 1 of 3 failed, and the others wait for it" in done.stderr
    assert "this is rank 1" in done.stderr
    assert done.returncode not in (0, 124)
