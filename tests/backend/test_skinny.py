"""Loops for few columns, one by one and as products and `solve_triangular` use them, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, linalg
from parlinalg.backend import blas, compiled, skinny
from parlinalg.linalg.panels import triangular
from tests.cases import grids, layouts

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 15, 33, 70, 2100)
"""Below and above the rows and columns of `compiled.FEW_ROWS`, and `skinny.LENGTH`, and not multiples of them."""
SIDES = (1, 2, 4, 5, 8, 9, 16, 17, 33)
"""Below and above 32 and 64 bytes of either dtype, and not multiples of them."""


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    if not compiled.available():
        pytest.skip("numba is not installed, or turned off")
    return np.dtype(request.param)


@pytest.fixture
def used(monkeypatch, tune):
    """Loops take all that they can."""
    tune(COMPILED_SIZE=1)
    monkeypatch.setattr(skinny, "blas_threads", lambda: 1)
    monkeypatch.setattr(skinny, "LEAST", 1)
    monkeypatch.setattr(skinny, "ROWS", 1)


def inside(a):
    """The matrix as a part of a larger one, which has NaNs around it."""
    larger = np.full((a.shape[0] + 3, a.shape[1] + 5), np.nan, a.dtype)
    larger[1 : len(a) + 1, 2 : a.shape[1] + 2] = a
    return larger[1 : len(a) + 1, 2 : a.shape[1] + 2]


def numbers(n, dtype):
    """A matrix of n rows and columns, and right-hand sides."""
    rng = np.random.default_rng(n)
    return (rng.uniform(-1, 1, (n, n)) / n + np.eye(n)).astype(dtype), rng.random((n, 40)).astype(dtype)


@pytest.mark.serial
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("lying", [np.copy, inside], ids=["whole", "inside"])
class TestLoops:
    def test_added(self, dtype, sides, lying, used):
        for n in LENGTHS:
            a, x = numbers(n, dtype)
            for rows in (slice(0, n), slice(0, 1), slice(n // 2, n)):
                part, some = lying(a[rows]), lying(x[:, :sides])
                y, scale = lying(np.ones((len(part), sides), dtype)), -1 if n % 2 else 1
                assert skinny.added(y, part, some, scale)
                want = 1 + scale * (a[rows].astype(float) @ x[:, :sides])
                np.testing.assert_allclose(y, want, rtol=0, atol=16 * np.finfo(dtype).eps)
                if y.base is not None:
                    assert np.isnan(y.base).sum() == y.base.size - y.size

    @pytest.mark.parametrize("lower", [False, True])
    @pytest.mark.parametrize("unit", [False, True])
    def test_substituted(self, dtype, sides, lower, unit, lying, used):
        for n in LENGTHS:
            a, b = numbers(n, dtype)
            t = (np.tril if lower else np.triu)(a)
            a = np.where(t == 0, dtype.type(np.nan), t)
            if unit:
                np.fill_diagonal(a, np.nan)
                np.fill_diagonal(t, 1)
            x = lying(b[:, :sides])
            assert skinny.substituted(lying(a), x, lower=lower, unit=unit)
            residual = t.astype(np.float64) @ x - b[:, :sides]
            np.testing.assert_allclose(residual, 0, rtol=0, atol=16 * np.finfo(dtype).eps)

    def test_substituted_right(self, dtype, sides, lying, used):
        """Triangles of up to `skinny.WIDE` columns, and rows that are no multiple of those found together."""
        for rows in (1, 7, 8, 9, 100, 8 * skinny.WIDE + 3):
            n = min(2 * sides, rows // skinny.TALL, skinny.WIDE)
            a, b = numbers(max(rows, n), dtype)
            t, b = a[:n, :n], np.resize(b, (rows, n))
            x, t = lying(b), np.where(np.tri(n, k=-1, dtype=bool), dtype.type(np.nan), t)
            assert skinny.substituted_right(lying(t), x) == (n > 0)
            np.testing.assert_allclose(x.astype(float) @ np.triu(a[:n, :n]), b, rtol=0, atol=16 * np.finfo(dtype).eps)
            if n and x.base is not None:
                assert np.isnan(x.base).sum() == x.base.size - x.size


@pytest.mark.serial
def test_extreme_quotients_are_left_to_blas(dtype, used):
    """Reciprocals that overflow, quotients that do, and those that lose digits near underflow."""
    tiny, huge = np.finfo(dtype).tiny, np.finfo(dtype).max
    b = np.ones((100, 2), dtype)
    for t in (
        [[tiny / 8, 0], [0, 1]],
        [[0, 0], [0, 1]],
        [[1e-9, huge], [0, 1]],
        [[1e9, tiny], [0, 1]],
        [[np.inf, 1], [0, 1]],
    ):
        assert not skinny.substituted_right(np.array(t, dtype), b)
        np.testing.assert_array_equal(b, 1)
    for t in ([[1, 0], [0, 1]], [[1, tiny], [0, 1]], [[1e9, 0], [0, 1e-9]]):
        x = b.copy()
        assert skinny.substituted_right(np.array(t, dtype), x)
        np.testing.assert_allclose(x @ np.array(t, dtype), 1, rtol=16 * np.finfo(dtype).eps)


@pytest.mark.serial
def test_wide_triangles_and_rows_that_do_not_lie_together_are_left_to_blas(dtype, used, monkeypatch):
    n = skinny.WIDE + 1
    for t, b in ((np.eye(n), np.ones((8 * n, n))), (np.eye(8), np.ones((63, 8))), (np.eye(8), np.ones((8, 64)).T)):
        assert not skinny.substituted_right(t.astype(dtype), b.astype(dtype, order="K"))
    monkeypatch.setattr(skinny, "blas_threads", lambda: 2)
    assert not skinny.substituted_right(np.eye(8, dtype=dtype), np.ones((64, 8), dtype))


@pytest.mark.serial
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_products_with_few_columns(dtype, given, used, monkeypatch):
    """Exact for integers, in rows of any length; what loops do not take is NumPy's."""
    rng, matmul, calls = np.random.default_rng(4), np.matmul, []
    monkeypatch.setattr(np, "matmul", lambda *a, **k: calls.append(1) or matmul(*a, **k))
    for m, k, n in ((1, 1, 2), (7, 5, 3), (50, 2100, 17), (9, 33, skinny.COLUMNS)):
        x, w = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
        out = np.full((m, n), np.nan, dtype) if given else None
        y = skinny.product(x, w, out)
        assert (y is out) == given
        np.testing.assert_array_equal(y, x @ w)
    assert not calls
    many = np.ones((33, skinny.COLUMNS + 1), dtype)
    turned = np.asfortranarray(x)
    for a, b in ((x, many), (turned, w), (x, np.asfortranarray(w)), (x + 1j, w + 1j), (x[:0], w), (x, w[:, :0])):
        np.testing.assert_array_equal(skinny.product(a, b), a @ b)
    assert len(calls) == 6


