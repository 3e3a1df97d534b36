"""Attention over some keys and over others, put together."""

from __future__ import annotations

import math
from typing import Any

from parlinalg.backend import namespace

Block = Any


def merge(out: Block, lse: Block, more: Block, more_lse: Block) -> None:
    """Make of the results over some keys, in place, those over these and more keys; `more` is used up.

    Shapes as `backend.attention.forward` gives them, in the working dtype: out += σ(more_lse - lse) (more - out), and
    lse is the logarithm of the sum of both sums, written so that nothing overflows (Liu et al., "Ring attention",
    2023).
    """
    xp = namespace(out)
    nothing = more_lse == -math.inf
    ahead = xp.where(nothing, more_lse.dtype.type(0), more_lse) - lse  # inf where no key was seen before
    ahead[nothing] = -math.inf
    small = xp.exp(-xp.abs(ahead))
    share = xp.where(ahead >= 0, small.dtype.type(1), small) / (1 + small)
    xp.maximum(lse, more_lse, out=lse)
    lse += xp.log1p(small)
    more -= out
    more *= share.transpose(0, 3, 1, 2)[..., None]
    out += more
