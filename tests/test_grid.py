"""Grids: shapes that fit, coordinates, communicators for any axes, and closing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.errors import GridError
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from tests.cases import EVERY_SIZE, grids, numbers, same


@pytest.mark.parametrize("which", [0, 1, 2])
def test_ranks_have_coordinates_in_row_major_order(make_grid, world, which):
    grid = make_grid(grids(world.size)[which])
    assert (grid.size, grid.rank, grid.inside) == (world.size, world.rank, True)
    assert grid.rank_of(grid.coords) == world.rank
    assert [grid.rank_of(grid.coords_of(r)) for r in range(grid.size)] == list(range(grid.size))
    assert tuple(grid.coords.values()) == np.unravel_index(world.rank, tuple(grid.sizes.values()))
    with pytest.raises(GridError, match=f"rank {grid.size} is not in Grid"):
        grid.coords_of(grid.size)


@pytest.mark.ranks(*EVERY_SIZE)
def test_a_communicator_for_every_ordered_tuple_of_axes(make_grid, world, xp):
    grid = make_grid(grids(world.size)[2])
    for n in range(len(grid.axes) + 1):
        for axes in itertools.permutations(grid.axes, n):
            comm = grid.comm(axes)
            sizes = [grid.sizes[a] for a in axes]
            assert comm.size == int(np.prod(sizes))
            assert comm is grid.comm(axes)
            if comm.size > 1:
                assert comm.rank == int(np.ravel_multi_index([grid.coords[a] for a in axes], sizes))
            got = xp.zeros(comm.size, np.int64)
            comm.all_gather(xp.full(1, grid.rank, np.int64), got, [1] * comm.size)
            expected = [
                grid.rank_of({**grid.coords, **dict(zip(axes, at, strict=True))})
                for at in itertools.product(*map(range, sizes))
            ]
            assert grid.backend.to_host(got).tolist() == expected
    with pytest.raises(GridError, match=r"no axis 'z' in the grid, which has \{"):
        grid.comm(("z",))
    assert grid.everyone.size == world.size


def test_a_grid_that_does_not_fit_lists_those_that_would(world, backend):
    n = world.size
    with pytest.raises(GridError) as caught:
        pla.Grid({"r": n + 1, "c": 2}, world, backend)
    sentence = str(caught.value)
    assert f"takes {2 * n + 2} ranks, but there are {n}; shapes that fit: " in sentence
    for r, c in factorizations(n, 2):
        assert f"{{'r': {r}, 'c': {c}}}" in sentence
    with pytest.raises(GridError, match="takes"):
        pla.Grid({"a": n + 1}, world, backend, idle=True)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({}, r'a grid takes a dict of axis names and sizes, such as \{"r": 2, "c": 2\}, not \{\}'),
        ((2, 2), r"a grid takes a dict .* not \(2, 2\)"),
        ({"a": 0}, "axis 'a' of a grid needs a size of at least 1, not 0"),
        ({"a": True}, "needs a size of at least 1, not True"),
        ({"a": 1.0}, r"needs a size of at least 1, not 1\.0"),
        ({1: 1}, "a grid's axes have names, such as 'r'; 1 is not a name"),
    ],
)
def test_wrong_sizes(world, backend, sizes, sentence):
    with pytest.raises(GridError, match=sentence):
        pla.Grid(sizes, world, backend)


@pytest.mark.mpi(min_size=2)
def test_ranks_must_agree(world, backend):
    odd = world.rank == world.size - 1
    with pytest.raises(GridError, match=r"rank \d+ makes a grid .*all ranks must make the same grid"):
        pla.Grid({"a": world.size, "b": 1} if odd else {"b": 1, "a": world.size}, world, backend)
    with pytest.raises(GridError, match="needs a size of at least 1, not 0"):  # told to the ranks that were right too
        pla.Grid({"a": 0 if odd else world.size}, world, backend)


def test_unknown_backends(world):
    with pytest.raises(GridError, match=r"backend 'torch' cannot be used.*'auto', 'numpy', 'cupy'"):
        pla.Grid({"a": world.size}, world, "torch")


def test_a_closed_grid_says_so(world, backend):
    with pla.Grid({"a": world.size}, world, backend) as grid:
        x = pla.distribute(numbers((5,)), grid, Layout("a"))
        same(x.sum(), numbers((5,)).sum())
    grid.close()
    with pytest.raises(
        GridError, match=r"this grid is closed; make arrays and products before close\(\) or inside `with`"
    ):
        grid.comm(("a",))


def test_factorizations():
    assert factorizations(6, 2) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert len(factorizations(12, 3)) == 18


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(240)
def test_closed_grids_give_their_communicators_back(world, backend, full, monkeypatch):
    """MPICH has 2,046 communicators: more than that are used and given back, several of them a grid."""
    monkeypatch.setattr("parlinalg.grid.set_blas_threads", lambda ranks: 1)  # it looks at every library of the process
    sizes = {"a": world.size // 2 or 1, "b": 2 if world.size > 1 else 1}
    for i in range(2100 if full or world.size == 2 else 250):
        with pla.Grid(sizes, world if i % 50 else None, backend) as grid:
            if i % 10 == 0:
                same(
                    pla.distribute(numbers((3, 3)), grid, Layout("a", "b"))
                    @ pla.eye(3, grid=grid, layout=Layout("a", "b")),
                    numbers((3, 3)),
                )
            else:
                grid.comm(("b",))
