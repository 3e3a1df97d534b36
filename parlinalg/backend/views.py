"""Views of blocks: flat runs of elements, matrices of rows, and where in memory they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Block = Any


def flat_view(array: np.ndarray) -> np.ndarray:
    """Return a contiguous host array as one dim, never a copy."""
    if not array.flags.c_contiguous:
        raise ValueError(f"not C-contiguous: a host array of shape {array.shape}, strides {array.strides}")
    return array.reshape(-1)


def flat(block: Block) -> Block:
    """Return the elements of a block in C order as one dim, a view where they lie so."""
    return block.reshape(-1) if block.flags.c_contiguous else block.copy(order="C").reshape(-1)


def matrix(block: Block) -> Block:
    """Return a block as the matrix of its rows, which lie along the last dim."""
    return block.reshape((math.prod(block.shape[:-1]), block.shape[-1]))


def contiguous(block: Block, dtype: Any = None) -> Block:
    """Return a block whose elements lie in C order, of this dtype, if given; itself where it is so."""
    if dtype is not None and block.dtype != dtype:
        return block.astype(dtype, order="C")
    return block if block.flags.c_contiguous else block.copy(order="C")


def contiguous_rows(block: Block) -> Block:
    """Return a block as the C-contiguous matrix of its rows."""
    return matrix(contiguous(block))


def follows(first: Block, second: Block) -> bool:
    """Return True if `second` begins where `first` ends, in the same flat buffer."""
    return (
        first.base is second.base
        and isinstance(first.base, type(first))
        and first.base.dtype == first.dtype == second.dtype
        and first.base.flags.c_contiguous
        and first.flags.c_contiguous
        and second.flags.c_contiguous
        and address(second) == address(first) + first.nbytes
    )


def joined(blocks: Sequence[Block]) -> Block:
    """Return blocks of which each `follows` the one before it as one flat view."""
    if len(blocks) == 1:
        return flat(blocks[0])
    base = blocks[0].base
    start = (address(blocks[0]) - address(base)) // base.itemsize
    return base.reshape(-1)[start : start + sum(b.size for b in blocks)]


def view_of(
    raw: Block, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, strides: tuple[int, ...]
) -> Block:  # fmt: skip
    """Return an array as a view of bytes in host memory."""
    if isinstance(raw, np.ndarray):
        return np.ndarray(shape, dtype, raw, offset, strides)
    return raw.view_of(shape, dtype, offset, strides)


def address(block: Block) -> int:
    """Return where a block begins in its device's memory."""
    if isinstance(block, np.ndarray):
        return block.__array_interface__["data"][0]
    return int(block.data.ptr)
