"""Recipes: a model, its criterion, its data and what is measured, as a configuration says.

A recipe goes to `initialize`, and its hooks to a `Trainer`; that is all that `parlinalg train` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.array import zeros
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Tensor
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.backend.blas import gemm_rate, gemm_side
from parlinalg.backend.memory import check_memory
from parlinalg.comm.together import odd_one_out, together
from parlinalg.datasets import Loader, Passages, Samples, Text, Windows, digits, known_share, npz, text
from parlinalg.errors import ConfigError
from parlinalg.layout import Layout
from parlinalg.nn import GPT, MLP, Llama, Module
from parlinalg.sequence import sequence_order
from parlinalg.train.build import criterion
from parlinalg.train.config import Config
from parlinalg.train.hooks import Hook
from parlinalg.train.launch import Mesh
from parlinalg.train.losses import Criterion, Metric, accuracy
from parlinalg.train.pipelines import microbatches_of, rows_of_a_microbatch
from parlinalg.train.sample import continuation, whole_words

if TYPE_CHECKING:
    from parlinalg.train.trainer import Trainer

__all__ = ["LanguageHook", "PretrainedHook", "Recipe", "classifier", "dataset", "language_model", "recipe"]

SETS: dict[str, Callable[..., Samples]] = {"digits": digits, "npz": npz}
MODELS: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
HIDDEN = (128,)
TEST_BATCH = 256  # samples that a microbatch of the test takes, at least
SEQUENCE = 128
HELD_TOKENS = 4096  # of a microbatch of the validation, at least
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SAMPLE = {"prompt": "\n", "max_new_tokens": 500, "temperature": 0.8}
TOP = 700.0  # exp of more is infinite
STEP = ("lr", "samples_per_s", "grad_norm", "loss_scale", "skipped_steps")


@dataclass
class Recipe:
    """What is trained, on what, and what is measured.

    Attributes
    ----------
    name : str
        Of the data.
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
        Begins the names of what is measured on the data kept out: "test" of "test_loss".
    columns, test_columns : sequence of str
        The metrics of a step, and those of the data kept out, in the order in which `metrics.jsonl` has them.
    curves : dict of str to str
        What the picture shows, as `ProgressHook` takes it.
    hooks : list of Hook
        Its own.
    describe : callable, optional
        From metrics to a line that says how the last evaluation went.
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


def dataset(config: Config) -> Samples | Text:
    """Return the data, whole on every rank; does not communicate."""
    options = dict(config.data.options)
    if config.data.name == "text":
        options.pop("sequence_length", None)
        return text(options.pop("path", None), options.pop("tokenizer", None), **options)
    return SETS[config.data.name](seed=config.seed, **options)


def recipe(config: Config, mesh: Mesh, out: Path | None = None) -> Recipe:
    """Return the recipe of a configuration: a language model of a text, a classifier of other data.  Collective.

    Parameters
    ----------
    config : Config
    mesh : Mesh
    out : Path, optional
        Where a language model is left at the end; by default it is left nowhere.

    Raises
    ------
    ConfigError
        On all ranks, if the data cannot be read on any, or differ, or do not fit the model.
    """
    data = together(mesh.world, lambda: dataset(config), "reading the data")
    return language_model(config, mesh, data, out) if isinstance(data, Text) else classifier(config, mesh, data)


