"""What every drawing shows: lanes of labelled boxes, one a rank, or two where a measured run is under a simulated one.

A label is the operation and the microbatch, F3 or B3 (I and W are the parts of B), and a letter for the chunk where
ranks hold several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parlinalg.errors import ScheduleError
from parlinalg.pipeline.schedule import COMPUTE, Op, Schedule
from parlinalg.pipeline.simulate import Simulation, Span

#: By operation: its word, and its colours by chunk, later chunks darker.
LOOK = {
    Op.FORWARD: ("forward", ("#a9d6f5", "#5fa8dc", "#2f7fb8")),
    Op.BACKWARD: ("backward", ("#b9dfa3", "#7fbf6a", "#4b9440")),
    Op.BACKWARD_INPUT: ("backward, input part", ("#b9dfa3", "#7fbf6a", "#4b9440")),
    Op.BACKWARD_WEIGHT: ("backward, weight part", ("#ffd98a", "#f0b13c", "#c98812")),
    Op.REDUCE_GRADIENTS: ("reduce gradients", ("#d9c8ee",)),
    Op.STEP: ("step", ("#e4a3b8",)),
}
INK, PALE = "#1d2433", "#f1f2f4"


@dataclass(frozen=True)
class Box:
    """A span on paper."""

    span: Span
    label: str
    colour: str

    @property
    def dark(self) -> bool:
        """Whether what is written on it had better be white."""
        r, g, b = (int(self.colour[k : k + 2], 16) for k in (1, 3, 5))
        return 0.3 * r + 0.59 * g + 0.11 * b < 125


@dataclass(frozen=True)
class Lane:
    """A rank's time; `measured` where it is that of a run."""

    rank: int
    measured: bool
    boxes: tuple[Box, ...]


def lanes(simulation: Simulation, measured: Iterable[Sequence[object]] | None = None) -> list[Lane]:
    """The lanes of a drawing, rank by rank: the simulated one, then the measured one.

    Parameters
    ----------
    simulation : Simulation
    measured : iterable of (rank, op, chunk, microbatch, start, stop), optional
        Spans of a run of the same schedule, in the unit of the costs; the first of them begins at 0 on paper.

    Raises
    ------
    ScheduleError
        If a measured span belongs to a rank or chunk that the schedule does not have.
    """
    schedule = simulation.schedule
    found = [(False, simulation.spans)] if measured is None else [
        (False, simulation.spans), (True, shifted(schedule, measured)),
    ]  # fmt: skip
    return [
        Lane(rank, of_run, tuple(_box(schedule, s) for s in spans if s.rank == rank and s.op in LOOK))
        for rank in range(schedule.ranks) for of_run, spans in found
    ]  # fmt: skip


def shifted(schedule: Schedule, measured: Iterable[Sequence[object]]) -> tuple[Span, ...]:
    """Measured spans as if the first one of all ranks began at 0."""
    spans = [Span(*m) for m in measured]  # type: ignore[arg-type]
    for span in spans:
        if not 0 <= span.rank < schedule.ranks or not 0 <= span.chunk < len(schedule.chunks[span.rank]):
            raise ScheduleError(
                f"a measured span {tuple(span)!r}: {schedule.name} has ranks 0 to {schedule.ranks - 1} with "
                f"{[len(held) for held in schedule.chunks]} chunks"
            )
    first = min((s.start for s in spans), default=0.0)
    moved = (s._replace(start=s.start - first, stop=s.stop - first) for s in spans)
    return tuple(sorted(moved, key=lambda s: (s.rank, s.start)))


def end(found: Iterable[Lane]) -> float:
    """Where the last box ends."""
    return max((box.span.stop for lane in found for box in lane.boxes), default=0.0)


def label(schedule: Schedule, span: Span) -> str:
    """What is written on a span."""
    if span.op not in COMPUTE:
        return span.op.name[0] if span.op is Op.REDUCE_GRADIENTS else "S"
    several = len(schedule.chunks[span.rank]) > 1
    return f"{span.op.value}{span.microbatch}{letter(span.chunk) if several else ''}"


def letter(chunk: int) -> str:
    """The letter of a chunk: a, b, …, z, then its number."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def legend(schedule: Schedule, found: Iterable[Lane]) -> list[tuple[str, str]]:
    """The words and colours of what is drawn."""
    drawn = {(box.span.op, box.span.chunk if box.span.op in COMPUTE else 0) for lane in found for box in lane.boxes}
    several = any(len(held) > 1 for held in schedule.chunks)
    entries = []
    for op, (word, _) in LOOK.items():
        for chunk in sorted(c for o, c in drawn if o is op):
            which = f", chunk {letter(chunk)}" if several and op in COMPUTE else ""
            entries.append((word + which, _colour(op, chunk)))
    return entries


def _box(schedule: Schedule, span: Span) -> Box:
    return Box(span, label(schedule, span), _colour(span.op, span.chunk))


def _colour(op: Op, chunk: int) -> str:
    colours = LOOK[op][1]
    return colours[chunk % len(colours)]
