"""Words and calls of factorizations, as the ledger counts them, are those of the formulas, on every rank and step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, linalg
from parlinalg.linalg import costs as formulas
from parlinalg.linalg import least_squares, matrices, singular, spectral, systems, tile_sizes
from parlinalg.linalg.costs import Costs, reductions
from parlinalg.linalg.factors.qr import QRFactor
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.panels.qr import QR
from parlinalg.linalg.reductions import divide
from parlinalg.linalg.reductions.reduction import workers
from parlinalg.linalg.tiles import Deal, Tiles, depths
from tests.cases import grids, layouts

pytestmark = pytest.mark.one_in(4)

SHAPES = [(0, 0), (1, 1), (2, 2), (7, 7), (33, 33), (80, 80), (40, 9), (150, 30), (9, 40), (24, 110)]
SQUARES = [s for s in SHAPES if s[0] == s[1]]
BLOCKS = [1, 5, 16, 64]
TAKEN = 2
"""Cases of any size a test and arrangement, beside two of several steps."""


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    found = grids(world.size)
    return pla.Grid(found[request.param % len(found)], world, backend, idle=True)


@pytest.fixture(params=["float64", "complex64"])
def dtype(request):
    return np.dtype(request.param)


def random(shape, dtype, rng):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype.kind == "c" else a).astype(dtype)


@pytest.fixture
def deals(grid, dtype, monkeypatch):
    """Cases: a deal that the factorizations are made to take, the shape of a matrix, its layout, another, and numbers.

    A seeded sample, which differs with the grid and the dtype.  With `layered` the ranks form any number of layers.
    """

    def made(shapes, seed, layered=False, routine="", kinds=("square", "tall", "wide")):
        rng = np.random.default_rng([seed, len(grid.sizes), dtype.itemsize])
        every = layouts(grid.axes, 2, partial=False)
        sizes = [(shape, block) for shape, block in itertools.product(shapes, BLOCKS) if block > 1 or max(shape) < 50]
        large = [each for each in sizes if min(each[0]) > each[1]]  # several steps
        for (some, taken), kind in itertools.product([(large, 2), (sizes, TAKEN)], kinds):
            for at in rng.permutation(len(some))[:taken]:
                depth = int(rng.choice(depths(grid.sizes))) if layered and grid.backend.host_memory else 1
                yield placed(*some[at], kind, depth, every, rng, routine)

    def placed(shape, block, kind, depth, every, rng, routine):
        monkeypatch.setattr(matrices, "arrangement", lambda *_: kind)
        monkeypatch.setattr(matrices, "block_size", lambda *_: block)
        workers = matrices.at_work(grid, routine) if depth == 1 else grid.size
        deal = Deal(grid.sizes, block, kind, depth, workers)
        return deal, shape, *(every[i] for i in rng.integers(len(every), size=2)), rng

    return made


def equal(book, costs, grid, what, *, bounded=()):
    """What this rank received, by operation and axes, is what the formulas say; of `bounded` no more."""
    what = [vars(each) if isinstance(each, Deal) else each for each in what] if isinstance(what, tuple) else what
    assert all(part.words.shape == part.calls.shape == (grid.size,) for part in costs.parts)
    if not grid.inside:
        return
    words, calls = costs.book(grid.rank)
    found = {key: n for key, n in book.words.items() if n or key in words}
    assert dict(book.calls) == dict(calls) or bounded, (what, book.calls, calls)
    for key in found.keys() | words.keys():
        have, expected = found.get(key, 0), words.get(key, 0)
        assert have <= expected if key in bounded else have == expected, (what, key, have, expected)


def counting(grid, deal, dtype=np.dtype("float64")):
    return Costs(deal, dtype.itemsize, grid.world.size)


def flat(deal):
    """The deal of one layer in which factors of several come to lie."""
    return Deal(deal.sizes, deal.size, deal.shape) if deal.D > 1 else deal


def test_cholesky(grid, dtype, deals):
    for deal, (n, _), layout, _, rng in deals(SQUARES, 1, layered=True, routine="cholesky"):
        a = random((n, n), dtype, rng)
        x = pla.distribute(a @ a.conj().T + n * np.eye(n, dtype=dtype), grid, layout)
        with pla.ledger(grid) as book:
            factor = linalg.cho_factor(x, depth=deal.D)
        equal(book, formulas.cho_factor(counting(grid, deal), layout, n), grid, (n, deal, layout))
        with pla.ledger(grid) as book:
            linalg.cholesky(x, depth=deal.D)
        equal(book, formulas.cholesky(counting(grid, deal), layout, n), grid, (n, deal, layout))
        sides = int(rng.choice([5, triangular.FEW + 5]))
        b = pla.distribute(random((n, sides), dtype, rng), grid, layout)
        with pla.ledger(grid) as book:
            factor.solve(b)
        one = flat(deal)
        costs, rows, columns = counting(grid, one), one.rows(n), one.columns(sides)
        costs.bring(layout, (n, sides), rows, columns)
        costs.agree(1)
        for adjoint in (False, True):
            formulas.substitute(costs, rows, n, formulas.after(columns, 0), lower=True, adjoint=adjoint)
        costs.home(layout, (n, sides), rows, columns)
        equal(book, costs, grid, (n, deal, layout, "solve"))


def test_lu(grid, dtype, deals):
    for deal, shape, layout, _, rng in deals(SHAPES, 2, layered=True, kinds=("square", "tall", "strips", "wide")):
        x = pla.distribute(random(shape, dtype, rng), grid, layout)
        with pla.ledger(grid) as book:
            factor = linalg.lu_factor(x, depth=deal.D)
        places = factor.pivoted
        winners = formulas.winners_of(places, deal, min(shape))
        costs = formulas.lu_factor(counting(grid, deal, dtype), layout, shape, winners=winners, places=places)
        equal(book, costs, grid, (shape, deal, layout))
        if deal.D == 1:
            with pla.ledger(grid) as book:
                linalg.lu(x)
            costs = formulas.lu(counting(grid, deal, dtype), layout, shape, places=places)
            equal(book, costs, grid, (shape, deal, layout))


def test_lu_of_a_tall_matrix_moves_none_of_it(grid, dtype):
    """But the rows that are proposed as pivots, and those of U."""
    m, n = 50 * grid.size + 3, 11
    x = pla.distribute(random((m, n), dtype, np.random.default_rng(m)), grid, Layout(grid.axes, None))
    with pla.ledger(grid) as book:
        factor = linalg.lu_factor(x, depth=1)
    assert factor.tiles.shape == "strips"
    assert sum(words for (op, _), words in book.words.items() if op == "all_to_all") == 0


@pytest.mark.parametrize("adjoint", [False, True])
def test_solve_triangular(grid, dtype, deals, adjoint):
    for deal, (n, _), layout, other, rng in deals(SQUARES, 2):
        sides = int(rng.choice([0, 1, 5, triangular.FEW, triangular.FEW + 1]))
        t = np.tril(random((n, n), dtype, rng)) + n * np.eye(n, dtype=dtype)
        x = pla.distribute(t, grid, layout)
        b = pla.distribute(random((n, sides), dtype, rng), grid, other)
        with pla.ledger(grid) as book:
            linalg.solve_triangular(x, b, lower=True, adjoint=adjoint)
        costs = formulas.solve_triangular(counting(grid, deal, dtype), layout, n, sides, other, adjoint=adjoint)
        equal(book, costs, grid, (n, sides, deal, layout, other))


@pytest.mark.parametrize("shape", [(70, 50), (50, 70), (3, 3), (0, 4)], ids=str)
def test_without_the_winners_each_grid_row_has_its_share(grid, shape):
    deal = Deal(grid.sizes, 8, "tall")
    k = min(shape)
    even = formulas.even_winners(deal, *shape)
    assert even.sum(axis=1).tolist() == [min(8, k - at) for at in range(0, k, 8)]
    assert (even.sum(axis=0) <= [len(x) for x in deal.rows(shape[0])]).all()
    places = formulas.positions(deal, *shape)
    assert sorted(np.concatenate(places)) == list(range(shape[0]))
    np.testing.assert_array_equal(formulas.winners_of(places, deal, k), even.reshape(-1, deal.R))


def test_solve(grid, dtype, deals):
    for deal, (n, _), layout, other, rng in deals(SQUARES, 3, layered=True):
        x, sides = pla.distribute(random((n, n), dtype, rng), grid, layout), int(rng.choice([0, 1, 5, 40]))
        b = pla.distribute(random((n, sides), dtype, rng), grid, other)
        with pla.ledger(grid) as book:
            _, factor = systems.solved(x, b, deal.D)
        places = factor.pivoted
        costs = formulas.solve(counting(grid, deal, dtype), layout, n, sides, other, places=places)
        equal(book, costs, grid, (n, deal, layout))
        before, places, deal = factor.rows, factor.positions, flat(deal)
        with pla.ledger(grid) as book:
            factor.solve(b, adjoint=True)
        if grid.inside:
            costs, columns = counting(grid, deal, dtype), deal.columns(sides)
            costs.bring(other, (n, sides), places, columns)
            costs.agree(1)
            for lower in (False, True):
                formulas.substitute(costs, places, n, formulas.after(columns, 0), lower=lower, adjoint=True)
            costs.home(other, (n, sides), before, columns)
            equal(book, costs, grid, (n, deal, layout, "adjoint"))


@pytest.mark.parametrize("dependent", [False, True])
def test_qr(grid, dtype, deals, dependent, monkeypatch):
    monkeypatch.setattr(QR, "STRIP", 24)
    found, expected = set(), False
    for deal, shape, layout, other, rng in deals(SHAPES, 5):
        a = random(shape, dtype, rng)
        if dependent:  # panels that the Gram matrices do not orthogonalize
            a[:, 1::2] = a[:, : shape[1] // 2 * 2 : 2]
        expected = expected or (dependent and deal.R > 1 and min(*shape, deal.size) > 1)
        x = pla.distribute(a, grid, layout)
        with pla.ledger(grid) as book:
            factor = linalg.qr_factor(x)
        trees = set().union(*grid.world.share(factor._work.trees))
        found |= trees
        costs = formulas.qr_factor(counting(grid, deal), layout, shape, trees=trees)
        equal(book, costs, grid, (shape, deal, layout))
        sides = int(rng.integers(6))
        b = pla.distribute(random((shape[0], sides), dtype, rng), grid, other)
        with pla.ledger(grid) as book:
            factor = QRFactor(x, b=b)
        others, costs = set().union(*grid.world.share(factor._work.trees)), counting(grid, deal)
        formulas.qr_factor(costs, layout, shape, trees=others, extra=sides, extra_layout=other)
        equal(book, costs, grid, (shape, deal, layout, "right-hand sides"))
        with pla.ledger(grid) as book:
            linalg.qr(x)
        if grid.size > 1:  # else it may be one call of LAPACK
            costs = formulas.qr(counting(grid, deal), layout, shape, trees=trees, sound=not dependent)
            equal(book, costs, grid, (shape, deal, layout))
    assert found or not expected


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr_with_pivoting(grid, dtype, deals, mode):
    for deal, shape, layout, _, rng in deals([*SHAPES, (90, 7), (200, 3)], 6):
        (m, n), dependent = shape, rng.random() < 0.3
        if mode == "complete" and m > n:
            continue  # zeros below R move too
        a = random(shape, dtype, rng)
        if dependent:
            a[:, 1::2] = a[:, : n // 2 * 2 : 2]
        x = pla.distribute(a, grid, layout)
        trees = set()
        if m > 1.5 * n and n:
            trees = set().union(*grid.world.share(linalg.qr_factor(x)._work.trees))
        with pla.ledger(grid) as book:
            *_, p = linalg.qr(x, mode=mode, pivoting=True)
        costs, order, sound = counting(grid, deal), p.gather(), not dependent or n < 2
        if grid.size > 1:  # else it is one call of LAPACK
            workers = matrices.at_work(grid, "pivoted")
            formulas.pivoted(costs, layout, shape, order=order, mode=mode, trees=trees, sound=sound, workers=workers)
            equal(book, costs, grid, (shape, deal, layout, mode))


@pytest.mark.parametrize("way", ["sound", "near to dependent", "one rank has R", "all ranks have R"])
def test_lstsq(grid, dtype, deals, way, monkeypatch):
    """Of full rank: tall by Gram matrices, or by tiles where these do not serve, and wide."""
    monkeypatch.setattr(QR, "STRIP", 24)
    alone = way != "all ranks have R"
    monkeypatch.setattr(least_squares, "by_one", lambda n, sizes: alone)
    monkeypatch.setattr(singular, "svd_by_one", lambda *args, **options: alone)
    cases = deals([(1, 0), (0, 3), (1, 1), (40, 9), (150, 30), (9, 40), (24, 110), (33, 33), (80, 60)], 9)
    for deal, shape, layout, other, rng in cases if grid.size > 1 else []:
        (m, n), sides = shape, int(rng.integers(6))
        a, k = random(shape, dtype, rng), min(shape)
        sound = way != "near to dependent"
        if not sound and m > n > 1:  # the condition of the Gram matrix is beyond the precision
            a[:, 1] = a[:, 0] + (1e-4 if dtype.char == "F" else 1e-10) * a[:, 1]
        x, b = pla.distribute(a, grid, layout), pla.distribute(random((m, sides), dtype, rng), grid, other)
        with pla.ledger(grid) as book:
            found = linalg.lstsq(x, b)
        assert found.rank == k
        tiles = matrices.tiles_for(pla.zeros((k, k), grid=grid), None, "svd")
        trees = set()
        if not (tile_sizes.by_gram(shape, grid.size) and sound):
            high = (a.conj().T if m < n else a), (layout.dims[::-1] if m < n else layout.dims)
            factor = QRFactor(pla.distribute(high[0], grid, Layout(*high[1])), b=b if m >= n else None)
            trees = set().union(*grid.world.share(factor._work.trees))
        costs = formulas.lstsq(
            counting(grid, deal, dtype), layout, shape, sides, other, values=Deal(tiles.sizes, tiles.size, tiles.shape),
            alone=alone, trees=trees, sound=sound or not n > 1,
        )  # fmt: skip
        equal(book, costs, grid, (shape, deal, layout, other, sides))


def test_reductions(grid, dtype, deals):
    for deal, (n, _), layout, _, rng in deals(SQUARES, 6):
        a = random((n, n), dtype, rng)
        x = pla.distribute(a + a.conj().T, grid, layout)
        with pla.ledger(grid) as book:
            reduced, _ = spectral.tridiagonal_form(x, "eigh")
        costs = formulas.tridiagonal(counting(grid, deal), layout, n, workers(reduced.tiles))
        equal(book, costs, grid, (n, deal, layout))
        a = random((n + n // 3, n), dtype, rng)
        with pla.ledger(grid) as book:
            reduced, *_ = singular.bidiagonal_form([pla.distribute(a, grid, layout)], "svd")
        costs = formulas.bidiagonal(counting(grid, deal), layout, a.shape, workers(reduced.tiles))
        equal(book, costs, grid, (n, deal, layout))


def test_eigh(grid, dtype, deals, monkeypatch):
    monkeypatch.setattr(divide, "LEAF", 16)
    monkeypatch.setattr(reductions, "LEAF", 16)
    everyone, deflated = tuple(grid.sizes), divide._deflated
    for deal, (n, _), layout, _, rng in deals(SQUARES, 7) if grid.size > 1 else []:
        kept = []
        monkeypatch.setattr(divide, "_deflated", lambda *args, kept=kept: kept.append(deflated(*args)) or kept[-1])
        a = random((n, n), dtype, rng)
        x, wanted = pla.distribute(a + a.conj().T, grid, layout), max(1, n // 3)
        with pla.ledger(grid) as book:
            linalg.eigh(x, subset_by_index=(0, wanted - 1) if n else None)
        given, reducing = (layout, n, min(n, wanted)), workers(Tiles(grid, deal.size, deal.shape))
        if grid.inside:
            costs = formulas.eigh(counting(grid, deal), *given, workers=reducing, kept=[len(k) for k, _ in kept])
            equal(book, costs, grid, (n, deal, layout))
        costs = formulas.eigh(counting(grid, deal), *given, workers=reducing)
        equal(book, costs, grid, (n, deal, layout), bounded=[("all_gather", everyone)])


@pytest.mark.parametrize("alone", [False, True], ids=["by all ranks", "by one rank"])
def test_svd(grid, dtype, deals, monkeypatch, alone):
    """Of tall matrices also such whose Gram matrices do not orthogonalize the columns."""
    monkeypatch.setattr(singular, "polar_svd", lambda x, full: None)  # the way of GPUs
    monkeypatch.setattr(singular, "svd_by_one", lambda shape, *args, **options: alone and min(shape) > 0)
    monkeypatch.setattr(divide, "LEAF", 16)
    monkeypatch.setattr(reductions, "LEAF", 16)
    alone = alone and grid.backend.cpu
    everyone, deflated, taken = tuple(grid.sizes), divide._deflated, set()
    cases = itertools.chain(deals(SHAPES, 8), deals([(200, 3), (7, 180), (150, 4)], 8))
    for deal, shape, layout, _, rng in cases if grid.size > 1 else []:
        a, k = random(shape, dtype, rng), min(shape)
        full, gram = bool(rng.integers(2)), tile_sizes.by_gram((max(shape), k), grid.size)
        full = full and max(shape) <= singular.TALL * k
        gram = gram and not full
        sound = not gram or k < 2 or True not in taken
        taken |= {sound} if gram else set()
        if not sound:
            long = a if shape[0] > shape[1] else a.T
            long[:, 1] = long[:, 0] + (1e-4 if dtype.char == "F" else 1e-10) * long[:, 1]
        x, trees = pla.distribute(a, grid, layout), set()
        if by_qr(shape):
            long = x if shape[0] > shape[1] else x.mT.conj()
            trees = set().union(*grid.world.share(QRFactor(long)._work.trees))
        kept = []
        monkeypatch.setattr(divide, "_deflated", lambda *args, kept=kept: kept.append(deflated(*args)) or kept[-1])
        with pla.ledger(grid) as book:
            linalg.svd(x, full_matrices=full)
        given, reducing = (layout, shape), workers(Tiles(grid, deal.size, deal.shape))
        options = {"full_matrices": full, "workers": reducing, "trees": trees, "alone": alone and k > 0}
        options["sound"] = sound if grid.backend.cpu else None
        if grid.inside:
            costs = formulas.svd(counting(grid, deal, dtype), *given, kept=[1 + len(k) for k, _ in kept], **options)
            equal(book, costs, grid, (shape, deal, layout, full, sound))
        costs = formulas.svd(counting(grid, deal, dtype), *given, **options)
        equal(book, costs, grid, (shape, deal, layout, full), bounded=[("all_gather", everyone)] * (not alone))
    assert grid.size == 1 or taken == {True, False}


def by_qr(shape):
    """True if `svd` factors a matrix of this shape by QR first."""
    return max(shape) > singular.TALL * min(shape) > 0


def test_a_long_trip_goes_in_pieces(grid, tune):
    tune(ranks=2, TILES_MOVED=100)
    layout = layouts(grid.axes, 2, partial=False)[-1]
    x = pla.distribute(np.eye(60), grid, layout)
    with pla.ledger(grid) as book:
        chol = linalg.cho_factor(x, 7)
    costs = formulas.cho_factor(counting(grid, chol.tiles), layout, 60)
    equal(book, costs, grid, "lower")
    with pla.ledger(grid) as book:
        lu = linalg.lu_factor(x, 7)
    winners = formulas.winners_of(lu.positions, lu.tiles, 60)
    costs = formulas.lu_factor(counting(grid, lu.tiles), layout, (60, 60), winners=winners)
    equal(book, costs, grid, "whole")
    assert grid.size == 1 or next(part.calls.min() for part in costs.parts if part.name == formulas.TO_WORK) > 2
