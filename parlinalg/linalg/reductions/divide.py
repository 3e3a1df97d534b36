"""Eigenvectors of tridiagonal and singular vectors of bidiagonal matrices by divide and conquer, distributed by rows.

A tridiagonal matrix is cut into halves, whose eigenvectors are those of the whole after a change of rank one (Cuppen
1981), with the vectors of Gu and Eisenstat (1995), as in LAPACK's `stedc`.  A merge needs the first and the last row of
the eigenvectors of each half, so each rank has these and some rows, never a whole matrix; the roots of the secular
equation are distributed too.

A bidiagonal matrix is cut at a row.  In the singular vectors of the halves above and below it, it is a diagonal with
one full row, whose singular values are the roots of a secular equation of squares (Gu and Eisenstat 1995), as in
LAPACK's `bdsdc`.  A merge needs the first and the last row of the right vectors of each half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.backend import backend_of, blas, memory, namespace, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.comm import Comm
from parlinalg.comm.shared import SharedCollectives, shared_collectives
from parlinalg.linalg import kernels
from parlinalg.linalg.tiles import indexer

LEAF = 64
"""Rows of a part that LAPACK solves."""
SMALLEST = 25
"""Rows of a part that LAPACK's divide and conquer does not cut."""
STRIP = 128
"""Columns of the vectors of a merge that exist at once, at the most: not many more elements than a rank has of w."""
SOME = 1 << 14
"""Differences of a merge's values that exist at once."""
FEW = 8
"""Roots at least whose differences exist at once."""

Part = tuple[np.ndarray, np.ndarray]
"""Eigenvalues, rising, and of the eigenvectors the first row, this rank's rows, and the last one; NaNs by failure."""
Pair = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Singular values, rising, this rank's rows of the left vectors, and of the right ones the first row, this rank's rows
and the last one; NaNs by failure.  A part with one more column than rows has one more right vector, which it maps to 0.
"""


def tridiagonal_vectors(
    d: np.ndarray, e: np.ndarray, rows: np.ndarray, comm: Comm, choose: Callable[[np.ndarray], slice],
    leaf: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the eigenvalues, rising, and this rank's rows of the eigenvectors that are chosen.  Collective.

    Parameters
    ----------
    d, e : array
        The diagonal and what is beside it, the same on all ranks.
    rows : array of int
        The numbers of this rank's rows, rising.
    choose : callable
        Returns from all eigenvalues where those are whose vectors are wanted.
    leaf : int, optional
        The most rows of a part that LAPACK solves; by default all of them on one rank, and `LEAF` on several.
    """
    n = len(d)
    scale = _largest(d, e) or d.dtype.type(1)
    d, e = d / scale, e / scale
    leaf = leaf or (LEAF if comm.size > 1 else max(1, n))

    def cut(low: int, high: int) -> None:
        if high - low > leaf:
            middle = (low + high) // 2
            d[middle - 1 : middle + 1] -= abs(e[middle - 1])
            cut(low, middle)
            cut(middle, high)

    def part(
        group: SharedCollectives, low: int, high: int, choose: Callable[[np.ndarray], slice] | None = None
    ) -> Part:
        if high - low <= leaf:
            mine = rows[(rows >= low) & (rows < high)] - low
            return _leaf(d[low:high], e[low : high - 1], mine, choose)
        middle = (low + high) // 2
        return _merged(group, part(group, low, middle), part(group, middle, high), e[middle - 1], choose)

    cut(0, n)
    with shared_collectives(comm, 2 * n, d.dtype) as group:
        values, found = part(group, 0, n, lambda values: choose(values * scale))
    return values * scale, found[1:-1]


def _leaf(d: np.ndarray, e: np.ndarray, rows: np.ndarray, choose: Callable[[np.ndarray], slice] | None) -> Part:
    if not has_values(d):
        values, z, info = *shape_solver.tridiagonal_vectors(d), 0
    elif len(d) < 2:
        values, z, info = d.copy(), np.ones((len(d), len(d)), d.dtype), 0
    else:
        n, values, z = len(d), d.copy(), np.empty((len(d), len(d)), d.dtype, order="F")
        work, more = np.empty(1 + 4 * n + n * n, d.dtype), np.empty(3 + 5 * n, blas.scipy_integer())
        info = kernels.call(  # by Cython's: SciPy has it for Python since 1.16
            "stevd", d.dtype, "V", n, values, e.copy(), z, n, work, len(work), more, len(more)
        )
    values = np.full_like(d, np.nan) if info else values
    at = choose(values) if choose else slice(None)
    ends = [[0], [len(d) - 1]] if len(d) else [[], []]
    return values, z[np.concatenate([ends[0], rows, ends[1]]).astype(int), at]


