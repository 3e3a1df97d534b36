"""From random words to numbers: the block of an array whose elements are made of a word each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg import tunables
from parlinalg.array import DistArray
from parlinalg.array.shapes import shape_of
from parlinalg.comm.check import compare
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.random.counter import RandomStream, Words, block_words
from parlinalg.redistribute import check_given, fitting, redistribute

Fill = Callable[[tuple[int, ...], Sequence[range], np.ndarray], None]
"""Writes the elements of a block, flat: its arguments are the global shape, the block's ranges and the block."""


def drawn(
    convert: Callable[..., np.ndarray], bits: int, shape: int | Sequence[int], grid: Grid, layout: Layout,
    dtype: np.dtype[Any], stream: np.ndarray, start: int,
) -> DistArray:  # fmt: skip
    """Return the array of the elements that `convert` makes of their words, tile by tile.  For `parlinalg.random`."""

    def fill(shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray) -> None:
        for place, words in block_words(RandomStream(stream, bits), shape, ranges, start):
            flat[place : place + len(words)] = convert(words)

    return keyed(fill, shape, grid, layout, dtype, stream, start)


def keyed(
    fill: Fill, shape: int | Sequence[int], grid: Grid, layout: Layout, dtype: np.dtype[Any], stream: np.ndarray,
    start: int,
) -> DistArray:  # fmt: skip
    """Return the array whose blocks `fill` writes from the words of this stream."""
    keys = {"the key of seed, name, call and step": stream.tolist(), "start": start}
    right = "all ranks draw with the same seed, name, call, step and bounds"
    return filled("parlinalg.random", fill, shape, grid, layout, dtype, right, keys)


def filled(
    what: str, fill: Fill, shape: int | Sequence[int], grid: Grid, layout: Layout, dtype: np.dtype[Any], right: str,
    facts: dict[str, Any], *, always: bool = False,
) -> DistArray:  # fmt: skip
    """Return the array whose blocks `fill` writes.

    Parameters
    ----------
    what, right
        The call, and what is right, for the message of an error.
    facts : dict
        Values that are equal on all ranks: compared in checked mode, or `always`, before anything is drawn.
    """
    shape = shape_of(shape)
    cut = fitting(layout, shape, grid).with_partial(())
    if always and grid.inside:
        compare(grid.everyone, what, {"shape": list(shape), "layout": repr(layout), **facts}, right, always=True)
    ranges = grid.block(cut, shape)
    lengths = tuple(len(r) for r in ranges)
    if not grid.backend.values:
        block = grid.backend.empty(lengths, dtype)
        return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)
    flat = np.empty(math.prod(lengths), dtype)
    if grid.inside:
        fill(shape, ranges, flat)
    block = grid.backend.from_host(flat.reshape(lengths))
    check_given(what, block, cut, shape, grid, right, **facts)
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def float_dtype(dtype: DTypeLike, what: str) -> np.dtype[Any]:
    """Return the dtype of floating-point numbers to be drawn, in this machine's byte order."""
    dtype = np.dtype(dtype)
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise TypeError(f"random.{what} makes float16, bfloat16, float32 or float64, not {dtype}")
    return dtype


# ------------------------------------------------------------------ from words to numbers
def unit(words: Words, digits: int = 53) -> np.ndarray:
    """Return numbers from 0 to below 1, of so many binary digits."""
    u = (words >> np.uint64(64 - digits)).astype(np.float64)
    u *= 2.0**-digits
    return u


def open_unit(words: Words) -> np.ndarray:
    """Return numbers above 0 and below 1, of 53 binary digits, u and 1 - u equally likely."""
    u = (words >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52  # exact, and so is 1 - u: the two tails are alike
    return u


def write_integers(
    key_of: Callable[[int], np.ndarray], shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray,
    low: int | np.ndarray, most: int | np.ndarray,
) -> None:  # fmt: skip
    """Write integers from `low` to `low + most`, all equally likely, to the block `flat`.

    A word that does not belong to a whole period of the integers is rejected, and the element's word of the next
    stream is taken instead: so it stays a function of the element's index.

    Parameters
    ----------
    key_of : callable
        The key of the stream for each round of rejections.
    low, most : int, or array of uint64 for the elements of the block
        Below 0, `low` is given modulo 2⁶⁴.
    """
    alike = isinstance(most, int) and isinstance(low, int)
    bits = 32 if isinstance(most, int) and most < 1 << 32 else 64
    base = np.uint64(low % (1 << 64)) if isinstance(low, int) else low

    def settle(places: slice | np.ndarray, words: Words) -> np.ndarray:
        """Write what these words give; return which of them are rejected."""
        values, rejected = _folded(words, most if isinstance(most, int) else most[places])
        offset = base if isinstance(base, np.uint64) else base[places]
        flat[places] = (values + offset).astype(flat.dtype) if not alike or low else values.astype(flat.dtype)
        return rejected

    left = []
    for place, words in block_words(RandomStream(key_of(0), bits), shape, ranges):
        rejected = settle(slice(place, place + len(words)), words)
        if rejected.size:
            left.append(place + rejected)
    places = np.concatenate(left) if left else np.zeros(0, np.intp)
    again = 0
    while places.size:
        again += 1
        stream = RandomStream(key_of(again), bits)
        places = places[settle(places, words_at(stream, numbers_of(places, shape, ranges)))]


def _folded(words: Words, most: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return words modulo `most` + 1, as uint64, and which of them lie beyond the last whole period."""
    bits = 8 * words.dtype.itemsize
    none = np.zeros(0, np.intp)
    if isinstance(most, int):
        rest = (1 << bits) % (most + 1)
        values = words if most + 1 == 1 << bits else words % words.dtype.type(most + 1)
        rejected = np.flatnonzero(words >= words.dtype.type((1 << bits) - rest)) if rest else none
        return values.astype(np.uint64, copy=False), rejected
    span = most + np.uint64(1)  # 0 stands for 2⁶⁴
    period = np.where(span == 0, np.uint64(1), span)
    over = (np.uint64(0) - period) % period
    values = np.where(span == 0, words, words % period)
    return values, np.flatnonzero((over > 0) & (words >= np.uint64(0) - over))


def numbers_of(places: np.ndarray, shape: tuple[int, ...], ranges: Sequence[range]) -> np.ndarray:
    """Return the numbers in the global array, in C order, of elements given by their places in a block."""
    if not shape or not places.size:
        return places
    at = np.unravel_index(places, tuple(len(r) for r in ranges))
    return np.ravel_multi_index(tuple(i + r.start for i, r in zip(at, ranges, strict=True)), shape)


def words_at(stream: RandomStream, numbers: np.ndarray) -> Words:
    """Return the words of these numbers, which ascend."""
    apart = (np.diff(numbers) > tunables.RANDOM_JUMP) | (np.diff(numbers // tunables.RANDOM_TILE) > 0)
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(numbers)]
    found = []
    for first, stop in pairwise(edges):
        begin = int(numbers[first])
        found.append(stream.take(begin, int(numbers[stop - 1]) + 1 - begin)[numbers[first:stop] - begin])
    return np.concatenate(found)
