"""Host memory: how much there is, and that it is used again.

A large array that the C library gives back to the system when it is freed is new memory when the next one is made: the
system clears its pages again, which takes as long as several passes over them.  A training step makes the same arrays
over and over, so freed memory is kept, as CuPy's pool keeps a GPU's.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from parlinalg.errors import ConfigError
from parlinalg.units import format_bytes

if TYPE_CHECKING:
    from parlinalg.backend import Backend

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # from glibc's malloc.h
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@lru_cache(maxsize=1)
def keep_freed() -> bool:
    """Let the C library keep what is freed for the next array; False where it is not glibc, or the user has set it.

    What the user may set: `MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_MAX_` and the others of glibc's, or
    `glibc.malloc` in `GLIBC_TUNABLES`.
    """
    if any(name in os.environ for name in SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = _glibc()
    return library is not None and bool(library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, 2**31 - 1))


LARGE = 4 << 20
"""Bytes of an array from which on memory that is free is given back between phases of work."""


def give_back(nbytes: int) -> None:
    """Give memory that is free back to the system, between phases of work with arrays of so many bytes, if large.

    What `keep_freed` keeps lies in pieces as large as the arrays that were there; others find no room in it.
    """
    if nbytes >= LARGE and keep_freed() and (library := _glibc()) is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None


@lru_cache(maxsize=1)
def host_memory() -> int:
    """Return the bytes of memory that this process may have at most: the host's, or its container's."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found = min(found, int(Path(path).read_text()))
    return found


def check_memory(what: str, nbytes: int, backend: Backend | None = None) -> None:
    """Raise a ConfigError if something needs more memory than the host, or a backend, has.

    It is called before any of that memory is asked for.
    """
    total = host_memory() if backend is None else backend.memory_total()
    if nbytes > total:
        raise ConfigError(
            f"{what} would take {format_bytes(nbytes)} of this rank's memory, of which there is "
            f"{format_bytes(total)} for all ranks that share it: make it smaller, or take more ranks"
        )
