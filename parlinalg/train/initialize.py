"""From a model, an optimizer and a criterion to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from parlinalg.autograd import Parameter
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn import Module
from parlinalg.offload import Keeps, plan
from parlinalg.optim import Optimizer
from parlinalg.optim.schedules import Scheduler
from parlinalg.pipeline import split
from parlinalg.train import build
from parlinalg.train.arguments import (
    check_alike,
    check_calls,
    check_metrics,
    check_precision,
    config_of,
    length_of,
    placed_on,
)
from parlinalg.train.config import Config
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed, rows_of
from parlinalg.train.launch import Mesh
from parlinalg.train.layouts import dtype_of, place_inputs, placement
from parlinalg.train.losses import Criterion, Metric
from parlinalg.train.pipeline_schedules import BaseSchedule, Sample, Stages, schedule_of

Optimize = Optimizer | Callable[[Iterable[Parameter]], Optimizer] | None
Rate = Scheduler | Callable[[Optimizer], Scheduler] | None


def initialize(
    model: Module, optimizer: Optimize = None, criterion: Criterion | None = None, train_dataloader: Any = None,
    test_dataloader: Any = None, lr_scheduler: Rate = None, *, mesh: Mesh | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None, schedule: BaseSchedule | None = None,
    sample: Any = None, metrics: Mapping[str, Metric] | None = None, test_criterion: Criterion | None = None,
) -> tuple[Engine, Feed | None, Feed | None, Any]:  # fmt: skip
    """An engine that trains a model as a configuration says.  Collective.

    Of the configuration count: `gradient_accumulation`, `clip_grad_norm`, `clip_grad_value`, `skip_nonfinite`,
    `precision`, `zero`, `gradient_handler`, `schedule` and `offload`; and `seed`, `optimizer`, `criterion`,
    `lr_schedule` for what is not given here.  What is offloaded comes back, or is gone, when the mesh is closed, or by
    `engine.restore()`.

    Parameters
    ----------
    model : Module
        On the mesh's grid, with its scheme.  Where the mesh has a pipeline: a whole model, declared only, that is cut
        into stages here (`parlinalg.pipeline.split` says how), or one that is cut already.  What has no values yet gets
        those of the configuration's seed.
    optimizer : Optimizer, or callable
        Of the model's parameters; a callable, such as `lambda p: AdamW(p, lr=1e-3)` or a class, is given them: for
        models that are cut, or have no values, before.  By default as the configuration says.
    criterion : callable, optional
        From outputs and labels to (the sum of the losses, their number), such as `autograd.ops.cross_entropy_sum`, or
        to their mean; the former is right also where targets are ignored.  One of your own that ignores targets says
        how many count before the forward pass, for models with experts, by an attribute `count`: a function of the
        labels.
    train_dataloader, test_dataloader : iterable, optional
        See `parlinalg.train.Feed`.
    lr_scheduler : Scheduler, or callable
        A callable is given the optimizer.  By default that of the configuration's `lr_schedule`, where one is named and
        the number of steps is known.
    mesh : Mesh, optional
        By default that of the model's grid, if `launch` made it.
    config : dict, str, Path or Config, optional
        By default the mesh's.
    schedule : schedule, optional
        By default as the configuration says.
    sample : array, Tensor, DistArray or tree of them; or callable that makes Tensors or DistArrays
        What the model takes of a microbatch, by which the partitions "time" and "flops" of a pipeline cut it.  By
        default from the first batch of `train_dataloader`, which the training gets all the same.
    metrics : dict of str to callable, optional
        What schedules measure beside the loss, by name: functions of output and label, both `DistArray`s or trees of
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
        To be stepped where `engine.step()` says that parameters have changed.

    Raises
    ------
    ConfigError
        On all ranks, if what is given does not fit together.
    """
    check_calls(optimizer, criterion, schedule, lr_scheduler)
    check_metrics(metrics)
    grid, mesh = placed_on(model, mesh)
    config = config_of(config, mesh)
    _check_offload(config, mesh, train_dataloader)
    schedule = schedule_of(config, mesh, model) if schedule is None else schedule
    world = grid.world if mesh is None else mesh.world
    train = None if train_dataloader is None else Feed(train_dataloader, world)
    test = None if test_dataloader is None else Feed(test_dataloader, world)
    made = _has_values(model)
    if mesh is not None and mesh.topology.size > 1 and not hasattr(model, "chunks"):
        _not_yet(optimizer, "is cut into stages here")
        made_schedule = schedule.made(mesh.topology.size)
        if sample is None and train is not None:
            train.place(partial(placement, model, grid, world))
            sample = partial(_first, model, grid, train, made_schedule.microbatches)
        elif sample is not None and not callable(sample):
            sample = partial(_placed, model, grid, sample)
        model = split(model, mesh.topology, made_schedule, mesh.parallel.partition, sample).initialize(config.seed)
    elif not made:
        _not_yet(optimizer, "has no values yet")
        model.initialize(config.seed)
    parameters = list(model.parameters())
    if all(p.reducer is None for p in parameters):
        build.reducer(config, grid, model)
    made_optimizer = _optimizer(config, optimizer, parameters, grid)
    check_alike(world, grid, model, made_optimizer)
    check_precision(config, model)
    accumulate = 1 if hasattr(model, "chunks") else config.gradient_accumulation
    engine = Engine(
        model, build.update(config, made_optimizer), criterion or build.criterion(config), grid, world,
        accumulate=accumulate, schedule=schedule, metrics=metrics, test_criterion=test_criterion,
    )  # fmt: skip
    for feed in (train, test):
        if feed is not None:
            engine.feed(feed)
    if mesh is not None and config.offload:
        _offload(config, mesh, engine, train)
    return engine, train, test, _scheduler(config, lr_scheduler, made_optimizer, train, accumulate)


def _check_offload(config: Config, mesh: Mesh | None, train: Any) -> None:
    """Refuse what has no end, or a limit of memory without a batch to measure."""
    by_hand = "`with parlinalg.offload.plan(engine.model, engine.optimizer, …).apply():`"
    if "memory" in config.offload and train is None:
        raise ConfigError(
            f"initialize: offload.memory={config.offload['memory']} of the configuration decides by what the tape "
            "keeps of a microbatch of the first batch: give the train_dataloader here; or say what goes where, by "
            f"offload.optimizer, .activations and .parameters; or leave it out and train within {by_hand}, with "
            "memory=… and kept=…"
        )
    if config.offload and mesh is None:
        raise ConfigError(
            f"initialize: offload={dict(config.offload)} of the configuration ends with the mesh, and the model's grid "
            f"was made without one: make it by launch, or leave it out and train within {by_hand}"
        )


def _offload(config: Config, mesh: Mesh, engine: Engine, train: Feed | None) -> None:
    """Offload what the configuration says, until the mesh is closed.  Collective."""
    order = engine.schedule.made(mesh.topology.size) if engine.pipelined and engine.schedule is not None else None
    options = build.offloaded(config, order)
    if order is not None:
        engine.worker(order)  # takes values and their reducer as they are in memory
    if "memory" in options and train is not None:
        options["kept"] = _kept(engine, mesh, train)
    mesh.ends.callback(engine.apply_offload(plan(engine.model, engine.optimizer, **options)).close)


def _kept(engine: Engine, mesh: Mesh, train: Feed) -> Keeps | int:
    """Return what the tape keeps of a microbatch, or of all that a schedule has under way.  Collective.

    Forward passes of one and two rows a data parallel rank show it.
    """
    parts, data = getattr(engine.schedule, "num_microbatches", 1), mesh.size("data")

    def rows_in(part: Any) -> int:
        x, _ = part
        return rows_of(x)

    whole = rows_in(train.first(1))
    rows = -(-rows_in(train.first(parts)) // data)
    found: dict[int, Any] = {}
    for n in (1, 2):
        part = train.first(max(parts, whole // (n * data)))
        found.setdefault(-(-rows_in(part) // data), part)
    if rows in found:
        found = {rows: found[rows]}
    if not engine.pipelined:
        return engine.activation_memory(None, found, rows)
    samples = {n: Sample(engine, part, 0) for n, part in found.items()}
    return engine.activation_memory(Stages(engine, False), samples, rows)


def _has_values(model: Module) -> bool:
    return all(isinstance(held, Parameter) for m in model.modules() for held in m._parameters.values())


def _first(model: Module, grid: Grid, train: Feed, microbatches: int) -> Any:
    """What a model takes of the first microbatch.  Collective."""
    try:
        x, _ = train.first(microbatches)
    except StopIteration:
        raise ConfigError(
            "initialize: the layers are to be measured or counted with the first batch of train_dataloader, which "
            "gives none: give sample=…, what the model takes of a microbatch, or another partition"
        ) from None
    return _placed(model, grid, x)


def _placed(model: Module, grid: Grid, x: Any) -> Any:
    """Inputs as the model takes them.  Collective."""
    rows_of(x)  # raises where they are none
    return place_inputs(model, x, grid, dtype_of(model))


def _not_yet(optimizer: Optimize, why: str) -> None:
    """Refuse an optimizer of parameters that are not made yet."""
    if isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"initialize: the model {why}, so that {type(optimizer).__name__} cannot be that of its parameters: give a "
            f"callable, such as optimizer=lambda parameters: {type(optimizer).__name__}(parameters, lr={optimizer.lr})"
        )


def _optimizer(config: Config, optimizer: Optimize, parameters: list[Parameter], grid: Grid) -> Optimizer:
    if optimizer is None:
        return build.optimizer(config, parameters, grid)
    if not isinstance(optimizer, Optimizer):
        optimizer = build.optimizer_of(optimizer, parameters, grid)
    known = {id(p) for p in parameters}
    strange = next((p for p in optimizer.parameters if id(p) not in known), None)
    if strange is not None:
        raise ConfigError(
            f"initialize: the optimizer has the parameter {strange.name!r}, which is not the model's; make it of "
            "model.parameters()"
        )
    return optimizer


def _scheduler(config: Config, given: Rate, optimizer: Optimizer, train: Feed | None, accumulate: int) -> Any:
    """What changes the learning rate, over the steps that a `Trainer` makes in the configuration's epochs."""
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
    return build.scheduler(config, optimizer, steps)
