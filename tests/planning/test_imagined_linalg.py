"""Eigenvalues, singular values and least squares on imagined ranks: the ledgers of the formulas, and of real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg
from parlinalg.grid import factorizations
from parlinalg.linalg import costs as formulas
from parlinalg.linalg import divide, factors, krylov, least_squares, spectral
from parlinalg.linalg.tiles import Deal
from parlinalg.planning.trace import Kernel
from tests.planning.test_imagined import DEALS, both, rows

SHAPES = [(150, 150), (97, 97), (210, 66), (40, 140), (300, 7), (1, 5), (0, 4)]


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.parametrize(("sizes", "cuts"), [d[:2] for d in DEALS if d[2] == 1], ids=str)
def test_ledgers_are_those_of_the_formulas(sizes, cuts, monkeypatch):
    """Without deflation the formulas' bounds of divide and conquer are exact."""
    monkeypatch.setattr(factors, "arrangement", lambda *_: "square")
    monkeypatch.setattr(factors, "block_size", lambda *_: 16)
    layout, ranks = pla.Layout(*cuts), math.prod(sizes.values())

    def check(routine: Callable[[], Any], formula: Callable[..., Any], itemsize: int, what: Any) -> None:
        with pla.ledger(grid) as book:
            routine()
        words, calls = formula(formulas.Costs(Deal(sizes, 16, "square", 1), itemsize, ranks)).book(grid.rank)
        assert dict(book.calls) == dict(calls), what
        assert {key: n for key, n in book.words.items() if n} == {key: n for key, n in words.items() if n}, what

    for rank in sorted({0, ranks // 2, ranks - 1}):
        with pla.imagine(ranks, rank, what_if=pla.WhatIf()):
            grid = pla.Grid(sizes)
            for shape in SHAPES:
                m, n = shape
                x = pla.zeros(shape, grid, layout, dtype="complex64" if m == 97 else "float64")
                size = x.dtype.itemsize
                if m == n:
                    check(lambda: linalg.eigh(x), lambda c: formulas.eigh(c, layout, n), size, (rank, shape))
                    check(
                        lambda: linalg.eigh(x, subset_by_index=(3, 9)), lambda c: formulas.eigh(c, layout, n, 7), size,
                        (rank, shape, "subset"),
                    )  # fmt: skip
                check(
                    lambda: linalg.svd(x, full_matrices=False),
                    lambda c: formulas.svd(c, layout, shape, full_matrices=False), size, (rank, shape),
                )  # fmt: skip


def matrix(n: int, seed: int = 0) -> np.ndarray:
    """A Hermitian matrix of which no merge of divide and conquer knows a vector before."""
    draw = np.random.default_rng(seed)
    q, _ = np.linalg.qr(draw.standard_normal((n, n)))
    return (q * np.linspace(1, 2, n)) @ q.T


def grids(ranks: int) -> list[tuple[dict[str, int], Any]]:
    """The grids of so many ranks with a layout; of 8, which take long on few cores, one of three axes."""
    if ranks == 8:
        return [({"r": 2, "c": 2, "d": 2}, pla.Layout("r", ("d", "c")))]
    return [({"r": r, "c": c}, pla.Layout("r", "c")) for r, c in factorizations(ranks, 2)]


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """Real ranks have a core each, as imagined ones do."""
    monkeypatch.setattr(pla.Grid, "cores", 64)


@pytest.fixture
def deflated(monkeypatch):
    """The numbers of vectors that merges know before, on real ranks."""
    counts, plain = [], divide._deflated

    def counted(d: Any, *args: Any) -> Any:
        kept, rest = plain(d, *args)
        counts.append(len(rest))
        return kept, rest

    monkeypatch.setattr(divide, "_deflated", counted)
    return counts


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_ledgers_of_spectra_are_those_of_real_ranks(world, complex_, deflated):
    def program(grid: Any) -> None:
        a, r = pla.distribute(dense, grid, layout), pla.distribute(dense[:, : 2 * n // 3], grid, layout)
        linalg.eigh(a)
        linalg.svd(a)
        if world.size == 8:
            return
        linalg.eigh(a, subset_by_index=(20, 40))
        linalg.eigvalsh(a)
        linalg.eigvalsh(a[:60, :60], 2.0 * pla.eye(60, grid=grid, layout=layout, dtype=a.dtype))
        linalg.svd(r, full_matrices=False)
        linalg.svdvals(r.mT)
        linalg.pinv(r)
        linalg.matrix_rank(a[:, :20])
        linalg.eigh(pla.distribute(np.stack([dense[:9, :9]] * 5), grid))

    n = 70 if world.size == 8 else 150
    dense = matrix(n)
    if complex_:
        phases = np.exp(1j * np.arange(n))
        dense = phases[:, None] * dense * phases.conj()
    for sizes, layout in grids(world.size):
        both(world, sizes, program, what_if=pla.WhatIf())
    assert deflated or world.size == 1
    assert not any(deflated)


@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_ledgers_of_least_squares_are_those_of_real_ranks(world, deflated, monkeypatch):
    def program(grid: Any) -> None:
        a, b = pla.distribute(dense, grid, layout), pla.distribute(sides, grid, layout)
        found = [linalg.lstsq(a, b), linalg.lstsq(a.mT, b[:n]), linalg.lstsq(a[:n], b[:n]), linalg.lstsq(a, b[:, 0])]
        assert [each.rank for each in found] == [n] * 4

    n, draw = 12 if world.size == 8 else 60, np.random.default_rng(1)
    dense, sides = draw.standard_normal((200, n)), draw.standard_normal((200, 3))
    for alone in (True, False):
        monkeypatch.setattr(least_squares, "by_one", lambda n, sizes, alone=alone: alone)
        for sizes, layout in grids(world.size):
            both(world, sizes, program, what_if=pla.WhatIf())


@pytest.mark.serial
def test_dependent_columns_have_one_singular_value_of_zero():
    with pla.imagine(4, 1, what_if=pla.WhatIf(conditioned=False)):
        grid = pla.Grid({"r": 4})
        a, b = (pla.zeros((90, n), grid, pla.Layout("r", None)) for n in (20, 2))
        found = linalg.lstsq(a, b)
        assert (found.rank, found.x.shape, found.residuals.shape, found.s.shape) == (19, (20, 2), (0,), (20,))


ASKED = {
    "eigh": (linalg.eigh, "which vectors a merge of divide and conquer finds", "deflation"),
    "svd": (linalg.svd, "which vectors a merge of divide and conquer finds", "deflation"),
    "eigvalsh": (linalg.eigvalsh, "whether the elements are finite", "finite"),
    "lstsq": (lambda a: linalg.lstsq(a, a[:, :2]), "the rank of a matrix", "conditioned"),
    "polar": (linalg.polar, "the number of steps of a polar decomposition", "condition"),
    "sqrtm": (linalg.sqrtm, "whether the matrix of sqrtm is Hermitian", "hermitian"),
    "gmres": (lambda a: linalg.gmres(a, a[:, 0]), "how many iterations suffice", "iterations"),
    "lsqr": (lambda a: linalg.lsqr(a, a[:, 0]), "how many iterations suffice", "iterations"),
    "eigsh": (linalg.eigsh, "how many iterations suffice", "iterations"),
    "lobpcg": (lambda a: linalg.lobpcg(a, a[:, :2]), "how many iterations suffice", "iterations"),
}


@pytest.mark.serial
@pytest.mark.parametrize("name", ASKED)
def test_without_a_policy_the_question_is_an_error(name, monkeypatch):
    """Each question is answered by its own field, and the error has the line of the program."""
    function, why, field = ASKED[name]
    with pla.imagine(4, 1) as world:
        a = pla.zeros((150, 150), pla.Grid({"r": 2, "c": 2}), pla.Layout("r", "c"))
        plain = world.device.assume

        def assume(asked: str, text: str) -> Any:
            return plain(asked, text) if asked == field and why in text else getattr(pla.WhatIf(), asked)

        monkeypatch.setattr(world.device, "assume", assume)
        with pytest.raises(pla.ValuesNeeded, match=rf"{why} .*test_imagined_linalg\.py:\d+.*WhatIf\({field}="):
            function(a)


@pytest.mark.serial
@pytest.mark.parametrize("given", [{"pivots": "first"}, {"deflation": 0.5}, {"routing": "odd"}], ids=str)
def test_unknown_answers_are_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(pla.ConfigError, match=f"{name}={value!r} is not known; what can be assumed is"):
        pla.WhatIf(**given)


@pytest.mark.serial
@pytest.mark.parametrize("condition", [0.5, float("inf"), float("nan")])
def test_impossible_conditions_are_refused(condition):
    with pytest.raises(pla.ConfigError, match=r"condition=.* should be a finite number of at least 1"):
        pla.WhatIf(condition=condition)


@pytest.mark.serial
def test_several_imagined_gpus():
    """They find eigenvalues and least squares as hosts do, and singular values by a polar decomposition first."""
    with pla.imagine(4, target="gpu", what_if=pla.WhatIf()) as world:
        grid = pla.Grid({"r": 2, "c": 2})
        a, layout = pla.zeros((150, 150), grid, pla.Layout("r", "c")), pla.Layout("r", "c")
        linalg.eigh(a)
        linalg.svdvals(a)
        linalg.lstsq(a, a[:, :2])
        with world.trace() as trace:
            u, s, vh = linalg.svd(a[:, :60], full_matrices=False)
        assert (u.shape, s.shape, vh.shape, u.layout) == ((150, 60), (60,), (60, 60), layout)
        assert "potrf" in {e.name for e in trace.events if isinstance(e, Kernel)}
    with pla.imagine(4, target="gpu", what_if=None):
        a = pla.zeros((150, 150), pla.Grid({"r": 2, "c": 2}), pla.Layout("r", "c"))
        with pytest.raises(pla.ValuesNeeded, match=r"elements are finite.*test_imagined_linalg\.py:\d+"):
            linalg.svd(a)


# ------------------------------------------------------------------ iterations

ITERATIONS: dict[str, Callable[..., Any]] = {
    "cg": lambda a, b, told: linalg.cg(a, b, rtol=1e-9, callback=told),
    "minres": lambda a, b, told: linalg.minres(a, b, rtol=1e-9, callback=told),
    "minres, many": lambda a, b, told: linalg.minres(a, a[:, :3], rtol=1e-9, M=lambda x: x * 2.0, callback=told),
    "minres, few": lambda a, b, told: linalg.minres(a, b, rtol=0, maxiter=3, callback=told),
    "gmres": lambda a, b, told: linalg.gmres(a, b, rtol=1e-9),
    "gmres, many": lambda a, b, told: linalg.gmres(a, a[:, :3], rtol=1e-9, restart=4, M=lambda x: x * 2.0),
    "gmres, few": lambda a, b, told: linalg.gmres(a, b, rtol=0, restart=3, maxiter=2),
    "lsqr": lambda a, b, told: linalg.lsqr(a[:, :31], b, atol=1e-9, btol=1e-9, callback=told),
    "lsqr, few": lambda a, b, told: linalg.lsqr(a, b, atol=0, btol=0, iter_lim=4, callback=told),
    "lsqr, x0": lambda a, b, told: linalg.lsqr(a, b, x0=0.5 * b, atol=1e-9, btol=1e-9, callback=told),
    "eigsh": lambda a, b, told: linalg.eigsh(a, 3, ncv=9),
    "eigsh, all vectors": lambda a, b, told: linalg.eigsh(a[:20, :20], 9),
    "eigsh, sigma": lambda a, b, told: linalg.eigsh(a, 3, sigma=-0.5),
    "svds": lambda a, b, told: linalg.svds(a[:, :31], 3, ncv=9),
    "svds, values": lambda a, b, told: linalg.svds(a[:, :31], 3, ncv=9, return_singular_vectors=False),
    "lobpcg": lambda a, b, told: linalg.lobpcg(a, a[:, :4], maxiter=60, callback=told),
    "lobpcg, few": lambda a, b, told: linalg.lobpcg(a, a[:, :4], maxiter=3, tol=0, callback=told),
}


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ITERATIONS)
def test_ledgers_of_iterations_are_those_of_as_many_real_steps(world, name, monkeypatch):
    """GMRES' steps are the orthogonalizations that it makes, those of eigsh and svds the bases that they turn."""
    counts: list[Any] = []

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            counts.append(None)
            return function(*args)

        return counting

    if "gmres" in name:
        monkeypatch.setattr(krylov.Basis, "orthogonalized", count(krylov.Basis.orthogonalized))
    elif "eigsh" in name or "svds" in name:
        monkeypatch.setattr(krylov.Basis, "turn", count(krylov.Basis.turn))
    dense = matrix(45) + np.diag(np.linspace(0, 30, 45))

    def program(grid: Any) -> None:
        a, b = pla.distribute(dense, grid, layout), pla.distribute(np.ones(45), grid, pla.Layout(layout.dims[0]))
        ITERATIONS[name](a, b, counts.append)

    for sizes, layout in grids(world.size):
        counts.clear()
        with pla.Grid(sizes, world, "numpy") as grid, pla.ledger(world) as real:
            program(grid)
        steps = len(counts)
        assert steps > 0
        what_if = pla.WhatIf(iterations=100 if "few" in name else steps)
        imagined = pla.imagine(world.size, world.rank, node=world.local_size, what_if=what_if)
        with imagined as found, pla.ledger(found.comm) as book:
            program(pla.Grid(sizes))
        assert rows(book) == rows(real), (sizes, steps)


def of_condition(n: int, condition: float) -> np.ndarray:
    """A matrix with singular values from 1 down to 1 / condition."""
    u, _, v = np.linalg.svd(np.random.default_rng(0).standard_normal((n, n)))
    return (u * np.geomspace(1, 1 / condition, n)) @ v


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("condition", [2.0, 1e3, 1e9, 1e13])
def test_ledgers_of_polar_decompositions_are_those_of_real_ranks(world, condition):
    """The condition says how many steps are taken, and which of them factor by QR; several GPUs begin `svd` so."""
    square = of_condition(50, condition)
    for sizes, layout in grids(world.size):
        for dense, side in ((square, "right"), (square[:, :20], "left"), (square[:20], "right")):

            def program(grid: Any, layout: Any = layout, dense: np.ndarray = dense, side: str = side) -> None:
                a = pla.distribute(dense, grid, layout)
                linalg.polar(a, side)
                if condition == 1e3 and a.shape[0] > a.shape[1]:
                    assert spectral.polar_svd(a, True) is not None

            both(
                world, sizes, program,
                what_if=pla.WhatIf(condition=float(np.linalg.norm(dense) * np.linalg.norm(np.linalg.pinv(dense)))),
            )  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("norm", [0.01, 0.2, 0.9, 1.5, 3.0, 50.0])
def test_ledgers_of_exponentials_are_those_of_real_ranks(world, norm):
    """The norm says the degree and how often the result is squared; estimates of norms take two vectors."""
    dense = np.random.default_rng(0).random((30, 30))
    dense *= norm * np.linspace(0.98, 1, 30) / dense.sum(axis=0)  # norms of powers are nearly powers of the norm
    for sizes, layout in grids(world.size):
        both(
            world, sizes, lambda grid, layout=layout: linalg.expm(pla.distribute(dense, grid, layout)),
            what_if=pla.WhatIf(number=norm, iterations=2),
        )  # fmt: skip


@pytest.mark.ranks(2, 4)
def test_ledgers_of_square_roots_are_those_of_real_ranks(world, deflated):
    dense = matrix(60)
    dense = dense + dense.T
    for sizes, layout in grids(world.size):
        both(
            world, sizes, lambda grid, layout=layout: linalg.sqrtm(pla.distribute(dense, grid, layout)),
            what_if=pla.WhatIf(),
        )  # fmt: skip
    assert not any(deflated)


@pytest.mark.serial
def test_values_choose_a_subset_of_values():
    with pla.imagine(4, what_if=pla.WhatIf()):
        a = pla.zeros((90, 90), pla.Grid({"r": 4}), pla.Layout("r", None))
        with pytest.raises(pla.ValuesNeeded, match=r"subset_by_value .*test_imagined_linalg\.py:\d+"):
            linalg.eigh(a, subset_by_value=(0.0, 1.0))
