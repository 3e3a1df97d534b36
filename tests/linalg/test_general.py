"""General eigenvalues and functions of matrices on every grid: residuals, and SciPy's answers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.linalg

import parlinalg as pla
from parlinalg import linalg
from parlinalg.layout import Layout
from parlinalg.linalg import kernels, planner, singular
from parlinalg.linalg.reductions.hessenberg import schur_form
from tests.cases import grids, layouts, same
from tests.linalg.test_factors import DTYPES, eps, norm, random
from tests.linalg.test_spectral import cases, ratio

pytestmark = pytest.mark.one_in(10)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def test_eig(grid):
    """LAPACK's ratio for a general matrix: |A V - V W| / (n eps |A|), the columns of V having norm 1."""
    for name, a, layout, _ in cases(grid, 11):
        n, dtype = len(a), a.dtype
        x = pla.distribute(a, grid, layout)
        values, vectors = linalg.eig(x)
        assert vectors.layout == x.layout
        w, v = values.gather(), vectors.gather()
        assert w.dtype == v.dtype == np.result_type(dtype, np.complex64)
        np.testing.assert_allclose(np.linalg.norm(v, axis=0), 1, atol=20 * eps(dtype))
        ratio(norm(a @ v - v * w), norm(a), n, dtype, (name, n, dtype))
        if dtype.kind != "c":  # pairs are exact
            assert sorted(w.tolist(), key=_key) == sorted(w.conj().tolist(), key=_key)
        assert abs(w.sum() - np.trace(a)) <= 10 * max(n, 1) * eps(dtype) * max(norm(a), 1e-300), (name, n, dtype)


def _key(z):
    return z.real, z.imag


def test_eigenvalues_alone(grid):
    rng = np.random.default_rng(12)
    for n, dtype in ((0, "float64"), (1, "complex64"), (2, "float32"), (37, "float64"), (65, "complex128")):
        a = random((n, n), dtype, rng)
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        got, want = linalg.eigvals(x).gather(), linalg.eig(x).eigenvalues.gather()
        assert got.dtype == np.result_type(dtype, np.complex64)
        worst = max((abs(got - z).min() for z in want), default=0)
        assert worst <= 1e5 * eps(dtype) * norm(a), (n, dtype, worst)


def test_isolated_eigenvalues_are_exact(grid):
    """Rows and columns that balancing isolates give the elements of the diagonal themselves."""
    rng = np.random.default_rng(13)
    n = 41
    lower = np.tril(rng.integers(-3, 4, (n, n))).astype(float)
    order = rng.permutation(n)
    for a in (lower, lower.T, lower[order][:, order], np.diag(np.arange(n))):
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        w = linalg.eigvals(x).gather()
        np.testing.assert_array_equal(np.sort(w.real), np.sort(np.diag(a)))
        assert not w.imag.any()
    block = np.kron(np.eye(3), [[0.0, 2.0], [-2.0, 0.0]])
    w = linalg.eigvals(pla.distribute(block, grid, Layout(None, None))).gather()
    np.testing.assert_allclose(np.sort(w.imag), [-2, -2, -2, 2, 2, 2], atol=1e-14)


def test_balancing(grid):
    """A badly scaled matrix keeps the eigenvalues of the one that it was made of."""
    rng = np.random.default_rng(14)
    a = rng.standard_normal((30, 30))
    powers = 2.0 ** rng.integers(-40, 40, 30)
    x = pla.distribute(a * powers[:, None] / powers, grid, grid.default_layout(a.shape))
    got, want = linalg.eigvals(x).gather(), np.linalg.eigvals(a)
    assert max(abs(got - z).min() for z in want) < 1e-11


