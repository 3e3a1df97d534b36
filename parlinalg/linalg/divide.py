"""Eigenvectors of real symmetric tridiagonal matrices by divide and conquer, shared out by rows.

The matrix is cut into halves, whose eigenvectors are those of the whole after a change of rank one (Cuppen 1981), with
the vectors of Gu and Eisenstat (1995), as in LAPACK's `stedc`.  A merge needs the first and the last row of the
eigenvectors of each half, so each rank has these and some rows, never a whole matrix; the roots of the secular
equation are shared out too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.comm import Comm
from parlinalg.linalg import kernels

LEAF = 64
"""Rows of a part that LAPACK solves."""
STRIP = 256
"""Columns of the vectors of a merge that exist at once."""

Part = tuple[np.ndarray, np.ndarray]
"""Eigenvalues, rising, and of the eigenvectors the first row, this rank's rows, and the last one; NaNs by failure."""


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
    scale = max(np.abs(d).max(initial=0), np.abs(e).max(initial=0)) or d.dtype.type(1)
    d, e = d / scale, e / scale
    leaf = LEAF if comm.size > 1 else n

    def cut(low: int, high: int) -> None:
        if high - low > leaf:
            middle = (low + high) // 2
            d[middle - 1 : middle + 1] -= abs(e[middle - 1])
            cut(low, middle)
            cut(middle, high)

    def part(low: int, high: int, choose: Callable[[np.ndarray], slice] | None = None) -> Part:
        if high - low <= leaf:
            mine = rows[(rows >= low) & (rows < high)] - low
            return _leaf(d[low:high], e[low : high - 1], mine, choose)
        middle = (low + high) // 2
        return _merged(comm, part(low, middle), part(middle, high), e[middle - 1], choose)

    cut(0, n)
    values, found = part(0, n, lambda values: choose(values * scale))
    return values * scale, found[1:-1]


def _leaf(d: np.ndarray, e: np.ndarray, rows: np.ndarray, choose: Callable[[np.ndarray], slice] | None) -> Part:
    if len(d) < 2:
        values, z, info = d.copy(), np.ones((len(d), len(d)), d.dtype), 0
    else:
        values, z, info = kernels.lapack("stevd", d.dtype)(d, e)
    values = np.full_like(d, np.nan) if info else values
    at = choose(values) if choose else slice(None)
    ends = [[0], [len(d) - 1]] if len(d) else [[], []]
    return values, z[np.concatenate([ends[0], rows, ends[1]]).astype(int), at]


def _merged(
    comm: Comm, one: Part, two: Part, beta: Any, choose: Callable[[np.ndarray], slice] | None
) -> Part:  # fmt: skip
    """Return the part that two parts make with the element `beta` between them."""
    (d1, w1), (d2, w2) = one, two
    m1, m, dtype = len(d1), len(d1) + len(d2), d1.dtype
    # Decisions below must be the same on all ranks, whatever their processors round.
    message = np.concatenate([d1, d2, w1[-1], w2[0] if beta >= 0 else -w2[0]])
    comm.broadcast(message, 0)
    d, z = message[:m], message[m:] / dtype.type(math.sqrt(2))
    rho = dtype.type(2 * abs(beta))
    first = len(w1) - 1
    w = np.zeros((first + len(w2) - 1, m), dtype)  # the first half's rows, then the second's
    w[:first, :m1], w[first:, m1:] = w1[:-1], w2[1:]
    if not np.isfinite(message).all():
        return np.full(m, np.nan, dtype), w
    upper = np.arange(m) < m1
    lower = ~upper
    kept, rest = _deflated(d, z, rho, w, upper, lower)
    dk, zk, k = d[kept], z[kept], len(kept)
    roots, near, gap = _roots(comm, dk, zk, rho)
    if not np.isfinite(roots).all():
        return np.full(m, np.nan, dtype), w
    vector = _vectors(comm, dk, zk, near, gap)
    values = np.concatenate([roots, d[rest]])
    order = np.argsort(values, kind="stable")
    values = values[order]
    wanted = order[choose(values)] if choose else order
    out = np.empty((len(w), len(wanted)), dtype)
    halves = [
        (np.s_[:first], np.flatnonzero(upper[kept])), (np.s_[first:], np.flatnonzero(lower[kept])),
    ]  # fmt: skip
    factors = [np.ascontiguousarray(w[part][:, kept[inner]]) for part, inner in halves]
    places = np.flatnonzero(wanted < k)
    for start in range(0, len(places), STRIP):
        at = places[start : start + STRIP]
        u = vector(wanted[at])
        for (part, inner), factor in zip(halves, factors, strict=True):
            out[part, at] = factor @ u[inner]
    others = np.flatnonzero(wanted >= k)
    out[:, others] = w[:, rest[wanted[others] - k]]
    return values, out


