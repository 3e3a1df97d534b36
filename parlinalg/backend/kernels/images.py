"""Kernels over images [batch, height, width, channels]: patches for convolutions, and pooling.

A convolution is a product of patches and weights (Chellapilla et al., "High performance convolutional neural networks
for document processing", 2006).  Patches take as much memory as the kernel has elements times the image, so that they
are made a part at a time: `parts` says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.backend import backend_of, namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import example, kernel

Block = Any
Pair = tuple[int, int]

TILE = 1 << 19
"""Elements of the patches that are made at once on a CPU: they stay in the cache."""
LEAST = 512
"""Patches that are made at once at least: products of fewer rows are slow."""
GPU_TILE = 1 << 27
"""Elements of the patches that are made at once on a GPU."""


class KernelWindows(NamedTuple):
    """The places of a kernel on an image, along height and width.

    Attributes
    ----------
    kernel, stride, dilation : (int, int)
    padding : ((int, int), (int, int))
        Rows above and below, columns left and right of the image.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)

    def size(self, dim: int, n: int) -> int:
        """Return how many windows there are along dim 0 (height) or 1 (width) of n elements; below 1 there is none."""
        reach = self.dilation[dim] * (self.kernel[dim] - 1) + 1
        return (n + sum(self.padding[dim]) - reach) // self.stride[dim] + 1

    def sizes(self, height: int, width: int) -> Pair:
        """Return how many windows there are along height and width."""
        return self.size(0, height), self.size(1, width)

    @property
    def plain(self) -> bool:
        """True if patches are the image itself."""
        return self.kernel == self.stride == (1, 1) and self.padding == ((0, 0), (0, 0))


class _Rows(NamedTuple):
    """The rows of an image under some rows of windows, and how many rows of padding are above and below them."""

    first: int
    stop: int
    above: int
    below: int


def _rows_under(windows: KernelWindows, height: int, rows: range) -> _Rows:
    top = rows.start * windows.stride[0] - windows.padding[0][0]
    end = (
        (rows.stop - 1) * windows.stride[0] - windows.padding[0][0] + windows.dilation[0] * (windows.kernel[0] - 1) + 1
    )
    first, stop = min(max(0, top), height), max(0, min(height, end))
    first = min(first, stop)
    return _Rows(first, stop, first - top, end - stop)


def _cells(windows: KernelWindows, rows: int, columns: int) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
    """Yield every element (i, j) of the kernel with the elements of the padded images that it meets, in all windows."""
    (s, t), (d, e) = windows.stride, windows.dilation
    for i in range(windows.kernel[0]):
        for j in range(windows.kernel[1]):
            down = slice(i * d, i * d + s * (rows - 1) + 1, s)
            yield i, j, (slice(None), down, slice(j * e, j * e + t * (columns - 1) + 1, t))


def _padded(x: Block, windows: KernelWindows, rows: range, fill: float = 0) -> Block:
    """Return the rows of images that some rows of windows meet, padded; a view where there is no padding."""
    under, (left, right) = _rows_under(windows, x.shape[1], rows), windows.padding[1]
    part = x[:, under.first : under.stop]
    if not any((under.above, under.below, left, right)):
        return part
    b, h, w, c = part.shape
    out = namespace(x).full((b, under.above + h + under.below, left + w + right, c), fill, x.dtype)
    out[:, under.above : under.above + h, left : left + w] = part
    return out


