"""The assertion that a result equals the serial one finds what is wrong on any rank, and raises it on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.testing import assert_equal_to_serial, once
from tests.cases import layouts, numbers, placed, terms
from tests.conftest import SIZE


def test_equal_results_pass_in_every_layout(grid: Any) -> None:
    A = numbers((5, 3), np.float64)
    found = layouts(grid.axes, 2)
    for layout in found[:: max(1, len(found) // 12)]:
        got = terms(A, grid, layout) if layout.partial else placed(A, grid, layout)
        assert_equal_to_serial(got, A, 0)
        assert_equal_to_serial({"x": [pla.Tensor(got), 2.5], "n": (A,)}, {"x": (A, 2.5), "n": [A]})


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.int64, np.bool_])
def test_dtypes(make_grid: Callable[..., Any], dtype: Any) -> None:
    grid = make_grid({"a": SIZE})
    A = numbers((7, 2), dtype)
    got = pla.distribute(A, grid, pla.Layout("a", None))
    assert_equal_to_serial(got, A)
    wide = np.dtype(np.clongdouble)
    refused(got, A.astype(wide), f"the result has the dtype {np.dtype(dtype)}, and the serial one {wide}")
    other = A.copy()
    other[3, 1] = not other[3, 1] if dtype is np.bool_ else other[3, 1] + 1
    refused(got, other, r"at index \(3, 1\)")


def refused(got: Any, expected: Any, told: str, tolerance: float = 1e-12, **options: Any) -> None:
    with pytest.raises(AssertionError, match=told):
        assert_equal_to_serial(got, expected, tolerance, **options)


@pytest.mark.core
def test_one_wrong_element_on_one_rank_is_found_on_all(grid: Any) -> None:
    A = np.random.default_rng(3).normal(size=(4 * SIZE, 3))
    last = SIZE - 1
    for layout in (pla.Layout(grid.axes, None), pla.Layout(None, None)):
        got = pla.distribute(A, grid, layout)
        if grid.rank == last:
            got.block[-1, 2] += 1e-9
        index = rf"the result differs by 1e-09 at index \({4 * SIZE - 1}, 2\)"
        refused(got, A, index if SIZE == 1 else f"on rank {last} of {SIZE}:\n{index}")
        assert_equal_to_serial(got, A, 1e-8) if layout.axes else None
        if SIZE > 1 and not layout.axes:
            refused(got, A, f"on rank {last} of {SIZE}:\nthe result: this rank's replica has not the bits of", 1e-8)


def test_structures_shapes_and_places_of_nan(make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"a": SIZE})
    A = numbers((6, 4))
    got = pla.distribute(A, grid, pla.Layout("a", None))
    refused({"a": got}, {"b": A}, r"the result has the keys \['a'\], and the serial one \['b'\]")
    refused([got], [A, A], "the result has 1 items")
    refused(got, A.T, r"the result has the shape \(6, 4\), and the serial one \(4, 6\)")
    refused(got, np.where(A.max() == A, np.nan, A), "instead of nan")
    hole = np.where(A.max() == A, np.nan, A)
    assert_equal_to_serial(pla.distribute(hole, grid, pla.Layout("a", None)), hole)
    if grid.rank == 0:
        got.block = got.block[:-1]
    refused(got, A, "has a block of shape")
    if SIZE > 1:
        refused(got, pla.distribute(A, grid, pla.Layout("a", None)), "should be on a grid of one rank")


def test_the_tolerance_is_relative_to_the_largest_element(make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"a": SIZE})
    small = np.linspace(0, 1e-9, 5)
    got = pla.distribute(small + 1e-18, grid, pla.Layout("a"))
    assert_equal_to_serial(got, small, 2e-9)
    refused(got, small, r"differs by 1e-18 .*tolerance 1e-12 × 1e-09")
    assert_equal_to_serial(got, small, scale=1)


def test_ranks_outside_the_grid_agree_too(make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"a": max(1, SIZE - 1)})
    A = numbers((5, 2))
    got = pla.distribute(A, grid, pla.Layout("a", None))
    assert_equal_to_serial(got, A)
    refused(got, A + 1, "the result differs by 1 at index")


def test_once_computes_on_one_rank(world: Any) -> None:
    calls: list[int] = []

    def work() -> np.ndarray:
        calls.append(world.rank)
        return np.arange(3)

    np.testing.assert_array_equal(once(work), np.arange(3))
    assert calls == ([0] if world.rank == 0 else [])
    with pytest.raises((AssertionError, ZeroDivisionError)):
        once(lambda: 1 / 0)
