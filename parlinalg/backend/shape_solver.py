"""Factorizations of one block without values: what `parlinalg.backend.cusolver` is for blocks on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

Block = Any


def raising() -> AbstractContextManager[None]:
    """Return a context in which failures raise LinAlgError; nothing fails here."""
    return nullcontext()


def substitute(
    t: Block, b: Block, *, right: bool = False, lower: bool = False, adjoint: bool = False, unit: bool = False
) -> None:
    """Note that b is replaced by the solution of `op(t) x = b`, half the work of a product."""
    b.device.kernel("trsm", t.nbytes + 2 * b.nbytes, b.size * len(t), b.dtype)


def cholesky(a: Block) -> int:
    """Note that the lower triangle of a is replaced by its Cholesky factor; return 0, if minors are to be positive."""
    a.device.assume("finite", "whether a matrix is positive definite")
    a.device.kernel("potrf", 2 * a.nbytes, a.size * len(a), a.dtype)
    return 0


def lower(a: Block) -> tuple[Block, int]:
    """Return an array for the lower Cholesky factor, and what `cholesky` returns."""
    return a.device.empty(a.shape, a.dtype), cholesky(a)


def lu(a: Block) -> Any:
    """Return an array for L and U, and the interchanges of the rows: none."""
    a.device.assume("pivots", "the choice of pivots")
    a.device.kernel("getrf", 2 * a.nbytes, a.size * min(a.shape), a.dtype)
    return a.device.empty(a.shape, a.dtype), np.arange(min(a.shape))


def qr(a: Block) -> Any:
    """Return arrays for Q and R, reduced."""
    (m, n), k = a.shape, min(a.shape)
    a.device.kernel("geqrf", 2 * a.nbytes, a.size * k, a.dtype)
    a.device.kernel("orgqr", 2 * m * k * a.itemsize, m * k * k, a.dtype)
    return a.device.empty((m, k), a.dtype), a.device.empty((k, n), a.dtype)


def pivoted_qr(a: Block, mode: str) -> tuple[Block, ...]:
    """Return arrays for Q, R and the order of the columns of matrices; of mode "r" for R and the order."""
    a.device.assume("pivots", "the choice of pivots")
    *lead, m, n = a.shape
    height = m if mode == "complete" else min(m, n)
    a.device.kernel("geqp3", 2 * a.nbytes, 2 * a.size * min(m, n), a.dtype)
    q, r = a.device.empty((*lead, m, height), a.dtype), a.device.empty((*lead, height, n), a.dtype)
    p = a.device.empty((*lead, n), np.dtype(np.int64))
    if mode == "r":
        return r, p
    a.device.kernel("orgqr", 2 * q.nbytes, 2 * q.size * min(m, n), a.dtype)
    return q, r, p


def reflections(a: Block) -> tuple[Block, Block, Block] | None:
    """Return arrays for Y, T and R, as LAPACK's `geqrt` finds them; None for what a GPU is to have."""
    if not a.device.cpu:
        return None
    n = a.shape[1]
    a.device.kernel("geqrt", 2 * a.nbytes, a.size * n, a.dtype)
    return tuple(a.device.empty(shape, a.dtype) for shape in (a.shape, (n, n), (n, n)))


def unpivoted(a: Block) -> tuple[Block, Block, Block]:
    """Return arrays for L, U and signs."""
    a.device.kernel("laorhr_col_getrfnp", 2 * a.nbytes, a.size * len(a), a.dtype)
    return tuple(a.device.empty(shape, a.dtype) for shape in (a.shape, a.shape, (len(a),)))


# ------------------------------------------------------------------ eigenvalues and singular values


def schur(h: Block, vectors: bool) -> tuple[Block, Block, Block, int]:
    """Return arrays for T and Z of a Schur form, an array for the eigenvalues, and 0, if the iteration converges."""
    h.device.assume("finite", "whether the QR iteration converges")
    n = len(h)
    h.device.kernel("hseqr", (2 + vectors) * h.nbytes, (25 if vectors else 10) * n**3, h.dtype)
    t, z = (h.device.empty((m, m), h.dtype) for m in (n, n if vectors else 1))
    return t, z, h.device.empty((n,), np.result_type(h.dtype, np.complex64)), 0


def triangular_vectors(t: Block) -> Block:
    """Return an array for the eigenvectors of a Schur form."""
    t.device.kernel("trevc", 2 * t.nbytes, t.size * len(t), t.dtype)
    return t.device.empty(t.shape, t.dtype)


def square_root(t: Block) -> tuple[Block, float]:
    """Return an array for the root of a Schur form, and 0 for its least eigenvalue: there is a root."""
    t.device.kernel("trsyl", 2 * t.nbytes, t.size * len(t), t.dtype)
    return t.device.empty(t.shape, t.dtype), 0.0


def exponential(a: Block) -> Block:
    """Return an array for the exponentials of matrices."""
    a.device.kernel("expm", 2 * a.nbytes, 8 * a.size * a.shape[-1], a.dtype)
    return a.device.empty(a.shape, a.dtype)


def reflector(x: Block) -> tuple[Block, Block, Block]:
    """Return arrays for v, tau and beta of a reflection of a vector."""
    x.device.kernel("larfg", 2 * x.nbytes, x.size, x.dtype)
    empty = x.device.empty
    return empty(x.shape, x.dtype), empty((), x.dtype), empty((), x.real.dtype)


def hermitian(a: Block, x: Block) -> None:
    """Note the product of a Hermitian matrix, of which one triangle is read, with a vector."""
    a.device.kernel("hemv", a.nbytes // 2 + 2 * x.nbytes, a.size, a.dtype)


def tridiagonal_values(d: Block) -> Block:
    """Return an array for the eigenvalues of a tridiagonal matrix."""
    d.device.kernel("sterf", 2 * d.nbytes, d.size**2, d.dtype)
    return d.device.empty(d.shape, d.dtype)


def tridiagonal_vectors(d: Block) -> tuple[Block, Block]:
    """Return arrays for the eigenvalues and vectors of a tridiagonal matrix."""
    n = len(d)
    d.device.kernel("stevd", 2 * d.nbytes + n * d.nbytes, n**3, d.dtype)
    return d.device.empty(d.shape, d.dtype), d.device.empty((n, n), d.dtype)


def bidiagonal_values(d: Block) -> Block:
    """Return an array for the singular values of a bidiagonal matrix."""
    d.device.kernel("bdsdc", 2 * d.nbytes, d.size**2, d.dtype)
    return d.device.empty(d.shape, d.dtype)


def bidiagonal_vectors(d: Block, left: int, right: int, columns: int) -> tuple[Block, Block, Block]:
    """Return arrays for the singular values, and for so many rows of the left and of the right vectors."""
    n = len(d)
    d.device.kernel("lasdq", 2 * d.nbytes + 2 * n * d.nbytes, 2 * n**3, d.dtype)
    empty = d.device.empty
    return empty(d.shape, d.dtype), empty((left, n), d.dtype), empty((right, columns), d.dtype)


def secular_roots(d: Block, count: int) -> Block:
    """Return an array for so many roots of a secular equation, with the nearest pole of each and how far it is."""
    d.device.kernel("laed4", count * d.nbytes, count * d.size, d.dtype)
    return d.device.empty((count, 3), d.dtype)
