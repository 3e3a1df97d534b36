"""Least squares on every grid: NumPy's answers, of full and lower rank, and refined from half the precision."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg
from parlinalg.layout import Layout
from parlinalg.linalg import least_squares, ranks, singular
from parlinalg.linalg.factors.qr import QRFactor
from parlinalg.linalg.reductions import divide
from tests.cases import grids, layouts, same
from tests.linalg.test_factors import DTYPES, LOWER, eps, random

pytestmark = pytest.mark.one_in(8)

SHAPES = [(9, 5), (5, 9), (6, 6), (70, 7), (7, 70), (67, 66), (1, 1), (1, 4), (4, 1)]
EMPTY = [(0, 0), (5, 0), (0, 5)]


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def placed(grid, a, rng):
    every = layouts(grid.axes, a.ndim)
    layout = every[rng.integers(len(every))]
    return pla.distribute(a, grid, layout.with_partial(())).redistribute(layout)


def of_rank(shape, rank, dtype, rng):
    return random((shape[0], rank), dtype, rng) @ random((rank, shape[1]), dtype, rng)


def agrees(x, y, a, b, rcond=None, **options):
    """The four results of NumPy, of `a` and `b`, lie on the grid of `x` and `y`."""
    tiny = eps(a.dtype)
    limit = tiny * max(a.shape) if rcond is None else rcond  # NumPy takes float64's eps for all dtypes
    got, want = linalg.lstsq(x, y, rcond, **options), np.linalg.lstsq(a, b, limit)
    s = want[3]
    kept = s[: want[2]]
    condition = float(kept.max() / kept.min()) if len(kept) else 1.0
    tol = 300 * tiny * condition**2
    assert got.rank == want[2]
    assert type(got.rank) is int
    assert got.x.layout == y.layout.with_partial(())
    same(got.x, want[0], tol)
    assert got.residuals.dtype == want[1].dtype
    squares = float((np.abs(b).astype(float) ** 2).sum(axis=0).max(initial=0)) if b.size else 0.0
    np.testing.assert_allclose(got.residuals.gather(), want[1], atol=tol * squares)
    assert got.s.shape == s.shape
    assert got.s.dtype == s.dtype
    np.testing.assert_allclose(got.s.gather(), s, atol=100 * tiny * float(s.max(initial=0)))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_that_numpy_returns(grid, dtype):
    rng = np.random.default_rng(1)
    for shape in SHAPES + EMPTY:
        m, _ = shape
        for rank in {min(shape), min(shape) - 2}:
            if rank < 1 and (shape not in EMPTY or rank < 0):
                continue
            if grid.size > 1 and rng.random() < 0.5:
                continue
            a = random(shape, dtype, rng) if rank == min(shape) else of_rank(shape, rank, dtype, rng)
            for b in (random((m,), dtype, rng), random((m, 3), dtype, rng)):
                agrees(placed(grid, a, rng), placed(grid, b, rng), a, b)


def test_singular_values_that_count(grid):
    """`rcond` decides, as NumPy's, and not the diagonal of R."""
    rng = np.random.default_rng(2)
    for shape in ((40, 9), (9, 40), (9, 9)):
        u, v = (np.linalg.qr(rng.standard_normal((n, 9)))[0] for n in shape)
        a, b = (u * np.geomspace(1, 1e-6, 9)) @ v.T, rng.standard_normal((shape[0], 2))
        for rcond, rank in ((None, 9), (-1, 9), (1e-9, 9), (1e-4, 6), (0.9, 1), (0, 9), (2.0, 9)):
            x, y = placed(grid, a, rng), placed(grid, b, rng)
            got, want = linalg.lstsq(x, y, rcond), np.linalg.lstsq(a, b, rcond)
            assert got.rank == want[2] == rank, (shape, rcond)
            same(got.x, want[0], 1e-8)
            assert got.residuals.shape == want[1].shape
    between = np.diag([1, 1.5e-16, 0])  # LAPACK's machine precision is half of eps
    for rcond, rank in ((None, 1), (-1, 2), (0, 2)):
        x, y = placed(grid, between, rng), placed(grid, np.ones(3), rng)
        assert linalg.lstsq(x, y, rcond).rank == np.linalg.lstsq(between, np.ones(3), rcond)[2] == rank
    kahan = np.sin(1.2) ** np.arange(60)[:, None] * (np.eye(60) - np.cos(1.2) * np.triu(np.ones((60, 60)), 1))
    s = np.linalg.svd(kahan, compute_uv=False)  # the least is far below the diagonal
    limit = float(np.sqrt(s[-1] * s[-2]) / s[0])
    assert s[-1] < 1e-3 * np.diag(kahan).min()
    x, y = placed(grid, kahan, rng), placed(grid, np.ones(60), rng)
    assert linalg.lstsq(x, y, limit).rank == np.linalg.lstsq(kahan, np.ones(60), limit)[2] == 59
    zero = linalg.lstsq(x * 0, y)
    assert (zero.rank, float(pla.max(abs(zero.x)))) == (0, 0.0)


