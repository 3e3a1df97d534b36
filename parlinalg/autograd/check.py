"""Gradients against finite differences, on any grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd.tape import no_grad
from parlinalg.autograd.tensor import Tensor
from parlinalg.layout import Layout
from parlinalg.redistribute import redistribute


class GradientError(AssertionError):
    """A gradient that finite differences do not confirm."""


def check_gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    eps: float = 1e-5,
    tol: float = 1e-7,
    directions: int | None = None,
    seed: int = 0,
) -> float:
    """Compare the gradients of `function(*inputs)` with central differences.

    Parameters
    ----------
    function : callable
        Takes the inputs and returns a tensor of any shape; it is contracted with fixed random numbers.
    inputs : sequence of Tensor
        Float64 or complex128, in any layouts; those with requires_grad are checked.  Their gradients are cleared.
    eps : float
        The step of the differences.
    tol : float
        The difference allowed, relative to the largest derivative found along the directions of an input, or to 1.
    directions : int, optional
        Along how many random directions the derivatives are compared; by default along every element.
    seed : int
        The seed of the contraction and the directions.

    Returns
    -------
    float
        The largest relative difference.

    Raises
    ------
    GradientError
        On all ranks, if one is larger than tol; it names the input and the element.

    Collective; every rank of the grid calls it alike.

    Examples
    --------
    >>> import parlinalg as pla
    >>> grid = pla.Grid({"r": 1})
    >>> x = pla.Tensor(pla.ones((3,), grid, pla.Layout("r")), requires_grad=True)
    >>> pla.autograd.check_gradients(lambda x: x * x, [x]) < 1e-7
    True
    """
    for i, x in enumerate(inputs):
        if x.requires_grad and x.dtype not in (np.float64, np.complex128):
            raise TypeError(f"check_gradients: input {i} is {x.dtype}; finite differences need float64 or complex128")
        x.grad = None
    random = np.random.default_rng(seed)
    y = function(*inputs)
    rest = y.layout.with_partial(())
    weights = _cut(_numbers(y.shape, y.dtype, random), y.data, rest)
    y.backward(weights)
    values = [x.data for x in inputs]

    def value(at: int, shift: DistArray) -> float:
        """Return the contraction with input `at` shifted."""
        moved = [v if j != at else v.like(v.block + shift.block) for j, v in enumerate(values)]
        with no_grad():
            found = function(*map(Tensor, moved)).data.redistribute(rest)
        return _dot(found, weights)

    worst, complaint = 0.0, ""
    for i, x in enumerate(inputs):
        if not x.requires_grad:
            continue
        rows = []
        for label, direction in _directions(x.shape, x.dtype, directions, random):
            step = _cut(direction, x.data, x.layout)
            numeric = (value(i, step * eps) - value(i, step * -eps)) / (2 * eps)
            analytic = 0.0
            if x.grad is not None:
                grad = x.grad.summed()
                analytic = _dot(grad, _cut(direction, grad, grad.layout))
            rows.append((label, analytic, numeric))
        scale = max([1.0, *(abs(n) for _, _, n in rows)])
        for label, analytic, numeric in rows:
            error = abs(analytic - numeric) / scale
            worst = error if not error <= worst else worst
            if not (error <= tol or complaint):
                complaint = (
                    f"the gradient of input {i} along {label} is {analytic:.12g}, by finite differences "
                    f"{numeric:.12g}: a relative difference of {error:.2g}, more than {tol:.2g}"
                )
        x.grad = None
    for rank, theirs in enumerate(y.grid.world.share(complaint, others="alike")):
        if theirs:
            raise GradientError(f"{theirs} (on rank {rank})")
    return worst


def _dot(a: DistArray, b: DistArray) -> float:
    """Return the real part of Σ conj(a) b."""
    return float((a.conj() * b).real.sum().item())


def _cut(array: np.ndarray, like: DistArray, layout: Layout) -> DistArray:
    """Return this rank's part of a global array that all ranks have, on the grid of `like`; nothing is communicated."""
    grid = like.grid
    cut = layout.with_partial(())
    part = tuple(slice(r.start, r.stop) for r in grid.block(cut, array.shape))
    block: Any = grid.backend.from_host(np.array(array[part], dtype=like.dtype, order="C"))
    return DistArray(redistribute(block, cut, layout, array.shape, grid), array.shape, layout, grid)


def _directions(
    shape: tuple[int, ...], dtype: np.dtype[Any], number: int | None, random: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield random directions, or one along every element."""
    if number is not None:
        for i in range(number):
            yield f"random direction {i}", _numbers(shape, dtype, random)
        return
    for index in np.ndindex(*shape):
        for label, unit in (("element", 1), ("imaginary part of element", 1j))[: 1 + (dtype.kind == "c")]:
            one = np.zeros(shape, dtype)
            one[index] = unit
            yield f"{label} {index}", one


def _numbers(shape: tuple[int, ...], dtype: np.dtype[Any], random: np.random.Generator) -> np.ndarray:
    found = np.asarray(random.standard_normal(shape))
    return found + 1j * random.standard_normal(shape) if dtype.kind == "c" else found
