"""Draw the figures of the documentation from the library's own tables and schedules: `python docs/figures.py`.

For each grid: its ranks, and the matrices of one product x · w = y at rest.  A block bears the ranks that hold it; the
thick outline is what rank 1 needs, or makes, at work.  For each pipeline schedule: its timeline, as simulated.  The
tiles of a factorization, as they are dealt.  And the losses of the text example's trainings, as `bench/text.py` has
measured them.  Written as plain SVG, so that equal tables give equal files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parlinalg.layout import Layout, coordinates
from parlinalg.linalg.tiles import Deal
from parlinalg.moves import moves
from parlinalg.pipeline.drawing import svg
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.simulate import simulate
from parlinalg.plan import Plan
from parlinalg.schemes import discover

FOLDER = Path(__file__).parent / "figures"
COLOURS = ("#8ecae6", "#ffd166", "#a7c957", "#f4978e", "#cdb4db", "#f7b267", "#90dbc4", "#c9c9c9")
INK, ACCENT = "#1d2433", "#c1121f"
ONE = 1  # the rank whose blocks at work are outlined
SHOWN = {  # file: (scheme, sizes of its axes, plans)
    "1d": ("1d", {"t": 4}, ("expand", "contract")),
    "2d": ("2d", {"r": 2, "c": 2}, ("expand",)),
    "2.5d_batch": ("2.5d, depth on the batch", {"d": 2, "r": 2, "c": 2}, ("expand",)),
    "2.5d_k": ("2.5d, depth on k", {"d": 2, "r": 2, "c": 2}, ("expand",)),
    "3d": ("3d", {"i": 2, "j": 2, "l": 2}, ("expand",)),
}
TIMELINES = {  # file: name, ranks, microbatches, chunks, microbatches of a step
    "schedule_gpipe": ("gpipe", 4, 8, None, None),
    "schedule_1f1b": ("1f1b", 4, 8, None, None),
    "schedule_interleaved": ("interleaved", 4, 8, 2, None),
    "schedule_chimera": ("chimera", 4, 8, None, None),
    "schedule_zb_h1": ("zb-h1", 4, 8, None, None),
    "schedule_zb_v": ("zb-v", 4, 8, None, None),
    "schedule_pipedream": ("pipedream", 4, 12, None, None),
    "schedule_pipedream_2bw": ("pipedream-2bw", 4, 12, None, 4),
}
LOSSES, TILES = "text_losses", "working_form"
FILES = (*SHOWN, *TIMELINES, LOSSES, TILES)
LINES = {"adamw": ("AdamW", "#8d6a9f"), "muon": ("Muon", "#c1121f")}  # optimizer: name, colour
DASHES = ("7 5", "", "2 4")  # of the lowest, the middle and the highest learning rate
SIDE = 128.0
STEP = {0: (74.0, 0.0), 1: (0.0, 74.0), 2: (36.0, -30.0)}  # of an axis on paper: the last one runs to the right
SHORT = {"all_gather": "gathered", "reduce_scatter": "reduce-scattered", "all_reduce": "all-reduced"}


@dataclass
class Paper:
    """An SVG drawing under way."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = INK, thick: float = 1) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{thick:g}"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{INK}" stroke-width="1.2"/>')

    def disc(self, x: float, y: float, fill: str, thick: float, stroke: str) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="14" fill="{fill}" stroke="{stroke}" stroke-width="{thick:g}"/>'
        )

    def text(self, x: float, y: float, words: str, size: float = 13, anchor: str = "middle", fill: str = INK) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}">{words}</text>'
        )

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif"><title>{self.title}</title>'
        )
        back = f'<rect width="{self.width:.0f}" height="{self.height:.0f}" rx="8" fill="#ffffff"/>'
        return "\n".join([head, back, *self.parts, "</svg>\n"])


