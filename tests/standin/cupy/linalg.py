"""`cupy.linalg`: NumPy's functions, with CuPy's names and parameters only, and its silence about failures."""

from __future__ import annotations

from typing import Any

import cupyx
import numpy as np

from . import _api, _functions
from ._array import wrap

OF = {"cholesky": 0, "inv": 0, "solve": 1}
"""Functions of which CuPy ignores what cuSOLVER reports, and the argument whose shape the result has."""


def __getattr__(name: str) -> Any:
    if f"linalg.{name}" not in _api.FUNCTIONS:
        raise AttributeError(f"module 'cupy.linalg' has no attribute {name!r}")
    function = _functions.function(f"linalg.{name}")
    return _silent(name, function) if name in OF else function


def _silent(name: str, function: Any) -> Any:
    def device_function(*args: Any) -> Any:
        try:
            return function(*args)
        except np.linalg.LinAlgError as error:
            if "dim" in str(error):  # of shapes
                raise
            if cupyx._linalg() == "raise":
                raise np.linalg.LinAlgError(f"Error reported by {name} in cuSOLVER. devInfo = [1]. {error}") from None
            return wrap(np.full(args[OF[name]].shape, np.nan, args[0].dtype))

    device_function.__name__ = name
    return device_function
