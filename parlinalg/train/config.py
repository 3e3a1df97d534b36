"""Configurations: the keys that a training may be given, parsed once into frozen dataclasses.  Pure: no MPI.

A configuration is a Python file whose variables are the keys, a dict of them, or the name of a shipped example.  Every
key is optional.  A new key is a field here: its default, check and meaning; the guide's tables, `--set` and the errors
of unknown keys follow from it.
"""

from __future__ import annotations

import inspect
import math
import runpy
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from parlinalg.errors import ConfigError
from parlinalg.layout import as_cut
from parlinalg.parallel.handlers import ACCUMULATE, KINDS, Handler, ZeRO
from parlinalg.parallel.precision import START
from parlinalg.pipeline.schedules import discover, make_schedule
from parlinalg.schemes import modes, modes_for
from parlinalg.sequence import ORDERS
from parlinalg.train import choices, schema
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.schema import (
    Choice,
    Section,
    Short,
    check_keys,
    choice,
    encodable,
    flag,
    integer,
    key,
    listed,
    listed_divisors,
    one_of,
    optional,
    real,
    refuse,
    section,
    several,
    text,
)
from parlinalg.units import parse_bytes

__all__ = [
    "CheckpointConfig", "Choice", "LossScaleConfig", "OffloadConfig", "ParallelConfig", "PipelineConfig",
    "PrecisionConfig", "SampleConfig", "ScheduleConfig", "SequenceConfig", "TensorConfig", "TrainingConfig",
    "ZeroConfig", "examples", "load", "override", "parse", "read",
]  # fmt: skip

EXAMPLES = Path(__file__).parent.parent / "examples"
#: The configuration that trains a classifier of a `.npz` file which is given in its place.
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
PARTITIONS = ("uniform", "parameters", "flops", "time")
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
LOW = ("bfloat16", "float16", "float32")
MOST_RANKS, MOST_MICROBATCHES = 1_000_000, 100_000
_ranks = integer(1, MOST_RANKS)
_count = integer(1, MOST_MICROBATCHES)
_seed = integer(0, (1 << 64) - 1)
_positive = real(0, above=True)
_size = Short(int, "size", "a number of ranks")
NAMED = "a name, or a dict with `name` and options; see [](#names-and-options)"
KEYS = "a dict with [its keys](#sections-with-their-keys)"


# ---------------------------------------------------------------------------------------------- parallel
@dataclass(frozen=True)
class TensorConfig(Section):
    """Tensor parallelism: the ranks that share each product."""

    SHORT = _size
    size: int | None = key(None, _ranks, "ranks", "with a mode: all remaining ranks; without: 1")
    mode: str | None = key(
        None, one_of(*modes()), f"{', '.join(f'`{m!r}`' for m in modes())}".replace("'", '"'), "none"
    )
    shape: tuple[int, ...] | None = key(
        None, several(_ranks, least=1), "`(r, c)` for 2d, `(d, r, c)` for 2.5d, `(i, j, l)` for 3d; any rectangle",
        "a square or cube; if `size` is not given either, the shape nearest to one",
    )  # fmt: skip
    depth: int | None = key(None, _ranks, "2.5d only: number of square layers; else give `shape`", "none")
    depth_on: str | None = key(
        None, one_of("batch", "k"), '2.5d only: which dim the depth cuts, `"batch"` or `"k"`', '`"batch"`'
    )
    sequence_parallel: bool = key(False, flag, "1d only: `True` cuts the residual stream along the sequence")

    @property
    def ranks(self) -> int | None:
        """The number of ranks that size, shape or the lack of a mode determine; None if they do not."""
        if self.size is None and self.shape is not None:
            return math.prod(self.shape)
        return 1 if self.size is None and self.mode is None else self.size

    def check(self, where: str) -> None:
        if self.mode is not None:
            return
        if (size := self.ranks or 1) > 1:
            raise ConfigError(
                f"{where} has size {size} but no mode: add mode=…, such as tensor=dict(size={size}, mode='1d'); "
                f"{size} ranks allow the modes {modes_for(size)}"
            )
        for name in ("shape", "depth", "depth_on"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{where}.{name}={getattr(self, name)!r} needs a mode, such as mode='2.5d'; give it, or leave "
                    f"{name} out"
                )
        if self.sequence_parallel:
            raise ConfigError(f"{where}.sequence_parallel=True needs mode='1d'")


