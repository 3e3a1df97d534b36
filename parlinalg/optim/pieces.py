"""What each rank updates of the parameters, for all that goes over gradients: norms, clipping, checks, optimizers.

A piece is the whole block of a parameter, or, where ranks with the same block share its update, this rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid

Block = Any


def distinct(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters, each once."""
    return list({id(p): p for p in parameters}.values())


def gradients(parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, Block, bool]]:
    """For each parameter that has one, its settled gradient's piece on this rank, and whether this rank counts it.

    Yields
    ------
    (Parameter, array, bool)
        Each parameter once, its gradient when it is asked for: of those that rest on a disk one at a time is mapped.
        The array is flat, a view where the gradient lies in C order.  Over all ranks, each element is counted once.

    Raises
    ------
    LayoutError
        If a gradient is not settled.
    """
    once = distinct(parameters)
    for p in once:
        check_settled(p)
    for p in once:
        piece = p.updated[1]
        if piece is not None:
            yield p, piece, counted(p)


def held(parameter: Parameter) -> Block:
    """What this rank holds of a parameter's settled gradient, to be changed in place; None if there is none."""
    if parameter.shard is not None:
        return parameter.shard.grad
    return None if parameter.grad is None else parameter.grad.block


def changed(parameter: Parameter, block: Block) -> None:
    """Say that what `held` gave was changed: a gradient that rests elsewhere takes it."""
    if parameter.shard is None and parameter.grad is not None and parameter.grad.RESTS:
        parameter.grad.put(block.reshape(-1))  # type: ignore[attr-defined]


def check_settled(parameter: Parameter) -> None:
    """Raise a LayoutError if the gradient of a parameter is a sum not formed yet."""
    grad = parameter.grad
    if grad is not None and grad.layout.partial:
        raise LayoutError(
            f"the gradient of {parameter.name!r} is {grad.layout!r}, not summed yet; make the last backward pass of a "
            "step outside no_sync()"
        )


def counted(parameter: Parameter) -> bool:
    """Whether this rank counts its piece of a parameter in sums over the whole grid.

    It is at coordinate 0 of every axis that neither cuts nor shards the parameter.
    """
    grid, layout = parameter.grid, parameter.layout
    shards = () if parameter.shard is None else parameter.shard.axes
    return grid.inside and not any(i for a, i in grid.coords.items() if layout.where(a) is None and a not in shards)


def over_ranks(parameters: Sequence[Parameter], terms: Sequence[Block]) -> np.ndarray:
    """For each parameter, the sum of all ranks' terms.  Collective over the grids of the parameters.

    Parameters
    ----------
    terms : sequence of arrays without dims, or None
        This rank's terms in float64, one a parameter; None where it has none (see `counted`).

    Returns
    -------
    numpy.ndarray
        In float64, on every rank, those outside the grid too.
    """
    totals = np.zeros(len(parameters))
    grids: dict[int, Grid] = {id(p.grid): p.grid for p in parameters}
    for grid in grids.values():
        where = [i for i, p in enumerate(parameters) if p.grid is grid]
        mine = grid.backend.zeros((len(where),), np.float64)
        for at, i in enumerate(where):
            if terms[i] is not None:
                mine[at] = terms[i]
        grid.everyone.all_reduce(mine)
        if grid.size < grid.world.size:  # ranks outside the grid learn them too, so that all take the same way
            grid.world.broadcast(mine, 0)
        totals[where] = grid.backend.to_host(mine)
    return totals
