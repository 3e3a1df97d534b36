"""The chooser behind A @ B: known products, its rule against brute force, its default layouts."""

import itertools
import math
import random
import time

import pytest

from parlinalg.errors import LayoutError, PlanError
from parlinalg.layout import Layout, coordinates
from parlinalg.matmul.assign import _spread, assign
from parlinalg.moves import moves
from parlinalg.plan import Plan

pytestmark = pytest.mark.serial

N = 64
SQUARE = ((N, N), (N, N))


def axes_of(plan):
    return {name: tuple(a for cut in getattr(plan, name) for a in cut) for name in "bmnk"}


@pytest.mark.parametrize(
    ("x", "w", "shapes", "sizes", "cuts", "y"),
    [
        # SUMMA
        (Layout("r", "c"), Layout("r", "c"), SQUARE, {"r": 2, "c": 2}, {"m": "r", "n": "c"}, Layout("r", "c")),
        # 1D: rows, columns, inner
        (Layout("t", None), Layout(None, None), SQUARE, {"t": 4}, {"m": "t"}, Layout("t", None)),
        (Layout(None, None), Layout(None, "t"), SQUARE, {"t": 4}, {"n": "t"}, Layout(None, "t")),
        (Layout(None, "t"), Layout("t", None), ((8, 512), (512, 8)), {"t": 4}, {"k": "t"}, Layout(None, "t")),
        (Layout(None, "t"), Layout("t", None), ((9, 512), (512, 8)), {"t": 4}, {"k": "t"}, Layout("t", None)),
        # 3D and 2.5D with the depth on k, as the schemes have them
        (
            Layout(("i", "j"), "l"), Layout(("l", "i"), "j"), SQUARE, {"i": 2, "j": 2, "l": 2},
            {"m": "i", "n": "j", "k": "l"}, Layout("i", ("j", "l")),
        ),
        (
            Layout("r", ("d", "c")), Layout(("d", "r"), "c"), SQUARE, {"d": 2, "r": 2, "c": 2},
            {"m": "r", "n": "c", "k": "d"}, Layout("r", ("c", "d")),
        ),
        # a vector on the right: nothing but the sum moves
        (
            Layout("r", "c"), Layout("c", None), ((64, 64), (64, 1)), {"r": 2, "c": 2},
            {"m": "r", "k": "c"}, Layout(("r", "c"), None),
        ),
        # one axis of one rank keeps its place
        (Layout("r", "c"), Layout("r", "c"), SQUARE, {"r": 1, "c": 3}, {"m": "r", "n": "c"}, Layout("r", "c")),
        (Layout("r", "c"), Layout("r", "c"), SQUARE, {"r": 1, "c": 1}, {"m": "r", "n": "c"}, Layout("r", "c")),
    ],
)  # fmt: skip
def test_known_products(x, w, shapes, sizes, cuts, y):
    plan = assign(x, w, *shapes, sizes)
    assert axes_of(plan) == {name: tuple(cuts.get(name, "")) for name in "bmnk"}
    assert plan.y == y
    assert (plan.x, plan.w) == (x, w)


def test_leading_dims():
    plan = assign(Layout("r", None, "c"), Layout("r", "c"), (6, 7, 64), (64, 64), {"r": 2, "c": 2})
    assert plan.m[0] == ("r",) or plan.m[1] == ("r",)
    assert plan.y.ndim == 3
    shared = assign(Layout("r", None, "c"), Layout("r", None, "c"), (6, 64, 64), (6, 64, 64), {"r": 2, "c": 2}, batch=1)
    assert axes_of(shared)["b"] == ("r",)
    assert shared.y == Layout("r", None, "c")
    assert shared.words((6, 64, 64), (6, 64, 64), {"r": 2, "c": 2}, {"r": 0, "c": 0}) == 3 * 64 * 32


def test_orders_follow_the_operands():
    sizes = {"a": 2, "b": 2}
    plan = assign(Layout(("b", "a"), None), Layout(None, None), *SQUARE, sizes)
    assert plan.m == (("b", "a"),)
    assert plan.y == Layout(("b", "a"), None)
    plan = assign(Layout(None, None), Layout(("b", "a"), None), (4, 512), (512, 4), sizes)
    assert plan.k == (("b", "a"),)


def test_out_is_respected():
    sizes = {"r": 2, "c": 2}
    for out in (Layout("c", "r"), Layout(None, None), Layout(("r", "c"), None), Layout("r", None, partial="c")):
        plan = assign(Layout("r", "c"), Layout("c", "r"), *SQUARE, sizes, out=out)
        assert plan.y == out
    assert assign(Layout("r", "c"), Layout("c", None), *SQUARE, sizes, out=Layout("r", None, partial="c")).k == (
        ("c",),
    )
    plan = assign(Layout("r", None), Layout(None, None), *SQUARE, {"r": 2, "c": 1}, out=Layout("r", None, partial="c"))
    assert plan.k == (("c",),)


