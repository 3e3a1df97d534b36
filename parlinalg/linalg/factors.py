"""Factorizations of distributed matrices: objects in their working form, and the factors themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import computed
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import padded
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace
from parlinalg.comm.shared import SharedCollectives
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels, triangular
from parlinalg.linalg.cholesky import Cholesky, SharedCholesky, in_shared_memory
from parlinalg.linalg.lu import LU, determinant
from parlinalg.linalg.matrices import (
    INDEFINITE,
    SINGULAR,
    LinAlgError,
    as_matrix,
    at_work,
    batches,
    checked_tiles,
    distributed,
    refuse_nonfinite,
    scalar,
    scaled,
    spend,
    tiles_for,
)
from parlinalg.linalg.pivoted import LONG, PANEL, PivotedQR
from parlinalg.linalg.qr import QR, nearly_orthogonalized, reflect
from parlinalg.linalg.tile_sizes import by_gram, rows_alone
from parlinalg.linalg.tiles import SIZE, Numbers, Tiles, clear_above, move, transposed
from parlinalg.matmul import matmul

if TYPE_CHECKING:
    from parlinalg.linalg.stacks import CholeskyStack, LUStack, QRStack


SMALLER = 30
"""A matrix whose R is not finite is factored again, divided by 2 to this power: sums of so many elements fit then."""
PARTS, NARROW = 4, 128
"""The parts of columns in which an inverse is formed of which the norm alone is wanted, and their fewest columns."""
LONG_OF_ONE = 2
"""Rows of a matrix by its columns from which on one rank factors it by QR first."""


class QRResult(NamedTuple):
    """Q and R of a matrix, A = Q R."""

    Q: DistArray
    R: DistArray


class PivotedQRResult(NamedTuple):
    """Q, R and the order p of the columns of a matrix, A[:, p] = Q R."""

    Q: DistArray
    R: DistArray
    p: DistArray


class SlogdetResult(NamedTuple):
    """The sign of a determinant, or its phase, and the logarithm of its absolute value."""

    sign: DistArray
    logabsdet: DistArray


class Factor:
    """A factorization that stays on tiles, so that many solves pay once for moving the matrix there."""

    maker: ClassVar[str] = "qr_factor"
    """The function of `parlinalg.linalg` that makes it."""
    tiles: Tiles
    _t: Any

    def __init__(self, a: DistArray) -> None:
        self.grid, self.shape, self.dtype, self.layout = a.grid, a.shape, a.dtype, a.layout.with_partial(())

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}(shape={self.shape}, dtype={self.dtype}, layout={self.layout!r}, grid={self.grid!r})"

    def apart(self) -> tuple[Any, Factor]:
        """Return this rank's tiles, and the rest of the factorization, to which `joined` gives them back."""
        return self._t, self.joined(np.empty((0, 0), self.dtype))

    def joined(self, t: Any) -> Any:
        """Return the factorization with these tiles."""
        found = copy(self)
        found._t = t
        return found

    def __copy__(self) -> Any:
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = type(self).__name__
        raise TypeError(
            f"{name} is no value to pickle or to copy deeply: its tiles belong to the grid.  Pickle A, and call "
            f"{self.maker}(A) again, or the arrays that the factorization has"
        )

    @primitive
    def solve(self, b: DistArray) -> DistArray:
        """Return x of A x = b, for b of shape (n,) or (n, k), of stacks (..., n, k), in the layout of b.

        Raises
        ------
        ValueError
            If b has NaNs or infinities.
        """
        return self.solution(b, check=True)

    def solution(self, b: DistArray, *, check: bool = False) -> DistArray:
        """Return what `solve` does; without `check`, NaNs and infinities of b make NaNs of x."""
        raise NotImplementedError

    def _right_hand_sides(
        self, b: Any, rows: list[Numbers], m: int, check: bool = False
    ) -> tuple[Any, list[Numbers], DistArray | Identity]:  # fmt: skip
        """Return this rank's rows and columns of b, every grid column's columns, and b as a matrix.

        With `check`, NaNs and infinities are refused.  Collective.
        """
        if isinstance(b, Identity):
            columns = self.tiles.columns(m)
            return b.tiles(self.tiles, columns, self.dtype, rows), columns, b
        given, b = b, as_matrix(b, "solve", vectors=True)
        if b.ndim > 2 or b.shape[0] != m or b.grid is not self.grid:
            raise ValueError(
                f"solve takes right-hand sides of shape ({m},) or ({m}, k) on the factor's grid, not of {b.shape}"
            )
        b = self._of_one_dtype(b if b.ndim == 2 else b[:, None], given.dtype)
        columns = self.tiles.columns(b.shape[1])
        brought = self.tiles.bring(b, rows, columns)
        if check:
            refuse_nonfinite(self.tiles.worst([not kernels.finite(brought)])[0], "solve")
        return brought, columns, b

    def _of_one_dtype(self, b: DistArray, given: np.dtype[Any]) -> DistArray:
        """Return right-hand sides in the factorization's dtype; refuse a dtype `given` whose solutions have another."""
        dtype = np.result_type(b.dtype, self.dtype)
        if dtype != self.dtype:
            raise TypeError(
                f"the factor is of {self.dtype}; it does not solve right-hand sides of {given}, whose solutions are of "
                f"{dtype}; factor A.astype({str(dtype)!r})"
            )
        return b.astype(dtype, copy=False)

    def _home(self, x: Any, rows: list[Numbers], columns: list[Numbers], n: int, b: Any, like: Any) -> Any:
        found = self.tiles.home(x, rows, columns, (n, b.shape[1]), b.layout.with_partial(()))
        return found if like.ndim == 2 else reshape(found, (n,)).redistribute(like.layout.with_partial(()))


