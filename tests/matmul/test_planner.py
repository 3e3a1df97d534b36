"""The planner of products: its rule, its bounds, its memory limit and its words."""

import math
import random
import time
from fractions import Fraction

import pytest

from parlinalg.errors import PlanError
from parlinalg.layout import Layout, coordinates
from parlinalg.matmul import bounds, plan_matmul

pytestmark = pytest.mark.serial


def brute_force(m, n, k, ranks):
    """The rule as the issue states it, over every grid."""
    grids = []
    for pm in range(1, ranks + 1):
        for pn in range(1, ranks // pm + 1):
            for pk in range(1, ranks // (pm * pn) + 1):
                block = math.ceil(m / pm) * math.ceil(n / pn) * math.ceil(k / pk)
                grids.append((block, pm, pn, pk))
    least = min(grids)[0]
    best = None
    for block, pm, pn, pk in grids:
        if 10 * block <= 11 * least:
            p = pm * pn * pk
            a = Fraction(m * k * (pn - 1), p)
            b = Fraction(k * n * (pm - 1), p)
            c = Fraction(m * n * (pk - 1), p)
            figure = (a + b + c, pm + pn + pk)
            if best is None or figure < best[0]:
                best = (figure, {(pm, pn, pk)})
            elif figure == best[0]:
                best[1].add((pm, pn, pk))
    return best


def problems(count, most_ranks, most=512):
    rng = random.Random(20240517)
    for _ in range(count):
        size = [rng.choice((rng.randint(0, 9), rng.randint(1, most), rng.randint(1, most))) for _ in range(3)]
        yield *size, rng.choice((rng.randint(1, 16), rng.randint(1, most_ranks)))


def test_equals_brute_force():
    for m, n, k, ranks in problems(500, 512, 512):
        plan = plan_matmul(m, n, k, ranks)
        (words, blocks), grids = brute_force(m, n, k, ranks)
        assert plan.factors in grids, (m, n, k, ranks)
        assert plan.words == float(words)
        assert plan.messages == blocks - 3


@pytest.mark.parametrize(
    ("args", "factors"),
    [
        ((4096, 4096, 4096, 65), (4, 4, 4)),
        ((4096, 4096, 4096, 64), (4, 4, 4)),
        ((64, 64, 64, 4), (2, 2, 1)),
        ((4096, 16, 16, 8), (8, 1, 1)),
        ((16, 4096, 16, 8), (1, 8, 1)),
        ((16, 16, 4096, 8), (1, 1, 8)),
        ((5, 5, 5, 1), (1, 1, 1)),
        ((0, 7, 7, 12), (1, 1, 1)),
        ((1, 1, 1, 100), (1, 1, 1)),
    ],
)
def test_known_grids(args, factors):
    assert plan_matmul(*args).factors == factors


def test_never_below_the_bounds():
    attained = 0
    for m, n, k, ranks in problems(1500, 100):
        plan = plan_matmul(m, n, k, ranks, memory=10**12)
        assert plan.words >= plan.bound
        assert plan.words >= plan.limited_bound >= plan.bound
        attained += plan.words == plan.bound
    assert attained > 50


def test_bound_of_every_grid_and_its_textbook_cases():
    for m, n, k, p in problems(60, 60):
        for pm in range(1, p + 1):
            for pn in range(1, p // pm + 1):
                pk = p // (pm * pn)
                q = pm * pn * pk
                words = (m * k * (pn - 1) + k * n * (pm - 1) + m * n * (pk - 1)) / q
                assert words >= bounds.memory_independent(m, n, k, q)
    assert bounds.memory_independent(1000, 10, 10, 10) == 100 * 0.9
    assert bounds.memory_independent(64, 64, 64, 64) == 3 * 16 * 16 - 3 * 64
    assert bounds.memory_limited(64, 64, 64, 64, 64) == pytest.approx(2 * 4096 / 8 + 64 - 3 * 64)


def test_limited_bound_of_many_ranks():
    plan = plan_matmul(256, 256, 256, 512, memory=8 * 700)
    assert plan.limited_bound > plan.bound
    assert plan.words >= plan.limited_bound


def test_limited_bound_rises_as_memory_falls():
    tight = plan_matmul(256, 256, 256, 8, memory=3 * 8 * 256 * 256 // 8 + 8 * 2 * 128 * 128)
    loose = plan_matmul(256, 256, 256, 8, memory="1GiB")
    assert loose.kernel == "gather"
    assert loose.limited_bound == loose.bound
    assert tight.kernel == "stream"
    assert tight.limited_bound >= loose.bound


def needed(plan, kernel, panel, stationary):
    """The elements of the fullest rank, from its blocks' shapes."""
    sizes, shapes = plan.sizes, {"x": (plan.m, plan.k), "w": (plan.k, plan.n), "y": (plan.m, plan.n)}
    corner = {"m": 0, "n": 0, "k": 0}
    moves = {"x": sizes["n"] > 1, "w": sizes["m"] > 1, "y": sizes["k"] > 1}
    lacks = {"x": "n", "w": "m", "y": "k"}
    total = 0
    for name, shape in shapes.items():
        rest = getattr(plan.plan, name).block_shape(shape, sizes, corner)
        work = getattr(plan.plan, f"{name}_work").block_shape(shape, sizes, corner)
        total += math.prod(rest)
        if not moves[name]:
            continue
        if kernel == "gather" or name == stationary:
            total += math.prod(work)
        else:
            dims = {"x": "mk", "w": "kn", "y": "mn"}[name]
            total += 2 * math.prod(panel if d == lacks[stationary] else s for d, s in zip(dims, work))
    return total


def test_memory_is_what_the_blocks_and_buffers_take():
    for m, n, k, ranks in problems(200, 24, 64):
        plan = plan_matmul(m, n, k, ranks, "float32")
        assert plan.kernel == "gather"
        assert plan.memory == 4 * needed(plan, "gather", None, None)


def test_memory_limit_is_kept_and_the_least_is_true():
    streamed = set()
    for m, n, k, ranks in problems(150, 24, 64):
        free = plan_matmul(m, n, k, ranks, "float32")
        with_all = plan_matmul(m, n, k, ranks, "float32", memory=free.memory)
        assert with_all.factors == free.factors
        assert with_all.kernel == "gather"
        least = 0
        try:
            plan_matmul(m, n, k, ranks, "float32", memory=0)
        except PlanError as error:
            least = int(str(error).split("least that would do is ")[1].split()[0])
            with pytest.raises(PlanError, match=f"{least} bytes"):
                plan_matmul(m, n, k, ranks, "float32", memory=least - 1)
        for limit in {least, (least + free.memory) // 2, max(least, free.memory - 1)}:
            plan = plan_matmul(m, n, k, ranks, "float32", memory=limit)
            assert plan.memory <= limit
            if plan.kernel == "stream":
                streamed.add(plan.stationary)
                extent = math.ceil(
                    {"y": k, "x": n, "w": m}[plan.stationary]
                    / plan.sizes[{"y": "k", "x": "n", "w": "m"}[plan.stationary]]
                )
                assert 1 <= plan.panel <= extent
                assert plan.memory == 4 * needed(plan, "stream", plan.panel, plan.stationary)
                wider = needed(plan, "stream", plan.panel + 1, plan.stationary)
                assert plan.panel == extent or 4 * wider > limit
    assert streamed == {"x", "w", "y"}


def test_memory_as_text():
    assert plan_matmul(100, 100, 100, 4, memory="1 MiB").limit == 2**20
    assert plan_matmul(100, 100, 100, 4, memory="1.5e6").limit == 1500000
    with pytest.raises(PlanError, match="least that would do is"):
        plan_matmul(4096, 4096, 4096, 4, memory="1MiB")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((-1, 2, 2, 4), "m must be a whole number of at least 0, not -1"),
        ((2, 2.5, 2, 4), "n must be a whole number"),
        ((2, 2, 2, 0), "ranks must be a whole number of at least 1, not 0"),
        ((2, 2, 2, 4, "float65"), "unknown dtype 'float65'; it may be one of .*float64"),
        ((2, 2, 2, 4, "float64", "lots"), '"4GiB"'),
        ((2, 2, 2, 4, "float64", -5), "at least 0.*-5"),
    ],
)
def test_bad_input_says_what_is_right(args, says):
    with pytest.raises(PlanError, match=says):
        plan_matmul(*args)


def test_numpy_dtypes():
    np = pytest.importorskip("numpy")
    assert (
        plan_matmul(8, 8, 8, 2, np.float32).dtype
        == plan_matmul(8, 8, 8, np.int64(2), np.dtype("f4")).dtype
        == "float32"
    )
    assert plan_matmul(8, 8, 8, 2, float).dtype == "float64"


def test_the_plan_moves_the_words_it_says():
    plan = plan_matmul(64, 64, 64, 8)
    assert plan.factors == (2, 2, 2)
    assert plan.sizes == {"m": 2, "n": 2, "k": 2}
    table = plan.plan
    assert table.x == Layout("m", ("k", "n"))
    assert table.w == Layout(("k", "m"), "n")
    assert table.y == Layout("m", ("n", "k"))
    for coords in coordinates(("m", "n", "k"), plan.sizes):
        assert table.words((64, 64), (64, 64), plan.sizes, coords) == plan.words


def test_the_figure_is_the_mean_over_the_ranks_where_cuts_are_even():
    plan = plan_matmul(60, 48, 36, 24)
    received = [plan.plan.words((60, 36), (36, 48), plan.sizes, c) for c in coordinates(("m", "n", "k"), plan.sizes)]
    assert sum(received) / len(received) == pytest.approx(plan.words)


def test_explains_itself():
    text = plan_matmul(4096, 4096, 4096, 65).explain()
    for substance in (
        "65 ranks", "4×4×4", "rank 64 is idle", "2,359,296 received a rank", "ratio 1.000", "9 blocks", "gather",
        "5×4×3", "6.7% more", "1×1×1", "64.7 times the least possible", "MiB a rank",
    ):  # fmt: skip
        assert substance in text, text
    text = plan_matmul(256, 256, 256, 8, memory="250 KiB").explain()
    for substance in ("stream", "panels of", "250.00 KiB allowed", "2×2×2", "needs at least", "within this memory"):
        assert substance in text, text
    assert "no other grid" in plan_matmul(0, 0, 0, 1).explain()
    assert "have empty blocks" in plan_matmul(1, 10, 10, 300).explain()


def test_many_ranks_take_no_time():
    for args in ((10**5, 10**4, 10**6, 10**4), (1, 1, 1, 10**4), (50, 50, 50, 10**4, "float32", 10**5)):
        begin = time.process_time()
        plan_matmul(*args)
        assert time.process_time() - begin < 2
