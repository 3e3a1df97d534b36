"""Order statistics, histograms, moments, gradients, products of any dims: NumPy's answers in any layout."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array.statistics import METHODS, RULES
from parlinalg.layout import Layout
from tests.cases import DTYPES, grids, layouts, numbers, pairs, placed, same, terms

pytestmark = pytest.mark.one_in(6)

SHAPES = [(100,), (6, 5), (3, 4, 5), (1, 6)]


@pytest.fixture(scope="module", params=[0, 1], ids=["one axis", "two axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def sampled(grid, ndim, n, seed=0, partial=True):
    return [layout for layout, _ in pairs(layouts(grid.axes, ndim, partial), [0], n, seed)]


def with_nans(shape, seed=0):
    values = numbers(shape, seed=seed) / 4
    values[np.random.default_rng(seed).random(shape) < 0.2] = np.nan
    return values


@pytest.mark.core
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_medians_and_quantiles(grid, shape):
    axes = [None, 0, -1, tuple(range(len(shape))), *([(0, 2)] if len(shape) == 3 else [])]
    for i, layout in enumerate(sampled(grid, len(shape), 2, seed=len(shape))):
        values, holes = numbers(shape, seed=i) / 4, with_nans(shape, seed=i)
        x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
        y = placed(holes, grid, layout.with_partial(()))
        for axis in axes[i % 2 :: 2]:
            for keepdims in (False, True):
                same(np.median(x, axis, keepdims=keepdims), np.median(values, axis, keepdims=keepdims), 1e-15)
                same(np.median(y, axis), np.median(holes, axis), 1e-15)
                want = np.nanmedian(holes, axis, keepdims=keepdims)
                same(np.nanmedian(y, axis, keepdims=keepdims), want, 1e-15)
            for method in list(METHODS)[len(shape) + i :: 4]:
                for q in (0.3, [0, 0.5, 1, 0.77]):
                    want = np.quantile(values, q, axis, method=method, keepdims=True)
                    same(np.quantile(x, q, axis, method=method, keepdims=True), want, 1e-14)
                    want = np.nanpercentile(holes, np.multiply(q, 100), axis, method=method)
                    same(np.nanpercentile(y, np.multiply(q, 100), axis, method=method), want, 1e-14)


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.kind in "fiu"], ids=str)
def test_order_statistics_of_every_dtype(grid, dtype):
    values = numbers((9, 4), dtype)
    for layout in sampled(grid, 2, 1, seed=dtype.itemsize, partial=False):
        x = placed(values, grid, layout)
        for axis in (None, 1):
            same(np.median(x, axis), np.median(values, axis))
            for q in (0.5, [0.25, 1.0], np.float32(0.25)):
                for method in ("linear", "lower"):
                    got = np.quantile(x, q, axis, method=method)
                    same(got, np.quantile(values, q, axis, method=method), 1e-6 if got.dtype != np.float16 else 1e-3)


def test_quantiles_of_many_keys_move_few_words(grid):
    n = 4096 * grid.size
    values = np.random.default_rng(1).random(n)
    x = placed(values, grid, Layout(grid.axes))
    with pla.ledger(grid) as book:
        got = np.quantile(x, [0.1, 0.5, 0.9])
    assert book.words.total() < 600 * grid.size
    same(got, np.quantile(values, [0.1, 0.5, 0.9]), 1e-15)
    same(np.median(placed(np.full(n, 2.5), grid, x.layout)), np.float64(2.5))
    with pla.ledger(grid) as book:
        top, at = pla.top_k(x, 5)
    assert book.words.total() <= 10 * grid.size
    order = np.argsort(-values)[:5]
    same(top, values[order])
    same(at, order)


def test_wrong_quantiles(grid):
    x = placed(numbers((4, 3)), grid, Layout(grid.axes, None))
    with pytest.raises(ValueError, match=r"np\.quantile takes q from 0 to 1, not 1\.5"):
        np.quantile(x, 1.5)
    with pytest.raises(ValueError, match=r"np\.percentile takes q from 0 to 100, not \[50, 101\]"):
        np.percentile(x, [50, 101])
    with pytest.raises(ValueError, match=r"takes the methods inverted_cdf, .*, not 'nothing'"):
        np.quantile(x, 0.5, method="nothing")
    with pytest.raises(TypeError, match=r"np\.quantile takes real numbers, not complex128"):
        np.quantile(x * 1j, 0.5)
    with pytest.raises(ValueError, match=r"top_k takes k from 0 to 3, the size of dim 1 of shape \(4, 3\), not 4"):
        pla.top_k(x, 4)
    with pytest.raises(ValueError, match=r"np\.partition takes kth from -3 to 2, not 3"):
        np.partition(x, 3)
    with pytest.raises(ValueError, match="takes numbers of at least 0; the smallest is -"):
        np.bincount(placed(np.array([1, -2]), grid, Layout(grid.axes)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint8", "complex128"])
def test_the_largest_are_the_sorted_ones(grid, dtype):
    for shape in ((11,), (5, 7), (1, 1)):
        values = numbers(shape, dtype)
        if dtype == "float64":
            values.reshape(-1)[0] = np.nan
        for layout in sampled(grid, len(shape), 2, seed=len(dtype)):
            if layout.partial and dtype != "float32":
                continue
            x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
            for axis in range(len(shape)):
                for k in sorted({0, shape[axis] // 2, shape[axis]}):
                    for largest in (True, False):
                        if dtype == "float64" and layout.partial:
                            continue
                        order = np.argsort(values, axis, kind="stable")
                        if largest:
                            back = np.argsort(np.flip(values, axis), axis, kind="stable")
                            order = np.flip(shape[axis] - 1 - back, axis)
                        order = np.take(order, range(k), axis)
                        got, at = pla.top_k(x, k, axis, largest)
                        same(at, order)
                        same(got, np.take_along_axis(values, order, axis))


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:The number of bins")
def test_histograms(grid):
    for shape, dtype in (((40,), float), ((6, 5), int), ((30, 4), np.float32), ((0, 3), float), ((5,), np.uint8)):
        values = (numbers(shape, dtype) * 3 / (4 if np.dtype(dtype).kind == "f" else 1)).astype(dtype)
        weights = numbers(shape, seed=7) / 2
        for layout in sampled(grid, len(shape), 1, len(shape), partial=np.dtype(dtype).kind == "f"):
            x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
            w = placed(weights, grid, layout.with_partial(()))
            for bins in (1, 7, [-2, 0, 1.5, 2], "auto", "fd", "doane", "scott", "rice", "sturges", "sqrt"):
                for limits in (None, (-1, 2)):
                    want = np.histogram(values, bins, limits)
                    got = np.histogram(x, bins, limits)
                    same(got[1], want[1], 1e-7 if dtype is np.float32 else 1e-14)
                    same(got[0], want[0])
                    same(np.histogram_bin_edges(x, bins, limits), want[1], 1e-7 if dtype is np.float32 else 1e-14)
            if values.size:
                same(np.histogram(x, 4, density=True)[0], np.histogram(values, 4, density=True)[0], 1e-14)
                same(np.histogram(x, 4, weights=w)[0], np.histogram(values, 4, weights=weights)[0], 1e-14)
    values = numbers((50,)) / 4
    x = placed(values, grid, Layout(grid.axes))
    same(np.histogram(x, "stone")[0], np.histogram(values, "stone")[0])
    assert set(RULES) == {"auto", "fd", "doane", "scott", "stone", "rice", "sturges", "sqrt"}
    with pytest.raises(ValueError, match=r"takes the rules auto, .* for bins, not 'many'"):
        np.histogram(x, "many")
    counts = np.abs(numbers((50,), int, seed=2))
    k = placed(counts, grid, Layout(grid.axes))
    same(np.bincount(k), np.bincount(counts))
    same(np.bincount(k, x, 9), np.bincount(counts, values, 9), 1e-14)
    same(np.bincount(k[:0]), np.bincount(counts[:0]))
    for got, want in zip(
        np.histogram2d(x, k, [3, [0, 1, 4]], weights=x), np.histogram2d(values, counts, [3, [0, 1, 4]], weights=values),
        strict=True,
    ):  # fmt: skip
        same(got, want, 1e-14)
    for edges in ([-1, 0, 0, 2], [2, 0.5, -1], [0.0]):
        for right in (False, True):
            for of in (edges, placed(np.asarray(edges, float), grid, Layout(grid.axes))):
                same(np.digitize(x, of, right), np.digitize(values, edges, right))


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:invalid value", "ignore:divide by zero")
def test_moments_of_several_variables(grid):
    values, others = numbers((4, 9), seed=1) / 2, numbers((2, 9), seed=2) / 2
    weights, counts = np.abs(numbers((9,), seed=3)) + 0.5, np.abs(numbers((9,), int, seed=4)) + 1
    for layout, other in pairs(sampled(grid, 2, 3), sampled(grid, 2, 3), 2):
        x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
        y = terms(others, grid, other) if other.partial else placed(others, grid, other)
        w, k = (placed(v, grid, Layout(grid.axes)) for v in (weights, counts))
        for more in ({}, {"rowvar": False}, {"bias": True}, {"ddof": 2}, {"ddof": 0}):
            same(np.cov(x, **more), np.cov(values, **more), 1e-13)
        same(np.cov(x, y), np.cov(values, others), 1e-13)
        same(np.cov(x * 1j, y), np.cov(values * 1j, others), 1e-13)
        same(np.cov(x[0], x[1]), np.cov(values[0], values[1]), 1e-13)
        for ddof in (0, 1):
            want = np.cov(values, ddof=ddof, aweights=weights, fweights=counts)
            same(np.cov(x, ddof=ddof, aweights=w, fweights=k), want, 1e-13)
            same(np.cov(x, ddof=ddof, aweights=weights, fweights=counts), want, 1e-13)
        same(np.corrcoef(x), np.corrcoef(values), 1e-13)
        same(np.corrcoef(x, y), np.corrcoef(values, others), 1e-13)
        same(np.average(x, 1, w), np.average(values, 1, weights), 1e-14)
        for got, want in zip(np.average(x, returned=True), np.average(values, returned=True), strict=True):
            same(got, want, 1e-14)
    with pytest.raises(ZeroDivisionError):
        np.average(x, 1, w * 0)


@pytest.mark.core
def test_neighbours(grid):
    values, line = numbers((7, 5), seed=1) / 2, np.cumsum(np.abs(numbers((7,), seed=2)) + 0.25)
    for layout in sampled(grid, 2, 2):
        x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
        at = placed(line, grid, Layout(grid.axes))
        for order in (1, 2):
            for got, want in zip(np.gradient(x, edge_order=order), np.gradient(values, edge_order=order), strict=True):
                same(got, want, 1e-13)
            want = np.gradient(values, line, axis=0, edge_order=order)
            same(np.gradient(x, at, axis=0, edge_order=order), want, 1e-12)
            same(np.gradient(x, line, axis=0, edge_order=order), want, 1e-12)
            same(
                np.gradient(x, 0.5, axis=-1, edge_order=order),
                np.gradient(values, 0.5, axis=-1, edge_order=order),
                1e-13,
            )
        for axis in (0, 1):
            same(np.trapezoid(x, dx=0.5, axis=axis), np.trapezoid(values, dx=0.5, axis=axis), 1e-14)
        same(np.trapezoid(x, at, axis=0), np.trapezoid(values, line, axis=0), 1e-13)
        same(np.trapezoid(x, x * 2), np.trapezoid(values, values * 2), 1e-13)
        for more in ({}, {"left": -7.0, "right": 7.0}, {"period": 3.0}):
            want = np.interp(values, line, line**2, **more)
            same(np.interp(x, line, line**2, **more), want, 1e-13)
            same(np.interp(x, at, at**2, **more), want, 1e-13)
    for n, m in ((1, 1), (9, 4), (4, 9), (20, 3), (5, 5)):
        a, v = numbers((n,), seed=n) / 2, numbers((m,), complex, seed=m)
        for one, other in pairs(sampled(grid, 1, 3), sampled(grid, 1, 3), 2):
            x = terms(a, grid, one) if one.partial else placed(a, grid, one)
            y = terms(v, grid, other) if other.partial else placed(v, grid, other)
            for mode in ("full", "same", "valid"):
                same(np.convolve(x, y, mode), np.convolve(a, v, mode), 1e-14)
                same(np.correlate(x, y, mode), np.correlate(a, v, mode), 1e-14)


@pytest.mark.core
def test_functions_of_no_elements(grid):
    """They give what NumPy's do where a dim has no elements; of no numbers the quantile is NaN."""
    for layout in sampled(grid, 2, 4):
        lines = terms(numbers((3, 0)), grid, layout)
        for axis in (0, 1):
            with warnings.catch_warnings(action="ignore"):
                want = np.nanquantile(np.zeros((3, 0)), 0.5, axis)
                same(np.nanquantile(lines, 0.5, axis), want)
                same(np.nanpercentile(lines, 50, axis, keepdims=True), np.expand_dims(want, axis))
        same(np.nanquantile(lines, [0.25, 0.5], 1), np.full((2, 3), np.nan))
        same(np.apply_along_axis(np.sum, 1, lines), np.zeros(3))
        with pytest.raises(ValueError, match="any iteration dimensions are 0"):
            np.apply_along_axis(np.sum, 0, lines)
        with pytest.raises(IndexError, match="has no elements there"):
            np.quantile(lines, 0.5, 1)
        none = terms(numbers((3, 0), int), grid, layout)
        same(np.ravel_multi_index((none, none), (2, 3)), np.zeros((3, 0), int))