def test_a_matrix_of_full_rank_has_no_singular_vectors(grid, monkeypatch):
    def none(*args, **options):
        raise AssertionError("singular vectors")

    monkeypatch.setattr(least_squares, "svd", none)
    rng = np.random.default_rng(3)
    for shape in ((40, 9), (9, 40), (9, 9)):
        a, b = rng.standard_normal(shape), rng.standard_normal((shape[0], 2))
        agrees(placed(grid, a, rng), placed(grid, b, rng), a, b)


LOWER_RANKS = [
    ((40, 33), 20, (3,)), ((33, 40), 20, ()), ((37, 37), 36, (40,)), ((90, 20), 19, (1,)), ((20, 90), 1, (34,)),
    ((70, 70), 3, (2,)), ((6, 5), 0, (3,)), ((5, 6), 0, ()), ((2, 2), 1, (0,)), ((40, 33), 20, (0,)), ((1, 3), 0, ()),
]  # fmt: skip


@pytest.fixture
def reduced(monkeypatch):
    """Counts solutions by bidiagonal matrices: ranks reduce small R too."""
    count, solution = [], ranks.solution_of_triangle
    monkeypatch.setattr(divide, "LEAF", 16)  # so that there are merges
    monkeypatch.setattr(singular, "svd_by_one", lambda *args, **options: False)
    monkeypatch.setattr(
        least_squares, "solution_of_triangle", lambda *args, **options: count.append(1) or solution(*args, **options)
    )
    return count


CORES = [("float64", 1), ("float64", 64), ("float32", 2), ("complex64", 64), ("complex128", 2)]
"""Dtypes, and how many ranks of a node reduce a matrix."""


@pytest.mark.parametrize(("dtype", "cores"), CORES)
def test_lower_rank_by_bidiagonal_matrices(grid, dtype, cores, reduced, monkeypatch):
    """NumPy's solution of least norm, and LAPACK's ratios of its tests of `gelsd`, whose threshold is 30."""
    monkeypatch.setattr(pla.Grid, "cores", cores)
    rng, tiny = np.random.default_rng(21), eps(dtype)
    for shape, rank, sides in LOWER_RANKS:
        a, b = of_rank(shape, rank, dtype, rng), random((shape[0], *sides), dtype, rng)
        a = (a / (abs(a).max() or 1)).astype(dtype)
        x, y, before = placed(grid, a, rng), placed(grid, b, rng), len(reduced)
        got = agrees(x, y, a, b)
        assert len(reduced) == before + (grid.size > 1), (shape, rank)
        same(x, a, 0)
        same(y, b, 0)
        found, size = got.x.gather(), tiny * max(shape)
        _, s, vh = np.linalg.svd(a.astype(complex), full_matrices=False)
        residual, norm = b - a @ found, np.linalg.norm(a, 2)
        ratios = [np.linalg.norm(got.s.gather() - s) / (np.linalg.norm(s) or 1) / size]
        if rank and b.size:
            beside = found - vh[:rank].conj().T @ (vh[:rank] @ found)  # what is not in the space of A's rows
            ratios += [
                np.linalg.norm(a.conj().T @ residual) / (norm * np.linalg.norm(b) * size),
                np.linalg.norm(beside) / (np.linalg.norm(found) * size),
            ]
        assert max(ratios) < 30, (shape, rank, sides, ratios)


