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
from collections.abc import Callable
from typing import Any

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
    d: np.ndarray, e: np.ndarray, rows: np.ndarray, comm: Comm, choose: Callable[[np.ndarray], slice]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvalues, rising, and this rank's rows of the eigenvectors that are chosen.  Collective.

    Parameters
    ----------
    d, e : array
        The diagonal and what is beside it, the same on all ranks.
    rows : array of int
        The numbers of this rank's rows, rising.
    choose : callable
        Returns from all eigenvalues where those are whose vectors are wanted.
    """
    n = len(d)
    scale = _largest(d, e) or d.dtype.type(1)
    d, e = d / scale, e / scale
    leaf = LEAF if comm.size > 1 else n

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
    first = len(w1) - 1
    w: np.ndarray = namespace(d).zeros((first + len(w2) - 1, m), dtype)  # the first half's rows, then the second's
    w[:first, :m1], w[first:, m1:] = w1[:-1], w2[1:]
    del one, two, w1, w2
    memory.give_back(w.nbytes)
    if not kernels.finite(message):
        return np.full(m, np.nan, dtype), w
    upper = np.arange(m) < m1
    lower = ~upper
    limit = 8 * np.finfo(dtype).eps / 2 * _largest(d, z)
    turns: list[Turn] = []
    kept, rest = _deflated(d, z, rho, limit, turns, [upper, lower])
    _rotate(w, turns)
    dk, zk = d[kept], z[kept]
    roots, near, gap = _roots(group, dk, zk, rho)
    if not kernels.finite(roots):
        return np.full(m, np.nan, dtype), w
    vector = _vectors(group, dk, zk, near, gap)
    values = np.concatenate([roots, d[rest]])
    order = _rising(values)
    values = values[order]
    wanted = order[choose(values)] if choose else order
    return values, _turned(w, ([(np.s_[:first], upper), (np.s_[first:], lower)], kept, rest, vector), wanted)


Vectors = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from numbers of roots and of rows, in any order, to the vectors of a merge, as columns of any length."""


Parts = tuple[list[tuple[slice, np.ndarray]], np.ndarray, np.ndarray, Vectors]
"""The arguments of `_Turned` beside w."""


class _Turned:
    """The columns that a merge makes of this rank's rows of the vectors of two parts, some at a time.

    The numbers of columns count the roots of the secular equation first, then the vectors that were known before.

    Parameters
    ----------
    w : array
        This rank's rows of the vectors of the parts.  Only its elements that are not zeros everywhere are kept.
    blocks : list
        Rows of w, and for each column whether it has elements there.
    kept, rest : array of int
        The columns that the merge changes, and those that it does not.
    vector : callable
        The vectors of the merge.
    """

    def __init__(
        self, w: np.ndarray, blocks: list[tuple[slice, np.ndarray]], kept: np.ndarray, rest: np.ndarray, vector: Vectors
    ) -> None:  # fmt: skip
        self._rows, self._xp, self._dtype, self._vector = len(w), namespace(w), w.dtype, vector
        has = [each[kept] for _, each in blocks]
        self._order = order = np.argsort(has[-1].astype(int) - has[0], kind="stable")  # those of one block side by side
        self._parts: list[tuple[Any, ...]] = []
        """Rows; the factor of the vectors, of the elements j of them; and known vectors, with the place of each."""
        for (rows, each), mine in zip(blocks, has, strict=True):
            j, known = indexer(np.flatnonzero(mine[order])), np.flatnonzero(each[rest])
            place = np.full(len(rest), -1)
            place[known] = np.arange(len(known))
            factor, others = (self._xp.take(w[rows], at, axis=1) for at in (kept[order][j], rest[known]))
            self._parts.append((rows, factor, j, others, place))

    def columns(self, numbers: np.ndarray) -> np.ndarray:
        """Return this rank's rows of the columns with these numbers."""
        k = len(self._order)
        roots, others = (np.flatnonzero(each) for each in (numbers < k, numbers >= k))
        out: np.ndarray = self._xp.zeros((self._rows, len(numbers)), self._dtype)
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


def _turned(w: np.ndarray, parts: Parts, wanted: np.ndarray, more: int = 0) -> np.ndarray:
    """Return the wanted columns that a merge makes of w, see `_Turned`; the last `more` columns stay as they are.

    The result overwrites w.
    """
    xp, last = namespace(w), w[:, w.shape[1] - more :].copy()
    made = _Turned(w, *parts)
    out = w if len(wanted) + more == w.shape[1] else xp.empty((len(w), len(wanted) + more), w.dtype)
    out[:, len(wanted) :] = last
    del w
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


def _rotate(w: np.ndarray, turns: list[Turn]) -> None:
    """Turn pairs of columns, one after the other."""
    for one, two, c, s in turns:
        x, y = w[:, one].copy(), w[:, two].copy()
        w[:, one], w[:, two] = c * x + s * y, c * y - s * x


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
    with shared_collectives(comm, 2 * len(d), d.dtype) as group:
        values, left, right = _part(group, d, e, rows, 0, len(d), 0)
    return values[::-1] * scale, left[:, ::-1], right[1:-1, ::-1]


Strips = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""A function from numbers of singular values, falling, to this rank's rows of their left and of their right vectors."""


