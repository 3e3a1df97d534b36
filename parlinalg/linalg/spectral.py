"""Eigenvalues, singular values and what follows from them: ranks, condition numbers, pseudoinverses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.array.namespace import where
from parlinalg.array.shapes import reshape
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg.bidiagonal import Bidiagonal, bidiagonal_svd
from parlinalg.linalg.eigh import Tridiagonal, tridiagonal_values, vectors
from parlinalg.linalg.factors import LinAlgError, _batches, _finite, _matrix, _refuse, inv, qr_factor
from parlinalg.linalg.tiles import Tiles
from parlinalg.matmul import matmul

TALL = 1.5
"""Rows of a matrix by its columns from which on singular values are those of R of its QR factorization."""


class EighResult(NamedTuple):
    """Eigenvalues, rising, and eigenvectors as columns."""

    eigenvalues: DistArray
    eigenvectors: DistArray


class SVDResult(NamedTuple):
    """U, the singular values, falling, and Vᴴ."""

    U: DistArray
    S: DistArray
    Vh: DistArray


@primitive
def eigh(x: DistArray, /) -> EighResult:
    """Return the eigenvalues [..., n], rising, and eigenvectors [..., n, n] of Hermitian matrices.

    Only lower triangles are read.  The vectors lie like `x`, the values like its columns.  Beside its tiles each rank
    holds the n × n eigenvectors of the tridiagonal matrix for a while.
    """
    x = _matrix(x, "eigh", square=True)
    if x.ndim > 2:
        return EighResult(*_batches("eigh", lambda xp, a: tuple(xp.linalg.eigh(a)), eigh, x))
    reduced, scale = _tridiagonal(x, "eigh")
    tiles, n = reduced.tiles, x.shape[0]
    values, z = vectors(reduced)
    turned: np.ndarray = z.astype(x.dtype, copy=False)
    if x.grid.inside:
        reduced.times(turned)
    layout = x.layout.with_partial(())
    found = tiles.home(turned, tiles.rows(n), tiles.columns(n), x.shape, layout)  # type: ignore[arg-type]
    return EighResult(_vector(values / scale, Layout(layout.dims[-1]), x.grid), found)


@primitive
def eigvalsh(x: DistArray, /) -> DistArray:
    """Return the eigenvalues [..., n], rising, of Hermitian matrices, of which lower triangles are read."""
    x = _matrix(x, "eigvalsh", square=True)
    if x.ndim > 2:
        return _batches("eigvalsh", lambda xp, a: xp.linalg.eigvalsh(a), eigvalsh, x)[0]
    reduced, scale = _tridiagonal(x, "eigvalsh")
    return _vector(tridiagonal_values(reduced.d, reduced.e) / scale, Layout(x.layout.dims[-1]), x.grid)


@primitive
def svd(x: DistArray, /, *, full_matrices: bool = True) -> SVDResult:
    """Return U [..., m, k], the singular values [..., k], falling, and Vᴴ [..., l, n] of matrices [..., m, n].

    Parameters
    ----------
    full_matrices : bool
        k = m and l = n for U and Vᴴ, else both are min(m, n).

    U and Vᴴ lie like `x`, the values like its columns.  Beside its tiles each rank holds the singular vectors of the
    bidiagonal matrix, two of min(m, n)², for a while.
    """
    x = _matrix(x, "svd")
    if x.ndim > 2:
        return SVDResult(
            *_batches(
                "svd", lambda xp, a: tuple(xp.linalg.svd(a, full_matrices)),
                lambda a: svd(a, full_matrices=full_matrices), x,
            )
        )  # fmt: skip
    (m, n), layout = x.shape, x.layout.with_partial(())
    if m < n:
        turned = svd(x.mT.conj(), full_matrices=full_matrices)
        left, right = (f.mT.conj().redistribute(layout) for f in (turned.Vh, turned.U))
        return SVDResult(left, turned.S, right)
    reduced, scale, q = _bidiagonal(x, "svd", vectors=True)
    tiles = reduced.tiles
    ub, s, vt = bidiagonal_svd(reduced.d, reduced.e, vectors=True)
    top = reduced.shape[0]
    k = m if full_matrices and q is None else n
    parts = tiles.rows(top), tiles.rows(n), tiles.columns(k), tiles.columns(n)
    z: np.ndarray = np.empty((0, 0), x.dtype)
    w: np.ndarray = z
    if x.grid.inside:
        rows, lines, columns, behind = parts[0][tiles.i], parts[1][tiles.i], parts[2][tiles.j], parts[3][tiles.j]
        z = (rows[:, None] == columns[None, :]).astype(x.dtype)
        inner, before = rows[rows < n], columns[columns < n]
        z[: len(inner), : len(before)] = ub[np.ix_(inner, before)]
        w = vt.T[np.ix_(lines, behind)].astype(x.dtype, order="C")
        reduced.left(z)
        reduced.right(w)
    u = tiles.home(z, parts[0], parts[2], (top, k), layout)
    v = tiles.home(w, parts[1], parts[3], (n, n), layout)
    if q is not None:
        u = _completed(q, u, m if full_matrices else n, layout)
    return SVDResult(u, _vector(s / scale, Layout(layout.dims[-1]), x.grid), v.mT.conj().redistribute(layout))


@primitive
def svdvals(x: DistArray, /) -> DistArray:
    """Return the singular values [..., min(m, n)], falling, of matrices [..., m, n]."""
    x = _matrix(x, "svdvals")
    if x.ndim > 2:
        return _batches("svdvals", lambda xp, a: xp.linalg.svd(a, compute_uv=False), svdvals, x)[0]
    if x.shape[0] < x.shape[1]:
        x = x.mT
    reduced, scale, _ = _bidiagonal(x, "svdvals", vectors=False)
    s = bidiagonal_svd(reduced.d, reduced.e, vectors=False)[1]
    return _vector(s / scale, Layout(x.layout.dims[-1]), x.grid)


def _limit(x: DistArray, s: DistArray, rtol: Any, least: float) -> DistArray:
    """Return for every matrix the singular value from which on it counts."""
    if rtol is None:
        rtol = least * float(np.finfo(s.dtype).eps)
    largest = s.max(axis=-1, keepdims=True) if s.shape[-1] else zeros((*s.shape[:-1], 1), dtype=s.dtype, grid=s.grid)
    if isinstance(rtol, DistArray) and rtol.ndim:
        rtol = reshape(rtol, (*rtol.shape, 1))
    return largest * rtol


def _inverse(s: DistArray, kept: DistArray) -> DistArray:
    """Return the inverses of the values that are kept, and zeros."""
    return where(kept, 1 / where(kept, s, s.dtype.type(1)), s.dtype.type(0))


@primitive
def matrix_rank(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the ranks of matrices [..., m, n]: their singular values above `rtol` times the largest.

    `rtol` is max(m, n) times the dtype's eps by default; a number, or one for every matrix.
    """
    s = svdvals(x)
    return (s > _limit(x, s, rtol, max(x.shape[-2:]))).sum(axis=-1, dtype=np.int64)


