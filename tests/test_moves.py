"""The steps between two layouts, found without MPI and simulated without communication."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from parlinalg.errors import LayoutError
from parlinalg.layout import Layout, coordinates, index_of
from parlinalg.moves import moves, words
from tests.cases import layouts

pytestmark = pytest.mark.serial
SIZES = {"a": 2, "b": 3}


def ops(src, dst, sizes=SIZES):
    return [(s.op, s.axes) for s in moves(src, dst, sizes)]


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        (Layout("a"), Layout("a"), []),
        (Layout(None), Layout("a"), [("slice", ("a",))]),
        (Layout("a"), Layout(None), [("all_gather", ("a",))]),
        (Layout(("a", "b")), Layout(None), [("all_gather", ("a", "b"))]),
        (Layout(("a", "b")), Layout("a"), [("all_gather", ("b",))]),
        (Layout("a", None), Layout(None, "a"), [("all_to_all", ("a",))]),
        (Layout(("a", "b")), Layout(("b", "a")), [("exchange", ("a", "b"))]),
        (Layout("a", "b"), Layout("b", "a"), [("exchange", ("a", "b"))]),
        (Layout(None, partial="a"), Layout(None), [("all_reduce", ("a",))]),
        (Layout(None, partial="a"), Layout("a"), [("reduce_scatter", ("a",))]),
        (Layout(None, partial=("a", "b")), Layout(None), [("all_reduce", ("a", "b"))]),  # one call, not two
        (Layout(None, partial=("a", "b")), Layout(("b", "a")), [("reduce_scatter", ("b", "a"))]),
        (Layout(None, None, partial="a"), Layout("a", "b"), [("slice", ("b",)), ("reduce_scatter", ("a",))]),
        (Layout(None), Layout(None, partial="a"), [("mask", ("a",))]),
        (Layout("a"), Layout(None, partial="a"), [("embed", ("a",))]),
        (Layout("a", partial="b"), Layout("b", partial="a"), [("embed", ("a",)), ("reduce_scatter", ("b",))]),
    ],
)
def test_known_moves(src, dst, steps):
    assert ops(src, dst) == steps


def test_axes_of_one_rank_move_nothing():
    assert ops(Layout("o", "a"), Layout("a", "o"), {"o": 1, "a": 2}) == [("all_to_all", ("a",))]
    assert ops(Layout("o", None), Layout(None, "o"), {"o": 1}) == []
    assert ops(Layout(None, partial="o"), Layout("o"), {"o": 1}) == []


def test_dims_must_agree():
    with pytest.raises(LayoutError, match=r"cannot redistribute Layout\('a'\) to .*: one has 1 dims, the other 2"):
        moves(Layout("a"), Layout("a", None), SIZES)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 3}, {"a": 2, "b": 1, "c": 2}], ids=str)
def test_steps_join_and_summed_moves_receive_what_is_lacking(sizes, ndim):
    every = layouts(list(sizes), ndim)
    shape = (7, 5)[:ndim]
    ones = [a for a, n in sizes.items() if n == 1]
    for src, dst in itertools.product(every, every):
        steps = moves(src, dst, sizes)
        here = src.without(ones)
        for step in steps:
            assert step.src == here, (src, dst, steps)
            here = step.dst
        assert here == dst.without(ones), (src, dst, steps)
        if src.partial or dst.partial:
            continue
        for at in coordinates(tuple(sizes), sizes):
            have, want = src.block(shape, sizes, at), dst.block(shape, sizes, at)
            lacking = math.prod(map(len, want)) - math.prod(
                len(set(h) & set(w)) for h, w in zip(have, want, strict=True)
            )
            assert words(src, dst, shape, sizes, at) == lacking, (src, dst, at)


def test_sums_are_counted_as_their_collectives():
    sizes = {"a": 4}
    for at in coordinates(("a",), sizes):
        own = len(range(10)[at["a"] :: 4])
        assert words(Layout(None, partial="a"), Layout("a"), (10,), sizes, at) == 10 - own
        assert words(Layout(None, partial="a"), Layout(None), (10,), sizes, at) == 2 * (10 - own)
        assert index_of(("a",), sizes, at) == at["a"]


def test_finding_steps_takes_no_time():
    start = time.perf_counter()
    for _ in range(2000):
        moves(Layout("a", "b"), Layout("b", "a"), SIZES)
    assert time.perf_counter() - start < 1
