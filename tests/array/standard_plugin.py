"""A plugin for data-apis' array-api-tests under mpiexec: what hypothesis draws by `.example()` comes from rank 0.

Draws of `@given` are alike on all ranks once they are derandomized; those of `.example()` never are.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.strategies import SearchStrategy

from parlinalg.comm import open_comm

WORLD = open_comm(None)


def pytest_configure(config: pytest.Config) -> None:
    """Replace `SearchStrategy.example`, before tests are collected."""
    drawn = SearchStrategy.example

    def example(self: SearchStrategy[Any]) -> Any:
        mine = pickle.dumps(drawn(self)).hex() if WORLD.rank == 0 else ""
        return pickle.loads(bytes.fromhex(WORLD.share(mine)[0]))

    SearchStrategy.example = example  # type: ignore[method-assign]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Take the suite's own settings, but nothing that may end differently on different ranks."""
    settings.register_profile("ranks", settings.default, deadline=None, derandomize=True, database=None)
    settings.load_profile("ranks")
