"""Eigenvalues, singular values and least squares on imagined ranks: the ledgers of the formulas, and of real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg, tunables
from parlinalg.grid import factorizations
from parlinalg.linalg import costs as formulas
from parlinalg.linalg import least_squares, matrices, singular, systems
from parlinalg.linalg.iterative import vectors
from parlinalg.linalg.reductions import divide, hessenberg
from parlinalg.linalg.tiles import Deal
from parlinalg.planning.routines import traced
from parlinalg.planning.trace import Kernel
from tests.planning.test_imagined import DEALS, both, rows

SHAPES = [(150, 150), (97, 97), (210, 66), (40, 140), (300, 7), (1, 5), (0, 4)]


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.parametrize(("sizes", "cuts"), [d[:2] for d in DEALS if d[2] == 1], ids=str)
def test_ledgers_are_those_of_the_formulas(sizes, cuts, monkeypatch):
    """Without deflation the formulas' bounds of divide and conquer are exact."""
    monkeypatch.setattr(matrices, "arrangement", lambda *_: "square")
    monkeypatch.setattr(matrices, "block_size", lambda *_: 16)
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
                for alone in (False, True) if min(shape) else (False,):
                    monkeypatch.setattr(singular, "svd_by_one", lambda *args, alone=alone, **options: alone)
                    check(
                        lambda: linalg.svd(x, full_matrices=False),
                        lambda c: formulas.svd(c, layout, shape, full_matrices=False, alone=alone), size,
                        (rank, shape, alone),
                    )  # fmt: skip


