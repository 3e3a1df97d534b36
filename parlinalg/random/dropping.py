"""Elements dropped by counted numbers: by a mask made on the host, or on a GPU by a kernel that draws as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parlinalg.backend import Backend
from parlinalg.backend.kernels.dropout import Counted, drop, on_device, places
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
    scale = 1 / keep.p if keep.p else 0.0
    if on_device(block, len(shape)):
        table, *where = places(shape, indices, keep.start)
        counted = Counted(tuple(map(int, keep.key)), keep.limit, keep.bits, *where)
        return partial(drop, scale=scale, counted=counted), backend.from_host(table)
    return partial(drop, scale=scale), backend.from_host(keep.part(shape, indices))


def factors(
    keep: Bernoulli, dtype: np.dtype[Any], shape: Sequence[int], indices: Sequence[Indices], backend: Backend
) -> Block:  # fmt: skip
    """What `dropping` multiplies by."""
    if backend.cuda and on_device(ones := backend.xp.ones(tuple(map(len, indices)), dtype), len(shape)):
        dropped, table = dropping(keep, ones, shape, indices, backend)
        return dropped(ones, table)
    return backend.from_host(keep.part(shape, indices) * dtype.type(1 / keep.p if keep.p else 0))
