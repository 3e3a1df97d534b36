"""Eigenvalues and singular values on every grid: LAPACK's own ratios, and NumPy's answers."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import scipy.linalg

import parlinalg as pla
from parlinalg import linalg, tunables
from parlinalg.layout import Layout
from parlinalg.linalg import kernels, singular
from parlinalg.linalg.reductions.halves import parts
from parlinalg.linalg.tiles import Deal
from tests.cases import grids, layouts, same
from tests.linalg.test_factors import DTYPES, eps, matrices, norm, random

pytestmark = pytest.mark.one_in(8)

BOUND = 10


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def cases(grid, seed, sizes=(0, 1, 2, 7, 33, 70)):
    rng = np.random.default_rng(seed)
    every = layouts(grid.axes, 2, partial=False)
    for n in sizes:
        for dtype in DTYPES:
            if n > 1 and rng.random() < 1 - 1 / grid.size:
                continue
            for name, a in matrices(n, dtype, rng):
                if name != "random" and rng.random() < 0.85:
                    continue
                yield name, a, every[rng.integers(len(every))], rng


def ratio(value, scale, n, dtype, what):
    assert value <= BOUND * n * eps(dtype) * scale, (what, value / (n * eps(dtype) * max(scale, 1e-300)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pinv_where_parts_of_a_large_matrix_are_zeros(make_grid, monkeypatch, dtype):
    """LAPACK's routine for parts of a bidiagonal matrix divides by the largest element of each."""
    monkeypatch.setattr(kernels, "LARGE", 1)
    grid, n = make_grid({"r": 1}), 300
    for a in (np.zeros(n), np.arange(n) < n / 2, np.arange(n) > n / 3, np.arange(n) == n - 1):
        a = np.diag(a).astype(dtype)
        np.testing.assert_array_equal(linalg.pinv(pla.distribute(a, grid, Layout(None, None))).gather(), a)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_matrices_of_one_rank(make_grid, monkeypatch, dtype):
    """LAPACK works on the copy that it is given; neither A nor what is above its diagonal changes."""
    monkeypatch.setattr(kernels, "LARGE", 1)
    grid, rng = make_grid({"r": 1}), np.random.default_rng(6)
    for m, n in ((30, 30), (40, 30), (30, 40), (1, 1)):
        a = random((m, n), dtype, rng)
        x = pla.distribute(a, grid, Layout(None, None))
        for full in (False, True):
            u, s, vh = (each.gather() for each in linalg.svd(x, full_matrices=full))
            k = min(m, n)
            assert [each.shape for each in (u, vh)] == ([(m, m), (n, n)] if full else [(m, k), (k, n)])
            assert all(each.dtype == dtype for each in (u, vh))
            ratio(norm((u[:, :k] * s) @ vh[:k] - a), norm(a), k, dtype, (m, n, full))
            ratio(norm(u.conj().T @ u - np.eye(u.shape[1])), 1, m, dtype, (m, n, full, "U"))
            ratio(norm(vh @ vh.conj().T - np.eye(len(vh))), 1, n, dtype, (m, n, full, "V"))
        np.testing.assert_array_equal(x.gather(), a)
    a = random((30, 30), dtype, rng)
    s, lower = a + a.conj().T, np.tril(a + a.conj().T) + np.triu(np.full_like(a, np.nan), 1)
    x = pla.distribute(lower, grid, Layout(None, None))
    w, v = (each.gather() for each in linalg.eigh(x))
    ratio(norm(s @ v - v * w), norm(s), 30, dtype, "eigh")
    ratio(norm(v.conj().T @ v - np.eye(30)), 1, 30, dtype, "orthogonality")
    ratio(np.abs(linalg.eigvalsh(x).gather() - w).max(), norm(s), 30, dtype, "values alone")
    np.testing.assert_array_equal(x.gather(), lower)
    monkeypatch.setattr(kernels, "COUNTED", 8 * 30**2)  # of which 32 bits, so to say, do not suffice
    monkeypatch.setattr(kernels, "lapack", lambda *_: pytest.fail("SciPy's LAPACK was called"))
    same(linalg.eigh(x).eigenvalues, w, 30 * eps(dtype))
    same(linalg.svd(pla.distribute(s, grid, Layout(None, None))).S, np.sort(np.abs(w))[::-1], 30 * eps(dtype))


