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


def _meeting(windows: KernelWindows, dim: int, at: int, n: int, places: range) -> tuple[slice, slice]:
    """Return which of some windows along dim 0 or 1 meet an image of n elements by element `at` of the kernel.

    Returns
    -------
    (slice, slice)
        Of the windows at these places, and of the image's elements that they meet; the others meet padding.
    """
    step, first = windows.stride[dim], at * windows.dilation[dim] - windows.padding[dim][0]
    start = max(places.start, -(first // step))
    stop = max(start, min(places.stop, (n - 1 - first) // step + 1))
    here = slice(start - places.start, stop - places.start)
    return here, slice(first + start * step, first + stop * step, step) if stop > start else slice(0)


def _meetings(
    windows: KernelWindows, height: int, width: int, rows: range
) -> Iterator[tuple[int, int, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield every element (i, j) of the kernel, with the windows in some rows by which it meets images, and what it
    meets of these."""
    columns = range(windows.size(1, width))
    for i in range(windows.kernel[0]):
        down, y = _meeting(windows, 0, i, height, rows)
        for j in range(windows.kernel[1]):
            across, x = _meeting(windows, 1, j, width, columns)
            yield i, j, (slice(None), down, across), (slice(None), y, x)


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
    b, h, w, c = x.shape
    if windows.plain:
        return x[:, rows.start : rows.stop, :, None, None]
    xp, padded = namespace(x), any(map(any, windows.padding))
    out = (xp.zeros if padded else xp.empty)((b, len(rows), windows.size(1, w), *windows.kernel, c), x.dtype)
    for i, j, here, there in _meetings(windows, h, w, rows):
        out[..., i, j, :][here] = x[there]
    return out


@kernel()
def add_patches(out: Block, found: Block, windows: KernelWindows, rows: range) -> None:
    """Add patches of some rows of windows to the images they are of: the adjoint of `patches`."""
    if windows.plain:
        out[:, rows.start : rows.stop] += found[:, :, :, 0, 0]
        return
    _, height, width, _ = out.shape
    for i, j, here, there in _meetings(windows, height, width, rows):
        out[there] += found[..., i, j, :][here]


# ---------------------------------------------------------------------------------------------- pooling


@kernel()
def max_pool(x: Block, windows: KernelWindows) -> tuple[Block, Block]:
    """Return the largest element of every window, and which of the kernel's it is: the first of equal ones."""
    xp, (b, h, w, c) = namespace(x), x.shape
    rows, columns = windows.sizes(h, w)
    least = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -float("inf")
    best = xp.full((b, rows, columns, c), least, x.dtype)
    at = xp.zeros(best.shape, np.int16)
    for number, (_, _, here, there) in enumerate(_meetings(windows, h, w, range(rows))):
        found, largest, place = x[there], best[here], at[here]
        more = found > largest
        more |= xp.isnan(found)
        xp.maximum(largest, found, out=largest)
        xp.maximum(place, more * np.int16(number), out=place)
    return best, at


@kernel()
def max_pool_grad(g: Block, at: Block, shape: tuple[int, ...], windows: KernelWindows) -> Block:
    """Return the gradient of `max_pool` for images of a shape from that of its value."""
    xp, (_, h, w, _) = namespace(g), shape
    d = xp.zeros(shape, g.dtype)
    for number, (_, _, here, there) in enumerate(_meetings(windows, h, w, range(windows.size(0, h)))):
        d[there] += xp.where(at[here] == np.int16(number), g[here], g.dtype.type(0))
    return d


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
