"""Slices, transposes, reshapes, scalars and printing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.array import rows
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from tests.agreement import agreed
from tests.cases import check, grids, layouts, numbers, pairs, placed, same

KEYS = [
    np.s_[1:4], np.s_[:, 2], np.s_[-1], np.s_[::2, 1:], np.s_[..., 0], np.s_[None, 2:5], np.s_[:, None, ::3],
    np.s_[3, 1],
    np.s_[5:2], np.s_[100:], np.s_[-3:-1, -2:], np.s_[...], np.s_[:], np.s_[np.int64(2), ..., None], np.s_[1::2, ::2],
]  # fmt: skip


STAY = [str(np.s_[...]), str(np.s_[:])]  # keys by which nothing moves


@pytest.fixture(scope="module")
def grid(world, backend):
    return pla.Grid(grids(world.size)[1], world, backend, idle=True)


@pytest.mark.parametrize("buffer", [3, 1 << 19])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slices(grid, tune, key, buffer):
    tune(ranks=3, must=str(key) not in STAY, MOVE_BUFFER=buffer)  # of two ranks some keep all that they need
    values = numbers((7, 5), seed=1)
    for layout, _ in pairs(layouts(grid.axes, 2), [0], 6, seed=len(str(key))):
        x = pla.distribute(values, grid, layout)
        result = x[key]
        assert result.shape == values[key].shape
        check(result, values[key])
        kept = [a for a in layout.axes if a in result.layout.axes]
        assert set(result.layout.axes) == set(kept)


def test_an_item_of_a_cut_dim_of_one_item(grid):
    """The dim goes, and so do the axes that cut it: the ranks without the item get it."""
    values = numbers((3, 1, 2), seed=2)
    for layout, _ in pairs(layouts(grid.axes, 3), [0], 12, seed=3):
        x = pla.distribute(values, grid, layout)
        check(x[:, 0], values[:, 0])
        check(x[2, -1, 1], np.asarray(values[2, -1, 1]))


def test_negative_steps(grid):
    values = numbers((6, 5))
    x = placed(values, grid, Layout(grid.axes, None))
    check(x[:, ::-1], values[:, ::-1])
    check(x[:, 4:0:-2], values[:, 4:0:-2])
    check(x[1:5, ::-1], values[1:5, ::-1])
    check(x[::-1], values[::-1])
    check(x[4:0:-2], values[4:0:-2])


PARTS = (np.s_[:], np.s_[1:-2], np.s_[2::2], np.s_[-2], np.s_[::-1])
ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("buffer", [5, 1 << 19])
def test_slices_of_any_dims_of_permuted_arrays(grid, tune, buffer):
    """Of three dims, so that an order and its inverse are two; those that are cut, and others beside them."""
    tune(ranks=2, MOVE_BUFFER=buffer)
    values, every = numbers((6, 5, 8), seed=3), layouts(grid.axes, 3, partial=False)
    keys = list(itertools.product(PARTS, repeat=3))
    x = pla.distribute(values, grid, Layout(None, None, grid.axes))
    for order in ORDERS:
        check(x[:, :, 1:6].transpose(order), values[:, :, 1:6].transpose(order))
        key = tuple(np.s_[1:6] if d == 2 else np.s_[:] for d in order)
        check(x.transpose(order)[key], values.transpose(order)[key])
    for at, (layout, key) in enumerate(pairs(every, keys, 70, seed=buffer % 7)):
        order = ORDERS[at % 6]
        turned, want = pla.distribute(values, grid, layout).transpose(order), values.transpose(order)
        check(turned[key], want[key])
        check(turned[key[:1]], want[key[:1]])
        check(turned[(..., None, *key[1:])], want[(..., None, *key[1:])])
    check(x, values)


@pytest.mark.parametrize("few", [1, 16])
def test_index_arrays_on_few_ranks_and_many(grid, monkeypatch, few):
    """Elements are parted by comparisons with each rank, or from some ranks on by a search and a sort."""
    monkeypatch.setattr(rows, "FEW", few)
    values, rng = numbers((11, 5), seed=3), np.random.default_rng(4)
    at, to = rng.integers(-11, 11, (3, 7)), rng.integers(0, 5, 7)
    for layout, _ in pairs(layouts(grid.axes, 2), [0], 6, seed=5):
        x = pla.distribute(values, grid, layout)
        for index in (at, pla.distribute(at, grid, Layout(None, grid.axes))):
            check(x[index], values[at])
            check(x[index, to], values[at, to])
        check(x[:, to], values[:, to])
        if not layout.partial:
            y, want = x.copy(), values.copy()
            y[at[0], to] = x[at[1], to]
            want[at[0], to] = values[at[1], to]
            check(y, want)
    line = pla.distribute(np.arange(11.0), grid, Layout(grid.axes))
    check(np.searchsorted(line, line[::-1] - 0.5), np.arange(11)[::-1])


def test_wrong_keys(grid):
    x = placed(numbers((6, 5)), grid, Layout(grid.axes, None))
    for key in ("name", 1.5, object(), np.array([0.5]), x):
        with pytest.raises(IndexError, match=r"an index (array )?has integers"):
            x[key]
    with pytest.raises(IndexError, match="index 6 is out of bounds for dim 0 of size 6"):
        x[6]
    with pytest.raises(IndexError, match="3 indices for an array of 2 dims"):
        x[1, 2, 3]


@pytest.mark.mpi(min_size=2)
def test_an_index_out_of_bounds_raises_on_all_ranks(make_grid, world):
    """Those without its part of the index too, and those outside the grid."""
    for ranks in (world.size, world.size - 1):
        grid = make_grid({"a": ranks})
        x = pla.distribute(numbers((2 * world.size, 3)), grid, Layout("a", None))
        wrong = np.array([0, 1, -2 * world.size - 1])
        for index in (wrong, wrong[::-1], pla.distribute(wrong, grid, Layout("a"))):
            with pytest.raises(IndexError, match=f"out of bounds for dim 0 of size {2 * world.size}"):
                x[index]
            with pytest.raises(IndexError, match="out of bounds"):
                x[index] = 1
        with pytest.raises(IndexError, match=r"\(2,\), \(3,\) do not broadcast"):
            x[np.array([0, 1]), np.array([0, 1, 2])]


def test_indices_are_not_looked_up_where_there_are_none(grid):
    """NumPy forgives numbers out of bounds that are broadcast to no element."""
    values = numbers((3, 1))
    x, none, wrong = placed(values, grid, Layout(grid.axes, None)), np.zeros(0, int), np.array([-2])
    for index in (wrong, pla.distribute(wrong, grid, Layout(None))):
        check(x[none, index], values[none, wrong])
        x[none, index] = 1
        with pytest.raises(IndexError, match="index -2 is out of bounds for dim 1 of size 1"):
            x[3:, index] = 1
    check(x, values)


def test_values_lie_as_they_like_along_new_dims(grid):
    """A dim of one item is cut too: the rank that holds it gives it to the others."""
    values, line = numbers((4, 5), seed=4), numbers((1,), seed=5)
    for key in (np.s_[0, None, 3], np.s_[None, 1, 2], np.s_[None, np.array([1, 2]), 0]):
        x, expected = placed(values, grid, Layout(*[None] * 2)), values.copy()
        x[key] = pla.distribute(line, grid, Layout(grid.axes))
        expected[key] = line
        check(x, expected)


def test_index_arrays_beside_an_ellipsis_without_dims(grid):
    values = numbers((4, 5), seed=4)
    x = placed(values, grid, Layout(grid.axes, None))
    rows = np.array([3, 0, 3])
    for key in (np.s_[None, rows, ..., 3], np.s_[None, rows, 3], np.s_[None, rows, ...], np.s_[..., None, rows, 1]):
        same(x[key], values[key])


@given(st.data())
@agreed
def test_any_slice(world, backend, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3)))
    key = tuple(data.draw(st.slices(n).filter(lambda s: (s.step or 1) > 0)) for n in shape)
    seed = data.draw(st.integers(0, 10**6))
    with pla.Grid(grids(world.size)[seed % 3], world, backend) as grid:
        layout, _ = next(pairs(layouts(grid.axes, len(shape)), [0], 1, seed))
        values = numbers(shape, seed=seed)
        check(pla.distribute(values, grid, layout)[key], values[key])


def test_transposes_are_views(grid, xp):
    values = numbers((3, 4, 5), complex)
    x = placed(values, grid, Layout(grid.axes[0], None, grid.axes[1]))
    same(x.T, values.T)
    same(x.mT, values.mT)
    same(x.transpose(1, 2, 0), values.transpose(1, 2, 0))
    same(x.transpose((2, 0, 1)).T.transpose(0, 2, 1), values.transpose((2, 0, 1)).T.transpose(0, 2, 1))
    same(x.H, values.conj().T)
    assert x.T.layout == Layout(grid.axes[1], None, grid.axes[0])
    x.T.block[...] = 0
    same(x, np.zeros_like(values))
    real = placed(numbers((3, 4)), grid, Layout(grid.axes, None))
    real.H.block[...] = 2
    same(real, np.full((3, 4), 2.0))
    with pytest.raises(ValueError, match="takes each of 0 to 2 once, not"):
        x.transpose(0, 0, 1)
    with pytest.raises(ValueError, match="mT needs at least two dims"):
        pla.zeros((3,), grid, Layout(None)).mT


def test_astype_copy_real_imag(grid):
    values = numbers((3, 4), complex)
    x = placed(values, grid, Layout(grid.axes, None))
    same(x.real, values.real)
    same(x.imag, values.imag)
    same(x.conj(), values.conj())
    same(x.real.astype(np.int16), values.real.astype(np.int16))
    same(x.astype("complex64"), values.astype("complex64"))
    y = x.copy()
    y.block[...] = 0
    same(x, values)


def test_reshape_keeps_blocks_or_says_what_would(make_grid, world):
    grid = make_grid({"a": world.size})
    p = world.size
    for old, new, layout, then in (
        ((2 * p, 6), (2 * p, 2, 3), Layout("a", None), Layout("a", None, None)),
        ((2 * p, 6), (12 * p,), Layout("a", None), Layout("a")),
        ((12 * p,), (p, 3, 4), Layout("a"), Layout("a", None, None)),
        ((3, 2 * p), (3, p, 2), Layout(None, "a"), Layout(None, "a", None)),
        ((1, 2 * p), (2 * p,), Layout(None, "a"), Layout("a")),
        ((2 * p,), (1, 2 * p, 1), Layout("a"), Layout(None, "a", None)),
        ((4, 6), (-1,), Layout(None, None), Layout(None)),
        ((p, 0), (0, 5), Layout(None, None), Layout(None, None)),
        ((1,), (), Layout(None), Layout()),
    ):
        values = numbers(old)
        result = pla.distribute(values, grid, layout).reshape(new)
        check(result, values.reshape(new))
        if p > 1:
            assert result.layout == then, (old, new)
    x = pla.distribute(numbers((3, 4 * p)), grid, Layout(None, "a"))
    same(
        x.reshape(3, 4, p) if p == 1 else x.reshape(3, 4 * p),
        numbers((3, 4 * p)).reshape((3, 4, p) if p == 1 else (3, 4 * p)),
    )
    same(x.reshape(12 * p), numbers((3, 4 * p)).reshape(12 * p))
    if p > 1:
        with (
            pla.explicit(),
            pytest.raises(
                LayoutError,
                match=r"dims \[1\], whose pieces are not pieces of the new dims; redistribute to Layout\(None, None\)",
            ),
        ):
            x.reshape(12 * p)
        y = pla.distribute(numbers((2 * p + 1, 3)), grid, Layout("a", None))
        same(y.reshape(2 * p + 1, 1, 3), numbers((2 * p + 1, 3)).reshape(2 * p + 1, 1, 3))
    with pytest.raises(ValueError, match=r"does not reshape to \(5, -1\)"):
        pla.zeros((3, 4), grid, Layout(None, None)).reshape(5, -1)


def test_scalars(grid):
    for layout in (Layout(grid.axes, None), Layout(None, None), Layout(None, None, partial=grid.axes)):
        x = pla.distribute(np.array([[3.0]]), grid, layout)
        assert x.item() == 3.0
        assert type(x.item()) is float
        assert bool(x)
    total = pla.distribute(np.arange(5), grid, Layout(grid.axes)).sum()
    assert (int(total), float(total), complex(total), total.item()) == (10, 10.0, 10 + 0j, 10)
    with pytest.raises(
        ValueError, match=r"truth value of an array of shape \(2,\) is ambiguous; use any\(\) or all\(\)"
    ):
        bool(pla.zeros((2,), grid, Layout(None)))
    with pytest.raises(ValueError, match=r"item\(\) takes an array of one element; this one has shape \(2,\)"):
        pla.zeros((2,), grid, Layout(None)).item()
    with pytest.raises(TypeError, match="only an array without dims becomes a Python scalar"):
        float(pla.zeros((1,), grid, Layout(None)))
    with pytest.raises(TypeError, match="without dims"):
        len(total)


def test_printing_is_alike_on_all_ranks(grid, world):
    for shape in ((), (3,), (4, 5), (40, 100), (3, 500), (0, 3), (7, 8, 30)):
        values = np.arange(math.prod(shape), dtype=float).reshape(shape)
        for layout, _ in pairs(layouts(grid.axes, len(shape)), [0], 3, seed=len(shape)):
            x = placed(values, grid, layout.with_partial(()))
            text = str(x)
            assert text == f"{x!r}\n{np.array2string(values)}"
            assert all(theirs == text for theirs in world.share(text))
    assert repr(x).startswith(f"DistArray(shape=(7, 8, 30), dtype=float64, layout={x.layout!r}, grid=Grid(")


def test_ends_of_slices_are_arrays_without_dims(grid):
    """As NumPy's, by `__index__`; beside a mask, an integer and an index array too."""
    a = numbers((6, 5))
    x = placed(a, grid, Layout(grid.axes, None))
    end = (x > 100).sum() + 3
    same(x[:, :end], a[:, :3])
    same(x[1:end, end:], a[1:3, 3:])
    same(x[x[:, 0] < 100, :end], a[a[:, 0] < 100, :3])
