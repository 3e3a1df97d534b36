"""NumPy's functions and reductions on distributed arrays: NumPy's answers, over whole and cut dims."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array.functions import HANDLED, names
from parlinalg.errors import GridError, LayoutError
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


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_extremes_of_transposed_blocks(grid, dtype):
    """What ranks send is in C order, in whatever order elements lie in blocks."""
    values = numbers((5, 3, 4), dtype, seed=1)
    for layout in sampled(grid, 3, 6, seed=2):
        x, want = placed(values, grid, layout).mT, values.swapaxes(1, 2)
        for axis in (0, 1, (0, 2)):
            same(np.max(x, axis), np.max(want, axis))
            same(np.min(x, axis, keepdims=True), np.min(want, axis, keepdims=True))
        same(np.linalg.norm(x, np.inf, 0), np.linalg.norm(want, np.inf, 0).astype(np.result_type(dtype, np.float32)))


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
    same(np.concatenate([x, x[:, :1]], axis=1), np.concatenate([values, values[:, :1]], axis=1))
    with pla.explicit(), pytest.raises(LayoutError, match=r"concatenate along dim 1: .*redistribute"):
        np.concatenate([x, x], axis=1)
    with pytest.raises(
        ValueError, match=r"concatenate along dim 0: the other dims of \[\(4, 3, 5\), \(4, 2, 5\)\] differ"
    ):
        np.concatenate([x, placed(values[:, :2], grid, x.layout)], axis=0)


def test_other_functions_are_refused_by_name(grid):
    x = placed(numbers((4, 4)), grid, Layout(grid.axes, None))
    for call in (np.polyfit, np.roots, np.histogramdd, np.unwrap):
        with pytest.raises(
            TypeError,
            match=rf"np\..*{call.__name__} is not defined on distributed arrays; those that are: .*sum.*gather\(\)",
        ):
            call(x, x, x) if call is np.polyfit else call(x)


def test_functions_that_have_another_name_here_are_refused_with_it(grid):
    x = placed(numbers((4, 4)), grid, Layout(grid.axes, None))
    with pytest.raises(TypeError, match=r"np\.save takes no distributed arrays; write parlinalg\.save\('a\.npy', a\)"):
        np.save("a.npy", x)
    with pytest.raises(TypeError, match=r"np\.linspace takes no distributed arrays; write parlinalg\.linspace"):
        np.linspace(x.min(), x.max(), 5)
    low, high = x.min(), x.max()
    check(pla.linspace(low, high, 5), np.linspace(float(low), float(high), 5))
    with pytest.raises(TypeError, match=r"np\.array2string takes no distributed arrays; write str\(a\)"):
        np.array2string(x)
    with pytest.raises(ValueError, match=r"np\.lexsort takes keys of one shape, not \[\(4,\), \(3,\)\]"):
        np.lexsort((x[0], x[0, 1:]))
    with pytest.raises(TypeError, match=r"only an array without dims becomes a Python scalar"):
        round(x)
    with pytest.raises(TypeError, match=r"pla\.stack\(\[x, y\]\) for one array of several"):
        np.sum([x, x], axis=0)


def test_the_list_names_what_is_handled():
    assert len(names()) == len(HANDLED)
    assert {"sum", "linalg.norm", "where", "concatenate"} <= set(names())


def test_wrong_axes(grid):
    x = placed(numbers((4, 3)), grid, Layout(grid.axes, None))
    with pytest.raises(ValueError, match="axis 2 is out of bounds for array of dimension 2"):
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


INF, NAN = np.inf, np.nan
CLOSE = [
    ([1.0, INF, -INF, NAN, INF, 0.0, 5.0], [1.0 + 1e-9, INF, -INF, NAN, -INF, 1e-9, 5.1]),
    ([INF, 1.0, NAN], [1.0, INF, INF]),
    ([INF, 1e308, -INF], [1e308, INF, INF]),
    ([3, 2, 255], [2, 3, 255]),
    ([True, False, True], [True, True, False]),
    ([1 + 1j, complex(INF, 1), complex(NAN, 0)], [1 + 1j + 1e-9, complex(INF, 1), complex(NAN, 0)]),
]
KINDS = [[np.float64, np.float32, np.float16], [np.float64, np.float16], [np.float64],
         [np.uint8, np.uint64, np.int8, np.int64], [np.bool_], [np.complex128, np.complex64]]  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("case", range(len(CLOSE)))
def test_closeness_is_numpys(grid, case):
    first, second = CLOSE[case]
    for one in KINDS[case]:
        for other in {one, KINDS[case][0]}:
            a, b = np.array(first).astype(one), np.array(second).astype(other)
            for layout in (Layout(grid.axes), Layout(None)):
                x, y = placed(a, grid, layout), placed(b, grid, layout)
                for equal_nan in (False, True, 1, np.False_):
                    same(np.isclose(x, y, equal_nan=equal_nan), np.isclose(a, b, equal_nan=equal_nan))
                    same(np.isclose(y, x, 1e-3, 1, equal_nan), np.isclose(b, a, 1e-3, 1, equal_nan))
                    assert np.allclose(x, y, 0.1, equal_nan=equal_nan) is np.allclose(a, b, 0.1, equal_nan=equal_nan)
                    assert np.allclose(x, x, equal_nan=equal_nan) is np.allclose(a, a, equal_nan=equal_nan)
                    equal = np.array_equal(x, x, equal_nan=equal_nan)
                    assert equal is np.array_equal(a, a, equal_nan=bool(equal_nan))
                same(np.isclose(x, 2), np.isclose(a, 2))
                same(np.isclose(INF, x), np.isclose(INF, a))
    assert not np.array_equal(x, 3)
    tolerance = np.array([1, 2, 3]) * 1e-2
    a = np.array([1.0, 2, 3])
    x = placed(a, grid, Layout(grid.axes))
    same(np.isclose(x, 1.02 * x, placed(tolerance, grid, Layout(grid.axes))), np.isclose(a, 1.02 * a, tolerance))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64", "bool", "float16", "float32"])
def test_statistics_neither_overflow_nor_round_in_short(grid, dtype):
    """The dtypes are NumPy's, the values those of float64 rounded once."""
    kind = np.dtype(dtype)
    top = 1 if kind.kind == "b" else 40000 if kind.kind == "f" else np.iinfo(kind).max
    values = np.random.default_rng(5).uniform(0.5, 1, (64, 5)) * top
    values = values.astype(kind)
    wide = values.astype(np.float64)
    for layout in sampled(grid, 2, 4):
        x = placed(values, grid, layout)
        for axis, keepdims in ((None, False), (0, True), (1, False), ((0, 1), True), ((), False)):
            for name in ("mean", "var", "std"):
                got = getattr(np, name)(x, axis=axis, keepdims=keepdims)
                right = getattr(np, name)(wide, axis=axis, keepdims=keepdims)
                dtype_of = getattr(np, name)(values, axis=axis, keepdims=keepdims).dtype
                same(got, np.asarray(right).astype(dtype_of), 4 * eps(dtype_of))
        for order, axis in ((None, None), ("fro", None), (None, 0), (2, 1), (1, 0), (INF, 1), (-INF, (0, 1)), (3, 0)):
            got = np.linalg.norm(x, order, axis)
            right = np.linalg.norm(wide, order, axis)
            dtype_of = np.linalg.norm(values, order, axis).dtype
            same(got, np.asarray(right).astype(dtype_of), 8 * eps(dtype_of))
    if kind.kind == "f":
        x = placed(np.array([40000, 40000, -40000, -40000], kind), grid, Layout(grid.axes))
        same(x.sum(), np.zeros((), kind))  # the sum of one rank alone is no number of 16 bits
        same(x.mean(), np.zeros((), kind))