# ---------------------------------------------------------------------------------------------- samples in classes
def classifier(config: Config, mesh: Mesh, data: Samples) -> Recipe:
    """Return the recipe of an MLP that tells the class of a sample.  Collective."""
    options = dict(config.model.options)
    sizes = (data.features, *options.pop("hidden", HIDDEN), data.classes)
    if (odd := odd_one_out(mesh.world, *(np.ascontiguousarray(a).data for a in data.arrays))) is not None:
        raise ConfigError(f"{data.name}: rank {odd} reads other samples than rank 0; all ranks need the same files")
    dtype, grid = dtype_named(config.model_dtype), mesh.grid
    model = MLP(sizes, mesh.scheme, grid, dtype=dtype, **options)
    x_layout, y_layout = model.input_layout(), Layout(model.output_layout().dims[0])
    shape = (rows_of_a_microbatch(config, mesh.parallel), data.features)
    most = max(config.batch_size, TEST_BATCH * microbatches_of(config, mesh.topology.size))
    loader = partial(Loader, grid=grid, x_layout=x_layout, y_layout=y_layout, dtype=dtype)
    return Recipe(
        data.name, model, criterion(config),
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


# ---------------------------------------------------------------------------------------------- text
def language_model(config: Config, mesh: Mesh, data: Text, out: Path | None = None) -> Recipe:
    """Return the recipe of a model that tells the next token of a text at every position.  Collective."""
    odd = odd_one_out(mesh.world, data.train.data, data.validation.data, str(data.tokenizer.vocab_size).encode())
    if odd is not None:
        raise ConfigError(f"{data.name}: rank {odd} reads other tokens than rank 0; all ranks need the same files")
    length = int(config.data.options.get("sequence_length", SEQUENCE))
    model = _declared(config, mesh, data, length)
    shape = (rows_of_a_microbatch(config, mesh.parallel), length)
    if not config.offload:  # each block's input is kept for the backward pass
        hidden = math.prod(shape) * model.config["hidden_size"] * np.dtype(np.float16).itemsize
        what = f"a microbatch of {shape[0]} windows of {shape[1]} tokens"
        check_memory(what, hidden // mesh.world.size, mesh.grid.backend)
    order, name = _order(mesh, length), mesh.parallel.order_of(causal=True)
    train, validation = together(
        mesh.world, lambda: _windows(config, mesh, data, model, length, order), "cutting the text into windows"
    )
    measured = LanguageHook(mesh, data, model, model.flops(config.batch_size, length))
    ordered = "" if name == "contiguous" else f", tokens in {name} order"
    return Recipe(
        data.name, model, criterion(config), train, validation,
        test_criterion=cross_entropy_sum,
        sample=lambda: zeros(shape, mesh.grid, model.ids_layout, np.int64),
        test_name="validation",
        columns=("loss", "perplexity", "lr", "tokens_per_s", "mfu", *STEP[2:]),
        test_columns=tuple(measured.held({"validation_loss": 1.0})),
        curves={"loss": "validation_loss", "tokens_per_s": ""},
        hooks=[measured, *([] if out is None else [PretrainedHook(out, data, {"seed": config.seed, **config.sample})])],
        describe=measured.describe,
        lines={
            "layouts": f"ids {model.ids_layout!r}, targets {model.targets_layout!r}, residual stream "
                       f"{model.scheme.residual!r}{ordered}",
            "data": data,
        },
        measure=measured.measure,
    )  # fmt: skip


def _windows(
    config: Config, mesh: Mesh, data: Text, model: Any, length: int, order: np.ndarray | None
) -> tuple[Windows, Passages]:
    """Return the windows to train on, and those of the validation."""
    rest = (mesh.grid, model.ids_layout, model.targets_layout)
    most = max(config.batch_size, HELD_TOKENS // length * microbatches_of(config, mesh.topology.size))
    try:
        train = Windows(
            data.train, length, config.batch_size, *rest, seed=config.seed, order=order, starts=data.train_starts
        )
    except ConfigError as error:
        raise ConfigError(f"{data.name}, the part to train on: {error}") from error
    return train, Passages(data.validation, length, most, *rest, order=order, starts=data.validation_starts)


def _order(mesh: Mesh, length: int) -> np.ndarray | None:
    """Return the order in which the tokens of a window lie, or None: as they come."""
    parallel = mesh.parallel
    if length < parallel.sequence:
        raise ConfigError(
            f"data.sequence_length={length} over parallel.sequence.size={parallel.sequence} leaves ranks without "
            f"tokens: give at least {parallel.sequence} positions, or a sequence size of at most {length}"
        )
    name = parallel.order_of(causal=True)
    return None if name == "contiguous" else sequence_order(length, parallel.ring, name)


def _declared(config: Config, mesh: Mesh, data: Text, length: int) -> Any:
    """Return the declared model, of the sizes that the configuration and the data say."""
    options = {**SIZES, **config.model.options}
    vocabulary = data.tokenizer.vocab_size
    if options.setdefault("vocab_size", vocabulary) < vocabulary:
        raise ConfigError(
            f"model.vocab_size is {options['vocab_size']}, but the tokenizer has {vocabulary} tokens; leave it out, or "
            f"give at least {vocabulary}"
        )
    if options.setdefault("max_position_embeddings", length) < length:
        raise ConfigError(
            f"model.max_position_embeddings is {options['max_position_embeddings']}, less than data.sequence_length, "
            f"{length}; give at least {length}, or leave it out"
        )
    if config.model.name == "llama":
        options.setdefault("intermediate_size", 8 * options["hidden_size"] // 3)
    place: dict[str, Any] = {"scheme": mesh.scheme, "grid": mesh.grid, "dtype": config.model_dtype}
    try:
        return MODELS[config.model.name](**options, **place)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


class LanguageHook(Hook):
    """Measures the perplexity of a language model, and its speed in tokens a second and as a share of the peak (MFU).

    Parameters
    ----------
    mesh : Mesh
    data : Text
    model : GPT or Llama
    flops : float
        Floating-point operations of a step.

    Attributes
    ----------
    peak : float
        Floating-point operations a second of products on all ranks at once.
    """

    def __init__(self, mesh: Mesh, data: Text, model: Any, flops: float) -> None:
        self.mesh, self.data, self.dtype, self.flops = mesh, data, str(model.dtype), flops
        self.peak = math.nan
        self._steps, self._seconds, self._targets = 0, 0.0, 0.0

    def measure(self) -> dict[str, str]:
        """Measure the peak; return lines that say what it is and what a step takes.  Collective."""
        backend, world = self.mesh.grid.backend, self.mesh.world
        n = max(world.share(gemm_side(backend, self.dtype)))
        self.peak = sum(world.share(gemm_rate(backend, self.dtype, n, sustained=True)))
        return {
            "step": f"{self.flops / 1e9:.3g} GFLOP of the model",
            "peak": f"{self.peak / 1e9:.3g} GFLOP/s: {n} × {n} products in {self.dtype}, on all ranks at once",
        }

    def before_train(self, trainer: Trainer) -> None:
        if math.isnan(self.peak):
            self.measure()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None:
        seconds = trainer.seconds
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._targets += trainer.targets
        trainer.add_metrics({
            "perplexity": _perplexity(loss), "tokens_per_s": trainer.targets / seconds,
            "mfu": self.flops / seconds / self.peak,
        })  # fmt: skip

    def after_test(self, trainer: Trainer) -> None:
        trainer.add_metrics(self.held(trainer.step_metrics))

    def held(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return what is known of the validation by its loss."""
        if "validation_loss" not in metrics:
            return {}
        loss = metrics["validation_loss"]
        found = {"validation_loss": loss, "validation_perplexity": _perplexity(loss)}
        if self.data.tokenizer.unit != "byte":
            found["validation_nats_per_byte"] = loss * len(self.data.validation) / self.data.validation_bytes
        return found

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Return a line that says how a validation went."""
        unit, each = self.data.tokenizer.unit, metrics.get("validation_nats_per_byte")
        bytes_ = "" if each is None else f", {each:.4f} nats a byte"
        return (
            f"validation loss {metrics['validation_loss']:.4f} nats a {unit}{bytes_}, perplexity "
            f"{metrics['validation_perplexity']:.2f} ({len(self.data.validation) - 1:,} {unit}s)"
        )

    def finish(self, trainer: Trainer) -> list[str]:
        if not self._steps:
            return []
        share = self._steps * self.flops / self._seconds / self.peak
        return [f"{self._targets / self._seconds:,.0f} tokens a second in the steps, {share:.1%} of the peak"]


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, TOP))


class PretrainedHook(Hook):
    """Leaves a language model as a folder that `parlinalg generate` and `from_pretrained` read, and a text by it.

    A text is written where all steps were made.  Models with experts are not written.

    Parameters
    ----------
    folder : str or Path
    data : Text
        Whose tokenizer is left, and in whose words those of the text are looked up.
    sampling : dict, optional
        How the text is written: the keys of `sample` in a configuration.
    """

    def __init__(self, folder: str | Path, data: Text, sampling: Mapping[str, Any] | None = None) -> None:
        self.folder, self.data = Path(folder), data
        self.sampling: dict[str, Any] = {**SAMPLE, **(sampling or {})}

    def finish(self, trainer: Trainer) -> list[str]:
        model, world = trainer.engine.model, trainer.engine.world
        files = ["config.json", "model.safetensors", "tokenizer.json"]
        if "num_local_experts" in getattr(model, "whole", model).config:
            files = files[2:]
        else:
            model.save_pretrained(self.folder)
        if not world.rank:
            self.data.tokenizer.save(self.folder)
        lines: list[str] = []
        if not trainer.signal and self.sampling["max_new_tokens"]:
            lines = self._sample(model, world.rank == 0)
            files.append("sample.txt")
        self.files = [str(self.folder / name) for name in files]
        return lines

    def _sample(self, model: Any, speaks: bool) -> list[str]:
        """Write a text; return lines that show it."""
        options = dict(self.sampling)
        prompt = options.pop("prompt")
        written = whole_words(continuation(model, self.data.tokenizer, prompt, **options))
        share, count = known_share(written, self.data.words)
        if speaks:
            (self.folder / "sample.txt").write_text(prompt + written, encoding="utf-8")
        return [
            "", "a sample:", f"{prompt}{written}", "",
            f"{share:.0%} of the sample's {count} words of three letters or more occur in the text",
        ]  # fmt: skip
