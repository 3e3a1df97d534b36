"""Factorizations of blocks without values (`parlinalg.backend.shapes`).

The functions are those of `parlinalg.backend.cusolver` for blocks on a GPU; the class is NumPy's `linalg`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from parlinalg.backend.shapes import ShapeArray, ShapesBackend, lack_values, values_needed

Block = Any

BLOCK = 32
"""The columns of a panel in LAPACK's reductions."""


def _note(
    a: Block, name: str, elements: int, flops: float, width: int, nbytes: int | None = None
) -> None:  # fmt: skip
    """Note what LAPACK computes of a block; see `ShapesBackend.factorization`."""
    nbytes = 2 * a.nbytes if nbytes is None else nbytes
    a.device.factorization(name, elements, a.dtype, nbytes=nbytes, flops=flops, width=width)


def _of_columns(a: Block) -> float:
    """Return the operations of the LU factorization of matrices [m, n]; QR factorization has twice as many."""
    *_, m, n = a.shape
    k, count = min(m, n), a.size / max(1, m * n)
    return float(count * (2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3))


def raising() -> AbstractContextManager[None]:
    """Return a context in which failures raise LinAlgError; nothing fails here."""
    return nullcontext()


def substitute(
    t: Block, b: Block, *, right: bool = False, lower: bool = False, adjoint: bool = False, unit: bool = False
) -> None:
    """Note that b is replaced by the solution of `op(t) x = b`, half the work of a product."""
    _note(b, "trsm", b.size * len(t), b.size * len(t), len(t) // 2, t.nbytes + 2 * b.nbytes)


def cholesky(a: Block) -> int:
    """Note that the lower triangle of a is replaced by its Cholesky factor; return 0, if minors are to be positive."""
    a.device.assume("finite", "whether a matrix is positive definite")
    _note(a, "potrf", a.size * len(a), a.size * len(a) / 3, len(a) // 2)
    return 0


def lower(a: Block) -> tuple[Block, int]:
    """Return an array for the lower Cholesky factor, and what `cholesky` returns."""
    return a.device.empty(a.shape, a.dtype), cholesky(a)


def lu(a: Block) -> Any:
    """Return an array for L and U, and the interchanges of the rows: none."""
    a.device.assume("pivots", "the choice of pivots")
    _note(a, "getrf", a.size * min(a.shape), _of_columns(a), min(a.shape) // 2)
    return a.device.empty(a.shape, a.dtype), np.arange(min(a.shape))


def qr(a: Block) -> Any:
    """Return arrays for Q and R, reduced."""
    (m, n), k = a.shape, min(a.shape)
    _note(a, "geqrf", a.size * k, 2 * _of_columns(a), k // 2)
    _note(a, "orgqr", m * k * k, 2 * m * k * k - 2 * k**3 / 3, k // 2, 2 * m * k * a.itemsize)
    return a.device.empty((m, k), a.dtype), a.device.empty((k, n), a.dtype)


def pivoted_qr(a: Block, mode: str) -> tuple[Block, ...]:
    """Return arrays for Q, R and the order of the columns of matrices; of mode "r" for R and the order."""
    a.device.assume("pivots", "the choice of pivots")
    *lead, m, n = a.shape
    height = m if mode == "complete" else min(m, n)
    half = _of_columns(a)  # the other one is products with vectors, as in `gebrd`
    _note(a, "geqp3", 2 * a.size * min(m, n), half, min(m, n, BLOCK), 2 * a.nbytes + min(m, n) * a.nbytes // 2)
    q, r = a.device.empty((*lead, m, height), a.dtype), a.device.empty((*lead, height, n), a.dtype)
    p = a.device.empty((*lead, n), np.dtype(np.int64))
    if mode == "r":
        return r, p
    _note(a, "orgqr", 2 * q.size * min(m, n), 2 * q.size * min(m, n), min(m, n) // 2, 2 * q.nbytes)
    return q, r, p


def reflections(a: Block) -> tuple[Block, Block, Block] | None:
    """Return arrays for Y, T and R, as LAPACK's `geqrt` finds them; None for what a GPU is to have."""
    if not a.device.cpu:
        return None
    n = a.shape[1]
    _note(a, "geqrt", a.size * n, 2 * _of_columns(a) + a.size * n, n // 2)
    return tuple(a.device.empty(shape, a.dtype) for shape in (a.shape, (n, n), (n, n)))


def unpivoted(a: Block) -> tuple[Block, Block, Block]:
    """Return arrays for L, U and signs."""
    _note(a, "laorhr_col_getrfnp", a.size * len(a), 2 * a.size * len(a) / 3, len(a) // 2)
    return tuple(a.device.empty(shape, a.dtype) for shape in (a.shape, a.shape, (len(a),)))


# ------------------------------------------------------------------ eigenvalues and singular values


def schur(h: Block, vectors: bool) -> tuple[Block, Block, Block, int]:
    """Return arrays for T and Z of a Schur form, an array for the eigenvalues, and 0, if the iteration converges."""
    h.device.assume("finite", "whether the QR iteration converges")
    n = len(h)
    operations = (25 if vectors else 10) * n**3  # Golub and Van Loan
    _note(h, "hseqr", operations, operations, BLOCK, (2 + vectors) * h.nbytes)
    t, z = (h.device.empty((m, m), h.dtype) for m in (n, n if vectors else 1))
    return t, z, h.device.empty((n,), np.result_type(h.dtype, np.complex64)), 0


def triangular_vectors(t: Block) -> Block:
    """Return an array for the eigenvectors of a Schur form."""
    _note(t, "trevc", t.size * len(t), t.size * len(t), BLOCK)
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
    _note(d, "stevd", n**3, 4 * n**3 / 3, n // 2, 2 * d.nbytes + n * d.nbytes)
    return d.device.empty(d.shape, d.dtype), d.device.empty((n, n), d.dtype)


def bidiagonal(a: Block) -> tuple[Block, Block, Block, Block]:
    """Return arrays for a bidiagonal matrix, and for the factors of the reflections that make a matrix so."""
    n, empty = a.shape[1], a.device.empty
    # half of it is products with vectors, for two of which in each column what is left passes through memory
    _note(a, "gebrd", 2 * a.size * n, 2 * _of_columns(a), BLOCK, 2 * a.nbytes + 2 * n * a.nbytes // 3)
    return empty((n,), a.real.dtype), empty((max(0, n - 1),), a.real.dtype), empty((n,), a.dtype), empty((n,), a.dtype)


def reflect_back(a: Block, z: Block) -> None:
    """Note that the reflections of a bidiagonal form are applied to a matrix."""
    _note(z, "ormbr", z.size * min(a.shape), 2 * z.size * min(a.shape), BLOCK, a.nbytes + 2 * z.nbytes)


def bidiagonal_values(d: Block) -> Block:
    """Return an array for the singular values of a bidiagonal matrix."""
    d.device.kernel("bdsdc", 2 * d.nbytes, d.size**2, d.dtype)
    return d.device.empty(d.shape, d.dtype)


def bidiagonal_vectors(d: Block, left: int, right: int, columns: int) -> tuple[Block, Block, Block]:
    """Return arrays for the singular values, and for so many rows of the left and of the right vectors."""
    n = len(d)
    operations = 3 * n * n * (left + right)  # about two rotations for each element of a vector, on n values
    _note(d, "lasdq", 2 * n**3, operations, 1, 2 * d.nbytes + 2 * n * d.nbytes)
    empty = d.device.empty
    return empty(d.shape, d.dtype), empty((left, n), d.dtype), empty((right, columns), d.dtype)


def secular_roots(d: Block, count: int) -> Block:
    """Return an array for so many roots of a secular equation, with the nearest pole of each and how far it is."""
    d.device.kernel("laed4", count * d.nbytes, count * d.size, d.dtype)
    return d.device.empty((count, 3), d.dtype)


_NUMPY = {
    "cholesky": (1 / 3, 0.0), "qr": (8 / 3, 0.0), "inv": (2.0, 0.0), "det": (2 / 3, 0.0), "slogdet": (2 / 3, 0.0),
    "solve": (2 / 3, 0.0), "eigh": (4.0, 1 / 6), "eigvalsh": (2 / 3, 1 / 6), "svd": (8.0, 2 / 3), "eig": (25.0, 0.0),
    "eigvals": (10.0, 0.0),
}  # fmt: skip
"""Operations of square matrices by n³, of products of blocks, and how often each element passes through memory for
products with vectors, by n."""


class Factorizations:
    """NumPy's `linalg`, by shapes."""

    _numpy: Any = np.linalg

    def __init__(self, device: ShapesBackend) -> None:
        self._device = device

    def _factored(
        self, name: str, a: Any, *shapes: tuple[int, ...], real: tuple[int, ...] | None = None, dtype: Any = None
    ) -> Any:
        """Return arrays of these shapes for what a function makes of matrices, and a real one if that is given.

        NumPy computes in double precision: it copies other matrices first, and casts the results one by one.
        """
        self._device.assume("finite", f"whether linalg.{name} of a matrix succeeds")
        few = min(a.shape[-2:])
        through, vectors = _NUMPY.get(name, (2.0, 0.0))
        self._device.factorization(
            f"linalg.{name}", a.size * few, a.dtype, nbytes=2 * a.nbytes + int(vectors * few * a.nbytes),
            flops=through * a.size * few, width=few // 2,
        )  # fmt: skip
        dtype, double = a.dtype if dtype is None else dtype, np.result_type(a.dtype, np.float64)
        casts, wide, work = self._device.cpu and double != a.dtype, list[ShapeArray](), list[ShapeArray]()
        if casts:
            work = [ShapeArray(self._device, a.shape, double)]
            wide = [ShapeArray(self._device, shape, np.result_type(dtype, np.float64)) for shape in shapes]
        if name != "qr":
            work.clear()
        elif self._device.cpu and not casts:  # it works on a copy, of which a mask takes R
            copied = ((a.shape, a.dtype), (shapes[1][-2:], np.dtype(bool)))
            work = [ShapeArray(self._device, shape, kind) for shape, kind in copied]
        found = []
        for shape in shapes:
            found.append(ShapeArray(self._device, shape, dtype))
            wide[:1] = []
        if real is not None:
            found.append(ShapeArray(self._device, real, a.real.dtype))
        return found

    def eigh(self, a: Any, UPLO: str = "L") -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eigh(a, UPLO)
        z, w = self._factored("eigh", a, a.shape, real=a.shape[:-1])
        return w, z

    def eigvalsh(self, a: Any, UPLO: str = "L") -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eigvalsh(a, UPLO)
        return self._factored("eigvalsh", a, real=a.shape[:-1])[0]

    def svd(self, a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.svd(a, full_matrices, compute_uv)
        *lead, m, n = a.shape
        k = min(m, n)
        if not compute_uv:
            return self._factored("svd", a, real=(*lead, k))[0]
        left, right = (m, n) if full_matrices else (k, k)
        u, vh, s = self._factored("svd", a, (*lead, m, left), (*lead, right, n), real=(*lead, k))
        return u, s, vh

    def qr(self, a: Any, mode: str = "reduced") -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.qr(a, mode)
        *lead, m, n = a.shape
        k = m if mode == "complete" else min(m, n)
        return tuple(self._factored("qr", a, (*lead, m, k), (*lead, k, n)))

    def eig(self, a: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eig(a)
        return tuple(self._factored("eig", a, a.shape[:-1], a.shape, dtype=np.result_type(a.dtype, np.complex64)))

    def eigvals(self, a: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.eigvals(a)
        return self._factored("eigvals", a, a.shape[:-1], dtype=np.result_type(a.dtype, np.complex64))[0]

    def cholesky(self, a: Any) -> Any:
        return self._factored("cholesky", a, a.shape)[0] if isinstance(a, ShapeArray) else self._numpy.cholesky(a)

    def inv(self, a: Any) -> Any:
        return self._factored("inv", a, a.shape)[0] if isinstance(a, ShapeArray) else self._numpy.inv(a)

    def det(self, a: Any) -> Any:
        return self._factored("det", a, a.shape[:-2])[0] if isinstance(a, ShapeArray) else self._numpy.det(a)

    def slogdet(self, a: Any) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.slogdet(a)
        return tuple(self._factored("slogdet", a, a.shape[:-2], real=a.shape[:-2]))

    def solve(self, a: Any, b: Any) -> Any:
        if not lack_values((a, b)):
            return self._numpy.solve(a, b)
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return self._factored("solve", a, (*lead, *b.shape[-2:]), dtype=np.result_type(a.dtype, b.dtype))[0]

    def lstsq(self, a: Any, b: Any, rcond: Any = None) -> Any:
        if not lack_values((a, b)):
            return self._numpy.lstsq(a, b, rcond)
        (m, n), k = a.shape, min(a.shape)
        full = self._device.assume("conditioned", "the rank of a matrix")
        x, s = self._factored("lstsq", a, (n, *b.shape[1:]), real=(k,))
        residuals = ShapeArray(self._device, b.shape[1:] if full and m > n else (0,), s.dtype)
        return x, residuals, k if full else max(0, k - 1), s

    def matrix_power(self, a: Any, n: int) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.matrix_power(a, n)
        if n < 1:
            return ShapeArray(self._device, a.shape, a.dtype) if n == 0 else self.matrix_power(self.inv(a), -n)
        found = a
        for _ in range(n.bit_length() + n.bit_count() - 2):  # squares, and products of them
            found = found @ a
        return found

    def norm(self, a: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
        if not isinstance(a, ShapeArray):
            return self._numpy.norm(a, ord, axis, keepdims)
        return self._device.xp._reduce("norm", a, axis, a.real.dtype, None, keepdims)

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(np.linalg, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if lack_values((*args, *kwargs.values())):
                raise values_needed(f"linalg.{name} of an array")
            return theirs(*args, **kwargs)

        return refuse if callable(theirs) and not isinstance(theirs, type) else theirs
