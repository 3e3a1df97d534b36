"""Words and calls of QR factorizations, also with pivoting."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from parlinalg import tunables
from parlinalg.layout import Layout
from parlinalg.linalg.costs.counts import ALONG_ROWS, HOME, TURNS, UPDATES, Costs, Counts, after, panels
from parlinalg.linalg.panels.pivoted import LONG
from parlinalg.linalg.panels.pivoted import PANEL as PIVOTED
from parlinalg.linalg.panels.qr import QR
from parlinalg.linalg.tile_sizes import by_gram, rows_alone
from parlinalg.linalg.tiles import Deal, Numbers
from parlinalg.matmul.assign import assign

HELD = 4
"""The squares [n, n] in a rank's rows of a matrix from which on every rank may hold R while its values are found."""


def qr_factor(
    costs: Costs, layout: Layout, shape: tuple[int, int], *, trees: Collection[int] = (), extra: int = 0,
    extra_layout: Layout | None = None,
) -> Costs:  # fmt: skip
    """Add what `qr_factor` receives of a matrix and of `extra` right-hand sides, which are further columns.

    Parameters
    ----------
    trees : collection of int
        The first columns of the panels that go through the tree (`QR.trees`).
    """
    deal, (m, n) = costs.deal, shape
    rows, columns = deal.rows(m), deal.columns(n + extra)
    costs.bring(layout, shape, rows, deal.columns(n))
    if extra_layout is not None:
        costs.bring(extra_layout, (m, extra), rows, [x[x >= n] - n for x in columns])
    k_end = min(m, n)
    for k, b in panels(k_end, deal.size):
        i, j = deal.owner(k)
        who, left = costs.j == j, after(rows, k)
        costs.all_reduce("Gram matrices of panels", costs.down, b * b, who, times=2)
        costs.broadcast("reflections down grid columns", costs.down, (2 * b + 2) * b, i, who)
        if k in trees:
            part = np.minimum(b, left) * b
            costs.all_gather("trees of panels", costs.down, part.sum(), part[costs.i], who)
            costs.broadcast("reflections down grid columns", costs.down, (2 * b + 2) * b, i, who)
        costs.broadcast(ALONG_ROWS, costs.across, (2 * b + left[costs.i]) * b, j)
        end = min(k + 2 * deal.size, k_end) if k + b < k_end else k + b  # the next panel is updated by itself
        behind, last = after(columns, k + b)[costs.j], after(columns, end)[costs.j]
        for width in (behind - last, last):
            whole, rest = np.divmod(width, QR.STRIP)
            costs.all_reduce(UPDATES, costs.down, b * QR.STRIP * np.ones_like(whole), times=whole)
            costs.all_reduce(UPDATES, costs.down, b * rest, times=(rest > 0).astype(np.int64))
    costs.agree(1)
    return costs


def turn(costs: Costs, reflections: Iterable[tuple[int, int]], wide: Counts) -> Costs:
    """Add what panels (k, b) of reflections receive that turn a matrix of so many columns in each grid column."""
    for _, b in reflections:
        costs.all_reduce(TURNS, costs.down, b * wide[costs.j])
    return costs


def small_triangle(shape: tuple[int, int], ranks: int) -> bool:
    """Return True if each rank may hold R of a matrix [m, n], m ≥ n, for its singular values.

    R is small by itself, or beside the rows of a rank.
    """
    m, n = shape
    return n > 0 and (n <= tunables.SVD_BY_ONE or m >= HELD * n * ranks)


def qr_by_gram(costs: Costs, layout: Layout, shape: tuple[int, int]) -> None:
    """Add what the factorization of a tall matrix by its Gram matrix receives."""
    costs.redistribute("trip to rows", layout, rows_alone(costs.deal.sizes), shape)
    costs.all_reduce("Gram matrices", costs.everyone, shape[1] ** 2, times=2)


def qr(
    costs: Costs, layout: Layout, shape: tuple[int, int], *, trees: Collection[int] = (), sound: bool | None = True
) -> Costs:  # fmt: skip
    """Add what `qr` receives: the factorization, Q from its reflections, and the trips of Q and R home.

    Parameters
    ----------
    sound : bool, optional
        The Gram matrix of a tall matrix orthogonalizes it, without reflections.  If not, that is tried in vain; None:
        it is not tried, as on GPUs.
    """
    deal, (m, n) = costs.deal, shape
    if sound is not None and by_gram(shape, len(costs.i)):
        qr_by_gram(costs, layout, shape)
        if sound:
            costs.redistribute(HOME, rows_alone(costs.deal.sizes), layout, shape)
            return costs
    k = min(m, n)
    qr_factor(costs, layout, shape, trees=trees)
    orthogonal(costs, layout, shape, k)
    costs.home(layout, (k, n), [x[x < k] for x in deal.rows(m)], deal.columns(n))
    return costs


def by_triangle(shape: tuple[int, int]) -> bool:
    """Return True if `qr` with pivoting factors a matrix without it first, and then chooses the columns of that R.

    With `mode="complete"` it does not.
    """
    m, n = shape
    return m > LONG * n and n > 0


