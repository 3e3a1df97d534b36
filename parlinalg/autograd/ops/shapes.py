"""Operations that change where elements lie or how they are stored, and not their values."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from parlinalg.array.align import unmoved
from parlinalg.array.core import terms_add
from parlinalg.array.indexing import plain_items
from parlinalg.array.shapes import full_shape
from parlinalg.autograd.parameter import Parameter
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from parlinalg.redistribute import fitting

Key = int | slice | EllipsisType | None


def redistribute(x: Tensor, layout: Layout) -> Tensor:
    """Return the same value in another layout; the gradient goes back to the old one.  Collective."""
    x = as_tensor(x)
    if fitting(layout, x.shape, x.grid) == x.layout:
        return x
    rest = layout.with_partial(())
    return record("redistribute", x.data.redistribute(layout), [x], [lambda g: (g, rest)])


def astype(x: Tensor, dtype: Any) -> Tensor:
    """Return the same value in another floating dtype; the gradient is converted back.

    Raises
    ------
    LayoutError
        If the terms of a partial tensor, converted each, would have another sum: those of integers.
    """
    x = as_tensor(x)
    if x.dtype == np.dtype(dtype):
        return x
    if x.requires_grad and np.dtype(dtype).kind in "iub":
        raise TypeError(
            f"astype: a tensor that wants a gradient stays floating, not {np.dtype(dtype)}; .detach() it first"
        )
    rest = x.layout.with_partial(())
    if not terms_add(x.dtype, np.dtype(dtype)) and x.grid.effective(x.layout).partial:
        raise LayoutError(
            f"astype: a tensor of {x.dtype} in {x.layout!r} is not summed yet, and its terms as {np.dtype(dtype)} have "
            f"another sum; mend it by .redistribute({rest!r})"
        )
    return record("astype", x.data.astype(dtype), [x], [lambda g: (g, rest)])


def reshape(x: Tensor, shape: Any) -> Tensor:
    """Return the same elements in another shape.

    Dims are matched in groups of equal products; within a group only the first dim may be cut, and its pieces must be
    whole pieces of the group's new first dim too.  Nothing moves.

    Raises
    ------
    LayoutError
        If the pieces of a cut dim are no pieces of the new dims; the message names the layout that would do.
    """
    x = as_tensor(x)
    if full_shape(x.shape, shape) == x.shape:
        return x
    with unmoved():
        y = x.data.reshape(shape)
    rest, local, inside = x.layout.with_partial(()), x.block.shape, x.grid.inside
    zeros = x.grid.backend.zeros
    return record("reshape", y, [x], [lambda g: (g.reshape(local) if inside else zeros(local, g.dtype), rest)])


def transpose(x: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """Return a view with permuted dims, by default reversed."""
    x = as_tensor(x)
    dims = tuple(range(x.ndim))[::-1] if order is None else tuple(d % x.ndim for d in order)
    y = x.data.transpose(dims)
    back = tuple(dims.index(d) for d in range(x.ndim))
    parts = [lambda term: (term[0].transpose(back), term[1].permuted(back))]
    result = record("transpose", y, [x], parts, takes_partial=True)
    if isinstance(x, Parameter):
        result.origin = x, dims
    return result


def is_plain(key: Any) -> bool:
    """Return True for an index of integers, slices, `...` and None alone."""
    items = key if isinstance(key, tuple) else (key,)
    kinds = int | np.integer | slice | EllipsisType | None
    return all(isinstance(item, kinds) and not isinstance(item, bool) for item in items)


def getitem(x: Tensor, key: Any) -> Tensor:
    """Return the elements chosen by an index; integers, slices, `...` and `None` are taken of dims that are not cut.

    Raises
    ------
    LayoutError
        If a cut dim is sliced; the message names the layout that would do.
    """
    x = as_tensor(x)
    if not is_plain(key):
        from parlinalg.autograd.functions import chosen

        return chosen(x, key)
    grid = x.grid
    items = plain_items(key, x.data)
    picks = [item for item in items if item is not None]
    layout = grid.effective(x.layout)
    cut = [
        d
        for d, (item, n) in enumerate(zip(picks, x.shape, strict=True))
        if layout.dims[d]
        and item != slice(None)
        and not (isinstance(item, slice) and range(*item.indices(n)) == range(n))
    ]
    if cut:
        mended = x.layout
        for d in cut:
            mended = mended.with_dim(d, None)
        raise LayoutError(
            f"a tensor of shape {x.shape} is sliced along dims {cut}, which {x.layout!r} cuts; mend it by "
            f".redistribute({mended!r})"
        )
    y = x.data[key]
    rest, local, dtype = x.layout.with_partial(()), x.block.shape, x.dtype
    # a slice of a whole dim means the same in the block as in the array; cut dims are taken whole
    inside = tuple(slice(None) if d is not None and layout.dims[d] else item for item, d in _with_dims(items))

    def part(g: Any) -> Any:
        out = grid.backend.zeros(local, dtype)
        if grid.inside:
            out[inside] = g
        return out, rest

    return record("getitem", y, [x], [part])


def _with_dims(items: Sequence[Any]) -> list[tuple[Any, int | None]]:
    dims = iter(range(len(items)))
    return [(item, None if item is None else next(dims)) for item in items]
