"""The norm of a whole model's gradient, and clipping by it or by value."""

from __future__ import annotations

import math
from collections.abc import Iterable

from parlinalg.autograd import Parameter
from parlinalg.autograd.parameter import distinct, gradients, sums_over_ranks
from parlinalg.backend import namespace
from parlinalg.backend.kernels.optimizers import scale, square_sum
from parlinalg.errors import ConfigError


def gradient_norm(parameters: Iterable[Parameter]) -> float:
    """The 2-norm of all gradients together, each element counted once.  Collective over the grids of the parameters.

    An element is counted by the rank at coordinate 0 of every axis that neither cuts nor shards it; a parameter that
    occurs twice counts once; one without a gradient counts as zeros.  The sum is in float64.

    Raises
    ------
    LayoutError
        If a gradient is not settled.
    """
    once = distinct(parameters)
    terms = {id(p): square_sum(part) for p, part in gradients(once) if p.counted and part.size}
    return math.sqrt(sums_over_ranks(once, [terms.get(id(p)) for p in once]).sum())


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
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1.0:
        for p in once:
            block = p.storage.settled
            if block is not None:
                scale(block, factor)
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
