"""Rotary positions: pairs of features turned by angles that grow with the position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.kernels import CHUNK, work_dtype

Block = Any


def tables(frequencies: np.ndarray, first: int, count: int, like: Block) -> tuple[Block, Block]:
    """Cosines and sines of the angles at positions `first` and following, shape [count, pairs].

    Angles are float64; the tables are in the working dtype of `like`, where it lies.
    """
    xp, work = namespace(like), work_dtype(like.dtype)
    angles = np.arange(first, first + count, dtype=np.float64)[:, None] * frequencies
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
    """
    xp = namespace(x)
    out = xp.empty(x.shape, x.dtype)
    n, pairs = cos.shape
    step = max(1, CHUNK // max(1, math.prod(x.shape[2:]))) if xp is np else max(1, n)
    c, s = cos[:, None, None, :], sin[:, None, None, :]
    if back:
        s = -s
    for b in range(x.shape[0]) if xp is np else [slice(None)]:
        for at in range(0, n, step):
            here = slice(at, at + step)
            y, z = x[b, here], out[b, here]
            if x.ndim - y.ndim == 0 or x.dtype != cos.dtype:
                y = y.astype(cos.dtype, copy=False)
            one, two = y[..., :parts, :pairs], y[..., :parts, pairs : 2 * pairs]
            z[..., parts:, :] = y[..., parts:, :]
            z[..., :parts, 2 * pairs :] = y[..., :parts, 2 * pairs :]
            turned = one * c[here]
            turned -= two * s[here]
            z[..., :parts, :pairs] = turned
            xp.multiply(two, c[here], out=turned)
            turned += one * s[here]
            z[..., :parts, pairs : 2 * pairs] = turned
    return out
