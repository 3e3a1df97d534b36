"""Stacks of matrices: fewer than ranks, as many and more; factor objects with every method of those of one matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, linalg
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
    a = (random((*stacks, n, n), dtype, rng) + 9 * np.eye(n)[[2, 3, 4, 1, 0]]).astype(dtype)  # whose rows are exchanged
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
    for factor, each in ((lu, a), (cholesky, s)):
        same(factor.det(), np.linalg.det(each), tol)
        for got, want in zip(factor.slogdet(), np.linalg.slogdet(each), strict=True):
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
        shared_out = A.redistribute(Layout(*grid.default_layout(stacks).dims, None, None))
        kept = linalg.qr_factor(shared_out)
        shared_out[...] = 7.0  # of which the factorization knows nothing
        np.testing.assert_allclose((kept.Q(m)[..., : min(shape)] @ kept.R).gather(), a, atol=tol)
        l, u = linalg.lu_factor(A).factors()
        assert (l.shape, u.shape) == ((*stacks, m, min(shape)), (*stacks, min(shape), n))
        np.testing.assert_allclose((linalg.lu_factor(A).P @ l @ u).gather(), a, atol=tol)
        if m < n:
            with pytest.raises(np.linalg.LinAlgError, match="does not give solutions of least norm; lstsq does"):
                qr.solve(pla.ones(m, grid))
            continue
        for b in sides(stacks, m, dtype, rng):
            same(qr.solve(placed(grid, b, rng)), np.linalg.pinv(a) @ b, 100 * tol)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_matrices_near_underflow(grid, dtype):
    """Matrices whose pivots have no reciprocals, beside others of common sizes, as one matrix alone."""
    if not grid.backend.cpu:  # whose libraries multiply by reciprocals
        return
    small, count = float(np.finfo(dtype).tiny) / 2, grid.size + 4
    for n in (1, 2, 5, 40):
        rng, one = np.random.default_rng(n), np.ones((n, 2))
        scale = np.ones((count, n, 1))
        scale[::3], scale[1::3] = small, np.where(np.arange(n) < n // 2, 1, small)[:, None]
        q, t = np.linalg.qr(random((count, n, n), dtype, rng))[0], np.tri(n) + n * np.eye(n)
        a, t, upper = ((each * scale).astype(dtype) for each in (q, t, t.T))
        A, T, B = placed(grid, a, rng), placed(grid, t, rng), placed(grid, (a @ one).astype(dtype), rng)
        flipped = placed(grid, np.swapaxes(upper, -1, -2).conj().copy(), rng)
        for x in (
            linalg.solve(A, B),
            linalg.lu_factor(A).solve(B),
            linalg.solve_triangular(T, placed(grid, (t @ one).astype(dtype), rng), lower=True),
            linalg.solve_triangular(flipped, placed(grid, (upper @ one).astype(dtype), rng), lower=True, adjoint=True),
        ):
            np.testing.assert_allclose(x.gather(), np.broadcast_to(one, x.shape), atol=1e-3)
        np.testing.assert_allclose(linalg.inv(A).gather() * np.swapaxes(scale, -1, -2), np.linalg.inv(q), atol=1e-3)
        tiny, full = placed(grid, (q * small).astype(dtype), rng), placed(grid, (q * small @ one).astype(dtype), rng)
        np.testing.assert_allclose(linalg.lstsq(tiny, full).x.gather(), np.broadcast_to(one, full.shape), atol=1e-3)
        sign, log = linalg.slogdet(A)
        np.testing.assert_allclose(sign.gather(), np.linalg.det(q), atol=1e-3)
        np.testing.assert_allclose(log.gather(), np.log(scale).sum((-2, -1)), atol=1e-3 * n)
        want = np.linalg.det(q) * scale.prod((-2, -1))
        np.testing.assert_allclose(linalg.det(A).gather(), want, rtol=1e-3, atol=1e-3 * small)
        with pytest.raises(np.linalg.LinAlgError, match=r"[Ss]ingular"):
            linalg.solve(A * (pla.arange(count, grid=grid) < count - 1)[:, None, None], B)
    e = small**0.5 * 2.0**-6  # no element is below the normal numbers, but a pivot is e²
    a = placed(grid, np.tile(np.array([[1, e, 0], [e, 0, 1], [e, 0, -1]], dtype), (count, 1, 1)), rng)
    np.testing.assert_allclose(linalg.slogdet(a).logabsdet.gather(), np.log(2 * e**2), rtol=1e-6)


def each(a, b, rcond=None):
    """What NumPy's `lstsq` gives for each matrix: x, the sums of squares, the ranks and the singular values."""
    b = b[:, None] if b.ndim == 1 else b
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(y, (*lead, *y.shape[-2:])) for y in (a, b))
    (m, n), k = a.shape[-2:], b.shape[-1]
    real = a.real.dtype
    x, ranks = np.zeros((*lead, n, k), a.dtype), np.zeros(lead, np.int64)
    s, squares = np.zeros((*lead, min(m, n)), real), np.zeros((*lead, k), real)
    for at in np.ndindex(*lead):
        limit = eps(a.dtype) * max(m, n) if rcond is None else rcond
        x[at], _, ranks[at], s[at] = np.linalg.lstsq(a[at], b[at], limit)
        squares[at] = (np.abs(b[at] - a[at] @ x[at]) ** 2).sum(axis=0)
    return x, squares if m > n and (ranks == n).all() else np.zeros(0, real), ranks, s


