"""Dropout by counted random numbers: each element has the number of its index in the global array.

On a GPU the numbers are computed where they are needed, in both passes, and never kept: those of
`parlinalg.random.counter`, bit for bit: Philox 4×64 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, cuda, namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import example, kernel
from parlinalg.backend.shapes import ShapesBackend

Block = Any
Indices = range | np.ndarray
DIMS = 5
"""The most dims of a block whose numbers are computed on a GPU."""


class Counted(NamedTuple):
    """The random numbers of a block's elements: one stays if its number, of so many bits, is below the limit.

    Attributes
    ----------
    key : two int
    limit, bits : int
    lengths, first : sequence of int
        The results of `index_terms` beside the table.
    """

    key: Sequence[int]
    limit: int
    bits: int
    lengths: Sequence[int]
    first: Sequence[int]


@kernel()
def drop(block: Block, table: Block, scale: float, counted: Counted | None = None) -> Block:
    """Return the elements that stay, times `scale`, and zeros in place of the others.

    Parameters
    ----------
    table : array
        Elements that stay, of the block's shape; with `counted` the table that `index_terms` returned, on the device.
    """
    assert counted is None, "a table of places serves the device's numbers alone"
    out = namespace(block).asarray(block * table)
    out *= block.dtype.type(scale)
    return out


def draws_on_device(block: Block, ndim: int) -> bool:
    """Return True if `drop` can compute the numbers of a block like this one, of so many dims, on its device."""
    return ndim <= DIMS and cuda.ready(block)


def index_terms(
    shape: Sequence[int], indices: Sequence[Indices], start: int
) -> tuple[np.ndarray, list[int], list[int]]:
    """Return each dim's terms of an element's index in the global array: (a table for all dims, lengths, starts).

    Parameters
    ----------
    shape : sequence of int
        The global shape, of at most five dims.
    indices : sequence of range or array
        The global indices of the part, a dim.
    start : int
        The origin of the indices along the first dim.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    parts = [np.asarray(i, np.int64) * stride for i, stride in zip(indices, strides, strict=True)]
    if parts:
        parts[0] = parts[0] + start * strides[0]
    parts = [np.zeros(1, np.int64)] * (DIMS - len(parts)) + parts
    lengths = [len(p) for p in parts]
    return np.concatenate(parts), lengths, [sum(lengths[:d]) for d in range(DIMS)]


@drop.cuda(r"""
typedef unsigned long long Word;

__device__ inline Word random_word(Word count, int part, Word k0, Word k1) {
    // one of the four words of this count
    Word c0 = count, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        if (round) {
            k0 += 0x9E3779B97F4A7C15ull;
            k1 += 0xBB67AE8584CAA73Bull;
        }
        Word h0 = __umul64hi(0xD2E7470EE14C6C93ull, c0), l0 = 0xD2E7470EE14C6C93ull * c0;
        Word h1 = __umul64hi(0xCA5A826395121157ull, c2), l1 = 0xCA5A826395121157ull * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
    }
    return part == 0 ? c0 : part == 1 ? c1 : part == 2 ? c2 : c3;
}

extern "C" __global__ void pla_drop(const T* x, T* y, const Int* places, Int n, Int n1, Int n2, Int n3, Int n4,
                                    Int p1, Int p2, Int p3, Int p4, Word k0, Word k1, Word limit, int bits, W scale) {
    // y = x * scale where the element's number is below the limit, else 0; places: for every dim its indices' part of
    // the element's index in the whole array, those of dim d from p_d
    Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Int rest = i, e = places[p4 + rest % n4];
    rest /= n4;
    e += places[p3 + rest % n3];
    rest /= n3;
    e += places[p2 + rest % n2];
    rest /= n2;
    e += places[p1 + rest % n1];
    e += places[rest / n1];
    int each = 64 / bits, at = (int)(e % (4 * each));
    Word word = random_word((Word)(e / (4 * each)) + 1, at / each, k0, k1);
    Word number = (word >> (bits * (at % each))) & (((Word)1 << bits) - 1);
    y[i] = number < limit ? (T)((W)x[i] * scale) : (T)(W)0;
}
""")
def _(block: Block, table: Block, scale: float, counted: Counted | None = None) -> Block:
    if counted is None:
        return NotImplemented
    xp = namespace(block)
    x = xp.ascontiguousarray(block)
    out = xp.empty(x.shape, x.dtype)
    cuda.launch_kernel(
        "drop", x, (-(-out.size // tunables.CUDA_THREADS),), x, out, table, np.int64(out.size),
        *map(np.int64, counted.lengths[1:]), *map(np.int64, counted.first[1:]), *map(np.uint64, counted.key),
        np.uint64(counted.limit), np.int32(counted.bits), work_dtype(x.dtype).type(x.dtype.type(scale)),
    )  # fmt: skip
    return out


@drop.shapes
def _(device: ShapesBackend, block: Block, table: Block, scale: float, counted: Counted | None = None) -> Block:
    out = device.empty(block.shape, block.dtype)
    device.kernel("dropout.drop", 2 * out.nbytes + table.nbytes, out.size, out.dtype)
    return out


def _try_drop(x: Block) -> Block:
    key, limit = (7, 11), 45000
    backend = backend_of(x)
    if draws_on_device(x, x.ndim):
        table, *where = index_terms(x.shape, tuple(map(range, x.shape)), 0)
        return drop(x, backend.from_host(table), 1.25, Counted(key, limit, 16, *where))
    words = np.random.Philox(key=np.array(key, np.uint64), counter=0).random_raw(-(-x.size // 4))
    stays = words.astype("<u8", copy=False).view("<u2")[: x.size].reshape(x.shape) < limit
    return drop(x, backend.from_host(stays), 1.25)


example("dropout", _try_drop, "x")
