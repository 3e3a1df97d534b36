"""The progress of a training: a bar, `metrics.jsonl` and `metrics.png`, on rank 0."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from parlinalg.comm.streams import Quiet, complain
from parlinalg.comm.together import together
from parlinalg.files import parse_json, read_bytes
from parlinalg.train.hooks import Hook
from parlinalg.train.plots import plot

if TYPE_CHECKING:
    from parlinalg.train.trainer import Trainer

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
        The steps made before, in a training that goes on: what the file says of them stays, and of no later ones.

    Attributes
    ----------
    history : list of dict
        The metrics so far.
    lost : list of str
        The file's name, once it is closed, if others have removed or replaced it meanwhile.
    """

    def __init__(self, out: Path, total: int | None, speaks: bool, start: int = 0) -> None:
        self.history: list[dict[str, Any]] = []
        self.lost: list[str] = []
        self._path = out / "metrics.jsonl"
        self._file: TextIO | None = None
        self._bar: Any = None
        self._said = 0.0
        self._shown: dict[str, str] = {}
        self._total = total
        if speaks:
            self.history = up_to(self._path, start) if start else []
            self._file = self._path.open("a" if start else "w")
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
        self._file.write(json.dumps(known, allow_nan=False) + "\n")
        self._file.flush()
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
            if os.fstat(self._file.fileno()).st_nlink == 0 or not self._path.exists():
                self.lost.append(self._path.name)
            self._file.close()


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
        Of the picture.

    Attributes
    ----------
    history : list of dict
        The metrics of all steps, on rank 0.
    no_picture : str
        Why there is no picture, if one was asked for and there is none.
    """

    def __init__(
        self, folder: str | Path, *, columns: Sequence[str] | None = None, curves: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.columns, self.curves, self.title = Path(folder), columns, curves, title
        self.history: list[dict[str, Any]] = []
        self.no_picture = ""
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
    """The metrics of the steps up to this one; what the file says of later ones is taken out of it.

    A line that is not whole, as of a process that was killed, is no step's.
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