@pytest.mark.parametrize(("dtype", "cores"), CORES)
def test_lower_rank_out_of_range(grid, dtype, cores, reduced, monkeypatch):
    """Matrices and right-hand sides near the largest and the least numbers have the solutions of those of size one."""
    monkeypatch.setattr(pla.Grid, "cores", cores)
    rng, limits = np.random.default_rng(22), np.finfo(dtype)
    high, low = 2.0 ** (limits.maxexp - 4), 2.0 ** (limits.minexp + 6)
    pairs = [(high, high), (low, low), (high, 1.0), (low, 2.0**-20), (1.0, high), (1.0, low)]
    for number, (shape, rank) in enumerate((((40, 33), 20), ((33, 40), 20), ((24, 24), 23))):
        a, b = of_rank(shape, rank, dtype, rng), random((shape[0], 2), dtype, rng)
        a, b = a / abs(a).max(), b / abs(b).max()
        want = np.linalg.lstsq(a, b, eps(dtype) * max(shape))
        assert want[2] == rank
        condition = want[3][0] / want[3][rank - 1]
        for first, second in pairs[number::2]:
            unit, other = limits.dtype.type(first), limits.dtype.type(second)
            found = linalg.lstsq(placed(grid, a * unit, rng), placed(grid, b * other, rng))
            scale, tol = float(first) / float(second), 300 * eps(dtype) * condition**2
            assert found.rank == rank, (shape, first, second)
            if 2.0 ** (limits.minexp + 20) < 1 / scale < 2.0 ** (limits.maxexp - 20):  # else x is out of range
                got = found.x.gather().astype(complex) * scale
                np.testing.assert_allclose(got, want[0], atol=tol * abs(want[0]).max())
            np.testing.assert_allclose(found.s.gather() / unit, want[3], atol=100 * eps(dtype) * want[3][0])
    assert bool(reduced) == (grid.size > 1 and grid.backend.cpu)


def test_values_that_do_not_count_by_bidiagonal_matrices(grid, reduced):
    """`rcond` is applied to the singular values, and full rank that R's diagonal does not show is found."""
    rng = np.random.default_rng(23)
    for shape in ((40, 24), (24, 40), (24, 24)):
        u, v = (np.linalg.qr(rng.standard_normal((n, 24)))[0] for n in shape)
        a, b = (u * np.geomspace(1, 1e-6, 24)) @ v.T, rng.standard_normal((shape[0], 2))
        for rcond in (1e-9, 1e-3, 0.9):
            agrees(placed(grid, a, rng), placed(grid, b, rng), a, b, rcond)
    for wrong in (np.nan, np.inf):
        for which in range(2):
            given = [of_rank((30, 20), 10, "float64", rng), rng.standard_normal((30, 2))]
            given[which][3, 1] = wrong
            with pytest.raises(ValueError, match="finite"):
                linalg.lstsq(*(placed(grid, each, rng) for each in given))


