"""Words and calls of least squares."""

from __future__ import annotations

from collections.abc import Collection

from parlinalg.layout import Layout
from parlinalg.linalg.costs.counts import Costs, after, panels
from parlinalg.linalg.costs.orthogonal import product, qr_by_gram, qr_factor, turn
from parlinalg.linalg.costs.reductions import bidiagonal, to_everyone
from parlinalg.linalg.costs.systems import substitute
from parlinalg.linalg.tile_sizes import by_gram, rows_alone
from parlinalg.linalg.tiles import Deal


def lstsq(
    costs: Costs, layout: Layout, shape: tuple[int, int], sides: int, sides_layout: Layout, *, values: Deal,
    alone: bool = True, trees: Collection[int] = (), sound: bool = True,
) -> Costs:  # fmt: skip
    """Add what `lstsq` receives of a matrix of full rank for right-hand sides [m, sides].

    Of lower rank the singular vectors of R, by `svd`, and products with them come in addition; these are not counted.

    Parameters
    ----------
    values : Deal
        How the tiles of the reduction of R of a tall matrix are dealt, if all ranks find its singular values.
    alone : bool
        One rank finds the singular values: of a tall matrix by `planner.by_one`, else by `planner.svd_by_one`.
    trees, sound : optional
        As of `qr`, by the Gram matrix of a tall matrix.
    """
    deal, (m, n) = costs.deal, shape
    wide, k, own = m < n, min(shape), Layout(*sides_layout.dims)
    tried = by_gram(shape, len(costs.i))
    if tried:
        qr_by_gram(costs, layout, shape)
        costs.redistribute("trip to rows", own, rows_alone(costs.deal.sizes), (m, sides))
        costs.all_reduce("products with right-hand sides", costs.everyone, n * sides)
    if tried and sound:
        costs.broadcast("solution to all ranks", costs.everyone, n * sides, 0)
        if alone:
            costs.broadcast("singular values", costs.everyone, n, 0)
        else:
            bidiagonal(costs.with_deal(values), layout, (n, n), keep=False)
            _rank(costs, layout)
    else:
        turned, (high, low) = (Layout(*layout.dims[::-1]), (n, m)) if wide else (layout, shape)
        rows = deal.rows(high)
        right = (0, None) if wide else (sides, own)
        qr_factor(costs, turned, (high, low), trees=trees, extra=right[0], extra_layout=right[1])
        if wide:
            costs.agree(1)
        tops = [x[x < k] for x in rows]
        if k:
            costs.agree(3)
            if alone:
                to_everyone(costs, k, tops)
                costs.broadcast("singular values", costs.everyone, k, 0)
            else:
                bidiagonal(costs, None, (k, k), keep=False)
            _rank(costs, turned)
        more = deal.columns(sides) if wide else [x[x >= low] - low for x in deal.columns(low + sides)]
        if wide:
            costs.bring(own, (m, sides), tops, more)
        substitute(costs, tops, k, after(more, 0), lower=False, adjoint=wide)
        costs.home(own, (k, sides), tops, more)
        if wide:
            costs.bring(own, (k, sides), tops, more)
            turn(costs, panels(k, deal.size), after(more, 0))
            costs.home(own, (n, sides), rows, more)
    if m > n:
        product(costs, "residuals", layout, own, (m, n, sides), own)
        costs.sum_of("residuals", own.dims[0], own.dims[1], sides)
    return costs


def _rank(costs: Costs, layout: Layout) -> None:
    """Add what the number of singular values above a limit receives; they lie as the columns of a matrix."""
    for size in (2, 1):  # the largest one, with whether it is a number, and how many count
        costs.sum_of("rank", layout.dims[1], (), size)
