"""Look-ups in tables of rows, and their gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.kernels import work_dtype

Block = Any


def look_up(table: Block, ids: Block, start: int, whole: bool) -> Block:
    """Row `id - start` of the table for every id; zeros where it has none, unless the table is `whole`."""
    xp = namespace(table)
    shape = (*ids.shape, table.shape[1])
    flat = ids.reshape(-1) - start
    if whole:
        return xp.take(table, flat, axis=0).reshape(shape)
    out = xp.zeros((flat.size, table.shape[1]), table.dtype)
    at = xp.nonzero((flat >= 0) & (flat < table.shape[0]))[0]
    out[at] = table[flat[at]]
    return out.reshape(shape)


def look_up_grad(g: Block, ids: Block, start: int, rows: int) -> Block:
    """The sums of the rows of g that belong to each of `rows` ids from `start`; in g's dtype.

    The rows of equal ids are summed as a tree, all ids' at once: in every round each second row of an id is added to
    the one before it.  The order depends on the ids alone; no two terms are added to one place at a time, as in
    `np.add.at` or by atomics, and `np.add.reduceat` takes ten times as long.
    """
    xp, work = namespace(g), work_dtype(g.dtype)
    width = g.shape[-1]
    out = xp.zeros((rows, width), g.dtype)
    flat = ids.reshape(-1).astype(np.int64) - start
    at = xp.nonzero((flat >= 0) & (flat < rows))[0]
    if not at.size or not width:
        return out
    at = at[xp.argsort(flat[at], kind="stable")]
    found = flat[at]
    first = xp.ones(found.shape, bool)
    first[1:] = found[1:] != found[:-1]
    starts = xp.nonzero(first)[0]
    place = xp.arange(found.size) - starts[xp.cumsum(first) - 1]
    sums = xp.take(g.reshape((flat.size, width)), at, axis=0).astype(work, copy=False)
    here = xp.arange(found.size)
    while here.size > starts.size:
        odd = xp.nonzero(place & 1)[0]
        sums[here[odd - 1]] += sums[here[odd]]
        even = xp.nonzero(1 - (place & 1))[0]
        here, place = here[even], place[even] >> 1
    out[found[starts]] = sums[starts].astype(g.dtype, copy=False)
    return out
