"""Products and triangular solutions with few columns, by loops that numba compiles.

BLAS copies its matrices into an order that serves products with many columns: with few of them the copies take longer
than the products.  A loop reads each row of the matrix where it lies, once for all columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.backend import compiled
from parlinalg.backend.blas import blas_threads

THREADS = 2
"""Threads of BLAS up to which a loop, which has one, is faster."""
COLUMNS = {4: 8, 8: 16}
"""The most columns of which a loop is faster than BLAS on one thread, by the bytes of a number; on two threads it is
half as many.  On an EPYC a loop took 0.25 ns for an element of the matrix with one column in float64, 0.8 with eight
and 1.2 with 16, where BLAS took 0.75, 1.3 and 1.5 on one thread, and 0.7, 0.7 and 0.9 on two."""
LENGTH = 2048
"""Columns of the matrix that are read at a time: so much of all columns of x stays in a core's second cache."""
CORNER = 16
"""Rows of a triangle that are solved one by one."""


def ready(a: Any, x: Any) -> bool:
    """Return True if the loops can multiply parts of a matrix with these columns, and are the faster way."""
    if not (a.flags.c_contiguous and compiled.ready(a, x)):
        return False
    threads = blas_threads()
    return threads is not None and threads <= THREADS and 0 < x.shape[1] <= COLUMNS[x.itemsize] // threads


def subtract(y: np.ndarray, a: np.ndarray, rows: slice, columns: slice, x: np.ndarray) -> None:
    """Subtract `a[rows, columns] @ x` from y, in place, if `ready`; x and y are in rows one behind the other."""
    _subtract(y, a, rows.start, columns.start, x)


def substitute(
    a: np.ndarray, rows: slice, columns: slice, b: np.ndarray, *, lower: bool, unit: bool
) -> None:  # fmt: skip
    """Replace b by the solution of `a[rows, columns] x = b`, if `ready`; b is in rows one behind the other."""
    _substitute(a, rows.start, columns.start, b, lower, unit)


@compiled.loop(sums=True)
def _rows_by_columns(
    y: Any, first: int, end: int, a: Any, top: int, left: int, length: int, turned: Any, start: int
) -> None:  # fmt: skip
    """y[first:end] -= A x, for at most LENGTH columns of A, whose corner is at [top, left]; x is turned[:, start:].

    Four rows of A are multiplied by four columns of x at a time, or by two where there are fewer.  The last ones may
    overlap those before them, which then count once.
    """
    wide, stop = turned.shape[0], start + length
    for turn in range((end - first + 3) // 4):
        i = max(0, min(4 * turn, end - first - 4))
        done, rows = 4 * turn - i, min(4, end - first)
        p, q = a[top + i], a[top + min(i + 1, i + rows - 1)]
        r, s = a[top + min(i + 2, i + rows - 1)], a[top + i + rows - 1]
        p, q, r, s = p[left : left + length], q[left : left + length], r[left : left + length], s[left : left + length]
        if wide < 4:
            for pair in range((wide + 1) // 2):
                j = max(0, min(2 * pair, wide - 2))
                u, v = turned[j], turned[min(j + 1, wide - 1)]
                found = _four_by_two(p, q, r, s, u[start:stop], v[start:stop])
                for row in range(done, rows):
                    both = found[row]
                    if j == 2 * pair:
                        y[first + i + row, j] -= both[0]
                    if wide > 1:
                        y[first + i + row, j + 1] -= both[1]
            continue
        for four in range((wide + 3) // 4):
            j = min(4 * four, wide - 4)
            t, u, v, w = turned[j], turned[j + 1], turned[j + 2], turned[j + 3]
            sums = _four_by_four(p, q, r, s, t[start:stop], u[start:stop], v[start:stop], w[start:stop])
            for row in range(done, rows):
                each = sums[row]
                for k in range(4 * four - j, 4):
                    y[first + i + row, j + k] -= each[k]


@compiled.loop(sums=True)
def _four_by_two(p: Any, q: Any, r: Any, s: Any, u: Any, v: Any) -> Any:
    """Return the products of four rows with two columns."""
    zero = p.dtype.type(0)
    pu, pv, qu, qv, ru, rv, su, sv = zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(len(p)):
        b, c = u[k], v[k]
        pu += p[k] * b
        pv += p[k] * c
        qu += q[k] * b
        qv += q[k] * c
        ru += r[k] * b
        rv += r[k] * c
        su += s[k] * b
        sv += s[k] * c
    return (pu, pv), (qu, qv), (ru, rv), (su, sv)


@compiled.loop(sums=True)
def _four_by_four(p: Any, q: Any, r: Any, s: Any, t: Any, u: Any, v: Any, w: Any) -> Any:
    """Return the products of four rows with four columns."""
    zero = p.dtype.type(0)
    pt, pu, pv, pw, qt, qu, qv, qw = zero, zero, zero, zero, zero, zero, zero, zero
    rt, ru, rv, rw, st, su, sv, sw = zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(len(p)):
        b, c, d, e = t[k], u[k], v[k], w[k]
        pt += p[k] * b
        pu += p[k] * c
        pv += p[k] * d
        pw += p[k] * e
        qt += q[k] * b
        qu += q[k] * c
        qv += q[k] * d
        qw += q[k] * e
        rt += r[k] * b
        ru += r[k] * c
        rv += r[k] * d
        rw += r[k] * e
        st += s[k] * b
        su += s[k] * c
        sv += s[k] * d
        sw += s[k] * e
    return (pt, pu, pv, pw), (qt, qu, qv, qw), (rt, ru, rv, rw), (st, su, sv, sw)


@compiled.loop(sums=True)
def _subtract(y: Any, a: Any, top: int, left: int, x: Any) -> None:
    """y -= A x, for A a part of `a` with its corner at [top, left]."""
    length = x.shape[0]
    turned = np.empty((x.shape[1], min(LENGTH, length) + 8), x.dtype)  # rows not a power of two of bytes apart
    for start in range(0, length, LENGTH):
        part = min(LENGTH, length - start)
        for k in range(part):
            for j in range(x.shape[1]):
                turned[j, k] = x[start + k, j]
        _rows_by_columns(y, 0, y.shape[0], a, top, left + start, part, turned, 0)


@compiled.loop(sums=True)
def _substitute(a: Any, top: int, left: int, x: Any, lower: bool, unit: bool) -> None:
    """Replace x by the solution with a triangle, a part of `a` with its corner at [top, left]."""
    n, wide = x.shape
    turned = np.empty((wide, n + 8), x.dtype)
    for turn in range((n + CORNER - 1) // CORNER):
        first = turn * CORNER if lower else max(0, n - (turn + 1) * CORNER)
        end = min(n, first + CORNER) if lower else n - turn * CORNER
        known, until = (0, first) if lower else (end, n)
        for start in range(known, until, LENGTH):
            length = min(LENGTH, until - start)
            _rows_by_columns(x, first, end, a, top + first, left + start, length, turned, start)
        for step in range(end - first):
            i = first + step if lower else end - 1 - step
            row = x[i]
            for k in range(first if lower else i + 1, i if lower else end):
                factor, other = a[top + i, left + k], x[k]
                for j in range(wide):
                    row[j] -= factor * other[j]
            if not unit:
                pivot = a[top + i, left + i]
                for j in range(wide):
                    row[j] /= pivot
        for i in range(first, end):
            for j in range(wide):
                turned[j, i] = x[i, j]
