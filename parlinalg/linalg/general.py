"""Eigenvalues and eigenvectors of general square matrices, and their Schur forms."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.backend import backend_of, namespace
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.hessenberg import (
    Hessenberg,
    balanced,
    exponents,
    isolated,
    on_first_rank,
    on_one,
    schur,
    sent_home,
    triangular_vectors,
)
from parlinalg.linalg.matrices import LinAlgError, as_matrix, batches, distributed, scaled, tiles_for
from parlinalg.linalg.tiles import move
from parlinalg.matmul import matmul


class EigResult(NamedTuple):
    """Eigenvalues, in no order, and eigenvectors as columns."""

    eigenvalues: DistArray
    eigenvectors: DistArray


@primitive
def eig(x: DistArray, /) -> EigResult:
    """Return the eigenvalues [..., n] and eigenvectors [..., n, n] of square matrices.

    Both are complex, of real matrices too (the Array API standard, 2025.12), so that dtypes never depend on values;
    `np.linalg.eig` of a DistArray gives the same.  Vectors have norm 1 and lie like `x`, values like its columns.

    The matrix is balanced, as by LAPACK's `geev`: small eigenvalues of badly scaled matrices are accurate, but
    |A v - w v| may then be larger than rounding beside |A|.  It is reduced to Hessenberg form on all ranks; one rank,
    which holds two n × n matrices for a while, finds the Schur form by LAPACK's QR iteration, about 25 n³ operations.
    The other ranks wait.

    Raises
    ------
    LinAlgError
        If the QR iteration does not converge.
    """
    x = as_matrix(x, "eig", square=True)
    if x.ndim > 2:
        return EigResult(*batches("eig", lambda xp, a: _on_host(x, np.linalg.eig, a), eig, x))
    n, layout, grid = x.shape[0], x.layout.with_partial(()), x.grid
    form = Schur(x, "eig", balance=True)
    complex_ = form.values.dtype
    right = sent_home(form.eigenvectors(), n, x.dtype, layout, grid)
    across = Layout(grid.axes, None)
    v = matmul(form.vectors(layout), right, layout=across)
    del right
    if x.dtype.kind != "c":
        v = v.like(_paired(v.block, form.values) if grid.inside else v.block.astype(complex_))
    if n:
        v /= abs(v).max(axis=0)
        v /= np.sqrt((abs(v) ** 2).sum(axis=0))
    values = distributed(form.values / form.scale, Layout(layout.dims[-1]), grid)
    return EigResult(values, v.redistribute(layout))


@primitive
def eigvals(x: DistArray, /) -> DistArray:
    """Return the eigenvalues [..., n] of square matrices, complex and in no order; see `eig`.

    One rank finds those of the Hessenberg form, of which it holds one n × n matrix, in about 10 n³ operations.
    """
    x = as_matrix(x, "eigvals", square=True)
    if x.ndim > 2:
        return batches("eigvals", lambda xp, a: _on_host(x, np.linalg.eigvals, a)[0], eigvals, x)[0]
    form = Schur(x, "eigvals", balance=True, vectors=False)
    return distributed(form.values / form.scale, Layout(x.layout.dims[-1]), x.grid)


def _on_host(x: DistArray, function: Any, block: Any) -> tuple[Any, ...]:
    """Return the result of a function of NumPy for this rank's matrices, in complex numbers."""
    found, backend = function(x.grid.backend.to_host(block)), x.grid.backend
    parts = found if isinstance(found, tuple) else (found,)
    return tuple(backend.from_host(a.astype(np.result_type(x.dtype, np.complex64))) for a in parts)


def _paired(block: Any, values: np.ndarray) -> Any:
    """Return the complex columns of eigenvectors of a real matrix.

    A pair of eigenvalues has the real and the imaginary parts of its vectors in turn.
    """
    xp, sign = namespace(block), backend_of(block).from_host(np.sign(values.imag))
    real = xp.where(sign < 0, xp.roll(block, 1, axis=1), block)
    imaginary = xp.where(sign > 0, xp.roll(block, -1, axis=1), xp.where(sign < 0, -block, block.dtype.type(0)))
    found = 1j * imaginary
    found += real
    return found


class Schur:
    """The Schur form A = S T S⁻¹, with S unitary, or with `balance` a diagonal of powers of two times a unitary matrix.

    Attributes
    ----------
    values : array
        The eigenvalues of T, complex, on every rank.
    scale : float
        The power of two by which A was multiplied: T is the form of `scale * A`.
    t : array or None
        T, on the first rank alone; of a real A real, with blocks of two rows for pairs of eigenvalues.
    """

    def __init__(self, x: DistArray, name: str, balance: bool, vectors: bool = True) -> None:
        self.x, self.tiles = x, tiles_for(x, None, "eig")
        tiles, n, grid = self.tiles, x.shape[0], x.grid
        rows, columns = tiles.rows(n), tiles.columns(n)
        a = tiles.bring(x, rows, columns, host=True)
        self.scale, real = scaled(tiles, [a], a.dtype, name), a.real.dtype
        self._rows, self._powers, xp = rows, np.zeros(n), kernels.on_host(grid.backend)
        if balance and grid.inside:
            order, low, high = isolated(tiles, a, n)
            if (order != np.arange(n)).any():
                self._rows = [order[each] for each in rows]
                del a
                a = tiles.bring(x, self._rows, [order[each] for each in columns], host=True)
                a *= self.scale
            self._powers = exponents(tiles, a, n, low, high)
            balanced(tiles, a, n, self._powers)
        self._reduced = Hessenberg(tiles, a, n, vectors)
        held = [a]
        del a
        h = on_one(held, tiles, n)
        self.values: np.ndarray = xp.zeros(n, np.result_type(x.dtype, np.complex64))
        self.t: np.ndarray | None = None
        self._z: np.ndarray = xp.empty((0, 0), x.dtype)
        failed = 0
        if grid.inside and grid.rank == 0:
            self.t, z, self.values, failed = schur(h, vectors)
            self._z, self.t = (z, self.t) if vectors else (self._z, None)
        del h
        if tiles.worst([abs(failed)])[0]:
            raise LinAlgError("Eigenvalues did not converge")
        if grid.inside:
            grid.everyone.broadcast(self.values, 0)
            if vectors:
                self._z = move(self._z, on_first_rank(n, grid), tiles.places(rows, columns), grid)
                self._reduced.times(self._z)
                self._z *= np.exp2(self._powers[rows[tiles.i]]).astype(real)[:, None]

    def vectors(self, layout: Layout) -> DistArray:
        """Return S in a layout, and give it up here.  Collective."""
        n = self.x.shape[0]
        z, self._z = self._z, self._z[:0].copy()
        return self.tiles.home(z, self._rows, self.tiles.columns(n), (n, n), layout)

    def eigenvectors(self) -> np.ndarray | None:
        """Return the eigenvectors of T, on the first rank alone (`triangular_vectors`), and give up T."""
        t, self.t = self.t, None
        return None if t is None else triangular_vectors(t)