def brute_force(x, w, x_shape, w_shape, sizes):
    """Every assignment of every axis to m, n, k or none, in every order; the default y; the least (words, messages)."""
    (m, k), n = x_shape, w_shape[1]
    found = []
    for places in itertools.product("mnk-", repeat=len(sizes)):
        groups = {p: [a for a, q in zip(sizes, places) if q == p] for p in "mnk"}
        block = 1
        for extent, p in ((m, "m"), (n, "n"), (k, "k")):
            block *= math.ceil(extent / math.prod(sizes[a] for a in groups[p]))
        for cuts in itertools.product(*(itertools.permutations(groups[p]) for p in "mnk")):
            cm, cn, ck = cuts
            pieces = (math.ceil(m / math.prod(sizes[a] for a in cm)), math.ceil(n / math.prod(sizes[a] for a in cn)))
            y = Layout((*cm, *ck), cn) if pieces[0] > pieces[1] else Layout(cm, (*cn, *ck))
            plan = Plan(m=(cm,), n=(cn,), k=(ck,), x=x, w=w, y=y)
            words = max(plan.words(x_shape, w_shape, sizes, at) for at in coordinates(tuple(sizes), sizes))
            found.append((block, words))
    least = min(found)[0]
    return min(words for block, words in found if 10 * block <= 11 * least)


def layouts(rng, axes):
    places = [rng.randrange(3) for _ in axes]
    order = rng.sample(axes, len(axes))
    return Layout(*(tuple(a for a in order if places[axes.index(a)] == d) for d in (0, 1)))


def test_equals_brute_force():
    rng = random.Random(7)
    for case in range(120):
        sizes = dict(zip("abc", rng.choice([(2,), (3,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (3, 2, 2)])))
        m, n, k = (rng.choice((1, 5, 12, 17, 64)) for _ in range(3))
        x, w = layouts(rng, list(sizes)), layouts(rng, list(sizes))
        plan = assign(x, w, (m, k), (k, n), sizes)
        words = max(plan.words((m, k), (k, n), sizes, at) for at in coordinates(tuple(sizes), sizes))
        best = brute_force(x, w, (m, k), (k, n), sizes)
        assert words == best, case


def test_replicated_work_only_when_nothing_is_better():
    plan = assign(Layout(None, None), Layout(None, None), *SQUARE, {"r": 2, "c": 3})
    assert sorted(a for axes in axes_of(plan).values() for a in axes) == ["c", "r"]
    assert plan.words(*SQUARE, {"r": 2, "c": 3}, {"r": 0, "c": 0}) == 0


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_and_tiny(shape):
    m, n, k = shape
    plan = assign(Layout("r", "c"), Layout("c", "r"), (m, k), (k, n), {"r": 2, "c": 3})
    assert plan.y.ndim == 2


def test_everything_returned_can_be_carried_out():
    rng = random.Random(3)
    for _ in range(60):
        sizes = dict(zip("abcd", rng.choice([(1,), (2, 1), (2, 3), (2, 2, 2), (2, 1, 2, 2)])))
        m, n, k = (rng.choice((0, 1, 3, 16)) for _ in range(3))
        x, w, out = (layouts(rng, list(sizes)) for _ in range(3))
        for wanted in (None, out):
            plan = assign(x, w, (m, k), (k, n), sizes, wanted)
            assert wanted is None or plan.y == wanted
            for src, dst in ((plan.x, plan.x_work), (plan.w, plan.w_work), (plan.y_work, plan.y)):
                moves(src, dst, sizes)
            if wanted is None:  # nothing is left unsummed or replicated that was cut at work
                assert set(plan.y.cut_axes) == {a for axes in axes_of(plan).values() for a in axes}


def test_fast():
    sizes = {"a": 2, "b": 2, "c": 2, "d": 2}
    begin = time.process_time()
    for m in range(64, 68):
        assign(Layout(("a", "b"), ("c", "d")), Layout(("c", "d"), ("a", "b")), (m, 64), (64, 64), sizes)
    assert time.process_time() - begin < 4
    begin = time.process_time()
    for _ in range(10_000):
        assign(Layout("r", "c"), Layout("r", "c"), *SQUARE, {"r": 2, "c": 2})
    assert time.process_time() - begin < 1
    begin = time.process_time()
    assign(Layout("r", ("d", "c")), Layout(("d", "r"), "c"), *SQUARE, {"d": 4, "r": 50, "c": 50})
    assert time.process_time() - begin < 2


def test_ranks_looked_at():
    assert _spread(5) == [0, 1, 2, 3, 4]
    for ranks in (17, 64, 100, 10_000):
        seen = _spread(ranks)
        assert {0, ranks - 1} <= set(seen) <= set(range(ranks))
        assert len(set(seen)) >= 15


def test_bad_calls():
    whole = Layout(None, None)
    with pytest.raises(PlanError, match=r"\(4, 5\) and w of shape \(6, 7\) do not multiply"):
        assign(whole, whole, (4, 5), (6, 7), {"r": 2})
    with pytest.raises(PlanError, match="rests unsummed: redistribute it to"):
        assign(Layout("r", None, partial="c"), whole, (4, 5), (5, 7), {"r": 2, "c": 2})
    with pytest.raises(LayoutError, match="names axis 'q'"):
        assign(Layout("q", None), whole, (4, 5), (5, 7), {"r": 2})
    with pytest.raises(LayoutError, match=r"Layout\('r'\) describes 1 dims"):
        assign(whole, whole, (4, 5), (5, 7), {"r": 2}, out=Layout("r"))
    with pytest.raises(PlanError, match="with 1 shared leading dims"):
        assign(whole, whole, (4, 5), (5, 7), {"r": 2}, batch=1)
