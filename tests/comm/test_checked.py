"""The checked mode finds what ranks were given alike in name only: every rank raises, and names those that differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout
from parlinalg.comm import Comm
from parlinalg.errors import CommError, LayoutError

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def grid(world: Comm, backend: str) -> Iterator[pla.Grid]:
    """A grid whose first axis has all ranks, in the checked mode."""
    checked = world.sub(range(world.size), ("all",))
    checked.checked = True
    with pla.Grid({"a": world.size, "b": 1}, checked, backend) as made:
        yield made
    checked.free()


def refused(grid: pla.Grid, error: type[Exception], match: str) -> pytest.RaisesExc[Exception]:
    """Every rank raises this, which names rank 1."""
    return pytest.raises(error, match=rf"(?s){match}.*rank 1\b")


def test_equal_values_pass(grid: pla.Grid) -> None:
    whole, cut = Layout(None, None), Layout("a", None)
    ids = np.arange(4.0 * grid.size * 600).reshape(-1, 4)
    for layout in (whole, cut):
        x = pla.distribute(ids, grid, layout)
        assert np.array_equal(pla.from_blocks(x.block, grid, layout).gather(), ids)
        pla.from_function(lambda i, j: i + j, (5, 4), grid, layout)
        pla.full((5, 4), 2.5, grid, layout)
        pla.random.normal((5, 4), grid, layout, seed=3)
        pla.Parameter(x, "w")
    pla.from_blocks(np.full((5, 4), float(grid.rank)), grid, Layout(None, None, partial=("a",)))


@pytest.mark.parametrize("rows", [2, 4096], ids=["small", "large"])
def test_distribute(grid: pla.Grid, rows: int) -> None:
    array = np.zeros((rows, 4))
    array[-1, 2] = grid.rank == 1  # also where this rank's own block is the same
    with refused(grid, LayoutError, "different arrays to distribute.*checksum"):
        pla.distribute(array, grid, Layout("a", None))
    with refused(grid, LayoutError, "different arrays to distribute"):
        pla.distribute(np.zeros(3, np.float32 if grid.rank == 1 else np.float64), grid, Layout(None))
    if grid.rank != 0:
        array = None
    pla.distribute(array, grid, Layout("a", None), root=0)


def test_small_arrays_are_compared_without_the_checked_mode(make_grid, world: Comm) -> None:
    grid = make_grid({"a": world.size})
    with refused(grid, LayoutError, "different arrays to distribute.*checksum"):
        pla.distribute(np.full(4, float(world.rank == 1)), grid, Layout("a"))


def test_from_function(grid: pla.Grid) -> None:
    odd = grid.rank == 1
    with refused(grid, CommError, "from_function makes blocks .* should be replicas by their layout"):
        pla.from_function(lambda i: i + odd, (5,), grid, Layout(None))
    with refused(grid, CommError, "from_function makes blocks .* should be replicas by their layout"):
        pla.from_function(lambda i: i + odd, (5,), grid, Layout(None, partial=("a",)))
    with refused(grid, CommError, "give from_function different values of dtype"):
        pla.from_function(lambda i: i, (50,), grid, Layout("a"), np.float32 if odd else np.float64)
    with refused(grid, CommError, "give full different values of shape"):
        pla.full((grid.size * 2 + odd,), 1.0, grid, Layout("a"))
    with refused(grid, CommError, "full makes blocks"):
        pla.full((5,), float(odd), grid, Layout(None))


def test_from_blocks(grid: pla.Grid) -> None:
    with pytest.raises(LayoutError, match=r"from_blocks: ranks 0 and 1 hold the same part of .* different blocks"):
        pla.from_blocks(np.full((3, 2), float(grid.rank == 1)), grid, Layout(None, "b"))


def test_random_numbers(grid: pla.Grid) -> None:
    """Unlike seeds are found where no block has a replica too."""
    with refused(grid, CommError, "different values of the key of seed"):
        pla.random.uniform((grid.size, 4), grid, Layout("a", None), seed=int(grid.rank == 1))


def test_parameters(grid: pla.Grid) -> None:
    x = pla.distribute(np.zeros((3, 2)), grid, Layout(None, None))
    x.block[0, 0] = grid.rank == 1
    with refused(grid, CommError, "the parameter 'w' should be the same on all ranks"):
        pla.Parameter(x, "w")


def test_states(grid: pla.Grid) -> None:
    scheme = pla.schemes.discover()["data"].SCHEME
    flat = pla.Grid({"data": grid.size}, grid.world, grid.backend.name)
    model = pla.nn.Linear(3, 2, scheme=scheme, grid=flat, seed=1)
    optimizer = pla.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {name: array.copy() for name, array in model.state_dict().items()}
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())
    next(iter(state.values())).flat[0] += grid.rank == 1
    with refused(grid, CommError, "give load_state_dict different values of"):
        model.load_state_dict(state)
    with refused(grid, CommError, "give load_state_dict different values of lr"):
        optimizer.load_state_dict({**optimizer.state_dict(), "lr": 0.1 + (grid.rank == 1)})
    flat.close()
