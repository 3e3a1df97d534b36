"""The picture of a training: its metrics by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot"]

COLORS = ("tab:red", "tab:blue")
WINDOW = 21  # steps whose mean the thick lines show, at most; and a fifth of all steps


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
    for place, (name, held) in enumerate(curves.items()):
        axes, color = figure.add_subplot(1, len(curves), place + 1), COLORS[place % len(COLORS)]
        drawn = [(h["step"], h[name]) for h in history if name in h]  # a line may be of an evaluation alone
        steps, values = [step for step, _ in drawn], [value for _, value in drawn]
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        half = half_width(len(values))
        label = f"training, mean of {2 * half + 1} steps" if half else "training"
        axes.plot(steps, centred_mean(values, half), color=color, label=label)
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


def half_width(n: int) -> int:
    """Return how many steps on either side of each the mean of n steps takes: few where there are few.

    >>> [half_width(n) for n in (1, 10, 50, 1000)]
    [0, 1, 5, 10]
    """
    return min(WINDOW // 2, n // 10)


def centred_mean(values: Sequence[float], half: int) -> list[float]:
    """Return for each value the mean of it and of `half` values on either side.

    Towards the ends fewer are taken, on both sides as many, so that the means of numbers on a line are these numbers:
    they lag behind nowhere.  Numbers that are not finite are left out.

    >>> centred_mean([1.0, 2.0, 3.0, 4.0, 8.0], 1)
    [1.0, 2.0, 3.0, 5.0, 8.0]
    """
    found, last = [], len(values) - 1
    for i in range(len(values)):
        reach = min(half, i, last - i)
        finite = [v for v in values[i - reach : i + reach + 1] if math.isfinite(v)]
        found.append(sum(v / len(finite) for v in finite) if finite else math.nan)
    return found
