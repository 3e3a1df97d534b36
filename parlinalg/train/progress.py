"""The progress of a training: a bar, `metrics.jsonl` and `metrics.png`, on rank 0."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from parlinalg.comm.streams import Lines, Quiet, complain
from parlinalg.comm.together import together
from parlinalg.files import parse_json, read_bytes
from parlinalg.train.hooks import Hook

if TYPE_CHECKING:
    from parlinalg.train.trainer import Trainer

COLORS = ("tab:red", "tab:blue")
WINDOW = 21  # steps whose mean the thick lines show, at most; and a fifth of all steps
SHOWN = {  # of the metrics there are: what they are called here, and how they are written
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".3f"),
    "perplexity": ("perplexity", ".2f"),
    "validation_loss": ("validation", ".4f"),
    "samples_per_s": ("samples/s", ".0f"),
    "tokens_per_s": ("tokens/s", ".0f"),
    "mfu": ("of peak", ".0%"),
}
EVERY = 5.0  # seconds between two lines where there is no progress bar


class Progress:
    """Takes the metrics of every step; does nothing on ranks that do not speak.

    Parameters
    ----------
    out : Path
        The directory of `metrics.jsonl`.
    total : int or None
        The last step, if it is known.
    speaks : bool
        Whether this rank shows and writes.
    start : int
        The steps made before, in a training that goes on: their lines stay in the file, later ones do not.

    Attributes
    ----------
    history : list of dict
        The metrics so far.
    lost : list of str
        The file's name, once it is closed, if others have removed or replaced it meanwhile.
    unwritten : str
        Why lines are missing at the end of the file, once it is closed; empty if none are.
    """

    def __init__(self, out: Path, total: int | None, speaks: bool, start: int = 0) -> None:
        self.history: list[dict[str, Any]] = []
        self.lost: list[str] = []
        self.unwritten = ""
        self._path = out / "metrics.jsonl"
        self._file: FileIO | None = None
        self._lines = Lines(self._path)
        self._bar: Any = None
        self._said = 0.0
        self._shown: dict[str, str] = {}
        self._total = total
        if speaks:
            self.history = up_to(self._path, start) if start else []
            self._file = self._path.open("ab" if start else "wb", buffering=0)
            self._lines = Lines(self._path, self._file)
            try:
                from tqdm import tqdm
            except ImportError:
                return
            if sys.stderr is not None:
                self._bar = tqdm(total=total, initial=start, unit="step", file=Quiet(sys.stderr), dynamic_ncols=True)

    def add(self, metrics: dict[str, Any], now: float) -> None:
        """Take the metrics of one step; `now` is the time in seconds."""
        if self._file is None:
            return
        self.history.append(metrics)
        known = {name: v if math.isfinite(v) else None for name, v in metrics.items()}  # JSON has no infinity
        self._lines.add(json.dumps(known, allow_nan=False) + "\n")
        shown = self._shown  # what is not measured at every step stays in sight
        shown |= {head: format(metrics[name], form) for name, (head, form) in SHOWN.items() if name in metrics}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(metrics["step"] - self._bar.n)
        elif now - self._said > EVERY or metrics["step"] == self._total:
            self._said = now
            text = ", ".join(f"{name} {value}" for name, value in shown.items())
            complain(f"step {metrics['step']} of {self._total or '?'}: {text}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the bar, and close the file."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None and not self._file.closed:
            self._lines.add()
            try:
                if os.fstat(self._file.fileno()).st_nlink == 0 or not self._path.exists():
                    self.lost.append(self._path.name)
                self._file.close()
            except OSError as error:  # as of a server that has no space for what it took
                self._lines.error = error
            self.unwritten = str(self._lines.error or "")


class ProgressHook(Hook):
    """Shows a progress bar, and writes the metrics of every step to a folder's `metrics.jsonl`; on rank 0.

    What an `EvaluateHook` before it measures is in the line of its step, and other evaluations have lines of their own.
    A training that goes on from a checkpoint goes on in the file too: lines of later steps are taken out of it.

    Parameters
    ----------
    folder : str or Path
        Made where it is missing.
    columns : sequence of str, optional
        The metrics that are written, in this order.  By default all.
    curves : dict of str to str, optional
        What `metrics.png` shows at the end, by metric of the steps: the metric of an evaluation beside it, or an empty
        text.  By default there is no picture.
    title : str
        The title of the picture.

    Attributes
    ----------
    history : list of dict
        The metrics of all steps, on rank 0.
    no_picture : str
        Why there is no picture, if one was asked for and there is none.
    unwritten : str
        At the end: why lines are missing in `metrics.jsonl`, as of a full disk, which does not end a training.
    """

    def __init__(
        self, folder: str | Path, *, columns: Sequence[str] | None = None, curves: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.columns, self.curves, self.title = Path(folder), columns, curves, title
        self.history: list[dict[str, Any]] = []
        self.no_picture = self.unwritten = ""
        self._progress: Progress | None = None
        self._shown = -1
        self.files = [str(self.folder / "metrics.jsonl")]

    def before_train(self, trainer: Trainer) -> None:
        self._progress = None

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        """Open the file, once it is known after which step the training goes on.  Collective the first time."""
        if self._progress is not None:
            return
        speaks = trainer.engine.world.rank == 0

        def make() -> Progress:
            if speaks:
                self.folder.mkdir(parents=True, exist_ok=True)
            return Progress(self.folder, trainer.last_step, speaks, trainer.step)

        self._progress = together(trainer.engine.world, make, "opening metrics.jsonl")
        self.history = self._progress.history

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None:
        self._add(trainer, trainer.step_metrics)
        self._shown = trainer.step

    def after_test(self, trainer: Trainer) -> None:
        if self._shown == trainer.step and not trainer.engine.world.rank:  # the line of the step is written
            self._add(trainer, {n: v for n, v in trainer.step_metrics.items() if n not in self.history[-1]})

    def _add(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self._progress is None:
            return
        names = metrics if self.columns is None else [name for name in self.columns if name in metrics]
        self._progress.add({"step": trainer.step, **{name: metrics[name] for name in names}}, perf_counter())

    def after_train(self, trainer: Trainer) -> None:
        self._open(trainer)
        self.close(trainer)
        if self._progress is not None:
            self.lost = [str(self.folder / name) for name in self._progress.lost]
            self.unwritten = self._progress.unwritten

    def finish(self, trainer: Trainer) -> list[str]:
        if self.curves is not None:
            self.no_picture = together(trainer.engine.world, lambda: self._draw(trainer), "drawing metrics.png")
            self.files = [*self.files[:1], *([] if self.no_picture else [str(self.folder / "metrics.png")])]
        return []

    def _draw(self, trainer: Trainer) -> str:
        if trainer.engine.world.rank or self.curves is None:
            return ""
        self.folder.mkdir(parents=True, exist_ok=True)  # it may have been removed
        return plot(self.folder / "metrics.png", self.history, self.curves, self.title)

    def close(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._progress.close()


def up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the metrics of the steps up to this one, and remove later ones from the file.

    A line that is incomplete, as of a process that was killed, is ignored.
    """
    kept, texts = [], []
    for line in read_bytes(path, 1 << 40).decode(errors="replace").splitlines() if path.exists() else ():
        try:
            metrics = parse_json(line)
        except ValueError:
            continue
        if isinstance(metrics, dict) and type(made := metrics.get("step")) is int and made <= step:
            kept.append({name: math.nan if value is None else value for name, value in metrics.items()})
            texts.append(f"{line}\n")
    aside = path.with_name(f".{path.name}")
    aside.write_text("".join(texts), "utf-8")
    aside.replace(path)
    return kept


# ---------------------------------------------------------------------------------------------- the picture
def plot(path: Path, history: Sequence[Mapping[str, Any]], curves: Mapping[str, str], title: str) -> str:
    """Draw metrics by step as a PNG.

    Parameters
    ----------
    path : Path
    history : sequence of dict
        The metrics of every step.
    curves : dict of str to str
        A panel each: the metric of the steps, and the metric of the held-out data, or an empty text.
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
            label = f"{_caption(held)}: {measured[-1][1]:.4f}"
            axes.plot(*zip(*measured), color="black", marker="o", markersize=3, linewidth=0.9, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel(_caption(name))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
    return ""


def _caption(name: str) -> str:
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
