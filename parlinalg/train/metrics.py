"""Numbers that say how training goes."""

from __future__ import annotations

import numpy as np

from parlinalg.array import DistArray
from parlinalg.backend import namespace

__all__ = ["correct"]


def correct(logits: DistArray, targets: DistArray) -> int:
    """Return the number of rows of logits that are largest at their target.  Collective.

    Parameters
    ----------
    logits : DistArray
        [samples, classes]; the classes may be cut.
    targets : DistArray
        [samples], cut as the rows of `logits`.
    """
    grid, block = logits.grid, logits.block
    rows, classes = logits.layout.dims
    xp = namespace(block)
    count = xp.zeros(1, np.int64)
    if grid.inside:
        first = grid.block(logits.layout, logits.shape)[1]
        top = xp.full(block.shape[0], -np.inf, block.dtype)
        if block.shape[1]:
            block.max(axis=1, out=top)
        grid.comm(classes).all_reduce(top, op="max")
        column = targets.block - first.start
        here = xp.nonzero((column >= 0) & (column < len(first)))[0]
        count += (block[here, column[here]] >= top[here]).sum()
        grid.comm((*rows, *classes)).all_reduce(count)
    if grid.size < grid.world.size:
        grid.world.broadcast(count, 0)
    return int(count[0])
