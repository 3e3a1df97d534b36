"""Every decomposition of the matrices of LAPACK's own tests, by LAPACK's ratios, on every grid.

The types are those of `dlatb4`, `dlatms` and `dchkst`: of condition 1 to 1/eps, with values that are even, geometric,
clustered or one alone, graded, scaled to the edge of overflow and underflow, rank-deficient, triangular, Kahan's,
Wilkinson's, of which LU grows, and his tridiagonal ones glued together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg
from parlinalg.layout import Layout
from parlinalg.linalg.reductions.divide import bidiagonal_vectors, tridiagonal_vectors
from tests.cases import grids, layouts
from tests.linalg.test_factors import BOUND, DTYPES, eps, norm, random

pytestmark = pytest.mark.one_in(10)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def edges(dtype) -> tuple[float, float]:
    """The norms that LAPACK's tests call near underflow and near overflow."""
    small = 0.25 * float(np.finfo(dtype).tiny) / eps(dtype)
    return small, 1 / small


def spectra(n: int, dtype) -> dict[str, np.ndarray]:
    small, large = edges(dtype)
    tiny = eps(dtype)
    return {
        "condition 1": np.ones(n),
        "condition 1e2": np.geomspace(1, 1e-2, n),
        "condition 1/eps, geometric": np.geomspace(1, tiny, n),
        "condition 1/eps, arithmetic": np.linspace(1, tiny, n),
        "condition 1/eps, one small": np.r_[np.ones(n - 1), tiny],
        "condition 1/eps, one large": np.r_[1.0, np.full(n - 1, tiny)],
        "clustered": 1 + tiny * np.arange(n),
        "two clusters": np.r_[np.ones(n // 2), np.full(n - n // 2, 0.5)] * (1 + tiny * np.arange(n)),
        "near underflow": np.geomspace(1, 0.5, n) * small,
        "near overflow": np.geomspace(1, 0.5, n) * large,
        "rank-deficient": np.r_[np.ones(n // 2), np.zeros(n - n // 2)],
        "zero": np.zeros(n),
    }


def orthogonal(n: int, dtype, rng) -> np.ndarray:
    return np.linalg.qr(random((n, n), np.result_type(dtype, np.float64), rng))[0]


def general(n: int, dtype, rng) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Names of types, and functions that make the matrices."""
    yield "random", lambda: random((n, n), dtype, rng)
    if n < 2:
        return
    for name, values in spectra(n, dtype).items():
        yield name, lambda values=values: (orthogonal(n, dtype, rng) * values) @ orthogonal(n, dtype, rng)
    steps = np.geomspace(1, eps(dtype) ** 2, n)
    yield "rows graded", lambda: random((n, n), dtype, rng) * steps[:, None]
    yield "columns graded up", lambda: random((n, n), dtype, rng) * steps[::-1]
    yield "graded both ways", lambda: random((n, n), dtype, rng) * steps[:, None] / steps
    yield "upper", lambda: np.triu(random((n, n), dtype, rng))
    yield "lower", lambda: np.tril(random((n, n), dtype, rng))
    yield "diagonal", lambda: np.diag(random((n,), dtype, rng))
    yield "first column 0", lambda: random((n, n), dtype, rng) * (np.arange(n) > 0)
    yield "last column 0", lambda: random((n, n), dtype, rng) * (np.arange(n) < n - 1)
    yield "half the columns 0", lambda: random((n, n), dtype, rng) * (np.arange(n) <= n // 2)
    yield (
        "Kahan",
        lambda: np.sin(1.2) ** np.arange(n)[:, None] * (np.eye(n) - np.cos(1.2) * np.triu(np.ones((n, n)), 1)),
    )
    yield "growth of elements", lambda: wilkinson(min(n, 20))
    yield "Jordan", lambda: np.eye(n, k=1) + 0.5 * np.eye(n)
    yield "companion", lambda: np.eye(n, k=-1) + np.outer(np.ones(n), np.eye(n)[-1])


def tall(n: int, dtype, rng) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Matrices [9 n, n], some of which their Gram matrices orthogonalize, and some not."""
    m = 9 * n
    for name, make in general(n, dtype, rng):
        yield name, lambda make=make: np.linalg.qr(random((m, n), np.result_type(dtype, np.float64), rng))[0] @ make()
    if n < 2:
        return
    steps = np.geomspace(1, eps(dtype) ** 2, m)[:, None]
    yield "rows graded", lambda: random((m, n), dtype, rng) * steps
    yield "rows graded up", lambda: random((m, n), dtype, rng) * steps[::-1]
    yield "rows and columns graded", lambda: random((m, n), dtype, rng) * steps * np.geomspace(1, eps(dtype), n)
    yield "one large row", lambda: random((m, n), dtype, rng) * np.where(np.arange(m) == n, 1 / eps(dtype), 1)[:, None]
    yield "few rows that are not 0", lambda: random((m, n), dtype, rng) * (np.arange(m) < n // 2)[:, None]


def wilkinson(n: int) -> np.ndarray:
    a = np.tril(np.full((n, n), -1.0), -1) + np.eye(n)
    a[:, -1] = 1
    return a


def hermitian(n: int, dtype, rng) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    yield "random", lambda: symmetric(random((n, n), dtype, rng))
    if n < 2:
        return
    for name, values in spectra(n, dtype).items():
        for sign in ("positive", "both signs"):
            signs = 1 if sign == "positive" else rng.choice([-1, 1], n)
            yield f"{name}, {sign}", lambda v=values * signs: symmetric(turned(orthogonal(n, dtype, rng), v))
    steps = np.geomspace(1, eps(dtype) ** 2, n)
    yield "graded", lambda: symmetric(random((n, n), dtype, rng)) * steps[:, None] * steps
    yield "graded up", lambda: symmetric(random((n, n), dtype, rng)) * steps[::-1, None] * steps[::-1]
    yield "1-2-1", lambda: 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    for glue in (1e-3, 1e-8, 1.0 * eps(dtype)):
        yield f"glued Wilkinson {glue:.0e}", lambda glue=glue: glued(n, glue)


def symmetric(a: np.ndarray) -> np.ndarray:
    return a / 2 + a.conj().T / 2


def turned(q: np.ndarray, values: np.ndarray) -> np.ndarray:
    scale = float(np.abs(values).max()) or 1.0
    return (q * (values / scale)) @ q.conj().T * scale


def glued(n: int, glue: float, size: int = 21) -> np.ndarray:
    """Wilkinson's matrices W21+ behind each other, with small elements between them."""
    at = np.arange(n) % size
    beside = np.where(at[1:] == 0, glue, 1.0)
    return np.diag(abs(at - size // 2.0)) + np.diag(beside, 1) + np.diag(beside, -1)


def unit(a: np.ndarray) -> float:
    """The power of two that brings a matrix to norms near 1, so that residuals neither overflow nor underflow."""
    largest = float(np.abs(a).max(initial=0))
    return 2.0 ** -np.frexp(largest)[1] if largest else 1.0


# ------------------------------------------------------------------------------------------------ ratios
def difference(found, a, dtype) -> float:
    """|found - a| / (n eps |a|), of matrices that were scaled alike."""
    scale = max(1, *a.shape) * eps(dtype) * norm(a)
    value = norm(found.astype(np.result_type(found, np.float64)) - a)
    return value / scale if value else 0.0


def orthogonality(q) -> float:
    wide = q.astype(np.result_type(q, np.float64))
    return norm(wide.conj().T @ wide - np.eye(q.shape[1])) / (max(1, *q.shape) * eps(q.dtype))


def of_lu(a, x, c, rng):
    factor = linalg.lu_factor(x)
    lower, upper = (f.gather() for f in factor.factors())
    yield difference(lower @ (upper * c), a[factor.permutation] * c, a.dtype)
    if factor.zero is not None:
        with pytest.raises(np.linalg.LinAlgError, match="the matrix is singular"):
            linalg.inv(x)
        return
    b = random((len(a), 2), a.dtype, rng)
    y = linalg.solve(x, pla.distribute(b, x.grid, Layout(None, None))).gather()
    growth = max(1.0, norm(abs(lower) @ abs(upper * c)) / norm(a * c)) if len(a) else 1.0
    for ratio in backward(a, b, y, c):
        yield ratio / growth


def backward(a, b, y, c):
    """|A y - b| / (n eps |A| |y|), where y is a number."""
    scale = unit(y)
    if np.isfinite(y).all() and len(a):
        product = (a * c) @ (y * scale) - b * (c * scale)
        yield norm(product) / (len(a) * eps(a.dtype) * norm(a * c) * norm(y * scale))


def of_qr(a, x, c, rng):
    q, r = (f.gather() for f in linalg.qr(x))
    yield difference(q @ (r * c), a * c, a.dtype)
    yield orthogonality(q)


def of_pivoted_qr(a, x, c, rng):
    q, r, p = (f.gather() for f in linalg.qr(x, pivoting=True))
    sizes = np.abs(np.diag(r)) * c
    rounding = BOUND * np.sqrt(len(sizes)) * eps(a.dtype)  # equal sizes of LAPACK's own R rise by 45 eps at n = 1021
    assert (sizes[1:] <= sizes[:-1] * (1 + rounding) + rounding * sizes[:1]).all()
    yield difference(q @ (r * c), (a * c)[:, p], a.dtype)
    yield orthogonality(q)


def of_svd(a, x, c, rng):
    u, s, vh = (f.gather() for f in linalg.svd(x))
    yield difference((u * (s * c)) @ vh, a * c, a.dtype)
    yield orthogonality(u)
    yield orthogonality(vh)
    yield difference(linalg.svdvals(x).gather()[:, None] * c, s[:, None] * c, a.dtype)


def of_tall_svd(a, x, c, rng):
    u, s, vh = (f.gather() for f in linalg.svd(x, full_matrices=False))
    yield difference((u * (s * c)) @ vh, a * c, a.dtype)
    yield orthogonality(u)
    yield orthogonality(vh)
    yield difference(linalg.svdvals(x).gather()[:, None] * c, s[:, None] * c, a.dtype)
    yield difference(s[:, None] * c, np.linalg.svd(a * c, compute_uv=False)[:, None], a.dtype)


def of_eig(a, x, c, rng):
    w, v = (f.gather() for f in linalg.eig(x))
    w = w * c
    scale = max(1, len(a)) * eps(a.dtype) * norm(a * c)
    residual = norm((a * c) @ v - v * w)
    yield residual / scale if residual else 0.0
    yield np.abs(np.linalg.norm(v, axis=0) - 1).max(initial=0) / (max(1, len(a)) * eps(a.dtype))


def of_polar(a, x, c, rng):
    u, p = (f.gather() for f in linalg.polar(x))
    yield difference(u @ (p * c), a * c, a.dtype)
    yield orthogonality(u)


def of_eigh(a, x, c, rng):
    w, v = (f.gather() for f in linalg.eigh(x))
    assert (np.diff(w) >= 0).all()
    yield difference((v * (w * c)) @ v.conj().T, a * c, a.dtype)
    yield orthogonality(v)
    yield np.abs(linalg.eigvalsh(x).gather() * c - w * c).max(initial=0) / (
        max(1, len(a)) * eps(a.dtype) * (norm(a * c) or 1)
    )


def of_cholesky(a, x, c, rng):
    try:
        factor = linalg.cho_factor(x)
    except np.linalg.LinAlgError as error:
        minor = int(str(error).split("order ")[1].split()[0])
        wide = a[:minor, :minor].astype(np.result_type(a, np.float64)) * c
        least = np.linalg.eigvalsh(wide).min()
        assert least <= 10 * len(a) * eps(a.dtype) * norm(wide), (minor, least)
        return
    lower = factor.L.gather()
    assert (np.diag(lower).real > 0).all()
    root = 2.0 ** (np.log2(c) // 2)
    yield difference((lower * root) @ (lower * root).conj().T, a * root**2, a.dtype)
    b = random((len(a), 2), a.dtype, rng)
    yield from backward(a, b, factor.solve(pla.distribute(b, x.grid, Layout(None, None))).gather(), c)


ROUTINES = {
    "lu": (general, of_lu), "qr": (general, of_qr), "svd": (general, of_svd), "eig": (general, of_eig),
    "polar": (general, of_polar), "eigh": (hermitian, of_eigh), "cholesky": (hermitian, of_cholesky),
    "qr with pivoting": (general, of_pivoted_qr), "tall svd": (tall, of_tall_svd),
}  # fmt: skip


#: Where balancing, as LAPACK's `geev` does it, trades the residual for the accuracy of small eigenvalues.
UNBALANCED = {("eig", "columns graded up"), ("eig", "rows graded")}


#: How many matrices of a large size each routine gets on each grid; of smaller ones it gets a share of all.
LARGE = {300: 6, 1021: 2, 2048: 1}


def chosen(types, sizes, share, rng):
    """A seeded sample of types, sizes and dtypes; all types of the smallest matrices have few elements to differ in."""
    for n in sizes:
        every = ((dtype, name, make) for dtype in DTYPES for name, make in types(n, dtype, rng))
        if n in LARGE:
            every = [each for each in every if each[1] != "growth of elements"]  # of 20 rows at most
            taken = [every[i] for i in rng.choice(len(every), LARGE[n], replace=False)]
        else:
            taken = (each for each in every if rng.random() < share / (1 + n / 20))
        for dtype, name, make in taken:
            yield n, dtype, name, make().astype(dtype)


@pytest.mark.ranks(1, 2, 3, 4, 6, 8, 12)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("routine", ROUTINES)
def test_ratios(grid, routine, full):
    types, ratios = ROUTINES[routine]
    rng = np.random.default_rng(sorted(ROUTINES).index(routine) + 10 * grid.size)
    every = layouts(grid.axes, 2, partial=False)
    large = (300,) if routine == "tall svd" else tuple(LARGE)
    sizes = (0, 1, 2, 7, 97, *large) if full else (0, 1, 2, 7, 97)
    worst: tuple = (0.0,)
    for n, dtype, name, a in chosen(types, sizes, 0.08 / grid.size**0.5, rng):
        if (routine, name) in UNBALANCED:
            continue
        layout = every[rng.integers(len(every))]
        x = pla.distribute(a, grid, layout)
        for i, ratio in enumerate(ratios(a, x, unit(a), rng)):
            assert ratio < BOUND, (routine, name, n, dtype, layout, i, ratio)
            worst = max(worst, (float(ratio), name, n, str(dtype)))
    print(f"worst ratio of {routine} on {grid.sizes}: {worst}")  # shown by -s


def test_eigenvectors_of_tridiagonal_matrices(grid):
    """Divide and conquer, of which each rank has some rows, of what is hard for it: ties, clusters, glue, grading."""
    if not grid.inside:
        return
    rng = np.random.default_rng(7)
    for n in (1, 2, 3, 65, 131, 200):
        for dtype in ("float32", "float64"):
            tiny = eps(dtype)
            steps = np.geomspace(1, tiny**2, n)
            wells = glued(n, tiny)
            for name, d, e in (
                ("random", rng.standard_normal(n), rng.standard_normal(n)),
                ("1-2-1", np.full(n, 2.0), np.ones(n)),
                ("identity", np.ones(n), np.zeros(n)),
                ("clustered", 1 + tiny * np.arange(n), tiny * rng.standard_normal(n)),
                ("glued", np.diag(wells), np.r_[np.diag(wells, 1), 0]),
                ("glued 1e-8", np.diag(wells), np.maximum(np.r_[np.diag(wells, 1), 0], 1e-8)),
                ("graded", steps, steps),
                ("graded up", steps[::-1] * 1e30, steps[::-1] * 1e30),
                ("whole numbers", rng.integers(-1, 2, n), rng.integers(-1, 2, n)),
            ):
                d, e = d.astype(dtype), e[1:].astype(dtype)
                mine = np.arange(grid.rank, n, grid.size)
                values, rows = tridiagonal_vectors(d, e, mine, grid.everyone, lambda w: slice(0, len(w)))
                z = np.zeros((n, n), dtype)
                z[mine] = rows
                grid.everyone.all_reduce(z)
                wide = values.astype(float)
                assert (np.diff(values) >= 0).all()
                a = np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
                assert difference((z * wide) @ z.T, a.astype(float), d.dtype) < BOUND, (name, n, dtype)
                assert orthogonality(z) < BOUND, (name, n, dtype)


def test_singular_vectors_of_bidiagonal_matrices(grid):
    """Divide and conquer by rows of what is hard for it: ties, zeros, one direction lost, blocks of other sizes."""
    if not grid.inside:
        return
    rng = np.random.default_rng(8)
    for n in (1, 2, 3, 65, 131, 200):
        for dtype in ("float32", "float64"):
            tiny, few = eps(dtype), np.arange(n) < n // 2
            d, e = rng.standard_normal((2, n))
            steps = np.geomspace(1, tiny**2, n)
            for name, d, e in (
                ("random", d, e),
                ("identity", np.ones(n), np.zeros(n)),
                ("zeros", np.zeros(n), np.zeros(n)),
                ("a shift", np.zeros(n), np.ones(n)),
                ("1-2", np.full(n, 2.0), np.ones(n)),
                ("clustered", 1 + tiny * d, tiny * e),
                ("zeros on the diagonal", np.where(np.arange(n) % 3, d, 0), e),
                ("a block of zeros", np.where(few, 0, d), np.where(few, 0, e)),
                ("a small block", np.where(few, tiny**2 * d, d), np.where(few, tiny**2 * e, e)),
                ("wilkinson", abs(np.arange(n) - n // 2), np.ones(n)),
                ("graded", d * steps, e * steps),
                ("graded up", d * steps[::-1] * 1e30, e * steps[::-1] * 1e30),
            ):  # fmt: skip
                d, e = d.astype(dtype), e[: n - 1].astype(dtype)
                mine = np.arange(grid.rank, n, grid.size)
                values, *rows = bidiagonal_vectors(d, e, mine, grid.everyone)
                u, v = np.zeros((2, n, n), dtype)
                u[mine], v[mine] = rows
                for z in (u, v):
                    grid.everyone.all_reduce(z)
                    assert orthogonality(z) < BOUND, (name, n, dtype)
                assert (np.diff(values) <= 0).all()
                assert (values >= 0).all()
                a = (np.diag(d) + np.diag(e, 1)).astype(float)
                assert difference((u * values.astype(float)) @ v.T, a, d.dtype) < BOUND, (name, n, dtype)
