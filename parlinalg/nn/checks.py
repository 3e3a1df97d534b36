"""Arguments of layers and models: errors that name them and say what they may be."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.schemes import Scheme, as_scheme


def whole(name: str, value: Any, least: int | None = 1) -> int:
    """Return an integer of at least `least`, NumPy's too; raise for others, also for True and False."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} is a whole number{limit}, not {value!r}")
    return int(value)


def real(name: str, value: Any, least: float = 0, *, above: bool = False, below: float = math.inf) -> float:
    """Return a finite number of at least `least` (or above it) and below `below`; raise for others, booleans too."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    if not good or not (least < value or (value == least and not above)) or not value < below:
        limit = f"{'above' if above else 'of at least'} {least}{'' if below == math.inf else f' and below {below}'}"
        raise ConfigError(f"{name} is a number {limit}, not {value!r}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return True or False, NumPy's too; raise for others."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} is True or False, not {value!r}")
    return bool(value)


def placed(layer: object, scheme: object, grid: object) -> Scheme:
    """Return the scheme of a layer or model, which is given itself or by its name, on a grid that has its axes."""
    name = type(layer).__name__
    if not isinstance(grid, Grid):
        raise ConfigError(f"{name}: grid is a Grid, such as that of a mesh (mesh.grid), not {grid!r:.60}")
    try:
        found = as_scheme(scheme)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not set(found.axes) <= set(grid.sizes):
        raise ConfigError(
            f"{name}: the scheme {found.name!r} is for a grid with the axes {', '.join(found.axes)}; this one has "
            f"{', '.join(grid.sizes)}"
        )
    return found
