"""Recipes: the model, criterion, data and metrics of a configuration.

A recipe goes to `initialize`, and its hooks to a `Trainer`; that is all that `parlinalg train` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.array import zeros
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Tensor
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.backend.memory import check_memory
from parlinalg.comm.together import odd_one_out, together
from parlinalg.datasets import Loader, Passages, Samples, Text, Windows
from parlinalg.errors import ConfigError
from parlinalg.layout import Layout
from parlinalg.nn import MLP, Module
from parlinalg.train.choices import DATASETS, MODELS, make_criterion
from parlinalg.train.config import TrainingConfig
from parlinalg.train.hooks import Hook
from parlinalg.train.language import LanguageHook, PretrainedHook
from parlinalg.train.losses import Criterion, Metric, accuracy
from parlinalg.train.mesh import Mesh

__all__ = ["Recipe", "classifier", "dataset", "language_model", "recipe"]

HIDDEN = (128,)
TEST_BATCH = 256  # samples that a microbatch of the test has, at least
SEQUENCE = 128
HELD_TOKENS = 4096  # of a microbatch of the validation, at least
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
STEP = ("lr", "samples_per_s", "grad_norm", "loss_scale", "skipped_steps")


@dataclass
class Recipe:
    """A model, the data it is trained on, and what is measured.

    Attributes
    ----------
    name : str
        The name of the data.
    model : Module
        Declared; it gets values in `initialize`.
    criterion, test_criterion : callable
        From outputs and labels to the sum of the losses and their number, in training and in evaluations.
    train, test : loader
        To train on, and to evaluate on.
    metrics : dict of str to callable
        What is measured beside the loss, as `initialize` takes it.
    sample : callable, optional
        Makes what the model takes of a microbatch, by which a partition of a pipeline counts or measures.
    test_name : str
        Begins the names of what is measured on held-out data: "test" of "test_loss".
    columns, test_columns : sequence of str
        The metrics of a step, and those of the held-out data, in the order in which `metrics.jsonl` has them.
    curves : dict of str to str
        What the picture shows, as `ProgressHook` takes it.
    hooks : list of Hook
        Its own.
    describe : callable, optional
        From metrics to a line that reports the last evaluation.
    lines : dict of str to str
        What to say of it at the start: a head and a text each.
    measure : callable
        Makes further lines that take measuring.  Collective.
    """

    name: str
    model: Module
    criterion: Criterion
    train: Any
    test: Any
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    test_criterion: Criterion | None = None
    sample: Callable[[], Any] | None = None
    test_name: str = "test"
    columns: Sequence[str] = ("loss", *STEP)
    test_columns: Sequence[str] = ("test_loss",)
    curves: Mapping[str, str] = field(default_factory=lambda: {"loss": "test_loss"})
    hooks: Sequence[Hook] = ()
    describe: Callable[[Mapping[str, float]], str] | None = None
    lines: Mapping[str, object] = field(default_factory=dict)
    measure: Callable[[], Mapping[str, str]] = dict


def dataset(config: TrainingConfig) -> Samples | Text:
    """Return the data, all of it on every rank; does not communicate."""
    read, options = DATASETS[config.data.name].make, dict(config.data.options)
    if config.data.name == "text":
        options.pop("sequence_length", None)
        found: Samples | Text = read(options.pop("path", None), options.pop("tokenizer", None), **options)
        return found
    found = read(seed=config.seed, **options)
    return found


def recipe(config: TrainingConfig, mesh: Mesh, out: Path | None = None) -> Recipe:
    """Return the recipe of a configuration: a language model of a text, a classifier of other data.  Collective.

    Parameters
    ----------
    config : TrainingConfig
    mesh : Mesh
    out : Path, optional
        Where a language model is written at the end; by default it is not.

    Raises
    ------
    ConfigError
        On all ranks, if the data cannot be read on any, differ between ranks, or are not for the model.
    """
    data = together(mesh.world, lambda: dataset(config), "reading the data")
    return language_model(config, mesh, data, out) if isinstance(data, Text) else classifier(config, mesh, data)


def _rows(config: TrainingConfig, mesh: Mesh, samples: int | None = None) -> int:
    """Return the most rows of a microbatch, on all data parallel ranks together, where there are so many samples."""
    batch = config.batch_size if samples is None else min(config.batch_size, samples)
    return -(-batch // config.microbatches(mesh.topology.size))


# ---------------------------------------------------------------------------------------------- samples in classes
def classifier(config: TrainingConfig, mesh: Mesh, data: Samples) -> Recipe:
    """Return the recipe of an MLP that tells the class of a sample.  Collective."""
    if (odd := odd_one_out(mesh.world, *(np.ascontiguousarray(a).data for a in data.arrays))) is not None:
        raise ConfigError(f"{data.name}: rank {odd} reads other samples than rank 0; all ranks need the same files")
    dtype, grid = dtype_named(config.model_dtype), mesh.grid
    model = together(
        mesh.world, lambda: declared_classifier(config, mesh, data.features, data.classes), "declaring the model"
    )
    x_layout, y_layout = model.input_layout(), Layout(model.output_layout().dims[0])
    shape = (_rows(config, mesh, len(data.x)), data.features)
    most = max(config.batch_size, TEST_BATCH * config.microbatches(mesh.topology.size))
    loader = partial(Loader, grid=grid, x_layout=x_layout, y_layout=y_layout, dtype=dtype)
    return Recipe(
        data.name, model, make_criterion(config.criterion),
        loader(data.x, data.y, config.batch_size, seed=config.seed),
        loader(data.x_test, data.y_test, most, shuffle=False),
        {"accuracy": accuracy},
        sample=lambda: Tensor(zeros(shape, grid, x_layout, dtype)),
        columns=("loss", "accuracy", *STEP),
        test_columns=("test_loss", "test_accuracy"),
        curves={"loss": "test_loss", "accuracy": "test_accuracy"},
        describe=lambda found: f"test accuracy {found['test_accuracy']:.4f} ({len(data.x_test)} samples)",
        lines={
            "layouts": f"x {x_layout!r}, labels {y_layout!r}, logits {model.output_layout()!r}",
            "data": data,
        },
    )  # fmt: skip


def declared_classifier(config: TrainingConfig, mesh: Mesh, features: int, classes: int) -> MLP:
    """Return the declared model of samples with so many features, in so many classes."""
    options = dict(config.model.options)
    sizes = (features, *options.pop("hidden", HIDDEN), classes)
    return MLP(sizes, mesh.scheme, mesh.grid, dtype=dtype_named(config.model_dtype), **options)


# ---------------------------------------------------------------------------------------------- text
def language_model(config: TrainingConfig, mesh: Mesh, data: Text, out: Path | None = None) -> Recipe:
    """Return the recipe of a model that tells the next token of a text at every position.  Collective."""
    odd = odd_one_out(mesh.world, data.train.data, data.validation.data, str(data.tokenizer.vocab_size).encode())
    if odd is not None:
        raise ConfigError(f"{data.name}: rank {odd} reads other tokens than rank 0; all ranks need the same files")
    length = length_of_sequences(config)
    model = together(  # the ranks of a pipeline may have unlike grids, of which one cannot have it
        mesh.world, lambda: declared_language_model(config, mesh, data.tokenizer.vocab_size, length),
        "declaring the model",
    )  # fmt: skip
    shape = (_rows(config, mesh), length)
    if config.in_memory:  # each block's input is kept for the backward pass
        hidden = math.prod(shape) * model.config["hidden_size"] * np.dtype(np.float16).itemsize
        what = f"a microbatch of {shape[0]} windows of {shape[1]} tokens"
        check_memory(what, hidden // mesh.world.size, mesh.grid.backend)
    order, name = mesh.spec.token_order(length), mesh.spec.order_of(causal=True)
    train, validation = together(
        mesh.world, lambda: _windows(config, mesh, data, model, length, order), "cutting the text into windows"
    )
    measured = LanguageHook(mesh, data, model, model.flops(config.batch_size, length))
    sampling = config.sample if config.sample.seed is not None else replace(config.sample, seed=config.seed)
    ordered = "" if name == "contiguous" else f", tokens in {name} order"
    return Recipe(
        data.name, model, make_criterion(config.criterion), train, validation,
        test_criterion=cross_entropy_sum,
        sample=lambda: zeros(shape, mesh.grid, model.ids_layout, np.int64),
        test_name="validation",
        columns=("loss", "perplexity", "lr", "tokens_per_s", "mfu", *STEP[2:]),
        test_columns=tuple(measured.held({"validation_loss": 1.0})),
        curves={"loss": "validation_loss", "tokens_per_s": ""},
        hooks=[measured, *([] if out is None else [PretrainedHook(out, data, sampling)])],
        describe=measured.describe,
        lines={
            "layouts": f"ids {model.ids_layout!r}, targets {model.targets_layout!r}, residual stream "
                       f"{model.scheme.residual!r}{ordered}",
            "data": data,
        },
        measure=measured.measure,
    )  # fmt: skip


def _windows(
    config: TrainingConfig, mesh: Mesh, data: Text, model: Any, length: int, order: np.ndarray | None
) -> tuple[Windows, Passages]:
    """Return the windows to train on, and those of the validation."""
    rest = (mesh.grid, model.ids_layout, model.targets_layout)
    most = max(config.batch_size, HELD_TOKENS // length * config.microbatches(mesh.topology.size))
    try:
        train = Windows(
            data.train, length, config.batch_size, *rest, seed=config.seed, order=order, starts=data.train_starts
        )
    except ConfigError as error:
        raise ConfigError(f"{data.name}, the part to train on: {error}") from error
    return train, Passages(data.validation, length, most, *rest, order=order, starts=data.validation_starts)


def require_vocabulary(given: int, tokens: int) -> None:
    """Raise if a model's `vocab_size` is less than the tokens of the tokenizer."""
    if given < tokens:
        raise ConfigError(
            f"model.vocab_size is {given}, but the tokenizer has {tokens} tokens; leave it out, or give at least "
            f"{tokens}"
        )


def length_of_sequences(config: TrainingConfig) -> int:
    """Return the tokens of a window of text."""
    return int(config.data.options.get("sequence_length", SEQUENCE))


def declared_language_model(config: TrainingConfig, mesh: Mesh, vocabulary: int, length: int) -> Any:
    """Return the declared model, of the sizes that the configuration and the data say."""
    options = {**SIZES, **config.model.options}
    require_vocabulary(options.setdefault("vocab_size", vocabulary), vocabulary)
    if options.setdefault("max_position_embeddings", length) < length:
        raise ConfigError(
            f"model.max_position_embeddings is {options['max_position_embeddings']}, less than data.sequence_length, "
            f"{length}; give at least {length}, or leave it out"
        )
    if config.model.name == "llama":
        options.setdefault("intermediate_size", 8 * options["hidden_size"] // 3)
    place: dict[str, Any] = {"scheme": mesh.scheme, "grid": mesh.grid, "dtype": config.model_dtype}
    try:
        return MODELS[config.model.name].make(**options, **place)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
