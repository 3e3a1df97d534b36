"""Streamed panels: every stationary matrix, any width, in the memory that was given."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.errors import PlanError
from parlinalg.layout import Layout
from parlinalg.matmul.assign import assign
from parlinalg.matmul.execute import check_operands
from parlinalg.matmul.stream import buffers, panels
from parlinalg.matmul.stream import stream as streamed
from parlinalg.plan import Plan
from tests.cases import DTYPES, EVERY_SIZE, eps, grids, layouts, numbers, pairs, placed, same

SAMPLE = {1: 30, 2: 60, 3: 50, 4: 50, 6: 24, 8: 20, 12: 8}


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def turned(array, grid, layout, transpose):
    return placed(np.ascontiguousarray(array.T), grid, layout.T).T if transpose else placed(array, grid, layout)


def stream(plan, x, w, stationary, width):
    shape, grid = check_operands(plan, x, w), x.grid
    if not grid.inside:
        return pla.DistArray(np.empty((0,) * len(shape)), shape, plan.y, grid)
    return pla.DistArray(streamed(plan, x, w, stationary, width), shape, plan.y, grid)


@pytest.mark.ranks(*EVERY_SIZE)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stationary", ["x", "w", "y"])
def test_every_stationary_matrix_and_width(grid, world, full, stationary):
    every = layouts(grid.axes, 2, partial=False)
    shapes = [(5, 7, 6), (1, 9, 2), (8, 1, 8), (0, 3, 4), (3, 0, 4), (3, 4, 0), (13, 11, 5)]
    most = None if full and len(every) < 30 else SAMPLE[world.size] * (10 if full else 1)
    for t, (one, other) in enumerate(pairs(every, every, most, seed=ord(stationary))):
        m, k, n = shapes[t % len(shapes)]
        a, b = numbers((m, k), seed=t), numbers((k, n), seed=t + 1)
        x, w = turned(a, grid, one, t % 2), turned(b, grid, other, t % 3 == 0)
        rest = every[(17 * t) % len(every)]
        rng = np.random.default_rng(t)
        choice = rng.integers(0, 4, len(grid.axes))
        at = {g: [v for v, c in zip(grid.axes, choice, strict=True) if "mnk"[c : c + 1] == g] for g in "mnk"}
        plan = Plan(m=(at["m"],), n=(at["n"],), k=(at["k"],), x=one, w=other, y=rest) if t % 2 else None
        plan = plan or assign(one, other, a.shape, b.shape, grid.sizes, rest if t % 4 else None)
        for width in (1, 3, 100)[t % 3 :][:1]:
            result = stream(plan, x, w, stationary, width)
            assert result.layout == plan.y
            same(result, a @ b)
    if grid.inside:  # ranks whose stretch has more panels number their next messages as the others do
        assert len(set(grid.everyone.share(grid.ticket()))) == 1


@pytest.mark.ranks(8)
def test_owners_of_panels_gather_before_they_broadcast(make_grid):
    """k rests cut by b alone and m is gathered over c: consecutive panels have other owners."""
    grid = make_grid({"a": 2, "b": 2, "c": 2})
    a, b = numbers((13, 12), seed=1), numbers((12, 9), seed=2)
    plan = Plan(
        m=("a",),
        n=(("b", "c"),),
        k=(None,),
        x=Layout(("a", "c"), "b"),
        w=Layout(("b",), "c"),
        y=Layout("a", ("b", "c")),
    )
    for width in (1, 2, 3, 6):
        for stationary in "yxw":
            same(stream(plan, placed(a, grid, plan.x), placed(b, grid, plan.w), stationary, width), a @ b)


def test_dtypes_and_batches(make_grid, world, backend):
    grid = make_grid(grids(world.size)[1])
    p, q = grid.axes
    for dtype in DTYPES[:-1]:
        a, b = numbers((6, 8), dtype, 1), numbers((8, 5), dtype, 2)
        plan = assign(Layout(p, q), Layout(p, q), a.shape, b.shape, grid.sizes)
        for stationary in "xwy":
            c = stream(plan, placed(a, grid, Layout(p, q)), placed(b, grid, Layout(p, q)), stationary, 2)
            assert c.dtype == dtype
            np.testing.assert_allclose(c.gather().astype(complex), (a @ b).astype(complex), rtol=2 * eps(dtype))
    a, b = numbers((3, 6, 8), seed=1), numbers((3, 8, 5), seed=2)
    plan = assign(Layout(None, p, q), Layout(None, p, q), a.shape, b.shape, grid.sizes, None, 1)
    for stationary in "xwy":
        same(stream(plan, placed(a, grid, plan.x), placed(b, grid, plan.w), stationary, 3), a @ b)


def test_panels_end_where_any_owner_does():
    assert [len(p) for p in panels(4, [5, 4], [3, 3, 3])] == [3, 2, 1, 3]
    assert list(panels(2, [0, 0])) == []
    assert [(p.start, p.stop) for p in panels(2, [0, 3, 0, 1])] == [(0, 2), (2, 3), (3, 4)]


def test_the_error_names_the_least_memory_and_that_works(grid):
    every = layouts(grid.axes, 2, partial=False)
    a, b = numbers((40, 60), seed=1), numbers((60, 50), seed=2)
    refused = 0
    for one, other in pairs(every, every, 8, seed=5):
        x, w = placed(a, grid, one), placed(b, grid, other)
        plan = assign(one, other, a.shape, b.shape, grid.sizes)
        kernels = buffers(plan, a.shape, b.shape, grid)
        if min(k.elements(1) for k in kernels) == 0:
            same(pla.matmul(x, w, memory=0), a @ b)
            continue
        refused += 1
        with pytest.raises(
            PlanError, match=r"needs at least \d+ bytes a rank beside its blocks at rest; memory=1 is 1"
        ) as caught:
            pla.matmul(x, w, memory=1)
        least = int(re.search(r"least (\d+) bytes", str(caught.value))[1])
        for memory in (least, least + 999, "1MiB"):
            same(pla.matmul(x, w, memory=memory), a @ b)
        with pytest.raises(PlanError):
            pla.matmul(x, w, memory=least - 1)
    assert refused or grid.size == 1


@pytest.mark.timeout(200)
def test_the_memory_given_is_kept_to(make_grid, world, backend, full, tune):
    """Peak beside the blocks at rest ≤ 1.2 × what was given; a product planned with a memory runs in that memory."""
    if backend != "numpy":
        return  # device memory is not traced
    grid = make_grid(grids(world.size)[1])
    tune(ranks=2, MOVE_BUFFER=1 << 12)
    side = 1200 if full else 480
    p, q = grid.axes
    a = np.random.default_rng(0).standard_normal((side, side))
    x, w = placed(a, grid, Layout(p, q)), placed(a.T.copy(), grid, Layout(p, q))
    plan = assign(x.layout, w.layout, x.shape, w.shape, grid.sizes)
    pla.matmul(x, w, memory="1GiB")  # communicators and BLAS buffers are made
    for kernel in buffers(plan, x.shape, w.shape, grid):
        width = 24
        memory = kernel.elements(width) * 8
        if kernel.stationary is None or kernel.elements(1) == 0:
            continue
        if kernel.line:  # what is held whole is no room for panels
            assert kernel.width(kernel.elements(width)) == min(width, kernel.extent), kernel
        tracemalloc.start()
        c = stream(plan, x, w, kernel.stationary, width)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        resting = c.block.nbytes
        assert peak <= 1.2 * (resting + memory) + 60_000, (kernel, peak, resting, memory)
        np.testing.assert_allclose(c.gather(), a @ a.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_plan_made_for_a_memory_runs_in_it(world, backend, dtype):
    """The planner's model of memory (blocks at rest and buffers) and the kernels' own (buffers beside them) agree."""
    from parlinalg.matmul.planner import Needs, least_words

    item = np.dtype(dtype).itemsize
    for m, n, k in ((96, 80, 64), (64, 64, 640), (200, 24, 24)):
        free = pla.plan_matmul(m, n, k, ranks=world.size, dtype=dtype)
        needs = Needs.of(m, n, k, *free.factors)
        for memory in (free.memory, least_words(needs) * item, (least_words(needs) * item + free.memory) // 2):
            plan = pla.plan_matmul(m, n, k, ranks=world.size, dtype=dtype, memory=memory)
            assert plan.memory <= memory
            pm, pn, pk = plan.factors
            with pla.Grid({"m": pm, "n": pn, "k": pk}, world, backend, idle=True) as grid:
                rest = Plan(
                    m=("m",), n=("n",), k=("k",),
                    x=Layout("m", ("k", "n")), w=Layout(("k", "m"), "n"), y=Layout("m", ("n", "k")),
                )  # fmt: skip
                a, b = numbers((m, k), dtype, 1), numbers((k, n), dtype, 2)
                x, w = pla.distribute(a, grid, rest.x), pla.distribute(b, grid, rest.w)
                beside = plan.memory - Needs.of(m, n, k, pm, pn, pk).rest * item
                same(pla.matmul(x, w, plan=rest, memory=beside), a @ b)
