"""Arrays on GPUs are factored on GPUs: by CuPy, or by its stand-in, which counts copies between host and device."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg, tunables
from parlinalg.linalg import kernels
from parlinalg.linalg.panels.lu import _regular
from tests.cases import grids
from tests.linalg.test_factors import random

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.one_in(8)

N, B = 128, 8


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


@pytest.fixture
def aware(monkeypatch):
    """MPI reads the memory of GPUs, so that messages are no copies to the host."""
    monkeypatch.setattr("parlinalg.comm.mpi.READS_GPU", True)
    monkeypatch.setenv("STANDIN_CUDA_AWARE", "1")


def placed(a, grid):
    return pla.distribute(a, grid, grid.default_layout(a.shape))


def inputs(grid, dtype=np.float64):
    rng = np.random.default_rng(0)
    a, b, tall = (rng.standard_normal(shape).astype(dtype) for shape in ((N, N), (N, 3), (8 * N, B)))
    if np.dtype(dtype).kind == "c":
        a += 1j * rng.standard_normal(a.shape).astype(a.real.dtype)
    one = np.eye(N, dtype=dtype)
    return [placed(x, grid) for x in (a, a @ a.conj().T / N + one, np.triu(a) + N * one, b, tall)]


WORK = {
    "cholesky": lambda a, s, t, b, tall: [linalg.cholesky(s)],
    "cho_factor": lambda a, s, t, b, tall: [linalg.cho_factor(s, B).solve(b)],
    "lu": lambda a, s, t, b, tall: [(f := linalg.lu_factor(a, B)).solve(b), f.solve(b, adjoint=True), *f.factors()],
    "solve": lambda a, s, t, b, tall: [linalg.solve(a, b)],
    "inv": lambda a, s, t, b, tall: [linalg.inv(a)],
    "det": lambda a, s, t, b, tall: [linalg.det(a), *linalg.slogdet(a)],
    "qr": lambda a, s, t, b, tall: [abs((f := linalg.qr_factor(a, B)).R), f.Q() @ f.R, f.solve(b)],
    "tall qr": lambda a, s, t, b, tall: [(f := linalg.qr(tall)).Q @ f.R, abs(f.R)],
    "solve_triangular": lambda a, s, t, b, tall: [linalg.solve_triangular(t, b, adjoint=c) for c in (False, True)],
}  # fmt: skip
ALONE = {
    "eigh": lambda a, s, t, b, tall: [linalg.eigh(s).eigenvalues],
    "svd": lambda a, s, t, b, tall: [linalg.svd(a).S],
    "lstsq": lambda a, s, t, b, tall: [linalg.lstsq(tall, tall[:, :2]).x],
}
"""What computes on the device where one rank has the whole matrix."""


@pytest.mark.skipif(
    not hasattr(cupy.cuda, "copied"), reason="cannot be had here: the count of copies, of the stand-in for CuPy"
)
@pytest.mark.parametrize("name", [*WORK, *ALONE])
def test_no_matrix_goes_to_the_host(grid, aware, name):
    """To the host and back go pivots, diagonals, tiles of panels and single numbers, never as much as a rank's tiles.

    The identity of which `inv` solves for is made on the host.
    """
    if name in ALONE and grid.size > 1:
        return
    given = inputs(grid)
    cupy.cuda.copied.clear()
    {**WORK, **ALONE}[name](*given)
    for way in ("out", "in") if name != "inv" else ("out",):
        sizes = [count for kind, count in cupy.cuda.copied if kind == way]
        assert max(sizes, default=0) <= max(B * B, 3 * N) * 8, (way, max(sizes))
        assert sum(sizes) <= N * N * 8 / (4 * grid.size), (way, sum(sizes))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_results_are_those_of_the_host(grid, world, dtype):
    host = pla.Grid(dict(grid.sizes), world, "numpy", idle=True)
    tol = 1e3 * N * float(np.finfo(dtype).eps)
    for name, work in WORK.items():
        for mine, theirs in zip(work(*inputs(grid, dtype)), work(*inputs(host, dtype)), strict=True):
            assert mine.dtype == theirs.dtype
            got, want = mine.gather(), theirs.gather()
            np.testing.assert_allclose(got, want, rtol=tol, atol=tol * np.abs(want).max(initial=0), err_msg=name)


def test_singular_matrices(grid):
    """A pivot of 0 makes NaNs of cuSOLVER's factors; such a panel is factored on the host."""
    a = np.random.default_rng(1).standard_normal((40, 40))
    a[:, 7] = a[:, 3]
    a[:, 20:] = 0
    x = placed(a, grid)
    factor = linalg.lu_factor(x, B)
    np.testing.assert_array_equal(x.gather(), a)
    lower, upper = (f.gather() for f in factor.factors())
    np.testing.assert_allclose(lower @ upper, a[factor.permutation], atol=1e-13)
    assert factor.zero is not None
    assert linalg.det(placed(a, grid)).gather() == 0
    with pytest.raises(np.linalg.LinAlgError, match="the matrix is singular"):
        linalg.inv(placed(np.zeros((5, 5)), grid))


