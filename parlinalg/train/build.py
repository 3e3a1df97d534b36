"""From a checked configuration to the objects it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from parlinalg import optim
from parlinalg.autograd import Parameter
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.datasets import Batch, Samples, Text, digits, npz, text
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn import Module, training_step
from parlinalg.nn.module import buffers_kept
from parlinalg.offload import Keeps, OffloadPlan, kept, plan
from parlinalg.offload.weighing import reckoned
from parlinalg.optim.schedules import Constant, Cosine, Linear, Schedule, Scheduler, Step, WarmUp
from parlinalg.parallel.precision import START, LossScaler
from parlinalg.parallel.prefetch import Prefetch
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline import PipelineModel
from parlinalg.pipeline import Schedule as PipelineOrder
from parlinalg.pipeline.worker import Worker
from parlinalg.train.arguments import check_handlers
from parlinalg.train.classify import Classify
from parlinalg.train.config import Config
from parlinalg.train.language import Language
from parlinalg.train.launch import Mesh
from parlinalg.train.loop import Trainer, batches
from parlinalg.train.parallel import DATA
from parlinalg.train.pipelines import microbatches_of, rows_of_a_microbatch, schedule_for
from parlinalg.train.shares import gradient_handlers
from parlinalg.train.stages import optimizer_of, worker_of
from parlinalg.train.task import Batches, Criterion, Task
from parlinalg.train.update import Update

SETS: dict[str, Callable[..., Samples]] = {"digits": digits, "npz": npz}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW,
    "lamb": optim.LAMB, "lars": optim.LARS,
}  # fmt: skip
LR = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "lamb": 1e-2, "lars": 1.0}


def dataset(config: Config) -> Samples | Text:
    """The data, whole on every rank; does not communicate."""
    options = dict(config.data.options)
    if config.data.name == "text":
        options.pop("sequence_length", None)
        return text(options.pop("path", None), options.pop("tokenizer", None), **options)
    return SETS[config.data.name](seed=config.seed, **options)


def task(config: Config, mesh: Mesh, data: Samples | Text) -> Task:
    """The model of the data, with the same weights on every grid, and what feeds and measures it."""
    return Language(config, mesh, data) if isinstance(data, Text) else Classify(config, mesh, data)


def optimizer(config: Config, parameters: Iterable[Parameter], grid: Grid) -> optim.Optimizer:
    """The optimizer of these parameters."""
    options = {"lr": LR[config.optimizer.name], **config.optimizer.options}
    if config.precision.dtype is not None:
        options["master"] = config.dtype
    make = OPTIMIZERS[config.optimizer.name]
    names = options.pop("no_decay", False)
    if names is False:
        return optimizer_of(lambda p: make(p, **options), list(parameters), grid)
    decay = options.pop("weight_decay", inspect.signature(make).parameters["weight_decay"].default)
    apart = partial(optim.decay_groups, weight_decay=decay, no_decay=None if names is True else names)
    return optimizer_of(lambda p: make(apart(p), **options), list(parameters), grid)


def criterion(config: Config) -> Criterion:
    """From logits and targets to the sum of the losses and their number."""
    return partial(cross_entropy_sum, **config.criterion.options)


def reducer(config: Config, grid: Grid, model: Module) -> GradientReducer:
    """What sums the gradients, and with ZeRO shares out the parameters."""
    check_handlers(config, model)
    handlers = gradient_handlers(config, grid.sizes)
    if config.zero.stage == 3 and grid.sizes.get(DATA, 1) > 1:
        Prefetch(model, axes=DATA, accumulate=config.zero.accumulate)
    return GradientReducer(model.parameters(), handlers, dtype=config.precision.communicate)


def offload(
    config: Config, mesh: Mesh, task: Task, optimizer: optim.Optimizer, folder: Path, worker: Worker | None = None
) -> OffloadPlan | None:  # fmt: skip
    """What lies on the disk or in host memory, if that is asked for.  Collective.

    With a limit of memory, forward passes of a few samples show what the tape keeps of a microbatch.

    Parameters
    ----------
    folder : Path
        For files, where the configuration names none.
    worker : Worker, optional
        What runs the stages of a pipeline.
    """
    options = offloaded(config, None if worker is None else worker.schedule)
    if not options:
        return None
    if "memory" in options:
        options["kept"] = _kept(config, mesh, task, worker)
    return plan(task.model, optimizer, path=options.pop("path", folder), **options)


def offloaded(config: Config, schedule: PipelineOrder | None) -> dict[str, Any]:
    """What `parlinalg.offload.plan` takes of a configuration."""
    options = dict(config.offload)
    if schedule is not None and schedule.asynchronous and "parameters" in options:
        raise ConfigError(
            f"offload.parameters={options['parameters']!r} with the schedule {schedule.name!r}, which keeps versions "
            "of weights in memory: offload the optimizer or activations, or take a synchronous schedule, such as "
            "'1f1b'"
        )
    if "optimizer" in options:
        options["optimizer_states"] = options.pop("optimizer")
    return options


def _kept(config: Config, mesh: Mesh, task: Task, worker: Worker | None) -> Keeps | int:
    """What the tape keeps of a microbatch, or of all that a schedule has under way.  Collective."""
    parts, data = microbatches_of(config, mesh.place.size), mesh.size("data")
    rows = -(-rows_of_a_microbatch(config, mesh.parallel) // data)
    found: dict[int, Batch] = {}
    for n in (1, 2):
        (first, *_) = next(batches(task.loader, 1, max(parts, config.batch_size // (n * data))))
        found.setdefault(-(-len(first) // data), first)
    if rows in found:
        found = {rows: found[rows]}
    if worker is not None:
        return worker.keeps(found, task, rows)
    return reckoned({n: _of_one(task, batch) for n, batch in found.items()}, rows)


def _of_one(task: Task, batch: Batch) -> int:
    with training_step(0, batch.offset), buffers_kept(task.model):
        loss, _, _ = task.losses(batch)
    return kept(loss)


def scaler(config: Config) -> LossScaler | None:
    """The scale of the loss, if it is scaled."""
    scale = config.precision.loss_scale
    if scale is None:
        return None
    if not isinstance(scale, Mapping):
        return LossScaler(scale, dynamic=False)
    options = dict(scale)
    return LossScaler(options.pop("start", START), **options)


def trainer(
    config: Config, mesh: Mesh, task: Task, optimizer: optim.Optimizer, scheduler: Scheduler,
    reducer: GradientReducer | None = None,
) -> Trainer:  # fmt: skip
    """What makes the steps.  Collective."""
    schedule = schedule_for(config, mesh.parallel)
    changes = update(config, optimizer)
    if schedule is None:
        return Trainer(task, changes, scheduler)
    return Trainer(task, changes, scheduler, worker_of(cast(PipelineModel, task.model), schedule, changes, reducer))


def update(config: Config, optimizer: optim.Optimizer) -> Update:
    """What changes the parameters by their gradients."""
    return Update(optimizer, config.clip_grad_norm, config.clip_grad_value, scaler(config), config.skip_nonfinite)


def steps(config: Config, train: Batches) -> int:
    """The optimizer steps to make."""
    return config.epochs * len(train) if config.steps is None else config.steps


def scheduler(config: Config, optimizer: optim.Optimizer, steps: int) -> Scheduler:
    """The schedule of the learning rate over so many steps."""
    options = dict(config.lr_schedule.options)
    warmup = options.pop("warmup", 0)
    rest = max(1, steps - warmup)
    then: Schedule
    match config.lr_schedule.name:
        case "cosine":
            then = Cosine(rest, **options)
        case "linear":
            then = Linear(rest, **options)
        case "step":
            if "every" not in options:
                raise ConfigError("lr_schedule (step) needs every=…, the steps after which the rate falls")
            then = Step(**options)
        case _:
            then = Constant()
    return Scheduler(optimizer, WarmUp(warmup, then) if warmup else then)
