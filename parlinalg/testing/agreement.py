"""One verdict over all ranks.  PYTEST_DONT_REWRITE: may be imported before pytest loads the plugin.

Ranks meet at points of three levels: within a test (an assertion, an example of hypothesis), at the report of a test,
and at the end of the session.  A rank that has come to a higher level, such as one that failed before an assertion that
the others have reached, waits there; the others fail at theirs, and follow.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import TypeVar

from parlinalg.comm.startup import launched
from parlinalg.comm.verdicts import Verdict, Verdicts, failures_text

Result = TypeVar("Result")

WITHIN, REPORT, END = 0, 1, 2
"""The levels at which ranks meet."""

_open: list[Verdicts] = []


class FailedElsewhereError(AssertionError):
    """The test failed on another rank."""


class OutOfStepError(FailedElsewhereError):
    """The ranks came to different points of a test."""


def verdicts(expected: bool = False) -> Verdicts | None:
    """Return the exchange of verdicts, made at the first call; None on one rank.

    A process that no launcher started among several is one rank, unless `expected` says that a launcher is at work that
    leaves no trace in the environment.
    """
    if not _open and (expected or launched().ranks > 1):
        _open.append(Verdicts())
    return _open[0] if _open and _open[0].size > 1 else None


def agree(failure: str, point: str, level: int = WITHIN, code: int = 0) -> list[Verdict]:
    """Return the verdicts of all ranks once all have come to this point.  Collective over all ranks of the run.

    Raises
    ------
    OutOfStepError
        On every rank that is behind another one, which failed or returned; or if ranks of one level came to
        different points.
    """
    __tracebackhide__ = True
    exchange = verdicts()
    if exchange is None:
        return [Verdict(level, code, 0, failure)]
    while True:
        found = exchange.exchange(failure, point, level, code)
        furthest = max(verdict.level for verdict in found)
        if level < furthest:
            raise OutOfStepError(_out_of_step(found, point, furthest))
        if all(verdict.level == level for verdict in found):
            break
    if any(verdict.point != found[0].point for verdict in found):
        where = [f"rank {rank}: {name}" for rank, name in enumerate(exchange.gather(point))]
        raise OutOfStepError(f"the ranks came to different points of the tests: {'; '.join(where)}")
    return found


def _out_of_step(found: list[Verdict], point: str, furthest: int) -> str:
    ahead = [rank for rank, verdict in enumerate(found) if verdict.level == furthest]
    where = "the end of the test" if furthest == REPORT else "the end of its session"
    text = f"rank{'s' * (len(ahead) > 1)} {', '.join(map(str, ahead))} came to {where} without {point}"
    failures = {rank: verdict.failure for rank, verdict in enumerate(found) if verdict.failure}
    return f"{text}\n{failures_text(failures, len(found))}"


def failures_of(found: list[Verdict]) -> str:
    """Return the failures of all ranks as one text, equal ones once; an empty string if there is none."""
    return failures_text({rank: verdict.failure for rank, verdict in enumerate(found) if verdict.failure}, len(found))


def current_test() -> str:
    """Return the name of the test that runs, as pytest has it."""
    return os.environ.get("PYTEST_CURRENT_TEST", "a program")


def once(function: Callable[[], Result]) -> Result:
    """Return what `function` gives, which rank 0 calls alone, on all ranks.

    What every rank compares with is computed once, while the others leave the cores to rank 0.  Collective over all
    ranks of the run; the result is pickled.
    """
    exchange = verdicts()
    if exchange is None:
        return function()
    failure, result = "", None
    if exchange.rank == 0:
        try:
            result = function()
        except Exception:
            failure = traceback.format_exc()
    if text := failures_of(agree(failure, f"once() in {current_test()}")):
        raise FailedElsewhereError(text)
    return exchange.mpi.bcast(result, 0)


def agreed(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test body that fails on one rank fail on all; for bodies that run many times, under hypothesis.

    `@agreed` stands under `@given(...)`, so that the ranks agree on every example.
    """

    @functools.wraps(body)
    def run(*args: object, **kwargs: object) -> None:
        problem: BaseException | None = None
        try:
            body(*args, **kwargs)
        except Exception as error:
            problem = error
        text = "" if problem is None else "".join(traceback.format_exception(problem))
        found = agree(text, f"an example of {current_test()}")
        if problem is not None:
            raise problem
        if text := failures_of(found):
            raise FailedElsewhereError(text)

    return run