def test_minors(xp):
    """The order of the first minor that is not positive, of which cuSOLVER tells CuPy's callers nothing."""
    for n, first in ((1, 1), (2, 2), (9, 1), (9, 5), (9, 9)):
        a = np.diag(np.where(np.arange(n) == first - 1, -1.0, 1.0))
        assert kernels.cholesky(xp.asarray(a)) == first
    a = xp.asarray(2 * np.eye(3))
    assert kernels.cholesky(a) == 0
    np.testing.assert_allclose(a.get(), np.sqrt(2) * np.eye(3))


def test_panels_that_products_do_not_orthogonalize(grid):
    """They go through the tree, by Householder's reflections on the device."""
    rng = np.random.default_rng(2)
    a = rng.standard_normal((60, 6)) @ rng.standard_normal((6, 20)) + 1e-12 * rng.standard_normal((60, 20))
    factor = linalg.qr_factor(placed(a, grid), B)
    assert any(grid.world.share(bool(factor._work.trees if grid.inside else False)))
    q, r = factor.Q().gather(), factor.R.gather()
    np.testing.assert_allclose(q @ r, a, atol=1e-13)
    np.testing.assert_allclose(q.T @ q, np.eye(20), atol=1e-13)


@pytest.mark.parametrize("name", ["cholesky", "inv", "solve"])
def test_failures_in_stacks_are_errors(grid, name):
    """CuPy ignores what cuSOLVER reports unless it is asked to raise it, and then names routines of NVIDIA's."""
    a = np.stack([np.eye(3)] * 12)
    a[5] = -np.eye(3) if name == "cholesky" else 0
    x = placed(a, grid)
    words = "leading minor of order 1 is not positive" if name == "cholesky" else "[Ss]ingular"
    with pytest.raises(np.linalg.LinAlgError, match=words):
        linalg.solve(x, x) if name == "solve" else getattr(linalg, name)(x)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "three"])
def test_matrices_whose_squares_leave_the_range(xp, dtype, lead):
    """LAPACK's drivers scale them, cuSOLVER's do not; nor is Jacobi's method, for stacks, as exact."""
    rng, n = np.random.default_rng(4), 40
    a = random((*lead, n, n), dtype, rng)
    given = (a + a.conj().swapaxes(-1, -2)) / 2
    limits = np.finfo(dtype)
    tol, own = 10 * n * float(limits.eps), kernels.routines(xp.asarray(a))
    for power in (limits.minexp + 30, 0, limits.maxexp - 12):
        size = 2.0**power
        s = xp.asarray((given * size).astype(dtype))
        w, z = own.eigh(xp.tril(s))
        u, values, vh = own.svd(s)
        for v, left, right in ((w, z, z.conj().swapaxes(-1, -2)), (values, u, vh)):
            found = left.get() * (v.get() / size)[..., None, :] @ right.get()
            np.testing.assert_allclose(found, given, atol=tol * 10)
            assert v.dtype == limits.dtype
        want = np.sort(abs(w.get() / size))[..., ::-1]
        for found in (values, own.svd(s, compute_uv=False)):
            np.testing.assert_allclose(found.get() / size, want, atol=tol * 10)
        np.testing.assert_allclose(own.eigvalsh(xp.tril(s)).get() / size, w.get() / size, atol=tol * 10)
        if not lead:
            x = own.lstsq(s, s, None)[0].get()
            np.testing.assert_allclose(x, np.eye(n), atol=1e4 * tol)