def _deflated(
    d: np.ndarray, z: np.ndarray, rho: Any, w: np.ndarray, upper: np.ndarray, lower: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which columns take part in the merge, by rising d, and which are eigenvectors already (`laed2`).

    Columns of nearly equal d are turned so that z of one becomes 0; `upper` and `lower` say in which half a column
    has elements.
    """
    eps = np.finfo(d.dtype).eps / 2
    limit = 8 * eps * max(np.abs(d).max(), np.abs(z).max())
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
                x, y = w[:, before].copy(), w[:, j].copy()
                w[:, before], w[:, j] = c * x + s * y, c * y - s * x
                d[before], d[j] = d[before] * c * c + d[j] * s * s, d[before] * s * s + d[j] * c * c
                for has in (upper, lower):
                    has[before] = has[j] = has[before] | has[j]
                rest.append(before)
            else:
                kept.append(before)
        before = j
    if before >= 0:
        kept.append(before)
    return np.array(kept, np.intp), np.array(rest, np.intp)


def _shared(comm: Comm, mine: np.ndarray, k: int) -> np.ndarray:
    """Return rows 0 to k - 1, of which rank p has those of numbers p, p + size, ….  Collective."""
    width, every = mine.shape[1], [np.arange(p, k, comm.size) for p in range(comm.size)]
    if comm.size == 1:
        return mine
    got, out = np.empty((k, width), mine.dtype), np.empty((k, width), mine.dtype)
    comm.all_gather(np.ascontiguousarray(mine), got, [len(each) * width for each in every])
    out[np.concatenate(every)] = got
    return out


def _roots(comm: Comm, d: np.ndarray, z: np.ndarray, rho: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the roots of the secular equation, the nearest d of each, and how far above it the root lies."""
    k = len(d)
    mine = np.arange(comm.rank, k, comm.size)
    found = np.empty((len(mine), 3), d.dtype)
    delta, root, number = np.empty(k, d.dtype), np.empty(1, d.dtype), np.empty(1, np.intc)
    solve = kernels.bound("laed4", d.dtype, k, number, d, z, delta, np.array([rho], d.dtype), root)
    for row, i in zip(found, mine.tolist(), strict=True):
        number[0] = i + 1
        failed = solve()
        at = int(np.argmin(np.abs(delta))) if k > 2 else i
        row[:] = np.nan if failed else root[0], at, -delta[at]
        if k == 2:  # here `laed4` gives the vector itself; only its direction is needed
            row[1:] = delta
    found = _shared(comm, found, k)
    return found[:, 0].copy(), found[:, 1], found[:, 2]


def _vectors(
    comm: Comm, d: np.ndarray, z: np.ndarray, near: np.ndarray, gap: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from numbers of roots to the vectors of the merge, as columns."""
    k = len(d)
    if k < 3:
        whole = np.stack([near, gap]) if k == 2 else np.ones((k, k), d.dtype)
        return lambda i: whole[:, i]
    origin = d[near.astype(np.intp)]
    mine = np.arange(comm.rank, k, comm.size)
    found = np.empty((len(mine), 1), d.dtype)
    for start in range(0, len(mine), STRIP):  # the z of which the computed roots are the exact ones
        j = mine[start : start + STRIP]
        below = d[j][:, None] - d[None, :]
        below[np.arange(len(j)), j] = 1
        found[start : start + STRIP, 0] = (((d[j][:, None] - origin) - gap) / below).prod(axis=1)
    exact = np.copysign(np.sqrt(np.abs(_shared(comm, found, k)[:, 0])), z)

    def columns(i: np.ndarray) -> np.ndarray:
        u: np.ndarray = exact[:, None] / ((d[:, None] - origin[i]) - gap[i])
        u /= np.sqrt(np.einsum("ij,ij->j", u, u))
        return u

    return columns
