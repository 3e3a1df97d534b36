"""From a checked configuration to the objects it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from parlinalg import nn, optim
from parlinalg.autograd import Parameter
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.datasets import Dataset, Loader, digits, npz
from parlinalg.errors import ConfigError
from parlinalg.layout import Layout
from parlinalg.optim.schedules import Constant, Cosine, Linear, Schedule, Scheduler, Step, WarmUp
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh
from parlinalg.train.loop import Criterion

DATASETS: dict[str, Callable[..., Dataset]] = {"digits": digits, "npz": npz}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}
HIDDEN = (128,)
LR = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3}
TEST_BATCH = 256  # samples the test takes at a time, at least


def dataset(config: Config) -> Dataset:
    """The data, whole on every rank; does not communicate."""
    return DATASETS[config.data.name](seed=config.seed, **config.data.options)


def model(config: Config, mesh: Mesh, data: Dataset) -> nn.MLP:
    """The classifier of the data, with the same weights on every grid."""
    options = dict(config.model.options)
    sizes = (data.features, *options.pop("hidden", HIDDEN), data.classes)
    return nn.MLP(sizes, mesh.scheme, mesh.grid, dtype=config.dtype, seed=config.seed, **options)


def optimizer(config: Config, parameters: Iterable[Parameter]) -> optim.Optimizer:
    """The optimizer of these parameters."""
    options = {"lr": LR[config.optimizer.name], **config.optimizer.options}
    return OPTIMIZERS[config.optimizer.name](parameters, **options)


def steps(config: Config, train: Loader) -> int:
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


def criterion(config: Config) -> Criterion:
    """The sum of the losses and their number, from logits and targets."""
    return partial(cross_entropy_sum, **config.criterion.options)


def loaders(config: Config, mesh: Mesh, data: Dataset, model: nn.MLP) -> tuple[Loader, Loader]:
    """The loaders of training and test data, cut as the model takes samples and puts out logits."""
    x_layout, y_layout = model.input_layout(), Layout(model.output_layout().dims[0])
    train = Loader(
        data.x, data.y, config.batch_size, mesh.grid, x_layout, y_layout, dtype=config.dtype, seed=config.seed
    )
    test = Loader(
        data.x_test, data.y_test, max(config.batch_size, TEST_BATCH), mesh.grid, x_layout, y_layout,
        dtype=config.dtype, shuffle=False,
    )  # fmt: skip
    return train, test
