"""Random words by counting: word i of a stream depends on the stream's key and on i alone.

The generator is Philox 4×64 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", 2011).  Every element of a global array takes its own word, numbered by its flat index in C order, so that a rank
computes exactly its block and no cut changes a bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import compiled
from parlinalg.backend.compiled import high_product, inlined, loop
from parlinalg.errors import ConfigError, brief

Words = np.ndarray


def check_seed(seed: Any) -> int:
    """Return a seed as an integer.

    Raises
    ------
    ConfigError
        If it is not a whole number from 0 to 2⁶⁴ − 1.
    """
    try:
        found = -1 if isinstance(seed, bool) else index(seed)
    except TypeError:
        found = -1
    if not 0 <= found < 1 << 64:
        raise ConfigError(f"a seed is a whole number of at least 0 and below 2⁶⁴, not {brief(seed)}")
    return found


def stream_key(seed: int, name: str = "", call: int = 0, step: int = 0) -> np.ndarray:
    """Return the key of the stream for this seed, name, number of call and step: 128 bits of a hash, as two uint64."""
    label = json.dumps([check_seed(seed), str(name), int(call), int(step)])
    return np.frombuffer(hashlib.blake2b(label.encode(), digest_size=16).digest(), "<u8").astype(np.uint64)


class RandomStream:
    """The words of one key.

    Parameters
    ----------
    key : array of two uint64
    bits : {64, 32}
        The width of a word.
    """

    def __init__(self, key: np.ndarray, bits: int = 64) -> None:
        self._key = tuple(key)
        self._philox = np.random.Philox(key=key, counter=0)
        self._dtype = np.dtype(f"<u{bits // 8}")
        self._each = 256 // bits  # words a count
        self._at = 0

    def take(self, start: int, n: int) -> Words:
        """Return the words `start` to `start + n - 1`."""
        first, last = start // self._each, -(-(start + n) // self._each)
        skip = start - first * self._each
        if n >= tunables.COMPILED_SIZE and compiled.available():
            words = np.empty((last - first, 4), np.uint64)
            _words_loop(*self._key, np.uint64(first), words)
            return words.reshape(-1).astype("<u8", copy=False).view(self._dtype)[skip : skip + n]
        if first != self._at:
            self._philox.advance(first - self._at)
        raw: np.ndarray = self._philox.random_raw(4 * (last - first))
        self._at = last
        return raw.astype("<u8", copy=False).view(self._dtype)[skip : skip + n]


def philox(key: np.ndarray, numbers: np.ndarray, again: int) -> Words:
    """Return the four words of each of the counters (number, 0, 0, again), [4, number]; `RandomStream` has again = 0.

    For single numbers far apart, where to make and drop the words between them would cost more.
    """
    a = numbers.astype(np.uint64)
    if a.size >= tunables.COMPILED_SIZE // 16 and compiled.available():
        words = np.empty((4, a.size), np.uint64)
        _philox_loop(*key, a, np.uint64(again), words)
        return words
    b, c, d = (np.full(a.shape, n, np.uint64) for n in (0, 0, again))
    k0, k1 = (int(k) for k in key)
    for _ in range(10):
        (high_a, low_a), (high_c, low_c) = _product(a, 0xD2E7470EE14C6C93), _product(c, 0xCA5A826395121157)
        a, b, c, d = high_c ^ b ^ np.uint64(k0), low_c, high_a ^ d ^ np.uint64(k1), low_a
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % (1 << 64), (k1 + 0xBB67AE8584CAA73B) % (1 << 64)
    return np.stack([a, b, c, d])


def _product(a: np.ndarray, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and the low 64 bits of a product."""
    half, mask = np.uint64(32), np.uint64((1 << 32) - 1)
    b0, b1 = np.uint64(b & 0xFFFFFFFF), np.uint64(b >> 32)
    a0, a1 = a & mask, a >> half
    middle = ((a0 * b0) >> half) + a0 * b1
    other = (middle & mask) + a1 * b0
    return a1 * b1 + (middle >> half) + (other >> half), a * np.uint64(b)


