"""Sums, means and maxima over dims; over a cut dim they communicate, since their meaning is a sum over it."""

from __future__ import annotations

import math
from typing import Any

from parlinalg.array.align import unmoved
from parlinalg.array.core import Axis
from parlinalg.array.reductions import sorted_dims
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.arithmetic import Frame, block_sum
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import namespace
from parlinalg.layout import Layout
from parlinalg.redistribute import redistribute

Block = Any


def _spread(grad: Block, local: tuple[int, ...], rest: Layout, dims: tuple[int, ...], scale: float = 1) -> Term:
    """Return the gradient of a sum over `dims`, for every element summed, in a block of shape `local`."""
    xp = namespace(grad)
    kept = tuple(1 if d in dims else n for d, n in enumerate(local))
    g = xp.asarray(grad).reshape(kept) if math.prod(kept) == grad.size else xp.zeros(kept, grad.dtype)
    if scale != 1:
        g = g * scale
    out = xp.empty(local, g.dtype)  # a broadcast view of one item would be the gradient itself
    out[...] = g
    return out, rest


def sum(x: Any, axis: Axis = None, keepdims: bool = False, *, partial: bool = False) -> Tensor:
    """Return the sum over dims (default: all).

    Parameters
    ----------
    partial : bool
        Leave the sum over cut dims partial over the axes that cut them.
    """
    x = as_tensor(x)
    dims = sorted_dims(axis, x.ndim)
    y = x.data.sum(dims, keepdims=keepdims, partial=partial)
    local, rest = x.block.shape, x.layout.with_partial(())
    return record("sum", y, [x], [lambda g: _spread(g, local, rest, dims)])


def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over dims (default: all)."""
    x = as_tensor(x)
    dims = sorted_dims(axis, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    if not count:
        raise ValueError(f"mean over dims {dims} of a tensor of shape {x.shape}, which has no elements there")
    scale = 1 / count
    local, rest = x.block.shape, x.layout.with_partial(())
    y = x.data.sum(dims, keepdims=keepdims) * scale
    return record("mean", y, [x], [lambda g: _spread(g, local, rest, dims, scale)])


def max(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest elements over dims (default: all); equal ones share the gradient evenly."""
    return _extreme("max", x, axis, keepdims)


def min(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest elements over dims (default: all); equal ones share the gradient evenly."""
    return _extreme("min", x, axis, keepdims)


def _extreme(name: str, x: Any, axis: Axis, keepdims: bool) -> Tensor:
    x = as_tensor(x)
    dims = sorted_dims(axis, x.ndim)
    with unmoved():
        y = getattr(x.data, name)(dims, keepdims=keepdims)
    frame, local = Frame.of(x), x.block.shape

    def part(g: Block, block: Block, top: Block) -> Term:
        largest, _ = _spread(top, local, frame.layout, dims)
        found = (block == largest).astype(block.dtype)
        count = _total(found, frame, dims)
        share, _ = _spread(g, local, frame.layout, dims)
        return share * found / count, frame.layout

    return record(name, y, [x], [Part(part, x.block, y.block)])


def _total(block: Block, x: Frame, dims: tuple[int, ...]) -> Block:
    """Return the sum over dims of a block that lies as x's, complete over the axes that cut them; dims are kept."""
    layout = x.layout
    shape = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    over = tuple(a for d in dims for a in layout.dims[d])
    for d in dims:
        layout = layout.with_dim(d, None)
    terms = layout.with_partial(over)
    return redistribute(block_sum(block, dims, keepdims=True), terms, layout, shape, x.grid, owned=True)
