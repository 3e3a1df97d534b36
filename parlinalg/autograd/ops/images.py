"""Operations on images: convolutions, pooling, and images as sequences of patches.

Images are [batch, height, width, channels], as features are the last dim everywhere in this library.  Height and width
are whole; the batch and the channels may be cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import mismatch, same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.product import Product, nothing
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.blas import add_product
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import images as kernels
from parlinalg.backend.kernels.images import Band, KernelWindows
from parlinalg.layout import Layout
from parlinalg.matmul.local import gemm
from parlinalg.plan import Plan
from parlinalg.redistribute import redistribute

Block = Any
Shape = tuple[int, ...]


# ---------------------------------------------------------------------------------------------- convolution


def conv2d(
    x: Any, w: Any, plan: Plan, windows: KernelWindows, *, groups: int = 1, bias: Any = None, keep: str = "xw"
) -> Tensor:  # fmt: skip
    """Return the convolution of images and weights: the product of the images' patches and the weights by a plan.

    The images move, not their patches, which are made a part at a time where they are multiplied, so that the
    convolution moves no more words than a product of the pixels.

    Parameters
    ----------
    x : Tensor
        Images [batch, height, width, channels], as x rests in the plan, without the kernel's dims.
    w : Tensor
        [kernel height, kernel width, channels / groups, features], as w rests in the plan.
    plan : Plan
        Of `Scheme.convolution`.
    windows : Windows
        The kernel, its stride, padding and dilation.
    groups : int
        Channels and features fall into so many groups, and each group of features is of one group of channels.  More
        than one are computed from whole channels: axes that would cut the channels at work repeat the work.
    bias : Tensor, optional
        [features], cut as the last dim of the result.
    keep : {"xw", "x", "w", ""}
        As of `matmul`.

    Returns
    -------
    Tensor
        [batch, rows of windows, columns of windows, features], as y rests in the plan.

    Raises
    ------
    ValueError, LayoutError
        If the shapes do not fit, or an operand does not rest as the plan says.
    """
    x, w = as_tensor(x), as_tensor(w)
    grid = same_grid([x.data, w.data])
    if groups > 1:
        plan = replace(plan, k=((),) * 3)
    _check_shapes(x.shape, w.shape, windows, groups)
    for name, array, want in (("images are", x.data, images_layout(plan.x)), ("weights are", w.data, plan.w)):
        if grid.effective(array.layout) != grid.effective(want):
            raise mismatch(f"conv2d: {name} not cut as the plan says", array.layout, want)
    return Convolution(plan, x, w, windows, groups).record(x, w, keep, bias)


class Convolution(Product):
    """The product of the images' patches and the weights."""

    op = "conv2d"

    def __init__(self, plan: Plan, x: Tensor, w: Tensor, windows: KernelWindows, groups: int) -> None:
        shape = (x.shape[0], *windows.sizes(*x.shape[1:3]), w.shape[3])
        super().__init__(plan, shape, images_layout(plan.x_work))
        self.windows, self.groups, self.grid = windows, groups, x.grid
        self.dtype = np.result_type(x.dtype, w.dtype)
        self.images, self.weights = x.shape, w.shape

    def forward(self, x: DistArray, w: DistArray, bias: Block) -> Block:
        xs, ws, grid = x.block_in(self.x_work), w.block_in(self.plan.w_work), self.grid
        local = grid.backend.empty(grid.block_shape(self.plan.y_work, self.shape), self.dtype)
        for channels, out in self.own:
            _convolve(xs[..., channels], ws[..., out], self.windows, local[..., out])
        y = redistribute(local, self.plan.y_work, self.plan.y, self.shape, grid, owned=True)
        if bias is not None:
            y += bias.astype(self.dtype, copy=False)
        return y

    def dx(self, dy: DistArray, w: DistArray) -> Term:
        # the adjoint of patches, of dy[b, m, n] wᵀ[n, k]; partial over the axes that cut n
        ws = w.block_in(self.plan.w_work)
        d = self.grid.backend.zeros(self.grid.block_shape(self.x_work, self.images), self.dtype)
        for channels, out in self.own:
            _add_to_images(dy.block[..., out], ws[..., out], self.windows, d[..., channels])
        return d, images_layout(self.plan.grad_x.y_work)

    def dw(self, x: DistArray, dy: DistArray) -> Term:
        # dw[k, n] = patchesᵀ[k, m] dy[m, n], partial over the axes that cut m
        xs, zeros = x.block_in(self.x_work), self.grid.backend.zeros
        local = (*self.weights[:2], *self.grid.block_shape(self.plan.w_work, self.weights)[2:])
        d = zeros(local, work_dtype(self.dtype))
        for channels, out in self.own:
            part = d if self.groups == 1 else zeros(d[..., out].shape, d.dtype)
            _add_to_weights(xs[..., channels], dy.block[..., out], self.windows, part)
            if self.groups > 1:
                d[..., out] = part
        return d.astype(self.dtype, copy=False), self.plan.grad_w.y_work

    @property
    def own(self) -> Iterator[tuple[slice, slice]]:
        """For every group that has some of the features here: its channels, and which of the features here are its
        own."""
        if self.groups == 1:
            yield slice(None), slice(None)
            return
        here = self.grid.block(self.plan.w_work, self.weights)[3]
        wide, deep = self.images[3] // self.groups, self.weights[3] // self.groups
        for group in range(here.start // deep, -(-here.stop // deep)):
            first, stop = max(here.start, group * deep), min(here.stop, (group + 1) * deep)
            if first < stop:
                yield slice(group * wide, (group + 1) * wide), slice(first - here.start, stop - here.start)


def images_layout(patches: Layout) -> Layout:
    """Return the layout of images whose patches [batch, height, width, kernel height, kernel width, channels] have
    this one."""
    return Layout(*patches.dims[:3], patches.dims[5], partial=patches.partial)


def _check_shapes(x: Shape, w: Shape, windows: KernelWindows, groups: int) -> None:
    if len(x) != 4 or len(w) != 4 or w[:2] != windows.kernel or x[3] != w[2] * groups or w[3] % groups:
        raise ValueError(
            f"conv2d: images of shape {x} and weights of shape {w} with a kernel of {windows.kernel} and {groups} "
            "groups; right are [batch, height, width, channels] and [*kernel, channels / groups, features], where the "
            "groups divide channels and features"
        )
    _check_windows("conv2d", x, windows)


def _check_windows(name: str, x: Shape, windows: KernelWindows) -> None:
    if len(x) != 4:
        raise ValueError(f"{name} takes images [batch, height, width, channels], not an array of shape {x}")
    if min(windows.sizes(x[1], x[2])) < 1:
        raise ValueError(
            f"{name}: images of {x[1]} × {x[2]} with padding {windows.padding} are smaller than the kernel, "
            f"{windows.kernel} with dilation {windows.dilation}"
        )


def _parts(x: Block, windows: KernelWindows) -> Iterator[tuple[slice, range]]:
    images, height, width, channels = x.shape
    return kernels.parts(images, windows.sizes(height, width), math.prod(windows.kernel) * channels, x)


def _matrix(block: Block, rows: int) -> Block:
    return block.reshape((math.prod(block.shape[:rows]), math.prod(block.shape[rows:])))


def _convolve(x: Block, w: Block, windows: KernelWindows, out: Block) -> None:
    """Write the local product of the patches of x and w to `out`."""
    weights = _matrix(w, 3)
    for images, rows in _parts(x, windows):
        found = _matrix(kernels.patches(x[images], windows, rows), 3)
        into = out[images, rows.start : rows.stop]
        straight = into.flags.c_contiguous and work_dtype(out.dtype) == out.dtype
        y = gemm(found, weights, out.dtype, _matrix(into, 3) if straight else None)
        if not straight:
            into[...] = y.reshape(into.shape)


def _add_to_images(dy: Block, w: Block, windows: KernelWindows, out: Block) -> None:
    """Add the gradient of `_convolve` for x to `out`."""
    weights = _matrix(w, 3).T
    for images, rows in _parts(out, windows):
        grads = dy[images, rows.start : rows.stop]
        found = gemm(_matrix(grads, 3), weights, out.dtype)
        shape = (*grads.shape[:3], *windows.kernel, out.shape[3])
        kernels.add_patches(out[images], found.reshape(shape), windows, rows)


def _add_to_weights(x: Block, dy: Block, windows: KernelWindows, out: Block) -> None:
    """Add the gradient of `_convolve` for w to `out`, contiguous and in the working dtype."""
    total = _matrix(out, 3)
    for images, rows in _parts(x, windows):
        found = _matrix(kernels.patches(x[images], windows, rows), 3)
        grads = _matrix(dy[images, rows.start : rows.stop], 3)
        add_product(total, found.T, grads)


# ---------------------------------------------------------------------------------------------- pooling


def max_pool2d(x: Any, windows: KernelWindows) -> Tensor:
    """Return the largest element of every window of images; of equal ones the first has the gradient.

    Parameters
    ----------
    x : Tensor
        [batch, height, width, channels] with whole height and width.
    windows : Windows
        Padding counts as less than any number.
    """
    x, data = _whole_images("max_pool2d", x)
    _check_windows("max_pool2d", x.shape, windows)
    shape = (x.shape[0], *windows.sizes(*x.shape[1:3]), x.shape[3])
    if not data.grid.inside:
        return record("max_pool2d", data.like(data.block, data.layout, shape), [x], [nothing(x)])
    y, at = kernels.max_pool(data.block, windows)
    held, rest = data.block.shape, data.layout

    def part(g: Block, at: Block) -> Term:
        return kernels.max_pool_grad(g, at, held, windows), rest

    return record("max_pool2d", data.like(y, rest, shape), [x], [Part(part, at)])


def band_means(x: Any, down: Sequence[Band], across: Sequence[Band]) -> Tensor:
    """Return sums over rectangles of images, divided by their shares: all kinds of average pooling.

    Parameters
    ----------
    x : Tensor
        [batch, height, width, channels] with whole height and width.
    down, across : sequence of Band
        Of height and width; rectangle (i, j) is band i of the height and band j of the width.
    """
    x, data = _whole_images("band_means", x)
    shape = (x.shape[0], len(down), len(across), x.shape[3])
    if not data.grid.inside:
        return record("band_means", data.like(data.block, data.layout, shape), [x], [nothing(x)])
    height, width, rest = x.shape[1], x.shape[2], data.layout
    y = kernels.band_means(kernels.band_means(data.block, 1, down), 2, across)

    def part(g: Block) -> Term:
        d = kernels.band_means_grad(g, 2, across, width)
        return kernels.band_means_grad(d, 1, down, height), rest

    return record("band_means", data.like(y, rest, shape), [x], [part])


def _whole_images(name: str, x: Any) -> tuple[Tensor, DistArray]:
    x = as_tensor(x)
    data = summed(x.data, name)
    if x.ndim != 4:
        raise ValueError(f"{name} takes images [batch, height, width, channels], not an array of shape {x.shape}")
    want = Layout(data.layout.dims[0], None, None, data.layout.dims[3])
    if data.grid.effective(data.layout) != data.grid.effective(want):
        raise mismatch(f"{name}: images are cut in height or width", data.layout, want)
    return x, data


# ---------------------------------------------------------------------------------------------- sequences of patches


def patches(images: Any, size: tuple[int, int], lead: int = 0) -> Tensor:
    """Square up images of shape [b, channels, height, width] into [b, lead + n, channels · size[0] · size[1]].

    Patches follow each other by rows of the image; their elements are ordered by channel, row and column.  The first
    `lead` items of the sequence are zeros: places for class tokens (Dosovitskiy et al., "An image is worth 16×16
    words", 2021).

    Raises
    ------
    ValueError, LayoutError
        If the images do not fall into whole patches, or more than the batch dim is cut.
    """
    x = as_tensor(images)
    data = summed(x.data, "patches")
    p, q = size
    if x.ndim != 4 or x.shape[2] % p or x.shape[3] % q:
        raise ValueError(
            f"images of shape {x.shape} do not fall into patches of {p} × {q}; right is [batch, channels, height, "
            f"width] with a height that is a multiple of {p} and a width that is one of {q}"
        )
    want = Layout(data.layout.dims[0], None, None, None)
    if data.grid.effective(data.layout) != data.grid.effective(want):
        raise mismatch("patches: images are cut in more than the batch", data.layout, want)
    b, (_, c, h, w) = data.block.shape[0], x.shape
    down, across = h // p, w // q
    n, width = down * across, c * p * q
    grid, before, rest = data.grid, data.layout, Layout(data.layout.dims[0], None, None)
    held = data.block.shape
    local = (b, lead + n, width) if grid.inside else (0, 0, 0)
    y = grid.backend.zeros(local, x.dtype)
    if grid.inside:
        cells = data.block.reshape((b, c, down, p, across, q)).transpose((0, 2, 4, 1, 3, 5))
        y[:, lead:] = cells.reshape((b, n, width))

    def part(g: Block) -> Term:
        if not grid.inside:
            return grid.backend.zeros(held, g.dtype), before
        cells = g[:, lead:].reshape((b, down, across, c, p, q)).transpose((0, 3, 1, 4, 2, 5))
        return cells.reshape(held), before

    return record("patches", data.like(y, rest, (x.shape[0], lead + n, width)), [x], [part])