def test_norms_are_numpys(grid):
    for dtype in (float, complex):
        values = numbers((4, 3, 5), dtype, seed=8)
        for layout in sampled(grid, 3, 4, seed=2):
            x = placed(values, grid, layout)
            for keepdims in (False, True):
                for order in (None, 0, 1, 2, 3, -1, 0.5, INF, -INF):
                    with np.errstate(all="ignore"):
                        want = np.linalg.norm(values, order, 1, keepdims)
                        same(np.linalg.norm(x, order, 1, keepdims), want, 1e-14)
                for order in (None, "fro", "f", 1, -1, INF, -INF):
                    for axis in ((0, 1), (2, 0), (-1, -2)):
                        want = np.linalg.norm(values, order, axis, keepdims)
                        same(np.linalg.norm(x, order, axis, keepdims), want, 1e-14)
                same(np.linalg.norm(x, keepdims=keepdims), np.linalg.norm(values, keepdims=keepdims), 1e-14)
            same(np.linalg.norm(x[0]), np.linalg.norm(values[0]), 1e-14)
            same(np.linalg.norm(x[0, 0], INF), np.linalg.norm(values[0, 0], INF), 1e-14)
    wrong = [
        (lambda v: np.linalg.norm(v[0, 0], "fro"), ValueError),
        (lambda v: np.linalg.norm(v, "fro"), ValueError),
        (lambda v: np.linalg.norm(v, 1), ValueError),
        (lambda v: np.linalg.norm(v[0], "max"), ValueError),
        (lambda v: np.linalg.norm(v[0], 5), ValueError),
        (lambda v: np.linalg.norm(v, None, 3), np.exceptions.AxisError),
        (lambda v: np.linalg.norm(v, None, (0, 0)), ValueError),
    ]
    for call, kind in wrong:
        for array in (values, x):
            with pytest.raises(kind):
                call(array)