# numba takes an operation of uint64 and a plain integer for one of floats
_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_NONE, _ONE = np.uint64(0), np.uint64(1)


@inlined
def _rounds(k0: Any, k1: Any, a: Any, d: Any) -> Any:
    """Return the four words of the counter (a, 0, 0, d)."""
    b, c = _NONE, _NONE
    for _ in range(10):
        a, b, c, d = (
            high_product(c, _FACTORS[1]) ^ b ^ k0,
            c * _FACTORS[1],
            high_product(a, _FACTORS[0]) ^ d ^ k1,
            a * _FACTORS[0],
        )
        k0, k1 = k0 + _STEPS[0], k1 + _STEPS[1]
    return a, b, c, d


@loop()
def _words_loop(k0: Any, k1: Any, first: Any, out: Any) -> None:
    """out[i] = the words of the counter after `first` + i, as NumPy's generator has them."""
    count = first
    for i in range(out.shape[0]):
        count += _ONE
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = _rounds(k0, k1, count, _NONE)


@loop()
def _philox_loop(k0: Any, k1: Any, numbers: Any, again: Any, out: Any) -> None:
    """out[:, i] = the words of the counter (numbers[i], 0, 0, again)."""
    for i in range(numbers.shape[0]):
        out[0, i], out[1, i], out[2, i], out[3, i] = _rounds(k0, k1, numbers[i], again)


def block_words(
    stream: RandomStream, shape: Sequence[int], block: Sequence[range], start: int = 0
) -> Iterator[tuple[int, Words]]:
    """Yield the words of a block's elements in C order, a tile at a time: (index of the first, words).

    Parameters
    ----------
    shape : sequence of int
        The global shape.
    block : sequence of range
        For each dim the global indices in the block.
    start : int
        The origin of the indices along the first dim, where the array is itself a part of a longer one.
    """
    if not math.prod(len(r) for r in block):
        return
    shift = start * math.prod(shape[1:])
    cut = max((d for d, r in enumerate(block) if len(r) != shape[d]), default=0)
    width = math.prod(shape[cut + 1 :])
    row = width * (shape[cut] if shape else 1)
    run, inside = (width * len(block[cut]), width * block[cut].start) if shape else (1, 0)
    if row == run:
        yield from _line(stream, shift, row, 0)
        return
    rows = _rows(shape[:cut], block[:cut])
    if row - run > tunables.RANDOM_JUMP or row > tunables.RANDOM_TILE:
        for i, r in enumerate(rows.tolist()):
            yield from _line(stream, shift + r * row + inside, run, i * run)
        return
    most = max(1, tunables.RANDOM_TILE // row)
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for first, stop in pairwise(edges):  # rows that lie one after the other in the global array
        for i in range(first, stop, most):
            n = min(most, stop - i)
            words = stream.take(shift + int(rows[i]) * row, n * row).reshape(n, row)
            yield i * run, np.ascontiguousarray(words[:, inside : inside + run]).reshape(-1)


def _line(stream: RandomStream, start: int, n: int, place: int) -> Iterator[tuple[int, Words]]:
    for at in range(0, n, tunables.RANDOM_TILE):
        yield place + at, stream.take(start + at, min(tunables.RANDOM_TILE, n - at))


def _rows(shape: Sequence[int], block: Sequence[range]) -> np.ndarray:
    """Return the flat indices of the block's elements in an array of this shape, ascending."""
    indices = (np.arange(r.start, r.stop, dtype=np.int64) for r in block)
    pairs = zip(indices, shape, strict=True)
    return reduce(lambda flat, pair: (flat[:, None] * pair[1] + pair[0]).reshape(-1), pairs, np.zeros(1, np.int64))
