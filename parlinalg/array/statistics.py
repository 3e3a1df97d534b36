"""Order statistics, histograms and moments of distributed arrays.

Quantiles are found by selection, not by a sort: each rank sorts its part of a line, and all ranks together narrow down
the elements of the wanted places, by the weighted median of their medians (as the splitters of a sort are found).  So
O(log n) rounds of a few words a rank and place move, and no elements do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.align import spread, together
from parlinalg.array.core import Axis, DistArray, axis_of, same_grid, truth, whole
from parlinalg.array.create import distribute
from parlinalg.array.dispatch import of_arrays
from parlinalg.array.joining import concatenate
from parlinalg.array.reductions import mean, settled, sorted_dims, total
from parlinalg.array.rows import on_device
from parlinalg.array.shapes import reshape
from parlinalg.array.sorting import gathered, searchsorted, sorted_block, used
from parlinalg.array.ufuncs import operand
from parlinalg.backend import namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.shapes import has_values, values_needed
from parlinalg.layout import Layout, cut_lengths
from parlinalg.redistribute import redistribute

Block = Any
_NUMPY: Any = np  # whose functions return DistArrays, which its types do not know

SHORT = 64
"""Elements a rank and wanted place of a line up to which whole lines are brought together, where there are enough."""


# ------------------------------------------------------------------------------------------------ selection
def selected(
    a: DistArray, dims: tuple[int, ...], places: Callable[[np.ndarray], np.ndarray], wanted: int
) -> tuple[DistArray, DistArray]:
    """Return the elements at these places of the sorted lines, and how many elements a line has that are numbers.

    Parameters
    ----------
    dims : tuple of int
        The dims that are one line together, in any order.
    places : callable
        Gets the numbers of elements that are not NaN, an array of one a line, and returns integers [wanted, lines].  A
        place of a line without numbers is not looked for; its element is NaN.

    Returns
    -------
    values : DistArray
        [wanted, other dims].
    counts : DistArray
        Of the other dims.
    """
    a, grid = settled(a, "quantile"), a.grid
    rest = [d for d in range(a.ndim) if d not in dims]
    cut = tuple(x for x in grid.axes if x in {x for d in dims for x in a.layout.dims[d]} and grid.sizes[x] > 1)
    ranks = math.prod(grid.sizes[x] for x in cut)
    n, lines = (math.prod(a.shape[d] for d in group) for group in (dims, rest))
    if cut and lines >= ranks and n <= SHORT * ranks * max(1, wanted):
        others = [() if d in dims else c for d, c in enumerate(a.layout.dims)]
        a = a.redistribute(spread([0 if d in dims else m for d, m in enumerate(a.shape)], cut, others))
        cut = ()
    if cut and not grid.backend.values:
        raise values_needed("a median or quantile over a dim that is cut")
    layout, shape = Layout(*(a.layout.dims[d] for d in rest)), tuple(a.shape[d] for d in rest)
    held, wide = grid.block_shape(layout, shape), Layout(None, *layout.dims)
    if not grid.inside or not has_values(a.block):
        empty = grid.backend.zeros(grid.block_shape(wide, (wanted, *shape)), a.dtype)
        return a.like(empty, wide, (wanted, *shape)), a.like(grid.backend.zeros(held, np.int64), layout, shape)
    keys = a.block.transpose((*rest, *dims)).reshape((math.prod(held), -1 if a.block.size else 0)).copy()
    if not a.block.size:
        keys = grid.backend.zeros((math.prod(held), math.prod(a.block.shape[d] for d in dims)), a.dtype)
    keys.sort(axis=-1)
    here = np.full(len(keys), keys.shape[1], np.int64)
    if a.dtype.kind in "fcV":
        here -= grid.backend.to_host(a.xp.isnan(keys).sum(axis=-1)).astype(np.int64)
    comm = grid.comm(cut) if cut else None
    counts = here if comm is None else gathered(comm, here).sum(axis=0)
    found = _found(keys, here, counts, places(counts), comm, grid.backend)
    values = grid.backend.from_host(found).reshape(grid.block_shape(wide, (wanted, *shape)))
    number = grid.backend.from_host(counts).reshape(held)
    return a.like(values, wide, (wanted, *shape)), a.like(number, layout, shape)


def _found(
    keys: Block, here: np.ndarray, counts: np.ndarray, places: np.ndarray, comm: Any, backend: Any
) -> np.ndarray:
    """Return the elements at `places` [wanted, lines] of lines whose sorted parts are the rows of `keys`.

    `here` and `counts` are the numbers of elements of a row, and of the line, that are not NaN: they come first.
    """

    def at(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        if not keys.shape[1]:
            return np.zeros(len(rows), keys.dtype)
        index = (rows, np.minimum(columns, keys.shape[1] - 1))
        return backend.to_host(keys[tuple(on_device(each, backend) for each in index)])

    def below(rows: np.ndarray, pivots: Any, equal: bool) -> np.ndarray:
        """Return how many elements of these rows are less than the pivots (or equal), by bisection."""
        low, high = np.zeros(len(rows), np.int64), here[rows]
        for _ in range(int(keys.shape[1]).bit_length()):
            middle = (low + high) // 2
            values = at(rows, middle)
            left = (values <= pivots) if equal else (values < pivots)
            open_ = low < high
            low = np.where(open_ & left, middle + 1, low)
            high = np.where(open_ & ~left, middle, high)
        return low

    places = np.broadcast_to(places, (len(places), len(keys)))
    out = np.empty(places.shape, keys.dtype)
    out[...] = np.nan if keys.dtype.kind in "fcV" else 0
    lines = np.broadcast_to(np.arange(len(keys)), places.shape)[places < counts]
    want = places[places < counts]
    if comm is None:
        out[places < counts] = at(lines, want)
        return out
    result = np.empty(len(want), keys.dtype)
    low, high = np.zeros(len(want), np.int64), here[lines]
    todo = np.arange(len(want))
    while todo.size:
        rows, k = lines[todo], want[todo]
        weights = gathered(comm, high[todo] - low[todo])
        medians = gathered(comm, at(rows, (low[todo] + high[todo]) // 2))
        order = np.argsort(np.where(weights > 0, medians, medians.max(axis=0)), axis=0, kind="stable")
        passed = np.cumsum(np.take_along_axis(weights, order, axis=0), axis=0)
        first = (2 * passed >= passed[-1]).argmax(axis=0)
        pivots = np.take_along_axis(medians, np.take_along_axis(order, first[None], axis=0), axis=0)[0]
        less, upto = below(rows, pivots, False), below(rows, pivots, True)
        both = gathered(comm, np.concatenate([less, upto])).sum(axis=0)
        before, until = both[: len(todo)], both[len(todo) :]
        done = (before <= k) & (k < until)
        result[todo[done]] = pivots[done]
        lower, upper = k < before, k >= until
        high[todo[lower]] = np.minimum(high[todo], less)[lower]
        low[todo[upper]] = np.maximum(low[todo], upto)[upper]
        todo = todo[~done]
    out[places < counts] = result
    return out


def median(a: DistArray, axis: Axis = None, keepdims: bool = False, *, ignore_nan: bool = False) -> DistArray:
    """Return the median over dims: of lines of even length the mean of the two elements in the middle."""
    dims = sorted_dims(axis, a.ndim)
    values, counts = selected(a, dims, lambda n: np.stack([(n - 1) // 2, n // 2]).clip(0), 2)
    size = math.prod(a.shape[d] for d in dims)
    kind = np.dtype(np.float64) if a.dtype.kind in "biu" else a.dtype
    if not size:
        return mean(a, axis, None, keepdims)
    if not a.grid.inside:
        found = counts.like(a.grid.backend.zeros(counts.block.shape, kind))
        return _kept(found, a, dims) if keepdims else found
    work = values.astype(work_dtype(kind), copy=False).block
    same = work[0] == work[1]
    block = a.xp.where(same, work[0], (work[0] + work[1]) / 2)  # the sum of two infinities of a sign, too
    if not ignore_nan:
        block = a.xp.where(counts.block < size, block.dtype.type(np.nan), block) if kind.kind in "fcV" else block
    found = counts.like(block.astype(kind, copy=False))
    return _kept(found, a, dims) if keepdims else found


def _kept(found: DistArray, a: DistArray, dims: tuple[int, ...]) -> DistArray:
    """Return a result over dims with these dims of size 1."""
    return reshape(found, tuple(1 if d in dims else n for d, n in enumerate(a.shape)))


def _boundary(index: np.ndarray, below: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    previous = np.floor(index)
    found = np.where(below(index - previous, index), previous, previous + 1).astype(np.int64)
    return np.maximum(found, 0)


def _between(alpha: float, beta: float) -> Callable[[Any, Any], Any]:
    """Return the place of a quantile among n elements by Hyndman and Fan, Sample Quantiles (1996)."""
    return lambda n, q: n * q + (alpha + q * (1 - alpha - beta)) - 1


#: By NumPy's names the places of quantiles q among n elements: whole numbers where nothing is interpolated.
METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "inverted_cdf": lambda n, q: _boundary(n * q - 1, lambda gamma, _: gamma == 0),
    "averaged_inverted_cdf": lambda n, q: n * q - 1,
    "closest_observation": lambda n, q: _boundary(
        n * q - 1.5, lambda gamma, index: (gamma == 0) & (np.floor(index) % 2 == 1)
    ),
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "linear": lambda n, q: (n - 1) * q,
    "median_unbiased": _between(1 / 3, 1 / 3),
    "normal_unbiased": _between(3 / 8, 3 / 8),
    "lower": lambda n, q: np.floor((n - 1) * q).astype(np.int64),
    "higher": lambda n, q: np.ceil((n - 1) * q).astype(np.int64),
    "midpoint": lambda n, q: 0.5 * (np.floor((n - 1) * q) + np.ceil((n - 1) * q)),
    "nearest": lambda n, q: np.around((n - 1) * q).astype(np.int64),
}

#: Where the weight of the next element is not the fraction of the place: it, from the fraction and the place.
_WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "averaged_inverted_cdf": lambda gamma, _: np.where(gamma == 0, 0.5, 1.0),
    "midpoint": lambda _, index: np.where(index % 1 == 0, 0.0, 0.5),
}


def quantile(
    a: DistArray, q: Any, axis: Axis = None, method: str = "linear", keepdims: bool = False, *,
    ignore_nan: bool = False, name: str = "quantile", scale: float = 1,
) -> DistArray:  # fmt: skip
    """Return quantiles over dims, by any of NumPy's methods; a line with a NaN has NaN, unless they are ignored.

    Parameters
    ----------
    q : float or sequence of float
        The same on all ranks; a DistArray is gathered.  Its dims come first in the result.
    scale : float
        By which q is divided: 100 of percentiles.
    """
    if a.dtype.kind == "c":
        raise TypeError(f"np.{name} takes real numbers, not {a.dtype}")
    weak = type(q) in (int, float)
    given = np.asarray(q.gather() if isinstance(q, DistArray) else q)
    given = np.asarray(given / scale) if scale != 1 else given
    if given.ndim > 2:
        raise ValueError(f"np.{name} takes a number or a vector q, not one of shape {given.shape}")
    if given.size and not (given.min() >= 0 and given.max() <= 1):
        raise ValueError(f"np.{name} takes q from 0 to {scale:g}, not {q}")
    if method not in METHODS:
        raise ValueError(f"np.{name} takes the methods {', '.join(METHODS)}, not {method!r}")
    dims = sorted_dims(axis, a.ndim)
    size = math.prod(a.shape[d] for d in dims)
    if not size and ignore_nan:
        nothing = mean(a, dims, None, keepdims)  # NaNs
        return _NUMPY.broadcast_to(nothing, (*given.shape, *nothing.shape)).copy()
    if not size:
        raise IndexError(f"np.{name} over dims {dims} of an array of shape {a.shape}, which has no elements there")
    flat = given.reshape(-1)
    index = np.asarray(METHODS[method](size, flat))
    discrete = index.dtype.kind == "i"

    def around(n: np.ndarray) -> np.ndarray:
        """Return the places of the elements below and above each quantile, [quantiles twice, lines]."""
        at = np.asarray(METHODS[method](n, flat[:, None]))
        low = np.floor(at).astype(np.int64)
        high = low if at.dtype.kind == "i" else low + 1
        return np.concatenate([low, high]).clip(0, np.maximum(n - 1, 0))

    places = around if ignore_nan else lambda n: np.where(n == size, around(np.full_like(n, size)), size)
    values, counts = selected(a, dims, places, 2 * len(flat))
    low, high = values.block[: len(flat)], values.block[len(flat) :]
    weight = given.dtype if given.dtype.kind == "f" else np.dtype(np.float64)
    kind = a.dtype if discrete else np.result_type(a.dtype, 1.0 if weak else weight)
    if discrete or not a.grid.inside:
        block = low.astype(kind, copy=False)
    else:
        n = a.grid.backend.to_host(counts.block) if ignore_nan else np.full(counts.block.shape, size)
        weights = _weights_above(method, n, flat.reshape((-1,) + (1,) * n.ndim))
        block = _interpolated(low.astype(kind, copy=False), high.astype(kind, copy=False), weights, a)
    found = values.like(a.grid.backend.xp.asarray(block), values.layout, (len(flat), *values.shape[1:]))
    shape = tuple(1 if d in dims else m for d, m in enumerate(a.shape)) if keepdims else found.shape[1:]
    return reshape(found, (*given.shape, *shape))


def _weights_above(method: str, n: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the weights of the elements above the quantiles q of n elements, beside those below."""
    at = np.asarray(METHODS[method](n, q))
    ends = (at >= n - 1) | (at < 0)
    gamma = np.where(at < 0, at, np.where(ends, at + 1, at - np.floor(at)))
    return _WEIGHTS[method](gamma, at) if method in _WEIGHTS else gamma