def _merged(
    group: SharedCollectives, one: Part, two: Part, beta: Any, choose: Callable[[np.ndarray], slice] | None
) -> Part:  # fmt: skip
    """Return the part that two parts make with the element `beta` between them."""
    (d1, w1), (d2, w2) = one, two
    m1, m, dtype = len(d1), len(d1) + len(d2), d1.dtype
    # Decisions below must be the same on all ranks, whatever their processors round.
    positive = not has_values(beta) or beta >= 0
    message = group.broadcast(np.concatenate([d1, d2, w1[-1], w2[0] if positive else -w2[0]]), 0)
    d, z = message[:m], message[m:] / dtype.type(math.sqrt(2))
    rho = 2 * abs(beta)
    first, upper = len(w1) - 1, np.arange(m) < m1
    lower = ~upper
    size, blocks = first + len(w2) - 1, [_Block(np.s_[:first], upper, [(0, w1[:-1])])]  # the first half's rows, then
    blocks.append(_Block(np.s_[first:], lower, [(m1, w2[1:])]))  # the second's
    del one, two, w1, w2
    memory.give_back(size * m * dtype.itemsize)
    if not kernels.finite(message):
        return np.full(m, np.nan, dtype), namespace(d).zeros((size, m), dtype)
    limit = 8 * np.finfo(dtype).eps / 2 * _largest(d, z)
    turns: list[Turn] = []
    kept, rest = _deflated(d, z, rho, limit, turns, [upper, lower])
    dk, zk = d[kept], z[kept]
    roots, near, gap = _roots(group, dk, zk, rho)
    if not kernels.finite(roots):
        return np.full(m, np.nan, dtype), namespace(d).zeros((size, m), dtype)
    vector = _vectors(group, dk, zk, near, gap)
    values = np.concatenate([roots, d[rest]])
    order = _rising(values)
    values = values[order]
    wanted = order[choose(values)] if choose else order
    return values, _turned(_Side(size, blocks, turns, kept, rest, vector), wanted)


