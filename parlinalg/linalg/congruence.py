"""Triangular solves from both sides of a matrix, and Hermitian parts, on tiles and in place.

A derivative holds a gradient beside all that the forward pass kept, and A v = w B v has two matrices and a factor.  So
these functions spend what they are given: its memory is freed as soon as it lies on tiles, and a triangle is brought
there only then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.backend import namespace
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.matrices import spend, tiles_for
from parlinalg.linalg.panels import triangular
from parlinalg.linalg.systems import refuse_singular
from parlinalg.linalg.tiles import Numbers, Places, Tiles, move, resting, transposed

STRIP = 128
"""The most rows that are replaced at once where a matrix is changed in place."""
PARTS = 16
"""Parts of a block of which temporary arrays exist at once; what other ranks send comes in half as many."""


def halve(a: DistArray) -> DistArray:
    """Return the lower triangle of a matrix with half its diagonal, in the memory of A."""
    if not a.grid.inside:
        return a
    rows, columns = a.grid.block(a.layout, a.shape)
    xp, block = a.xp, a.block
    j = xp.arange(columns.start, columns.stop)[None, :]
    for at in _strips(block):
        i, strip = xp.arange(rows.start + at.start, rows.start + at.stop)[:, None], block[at]
        block[at] = xp.where(j < i, strip, xp.where(j == i, strip / 2, a.dtype.type(0)))
    return a


def congruent(
    e: DistArray, l: DistArray, *, adjoint: bool = True, mirror: bool = False, last: bool = False
) -> DistArray:  # fmt: skip
    """Return the Hermitian part of L⁻ᴴ E L⁻¹ for a lower triangle L, in the layout of E, which is spent.

    Parameters
    ----------
    e, l : DistArray [n, n]
        Of one dtype.
    adjoint : bool
        If False, the result is that of L⁻¹ E L⁻ᴴ.
    mirror : bool
        E is the Hermitian matrix with the lower triangle of what is given; of its diagonal real parts count.
    last : bool
        L is spent, too.

    L is a factor by Cholesky's method, and so not singular.
    """
    n, grid, layout = l.shape[0], l.grid, e.layout.with_partial(())
    if grid.size == 1:
        x = _own(spend(e))
        with np.errstate(all="ignore"):
            if grid.inside and n:
                if mirror:
                    _reflect(x.T)
                kernels.substitute(l.block, x, lower=True, adjoint=adjoint)
                kernels.substitute(l.block, x, right=True, lower=True, adjoint=not adjoint)
                _average(x)
        found = DistArray(x, (n, n), layout, grid)
    else:
        tiles, rows, columns, places = _tiled(l)
        x = tiles.bring(e, rows, columns)
        spend(e)
        if mirror:
            _mirror(x, places, grid, upper=False)
        t = tiles.bring(l, rows, columns)
        if last:
            spend(l)
        for turn in range(2):
            x = _turned(x, places, grid) if turn else x
            triangular.substitute(tiles, t, rows, x, n, columns, lower=True, adjoint=adjoint)
        del t
        with np.errstate(all="ignore"):
            _average_with(x, _turned(x, places, grid))
        found = tiles.home(x, rows, columns, (n, n), layout)
    return found


def divided(a: DistArray, r: DistArray) -> DistArray:
    """Return A R⁻ᴴ for an upper triangle R, in the layout of A, which is spent.

    Raises
    ------
    LinAlgError
        If R is singular.
    """
    (m, n), grid, layout = a.shape, a.grid, a.layout.with_partial(())
    if grid.size == 1:
        x = _own(spend(a))
        if grid.inside and x.size:
            with np.errstate(all="ignore"):
                kernels.substitute(r.block, x, right=True, adjoint=True)
        found = DistArray(x, (m, n), layout, grid)
    else:  # R⁻¹ Aᴴ, since tiles are divided from the left
        tiles, rows, columns, _ = _tiled(r)
        sides = tiles.columns(m)
        aside = a.mT
        x = tiles.bring(aside, rows, sides)
        del aside
        spend(a)
        _conjugate(x)
        t = tiles.bring(r, rows, columns)
        triangular.substitute(tiles, t, rows, x, n, sides, lower=False)
        del t
        _conjugate(x)
        x, have = x.T, transposed(tiles.places(rows, sides))
        found = tiles.home_from(x, have, (m, n), layout)
    refuse_singular(r, found, unit=False)
    return found


def skew(a: DistArray) -> DistArray:
    """Return (A - Aᴴ) / 2, in the memory of A."""
    grid, block = a.grid, a.block
    if grid.size == 1:
        if grid.inside:
            _average(block, -1)
        return a
    places, _ = resting(a.layout, a.shape, grid.sizes)
    _average_with(block, _turned(block, places, grid), -1)
    return a


def over_differences(a: DistArray, w: DistArray, limit: DistArray, sums: int = 0) -> DistArray:
    """Return A with elements divided by wⱼ - wᵢ, and 0 where this is at most `limit` in size, in the memory of A.

    With `sums` ±1 they are multiplied by 1 / (wⱼ - wᵢ) ± 1 / (wᵢ + wⱼ), of which each term may be 0.
    """
    layout = a.layout
    down, across = (w.redistribute(Layout(cut)).block for cut in layout.dims)
    least, xp, zero, one = limit.summed().block, a.xp, w.dtype.type(0), w.dtype.type(1)

    def inverse(x: Any) -> Any:
        kept = abs(x) > least
        return xp.where(kept, one / xp.where(kept, x, one), zero)

    for at in _strips(a.block) if a.grid.inside else ():
        strip, some = a.block[at], down[at, None]
        factor = inverse(across[None, :] - some)
        strip *= factor + sums * inverse(across[None, :] + some) if sums else factor
    return a


def mirrored(a: DistArray) -> DistArray:
    """Return the Hermitian matrix with the upper triangle of A, in whose diagonal real parts count; A is changed."""
    grid, block = a.grid, a.block
    if grid.size == 1:
        if grid.inside:
            _reflect(block)
        return a
    places, _ = resting(a.layout, a.shape, grid.sizes)
    _mirror(block, places, grid, upper=True)
    return a


def _tiled(t: DistArray) -> tuple[Tiles, list[Numbers], list[Numbers], Places]:
    """Return the tiles for a triangle, all rows and columns on them, and their places."""
    tiles = tiles_for(t, None, "solve_triangular")
    rows, columns = tiles.rows(t.shape[0]), tiles.columns(t.shape[0])
    return tiles, rows, columns, tiles.places(rows, columns)


def _own(block: Any) -> Any:
    """Return the block, or a copy in C order where it cannot be written in place as BLAS does."""
    return block if block.flags.c_contiguous and block.base is None else block.copy(order="C")


def _conjugate(x: Any) -> None:
    """Conjugate an array in place."""
    if x.dtype.kind == "c":
        for at in _strips(x):
            x[at] = x[at].conj()


def _turned(x: Any, places: Places, grid: Grid) -> Any:
    """Return the adjoint of a square matrix on tiles; x is conjugated and back."""
    _conjugate(x)
    found = move(x.T, transposed(places), places, grid)
    _conjugate(x)
    return found


def _mirror(x: Any, places: Places, grid: Grid, *, upper: bool) -> None:
    """Replace one triangle of a square matrix by the adjoint of the other, the `upper` one or the lower.

    Of its diagonal real parts count.  What is read is not written, so that a part of each rank's rows is received, and
    replaced, before the next.
    """
    xp, few = namespace(x), PARTS // 2
    for part in range(few):
        want = [(_part(rows, part, few), columns) for rows, columns in places]
        wanted = np.unique(np.concatenate([rows for rows, _ in want]))
        have = [(np.flatnonzero(np.isin(columns, wanted)), columns, rows) for rows, columns in places]
        if not grid.inside:
            continue
        there = have[grid.rank][0]
        y = move(x[:, kernels.beside(there, x)].T, [(columns[at], rows) for at, columns, rows in have], want, grid)
        _conjugate(y)
        start = len(x) * part // few
        rows, columns = (kernels.beside(numbers, x) for numbers in want[grid.rank])
        for at in _strips(y):
            mine = x[start + at.start : start + at.stop]
            i, j = rows[at, None], columns[None, :]
            both = xp.where(i > j if upper else i < j, y[at], mine)
            mine[...] = xp.where(i == j, both.real, both) if x.dtype.kind == "c" else both


def _part(numbers: Numbers, part: int, of: int) -> Numbers:
    """Return part number `part` of `of` equal parts of numbers."""
    return numbers[len(numbers) * part // of : len(numbers) * (part + 1) // of].copy()


def _average_with(x: Any, y: Any, sign: int = 1) -> None:
    """Replace X by (X ± Y) / 2."""
    for at in _strips(x):
        part = x[at]
        if sign > 0:
            part += y[at]
        else:
            part -= y[at]
        part /= 2


def _strips(x: Any) -> list[slice]:
    """Return the rows that are replaced at once."""
    step = max(1, min(STRIP, len(x) // PARTS))
    return [slice(k, min(k + step, len(x))) for k in range(0, len(x), step)]


def _average(x: Any, sign: int = 1) -> None:
    """Replace a square matrix by (X ± Xᴴ) / 2."""
    for at in _strips(x):
        left = x[at.start :, at]
        both = left + sign * kernels.adjoint(x[at, at.start :])
        both /= 2
        left[...] = both
        x[at, at.start :] = sign * kernels.adjoint(both)


def _reflect(x: Any) -> None:
    """Replace the lower triangle of a square matrix by the adjoint of the upper one, and its diagonal by real parts."""
    xp = namespace(x)
    for at in _strips(x):
        corner = x[at, at]
        above = xp.triu(corner, 1)
        diagonal = xp.triu(corner) - above
        corner[...] = above + kernels.adjoint(above) + diagonal.real
        x[at.stop :, at] = kernels.adjoint(x[at, at.stop :])