def backward_error(a, b, x):
    """The relative change of A for which x is a solution; from above, by Grcar's estimate."""
    r = b - a @ x
    size = np.linalg.norm(x, axis=0)
    size[size == 0] = 1
    if a.shape[0] < a.shape[1]:
        return (np.linalg.norm(r, axis=0) / size).max() / np.linalg.norm(a)
    found = []
    for j in range(x.shape[1]):
        weight = np.linalg.norm(r[:, j]) / size[j]
        if weight:
            wide = np.vstack([a, weight * np.eye(a.shape[1])])
            r_ = np.linalg.qr(wide, "r")
            found.append(np.linalg.norm(np.linalg.solve(r_.conj().T, a.conj().T @ r[:, j])) / size[j])
    return max(found, default=0.0) / np.linalg.norm(a)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_sides_near_overflow(grid, dtype):
    """Sums of their elements are out of range, the solution is not."""
    rng, large = np.random.default_rng(8), 2.0**1023
    for shape, rank in (((8, 5), 5), ((5, 8), 5), ((6, 6), 6), ((70, 5), 5), ((9, 6), 4)):
        a, b = of_rank(shape, rank, dtype, rng), np.ones((shape[0], 2))
        a *= 8 * np.sqrt(len(a)) / np.linalg.svd(a)[1][rank - 1]
        found = linalg.lstsq(placed(grid, a, rng), placed(grid, large * b.astype(dtype), rng))
        want = np.linalg.lstsq(a, b)[0]
        np.testing.assert_allclose(found.x.gather() * 2.0**-1023, want, atol=1e-11 * abs(want).max())
        assert found.rank == rank


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("condition", [1.0, 1e5, 1e9])
def test_refined_solutions_are_as_accurate(grid, dtype, condition, monkeypatch):
    """Factors of half the precision; of full precision only where the rank would be in doubt."""
    rng, made = np.random.default_rng(4), []

    class Seen(QRFactor):
        def __init__(self, a, *args, **options):
            made.append(a.dtype.name)
            super().__init__(a, *args, **options)

    monkeypatch.setattr(least_squares, "QRFactor", Seen)
    for m, n in ((60, 23), (23, 60), (23, 23)):
        k = min(m, n)
        u, v = (np.linalg.qr(random((p, k), dtype, rng))[0] for p in (m, n))
        for size, far in ((1e200, 1.0), (1e-200, 1e-8))[:: 1 if rng.random() < 0.5 else -1][: 1 + (grid.size == 1)]:
            a = ((u * np.geomspace(size, size / condition, k)) @ v.conj().T).astype(dtype)
            b = far * random((m, 3), dtype, rng) + (a / size) @ random((n, 3), dtype, rng)
            b[:, 1] *= 1e-30
            for given in (b, b[:, 0]):
                A, B = placed(grid, a, rng), placed(grid, given, rng)
                made.clear()
                found = linalg.lstsq(A, B, refine=True)
                if condition < 1e9:
                    assert made == [LOWER[dtype]]
                else:
                    assert made in ([LOWER[dtype]], [LOWER[dtype], dtype])
                assert found.rank == k
                assert found.x.layout == B.layout.with_partial(())
                assert found.residuals.shape == np.linalg.lstsq(a / size, given)[1].shape
                sides = given if given.ndim == 2 else given[:, None]
                unit = 2.0 ** -np.frexp(size)[1]
                x = (found.x.gather().reshape(n, -1) / unit).astype(dtype)
                assert backward_error(a * unit, sides, x) < 20 * eps(dtype)
                s = np.geomspace(size, size / condition, k)
                np.testing.assert_allclose(found.s.gather() / size, s / size, atol=2 * k * eps(LOWER[dtype]))


def test_what_is_not_refined(grid):
    """Half the precision already, dependent columns, nothing at all: as without `refine`."""
    rng = np.random.default_rng(5)
    for dtype in ("float32", "complex64"):
        a, b = random((30, 7), dtype, rng), random((30, 2), dtype, rng)
        agrees(placed(grid, a, rng), placed(grid, b, rng), a, b, refine=True)
    for a in (of_rank((30, 7), 4, "float64", rng), np.zeros((30, 7)), np.zeros((30, 0)), np.zeros((0, 7))):
        b = rng.standard_normal(len(a))
        agrees(placed(grid, a, rng), placed(grid, b, rng), a, b, refine=True)
    a, b = np.diag([3e-310, 2e-310]), np.ones((2, 1))  # whose scale would be out of range
    x = [linalg.lstsq(placed(grid, a, rng), placed(grid, b * 1e-310, rng), refine=refine).x for refine in (False, True)]
    np.testing.assert_allclose(x[1].gather(), x[0].gather(), rtol=1e-12)
    a, b = random((9, 4), "float64", rng), np.zeros((9, 2))
    assert not linalg.lstsq(placed(grid, a, rng), placed(grid, b, rng), refine=True).x.gather().any()
    assert linalg.lstsq(placed(grid, a, rng), placed(grid, b[:, :0], rng), refine=True).x.shape == (4, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_serves_many_solutions(grid, dtype):
    rng = np.random.default_rng(6)
    for shape in ((40, 9), (9, 9), (5, 1), (4, 0)):
        a = random(shape, dtype, rng)
        factor = linalg.qr_factor(placed(grid, a, rng), [None, 4][rng.integers(2)])
        for b in (random((shape[0],), dtype, rng), random((shape[0], 70), dtype, rng)):
            y = placed(grid, b, rng)
            x = factor.solve(y)
            assert x.layout == y.layout.with_partial(())
            same(x, np.linalg.lstsq(a, b)[0], 2000 * eps(dtype))
    dependent = np.ones((6, 3))
    dependent[:, 1] = 0
    with pytest.raises(np.linalg.LinAlgError, match=r"the columns are dependent: R\[1, 1\] is 0; lstsq takes them"):
        linalg.qr_factor(pla.distribute(dependent, grid, Layout(None, None))).solve(pla.ones(6, grid))
    with pytest.raises(np.linalg.LinAlgError, match=r"matrix \(3, 6\) does not give solutions of least norm; lstsq"):
        linalg.qr_factor(pla.distribute(dependent.T, grid, Layout(None, None))).solve(pla.ones(3, grid))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (40, 3), (6, 5, 3), (2, 3, 5)], ids=str)
