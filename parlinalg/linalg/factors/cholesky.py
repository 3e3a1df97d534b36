"""`cho_factor` and `cholesky`: the factorization A = L Lᴴ of Hermitian positive definite matrices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import Factor, Identity, WithDeterminant, on_diagonal, solved
from parlinalg.linalg.matrices import (
    INDEFINITE,
    LinAlgError,
    as_matrix,
    batches,
    checked_tiles,
    refuse_nonfinite,
    tiles_for,
)
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.panels.cholesky import Cholesky, SharedCholesky, in_shared_memory
from parlinalg.linalg.tile_sizes import rows_alone
from parlinalg.linalg.tiles import clear_above, move

if TYPE_CHECKING:
    from parlinalg.linalg.stacks import CholeskyStack


class CholeskyFactor(WithDeterminant, Factor):
    """The factorization A = L Lᴴ of a Hermitian positive definite matrix; made by `cho_factor`.

    With `passing` only `L` is made.  It is not moved if every rank receives all panels of it: each keeps its block.
    With `rows` X of this rank, where the ranks of a node share L, X A⁻¹ replaces them and nothing is kept: `divided`.
    """

    maker = "cho_factor"
    _made: DistArray | None = None
    """L where the factorization made it as the result, which it is then alone."""

    def __init__(
        self, a: DistArray, block: int | None = None, *, passing: bool = False, depth: int | None = None,
        rows: Any = None,
    ) -> None:  # fmt: skip
        a = as_matrix(a, "cholesky", square=True)
        super().__init__(a)
        self.divided = False
        n = a.shape[0]
        self.tiles = tiles = tiles_for(a, block, "cholesky", depth)
        self.rows, self.columns = tiles.rows(n), tiles.columns(n)
        on_host = isinstance(a.block, np.ndarray)
        self._whole = not on_host and self.grid.inside and self.grid.size == 1 and n > 0
        target: Any = None
        if self._whole:  # the GPU's library reads the lower triangle alone
            self._t, first = kernels.lower(a.summed().block)
            finite = kernels.finite(self._t.diagonal())
        else:
            target, first, finite = self._factored(a, passing, rows)
        nonfinite, minor = tiles.worst([not finite, n + 1 - first if first else 0])
        if nonfinite:
            refuse_nonfinite(tiles.worst([not kernels.finite(self._brought(a))])[0], "cholesky")
        if minor:
            raise LinAlgError(INDEFINITE.format(n + 1 - int(minor)))
        if target is not None or (self._whole and passing):
            found = self._t if target is None else target
            self._made = DistArray(found, self.shape, self.layout, self.grid)
        elif tiles.D > 1 and not passing:  # solves work on one layer
            self.tiles = tiles.flat()
            have = tiles.places(self.rows, self.columns)
            self.rows, self.columns = self.tiles.rows(n), self.tiles.columns(n)
            self._t = move(
                self._t, have, self.tiles.places(self.rows, self.columns), self.grid, lower=tiles.size
            )  # fmt: skip

    def _factored(self, a: DistArray, passing: bool, x: Any) -> tuple[Any, int, bool]:
        """Factor A on tiles; return this rank's block of L, or None where L stays on tiles, `minor` and `finite`."""
        a, tiles, n = a.summed(), self.tiles, self.shape[0]
        on_host = isinstance(a.block, np.ndarray)
        near = self.grid.inside and self.grid.size > tiles.R * tiles.D == 1  # all ranks see all panels
        if near and on_host and n:
            shared = SharedCholesky(tiles, a, passing, x)
            with np.errstate(all="ignore"):
                done = shared.run()
            self.divided = done and x is not None
            if done:
                self._t = np.empty((0, 0), a.dtype) if passing else shared.found
                return (shared.found if passing else None), shared.minor, shared.finite
        t = tiles.bring(a, self.rows, self.columns, lower=True, cleared=False) if on_host else self._brought(a)
        finite = on_host or kernels.finite(t)  # on the host the diagonal of L shows NaNs and infinities
        self._t = t = tiles.layered(t, self.columns)
        target: Any = None
        if passing and near:
            where = self.grid.block(self.layout, a.shape)
            target = self.grid.backend.empty(tuple(map(len, where)), a.dtype), *where
        work = Cholesky(tiles, t, n, target)
        with np.errstate(all="ignore"):
            work.run()
        if near and x is not None and not self.grid.backend.values:  # imagined ranks share L as those of a host do
            shared, self._t, self.divided = self.grid.backend.empty((n, n), a.dtype), t[:0, :0], True
            for adjoint in (True, False):
                kernels.substitute(shared, x, right=True, lower=True, adjoint=adjoint)
        if tiles.D > 1:  # each layer has the panels that it factored
            self._t = tiles.own(t, self.columns)
        return (None if target is None else target[0]), work.minor, finite and work.finite

    def _brought(self, a: DistArray) -> Any:
        """Return this rank's tiles of A; what is above the diagonal, and may be anything, is 0.  Collective."""
        tiles = self.tiles
        t = tiles.bring(a, self.rows, self.columns, lower=True)
        if self.grid.inside:
            clear_above(t, *tiles.places(self.rows, self.columns)[self.grid.rank], tiles.size)
        return t

    @property
    def L(self) -> DistArray:
        """The lower triangular factor, in the layout of A: an array of its own each time."""
        if self._made is not None:
            return self._made
        if self.grid.inside and not self._whole:  # what the factorization left above the diagonal
            clear_above(self._t, *self.tiles.places(self.rows, self.columns)[self.grid.rank], self.tiles.size)
        lower, shape = not self._whole, self.shape
        return self.tiles.home(self._t, self.rows, self.columns, shape, self.layout, lower=lower)  # type: ignore[arg-type]

    def _diagonal_and_order(self) -> tuple[np.ndarray, np.ndarray]:
        found = np.zeros(self.shape[0])
        if not self.grid.backend.values:
            found += 1
        elif self._whole:
            found[:] = self.grid.backend.to_host(self._t.diagonal()).real
        elif self.grid.inside:
            numbers, own = on_diagonal(self._t, self.rows[self.tiles.i], self.columns[self.tiles.j])
            found[numbers] = self.grid.backend.to_host(own).real
        every = np.array(self.tiles.worst(found.tolist()), np.empty(0, self.dtype).real.dtype)  # the others have 0
        return np.repeat(every, 2), np.arange(0)

    def solution(self, b: DistArray | Identity, adjoint: bool = False, *, check: bool = False) -> DistArray:
        """Return what `solve` does, with `adjoint` too; without `check`, NaNs and infinities of b make NaNs of x."""
        n = self.shape[0]
        x, columns, matrix = self._right_hand_sides(b, self.rows, n, check)
        for turned in (False, True):
            triangular.substitute(self.tiles, self._t, self.rows, x, n, columns, lower=True, adjoint=turned)
        return self._home(x, self.rows, columns, n, matrix, b)