def _interpolated(low: Block, high: Block, weights: np.ndarray, a: DistArray) -> Block:
    """Return the values between `low` and `high` of these weights, as NumPy computes them."""
    t = a.grid.backend.from_host(weights.astype(low.dtype))
    with np.errstate(invalid="ignore"):
        step = high - low
        block = a.xp.where(t >= 0.5, high - step * (1 - t), low + step * t).astype(low.dtype, copy=False)
    return a.xp.where(a.xp.asarray(low == high), low, block)


# ------------------------------------------------------------------------------------------------ the largest
@of_arrays
def top_k(x: DistArray, k: int, axis: int = -1, largest: bool = True) -> tuple[DistArray, DistArray]:
    """Return the k largest (or smallest) elements along a dim, in order, and their indices.

    Each rank chooses k of its own part; k elements and indices of every rank along the dim move, and the dim is whole
    in the result.  Of equal elements those of lower indices come first; NaNs are the largest.

    Raises
    ------
    ValueError
        If the dim has fewer than k elements, or k is negative.

    Examples
    --------
    >>> import parlinalg as pla
    >>> values, indices = pla.top_k(pla.asarray([3, 9, 4, 9]), 2)
    >>> values.tolist(), indices.tolist()
    ([9, 9], [1, 3])
    """
    a, d, k = settled(x, "top_k"), axis_of(axis, x.ndim), whole("top_k: k", k)
    if not 0 <= k <= a.shape[d]:
        raise ValueError(f"top_k takes k from 0 to {a.shape[d]}, the size of dim {d} of shape {a.shape}, not {k}")
    grid, cut = a.grid, used(a.grid, a.layout.dims[d])
    shape = tuple(k if i == d else n for i, n in enumerate(a.shape))
    layout = Layout(*(() if i == d else c for i, c in enumerate(a.layout.dims)))
    if not grid.inside:
        held = grid.block_shape(layout, shape)
        empty = grid.backend.zeros(held, a.dtype), grid.backend.zeros(held, np.int64)
        return a.like(empty[0], layout, shape), a.like(empty[1], layout, shape)
    first = (*(slice(None),) * d, slice(0, k))
    at = sorted_block(a.block, d, largest, True)[first]
    values = a.xp.take_along_axis(a.block, at, axis=d)
    if cut:
        comm = grid.comm(cut)
        at = at + grid.block(a.layout, a.shape)[d].start
        lengths = [min(k, n) for n in cut_lengths(a.shape[d], cut, grid.sizes)]
        width = math.prod(n for i, n in enumerate(values.shape) if i != d)
        every = []
        for mine in (values, at.astype(np.int64, copy=False)):
            mine = a.xp.ascontiguousarray(a.xp.moveaxis(mine, d, 0))
            got = grid.backend.empty((sum(lengths), *mine.shape[1:]), mine.dtype)
            comm.all_gather(mine, got, [n * width for n in lengths])
            every.append(a.xp.moveaxis(got, 0, d))
        chosen = sorted_block(every[0], d, largest, True)[first]  # parts in order: equals stay in that of the line
        values, at = (a.xp.take_along_axis(part, chosen, axis=d) for part in every)
    values, at = (a.xp.ascontiguousarray(part).reshape(part.shape) for part in (values, at))
    return a.like(values, layout, shape), a.like(at.astype(np.int64, copy=False), layout, shape)


