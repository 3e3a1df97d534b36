"""Groups of parameters that are updated with options of their own, in PyTorch's form."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, overload

from parlinalg.autograd import Parameter
from parlinalg.errors import ConfigError

Value = TypeVar("Value")
Group = dict[str, Any]
SHOWN = 6
"""Names of parameters that an error lists."""


class Option(Generic[Value]):
    """An option of an optimizer that each of its parameter groups has.

    While a group is updated, reading it gives that group's value, otherwise the first group's.  Setting it sets it for
    all groups.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, optimizer: None, kind: type) -> Option[Value]: ...
    @overload
    def __get__(self, optimizer: Any, kind: type) -> Value: ...
    def __get__(self, optimizer: Any, kind: type) -> Any:
        if optimizer is None:
            return self
        return optimizer.param_groups[optimizer._group][self.name]

    def __set__(self, optimizer: Any, value: Value) -> None:
        for group in optimizer.param_groups:
            group[self.name] = value


def groups_of(given: Any, defaults: Mapping[str, Any]) -> list[Group]:
    """Return the parameter groups of what an optimizer is given, each with all options.

    Parameters
    ----------
    given : iterable
        Of Parameters, of (name, Parameter) pairs, or of dicts: "params", an iterable of either, and options.
    defaults : mapping
        All options, for groups that do not name them.

    Raises
    ------
    ConfigError
        If there is no parameter, something is none, a parameter is in two groups, or a group has an unknown option.
    """
    if isinstance(given, Mapping | Parameter) or hasattr(given, "named_parameters"):
        raise ConfigError(
            f"an optimizer takes a list of parameters, such as model.parameters(), or of dicts with 'params', not one "
            f"{type(given).__name__}"
        )
    each = ordered(given)
    if not any(isinstance(item, Mapping) for item in each):
        each = [{"params": each}]
    groups = [group_of(item, i, defaults) for i, item in enumerate(each)]
    check_apart(groups)
    if not any(group["params"] for group in groups):
        raise ConfigError("an optimizer needs at least one parameter; a model's are model.parameters()")
    return groups


