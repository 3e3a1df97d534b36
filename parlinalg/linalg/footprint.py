"""The memory of a planned factorization: what the rank that needs the most holds at its fullest stage.  Pure.

Sizes are in elements.  Where ranks share memory, what lies there once for all counts by shares, and what they only
pass on there does not count.  Traces on imagined ranks have the same peaks (`parlinalg.planning.routines`); they take
seconds for one plan of a large matrix, too long for a search among hundreds of plans.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from parlinalg import tunables
from parlinalg.grid import default_layout
from parlinalg.linalg.reductions import bidiagonal, divide
from parlinalg.linalg.reductions.reflections import PANEL, TOGETHER, Kept
from parlinalg.linalg.tiles import Deal

if TYPE_CHECKING:
    from parlinalg.linalg.planner import LinalgPlan

HELD = ("at rest", "in tiles", "in buffers and results")


def footprint(plan: LinalgPlan, *, by_tiles: bool = False) -> tuple[int, int, int]:
    """Return the elements at rest, in tiles, and in buffers and results, of the rank that needs the most.

    With `by_tiles` they are those for a matrix of `qr` that is too ill conditioned for its Gram matrix.
    """
    if plan.routine == "svd" or plan.pivoting:
        return _of_vectors(plan)
    m, n = plan.shape
    rest = _resting(plan, plan.m, plan.n)
    if plan.routine == "qr" and plan.gram and not by_tiles:
        return rest, 0, _by_gram(plan, rest)
    if plan.routine == "eigh" and plan.ranks > 1:
        tiles, more = _eigh(plan, n)
        return rest, tiles, more
    rows, columns = plan.deal.most(m, n)
    if plan.routine in ("lu", "qr"):
        return rest, rows * columns, _factors(plan, rest, rows, columns)
    if plan.routine == "cholesky" and not plan.near and plan.ranks > 1 and n:
        return rest, rows * columns, _cholesky(plan, rest, rows, columns)
    return _solved(plan, rest, rows, columns)


def _cholesky(plan: LinalgPlan, rest: int, rows: int, columns: int) -> int:
    """Return the elements that `cholesky` holds beside a matrix at rest and in tiles [rows, columns], on ranks that
    share no memory: panels, other layers' terms of them, or L on its way home."""
    deal, n, tiles, b = plan.deal, plan.n, rows * columns, min(plan.deal.size, plan.n)
    # two panels, and of the first what is sent down, beside it and across, which are shorter by a tile or more
    panels = max(5 * rows * b - 6 * b * b, 2 * rows * b, _terms(deal, n), _trip(plan, tiles, rest) // 2)
    home = rest + _trip(plan, tiles // 2, rest // 2)
    if deal.D > 1:  # this layer's panels alone come home
        home = max(home + tiles // deal.D - tiles, math.prod(deal.flat().most(n, n)))
    return max(panels, home)


def _solved(plan: LinalgPlan, rest: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Return what `footprint` does, of `solve` and `lstsq`, and of routines whose result lies like the matrix."""
    (m, n), deal, tiles = plan.shape, plan.deal, rows * columns
    b = min(deal.size, m, n)
    panels = 3 * rows * b + 2 * columns * b + 2 * (max(deal.R, 2) + 1) * b * b  # the tournament of R grid rows
    if plan.routine not in ("solve", "lstsq"):
        return rest, tiles, max(panels, rest) + rest * (1 + 3 * (plan.routine == "eigh"))
    beside = _resting(plan, plan.m, plan.sides), rows * deal.most(m, plan.sides)[1]
    if plan.routine == "lstsq":
        tiles += beside[1]
        return rest + beside[0], tiles, max(panels, rest + beside[0]) + tiles
    if plan.near or plan.ranks == 1:
        more = max(panels, rest) + rest
    else:
        more = max(panels, _to_one_layer(plan, tiles) if deal.D > 1 else _trip(plan, tiles, rest))
    return rest + beside[0], tiles + beside[1], more


def _resting(plan: LinalgPlan, m: int, n: int) -> int:
    """Return the elements of the largest block of a matrix [m, n] in the default layout."""
    cuts = default_layout(tuple(plan.sizes), (m, n)).dims
    return math.prod(-(-length // _ranks(plan, cut)) for length, cut in zip((m, n), cuts, strict=True))


def _ranks(plan: LinalgPlan, cut: tuple[str, ...] | None) -> int:
    return math.prod(plan.sizes[axis] for axis in cut or ())


def _trip(plan: LinalgPlan, work: int, rest: int, columns: int | None = None) -> int:
    """Return the elements of what a rank sends and receives where so many change places: in shared memory none.

    They go in strips of columns, of which two are held at once.  At work all ranks have a part of each strip, at rest
    those of one grid column, of which there are so many.
    """
    if plan.near or plan.ranks == 1:
        return 0
    columns = _ranks(plan, plan.layout.dims[1]) if columns is None else columns
    return min(work, 2 * tunables.TILES_MOVED) + min(rest, 2 * tunables.TILES_MOVED * columns)


def _by_gram(plan: LinalgPlan, rest: int) -> int:
    """Return the elements that `qr` holds by a Gram matrix: Q, and three squares or four while it is found."""
    complex_ = plan.dtype.startswith("complex")  # conjugates are copies
    again = _ranks(plan, plan.layout.dims[1]) > 1 or complex_  # to rows alone, and copied there
    return max(2 * rest * again, rest + (3 + complex_) * plan.n**2)


def _terms(deal: Deal, n: int) -> int:
    """Return the most elements of a panel of `cholesky`, its message, and other layers' terms of it."""
    b, D = deal.size, deal.D
    return max(((min(D - 1, t) + 2) * -(-(n - t * b) // deal.R) * b for t in range(-(-n // b))), default=0)


def _to_one_layer(plan: LinalgPlan, tiles: int) -> int:
    """Return the elements that are held beside tiles of several layers while L and U go to those of one."""
    deal = plan.deal
    flat, own = math.prod(deal.flat().most(plan.m, plan.n)), tiles // deal.D
    return 3 * flat + own + _trip(plan, own // 2, own // 2, 1)


def _factors(plan: LinalgPlan, rest: int, rows: int, columns: int) -> int:
    """Return the elements that `lu` or `qr` holds beside a matrix at rest and in tiles [rows, columns].

    It is the most of when the first factor comes home, and the last: P, L and U, in tiles and at rest; or the
    reflections with R, or with Q in tiles and at rest.
    """
    m, n, deal, p = plan.m, plan.n, plan.deal, plan.ranks
    k, tiles = min(m, n), rows * columns
    flat = deal.flat()
    rows, columns = flat.most(m, n)
    upper, lower = flat.most(k, n)[0] * columns, rows * flat.most(m, k)[1]
    first, second = -(-m * k // p), -(-k * n // p)
    if plan.routine == "lu":
        way = max(second + _trip(plan, upper, second), _trip(plan, lower, first))
        home = rows * columns + -(-m * m // p) + lower + upper + first + way
        return max(home - tiles, _to_one_layer(plan, tiles) if deal.D > 1 else 0)
    kept = rows * k - k * k // (2 * deal.R) + 2 * k * min(deal.size, k)
    shared = plan.near and deal.R == 1
    if shared:
        kept //= p
    way = _trip(plan, upper, second)
    formed = lower + first + second + _trip(plan, lower, first) + (kept if shared else 0)  # else they are given up
    return max(tiles + kept + second + way, lower + kept + second, formed) - tiles


def _of_vectors(plan: LinalgPlan) -> tuple[int, int, int]:
    """Return the elements at rest, in tiles, and in buffers and results, of `svd` or `qr` with pivoting.

    They are those at the stage at which a rank holds the most: when R is found, when it is decomposed, or when Q is
    formed.  Reflections in shared memory count by shares.
    """
    m, n, p = max(plan.m, plan.n), min(plan.m, plan.n), plan.ranks
    rest, square, whole = -(-m * n // p), -(-n * n // p), n * n
    complex_ = plan.dtype.startswith("complex")
    first = plan.first
    if plan.gram or (plan.alone and first is None):
        if plan.pivoting:
            more = max(whole * (3 + complex_), rest + max(3 * square, 2 * whole * (complex_ and p > 1)))
        else:
            more = max(whole * (3 + complex_), rest + 2 * whole) if plan.gram else rest + 7 * whole
        return rest, 0, rest + more
    if first is None:
        if plan.pivoting:
            if p == 1:  # LAPACK
                return rest, rest, 3 * rest + square
            rows, columns = plan.deal.most(plan.m, plan.n)
            return rest, rows * columns, max(rest + rest // p + square // 2, 2 * square)
        tiles, more = _decomposed(plan, m, n, complex_)
        return rest, tiles, more
    rows, columns = first.most(m, n)
    kept = (rows * n - n * n // (2 * first.R) + 2 * n * first.size) // (p if plan.near and first.R == 1 else 1)
    inner = (0, 4 * square) if plan.pivoting else _decomposed(plan, n, n, complex_)
    if plan.alone:
        inner = 0, 7 * whole
    alone = square * (1 if plan.pivoting else 2) * (p == 1)
    formed = rows * columns + 2 * square + (rest if first.R == 1 and p > 1 else first.size * n + alone)
    tiles = max(rows * columns, inner[0])
    extra = rest if plan.m < plan.n and complex_ and plan.routine == "svd" else 0  # Aᴴ
    turned = 0
    if plan.routine == "svd" and not plan.near and p > 1:
        # reflections are given up while Q is formed; then it goes home
        turned = rows * columns + 2 * square + rest + _trip(plan, rows * columns, rest)
        formed = rows * columns + 2 * square + first.size * n
        # for the product with U its rows are gathered, or all of U where Q is cut by rows alone
        down, across = (_ranks(plan, cut) for cut in default_layout(tuple(plan.sizes), (m, n)).dims)
        turned = max(turned, 2 * rest + 2 * square + (-(-m // down) * n if across > 1 else whole))
    return rest, tiles, max(kept + max(formed, sum(inner), tiles), turned) - tiles + extra


def _decomposed(plan: LinalgPlan, m: int, n: int, complex_: bool) -> tuple[int, int]:
    """Return the elements of tiles, and of the rest that `svd` holds beside a matrix [m, n] that is not tall."""
    deal, p = plan.deal, plan.ranks
    if p == 1:
        return m * n, m * n + n * n + (5 * n * n // 2 if complex_ else 3 * n * n)
    rows, columns = deal.most(m, n)
    square, together = -(-n * n // p), PANEL * TOGETHER
    kept = _kept(plan, n, rows, deal.most(n, n)[0])
    step = max(divide.STRIP // 4, min(divide.STRIP, n // p // 4))
    merged = 5 * square // 2 + 3 * n * step
    formed = (4 if complex_ else 3) * square + _trip(plan, square, square, deal.C)
    merged = n * (together + 1) + (merged // 2 if complex_ else merged)
    b = bidiagonal.panel_size((m, n), p, None)
    reduced = rows * columns + max(_closing(n, m + n) + min(together, n) * rows, (2 * b + min(together, n)) * (m + n))
    return rows * columns, max(kept + max(merged, formed), reduced) - rows * columns


def _eigh(plan: LinalgPlan, n: int) -> tuple[int, int]:
    """Return the elements of tiles, and of the rest that `eigh` holds on several ranks: when the first reflections
    are put together, when divide and conquer merges the last vectors, or when these go to tiles."""
    rows, columns = plan.deal.most(n, n)
    tiles, square = rows * columns, n * -(-n // plan.ranks)
    b, together = min(PANEL, n), min(PANEL * TOGETHER, n)
    reduced = tiles + max(_closing(n, n) + (0 if plan.near else together * rows), (2 * b + together) * n)
    kept = _kept(plan, n, rows) + n * (together + 1) // 2 + 5 * n
    step = max(divide.STRIP // 4, min(divide.STRIP, n // plan.ranks // 4))
    merged = 2 * square + 3 * n * step // 2
    formed = square + tiles + _trip(plan, tiles, square, plan.deal.C)
    return tiles, max(reduced, kept + max(merged, formed)) - tiles


def _closing(n: int, wide: int) -> int:
    """Return the elements that are held while the first panels of n reflections are put together: a reflection has
    `wide` elements, on one side or two."""
    together = min(PANEL * TOGETHER, n)
    return together * wide + 3 * together**2 // 2


def _kept(plan: LinalgPlan, n: int, *heights: int) -> int:
    """Return the elements of the reflections of n columns in so many rows of a rank each; in shared memory its share
    of them."""
    deal: Deal = plan.deal
    return sum(Kept.size(np.arange(rows) * deal.R, n) for rows in heights) // (deal.C if plan.near else 1)
