"""Words and calls of eigenvalues and singular values: reductions, divide and conquer, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from parlinalg.layout import Layout
from parlinalg.linalg.costs.counts import HOME, TO_WORK, Costs, Group, after, panels
from parlinalg.linalg.costs.orthogonal import orthogonal, qr_by_gram, qr_factor, small_triangle, times_square, turn
from parlinalg.linalg.reductions.bidiagonal import TALL, panel_size
from parlinalg.linalg.reductions.divide import LEAF
from parlinalg.linalg.reductions.halves import parts
from parlinalg.linalg.reductions.reflections import PANEL, TOGETHER
from parlinalg.linalg.tile_sizes import by_gram, rows_alone
from parlinalg.linalg.tiles import Deal, Numbers, dealt, resting, transposed


def tridiagonal(
    costs: Costs, layout: Layout, n: int, workers: Deal | None = None, *, keep: bool = True
) -> Costs:  # fmt: skip
    """Add what `eigh` receives to make a Hermitian matrix tridiagonal.

    That is an all-reduce of each panel, and for a column an all-reduce of the product with the matrix and an
    all-gather of what becomes of it, with the next column.

    Parameters
    ----------
    workers : Deal, optional
        How the matrix is dealt to fewer ranks, which reduce it where ranks outnumber cores; the others get the result.
    keep : bool
        With the reflections, which values alone do not need.
    """
    deal = costs.deal if workers is None else workers
    place, ranks = costs.everyone.place, deal.R * deal.C
    have, _ = resting(layout, (n, n), costs.deal.sizes)
    for same, want in parts(deal, n, len(place)):  # of blocks on both sides of the diagonal what is above it, too
        for each in (want,) if same else (want, transposed(want)):
            costs.trip(TO_WORK, have, each, lower=deal.size)
    costs.agree(2)
    group, who, some = Group(costs.everyone.axes, ranks, place), place < ranks, ranks < len(place)
    for k, b in panels(n, PANEL):
        m = n - k
        own = m * (place + 1) // ranks - m * place // ranks
        costs.all_reduce("panels of the reduction", group, b * m, who)
        for q in range(min(b, m - 1)):
            costs.all_reduce("products of the reduction", group, m + 2 * q + 1, who)
            width = 1 if q + 1 == b else 2
            costs.all_gather("columns of the reduction", group, width * m, width * own, who)
    if some:
        _to_others(costs, n, ranks, (lambda k: n - k + 1) if keep else None)
    return costs


def _to_others(costs: Costs, n: int, ranks: int, wide: Callable[[int], int] | None) -> None:
    """Add what all ranks receive of a reduction by the first `ranks` ones, with so many numbers for a reflection.

    With None the reflections are not kept.
    """
    for size in (n, max(0, n - 1)):
        costs.broadcast("diagonals to other ranks", costs.everyone, size, 0)
    if wide is None:
        return
    every = [b * wide(k) for k, b in panels(n, PANEL)]
    for start in range(0, len(every), ranks):
        own = np.zeros(len(costs.i), int)
        own[: len(every[start : start + ranks])] = every[start : start + ranks]
        costs.all_gather("reflections to other ranks", costs.everyone, own.sum(), own)


def eigh(
    costs: Costs, layout: Layout, n: int, wanted: int | None = None, *, kept: Sequence[int] | None = None,
    workers: Deal | None = None,
) -> Costs:  # fmt: skip
    """Add what `eigh` receives for so many eigenvectors, by default all.

    Parameters
    ----------
    kept : sequence of int, optional
        For every merge of divide and conquer the number of vectors that are not known before it.  Without it the words
        of divide and conquer are an upper bound.
    workers : Deal, optional
        See `tridiagonal`.
    """
    deal = costs.deal
    wanted = n if wanted is None else wanted
    rows, columns = deal.rows(n), deal.columns(wanted)
    tridiagonal(costs, layout, n, workers)
    conquer(costs, n, kept)
    costs.agree(3)
    _from_rows(costs, n, wanted)
    turn(costs, panels(n, PANEL * TOGETHER), after(columns, 0))
    costs.home(layout, (n, wanted), rows, columns)
    return costs


def merges(n: int) -> Iterator[int]:
    """Yield the rows of every merge of divide and conquer, in order."""
    if n > LEAF:
        yield from merges(n // 2)
        yield from merges(n - n // 2)
        yield n


def conquer(costs: Costs, n: int, kept: Sequence[int] | None = None) -> Costs:
    """Add what divide and conquer receives: vectors' ends from one rank, then roots and vectors' factors from all."""
    ranks = len(costs.i)
    found = list(merges(n))
    for m, k in zip(found, found if kept is None else kept, strict=True):
        costs.broadcast("divide and conquer", costs.everyone, 2 * m, 0)
        own = after(dealt(k, 1, ranks), 0)
        costs.all_gather("divide and conquer", costs.everyone, 3 * k, 3 * own)
        if k > 2:
            costs.all_gather("divide and conquer", costs.everyone, k, own)
    return costs


def _from_rows(costs: Costs, n: int, wanted: int) -> None:
    """Add what the trip of vectors, whose rows divide and conquer has dealt one by one, to work receives."""
    deal, ranks = costs.deal, len(costs.i)
    have = [(np.arange(p, n, ranks), np.arange(wanted)) for p in range(ranks)]
    costs.trip("vectors to work", have, deal.places(deal.rows(n), deal.columns(wanted)))


def bidiagonal(
    costs: Costs, layout: Layout | None, shape: tuple[int, int], workers: Deal | None = None, *, keep: bool = True
) -> Costs:  # fmt: skip
    """Add what `svd` receives to make a matrix [m, n], m ≥ n, bidiagonal: four all-reduces a column.

    Without a layout the matrix lies in tiles already.  `workers` and `keep` are those of `tridiagonal`; without `keep`
    all ranks work, and agree that the values have converged.
    """
    m, n = shape
    deal = costs.deal if workers is None else workers
    place, ranks = costs.everyone.place, deal.R * deal.C
    want = deal.spread(deal.rows(m), deal.columns(n), len(place))
    if layout is not None:
        costs.trip(TO_WORK, resting(layout, shape, costs.deal.sizes)[0], want)
    costs.agree(2)
    group, who = Group(costs.everyone.axes, ranks, place), place < ranks
    name = "columns, rows and products of the reduction"
    for k, b in panels(n, panel_size(shape, ranks, None if keep else 0.5)):
        last = int(k + b == n)  # of the last column only itself is needed
        costs.all_reduce(name, group, m - k, who, times=2 * b - last)
        costs.all_reduce(name, group, n - k, who, times=2 * (b - last))
    if not keep:
        costs.agree(1)
    if ranks < len(place):
        _to_others(costs, n, ranks, (lambda k: m + n - 2 * k + 2) if keep else None)
    return costs


def joins(n: int, more: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the rows, and the columns beyond them, of every merge of bidiagonal matrices, in order."""
    if n > LEAF:
        yield from joins(n // 2, 1)
        yield from joins(n - n // 2 - 1, more)
        yield n, more


def conquer_bidiagonal(costs: Costs, n: int, kept: Sequence[int] | None = None) -> Costs:
    """Add what divide and conquer of a bidiagonal matrix receives; see `conquer`."""
    ranks, name = len(costs.i), "divide and conquer"
    found = list(joins(n))
    for (m, more), k in zip(found, [m for m, _ in found] if kept is None else kept, strict=True):
        costs.broadcast(name, costs.everyone, 2 * m - 1 + more, 0)
        if k > 1:
            own = after(dealt(k, 1, ranks), 0)
            costs.all_gather(name, costs.everyone, 3 * k, 3 * own)
            costs.all_gather(name, costs.everyone, k, own)
    return costs


def svd(
    costs: Costs, layout: Layout, shape: tuple[int, int], *, full_matrices: bool = True, trees: Collection[int] = (),
    first: Deal | None = None, kept: Sequence[int] | None = None, workers: Deal | None = None,
    sound: bool | None = True, alone: bool = False,
) -> Costs:  # fmt: skip
    """Add what `svd` receives; a tall matrix is factored by QR first.

    Of a tall matrix with `full_matrices` the cut and the join of U's columns are not counted.

    Parameters
    ----------
    first : Deal, optional
        How the tiles of that QR factorization are dealt; by default as the others.
    kept, workers : optional
        See `eigh`; of the vectors that are not known before a merge, one is that of the row between its parts.
    trees, sound : optional
        As of `qr`, by the Gram matrix of a tall matrix.
    alone : bool
        One rank finds the singular values and vectors of the matrix, or of R (`planner.svd_by_one`).
    """
    if shape[0] < shape[1]:
        layout, shape = Layout(*layout.dims[::-1]), shape[::-1]
    deal, (m, n) = costs.deal, shape
    first = deal if first is None else first
    tall = m > TALL * n and n > 0
    top = n if tall else m
    k = m if full_matrices and not tall else n
    ranks = len(costs.i)
    gram = sound is not None and not full_matrices and small_triangle(shape, ranks) and by_gram(shape, ranks)
    if gram:
        qr_by_gram(costs, layout, shape)
    gram = gram and bool(sound)
    if gram and not alone:
        costs.redistribute(HOME, rows_alone(costs.deal.sizes), layout, shape)
    before, tops = costs.with_deal(first), [x[x < n] for x in first.rows(m)]
    if tall and not gram:
        qr_factor(before, layout, shape, trees=trees)
        if alone:
            to_everyone(before, n, tops)
        else:
            before.home(layout, (n, n), tops, first.columns(n))
    if alone:
        if not tall:
            costs.redistribute("matrix to all ranks", layout, Layout(None, None), shape)
        for size in (top * k, n, n * n):
            costs.broadcast("singular values and vectors", costs.everyone, size, 0)
    else:
        _svd_by_all(costs, layout, (top, n), k, kept, workers)
    if gram and alone:
        costs.redistribute(HOME, rows_alone(costs.deal.sizes), layout, shape)
    elif tall:
        if not gram:
            orthogonal(before, layout, shape, m if full_matrices else n)
        times_square(costs, "Q times U", layout, (m, n))
    return costs


def _svd_by_all(
    costs: Costs, layout: Layout, shape: tuple[int, int], k: int, kept: Sequence[int] | None, workers: Deal | None
) -> None:  # fmt: skip
    """Add the reduction of a matrix, divide and conquer, and the way back to k columns of U, and to V."""
    deal, (m, n) = costs.deal, shape
    bidiagonal(costs, layout, shape, workers)
    conquer_bidiagonal(costs, n, kept)
    costs.agree(1)
    for _ in range(2):
        _from_rows(costs, n, n)
    for wide in (k, n):
        turn(costs, panels(n, PANEL * TOGETHER), after(deal.columns(wide), 0))
    costs.home(layout, (m, k), deal.rows(m), deal.columns(k))
    costs.home(layout, (n, n), deal.rows(n), deal.columns(n), adjoint=True)


def to_everyone(costs: Costs, n: int, tops: Sequence[Numbers]) -> None:
    """Add the trip of R [n, n] from tiles to all ranks."""
    every, deal = np.arange(n), costs.deal
    costs.trip("R to all ranks", deal.places(tops, deal.columns(n)), [(every, every)] * len(costs.i))
