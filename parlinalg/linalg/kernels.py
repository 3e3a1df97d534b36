"""The computations of a rank on its tiles, on the host or on a GPU.

On the host BLAS works in place, on rows with a leading dimension, and LAPACK is NumPy's or SciPy's.  On a GPU it is
cuSOLVER and cuBLAS (`parlinalg.backend.cusolver`): each function here asks `_device` where its matrix is, and nothing
else does.  On the host stays what is small and sequential, as pivots and the signs of reflections of a panel.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import Backend, backend_of, blas, compiled, namespace, shape_solver, skinny
from parlinalg.backend.blas import added, added_square, multiplied, substituted
from parlinalg.backend.shapes import has_values, values_needed

Block = Any


def _device(a: Block) -> Any:
    """Return the module that computes on a matrix on a GPU, or without values; None for one on the host."""
    if isinstance(a, np.ndarray):
        return None
    if not has_values(a):
        return shape_solver
    from parlinalg.backend import cusolver

    return cusolver


def to_host(a: Block) -> np.ndarray:
    """Return the values of an array on the host: the array itself if it is there."""
    if not has_values(a):
        raise values_needed("this factorization")
    return backend_of(a).to_host(a)


def on_host(like: Backend) -> Any:
    """Return the namespace of arrays on the host beside those of a backend: NumPy, or that of imagined ones."""
    return np if like.values else like.xp


def finite(*blocks: Block) -> bool:
    """Return True if all elements of arrays of one dtype are finite."""
    xp, backend, (first, *others) = namespace(blocks[0]), backend_of(blocks[0]), blocks
    if not backend.values:
        return bool(backend.assume("finite", "whether the elements are finite"))
    with np.errstate(all="ignore"):
        total = first.sum()
        for block in others:
            total = total + block.sum()
        return cmath.isfinite(total) or all(bool(xp.isfinite(block).all()) for block in blocks)


def zeros(a: Block) -> np.ndarray:
    """Return the places of the zeros in a vector, on the host: of pivots, or of elements of a diagonal."""
    if not has_values(a):
        backend_of(a).assume("finite", "whether a pivot is 0")
        return np.zeros(0, np.intp)
    return np.flatnonzero(to_host(a) == 0)


def beside(a: np.ndarray, like: Block) -> Block:
    """Return an array of the host on the device of another one: itself if that is the host."""
    return backend_of(like).from_host(a)


def routines(a: Block) -> Any:
    """Return the module whose `svd`, `qr`, `eigh`, `eigvalsh`, `solve` and `lstsq` take a block: NumPy's or a GPU's."""
    return namespace(a).linalg if isinstance(a, np.ndarray) or not has_values(a) else _device(a)


def raising(like: Block) -> Any:
    """Return a context in which failures of the factorizations of blocks like this one raise LinAlgError."""
    device = _device(like)
    return nullcontext() if device is None else device.raising()


def lapack(name: str, dtype: np.dtype[Any]) -> Any:
    """Return a function of LAPACK for a dtype."""
    return blas.scipy_linalg().get_lapack_funcs((name,), dtype=dtype)[0]


PANEL = 64
"""Columns that are factored one by one before those behind them follow."""
WIDE = 256
"""Columns of which as many lines of the cache are no trouble."""
LARGE, COPYING = 4 << 20, 4
"""Bytes of a matrix from which on several threads work on it, and how many copy it at the most."""
COUNTED = 1 << 31
"""Elements of a workspace that 32 bits do not count; it has at most eight times the square of the longer side."""
SPACE, SPACED = 128, 2048
"""Bytes that are left free between columns, and those of which a column has a multiple then.  On an EPYC `getrf` took
12 ms for 32768 x 96 so, and 17 without."""
STRIP = 256
"""Rows that a loop copies before the next ones."""
TALL, SLICE = 8, 48
"""Rows of a large matrix, by its columns, from which on it is factored in panels, and columns of a panel."""
NARROW, PIECE = 32, 512
"""Right-hand sides up to which a triangle is solved in pieces, and rows of a piece.  OpenBLAS solves with few columns
on one thread; products it shares out."""
SMALL_TRIANGLE, TOGETHER = 8192, 1024
"""The most multiplications by a triangle, n² k, up to which many are solved at once, row by row, and how many at once,
so that caches hold them.  A call of BLAS a triangle takes about 15 µs more than it computes."""


def bound(name: str, dtype: np.dtype[Any], *args: str | int | np.ndarray) -> Callable[[], int]:
    """Return the call of a function of LAPACK that SciPy has for Cython alone, which returns its last argument, `info`.

    All arguments but `info` are given: strings and ints, and arrays, which are changed in place and read anew by every
    call; those of integers have the dtype `blas.scipy_integer()`.  Matrices are in Fortran's order.
    """
    integer = blas.scipy_integer()
    held = [
        np.frombuffer(a.encode(), np.uint8) if isinstance(a, str) else np.array(a, integer) if isinstance(a, int) else a
        for a in (*args, np.zeros(1, integer))
    ]
    function = blas.of_scipy("cython_lapack", blas.LETTERS[dtype.char] + name, len(held))
    pointers = [a.ctypes.data for a in held]

    def run() -> int:
        function(*pointers)
        return int(held[-1][0])

    return run


def call(name: str, dtype: np.dtype[Any], *args: str | int | np.ndarray) -> int:
    """Call a function of LAPACK as `bound` does, and return `info`."""
    return bound(name, dtype, *args)()


def subtract(y: Block, x: Block, w: Block) -> None:
    """Subtract `x @ w` from y, in place."""
    if y.size and x.size and not (skinny.added(y, x, w, -1) or added(y, x, w, -1)):
        y -= x @ w


def subtract_square(y: Block, x: Block) -> None:
    """Subtract `x @ xᴴ` from the lower triangle of y, in place; above it y is arbitrary after it."""
    if not isinstance(y, np.ndarray) or not added_square(y, x, -1):
        subtract(y, x, adjoint(x))


def substitute(
    t: Block, b: Block, *, right: bool = False, lower: bool = False, adjoint: bool = False,
    unit: bool = False,
) -> None:  # fmt: skip
    """Replace b by the solution x of `op(t) x = b`, with `right` of `x op(t) = b`; see `blas.substituted`."""
    if (device := _device(b)) and b.size:
        device.substitute(t, b, right=right, lower=lower, adjoint=adjoint, unit=unit)
        return
    if not b.size or (not (right or adjoint) and skinny.substituted(t, b, lower=lower, unit=unit)):
        return
    if right and not (lower or adjoint or unit) and skinny.substituted_right(t, b):
        return
    if not unit:
        t = _lifted(t, b, right, adjoint)
    if adjoint and t.dtype.kind != "c":
        t, lower, adjoint = t.T, not lower, False
    if right or adjoint:
        _substitute(t, b, right=right, lower=lower, adjoint=adjoint, unit=unit)
    else:
        _forward_or_back(t, b, lower=lower, unit=unit)


def _forward_or_back(t: np.ndarray, b: np.ndarray, *, lower: bool, unit: bool) -> None:
    """Replace b by the solution x of `t x = b`."""
    if b.shape[1] <= NARROW:
        _in_pieces(t, b, lower, unit)
    else:
        _substitute(t, b, right=False, lower=lower, adjoint=False, unit=unit)


def _in_pieces(t: np.ndarray, b: np.ndarray, lower: bool, unit: bool) -> None:
    """Replace b by the solution x of `t x = b`, some rows at a time."""
    pieces = [(k, min(k + PIECE, len(b))) for k in range(0, len(b), PIECE)]
    for k, end in pieces if lower else reversed(pieces):
        _substitute(t[k:end, k:end], b[k:end], right=False, lower=lower, adjoint=False, unit=unit)
        left = slice(end, None) if lower else slice(k)
        subtract(b[left], t[left, k:end], b[k:end])


def _substitute(t: np.ndarray, b: np.ndarray, *, right: bool, lower: bool, adjoint: bool, unit: bool) -> None:
    if substituted(t, b, right=right, lower=lower, adjoint=adjoint, unit=unit):
        return
    trsm = blas.scipy_linalg().get_blas_funcs("trsm", (t, b))  # no error of one rank alone if t is singular
    b[...] = trsm(1, t, b, side=right, lower=lower, trans_a=2 * adjoint, diag=unit)


def _lifted(t: Block, b: Block, right: bool, adjoint: bool) -> Block:
    """Return a triangle whose diagonal has finite reciprocals, by which BLAS multiplies, with b changed accordingly.

    The equations of elements near underflow are multiplied by a power of two, so that quotients are finite if they can.
    """
    small = _without_reciprocals(np.diagonal(t))
    if not small.any():
        return t
    scale = np.where(small, _lift(t.dtype), 1)
    with np.errstate(over="ignore"):
        b *= scale if right else scale[:, None]
        return t * (scale[:, None] if right == adjoint else scale)


def _without_reciprocals(diagonal: np.ndarray) -> np.ndarray:
    """Return which elements are no zeros, but so near to 0 that their reciprocals overflow."""
    sizes = np.abs(diagonal)
    return (sizes < np.finfo(sizes.dtype).tiny) & (sizes > 0)


def _lift(dtype: np.dtype[Any]) -> Any:
    """Return a power of two that makes numbers below the normal ones normal."""
    return np.finfo(dtype).dtype.type(2.0 ** (np.finfo(dtype).nmant + 2))


def units(largest: Any, *, squares: bool = False) -> Any:
    """Return the powers of two that bring sizes near 1 from near underflow or overflow; 1 of others.

    With `squares` they do so where squares of the sizes, or sums of them, come near underflow or overflow.
    """
    limits, known = np.finfo(largest.dtype), (largest > 0) & np.isfinite(largest)
    powers = shifts(np.where(known, np.frexp(largest)[1], 0), largest.dtype, squares=squares)
    return np.ldexp(np.ones_like(largest), np.clip(powers, 2 - limits.maxexp, limits.maxexp - 2))  # themselves in range


def shifts(exponents: np.ndarray, dtype: np.dtype[Any], *, squares: bool = False) -> np.ndarray:
    """Return the exponents of `units` for sizes with these binary exponents, which may be out of range."""
    limits = np.finfo(dtype)
    edge = -limits.minexp // 4 if squares else -limits.minexp - limits.nmant
    found: np.ndarray = np.where(np.abs(exponents) > edge, -exponents, 0)
    return found


def unit(largest: float, dtype: np.dtype[Any], *, squares: bool = False) -> Any:
    """Return the power of two of `units` for one size, as a real number of the precision of a dtype."""
    return units(np.asarray(largest, np.finfo(dtype).dtype), squares=squares)[()]


def in_range(a: Block) -> tuple[Block, np.ndarray]:
    """Return the matrices [count, m, n] times their `units`, and these, [count], on the host."""
    if not a.size or not has_values(a):
        return a, np.ones(len(a), np.finfo(a.dtype).dtype)
    sizes = abs(a) if a.dtype.kind != "c" else namespace(a).maximum(abs(a.real), abs(a.imag))  # |a| may be out of range
    found = units(to_host(sizes.max((-2, -1))))
    return (a * beside(found, a)[:, None, None] if (found != 1).any() else a), found


def halves(unit: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two powers of two whose product, which may be out of range, is unit / other."""
    power, one = np.frexp(unit)[1] - np.frexp(other)[1], np.ones_like(unit)
    return np.ldexp(one, power // 2), np.ldexp(one, power - power // 2)


def quotients(y: Any, values: Any) -> Any:
    """Return y / values, and 0 where the value is 0, of blocks or distributed arrays; values may have no reciprocals.

    Complex quotients have reciprocals in them too: where they would overflow, both are multiplied by a power of two.
    """
    limits, one = np.finfo(values.dtype), values.dtype.type(1)
    with np.errstate(all="ignore"):
        lift = np.where(values < limits.tiny, _lift(values.dtype), one)
        return y * (lift * (values > 0)) / np.where(values > 0, values * lift, one)


def triangles(t: Block, b: Block, *, lower: bool = False, adjoint: bool = False, unit: bool = False) -> Block:
    """Return the solutions x of `op(t) x = b` of stacks of triangles by substitution; other triangles are not read.

    Raises
    ------
    LinAlgError
        If an element of a diagonal is 0, unless `unit` says that they are ones.
    """
    if not has_values(t):
        return namespace(t).linalg.solve(t, b)
    n, shape = t.shape[-1], b.shape
    count = math.prod(shape[:-2])
    diagonals = t.diagonal(0, -2, -1)
    if not unit and bool((zero := (diagonals == 0).reshape(count, n).any(axis=0)).any()):
        i = int(zero.argmax())
        raise np.linalg.LinAlgError(f"the matrix is singular: element [{i}, {i}] of its diagonal is 0")
    if not isinstance(t, np.ndarray):
        return _device(t).triangles(t, b, lower=lower, adjoint=adjoint, unit=unit)
    x, t = np.array(b, order="C").reshape(count, *shape[-2:]), t.reshape(count, n, n)
    if not x.size:
        return x.reshape(shape)
    if adjoint:
        t, lower = t.swapaxes(-1, -2).conj(), not lower
    if not unit and (small := _without_reciprocals(np.diagonal(t, 0, -2, -1))).any():  # see `_lifted`
        scale = np.where(small, _lift(t.dtype), 1)[..., None]
        with np.errstate(over="ignore"):
            t, x = t * scale, x * scale
    if n * n * x.shape[-1] <= SMALL_TRIANGLE and 4 * len(x) > n:
        for first in range(0, len(x), TOGETHER):
            some = slice(first, first + TOGETHER)
            _substitute_together(t[some], x[some], lower=lower, unit=unit)
    else:
        for each, sides in zip(t, x, strict=True):
            _forward_or_back(each, sides, lower=lower, unit=unit)
    return x.reshape(shape)


def _substitute_together(t: np.ndarray, b: np.ndarray, *, lower: bool, unit: bool) -> None:
    """Replace b by the solutions x of `t x = b` of many small triangles, one row of all of them after the other."""
    n = t.shape[-1]
    rows, x = (np.ascontiguousarray(np.moveaxis(each, 0, -1)) for each in (t, b))  # the matrices are innermost
    for i in range(n) if lower else reversed(range(n)):
        if not unit:
            x[i] /= rows[i, i]
        left = slice(i + 1, None) if lower else slice(i)
        x[left] -= rows[left, i, None] * x[i]
    b[...] = np.moveaxis(x, -1, 0)


def multiply(t: Block, b: Block, *, adjoint: bool = False) -> Block:
    """Return `op(t) @ b` for an upper triangle t with zeros below it, as `substitute` does; b may be overwritten."""
    if isinstance(b, np.ndarray) and multiplied(t, b, adjoint=adjoint):
        return b
    return (t.conj().T if adjoint else t) @ b


def cholesky(a: Block) -> int:
    """Replace the lower triangle of a, in rows one behind the other, by its Cholesky factor.

    The upper triangle is arbitrary after it.  Returns 0, or the order of the first minor that is not positive.
    """
    n = len(a)
    if (device := _device(a)) and n:
        return int(device.cholesky(a))
    info = blas.lapack(
        "potrf", a.dtype, "U", n, a, n
    )  # what lies in rows below the diagonal is LAPACK's upper triangle
    if info is None:
        found, info = lapack("potrf", a.dtype)(a, lower=1, clean=0)
        a[...] = found
    if info:
        a[...] = np.nan
    return int(info)


def lower(a: Block) -> tuple[Block, int]:
    """Return the lower Cholesky factor of a matrix on a GPU, with zeros above it, and what `cholesky` returns."""
    found, minor = _device(a).lower(a)
    return found, int(minor)


def lu(a: Block, *, given: Block | None = None) -> tuple[Block, np.ndarray]:
    """Return L and U in one matrix, by partial pivoting, and the order of the rows, which is on the host.

    A singular matrix on a GPU is factored on the host.  Where `given` has the same values, one in Fortran's order may
    be replaced; if they lie in the same memory, no pivot may be below the normal numbers.  OpenBLAS neither swaps nor
    divides where a pivot's real and imaginary parts have no reciprocals: such matrices are factored here.
    """
    if _device(a) and a.size:
        if (regular := regular_lu(a)) is not None:
            return regular
        factors, order = lu(to_host(a))
        return beside(factors, a), order
    m, n = a.shape
    if not a.size:
        return a.copy(), np.arange(m)
    in_place = a.flags.f_contiguous or (a.strides[0] == a.itemsize and a.strides[1] >= m * a.itemsize)
    given, found = (given, a) if given is not None and in_place else (a, in_columns(a, spaced=True))
    pivots = np.empty(min(m, n), np.int64)
    if not _factored(found, pivots):
        found, pivots, _ = lapack("getrf", a.dtype)(a)
    diagonal = found.diagonal()
    sizes, parts = abs(diagonal.real) + abs(diagonal.imag), 2 if a.dtype.kind == "c" else 1
    small = np.flatnonzero(sizes < parts * np.finfo(a.dtype).tiny)  # the largest of its column, or what took its place
    if any(found[j:, j].any() for j in small[small < m - 1]):
        return _lu_by_quotients(given)
    return found, _order(pivots, m)


def _factored(a: np.ndarray, pivots: np.ndarray) -> bool:
    """Replace a matrix in Fortran's order by L and U, and fill in the pivots, counted from 0; False without `getrf`.

    Between its columns there may be others.  OpenBLAS factors tall matrices on one thread; of panels of them all
    threads multiply.
    """
    (m, n), line = a.shape, max(len(a), a.strides[1] // a.itemsize)
    tall = a.nbytes >= LARGE and m >= TALL * n and (blas.blas_threads() or 1) > 1
    width = SLICE if tall and n >= 2 * SLICE else n
    for k in range(0, n, width):
        end = min(k + width, n)
        own, head, panel, right = pivots[k:end], a[k:end, k:end], a[k:, k:end], a[k:, end:]
        if blas.lapack("getrf", a.dtype, m - k, end - k, panel, line, own) is None:
            return False
        for other in (a[k:, :k], right):
            if other.size:
                blas.lapack("laswp", a.dtype, other.shape[1], other, line, 1, end - k, own, 1)
        substitute(head.T, right[: end - k].T, right=True, unit=True)  # in rows they are transposes
        subtract(right[end - k :].T, right[: end - k].T, panel[end - k :].T)
        own += k - 1
    return True


def _lu_by_quotients(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `lu` does, by quotients where LAPACK multiplies by the reciprocals of pivots."""
    found, order, k = np.array(a, order="C"), np.arange(len(a)), min(a.shape)
    for first in range(0, k, PANEL):
        last = min(first + PANEL, k)
        for j in range(first, last):
            both = [j, j + int(np.argmax(np.abs(found[j:, j])))]
            found[both], order[both] = found[both[::-1]], order[both[::-1]]
            if found[j, j] != 0:  # in range: complex quotients have reciprocals in them too
                lift = _lift(a.dtype) if _without_reciprocals(found[j, j : j + 1])[0] else 1
                found[j + 1 :, j] = found[j + 1 :, j] * lift / (found[j, j] * lift)
            found[j + 1 :, j + 1 : last] -= np.outer(found[j + 1 :, j], found[j, j + 1 : last])
        substitute(found[first:last, first:last], found[first:last, last:], lower=True, unit=True)
        subtract(found[last:, last:], found[last:, first:last], found[first:last, last:])
    return found, order


def stacked(every: Callable[..., Any], one: Callable[..., Any], a: Block, *more: Block) -> Any:
    """Return `every(a, *more)`, by a routine of NumPy's for stacks, and of some matrices `one` of each of them.

    These are the ones on the host whose pivots may be below the normal numbers: for them `one` calls `lu`.
    """
    if not isinstance(a, np.ndarray) or (few := _near_underflow(a)) is None:
        return every(a, *more)
    found = every(np.where(few[..., None, None], np.eye(a.shape[-1], dtype=a.dtype), a), *more)
    for at in map(tuple, np.argwhere(few)):
        parts = one(a[at], *(each[at] for each in more))
        for out, part in zip(found, parts, strict=True) if isinstance(found, tuple) else [(found, parts)]:
            out[at] = part
    return found


def _near_underflow(a: np.ndarray) -> np.ndarray | None:
    """Return a mask of the matrices of a stack that have numbers near underflow; None if none has.

    The numbers are elements, and products of two elements divided by a third one, as LU forms them.
    """
    sizes = np.abs(a)
    limit = np.finfo(sizes.dtype).tiny / np.finfo(sizes.dtype).eps
    with np.errstate(all="ignore"):
        largest = sizes.max(initial=0)
        sizes[sizes == 0] = np.inf
        least = sizes.min(initial=np.inf)
        if not least / largest * least < limit:  # nor are those of any one matrix
            return None
        least, largest = sizes.min((-2, -1)), np.where(sizes < np.inf, sizes, 0).max((-2, -1))
        few: np.ndarray = least / largest * least < limit
    return few if few.any() else None


def for_scipy(a: Block) -> bool:
    """Return True for a large matrix on the host whose workspace SciPy's LAPACK, of 32-bit integers, can count."""
    return isinstance(a, np.ndarray) and a.ndim == 2 and a.nbytes >= LARGE and 8 * max(a.shape) ** 2 < COUNTED


def eigh(a: Block, vectors: bool = True) -> Any:
    """Return eigenvalues, rising, and vectors of Hermitian matrices by their lower triangles, or values alone.

    The matrices are given up.  A large one on the host becomes its vectors: NumPy would hold three more such matrices,
    or for values one.
    """
    if not (for_scipy(a) and a.flags.c_contiguous):
        return tuple(routines(a).eigh(a)) if vectors else routines(a).eigvalsh(a)
    name = "heevd" if a.dtype.kind == "c" else "syevd"
    values, v, info = lapack(name, a.dtype)(a.T, vectors, lower=0, overwrite_a=1)  # rows are columns of the transpose
    if info:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")
    return (values, in_columns(np.conjugate(v.T, out=v.T) if a.dtype.kind == "c" else v.T).T) if vectors else values


def svd(a: Block, full_matrices: bool = False) -> tuple[Block, Block, Block]:
    """Return U, the singular values, falling, and Vᴴ of matrices.

    Of a large matrix on the host LAPACK gets a copy as its transpose, so that U and Vᴴ come in rows: NumPy would hold
    two more such matrices.
    """
    if not (for_scipy(a) and max(a.shape) < TALL * min(a.shape)):
        return tuple(routines(a).svd(a, full_matrices))
    size, info = lapack("gesdd_lwork", a.dtype)(*a.T.shape, full_matrices=full_matrices)
    real = np.finfo(a.dtype).dtype.type  # in which LAPACK gives the size, rounded
    vt, values, ut, info = lapack("gesdd", a.dtype)(
        np.array(a, order="C").T, full_matrices=full_matrices, overwrite_a=1,
        lwork=int(np.nextafter(real(size.real), real(np.inf))),
    )  # fmt: skip
    if info:
        raise np.linalg.LinAlgError("SVD did not converge")
    return ut.T, values, vt.T


def bidiagonal(a: Block) -> tuple[Block, Block, Block, Block]:
    """Replace a matrix [m, n] with m ≥ n, in Fortran's order, by the reflections of A = Q B Pᴴ.

    Returns the diagonal of the upper bidiagonal B, what is right of it, and the factors of the reflections of Q and P
    (`gebrd`).
    """
    if not has_values(a):
        return shape_solver.bidiagonal(a)
    (m, n), real = a.shape, a.real.dtype
    d, e, tau, pi = np.zeros(n, real), np.zeros(max(0, n - 1), real), np.zeros(n, a.dtype), np.zeros(n, a.dtype)
    if n:
        work = np.zeros(PANEL * (m + n), a.dtype)
        call("gebrd", a.dtype, m, n, a, m, d, e, tau, pi, work, len(work))
    return d, e, tau, pi


def reflect_back(which: str, a: Block, tau: Block, z: Block) -> None:
    """Replace z, in rows, by Q z or P z ("Q" or "P"), for the reflections in `a` that `bidiagonal` found (`ormbr`)."""
    if not has_values(z):
        shape_solver.reflect_back(a, z)
        return
    if not z.size or not a.size:
        return
    (m, k), complex_ = z.shape, z.dtype.kind == "c"
    work = np.zeros(PANEL * (k + PANEL + 1), z.dtype)
    if complex_:  # rows are the columns of zᵀ, and (P z)ᵀ = conj(zᴴ Pᴴ)
        np.conj(z, out=z)
    call(
        "unmbr" if complex_ else "ormbr", z.dtype, which, "R", "C" if complex_ else "T", k, m,
        a.shape[1] if which == "Q" else a.shape[0], a, len(a), tau, z, k, work, len(work),
    )  # fmt: skip
    if complex_:
        np.conj(z, out=z)


def tridiagonal(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replace a Hermitian matrix on the host, whose lower triangle is read, by the reflections of A = Q T Qᴴ.

    The matrix is in C order.  Returns the diagonal of T, what is beside it, and the reflections' factors (`sytrd`).
    """
    n, real, complex_ = len(a), a.real.dtype, a.dtype.kind == "c"
    d, e, tau = np.zeros(n, real), np.zeros(max(0, n - 1), real), np.zeros(max(0, n - 1), a.dtype)
    work = np.zeros(PANEL * n, a.dtype)  # rows are columns of the transpose
    call("hetrd" if complex_ else "sytrd", a.dtype, "U", n, a, n, d, e, tau, work, len(work))
    return d, e, tau


def turn_back(a: np.ndarray, tau: np.ndarray, z: np.ndarray) -> None:
    """Replace z, in rows, by Q z for the reflections in `a` that `tridiagonal` found (`ormtr`); z has real values."""
    (n, k), complex_ = z.shape, z.dtype.kind == "c"
    if not z.size:
        return
    work = np.zeros(PANEL * (k + PANEL + 1), z.dtype)
    call(
        "unmtr" if complex_ else "ormtr", z.dtype, "R", "U", "C" if complex_ else "T", k, n, a, n, tau, z, k, work,
        len(work),
    )  # fmt: skip


def small_svd(a: Block, compute_uv: bool = True) -> Any:
    """Return what `svd` of `routines` does, reduced, of a matrix that is small beside others.

    Of few columns LAPACK is faster than cuSOLVER, whose every column waits for the one before.
    """
    if isinstance(a, np.ndarray) or not has_values(a) or max(a.shape) > tunables.HOST_SVD:
        return routines(a).svd(a, full_matrices=False, compute_uv=compute_uv)
    svd: Any = np.linalg.svd
    found = svd(to_host(a), full_matrices=False, compute_uv=compute_uv)
    return tuple(beside(each, a) for each in found) if compute_uv else beside(found, a)


def regular_lu(a: Block, *, given: Block | None = None) -> tuple[Block, np.ndarray] | None:
    """Return what `lu` does; None of a matrix on a GPU with a pivot of 0 before the last one."""
    if (device := _device(a)) is None:
        return lu(a, given=given)
    found = device.lu(a)
    return None if found is None else (found[0], _order(found[1], len(a)))


def _order(pivots: np.ndarray, m: int) -> np.ndarray:
    """Return the order of m rows after LAPACK's interchanges, counted from 0."""
    column, swaps = np.arange(m, dtype=np.float64), (pivots + 1).astype(np.int64)
    if blas.lapack("laswp", column.dtype, 1, column, m, 1, len(swaps), swaps, 1) is not None:  # which has no info
        return column.astype(np.intp)
    order = list(range(m))
    for x, y in enumerate(pivots.tolist()):
        order[x], order[y] = order[y], order[x]
    return np.array(order)


def in_columns(a: np.ndarray, extra: int = 0, *, spaced: bool = False) -> np.ndarray:
    """Return a copy in Fortran's order, with so many more columns behind it that are not set.

    With `spaced` columns that would lie a power of two bytes apart, and so push each other out of caches, are part of
    longer ones.

    It is made some rows at a time: whole lines of the cache are read and written, by a compiled loop where there is
    one.  Of a large matrix each thread that BLAS may start copies a part.
    """
    if a.dtype == np.complex64:  # loops know two dtypes
        return in_columns(a.view(np.float64), extra, spaced=spaced).view(a.dtype)
    m, n = a.shape
    more = SPACE // a.itemsize if spaced and m and m * a.itemsize % SPACED == 0 else 0
    out = np.empty((m + more, n + extra), a.dtype, order="F")[:m]
    fast = compiled.ready(a)
    rows = 16 if n > WIDE or fast else max(1, m)

    def copy(first: int, last: int) -> None:
        if fast:
            _copy_turned(a, out.T, first, last)
            return
        for start in range(first, last, rows):
            end = min(start + rows, last)
            out[start:end, :n] = a[start:end]

    parts = min(COPYING, blas.blas_threads() or 1) if a.nbytes >= LARGE else 1
    bounds = [m * part // parts // rows * rows for part in range(parts)] + [m]
    threads = [Thread(target=copy, args=pair) for pair in pairwise(bounds[1:])]
    for thread in threads:
        thread.start()
    copy(0, bounds[1])
    for thread in threads:
        thread.join()
    return out


@compiled.loop()
def _copy_turned(a: Any, out: Any, first: int, last: int) -> None:
    """Copy the rows of a from `first` up to `last` to columns of `out`.

    Squares of 4 x 4 go through registers.  Of STRIP rows a few columns are copied before the next ones, so that what is
    written lies one behind the other.
    """
    n = a.shape[1]
    squares = n // 4 * 4
    for start in range(first, last, STRIP):
        end = min(start + STRIP, last)
        even = start + (end - start) // 4 * 4
        for beside in range(0, squares, 8):
            for column in range(beside, min(beside + 8, squares), 4):
                for row in range(start, even, 4):
                    i, j = np.uint64(row), np.uint64(column)  # not counted from the end
                    i1, i2, i3 = i + np.uint64(1), i + np.uint64(2), i + np.uint64(3)
                    j1, j2, j3 = j + np.uint64(1), j + np.uint64(2), j + np.uint64(3)
                    w0, w1, w2, w3 = a[i, j], a[i, j1], a[i, j2], a[i, j3]
                    x0, x1, x2, x3 = a[i1, j], a[i1, j1], a[i1, j2], a[i1, j3]
                    y0, y1, y2, y3 = a[i2, j], a[i2, j1], a[i2, j2], a[i2, j3]
                    z0, z1, z2, z3 = a[i3, j], a[i3, j1], a[i3, j2], a[i3, j3]
                    out[j, i], out[j, i1], out[j, i2], out[j, i3] = w0, x0, y0, z0
                    out[j1, i], out[j1, i1], out[j1, i2], out[j1, i3] = w1, x1, y1, z1
                    out[j2, i], out[j2, i1], out[j2, i2], out[j2, i3] = w2, x2, y2, z2
                    out[j3, i], out[j3, i1], out[j3, i2], out[j3, i3] = w3, x3, y3, z3
        for row in range(even, end):
            for column in range(squares):
                out[column, row] = a[row, column]
        for column in range(squares, n):
            for row in range(start, end):
                out[column, row] = a[row, column]


def reflections(a: Block) -> tuple[Block, Block, Block] | None:
    """Return Y [m, n], T [n, n] and R [n, n] with A = (I - Y T Yᴴ) R for m ≥ n; None where there is no `geqrt`.

    NumPy's LAPACK may lack it, and cuSOLVER does.
    """
    if not has_values(a):
        return shape_solver.reflections(a)
    if _device(a):
        return None
    m, n = a.shape
    y, t, work = np.array(a, order="F"), np.zeros((n, n), a.dtype, order="F"), np.empty(n * n, a.dtype)
    if blas.lapack("geqrt", a.dtype, m, n, n, y, m, t, n, work) is None:
        return None
    r, t = np.triu(y[:n]), np.triu(t)
    y[:n] = np.tril(y[:n], -1)
    y[range(n), range(n)] = 1
    return y, t, r


def pivoted_qr(a: Block, mode: str) -> tuple[Block, ...]:
    """Return Q, R and p of A[:, p] = Q R of matrices [..., m, n], by LAPACK's `geqp3`, on the host; of "r" R and p."""
    if not has_values(a):
        return shape_solver.pivoted_qr(a, mode)
    *lead, m, n = a.shape
    count, height = math.prod(lead), m if mode == "complete" else min(m, n)
    r, p = np.zeros((count, height, n), a.dtype), np.tile(np.arange(n), (count, 1))
    q = np.tile(np.eye(m, height, dtype=a.dtype), (0 if mode == "r" else count, 1, 1))
    host, unit = in_range(to_host(a).reshape(count, m, n))
    for i in range(count if min(m, n) else 0):
        left, upper, p[i] = _pivoted_qr(host[i], 0 if mode == "r" else height)
        r[i, : len(upper)] = upper / unit[i]
        if mode != "r":
            q[i] = left
    found = (r, p) if mode == "r" else (q, r, p)
    return tuple(beside(each.reshape(*lead, *each.shape[1:]), a) for each in found)


def _pivoted_qr(a: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return so many columns of Q, R and p of A[:, p] = Q R of a matrix on the host that is not empty."""
    (m, n), k, dtype = a.shape, min(a.shape), a.dtype
    y, p, tau = np.zeros((m, max(columns, n)), dtype, order="F"), np.zeros(n, np.int64), np.zeros(k, dtype)
    y[:, :n] = a
    size = max(2 * n + (n + 1) * PANEL, columns * PANEL)
    more = [np.zeros(2 * n, a.real.dtype)] if dtype.kind == "c" else []
    work = np.zeros(size, dtype)
    if blas.lapack("geqp3", dtype, m, n, y, m, p, tau, work, size, *more) is None:
        q, r, p = blas.scipy_linalg().qr(
            a, mode="full" if columns > k else "economic", pivoting=True, check_finite=False
        )
        return q[:, :columns], r[:k], p
    r = np.triu(y[:k, :n])
    if columns:
        name = "ungqr" if dtype.kind == "c" else "orgqr"
        blas.lapack(name, dtype, m, columns, k, y, m, tau, work, size)
    return y[:, :columns], r, p - 1


def unpivoted(a: Block) -> tuple[Block, Block, Block]:
    """Return L (ones on its diagonal), U and signs s with A - diag(s) = L U; of each pivot s makes the size largest.

    It is computed on the host.
    """
    if not has_values(a):
        return shape_solver.unpivoted(a)
    if _device(a):
        lower, upper, signs = (beside(each, a) for each in unpivoted(to_host(a)))
        return lower, upper, signs
    n = len(a)
    found, signs = np.array(a, order="F"), np.empty(n, a.dtype)
    if blas.lapack("laorhr_col_getrfnp" if a.dtype.kind == "f" else "launhr_col_getrfnp", a.dtype, n, n, found, n,
                   signs) is None:  # fmt: skip
        for j in range(n):
            size = abs(found[j, j])
            signs[j] = -found[j, j] / size if size else -1
            found[j, j] -= signs[j]
            found[j + 1 :, j] /= found[j, j]
            found[j + 1 :, j + 1 :] -= np.outer(found[j + 1 :, j], found[j, j + 1 :])
    return np.tril(found, -1) + np.eye(n, dtype=a.dtype), np.triu(found), signs


def qr(a: Block) -> tuple[Block, Block]:
    """Return Q and R, reduced, with the rows sorted by size first: else rows of unlike sizes lose accuracy."""
    k, xp = min(a.shape), namespace(a)
    if not k:
        return xp.zeros((len(a), 0), a.dtype), xp.zeros((0, a.shape[1]), a.dtype)
    order = xp.argsort(-abs(a).max(axis=1), kind="stable")
    if device := _device(a):
        q = xp.empty((len(a), k), a.dtype)
        q[order], r = device.qr(a[order])
        return q, r
    found, tau, _, _ = lapack("geqrf", a.dtype)(a[order], overwrite_a=1)
    r = np.triu(found[:k])
    generate = lapack("ungqr" if a.dtype.kind == "c" else "orgqr", a.dtype)
    found = generate(np.asfortranarray(found[:, :k]), tau, overwrite_a=1)[0]
    q = np.empty((len(a), k), a.dtype)
    q[order] = found
    return q, r


def adjoint(a: Block) -> Block:
    """Return the conjugate transposes of matrices [..., m, n]; no copies of real ones."""
    return a.swapaxes(-1, -2) if a.dtype.kind != "c" else a.conj().swapaxes(-1, -2)


def conjugate(a: Block) -> Block:
    """Return the conjugates of an array; no copy of a real one."""
    return a.conj() if a.dtype.kind == "c" else a
