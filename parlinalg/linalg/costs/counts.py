"""Counts of words and collective calls of every rank, by parts, and the steps that add to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.comm.ledger import Key
from parlinalg.layout import Cut, Layout, coordinates, index_of, span_of
from parlinalg.linalg.tiles import Deal, Numbers, Places, resting, transposed
from parlinalg.moves import moves

Counts = np.ndarray
"""A number for every rank of the grid."""
TO_WORK, HOME, AGREEMENT = "trip to work", "trip home", "agreement on errors"
TERMS_OF_PANELS, TO_ONE_LAYER = "layers' terms of panels", "trip to one layer"
ALONG_ROWS, ALONG_COLUMNS = "panels along grid rows", "panels along grid columns"
UPDATES, TURNS = "products of updates down grid columns", "products of reflections down grid columns"


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
    """Words and calls of every rank of a grid, in parts; the functions of this package add to them.

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
