"""NumPy's functions of linear algebra on distributed arrays: the results, dtypes and errors that NumPy has."""

from __future__ import annotations

import re
from inspect import isfunction

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, linalg
from parlinalg.array import namespace
from parlinalg.array.dispatch import flags_of
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import lu as lu_factors
from parlinalg.linalg.factors import qr as qr_factors
from tests.cases import grids, layouts, same, terms

pytestmark = pytest.mark.one_in(8)

INF = np.inf


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def random(*shape, seed=0, dtype=float):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else a).astype(dtype)


def placed(grid, a, seed=0):
    """The array in a layout of this grid that the seed chooses."""
    every = layouts(grid.axes, np.ndim(a), partial=False)
    return pla.distribute(a, grid, every[seed % len(every)])


@pytest.mark.parametrize("order", [1, -1, 2, -2, 2.0, np.int64(2), np.float64(-2), INF, -INF, "fro", "nuc"])
def test_norms_of_matrices(grid, order):
    for a in (random(5, 3), random(2, 4, 4, dtype=complex), np.arange(-20, 4, dtype=np.int8).reshape(6, 4)):
        x = placed(grid, a, 1)
        for keepdims in (False, True):
            want = np.asarray(np.linalg.matrix_norm(a, ord=order, keepdims=keepdims))
            same(np.linalg.matrix_norm(x, ord=order, keepdims=keepdims), want, 1e-13)
            same(linalg.matrix_norm(x, ord=order, keepdims=keepdims), want, 1e-13)
            for norm in (np.linalg.norm, linalg.norm):
                same(norm(x, order, (-2, -1), keepdims), want, 1e-13)


@pytest.mark.parametrize("order", [0, 1, 2, 3, -1, INF, -INF])
def test_norms_of_vectors_of_whole_numbers(grid, order):
    """They are computed in float64: squares of small integers leave their range."""
    a = np.array([[100, -7, 1], [90, 3, -128]], np.int8)
    same(linalg.vector_norm(placed(grid, a), ord=order, axis=1), np.linalg.vector_norm(a, ord=order, axis=1), 1e-14)


def test_norms_of_halves(grid):
    """They are computed in float32, whose squares do not overflow, and rounded once."""
    a = np.array([[300.0, 400.0], [3e-4, 4e-4]], np.float16)
    for norm in (linalg.vector_norm, np.linalg.vector_norm):
        same(norm(placed(grid, a, 1), axis=1), np.linalg.norm(a.astype(np.float32), axis=1).astype(np.float16), 0)


def test_norms_of_nothing(grid):
    """They are 0, but for the least of sizes, which there is none of."""
    for shape in ((0, 3), (3, 0), (2, 0, 0)):
        x = placed(grid, np.zeros(shape))
        for order in (1, 2, INF, "fro", "nuc"):
            for found in (np.linalg.norm(x, order, (-2, -1)), linalg.matrix_norm(x, ord=order)):
                same(found, np.zeros(shape[:-2]))
        with pytest.raises(ValueError, match="no elements"):
            np.linalg.norm(x, -1 if shape[-1] == 0 else -INF, (-2, -1))
    for order in (-2, -3):  # of vectors: 0 to a power below 0
        with np.errstate(divide="ignore"):
            same(np.linalg.norm(placed(grid, np.zeros((0, 2))), order, 0), np.full(2, INF))
    none = placed(grid, np.zeros(0))
    for found in (np.linalg.norm(none, INF), linalg.vector_norm(none, ord=INF)):
        same(found, np.zeros(()))


@pytest.mark.parametrize("p", [None, 2, -2, 1, -1, INF, -INF, "fro", "nuc"])
def test_condition_numbers(grid, p):
    """Of singular matrices they are infinite; in a stack only those."""
    regular, singular = random(4, 4), np.diag([1.0, 0, 2, 3])
    for a in (regular, np.stack([regular, singular, regular.T]), np.zeros((3, 3)), np.zeros((0, 4, 4))):
        found = np.linalg.cond(placed(grid, a, 2), p)
        finite = np.isfinite(found.gather())
        with np.errstate(all="ignore"):
            every = a.reshape(-1, *a.shape[-2:])  # of some singular ones NumPy does not find the nuclear norm
            wants = [INF if p == "nuc" and not x.any(axis=0).all() else np.linalg.cond(x, p) for x in every]
        want = np.reshape(wants, a.shape[:-2])
        if p == -2 and a.any():  # 0, or rounding
            same(found, want, 1e-12)
            continue
        np.testing.assert_array_equal(finite, [True, False, True] if a.shape == (3, 4, 4) else a.any() or not a.size)
        np.testing.assert_allclose(found.gather()[finite], want[finite], rtol=1e-10)
    for empty in ((0, 0), (2, 0, 0)):
        with pytest.raises(np.linalg.LinAlgError, match="cond is not defined on empty matrices"):
            np.linalg.cond(placed(grid, np.zeros(empty)), p)


