"""A parameter that is not made yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Buffer, Parameter
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout


@dataclass(frozen=True)
class Declared:
    """What a parameter will be, once `Module.initialize` knows its qualified name.

    Attributes
    ----------
    shape : tuple of int
    layout : Layout
    grid : Grid
    dtype : dtype
    init : callable
        Makes the values: `init(declared, seed, name)`; see `parlinalg.nn.init`.
    fan_in, fan_out : int
        How many inputs and outputs the parameter connects, for initializers that scale by them.
    buffer : bool
        Whether it becomes a `Buffer`, which no optimizer changes, in place of a parameter.
    """

    shape: tuple[int, ...]
    layout: Layout
    grid: Grid
    dtype: np.dtype[Any]
    init: Initializer
    fan_in: int = 1
    fan_out: int = 1
    buffer: bool = False

    def __post_init__(self) -> None:
        sizes: tuple[Any, ...] = self.shape  # whatever their annotation says
        if not all(isinstance(n, Integral) and int(n) >= 0 for n in sizes):
            raise ConfigError(f"a parameter of shape {self.shape} cannot be: sizes are whole numbers of at least 0")
        object.__setattr__(self, "shape", tuple(int(n) for n in sizes))

    def make(self, seed: int, name: str) -> DistArray:
        """The values; the same on every grid."""
        return self.init(self, seed, name)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's block."""
        return math.prod(self.grid.block_shape(self.layout, self.shape)) * self.dtype.itemsize


def is_buffer(held: Parameter | Declared) -> bool:
    """Return True for a buffer, and for what is declared as one."""
    return held.buffer if isinstance(held, Declared) else isinstance(held, Buffer)


Initializer = Callable[[Declared, int, str], DistArray]
