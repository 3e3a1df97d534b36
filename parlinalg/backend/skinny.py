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
def _add_columns(
    y: Any, first: int, end: int, a: Any, left: int, stop: int, strips: Any, scale: float
) -> None:  # fmt: skip
    """y[first:end] += scale A x, for A = a[first:end, left:stop] and the same rows of x, in strips."""
    count, _, width = strips.shape
    found, factor = np.empty((compiled.FEW_ROWS[0], width), y.dtype), y.dtype.type(scale)
    rows = compiled.FEW_ROWS[width * y.itemsize // 32 - 1]
    for i in range(first, end, rows):
        here = min(rows, end - i)
        for start in range(left, stop, LENGTH):
            length = min(LENGTH, stop - start)
            for strip in range(count):
                compiled.few_rows_product(found, a, i, here, start, length, strips[strip])
                for row in range(here):
                    for j in range(min(width, y.shape[1] - strip * width)):
                        y[i + row, strip * width + j] += factor * found[row, j]


@compiled.loop()
def _add_product(y: Any, a: Any, x: Any, scale: float) -> None:
    """y += scale a x."""
    strips = _room(x)
    _copy(strips, x, 0, x.shape[0])
    _add_columns(y, 0, y.shape[0], a, 0, x.shape[0], strips, scale)


@compiled.loop()
def _substitute(a: Any, x: Any, lower: bool, unit: bool) -> None:
    """Replace x by the solution with a triangle."""
    (n, wide), strips = x.shape, _room(x)
    rows = compiled.FEW_ROWS[strips.shape[2] * x.itemsize // 32 - 1]
    for turn in range((n + rows - 1) // rows):
        first = turn * rows if lower else max(0, n - (turn + 1) * rows)
        end = min(n, first + rows) if lower else n - turn * rows
        known, until = (0, first) if lower else (end, n)
        _add_columns(x, first, end, a, known, until, strips, -1.0)
        for step in range(end - first):
            i = first + step if lower else end - 1 - step
            for k in range(first if lower else i + 1, i if lower else end):
                factor = a[i, k]
                for j in range(wide):
                    x[i, j] -= factor * x[k, j]
            if not unit:
                pivot = a[i, i]
                for j in range(wide):
                    x[i, j] /= pivot
        _copy(strips, x, first, end)


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