def test_schur_forms(grid):
    """|A - Z T Zᴴ| / (n eps |A|) and |ZᴴZ - 1| / (n eps), as LAPACK's; T has blocks of two rows at the most."""
    for name, a, layout, _ in cases(grid, 16):
        n, dtype = len(a), a.dtype
        x = pla.distribute(a, grid, layout)
        for output in ("real", "complex"):
            found = linalg.schur(x, output)
            assert found.T.layout == found.Z.layout == x.layout
            t, z = found.T.gather(), found.Z.gather()
            assert t.dtype == z.dtype == (dtype if output == "real" else np.result_type(dtype, np.complex64))
            assert not np.tril(t, -2).any()
            below = np.diag(t, -1)
            assert not (below if t.dtype.kind == "c" else below[1:] * below[:-1]).any()
            ratio(norm(z @ t @ z.conj().T - a), norm(a), n, dtype, (name, n, dtype))
            ratio(norm(z.conj().T @ z - np.eye(n)), 1, n, dtype, (name, n, dtype, "Z"))


def test_hessenberg_forms(grid):
    for name, a, layout, _ in cases(grid, 17):
        n, dtype = len(a), a.dtype
        x = pla.distribute(a, grid, layout)
        found = linalg.hessenberg(x, calc_q=True)
        h, q = found.H.gather(), found.Q.gather()
        assert found.H.layout == found.Q.layout == x.layout
        assert h.dtype == q.dtype == dtype
        assert not np.tril(h, -2).any()
        ratio(norm(q @ h @ q.conj().T - a), norm(a), n, dtype, (name, n, dtype))
        ratio(norm(q.conj().T @ q - np.eye(n)), 1, n, dtype, (name, n, dtype, "Q"))
        same(linalg.hessenberg(x), h, 0)
        np.testing.assert_array_equal(x.gather(), a)  # not overwritten


@pytest.mark.serial
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [3, 4, 12, 49, 80, 150])
def test_elements_below_a_hessenberg_form_are_not_read(n, dtype):
    """The lower left quarter is not moved to the rank that finds the Schur form: LAPACK does without it."""
    h = np.triu(random((n, n), dtype, np.random.default_rng(3)), -1)
    given = h.copy()
    given[n // 2 + 1 :, : n // 2] = np.nan
    for vectors in (True, False):
        t, z, values, failed = schur_form(np.asfortranarray(h), vectors)
        *found, info = schur_form(np.asfortranarray(given), vectors)
        assert failed == info == 0
        assert np.array_equal(found[2], values)
        if vectors:
            assert np.array_equal(found[0], t)
            assert np.array_equal(found[1], z)


@pytest.mark.parametrize("stacks", [(1,), (3, 4), (0,)])
def test_stacks(grid, stacks):
    rng = np.random.default_rng(15)
    a = rng.standard_normal((*stacks, 5, 5))
    s = a @ a.swapaxes(-1, -2) + np.eye(5)
    for layout in (grid.default_layout(a.shape), Layout(*[None] * a.ndim)):
        x, y = (pla.distribute(v, grid, layout) for v in (a, s))
        w, v = (f.gather() for f in linalg.eig(x))
        assert w.dtype == v.dtype == np.complex128
        np.testing.assert_allclose(a @ v, v * w[..., None, :], atol=1e-12)
        assert linalg.eigvals(x).shape == w.shape
        for output in ("real", "complex"):
            t, z = (f.gather() for f in linalg.schur(x, output))
            np.testing.assert_allclose(z @ t @ z.conj().swapaxes(-1, -2), a, atol=1e-12)
        h, q = (f.gather() for f in linalg.hessenberg(x, calc_q=True))
        np.testing.assert_allclose(q @ h @ q.swapaxes(-1, -2), a, atol=1e-12)
        same(linalg.hessenberg(x), h, 1e-14)
        same(linalg.expm(x), scipy.linalg.expm(a), 1e-12)
        root = linalg.sqrtm(y)
        np.testing.assert_allclose((root @ root).gather(), s, atol=1e-12)
        for side in ("right", "left"):
            u, p = (f.gather() for f in linalg.polar(x, side))
            np.testing.assert_allclose(u @ p if side == "right" else p @ u, a, atol=1e-12)
        same(linalg.eigvalsh(y, subset_by_index=(1, 3)), np.linalg.eigvalsh(s)[..., 1:4], 1e-12)
        assert linalg.eigh(y, subset_by_index=(1, 3)).eigenvectors.shape == (*stacks, 5, 3)


def test_numpys_names(grid):
    a = np.array([[2.0, 1.0], [1.0, 3.0]])
    x = pla.distribute(a, grid, Layout(None, None))
    found = np.linalg.eig(x)
    assert found.eigenvalues.dtype == np.complex128
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(x).gather().real), np.linalg.eigvalsh(a))
    whole = pla.distribute(np.array([[0, 1], [0, 0]]), grid, Layout(None, None))
    same(linalg.expm(whole), np.array([[1.0, 1.0], [0.0, 1.0]]))