def test_terms_are_summed_before_what_is_not_linear(grid):
    """Of terms, converted each, the sum is another one: halves to integers, integers that wrap around."""
    halves = np.array([[0.5, 1.25, -3.75], [2.5, 4.0, 1.75]])
    for layout in layouts(grid.axes, 2):
        x = terms(halves * 4, grid, layout) / 4.0  # terms of quarters
        same(x.astype(int), halves.astype(int))
        same(x.astype(np.float32), halves.astype(np.float32))
        same(x.astype(bool), halves.astype(bool))
        same(x.sum(0, dtype=int), halves.astype(int).sum(0))
        same(np.mean(x, axis=1), halves.mean(1), 1e-15)
        short = terms(numbers((2, 3), np.int8) * np.int8(30), grid, layout, seed=3)
        check(short, numbers((2, 3), np.int8) * np.int8(30))
        near = short * np.int8(5)  # terms that wrap around, and so does their sum
        expected = numbers((2, 3), np.int8) * np.int8(30) * np.int8(5)
        for result, want in (
            (near.astype(np.int64), expected.astype(np.int64)),
            (near.astype(float), expected.astype(float)),
            (near.astype(np.uint8), expected.astype(np.uint8)),
            (near.sum(), expected.sum()),
            (near.sum(1), expected.sum(1)),
            (np.mean(near), np.mean(expected)),
            (np.mean(near, dtype=np.float32), np.mean(expected, dtype=np.float32)),
            (near.sum(0, dtype=float), expected.sum(0, dtype=float)),
        ):
            same(result, want)