def on_diagonal(t: Any, rows: Numbers, columns: Numbers) -> tuple[Numbers, Any]:
    """Return the numbers of the elements of the diagonal among tiles with these rows and columns, and the elements."""
    numbers, at, also = np.intersect1d(rows, columns, return_indices=True)
    return numbers, t[at, also]


class WithDeterminant(ABC):
    """The determinant of a matrix whose factorization has triangles."""

    dtype: np.dtype[Any]
    grid: Grid

    @abstractmethod
    def _diagonal_and_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers whose product is the determinant, but for the sign of the order of rows, and this.

        Collective.
        """

    @property
    def det(self) -> DistArray:
        """The determinant of A."""
        return scalar(determinant(*self._diagonal_and_order())[0], self.dtype, self.grid)

    def slogdet(self) -> SlogdetResult:
        """Return the sign (or phase) of the determinant and the logarithm of its size."""
        diagonal, order = self._diagonal_and_order()
        _, sign, log = determinant(diagonal, order)
        return SlogdetResult(scalar(sign, self.dtype, self.grid), scalar(log, diagonal.real.dtype, self.grid))


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


class Identity(NamedTuple):
    """Right-hand sides [n, n] for an inverse, of which each rank makes its own, and the layout of the inverse.

    They are `scale` times the identity, by default the identity itself.
    """

    shape: tuple[int, int]
    layout: Layout
    scale: Any = None

    @property
    def ndim(self) -> int:
        return 2

    def tiles(
        self, tiles: Tiles, columns: list[Numbers], dtype: np.dtype[Any], rows: list[Numbers] | None = None
    ) -> Any:  # fmt: skip
        """Return this rank's rows and columns on tiles, as `Tiles.bring` does."""
        grid = tiles.grid
        if not grid.inside:
            return grid.backend.empty((0, 0), dtype)
        rows = tiles.rows(self.shape[0]) if rows is None else rows
        found = _ones_where_equal(*tiles.places(rows, columns)[grid.rank], grid, dtype)
        if self.scale is not None:
            found *= self.scale
        return found


