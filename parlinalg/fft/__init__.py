"""Discrete Fourier transforms of distributed arrays: the `fft` extension of the Array API standard, and NumPy's names.

The arrays may have any dims, sizes, layout and grid.  A dim is transformed where it is whole; the axes that cut it
move to other dims meanwhile, by the plan with the fewest bytes (`parlinalg.fft.plan`).  The result rests in the layout
of the input, unless `layout` says otherwise.  `np.fft.fft(x)` and its kin are the same functions.

Every function takes and returns a DistArray, is collective over its grid, and never changes its input:

x
    Real or complex.  float32 and complex64 are transformed in these, 16-bit floats in float32, integers and booleans in
    float64.  The terms of a partial array are transformed as terms, without being summed first.
n, s
    The points of the transform, or one number for each of `axes` (-1: the dim's size).  The dim is cut off, or
    continued by zeros, to them; of the input of `irfft`, `irfftn` and `hfft` n // 2 + 1 elements enter, and by default
    they have 2 (m - 1) points for m elements.
axis, axes
    The dims to transform; a negative one counts from the last.
norm : {"backward", "ortho", "forward"}
    Inverse transforms are divided by n, both by √n, or forward transforms by n.
layout : Layout or "transposed", optional
    The layout of the result; "transposed" leaves it where the last transform leaves it, which saves the way back.

Wrong axes, sizes and norms are errors on all ranks, before any communication.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from parlinalg.array import DistArray, from_function
from parlinalg.array.create import placed
from parlinalg.array.dispatch import primitive, takes_over
from parlinalg.array.functions import handles
from parlinalg.array.joining import roll
from parlinalg.errors import LayoutError
from parlinalg.fft.plan import Line, Plan, Problem, make_plan
from parlinalg.fft.run import Direction, complexes, reals, run
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.redistribute import fitting, redistribute

__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfft2", "irfftn", "plan_fft", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip

Norm = Literal["backward", "ortho", "forward"] | None
Target = Layout | Literal["transposed"] | None
Axes = Sequence[int] | None

_SWAPPED = {"backward": "forward", "forward": "backward", "ortho": "ortho"}
_LAST_TWO = (-2, -1)


def fft(
    x: DistArray, /, n: int | None = None, axis: int = -1, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the Fourier transform along one dim, `y[k] = Σ x[j] e^(-2πi jk / n)`.

    Raises
    ------
    ValueError
        If `axis` is not a dim (an IndexError too), n < 1, or `norm` is not a norm.
    LayoutError
        If `layout` does not fit the result.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> with pla.Grid({"r": 1}) as grid:
    ...     x = pla.distribute(np.array([1.0, 0.0, -1.0, 0.0]), grid, pla.Layout("r"))
    ...     print(pla.fft.fft(x).gather().real)
    [0. 2. 0. 2.]
    """
    return _transform("fft", x, (n,), (axis,), norm, layout)


