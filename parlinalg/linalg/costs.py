"""Words and collective calls of factorizations, of every rank and step by step.  Pure data: nothing is sent.

The counts follow from the same dealt numbers that the factorizations work with, and equal those of the ledger exactly.
Words are elements, as the ledger counts them: a rank receives n − own in an all-gather of n elements, 2(n − own) in an
all-reduce, n in a broadcast (0 at its root), and in the trips to tiles and back the elements that it lacks.

Four things depend on the values of a matrix and are arguments: how many pivots of a panel each grid row has
(`winners`; by default as evenly as its rows allow), the columns that pivoting takes (`order`; by default one after the
other), which panels of QR are so ill conditioned that they take TSQR (`trees`; by default none) and how many
eigenvectors of each merge of divide and conquer are no longer known (`kept`; by default all).  One depends on the
machine: to how many ranks `eigh` and `svd` deal their reduction (`workers`; by default to all).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.comm.ledger import Key
from parlinalg.layout import Cut, Layout, coordinates, index_of, span_of
from parlinalg.linalg.bidiagonal import TALL, panel_size
from parlinalg.linalg.divide import LEAF
from parlinalg.linalg.eigh import PANEL, TOGETHER, parts
from parlinalg.linalg.lu import shares
from parlinalg.linalg.pivoted import LONG
from parlinalg.linalg.pivoted import PANEL as PIVOTED
from parlinalg.linalg.qr import QR
from parlinalg.linalg.tile_sizes import by_gram, rows_alone
from parlinalg.linalg.tiles import Deal, Numbers, Places, dealt, resting, transposed
from parlinalg.linalg.triangular import FEW
from parlinalg.linalg.triangular import resting as triangle_at_rest
from parlinalg.matmul.assign import assign
from parlinalg.moves import moves

Counts = np.ndarray
"""A number for every rank of the grid."""
TO_WORK, HOME, AGREEMENT = "trip to work", "trip home", "agreement on errors"
TERMS_OF_PANELS, TO_ONE_LAYER = "layers' terms of panels", "trip to one layer"
ALONG_ROWS, ALONG_COLUMNS = "panels along grid rows", "panels along grid columns"
UPDATES, TURNS = "products of updates down grid columns", "products of reflections down grid columns"
HELD = 4
"""The squares [n, n] in a rank's rows of a matrix from which on every rank may hold R while its values are found."""


@dataclass
class Part:
    """One kind of step: the operation, the axes over which it runs, and for every rank the words and calls."""

    name: str
    op: str
    axes: Cut
    words: Counts
    calls: Counts


class Group(NamedTuple):
    """The ranks of a communicator: its axes, as the ledger names them, its size, and every rank's number in it."""

    axes: Cut
    size: int
    place: Counts


