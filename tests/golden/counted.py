"""The random numbers of the library said again, with whole numbers of plain Python: no NumPy, and nothing of parlinalg.

Philox 4×64 with ten rounds is written from the paper (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011); NumPy's generator begins with the counter at 1.  Word i of an array's stream is that of element i in C order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal, localcontext
from functools import cache
from statistics import NormalDist

FULL = 2**64 - 1
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """The four words of one count."""
    c = [(counter >> 64 * i) & FULL for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        a, b = MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]
        c = [(b >> 64) ^ c[1] ^ k0, b & FULL, (a >> 64) ^ c[3] ^ k1, a & FULL]
        k0, k1 = (k0 + WEYL[0]) & FULL, (k1 + WEYL[1]) & FULL
    return c


@cache
def hashed(seed: int, name: str = "", call: int = 0, step: int = 0) -> tuple[int, int]:
    """The key of a stream."""
    digest = hashlib.blake2b(json.dumps([seed, name, call, step]).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def words(key: tuple[int, int], bits: int, start: int, n: int) -> list[int]:
    """Words start to start + n - 1, of so many bits each: of a word of 64 the lowest bits come first."""
    each, found = 256 // bits, []
    for count in range(start // each, -(-(start + n) // each)):
        whole = sum(word << 64 * i for i, word in enumerate(philox(count + 1, key)))
        found += [(whole >> bits * i) & (2**bits - 1) for i in range(each)]
    return found[start % each :][:n]


def uniform(key: tuple[int, int], n: int, low: float, high: float) -> list[float]:
    return [float(w >> 11) * (2.0**-53 * (high - low)) + low for w in words(key, 64, 0, n)]


@cache
def ziggurat() -> tuple[list[float], list[float], float]:
    """Half widths of 256 layers and 0, the curve at them and 1, and the probability of the tail.

    All layers have the area of the lowest one with the tail; where that begins is found by bisection.
    """

    def built(base: Decimal) -> tuple[list[Decimal], list[Decimal]]:
        fraction = base
        for k in range(600, 0, -1):  # the tail as a continued fraction
            fraction = base + k / fraction
        y = (-base * base / 2).exp()
        area = base * y + y / fraction
        x, curve = [area / y, base], [y, y]
        while curve[-1] + area / x[-1] < 1 and len(x) < 256:
            curve.append(curve[-1] + area / x[-1])
            x.append((-2 * curve[-1].ln()).sqrt())
        return x, [*curve, curve[-1] + area / x[-1]]

    with localcontext(Context(prec=34)):
        low, high = Decimal("3.6"), Decimal("3.7")
        while high - low > Decimal("1e-26"):
            middle = (low + high) / 2
            x, curve = built(middle)
            low, high = (middle, high) if len(x) < 256 or curve[-1] > 1 else (low, middle)
        assert len(x) == 256
        assert abs(curve[-1] - 1) < Decimal("1e-22")
    widths = [float(w) for w in x]
    return [*widths, 0.0], [0.0, *(float(y) for y in curve[1:-1]), 1.0], math.erfc(widths[1] / math.sqrt(2)) / 2


def normal(key: tuple[int, int], n: int) -> list[float]:
    """Marsaglia and Tsang, 2000; an element that needs more words has those of the counters (i, 0, 0, 1), …"""
    x, curve, tail = ziggurat()

    def number(i: int, word: int) -> float:
        further = (w for again in range(1, 99) for w in philox(i + (again << 192), key))
        while True:
            layer = word & 255
            signed = (word >> 11) - ((word >> 63) << 53)
            z = (signed + 0.5) * (x[layer] * 2.0**-52)
            if abs(z) < x[layer + 1]:
                return z
            u = ((next(further) >> 12) + 0.5) * 2.0**-52
            if not layer:
                return math.copysign(NormalDist().inv_cdf(tail * u), z)
            if curve[layer] + u * (curve[layer + 1] - curve[layer]) < math.exp(-0.5 * z * z):
                return z
            word = next(further)

    return [number(i, word) for i, word in enumerate(words(key, 64, 0, n))]


def integers(key: tuple[int, int], n: int, low: int, high: int) -> list[int]:
    return [low + (w * (high - low) >> 32) for w in words(key, 32, 0, n)]


def kept(key: tuple[int, int], bits: int, p: float, start: int, n: int) -> tuple[list[bool], float]:
    """Which elements stay, with probability p to so many bits; and that probability as it is."""
    limit = round(p * 2**bits)
    return [w < limit for w in words(key, bits, start, n)], limit / 2**bits


def dropout(seed: int, name: str, step: int, p: float, shape: Sequence[int], start: int = 0) -> list[float]:
    """What `nn.Dropout` multiplies the elements of the rows from `start` on by, in C order."""
    bits = 16 if 2**-8 <= p <= 1 - 2**-8 else 32
    stay, q = kept(hashed(seed, name, 0, step), bits, 1 - p, start * math.prod(shape[1:]), math.prod(shape))
    return [1 / q if s else 0.0 for s in stay]


def permutation(seed: int, epoch: int, n: int) -> list[int]:
    """`parlinalg.random.permutation`: the stable order of n words."""
    drawn = words(hashed(seed, "permutation", 0, epoch), 64, 0, n)
    return sorted(range(n), key=drawn.__getitem__)


def shuffled(key: tuple[int, int], n: int) -> list[int]:
    """`numpy.random.Generator(numpy.random.Philox(key=…)).permutation(n)`: Fisher and Yates, by rejection."""

    def halves() -> Iterator[int]:
        count = 1
        while True:
            for word in philox(count, key):
                yield word & 0xFFFFFFFF
                yield word >> 32
            count += 1

    order, drawn = list(range(n)), halves()
    for i in range(n - 1, 0, -1):
        mask = 2 ** i.bit_length() - 1
        j = next(w for w in (half & mask for half in drawn) if w <= i)
        order[i], order[j] = order[j], order[i]
    return order
