"""The picture of a training: loss and accuracy by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WINDOW = 20  # steps whose mean the thick lines show


def plot(path: Path, history: Sequence[Mapping[str, Any]], test: float | None, title: str) -> str:
    """Draw loss and accuracy by step as a PNG.

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
    for place, (name, color) in enumerate((("loss", "tab:red"), ("accuracy", "tab:blue"))):
        axes = figure.add_subplot(1, 2, place + 1)
        values = [h[name] for h in history]
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, running_mean(values), color=color, label=f"training, mean of {WINDOW} steps")
        if name == "accuracy" and test is not None:
            axes.axhline(test, color="black", linestyle="--", linewidth=0.9, label=f"test: {test:.4f}")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
    return ""


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
