"""Distributed arrays in SciPy's iterative methods, and as plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import linalg

import parlinalg as pla
from parlinalg.layout import Layout
from tests.cases import grids, layouts, numbers, pairs, same

pytestmark = pytest.mark.one_in(4)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[min(request.param, len(grids(world.size)) - 1)], world, backend, idle=True)


def alike(world, values):
    """The same bits on every rank; returned for the test to compare with NumPy's."""
    values = np.asarray(values)
    assert len(set(world.share(values.tobytes().hex()))) == 1
    return values


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32, np.int64], ids=lambda t: t.__name__)
@pytest.mark.parametrize("shape", [(5, 7), (6, 4), (1, 3), (3, 1), (0, 4), (2, 0)], ids=str)
def test_products_of_a_linear_operator(grid, world, shape, dtype):
    m, n = shape
    a = numbers(shape, dtype, 1)
    for layout, _ in pairs(layouts(grid.axes, 2), [0], 2, seed=m * n):
        operator = pla.distribute(a, grid, layout).as_linear_operator()
        assert isinstance(operator, linalg.LinearOperator)
        assert operator.shape == shape
        assert operator.dtype == dtype
        x, y = numbers((n,), dtype, 2), numbers((m,), dtype, 3)
        np.testing.assert_array_equal(alike(world, operator.matvec(x)), a @ x)
        np.testing.assert_array_equal(alike(world, operator.rmatvec(y)), a.conj().T @ y)
        x, y = numbers((n, 1), dtype), numbers((m, 1), dtype)
        np.testing.assert_array_equal(alike(world, operator @ x), a @ x)
        np.testing.assert_array_equal(alike(world, operator.H @ y), a.conj().T @ y)
        x, y = numbers((n, 3), np.float64, 4), numbers((m, 2), dtype, 5)
        np.testing.assert_array_equal(alike(world, operator.matmat(x)), a @ x)
        np.testing.assert_array_equal(alike(world, operator.rmatmat(y)), a.conj().T @ y)
        np.testing.assert_array_equal(operator.H @ y, a.conj().T @ y)


def test_a_linear_operator_keeps_its_values(grid):
    a = numbers((4, 4))
    A = pla.distribute(a, grid, grid.default_layout((4, 4)))
    operator = A.as_linear_operator()
    A += 1
    np.testing.assert_array_equal(operator @ np.ones(4), a @ np.ones(4))
    with pytest.raises(ValueError, match=r"made of a matrix, not of an array of shape \(4,\)"):
        A[0].as_linear_operator()


def test_iterative_methods(grid, world):
    """SciPy's methods run on every rank in step, and find what they find for the whole matrix."""
    rng = np.random.default_rng(3)
    n = 31
    a = rng.standard_normal((n, n))
    a = a @ a.T + n * np.eye(n)
    b, rectangle = rng.standard_normal(n), rng.standard_normal((n, 22))
    for layout, _ in pairs(layouts(grid.axes, 2, partial=False), [0], 1, seed=9):
        A = pla.distribute(a, grid, layout).as_linear_operator()
        exact = np.linalg.solve(a, b)
        for method in (linalg.cg, linalg.gmres, linalg.bicgstab, linalg.minres):
            x, info = method(A, b, rtol=1e-13)
            assert info == 0
            np.testing.assert_allclose(alike(world, x), exact, atol=1e-12)
        want = np.linalg.eigvalsh(a)
        values, vectors = linalg.eigsh(A, 3, v0=np.ones(n))
        np.testing.assert_allclose(alike(world, values), want[-3:], rtol=1e-11)
        alike(world, vectors)
        values, _ = linalg.lobpcg(A, rng.standard_normal((n, 2)), tol=1e-10, maxiter=200)
        np.testing.assert_allclose(alike(world, values), want[::-1][:2], rtol=1e-9)
        B = pla.distribute(rectangle, grid, layout).as_linear_operator()
        for solver, tol in (("arpack", 0), ("lobpcg", 1e-4)):
            options = {"solver": solver, "rng": np.random.default_rng(0), "maxiter": 200, "tol": tol}
            s = linalg.svds(B, 3, return_singular_vectors=False, **options)
            np.testing.assert_allclose(alike(world, np.sort(s)), np.linalg.svd(rectangle)[1][:3][::-1], rtol=1e-6)
        y = linalg.lsqr(B, b, atol=1e-14, btol=1e-14)[0]
        np.testing.assert_allclose(alike(world, y), np.linalg.lstsq(rectangle, b)[0], atol=1e-11)


@pytest.mark.mpi(min_size=2)
def test_vectors_that_differ_are_noticed(grid, world):
    A = pla.distribute(numbers((6, 6)), grid, grid.default_layout((6, 6))).as_linear_operator()
    with pytest.raises(pla.CommError, match="v0="):
        A @ np.random.default_rng(world.rank).random(6)


def test_a_product_receives_no_more_than_its_vectors(grid):
    n = 96
    for layout in (Layout(grid.axes, None), Layout(None, grid.axes)):
        A = pla.distribute(numbers((n, n)), grid, layout).as_linear_operator()
        with pla.ledger(grid) as book:
            A @ np.ones(n)
        assert book.words.total() <= 3 * n


def test_plain_arrays(grid, world):
    a = numbers((5, 3))
    for layout, _ in pairs(layouts(grid.axes, 2), [0], 4):
        got = pla.asnumpy(pla.distribute(a, grid, layout))
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, a)
    assert pla.asnumpy(a) is a
    assert pla.asnumpy(2.5) == 2.5
    A = pla.distribute(a, grid, Layout(grid.axes, None))
    np.testing.assert_array_equal(pla.asnumpy(pla.Tensor(A)), a)
    with pytest.raises(TypeError, match=r"pla.asnumpy\(x\) or .gather\(\)"):
        np.asarray(A)


def test_other_libraries_get_a_copy_by_dlpack(grid, world):
    a = numbers((5, 3))
    A = pla.distribute(a, grid, grid.default_layout((5, 3)))
    np.testing.assert_array_equal(pla.from_dlpack(a, device=A.device).gather(), a)
    if world.size == 1 and not grid.backend.host_memory:
        return  # the memory of a GPU, which NumPy does not take
    got = np.from_dlpack(A)
    if world.size > 1:
        got += 1
        got -= 1
        for refused in (lambda: A.__dlpack__(copy=False), lambda: np.from_dlpack(A)):
            with pla.explicit(), pytest.raises(BufferError, match="asnumpy"):
                refused()
    np.testing.assert_array_equal(got, a)


def test_arrays_made_for_a_device_live_on_its_grid(grid):
    A = pla.distribute(numbers((5, 3)), grid, grid.default_layout((5, 3)))
    device = A.device
    assert device == ("cpu" if grid.backend.host_memory else "cuda")
    made = [
        pla.asarray(numbers((5, 3)), device=device), pla.zeros((5, 3), device=device), pla.arange(3, device=device),
        pla.linspace(0, 1, 3, device=device), pla.full((), 2.5, device=device), pla.eye(5, 3, device=device),
    ]  # fmt: skip
    for each in made:
        assert each.grid is grid
        same(A + each, A.gather() + each.gather())
