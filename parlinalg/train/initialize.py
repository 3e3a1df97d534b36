"""From a model, an optimizer and a criterion to an engine."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.array import zeros
from parlinalg.autograd import Parameter
from parlinalg.comm import Comm
from parlinalg.comm.together import odd_one_out
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, as_cut, span_of
from parlinalg.nn import Module
from parlinalg.optim import Optimizer
from parlinalg.optim.schedules import Scheduler
from parlinalg.parallel.gatherer import WeightGatherer, check_cut, rest_cut
from parlinalg.parallel.handlers import DataParallel, Handler, SequenceParallel, ZeRO
from parlinalg.parallel.precision import LossScaler, Unscaled
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline.model import PipelineModel
from parlinalg.train.choices import make_criterion, make_optimizer, make_scheduler
from parlinalg.train.config import LossScaleConfig, ParallelConfig, TrainingConfig, load
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed, grid_of, length_of
from parlinalg.train.losses import Criterion, Metric
from parlinalg.train.mesh import DATA, OUTER_AXES, Mesh, resolve, zero_axes
from parlinalg.train.offload import check_offload, offload
from parlinalg.train.schedules import BaseSchedule, check_schedule, cut, order_of, schedule_of, worker_of
from parlinalg.train.schema import named
from parlinalg.train.trainer import check_rate
from parlinalg.train.update import Update

Optimize = Optimizer | Callable[[Iterable[Parameter]], Optimizer] | None
Rate = Scheduler | Callable[[Optimizer], Scheduler] | None


def initialize(
    model: Module, optimizer: Optimize = None, criterion: Criterion | None = None, train_dataloader: Any = None,
    test_dataloader: Any = None, lr_scheduler: Rate = None, *, mesh: Mesh | None = None,
    config: TrainingConfig | Mapping[str, Any] | str | Path | None = None, schedule: BaseSchedule | None = None,
    sample: Any = None, metrics: Mapping[str, Metric] | None = None, test_criterion: Criterion | None = None,
) -> tuple[Engine, Feed | None, Feed | None, Any]:  # fmt: skip
    """Return an engine that trains a model with the settings of a configuration.  Collective.

    It reads `gradient_accumulation`, `clip_grad_norm`, `clip_grad_value`, `skip_nonfinite`,
    `precision`, `zero`, `gradient_handler`, `schedule` and `offload` of the configuration; and `seed`, `optimizer`,
    `criterion` and `lr_schedule` for what is not given here.  What is offloaded is restored, or dropped, when the mesh
    is closed, or by `engine.restore()`.

    Parameters
    ----------
    model : Module
        On the mesh's grid, with its scheme.  Where the mesh has a pipeline: a declared model, which is cut into stages
        here by `parlinalg.pipeline.split`, or one that is cut already.  Parameters without values are initialized by
        the configuration's seed.
    optimizer : Optimizer, or callable
        Of the model's parameters; a callable, such as `lambda p: AdamW(p, lr=1e-3)` or a class, is given them: for
        models that are cut, or have no values, before.  By default the configuration's optimizer.
    criterion : callable, optional
        From outputs and labels to (the sum of the losses, their number), such as `autograd.ops.cross_entropy_sum`, or
        to their mean; the former is right also where targets are ignored.  One of your own that ignores targets reports
        how many count by an attribute `count`, a function of the labels, for models with experts.
    train_dataloader, test_dataloader : iterable, optional
        See `parlinalg.train.Feed`.
    lr_scheduler : Scheduler, or callable
        A callable is given the optimizer.  By default that of the configuration's `lr_schedule`, where one is named and
        the number of steps is known.
    mesh : Mesh, optional
        By default that of the model's grid, if `launch` made it.
    config : dict, str, Path or TrainingConfig, optional
        By default the mesh's.
    schedule : schedule, optional
        By default the configuration's.
    sample : array, Tensor, DistArray or tree of them; or callable that makes Tensors or DistArrays
        The model's inputs of a microbatch, by which the partitions "time" and "flops" of a pipeline cut it.  By
        default those of the first batch of `train_dataloader`, on which the model is still trained.
    metrics : dict of str to callable, optional
        Measured beside the loss, by name: functions of output and label, both `DistArray`s or trees of
        them, that return a sum over the targets, the same on every rank, such as `parlinalg.train.accuracy`.  They are
        called where the output is, once for each microbatch; a `Trainer` divides by the targets.
    test_criterion : callable, optional
        The criterion of evaluations, where it is not that of the training, as with label smoothing.

    Returns
    -------
    engine : Engine
    train_dataloader, test_dataloader : Feed or None
        Each iteration of one is another epoch.
    lr_scheduler : Scheduler or None
        To be stepped where `engine.step()` has changed parameters.

    Raises
    ------
    ConfigError
        On all ranks, if arguments contradict each other.
    """
    _check_calls(optimizer, criterion, schedule, lr_scheduler)
    _check_metrics(metrics)
    grid, mesh = _placed_on(model, mesh)
    config = _config_of(config, mesh)
    check_offload(config, mesh, train_dataloader)
    schedule = schedule_of(config, mesh, model) if schedule is None else schedule
    world = grid.world if mesh is None else mesh.world
    train = None if train_dataloader is None else Feed(train_dataloader, world)
    test = None if test_dataloader is None else Feed(test_dataloader, world)
    made = _has_values(model)
    if mesh is not None and mesh.topology.size > 1 and not model.in_stages:
        _not_yet(optimizer, "is cut into stages here")
        model = cut(model, mesh, schedule, config.seed, train, sample)
    elif not made:
        _not_yet(optimizer, "has no values yet")
        model.initialize(config.seed)
    parameters = list(model.parameters())
    if config.zero.stage == 3:
        _check_cut(config, world, grid, model)
    if all(p.reducer is None for p in parameters):
        reducer_for(config, grid, model)
    made_optimizer = optimizer_for(config, optimizer, parameters, model, grid)
    _check_alike(world, grid, model, made_optimizer)
    _check_precision(config, model)
    accumulate = 1 if model.in_stages else config.gradient_accumulation
    engine = Engine(
        model, update_for(config, made_optimizer), criterion or make_criterion(config.criterion), grid, world,
        accumulate=accumulate, schedule=schedule, metrics=metrics, test_criterion=test_criterion,
    )  # fmt: skip
    order = order_of(engine)
    if order is not None and order.asynchronous:
        worker_of(engine, order)  # refuses what it cannot train now, not in the first step
    for feed in (train, test):
        if feed is not None:
            engine.feed(feed)
    if mesh is not None and config.offload:
        offload(config, mesh, engine, train)
    return engine, train, test, _scheduler(config, lr_scheduler, made_optimizer, train, accumulate)


# ---------------------------------------------------------------------------------------------- arguments
def _placed_on(model: Any, mesh: Any) -> tuple[Grid, Mesh | None]:
    """Return the grid of a model and its mesh, if there is one.

    Raises
    ------
    ConfigError
        If this is no model, or it is on another grid than the mesh that is given.
    """
    if not isinstance(model, Module):
        raise ConfigError(
            f"initialize takes a model, an nn.Module such as nn.Sequential(…) or a subclass of it, not {named(model)}"
        )
    if mesh is None:
        grid = grid_of(model)
        return grid, grid.mesh
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"initialize: mesh is what parlinalg.launch(config) gives, not {named(mesh)}")
    if any(True for m in model.modules() for _ in m._parameters) and (own := grid_of(model)) is not mesh.grid:
        raise ConfigError(
            f"initialize: the model is on {own!r}, and the mesh given has another grid, {mesh.grid!r}: declare the "
            "model with mesh.grid and mesh.scheme"
        )
    return mesh.grid, mesh


def _config_of(given: Any, mesh: Mesh | None) -> TrainingConfig:
    """Return the configuration that is given, or the mesh's.

    Raises
    ------
    ConfigError
        If the one that is given asks for another mesh.
    """
    if given is None:
        return load({}) if mesh is None else mesh.config
    config = load(given)
    if mesh is not None and config.parallel != ParallelConfig() and resolve(config, mesh.world.size) != mesh.spec:
        raise ConfigError(
            f"initialize: config asks for parallel={config.parallel.given()}, but the mesh was launched with "
            f"parallel={mesh.config.parallel.given()}, zero stage {mesh.config.zero.stage}: give all to launch, or "
            "leave parallel out here"
        )
    return config


def _check_calls(optimizer: Any, criterion: Any, schedule: Any, rate: Any) -> None:
    """Raise a ConfigError if what is given cannot be called as it will be."""
    if not isinstance(optimizer, Optimizer) and optimizer is not None and not callable(optimizer):
        raise ConfigError(
            f"initialize takes an Optimizer or a callable that makes one from parameters, not {named(optimizer)}"
        )
    if criterion is not None and not callable(criterion):
        raise ConfigError(
            f"initialize: criterion is a function of outputs and labels, such as autograd.ops.cross_entropy_sum, not "
            f"{named(criterion)}"
        )
    check_schedule("initialize", schedule)
    check_rate("initialize", rate)


def _check_metrics(metrics: Any) -> None:
    """Raise a ConfigError unless these are functions by names that the trainer does not use itself."""
    own = ("loss", "count", "lr", "grad_norm", "loss_scale", "skipped_steps", "samples_per_s", "step", "epoch")
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metrics[name]) for name in metrics
    ):
        raise ConfigError(
            "initialize: metrics is a dict of functions of output and label, such as {'accuracy': "
            f"parlinalg.train.accuracy}}, not {named(metrics)}"
        )
    if taken := [name for name in metrics if name in own]:
        raise ConfigError(f"initialize: a metric is not named {taken[0]!r}, which the trainer gives itself")


def _check_alike(world: Comm, grid: Grid, model: Module, optimizer: Optimizer) -> None:
    """Raise a ConfigError on all ranks if they train unlike models, or those of a grid by unlike optimizers.
    Collective."""
    parameters = [[name, *p.shape, p.dtype.name] for name, p in _inventory(model).items()]
    if (odd := odd_one_out(world, json.dumps(parameters).encode())) is not None:
        raise ConfigError(
            f"initialize: the model of rank {odd} has other parameters than that of rank 0, by their names, shapes or "
            "dtypes: declare the same model on all ranks (build_by_hand takes stages that each rank makes itself)"
        )
    groups = optimizer.param_groups

    def place(rank: int) -> int:
        return world.world_ranks.index(grid.world.world_ranks[rank])

    made = [type(optimizer).__name__, repr(float(optimizer.lr)), repr((optimizer.options(), optimizer._names()))]
    others = "alike" if grid.world.size == world.size else "by rank"  # the ranks of other stages make other groups
    everyone = world.share([made, list(grid.world.share(world.rank, others=place)), len(groups)], others=others)
    for i, theirs in enumerate(everyone):
        first = theirs[1][0]
        if theirs[2] != everyone[0][2]:
            raise ConfigError(
                f"initialize: the optimizer of rank {i} has {theirs[2]} parameter groups, that of rank 0 "
                f"{everyone[0][2]}: make the same groups on all ranks; one may have no parameters of a stage, as "
                "decay_groups gives them"
            )
        if theirs[0][:2] != everyone[first][0][:2]:
            raise ConfigError(
                f"initialize: rank {i} has the optimizer {theirs[0][0]} with lr={theirs[0][1]}, rank {first} "
                f"{everyone[first][0][0]} with lr={everyone[first][0][1]}: ranks that shard, or copy, the same "
                "parameters need the same optimizer"
            )
        if theirs[0] != everyone[first][0]:
            raise ConfigError(
                f"initialize: the parameter groups of rank {i} have other options or parameters than those of rank "
                f"{first}: ranks that shard, or copy, the same parameters need the same groups"
            )


def _check_precision(config: TrainingConfig, model: Module) -> None:
    """Raise a ConfigError if mixed precision is asked for, and the model has none of it."""
    wanted, dtypes = config.precision.dtype, sorted({p.dtype.name for p in _inventory(model).values()})
    if wanted is not None and dtypes and wanted not in dtypes:
        raise ConfigError(
            f"initialize: the configuration's precision is {wanted}, but the model's parameters are "
            f"{', '.join(dtypes)}: declare it with dtype=mesh.config.model_dtype"
        )


def _check_handlers(config: TrainingConfig, model: Module) -> None:
    """Raise a ConfigError if a gradient handler names parameters that the model does not have."""
    for handler in config.gradient_handler:
        for name in getattr(handler, "names", ()):
            known = list(_inventory(model))
            if not fnmatch.filter(known, name):
                near = difflib.get_close_matches(name, known, n=1, cutoff=0)
                raise ConfigError(
                    f"gradient_handler ({type(handler).__name__}) names {name!r}, and the model has no such parameter"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )


def _check_cut(config: TrainingConfig, world: Comm, grid: Grid, model: Module) -> None:
    """Raise a ConfigError on all ranks if no weight of the model rests cut, as ZeRO's stage 3 needs it.

    A stage of a pipeline may have none, such as one of an activation or of a norm.  Collective where there are stages.
    """
    own, problem = list(model.parameters()), None
    axes = _sharded(config, grid.sizes)
    if axes and all(p.reducer is None for p in own) and not any(rest_cut(own, axis) for axis in axes):
        try:
            check_cut(own, (DATA,) if DATA in axes else axes[-1:])
        except ConfigError as error:
            problem = str(error)
    everyone = world.share(problem, others="by rank") if model.in_stages else [problem]
    if all(everyone):
        raise ConfigError(everyone[0])


def _sharded(config: TrainingConfig, sizes: Mapping[str, int]) -> Cut:
    """Return the axes of several ranks over which ZeRO shards."""
    return tuple(axis for axis in zero_axes(config.zero, sizes) if sizes[axis] > 1)


def _inventory(model: Any) -> dict[str, Any]:
    """Return the shapes and dtypes of all parameters of a model, those of other ranks' stages included."""
    if model.in_stages:
        return {name: held for name, held in model.inventory.items() if not held.buffer}
    return dict(model.named_parameters())


