"""Errors that all ranks must meet alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from parlinalg.comm.base import Comm
from parlinalg.errors import ConfigError, ParlinalgError

Result = TypeVar("Result")


def together(comm: Comm, function: Callable[[], Result], what: str = "") -> Result:
    """Call a function that does not communicate on every rank; if it fails on any, fail on all.  Collective.

    Parameters
    ----------
    comm : Comm
    function : callable
    what : str
        Names the rank's place in the message where only some ranks fail, such as "reading the data".

    Raises
    ------
    ConfigError
        On all ranks, with the message of the first rank that failed by one of parlinalg's errors or an OSError.
    """
    made: list[Result] = []
    problem = ""
    try:
        made.append(function())
    except (ParlinalgError, OSError) as error:
        problem = str(error)
    problems = comm.share(problem)
    if any(problems):
        rank = next(r for r, text in enumerate(problems) if text)
        raise ConfigError(problems[rank] if all(problems) else f"rank {rank}, {what}: {problems[rank]}")
    return made[0]