def test_complex_numbers_whose_sizes_are_out_of_range(grid, dtype, shape):
    """Their parts are in range."""
    rng = np.random.default_rng(8)
    large = np.finfo(dtype).max / 1.1
    a, b = random(shape, dtype, rng), random((*shape[:-1], 2), dtype, rng)
    a, b = (each / max(abs(each.real).max(), abs(each.imag).max()) for each in (a, b))
    a[..., 0, 0] = b[..., 0, 0] = 1 + 1j
    for low in (False, True):
        if low:
            a[..., -1, :] = a[..., 0, :]
            a[..., :, -1] = a[..., :, 0]
        pairs = zip(a.reshape(-1, *shape[-2:]), b.reshape(-1, shape[-2], 2), strict=True)
        want = np.array([np.linalg.lstsq(p, q, 1000 * eps(dtype))[0] for p, q in pairs])
        want = want.reshape(*shape[:-2], *want.shape[1:])
        for of_a, of_b in ((8, large), (large, 1), (large, large)):
            x = linalg.lstsq(placed(grid, a * of_a, rng), placed(grid, b * of_b, rng), 1000 * eps(dtype)).x
            same(x.astype("complex128") * (of_a / of_b), want.astype("complex128"), 2000 * eps(dtype))


@pytest.mark.parametrize("refine", [False, True])
def test_wrong_use(grid, refine):
    a = np.eye(9, 4)
    for shape in ((9, 4), (4, 9)):
        for where in "ab":
            a, b = np.eye(*shape), np.ones((shape[0], 2))
            (a if where == "a" else b)[-1, 0] = np.nan
            x, y = (pla.distribute(v, grid, grid.default_layout(v.shape)) for v in (a, b))
            with pytest.raises(ValueError, match="lstsq takes finite numbers; the array has NaNs or infinities"):
                linalg.lstsq(x, y, refine=refine)
    with pytest.raises(TypeError, match="lstsq: rcond is a number, or None, not 'warn'"):
        linalg.lstsq(x, y, "warn")
    for shape, sides in (((3, 2), (4,)), ((2, 3, 2), (2,)), ((2, 3, 2), (2, 2, 3)), ((3, 2), (3, 2, 1))):
        with pytest.raises(np.linalg.LinAlgError, match=r"lstsq takes matrices \[..., m, n\] and right-hand sides"):
            linalg.lstsq(pla.ones(shape, grid), pla.ones(sides, grid), refine=refine)
    with pytest.raises(np.linalg.LinAlgError) as error:
        linalg.lstsq(pla.ones((4, 3, 2), grid), pla.ones((5, 3, 1), grid), refine=refine)
    assert str(error.value) == "the leading dims of lstsq's stacks do not fit to each other: (4, 3, 2) and (5, 3, 1)"


@pytest.mark.parametrize(("refine", "alone"), [(False, True), (True, True), (False, False)])
def test_ranks_outside_of_the_grid(world, backend, refine, alone, monkeypatch):
    """One rank decomposes R of lower rank, or all ranks of the grid do."""
    monkeypatch.setattr(singular, "svd_by_one", lambda *args, **options: alone)
    rng = np.random.default_rng(7)
    for sizes in ({"a": 1}, {"a": max(1, world.size - 1)}):
        idle = pla.Grid(sizes, world, backend, idle=True)
        for shape, rank in (((40, 9), 9), ((9, 40), 9), ((40, 9), 5), ((9, 40), 5)):
            a, b = of_rank(shape, rank, "float64", rng), rng.standard_normal((shape[0], 2))
            x, y = (pla.distribute(v, idle, Layout("a", None)) for v in (a, b))
            got, want = linalg.lstsq(x, y, refine=refine), np.linalg.lstsq(a, b)
            assert got.rank == want[2]
            assert (got.x.shape, got.residuals.shape, got.s.shape) == (want[0].shape, want[1].shape, want[3].shape)
            found = got.x.gather()
            if idle.inside:
                np.testing.assert_allclose(found, want[0], atol=1e-10)
