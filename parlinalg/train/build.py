"""From a checked configuration to the objects it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np

from parlinalg import optim
from parlinalg.array import zeros
from parlinalg.autograd import Parameter
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout, as_cut
from parlinalg.nn import Module
from parlinalg.optim.schedules import Constant, Cosine, Linear, Schedule, Scheduler, Step, WarmUp
from parlinalg.parallel.handlers import Handler, ZeRO
from parlinalg.parallel.precision import START, LossScaler
from parlinalg.parallel.prefetch import Prefetch
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline import Schedule as PipelineOrder
from parlinalg.train.arguments import check_handlers
from parlinalg.train.config import Config
from parlinalg.train.losses import Criterion
from parlinalg.train.parallel import DATA, REPLICA, RING, ULYSSES
from parlinalg.train.update import Update

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW,
    "lamb": optim.LAMB, "lars": optim.LARS,
}  # fmt: skip
LR = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "lamb": 1e-2, "lars": 1.0}


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


def optimizer_of(
    make: Callable[[Sequence[Parameter]], optim.Optimizer], parameters: Sequence[Parameter], grid: Grid
) -> optim.Optimizer:  # fmt: skip
    """Return the optimizer of these parameters; of a stage without any, such as one of an activation, one of none."""
    own = parameters or [Parameter(zeros((0,), grid, Layout(None), np.float32), "none")]
    optimizer = make(own)
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"the function that is to make an optimizer gives {optimizer!r}: it takes the parameters and returns an "
            "Optimizer, such as lambda parameters: AdamW(parameters, lr=1e-3)"
        )
    if not parameters:
        optimizer.parameters = []
        for group in optimizer.param_groups:
            group["params"] = []
    return optimizer


def criterion(config: Config) -> Criterion:
    """From logits and targets to the sum of the losses and their number."""
    return partial(cross_entropy_sum, **config.criterion.options)


def gradient_handlers(config: Config, sizes: Mapping[str, int]) -> list[Handler]:
    """Return the handlers of gradients that a configuration asks for, on a grid with axes of these sizes."""
    given = [h for h in config.gradient_handler if not _idle(h, sizes)]
    zero = config.zero
    if zero.stage and DATA in sizes:
        given = [h for h in given if type(h).__name__ != "DataParallel"]  # ZeRO is what is done over that axis
        given.append(ZeRO(zero.stage, DATA, zero.accumulate))
    return given


def _idle(handler: Handler, sizes: Mapping[str, int]) -> bool:
    """Return True if a handler is over dimensions of a configuration that have one rank here."""
    axes = as_cut(handler.axes)
    return set(axes) <= {DATA, REPLICA, RING, ULYSSES} and not set(axes) & set(sizes)


def reducer(config: Config, grid: Grid, model: Module) -> GradientReducer:
    """What sums the gradients, and with ZeRO shares out the parameters."""
    check_handlers(config, model)
    handlers = gradient_handlers(config, grid.sizes)
    if config.zero.stage == 3 and grid.sizes.get(DATA, 1) > 1:
        Prefetch(model, axes=DATA, accumulate=config.zero.accumulate)
    return GradientReducer(model.parameters(), handlers, dtype=config.precision.communicate)


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


def scaler(config: Config) -> LossScaler | None:
    """The scale of the loss, if it is scaled."""
    scale = config.precision.loss_scale
    if scale is None:
        return None
    if not isinstance(scale, Mapping):
        return LossScaler(scale, dynamic=False)
    options = dict(scale)
    return LossScaler(options.pop("start", START), **options)


def update(config: Config, optimizer: optim.Optimizer) -> Update:
    """What changes the parameters by their gradients."""
    return Update(optimizer, config.clip_grad_norm, config.clip_grad_value, scaler(config), config.skip_nonfinite)


def steps(config: Config, train: Sized) -> int:
    """The optimizer steps to make, each of a batch."""
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