# ------------------------------------------------------------------------------------------------ counting
def _counted(
    a: DistArray, weights: DistArray | None, bins: int, dtype: Any, count: Callable[[Any, Any], Any], name: str
) -> DistArray:
    """Return the sum of what the ranks count of their blocks, one number a bin, in balanced pieces."""
    grid = a.grid
    if weights is not None:
        a, weights = together([a, weights], name)[2]
    terms = Layout(None, partial=a.layout.cut_axes)
    if grid.inside:
        mine = grid.backend.to_host(a.block).reshape(-1)
        block = count(mine, None if weights is None else grid.backend.to_host(weights.block).reshape(-1))
        block = grid.backend.from_host(namespace(block).ascontiguousarray(block.astype(dtype, copy=False)))
    else:
        block = grid.backend.zeros((0,), dtype)
    layout = grid.default_layout((bins,))
    return a.like(redistribute(block, terms, layout, (bins,), grid), layout, (bins,))


def _weights(weights: Any, a: DistArray, name: str) -> DistArray | None:
    if weights is None:
        return None
    found = operand(weights, name)
    if not isinstance(found, DistArray) or found.shape != a.shape:
        raise ValueError(f"np.{name} takes weights of the shape {a.shape} of the array, not of {np.shape(weights)}")
    same_grid([a, found])
    return settled(found, name)