NUMPYS = {
    "keepdims=1": lambda x, o: np.sum(x, 0, keepdims=1),
    "keepdims=-1": lambda x, o: np.max(x, 0, keepdims=-1),
    "keepdims=0": lambda x, o: np.mean(x, 0, keepdims=0),
    "keepdims by position": lambda x, o: np.sum(x, 0, None, None, 1),
    "out by position": lambda x, o: np.sum(x, 0, None, o),
    "dtype by position": lambda x, o: np.mean(x, 0, np.float32),
    "dtype": lambda x, o: np.mean(x, dtype=np.float32),
    "dtype and out": lambda x, o: np.mean(x, 0, np.float64, o),
    "var": lambda x, o: np.var(x, 0, np.float32, None, 1, True),
    "var out": lambda x, o: np.var(x, 0, None, o, 1),
    "std": lambda x, o: np.std(x, 0, None, o, ddof=1),
    "correction": lambda x, o: np.var(x, 0, correction=1),
    "max out": lambda x, o: np.max(x, 0, o),
    "min keepdims": lambda x, o: np.min(x, 0, None, True),
    "amax": lambda x, o: np.amax(x, axis=0),
    "any": lambda x, o: np.any(x > 1, 0, None, 1),
    "prod": lambda x, o: np.prod(x, 0, np.float32, None, True),
    "prod out": lambda x, o: np.prod(x, axis=0, out=o),
    "where=True": lambda x, o: np.sum(x, 0, where=True),
    "sum where": lambda x, o: np.sum(x, 0, where=x > 0),
    "initial by position": lambda x, o: np.sum(x, 0, None, None, False, 5),
    "initial and out": lambda x, o: np.max(x, 0, o, False, 1.5),
    "mean": lambda x, o: np.var(x, 0, mean=x.mean(0, keepdims=True)),
    "method where": lambda x, o: x.std(0, where=x < 3, ddof=0),
    "method initial": lambda x, o: x.prod(0, None, None, True, 2.0, x > 0),
    "method sum": lambda x, o: x.sum(0, None, o),
    "method sum keepdims": lambda x, o: x.sum(0, np.float32, None, 1),
    "method max": lambda x, o: x.max(0, o),
    "method mean": lambda x, o: x.mean(0, np.float32),
    "method prod": lambda x, o: x.prod(0, None, o, False),
    "method all": lambda x, o: x.all(0, keepdims=1),
    "reduce": lambda x, o: np.add.reduce(x, 0, None, o),
    "reduce keepdims": lambda x, o: np.maximum.reduce(x, 1, None, None, 1),
    "reduce dtype": lambda x, o: np.multiply.reduce(x, 1, np.float32),
    "clip": lambda x, o: np.clip(x, -1, 2, x),
    "round": lambda x, o: np.round(x / 3, 1, x),
    "trace": lambda x, o: np.trace(x, 1),
    "trace dtype": lambda x, o: np.trace(x, -1, 1, 0, np.float32),
    "concatenate dtype": lambda x, o: np.concatenate((x, x), 0, dtype=np.float32),
    "concatenate all": lambda x, o: np.concatenate((x, x), None),
    "zeros_like": lambda x, o: np.zeros_like(x, np.int8),
    "empty_like": lambda x, o: np.empty_like(x, np.int8) * 0,
    "full_like": lambda x, o: np.full_like(x, 2, np.float32, "C", False),
    "expand_dims": lambda x, o: np.expand_dims(x, (0, -1)),
    "moveaxis": lambda x, o: np.moveaxis(x[None], (0, 1), (2, 0)),
    "reshape": lambda x, o: np.reshape(x, (4, 5, 1), "C"),
    "size": lambda x, o: np.zeros(np.size(x, 1)) if isinstance(x, np.ndarray) else x[0] * 0,
    "astype": lambda x, o: x.astype(np.float32, "K", "same_kind", True, False),
    "isclose": lambda x, o: np.isclose(x, x + 1, 0, 2, True),
    "where": lambda x, o: np.where(x > 0, 1, x),
    "broadcast": lambda x, o: np.broadcast_to(x[0], (2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_arguments_are_bound_as_numpy_binds_them(grid, name):
    values = numbers((4, 5), seed=9)
    for layout in (Layout(None, None), Layout(None, grid.axes), *sampled(grid, 2, 3, seed=len(name))):
        if layout.dims[0] and name in ("concatenate dtype", "concatenate all"):
            continue
        if any(layout.dims) and grid.size > 1 and name == "concatenate all":
            continue
        mine, into = values.copy(), np.zeros(5)
        want = NUMPYS[name](mine, into)
        for target in (Layout(None), Layout(grid.axes)):
            x, out = placed(values, grid, layout), placed(np.zeros(5), grid, target)
            got = NUMPYS[name](x, out)
            assert (got is out) == (want is into)
            same(got, want, 1e-6 if want.dtype == np.float32 else 1e-14)
            same(x, mine, 1e-14)
            same(out, into, 1e-14)


REFUSED = {
    "weights": lambda x: np.quantile(x, 0.5, method="inverted_cdf", weights=x),
    "order": lambda x: np.reshape(x, (20,), "F"),
    "shape": lambda x: np.zeros_like(x, None, "K", True, (2, 3)),
    "casting": lambda x: np.clip(x, 0, 1, casting="no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_not_defined_are_named(grid, name):
    x = placed(numbers((4, 5)), grid, Layout(None, None))
    with pytest.raises(TypeError, match=rf"np\.\w+\({name}=\) is not defined on distributed arrays; leave {name}= out"):
        REFUSED[name](x)


def test_out_that_does_not_fit(grid):
    x = placed(numbers((4, 5)), grid, Layout(None, grid.axes))
    for call, kind, text in (
        (lambda: np.sum(x, 0, out=pla.zeros((4,), grid, Layout(None))), ValueError, r"shape \(4,\), the result \(5,\)"),
        (lambda: np.sum(x, 0, out=pla.zeros((5,), grid, Layout(None), int)), TypeError, "does not take a result of"),
        (lambda: np.sum(x, 0, out=np.zeros(5)), TypeError, "out= of np.sum is a ndarray; the result is distributed"),
        (lambda: np.sum(2.0, out=x), TypeError, "np.sum takes a DistArray here, not 2.0"),
        (lambda: np.add.reduce(2.0, None, out=x), TypeError, "out= of np.add.reduce is distributed, but its operand"),
    ):
        with pytest.raises(kind, match=text):
            call()
    with pytest.raises(TypeError):
        x.all(0, None, True)  # keepdims of these two methods is by name, where NumPy's too bind nothing as meant


AXES = {
    "sum": lambda x: np.sum(x, 3), "method": lambda x: x.sum(-4), "max": lambda x: np.max(x, (0, 5)),
    "mean": lambda x: x.mean(3), "var": lambda x: np.var(x, -4), "any": lambda x: x.any(7),
    "transpose": lambda x: np.transpose(x, (0, 1, 3)), "method transpose": lambda x: x.transpose(0, 1, -4),
    "swapaxes": lambda x: np.swapaxes(x, 0, 3), "moveaxis": lambda x: np.moveaxis(x, -4, 0),
    "moveaxis to": lambda x: np.moveaxis(x, 0, 3), "expand_dims": lambda x: np.expand_dims(x, 4),
    "expand_dims below": lambda x: np.expand_dims(x, (-6, 0)), "squeeze": lambda x: np.squeeze(x, 3),
    "concatenate": lambda x: np.concatenate([x, x], 3), "trace": lambda x: np.trace(x, 0, 0, 3),
    "reduce": lambda x: np.add.reduce(x, 3), "count_nonzero": lambda x: np.count_nonzero(x, 3),
    "vecdot": lambda x: np.vecdot(x, x, axis=3), "matmul": lambda x: np.matmul(x, x, axes=[(0, 3), (0, 1), (0, 1)]),
    "norm": lambda x: np.linalg.norm(x, axis=3), "norm of matrices": lambda x: np.linalg.norm(x, axis=(0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", AXES)
def test_axes_out_of_range(grid, name):
    values = numbers((3, 3, 3))
    for layout in (Layout(None, None, None), Layout(grid.axes, None, None)):
        for array in (values, placed(values, grid, layout)):
            with pytest.raises(np.exceptions.AxisError, match="out of bounds"):
                AXES[name](array)
    with pytest.raises(np.exceptions.AxisError) as error:
        np.sum(array, 3)
    assert (error.value.axis, error.value.ndim) == (3, 3)


METHODS = {
    "var": lambda x: [x.var(), x.var(0, np.float32, None, 1, True)],
    "std": lambda x: [x.std(1), x.std(0, ddof=1)],
    "round": lambda x: [(x / 3).round(1), (x / 3).round()],
    "clip": lambda x: [x.clip(-1, 2), x.clip(max=1)],
    "dot": lambda x: [x.dot(x.T)],
    "squeeze": lambda x: [x[None].squeeze(), x[:, None].squeeze(1)],
    "swapaxes": lambda x: [x.swapaxes(0, -1)],
    "trace": lambda x: [x.trace(), x.trace(1)],
    "conjugate": lambda x: [(x * 1j).conjugate()],
    "reshape": lambda x: [x.reshape(4, 1, 5), x.reshape((4, 5), order="C")],
    "in": lambda x: [np.zeros(int(3.0 in x)) if isinstance(x, np.ndarray) else x[0][: int(3.0 in x)] * 0],
    "rows": lambda x: [sum(x, 0 * x[0])],
}


@pytest.mark.parametrize("name", METHODS)
def test_method(grid, name):
    values = numbers((4, 5), seed=6)
    for layout in sampled(grid, 2, 4, seed=len(name)):
        for result, want in zip(METHODS[name](placed(values, grid, layout)), METHODS[name](values), strict=True):
            same(result, want, 1e-6 if want.dtype == np.float32 else 1e-14)
    x = placed(values, grid, Layout(None, None))
    same(x.ravel(), values.ravel())
    flat = x.flatten()
    flat += 1
    same(x, values)
    assert x.tolist() == values.tolist()
    assert x.itemsize == 8


def test_what_numpys_arrays_have_and_these_do_not(grid):
    x = pla.zeros((3, 4), grid, Layout(grid.axes, None))
    for name in set(dir(np.ndarray)) - set(dir(x)):
        if not name.startswith("_"):
            with pytest.raises(
                AttributeError, match=rf"a DistArray has no '{name}', which NumPy's arrays have; .*gather"
            ):
                getattr(x, name)
    with pytest.raises(AttributeError, match="a DistArray has no attribute 'nonsense'"):
        x.nonsense
    assert not hasattr(x, "__array_interface__")
    scalar = x.sum()
    with pytest.raises(TypeError, match="iteration over an array without dims"):
        list(scalar)
    with pytest.raises(AttributeError, match=r"the shape of a DistArray is not assigned.*A\.reshape\(\(4, 3\)\)"):
        x.shape = (4, 3)
    assert x.shape == (3, 4)
    x = pla.zeros((3, 4), grid, Layout(None, None))
    for options in ({"order": "F"}, {"copy": False}):
        with pytest.raises(TypeError, match=r"reshape\((order='F'|copy=False)\) is not defined on distributed arrays"):
            x.reshape((4, 3), **options)
    same(x.reshape((4, 3), copy=True), np.zeros((4, 3)))


def test_mistaken_arguments_are_named(grid, world):
    x, layout, values = pla.zeros((3, 4), grid, Layout(None, None)), Layout(None, None), np.zeros((3, 4))
    for call, kind, text in (
        (lambda: pla.distribute(values, layout, grid), GridError, r"a grid is a Grid, .* not Layout\(None, None\)"),
        (lambda: pla.distribute(values, grid, "r"), LayoutError, "a layout is a Layout, such as .* not 'r'"),
        (lambda: pla.distribute(values, grid, layout, root="0"), LayoutError, "root 0 is not one of the"),
        (lambda: pla.zeros((3, 4), layout, grid), GridError, "a grid is a Grid"),
        (lambda: pla.full((3, 4), 1, 2, layout), GridError, "a grid is a Grid, .* not 2"),
        (lambda: pla.ones(3, float), GridError, "a grid is a Grid, .* not <class 'float'>; a dtype goes by its name"),
        (lambda: pla.from_blocks(values, grid, "r"), LayoutError, "a layout is a Layout"),
        (lambda: pla.from_blocks(x, grid, layout), TypeError, r"this is a DistArray already: give its \.block"),
        (lambda: x.to_grid(None, layout), GridError, "a grid is a Grid"),
        (lambda: x.to_grid(grid, "r"), LayoutError, "a layout is a Layout"),
        (lambda: x.gather("0"), GridError, "root 0 is not one of the"),
        (lambda: x.reshape(None), TypeError, "a shape is a whole number or a tuple of whole numbers, not None"),
        (lambda: x[..., ...], IndexError, "an index has one ... at most"),
        (lambda: np.add(x, np.float64), TypeError, "takes DistArrays and scalars, not type"),
        (lambda: np.sum(2.0, out=x), TypeError, "np.sum takes a DistArray here, not 2.0"),
        (lambda: np.concatenate([x, values]), TypeError, "distribute it first"),
        (lambda: np.concatenate([x, 3]), TypeError, "np.concatenate takes a DistArray here, not 3"),
        (lambda: np.array_equal(x, [1]), TypeError, "takes DistArrays and scalars, not list"),
        (lambda: np.broadcast_to(x, (4,)), ValueError, "do(es)? not broadcast to"),
        (lambda: np.broadcast_to(x, (2, 3, 5)), ValueError, "do not broadcast to"),
    ):
        with pytest.raises(kind, match=text):
            call()
    refused = "an array of dtype .* cannot be distributed; it may be one of bool, int8"
    for call in (
        lambda: x.astype(object), lambda: x.astype(str), lambda: x.astype("datetime64[s]"), lambda: x.sum(dtype=object),
        lambda: pla.zeros((3, 4), grid, layout, object), lambda: pla.full((3, 4), "text", grid, layout),
        lambda: pla.from_function(lambda i, j: None, (3, 4), grid, layout), lambda: np.zeros_like(x, object),
        lambda: pla.distribute("text", grid, layout), lambda: np.mean(x, dtype=object),
        lambda: np.add(x, 1, dtype=object),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=refused):
            call()
    if grid.backend.host_memory:
        with pytest.raises(TypeError, match=refused):
            pla.from_blocks(x.block.astype("M8[s]"), grid, layout, (3, 4))
    same(pla.full((2,), x.sum() + 3, grid, Layout(None)), np.full(2, 3.0))
    same(np.broadcast_to(x[0], 4), np.zeros(4))


def test_a_sum_of_half_floats_in_another_dtype(grid):
    x = pla.distribute(np.full((5, 3), 2.0, np.float16), grid, Layout(grid.axes, None))
    got = np.sum(x, axis=0, dtype=np.float64)
    assert got.dtype == np.float64
    same(got, np.full(3, 10.0))
