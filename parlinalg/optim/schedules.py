"""Schedules of learning rates: a schedule is a function of the number of steps made, whose value times an optimizer's
base rate is the rate of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.optim.optimizer import Optimizer

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """Always 1."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear:
    """From `start` to `end` in `steps` steps, then `end`.

    >>> [Linear(4, end=0.5)(step) for step in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]
    """

    steps: int
    end: float = 0.0
    start: float = 1.0

    def __post_init__(self) -> None:
        _positive("Linear", steps=self.steps)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Cosine:
    """From 1 to `end` in `steps` steps along half a cosine, then `end` (Loshchilov and Hutter, "SGDR", 2017).

    >>> [round(Cosine(4, end=0.1)(step), 3) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.868, 0.55, 0.1, 0.1]
    """

    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _positive("Cosine", steps=self.steps)

    def __call__(self, step: int) -> float:
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / self.steps)))


@dataclass(frozen=True)
class Step:
    """Multiplied by `factor` every `every` steps.

    >>> [Step(10, 0.5)(step) for step in (0, 9, 10, 25)]
    [1.0, 1.0, 0.5, 0.25]
    """

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _positive("Step", every=self.every)

    def __call__(self, step: int) -> float:
        return self.factor ** (step // self.every)


@dataclass(frozen=True)
class WarmUp:
    """`1/steps`, `2/steps`, … up to 1 at step `steps - 1`, and from step `steps` on another schedule from its start.

    >>> [WarmUp(4, Step(2, 0.5))(step) for step in range(8)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5]
    """

    steps: int
    then: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"the schedule WarmUp needs steps of at least 0, not {self.steps}")

    def __call__(self, step: int) -> float:
        return (step + 1) / self.steps if step < self.steps else self.then(step - self.steps)


class Scheduler:
    """Sets the learning rate of each of an optimizer's parameter groups to its base rate times a schedule's value.

    Parameters
    ----------
    optimizer : Optimizer
        The `lr` of each group is its base rate, and becomes the rate of step 0.
    schedule : callable
        From the number of steps made to a factor.

    Examples
    --------
    After every `optimizer.step()`::

        scheduler.step()
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps = 0
        self._set()

    @property
    def base(self) -> float:
        """The base rate of the first group."""
        return self.bases[0]

    @property
    def lr(self) -> float:
        """The rate of the first group in the next step."""
        return self.base * self.schedule(self.steps)

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        self._set()

    def _set(self) -> None:
        factor = self.schedule(self.steps)
        groups = self.optimizer.param_groups
        self.bases += [float(group["lr"]) for group in groups[len(self.bases) :]]  # added since
        for group, base in zip(groups, self.bases, strict=True):
            group["lr"] = base * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps made, and the base rates."""
        return {"steps": self.steps, "base": self.base, "bases": list(self.bases)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises
        ------
        ConfigError
            If it is of an optimizer with more or fewer parameter groups.
        """
        bases = [float(base) for base in state.get("bases", [state["base"]])]
        if len(bases) != len(self.bases):
            raise ConfigError(
                f"the scheduler's state is of an optimizer with {len(bases)} parameter groups, and this one has "
                f"{len(self.bases)}: make it with the same groups"
            )
        self.steps, self.bases = int(state["steps"]), bases
        self._set()


def _positive(name: str, **settings: int) -> None:
    for setting, value in settings.items():
        if value < 1:
            raise ConfigError(f"the schedule {name} needs {setting} of at least 1, not {value}")