class LUFactor(WithDeterminant, Factor):
    """The factorization P A = L U of a square matrix, by tournament pivoting; made by `lu_factor`.

    With `spent` A and b are emptied, so that their memory is free for the factorization.  They must be finite, and no
    pivot of such an A may be subnormal.  With a `shift` A - shift I is factored, in the memory of its factors.
    """

    maker = "lu_factor"

    def __init__(
        self, a: DistArray, block: int | None = None, b: DistArray | Identity | None = None, depth: int | None = None,
        spent: bool = False, name: str = "lu_factor", shift: Any = 0,
    ) -> None:  # fmt: skip
        a = as_matrix(a, name)
        super().__init__(a)
        self.tiles = tiles = tiles_for(a, block, "lu" if b is None else "solve", depth)
        (m, n), extra = a.shape, 0
        self._columns, every = tiles.columns(n), tiles.columns(n)
        if b is not None:  # right-hand sides are further columns, in tiles behind those of A
            extra = b.shape[1]
            every = tiles.columns(n + extra)
            self._more = [x[x >= n] - n for x in every]
        alone = self.grid.size == 1 and self.grid.inside and not isinstance(a.block, np.ndarray)
        t, behind, given = self._assembled(a, b, alone, spent)
        if shift:
            t, given = self._shifted(t, shift, alone), None
        # NaNs and infinities of a square matrix show in LAPACK's factors: only their rows are exchanged
        late = m == n and isinstance(t, np.ndarray)  # cuSOLVER has zeros for NaNs below the diagonal
        finite = (late or kernels.finite(t)) and (not behind.size or kernels.finite(behind))
        work = LU(tiles, t, (m, n), extra, behind if alone else None, given)
        del behind
        with np.errstate(all="ignore"):
            work.run()
        doubtful = late and not kernels.finite(work.a)
        self._t, self._further, self._order = work.a, work.further, work.rows
        self.positions = self.pivoted = work.positions
        """For every grid row the numbers of its rows in P A; `pivoted` is for the tiles of the factorization itself."""
        if tiles.D > 1:
            self._flatten(tiles, every)
        self.diagonal = work.diagonal
        zeros = kernels.zeros(self.diagonal)
        nonfinite, zero = tiles.worst([doubtful or not finite, n - zeros[0] if len(zeros) else 0])
        if nonfinite and late:  # were they in A or b, or did a pivot of 0 make them?
            summed = a.summed()  # which is collective
            nonfinite, _ = tiles.worst([not (finite and kernels.finite(summed.block)), 0])
        refuse_nonfinite(nonfinite, name)
        self.zero = n - int(zero) if zero else None
        """The first zero of U's diagonal; None where A is regular."""

    def _assembled(
        self, a: DistArray, b: DistArray | Identity | None, alone: bool, spent: bool
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Return this rank's tiles of A with those of b behind them, those of b, and A as `LU` takes it once more.

        `alone` on one GPU, whose library does not overwrite A: then the tiles of b lie in an array of their own.
        Collective.
        """
        tiles, m = self.tiles, a.shape[0]
        width = 0 if b is None else len(self._more[tiles.j])
        sides: Any = None
        given: Any = None
        if self.grid.size == 1 and isinstance(a.block, np.ndarray) and self.grid.inside:  # LAPACK's order
            given = a.summed().block
            t, given = kernels.in_columns(given, width, spaced=True), None if spent else given
        elif alone:
            t = a.summed().block
            sides = t[:, :0]
        elif tiles.D == 1:
            t = tiles.bring(a, tiles.rows(m), self._columns, more=width)
        else:
            t = tiles.layered(tiles.bring(a, tiles.rows(m), self._columns), self._columns)
        if spent:
            spend(a)
        if b is not None:
            if isinstance(b, Identity):
                sides = b.tiles(tiles, self._more, a.dtype)
            else:
                sides = tiles.bring(b, tiles.rows(m), self._more)
                if spent:
                    spend(b)
            sides = tiles.layered(sides, self._more)
            if tiles.D == 1 and self.grid.inside and not alone:
                t[:, t.shape[1] - width :] = sides
            elif not alone:
                t = namespace(t).hstack([t, sides])
        return t, sides if alone else t[:, t.shape[1] - width :], given

    def _shifted(self, t: Any, shift: Any, copied: bool) -> Any:
        """Return the tiles of A - shift I, in the memory of those of A unless they are to be `copied`."""
        t, tiles = t.copy() if copied else t, self.tiles
        if self.grid.inside:
            rows, columns = tiles.rows(self.shape[0])[tiles.i], self._columns[tiles.j]
            mine = np.flatnonzero(tiles.layer_of(columns) == tiles.layer)
            _, at, also = np.intersect1d(rows, columns[mine], return_indices=True)
            t[at, mine[also]] -= shift
        return t

    def _flatten(self, deep: Tiles, every: list[Numbers]) -> None:
        """Move L and U, of which each layer has those of its own panels, to tiles of one layer.  Collective."""
        tiles, (m, n), k = deep.flat(), self.shape, min(self.shape)
        before, after = self.positions, tiles.rows(m)
        tops, first = [x[x < k] for x in before], [x[x < k] for x in every]
        wide = 1 + max((int(x[-1]) for x in every if len(x)), default=-1)
        columns = tiles.columns(wide)
        lower = upper = self._t
        if self.grid.inside:
            order = SharedCollectives(deep.down, None).all_gather(
                np.ascontiguousarray(self._order, np.int64)[:, None], [len(x) for x in before]
            )[:, 0]  # fmt: skip
            permutation = np.empty(m, np.int64)
            permutation[np.concatenate(before)] = order
            self.rows = [permutation[x] for x in after]
            lower = deep.own(self._t[:, : len(first[deep.j])], first)
            size, mine = deep.size, tops[deep.i]
            mine = mine[deep.layer_of(mine) == deep.layer]
            upper = self._t[np.searchsorted(before[deep.i], mine)]
            upper[:, : len(first[deep.j])][mine[:, None] // size == first[deep.j] // size] = 0  # they are with L
            upper = upper.T
        want = tiles.places(after, columns)
        t = move(lower, deep.places(before, first), want, self.grid, lower=deep.size)
        t += move(upper, deep.row_places(tops, every), transposed(want), self.grid, lower=deep.size).T
        self.tiles, self.positions, self._t = tiles, after, t
        self._columns, self._more = tiles.columns(n), [x[x >= n] - n for x in columns]
        if self.grid.inside:
            self._further = t[:, len(self._columns[tiles.j]) :]

    @cached_property
    def rows(self) -> list[Numbers]:
        """For every grid row the rows of A that it has, in their order in P A.  The first use is collective."""
        if not self.grid.inside:
            return self.positions
        counts = [len(x) for x in self.positions]
        mine = np.ascontiguousarray(self._order, np.int64)[:, None]
        every = SharedCollectives(self.tiles.down, None).all_gather(mine, counts)[:, 0]
        return np.split(every, np.cumsum(counts)[:-1])

    @property
    def permutation(self) -> np.ndarray:
        """The rows of A in their order in P A: (P A)[i] = A[permutation[i]]; the same on all ranks."""
        found = np.arange(self.shape[0])
        if self.grid.inside:
            for at, rows in zip(self.positions, self.rows, strict=True):
                found[at] = rows
        if self.grid.world.size > self.grid.size:  # ranks outside the grid have none
            every = self.grid.world.share(found.tolist() if self.grid.inside else None, others="alike")
            found = np.array(next((each for each in every if each is not None), found), np.int64)
        return found

    @property
    def P(self) -> DistArray:
        """The permutation matrix [m, m] of A = P L U, in the layout of A."""
        order, m = self.permutation, self.shape[0]

        def ones(i: Any, j: Any) -> Any:
            return order[j] == i if m else np.zeros(np.broadcast_shapes(np.shape(i), np.shape(j)), bool)

        return computed("lu", ones, (m, m), self.grid, self.layout, self.dtype)

    def check(self) -> None:
        """Raise LinAlgError if A is singular to working precision, naming the first zero of U's diagonal."""
        if self.shape[0] != self.shape[1]:
            raise LinAlgError(f"only square matrices have solutions for every right-hand side, not {self.shape}")
        if self.zero is not None:
            raise LinAlgError(SINGULAR.format(self.zero))

    @primitive
    def solve(self, b: DistArray, adjoint: bool = False) -> DistArray:
        """Return x of A x = b, or with `adjoint` of Aᴴ x = b, for b of shape (n,) or (n, k), in the layout of b.

        Raises
        ------
        LinAlgError
            If A is singular: an element of U's diagonal is 0, which it names.
        ValueError
            If b has NaNs or infinities.
        """
        return self.solution(b, adjoint, check=True)

    def solution(self, b: DistArray | Identity, adjoint: bool = False, *, check: bool = False) -> DistArray:
        """Return what `solve` does; without `check`, NaNs and infinities of b make NaNs of x."""
        self.check()
        n = self.shape[0]
        before, after = (self.positions, self.rows) if adjoint else (self.rows, self.positions)
        x, columns, matrix = self._right_hand_sides(b, before, n, check)
        triangles = [(True, True), (False, False)]  # L, which has ones on its diagonal, then U
        for lower, unit in reversed(triangles) if adjoint else triangles:
            triangular.substitute(
                self.tiles, self._t, self.positions, x, n, columns, lower=lower, adjoint=adjoint, unit=unit
            )
        return self._home(x, after, columns, n, matrix, b)

    def carried(self, b: DistArray | Identity, last: bool = False) -> DistArray:
        """Return the solutions for the right-hand sides that were factored with A; the `last` use frees the factors."""
        self.check()
        n = self.shape[0]
        x = namespace(self._further).ascontiguousarray(self._further)
        triangular.substitute(self.tiles, self._t, self.positions, x, n, self._more, lower=False)
        if last:
            self.give_up()
        return self.tiles.home(x, self.positions, self._more, b.shape, b.layout.with_partial(()))  # type: ignore[arg-type]

    def sizes_of_inverse(self, order: Any) -> DistArray:
        """Return what the norm of A⁻¹ of an order is made of, without the inverse, of which some columns exist at once.

        Those are the sums of sizes in each column [1, n] for the orders 1 and -1, the sums in each row [1, n] for inf
        and -inf, and for "fro" the lengths [R, n] of what each grid row has of a column.  Columns are permuted.

        Raises
        ------
        LinAlgError
            If A is singular.
        """
        self.check()
        n, tiles, grid, frobenius = self.shape[0], self.tiles, self.grid, order == "fro"
        every = grid.backend.empty((0, 0), self._t.real.dtype)
        if grid.inside:
            xp, rows, in_rows = namespace(self._t), self.positions, not frobenius and abs(order) == math.inf
            total, found = xp.zeros(len(rows[tiles.i]), every.dtype), []
            parts = max(1, min(PARTS, n // NARROW))
            cuts = [[np.arange(a + j, b, tiles.C) for j in range(tiles.C)] for a, b in pairwise(
                n * part // parts for part in range(parts + 1)
            )]  # fmt: skip
            for sides in cuts:
                x = _ones_where_equal(rows[tiles.i], sides[tiles.j], grid, self.dtype)
                first = int(sides[0][0])  # above it L⁻¹ has zeros
                triangular.substitute(tiles, self._t, rows, x, n, sides, lower=True, unit=True, since=first, split=2)
                triangular.substitute(tiles, self._t, rows, x, n, sides, lower=False, split=2)
                with np.errstate(all="ignore"):
                    size = abs(x)
                    del x
                    if in_rows:
                        total += size.sum(axis=1)
                    else:
                        found.append(_lengths(size) if frobenius else size.sum(axis=0))
                    del size
            mine = total if in_rows else xp.concatenate(found)
            with np.errstate(all="ignore"):
                if not frobenius:
                    (tiles.across if in_rows else tiles.down).all_reduce(mine)
            counts = [sum(len(sides[j]) for sides in cuts) for j in range(tiles.C)]
            along, counts = (tiles.down, [len(x) for x in rows]) if in_rows else (tiles.across, counts)
            every = SharedCollectives(along, None).all_gather(mine[:, None], counts)[:, 0][None]
            if frobenius:
                every = SharedCollectives(tiles.down, None).all_gather(every, [1] * tiles.R)
        return distributed(every, Layout(None, None), grid, (tiles.R if frobenius else 1, n))

    def give_up(self) -> None:
        """Free the memory of the factors, which nobody needs any more."""
        self._t = self._further = self._t[:0].copy()

    def factors(self) -> tuple[DistArray, DistArray]:
        """Return L [m, k] and U [k, n] in the layout of A."""
        (m, n), k = self.shape, min(self.shape)
        every = [x[x < k] for x in self._columns]
        lower = upper = self.grid.backend.empty((0, 0), self.dtype)
        if self.grid.inside:
            rows, columns = self.positions[self.tiles.i], self._columns[self.tiles.j]
            t, xp = self._t[:, : len(columns)], namespace(self._t)
            inner, mine = (int(np.searchsorted(each, k)) for each in (rows, columns))
            down, across = kernels.beside(rows, t)[:, None], kernels.beside(columns, t)[None, :]
            lower = xp.where(down > across[:, :mine], t[:, :mine], down == across[:, :mine])
            upper = xp.where(down[:inner] <= across, t[:inner], self.dtype.type(0))
        tops = [x[x < k] for x in self.positions]
        return (
            self.tiles.home(lower.astype(self.dtype, copy=False), self.positions, every, (m, k), self.layout),
            self.tiles.home(upper.astype(self.dtype, copy=False), tops, self._columns, (k, n), self.layout),
        )

    def _diagonal_and_order(self) -> tuple[np.ndarray, np.ndarray]:
        if self.shape[0] != self.shape[1]:
            raise LinAlgError(f"only square matrices have determinants, not {self.shape}")
        return self.diagonal, self.permutation


def _lengths(sizes: Any) -> Any:
    """Return the lengths of columns, of which these are the sizes of elements, overwritten; squares stay in range."""
    xp = namespace(sizes)
    top = sizes.max(axis=0) if len(sizes) else xp.zeros(sizes.shape[1], sizes.dtype)
    unit = xp.where(top > 0, top, xp.ones_like(top))
    sizes /= unit
    sizes *= sizes
    return xp.sqrt(sizes.sum(axis=0)) * unit


class QRFactor(Factor):
    """The factorization A = Q R by Householder reflections; made by `qr_factor`.

    Without `keep` the reflections are dropped: it has R, and Qᴴ b for a b that is factored with A.
    """

    on_host: ClassVar[bool] = False
    """True if the factorization is computed on the host even where A lies on a GPU."""
    _work: QR

    def __init__(
        self, a: DistArray, block: int | None = None, b: DistArray | None = None, name: str = "qr", keep: bool = True
    ) -> None:  # fmt: skip
        a = as_matrix(a, name)
        super().__init__(a)
        (m, n), self.tiles = a.shape, tiles_for(a, block, "qr")
        self.rows, self.columns = self.tiles.rows(m), self.tiles.columns(n)
        if b is not None:  # right-hand sides are further columns, in tiles behind those of A, and become Qᴴ b
            self._more = [x[x >= n] - n for x in self.tiles.columns(n + b.shape[1])]
        nonfinite = self._run(a, b, keep)
        refuse_nonfinite(nonfinite > 1, name)
        if nonfinite:  # sums of elements near the largest number are beyond it, though R may not be
            self._run(a, b, keep, 0.5**SMALLER)
            with np.errstate(over="ignore"):
                self._work.a *= self.dtype.type(2.0**SMALLER)

    def _run(self, a: DistArray, b: DistArray | None, keep: bool, scale: float = 1.0) -> float:
        """Factor A and b times a power of two; return 2 if they have NaNs or infinities, 1 if R has, else 0.

        Collective.
        """
        (m, n), width = a.shape, 0 if b is None else len(self._more[self.tiles.j])
        t = self.tiles.bring(a, self.rows, self.columns, more=width)
        if b is not None:
            sides = self.tiles.bring(b, self.rows, self._more)
            if self.grid.inside:
                t[:, t.shape[1] - width :] = sides
            del sides
        if scale != 1:
            t *= self.dtype.type(scale)
        finite = kernels.finite(t)
        self._work = QR(self.tiles, t, (m, n), 0 if b is None else b.shape[1], keep)
        del t
        with np.errstate(all="ignore"):
            self._work.run()
        mine = len(self.tops[self.tiles.i]) if self.grid.inside else 0
        r = self._work.a[:mine, : len(self.columns[self.tiles.j])]
        return self.tiles.worst([2 if not finite else not kernels.finite(r)])[0]

    @cached_property
    def tops(self) -> list[Numbers]:
        """For every grid row the rows of R that it has."""
        return [x[x < min(self.shape)] for x in self.rows]

    @cached_property
    def _r(self) -> Any:
        """This rank's rows of R, and of the further columns."""
        return self._work.a[: len(self.tops[self.tiles.i]) if self.grid.inside else 0]

    def _tiles_of_r(self) -> Any:
        """Return this rank's tiles of R."""
        return self._r[:, : len(self.columns[self.tiles.j])] if self.grid.inside else self._r

    @property
    def R(self) -> DistArray:
        """The upper triangular factor [k, n] with k = min(m, n), in the layout of A."""
        n, k = self.shape[1], min(self.shape)
        return self.tiles.home(self._tiles_of_r(), self.tops, self.columns, (k, n), self.layout)

    def whole_r(self) -> Any:
        """Return R [k, n] on every rank of the grid, and no elements on others.  Collective."""
        n, k, size = self.shape[1], min(self.shape), self.grid.size
        have, want = self.tiles.places(self.tops, self.columns), [(np.arange(k), np.arange(n))] * size
        return move(self._tiles_of_r(), have, want, self.grid)

    def given_up_r(self) -> Any:
        """Return this rank's tiles of R, and drop them from the factorization."""
        r = self._tiles_of_r()
        r = r.copy() if 2 * len(r) <= len(self._work.a) else r
        self._work.a = self._work.a[:0].copy()
        self.__dict__.pop("_r", None)
        return r

    def drop_r(self) -> None:
        """Drop R from the factorization, which then has Q alone."""
        self._work.a = self._work.a[:, :0].copy()
        self.__dict__.pop("_r", None)

    def Q(self, columns: int | None = None) -> DistArray:
        """Return the first columns of Q [m, m], by default min(m, n) of them, in the layout of A."""
        return self._q(columns)

    def only_q(self, columns: int | None = None) -> DistArray:
        """Return what `Q` does, but free R before it, and each reflection once it is applied."""
        self.drop_r()
        return self._q(columns, last=True)

    def _q(self, columns: int | None, last: bool = False) -> DistArray:
        m, k = self.shape[0], min(self.shape)
        k = k if columns is None else whole("columns of Q", columns, 0, m)
        every = self.tiles.columns(k)
        q = self.grid.backend.empty((0, 0), self.dtype)
        if self.grid.inside:
            mine = every[self.tiles.j]
            q = _ones_where_equal(self.rows[self.tiles.i], mine, self.grid, self.dtype)
            q = self.grid.backend.to_host(q) if self.on_host else q
            self._work.times(q, mine, last)
        return self.tiles.home(q, self.rows, every, (m, k), self.layout)

    def _diagonal(self) -> tuple[Numbers, Any]:
        """Return the numbers of the elements of R's diagonal that this rank has, and these."""
        return on_diagonal(self._r, self.tops[self.tiles.i], self.columns[self.tiles.j])

    def extremes(self, b: DistArray) -> tuple[float, float, float]:
        """Return the least size of an element of R's diagonal and the largest ones of elements of R and of b.

        Those of R are 0 of NaNs.  Of complex elements of b the real and imaginary parts count.  Collective; inf and 0
        without elements, ones on imagined ranks.
        """
        least, most, side = math.inf, 0.0, 0.0
        if not self.grid.backend.values:
            least = most = side = 1.0
        elif self.grid.inside and b.block.size:
            parts = (b.block.real, b.block.imag) if b.dtype.kind == "c" else (b.block,)
            side = max(max(float(each.max()), -float(each.min())) for each in parts)
        if self.grid.backend.values and self.grid.inside and self._r.size:
            r, diagonal = self._tiles_of_r(), abs(self._diagonal()[1])
            least = float(diagonal.min()) if diagonal.size else least
            for start in range(0, len(r) if r.size else 0, self.tiles.size):  # little is held beside R
                most = float(np.maximum(most, float(abs(r[start : start + self.tiles.size]).max())))  # or a NaN
            if not math.isfinite(most):
                least = most = 0.0
        less, most, side = self.tiles.worst([-least, most, side])
        return -less, most, side

    @cached_property
    def zero(self) -> int | None:
        """The first zero of R's diagonal; None where A has full rank.  The first use is collective."""
        k, zeros = min(self.shape), np.zeros(0, int)
        if self.grid.inside:
            numbers, diagonal = self._diagonal()
            zeros = numbers[kernels.zeros(diagonal)]
        found = int(self.tiles.worst([k - zeros[0] if len(zeros) else 0])[0])
        return k - found if found else None

    @primitive
    def solve(self, b: DistArray) -> DistArray:
        """Return the x for which ‖A x - b‖ is least, for b of shape (m,) or (m, k), in the layout of b.

        A is taken to have full rank: like LAPACK's `gels`, this refuses only exact zeros on the diagonal of R.  Columns
        that are dependent to rounding give a huge x; `lstsq` finds the rank, and the x of least norm.

        Raises
        ------
        LinAlgError
            If A has more columns than rows, or an element of R's diagonal is 0, which it names.
        ValueError
            If b has NaNs or infinities.
        """
        return self.solution(b, check=True)

    def solution(self, b: DistArray, *, check: bool = False) -> DistArray:
        """Return what `solve` does; without `check`, NaNs and infinities of b make NaNs of x."""
        m, n = self.shape
        if m < n:
            raise LinAlgError(
                f"the QR factorization of a matrix {self.shape} does not give solutions of least norm; lstsq does"
            )
        if self.zero is not None:
            raise LinAlgError(f"the columns are dependent: R[{self.zero}, {self.zero}] is 0; lstsq takes them")
        x, columns, matrix = self._right_hand_sides(b, self.rows, m, check)
        if self.grid.inside:
            for each in self._work.kept:
                reflect(self.tiles, each.y, each.t, x[self._work.row(each.k) :], adjoint=True)
        x = namespace(x).ascontiguousarray(x[: len(self._r)])
        triangular.substitute(self.tiles, self._r, self.tops, x, n, columns, lower=False)
        return self._home(x, self.tops, columns, n, matrix, b)

    def carried(self, b: DistArray, solve: bool) -> DistArray:
        """Return the first n rows c of Qᴴ b, where b was factored with A, or with `solve` x of R x = c; like b."""
        n = self.shape[1]
        x = self._r
        if self.grid.inside:
            x = namespace(x).ascontiguousarray(x[:, len(self.columns[self.tiles.j]) :])
        if solve:
            triangular.substitute(self.tiles, self._r, self.tops, x, n, self._more, lower=False)
        return self.tiles.home(x, self.tops, self._more, (n, b.shape[1]), b.layout.with_partial(()))

    def substituted(self, b: DistArray, adjoint: bool = False) -> DistArray:
        """Return x of R x = b, or with `adjoint` of Rᴴ x = b, for m ≥ n and b [n, k] of any precision; like b."""
        n, columns = self.shape[1], self.tiles.columns(b.shape[1])
        x, r = self.tiles.bring(b, self.tops, columns), self._r.astype(b.dtype, copy=False)
        triangular.substitute(self.tiles, r, self.tops, x, n, columns, lower=False, adjoint=adjoint)
        return self.tiles.home(x, self.tops, columns, b.shape, b.layout.with_partial(()))  # type: ignore[arg-type]

    def times_q(self, b: DistArray, last: bool = False, complete: bool = False) -> DistArray:
        """Return Q b [m, k], for b of at most m rows, with the layout of b; the `last` use frees the reflections.

        With `complete` the columns of Q that b does not turn follow, those from the number of its rows on.
        """
        (m, _), (least, width) = self.shape, b.shape
        tops, columns = [x[x < least] for x in self.rows], self.tiles.columns(width)
        x = top = self.tiles.bring(b, tops, columns)
        if complete:
            width += m - least
            columns = self.tiles.columns(width)
        if self.grid.inside:
            x = completed(top, self.rows[self.tiles.i], columns[self.tiles.j], b.shape, self.grid)
            del top
            self._work.times(x, last=last)
        return self.tiles.home(x, self.rows, columns, (m, width), b.layout.with_partial(()))


class PivotedQRFactor(QRFactor):
    """The factorization A[:, p] = Q R with column pivoting."""

    on_host = True

    def __init__(self, a: DistArray) -> None:
        Factor.__init__(self, a)
        (m, n), self.tiles = a.shape, Tiles(a.grid, PANEL, "wide", workers=at_work(a.grid, "pivoted"))
        self.rows, columns = self.tiles.rows(m), self.tiles.columns(n)
        t = self.tiles.bring(a, self.rows, columns, host=True)
        self._scale = scaled(self.tiles, [t], t.dtype, "qr")
        self._work = work = PivotedQR(self.tiles, t, (m, n))
        del t
        with np.errstate(all="ignore"):
            work.run()
        places = np.argsort(work.order)
        self.columns = [work.places if j == self.tiles.j else places[x] for j, x in enumerate(columns)]
        self.p = distributed(work.order, Layout(self.layout.dims[1]), self.grid)

    @property
    def R(self) -> DistArray:
        """The upper triangular factor [k, n] with k = min(m, n), in the layout of A."""
        found = super().R
        return found if self._scale == 1 else found / self._scale


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


@primitive
def lu_factor(a: DistArray, block: int | None = None, *, depth: int | None = None) -> LUFactor | LUStack:
    """Return the factorization P A = L U of a matrix [m, n] in its working form, by tournament pivoting.

    A stack of matrices [..., m, n] gives a stack of factorizations, by partial pivoting where matrices are distributed.
    `block` and `depth` are as in `cho_factor`.
    """
    as_matrix(a, "lu_factor")
    block, depth = checked_tiles("lu_factor", a, block, depth)
    if a.ndim > 2:
        from parlinalg.linalg.stacks import LUStack

        return LUStack(a, block)
    return LUFactor(a, block, depth=depth)


def lu_solve(factor: Any, b: DistArray, /, *, adjoint: bool = False) -> DistArray:
    """Return x of A x = b, or with `adjoint` of Aᴴ x = b, from the factorization that `lu_factor` made of A.

    This is `factor.solve(b, adjoint)`, by SciPy's name; `b` has shape (n,), (n, k) or (..., n, k).

    Raises
    ------
    LinAlgError
        If A is singular.
    """
    return _solved("lu", factor, b, adjoint)


def cho_solve(factor: Any, b: DistArray, /) -> DistArray:
    """Return x of A x = b from the factorization that `cho_factor` made of A.

    This is `factor.solve(b)`, by SciPy's name; `b` has shape (n,), (n, k) or (..., n, k).
    """
    return _solved("cho", factor, b)


def _solved(kind: str, factor: Any, *given: Any) -> Any:
    """Return `factor.solve(*given)` of a factorization of this kind, of arrays or tensors; name SciPy's function."""
    if getattr(factor, "maker", None) != f"{kind}_factor":
        raise TypeError(
            f"{kind}_solve takes what {kind}_factor(A) returns, not an object of type {type(factor).__name__}"
        )
    try:
        return factor.solve(*given)
    except (TypeError, ValueError) as error:
        if not str(error).startswith("solve"):
            raise
        raise type(error)(f"{kind}_{error}") from None


@primitive
def qr_factor(a: DistArray, block: int | None = None) -> QRFactor | QRStack:
    """Return the factorization A = Q R of a matrix [m, n], or those of matrices [..., m, n], in their working form."""
    as_matrix(a, "qr_factor")
    block, _ = checked_tiles("qr_factor", a, block)
    if a.ndim > 2:
        from parlinalg.linalg.stacks import QRStack

        return QRStack(a, block)
    return QRFactor(a, block)


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


@overload
def qr(x: DistArray, /, *, mode: Literal["r"], pivoting: Literal[False] = False) -> DistArray: ...  # type: ignore[overload-overlap]
@overload
def qr(x: DistArray, /, *, mode: str = "reduced", pivoting: Literal[False] = False) -> QRResult: ...
@overload
def qr(x: DistArray, /, *, mode: Literal["r"], pivoting: Literal[True]) -> tuple[DistArray, DistArray]: ...  # type: ignore[overload-overlap]
@overload
def qr(x: DistArray, /, *, mode: str = "reduced", pivoting: Literal[True]) -> PivotedQRResult: ...


@primitive
def qr(
    x: DistArray, /, *, mode: str = "reduced", pivoting: bool = False
) -> QRResult | DistArray | PivotedQRResult | tuple[DistArray, DistArray]:
    """Return Q [..., m, k] and R [..., k, n] of matrices [..., m, n], in their layout.

    Parameters
    ----------
    mode : {"reduced", "complete", "r"}
        k = min(m, n), or m.  "r" returns R of the reduced factorization alone, and makes no Q.
    pivoting : bool
        Return Q, R and p [..., n], or R and p, with A[:, p] = Q R, as `scipy.linalg.qr` does, by LAPACK's `geqp3`: of
        the columns that are left the one with the largest remainder comes next, so that the sizes of R's diagonal do
        not rise.  Where one of them is small beside the first, so is all of R from there on, and the first columns of
        A[:, p] span the others, to about that size.  Ranks agree on one column after the other; p is cut as the columns
        of A are.
    """
    x = as_matrix(x, "qr")
    if not isinstance(mode, str) or mode not in ("reduced", "complete", "r"):
        raise ValueError(f"qr: mode is 'reduced', 'complete' or 'r', not {mode!r}")
    if pivoting:
        *q, r, p = _pivoted(x, mode)
        return PivotedQRResult(q[0], r, p) if q else (r, p)
    if mode == "r":
        return _triangle(x)
    one = x.ndim == 2
    if one and mode == "reduced" and not (x.grid.backend.cpu and _small(x)) and (found := tall_qr(x)) is not None:
        return found
    if not one or (x.grid.size == 1 and not x.grid.backend.cpu) or _small(x):
        return QRResult(
            *batches("qr", lambda xp, a: tuple(kernels.routines(a).qr(a, mode)), lambda a: qr(a, mode=mode), x)
        )
    m, n = x.shape
    work = QRFactor(x)
    r = work.R
    if mode == "reduced" or m <= n:
        return QRResult(work.only_q(), r)
    return QRResult(work.only_q(m), padded(r, [(0, m - n), (0, 0)]))


def _small(x: DistArray) -> bool:
    """Return True if one call of LAPACK is the fastest QR factorization of a matrix on one rank."""
    return x.grid.size == 1 and min(x.shape) <= SIZE


def _triangle(x: DistArray) -> DistArray:
    """Return R [..., k, n] of the factorizations A = Q R of matrices [..., m, n], as `qr` does, and make no Q."""
    one = x.ndim == 2
    if one and not (x.grid.backend.cpu and _small(x)) and (found := tall_r(x)) is not None:
        return found
    if not one or (x.grid.size == 1 and not x.grid.backend.cpu) or _small(x):
        return batches("qr", lambda xp, a: kernels.routines(a).qr(a, "r"), _triangle, x)[0]
    return QRFactor(x, keep=False).R


def _pivoted(x: DistArray, mode: str) -> tuple[DistArray, ...]:
    """Return Q, R and p of matrices with A[:, p] = Q R, p cut as their columns; with the mode "r" R and p.

    Of a matrix with many more rows than columns the columns of R, which have the same norms, are chosen.
    """
    (m, n), layout = x.shape[-2:], x.layout.with_partial(())
    long = x.ndim == 2 and mode != "complete" and m > LONG * n and n
    if x.ndim > 2 or (x.grid.size == 1 and not (long and by_qr_first(x))):
        *others, p = batches("qr", lambda xp, a: kernels.pivoted_qr(a, mode), lambda a: _pivoted(a, mode), x)
        return *others, p.redistribute(Layout(*x.layout.dims[:-2], x.layout.dims[-1]))
    if long:
        if mode == "r" and (triangle := tall_r(x)) is not None:
            return _pivoted(triangle, mode)
        if mode != "r" and (tall := tall_qr(x)) is not None:
            inner, r, p = _pivoted(tall.R, mode)
            return matmul(tall.Q, inner).redistribute(layout), r, p
        work = QRFactor(x, keep=mode != "r")
        triangle = work.R
        work.drop_r()
        *q, r, p = _pivoted(triangle, mode)
        del triangle
        return *(work.times_q(each, last=True) for each in q), r, p
    factor = PivotedQRFactor(x)
    r, p = factor.R, factor.p
    if mode == "r":
        return r, p
    if mode == "reduced" or m <= n:
        return factor.only_q(), r, p
    return factor.only_q(m), padded(r, [(0, m - n), (0, 0)]), p


def q_above_identity(a: DistArray, scale: float) -> tuple[DistArray, DistArray]:
    """Return Q [m, n] and P [n, n] with orthonormal columns [Q; P] that span those of [scale A; I], in the layout of A.

    Each rank makes its rows of the identity, and the reflections are held once, not by all ranks of a node.
    """
    (m, n), grid, layout = a.shape, a.grid, a.layout
    tiles = tiles_for(a, None, "qr", shape=(m + n, n))
    rows, columns = tiles.rows(m + n), tiles.columns(n)
    tops, rest = [x[x < m] for x in rows], [x[x >= m] - m for x in rows]
    first = last = t = tiles.bring(a, tops, columns)
    if grid.inside:
        mine, at = columns[tiles.j], len(tops[tiles.i])
        t *= a.real.dtype.type(scale)
        t = namespace(t).concatenate([t, _ones_where_equal(rest[tiles.i], mine, grid, a.dtype)])
        del first, last
        work = QR(tiles, t, (m + n, n), hold_once=True)
        del t
        with np.errstate(all="ignore"):
            work.run()
        work.a = work.a[:, :0].copy()  # R is not needed
        q = _ones_where_equal(rows[tiles.i], mine, grid, a.dtype)
        work.times(q, mine, last=True)
        first, last = q[:at], q[at:]
        del q
    found = tiles.home(first, tops, columns, (m, n), layout)
    del first
    return found, tiles.home(last, rest, columns, (n, n), layout)


def tall_qr(x: DistArray) -> QRResult | None:
    """Return Q and R of a matrix of few columns by its Gram matrix, without tiles; None of an ill conditioned one."""
    if (found := nearly_q(x)) is None:
        return None
    (y, last, r, rest), grid, layout = found, x.grid, x.layout.with_partial(())
    if grid.inside:
        kernels.substitute(last, y, right=True, lower=True, adjoint=True)
    q = DistArray(y, x.shape, rest, grid).redistribute(layout)
    return QRResult(q, distributed(r, layout, grid, (x.shape[1],) * 2))


def tall_r(x: DistArray) -> DistArray | None:
    """Return R of `tall_qr`, without the last products of Q."""
    if (found := nearly_q(x)) is None:
        return None
    return distributed(found[2], x.layout.with_partial(()), x.grid, (x.shape[1],) * 2)


def nearly_q(x: DistArray) -> tuple[Any, Any, Any, Layout] | None:
    """Return this rank's rows Y of Q = Y L⁻ᴴ, L and R, which all ranks have, and the layout of Y: for `tall_qr`.

    Each rank has at least as many rows as columns.  None of an ill conditioned matrix, or of one with more columns.
    """
    grid, rest = x.grid, by_rows(x)
    if rest is None:
        return None
    y = r = last = grid.backend.empty((0, 0), x.dtype)
    sound = True
    if grid.inside:
        y = x.redistribute(rest).block.copy(order="C")
        with np.errstate(all="ignore"):
            r, sound, last = nearly_orthogonalized(y, grid.everyone)
    return None if grid.world.share(sound, others="alike").count(False) else (y, last, r, rest)


def by_qr_first(x: DistArray) -> bool:
    """Return True if on one rank singular values or pivots of a matrix are sooner found by QR, of R.

    A matrix on the host must be large, and have many more rows than columns, or columns than rows.
    """
    large = x.size * x.dtype.itemsize >= kernels.LARGE and max(x.shape) >= LONG_OF_ONE * min(x.shape)
    return not x.grid.backend.cpu or large


def by_rows(x: DistArray) -> Layout | None:
    """Return the layout in which only rows are cut, of a matrix with few columns; None of others."""
    return rows_alone(x.grid.sizes) if by_gram(x.shape, x.grid.size) else None


@primitive
def lu(a: DistArray) -> tuple[DistArray, DistArray, DistArray]:
    """Return P, L and U of matrices [..., m, n], A = P L U, as `scipy.linalg.lu` does, in the layout of A."""
    work = lu_factor(a)
    return (work.P, *work.factors())


def completed(z: Any, rows: Numbers, columns: Numbers, shape: tuple[int, ...], grid: Grid) -> Any:
    """Return these rows and columns of [[Z, 0], [0, 1]], for this rank's part z of a matrix Z of a shape."""
    high, wide = z.shape
    if (high, wide) == (len(rows), len(columns)):
        return z
    found = namespace(z).zeros((len(rows), len(columns)), z.dtype)
    found[:high, :wide] = z
    found[high:, wide:] = _ones_where_equal(rows[high:] - shape[0], columns[wide:] - shape[1], grid, z.dtype)
    return found


def _ones_where_equal(rows: Numbers, columns: Numbers, grid: Grid, dtype: np.dtype[Any]) -> Any:
    """Return these rows and columns of the identity, on the device of the grid's blocks."""
    backend = grid.backend
    if not backend.values:
        return backend.zeros((len(rows), len(columns)), dtype)
    return (backend.from_host(rows)[:, None] == backend.from_host(columns)[None, :]).astype(dtype)