def agree(got, b, want, tol):
    x, squares, ranks, s = want
    same(got.x, x[..., 0] if b.ndim == 1 else x, tol)
    assert got.x.layout.dims[-b.ndim :] == b.layout.dims
    assert not got.x.layout.partial
    assert got.rank.dtype == np.int64
    np.testing.assert_array_equal(got.rank.gather(), ranks)
    for found, right in ((got.residuals, squares), (got.s, s)):
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        np.testing.assert_allclose(found.gather(), right, atol=tol * max(1, float(np.abs(right).max(initial=0))))


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4), (1, 1), (1, 3), (3, 1), (3, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("stacks", STACKS, ids=str)
def test_least_squares(grid, stacks, shape):
    """Of full rank, of some matrices of lower rank, and of matrices of zeros: what NumPy gives of each."""
    rng, (m, n) = np.random.default_rng([3, len(stacks), len(grid.sizes), *shape]), shape
    for dtype in DTYPES if grid.size == 1 else rng.permutation(DTYPES)[:2]:
        tol = 5000 * eps(dtype)
        u, _, vh = np.linalg.svd(random((*stacks, m, n), dtype, rng), full_matrices=False)
        values = (1 + np.arange(min(shape))).astype(vh.real.dtype)
        some = values * (rng.random((*stacks, min(shape))) < 0.5)
        for s in (np.broadcast_to(values, some.shape), some, 0 * some):
            a = (u * s[..., None, :]) @ vh
            for b in [*sides(stacks, m, dtype, rng)][rng.integers(2) :: 2][: 1 if grid.size > 1 else 2]:
                every = layouts(grid.axes, a.ndim)
                layout = every[rng.integers(len(every))]
                A = pla.distribute(a, grid, layout.with_partial(())).redistribute(layout)
                B = placed(grid, b, rng)
                agree(linalg.lstsq(A, B), B, each(a, b), tol)
                if rng.random() < 0.3:
                    found = linalg.lstsq(A, B, refine=True)
                    same(found.x, linalg.lstsq(A, B).x.gather(), tol)
                    np.testing.assert_array_equal(found.rank.gather(), each(a, b)[2])


def test_least_squares_of_one_matrix_and_stacks_of_sides(grid):
    rng = np.random.default_rng(4)
    for m, n in ((5, 3), (3, 5)):
        a, b = random((m, n), "complex128", rng), random((2, 3, m, 2), "float64", rng)
        A, B = placed(grid, a, rng), placed(grid, b, rng)
        agree(linalg.lstsq(A, B), B, each(a, b), 1e-11)
        c = random((3, m, n), "float64", rng)
        agree(linalg.lstsq(placed(grid, c, rng), B), B, each(c, b), 1e-11)
        assert linalg.lstsq(A, B[..., :0]).x.shape == (2, 3, n, 0)


def test_singular_values_of_stacks_that_count(grid):
    """One `rcond` for all matrices, beside the largest value of each."""
    rng = np.random.default_rng(5)
    for (m, n), stacks in itertools.product([(9, 4), (4, 9), (4, 4)], [(1,), (3, 5)]):
        u, _, vh = np.linalg.svd(random((*stacks, m, n), "float64", rng), full_matrices=False)
        scale = 10.0 ** rng.integers(-9, 9, size=(*stacks, 1, 1))
        a, b = scale * ((u * np.geomspace(1, 1e-6, 4)) @ vh), scale[..., 0] * random((*stacks, m), "float64", rng)
        A, B = placed(grid, a, rng), placed(grid, b[..., None], rng)
        for rcond, rank in ((None, 4), (-1, 4), (1e-9, 4), (1e-3, 2), (0.9, 1), (2.0, 4)):
            got, want = linalg.lstsq(A, B, rcond), each(a, b[..., None], rcond)
            assert set(got.rank.gather().flat) == set(want[2].flat) == {rank}
            same(got.x, want[0], 1e-8)
            np.testing.assert_allclose(got.s.gather() / scale[..., 0], want[3] / scale[..., 0], atol=1e-13)
    zero = np.zeros((3, 5, 6, 3))
    zero[..., 0] = 1  # R has zeros on its diagonal
    for rcond in (None, 1e-300):
        a, b = zero + 0, random((3, 5, 6, 1), "float64", rng)
        found = linalg.lstsq(placed(grid, a, rng), placed(grid, b, rng), rcond)
        same(found.x[..., :1, 0], b.mean(axis=-2), 1e-12)
        assert found.residuals.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_least_squares_of_sizes_without_reciprocals(grid, dtype):
    """Of stacks and of one matrix, of any rank, near underflow and overflow; all digits of the elements count."""
    if not grid.backend.cpu:  # whose libraries multiply by reciprocals
        return
    rng, real, tol = np.random.default_rng(7), np.finfo(dtype), 1e5 * eps(dtype)
    for (m, n), deficient, count in itertools.product([(9, 4), (4, 9), (4, 4)], [1, 0], [1, grid.size + 1]):
        a, b = rng.integers(-8, 9, (count, m, n)).astype(dtype), rng.integers(-8, 9, (count, m, 2)).astype(dtype)
        if a.dtype.kind == "c":
            a += 1j * rng.integers(-8, 9, a.shape)
        if deficient:
            a[..., -1, :], a[..., :, -1] = a[..., 0, :], a[..., :, 0]
        want = each(a, b)
        for unit in (real.smallest_subnormal * 2, real.tiny / 4, real.max / 1024):
            if grid.size > 1 and rng.random() < 0.6:
                continue
            A, B = placed(grid, (a * unit).astype(dtype), rng), placed(grid, (b * unit).astype(dtype), rng)
            with np.errstate(over="ignore", invalid="ignore"):  # the sums of squares
                (x, _, rank, s), alone = linalg.lstsq(A, B), linalg.lstsq(A[-1], B[-1])
            same(x, want[0], tol)
            np.testing.assert_array_equal(rank.gather(), want[2])
            np.testing.assert_allclose(s.gather() / unit, want[3], rtol=tol, atol=tol + real.smallest_subnormal / unit)
            assert alone.rank == want[2][-1]
            same(alone.x, want[0][-1], tol)
            if unit < real.tiny / 4:
                continue  # so are the digits of the gradient of x
            t = pla.Tensor(B, requires_grad=True)
            with np.errstate(over="ignore", invalid="ignore"):
                pla.sum(linalg.lstsq(pla.Tensor(A), t).x * unit).real.backward()
            same(t.grad, np.linalg.pinv(a, 1e-4).conj().swapaxes(-1, -2) @ np.ones((n, 2), dtype), tol)


def test_wrong_least_squares(grid):
    for stacks in ((1,), (3, 5)):
        a, b = np.ones((*stacks, 4, 2)), np.ones((*stacks, 4, 1))
        for which in (a, b):
            which[(*(n - 1 for n in stacks), 3, 0)] = np.nan
            A, B = (pla.distribute(x, grid, grid.default_layout(x.shape)) for x in (a, b))
            with pytest.raises(ValueError, match="lstsq takes finite numbers; the array has NaNs or infinities"):
                linalg.lstsq(A, B)
            which[...] = 1


@pytest.mark.parametrize("name", ["solve", "solve_triangular", "lstsq"])
def test_stacks_that_do_not_fit_are_named(grid, name):
    a, b = pla.ones((2, 3, 3), grid), pla.ones((4, 3, 1), grid)
    with pytest.raises(np.linalg.LinAlgError) as error:
        getattr(linalg, name)(a, b)
    assert str(error.value) == f"the leading dims of {name}'s stacks do not fit to each other: (2, 3, 3) and (4, 3, 1)"


def test_least_squares_of_stacks_that_lie_shared_out_move_nothing(grid):
    count = 2 * grid.size
    layout = grid.default_layout((count,))
    a, b = np.random.default_rng(6).standard_normal((2, count, 6, 3))
    A, B = (pla.distribute(x, grid, Layout(*layout.dims, None, None)) for x in (a, b))
    with pla.ledger(grid) as book:
        found = linalg.lstsq(A, B)
    assert {op for (op, _), words in book.words.items() if words} <= {"all_reduce"}  # whether all have full rank
    assert book.words.total() <= 2 * grid.world.size
    agree(found, B, each(a, b), 1e-12)


def test_wrong_use(grid, world):
    for stacks in ((1,), (3, 5)):
        a = np.broadcast_to(np.eye(4), (*stacks, 4, 4)).copy()
        a[(*(n - 1 for n in stacks), 2, 2)] = -1
        x, last = placed(grid, a, np.random.default_rng(0)), tuple(n - 1 for n in stacks)
        with pytest.raises(np.linalg.LinAlgError) as error:
            linalg.cho_factor(x)
        assert str(error.value) == (
            f"matrix {last}: cholesky takes positive definite matrices; the leading minor of order 3 is not positive"
        )
        with pytest.raises(np.linalg.LinAlgError) as error:
            linalg.cholesky(x)
        assert f"matrix {last}: " in str(error.value)
        assert "the leading minor of order 3 is not positive" in str(error.value)
        singular = linalg.lu_factor(x + 1 * pla.eye(4, grid=grid))
        with pytest.raises(np.linalg.LinAlgError) as error:
            singular.solve(pla.ones(4, grid))
        assert str(error.value) == f"matrix {last}: the matrix is singular: U[2, 2] of its factorization is 0"
        assert not float(singular.det()[last])
        with pytest.raises(np.linalg.LinAlgError, match=r"the columns are dependent: R\[2, 2\] is 0; lstsq takes"):
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


@pytest.mark.parametrize("count", [1, 2, 3, 7, 13])
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_an_error_names_the_matrix_of_the_stack(grid, count, which):
    """The first that is wrong, wherever it lies, on all ranks."""
    rng, n = np.random.default_rng(3), 4
    good = np.stack([(i + 2) * np.eye(n) for i in range(count)])
    bad = good.copy()
    bad[which, 2, 2] = 0
    at = rf"matrix \({which % count},\): "
    B, one = placed(grid, good[..., :1], rng), placed(grid, bad, rng)
    with pytest.raises(np.linalg.LinAlgError, match=at + r".*element \[2, 2\] of its diagonal is 0"):
        linalg.solve_triangular(one, B)
    for function in (linalg.cholesky, linalg.inv, lambda a: linalg.solve(a, B)):
        with pytest.raises(np.linalg.LinAlgError, match=at):
            function(one)


@pytest.mark.parametrize(("stacks", "wrong"), [((13,), [(2,), (10,)]), ((4, 4), [(0, 3), (1, 0)])], ids=str)
def test_of_several_wrong_matrices_the_first_is_named(grid, stacks, wrong):
    """By its index, whatever ranks have them."""
    rng, n = np.random.default_rng(3), 3
    a = np.broadcast_to(2 * np.eye(n), (*stacks, n, n)).copy()
    B = placed(grid, a[..., :1].copy(), rng)
    for at in wrong:
        a[(*at, 1, 1)] = 0
    A = placed(grid, a, rng)
    for call in (
        lambda: linalg.inv(A), lambda: linalg.cholesky(A), lambda: linalg.cho_factor(A),
        lambda: linalg.lu_factor(A).solve(B), lambda: linalg.qr_factor(A).solve(B),
        lambda: linalg.solve_triangular(A, B),
    ):  # fmt: skip
        with pytest.raises(np.linalg.LinAlgError) as error:
            call()
        assert f"matrix {wrong[0]}: " in str(error.value)


@pytest.mark.parametrize("count", [2, 3, 40], ids="{} matrices".format)
def test_singular_matrices_are_named_with_their_pivot(grid, count):
    """Whether ranks have matrices of their own or work together on each."""
    a = np.tile(np.eye(4), (count, 1, 1))
    a[1:, 2, 2] = 0
    A, b = pla.distribute(a, grid), pla.ones((4, 3), grid=grid)
    pivot = r"matrix \(1,\): " + (
        r"the matrix is singular: U\[2, 2\] of its factorization is 0$"
        if isinstance(A.block, np.ndarray)
        else "(the matrix is singular: |Singular matrix)"
    )
    for function in (lambda: linalg.solve(A, b), lambda: linalg.inv(A), lambda: linalg.lu_factor(A).solve(b)):
        with pytest.raises(np.linalg.LinAlgError, match=pivot):
            function()
