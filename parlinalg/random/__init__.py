"""Random arrays that are the same on every grid and backend, bit for bit.

An element depends on the seed, a name, the number of a call, a step, and its index in the global array, and on nothing
else: not on how the array is cut, nor on what was drawn before.  Nothing is kept to draw the same numbers again.

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
from parlinalg.array.shapes import shape_of
from parlinalg.backend import Backend
from parlinalg.backend.kernels.dropout import Counted, draws_on_device, drop, index_terms
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.random.counter import RandomStream, Words, block_words, stream_key
from parlinalg.redistribute import check_given, fitting, redistribute

Block = Any
Indices = range | np.ndarray
#: Numbers drawn in the time that one call takes.
CALL = 1 << 13

__all__ = ["Bernoulli", "bernoulli", "integers", "normal", "permutation", "uniform"]


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
        u = (words >> np.uint64(11)).astype(np.float64)
        u *= 2.0**-53 * width
        u += low
        return u

    return _draw(convert, 64, shape, grid, layout, _float(dtype, "uniform"), stream_key(seed, name, call, step), start)


def normal(
    shape: int | Sequence[int], grid: Grid, layout: Layout, *, mean: float = 0.0, std: float = 1.0,
    dtype: DTypeLike = np.float64, seed: int = 0, name: str = "", call: int = 0, step: int = 0, start: int = 0,
) -> DistArray:  # fmt: skip
    """Normally distributed numbers; arguments and errors as of `uniform`."""

    def convert(words: Words) -> np.ndarray:
        u = (words >> np.uint64(12)).astype(np.float64)
        u += 0.5
        u *= 2.0**-52  # exact, and so is 1 - u: the two tails are alike
        z = normal_quantile(u)
        z *= std
        z += mean
        return z

    return _draw(convert, 64, shape, grid, layout, _float(dtype, "normal"), stream_key(seed, name, call, step), start)


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
    return _draw(numbers.convert, 32, shape, grid, layout, np.dtype(np.bool_), stream, start)


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
    """Integers (int64) from low to high - 1, equally likely to (high - low) / 2³²; arguments as in `uniform`.

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

    return _draw(convert, 32, shape, grid, layout, np.dtype(np.int64), stream_key(seed, name, call, step), start)


def permutation(n: int, *, seed: int = 0, epoch: int = 0, name: str = "permutation") -> np.ndarray:
    """0 to n - 1 in random order, a host array of int64, the same on every rank: the order of an epoch's samples.

    >>> permutation(5, seed=0, epoch=1)
    array([1, 0, 3, 2, 4])
    """
    words = RandomStream(stream_key(seed, name, 0, epoch)).take(0, n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _draw(
    convert: Callable[[Words], np.ndarray], bits: int, shape: int | Sequence[int], grid: Grid, layout: Layout,
    dtype: np.dtype[Any], stream: np.ndarray, start: int,
) -> DistArray:  # fmt: skip
    """Return the array of the elements that `convert` makes of their words, tile by tile."""
    shape = shape_of(shape)
    cut = fitting(layout, shape, grid).with_partial(())
    ranges = grid.block(cut, shape)
    lengths = tuple(len(r) for r in ranges)
    flat = np.empty(math.prod(lengths), dtype)
    if grid.inside:
        for place, words in block_words(RandomStream(stream, bits), shape, ranges, start):
            flat[place : place + len(words)] = convert(words)
    block = grid.backend.from_host(flat.reshape(lengths))
    right = "all ranks draw with the same seed, name, call, step and bounds"
    keys = {"the key of seed, name, call and step": stream.tolist(), "start": start}
    check_given("parlinalg.random", block, cut, shape, grid, right, **keys)
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def _float(dtype: DTypeLike, what: str) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise TypeError(f"random.{what} makes float16, bfloat16, float32 or float64, not {dtype}")
    return dtype


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
    return partial(drop, scale=scale), backend.from_host(keep.part(shape, indices))


def factors(
    keep: Bernoulli, dtype: np.dtype[Any], shape: Sequence[int], indices: Sequence[Indices], backend: Backend
) -> Block:  # fmt: skip
    """Return the factors by which `dropping` multiplies: 1 / p or 0."""
    if backend.cuda and draws_on_device(ones := backend.xp.ones(tuple(map(len, indices)), dtype), len(shape)):
        dropped, table = dropping(keep, ones, shape, indices, backend)
        return dropped(ones, table)
    return backend.from_host(keep.part(shape, indices) * dtype.type(1 / keep.p if keep.p else 0))


# ------------------------------------------------------------------ the normal distribution
# Highest power first, as Horner's rule takes them.
_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip
Ratio = tuple[tuple[float, ...], tuple[float, ...]]


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """Return x with P(X ≤ x) = p for a standard normal X, to about 1e-16.

    It takes one uniform number an element, unlike methods that take pairs or reject, so that elements stay independent
    (Wichura, Algorithm AS 241, Applied Statistics 37, 1988).

    Parameters
    ----------
    p : array of float64
        Contiguous, above 0 and below 1.
    """
    q = p - 0.5
    x = q * _ratio(_CENTRE, 0.180625 - q * q)
    outer = np.flatnonzero(np.abs(q) > 0.425)
    if outer.size:
        side = p[outer]
        r = np.sqrt(-np.log(np.minimum(side, 1.0 - side)))
        far = r > 5.0
        z = _ratio(_MIDDLE, r - 1.6)
        if far.any():
            z[far] = _ratio(_TAIL, r[far] - 5.0)
        x[outer] = np.copysign(z, q[outer])
    return x


def _ratio(ratio: Ratio, r: np.ndarray) -> np.ndarray:
    above, below = (_horner(coefficients, r) for coefficients in ratio)
    above /= below
    return above


def _horner(coefficients: tuple[float, ...], r: np.ndarray) -> np.ndarray:
    total = r * coefficients[0]
    for c in coefficients[1:-1]:
        total += c
        total *= r
    total += coefficients[-1]
    return total