@dataclass(frozen=True)
class DataParallelConfig(Section):
    """Data parallelism: the ranks that share each batch."""

    SHORT = _size
    size: int | None = key(None, _ranks, "ranks", "all remaining ranks; checked if given")


@dataclass(frozen=True)
class SequenceConfig(Section):
    """Sequence parallelism: the ranks that share each sequence."""

    SHORT = _size
    size: int | None = key(None, _ranks, "ranks; see [](sequences.md)", "1")
    ulysses: int = key(
        1, _ranks, "how many of these ranks exchange heads, a divisor of `size`; over the others attention is a ring"
    )
    order: str | None = key(
        None, one_of(*ORDERS), 'order of the tokens: `"zigzag"`, `"striped"`, `"contiguous"`',
        "zigzag for a causal model's ring, else contiguous",
    )  # fmt: skip

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.size or 1

    def check(self, where: str) -> None:
        if self.size is None and self.ulysses > 1:
            raise ConfigError(
                f"{where}.ulysses={self.ulysses} is some of the ranks of a sequence, and {where}.size is missing: give "
                f"size too, as in {where.rpartition('.')[2]}=dict(size={self.ulysses}, ulysses={self.ulysses})"
            )
        if self.ranks % self.ulysses:
            raise ConfigError(
                f"{where}.ulysses={self.ulysses} does not divide {where}.size={self.ranks}, the ranks of a sequence: "
                f"it may be {listed_divisors(self.ranks)}"
            )


