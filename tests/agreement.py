"""Verdicts agreed by all ranks, so that a test which fails on one fails on all, at the same point.

`@agreed` under `@given(...)` agrees on every example; the hooks in `conftest.py` agree on every test.
"""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

GRACE = float(os.environ.get("PARLINALG_TEST_GRACE", "20"))  # seconds a failed rank waits for the others
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_comm: Any = None


def launched_ranks() -> int | None:
    """How many ranks an mpiexec started this process among; None where none did."""
    found = [int(os.environ[name]) for name in LAUNCHED if os.environ.get(name, "").isdigit()]
    return max(found) if found else None


def verdict_comm() -> Any:
    """The communicator of the verdicts, apart from every other; None on one rank."""
    global _comm
    if _comm is None and (launched_ranks() or 1) > 1:
        from mpi4py import MPI

        _comm = MPI.COMM_WORLD.Dup()
    return _comm


def agree(failure: str) -> list[str]:
    """Every rank's failure, an empty string where there is none.  Collective over all ranks.

    A failed rank whose peers do not come within `GRACE` seconds, because they wait for it in a collective, ends the run
    with its failure.
    """
    comm = verdict_comm()
    if comm is None:
        return [failure]
    mine, all_of_them = bytearray([bool(failure)]), bytearray(comm.size)
    request = comm.Iallgather(mine, all_of_them)
    if not failure:
        request.Wait()
    else:
        end = time.monotonic() + GRACE
        while not request.Test():
            if time.monotonic() > end:
                say(f"rank {comm.rank} of {comm.size} failed, and the others wait for it:\n{failure}\n")
                comm.Abort(1)
            time.sleep(0.001)
    return list(comm.allgather(failure)) if any(all_of_them) else [""] * comm.size


def once(function: Callable[[], Result]) -> Result:
    """What a function gives, which rank 0 calls alone, on all ranks: what every rank is compared with is computed once,
    while the others leave the cores to it.  Collective over all ranks."""
    comm = verdict_comm()
    if comm is None:
        return function()
    result: Any = None
    problem = ""
    if comm.rank == 0:
        try:
            result = function()
        except Exception:
            problem = traceback.format_exc()
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    problem, result = comm.bcast((problem, result), 0)
    if problem:
        raise FailedElsewhereError(f"on rank 0:\n{problem}")
    return result


def say(text: str) -> None:
    """Write to the real standard error, past pytest's capture."""
    os.write(_stderr, text.encode())


_stderr = 2


def keep_stderr(descriptor: int) -> None:
    global _stderr
    _stderr = descriptor


def told(failures: list[str]) -> str:
    """The failures of all ranks as one text, equal ones once."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(failures):
        if text:
            by_text.setdefault(text, []).append(rank)
    return "\n".join(
        f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(failures)}:\n{text}"
        for text, ranks in by_text.items()
    )


class FailedElsewhereError(AssertionError):
    """The test failed on another rank."""


def agreed(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test body that fails on one rank fail on all; for bodies that run many times, under hypothesis."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        problem: BaseException | None = None
        try:
            body(*args, **kwargs)
        except Exception as error:
            problem = error
        text = "" if problem is None else "".join(traceback.format_exception(problem))
        failures = agree(text)
        if problem is not None:
            raise problem
        if any(failures):
            raise FailedElsewhereError(told(failures))

    return run
