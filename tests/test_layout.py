"""Layouts as data: balanced pieces, cuts of cuts, and sentences for what does not fit."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlinalg.errors import LayoutError
from parlinalg.layout import (
    Layout,
    as_cut,
    coordinates,
    cut_lengths,
    index_of,
    piece,
    pieces,
    span,
    span_of,
)

pytestmark = pytest.mark.serial
SIZES = {"a": 2, "b": 3, "c": 2}


@given(st.integers(0, 60), st.integers(1, 20))
def test_pieces_are_balanced_and_cover(n, parts):
    lengths = pieces(n, parts)
    assert sum(lengths) == n
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert [i for p in range(parts) for i in piece(n, parts, p)] == list(range(n))


@given(st.integers(0, 40), st.permutations(["a", "b", "c"]), st.integers(0, 3))
def test_cuts_of_cuts_cover_in_row_major_order(n, order, depth):
    cut = tuple(order[:depth])
    spans = [span(n, cut, SIZES, at) for at in coordinates(cut, SIZES)]
    assert [i for s in spans for i in s] == list(range(n))
    assert [len(s) for s in spans] == cut_lengths(n, cut, SIZES)
    assert [index_of(cut, SIZES, at) for at in coordinates(cut, SIZES)] == list(range(span_of(cut, SIZES)))


def test_outer_pieces_are_cut_again():
    assert cut_lengths(5, ("a", "c"), SIZES) == [2, 1, 1, 1]
    assert cut_lengths(7, ("b", "a"), SIZES) == [2, 1, 1, 1, 1, 1]
    assert cut_lengths(7, ("a", "b"), SIZES) == [2, 1, 1, 1, 1, 1]
    assert cut_lengths(0, ("a", "b"), SIZES) == [0] * 6


def test_layouts_are_values():
    layout = Layout("r", None, ["d", "c"], partial="k")
    assert layout == Layout(("r",), (), ("d", "c"), partial=("k",))
    assert hash(layout) == hash(Layout("r", None, ("d", "c"), partial=["k"]))
    assert repr(layout) == "Layout('r', None, ('d', 'c'), partial='k')"
    assert eval(repr(layout)) == layout
    assert Layout(partial=("b", "a")) == Layout(partial=("a", "b"))
    assert Layout(("a", "b")) != Layout(("b", "a"))
    with pytest.raises(AttributeError):
        layout.dims = ()


def test_layouts_travel_between_processes():
    """A pickled layout is found among others in a process whose strings have other hashes."""
    layout = Layout("r", None, ("d", "c"), partial="k")
    code = "import pickle, sys; from parlinalg.layout import Layout; found = pickle.load(sys.stdin.buffer); "
    code += "assert found in {Layout('r', None, ('d', 'c'), partial='k')}, hash(found)"
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code], input=pickle.dumps(layout), env=env, check=True, timeout=60)


def test_derived_layouts():
    layout = Layout("r", None, ("d", "c"), partial="k")
    assert Layout(("d", "c"), None, "r", partial="k") == layout.T
    assert layout.permuted((1, 2, 0)) == Layout(None, ("d", "c"), "r", partial="k")
    assert layout.with_dim(-1, None) == Layout("r", None, None, partial="k")
    assert layout.with_partial(()) == Layout("r", None, ("d", "c"))
    assert layout.without(["d", "k"]) == Layout("r", None, "c")
    assert layout.renamed({"c": "d", "d": "c"}) == Layout("r", None, ("c", "d"), partial="k")
    assert (layout.ndim, layout.cut_axes, layout.axes) == (3, ("r", "d", "c"), ("r", "d", "c", "k"))
    assert (layout.where("c"), layout.where("k")) == (2, None)
    assert Layout.replicated(2) == Layout(None, None)
    assert as_cut("") == as_cut(None) == ()


def test_blocks_are_the_spans_of_the_dims():
    layout = Layout("a", ("c", "b"))
    at = {"a": 1, "b": 2, "c": 0}
    assert layout.block((5, 7), SIZES, at) == (range(3, 5), range(3, 4))
    assert layout.block_shape((5, 7), SIZES, at) == (2, 1)
    total = sum(math.prod(layout.block_shape((5, 7), SIZES, at)) for at in coordinates(("a", "b", "c"), SIZES))
    assert total == 35


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Layout("a", "a"), r"Layout\('a', 'a'\) names axis 'a' twice; an axis cuts at most one dim"),
        (lambda: Layout("a", partial="a"), "names axis 'a' twice.* and is then not partial"),
        (lambda: Layout(("a", 3)), "an axis of a layout is a non-empty name, not 3"),
        (lambda: Layout("a").check((2, 3), SIZES), r"describes 1 dims, but the array has shape \(2, 3\)"),
        (lambda: Layout("x").check((2,), SIZES), "names axis 'x', but the grid has the axes .*'a': 2"),
    ],
)
def test_wrong_layouts_say_what_is_wrong(make, sentence):
    with pytest.raises(LayoutError, match=sentence):
        make()