def group_of(given: Any, number: int, defaults: Mapping[str, Any]) -> Group:
    """Return a parameter group with all options, from a dict."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"parameter group {number} is a {type(given).__name__} among dicts: give a list of dicts, or of parameters"
        )
    if "params" not in given:
        raise ConfigError(f"parameter group {number} has no 'params': {', '.join(map(repr, given)) or 'it is empty'}")
    for key in given:
        if key not in ("params", "param_names", *defaults):
            near = difflib.get_close_matches(str(key), list(defaults), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"parameter group {number} has an unknown option {key!r}{hint}: beside 'params' a group of this "
                f"optimizer may have {', '.join(defaults)}"
            )
    held = given["params"]
    pairs = [_parameter(item) for item in ([held] if isinstance(held, Parameter) else ordered(held))]
    params = list({id(p): p for p in pairs}.values())
    return {"params": params, **{name: given.get(name, value) for name, value in defaults.items()}}


def check_apart(groups: Sequence[Group]) -> None:
    """Raise a ConfigError if a parameter is in two groups."""
    seen: dict[int, int] = {}
    for i, group in enumerate(groups):
        for p in group["params"]:
            if seen.setdefault(id(p), i) != i:
                raise ConfigError(
                    f"the parameter {p.name!r} is in the parameter groups {seen[id(p)]} and {i}: list it in one"
                )


def ordered(given: Any) -> list[Any]:
    if isinstance(given, set | frozenset | str) or not isinstance(given, Iterable):
        raise ConfigError(
            f"an optimizer's parameters are listed in the same order on all ranks, such as model.parameters(), not by "
            f"a {type(given).__name__}"
        )
    return list(given)


def _parameter(item: Any) -> Parameter:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        item = item[1]
    if not isinstance(item, Parameter):
        raise ConfigError(f"an optimizer takes Parameters, such as model.parameters(), not {type(item).__name__}")
    return item


def decay_groups(
    parameters: Any, weight_decay: float, *, no_decay: Sequence[str] | None = None, **options: Any
) -> list[Group]:  # fmt: skip
    """Return two parameter groups: weights, which decay, and norms and biases, which do not.

    Parameters
    ----------
    parameters : Module, or iterable of Parameter or of (name, Parameter)
    weight_decay : float
        The weight decay of the first group; that of the second is 0.
    no_decay : sequence of str, optional
        What does not decay: parameters with one of these in their qualified names, such as ["bias", "norm"]; patterns
        with `*`, `?` or `[` match the whole name.  By default all biases (names that end with "bias") and all
        parameters of less than two dims, such as those of norms.
    **options
        Further options of both groups.

    Returns
    -------
    list of dict
        Always two, in this order; one may be empty, as on a stage of a pipeline.

    Raises
    ------
    ConfigError
        If `no_decay` is no list of strings, or one of them is in no parameter's name, on any stage of a pipeline.

    Examples
    --------
    >>> import parlinalg as pla
    >>> from parlinalg import nn, optim, schemes
    >>> grid, scheme = pla.Grid({"axis": 1}), schemes.discover()["serial"].SCHEME
    >>> model = nn.Sequential(nn.Linear(4, 3, scheme, grid), nn.LayerNorm(3, scheme, grid)).initialize(seed=1)
    >>> optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=1e-3)
    >>> [([p.name for p in g["params"]], g["weight_decay"]) for g in optimizer.param_groups]
    [(['0.weight'], 0.1), (['0.bias', '1.weight', '1.bias'], 0.0)]
    """
    if no_decay is not None:
        check_names("no_decay", no_decay, "bias")
    decayed: list[Parameter] = []
    others: list[Parameter] = []
    named = with_names(parameters)
    check_patterns("no_decay", no_decay or (), named)
    for name, p in named:
        if no_decay is None:
            out = name.endswith("bias") or p.ndim < 2
        else:
            out = _matches(name, no_decay)
        (others if out else decayed).append(p)
    return [
        {"params": decayed, "weight_decay": weight_decay, **options},
        {"params": others, "weight_decay": 0.0, **options},
    ]


def matrix_groups(
    parameters: Any, *, adamw: Sequence[str] = (), adamw_lr: float | None = None, **options: Any
) -> list[Group]:  # fmt: skip
    """Return two parameter groups: the matrices of hidden layers, and what AdamW updates beside them.

    The matrices are the weights of linear layers, convolutions and experts.  Embeddings, positions, norms, biases,
    routers and the last layer of a model are AdamW's (Jordan, "Muon", 2024).

    Parameters
    ----------
    parameters : Module, or iterable of Parameter or of (name, Parameter)
    adamw : sequence of str
        Further parameters for AdamW: those with one of these in their qualified names; patterns with `*`, `?` or `[`
        match the whole name.
    adamw_lr : float, optional
        The learning rate of the second group; by default that of the optimizer.
    **options
        Further options of both groups.

    Returns
    -------
    list of dict
        Always two, in this order; one may be empty, as on a stage of a pipeline.

    Raises
    ------
    ConfigError
        If `adamw` is no list of strings, or one of them is in no parameter's name, on any stage of a pipeline.

    Examples
    --------
    >>> import parlinalg as pla
    >>> from parlinalg import nn, optim, schemes
    >>> grid, scheme = pla.Grid({"axis": 1}), schemes.discover()["serial"].SCHEME
    >>> model = nn.MLP([4, 6, 3], scheme, grid, seed=1)
    >>> optimizer = optim.Muon(optim.matrix_groups(model, adamw_lr=1e-3), lr=0.02)
    >>> [([p.name for p in g["params"]], g["matrices"], g["lr"]) for g in optimizer.param_groups]
    [(['0.weight'], True, 0.02), (['0.bias', '2.weight', '2.bias'], False, 0.001)]
    """
    check_names("adamw", adamw, "embedding")
    named = with_names(parameters)
    groups = split_matrices(named, adamw=adamw, adamw_lr=adamw_lr, **options)
    check_patterns("adamw", adamw, named)
    return groups


def split_matrices(
    named: Sequence[tuple[str, Parameter]], *, adamw: Sequence[str], adamw_lr: float | None, **options: Any
) -> list[Group]:  # fmt: skip
    """Return the two groups of `matrix_groups`, of parameters with their names."""
    matrices: list[Parameter] = []
    others: list[Parameter] = []
    for name, p in named:
        (matrices if p.matrix is not None and not _matches(name, adamw) else others).append(p)
    second = dict(options) if adamw_lr is None or "lr" in options else {**options, "lr": adamw_lr}
    return [{"params": matrices, "matrices": True, **options}, {"params": others, "matrices": False, **second}]


def check_names(option: str, parts: Any, example: str) -> None:
    """Raise a ConfigError if an option is no list of parts of names and patterns; an empty one is in all names."""
    listed = isinstance(parts, Collection) and not isinstance(parts, str)
    if not listed or not all(isinstance(each, str) and each for each in parts):
        right = parts if isinstance(parts, str) and parts else example
        raise ConfigError(f"{option} is a list of parts of names, such as {[right]}, not {parts!r}")


def check_patterns(option: str, patterns: Sequence[str], named: Sequence[tuple[str, Parameter]]) -> None:
    """Raise a ConfigError if one of these parts of names and patterns matches no parameter.

    The parameters are those given and, in a pipeline, those of the other stages too.
    """
    relatives = {id(p.relatives): p.relatives for _, p in named}
    names = dict.fromkeys(chain(*relatives.values(), (name for name, _ in named)))
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            shown, more = ", ".join(map(repr, [*names][:SHOWN])), len(names) - SHOWN
            raise ConfigError(
                f"{option} has {pattern!r}, which is in no parameter's name; the names are {shown or 'none'}"
                f"{f' and {more} more' if more > 0 else ''}"
            )


def with_names(parameters: Any) -> list[tuple[str, Parameter]]:
    """Return parameters with their qualified names, from a module, or from parameters or pairs."""
    given = parameters.named_parameters() if hasattr(parameters, "named_parameters") else ordered(parameters)
    pairs = [(_parameter(item), item) for item in given]
    return [(p.name or (item[0] if isinstance(item, tuple) else ""), p) for p, item in pairs]


def _matches(name: str, parts: Sequence[str]) -> bool:
    """Return True if a name has one of these parts, or matches one that is a pattern."""
    return any(fnmatch.fnmatchcase(name, n) if set(n) & set("*?[") else n in name for n in parts)
