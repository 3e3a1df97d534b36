"""Products and triangular solutions with few columns, by loops that numba compiles.

BLAS copies its matrices into an order that serves products with many columns: with few of them the copies take longer
than the products.  A loop reads each row of the matrix where it lies, once for as many columns as registers hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import compiled, namespace
from parlinalg.backend.blas import LETTERS, blas_threads

THREADS = 2
"""Threads of BLAS up to which a loop, which has one, is faster."""
COLUMNS = 64
"""The most columns of which a loop is faster than BLAS on one thread; on two threads it is half as many.  On an EPYC
triangles of 2048 rows of float64 took 0.7, 0.9, 1.6, 2.9 and 5.4 ms with 1, 8, 16, 32 and 64 columns, where BLAS took
1.4, 3.0, 3.9, 5.5 and 8.6 ms on one thread, and 1.2, 1.9, 2.4 and 3.1 with up to 32 on two."""
LENGTH = 256
"""Terms of a product that are summed before they are added to others."""
LEAST, ROWS = 1 << 17, 16
"""Elements and rows of the matrix from which on a product is worth the copy of x, and the calls."""
WIDE, TALL = 96, 8
"""The most columns with which a loop solves with a triangle from the right, and the least rows, by the columns."""
TURN = 4
"""Groups of rows of which such a loop finds a few columns each before the next ones: none waits for another."""


def product(x: Any, w: Any, out: Any = None) -> Any:
    """Return `x @ w` of matrices (with leading batch dims) on one backend, in `out` if it is given.

    OpenBLAS multiplies long rows by a column part by part: the first part of all rows, then the next.  That jumps
    through memory, and reads it at about two thirds of the rate of one long sum; a few whole rows at a time it reads at
    four fifths.  A loop that numba compiles reads eight rows side by side, at nine tenths.
    """
    xp = namespace(x)
    if _in_strips(x, w):
        y = np.empty((len(x), 1), x.dtype) if out is None else out
        if len(x) >= ABREAST and compiled.ready(x, w, y):
            _rows_by_column(x, np.ascontiguousarray(w[:, 0]), y[:, 0])
            return y
        rows = 4 * -(-tunables.GEMV_STRIP // (4 * x.shape[1] * x.itemsize))
        for start in range(0, len(x), rows):
            np.matmul(x[start : start + rows], w, out=y[start : start + rows])
        return y
    if x.ndim == w.ndim == 2 and w.shape[1] > 1 and _worth_it(x, w) and blas_threads() == 1:
        y = np.empty((len(x), w.shape[1]), x.dtype) if out is None else out
        y[...] = 0
        if added(y, x, w):
            return y
    return xp.matmul(x, w) if out is None else xp.matmul(x, w, out=out)


def added(y: Any, x: Any, w: Any, scale: float = 1) -> bool:
    """Add `scale * (x @ w)` to y if w has few columns and a loop is the faster way; return True if it did."""
    if not _worth_it(x, w) or y.dtype != x.dtype or not _in_rows(y):
        return False
    if x.shape[1] != len(w) or y.shape != (len(x), w.shape[1]):  # NumPy raises the error
        return False
    _add_product(y, x, w, scale)
    return True


def substituted(t: Any, b: Any, *, lower: bool, unit: bool) -> bool:
    """Replace b by the solution x of `t x = b` if b has few columns and a loop is the faster way; True if it did.

    t is a triangle, whose diagonal is taken to be ones if `unit`; the other triangle is not read.
    """
    if not _ready(t, b) or t.shape != (len(b), len(b)) or not (_in_rows(t) and _in_rows(b)):
        return False
    _substitute(t, b, lower, unit)
    return True


def substituted_right(t: Any, b: Any) -> bool:
    """Replace b by the solution x of `x t = b`, for an upper triangle, if b is tall and a loop is faster; True if so.

    OpenBLAS takes a slow kernel for rows that do not lie one behind the other.  On an EPYC 32768 rows, parts of rows
    of 256 numbers of float64, took 3.0 and 8.3 ms with 48 and 96 columns, where OpenBLAS took 5.4 and 13.
    """
    n = b.shape[1]
    if not 0 < n <= WIDE or len(b) < TALL * n or not compiled.ready(b, t) or blas_threads() != 1:
        return False
    return t.shape == (n, n) and _in_rows(b) and bool(_substitute_right(t, b))


def _worth_it(x: Any, w: Any) -> bool:
    """Return True if a loop is the faster way to multiply a matrix by one with few columns."""
    return _ready(x, w) and x.size >= LEAST and len(x) >= ROWS and _in_rows(x) and _in_rows(w)


def _ready(a: Any, x: Any) -> bool:
    """Return True if loops take a matrix with these columns, and are faster than BLAS with its threads."""
    if not (0 < x.shape[-1] <= COLUMNS and compiled.ready(a, x)):
        return False
    threads = blas_threads()
    return threads is not None and threads <= THREADS and x.shape[-1] <= COLUMNS // threads


def _in_rows(a: np.ndarray) -> bool:
    """Return True if the elements of each row of a matrix lie together; between its rows there may be others."""
    return a.flags.c_contiguous or (a.strides[1] == a.itemsize and a.strides[0] % a.itemsize == 0)


@compiled.loop()
def _room(x: Any) -> Any:
    """Return memory for x in strips of columns, as `compiled.few_rows_product` takes them."""
    (n, wide), lanes = x.shape, 32 // x.itemsize
    width = lanes if wide <= lanes else 2 * lanes
    return np.zeros(((wide + width - 1) // width, n, width), x.dtype)


@compiled.loop()
def _copy(strips: Any, x: Any, first: int, end: int) -> None:
    """Copy the rows x[first:end] to the strips."""
    count, _, width = strips.shape
    for strip in range(count):
        left = strip * width
        for i in range(first, end):
            for j in range(min(width, x.shape[1] - left)):
                strips[strip, i, j] = x[i, left + j]


@compiled.loop()
def _add_product(y: Any, a: Any, x: Any, scale: float) -> None:
    """y += scale a x."""
    strips, factor = _room(x), y.dtype.type(scale)
    _copy(strips, x, 0, x.shape[0])
    count, terms, width = strips.shape
    rows = compiled.FEW_ROWS[width * y.itemsize // 32 - 1]
    found = np.empty((rows, width), y.dtype)
    for i in range(0, y.shape[0], rows):
        here = min(rows, y.shape[0] - i)
        for start in range(0, terms, LENGTH):
            length = min(LENGTH, terms - start)
            for strip in range(count):
                left = strip * width
                if left + width <= y.shape[1]:
                    compiled.few_rows_product(y, i, left, factor, a, i, here, start, length, strips[strip])
                    continue
                found[:] = 0
                compiled.few_rows_product(found, 0, 0, factor, a, i, here, start, length, strips[strip])
                for row in range(here):
                    for j in range(y.shape[1] - left):
                        y[i + row, left + j] += found[row, j]


@compiled.loop()
def _substitute(a: Any, x: Any, lower: bool, unit: bool) -> None:
    """Replace x by the solution with a triangle."""
    n, strips, minus = len(x), _room(x), x.dtype.type(-1)
    _copy(strips, x, 0, n)
    count, _, width = strips.shape
    rows = compiled.FEW_ROWS[width * x.itemsize // 32 - 1]
    for turn in range((n + rows - 1) // rows):
        first = turn * rows if lower else max(0, n - (turn + 1) * rows)
        end = min(n, first + rows) if lower else n - turn * rows
        known, until = (0, first) if lower else (end, n)
        for start in range(known, until, LENGTH):
            length = min(LENGTH, until - start)
            for strip in range(count):
                some = strips[strip]
                compiled.few_rows_product(some, first, 0, minus, a, first, end - first, start, length, some)
        for strip in range(count):
            some = strips[strip]
            if end - first == rows:
                compiled.few_rows_solution(some, a, first, lower, unit)
                continue
            for step in range(end - first):
                i = first + step if lower else end - 1 - step
                for k in range(first if lower else i + 1, i if lower else end):
                    some[i] -= a[i, k] * some[k]
                if not unit:
                    some[i] /= a[i, i]
    for strip in range(count):
        left = strip * width
        for i in range(n):
            for j in range(min(width, x.shape[1] - left)):
                x[i, left + j] = strips[strip, i, j]


@compiled.loop()
def _substitute_right(t: Any, x: Any) -> bool:
    """Replace x by the solution y of `y t = x` for an upper triangle; False, and x as it was, if quotients are extreme.

    Of a strip of columns y[:, k] t[k, k] is found first, by t[k, j] / t[k, k]: each is to be a normal number, or 0.
    """
    (m, n), rows, width = x.shape, compiled.FEW_ROWS[0], 32 // x.itemsize
    count, minus, tiny = (n + width - 1) // width, x.dtype.type(-1), np.finfo(x.dtype).tiny
    strips, ones = np.zeros((count, count * width, width), x.dtype), np.ones((1, count * width), x.dtype)
    for i in range(n):
        ones[0, i] = 1 / t[i, i]
        if not tiny <= abs(ones[0, i]) <= 1 / tiny:
            return False
        for j in range(i + 1, n):
            element = t[i, j] / t[i, i] if i // width == j // width else t[i, j]
            if element != t[i, j] and not tiny <= abs(element) <= 1 / tiny and t[i, j] != 0:
                return False
            strips[j // width, i, j % width] = element
    found = np.zeros((rows, width), x.dtype)
    for first in range(0, m, TURN * rows):
        for strip in range(count):
            left, some = strip * width, strips[strip]
            for i in range(first, min(first + TURN * rows, m), rows):
                here = min(rows, m - i)
                if left + width <= n:
                    compiled.few_rows_product(x, i, left, minus, x, i, here, 0, left, some)
                    compiled.few_rows_quotients(x, i, left, here, some, left, ones)
                    continue
                for row in range(here):
                    for j in range(n - left):
                        found[row, j] = x[i + row, left + j]
                compiled.few_rows_product(found, 0, 0, minus, x, i, here, 0, left, some)
                compiled.few_rows_quotients(found, 0, 0, here, some, left, ones)
                for row in range(here):
                    for j in range(n - left):
                        x[i + row, left + j] = found[row, j]
    return True


ABREAST = 8
"""Rows that `_rows_by_column` reads side by side."""


@compiled.loop(sums=True)
def _rows_by_column(x: Any, w: Any, y: Any) -> None:
    """y = x w, for a column w and at least eight rows; the last eight rows may overlap those before them."""
    zero = x.dtype.type(0)
    for turn in range((x.shape[0] + 7) // 8):
        i = min(8 * turn, x.shape[0] - 8)
        a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
        for j in range(x.shape[1]):
            v = w[j]
            a += x[i, j] * v
            b += x[i + 1, j] * v
            c += x[i + 2, j] * v
            d += x[i + 3, j] * v
            e += x[i + 4, j] * v
            f += x[i + 5, j] * v
            g += x[i + 6, j] * v
            h += x[i + 7, j] * v
        y[i], y[i + 1], y[i + 2], y[i + 3], y[i + 4], y[i + 5], y[i + 6], y[i + 7] = a, b, c, d, e, f, g, h


def _in_strips(x: Any, w: Any) -> bool:
    """Return True if x has long rows and w is a column."""
    if not isinstance(x, np.ndarray) or x.ndim != 2 or w.shape[-1] != 1 or x.nbytes <= 4 * tunables.GEMV_STRIP:
        return False
    if x.shape[1] * x.itemsize < tunables.GEMV_ROW or not x.flags.c_contiguous or x.dtype.char not in LETTERS:
        return False
    return blas_threads() == 1  # several share one long product better than many short ones
