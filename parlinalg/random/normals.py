"""Normally distributed numbers of random words: a ziggurat for many, the quantile for one word an element.

The ziggurat covers the right half of the density by 256 layers of the same area (Marsaglia and Tsang, The Ziggurat
Method for Generating Random Variables, Journal of Statistical Software 5, 2000).  A word chooses a layer, a sign and a
place in it; 99.3% of the places lie under the curve at any height of the layer and are the numbers.  The others take
further words, which belong to their index alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import compiled
from parlinalg.backend.compiled import loop
from parlinalg.random.counter import RandomStream, Words, block_words, philox
from parlinalg.random.distributions import numbers_of, open_unit

LAYERS = 256
BASE = Decimal("3.6541528853610087716454297203995157629749")
"""The beginning of the tail with which the last of 256 layers ends at the top of the curve."""
AREA = Decimal("0.0049286732339746553473617754023360280691354")
"""The area of a layer under exp(-x²/2): of the lowest one with the tail."""
TAIL = math.erfc(float(BASE) / math.sqrt(2)) / 2
"""The probability of a number above `BASE`."""
CHUNK = 1 << 13
"""Numbers made at a time: few enough to stay in the cache with what is computed from them."""


@cache
def layers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the layers from the lowest to the highest, correctly rounded: the same on every machine.

    Returns
    -------
    scale : array, [256]
        The half widths of the layers over 2⁵²; of the lowest one that of a rectangle of the same area.
    inner : array, [256]
        The half widths of what lies under the curve at any height of the layer.
    curve : array, [257]
        exp(-x²/2) at the half widths, where the layers begin, and 1.
    """
    with localcontext(Context(prec=40)):
        edges, curve = [BASE], [(-BASE * BASE / 2).exp()]
        for _ in range(LAYERS - 2):
            curve.append(curve[-1] + AREA / edges[-1])
            edges.append((-2 * curve[-1].ln()).sqrt())
        widths = [AREA / curve[0], *edges]
        return (
            np.array([float(w) for w in widths]) * 2.0**-52,
            np.array([*(float(x) for x in edges), 0.0]),
            np.array([0.0, *(float(y) for y in curve), 1.0]),
        )


def write_normals(
    key: np.ndarray, shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray, loc: Any = 0.0,
    scale: Any = 1.0, start: int = 0,
) -> None:  # fmt: skip
    """Write normally distributed numbers to the block `flat`.

    Parameters
    ----------
    key : array of two uint64
        That of the stream.
    loc, scale : float, or array of float64 for the elements of the block
        Mean and standard deviation.
    start : int
        As of `block_words`.
    """

    def write(places: slice | np.ndarray, x: np.ndarray) -> None:
        x *= scale[places] if isinstance(scale, np.ndarray) else scale
        x += loc[places] if isinstance(loc, np.ndarray) else loc
        flat[places] = x

    plain = not isinstance(loc, np.ndarray) and not isinstance(scale, np.ndarray) and loc == 0 and scale == 1
    direct = flat.dtype == np.float64
    spare, at, edge, out = np.empty(CHUNK), np.empty(CHUNK, np.int64), np.empty(CHUNK), np.empty(CHUNK, np.bool_)
    left: list[tuple[np.ndarray, ...]] = []
    for place, words in _chunks(block_words(RandomStream(key), shape, ranges, start)):
        n = len(words)
        tile = slice(place, place + n)
        x = flat[tile] if direct else spare[:n]
        some, layer = drawn(words, x, at[:n], edge[:n], out[:n])
        if some.size:
            left.append((place + some, layer, x[some]))
        if not direct or not plain:
            write(tile, x)
    if not left:
        return
    places, layer, x = (np.concatenate(part) for part in zip(*left, strict=True))
    for i in range(0, len(places), CHUNK):
        part = slice(i, i + CHUNK)
        numbers = numbers_of(places[part], shape, ranges) + start * math.prod(shape[1:])
        write(places[part], settled(key, numbers, layer[part], x[part]))


def _chunks(tiles: Iterator[tuple[int, Words]]) -> Iterator[tuple[int, Words]]:
    for place, words in tiles:
        for i in range(0, len(words), CHUNK):
            yield place + i, words[i : i + CHUNK]


def drawn(
    words: Words, x: np.ndarray, at: np.ndarray, edge: np.ndarray, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Write to `x` the places that words choose; return which may lie above the curve, and their layers.

    The lowest 8 bits of a word are the layer, the highest 53 the place in it.  The other arrays are overwritten.
    """
    scale, inner, _ = layers()
    signed = words.view(np.int64)
    if len(words) >= tunables.COMPILED_SIZE and compiled.available():
        some = at[: _drawn_loop(signed, scale, inner, x, at)].copy()
        return some, signed[some] & (LAYERS - 1)
    np.right_shift(signed, 11, out=at)
    np.add(at, 0.5, out=x)  # exact: both sides are alike
    np.bitwise_and(signed, LAYERS - 1, out=at)
    x *= scale.take(at, out=edge, mode="clip")
    inner.take(at, out=edge, mode="clip")
    some = np.flatnonzero(np.greater_equal(np.abs(x), edge, out=out))
    return some, at[some]


@loop()
def _drawn_loop(words: Any, scale: Any, inner: Any, x: Any, some: Any) -> Any:
    """x = the places that words choose; some = where they may lie above the curve, of which it returns the number."""
    n = 0
    for i in range(words.shape[0]):
        layer = words[i] & 255
        place = ((words[i] >> 11) + 0.5) * scale[layer]
        x[i] = place
        some[n] = i
        n += abs(place) >= inner[layer]
    return n


def settled(key: np.ndarray, numbers: np.ndarray, layer: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the numbers of the elements whose first places may lie above the curve.

    An element has the four words of the counter that is its number and how often it has come here: a height at its
    place, a new place if that lies above the curve, and both once more.

    Parameters
    ----------
    numbers : array of int
        The numbers of the elements in the global array.
    layer, x : array
        Their layers and places.
    """
    x, layer, again = x.copy(), layer.copy(), 0
    left = np.arange(len(x))
    while left.size:
        again += 1
        words = philox(key, numbers[left], again)
        for i in (0, 2):
            x[left], under = raised(layer[left], x[left], words[i])
            left, words = left[~under], words[:, ~under]
            n = len(left)
            new = np.empty(n)
            above, which = drawn(words[i + 1], new, np.empty(n, np.int64), np.empty(n), np.empty(n, np.bool_))
            x[left] = new
            left, words = left[above], words[:, above]
            layer[left] = which
    return x


def raised(layer: np.ndarray, x: np.ndarray, words: Words) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers at places of layers, and which of them lie under the curve at heights that words choose.

    In the lowest layer they are those of the tail, which words choose by the quantile.
    """
    u = open_unit(words)
    curve = layers()[2]
    low = curve[layer]
    under = low + u * (curve[layer + 1] - low) < np.exp(-0.5 * x * x)
    base = np.flatnonzero(layer == 0)
    x, under[base] = x.copy(), True
    x[base] = np.copysign(normal_quantile(TAIL * u[base]), x[base])
    return x, under


# ------------------------------------------------------------------ the quantile
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