def test_eigh(grid):
    for name, a, layout, _ in cases(grid, 1):
        n, dtype = len(a), a.dtype
        s = (a + a.conj().T) / 2
        x = pla.distribute(np.tril(s), grid, layout)  # the lower triangle is enough
        values, vectors = linalg.eigh(x)
        assert vectors.layout == x.layout
        w, v = values.gather(), vectors.gather()
        assert w.dtype == a.real.dtype
        assert (np.diff(w) >= 0).all()
        ratio(norm(s @ v - v * w), norm(s), n, dtype, (name, n, dtype))
        ratio(norm(v.conj().T @ v - np.eye(n)), 1, n, dtype, (name, n, dtype, "orthogonality"))
        others = linalg.eigvalsh(x).gather()
        ratio(np.abs(others - w).max(initial=0), norm(s), n, dtype, (name, "values alone"))


def pencil(n, dtype, stacks=(), seed=2):
    """A Hermitian matrix and a positive definite one, or stacks of them."""
    rng = np.random.default_rng(seed)
    a, b = (random((*stacks, n, n), dtype, rng) for _ in range(2))
    a, b = a + a.conj().swapaxes(-1, -2), b @ b.conj().swapaxes(-1, -2) / max(1, n) + np.eye(n, dtype=dtype)
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigh_of_two_matrices(grid, dtype):
    """As SciPy finds them: A v = w B v, of which lower triangles are read, and vectors that B makes orthonormal."""
    every = layouts(grid.axes, 2, partial=False)
    for n in (0, 1, 5, 37):
        a, b = pencil(n, dtype)
        x, y = (
            pla.distribute(np.where(np.tri(n, dtype=bool), each, np.nan), grid, every[(n + 3 * i) % len(every)])
            for i, each in enumerate((a if a.dtype.kind == "f" else (a + 2j * np.eye(n)).astype(dtype), b))
        )
        w, v = linalg.eigh(x, y)
        assert v.layout == x.layout
        assert (w.dtype, v.dtype) == (a.real.dtype, a.dtype)
        values, vectors = w.gather(), v.gather()
        rest = a @ vectors - b @ vectors * values
        ratio(norm(rest), norm(a) + norm(b) * np.abs(values).max(initial=0), n, dtype, "residual")
        ratio(norm(vectors.conj().T @ b @ vectors - np.eye(n)), 1, n, dtype, "orthogonality")
        want = scipy.linalg.eigh(a, b, eigvals_only=True) if n else np.zeros(0, a.real.dtype)
        same(w, want, 100 * n * eps(dtype))
        same(linalg.eigvalsh(x, b=y), want, 100 * n * eps(dtype))
        if n > 1:
            same(linalg.eigvalsh(x, y, subset_by_index=(1, n - 2)), want[1 : n - 1], 100 * n * eps(dtype))
            some = linalg.eigh(x, y, subset_by_value=(float(want[1]) - 1e-3, float(want[3]) + 1e-3))
            same(some.eigenvalues, want[1:4], 100 * n * eps(dtype))
            assert some.eigenvectors.shape == (n, 3)
            ratio(norm(a @ some[1].gather() - b @ some[1].gather() * want[1:4]), norm(a), n, dtype, "some")


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_eigenvalues_of_two_matrices_beyond_the_range(grid, lead):
    """The error names the cause, and whether it is A; what lies above the diagonals is not read."""
    n = 5
    above = np.where(np.tri(n, dtype=bool), 0, np.nan)
    a, b = np.broadcast_to(1e300 * (np.ones((n, n)) + np.eye(n)), (*lead, n, n)) + above, 1e-300 * np.eye(n)
    rows = Layout(*[None] * len(lead), grid.axes[0], None)
    x, y = pla.distribute(a, grid, rows), pla.distribute(np.broadcast_to(b, a.shape) + above, grid, rows)
    odd = pla.distribute(np.where(np.eye(n, dtype=bool), np.nan, a), grid, rows)
    for function in (linalg.eigh, linalg.eigvalsh):
        with pytest.raises(np.linalg.LinAlgError, match="eigenvalues w of a v = w b v are beyond the largest number"):
            function(x, y)
        with pytest.raises(np.linalg.LinAlgError, match="eigenvalues w of a v = w b v are beyond the largest number"):
            function(pla.Tensor(x), pla.Tensor(y))
        with pytest.raises(ValueError, match="takes finite numbers; a has NaNs or infinities"):
            function(odd, y)


