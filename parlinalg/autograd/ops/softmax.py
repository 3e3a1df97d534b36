"""Softmax and log-softmax, over whole dims and over cut ones."""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import DistArray
from parlinalg.array.reductions import dims_of, summed
from parlinalg.autograd.arrivals import Term
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import kernels

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
        """The sums over the pieces of a row; the block's own storage is used."""
        return self._over(numbers, "sum")

    def max(self, numbers: Block) -> Block:
        """The maxima over the pieces of a row."""
        return self._over(numbers, "max")

    def _over(self, numbers: Block, op: str) -> Block:
        if self.grid.inside and any(self.grid.sizes[a] > 1 for a in self.cut):
            if not numbers.flags.c_contiguous:
                numbers = numbers.copy(order="C")
            self.grid.comm(self.cut).all_reduce(numbers, op=op)
        return numbers


def softmax(x: Any, axis: int = -1) -> Tensor:
    """exp(x) over its sum along a dim, which may be cut: two all-reduces of a number a row then."""
    x, back = _last(x, axis)
    z = summed(x.data, "softmax")
    pieces, block = Pieces(z), z.block
    top = pieces.max(kernels.row_max(block))
    scale = 1 / pieces.sum(kernels.row_exp_sum(block, top))
    y = z.like(kernels.row_exp(block, top, scale))
    q = y.block

    def part(g: Block) -> Term:
        # dx = y (g - sum of g y)
        dot = pieces.sum(kernels.row_dot(g, q)).astype(q.dtype, copy=False)
        d = g - dot[..., None]
        d *= q
        return d, z.layout

    return back(record(y, [x], [part]))


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """x - log sum exp(x) along a dim, which may be cut: two all-reduces of a number a row then."""
    x, back = _last(x, axis)
    z = summed(x.data, "log_softmax")
    pieces, block = Pieces(z), z.block
    top = pieces.max(kernels.row_max(block))
    shift = top + z.xp.log(pieces.sum(kernels.row_exp_sum(block, top)))
    zero = z.xp.zeros_like(shift)
    y = z.like((block - shift[..., None]).astype(block.dtype, copy=False))
    q = y.block

    def part(g: Block) -> Term:
        # dx = g - softmax(x) sum of g
        total = pieces.sum(z.xp.asarray(g.sum(axis=-1, dtype=shift.dtype)))
        return g - kernels.row_exp(q, zero, total), z.layout

    return back(record(y, [x], [part]))


def _last(x: Any, axis: int) -> tuple[Tensor, Any]:
    """The tensor with the dim last, and the way back."""
    x = as_tensor(x)
    (dim,) = dims_of(axis, x.ndim)
    if dim == x.ndim - 1:
        return x, lambda y: y
    order = list(range(x.ndim))
    order[dim], order[-1] = order[-1], order[dim]
    return x.transpose(order), lambda y: y.transpose(order)
