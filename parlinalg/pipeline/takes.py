"""The numbers that schedules take, said alike by all of them.  Pure."""

from __future__ import annotations

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import Chunk


def line(ranks: int) -> tuple[tuple[Chunk], ...]:
    """Stage r on rank r."""
    return tuple((Chunk(rank),) for rank in range(ranks))


def one_chunk(name: str, chunks: int | None) -> None:
    """Refuse more than one chunk a rank."""
    if chunks not in (None, 1):
        raise ScheduleError(
            f"{name} with chunks={chunks}: a rank holds one stage; leave chunks out, or take the schedule interleaved"
        )


def two_chunks(name: str, chunks: int | None, why: str) -> None:
    """Refuse anything but two chunks a rank."""
    if chunks not in (None, 2):
        raise ScheduleError(f"{name} with chunks={chunks}: {why}; leave chunks out, or give 2")


def steps_of(name: str, microbatches: int, every: int) -> int:
    """The optimizer steps of a run; refuse microbatches that are no multiple of those of a step."""
    if microbatches % every:
        fits = ", ".join(str(d) for d in range(1, microbatches + 1) if microbatches % d == 0)
        raise ScheduleError(
            f"{name} with microbatches={microbatches} and every={every}: the microbatches of a run are a multiple of "
            f"those of a step; every may be {fits}"
        )
    return microbatches // every


def synchronous(name: str, every: int | None) -> None:
    """Refuse to step more than once a run."""
    if every is not None:
        raise ScheduleError(
            f"{name} with every={every}: it steps once, after all microbatches; only pipedream and pipedream-2bw may "
            "step every so many of them"
        )
