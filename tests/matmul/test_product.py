"""Products equal NumPy's: shapes, transposes, dtypes, layouts, grids; and explicit plans move the words they say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg.errors import LayoutError, PlanError
from parlinalg.layout import Layout
from parlinalg.plan import Plan
from tests.cases import (
    COMPLEX,
    DTYPES,
    EVERY_SIZE,
    INTEGERS,
    REAL,
    eps,
    grids,
    held,
    layouts,
    numbers,
    pairs,
    placed,
    same,
)

EXTENTS = [0, 1, 2, 3, 5, 7, 13, 64]
SHAPES = [
    (10_000, 3, 7),
    (3, 10_000, 7),
    (3, 7, 10_000),
    (1, 1, 1),
    (1, 10_000, 1),
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (0, 0, 0),
    (13, 17, 19),
    (31, 1, 29),
    (1, 5, 7),
    (64, 64, 64),
]  # fmt: skip  (m, k, n)
PAIRS = {1: 200, 2: 330, 3: 250, 4: 120, 6: 120, 8: 120, 12: 25}


def normal(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values).astype(dtype)


def size(array):
    return float(np.linalg.norm(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)))


def wide(array):
    return array.astype(
        np.complex128 if array.dtype.kind == "c" else np.float64 if array.dtype.kind in "fV" else array.dtype
    )


def residual_fits(result, a, b, c=None, alpha=1, beta=0):
    """‖C − Cref‖ ≤ 3 eps (√(k + 2) |α| ‖A‖ ‖B‖ + 2 |β| ‖C0‖), as SLATE tests; integers exactly."""
    got, dtype = result.gather(), np.result_type(a.dtype, b.dtype)
    assert result.dtype == got.dtype == dtype, (got.dtype, dtype)
    reference = alpha * (wide(a) @ wide(b)) + (beta * wide(c) if c is not None else 0)
    assert got.shape == reference.shape
    if dtype.kind in "iub":
        np.testing.assert_array_equal(got, (a @ b).astype(dtype) if c is None else reference.astype(dtype))
        return
    bound = np.sqrt(a.shape[-1] + 2) * abs(alpha) * size(a) * size(b) + 2 * abs(beta) * (0 if c is None else size(c))
    error = size(wide(got) - reference) if got.size else 0.0
    assert error <= 3 * eps(dtype) * bound, (error, eps(dtype) * bound)


def turned(array, grid, layout, transpose):
    """The array in `layout`, lying in memory transposed or not."""
    return placed(np.ascontiguousarray(array.T), grid, layout.T).T if transpose else placed(array, grid, layout)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


@pytest.mark.core
@pytest.mark.ranks(*EVERY_SIZE)
@pytest.mark.timeout(1200)
def test_all_pairs_of_resting_layouts(grid, full, world, backend):
    a, b = numbers((5, 7), seed=1), numbers((7, 3), seed=2)
    every = layouts(grid.axes, 2, partial=False)
    most = None if full or (backend == "numpy" and world.size <= 3) else PAIRS[world.size]
    for t, (one, other) in enumerate(pairs(every, every, most)):
        x, y = turned(a, grid, one, t % 2), turned(b, grid, other, t % 4 > 1)
        goal = None if t % 3 else every[(7 * t) % len(every)]
        c = pla.matmul(x, y, layout=goal)
        assert goal is None or c.layout == goal
        same(c, a @ b)
        np.testing.assert_array_equal(held(x), a[tuple(slice(r.start, r.stop) for r in grid.block(one, a.shape))])


@pytest.mark.ranks(*EVERY_SIZE)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["NN", "NT", "TN", "TT"])
def test_shapes_and_transposes(grid, kind):
    every = layouts(grid.axes, 2, partial=False)
    for t, (m, k, n) in enumerate(SHAPES):
        a, b = normal((m, k), float, t), normal((k, n), float, t + 50)
        for one, other in pairs(every, every, 2, seed=t + ord(kind[0]) + 2 * ord(kind[1])):
            residual_fits(turned(a, grid, one, kind[0] == "T") @ turned(b, grid, other, kind[1] == "T"), a, b)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "b"], ids=str)
def test_dtypes(grid, dtype):
    every = layouts(grid.axes, 2, partial=False)
    floats = dtype.kind in "fcV"
    a, b = (normal(s, dtype, 3) if floats else numbers(s, dtype, 3) for s in ((9, 40), (40, 6)))
    for one, other in pairs(every, every, 3, seed=dtype.num):
        x, y = placed(a, grid, one), turned(b, grid, other, True)
        residual_fits(x @ y, a, b)


def test_booleans(grid):
    every = layouts(grid.axes, 2, partial=False)
    rng = np.random.default_rng(1)
    a, b = rng.random((9, 40)) < 0.1, rng.random((40, 6)) < 0.1
    assert 0 < (a @ b).sum() < 40
    for one, other in pairs(every, every, 4, seed=1):
        x, y = placed(a, grid, one), turned(b, grid, other, True)
        same(x @ y, a @ b)
        out = pla.zeros((9, 6), grid, every[-1], bool)
        assert pla.matmul(x, y, out=out) is out
        same(out, a @ b)
        with pytest.raises(TypeError, match="alpha and beta are for numbers"):
            pla.matmul(x, y, alpha=2)
    x = placed(a, grid, every[0])
    same(x[0] @ x.T, a[0] @ a.T)
    same(x[:, :0] @ x[:, :0].T, np.zeros((9, 9), bool))


def test_mixed_dtypes(make_grid, world):
    grid = make_grid(grids(world.size)[1])
    layout = Layout(grid.axes[0], grid.axes[1])
    for one, other in pairs([*REAL, *COMPLEX, *INTEGERS], [*REAL, *COMPLEX, *INTEGERS], 40):
        try:
            np.result_type(one, other)
        except TypeError:  # ml_dtypes promotes bfloat16 with some dtypes only
            continue
        a, b = numbers((5, 6), one), numbers((6, 4), other)
        got = (placed(a, grid, layout) @ placed(b, grid, layout)).gather()
        assert got.dtype == np.result_type(one, other), (one, other)
        np.testing.assert_array_equal(got.astype(complex), wide(a).astype(complex) @ wide(b).astype(complex))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_halves_are_summed_in_single_precision(make_grid, world, dtype):
    grid = make_grid({"a": world.size})
    k = 1024 if np.dtype(dtype).name == "float16" else 128
    ones = np.ones((2, 4 * k), dtype)  # in 16 bits the local sum would stop at 2 k
    c = placed(ones, grid, Layout(None, None)) @ placed(ones.T.copy(), grid, Layout(None, None))
    assert float(c.gather()[0, 0]) == 4 * k


def test_batches_and_vectors(grid):
    a, w = numbers((4, 5, 6), seed=1), numbers((6, 3), seed=2)
    shared, many = numbers((4, 6, 3), seed=3), numbers((2, 4, 5, 6), seed=4)
    v, u = numbers((6,), seed=5), numbers((5,), seed=6)
    of = {n: layouts(grid.axes, n, partial=False) for n in (1, 2, 3, 4)}
    for t in range(4):
        pick = {n: of[n][(37 * t + 11 * n) % len(of[n])] for n in of}
        x, y, s = placed(a, grid, pick[3]), placed(w, grid, pick[2]), placed(shared, grid, of[3][(91 * t) % len(of[3])])
        same(x @ y, a @ w)
        same(x @ s, a @ shared)
        same(x.mT @ x, a.swapaxes(1, 2) @ a)
        same(placed(many, grid, pick[4]) @ y, many @ w)
        same(placed(a[0], grid, pick[2]) @ s, a[0] @ shared)
        p, q = placed(v, grid, pick[1]), placed(u, grid, of[1][(5 * t) % len(of[1])])
        same(placed(a[0], grid, pick[2]) @ p, a[0] @ v)
        same(q @ placed(a[0], grid, pick[2]), u @ a[0])
        same(p @ p, v @ v)
        same(x @ p, a @ v)
        same(p @ s, v @ shared)
        same(np.matmul(x, y), a @ w)
        same(np.dot(placed(a[0], grid, pick[2]), p), a[0] @ v)


def words_are(plan, x, w, grid, formula=None):
    with pla.ledger(grid) as book:
        y = pla.matmul(x, w, plan=plan)
    assert book.words.total() == plan.words(x.shape, w.shape, grid.sizes, grid.coords), plan
    if formula is not None:
        assert book.words.total() == formula, (plan, book.words.total(), formula)
    assert y.layout == plan.y
    return y


def explicit(sizes):
    """The algorithms as plans: 1D, 2D, 2.5D (depth on k and on the batch) and 3D, for grids with these axes."""
    none = (None,)
    if len(sizes) == 1:
        return {
            "rows": Plan(m=("a",), n=none, k=none, x=Layout("a", None), w=Layout("a", None), y=Layout("a", None)),
            "columns": Plan(m=none, n=("a",), k=none, x=Layout("a", None), w=Layout(None, "a"), y=Layout(None, "a")),
            "inner": Plan(m=none, n=none, k=("a",), x=Layout(None, "a"), w=Layout("a", None), y=Layout("a", None)),
            "inner, left partial": Plan(
                m=none, n=none, k=("a",), x=Layout(None, "a"), w=Layout("a", None), y=Layout(None, None, partial="a")
            ),
        }
    if len(sizes) == 2:
        return {"2d": Plan(m=("a",), n=("b",), k=none, x=Layout("a", "b"), w=Layout("a", "b"), y=Layout("a", "b"))}
    return {
        "2.5d, depth on k": Plan(
            m=("b",),
            n=("c",),
            k=("a",),
            x=Layout("b", ("a", "c")),
            w=Layout(("a", "b"), "c"),
            y=Layout("b", ("c", "a")),
        ),
        "2.5d, depth on the batch": Plan(
            m=(("a", "b"),), n=("c",), k=none, x=Layout(("a", "b"), "c"), w=Layout("b", "c"), y=Layout(("a", "b"), "c")
        ),
        "3d": Plan(
            m=("a",),
            n=("b",),
            k=("c",),
            x=Layout(("a", "b"), "c"),
            w=Layout(("c", "a"), "b"),
            y=Layout("a", ("b", "c")),
        ),
    }


def test_explicit_plans_move_the_words_of_the_formula(grid):
    sizes = grid.sizes
    for name, plan in explicit(sizes).items():
        m, k, n = 24, 48, 72
        pm, pn, pk = (int(np.prod([sizes[a] for cut in g for a in cut])) for g in (plan.m, plan.n, plan.k))
        formula = (
            m * k * (pn - 1) // (pm * pk * pn) + k * n * (pm - 1) // (pk * pn * pm) + m * n * (pk - 1) // (pm * pn * pk)
        )
        if "batch" in name:  # w is held once in every layer, and gathered over the rows of its own
            formula = m * k * (pn - 1) // (pm * pn) + k * n * (sizes["b"] - 1) // (sizes["b"] * pn)
        if "partial" in name:
            formula = 0
        for shape, expected in (((m, k, n), formula), ((7, 5, 11), None), ((1, 9, 2), None), ((3, 0, 4), None)):
            a, b = numbers(shape[:2], seed=1), numbers(shape[1:], seed=2)
            y = words_are(plan, placed(a, grid, plan.x), placed(b, grid, plan.w), grid, expected)
            same(y, a @ b)
            same(pla.matmul(placed(a, grid, plan.x), placed(b, grid, plan.w), plan=plan), a @ b)


def test_random_plans_move_the_words_they_say(grid):
    axes = grid.axes
    for t in range(25):
        rng = np.random.default_rng(t)
        choice = rng.integers(0, 4, len(axes))  # m, n, k or none
        at = {g: [a for a, c in zip(axes, choice, strict=True) if "mnk"[c : c + 1] == g] for g in "mnk"}
        every = layouts(axes, 2, partial=False)
        x, w, y = (every[i] for i in rng.integers(0, len(every), 3))
        plan = Plan(m=(at["m"],), n=(at["n"],), k=(at["k"],), x=x, w=w, y=y)
        a, b = numbers((6, 5), seed=t), numbers((5, 7), seed=t + 1)
        same(words_are(plan, turned(a, grid, x, t % 2), turned(b, grid, w, t % 3 == 0), grid), a @ b)


def test_operands_that_do_not_rest_as_the_plan_says(make_grid, world):
    grid = make_grid({"a": world.size})
    plan = explicit(grid.sizes)["rows"]
    x, w = pla.zeros((4, 5), grid, Layout("a", None)), pla.zeros((5, 6), grid, Layout("a", None))
    with pytest.raises(ValueError, match=r"contracted dims \(5,\) and \(4,\)"):
        pla.matmul(x, x, plan=plan)
    with pytest.raises(PlanError, match="rests unsummed"):
        Plan(m=("a",), n=(None,), k=(None,), x=Layout(None, None, partial="a"), w=plan.w, y=plan.y)
    if world.size > 1:
        with pytest.raises(
            LayoutError,
            match=r"matmul: w has Layout\(None, 'a'\), the plan takes Layout\('a', None\); mend it by \.redistribute",
        ):
            pla.matmul(x, w.redistribute(Layout(None, "a")), plan=plan)