def test_eigh_of_two_matrices_of_unlike_precision(grid):
    """Both are taken to the precision of the result."""
    a, b = pencil(7, float)
    for p, q in ((a, b.astype("float32")), (np.rint(a).astype(int), b.astype("float32")), (a, b.astype("complex64"))):
        x, y = (pla.distribute(each, grid, grid.default_layout(a.shape)) for each in (p, q))
        want = scipy.linalg.eigh(p.astype(float), q.astype(np.result_type(q, float)), eigvals_only=True)
        for w in (linalg.eigh(x, y).eigenvalues, linalg.eigvalsh(x, y)):
            same(w, want, 1e-13)


@pytest.mark.parametrize("count", [2, 13])
def test_eigh_of_stacks_of_two_matrices(grid, count):
    a, b = pencil(4, complex, (count,))
    x, y = (pla.distribute(each, grid, layouts(grid.axes, 3, partial=False)[1]) for each in (a, b))
    for p, q, u, v in ((x, y, a, b), (x, y[0], a, [b[0]] * count), (x[1], y, [a[1]] * count, b)):
        want = np.stack([scipy.linalg.eigh(*each, eigvals_only=True) for each in zip(u, v, strict=True)])
        w, z = linalg.eigh(p, q)
        same(w, want, 1e-12)
        same(linalg.eigvalsh(p, q), want, 1e-12)
        np.testing.assert_allclose((p @ z).gather(), ((q @ z) * w[..., None, :]).gather(), atol=1e-11)


def test_wrong_pairs_of_matrices(grid):
    a, b = pencil(9, float)
    x = pla.distribute(a, grid, grid.default_layout(a.shape))
    b[4, 4] = -1
    y = pla.distribute(b, grid, grid.default_layout(a.shape))
    wrong = r"{} takes a positive definite b: .*leading minor of order 5 is not"
    for function in (linalg.eigh, linalg.eigvalsh):
        name = function.__name__
        with pytest.raises(np.linalg.LinAlgError, match=wrong.format(name)):
            function(x, y)
        for count in (2, 13):
            stack = pla.stack([pla.eye(9, grid=grid)] * (count - 1) + [y])
            with pytest.raises(np.linalg.LinAlgError, match=rf"matrix \({count - 1},\): .*minor of order 5 is not"):
                function(x, stack)
        with pytest.raises(np.linalg.LinAlgError, match=rf"{name} takes matrices a and b of one size, not of shapes"):
            function(x, y[:4, :4])
        with pytest.raises(ValueError, match=f"{name} takes finite numbers; b has NaNs or infinities"):
            function(x, y * np.nan)
        with pytest.raises(TypeError, match="takes DistArrays, not ndarray"):
            function(x, b)


