"""What a training leaves behind while it runs: a progress bar and `metrics.jsonl`, on rank 0."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from parlinalg.comm.streams import Quiet, complain
from parlinalg.files import parse_json, read_bytes

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
    total : int
        The last step.
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

    def __init__(self, out: Path, total: int, speaks: bool, start: int = 0) -> None:
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
            self._bar.update()
        elif now - self._said > EVERY or metrics["step"] == self._total:
            self._said = now
            text = ", ".join(f"{name} {value}" for name, value in shown.items())
            complain(f"step {metrics['step']} of {self._total}: {text}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_nlink == 0 or not self._path.exists():
                self.lost.append(self._path.name)
            self._file.close()


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
