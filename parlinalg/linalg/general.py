"""Eigenvalues and eigenvectors of general square matrices, their Hessenberg and Schur forms."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.backend import backend_of, blas, namespace
from parlinalg.backend.shapes import has_values
from parlinalg.comm.shared import lasting_array
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.matrices import LinAlgError, as_matrix, batches, distributed, scaled, tiles_for
from parlinalg.linalg.reductions.hessenberg import (
    Hessenberg,
    balanced,
    exponents,
    isolated,
    on_first_rank,
    on_one,
    schur_form,
    sent_home,
    triangular_vectors,
)
from parlinalg.linalg.tiles import move
from parlinalg.matmul import matmul

STRIP = 64
"""Rows of eigenvectors that become complex at once."""


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
    right = sent_home(form.eigenvectors(), n, x.dtype, layout, grid)
    across = Layout(grid.axes, None)
    left, values, scale = form.vectors(layout), form.values, form.scale
    del form
    v = matmul(left, right, layout=across)
    del left, right
    if x.dtype.kind != "c":
        _pair(v, values)
    if n:
        v /= abs(v).max(axis=0)
        v /= np.sqrt((abs(v) ** 2).sum(axis=0))
    return EigResult(distributed(values / scale, Layout(layout.dims[-1]), grid), v.redistribute(layout))


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


class SchurResult(NamedTuple):
    """T and Z of A = Z T Zᴴ."""

    T: DistArray
    Z: DistArray


class HessenbergResult(NamedTuple):
    """H and Q of A = Q H Qᴴ."""

    H: DistArray
    Q: DistArray


@primitive
def schur(a: DistArray, output: str = "real") -> SchurResult:
    """Return the Schur forms A = Z T Zᴴ of square matrices [..., n, n], with Z unitary; T and Z lie like A.

    T is upper triangular, with the eigenvalues on its diagonal in no order.  That of a real matrix is real unless
    `output` is "complex": pairs of complex eigenvalues have blocks of two rows on the diagonal.  The residual and
    Z Zᴴ - 1 are of the size n ε ‖A‖ and n ε.  Time and memory are those of `eig`, whose reduction and iteration this
    is, without balancing.

    Raises
    ------
    LinAlgError
        If the QR iteration does not converge.
    """
    if not isinstance(output, str) or output not in ("real", "complex"):
        raise ValueError(f"schur: output is 'real' or 'complex', not {output!r}")
    a = as_matrix(a, "schur", square=True)
    if output == "complex" and a.dtype.kind != "c":
        a = a.astype(np.result_type(a.dtype, np.complex64))
    if a.ndim > 2:
        return SchurResult(*_of_stack(schur, 2, a, output=output))
    form, layout = Schur(a, "schur", balance=False), a.layout.with_partial(())
    t, form.t = form.t, None
    if t is not None:
        t /= t.real.dtype.type(form.scale)
    found = sent_home(t, a.shape[0], a.dtype, layout, a.grid)
    return SchurResult(found, form.vectors(layout))


@primitive
def hessenberg(a: DistArray, calc_q: bool = False) -> DistArray | HessenbergResult:
    """Return the Hessenberg forms H of square matrices [..., n, n]; with `calc_q` H and Q of A = Q H Qᴴ, Q unitary.

    H has zeros below its first subdiagonal and the eigenvalues of A.  Both lie like A.  The residual is of the size
    n ε ‖A‖.  This is the first half of `eig`, on all ranks, without balancing, as ScaLAPACK's `gehrd` and `ormhr`:
    10 n³ / 3 operations, 4 n³ / 3 more for Q, and two all-reduces a column.
    """
    a = as_matrix(a, "hessenberg", square=True)
    if a.ndim > 2:
        parts = _of_stack(hessenberg, 1 + calc_q, a, calc_q=calc_q)
        return HessenbergResult(*parts) if calc_q else parts[0]
    tiles, n, layout = tiles_for(a, None, "eig"), a.shape[0], a.layout.with_partial(())
    rows, columns = tiles.rows(n), tiles.columns(n)
    h = tiles.bring(a, rows, columns, host=True)
    scale = scaled(tiles, [h], h.dtype, "hessenberg")
    reduced = Hessenberg(tiles, h, n, calc_q)
    h /= h.real.dtype.type(scale)
    found = tiles.home(h, rows, columns, (n, n), layout)
    if not calc_q:
        return found
    del h
    q = kernels.on_host(a.grid.backend).asarray((rows[tiles.i][:, None] == columns[tiles.j][None, :]).astype(a.dtype))
    reduced.times(q)
    return HessenbergResult(found, tiles.home(q, rows, columns, (n, n), layout))


def _of_stack(function: Any, count: int, x: DistArray, **options: Any) -> tuple[DistArray, ...]:
    """Return what a function here, and on one rank SciPy's of its name, gives for a stack: `count` arrays like x."""
    backend, name = x.grid.backend, function.__name__

    def local(xp: Any, block: Any) -> tuple[Any, ...]:
        given = backend.to_host(block)
        parts = tuple(given.copy() for _ in range(count))
        for at in np.ndindex(*given.shape[:-2]) if has_values(given) and given.size else ():
            found = getattr(blas.scipy_linalg(), name)(given[at], **options)
            for part, each in zip(parts, found if count > 1 else (found,), strict=True):
                part[at] = each
        return tuple(backend.from_host(part) for part in parts)

    return batches(name, local, partial(function, **options), x)


def _on_host(x: DistArray, function: Any, block: Any) -> tuple[Any, ...]:
    """Return the result of a function of NumPy for this rank's matrices, in complex numbers."""
    found, backend = function(x.grid.backend.to_host(block)), x.grid.backend
    parts = found if isinstance(found, tuple) else (found,)
    return tuple(backend.from_host(a.astype(np.result_type(x.dtype, np.complex64))) for a in parts)


def _pair(v: DistArray, values: np.ndarray) -> None:
    """Replace the eigenvectors of a real matrix by complex columns, some rows at a time.

    A pair of eigenvalues has the real and the imaginary parts of its vectors in turn.
    """
    block = v.block
    if not v.grid.inside:
        v.adopt(block.astype(values.dtype))
        return
    xp, sign = namespace(block), backend_of(block).from_host(np.sign(values.imag))
    found = xp.empty(block.shape, values.dtype)
    for k in range(0, len(block), STRIP):
        x = block[k : k + STRIP]
        imaginary = xp.where(sign > 0, xp.roll(x, -1, axis=1), xp.where(sign < 0, -x, block.dtype.type(0)))
        strip = 1j * imaginary
        strip += xp.where(sign < 0, xp.roll(x, 1, axis=1), x)
        found[k : k + STRIP] = strip
    v.adopt(found)


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
        # Z, and then the eigenvectors of T: ranks that share memory provide equal parts of it, as of T
        room = lasting_array(grid.everyone, n * n, x.dtype, keep=False) if vectors and grid.inside else None
        self._room = None if room is None else room[: n * n].reshape(n, n).T
        failed = 0
        if grid.inside and grid.rank == 0:
            self.t, z, self.values, failed = schur_form(h, vectors, self._room)
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
        room, self._room = self._room, None
        return None if t is None else triangular_vectors(t, room)
