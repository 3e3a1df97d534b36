"""`cupy.random`: generators whose arrays are on the device.  Their numbers are not CuPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._array import wrap


class Generator:
    def __init__(self, seed: Any = None) -> None:
        self._rng = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        if name not in ("random", "standard_normal", "uniform", "integers", "standard_exponential"):
            raise AttributeError(f"CuPy's Generator has no attribute {name!r}, or its stand-in lacks it")
        return lambda *args, **kwargs: wrap(getattr(self._rng, name)(*args, **kwargs))


def default_rng(seed: Any = None) -> Generator:
    return Generator(seed)