def test_subsets(grid):
    rng = np.random.default_rng(16)
    every = layouts(grid.axes, 2, partial=False)
    for n in (1, 70):
        a = random((n, n), "complex128", rng)
        a = a + a.conj().T
        x = pla.distribute(a, grid, every[rng.integers(len(every))])
        w = np.linalg.eigvalsh(a)
        middle = n // 2
        for keys, at in (
            ({"subset_by_index": (0, 0)}, slice(0, 1)),
            ({"subset_by_index": (middle, n - 1)}, slice(middle, n)),
            ({"subset_by_value": (w[0] - 1, w[middle] + 1e-9)}, slice(0, middle + 1)),
            ({"subset_by_value": (w[-1] + 1, np.inf)}, slice(n, n)),
        ):
            found, v = linalg.eigh(x, **keys)
            assert v.layout == x.layout
            same(found, w[at], 1e-12)
            same(linalg.eigvalsh(x, **keys), w[at], 1e-12)
            z = v.gather()
            assert z.shape == (n, len(w[at]))
            np.testing.assert_allclose(a @ z, z * w[at], atol=1e-12 * n)
            np.testing.assert_allclose(z.conj().T @ z, np.eye(len(w[at])), atol=1e-13 * n)
    with pytest.raises(ValueError, match=r"with 0 <= first <= last < 70, not \(3, 70\)"):
        linalg.eigh(x, subset_by_index=(3, 70))
    with pytest.raises(ValueError, match=r"subset_by_value is \(low, high\) with low < high, not \(2, 1\)"):
        linalg.eigvalsh(x, subset_by_value=(2, 1))
    for given in (3, (1, 2, 3), ("a", "b")):
        with pytest.raises(ValueError, match=r"subset_by_index is .first, last., whole numbers"):
            linalg.eigh(x, subset_by_index=given)
        with pytest.raises(ValueError, match=r"subset_by_value is .low, high. with low < high, not"):
            linalg.eigh(x, subset_by_value=given)
    with pytest.raises(ValueError, match="not both"):
        linalg.eigh(x, subset_by_index=(0, 1), subset_by_value=(0, 1))


def test_expm(grid):
    """SciPy's answers, for norms that lead to every degree and to squaring, and where |A| and A differ much."""
    rng = np.random.default_rng(17 + grid.size)
    every = layouts(grid.axes, 2, partial=False)
    for n in (0, 1, 7, 33):
        for dtype in DTYPES if grid.size == 1 else DTYPES[1::2]:
            for size in (0, 1e-3, 0.1, 0.5, 1, 4, 30):
                if n > 1 and rng.random() < 1 - 0.25 / grid.size:
                    continue
                a = random((n, n), dtype, rng)
                a *= size / max(norm(a), 1e-30)
                x = pla.distribute(a.astype(dtype), grid, every[rng.integers(len(every))])
                found = linalg.expm(x)
                assert found.layout == x.layout
                same(found, scipy.linalg.expm(a.astype(dtype)), 20 * max(n, 1) * max(1, size) * eps(dtype))
    a = np.array([[1.0, 1e6], [0, -1]])  # overscaling: the norm is large, those of its powers are not
    same(linalg.expm(pla.distribute(a, grid, Layout(None, None))), scipy.linalg.expm(a), 1e-12)


