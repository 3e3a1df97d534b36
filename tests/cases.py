"""Grids, layouts and arrays that tests run over, on whatever number of ranks there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from parlinalg.array import DistArray
from parlinalg.grid import Grid
from parlinalg.layout import Layout, coordinates

EVERY_SIZE = (1, 2, 3, 4, 6, 8, 12)

#: For each number of ranks grids of one, two and three axes.
GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}],
    2: [{"a": 2}, {"a": 1, "b": 2}, {"a": 2, "b": 1, "c": 1}],
    3: [{"a": 3}, {"a": 3, "b": 1}, {"a": 1, "b": 3, "c": 1}],
    4: [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 1, "c": 2}],
    6: [{"a": 6}, {"a": 2, "b": 3}, {"a": 3, "b": 1, "c": 2}],
    8: [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}],
    12: [{"a": 12}, {"a": 4, "b": 3}, {"a": 2, "b": 3, "c": 2}],
}

REAL = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
COMPLEX = [np.dtype(t) for t in (np.complex64, np.complex128)]
INTEGERS = [np.dtype(t) for t in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)]
DTYPES = [*REAL, *COMPLEX, *INTEGERS, np.dtype(np.bool_)]


def grids(size: int) -> list[dict[str, int]]:
    """Grids over so many ranks; some leave ranks idle where the number has no list of its own."""
    return GRIDS.get(size, [{"a": size}, {"a": size // 2, "b": 2}])


def layouts(axes: Sequence[str], ndim: int, partial: bool = True) -> list[Layout]:
    """All layouts of an array of `ndim` dims: every axis on each dim, in every order, partial, or on none."""
    found = []
    places = ndim + 1 + partial
    for choice in itertools.product(range(places), repeat=len(axes)):
        groups = [[a for a, at in zip(axes, choice, strict=True) if at == d] for d in range(ndim)]
        terms = [a for a, at in zip(axes, choice, strict=True) if partial and at == ndim]
        for orders in itertools.product(*(list(itertools.permutations(g)) for g in groups)):
            found.append(Layout(*orders, partial=terms))
    return found


def numbers(shape: Sequence[int], dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """Small whole numbers, whose sums and products every dtype holds exactly enough to compare."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    low = 0 if dtype.kind == "u" else -4
    values = rng.integers(low, 5, shape)
    if dtype.kind == "c":
        return (values + 1j * rng.integers(-4, 5, shape)).astype(dtype)
    return np.asarray(values).astype(dtype)


def terms(array: np.ndarray, grid: Grid, layout: Layout, seed: int = 0) -> DistArray:
    """The array in `layout`, with terms of their own on every rank along the partial axes, not zeros."""
    sizes, partial = grid.sizes, layout.partial
    summed = layout.with_partial(())
    part = tuple(slice(r.start, r.stop) for r in grid.block(summed, array.shape))
    ranks = math.prod(sizes[a] for a in partial)
    others = {i: numbers(array.shape, array.dtype, seed + 1 + i) for i in range(1, ranks)}
    mine = 0
    for axis in partial:
        mine = mine * sizes[axis] + grid.coords.get(axis, 0)
    values = others[mine] if mine else array - sum(others.values())
    block = grid.backend.from_host(np.array(values[part], dtype=array.dtype, order="C"))
    return DistArray(block, array.shape, layout, grid)


def held(array: DistArray) -> np.ndarray:
    """This rank's block as a host array."""
    return array.grid.backend.to_host(array.block)