Vectors = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from numbers of roots and of rows, in any order, to the vectors of a merge, as columns of any length."""


class _Block(NamedTuple):
    """Some of this rank's rows of W, which has the vectors of two parts as columns.

    Attributes
    ----------
    rows : slice
    has : array of bool
        For each column of W, True if it has elements in these rows, once columns are turned.
    given : list
        The elements: the number of a column, and an array for these rows and the columns from there on.
    """

    rows: slice
    has: np.ndarray
    given: list[tuple[int, np.ndarray]]

    def taken(self, turns: list[Turn], places: list[np.ndarray]) -> list[np.ndarray]:
        """Return these rows of columns with these numbers, after the turns; the elements are given up."""
        xp, dtype, rows = namespace(self.given[0][1]), self.given[0][1].dtype, len(self.given[0][1])
        numbers, place = np.flatnonzero(self.has), np.full(len(self.has), -1)
        place[numbers] = np.arange(len(numbers))
        w: np.ndarray = xp.zeros((rows, len(numbers)), dtype)
        while self.given:
            start, each = self.given.pop()
            if each.shape[1]:
                w[:, place[start] : place[start] + each.shape[1]] = each
            del each
        for one, two, c, s in turns:
            if place[one] >= 0 and place[two] >= 0:  # else both are zeros here
                x, y = w[:, place[one]].copy(), w[:, place[two]].copy()
                w[:, place[one]], w[:, place[two]] = c * x + s * y, c * y - s * x
        return [xp.take(w, place[each], axis=1) for each in places]


class _Side(NamedTuple):
    """The singular vectors of one side that a merge makes, as what they are computed from.

    Attributes
    ----------
    size : int
        The number of this rank's rows.
    blocks : list
        These rows of W.  They are given up when they are used.
    turns : list
        Pairs of columns of W that are turned first.
    kept, rest : array of int
        The columns that the merge changes, and those that it does not.
    vector : callable or None
        The vectors of the merge.  None if values did not converge.
    last : array [size, more] or None
        Columns behind, which stay as they are.
    """

    size: int
    blocks: list[_Block]
    turns: list[Turn]
    kept: np.ndarray
    rest: np.ndarray
    vector: Any
    last: np.ndarray | None = None


class _Turned:
    """The columns that a merge makes of this rank's rows of the vectors of two parts, some at a time.

    The numbers of columns count the roots of the secular equation first, then the vectors that were known before.
    Of the vectors of the parts only elements that are not zeros everywhere are kept.
    """

    def __init__(self, side: _Side) -> None:
        given = side.blocks[0].given[0][1]
        self._rows, self._xp, self._dtype, self._vector = side.size, namespace(given), given.dtype, side.vector
        del given
        kept, rest, has = side.kept, side.rest, [each.has[side.kept] for each in side.blocks]
        self._order = order = np.argsort(has[-1].astype(int) - has[0], kind="stable")  # those of one block side by side
        self._parts: list[tuple[Any, ...]] = []
        """Rows; the factor of the vectors, of the elements j of them; and known vectors, with the place of each."""
        for mine in has:
            block = side.blocks.pop(0)
            j, known = indexer(np.flatnonzero(mine[order])), np.flatnonzero(block.has[rest])
            place = np.full(len(rest), -1)
            place[known] = np.arange(len(known))
            factor, others = block.taken(side.turns, [kept[order][j], rest[known]])
            self._parts.append((block.rows, factor, j, others, place))

    def columns(self, numbers: np.ndarray) -> np.ndarray:
        """Return this rank's rows of the columns with these numbers."""
        k = len(self._order)
        roots, others = (np.flatnonzero(each) for each in (numbers < k, numbers >= k))
        out: np.ndarray = self._xp.zeros((self._rows, len(numbers)), self._dtype)
        if not self._rows:
            return out
        if len(roots):
            u, at = self._vector(numbers[roots], self._order), indexer(roots)
            scale = 1 / np.sqrt(np.einsum("ij,ij->j", u, u))
        for rows, factor, j, known, place in self._parts:
            if len(roots) and len(factor):
                found = factor @ u[j]
                np.multiply(found, scale, out=found)
                out[rows, at] = found
            if len(others):
                there = place[numbers[others] - k]
                out[rows, others[there >= 0]] = known[:, there[there >= 0]]
        return out