def parts(images: int, sizes: Pair, elements: int, like: Block) -> Iterator[tuple[slice, range]]:
    """Yield runs of images, and of rows of windows in them, whose patches are made at once.

    Parameters
    ----------
    images : int
    sizes : (int, int)
        Windows along height and width.
    elements : int
        The elements of a patch.
    like : array
        A block of the backend where they are made.
    """
    most = max((TILE if backend_of(like).cpu else GPU_TILE) // max(1, elements), LEAST)
    rows, columns = sizes
    if rows * columns <= most:
        step = max(1, most // max(1, rows * columns))
        for at in range(0, images, step):
            yield slice(at, min(images, at + step)), range(rows)
        return
    step = max(1, most // columns)
    for image in range(images):
        for at in range(0, rows, step):
            yield slice(image, image + 1), range(at, min(rows, at + step))


@kernel()
def patches(x: Block, windows: KernelWindows, rows: range) -> Block:
    """Return the patches [batch, rows, columns, kernel height, kernel width, channels] of some rows of windows."""
    b, _, w, c = x.shape
    if windows.plain:
        return x[:, rows.start : rows.stop, :, None, None]
    columns = windows.size(1, w)
    padded = _padded(x, windows, rows)
    out = namespace(x).empty((b, len(rows), columns, *windows.kernel, c), x.dtype)
    for i, j, cell in _cells(windows, len(rows), columns):
        out[:, :, :, i, j] = padded[cell]
    return out


@kernel()
def add_patches(out: Block, found: Block, windows: KernelWindows, rows: range) -> None:
    """Add patches of some rows of windows to the images they are of: the adjoint of `patches`."""
    if windows.plain:
        out[:, rows.start : rows.stop] += found[:, :, :, 0, 0]
        return
    (b, h, w, c), columns = out.shape, found.shape[2]
    under, (left, right) = _rows_under(windows, h, rows), windows.padding[1]
    height = under.stop - under.first
    inside = out[:, under.first : under.stop]
    bare = not any((under.above, under.below, left, right))
    total = (
        inside
        if bare
        else namespace(out).zeros((b, under.above + height + under.below, left + w + right, c), out.dtype)
    )
    for i, j, cell in _cells(windows, len(rows), columns):
        total[cell] += found[:, :, :, i, j]
    if not bare:
        inside += total[:, under.above : under.above + height, left : left + w]


# ---------------------------------------------------------------------------------------------- pooling


@kernel()
def max_pool(x: Block, windows: KernelWindows) -> tuple[Block, Block]:
    """Return the largest element of every window, and which of the kernel's it is: the first of equal ones."""
    xp, (rows, columns) = namespace(x), windows.sizes(x.shape[1], x.shape[2])
    padded = _padded(x, windows, range(rows), -float("inf"))
    best: Block = None
    at = xp.zeros((x.shape[0], rows, columns, x.shape[3]), np.int16)
    for number, (_, _, cell) in enumerate(_cells(windows, rows, columns)):
        found = padded[cell]
        if best is None:
            best = found.copy()
            continue
        more = (found > best) | xp.isnan(found)
        best = xp.where(more, found, best)
        at = xp.where(more, np.int16(number), at)
    return best, at


@kernel()
def max_pool_grad(g: Block, at: Block, shape: tuple[int, ...], windows: KernelWindows) -> Block:
    """Return the gradient of `max_pool` for images of a shape from that of its value."""
    xp, (b, h, w, c) = namespace(g), shape
    (above, below), (left, right) = windows.padding
    total = xp.zeros((b, above + h + below, left + w + right, c), g.dtype)
    for number, (_, _, cell) in enumerate(_cells(windows, *windows.sizes(h, w))):
        total[cell] += xp.where(at == np.int16(number), g, g.dtype.type(0))
    return xp.ascontiguousarray(total[:, above : above + h, left : left + w])


class Band(NamedTuple):
    """Elements `start` to `stop` of a dim, whose sum is divided by `share`."""

    start: int
    stop: int
    share: float


def _at(dim: int, index: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * dim, index)


@kernel()
def band_means(x: Block, dim: int, bands: Sequence[Band]) -> Block:
    """Return for every band of a dim the sum of its elements, divided by its share."""
    xp = namespace(x)
    out = xp.empty((*x.shape[:dim], len(bands), *x.shape[dim + 1 :]), x.dtype)
    for i, band in enumerate(bands):
        total = x[_at(dim, slice(band.start, band.stop))].sum(axis=dim, dtype=work_dtype(x.dtype))
        out[_at(dim, i)] = total / band.share
    return out


@kernel()
def band_means_grad(g: Block, dim: int, bands: Sequence[Band], n: int) -> Block:
    """Return the gradient of `band_means` for a dim of n elements."""
    out = namespace(g).zeros((*g.shape[:dim], n, *g.shape[dim + 1 :]), g.dtype)
    for i, band in enumerate(bands):
        out[_at(dim, slice(band.start, band.stop))] += g[_at(dim, slice(i, i + 1))] / g.dtype.type(band.share)
    return out


_TRIED = KernelWindows((2, 3), (2, 3), ((1, 0), (0, 1)))
_BANDS = (Band(0, 4, 4.0), Band(4, 9, 5.0))


def _try_patches(images: Block) -> tuple[Block, Block]:
    found = patches(images, _TRIED, range(_TRIED.sizes(*images.shape[1:3])[0]))
    back = namespace(images).zeros(images.shape, images.dtype)
    add_patches(back, found[:, :1], _TRIED, range(1))
    return found, back


def _try_max_pool(images: Block) -> tuple[Block, ...]:
    y, at = max_pool(images, _TRIED)
    return y, at, max_pool_grad(y, at, images.shape, _TRIED)


def _try_means(images: Block) -> tuple[Block, Block]:
    y = band_means(images, 1, _BANDS)
    return y, band_means_grad(images[:, :2], 1, _BANDS, 9)


example("patches", _try_patches, "images")
example("max pooling and gradient", _try_max_pool, "images")
example("mean pooling and gradient", _try_means, "images")
