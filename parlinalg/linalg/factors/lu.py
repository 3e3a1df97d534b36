"""`lu_factor` and `lu`: the factorization P A = L U with pivoting among rows."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.create import computed
from parlinalg.array.dispatch import primitive
from parlinalg.backend import namespace
from parlinalg.comm.shared import SharedCollectives
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import Factor, Identity, WithDeterminant, ones_where_equal, solved
from parlinalg.linalg.matrices import (
    SINGULAR,
    LinAlgError,
    as_matrix,
    checked_tiles,
    distributed,
    refuse_nonfinite,
    spend,
    tiles_for,
)
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.panels.lu import LU
from parlinalg.linalg.tiles import Numbers, Tiles, move, transposed

if TYPE_CHECKING:
    from parlinalg.linalg.stacks import LUStack


PARTS, NARROW = 4, 128
"""The parts of columns in which an inverse is formed of which the norm alone is wanted, and their fewest columns."""


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
                x = ones_where_equal(rows[tiles.i], sides[tiles.j], grid, self.dtype)
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
    return solved("lu", factor, b, adjoint)


@primitive
def lu(a: DistArray) -> tuple[DistArray, DistArray, DistArray]:
    """Return P, L and U of matrices [..., m, n], A = P L U, as `scipy.linalg.lu` does, in the layout of A."""
    work = lu_factor(a)
    return (work.P, *work.factors())
