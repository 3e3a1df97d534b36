"""Host memory that is used again.

A large array that the C library gives back to the system when it is freed is new memory when the next one is made: the
system clears its pages again, which takes as long as several passes over them.  A training step makes the same arrays
over and over, so freed memory is kept, as CuPy's pool keeps a GPU's.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

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


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