def divided(x: DistArray, a: DistArray) -> DistArray:
    """Return X A⁻¹ for a Hermitian positive definite A, in the layout of X [m, n].

    Where the ranks of a node share the factor of A, each has some rows of X, and waits for nobody.

    Raises
    ------
    LinAlgError
        If a leading minor of A is not positive, which it names.
    """
    grid, tiles, found = x.grid, tiles_for(a, None, "cholesky"), None
    if in_shared_memory(tiles, len(a), a.dtype):
        found = x.redistribute(rows_alone(grid.sizes))
        found = found.like(found.block.copy(order="C"))
    factor = CholeskyFactor(a, rows=None if found is None else found.block)
    done = any(grid.world.share(factor.divided, others="alike"))
    if found is not None and done:
        return found.redistribute(x.layout)
    del found
    return factor.solution(x.mT.conj()).mT.conj().redistribute(x.layout)


@primitive
def cho_factor(
    a: DistArray, block: int | None = None, *, depth: int | None = None
) -> CholeskyFactor | CholeskyStack:  # fmt: skip
    """Return the Cholesky factorization of a matrix, or those of a stack of matrices, in their working form.

    Parameters
    ----------
    a : DistArray [..., n, n]
        Hermitian and positive definite; only its lower triangle is read.
    block : int, optional
        Rows and columns of a tile.
    depth : int, optional
        The number of layers of ranks that hold tiles of the whole matrix (2.5D), a product of sizes of the grid's axes:
        fewer words for so many times the memory.  By default what the plan chooses.

    Raises
    ------
    LinAlgError
        If a leading minor is not positive, which it names.
    """
    as_matrix(a, "cho_factor", square=True)
    block, depth = checked_tiles("cho_factor", a, block, depth)
    if a.ndim > 2:
        from parlinalg.linalg.stacks import CholeskyStack

        return CholeskyStack(a, block)
    return CholeskyFactor(a, block, depth=depth)


def cho_solve(factor: Any, b: DistArray, /) -> DistArray:
    """Return x of A x = b from the factorization that `cho_factor` made of A.

    This is `factor.solve(b)`, by SciPy's name; `b` has shape (n,), (n, k) or (..., n, k).
    """
    return solved("cho", factor, b)


@primitive
def cholesky(x: DistArray, /, *, upper: bool = False, depth: int | None = None) -> DistArray:
    """Return the lower factor L of Hermitian positive definite matrices, A = L Lᴴ, or the upper one, Lᴴ.

    Only the lower triangles are read.  `x` has shape (..., n, n); the result lies like it.  `depth` is as in
    `cho_factor`.

    Raises
    ------
    LinAlgError
        If a leading minor is not positive, which it names; of a stack it names the matrix.
    ValueError
        If the matrices have NaNs or infinities.
    """
    x = as_matrix(x, "cholesky", square=True)
    _, depth = checked_tiles("cholesky", x, None, depth)
    if x.ndim > 2:
        found = batches("cholesky", _lower_factors, cholesky, x, lower=True)[0]
    else:
        found = CholeskyFactor(x, passing=True, depth=depth).L
    return found if not upper else found.mT.conj().redistribute(found.layout)


def _lower_factors(xp: Any, a: Any) -> Any:
    """Return the lower Cholesky factors of a rank's stack; of a single matrix an error names the leading minor."""
    try:
        return xp.linalg.cholesky(a)
    except LinAlgError:
        if math.prod(a.shape[:-2]) == 1 and (minor := kernels.cholesky(xp.array(a.reshape(a.shape[-2:]), order="C"))):
            raise LinAlgError(INDEFINITE.format(minor)) from None
        raise