@pytest.mark.parametrize(
    "shape_of",
    [lambda n: (n, n), lambda n: (n + 3, n), lambda n: (n, 2 * n + 1), lambda n: (4, n), lambda n: (12 * n, n)],
)
@pytest.mark.parametrize("full", [True, False])
def test_svd(grid, shape_of, full):
    for name, a, layout, rng in cases(grid, 2, (0, 1, 2, 7, 25)):
        shape, dtype = shape_of(len(a)), a.dtype
        if shape != a.shape:
            if name != "random":
                continue
            a = random(shape, dtype, rng)
        (m, n), k = a.shape, min(a.shape)
        x = pla.distribute(a, grid, layout)
        found = linalg.svd(x, full_matrices=full)
        assert found.U.layout == found.Vh.layout == x.layout
        u, s, vh = (f.gather() for f in found)
        assert u.shape == (m, m if full else k)
        assert vh.shape == (n if full else k, n)
        assert (np.diff(s) <= 0).all()
        most = max(m, n, 1)
        ratio(norm((u[:, :k] * s) @ vh[:k] - a), norm(a), most, dtype, (name, shape, dtype))
        ratio(norm(u.conj().T @ u - np.eye(u.shape[1])), 1, most, dtype, (name, shape, dtype, "U"))
        ratio(norm(vh @ vh.conj().T - np.eye(len(vh))), 1, most, dtype, (name, shape, dtype, "V"))
        ratio(np.abs(linalg.svdvals(x).gather() - s).max(initial=0), norm(a), most, dtype, (name, "values alone"))


@pytest.mark.parametrize(
    "shape_of",
    [lambda n: (n, n), lambda n: (n + 3, n), lambda n: (n, n + 5), lambda n: (2 * n + 1, n), lambda n: (n, 12 * n)],
    ids=["square", "higher", "wider", "tall", "wide"],
)
def test_pinv(grid, shape_of):
    """By the conditions of Penrose, of matrices of full and of lower rank."""
    for name, a, layout, rng in cases(grid, 21, (0, 1, 2, 7, 33, 97)):
        shape, dtype = shape_of(len(a)), a.dtype
        if shape != a.shape:
            if name != "random":
                continue
            a = random(shape, dtype, rng)
        lower = a.copy()
        lower[:, shape[1] // 2 :] = a[:, :1]
        for each in (a, lower) if min(shape) > 2 else (a,):
            x = pla.distribute(each, grid, layout)
            found = linalg.pinv(x)
            assert found.layout == x.mT.layout
            p, most = found.gather(), max(1, *shape)
            assert (p.shape, p.dtype) == (shape[::-1], dtype)
            product = norm(each) * norm(p)
            ratio(norm(each @ p @ each - each), norm(each) * product, most, dtype, (name, shape, dtype, "A P A"))
            ratio(norm(p @ each @ p - p), norm(p) * product, most, dtype, (name, shape, dtype, "P A P"))
            for square in (each @ p, p @ each):
                ratio(norm(square - square.conj().T), product, most, dtype, (name, shape, dtype, "Hermitian"))
            np.testing.assert_array_equal(x.gather(), each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 70), (66, 90), (97, 40)], ids=str)
def test_pinv_near_the_ends_of_the_range(grid, shape, dtype):
    limits, a = np.finfo(dtype), random(shape, dtype, np.random.default_rng(22))
    a /= np.abs(a).max()
    for unit in (2.0 ** (limits.maxexp - 12), 2.0 ** (limits.minexp + 12)):
        x = pla.distribute(a * a.real.dtype.type(unit), grid, grid.default_layout(shape))
        p = linalg.pinv(x).gather().astype(np.result_type(dtype, np.float64)) * unit
        wide = a.astype(p.dtype)
        ratio(norm(wide @ p @ wide - wide), norm(a) ** 2 * norm(p), max(shape), dtype, unit)
        assert not linalg.pinv(x, rtol=2.0).gather().any()


