"""Arrays on grids that leave ranks idle, and arrays that go from one grid to another."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.errors import GridError
from parlinalg.layout import Layout
from tests.cases import DTYPES, check, layouts, numbers, pairs, same, terms


@pytest.mark.mpi(min_size=2)
def test_every_call_works_on_idle_ranks(make_grid, world):
    n = world.size - 1
    grid = make_grid({"a": n, "b": 1})
    assert grid.inside == (world.rank < n)
    assert grid.coords == ({"a": world.rank, "b": 0} if grid.inside else {})
    values = numbers((5, 4))
    for layout in (Layout("a", "b"), Layout(None, "a"), Layout(None, None), Layout(None, None, partial="a")):
        x = pla.distribute(values, grid, layout)
        if not grid.inside:
            assert x.block.size == 0
        same(x, values)
        for target in (Layout("a", None), Layout(None, ("b", "a")), Layout(None, None)):
            same(x.redistribute(target), values)
        x = x.summed()
        same(2 * x + x, 3 * values)
        same(x.sum(0), values.sum(0))
        assert x.sum().item() == values.sum()
        same(x.max(1), values.max(1))
        same(x.max(), values.max())
        same(np.var(x, axis=0), np.var(values, axis=0), 1e-14)
        same(x.mean(0, keepdims=True), values.mean(0, keepdims=True), 1e-14)
        same(x[1:3, 2], values[1:3, 2])
        same(x[2], values[2])
        same(x[1, 1], values[1, 1])
        same(x.T.reshape(4, 5, 1), values.T.reshape(4, 5, 1))
        same(x @ x.T, values @ values.T)
        same(x @ x[0], values @ values[0])
        same(pla.matmul(x, x.T, memory="1MiB"), values @ values.T)
        same(np.where(x > 0, x, 0.0), np.where(values > 0, values, 0.0))
        assert np.allclose(x, x)
        assert len({*map(str, world.share(str(x)))}) == 1
        alone = pla.distribute(values if world.rank == n else None, grid, layout, root=n)  # from a rank outside
        same(alone, values)
        there = x.gather(root=n)
        assert (there is None) == (world.rank != n)
        if there is not None:
            np.testing.assert_array_equal(there, values)
    same(pla.from_blocks(x.block, grid, x.layout, shape=values.shape), values)
    same(pla.full((3,), 2.5, grid, Layout("a")), np.full(3, 2.5))
    same(pla.eye(3, grid=grid, layout=Layout("a", None)), np.eye(3))
    same(pla.distribute(np.array(4.0), grid, Layout()), np.array(4.0))


@pytest.mark.core
@pytest.mark.parametrize("buffer", [5, 1 << 19])
def test_arrays_go_from_grid_to_grid(make_grid, world, tune, buffer):
    tune(MOVE_BUFFER=buffer)
    n = world.size
    made = [make_grid({"a": n}), make_grid({"x": 1, "y": n}), make_grid({"h": max(1, n // 2)}), make_grid({"one": 1})]
    values = numbers((6, 5))
    for t, (old, new) in enumerate(pairs(made, made, None)):
        for src, dst in pairs(layouts(old.axes, 2), layouts(new.axes, 2), 4, seed=t):
            x = _terms(values, old, src)
            moved = x.to_grid(new, dst)
            assert (moved.grid, moved.layout) == (new, dst)
            if not dst.partial:
                check(moved, values)
            same(moved.redistribute(Layout(None, None)), values)
    for i, dtype in enumerate(DTYPES):
        value = numbers((), dtype, seed=i)
        same(pla.distribute(value, made[0], Layout()).to_grid(made[2], Layout()), value)
        x = pla.distribute(numbers((4,), dtype), made[2], Layout("h")).to_grid(made[0], Layout("a"))
        same(x, numbers((4,), dtype))


def _terms(values, grid, layout):
    if grid.inside:
        return terms(values, grid, layout)
    return pla.DistArray(grid.backend.empty((0,) * values.ndim, values.dtype), values.shape, layout, grid)


@pytest.mark.mpi(min_size=2)
def test_grids_that_no_communicator_covers(world, backend):
    one = world.sub([world.rank], ("self",))
    with pla.Grid({"a": 1}, one, backend) as mine:
        x = pla.zeros((3,), mine, Layout("a"))
        pair = world.sub([world.rank], ("self",))
        with pla.Grid({"b": 1}, pair, backend) as other:
            same(x.to_grid(other, Layout("b")), np.zeros(3))
        pair.free()
    one.free()


def test_a_number_goes_to_a_grid_where_it_is_partial(make_grid, world):
    one, other = make_grid({"a": world.size}), make_grid({"b": world.size})
    x = pla.distribute(np.float64(2.5), one, Layout(partial="a"))
    same(x.to_grid(other, Layout(partial="b")), np.asarray(2.5))


@pytest.mark.ranks(4)
def test_disjoint_grids_are_refused(world, backend):
    half = world.sub([r for r in range(4) if r // 2 == world.rank // 2], ("half",))
    cross = world.sub([r for r in range(4) if r % 2 == world.rank % 2], ("cross",))
    with pla.Grid({"a": 2}, half, backend) as one, pla.Grid({"b": 2}, cross, backend) as other:
        x = pla.zeros((3,), one, Layout("a"))
        with pytest.raises(
            GridError,
            match=r"no communicator covers both grids: .* is made from ranks \[.*from the same communicator",
        ):
            x.to_grid(other, Layout("b"))
    half.free()
    cross.free()
