"""Configurations: what may stand in one, its defaults, and how it is read.  Pure: no MPI.

A configuration is a Python file whose variables are the keys, a dict of them, or the name of a shipped example.  Every
key is optional.
"""

from __future__ import annotations

import inspect
import runpy
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.parallel.handlers import Handler, ZeRO
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.train import options
from parlinalg.train.checkpoint_options import Checkpointing, checkpointing
from parlinalg.train.keys import (
    Check,
    Choice,
    check_keys,
    choice,
    flag,
    listed,
    one_of,
    optional,
    real,
    refuse,
    section,
    several,
    text,
    whole,
)
from parlinalg.train.options import Pipelining, Precision, Zero
from parlinalg.train.overrides import override

__all__ = [
    "Checkpointing", "Choice", "Config", "Pipelining", "Precision", "Zero", "check", "examples", "load", "override",
    "read",
]  # fmt: skip

#: What trains a classifier of a `.npz` file that is given in place of a configuration.
CLASSIFIER: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": (128,)}, "optimizer": {"name": "adamw", "lr": 3e-3},
    "lr_schedule": {"name": "cosine", "warmup": 5}, "epochs": 20, "batch_size": 64,
}  # fmt: skip
_AS_NPZ = "write these by numpy.savez('mine.npz', x=samples, y=labels), and train mine.npz"
_AS_TEXT = "train a language model of a text by: parlinalg train text --set data.path=FILE"
OTHER_DATA = {
    **dict.fromkeys((".npy", ".csv", ".tsv", ".json", ".jsonl", ".h5", ".hdf5", ".parquet", ".pt", ".pkl"), _AS_NPZ),
    **dict.fromkeys((".txt", ".md", ".rst"), _AS_TEXT),
}

EXAMPLES = Path(__file__).parent.parent / "examples"

_dropout = real(0, 1, below=True)
_share = real(0, 1, above=True, below=True)


def _hidden(where: str, value: Any) -> Any:
    return several(whole(1))(where, [value] if isinstance(value, int) else value)


DATASETS: dict[str, dict[str, Check]] = {
    "digits": {"test": _share},
    "npz": {"path": text, "test": _share},
    "text": {
        "path": optional(text), "tokenizer": optional(text), "sequence_length": whole(1), "validation": _share,
        "packed": flag,
    },
}  # fmt: skip
_language: dict[str, Check] = {
    "vocab_size": whole(1),
    "max_position_embeddings": whole(1),
    "hidden_size": whole(1),
    "num_hidden_layers": whole(1, 100_000),
    "num_attention_heads": whole(1),
    "intermediate_size": whole(1),
    "tie_word_embeddings": flag,
    "initializer_range": real(0, above=True),
    "embd_pdrop": _dropout,
    "resid_pdrop": _dropout,
    "recompute": one_of(None, "attention", "block"),
    "num_local_experts": whole(1),
    "num_experts_per_tok": one_of(1, 2),
    "router_aux_loss_coef": real(0),
    "capacity_factor": optional(real(0, above=True)),
    "expert_axis": optional(text),
}
LANGUAGE = ("gpt", "llama")  # models that read text
MODELS: dict[str, dict[str, Check]] = {
    "mlp": {
        "hidden": _hidden,
        "activation": one_of("relu", "gelu", "tanh", "sigmoid", "silu"),
        "dropout": _dropout,
        "bias": flag,
    },
    "gpt": {
        **_language,
        "hidden_act": text,
        "attn_pdrop": _dropout,
        "layer_norm_eps": real(0, above=True),
    },
    "llama": {
        **_language,
        "num_key_value_heads": whole(1),
        "head_dim": whole(1),
        "packed": flag,
        "rope_theta": real(0, above=True),
        "rms_norm_eps": real(0, above=True),
        "attention_dropout": _dropout,
    },
}