def _partition(where: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        name: str = one_of(*PARTITIONS)(where, value)
        return name
    if not isinstance(value, Sequence):
        raise refuse(where, value, f"one of {listed(PARTITIONS)}, or a list of the layers of each stage")
    counts: tuple[int, ...] = several(integer(0), least=1)(where, value)
    return counts


@dataclass(frozen=True)
class PipelineConfig(Section):
    """Pipeline parallelism: the ranks that follow one another, each with some of the layers."""

    SHORT = _size
    size: int | None = key(None, _ranks, "ranks of the pipeline", "as many as `tensor` lists, or 1")
    partition: str | tuple[int, ...] = key(
        "uniform", _partition,
        'how layers are split into stages: `"uniform"`, `"parameters"`, `"flops"`, `"time"`, or a list of the layers '
        "of each stage; see [](splitting.md)",
    )  # fmt: skip
    tensor: tuple[TensorConfig, ...] | None = key(
        None, several(TensorConfig.parse, least=1),
        "a list: for each pipeline rank its own `parallel.tensor`, with a `size` or `shape`",
        "`parallel.tensor` for all",
    )  # fmt: skip

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.size or len(self.tensor or (0,))

    def check(self, where: str) -> None:
        if self.tensor is not None and len(self.tensor) != self.ranks:
            raise ConfigError(
                f"{where}.tensor lists {len(self.tensor)} grids for a pipeline of {self.ranks} ranks: give "
                f"{self.ranks}, or one for all by parallel.tensor"
            )
        if self.ranks == 1 and self.size is None and not isinstance(self.partition, str) and len(self.partition) > 1:
            raise ConfigError(
                f"{where}.partition={list(self.partition)} splits layers into stages, but the pipeline has one rank: "
                f"give pipeline=dict(size={len(self.partition)}, …), or leave the partition out"
            )
        for p, tensor in enumerate(self.tensor or ()):
            if tensor.mode == "sequence":
                raise ConfigError(
                    f"{where}.tensor[{p}].mode='sequence': sequences are cut alike in the whole pipeline, by "
                    "parallel.sequence=dict(size=…)"
                )


@dataclass(frozen=True)
class ParallelConfig(Section):
    """The dimensions of the mesh: world = data × pipeline × sequence × tensor."""

    data: DataParallelConfig = section(
        DataParallelConfig, "ranks that share the batch", "all remaining ranks; checked if given"
    )
    pipeline: PipelineConfig = section(
        PipelineConfig, "ranks of the pipeline, each with some of the layers, or a dict with the keys below", "1"
    )
    sequence: SequenceConfig = section(
        SequenceConfig, "ranks that share each sequence, or a dict with the keys below", "1"
    )
    tensor: TensorConfig = section(TensorConfig, "ranks that share each product, or a dict with the keys below", "1")
    experts: int | None = key(
        None, _ranks, "data parallel ranks, next to one another, over which a mixture's experts are cut; groups of so "
        "many hold copies (Megatron-LM: `expert_model_parallel_size`, DeepSpeed: `ep_size`); see [](experts.md)",
        "all of them",
    )  # fmt: skip
    auto: bool = key(
        False, flag, '`True`: `parlinalg train` chooses what is not given here when it starts; `parallel="auto"` '
        "leaves all to it. See [](planning.md)",
    )  # fmt: skip

    @classmethod
    def expand(cls, value: object) -> object:
        if isinstance(value, str):
            if value != "auto":
                raise refuse("parallel", value, "'auto', or a dict with the keys data, pipeline, sequence, tensor")
            return {"auto": True}
        return super().expand(value)

    def check(self, where: str) -> None:
        if self.tensor.mode == "sequence" and self.sequence.size is not None:
            raise ConfigError(
                f"{where}.tensor.mode='sequence' is the short form of {where}.sequence: give sequence=dict(size=…) "
                "alone, and tensor another mode, or none"
            )
        if self.pipeline.tensor is not None and self.tensor != TensorConfig():
            raise ConfigError(
                f"{where}.tensor and {where}.pipeline.tensor are both given: the one is of all ranks of the pipeline, "
                "the other of each; give one of them"
            )


# ---------------------------------------------------------------------------------------------- how steps are made
@dataclass(frozen=True)
class ScheduleConfig(Section):
    """The order of work in a pipeline."""

    SHORT = Short(str, "name", "a name")
    name: str = key(
        "1f1b", one_of(*sorted(discover())),
        f"{', '.join(f'`{n!r}`' for n in sorted(discover()))}; see [](pipelines/index.md)".replace("'", '"'),
    )  # fmt: skip
    microbatches: int | None = key(
        None, _count, "microbatches per batch",
        "`gradient_accumulation` if above 1, else the number of pipeline ranks",
    )  # fmt: skip
    chunks: int | None = key(None, _count, "stages per rank, for `interleaved`", "2")
    every: int | None = key(
        None,
        _count,
        "microbatches per optimizer step, for the asynchronous schedules",
        "chosen by the schedule",
    )


@dataclass(frozen=True)
class LossScaleConfig(Section):
    """A dynamic scale of the loss: it doubles after good steps, and halves where a gradient overflows."""

    start: float = key(START, _positive, "the first scale", "65,536")
    growth_every: int = key(2000, integer(1), "steps in a row without overflow after which it doubles", "2,000")
    least: float = key(1.0, _positive, "the smallest scale")
    most: float = key(2.0**24, _positive, "the largest scale", "2²⁴")


def _low(where: str, value: Any) -> str:
    name = SHORT_NAMES.get(value, value) if isinstance(value, str) else ""
    if name not in LOW:
        raise refuse(where, value, f"one of {listed((*SHORT_NAMES, *LOW))}, or None for none")
    return name


def _loss_scale(where: str, value: Any) -> LossScaleConfig | float:
    if isinstance(value, Mapping):
        return LossScaleConfig.parse(where, value)
    if isinstance(value, str):
        if value == "dynamic":
            return LossScaleConfig()
        raise refuse(where, value, "'dynamic', a dict with its options, a number that stays, or None")
    constant: float = _positive(where, value)
    return constant


def _communicate(where: str, value: Any) -> str:
    value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    found: str = one_of("16", "32", "bfloat16", "float16", "float32")(where, value)
    return "float32" if found == "32" else found


@dataclass(frozen=True)
class PrecisionConfig(Section):
    """Mixed precision."""

    SHORT = Short(str, "dtype", "the name of a dtype")
    dtype: str | None = key(
        None, _low, 'dtype of weights, gradients and arithmetic: `"bf16"`, `"fp16"` or `"float32"`; the `dtype` of '
        "the configuration is then the dtype of the masters, the weights that the optimizer keeps",
        "none: no mixed precision",
    )  # fmt: skip
    loss_scale: LossScaleConfig | float | None = key(
        None, _loss_scale, '`"dynamic"`, a dict with the keys of `loss_scale`, a fixed number, or `None`',
        '`"dynamic"` for fp16, else none',
    )  # fmt: skip
    communicate: str | None = key(
        None, _communicate, "the dtype in which gradients travel: 16 or 32 bits", "the gradients' own dtype"
    )

    @classmethod
    def expand(cls, value: object) -> object:
        given = super().expand(value)
        if isinstance(given, Mapping):
            dtype = given.get("dtype")
            if isinstance(dtype, str) and dtype in ("fp16", "float16"):
                return {"loss_scale": "dynamic", **given}
        return given

    @classmethod
    def parse(cls, where: str, value: object) -> Self:
        found = super().parse(where, value)
        if found.communicate != "16":
            return found
        return replace(found, communicate=found.dtype if found.dtype in ("bfloat16", "float16") else "bfloat16")


def _stage(where: str, value: Any) -> int:
    try:
        stage: int = integer(0, 3)(where, value)
    except ConfigError:
        meanings = "0 (off), 1 (optimizer states), 2 (gradients too) or 3 (parameters too)"
        raise refuse(where, value, meanings) from None
    return stage


@dataclass(frozen=True)
class ZeroConfig(Section):
    """Sharding over the data parallel ranks and those that share a sequence; see `parlinalg.parallel.ZeRO`."""

    SHORT = Short(int, "stage", "a stage")
    stage: int = key(
        0, _stage, "1 shards the optimizer's states, 2 also gradients, 3 also parameters; 0 shards nothing. Without "
        "data parallel ranks and ranks that share a sequence it does nothing, and the opening lines report that",
    )  # fmt: skip
    within: int | None = key(
        None, integer(1), "data parallel ranks per sharding group, e.g. those of a node; groups hold copies (FSDP: "
        "HYBRID_SHARD), and so do the ranks that share a sequence",
        "all data parallel ranks, with those that share a sequence, are one group",
    )  # fmt: skip
    accumulate: str = key(
        "reduce-scatter", one_of(*ACCUMULATE),
        'stages 2 and 3, gradients of microbatches: `"reduce-scatter"` each, or hold them unsharded (`"whole"`)',
    )  # fmt: skip
    overlap_gather: bool = key(
        False, flag, "`True`: gathers of the values that a step has updated go on in the next forward pass "
        "(Megatron-LM: `--overlap-param-gather`)",
    )  # fmt: skip

    def check(self, where: str) -> None:
        if self.overlap_gather and not self.stage:
            raise ConfigError(f"{where}.overlap_gather without a stage: nothing is gathered; add stage=1, 2 or 3")


def _handlers(where: str, value: Any) -> tuple[Handler, ...]:
    """Check a list of dicts, each with a `type` and that handler's options."""
    return tuple(several(_handler)(where, [] if value is None else value))


def _handler(where: str, value: Any) -> Handler:
    given = {"type": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or "type" not in given:
        raise refuse(where, value, f"a dict with a type, one of {listed(KINDS)}")
    name = given["type"]
    if not isinstance(name, str) or name not in KINDS:
        raise refuse(f"{where}.type", name, f"one of {listed(KINDS)}")
    options: dict[str, Any] = {option: v for option, v in given.items() if option != "type"}
    check_keys(f"{where} ({name})", options, [f.name for f in fields(KINDS[name])])
    lacking = [repr(f.name) for f in fields(KINDS[name]) if f.default is MISSING and f.name not in options]
    if lacking:
        raise ConfigError(f"{where} ({name}) needs {' and '.join(lacking)}")
    axes = options.get("axes", "")
    if not isinstance(axes, str):
        options["axes"] = tuple(several(text, least=1)(f"{where}.axes", axes))
    try:
        made = KINDS[name](**options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if isinstance(made, ZeRO) and made.stage == 3:
        raise ConfigError(f"{where}: stage 3 cuts the weights of the model: use zero=dict(stage=3), and leave this out")
    return made


def _memory(where: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    found: int = integer(1)(where, value)
    return found


_level = one_of("host", "disk")


@dataclass(frozen=True)
class OffloadConfig(Section):
    """States, values and activations that are kept on a disk or in host memory."""

    optimizer: str | None = key(None, _level, 'optimizer states: `"disk"` or, from a GPU, `"host"`', "in memory")
    activations: str | None = key(
        None, _level, "arrays that the tape saves for the backward pass: the same choices", "in memory"
    )
    parameters: str | None = key(None, _level, "parameters with their gradients: the same choices", "in memory")
    gradients: str | None = key(None, _level, "gradients alone: the same choices", "in memory")
    path: str | None = key(
        None, text, "a folder on a disk that no other run uses",
        "`offload` in the folder of the results; `initialize` needs one",
    )  # fmt: skip
    memory: int | None = key(
        None, _memory, 'memory limit per rank, e.g. `"4GiB"`; what to offload is chosen to meet it, in a pipeline for '
        "each stage; the opening lines report it", "no limit",
    )  # fmt: skip

    def __bool__(self) -> bool:
        return self != OffloadConfig()

    def check(self, where: str) -> None:
        if set(self.given()) == {"path"}:
            raise ConfigError(f"{where} has a path, and nothing to write there: add optimizer='disk', or memory='4GiB'")


# ---------------------------------------------------------------------------------------------- what is written
@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When checkpoints are made, and which of them are kept."""

    SHORT = Short(int, "every", "a number of steps, or False for none")
    every: int | None = key(
        None, integer(1), "steps between checkpoints", "one at the end, and when a signal stops the training"
    )
    keep: int | None = key(3, optional(integer(1)), "how many of the latest are kept; `None`: all")
    best: str | None = key(
        None, text, 'a metric of the held-out data, such as `"validation_loss"`: its best value so far is saved as a '
        "checkpoint as well, which is kept until a later one is better", "none",
    )  # fmt: skip
    background: bool = key(True, flag, "`True`: files are written while training goes on")
    on: bool = key(True, flag, "`False`: no checkpoints; `checkpoint=False` is short for it")

    @classmethod
    def expand(cls, value: object) -> object:
        return {"on": value} if isinstance(value, bool) else super().expand(value)

    def __str__(self) -> str:
        if not self.on:
            return "none"
        often = "at the end" if self.every is None else f"every {self.every} steps and at the end"
        stay = "all stay" if self.keep is None else f"the last {self.keep} stay" if self.keep > 1 else "the last stays"
        return f"{often}; {stay}" + (f", and where {self.best} is the best" if self.best else "")


@dataclass(frozen=True)
class SampleConfig(Section):
    """The text that a language model writes at the end."""

    prompt: str = key("\n", encodable, "the text to continue", "a newline")
    max_new_tokens: int = key(500, integer(0), "number of tokens to write; 0: no sample")
    temperature: float = key(
        0.8, real(0), "temperature of the distribution that tokens are drawn from; 0: the likeliest token"
    )
    top_k: int | None = key(None, integer(1), "draw among this many likeliest tokens", "all")
    top_p: float | None = key(
        None, real(0, 1, above=True), "draw among the likeliest tokens that sum to this probability", "all"
    )
    seed: int | None = key(None, _seed, "seed of the sample", "the configuration's `seed`")


# ---------------------------------------------------------------------------------------------- all of it
@dataclass(frozen=True)
class TrainingConfig(Section):
    """A parsed configuration; the guide's page on configurations lists its keys."""

    parallel: ParallelConfig = section(
        ParallelConfig, 'how the ranks are used, or `"auto"`; see [](#parallel-how-the-ranks-are-used)', "data parallel"
    )
    machine: str | None = key(
        None, text, 'with `parallel="auto"`: the machine to plan for, a shipped one such as `"a100"` or the path of a '
        "`.toml` file; see [](machines.md)", "this one, measured once",
    )  # fmt: skip
    backend: str = key(
        "auto", one_of("auto", "numpy", "cupy"), '`"auto"`, `"numpy"`, `"cupy"`',
        '`"auto"`: CuPy where every rank has a GPU',
    )  # fmt: skip
    dtype: str = key(
        "float32", one_of("float32", "float64", "bfloat16", "float16"),
        '`"float32"`, `"float64"`, `"bfloat16"`, `"float16"`: dtype of weights and arithmetic; 16-bit floats are '
        "summed in float32. With `precision`: dtype of the masters, the weights that the optimizer keeps",
    )  # fmt: skip
    seed: int = key(0, _seed, "seed of weights, order of samples, dropout, split")
    model: Choice = key(Choice("mlp", {}), choice(choices.MODELS, default="mlp"), NAMED, "`mlp`; `gpt` for text")
    data: Choice = key(Choice("digits", {}), choices.data, NAMED, "`digits`; `text` if the model reads text")
    optimizer: Choice = key(Choice("adamw", {}), choice(choices.OPTIMIZERS, default="adamw"), NAMED, "`adamw`")
    lr_schedule: Choice = key(Choice("constant", {}), choices.lr_schedule, NAMED, "`constant`")
    criterion: Choice = key(
        Choice("cross_entropy", {}), choice(choices.CRITERIA, default="cross_entropy"), NAMED, "`cross_entropy`"
    )
    epochs: int = key(10, integer(1), "passes over the training data")
    steps: int | None = key(None, integer(1), "optimizer steps, instead of `epochs`")
    batch_size: int = key(
        64, integer(1), "samples per step, over all ranks and microbatches; all that there are where these are fewer, "
        "and the last step of an epoch takes what is left",
    )  # fmt: skip
    gradient_accumulation: int = key(
        1, _count, "**with `parlinalg train`: microbatches that each batch of `batch_size` is cut into; with "
        "[`initialize`](engine.md): loader batches per optimizer step** (as in DeepSpeed)",
    )  # fmt: skip
    clip_grad_norm: float | None = key(
        None, _positive, "the largest norm of the gradient of all parameters", "no clipping"
    )
    clip_grad_value: float | None = key(
        None, _positive, "the largest element of the gradient, instead of the norm", "no clipping"
    )
    skip_nonfinite: bool = key(
        False, flag, "`True`: a step whose loss or gradient is not finite is skipped on all ranks, and counted; with a "
        "loss scale it always is. `False`: a loss that is not finite ends the training",
    )  # fmt: skip
    precision: PrecisionConfig = section(
        PrecisionConfig, f'mixed precision: `"bf16"`, `"fp16"`, or {KEYS}; see [](precision.md)', "none"
    )
    zero: ZeroConfig = section(
        ZeroConfig, f"what data and sequence ranks shard: a stage, or {KEYS}; see [](zero.md)", "0"
    )
    gradient_handler: tuple[Handler, ...] = key(
        (), _handlers, "a list of dicts with a `type`: `DataParallel`, `SequenceParallel`, `SharedParameters`, `ZeRO`; "
        "see [](data_parallel.md)", "inferred from layouts",
    )  # fmt: skip
    offload: OffloadConfig = section(
        OffloadConfig, f"what rests on a disk or in host memory: {KEYS}; see [](offload.md)", "nothing"
    )
    schedule: ScheduleConfig | None = key(
        None, ScheduleConfig, f"schedule of a pipeline: a name, or {KEYS}; see [](pipelines/index.md)",
        '`"1f1b"` with a pipeline',
    )  # fmt: skip
    validate_every: int | None = key(
        None,
        integer(1),
        "steps between evaluations on the held-out data; one follows the last step in any case",
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, f"when checkpoints are made and which are kept: {KEYS}, a number of "
        "steps, or `False` for none; see [](checkpoints.md)", "one at the end, and when a signal stops the training",
    )  # fmt: skip
    sample: SampleConfig = section(SampleConfig, f"how a language model writes its sample: {KEYS}", "")

    @property
    def model_dtype(self) -> str:
        """The dtype of the model's weights and arithmetic."""
        return self.precision.dtype or self.dtype

    def microbatches(self, pipeline: int) -> int:
        """Return into how many microbatches a step's batch is cut, for so many ranks of the pipeline."""
        if self.schedule is not None and self.schedule.microbatches is not None:
            return self.schedule.microbatches
        return self.gradient_accumulation if self.gradient_accumulation > 1 else pipeline

    @property
    def in_memory(self) -> bool:
        """True if nothing is offloaded."""
        return not self.offload

    def steps_of(self, batches: int) -> int:
        """Return the steps to make, each of a batch, where an epoch has so many batches."""
        return self.epochs * batches if self.steps is None else self.steps

    def writing_to(self, folder: Path) -> TrainingConfig:
        """Return the configuration with files of the training itself in a folder, unless it names another."""
        if not self.offload or self.offload.path is not None:
            return self
        return replace(self, offload=replace(self.offload, path=str(folder / "offload")))

    def check(self, where: str) -> None:
        if self.precision.dtype is not None and self.dtype not in ("float32", "float64"):
            raise ConfigError(
                f"with precision={self.precision.dtype!r} the optimizer keeps weights of dtype={self.dtype!r}: give "
                "dtype='float32' or 'float64', or leave precision out for a model that is in 16 bits throughout"
            )
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise ConfigError(
                f"clip_grad_norm={self.clip_grad_norm} and clip_grad_value={self.clip_grad_value}: the norm would be "
                "of what the other clips; give one of them"
            )
        asked = None if self.schedule is None else self.schedule.microbatches
        if asked is not None and self.gradient_accumulation not in (1, asked):
            raise ConfigError(
                f"gradient_accumulation={self.gradient_accumulation} and schedule.microbatches={asked} both say into "
                "how many microbatches a batch is cut; give one of them, or the same number"
            )
        if self.offload.parameters is not None and self.zero.stage in (1, 2):
            raise ConfigError(
                f"offload.parameters={self.offload.parameters!r} with zero stage {self.zero.stage}, whose values are "
                "in buckets that are gathered unsharded: use stage 3, which cuts them, or 0, or offload the optimizer"
            )
        if self.zero.stage and any(isinstance(h, ZeRO) for h in self.gradient_handler):
            raise ConfigError(
                f"zero has stage {self.zero.stage}, and gradient_handler names ZeRO too; give one of them"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        """Raise a ConfigError if `parallel.experts` contradicts the model."""
        ranks, options = self.parallel.experts, self.model.options
        if ranks is None:
            return
        count = options.get("num_local_experts")
        if count is None and self.model.name in LANGUAGE:
            raise ConfigError(
                f"parallel.experts={ranks} says over how many data parallel ranks experts are cut, and the model has "
                "none: give model=dict(num_local_experts=…), or leave parallel.experts out"
            )
        if count is not None and ranks > count:
            raise ConfigError(
                f"parallel.experts={ranks} data parallel ranks for {count} experts leaves ranks without one: give at "
                f"most {count}"
            )
        if "data" not in as_cut(axis := options.get("expert_axis", "auto")) and axis != "auto":
            raise ConfigError(
                f"parallel.experts={ranks} cuts experts over data parallel ranks, and model.expert_axis={axis!r} does "
                "not: leave one of them out"
            )


# ---------------------------------------------------------------------------------------------- reading
def parse(values: Mapping[str, Any]) -> TrainingConfig:
    """Return a checked configuration from a dict of its keys.

    Raises
    ------
    ConfigError
        If a key is unknown at any level (the message names the nearest right one), a value is out of range, or keys
        contradict each other.
    """
    if not isinstance(values, Mapping):
        raise refuse("a configuration", values, "a dict, or the path of a Python file")
    for name in values:
        if name in ("pipeline", "sequence", "tensor"):
            raise ConfigError(f"the configuration has an unknown key {name!r}: write it inside parallel=dict({name}=…)")
    config = _matched(TrainingConfig.parse("", values), values)
    return _without_pipeline(config) if config.parallel.pipeline.ranks == 1 else config


def _matched(config: TrainingConfig, given: Collection[str]) -> TrainingConfig:
    """Return the configuration with data that the model reads: each follows from the other where it is left out."""
    if "data" not in given and config.model.name in LANGUAGE:
        config = replace(config, data=Choice("text", {}))
    if "model" not in given and config.data.name == "text":
        config = replace(config, model=Choice("gpt", {}))
    if (config.model.name in LANGUAGE) != (config.data.name == "text"):
        raise ConfigError(
            f"the model {config.model.name!r} does not read the data {config.data.name!r}: text is for "
            f"{listed(LANGUAGE)}, digits and npz are for 'mlp'"
        )
    return config


def _without_pipeline(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the microbatches of its schedule accumulated, for a pipeline of one rank.

    So a training goes on without its pipeline, and no key beside `parallel` has to change.
    """
    if config.schedule is None:
        return config
    if make_schedule(config.schedule.name, ranks=2, microbatches=4).asynchronous:
        raise ConfigError(
            f"schedule={config.schedule.name!r} steps within a batch, and a pipeline of one rank does not: leave the "
            "schedule out, and make batches as small as its microbatches"
        )
    parts = config.schedule.microbatches or config.gradient_accumulation
    return replace(config, schedule=None, gradient_accumulation=parts)


def override(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of a configuration with some replaced, by settings such as "optimizer.lr=0.01"."""
    return schema.override(TrainingConfig, values, settings)


def load(source: Any, settings: Sequence[str] = ()) -> TrainingConfig:
    """Read and check a configuration.

    Parameters
    ----------
    source : TrainingConfig, dict, str or Path
        The configuration itself, the path of a Python file, or the name of a shipped example such as "digits".
    settings : sequence of str
        Values to replace, such as "parallel.tensor.mode=2d", as on the command line.

    Raises
    ------
    ConfigError
        If the file is missing or fails, or the configuration does not pass `parse`.
    """
    if isinstance(source, TrainingConfig):
        if settings:
            raise ConfigError(
                "settings replace values of a dict or a file, not of a TrainingConfig, which is parsed already"
            )
        return source
    values = source if isinstance(source, Mapping) else read(source)
    return parse(override(values, settings))


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
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)]
        lines += [error.lineno] if isinstance(error, SyntaxError) and error.filename == str(file) else []
        near = f" near line {lines[-1]}" if lines else ""
        raise ConfigError(f"the configuration {file} fails{near}: {type(error).__name__}: {error}") from error
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
