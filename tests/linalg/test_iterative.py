"""Iterative methods against the serial answers, on every grid and in any layout."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import parlinalg as pla
from parlinalg.layout import Layout
from parlinalg.linalg import cg, eigsh, gmres, lobpcg, lsqr, minres, range_finder, svd_lowrank, svds
from parlinalg.linalg.iterative import lanczos
from tests.cases import grids, layouts

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(8)]


@pytest.fixture(scope="module", params=[0, 1], ids=["one axis", "two axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def random(*shape, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def definite(n, dtype=np.float64, low=1.0, seed=1):
    """A Hermitian matrix of eigenvalues from `low` to 30, and those."""
    q = np.linalg.qr(random(n, n, dtype=dtype, seed=seed))[0]
    w = np.linspace(low, 30, n)
    return ((q * w) @ q.conj().T).astype(dtype), w


def placed(grid, values, seed):
    """The array in a layout of this grid that the seed chooses."""
    every = layouts(grid.axes, values.ndim)
    return pla.distribute(values, grid, every[seed % len(every)])


def stacked(x, n):
    return pla.stack([x] * n)


def close(got, want, error):
    got = got.gather() if hasattr(got, "gather") else got
    if got is not None:
        scale = max(1e-300, float(np.abs(want).max(initial=0)))
        assert got.shape == np.shape(want)
        assert np.abs(got - want).max(initial=0) <= error * scale


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [1, 29])
def test_systems(grid, n, dtype):
    a, _ = definite(n, dtype)
    b = random(n, dtype=dtype, seed=2)
    error = {"float32": 1e-4, "complex64": 1e-3}.get(dtype, 1e-9)
    rtol = error / 100
    mixed = a - np.eye(n, dtype=dtype) * 11.3  # indefinite
    odd = a + 3 * random(n, n, dtype=dtype, seed=5) / max(1, n) ** 0.5
    for seed in range(2):
        rhs = placed(grid, b, seed)
        for function, matrix, options in (
            (cg, a, {}), (cg, a, {"pipelined": True}), (minres, mixed, {}), (gmres, odd, {"restart": 30}),
            (gmres, mixed, {"restart": n}),
        ):  # fmt: skip
            x, info = function(placed(grid, matrix, 3 * seed + 1), rhs, **{"rtol": rtol, "maxiter": 400, **options})
            assert info == 0
            assert x.layout == rhs.layout.with_partial(())
            assert x.dtype == b.dtype
            close(x, np.linalg.solve(matrix, b), 50 * error)
    columns, info = cg(placed(grid, a, 1), placed(grid, b[:, None], 2), rtol=rtol)
    close(columns, np.linalg.solve(a, b[:, None]), 50 * error)


def test_preconditioners_guesses_callbacks_and_functions(grid):
    n = 30
    a = np.diag(np.linspace(1, 1e3, n)) + definite(n)[0]
    b, inverse = random(n, seed=3), np.diag(1 / np.diag(a))
    A, B, M = placed(grid, a, 1), placed(grid, b, 1), placed(grid, inverse, 2)
    want = np.linalg.solve(a, b)
    for function in (cg, minres, gmres):
        plain, better = [], []
        options = {"restart": n} if function is gmres else {}
        function(A, B, rtol=1e-10, callback=plain.append, **({"restart": 5} if function is gmres else {}))
        x, info = function(lambda v: A @ v, B, rtol=1e-10, M=M, callback=better.append, **options)
        assert info == 0
        close(x, want, 1e-8)
        assert 0 < len(better) < len(plain)
        if function is not gmres:
            close(better[-1], x.gather(), 1e-15)
        again, info = function(A, B, x, rtol=1e-6, maxiter=0)
        assert info == 0
        assert function(A, B, maxiter=0)[1] == 1  # which is not solved
        close(again, x.gather(), 0)
        assert function(A, B, rtol=1e-14, maxiter=2, **({"restart": 1} if function is gmres else {}))[1] == 2
    x, info = cg(A, B, rtol=1e-10, M=lambda r: M @ r, pipelined=True)
    close(x, want, 1e-7)
    assert not pla.any(cg(A, B * 0)[0])


def test_minres_without_a_solution(grid):
    """Of singular matrices and any b x is a least-squares solution that is no longer than it must be."""
    n = 40
    q = np.linalg.qr(random(n, n))[0]
    path = np.diag(np.r_[1.0, 2 * np.ones(n - 2), 1.0]) - np.eye(n, k=1) - np.eye(n, k=-1)
    b = random(n, seed=3)
    for a in (
        np.diag(np.r_[0, 0, np.linspace(-1, 2, n - 2)]),
        q * np.r_[0, np.linspace(1, 9, n - 1)] @ q.T,
        path,
        0 * q,
    ):
        for dtype, accuracy in (("float64", 1e-7), ("float32", 1e-3)):
            A, B = placed(grid, a.astype(dtype), 1), placed(grid, b.astype(dtype), 1)
            for m in (np.ones(n), np.linspace(1, 2, n)):
                more = {} if m[0] == m[-1] else {"M": placed(grid, np.diag(m).astype(dtype), 2)}
                x, info = minres(A, B, rtol=1e-6, **more)
                assert info == -1
                x, half = x.gather(), np.sqrt(m)
                r, least = b - a @ x, b - a @ (np.linalg.pinv(half[:, None] * a) @ (half * b))
                assert np.linalg.norm(half * r) <= (1 + accuracy) * np.linalg.norm(half * least)
                assert np.linalg.norm(a @ (m * r)) <= accuracy * np.linalg.norm(a, 2) * np.linalg.norm(r)
                assert np.linalg.norm(x) <= 1e4
    both = np.stack([b, path @ b], 1)
    x, info = minres(placed(grid, path, 1), placed(grid, both, 2), rtol=1e-10)
    assert info == -1  # of the first system; the second has solutions
    close(path @ x.gather()[:, 1], both[:, 1], 1e-8)
    assert minres(placed(grid, path, 1), placed(grid, path @ b, 2), rtol=1e-10)[1] == 0
    assert minres(placed(grid, path, 1), placed(grid, both, 2), rtol=1e-10, maxiter=5)[1] == 5


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("options", [{}, {"pipelined": True}, {"M": 2.0}], ids=str)
def test_only_what_is_solved_is_called_so(grid, dtype, options):
    """Of A with A b = 0 but for rounding, recurrences tell that a very long x solves A x = b."""
    for n in (3, 6):
        laplacian = (n * np.eye(n) - np.ones((n, n))).astype(dtype)
        other = (np.eye(n) * np.linspace(1, 3, n)).astype(dtype)
        for v in (1.0, 0.7, 1 / np.sqrt(n), np.pi):
            b = np.full(n, v, dtype)
            A, B = placed(grid, laplacian, n), placed(grid, b, n)
            for function in (cg, minres):
                more = dict(options)
                if "M" in more:
                    more["M"] = placed(grid, np.eye(n, dtype=dtype) * more["M"], n)
                if function is minres and "pipelined" in more:
                    continue
                for first in (None, placed(grid, np.arange(n).astype(dtype), n)):
                    try:
                        x, info = function(A, B, first, **more)
                    except np.linalg.LinAlgError as error:
                        assert function is cg
                        assert "positive definite A" in str(error)  # noqa: PT017
                    else:
                        assert info != 0
                        if function is minres:
                            assert np.linalg.norm(b - laplacian @ x.gather()) <= 10 * n * np.linalg.norm(b)
            many = placed(grid, np.stack([laplacian, other]), n)
            x, info = minres(many, placed(grid, np.stack([b, b])[..., None], n), rtol=1e-4)
            assert info != 0
            close(x[1, :, 0], b / np.diag(other), 1e-3)


def test_residuals_of_recurrences_that_drift(grid):
    """Where recurrences have lost digits they begin anew, until the residual is what was asked for."""
    n = 40
    for size in (1e6, 1e9):
        a = np.diag(np.geomspace(1 / size, 1, n))
        b = a @ random(n, seed=4)
        for function, more in ((cg, {}), (cg, {"pipelined": True}), (minres, {})):
            for rtol in (1e-6, 1e-9):
                x, info = function(placed(grid, a, 1), placed(grid, b, 1), rtol=rtol, maxiter=2000, **more)
                left = np.linalg.norm(b - a @ x.gather()) / np.linalg.norm(b)
                assert (left <= 1.1 * rtol) == (info == 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_minres_that_begins_anew_has_rotations_of_its_own(grid, dtype):
    """Those of the steps before it, here with two products that are too long, belong to another first vector."""
    n, rtol = 12, 1e-4
    q, b = np.linalg.qr(random(n, n, dtype=dtype))[0], random(n, dtype=dtype, seed=3)
    for values in ((-2.0, 1.0), (2.0, -1.0), (1.0, 3.0)):
        a = ((q * np.repeat(values, n // 2)) @ q.conj().T).astype(dtype)
        A, products, steps = placed(grid, a, 1), [], []

        def times(x, A=A, products=products):
            products.append(x)
            return A @ x * (1.01 if len(products) <= 2 else 1.0)

        x, info = minres(times, placed(grid, b, 2), rtol=rtol, callback=steps.append)
        assert info == 0
        assert len(steps) == 4  # two from zero, and two from the residual that is left
        assert np.linalg.norm(b - a @ x.gather()) <= 1.01 * rtol * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_residuals_of_ill_conditioned_systems(grid, dtype):
    """What is called solved has the residual that was asked for, but for what rounding x makes of it."""
    n, rtol = 28, 1e-7
    for seed in range(6):
        q = np.linalg.qr(random(n, n, dtype=dtype, seed=seed))[0]
        b, signs = random(n, dtype=dtype, seed=seed + 50), np.where(random(n, seed=seed) > 0, 1, -1)
        for function, size, indefinite, more in (
            (minres, 3e6, False, {}), (minres, 3e6, True, {}), (cg, 3e4, False, {"pipelined": True}),
        ):  # fmt: skip
            a = (q * np.geomspace(1 / size, 1, n) * (signs if indefinite else 1)) @ q.conj().T
            x, info = function(placed(grid, a, 1), placed(grid, b, 1), rtol=rtol, maxiter=2000, **more)
            assert info == 0
            left, rounded = np.linalg.norm(b - a @ x.gather()), 1e-14 * np.linalg.norm(x.gather())
            assert left <= 1.05 * rtol * np.linalg.norm(b) + rounded


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_residuals_of_clustered_eigenvalues(grid, dtype):
    """The diagonal of the triangle that `minres` makes tells too little of the condition."""
    n, rtol = 96, 1e-5
    for seed in range(8):
        q = np.linalg.qr(random(n, n, dtype=dtype, seed=seed))[0]
        w = np.repeat(np.geomspace(3e-7, 1, 4), n // 4) * (1 + random(n, seed=seed) / 1e3)
        a = (q * (w * np.where(random(n, seed=seed + 20) > 0, 1, -1))) @ q.conj().T
        b = random(n, dtype=dtype, seed=seed + 50)
        x, info = minres(placed(grid, a, 1), placed(grid, b, 1), rtol=rtol, maxiter=2000)
        assert info == 0
        assert np.linalg.norm(b - a @ x.gather()) <= 1.05 * rtol * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_pipelined_conjugate_gradients_converge_as_plain_ones(grid, dtype):
    """Vectors are computed anew before rounding shows in them, at most in every twentieth step."""
    for seed, (n, size, clusters, rtol, preconditioned) in enumerate((
        (60, 1e5, 60, 1e-7, False), (30, 3e6, 30, 1e-9, False), (56, 1e7, 4, 1e-8, True), (40, 1e3, 40, 1e-10, False),
    )):  # fmt: skip
        w = np.repeat(np.geomspace(1 / size, 1, clusters), n // clusters) * (1 + random(n, seed=seed) / 1e4)
        q = np.linalg.qr(random(n, n, dtype=dtype, seed=seed))[0]
        a, b = (q * w) @ q.conj().T, random(n, dtype=dtype, seed=seed + 50)
        A, B, steps, made = placed(grid, a, 1), placed(grid, b, 1), {}, []
        more = {"M": placed(grid, np.diag(1 / np.diag(a).real).astype(dtype), 2)} if preconditioned else {}

        def times(x, A=A, made=made):
            made.append(x)
            return A @ x

        for pipelined in (False, True):
            made.clear()
            callback = steps.setdefault(pipelined, []).append
            x, info = cg(times, B, rtol=rtol, maxiter=3000, pipelined=pipelined, callback=callback, **more)
            assert info == 0
            left, rounded = np.linalg.norm(b - a @ x.gather()), 1e-14 * np.linalg.norm(x.gather())
            assert left <= 1.01 * rtol * np.linalg.norm(b) + rounded
        assert len(steps[True]) <= 1.3 * len(steps[False]) + 40
        assert len(made) <= 1.2 * len(steps[True]) + 12


def test_pipelined_conjugate_gradients_of_inexact_products(grid):
    """The residual of the recurrences falls below the limit, b - A x does not: it is computed before 0 is returned."""
    for n, low in ((20, 1.0), (40, 1e-3)):
        a, b = definite(n, low=low)[0], random(n, seed=2)
        A, B = placed(grid, a, 1), placed(grid, b, 1)
        x, info = cg(lambda x: (A @ x).astype("float32").astype("float64"), B, rtol=1e-16, maxiter=600, pipelined=True)
        assert 0 < info < 600
        assert 1e-10 < np.linalg.norm(b - a @ x.gather()) / np.linalg.norm(b) < 1e-6


def test_first_guesses_beside_which_nothing_is_left_of_the_right_hand_side(grid):
    n = 5
    a, b = np.diag(np.linspace(1, 2, n)), np.arange(1.0, n + 1)
    A, B = placed(grid, a * 2.0**850, 1), placed(grid, b, 1)
    for function in (cg, minres, gmres):
        for first in (1.0, 1e-300, 0.0):
            x, info = function(A, B, placed(grid, np.full(n, first), 1), rtol=1e-10)
            assert info == 0
            close(x * 2.0**850, b / np.diag(a), 1e-9)
        one, small = placed(grid, a, 2), placed(grid, b / np.diag(a) * 1e-70, 1)
        x, info = function(one, B * 1e-290, placed(grid, np.full(n, 1e300), 1), rtol=1e-10)
        assert info == 0
        close(x * 1e290, b / np.diag(a), 1e-9)
        x, info = function(one, B * 1e-70, small, rtol=1e-10, maxiter=0)
        assert info == 0
        close(x, small.gather(), 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gmres_of_singular_matrices(grid, dtype):
    """With a part of b in the null space x may grow without bound; 0 is returned of what is solved only."""
    for n, part in ((5, 1.0), (8, 1e-3), (20, 1.0), (20, 1e-3), (20, 0.0)):
        q = np.linalg.qr(random(n, n, seed=n))[0]
        a = (q * np.r_[0, np.linspace(1, 3, n - 1)]) @ q.T
        a = ((a + a.T) / 2).astype(dtype)
        b = (part * q[:, 0] + (part < 1) * (a @ random(n, seed=9))).astype(dtype)
        for rhs in (b, np.stack([b, a @ b], 1)):
            x, info = gmres(placed(grid, a, n), placed(grid, rhs, 1), maxiter=5)
            left = np.linalg.norm(rhs - a @ x.gather().astype(float), axis=0) / np.linalg.norm(rhs, axis=0)
            assert (info == 0) == (part == 0)
            assert (left <= (1.01e-5 if info == 0 else 2)).all(), (n, part, left)


def test_gmres_ends_with_the_first_residual_that_is_short_enough(grid):
    """By the least residuals of the Krylov spaces; it knows them without a product."""
    n, rtol = 24, 1e-8
    a, b = np.kron(np.eye(n // 2), [[1, 2], [-2, 1]]) + random(n, n) / 20, random(n, seed=2)
    space = np.linalg.qr(b[:, None])[0]
    while np.linalg.norm(b - a @ space @ np.linalg.lstsq(a @ space, b)[0]) > rtol * np.linalg.norm(b):
        space = np.linalg.qr(np.hstack([space, a @ space[:, -1:]]))[0]
    needed = space.shape[1]
    assert 8 < needed < n
    A, B, made = placed(grid, a, 1), placed(grid, b, 1), []
    x, info = gmres(lambda x: made.append(x) or A @ x, B, rtol=rtol, restart=n)
    assert info == 0
    assert len(made) == needed + 1  # which is the last residual's
    close(x, np.linalg.solve(a, b), 1e-7)


def test_one_all_reduce_a_step_of_conjugate_gradients(grid, world):
    n = 24
    line = Layout(grid.axes)
    scale = pla.distribute(np.linspace(1, 2, n), grid, line)
    b = pla.distribute(random(n), grid, line)
    for pipelined in (False, True):
        steps = []
        with pla.ledger(grid) as book:
            cg(lambda x: scale * x, b, rtol=1e-10, callback=steps.append, pipelined=pipelined)
        calls = sum(n for (kind, _), n in book.calls.items() if kind == "all_reduce")
        assert calls == (len(steps) + 2 if grid.size > 1 and grid.inside else 0)


@pytest.mark.parametrize("shape", [(40, 13), (13, 13), (9, 21)], ids=str)
def test_least_squares(grid, shape):
    m, n = shape
    a, b = random(m, n, seed=4), random(m, seed=5)
    for seed in range(2):
        A, B = placed(grid, a, 2 * seed + 1), placed(grid, b, seed)
        found = lsqr(A, B, atol=1e-13, btol=1e-13, iter_lim=400)
        assert found.istop in (1, 2)
        close(found.x, np.linalg.lstsq(a, b)[0], 1e-8)
        assert abs(found.r1norm - np.linalg.norm(b - a @ np.linalg.lstsq(a, b)[0])) < 1e-9
        damped = lsqr((lambda x: A @ x, lambda y: A.mT @ y), B, 2.0, atol=1e-13, btol=1e-13)
        close(damped.x, np.linalg.solve(a.T @ a + 4 * np.eye(n), a.T @ b), 1e-9)
    assert lsqr(A, B * 0).istop == 0


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 2)], ids=str)
def test_stacks_of_systems(grid, lead, dtype):
    """Systems of unlike condition, in any layout, with broadcast leading dims, and some that end at once."""
    n, k, error = 11, 2, 2e-3 if dtype == "complex64" else 1e-8
    count = int(np.prod(lead))
    every = [definite(n, dtype, low=0.3 + i, seed=i + 1)[0] for i in range(max(1, count))]
    a = np.array(every[:count]).reshape(*lead, n, n).astype(dtype)
    b = random(*lead, n, k, dtype=dtype, seed=3)
    b[..., 0] = 0 if lead == (3,) else b[..., 0]  # solved at once
    mixed, odd = a - 11.3 * np.eye(n, dtype=dtype), a + random(n, n, dtype=dtype, seed=5)
    inverse = np.linalg.inv(a) + 1e-3 * np.eye(n, dtype=dtype)
    options = {"rtol": error / (20 if dtype == "complex64" else 100), "maxiter": 300}  # within rounding of any kernels
    for seed in range(2):
        B, A, M = placed(grid, b, 5 * seed + 1), placed(grid, a, 7 * seed + 2), placed(grid, inverse, seed)
        for function, matrix, more in (
            (cg, a, {}), (cg, a, {"pipelined": True}), (cg, a, {"M": M}), (minres, mixed, {}), (minres, a, {"M": M}),
            (gmres, odd, {"restart": n}), (gmres, a, {"restart": 5}), (gmres, odd, {"M": M, "restart": 9}),
        ):  # fmt: skip
            steps = []
            x, info = function(placed(grid, matrix, 3 * seed + 1), B, callback=steps.append, **options, **more)
            assert info == 0, function
            assert (x.shape, x.dtype, x.layout) == (b.shape, b.dtype, B.layout.with_partial(()))
            close(x, np.linalg.solve(matrix, b), 50 * error)
            assert all(each.shape == b.shape for each in steps)
            if steps and "M" not in more and function is not gmres:
                close(steps[-1], x.gather(), 0)
        x, info = cg(lambda v: A @ v, B, x0=placed(grid, np.linalg.solve(a, b), 4), rtol=1e-3, maxiter=0)
        assert info == 0
        shared = b if not lead else b[0] if len(lead) == 1 else b[:1]
        if count:
            for function, matrix in ((cg, a), (minres, mixed), (gmres, mixed)):
                x, info = function(placed(grid, matrix, seed), placed(grid, shared, seed), **options)
                assert info == 0
                close(x, np.linalg.solve(matrix, np.broadcast_to(shared, b.shape)), 50 * error)
            vector = random(n, dtype=dtype, seed=12)
            x, info = cg(A, placed(grid, vector, seed), **options)
            close(x, np.linalg.solve(a, vector[:, None])[..., 0], 50 * error)


@pytest.mark.parametrize("lead", [(), (4,), (3, 2), (0,)], ids=str)
def test_stacks_of_least_squares(grid, lead):
    m, n = 17, 6
    a, b = random(*lead, m, n, seed=4), random(*lead, m, 3, seed=5)
    a *= np.arange(1, int(np.prod(lead)) + 1).reshape(*lead, 1, 1)  # so that they do not end in one step
    b[..., 1] = 0
    want = np.linalg.pinv(a) @ b
    for seed in range(2):
        A, B = placed(grid, a, 2 * seed + 1), placed(grid, b, seed)
        found = lsqr(A, B, atol=1e-13, btol=1e-13, iter_lim=400)
        assert found.x.layout.dims[-1] == B.layout.dims[-1]
        close(found.x, want, 1e-9)
        assert found.istop.shape == found.xnorm.shape == (*lead, 3)
        assert set(found.istop[..., [0, 2]].flat) <= {1, 2}
        assert not found.istop[..., 1].any()
        np.testing.assert_allclose(found.r1norm, np.linalg.norm(b - a @ want, axis=-2), atol=1e-9)
        np.testing.assert_allclose(found.xnorm, np.linalg.norm(want, axis=-2), atol=1e-9)
        damped = lsqr((lambda x: A @ x, lambda y: A.mT @ y), B, 2.0, atol=1e-13, btol=1e-13)
        adjoint = np.swapaxes(a, -1, -2)
        close(damped.x, np.linalg.solve(adjoint @ a + 4 * np.eye(n), adjoint @ b), 1e-9)


def test_one_all_reduce_a_step_for_all_systems(grid):
    """Whatever dims are cut: two systems, four columns."""
    n, every = 12, layouts(grid.axes, 3, partial=False)
    scale = pla.distribute(np.linspace(1, 2, 2 * n).reshape(2, n, 1), grid, Layout(None, None, None))
    for layout in every:
        b, steps = pla.distribute(random(2, n, 4), grid, layout), []
        with pla.ledger(grid) as book:
            _, info = cg(lambda x: scale * x, b, rtol=1e-10, callback=steps.append)
        calls = sum(c for (kind, _), c in book.calls.items() if kind == "all_reduce")
        cut = any(grid.sizes[a] > 1 for a in layout.cut_axes)
        assert info == 0
        assert calls == (len(steps) + 2 if cut and grid.inside else 0)


@pytest.mark.parametrize("lead", [(2,), (2, 2), (0,)], ids=str)
def test_stacks_of_spectra(grid, lead):
    m, n, k = 17, 13, 3
    a = random(*lead, m, n, dtype="complex128", seed=3)
    s = (a @ a.conj().swapaxes(-1, -2))[..., :n, :n]
    w = np.linalg.eigvalsh(s)
    S = placed(grid, s, 3)
    for which, wanted in (("LA", w[..., -k:]), ("SA", w[..., :k])):
        values, v = eigsh(S, k, which=which, ncv=n)
        close(values, wanted, 1e-9)
        assert v.layout.dims[:-2] == S.layout.dims[: len(lead)]
        close(S @ v, v.gather() * wanted[..., None, :], 1e-8)
    x = placed(grid, random(n, k, dtype="complex128", seed=8), 1)
    close(lobpcg(S, x, maxiter=200, tol=1e-9)[0], w[..., ::-1][..., :k], 1e-9)
    weights = placed(grid, np.diag(np.linspace(1, 3, n)), 2)
    values, v = lobpcg(S, placed(grid, random(*lead, n, k, seed=9), 2), weights, maxiter=200, tol=1e-9)
    close(S @ v, (weights @ v).gather() * values.gather()[..., None, :], 1e-6)
    for turned in (False, True):
        b = a.swapaxes(-1, -2) if turned else a
        u, _, vh = np.linalg.svd(b, full_matrices=False)
        t = 0.3 ** np.arange(n)
        b = (u * t) @ vh
        for found in (svds(placed(grid, b, 2), k), svd_lowrank(placed(grid, b, 1), k)):
            assert (found.U.shape, found.Vh.shape) == ((*lead, b.shape[-2], k), (*lead, k, b.shape[-1]))
            close(found.S, np.broadcast_to(t[:k], (*lead, k)), 1e-9)
            close((found.U * found.S[..., None, :]) @ found.Vh, (u[..., :k] * t[:k]) @ vh[..., :k, :], 1e-7)
        B, q = placed(grid, b, 5), range_finder(placed(grid, b, 5), 6)
        assert q.shape == (*lead, b.shape[-2], 6)
        assert float(abs(B - q @ (q.mT.conj() @ B)).gather().max(initial=0)) < 2 * t[6]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_few_eigenvalues(grid, dtype):
    n = 37
    a, w = definite(n, dtype, low=-20)
    error = 2e-4 if dtype in ("float32", "complex64") else 1e-10
    for seed, (which, wanted) in enumerate(
        {"LM": w[-4:], "LA": w[-4:], "SA": w[:4], "SM": np.sort(w[np.argsort(abs(w))[:4]])}.items()
    ):
        A = placed(grid, a, 2 * seed + 1)
        values, v = eigsh(A, 4, which=which, ncv=n if which == "SM" else None)
        close(values, wanted, error)
        assert v.dtype == a.dtype
        assert float(pla.max(abs(A @ v - v * values))) < error * 30
        assert float(pla.max(abs(v.mT.conj() @ v - pla.eye(4, grid=grid)))) < error
    values, _ = eigsh(placed(grid, a, 3), 3, sigma=float(w[15]) + 0.01)
    close(values, w[14:17], error)
    with pytest.raises(np.linalg.LinAlgError, match=r"sigma = .*is an eigenvalue|of 3 eigenvalues converged") as told:
        eigsh(placed(grid, a, 3), 3, sigma=float(w[15]))
    if moved := re.search(r"move it by about (\S+)$", str(told.value)):
        values, _ = eigsh(placed(grid, a, 3), 3, sigma=float(w[15]) + float(moved[1]))
        close(values, w[14:17], error)
    x = placed(grid, random(n, 3, dtype=dtype, seed=8), 1)
    for largest in (True, False):
        seen = []
        values, v = lobpcg(
            placed(grid, a, 2), x, largest=largest, maxiter=200, tol=error, M=None, callback=lambda w: seen.append(1)
        )
        close(values, w[::-1][:3] if largest else w[:3], 10 * error)
        assert seen
    weights = np.diag(np.linspace(1, 3, n)).astype(dtype)
    values, _ = lobpcg(placed(grid, a, 1), x, placed(grid, weights, 3), maxiter=300, tol=error / 10)
    root = np.sqrt(np.diag(weights).real)
    close(values, np.linalg.eigvalsh(a / root[:, None] / root)[::-1][:3], 10 * error)


def test_equal_eigenvalues_and_invariant_spaces(grid):
    n = 23
    values, v = eigsh(pla.eye(n, grid=grid), 3)
    close(values, np.ones(3), 1e-13)
    assert float(pla.max(abs(v.mT @ v - pla.eye(3, grid=grid)))) < 1e-12
    a = np.diag([5.0] * 3 + [1.0] * (n - 3))
    close(eigsh(placed(grid, a, 1), 5)[0], np.array([1, 1, 5, 5, 5.0]), 1e-12)
    close(eigsh(placed(grid, a * 0, 1), 2)[0], np.zeros(2), 0)


@pytest.mark.parametrize("which", ["LM", "LA", "SA", "BE"])
@pytest.mark.parametrize("times", [2, 3, 5])
def test_copies_of_eigenvalues(grid, which, times):
    """Rounding brings none into the space of one vector where A is diagonal; a new vector does."""
    n, k, rng = 60, 4, np.random.default_rng(times)
    for few in ([10, 9, -10.5, -9.3], np.geomspace(1, 1e-9, n) * rng.choice([1, -1], n)):
        w = np.concatenate([np.repeat(few, times), rng.uniform(-0.1, 0.1, n)])[:n]
        want = {"LM": w[np.argsort(-abs(w), kind="stable")[:k]], "LA": np.sort(w)[-k:], "SA": np.sort(w)[:k]}
        want["BE"] = np.r_[np.sort(w)[: k // 2], np.sort(w)[-(k // 2) :]]
        values, v = eigsh(placed(grid, np.diag(w), 1), k, which=which)
        close(values, np.sort(want[which]), 1e-12)
        assert float(pla.max(abs(v.mT @ v - pla.eye(k, grid=grid)))) < 1e-10


def test_products_that_look_for_copies_are_few(grid):
    rng, n = np.random.default_rng(8), 150
    q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    for w in (np.linspace(-1, 1, n), np.geomspace(1, 1e-3, n), np.geomspace(1, 1e-9, n)):
        A, v0, counts = placed(grid, (q * w) @ q.T, 1), placed(grid, rng.standard_normal(n), 0), []
        for check in (0.3, 0.0):
            seen: list[int] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lanczos, "CHECK", check)
                eigsh(lambda x, A=A, seen=seen: seen.append(1) or A @ x, 5, which="LA", v0=v0)
            counts.append(len(seen))
        assert counts[0] <= 1.3 * counts[1] + 1, counts


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_eigenvalues_that_are_zero(grid, dtype):
    """They are found as accurately as rounding lets them be, which is beside the largest."""
    for n, k, ncv in ((8, 2, 5), (25, 3, 8), (25, 1, None), (40, 3, None)):
        q, w = np.linalg.qr(random(n, n, dtype=dtype, seed=n))[0], np.r_[0, np.linspace(0.1, 1, n - 1)]
        a = placed(grid, ((q * w) @ q.conj().T).astype(dtype), 1)
        for which in ("SM", "SA"):
            values, x = eigsh(a, k, which=which, ncv=ncv)
            assert np.abs(values.gather() - w[:k]).max() <= 100 * np.finfo(dtype).eps
            assert float(pla.max(abs(a @ x - x * values))) <= 100 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [3, 7, 13])
def test_one_eigenvalue_many_times(grid, n, dtype):
    """All products but for rounding are in the space so far, and what comes next is a vector of its own."""
    q = np.linalg.qr(random(n, n, dtype=dtype))[0]
    a = placed(grid, (3 * q @ q.conj().T).astype(dtype), 1)
    eps = 100 * np.finfo(dtype).eps
    for ncv in (None, n):
        for start in (None, placed(grid, random(n, seed=4), 0)):
            w, x = eigsh(a, n - 1, ncv=ncv, v0=start)
            close(w, 3 * np.ones(n - 1), eps)
            x = x.gather()
            assert np.abs(x.conj().T @ x - np.eye(n - 1)).max() <= eps


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_squares_beyond_single_precision(grid, dtype, size):
    n = 23
    a, w = definite(n, dtype)
    b = random(n, dtype=dtype, seed=2)
    A, B = placed(grid, a, 1), placed(grid, (b * size).astype(dtype), 1)
    want = np.linalg.solve(a, b) * size
    for method in (cg, minres, gmres):
        x, info = method(A, B, rtol=1e-4)
        assert info == 0
        close(x, want, 1e-2)
    many, info = cg(A, pla.stack([B, 2 * B], axis=1), rtol=1e-4)
    close(many, np.stack([want, 2 * want], 1), 1e-2)
    found = lsqr(A, B)
    close(found.x, want, 1e-2)
    assert found.istop in (1, 2)
    assert found.r1norm < 1e-3 * size
    large = placed(grid, (a * size).astype(dtype), 1)
    w, x = eigsh(large, 3, which="LA")
    close(w, np.linspace(1, 30, n)[-3:] * size, 1e-5)
    s = svds(large, 3)[1]
    close(s, np.linspace(1, 30, n)[:-4:-1] * size, 1e-3)
    close(s[:1], np.array([30 * size]), 1e-5)


@pytest.mark.parametrize("size", [1e-200, 1e-170, 1e160, 1e300])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_values_whose_squares_are_out_of_range(grid, dtype, size):
    n = 23
    a, w = definite(n, dtype)
    w, large = w * size, placed(grid, (a * size).astype(dtype), 1)
    found, x = eigsh(large, 3, which="LA")
    close(found, w[-3:], 1e-13)
    assert np.abs((a @ x.gather()) * size - x.gather() * found.gather()).max() <= 1e-12 * w[-1]
    for sigma in (0.0, 1.9 * size):  # whose inverse has the larger squares
        close(eigsh(large, 2, sigma=sigma, return_eigenvectors=False), w[:2], 1e-13)
    for shape, seed in (((n, n), 2), ((n, n - 4), 1), ((n - 4, n), 1)):
        s = np.linalg.svd(a[: shape[0], : shape[1]], compute_uv=False)[:3] * size
        b, start = placed(grid, a[: shape[0], : shape[1]] * size, seed), placed(grid, random(shape[1], seed=4), 0)
        for v0 in (None, start):
            close(svds(b, 3, v0=v0).S, s, 1e-13)


def power(x, exponent):
    """The array times 2 to this power, which need not be in range itself."""
    x = np.array(x)
    while exponent:
        step = max(-100, min(100, exponent))
        x, exponent = x * x.real.dtype.type(2.0**step), exponent - step
    return x


WHOLE_RANGE = {"float32": (-135, -80, 0, 80, 115), "float64": (-1055, -600, 0, 600, 1012)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("size", range(5))
def test_systems_of_the_whole_range(grid, size, dtype):
    """The matrix, the right-hand side, the first guess and M may be subnormal or next to overflow."""
    n, real = 12, np.finfo(dtype).dtype
    single, exponents = real == np.float32, WHOLE_RANGE[real.name]
    a, b, guess = definite(n, dtype)[0], random(n, 2, dtype=dtype, seed=2), random(n, 2, dtype=dtype, seed=7)
    of_a = exponents[size]
    large = power(a, of_a)
    exact = power(large.astype(complex if a.dtype.kind == "c" else float), -of_a)
    A, M = placed(grid, large, 1), placed(grid, power(np.diag(1 / np.diag(a)).astype(dtype), min(-of_a, 115)), 2)
    error, rtol = (3e-3, 1e-5) if single else (1e-7, 1e-10)
    for of_b in exponents:
        of_x = of_b - of_a
        if not exponents[0] <= of_x <= exponents[-1]:
            continue
        sides = power(b, of_b)
        right = np.linalg.solve(exact, power(sides.astype(exact.dtype), -of_b))
        bound = error * np.abs(right).max() + n * 2.0 ** ((-149 if single else -1074) - of_x)
        B, G = placed(grid, sides, 1), placed(grid, power(guess, of_x), 2)
        seen = []
        for method, options in (
            (cg, {}), (cg, {"pipelined": True}), (cg, {"M": M}), (cg, {"x0": G}), (minres, {}), (minres, {"M": M}),
            (minres, {"x0": G}), (gmres, {}), (gmres, {"M": M}), (gmres, {"x0": G}),
        ):  # fmt: skip
            x, info = method(A, B, rtol=rtol, callback=seen.append, **options)
            assert info == 0
            close(seen[-1], x.gather(), 0)  # in the user's units
            if (x := x.gather()) is not None:
                assert np.abs(power(x.astype(exact.dtype), -of_x) - right).max() <= bound
        for options in ({}, {"x0": G}):
            found = lsqr(A, B, atol=rtol, btol=rtol, iter_lim=400, **options)
            assert np.isin(found.istop, (1, 2)).all()
            if (x := found.x.gather()) is not None:
                assert np.abs(power(x.astype(exact.dtype), -of_x) - right).max() <= bound
                np.testing.assert_allclose(found.xnorm, power(np.linalg.norm(right, axis=0), of_x), 1e-2, 1e-320)


@pytest.mark.parametrize("exponent", [-900, -600, 600, 900])
def test_preconditioners_of_the_whole_range(grid, exponent):
    """Products with what M gives may overflow before M is scaled, without a warning."""
    n = 12
    a, b = definite(n)[0], random(n, 2, seed=2)
    A, B, M = placed(grid, a, 1), placed(grid, b, 2), placed(grid, power(np.diag(1 / np.diag(a)), exponent), 1)
    for method, options in ((cg, {}), (cg, {"pipelined": True}), (minres, {}), (gmres, {})):
        x, info = method(A, B, rtol=1e-10, M=M, **options)
        assert info == 0
        close(x, np.linalg.solve(a, b), 1e-7)


@pytest.mark.parametrize("size", [-1000, -700, 0, 700, 1000])
def test_absolute_tolerances_are_in_the_users_units(grid, size):
    a, b = definite(20)[0], random(20, seed=2)
    A, B = placed(grid, a, 1), placed(grid, power(b, size), 2)
    for method in (cg, minres, gmres):
        options = {"restart": 1} if method is gmres else {}
        x, info = method(A, B, rtol=0, atol=float(power(0.1, size)), **options)
        assert info == 0
        if (x := x.gather()) is not None:
            left = np.linalg.norm(b - a @ power(x, -size))
            assert 1e-3 < left <= 0.1 + 1e-12
        assert not pla.any(method(A, B, rtol=0, atol=float(power(2.0, size)) * 4)[0])  # 0 is near enough
    of_m = 300 if size < 0 else -300  # with M, lengths are (rᴴ M r)½
    x, info = minres(A, B, rtol=0, atol=float(power(0.1, size + of_m // 2)), M=lambda r: r * 2.0**of_m)
    assert info == 0
    if (x := x.gather()) is not None:
        assert 1e-3 < np.linalg.norm(b - a @ power(x, -size)) <= 0.1 + 1e-12


@pytest.mark.parametrize("exponent", [-1068, -1040, -400, 400, 1010])
def test_spectra_of_the_whole_range(grid, exponent):
    """Subnormal numbers too, of which products have no digits."""
    n = 15
    large = power(definite(n)[0], exponent)
    w = np.linalg.eigvalsh(power(large, -exponent))
    A, below = placed(grid, large, 1), n * 2.0 ** min(0, -1074 - exponent)

    def near(found, want, error=1e-10):
        if (found := found.gather()) is not None:
            np.testing.assert_allclose(power(found, -exponent), want, error, below)

    X = random(n, 3, seed=8)
    near(eigsh(A, 3, which="LA").eigenvalues, w[-3:])
    near(eigsh(lambda x: A @ x, 3, v0=placed(grid, power(X[:, 0], -1000), 1)).eigenvalues, w[-3:])
    near(eigsh(A, 3, sigma=0.0, v0=placed(grid, power(X[:, 0], 1000), 1)).eigenvalues, w[:3])
    near(svds(A, 3).S, w[:-4:-1])
    for of_x in (-1040, 0, 1000):
        near(lobpcg(A, placed(grid, power(X, of_x), 2), tol=0, maxiter=60).eigenvalues, w[:-4:-1], 1e-8)
    weights = np.linspace(1, 3, n)
    of_b = max(-900, min(900, exponent)) // 2
    B = placed(grid, power(np.diag(weights), of_b), 2)
    want = np.linalg.eigvalsh(power(large, -exponent) / np.sqrt(np.outer(weights, weights)))[:-4:-1]
    if abs(exponent - of_b) < 900:
        values, v = lobpcg(A, placed(grid, X, 1), B, tol=0, maxiter=60)
        if (values := values.gather()) is not None:
            np.testing.assert_allclose(power(values, of_b - exponent), want, 1e-8)
        if (v := v.gather()) is not None:  # vᴴ B v = 1
            v = power(v, of_b // 2) * 2.0 ** (of_b % 2 / 2)
            np.testing.assert_allclose(v.T @ (weights[:, None] * v), np.eye(3), 0, 1e-8)


@pytest.mark.parametrize("of_b", [-1000, -600, 0, 600, 1000])
def test_the_tolerance_of_lobpcg_is_that_of_the_users_units(grid, of_b):
    """Vectors for which xᴴ B x = 1 are by 2^(-of_b/2) as long, and so are residuals, which end it at the same step."""
    n, steps = 21, []
    a, _ = definite(n)
    A, X = placed(grid, a, 1), placed(grid, random(n, 2, seed=8), 2)
    for p in (0, of_b):
        B = placed(grid, np.diag(np.ldexp(np.linspace(1, 3, n), p)), 3)
        calls = []
        lobpcg(A, X, B, tol=1e-6 * 2.0 ** (-p // 2), maxiter=200, callback=lambda *_, calls=calls: calls.append(1))
        steps.append(len(calls))
    assert 2 < steps[0] < 150
    assert steps[0] == steps[1]


def test_single_precision_of_lobpcg_is_summed_in_double(grid):
    """Squares of these are out of the range of float32."""
    n = 15
    a, w = definite(n, "float32")
    X = random(n, 3, dtype="float32", seed=8)
    for size in (1e-30, 1e-25, 1e25, 1e30):
        large = (a * np.float32(size)).astype("float32")
        values, _ = lobpcg(placed(grid, large, 1), placed(grid, X, 2), tol=1e-4 * size, maxiter=200)
        close(values, w[:-4:-1] * size, 1e-5)
        values, _ = lobpcg(placed(grid, a, 1), placed(grid, X * np.float32(size), 2), tol=1e-4, maxiter=200)
        close(values, w[:-4:-1], 1e-5)


@pytest.mark.parametrize("of_a", [-700, 600])
@pytest.mark.parametrize("of_b", [-650, 0, 500])
def test_norms_of_least_squares_are_in_the_users_units(grid, of_a, of_b):
    """A system times powers of two, with its damping, has the norms of the one near 1 times such powers."""
    a, b, damp = random(20, 8, seed=4), random(20, 2, seed=5), 0.7
    if not -1000 < of_b - of_a < 1000:
        return
    near = lsqr(placed(grid, a, 1), placed(grid, b, 2), damp, atol=1e-12, btol=1e-12)
    A, B = placed(grid, power(a, of_a), 1), placed(grid, power(b, of_b), 2)
    found = lsqr(A, B, float(power(damp, of_a)), atol=1e-12, btol=1e-12)
    np.testing.assert_array_equal(found.istop, near.istop)
    powers = {"r1norm": of_b, "r2norm": of_b, "anorm": of_a, "acond": 0, "xnorm": of_b - of_a}
    for name, exponent in powers.items():
        np.testing.assert_allclose(power(getattr(found, name), -exponent), getattr(near, name), 1e-9, err_msg=name)
    if abs(of_a + of_b) < 1000:  # of rounding, but not of another size
        assert (power(found.arnorm, -of_a - of_b) < 1e-9).all()
        some = lsqr(A, B, float(power(damp, of_a)), iter_lim=3).arnorm
        few = lsqr(placed(grid, a, 1), placed(grid, b, 2), damp, iter_lim=3).arnorm
        np.testing.assert_allclose(power(some, -of_a - of_b), few, 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("x0", [False, True])
def test_damping_much_larger_than_the_matrix(grid, dtype, x0):
    """x is Aᴴ b / damp² then; the square of damp / ‖A‖ may be out of range."""
    a, b, c = random(7, 4), random(7, seed=1), random(7, 2, seed=2)
    most = {"float32": 120, "float64": 1000}[dtype]
    for of_a, of_damp, of_b in ((0, 0.55, 0.9), (-0.7, 0.2, 0.9), (-0.9, 0.0, 0.95), (-0.95, 0.95, 0), (0.9, 0.95, 0)):
        of_a, of_damp, of_b = (int(most * each) for each in (of_a, of_damp, of_b))
        for rhs in (b, c):
            A, B = (placed(grid, power(v.astype(dtype), e), 1) for v, e in ((a, of_a), (rhs, of_b)))
            damp = 2.0**of_damp
            want = power(a.astype(dtype).astype(float).T @ rhs.astype(dtype), of_a + of_b - 2 * of_damp)
            if of_damp - of_a < 20:
                want = None
            first = power(random(4, *rhs.shape[1:], seed=3).astype(dtype), 0)
            found = lsqr(A, B, damp=damp, **({"x0": placed(grid, first, 2)} if x0 else {}))
            assert np.isfinite(found.x.gather()).all()
            if want is not None:
                np.testing.assert_allclose(found.anorm, damp, rtol=1e-6)
            if want is not None and not x0:
                close(found.x, want.astype(dtype), 1e-5)
                if size := np.abs(want).max():
                    np.testing.assert_allclose(found.xnorm, np.linalg.norm(want / size, axis=0) * size, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_least_squares_to_the_last_digit(grid, dtype):
    """With tolerances of 0 it ends, as SciPy's, where what is left is rounding."""
    a, b = random(30, 12, dtype=dtype, seed=4), random(30, dtype=dtype, seed=5)
    error = 1e-4 if dtype == "float32" else 1e-12
    for rows, stop in ((30, 5), (12, 4)):
        found = lsqr(placed(grid, a[:rows], 1), placed(grid, b[:rows], 2), atol=0, btol=0, iter_lim=10_000)
        assert found.istop == stop
        assert found.itn < 200
        close(found.x, np.linalg.lstsq(a[:rows], b[:rows])[0], error * (1 if rows > 12 else 100))
    if dtype == "float64":
        assert scipy.sparse.linalg.lsqr(a, b, atol=0, btol=0, conlim=0, iter_lim=10_000)[1] == 5
    singular = np.diag(np.r_[1.0, np.geomspace(1e-18, 1e-20, 4)]).astype(dtype)
    assert lsqr(placed(grid, singular, 1), placed(grid, np.ones(5, dtype), 1), atol=0, btol=0).istop in (4, 5, 6)


