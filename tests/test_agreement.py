"""A test that fails on one rank fails on all, in bounded time and with that rank's failure."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.launching import launch

pytestmark = [pytest.mark.serial, pytest.mark.one_in(3), pytest.mark.timeout(120)]


def run(case: str, **env: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cases_of_agreement.py"]
    return launch(3, arguments, env={"CASE": case, "PARLINALG_TEST_GRACE": "2", **env}, timeout=100)


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


def test_a_failure_the_others_wait_for_is_named_and_ends_the_run() -> None:
    done = run("waiting")
    told = "tests/cases_of_agreement.py::test_fails_while_the_others_wait_for_it failed on rank 1 of 3"
    assert f"{told}; ranks 0, 2 did not come to its end:\non rank 1 of 3:\n" in done.stderr
    assert "this is rank 1" in done.stderr
    assert "failed before: tests/cases_of_agreement.py::test_fails_before\n" in done.stderr
    assert re.search(r"\nrank 1 waited \d\.\d s for the others, and ends the run\n", done.stderr)
    assert done.returncode not in (0, 124)


def test_all_ranks_that_failed_are_named() -> None:
    done = run("two waited for")
    assert "failed on ranks 1, 2 of 3; rank 0 did not come to its end:" in done.stderr
    assert all(f"on rank {rank} of 3:\n" in done.stderr for rank in (1, 2))
    assert all(f"this is rank {rank}" in done.stderr for rank in (1, 2))
    assert done.stderr.count("ends the run") == 1
    assert done.returncode not in (0, 124)


def test_a_failure_is_named_before_a_limit_of_time_kills_the_ranks_that_wait() -> None:
    done = run("timeout", PARLINALG_TEST_GRACE="100")
    assert "::test_fails_late failed on rank 1 of 3; ranks 0, 2 did not come to its end" in done.stderr
    assert "this is rank 1" in done.stderr
    assert done.returncode not in (0, 124)


@pytest.mark.parametrize(
    ("case", "told"),
    [("compare", ("rank 1 came to the end of the test without a comparison with the serial result in tests/cases_of",
                  "this is rank 1", "1 failed, 2 passed")),
     ("return", ("rank 1 came to the end of the test without a comparison", "1 failed, 1 passed")),
     ("skip", ("skipped on ranks 1 of 3 alone", "1 failed, 1 passed")),
     ("xfail", ("1 passed, 1 xfailed",)),
     ("exit", ("rank 1 came to the end of its session without tests/cases_of_agreement.py::test_ends_the", "1 failed")),
     ("collect", ("the ranks collected different tests", "rank 1: tests/cases_of_agreement.py::test_is_another_one")),
     ("replicas", ("AssertionError: on rank 2 of 3:", "the result['A']: this rank's replica has not the bits of",
                   "1 failed, 2 passed"))],
)  # fmt: skip
def test_ranks_out_of_step_fail_together(case: str, told: tuple[str, ...]) -> None:
    done = run(case)
    assert [text for text in told if text not in done.stdout + done.stderr] == [], done.stdout + done.stderr
    assert done.returncode not in (0, 124)