# ---------------------------------------------------------------------------------------------- gradients and steps
def _optimizer_of(
    make: Callable[[Sequence[Parameter]], Optimizer], parameters: Sequence[Parameter], model: Module, grid: Grid
) -> Optimizer:  # fmt: skip
    """Return the optimizer of these parameters; of a stage without any, such as one of an activation, one of none."""
    own = parameters
    if not own:
        names = model.parameter_names()  # one of them: patterns match what they match on other stages
        own = [Parameter(zeros((0,), grid, Layout(None), np.float32), names[0] if names else "none")]
        own[0].relatives = names
    optimizer = make(own)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the function that is to make an optimizer gives {optimizer!r}: it takes the parameters and returns an "
            "Optimizer, such as lambda parameters: AdamW(parameters, lr=1e-3)"
        )
    if not parameters:
        for group in optimizer.param_groups:
            group["params"] = []
    return optimizer


def _gradient_handlers(config: TrainingConfig, sizes: Mapping[str, int]) -> list[Handler]:
    """Return the handlers of gradients that a configuration asks for, on a grid with axes of these sizes."""
    given = [h for h in config.gradient_handler if not _idle(h, sizes)]
    zero = config.zero
    if zero.stage and (axes := zero_axes(zero, sizes)):
        given = [h for h in given if not isinstance(h, DataParallel | SequenceParallel)]  # all others are all-reduced
        given.append(ZeRO(zero.stage, axes, zero.accumulate, zero.overlap_gather))
    return given


