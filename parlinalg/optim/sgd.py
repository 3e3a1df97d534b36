"""Gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from parlinalg.autograd import Parameter
from parlinalg.backend import kernels_optim
from parlinalg.errors import ConfigError
from parlinalg.optim.flat import Run
from parlinalg.optim.optimizer import Optimizer, at_least_zero, below_one


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum: `m = momentum m + d`, `p -= lr m`, where `d = g + weight_decay p`.

    Parameters
    ----------
    parameters : iterable of Parameter
    lr : float
    momentum : float
        At least 0 and below 1.
    nesterov : bool
        The step is `p -= lr (d + momentum m)` (Sutskever et al., "On the importance of initialization and momentum in
        deep learning", 2013).
    weight_decay : float
    master : bool or dtype
        See `Optimizer`.
    """

    ELEMENTWISE: ClassVar[bool] = True

    def __init__(
        self, parameters: Iterable[Parameter], lr: float, momentum: float = 0.0, *,
        nesterov: bool = False, weight_decay: float = 0.0, master: bool | Any = False,
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay, master=master)
        below_one(momentum=momentum)
        at_least_zero(weight_decay=weight_decay)
        if nesterov and not momentum:
            raise ConfigError("Nesterov's momentum needs a momentum above 0")
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(self, run: Run) -> None:
        kernels_optim.sgd(
            run.p, run.g, run.states.get("momentum"), lr=self.lr, momentum=self.momentum, nesterov=self.nesterov,
            weight_decay=self.weight_decay, factor=self.factor,
        )  # fmt: skip
