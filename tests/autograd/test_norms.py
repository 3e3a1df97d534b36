"""Norms, gated units and patches: rows whole and cut, uneven and empty."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError
from parlinalg.autograd import ops
from parlinalg.layout import pieces as balanced
from tests.autograd.cases import agree, close, numbers, tensor, value_and_gradients

X, W, B = numbers(5, 3, 7), 1 + numbers(7, seed=1) / 4, numbers(7, seed=2)
LAYOUTS = [
    Layout("a", "b", None), Layout("b", None, ("a", "c")), Layout(None, "a", "b"), Layout(("b", "a"), None, "c"),
]  # fmt: skip


def known_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, eps: float) -> np.ndarray:
    c = x if b is None else x - x.mean(-1, keepdims=True)
    y = c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * w
    return y if b is None else y + b


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_norms(layout: Layout, grid: Grid, serial: Grid) -> None:
    last, numeric = Layout(layout.dims[-1]), layout is LAYOUTS[1]
    agree(
        lambda x, w, b: ops.layer_norm(x, w, b, 0.1), [X, W, B], [layout, last, last], grid, serial,
        expected=known_norm(X, W, B, 0.1), numeric=numeric,
    )  # fmt: skip
    agree(
        lambda x, w: ops.rms_norm(x, w, 0.1), [X, W], [layout, last], grid, serial,
        expected=known_norm(X, W, None, 0.1), numeric=numeric,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 1)], ids=str)
def test_norms_of_empty_blocks(shape: tuple[int, int], grid: Grid, serial: Grid) -> None:
    w = numbers(shape[1])
    for layout in (Layout("a", "b"), Layout("b", "a")):
        last = Layout(layout.dims[-1])
        agree(ops.layer_norm, [numbers(*shape), w, w], [layout, last, last], grid, serial)
        agree(ops.rms_norm, [numbers(*shape), w], [layout, last], grid, serial)


def test_norms_of_many_rows_far_from_zero(grid: Grid, serial: Grid) -> None:
    """Several tiles; and a mean that would drown the squares is taken off first."""
    x = numbers(300, 200)
    layouts = [Layout("a", "b"), Layout("b"), Layout("b")]
    w, b = numbers(200, seed=1), numbers(200, seed=2)
    agree(ops.layer_norm, [x, w, b], layouts, grid, serial, expected=known_norm(x, w, b, 1e-5))
    near = value_and_gradients(ops.layer_norm, [x, w, b], layouts, grid, np.float32)[0]
    far = value_and_gradients(ops.layer_norm, [np.round(x * 64) / 64 + 2**14, w, b], layouts, grid, np.float32)[0]
    assert np.abs(far - near).max() <= 0.1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_norms_of_short_floats_are_rounded_once(dtype: type, grid: Grid) -> None:
    layouts = [Layout("a", "b"), Layout("b"), Layout("b")]
    arrays = [a.astype(dtype).astype(np.float64) for a in (numbers(6, 50), numbers(50, seed=1), numbers(50, seed=2))]
    for op, given in ((ops.layer_norm, 3), (ops.rms_norm, 2)):
        wide = value_and_gradients(op, arrays[:given], layouts[:given], grid)
        short = value_and_gradients(op, arrays[:given], layouts[:given], grid, dtype)
        eps = float(ml_dtypes.finfo(dtype).eps)
        for mine, right in zip(short, wide, strict=True):
            assert mine.dtype == dtype
            close(mine.astype(np.float64), right, 4 * eps)


def test_norms_move_one_number_a_row_and_two_backward(grid: Grid) -> None:
    """All-reduces of the mean and of the centred squares; the parameters' gradients settle over the rows' axes."""
    x, w = numbers(6, 8), numbers(8)
    x_, w_ = tensor(x, grid, Layout("a", "b")), tensor(w, grid, Layout("b"), False)
    rows, (ranks, at) = len(grid.block(x_.layout, x.shape)[0]), (grid.sizes["b"], grid.coords.get("b", 0))

    def all_reduced(n: int) -> int:
        return 2 * (n - balanced(n, ranks)[at]) if ranks > 1 else 0

    with pla.ledger(grid) as book:
        y = ops.layer_norm(x_, w_, w_)
    assert book.words.total() == 2 * all_reduced(rows)
    grad = pla.ones(y.shape, grid, y.layout)
    with pla.ledger(grid) as book:
        y.backward(grad)
    assert book.words.total() == all_reduced(2 * rows)
    with pla.ledger(grid) as book:
        y = ops.rms_norm(x_, w_)
    assert book.words.total() == all_reduced(rows)
    assert book.calls.total() == (ranks > 1)


@pytest.mark.mpi(min_size=2)
def test_norms_name_the_layout_that_would_do(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    x, w = tensor(X, widest, Layout(None, None, axis)), tensor(W, widest, Layout(None))
    with pytest.raises(LayoutError, match=r"layer_norm: weight .*\.redistribute\(Layout\("):
        ops.layer_norm(x, w)
    with pytest.raises(LayoutError, match=r"rms_norm of .*not summed"):
        ops.rms_norm(tensor(X, widest, Layout(None, None, None, partial=axis)), w)
    with pytest.raises(LayoutError, match=r"swiglu.*redistribute"):
        ops.swiglu(tensor(numbers(3, 2), widest, Layout(None, axis)))


def test_misshapen_operands_are_named(widest: Grid) -> None:
    x = tensor(X, widest, Layout("a", None, None))
    with pytest.raises(ValueError, match=r"bias of shape \(5,\).*\(7,\)"):
        ops.layer_norm(x, tensor(W, widest, Layout(None)), tensor(W[:5], widest, Layout(None)))
    with pytest.raises(ValueError, match=r"\[\.\.\., 2\]"):
        ops.swiglu(x)
    with pytest.raises(ValueError, match="patches of 2 × 3"):
        ops.patches(tensor(numbers(2, 3, 4, 5), widest, Layout("a", None, None, None)), (2, 3))


def test_swiglu(grid: Grid, serial: Grid) -> None:
    x = 3 * numbers(3, 5, 2)
    silu = x[..., 0] / (1 + np.exp(-x[..., 0]))
    for layout in (Layout("a", "b", None), Layout(None, ("b", "a"), None)):
        agree(
            ops.swiglu, [x], [layout], grid, serial, expected=silu * x[..., 1], numeric=layout.dims[0] == ()
        )  # fmt: skip
    x = np.array([[1e4, 2.0], [-1e4, 3.0]], np.float32)
    close(ops.swiglu(tensor(x, grid, Layout("a", None))).gather(), np.array([2e4, 0]))
    short = ops.swiglu(tensor(x[:, ::-1].astype(np.float16), grid, Layout("a", None)))
    assert short.dtype == np.float16


def test_patches(grid: Grid, serial: Grid) -> None:
    x = numbers(5, 2, 4, 6)
    known = np.zeros((5, 1 + 4, 2 * 2 * 3))
    for n in range(4):
        i, j = divmod(n, 2)
        known[:, 1 + n] = x[:, :, 2 * i : 2 * i + 2, 3 * j : 3 * j + 3].reshape(5, -1)
    for cut in ("a", ("b", "a")):
        agree(
            lambda x: ops.patches(x, (2, 3), 1), [x], [Layout(cut, None, None, None)], grid, serial, expected=known
        )  # fmt: skip
