"""Printing once for all ranks."""

from __future__ import annotations

from typing import Any

from parlinalg.grid import default_grid


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
