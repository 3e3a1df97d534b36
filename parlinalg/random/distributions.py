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


# ------------------------------------------------------------------ the normal distribution
# Highest power first, as Horner's rule takes them.
_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip
Ratio = tuple[tuple[float, ...], tuple[float, ...]]


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """Return x with P(X ≤ x) = p for a standard normal X, to about 1e-16.

    It takes one uniform number an element, unlike methods that take pairs or reject, so that elements stay independent
    (Wichura, Algorithm AS 241, Applied Statistics 37, 1988).

    Parameters
    ----------
    p : array of float64
        Contiguous, above 0 and below 1.
    """
    q = p - 0.5
    x = q * _ratio(_CENTRE, 0.180625 - q * q)
    outer = np.flatnonzero(np.abs(q) > 0.425)
    if outer.size:
        side = p[outer]
        r = np.sqrt(-np.log(np.minimum(side, 1.0 - side)))
        far = r > 5.0
        z = _ratio(_MIDDLE, r - 1.6)
        if far.any():
            z[far] = _ratio(_TAIL, r[far] - 5.0)
        x[outer] = np.copysign(z, q[outer])
    return x


def _ratio(ratio: Ratio, r: np.ndarray) -> np.ndarray:
    above, below = (_horner(coefficients, r) for coefficients in ratio)
    above /= below
    return above


def _horner(coefficients: tuple[float, ...], r: np.ndarray) -> np.ndarray:
    total = r * coefficients[0]
    for c in coefficients[1:-1]:
        total += c
        total *= r
    total += coefficients[-1]
    return total
