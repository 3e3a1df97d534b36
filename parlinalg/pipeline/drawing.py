"""Drawings of a timeline: as text, SVG, PNG and a trace for Chrome.

Every drawing shows lanes of labelled boxes, one lane a rank, or two where a measured run is under a simulated one.  A
label is the operation and the microbatch, F3 or B3 (I and W are the parts of B), and a letter for the chunk where ranks
hold several.  Equal schedules give equal files.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape

from parlinalg.errors import ConfigError
from parlinalg.pipeline.schedule import COMPUTE, Op, Schedule
from parlinalg.pipeline.simulate import Simulation, Span, shifted

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
    """A drawn span."""

    span: Span
    label: str
    colour: str

    @property
    def dark(self) -> bool:
        """True if the label needs white text."""
        r, g, b = (int(self.colour[k : k + 2], 16) for k in (1, 3, 5))
        return 0.3 * r + 0.59 * g + 0.11 * b < 125


@dataclass(frozen=True)
class Lane:
    """A rank's time; `measured` where it is that of a run."""

    rank: int
    measured: bool
    boxes: tuple[Box, ...]


def lanes(simulation: Simulation, measured: Iterable[Sequence[object]] | None = None) -> list[Lane]:
    """Return the lanes of a drawing, rank by rank: the simulated one, then the measured one.

    Parameters
    ----------
    simulation : Simulation
    measured : iterable of (rank, op, chunk, microbatch, start, stop), optional
        Spans of a run of the same schedule, in the unit of the costs; the first of them is drawn from 0.

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


def end(found: Iterable[Lane]) -> float:
    """Return the time at which the last box ends."""
    return max((box.span.stop for lane in found for box in lane.boxes), default=0.0)


def label(schedule: Schedule, span: Span) -> str:
    """Return the label of a span."""
    if span.op not in COMPUTE:
        return span.op.name[0] if span.op is Op.REDUCE_GRADIENTS else "S"
    several = len(schedule.chunks[span.rank]) > 1
    return f"{span.op.value}{span.microbatch}{letter(span.chunk) if several else ''}"


def letter(chunk: int) -> str:
    """Return the letter of a chunk: a, b, …, z, then its number."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def legend(schedule: Schedule, found: Iterable[Lane]) -> list[tuple[str, str]]:
    """Return the words and colours of what is drawn."""
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


COLUMNS = 400  # of time at most, where costs have no larger common measure than their shortest


def staircase(simulation: Simulation) -> str:
    """Return the simulated timeline as text: `F0` is microbatch 0's forward pass, `-` goes on with it, `.` is idle.

    A column is the greatest common measure of all times; where that would make too many, the shortest computation, and
    times are rounded.

    >>> from parlinalg.pipeline.schedules import make_schedule
    >>> from parlinalg.pipeline.simulate import Costs, simulate
    >>> print(staircase(simulate(make_schedule("1f1b", 2, 3), Costs(forward=1, backward=2))))
    rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
    rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    """
    rows = lanes(simulation)
    unit = _unit(simulation)
    width = 1 + max((len(box.label) for row in rows for box in row.boxes), default=1)
    name = len(str(simulation.schedule.ranks - 1))
    total = _column(simulation.makespan, unit)
    lines = []
    for row in rows:
        text, at = "", 0
        for box in row.boxes:
            start, stop = _column(box.span.start, unit), _column(box.span.stop, unit)
            if stop > start:
                long = stop - start > 1
                text += _idle(start - at, width)
                text += box.label.ljust((stop - start) * width - 1, "-" if long else " ") + " "
                at = stop
        lines.append(f"rank {row.rank:{name}}  {text}{_idle(total - at, width)}".rstrip())
    return "\n".join(lines)


def _idle(columns: int, width: int) -> str:
    return ".".ljust(width) * columns


