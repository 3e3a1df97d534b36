"""The local part of a product: one GEMM on this rank's blocks, now or where its result goes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend import backend_of, halves
from parlinalg.backend.blas import add_product, added
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.skinny import product
from parlinalg.plan import Plan

Block = Any
Shape = tuple[int, ...]
Order = tuple[int, ...] | None


def as_matrix(block: Block, batch: int, rows: int) -> Block:
    """Return the block as [*batch, M, K], its dims after `batch` ones merged: `rows` of them, and the rest.

    A view wherever the groups lie evenly in memory, as they do for contiguous blocks and for transposes of such.
    """
    shape = block.shape
    if len(shape) == batch + 2 and rows == 1:
        return block
    return block.reshape((*shape[:batch], math.prod(shape[batch : batch + rows]), math.prod(shape[batch + rows :])))


def gemm(x: Block, w: Block, dtype: Any, out: Block = None) -> Block:
    """Return `x @ w` of matrices (with leading batch dims) in `dtype`; products of 16-bit floats are summed in float32.

    With `out`, its float32 (or `dtype`) elements receive the product.
    """
    work = work_dtype(dtype)
    if out is None and work != dtype and x.dtype == dtype and (y := halves.product(x, w)) is not None:
        return y
    if x.dtype != work:
        x = x.astype(work)
    if w.dtype != work:
        w = w.astype(work)
    if out is not None:
        return product(x, w, out)
    y = product(x, w)
    return y if work == dtype else y.astype(dtype)


class DeferredGemm:
    """The local product of a plan, not multiplied yet: it is formed where its result goes.

    A weight's gradient goes into its place in a bucket, and is added there to that of the microbatches before: where
    the BLAS does both at once, no array of its own is written and read again.

    Parameters
    ----------
    a, b : array
        Matrices [*batch, M, K] and [*batch, K, N].
    dtype : dtype
        The dtype of the product.
    shape : tuple of int
        The shape of the product as a block: batch dims, the dims that make up M, and those that make up N.
    rows : int
        The number of dims that make up M.
    order : tuple of int, optional
        The permutation of dims under which the formed product is to lie in C order, as `DistArray.order`.  Only an
        exchange of rows and columns is heeded, which costs nothing.
    """

    __slots__ = ("a", "b", "dtype", "order", "rows", "shape")
    base = None  # not a view

    def __init__(
        self, a: Block, b: Block, dtype: np.dtype[Any], shape: Shape, rows: int = 1, order: Order = None
    ) -> None:
        self.a, self.b, self.dtype, self.shape, self.rows, self.order = a, b, dtype, shape, rows, order

    @classmethod
    def of(cls, plan: Plan, xs: Block, ws: Block, dtype: np.dtype[Any], order: Order = None) -> DeferredGemm:
        """Return the local term of y, from blocks of x and w at work."""
        nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
        shape = (*xs.shape[: nb + nm], *ws.shape[nb + nk :])
        return cls(as_matrix(xs, nb, nm), as_matrix(ws, nb, nk), dtype, shape, nm, order)

    def formed(self) -> Block:
        """Return the product in an array of its own."""
        if self.order is not None and self.order == (exchange := self._exchange):
            return self.transpose(exchange).formed().transpose(tuple(map(exchange.index, range(len(exchange)))))
        y = gemm(self.a, self.b, self.dtype)
        return y if y.shape == self.shape else y.reshape(self.shape)

    def put(self, out: Block, *, add: bool = False) -> None:
        """Write the product to an array of its shape, or add it to what that has."""
        alike = self.dtype == self.a.dtype == self.b.dtype and self.a.ndim == 2
        direct = out.flags.c_contiguous and out.dtype == self.dtype == work_dtype(self.dtype)
        if not direct or (add and not alike):
            copy_or_add(self.formed(), out, add=add)
            return
        target = out.reshape((*self.a.shape[:-1], self.b.shape[-1]))
        if not add:
            gemm(self.a, self.b, self.dtype, target)
        elif backend_of(out).adds_products:
            add_product(target, self.a, self.b)
        else:
            target += self.a @ self.b

    def part(self, dim: int, start: int, stop: int) -> DeferredGemm | None:
        """Return items `start` to `stop - 1` of a dim of the product; None unless it is the first dim of M or of N."""
        batch, shape = self.a.ndim - 2, (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if dim == batch:
            inner = math.prod(self.shape[dim + 1 : batch + self.rows])
            return DeferredGemm(self.a[..., start * inner : stop * inner, :], self.b, self.dtype, shape, self.rows)
        if dim == batch + self.rows:
            inner = math.prod(self.shape[dim + 1 :])
            return DeferredGemm(self.a, self.b[..., start * inner : stop * inner], self.dtype, shape, self.rows)
        return None

    def onto(self, start: Block) -> Block | None:
        """Return `start`, broadcast to the product's shape, plus the product; None where BLAS does not add as it
        multiplies.

        OpenBLAS adds a product to an array in no more time than it writes one, for which it writes zeros first.
        """
        if self.a.ndim > 2 or not backend_of(self.a).adds_products:
            return None
        y = backend_of(self.a).empty(self.shape, self.dtype)
        y[...] = start
        return y if added(y.reshape(self.a.shape[0], self.b.shape[1]), self.a, self.b) else None

    def transpose(self, order: tuple[int, ...]) -> Block | DeferredGemm:
        """Return the product with its dims permuted; for an exchange of rows and columns it is not formed."""
        if order != self._exchange:
            return self.formed().transpose(order)
        a, b = self.b.swapaxes(-1, -2), self.a.swapaxes(-1, -2)
        columns = len(order) - (self.a.ndim - 2) - self.rows
        return DeferredGemm(a, b, self.dtype, tuple(self.shape[d] for d in order), columns)

    @property
    def _exchange(self) -> tuple[int, ...]:
        """The permutation that exchanges rows and columns."""
        batch, ndim = self.a.ndim - 2, len(self.shape)
        return (*range(batch), *range(batch + self.rows, ndim), *range(batch, batch + self.rows))


def copy_or_add(block: Block | DeferredGemm, out: Block, *, add: bool = False) -> None:
    """Write a block, formed or not, to an array of its shape, or add it to what that has."""
    if isinstance(block, DeferredGemm):
        block.put(out, add=add)
    elif add:
        out += block
    else:
        out[...] = block
