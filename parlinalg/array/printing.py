"""Arrays as text, and printing once for all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.grid import default_grid

EDGE = 3
"""Items at each end of a dim of a large array that are shown."""


def print0(*values: Any, **options: Any) -> None:
    """Print on rank 0 alone; every rank calls it.  Collective, since the text of a distributed array is.

    Parameters
    ----------
    values
        What to print.  Every rank makes the text of all values, and rank 0 prints it.
    options
        The keyword arguments of Python's `print`: `sep`, `end`, `file`, `flush`.

    Examples
    --------
    >>> import parlinalg as pla
    >>> pla.print0("sum:", int(pla.sum(pla.arange(5))))
    sum: 10
    """
    texts = [str(value) for value in values]
    if default_grid().world.rank == 0:
        print(*texts, **options)


def summary(a: DistArray) -> str:
    """Return the values as NumPy prints them; of a large array only the corners are fetched.  Collective."""
    large = a.size > np.get_printoptions()["threshold"]
    cut = [d for d, n in enumerate(a.shape) if large and n > 2 * EDGE]
    if not cut:
        return np.array2string(a.gather(), prefix="")
    corners = _corners(a.summed(), cut)
    return np.array2string(corners, threshold=0, edgeitems=EDGE)


def _corners(a: DistArray, dims: list[int]) -> Any:
    """Return the global array with only the edges of these dims, and one item between, which is not shown."""
    if not dims:
        return a.gather()
    dim, lead = dims[0], (slice(None),) * dims[0]
    first, last = a[(*lead, slice(0, EDGE + 1))], a[(*lead, slice(a.shape[dim] - EDGE, None))]
    return np.concatenate([_corners(first, dims[1:]), _corners(last, dims[1:])], axis=dim)