def precise_exponential(a):
    """The exponential of a matrix by its Taylor series, in long doubles."""
    kind = np.clongdouble if np.iscomplexobj(a) else np.longdouble
    squarings = max(0, int(np.ceil(np.log2(max(abs(a).sum(axis=0).max(), 1e-30)))) + 1)
    part = a.astype(kind) / kind(2) ** squarings
    term = found = np.eye(len(a), dtype=kind)
    for k in range(1, 30):
        term = term @ part / k
        found = found + term
    for _ in range(squarings):
        found = found @ found
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_expm_of_stacks_is_as_accurate_as_of_single_matrices(grid, dtype):
    """Of matrices of every degree and many squarings in one stack; ranks compute them alone, or all together."""
    rng, every = np.random.default_rng(5), layouts(grid.axes, 3, partial=False)
    for n, count in ((1, 3), (4, 24), (4, 1), (9, 12)):
        a = random((count, n, n), dtype, rng) * 10.0 ** rng.integers(-3, 2, (count, 1, 1))
        a[count // 2 :] *= abs(a[count // 2 :]).sum(axis=-1).max(axis=-1)[:, None, None] ** -0.5
        a[::5] = np.triu(a[::5], 1)
        a = a.astype(dtype)
        layout = every[rng.integers(len(every))]
        found = linalg.expm(pla.distribute(a, grid, layout))
        assert found.layout == layout
        assert found.dtype == dtype
        for one, x in zip(a, found.gather(), strict=True):
            want = precise_exponential(one)
            bound = 10 * eps(dtype) * max(1, abs(one).sum(axis=0).max())
            assert abs(x - want).max() <= bound * abs(want).max()


def test_expm_of_stacks_out_of_range(grid):
    """Powers of a matrix may overflow where its exponential does not; others of the stack do not suffer."""
    a = np.zeros((5, 3, 3))
    a[0] = [[0, 1e300, 0], [0, 0, 0], [0, 0, 0]]
    a[1] = np.diag([-1e200, -1.0, 0])
    a[2] = np.eye(3) * 1e-310
    a[3] = [[-1e160, 0, 0], [0, 1, 2], [0, -2, 1]]
    single = [linalg.expm(pla.distribute(x, grid, Layout(None, None))).gather() for x in a]
    many = np.concatenate([a] * grid.size)
    stack = linalg.expm(pla.distribute(many, grid, Layout(grid.axes, None, None))).gather()
    for x, y in zip(stack, single * grid.size, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-300)
    assert linalg.expm(pla.zeros((0, 3, 3), grid)).shape == (0, 3, 3)
    assert linalg.expm(pla.zeros((4, 0, 0), grid)).shape == (4, 0, 0)
    with pytest.raises(ValueError, match="expm takes finite numbers"):
        linalg.expm(pla.distribute(np.where(many == 1, np.nan, many), grid, Layout(None, None, None)))


def test_small_elements_of_exponentials_of_triangles(grid):
    """They are as accurate as large ones, beside which squares lose them: equal ones, near ones, and out of range."""
    a = np.array([[40.0, 3], [0, 40 + 1e-9]])
    (_, beside), _ = linalg.expm(pla.distribute(a, grid, Layout(None, None))).gather()
    assert abs(beside / (3 * np.exp(40.0) * (1 + 5e-10)) - 1) < 1e-13
    rng = np.random.default_rng(3 * grid.size)
    every = layouts(grid.axes, 2, partial=False)
    far = np.array([2.0, 1, 0.5, 1.5, -1, 0, 2, 1, -1e9])  # 28 squares
    diagonals = (np.array([30.0]), far, np.repeat([-40.0, 2, 2.001], 3))
    some = [every[i] for i in rng.permutation(len(every))[:4]]
    for diagonal, layout in itertools.product(diagonals, some):
        dtype = DTYPES[1::2][rng.integers(2)]
        a = np.triu(random((len(diagonal), len(diagonal)), dtype, rng))
        np.fill_diagonal(a, diagonal)
        a = a.T if rng.random() < 0.5 else a
        array, want = linalg.expm(pla.distribute(a, grid, layout)), scipy.linalg.expm(a)
        found = array.gather()
        many = pla.distribute(np.stack([a] * grid.size), grid, Layout(None, *layout.dims))
        same(linalg.expm(many)[-1], found, 1e-12)
        np.testing.assert_allclose(np.diag(found), np.exp(diagonal), rtol=4 * eps(dtype))
        half = np.minimum(abs(np.diff(diagonal)) / 2, 300)
        shares = np.where(half == 0, 1, np.sinh(half) / np.where(half == 0, 1, half))
        means = np.where(half < 300, (diagonal[1:] + diagonal[:-1]) / 2, -np.inf)
        for k in (-1, 1):
            apart = half < 300  # of others the exponential is 0, or nearly
            beside = np.diag(a, k) * np.exp(means) * shares
            np.testing.assert_allclose(np.diag(found, k)[apart], beside[apart], rtol=8 * eps(dtype))
        same(array, want, 1e-11)


def test_sqrtm(grid):
    for name, a, layout, _ in cases(grid, 18, (0, 1, 2, 7, 17)):
        n, dtype = len(a), a.dtype
        if n and name not in ("random", "clustered", "geometric", "near overflow"):
            continue
        hermitian = a @ a.conj().T
        b = hermitian / (norm(hermitian) or 1)
        for matrix in (a.astype(np.result_type(dtype, np.complex64)), b, b @ b + np.triu(b) + np.eye(n, dtype=dtype)):
            x = pla.distribute(matrix, grid, layout)
            root = linalg.sqrtm(x)
            assert root.layout == x.layout
            assert root.dtype == matrix.dtype
            r = root.gather()
            ratio(norm(r @ r - matrix), norm(r) ** 2, n, dtype, (name, n, dtype))
            assert (np.linalg.eigvals(r).real >= -1e3 * n * eps(dtype) * norm(r)).all()


def test_roots_that_do_not_exist(grid):
    for a in (np.diag([1.0, -4.0, 2.0]), np.array([[-4.0, 1.0], [0.0, 2.0]])):
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        with pytest.raises(np.linalg.LinAlgError, match="the matrix has the eigenvalue -4, and so no real square root"):
            linalg.sqrtm(x)
        root = linalg.sqrtm(x.astype(np.complex128))
        np.testing.assert_allclose((root @ root).gather(), a, atol=1e-13)
    with pytest.raises(np.linalg.LinAlgError, match="singular and has no square root"):
        linalg.sqrtm(pla.distribute(np.eye(6, k=1), grid, Layout(None, None)))
    same(linalg.sqrtm(pla.distribute(np.zeros((3, 3)), grid, Layout(None, None))), np.zeros((3, 3)))


@pytest.mark.parametrize("shape_of", [lambda n: (n, n), lambda n: (n + 3, n), lambda n: (n, 2 * n + 1)])
def test_polar(grid, shape_of):
    for name, a, layout, rng in cases(grid, 19, (0, 1, 2, 7, 17)):
        shape, dtype = shape_of(len(a)), a.dtype
        if shape != a.shape:
            if name != "random":
                continue
            a = random(shape, dtype, rng)
        n, k = max(1, *a.shape), min(a.shape)
        x = pla.distribute(a, grid, layout)
        for side in ("right", "left"):
            u, p = linalg.polar(x, side)
            assert u.layout == p.layout == x.layout
            u, p = u.gather(), p.gather()
            ratio(norm((u @ p if side == "right" else p @ u) - a), norm(a), n, dtype, (name, a.shape, dtype, side))
            inner = u.conj().T @ u if a.shape[0] >= a.shape[1] else u @ u.conj().T
            ratio(norm(inner - np.eye(k)), 1, n, dtype, (name, a.shape, dtype, "orthogonality"))
            np.testing.assert_array_equal(p, p.conj().T)
            least = np.linalg.eigvalsh(p.astype(np.result_type(p, np.float64))).min(initial=0)
            assert least >= -10 * n * eps(dtype) * norm(a), (name, a.shape, dtype)


def test_polar_of_singular_matrices_of_equal_columns(grid):
    """The iteration lost 5 digits of some: its factorizations have rows of very different sizes."""
    a = np.ones((5, 4))
    a[1, 2:] = 0
    for b, side in itertools.product((a, a.T, 1e30 * a), ("right", "left")):
        u, p = (f.gather() for f in linalg.polar(pla.distribute(b, grid, grid.default_layout(b.shape)), side))
        assert norm((u @ p if side == "right" else p @ u) - b) <= 1e-14 * norm(b)
        assert norm(p - scipy.linalg.polar(b, side)[1]) <= 1e-14 * norm(b)
    x = pla.distribute(a, grid, grid.default_layout(a.shape))
    if (parts := singular.polar_svd(x, False)) is not None:
        u, s, vh = (f.gather() for f in parts)
        assert norm((u * s) @ vh - a) <= 1e-14 * norm(a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_polar_of_subnormal_matrices(grid, dtype):
    """U has orthonormal columns, and P is A's size: both scaled by a power of two in range."""
    if not grid.backend.cpu:  # on GPUs their libraries decide
        return
    real, unit = np.zeros(0, dtype).real.dtype, 1000 * np.finfo(dtype).smallest_subnormal
    for shape in ((13, 1), (7, 4), (3, 5)):
        a = (random(shape, dtype, np.random.default_rng(6)).view(real) * unit).view(dtype)
        for every in (a, np.stack([a, a])):
            u, p = (x.gather() for x in linalg.polar(pla.distribute(every, grid, grid.default_layout(every.shape))))
            inner = u @ u.conj().swapaxes(-1, -2) if shape[0] < shape[1] else u.conj().swapaxes(-1, -2) @ u
            np.testing.assert_allclose(inner - np.eye(inner.shape[-1]), 0, atol=100 * eps(dtype))
            wide = np.result_type(dtype, np.longdouble)
            np.testing.assert_allclose(u @ p.astype(wide) / unit, every.astype(wide) / unit, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_polar_near_overflow(grid, dtype):
    """P is as large as A, and in range."""
    a = 0.9 * np.finfo(dtype).max * np.eye(5, dtype=dtype)[:, ::-1]
    for every in (a, np.stack([a] * 9)):
        for side in ("right", "left"):
            p = linalg.polar(pla.distribute(every, grid, grid.default_layout(every.shape)), side).P.gather()
            np.testing.assert_allclose(p / p.max(), np.broadcast_to(np.eye(5), p.shape), atol=100 * eps(dtype))
            np.testing.assert_allclose(p.real.max() / a.real.max(), 1, rtol=100 * eps(dtype))


def test_bases(grid):
    rng = np.random.default_rng(20)
    for m, n, k in ((9, 5, 3), (5, 9, 5), (70, 66, 40), (4, 4, 0), (0, 3, 0), (3, 0, 0)):
        a = rng.standard_normal((m, k)) @ rng.standard_normal((k, n))
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        inner, outer = linalg.null_space(x), linalg.orth(x)
        assert inner.shape == (n, n - k)
        assert outer.shape == (m, k)
        z, q = inner.gather(), outer.gather()
        np.testing.assert_allclose(a @ z, 0, atol=1e-12)
        np.testing.assert_allclose(z.T @ z, np.eye(n - k), atol=1e-13)
        np.testing.assert_allclose(q.T @ q, np.eye(k), atol=1e-13)
        np.testing.assert_allclose(q @ (q.T @ a), a, atol=1e-12)
    a = np.diag([1.0, 1e-3, 1e-9])
    x = pla.distribute(a, grid, Layout(None, None))
    assert [linalg.orth(x, r).shape[1] for r in (None, 1e-6, 1e-2)] == [3, 2, 1]
    assert linalg.null_space(x, 1e-6).shape == (3, 1)
    for name in ("orth", "null_space"):
        with pytest.raises(ValueError, match=f"{name}: rcond is a number, or None, not nan"):
            getattr(linalg, name)(x, np.nan)
    with pytest.raises(ValueError, match=r"orth takes one matrix, not a stack of shape \(2, 3, 3\)"):
        linalg.orth(pla.ones((2, 3, 3), grid))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bases_of_large_matrices(grid, monkeypatch, dtype):
    """Vectors of one side alone, with those that complete a basis, to LAPACK's ratios; of parts that are zeros too."""
    monkeypatch.setattr(kernels, "LARGE", 1)
    for module in (planner, singular):
        monkeypatch.setattr(module, "svd_by_one", lambda *args, **options: False)
    rng, rcond = np.random.default_rng(21), 1e-4
    cases = [
        (m, n, random((m, k), dtype, rng) @ random((k, n), dtype, rng))
        for m, n, k in ((140, 130, 70), (130, 140, 50), (150, 60, 20), (60, 150, 59), (80, 80, 80), (90, 90, 0))
    ]
    cases += [(n, n, np.diag(np.arange(n) < n / 2).astype(dtype)) for n in (100, 150)]
    for m, n, a in cases:
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        s = np.linalg.svd(a.astype(np.result_type(dtype, np.float64)), compute_uv=False)
        k = int((s > rcond * s.max()).sum())
        inner, outer = linalg.null_space(x, rcond), linalg.orth(x, rcond)
        assert (inner.shape, inner.layout, outer.shape, outer.layout) == ((n, n - k), x.layout, (m, k), x.layout)
        z, q = inner.gather(), outer.gather()
        assert z.dtype == q.dtype == dtype
        for each in (z, q):
            ratio(norm(each.conj().T @ each - np.eye(each.shape[1])), 1, max(m, n), dtype, (m, n, k))
        ratio(norm(a @ z), norm(a), max(m, n), dtype, (m, n, k))
        ratio(norm(q @ (q.conj().T @ a) - a), norm(a), max(m, n), dtype, (m, n, k))


def test_square_roots_of_singular_matrices(grid):
    """Several eigenvalues of 0, exact or rounded, have a root where they are no Jordan block."""
    u, v = np.array([1.0, -2, 3, 1, 0.5]), np.array([0.5, 1, 1, -1, 2])
    s = np.random.default_rng(9).standard_normal((6, 6))
    exact = np.array([[0.0, 0, 1], [0, 0, 2], [0, 0, 3]])
    projection = s @ np.diag([1.0, 1, 1, 0, 0, 0]) @ np.linalg.inv(s)
    between = np.array([[0.0, 1, 1], [0, 1, 1], [0, 0, 0]])
    for a in (exact, between, np.outer(u, v) / (u @ v), projection):
        for dtype in (float, complex):
            root = linalg.sqrtm(pla.distribute(a.astype(dtype), grid, Layout(grid.axes, None)))
            assert root.dtype == dtype
            got = root.gather()
            np.testing.assert_allclose(got @ got, a, atol=1e-12 * max(1, abs(got).max() ** 2))
    for a in (np.array([[0.0, 1, 0], [0, 0, 0], [0, 0, 1]]), np.array([[0.0, 1, 2], [0, 1, 1], [0, 0, 0]])):
        for dtype in (float, complex):
            with pytest.raises(np.linalg.LinAlgError, match="singular and has no square root"):
                linalg.sqrtm(pla.distribute(a.astype(dtype), grid, Layout(None, grid.axes)))


def test_a_square_root_that_is_not_there_names_the_matrix(grid):
    a = np.stack([np.eye(3) * k for k in (1.0, 2.0, -1.0, 3.0)]).reshape(2, 2, 3, 3)
    with pytest.raises(np.linalg.LinAlgError, match=r"^matrix \(1, 0\): the matrix has the eigenvalue -1, and so no"):
        linalg.sqrtm(pla.distribute(a, grid, grid.default_layout(a.shape)))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("small", [1e-12, 1e-14, 1e-20])
def test_square_roots_keep_small_eigenvalues(grid, dtype, small):
    """As far as rounding of a Hermitian matrix leaves them: all digits of a diagonal one; SciPy does so too."""
    n, rng = 120, np.random.default_rng(6)
    w = np.linspace(1, 2, n)
    w[3] = small
    root = linalg.sqrtm(pla.distribute(np.diag(w).astype(dtype), grid, Layout(grid.axes, None)))
    np.testing.assert_allclose(np.diag(root.gather()), np.sqrt(w), rtol=1e-12)
    if small < 1e-15:  # less than the rounding of others
        return
    a = random((n, n), np.dtype(dtype), rng)
    q = np.linalg.qr(a)[0]
    a = q * w @ q.conj().T
    a = (a + a.conj().T) / 2
    root = linalg.sqrtm(pla.distribute(a, grid, Layout(grid.axes, None))).gather()
    got, want = (np.linalg.eigvals(x).real.min() for x in (root, scipy.linalg.sqrtm(a)))
    limit = 20 * eps(dtype) / np.sqrt(small)  # an error of a few eps of the eigenvalue
    assert abs(got - np.sqrt(small)) < limit, (got, want)
    assert abs(got - want) < 2 * limit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_real_square_roots_where_rounding_makes_eigenvalues_negative(grid, dtype):
    """Symmetric or not, they are real up to 10 n ε ‖A‖; what is further below 0 is refused, and named."""
    rng, n = np.random.default_rng(4), 5
    q, unit = np.linalg.qr(rng.standard_normal((n, n)))[0], n * eps(dtype)
    low = rng.standard_normal((n, 2)) @ rng.standard_normal((2, 400))
    gram = low.astype(dtype) @ low.T.astype(dtype)  # of rank 2
    slanted = np.triu(rng.uniform(1, 2, (n, n)))
    slanted[2, 2] = -5 * unit * np.linalg.norm(slanted)
    for a in (gram, q * [4, 3, 2, 1, -20 * unit] @ q.T, slanted, q @ slanted @ q.T):
        a = a.astype(dtype)
        root = linalg.sqrtm(pla.distribute(a, grid, Layout(grid.axes, None)))
        assert root.dtype == dtype
        got = root.gather().astype(float)
        np.testing.assert_allclose(got @ got, a, atol=20 * unit * max(np.linalg.norm(a), np.linalg.norm(got) ** 2))
    negative = slanted.copy()
    negative[2, 2] *= 4
    for a in (q * [4, 3, 2, 1, -80 * unit] @ q.T, negative):
        with pytest.raises(np.linalg.LinAlgError, match=r"has the eigenvalue -.* and so no real square root"):
            linalg.sqrtm(pla.distribute(a.astype(dtype), grid, Layout(grid.axes, None)))
        root = linalg.sqrtm(pla.distribute(a.astype(dtype) + 0j, grid, Layout(grid.axes, None))).gather()
        assert abs(root.imag).max() > np.sqrt(10 * unit)


@pytest.mark.parametrize(
    "name", ["eig", "eigvals", "schur", "hessenberg", "expm", "sqrtm", "polar", "orth", "null_space"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_odd_numbers(grid, name, value):
    a = np.eye(9)
    a[-1, 0] = value
    with pytest.raises(ValueError, match="finite numbers; the array has NaNs or infinities"):
        getattr(linalg, name)(pla.distribute(a, grid, grid.default_layout(a.shape)))
    if name in ("eig", "eigvals", "schur", "hessenberg", "expm", "sqrtm"):
        with pytest.raises(np.linalg.LinAlgError, match=rf"{name} takes square matrices, not of shape \(3, 4\)"):
            getattr(linalg, name)(pla.ones((3, 4), grid))
    if name == "polar":
        with pytest.raises(ValueError, match="side is 'right' or 'left', not 'up'"):
            linalg.polar(pla.ones((3, 4), grid), "up")
