"""`default_rng`: random numbers in the order they are asked for, as of NumPy's Generator, the same on every grid."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray, create, namespace, sorting
from parlinalg.array.core import axis_of, delivered
from parlinalg.array.joining import broadcast_to, take, take_along_axis
from parlinalg.array.shapes import reshape, shape_of
from parlinalg.comm.check import array_checksum
from parlinalg.grid import Grid, default_grid
from parlinalg.layout import Layout
from parlinalg.random.counter import RandomStream, Words, block_words, stream_key
from parlinalg.random.distributions import (
    filled,
    float_dtype,
    open_unit,
    unit,
    write_integers,
)
from parlinalg.random.normals import normal_quantile, write_normals

Size = int | Sequence[int] | None
Number = Any
"""A number, or an array of them that broadcasts to the result: distributed, or plain and the same on all ranks."""

RIGHT = "all ranks make a generator with the same seed, and the same calls of it in the same order"


def default_rng(seed: Any = None) -> Generator:
    """Return a generator of random numbers, for all ranks to use together.

    Parameters
    ----------
    seed : None, int, sequence of int, numpy.random.SeedSequence or Generator
        The same on all ranks.  None takes one from the operating system, on rank 0 of the default grid, for all
        (collective); a Generator is returned as it is.

    Examples
    --------
    >>> import parlinalg as pla
    >>> rng = pla.random.default_rng(7)
    >>> rng.integers(10, size=5).gather()
    array([6, 0, 7, 6, 3])
    """
    return seed if isinstance(seed, Generator) else Generator(seed)


class Generator:
    """Random numbers of a seed, drawn one call after the other; the methods are those of `numpy.random.Generator`.

    An element depends on the seed, the number of the call, and its index in the global array: so all grids and layouts
    give the same bits, and every rank computes its own block alone.  All ranks make the same calls; a rank with another
    seed, or another number of calls before, is noticed by the next one (a CommError on all ranks).

    The numbers are not those that NumPy draws from the same seed.

    Every method that draws takes `size`, the global shape (by default that to which the parameters broadcast: an array
    without dims for numbers), and by keyword `grid` and `layout` (by default the default ones), and `dtype` where there
    is a choice.  Parameters may be arrays that broadcast to `size`, distributed ones too.

    Parameters
    ----------
    seed
        As of `default_rng`.
    """

    def __init__(self, seed: Any = None) -> None:
        self.seed = _seed(seed)
        self.path: tuple[int, ...] = ()
        """Which child of which child of the seed's generator it is (`spawn`)."""
        self.calls = 0
        """How many arrays were drawn so far."""
        self.spawned = 0

    def __repr__(self) -> str:
        return f"Generator(seed={self.seed}, path={self.path}, calls={self.calls})"

    # ------------------------------------------------------------------ state
    def spawn(self, n_children: int) -> list[Generator]:
        """Return new generators, whose numbers are independent of this one's and each other's."""
        n = operator.index(n_children)
        if n < 0:
            raise ValueError(f"spawn makes at least 0 generators, not {n}")
        children = []
        for i in range(self.spawned, self.spawned + n):
            child = Generator(self.seed)
            child.path = (*self.path, i)
            children.append(child)
        self.spawned += n
        return children

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator, as values that JSON can carry."""
        return {"seed": self.seed, "path": list(self.path), "calls": self.calls, "spawned": self.spawned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` returned."""
        missing = {"seed", "path", "calls", "spawned"} ^ set(state)
        if missing:
            raise ValueError(f"a generator's state has seed, path, calls and spawned; this one has {sorted(state)}")
        self.seed, self.path = _seed(state["seed"]), tuple(int(i) for i in state["path"])
        self.calls, self.spawned = int(state["calls"]), int(state["spawned"])

    def _next(self) -> Callable[[int], np.ndarray]:
        """Count a call; return the key of its stream, and of those for the elements that it rejects."""
        name, call = "/".join(("generator", *map(str, self.path))), self.calls
        self.calls += 1
        return lambda again: stream_key(self.seed, name, call, again)

    # ------------------------------------------------------------------ uniform and normal
    def random(
        self, size: Size = None, dtype: DTypeLike = np.float64, out: DistArray | None = None, *,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers from 0 to below 1, with as many binary digits as the dtype has."""
        dtype = float_dtype(dtype, "random")
        digits = min(53, int(fraction_digits(dtype)) + 1)
        return self._drawn("random", lambda words: unit(words, digits), (), size, dtype, grid, layout, out)

    def uniform(
        self, low: Number = 0.0, high: Number = 1.0, size: Size = None, *, dtype: DTypeLike = np.float64,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers from `low` to `high`, which rounding may reach, all equally likely."""
        low, high = _arrays(low, high)
        _refuse(np.isinf(high - low), "high - low range exceeds valid bounds", OverflowError)
        _refuse(high - low < 0, "high - low < 0")
        dtype = float_dtype(dtype, "uniform")

        def convert(words: Words, low: Any, high: Any) -> Any:
            return low + (high - low) * unit(words)

        return self._drawn("uniform", convert, (low, high), size, dtype, grid, layout)

    def standard_normal(
        self, size: Size = None, dtype: DTypeLike = np.float64, out: DistArray | None = None, *,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return normally distributed numbers of mean 0 and variance 1."""
        dtype = float_dtype(dtype, "standard_normal")
        return self._normals("standard_normal", (), size, dtype, grid, layout, out)

    def normal(
        self, loc: Number = 0.0, scale: Number = 1.0, size: Size = None, *, dtype: DTypeLike = np.float64,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return normally distributed numbers of mean `loc` and standard deviation `scale`."""
        _not_negative(scale=scale)
        return self._normals("normal", (loc, scale), size, float_dtype(dtype, "normal"), grid, layout)

    def _normals(
        self, name: str, parameters: Sequence[Any], size: Size, dtype: np.dtype[Any], grid: Grid | None,
        layout: Layout | None, out: DistArray | None = None,
    ) -> DistArray:  # fmt: skip
        """Return normally distributed numbers; the parameters are none, or mean and standard deviation."""

        def fill(
            key: np.ndarray, shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray, parts: Any
        ) -> None:
            write_normals(key, shape, ranges, flat, *parts)

        return self._filled(name, fill, parameters, size, dtype, grid, layout, out)

    def lognormal(
        self, mean: Number = 0.0, sigma: Number = 1.0, size: Size = None, *, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers whose logarithms are normally distributed."""
        _not_negative(sigma=sigma)

        def quantile(u: Any, mean: Any, sigma: Any) -> Any:
            return np.exp(mean + sigma * normal_quantile(u))

        return self._quantiles("lognormal", quantile, (mean, sigma), size, None, grid, layout)

    # ------------------------------------------------------------------ by the inverse of a distribution
    def standard_exponential(
        self, size: Size = None, dtype: DTypeLike = np.float64, method: str = "inv", out: DistArray | None = None, *,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return exponentially distributed numbers of mean 1; `method` has no meaning, and is NumPy's."""
        dtype = float_dtype(dtype, "standard_exponential")
        return self._quantiles("standard_exponential", lambda u: -np.log(u), (), size, dtype, grid, layout, out)

    def exponential(
        self, scale: Number = 1.0, size: Size = None, *, dtype: DTypeLike = np.float64, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return exponentially distributed numbers of mean `scale`."""
        _not_negative(scale=scale)
        dtype = float_dtype(dtype, "exponential")
        return self._quantiles(
            "exponential", lambda u, scale: -np.log(u) * scale, (scale,), size, dtype, grid, layout
        )  # fmt: skip

    def laplace(
        self, loc: Number = 0.0, scale: Number = 1.0, size: Size = None, *, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers of the Laplace distribution."""
        _not_negative(scale=scale)

        def quantile(u: Any, loc: Any, scale: Any) -> Any:
            return loc + scale * np.copysign(np.log(2 * np.minimum(u, 1 - u)), u - 0.5)

        return self._quantiles("laplace", quantile, (loc, scale), size, None, grid, layout)

    def logistic(
        self, loc: Number = 0.0, scale: Number = 1.0, size: Size = None, *, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers of the logistic distribution."""
        _not_negative(scale=scale)
        return self._quantiles(
            "logistic", lambda u, loc, scale: loc + scale * np.log(u / (1 - u)), (loc, scale), size, None, grid, layout
        )

    def gumbel(
        self, loc: Number = 0.0, scale: Number = 1.0, size: Size = None, *, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers of the Gumbel distribution."""
        _not_negative(scale=scale)
        return self._quantiles(
            "gumbel", lambda u, loc, scale: loc - scale * np.log(-np.log(u)), (loc, scale), size, None, grid, layout
        )

    def rayleigh(
        self, scale: Number = 1.0, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of the Rayleigh distribution."""
        _not_negative(scale=scale)
        return self._quantiles(
            "rayleigh", lambda u, scale: scale * np.sqrt(-2 * np.log(u)), (scale,), size, None, grid, layout
        )

    def weibull(
        self, a: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of the Weibull distribution of shape `a` and scale 1."""
        _not_negative(a=a)

        def quantile(u: Any, a: Any) -> Any:
            with np.errstate(divide="ignore"):
                return (-np.log(u)) ** (1 / a)

        return self._quantiles("weibull", quantile, (a,), size, None, grid, layout)

    def pareto(
        self, a: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of the Lomax distribution, Pareto's from 0, of shape `a`."""
        _positive(a=a)
        return self._quantiles("pareto", lambda u, a: np.expm1(-np.log(u) / a), (a,), size, None, grid, layout)

    def power(
        self, a: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers from 0 to 1 with density a xᵃ⁻¹."""
        _positive(a=a)
        return self._quantiles("power", lambda u, a: u ** (1 / a), (a,), size, None, grid, layout)

    def standard_cauchy(
        self, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of the Cauchy distribution."""
        return self._quantiles("standard_cauchy", lambda u: np.tan(np.pi * (u - 0.5)), (), size, None, grid, layout)

    def triangular(
        self, left: Number, mode: Number, right: Number, size: Size = None, *, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers of the triangular distribution from `left` by `mode` to `right`."""
        left, mode, right = _arrays(left, mode, right)
        _refuse(left > mode, "left > mode")
        _refuse(mode > right, "mode > right")
        _refuse(left == right, "left == right")

        def quantile(u: Any, left: Any, mode: Any, right: Any) -> Any:
            rising = u * (right - left) < mode - left
            up = left + np.sqrt(u * (right - left) * np.maximum(mode - left, 0))
            down = right - np.sqrt((1 - u) * (right - left) * np.maximum(right - mode, 0))
            return np.where(rising, up, down)

        return self._quantiles("triangular", quantile, (left, mode, right), size, None, grid, layout)

    def standard_gamma(
        self, shape: Number, size: Size = None, dtype: DTypeLike = np.float64, out: DistArray | None = None, *,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers of the gamma distribution of this shape and scale 1."""
        from scipy.special import gammaincinv

        _not_negative(shape=shape)
        dtype = float_dtype(dtype, "standard_gamma")
        return self._quantiles(
            "standard_gamma", lambda u, shape: gammaincinv(shape, u), (shape,), size, dtype, grid, layout, out
        )

    def gamma(
        self, shape: Number, scale: Number = 1.0, size: Size = None, *, grid: Grid | None = None,
        layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return numbers of the gamma distribution."""
        from scipy.special import gammaincinv

        _not_negative(shape=shape, scale=scale)
        return self._quantiles(
            "gamma", lambda u, shape, scale: gammaincinv(shape, u) * scale, (shape, scale), size, None, grid, layout
        )

    def chisquare(
        self, df: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of the chi-square distribution of `df` degrees of freedom."""
        from scipy.special import gammaincinv

        _positive(df=df)
        return self._quantiles("chisquare", lambda u, df: 2 * gammaincinv(df / 2, u), (df,), size, None, grid, layout)

    def beta(
        self, a: Number, b: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of the beta distribution."""
        from scipy.special import betaincinv

        _positive(a=a, b=b)
        return self._quantiles("beta", lambda u, a, b: betaincinv(a, b, u), (a, b), size, None, grid, layout)

    def standard_t(
        self, df: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of Student's t distribution of `df` degrees of freedom."""
        from scipy.special import stdtrit

        _positive(df=df)
        return self._quantiles("standard_t", lambda u, df: stdtrit(df, u), (df,), size, None, grid, layout)

    def geometric(
        self, p: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return the numbers of trials up to the first success, each of probability `p` (int64)."""
        (p,) = _arrays(p)
        _refuse((p <= 0) | (p > 1) | (p != p), "p <= 0, p > 1 or p contains NaNs")  # noqa: PLR0124

        def quantile(u: Any, p: Any) -> Any:
            with np.errstate(divide="ignore"):
                return np.clip(np.ceil(np.log(u) / np.log1p(-p)), 1, 2.0**62)

        return self._quantiles("geometric", quantile, (p,), size, np.dtype(np.int64), grid, layout)

    def poisson(
        self, lam: Number = 1.0, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return counts of events of which `lam` are expected (int64)."""
        from scipy.special import pdtr, pdtrik

        (lam,) = _arrays(lam)
        _refuse((lam < 0) | (lam != lam), "lam < 0 or lam is NaN")  # noqa: PLR0124
        _refuse(lam > 2**62, "lam value too large")
        return self._quantiles(
            "poisson", _counts(pdtrik, pdtr), (lam,), size, np.dtype(np.int64), grid, layout
        )  # fmt: skip

    def binomial(
        self, n: Number, p: Number, size: Size = None, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return numbers of successes in `n` trials, each of probability `p` (int64)."""
        from scipy.special import bdtr, bdtrik

        n, p = _arrays(n, p)
        _refuse((p < 0) | (p > 1) | (p != p), "p < 0, p > 1 or p is NaN")  # noqa: PLR0124
        _refuse(n < 0, "n < 0")
        counts = _counts(bdtrik, bdtr)

        def quantile(u: Any, n: Any, p: Any) -> Any:
            trials, sure = np.asarray(n).astype(np.int64), (p == 0) | (p == 1) | (n == 0)
            return np.where(sure, n * p, np.minimum(counts(u, trials, np.where(sure, 0.5, p)), n))

        return self._quantiles("binomial", quantile, (n, p), size, np.dtype(np.int64), grid, layout)

    # ------------------------------------------------------------------ integers
    def integers(
        self, low: Number, high: Number = None, size: Size = None, dtype: DTypeLike = np.int64, endpoint: bool = False,
        *, grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return integers from `low` to below `high`, or with `endpoint` to `high`, all exactly equally likely.

        Parameters
        ----------
        low, high : int, or array
            If one is given alone it is `high`, and the integers begin at 0.
        dtype : integer dtype, or bool

        Raises
        ------
        ValueError
            If there is no integer in a range, or it exceeds the dtype.
        """
        dtype = np.dtype(dtype).newbyteorder("=")
        if dtype.kind not in "iub":
            raise TypeError(f"Unsupported dtype {dtype!r} for integers")
        alone, below, above = high is None, "<" if endpoint else "<=", ">" if endpoint else ">="
        low, high = (0, low) if alone else (low, high)
        least, largest = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        if not _is_array(low) and not _is_array(high):
            low, last = _whole(low), _whole(high) - (not endpoint)
            if low < least:
                raise ValueError(f"low is out of bounds for {dtype.name}")
            if last > largest:
                raise ValueError(f"high is out of bounds for {dtype.name}")
            if last < low:
                raise ValueError(f"high {below} 0" if alone else f"low {above} high")
            return self._integers(low, last - low, (), size, dtype, grid, layout)
        low, high = _arrays(low, high)
        _refuse(low < least, f"low is out of bounds for {dtype.name}")
        most = largest + (not endpoint)
        if high.dtype.kind not in "iu" or most <= np.iinfo(high.dtype).max:  # else no element is larger
            _refuse(high > most, f"high is out of bounds for {dtype.name}")
        _refuse(low > high if endpoint else low >= high, f"low {above} high")
        return self._integers(int(not endpoint), None, (low, high), size, dtype, grid, layout)

    def _integers(
        self, low: int, most: int | None, bounds: Sequence[Any], size: Size, dtype: np.dtype[Any], grid: Grid | None,
        layout: Layout | None,
    ) -> DistArray:  # fmt: skip
        """Return integers from `low` to `low + most`; or, with two arrays as bounds, between those, less `low`."""
        shape, grid, layout = _placed("integers", bounds, size, grid, layout)
        key_of = self._next()
        parts = _parts(bounds, shape, grid, layout, None)

        def fill(shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray) -> None:
            if most is not None:
                return write_integers(key_of, shape, ranges, flat, low, most)
            first, last = (
                np.ascontiguousarray(np.broadcast_to(_modular(v), flat.shape)) for v in parts
            )  # fmt: skip
            return write_integers(key_of, shape, ranges, flat, first, last - np.uint64(low) - first)

        facts = {**_facts(key_of(0), bounds), "bounds": [low, most]}
        return filled("Generator.integers", fill, shape, grid, layout, dtype, RIGHT, facts, always=True)

    # ------------------------------------------------------------------ orders
    def permutation(
        self, x: Any, axis: int = 0, *, grid: Grid | None = None, layout: Layout | None = None
    ) -> DistArray:
        """Return 0 to x - 1 in random order, or the items of a dim of an array, all orders exactly equally likely.

        Random keys are sorted by all ranks together; equal ones are told apart by further keys.
        """
        if not isinstance(x, DistArray) and np.ndim(x) == 0 and _is_integer(x):
            _, grid, layout = create.placed(max(0, int(x)), grid, layout)
            return self._order((max(0, int(x)),), 0, grid).redistribute(layout)
        x = _distributed(x, grid)
        d = axis_of(axis, x.ndim)
        layout = x.layout.with_partial(()) if layout is None else layout
        return take(x, self._order((x.shape[d],), 0, x.grid), d).redistribute(layout)

    def permuted(self, x: Any, axis: int | None = None, out: DistArray | None = None) -> DistArray:
        """Return an array with the elements of every line along a dim in random order; by default of all elements."""
        x = _distributed(x, None)
        if not x.ndim:
            raise TypeError("len() of unsized object")
        if axis is None:
            line = reshape(x, (x.size,))
            result = reshape(take(line, self._order((x.size,), 0, x.grid), 0), x.shape)
        else:
            d = axis_of(axis, x.ndim)
            result = take_along_axis(x.summed(), self._order(x.shape, d, x.grid, x.layout.with_partial(())), d)
        return delivered(result.redistribute(x.layout.with_partial(())), out, "permuted")

    def shuffle(self, x: DistArray, axis: int = 0) -> None:
        """Put the items of a dim into random order, in place."""
        if not isinstance(x, DistArray):
            raise TypeError(f"shuffle takes a DistArray, not {type(x).__name__}; permutation returns a new array")
        if not x.ndim:
            raise TypeError("len() of unsized object")
        delivered(self.permutation(x, axis), x, "shuffle")

    def _order(self, shape: tuple[int, ...], d: int, grid: Grid, layout: Layout | None = None) -> DistArray:
        """Return indices along a dim in random order, for every line of the shape another."""
        layout = grid.default_layout(shape) if layout is None else layout
        keys: list[DistArray] = []
        while True:
            keys.append(self._keys(shape, grid, layout))
            order = sorting.argsort(keys[-1], d)
            for key in reversed(keys[:-1]):
                order = take_along_axis(order, sorting.argsort(take_along_axis(key, order, d), d), d)
            lead = (slice(None),) * d
            ties: Any = True
            for key in keys:
                line = take_along_axis(key, order, d)
                ties = (line[(*lead, slice(1, None))] == line[(*lead, slice(0, -1))]) & ties
            if not bool(np.any(ties)):
                return order

    def _keys(self, shape: tuple[int, ...], grid: Grid, layout: Layout) -> DistArray:
        return self._integers(0, (1 << KEY_BITS) - 1, (), shape, np.dtype(np.uint64), grid, layout)

    # ------------------------------------------------------------------ choice
    def choice(
        self, a: Any, size: Size = None, replace: bool = True, p: Any = None, axis: int = 0, shuffle: bool = True, *,
        grid: Grid | None = None, layout: Layout | None = None,
    ) -> DistArray:  # fmt: skip
        """Return items of a dim of an array, or of 0 to a - 1, chosen at random.

        Parameters
        ----------
        a : int or array
        replace : bool
            Let an item be chosen more than once.
        p : array, optional
            The items' probabilities, by default equal.  Without `replace` those of the items that are left, each time.
        shuffle : bool
            NumPy's; the order of the items is always random.
        layout : Layout, optional
            That of the result.
        """
        items = None
        if np.ndim(a):
            items = _distributed(a, grid)
        else:
            a = a.item() if isinstance(a, DistArray | np.ndarray) else a
            if not _is_integer(a):
                raise ValueError(f"a must be a sequence or an integer, not {type(a)}")
        grid = items.grid if items is not None else default_grid() if grid is None else grid
        n = int(a) if items is None else items.shape[axis_of(axis, items.ndim)]
        shape = shape_of(() if size is None else size)
        k = math.prod(shape)
        if n <= 0 and k:
            if items is None:
                raise ValueError("a must be a positive integer unless no samples are taken")
            raise ValueError("a cannot be empty unless no samples are taken")
        weights = None if p is None else self._weights(p, n, grid)
        if not replace and k > n:
            raise ValueError("Cannot take a larger sample than population when replace is False")
        if not k:
            found = create.zeros(shape, grid, dtype=np.int64)
        elif replace:
            found = self._with_repeats(n, weights, shape, grid)
        else:
            found = reshape(self._distinct(n, k, grid) if weights is None else self._without(weights, k), shape)
        if items is not None:
            found = take_any(items, found, axis_of(axis, items.ndim))
        return found if layout is None else found.redistribute(layout)

    def _weights(self, p: Any, n: int, grid: Grid) -> DistArray:
        """Return the checked probabilities."""
        p = p if isinstance(p, DistArray) else create.asarray(p, dtype=np.float64, grid=grid)
        if p.ndim != 1:
            raise ValueError("p must be 1-dimensional")
        if p.size != n:
            raise ValueError("a and p must have same size")
        p = p.summed().astype(np.float64)
        _refuse(np.isnan(p), "Probabilities contain NaN")
        _refuse(p < 0, "Probabilities are not non-negative")
        if abs(p.sum().item() - 1) > math.sqrt(np.finfo(np.float64).eps):
            raise ValueError("Probabilities do not sum to 1")
        return p

    def _with_repeats(self, n: int, weights: DistArray | None, shape: tuple[int, ...], grid: Grid) -> DistArray:
        integer = np.dtype(np.int64)
        if weights is None:
            return self._integers(0, n - 1, (), shape, integer, grid, None)
        # Whole numbers, since their running sums are the same however the ranks add them.
        parts = np.floor(weights * WEIGHT).astype(np.int64)
        bounds = sorting.cumulative(parts, 0)
        total = bounds[-1].item()
        return sorting.searchsorted(bounds, self._integers(0, total - 1, (), shape, integer, grid, None), "right")

    def _distinct(self, n: int, k: int, grid: Grid) -> DistArray:
        """Return k of 0 to n - 1, all choices and orders equally likely.

        Of numbers drawn one after the other the first k different ones are taken, where k is small: so about k are
        sorted, not n.
        """
        if 2 * k > n:
            return self._order((n,), 0, grid)[:k]
        calls = self.calls
        expected = -n * math.log1p(-k / n)
        many = math.ceil(expected + 4 * math.sqrt(expected)) + 8
        while True:
            self.calls = calls  # the same numbers, and more of them
            numbers = self._integers(0, n - 1, (), (many,), np.dtype(np.int64), grid, None)
            firsts = namespace.sort(namespace.unique_all(numbers).indices)
            if firsts.size >= k:
                return take(numbers, firsts[:k], 0)
            many *= 2

    def _without(self, weights: DistArray, k: int) -> DistArray:
        """Return k indices drawn one after the other, each by the weights of those that are left.

        They are those of the least exponential waiting times (Efraimidis and Spirakis, Information Processing Letters
        97, 2006).
        """
        some = weights > 0
        if int(some.sum().item()) < k:
            raise ValueError("Fewer non-zero entries in p than size")
        waits = self.standard_exponential(weights.shape, grid=weights.grid)
        waits = namespace.where(some, waits / namespace.where(some, weights, 1.0), np.inf)
        return sorting.argsort(waits)[:k]

    # ------------------------------------------------------------------ drawing
    def _quantiles(
        self, name: str, quantile: Callable[..., Any], parameters: Sequence[Any], size: Size,
        dtype: np.dtype[Any] | None, grid: Grid | None, layout: Layout | None, out: DistArray | None = None,
    ) -> DistArray:  # fmt: skip
        """Return the numbers of a distribution, by its inverse on numbers above 0 and below 1."""

        def convert(words: Words, *parameters: Any) -> Any:
            return quantile(open_unit(words), *parameters)

        return self._drawn(name, convert, parameters, size, dtype or np.dtype(np.float64), grid, layout, out)

    def _drawn(
        self, name: str, convert: Callable[..., Any], parameters: Sequence[Any], size: Size, dtype: np.dtype[Any],
        grid: Grid | None, layout: Layout | None, out: DistArray | None = None,
    ) -> DistArray:  # fmt: skip
        """Return the array of what `convert` makes of words and the parameters' elements."""

        def fill(
            key: np.ndarray, shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray, parts: Any
        ) -> None:
            for place, words in block_words(RandomStream(key), shape, ranges):
                tile = slice(place, place + len(words))
                flat[tile] = convert(words, *(v[tile] if isinstance(v, np.ndarray) else v for v in parts))

        return self._filled(name, fill, parameters, size, dtype, grid, layout, out)

    def _filled(
        self, name: str, fill: Callable[..., None], parameters: Sequence[Any], size: Size, dtype: np.dtype[Any],
        grid: Grid | None, layout: Layout | None, out: DistArray | None,
    ) -> DistArray:  # fmt: skip
        """Return the array whose blocks `fill` writes, from the key, as for `filled`, and the parameters' elements."""
        if out is not None:
            size, grid = out.shape if size is None else size, out.grid
        shape, grid, layout = _placed(name, parameters, size, grid, layout)
        key = self._next()(0)
        parts = _parts(parameters, shape, grid, layout, np.float64)

        def write(shape: tuple[int, ...], ranges: Sequence[range], flat: np.ndarray) -> None:
            fill(key, shape, ranges, flat, parts)

        facts = _facts(key, parameters)
        result = filled(f"Generator.{name}", write, shape, grid, layout, dtype, RIGHT, facts, always=True)
        return delivered(result, out, name)


KEY_BITS = 64
"""The random bits of a key by which permutations are sorted."""

WEIGHT = 2.0**62
"""The sum of the whole numbers that stand for the probabilities of a choice."""


def fraction_digits(dtype: np.dtype[Any]) -> int:
    """Return the binary digits of a floating-point dtype behind the leading one."""
    return 7 if dtype.name == "bfloat16" else int(np.finfo(dtype).nmant)


def _seed(seed: Any) -> int:
    """Return a seed as a whole number below 2⁶⁴: one of many words by NumPy's hash."""
    if seed is None:
        return int(default_grid().world.share(secrets.randbits(64), others="alike")[0])
    if _is_integer(seed) and 0 <= int(seed) < 1 << 64:
        return int(seed)
    if isinstance(seed, np.random.Generator | np.random.BitGenerator | np.random.RandomState):
        raise TypeError(f"a {type(seed).__name__} of NumPy draws other numbers; give a seed, the same on all ranks")
    try:
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    except (TypeError, ValueError) as error:
        kind = type(error)
        raise kind(f"seed is a whole number of at least 0, or several, or None, not {seed!r}") from None
    return int(sequence.generate_state(1, np.uint64)[0])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_array(value: Any) -> bool:
    return isinstance(value, DistArray) or np.ndim(value) > 0


def _arrays(*values: Any) -> list[Any]:
    """Return numbers and lists as arrays: distributed ones, beside a distributed array, but for numbers."""
    grid = next((v.grid for v in values if isinstance(v, DistArray)), None)
    return [
        v if isinstance(v, DistArray) else create.asarray(v, grid=grid) if grid and np.ndim(v) else np.asarray(v)
        for v in values
    ]


def _whole(value: Any) -> int:
    return int(value.item() if isinstance(value, DistArray) else value)


def _refuse(bad: Any, message: str, error: type[Exception] = ValueError) -> None:
    """Raise an error on all ranks if a condition holds anywhere.  Collective if it is distributed."""
    if bool(np.any(bad)):
        raise error(message)


def _not_negative(**parameters: Any) -> None:
    for name, value in parameters.items():
        _refuse(np.less(value, 0), f"{name} < 0")


def _positive(**parameters: Any) -> None:
    for name, value in parameters.items():
        _refuse(np.less_equal(value, 0), f"{name} <= 0")


def _distributed(x: Any, grid: Grid | None) -> DistArray:
    return x if isinstance(x, DistArray) else create.asarray(x, grid=grid)


def take_any(items: DistArray, index: DistArray, d: int) -> DistArray:
    """Return the items of a dim that an index array of any dims chooses."""
    return items[(*(slice(None),) * d, index)]


def _counts(inverse: Callable[..., Any], distribution: Callable[..., Any]) -> Callable[..., Any]:
    """Return the quantiles of a distribution of counts, whose `inverse` is continuous and may be off by rounding."""

    def quantile(u: Any, *parameters: Any) -> Any:
        at = np.ceil(np.nan_to_num(inverse(u, *parameters)))
        below = np.maximum(at - 1, 0)
        at = np.where(distribution(below, *parameters) >= u, below, at)
        return np.where(distribution(np.zeros_like(u), *parameters) >= u, 0, at)

    return quantile


def _modular(values: Any) -> Any:
    """Return integers modulo 2⁶⁴, as uint64."""
    values = np.asarray(values)
    return values.astype(np.int64).astype(np.uint64) if values.dtype.kind in "bif" else values.astype(np.uint64)


def _placed(
    name: str, parameters: Sequence[Any], size: Size, grid: Grid | None, layout: Layout | None
) -> tuple[tuple[int, ...], Grid, Layout]:  # fmt: skip
    """Return the shape, grid and layout of an array to be drawn."""
    given = [np.shape(v) for v in parameters]
    shape = np.broadcast_shapes(*given) if size is None else shape_of(size)
    if np.broadcast_shapes(shape, *given) != shape:
        raise ValueError(f"{name}: parameters of shapes {', '.join(map(str, given))} do not broadcast to size {shape}")
    if grid is None:
        grid = next((v.grid for v in parameters if isinstance(v, DistArray)), None)
    return create.placed(shape, grid, layout)


def _parts(parameters: Sequence[Any], shape: tuple[int, ...], grid: Grid, layout: Layout, dtype: Any) -> list[Any]:
    """Return the parameters of this rank's block: numbers, or flat arrays of its elements."""
    cut = layout.with_partial(())
    held = tuple(slice(r.start, r.stop) for r in grid.block(cut, shape))
    found = []
    for value in parameters:
        if isinstance(value, DistArray):
            value = value if value.grid is grid else value.to_grid(grid, grid.default_layout(value.shape))
            block = broadcast_to(value.summed(), shape).redistribute(cut).block
            found.append(np.ascontiguousarray(grid.backend.to_host(block), dtype=dtype).reshape(-1))
        elif np.ndim(value):
            block = np.broadcast_to(np.asarray(value, dtype=dtype), shape)[held]
            found.append(np.ascontiguousarray(block).reshape(-1) if grid.inside else np.zeros(0))
        else:
            found.append(np.asarray(value, dtype=dtype)[()])
    return found


def _facts(key: np.ndarray, parameters: Sequence[Any]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks that draw together."""
    plain = (v for v in parameters if not isinstance(v, DistArray))
    return {
        "the seed and the number of calls": key.tolist(),
        "parameters": [array_checksum(np.asarray(v)) if np.ndim(v) else repr(v) for v in plain],
    }
