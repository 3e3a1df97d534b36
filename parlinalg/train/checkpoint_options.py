"""The key `checkpoint` of a configuration, and which checkpoints stay.  Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.train.keys import Check, flag, optional, real, refuse, section, text, whole


@dataclass(frozen=True)
class Checkpointing:
    """When checkpoints are made, and which of them stay.

    Attributes
    ----------
    on : bool
        Whether there are any: if so, one at the end and one when a signal stops the training.
    every : int or None
        Steps from one to the next.
    keep : int or None
        How many of the last ones stay; None: all.
    best : str or None
        A metric of the data kept out, such as "validation_loss": where it is the best so far there is a checkpoint too,
        and it stays as long as no later one is better.
    background : bool
        Whether files are written while training goes on.
    """

    on: bool = True
    every: int | None = None
    keep: int | None = 3
    best: str | None = None
    background: bool = True

    def __str__(self) -> str:
        if not self.on:
            return "none"
        often = "at the end" if self.every is None else f"every {self.every} steps and at the end"
        stay = "all stay" if self.keep is None else f"the last {self.keep} stay" if self.keep > 1 else "the last stays"
        return f"{often}; {stay}" + (f", and where {self.best} is the best" if self.best else "")


_CHECKS: dict[str, Check] = {
    "every": optional(whole(1)), "keep": optional(whole(1)), "best": optional(text), "background": flag,
}  # fmt: skip


_KEPT: dict[str, Mapping[str, Check]] = {
    "optimizer": {"steps": whole(0), "lr": real(0)},
    "scheduler": {"steps": whole(0), "base": real(0)},
    "scaler": {"scale": real(0, above=True), "good": whole(0), "skipped": whole(0)},
}


def check_kept(state: Mapping[str, Any], counts: Sequence[str], parts: Sequence[str]) -> None:
    """Raise a ConfigError, or a KeyError, unless what a checkpoint says of a training can be gone on from.

    Parameters
    ----------
    state : dict
    counts : sequence of str
        The keys of numbers of steps, epochs and such.
    parts : sequence of str
        Those of "optimizer", "scheduler" and "scaler" that it is to have.
    """
    for key in counts:
        whole(0)(key, state[key])
    for part in parts:
        if not isinstance(state[part], Mapping):
            raise refuse(part, state[part], f"a dict with the keys {', '.join(_KEPT[part])}")
        for key, check in _KEPT[part].items():
            check(f"{part}.{key}", state[part][key])


def check_options(keep: Any = 3, best: Any = None, background: Any = True) -> None:
    """Raise a ConfigError unless these say which checkpoints stay, and how they are written."""
    for key, value in (("keep", keep), ("best", best), ("background", background)):
        _CHECKS[key](f"checkpoints: {key}", value)


def check_training(step: Any, training: Any) -> None:
    """Raise a ConfigError unless a checkpoint can have this step, and this beside its arrays."""
    whole(0)("Checkpoints.save: step", step)
    if training is not None and not isinstance(training, Mapping):
        raise refuse("Checkpoints.save: training", training, "a dict of what JSON can carry")
    try:
        json.dumps(dict(training or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Checkpoints.save: what is saved beside the arrays is JSON, of texts, numbers, lists and dicts: {error}"
        ) from error


def checkpointing(where: str, value: Any) -> Checkpointing:
    """A check of `checkpoint`: False for none, the steps between two, or a dict with the keys of `Checkpointing`."""
    if value is False:
        return Checkpointing(on=False)
    if value is None or value is True:
        return Checkpointing()
    given = {"every": value} if isinstance(value, int) else value
    if not isinstance(given, Mapping):
        raise refuse(where, value, f"False, a number of steps, or a dict with the keys {', '.join(_CHECKS)}")
    return Checkpointing(**section(where, given, _CHECKS))


def better(name: str, new: float | None, old: float | None) -> bool:
    """Return True if a metric is better than before: an accuracy when it is larger, anything else when it is smaller.

    >>> better("validation_loss", 1.0, 2.0), better("test_accuracy", 0.5, None), better("loss", float("nan"), None)
    (True, True, False)
    """
    if new is None or not math.isfinite(new):
        return False
    if old is None:
        return True
    return new > old if name.endswith("accuracy") else new < old


def best_of(name: str, measured: Mapping[int, float | None]) -> int | None:
    """Return the step that measured best, the first of several; None where nothing was measured."""
    found: int | None = None
    for step in sorted(measured):
        if better(name, measured[step], None if found is None else measured[found]):
            found = step
    return found


def to_drop(measured: Mapping[int, float | None], keep: int | None, best: str | None) -> list[int]:
    """Return the steps whose checkpoints go: all but the last `keep`, and the one that measured best.

    Parameters
    ----------
    measured : dict of int to float or None
        For each checkpoint's step its value of the metric.
    keep : int or None
        None: all stay.
    best : str or None
        The metric's name.

    >>> to_drop({10: 2.0, 20: 1.0, 30: 3.0, 40: None, 50: 2.5}, 2, "validation_loss")
    [10, 30]
    """
    if keep is None:
        return []
    stay = set(sorted(measured)[-keep:])
    if best is not None and (step := best_of(best, measured)) is not None:
        stay.add(step)
    return [step for step in sorted(measured) if step not in stay]
