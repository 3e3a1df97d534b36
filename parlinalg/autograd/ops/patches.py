"""Images as sequences of patches."""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import effective, mismatch
from parlinalg.array.reductions import summed
from parlinalg.autograd.arrivals import Term
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.layout import Layout

Block = Any


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
    if effective(data.layout, data.grid) != effective(want, data.grid):
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

    return record(data.like(y, rest, (x.shape[0], lead + n, width)), [x], [part])
