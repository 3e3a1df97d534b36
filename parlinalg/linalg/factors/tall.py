"""The factorization A = Q R of matrices with few columns by their Gram matrices, without tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors import QRResult
from parlinalg.linalg.matrices import (
    distributed,
)
from parlinalg.linalg.panels.qr import nearly_orthogonalized
from parlinalg.linalg.tile_sizes import by_gram, rows_alone

if TYPE_CHECKING:
    pass


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


def by_rows(x: DistArray) -> Layout | None:
    """Return the layout in which only rows are cut, of a matrix with few columns; None of others."""
    return rows_alone(x.grid.sizes) if by_gram(x.shape, x.grid.size) else None
