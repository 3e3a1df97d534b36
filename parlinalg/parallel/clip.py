"""The norm of a whole model's gradient, whether it is finite, and clipping by it or by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.autograd.parameter import distinct, gradients, sums_over_ranks
from parlinalg.backend import Backend, namespace
from parlinalg.backend.kernels.optimizers import all_finite, square_sum
from parlinalg.backend.kernels.optimizers import scale as multiply
from parlinalg.comm import Comm
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid


def gradient_norm(parameters: Iterable[Parameter]) -> float:
    """Return the 2-norm of all gradients together, each element counted once.

    Collective over the grids of the parameters.

    An element is counted by the rank at coordinate 0 of every axis that neither cuts nor shards it; a parameter that
    occurs twice counts once; one without a gradient counts as zeros.  The sum is in float64.

    Raises
    ------
    LayoutError
        If a gradient is not settled.
    """
    once = distinct(parameters)
    terms = {id(p): square_sum(part) for p, part in gradients(once) if p.counted and part.size}
    sums = sums_over_ranks(once, [terms.get(id(p)) for p in once])
    return math.sqrt(sums.sum())


class Gradients(NamedTuple):
    """The norm of the gradients of a step, which all ranks know.

    Attributes
    ----------
    norm : float
        The 2-norm of all of them, each element counted once.
    finite : bool
        Whether all elements on all ranks are.
    """

    norm: float
    finite: bool


def examine(
    parameters: Iterable[Parameter], scale: float = 1.0, *, over: Comm | None = None,
    owns: Callable[[Parameter], bool] | None = None,
) -> Gradients:  # fmt: skip
    """Return the norm of all gradients, and whether they are finite: one pass, one all-reduce of two numbers.

    Collective.

    Every rank looks at all that it holds, shards of ZeRO or whole blocks, copies too: what is wrong in one rank's copy
    is known to all.  The last backward pass must have settled them.

    Parameters
    ----------
    scale : float
        That of the loss: the norm is divided by it.
    over : Comm, optional
        All ranks whose parameters count, where they are on several grids, such as the stages of a pipeline; by default
        the ranks of the parameters' grids.
    owns : callable, optional
        Whether this rank's grid is the one that counts a parameter, which other grids may hold too.

    Raises
    ------
    LayoutError
        If a gradient is not settled.
    """
    once = distinct(parameters)
    total, finite = 0.0, True
    both = np.zeros(2)
    grids: dict[int, Grid] = {id(p.grid): p.grid for p in once}
    for grid in grids.values():
        mine = grid.backend.zeros((2,), np.float64)
        seen = grid.backend.zeros((), np.float64)
        here = [p for p in once if p.grid is grid]
        for p, part in gradients(here):
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is reported
                squares = square_sum(part)
            seen = seen + squares
            if p.counted and (owns is None or owns(p)):
                mine[:1] += squares
        if (
            grid.backend.values
            and not math.isfinite(float(seen))
            and not all(all_finite(part) for _, part in gradients(here))
        ):
            mine[1] = 1
        if over is not None:
            both += grid.backend.to_host(mine) if grid.backend.values else _assumed(grid.backend, scale)
            continue
        grid.everyone.all_reduce(mine)
        if grid.size < grid.world.size:  # ranks outside the grid learn it too, so that all take the same way
            grid.world.broadcast(mine, 0)
        if grid.backend.values:
            squares, wrong = grid.backend.to_host(mine).tolist()
        else:
            squares, wrong = _assumed(grid.backend, scale)
        total, finite = total + squares, finite and not wrong
    if over is not None:
        over.all_reduce(both)
        total, finite = float(both[0]), not both[1]
    return Gradients(math.sqrt(total) / scale, finite)


def _assumed(backend: Backend, scale: float) -> tuple[float, float]:
    """Return the sum of squares and the mark of what is not finite that are assumed of imagined gradients."""
    norm = scale * backend.assume("norm", "the norm of the gradients")
    return norm * norm, float(not backend.assume("finite", "whether the gradients are finite"))


def clipping(norm: float, most: float | None) -> float:
    """Return the factor that limits a norm to `most`: 1 without a limit, or if the norm is not finite."""
    if most is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, most / (norm + 1e-6))


def clip_gradient_norm(parameters: Iterable[Parameter], max_norm: float, *, norm: float | None = None) -> float:
    """Multiply all gradients by `min(1, max_norm / (norm + 1e-6))`, where `norm` is that of the whole model.

    To be called once a step, after the last backward pass.  Collective.

    Parameters
    ----------
    norm : float, optional
        The norm, where it is known already, or covers more than these parameters (of other stages of a pipeline).

    Returns
    -------
    float
        The norm before clipping.  Where it is not finite the gradients are left as they are.

    Raises
    ------
    ConfigError
        If `max_norm` is not above 0.
    LayoutError
        If a gradient is not settled.
    """
    above_zero(max_norm, "norm")
    once = distinct(parameters)
    if norm is None:
        norm = gradient_norm(once)
    factor = clipping(norm, max_norm)
    if factor < 1.0:
        for p in once:
            block = p.storage.settled
            if block is not None:
                multiply(block, factor)
                p.storage.changed(block)
    return norm


def clip_gradient_value(parameters: Iterable[Parameter], limit: float) -> None:
    """Bring all elements of all gradients between `-limit` and `limit`; what is not a number stays so.

    To be called once a step, after the last backward pass.  Nothing communicates.

    Raises
    ------
    ConfigError
        If the limit is not above 0.
    LayoutError
        If a gradient is not settled.
    """
    above_zero(limit, "value")
    for p in distinct(parameters):
        p.check_settled()
        block = p.storage.settled
        if block is not None:
            most = block.dtype.type(limit)
            namespace(block).clip(block, -most, most, out=block)
            p.storage.changed(block)


def above_zero(limit: float, what: str) -> None:
    """Raise a ConfigError unless what gradients are clipped to, a norm or a value, is above 0."""
    if not limit > 0:
        raise ConfigError(f"gradients are clipped to a {what} above 0, not {limit!r}")
