"""Words that array operations receive, counted by the ledger."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array.align import narrowed
from parlinalg.layout import Layout
from tests.cases import check, grids, lacks, layouts, numbers, pairs, terms

PER_RANK = 1 << 14


@pytest.fixture(scope="module", params=[0, 1], ids=["one axis", "two axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


@pytest.mark.parametrize("shapes", [((6, 5), (6, 5)), ((7, 4), (4,)), ((5, 1), (3, 1, 6))], ids=str)
def test_elementwise_operations_receive_what_their_layout_lacks(grid, shapes):
    first, second = (numbers(shape, seed=i) for i, shape in enumerate(shapes))
    choices = (layouts(grid.axes, a.ndim, partial=False) for a in (first, second))
    for one, other in pairs(*choices, 40, seed=len(shapes[1])):
        x, y = pla.distribute(first, grid, one), pla.distribute(second, grid, other)
        with pla.ledger(grid) as book:
            z = x * y
        most = sum(lacks(a.layout, narrowed(z.layout, a.shape, z.shape), a.shape, grid) for a in (x, y))
        assert book.words.total() <= most, (one, other, z.layout)
        check(z, first * second)


@pytest.mark.parametrize("shapes", [((6, 5), (6, 5)), ((7, 4), (4,)), ((5, 1), (3, 1, 6)), ((5, 3), ())], ids=str)
def test_a_plan_says_what_the_ledger_counts(grid, shapes):
    first, second = (numbers(shape, seed=i) for i, shape in enumerate(shapes))
    choices = (layouts(grid.axes, a.ndim) for a in (first, second))
    for one, other in pairs(*choices, 40, seed=len(shapes[1])):
        x, y = pla.distribute(first, grid, one), pla.distribute(second, grid, other)
        plan = pla.plan_elementwise(x, y)
        with pla.ledger(grid) as book:
            z = np.hypot(x, y)  # not linear: terms are summed
        assert z.layout == plan.layout
        assert plan.shape == z.shape
        mine = sum(plan.words(grid.coords)) if grid.inside else 0
        assert book.words.total() == mine, (one, other, plan.explain())
        total = sum(grid.world.share(mine))
        assert f"{total:,} received by all ranks" in plan.explain()
        assert ": chosen" in plan.explain()
        best = min(plan.candidates, key=lambda candidate: candidate.cost)
        assert best.layout == plan.layout or not total
        again = pla.plan_elementwise((x.shape, one), (y.shape, other), grid=grid.sizes)
        assert again == plan


def test_the_items_of_a_dim_come_at_once(grid):
    given = numbers((9, 4, 3))
    for layout in layouts(grid.axes, 3):
        x = terms(given, grid, layout) if layout.partial else pla.distribute(given, grid, layout)
        for axis in (0, 1, -1):
            with pla.ledger(grid) as one:
                first = x[(slice(None),) * (axis % 3) + (0,)]
            with pla.ledger(grid) as book:
                parts = pla.unstack(x, axis=axis)
            assert book.calls.total() <= max(1, one.calls.total()), (layout, axis)
            assert parts[0].layout == first.layout
            for part, want in zip(parts, np.moveaxis(given, axis, 0), strict=True):
                check(part, want)
    x = pla.distribute(given, grid, Layout(grid.axes, None, None))
    first, second, *_ = pla.unstack(x)
    first += 1
    check(second, given[1])
    check(x, given)


@pytest.mark.parametrize("keys", ["random", "equal", "few", "sorted", "reversed"])
def test_a_sort_receives_little_more_than_its_part(grid, keys):
    n = PER_RANK * grid.size
    made = {
        "random": np.random.default_rng(5).random(n), "equal": np.full(n, 2.5), "sorted": np.arange(n) / 2,
        "few": np.random.default_rng(5).integers(0, 3, n) / 2, "reversed": np.arange(n)[::-1] / 2,
    }  # fmt: skip
    x = pla.distribute(made[keys], grid, Layout(tuple(grid.axes)))
    with pla.ledger(grid) as book:
        y = np.sort(x)
    assert book.words.total() <= 1.3 * PER_RANK
    assert y.layout == x.layout
    assert y.block.shape[0] == (PER_RANK if grid.inside else 0)
    check(y, np.sort(made[keys]))
