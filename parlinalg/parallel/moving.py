"""What the buckets of a pass hold beside values and gradients as they lie between steps.  Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.backend.halves import is_half
from parlinalg.parallel.handlers import Treatment

#: Buckets at a time whose sums take memory of their own: when another starts the oldest is waited for.  All ranks do so
#: at the same points, so that what follows it starts in one order too.
UNDER_WAY = 2


class Load(NamedTuple):
    """Bytes of a bucket.

    Attributes
    ----------
    kind : hashable
        Of each kind one bucket is filling at a time.
    kept : int
        Whole gradients that stay from the first microbatch to the last, where between steps there is a part.
    passing : int
        Such as stay until their sum is formed.
    cast : bool
        Whether they are let go as soon as that starts.
    work : int
        What the sum is formed in: the cast, the terms of 16-bit floats, the part that arrives.
    after : int
        That part, where it stays to the end of the pass to be summed over other axes.
    """

    kind: Hashable
    kept: int = 0
    passing: int = 0
    cast: bool = False
    work: int = 0
    after: int = 0


def load(kind: Hashable, group: Sequence[Parameter], treatment: Treatment, travels: np.dtype[Any] | None) -> Load:
    """What a bucket of these parameters takes, if their gradients travel in a dtype, by default their own."""
    first, n = group[0], sum(int(p.block.size) for p in group)
    sizes, scatter = first.grid.sizes, treatment.scatter
    others = [a for a, size in sizes.items() if size > 1 and first.layout.where(a) is None and a not in scatter]
    if not scatter and not others:
        return Load(kind)
    dtype = first.dtype if travels is None else travels
    cast, half = dtype != first.dtype, is_half(dtype)
    if not scatter:
        return Load(kind, work=dtype.itemsize * (cast * n + half * (n + n // 2)))
    whole = n * first.dtype.itemsize if treatment.stage >= 2 else 0
    part = dtype.itemsize * -(-n // math.prod(sizes[a] for a in scatter))
    return Load(
        kind, whole if treatment.keeps else 0, 0 if treatment.keeps else whole, cast,
        dtype.itemsize * n * (cast + half) + (0 if others else part), part if others else 0,
    )  # fmt: skip


def moving(loads: Iterable[Load]) -> int:
    """Bytes that a pass takes at the most: of buckets that are filling, under way, and kept.

    >>> four = [Load("weights", passing=10, work=5)] * 4
    >>> moving(four), moving([each._replace(cast=True) for each in four]), moving(four[:1])
    (40, 20, 15)
    """
    each = list(loads)
    filling = len({one.kind for one in each if one.passing}) + UNDER_WAY * any(not one.cast for one in each)
    passing = sorted((one.passing for one in each), reverse=True)[:filling]
    work = sorted((one.work for one in each), reverse=True)[:UNDER_WAY]
    return sum(passing) + sum(work) + sum(one.kept + one.after for one in each)
