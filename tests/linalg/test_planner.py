"""Plans of factorizations: what they say is what runs, and the sizes of tiles."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg
from parlinalg.errors import PlanError
from parlinalg.linalg import tile_sizes
from parlinalg.linalg.planner import ROUTINES, SQUARE, plan_linalg
from parlinalg.linalg.tile_sizes import Constants, block_size, candidates, predicted
from parlinalg.linalg.tiles import Deal, depths
from parlinalg.units import format_bytes


@pytest.fixture(scope="module")
def grid(world, backend):
    columns = max(c for c in range(1, world.size + 1) if world.size % c == 0 and c * c <= world.size)
    return pla.Grid({"r": world.size // columns, "c": columns}, world, backend)


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("shape", [(150, 150), (60, 170), (300, 20)], ids=str)
def test_a_plan_says_what_runs(grid, routine, shape, monkeypatch):
    """On the default grid, in the default layout, with the tiles that the model chooses: calls and words."""
    monkeypatch.setattr(pla.Grid, "cores", grid.size)  # as plans assume; `test_words` counts what fewer cores change
    m, n = shape
    if (m != n and routine in ("cholesky", "solve", "eigh")) or (
        grid.size == 1 and routine in ("qr", "lstsq", "eigh", "svd")
    ):
        return  # on one rank these are one call of LAPACK
    if routine == "svd" and not grid.backend.cpu:
        return  # on GPUs by the polar decomposition, which has no plan
    rng = np.random.default_rng(5)
    a = pla.asarray(rng.standard_normal(shape), grid=grid)
    if routine == "cholesky":
        a = a @ a.mT + 500 * pla.eye(n, grid=grid)
    elif routine == "eigh":
        a = a + a.mT
    a, b = a.redistribute(grid.default_layout(shape)), pla.asarray(rng.standard_normal((m, 7)), grid=grid)
    run = {
        "cholesky": linalg.cholesky, "lu": linalg.lu, "qr": linalg.qr, "eigh": linalg.eigh,
        "solve": lambda x: linalg.solve(x, b), "svd": lambda x: linalg.svd(x, full_matrices=False),
        "lstsq": lambda x: linalg.lstsq(x, b),
    }[routine]  # fmt: skip
    plan = plan_linalg(routine, m, n, sizes=grid.sizes, sides=7, dtype="float64", near=True)
    with pla.ledger(grid) as book:
        run(a)
    words, calls = plan.costs.book(grid.rank)
    if grid.size > 1:
        assert book.words.total() > 0
    by_all = routine == "svd" and not plan.alone
    if (
        routine == "eigh" or by_all or (routine in ("lu", "solve") and plan.deal.R > 1)
    ):  # by the values, but for the calls
        words = book.words
    assert +book.words == +words
    if not by_all:
        assert book.calls == calls
    if routine not in ("lu", "solve"):
        assert max(grid.world.share(book.words.total())) <= plan.words


@pytest.mark.parametrize("shape", [(150, 150), (60, 170), (300, 20)], ids=str)
def test_a_plan_of_qr_with_pivoting_says_what_runs(grid, shape, monkeypatch):
    """Of columns that pivoting takes in their order."""
    monkeypatch.setattr(pla.Grid, "cores", grid.size)
    if grid.size == 1:
        return  # one call of LAPACK
    m, n = shape
    falling = (1.5 if m > n else 16.0) ** -np.arange(n)
    a = pla.distribute(np.random.default_rng(5).standard_normal(shape) * falling, grid, grid.default_layout(shape))
    plan = plan_linalg("qr", m, n, sizes=grid.sizes, pivoting=True)
    with pla.ledger(grid) as book:
        *_, p = linalg.qr(a, pivoting=True)
    k = min(m, n)
    assert (p.gather()[:k] == np.arange(k)).all()
    words, calls = plan.costs.book(grid.rank)
    assert +book.words == +words
    assert book.calls == calls
    assert max(grid.world.share(book.words.total())) == plan.words


@pytest.mark.serial
def test_plans_of_qr_with_pivoting():
    plan, long = (plan_linalg("qr", m, 512, ranks=16, pivoting=True, near=False) for m in (512, 900))
    assert (plan.block, plan.deal.R, plan.deal.C, plan.first) == (32, 1, 16, None)
    assert (long.shape, long.first.R, long.first.C) == ((512, 512), 4, 4)
    assert long.time.total > plan.time.total
    assert "of R[512, 512], which a QR factorization on tiles of " in long.explain()
    assert "which its Gram matrix gives" in plan_linalg("qr", 65536, 256, ranks=8, pivoting=True).explain()
    with pytest.raises(PlanError, match="tiles of 32 columns on any grid; leave block=8 out"):
        plan_linalg("qr", 99, ranks=4, pivoting=True, block=8)
    with pytest.raises(PlanError, match="pivoting is True or False, not 'no'"):
        plan_linalg("qr", 99, ranks=4, pivoting="no")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="pivoting=True is for qr, not lu"):
        plan_linalg("lu", 99, ranks=4, pivoting=True)


@pytest.mark.serial
@pytest.mark.parametrize("routine", ["cholesky", "lu", "solve", "solve_triangular", "qr", "eigh", "svd", "eig"])
def test_tiles_leave_no_rank_idle_and_are_the_best_of_the_model(routine):
    grids = [(1, 1), (1, 2), (1, 3), (2, 2), (1, 4), (4, 1), (2, 4), (16, 32)]
    for (R, C), m, n in itertools.product(grids, [0, 1, 16, 40, 97, 300, 2048, 65536], [0, 1, 33, 100, 2048]):
        b = block_size(routine, m, n, R, C)
        assert 16 <= b <= 256
        assert b == 16 or ((R == 1 or (m - 1) // b + 1 >= 2 * R - 1) and (C == 1 or (n - 1) // b + 1 >= 2 * C - 1))
        times = {c: predicted(routine, m, n, R, C, c, Constants.tuned()).total for c in candidates(routine, m, n, R, C)}
        assert times[b] == min(times.values())
        assert min(times.values()) >= 0


@pytest.mark.serial
def test_typical_tiles():
    for routine, (R, C) in itertools.product(["cholesky", "lu", "qr"], [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)]):
        assert 96 <= block_size(routine, 2048, 2048, R, C) <= 192
        sizes = [block_size(routine, n, n, R, C) for n in (2048, 4096, 8192, 16384)]
        assert sizes == sorted(sizes)


@pytest.mark.serial
def test_constants_of_the_machine_change_the_tiles(tune):
    plain = block_size("lu", 2048, 2048, 2, 2)
    tune(STEP_FLOPS=1 << 28)
    assert block_size("lu", 2048, 2048, 2, 2) > plain
    tune(STEP_FLOPS=0, CALL_FLOPS=0, GEMM_DEPTH=0)
    assert block_size("lu", 2048, 2048, 2, 2) == 16
    tune(PANEL_SLOWNESS=0, WORD_FLOPS=0, GEMM_DEPTH=100)
    assert block_size("lu", 2048, 2048, 2, 2) > plain


@pytest.mark.serial
def test_the_explanation_says_what_was_chosen():
    plan = plan_linalg("lu", 4096, ranks=16)
    text = plan.explain()
    for part in (
        "lu        A[4096, 4096] in float64 over 16 ranks", '4×4 on Grid({"r": 4, "c": 4})', "43 steps",
        f"{plan.words:,} received by rank {plan.busiest}", "tournament", "rows of U down grid columns", "trip home",
        "8×2: ", f"{plan.messages:,} collective calls", "2.5D      one layer; on 16 ranks more would save no words",
    ):  # fmt: skip
        assert part in text, (part, text)
    listed = [line.split() for line in text.splitlines() if line.endswith(("calls", "call"))]
    assert sum(int(line[-4].replace(",", "")) for line in listed) == plan.words
    assert sum(int(line[-2].replace(",", "")) for line in listed) == plan.messages
    given = plan_linalg("lu", 4096, sizes={"a": 2, "b": 8}, block=48, rate=4e10)
    assert (given.deal.R, given.deal.C, given.block) == (2, 8, 48)
    assert "the model would choose 112" in given.explain()
    assert " ms at 40.0 GFLOP/s, without the trips" in given.explain()
    assert "% fewer" in plan_linalg("cholesky", 20000, ranks=512).explain()
    assert "Gram" in plan_linalg("qr", 65536, 256, ranks=8).explain()
    assert plan_linalg("qr", 65536, 256, ranks=8).deal.C == 1
    assert plan_linalg("lu", 2048, ranks=8).deal.R == 1
    assert plan_linalg("lu", 2048, ranks=9).deal.R == 3
    assert plan_linalg("lu", 2048, sizes={"r": 2, "c": 2}, near=False).deal.R == 2


@pytest.mark.serial
@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 60])
def test_every_size_has_a_plan(routine, ranks):
    for m, n in ((0, 0), (1, 1), (2, 2), (97, 97), (0, 5), (5, 0), (9, 300), (300, 9)):
        if m == n or routine not in ("cholesky", "solve", "eigh"):
            plan = plan_linalg(routine, m, n, ranks=ranks, sides=3, dtype="complex64")
            assert plan.routine in plan.explain()
            assert plan.words >= 0
            assert ranks > 1 or plan.words == plan.messages == 0


@pytest.mark.serial
def test_replicas_save_what_is_published():
    """Solomonik and Demmel's LU on 512 ranks: about 30% fewer words with 2 copies, 39% with 4."""
    text = plan_linalg("lu", 10_000, ranks=512, depth=1).explain()
    assert (
        "with 4 layers panels and sums would be 2,734,375 words, not 4,492,188 or more, 39% fewer, in the leading terms"
        in text
    )
    text = plan_linalg("solve", 1000, ranks=8, depth=8).explain()
    assert "with 8 layers panels and sums are 875,000 words, 250% more than the 250,000 of one layer" in text
    assert "on 8 ranks more would save no words" in plan_linalg("lu", 10_000, ranks=8).explain()


