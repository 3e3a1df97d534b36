"""The base class of optimizers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex

from parlinalg.autograd import Parameter
from parlinalg.comm.check import compare_states
from parlinalg.errors import ConfigError
from parlinalg.grid import worlds
from parlinalg.optim.flat import Entry, FlatOptions, FlatParameters, HomeState, Run, States
from parlinalg.optim.groups import Option, check_apart, group_of, groups_of
from parlinalg.state_dict import check_arrays


class Optimizer(ABC):
    """An update rule, which each rank applies to the elements of parameters that it updates.

    Parameters, gradients and states lie in flat buffers, and a step is one pass over them.  The parameters move there
    at the first step.  Those of 16 bits are updated in float32, and have float32 states.  Where ranks share the update
    of parameters (see `parlinalg.parallel.ZeRO`), a rank has states of its part only, and a step ends with an
    all-gather of the values, or starts it (`overlap_gather`); nothing else communicates.

    Parameters
    ----------
    parameters : iterable of Parameter, of (name, Parameter) pairs, or of dict
        Dicts are parameter groups, as in PyTorch: "params", an iterable of either, and options that differ from those
        that the optimizer is given, such as `[{"params": weights}, {"params": biases, "weight_decay": 0.0}]`; see
        `decay_groups`.  A group may have no parameters, as on a stage of a pipeline.
    lr, weight_decay : float
    master : bool or dtype, optional
        With True, parameters of 16 bits are rounded from float32 ones that a step updates (Micikevicius et al., "Mixed
        precision training", 2018), a state "master".  A dtype: so are all parameters of fewer bits than it has.
    **options
        Further options of a subclass, which each group has; the subclass declares each as an `Option`.

    Attributes
    ----------
    param_groups : list of dict
        The groups: "params" and every option.  Options may be changed between steps.
    lr, weight_decay : float
        Options of the first group; in `update`, of the group that is updated.  Setting one sets it for all groups; a
        `Scheduler` sets the learning rate of each group.
    steps : int
        The number of steps made.
    factor : float
        What gradients are multiplied by in the current step; `update` heeds it.
    flat : FlatParameters
        What this rank updates, and the states of it.

    Raises
    ------
    ConfigError
        If there is no parameter, one is in two groups, a group has an unknown option, an option is out of its range, or
        ranks share the update of parameters and the class does not say that it can be made part by part, by
        `ELEMENTWISE` or a method `norms`.
    """

    NAME: ClassVar[str]
    """The name by which a configuration chooses the class, if it has one of its own."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Options of a configuration that leaves them out, where they differ from the defaults of the arguments."""
    STATES: ClassVar[tuple[str, ...]] = ()
    ELEMENTWISE: ClassVar[bool] = False
    """Whether each element is updated from its own gradient and states alone, so that `update` may be given parts of
    parameters; of classes where it is not, those that have `norms` sum what else they need over all parts, and those
    that have `directions` bring the parts together."""

    lr = Option[float]()
    weight_decay = Option[float]()

    def __init__(
        self, parameters: Iterable[Any], lr: float, weight_decay: float, **options: Any
    ) -> None:  # fmt: skip
        kept = {name: options.pop(name) for name in FlatOptions.__annotations__ if name in options}
        for name in options:
            if not isinstance(getattr(type(self), name, None), Option):
                raise TypeError(f"{type(self).__name__} has no argument {name!r}")
        self._group = 0  # the one that is updated
        self.defaults = {"lr": lr, "weight_decay": weight_decay, **options}
        self.check_options(self.defaults)
        self.param_groups = groups_of(parameters, self.defaults)
        for group in self.param_groups:
            self.check_options(group)
        self.steps = 0
        self.factor = 1.0
        self.flat = FlatParameters(self.param_groups, self.check_parts, **kept)

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise a ConfigError if an option of a group is out of its range; subclasses check theirs too."""
        at_least_zero(lr=options["lr"], weight_decay=options["weight_decay"])

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Update further parameters too, as a group of their own.

        Parameters
        ----------
        group : dict
            As of the optimizer's `parameters`.

        Raises
        ------
        ConfigError
            If a parameter is in another group, or the group has an unknown option or one out of its range.
        """
        made = group_of(group, len(self.param_groups), self.defaults)
        self.check_options(made)
        check_apart([*self.param_groups, made])
        self.param_groups.append(made)
        self.flat.check_shared()

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all groups."""
        return self.flat.parameters

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the arrays kept for each parameter."""
        return self.STATES

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the arrays kept for each parameter of a group, where groups differ in them."""
        return self.states

    def home_states(self) -> list[HomeState]:
        """Return the states that are not cut as their parameters are, in one order on all ranks."""
        return []

    @property
    def step_bytes(self) -> int:
        """The temporary bytes of a step on this rank, where it needs more than tiles."""
        return 0

    def work_of_ranks(self) -> dict[int, int]:
        """Return about the elements that a step takes on each rank of the grid which works on whole matrices, by rank.

        It is known after a step.
        """
        return {}

    @abstractmethod
    def update(self, run: Run) -> None:
        """Make step number `steps` for parameters that lie side by side: change `run.p` and `run.states`."""

    def apply(self) -> None:
        """Make step number `steps`; an optimizer that needs more than one pass has its own."""
        for run in self.windows():
            self.update(run)

    def step(self, factor: float = 1.0) -> None:
        """Update all parameters that have a gradient.  Collective over the axes along which ranks share their update.

        Parameters
        ----------
        factor : float
            Gradients are multiplied by it as they are read, in the dtype of the states: 1/scale of a scaled loss, or
            what clips the norm, without a pass of its own and without loss of bits.

        Raises
        ------
        LayoutError
            If a gradient is not settled.
        OffloadError
            If the states lie on a disk that fails; the step is then not made, on any rank.
        """
        for p in self.parameters:
            p.check_settled()
        self.arrange()
        states = self.flat.states
        states.steps = self.steps
        self.steps += 1
        self.factor = float(factor)
        try:
            self.apply()
            states.complete(self.steps)
        except BaseException:
            self.steps -= 1
            states.undo()
            raise
        self.flat.gather()

    def windows(self) -> Iterator[Run]:
        """Iterate over everything that has a gradient, a part at a time, with its states in memory.

        What `update` makes of a part is stored when the next one is asked for.
        """
        try:
            for run in self.flat.windows():
                self._group = run.group
                yield run
        finally:
            self._group = 0

    def place(self, states: States) -> None:
        """Keep the states elsewhere from now on; those there are move.  Collective.

        Raises
        ------
        ConfigError
            If states come to the update in tiles, and the class does not say that it can be made so.
        OffloadError
            On all ranks, if states cannot be read where they are, or written to where they go, on any; they then stay.
        """
        self.flat.place(states)

    def arrange(self) -> list[Entry]:
        """Return the entries that this rank updates, with states.  Collective over axes that newly share them."""
        return self.flat.arrange([self.states_of(group) for group in self.param_groups], self.home_states())

    @classmethod
    def check_parts(cls, why: str, instead: str) -> None:
        """Raise a ConfigError if the update cannot be made part by part."""
        if not cls.ELEMENTWISE and not hasattr(cls, "norms") and not hasattr(cls, "directions"):
            name = cls.__name__
            raise ConfigError(
                f"{name} may update an element from others of its parameter, and {why}; if it goes element by element, "
                f"say {name}.ELEMENTWISE = True, else use an optimizer that does, such as SGD, Adam or AdamW, or one "
                f"with a rule for all parts, such as LAMB, LARS or Muon, or {instead}"
            )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: steps, learning rate, parameter groups and states.  Collective.

        The groups ("param_groups") have their options and the names of their parameters; the states ("states") are
        global NumPy arrays by the name of the parameter.

        Raises
        ------
        OffloadError
            On all ranks, if the states lie on a disk that fails on any.
        """
        self.arrange()
        states = self.flat.whole_states()
        names = self._by_parameter()
        for each in self.home_states():
            states[names[id(each.parameter)]][each.name] = each.whole()
        groups = [{**options, "params": names} for options, names in zip(self.options(), self._names(), strict=True)]
        return {"steps": self.steps, "lr": self.lr, "param_groups": groups, "states": states}

    def options(self) -> list[dict[str, Any]]:
        """Return the options of each parameter group, without its parameters: what JSON can carry."""
        return [{name: value for name, value in g.items() if name != "params"} for g in self.param_groups]

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the options that `options` gave, those that this optimizer has.

        Raises
        ------
        ConfigError
            If they are those of more or fewer groups.
        """
        self._check_group_count(groups)
        for group, saved in zip(self.param_groups, groups, strict=True):
            known = {name: value for name, value in saved.items() if name in self.defaults}
            group.update({n: tuple(v) if isinstance(v, list) else v for n, v in known.items()})

    def _by_parameter(self) -> dict[int, str]:
        """Return the names of the parameters, by their identities."""
        return {id(entry.parameter): name for name, entry in self.flat.named().items()}

    def _names(self) -> list[list[str]]:
        """Return the names of each group's parameters."""
        numbers = {id(p): str(i) for i, p in enumerate(self.parameters)}
        return [[p.name or numbers[id(p)] for p in group["params"]] for group in self.param_groups]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` gave on any grid: the global arrays, on every rank.  Collective.

        Raises
        ------
        ConfigError
            On all ranks, naming all states that are missing, unexpected, misshapen or of no real numbers on any;
            nothing has changed then.
        OffloadError
            On all ranks, if the states lie on a disk that fails on any; some are then those that were to be loaded.
        """
        self.arrange()
        given = self.flat.together(lambda: self._checked(state), "loading the optimizer's state")
        compare_states(worlds(p.grid for p in self.parameters), {**given, "steps": state["steps"], "lr": state["lr"]})
        self.flat.load(given)
        names = self._by_parameter()

        def take() -> None:
            for each in self.home_states():
                each.take(given[f"{names[id(each.parameter)]}.{each.name}"])

        self.flat.where_they_lie(take, "loading the optimizer's state")
        self.steps = int(state["steps"])
        if "param_groups" in state:
            self.set_options(state["param_groups"])
        elif len(self.param_groups) == 1:
            self.lr = float(state["lr"])

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of a saved state by parameter and state, if they are those that this optimizer has."""
        missing = [key for key in ("steps", "lr", "states") if key not in state]
        if missing:
            raise ConfigError(
                f"the optimizer's state has no {', '.join(map(repr, missing))}: give what state_dict() gave, a dict "
                "with 'steps', 'lr' and 'states'"
            )
        try:
            good = int(state["steps"]) == state["steps"] and state["steps"] >= 0 and float(state["lr"]) >= 0
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(
                f"the optimizer's steps are a whole number and lr a number, both at least 0, not {state['steps']!r} "
                f"and {state['lr']!r}"
            )
        states = state["states"]
        if not isinstance(states, Mapping) or not all(isinstance(arrays, Mapping) for arrays in states.values()):
            raise ConfigError("the optimizer's states are dicts of arrays, by the names of the parameters")
        given = {f"{n}.{s}": a for n, arrays in states.items() for s, a in arrays.items()}
        want = {f"{n}.{s}": e.data.shape for n, e in self.flat.named().items() for s in e.names}
        names = self._by_parameter()
        want |= {f"{names[id(each.parameter)]}.{each.name}": each.shape for each in self.home_states()}
        check_arrays("the optimizer's state", want, given)
        self._check_groups(state.get("param_groups"))
        return given

    def _check_group_count(self, saved: Sequence[Any]) -> None:
        if len(saved) != len(self.param_groups):
            raise ConfigError(
                f"the optimizer's state is of {len(saved)} parameter groups, and this optimizer has "
                f"{len(self.param_groups)}: make it with the same groups"
            )

    def _check_groups(self, saved: Any) -> None:
        """Raise a ConfigError unless saved groups, if there are some, are of the same parameters as the optimizer's."""
        if saved is None:
            return
        if not isinstance(saved, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in saved):
            raise ConfigError("the optimizer's param_groups are a list of dicts with 'params', the names of parameters")
        self._check_group_count(saved)
        for i, (group, names) in enumerate(zip(saved, self._names(), strict=True)):
            if odd := sorted(set(map(str, group["params"])) ^ set(names)):
                raise ConfigError(
                    f"the optimizer's state has other parameters in group {i} than this optimizer: {', '.join(odd)} "
                    "in one of them alone; make it with the same groups"
                )
            self.check_options({**self.param_groups[i], **{k: v for k, v in group.items() if k in self.defaults}})


def as_number(value: Any) -> float:
    """Return a setting as a number; NaN, which no range has, of what is none."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def at_least_zero(**settings: Any) -> None:
    """Raise a ConfigError unless all these are finite numbers of at least 0."""
    for name, value in settings.items():
        if not 0 <= as_number(value) < math.inf:
            raise ConfigError(f"an optimizer's {name} is at least 0, not {value!r}")


def below_one(**settings: Any) -> None:
    """Raise a ConfigError unless all these are numbers of at least 0 and below 1."""
    for name, value in settings.items():
        if not 0 <= as_number(value) < 1:
            raise ConfigError(f"an optimizer's {name} is at least 0 and below 1, not {value!r}")


def whole(kind: str, name: str, value: Any, other: str = "") -> None:
    """Raise a ConfigError unless an option of a kind of optimizer is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        raise ConfigError(f"{kind}'s {name} is a whole number of at least 1{other}, not {value!r}")


def check_moments(options: dict[str, Any]) -> None:
    """Raise a ConfigError unless betas and eps are what Adam's moments need; betas become a tuple of floats."""
    betas = options["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"an optimizer's betas are two numbers, such as (0.9, 0.999), not {betas!r}")
    below_one(beta1=betas[0], beta2=betas[1])
    options["betas"] = (float(betas[0]), float(betas[1]))
    if not 0 < as_number(options["eps"]) < math.inf:
        raise ConfigError(f"an optimizer's eps is above 0, not {options['eps']!r}")
