"""Pipeline schedules, pure, one a file, found by listing this folder.

A file defines `NAME`, and `generate(ranks, microbatches, chunks, every)`, which gives the schedule or refuses the
numbers, saying which it can take.  Its orders are generators of computations; `complete_schedule` adds the messages.
"""

from __future__ import annotations

import pkgutil
import threading
from functools import cache, lru_cache
from importlib import import_module
from typing import Protocol, cast

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import Chunk, Schedule, forward_then_backward

__all__ = ["ScheduleFile", "discover", "make_schedule", "of_fewer"]


class ScheduleFile(Protocol):
    """The names that a file of this folder defines."""

    NAME: str

    def generate(self, ranks: int, microbatches: int, chunks: int | None, every: int | None) -> Schedule: ...


@cache
def _files() -> dict[str, ScheduleFile]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    found = [cast(ScheduleFile, m) for m in (import_module(f"{__name__}.{n}") for n in names) if hasattr(m, "NAME")]
    return {file.NAME: file for file in found}


def discover() -> dict[str, ScheduleFile]:
    """Return all schedules by name, found by listing the folder."""
    return dict(_files())


def make_schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, *, every: int | None = None
) -> Schedule:  # fmt: skip
    """Return the schedule of a name.

    Parameters
    ----------
    name : str
        One of `discover()`.
    ranks : int
        The pipeline ranks.
    microbatches : int
        In one run, between two flushes of the pipeline.
    chunks : int, optional
        Stages that a rank holds, in schedules that let one choose.
    every : int, optional
        In asynchronous schedules, the microbatches of an optimizer step: there may be several steps in a run.

    Raises
    ------
    ScheduleError
        If there is no such schedule, or it cannot take these numbers; the message says which it can.

    >>> [i.op.value + str(i.microbatch) for i in make_schedule("1f1b", 1, 2).orders[0][:4]]
    ['F0', 'B0', 'F1', 'B1']
    """
    if name not in _files():
        raise ScheduleError(f"there is no pipeline schedule {name!r}; there are {', '.join(sorted(_files()))}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks), ("every", every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ScheduleError(f"{name} with {what}={value!r}: it takes a whole number of at least 1")
    with _MAKING:  # ranks that are imagined together ask for the same one at the same time
        return _generated(name, ranks, microbatches, chunks, every)


def of_fewer(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the schedule of a synchronous step with fewer microbatches, on the same chunks.

    Where the schedule cannot take their number, all forward passes come before all backward passes.
    """
    chunks = max(map(len, schedule.chunks)) if schedule.copies == 1 else None
    try:
        found = make_schedule(schedule.name, schedule.ranks, microbatches, chunks)
    except ScheduleError:
        return forward_then_backward(schedule, microbatches)
    return found if found.chunks == schedule.chunks else forward_then_backward(schedule, microbatches)


_MAKING = threading.Lock()


@lru_cache(maxsize=16)
def _generated(name: str, ranks: int, microbatches: int, chunks: int | None, every: int | None) -> Schedule:
    return _files()[name].generate(ranks, microbatches, chunks, every)


# ------------------------------------------------------------------ arguments of schedules
def one_stage_each(ranks: int) -> tuple[tuple[Chunk], ...]:
    """Return the chunks of a pipeline with stage r on rank r."""
    return tuple((Chunk(rank),) for rank in range(ranks))


def require_one_chunk(name: str, chunks: int | None) -> None:
    """Refuse more than one chunk a rank."""
    if chunks not in (None, 1):
        raise ScheduleError(
            f"{name} with chunks={chunks}: a rank holds one stage; leave chunks out, or take the schedule interleaved"
        )


def require_two_chunks(name: str, chunks: int | None, why: str) -> None:
    """Refuse anything but two chunks a rank."""
    if chunks not in (None, 2):
        raise ScheduleError(f"{name} with chunks={chunks}: {why}; leave chunks out, or give 2")


def steps_per_run(name: str, microbatches: int, every: int) -> int:
    """Return the optimizer steps of a run; raise unless the microbatches are a multiple of those of a step."""
    if microbatches % every:
        fits = ", ".join(str(d) for d in range(1, microbatches + 1) if microbatches % d == 0)
        raise ScheduleError(
            f"{name} with microbatches={microbatches} and every={every}: the microbatches of a run are a multiple of "
            f"those of a step; every may be {fits}"
        )
    return microbatches // every


def require_synchronous(name: str, every: int | None) -> None:
    """Refuse to step more than once a run."""
    if every is not None:
        raise ScheduleError(
            f"{name} with every={every}: it steps once, after all microbatches; only pipedream and pipedream-2bw may "
            "step every so many of them"
        )
