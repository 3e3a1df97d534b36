"""Random arrays that are the same on every grid and backend, bit for bit.

An element depends on the seed, a name, the number of a call, a step, and its index in the global array, and on nothing
else: not on how the array is cut, nor on what was drawn before.  Nothing is kept to draw the same numbers again.

`default_rng(seed)` draws as NumPy's generators do: its elements depend on the seed, the number of the call, and their
index.

The numbers are made on the host, and copied where blocks live elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.backend import Backend
from parlinalg.backend.kernels.dropout import Counted, draws_on_device, drop, index_terms
from parlinalg.backend.shapes import ShapesBackend
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.random.counter import RandomStream, Words, block_words, stream_key
from parlinalg.random.distributions import drawn, float_dtype, keyed, unit
from parlinalg.random.generator import Generator, default_rng
from parlinalg.random.normals import write_normals

Block = Any
Indices = range | np.ndarray
#: Numbers drawn in the time that one call takes.
CALL = 1 << 13

__all__ = [
    "Bernoulli",
    "Generator",
    "bernoulli",
    "default_rng",
    "integers",
    "normal",
    "permutation",
    "uniform",
]


def uniform(
    shape: int | Sequence[int], grid: Grid, layout: Layout, *, low: float = 0.0, high: float = 1.0,
    dtype: DTypeLike = np.float64, seed: int = 0, name: str = "", call: int = 0, step: int = 0, start: int = 0,
) -> DistArray:  # fmt: skip
    """Return numbers between `low` and `high` (which rounding may reach), all equally likely.

    Parameters
    ----------
    shape : int or sequence of int
        The global shape.
    layout : Layout
        The array's layout.
    dtype : float dtype
        The numbers are made in float64 and rounded to it.
    seed, name, call, step
        The values on which the numbers depend, beside their index: such as a layer's qualified name, the number of the
        call within a step, and the training step.
    start : int
        The index along the first dim that the array begins at, where it is a part of a longer one: a microbatch at its
        place in the step's batch draws what the whole batch would.

    Raises
    ------
    TypeError
        If dtype is not a float dtype.
    LayoutError
        If the layout does not fit the shape or the grid.

    Examples
    --------
    >>> import parlinalg as pla
    >>> with pla.Grid({"r": 1}) as grid:
    ...     print(pla.random.uniform((2, 2), grid, pla.Layout("r", None), seed=1, name="w").gather().round(3))
    [[0.921 0.317]
     [0.946 0.871]]
    """
    width = high - low

    def convert(words: Words) -> np.ndarray:
        u = unit(words)
        u *= width
        u += low
        return u

    return drawn(
        convert, 64, shape, grid, layout, float_dtype(dtype, "uniform"), stream_key(seed, name, call, step), start
    )


def normal(
    shape: int | Sequence[int], grid: Grid, layout: Layout, *, mean: float = 0.0, std: float = 1.0,
    dtype: DTypeLike = np.float64, seed: int = 0, name: str = "", call: int = 0, step: int = 0, start: int = 0,
) -> DistArray:  # fmt: skip
    """Return normally distributed numbers; arguments and errors as of `uniform`."""
    stream = stream_key(seed, name, call, step)

    def fill(shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray) -> None:
        write_normals(stream, shape, ranges, flat, mean, std, start)

    return keyed(fill, shape, grid, layout, float_dtype(dtype, "normal"), stream, start)


def bernoulli(
    shape: int | Sequence[int], grid: Grid, layout: Layout, p: float, *,
    seed: int = 0, name: str = "", call: int = 0, step: int = 0, start: int = 0,
) -> DistArray:  # fmt: skip
    """Return True with probability p (to 2⁻³²), else False; arguments as in `uniform`.

    Raises
    ------
    ValueError
        If p is not a probability.
    """
    numbers = Bernoulli(p)
    stream = stream_key(seed, name, call, step)
    return drawn(numbers.convert, 32, shape, grid, layout, np.dtype(np.bool_), stream, start)


class Bernoulli:
    """The numbers of `bernoulli`, of an array that is never whole: a part at a time.

    Parameters
    ----------
    p : float
        The probability of True.
    bits : {32, 16}
        To 2⁻³² or 2⁻¹⁶, of which the second costs half the time.
    seed, name, call, step, start
        As in `uniform`.

    Attributes
    ----------
    p : float
        The probability as it is.
    """

    def __init__(
        self, p: float, bits: int = 32, *, seed: int = 0, name: str = "", call: int = 0, step: int = 0, start: int = 0
    ) -> None:  # fmt: skip
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"a probability is between 0 and 1, not {p}")
        self.limit, self.all = round(p * 2**bits), 2**bits
        self.p = self.limit / self.all
        self.key, self.bits = stream_key(seed, name, call, step), bits
        self.stream = RandomStream(self.key, bits)
        self.start = start

    def part(self, shape: Sequence[int], indices: Sequence[Indices]) -> np.ndarray:
        """Return the bools of a part of an array of this global shape, on the host.

        `indices` gives the global indices a dim, a range or an array of them: those of tokens that do not lie in the
        order of their sequence.
        """
        for dim, given in enumerate(indices):
            if isinstance(given, np.ndarray):
                return self._scattered(shape, indices, dim, given)
        ranges = [i for i in indices if isinstance(i, range)]
        lengths = tuple(len(r) for r in ranges)
        flat = np.empty(math.prod(lengths), np.bool_)
        for place, words in block_words(self.stream, shape, ranges, self.start):
            flat[place : place + len(words)] = self.convert(words)
        return flat.reshape(lengths)

    def _scattered(self, shape: Sequence[int], indices: Sequence[Indices], dim: int, given: np.ndarray) -> np.ndarray:
        """Return the part, run by run of the indices of one dim; or all from the least to the largest, where runs are
        short and the gaps cost less than the calls.
        """
        before, after = indices[:dim], indices[dim + 1 :]
        lengths = [len(i) for i in indices]
        if not math.prod(lengths):
            return np.empty(lengths, np.bool_)
        edges = [0, *(np.flatnonzero(np.diff(given) != 1) + 1).tolist(), len(given)]
        low, high = int(given.min()), int(given.max()) + 1
        others = math.prod(lengths) // len(given)
        if len(edges) > 2 and (high - low) * others < CALL * (len(edges) - 1):
            every = self.part(shape, (*before, range(low, high), *after))
            return np.ascontiguousarray(every.take(given - low, axis=dim))
        found = [
            self.part(shape, (*before, range(int(given[a]), int(given[a]) + b - a), *after)) for a, b in pairwise(edges)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=dim)

    def convert(self, words: Words) -> np.ndarray:
        """Return the bools of words of the stream."""
        return np.ones(words.shape, np.bool_) if self.limit == self.all else words < words.dtype.type(self.limit)


def integers(
    shape: int | Sequence[int], grid: Grid, layout: Layout, low: int, high: int, *,
    seed: int = 0, name: str = "", call: int = 0, step: int = 0, start: int = 0,
) -> DistArray:  # fmt: skip
    """Draw integers (int64) from low to high - 1, equally likely to (high - low) / 2³²; arguments as in `uniform`.

    Raises
    ------
    ValueError
        If there is no integer in the range, or more than 2³².
    """
    if not 0 < high - low <= 2**32:
        raise ValueError(f"integers from {low} to below {high}: the range must hold 1 to 2**32 integers")

    def convert(words: Words) -> np.ndarray:
        wide = words.astype(np.uint64) * np.uint64(high - low)
        return (wide >> np.uint64(32)).astype(np.int64) + low

    return drawn(convert, 32, shape, grid, layout, np.dtype(np.int64), stream_key(seed, name, call, step), start)


def permutation(n: int, *, seed: int = 0, epoch: int = 0, name: str = "permutation") -> np.ndarray:
    """Return 0 to n - 1 in random order, the order of an epoch's samples.

    It is a host array of int64, the same on every rank.

    >>> permutation(5, seed=0, epoch=1)
    array([1, 0, 3, 2, 4])
    """
    words = RandomStream(stream_key(seed, name, 0, epoch)).take(0, n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


# ------------------------------------------------------------------ dropout
def dropping(
    keep: Bernoulli, block: Block, shape: Sequence[int], indices: Sequence[Indices], backend: Backend
) -> tuple[Callable[[Block, Block], Block], Block]:  # fmt: skip
    """Return a function that multiplies a block by 1 / p where elements stay and by 0 elsewhere, and its table.

    The function takes a block like this one, or its gradient, and the table, an array; it holds no array itself.

    Parameters
    ----------
    keep : Bernoulli
        The elements that stay.
    shape, indices
        The global shape, and the global indices of the block, a dim.
    """
    scale = 1 / keep.p if keep.p else 0.0
    if draws_on_device(block, len(shape)):
        table, *where = index_terms(shape, indices, keep.start)
        counted = Counted(tuple(map(int, keep.key)), keep.limit, keep.bits, *where)
        return partial(drop, scale=scale, counted=counted), backend.from_host(table)
    if isinstance(backend, ShapesBackend):  # values would be of no use, and their memory would not count
        n = math.prod(map(len, indices))
        backend.kernel("zeros", n, n, np.dtype(np.bool_))
        return partial(drop, scale=scale), backend.staging(n, np.bool_).reshape(tuple(map(len, indices)))
    return partial(drop, scale=scale), backend.from_host(keep.part(shape, indices))


def factors(
    keep: Bernoulli, dtype: np.dtype[Any], shape: Sequence[int], indices: Sequence[Indices], backend: Backend
) -> Block:  # fmt: skip
    """Return the factors by which `dropping` multiplies: 1 / p or 0."""
    if backend.cuda and draws_on_device(ones := backend.xp.ones(tuple(map(len, indices)), dtype), len(shape)):
        dropped, table = dropping(keep, ones, shape, indices, backend)
        return dropped(ones, table)
    if not backend.values:
        return backend.empty(tuple(map(len, indices)), dtype)
    return backend.from_host(keep.part(shape, indices) * dtype.type(1 / keep.p if keep.p else 0))