def _idle(handler: Handler, sizes: Mapping[str, int]) -> bool:
    """Return True if a handler is over dimensions of a configuration that have one rank here."""
    axes = as_cut(handler.axes)
    return set(axes) <= set(OUTER_AXES) and not set(axes) & set(sizes)


def reducer_for(
    config: TrainingConfig, grid: Grid, model: Module, chunks: Sequence[Sequence[Parameter]] = (),
    gatherer: Callable[..., WeightGatherer] = WeightGatherer,
) -> GradientReducer:  # fmt: skip
    """Return the reducer of the gradients, which with ZeRO shards the parameters.

    `chunks` has the parameters that it takes, as of `GradientReducer`; by default all, by a pipeline's chunks.
    `gatherer` makes the weight gatherer of ZeRO's stage 3.
    """
    _check_handlers(config, model)
    handlers = _gradient_handlers(config, grid.sizes)
    axes = tuple(a for a in _sharded(config, grid.sizes) if rest_cut(model.parameters(), a))
    if config.zero.stage == 3 and axes:
        gatherer(model, axes=axes, accumulate=config.zero.accumulate)
    parameters = [p for own in chunks for p in own] or list(model.parameters())
    if not chunks and isinstance(model, PipelineModel):
        chunks = [list(own.parameters()) for own in model.chunks]
    return GradientReducer(parameters, handlers, dtype=config.precision.communicate, chunks=chunks)


