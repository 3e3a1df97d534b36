"""A summary of a distributed array's values, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array.core import DistArray

EDGE = 3


def summary(a: DistArray) -> str:
    """The values as NumPy prints them, with only the corners of a large array fetched from the ranks.  Collective."""
    large = a.size > np.get_printoptions()["threshold"]
    cut = [d for d, n in enumerate(a.shape) if large and n > 2 * EDGE]
    if not cut:
        return np.array2string(a.gather(), prefix="")
    corners = _corners(a.summed(), cut)
    return np.array2string(corners, threshold=0, edgeitems=EDGE)


def _corners(a: DistArray, dims: list[int]) -> Any:
    """The global array with only the edges of these dims, and one item between, which is not shown."""
    if not dims:
        return a.gather()
    dim, lead = dims[0], (slice(None),) * dims[0]
    first, last = a[(*lead, slice(0, EDGE + 1))], a[(*lead, slice(a.shape[dim] - EDGE, None))]
    return np.concatenate([_corners(first, dims[1:]), _corners(last, dims[1:])], axis=dim)
