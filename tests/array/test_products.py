"""Products by NumPy's other names, on every grid: values, shapes and dtypes are NumPy's, or an error says why not."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.layout import Layout
from tests.cases import eps, grids, layouts, numbers, pairs, placed, same


@pytest.fixture(scope="module", params=[0, 1], ids=["one axis", "two axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def each(grid, *arrays, most=4, seed=0):
    """The arrays in layouts of their own."""
    for t in range(most if grid.size > 1 else 1):
        yield [
            placed(a, grid, next(pairs(layouts(grid.axes, a.ndim, partial=False), [0], 1, seed + 31 * t + i))[0])
            for i, a in enumerate(arrays)
        ]


DTYPES = ["float64", "complex128", "complex64", "float32", "float16", "int8", "int64", "bool"]

SHAPES = {
    "vecdot": [((5,), (5,)), ((3, 5), (3, 5)), ((3, 5), (5,)), ((2, 1, 5), (3, 5)), ((0,), (0,)), ((1,), (1,))],
    "matvec": [((4, 5), (5,)), ((4, 5), (3, 5)), ((2, 4, 5), (5,)), ((2, 4, 5), (2, 5)), ((2, 1, 4, 5), (3, 5)),
               ((4, 0), (0,))],
    "vecmat": [((5,), (5, 4)), ((3, 5), (5, 4)), ((5,), (2, 5, 4)), ((2, 5), (2, 5, 4)), ((3, 5), (2, 1, 5, 4)),
               ((0,), (0, 4))],
}  # fmt: skip


def known(name):
    if not hasattr(np, name):
        pytest.skip(f"cannot be had here: np.{name} came with NumPy 2.2")
    return getattr(np, name)


@pytest.mark.parametrize("name", SHAPES)
def test_products_with_vectors(grid, name):
    function = known(name)
    for i, (one, other) in enumerate(SHAPES[name]):
        for dtype in DTYPES if i < 2 else DTYPES[:2]:
            if dtype == "bool" and name != "vecdot":
                continue
            a, b = numbers(one, dtype, seed=i), numbers(other, dtype, seed=i + 50)
            want = function(a, b)
            for x, y in each(grid, a, b, seed=7 * i):
                if name == "vecdot":  # operands of equal layouts
                    x, y = (v.redistribute(Layout(*((),) * (v.ndim - 1), grid.axes)) for v in (x, y))
                same(function(x, y), want, 8 * eps(dtype))


def test_vecdot_in_every_layout(grid):
    a, b = numbers((4, 3, 6), complex, seed=1), numbers((4, 3, 6), complex, seed=2)
    for layout, _ in pairs(layouts(grid.axes, 3, partial=False), [0], 12, seed=1):
        x, y = placed(a, grid, layout), placed(b, grid, layout)
        for axis in (-1, 0, 1):
            same(np.vecdot(x, y, axis=axis), np.vecdot(a, b, axis=axis), 1e-14)
        same(np.vecdot(x, y, keepdims=True), np.vecdot(a, b, keepdims=True), 1e-14)
        same(np.vecdot(x, y, axis=1, keepdims=True), np.vecdot(a, b, axis=1, keepdims=True), 1e-14)
        same(np.vecdot(x, y, dtype=np.complex64), np.vecdot(a, b, dtype=np.complex64, casting="same_kind"), 1e-6)
        same(np.linalg.vecdot(x, y, axis=0), np.linalg.vecdot(a, b, axis=0), 1e-14)
        out = pla.zeros((4, 3), grid, Layout(None, None), complex)
        assert np.vecdot(x, y, out=out) is out
        same(out, np.vecdot(a, b), 1e-14)
        same(np.vecdot(x, y, axes=[0, 0, ()]), np.vecdot(a, b, axes=[0, 0, ()]), 1e-14)


def test_where_core_dims_lie(grid):
    """`axes=`, as NumPy means it."""
    a, b = numbers((3, 4, 5), seed=1), numbers((5, 6), seed=2)
    for x, y in each(grid, a, b, seed=3):
        for axes in ([(-2, -1), (-2, -1), (-2, -1)], [(1, 2), (0, 1), (0, 1)], [(0, 2), (0, 1), (2, 0)]):
            same(np.matmul(x, y, axes=axes), np.matmul(a, b, axes=axes), 1e-14)
        same(np.matmul(x, y[:, 0], axes=[(0, 2), (0,), (0,)]), np.matmul(a, b[:, 0], axes=[(0, 2), (0,), (0,)]), 1e-14)
        same(np.matmul(x, y, dtype=np.float32), np.matmul(a, b, dtype=np.float32, casting="same_kind"), 1e-6)
        out = pla.zeros((3, 4, 6), grid, Layout(None, None, None))
        assert np.matmul(x, y, out=out) is out
        same(out, a @ b, 1e-14)
        if hasattr(np, "matvec"):
            axes = [(2, 0), (0,), (1,)]
            same(np.matvec(x, y[:3, 0], axes=axes), np.matvec(a, b[:3, 0], axes=axes), 1e-14)
        same(np.linalg.matmul(x, y), a @ b, 1e-14)


@pytest.mark.parametrize(("one", "other"), [
    ((4, 5), (5, 3)), ((5,), (5,)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)), ((4, 5), (2, 5, 3)), ((2, 4, 5), (3, 5, 2)),
    ((4, 5), (2, 3, 5, 2)), ((), (3, 2)), ((3,), ()), ((2, 4, 5), (5, 3)), ((4, 0), (2, 0, 3)), ((1, 5), (1, 5, 1)),
], ids=str)  # fmt: skip
def test_dot_sums_over_the_last_and_the_last_but_one(grid, one, other):
    a, b = numbers(one, seed=1), numbers(other, seed=2)
    want = np.asarray(np.dot(a, b))
    for x, y in each(grid, a, b, most=8, seed=5):
        same(np.dot(x, y), want, 1e-14)
        out = pla.zeros(want.shape, grid, Layout(*((),) * want.ndim))
        assert np.dot(x, y, out) is out
        same(out, want, 1e-14)
    same(np.dot(3, y), np.dot(3, b))
    same(np.dot(x, 2.5), np.dot(a, 2.5))


def test_vdot_flattens(grid):
    for dtype in DTYPES:
        a, b = numbers((4, 6), dtype, seed=1), numbers((4, 6), dtype, seed=2)
        for layout, _ in pairs(layouts(grid.axes, 2, partial=False), [0], 4, seed=3):
            x, y = placed(a, grid, layout), placed(b, grid, layout)
            same(np.vdot(x, y), np.vdot(a, b), 8 * eps(dtype))
        x, y = placed(a, grid, Layout(None, None)), placed(b.reshape(2, 12), grid, Layout(None, None))
        same(np.vdot(x, y), np.vdot(a, b), 8 * eps(dtype))
        same(np.vdot(x, np.ravel(y)), np.vdot(a, b), 8 * eps(dtype))
    for one, other in (((4, 6), (6,)), ((4, 6), (1,)), ((3, 1), (1, 3, 2))):
        for made in (lambda s: numbers(s), lambda s: placed(numbers(s), grid, Layout(*((),) * len(s)))):
            with pytest.raises(ValueError):
                np.vdot(made(one), made(other))


def test_what_is_no_product(grid):
    x, v = pla.zeros((3, 4), grid, Layout(None, None)), pla.zeros((3,), grid, Layout(None))
    for call, kind, text in (
        (lambda: np.vecdot(x, v), ValueError, "do not end in the same number of items"),
        (lambda: np.vecdot(pla.zeros((1,), grid, Layout(None)), v), ValueError, "do not end in the same number"),
        (lambda: np.vecdot(x, 2.0), ValueError, "takes arrays with dims, not the scalar"),
        (lambda: np.vecdot(x, np.zeros(4)), TypeError, "distribute it first"),
        (lambda: np.vecdot(x.sum(), v), ValueError, "fewer dims than"),
        (lambda: np.vecdot(x, x, axis=0, axes=[0, 0]), TypeError, "axis= or axes=, not both|cannot specify both"),
        (lambda: np.matmul(x, x, axes=[(0, 1), (0,)]), ValueError, "dims of the operands|axes"),
        (lambda: np.vdot(x, 3), ValueError, "takes arrays with dims"),
        (lambda: np.dot(x, np.ones(3)), TypeError, "distribute it first"),
        (lambda: np.dot(x, pla.zeros((2, 3, 5), grid, Layout(None, None, None))), ValueError, "4 items meet 3"),
    ):
        with pytest.raises(kind, match=text):
            call()
    if hasattr(np, "matvec"):
        with pytest.raises(ValueError, match="fewer dims than"):
            np.matvec(v, v)
        with pytest.raises(ValueError, match="do not multiply"):
            np.matvec(x, v)


def test_a_product_of_terms_is_no_term_of_a_product(grid):
    x = pla.distribute(numbers((3, 4)), grid, Layout(None, None, partial=grid.axes))
    values = numbers((3, 4))
    for call in (lambda x: np.vecdot(x, x), lambda x: np.vdot(x, x), lambda x: np.dot(x, x.T)):
        same(call(x), call(values))  # summed first
        with pla.explicit(), pytest.raises(pla.LayoutError, match="not summed yet"):
            call(x)


@pytest.mark.serial
def test_other_generalised_ufuncs_are_refused():
    with pla.Grid({"a": 1}) as grid:
        x = pla.zeros((3, 3), grid, Layout("a", None))
        from numpy.linalg import _umath_linalg as gufuncs

        with pytest.raises(TypeError, match=r"det, with the signature \(m,m\)->\(\), is not defined .*vecdot"):
            gufuncs.det(x)