class Costs:
    """Words and calls of every rank of a grid, in parts; the functions of this module add to them.

    Parameters
    ----------
    deal : Deal
        The grid rows and columns, and the size of the tiles.
    itemsize : int
        Bytes of an element.
    ranks : int, optional
        The ranks that agree on errors, where some are outside the grid.

    Attributes
    ----------
    parts : list of Part
        In the order in which they first occur.
    """

    def __init__(self, deal: Deal, itemsize: int = 8, ranks: int | None = None) -> None:
        self.deal, self.itemsize = deal, itemsize
        self.i, self.j = np.array(deal.coords).reshape(-1, 2).T
        """The grid row and the grid column of every rank."""
        size = len(self.i)
        self.layer = np.array(deal.layers, np.int64)
        self.down = Group(self._label(deal.row_axes), deal.R, self.i)
        self.across = Group(self._label(deal.column_axes), span_of(deal.column_axes, deal.sizes), self.j)
        self.deep = Group(self._label(deal.depth_axes), deal.D, self.layer)
        self.everyone = Group(tuple(deal.sizes), size, np.arange(size))
        self.world = Group((), size if ranks is None else ranks, np.arange(size))
        self._parts: dict[tuple[str, str, Cut], Part] = {}

    def _label(self, axes: Cut) -> Cut:
        sizes = self.deal.sizes
        longer = tuple(a for a in axes if sizes[a] > 1)
        return tuple(sizes) if longer == tuple(a for a, n in sizes.items() if n > 1) else longer

    def with_deal(self, deal: Deal) -> Costs:
        """Return costs of another deal on the same grid, which add to the same parts."""
        found = Costs(deal, self.itemsize, self.world.size)
        found._parts = self._parts
        return found

    def along(self, axes: Cut) -> Group:
        """Return the ranks that differ from each rank only along some axes."""
        sizes = self.deal.sizes
        place = np.array([index_of(axes, sizes, at) for at in coordinates(tuple(sizes), sizes)])
        return Group(self._label(axes), span_of(axes, sizes), place)

    @property
    def parts(self) -> list[Part]:
        return list(self._parts.values())

    @property
    def words(self) -> Counts:
        """The words that every rank receives."""
        return sum((part.words for part in self.parts), np.zeros(len(self.i), np.int64))

    @property
    def calls(self) -> Counts:
        """The collective calls in which every rank takes part."""
        return sum((part.calls for part in self.parts), np.zeros(len(self.i), np.int64))

    def book(self, rank: int) -> tuple[Counter[Key], Counter[Key]]:
        """Return the words and the calls of a rank by operation and axes, as a ledger has them."""
        words: Counter[Key] = Counter()
        calls: Counter[Key] = Counter()
        for part in self.parts:
            if part.calls[rank]:
                words[part.op, part.axes] += int(part.words[rank])
                calls[part.op, part.axes] += int(part.calls[rank])
        return words, calls

    # ------------------------------------------------------------------ the operations
    def note(
        self, name: str, op: str, group: Group, words: Counts, who: Counts | bool = True, times: Counts | int = 1
    ) -> None:
        """Add calls of an operation, in which a rank receives so many words in all, on the ranks `who`."""
        if group.size == 1:
            return
        zero = np.zeros(len(self.i), np.int64)
        part = self._parts.setdefault((name, op, group.axes), Part(name, op, group.axes, zero, zero))
        calls = np.where(who, times, 0)
        part.words, part.calls = part.words + np.where(who, words, 0), part.calls + calls

    def broadcast(self, name: str, group: Group, size: Counts | int, root: int, who: Counts | bool = True) -> None:
        self.note(name, "broadcast", group, np.where(group.place == root, 0, size), who)

    def all_gather(self, name: str, group: Group, total: Counts | int, own: Counts, who: Counts | bool = True) -> None:
        self.note(name, "all_gather", group, total - own, who)

    def in_turn(self, name: str, first: tuple[Counts, Counts], then: tuple[Counts, Counts], who: Counts) -> None:
        """Add all-gathers down grid columns, in all and of own words, for the next panel's columns and for the rest."""
        self.all_gather(name, self.down, *first, who=who & (first[0] > 0))
        self.all_gather(name, self.down, *then, who=who & ((then[0] > 0) | (first[0] == 0)))

    def all_reduce(
        self, name: str, group: Group, size: Counts | int, who: Counts | bool = True, times: Counts | int = 1
    ) -> None:
        own = size // group.size + (group.place < size % group.size)
        self.note(name, "all_reduce", group, 2 * (size - own) * times, who, times)

    def terms(self, name: str, size: Counts, root: int, layers: int, who: Counts | bool = True) -> None:
        """Add the terms of the first `layers` layers that layer `root` receives, of so many elements each."""
        others = [x for x in range(min(layers, self.deal.D)) if x != root]
        if others:
            self.note(name, "receive", self.deep, size * len(others), who & (self.layer == root), len(others))
            self.note(name, "send", self.deep, 0 * size, who & np.isin(self.layer, others))

    def trip(self, name: str, have: Places, want: Places, lower: int = 0) -> None:
        """Add the all-to-alls in which every rank receives what it lacks of the rows and columns that it wants.

        With `lower` of tiles of so many columns only the rows from their first column on move.
        """
        known: dict[tuple[int, int], Numbers] = {}
        tiled: dict[int, tuple[Numbers, Numbers]] = {}

        def common(x: Numbers, y: Numbers) -> Numbers:
            key = (id(x), id(y))
            if key not in known:
                known[key] = _common(x, y)
            return known[key]

        def elements(rows: Numbers, columns: Numbers) -> int:
            if not lower:
                return len(rows) * len(columns)
            if id(columns) not in tiled:
                tiles, counts = np.unique(columns // lower, return_counts=True)
                tiled[id(columns)] = tiles * lower, counts
            first, counts = tiled[id(columns)]
            return int(((len(rows) - np.searchsorted(rows, first)) * counts).sum())

        pairs = zip(have, want, strict=True)
        words = [elements(r, c) - elements(common(x, r), common(y, c)) for (x, y), (r, c) in pairs]
        m, n = (1 + max((int(places[d].max()) for places in have if len(places[d])), default=-1) for d in range(2))
        width = max(1, len(self.i) * tunables.TILES_MOVED // max(1, m))
        times = -(-n // (-(-width // lower) * lower if lower else width))
        self.note(name, "all_to_all", self.everyone, np.array(words, np.int64), times=times)

    def redistribute(self, name: str, src: Layout, dst: Layout, shape: tuple[int, ...]) -> None:
        """Add a change of layout; a long one goes in pieces, which count as one call here."""
        sizes = self.deal.sizes
        at = list(coordinates(tuple(sizes), sizes))
        for step in moves(src, dst, sizes):
            if step.op in ("mask", "embed", "slice") or 0 in shape:
                continue
            words = np.array([step.words(shape, sizes, here) for here in at], np.int64)
            op, who = "all_to_all" if step.op == "exchange" else step.op, np.ones(len(at), bool)
            if op == "all_gather":  # in pieces of the dims before, of which there is none in an empty block
                blocks = [step.src.block(shape, sizes, here)[: step.dim] for here in at]
                who = np.array([all(map(len, block)) for block in blocks])
            group = Group(self._label(step.axes), span_of(step.axes, sizes), self.everyone.place)
            self.note(name, op, group, words, who)

    def sum_of(self, name: str, over: Cut, rest: Cut, size: int) -> None:
        """Add the sum, or another reduction, over axes, of vectors of `size` elements that axes `rest` cut."""
        sizes = self.deal.sizes
        axes = tuple(a for a in sizes if a in over and sizes[a] > 1)
        self.redistribute(name, Layout(rest, partial=axes), Layout(rest), (size,))

    # ------------------------------------------------------------------ what the factorizations begin and end with
    def bring(
        self, layout: Layout, shape: tuple[int, int], rows: Sequence[Numbers], columns: Sequence[Numbers],
        lower: int = 0,
    ) -> None:  # fmt: skip
        """Add the trip of a matrix from its layout to work."""
        self.trip(TO_WORK, resting(layout, shape, self.deal.sizes)[0], self.deal.places(rows, columns), lower)

    def home(
        self, layout: Layout, shape: tuple[int, int], rows: Sequence[Numbers], columns: Sequence[Numbers],
        lower: int = 0, adjoint: bool = False,
    ) -> None:  # fmt: skip
        """Add the trip of a matrix, or of its adjoint, from work to a layout."""
        have = self.deal.places(rows, columns)
        self.trip(HOME, transposed(have) if adjoint else have, resting(layout, shape, self.deal.sizes)[0], lower)

    def agree(self, count: int) -> None:
        """Add the agreement of all ranks on so many numbers."""
        self.all_reduce(AGREEMENT, self.world, count)


def panels(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first column and the width of every panel."""
    return ((k, min(size, n - k)) for k in range(0, n, size))


def _common(x: Numbers, y: Numbers) -> Numbers:
    """Return the numbers that are in both of two arrays, each of which has none twice, in order."""
    if any((a[1:] < a[:-1]).any() for a in (x, y)):
        return np.intersect1d(x, y, assume_unique=True)
    x, y = (x, y) if len(x) <= len(y) else (y, x)
    if not len(x) or y[-1] - y[0] + 1 == len(y):  # all from the first to the last
        return x[slice(*np.searchsorted(x, (y[0], y[-1] + 1)))] if len(x) else x
    return x[y[np.minimum(np.searchsorted(y, x), len(y) - 1)] == x]


def after(every: Sequence[Numbers], k: int) -> Counts:
    """Return for each grid row (or column) how many of its numbers are k or more."""
    return np.array([len(x) - np.searchsorted(x, k) for x in every], np.int64)


# ------------------------------------------------------------------------------------------------ factorizations
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


def _by_gram(costs: Costs, layout: Layout, shape: tuple[int, int]) -> None:
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
        _by_gram(costs, layout, shape)
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
        _by_gram(costs, layout, shape)
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
        _times_square(costs, "Q times the Q of R", layout, shape)
        return costs
    costs.bring(layout, (n, n), tops, deal.columns(n))
    turn(costs, panels(n, deal.size), after(deal.columns(n), 0))
    costs.home(layout, shape, deal.rows(m), deal.columns(n))
    return costs


def _times_square(costs: Costs, name: str, layout: Layout, shape: tuple[int, int]) -> None:
    """Add the product of a matrix [m, n] with one [n, n], all in one layout."""
    m, n = shape
    costs.redistribute(name, _product(costs, name, layout, layout, (m, n, n)), layout, shape)


def _product(
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
        _by_gram(costs, layout, shape)
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
                _to_everyone(costs, k, tops)
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
        _product(costs, "residuals", layout, own, (m, n, sides), own)
        costs.sum_of("residuals", own.dims[0], own.dims[1], sides)
    return costs


def _rank(costs: Costs, layout: Layout) -> None:
    """Add what the number of singular values above a limit receives; they lie as the columns of a matrix."""
    for size in (2, 1):  # the largest one, with whether it is a number, and how many count
        costs.sum_of("rank", layout.dims[1], (), size)


# ------------------------------------------------------------------------------------------------ reductions
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
        _by_gram(costs, layout, shape)
    gram = gram and bool(sound)
    if gram and not alone:
        costs.redistribute(HOME, rows_alone(costs.deal.sizes), layout, shape)
    before, tops = costs.with_deal(first), [x[x < n] for x in first.rows(m)]
    if tall and not gram:
        qr_factor(before, layout, shape, trees=trees)
        if alone:
            _to_everyone(before, n, tops)
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
        _times_square(costs, "Q times U", layout, (m, n))
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


def _to_everyone(costs: Costs, n: int, tops: Sequence[Numbers]) -> None:
    """Add the trip of R [n, n] from tiles to all ranks."""
    every, deal = np.arange(n), costs.deal
    costs.trip("R to all ranks", deal.places(tops, deal.columns(n)), [(every, every)] * len(costs.i))