@pytest.mark.core
def test_dtypes_that_numpy_refuses(grid):
    x, some = placed(numbers((5,)), grid, Layout(None)), placed(np.arange(5) > 2, grid, Layout(grid.axes))
    for function in (np.nanmean, np.nanvar, np.nanstd):
        with pytest.raises(TypeError, match=f"np.{function.__name__}: of an array of float64 dtype is a floating one"):
            function(x, dtype=np.int64)
    for function in (np.ediff1d, np.gradient):
        with pytest.raises(TypeError, match=f"np.{function.__name__} of booleans"):
            function(some)
    held, given = np.arange(5), placed(np.arange(5), grid, Layout(grid.axes))
    short = given.astype(np.int8)
    for key in (0, slice(1, 3), given > 2, given):
        with pytest.raises(OverflowError, match="Python integer 300 out of bounds for int8"):
            short[key] = 300
    same(short, held.astype(np.int8))
    for value in (True, 7, -1, 2.5, 1j, [1, 2, 3, 4, 5], [0.5]):
        for dtype in (bool, np.int8, np.uint16, int, np.float32, complex):
            want, got = held.astype(dtype), given.astype(dtype)
            try:
                np.copyto(want, value)
            except (TypeError, OverflowError) as error:
                with pytest.raises(type(error)):
                    np.copyto(got, value)
            else:
                np.copyto(got, value)
                same(got, want)


