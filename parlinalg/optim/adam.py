"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

from parlinalg.backend.kernels import optimizers
from parlinalg.optim.flat import FlatOptions, Run
from parlinalg.optim.groups import Option
from parlinalg.optim.optimizer import Optimizer, check_moments


class Adam(Optimizer):
    """Adam (Kingma and Ba, "Adam: a method for stochastic optimization", 2015).

    `m = β₁ m + (1 - β₁) g`; `v = β₂ v + (1 - β₂) g²`; `p -= lr m̂ / (√v̂ + eps)`, where m̂ and v̂ are corrected for their
    start at zero.  Weight decay is added to the gradient: `g + weight_decay p`.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`.
    lr : float
    betas : tuple of two floats
        Each at least 0 and below 1.
    eps : float
        Above 0.
    weight_decay : float
    master : bool or dtype, optional
        See `Optimizer`.
    """

    NAME: ClassVar[str] = "adam"
    betas = Option[tuple[float, float]]()
    eps = Option[float]()
    STATES: ClassVar[tuple[str, ...]] = ("mean", "square")
    ELEMENTWISE: ClassVar[bool] = True
    DECOUPLED: ClassVar[bool] = False

    def __init__(
        self, parameters: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), *,
        eps: float = 1e-8, weight_decay: float = 0.0, **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay, betas=betas, eps=eps, **kept)

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        check_moments(options)

    def update(self, run: Run) -> None:
        optimizers.adam(
            run.p, run.g, run.states["mean"], run.states["square"], lr=self.lr, betas=self.betas, eps=self.eps,
            weight_decay=self.weight_decay, decoupled=self.DECOUPLED, step=self.steps, factor=self.factor,
        )  # fmt: skip


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

    Before Adam's step, p is multiplied by `1 - lr weight_decay`.  Parameters as of `Adam`, with a weight decay of 0.01.
    """

    NAME: ClassVar[str] = "adamw"
    DECOUPLED: ClassVar[bool] = True

    def __init__(
        self, parameters: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), *,
        eps: float = 1e-8, weight_decay: float = 0.01, **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, betas, eps=eps, weight_decay=weight_decay, **kept)