@pytest.mark.serial
def test_shapes_that_do_not_match_are_left_to_numpy(used):
    a, x = np.ones((20, 30)), np.ones((30, 4))
    for y, left, right in ((np.ones((20, 3)), a, x), (np.ones((19, 4)), a, x), (np.ones((20, 4)), a, x[:29])):
        assert not skinny.added(y, left, right)
        np.testing.assert_array_equal(y, 1)
    y = np.ones((20, 4), order="F")  # whose rows do not lie together
    assert not skinny.added(y, a, x)
    np.testing.assert_array_equal(y, 1)
    assert not skinny.substituted(np.eye(30), np.ones((29, 4)), lower=True, unit=False)
    assert not skinny.substituted(np.eye(30), np.ones((30, 4), order="F"), lower=True, unit=False)
    with pytest.raises(ValueError, match="mismatch"):
        skinny.product(a, x[:29])
    with pytest.raises(ValueError, match="mismatch"):
        skinny.product(a, x, np.ones((20, 3)))


@pytest.mark.serial
@pytest.mark.parametrize(("threads", "columns"), [(1, 64), (2, 32), (3, 0), (None, 0)])
def test_blas_has_many_columns_and_threads(dtype, threads, columns, used, monkeypatch):
    monkeypatch.setattr(skinny, "blas_threads", lambda: threads)
    for n in (1, 32, 33, 64, 65):
        y, x = np.zeros((20, n), dtype), np.ones((20, n), dtype)
        assert skinny.added(y, np.eye(20, dtype=dtype), x) == (n <= columns)


