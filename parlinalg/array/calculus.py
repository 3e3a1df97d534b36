"""Functions of neighbours along a dim: gradients, integrals, interpolation, convolutions; ranks exchange edges only."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array.align import spread
from parlinalg.array.core import DistArray, axis_of, dims_in_order
from parlinalg.array.create import asarray, distribute
from parlinalg.array.indexing import copy_part
from parlinalg.array.joining import concatenate, full_range, positions, take
from parlinalg.array.reductions import settled, total
from parlinalg.array.shapes import reshape
from parlinalg.array.sorting import argsort, on_line, searchsorted, used
from parlinalg.array.ufuncs import operand
from parlinalg.exchange import exchange_blocks
from parlinalg.layout import Layout, coordinates
from parlinalg.redistribute import Move

_NUMPY: Any = np  # whose functions return DistArrays, which its types do not know


def shifted(a: DistArray, d: int, by: int) -> DistArray:
    """Return the array whose item i of dim d is item i + by; where there is none, item i."""
    out, n = a.copy(), a.shape[d]
    places, chosen = full_range(a.shape), full_range(a.shape)
    places[d], chosen[d] = range(max(0, -by), n - max(0, by)), range(max(0, by), n - max(0, -by))
    if len(places[d]):
        copy_part(out, places, a, chosen)
    return out


def _line(x: Any, a: DistArray, d: int, name: str) -> DistArray:
    """Return numbers along dim d, one for each item, cut as the dim; integers as floats."""
    if isinstance(x, DistArray):
        x = settled(x, name).redistribute(Layout(a.layout.dims[d]))
    else:
        x = distribute(np.asarray(x), a.grid, Layout(a.layout.dims[d]))
    if x.shape != (a.shape[d],):
        raise ValueError(f"np.{name}: {x.shape} coordinates along dim {d}, which has {a.shape[d]} items")
    return x.astype(np.float64) if x.dtype.kind in "biu" else x


def _along(block: Any, ndim: int, d: int) -> Any:
    return block.reshape((-1,) + (1,) * (ndim - d - 1))


def gradient(f: Any, *spacings: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Return the derivative along dims, by central differences and at the ends one-sided ones, as `np.gradient`.

    Parameters
    ----------
    *spacings : scalar, or vector of coordinates
        None, one for all dims, or one for each.
    edge_order : {1, 2}
    """
    if not isinstance(f, DistArray):
        operand(f, "gradient")
        raise TypeError(f"np.gradient takes a DistArray here, not {f!r}")
    if f.dtype.kind == "b":
        raise TypeError("np.gradient of booleans, which are not subtracted; take astype(float)")
    f = settled(f, "gradient")
    f = f.astype(np.float64) if f.dtype.kind in "biu" else f
    dims = tuple(range(f.ndim)) if axis is None else dims_in_order(axis, f.ndim)
    given: list[Any] = list(spacings) or [1.0]
    if len(given) == 1 and not np.ndim(given[0]):
        given = given * len(dims)
    if len(given) != len(dims):
        raise TypeError(f"np.gradient takes no spacing, one, or one for each of {len(dims)} dims, not {len(given)}")
    if edge_order not in (1, 2):
        raise ValueError(f"np.gradient takes an edge_order of 1 or 2, not {edge_order}")
    found = [_derivative(f, d, dx, edge_order) for d, dx in zip(dims, given, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _derivative(f: DistArray, d: int, dx: Any, edge_order: int) -> DistArray:
    n = f.shape[d]
    if n < edge_order + 1:
        raise ValueError(f"np.gradient needs at least {edge_order + 1} items along dim {d} of shape {f.shape}")
    up, down, at = shifted(f, d, 1).block, shifted(f, d, -1).block, positions(f, d)
    if np.ndim(dx) == 0:
        step = dx.item() if isinstance(dx, DistArray) else dx
        block = (up - down) / f.xp.where((at == 0) | (at == n - 1), step, 2.0 * step)
        ends = [[step, step], [step, step]]
    else:
        x = _line(dx, f, d, "gradient")
        right, left = (shifted(x, 0, by) for by in (1, -1))
        two, one = (_along(v.block, f.ndim, d) for v in (right - x, x - left))
        with np.errstate(all="ignore"):
            inside = -two / (one * (one + two)) * down + (two - one) / (one * two) * f.block
            inside = inside + one / (two * (one + two)) * up
            block = f.xp.where(at == 0, (up - f.block) / two, f.xp.where(at == n - 1, (f.block - down) / one, inside))
        steps = [x[:3], x[-3:]] if edge_order == 2 else []
        ends = [np.diff(s.gather()).tolist() for s in steps]
    out = f.like(block.astype(f.dtype, copy=False))
    if edge_order == 2:
        lead = (slice(None),) * d
        (first, second), (last_but, last) = ends
        begin = (
            -(2 * first + second) / (first * (first + second)),
            (first + second) / (first * second),
            -first / (second * (first + second)),
        )
        end = (
            last / (last_but * (last_but + last)),
            -(last + last_but) / (last_but * last),
            (2 * last + last_but) / (last * (last_but + last)),
        )
        sides = ((0, (0, 1, 2), begin), (n - 1, (n - 3, n - 2, n - 1), end))
        for place, items, weights in sides:
            out[(*lead, place)] = sum(w * f[(*lead, i)] for w, i in zip(weights, items, strict=True))
    return out


def trapezoid(y: DistArray, x: Any = None, dx: Any = 1.0, axis: int = -1) -> DistArray:
    """Return the integral along a dim by the trapezoidal rule."""
    y, d = settled(y, "trapezoid"), axis_of(axis, y.ndim)
    pairs = (y + shifted(y, d, 1)) if y.dtype.kind != "b" else y.astype(np.int8) + shifted(y, d, 1)
    if x is None:
        terms = pairs * dx / 2.0
    elif np.ndim(x) == 1:
        line = _line(x, y, d, "trapezoid")
        steps = shifted(line, 0, 1) - line
        terms = pairs.like(pairs.block * _along(steps.block, y.ndim, d) / 2.0)
    else:
        other: Any = operand(x, "trapezoid")
        terms = (shifted(settled(other, "trapezoid"), axis_of(axis, other.ndim), 1) - other) * pairs / 2.0
    d = axis_of(axis, terms.ndim)
    if not terms.shape[d]:
        return total(terms, d)
    inside = positions(terms, d) < terms.shape[d] - 1
    return total(terms.like(terms.xp.where(inside, terms.block, terms.dtype.type(0))), d)


def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> DistArray:
    """Return the piecewise linear function through the points (xp, fp) at x.

    Points that each rank holds whole (NumPy arrays) are looked up where x lies; distributed ones are asked for at their
    ranks.
    """
    grid = next(v.grid for v in (x, xp, fp) if isinstance(v, DistArray))
    if not isinstance(x, DistArray):
        x = asarray(x, grid=grid)
    x = settled(x, "interp").astype(np.float64, copy=False)
    if not isinstance(xp, DistArray) and not isinstance(fp, DistArray):
        found = np.interp(grid.backend.to_host(x.block), xp, fp, left, right, period)
        return x.like(grid.backend.from_host(found.reshape(x.block.shape)))
    xp, fp = (v if isinstance(v, DistArray) else asarray(v, grid=grid) for v in (xp, fp))
    xp, fp = xp.astype(np.float64, copy=False), fp.astype(np.complex128 if fp.dtype.kind == "c" else np.float64)
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ValueError(f"np.interp takes points of two vectors of equal length, not of {xp.shape} and {fp.shape}")
    if period is not None:
        period = abs(period)
        if not period:
            raise ValueError("np.interp takes a period other than 0")
        left = right = None
        x, xp = x % period, xp % period
        order = argsort(xp, 0)
        xp, fp = take(xp, order, 0), take(fp, order, 0)
        xp = concatenate([xp[-1:] - period, xp, xp[:1] + period])
        fp = concatenate([fp[-1:], fp, fp[:1]])
    n = xp.size
    at = searchsorted(xp, x, "right") - 1
    low = _NUMPY.clip(at, 0, max(0, n - 2))
    high = _NUMPY.minimum(low + 1, n - 1)
    x0, x1, y0, y1 = xp[low], xp[high], fp[low], fp[high]
    with np.errstate(all="ignore"):
        slope = (y1 - y0) / (x1 - x0)
        inside = slope * (x - x0) + y0
        inside = _NUMPY.where(_NUMPY.isnan(inside) & (y0 == y1), y0, inside)
    found = _NUMPY.where(x == x0, y0, _NUMPY.where(at >= n - 1, fp[-1], inside))
    found = _NUMPY.where(x < xp[0], fp[0] if left is None else left, found)
    found = _NUMPY.where(x > xp[-1], fp[-1] if right is None else right, found)
    return _NUMPY.where(_NUMPY.isnan(x), x, found)


def convolve(a: Any, v: Any, mode: str = "full") -> DistArray:
    """Return the discrete convolution of two vectors.

    Each rank receives the edges of its neighbours' parts of the longer one, and all of the shorter one.
    """
    a, v = _vectors(a, v, "convolve")
    if v.size > a.size:
        a, v = v, a
    return _convolved(a, v, mode, (v.size - 1) // 2, "convolve")


def correlate(a: Any, v: Any, mode: str = "valid") -> DistArray:
    """Return the cross-correlation of two vectors: Σ a[n + k] conj(v[n])."""
    a, v = _vectors(a, v, "correlate")
    v = v[::-1].conj()
    if v.size > a.size:
        return _convolved(v, a, mode, a.size // 2, "correlate")
    return _convolved(a, v, mode, (v.size - 1) // 2, "correlate")


def _vectors(a: Any, v: Any, name: str) -> tuple[DistArray, DistArray]:
    grid = next(x.grid for x in (a, v) if isinstance(x, DistArray))
    pair = [settled(x, name) if isinstance(x, DistArray) else asarray(x, grid=grid) for x in (a, v)]
    for x in pair:
        if x.ndim > 1 or not x.size:
            raise ValueError(f"np.{name} takes vectors of at least one element, not an array of shape {x.shape}")
    first, second = (reshape(x, (x.size,)) for x in pair)
    return first, second


def _convolved(a: DistArray, v: DistArray, mode: str, middle: int, name: str) -> DistArray:
    n, m, grid = a.size, v.size, a.grid
    shapes = {"full": (0, n + m - 1), "same": (middle, n), "valid": (m - 1, n - m + 1)}
    if mode not in shapes:
        raise ValueError(f"np.{name} takes the modes {', '.join(shapes)}, not {mode!r}")
    offset, size = shapes[mode]
    kind = np.result_type(a.dtype, v.dtype)
    near = v.astype(kind, copy=False).redistribute(Layout(None)).block
    a = (a if used(grid, a.layout.dims[0]) else on_line(a)).astype(kind, copy=False)
    layout = Layout(a.layout.dims[0])
    if not grid.inside:
        return a.like(grid.backend.zeros((0,), kind), layout, (size,))

    def want(at: dict[str, int]) -> tuple[range, ...]:
        (held,) = layout.block((size,), grid.sizes, at)
        if not len(held):
            return (range(0),)
        return (range(max(0, held.start + offset - m + 1), min(n, held.stop + offset)),)

    axes = used(grid, layout.dims[0])
    peers = [{**grid.coords, **at} for at in coordinates(axes, grid.sizes)]
    haves, wants = [a.layout.block(a.shape, grid.sizes, at) for at in peers], [want(at) for at in peers]
    part = Move(exchange_blocks(a.block, haves, wants, grid.comm(axes), grid.backend)).wait()
    (held,) = grid.block(layout, (size,))
    if not len(held):
        return a.like(grid.backend.zeros((0,), kind), layout, (size,))
    start = held.start + offset - want(grid.coords)[0].start
    whole = _product(part, near, a.xp)
    return a.like(a.xp.ascontiguousarray(whole[start : start + len(held)]).astype(kind, copy=False), layout, (size,))


def _product(a: Any, v: Any, xp: Any) -> Any:
    return xp.convolve(a, v) if a.dtype.kind != "b" else xp.convolve(a.astype(np.int64), v.astype(np.int64)) != 0


def apply_along_axis(func1d: Any, axis: int, arr: DistArray, *args: Any, **kwargs: Any) -> DistArray:
    """Return the results of a function of NumPy vectors for each line along a dim, which are gathered first."""
    a, d = settled(arr, "apply_along_axis"), axis_of(axis, arr.ndim)
    grid, cut = a.grid, used(a.grid, a.layout.dims[d])
    others = [() if i == d else c for i, c in enumerate(a.layout.dims)]
    shape = [0 if i == d else n for i, n in enumerate(a.shape)]
    a = a.redistribute(spread(shape, cut, others) if a.ndim > 1 else Layout(None))
    if 0 in shape[:d] + shape[d + 1 :]:
        raise ValueError("Cannot apply_along_axis when any iteration dimensions are 0")
    found = problem = None
    if grid.inside and 0 not in a.block.shape[:d] + a.block.shape[d + 1 :]:
        try:
            found = np.apply_along_axis(func1d, d, grid.backend.to_host(a.block), *args, **kwargs)
        except Exception as error:
            problem = error
    reported = grid.world.share(
        [None if found is None else [list(found.shape), found.dtype.name], repr(problem or "")], others="alike"
    )
    if problem is not None:
        raise problem
    if failed := next((text for _, text in reported if text != "''"), None):
        raise RuntimeError(f"np.apply_along_axis: the function failed on another rank: {failed}")
    (first, name) = next(fact for fact, _ in reported if fact is not None)
    new = first[d : len(first) - (a.ndim - d - 1)]
    full = (*a.shape[:d], *new, *a.shape[d + 1 :])
    layout = Layout(*a.layout.dims[:d], *((),) * len(new), *a.layout.dims[d + 1 :])
    held = grid.block_shape(layout, full)
    block = grid.backend.zeros(held, np.dtype(name)) if found is None else grid.backend.from_host(found.reshape(held))
    return a.like(block, layout, full)


def rot90(m: DistArray, k: int = 1, axes: Any = (0, 1)) -> DistArray:
    """Return the array turned by k right angles in the plane of two dims."""
    d, e = dims_in_order(tuple(axes), m.ndim)
    k %= 4
    if k == 0:
        return m.copy()
    if k == 2:
        return _NUMPY.flip(m, (d, e))
    return _NUMPY.flip(_NUMPY.swapaxes(m, d, e), d) if k == 1 else _NUMPY.swapaxes(_NUMPY.flip(m, d), d, e)
