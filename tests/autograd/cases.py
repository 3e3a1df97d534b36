"""The one body of the tests: values and gradients on a grid equal those on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import parlinalg as pla
from parlinalg import DistArray, Grid, Layout, Tensor

#: A layout of a matrix for every way to cut it.
MATRICES = [Layout("a", "b"), Layout(("b", "a"), "c"), Layout(None, ("a", "b")), Layout(None, None)]

Function = Callable[..., Tensor]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Random numbers, the same on every rank."""
    return np.random.default_rng(seed + 7 * len(shape)).standard_normal(shape)


def tensor(array: np.ndarray, grid: Grid, layout: Layout, wants: bool = True) -> Tensor:
    return Tensor(cut(array, grid, layout), wants and array.dtype.kind not in "iub")


def cut(array: np.ndarray, grid: Grid, layout: Layout) -> DistArray:
    """As `pla.distribute` of an array that every rank has, without asking the others."""
    part = tuple(slice(r.start, r.stop) for r in grid.block(layout.with_partial(()), array.shape))
    block = grid.backend.from_host(np.array(array[part], order="C"))
    return DistArray(block, array.shape, layout.with_partial(()), grid).redistribute(layout)


def value_and_gradients(
    function: Function, arrays: Sequence[np.ndarray], layouts: Sequence[Layout], grid: Grid, dtype: Any = None
) -> list[np.ndarray]:
    """The value of the function and its gradients, all gathered, from a fixed gradient of the value."""
    inputs = [
        tensor(a if dtype is None else a.astype(dtype), grid, layout) for a, layout in zip(arrays, layouts, strict=True)
    ]
    y = function(*inputs)
    rest = y.layout.with_partial(())
    y.backward(cut(numbers(*y.shape, seed=99).astype(y.dtype), grid, rest))
    for x in inputs:
        if x.requires_grad:
            assert x.grad is not None
            assert (x.grad.layout, x.grad.dtype) == (x.layout.with_partial(()), x.dtype)
            assert x.grad.block.shape == x.block.shape
    return [y.gather(), *(x.grad.gather() for x in inputs if x.grad is not None)]


def agree(
    function: Function,
    arrays: Sequence[np.ndarray],
    layouts: Sequence[Layout],
    grid: Grid,
    serial: Grid,
    *,
    expected: np.ndarray | None = None,
    numeric: bool = False,
) -> None:
    """Hold values and gradients on `grid` against those on one rank, and both against what is known of them.

    With `numeric` the gradients are held against finite differences along two directions too.
    """
    found = value_and_gradients(function, arrays, layouts, grid)
    known = value_and_gradients(function, arrays, layouts, serial)
    assert len(found) == len(known)
    for mine, right in zip(found, known, strict=True):
        close(mine, right)
    if expected is not None:
        close(found[0], expected)
    if numeric:
        inputs = [tensor(a, grid, layout) for a, layout in zip(arrays, layouts, strict=True)]
        pla.check_gradients(function, inputs, directions=2)


def close(found: Any, right: Any, tol: float = 1e-12) -> None:
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape
    error = np.abs(found - right).max(initial=0) / max(1, np.abs(right).max(initial=0))
    assert error <= tol, f"a relative difference of {error:.3g}"


#: Axes of a grid over which the gradient of a whole weight is partial, where the rows of its products are cut so.
TERMS: tuple[tuple[str, ...], ...] = ((), ("a",), ("b",), ("a", "b"))


def term(axes: tuple[str, ...], w: Tensor, seed: int) -> Tensor:
    """A sum of products of a matrix w, whose gradient by it is partial over these axes of the grid."""
    x = numbers(7, w.shape[0], seed=seed)
    plan = pla.Plan((axes,), (None,), (None,), Layout(axes, None), Layout(None, None), Layout(axes, None))
    return pla.autograd.ops.sum(pla.autograd.ops.matmul(tensor(x, w.grid, plan.x, wants=False), w, plan))


def gradient_of_terms(shape: tuple[int, int], seeds: Sequence[int]) -> np.ndarray:
    """The gradient of the sum of such terms, by hand."""
    return np.add.outer(sum(numbers(7, shape[0], seed=s).sum(0) for s in seeds), np.zeros(shape[1]))
