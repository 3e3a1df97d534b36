"""Verdicts agreed by all ranks, so that a test which fails on one fails on all, at the same point.

The implementation is the one that the library ships for its users.
"""

from __future__ import annotations

from parlinalg.testing import FailedElsewhereError, agreed, once

__all__ = ["FailedElsewhereError", "agreed", "once"]