def _scaler(config: TrainingConfig) -> Unscaled:
    """Return the scaler of the loss."""
    scale = config.precision.loss_scale
    if isinstance(scale, LossScaleConfig):
        return LossScaler(scale.start, growth_every=scale.growth_every, least=scale.least, most=scale.most)
    return Unscaled() if scale is None else LossScaler(scale, dynamic=False)


def update_for(config: TrainingConfig, optimizer: Optimizer) -> Update:
    return Update(optimizer, config.clip_grad_norm, config.clip_grad_value, _scaler(config), config.skip_nonfinite)


def _has_values(model: Module) -> bool:
    return all(isinstance(held, Parameter) for m in model.modules() for held in m._parameters.values())


def _not_yet(optimizer: Optimize, why: str) -> None:
    """Raise a ConfigError if this is an optimizer of parameters that are not made yet."""
    if isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"initialize: the model {why}, so that {type(optimizer).__name__} cannot be that of its parameters: give a "
            f"callable, such as optimizer=lambda parameters: {type(optimizer).__name__}(parameters, lr={optimizer.lr})"
        )


def optimizer_for(
    config: TrainingConfig, optimizer: Optimize, parameters: list[Parameter], model: Module, grid: Grid
) -> Optimizer:  # fmt: skip
    """Return the optimizer of these parameters of a model: one given, made by a callable, or the configuration's."""
    if optimizer is None:
        more = {} if config.precision.dtype is None else {"master": config.dtype}
        return _optimizer_of(lambda own: make_optimizer(config.optimizer, own, **more), parameters, model, grid)
    if not isinstance(optimizer, Optimizer):
        optimizer = _optimizer_of(optimizer, parameters, model, grid)
    known = {id(p) for p in parameters}
    strange = next((p for p in optimizer.parameters if id(p) not in known), None)
    if strange is not None:
        raise ConfigError(
            f"initialize: the optimizer has the parameter {strange.name!r}, which is not the model's; make it of "
            "model.parameters()"
        )
    return optimizer