@pytest.mark.parametrize("shape", [(30, 30), (170, 20), (20, 170), (60, 20), (25, 20)], ids=str)
def test_all_ranks_have_the_same_bits(grid, shape):
    """Of values and vectors that one rank finds, or all together: each rank has all of them."""
    a = np.random.default_rng(8).standard_normal(shape)
    x = pla.distribute(a, grid, Layout(None, None))
    small, given = pla.distribute(a, grid, Layout(None, None)), pla.distribute(a, grid, grid.default_layout(shape))
    for found in (linalg.svd(x, full_matrices=False), (linalg.svdvals(small),), (linalg.svdvals(given),)):
        told = grid.world.share([zlib.crc32(each.gather().tobytes()) for each in found])
        assert told.count(told[0]) == len(told)


@pytest.mark.parametrize("dtype", DTYPES)
def test_svd_by_the_polar_decomposition_near_overflow(grid, dtype):
    """Sums that are twice the largest singular value do not leave the range."""
    largest = np.finfo(dtype).max
    for shape in ((7, 7), (12, 4)):
        q = np.linalg.qr(random(shape, dtype, np.random.default_rng(2)))[0]
        x = pla.distribute((q * (largest / 1.5)).astype(dtype), grid, grid.default_layout(shape))
        s = singular.polar_svd(x, False).S
        np.testing.assert_allclose(s.gather() / (largest / 1.5), 1, atol=100 * eps(dtype))


@pytest.mark.parametrize("full", [True, False])
def test_svd_by_the_polar_decomposition(grid, full):
    """The way of several GPUs, on any grid and backend; a matrix whose polar factor is not unique may go another."""
    found = 0
    for name, a, layout, rng in cases(grid, 12, (1, 7, 25)):
        for shape in (a.shape, (len(a) + 3, len(a)), (3 * len(a), len(a))):
            if shape != a.shape:
                a = random(shape, a.dtype, rng)
            (m, n), dtype = shape, a.dtype
            x = pla.distribute(a, grid, layout)
            parts = singular.polar_svd(x, full)
            assert parts is not None or name not in ("random", "geometric", "arithmetic", "clustered")
            if parts is None:
                continue
            found += 1
            assert parts.U.layout == parts.Vh.layout == x.layout
            u, s, vh = (f.gather() for f in parts)
            assert u.shape == (m, m if full else n)
            assert (np.diff(s) <= 0).all()
            assert (s >= 0).all()
            ratio(norm((u[:, :n] * s) @ vh - a), norm(a), m, dtype, (name, shape, dtype))
            ratio(norm(u.conj().T @ u - np.eye(u.shape[1])), 1, m, dtype, (name, shape, dtype, "U"))
            ratio(norm(vh @ vh.conj().T - np.eye(n)), 1, m, dtype, (name, shape, dtype, "V"))
            ratio(np.abs(np.linalg.svd(a, compute_uv=False) - s).max(), norm(a), m, dtype, (name, "values"))
    assert found


def test_the_polar_factor_of_a_singular_matrix(grid):
    """Of columns of zeros nothing orthonormal is made, and `svd` goes the other way."""
    a = np.random.default_rng(13).standard_normal((9, 9))
    a[:, 4:] = 0
    x = pla.distribute(a, grid, grid.default_layout(a.shape))
    assert singular.polar_svd(x, True) is None
    u, s, vh = (f.gather() for f in linalg.svd(x))
    ratio(norm((u * s) @ vh - a), norm(a), 9, a.dtype, "singular")
    ratio(norm(u.T @ u - np.eye(9)), 1, 9, a.dtype, "singular, U")


