"""Sorts, sets, scans and searches: what depends on the values."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array import sorting
from parlinalg.layout import Layout
from tests.cases import grids, layouts, numbers, pairs, same


@pytest.fixture(scope="module", params=[0, 1], ids=["one axis", "two axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 4), (9,), (0, 3), (1, 5, 1)], ids=str)
def test_sorts_and_searches_in_any_layout(grid, shape):
    """Lines of few elements in several dims too, of which none is long enough for all axes."""
    values = numbers(shape, seed=2)
    for layout, _ in pairs(layouts(grid.axes, len(shape)), [0], 12, seed=len(shape)):
        x = pla.distribute(values, grid, layout)
        for axis in range(len(shape)):
            same(np.sort(x, axis=axis), np.sort(values, axis=axis))
            same(np.argsort(x, axis=axis, kind="stable"), np.argsort(values, axis=axis, kind="stable"))
            same(np.cumsum(x, axis=axis), np.cumsum(values, axis=axis))
            if values.size:
                same(np.argmax(x, axis=axis), np.argmax(values, axis=axis))
        if values.size:
            same(np.argmin(x), np.asarray(np.argmin(values)))
        for got, want in zip(np.unique(x, True, True, True), np.unique(values, True, True, True), strict=True):
            same(got, want)


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_grid_take_part(make_grid, world):
    grid = make_grid({"a": world.size - 1})
    x = pla.distribute(numbers((5,)), grid, Layout("a"))
    same(np.argmax(x), np.asarray(np.argmax(numbers((5,)))))
    same(np.argmax(x, keepdims=True), np.argmax(numbers((5,)), keepdims=True))
    same(np.reshape(x[:1], ()), numbers((5,))[0])


def test_what_changes_nothing_is_a_copy_still(grid):
    values = numbers((4,))
    x = pla.distribute(values, grid, Layout(grid.axes))
    calls = (lambda a: np.pad(a, 0, "edge"), lambda a: np.pad(a, 0), lambda a: np.repeat(a, 1), lambda a: np.roll(a, 0),
             lambda a: np.tile(a, 1), lambda a: np.diff(a, 0), lambda a: np.clip(a, None, 99))  # fmt: skip
    for call in calls:
        y = call(x)
        y += 1
        same(x, values)
    same(np.repeat(x[:0], []), values[:0])


KINDS = [
    "random", "few values", "sorted", "signed zeros", "some signed zeros", "not numbers", "few not numbers", "integers",
    "short integers", "steps", "halves",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_long_lines(grid, kind):
    """Long enough for samples to tell which keys go where, and for lines to be taken together."""
    n, rng = 8000 * grid.world.size, np.random.default_rng(7)
    values = {
        "random": lambda: rng.random(n),
        "few values": lambda: rng.integers(0, 3, n).astype(float),
        "sorted": lambda: np.arange(n)[::-1] / 7,
        "signed zeros": lambda: rng.choice([0.0, -0.0, 1.0, -1.0, 0.5], n),
        "some signed zeros": lambda: np.where(rng.random(n) < 0.05, rng.choice([0.0, -0.0], n), rng.normal(size=n)),
        "few not numbers": lambda: np.where(rng.random(n) < 1e-3, np.nan, rng.random(n)),
        "short integers": lambda: rng.integers(-100, 100, n).astype(np.int8),
        "halves": lambda: rng.normal(size=n).astype(np.float16),
        "not numbers": lambda: np.where(rng.random(n) < 0.3, np.nan, rng.random(n)),
        "integers": lambda: rng.integers(-(2**62), 2**62, n),
        "steps": lambda: np.tile(np.arange(16.0), n // 16) + np.where(np.arange(n) % 16 == 3, rng.random(n), 0),
    }[kind]()
    x = pla.distribute(values, grid, Layout(grid.axes))
    want = np.sort(values, kind="stable")
    got = pla.sort(x)
    same(got, want)
    same(np.signbit(got), np.signbit(want))
    order = np.argsort(values, kind="stable")
    same(pla.argsort(x), order)
    if "not numbers" not in kind:
        same(pla.sort(x, descending=True), want[::-1])
    rows = values.reshape(-1, 8)
    y = pla.distribute(rows, grid, Layout(grid.axes, None))
    for axis in (0, 1):
        same(np.argmin(y, axis=axis), np.argmin(rows, axis=axis))
        same(np.argmax(y.T, axis=axis), np.argmax(rows.T, axis=axis))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["random", "few not numbers", "integers"])
def test_few_ranks_sort_keys_once(make_grid, world, backend, monkeypatch, kind):
    """Samples suffice to part them; the other way, which sorts them before and after, is not taken."""
    n, rng = 100_000 * world.size, np.random.default_rng(7)
    values = rng.integers(-(2**62), 2**62, n) if kind == "integers" else rng.random(n)
    if kind == "few not numbers":
        values[rng.integers(0, n, 9)] = np.nan
    if backend == "numpy" and world.size <= 5:
        monkeypatch.setattr(sorting, "_sort", None)
    same(pla.sort(pla.distribute(values, make_grid({"a": world.size}), Layout("a"))), np.sort(values))


def test_not_a_number_is_one_value_for_numpy_and_many_for_the_standard(grid):
    values = np.array([np.nan, 2.0, np.nan, 1.0, 2.0, np.nan, np.nan])
    for given in (values, values + 0j, values[:3], values[[0, 2]]):
        x = pla.distribute(given, grid, Layout(grid.axes))
        for got, want in zip(np.unique(x, True, True, True), np.unique(given, True, True, True), strict=True):
            same(got, want)
        same(np.unique(x, equal_nan=False), np.unique(given, equal_nan=False))
        same(pla.unique_counts(x).counts, np.unique(given, return_counts=True, equal_nan=False)[1])
        for function in (np.union1d, np.setdiff1d, np.intersect1d, np.setxor1d):
            same(function(x, x[:2]), function(given, given[:2]))
