"""A timeline as PNG, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from parlinalg.errors import ConfigError
from parlinalg.pipeline.drawing.lanes import INK, PALE, end, lanes, legend
from parlinalg.pipeline.simulate import Simulation

MEASURED = 0.66  # the height of a measured lane, where a simulated one has 1


def png(simulation: Simulation, measured: Iterable[Sequence[object]] | None = None) -> bytes:
    """The timeline as the contents of a PNG file; `measured` as in `svg`.

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
