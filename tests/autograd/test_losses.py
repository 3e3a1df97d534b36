"""Softmax and criteria, over whole and cut classes."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError, Tensor
from parlinalg.autograd import ops
from tests.autograd.cases import MATRICES, agree, close, cut, numbers, tensor

Z = 3 * numbers(5, 11)
IDS = np.array([1, 0, -100, 10, 5])
LAYOUTS = [*MATRICES, Layout("c", ("b", "a"))]


def log_probabilities(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def known_loss(z: np.ndarray, ids: np.ndarray, ignore: int, smoothing: float) -> tuple[float, int]:
    p, counts = log_probabilities(z), ids != ignore
    rows = np.nonzero(counts)
    picked = p[(*rows, ids[rows])]
    losses = -(1 - smoothing) * picked - smoothing * p[rows].mean(-1)
    return float(losses.sum()), int(counts.sum())


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_softmax(layout: Layout, grid: Grid, serial: Grid) -> None:
    p = log_probabilities(Z)
    agree(ops.softmax, [Z], [layout], grid, serial, expected=np.exp(p), numeric=layout is LAYOUTS[-1])
    agree(ops.log_softmax, [Z], [layout], grid, serial, expected=p, numeric=layout is LAYOUTS[-1])
    agree(lambda z: ops.softmax(z, 0), [Z], [layout], grid, serial, expected=np.exp(log_probabilities(Z.T)).T)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(layout: Layout, smoothing: float, grid: Grid, serial: Grid) -> None:
    total, count = known_loss(Z, IDS, -100, smoothing)

    def mean(z: Tensor) -> Tensor:
        return ops.cross_entropy(z, cut(IDS, z.grid, Layout(layout.dims[0])), label_smoothing=smoothing)

    agree(
        mean,
        [Z],
        [layout],
        grid,
        serial,
        expected=np.array(total / count),
        numeric=bool(smoothing) and layout is LAYOUTS[-1],
    )
    targets = cut(IDS, grid, Layout(layout.dims[0]))
    logits = tensor(Z, grid, layout)
    loss, found = ops.cross_entropy_sum(logits, targets, label_smoothing=smoothing)
    assert (found, ops.count_targets(targets)) == (count, count)
    close(loss.item(), total)
    np.testing.assert_array_equal(logits.gather(), Z)  # not changed


def test_cross_entropy_of_more_dims_other_ids_and_dtypes(grid: Grid, serial: Grid) -> None:
    z, ids = numbers(3, 4, 5), np.arange(12).reshape(3, 4) % 5
    layout = Layout("a", "c", "b")
    total, count = known_loss(z, ids, 3, 0.2)
    for dtype in (np.int64, np.int8, np.uint8):

        def mean(x: Tensor, dtype: type = dtype) -> Tensor:
            targets = Tensor(cut(ids.astype(dtype), x.grid, Layout("a", "c")))
            return ops.cross_entropy(x, targets, ignore_index=3, label_smoothing=0.2)

        agree(mean, [z], [layout], grid, serial, expected=np.array(total / count))
    half = tensor(Z.astype(np.float16), grid, MATRICES[0])
    loss = ops.cross_entropy(half, cut(IDS, grid, Layout("a")))
    loss.backward()
    assert half.grad is not None
    assert (loss.dtype, half.grad.dtype) == (np.float32, np.float16)
    close(loss.item(), known_loss(Z, IDS, -100, 0)[0] / 4, 1e-2)


def test_nothing_counts(grid: Grid) -> None:
    z = tensor(Z, grid, MATRICES[0])
    loss = ops.cross_entropy(z, pla.full((5,), -100, grid, Layout("a")))
    loss.backward()
    assert loss.item() == 0
    assert z.grad is not None
    assert not z.grad.gather().any()
    empty = tensor(Z[:0], grid, MATRICES[0])
    loss, count = ops.cross_entropy_sum(empty, pla.zeros((0,), grid, Layout("a"), np.int64))
    loss.backward()
    assert (loss.item(), count) == (0, 0)


def test_large_logits_neither_overflow_nor_vanish(grid: Grid) -> None:
    z = np.array([[1000.0, 0, -1000, 5], [-1e30, 3, 3, 3]])
    x = tensor(z, grid, Layout("a", "b"))
    loss = ops.cross_entropy(x, cut(np.array([2, 0]), grid, Layout("a")))
    loss.backward()
    close(loss.item(), known_loss(z, np.array([2, 0]), -100, 0)[0] / 2)
    assert x.grad is not None
    assert np.isfinite(x.grad.gather()).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_mse(layout: Layout, grid: Grid, serial: Grid) -> None:
    target = numbers(5, 11, seed=4)

    def mean(x: Tensor) -> Tensor:
        return ops.mse_loss(x, cut(target, x.grid, layout))

    agree(mean, [Z], [layout], grid, serial, expected=((Z - target) ** 2).mean(), numeric=layout is LAYOUTS[-1])
    assert ops.mse_sum(tensor(Z, grid, layout), cut(target, grid, layout))[1] == 55


def test_targets_that_are_no_class_ids(grid: Grid) -> None:
    layout = Layout(None, ("a", "b", "c"))  # every rank sees every target
    z = tensor(Z, grid, layout)

    def loss(ids: np.ndarray) -> None:
        ops.cross_entropy(z, cut(ids, grid, Layout(None)))

    with pytest.raises(ValueError, match=r"target 11 at \(1,\).*integer class ids in 0 to 10, or ignore_index = -100"):
        loss(np.array([1, 11, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"target -1 at \(0,\)"):
        loss(np.array([-1, 1, 2, 3, 4]))
    with pytest.raises(TypeError, match=r"float64 with NaN among them.*integer class ids in 0 to 10"):
        loss(np.array([0, np.nan, 2, 3, 4]))
    with pytest.raises(TypeError, match=r"float64; targets are integer class ids.*astype\('int64'\)"):
        loss(np.array([0.0, 1, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"shape \(4,\) for logits of shape \(5, 11\)"):
        loss(np.array([0, 1, 2, 3]))
    with pytest.raises(pla.ConfigError, match=r"a share in 0 to 1, not 1\.5"):
        ops.cross_entropy(z, cut(IDS, grid, Layout(None)), label_smoothing=1.5)
    target = Z.copy()
    target[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"target is NaN at \(3, 1\).*finite numbers"):
        ops.mse_loss(tensor(Z, grid, Layout(None, None)), cut(target, grid, Layout(None, None)))
    with pytest.raises(ValueError, match="must be equal"):
        ops.mse_loss(z, pla.zeros((5, 10), grid, layout))


@pytest.mark.mpi(min_size=2)
def test_targets_cut_otherwise(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    z = tensor(Z, widest, Layout(axis, None))
    with pytest.raises(LayoutError, match=r"redistribute\(Layout\('" + axis):
        ops.cross_entropy(z, cut(IDS, widest, Layout(None)))
    with pytest.raises(LayoutError, match=r"redistribute\(Layout\('" + axis):
        ops.mse_loss(z, cut(Z, widest, Layout(None, axis)))
