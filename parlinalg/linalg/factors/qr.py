"""`qr_factor` and `qr`: the factorization A = Q R, also with pivoting among columns."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import padded
from parlinalg.backend import namespace
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import Factor, PivotedQRResult, QRResult, on_diagonal, ones_where_equal
from parlinalg.linalg.factors.tall import tall_qr, tall_r
from parlinalg.linalg.matrices import (
    LinAlgError,
    as_matrix,
    at_work,
    batches,
    checked_tiles,
    distributed,
    refuse_nonfinite,
    scaled,
    tiles_for,
)
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.panels.pivoted import LONG, PANEL, PivotedQR
from parlinalg.linalg.panels.qr import QR, reflect
from parlinalg.linalg.tiles import SIZE, Numbers, Tiles, move
from parlinalg.matmul import matmul

if TYPE_CHECKING:
    from parlinalg.linalg.stacks import QRStack


SMALLER = 30
"""A matrix whose R is not finite is factored again, divided by 2 to this power: sums of so many elements fit then."""


LONG_OF_ONE = 2
"""Rows of a matrix by its columns from which on one rank factors it by QR first."""


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
            q = ones_where_equal(self.rows[self.tiles.i], mine, self.grid, self.dtype)
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
def qr_factor(a: DistArray, block: int | None = None) -> QRFactor | QRStack:
    """Return the factorization A = Q R of a matrix [m, n], or those of matrices [..., m, n], in their working form."""
    as_matrix(a, "qr_factor")
    block, _ = checked_tiles("qr_factor", a, block)
    if a.ndim > 2:
        from parlinalg.linalg.stacks import QRStack

        return QRStack(a, block)
    return QRFactor(a, block)


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
        t = namespace(t).concatenate([t, ones_where_equal(rest[tiles.i], mine, grid, a.dtype)])
        del first, last
        work = QR(tiles, t, (m + n, n), hold_once=True)
        del t
        with np.errstate(all="ignore"):
            work.run()
        work.a = work.a[:, :0].copy()  # R is not needed
        q = ones_where_equal(rows[tiles.i], mine, grid, a.dtype)
        work.times(q, mine, last=True)
        first, last = q[:at], q[at:]
        del q
    found = tiles.home(first, tops, columns, (m, n), layout)
    del first
    return found, tiles.home(last, rest, columns, (n, n), layout)


def by_qr_first(x: DistArray) -> bool:
    """Return True if on one rank singular values or pivots of a matrix are sooner found by QR, of R.

    A matrix on the host must be large, and have many more rows than columns, or columns than rows.
    """
    large = x.size * x.dtype.itemsize >= kernels.LARGE and max(x.shape) >= LONG_OF_ONE * min(x.shape)
    return not x.grid.backend.cpu or large


def completed(z: Any, rows: Numbers, columns: Numbers, shape: tuple[int, ...], grid: Grid) -> Any:
    """Return these rows and columns of [[Z, 0], [0, 1]], for this rank's part z of a matrix Z of a shape."""
    high, wide = z.shape
    if (high, wide) == (len(rows), len(columns)):
        return z
    found = namespace(z).zeros((len(rows), len(columns)), z.dtype)
    found[:high, :wide] = z
    found[high:, wide:] = ones_where_equal(rows[high:] - shape[0], columns[wide:] - shape[1], grid, z.dtype)
    return found
