"""The number of threads a BLAS may start, so that the ranks on one machine do not crowd its cores."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def cores() -> set[int]:
    """The cores this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def place() -> list[str]:
    """The host and the cores of this process, as bits of a hexadecimal number, for `sharing` on the other ranks."""
    return [socket.gethostname(), f"{sum(1 << core for core in cores()):x}"]


def sharing(places: Sequence[Sequence[str]], rank: int, local_ranks: int = 0) -> int:
    """How many ranks run on the cores of rank number `rank`, itself included, by the places of the ranks known here.

    Where the launcher started more on the node than are known, `local_ranks`, the others are taken to be placed alike.

    >>> places = [["a", "3"], ["a", "3"], ["a", "c"], ["b", "3"]]
    >>> sharing(places, 0), sharing(places, 2), sharing(places, 0, local_ranks=6)
    (2, 1, 4)
    """
    host, own = places[rank]
    on_host = [int(theirs, 16) for name, theirs in places if name == host]
    known = sum(bool(int(own, 16) & theirs) for theirs in on_host)
    return max(known, -(-known * local_ranks // len(on_host)))


def set_blas_threads(local_ranks: int) -> int:
    """Give this process's BLAS its share of the cores; returns the number of threads.

    Parameters
    ----------
    local_ranks : int
        How many ranks share this process's cores.

    The share is the cores in this process's affinity mask divided by the ranks that share them, at least one, and
    never above what OMP_NUM_THREADS (or OpenBLAS's or MKL's own variable) allows.  It is set through threadpoolctl
    where that is installed, which knows every BLAS, else in the OpenBLAS that comes with NumPy.
    """
    threads = max(1, len(cores()) // max(1, local_ranks))
    threads = min([threads, *(limit for name in LIMITS if (limit := _limit(name)))])
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        _set_openblas(threads)
    else:
        threadpool_limits(limits=threads, user_api="blas")
    return threads


def _limit(name: str) -> int | None:
    """The value of an environment variable such as `4` or, by nesting level, `4,2`; None where it sets no limit."""
    first = os.environ.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _set_openblas(threads: int) -> bool:
    """Set the threads of the OpenBLAS inside NumPy's wheel, if there is one."""
    folder = Path(np.__file__).parent
    places = [folder.parent / "numpy.libs", folder / ".dylibs"]
    for path in (file for place in places if place.is_dir() for file in place.glob("*openblas*")):
        library = ctypes.CDLL(str(path))  # the one already loaded: the path is the same
        for symbol in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, symbol):
                getattr(library, symbol)(threads)
                return True
    return False