@pytest.mark.parametrize(
    "shape", [(33, 33), (90, 7), (400, 9), (40, 90), (5, 0), (0, 3), (2, 9, 4), (13, 4, 6)], ids=str
)
def test_r_alone(grid, shape, monkeypatch):
    """It is that of `qr`, and Q is not made for it."""
    x = placed(grid, random(*shape), 1)
    want = linalg.qr(x).R

    def refused(*args, **kwargs):
        raise AssertionError("Q is computed")

    monkeypatch.setattr(qr_factors.QRFactor, "Q", refused)
    monkeypatch.setattr(qr_factors, "tall_qr", refused)
    for found in (np.linalg.qr(x, mode="r"), linalg.qr(x, mode="r")):
        assert found.layout == want.layout
        same(found, want.gather(), 1e-13)


def test_modes_of_qr(grid):
    x = placed(grid, random(7, 4), 1)
    same(abs(np.linalg.qr(x, "complete").R), abs(np.linalg.qr(random(7, 4), "complete").R), 1e-13)
    with pytest.raises(ValueError, match=r"mode='raw'.* gives LAPACK's reflections.*qr_factor"):
        np.linalg.qr(x, "raw")
    with pytest.raises(ValueError, match="mode is 'reduced', 'complete' or 'r', not 'full'"):
        np.linalg.qr(x, "full")


def test_cross_products(grid):
    """Of vectors along any dim, cut or not, that broadcast."""
    a, b = random(4, 3, 5), random(3, seed=1)
    for seed in range(3):
        x, y, z = placed(grid, a, seed), placed(grid, b, seed + 1), placed(grid, a[::-1].copy(), seed + 2)
        same(np.cross(x, y, axisa=1), np.cross(a, b, axisa=1), 1e-14)
        same(np.linalg.cross(x, z, axis=1), np.linalg.cross(a, a[::-1], axis=1), 1e-14)
        same(linalg.cross(x, z, axis=-2), np.cross(a, a[::-1], axis=-2), 1e-14)