def _no_decay(where: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        raise refuse(where, value, "True, False, or a list of parts of parameters' names, such as ['bias', 'norm']")
    found: tuple[str, ...] = several(text)(where, value)
    return found


_betas = several(real(0, 1, below=True), length=2)
_decay: dict[str, Check] = {"weight_decay": real(0), "no_decay": _no_decay}
_adam: dict[str, Check] = {"lr": real(0), "betas": _betas, "eps": real(0, above=True), **_decay}
OPTIMIZERS: dict[str, dict[str, Check]] = {
    "sgd": {"lr": real(0), "momentum": real(0, 1, below=True), "nesterov": flag, **_decay},
    "adam": _adam,
    "adamw": _adam,
    "lamb": _adam,
    "lars": {"lr": real(0), "momentum": real(0, 1, below=True), **_decay, "trust": real(0, above=True)},
}
LR_SCHEDULES: dict[str, dict[str, Check]] = {
    "constant": {"warmup": whole(0)},
    "cosine": {"warmup": whole(0), "end": real(0, 1)},
    "linear": {"warmup": whole(0), "end": real(0, 1)},
    "step": {"warmup": whole(0), "every": whole(1), "factor": real(0, 1, above=True)},
}
CRITERIA: dict[str, dict[str, Check]] = {
    "cross_entropy": {"label_smoothing": real(0, 1, below=True)},
}
SAMPLE: dict[str, Check] = {
    "prompt": text,
    "max_new_tokens": whole(0),
    "temperature": real(0),
    "top_k": optional(whole(1)),
    "top_p": optional(real(0, 1, above=True)),
    "seed": whole(0, (1 << 64) - 1),
}


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    Attributes
    ----------
    parallel : dict
        See `parlinalg.train.parallel.share_out`, which checks it against the number of ranks.
    backend : {"auto", "numpy", "cupy"}
    dtype : {"float32", "float64", "bfloat16", "float16"}
        Of the parameters and the arithmetic; with `precision`, of the weights that the optimizer keeps.
    precision : Precision
        Mixed precision, if any.
    zero : Zero
        What data parallel ranks share out.
    schedule : Pipelining or None
        The order of work in a pipeline.
    gradient_handler : tuple of handlers
        Of `parlinalg.parallel`.
    offload : dict
        What lies on a disk or in the host's memory.
    seed : int
        Of the weights, the order of the data, dropout, and the split into training and test data.
    model, data, optimizer, lr_schedule, criterion : Choice
        A name and options; the tables of this module list them.
    epochs : int
        Passes over the training data, unless `steps` is given.
    steps : int or None
        Optimizer steps.
    batch_size : int
        Samples a step, over all ranks and microbatches; the last batch of an epoch may be smaller.
    gradient_accumulation : int
        Microbatches into which a step's batch is cut.
    clip_grad_norm : float or None
        The largest 2-norm of the gradient of the whole model.
    clip_grad_value : float or None
        The largest element of the gradient, instead.
    skip_nonfinite : bool
        Whether a step whose loss or gradient is not finite is left out, on all ranks; with a loss scale it always is.
        Otherwise such a loss ends the training.
    validate_every : int or None
        Steps from one measurement on the data kept out of training to the next; one follows the last step anyway.
    checkpoint : Checkpointing
        When checkpoints are made, and which of them stay.
    sample : dict
        How a language model writes its sample at the end; the keys of `SAMPLE`.
    """

    parallel: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "auto"
    dtype: str = "float32"
    precision: Precision = field(default_factory=Precision)
    zero: Zero = field(default_factory=Zero)
    schedule: Pipelining | None = None
    gradient_handler: tuple[Handler, ...] = ()
    offload: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    model: Choice = field(default_factory=lambda: Choice("mlp", {}))
    data: Choice = field(default_factory=lambda: Choice("digits", {}))
    optimizer: Choice = field(default_factory=lambda: Choice("adamw", {}))
    lr_schedule: Choice = field(default_factory=lambda: Choice("constant", {}))
    criterion: Choice = field(default_factory=lambda: Choice("cross_entropy", {}))
    epochs: int = 10
    steps: int | None = None
    batch_size: int = 64
    gradient_accumulation: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    skip_nonfinite: bool = False
    validate_every: int | None = None
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    sample: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_dtype(self) -> str:
        """The dtype of the model's weights and arithmetic."""
        return self.precision.dtype or self.dtype


def _parallel(where: str, value: Any) -> Mapping[str, Any]:
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise refuse(where, value, "a dict with the keys data, pipeline, sequence, tensor")
    return value


def _data(where: str, value: Any) -> Choice:
    path = value if isinstance(value, str) else value.get("path") if isinstance(value, Mapping) else None
    if isinstance(path, str) and path not in DATASETS and (isinstance(value, Mapping) or Path(path).suffix):
        name = "npz" if path.endswith(".npz") else "text"
        value = {"name": name, **(value if isinstance(value, Mapping) else {"path": path})}
    chosen: Choice = choice(DATASETS)(where, value)
    if chosen.name == "npz" and "path" not in chosen.options:
        raise ConfigError(f"{where} (npz) needs a path: data=dict(path='FILE.npz') of a file with arrays x and y")
    return chosen


def _matched(checked: dict[str, Any]) -> dict[str, Any]:
    """The configuration with data and model that go together, each the other's where one is left out."""
    data, model = checked.get("data"), checked.get("model")
    if data is None:
        data = Choice("text" if model is not None and model.name in LANGUAGE else "digits", {})
    if model is None:
        model = Choice("gpt" if data.name == "text" else "mlp", {})
    if (model.name in LANGUAGE) != (data.name == "text"):
        raise ConfigError(
            f"the model {model.name!r} does not read the data {data.name!r}: text is for {listed(LANGUAGE)}, digits "
            "and npz are for 'mlp'"
        )
    return {**checked, "data": data, "model": model}


CHECKS: dict[str, Check] = {
    "parallel": _parallel,
    "backend": one_of("auto", "numpy", "cupy"),
    "dtype": one_of("float32", "float64", "bfloat16", "float16"),
    "seed": whole(0, (1 << 64) - 1),
    "model": choice(MODELS, default="mlp"),
    "data": _data,
    "optimizer": choice(OPTIMIZERS, default="adamw"),
    "lr_schedule": choice(LR_SCHEDULES),
    "criterion": choice(CRITERIA, default="cross_entropy"),
    "epochs": whole(1),
    "steps": optional(whole(1)),
    "batch_size": whole(1),
    "gradient_accumulation": whole(1, 100_000),
    "clip_grad_norm": optional(real(0, above=True)),
    "validate_every": optional(whole(1)),
    "sample": lambda where, value: section(where, {} if value is None else value, SAMPLE),
    "clip_grad_value": optional(real(0, above=True)),
    "skip_nonfinite": flag,
    "precision": options.precision,
    "zero": options.zero,
    "gradient_handler": options.handlers,
    "offload": options.offload,
    "checkpoint": checkpointing,
    "schedule": options.pipelining,
}  # fmt: skip


def check(values: Mapping[str, Any]) -> Config:
    """Return a checked configuration from a dict of its keys.

    Raises
    ------
    ConfigError
        If a key is unknown at any level (the message names the nearest right one), a value is out of range, or asks for
        what is not there yet.
    """
    if not isinstance(values, Mapping):
        raise refuse("a configuration", values, "a dict, or the path of a Python file")
    for key in values:
        if key in ("pipeline", "sequence", "tensor"):
            raise ConfigError(f"the configuration has an unknown key {key!r}: write it inside parallel=dict({key}=…)")
    check_keys("the configuration", values, CHECKS)
    checked = section("", values, {k: _bare(c) for k, c in CHECKS.items()})
    config = Config(**_matched({k: v for k, v in checked.items() if k in Config.__dataclass_fields__}))
    check_together(config)
    return over_one_rank(config)


def check_together(config: Config) -> None:
    """Raise a ConfigError, which says what would be right, if keys contradict each other."""
    if config.precision.dtype is not None and config.dtype not in ("float32", "float64"):
        raise ConfigError(
            f"with precision={config.precision.dtype!r} the optimizer keeps weights of dtype={config.dtype!r}: give "
            "dtype='float32' or 'float64', or leave precision out for a model that is in 16 bits throughout"
        )
    if config.clip_grad_norm is not None and config.clip_grad_value is not None:
        raise ConfigError(
            f"clip_grad_norm={config.clip_grad_norm} and clip_grad_value={config.clip_grad_value}: the norm would be "
            "of what the other clips; give one of them"
        )
    asked = None if config.schedule is None else config.schedule.microbatches
    if asked is not None and config.gradient_accumulation not in (1, asked):
        raise ConfigError(
            f"gradient_accumulation={config.gradient_accumulation} and schedule.microbatches={asked} both say into how "
            "many microbatches a batch is cut; give one of them, or the same number"
        )
    if "parameters" in config.offload and config.zero.stage in (1, 2):
        raise ConfigError(
            f"offload.parameters={config.offload['parameters']!r} with zero stage {config.zero.stage}, whose values "
            "lie in buckets that are gathered whole: use stage 3, which cuts them, or 0, or offload the optimizer alone"
        )
    if config.zero.stage and any(isinstance(h, ZeRO) for h in config.gradient_handler):
        raise ConfigError(f"zero has stage {config.zero.stage}, and gradient_handler names ZeRO too; give one of them")


def over_one_rank(config: Config) -> Config:
    """The configuration, without a schedule where there is no pipeline, or one of one rank: microbatches accumulate.

    So a training goes on without its pipeline, and no key beside `parallel` has to change.
    """
    if config.schedule is None or pipeline_size(config.parallel) != 1:
        return config
    if make_schedule(config.schedule.name, ranks=2, microbatches=4).asynchronous:
        raise ConfigError(
            f"schedule={config.schedule.name!r} steps within a batch, and a pipeline of one rank does not: leave the "
            "schedule out, and make batches as small as its microbatches"
        )
    parts = config.schedule.microbatches or config.gradient_accumulation
    return replace(config, schedule=None, gradient_accumulation=parts)


def pipeline_size(parallel: Mapping[str, Any]) -> object:
    """The ranks of the pipeline that the `parallel` dict of a configuration asks for, as it says."""
    pipeline = parallel.get("pipeline", 1)
    if isinstance(pipeline, Mapping):
        each = pipeline.get("tensor")
        return pipeline.get("size", len(each) if isinstance(each, Sequence) else 1)
    return pipeline


def _bare(check: Check) -> Check:
    return lambda where, value: check(where.lstrip("."), value)


def load(source: Any, settings: Sequence[str] = ()) -> Config:
    """Read and check a configuration.

    Parameters
    ----------
    source : Config, dict, str or Path
        The configuration itself, the path of a Python file, or the name of a shipped example such as "digits".
    settings : sequence of str
        Values to replace, such as "parallel.tensor.mode=2d", as on the command line.

    Raises
    ------
    ConfigError
        If the file is missing or fails, or the configuration does not pass `check`.
    """
    if isinstance(source, Config):
        if settings:
            raise ConfigError("settings replace values of a dict or a file, not of a Config that is checked already")
        return source
    values = source if isinstance(source, Mapping) else read(source)
    return check(override(values, settings))


def read(path: str | Path) -> dict[str, Any]:
    """Return the variables of a Python file, but for modules, functions, classes and names with an underscore.

    A `.npz` file of samples stands for a configuration that trains a classifier of them.
    """
    if isinstance(path, str | Path) and (kind := Path(path).suffix.lower()) in (".npz", *OTHER_DATA):
        if kind == ".npz":
            return {"data": str(path), **CLASSIFIER}
        raise ConfigError(
            f"{str(path)!r} is no configuration: give a Python file, a shipped example ({', '.join(examples())}), or "
            f"samples as a .npz file; {OTHER_DATA[kind]}"
        )
    file = _found(path)
    try:
        variables = runpy.run_path(str(file), run_name="parlinalg_config")
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno if error.__traceback__ else 0
        line = error.lineno or line if isinstance(error, SyntaxError) else line
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the configuration {file} fails near line {line}: {what}") from error
    return {name: value for name, value in variables.items() if not _aside(name, value)}


def _aside(name: str, value: object) -> bool:
    return name.startswith("_") or isinstance(value, ModuleType) or inspect.isroutine(value) or inspect.isclass(value)


def _found(path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise refuse("a configuration", path, "a dict, or the path of a Python file")
    shipped = examples()
    if str(path) in shipped and not Path(path).is_file():
        return shipped[str(path)]
    if not Path(path).is_file():
        raise ConfigError(
            f"there is no configuration {str(path)!r}: give a Python file, or a shipped example ({', '.join(shipped)})"
        )
    return Path(path)


def examples() -> dict[str, Path]:
    """Return the paths of the shipped examples, by name."""
    return {file.stem: file for file in sorted(EXAMPLES.glob("[a-z]*.py"))}
