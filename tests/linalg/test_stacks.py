"""Factor objects of stacks of matrices: fewer than ranks, as many and more, with every method of those of one."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg
from tests.cases import grids, layouts, same
from tests.linalg.test_factors import DTYPES, eps, random

pytestmark = pytest.mark.one_in(8)

STACKS = [(1,), (2,), (3, 4), (0,), (2, 0, 3)]


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def placed(grid, a, rng):
    every = layouts(grid.axes, a.ndim, partial=False)
    return pla.distribute(a, grid, every[rng.integers(len(every))])


def sides(stacks, n, dtype, rng):
    """Right-hand sides: a vector, matrices for all, one for each matrix of the last dim."""
    yield random((n,), dtype, rng)
    yield random((n, 2), dtype, rng)
    yield random((*stacks[1:], n, 3), dtype, rng)
    yield random((*stacks, n, 1), dtype, rng)


def solved(a, b):
    return np.linalg.solve(a, b[:, None])[..., 0] if b.ndim == 1 else np.linalg.solve(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stacks", STACKS, ids=str)
def test_stacks_of_factors(grid, stacks, dtype):
    rng, n, tol = np.random.default_rng(1), 5, 1000 * eps(dtype)
    a = (random((*stacks, n, n), dtype, rng) + 4 * np.eye(n)).astype(dtype)
    s = (a @ a.conj().swapaxes(-1, -2) / 20 + np.eye(n)).astype(dtype)
    A, S = placed(grid, a, rng), placed(grid, s, rng)
    lu, cholesky = linalg.lu_factor(A), linalg.cho_factor(S)
    assert cholesky.L.layout == S.layout
    same(cholesky.L, np.linalg.cholesky(s), tol)
    p, l, u = lu.P, *lu.factors()
    assert p.layout == l.layout == u.layout == A.layout
    np.testing.assert_allclose((p @ l @ u).gather(), a, atol=tol)
    assert (np.abs(np.triu(l.gather(), 1)).max(initial=0), np.abs(np.tril(u.gather(), -1)).max(initial=0)) == (0, 0)
    assert np.abs(l.gather()).max(initial=1) < 1 + 1e-6
    assert lu.permutation.shape == (*stacks, n)
    same(lu.det, np.linalg.det(a), tol)
    for got, want in zip(lu.slogdet(), np.linalg.slogdet(a), strict=True):
        same(got, want, tol)
    for b in sides(stacks, n, dtype, rng):
        B = placed(grid, b, rng)
        for x, matrices in (
            (cholesky.solve(B), s), (lu.solve(B), a), (lu.solve(B, adjoint=True), a.conj().swapaxes(-1, -2)),
        ):  # fmt: skip
            same(x, solved(matrices, b), tol)
            if b.ndim == a.ndim:
                assert x.layout == B.layout
    again = linalg.lu(A)
    for got, want in zip(again, (p, l, u), strict=True):
        np.testing.assert_array_equal(got.gather(), want.gather())


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("stacks", STACKS, ids=str)
def test_stacks_of_rectangles(grid, stacks, shape):
    for dtype in DTYPES[1:3]:
        rng, (m, n), tol = np.random.default_rng(2), shape, 1000 * eps(dtype)
        a = random((*stacks, m, n), dtype, rng)
        A = placed(grid, a, rng)
        qr = linalg.qr_factor(A)
        for columns in {None, 1 if min(shape) else 0, m}:
            q = qr.Q(columns)
            assert q.shape == (*stacks, m, min(shape) if columns is None else columns)
            k = q.shape[-1]
            ones = (q.mT.conj() @ q).gather()
            np.testing.assert_allclose(ones, np.broadcast_to(np.eye(k), ones.shape), atol=tol)
        assert qr.R.layout == A.layout
        np.testing.assert_allclose((qr.Q() @ qr.R).gather(), a, atol=tol)
        l, u = linalg.lu_factor(A).factors()
        assert (l.shape, u.shape) == ((*stacks, m, min(shape)), (*stacks, min(shape), n))
        np.testing.assert_allclose((linalg.lu_factor(A).P @ l @ u).gather(), a, atol=tol)
        if m < n:
            with pytest.raises(np.linalg.LinAlgError, match="does not give solutions of least norm"):
                qr.solve(pla.ones(m, grid))
            continue
        for b in sides(stacks, m, dtype, rng):
            same(qr.solve(placed(grid, b, rng)), np.linalg.pinv(a) @ b, 100 * tol)


def test_wrong_use(grid, world):
    for stacks in ((1,), (3, 5)):
        a = np.broadcast_to(np.eye(4), (*stacks, 4, 4)).copy()
        a[(*(n - 1 for n in stacks), 2, 2)] = -1
        x, last = placed(grid, a, np.random.default_rng(0)), tuple(n - 1 for n in stacks)
        with pytest.raises(np.linalg.LinAlgError) as error:
            linalg.cho_factor(x)
        assert str(error.value) == (
            f"matrix {last}: cholesky takes positive definite matrices; the leading minor of order 3 is not"
        )
        singular = linalg.lu_factor(x + 1 * pla.eye(4, grid=grid))
        with pytest.raises(np.linalg.LinAlgError) as error:
            singular.solve(pla.ones(4, grid))
        assert str(error.value) == f"matrix {last}: the matrix is singular: U[2, 2] of its factorization is 0"
        assert not float(singular.det[last])
        with pytest.raises(np.linalg.LinAlgError, match=r"the columns are dependent: R\[2, 2\] is 0"):
            linalg.qr_factor(x + 1 * pla.eye(4, grid=grid)).solve(pla.ones(4, grid))
        for b in (pla.ones(3, grid), pla.ones((7, 4, 1), grid), pla.ones((2, *stacks, 4, 1), grid)):
            with pytest.raises(ValueError, match=r"solve takes right-hand sides of shape \(4,\) or \(..., 4, k\)"):
                linalg.lu_factor(x).solve(b)
        with pytest.raises(TypeError, match="the factor is of float64; it does not solve right-hand sides of complex"):
            linalg.lu_factor(x).solve(pla.ones(4, grid, dtype=complex))
        with pytest.raises(ValueError, match="finite numbers; the array has NaNs or infinities"):
            linalg.qr_factor(x * np.nan)
        with pytest.raises(np.linalg.LinAlgError) as error:
            linalg.cg(x, pla.ones(4, grid))
        assert "cg takes positive definite A" in str(error.value)
        assert str(error.value).endswith(f" of system {(*last, 0)}")