def test_a_gradient_moves_the_edges_only(grid):
    x = placed(numbers((32 * grid.size, 3)), grid, Layout(grid.axes, None))
    with pla.ledger(grid) as book:
        np.gradient(x, axis=0)
        np.trapezoid(x, axis=0)
    assert book.words.total() <= 3 * 3 + 3 * 2 + 3


SUBSCRIPTS = [
    "ij,jk", "ij,jk->ki", "ii", "ii->i", "ijj->i", "ij->", "ij->ji", "i,i", "i,j->ji", "ij,ij->ij", "ij,ij",
    "bij,bjk->bik", "bij,bjk", "...ij,...jk->...ik", "...i->...", "i...->...", "ij,jk,kl->il", "ij,kj,lk->",
    "abc,cd,ae->bde", "ij,ij,ij->i", "iij,jk->k", "a...b,b...c->a...c", "ijk,jil->kl", "ij,k->ijk", "i,ij,j",
    "ijkl,klij->", "abcd,cd->ab", "ab,cd,ef->fdb", "ij,i->ij",
]  # fmt: skip
SIZES = dict(zip("abcdefijkl", [3, 2, 4, 5, 2, 3, 4, 2, 3, 5], strict=True))


@pytest.mark.core
@pytest.mark.parametrize("text", SUBSCRIPTS)
def test_einsum(grid, text):
    rng = np.random.default_rng(len(text))
    parts = [part.replace("...", "@") for part in text.split("->")[0].split(",")]
    for dtype in ("float64", ("int32", "complex128", "bool")[len(text) % 3]):
        shapes = [tuple(n for x in part for n in ((3, 2) if x == "@" else (SIZES[x],))) for part in parts]
        arrays = [numbers(shape, dtype, seed=i) for i, shape in enumerate(shapes)]
        want = np.einsum(text, *arrays)
        for _ in range(1):
            choice = [layouts(grid.axes, a.ndim, partial=dtype != "bool") for a in arrays]
            chosen = [every[rng.integers(len(every))] for every in choice]
            given = [
                terms(a, grid, c) if c.partial else placed(a, grid, c) for a, c in zip(arrays, chosen, strict=True)
            ]
            same(np.einsum(text, *given), want, 1e-13)
            same(pla.einsum(text, *given, optimize="greedy"), want, 1e-13)


