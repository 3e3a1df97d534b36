"""Saved arrays against those that are wanted, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError

Shape = tuple[int, ...]


def check_names(what: str, want: Mapping[str, Shape], have: Mapping[str, Shape]) -> None:
    """Raise a ConfigError that lists every name that is missing, unexpected or misshapen in `have`, got from `what`."""
    faults = [
        _listed("missing", (n for n in want if n not in have)),
        _listed("unexpected", (n for n in have if n not in want)),
        _listed("misshapen", (f"{n} {have[n]} instead of {s}" for n, s in want.items() if have.get(n, s) != s)),
    ]
    if any(faults):
        raise ConfigError(f"{what} does not fit: {'; '.join(f for f in faults if f)}")


def check_arrays(what: str, want: Mapping[str, Shape], have: Mapping[str, Any]) -> None:
    """Check arrays as `check_names` checks shapes; raise also if any in `have` is not of real numbers."""
    arrays = {name: _array(what, name, value) for name, value in have.items()}
    check_names(what, want, {name: array.shape for name, array in arrays.items()})
    other = [
        f"{name} of {array.dtype}"
        for name, array in arrays.items()
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16"
    ]
    if other:
        raise ConfigError(f"{what} does not fit: no real numbers: {', '.join(other)}")


def _array(what: str, name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} does not fit: {name} is not an array: {error}") from error


def _listed(fault: str, names: Iterable[str]) -> str:
    found = [str(name) for name in names]
    return f"{fault}: {', '.join(found)}" if found else ""
