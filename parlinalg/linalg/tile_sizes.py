"""The size of the tiles of a factorization, chosen by a model of its time.  Pure: no communication.

With tiles of b rows and columns a factorization has n / b steps.  Wide tiles make products fast and steps few; narrow
ones make panels cheap and the work even.  The model adds up, for the ranks that all others wait for and in operations
of a fast product:

- products: the operations of a rank, times 1 + GEMM_DEPTH / b, and as many more as the busiest rank has more tiles;
- panels: their operations, PANEL_SLOWNESS times, shared by a grid column, while the other grid columns go on;
- words: WORD_FLOPS for each that a rank receives;
- steps: STEP_FLOPS for each, and CALL_FLOPS for each collective call in it, times log₂ of the ranks that take part.

The constants are in `parlinalg.tunables`.  Tiles have at least 16 rows, and beyond that every grid row and grid column
has two tiles or more, so that all ranks work on small matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from parlinalg import tunables
from parlinalg.layout import Layout
from parlinalg.linalg.panels.qr import QR
from parlinalg.linalg.reductions.reflections import PANEL
from parlinalg.linalg.tiles import Deal, depths

SIZES = (16, 24, 32, 48, 64, 96, 112, 144, 160, 192, 224)
"""The sizes of tiles from which the model chooses.  Rows of 128 or 256 numbers lie a power of two bytes apart, and push
each other out of caches: products with such panels take up to 15% longer."""
TALL = 4
"""Rows of a matrix by its columns from which on its columns are not dealt."""
FEW = 8
"""Ranks of one node up to which rows are not dealt."""
SOLVED, SOLVED_BESIDE_DEEP = 0.7, 1.0
"""The time of panels of `cholesky`, solutions with a triangle, by that of other panels with as many operations; the
second where ranks share memory: products are deeper than tiles are wide there, so that narrower tiles do no harm."""
TALL_PANELS = 0.4
"""The same of panels of `lu` of tall matrices, which LAPACK factors in its own order, by halves."""
REDUCTIONS = ("eigh", "svd", "eig")
REPLICATED = ("cholesky", "lu", "solve")
"""The routines that know layers of ranks (2.5D)."""


class Constants(NamedTuple):
    """The constants of the model: operations that take as long as a word, a call and a step; and see `tunables`."""

    word: float
    call: float
    step: float
    depth: float
    slowness: float

    @classmethod
    def tuned(cls) -> Constants:
        """Return the constants that `tunables` has."""
        return cls(
            tunables.WORD_FLOPS, tunables.CALL_FLOPS, tunables.STEP_FLOPS, tunables.GEMM_DEPTH, tunables.PANEL_SLOWNESS
        )


class Time(NamedTuple):
    """The parts of a time, in operations of a fast product."""

    products: float
    panels: float
    words: float
    steps: float

    @property
    def total(self) -> float:
        return sum(self)


def by_gram(shape: tuple[int, ...], ranks: int) -> bool:
    """Return True if `qr` first tries the Gram matrix of a matrix of this shape, which leaves it in its layout."""
    m, n = shape
    return bool(n) and m >= TALL * n and n * ranks <= m


def rows_alone(sizes: Mapping[str, int]) -> Layout:
    """Return the layout of such a matrix in which all axes of a grid cut its rows."""
    return Layout(tuple(a for a, size in sizes.items() if size > 1), None)


def arrangement(routine: str, m: int, n: int, ranks: int, near: bool) -> str:
    """Return the arrangement of the ranks for a matrix [m, n]: the parameter `shape` of `Deal`.

    Tall matrices are dealt by rows alone, and of `lu`, whose rows stay where they are, as they rest.  Few ranks that
    share memory, `near`, are dealt columns alone, since they pass panels on at no cost.  Of `eigh` and `svd` they are
    not, since each rank keeps its rows of all reflections.
    """
    if routine == "eig":
        return "square"
    if m >= TALL * n:
        return "strips" if routine == "lu" else "tall"
    return "wide" if near and ranks <= FEW and routine not in ("eigh", "svd") else "square"


def block_size(routine: str, m: int, n: int, R: int, C: int, D: int = 1) -> int:
    """Return the rows and columns of a tile for a matrix [m, n] on D layers of R × C ranks, the same on all of them.

    Parameters
    ----------
    routine : {"cholesky", "lu", "solve", "solve_triangular", "qr", "eigh", "svd", "eig"}
    """
    return _chosen(routine, m, n, R, C, Constants.tuned(), D)


@lru_cache(maxsize=4096)
def _chosen(routine: str, m: int, n: int, R: int, C: int, constants: Constants, D: int) -> int:
    return min(candidates(routine, m, n, R, C), key=lambda b: predicted(routine, m, n, R, C, b, constants, D).total)


def layers(routine: str, m: int, n: int, sizes: Mapping[str, int], near: bool, itemsize: int) -> int:
    """Return how many layers of a grid's ranks hold tiles of a matrix [m, n] (2.5D), the same on all of them.

    Ranks that share memory have one: there words cost little.  Else see `saves`; the tiles of a rank take at most
    `tunables.LAYER_BYTES`.
    """
    if routine not in REPLICATED or near or not min(m, n):
        return 1
    known: dict[int, tuple[float, float]] = {}
    for depth in depths(sizes):
        deal = Deal(sizes, 1, arrangement(routine, m, n, math.prod(sizes.values()), near), depth)
        deal.size = block_size(routine, m, n, deal.R, deal.C, depth)
        if depth == 1 or tile_bytes(deal, m, n, itemsize) <= tunables.LAYER_BYTES:
            known[depth] = compared(routine, m, n, deal, Constants.tuned())
    return min((d for d in known if d == 1 or saves(known[d], known[1])), key=lambda d: known[d][1])


SAVED = 0.02
"""The part of the words that several layers of ranks must save at least."""


def saves(layered: tuple[float, float], flat: tuple[float, float]) -> bool:
    """Return True if words and time of several layers are both less than those of one."""
    return layered[0] < (1 - SAVED) * flat[0] and layered[1] < flat[1]


def tile_bytes(deal: Deal, m: int, n: int, itemsize: int) -> int:
    """Return the bytes of the tiles of the rank that has the most of a matrix [m, n]."""
    return math.prod(deal.most(m, n)) * itemsize


def panel_words(m: int, n: int, R: int, C: int, D: int, *, half: bool) -> float:
    """Return the words that a rank receives of panels and of other layers' terms, in the mean, to leading order.

    Solomonik and Demmel (2011).  With `half` rows of the right factor need no sums, as in Cholesky's factorization.
    """
    k, ranks = min(m, n), R * C * D
    left, below = m * k - k**2 / 2, n * k - k**2 / 2
    return (left * (C - 1) + below * (R - 1) + (left + (0 if half else below)) * (D - 1)) / ranks


def compared(routine: str, m: int, n: int, deal: Deal, constants: Constants) -> tuple[float, float]:
    """Return words and time of a deal, by which numbers of layers are compared, without the trips to work and home."""
    R, C, D, ranks = deal.R, deal.C, deal.D, deal.R * deal.C * deal.D
    words = panel_words(m, n, R, C, D, half=routine == "cholesky")
    if D > 1 and routine != "cholesky":  # L and U come to one layer by a trip more
        words += m * n / ranks * (1 - 1 / ranks)
    if routine == "solve":  # by U, on tiles of one layer
        one = deal.flat()
        words += n**2 / 2 / one.R * (1 - 1 / one.C)
    time = predicted(routine, m, n, R, C, deal.size, constants, D)
    return words, time.total - time.words + constants.word * words


def candidates(routine: str, m: int, n: int, R: int, C: int) -> list[int]:
    """Return the sizes that give every grid row and column two tiles, or the smallest one.

    For the reductions of `eigh` and `svd`, whose products have panels of their own, it is the widest up to a panel's.
    """
    dealt = [-(-length // (2 * parts)) for length, parts in ((m, R), (n, C)) if parts > 1]
    most = min([*dealt, max(SIZES[0], min(m, n)), PANEL if routine in REDUCTIONS else SIZES[-1]])
    found = [b for b in SIZES if b <= most] or [SIZES[0]]
    return found[-1:] if routine in REDUCTIONS else found


def predicted(routine: str, m: int, n: int, R: int, C: int, b: int, constants: Constants, D: int = 1) -> Time:
    """Return the time that the model predicts for tiles of b rows, without the trips to work and home.

    The routine "pivoted" is QR factorization with column pivoting, whose steps are columns.
    """
    k, ranks = min(m, n), R * C * D
    steps = max(1, -(-k // b))
    down, across = math.log2(R), math.log2(C)
    resting = arrangement(routine, m, n, ranks, False) == "strips"  # rows lie evenly, but for pivots
    down_tiles = 0 if resting else (R - 1) / 2
    uneven = down_tiles, (C - 1) / 2  # tiles that the busiest rank has more, times the ranks that share them
    most = 1 + 1.5 * sum(uneven) / steps + 3 * math.prod(uneven) / steps**2
    flops = 2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3
    # elements of a rank's rows of all panels, and of its columns of all rows beside them
    left, below = (m * k - k**2 / 2) / R, (n * k - k**2 / 2) / C
    if routine in REDUCTIONS:
        sides = 2 if routine == "svd" else 1
        calls = k * 2 * sides * 2 * math.log2(ranks)
        words = 2 * sides * 2 * (m + n) / 2 * k / 2 * (ranks > 1)
        return Time(2 * sides * flops / ranks * most, 0, constants.word * words, constants.call * calls)
    if routine == "pivoted":  # half of the operations are products with vectors, as in panels, on all ranks
        calls, words = 2 * math.log2(C), m * k - k**2 / 2 + 3 * k * (C - 1)
        return Time(
            flops / ranks * most * (1 + constants.depth / b), constants.slowness * flops / ranks * most,
            constants.word * words * (C > 1), (constants.step + constants.call * calls) * max(1, k),
        )  # fmt: skip
    received = left * (C > 1) + below * (R > 1)
    if routine in ("cholesky", "solve_triangular"):
        solved = SOLVED if R > 1 else SOLVED_BESIDE_DEEP
        flops, work = flops / 2, b * left * (solved if routine == "cholesky" else 1)
        received += k * b / 2 * (R > 1)
        calls = 2 * down + across
    elif routine == "qr":
        strips = 1 + below / max(1, k) / QR.STRIP
        flops, work = 2 * flops, 4 * b * left
        received += (2 * k * b) * (C > 1) + (below + 6 * k * b) * (R > 1)
        calls = across + (5 + 2 * strips) * down
    else:
        work = 2 * b * left * (TALL_PANELS if resting else 1) + 2 * R * b**2 * k * (R > 1)
        received += k * b * (C > 1) + R * k * b * (R > 1)
        calls = 2 * down + across
    if D > 1:  # a layer receives its own panels, and the others' terms of their columns and rows
        sums, trip = (m * k - k**2 / 2) / ranks * (D - 1), m * n / ranks
        if routine == "cholesky":
            received, calls = received / D + sums, calls / D + 1
        else:  # L and U come to one layer by a trip more
            received = received / D + sums + (n * k - k**2 / 2) / ranks * (D - 1) + trip
            calls = calls / D + 2 + math.log2(D)
    return Time(
        flops / ranks * most * (1 + constants.depth / b), constants.slowness * work / C / D,
        constants.word * received, (constants.step + constants.call * calls) * steps,
    )  # fmt: skip
