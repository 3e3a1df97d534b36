"""Redistribution, reshaping, slices and reductions."""

from __future__ import annotations

from itertools import product as pairs

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError, Tensor
from parlinalg.autograd import ops
from tests.autograd.cases import MATRICES, agree, numbers, tensor

X = numbers(5, 7)
PARTIAL = [Layout(None, "b", partial="a"), Layout(None, None, partial=("a", "b"))]


def test_redistribution(grid: Grid, serial: Grid) -> None:
    for src, dst in pairs(MATRICES[:2], [*MATRICES[2:], *PARTIAL]):
        agree(lambda x, to=dst: 2 * x.redistribute(to), [X], [src], grid, serial, expected=2 * X)
    for src in PARTIAL:
        agree(lambda x: x.redistribute(MATRICES[0]) ** 2, [X], [src], grid, serial, expected=X**2, numeric=True)


@pytest.mark.parametrize("layout", MATRICES, ids=repr)
def test_sums_and_means(layout: Layout, grid: Grid, serial: Grid) -> None:
    for axis in (None, 0, 1, (0, 1)):
        agree(lambda x, at=axis: x.sum(at), [X], [layout], grid, serial, expected=X.sum(axis))
    agree(lambda x: x.mean(0, keepdims=True) * x, [X], [layout.with_dim(1, None)], grid, serial, expected=X.mean(0) * X)
    agree(lambda x: (x * x).mean(), [X], [layout], grid, serial, expected=(X * X).mean(), numeric=True)
    agree(
        lambda x: x.sum(0, partial=True).redistribute(Layout(layout.dims[1])) ** 2, [X], [layout], grid, serial,
        expected=X.sum(0) ** 2,
    )  # fmt: skip


@pytest.mark.parametrize("layout", MATRICES, ids=repr)
def test_largest_elements(layout: Layout, grid: Grid, serial: Grid) -> None:
    agree(lambda x: x.max(1), [X], [layout], grid, serial, expected=X.max(1), numeric=True)
    agree(lambda x: x.max(), [X], [layout], grid, serial, expected=X.max())
    ties = tensor(np.array([[1.0, 3, 3], [3, 0, 1], [0, 1, 2]]), grid, layout)
    ties.max().backward()
    assert ties.grad is not None
    np.testing.assert_allclose(ties.grad.gather(), (ties.gather() == 3) / 3)


def test_shapes(grid: Grid, serial: Grid) -> None:
    x = numbers(4, 6, 3)
    layout = Layout("a", None, "b")
    agree(lambda x: x.transpose(2, 0, 1) * 2, [x], [layout], grid, serial, expected=2 * x.transpose(2, 0, 1))
    agree(lambda x: x.T.redistribute(Layout("a", None, None)), [x], [layout], grid, serial, expected=x.T)
    agree(lambda x: x.mT @ x, [x], [layout], grid, serial, expected=x.swapaxes(1, 2) @ x, numeric=True)
    agree(lambda x: x.reshape(4, 2, 3, 3, 1), [x], [layout], grid, serial, expected=x.reshape(4, 2, 3, 3, 1))
    agree(lambda x: x.reshape(4, -1), [x], [Layout("a", None, None)], grid, serial, expected=x.reshape(4, -1))
    agree(lambda x: (x.astype(np.float32).astype(np.float64) - x) * 1e3, [x], [layout], grid, serial)


def test_slices(grid: Grid, serial: Grid) -> None:
    x = numbers(4, 6, 3)
    layout = Layout("a", None, "b")
    for key in (np.s_[:, 1:5:2], np.s_[:, -1], np.s_[:, None, ::-1], np.s_[..., 2, :], np.s_[:, 3:3]):
        agree(lambda x, key=key: x[key] * 2, [x], [layout], grid, serial, expected=2 * x[key])
    agree(lambda x: x[:, :3] * x[:, 3:], [x], [layout], grid, serial, expected=x[:, :3] * x[:, 3:], numeric=True)


@pytest.mark.mpi(min_size=2)
def test_shapes_that_cut_dims_do_not_allow(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    x = tensor(X, widest, Layout(None, axis))
    for bad in (lambda: x.reshape(35), lambda: x[:, 2:], lambda: x[:, 0]):
        with pytest.raises(LayoutError, match=r"redistribute.*Layout\(None, None\)"):
            bad()
    with pytest.raises(TypeError, match="stays floating"):
        x.astype(np.int64)
    with pytest.raises(ValueError, match="no elements"):
        tensor(X[:0], widest, Layout(None, None)).mean()


def test_empty(grid: Grid, serial: Grid) -> None:
    agree(lambda x: ops.relu(x).sum(0) + 1, [X[:0]], [MATRICES[0]], grid, serial, expected=np.ones(7))
    one = Tensor(pla.ones((1, 2), grid, MATRICES[0]), requires_grad=True)  # most ranks hold nothing of it
    ops.softmax(ops.gelu(one)).sum().backward()
    assert one.grad is not None
    np.testing.assert_allclose(one.grad.gather(), 0, atol=1e-15)
