"""Loops for few columns, one by one and as `solve_triangular` uses them, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, linalg
from parlinalg.backend import compiled
from parlinalg.linalg import few, triangular
from tests.cases import grids, layouts

LENGTHS = (1, 2, 3, 4, 5, 15, 33, 70, 2100)
"""Below and above four rows, `few.CORNER` and `few.LENGTH`, and not multiples of them."""


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    if not compiled.available():
        pytest.skip("numba is not installed, or turned off")
    return np.dtype(request.param)


def numbers(n, dtype):
    """A matrix of n rows and columns within a larger one, which has NaNs around them, and right-hand sides."""
    rng = np.random.default_rng(n)
    a = np.full((n + 3, n + 5), np.nan, dtype)
    rows, columns = slice(1, n + 1), slice(2, n + 2)
    a[rows, columns] = rng.uniform(-1, 1, (n, n)) / n + np.eye(n)
    return a, rows, columns, rng.random((n, 17)).astype(dtype)


@pytest.mark.serial
@pytest.mark.parametrize("sides", [1, 2, 3, 16, 17])
class TestLoops:
    def test_subtract(self, dtype, sides):
        for n in LENGTHS:
            a, rows, columns, b = numbers(n, dtype)
            x = b[:, :sides].copy(order="C")
            for some in (rows, slice(1, 2), slice(n // 2 + 1, n + 1)):
                y = np.ones((some.stop - some.start, sides), dtype)
                few.subtract(y, a, some, columns, x)
                np.testing.assert_allclose(y, 1 - a[some, columns] @ x, rtol=0, atol=16 * np.finfo(dtype).eps)

    @pytest.mark.parametrize("lower", [False, True])
    @pytest.mark.parametrize("unit", [False, True])
    def test_substitute(self, dtype, sides, lower, unit):
        for n in LENGTHS:
            a, rows, columns, b = numbers(n, dtype)
            t = (np.tril if lower else np.triu)(a[rows, columns])
            a[rows, columns] = np.where(t == 0, dtype.type(np.nan), t)
            if unit:
                a[range(1, n + 1), range(2, n + 2)] = np.nan
                np.fill_diagonal(t, 1)
            x = b[:, :sides].copy(order="C")
            few.substitute(a, rows, columns, x, lower=lower, unit=unit)
            residual = t.astype(np.float64) @ x - b[:, :sides]
            np.testing.assert_allclose(residual, 0, rtol=0, atol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("lower", [False, True])
def test_triangular_solutions_by_loops(world, backend, dtype, lower, tune, monkeypatch):
    """On one to three axes, in any layout, with pieces that are not multiples of the loops' lengths."""
    tune(must=backend == "numpy", COMPILED_SIZE=1)  # blocks of a GPU ask for no loops
    monkeypatch.setattr(triangular, "PIECE", 37)
    monkeypatch.setattr(few, "THREADS", 1 << 10)
    taken = []
    monkeypatch.setattr(
        few, "substitute", lambda *args, _as=few.substitute, **kept: taken.append(1) or _as(*args, **kept)
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
    assert isinstance(a.block, np.ndarray) <= any(world.share(bool(taken), others="alike"))
