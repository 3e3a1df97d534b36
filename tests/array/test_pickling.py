"""Pickles, copies, format strings and iteration of distributed arrays."""

from __future__ import annotations

import copy
import pickle

import pytest

import parlinalg as pla
from parlinalg.array import pickling
from parlinalg.errors import GridError
from parlinalg.layout import Layout
from tests.cases import DTYPES, grids, layouts, numbers, pairs, same, terms


@pytest.mark.core
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_array_returns_to_its_grid(make_grid, world, which):
    grid = make_grid(grids(world.size)[which])
    for shape in ((5, 4), (1, 7), (0, 3), (3,), ()):
        for layout, dtype in pairs(layouts(grid.axes, len(shape)), DTYPES, 2, seed=len(shape)):
            values = numbers(shape, dtype)
            x = terms(values, grid, layout)
            for protocol in (2, pickle.HIGHEST_PROTOCOL):
                y = pickle.loads(pickle.dumps(x, protocol))
                assert (y.grid, y.layout, y.dtype) == (grid, layout, x.dtype)
                same(y, values)
            y += y
            same(x, values)
            for y in (copy.copy(x), copy.deepcopy(x), copy.deepcopy({"x": [x]})["x"][0]):
                assert y is not x
                assert y.grid is grid
                same(y, values)
    x = pla.distribute(numbers((4, 3)), grid, Layout(grid.axes, None)).T
    same(pickle.loads(pickle.dumps({"a": x, "b": [x]}))["b"][0], numbers((4, 3)).T)


def test_an_array_of_another_run_comes_to_a_grid_of_its_description(make_grid, world, monkeypatch):
    default = pla.default_grid()
    for grid in (default, make_grid({"a": world.size, "b": 1}), make_grid({"a": max(1, world.size - 1)})):
        values = numbers((5, 4))
        x = pla.distribute(values, grid, Layout(grid.axes, None))
        text = pickle.dumps(x)
        monkeypatch.setattr(pickling, "_known", {})
        first, second = pickle.loads(text), pickle.loads(text)
        assert (first.grid is default) == (grid is default)
        assert first.grid is second.grid
        assert (first.grid.sizes, first.layout) == (grid.sizes, x.layout)
        same(first + second, 2 * values)
        if first.grid is not default:
            first.grid.close()


def test_other_ranks_are_refused(make_grid, world, monkeypatch):
    grid = make_grid({"a": world.size})
    x = pla.distribute(numbers((5,)), grid, Layout("a"))
    function, arguments = x.__reduce__()
    monkeypatch.setattr(pickling, "_known", {})
    name, (sizes, _, backend), *rest = arguments
    with pytest.raises(GridError, match=rf"pickled on 7 ranks, on a grid .*; there are {world.size}: read it on as"):
        function(name, (sizes, 7, backend), *rest)
    if world.size > 1:
        monkeypatch.setattr(pickling, "_known", {name: grid})
        with pytest.raises(GridError, match="was written by rank 0; every rank reads its own"):
            function(name, (sizes, world.size, backend), 0, *rest[1:])


def test_formats(make_grid, world):
    grid = make_grid({"a": world.size})
    x = pla.distribute(numbers((4, 3)) / 3, grid, Layout("a", None))
    total = x.sum()
    assert f"{total:.3f}" == f"{total.item():.3f}"
    assert f"{x.max():e} {x.argmax():5d}" == f"{x.max().item():e} {x.argmax().item():5d}"
    assert f"{x}" == str(x)
    with pytest.raises(TypeError, match=r"the format '\.2f' is for numbers; this array has shape \(4, 3\)"):
        f"{x:.2f}"
    assert len(x) == 4
    for row, want in zip(x, numbers((4, 3)) / 3, strict=True):
        same(row, want)
    assert [float(value) for value in x[0]] == (numbers((4, 3)) / 3)[0].tolist()
    assert x.item(5) == x.item(1, 2) == x.item((1, 2)) == (numbers((4, 3)) / 3)[1, 2]
    for wrong, kind in ((12, IndexError), ((1, 2, 3), ValueError)):
        with pytest.raises(kind):
            x.item(wrong)
