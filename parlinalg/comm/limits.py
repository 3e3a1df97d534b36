"""How many elements one MPI call may carry; longer messages are split (`split.py`)."""

from __future__ import annotations

import os

from parlinalg.errors import ConfigError

INT_MAX = 2**31 - 1


def _from_environment() -> int:
    text = os.environ.get("PARLINALG_MAX_COUNT", str(INT_MAX))
    if not text.isdecimal() or not 1 <= int(text) <= INT_MAX:
        raise ConfigError(f"PARLINALG_MAX_COUNT={text!r} should be a whole number of elements from 1 to {INT_MAX}")
    return int(text)


max_count: int = _from_environment()
"""The most elements one call carries, the sum over all ranks' counts; the tests set it to a handful."""