@pytest.mark.parametrize("stacks", [(1,), (3, 4), (0,)])
def test_stacks(grid, stacks):
    a = np.random.default_rng(3).standard_normal((*stacks, 5, 4))
    s = a.swapaxes(-1, -2) @ a
    for layout in (grid.default_layout(a.shape), Layout(*[None] * a.ndim)):
        x, y = (pla.distribute(v, grid, layout) for v in (a, s))
        same(linalg.svdvals(x), np.linalg.svd(a, compute_uv=False), 1e-12)
        same(linalg.eigvalsh(y), np.linalg.eigvalsh(s), 1e-12)
        u, w, vh = linalg.svd(x, full_matrices=False)
        np.testing.assert_allclose(((u * w[..., None, :]) @ vh).gather(), a, atol=1e-12)
        same(linalg.pinv(x), np.linalg.pinv(a), 1e-11)
        np.testing.assert_array_equal(linalg.matrix_rank(x).gather(), np.linalg.matrix_rank(a))
        same(linalg.matrix_norm(x, ord="nuc"), np.linalg.norm(a, "nuc", axis=(-2, -1)), 1e-12)


def test_what_follows(grid):
    rng = np.random.default_rng(4)
    for m, n in ((9, 5), (5, 9), (6, 6), (40, 7)):
        a, b = rng.standard_normal((m, n)), rng.standard_normal((m, 3))
        a[:, -1] = a[:, 0] if m == 9 else a[:, -1]  # of rank 4
        x, y = pla.distribute(a, grid, grid.default_layout(a.shape)), pla.distribute(b, grid, Layout(None, None))
        same(np.linalg.pinv(x), np.linalg.pinv(a), 1e-10)
        assert int(np.linalg.matrix_rank(x)) == np.linalg.matrix_rank(a)
        for sides, given in ((y, b), (y[:, 0], b[:, 0])):
            got, want = np.linalg.lstsq(x, sides), np.linalg.lstsq(a, given)
            same(got[0], want[0], 1e-10)
            np.testing.assert_allclose(got[1].gather(), want[1], atol=1e-10)
            assert got[2] == want[2]
            same(got[3], want[3], 1e-12)
        for order in (2, -2, "nuc"):
            same(np.linalg.norm(x, order), np.asarray(np.linalg.norm(a, order)), 1e-12)
            same(
                np.linalg.norm(x, order, axis=(1, 0), keepdims=True),
                np.linalg.norm(a, order, axis=(1, 0), keepdims=True), 1e-12,
            )  # fmt: skip
        if m == n:
            for order in (None, 1, -2, "fro"):
                assert abs(float(np.linalg.cond(x, order)) / np.linalg.cond(a, order) - 1) < 1e-10
            same(np.linalg.eigvalsh(x, "U"), np.linalg.eigvalsh(a, "U"), 1e-11)
            same(linalg.matrix_power(x, -2), np.linalg.matrix_power(a, -2), 1e-7)


