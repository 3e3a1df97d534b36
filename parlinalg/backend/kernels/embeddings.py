"""Embeddings: look-ups in tables of rows with their gradient, and rotary positions.

Rotary positions turn pairs of features by angles that grow with the position.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend import backend_of, namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import TILE, example, kernel, runs
from parlinalg.backend.shapes import has_values, places_of

Block = Any


@kernel()
def look_up(table: Block, ids: Block, start: int, whole: bool, share: float = 1.0) -> Block:
    """Return row `id - start` of the table for every id; zeros where it has none, unless the table is `whole`.

    `share` is the part of the ids that have a row, where ids have no values.
    """
    xp = namespace(table)
    shape = (*ids.shape, table.shape[1])
    flat = ids.reshape(-1) - start
    if whole:
        return xp.take(table, flat, axis=0).reshape(shape)
    out = xp.zeros((flat.size, table.shape[1]), table.dtype)
    at = places_of((flat >= 0) & (flat < table.shape[0]), share)
    out[at] = table[flat[at]]
    return out.reshape(shape)


@kernel()
def look_up_grad(g: Block, ids: Block, start: int, rows: int, share: float = 1.0) -> Block:
    """Return the sums of the rows of g that belong to each of `rows` ids from `start`; in g's dtype.

    `share` is as of `look_up`; of ids without values all have an equal one.

    The rows of equal ids are summed as a tree, all ids' at once: in every round each second row of an id is added to
    the one before it.  The order depends on the ids alone; no two terms are added to one place at a time, as in
    `np.add.at` or by atomics, and `np.add.reduceat` takes ten times as long.
    """
    xp, work = namespace(g), work_dtype(g.dtype)
    width = g.shape[-1]
    out = xp.zeros((rows, width), g.dtype)
    flat = ids.reshape(-1).astype(np.int64) - start
    at = places_of((flat >= 0) & (flat < rows), share)
    if not at.size or not width:
        return out
    at = at[xp.argsort(flat[at], kind="stable")]
    found = flat[at]
    if not has_values(ids):
        sums = xp.take(g.reshape((flat.size, width)), at, axis=0).astype(work, copy=False)
        odd = places_of(found, 0.5)  # the first round has the most terms
        sums[odd] += sums[odd]
        out[found] = sums[:rows].astype(g.dtype, copy=False)
        return out
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


def rotary_tables(frequencies: np.ndarray, positions: range | np.ndarray, like: Block) -> tuple[Block, Block]:
    """Return cosines and sines of the angles at these positions, shape [positions, pairs].

    Angles are float64; the tables are in the working dtype of `like`, and are computed where it lies.
    """
    xp, work = namespace(like), work_dtype(like.dtype)
    if not backend_of(like).values:  # to compute what is then dropped was a third of a Llama's trace
        shape = len(positions), len(frequencies)
        return xp.empty(shape, work), xp.empty(shape, work)
    if isinstance(positions, range):
        places = xp.arange(positions.start, positions.stop, positions.step, dtype=np.float64)
    else:
        places = xp.asarray(positions, np.float64)
    angles = places[:, None] * xp.asarray(frequencies)
    return xp.cos(angles).astype(work), xp.sin(angles).astype(work)


@kernel()
def rotate(x: Block, cos: Block, sin: Block, parts: int, back: bool = False) -> Block:
    """Return a copy of x in which the first `parts` parts of every head are turned.

    Parameters
    ----------
    x : array
        Shape [batch, positions, heads, parts, e].
    cos, sin : array
        Shape [positions, pairs]: feature i < pairs is turned with feature i + pairs; those after 2 pairs stay.
    back : bool
        Turn the other way: the gradient's way.

    Products are of whole rows, since those of single heads are too short to be fast: x times cosines, or ones where
    nothing turns, plus x with its halves exchanged times sines, or zeros.
    """
    xp, cpu = namespace(x), backend_of(x).cpu
    out = xp.empty(x.shape, x.dtype)
    batch, n, *row = x.shape
    pairs = cos.shape[1]
    if back:
        sin = -sin
    step = min(n, max(1, TILE // max(1, math.prod(row)))) if cpu else n
    same, other, turned = (xp.empty((step, *row), cos.dtype) for _ in range(3))
    same[...] = 1
    other[...] = 0
    turned[...] = 0
    one, two = (slice(None, parts), slice(None, pairs)), (slice(None, parts), slice(pairs, 2 * pairs))
    for part in runs(n, max(1, step), x):
        m = part.stop - part.start
        c, s, t = same[:m], other[:m], turned[:m]
        for half, sign in ((one, -1), (two, 1)):
            c[:, :, *half] = cos[part, None, None]
            s[:, :, *half] = sign * sin[part, None, None]
        for item in runs(batch, 1 if cpu else max(1, batch), x):
            b = item.start if cpu else item
            y, z = x[b, part], out[b, part]
            if y.dtype != cos.dtype:
                y = y.astype(cos.dtype)
            if not cpu:
                t = xp.zeros(y.shape, cos.dtype)
            t[..., *one], t[..., *two] = y[..., *two], y[..., *one]
            t *= s
            w = xp.multiply(y, c, out=z if z.dtype == cos.dtype else None)
            w += t
            if w is not z:
                z[...] = w
    return out


def _try_rotate(heads: Block) -> Block:
    frequencies = 1 / 10000 ** (np.arange(0, 64, 2) / 64)
    return rotate(heads, *rotary_tables(frequencies, range(heads.shape[1]), heads), 1)


example("embedding", lambda table, ids: look_up(table, ids, 3, False), "table", "ids")
example("embedding, gradient", lambda g, ids: look_up_grad(g, ids, 3, 90), "g", "ids")
example("rotary positions", _try_rotate, "heads")
