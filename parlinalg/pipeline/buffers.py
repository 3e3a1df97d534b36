"""Arrays used again: what messages arrive in and are packed into."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from parlinalg.backend import Backend

Block = Any
Key = tuple[tuple[int, ...], str]


class Buffers:
    """Arrays by shape and dtype, given out again once nobody else holds them.

    Who takes one need not give it back: an array that only this pool refers to is free.

    Examples
    --------
    >>> import numpy as np
    >>> from parlinalg.backend import select_backend
    >>> pool = Buffers(select_backend("numpy"))
    >>> first = pool.take((2,), np.dtype("float64"))
    >>> second = pool.take((2,), first.dtype)
    >>> place = id(first)
    >>> del first
    >>> id(pool.take((2,), second.dtype)) == place
    True
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._held: dict[Key, list[Block]] = {}
        self._used: set[Key] = set()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """An array of this shape and dtype, with anything in it."""
        key = shape, dtype.name
        self._used.add(key)
        held = self._held.setdefault(key, [])
        for i in range(len(held)):
            if references(held, i) == _ALONE:
                return held[i]
        held.append(self.backend.empty(shape, dtype))
        return held[-1]

    def trim(self) -> None:
        """Drop the arrays of shapes that were not asked for since the last call."""
        self._held = {key: held for key, held in self._held.items() if key in self._used}
        self._used.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in the pool, in use or not."""
        return sum(int(block.nbytes) for held in self._held.values() for block in held)


def references(held: list[Block], i: int) -> int:
    """How many references there are to an item of a list."""
    return sys.getrefcount(held[i])


_ALONE = references([object()], 0)