def _require_values(a: DistArray, what: str) -> None:
    """Raise `ValuesNeeded` on imagined ranks if values of other ranks decide."""
    if used(a.grid, tuple(a.layout.cut_axes)) and not a.grid.backend.values:
        raise values_needed(f"{what} of an array that is cut")


def bincount(x: DistArray, weights: Any = None, minlength: int = 0) -> DistArray:
    """Return how often each of the numbers 0, 1, … is in an array of one dim, or the sums of their weights."""
    if x.ndim != 1 or x.dtype.kind not in "biu":
        raise (ValueError if x.dtype.kind in "biu" else TypeError)(
            f"np.bincount takes a vector of whole numbers of at least 0, not {x.dtype} of shape {x.shape}"
        )
    if minlength < 0:
        raise ValueError(f"np.bincount takes a minlength of at least 0, not {minlength}")
    a, given = settled(x, "bincount"), _weights(weights, x, "bincount")
    _require_values(a, "the number of bins of bincount")
    a = a.astype(np.int64, copy=False)
    if a.size and a.min().item() < 0:
        raise ValueError(f"np.bincount takes numbers of at least 0; the smallest is {a.min().item()}")
    n = max(minlength, a.max().item() + 1 if a.size else 0)
    kind = np.int64 if given is None else np.float64
    return _counted(a, given, n, kind, lambda v, w: np.bincount(v, w, n), "bincount")