def test_einsum_forms_and_errors(grid):
    a, b = numbers((3, 4)), numbers((4, 2), seed=1)
    x, y = placed(a, grid, Layout(grid.axes, None)), placed(b, grid, Layout(None, grid.axes))
    same(np.einsum(x, [0, 1], y, [1, 2]), a @ b)
    same(np.einsum(x, [0, 1], y, [1, 2], [2, 0]), (a @ b).T)
    same(np.einsum(" ij , jk -> ik ", x, y), a @ b)
    same(np.einsum("ij,ij->j", x, x[:1]), np.einsum("ij,ij->j", a, a[:1]))
    out = pla.zeros((3, 2), grid, Layout(None, None))
    assert np.einsum("ij,jk->ik", x, y, out=out) is out
    same(out, a @ b)
    alone = np.einsum("ij->ij", x)
    alone += 1
    same(x, a)
    assert np.einsum_path("ij,jk", x, y)[0] == ["einsum_path", (0, 1)]
    for text, kind, message in (
        ("ij,kj", ValueError, "stands for dims of 4 and of 2"),
        ("ij,jk->iq", ValueError, "'q' in the result, but in no array"),
        ("ij,jk->ii", ValueError, "'i' in the result twice"),
        ("ij", ValueError, "describes 1 arrays, but 2 are given"),
        ("ijk,jk", ValueError, "names 3 dims of an array of shape"),
        ("i?,jk", ValueError, "subscripts are letters"),
    ):
        with pytest.raises(kind, match=message):
            np.einsum(text, x, y)
    with pytest.raises(TypeError, match=r"parlinalg\.einsum takes a DistArray, and none is given"):
        pla.einsum("ij,jk", a, b)


