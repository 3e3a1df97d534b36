"""Look-ups by plans, positions, and single items of cut dims."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError, Plan, Tensor
from parlinalg.autograd import ops
from parlinalg.schemes import product_words
from tests.autograd.cases import agree, close, cut, numbers, tensor, value_and_gradients
from tests.autograd.test_products import PLANS

IDS = np.random.default_rng(3).integers(0, 11, (5, 3))
TABLE = numbers(11, 6)
X = numbers(5, 3, 7)


def wide(plan: Plan) -> Plan:
    """A plan of matrices with one more dim, whole, between m and the features."""
    x, y = plan.x, plan.y
    return Plan(
        (*plan.m, None), plan.n, plan.k, Layout(x.dims[0], None, x.dims[1]), plan.w,
        Layout(y.dims[0], None, y.dims[1], partial=y.partial),
    )  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, grid: Grid, serial: Grid) -> None:
    plan = wide(PLANS[name])

    def look_up(table: Tensor) -> Tensor:
        return ops.embedding(cut(IDS, table.grid, Layout(*plan.x.dims[:2])), table, plan)

    agree(look_up, [TABLE], [plan.w], grid, serial, expected=TABLE[IDS], numeric=name == "cube")


@pytest.mark.parametrize("name", [n for n in PLANS if not PLANS[n].y.partial])
def test_words_are_those_of_the_product_without_x(name: str, grid: Grid) -> None:
    plan, ids = PLANS[name], IDS[:, 0]
    columns = product_words(plan, (5, 11), TABLE.shape, grid.sizes, grid.coords)
    rows = cut(ids, grid, Layout(plan.x.dims[0]))
    table = tensor(TABLE, grid, plan.w)
    with pla.ledger(grid) as book:
        y = ops.embedding(rows, table, plan)
    work = len(Layout(plan.m[0]).block((5,), grid.sizes, grid.coords)[0])
    assert book.words.total() == columns["w"] + columns["y"] + work - rows.block.size
    grad = pla.ones(y.shape, grid, y.layout)
    with pla.ledger(grid) as book:
        y.backward(grad)
    assert book.words.total() == columns["grad y"] + columns["dw"]


def test_short_floats_are_summed_in_float32(grid: Grid) -> None:
    """Thousands of equal ids: a sum in 16 bits would stop growing."""
    plan = PLANS["SUMMA"]
    ids = np.repeat([2, 0], [3000, 200])
    for dtype in (np.float16, ml_dtypes.bfloat16):
        table = tensor(TABLE.astype(dtype), grid, plan.w)
        y = ops.embedding(cut(ids, grid, Layout(plan.x.dims[0])), table, plan)
        y.backward(pla.ones(y.shape, grid, y.layout, dtype))
        assert y.dtype == table.grad.dtype == dtype  # type: ignore[union-attr]
        found = table.grad.gather().astype(float)  # type: ignore[union-attr]
        close(found[[0, 1, 2], 0], np.array([200, 0, 3000], dtype).astype(float), 0.01)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_ids(rows: int, grid: Grid, serial: Grid) -> None:
    plan = PLANS["cube"]
    ids = np.full(rows, 10)
    agree(
        lambda t: ops.embedding(cut(ids, t.grid, Layout(plan.x.dims[0])), t, plan), [TABLE], [plan.w], grid, serial,
        expected=TABLE[ids],
    )  # fmt: skip


def test_wrong_ids_are_named(serial: Grid, widest: Grid) -> None:
    plan = wide(PLANS["nothing cut"])
    table = tensor(TABLE, serial, plan.w)
    for bad in (11, -1):
        ids = IDS.copy()
        ids[4, 2] = bad
        with pytest.raises(ValueError, match=rf"id {bad} at \(4, 2\).*vocabulary of 11; ids are in 0 to 10"):
            ops.embedding(cut(ids, serial, Layout(None, None)), table, plan)
    with pytest.raises(TypeError, match=r"float64.*astype"):
        ops.embedding(cut(IDS * 1.0, serial, Layout(None, None)), table, plan)
    with pytest.raises(ValueError, match="2 leading dims"):
        ops.embedding(cut(IDS[0], serial, Layout(None)), table, plan)
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    if widest.sizes[axis] > 1:
        with pytest.raises(LayoutError, match=r"ids do not rest.*\.redistribute"):
            ops.embedding(cut(IDS, widest, Layout(axis, None)), tensor(TABLE, widest, plan.w), plan)
        with pytest.raises(LayoutError, match=r"the table does not rest.*\.redistribute"):
            ops.embedding(
                cut(IDS, widest, Layout(None, None)), tensor(TABLE, widest, Layout(axis, None)), plan
            )  # fmt: skip


LAYOUTS = [Layout("a", "b", None), Layout("b", None, ("a", "c")), Layout(None, ("a", "b"), "c")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_positions_and_items(layout: Layout, grid: Grid, serial: Grid) -> None:
    hidden, numeric = layout.dims[2], layout is LAYOUTS[2]
    agree(
        lambda x, t: ops.add_positions(x, t, 2), [X, numbers(6, 7)], [layout, Layout(None, hidden)], grid, serial,
        expected=X + numbers(6, 7)[2:5], numeric=numeric,
    )  # fmt: skip
    replaced = X.copy()
    replaced[:, 0] = numbers(7)
    agree(
        ops.replace_first, [X, numbers(7)], [layout, Layout(hidden)], grid, serial, expected=replaced, numeric=numeric
    )  # fmt: skip
    for dim, index in ((1, 0), (1, -1), (2, 4), (0, 3)):
        known = X.take(index, dim)
        y = ops.select(tensor(X, grid, layout), dim, index)
        assert set(y.layout.partial) == {a for a in layout.dims[dim] if grid.sizes[a] > 1}

        def settled(x: Tensor, dim: int = dim, index: int = index) -> Tensor:
            y = ops.select(x, dim, index)
            return y.redistribute(y.layout.with_partial(()))

        agree(settled, [X], [layout], grid, serial, expected=known, numeric=numeric and dim == 1)


def test_positions_of_short_floats_and_wrong_sizes(serial: Grid) -> None:
    whole = Layout(None, None, None)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        found = value_and_gradients(ops.add_positions, [X, numbers(3, 7)], [whole, Layout(None, None)], serial, dtype)
        assert {f.dtype for f in found} == {np.dtype(dtype)}
    x = tensor(X, serial, whole)
    with pytest.raises(ValueError, match="3 tokens from position 1 is longer than the 3 positions"):
        ops.add_positions(x, tensor(numbers(3, 7), serial, Layout(None, None)), 1)
    with pytest.raises(ValueError, match=r"\[positions, hidden\]"):
        ops.add_positions(x, tensor(numbers(3, 6), serial, Layout(None, None)))
    with pytest.raises(IndexError, match="no item 3 in dim 1"):
        ops.select(x, 1, 3)
    with pytest.raises(ValueError, match=r"token of shape \(6,\)"):
        ops.replace_first(x, tensor(numbers(6), serial, Layout(None)))


@pytest.mark.mpi(min_size=2)
def test_positions_name_the_layout_that_would_do(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    x = tensor(X, widest, Layout(None, None, axis))
    with pytest.raises(LayoutError, match=r"add_positions.*\.redistribute\(Layout\(None, "):
        ops.add_positions(x, tensor(numbers(4, 7), widest, Layout(axis, None)))
    with pytest.raises(LayoutError, match=r"replace_first.*\.redistribute"):
        ops.replace_first(x, tensor(numbers(7), widest, Layout(None)))
