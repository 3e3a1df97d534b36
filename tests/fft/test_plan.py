"""The plans of Fourier transforms: the fewest bytes of all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlinalg.fft import plan
from parlinalg.fft.plan import Exchange, FourStep, Line, Local, Problem, Transpose, make_plan, spans
from parlinalg.layout import Layout, coordinates
from parlinalg.moves import words
from tests.cases import layouts

pytestmark = pytest.mark.serial


def problem(shape, dims, kind="c2c", points=None):
    """The transform of these dims of an array of complex128, or of float64."""
    lines = []
    for i, d in enumerate(dims):
        n = points[i] if points else shape[d]
        half = kind != "c2c" and d == dims[-1]
        lines.append(Line(d, n, min(shape[d], n // 2 + 1 if half and kind == "c2r" else n),
                          n // 2 + 1 if half and kind == "r2c" else n))  # fmt: skip
    return Problem(shape, tuple(lines), kind, (8 if kind == "r2c" else 16, 16, 8 if kind == "c2r" else 16))


def cost(found):
    sizes = dict(found.sizes)
    return sum(e.itemsize * int(e.words(sizes).max()) for step in found.steps for e in step.exchanges)


@given(st.integers(0, 10**6))
def test_no_way_moves_fewer_bytes(monkeypatch_module, seed):
    """The search finds what a search of all ways in the order of their bytes finds."""
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 4))
    sizes = [{"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 4}, {"a": 2, "b": 2, "c": 2}][seed % 4]
    shape = tuple(int(n) for n in rng.integers(1, 13, ndim))
    dims = [int(d) for d in rng.permutation(ndim)[: rng.integers(1, ndim + 1)]]
    every = layouts(tuple(sizes), ndim, partial=False)
    src, dst = (every[rng.integers(len(every))] for _ in range(2))
    given_problem = problem(shape, dims)
    for goal in (src, dst, None):
        plan._search.cache_clear()
        found = make_plan(given_problem, src, goal, sizes)
        with monkeypatch_module.context() as patch:
            patch.setattr(plan, "_still", lambda *_: 0)
            plan._search.cache_clear()
            best = make_plan(given_problem, src, goal, sizes)
        assert cost(found) == cost(best), (found.steps, best.steps)
    plan._search.cache_clear()


@pytest.fixture(scope="module")
def monkeypatch_module():
    return pytest.MonkeyPatch()


def test_words_are_those_of_a_redistribution():
    sizes, shape = {"a": 2, "b": 3}, (5, 7)
    every = layouts(tuple(sizes), 2, partial=False)
    for src in every:
        for dst in every:
            counted = Exchange(spans(src, shape), spans(dst, shape), 8).words(sizes)
            for at in coordinates(("a", "b"), sizes):
                assert counted[at["a"], at["b"]] == words(src, dst, shape, sizes, at)


def kinds(found):
    return [type(step) for step in found.steps]


def test_a_cube():
    """One transpose there and one back, also where two axes cut it; step by step where a dim is too short for both."""
    n, sizes = 16, {"r": 4, "c": 4}
    found = make_plan(problem((n,) * 3, (0, 1, 2)), Layout(None, "r", "c"), Layout(None, "r", "c"), sizes)
    assert kinds(found) == [Local, Transpose, Local, Transpose]
    assert found.steps[1].dst == Layout(("r", "c"), None, None)
    assert found.words({"r": 1, "c": 2}) == 2 * (n**3 // 16 * 15 // 16)
    found = make_plan(problem((8,) * 3, (0, 1, 2)), Layout(None, "r", "c"), Layout(None, "r", "c"), sizes)
    assert kinds(found) == [Local, Transpose, Local, Transpose, Local, Transpose]
    found = make_plan(problem((n,) * 3, (0, 1, 2)), Layout(None, "r", "c"), None, sizes)
    assert kinds(found) == [Local, Transpose, Local]
    assert found.layout == Layout(("r", "c"), None, None)


def test_one_dim_of_many_moves_nothing_or_goes_to_another():
    sizes = {"a": 4}
    batch = problem((64, 100), (1,))
    assert kinds(make_plan(batch, Layout("a", None), Layout("a", None), sizes)) == [Local]
    assert kinds(make_plan(batch, Layout(None, "a"), Layout(None, "a"), sizes)) == [Transpose, Local, Transpose]
    assert make_plan(batch, Layout(None, "a"), None, sizes).layout == Layout("a", None)


def test_a_long_line():
    """Three transposes of n/p (1 - 1/p) words where that is less than to gather it, and n has factors."""
    for ranks, n, kind in ((2, 4096, Transpose), (4, 4096, FourStep), (16, 4096, FourStep), (4, 4099, Transpose)):
        found = make_plan(problem((n,), (0,)), Layout("a"), Layout("a"), {"a": ranks})
        assert kinds(found)[0] is kind
        expected = n * (ranks - 1) // ranks if kind is Transpose else 3 * (n // ranks) * (ranks - 1) // ranks
        if n % ranks == 0:
            assert found.words({"a": 0}) == expected
    half = make_plan(problem((4096,), (0,), "c2r", (4096,)), Layout("a"), Layout("a"), {"a": 4})
    whole = make_plan(problem((4096,), (0,)), Layout("a"), Layout("a"), {"a": 4})
    assert cost(half) < cost(whole)


def test_the_real_line_is_first_or_last():
    sizes = {"a": 4}
    real = make_plan(problem((8, 8, 8), (0, 1, 2), "r2c"), Layout(None, None, "a"), Layout(None, None, "a"), sizes)
    first = next(step for step in real.steps if isinstance(step, Local))
    assert first.real
    assert first.lines[-1].dim == 2
    back = make_plan(problem((8, 8, 5), (0, 1, 2), "c2r", (8, 8, 8)), Layout(None, None, "a"), None, sizes)
    assert [s.real for s in back.steps if isinstance(s, Local)][-1]
