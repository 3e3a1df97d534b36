"""Factorizations of distributed matrices in their working form: what those of Cholesky, LU and QR share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Any, ClassVar, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.dispatch import primitive
from parlinalg.array.shapes import reshape
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.matrices import as_matrix, refuse_nonfinite, scalar
from parlinalg.linalg.panels.lu import determinant
from parlinalg.linalg.tiles import Numbers, Tiles


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


class WithDeterminant(ABC):
    """The determinant of a matrix whose factorization has triangles."""

    dtype: np.dtype[Any]
    grid: Grid

    @abstractmethod
    def _diagonal_and_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers whose product is the determinant, but for the sign of the order of rows, and this.

        Collective.
        """

    def det(self) -> DistArray:
        """Return the determinant of A."""
        return scalar(determinant(*self._diagonal_and_order())[0], self.dtype, self.grid)

    def slogdet(self) -> SlogdetResult:
        """Return the sign (or phase) of the determinant and the logarithm of its size."""
        diagonal, order = self._diagonal_and_order()
        _, sign, log = determinant(diagonal, order)
        return SlogdetResult(scalar(sign, self.dtype, self.grid), scalar(log, diagonal.real.dtype, self.grid))


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
        found = ones_where_equal(*tiles.places(rows, columns)[grid.rank], grid, dtype)
        if self.scale is not None:
            found *= self.scale
        return found


def on_diagonal(t: Any, rows: Numbers, columns: Numbers) -> tuple[Numbers, Any]:
    """Return the numbers of the elements of the diagonal among tiles with these rows and columns, and the elements."""
    numbers, at, also = np.intersect1d(rows, columns, return_indices=True)
    return numbers, t[at, also]


def solved(kind: str, factor: Any, *given: Any) -> Any:
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


def ones_where_equal(rows: Numbers, columns: Numbers, grid: Grid, dtype: np.dtype[Any]) -> Any:
    """Return these rows and columns of the identity, on the device of the grid's blocks."""
    backend = grid.backend
    if not backend.values:
        return backend.zeros((len(rows), len(columns)), dtype)
    return (backend.from_host(rows)[:, None] == backend.from_host(columns)[None, :]).astype(dtype)
