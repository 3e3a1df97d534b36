"""Eigenvalues and eigenvectors of Hermitian matrices on tiles.

The matrix becomes tridiagonal by reflections, panel by panel, as in LAPACK's `sytrd` and `hetrd`: for each column the
ranks sum a product with the matrix, of which each reads its half of its tiles, and gather what the sum makes of it.
Divide and conquer gives each rank some rows of the eigenvectors of the tridiagonal matrix (`divide`); they move to
tiles and go back through the reflections.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.backend import blas, compiled, memory, namespace, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.comm import Comm
from parlinalg.comm.shared import SharedCollectives, lasting_array, meet, shared_collectives
from parlinalg.grid import Grid
from parlinalg.linalg import kernels
from parlinalg.linalg.divide import tridiagonal_vectors
from parlinalg.linalg.qr import reflect
from parlinalg.linalg.tiles import Deal, Places, Tiles, clear_above, indexer, move, transposed

PANEL = 32
"""Columns whose reflections are applied to the rest of the matrix at once."""
TOGETHER = 4
"""Panels whose reflections are applied to vectors at once."""
LESS = 1.3
"""Elements by those that are still needed from which on these are copied, and the others given up."""
STRIP = 256
"""Rows of a triangle that are updated at once."""
TINY = 1e-25
"""A square of a length from which on to its inverse lengths are formed by squares, in all dtypes."""


class Reduction(ABC):
    """The reduction of a matrix by reflections, some columns at a time, on the ranks of a deal.

    Attributes
    ----------
    d, e : array
        The diagonal of what is left and what is beside it, on every rank; real.
    xp : module
        The namespace of arrays on the host: NumPy, but on imagined ranks.
    keep : bool
        The reflections are kept, which vectors need and values do not.
    """

    def __init__(self, tiles: Tiles, n: int, dtype: np.dtype[Any], keep: bool) -> None:
        self.tiles, self.n, self.dtype, self.keep = tiles, n, dtype, keep
        self.panel = PANEL  # columns
        self._in_place = False  # the ranks at work write reflections where all ranks read them
        real, self.xp = np.zeros(0, dtype).real.dtype, kernels.on_host(tiles.grid.backend)
        self.d, self.e = self.xp.zeros(n, real), self.xp.zeros(max(0, n - 1), real)

    def _keepers(self, workers: Deal, *heights: int) -> list[Kept]:
        """Return what keeps reflections of so many elements each, in shared memory where there is some.  Collective."""
        tiles, n, grid = self.tiles, self.n, self.tiles.grid
        every = [tiles.rows(m) for m in heights]
        if not (isinstance(self.d, np.ndarray) and grid.inside and self.keep):
            return [Kept(rows[tiles.i], tiles) for rows in every]
        ranks = workers.R * workers.C
        if ranks < grid.size:
            sizes = [KeptForAll.room(rows, n) for rows in every]
            memory = lasting_array(grid.everyone, sum(sizes), self.dtype)
            self._in_place = memory is not None
            if self._in_place:
                turns = [[(turn + i) % ranks == grid.rank for turn in range(-(-n // KeptForAll.SIZE))] for i in (0, 1)]
                parts = zip(every, _split(memory, sizes), turns, strict=False)
                return [KeptForAll(rows, tiles, n, part, mine) for rows, part, mine in parts]
        sizes = [Kept.size(rows[tiles.i], n) for rows in every]
        memory = lasting_array(tiles.across, sum(sizes), self.dtype)
        rooms = [None] * len(sizes) if memory is None else _split(memory, sizes)
        return [Kept(rows[tiles.i], tiles, room) for rows, room in zip(every, rooms, strict=True)]

    @abstractmethod
    def _panel(self, group: SharedCollectives, k: int, b: int) -> np.ndarray | None:
        """Reduce b columns from k on, update what is behind them; return the reflections to keep, [b, `_wide(k)`]."""

    @abstractmethod
    def _keep(self, k: int, message: np.ndarray) -> None:
        """Keep this rank's rows of the reflections of the columns from k on."""

    @abstractmethod
    def _wide(self, k: int) -> int:
        """Return how many numbers the reflections of a column have, in the columns from k on."""

    def _run(self, workers: Deal, most: int) -> None:
        """Reduce the matrix; a column sums and gathers at most so many elements of a rank.  Collective."""
        everyone, ranks = self.tiles.grid.everyone, workers.R * workers.C
        some, xp = ranks < everyone.size, self.xp
        panels = [(k, min(self.panel, self.n - k)) for k in range(0, self.n, self.panel)]
        held: list[np.ndarray] = []
        if everyone.rank < ranks:
            comm = everyone.sub(range(ranks), everyone.axes) if some else everyone
            with shared_collectives(comm, most, self.dtype) as group:
                for turn, (k, b) in enumerate(panels):
                    found = self._panel(group, k, b)
                    if found is None:
                        continue
                    message = xp.ascontiguousarray(found)
                    del found
                    self._keep(k, message)
                    if some and not self._in_place and turn % ranks == everyone.rank:  # which gives it to the others
                        held.append(message.reshape(-1))
                    del message  # before the next panel is made
            if some:
                comm.free()
        if not some:
            return
        everyone.barrier()  # the others wait without a core, then get the reflections
        for line in (self.d, self.e):
            everyone.broadcast(line, 0)
        if not self.keep:
            return
        sizes = [b * self._wide(k) for k, b in panels]
        if self._in_place:
            for start in range(0, len(panels), ranks):
                counts = sizes[start : start + ranks]
                own = counts[everyone.rank] if everyone.rank < len(counts) else 0
                everyone.count("all_gather", sum(counts) - own, self.dtype.itemsize)
            return
        most = max((sum(sizes[start : start + ranks]) for start in range(0, len(panels), ranks)), default=0)
        with shared_collectives(everyone, -(-most // everyone.size), self.dtype) as group:
            for start in range(0, len(panels), ranks):
                counts = sizes[start : start + ranks]
                mine = held.pop(0) if held else xp.empty(0, self.dtype)
                every, at = group.all_gather(mine[:, None], counts + [0] * (everyone.size - len(counts))), 0
                del mine
                if everyone.rank < ranks:
                    continue
                for (k, b), size in zip(panels[start : start + ranks], counts, strict=True):
                    self._keep(k, every[at : at + size].reshape(b, -1).copy())  # of rows of all, valid until the next
                    at += size


class Tridiagonal(Reduction):
    """The reduction A = Q T Qᴴ of a Hermitian matrix.

    Parameters
    ----------
    tiles : Tiles
        Where rows lie that are turned by Q.
    workers : Deal
        How the matrix is dealt to the ranks that reduce it: the first ones of the grid (`workers`).
    half : Half or None
        The elements with which this rank computes, of that deal; overwritten.  None on the other ranks.
    keep : bool
        See `Reduction`.
    """

    def __init__(
        self, tiles: Tiles, workers: Deal, half: Half | None, n: int, dtype: np.dtype[Any], keep: bool = True
    ) -> None:  # fmt: skip
        super().__init__(tiles, n, dtype, keep)
        (self._kept,), self._half = self._keepers(workers, n), half
        if tiles.grid.inside:
            self._run(workers, max(n * min(PANEL, n), n + 2 * PANEL))
            self._kept.close()
        self._half = None

    def _keep(self, k: int, message: np.ndarray) -> None:
        self._kept.add(k, message[:, :-1], message[:, -1])

    def _wide(self, k: int) -> int:
        return self.n - k + 1

    def _panel(self, group: SharedCollectives, k: int, b: int) -> np.ndarray | None:
        """Reduce b columns from k on, apply A := A - V Wᴴ - W Vᴴ to what is right of them; return [V, tau].

        Vectors have the elements from number k on in the order of `half`.  Of sums each rank makes its share, and all
        take the same bits: else columns of rounding errors would give each rank reflections of its own.
        """
        half, dtype, m, xp = cast("Half", self._half), self.dtype, self.n - k, self.xp
        at = half.begin(k, less=self.keep and not self._kept.waits)  # which would be there beside the copies
        columns = group.all_reduce(half.columns(k, b))
        both, tau = xp.zeros((2 * b, m), dtype), xp.zeros(b, dtype)  # v and w of each column, one in a row
        mine, term = share(0, m, group.comm), xp.empty(m + 2 * b + 1, dtype)
        counts = [(m * (p + 1) // group.comm.size) - m * p // group.comm.size for p in range(group.comm.size)]
        x, fast, scalars = columns[0], compiled.ready(both, term, tau), xp.empty(2, dtype)
        for q in range(b):
            j, old = k + q, 2 * q
            self.d[j] = x[at[j]].real
            if j == self.n - 1:
                break
            done, after, v, y, size = at[k : j + 1], int(at[j + 1]), both[old], term[:m], m + old + 1
            if fast and _reflector_loop(x, done, after, v, scalars):
                tau[q], self.e[j] = scalars
            else:
                with compiled.as_loop("reflector", both, x, v):
                    x[done] = 0
                    v[:], tau[q], self.e[j] = reflector(x, after)
            half.times(v, y)
            if fast:
                _inner_loop(both, old, mine.start, mine.stop, term)
            else:
                with compiled.as_loop("inner", both, both[: old + 1, mine], term):
                    term[m : size - 1] = (both[:old, mine] @ v[mine].conj()).conj()
                    term[size - 1] = np.vdot(v, y)
            found = group.all_reduce(term[:size])
            pair = xp.empty((mine.stop - mine.start, 1 + (q + 1 < b)), dtype)
            with compiled.as_loop("columns", both, both[: old + 1, mine], pair):
                _columns(pair, found, both[: old + 1], columns[q + 1 : q + 2], mine.start, after, tau[q])
            whole = group.all_gather(pair, counts)
            if fast:
                _parted_loop(whole, both[old + 1], x, done)
                continue
            with compiled.as_loop("parted", both, whole, whole):
                both[old + 1] = whole[:, 0]
                if q + 1 < b:
                    x = whole[:, 1].copy()
                both[old + 1, done] = 0
        del columns, x
        half.update(k + b, both)
        if not self.keep:
            return None
        found = xp.empty((b, m + 1), dtype)
        for line, v in zip(found, both[::2], strict=True):  # one by one, so that no other copy is there
            line[:-1] = v[at[k:]]
        found[:, -1] = tau
        return found

    def times(self, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by Q z.  Collective over the grid."""
        self._kept.times(self.tiles, z)


@compiled.loop(sums=True)
def _reflector_loop(x: Any, done: Any, after: int, v: Any, scalars: Any) -> bool:
    """Set v, and tau and beta in `scalars`, to those of `reflector` of x with zeros at `done`, if squares allow it."""
    for i in done:
        x[i] = 0
    alpha = x[after]
    x[after] = 0
    square = x.dtype.type(0)
    for j in range(len(x)):
        square += x[j] * x[j]
    x[after] = alpha
    if not TINY < square < 1 / TINY:
        return False
    beta = x.dtype.type(-math.copysign(math.sqrt(square + alpha * alpha), alpha))
    for j in range(len(x)):
        v[j] = x[j] / (alpha - beta)
    v[after] = 1
    scalars[0], scalars[1] = (beta - alpha) / beta, beta
    return True


@compiled.loop(sums=True)
def _inner_loop(both: Any, old: int, start: int, stop: int, term: Any) -> None:
    """Put this rank's terms of products with v, row number `old`, behind A v: those of the rows before, and A v's."""
    m = both.shape[1]
    for i in range(old):
        part = both.dtype.type(0)
        for j in range(start, stop):
            part += both[i, j] * both[old, j]
        term[m + i] = part
    part = both.dtype.type(0)
    for j in range(m):
        part += both[old, j] * term[j]
    term[m + old] = part


@compiled.loop()
def _parted_loop(whole: Any, w: Any, x: Any, done: Any) -> None:
    """Part gathered columns into w, with zeros at `done`, and x."""
    for j in range(len(w)):
        w[j] = whole[j, 0]
    for i in done:
        w[i] = 0
    if whole.shape[1] > 1:
        for j in range(len(x)):
            x[j] = whole[j, 1]


def _columns(
    pair: np.ndarray, found: np.ndarray, both: np.ndarray, column: np.ndarray, start: int, after: int, tau: Any
) -> None:
    """Set this rank's share of w := tau (A - V Wᴴ - W Vᴴ) v - |tau|² / 2 (vᴴ (A - V Wᴴ - W Vᴴ) v) v.

    Parameters
    ----------
    pair : array [share, 1 or 2]
        For w and, if there are two, for the share of the next column of A - V Wᴴ - W Vᴴ - v wᴴ - w vᴴ.
    found : array [m + 2 q + 1]
        A v, the products of v with the columns before it, in turn of V and W, and vᴴ A v.
    both : array [2 q + 1, m]
        These columns, and v.
    column : array [1, m] or [0, m]
        The next column of A.
    start, after : int
        Where the share begins, and where the next column has its diagonal.
    """
    if compiled.ready(both, found, column, pair):
        _columns_loop(pair, found, both, column, start, after, tau)
        return
    (old, m), mine, xp = (len(both) - 1, both.shape[1]), slice(start, start + len(pair)), namespace(both)
    own, inner, beside = both[old, mine], found[m : m + old].reshape(-1, 2), both[:old, after]
    coefficients = xp.empty((2, old // 2, 2), both.dtype)
    coefficients[0] = inner[:, ::-1]
    np.conj(beside.reshape(-1, 2)[:, ::-1], out=coefficients[1])
    coefficients = coefficients.reshape(2, old)
    middle = found[m + old].real - 2 * np.vdot(inner[:, 0], inner[:, 1]).real
    less = 0.5 * abs(tau) ** 2 * middle
    known = coefficients @ both[:old, mine]
    w = tau * (found[mine] - known[0]) - less * own
    pair[:, 0] = w
    if len(column):
        corner = tau * (found[after] - coefficients[0] @ beside) - less
        pair[:, 1] = column[0, mine] - known[1] - w - np.conj(corner) * own


@compiled.loop(sums=True)
def _columns_loop(pair: Any, found: Any, both: Any, column: Any, start: int, after: int, tau: Any) -> None:
    """Do what `_columns` does, of real numbers, in one pass over the columns before."""
    old, m, n = len(both) - 1, both.shape[1], len(pair)
    first, second = np.zeros(n, both.dtype), np.zeros(n, both.dtype)
    middle, corner = found[m + old], found[after]
    for i in range(0, old, 2):
        v, w = both[i, start : start + n], both[i + 1, start : start + n]
        p, q, r, s = found[m + i + 1], found[m + i], both[i + 1, after], both[i, after]
        middle -= p * q + p * q
        corner -= p * s + q * r
        for j in range(n):
            first[j] += p * v[j] + q * w[j]
            second[j] += r * v[j] + s * w[j]
    less = tau * tau * middle * both.dtype.type(0.5)
    corner = tau * corner - less
    for j in range(n):
        own = both[old, start + j]
        w_j = tau * (found[start + j] - first[j]) - less * own
        pair[j, 0] = w_j
        if len(column):
            pair[j, 1] = column[0, start + j] - second[j] - w_j - corner * own


def workers(tiles: Tiles) -> Deal:
    """Return the deal of a matrix for its reduction: to all ranks, or to as many ranks of a node as it has cores.

    Where ranks outnumber cores each column's sums would wait for all to have their turn.
    """
    grid = tiles.grid
    if not grid.inside or grid.everyone.local_size < grid.size or grid.cores >= grid.size:
        return tiles
    return Deal({"worker": grid.cores}, tiles.size, "wide")


class Half:
    """The elements of a Hermitian matrix on tiles with which this rank computes: one of each two that are equal.

    Rows and columns are of classes: the number of their tile modulo the least common multiple of R and C.  The tiles
    of two classes lie on one rank, and their adjoints on another one, unless the classes are the same; then they are a
    Hermitian matrix of their own, of which the lower triangle counts.  Of two classes the first rank takes every other
    tile of the later one, and the second rank the rest.  So each element is read once for both of its products, and
    the rest of the matrix, from any row on, is a part of few matrices.

    Parameters
    ----------
    blocks : list
        This rank's parts of the matrix [n, n], as `blocks` returns them.
    """

    def __init__(
        self, deal: Deal, n: int, dtype: np.dtype[Any], blocks: list[_Rectangle | _Triangle], xp: Any
    ) -> None:  # fmt: skip
        self.dtype, self.n, self._blocks, self._xp = dtype, n, blocks, xp
        self._order = np.argsort(np.arange(n) // deal.size % math.lcm(deal.R, deal.C), kind="stable")

    def begin(self, k: int, less: bool) -> np.ndarray:
        """Take the matrix from row and column k on; return where the elements of vectors stand, by their numbers.

        With `less` memory of what is before is given up, for the reflections.
        """
        at = np.full(self.n, -1)
        order = self._order[self._order >= k]
        at[order] = np.arange(len(order))
        for block in self._blocks:
            block.begin(k, at, less)
        return at

    def columns(self, k: int, b: int) -> np.ndarray:
        """Return this rank's elements of b columns from k on, one in a row, else zeros; above the diagonal any."""
        out: np.ndarray = self._xp.zeros((b, self.n - k), self.dtype)
        for block in self._blocks:
            block.columns(out, k, b)
        return out

    def times(self, v: np.ndarray, y: np.ndarray) -> None:
        """Replace y by this rank's term of the product with v."""
        y[:] = 0
        for block in self._blocks:
            block.times(v, y)

    def update(self, k: int, both: np.ndarray) -> None:
        """Subtract V Wᴴ + W Vᴴ from row and column k on; `both` has columns of V and W, in turn, one in a row."""
        for block in self._blocks:
            block.update(k, both)


def parts(deal: Deal, n: int, ranks: int) -> Iterator[tuple[bool, Places]]:
    """Yield the rows and columns of the blocks of a `Half`, one block of each of so many ranks at a time.

    With them comes True for matrices of one class, of which the lower triangle counts.
    """
    tile, period = np.arange(n) // deal.size, math.lcm(deal.R, deal.C)
    kind, odd = tile % period, tile // period % 2 == 1
    every, none = (deal.rows(n), deal.columns(n)), np.zeros(0, np.intp)
    for turn in range(period // deal.C):
        found: list[Places] = [[], [], []]
        for i, j in deal.coords:
            rows, columns, each = every[0][i], every[1][j], j + turn * deal.C
            columns = columns[kind[columns] == each]
            found[0].append((rows[kind[rows] == each], columns))
            found[1].append((rows[kind[rows] < each], columns[~odd[columns]]))
            found[2].append((rows[(kind[rows] > each) & odd[rows]], columns))
        for same, places in zip((True, False, False), found, strict=True):
            if any(len(x) and len(y) for x, y in places):
                yield same, places + [(none, none)] * (ranks - len(places))


def blocks(tiles: Tiles, deal: Deal, x: DistArray) -> list[_Rectangle | _Triangle]:
    """Return this rank's blocks of a Hermitian matrix, of which the lower triangle is read.  Collective."""
    found: list[_Rectangle | _Triangle] = []
    x, grid = x.summed(), tiles.grid
    every = list(parts(deal, x.shape[0], grid.size))
    rooms = rooms_of_few(grid, deal, [places for _, places in every], x.dtype)
    for (same, places), room in zip(every, rooms, strict=True):
        rows, columns = places[grid.rank] if grid.inside else places[0]
        stays = same or _Rectangle.wide(rows, columns)
        lower = tiles.bring_to(x, places, lower=True, host=True, out=room if stays else None)
        if not same:
            other = room if room is None or stays else room.reshape(len(columns), len(rows))
            upper = tiles.bring_to(x, transposed(places), lower=True, host=True, out=None if stays else other)
        if grid.inside and lower.size:
            found.append(_Triangle(lower, rows, tiles.size) if same else _Rectangle(lower, upper, rows, columns))
    return found


def rooms_of_few(grid: Grid, deal: Deal, every: Sequence[Places], dtype: np.dtype[Any]) -> list[Any]:
    """Return for each part of a matrix an array for this rank's rows and columns, in memory of all ranks of the node.

    It is for a deal to fewer ranks than the grid has: these have the parts of the others too, which so provide room for
    them.  None for each part if all ranks work, or cannot share memory.  Collective.
    """
    if not grid.inside or grid.size == deal.R * deal.C:
        return [None] * len(every)
    sizes = [[len(rows) * len(columns) for rows, columns in places] for places in every]
    memory = lasting_array(grid.everyone, sum(map(sum, sizes)), dtype, keep=False)
    if memory is None:
        return [None] * len(every)
    rooms = zip(every, sizes, _split(memory, list(map(sum, sizes))), strict=True)
    return [_split(room, each)[grid.rank].reshape(*map(len, places[grid.rank])) for places, each, room in rooms]


def _split(memory: Any, sizes: Sequence[int]) -> list[Any]:
    """Return parts of these sizes, one behind the other."""
    ends = np.cumsum(sizes).tolist()
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def owned(a: Any) -> bool:
    """Return True unless an array lies in memory that cannot be given up for it alone."""
    if not isinstance(a, np.ndarray) or a.flags.owndata:
        return True
    return isinstance(a.base, np.ndarray) and a.base.flags.owndata  # a part of an array, which is given up with it


class _Rectangle:
    """A block of a Hermitian matrix that stands for its adjoint too.

    Parameters
    ----------
    lower, upper : array
        Its elements below the diagonal of the matrix, and the adjoint of those above it; zeros elsewhere.  One of them
        is overwritten.
    """

    def __init__(self, lower: np.ndarray, upper: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        wide = self.wide(rows, columns)
        self.numbers = (rows, columns) if wide else (columns, rows)
        self.a, other = (lower, upper) if wide else (upper, lower)
        self.a += kernels.adjoint(other)

    @staticmethod
    def wide(rows: np.ndarray, columns: np.ndarray) -> bool:
        """Return True if the block itself is kept, else its adjoint: products with wide strips are faster."""
        return len(rows) <= len(columns)

    def begin(self, k: int, at: np.ndarray, less: bool) -> None:
        top, left = (first(numbers, k) for numbers in self.numbers)
        if less and owned(self.a) and LESS * self.a[top:, left:].size <= self.a.size:
            self.a, self.numbers = self.a[top:, left:].copy(), (self.numbers[0][top:], self.numbers[1][left:])
            top = left = 0
        self.at, self.rest, self.corner = at, self.a[top:, left:], (top, left)
        self.here, self.there = at[self.numbers[0][top:]], at[self.numbers[1][left:]]
        self.i, self.j = _run(self.here), _run(self.there)

    def columns(self, out: np.ndarray, k: int, b: int) -> None:
        rows, columns = (len(each) for each in (self.here, self.there))
        i, j = (numbers[len(numbers) - size :] - k for numbers, size in zip(self.numbers, (rows, columns), strict=True))
        i, j = i[: first(i, b)], j[: first(j, b)]
        out[np.ix_(j, self.here)] = self.rest[:, : len(j)].T
        out[np.ix_(i, self.there)] = self.rest[: len(i)].conj()

    def times(self, v: np.ndarray, y: np.ndarray) -> None:
        if not self.rest.size:
            return
        below, right = y[self.i], y[self.j]  # views, or copies
        blas.add_from_both_sides(below, right, self.a, self.corner, v[self.j], v[self.i])
        if not isinstance(self.i, slice):
            y[self.i] = below
        if not isinstance(self.j, slice):
            y[self.j] = right

    def update(self, k: int, both: np.ndarray) -> None:
        top, left = (first(numbers, k) for numbers in self.numbers)
        rows, columns = (self.at[numbers[start:]] for numbers, start in zip(self.numbers, (top, left), strict=True))
        swapped = _swapped(both, columns)
        for start in range(0, len(rows), STRIP // 2):
            at = slice(top + start, top + start + STRIP // 2)
            kernels.subtract(self.a[at, left:], both[:, rows[start : start + STRIP // 2]].T, swapped)


class _Triangle:
    """A Hermitian matrix by its lower triangle; tiles above its diagonal are zeros."""

    def __init__(self, a: np.ndarray, rows: np.ndarray, size: int) -> None:
        self.a, self.numbers = a, rows
        self.whole = not blas.has_hermitian(a.dtype)
        clear_above(a, rows, rows, size)  # it has not been read
        if self.whole:
            self.a += kernels.adjoint(namespace(a).tril(a, -1))

    def begin(self, k: int, at: np.ndarray, less: bool) -> None:
        top = first(self.numbers, k)
        if less and owned(self.a) and LESS * (len(self.a) - top) ** 2 <= self.a.size:
            self.a, self.numbers, top = self.a[top:, top:].copy(), self.numbers[top:], 0
        self.at, self.top, self.rest, self.here = at, top, self.a[top:, top:], at[self.numbers[top:]]
        self.i = slice(int(self.here[0]), int(self.here[-1]) + 1) if len(self.here) else slice(0, 0)

    def columns(self, out: np.ndarray, k: int, b: int) -> None:
        j = self.numbers[len(self.numbers) - len(self.here) :] - k
        j = j[: first(j, b)]
        out[np.ix_(j, self.here)] = self.rest[:, : len(j)].T

    def times(self, v: np.ndarray, y: np.ndarray) -> None:
        if not has_values(y):
            shape_solver.hermitian(self.rest, v[self.i])
        elif self.whole:
            y[self.i] += self.rest @ v[self.i]
        else:
            blas.add_hermitian(y[self.i], self.a, self.top, v[self.i])

    def update(self, k: int, both: np.ndarray) -> None:
        top = first(self.numbers, k)
        rest, at = self.a[top:, top:], self.at[self.numbers[top:]]
        x, w = both[:, at].T, _swapped(both, at)
        for start in range(0, len(rest), STRIP):
            end = len(rest) if self.whole else start + STRIP
            kernels.subtract(rest[start : start + STRIP, :end], x[start : start + STRIP], w[:, :end])


def _swapped(both: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the conjugates of these columns, the two rows of each pair in the other's place."""
    found = namespace(both).empty((len(both), len(columns)), both.dtype)
    for start in (0, 1):
        for line, row in zip(found[1 - start :: 2], both[start::2], strict=True):
            line[:] = kernels.conjugate(row[columns])
    return found


def _run(numbers: np.ndarray) -> Any:
    """Return a slice for numbers that follow one another, else the numbers."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


class Kept:
    """Reflections in the order in which they were found, of some panels together: so that products of them are fast.

    The ranks of a grid row have the same ones.  On one node these lie in shared memory, in which they take turns to
    write.

    Parameters
    ----------
    rows : array of int
        The numbers of this rank's rows.
    tiles : Tiles
        Where these lie.
    room : array or None
        Shared memory of the ranks of the grid row, of `size` elements.
    """

    def __init__(self, rows: np.ndarray, tiles: Tiles, room: Any = None) -> None:
        self._rows, self._tiles, self._room, self._turn = rows, tiles, room, 0
        self._taus: list[np.ndarray] = []
        self._open: list[tuple[int, np.ndarray]] = []
        """The panels to be put together: the element number from which on their vectors are there, one in a row."""
        self._closed: list[tuple[int, np.ndarray, np.ndarray]] = []
        """Row numbers, this rank's rows of V from there on, and the upper triangles T, one row behind the other."""

    @staticmethod
    def size(rows: np.ndarray, n: int) -> int:
        """Return how many elements the reflections of n columns have in these rows."""
        together = PANEL * TOGETHER
        return sum((len(rows) - first(rows, k)) * min(together, n - k) for k in range(0, n, together))

    @property
    def waits(self) -> bool:
        """True while panels wait to be put together."""
        return bool(self._open)

    def add(self, k: int, v: np.ndarray, tau: np.ndarray) -> None:
        """Keep the reflections of a panel: row i of v, from element number k of vectors on, and tau[i].

        The arrays are this object's from now on.
        """
        self._open.append((k, v))
        self._taus.append(tau)
        if len(self._taus) == TOGETHER:
            self.close()

    def close(self) -> None:
        """Put the panels that came last together."""
        if not self._open:
            return
        sizes = [0, *accumulate(len(v) for _, v in self._open)]
        inner = namespace(self._open[0][1]).zeros((sizes[-1], sizes[-1]), self._open[0][1].dtype)
        for (k, v), top in zip(self._open, sizes, strict=False):
            for (j, w), left in zip(self._open, sizes, strict=False):
                if left >= top:
                    inner[top : top + len(v), left : left + len(w)] = kernels.adjoint(v[:, j - k :].T) @ w.T
        t = triangle(inner, np.concatenate(self._taus))[np.triu_indices(len(inner))]
        self._closed.append((self._open[0][0], self._held(sizes).T, t))
        self._open, self._taus = [], []

    def _held(self, sizes: list[int]) -> np.ndarray:
        """Return this rank's rows of the panels, of which so many vectors begin, in shared memory if there is some."""
        start, head = self._open[0]
        numbers, writes, high = self._rows[first(self._rows, start) :], True, sizes[-1]
        if self._room is None:
            found: np.ndarray = namespace(head).empty((high, len(numbers)), head.dtype)
        else:
            found, self._room = self._room[: high * len(numbers)], self._room[high * len(numbers) :]
            found, writes = found.reshape(high, len(numbers)), self._turn % self._tiles.C == self._tiles.j
            self._turn += 1
        for (k, v), top in zip(self._open if writes else (), sizes, strict=False):
            left, part = first(numbers, k), found[top : top + len(v)]
            part[:, :left] = 0
            part[:, left:] = v[:, indexer(numbers[left:] - k)]
        return found

    def times(self, tiles: Tiles, z: np.ndarray) -> None:
        """Replace z, of which this rank has the same rows, by the product of all reflections and z.  Collective.

        The reflections are given up one after the other.
        """
        if not self._closed:
            return
        if self._room is not None:
            meet(self._tiles.across)  # all have written their turns
        with shared_collectives(tiles.down, self._closed[0][1].shape[1] * z.shape[1], z.dtype) as group:
            while self._closed:
                k, v, upper = self._closed.pop()
                t = namespace(v).zeros((v.shape[1], v.shape[1]), v.dtype)
                t[np.triu_indices(len(t))] = upper
                reflect(tiles, v, t, z[first(self._rows, k) :], group)


class KeptForAll(Kept):
    """Reflections that a few ranks of a node find, and write for all of them to shared memory, with T.

    Nobody holds them elsewhere.  Ranks at work take turns to write those of the panels that are put together.

    Parameters
    ----------
    every : sequence of array
        For every grid row the numbers of its rows.
    n : int
        The number of reflections.
    memory : array
        Shared memory of all ranks, of `room` elements.
    mine : sequence of bool
        For all panels that are put together True if it is this rank's turn.
    """

    SIZE = PANEL * TOGETHER

    def __init__(self, every: Sequence[np.ndarray], tiles: Tiles, n: int, memory: Any, mine: Sequence[bool]) -> None:
        super().__init__(every[tiles.i], tiles)
        self._every, self._mine = every, mine
        self._places: list[tuple[Any, ...]] = []
        """Row numbers, the rows of V of every grid row from there on, adjoint, and T."""
        for k in range(0, n, self.SIZE):
            sizes = self._sizes(every, n, k)
            *parts, t = _split(memory, sizes)
            b, memory = min(self.SIZE, n - k), memory[sum(sizes) :]
            self._places.append((k, *(each.reshape(b, len(each) // b) for each in parts), t))

    @classmethod
    def _sizes(cls, every: Sequence[np.ndarray], n: int, k: int) -> list[int]:
        b = min(cls.SIZE, n - k)
        return [*(b * (len(rows) - first(rows, k)) for rows in every), b * (b + 1) // 2]

    @classmethod
    def room(cls, every: Sequence[np.ndarray], n: int) -> int:
        """Return how many elements n reflections have in the rows of all grid rows, with T."""
        return sum(sum(cls._sizes(every, n, k)) for k in range(0, n, cls.SIZE))

    def add(self, k: int, v: np.ndarray, tau: np.ndarray) -> None:
        turn, at = divmod(k, self.SIZE)
        if not self._mine[turn]:
            return
        start, *parts, t = self._places[turn]
        for part, rows in zip(parts, self._every, strict=True):
            numbers, out = rows[first(rows, start) :], part[at : at + len(v)]
            left = first(numbers, k)
            out[:, :left] = 0
            out[:, left:] = v[:, indexer(numbers[left:] - k)]
        self._taus.append(tau)
        if at + len(v) == len(parts[0]):
            inner = sum(part.conj() @ part.T for part in parts)
            t[:] = triangle(inner, np.concatenate(self._taus))[np.triu_indices(len(inner))]
            self._taus = []

    def close(self) -> None:
        """Find this rank's rows, once those at work have written them."""
        self._closed = [(k, parts[self._tiles.i].T, t) for k, *parts, t in self._places]
        self._places = []


def share(start: int, stop: int, comm: Comm) -> slice:
    """Return this rank's share of the places from `start` up to `stop`."""
    n = stop - start
    return slice(start + n * comm.rank // comm.size, start + n * (comm.rank + 1) // comm.size)


def first(numbers: np.ndarray, k: int) -> int:
    """Return the place of the first number that is at least k."""
    return int(np.searchsorted(numbers, k))


def reflector(x: np.ndarray, at: int = 0) -> tuple[np.ndarray, complex, float]:
    """Return v, tau and beta of a reflection H = I - tau v vᴴ with v[at] = 1; Hᴴ x is beta, real, at `at`, and zeros.

    This is LAPACK's `larfg`.
    """
    if not has_values(x):
        return shape_solver.reflector(x)
    alpha = x[at]
    x[at] = 0
    square = np.vdot(x, x).real
    if TINY < square < 1 / TINY:
        size = math.sqrt(square + abs(alpha) ** 2)
    else:  # squares under- or overflow
        none = not x.any() and not alpha.imag
        x[at] = alpha
        largest = float(np.abs(x).max())
        size = largest * float(np.linalg.norm(x / largest)) if largest else 0.0
        if none:
            v = np.zeros_like(x)
            v[at] = 1
            return v, 0, float(alpha.real)
    x[at] = alpha
    beta = x.real.dtype.type(-math.copysign(size, alpha.real))
    v = x / (alpha - beta)
    v[at] = 1
    return v, (beta - alpha) / beta, float(beta)


def triangle(inner: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Return T of the product of reflections, I - V T Vᴴ (LAPACK's `larft`), by the products `inner`, Vᴴ V."""
    b = len(tau)
    t: np.ndarray = namespace(inner).zeros((b, b), inner.dtype)
    for q in range(b):
        t[:q, q] = -tau[q] * (t[:q, :q] @ inner[:q, q])
        t[q, q] = tau[q]
    return t


def tridiagonal_values(d: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return the eigenvalues of a real tridiagonal matrix, rising; NaNs if they do not converge."""
    if len(d) < 2:
        return d.copy()
    if not has_values(d):
        return shape_solver.tridiagonal_values(d)
    values, info = kernels.lapack("sterf", d.dtype)(d, e)
    return np.full_like(d, np.nan) if info else values


def vectors(reduced: Tridiagonal, choose: Callable[[np.ndarray], slice]) -> tuple[np.ndarray, np.ndarray, slice]:
    """Return all eigenvalues, rising, this rank's tiles of the vectors that are chosen, and which these are.

    Collective over all ranks.
    """
    tiles, n, grid = reduced.tiles, reduced.n, reduced.tiles.grid
    xp, dtype = reduced.xp, reduced.d.dtype
    values, at, z = xp.zeros(n, dtype), slice(0, 0), xp.empty((0, 0), dtype)
    if grid.inside:
        rows = np.arange(grid.rank, n, grid.size)
        memory.give_back(8 * n * len(rows))
        values, z = tridiagonal_vectors(reduced.d, reduced.e, rows, grid.everyone, choose)
        memory.give_back(z.nbytes)
    if grid.inside or not has_values(values):
        at = choose(values)
    failed, start, stop = tiles.worst([not kernels.finite(values), at.start, at.stop])
    if failed:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")
    at = slice(int(start), int(stop))
    return values, to_tiles(z, tiles, n, at.stop - at.start), at


def to_tiles(z: np.ndarray, tiles: Tiles, n: int, columns: int) -> np.ndarray:
    """Return this rank's tiles of n rows, of which each rank has those of numbers p, p + size, ….  Collective."""
    size = tiles.grid.size
    have = [(np.arange(p, n, size), np.arange(columns)) for p in range(size)]
    found: np.ndarray = move(z, have, tiles.places(tiles.rows(n), tiles.columns(columns)), tiles.grid)
    return found
