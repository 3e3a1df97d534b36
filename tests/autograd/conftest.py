"""Grids of the autograd tests: a few shapes for any number of ranks, and a one-rank twin that knows the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parlinalg.comm import SingleComm
from parlinalg.grid import Grid
from tests.closures import none_held
from tests.conftest import SIZE

AXES = ("a", "b", "c")


def _shapes(size: int) -> list[dict[str, int]]:
    """One axis, and the squarest two; for 8 ranks two and three; each with the axes a, b and c."""
    side = max(d for d in range(1, size + 1) if size % d == 0 and d * d <= size)
    found = [(size, 1, 1), (side, size // side, 1)]
    if size % 8 == 0:
        found[0] = (2, 2, size // 4)
    return [dict(zip(AXES, shape, strict=True)) for shape in dict.fromkeys(found)]


@pytest.fixture(scope="session")
def _grids(world: Any, backend: str) -> Callable[[int], Grid]:
    made: dict[int, Grid] = {}

    def grid(index: int) -> Grid:
        if index not in made:
            made[index] = Grid(_shapes(SIZE)[index], comm=world, backend=backend)
        return made[index]

    return grid


@pytest.fixture(params=range(len(_shapes(SIZE))), ids=lambda i: "x".join(map(str, _shapes(SIZE)[i].values())))
def grid(request: pytest.FixtureRequest, _grids: Callable[[int], Grid]) -> Iterator[Grid]:
    """A grid of all ranks with the axes a, b and c."""
    return _grids(request.param)


@pytest.fixture(scope="session")
def widest(_grids: Callable[[int], Grid]) -> Grid:
    """The grid with the most axes of more than one rank."""
    return _grids(len(_shapes(SIZE)) - 1 if SIZE % 8 else 0)


@pytest.fixture(scope="session")
def serial(backend: str) -> Grid:
    """A grid with the same axes of one rank each: this rank alone."""
    return Grid(dict.fromkeys(AXES, 1), comm=SingleComm(), backend=backend)


@pytest.fixture(autouse=True)
def _arrays_are_saved() -> Iterator[None]:
    """No rule of any operation of these tests holds an array in its closure."""
    with none_held():
        yield
