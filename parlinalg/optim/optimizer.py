"""What all optimizers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.names import check_names
from parlinalg.optim.flat import Entry, Run, flatten, runs

Block = Any


class Optimizer(ABC):
    """Updates parameters from their gradients; every rank its own blocks, without communication.

    Parameters, gradients and states lie in flat buffers, one a dtype, and a step is one pass over them.  The parameters
    move there at the first step.  Those of 16 bits are updated in float32, and have float32 states.

    Attributes
    ----------
    lr : float
        The learning rate of the next step; a `Scheduler` sets it.
    steps : int
        The number of steps made.

    Raises
    ------
    ConfigError
        If there is no parameter, or a setting is out of its range.
    """

    STATES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: Iterable[Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = list({id(p): p for p in parameters}.values())
        if not self.parameters:
            raise ConfigError("an optimizer needs at least one parameter; a model's are model.parameters()")
        for p in self.parameters:
            if not isinstance(p, Parameter):
                raise ConfigError(f"an optimizer takes Parameters, such as model.parameters(), not {type(p).__name__}")
        at_least_zero(lr=lr, weight_decay=weight_decay)
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = 0
        self._entries: list[Entry] = []

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the arrays kept for each parameter."""
        return self.STATES

    @abstractmethod
    def update(self, run: Run) -> None:
        """Make step number `steps` for parameters that lie side by side."""

    def step(self) -> None:
        """Update all parameters that have a gradient.

        Raises
        ------
        LayoutError
            If a gradient is not settled.
        """
        self._check()
        self._flatten()
        self.steps += 1
        for run in runs(self._entries):
            self.update(run)

    def _check(self) -> None:
        for p in self.parameters:
            if p.grad is not None and p.grad.layout.with_partial(()) != p.grad.layout:
                raise LayoutError(
                    f"the gradient of {p.name!r} is {p.grad.layout!r}, not summed yet; "
                    "make the last backward pass of a step outside no_sync()"
                )

    def _flatten(self) -> None:
        if not self._entries or not all(e.current for e in self._entries):
            old = {id(e.parameter): e for e in self._entries}
            self._entries = flatten(self.parameters, self.states, old)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Steps, learning rate, and for each parameter's name its states as global NumPy arrays.  Collective."""
        self._flatten()
        arrays = {name: {s: e.state(s).gather() for s in self.states} for name, e in self._named().items()}
        return {"steps": self.steps, "lr": self.lr, "states": arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, on any grid: the global arrays, on every rank.

        Raises
        ------
        ConfigError
            Naming all states that are missing, unexpected or misshapen.
        """
        self._flatten()
        named = self._named()
        given = {f"{n}.{s}": a for n, arrays in state["states"].items() for s, a in arrays.items()}
        want = {f"{n}.{s}": e.data.shape for n, e in named.items() for s in self.states}
        check_names("the optimizer's state", want, {n: tuple(np.shape(a)) for n, a in given.items()})
        for name, entry in named.items():
            for s, block in entry.states.items():
                ranges = entry.data.grid.block(entry.data.layout, entry.data.shape)
                part = np.asarray(given[f"{name}.{s}"])[tuple(slice(r.start, r.stop) for r in ranges)]
                block[...] = entry.data.grid.backend.from_host(np.array(part, block.dtype, order="C"))
        self.steps = int(state["steps"])
        self.lr = float(state["lr"])

    def _named(self) -> dict[str, Entry]:
        """The entries by their parameters' names, in the order of the parameters."""
        entries = {id(e.parameter): e for e in self._entries}
        named = {p.name or str(i): entries[id(p)] for i, p in enumerate(self.parameters)}
        if len(named) < len(entries):
            names = [p.name for p in self.parameters]
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ConfigError(f"parameters share the names {', '.join(twice)}; name them by model.initialize(seed)")
        return named


def at_least_zero(**settings: float) -> None:
    """Raise a ConfigError unless all these are numbers of at least 0."""
    for name, value in settings.items():
        if not value >= 0:
            raise ConfigError(f"an optimizer's {name} is at least 0, not {value}")


def below_one(**settings: float) -> None:
    """Raise a ConfigError unless all these are numbers of at least 0 and below 1."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise ConfigError(f"an optimizer's {name} is at least 0 and below 1, not {value}")
