"""Whether host blocks are computed by compiled loops: where numba is installed (`pip install 'parlinalg[fast]'`).

Chains of NumPy's operations pass over their chunks once an operation; `parlinalg.backend.loops` passes over the block
once.  What they compute is the same, but for rounding.  The environment's PARLINALG_COMPILED=0 turns them off.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from parlinalg import tunables

Block = Any

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def loops(*blocks: Block) -> Any:
    """The module of loops if they can compute on these blocks, else None.

    The blocks are host arrays of float32 or all of float64, the first of them not small.
    """
    first = blocks[0]
    if type(first) is not np.ndarray or first.size < tunables.COMPILED_SIZE or first.dtype not in _DTYPES:
        return None
    if any(type(b) is not np.ndarray or b.dtype != first.dtype for b in blocks[1:]):
        return None
    return _loops()


@cache
def _loops() -> Any:
    if os.environ.get("PARLINALG_COMPILED", "1") == "0" or find_spec("numba") is None:
        return None
    try:
        from parlinalg.backend import loops, loops_attention  # noqa: F401  (both or none)
    except Exception as error:  # what numba raises depends on its version and NumPy's
        warnings.warn(f"numba is installed but cannot be used, and kernels run unfused: {error}", stacklevel=2)
        return None
    return loops


def attention_loops() -> Any:
    """The module of loops over blocks of attention's scores, where there are loops at all."""
    from parlinalg.backend import loops_attention

    return loops_attention


def about() -> str:
    """What computes kernels on CPUs, for people to read."""
    if _loops() is None:
        return "NumPy's operations in chunks"
    from importlib.metadata import version

    return f"loops compiled by numba {version('numba')}"


def flat(block: Block) -> Block:
    """The elements of a host block in C order as one dim: a view where they lie so."""
    return np.ascontiguousarray(block).reshape(-1)


def rows(block: Block) -> Block:
    """A host block as the C-contiguous matrix of its rows, which lie along the last dim."""
    width = block.shape[-1]
    return np.ascontiguousarray(block).reshape(block.size // width if width else 0, width)
