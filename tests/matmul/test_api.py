"""`A @ B` and `matmul`: alpha, beta, out, layouts, plans for other grids, errors, and nothing leaked."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.comm import watch
from parlinalg.errors import GridError, LayoutError
from parlinalg.layout import Layout
from parlinalg.plan import Plan
from tests.agreement import agreed
from tests.cases import grids, layouts, numbers, pairs, placed, same, terms


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def test_alpha_beta_out(grid):
    a, b, c = numbers((5, 6), seed=1), numbers((6, 4), seed=2), numbers((5, 4), seed=3)
    every = layouts(grid.axes, 2, partial=False)
    for t, (one, other) in enumerate(pairs(every, every, 8, seed=1)):
        x, y, rest = placed(a, grid, one), placed(b, grid, other), every[(13 * t) % len(every)]
        same(pla.matmul(x, y, alpha=2), 2 * (a @ b))
        same(pla.matmul(x, y, alpha=-0.5, layout=rest), -0.5 * (a @ b))
        out = placed(np.full((5, 4), np.nan), grid, rest)  # with beta = 0 what out held is not read
        assert pla.matmul(x, y, out=out) is out
        same(out, a @ b)
        out = placed(c, grid, rest)
        block = out.block
        pla.matmul(x, y, alpha=2, beta=-3, out=out)
        assert out.block is block
        assert out.layout == rest
        same(out, 2 * (a @ b) - 3 * c)
        single = placed(c.astype(np.float32), grid, rest)
        pla.matmul(x, y, out=single, beta=1)
        same(single, (a @ b + c).astype(np.float32))
        same(np.matmul(x, y, out=placed(c, grid, rest)), a @ b)
        narrow = placed(np.full((5, 4), np.nan), grid, rest)
        pla.matmul(x, y, out=narrow, memory="1MiB", alpha=3)
        same(narrow, 3 * (a @ b))
    d, e = numbers((5, 5), seed=4), numbers((5, 5), seed=5)
    for one, other in pairs(every, every, 4, seed=2):
        x, y = placed(d, grid, one), placed(e, grid, other)
        same(pla.matmul(x, y, out=x), d @ e)  # an operand may be overwritten
        same(pla.matmul(placed(d, grid, one), y, out=y), d @ e)
    batch = numbers((3, 5, 5), seed=6)  # the product of transposes is as large as the result
    for rest in (Layout(None, *one.dims), Layout.replicated(3)):
        out = placed(np.full((3, 5, 5), np.nan), grid, rest)
        assert pla.matmul(placed(d, grid, one), placed(batch, grid, Layout(None, *other.dims)), out=out) is out
        same(out, d @ batch)
    z = pla.matmul(placed(a, grid, one), placed(b, grid, other), alpha=2j)
    same(z, 2j * (a @ b))
    half = pla.matmul(placed(a.astype(np.float32), grid, one), placed(b.astype(np.float32), grid, other), alpha=0.5)
    assert half.dtype == np.float32


def test_results_rest_where_they_are_asked_to(grid):
    a, b = numbers((5, 6), seed=1), numbers((6, 4), seed=2)
    every = layouts(grid.axes, 2, partial=False)
    for goal, _ in pairs(every, [0], 12, seed=3):
        x, y = placed(a, grid, goal), placed(b, grid, goal)
        c = pla.matmul(x, y, layout=goal)
        assert c.layout == goal
        same(c, a @ b)
        plan = Plan(m=(None,), n=(None,), k=(grid.axes,), x=goal, w=goal, y=Layout(None, None))
        same(pla.matmul(x, y, plan=plan), a @ b)
        same(pla.matmul(x, y, plan=plan, layout=goal), a @ b)
        assert pla.matmul(x, y, plan=plan, layout=goal).layout == goal
    left = pla.matmul(x, y, plan=Plan(
        m=(None,), n=(None,), k=(grid.axes,), x=goal, w=goal, y=Layout(None, None, partial=grid.axes)
    ))  # fmt: skip
    same(left, a @ b)


def test_the_default_layout_holds_nothing_twice(make_grid, world):
    grid = make_grid(grids(world.size)[1])
    a, b = grid.axes
    x, w = pla.ones((64, 64), grid, Layout(a, b)), pla.ones((64, 64), grid, Layout(a, b))
    assert (x @ w).layout == Layout(a, b)
    line = make_grid({"t": world.size})
    c = pla.ones((8, 512), line, Layout(None, "t")) @ pla.ones((512, 8), line, Layout("t", None))
    assert c.layout in (Layout(None, "t"), Layout("t", None))


def test_planned_grids(world, backend):
    a, b = numbers((30, 50), seed=1), numbers((50, 20), seed=2)
    plan = pla.plan_matmul(30, 20, 50, ranks=world.size, dtype="float64")
    with pla.Grid({"a": world.size}, world, backend) as flat:
        x, y = placed(a, flat, Layout("a", None)), placed(b, flat, Layout(None, "a"))
        with plan.make_grid(flat.world) if backend == "numpy" else pla.Grid({"a": world.size}, world, backend) as grid:
            one, other = layouts(grid.axes, 2, partial=False)[1], layouts(grid.axes, 2, partial=False)[-1]
            c = x.to_grid(grid, one) @ y.to_grid(grid, other)
            same(c, a @ b)
            same(c.to_grid(flat, Layout("a", None)), a @ b)


@pytest.mark.ranks(5, 7, 8)
def test_planned_grids_may_leave_ranks_idle(world):
    plan = pla.plan_matmul(64, 64, 64, ranks=world.size, dtype="float64")
    a = numbers((64, 64))
    with plan.make_grid(world) as grid:
        axes = grid.axes
        x = pla.distribute(a, grid, Layout(axes, None))
        same(x @ x, a @ a)


def test_errors_say_what_would_be_right(make_grid, world):
    grid, other = make_grid({"a": world.size}), make_grid({"a": world.size})
    x, y = pla.ones((4, 5), grid, Layout("a", None)), pla.ones((5, 6), grid, Layout(None, "a"))
    with pytest.raises(ValueError, match=r"shapes \(4, 5\) and \(4, 5\) do not multiply: 5 columns meet 4 rows"):
        x @ x
    with pytest.raises(ValueError, match=r"matmul: shapes \(2,\), \(3,\) do not broadcast together"):
        pla.ones((2, 4, 5), grid, Layout(None, None, None)) @ pla.ones((3, 5, 6), grid, Layout(None, None, None))
    with pytest.raises(GridError, match=r"arrays on different grids meet.*to_grid"):
        x @ pla.ones((5, 6), other, Layout(None, None))
    with pytest.raises(
        TypeError, match=r"matmul: b is a ndarray, not a DistArray; distribute it first: parlinalg\.distribute"
    ):
        x @ np.ones((5, 6))
    with pytest.raises(TypeError, match=r"matmul: a is a ndarray"):
        np.ones((3, 4)) @ x
    with pytest.raises(ValueError, match=r"matmul: b has no dims; multiply by a scalar with \*"):
        pla.matmul(x, x.sum())
    with pytest.raises(ValueError, match=r"beta = 2 needs out="):
        pla.matmul(x, y, beta=2)
    with pytest.raises(ValueError, match=r"out has shape \(4, 5\), the product \(4, 6\)"):
        pla.matmul(x, y, out=x.copy())
    with pytest.raises(TypeError, match=r"dtype complex128 does not fit out of dtype float64"):
        pla.matmul(x, y, alpha=1j, out=pla.zeros((4, 6), grid, Layout(None, None)))
    with pytest.raises(LayoutError, match=r"Layout\('z', None\) names axis 'z'"):
        pla.matmul(x, y, layout=Layout("z", None))
    if world.size > 1:
        part = terms(numbers((5, 6)), grid, Layout(None, None, partial="a"))
        same(x @ part, (x @ part.summed()).gather())
        with (
            pla.explicit(),
            pytest.raises(
                LayoutError,
                match=r"b is Layout\(.*partial='a'\), not summed yet; sum it by \.redistribute\(Layout\(None, None\)\)",
            ),
        ):
            x @ part
        with pytest.raises(LayoutError, match=r"layout= and the layout of out differ"):
            pla.matmul(x, y, layout=Layout("a", None), out=pla.zeros((4, 6), grid, Layout(None, "a")))


@given(st.data())
@agreed
def test_any_product(world, backend, data):
    m, k, n = (data.draw(st.integers(0, 9)) for _ in range(3))
    seed = data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    with pla.Grid(grids(world.size)[seed % 3], world, backend) as grid:
        every = layouts(grid.axes, 2, partial=False)
        one, other, goal = (every[i] for i in rng.integers(0, len(every), 3))
        a, b = numbers((m, k), seed=seed), numbers((k, n), seed=seed + 1)
        x, y = placed(a, grid, one), placed(b, grid, other)
        same(pla.matmul(x, y, layout=goal if seed % 2 else None), a @ b)
        same(pla.matmul(y.T, x.T, memory=None if seed % 5 else 4096), b.T @ a.T)


def resident():
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def under_way():
    """MPI's requests that are not done, those that other tests left among them."""
    return sum(len(comm._under_way) for comm in watch._alive.values())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.timeout(1200)
def test_many_products_leak_nothing(world, backend, full):
    """As many products again take no more memory; on few ranks there are more of them than MPICH has communicators."""
    a = numbers((8, 8))
    rounds = 50_000 if full else 1100 if world.size < 4 else 500
    with pla.Grid(grids(world.size)[1], world, backend) as grid:
        x = pla.distribute(a, grid, Layout(*grid.axes))
        y = pla.distribute(a, grid, Layout(*grid.axes))
        used, communicators, before = [], [], under_way()
        for _ in range(2):
            for i in range(rounds):
                c = pla.matmul(x, y, memory=None if i % 16 else 2048)
            gc.collect()
            used.append(resident())
            communicators.append(len(watch._alive))
            assert under_way() == before
        same(c, a @ a)
        assert used[1] - used[0] < 8 << 20, used
        assert communicators[1] <= communicators[0], communicators  # those of earlier tests may go