@pytest.mark.parametrize("name", ["eigh", "eigvalsh", "svd", "svdvals", "pinv", "matrix_rank"])
def test_odd_numbers(grid, name):
    a = np.eye(9)
    a[-1, 0] = np.nan
    with pytest.raises(ValueError, match="finite numbers; the array has NaNs or infinities"):
        getattr(linalg, name)(pla.distribute(a, grid, grid.default_layout(a.shape)))
    tall = pla.distribute(np.full((19, 3), np.nan), grid, grid.default_layout((19, 3)))
    if not name.startswith("eig"):
        by = name if name == "svdvals" else "svdvals" if name == "matrix_rank" else "svd"
        with pytest.raises(ValueError, match=f"^{by} takes finite numbers"):
            getattr(linalg, name)(tall)
    else:
        with pytest.raises(np.linalg.LinAlgError, match="square matrices"):
            getattr(linalg, name)(pla.ones((3, 4), grid))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lower_triangles(grid, dtype):
    """What is above the diagonal is not read."""
    rng = np.random.default_rng(11)
    a = random((150, 150), dtype, rng)
    a = a + a.conj().T + 80 * np.eye(150, dtype=dtype)
    given = np.where(np.tri(150, dtype=bool), a, np.nan).astype(dtype)
    for every in (given, np.stack([given] * grid.size)):
        x = pla.distribute(every, grid, grid.default_layout(every.shape))
        w, z = linalg.eigh(x)
        rest = a @ z.gather() - z.gather() * w.gather()[..., None, :]
        ratio(norm(rest.reshape(-1, 150)), norm(a) * grid.size, 150, dtype, "eigh")
        same(linalg.eigvalsh(x), w.gather(), 150 * eps(dtype))
        factor = linalg.cholesky(x).gather()
        assert np.array_equal(factor, np.tril(factor))
        ratio(norm((a - factor @ factor.conj().mT).reshape(-1, 150)), norm(a) * grid.size, 150, dtype, "cholesky")


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (4, 6)], ids=str)
def test_each_element_has_one_rank(shape):
    deal = Deal({"r": shape[0], "c": shape[1]}, 4)
    for n in (0, 1, 3, 29, 64):
        times = np.zeros((n, n), int)
        for same_class, places in parts(deal, n, deal.R * deal.C + 1):
            for rows, columns in places:
                at = np.ix_(rows, columns)
                times[at] += np.tri(*times[at].shape, dtype=int) if same_class else 1
        np.testing.assert_array_equal(np.tril(times) + np.triu(times, 1).T, np.tri(n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_subnormal_numbers(grid, dtype):
    """They are scaled by a power of two that is in range itself, and have the values that their digits allow."""
    if not grid.backend.cpu:  # on GPUs their libraries decide
        return
    real = np.zeros(0, dtype).real.dtype
    unit = 1000 * np.finfo(dtype).smallest_subnormal

    def placed(a):
        """Return an array of whole multiples of the least number, and its values beside `unit`."""
        found = pla.distribute((a.view(real) * unit).view(dtype), grid, grid.default_layout(a.shape))
        return found, (found.gather().view(real) / unit).view(dtype)

    x, exact = placed(random((12, 7), dtype, np.random.default_rng(3)))
    want = np.linalg.svd(exact, compute_uv=False)
    for values in (linalg.svdvals(x), linalg.svd(x, full_matrices=False)[1]):
        np.testing.assert_allclose(values.gather() / unit, want, rtol=0, atol=1e-2)
    s, exact = placed(exact.conj().T @ exact / 20)
    want = np.linalg.eigvalsh(exact)
    for values in (linalg.eigvalsh(s), linalg.eigh(s)[0]):
        np.testing.assert_allclose(values.gather() / unit, want, rtol=0, atol=1e-2)
    assert int(linalg.lstsq(x, x[:, 0])[2]) == 7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_that_are_nearly_equal_in_both_halves(grid, dtype):
    """Wilkinson's matrices with small numbers between them: divide and conquer turns vectors into each other."""
    n = 147
    a = np.diag(np.tile(abs(np.arange(21) - 10.0), 7)) + np.eye(n, k=1) + np.eye(n, k=-1)
    for k in range(21, n, 21):
        a[k - 1, k] = a[k, k - 1] = 100 * eps(dtype)
    a = a.astype(dtype)
    x = pla.distribute(a, grid, Layout(grid.axes, None))
    (w, v), (u, s, vh) = ((y.gather() for y in found) for found in (linalg.eigh(x), linalg.svd(x)))
    unit, size = n * eps(dtype), norm(a)
    for left, values, right in ((v, w, v.T), (u, s, vh)):
        assert norm((left * values) @ right - a) < BOUND * unit * size
        assert norm(left.T @ left - np.eye(n)) < BOUND * unit
        assert norm(right @ right.T - np.eye(n)) < BOUND * unit


@pytest.mark.parametrize("routine", ["eigvalsh", "svdvals", "lstsq"])
def test_iterations_that_do_not_converge_are_errors_on_all_ranks(world, backend, routine, monkeypatch):
    """Ranks outside of the grid included, which have no values."""
    grid = pla.Grid({"a": max(1, world.size - 1)}, world, backend, idle=True)
    if grid.size == 1:  # whose values NumPy's LAPACK finds
        return
    monkeypatch.setattr(singular, "svd_by_one", lambda *args, **options: False)
    monkeypatch.setattr(kernels, "call", lambda *args: 1)
    monkeypatch.setattr(kernels, "lapack", lambda *args: lambda d, e: (d, 1))
    a = pla.distribute(np.diag(np.arange(1.0, 8)), grid, Layout("a", None))
    with pytest.raises(np.linalg.LinAlgError, match="did not converge"):
        linalg.lstsq(a, a) if routine == "lstsq" else getattr(linalg, routine)(a)


@pytest.mark.parametrize("shape", [(7, 7), (90, 7), (7, 90), (20, 7)], ids=str)
@pytest.mark.parametrize("routine", ["svd", "svdvals", "pinv", "matrix_rank", "lstsq"])
def test_what_the_first_rank_does_not_find_is_an_error_on_all_ranks(world, backend, routine, shape, monkeypatch):
    """Of `lstsq` all ranks find what one does not."""

    def failing(*args, **options):
        raise np.linalg.LinAlgError("SVD did not converge")

    grid = pla.Grid({"a": max(1, world.size - 1)}, world, backend, idle=True)
    if grid.size == 1 or not grid.backend.cpu:
        return
    monkeypatch.setattr(singular, "svd_by_one", lambda *args, **options: True)
    for name in ("svd", "small_svd"):
        monkeypatch.setattr(kernels, name, failing)
    a = pla.distribute(np.random.default_rng(0).standard_normal(shape), grid, Layout("a", None))
    with pytest.raises(np.linalg.LinAlgError, match="did not converge"):
        linalg.lstsq(a, a[:, 0]) if routine == "lstsq" else getattr(linalg, routine)(a)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_values_beyond_the_largest_number(grid, dtype):
    """A matrix whose elements are in range may have an eigenvalue that is not: it is infinite, as LAPACK's."""
    a = np.full((9, 9), 0.9 * np.finfo(dtype).max, dtype)
    A = pla.distribute(a, grid, grid.default_layout(a.shape))
    for function in (linalg.eigvalsh, lambda x: linalg.eigh(x)[0], linalg.svdvals, lambda x: linalg.svd(x)[1]):
        values = np.sort(function(A).gather())
        assert values[-1] == np.inf
        assert np.abs(values[:-1]).max() < 100 * eps(dtype) * np.finfo(dtype).max


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_reflections_in_memory_that_ranks_share(make_grid, monkeypatch, dtype):
    """Ranks with a core each: those of a grid row have them once, and the next factorization gets that memory."""
    monkeypatch.setattr(pla.Grid, "cores", 4)
    monkeypatch.setattr(tunables, "SHARED_BYTES", 1)
    grid, rng, n = make_grid({"r": 2, "c": 2}), np.random.default_rng(11), 400
    for m in (n, n + 30):
        a = random((m, n), np.dtype(dtype), rng)
        x = pla.distribute(a, grid, Layout("r", "c"))
        u, s, vh = linalg.svd(x, full_matrices=False)
        np.testing.assert_allclose(u.gather() * s.gather() @ vh.gather(), a, atol=1e-11)
        b = random((m, n), np.dtype(dtype), rng)
        first, second = linalg.qr_factor(x), linalg.qr_factor(pla.distribute(b, grid, Layout("r", "c")))
        for factor, given in ((first, a), (second, b)):
            np.testing.assert_allclose(factor.Q().gather() @ factor.R.gather(), given, atol=1e-11)
    h = a[:n] + a[:n].conj().T
    w, v = linalg.eigh(pla.distribute(h, grid, Layout("r", "c")))
    np.testing.assert_allclose(v.gather() * w.gather() @ v.gather().conj().T, h, atol=1e-11)