@pytest.mark.serial
@pytest.mark.parametrize("routine", ["cholesky", "lu", "solve"])
def test_layers_are_planned_where_they_save(routine):
    """Words of all steps, trips included, and time; as much memory as is stated."""
    for ranks in (8, 64, 512):
        flat, plan = (plan_linalg(routine, 8192, ranks=ranks, depth=depth, near=False) for depth in (1, None))
        assert plan.depth == 1 or plan.words < flat.words
        assert plan.depth == 1 or plan.time.total < flat.time.total
        assert routine == "solve" or (plan.depth > 1) == (ranks == 512 or routine == "cholesky")
        assert plan.deal.D == plan.depth == plan.ranks // plan.deal.R // plan.deal.C
        if plan.depth > 1:
            assert f"{plan.depth} layers of {plan.deal.R}×{plan.deal.C} on Grid" in plan.explain()
            least = sum(flat.memory.values())
            assert sum(plan.memory.values()) > least
            tight = plan_linalg(routine, 8192, ranks=ranks, memory=least, near=False)
            assert tight.need <= least
            assert tight.depth < plan.depth
            assert tight == replace(flat, limit=least, faster=tight.faster) or (
                tight.words < flat.words and tight.time.total < flat.time.total
            )
    assert plan_linalg(routine, 8192, ranks=512, near=True).depth == 1
    assert plan_linalg(routine, 8192, sizes={"a": 8, "b": 4, "c": 2}, near=False, depth=2).deal.depth_axes == ("c",)


