"""`cupyx`: of the stand-in only the error state of `cupy.linalg`, and `cupyx.scipy.linalg`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_config = threading.local()


def _linalg() -> str:
    return getattr(_config, "linalg", "ignore")


@contextlib.contextmanager
def errstate(*, linalg: str | None = None) -> Iterator[None]:
    """Within it `cupy.linalg` says with "raise" what cuSOLVER reports; with "ignore", the default, nothing."""
    if linalg not in (None, "ignore", "raise"):
        raise NotImplementedError
    before = _linalg()
    _config.linalg = linalg or before
    try:
        yield
    finally:
        _config.linalg = before