@pytest.mark.parametrize("lower", [False, True])
def test_triangular_solutions_by_loops(world, backend, dtype, lower, tune, monkeypatch):
    """On one to three axes, in any layout, with pieces that are not multiples of the loops' lengths."""
    tune(must=backend == "numpy", COMPILED_SIZE=1)  # blocks of a GPU ask for no loops
    monkeypatch.setattr(triangular, "PIECE", 37)
    monkeypatch.setattr(skinny, "blas_threads", lambda: 1)
    taken = []
    monkeypatch.setattr(
        skinny,
        "substituted",
        lambda *args, _as=skinny.substituted, **kept: taken.append(_as(*args, **kept)) or taken[-1],
    )
    n, rng = 150, np.random.default_rng(7)
    t = (np.tril if lower else np.triu)(rng.uniform(-1, 1, (n, n)) / n + np.eye(n)).astype(dtype)
    for sizes in grids(world.size)[:3]:
        with pla.Grid(sizes, world, backend) as grid:
            every = layouts(grid.axes, 2, partial=False)
            for sides in (1, 2, 7):
                b = rng.random((n, sides)).astype(dtype)
                layout, other = (every[int(at)] for at in rng.integers(len(every), size=2))
                x = linalg.solve_triangular(
                    pla.distribute(t, grid, layout), pla.distribute(b, grid, other), lower=lower
                ).gather()
                np.testing.assert_allclose(t @ x, b, rtol=0, atol=32 * np.finfo(dtype).eps)
            rest = Layout(grid.axes[0], None)
            a, b = pla.distribute(t, grid, rest), pla.distribute(np.ones((n, 4), dtype), grid, Layout(None, None))
            linalg.solve_triangular(a, b, lower=lower)
    assert isinstance(a.block, np.ndarray) <= any(world.share(any(taken), others="alike"))


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [33, 64, 71])
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_long_rows_meet_a_vector_in_a_loop(dtype, rows, given, tune, monkeypatch):
    if blas.blas_threads() is None or not compiled.available():
        pytest.skip("cannot be had here: numba, and a NumPy with an OpenBLAS of its own")
    tune(COMPILED_SIZE=1, GEMV_STRIP=50, GEMV_ROW=50)
    monkeypatch.setattr(skinny, "blas_threads", lambda: 1)
    rng = np.random.default_rng(3)
    x, both = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((rows, 51), (51, 2)))
    want = x @ both
    monkeypatch.setattr(np, "matmul", None)
    for column in range(2):  # of another matrix, so that its elements do not lie together
        out = np.full((rows, 1), np.nan, dtype) if given else None
        y = skinny.product(x, both[:, column : column + 1], out)
        assert (y is out) == given
        np.testing.assert_array_equal(y, want[:, column : column + 1])


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("rows", [33, 64, 67])
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_long_rows_meet_a_vector_a_few_at_a_time(dtype, rows, given, tune, monkeypatch):
    if blas.blas_threads() is None:
        pytest.skip("cannot be had here: a NumPy with an OpenBLAS of its own")
    tune(GEMV_STRIP=8 * 50 * np.dtype(dtype).itemsize, GEMV_ROW=50 * np.dtype(dtype).itemsize)
    rng, matmul, calls = np.random.default_rng(3), np.matmul, []
    x, w = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((rows, 50), (50, 1)))
    monkeypatch.setattr(np, "matmul", lambda *a, **k: calls.append(len(a[0])) or matmul(*a, **k))
    for threads in (1, 2):
        monkeypatch.setattr(skinny, "blas_threads", lambda threads=threads: threads)
        out = np.full((rows, 1), np.nan, dtype) if given else None
        y = skinny.product(x, w, out)
        assert (y is out) == given
        np.testing.assert_array_equal(y, matmul(x, w))
        np.testing.assert_array_equal(skinny.product(x[:, ::2], w[::2]), matmul(x[:, ::2], w[::2]))
    few = 32  # too few rows for strips
    np.testing.assert_array_equal(skinny.product(x[:few], w), matmul(x[:few], w))
    strips = [8] * (rows // 8) + [rows % 8] * bool(rows % 8)
    assert calls == [*strips, rows, rows, rows, few]