def _rules() -> dict[str, Callable[[DistArray, Any, Any], float]]:
    def extent(x: DistArray) -> float:
        return x.max().item() - x.min().item()

    def fd(x: DistArray, _: Any, __: Any) -> float:
        low, high = quantile(x, [0.25, 0.75]).tolist()
        return 2 * (high - low) * x.size ** (-1 / 3)

    def doane(x: DistArray, _: Any, __: Any) -> float:
        if x.size <= 2:
            return 0.0
        spread_of = math.sqrt(6 * (x.size - 2) / ((x.size + 1) * (x.size + 3)))
        sigma = x.std().item()
        if not sigma:
            return 0.0
        skew = (((x - x.mean()) / sigma) ** 3).mean().item()
        return extent(x) / (1 + np.log2(x.size) + np.log2(1 + abs(skew) / spread_of))

    def stone(x: DistArray, low: Any, high: Any) -> float:
        n, width = x.size, extent(x)
        if n <= 1 or not width:
            return 0.0

        def risk(bins: int) -> float:
            part = _histogram(x, None, np.linspace(low, high, bins + 1), bins, (low, high)).gather() / n
            return (2 - (n + 1) * part.dot(part)) / (width / bins)

        return width / min(range(1, max(100, int(math.sqrt(n))) + 1), key=risk)

    def sturges(x: DistArray, _: Any = None, __: Any = None) -> float:
        return extent(x) / (np.log2(x.size) + 1)

    def root(x: DistArray, _: Any = None, __: Any = None) -> float:
        return extent(x) / math.sqrt(x.size)

    return {
        "auto": lambda x, a, b: min(max(fd(x, a, b), root(x) / 2), sturges(x)),
        "fd": fd, "doane": doane, "stone": stone, "sturges": sturges, "sqrt": root,
        "rice": lambda x, _, __: extent(x) / (2 * x.size ** (1 / 3)),
        "scott": lambda x, _, __: (24 * math.sqrt(math.pi) / x.size) ** (1 / 3) * x.std().item(),
    }  # fmt: skip


