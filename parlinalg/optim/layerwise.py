"""Optimizers whose steps depend on norms of whole parameters: LAMB and LARS."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from parlinalg.autograd.parameter import sums_over_ranks
from parlinalg.backend.kernels.optimizers import lamb_moments, lamb_step, lars_step, square_sum
from parlinalg.optim.flat import FlatOptions, Run, segments
from parlinalg.optim.groups import Option
from parlinalg.optim.optimizer import Optimizer, at_least_zero, below_one, check_moments

Block = Any
_NONE = (None, None)


class Layerwise(Optimizer):
    """An optimizer whose step for a parameter depends on two norms of all its elements, wherever they are.

    A step is two passes over the pieces that a rank updates, and between them one all-reduce of two numbers a
    parameter.  An element counts once, however many ranks hold it.
    """

    def apply(self) -> None:
        squares: dict[int, Sequence[Any]] = {}
        for run in self.windows():
            for entry, part, _ in segments(run):
                terms = self.measure(run, part)
                held = squares.get(id(entry.parameter), (0.0, 0.0))
                squares[id(entry.parameter)] = [a + b for a, b in zip(held, terms, strict=True)]
        mine = [squares.get(id(p), _NONE) if p.counted else _NONE for p in self.parameters]
        norms = self.norms(mine)
        groups, rates = self.flat.numbers(), {}
        for p, pair in zip(self.parameters, norms, strict=True):
            self._group = groups[id(p)]
            rates[id(p)] = self.lr * self.ratio(*pair)
        self._group = 0
        for run in self.windows():
            for entry, part, _ in segments(run):
                self.move(run, part, rates[id(entry.parameter)])

    def norms(self, squares: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
        """Return the two norms of each parameter from this rank's sums of squares, None where it counts none.

        Collective.
        """
        twice = [*self.parameters, *self.parameters]
        totals = np.sqrt(sums_over_ranks(twice, [pair[0] for pair in squares] + [pair[1] for pair in squares]))
        n = len(self.parameters)
        return [(float(a), float(b)) for a, b in zip(totals[:n], totals[n:], strict=True)]

    @abstractmethod
    def measure(self, run: Run, part: slice) -> tuple[Block, Block]:
        """Return the sums of squares behind the two norms, of a part of a run; takes what is new into the states."""

    @abstractmethod
    def ratio(self, value: float, other: float) -> float:
        """Return the factor of the learning rate, from the two norms of a parameter."""

    @abstractmethod
    def move(self, run: Run, part: slice, rate: float) -> None:
        """Make the step of a part of a run."""

    def update(self, run: Run) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs norms of all parameters before it updates one: step()")


class LAMB(Layerwise):
    """LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020).

    `u = m̂ / (√v̂ + eps) + weight_decay p`, with the moments of Adam; `p -= lr (‖p‖ / ‖u‖) u`.  The norms are those of
    the whole parameter; where one of them is 0, their quotient counts as 1.

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

    NAME: ClassVar[str] = "lamb"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"lr": 1e-2}
    betas = Option[tuple[float, float]]()
    eps = Option[float]()
    STATES: ClassVar[tuple[str, ...]] = ("mean", "square")

    def __init__(
        self, parameters: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), *,
        eps: float = 1e-6, weight_decay: float = 0.01, **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay, betas=betas, eps=eps, **kept)

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        check_moments(options)

    def measure(self, run: Run, part: slice) -> tuple[Block, Block]:
        mean, square = run.states["mean"][part], run.states["square"][part]
        lamb_moments(run.g[part], mean, square, betas=self.betas, factor=self.factor)
        return square_sum(run.p[part]), self._step(run, part, None)

    def ratio(self, value: float, other: float) -> float:
        return value / other if value and other else 1.0

    def move(self, run: Run, part: slice, rate: float) -> None:
        self._step(run, part, rate)

    def _step(self, run: Run, part: slice, rate: float | None) -> Block:
        return lamb_step(
            run.p[part], run.states["mean"][part], run.states["square"][part], rate=rate, betas=self.betas,
            eps=self.eps, weight_decay=self.weight_decay, step=self.steps,
        )  # fmt: skip


class LARS(Layerwise):
    """LARS (You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017).

    `m = momentum m + lr λ (g + weight_decay p)`; `p -= m`, where `λ = trust ‖p‖ / (‖g‖ + weight_decay ‖p‖)`.  The norms
    are those of the whole parameter; where one of them is 0, λ is 1.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`.
    lr : float
    momentum : float
        At least 0 and below 1.
    weight_decay : float
    trust : float
        The paper's η, above 0.
    master : bool or dtype, optional
        See `Optimizer`.
    """

    NAME: ClassVar[str] = "lars"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"lr": 1.0}
    momentum = Option[float]()
    trust = Option[float]()

    def __init__(
        self, parameters: Iterable[Any], lr: float, momentum: float = 0.9, *, weight_decay: float = 0.0,
        trust: float = 1e-3, **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(parameters, lr, weight_decay, momentum=momentum, trust=trust, **kept)

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        below_one(momentum=options["momentum"])
        at_least_zero(trust=options["trust"])

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if any(group["momentum"] for group in self.param_groups) else ()

    def measure(self, run: Run, part: slice) -> tuple[Block, Block]:
        return square_sum(run.p[part]), square_sum(run.g[part]) * self.factor**2

    def ratio(self, value: float, other: float) -> float:
        return self.trust * value / (other + self.weight_decay * value) if value and other else 1.0

    def move(self, run: Run, part: slice, rate: float) -> None:
        m = run.states["momentum"][part] if self.momentum else None
        lars_step(
            run.p[part], run.g[part], m, rate=rate, momentum=self.momentum, weight_decay=self.weight_decay,
            factor=self.factor,
        )  # fmt: skip
