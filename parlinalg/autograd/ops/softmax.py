"""Softmax and log-softmax, over whole dims and over cut ones."""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import DistArray
from parlinalg.array.reductions import sorted_dims, summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.kernels import rows

Block = Any


class Pieces:
    """Numbers that belong to the rows of an array, of which a rank may hold a piece: the last dim may be cut.

    Attributes
    ----------
    lead : tuple of str
        The axes that cut the other dims.
    """

    def __init__(self, z: DistArray) -> None:
        self.cut = z.layout.dims[-1]
        self.lead = tuple(a for dim in z.layout.dims[:-1] for a in dim)
        self.grid = z.grid

    def sum(self, numbers: Block) -> Block:
        """Return the sums over the pieces of a row; the block's own storage is used."""
        return self._over(numbers, "sum")

    def max(self, numbers: Block) -> Block:
        """Return the maxima over the pieces of a row."""
        return self._over(numbers, "max")

    def _over(self, numbers: Block, op: str) -> Block:
        if self.grid.inside and any(self.grid.sizes[a] > 1 for a in self.cut):
            if not numbers.flags.c_contiguous:
                numbers = numbers.copy(order="C")
            self.grid.comm(self.cut).all_reduce(numbers, op=op)
        return numbers


def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return exp(x) over its sum along a dim, which may be cut: two all-reduces of a number a row then."""
    x, back = _last(x, axis)
    z = summed(x.data, "softmax")
    pieces, block = Pieces(z), z.block
    top = pieces.max(rows.row_max(block))
    scale = 1 / pieces.sum(rows.row_exp_sum(block, top))
    y, rest = z.like(rows.row_exp(block, top, scale)), z.layout

    def part(g: Block, y: Block) -> Term:
        # dx = y (g - sum of g y)
        dot = pieces.sum(rows.row_dot(g, y)).astype(y.dtype, copy=False)
        d = g - dot[..., None]
        d *= y
        return d, rest

    return back(record("softmax", y, [x], [Part(part, y.block)]))


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Return x - log sum exp(x) along a dim, which may be cut: two all-reduces of a number a row then."""
    x, back = _last(x, axis)
    z = summed(x.data, "log_softmax")
    pieces, block = Pieces(z), z.block
    top = pieces.max(rows.row_max(block))
    shift = top + z.xp.log(pieces.sum(rows.row_exp_sum(block, top)))
    y = z.like((block - shift[..., None]).astype(block.dtype, copy=False))
    xp, rest, work = z.xp, z.layout, shift.dtype

    def part(g: Block, y: Block) -> Term:
        # dx = g - softmax(x) sum of g
        total = pieces.sum(xp.asarray(g.sum(axis=-1, dtype=work)))
        return g - rows.row_exp(y, xp.zeros_like(total), total), rest

    return back(record("log_softmax", y, [x], [Part(part, y.block)]))


def _last(x: Any, axis: int) -> tuple[Tensor, Any]:
    """Return the tensor with the dim last, and the way back."""
    x = as_tensor(x)
    (dim,) = sorted_dims(axis, x.ndim)
    if dim == x.ndim - 1:
        return x, lambda y: y
    order = list(range(x.ndim))
    order[dim], order[-1] = order[-1], order[dim]
    return x.transpose(order), lambda y: y.transpose(order)
