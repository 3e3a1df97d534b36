"""The norm of a whole model's gradient, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.backend.kernels_optim import flat, scale, square_sum
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid


def gradient_norm(parameters: Iterable[Parameter]) -> float:
    """The 2-norm of all gradients together, each element counted once.  Collective over the grids of the parameters.

    An element is counted by the rank at coordinate 0 of every axis that does not cut it; a parameter that occurs twice
    counts once; one without a gradient counts as zeros.  The sum is in float64.

    Raises
    ------
    LayoutError
        If a gradient is not settled.
    """
    once = list({id(p): p for p in parameters}.values())
    grids: dict[int, Grid] = {id(p.grid): p.grid for p in once}
    total = 0.0
    for grid in grids.values():
        mine = grid.backend.zeros((1,), np.float64)
        for p in once:
            if p.grid is grid and p.grad is not None:
                if p.grad.layout.partial:
                    raise LayoutError(
                        f"the gradient of {p.name!r} is {p.grad.layout!r}, not summed yet; a norm is taken after "
                        "settling: make the last backward pass of a step outside no_sync()"
                    )
                if grid.inside and not any(i for a, i in grid.coords.items() if p.grad.layout.where(a) is None):
                    mine += square_sum(flat(p.grad.block))
        grid.everyone.all_reduce(mine)
        if grid.size < grid.world.size:  # ranks outside the grid learn it too, so that all take the same way
            grid.world.broadcast(mine, 0)
        total += float(grid.backend.to_host(mine)[0])
    return math.sqrt(total)


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
    """
    once = list({id(p): p for p in parameters}.values())
    if norm is None:
        norm = gradient_norm(once)
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1.0:
        for p in once:
            if p.grad is not None:
                scale(p.grad.block, factor)
    return norm
