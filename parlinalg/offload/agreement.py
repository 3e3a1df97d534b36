"""Trouble with a disk on one rank is told on all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parlinalg.comm.base import Comm
from parlinalg.errors import OffloadError
from parlinalg.grid import Grid


def worlds(grids: Iterable[Grid]) -> list[Comm]:
    """The communicators over all ranks of each grid, once each, in order."""
    return list({id(g.world): g.world for g in grids}.values())


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
    for comm in comms:
        texts = comm.share("" if problem is None else str(problem))
        if any(texts):
            rank = next(r for r, text in enumerate(texts) if text)
            told = texts[rank] if comm.size == 1 or all(texts) else f"rank {rank}, {what}: {texts[rank]}"
            raise OffloadError(told) from problem
    if problem is not None:
        raise problem