def _turned(side: _Side, wanted: np.ndarray) -> np.ndarray:
    """Return the wanted columns that a merge makes, see `_Turned`, and the last ones behind them."""
    given, last = side.blocks[0].given[0][1], side.last
    xp, dtype, more = namespace(given), given.dtype, 0 if last is None else last.shape[1]
    del given
    made = _Turned(side)
    out: np.ndarray = xp.empty((side.size, len(wanted) + more), dtype)
    if last is not None:
        out[:, len(wanted) :] = last
    step = max(STRIP // 4, min(STRIP, len(out) // 4))
    for start in range(0, len(wanted), step):
        at = wanted[start : start + step]
        out[:, start : start + len(at)] = made.columns(at)
    return out


def _largest(*arrays: Any) -> Any:
    """Return the largest size of their elements, 0 without elements; 1 of arrays without values."""
    return max(np.abs(a).max(initial=0) for a in arrays) if all(map(has_values, arrays)) else 1


def _rising(values: np.ndarray) -> np.ndarray:
    """Return the order in which values rise; arrays without values count as sorted."""
    return np.argsort(values, kind="stable") if has_values(values) else np.arange(len(values))


def _rotation(x: Any, y: Any, limit: Any) -> tuple[Any, Any, Any]:
    """Return the length of (x, y), and its cosine and sine."""
    if not has_values(x):
        return x, x, y
    size = math.hypot(x, y)
    return (size, x / size, y / size) if size > limit else (size, 1, 0)


Turn = tuple[int, int, Any, Any]
"""Two columns, and the cosine and the sine of the angle by which they are turned."""


def _deflated(
    d: np.ndarray, z: np.ndarray, rho: Any, limit: Any, turns: list[Turn], halves: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns that the merge changes, by rising d, and those that are vectors already (`laed2`, `lasd2`).

    Columns of nearly equal d are to be turned so that z of one becomes 0, as `turns` says then; `halves` say in which
    half a column has elements.
    """
    if not has_values(d):  # the most work: no vector is one already
        backend_of(d).assume("deflation", "which vectors a merge of divide and conquer finds to be vectors already")
        return np.arange(len(d)), np.zeros(0, np.intp)
    kept: list[int] = []
    rest: list[int] = []
    before = -1
    for j in np.argsort(d, kind="stable").tolist():
        if rho * abs(z[j]) <= limit:
            rest.append(j)
            continue
        if before >= 0:
            size = math.hypot(z[j], z[before])
            c, s = z[j] / size, -z[before] / size
            if abs((d[j] - d[before]) * c * s) <= limit:
                z[j], z[before] = size, 0
                turns.append((before, j, c, s))
                d[before], d[j] = d[before] * c * c + d[j] * s * s, d[before] * s * s + d[j] * c * c
                for has in halves:
                    has[before] = has[j] = has[before] | has[j]
                rest.append(before)
            else:
                kept.append(before)
        before = j
    if before >= 0:
        kept.append(before)
    return np.array(kept, np.intp), np.array(rest, np.intp)


def _shared(group: SharedCollectives, mine: np.ndarray, k: int) -> np.ndarray:
    """Return rows 0 to k - 1, of which rank p has those of numbers p, p + size, ….  Collective."""
    comm = group.comm
    if comm.size == 1:
        return mine
    every = [np.arange(p, k, comm.size) for p in range(comm.size)]
    out: np.ndarray = namespace(mine).empty((k, mine.shape[1]), mine.dtype)
    out[np.concatenate(every)] = group.all_gather(mine, [len(each) for each in every])
    return out


def _roots(
    group: SharedCollectives, d: np.ndarray, z: np.ndarray, rho: Any, squares: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the roots of the secular equation, the nearest d of each, and how far above it the root lies.

    With `squares` it is that of the squares of d, and the roots are those of its roots.
    """
    k = len(d)
    mine = np.arange(group.comm.rank, k, group.comm.size)
    if not has_values(d):
        found = _shared(group, shape_solver.secular_roots(d, len(mine)), k)
        return found[:, 0], found[:, 1], found[:, 2]
    found = np.empty((len(mine), 3), d.dtype)
    delta, root, number = np.empty(k, d.dtype), np.empty(1, d.dtype), np.zeros(1, blas.scipy_integer())
    given = (k, number, d, z, delta, np.array([rho], d.dtype), root)
    more, name = ((np.empty(k, d.dtype),), "lasd4") if squares else ((), "laed4")
    solve, size = kernels.bound(name, d.dtype, *given, *more), np.empty_like(delta)
    for row, i in zip(found, mine.tolist(), strict=True):
        number[0] = i + 1
        failed = solve()
        at = int(np.abs(delta, out=size).argmin()) if k > 2 else i
        row[:] = np.nan if failed else root[0], at, -delta[at]
        if k == 2 and not squares:  # here `laed4` gives the vector itself; only its direction is needed
            row[1:] = delta
    found = _shared(group, found, k)
    return found[:, 0].copy(), found[:, 1], found[:, 2]


def _vectors(group: SharedCollectives, d: np.ndarray, z: np.ndarray, near: np.ndarray, gap: np.ndarray) -> Vectors:
    """Return the function from numbers of roots to the vectors of the merge."""
    k = len(d)
    if k < 3:
        whole = np.stack([near, gap]) if k == 2 else namespace(d).ones((k, k), d.dtype)
        return lambda i, order: whole[order][:, i]
    origin = d[near.astype(np.intp)]
    mine = np.arange(group.comm.rank, k, group.comm.size)
    found, step = namespace(d).empty((len(mine), 1), d.dtype), max(1, SOME // k)
    for start in range(0, len(mine), step):  # the z of which the computed roots are the exact ones
        j = mine[start : start + step]
        below = d[j][:, None] - d[None, :]
        below[np.arange(len(j)), j] = 1
        found[start : start + step, 0] = (((d[j][:, None] - origin) - gap) / below).prod(axis=1)
    exact = np.copysign(np.sqrt(np.abs(_shared(group, found, k)[:, 0])), z)

    def columns(i: np.ndarray, order: np.ndarray) -> np.ndarray:
        u = _above(d[order], origin[i], gap[i])
        return np.divide(exact[order], u, out=u).T

    return columns


def _above(d: np.ndarray, origin: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Return how far each d lies above each root, those of a root in a row: long rows are faster."""
    found: np.ndarray = d - origin[:, None]
    found -= gap[:, None]
    return found


def bidiagonal_vectors(
    d: np.ndarray, e: np.ndarray, rows: np.ndarray, comm: Comm
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the singular values, falling, and this rank's rows of the left and of the right vectors.  Collective.

    Parameters
    ----------
    d, e : array
        The diagonal and what is right of it, the same on all ranks.
    rows : array of int
        The numbers of this rank's rows, rising.
    """
    d, e, scale = _near_one(d, e)
    leaf = LEAF if comm.size > 1 else max(LEAF, -(-len(d) // 2))  # as of `bidiagonal_strips`
    with shared_collectives(comm, 2 * len(d), d.dtype) as group:
        values, left, right = _part(group, d, e, (rows, rows), 0, len(d), 0, leaf=leaf)
    return values[::-1] * scale, left[:, ::-1], right[1:-1, ::-1]


SIDES = ("left", "right")
"""The sides of singular vectors."""
Strips = Callable[[np.ndarray], list[np.ndarray]]
"""A function from numbers of singular values, falling, to this rank's rows of their vectors, for each side."""


def bidiagonal_strips(
    d: np.ndarray, e: np.ndarray, rows: np.ndarray, comm: Comm, sides: Sequence[str] = SIDES
) -> tuple[np.ndarray, Strips | None]:  # fmt: skip
    """Return the singular values, falling, and a function to this rank's rows of some vectors.  Collective.

    The other parameters are those of `bidiagonal_vectors`.  The vectors of the last merge are formed by the function,
    so that all of them never exist at once: it holds those of the two parts, half as many elements, and is called by
    any rank alone.  None if the values do not converge: they are NaNs then.

    Parameters
    ----------
    sides : sequence of {"left", "right"}
        Which vectors are wanted.
    """
    d, e, scale = _near_one(d, e)
    n, none = len(d), rows[:0]
    # on one rank LAPACK solves parts, with less memory than the whole: of both sides it makes all of their vectors
    leaf = LEAF if comm.size > 1 else max(LEAF, n // (2 * len(SIDES) // len(sides)))
    mine = (rows if "left" in sides else none, rows if "right" in sides else none)
    with shared_collectives(comm, 2 * n, d.dtype) as group:
        if n <= LEAF:
            values, left, right = _part(group, d, e, mine, 0, n, 0)
            known = [{"left": left, "right": right[1:-1]}[side] for side in sides]
            return values[::-1] * scale, lambda i: [each[:, n - 1 - i] for each in known]
        values, order, both = _part(group, d, e, mine, 0, n, 0, _merge, leaf)
    if order is None:
        return values, None
    made = []
    for name in SIDES:
        side = both.pop(0)
        if name in sides:
            made.append((_Turned(side), slice(1, -1) if name == "right" else slice(None)))
            if comm.size > 1:  # new pages take one rank as long as a tenth of all
                memory.give_back(8 * n * len(rows))
        del side
    return values[::-1] * scale, lambda i: [turned.columns(order[n - 1 - i])[at] for turned, at in made]


def _near_one(d: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return a bidiagonal matrix divided by its largest element, and this."""
    scale = _largest(d, e) or d.dtype.type(1)
    return d / scale, e / scale, scale


def _part(
    group: SharedCollectives, d: np.ndarray, e: np.ndarray, rows: tuple[np.ndarray, np.ndarray], low: int, high: int,
    more: int, join: Callable[..., Any] | None = None, leaf: int | None = None,
) -> Any:  # fmt: skip
    """Return the part of some rows of a bidiagonal matrix, or what `join` makes of its own two parts.  Collective.

    `rows` are the numbers of this rank's rows of the left and of the right vectors.  LAPACK solves parts of up to
    `leaf` rows, by default `LEAF`.
    """
    if high - low > LEAF and leaf is not None and has_values(d) and not d[low:high].all():
        leaf = None  # LAPACK's divide and conquer divides by the largest element of each part
    if high - low <= (LEAF if leaf is None else leaf):
        mine, others = (x[(x >= low) & (x < end)] - low for x, end in zip(rows, (high, high + more), strict=True))
        return _bidiagonal_leaf(d[low:high], e[low : high - 1 + more], mine, others)
    at = (low + high) // 2
    own, ends = int(np.isin(at, rows[0])), ((low, at, 1), (at + 1, high, more))
    return (join or _joined)(
        group, _part(group, d, e, rows, *ends[0], leaf=leaf), _part(group, d, e, rows, *ends[1], leaf=leaf),
        d[at], e[at], own, more,
    )  # fmt: skip


def _bidiagonal_leaf(d: np.ndarray, e: np.ndarray, rows: np.ndarray, others: np.ndarray) -> Pair:
    n, more = len(d), len(e) + 1 - len(d)
    if n and not has_values(d):
        return shape_solver.bidiagonal_vectors(d, len(rows), len(others) + 2, n + more)
    if not n:
        return d.copy(), namespace(d).zeros((0, 0), d.dtype), namespace(d).zeros((2, 0), d.dtype)
    values, off = d.copy(), np.append(e, e.dtype.type(0))
    u, vt, m = np.eye(n, dtype=d.dtype, order="F"), np.eye(n + more, dtype=d.dtype, order="F"), n + more
    if n > LEAF:  # LAPACK's own divide and conquer
        steps, work = np.zeros(8 * n, blas.scipy_integer()), np.zeros(m * (3 * m + 2), d.dtype)
        failed = kernels.call("lasd0", d.dtype, n, more, values, off, u, n, vt, m, SMALLEST, steps, work)
    else:
        unused, work = np.zeros(1, d.dtype), np.zeros(4 * (n + 1), d.dtype)
        failed = kernels.call("lasdq", d.dtype, "U", more, n, m, n, 0, values, off, vt, m, u, n, unused, 1, work)
    del work
    order = np.argsort(values, kind="stable")
    values = np.full_like(d, np.nan) if failed else values[order]
    v = vt.T[:, [*order.tolist(), *range(n, n + more)]]
    return values, u[rows][:, order], v[np.concatenate([[0], others, [n + more - 1]]).astype(int)]


def _joined(group: SharedCollectives, one: Pair, two: Pair, alpha: Any, beta: Any, own: int, more: int) -> Pair:
    """Return the part that two parts make with the row [alpha, beta] between them, which `own` says is this rank's."""
    values, order, sides = _merge(group, one, two, alpha, beta, own, more)
    del one, two
    found: list[np.ndarray] = []
    for wide in (len(values), len(values) + more):
        side = sides.pop(0)
        memory.give_back(side.size * wide * values.itemsize)
        if order is None:
            found.append(namespace(values).zeros((side.size, wide), values.dtype))
        else:
            found.append(_turned(side, order))
        del side
    return values, found[0], found[1]


def _merge(
    group: SharedCollectives, one: Pair, two: Pair, alpha: Any, beta: Any, own: int, more: int
) -> tuple[np.ndarray, np.ndarray | None, list[_Side]]:  # fmt: skip
    """Return the singular values of `_joined`, rising, their order, and what left and right vectors are made of.

    If values do not converge they are NaNs; the order is None then.
    """
    (d1, u1, v1), (d2, u2, v2) = one, two
    del one, two
    n1, n, dtype = len(d1), len(d1) + len(d2) + 1, d1.dtype
    # Decisions below must be the same on all ranks, whatever their processors round.
    message = group.broadcast(np.concatenate([d1, d2, v1[-1], v2[0]]), 0)
    xp = namespace(message)
    d = np.concatenate([xp.zeros(1, dtype), message[: n - 1]])
    begin, last = message[n + n1 :] * beta, message[n - 1 : n + n1] * alpha
    z = np.concatenate([last[n1:], last[:n1], begin[: n - 1 - n1]])
    finite, largest = kernels.finite(message), _largest(d, alpha, beta)
    scale = largest or dtype.type(1)
    d, z = d / scale, z / scale  # so that squares stay in range
    limit = 4 * np.finfo(dtype).eps
    middle, first = slice(len(u1), len(u1) + own), len(v1) - 1
    turns: list[Turn] = []
    z[0], c, s = _rotation(z[0], begin[-1] / scale, limit) if more else (z[0], 1, 0)

    above, below, ends = np.arange(n) <= n1, np.arange(n) > n1, np.arange(n) == 0
    if has_values(z) and abs(z[0]) <= limit:
        z[0] = limit
    kept = rest = np.zeros(0, np.intp)
    if finite:
        kept, rest = _deflated(d[1:], z[1:], 1, limit, turns, [above[1:], below[1:]])
        turns = [(x + 1, y + 1, cosine, sine) for x, y, cosine, sine in turns]
        kept, rest = np.concatenate([np.zeros(1, np.intp), kept + 1]), rest + 1
    # columns: the one for the row between, the first part's, the second's, and of right vectors the one mapped to 0
    null, other = v1[:-1, n1:], v2[1:, n - 1 - n1 :]
    last = xp.concatenate([-s * null, c * other]) if more else None
    outside = [
        _Block(np.s_[: middle.start], above & ~ends, [(1, u1)]),
        _Block(middle, ends, [(0, xp.ones((own, 1), dtype))]),
        _Block(np.s_[middle.stop :], below, [(n1 + 1, u2)]),
    ]
    blocks = [
        _Block(np.s_[:first], above, [(0, c * null), (1, v1[:-1, :n1])]),
        _Block(np.s_[first:], below | (ends & bool(more)), [(0, s * other), (n1 + 1, v2[1:, : n - 1 - n1])]),
    ]
    sizes = len(u1) + own + len(u2), len(v1) + len(v2) - 2
    del u1, u2, v1, v2, null, other

    def sides(vectors: Sequence[Vectors | None]) -> list[_Side]:
        left = _Side(sizes[0], outside, turns, kept, rest, vectors[0])
        return [left, _Side(sizes[1], blocks, turns, kept, rest, vectors[1], last)]

    unknown: np.ndarray = np.full(n, np.nan, dtype)
    if not finite:
        return unknown, None, sides([None, None])
    dk, zk, k = d[kept], z[kept], len(kept)
    dk[1:2] = np.maximum(dk[1:2], limit / 2)
    if k == 1:
        roots = np.abs(zk)
        vectors: list[Vectors] = [lambda i, _: np.sign(zk)[:, None][:, i], lambda i, _: np.ones((1, len(i)), dtype)]
    else:
        length = np.linalg.norm(zk)
        roots, near, gap = _roots(group, dk, zk / length, length * length, squares=True)
        if not kernels.finite(roots):
            return unknown, None, sides([None, None])
        vectors = _singular_vectors(group, dk, zk, near, gap)
    values = np.concatenate([roots, d[rest]])
    order = _rising(values)
    return values[order] * largest, order, sides(vectors)


def _singular_vectors(
    group: SharedCollectives, d: np.ndarray, z: np.ndarray, near: np.ndarray, gap: np.ndarray
) -> list[Vectors]:
    """Return the functions from numbers of roots to the left and to the right vectors of the merge."""
    k, origin = len(d), d[near.astype(np.intp)]
    mine = np.arange(group.comm.rank, k, group.comm.size)
    found, step = namespace(d).empty((len(mine), 1), d.dtype), max(1, SOME // k)
    for start in range(0, len(mine), step):  # the z of which the computed roots are the exact ones
        j = mine[start : start + step]
        each, own = d[j][:, None], np.arange(len(j))
        ratio = each - origin
        ratio -= gap
        below = each - d
        below[own, j] = 1
        ratio /= below
        np.add(each, origin, out=below)
        below += gap
        ratio *= below
        np.add(each, d, out=below)
        below[own, j] = 1
        ratio /= below
        found[start : start + step, 0] = ratio.prod(axis=1)
    exact = np.copysign(np.sqrt(np.abs(_shared(group, found, k)[:, 0])), z)

    def right(i: np.ndarray, order: np.ndarray) -> np.ndarray:
        v, root = _above(d[order], origin[i], gap[i]), (origin[i] + gap[i])[:, None]
        np.divide(exact[order], v, out=v)
        _multiply(v, root, d[order], origin[i], gap[i])  # times the root, that squares stay in range
        return v.T

    def left(i: np.ndarray, order: np.ndarray) -> np.ndarray:
        u = _above(d[order], origin[i], gap[i])
        np.divide(exact[order], u, out=u)
        _multiply(u, d[order][None, :], d[order], origin[i], gap[i])
        u[:, order == 0] = -1
        return u.T

    return [left, right]


def _multiply(v: np.ndarray, top: np.ndarray, d: np.ndarray, origin: np.ndarray, gap: np.ndarray) -> None:
    """Multiply rows of v, those of roots, by `top` over the sums of d and the roots, a few at a time."""
    step = max(FEW, SOME // 2 // len(d))
    for start in range(0, len(v), step):
        at = slice(start, start + step)
        above = _above(d, -origin[at], -gap[at])
        v[at] *= np.divide(top if top.shape[1] > 1 else top[at], above, out=above)