@primitive
def pinv(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the pseudoinverses [..., n, m] of matrices [..., m, n]; smaller singular values count as 0.

    Those are the ones below `rtol` times the largest, by default max(m, n) times the dtype's eps.
    """
    u, s, vh = svd(x, full_matrices=False)
    kept = s > _limit(x, s, rtol, max(x.shape[-2:]))
    inverse = _inverse(s, kept)
    return matmul(vh.mT.conj() * inverse[..., None, :], u.mT.conj())


@primitive
def cond(x: DistArray, p: Any = None) -> DistArray:
    """Return the condition numbers of matrices, in a norm of `matrix_norm`; None is 2."""
    if p in (None, 2, -2):
        s = svdvals(x)
        if not s.shape[-1]:
            raise LinAlgError("cond is not defined on empty matrices")
        high, low = s.max(axis=-1), s.min(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: DistArray = high / low if p != -2 else low / high
        return found
    from parlinalg.linalg import matrix_norm

    return matrix_norm(x, ord=p) * matrix_norm(inv(x), ord=p)


class LstsqResult(NamedTuple):
    """The solution, the sums of squared residuals, the rank, and the singular values."""

    x: DistArray
    residuals: DistArray
    rank: int
    s: DistArray


@primitive
def lstsq(a: DistArray, b: DistArray, rcond: float | None = None) -> LstsqResult:
    """Return the x [n] or [n, k] of least norm for which A x - b is least, for A [m, n] and b [m] or [m, k].

    By singular values, as LAPACK's `gelsd`; those below `rcond` times the largest count as 0, by default max(m, n)
    times the dtype's eps.  The residuals are empty where A has a rank below n or no more rows than columns, as NumPy's.
    """
    a, b = _matrix(a, "lstsq"), _matrix(b, "lstsq", vectors=True)
    if a.ndim != 2 or b.ndim > 2 or b.shape[0] != a.shape[0]:
        raise LinAlgError(
            f"lstsq takes a matrix [m, n] and right-hand sides [m] or [m, k], not {a.shape} and {b.shape}"
        )
    dtype = np.result_type(a.dtype, b.dtype)
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    u, s, vh = svd(a, full_matrices=False)
    kept = s > _limit(a, s, rcond, max(a.shape))
    rank = int(kept.sum())
    sides = b if b.ndim == 2 else b[:, None]
    inverse = _inverse(s, kept)
    x = matmul(vh.mT.conj(), inverse[:, None] * matmul(u.mT.conj(), sides))
    m, n = a.shape
    residuals = zeros((0,), dtype=s.dtype, grid=a.grid)
    if rank == n and m > n:
        residuals = (abs(sides - matmul(a, x)) ** 2).sum(axis=0)
    return LstsqResult(x if b.ndim == 2 else reshape(x, (n,)), residuals, rank, s)


# ------------------------------------------------------------------------------------------------ helpers
def _vector(values: np.ndarray, layout: Layout, grid: Grid) -> DistArray:
    """Return a vector that every rank has as a distributed one."""
    (part,) = grid.block(layout, values.shape)
    block = np.ascontiguousarray(values[part.start : part.stop])
    return DistArray(grid.backend.from_host(block), values.shape, layout, grid)


def _scaled(tiles: Tiles, t: np.ndarray, name: str) -> float:
    """Multiply tiles by a power of two that keeps squares of their elements in range, and return it; refuse NaNs."""
    finite = _finite(t)
    largest = float(np.abs(t).max()) if finite and t.size else 0.0
    odd, largest = tiles.worst([not finite, largest])
    _refuse(odd, name)
    limits = np.finfo(t.dtype)
    if not largest or math.sqrt(float(limits.tiny)) * 1e3 < largest < math.sqrt(float(limits.max)) * 1e-3:
        return 1.0
    scale = 2.0 ** -math.frexp(largest)[1]
    t *= scale if math.isfinite(scale) else 1
    return scale


def _tridiagonal(x: DistArray, name: str) -> tuple[Tridiagonal, Any]:
    """Return the reduction of a matrix and by what it was multiplied."""
    tiles, n = Tiles(x.grid), x.shape[0]
    rows, columns = tiles.rows(n), tiles.columns(n)
    lower, upper = (tiles.bring(each, rows, columns) for each in (x, x.mT.conj()))
    if x.grid.inside:  # the upper triangle is made from the lower one
        above = rows[tiles.i][:, None] < columns[tiles.j][None, :]
        np.copyto(lower, upper, where=above)
    scale = _scaled(tiles, lower, name)
    return Tridiagonal(tiles, lower, n), lower.real.dtype.type(scale)


def _bidiagonal(x: DistArray, name: str, vectors: bool) -> tuple[Bidiagonal, Any, Any]:
    """Return the reduction of a matrix [m, n] with m ≥ n, its factor, and the QR factorization before it, if any."""
    m, n = x.shape
    q = None
    if m > TALL * n and n:
        q = qr_factor(x)
        x = q.R
    tiles = Tiles(x.grid)
    t = tiles.bring(x, tiles.rows(x.shape[0]), tiles.columns(n))
    scale = _scaled(tiles, t, name)
    return Bidiagonal(tiles, t, x.shape), t.real.dtype.type(scale), q  # type: ignore[arg-type]


def _completed(q: Any, u: DistArray, columns: int, layout: Layout) -> DistArray:
    """Return Q U, with the columns of Q that U does not turn behind it."""
    n = u.shape[0]
    whole = q.Q(columns)
    turned = matmul(whole[:, :n], u).redistribute(layout)
    if columns == n:
        return turned
    from parlinalg.array.joining import concatenate

    return concatenate([turned, whole[:, n:]], axis=1).redistribute(layout)
