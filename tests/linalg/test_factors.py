"""Factorizations on every grid: LAPACK's own residual ratios and matrices, errors that are the same on all ranks."""

from __future__ import annotations

import itertools
import pickle
from copy import copy, deepcopy
from time import sleep

import numpy as np
import pytest
import scipy.linalg

import parlinalg as pla
from parlinalg import linalg, tunables
from parlinalg.backend import blas
from parlinalg.comm.shared import shared_array
from parlinalg.layout import Layout
from parlinalg.linalg import kernels, systems, tile_sizes, tiles
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.panels import qr as qr_panels
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.panels.cholesky import SharedCholesky
from parlinalg.linalg.panels.lu import parity
from tests.cases import check, grids, layouts, same

pytestmark = pytest.mark.one_in(8)

DTYPES = ["float32", "float64", "complex64", "complex128"]
LOWER = {"float64": "float32", "complex128": "complex64"}
SIZES = [0, 1, 2, 7, 33, 97]
BOUND = 10  # LAPACK's own tests allow 30


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


def eps(dtype):
    return float(np.finfo(dtype).eps)


def norm(a):
    return float(np.abs(a).astype(np.float64).sum(axis=0).max()) if a.size else 0.0


def random(shape, dtype, rng):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else a).astype(dtype)


def matrices(n, dtype, rng):
    """Matrices of LAPACK's generators: badly conditioned, graded, clustered, of extreme sizes, rank-deficient."""
    yield "random", random((n, n), dtype, rng)
    if n < 2:
        return
    u, v = (np.linalg.qr(random((n, n), dtype, rng))[0] for _ in range(2))
    real, small = np.finfo(dtype), eps(dtype)
    for name, values in {
        "one small value": np.r_[np.ones(n - 1), 0.1 / small * small**2],
        "one large value": np.r_[1.0, np.full(n - 1, 0.1)],
        "geometric": np.geomspace(1, small * 10, n),
        "arithmetic": np.linspace(1, small * 10, n),
        "clustered": 1 + small * np.arange(n),
        "near overflow": np.linspace(1, 0.5, n) * float(real.max) ** 0.45,
        "near underflow": np.linspace(1, 0.5, n) * float(real.tiny) ** 0.45,
        "rank-deficient": np.r_[np.ones(n // 2), np.zeros(n - n // 2)],
    }.items():
        yield name, ((u * values) @ v).astype(dtype)
    kahan = np.triu(np.full((n, n), -np.cos(1.2))) * np.sin(1.2) ** np.arange(n)[:, None]
    np.fill_diagonal(kahan, np.sin(1.2) ** np.arange(n))
    yield "Kahan", kahan.astype(dtype)
    wilkinson = np.tril(np.full((n, n), -1.0), -1) + np.eye(n)
    wilkinson[:, -1] = 1
    yield "growth of elements", wilkinson[: min(n, 20), : min(n, 20)].astype(dtype)


def cases(grid, seed, shape_of=lambda n: (n, n)):
    """Matrices in layouts of their own, with tiles of several sizes."""
    rng = np.random.default_rng(seed)
    every = layouts(grid.axes, 2, partial=False)
    for n in SIZES:
        for dtype in DTYPES:
            if grid.size > 1 and n > 1 and rng.random() < 0.5:
                continue
            for name, a in matrices(n, dtype, rng):
                if name != "random" and rng.random() < (0.7 if grid.size == 1 else 0.85):
                    continue
                a = a if shape_of(n) == (n, n) else random(shape_of(n), dtype, rng)
                layout = every[rng.integers(len(every))]
                yield name, a, pla.distribute(a, grid, layout), [None, 4, 16][rng.integers(3)], rng


def small(value, scale, n, dtype, what):
    """LAPACK's ratio, |residual| / (n eps |A|), is below the bound."""
    if n and scale:
        ratio = value / (n * eps(dtype) * scale)
        assert ratio < BOUND, (what, ratio)
    else:
        assert not value, what


def test_cholesky(grid):
    for name, a, given, block, rng in cases(grid, 1):
        n, dtype = len(a), a.dtype
        if n and ("near" in name or "growth" in name):
            continue
        s = a.astype(np.result_type(dtype, np.float64)) @ a.conj().T
        s = ((s + s.conj().T) / 2 + n * eps(dtype) * 100 * norm(a) ** 2 * np.eye(n)).astype(dtype)
        x = pla.distribute(s, grid, Layout(*grid.default_layout(s.shape).dims))
        factor = linalg.cho_factor(x, block)
        lower = factor.L.gather()
        assert factor.L.layout == x.layout
        assert not np.triu(lower, 1).any()
        small(norm(lower @ lower.conj().T - s), norm(s), n, dtype, (name, n, dtype))
        b = random((n, 3), dtype, rng)
        y = factor.solve(pla.distribute(b, grid, Layout(None, grid.axes[0]))).gather()
        small(norm(s @ y - b), norm(s) * norm(y), n, dtype, (name, n, dtype, "solve"))
        placed = pla.distribute(s, grid, given.layout)  # L goes there without a trip, where ranks see all panels
        direct = linalg.cholesky(placed)
        assert direct.layout == placed.layout
        lower = direct.gather()
        assert not np.triu(lower, 1).any()
        small(norm(lower @ lower.conj().T - s), norm(s), n, dtype, (name, n, dtype, "without a factor"))
        upper = linalg.cholesky(x, upper=True)
        assert upper.layout == x.layout
        np.testing.assert_array_equal(upper.gather(), linalg.cholesky(x).gather().conj().T)


def test_cholesky_reads_nothing_but_the_matrix(grid, monkeypatch):
    """What was in shared memory before, and what is above the diagonal, changes nothing."""
    monkeypatch.setattr(tunables, "SHARED_BYTES", 1)
    monkeypatch.setattr(tile_sizes, "FEW", grid.size)
    rng = np.random.default_rng(3)
    for n, block, dtype, at in itertools.product([45], [7, 64], ["float32", "complex128"], [0, 1, -1]):
        a = random((n, n), dtype, rng)
        s = a @ a.conj().T + n * np.eye(n, dtype=dtype)
        layout = layouts(grid.axes, 2, partial=False)[at]
        odd = pla.distribute(np.tril(s) + np.triu(np.full_like(s, 3e30), 1), grid, layout)
        found = linalg.cho_factor(odd, block)
        if grid.inside:
            with shared_array(found.tiles.across, (4 * n, 4 * n), dtype) as memory:
                if memory is not None:
                    memory[...] = np.nan
        for each in (found.L, linalg.cholesky(odd), linalg.cho_factor(odd, block).L):
            assert each.layout == layout
            np.testing.assert_allclose(each.gather(), np.linalg.cholesky(s), rtol=0, atol=n * eps(dtype) * norm(a))
    s[30, 30] = -1
    for block in (7, 64):
        with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 31 is not"):
            linalg.cho_factor(pla.distribute(s, grid, layout), block)


@pytest.mark.parametrize("step", ["_bring", "_factor", "_copy_home"])
def test_cholesky_waits_for_late_ranks(grid, monkeypatch, step):
    """Of ranks that share memory any may be late with any of its steps."""
    monkeypatch.setattr(tunables, "SHARED_BYTES", 1)
    monkeypatch.setattr(tile_sizes, "FEW", grid.size)
    a = random((40, 40), "float64", np.random.default_rng(4))
    a = a @ a.T + 40 * np.eye(40)
    x = pla.distribute(a, grid, grid.default_layout(a.shape))
    prompt = getattr(SharedCholesky, step)

    def late(*args):
        sleep(0.01)
        return prompt(*args)

    for rank in {0, grid.world.size // 2, grid.world.size - 1}:
        with monkeypatch.context() as patch:
            if grid.world.rank == rank:
                patch.setattr(SharedCholesky, step, late)
            for found in (linalg.cho_factor(x, 8).L, linalg.cholesky(x)):
                same(found, np.linalg.cholesky(a), 1e-13)


def test_lu(grid):
    for name, a, x, block, rng in cases(grid, 2):
        n, dtype = len(a), a.dtype
        factor = linalg.lu_factor(x, block)
        lower, upper = (f.gather() for f in factor.factors())
        order = factor.permutation
        assert sorted(order) == list(range(n))
        assert np.isfinite(lower).all()
        small(norm(lower @ upper - a[order]), norm(a), n, dtype, (name, n, dtype, x.layout))
        if "rank" in name or "small" in name:
            continue
        b = random((n, 2), dtype, rng)
        rhs = pla.distribute(b, grid, Layout(grid.axes[0], None))
        for y, matrix in (
            (linalg.solve(x, rhs), a), (factor.solve(rhs), a), (factor.solve(rhs, adjoint=True), a.conj().T),
        ):  # fmt: skip
            assert y.layout == rhs.layout
            small(norm(matrix @ y.gather() - b), norm(a) * norm(y.gather()), n, dtype, (name, n, dtype))


class TestLayers:
    """Several layers of ranks (2.5D), in all numbers that the grid has, and the same results as one layer's."""

    SIZES = (0, 1, 7, 97, 300)

    @pytest.fixture(autouse=True)
    def long_pieces(self, monkeypatch):
        """Trips of the larger matrices in some pieces, not in hundreds."""
        monkeypatch.setattr(tunables, "TILES_MOVED", max(1 << 11, tunables.TILES_MOVED))

    def depths(self, grid):
        """The numbers of layers that ranks can form: on GPUs one."""
        return tiles.depths(grid.sizes) if grid.backend.host_memory else [1]

    def cases(self, grid, seed, shape_of=lambda n: (n, n)):
        rng, every = np.random.default_rng(seed), layouts(grid.axes, 2, partial=False)
        for depth in self.depths(grid)[1:] or [1]:
            for n in self.SIZES if shape_of(1) == (1, 1) else self.SIZES[:-1]:
                for dtype in rng.choice(DTYPES, 2 if n < 300 else 1, replace=False):
                    block = int(rng.choice([1, 4] if n < 97 else [16, 40]))
                    a = random(shape_of(n), dtype, rng)
                    yield a, pla.distribute(a, grid, every[rng.integers(len(every))]), block, depth, rng

    def test_cholesky(self, grid):
        for a, given, block, depth, rng in self.cases(grid, 11):
            n, dtype, what = len(a), a.dtype, (len(a), a.dtype, depth, block)
            s = (a @ a.conj().T + n * eps(dtype) * 100 * norm(a) ** 2 * np.eye(n)).astype(dtype)
            x = pla.distribute(s, grid, given.layout)
            direct, factor = linalg.cholesky(x, depth=depth), linalg.cho_factor(x, block, depth=depth)
            for found in direct, factor.L:
                assert found.layout == x.layout
                lower = found.gather()
                assert not np.triu(lower, 1).any()
                small(norm(lower @ lower.conj().T - s), norm(s), n, dtype, what)
            same(linalg.cholesky(x, upper=True, depth=depth), direct.gather().conj().T, 0)
            b = random((n, 3), dtype, rng)
            y = factor.solve(pla.distribute(b, grid, Layout(None, grid.axes[0]))).gather()
            small(norm(s @ y - b), norm(s) * norm(y), n, dtype, what)
            sign, log = factor.slogdet()
            half = np.log(np.diag(factor.L.gather()).real.astype(float)).sum()
            assert (sign.gather(), log.dtype, factor.det().dtype) == (1, lower.real.dtype, dtype)
            assert abs(log.gather() - 2 * half) <= n * eps(dtype) * (1 + abs(2 * half))
            if abs(half) < 20:
                assert abs(factor.det().gather() / np.exp(2 * half) - 1) <= 100 * (n + 1) * eps(dtype)

    @pytest.mark.parametrize("shape_of", [lambda n: (n, n), lambda n: (n + 11, n), lambda n: (n, n + 23)])
    def test_lu(self, grid, shape_of):
        for a, x, block, depth, rng in self.cases(grid, 12, shape_of):
            (m, n), dtype, what = a.shape, a.dtype, (a.shape, a.dtype, depth, block)
            factor = linalg.lu_factor(x, block, depth=depth)
            lower, upper = (f.gather() for f in factor.factors())
            order = factor.permutation
            assert sorted(order) == list(range(m))
            assert np.array_equal(lower, np.tril(lower, -1) + np.eye(*lower.shape))
            assert not np.tril(upper, -1).any()
            small(norm(lower @ upper - a[order]), norm(a), max(m, n), dtype, what)
            if m != n:
                continue
            sign, log = np.linalg.slogdet(a)
            assert abs(factor.slogdet().sign.gather() - sign) < 1e4 * max(1, n) * eps(dtype)
            assert abs(factor.slogdet().logabsdet.gather() - log) < 1e4 * max(1, n) * eps(dtype)
            b = random((n, int(rng.integers(1, 9))), dtype, rng)
            rhs = pla.distribute(b, grid, Layout(grid.axes[0], None))
            for y, matrix in (
                (linalg.solve(x, rhs, depth=depth), a), (factor.solve(rhs), a),
                (factor.solve(rhs, adjoint=True), a.conj().T),
            ):  # fmt: skip
                assert y.layout == rhs.layout
                small(norm(matrix @ y.gather() - b), norm(a) * norm(y.gather()), n, dtype, what)
            if dtype == np.float64 and n:
                y = linalg.solve(x, rhs, refine=True, depth=depth).gather()
                small(norm(a @ y - b), norm(a) * norm(y), n, dtype, what)

    def test_indefinite_and_singular(self, grid):
        a = np.diag(np.r_[np.ones(40), -1.0, np.ones(20), -1.0])
        x, ones = (pla.distribute(v, grid, grid.default_layout(v.shape)) for v in (a, np.ones((20, 20))))
        for depth in self.depths(grid):
            for call in (lambda d=depth: linalg.cholesky(x, depth=d), lambda d=depth: linalg.cho_factor(x, 8, depth=d)):
                with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 41 is not"):
                    call()
            assert linalg.lu_factor(ones, 4, depth=depth).zero == 1
            with pytest.raises(np.linalg.LinAlgError, match=r"singular: U\[1, 1\] of its factorization is 0"):
                linalg.solve(ones, ones, depth=depth)
            odd = pla.distribute(np.where(a == 1, np.nan, a), grid, x.layout)
            with pytest.raises(ValueError, match="finite numbers"):
                linalg.cholesky(odd, depth=depth)

    def functions(self, depth):
        yield "cholesky", lambda x: linalg.cholesky(x, depth=depth)
        yield "cho_factor", lambda x: linalg.cho_factor(x, depth=depth)
        yield "lu_factor", lambda x: linalg.lu_factor(x, 4, depth=depth)
        yield "solve", lambda x: linalg.solve(x, x, depth=depth)
        yield "solve", lambda x: linalg.solve(x, x if x.ndim > 2 else x[0], refine=x.ndim == 2, depth=depth)

    def test_a_number_of_layers_that_the_grid_has_not(self, grid):
        x = pla.eye(9, grid=grid)
        for depth in (0, 5, 2.5, 1.0, "2", True, np.True_, pla.ones(3, grid, dtype=np.int64), np.ones(3, int)):
            for name, call in self.functions(depth):
                with pytest.raises(ValueError, match=rf"^{name}: depth is a number of layers, one of 1.*on a grid"):
                    call(x)
                with pytest.raises(ValueError, match=rf"^{name}: depth.* (stacks .*no layers|the number of)"):
                    call(pla.stack([x, x]))
        linalg.solve(pla.stack([x, x]), x, depth=np.int8(1))
        with pytest.raises(ValueError, match=r"^lu_factor: depth=2 is .* stacks of matrices have no layers"):
            linalg.lu_factor(pla.ones((2, 3, 3), grid), depth=2)
        if not grid.backend.host_memory and grid.size > 1:
            with pytest.raises(ValueError, match="on GPUs ranks form one layer"):
                linalg.cholesky(x, depth=tiles.depths(grid.sizes)[-1])

    def test_layers_are_chosen_where_they_save(self, grid, monkeypatch):
        """Between nodes, and up to a limit of memory."""
        sizes = grid.sizes
        x = pla.eye(40, grid=grid)
        assert linalg.cho_factor(x).tiles.D == 1
        assert {tile_sizes.layers(r, 9000, 9000, sizes, True, 8) for r in ("cholesky", "lu", "solve")} == {1}
        deals = {d: tiles.Deal(sizes, 64, "square", d) for d in tiles.depths(sizes)}
        words = {d: tile_sizes.panel_words(9000, 9000, t.R, t.C, t.D, half=True) for d, t in deals.items()}
        chosen = tile_sizes.layers("cholesky", 9000, 9000, sizes, False, 8)
        assert chosen == 1 or words[chosen] < words[1]
        assert chosen > 1 or grid.size not in (8, 12) or len(sizes) < 3
        monkeypatch.setattr(tunables, "LAYER_BYTES", 1000)
        assert tile_sizes.layers("cholesky", 9000, 9000, sizes, False, 8) == 1
        used = []
        monkeypatch.setattr("parlinalg.linalg.matrices.layers", lambda *_: used.append(1) or max(self.depths(grid)))
        check(linalg.cholesky(x), np.eye(40))
        assert used


@pytest.mark.parametrize("shape_of", [lambda n: (n + 5, n), lambda n: (n, n + 9), lambda n: (3, n)])
def test_rectangles(grid, shape_of):
    for name, a, x, block, _ in cases(grid, 3, shape_of):
        if name != "random":
            continue
        (m, n), dtype = a.shape, a.dtype
        factor = linalg.lu_factor(x, block)
        lower, upper = (f.gather() for f in factor.factors())
        small(norm(lower @ upper - a[factor.permutation]), norm(a), max(m, n), dtype, (a.shape, dtype))
        residuals(a, linalg.qr_factor(x, block), x)
        full = linalg.qr(x, mode="complete")
        q, r = full.Q.gather(), full.R.gather()
        assert q.shape == (m, m)
        assert r.shape == (m, n)
        small(norm(q @ r - a), norm(a), max(m, n), dtype, "complete")


def residuals(a, factor, x):
    q, r = factor.Q(), factor.R
    assert q.layout == r.layout == x.layout
    q, r = q.gather(), r.gather()
    assert not np.tril(r, -1).any()
    n = max(a.shape)
    small(norm(q @ r - a), norm(a), n, a.dtype, (a.shape, a.dtype))
    small(norm(q.conj().T @ q - np.eye(q.shape[1])), 1, len(a) and n, a.dtype, (a.shape, a.dtype, "orthogonality"))


def test_qr(grid):
    for _, a, x, block, _ in cases(grid, 4):
        residuals(a, linalg.qr_factor(x, block), x)


@pytest.mark.serial
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_of_one_rank_share_the_columns(threads, dtype, monkeypatch):
    """Of a grid of one rank, however the columns are dealt; and BLAS has its threads back."""
    rng, given, counts, shares = np.random.default_rng(threads), [], set(), qr_panels.QR._shares

    def noted(self, first, width, count):
        counts.add(count)
        return shares(self, first, width, count)

    monkeypatch.setattr(blas, "blas_threads", lambda: threads)
    monkeypatch.setattr(blas, "_set_openblas", lambda threads, packages: given.append(threads))
    monkeypatch.setattr(qr_panels, "PART", 8)
    monkeypatch.setattr(qr_panels, "WIDE", 16)
    monkeypatch.setattr(qr_panels.QR, "_shares", noted)
    for shape in [(97, 97), (130, 65), (64, 120), (48, 48)]:
        a = random(shape, dtype, rng)
        x, b = pla.array(a, grid=(grid := pla.Grid({"r": 1}))), random((shape[0], 5), dtype, rng)
        counts.clear()
        residuals(a, factor := linalg.qr_factor(x, 16), x)
        assert counts == {threads}
        assert given == [1, threads] * (len(given) // 2)
        if shape[0] >= shape[1]:
            want = np.linalg.lstsq(a, b)[0]
            np.testing.assert_allclose(
                factor.solve(pla.array(b, grid=grid)).gather(), want, rtol=0, atol=5000 * eps(dtype) * abs(want).max()
            )
        full = factor.Q(shape[0]).gather()
        small(norm(full.conj().T @ full - np.eye(len(full))), 1, max(shape), dtype, "complete")
        small(norm(full[:, : min(shape)] @ factor.R.gather() - a), norm(a), max(shape), dtype, "complete")


FORMS = {"reduced": "economic", "complete": "full", "r": "r"}
"""Our modes of `qr`, and SciPy's."""


def pivoted(a, x, mode="reduced"):
    """The factors, in the layout of x, gathered; the sizes of R's diagonal do not rise."""
    *q, r, p = linalg.qr(x, mode=mode, pivoting=True)
    m, n = a.shape
    k, tiny = m if mode == "complete" else min(m, n), eps(a.dtype)
    assert {y.layout for y in (*q, r)} == {x.layout.with_partial(())}
    assert p.layout == Layout(x.layout.dims[1])
    assert (p.shape, p.dtype, r.shape, r.dtype) == ((n,), np.int64, (k, n), a.dtype)
    r, p = r.gather(), p.gather()
    assert sorted(p) == list(range(n))
    assert not np.tril(r, -1).any()
    sizes = np.abs(np.diag(r)).astype(float)
    least = float(np.finfo(a.dtype).smallest_subnormal)
    assert (sizes[1:] <= sizes[:-1] * (1 + BOUND * tiny) + BOUND * tiny * sizes[:1] + least).all()
    if mode != "r":
        q = q[0].gather()
        assert (q.shape, q.dtype) == ((m, k), a.dtype)
        power = int(-np.frexp(np.abs(a).max(initial=0))[1])
        c, d = 2.0 ** (power // 2), 2.0 ** (power - power // 2)  # their product may be out of range
        near, other = (each.astype(np.result_type(a, np.float64)) * c * d for each in (a, r))
        lost = max(0, norm(q @ other - near[:, p]) - k * least * c * d)  # by subnormal numbers
        small(lost, norm(near), max(m, n), q.dtype, (a.shape, q.dtype, mode))
        small(norm(q.conj().T @ q - np.eye(k)), 1, k and m, q.dtype, (a.shape, q.dtype, mode, "orthogonality"))
    return r, p


@pytest.mark.timeout(180)  # two collective calls a column
def test_qr_with_pivoting(grid):
    """Every kind of matrix; of random ones, whose norms are far from ties in float64, the pivots are SciPy's."""
    rng = np.random.default_rng(8)
    for shape_of in (lambda n: (n, n), lambda n: (n + 5, n), lambda n: (4 * n + 3, n), lambda n: (n, n + 9)):
        for name, a, x, _, _ in cases(grid, 8, shape_of):
            mode = list(FORMS)[rng.integers(3)]
            r, p = pivoted(a, x, mode)
            if name == "random" and a.size and eps(a.dtype) < 1e-15:
                *_, upper, order = scipy.linalg.qr(a, mode=FORMS[mode], pivoting=True)
                np.testing.assert_array_equal(p, order)
                np.testing.assert_allclose(abs(r), abs(upper[: len(r)]), atol=200 * eps(a.dtype) * norm(a))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [1, 1 << 40], ids=["loops", "no loops"])
def test_qr_with_pivoting_of_special_matrices(grid, dtype, least, monkeypatch):
    """Equal columns, zeros, lower rank, one column, sizes near underflow and overflow, terms that are not summed."""
    monkeypatch.setattr(tunables, "COMPILED_SIZE", least)
    rng, real = np.random.default_rng(9), np.finfo(dtype)
    every = layouts(grid.axes, 2)
    for a in (
        np.eye(70, 40), np.zeros((9, 7)), np.ones((40, 50)), np.ones((5, 1)), np.ones((1, 5)), np.zeros((0, 3)),
        np.zeros((3, 0)), random((60, 12), dtype, rng) @ random((12, 60), dtype, rng),
        np.tri(50) * real.smallest_subnormal * 8, random((40, 40), dtype, rng) * (real.tiny / 16),
        random((40, 9), dtype, rng) * (real.max / 100), random((9, 40), dtype, rng) * (real.max / 100),
        random((45, 45), dtype, rng) * np.geomspace(1, float(real.tiny) ** 0.9, 45),
    ):  # fmt: skip
        a = a.astype(dtype)
        layout = every[rng.integers(len(every))]
        x = pla.distribute(a, grid, layout.with_partial(())).redistribute(layout)
        r, p = pivoted(a, x)
        if a.shape == (60, 60):
            assert (np.abs(np.diag(r)) > 100 * eps(dtype) * norm(a)).sum() == 12
        if a.shape in ((70, 40), (9, 7)):  # the first of equals, at every step
            np.testing.assert_array_equal(p, np.arange(a.shape[1]))
        if not np.any(a):
            assert not r.any()


@pytest.mark.parametrize("least", [1, 1 << 40], ids=["loops", "no loops"])
def test_qr_with_pivoting_of_columns_nearly_alike(grid, least, monkeypatch):
    """Their norms are lost by the first step: what is left of each is a hundred-millionth of it."""
    monkeypatch.setattr(tunables, "COMPILED_SIZE", least)
    rng, n = np.random.default_rng(3), 12
    sizes = 1e-8 * 2.0 ** -rng.permutation(n)
    a = np.ones((n, 1)) + sizes * np.linalg.qr(rng.normal(size=(n, n)))[0]
    for layout in layouts(grid.axes, 2, partial=False):
        r, _ = linalg.qr(pla.distribute(a, grid, layout), mode="r", pivoting=True)
        found = abs(np.diag(r.gather()))
        assert (found[2:] <= found[1:-1] * (1 + 1e-6)).all()
        known = abs(np.diag(scipy.linalg.qr(a, mode="r", pivoting=True)[0]))
        np.testing.assert_allclose(found, known, rtol=0, atol=n * eps(a.dtype) * norm(a))


def test_qr_with_pivoting_of_stacks(grid):
    rng = np.random.default_rng(10)
    for stacks, shape, dtype in zip(
        [(1,), (grid.size + 1,), (2, 0), (3, 2)] * 3, [(6, 4), (4, 6), (5, 5), (40, 3)] * 3, DTYPES * 3, strict=True
    ):
        a = random((*stacks, *shape), dtype, rng)
        every = layouts(grid.axes, a.ndim, partial=False)
        x = pla.distribute(a, grid, every[rng.integers(len(every))])
        for mode in FORMS:
            *q, r, p = linalg.qr(x, mode=mode, pivoting=True)
            assert p.shape == (*stacks, shape[1])
            assert {y.layout for y in (*q, r)} == {x.layout}
            assert p.layout == Layout(*x.layout.dims[:-2], x.layout.dims[-1])
            r, p = r.gather(), p.gather()
            for at in np.ndindex(*stacks):
                np.testing.assert_array_equal(p[at], scipy.linalg.qr(a[at], pivoting=True)[2])
                if q:
                    small(norm((q[0].gather()[at] @ r[at]) - a[at][:, p[at]]), norm(a[at]), max(shape), a.dtype, shape)


def test_wrong_qr_with_pivoting(grid):
    x = pla.ones((9, 5), grid)
    for mode in ("full", "economic", "raw"):
        with pytest.raises(ValueError, match=f"mode is 'reduced', 'complete' or 'r', not '{mode}'"):
            linalg.qr(x, mode=mode, pivoting=True)
    for value in (np.nan, np.inf):
        for shape in ((9, 5), (5, 9), (90, 2), (2, 5, 5), (13, 5, 5)):
            a = np.ones(shape)
            a[..., -1, -1] = value
            for mode in FORMS:
                with pytest.raises(ValueError, match="qr takes finite numbers; the array has NaNs or infinities"):
                    linalg.qr(pla.distribute(a, grid, grid.default_layout(shape)), mode=mode, pivoting=True)


def exact(got, want):
    if (values := got.gather()) is not None:
        np.testing.assert_array_equal(values, want)


def test_whole_numbers_are_exact(grid):
    """Unit triangles of small whole numbers: every step is exact, so that every grid gives the same bits."""
    rng = np.random.default_rng(5)
    lower = np.tril(rng.integers(-2, 3, (41, 41)), -1) + np.eye(41)
    b = rng.integers(-3, 4, (41, 4)).astype(float)
    x = pla.distribute(lower, grid, grid.default_layout((41, 41)))
    rhs = pla.distribute(lower @ b, grid, grid.default_layout((41, 4)))
    check(linalg.solve_triangular(x, rhs, lower=True, unit_diagonal=True), b)
    spd = np.tril(rng.integers(-2, 3, (30, 30)), -1) + 2 * np.eye(30)
    s = spd @ spd.T
    for block in (7, 30, None):  # roots of 4, divisions by 2
        found = linalg.cho_factor(pla.distribute(s, grid, grid.default_layout(s.shape)), block)
        exact(found.L, spd)
    exact(linalg.cholesky(pla.distribute(s, grid, grid.default_layout(s.shape))), spd)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_whole_numbers_with_pivots_are_exact(grid, dtype):
    """Rows of a triangle in any order: each column has one pivot to choose, in tournaments too, and all is whole."""
    rng = np.random.default_rng(6)
    for n in (1, 2, 23, 40):
        upper = np.triu(rng.integers(-1, 2, (n, n)) * (rng.random((n, n)) < 0.2), 1).astype(dtype)
        upper += np.diag(rng.choice([-2, -1, 1, 2], n))
        order = rng.permutation(n)
        if n > 1 and parity(order) == (1 if n < 40 else -1):  # both signs of determinants
            order[[0, 1]] = order[[1, 0]]
        a = upper[order]
        x = rng.integers(-4, 5, (n, 3)).astype(dtype)
        layout = layouts(grid.axes, 2, partial=False)[n % len(layouts(grid.axes, 2, partial=False))]
        A = pla.distribute(a, grid, layout)
        for block in (5, None):
            factor = linalg.lu_factor(A, block)
            np.testing.assert_array_equal(factor.permutation, np.argsort(order))
            for got, want in zip(factor.factors(), (np.eye(n), upper), strict=True):
                exact(got, want)
            exact(factor.solve(pla.distribute(a @ x, grid, layout)), x)
            exact(factor.solve(pla.distribute(a.T.conj() @ x, grid, layout), adjoint=True), x)
        sign = parity(order)
        exact(linalg.det(A), sign * np.diag(upper).prod())
        exact(linalg.slogdet(A)[0], sign * np.sign(np.diag(upper)).prod())
        exact(linalg.solve(A, pla.distribute(a @ x, grid, layout)), x)
        inverse = linalg.inv(A)
        exact(inverse @ A, np.eye(n))
        exact(A @ A, a @ a)
        exact(linalg.matrix_power(A, 3), a @ a @ a)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
def test_triangular_solutions(grid, lower, adjoint, unit, monkeypatch):
    """Of one right-hand side, few, and many, with the triangle in any layout and NaNs in the other one."""
    monkeypatch.setattr(triangular, "PIECE", 9)
    every = layouts(grid.axes, 2, partial=False)
    for name, a, _, _, rng in cases(grid, 6):
        if name != "random":
            continue
        n, dtype = len(a), a.dtype
        a = (a + n * np.eye(n, dtype=dtype)) / n
        t = np.tril(a, -unit) if lower else np.triu(a, unit)
        t = t + np.eye(n, dtype=dtype) if unit else t
        x = np.where((np.triu if lower else np.tril)(np.ones((n, n)), 1 if lower else -1) == 1, dtype.type(np.nan), a)
        x = pla.distribute(x, grid, every[int(rng.integers(len(every)))])
        shape = ((n,), (n, 3), (n, triangular.FEW + 9))[int(rng.integers(3))]
        b = random(shape, dtype, rng)
        rhs = pla.distribute(b, grid, Layout(None) if len(shape) == 1 else every[int(rng.integers(len(every)))])
        y = linalg.solve_triangular(x, rhs, lower=lower, adjoint=adjoint, unit_diagonal=unit)
        assert y.layout == rhs.layout
        t = t.conj().T if adjoint else t
        y, b = (each.reshape(n, shape[1] if len(shape) > 1 else 1) for each in (y.gather(), b))
        small(norm(t @ y - b), norm(t) * norm(y), n, dtype, (n, dtype, shape))


@pytest.mark.parametrize("columns", [2, triangular.FEW + 9])
@pytest.mark.parametrize("adjoint", [True, False])
def test_solutions_that_overflow(grid, columns, adjoint):
    """Without a warning, as NumPy's; pieces of the solution that are in range have their values."""
    n, layout = 200, grid.default_layout((200, 200))
    t = np.eye(n, dtype=np.complex64) - np.triu(np.ones((n, n), np.float32), 1)
    b = np.zeros((n, columns), t.dtype)
    b[0 if adjoint else -1] = 1  # of which x is 1, 1, 2, 4, ... from there on
    A, B = pla.distribute(t, grid, layout), pla.distribute(b, grid, Layout(None, None))
    lu, found = linalg.lu_factor(A).solve(B, adjoint=adjoint), [linalg.solve_triangular(A, B, adjoint=adjoint)]
    if not adjoint:  # else zeros of L multiply NaNs, in LAPACK too
        found += [lu, linalg.solve(A, B), linalg.qr_factor(A).solve(B)]
    for each in found:
        x = each.gather()[:: 1 if adjoint else -1]
        assert not np.isfinite(x[160:]).any()
        np.testing.assert_allclose(x[1:100], np.broadcast_to(2.0 ** np.arange(99)[:, None], (99, columns)), rtol=1e-4)


class TestErrors:
    def test_indefinite(self, grid):
        a = np.diag(np.r_[np.ones(40), -1.0, np.ones(20), -1.0])
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        with pytest.raises(np.linalg.LinAlgError, match="leading minor of order 41 is not"):
            linalg.cho_factor(x, 8)

    def test_singular(self, grid):
        a = np.ones((20, 20))
        x = pla.distribute(a, grid, grid.default_layout(a.shape))
        for call in (lambda: linalg.inv(x), lambda: linalg.lu_factor(x, 4).solve(x)):
            with pytest.raises(np.linalg.LinAlgError, match=r"singular: U\[1, 1\] of its factorization is 0"):
                call()
        assert linalg.det(x).gather() == 0
        sign, log = linalg.slogdet(x)
        assert sign.gather() == 0
        assert log.gather() == -np.inf
        tiny = pla.distribute(np.diag([3j, -1, -2]) * 1e-310, grid, Layout(None, None))  # whose inverses are infinite
        np.testing.assert_allclose(linalg.slogdet(tiny).sign.gather(), 1j, rtol=1e-12)
        assert linalg.det(tiny).gather() == 0
        with pytest.raises(np.linalg.LinAlgError, match=r"element \[3, 3\] of its diagonal is 0"):
            linalg.solve_triangular(
                pla.distribute(np.diag([1.0, 1, 1, 0, 0]), grid, Layout(None, None)), pla.ones(5, grid)
            )
        for layout, sides in itertools.product(layouts(grid.axes, 2, partial=False), (2, triangular.FEW + 1)):
            with pytest.raises(np.linalg.LinAlgError, match=r"element \[3, 3\] of its diagonal is 0"):
                linalg.solve_triangular(
                    pla.distribute(np.tril(np.ones((7, 7))) * ([1] * 3 + [0, 1, 1, 0]), grid, layout),
                    pla.ones((7, sides), grid), lower=True,
                )  # fmt: skip

    @pytest.mark.parametrize("sides", [2, triangular.FEW + 1])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_odd_numbers_in_triangular_systems(self, grid, value, sides):
        good, b = np.tril(np.ones((9, 9))), np.ones((9, sides))
        for at in ("matrix", "diagonal", "side"):
            t, c = good.copy(), b.copy()
            if at == "side":
                c[4, -1] = value
            else:
                t[5, 5 if at == "diagonal" else 2] = value
            for layout in layouts(grid.axes, 2, partial=False):
                with pytest.raises(ValueError, match="finite numbers; the array has NaNs or infinities"):
                    linalg.solve_triangular(
                        pla.distribute(t, grid, layout), pla.distribute(c, grid, layout), lower=True
                    )  # fmt: skip

    @pytest.mark.parametrize("name", ["cholesky", "inv", "qr", "det", "slogdet"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_odd_numbers(self, grid, name, value):
        for shape in ((9, 9), (16, 3, 3)):
            a = np.zeros(shape) + np.eye(shape[-1])
            a[..., -1, 0] = value
            x = pla.distribute(a, grid, grid.default_layout(shape))
            for each in (x, pla.Tensor(x)):
                with pytest.raises(ValueError, match=f"{name} takes finite numbers; the array has NaNs or infinities"):
                    getattr(linalg, name)(each)

    @pytest.mark.parametrize("stacks", [(), (2,), (13,)], ids=str)
    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_odd_right_hand_sides_of_factors(self, grid, value, stacks):
        """They are refused on all ranks, whichever has them; of terms that are not summed the sums count."""
        a = pla.distribute(np.zeros((*stacks, 9, 9)) + np.eye(9) + 0.1, grid, grid.default_layout((*stacks, 9, 9)))
        made = {make: make(a) for make in (linalg.lu_factor, linalg.cho_factor, linalg.qr_factor)}
        for shape in ((9,), (9, 2), (9, triangular.FEW + 1), (*stacks, 9, 1)):
            b = np.ones(shape)
            b[(*(n - 1 for n in shape[: len(shape) - 2]), 4, *[0] * (len(shape) > 1))] = value
            for layout in layouts(grid.axes, len(shape)):
                x = pla.distribute(b, grid, layout.with_partial(())).redistribute(layout)
                solves = [factor.solve for factor in made.values()]
                solves += [lambda b: linalg.lu_solve(made[linalg.lu_factor], b, adjoint=True)]
                solves += [lambda b: linalg.cho_solve(made[linalg.cho_factor], b)]
                for solve in solves:
                    with pytest.raises(ValueError, match="solve takes finite numbers; the array has NaNs"):
                        solve(x)

    def test_closed_grids(self, make_grid, world):
        """One error, on any number of ranks."""
        grid = make_grid({"a": world.size})
        every = [pla.eye(6, grid=grid) + pla.zeros((*stacks, 6, 6), grid) for stacks in ((), (2,), (13,))]
        b = pla.ones((6, 2), grid)
        made = [make(a) for a in every for make in (linalg.lu_factor, linalg.cho_factor, linalg.qr_factor)]
        calls = [lambda f=f: f.solve(b) for f in made]
        names = (
            "cholesky", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "expm", "hessenberg", "inv", "lu",
            "lu_factor", "cho_factor", "matrix_rank", "pinv", "polar", "qr", "qr_factor", "schur", "slogdet", "sqrtm",
            "svd", "svdvals",
        )  # fmt: skip
        calls += [lambda a=a, name=name: getattr(linalg, name)(a) for a in every for name in names]
        names = ("solve", "lstsq", "solve_triangular")
        calls += [lambda a=a, name=name: getattr(linalg, name)(a, b) for a in every for name in names]
        one, v = every[0], b[:, 0].copy()
        calls += [lambda n=n: getattr(linalg, n)(one, v) for n in ("cg", "minres", "gmres", "lsqr")]
        calls += [lambda n=n: getattr(linalg, n)(one, 2) for n in ("eigsh", "svds", "svd_lowrank", "range_finder")]
        calls += [lambda n=n: getattr(linalg, n)(one) for n in ("orth", "null_space")]
        calls += [lambda: linalg.lobpcg(one, b), lambda: linalg.matrix_norm(one, ord="nuc")]
        grid.close()
        for call in calls:
            with pytest.raises(pla.GridError, match=r"this grid is closed; make arrays and products before close\(\)"):
                call()

    def test_what_is_no_matrix(self, grid):
        v, m = pla.ones(3, grid), pla.ones((3, 4), grid)
        with pytest.raises(np.linalg.LinAlgError, match=r"inv takes square matrices, not of shape \(3, 4\)"):
            linalg.inv(m)
        with pytest.raises(np.linalg.LinAlgError, match=r"at least two dims, not of shape \(3,\)"):
            linalg.qr(v)
        with pytest.raises(TypeError, match="takes DistArrays, not ndarray"):
            linalg.inv(np.eye(3))
        with pytest.raises(np.linalg.LinAlgError, match=r"solve takes vectors and matrices .*, not of shape \(\)"):
            linalg.solve(pla.ones((3, 3), grid), pla.asarray(1.0, grid=grid))
        for make, a in itertools.product((linalg.lu_factor, linalg.qr_factor), (1, pla.ones((13, 1, 1), grid))):
            factor = make((pla.eye(3, grid=grid) * a).astype(np.float32))
            with pytest.raises(TypeError, match="right-hand sides of int64, whose solutions are of float64; factor A"):
                factor.solve(pla.ones(3, grid, dtype=np.int64))
        with pytest.raises(ValueError, match=r"right-hand sides of 3 rows, not of shape \(4,\)"):
            linalg.solve(pla.ones((3, 3), grid), pla.ones(4, grid))
        with pytest.raises(TypeError, match="float32, float64, complex64 and complex128, not float16"):
            linalg.det(pla.ones((3, 3), grid, dtype=np.float16))

    def test_what_is_no_whole_number(self, grid):
        """NumPy's whole numbers are taken; numbers with a point and truth values are not."""
        x = pla.eye(9, grid=grid)
        stack = pla.stack([x] * 2)
        for make in (linalg.qr_factor, linalg.lu_factor, linalg.cho_factor):
            what = f"^{make.__name__}: block, the rows and columns of a tile, is a whole number of at least 1, not "
            assert make(x, np.int32(4)).tiles.size == 4
            for block in (0, -1, 2.0, np.float64(2), True, np.True_, "4", np.array([1, 2])):
                for a in (x, stack):
                    with pytest.raises(ValueError, match=what):
                        make(a, block)
        for a in (x, stack):
            assert linalg.qr_factor(a).Q(np.int64(3)).shape == (*a.shape[:-1], 3)
            for columns in (2.0, True, -1, 10):
                with pytest.raises(ValueError, match="columns of Q is a whole number from 0 to 9, not"):
                    linalg.qr_factor(a).Q(columns)
        diagonals = (
            ("diagonal: offset", lambda k: linalg.diagonal(x, offset=k)),
            ("trace: offset", lambda k: linalg.trace(x, offset=k)), ("trace: offset", lambda k: np.trace(x, k)),
            ("diag: k", lambda k: pla.diag(x, k)), ("diag: k", lambda k: pla.diag(x[0], k)),
            ("tril: k", lambda k: pla.tril(x, k=k)), ("triu: k", lambda k: np.triu(x, k)),
            ("eye: k", lambda k: pla.eye(3, k=k)),
        )  # fmt: skip
        for what, function in diagonals:
            function(np.int8(-1))
            for k in (1.0, np.float32(0.5), True, np.True_, "1", x[0], x[0].astype(int)):
                with pytest.raises(ValueError, match=f"^{what}, the number of a diagonal, is a whole number, not"):
                    function(k)
        for depth in (2, 1.0, True):
            with pytest.raises(ValueError, match="depth"):
                linalg.lu_factor(stack, depth=depth)
        same(linalg.eigvalsh(x, subset_by_index=(np.int64(1), np.uint8(2))), np.ones(2))
        for subset in ((1.0, 2), (False, True), (2, 1), (0, 9)):
            for function in (linalg.eigh, linalg.eigvalsh):
                with pytest.raises(ValueError, match="subset_by_index is"):
                    function(x, subset_by_index=subset)


def test_the_trip_to_tiles_receives_what_is_lacking(grid):
    """Each rank receives exactly the elements of its tiles that its block at rest does not hold, and back."""
    a = np.arange(29.0 * 23).reshape(29, 23)
    for layout in layouts(grid.axes, 2, partial=False):
        x = pla.distribute(a, grid, layout)
        form = tiles.Tiles(grid, 4)
        rows, columns = form.rows(29), form.columns(23)
        with pla.ledger(grid) as book:
            block = form.bring(x, rows, columns)
        if not grid.inside:
            continue
        mine = rows[form.i], columns[form.j]
        np.testing.assert_array_equal(grid.backend.to_host(block), a[np.ix_(*mine)])
        have = grid.block(layout, a.shape)
        known = [np.isin(w, np.asarray(h)).sum() for w, h in zip(mine, have, strict=True)]
        assert book.words.total() == len(mine[0]) * len(mine[1]) - known[0] * known[1]
        with pla.ledger(grid) as book:
            check(form.home(block, rows, columns, a.shape, layout), a)
        assert book.words.total() == len(have[0]) * len(have[1]) - known[0] * known[1]


def test_factors_are_values(grid):
    """What a factor object returns is an array of its own; it is not pickled, and says what to do instead."""
    a = np.eye(9) * 4 + np.add.outer(np.arange(9.0), np.arange(9.0)) / 9
    for count in (None, 2, 13):
        x = a if count is None else np.stack([a] * count)
        factor = linalg.cho_factor(pla.distribute(x, grid, Layout(*[None] * x.ndim)))
        kind = "CholeskyFactor" if count is None else "CholeskyStack"
        layout, where = Layout(*[None] * x.ndim), f"grid={grid!r}"
        assert repr(factor) == f"{kind}(shape={x.shape}, dtype=float64, layout={layout!r}, {where})"
        lower = factor.L
        lower[...] = 7
        same(factor.L, np.linalg.cholesky(x), 1e-13)
        for kept, maker in ((factor, "cho_factor"), (linalg.lu_factor(factor.L), "lu_factor")):
            for function in (pickle.dumps, deepcopy):
                with pytest.raises(TypeError, match=rf"no value to pickle or to copy deeply.* call {maker}\(A\) again"):
                    function(kept)
            b = pla.ones((9, 2), grid, Layout(None, None))
            same(copy(kept).solve(b), kept.solve(b).gather())


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_grid(world, backend):
    """They take part in every call, and know pivots and ranks as the others do."""
    rng = np.random.default_rng(1)
    with pla.Grid({"a": world.size - 1}, world, backend, idle=True) as grid:
        layout = Layout("a", None)
        a, b, tall = (rng.standard_normal(shape) for shape in ((40, 40), (40, 3), (300, 5)))
        x, y, z = (pla.distribute(each, grid, layout) for each in (a, b, tall))
        factor = linalg.lu_factor(x)
        assert sorted(factor.permutation.tolist()) == list(range(40))
        told = world.share(factor.permutation.tolist())
        assert all(each == told[0] for each in told)
        stack = linalg.lu_factor(x.reshape((1, 40, 40)))
        found = [
            factor.det(),
            stack.det(),
            linalg.solve(x, y, refine=True),
            linalg.cholesky(x @ x.mT + pla.eye(40, grid=grid)),
        ]
        solution = linalg.lstsq(z, z[:, :2])
        assert solution.rank == 5
        for each in (solution.s, *linalg.qr(z)):
            assert each.block.shape == grid.block_shape(each.layout, each.shape)
        wanted = [np.linalg.det(a), [np.linalg.det(a)], np.linalg.solve(a, b), np.linalg.cholesky(a @ a.T + np.eye(40))]
        for got, want in zip((*found, solution.x), (*wanted, np.eye(5)[:, :2]), strict=True):
            np.testing.assert_allclose(got.gather(), want, rtol=1e-9, atol=1e-12)


def test_parity():
    assert parity(np.array([], int)) == 1
    for order in ([0], [1, 0], [2, 0, 1], [3, 1, 2, 0], [1, 0, 3, 2]):
        assert parity(np.array(order)) == round(np.linalg.det(np.eye(len(order))[order]))


@pytest.mark.parametrize("condition", [1e1, 1e5, 1e9, 1e15])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_refined_solutions_are_as_accurate(grid, dtype, condition, monkeypatch):
    """Factors of half the precision; of full precision only where the others do not help."""
    n, rng, made = 23, np.random.default_rng(3), []

    class Seen(LUFactor):
        def __init__(self, a, *args, **options):
            made.append(a.dtype.name)
            super().__init__(a, *args, **options)

    monkeypatch.setattr(systems, "LUFactor", Seen)
    u, v = (np.linalg.qr(random((n, n), dtype, rng))[0] for _ in range(2))
    a, b = ((u * np.geomspace(1e200, 1e200 / condition, n)) @ v).astype(dtype), random((n, 3), dtype, rng)
    A = pla.distribute(a, grid, Layout(grid.axes, None))
    for given in (b, b[:, 0]):
        B = pla.distribute(given, grid, Layout(grid.axes, *[None] * (given.ndim - 1)))
        made.clear()
        x = pla.linalg.solve(A, B, refine=True)
        half = LOWER[dtype]
        assert made == [half] if condition < 1e12 else made in ([half], [half, dtype])
        assert x.layout == B.layout
        residual = float(pla.max(abs(B - A @ x)))
        assert residual <= 10 * n * 2.3e-16 * float(pla.max(abs(A))) * float(pla.max(abs(x))) * n
    a, b, large = a / abs(a).max(), b / abs(b).max(), 2.0**1022  # sums of rows leave the range
    A, B = (pla.distribute(each * large, grid, Layout(grid.axes, None)) for each in (a, b))
    x = pla.linalg.solve(A, B, refine=True).gather()
    assert abs(b - a @ x).max() <= 10 * n * 2.3e-16 * abs(x).max() * n
    low = np.zeros(0, LOWER[dtype]).dtype
    with pytest.raises(TypeError, match=f"takes one matrix of float64 or complex128, not {low}"):
        pla.linalg.solve((A / large).astype(low), (B / large).astype(low), refine=True)
    with pytest.raises(np.linalg.LinAlgError, match="the matrix is singular"):
        pla.linalg.solve(A * 0, B, refine=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_pivots_below_the_reciprocal_of_the_largest_number(grid, dtype):
    """Quotients are finite where reciprocals are not."""
    if not grid.backend.cpu:  # whose libraries multiply by reciprocals
        return
    every = layouts(grid.axes, 2)

    def put(values, seed):
        return pla.distribute(values.astype(dtype), grid, every[seed % len(every)])

    tiny = float(np.finfo(dtype).tiny) * 2.0**-12
    for n in (1, 3, 40):
        a, spd = (np.triu(np.ones((n, n))) + 31 * np.eye(n)) * tiny, np.diag(np.full(n, 4 * tiny))
        for k in (1, 3):
            one = np.ones((n, k))
            A, B, T = put(a, 1), put(a @ one, 2), put(a.T.copy(), 2)
            for x in (
                linalg.solve(A, B),
                linalg.lu_factor(A).solve(B),
                linalg.solve_triangular(A, B),
                linalg.solve_triangular(T, put(a.T @ one, 1), lower=True),
                linalg.solve_triangular(A, put(a.T @ one, 1), adjoint=True),
                linalg.cho_factor(put(spd, 1)).solve(put(spd @ one, 1)),
            ):
                np.testing.assert_allclose(x.gather(), one, rtol=1e-6)
        np.testing.assert_allclose(float(linalg.slogdet(A)[1]) / n, np.log(32 * tiny), rtol=1e-6)
        assert np.isfinite(linalg.inv(put(a * 4096, 1)).gather()).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_matrices_of_numbers_below_the_normal_ones(grid, dtype):
    """Pivots that have no reciprocals divide their columns, so that A = L U; QR and Cholesky need no more."""
    if not grid.backend.cpu:  # whose libraries multiply by reciprocals
        return
    every, tiny = layouts(grid.axes, 2), float(np.finfo(dtype).tiny) / 64
    wide = np.result_type(dtype, np.longdouble)

    def put(values, seed):
        return pla.distribute(values, grid, every[seed % len(every)])

    for n in (1, 2, 40, 100):
        rng = np.random.default_rng(n)
        one, tail = random((n, n), dtype, rng), np.where(np.arange(n) < n // 2, 1, tiny)[:, None]
        spd = one @ one.conj().T + n * np.eye(n)
        for scale in (np.full((n, 1), tiny), tail):  # all rows, or the last ones, below those of other sizes
            a, lift = (one * scale).astype(dtype), 1 / scale.astype(np.longdouble)
            A = put(a, 1)
            p, lower, upper = (x.gather().astype(wide) for x in linalg.lu(A))
            np.testing.assert_allclose(p @ lower @ upper * lift, a * lift, atol=1e-3)
            log = np.linalg.slogdet(one)[1] + np.log(scale).sum()
            np.testing.assert_allclose(float(linalg.slogdet(A)[1]), log, atol=1e-3 * n)
            b = put((a @ np.ones((n, 2))).astype(dtype), 2)
            for x in (linalg.solve(A, b), linalg.lu_factor(A).solve(b)):
                np.testing.assert_allclose(a * lift @ x.gather(), b.gather() * lift, atol=1e-3 * n)
        q, r = (x.gather() for x in linalg.qr(put((one * tiny).astype(dtype), 1)))
        np.testing.assert_allclose(q.conj().T @ q, np.eye(n), atol=1e-5)
        np.testing.assert_allclose(q @ (r * (1 / np.longdouble(tiny))), one, atol=1e-3)
        factor = linalg.cholesky(put((spd * tiny).astype(dtype), 1)).gather() / np.sqrt(tiny)
        np.testing.assert_allclose(factor @ factor.conj().T, spd, atol=1e-3 * n)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_pivots_of_parts_without_reciprocals(grid, dtype):
    """BLAS does not exchange rows for them; what stays in their place may have a larger part."""
    if not grid.backend.cpu:
        return
    tiny = np.finfo(dtype).tiny
    a = np.array([[1.03 + 0.06j, 0.5, 1], [0.76 + 0.76j, 1 - 1j, 2j], [0.25j, 1, 0.5], [0.1, 0.2 + 0.3j, 1j]])
    for n in (2, 3, 4):
        given = (a[:n] * tiny).astype(dtype)
        for every in (given, np.stack([given] * 13)):
            A = pla.distribute(every, grid, grid.default_layout(every.shape))
            p, lower, upper = (x.gather().astype(np.clongdouble) for x in linalg.lu(A))
            np.testing.assert_allclose(p @ lower @ upper / tiny, every.astype(np.clongdouble) / tiny, atol=1e-5)
            assert abs(lower).max() < 1.5


@pytest.mark.serial
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triangles_are_solved_in_pieces(dtype, order, monkeypatch):
    """In all ways, with pieces that are not multiples of the rows, and few right-hand sides or many."""
    monkeypatch.setattr(kernels, "PIECE", 7)
    rng, n = np.random.default_rng(5), 23
    for lower, adjoint, unit, right, k in itertools.product(*[(False, True)] * 4, (1, 3, 40)):
        full = (random((n, n), dtype, rng) / n + 2 * np.eye(n)).astype(dtype, order=order)  # beside the triangle too
        t = np.tril(full) if lower else np.triu(full)
        t = t - np.diag(np.diag(t) - 1) if unit else t
        want = random((k, n) if right else (n, k), dtype, rng)
        op = t.conj().T if adjoint else t
        b = np.asarray(want @ op if right else op @ want, order=order)
        kernels.substitute(full, b, right=right, lower=lower, adjoint=adjoint, unit=unit)
        np.testing.assert_allclose(b, want, atol=1e3 * np.finfo(dtype).eps)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(800, 97), (776, 97), (1700, 200), (900, 96)], ids=str)
def test_tall_matrices_are_factored_in_panels(shape, dtype, monkeypatch):
    """By several threads, with the pivots of one call of LAPACK; zero columns, pivots near underflow, and NaNs too."""
    monkeypatch.setattr(kernels, "LARGE", 0)
    m, n = shape
    a = random(shape, dtype, np.random.default_rng(0))
    gap = a.copy()
    gap[:, [3, 60, n - 1]] = 0
    for given in (a, gap, a * float(np.finfo(dtype).tiny)):
        every = []
        for threads in (1, 2):
            monkeypatch.setattr(kernels.blas, "blas_threads", lambda threads=threads: threads)
            found, order = kernels.lu(given.copy())
            every.append(order)
            lower, upper = np.tril(found, -1) + np.eye(m, n, dtype=dtype), np.triu(found[:n])
            unit = 2.0 ** -np.frexp(norm(given))[1]
            small(norm(lower @ (upper * unit) - given[order] * unit), norm(given * unit), m, dtype, threads)
        np.testing.assert_array_equal(*every)
    a[700, 50] = np.nan
    assert not np.isfinite(kernels.lu(a)[0]).all()


@pytest.mark.serial
@pytest.mark.parametrize(
    "shape",
    [
        (0, 3),
        (1, 1),
        (17, 300),
        (300, 17),
        (1023, 1033),
        (2, 300_000),
        (3000, 257),
        (9000, 131),
        (70_001, 7),
        (9999, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [None, 1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_copies_in_columns(shape, threads, dtype, monkeypatch):
    """However many threads make them, by a loop or without, which complex128 has none of."""
    monkeypatch.setattr(kernels.blas, "blas_threads", lambda: threads)
    a = np.random.default_rng(0).random(shape).astype(dtype)
    found = kernels.in_columns(a, 2)
    assert found.flags.f_contiguous
    np.testing.assert_array_equal(found[:, :-2], a)
    found = kernels.in_columns(a, 2, spaced=True)
    if a.size:
        assert found.strides == (a.itemsize, len(a) * a.itemsize)  # which is no multiple of kernels.SPACED
    np.testing.assert_array_equal(found[:, :-2], a)


@pytest.mark.serial
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(512, 512), (1024, 96), (4096, 130), (512, 600)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_columns_that_do_not_lie_a_power_of_two_apart(shape, threads, dtype, monkeypatch):
    """They are factored where they lie, in panels too; what lies between them stays."""
    monkeypatch.setattr(kernels.blas, "blas_threads", lambda: threads)
    monkeypatch.setattr(kernels, "LARGE", 1)
    rng = np.random.default_rng(0)
    a = (rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype[0] == "c" else 0)).astype(dtype)
    a = kernels.in_columns(a, 2, spaced=True)
    assert a.strides[1] == len(a) * a.itemsize + kernels.SPACE
    whole = a.base.view(dtype)  # of complex64 numbers of float64 were copied
    assert whole.shape[0] * a.itemsize == a.strides[1]
    whole[len(a) :], a[:, -2:] = 7, 5
    given = a[:, :-2].copy()
    found, order = kernels.lu(a[:, :-2], given=given)
    assert np.shares_memory(found, a)
    lower, upper = np.tril(found[:, : min(shape)], -1) + np.eye(*shape)[:, : min(shape)], np.triu(found[: min(shape)])
    np.testing.assert_allclose(lower @ upper, given[order], rtol=0, atol=200 * np.finfo(dtype).eps * abs(given).max())
    assert abs(lower).max() <= 1.5  # a complex pivot has the largest sum of its parts
    np.testing.assert_array_equal(whole[len(a) :], 7)
    np.testing.assert_array_equal(a[:, -2:], 5)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_factorizations_that_are_held_have_memory_of_their_own(make_grid, world, monkeypatch, dtype):
    """Of panels that ranks share; the next factorization gets that of one that is gone."""
    monkeypatch.setattr(tunables, "SHARED_BYTES", 1)
    monkeypatch.setattr(tile_sizes, "FEW", 8)
    grid, rng = make_grid({"r": world.size}), np.random.default_rng(3)
    if not grid.backend.host_memory or world.local_size < world.size:
        return
    given = [random((90, 60), dtype, rng) for _ in range(3)]
    arrays = [pla.distribute(a, grid, Layout("r", None)) for a in given]

    def place(factor):
        assert factor._work.shared_panels
        return factor._work.kept[0].y.ctypes.data

    def right(factor, a):
        np.testing.assert_allclose(factor.Q().gather() @ factor.R.gather(), a, atol=1e-12)

    first, second = map(linalg.qr_factor, arrays[:2])
    assert place(first) != place(second)
    for factor, a in zip((first, second), given[:2], strict=True):
        right(factor, a)
    before = place(second)
    del factor, first, second
    third = linalg.qr_factor(arrays[2])
    assert place(third) == before
    right(third, given[2])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [(40, 3), (60, 60), (90, 30), (30, 90)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qr_near_the_largest_number(grid, dtype, shape):
    """Sums of elements are beyond it, where R is not: there LAPACK has infinities, and so NumPy."""
    rng, limits = np.random.default_rng(4), np.finfo(dtype)
    a = random(shape, dtype, rng)
    most = limits.dtype.type(limits.max)
    a *= most / limits.dtype.type(1.05 * max(np.linalg.norm(a, axis=0).max(), np.abs(a).max()))
    a[0, -1] = 0
    x, small = pla.distribute(a, grid, Layout(grid.axes, None)), a / most
    (q, r), want = linalg.qr(x), abs(np.linalg.qr(small).R)
    np.testing.assert_allclose(abs(r.gather()) / most, want, atol=100 * eps(dtype))
    np.testing.assert_allclose(q.gather() @ (r.gather() / most), small, atol=100 * eps(dtype))
    np.testing.assert_allclose(
        linalg.svdvals(x / limits.dtype.type(8)).gather() / most * 8, np.linalg.svd(small, compute_uv=False),
        atol=100 * eps(dtype),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_triangles_however_they_lie(grid, dtype):
    """All ranks say so, where BLAS does not take a block as it lies too: SciPy's error was that of one rank alone."""
    rng = np.random.default_rng(grid.size)
    a = random((19, 19), dtype, rng)
    np.fill_diagonal(a, np.where(np.arange(19) == 3, 0, 9))
    every = layouts(grid.axes, 2, partial=False)
    for layout in [every[i] for i in rng.permutation(len(every))[:4]]:
        wide = pla.distribute(np.repeat(np.repeat(a, 2, 0), 2, 1), grid, layout)
        for x in (
            wide[::2, ::2],
            pla.distribute(a[:, ::-1], grid, layout)[:, ::-1],
            pla.distribute(a.T, grid, layout).T,
        ):
            for k, lower, adjoint in itertools.product((1, 3, 40), (True, False), (True, False)):
                b = pla.distribute(random((19, k), dtype, rng), grid, layout)
                with pytest.raises(np.linalg.LinAlgError, match=r"element \[3, 3\] of its diagonal is 0"):
                    linalg.solve_triangular(x, b, lower=lower, adjoint=adjoint)


@pytest.mark.serial
def test_triangles_in_any_order_of_memory():
    """Without errors of singular ones, which have infinities or NaNs as solutions."""
    rng = np.random.default_rng(0)
    t, b = random((6, 6), np.complex128, rng) + 9 * np.eye(6), random((6, 4), np.complex128, rng)
    orders = (
        lambda x: x,
        np.asfortranarray,
        lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
        lambda x: x[::-1].copy()[::-1],
    )
    for first, second, right, lower, adjoint, unit in itertools.product(orders, orders, *[(True, False)] * 4):
        triangle = (np.tril if lower else np.triu)(t)
        if unit:
            np.fill_diagonal(triangle, 1)
        whole = triangle.conj().T if adjoint else triangle
        want = np.linalg.solve(whole.T, b).T if right else np.linalg.solve(whole, b)
        x = second(b.T if right else b).copy(order="K")
        kernels.substitute(first(t), x, right=right, lower=lower, adjoint=adjoint, unit=unit)
        np.testing.assert_allclose(x, want, atol=1e-13)
        with np.errstate(all="ignore"):
            kernels.substitute(first(t * 0), x, right=right, lower=lower, adjoint=adjoint, unit=unit)
        assert unit or not np.isfinite(x).all()