#: By NumPy's names rules for the width of a histogram's bins, from the array and the ends of the range.
RULES = _rules()


def _bins(a: DistArray, bins: Any, limits: Any, weights: Any, name: str) -> tuple[np.ndarray, int | None, Any]:
    """Return the edges of bins, the number of equal ones or None, and the range."""
    if isinstance(bins, DistArray):
        bins = bins.gather() if bins.ndim else bins.item()
    low, high = (a.min().item(), a.max().item()) if a.size else (0, 1)
    few = np.array([low, high], a.dtype) if a.size else np.zeros(0, a.dtype)
    if not isinstance(bins, str):
        edges = np.histogram_bin_edges(few, bins, limits)
        if np.ndim(bins):
            return edges, None, None
        return edges, int(bins), (edges[0], edges[-1])
    if bins not in RULES:
        raise ValueError(f"np.{name} takes the rules {', '.join(RULES)} for bins, not {bins!r}")
    if weights is not None:
        raise TypeError("Automated estimation of the number of bins is not supported for weighted data")
    _require_values(a, f"the number of bins of {name} by the rule {bins!r}")
    first, last = np.histogram_bin_edges(few, 1, limits)
    if limits is not None:
        a = a[(a >= first) & (a <= last)]
    count = 1
    if a.size:
        width = RULES[bins](a, first, last)
        if width:
            width = max(width, 1) if a.dtype.kind in "iu" else width
            count = math.ceil((last - first) / width)
    edges = np.histogram_bin_edges(few, count, limits)
    return edges, count, (edges[0], edges[-1])


def _histogram(a: DistArray, weights: DistArray | None, edges: np.ndarray, count: int | None, limits: Any) -> DistArray:
    kind = np.dtype(np.int64) if weights is None else weights.dtype

    def counted(values: Any, w: Any) -> Any:
        if not values.size:
            return np.zeros(len(edges) - 1, kind)
        if count is None:
            return np.histogram(values, edges, weights=w)[0]
        return np.histogram(values, count, limits, weights=w)[0]

    return _counted(a, weights, len(edges) - 1, kind, counted, "histogram")


def _plain(a: DistArray, name: str) -> DistArray:
    a = settled(a, name)
    return a.astype(np.uint8) if a.dtype.kind == "b" else a


