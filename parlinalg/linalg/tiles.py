"""The working form of factorizations: tiles of a matrix, dealt in turn to the ranks of a grid (block cyclic).

At rest a matrix lies in a `Layout`, in one piece a rank; a factorization would leave the ranks of the first pieces idle
after its first steps.  So it moves to tiles of `size` rows and columns, of which tile (i, j) is that of rank
(i mod R, j mod C), as in ScaLAPACK, and back; no rank receives an element that it has already.  What lies where is
data: for every rank the numbers of its rows and columns, in any order, so that rows that pivoting has interchanged go
home in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from itertools import chain, combinations, pairwise, permutations
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from parlinalg import tunables
from parlinalg.array.core import DistArray
from parlinalg.backend import namespace
from parlinalg.comm import Comm
from parlinalg.comm.shared import meet, shared_array
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, coordinates, cut_lengths, index_of, span_of

Numbers = np.ndarray
"""The numbers of rows or columns, in the order in which a rank has them."""
Places = list[tuple[Numbers, Numbers]]
"""For every rank of the grid the rows and the columns it has."""

SIZE = 64
"""Rows and columns of a tile."""
FEW = 16
"""Ranks of one node up to which what moves between them lies in shared memory."""
SHORT = 8
"""Rows or columns in a mean stretch from which on stretches are copied one by one."""

NONE: Numbers = np.zeros(0, np.intp)
NONE.setflags(write=False)


class Deal:
    """The R × C ranks among which the tiles of matrices are dealt, or D layers of them.  Pure data: no communication.

    With several layers (2.5D) every layer holds the tiles of the whole matrix, whose elements are the sums of the
    layers' terms; each panel of columns is worked on by one of them.

    Parameters
    ----------
    sizes : dict of str to int
        The axes of a grid and their sizes.
    size : int
        Rows and columns of a tile.
    shape : {"square", "tall", "strips", "wide"}
        R near C, else the axes of the grid all along the rows or all along the columns.  In "strips" the rows of a
        grid row follow one another, as at rest.
    depth : int
        The number of layers, a product of sizes of axes.
    workers : int, optional
        With "wide" the number of grid columns that have columns, the first ones; by default all.

    Attributes
    ----------
    row_axes, column_axes, depth_axes : tuple of str
        The axes along which rows are dealt, and columns, and along which the layers lie.
    R, C, D : int
        The numbers of grid rows, of grid columns that have columns, and of layers.

    Raises
    ------
    ValueError
        If no axes of the grid have `depth` ranks.
    """

    def __init__(
        self, sizes: Mapping[str, int], size: int = SIZE, shape: str = "square", depth: int = 1,
        workers: int | None = None,
    ) -> None:  # fmt: skip
        self.sizes, self.size, self.shape = sizes, size, shape
        self.depth_axes = _layered(sizes, shape, depth)
        self.row_axes, self.column_axes = _parted(_without(sizes, self.depth_axes), shape)
        self.R, self.C, self.D = (
            span_of(axes, sizes) for axes in (self.row_axes, self.column_axes, self.depth_axes)
        )  # fmt: skip
        self._idle = 0
        if workers is not None and shape == "wide":
            self.C, self._idle = min(workers, self.C), max(0, self.C - workers)

    @cached_property
    def coords(self) -> list[tuple[int, int]]:
        """The grid row and the grid column of every rank."""
        every = coordinates(tuple(self.sizes), self.sizes)
        return [tuple(index_of(axes, self.sizes, at) for axes in (self.row_axes, self.column_axes)) for at in every]  # type: ignore[misc]

    @cached_property
    def layers(self) -> list[int]:
        """The layer of every rank."""
        return [index_of(self.depth_axes, self.sizes, at) for at in coordinates(tuple(self.sizes), self.sizes)]

    def layer_of(self, k: Any) -> Any:
        """Return the layer that works on the panel with column number k, or those of an array of numbers.

        Layers take turns; the turns shift so that every grid column of every layer gets panels.
        """
        tile, both = k // self.size, math.lcm(self.C, self.D)
        return (tile + tile // both) % self.D

    def rows(self, m: int) -> list[Numbers]:
        """Return for every grid row the numbers of its rows of m, in order."""
        if self.shape == "strips":
            return list(_strips(m, tuple(cut_lengths(m, self.row_axes, self.sizes))))
        return dealt(m, self.size, self.R)

    def columns(self, n: int) -> list[Numbers]:
        """Return for every grid column the numbers of its columns of n, in order."""
        return dealt(n, self.size, self.C) + [NONE] * self._idle

    def most(self, m: int, n: int) -> tuple[int, int]:
        """Return how many of m rows and of n columns the first grid row and grid column have: no other has more."""
        rows = cut_lengths(m, self.row_axes, self.sizes)[0] if self.shape == "strips" else None
        return _first(m, self.size, self.R) if rows is None else rows, _first(n, self.size, self.C)

    def places(self, rows: Sequence[Numbers], columns: Sequence[Numbers]) -> Places:
        """Return the rows and columns of every rank, from those of every grid row and every grid column.

        With several layers each has the columns of its own panels.
        """
        if self.D == 1:
            return [(rows[i], columns[j]) for i, j in self.coords]
        own = [[x[self.layer_of(x) == layer] for layer in range(self.D)] for x in columns]
        return [(rows[i], own[j][layer]) for (i, j), layer in zip(self.coords, self.layers, strict=True)]

    def row_places(self, rows: Sequence[Numbers], columns: Sequence[Numbers]) -> Places:
        """Return the same of the transpose, of which each layer has the rows, now columns, of its own panels."""
        own = [[x[self.layer_of(x) == layer] for layer in range(self.D)] for x in rows]
        return [(columns[j], own[i][layer]) for (i, j), layer in zip(self.coords, self.layers, strict=True)]

    def spread(self, rows: Sequence[Numbers], columns: Sequence[Numbers], ranks: int) -> Places:
        """Return `places` for a grid of more ranks, of which the others have nothing."""
        return self.places(rows, columns) + [(NONE, NONE)] * (ranks - len(self.coords))

    def flat(self) -> Deal:
        """Return the same deal on all ranks of the grid, in one layer."""
        return Deal(self.sizes, self.size, self.shape)

    def owner(self, k: int) -> tuple[int, int]:
        """Return the grid row and the grid column of row and column number k."""
        return k // self.size % self.R, k // self.size % self.C


class Tiles(Deal):
    """The tiles of this rank of a grid, and its communication with the others; the parameters are those of `Deal`.

    Attributes
    ----------
    down, across : Comm
        The ranks of this rank's grid column, among which the rows of a matrix are dealt, and of its grid row.
    deep : Comm
        The ranks at this rank's place in all layers.
    i, j, layer : int
        This rank's grid row, grid column and layer.
    """

    def __init__(
        self, grid: Grid, size: int = SIZE, shape: str = "square", depth: int = 1, workers: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(grid.sizes, size, shape, depth, workers)
        self.grid = grid
        self.deep: Comm = grid.comm(self.depth_axes)
        self.down: Comm = grid.comm(self.row_axes)
        self.across: Comm = grid.comm(self.column_axes)
        here = grid.coords if grid.inside else dict.fromkeys(grid.axes, 0)
        self.i, self.j, self.layer = (
            index_of(axes, grid.sizes, here) for axes in (self.row_axes, self.column_axes, self.depth_axes)
        )

    # ------------------------------------------------------------------ between rest and work
    def bring(
        self, a: DistArray, rows: Sequence[Numbers], columns: Sequence[Numbers], *, lower: bool = False,
        host: bool = False, more: int = 0, cleared: bool = True,
    ) -> Any:  # fmt: skip
        """Return this rank's rows and columns of a matrix, in an array of its own.  Collective.

        The array is on the device of the grid's blocks, or with `host` on the host.  With `lower`, tiles above the
        diagonal are not moved: they are 0, or arbitrary without `cleared`.  `more` columns follow, which are not set.
        """
        return self.bring_to(a, self.places(rows, columns), lower=lower, host=host, more=more, cleared=cleared)

    def bring_to(
        self, a: DistArray, want: Places, *, lower: bool = False, host: bool = False, more: int = 0,
        cleared: bool = True, out: Any = None,
    ) -> Any:  # fmt: skip
        """Return the part of a matrix that `want` gives this rank, as `bring` does; it has all ranks'.  Collective.

        With `out` it is written there.
        """
        a = a.summed()
        block = self.grid.backend.to_host(a.block) if host else a.block
        rest, free = resting(a.layout, a.shape, self.sizes)
        return move(block, rest, want, self.grid, free, self.size if lower else 0, more, cleared, out)

    def count_bring(
        self, a: DistArray, rows: Sequence[Numbers], columns: Sequence[Numbers], *, lower: bool = False
    ) -> None:  # fmt: skip
        """Count the words of `bring` in the ledger, for a matrix on the host that ranks have put in shared memory."""
        rest, free = resting(a.layout, a.shape, self.sizes)
        routes = _routes_of(rest, self.places(rows, columns), self.grid, free, self.size if lower else 0, True)
        for _, receive in routes.turns:
            got = sum(len(i) * len(j) for each in receive for i, j in each)
            self.grid.everyone.count("all_to_all", got, a.dtype.itemsize)

    def home(
        self, block: Any, rows: Sequence[Numbers], columns: Sequence[Numbers], shape: tuple[int, int],
        layout: Layout, *, lower: bool = False, adjoint: bool = False,
    ) -> DistArray:  # fmt: skip
        """Return the matrix of which every rank has these rows and columns, in a layout; `lower` as of `bring`.

        With `adjoint` it is the adjoint of the matrix, and shape and layout are its.  All ranks have theirs on the
        device of the grid's blocks, or all on the host.
        """
        have = self.places(rows, columns)
        if adjoint:
            block, have = block.conj().T, transposed(have)
        return self.home_from(block, have, shape, layout, self.size if lower else 0)

    def home_from(
        self, block: Any, have: Places, shape: tuple[int, int], layout: Layout, lower: int = 0
    ) -> DistArray:  # fmt: skip
        """Return the matrix of which every rank has what `have` says, as `home` does; `lower` as of `move`."""
        rest, _ = resting(layout, shape, self.sizes)
        block = move(block, have, rest, self.grid, lower=lower)
        if isinstance(block, np.ndarray):
            block = self.grid.backend.from_host(block)
        return DistArray(block, shape, layout, self.grid)

    # ------------------------------------------------------------------ layers
    def flat(self) -> Tiles:
        return Tiles(self.grid, self.size, self.shape)

    def own(self, block: np.ndarray, columns: Sequence[Numbers]) -> np.ndarray:
        """Return those of this rank's columns that `places` gives it: the ones of this layer's panels."""
        return block[:, self.layer_of(columns[self.j]) == self.layer] if self.grid.inside else block

    def layered(self, block: Any, columns: Sequence[Numbers]) -> Any:
        """Return this layer's term of a matrix, from the columns that `places` gives this rank: zeros elsewhere."""
        if self.D == 1 or not self.grid.inside:
            return block
        found = self.grid.backend.zeros((len(block), len(columns[self.j])), block.dtype)
        found[:, self.layer_of(columns[self.j]) == self.layer] = block
        return found

    # ------------------------------------------------------------------ communication
    def worst(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks, those outside the grid included.  Collective."""
        return worst(self.grid, values)


def worst(grid: Grid, values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks, those outside the grid included.  Collective."""
    grid.check_open()
    found = np.asarray(values, np.float64)
    grid.world.all_reduce(found, op="max")
    return found.tolist()


def count_worst(grid: Grid, values: int) -> None:
    """Count the words of `worst` in the ledger, for values that ranks have exchanged in shared memory."""
    grid.world.count("all_reduce", grid.world.all_reduce_words(values), 8)


def clear_above(t: Any, rows: Numbers, columns: Numbers, size: int) -> None:
    """Replace what tiles of a matrix, with these rows and columns, have above its diagonal by zeros."""
    for k in range(0, len(columns), size):
        first = int(columns[k])
        top, end = np.searchsorted(rows, [first, first + size])
        t[:top, k : k + size] = 0
        t[top:end, k : k + size] = namespace(t).tril(t[top:end, k : k + size])


def transposed(places: Places) -> Places:
    """Return the places of the transpose."""
    return [(columns, rows) for rows, columns in places]


def indexer(numbers: Numbers) -> Any:
    """Return rising numbers as a slice where they follow one another, since slices index faster; else as they are."""
    if len(numbers) and int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def dealt(n: int, size: int, parts: int) -> list[Numbers]:
    """Return the numbers 0 to n - 1 in tiles of `size`, dealt in turn.

    >>> [each.tolist() for each in dealt(7, 2, 2)]
    [[0, 1, 4, 5], [2, 3, 6]]
    """
    return list(_dealt(n, size, parts))


@lru_cache(maxsize=16)
def _dealt(n: int, size: int, parts: int) -> tuple[Numbers, ...]:
    found, tile = [], np.arange(size)
    for p in range(parts):
        numbers = (np.arange(p * size, n, parts * size)[:, None] + tile).ravel()
        found.append(_kept(numbers[: np.searchsorted(numbers, n)]))
    return tuple(found)


def _first(n: int, size: int, parts: int) -> int:
    """Return how many numbers `dealt` gives the first part.

    >>> _first(7, 2, 2)
    4
    """
    rounds, left = divmod(n, size * parts)
    return rounds * size + min(size, left)


@lru_cache(maxsize=16)
def _strips(n: int, lengths: tuple[int, ...]) -> tuple[Numbers, ...]:
    """Return the numbers 0 to n - 1 in ranges of these lengths."""
    return tuple(map(_kept, np.split(np.arange(n), np.cumsum(lengths)[:-1])))


def _kept(x: Numbers) -> Numbers:
    """Return numbers that are kept for later calls, and so may not change."""
    x.setflags(write=False)
    return x


def _parted(sizes: Mapping[str, int], shape: str) -> tuple[Cut, Cut]:
    """Return the axes along which rows are dealt, and the others."""
    axes = tuple(a for a, n in sizes.items() if n > 1)
    if shape != "square":
        return ((), axes) if shape == "wide" else (axes, ())
    found: tuple[Cut, Cut] = ((), axes)
    least, ranks = math.inf, span_of(axes, sizes)
    for k in range(len(axes) + 1):
        for rows in combinations(axes, k):
            r = span_of(rows, sizes)
            if (worse := max(r, ranks // r)) < least:  # of equals the first: fewer rows
                found, least = (rows, tuple(a for a in axes if a not in rows)), worse
    return found


def _without(sizes: Mapping[str, int], axes: Cut) -> dict[str, int]:
    return {a: n for a, n in sizes.items() if a not in axes}


def depths(sizes: Mapping[str, int]) -> list[int]:
    """Return the numbers of layers that the ranks of a grid can form.

    >>> depths({"d": 2, "r": 4, "c": 3})
    [1, 2, 3, 4, 6, 8, 12, 24]
    """
    return sorted({span_of(axes, sizes) for k in range(len(sizes) + 1) for axes in combinations(sizes, k)})


def check_depth(what: str, depth: Any, sizes: Mapping[str, int]) -> None:
    """Raise ValueError if this is not a number of layers that the ranks of a grid can form."""
    known = isinstance(depth, SupportsIndex) and not (
        isinstance(depth, bool | np.bool_) or getattr(depth, "ndim", None)
    )
    if not known or (depth != 1 and depth not in depths(sizes)):
        raise ValueError(
            f"{what} is a number of layers, one of {', '.join(map(str, depths(sizes)))} on a grid {dict(sizes)}, "
            f"not {depth!r}"
        )


def _layered(sizes: Mapping[str, int], shape: str, depth: int) -> Cut:
    """Return the axes along which the layers lie: those that leave layers nearest to a square."""
    check_depth("depth", depth, sizes)
    if depth == 1:
        return ()
    axes = [a for a, n in sizes.items() if n > 1]
    cuts = [cut for k in range(len(axes) + 1) for cut in combinations(axes, k)]
    found = [cut for cut in cuts if span_of(cut, sizes) == depth]
    if shape != "square":
        return found[0]
    return min(found, key=lambda cut: max(span_of(a, sizes) for a in _parted(_without(sizes, cut), shape)))


def resting(layout: Layout, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Places, Cut]:
    """Return the rows and columns of every rank for a matrix in a layout, and the axes along which they are equal."""
    places, copies = _resting(layout, tuple(shape), tuple(sizes.items()))
    return list(places), copies


@lru_cache(maxsize=64)
def _resting(layout: Layout, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> tuple[Places, Cut]:
    sizes = dict(axes)
    every = [layout.block(shape, sizes, at) for at in coordinates(tuple(sizes), sizes)]
    known: dict[range, Numbers] = {}
    places = [tuple(known.setdefault(r, _kept(np.arange(r.start, r.stop))) for r in block) for block in every]
    return places, tuple(a for a, n in sizes.items() if n > 1 and a not in layout.cut_axes)  # type: ignore[return-value]


Rectangle = tuple[np.ndarray, np.ndarray]
"""Rows and columns of a matrix, by their places in it."""


class _Part(NamedTuple):
    """Rows and columns that two ranks both have: their numbers, rising, and where this rank has them."""

    rows: Numbers
    i: np.ndarray
    columns: Numbers
    j: np.ndarray

    def between(self, first: int, last: int) -> _Part:
        """Return the part with the columns from number `first` up to `last`."""
        a, b = np.searchsorted(self.columns, [first, last])
        return _Part(self.rows, self.i, self.columns[a:b], self.j[a:b])

    def rectangles(self, lower: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the places of rows and columns; with `lower` for the columns of each tile the rows from it on."""
        if not len(self.rows) or not len(self.columns):
            return []
        if not lower:
            return [(self.i, self.j)]
        tiles = self.columns // lower
        edges = [0, *(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(tiles)]
        tops = np.searchsorted(self.rows, tiles[edges[:-1]] * lower).tolist()
        return [(self.i[top:], self.j[a:b]) for top, (a, b) in zip(tops, pairwise(edges), strict=True)]


def move(
    block: Any, have: Places, want: Places, grid: Grid, copies: Cut = (), lower: int = 0, more: int = 0,
    cleared: bool = True, out: Any = None,
) -> Any:  # fmt: skip
    """Return this rank's rows and columns of a matrix of which every rank has others, by all-to-alls.

    What is on a device stays there, as far as the communicator lets it.

    Parameters
    ----------
    block : array
        The rows and columns that `have` says of this rank.
    have, want : list
        The rows and columns of every rank, before and after, in any order.
    copies : tuple of str
        The axes along which ranks have the same block; a rank gets what it wants from the one at its own place.
    lower : int
        If not 0, of tiles of so many columns only the rows from their first column on move; the others become 0, or if
        not `cleared` anything.
    more : int
        Columns of the returned array behind those, which are not set.
    out : array, optional
        The array to return, of a grid of several ranks.

    Each rank receives exactly what it lacks.  Columns travel some at a time, so that what is on the way stays small.
    """
    xp, on_host = namespace(block), isinstance(block, np.ndarray)
    if not grid.inside:
        return xp.empty((0, 0), block.dtype)
    if (
        grid.size == 1
        and not lower
        and not more
        and all(np.array_equal(x, y) for x, y in zip(have[0], want[0], strict=True))
    ):
        return block.copy(order="C")
    size = grid.size
    routes = _routes_of(have, want, grid, copies, lower, on_host)
    if out is None:
        shape = len(want[grid.rank][0]), len(want[grid.rank][1]) + more
        out = (xp.zeros if lower and cleared else xp.empty)(shape, block.dtype)
    elif lower and cleared:
        out[...] = 0
    for there, here in routes.stay:
        _copy(out, there, block, here)
    if size == 1:
        return out
    ends = routes.ends
    most = (2, 0 if ends is None else int(ends[-1, -1].max(initial=0)))
    with shared_array(grid.everyone, most, block.dtype) if on_host else nullcontext() as memory:
        for turn, (send, receive) in enumerate(routes.turns):
            gave, got = ([sum(len(i) * len(j) for i, j in each) for each in parts] for parts in (send, receive))
            if memory is None:
                outbox, inbox = xp.empty(sum(gave), block.dtype), xp.empty(sum(got), block.dtype)
                sources, targets = _cut(inbox, receive), _cut(outbox, send)
            else:
                room = memory[turn % 2]
                to, of = ends[grid.rank, :, turn] - gave, ends[:, grid.rank, turn] - got
                targets = chain.from_iterable(_cut(room[k:], [each]) for k, each in zip(to, send, strict=True))
                sources = chain.from_iterable(_cut(room[k:], [each]) for k, each in zip(of, receive, strict=True))
            for part, here in targets:
                _copy(part, None, block, here)
            if memory is None:
                grid.everyone.all_to_all(outbox, gave, inbox, got)
            else:
                grid.everyone.count("all_to_all", sum(got), block.itemsize)
                meet(grid.everyone)
            for part, there in sources:
                _copy(out, there, part, None)
    return out


class _Routes(NamedTuple):
    """The parts of a matrix that a rank keeps, sends and receives when it is redistributed."""

    stay: list[tuple[Rectangle, Rectangle]]
    """The places, afterwards and before, of what it has and keeps."""
    turns: list[tuple[list[list[Rectangle]], list[list[Rectangle]]]]
    """For every turn the places of what it gives to each rank, and of what it gets from each."""
    ends: Any
    """For each pair of ranks and turn, where in shared memory ends what goes from one to the other; None for none."""


_known: dict[Any, tuple[_Routes, Any]] = {}
"""The latest routes, by the identities of the numbers between which they are, with these numbers."""
KNOWN = 16
"""Routes that are kept: to find them takes as long as to copy a million elements."""


def _routes_of(have: Places, want: Places, grid: Grid, copies: Cut, lower: int, on_host: bool) -> _Routes:
    """Return the routes of `move`, which are kept for matrices that lie alike."""
    numbers = [id(x) for places in (have, want) for both in places for x in both]
    key = (tuple(numbers), tuple(grid.sizes.items()), grid.rank, copies, lower, on_host, tunables.TILES_MOVED)
    if key in _known:
        found, held = _known.pop(key)
    else:
        found, held = _routes(have, want, grid, copies, lower, on_host), (list(have), list(want))
    if all(not x.flags.writeable for places in (have, want) for both in places for x in both):
        _known[key] = found, held
        while len(_known) > KNOWN:
            del _known[next(iter(_known))]
    return found


def _routes(have: Places, want: Places, grid: Grid, copies: Cut, lower: int, on_host: bool) -> _Routes:
    me, size = grid.rank, grid.size
    at = [tuple(grid.coords_of(p)[a] for a in copies) for p in range(size)]
    memo: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def common(x: Numbers, y: Numbers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = (id(x), id(y))
        if key not in memo:
            memo[key] = _common(x, y)
        return memo[key]

    gives, gets = ([_Part(*[NONE] * 4)] * size for _ in range(2))
    for p in range(size):
        if at[p] == at[me]:
            (rows, i, _), (columns, j, _) = (common(x, y) for x, y in zip(have[me], want[p], strict=True))
            gives[p] = _Part(rows, i, columns, j)
            (rows, _, i), (columns, _, j) = (common(x, y) for x, y in zip(have[p], want[me], strict=True))
            gets[p] = _Part(rows, i, columns, j)
    stay = list(zip(gets[me].rectangles(lower), gives[me].rectangles(lower), strict=True))
    if size == 1:
        return _Routes(stay, [], None)
    gives[me] = gets[me] = _Part(*[NONE] * 4)
    m, n = (1 + max((int(places[d].max()) for places in have if len(places[d])), default=-1) for d in range(2))
    width = max(1, size * tunables.TILES_MOVED // max(1, m))
    width = -(-width // lower) * lower if lower else width
    ends: Any = None
    if size <= FEW and on_host:
        amounts, step = np.zeros((size, size, -(-n // width)), np.int64), lower or width
        heights: dict[int, np.ndarray] = {}  # for each tile of columns, or turn: the rows of a part that travel
        widths: dict[int, np.ndarray] = {}  # and the columns
        for p, q in permutations(range(size), 2):
            if at[p] == at[q] and len(have[p][1]) and len(want[q][1]):
                (rows, *_), (columns, *_) = (common(x, y) for x, y in zip(have[p], want[q], strict=True))
                if id(rows) not in heights:
                    above = np.searchsorted(rows, np.arange(0, n, step)) if lower else np.zeros(-(-n // step), int)
                    heights[id(rows)] = len(rows) - above
                if id(columns) not in widths:
                    widths[id(columns)] = np.bincount(columns // step, minlength=-(-n // step))
                each = heights[id(rows)] * widths[id(columns)]
                amounts[p, q] = np.add.reduceat(each, np.arange(0, len(each), width // step)) if len(each) else 0
        ends = amounts.reshape(size * size, -1).cumsum(axis=0).reshape(amounts.shape)
    turns = []
    for first in range(0, n, width):
        send, receive = (
            [part.between(first, first + width).rectangles(lower) for part in parts] for parts in (gives, gets)
        )
        turns.append((send, receive))
    return _Routes(stay, turns, ends)


def _common(x: Numbers, y: Numbers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers that are in both, rising, and their places in each; no number is twice in one."""
    if not len(x) or not len(y):
        return NONE, NONE, NONE
    place = np.full(1 + max(int(x.max()), int(y.max())), -1, np.intp)
    place[y] = np.arange(len(y))
    also = place[x]
    at = np.flatnonzero(also >= 0)
    numbers = x[at]
    if (numbers[1:] < numbers[:-1]).any():
        order = np.argsort(numbers)
        at, numbers = at[order], numbers[order]
    return numbers, at, also[at]


def _cut(flat: Any, parts: Iterable[Iterable[Rectangle]]) -> Iterator[tuple[Any, Rectangle]]:
    """Yield the rectangles of all parts, which lie one after the other in `flat`, as matrices, with their places."""
    start = 0
    for i, j in chain.from_iterable(parts):
        end = start + len(i) * len(j)
        yield flat[start:end].reshape(len(i), len(j)), (i, j)
        start = end


def _copy(to: Any, there: Rectangle | None, of: Any, here: Rectangle | None) -> None:
    """Copy a rectangle of one matrix to one of another, in stretches that lie together in both; None is all of it.

    On a device one kernel copies all of it, unless one stretch is the whole.
    """
    short = SHORT if isinstance(to, np.ndarray) else to.size + 1
    first, second = ((None, None) if at is None else at for at in (there, here))
    rows, columns = (list(_together(x, y, short)) for x, y in zip(first, second, strict=True))
    for i, k in rows:
        for j, l in columns:
            if isinstance(i, slice) or isinstance(j, slice):
                to[i, j] = of[k, l]
            else:
                to[i[:, None], j] = of[k[:, None], l]


def _together(x: np.ndarray | None, y: np.ndarray | None, short: int) -> Iterator[tuple[Any, Any]]:
    """Yield slices for the stretches in which both rise by ones; all at once as they are where they are short.

    None counts from 0 on, as far as the other goes.
    """
    n = len(x) if x is not None else len(y) if y is not None else 0
    rising = [at[1:] - at[:-1] == 1 for at in (x, y) if at is not None]
    edges = np.flatnonzero(~(rising[0] & rising[-1])) + 1
    if len(edges) * short > n:
        every = np.arange(n)
        yield every if x is None else x, every if y is None else y
        return
    for a, b in pairwise([0, *edges.tolist(), n] if n else ()):
        first, second = (a if at is None else int(at[a]) for at in (x, y))
        yield slice(first, first + b - a), slice(second, second + b - a)
