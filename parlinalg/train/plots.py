"""The picture of a training: its metrics by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("tab:red", "tab:blue")
WINDOW = 20  # steps whose mean the thick lines show


def plot(path: Path, history: Sequence[Mapping[str, Any]], curves: Mapping[str, str], title: str) -> str:
    """Draw metrics by step as a PNG.

    Parameters
    ----------
    path : Path
    history : sequence of dict
        The metrics of every step.
    curves : dict of str to str
        A panel each: the metric of the steps, and the metric of the data kept out, or an empty text.
    title : str

    Returns
    -------
    str
        Empty, or why there is no picture.
    """
    if not history:
        return "no step was made"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed: pip install 'parlinalg[train]'"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    steps = [h["step"] for h in history]
    for place, (name, held) in enumerate(curves.items()):
        axes, color = figure.add_subplot(1, len(curves), place + 1), COLORS[place % len(COLORS)]
        values = [h[name] for h in history]
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, running_mean(values), color=color, label=f"training, mean of {WINDOW} steps")
        if measured := [(h["step"], h[held]) for h in history if held in h]:
            label = f"{_said(held)}: {measured[-1][1]:.4f}"
            axes.plot(*zip(*measured), color="black", marker="o", markersize=3, linewidth=0.9, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel(_said(name))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
    return ""


def _said(name: str) -> str:
    return name.removesuffix("_per_s").replace("_", " ") + (" a second" if name.endswith("_per_s") else "")


def running_mean(values: Sequence[float]) -> list[float]:
    """For each value the mean of the last `WINDOW` ones.

    >>> running_mean([1.0, 2.0, 3.0])
    [1.0, 1.5, 2.0]
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, i + 1 - WINDOW) for i in range(len(values))]
    return [(sums[i + 1] - sums[s]) / (i + 1 - s) for i, s in enumerate(starts)]
