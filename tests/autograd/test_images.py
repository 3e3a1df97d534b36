"""Convolution, pooling and batch norm: values as defined, gradients by differences, on grids as on one rank."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parlinalg import Grid, Layout, LayoutError, schemes
from parlinalg.autograd import ops
from parlinalg.autograd.ops.images import images_layout
from parlinalg.backend.kernels import images as kernels
from parlinalg.backend.kernels.images import Band, KernelWindows
from parlinalg.plan import Plan
from tests.autograd.cases import agree, numbers, tensor

WHOLE = Layout(None, None, None, None)
IMAGES = [Layout("a", None, None, "b"), Layout(("b", "a"), None, None, "c"), WHOLE]
WINDOWS = [
    KernelWindows((3, 3), padding=((1, 1), (1, 1))),
    KernelWindows((3, 2), (2, 1), ((1, 1), (0, 0))),
    KernelWindows((1, 1)),
    KernelWindows((1, 1), (2, 2)),
    KernelWindows((2, 3), (1, 2), ((0, 1), (2, 2)), (3, 2)),
    KernelWindows((1, 4), (3, 1), ((2, 2), (4, 4))),  # whole windows of padding
]


def plans() -> dict[str, tuple[Plan, Plan]]:
    """The plans of convolutions into a block, whole and out of the table of a scheme, over the axes a, b and c."""
    names = {"2d": {"r": "a", "c": "b"}, "3d": {"i": "a", "j": "b", "l": "c"}, "2.5d, depth on k": {"d": "c", "r": "a",
             "c": "b"}, "1d with sequence cuts": {"t": "a"}, "zero3": {"data": "a"}}  # fmt: skip
    found = {}
    for name, axes in names.items():
        scheme = schemes.discover()[name].SCHEME
        found[name] = tuple(scheme.convolution(kind).renamed(axes) for kind in ("expand", "contract"))
    return found


def padded(x: np.ndarray, windows: KernelWindows, fill: float = 0) -> np.ndarray:
    return np.pad(x, ((0, 0), *windows.padding, (0, 0)), constant_values=fill)


def under(x: np.ndarray, windows: KernelWindows, i: int, j: int, fill: float = 0) -> np.ndarray:
    """The elements of images under window (i, j): [batch, kernel height, kernel width, channels]."""
    (s, t), (d, e), (k, l) = windows.stride, windows.dilation, windows.kernel
    rows, columns = i * s + d * np.arange(k), j * t + e * np.arange(l)
    return padded(x, windows, fill)[:, rows][:, :, columns]


def of_windows(
    x: np.ndarray, windows: KernelWindows, function: Callable[[np.ndarray], Any], fill: float = 0
) -> np.ndarray:
    rows, columns = windows.sizes(*x.shape[1:3])
    cells = [[function(under(x, windows, i, j, fill)) for j in range(columns)] for i in range(rows)]
    return np.moveaxis(np.array(cells), 2, 0)


def convolved(x: np.ndarray, w: np.ndarray, windows: KernelWindows, groups: int = 1) -> np.ndarray:
    parts = zip(np.split(x, groups, 3), np.split(w, groups, 3), strict=True)
    return np.concatenate([of_windows(p, windows, lambda u: np.tensordot(u, q, 3)) for p, q in parts], 3)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("name", plans())
def test_convolution(name: str, windows: KernelWindows, grid: Grid, serial: Grid) -> None:
    expand, contract = plans()[name]
    for plan, c, n in ((expand, 3, 5), (contract, 5, 2)):
        x, w, bias = numbers(5, 6, 5, c), numbers(*windows.kernel, c, n), numbers(n)
        layouts = [images_layout(plan.x), plan.w, Layout(plan.y.dims[-1])]
        agree(
            lambda x, w, b: ops.conv2d(x, w, plan, windows, bias=b),
            [x, w, bias], layouts, grid, serial, expected=convolved(x, w, windows) + bias,
            numeric=windows == WINDOWS[4],
        )  # fmt: skip


@pytest.mark.parametrize("groups", [2, 6])
@pytest.mark.parametrize("name", plans())
def test_groups(name: str, groups: int, grid: Grid, serial: Grid) -> None:
    for plan, keep in zip(plans()[name], ("xw", ""), strict=True):
        windows = WINDOWS[1]
        x, w = numbers(3, 5, 4, 6), numbers(*windows.kernel, 6 // groups, 12)
        agree(
            lambda x, w: ops.conv2d(x, w, plan, windows, groups=groups, keep=keep),
            [x, w], [images_layout(plan.x), plan.w], grid, serial,
            expected=convolved(x, w, windows, groups), numeric=name == "2d",
        )  # fmt: skip


@pytest.mark.parametrize(("tile", "least"), [(1, 1), (1, 7), (1, 70), (600, 1)])
def test_parts_of_patches(tile: int, least: int, monkeypatch: pytest.MonkeyPatch, grid: Grid, serial: Grid) -> None:
    """Patches made a few rows of an image, or a few images, at a time: the same, and never more at once."""
    for name in ("TILE", "GPU_TILE"):
        monkeypatch.setattr(kernels, name, tile)
    monkeypatch.setattr(kernels, "LEAST", least)
    most, made = 0, kernels.patches

    def noting(x: Any, windows: KernelWindows, rows: range) -> Any:
        nonlocal most
        found = made(x, windows, rows)
        most = max(most, found.shape[0] * found.shape[1] * found.shape[2])
        return found

    monkeypatch.setattr(kernels, "patches", noting)
    plan = plans()["2d"][0]
    for windows in WINDOWS[:2] + WINDOWS[4:]:
        x, w = numbers(4, 6, 5, 3), numbers(*windows.kernel, 3, 4)
        layouts = [images_layout(plan.x), plan.w]
        agree(
            lambda x, w: ops.conv2d(x, w, plan, windows), [x, w], layouts, grid, serial,
            expected=convolved(x, w, windows),
        )  # fmt: skip
        columns, elements = windows.size(1, 5), 3 * windows.kernel[0] * windows.kernel[1]
        assert 0 < most <= max(columns, least, tile // elements)
        most = 0


@pytest.mark.parametrize("layout", IMAGES, ids=str)
def test_max_pooling(layout: Layout, grid: Grid, serial: Grid) -> None:
    x = numbers(5, 6, 5, 3)
    for windows in WINDOWS[:2] + WINDOWS[4:5]:
        want = of_windows(x, windows, lambda u: u.max((1, 2)), -np.inf)
        agree(lambda x: ops.max_pool2d(x, windows), [x], [layout], grid, serial, expected=want, numeric=True)


def test_equal_elements_and_nan_in_max_pooling(widest: Grid) -> None:
    """The first of equal elements has the gradient, as in PyTorch; NaN is larger than all numbers."""
    x = tensor(np.ones((1, 3, 3, 1)), widest, WHOLE)
    ops.max_pool2d(x, KernelWindows((2, 2), padding=((1, 1), (1, 1)))).sum().backward()
    assert x.grad is not None
    want = [[4, 2, 2], [2, 1, 1], [2, 1, 1]]
    np.testing.assert_array_equal(x.grad.gather()[0, :, :, 0], want)
    x = tensor(np.array([1.0, np.nan, 2, 3]).reshape(1, 2, 2, 1), widest, WHOLE)
    y = ops.max_pool2d(x, KernelWindows((2, 2)))
    y.sum().backward()
    assert np.isnan(y.gather()).all()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.gather().reshape(4), [0, 1, 0, 0])


@pytest.mark.parametrize("layout", IMAGES, ids=str)
def test_band_means(layout: Layout, grid: Grid, serial: Grid) -> None:
    x, down, across = numbers(5, 6, 5, 3), [Band(0, 3, 3), Band(2, 6, 5)], [Band(0, 1, 2), Band(1, 5, 4), Band(4, 4, 1)]
    want = np.array([[x[:, a:b, c:d].sum((1, 2)) / (m * n) for c, d, n in across] for a, b, m in down])
    agree(
        lambda x: ops.band_means(x, down, across), [x], [layout], grid, serial, expected=np.moveaxis(want, 2, 0),
        numeric=True,
    )  # fmt: skip


@pytest.mark.parametrize("layout", IMAGES, ids=str)
def test_batch_norm(layout: Layout, grid: Grid, serial: Grid) -> None:
    """Statistics over all ranks, with a mean that is large beside the deviation, and with empty blocks."""
    for b in (5, 2):
        x, vector = 1e3 + numbers(b, 3, 2, 3), Layout(layout.dims[-1])
        weight, bias, mean, variance = numbers(3), numbers(3, seed=1), numbers(3, seed=2), numbers(3, seed=3) ** 2 + 1
        rows = x.reshape(-1, 3)
        want = (x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-3) * weight + bias
        agree(
            lambda x, w, b: ops.batch_norm(x, None, None, w, b, True, eps=1e-3), [x, weight, bias],
            [layout, vector, vector], grid, serial, expected=want, numeric=True,
        )  # fmt: skip
        agree(
            lambda x, w, b: ops.batch_norm(
                x, tensor(mean, x.grid, vector, wants=False), tensor(variance, x.grid, vector, wants=False), w, b,
            ),
            [x, weight, bias], [layout, vector, vector], grid, serial,
            expected=(x - mean) / np.sqrt(variance + 1e-5) * weight + bias, numeric=True,
        )  # fmt: skip


def test_half_precision(widest: Grid) -> None:
    """Blocks of 16 bits are computed in 32, and rounded once."""
    x, w = numbers(2, 6, 5, 3).astype(np.float16), numbers(3, 3, 3, 4).astype(np.float16)
    plan, windows = plans()["2d"][0], WINDOWS[0]
    given = tensor(x, widest, images_layout(plan.x))
    y = ops.conv2d(given, tensor(w, widest, plan.w), plan, windows)
    z = ops.batch_norm(y, training=True)
    z.sum().backward()
    assert y.dtype == z.dtype == np.float16
    assert given.grad is not None
    assert given.grad.dtype == np.float16
    exact = convolved(x.astype(float), w.astype(float), windows)
    assert np.abs(y.gather() - exact).max() <= 2e-3 * np.abs(exact).max()


def test_what_is_wrong_is_said(widest: Grid) -> None:
    plan, cut = plans()["2d"][0], "a" if widest.sizes["a"] > 1 else "b"
    x, w = tensor(numbers(2, 4, 4, 3), widest, images_layout(plan.x)), tensor(numbers(3, 3, 3, 4), widest, plan.w)
    with pytest.raises(ValueError, match=r"images of shape \(2, 4, 4, 3\) and weights of shape \(3, 3, 3, 4\)"):
        ops.conv2d(x, w, plan, KernelWindows((3, 3)), groups=3)
    with pytest.raises(ValueError, match=r"images of 4 × 4 with padding .* are smaller than the kernel"):
        ops.conv2d(x, w, plan, KernelWindows((3, 3), dilation=(2, 2)))
    if widest.sizes[cut] > 1:
        with pytest.raises(LayoutError, match=r"images are not cut as the plan says.*redistribute"):
            ops.conv2d(
                tensor(numbers(2, 4, 4, 3), widest, Layout(None, cut, None, None)), w, plan, KernelWindows((3, 3))
            )
        with pytest.raises(LayoutError, match="cut in height or width"):
            ops.max_pool2d(tensor(numbers(2, 4, 4, 3), widest, Layout(None, cut, None, None)), KernelWindows((2, 2)))
    flat = tensor(numbers(1, 3), widest, Layout(None, None))
    with pytest.raises(ValueError, match=r"x of shape \(1, 3\) has one value a channel"):
        ops.batch_norm(flat, training=True)
    with pytest.raises(ValueError, match=r"weight of shape \(2,\) .* right is \(3,\)"):
        ops.batch_norm(flat, weight=tensor(numbers(2), widest, Layout(None)), training=True)
    with pytest.raises(ValueError, match="outside of training needs running_mean"):
        ops.batch_norm(flat)


@pytest.mark.serial
@pytest.mark.parametrize("name", ["patches", "add_patches", "max_pool"])
def test_padding_takes_no_memory(name: str) -> None:
    """No kernel makes a padded copy of the images."""
    x, windows = np.ones((56, 8, 8, 16), np.float32), KernelWindows((3, 3), padding=((1, 1), (1, 1)))
    found = kernels.patches(x, windows, range(8))
    args = {"patches": (x, windows, range(8)), "add_patches": (x, found, windows, range(8)), "max_pool": (x, windows)}
    tracemalloc.start()
    try:
        made = getattr(kernels, name)(*args[name])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    results = sum(block.nbytes for block in (made if isinstance(made, tuple) else (made,)) if block is not None)
    assert most < results + x.nbytes  # pooling has numbers and truths of the windows in between