def ifft(
    x: DistArray, /, n: int | None = None, axis: int = -1, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `fft`: `ifft(fft(x)) = x`."""
    return _transform("ifft", x, (n,), (axis,), norm, layout)


def rfft(
    x: DistArray, /, n: int | None = None, axis: int = -1, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the first n // 2 + 1 elements of the Fourier transform of real numbers; the others are their conjugates.

    Raises
    ------
    TypeError
        If x is complex.
    """
    return _transform("rfft", x, (n,), (axis,), norm, layout)


def irfft(
    x: DistArray, /, n: int | None = None, axis: int = -1, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `rfft`, n real numbers; n is 2 (m - 1) for m elements unless it is given."""
    return _transform("irfft", x, (n,), (axis,), norm, layout)


def hfft(
    x: DistArray, /, n: int | None = None, axis: int = -1, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the Fourier transform, n real numbers, of a signal whose second half is the conjugate of the first."""
    return _transform("hfft", x, (n,), (axis,), norm, layout)


def ihfft(
    x: DistArray, /, n: int | None = None, axis: int = -1, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `hfft`: the first n // 2 + 1 elements of the inverse Fourier transform of real numbers."""
    return _transform("ihfft", x, (n,), (axis,), norm, layout)


def fftn(
    x: DistArray, /, s: Axes = None, axes: Axes = None, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the Fourier transform along several dims, by default all.

    With `s` and without `axes` they are the last ones.  No dim may be named twice.
    """
    return _transform("fftn", x, s, axes, norm, layout)


def ifftn(
    x: DistArray, /, s: Axes = None, axes: Axes = None, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `fftn`."""
    return _transform("ifftn", x, s, axes, norm, layout)


def rfftn(
    x: DistArray, /, s: Axes = None, axes: Axes = None, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the Fourier transform of real numbers along several dims: `rfft` along the last of `axes`, then `fftn`."""
    return _transform("rfftn", x, s, axes, norm, layout)


def irfftn(
    x: DistArray, /, s: Axes = None, axes: Axes = None, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `rfftn`: `ifftn`, then `irfft` along the last of `axes`."""
    return _transform("irfftn", x, s, axes, norm, layout)


def fft2(
    x: DistArray, /, s: Axes = None, axes: Axes = _LAST_TWO, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the Fourier transform along the last two dims."""
    return _transform("fft2", x, s, axes, norm, layout)


def ifft2(
    x: DistArray, /, s: Axes = None, axes: Axes = _LAST_TWO, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `fft2`."""
    return _transform("ifft2", x, s, axes, norm, layout)


def rfft2(
    x: DistArray, /, s: Axes = None, axes: Axes = _LAST_TWO, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the Fourier transform of real numbers along the last two dims."""
    return _transform("rfft2", x, s, axes, norm, layout)


def irfft2(
    x: DistArray, /, s: Axes = None, axes: Axes = _LAST_TWO, norm: Norm = "backward", *, layout: Target = None
) -> DistArray:
    """Return the inverse of `rfft2`."""
    return _transform("irfft2", x, s, axes, norm, layout)


def plan_fft(name: str, x: DistArray, /, s: Axes = None, axes: Axes = None, *, layout: Target = None) -> Plan:
    """Return the steps of a transform, and the words that each rank receives in them, without running it.

    Parameters
    ----------
    name : str
        The function: "fft", "rfftn", ….
    s, axes
        As for `fftn`, of one entry for transforms of one dim, whose default is the last.

    Returns
    -------
    Plan
        `plan.steps`, `plan.layout` of the result, and `plan.words(grid.coords)`.
    """
    return _planned(name, x, _problem(name, x, s, axes), layout)[0]


def _kind(name: str) -> str:
    if name.startswith(("rfft", "ihfft")):
        return "r2c"
    return "c2r" if name.startswith(("irfft", "hfft")) else "c2c"


@primitive
def _transform(name: str, x: DistArray, s: Any, axes: Any, norm: Norm, layout: Target) -> DistArray:
    if norm not in (*_SWAPPED, None):
        raise ValueError(f'{name}: norm is "backward", "ortho" or "forward", not {norm!r}')
    problem = _problem(name, x, s, axes)
    norm, hermitian = norm or "backward", "hfft" in name
    if problem.kind != "c2c":
        way = Direction(problem.kind, problem.kind == "c2r", _SWAPPED[norm] if hermitian else norm)
    else:
        way = Direction("c2c", name.startswith("i"), norm)
    if x.layout.partial and x.dtype.kind in "biu":
        x = x.summed()  # terms of integers may overflow, and those of booleans are not numbers
    plan, goal, shape = _planned(name, x, problem, layout)
    grid = x.grid
    if not grid.inside:
        dtype = (reals if problem.kind == "c2r" else complexes)(x.dtype)
        return x.like(grid.backend.zeros(grid.block_shape(goal, shape), dtype), goal, shape)
    block = run(x.conj() if name == "hfft" else x, plan, way)
    if name == "ihfft":
        block = block.conj()
    rests = plan.layout.with_partial(grid.effective(x.layout).partial)
    return x.like(redistribute(block, rests, grid.effective(goal), shape, grid, owned=True), goal, shape)


def _problem(name: str, x: DistArray, s: Any, axes: Any) -> Problem:
    """Return the transform once its arguments are checked, before any communication."""
    if not isinstance(x, DistArray):
        raise TypeError(
            f"{name} takes a DistArray, not {type(x).__name__}; distribute it first: "
            "parlinalg.distribute(array[, grid, layout])"
        )
    kind = _kind(name)
    if kind == "r2c" and x.dtype.kind == "c":
        raise TypeError(f"{name} takes real numbers, and this array is of dtype {x.dtype}; use fft, or x.real")
    if axes is None:
        axes = range(-len(s) if s is not None else -{"n": x.ndim, "2": 2}.get(name[-1], 1), 0)
    dims = _dims(name, axes, x.ndim)
    points = [None] * len(dims) if s is None else list(s)
    if len(points) != len(dims):
        raise ValueError(f"{name}: s gives {len(points)} sizes {tuple(points)} for {len(dims)} axes {tuple(axes)}")
    if not dims:
        raise ValueError(f"{name}: there is no axis to transform; the array has shape {x.shape}, axes is {tuple(axes)}")
    lines = []
    for d, n in zip(dims, points, strict=True):
        last, size = d == dims[-1], x.shape[d]
        n = None if n is None else operator.index(n)
        if n is None:
            n = 2 * (size - 1) if kind == "c2r" and last else size
        elif n == -1 and name[-1] in "n2":
            n = size
        if n < 1:
            raise ValueError(f"{name}: {n} points along dim {d} of an array of shape {x.shape}; at least 1 is needed")
        half = n // 2 + 1
        lines.append(
            Line(d, n, min(size, half if kind == "c2r" and last else n), half if kind == "r2c" and last else n)
        )
    between = complexes(x.dtype).itemsize
    return Problem(x.shape, tuple(lines), kind, (x.dtype.itemsize, between, between // 2 if kind == "c2r" else between))


def _dims(name: str, axes: Any, ndim: int) -> tuple[int, ...]:
    given = [operator.index(d) for d in axes]
    for d in given:
        if not -ndim <= d < ndim:
            raise np.exceptions.AxisError(d, ndim, name)
    dims = tuple(d % ndim for d in given)
    if len(set(dims)) < len(dims):
        raise ValueError(f"{name}: axes {tuple(given)} name a dim twice")
    return dims


def _planned(name: str, x: DistArray, problem: Problem, layout: Target) -> tuple[Plan, Layout, tuple[int, ...]]:
    """Return the plan, and the layout and the shape of the result."""
    grid, shape = x.grid, problem.shape_when((), False)
    if isinstance(layout, str) and layout != "transposed":
        raise LayoutError(f'{name}: layout is a Layout, "transposed" or None, not {layout!r}')
    goal = None if isinstance(layout, str) else x.layout if layout is None else fitting(layout, shape, grid)
    rests = grid.effective(x.layout)
    target = None if goal is None else grid.effective(goal)
    if target is not None and target.partial == rests.partial:
        target = target.with_partial(())
    else:  # where terms are still to be summed, the sum takes the result to its layout
        target = None
    plan = make_plan(problem, rests.with_partial(()), target, grid.sizes)
    return plan, plan.layout.with_partial(rests.partial) if goal is None else goal, shape


def fftshift(x: DistArray, /, axes: int | Axes = None) -> DistArray:
    """Return the array with the zero frequency, element 0 of these dims (default: all), moved to the middle.

    On a cut dim a rank receives what its new block lacks.
    """
    dims = _shifted("fftshift", x, axes)
    return roll(x, [x.shape[d] // 2 for d in dims], dims)


def ifftshift(x: DistArray, /, axes: int | Axes = None) -> DistArray:
    """Return the inverse of `fftshift`."""
    dims = _shifted("ifftshift", x, axes)
    return roll(x, [-(x.shape[d] // 2) for d in dims], dims)


def _shifted(name: str, x: Any, axes: int | Axes) -> tuple[int, ...]:
    if not (isinstance(x, DistArray) or takes_over(x)):
        raise TypeError(f"{name} takes a DistArray, not {type(x).__name__}")
    return _dims(name, range(x.ndim) if axes is None else axes if isinstance(axes, Sequence) else (axes,), x.ndim)


def fftfreq(
    n: int,
    /,
    d: float = 1.0,
    *,
    grid: Grid | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    device: Any = None,
) -> DistArray:
    """Return the frequencies of the elements of `fft`: 0, 1, …, then -n // 2, …, -1, divided by `d n`.

    Parameters
    ----------
    n : int
        The points of the transform.
    d : float
        The distance of two points.
    grid : Grid
    layout : Layout, optional
        By default cut by all axes of the grid.
    dtype : float dtype, optional
        float64 by default.
    device : None
        Blocks live where the grid's backend keeps them.
    """
    return _frequencies("fftfreq", lambda i: np.where(i < (n + 1) // 2, i, i - n), n, n, d, grid, layout, dtype, device)


def rfftfreq(
    n: int,
    /,
    d: float = 1.0,
    *,
    grid: Grid | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    device: Any = None,
) -> DistArray:
    """Return the frequencies of the elements of `rfft`: 0, 1, …, n // 2, divided by `d n`; arguments as `fftfreq`."""
    return _frequencies("rfftfreq", lambda i: i, n, n // 2 + 1, d, grid, layout, dtype, device)


def _frequencies(
    name: str, number: Callable[[Any], Any], n: int, size: int, d: float, grid: Grid | None, layout: Layout | None,
    dtype: Any, device: Any,
) -> DistArray:  # fmt: skip
    if operator.index(n) < 1:
        raise ValueError(f"{name}: a transform has at least 1 point, not {n}")
    if dtype is not None and np.dtype(dtype).kind != "f":
        raise TypeError(f"{name}: frequencies are of a float dtype, not {np.dtype(dtype)}")
    step = 1.0 / (n * d)
    shape, grid, layout = placed(size, grid, layout, device)
    return from_function(lambda i: number(i) * step, shape, grid, layout, np.float64 if dtype is None else dtype)


def _numpy(function: Callable[..., DistArray], extent: str) -> None:
    """Register a transform as the one of NumPy of this name, which takes arguments by its own names."""
    axis = "axis" if extent == "n" else "axes"
    handles(getattr(np.fft, function.__name__), takes=("a", extent, axis, "norm"))(
        lambda a, **options: function(a, **options)  # noqa: PLW0108 - `a` is a positional-only argument there
    )


for _line in (fft, ifft, rfft, irfft, hfft, ihfft):
    _numpy(_line, "n")
for _lines in (fftn, ifftn, rfftn, irfftn, fft2, ifft2, rfft2, irfft2):
    _numpy(_lines, "s")
for _shift in (fftshift, ifftshift):
    handles(getattr(np.fft, _shift.__name__), takes=("x", "axes"))(lambda x, axes=None, f=_shift: f(x, axes))