def _every(routine, m, n, ranks=None, sizes=None, block=None, depth=None, **more):
    """Return the plans of all grids, numbers of layers and sizes of tiles that are looked at."""
    count = ranks or int(np.prod([*sizes.values()]))
    known = routine in tile_sizes.REPLICATED and not more["near"]
    layers = [depth or 1]
    if known and depth is None:
        layers = depths(sizes) if sizes else [d for d in range(1, count + 1) if count % d == 0]
    found = []
    for d in layers:
        rows = [r for r in range(1, count // d + 1) if count // d % r == 0]
        for grid in [sizes] if sizes else [{"d": d, "r": r, "c": count // d // r} for r in rows]:
            own = plan_linalg(routine, m, n, sizes=grid, depth=d, **more)
            most = candidates(own.kernel, *own.shape, own.deal.R, own.deal.C)[-1]
            for b in [block] if block else [b for b in tile_sizes.SIZES if b <= most]:
                found.append(plan_linalg(routine, m, n, sizes=grid, block=b, depth=d, **more))
    return found


@pytest.mark.serial
@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize(
    "keywords",
    [
        {"ranks": 1}, {"ranks": 6}, {"ranks": 8}, {"ranks": 8, "near": False}, {"ranks": 6, "near": False},
        {"sizes": {"a": 2, "b": 4}, "near": False}, {"ranks": 6, "block": 48}, {"ranks": 8, "depth": 2, "near": False},
        {"ranks": 8, "depth": 2, "near": False, "block": 32},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(700, 700), (2100, 300), (40, 40)], ids=str)
def test_the_fastest_plan_that_fits_is_taken(routine, keywords, shape):
    m, n = shape
    keywords = {"near": True, "sides": 5, **keywords}
    if (m != n and routine in SQUARE) or (keywords.get("depth", 1) > 1 and routine not in tile_sizes.REPLICATED):
        return
    fastest = plan_linalg(routine, m, n, **keywords)
    assert plan_linalg(routine, m, n, memory=fastest.need, **keywords).faster is None
    with pytest.raises(PlanError, match="no other plan needs less; give that or more ranks") as error:
        plan_linalg(routine, m, n, memory=1, **keywords)
    named = re.search(r"needs about ([\d.,]+ \w+) a rank on ", str(error.value))[1]
    least = plan_linalg(routine, m, n, memory=named, **keywords)
    assert least.need <= fastest.need
    needs = {each.need for each in _every(routine, m, n, **keywords)}
    while least.need > min(needs):  # every plan that is chosen fits
        plan = plan_linalg(routine, m, n, memory=least.need - 1, **keywords)
        assert plan.need < least.need
        least = plan
    assert named == format_bytes(least.need, up=True)
    with pytest.raises(PlanError, match=f"needs about {named} a rank"):
        plan_linalg(routine, m, n, memory=least.need - 1, **keywords)
    for memory in {least.need, (least.need + fastest.need) // 2, fastest.need - 1}:
        if not least.need <= memory < fastest.need:
            continue
        plan = plan_linalg(routine, m, n, memory=memory, **keywords)
        assert plan.need <= memory
        assert plan.faster == replace(fastest, limit=memory)
        assert " a rank, more than " in plan.explain()
        if routine not in tile_sizes.REDUCTIONS:
            flat = [
                each
                for each in _every(routine, m, n, **keywords)
                if each.need <= memory and each.depth == keywords.get("depth", 1)
            ]
            assert not flat or plan.time.total <= min(each.time.total for each in flat) * (1 + 1e-12)


@pytest.mark.serial
def test_what_the_memory_rules_out_is_named():
    fastest = plan_linalg("cholesky", 8192, ranks=64)
    assert fastest.depth > 1
    plan = plan_linalg("cholesky", 8192, ranks=64, memory="40MiB")
    assert plan.depth < plan.faster.depth == fastest.depth  # two layers hold 36.7 MiB
    assert plan.need <= 40 << 20 < fastest.need
    text = plan.explain()
    assert re.search(r"others +\d layers of \d+×\d+ with tiles of \d+: \d+% less time, but it needs ", text), text
    assert f"but it needs {fastest.need / 2**20:.1f}"[:-1] in text
    assert " MiB a rank, more than 40.00 MiB" in text
    assert "but it needs" not in plan_linalg("cholesky", 8192, ranks=64, memory="1GiB").explain()


@pytest.mark.serial
def test_the_rows_and_columns_of_the_fullest_rank_are_counted():
    for sizes, shape, size in itertools.product(
        [{"r": 1}, {"r": 2, "c": 3}, {"a": 3, "b": 2, "c": 2}], ["square", "tall", "strips", "wide"], [1, 5, 16]
    ):
        deal = Deal(sizes, size, shape)
        for m, n in itertools.product([0, 1, 4, 15, 16, 17, 95, 96, 97, 200], repeat=2):
            assert deal.most(m, n) == (len(deal.rows(m)[0]), len(deal.columns(n)[0]))
            assert deal.most(m, n) == (max(map(len, deal.rows(m))), max(map(len, deal.columns(n))))


@pytest.mark.serial
@pytest.mark.parametrize(
    ("given", "match"),
    [
        (("hessenberg", 9), "there is one for cholesky, lu, solve"),
        (("solve", 9, 8), r"square matrices, not \[9, 8\]"),
        (("lu", -1), "at least 0, not -1"),
        (("lu", 2.5), "whole number"),
        (("cholesky", 10**9), r"up to 134,217,728×8,388,608 or its transpose, not \[1000000000, 1000000000\]"),
        (("qr", 9, 10**9), "give a smaller one"),
    ],
)
def test_wrong_arguments(given, match):
    with pytest.raises(PlanError, match=match):
        plan_linalg(*given, ranks=4)


@pytest.mark.serial
def test_wrong_keywords():
    for keywords, match in (
        ({}, "give the number of ranks"), ({"ranks": 0}, "at least 1, not 0"), ({"ranks": 2, "block": 0}, "at least 1"),
        ({"ranks": 2, "sizes": {"r": 2}}, "not both"), ({"ranks": 2, "dtype": "int8"}, "linalg takes float32"),
        ({"ranks": 2, "dtype": "real"}, "unknown dtype"), ({"ranks": 2, "memory": "1KiB"}, "more than 1.00 KiB"),
        ({"ranks": 2, "sides": -1}, "sides must be"), ({"ranks": 6, "depth": 4}, "6 ranks do not form 4 layers"),
        ({"sizes": {"r": 2, "c": 3}, "depth": 4}, r"one of 1, 2, 3, 6 on a grid \{'r': 2, 'c': 3\}, not 4"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=match):
            plan_linalg("solve", 99, **keywords)
    with pytest.raises(PlanError, match="qr knows one layer of ranks; cholesky, lu, solve know more"):
        plan_linalg("qr", 99, ranks=4, depth=2)


@pytest.mark.serial
@pytest.mark.parametrize(("n", "sizes"), [(4096, {"r": 4, "c": 4}), (4096, {"r": 2, "c": 4}), (9000, {"r": 8, "c": 4})])
def test_leading_terms_of_the_guide(n, sizes):
    R, C = sizes["r"], sizes["c"]
    p, down, across = R * C, 1 - 1 / R, 1 - 1 / C
    halves, trip = n**2 / 2 * (across / R + down / C), n**2 / p * (1 - 1 / p)

    def expected(routine, b):
        lu = halves + n * b * ((R - 1) / C + across)
        return {
            "cholesky": halves + trip,
            "lu": lu + 3 * trip,
            "solve": lu + n * b / C * down + trip,
            "qr": n**2 / 2 / R * across + (2 * n**2 + 6 * n * b) / C * down + 2 * n * b * across + 3 * trip,
            "lstsq": 4 * n**2 * (1 - 1 / p)
            + halves
            + n**2 / 2 / C * down
            + 6 * n * b / C * down
            + 2 * n * b * across
            + 3 * trip,
            "eigh": 3 * n**2 * (1 - 1 / p) + 2 * n**2 / C * down + 5 / 2 * trip,
            "svd": 4 * n**2 * (1 - 1 / p) + 4 * n**2 / C * down + 5 * trip,
        }[routine]

    for routine in ROUTINES:
        plan = plan_linalg(routine, n, sizes=sizes, near=False)
        assert (plan.deal.R, plan.deal.C) == (R, C)
        assert plan.costs.words.mean() == pytest.approx(expected(routine, plan.block), rel=0.05)


@pytest.mark.serial
def test_plans_of_large_matrices_are_made_in_seconds():
    start = time.process_time()
    assert pla.plan_linalg("cholesky", 1_000_000, ranks=4).words == 500_111_994_882
    assert time.process_time() - start < 4
    start = time.process_time()
    assert pla.plan_linalg("cholesky", 8_000_000, ranks=1024).words == 2_064_081_102_084
    assert time.process_time() - start < 10