APART = [
    ("lu", 509, 509, 16), ("lu", 1021, 257, 4), ("lu", 211, 509, 4), ("lu", 4099, 61, 16), ("lu", 8192, 8192, 512),
    ("lu", 20000, 20000, 64), ("qr", 997, 997, 16), ("qr", 509, 211, 12), ("qr", 211, 509, 12), ("qr", 65536, 256, 8),
    ("qr", 65536, 256, 64), ("svd", 1021, 1021, 16), ("svd", 509, 509, 16), ("svd", 509, 509, 64),
    ("svd", 997, 997, 64),
    ("svd", 4096, 1024, 16), ("svd", 500, 2000, 12), ("eigh", 150, 150, 16), ("eigh", 512, 512, 16),
    ("eigh", 1000, 1000, 6), ("cholesky", 1000, 1000, 16), ("cholesky", 8192, 8192, 64),
    ("cholesky", 20000, 20000, 512),
    ("solve", 20000, 20000, 16), ("solve", 8192, 8192, 512), ("solve", 500, 500, 64),
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("routine", "m", "n", "ranks"), APART, ids=str)
def test_planned_memory_of_ranks_that_share_none_is_what_is_held(routine, m, n, ranks):
    """To 15%: with P of `lu`, all reflections of `svd` on each rank, and what is sent and received."""
    plan = pla.plan_linalg(routine, m, n, ranks=ranks, near=False)
    some = {0, ranks - 1} if routine in ("svd", "eigh") else {0, 1, ranks // 2, ranks - 1}
    most = max(traced(plan, rank, 1)[1] for rank in some)
    assert 0.87 * most < plan.need < 1.15 * most, (plan.need / most, plan.memory)


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
@pytest.mark.parametrize("alone", [False, True], ids=["by all ranks", "by one rank"])
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_ledgers_of_spectra_are_those_of_real_ranks(world, complex_, alone, deflated, monkeypatch):
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
        linalg.svd(a[:, : n // 9], full_matrices=False)
        linalg.svdvals(r.mT)
        linalg.pinv(r)
        linalg.matrix_rank(a[:, :20])
        linalg.cond(r)
        linalg.cond(a, 1)
        linalg.eigh(pla.distribute(np.stack([dense[:9, :9]] * 5), grid))

    monkeypatch.setattr(singular, "svd_by_one", lambda *args, **options: alone)
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
        monkeypatch.setattr(singular, "svd_by_one", lambda *args, alone=alone, **options: alone)
        for sizes, layout in grids(world.size):
            both(world, sizes, program, what_if=pla.WhatIf())


@pytest.mark.ranks(2, 3, 4, 8)
def test_ledgers_of_least_squares_of_lower_rank_are_those_of_real_ranks(world, deflated, monkeypatch):
    """One singular value does not count, and right-hand sides are carried through the reduction."""

    def program(grid: Any) -> None:
        for a, b in ((tall, sides), (tall.T, sides[:n]), (tall[:n], sides[:n]), (tall[:n], sides[:n, 0])):
            found = linalg.lstsq(*(pla.distribute(each, grid, grid.default_layout(each.shape)) for each in (a, b)))
            assert found.rank == n - 1
        if grid.size > 1:
            linalg.pinv(pla.distribute(tall[:n], grid, layout))

    n, draw = 20 if world.size == 8 else 60, np.random.default_rng(1)
    tall, sides = draw.standard_normal((80, n)), draw.standard_normal((80, 3))
    tall[:, -1] = tall[:, 0] - tall[:, 1]
    for alone in (True, False):
        monkeypatch.setattr(singular, "svd_by_one", lambda *args, alone=alone, **options: alone)
        for sizes, layout in grids(world.size):
            both(world, sizes, program, what_if=pla.WhatIf(conditioned=False))


@pytest.mark.serial
def test_dependent_columns_have_one_singular_value_of_zero():
    with pla.imagine(4, 1, what_if=pla.WhatIf(conditioned=False)):
        grid = pla.Grid({"r": 4})
        a, b = (pla.zeros((90, n), grid, pla.Layout("r", None)) for n in (20, 2))
        found = linalg.lstsq(a, b)
        assert (found.rank, found.x.shape, found.residuals.shape, found.s.shape) == (19, (20, 2), (0,), (20,))


ASKED = {
    "eigh": (linalg.eigh, "which vectors a merge of divide and conquer finds", "deflation"),
    "svd": (
        lambda a: linalg.svd(pla.zeros((500, 500), a.grid, a.layout)),
        "which vectors a merge of divide and conquer finds",
        "deflation",
    ),
    "eigvalsh": (linalg.eigvalsh, "whether the elements are finite", "finite"),
    "lstsq": (lambda a: linalg.lstsq(a, a[:, :2]), "the rank of a matrix", "conditioned"),
    "polar": (linalg.polar, "the number of steps of a polar decomposition", "condition"),
    "sqrtm": (linalg.sqrtm, "whether the matrix of sqrtm is Hermitian", "hermitian"),
    "eig": (linalg.eig, "how many rounds balance a matrix", "balancing"),
    "subset": (lambda a: linalg.eigh(a, subset_by_value=(0, 1)), "how many eigenvalues lie within", "selected"),
    "refine": (lambda a: linalg.solve(a, a, refine=True), "how often a solution is corrected", "refinements"),
    "orth": (linalg.orth, "the rank of a matrix", "conditioned"),
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
        monkeypatch.setattr(vectors.Basis, "orthogonalized", count(vectors.Basis.orthogonalized))
    elif "eigsh" in name or "svds" in name:
        monkeypatch.setattr(vectors.Basis, "turn", count(vectors.Basis.turn))
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
@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("condition", [2.0, 1e3, 1e9, 1e13])
def test_ledgers_of_polar_decompositions_are_those_of_real_ranks(world, condition, shared, monkeypatch):
    """The condition says how many steps are taken, and which of them factor by QR; several GPUs begin `svd` so."""
    if shared:  # as larger matrices are: rows are divided by the factor where it lies
        monkeypatch.setattr(tunables, "SHARED_BYTES", 1)
    square = of_condition(50, condition)
    for sizes, layout in grids(world.size):
        for dense, side in ((square, "right"), (square[:, :20], "left"), (square[:20], "right")):

            def program(grid: Any, layout: Any = layout, dense: np.ndarray = dense, side: str = side) -> None:
                a = pla.distribute(dense, grid, layout)
                linalg.polar(a, side)
                if condition == 1e3 and a.shape[0] > a.shape[1]:
                    assert singular.polar_svd(a, True) is not None

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


@pytest.mark.serial
def test_exponentials_of_triangles_gather_their_diagonals():
    words = []
    for triangular in (False, True):
        with pla.imagine(4, what_if=pla.WhatIf(number=40.0, triangular=triangular)) as world:
            grid = pla.Grid({"r": 2, "c": 2})
            a = pla.zeros((30, 30), grid, pla.Layout("r", "c"))
            with pla.ledger(grid) as book:
                linalg.expm(a)
            words.append(sum(book.words.values()))
        del world
    assert 30 <= words[1] - words[0] <= 4 * 30


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


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
def test_ledgers_of_subsets_by_value_are_those_of_real_ranks(world):
    """The fraction says how many eigenvalues lie in the interval, and none is rounded away."""
    dense = matrix(60)
    w = np.linalg.eigvalsh(dense)
    for low, high in ((1.2, 1.5), (0.0, 3.0), (5.0, 6.0)):

        def program(grid: Any, bounds: tuple[float, float] = (low, high)) -> None:
            a = pla.distribute(dense, grid, layout)
            found = [linalg.eigvalsh(a, subset_by_value=bounds), *linalg.eigh(a, subset_by_value=bounds)]
            assert [x.shape[-1] for x in found] == [within] * 3

        within = int(((w > low) & (w <= high)).sum())
        for sizes, layout in grids(world.size):
            both(world, sizes, program, what_if=pla.WhatIf(selected=within / 60))


def counted(monkeypatch: Any, module: Any, name: str) -> list[Any]:
    """Return a list that gets an element by each call of a function."""
    counts: list[Any] = []
    function = getattr(module, name)

    def counting(*args: Any, **options: Any) -> Any:
        counts.append(None)
        return function(*args, **options)

    monkeypatch.setattr(module, name, counting)
    return counts


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("spread", [0, 20])
def test_ledgers_of_general_eigenvalues_are_those_of_real_ranks(world, complex_, spread, monkeypatch):
    """A badly scaled matrix takes several rounds to balance; beside them one looks for isolated eigenvalues."""
    draw = np.random.default_rng(0)
    dense = draw.standard_normal((45, 45)) + (1j * draw.standard_normal((45, 45)) if complex_ else 0)
    powers = 2.0 ** draw.integers(-spread, spread + 1, 45)
    sums = counted(monkeypatch, hessenberg, "_summed")
    for sizes, layout in grids(world.size):
        for function in (linalg.eig, linalg.eigvals):
            sums.clear()
            with pla.Grid(sizes, world, "numpy") as grid:
                function(pla.distribute(dense * powers[:, None] / powers, grid, layout))
            assert (len(sums) > 3) == bool(spread)

            def program(grid: Any, function: Any = function, layout: Any = layout) -> None:
                function(pla.distribute(dense * powers[:, None] / powers, grid, layout))

            both(world, sizes, program, what_if=pla.WhatIf(balancing=len(sums) - 2))


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_ledgers_of_roots_by_schur_forms_are_those_of_real_ranks(world, dtype):
    dense = (np.random.default_rng(0).standard_normal((30, 30)) + 30 * np.eye(30)).astype(dtype)
    for sizes, layout in grids(world.size):
        for function in (linalg.sqrtm, linalg.schur, linalg.hessenberg, lambda a: linalg.hessenberg(a, True)):
            both(
                world, sizes, lambda grid, f=function, layout=layout: f(pla.distribute(dense, grid, layout)),
                what_if=pla.WhatIf(hermitian=False),
            )  # fmt: skip


STACKS: dict[str, Callable[[Any, Any], Any]] = {
    "eig": lambda a, b: linalg.eig(a),
    "eigvals": lambda a, b: linalg.eigvals(a),
    "schur": lambda a, b: (linalg.schur(a, "complex"), linalg.hessenberg(a), linalg.hessenberg(a, True)),
    "expm": lambda a, b: linalg.expm(a * 0.01),
    "cholesky": lambda a, b: linalg.cholesky(a + a.mT),
    "inv": lambda a, b: linalg.inv(a),
    "det": lambda a, b: (linalg.det(a), linalg.slogdet(a)),
    "solve": lambda a, b: (
        linalg.solve(a, b),
        linalg.solve_triangular(a, b),
        linalg.solve_triangular(a, b, lower=True),
    ),
    "lstsq": lambda a, b: linalg.lstsq(a[..., :5], b),
    "cho_factor": lambda a, b: (f := linalg.cho_factor(a + a.mT), f.L, f.solve(b)),
    "lu_factor": lambda a, b: (
        f := linalg.lu_factor(a),
        f.solve(b),
        f.solve(b, adjoint=True),
        f.factors(),
        f.P,
        f.det(),
    ),
    "qr_factor": lambda a, b: (f := linalg.qr_factor(a), f.R, f.Q(), f.solve(b)),
    "qr with pivoting": lambda a, b: (linalg.qr(a, pivoting=True), linalg.qr(a, mode="r", pivoting=True)),
}


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", STACKS)
def test_ledgers_of_stacks_are_those_of_real_ranks(world, name):
    draw = np.random.default_rng(0)
    dense, sides = draw.standard_normal((9, 7, 7)) + 9 * np.eye(7), draw.standard_normal((9, 7, 2))
    for sizes, layout in grids(world.size):
        lying = pla.Layout(layout.dims[0], None, layout.dims[1])
        both(
            world, sizes,
            lambda grid, lying=lying: STACKS[name](*(pla.distribute(x, grid, lying) for x in (dense, sides))),
            what_if=pla.WhatIf(),
        )  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("condition", [10.0, 1e6], ids=str)
def test_ledgers_of_refined_solutions_are_those_of_real_ranks(world, condition, monkeypatch):
    dense, sides = of_condition(45, condition), np.random.default_rng(1).standard_normal((45, 1))
    products = counted(monkeypatch, systems, "matmul")
    for sizes, layout in grids(world.size):

        def program(grid: Any, layout: Any = layout) -> None:
            a, b = pla.distribute(dense, grid, layout), pla.distribute(sides, grid, layout)
            linalg.solve(a, b, refine=True)

        products.clear()
        with pla.Grid(sizes, world, "numpy") as grid:
            program(grid)
        corrections = len(products) - 1  # the last residual is small enough
        assert 1 <= corrections < systems.ROUNDS
        both(world, sizes, program, what_if=pla.WhatIf(refinements=corrections))


@pytest.mark.one_in(3)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("condition", [10.0, 1e8], ids=str)
def test_ledgers_of_refined_least_squares_are_those_of_real_ranks(world, condition, monkeypatch):
    """With one step of conjugate gradients for each correction; or with a factorization in full precision at once."""
    monkeypatch.setattr(least_squares, "INNER", 1)
    corrections = counted(monkeypatch, least_squares, "_conjugate_gradients")
    square = of_condition(45, condition)
    for sizes, layout in grids(world.size):
        for dense in (square, np.vstack([square, square]), np.hstack([square, square])):

            def program(grid: Any, layout: Any = layout, dense: np.ndarray = dense) -> None:
                a = pla.distribute(dense, grid, layout)
                b = pla.distribute(np.random.default_rng(1).standard_normal((len(dense), 2)), grid, layout)
                linalg.lstsq(a, b, refine=True)

            corrections.clear()
            with pla.Grid(sizes, world, "numpy") as grid:
                program(grid)
            assert (0 < len(corrections) < least_squares.ROUNDS) == (condition == 10)
            what_if = pla.WhatIf(condition=condition, refinements=max(1, len(corrections)))
            both(world, sizes, program, what_if=what_if)


@pytest.mark.serial
@pytest.mark.parametrize(("condition", "steps"), [(10.0, [1, 1]), (1e4, [2, 2]), (1e5, [3, 3]), (1e6, [])], ids=str)
def test_a_condition_says_the_steps_between_two_corrections(condition, steps, monkeypatch):
    """As many as real matrices of 45 columns take, within one."""
    found: list[int] = []
    plain = least_squares._conjugate_gradients

    def counting(apply: Callable[[Any], Any], *args: Any) -> Any:
        found.append(0)

        def once(y: Any) -> Any:
            found[-1] += 1
            return apply(y)

        return plain(once, *args)

    monkeypatch.setattr(least_squares, "_conjugate_gradients", counting)
    with pla.imagine(4, what_if=pla.WhatIf(condition=condition)):
        a = pla.zeros((45, 45), pla.Grid({"r": 4}), pla.Layout("r", None))
        linalg.lstsq(a, a[:, :2], refine=True)
    assert found == steps
    found.clear()
    with pla.Grid({"r": 1}) as grid:
        a = pla.distribute(of_condition(45, condition), grid)
        linalg.lstsq(a, pla.ones((45, 2), grid=grid), refine=True)
    assert len(found) in (len(steps), len(steps) + 1)
    assert all(abs(taken - steps[0]) <= 1 for taken in found)


@pytest.mark.ranks(2, 4)
def test_ledgers_of_ranks_outside_of_the_grid_are_those_of_real_ones(world):
    """They know the shapes of what the others find."""

    def program(grid: Any) -> None:
        a, stack = pla.distribute(dense, grid, pla.Layout("r", None)), pla.distribute(several, grid)
        found = [
            *linalg.eigh(a), *linalg.svd(a, full_matrices=False), *linalg.eig(stack), linalg.solve(stack, stack),
            linalg.eigvalsh(a, subset_by_value=(0.0, 3.0)), linalg.lstsq(a, a[:, :2]).x, linalg.polar(stack).P,
            linalg.orth(a), linalg.cg(a, a[:, 0], rtol=0, maxiter=3)[0], linalg.det(a), linalg.lu(a)[0],
        ]  # fmt: skip
        told.append([(x.shape, x.dtype, x.layout) for x in found])

    dense, draw, told = matrix(30), np.random.default_rng(0), []  # type: ignore[var-annotated]
    dense = (dense + dense.T) / 2
    several = draw.standard_normal((5, 6, 6)) + 6 * np.eye(6)
    both(world, {"r": world.size // 2}, program, what_if=pla.WhatIf())
    assert told[0] == told[1]


@pytest.mark.one_in(2)
@pytest.mark.serial
@pytest.mark.parametrize("rank", range(4))
def test_matrices_of_integers_are_factored_as_those_of_floats(rank):
    """Integers have values, and none of the floats that they become does: the ledgers are those of floats."""
    routines = {
        "cholesky": linalg.cholesky, "eigh": linalg.eigh, "det": linalg.det, "inv": linalg.inv, "svd": linalg.svdvals,
        "lu": lambda a: linalg.lu_factor(a).solve(a), "qr": linalg.qr, "std": pla.std,
        "thirds": lambda a: (a / 3).sum(),
    }  # fmt: skip
    whole = np.random.default_rng(0).integers(-3, 4, (12, 12))
    for name, routine in routines.items():
        books = []
        for dtype in (np.int64, np.float64):
            with pla.imagine(4, rank, what_if=pla.WhatIf()):
                grid = pla.Grid({"r": 2, "c": 2})
                a = pla.distribute((whole @ whole.T).astype(dtype), grid, pla.Layout("c", "r"))
                with pla.ledger(grid) as book:
                    routine(a)
            books.append(rows(book))
        assert books[0] == books[1], name


@pytest.mark.serial
def test_what_integers_become_has_no_values():
    with pla.imagine(4) as world:
        mean = pla.mean(pla.distribute(np.arange(8), pla.Grid({"r": 4}), pla.Layout("r")))
        with pytest.raises(
            pla.ValuesNeeded, match=r"the number that an array has depends on values.*test_imagined_linalg"
        ):
            float(mean)
        assert world.memory