def assembled(array: DistArray) -> np.ndarray:
    """The global array put together from every rank's block by this test code alone; replicas must be equal."""
    grid, layout = array.grid, array.layout
    block = held(array)
    wide = block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)
    lists = grid.world.share([wide.real.tolist(), wide.imag.tolist()])
    seen: dict[tuple[int, ...], np.ndarray] = {}
    total = np.zeros(array.shape, wide.dtype)
    for rank, at in enumerate(coordinates(grid.axes, grid.sizes)):
        shape = layout.block_shape(array.shape, grid.sizes, at)
        real, imag = (np.array(part, float).reshape(shape) for part in lists[rank])
        theirs = real + 1j * imag if wide.dtype.kind == "c" else real
        key = tuple(at[a] for a in layout.axes)
        if key in seen:
            np.testing.assert_array_equal(theirs, seen[key], f"replicas differ on rank {rank}: {layout!r}")
            continue
        seen[key] = theirs
        rect = layout.block(array.shape, grid.sizes, at)
        total[tuple(slice(r.start, r.stop) for r in rect)] += theirs
    return total


def check(array: DistArray, expected: np.ndarray) -> None:
    """The array's block on this rank is the one that its layout gives of `expected`, bit for bit (partial: the sum)."""
    grid, layout = array.grid, array.layout
    assert array.shape == expected.shape, (array.shape, expected.shape)
    assert tuple(array.block.shape) == grid.block_shape(layout, array.shape), (array.block.shape, layout, array.shape)
    if layout.partial:
        np.testing.assert_array_equal(assembled(array), expected)
    elif grid.inside:
        part = tuple(slice(r.start, r.stop) for r in grid.block(layout, array.shape))
        np.testing.assert_array_equal(held(array), expected[part])


def lacks(src: Layout, dst: Layout, shape: tuple[int, ...], grid: Grid) -> int:
    """The elements of this rank's target block that its source block does not hold."""
    have, want = grid.block(src, shape), grid.block(dst, shape)
    both = math.prod(len(set(h) & set(w)) for h, w in zip(have, want, strict=True))
    return math.prod(map(len, want)) - both


def placed(array: np.ndarray, grid: Grid, layout: Layout) -> DistArray:
    """What `distribute` makes, without its agreement of all ranks."""
    part = tuple(slice(r.start, r.stop) for r in grid.block(layout, array.shape))
    return DistArray(grid.backend.from_host(np.array(array[part], order="C")), array.shape, layout, grid)


def alike(array: DistArray, expected: np.ndarray, tol: float = 0.0) -> None:
    """As `same`, for this rank's block alone."""
    part = tuple(slice(r.start, r.stop) for r in array.grid.block(array.layout, expected.shape))
    assert array.shape == expected.shape, (array.shape, expected.shape)
    assert array.dtype == expected.dtype, (array.dtype, expected.dtype)
    close(held(array), expected[part], tol)


def same(array: DistArray, expected: Any, tol: float = 0.0) -> None:
    """Shape, dtype and values are those of NumPy's answer; `tol` is relative to the largest element."""
    expected = np.asarray(expected)
    got = array.gather()
    assert isinstance(got, np.ndarray)
    assert array.shape == got.shape == expected.shape, (array.shape, got.shape, expected.shape)
    assert array.dtype == got.dtype == expected.dtype, (array.dtype, got.dtype, expected.dtype)
    assert tuple(array.block.shape) == array.grid.block_shape(array.layout, array.shape) or not expected.ndim
    close(got, expected, tol)


def close(got: np.ndarray, expected: np.ndarray, tol: float) -> None:
    """Equal, or with `tol` equal to that much of the largest element."""
    if not tol:
        np.testing.assert_array_equal(got, expected)
        return
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), expected.astype(wide)
    finite = np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite])
    scale = np.abs(b[finite]).max(initial=1.0)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    assert error <= tol * scale, (error, tol, scale)


def eps(dtype: Any) -> float:
    """The spacing of a dtype's numbers at one; 0 for integers."""
    dtype = np.dtype(dtype)
    return float(ml_dtypes.finfo(dtype).eps) if dtype.kind in "fcV" else 0.0


def pairs(first: Sequence[Any], second: Sequence[Any], most: int | None, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """All pairs, or a seeded sample of at most so many, the same on all ranks."""
    every = list(itertools.product(first, second))
    if most is not None and len(every) > most:
        every = [every[i] for i in np.random.default_rng(seed).choice(len(every), most, replace=False)]
    yield from every