def rank_of(at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank = 0
    for axis, n in sizes.items():
        rank = rank * n + at[axis]
    return rank


def places(sizes: Mapping[str, int]) -> Iterator[tuple[int, dict[str, int]]]:
    for at in coordinates(tuple(sizes), sizes):
        yield rank_of(at, sizes), at


def draw_grid(paper: Paper, x: float, y: float, sizes: Mapping[str, int]) -> None:
    """The ranks as numbered discs, joined along the axes."""
    axes = tuple(sizes)
    step = {axis: STEP[len(axes) - 1 - i] for i, axis in enumerate(axes)}
    if len(axes) == 1:
        step = {axes[0]: (0.0, 50.0)}

    def place(at: Mapping[str, int]) -> tuple[float, float]:
        return x + sum(at[a] * step[a][0] for a in axes), y + sum(at[a] * step[a][1] for a in axes)

    for _, at in places(sizes):
        for axis in axes:
            if at[axis] + 1 < sizes[axis]:
                paper.line(*place(at), *place({**at, axis: at[axis] + 1}))
    first = dict.fromkeys(axes, 0)
    for axis in axes:
        dx, dy = step[axis]
        far = {**first, axis: sizes[axis] - 1}
        if dx and not dy:  # named at the lower edge, where no other axis runs
            far = {a: sizes[a] - 1 if step[a][0] == 0 else far[a] for a in axes}
        ax, ay = place(far)
        length = (dx * dx + dy * dy) ** 0.5
        paper.text(ax + 30 * dx / length, ay + 30 * dy / length + 5, f"<tspan font-style='italic'>{axis}</tspan>", 15)
    for rank, at in reversed(list(places(sizes))):
        paper.disc(*place(at), COLOURS[rank % 8], *((3, ACCENT) if rank == ONE else (1, INK)))
        px, py = place(at)
        paper.text(px, py + 5, str(rank))


def ranks_text(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ",".join(map(str, ranks))


def draw_matrix(
    paper: Paper, x: float, y: float, name: str, dims: tuple[str, str], rest: Layout, work: Layout,
    sizes: Mapping[str, int], moved: str,
) -> None:  # fmt: skip
    """A matrix at rest, and the part of it that one rank has at work."""
    n = 8
    holders: dict[tuple[range, ...], list[int]] = {}
    for rank, at in places(sizes):
        holders.setdefault(rest.block((n, n), sizes, at), []).append(rank)
    unit = SIDE / n
    for (rows, columns), ranks in holders.items():
        left, top = x + columns.start * unit, y + rows.start * unit
        width, height = len(columns) * unit, len(rows) * unit
        paper.rect(left, top, width, height, COLOURS[ranks[0] % 8] if len(ranks) < len(list(places(sizes))) else "#eee")
        label = ranks_text(ranks)
        paper.text(left + width / 2, top + height / 2 + 4, label, 12 if width > 24 and len(label) < 6 else 9)
    rows, columns = work.block((n, n), sizes, dict(next(at for rank, at in places(sizes) if rank == ONE)))
    paper.rect(
        x + columns.start * unit, y + rows.start * unit, len(columns) * unit, len(rows) * unit, "none", ACCENT, 3
    )
    paper.text(x + SIDE / 2, y - 12, f"{name} [{dims[0]}, {dims[1]}]", 14)
    cuts = ", ".join(f"({' '.join(cut)})" if len(cut) > 1 else cut[0] if cut else "–" for cut in rest.dims)
    paper.text(x + SIDE / 2, y + SIDE + 18, f"at rest ({cuts})", 12)
    paper.text(x + SIDE / 2, y + SIDE + 34, moved, 12, fill=ACCENT)


def told(src: Layout, dst: Layout, sizes: Mapping[str, int]) -> str:
    steps = [s for s in moves(src, dst, sizes) if s.op in SHORT]
    return ", ".join(f"{SHORT[s.op]} along {' '.join(s.axes)}" for s in steps) or "does not move"


def draw_product(paper: Paper, x: float, y: float, plan: Plan, sizes: Mapping[str, int]) -> None:
    gap = SIDE + 62
    rows = (
        ("x", ("m", "k"), plan.x, plan.x_work, (plan.x, plan.x_work)),
        ("w", ("k", "n"), plan.w, plan.w_work, (plan.w, plan.w_work)),
        ("y", ("m", "n"), plan.y, plan.y_work, (plan.y_work, plan.y)),
    )
    for i, (name, dims, rest, work, move) in enumerate(rows):
        draw_matrix(paper, x + i * gap, y, name, dims, rest, work, sizes, told(*move, sizes))
        if i < 2:
            paper.text(x + i * gap + SIDE + 31, y + SIDE / 2 + 8, "·="[i], 26)


def draw_losses(results: list[dict[str, Any]], target: float) -> str:
    """The loss on held-out text against steps, a line a training; a disc where one first reaches the target."""
    paper, (left, top, width, height) = Paper(780, 400, "Loss on held-out text, in nats a byte, against steps"), (
        64, 40, 560, 300)  # fmt: skip
    last, low, high = max(r["steps"] for r in results), 1.0, 3.0

    def at(step: float, loss: float) -> tuple[float, float]:
        return left + width * step / last, top + height * (high - min(loss, high)) / (high - low)

    def path(points: list[tuple[float, float]], colour: str, dash: str, thick: float) -> None:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        paper.parts.append(
            f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="{thick:g}" stroke-dasharray="{dash}"/>'
        )

    for tick in range(5):
        loss = low + (high - low) * tick / 4
        path([at(0, loss), at(last, loss)], "#d9dce3", "", 1)
        paper.text(left - 10, at(0, loss)[1] + 4, f"{loss:g}", 12, "end")
    for step in range(0, last + 1, 100):
        paper.text(at(step, low)[0], top + height + 20, str(step), 12)
    paper.text(left + width / 2, top + height + 42, "steps")
    paper.text(left, top - 14, "nats a byte, held out", 13, "start")
    path([at(0, target), at(last, target)], INK, "3 3", 1)
    paper.text(left + 6, at(0, target)[1] - 6, f"{target:g}", 12, "start")
    rates = {name: sorted(r["lr"] for r in results if r["optimizer"] == name) for name in LINES}
    results = sorted(results, key=lambda r: min(r["losses"].values()), reverse=True)
    for i, result in enumerate(results):
        (name, colour), lr = LINES[result["optimizer"]], result["lr"]
        dash = DASHES[rates[result["optimizer"]].index(lr)]
        points = [at(int(step), loss) for step, loss in result["losses"].items()]
        path(points, colour, dash, 2)
        if result["reached"]:
            x, y = at(result["reached"], result["losses"][str(result["reached"])])
            paper.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        y = top + 14 + 26 * i
        path([(left + width + 16, y - 4), (left + width + 46, y - 4)], colour, dash, 2)
        paper.text(left + width + 52, y, f"{name}, {lr:g}", 12, "start")
    return str(paper)


def draw_tiles() -> str:
    """A matrix at rest and in tiles on a 2 × 2 grid, and the third step of a factorization, by the deal itself."""
    sizes, tiles, side, unit = {"r": 2, "c": 2}, 8, 208.0, 26.0
    paper, deal = Paper(780, 322, "A matrix at rest, in tiles at work, and a step of a factorization"), Deal(sizes, 1)
    owner = {}
    for rank, (i, j) in enumerate(deal.coords):
        owner.update({(int(row), int(col)): rank for row in deal.rows(tiles)[i] for col in deal.columns(tiles)[j]})
    step = 2
    for at, title in enumerate(
        ("at rest: Layout(r, c)", "at work: tiles, dealt in turn", "a step: panel, rows, update")
    ):
        left, top = 22 + at * 256.0, 46.0
        for (i, j), rank in sorted(owner.items()):
            shown = rank if at else rank_of({"r": i * 2 // tiles, "c": j * 2 // tiles}, sizes)
            done = at == 2 and min(i, j) < step
            paper.rect(left + j * unit, top + i * unit, unit, unit, "#f1f2f5" if done else COLOURS[shown], "#ffffff")
            if not done:
                paper.text(left + j * unit + unit / 2, top + i * unit + unit / 2 + 4, str(shown), 11)
        if at == 2:
            first, rest = step * unit, side - step * unit
            paper.rect(left + first, top + first, unit, rest, "none", ACCENT, 3)
            paper.rect(left + first + unit, top + first, rest - unit, unit, "none", INK, 3)
            paper.text(left + side / 2, top + side + 40, "red: panel, sent along grid rows;", 11, fill=ACCENT)
            paper.text(left + side / 2, top + side + 54, "black: rows of U, sent down grid columns", 11)
        paper.text(left + side / 2, 30, title, 14)
    paper.text(22 + side / 2, 46 + side + 20, "one block a rank", 12)
    paper.text(278 + side / 2, 46 + side + 20, "every rank has part of what is left", 12)
    paper.text(534 + side / 2, 46 + side + 20, "the rest is updated by products", 12)
    return str(paper)


def draw(file: str) -> str:
    """A figure, as SVG."""
    if file == TILES:
        return draw_tiles()
    if file == LOSSES:
        found = json.loads((FOLDER / f"{file}.json").read_text())
        return draw_losses(found["results"], found["target"])
    if file in TIMELINES:
        schedule, ranks, microbatches, chunks, every = TIMELINES[file]
        return svg(simulate(make_schedule(schedule, ranks, microbatches, chunks, every=every)))
    name, sizes, plans = SHOWN[file]
    scheme = discover()[name].SCHEME.leading(1)
    row = SIDE + 84
    grid = " × ".join(f"{axis}={n}" for axis, n in sizes.items())
    paper = Paper(780, 20 + row * len(plans) + 14, f"{name} on {grid}")
    paper.text(90, 26, f"{name.split(',')[0].upper()}: {grid}", 14)
    draw_grid(paper, 46 if len(sizes) > 1 else 90, 84 + 20 * (len(sizes) > 2), sizes)
    for i, kind in enumerate(plans):
        top = 48 + i * row
        plan = scheme.expand if kind == "expand" else scheme.contract
        draw_product(paper, 220, top, plan, sizes)
        if len(plans) > 1:
            paper.text(196, top + SIDE / 2, kind, 12, "end")
    return str(paper)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file in FILES:
        (FOLDER / f"{file}.svg").write_text(draw(file))
    print(f"{len(FILES)} figures in {FOLDER}", file=sys.stderr)


if __name__ == "__main__":
    main()
