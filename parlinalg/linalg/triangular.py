"""Forward and backward substitution on tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.linalg import kernels
from parlinalg.linalg.tiles import Board, Numbers, Tiles


def substitute(
    tiles: Tiles, t: Any, rows: Sequence[Numbers], b: Any, n: int, *, lower: bool,
    adjoint: bool = False, unit: bool = False,
) -> None:  # fmt: skip
    """Replace b by the solution x of `op(T) x = b`.  Collective over the grid.

    Parameters
    ----------
    t : array
        This rank's rows and columns of T, [n, n]; the columns lie in tiles.  The other triangle is not read.
    rows : sequence of array
        For every grid row the numbers of its rows, rising.
    b : array
        The same rows of the right-hand sides; a grid column's ranks have the same columns.
    lower, adjoint, unit : bool
        T is a lower triangle; op(T) is its conjugate transpose; its diagonal is taken to be ones.
    """
    if not tiles.grid.inside:
        return
    if tiles.grid.size == 1:
        kernels.substitute(t[:, :n], b, lower=lower, adjoint=adjoint, unit=unit)
        return
    columns = tiles.columns(n)[tiles.j]
    mine, wide, xp = rows[tiles.i], b.shape[1], namespace(b)
    starts = range(0, n, tiles.size)
    for k in starts if lower != adjoint else reversed(starts):
        size = min(tiles.size, n - k)
        cuts = [np.searchsorted(each, [k, k + size]).tolist() for each in rows]
        lo, hi = cuts[tiles.i]
        j = tiles.owner(k)[1]
        panel = xp.empty((len(mine) - lo if lower else hi, size), b.dtype)  # T[k:, k] or T[:k, k], its corner included
        if tiles.j == j:
            c = int(np.searchsorted(columns, k))
            panel[...] = t[lo:, c : c + size] if lower else t[:hi, c : c + size]
        tiles.across.broadcast(panel, j)
        corner, rest = (panel[: hi - lo], panel[hi - lo :]) if lower else (panel[lo:], panel[:lo])
        others = slice(hi, len(mine)) if lower else slice(0, lo)
        both = Board(tiles.down, None).gather(xp.hstack([corner, b[lo:hi]]), [v - u for u, v in cuts])
        order = np.argsort(np.concatenate([each[u:v] for each, (u, v) in zip(rows, cuts, strict=True)]))
        diagonal, x = both[order, :size], xp.ascontiguousarray(both[order, size:])
        if adjoint:  # x[k] := op(T[k, k]) (b[k] - sum over i of T[i, k]ᴴ x[i])
            known = xp.ascontiguousarray(kernels.adjoint(rest) @ b[others]) if wide else xp.empty((size, 0), b.dtype)
            tiles.down.all_reduce(known)
            x -= known
        kernels.substitute(diagonal, x, lower=lower, adjoint=adjoint, unit=unit)
        b[lo:hi] = x[mine[lo:hi] - k]
        if not adjoint:  # b[i] := b[i] - T[i, k] x[k]
            kernels.subtract(b[others], rest, x)
