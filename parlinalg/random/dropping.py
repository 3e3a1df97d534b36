"""Elements dropped by counted numbers: by a mask made on the host, or on a GPU by a kernel that draws as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parlinalg.backend import Backend, cuda, namespace
from parlinalg.backend.cuda_random import DIMS, places
from parlinalg.random import Bernoulli, Indices

Block = Any


def dropping(
    keep: Bernoulli, block: Block, shape: Sequence[int], indices: Sequence[Indices], backend: Backend
) -> tuple[Callable[[Block, Block], Block], Block]:  # fmt: skip
    """Return a function that multiplies a block by 1 / p where elements stay and by 0 elsewhere, and its table.

    The function takes a block like this one, or its gradient, and the table, an array; it holds no array itself.

    Parameters
    ----------
    keep : Bernoulli
        Which stay.
    shape, indices
        The global shape, and the global indices of the block, a dim.
    """
    scale = block.dtype.type(1 / keep.p if keep.p else 0)
    if cuda.ready(block) and len(shape) <= DIMS:
        table, lengths, first = places(shape, indices, keep.start)
        drop = partial(
            cuda.drop, lengths=lengths, first=first, key=tuple(map(int, keep.key)), limit=keep.limit, bits=keep.bits,
            scale=float(scale),
        )  # fmt: skip
        return drop, backend.from_host(table)
    return partial(_kept, scale=scale), backend.from_host(keep.part(shape, indices))


def factors(
    keep: Bernoulli, dtype: np.dtype[Any], shape: Sequence[int], indices: Sequence[Indices], backend: Backend
) -> Block:  # fmt: skip
    """What `dropping` multiplies by."""
    xp = backend.xp
    if xp is not np and cuda.ready(ones := xp.ones(tuple(map(len, indices)), dtype)):
        drop, table = dropping(keep, ones, shape, indices, backend)
        return drop(ones, table)
    return backend.from_host(keep.part(shape, indices) * dtype.type(1 / keep.p if keep.p else 0))


def _kept(block: Block, keep: Block, scale: Any) -> Block:
    """The elements kept, scaled; zeros elsewhere."""
    out = namespace(block).asarray(block * keep)
    out *= scale
    return out