def test_shifts_of_eigsh(grid):
    """What counts as an eigenpair is told by the tolerance that was asked for and by the size of the shift."""
    a = definite(20)[0]
    w, _ = eigsh(placed(grid, a, 1), 3, sigma=100.0, ncv=4, tol=1e-3)
    close(w, np.linspace(1, 30, 20)[-3:], 0.1)
    w, _ = eigsh(placed(grid, 0 * a, 1), 3, sigma=np.array(3.3))
    assert np.abs(w.gather()).max() < 1e-14
    for sigma, error in ((np.nan, ValueError), (np.inf, ValueError), ("0", TypeError), (np.ones(2), TypeError)):
        with pytest.raises(error, match="eigsh: sigma is a real number"):
            eigsh(placed(grid, a, 1), 3, sigma=sigma)
    with pytest.raises(np.linalg.LinAlgError, match=r"eigsh: sigma = 3.0 is an eigenvalue; .*U\[3, 3\]"):
        eigsh(placed(grid, np.diag(np.arange(20.0)), 1), 2, sigma=3.0)


@pytest.mark.parametrize("shape", [(2, 2), (6, 17), (17, 6)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_singular_values_of_small_matrices(grid, shape, dtype):
    """Products may lie in layouts of their own, cut by axes that do not cut vectors."""
    least = min(shape)
    for k in {1, least - 1}:
        for values in (np.arange(1.0, least + 1), np.ones(least), np.r_[np.ones(k), np.zeros(least - k)]):
            u, v = (np.linalg.qr(random(n, least, dtype=dtype, seed=n))[0] for n in shape)
            a = (u * values.astype(u.real.dtype)) @ v.conj().T
            every = layouts(grid.axes, 2)
            for layout in every[:: max(1, len(every) // 3)]:
                s = svds(pla.distribute(a, grid, layout), k, return_singular_vectors=False)
                close(s, np.sort(values)[::-1][:k], 1e3 * np.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(50, 31), (31, 50)], ids=str)
def test_a_few_singular_values(grid, shape):
    u, _, vh = np.linalg.svd(random(*shape, seed=6), full_matrices=False)
    s = 10.0 * 0.6 ** np.arange(31)
    a = (u * s) @ vh
    for seed in range(2):
        A = placed(grid, a, seed)
        for found in (svds(A, 5), svd_lowrank(A, 5)):
            close(found.S, s[:5], 1e-9)
            close((found.U * found.S) @ found.Vh, (u[:, :5] * s[:5]) @ vh[:5], 1e-6)
    q = range_finder(A, 12)
    assert q.shape == (shape[0], 12)
    assert float(pla.max(abs(A - q @ (q.mT @ A)))) < 2 * s[11]
    assert float(pla.max(abs(q.mT @ q - pla.eye(12, grid=grid)))) < 1e-13


def test_the_same_steps_on_every_number_of_ranks(grid):
    """Against numbers of one rank: iterations count alike wherever the sums are made."""
    a, b = definite(64, low=0.01)[0], random(64, seed=9)
    steps = []
    cg(placed(grid, a, 1), placed(grid, b, 1), rtol=1e-8, callback=steps.append)
    assert abs(len(steps) - 50) <= 2


@pytest.mark.parametrize("largest", [False, True])
def test_eigenvalues_stay_where_they_are_found(grid, largest):
    """Of steps beyond convergence rounding errors make no values of their own."""
    for seed in range(2):
        a = random(13, 13, dtype=complex, seed=seed)
        a = a @ a.conj().T
        w = np.linalg.eigvalsh(a)
        values, v = lobpcg(placed(grid, a, 3), placed(grid, random(13, 3), 1), tol=0, maxiter=100, largest=largest)
        close(values, w[:-4:-1] if largest else w[:3], 1e-9)
        assert np.abs(a @ v.gather() - v.gather() * values.gather()).max() < 1e-9 * w[-1]


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_grid(world, backend):
    """They take every step with the others, and hold blocks without elements."""
    n = 20
    for size in {1, world.size - 1}:
        with pla.Grid({"a": size}, world, backend, idle=True) as grid:
            for dtype in (float, complex):
                a, w = definite(n, dtype)
                b, start = random(n, dtype=dtype), random(n, 3, dtype=dtype)
                A, B, X = (pla.distribute(v, grid, Layout("a", *[None] * (v.ndim - 1))) for v in (a, b, start))
                want = np.linalg.solve(a, b)
                found = [(f(A, B, rtol=1e-12)[0], want) for f in (cg, minres, gmres)]
                found += [(lsqr(A, B, atol=1e-13, btol=1e-13, iter_lim=100, x0=x0).x, want) for x0 in (None, B)]
                found += [(eigsh(A, 3, return_eigenvectors=False), w[-3:])]
                found += [(svds(A, 3, return_singular_vectors=False), w[:-4:-1])]
                found += [(svds(A, 3, return_singular_vectors="vh").S, w[:-4:-1])]
                found += [(pla.linalg.eigvalsh(A, 2.0 * pla.eye(n, grid=grid)), w / 2)]
                found += [(abs(np.linalg.qr(A, mode="r")), abs(np.linalg.qr(a, mode="r")))]
                found += [(cg(A, X, rtol=1e-12)[0], np.linalg.solve(a, start))]
                for pairs in (eigsh(A, 3), lobpcg(A, X, maxiter=200, tol=1e-8), svds(A, 3)):
                    values = pairs[1] if len(pairs) == 3 else pairs[0]
                    found += [(values, w[-3:] if values[0].item() < values[-1].item() else w[:-4:-1])]
                    found += [(abs(vectors) * 0, np.zeros(vectors.shape)) for vectors in pairs]
                for x, right in found:
                    assert x.block.shape == grid.block_shape(x.layout, x.shape)
                    close(x, right, 1e-7)


@pytest.mark.parametrize("damp", [0, 1.5])
def test_least_squares_from_a_first_guess(grid, damp):
    """As SciPy's: ‖x − x0‖ is damped; fewer iterations from a good guess, none from the solution."""
    a, b, guess = random(23, 9, seed=4), random(23, seed=5), random(9, seed=6)
    A, B, G = placed(grid, a, 1), placed(grid, b, 1), placed(grid, guess, 2)
    for operator in (A, (lambda x: A @ x, lambda y: A.mT @ y)):
        found = lsqr(operator, B, damp, 1e-13, 1e-13, x0=G)
        want = scipy.sparse.linalg.lsqr(a, b, damp, 1e-13, 1e-13, x0=guess)
        assert found.istop in (1, 2)
        close(found.x, want[0], 1e-9)
        for name, right in zip(("r1norm", "r2norm"), want[3:5], strict=True):
            assert abs(getattr(found, name) - right) < 1e-9
        assert abs(found.xnorm - np.linalg.norm(want[0])) < 1e-9
    x = lsqr(A, B, 0.0, 1e-13, 1e-13).x
    again = lsqr(A, B, 0.0, 1e-8, 1e-8, x0=x)
    assert again.itn <= 2 < lsqr(A, B, 0.0, 1e-8, 1e-8).itn
    close(again.x, x.gather(), 1e-12)
    zero = lsqr(A, B * 0, damp, x0=x * 0)
    assert (zero.istop, zero.itn) == (0, 0)
    column = lsqr(A, B[:, None], damp, 1e-13, 1e-13, x0=G[:, None])
    close(column.x, want[0][:, None], 1e-9)


def test_errors_of_stacks_name_the_matrix(grid):
    spread = np.diag(np.linspace(1, 2, 12))
    A = placed(grid, np.stack([np.eye(12), spread]), 1)
    for method in (eigsh, svds):
        with pytest.raises(np.linalg.LinAlgError, match=r"^matrix \(1,\): \w+: \d of 3 .* converged in 1 restarts"):
            method(A, 3, ncv=4, maxiter=1)


def test_stacks_of_least_squares_from_first_guesses(grid):
    a, b, guess = random(3, 13, 5, seed=4), random(3, 13, 2, seed=5), random(3, 5, 2, seed=6)
    A = placed(grid, a, 3)
    found = lsqr(A, placed(grid, b, 2), 0.5, 1e-13, 1e-13, x0=placed(grid, guess, 1))
    each = [
        [scipy.sparse.linalg.lsqr(a[i], b[i, :, j], 0.5, 1e-13, 1e-13, x0=guess[i, :, j]) for j in range(2)]
        for i in range(3)
    ]
    close(found.x, np.array([[column[0] for column in row] for row in each]).swapaxes(1, 2), 1e-9)
    close(found.r1norm, np.array([[column[3] for column in row] for row in each]), 1e-9)
    one = lsqr(A, placed(grid, b[0, :, 0], 1), x0=placed(grid, guess[..., 0], 2), atol=1e-13, btol=1e-13)
    close(one.x, np.stack([np.linalg.lstsq(m, b[0, :, 0])[0] for m in a]), 1e-8)


def test_both_ends_of_a_spectrum_and_values_alone(grid):
    n = 24
    a, w = definite(n, "complex128", low=-20)
    A = placed(grid, a, 1)
    for k, wanted in ((4, w[[0, 1, -2, -1]]), (5, w[[0, 1, -3, -2, -1]])):
        values, v = eigsh(A, k, which="BE", ncv=16)
        close(values, wanted, 1e-11)
        close(A @ v, (v * values).gather(), 1e-9)
    close(eigsh(A, 1, which="BE", return_eigenvectors=False), w[-1:], 1e-11)
    alone = eigsh(stacked(A[:9, :9], 2), 3, which="SA", return_eigenvectors=False)
    close(alone, np.stack([np.linalg.eigvalsh(a[:9, :9])[:3]] * 2), 1e-11)
    close(eigsh(A, 3, sigma=float(w[15]) + 0.01, return_eigenvectors=False), w[14:17], 1e-11)


@pytest.mark.parametrize("shape", [(20, 13), (13, 20), (2, 13, 20)], ids=str)
def test_some_singular_vectors(grid, shape):
    a = random(*shape, seed=6)
    s = np.linalg.svd(a, compute_uv=False)[..., :3]
    A = placed(grid, a, 1)
    every = svds(A, 3)
    close(svds(A, 3, return_singular_vectors=False), s, 1e-10)
    left = svds(A, 3, return_singular_vectors="u")
    right = svds(A, 3, return_singular_vectors="vh")
    assert left.Vh is right.U is None
    close(left.S, s, 1e-10)
    close(right.S, s, 1e-10)
    close(abs(left.U), abs(every.U.gather()), 1e-9)
    close(abs(right.Vh), abs(every.Vh.gather()), 1e-9)


@pytest.mark.parametrize("shape", [(20, 13), (13, 20)], ids=str)
@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e200])
@pytest.mark.parametrize("first", [1e-310, 1e-300, 1.0, 1e300])
def test_first_vectors_of_any_length(grid, shape, size, first):
    a = size * random(*shape)
    matrix, adjoint, v0 = placed(grid, a, 1), placed(grid, a.T.copy(), 2), placed(grid, first * random(shape[1]), 3)
    found = svds((lambda x: matrix @ x, lambda y: adjoint @ y), 2, v0=v0).S
    close(found / size, np.linalg.svd(a / size)[1][:2], 1e-8)


@pytest.mark.parametrize("shape", [(20, 13), (13, 20)], ids=str)
def test_singular_values_of_functions(grid, shape):
    """Two functions stand for a matrix; a vector says how many columns it has, and how vectors lie."""
    for dtype in (np.float64, np.complex128):
        a = random(*shape, dtype=dtype, seed=6)
        s, A = np.linalg.svd(a, compute_uv=False)[:3], placed(grid, a, 1)
        products, v = ((lambda x: A @ x), (lambda y: A.mT.conj() @ y)), placed(grid, random(shape[1]), 1)
        found = [svds(products, 3, v0=v), svds(A, 3, v0=v), svd_lowrank(products, 3, n_iter=12, like=v)]
        for u, values, vh in found:
            assert values.shape == (3,)
            close(values, s, 1e-9)
            close(A @ vh.mT.conj(), (u * values).gather(), 1e-7)
            close(u.mT.conj() @ u, np.eye(3), 1e-9)
        assert found[0].U.dtype == dtype
        q = range_finder(products, 5, like=v)
        assert q.shape == (shape[0], 5)
        close(q.mT.conj() @ q, np.eye(5), 1e-12)


def test_numpys_whole_numbers(grid):
    a, w = definite(6)
    A, B = placed(grid, a, 1), placed(grid, random(6), 1)
    two = np.int64(2)
    close(eigsh(A, two).eigenvalues, w[-2:], 1e-12)
    close(svds(A, two).S, w[:-3:-1], 1e-12)
    close(eigsh(A, two, ncv=np.int32(5), maxiter=np.int64(99)).eigenvalues, w[-2:], 1e-12)
    close(svd_lowrank(A, two, oversamples=np.int64(4), n_iter=two).S, w[:-3:-1], 1e-9)
    assert lsqr(A, B, iter_lim=two).itn == 2
    close(gmres(A, B, rtol=1e-12, restart=np.int64(6), maxiter=two)[0], np.linalg.solve(a, random(6)), 1e-10)


def test_single_precision_stays(grid):
    for x in svds(placed(grid, random(9, 7, dtype="float32"), 2), 3):
        assert x.dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_conjugate_gradients_of_indefinite_matrices(grid, dtype):
    """A direction of negative curvature is named where it shows late, unless rounding may be the cause."""
    n = 10
    q, b = np.linalg.qr(random(n, n, dtype=dtype))[0], random(n, dtype=dtype, seed=2)
    for least in (-3.0, -0.2):
        a = placed(grid, ((q * np.r_[least, np.linspace(1, 9, n - 1)]) @ q.conj().T).astype(dtype), 1)
        for options in ({}, {"pipelined": True}, {"M": lambda r: 2.0 * r}):
            with pytest.raises(np.linalg.LinAlgError, match="cg takes positive definite A: pᴴ A p = -"):
                cg(a, placed(grid, b, 1), rtol=1e-6, **options)
    a = placed(grid, definite(n, dtype, low=1e-2)[0], 1)
    for options in ({}, {"pipelined": True}):  # as far as rounding lets it
        x, _ = cg(a, placed(grid, b, 1), rtol=0, maxiter=200, **options)
        close(a @ x, b, 1e-3 if dtype == "float32" else 1e-10)


def test_zeros_solve_systems_of_zeros(grid):
    """As SciPy's: the first guess counts for the other systems."""
    a = definite(6)[0]
    b = random(6, 2) * [0, 1]
    for method in (cg, minres, gmres):
        x, info = method(placed(grid, a, 1), placed(grid, b, 1), placed(grid, random(6, 2, seed=4), 2), rtol=1e-10)
        assert info == 0
        assert not x.gather()[:, 0].any()
        close(x, np.linalg.solve(a, b), 1e-8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_errors_name_the_function_and_the_argument_with_nans(grid, value):
    n = 9
    good, b, x = definite(n)[0], random(n, seed=2), random(n, 2, seed=3)
    tall, wide = random(n, 6, seed=4), random(6, n, seed=4)

    def spoiled(values):
        values = values.copy()
        values[(1,) * values.ndim] = value
        return placed(grid, values, 1)

    A, B, X, T = (placed(grid, each, 1) for each in (good, b, x, tall))
    bad, odd = spoiled(good), lambda v: v * value
    calls = [
        *((lambda f=f: f(bad, B), f.__name__, "A") for f in (cg, minres, gmres, lsqr)),
        *((lambda f=f: f(A, B, M=bad), f.__name__, "M") for f in (cg, minres, gmres)),
        *((lambda f=f: f(A, B, x0=spoiled(b)), f.__name__, "x0") for f in (cg, minres, gmres, lsqr)),
        (lambda: cg(bad, B, pipelined=True), "cg", "A"),
        (lambda: eigsh(bad, 2), "eigsh", "A"),
        (lambda: eigsh(bad, 2, sigma=0.3), "eigsh", "A"),
        (lambda: eigsh(pla.stack([A, bad]), 2), r"matrix \(1,\): eigsh", "A"),
        (lambda: eigsh(A, 2, v0=spoiled(b)), "eigsh", "v0"),
        *((lambda m=m: svds(spoiled(m), 2), "svds", "A") for m in (tall, wide)),
        (lambda: svds(A, 2, v0=spoiled(b)), "svds", "v0"),
        (lambda: range_finder(spoiled(tall), 2), "range_finder", "A"),
        *((lambda m=m: svd_lowrank(spoiled(m), 2), "svd_lowrank", "A") for m in (tall, wide)),
        (lambda: svd_lowrank(pla.stack([T, spoiled(tall)]), 2), "svd_lowrank", "A"),
        (lambda: lobpcg(bad, X), "lobpcg", "A"),
        (lambda: lobpcg(A, spoiled(x)), "lobpcg", "X"),
        (lambda: lobpcg(A, X, bad), "lobpcg", "B"),
        (lambda: lobpcg(A, X, M=bad), "lobpcg", "M"),
    ]
    for call, name, argument in calls:
        with pytest.raises(ValueError, match=f"^{name} takes finite numbers; {argument} has NaNs or infinities"):
            call()
    for call, name in (
        *((lambda f=f: f(odd, B), f.__name__) for f in (cg, minres, gmres)),
        (lambda: lsqr((odd, odd), B), "lsqr"),
        (lambda: eigsh(odd, 2, v0=B), "eigsh"),
        (lambda: svds((odd, odd), 2, v0=B), "svds"),
        (lambda: svd_lowrank((odd, odd), 2, like=B), "svd_lowrank"),
        (lambda: lobpcg(odd, X), "lobpcg"),
    ):
        with pytest.raises(np.linalg.LinAlgError, match=f"^{name} met NaNs or infinities"):
            call()


def test_scipys_operators_and_sparse_matrices_are_refused(grid):
    values = definite(6)[0]
    a, b = placed(grid, values, 1), placed(grid, random(6), 1)
    for kind, other in (
        ("csr_array", scipy.sparse.csr_array(values)),
        ("coo_matrix", scipy.sparse.coo_matrix(values)),
        ("MatrixLinearOperator", scipy.sparse.linalg.aslinearoperator(values)),
    ):
        for call, name in (
            *((lambda f=f: f(other, b), f.__name__) for f in (cg, minres, gmres, lsqr)),
            (lambda: cg(a, b, M=other), "cg's M"),
            (lambda: eigsh(other, 2, v0=b), "eigsh"),
            (lambda: svds(other, 2), "svds"),
            (lambda: svd_lowrank(other, 2), "svd_lowrank"),
            (lambda: range_finder(other, 2), "range_finder"),
            (lambda: lobpcg(a, b[:, None], other), "lobpcg's B"),
        ):
            text = f"^{name} takes DistArrays and functions of DistArrays for matrices, not SciPy's {kind}, which"
            with pytest.raises(TypeError, match=text) as error:
                call()
            assert ("parlinalg.asarray(A.toarray())" in str(error.value)) == (kind != "MatrixLinearOperator")


def test_wrong_use(grid):
    a, b = placed(grid, definite(6)[0], 1), placed(grid, random(6), 1)
    own = np.ones(6)  # SciPy's kind of vector
    other = pla.ones(6, grid=pla.Grid({"z": grid.world.size}, grid.world, grid.backend.name))
    none = lambda x: None  # noqa: E731
    wrong = [
        (lambda: eigsh(a, 2, v0=own), ValueError, r"eigsh: v0 is a DistArray of shape \(6,\) .* not a ndarray"),
        (lambda: eigsh(a, 2, v0=other), ValueError, r"not of shape \(6,\) on another grid"),
        (lambda: eigsh(none, 2, v0=b), ValueError, r"eigsh: A x is to be a DistArray of shape \(6,\).* not a NoneType"),
        (lambda: eigsh(a, 2, tol=np.nan), ValueError, "eigsh: tol is a number of at least 0, not nan"),
        (lambda: svds((none, none), 2), ValueError, "svds of functions takes a DistArray v0"),
        (lambda: svds((none, none), 2, v0=b), ValueError, r"svds: A x is to be a DistArray of shape \(m, 1\)"),
        (lambda: lobpcg(none, b[:, None]), ValueError, r"lobpcg: A x is to be a DistArray of shape \(6, 1\)"),
        (lambda: lobpcg(a, b[:, None], tol="1"), ValueError, "lobpcg: tol is a number of at least 0, not '1'"),
        (lambda: lsqr((none, none), b), ValueError, r"lsqr: Aᴴ y is to be a DistArray of shape \(m,\)"),
        (lambda: lsqr(a, b, damp=np.nan), ValueError, "lsqr: damp is a number of at least 0, not nan"),
        (lambda: cg(a, b, rtol="1"), ValueError, "cg: rtol is a number of at least 0, not '1'"),
        (lambda: cg(a, other), pla.errors.GridError, "arrays on different grids meet"),
        (lambda: lsqr(a, other), pla.errors.GridError, "arrays on different grids meet"),
        (lambda: cg(a[:4], b), np.linalg.LinAlgError, r"cg takes a matrix of shape \(6, 6\), not \(4, 6\)"),
        (lambda: cg("a", b), TypeError, "cg takes a DistArray or a function of DistArrays for a matrix, not str"),
        (lambda: cg(a, "b"), ValueError, r"right-hand side of shape \(n,\) or \(..., n, k\), a DistArray, not str"),
        (lambda: cg(a, a[:3]), np.linalg.LinAlgError, r"cg takes a matrix of shape \(3, 3\), not \(6, 6\)"),
        (
            lambda: minres(stacked(a, 3), stacked(a, 2)),
            ValueError,
            r"minres: the leading dims of matrices and right-hand sides do not fit: \(3,\) and \(2, 6, 6\)",
        ),
        (
            lambda: lobpcg(stacked(a, 3), stacked(b[:, None], 2)),
            ValueError,
            r"leading dims of the stacks do not fit to each other: \(3, 6, 6\) and \(2, 6, 1\)",
        ),
        (
            lambda: cg(pla.stack([a, -a]), b),
            np.linalg.LinAlgError,
            r"cg takes positive definite A: pᴴ A p = -.* in iteration 1 of system \(1, 0\)",
        ),
        (lambda: cg(a, b, rtol=-1), ValueError, "rtol is a number of at least 0, not -1"),
        (lambda: svd_lowrank(own, 2), np.linalg.LinAlgError, "svd_lowrank takes a matrix, a DistArray.*, not ndarray"),
        (lambda: cg(a, b, np.ones(999)), ValueError, r"not array\(\[1.*\.\.\..{0,20}\)$"),
        (lambda: cg(a, b, own), ValueError, r"cg: x0 is a DistArray of the solution's shape, \(6,\), not array"),
        (lambda: minres(a, b, M=0 * a), np.linalg.LinAlgError, "minres takes positive definite M: rᴴ M r = 0"),
        (lambda: lsqr(a, own), ValueError, "lsqr takes a right-hand side of .*, a DistArray, not ndarray"),
        (lambda: lobpcg(a, own), ValueError, "lobpcg takes X as a DistArray .*, not a ndarray"),
        (lambda: lobpcg(a[:4, :4], b[:, None]), np.linalg.LinAlgError, "lobpcg's A takes a matrix of shape"),
        (lambda: eigsh(a, 2, which=["LA"]), ValueError, r"which is one of .*, not \['LA'\]"),
        (lambda: cg(a, b, b[:2]), ValueError, r"x0 has the shape of the solution, \(6,\), not \(2,\)"),
        (lambda: cg(a, b, maxiter=1.5), ValueError, "maxiter is a whole number of at least 0, not 1.5"),
        (lambda: cg(lambda x: x[:2], b), ValueError, r"A x is to be a DistArray of shape \(6,\)"),
        (lambda: cg(-a, b), np.linalg.LinAlgError, "cg takes positive definite A"),
        (lambda: cg(a, b, M=-1 * pla.eye(6, grid=grid)), np.linalg.LinAlgError, "cg takes positive definite M"),
        (lambda: minres(a, b * np.nan), ValueError, "minres takes finite numbers"),
        (lambda: gmres(a, b, restart=0), ValueError, "restart is a whole number of at least 1, not 0"),
        (lambda: lsqr(a, b[:3]), np.linalg.LinAlgError, r"lsqr takes a matrix \[m, n\] and b \[m\]"),
        (lambda: eigsh(a, 6), ValueError, "of 6 columns k is a whole number from 1 to 5, not 6"),
        (lambda: eigsh(a[:1, :1], 1), ValueError, "eigsh: a matrix with 1 column is too small for any k"),
        (lambda: svd_lowrank(a[:0], 1), ValueError, "svd_lowrank: a matrix with 0 rows is too small for any k"),
        (lambda: svds(a[:1], 1), ValueError, "svds: a matrix with 1 row is too small for any k"),
        (lambda: svds(a[:4], 4), ValueError, "svds: of 4 rows k is a whole number from 1 to 3, not 4"),
        *(
            (lambda s=seed: range_finder(a, 2, seed=s), error, f"seed is a whole number of at least 0.*, not {text}$")
            for seed, error, text in (("x", TypeError, "'x'"), (-1, ValueError, "-1"), (1.5, TypeError, "1.5"))
        ),
        (lambda: eigsh(a, 2, which="LR"), ValueError, "which is one of 'LM', 'SM', 'LA', 'SA', 'BE', not 'LR'"),
        (lambda: eigsh(lambda x: x, 2), ValueError, "eigsh of a function takes a DistArray v0"),
        (lambda: eigsh(a, 2.0), ValueError, "of 6 columns k is a whole number from 1 to 5, not 2.0"),
        (lambda: eigsh(a, True), ValueError, "of 6 columns k is a whole number from 1 to 5, not True"),
        (lambda: eigsh(a, 2, ncv=2), ValueError, "eigsh: of k = 2 ncv is a whole number from 3 to 6, not 2"),
        (lambda: eigsh(a, 2, ncv=5.0), ValueError, "ncv is a whole number from 3 to 6, not 5.0"),
        (lambda: eigsh(a, 2, maxiter=0), ValueError, "maxiter is a whole number of at least 1, not 0"),
        (lambda: eigsh(a, 2, sigma=1j), TypeError, "sigma is a real number, as the eigenvalues of Hermitian matrices"),
        (lambda: svds(a, 2, maxiter=2.5), ValueError, "svds: maxiter is a whole number of at least 1, not 2.5"),
        (lambda: svds(a, 2, ncv=2), ValueError, "svds: of k = 2 ncv is a whole number from 3 to 6, not 2"),
        (lambda: svds(a, 2, tol=-1), ValueError, "svds: tol is a number of at least 0, not -1"),
        (lambda: svds(a, 2, v0=b * 0), ValueError, "svds: v0 is zero"),
        (lambda: svds(a, 2, ncv=3, maxiter=1), np.linalg.LinAlgError, "svds: . of 2 singular values converged in 1 "),
        (lambda: svds(a, 2, return_singular_vectors="v"), ValueError, "is True, False, 'u' or 'vh', not 'v'"),
        (lambda: svd_lowrank(a, 2, n_iter=1.0), ValueError, "n_iter is a whole number of at least 0, not 1.0"),
        (lambda: svd_lowrank(a, 2, oversamples=True), ValueError, "oversamples is a whole number of at least 0"),
        (lambda: lobpcg(a, b[:, None], maxiter=1.5), ValueError, "maxiter is a whole number of at least 0, not 1.5"),
        (lambda: lsqr(a, b, iter_lim=1.5), ValueError, "iter_lim is a whole number of at least 0, not 1.5"),
        (lambda: lsqr(a, b, x0=b[:2]), ValueError, r"x0 has the shape of the solution, \(6,\), not \(2,\)"),
        (lambda: lsqr(a, b, x0=np.zeros(6)), ValueError, "x0 is a DistArray of the solution's shape on b's grid"),
        (lambda: svds(b, 2), np.linalg.LinAlgError, r"svds takes a matrix, .* or two functions .*, not \(6,\)"),
        (lambda: lobpcg(a, b[:, None], -a), np.linalg.LinAlgError, "only 0 independent vectors of 1, or B is not def"),
        (lambda: lobpcg(a[:2, :2], b[:2, None]), ValueError, "lobpcg takes vectors of at least 3 elements, not 2"),
        (lambda: lsqr(a, b * np.inf), ValueError, "lsqr takes finite numbers; the right-hand side has NaNs"),
        (lambda: lobpcg(a, a), ValueError, "lobpcg takes 1 to 2 vectors of 6 elements, not 6"),
        (lambda: eigsh(a, 2, v0=b * 0), ValueError, "eigsh: v0 is zero"),
        *(
            (call, TypeError, "complex128, but the method computes in float64; begin with complex vectors")
            for call in (
                lambda: cg(lambda x: x * 1j, b),
                lambda: gmres(a, b, M=lambda x: x * 1j),
                lambda: lsqr((lambda x: x * 1j, lambda x: x * -1j), b),
                lambda: eigsh(lambda x: x * 1j, 2, v0=b),
                lambda: lobpcg(lambda x: x * 1j, b[:, None]),
            )
        ),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    called = lambda x: pytest.fail("a product is taken before the callback is refused")  # noqa: E731
    for name, call in (
        ("cg", lambda f: cg(called, b, callback=f)),
        ("cg", lambda f: cg(called, b, pipelined=True, callback=f)),
        ("minres", lambda f: minres(called, b, callback=f)),
        ("gmres", lambda f: gmres(called, b, callback=f)),
        ("lsqr", lambda f: lsqr((called, called), b, callback=f)),
        ("lobpcg", lambda f: lobpcg(called, b[:, None], callback=f)),
        ("lobpcg", lambda f: lobpcg(stacked(a, 2), b[:, None], callback=f)),
    ):
        for callback in (3, "x", [print]):
            with pytest.raises(
                TypeError, match=re.escape(f"{name}: callback is a function, or None, not {callback!r}")
            ):
                call(callback)
    with pytest.raises(TypeError, match="it stops where an answer is good enough"):
        cg(pla.Tensor(a), b)


@pytest.mark.parametrize("kind", ["int8", "uint16", "bool"])
def test_small_integers_and_booleans_become_float64(grid, kind):
    """As in all of linear algebra; NumPy's promotion with float32 would keep half the digits."""
    a, b = (5 * np.eye(6) + 1).astype(kind), np.array([1, 0, 1, 1, 0, 1], kind)
    a = np.eye(6, dtype=bool) if kind == "bool" else a
    A, B = placed(grid, a, 1), placed(grid, b, 1)
    want = np.linalg.solve(a, b)
    solutions = [cg(A, B), cg(A, B, pipelined=True), minres(A, B), gmres(A, B)]
    for x in (*(x for x, _ in solutions), lsqr(A, B).x):
        assert x.dtype == np.float64
        close(x, want, 1e-5)
    assert eigsh(A, 2).eigenvalues.dtype == svds(A, 2).S.dtype == svd_lowrank(A, 2).S.dtype == np.float64
    assert lobpcg(A, placed(grid, random(6, 2).astype(np.float32), 1)).eigenvalues.dtype == np.float64
