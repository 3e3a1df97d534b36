"""Words and calls of Cholesky and LU factorizations and of solving with triangles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parlinalg.layout import Layout
from parlinalg.linalg.costs.counts import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    TERMS_OF_PANELS,
    TO_ONE_LAYER,
    Costs,
    Counts,
    Group,
    after,
    panels,
)
from parlinalg.linalg.panels.lu import shares
from parlinalg.linalg.panels.triangular import FEW
from parlinalg.linalg.panels.triangular import resting as triangle_at_rest
from parlinalg.linalg.tiles import Deal, Numbers, transposed


def cho_factor(costs: Costs, layout: Layout, n: int) -> Costs:
    """Add what `cho_factor` receives of a matrix [n, n] that lies in a layout."""
    _cholesky(costs, layout, n)
    if (deal := costs.deal).D > 1:
        flat = deal.flat()
        rows, columns = deal.rows(n), deal.columns(n)
        want = flat.places(flat.rows(n), flat.columns(n))
        costs.trip(TO_ONE_LAYER, deal.places(rows, columns), want, lower=deal.size)
    return costs


def _cholesky(costs: Costs, layout: Layout, n: int) -> None:
    deal = costs.deal
    rows, columns = deal.rows(n), deal.columns(n)
    costs.bring(layout, (n, n), rows, columns, lower=deal.size)
    # of what is not factored yet: rows of each grid row, columns of each grid column, and numbers that both have
    below, beside, both = after(rows, 0), after(columns, 0), np.zeros((len(rows), len(columns)), np.int64)
    for k, b in panels(n, deal.size):
        both[deal.owner(k)] += b
    for k, b in panels(n, deal.size):
        (i, j), root = deal.owner(k), deal.layer_of(k)
        here, left = costs.layer == root, below[costs.i]
        below[i], beside[j], both[i, j] = below[i] - b, beside[j] - b, both[i, j] - b
        mine, rest = both[costs.i, costs.j], beside[costs.j]
        ahead = np.where(costs.j == deal.owner(k + b)[1], min(deal.size, n - k - b), 0)  # columns of the next panel
        own = np.where(costs.i == deal.owner(k + b)[0], ahead, 0)
        costs.terms(TERMS_OF_PANELS, left * b, root, k // deal.size, who=costs.j == j)
        costs.broadcast("corners down grid columns", costs.down, b * b, i, who=here & (costs.j == j))
        costs.broadcast(ALONG_ROWS, costs.across, left * b, j, who=here)
        costs.in_turn(ALONG_COLUMNS, (ahead * b, own * b), ((rest - ahead) * b, (mine - own) * b), here)
    costs.agree(2)


def cholesky(costs: Costs, layout: Layout, n: int) -> Costs:
    """Add what `cholesky` receives: the factorization, and L's trip home, but where all ranks see all panels pass."""
    deal = costs.deal
    _cholesky(costs, layout, n)
    if deal.R * deal.D > 1:
        costs.home(layout, (n, n), deal.rows(n), deal.columns(n), lower=deal.size)
    return costs


def even_winners(deal: Deal, m: int, n: int) -> Counts:
    """Return for every panel and every grid row how many pivots are its own, if each has its share of those left."""
    active = after(deal.rows(m), 0)
    found = []
    for _, b in panels(min(m, n), deal.size):
        share = shares(active, b)
        active = active - share
        found.append(share)
    return np.array(found, np.int64).reshape(-1, deal.R)


