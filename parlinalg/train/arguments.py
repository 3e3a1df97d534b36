"""Checks of what `initialize` and `Trainer` are given, with messages that say what would be right."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlinalg.comm import Comm
from parlinalg.comm.together import odd_one_out
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn import Module
from parlinalg.optim import Optimizer
from parlinalg.pipeline import PipelineModel
from parlinalg.train.config import Config, load
from parlinalg.train.keys import whole
from parlinalg.train.launch import Mesh
from parlinalg.train.layouts import grid_of
from parlinalg.train.parallel import share_out, with_zero


def whole_number(where: str, value: Any, least: int = 1) -> int:
    """A whole number of at least so much.

    >>> whole_number("Trainer.fit: epochs", 3)
    3
    """
    found: int = whole(least)(where, value)
    return found


def placed_on(model: Any, mesh: Any) -> tuple[Grid, Mesh | None]:
    """The grid of a model and its mesh, if there is one.

    Raises
    ------
    ConfigError
        If the model is none, or is on another grid than the mesh that is given.
    """
    if not isinstance(model, Module):
        raise ConfigError(
            f"initialize takes a model, an nn.Module such as nn.Sequential(…) or a subclass of it, not {_told(model)}"
        )
    if mesh is None:
        grid = grid_of(model)
        return grid, grid.mesh
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"initialize: mesh is what parlinalg.launch(config) gives, not {_told(mesh)}")
    if any(True for m in model.modules() for _ in m._parameters) and (own := grid_of(model)) is not mesh.grid:
        raise ConfigError(
            f"initialize: the model is on {own!r}, and the mesh given has another grid, {mesh.grid!r}: declare the "
            "model with mesh.grid and mesh.scheme"
        )
    return mesh.grid, mesh


def config_of(given: Any, mesh: Mesh | None) -> Config:
    """The configuration that is given, or the mesh's.

    Raises
    ------
    ConfigError
        If the one that is given shares out the ranks in another way than the mesh does.
    """
    if given is None:
        return load({}) if mesh is None else mesh.config
    config = load(given)
    if mesh is not None and config.parallel:
        asked = with_zero(share_out(config.parallel, mesh.world.size), config.zero)
        if asked != mesh.parallel:
            raise ConfigError(
                f"initialize: config asks for parallel={dict(config.parallel)}, but the mesh was launched with "
                f"parallel={dict(mesh.config.parallel)}, zero stage {mesh.config.zero.stage}: give all to launch, or "
                "leave parallel out here"
            )
    return config


def check_calls(optimizer: Any, criterion: Any, schedule: Any, rate: Any) -> None:
    """Raise a ConfigError if what is given cannot be called as it will be."""
    if not isinstance(optimizer, Optimizer) and optimizer is not None and not callable(optimizer):
        raise ConfigError(
            f"initialize takes an Optimizer or a callable that makes one from parameters, not {_told(optimizer)}"
        )
    if criterion is not None and not callable(criterion):
        raise ConfigError(
            f"initialize: criterion is a function of outputs and labels, such as autograd.ops.cross_entropy_sum, not "
            f"{_told(criterion)}"
        )
    check_schedule("initialize", schedule)
    check_rate("initialize", rate)


def check_metrics(metrics: Any) -> None:
    """Raise a ConfigError unless these are functions by names that the trainer does not use itself."""
    own = ("loss", "count", "lr", "grad_norm", "loss_scale", "skipped_steps", "samples_per_s", "step", "epoch")
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metrics[name]) for name in metrics
    ):
        raise ConfigError(
            "initialize: metrics is a dict of functions of output and label, such as {'accuracy': "
            f"parlinalg.train.accuracy}}, not {_told(metrics)}"
        )
    if taken := [name for name in metrics if name in own]:
        raise ConfigError(f"initialize: a metric is not named {taken[0]!r}, which the trainer gives itself")


def check_schedule(where: str, schedule: Any) -> None:
    """Raise a ConfigError unless this is a schedule, or None."""
    if schedule is not None and (isinstance(schedule, type) or not hasattr(schedule, "forward_backward_step")):
        raise ConfigError(
            f"{where}: schedule is such as PipelineSchedule(4), or PipelineSchedule(4, 'gpipe'), not {_told(schedule)}"
        )


def check_rate(where: str, rate: Any, made: bool = False) -> None:
    """Raise a ConfigError unless this steps a learning rate, or is None; or, unless it is to be `made`, makes one."""
    steps = callable(getattr(rate, "step", None)) and not isinstance(rate, type)
    if rate is not None and not steps and (made or not callable(rate)):
        maker = ", or a function that makes one of the optimizer, such as lambda o: Scheduler(o, Cosine(1000))"
        raise ConfigError(f"{where}: lr_scheduler is an object with step(){'' if made else maker}, not {_told(rate)}")


def check_state(where: str, state: Any, keys: Sequence[str]) -> None:
    """Raise a ConfigError unless this has the keys of a state."""
    lacking = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if lacking:
        raise ConfigError(f"{where} takes what state_dict() gave; this lacks {', '.join(lacking)}")


def check_alike(world: Comm, grid: Grid, model: Module, optimizer: Optimizer) -> None:
    """Raise a ConfigError on all ranks if they train unlike models, or those of a grid by unlike optimizers.
    Collective."""
    parameters = [[name, *p.shape, p.dtype.name] for name, p in _parameters(model).items()]
    if (odd := odd_one_out(world, json.dumps(parameters).encode())) is not None:
        raise ConfigError(
            f"initialize: the model of rank {odd} has other parameters than that of rank 0, by their names, shapes or "
            "dtypes: declare the same model on all ranks (build_by_hand takes stages that each rank makes itself)"
        )
    groups = optimizer.param_groups
    made = [type(optimizer).__name__, repr(float(optimizer.lr)), repr((optimizer.options(), optimizer._names()))]
    for i, told in enumerate(everyone := world.share([made, list(grid.world.share(world.rank)), len(groups)])):
        first = told[1][0]
        if told[2] != everyone[0][2]:
            raise ConfigError(
                f"initialize: the optimizer of rank {i} has {told[2]} parameter groups, that of rank 0 {everyone[0][2]}"
                ": make the same groups on all ranks; one may have no parameters of a stage, as decay_groups gives them"
            )
        if told[0][:2] != everyone[first][0][:2]:
            raise ConfigError(
                f"initialize: rank {i} has the optimizer {told[0][0]} with lr={told[0][1]}, rank {first} "
                f"{everyone[first][0][0]} with lr={everyone[first][0][1]}: ranks that share out, or copy, the same "
                "parameters need the same optimizer"
            )
        if told[0] != everyone[first][0]:
            raise ConfigError(
                f"initialize: the parameter groups of rank {i} have other options or parameters than those of rank "
                f"{first}: ranks that share out, or copy, the same parameters need the same groups"
            )


def check_precision(config: Config, model: Module) -> None:
    """Raise a ConfigError if mixed precision is asked for, and the model has none of it."""
    wanted, dtypes = config.precision.dtype, sorted({p.dtype.name for p in _parameters(model).values()})
    if wanted is not None and dtypes and wanted not in dtypes:
        raise ConfigError(
            f"initialize: the configuration's precision is {wanted}, but the model's parameters are "
            f"{', '.join(dtypes)}: declare it with dtype=mesh.config.model_dtype"
        )


def check_handlers(config: Config, model: Module) -> None:
    """Raise a ConfigError if a gradient handler names parameters that the model does not have."""
    for handler in config.gradient_handler:
        for name in getattr(handler, "names", ()):
            known = list(_parameters(model))
            if not fnmatch.filter(known, name):
                near = difflib.get_close_matches(name, known, n=1, cutoff=0)
                raise ConfigError(
                    f"gradient_handler ({type(handler).__name__}) names {name!r}, and the model has no such parameter"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )


def _parameters(model: Module) -> dict[str, Any]:
    """The shapes and dtypes of all parameters of a model, in a pipeline of all stages."""
    if isinstance(model, PipelineModel):
        return {name: held for name, held in model.inventory.items() if not held.buffer}
    return dict(model.named_parameters())


def length_of(loader: Any, what: str) -> int:
    """The batches of an epoch of a loader, which must be known.

    Raises
    ------
    ConfigError
        If it has no length.
    """
    try:
        return len(loader)
    except TypeError:
        raise ConfigError(
            f"{what}, but a {type(loader).__name__} has no len(): give a list of pairs, or a loader with a length"
        ) from None


def _told(value: Any) -> str:
    """A value, shortly."""
    if isinstance(value, str | int | float | Path | Mapping):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