def test_kron_and_kin_of_any_dims(grid):
    shapes = [(3,), (2, 3), (2, 1, 3)]
    for one, other in pairs(shapes, shapes, None):
        a, b = numbers(one), numbers(other, seed=1)
        for la, lb in pairs(sampled(grid, len(one), 3), sampled(grid, len(other), 3), 1):
            x = terms(a, grid, la) if la.partial else placed(a, grid, la)
            y = terms(b, grid, lb) if lb.partial else placed(b, grid, lb)
            same(np.kron(x, y), np.kron(a, b), 1e-14)
            same(np.outer(x, y), np.outer(a, b), 1e-14)
            same(np.inner(x, y), np.inner(a, b), 1e-14)
            same(np.cross(x, y), np.cross(a, b), 1e-14)
            same(np.tensordot(x, y, 0), np.tensordot(a, b, 0), 1e-14)
            same(np.tensordot(x, y, np.array([[-1], [-1]])), np.tensordot(a, b, (-1, -1)), 1e-14)
            same(np.tensordot(x, y, (-1, -1)), np.tensordot(a, b, (-1, -1)), 1e-14)
            same(np.add.outer(x, y), np.add.outer(a, b), 1e-14)


@pytest.mark.core
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "any", "all", "mean", "var", "std"])
def test_reductions_of_what_a_mask_chooses(grid, name):
    function = getattr(np, name)
    for dtype in ("float64", ("int8", "complex64", "bool", "float16")[len(name) % 4]):
        if name in ("max", "min") and dtype == "complex64":
            continue
        values, mask = numbers((4, 3, 2), dtype), np.random.default_rng(2).random((4, 3, 2)) < 0.6
        more = [{"initial": True if dtype == "bool" else 2}] if name in ("sum", "prod", "max", "min") else [{}]
        for layout, of in pairs(sampled(grid, 3, 4), sampled(grid, 3, 2, partial=False), 2):
            if layout.partial and dtype not in ("float64", "complex64"):
                continue
            x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
            for axis in (None, (1, 2), ()):
                for some in (mask, mask[0, 0], True):
                    chosen = some if some is True else placed(some, grid, Layout(*of.dims[3 - some.ndim :]))
                    if some is not True and some.shape != mask.shape:
                        chosen = placed(some, grid, Layout(*((),) * some.ndim))
                    for options in more:
                        with warnings.catch_warnings(), np.errstate(all="ignore"):
                            warnings.simplefilter("ignore")
                            want = function(values, axis=axis, where=some, keepdims=True, **options)
                            got = function(x, axis=axis, where=chosen, keepdims=True, **options)
                        same(got, want, {"float16": 2e-2, "complex64": 1e-5}.get(dtype, 1e-13))


