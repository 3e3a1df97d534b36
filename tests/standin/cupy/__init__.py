"""A strict stand-in for CuPy where there is no GPU: the same names and refusals over private NumPy arrays.

It refuses what would fail on a GPU: host arrays among operands, implicit conversion to NumPy arrays and buffers,
functions and parameters that CuPy lacks, values of a copy read before the stream is synchronised, another GPU's arrays.
Reductions and elements are 0-d arrays, as in CuPy.  It computes nothing faster and runs no CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as _np

from . import _api, _functions, cuda
from ._array import ndarray
from ._functions import array, asarray, ascontiguousarray, asfortranarray, asnumpy, from_dlpack, ufunc
from .cuda import get_default_memory_pool, get_default_pinned_memory_pool

__version__ = "14.2.0"

newaxis = None
_made: dict[str, Any] = {}


def get_array_module(*args: Any) -> Any:
    import sys

    return sys.modules[__name__] if any(isinstance(a, ndarray) for a in args) else _np


def is_available() -> bool:
    return cuda.runtime.getDeviceCount() > 0


def __getattr__(name: str) -> Any:
    if name in _api.SAME:
        return getattr(_np, name)
    if name not in _made:
        if name in _api.UFUNCS:
            _made[name] = _functions.ufunc(name)
        elif name in _api.FUNCTIONS:
            _made[name] = _functions.function(name)
        elif name in ("linalg", "fft", "random"):
            from importlib import import_module

            return import_module(f"cupy.{name}")
        else:
            raise AttributeError(f"module 'cupy' has no attribute {name!r} (CuPy {__version__}, by its stand-in)")
    return _made[name]
