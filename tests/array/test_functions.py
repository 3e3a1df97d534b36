"""NumPy's functions and reductions on distributed arrays: NumPy's answers, over whole and cut dims."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array.functions import HANDLED, names
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from tests.cases import DTYPES, INTEGERS, check, eps, grids, layouts, numbers, pairs, placed, same, terms

EVERY_AXIS = [None, 0, 1, -1, (0, 2), (1,), (0, 1, 2), ()]


@pytest.fixture(scope="module")
def grid(world, backend):
    return pla.Grid(grids(world.size)[1], world, backend, idle=True)


def sampled(grid, ndim, n, seed=0, partial=False):
    return [layout for layout, _ in pairs(layouts(grid.axes, ndim, partial), [0], n, seed)]


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "any", "all", "prod"])
def test_reductions_over_any_dims(grid, name):
    values = np.where(numbers((4, 3, 5)) == 0, 1.0, numbers((4, 3, 5))) / 2
    for i, layout in enumerate(sampled(grid, 3, 5, seed=len(name))):
        x = placed(values, grid, layout)
        for axis in EVERY_AXIS[i % 2 :: 2] if grid.size > 1 else EVERY_AXIS:
            for keepdims in (False, True):
                expected = getattr(np, name)(values, axis=axis, keepdims=keepdims)
                result = getattr(np, name)(x, axis=axis, keepdims=keepdims)
                same(result, expected, 1e-14)
                assert not set(result.layout.axes) - set(layout.axes)
            if axis is not None:
                same(getattr(x, name)(axis), getattr(values, name)(axis), 1e-14)
        same(getattr(x, name)(), getattr(values, name)(), 1e-14)


def test_reductions_of_every_dtype(grid, backend):
    for dtype in DTYPES:
        values = numbers((6, 4), dtype)
        x = placed(values, grid, Layout(grid.axes, None))
        if backend == "cupy" and dtype.name == "bfloat16":
            continue
        same(x.sum(), values.sum(), eps(dtype))
        same(x.sum(0), values.sum(0), eps(dtype))
        if dtype.name != "bfloat16":
            same(x.mean(0), values.mean(0), 8 * eps(dtype) or 1e-15)
        same(x.any(1), values.any(1)) if dtype.kind != "V" else None
        if dtype.kind != "c":
            same(x.max(0), values.max(0))
            same(x.min(), values.min())
        else:
            with pytest.raises(TypeError, match=r"max of complex numbers, which have no order; use abs\(\)"):
                x.max()
    small = placed(np.full((4, 3), 100, np.int8), grid, Layout(grid.axes, None))
    same(small.sum(), np.full((4, 3), 100, np.int8).sum())
    same(small.sum(dtype=np.int8), np.full((4, 3), 100, np.int8).sum(dtype=np.int8))
    same(small.prod(), np.full((4, 3), 100, np.int8).prod())


def test_halves_are_summed_in_single_precision(make_grid, world):
    grid = make_grid({"a": world.size})
    values = np.ones((4096 * world.size,), np.float16)  # in 16 bits 2048 + 1 = 2048
    assert float(placed(values, grid, Layout("a")).sum(partial=True).block.max()) == 4096
    same(placed(values[:4096], grid, Layout("a")).sum(), np.float16(4096))


def test_a_sum_may_be_left_for_later(grid, world):
    values = numbers((5, 6))
    x = placed(values, grid, Layout(grid.axes, None))
    with pla.ledger(grid) as book:
        later = x.sum(0, partial=True)
    assert book.words.total() == 0
    assert later.layout == Layout(None, partial=grid.axes)
    check(later, values.sum(0))
    same((-2 * x.sum(partial=True)).redistribute(Layout()), -2 * values.sum())
    y = terms(values, grid, Layout(None, grid.axes[0], partial=grid.axes[1:]))
    same(y.sum(1), values.sum(1))
    same(y.mean(), values.mean(), 1e-15)


def test_empty_blocks_and_empty_dims(grid):
    for shape in ((1, 3), (0, 3), (3, 0)):
        values = numbers(shape)
        for layout in (Layout(grid.axes, None), Layout(None, grid.axes), Layout(None, None)):
            x = placed(values, grid, layout)
            same(x.sum(0), values.sum(0))
            same(x.prod(1), values.prod(1))
            same(x.any(0), values.any(0))
            same(x.all(), values.all())
            for axis in (0, 1):
                if shape[axis]:
                    same(x.max(axis), values.max(axis))
                else:
                    with pytest.raises(ValueError, match="which has no elements there"):
                        x.max(axis)
    for dtype in INTEGERS:
        values = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        x = placed(values, grid, Layout(grid.axes))
        same(x.max(), values.max())
        same(x.min(), values.min())
        same(x[:1].max(), values[0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_is_never_lost(grid, dtype):
    for at in range(5):
        values = numbers((5, 3), dtype)
        values[at, 1] = np.nan
        values[1, 2] = np.inf
        for layout in (Layout(grid.axes, None), Layout(None, grid.axes)):
            x = placed(values, grid, layout)
            for name in ("max", "min"):
                for axis in (None, 0, 1):
                    np.testing.assert_array_equal(getattr(x, name)(axis).gather(), getattr(np, name)(values, axis))
        assert np.isnan(x.sum().item())


def test_statistics(grid):
    values = numbers((6, 5), seed=4) + 1e6
    for layout in sampled(grid, 2, 4):
        x = placed(values, grid, layout)
        same(np.var(x), np.var(values), 1e-9)
        same(np.var(x, axis=0, ddof=1), np.var(values, axis=0, ddof=1), 1e-9)
        same(np.std(x, axis=1, keepdims=True), np.std(values, axis=1, keepdims=True), 1e-9)
        same(np.linalg.norm(x), np.linalg.norm(values), 1e-14)
        same(np.linalg.norm(x, axis=1), np.linalg.norm(values, axis=1), 1e-14)
        same(np.count_nonzero(x - 1e6, axis=0), np.count_nonzero(values - 1e6, axis=0))
        same(np.trace(x[:5]), np.trace(values[:5]), 1e-14)
    z = numbers((4, 3), complex)
    same(np.var(placed(z, grid, Layout(grid.axes, None))), np.var(z), 1e-14)
    same(np.linalg.norm(placed(z, grid, Layout(grid.axes, None))), np.linalg.norm(z), 1e-14)


CALLS = {
    "transpose": lambda x: [np.transpose(x), np.transpose(x, (1, 2, 0))],
    "swapaxes": lambda x: [np.swapaxes(x, 0, -1)],
    "moveaxis": lambda x: [np.moveaxis(x, 0, -1), np.moveaxis(x, 2, 0)],
    "expand_dims": lambda x: [np.expand_dims(x, 0), np.expand_dims(x, -1), np.expand_dims(x, 2)],
    "squeeze": lambda x: [np.squeeze(np.expand_dims(x, 1)), np.squeeze(np.expand_dims(x, 3), axis=3)],
    "where": lambda x: [np.where(x > 0, x, -1.0), np.where(x == 1, 2, x), np.where(True, x, x)],
    "clip": lambda x: [np.clip(x, -1, 2), np.clip(x, None, 1), np.clip(x, min=0), np.clip(x, x - 1, x + 1)],
    "round": lambda x: [np.round(x / 3), np.round(x / 3, 1)],
    "real": lambda x: [np.real(x * 1j), np.imag(x * 1j)],
    "isclose": lambda x: [np.isclose(x, x + 1e-9), np.isclose(x, 1.0), np.isclose(x / 0, x / 0, equal_nan=True)],
    "copy": lambda x: [np.copy(x), np.zeros_like(x), np.ones_like(x, dtype=np.int8), np.full_like(x, 3)],
    "broadcast_to": lambda x: [np.broadcast_to(x, (2, *x.shape))],
    "vdot": lambda x: [np.vdot(x, x), np.vdot(x * 1j, x)],
    "sum": lambda x: [np.sum(x, dtype=np.float32), np.add.reduce(x, (0, 1))],
    "any": lambda x: [np.any(x > 1), np.all(x > -9, axis=(0, 1))],
}


@pytest.mark.parametrize("name", CALLS)
def test_function(grid, name):
    values = numbers((4, 3, 5), seed=6)
    with np.errstate(all="ignore"):
        expected = CALLS[name](values)
        for layout in sampled(grid, 3, 4, seed=len(name)):
            for result, want in zip(CALLS[name](placed(values, grid, layout)), expected, strict=True):
                same(result, want, 1e-14)


def test_ravel_concatenate_dot_and_facts(grid):
    values = numbers((4, 3, 5))
    x = placed(values, grid, Layout(None, grid.axes, None))
    same(np.concatenate([x, 2 * x], axis=0), np.concatenate([values, 2 * values], axis=0))
    same(np.concatenate([x, x], axis=-1), np.concatenate([values, values], axis=-1))
    same(np.ravel(placed(values, grid, Layout(None, None, None))), values.ravel())
    same(np.reshape(x, (2, 2, 3, 5)), values.reshape(2, 2, 3, 5))
    assert (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1), len(x), x.size) == ((4, 3, 5), 3, 60, 3, 4, 60)
    assert x.nbytes == 480
    v = placed(numbers((5,)), grid, Layout(None))
    same(np.dot(x, v), values @ numbers((5,)))
    same(np.dot(v.sum(), x), numbers((5,)).sum() * values)
    assert np.allclose(x, x)
    assert not np.allclose(x, x + 1)
    assert np.array_equal(x, x)
    assert not np.array_equal(x, x + 1)
    assert not np.array_equal(x, x[:1])
    if grid.size > 1:
        with pytest.raises(
            LayoutError, match=r"concatenate along dim 1, which .* cuts; redistribute to Layout\(None, None, None\)"
        ):
            np.concatenate([x, x], axis=1)
    with pytest.raises(LayoutError, match="concatenate takes equal layouts and shapes but for dim 0"):
        np.concatenate([x, placed(values[:, :2], grid, x.layout)], axis=0)


def test_other_functions_are_refused_by_name(grid):
    x = placed(numbers((4, 4)), grid, Layout(grid.axes, None))
    for call in (np.sort, np.linalg.svd, np.unique, np.cumsum, np.median, np.linalg.inv, np.fft.fft, np.roll):
        with pytest.raises(
            TypeError,
            match=rf"np\..*{call.__name__} is not defined on distributed arrays; those that are: .*sum.*gather\(\)",
        ):
            call(x) if call is not np.roll else call(x, 1)
    with pytest.raises(TypeError, match=r"linalg\.norm\(ord=1\) is not defined"):
        np.linalg.norm(x, ord=1)
    with pytest.raises(TypeError, match=r"np\.where\(condition\) alone is not defined.*give x and y"):
        np.where(x)


def test_the_list_names_what_is_handled():
    assert len(names()) == len({f.__name__ for f in HANDLED})
    assert {"sum", "linalg.norm", "where", "concatenate"} <= set(names())


def test_wrong_axes(grid):
    x = placed(numbers((4, 3)), grid, Layout(grid.axes, None))
    with pytest.raises(ValueError, match="axis 2 is out of bounds for an array of 2 dims"):
        x.sum(2)
    with pytest.raises(ValueError, match="names a dim twice"):
        x.sum((0, -2))
    with pytest.raises(ValueError, match=r"squeeze takes dims of size 1; axis 0 of shape \(4, 3\)"):
        np.squeeze(x, 0)


@pytest.mark.parametrize("ddof", [3, 5])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero", "ignore:Degrees of freedom")
def test_variance_without_degrees_of_freedom_is_numpys(grid, ddof):
    """As NumPy: infinite, or nan where the squares are zero, with as many degrees as elements or more."""
    values = numbers((3, 4))
    values[:, 0] = 1
    x = placed(values, grid, Layout(grid.axes, None))
    same(np.var(x, axis=0, ddof=ddof), np.var(values, axis=0, ddof=ddof))
    same(np.std(x, axis=0, ddof=ddof), np.std(values, axis=0, ddof=ddof))
