"""What all tests of layers and models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.closures import none_held


@pytest.fixture(autouse=True)
def _arrays_are_saved() -> Iterator[None]:
    """No rule of any operation of these tests holds an array in its closure."""
    with none_held():
        yield
