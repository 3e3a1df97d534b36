"""Errors that all ranks must meet alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from parlinalg.comm.base import Comm
from parlinalg.errors import ConfigError, ParlinalgError

Result = TypeVar("Result")


def together(
    comm: Comm | Sequence[Comm], function: Callable[[], Result], what: str = "",
    kinds: Sequence[type[ParlinalgError]] = (ConfigError,),
) -> Result:  # fmt: skip
    """Call a function that does not communicate on every rank; if it fails on any, fail on all.  Collective.

    Parameters
    ----------
    comm : Comm, or sequence of them
        Of several, as of a model on several grids: all ranks of all of them fail.
    function : callable
    what : str
        Names the rank's place in the message where only some ranks fail, such as "reading the data".
    kinds : sequence of types
        Errors that are raised as what they are; others are raised as the first of these.

    Raises
    ------
    ConfigError, or one of `kinds`
        On all ranks, with the message of the first rank that failed by one of parlinalg's errors, an OSError or a
        MemoryError.
    """
    made: list[Result] = []
    reported: tuple[int, str] = 0, ""
    cause: Exception | None = None
    try:
        made.append(function())
    except (ParlinalgError, OSError, MemoryError) as error:
        kind = next((i for i, each in enumerate(kinds) if isinstance(error, each)), 0)
        reported, cause = (kind, str(error) or type(error).__name__), error
    failed: ParlinalgError | None = None
    for each in [comm] if isinstance(comm, Comm) else comm:
        everyone = each.share(reported, others="alike")
        if failed is None and any(text for _, text in everyone):
            rank = next(r for r, (_, text) in enumerate(everyone) if text)
            kind, text = everyone[rank]
            reported = kind, text if all(text for _, text in everyone) else f"rank {rank}, {what}: {text}"
            failed = kinds[kind](reported[1])
    if failed is None and cause is not None:  # without any communicator
        raise cause
    if failed is not None:
        raise failed from cause
    return made[0]


def odd_one_out(comm: Comm, *parts: bytes | memoryview) -> int | None:
    """Return the first rank whose bytes are not those of rank 0; None if all are alike.  Collective."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    digests = comm.share(digest.hexdigest(), others="alike")
    return next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
