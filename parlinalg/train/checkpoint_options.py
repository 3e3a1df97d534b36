"""Rules of keeping checkpoints, and checks of what they hold.  Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.train.config import CheckpointConfig
from parlinalg.train.schema import integer, refuse


def check_options(keep: Any = 3, best: Any = None, background: Any = True) -> None:
    """Raise a ConfigError unless these say which checkpoints stay, and how they are written."""
    for name, value in (("keep", keep), ("best", best), ("background", background)):
        CheckpointConfig.check_key("checkpoints: ", name, value)


def check_training(step: Any, training: Any) -> None:
    """Raise a ConfigError unless a checkpoint can have this step, and this beside its arrays."""
    integer(0)("Checkpoints.save: step", step)
    if training is not None and not isinstance(training, Mapping):
        raise refuse("Checkpoints.save: training", training, "a dict of what JSON can carry")
    try:
        json.dumps(dict(training or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Checkpoints.save: what is saved beside the arrays is JSON, of texts, numbers, lists and dicts: {error}"
        ) from error


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
