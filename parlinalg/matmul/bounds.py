"""Lower bounds on the words one product moves, in elements received by a rank.  Pure.

The memory-independent bound is that of H. Al Daas, G. Ballard, L. Grigori, S. Kumar and K. Rouse, "Tight memory-
independent parallel matrix multiplication communication lower bounds", SPAA 2022.  The other one minimises the faces of
a rank's brick of the product when one face must fit its memory (Irony, Toledo, Tiskin 2004; Kwasniewski et al., COSMA,
SC 2019).
"""

from __future__ import annotations

import math
from fractions import Fraction


def memory_independent(m: int, n: int, k: int, ranks: int) -> float:
    """Return the words some rank must receive in `[m, k] × [k, n]` if ranks share data and work evenly.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product, zero allowed.
    ranks : int
        Ranks that hold an even share of the three matrices and do an even share of the work.

    Returns
    -------
    float
        D − (mn + mk + nk)/p; D is the least sum of the faces of a rank's brick that touch the three matrices.

    Examples
    --------
    >>> memory_independent(64, 64, 64, 64)
    576.0
    """
    d1, d2, d3 = sorted((m, n, k), reverse=True)
    if ranks * d2 <= d1:
        faces = Fraction(d1 * d2 + d1 * d3, ranks) + d2 * d3
    elif ranks * d3 * d3 <= d1 * d2:
        faces = 2 * _root(Fraction(d1 * d2 * d3 * d3, ranks), 2) + Fraction(d1 * d2, ranks)
    else:
        faces = 3 * _root(Fraction(d1 * d2 * d3, ranks), 3) ** 2
    return max(0.0, float(faces - _owned(m, n, k, ranks)))


def memory_limited(m: int, n: int, k: int, ranks: int, words: int) -> float:
    """Return the bound when a rank's memory holds only `words` elements; never below the memory-independent one.

    With a = min(√S, (mnk/p)^⅓) it is 2(mnk/p)/a + a² − (mn + mk + nk)/p; infinite where no memory is given.
    """
    least = memory_independent(m, n, k, ranks)
    brick = m * n * k / ranks
    if brick == 0:
        return least
    if words < 1:
        return math.inf
    a = min(math.sqrt(words), brick ** (1 / 3))
    return max(least, 2 * brick / a + a * a - float(_owned(m, n, k, ranks)))


def _owned(m: int, n: int, k: int, ranks: int) -> Fraction:
    return Fraction(m * n + m * k + n * k, ranks)


def _root(value: Fraction, degree: int) -> Fraction:
    """Return a fraction's root, exact where it is one, so that a plan that attains the bound is not found below it."""
    top, bottom = (_whole_root(v, degree) for v in (value.numerator, value.denominator))
    if top is not None and bottom is not None:
        return Fraction(top, bottom)
    return Fraction(math.sqrt(value) if degree == 2 else math.cbrt(value))


def _whole_root(value: int, degree: int) -> int | None:
    guess = math.isqrt(value) if degree == 2 else round(math.cbrt(value))
    return guess if guess**degree == value else None
