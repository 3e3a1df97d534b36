"""Dropout on a GPU: which elements stay is computed where it is needed, in both passes, and never kept.

The numbers are those of `parlinalg.random.counter`, bit for bit: Philox 4×64 with ten rounds (Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), each element by its index in the global array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Indices = range | np.ndarray
DIMS = 5

SOURCE = r"""
// ---------------------------------------------------------------- dropout, by counted random numbers

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
"""


def places(shape: Sequence[int], indices: Sequence[Indices], start: int) -> tuple[np.ndarray, list[int], list[int]]:
    """What the elements of a part add up to their index in the global array from: (places, lengths, first places).

    Parameters
    ----------
    shape : sequence of int
        The global shape, of at most five dims.
    indices : sequence of range or array
        The global indices of the part, a dim.
    start : int
        What indices along the first dim are counted from.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    parts = [np.asarray(i, np.int64) * stride for i, stride in zip(indices, strides, strict=True)]
    if parts:
        parts[0] = parts[0] + start * strides[0]
    parts = [np.zeros(1, np.int64)] * (DIMS - len(parts)) + parts
    lengths = [len(p) for p in parts]
    return np.concatenate(parts), lengths, [sum(lengths[:d]) for d in range(DIMS)]
