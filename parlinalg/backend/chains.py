"""Chains of operations, the plain forms of kernels, over chunks of blocks.

A chain passes over its arrays once an operation, so that on a CPU it goes over chunks that stay in a core's cache; on
a GPU a chunk is the whole block.  Blocks of 16-bit floats are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.backend import backend_of
from parlinalg.backend.views import flat

Block = Any

CHUNK = 1 << 15
"""Elements of a chunk on a CPU."""
ROWS_CHUNK = 1 << 16
"""Elements of a chunk of rows on a CPU, in kernels that sum along them."""


def work_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which blocks of `dtype` are computed: float32 for 16-bit floats."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def spans(n: int, like: Block, unit: int = 1, size: int = CHUNK) -> list[slice]:
    """Return runs that cover n units of so many elements of a block, on a CPU each of about `size` elements."""
    step = max(1, size // max(1, unit)) if backend_of(like).cpu else max(1, n)
    return [slice(at, min(n, at + step)) for at in range(0, n, step)]


def row_runs(rows: Block) -> list[slice]:
    """Return runs of rows of a matrix, on a CPU each of about ROWS_CHUNK elements."""
    return spans(len(rows), rows, rows.shape[1], ROWS_CHUNK)


def fused(chain: Callable[..., None], *blocks: Block, results: int = 1, scratch: int = 0) -> Any:
    """Return new blocks from blocks of one shape by `chain(xp, *chunks, *results, *scratch)`, called for every chunk.

    Parameters
    ----------
    results : int
        How many blocks the chain makes; one is returned as it is, more as a tuple.
    scratch : int
        How many arrays of a chunk's length it works with.
    """
    first, backend = blocks[0], backend_of(blocks[0])
    xp, work, n = backend.xp, work_dtype(first.dtype), first.size
    made = [xp.empty(first.shape, first.dtype) for _ in range(results)]
    arrays, targets = [flat(b) for b in blocks], [m.reshape(-1) for m in made]
    size = min(n, CHUNK) if backend.cpu else n
    cast = work != first.dtype
    room = [xp.empty(size, work) for _ in range(scratch + results * cast)]
    for at in range(0, n, max(1, size)):
        part, length = slice(at, at + size), min(size, n - at)
        spare = room if length == size else [r[:length] for r in room]
        into = spare[scratch:] if cast else [t[part] for t in targets]
        given = [a[part] if a.dtype == work else a[part].astype(work) for a in arrays]
        chain(xp, *given, *into, *spare[:scratch])
        if cast:
            for target, values in zip(targets, into, strict=True):
                target[part] = values
    return made[0] if results == 1 else tuple(made)