def lu_factor(
    costs: Costs, layout: Layout, shape: tuple[int, int], *, winners: Counts | None = None, extra: int = 0,
    extra_layout: Layout | None = None, places: Sequence[Numbers] | None = None,
) -> Costs:  # fmt: skip
    """Add what `lu_factor` receives of a matrix and of `extra` right-hand sides, which are further columns.

    Parameters
    ----------
    winners : array [panels, R], optional
        For every panel and every grid row how many of the panel's pivots it has.
    places : list of array, optional
        For every grid row the numbers of its rows in P A, which count where there are several layers.
    """
    deal, (m, n) = costs.deal, shape
    costs.bring(layout, shape, deal.rows(m), deal.columns(n))
    columns = deal.columns(n + extra)
    if extra_layout is not None:
        costs.bring(extra_layout, (m, extra), deal.rows(m), [x[x >= n] - n for x in columns])
    winners = even_winners(deal, m, n) if winners is None else winners
    active = after(deal.rows(m), 0)
    for (k, b), won in zip(panels(min(m, n), deal.size), winners, strict=True):
        j, root = deal.owner(k)[1], deal.layer_of(k)
        here = costs.layer == root
        proposed, wide = np.minimum(b, active) * b, after(columns, k + b)[costs.j]
        costs.terms(TERMS_OF_PANELS, active[costs.i] * b, root, k // deal.size, who=costs.j == j)
        costs.all_gather("tournament", costs.down, proposed.sum(), proposed[costs.i], who=here & (costs.j == j))
        pivots = 2 * b * 8 // costs.itemsize  # whose rows are the pivots
        costs.broadcast(ALONG_ROWS, costs.across, pivots + b * b + active[costs.i] * b, j, who=here)
        costs.broadcast("pivots to the other layers", costs.deep, pivots + b, root)
        costs.terms("layers' terms of rows of U", won[costs.i] * wide, root, deal.D)
        ahead = (after(columns, k + b) - after(columns, min(k + b + deal.size, m, n)))[costs.j]
        costs.in_turn("rows of U down grid columns", (b * ahead, won[costs.i] * ahead),
                      (b * (wide - ahead), won[costs.i] * (wide - ahead)), here)  # fmt: skip
        active = active - won
    if deal.D > 1:
        _to_one_layer(costs, shape, columns, positions(deal, m, n, winners) if places is None else places)
    costs.agree(2)
    return costs


def _to_one_layer(costs: Costs, shape: tuple[int, int], columns: Sequence[Numbers], places: Sequence[Numbers]) -> None:
    """Add the trips of L, and of U with the right-hand sides, to tiles of one layer."""
    deal, m, k = costs.deal, shape[0], min(shape)
    flat = deal.flat()

    def inner(every: Sequence[Numbers]) -> list[Numbers]:
        return [x[x < k] for x in every]

    rows, wide = flat.rows(m), flat.columns(sum(map(len, columns)))
    costs.all_gather("order of the rows", costs.down, m, after(places, 0)[costs.i])
    have, want = deal.places(places, inner(columns)), flat.places(rows, inner(wide))
    costs.trip(TO_ONE_LAYER, have, want, lower=deal.size)
    have, want = deal.row_places(inner(places), columns), transposed(flat.places(inner(rows), wide))
    costs.trip(TO_ONE_LAYER, have, want, lower=deal.size)


def positions(deal: Deal, m: int, n: int, winners: Counts | None = None) -> list[Numbers]:
    """Return for every grid row the numbers of its rows in P A; of a panel's winners the first grid row has the first.

    In which order the winners of one panel stand depends on the values, and changes what the trip home receives.
    """
    winners = even_winners(deal, m, n) if winners is None else winners
    won: list[list[int]] = [[] for _ in range(deal.R)]
    for (k, _), counts in zip(panels(min(m, n), deal.size), winners, strict=True):
        first = k
        for mine, count in zip(won, counts.tolist(), strict=True):
            mine += range(first, first + count)
            first += count
    start, found = min(m, n), []
    for mine, total in zip(won, after(deal.rows(m), 0).tolist(), strict=True):
        left = total - len(mine)
        found.append(np.array([*mine, *range(start, start + left)], np.int64))
        start += left
    return found


def lu(
    costs: Costs, layout: Layout, shape: tuple[int, int], *, places: Sequence[Numbers] | None = None
) -> Costs:  # fmt: skip
    """Add what `lu` receives: the factorization, the rows' numbers, and the trips of L and U home.

    Parameters
    ----------
    places : list of array, optional
        `LUFactor.pivoted`: for every grid row the numbers of its rows in P A.
    """
    deal, (m, n) = costs.deal, shape
    k = min(m, n)
    places = positions(deal, m, n) if places is None else places
    lu_factor(costs, layout, shape, winners=winners_of(places, deal, k), places=places)
    if deal.D > 1:
        costs = costs.with_deal(deal := deal.flat())
        places = deal.rows(m)
    else:
        costs.all_gather("order of the rows", costs.down, m, after(places, 0)[costs.i])
    columns = deal.columns(n)
    costs.home(layout, (m, k), places, [x[x < k] for x in columns])
    costs.home(layout, (k, n), [x[x < k] for x in places], columns)
    return costs


def winners_of(places: Sequence[Numbers], deal: Deal, k: int) -> Counts:
    """Return for every panel and every grid row how many pivots are its own, from the numbers of its rows in P A."""
    bounds = [*range(0, k, deal.size), k]
    return np.array([np.diff(np.searchsorted(x, bounds)) for x in places], np.int64).T


def solve(
    costs: Costs, layout: Layout, n: int, sides: int, sides_layout: Layout, *,
    places: Sequence[Numbers] | None = None,
) -> Costs:  # fmt: skip
    """Add what `solve` receives: LU with the right-hand sides [n, sides] as further columns, and U's substitution."""
    deal = costs.deal
    places = positions(deal, n, n) if places is None else places
    lu_factor(
        costs, layout, (n, n), winners=winners_of(places, deal, n), extra=sides, extra_layout=sides_layout,
        places=places,
    )  # fmt: skip
    if deal.D > 1:
        costs = costs.with_deal(deal := deal.flat())
        places = deal.rows(n)
    more = [x[x >= n] - n for x in deal.columns(n + sides)]
    substitute(costs, places, n, after(more, 0), lower=False)
    costs.home(sides_layout, (n, sides), places, more)
    return costs


def substitute(
    costs: Costs, rows: Sequence[Numbers], n: int, wide: Counts, *, lower: bool, adjoint: bool = False
) -> Costs:  # fmt: skip
    """Add what forward or backward substitution on tiles receives.

    Parameters
    ----------
    rows : sequence of array
        For every grid row the numbers of its rows.
    wide : array
        For every grid column how many right-hand sides it has.
    """
    deal, total, sides = costs.deal, after(rows, 0), int(wide.sum())
    wide = wide[costs.j]
    if len(costs.i) > 1 and sides <= FEW:
        columns, name = deal.columns(n), "right-hand sides to all grid columns"
        costs.all_gather(name, costs.across, total[costs.i] * sides, total[costs.i] * wide)
        pieces = [(k, k + b) for k, b in panels(n, deal.size)]
        if adjoint:
            costs.all_gather("right-hand sides to columns", costs.down, n * sides, total[costs.i] * sides)
            solved(costs, costs.across, costs.down, (columns, rows), sides, pieces)
        else:
            solved(costs, costs.down, costs.across, (rows, columns), sides, pieces)
            own = after(columns, 0)[costs.j] * sides
            costs.all_gather("solutions to all grid columns", costs.across, n * sides, own)
        return costs
    for k, b in panels(n, deal.size):
        low, high = after(rows, k), after(rows, k + b)
        size, own = (low if lower else total - high)[costs.i], (low - high)[costs.i]
        costs.broadcast("triangle along grid rows", costs.across, size * b, deal.owner(k)[1])
        costs.all_gather("right-hand sides down grid columns", costs.down, b * (b + wide), own * (b + wide))
        if adjoint:
            costs.all_reduce("sums down grid columns", costs.down, b * wide)
    return costs


def solved(
    costs: Costs, down: Group, across: Group, numbers: tuple[Sequence[Numbers], Sequence[Numbers]], sides: int,
    pieces: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    """Add what `triangular.solved` receives; `down` and `across` are every rank's grid column and grid row there."""
    for k, end in pieces:
        size = end - k
        rows, columns = (after(some, k) - after(some, end) for some in numbers)
        own, having = rows[down.place], columns[across.place] > 0
        costs.all_reduce("sums of pieces of the solution", across, own * sides, own > 0)
        if (rows > 0).sum() > 1:
            costs.all_gather("corners", down, size * (size + sides), own * (size + sides), having)
            continue
        if (columns > 0).sum() > 1:
            costs.all_gather("corners", across, size * size, columns[across.place] * size, own > 0)
        name = "pieces of the solution"
        costs.broadcast(name, down, columns[across.place] * sides, int(np.argmax(rows > 0)), having)


def solve_triangular(
    costs: Costs, layout: Layout, n: int, sides: int, sides_layout: Layout, *, adjoint: bool = False
) -> Costs:  # fmt: skip
    """Add what `solve_triangular` receives: for few right-hand sides where the matrix rests, else on tiles."""
    deal, sizes = costs.deal, costs.deal.sizes
    if len(costs.i) == 1 or sides <= FEW:
        cuts = layout.dims[::-1] if adjoint else layout.dims
        rows, columns, pieces, *_ = triangle_at_rest(cuts, tuple(sizes.items()), n, lower=True)
        there, back = Layout(cuts[0], None), Layout(cuts[1], None)
        costs.redistribute("right-hand sides to where the matrix rests", sides_layout, there, (n, sides))
        down, across = (costs.along(cut) for cut in cuts)
        solved(costs, down, across, (rows, columns), sides, pieces)
        costs.redistribute("solutions", back, sides_layout, (n, sides))
    else:
        rows, columns = deal.rows(n), deal.columns(sides)
        costs.bring(sides_layout, (n, sides), rows, columns)
        costs.bring(layout, (n, n), rows, deal.columns(n))
        substitute(costs, rows, n, after(columns, 0), lower=True, adjoint=adjoint)
        costs.home(sides_layout, (n, sides), rows, columns)
    costs.agree(2)
    return costs
