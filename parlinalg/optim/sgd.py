"""Gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from parlinalg.backend.kernels import optimizers
from parlinalg.errors import ConfigError
from parlinalg.optim.flat import FlatOptions, Run
from parlinalg.optim.groups import Option
from parlinalg.optim.optimizer import Optimizer, below_one


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum: `m = momentum m + d`, `p -= lr m`, where `d = g + weight_decay p`.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`.
    lr : float
    momentum : float
        At least 0 and below 1.
    nesterov : bool
        The step is `p -= lr (d + momentum m)` (Sutskever et al., "On the importance of initialization and momentum in
        deep learning", 2013).
    weight_decay : float
    master : bool or dtype, optional
        See `Optimizer`.
    """

    NAME: ClassVar[str] = "sgd"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"lr": 0.1}
    momentum = Option[float]()
    nesterov = Option[bool]()
    ELEMENTWISE: ClassVar[bool] = True

    def __init__(
        self, parameters: Iterable[Any], lr: float, momentum: float = 0.0, *,
        nesterov: bool = False, weight_decay: float = 0.0, **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay, momentum=momentum, nesterov=nesterov, **kept)

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        below_one(momentum=options["momentum"])
        if options["nesterov"] and not options["momentum"]:
            raise ConfigError("Nesterov's momentum needs a momentum above 0")

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if any(group["momentum"] for group in self.param_groups) else ()

    def update(self, run: Run) -> None:
        optimizers.sgd(
            run.p, run.g, run.states["momentum"] if self.momentum else None, lr=self.lr, momentum=self.momentum,
            nesterov=self.nesterov, weight_decay=self.weight_decay, factor=self.factor,
        )  # fmt: skip
