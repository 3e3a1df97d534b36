"""Initializers.  Values depend on the seed, the parameter's qualified name and the index in the global array, so that
every grid starts from the same weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from parlinalg import random
from parlinalg.array import DistArray
from parlinalg.array.create import computed
from parlinalg.autograd import Buffer, Parameter
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout


@dataclass(frozen=True)
class Declared:
    """A parameter that is described but not made yet: `Module.initialize` makes it, by its qualified name.

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
    matrix : tuple of two ints, optional
        As of `Parameter`; None, the default, for what is no weight of a hidden product.
    """

    shape: tuple[int, ...]
    layout: Layout
    grid: Grid
    dtype: np.dtype[Any]
    init: Initializer
    fan_in: int = 1
    fan_out: int = 1
    buffer: bool = False
    matrix: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        sizes: tuple[Any, ...] = self.shape  # whatever their annotation says
        if not all(isinstance(n, Integral) and int(n) >= 0 for n in sizes):
            raise ConfigError(f"a parameter of shape {self.shape} cannot be: sizes are whole numbers of at least 0")
        object.__setattr__(self, "shape", tuple(int(n) for n in sizes))

    def make(self, seed: int, name: str) -> DistArray:
        """Return the values; the same on every grid."""
        return self.init(self, seed, name)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's block."""
        return math.prod(self.grid.block_shape(self.layout, self.shape)) * self.dtype.itemsize


def is_buffer(held: Parameter | Declared) -> bool:
    """Return True for a buffer, and for what is declared as one."""
    return held.buffer if isinstance(held, Declared) else isinstance(held, Buffer)


Initializer = Callable[[Declared, int, str], DistArray]


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float = 0.0

    def __call__(self, slot: Declared, seed: int, name: str) -> DistArray:
        value = np.asarray(self.value)
        return computed("Constant", lambda *_: value, slot.shape, slot.grid, slot.layout, slot.dtype)


zeros = Constant(0.0)
ones = Constant(1.0)


@dataclass(frozen=True)
class Normal:
    """Normally distributed with this standard deviation and mean."""

    std: float = 0.02
    mean: float = 0.0

    def __call__(self, slot: Declared, seed: int, name: str) -> DistArray:
        return random.normal(
            slot.shape, slot.grid, slot.layout, mean=self.mean, std=self.std, dtype=slot.dtype, seed=seed, name=name
        )


@dataclass(frozen=True)
class Uniform:
    """Equally likely between `low` and `high`."""

    low: float = -1.0
    high: float = 1.0

    def __call__(self, slot: Declared, seed: int, name: str) -> DistArray:
        return random.uniform(
            slot.shape, slot.grid, slot.layout, low=self.low, high=self.high, dtype=slot.dtype, seed=seed, name=name
        )


@dataclass(frozen=True)
class Kaiming:
    """Standard deviation `gain / √fan_in` (He et al., "Delving deep into rectifiers", 2015).

    Parameters
    ----------
    gain : float
        √2, the default, keeps the scale of what passes a ReLU.
    distribution : {"uniform", "normal"}
    """

    gain: float = math.sqrt(2.0)
    distribution: str = "uniform"

    def __post_init__(self) -> None:
        _check(self.distribution)

    def __call__(self, slot: Declared, seed: int, name: str) -> DistArray:
        return _scaled(self.gain / math.sqrt(max(1, slot.fan_in)), self.distribution)(slot, seed, name)


@dataclass(frozen=True)
class Xavier:
    """Standard deviation `gain √(2 / (fan_in + fan_out))` (Glorot and Bengio, "Understanding the difficulty of training
    deep feedforward neural networks", 2010).
    """

    gain: float = 1.0
    distribution: str = "uniform"

    def __post_init__(self) -> None:
        _check(self.distribution)

    def __call__(self, slot: Declared, seed: int, name: str) -> DistArray:
        std = self.gain * math.sqrt(2.0 / max(1, slot.fan_in + slot.fan_out))
        return _scaled(std, self.distribution)(slot, seed, name)


def _scaled(std: float, distribution: str) -> Normal | Uniform:
    bound = math.sqrt(3.0) * std
    return Normal(std) if distribution == "normal" else Uniform(-bound, bound)


def _check(distribution: str) -> None:
    if distribution not in ("uniform", "normal"):
        raise ConfigError(f"an initializer's distribution is 'uniform' or 'normal', not {distribution!r}")
