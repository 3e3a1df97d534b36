"""Modules whose values are computed again in the backward pass, with the random numbers they drew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from parlinalg import autograd
from parlinalg.nn.added_losses import add_loss, added_losses, collecting
from parlinalg.random.draws import Draws, current_draws, using_draws
from parlinalg.sequence import BatchPositions, token_positions, using_positions

if TYPE_CHECKING:
    from parlinalg.nn.module import Module

    Kind = TypeVar("Kind", bound=Module)


def recompute(module: Kind, on: bool = True) -> Kind:
    """Let a module keep only its inputs for the backward pass, which runs it again; returns the module.

    Dropout drops the same elements again, and the values are the same bit for bit.  Gradients of parameters still
    reach their reducer during the pass.  Calls within `no_grad` are not affected.

    Parameters
    ----------
    module : Module
        It gives one tensor; its inputs, such as the context of cross-attention, stay in their layouts.
    on : bool
        False undoes it.

    Chen et al., "Training deep nets with sublinear memory cost", 2016.

    Examples
    --------
    >>> import parlinalg as pla
    >>> from parlinalg import nn, schemes
    >>> grid, scheme = pla.Grid({"axis": 1}), schemes.discover()["serial"].SCHEME
    >>> model = nn.MLP((4, 16, 4), scheme, grid, dropout=0.1, seed=1)
    >>> nn.recompute(model)(pla.Tensor(pla.ones((2, 4), grid, pla.Layout(None, None), "float32"))).shape
    (2, 4)
    """
    module.recomputes = on
    return module


class Moment:
    """A snapshot of all that a module's values depend on beside its inputs: modes and random draws."""

    def __init__(self, module: Module) -> None:
        draws = current_draws()
        self.draws = draws.copy() if draws is not None else None
        self.modules = [(m, m.training, own_draws(m)) for m in module.modules()]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this context modes and draws are those of the snapshot."""
        now = [(m, m.training, m.__dict__.get("_draws")) for m, _, _ in self.modules]
        try:
            for m, training, draws in self.modules:
                m.training = training
                if draws is not None:
                    m._draws = draws.copy()
            with using_draws(self.draws.copy() if self.draws is not None else None):
                yield
        finally:
            for m, training, kept in now:
                m.training = training
                if kept is not None:
                    m._draws = kept


def own_draws(module: Module) -> Draws | None:
    """Return a copy of a module's own draws, from which it draws outside of any `training_step`."""
    draws = module.__dict__.get("_draws")
    return draws.copy() if isinstance(draws, Draws) else None


def recomputed(module: Module, *inputs: Any, **named: Any) -> Any:
    """Call a module so that the backward pass computes it, and the terms it adds to the loss, again."""
    moment: Moment | None = None
    asked = collecting()

    def run(*inputs: Any, **named: Any) -> Any:
        with added_losses(asked) as terms:
            result = module.forward(*inputs, **named)
        return (result, *terms) if terms else result

    def forward(where: tuple[Any, Any], /, *inputs: Any, **named: Any) -> Any:
        nonlocal moment
        with using_positions(BatchPositions(*where)):
            if moment is None:
                moment = Moment(module)
                return run(*inputs, **named)
            with moment.again():
                return run(*inputs, **named)

    result = autograd.recompute(forward, token_positions().arrays, *inputs, **named)
    if not isinstance(result, tuple):
        return result
    for term in result[1:]:
        add_loss(term)
    return result[0]