def histogram(
    a: DistArray, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[DistArray, DistArray]:
    """Return how many elements lie in each bin (or their weights, or with `density` a density), and the edges.

    Parameters
    ----------
    bins : int, sequence of float, str or DistArray
        The number of bins, their edges, or the name of one of NumPy's rules.
    """
    a, given = _plain(a, "histogram"), _weights(weights, a, "histogram")
    edges, count, limits = _bins(a, bins, range, weights, "histogram")
    found = _histogram(a, given, edges, count, limits)
    ends = distribute(edges, a.grid, a.grid.default_layout(edges.shape))
    if density:
        found = found / _NUMPY.diff(ends).astype(float) / found.sum()
    return found, ends


def histogram_bin_edges(a: DistArray, bins: Any = 10, range: Any = None, weights: Any = None) -> DistArray:
    """Return the edges of the bins of a histogram."""
    edges = _bins(_plain(a, "histogram_bin_edges"), bins, range, weights, "histogram_bin_edges")[0]
    return distribute(edges, a.grid, a.grid.default_layout(edges.shape))


def histogram2d(
    x: DistArray, y: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[DistArray, DistArray, DistArray]:
    """Return how many points (x, y) lie in each rectangle, and the edges of both dims."""
    other = operand(y, "histogram2d")
    if not isinstance(other, DistArray) or x.ndim != 1 or other.shape != x.shape:
        raise ValueError(f"np.histogram2d takes two vectors of equal length, not of {np.shape(x)} and {np.shape(y)}")
    both = [settled(x, "histogram2d"), settled(other, "histogram2d")]
    pair = bins if isinstance(bins, list | tuple) and len(bins) == 2 else (bins, bins)
    limits = (None, None) if range is None else range
    edges = []
    for values, number, ends in zip(both, pair, limits, strict=True):
        values = values if values.dtype.kind == "f" else values.astype(float)
        found = _bins(values, number, ends, None, "histogram2d")[0]
        edges.append(found if np.ndim(number) else found.astype(float))
    given = _weights(weights, x, "histogram2d")
    grid, shape = x.grid, tuple(len(e) - 1 for e in edges)
    a, b, *w = together([*both, *([] if given is None else [given])], "histogram2d")[2]
    terms, layout = Layout(None, None, partial=a.layout.cut_axes), grid.default_layout(shape)
    if grid.inside:
        mine = [grid.backend.to_host(v.block) for v in (a, b, *w)]
        block = grid.backend.from_host(np.histogram2d(mine[0], mine[1], edges, weights=mine[2] if w else None)[0])
    else:
        block = grid.backend.zeros((0, 0), np.float64)
    counts = a.like(redistribute(block, terms, layout, shape, grid), layout, shape)
    ends = [distribute(e, grid, grid.default_layout(e.shape)) for e in edges]
    if density:
        sizes = [_NUMPY.diff(e) for e in ends]
        counts = counts / sizes[0][:, None] / sizes[1] / counts.sum()
    return counts, ends[0], ends[1]


def digitize(x: DistArray, bins: Any, right: bool = False) -> DistArray:
    """Return for each element the number of the bin in which it lies; bins rise or fall."""
    bins = bins if isinstance(bins, DistArray) else np.asarray(bins)
    if bins.ndim != 1:
        raise ValueError(f"np.digitize takes edges of one dim, not of shape {bins.shape}")
    edges = bins if isinstance(bins, DistArray) else distribute(bins, x.grid, Layout(None))
    steps = edges[1:] - edges[:-1] if edges.dtype.kind != "u" else edges[1:].astype(float) - edges[:-1]
    rises, falls = (
        truth(test(steps, 0).all(), "finite", "whether edges rise") for test in (np.greater_equal, np.less_equal)
    )
    if not (rises or falls):
        raise ValueError("np.digitize takes edges that rise or fall")
    if rises:
        return searchsorted(edges, x, "left" if right else "right")
    return edges.size - searchsorted(edges[::-1], x, "left" if right else "right")


# ------------------------------------------------------------------------------------------------ moments
def average(
    a: DistArray, axis: Axis = None, weights: Any = None, returned: bool = False, keepdims: bool = False
) -> Any:
    """Return the weighted mean over dims, and with `returned` the sum of the weights."""
    dims = sorted_dims(axis, a.ndim)
    if weights is None:
        found = mean(a, axis, None, keepdims)
        count = math.prod(a.shape[d] for d in dims)
        return (found, _NUMPY.full_like(found, count)) if returned else found
    given: Any = operand(weights, "average")
    if not isinstance(given, DistArray):
        raise TypeError(f"np.average takes weights as a DistArray, not {weights!r}")
    if given.shape != a.shape:
        if axis is None:
            raise TypeError(f"np.average takes an axis where weights of {given.shape} differ from {a.shape} in shape")
        order = [axis_of(d, a.ndim) for d in (axis if isinstance(axis, tuple | list) else (axis,))]
        if given.shape != tuple(a.shape[d] for d in order):
            raise ValueError(f"np.average: weights of shape {given.shape} do not fit axis {axis} of shape {a.shape}")
        turned = given.transpose(np.argsort(order).tolist())
        given = reshape(turned, tuple(n if d in dims else 1 for d, n in enumerate(a.shape)))
    kind = np.result_type(a.dtype, given.dtype, *((np.float64,) if a.dtype.kind in "biu" else ()))
    ones = given if given.shape == a.shape else _NUMPY.broadcast_to(given, a.shape)
    scale = total(ones, dims, kind, keepdims)
    if not truth((scale != 0).all(), "finite", "whether the weights sum to zero"):
        raise ZeroDivisionError("Weights sum to zero, can't be normalized")
    found = total(_NUMPY.multiply(a, given, dtype=kind), dims, None, keepdims) / scale
    return (found, scale) if returned else found


def cov(
    m: DistArray, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None, fweights: Any = None,
    aweights: Any = None, dtype: Any = None,
) -> DistArray:  # fmt: skip
    """Return the covariances of variables: the rows, or with `rowvar=False` the columns."""
    if ddof is not None and ddof != int(ddof):
        raise ValueError("ddof must be integer")
    given: list[Any] = [m] if y is None else [m, operand(y, "cov")]
    for v in given:
        if not isinstance(v, DistArray):
            raise TypeError(f"np.cov takes DistArrays, not {v!r}")
        if v.ndim > 2:
            raise ValueError(f"np.cov takes vectors or matrices, not an array of shape {v.shape}")
    kind = np.result_type(*(v.dtype for v in given), np.float64) if dtype is None else np.dtype(dtype)
    rows = []
    for v in given:
        row = settled(v, "cov").astype(kind, copy=False)
        row = reshape(row, (1, row.size)) if row.ndim < 2 else row
        turned = not rowvar and (v.ndim != 1 if v is m else row.shape[0] != 1)
        rows.append(row.T if turned else row)
    if not rows[0].shape[0]:
        return distribute(np.zeros((0, 0), kind), m.grid, Layout(None, None))
    x = rows[0] if len(rows) == 1 else concatenate(rows, 0)
    ddof = (0 if bias else 1) if ddof is None else ddof
    weights: DistArray | None = None
    for name, value in (("fweights", fweights), ("aweights", aweights)):
        if value is None:
            continue
        w: Any = operand(value, "cov") if isinstance(value, DistArray) else distribute(
            np.asarray(value, float), m.grid, Layout(None))  # fmt: skip
        w = w.astype(float)
        if name == "fweights" and not truth((w == _NUMPY.round(w)).all(), "finite", "whether weights are whole"):
            raise TypeError("fweights must be integer")
        if w.ndim > 1 or w.shape[0] != x.shape[1]:
            raise RuntimeError(f"np.cov takes {name} of one dim of {x.shape[1]} samples, not of shape {w.shape}")
        if not truth((~(w < 0)).all(), "finite", "whether weights are at least 0"):
            raise ValueError(f"{name} cannot be negative")
        weights = w if weights is None else weights * w
        aweights = w if name == "aweights" else aweights
    if weights is None:
        factor: float = x.shape[1] - ddof
        center = mean(x, 1, None, True)
    else:
        all_ = weights.sum().item()
        center = average(x, 1, weights, keepdims=True)
        if ddof == 0:
            factor = all_
        elif aweights is None:
            factor = all_ - ddof
        else:
            factor = all_ - ddof * (weights * aweights).sum().item() / all_
    if factor <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
        factor = 0.0
    x = x - center
    found = _NUMPY.matmul(x, (x if weights is None else x * weights).T.conj())
    return _NUMPY.squeeze(found * np.true_divide(1, factor).astype(found.real.dtype))


def corrcoef(x: DistArray, y: Any = None, rowvar: bool = True, dtype: Any = None) -> DistArray:
    """Return the correlation coefficients of variables: the rows, or with `rowvar=False` the columns."""
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.ndim:
        return c / c
    deviation = _NUMPY.sqrt(_NUMPY.diagonal(c).real)
    c = c / deviation[:, None] / deviation
    block = c.block
    if c.dtype.kind == "c":
        return c.like(c.xp.clip(block.real, -1, 1) + 1j * c.xp.clip(block.imag, -1, 1))
    return c.like(c.xp.clip(block, -1, 1))
