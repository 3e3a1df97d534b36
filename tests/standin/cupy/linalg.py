"""`cupy.linalg`: NumPy's functions, with CuPy's names and parameters only."""

from __future__ import annotations

from typing import Any

from . import _api, _functions


def __getattr__(name: str) -> Any:
    if f"linalg.{name}" not in _api.FUNCTIONS:
        raise AttributeError(f"module 'cupy.linalg' has no attribute {name!r}")
    return _functions.function(f"linalg.{name}")
