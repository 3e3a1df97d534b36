"""Trouble with a disk on one rank is told on all."""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.comm.base import Comm
from parlinalg.comm.together import together
from parlinalg.errors import OffloadError
from parlinalg.grid import worlds

__all__ = ["agree", "number", "worlds"]


def number(comms: Sequence[Comm]) -> int:
    """This process's number among all that were started together: files of several grids may share a folder."""
    return comms[0].world_ranks[comms[0].rank]


def agree(comms: Sequence[Comm], problem: OffloadError | None, what: str) -> None:
    """Raise an OffloadError on all ranks if one has a problem.  Collective.

    Raises
    ------
    OffloadError
        With the message of the first rank that has one.
    """

    def fail() -> None:
        if problem is not None:
            raise problem

    together(comms, fail, what, (OffloadError,))
