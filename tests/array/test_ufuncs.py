"""Elementwise operations: NumPy's values and dtypes on equal layouts, sentences for unequal ones."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.errors import GridError, LayoutError
from parlinalg.layout import Layout
from tests.agreement import agreed
from tests.cases import DTYPES, alike, check, eps, grids, layouts, numbers, pairs, placed, same, terms

BINARY = [np.add, np.subtract, np.multiply, np.true_divide, np.maximum, np.minimum, np.less, np.equal, np.logical_and]
UNARY = [np.negative, np.absolute, np.exp, np.sqrt, np.tanh, np.sign, np.conjugate, np.isnan, np.square]


def quiet():
    return np.errstate(all="ignore")


@pytest.fixture(scope="module")
def grid(world, backend):
    return pla.Grid(grids(world.size)[1], world, backend, idle=True)


def both(function, *arrays):
    """NumPy's answer, or the error it raises."""
    try:
        with quiet():
            return function(*arrays), None
    except TypeError as error:
        return None, error


def supported(dtype, backend, *more):
    """CuPy has few functions of bfloat16, and says so; the others are the same."""
    return backend == "numpy" or not any(d.name == "bfloat16" for d in (dtype, *more))


@pytest.mark.parametrize("ufunc", UNARY, ids=lambda u: u.__name__)
def test_unary(grid, ufunc, backend):
    for dtype in DTYPES:
        if not supported(dtype, backend):
            continue
        values = numbers((5, 4), dtype)
        expected, error = both(ufunc, values)
        x = placed(values, grid, Layout(grid.axes, None))
        if error is None:
            with quiet():
                result = ufunc(x)
            assert result.layout == x.layout
            alike(result, expected, 4 * eps(expected.dtype))
        else:
            with pytest.raises(TypeError):
                ufunc(x)


@pytest.mark.parametrize("ufunc", BINARY, ids=lambda u: u.__name__)
def test_dtypes_are_promoted_as_numpy_does(grid, ufunc, backend):
    layout = Layout(None, grid.axes)
    for one, other in pairs(DTYPES, DTYPES, None if grid.size == 1 else 40, seed=BINARY.index(ufunc)):
        if not supported(one, backend, other):
            continue
        a, b = numbers((3, 5), one, seed=1), numbers((3, 5), other, seed=2)
        if ufunc is np.true_divide and backend == "cupy" and "c" in (one.kind, other.kind):
            b[b == 0] = 1  # a GPU has no number there where NumPy has infinities
        expected, error = both(ufunc, a, b)
        if error is None:
            with quiet():
                result = ufunc(placed(a, grid, layout), placed(b, grid, layout))
            alike(result, expected, 4 * eps(expected.dtype))


def test_scalars(grid):
    for dtype in DTYPES[2:]:
        values = numbers((4, 3), dtype)
        x = placed(values, grid, Layout(grid.axes[0], None))
        for scalar in (2, 2.5, 1 + 2j, np.float32(3), np.int8(2), np.array(4.0), True):
            for op in (operator.add, operator.mul, operator.sub):
                for swap in (False, True):
                    args, mine = ((scalar, values), (scalar, x)) if swap else ((values, scalar), (x, scalar))
                    expected, error = both(op, *args)
                    if error is None:
                        alike(op(*mine), expected, 4 * eps(expected.dtype))