def test_no_right_hand_sides(xp):
    a, none = xp.asarray(np.stack([np.eye(3)] * 2)), xp.zeros((2, 3, 0))
    assert kernels.routines(a).solve(a, none).shape == none.shape
    assert kernels.triangles(a, none, lower=True).shape == none.shape


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_substitution(xp, dtype, right, adjoint, lower, unit):
    """In place, for every order of elements and every triangle."""
    rng = np.random.default_rng(3)
    t, b = (rng.standard_normal((5, n)).astype(dtype) for n in (5, 5))
    t = (t + 1j * t[::-1] if dtype == "complex128" else t).astype(dtype) + 5 * np.eye(5, dtype=dtype)
    full = (np.tril if lower else np.triu)(t)
    full[range(5), range(5)] = 1 if unit else full.diagonal()
    full = full.conj().T if adjoint else full
    want = b @ np.linalg.inv(full) if right else np.linalg.solve(full, b)
    for order in "CF":
        for wide in (False, True):
            held = xp.zeros((5, 9), dtype)
            x = held[:, 2:7] if wide else xp.zeros((5, 5), dtype)
            x[...] = xp.asarray(b)
            kernels.substitute(
                xp.asarray(np.array(t, order=order)), x, right=right, lower=lower, adjoint=adjoint, unit=unit
            )
            np.testing.assert_allclose(x.get(), want, rtol=1e-4, atol=1e-5)
            assert not wide or not bool(held[:, :2].any() | held[:, 7:].any())


def test_zeros_on_the_diagonal_of_a_tile(xp):
    corner = xp.asarray(np.array([[2.0, 1.0], [0.5, 0.0]]))
    np.testing.assert_array_equal(_regular(corner).get(), [[2, 1], [0.5, 1]])


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("way", ["gesvd", "polar"])
def test_singular_vectors(grid, dtype, way, monkeypatch):
    """Of square matrices by the polar decomposition, of tall and wide ones by R, which LAPACK has where it is small."""
    first = {4: 1, 8: 1} if way == "polar" else {4: 10**6, 8: 10**6}
    monkeypatch.setattr(tunables, "POLAR_SVD", first)
    for shape, small in (((40, 40), 256), ((8, 200), 256), ((200, 8), 256), ((200, 8), 4), ((200, 8), 8)):
        monkeypatch.setattr(tunables, "HOST_SVD", small)
        for size in (1.0, 0.25 * float(np.finfo(dtype).tiny) / float(np.finfo(dtype).eps)):
            a = random(shape, dtype, np.random.default_rng(0)) * np.dtype(dtype).type(0).real.dtype.type(size)
            x, bound = placed(a, grid), 10 * max(shape) * float(np.finfo(dtype).eps)
            u, s, vh = (f.gather() for f in linalg.svd(x, full_matrices=False))
            assert u.dtype == vh.dtype == a.dtype
            s = s / size
            np.testing.assert_allclose((u * s) @ vh, a / size, rtol=0, atol=bound * s[0])
            for each in (u.conj().T @ u, vh @ vh.conj().T):
                np.testing.assert_allclose(each, np.eye(len(s)), atol=bound)
            np.testing.assert_allclose(linalg.svdvals(x).gather() / size, s, rtol=0, atol=bound * s[0])
    for shape in ((40, 40), (200, 8)):
        for function in (linalg.svd, linalg.svdvals):
            with pytest.raises(ValueError, match="NaNs"):
                function(placed(np.full(shape, np.nan, dtype), grid))