def _column(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


def _unit(simulation: Simulation) -> float:
    times = {t for s in simulation.spans for t in (s.start, s.stop) if t > 0}
    if not times:
        return 1.0
    exact = [Fraction(t).limit_denominator(10**6) for t in times]
    common = math.lcm(*(t.denominator for t in exact))
    unit = math.gcd(*(int(t * common) for t in exact)) / common
    if unit > 0 and simulation.makespan / unit <= COLUMNS:
        return unit
    return min(s.stop - s.start for s in simulation.spans if s.stop > s.start)


LEFT, RIGHT, TOP, WIDTH = 64.0, 16.0, 40.0, 960.0
HIGH, GAP, LOW = 26.0, 6.0, 18.0  # of a lane, between ranks, of a measured lane


def svg(simulation: Simulation, measured: Iterable[Sequence[object]] | None = None) -> str:
    """Return a simulation's timeline as SVG; with `measured` (as in `overlay`) each rank's run is drawn below it."""
    schedule, found = simulation.schedule, lanes(simulation, measured)
    until = end(found) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / until
    parts, y = [], TOP
    for lane in found:
        high = LOW if lane.measured else HIGH
        if not lane.measured and y > TOP:
            y += GAP
        parts += _lane(lane, y, high, scale, until)
        y += high
    parts += time_axis(y, until, scale)
    parts += legend_keys(legend(schedule, found), y + 30)
    title = f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches"
    words = f"{title}; idle {100 * simulation.bubble:.1f}%" + ("; below each rank, as measured" if measured else "")
    height = y + 50 + 18 * (len(legend(schedule, found)) // 5)
    return page(words, parts, height, title)


def page(words: str, parts: Sequence[str], height: float, title: str | None = None) -> str:
    """Return a drawing as an SVG file, with a line of words above it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif"><title>{escape(words if title is None else title)}</title>'
    )
    back = f'<rect width="{WIDTH:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, back, written(LEFT, 24, words, 14, "start"), *parts, "</svg>\n"])


def overlay(simulation: Simulation, spans: Iterable[Sequence[object]]) -> str:
    """Return a measured run over its simulation, as SVG.

    Parameters
    ----------
    simulation : Simulation
        With costs in the unit of the measured times.
    spans : iterable of (rank, op, chunk, microbatch, start, stop)
        As a worker records them, of all ranks and by one clock.
    """
    return svg(simulation, list(spans))


def _lane(lane: Lane, y: float, high: float, scale: float, until: float) -> list[str]:
    words = "measured" if lane.measured else f"rank {lane.rank}"
    parts = [
        written(LEFT - 8, y + high / 2 + 4, words, 9 if lane.measured else 12, "end"),
        rectangle(LEFT, y, until * scale, high, PALE, "none"),
    ]
    for box in lane.boxes:
        parts += _drawn(box, y, high, scale)
    return parts


def _drawn(box: Box, y: float, high: float, scale: float) -> list[str]:
    x, width = LEFT + box.span.start * scale, (box.span.stop - box.span.start) * scale
    parts = [rectangle(x, y, width, high, box.colour, "#ffffff")]
    size = min(11.0, high * 0.55, 1.45 * width / len(box.label))
    if size >= 5:
        parts.append(
            written(x + width / 2, y + high / 2 + size * 0.36, box.label, size, fill="#fff" if box.dark else INK)
        )
    return parts


def time_axis(y: float, until: float, scale: float) -> list[str]:
    """Return an axis with about ten ticks from time 0 to `until` below a drawing, as SVG."""
    step = _round_step(until / 10)
    ticks = [k * step for k in range(int(until / step + 1e-9) + 1)]
    marks = [written(LEFT + t * scale, y + 14, f"{t:g}", 10) for t in ticks]
    return [f'<path d="M{LEFT + t * scale:.1f} {y:.1f}v4" stroke="{INK}"/>' for t in ticks] + marks


def _round_step(least: float) -> float:
    """Return the least 1, 2 or 5 times a power of ten that is no less."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 < least:
        power *= 10
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def legend_keys(entries: list[tuple[str, str]], y: float) -> list[str]:
    """Return squares of colours with their words, five in a row, as SVG."""
    parts = []
    for k, (word, colour) in enumerate(entries):
        x, at = LEFT + k % 5 * 176, y + k // 5 * 18
        parts += [rectangle(x, at - 10, 12, 12, colour, "none"), written(x + 18, at, word, 11, "start")]
    return parts


def rectangle(x: float, y: float, w: float, h: float, fill: str, stroke: str) -> str:
    """Return a rectangle as SVG."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{fill}" stroke="{stroke}" '
        'stroke-width="0.7"/>'
    )


def written(x: float, y: float, words: str, size: float, anchor: str = "middle", fill: str = INK) -> str:
    """Return a line of text as SVG."""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:.3g}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(words)}</text>"
    )


MEASURED = 0.66  # the height of a measured lane, where a simulated one has 1


def png(simulation: Simulation, measured: Iterable[Sequence[object]] | None = None) -> bytes:
    """Return the timeline as the contents of a PNG file; `measured` as in `svg`.

    Raises
    ------
    ConfigError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError:
        raise ConfigError(
            "matplotlib, which draws PNG, is not installed: pip install 'parlinalg[train]', or draw SVG"
        ) from None
    schedule, found = simulation.schedule, lanes(simulation, measured)
    until, y = end(found) or 1.0, 0.0
    places: list[tuple[float, str]] = []
    figure = Figure(figsize=(12, 1.6 + 0.36 * len(found)), layout="constrained")
    axes = figure.add_subplot()
    for lane in found:
        high = MEASURED if lane.measured else 1.0
        y += 0.0 if lane.measured or not places else 0.25
        places.append((y + high / 2, "measured" if lane.measured else f"rank {lane.rank}"))
        axes.add_patch(Rectangle((0, y), until, high, facecolor=PALE))
        for box in lane.boxes:
            start, length = box.span.start, box.span.stop - box.span.start
            axes.add_patch(Rectangle((start, y), length, high, facecolor=box.colour, edgecolor="white", linewidth=0.7))
            size = min(9.0, 8 * high, 1000 * length / until / len(box.label))
            if size >= 4:
                ink = "white" if box.dark else INK
                axes.text(start + length / 2, y + high / 2, box.label, size=size, color=ink, ha="center", va="center")
        y += high
    axes.set(xlim=(0, until), ylim=(y, 0), xlabel="time")
    axes.set_yticks([at for at, _ in places], [words for _, words in places])
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches; idle {simulation.bubble:.1%}"
    )
    handles = [Patch(facecolor=colour, label=word) for word, colour in legend(schedule, found)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def chrome(
    simulation: Simulation, measured: Iterable[Sequence[object]] | None = None, *, microseconds: float = 1e6
) -> str:  # fmt: skip
    """Return the timeline as JSON: the simulation is process 0, a measured run process 1, ranks are their threads.

    Parameters
    ----------
    simulation : Simulation
    measured : iterable of (rank, op, chunk, microbatch, start, stop), optional
    microseconds : float
        In a unit of the costs, by default a second.
    """
    found = lanes(simulation, measured)
    names = [simulation.schedule.name, *(["measured"] if measured is not None else [])]
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in enumerate(names)
    ]
    for lane in found:
        pid = int(lane.measured)
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane.rank, "args": {"name": f"rank {lane.rank}"}}
        )
        events += [{**event, "pid": pid, "tid": lane.rank} for event in _events(simulation, lane, microseconds)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None, separators=(",", ":")) + "\n"


def _events(simulation: Simulation, lane: Lane, scale: float) -> list[dict[str, object]]:
    events = []
    for box in lane.boxes:
        span = box.span
        args: dict[str, object] = {"microbatch": span.microbatch}
        if span.op in COMPUTE:
            chunk = simulation.schedule.chunks[span.rank][span.chunk]
            args |= {"stage": chunk.stage, "copy": chunk.copy}
        start, length = round(span.start * scale, 3), round((span.stop - span.start) * scale, 3)
        word = LOOK[span.op][0]
        events.append({"ph": "X", "name": box.label, "cat": word, "ts": start, "dur": length, "args": args})
    return events