def test_masks_of_reductions_that_do_not_fit(grid):
    x = placed(numbers((4, 3)), grid, Layout(grid.axes, None))
    with pytest.raises(ValueError, match=r"np\.max\(where=\) needs initial="):
        np.max(x, where=x > 0)
    with pytest.raises(ValueError, match=r"a mask of shape \(2, 4, 3\) does not broadcast to \(4, 3\)"):
        np.sum(x, where=pla.ones((2, 4, 3), grid, Layout(None, None, None), bool))
    with pytest.raises(TypeError, match=r"where=\) takes booleans, not an array of float64"):
        np.sum(x, where=x)
    empty = placed(np.zeros((0, 3)), grid, Layout(grid.axes, None))
    same(np.max(empty, initial=3.0), np.float64(3))
    same(np.min(empty, 0, initial=3.0), np.full(3, 3.0))


def test_running_extremes_and_other_reductions_of_ufuncs(grid):
    values = numbers((5, 7))
    for layout in sampled(grid, 2, 2):
        x = terms(values, grid, layout) if layout.partial else placed(values, grid, layout)
        for ufunc in (np.maximum, np.minimum, np.add, np.multiply):
            for axis in (0, 1):
                same(ufunc.accumulate(x, axis), ufunc.accumulate(values, axis), 1e-13)
        whole = x.astype(int)
        for ufunc in (np.bitwise_or, np.bitwise_and, np.bitwise_xor, np.gcd, np.logical_xor):
            for axis in (0, 1, None, (0, 1)):
                if ufunc is np.gcd and axis is not None and not isinstance(axis, int):
                    continue
                same(ufunc.reduce(whole, axis=axis), ufunc.reduce(values.astype(int), axis=axis))
    empty = placed(np.zeros((0, 3), int), grid, Layout(grid.axes, None))
    same(np.bitwise_or.reduce(empty), np.bitwise_or.reduce(np.zeros((0, 3), int)))
