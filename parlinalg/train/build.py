"""From a checked configuration to the objects it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parlinalg import optim
from parlinalg.autograd import Parameter
from parlinalg.datasets import Dataset, Text, digits, npz, text
from parlinalg.errors import ConfigError
from parlinalg.optim.schedules import Constant, Cosine, Linear, Schedule, Scheduler, Step, WarmUp
from parlinalg.train.classify import Classify
from parlinalg.train.config import Config
from parlinalg.train.language import Language
from parlinalg.train.launch import Mesh
from parlinalg.train.task import Batches, Task

SETS: dict[str, Callable[..., Dataset]] = {"digits": digits, "npz": npz}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}
LR = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3}


def dataset(config: Config) -> Dataset | Text:
    """The data, whole on every rank; does not communicate."""
    options = dict(config.data.options)
    if config.data.name == "text":
        options.pop("sequence_length", None)
        return text(options.pop("path", None), options.pop("tokenizer", None), **options)
    return SETS[config.data.name](seed=config.seed, **options)


def task(config: Config, mesh: Mesh, data: Dataset | Text) -> Task:
    """The model of the data, with the same weights on every grid, and what feeds and measures it."""
    return Language(config, mesh, data) if isinstance(data, Text) else Classify(config, mesh, data)


def optimizer(config: Config, parameters: Iterable[Parameter]) -> optim.Optimizer:
    """The optimizer of these parameters."""
    options = {"lr": LR[config.optimizer.name], **config.optimizer.options}
    return OPTIMIZERS[config.optimizer.name](parameters, **options)


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