def bidiagonal_strips(
    d: np.ndarray, e: np.ndarray, rows: np.ndarray, comm: Comm
) -> tuple[np.ndarray, Strips | None]:  # fmt: skip
    """Return the singular values, falling, and a function to this rank's rows of some vectors.  Collective.

    The parameters are those of `bidiagonal_vectors`.  The vectors of the last merge are formed by the function, so that
    all of them never exist at once: it holds those of the two parts, half as many elements, and is called by any rank
    alone.  None if the values do not converge: they are NaNs then.
    """
    d, e, scale = _near_one(d, e)
    n = len(d)
    leaf = LEAF if comm.size > 1 else max(LEAF, n // 2)  # LAPACK solves both halves, with less memory than the whole
    with shared_collectives(comm, 2 * n, d.dtype) as group:
        if n <= LEAF:
            values, left, right = _part(group, d, e, rows, 0, n, 0)
            return values[::-1] * scale, lambda i: (left[:, n - 1 - i], right[1:-1, n - 1 - i])
        values, order, sides = _part(group, d, e, rows, 0, n, 0, _merge, leaf)
    if order is None:
        return values, None
    made = []
    while sides:
        build, parts, _ = sides.pop(0)
        w = build()
        del build
        made.append(_Turned(w, *parts))
        del w
        if comm.size > 1:  # new pages take one rank as long as a tenth of all
            memory.give_back(8 * n * len(rows))
    one, two = made
    return values[::-1] * scale, lambda i: (one.columns(order[n - 1 - i]), two.columns(order[n - 1 - i])[1:-1])


def _near_one(d: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return a bidiagonal matrix divided by its largest element, and this."""
    scale = _largest(d, e) or d.dtype.type(1)
    return d / scale, e / scale, scale


def _part(
    group: SharedCollectives, d: np.ndarray, e: np.ndarray, rows: np.ndarray, low: int, high: int, more: int,
    join: Callable[..., Any] | None = None, leaf: int | None = None,
) -> Any:  # fmt: skip
    """Return the part of some rows of a bidiagonal matrix, or what `join` makes of its own two parts.  Collective.

    LAPACK solves parts of up to `leaf` rows, by default `LEAF`.
    """
    if high - low <= (LEAF if leaf is None else leaf):
        mine, others = (rows[(rows >= low) & (rows < end)] - low for end in (high, high + more))
        return _bidiagonal_leaf(d[low:high], e[low : high - 1 + more], mine, others)
    at = (low + high) // 2
    own, ends = int(np.isin(at, rows)), ((low, at, 1), (at + 1, high, more))
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
    while sides:
        build, parts, last = sides.pop(0)
        w = build()
        del build
        memory.give_back(w.nbytes)
        found.append(w if order is None else _turned(w, parts, order, last))
    return values, found[0], found[1]


def _merge(
    group: SharedCollectives, one: Pair, two: Pair, alpha: Any, beta: Any, own: int, more: int
) -> tuple[np.ndarray, np.ndarray | None, list[Any]]:  # fmt: skip
    """Return the singular values of `_joined`, rising, their order, and what left and right vectors are made of.

    For each side that is a function which returns W, so that there is one W at a time, the other arguments of
    `_Turned`, and how many columns stay as they are.  If values do not converge they are NaNs; the order is None then.
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

    # columns: the one for the row between, the first part's, the second's, and of right vectors the one mapped to 0
    def left() -> np.ndarray:
        w: np.ndarray = xp.zeros((len(u1) + own + len(u2), n), dtype)
        w[: len(u1), 1 : n1 + 1], w[middle, 0], w[middle.stop :, n1 + 1 :] = u1, 1, u2
        _rotate(w[:, 1:], turns)
        return w

    def right() -> np.ndarray:
        w: np.ndarray = xp.zeros((len(v1) + len(v2) - 2, n + more), dtype)
        w[:first, 1 : n1 + 1], w[first:, n1 + 1 : n] = v1[:-1, :n1], v2[1:, : n - 1 - n1]
        w[:first, 0] = v1[:-1, n1]
        if more:
            null = v2[1:, -1]
            w[:first, n], w[first:, n] = -s * w[:first, 0], c * null
            w[:first, 0] *= c
            w[first:, 0] = s * null
        _rotate(w[:, 1:n], turns)
        return w

    unknown: np.ndarray = np.full(n, np.nan, dtype)
    if not finite:
        return unknown, None, [(left, (), 0), (right, (), more)]
    above, below, ends = np.arange(n) <= n1, np.arange(n) > n1, np.arange(n) == 0
    if has_values(z) and abs(z[0]) <= limit:
        z[0] = limit
    kept, rest = _deflated(d[1:], z[1:], 1, limit, turns, [above[1:], below[1:]])
    kept, rest = np.concatenate([np.zeros(1, np.intp), kept + 1]), rest + 1
    dk, zk, k = d[kept], z[kept], len(kept)
    dk[1:2] = np.maximum(dk[1:2], limit / 2)
    if k == 1:
        roots = np.abs(zk)
        vectors: list[Vectors] = [lambda i, _: np.sign(zk)[:, None][:, i], lambda i, _: np.ones((1, len(i)), dtype)]
    else:
        length = np.linalg.norm(zk)
        roots, near, gap = _roots(group, dk, zk / length, length * length, squares=True)
        if not kernels.finite(roots):
            return unknown, None, [(left, (), 0), (right, (), more)]
        vectors = _singular_vectors(group, dk, zk, near, gap)
    values = np.concatenate([roots, d[rest]])
    order = _rising(values)
    outside = [(np.s_[: middle.start], above & ~ends), (middle, ends), (np.s_[middle.stop :], below)]
    blocks = [(np.s_[:first], above), (np.s_[first:], below | (ends & bool(more)))]
    sides = [(left, (outside, kept, rest, vectors[0]), 0), (right, (blocks, kept, rest, vectors[1]), more)]
    return values[order] * largest, order, sides


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
