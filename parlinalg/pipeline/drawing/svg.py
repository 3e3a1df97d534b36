"""A timeline as SVG, plain text, so that equal schedules give equal files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from parlinalg.pipeline.drawing.lanes import INK, PALE, Box, Lane, end, lanes, legend
from parlinalg.pipeline.simulate import Simulation

LEFT, RIGHT, TOP, WIDTH = 64.0, 16.0, 40.0, 960.0
HIGH, GAP, LOW = 26.0, 6.0, 18.0  # of a lane, between ranks, of a measured lane


def svg(simulation: Simulation, measured: Iterable[Sequence[object]] | None = None) -> str:
    """The timeline of a simulation as SVG; with `measured` (as in `overlay`) that of a run below it, rank by rank."""
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
    parts += _axis(y, until, scale)
    parts += _legend(legend(schedule, found), y + 30)
    title = f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches"
    words = f"{title}; idle {100 * simulation.bubble:.1f}%" + ("; below each rank, as measured" if measured else "")
    height = y + 50 + 18 * (len(legend(schedule, found)) // 5)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif"><title>{escape(title)}</title>'
    )
    back = f'<rect width="{WIDTH:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, back, _text(LEFT, 24, words, 14, "start"), *parts, "</svg>\n"])


def overlay(simulation: Simulation, spans: Iterable[Sequence[object]]) -> str:
    """A measured run over its simulation, as SVG.

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
        _text(LEFT - 8, y + high / 2 + 4, words, 9 if lane.measured else 12, "end"),
        _rect(LEFT, y, until * scale, high, PALE, "none"),
    ]
    for box in lane.boxes:
        parts += _drawn(box, y, high, scale)
    return parts


def _drawn(box: Box, y: float, high: float, scale: float) -> list[str]:
    x, width = LEFT + box.span.start * scale, (box.span.stop - box.span.start) * scale
    parts = [_rect(x, y, width, high, box.colour, "#ffffff")]
    size = min(11.0, high * 0.55, 1.45 * width / len(box.label))
    if size >= 5:
        parts.append(
            _text(x + width / 2, y + high / 2 + size * 0.36, box.label, size, fill="#fff" if box.dark else INK)
        )
    return parts


def _axis(y: float, until: float, scale: float) -> list[str]:
    step = _round_step(until / 10)
    ticks = [k * step for k in range(int(until / step + 1e-9) + 1)]
    marks = [_text(LEFT + t * scale, y + 14, f"{t:g}", 10) for t in ticks]
    return [f'<path d="M{LEFT + t * scale:.1f} {y:.1f}v4" stroke="{INK}"/>' for t in ticks] + marks


def _round_step(least: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is no less."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 < least:
        power *= 10
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def _legend(entries: list[tuple[str, str]], y: float) -> list[str]:
    parts = []
    for k, (word, colour) in enumerate(entries):
        x, at = LEFT + k % 5 * 176, y + k // 5 * 18
        parts += [_rect(x, at - 10, 12, 12, colour, "none"), _text(x + 18, at, word, 11, "start")]
    return parts


def _rect(x: float, y: float, w: float, h: float, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{fill}" stroke="{stroke}" '
        'stroke-width="0.7"/>'
    )


def _text(x: float, y: float, words: str, size: float, anchor: str = "middle", fill: str = INK) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:.3g}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(words)}</text>"
    )