def _scheduler(config: TrainingConfig, given: Rate, optimizer: Optimizer, train: Feed | None, accumulate: int) -> Any:
    """Return the scheduler of the learning rate, over the steps of a `Trainer` in the configuration's epochs."""
    if given is not None:
        made = given(optimizer) if callable(given) and not hasattr(given, "step") else given
        if not callable(getattr(made, "step", None)):
            raise ConfigError(
                f"initialize: lr_scheduler makes a {type(made).__name__}, without step(); make a Scheduler"
            )
        return made
    if config.lr_schedule.name == "constant" and not config.lr_schedule.options:
        return None
    steps = config.steps
    if steps is None:
        if train is None:
            raise ConfigError(
                f"initialize: the configuration's lr_schedule ({config.lr_schedule}) needs the number of steps: give "
                "the configuration steps=…, or initialize a train_dataloader, or an lr_scheduler"
            )
        every = length_of(train.source, f"initialize: the configuration's lr_schedule ({config.lr_schedule}) needs the "
                          "number of steps, so steps=… in it, or the length of train_dataloader")  # fmt: skip
        steps = max(1, config.epochs * (every // accumulate))
    return make_scheduler(config.lr_schedule, optimizer, steps)


# ---------------------------------------------------------------------------------------------- reports
def memory_lines(mesh: Mesh, engine: Engine) -> dict[str, str]:
    """Return lines that report what is sharded and offloaded: a head and a text each.  Collective."""
    zero, sizes, experts = mesh.config.zero, mesh.grid.sizes, mesh.config.parallel.experts
    lines = {} if engine.memory_plan is None else {"offload": mesh.by_stage(str(engine.memory_plan))}
    data = span_of(mesh.axes("data"), sizes)

    def groups(ranks: int, every: int) -> str:
        return f", in {every // ranks} groups that hold copies" if every > ranks else ""

    if experts is not None:
        lines = {"experts": f"cut over {experts} data parallel ranks{groups(experts, data)}", **lines}
    if not zero.stage:
        return lines
    ranks = span_of(zero_axes(zero, sizes), sizes)
    shared = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
    text = f"stage {zero.stage}: {shared[zero.stage - 1]} shared by {ranks} ranks"
    text += groups(ranks, data * span_of(mesh.axes("sequence"), sizes))
    if ranks == 1:
        text = f"stage {zero.stage}: nothing to share, there is one rank in a group"
    return {"zero": text, **lines}
