"""Errors that all ranks must meet alike."""

from __future__ import annotations

import hashlib
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


def odd_one_out(comm: Comm, *parts: bytes | memoryview) -> int | None:
    """The first rank whose bytes are not those of rank 0; None if all are alike.  Collective."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    digests = comm.share(digest.hexdigest())
    return next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