def test_powers(grid):
    for a in (np.array([[1, 2], [3, 4]]), np.array([[True, False], [True, True]]), np.array([[np.nan, 1], [2, 3]])):
        for n in (0, 1, np.int64(0)):
            same(np.linalg.matrix_power(placed(grid, a, 1), n), np.linalg.matrix_power(a, n))
    for shape in ((5, 5), (3, 4, 4), (0, 0)):  # of booleans: which nodes of a graph are n steps apart
        a = random(*shape) > 1
        for n in (0, 1, 2, 3, 7):
            same(linalg.matrix_power(placed(grid, a, n), n), np.linalg.matrix_power(a, n))
    stack = random(2, 3, 3)
    x = placed(grid, stack, 3)
    assert linalg.matrix_power(x, 0).layout == x.layout
    for n in (2.0, 0.5, 0.0, "2", True, np.True_):
        with pytest.raises(TypeError, match="matrix_power takes a whole number for n, not"):
            np.linalg.matrix_power(x, n)
    for shape in ((2, 3), (3,)):
        with pytest.raises(np.linalg.LinAlgError, match="matrix_power takes square matrices"):
            np.linalg.matrix_power(placed(grid, np.ones(shape)), 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_determinants_whose_factors_leave_the_range(grid, dtype):
    """Of a product that overflows or underflows on its way, and ends within the range of numbers."""
    large, digits = float(np.finfo(dtype).max) ** 0.7, float(np.finfo(dtype).tiny) ** -0.52  # lost by subnormal numbers
    for factor, way in ((large, 1), (large, -1), (digits, -1)):
        a = np.diag(np.array([factor, factor, -3 / factor, 2 / factor])[::way]).astype(dtype)
        a[[0, 1]] = a[[1, 0]]
        x = placed(grid, a, 1)
        for found in (linalg.det(x), linalg.lu_factor(x).det(), linalg.lu_factor(pla.stack([x] * 9)).det()[3]):
            assert found.dtype == dtype
            np.testing.assert_allclose(found.gather(), 6, rtol=1e-3 if dtype == "float32" else 1e-11)
    assert linalg.det(x * 0).gather() == 0


def test_triangles_that_are_read(grid):
    """NumPy's `upper` and UPLO="U" read upper triangles; results lie like the matrix."""
    for dtype in (float, complex):
        s = random(5, 5, dtype=dtype)
        s = s @ s.conj().T + np.eye(5)
        a = np.triu(s) + np.tril(np.full((5, 5), 7.0), -1)
        for seed in range(3):
            x = placed(grid, a, seed)
            upper = np.linalg.cholesky(x, upper=True)
            assert upper.layout == x.layout
            same(upper, np.linalg.cholesky(s, upper=True), 1e-13)
            w, v = np.linalg.eigh(x, "U")
            assert v.layout == x.layout
            same(w, np.linalg.eigvalsh(s), 1e-13)
            np.testing.assert_allclose(s @ v.gather(), v.gather() * w.gather(), atol=1e-12)
    with pytest.raises(ValueError, match="UPLO argument must be 'L' or 'U'"):
        np.linalg.eigh(x, "X")


def test_ranks(grid):
    a = np.stack([np.diag([1.0, 0.1, 0.01]), np.diag([1.0, 1e-3, 1e-3]), np.zeros((3, 3))])
    x, tol = placed(grid, a, 2), np.array([0.05, 1e-4, 0.5])
    limits = pla.distribute(tol, grid, Layout(None))
    same(np.linalg.matrix_rank(x, limits), np.linalg.matrix_rank(a, tol))
    same(np.linalg.matrix_rank(x, rtol=limits), np.linalg.matrix_rank(a, rtol=tol))
    same(np.linalg.pinv(x, limits), np.linalg.pinv(a, tol), 1e-12)
    for function in (np.linalg.pinv, np.linalg.matrix_rank):
        with pytest.raises(ValueError, match="not both"):
            function(x, 0.1, rtol=0.1)
    for vector in (np.zeros(3), np.array([0, 1.0]), np.zeros(0)):
        assert int(np.linalg.matrix_rank(placed(grid, vector))) == np.linalg.matrix_rank(vector)


def test_hermitian_matrices(grid):
    """With `hermitian` lower triangles are read, as NumPy reads them, and matrices are square."""
    for dtype in (float, complex):
        for shape in ((5, 5), (2, 5, 5)):
            a = np.tril(random(*shape, dtype=dtype)) + np.triu(np.full((5, 5), 7.0), 1)
            x = placed(grid, a, 1)
            same(np.linalg.svd(x, compute_uv=False, hermitian=True), np.linalg.svd(a, True, False, True), 1e-12)
            u, s, vh = (each.gather() for each in np.linalg.svd(x, hermitian=True))
            lower = np.tril(a, -1)
            np.testing.assert_allclose(
                (u * s[..., None, :]) @ vh,
                lower + lower.conj().swapaxes(-1, -2) + np.eye(5) * a.real,
                atol=1e-12,
            )
            same(np.linalg.pinv(x, hermitian=True), np.linalg.pinv(a, hermitian=True), 1e-10)
            same(np.linalg.matrix_rank(x, hermitian=True), np.linalg.matrix_rank(a, hermitian=True))
    wide = placed(grid, random(2, 3))
    for function in (np.linalg.svd, np.linalg.pinv, np.linalg.matrix_rank):
        with pytest.raises(np.linalg.LinAlgError, match=rf"{function.__name__} takes square matrices"):
            function(wide, hermitian=True)


def test_odd_tolerances_and_orders(grid):
    x = placed(grid, random(2, 3, 3))
    for what, limited in (
        ("matrix_rank: tol", lambda v: np.linalg.matrix_rank(x, v)),
        ("matrix_rank: rtol", lambda v: linalg.matrix_rank(x, rtol=v)),
        ("pinv: rcond", lambda v: np.linalg.pinv(x, v)),
        ("pinv: rtol", lambda v: linalg.pinv(x, rtol=v)),
    ):
        for value in ([0.1, 0.2], (0.1,), np.array([0.1])):
            text = f"{what} is a number, or one for every matrix, or None, not {value!r}; parlinalg.asarray makes"
            with pytest.raises(TypeError, match=re.escape(text)):
                limited(value)
        with pytest.raises(ValueError, match=rf"{what} has one number for every matrix, of shape \(2,\), not \(3,\)"):
            limited(pla.ones(3, grid=grid))
    for kind in (pla.DistArray.copy, pla.Tensor):
        given, vector, wide = map(kind, (x, x[0, 0].copy(), x[:, :2].copy()))
        for norm in (np.linalg.vector_norm, linalg.vector_norm):
            with pytest.raises(ValueError, match="vector_norm takes a number for ord, not 'fro'"):
                norm(given, ord="fro")
        with pytest.raises(ValueError, match="vector_norm takes a number for ord, not None"):
            linalg.vector_norm(given, ord=None)
        for function in (linalg.pinv, linalg.matrix_rank):
            with pytest.raises(ValueError, match="rtol is a number, or one for every matrix, or None, not nan"):
                function(given, rtol=np.nan)
        for function in (linalg.pinv, linalg.matrix_rank, linalg.cond, lambda x: linalg.cond(x, 1)):
            with pytest.raises(np.linalg.LinAlgError, match=r"^(pinv|matrix_rank|cond) takes matrices, .*shape \(3,\)"):
                function(vector)
        with pytest.raises(np.linalg.LinAlgError, match=r"cond of order 'nuc' takes square matrices, not of shape"):
            linalg.cond(wide, "nuc")


def test_arguments_of_wrong_kinds(grid):
    """The error names the function or the argument, and the value."""
    x, v = placed(grid, random(4, 4)), placed(grid, random(4))
    orders = "is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, not "
    wrong = [
        *((lambda p=p: linalg.cond(x, p), ValueError, f"cond: p {orders}{p!r}") for p in ("x", [2], 3, np.nan, 1j)),
        *(
            (lambda o=o: linalg.matrix_norm(x, ord=o), ValueError, f"matrix_norm: ord {orders}{o!r}")
            for o in ("x", [2])
        ),
        *((lambda o=o: linalg.norm(v, o), ValueError, f"a number for ord, not {o!r}") for o in ([2], (1, 2), {})),
        (lambda: linalg.vector_norm(x, ord=np.ones(2)), ValueError, "a number for ord, not array([1., 1.])"),
        *((lambda a=a: linalg.norm(x, axis=a), TypeError, f"an axis is a whole number, not {a!r}") for a in ("x", [0])),
        *(
            (call, TypeError, "an axis is a whole number, not 0.5")
            for call in (
                lambda: linalg.vector_norm(x, axis=0.5),
                lambda: linalg.tensordot(x, x, axes=(0.5, 1)),
                lambda: linalg.tensorsolve(x, v, axes=0.5),
            )
        ),
        (lambda: linalg.cross(x, x, axis="x"), ValueError, "cross: axis is a whole number, not 'x'"),
        (lambda: linalg.vecdot(x, x, axis=None), ValueError, "vecdot: axis is a whole number, not None"),
        (lambda: linalg.tensordot(x, x, axes=0.5), TypeError, "tensordot: axes is a whole number, or the dims"),
        (lambda: linalg.tensordot(x, x, axes={}), TypeError, "tensordot: axes is a whole number, or the dims"),
        (lambda: linalg.eigh(x, "x"), TypeError, "eigh takes DistArrays, not str"),
        (lambda: linalg.eigvalsh(x, subset_by_index="x"), ValueError, "eigvalsh: subset_by_index is (first, last)"),
        (lambda: linalg.eigh(x, subset_by_value=1), ValueError, "eigh: subset_by_value is (low, high) with low < high"),
        (lambda: linalg.qr(x, mode="x"), ValueError, "qr: mode is 'reduced', 'complete' or 'r', not 'x'"),
        (lambda: linalg.polar(x, side="x"), ValueError, "polar: side is 'right' or 'left', not 'x'"),
        (lambda: linalg.tensorsolve(x, [1.0]), TypeError, "tensorsolve takes DistArrays, not list"),
        (lambda: linalg.outer(v, "x"), TypeError, "outer takes DistArrays, not str"),
        (lambda: linalg.solve_triangular(x, v[:1]), ValueError, "solve_triangular takes right-hand sides of 4 rows"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=re.escape(text)):
            call()
    for keepdims in ("x", 1.5, None):  # true or not, as of other functions
        assert linalg.vector_norm(x, keepdims=keepdims).ndim == linalg.matrix_norm(x, keepdims=keepdims).ndim
        assert linalg.vector_norm(x, keepdims=keepdims).ndim == (0 if keepdims is None else 2)


NANS = [np.float32("nan"), np.float64("nan"), np.float16("nan"), np.array(np.nan), np.array(np.nan, np.float32)]
NO_NUMBERS = [True, np.bool_(True), np.complex64(1), "1"]


def test_limits_of_all_kinds_of_numbers(grid):
    """NumPy's scalars and arrays without dims are numbers too; a NaN or what is no real number is refused."""
    x, b = placed(grid, np.diag([3.0, 2.0, 1e-9])), placed(grid, random(3))
    several = placed(grid, np.stack([np.eye(3)] * 2))
    functions = [
        lambda rtol: linalg.pinv(x, rtol=rtol),
        lambda rtol: linalg.matrix_rank(x, rtol=rtol),
        lambda tol: np.linalg.matrix_rank(x, tol),
        lambda rtol: linalg.matrix_rank(several, rtol=rtol),
        lambda rcond: linalg.lstsq(x, b, rcond),
        lambda rcond: linalg.orth(x, rcond),
        lambda rtol: linalg.cg(x, b, rtol=rtol),
        lambda tol: linalg.lobpcg(x, b[:, None], tol=tol),
        lambda sigma: linalg.eigsh(x, 1, sigma=sigma),
    ]
    for function in functions:
        for value in [*NANS, pla.asarray(np.nan, grid=grid)]:
            with pytest.raises(ValueError, match=r"not .*nan|not DistArray"):
                function(value)
        for value in NO_NUMBERS:
            with pytest.raises((TypeError, ValueError), match="not"):
                function(value)
    for value in (np.float32(0.5), np.array(0.5), pla.asarray(0.5, grid=grid), pla.asarray(np.float32(0.5), grid=grid)):
        assert int(linalg.matrix_rank(x, rtol=value)) == 2
        assert linalg.lstsq(x, b, value).rank == 2
        assert linalg.orth(x, value).shape == (3, 2)
        assert int(np.linalg.matrix_rank(x, value)) == 2
    odd = pla.asarray(np.array([0.5, np.nan]), grid=grid)
    for function in (linalg.pinv, linalg.matrix_rank):
        with pytest.raises(ValueError, match="rtol is a number, or one for every matrix, or None, not DistArray"):
            function(several, rtol=odd)


def times_power(a, power):
    """Return a times 2 to a power that need not be a number itself."""
    one = np.ones(np.shape(power), a.real.dtype)
    return a * np.ldexp(one, np.asarray(power) // 2) * np.ldexp(one, power - np.asarray(power) // 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("extreme", ["large", "small", "subnormal", "both", "some"])
def test_norms_whose_sums_leave_the_range(grid, dtype, extreme):
    """They are as accurate as those of numbers near 1, as LAPACK's are: of vectors, matrices and stacks."""
    limits = np.finfo(dtype)
    large, small = limits.maxexp - 20, limits.minexp + limits.nmant
    lead = {"large": (large, large * 3 // 4), "small": (small, small * 2 // 3), "subnormal": (limits.minexp - 4,) * 2}
    power = np.array(lead.get(extreme, (large, small)))[:, None, None]
    base = (random(2, 5, 5, dtype=complex if dtype.startswith("c") else float) + 3 * np.eye(5)).astype(dtype)
    if extreme == "some":  # lines of one matrix differ
        power = np.broadcast_to(power.ravel(), (2, 5, 2))[..., [0, 1, 0, 1, 0]]
    a = times_power(base, power)
    exact = times_power(a, -power).astype(np.result_type(dtype, np.float64))

    def agree(got, want, power):
        want = times_power(want, np.broadcast_to(power, want.shape))
        assert got.dtype == limits.dtype
        assert np.isfinite(want).all()
        np.testing.assert_allclose(got.gather(), want, rtol=300 * limits.eps, atol=2 * limits.smallest_subnormal)

    x = placed(grid, a, 1)
    for order in (0.5, 1, 2, 3, -1, -2, -2.5, INF, -INF):
        want = np.linalg.norm(exact, order, axis=1)
        agree(linalg.vector_norm(x, axis=1, ord=order), want, power[:, 0])
        agree(np.linalg.norm(x, order, 1, True), want[:, None], power[:, :1])
        if extreme != "some":
            want = np.linalg.norm(exact.reshape(2, 25), order, axis=1)
            agree(linalg.vector_norm(x, axis=(1, 2), ord=order), want, power[:, 0, 0])
    for order in (1, -1, 2, -2, INF, -INF, "fro", "nuc") if extreme != "some" else ():
        want = np.linalg.norm(exact, order, (1, 2))
        agree(linalg.matrix_norm(x, ord=order), want, power[:, 0, 0])
        agree(np.linalg.norm(x[0], order), want[0], power[0, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_conditions_of_the_whole_range_of_all_orders(grid, dtype):
    limits, base = np.finfo(dtype), random(2, 4, 4, dtype=complex if dtype.startswith("c") else float) + 3 * np.eye(4)
    for power in (limits.maxexp - 4, limits.maxexp // 2, limits.minexp // 2, limits.minexp - 4):
        a = times_power(base.astype(dtype), power)
        exact = times_power(a, -power).astype(np.result_type(dtype, np.float64))
        for p in (None, 1, -1, 2, -2, INF, -INF, "fro", "nuc"):
            for at in ((), (0,)):
                got, want = linalg.cond(placed(grid, a[at], 1), p), np.linalg.cond(exact[at], p)
                assert got.dtype == limits.dtype
                np.testing.assert_allclose(got.gather(), want, rtol=1000 * limits.eps)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_condition_numbers_of_an_inverse_in_parts(grid, dtype, monkeypatch):
    """The norm of the inverse is NumPy's, in one part of columns or several, of narrow and wide parts."""
    tiny = np.finfo(dtype).eps
    for n, narrow in ((1, 1), (2, 1), (7, 2), (45, 9), (90, 80), (150, 36)):
        monkeypatch.setattr(lu_factors, "NARROW", narrow)
        a = (random(n, n, dtype=dtype) / np.sqrt(n) + 3 * np.eye(n)).astype(dtype)
        a[: n // 2] *= a.real.dtype.type(0.1)
        x = placed(grid, a, 1)
        for p in (1, -1, INF, -INF, "fro", "nuc"):
            want = np.linalg.cond(a.astype(np.result_type(dtype, np.float64)), p)
            got = linalg.cond(x, p)
            assert got.dtype == np.finfo(dtype).dtype
            np.testing.assert_allclose(got.gather(), want, rtol=10 * n * tiny * np.linalg.cond(a.astype(complex)))
        same(x, a, 0)
        a[:, -1] = 0
        assert np.isinf(linalg.cond(placed(grid, a, 1), 1).gather())


@pytest.mark.parametrize("size", [1e-310, 1e-300, 1.0, 1e300])
def test_conditions_of_the_whole_range(grid, size):
    """NumPy's finds no singular values of an inverse that overflows."""
    for lead in ((), (2,)):
        a = np.broadcast_to(size * np.diag([1.0, 2.0, 4.0]), (*lead, 3, 3))
        found = linalg.cond(placed(grid, a.copy(), 1), "nuc").gather()
        np.testing.assert_allclose(found, np.full(lead, 7 * 1.75), rtol=1e-9 if size < 1e-307 else 1e-14)


def test_solutions_lie_like_the_right_hand_side(grid):
    a = random(7, 7) + 7 * np.eye(7)
    for seed in range(4):
        b = placed(grid, random(7), seed)
        x = linalg.solve(placed(grid, a, seed), b)
        assert x.layout == b.layout
        same(x, np.linalg.solve(a, random(7)), 1e-12)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("adjoint", [False, True])
def test_stacks_of_triangles(grid, lower, adjoint, unit):
    """The other triangles are not read, and zeros on a diagonal are found, which pivots would hide."""
    n, side = 4, np.tril if lower else np.triu
    for count in (1, 13):
        a = random(count, n, n) / 3 + 2 * np.eye(n)
        t = side(a)
        if unit:
            t[:, range(n), range(n)] = 1
        given = np.where(side(np.ones((n, n)), (-1 if lower else 1) * unit) == 1, a, np.nan)
        b = random(count, n, 2)
        x = linalg.solve_triangular(
            placed(grid, given, 1), placed(grid, b, 2), lower=lower, adjoint=adjoint, unit_diagonal=unit
        )
        same(x, np.linalg.solve(t.swapaxes(-1, -2) if adjoint else t, b), 1e-12)
        if unit:
            continue
        for i in range(n):
            a[-1] = 1 / (3 + np.arange(n * n).reshape(n, n))
            a[-1, i, i] = 0
            with pytest.raises(np.linalg.LinAlgError, match=r"[Ss]ingular"):
                linalg.solve_triangular(placed(grid, a, 1), placed(grid, b, 2), lower=lower, adjoint=adjoint)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_stacks_of_triangles_are_solved_by_substitution(grid, dtype, monkeypatch):
    """Residuals are those of substitution in every element, with triangles of which pivots would lose digits."""
    monkeypatch.setattr(kernels, "TOGETHER", 3)
    rng = np.random.default_rng(3)
    eps = np.finfo(dtype).eps
    for count, n, sides in ((40, 5, 1), (7, 30, 3), (20, 1, 2), (7, 9, 40), (9, 40, 40), (13, 0, 2), (7, 3, 0)):
        for lower in (False, True):
            for adjoint in (False, True):
                t = random(count, n, n) + (1j * random(count, n, n) if np.dtype(dtype).kind == "c" else 0)
                t = t * 10.0 ** rng.integers(-6, 6, (count, n, 1)) * 10.0 ** rng.integers(-2, 2, (count, 1, n))
                t = (np.tril if lower else np.triu)(t).astype(dtype)
                b = random(count, n, sides).astype(dtype)
                given = {"lower": lower, "adjoint": adjoint}
                x = (
                    linalg.solve_triangular(placed(grid, t, 1), placed(grid, b, 2), **given)
                    .gather()
                    .astype("complex128")
                )
                op = t.swapaxes(-1, -2).conj() if adjoint else t
                left = abs(op.astype("complex128") @ x - b)
                with np.errstate(invalid="ignore"):
                    assert not (left > 4 * (n + 1) * eps * (abs(op) @ abs(x) + abs(b))).any()


def test_singular_matrices_of_stacks_are_named(grid):
    for lead in ((13,), (2, 7), (1,), (2,)):
        for n in (4, 40):
            a = np.broadcast_to(np.eye(n), (*lead, n, n)).copy()
            last = tuple(i - 1 for i in lead)
            a[(*last, 2, 2)] = 0
            A, b = placed(grid, a, 1), placed(grid, np.ones((*lead, n, 2)), 2)
            at = re.escape(str(last))
            with pytest.raises(np.linalg.LinAlgError, match=rf"matrix {at}: the matrix is singular: element \[2, 2\]"):
                linalg.solve_triangular(A, b)
            for call in (lambda A=A, b=b: linalg.solve(A, b), lambda A=A: linalg.inv(A)):
                with pytest.raises(np.linalg.LinAlgError, match=rf"matrix {at}: .*[Ss]ingular"):
                    call()


def test_only_lower_triangles_of_stacks_are_factored(grid):
    s = random(13, 4, 4)
    s = s @ s.swapaxes(-1, -2) + np.eye(4)
    a = np.where(np.tril(np.ones((4, 4))) == 1, s, np.nan)
    for count in (1, 13):
        same(linalg.cho_factor(placed(grid, a[:count], 1)).L, np.linalg.cholesky(s[:count]), 1e-12)


def test_exponentials_of_matrices_whose_powers_leave_the_range(grid):
    """Stiff systems: the exponential of a very negative matrix is 0, not an error."""
    for dtype, size in (("float32", 1e5), ("float64", 1e200), ("float64", 1e60)):
        a = -size * np.diag([1, 2, 3]).astype(dtype)
        same(linalg.expm(placed(grid, a, 1)), np.zeros((3, 3), dtype))


def test_subnormal_matrices_are_not_refined(grid):
    """Their inverse scale is no number."""
    a, b = placed(grid, np.diag([1e-310, 2e-310]), 1), placed(grid, np.array([1.0, 2.0]))
    np.testing.assert_array_equal(linalg.solve(a, b, refine=True).gather(), linalg.solve(a, b).gather())


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("size", [1e-300, 1e-312])
def test_right_hand_sides_near_underflow_are_refined(grid, dtype, size):
    """Residuals, and right-hand sides, may be too small for reciprocals, which complex quotients have in them."""
    a, want = random(9, 9, dtype=dtype) + 9 * np.eye(9), np.eye(9, 3) * [1, 0, 2]
    tall = np.concatenate([a, a[:4]])
    for method, given in ((linalg.solve, a), (lambda x, y, **options: linalg.lstsq(x, y, **options).x, tall)):
        b = given[:, :3] * [1, 0, 2] * size
        x = method(placed(grid, given, 1), placed(grid, b, 2), refine=True).gather()
        np.testing.assert_allclose(x.astype(np.clongdouble) / size, want, atol=1e-13 + 5e-323 / size)


def test_odd_numbers_beside_terms(grid):
    """Ranks whose right-hand sides are finite, and those whose are not, sum the terms of the matrix together."""
    a, b = random(5, 5), random(5, 7)
    b[2, 4] = np.nan
    A = terms(a, grid, Layout(None, None, partial=grid.axes[:1]))
    for layout in layouts(grid.axes, 2, partial=False):
        with pytest.raises(ValueError, match="solve takes finite numbers; the array has NaNs or infinities"):
            linalg.solve(A, pla.distribute(b, grid, layout))


def test_solutions_by_factors(grid):
    """SciPy's names take what `lu_factor` and `cho_factor` return, of stacks too, and nothing else."""
    for shape in ((7, 7), (3, 4, 4)):
        a, b = random(*shape, dtype=complex), random(*shape[:-1], 2, seed=1)
        x, y = placed(grid, a, 1), placed(grid, b, 2)
        factor = linalg.lu_factor(x)
        same(linalg.lu_solve(factor, y), np.linalg.solve(a, b), 1e-11)
        same(linalg.lu_solve(factor, y, adjoint=True), np.linalg.solve(a.conj().swapaxes(-1, -2), b), 1e-11)
        positive = a @ a.conj().swapaxes(-1, -2)
        chol = linalg.cho_factor(placed(grid, positive))
        same(linalg.cho_solve(chol, y), np.linalg.solve(positive, b), 1e-10)
        for solve, odd in ((linalg.lu_solve, chol), (linalg.cho_solve, factor), (linalg.lu_solve, (x, x))):
            with pytest.raises(
                TypeError, match=rf"{solve.__name__} takes what .* returns, not .* {type(odd).__name__}"
            ):
                solve(odd, y)


@pytest.mark.parametrize("shape", [(3, 3), (9, 3, 3), (2, 3, 3)])
def test_solutions_by_factors_name_the_function_that_was_called(grid, shape):
    a = np.broadcast_to(np.eye(3), shape).copy()
    x, flag = placed(grid, a), pla.ones(2, grid, dtype=bool)
    nan = placed(grid, np.full((*shape[:-1], 2), np.nan))
    half, many = pla.ones((*shape[:-1], 2), grid, dtype=np.float16), pla.ones((4, 2), grid)
    odd = {
        "takes DistArrays, not list": [1.0], "takes finite numbers; the array has": nan,
        "takes float32, .*, not float16": half, r"takes right-hand sides of shape \(3,\)": many,
        "takes vectors and matrices as right-hand sides": pla.ones((), grid),
    }  # fmt: skip
    for name, make in (("lu_solve", linalg.lu_factor), ("cho_solve", linalg.cho_factor)):
        solve, factors = getattr(linalg, name), [make(x), make(pla.Tensor(x))]
        for words, b in odd.items():
            for called, run in ((name, lambda f, b: solve(f, b)), ("solve", lambda f, b: f.solve(b))):
                for factor in factors[: 1 + (b is nan)]:
                    with pytest.raises((TypeError, ValueError), match=f"^{called} {words}"):
                        run(factor, b)
    with pytest.raises(ValueError, match=r"^lu_solve: adjoint is True or False, not a DistArray"):
        linalg.lu_solve(linalg.lu_factor(x), many, adjoint=flag)
    with pytest.raises(linalg.LinAlgError, match="the matrix is singular"):
        linalg.lu_solve(linalg.lu_factor(x * 0), many[:3])


def test_products_and_inverses_of_many_dims(grid):
    """`linalg` has NumPy's names for them."""
    matrices = [random(2, 7), random(7, 3, seed=1), random(3, seed=2)]
    given = [placed(grid, a, i) for i, a in enumerate(matrices)]
    same(linalg.multi_dot(given), np.linalg.multi_dot(matrices), 1e-13)
    a, b = random(2, 3, 6, seed=3), random(2, 3, seed=4)
    same(linalg.tensorsolve(placed(grid, a, 1), placed(grid, b)), np.linalg.tensorsolve(a, b), 1e-11)
    a = a.reshape(2, 3, 3, 2)
    same(linalg.tensorinv(placed(grid, a, 2)), np.linalg.tensorinv(a), 1e-11)


@pytest.mark.serial
def test_functions_name_what_is_no_array():
    """None of them fails for an attribute that a list, a number or an array of this rank alone does not have."""
    told = []
    for home in (pla, pla.fft, linalg):
        names = namespace.__all__ if home is pla else home.__all__
        for function in filter(isfunction, (getattr(home, name) for name in names)):
            for odd in ([np.eye(2)], [np.eye(2), np.ones(2)], [0.5], [[1, 2]], [[np.eye(2), np.eye(2)]], [object()]):
                try:
                    with np.errstate(all="ignore"):
                        function(*odd)
                except (TypeError, ValueError, np.linalg.LinAlgError) as error:
                    if f"{function.__name__} takes DistArrays, not " in str(error):
                        told.append(str(error))
                except IndexError:  # an axis that the array does not have
                    pass
    assert len(told) > 200
    assert all(words.endswith("; parlinalg.asarray makes one") for words in told)


def test_arrays_given_as_flags(grid):
    """They are refused at once, by the function and the argument; an array of one element is True or False."""
    a = placed(grid, np.eye(4) + 0.1)
    flag, tensor, host = pla.ones(3, grid, dtype=bool), pla.Tensor(pla.ones(3, grid)), np.array([True, False])
    b, factor = a[:, 0], linalg.lu_factor(a)
    calls = {
        "cg: pipelined": lambda f: linalg.cg(a, b, pipelined=f),
        "cholesky: upper": lambda f: linalg.cholesky(a, upper=f),
        "eigsh: return_eigenvectors": lambda f: linalg.eigsh(a, 2, return_eigenvectors=f),
        "hessenberg: calc_q": lambda f: linalg.hessenberg(a, f),
        "lobpcg: largest": lambda f: linalg.lobpcg(a, a[:, :1], largest=f),
        "lstsq: refine": lambda f: linalg.lstsq(a, b, refine=f),
        "solve: refine": lambda f: linalg.solve(a, b, refine=f),
        "matrix_norm: keepdims": lambda f: linalg.matrix_norm(a, ord=2, keepdims=f),
        "norm: keepdims": lambda f: linalg.norm(a, "nuc", (0, 1), f),
        "vector_norm: keepdims": lambda f: linalg.vector_norm(a, keepdims=f),
        "qr: pivoting": lambda f: linalg.qr(a, pivoting=f),
        "svd: full_matrices": lambda f: linalg.svd(a, full_matrices=f),
        "solve: adjoint": lambda f: factor.solve(b, f),
        "solve_triangular: lower": lambda f: linalg.solve_triangular(a, b, lower=f),
        "solve_triangular: unit_diagonal": lambda f: linalg.solve_triangular(a, b, lower=True, unit_diagonal=f),
        "np.linalg.svd: full_matrices": lambda f: np.linalg.svd(a, f),
        "np.linalg.svd: compute_uv": lambda f: np.linalg.svd(a, compute_uv=f),
        "np.linalg.pinv: hermitian": lambda f: np.linalg.pinv(a, hermitian=f),
        "np.linalg.cholesky: upper": lambda f: np.linalg.cholesky(a, upper=f),
        "np.sum: keepdims": lambda f: np.sum(a, keepdims=f), "sort: descending": lambda f: pla.sort(a, descending=f),
    }  # fmt: skip
    functions = [(name, f) for name in linalg.__all__ if isfunction(f := getattr(linalg, name))]
    known = {f"{name}: {flag}" for name, f in functions for _, flag in flags_of(f)}
    assert known <= calls.keys() | {"solve_triangular: adjoint", "lu_solve: adjoint"}
    for what, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{what} is True or False, not a DistArray of shape \(3,\); take its"):
            call(flag)
        if not what.startswith("np."):  # these are Tensor's, or NumPy's
            with pytest.raises(ValueError, match=f"^{what} is True or False, not a ndarray of shape"):
                call(host)
            with pytest.raises(TypeError, match=f"^{what} is True or False, not a Tensor of shape"):
                call(tensor)
    with pytest.raises(ValueError, match=r"^qr: pivoting is True or False, not a DistArray"):
        linalg.qr(pla.Tensor(a), pivoting=flag)
    assert len(linalg.qr(a, pivoting=flag.any())) == 3
    assert linalg.svd(a[:, :2], full_matrices=~flag.all()).U.shape == (4, 2)


@pytest.mark.parametrize("home", [pla.DistArray, pla.Tensor, pla])
def test_arrays_given_as_flags_of_methods(grid, home):
    """Those of arrays and tensors, and the functions of `parlinalg` on arrays: by the name of what is called."""
    array, told = placed(grid, np.eye(4) + 0.1), 0
    further = {"astype": float, "reshape": (16,), "top_k": 1, "digitize": array[0], "fill_diagonal": 1.0}
    further |= dict.fromkeys(("quantile", "percentile", "nanquantile", "nanpercentile"), 0.5)
    further |= dict.fromkeys(("allclose", "array_equal", "isclose", "intersect1d", "setdiff1d", "setxor1d"), array)
    others = {"explicit", "einsum", "einsum_path", "plan_linalg", "plan_training"}
    others |= {"overwrite_input", "sorted", "assume_unique"}  # not taken here
    for name in pla.__all__ if home is pla else dir(home):
        function = getattr(home, name)
        if not isfunction(function) or name.startswith("_") or name in others:
            continue
        for flag in {flag for _, flag in flags_of(function)} - others:
            for value in (pla.ones(3, grid), pla.Tensor(pla.ones(3, grid)), np.ones(2)):
                kind, error = type(value).__name__, TypeError if isinstance(value, pla.Tensor) else ValueError
                first = pla.Tensor(array) if home is pla.Tensor else array
                words = rf"^(np\.)?{name}: {flag} is True or False, not a {kind} of shape"
                with pytest.raises(error, match=words):
                    function(first, *([further[name]] if name in further else []), **{flag: value})
                told += 1
    assert told > 30


def test_arrays_given_as_words_or_orders(grid):
    a, odd = placed(grid, np.eye(4)), pla.ones(3, grid)
    for what, call in {
        "qr: mode is": lambda: linalg.qr(a, mode=odd), "polar: side is": lambda: linalg.polar(a, odd),
        "schur: output is": lambda: linalg.schur(a, odd),
        "UPLO argument must be": lambda: np.linalg.eigh(a, odd), "norm: ord is": lambda: linalg.norm(a, odd),
        "norm: ord": lambda: np.linalg.norm(a, np.ones(2)),
        "matrix_norm: ord is": lambda: linalg.matrix_norm(a, ord=odd),
        "vector_norm takes a number for ord": lambda: linalg.vector_norm(a, ord=odd),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{what}"):
            call()