def pivoted(
    costs: Costs, layout: Layout, shape: tuple[int, int], *, order: Numbers | None = None, mode: str = "reduced",
    trees: Collection[int] = (), sound: bool = True, workers: int | None = None,
) -> Costs:  # fmt: skip
    """Add what `qr` with pivoting receives; with the mode "complete" the zeros below R are not counted.

    `costs` are of the deal of the factorization without pivoting that comes first of a matrix of many more rows than
    columns, with `trees` and `sound` as of `qr`.  Then whole columns are dealt.

    Parameters
    ----------
    order : array [n], optional
        The permutation p, which says who sends which reflection; by default no column is exchanged.
    workers : int, optional
        The number of ranks to which the columns are dealt, the first ones of the grid; by default all.
    """
    (m, n), k = shape, min(shape)
    if mode != "complete" and by_triangle(shape):
        return _pivoted_triangle(costs, layout, shape, order, mode, trees, sound, workers)
    costs = costs.with_deal(deal := Deal(costs.deal.sizes, PIVOTED, "wide", workers=workers))
    rows, columns = deal.rows(m), deal.columns(n)
    order = np.arange(n) if order is None else order
    costs.bring(layout, shape, rows, columns)
    costs.agree(2)
    at_work = (costs.j < deal.C) & (deal.C > 1)
    costs.note("choices of pivots", "all_gather", costs.across, 3 * (deal.C - 1) * k * at_work, at_work, times=k)
    lengths, owners = m - np.arange(k), order[:k] // deal.size % deal.C
    own = np.bincount(owners, lengths, costs.across.size).astype(np.int64)
    costs.note("reflections", "broadcast", costs.across, (lengths.sum() - own[costs.j]) * at_work, at_work, times=k)
    if costs.across.size > deal.C:
        costs.broadcast("the permutation", costs.across, n, 0)
    if mode != "r":
        height = m if mode == "complete" else k
        for first, b in panels(k, deal.size):
            costs.broadcast("reflections for Q", costs.across, (m - first) * b, deal.owner(first)[1])
        costs.home(layout, (m, height), rows, deal.columns(height))
    places = np.argsort(order)
    costs.home(layout, (k, n), [x[x < k] for x in rows], [places[x] for x in columns])
    return costs


def _pivoted_triangle(
    costs: Costs, layout: Layout, shape: tuple[int, int], order: Numbers | None, mode: str, trees: Collection[int],
    sound: bool, workers: int | None,
) -> Costs:  # fmt: skip
    """Add what a QR factorization receives, one with pivoting of its R, and the product of both Q."""
    deal, (m, n) = costs.deal, shape
    if gram := by_gram(shape, len(costs.i)):
        qr_by_gram(costs, layout, shape)
    sound = gram and sound
    if sound and mode != "r":
        costs.redistribute(HOME, rows_alone(costs.deal.sizes), layout, shape)
    tops = [x[x < n] for x in deal.rows(m)]
    if not sound:
        qr_factor(costs, layout, shape, trees=trees)
        costs.home(layout, (n, n), tops, deal.columns(n))
    pivoted(costs, layout, (n, n), order=order, mode=mode, workers=workers)
    if mode == "r":
        return costs
    if sound:
        times_square(costs, "Q times the Q of R", layout, shape)
        return costs
    costs.bring(layout, (n, n), tops, deal.columns(n))
    turn(costs, panels(n, deal.size), after(deal.columns(n), 0))
    costs.home(layout, shape, deal.rows(m), deal.columns(n))
    return costs


def times_square(costs: Costs, name: str, layout: Layout, shape: tuple[int, int]) -> None:
    """Add the product of a matrix [m, n] with one [n, n], all in one layout."""
    m, n = shape
    costs.redistribute(name, product(costs, name, layout, layout, (m, n, n)), layout, shape)


def product(
    costs: Costs, name: str, x: Layout, w: Layout, sizes: tuple[int, int, int], out: Layout | None = None
) -> Layout:  # fmt: skip
    """Add the product of matrices [m, k] and [k, n]; return the layout of the result, `out` if it is given."""
    m, k, n = sizes
    plan = assign(x, w, (m, k), (k, n), costs.deal.sizes, out)
    for src, dst, shape in (plan.x, plan.x_work, (m, k)), (plan.w, plan.w_work, (k, n)), (plan.y_work, plan.y, (m, n)):
        costs.redistribute(name, src, dst, shape)
    return plan.y


def orthogonal(costs: Costs, layout: Layout, shape: tuple[int, int], columns: int) -> Costs:
    """Add what the first columns of Q receive, from the reflections of a matrix of this shape to a layout."""
    deal, m = costs.deal, shape[0]
    every = deal.columns(columns)
    for k, b in panels(min(shape), deal.size):  # of the identity's columns those before k stay as they are
        turn(costs, [(k, b)], after(every, k))
    costs.home(layout, (m, columns), deal.rows(m), every)
    return costs