def test_operators(grid, backend):
    a, b = numbers((4, 5), seed=1), numbers((4, 5), seed=2)
    layout = Layout(None, grid.axes)
    x, y = pla.distribute(a, grid, layout), pla.distribute(b, grid, layout)
    same(-x, -a)
    same(abs(x), abs(a))
    same(x - 2 * y + 1, a - 2 * b + 1)
    power = 4 * eps(a.dtype) if backend == "cupy" else 0.0  # CUDA's are off by one or two roundings
    same(x**2, a**2, power)
    same(2.0**x, 2.0**a, power)
    same((x > y) & (x != 0) | ~(y == 1), (a > b) & (a != 0) | ~(b == 1))
    same(x // 2, a // 2)
    same(x % 3, a % 3)
    same(divmod(x, 3)[0], divmod(a, 3)[0])
    same(np.divmod(x, 3)[1], np.divmod(a, 3)[1])
    z = x
    z += y
    same(z, a + b)
    same(x, a + b)  # in place, as NumPy's


def test_out_and_dtype(grid):
    a, layout = numbers((4, 5)), Layout(grid.axes, None)
    x = pla.distribute(a, grid, layout)
    out = pla.zeros((4, 5), grid, layout)
    assert np.multiply(x, 3, out=out) is out
    same(out, a * 3)
    same(np.add(x, 1, dtype=np.float32), np.add(a, 1, dtype=np.float32))
    other = pla.zeros((4, 5), grid, Layout(None, grid.axes))
    assert np.add(x, x, out=other) is other
    same(other, a + a)
    if grid.size > 1:
        with pla.explicit(), pytest.raises(LayoutError, match=r"add: .*redistribute\("):
            np.add(x, x, out=other)
    with pytest.raises(ValueError, match=r"out= of np\.add has shape \(5, 4\), the result \(4, 5\)"):
        np.add(x, x, out=pla.zeros((5, 4), grid, layout))
    with pytest.raises(TypeError, match=r"out= of np\.add is a ndarray; the result is distributed, and so must out be"):
        np.add(x, x, out=np.zeros((4, 5)))
    with pytest.raises(TypeError, match="an array of dtype object cannot be distributed"):
        np.add(x, x, dtype=object)
    with pytest.raises(TypeError, match=r"out= of np\.add is distributed, but its operands are not"):
        np.add(1, 2, out=x)


def test_broadcasting(grid):
    axes = grid.axes
    big = numbers((4, 3, 6), seed=1)
    x = pla.distribute(big, grid, Layout(axes[0], None, axes[1]))
    for shape, layout in (
        ((6,), Layout(axes[1])),
        ((1, 6), Layout(None, axes[1])),
        ((4, 1, 1), Layout(axes[0], None, None)),
        ((3, 1), Layout(None, None)),
        ((), Layout()),
        ((1, 1, 1), Layout(None, None, None)),
    ):
        small = numbers(shape, seed=2)
        y = pla.distribute(small, grid, layout)
        for result, expected in (
            (x + y, big + small),
            (y - x, small - big),
            (np.maximum(y, x), np.maximum(small, big)),
        ):
            assert result.layout == x.layout
            same(result, expected)
    col, row = numbers((4, 1)), numbers((1, 6))
    outer = pla.distribute(col, grid, Layout(axes[0], None)) * pla.distribute(row, grid, Layout(None, axes[1]))
    assert outer.layout == Layout(axes[0], axes[1])
    same(outer, col * row)
    with pytest.raises(ValueError, match=r"shapes \(4, 3, 6\), \(5,\) do not broadcast together"):
        x + pla.zeros((5,), grid, Layout(None))


@pytest.mark.mpi(min_size=2)
def test_unequal_layouts_meet_or_are_refused(make_grid, world):
    grid = make_grid({"a": world.size})
    x = pla.distribute(numbers((4, 5)), grid, Layout("a", None))
    y = pla.distribute(numbers((4, 5)), grid, Layout(None, "a"))
    same(x + y, 2 * numbers((4, 5)))
    assert (x + y).layout == x.layout
    with pla.explicit(), pytest.raises(LayoutError) as caught:
        x + y
    sentence = str(caught.value)
    assert "Layout('a', None)" in sentence
    assert "Layout(None, 'a')" in sentence
    assert "mend it by .redistribute(" in sentence
    mended = sentence.split("mend it by ")[1]
    same(x + eval("y" + mended, {"y": y, "Layout": Layout}), 2 * numbers((4, 5)))
    row = pla.distribute(numbers((5,)), grid, Layout(None))
    same(y + row, numbers((4, 5)) + numbers((5,)))
    with pla.explicit(), pytest.raises(LayoutError, match=r"\.redistribute\(Layout\('a'\)\)"):
        y + row
    line = pla.distribute(numbers((1, 5)), grid, Layout("a", None))
    same(x + line, numbers((4, 5)) + numbers((1, 5)))
    with pla.explicit(), pytest.raises(LayoutError, match=r"redistribute\(Layout\(None, None\)\)"):
        x + line


@pytest.mark.mpi(min_size=2)
def test_partial_arrays_take_linear_operations_only(make_grid, world):
    grid = make_grid({"a": world.size})
    a, b = numbers((4, 5), seed=1), numbers((4, 5), seed=2)
    layout = Layout(None, None, partial="a")
    x, y, whole = terms(a, grid, layout), terms(b, grid, layout, seed=9), pla.distribute(a, grid, Layout(None, None))
    for result, expected in ((x + y, a + b), (x - y, a - b), (-x, -a), (3 * x, 3 * a), (x / 4, a / 4), (x.T, a.T)):
        assert result.layout.partial == ("a",)
        check(result, expected)
    refused = [
        lambda: x + whole, lambda: whole - x, lambda: x + 1, lambda: x * y, lambda: x * whole, lambda: 2 / x,
        lambda: np.exp(x), lambda: x > 0, lambda: abs(x), lambda: np.maximum(x, y), lambda: x**2,
        lambda: x.max(), lambda: np.var(x), lambda: np.round(x), lambda: np.where(x, 1, 2), lambda: x.any(),
    ]  # fmt: skip
    for call in refused:
        with (
            pla.explicit(),
            pytest.raises(
                LayoutError, match=r"partial='a'\), (which is )?not summed yet.*\.redistribute\(Layout\(None, None\)\)"
            ),
        ):
            call()
        with quiet():
            assert not call().layout.partial  # else they are summed first
    same(x * y, a * b, 64 * eps(a.dtype))
    short = terms(numbers((4, 5), np.int8), grid, layout)
    refused = [
        lambda: x * np.inf, lambda: -np.inf * x, lambda: x * np.float32(np.nan), lambda: x / 0,
        lambda: x / np.float64(0), lambda: x * complex(0, np.inf), lambda: x + 0.0, lambda: x // 2, lambda: x % 2,
        lambda: short * 2.5, lambda: short / 2, lambda: short * np.int16(2), lambda: np.multiply(short, 2, dtype=int),
        lambda: short + terms(numbers((4, 5), np.int16), grid, layout), lambda: np.add(short, short, dtype=float),
        lambda: np.negative(short, dtype=np.int32),
    ]  # fmt: skip
    for call in refused:
        with (
            pla.explicit(),
            pytest.raises(LayoutError, match=r"not summed yet.*\.redistribute\(Layout\(None, None\)\)"),
        ):
            call()
        with quiet():
            assert not call().layout.partial
    check(np.add(short, short, out=pla.zeros((4, 5), grid, layout)), 2.0 * numbers((4, 5), np.int8))
    check(short * 2 - short, numbers((4, 5), np.int8))
    check(np.multiply(x, 2, dtype=np.float32), (2 * a).astype(np.float32))
    check(x * 2j, a * 2j)
    x *= 3
    check(x, 3 * a)
    x /= 3
    integers = pla.Tensor(short)
    with pytest.raises(LayoutError, match=r"its terms as float32 have another sum; mend it by \.redistribute"):
        integers.astype("float32")
    check(pla.Tensor(x).astype("float32").data, a.astype(np.float32))
    z = terms(b, grid, Layout("a", None, partial=()))
    check(x + z, a + b)
    with pla.explicit(), pytest.raises(LayoutError, match="partial"):
        x + z


def test_other_arrays_are_refused(grid, xp):
    x = pla.zeros((4,), grid, Layout(None))
    for call in (lambda: x + np.ones(4), lambda: np.ones(4) * x, lambda: np.where(x, np.ones(4), 0)):
        with pytest.raises(
            TypeError, match=r"of this rank alone meets a DistArray; distribute it first: parlinalg\.distribute"
        ):
            call()
    with pytest.raises(TypeError, match="takes DistArrays and scalars, not str"):
        np.add(x, "text")
    with pytest.raises(TypeError, match=r"takes DistArrays and scalars, not list; parlinalg\.asarray makes"):
        np.add(x, [1, 2, 3, 4])
    for convert in (np.asarray, np.array, lambda v: np.asarray(v, float), memoryview):
        with pytest.raises(
            TypeError, match=r"Use pla\.asnumpy\(x\) or \.gather\(\) for the global array|a bytes-like object"
        ):
            convert(x)


def test_ufunc_methods(grid):
    x = pla.distribute(numbers((4, 3)), grid, Layout(grid.axes, None))
    same(np.add.reduce(x, axis=1), numbers((4, 3)).sum(1))
    same(np.maximum.reduce(x), numbers((4, 3)).max(0))
    same(np.add.accumulate(x), np.add.accumulate(numbers((4, 3))))
    for call in (lambda: np.multiply.at(x, [0], 1), lambda: np.add.reduceat(x, [0]), lambda: np.subtract.accumulate(x)):
        with pytest.raises(TypeError, match="is not defined on distributed arrays"):
            call()
    out = x * 0 + 7
    assert np.add(x, x, where=x > 0, out=out) is out
    same(out, np.where(numbers((4, 3)) > 0, 2 * numbers((4, 3)), 7))


AT_KEYS = (
    [0, 2, 2, -1], ([1, 1, 3], [0, 0, 2]), (slice(None, None, 2), [1, 1]), ([[0], [1]], [2, 2]), np.arange(5) % 2 == 0,
    (slice(1, None), 0), 3, (Ellipsis, -1), np.zeros(0, int),
)  # fmt: skip


@pytest.mark.parametrize("key", AT_KEYS, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32", "uint8"])
def test_added_at_each_as_often_as_chosen(grid, key, dtype):
    values = np.asarray(numbers((5, 3)) * 4, dtype)
    part = values[key]
    for layout in (Layout(grid.axes, None), Layout(None, grid.axes)):
        for ufunc in (np.add, np.subtract):
            for value in (2, np.arange(part.size).reshape(part.shape).astype(dtype)):
                want, x = values.copy(), pla.distribute(values, grid, layout)
                kept = x + 0
                ufunc.at(want, key, value)
                for form in (value,) if np.ndim(value) == 0 else (value, pla.asarray(value, grid=grid)):
                    x = kept.copy()
                    assert ufunc.at(x, key, form) is None
                    same(x, want)
    x, want = pla.distribute(values, grid, Layout(grid.axes, None)), values.copy()
    rows = pla.asarray(np.array([1, 1, 4]), grid=grid)
    np.add.at(x, (rows, rows // 2), np.array([1, 2, 3], dtype))
    np.add.at(want, ([1, 1, 4], [0, 0, 2]), np.array([1, 2, 3], dtype))
    same(x, want)


def test_added_at_takes_what_the_array_holds(grid):
    x = pla.distribute(np.arange(4), grid, Layout(grid.axes))
    with pytest.raises(TypeError, match=r"np\.add\.at: the result would be float64, which an array of int64 does"):
        np.add.at(x, [0], 1.5)
    with pytest.raises(IndexError, match="index 4 is out of bounds for dim 0 of size 4"):
        np.add.at(x, [0, 4], 1)
    with pytest.raises(TypeError, match=r"np\.subtract\.at changes a DistArray here, not ndarray"):
        np.subtract.at(np.zeros(4), x, 1)
    same(x, np.arange(4))


def test_arrays_of_two_grids_do_not_meet(make_grid, world):
    one, other = make_grid({"a": world.size}), make_grid({"a": world.size})
    with pytest.raises(GridError, match=r"arrays on different grids meet: Grid.* and Grid.*to_grid\(grid, layout\)"):
        pla.zeros((3,), one, Layout(None)) + pla.zeros((3,), other, Layout(None))


DRAWN = st.tuples(
    st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from(range(len(DTYPES)))
)


@given(DRAWN)
@agreed
def test_any_shape_layout_and_dtype(world, backend, drawn):
    shape, seed, which = drawn
    dtype = DTYPES[which]
    sizes = grids(world.size)[seed % 3]
    if dtype.kind == "b" or not supported(dtype, backend):
        return
    with pla.Grid(sizes, world, backend) as grid:
        (src, dst), *_ = pairs(layouts(grid.axes, len(shape)), layouts(grid.axes, len(shape), partial=False), 1, seed)
        a, b = numbers(shape, dtype, seed), numbers(shape, dtype, seed + 1)
        x, y = terms(a, grid, src).redistribute(dst), pla.distribute(b, grid, dst)
        with quiet():
            same(x * y + x, a * b + a)
            same((x + y).sum(), (a + b).sum(dtype=(a + b).sum().dtype), 64 * eps(a.dtype))


@pytest.mark.mpi(min_size=2)
def test_negative_powers_of_whole_numbers_raise_on_all_ranks(make_grid, world):
    """Those without such a power too, and those outside the grid."""
    for ranks in (world.size, world.size - 1):
        grid = make_grid({"a": ranks})
        x = pla.distribute(np.arange(1, 5), grid, Layout("a"))
        power = pla.distribute(np.array([1, 2, 0, -1]), grid, Layout("a"))
        for exponent in (power, -1, np.int64(-2)):
            with pytest.raises(ValueError, match="negative integer powers"):
                x**exponent
        same(x**2.0, np.arange(1, 5) ** 2.0)
        same(x ** abs(power), np.arange(1, 5) ** np.array([1, 2, 0, 1]))


def test_terms_of_booleans_sum_to_any(grid):
    values = np.array([[True, False, True], [False, False, True]])
    for layout in (Layout(None, None), Layout(grid.axes, None), Layout(None, grid.axes)):
        x = pla.distribute(values, grid, Layout(None, None, partial=grid.axes))
        check(x.redistribute(layout), values)
        check((x + x).redistribute(layout), values)


def test_out_is_wider_and_in_another_layout(grid):
    x, y = numbers((5,), seed=1), numbers((3, 5), seed=2)
    for layout, target in pairs(layouts(grid.axes, 1), layouts(grid.axes, 2), 12, seed=3):
        a, b = pla.distribute(x, grid, layout), pla.distribute(y, grid, target)
        view = b[...]
        assert np.multiply(a, 2.0, out=b) is b
        assert b.layout == target
        same(b, np.broadcast_to(2 * x, (3, 5)))
        same(view, y)
        b += a
        same(b, np.broadcast_to(3 * x, (3, 5)))
    with pytest.raises(ValueError, match=r"out= of np.add has shape \(3, 5\), the result \(1, 3, 5\)"):
        np.add(b, pla.distribute(y[None], grid, Layout(None, None, None)), out=b)
