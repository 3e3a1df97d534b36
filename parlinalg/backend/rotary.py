"""Rotary positions: pairs of features turned by angles that grow with the position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.kernels import CHUNK, work_dtype

Block = Any


def tables(frequencies: np.ndarray, positions: range | np.ndarray, like: Block) -> tuple[Block, Block]:
    """Cosines and sines of the angles at these positions, shape [positions, pairs].

    Angles are float64; the tables are in the working dtype of `like`, where it lies.
    """
    xp, work = namespace(like), work_dtype(like.dtype)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    return xp.asarray(np.cos(angles).astype(work)), xp.asarray(np.sin(angles).astype(work))


def rotate(x: Block, cos: Block, sin: Block, parts: int, back: bool = False) -> Block:
    """A copy of x in which the first `parts` parts of every head are turned.

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
    xp = namespace(x)
    out = xp.empty(x.shape, x.dtype)
    batch, n, *row = x.shape
    pairs = cos.shape[1]
    if back:
        sin = -sin
    step = min(n, max(1, CHUNK // max(1, math.prod(row)))) if xp is np else n
    same, other, turned = (xp.empty((step, *row), cos.dtype) for _ in range(3))
    same[...] = 1
    other[...] = 0
    turned[...] = 0
    one, two = (slice(None, parts), slice(None, pairs)), (slice(None, parts), slice(pairs, 2 * pairs))
    for at in range(0, n, max(1, step)):
        m = min(step, n - at)
        c, s, t = same[:m], other[:m], turned[:m]
        for half, sign in ((one, -1), (two, 1)):
            c[:, :, *half] = cos[at : at + m, None, None]
            s[:, :, *half] = sign * sin[at : at + m, None, None]
        for b in range(batch) if xp is np else (slice(None),):
            y, z = x[b, at : at + m], out[b, at : at + m]
            if y.dtype != cos.dtype:
                y = y.astype(cos.dtype)
            if xp is not np:
                t = xp.zeros(y.shape, cos.dtype)
            t[..., *one], t[..., *two] = y[..., *two], y[..., *one]
            t *= s
            w = xp.multiply(y, c, out=z if z.dtype == cos.dtype else None)
            w += t
            if w is not z:
                z[...] = w
    return out
