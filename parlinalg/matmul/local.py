"""The local part of a product: one GEMM on this rank's blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend import backend_of, halves, namespace
from parlinalg.backend.blas import added
from parlinalg.plan import Plan

Block = Any


def as_matrix(block: Block, batch: int, rows: int) -> Block:
    """The block as [*batch, M, K]: its dims merged in two groups, after `batch` dims, `rows` of them in the first.

    A view wherever the groups lie evenly in memory, as they do for contiguous blocks and for transposes of such.
    """
    shape = block.shape
    if len(shape) == batch + 2 and rows == 1:
        return block
    return block.reshape((*shape[:batch], math.prod(shape[batch : batch + rows]), math.prod(shape[batch + rows :])))


def is_half(dtype: Any) -> bool:
    """Whether the dtype is a 16-bit float: its products are summed in float32."""
    return dtype.itemsize == 2 and dtype.kind not in "iub"


def gemm(x: Block, w: Block, dtype: Any, out: Block = None) -> Block:
    """`x @ w` of matrices (with leading batch dims) in `dtype`; products of 16-bit floats are summed in float32.

    With `out`, its float32 (or `dtype`) elements receive the product.
    """
    if out is None and is_half(dtype) and x.dtype == dtype and (y := halves.product(x, w)) is not None:
        return y
    xp = namespace(x)
    work = np.dtype(np.float32) if is_half(dtype) else dtype
    if x.dtype != work:
        x = x.astype(work)
    if w.dtype != work:
        w = w.astype(work)
    if out is not None:
        return xp.matmul(x, w, out=out)
    y = xp.matmul(x, w)
    return y if work == dtype else y.astype(dtype)


def local_product_on(plan: Plan, xs: Block, ws: Block, dtype: Any, start: Block) -> Block | None:
    """`start`, broadcast to the local term of y, plus that term; None where BLAS does not add as it multiplies.

    OpenBLAS multiplies onto what is there in no more time than onto nothing, for which it writes zeros first.
    """
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    if nb or not backend_of(xs).adds_products:
        return None
    y = np.empty((*xs.shape[:nm], *ws.shape[nk:]), dtype)
    y[...] = start
    left, right = as_matrix(xs, nb, nm), as_matrix(ws, nb, nk)
    return y if added(y.reshape(left.shape[0], right.shape[1]), left, right) else None


def local_product(plan: Plan, xs: Block, ws: Block, dtype: Any, out: Block = None) -> Block:
    """The local term of y from blocks at work; `out`, contiguous and not of 16-bit floats, receives it."""
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    left, right = as_matrix(xs, nb, nm), as_matrix(ws, nb, nk)
    into = None if out is None else out.reshape((*left.shape[:-1], right.shape[-1]))
    y = gemm(left, right, dtype, into)
    return y.reshape((*xs.shape[: nb + nm], *ws.shape[nb + nk :]))
