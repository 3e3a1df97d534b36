"""The search for the fastest way to train a model on so many ranks of a machine.

A candidate is a configuration: data × pipeline × sequence × tensor ranks in all shapes, with a schedule, microbatches,
ZeRO, recomputation and dtype where the given configuration leaves them open.  Each goes through up to four looks:

1. A bound without a trace.  Products of a step are at least the model's linear ones, which the ranks share, at the
   machine's best rate.  Bytes at rest are at least the mean of what the ranks hold together.
2. A bound by parts: the model's distinct layers are traced on one copy of the model, without ZeRO.  A rank runs its
   layers one after the other for each microbatch, so that their times add up to less than the step (`time_bound`).
3. An estimate by parts, with reductions, updates and the pipeline's simulation.
4. The trace of all layers of every distinct stage, timed by `timeline` or `pipeline_timeline`: this decides.

Candidates are looked at in the order of their bounds.  Where all are within reach the search ends when no bound is
below the time of the last of the best, so that its answer is that of tracing everything (`TrainingPlan.proven`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, SupportsIndex

from parlinalg.errors import ConfigError, LayoutError, ParlinalgError, PlanError, ValuesNeeded
from parlinalg.grid import factorizations
from parlinalg.matmul.planner import Factors, MatmulPlan, Seconds
from parlinalg.pipeline.run import AHEAD
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.simulate import Costs, Dependencies
from parlinalg.planning.machine import OFFLOADS, Machine, load_machine
from parlinalg.planning.parts import Between, Inputs, Part, declared, layer_keys, on_their_way, trace_part
from parlinalg.planning.timeline import Stage, Timeline, pipeline_timeline, timeline
from parlinalg.planning.trace import Gemm, Kernel, Start, Trace, Wait
from parlinalg.schemes import for_mode
from parlinalg.schemes.words import scheme_words
from parlinalg.sequence import ORDERS
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import (
    DataParallelConfig,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ScheduleConfig,
    TensorConfig,
    TrainingConfig,
    override,
    parse,
    read,
)
from parlinalg.train.mesh import MeshSpec, resolve
from parlinalg.train.recipes import SIZES
from parlinalg.units import ITEMSIZE, format_bytes, parse_bytes

__all__ = ["Candidate", "Planned", "TrainingPlan", "plan_training"]

ALL, MANY = 64, 400  # ranks and candidates up to which every one is within reach
TRACES = 300  # of parts, for more than that
BEAM = 4  # of the fastest ways to use the ranks that are varied in a round
NEAR = 8  # neighbours of the fastest that are estimated in a round
FULL = 6  # candidates that are traced there in full
ROUNDS = 6  # of those near the fastest
MOST_LEAST = 40  # candidates that are traced to say the least memory that would do
WHOLE = 4096  # microbatches × ranks of a pipeline up to which a bound simulates all of them
LONG = 12  # equal layers of a stage beyond which only some are traced:
FEW, FEW_ALONE, FEW_CUT = (4, 6), (4, 10), (6, 10)  # so many; where reductions go on beside passes; of ZeRO-3's
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "gpipe")
"""All synchronous ones; pipedream and pipedream-2bw step with weights that are older than the gradients' microbatches,
which is another training, so that they are planned only where the configuration names one.  GPipe holds all
microbatches, but waits for no answer from later stages: where messages take long it is faster than 1F1B."""
RING_ORDERS = ("zigzag", *(order for order in ORDERS if order != "zigzag"))
IMPLIED = {"parameters": ("parameters", "gradients")}
"""The kinds of what is offloaded that take others along."""
Offload = tuple[tuple[str, str], ...]
HOME = ("muon", "shampoo", "soap")  # optimizers with states that lie on one rank of many


# ------------------------------------------------------------------------------------------------ candidates
@dataclass(frozen=True)
class Candidate:
    """One way to use the ranks.

    Attributes
    ----------
    data, pipeline, sequence, ulysses : int
        As in the configuration.
    tensor : TensorConfig
    zero : ZeroConfig
    microbatches : int
    schedule : str or None
    chunks : int or None
    recompute : str or None
        As of the model.
    dtype : str or None
        Of `precision`.
    experts : str or None
        The axis that cuts the experts of a mixture, "none" for no axis; None for what the configuration gives.
    order : str or None
        Of the tokens on a ring; None for what the configuration gives.
    offload : tuple of pairs of str
        What rests elsewhere, "optimizer", "activations", "parameters" or "gradients", and where: "host" or "disk".
    """

    data: int
    pipeline: int
    sequence: int
    ulysses: int
    tensor: TensorConfig
    zero: int
    microbatches: int
    schedule: str | None
    chunks: int | None
    recompute: str | None
    dtype: str | None
    experts: str | None = None
    order: str | None = None
    offload: Offload = ()

    @property
    def frame(self) -> Frame:
        """Return how the ranks are used."""
        return Frame(self.data, self.pipeline, self.sequence, self.ulysses, self.tensor)

    @property
    def width(self) -> int:
        """Ranks of one copy of a stage."""
        return self.sequence * (self.tensor.ranks or 1)

    def form(self) -> str:
        """Return the tensor and sequence parts in a few words: "2D 4×4 × ring 2"."""
        texts = []
        if (t := self.tensor).mode is not None and (t.ranks or 1) > 1:
            shape = "×".join(map(str, t.shape)) if t.shape else str(t.size)
            how = " on k" if t.depth_on == "k" else ""
            texts.append(f"{t.mode.upper()} {shape}{how}" + (" + sequence cuts" if t.sequence_parallel else ""))
        if self.ulysses > 1:
            texts.append(f"Ulysses {self.ulysses}")
        if self.sequence > self.ulysses:
            texts.append(f"ring {self.sequence // self.ulysses}")
        return " × ".join(texts)

    def __str__(self) -> str:
        parts = [f"data {self.data}"] if self.data > 1 else []
        if self.pipeline > 1:
            chunks = f", {self.chunks} chunks" if self.chunks else ""
            parts.append(f"pipeline {self.pipeline} ({self.schedule}{chunks})")
        parts += [self.form()] if self.form() else []
        text = " × ".join(parts) or "one rank"
        options = [f"ZeRO {self.zero}"] * bool(self.zero)
        options += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        options += [f"recompute {self.recompute}"] * (self.recompute is not None)
        options += [str(self.dtype)] * (self.dtype is not None)
        options += [f"experts on {self.experts}"] * (self.experts not in (None, "none"))
        options += [f"{self.order} order"] * (self.order not in (None, "zigzag"))
        for place, where in (("host", "in host memory"), ("disk", "on a disk")):
            kinds = [kind for kind, to in self.offload if to == place]
            options += [f"{_and(kinds)} {where}"] * bool(kinds)
        return ", ".join([text, *options])

    def apply(self, config: TrainingConfig, batch: int) -> TrainingConfig:
        """Return the configuration of this candidate."""
        model = config.model
        if model.name in LANGUAGE:
            options = {k: v for k, v in model.options.items() if k != "recompute"}
            options |= {"recompute": self.recompute} if self.recompute else {}
            options |= {} if self.experts is None else {"expert_axis": self.expert_axis}
            model = replace(model, options=options)
        pipeline = replace(config.parallel.pipeline, size=self.pipeline)
        parallel = ParallelConfig(
            DataParallelConfig(self.data), pipeline if self.pipeline > 1 else PipelineConfig(),
            replace(config.parallel.sequence, size=self.sequence, ulysses=self.ulysses), self.tensor,
        )  # fmt: skip
        if self.order is not None:
            parallel = replace(parallel, sequence=replace(parallel.sequence, order=self.order))
        offload = config.offload
        if self.offload:
            away: dict[str, Any] = dict(self.offload)
            offload = replace(offload, **away)
        schedule = None
        if self.pipeline > 1:
            schedule = ScheduleConfig(str(self.schedule), self.microbatches, self.chunks)
        precision = config.precision
        if self.dtype != precision.dtype:
            precision = PrecisionConfig.parse("precision", self.dtype)
        return replace(
            config, parallel=parallel, model=model, schedule=schedule, batch_size=batch, precision=precision,
            gradient_accumulation=1 if self.pipeline > 1 else self.microbatches,
            zero=replace(config.zero, stage=self.zero), offload=offload,
        )  # fmt: skip

    def values(self, given: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """Return the keys of a configuration file with this candidate's choices in place."""
        values = {name: value for name, value in given.items() if name != "machine"}
        parallel: dict[str, Any] = {"data": self.data}
        if self.pipeline > 1:
            parallel["pipeline"] = {"size": self.pipeline, **_option(given, "pipeline", "partition")}
        if self.sequence > 1:
            order = _option(given, "sequence", "order") if self.order is None else {"order": self.order}
            parallel["sequence"] = {"size": self.sequence, "ulysses": self.ulysses, **order}
        if self.tensor.mode is not None:
            parallel["tensor"] = self.tensor.given()
        values["parallel"] = parallel
        values["batch_size"] = batch
        values.pop("schedule", None)
        values.pop("gradient_accumulation", None)
        if self.pipeline > 1:
            chunks = {"chunks": self.chunks} if self.chunks else {}
            values["schedule"] = {"name": self.schedule, "microbatches": self.microbatches, **chunks}
        elif self.microbatches > 1:
            values["gradient_accumulation"] = self.microbatches
        if "zero" not in given and self.zero:
            values["zero"] = self.zero
        if self.dtype is not None and "precision" not in given:
            values["precision"] = self.dtype
        if self.offload and "offload" not in given:
            values["offload"] = dict(self.offload)
        more: dict[str, Any] = {} if self.recompute is None else {"recompute": self.recompute}
        if self.experts is not None:
            more["expert_axis"] = self.expert_axis
        if more:
            model = given.get("model", "gpt")
            values["model"] = {**({"name": model} if isinstance(model, str) else dict(model)), **more}
        return values

    @property
    def expert_axis(self) -> str | None:
        """`expert_axis` of the model."""
        return None if self.experts == "none" else self.experts

    def note(self) -> dict[str, Any]:
        """Return the choices as what JSON can carry; `from_note` reads them."""
        made = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**made, "tensor": self.tensor.given(), "offload": dict(self.offload)}

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> Candidate:
        """Return the candidate of a note.

        Raises
        ------
        TypeError, ValueError, ConfigError
            If it is no note of a candidate.
        """
        tensor = TensorConfig.parse("tensor", note.get("tensor"))
        return cls(**{**note, "tensor": tensor, "offload": tuple(dict(note.get("offload", ())).items())})


def _option(given: Mapping[str, Any], of: str, name: str) -> dict[str, Any]:
    """Return an option of `parallel.pipeline` or `parallel.sequence` that is given, as a dict; else an empty one."""
    parallel = given.get("parallel")
    own = parallel.get(of) if isinstance(parallel, Mapping) else None
    return {name: own[name]} if isinstance(own, Mapping) and name in own else {}


def _tensors(config: TrainingConfig, ranks: int) -> Iterator[TensorConfig]:
    """Yield all forms of tensor parallelism over so many ranks; forms with an axis of one rank are those of fewer
    axes, and come up there."""
    if ranks == 1:
        yield TensorConfig()
        return
    yield TensorConfig(size=ranks, mode="1d")
    if config.model.name in LANGUAGE:
        yield TensorConfig(size=ranks, mode="1d", sequence_parallel=True)
    for shape in factorizations(ranks, 2):
        if min(shape) > 1:
            yield TensorConfig(mode="2d", shape=tuple(shape))
    for shape in factorizations(ranks, 3):
        if min(shape) > 1:
            yield TensorConfig(mode="2.5d", shape=tuple(shape))
            yield TensorConfig(mode="2.5d", shape=tuple(shape), depth_on="k")
            yield TensorConfig(mode="3d", shape=tuple(shape))


def _shapes(own: TensorConfig, ranks: int) -> Iterator[TensorConfig]:
    """Yield the shapes of a given form over so many ranks, those with axes of one rank among them."""
    if own.depth is not None or own.mode not in ("2d", "2.5d", "3d"):
        yield replace(own, size=ranks)
        return
    for shape in factorizations(ranks, 2 if own.mode == "2d" else 3):
        yield replace(own, shape=tuple(shape))


def _mode_of(tensor: TensorConfig) -> tuple[Any, dict[str, int]]:
    """Return the module of a form of tensor parallelism, and the sizes of its axes."""
    module = for_mode(tensor.mode, depth_on=tensor.depth_on, sequence_parallel=tensor.sequence_parallel or None)
    return module, dict(module.sizes(tensor.ranks or 1, tensor.shape, tensor.depth))


@cache
def divisors(n: int) -> list[int]:
    """Return the numbers that divide n, ascending."""
    return sorted({a for a, _ in factorizations(n, 2)})


def given_offload(config: TrainingConfig) -> Offload:
    """Return what a configuration lets rest elsewhere, by its kinds, and where."""
    kinds = ("optimizer", "activations", "parameters", "gradients")
    places = ((kind, getattr(config.offload, kind)) for kind in kinds)
    return tuple((kind, place) for kind, place in places if place is not None)


def check_offload(config: TrainingConfig, machine: Machine) -> None:
    """Raise a ConfigError if a machine has no place for what a configuration lets rest elsewhere."""
    for kind, place in given_offload(config):
        if getattr(machine, place) is None:
            raise ConfigError(
                f"offload.{kind}={place!r}, but the machine {machine.name} has no table [{place}], which says how fast "
                "and how large that is: add one to its file, or leave this key out"
            )


class Frame(NamedTuple):
    """A way to use the ranks: the sizes of the mesh, and the form of tensor parallelism."""

    data: int
    pipeline: int
    sequence: int
    ulysses: int
    tensor: TensorConfig


class Space:
    """The candidates that a configuration leaves open."""

    def __init__(
        self, config: TrainingConfig, given: Mapping[str, Any], ranks: int, batch: int, depth: int,
        dtypes: Sequence[str],
    ) -> None:  # fmt: skip
        parallel = given.get("parallel") or {}
        self.parallel = dict(parallel) if isinstance(parallel, Mapping) else {}
        self.config, self.given, self.ranks, self.batch, self.depth = config, given, ranks, batch, depth
        self.dtypes = dtypes
        self._numbers: dict[tuple[int, int], int] = {}
        schedule = given.get("schedule")  # a configuration without a pipeline has none
        self.schedule = None if schedule is None else ScheduleConfig.parse("schedule", schedule)
        self.offload = given_offload(config)
        """What the configuration lets rest elsewhere, which all candidates do."""

    def __iter__(self) -> Iterator[Candidate]:
        for frame in self.frames():
            yield from self.steps(frame)

    def __len__(self) -> int:
        """The number of candidates; `len` of 10 million is as quick as of ten."""
        return sum(self.count(frame) for frame in self.frames())

    def frames(self) -> Iterator[Frame]:
        """Yield the ways in which the ranks may be used."""
        ranks, own = self.ranks, self.config.parallel
        for pipeline in [own.pipeline.ranks] if "pipeline" in self.parallel else divisors(ranks):
            if ranks % pipeline or pipeline > self.depth:
                continue
            for sequence, ulysses in self._sequences(ranks // pipeline):
                left = ranks // pipeline // sequence
                for data, tensor in self._data_and_tensor(left):
                    if self.batch % data == 0:
                        yield Frame(data, pipeline, sequence, ulysses, tensor)

    def _sequences(self, ranks: int) -> Iterator[tuple[int, int]]:
        own = self.config.parallel.sequence
        if "sequence" in self.parallel:
            if ranks % own.ranks == 0:
                yield own.ranks, own.ulysses
            return
        yield 1, 1
        if self.config.model.name not in LANGUAGE:
            return
        heads = int(self.config.model.options.get("num_attention_heads", 4))
        for size in divisors(ranks):
            for ulysses in divisors(size):
                if size > 1 and ulysses <= heads:
                    yield size, ulysses

    def _data_and_tensor(self, ranks: int) -> Iterator[tuple[int, TensorConfig]]:
        own = self.config.parallel
        if "tensor" in self.parallel:
            fixed = own.tensor.ranks
            for size in [fixed] if fixed is not None else divisors(ranks):
                if ranks % size == 0 and own.data.size in (None, ranks // size):
                    for tensor in [own.tensor] if fixed is not None else _shapes(own.tensor, size):
                        yield ranks // size, tensor
            return
        for size in divisors(ranks):
            if own.data.size in (None, ranks // size):
                for tensor in _tensors(self.config, size):
                    yield ranks // size, tensor

    def steps(self, frame: Frame) -> Iterator[Candidate]:
        """Yield the candidates that use the ranks in a way."""
        data, pipeline, sequence, ulysses, tensor = frame
        for count in self.counts(frame):
            for name, chunks in self._schedules(pipeline, count):
                for zero, again, dtype, experts, order in itertools.product(
                    self.stages(data), self.recompute, self.dtypes, self._experts(frame), self._orders(frame)
                ):
                    yield Candidate(
                        data, pipeline, sequence, ulysses, tensor, zero, count, name, chunks, again, dtype or None,
                        experts, order, self.offload,
                    )  # fmt: skip

    def count(self, frame: Frame) -> int:
        """Return how many candidates use the ranks in a way."""
        key = frame.data, frame.pipeline
        if key not in self._numbers:
            others = len(self.stages(frame.data)) * len(self.recompute) * len(self.dtypes)
            schedules = sum(len(list(self._schedules(frame.pipeline, n))) for n in self.counts(frame))
            self._numbers[key] = others * schedules
        return self._numbers[key] * len(self._experts(frame)) * len(self._orders(frame))

    def counts(self, frame: Frame) -> list[int]:
        """Return the numbers of microbatches that split the batch evenly."""
        each, pipeline = self.batch // frame.data, frame.pipeline
        if "schedule" in self.given or "gradient_accumulation" in self.given:
            count = self.config.microbatches(pipeline)
            return [count] if each % count == 0 else []
        return [n for n in divisors(each) if n >= pipeline or pipeline == 1]

    def stages(self, data: int) -> list[int]:
        """Return the stages of ZeRO."""
        if "zero" in self.given:
            return [self.config.zero.stage]
        away = dict(self.offload)  # stages 1 and 2 hold values in buckets, and all but 0 share gradients out
        found = [0] if "gradients" in away else [0, 3] if "parameters" in away else [0, 1, 2, 3]
        return found if data > 1 else [0]

    @cached_property
    def recompute(self) -> list[Any]:
        model = self.config.model
        open_ = model.name in LANGUAGE and "recompute" not in model.options
        return [None, "attention", "block"] if open_ else [model.options.get("recompute")]

    def _experts(self, frame: Frame) -> list[str | None]:
        """Return the axes that may cut the experts of a model that has several; None where they are as they are."""
        model = self.config.model
        if "expert_axis" in model.options or int(model.options.get("num_local_experts", 1)) < 2:
            return [None]
        axes = ["data"] * (frame.data > 1) + ["s"] * (frame.sequence > frame.ulysses)
        if (frame.tensor.ranks or 1) > 1:
            axes += [axis for axis, n in _mode_of(frame.tensor)[1].items() if n > 1]
        return [*axes, "none"]

    def _orders(self, frame: Frame) -> Sequence[str | None]:
        """Return the orders of tokens; without a ring every order is the same work for all."""
        return RING_ORDERS if frame.sequence > frame.ulysses and "sequence" not in self.parallel else (None,)

    def _schedules(self, pipeline: int, count: int) -> Iterator[tuple[str | None, int | None]]:
        if pipeline == 1:
            yield None, None
        elif self.schedule is not None:
            yield self.schedule.name, self.schedule.chunks
        else:
            for name in SCHEDULES:
                if name != "interleaved":
                    if name == "chimera" and (pipeline % 2 or count < 2):
                        continue
                    if name != "zb-v" or 2 * pipeline <= self.depth:
                        yield name, None
                    continue
                for chunks in divisors(max(1, self.depth // pipeline)):
                    if chunks > 1 and count % pipeline == 0:
                        yield name, chunks


# ------------------------------------------------------------------------------------------------ looks
@dataclass(frozen=True)
class Planned:
    """A candidate and what it takes.

    Attributes
    ----------
    candidate : Candidate
    config : TrainingConfig
    seconds : float
        Of a step.
    memory : dict of str to int
        Bytes of the fullest rank: weights, gradients, states, activations (all microbatches in flight), buffers.
    words : int
        Elements that a rank of the busiest stage receives in a step.
    across : int
        Bytes of them from groups that span nodes.
    within : int
        Bytes of the others.
    bubble : float
        The idle share of a pipeline.
    causes : dict of str to float
        Shares of the step by cause, the largest first.
    throughput : float
        Tokens a second of a language model, else samples.
    mfu : float
        The model's operations over what the ranks could do at the machine's rate of large products.
    rate : float
        The model's operations a second, of one rank.
    stage : int
        The pipeline rank whose memory is the fullest.
    traced : bool
        False of an estimate by single layers.
    host, disk : int
        Bytes of host memory and on a disk that the rank with the most offloaded takes.
    """

    candidate: Candidate
    config: TrainingConfig
    seconds: float
    memory: Mapping[str, int]
    words: int
    across: int
    within: int
    bubble: float
    causes: Mapping[str, float]
    throughput: float
    mfu: float
    rate: float
    stage: int = 0
    traced: bool = True
    host: int = 0
    disk: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


class Rest(NamedTuple):
    """Bytes of a model at rest."""

    weights: int
    gradients: int
    states: int


def _one_rank(dtype: str | None) -> Candidate:
    return Candidate(1, 1, 1, 1, TensorConfig(), 0, 1, None, None, None, dtype)


class Looks:
    """The looks at candidates, with the traces they have in common."""

    def __init__(self, config: TrainingConfig, ranks: int, machine: Machine, batch: int) -> None:
        self.config, self.ranks, self.batch = config, ranks, batch
        self.inputs = Inputs.of(config)
        self.node = on_node(machine, ranks)
        self.machine = machine.shared_by(self.node)
        self.target = "gpu" if machine.kernels.asynchronous else "cpu"
        self.traces = 0
        self._parts: dict[Any, Part] = {}
        self._runs: dict[tuple[int, str, bool], tuple[float, Mapping[str, float]]] = {}
        self._known: dict[str | None, tuple[list[Any], Any]] = {}
        self._alone: dict[str | None, Rest] = {}
        self._of_model: dict[tuple[str | None, int], bool] = {}
        self._known_figures: dict[tuple[int, bool, bool], Figures] = {}
        self._offloaded: dict[tuple[int, Offload], Part] = {}
        self._last: tuple[Candidate | None, dict[Any, Part]] = None, {}
        self._kept_alive: list[Part] = []  # runs are known by their identities

    @cached_property
    def _quick(self) -> Machine:
        """The machine for bounds: launching is hidden by the device's earlier work, however much there was."""
        if not self.machine.kernels.asynchronous:
            return self.machine
        return replace(self.machine, kernels=replace(self.machine.kernels, overhead=0.0))

    # -------------------------------------------------------------------------------------------- the model
    def _declared(self, dtype: str | None, fewer: int = 0) -> tuple[list[Any], Any]:
        """Return the layers' keys of the model, or of one with fewer layers, and the model, declared on one rank."""
        config = _one_rank(dtype).apply(self.config, 1)
        config = config if not fewer else self._with_fewer(config, fewer)
        model = declared(config, self.inputs)
        return layer_keys(model), model

    def _with_fewer(self, config: TrainingConfig, fewer: int) -> TrainingConfig:
        layers = int({**SIZES, **config.model.options}["num_hidden_layers"]) - fewer
        model = replace(config.model, options={**config.model.options, "num_hidden_layers": layers})
        return replace(config, model=model)

    def keys(self, dtype: str | None) -> list[Any]:
        """Return the keys of the model's layers: layers with equal keys take equal work."""
        return self._known_model(dtype)[0]

    def _known_model(self, dtype: str | None) -> tuple[list[Any], Any]:
        if dtype not in self._known:
            self._known[dtype] = self._declared(dtype)
        return self._known[dtype]

    def linear_flops(self, dtype: str | None) -> float:
        """Return the operations of a step's products with weights."""
        return _linear_flops(self._known_model(dtype)[1], self.batch, self.inputs)

    def alone(self, dtype: str | None) -> Rest:
        """Return the bytes of the whole model at rest on one rank.

        Those of equal layers are traced of one and two: each further one adds its own parameters, gradients and states.
        """
        if dtype not in self._alone:
            keys = self.keys(dtype)
            first, last = _alike(keys, 0, len(keys))
            config = _one_rank(dtype).apply(self.config, 1)
            found = []
            for few in (1, 2):
                ends = (0, len(keys)), (first + few, last)
                more = self._fewer(config, *ends) if last - first > few else None
                if more is None:
                    found = [trace_part(config, self.inputs, 1, 1, node=1, target=self.target)]
                    break
                found.append(trace_part(more[0], self.inputs, 1, 1, node=1, target=self.target))
            one, two, times = found[0], found[-1], last - first - 1
            pairs = ((one.weights, two.weights), (one.gradients, two.gradients), (one.states, two.states))
            self._alone[dtype] = Rest(*(x + times * (y - x) for x, y in pairs))
        return self._alone[dtype]

    def _fewer(
        self, config: TrainingConfig, layers: tuple[int, int], skip: tuple[int, int]
    ) -> tuple[TrainingConfig, tuple[int, int]] | None:
        """Return a model without the layers that a trace would leave out, and where its layers are there.

        To declare 96 layers for the trace of one takes longer than the trace.  None if there is no such model: if the
        layers differ, or the model has no number of layers.
        """
        if config.model.name not in LANGUAGE:
            return None
        keys = self.keys(config.precision.dtype)
        first, last = _alike(keys, 0, len(keys))
        (a, b), (c, d) = layers, skip
        own = [i for i in range(a, b) if not c <= i < d]
        count = sum(first <= i < last for i in own)
        whole = not count and a < last and b > first  # all of them are skipped
        if whole or any(not first <= i < last for i in range(max(a, c), min(b, d))):
            return None
        drop = last - first - max(1, count)
        if drop < 1 or last == len(keys):
            return None
        known = config.precision.dtype, drop
        if known not in self._of_model:
            try:
                same = self._declared(config.precision.dtype, drop)[0] == [*keys[:first], *keys[first + drop :]]
            except ParlinalgError:
                same = False
            self._of_model[known] = same
        if not self._of_model[known]:
            return None
        begin = a if a <= first else first if a < last else a - drop
        end = b if b <= first else first + count if b <= last else b - drop
        return self._with_fewer(config, drop), (begin, end)

    @cached_property
    def model_flops(self) -> float:
        """Operations of a step that the model needs."""
        return _flops(self._known_model(None)[1], self.batch, self.inputs)

    @property
    def depth(self) -> int:
        """The layers that a pipeline cuts."""
        return len(self.keys(self.config.precision.dtype))

    # -------------------------------------------------------------------------------------------- a first guess
    @cached_property
    def _guesses(self) -> Guesses:
        return Guesses(self)

    def guess(self, frame: Frame, counts: Sequence[int], recompute: Sequence[str | None], limit: int) -> Guess:
        """Return a guess of the fastest way to use the ranks in a frame; see `Guesses`."""
        return self._guesses(frame, counts, recompute, limit)

    def kept_by(self, recompute: str | None) -> tuple[float, float]:
        """Return the bytes that a sample keeps between its passes in a middle layer on one rank, and those of its
        output."""
        dtype = self.config.precision.dtype
        keys = self.keys(dtype)
        middle = len(keys) // 2
        key = "kept", recompute
        if key not in self._parts:
            config = Candidate(1, 1, 1, 1, TensorConfig(), 0, 1, None, None, recompute, dtype).apply(self.config, 1)
            given = None
            for i in sorted({0, middle} if middle else {0}):
                fewer, layers = self._fewer(config, (i, i + 1), (0, 0)) or (config, (i, i + 1))
                self._parts[key] = trace_part(
                    fewer, self.inputs, 1, 1, layers=layers, given=given, node=1, target=self.target, update=False
                )
                given = self._parts[key].output
        return float(self._parts[key].kept), float(self._parts[key].message)

    # -------------------------------------------------------------------------------------------- bounds
    def static_bound(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, without a trace.

        All ranks together make at least the products of the model with its weights, forward and twice backward: those
        of attention's pairs are left out, as masked ones may be skipped.  One rank makes at least the mean, each
        product no faster than the fastest of the machine.
        """
        flops = self.linear_flops(c.dtype)
        dtype = c.dtype or self.config.dtype
        return flops / self.ranks / best_rate(self.machine, dtype)

    def memory_bound(self, c: Candidate) -> int:
        """Return bytes that the fullest rank of a candidate cannot be below, without a trace.

        What may be offloaded aside, each weight, gradient and state is on at least one of the pipeline × tensor ranks
        of a copy of the model; ZeRO's stages share states, gradients and weights between the data parallel ranks, and
        experts and matrix-wise optimizers may share theirs between any.  The fullest rank holds at least the mean.
        """
        part = self.alone(c.dtype)
        options = self.config.model.options
        ranks = c.pipeline * (c.tensor.ranks or 1)
        if int(options.get("num_local_experts", 1)) > 1:
            ranks = self.ranks

        def share(stage: int) -> int:
            return min(self.ranks, ranks * c.data) if c.zero >= stage else ranks

        states = self.ranks if self.config.optimizer.name in HOME else share(1)
        kinds = (*self.kinds(c), *dict(c.offload))
        found = 0 if "optimizer" in kinds else part.states // states
        found += 0 if "parameters" in kinds else part.weights // share(3)
        return found + (0 if self.settles(c) and {"parameters", "gradients"} & {*kinds} else part.gradients // share(2))

    def time_bound(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, by traces of its distinct layers.

        A rank runs its layers one after the other, forward and backward, once for each microbatch.  Within them it
        computes and waits as in a trace without other ranks' copies, ZeRO or reductions, which only add.  A pipeline's
        schedule is simulated with the sums of its stages' layers, without reductions and updates and with the quicker
        messages of those within and between nodes.  Each end in a simulation is the largest of sums of costs, so that
        it grows with every cost: one with costs that are too low is a bound of one with the costs as they are.  Where
        ranks of a pipeline leave their cores to others, only what all compute together is certain.
        """
        crowd = self.machine.crowd(self.node, self.ranks)
        if c.pipeline > 1 and crowd > 1 and self.machine.overlap.receiving < 1:
            return self.static_bound(c) * crowd
        parts = self._layers(c, bound=True)
        forward = [self.seconds(part, "forward", quick=True) for part in parts]
        backward = [self.seconds(part, "backward", quick=True) for part in parts]
        least = max(self.static_bound(c), c.microbatches * (sum(forward) + sum(backward)) / c.pipeline)
        if c.pipeline == 1:
            return least
        spec, config = self._spec(c) if c.microbatches * c.pipeline <= WHOLE else self._short(c)
        schedule, counts = self._schedule(spec, config)
        cuts = _cuts(counts)
        places = (2,) if self.machine.network is None else (1, 2)
        costs = Costs(
            forward=[sum(forward[a:b]) for a, b in cuts], backward=[sum(backward[a:b]) for a, b in cuts],
            weight=[sum(backward[a:b]) / 2 for a, b in cuts],
            latency=min(self._send(part.message, local) for part in parts[:-1] for local in places),
        )  # fmt: skip
        graph = dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks)
        return max(least, (1 - 1e-9) * graph.bounds(costs)[0])  # fewer microbatches than there are take no longer

    def _send(self, nbytes: float, local: int) -> float:
        """Return the seconds of a message within a node, `local` being 2, or between nodes."""
        return self.machine.transfer("send", nbytes, 2, local, self.node, self.ranks).total

    def seconds(self, part: Part, span: str, quick: bool = False) -> float:
        """Return the seconds of a span of a part."""
        return self._run(part, span, quick)[0]

    def _run(self, part: Part, span: str, quick: bool = False) -> tuple[float, Mapping[str, float]]:
        """Return the seconds of a span of a part, and those of its causes."""
        key = id(part), span, quick
        if key not in self._runs:
            trace = part.span(span)
            trace.size = self.ranks
            run = timeline(trace, self._quick if quick else self.machine, on_node=self.node) if trace.events else None
            self._runs[key] = (0.0, {}) if run is None else (run.seconds, run.causes[run.slowest])
        return self._runs[key]

    # -------------------------------------------------------------------------------------------- parts
    def kinds(self, c: Candidate) -> tuple[str, ...]:
        """Return what a candidate may offload, where the configuration leaves that open and the machine has a place.

        Values rest elsewhere without ZeRO and with its stage 3: stages 1 and 2 hold them in buckets.  An asynchronous
        schedule keeps versions of them in memory.  States that lie whole on one rank come back together, and stay.
        """
        if not self.homes or self.config.offload:
            return ()
        found = ["optimizer"] * (self.config.optimizer.name not in HOME)
        found += ["activations"] * (self.config.model.name in LANGUAGE)
        found += ["parameters"] * (c.zero in (0, 3) and c.schedule in (None, *SCHEDULES))
        return (*found, *["gradients"] * self.settles(c))

    @property
    def homes(self) -> tuple[str, ...]:
        """The places for what is offloaded, the faster first: what goes to a disk passes through the host's memory."""
        return tuple(place for place in ("host", "disk") if getattr(self.machine, place) is not None)

    def settles(self, c: Candidate) -> bool:
        """Return True if gradients may rest elsewhere: if their reducer sums whole ones in their own dtype."""
        precision = self.config.precision
        cast = precision.communicate if c.dtype == precision.dtype else None
        return c.zero == 0 and cast is None and not self.config.gradient_handler

    def _resting(self, part: Part, c: Candidate) -> Part:
        """Return a part with what a candidate offloads."""
        if not c.offload:
            return part
        key = id(part), c.offload
        if key not in self._offloaded:
            self._offloaded[key] = part.offloaded(dict(c.offload), self.target == "gpu")
            self._kept_alive.append(part)
        return self._offloaded[key]

    def _part(self, key: Any, config: TrainingConfig, ranks: int, rows: int, **more: Any) -> Part:
        if key not in self._parts:
            self._parts[key] = self.trace(config, ranks, rows, **more)
        return self._parts[key]

    def trace(
        self, config: TrainingConfig, ranks: int, rows: int, *, layers: tuple[int, int] | None = None,
        skip: tuple[int, int] = (0, 0), **more: Any,
    ) -> Part:  # fmt: skip
        """Return `trace_part` of a configuration on the machine's nodes; another software's kernels may replace its."""
        self.traces += 1
        config = replace(config, offload=OffloadConfig())  # `Part.offloaded` says what that changes
        if layers is not None and (found := self._fewer(config, layers, skip)) is not None:
            config, layers, skip = *found, (0, 0)
        return trace_part(
            config, self.inputs, ranks, rows, layers=layers, skip=skip, node=self.node, target=self.target, **more
        )

    def _layers(self, c: Candidate, bound: bool) -> list[Part]:
        """Return the parts of all layers of a candidate's model: passes of one copy of it for a bound, else its own."""
        rows = self.batch // c.data // c.microbatches
        if bound:
            c = replace(c, data=1, pipeline=1, zero=0, microbatches=1, schedule=None, chunks=None)
        elif c.pipeline > 1:  # a schedule is not asked for, and one of many microbatches takes long to make
            c = replace(c, microbatches=c.pipeline)
        ranks = c.width if bound else self.ranks
        config = c.apply(self.config, rows * c.data)
        keys = self.keys(c.dtype)
        form = c.data, c.pipeline, c.sequence, c.ulysses, c.tensor
        shape = (*form, c.zero, c.recompute, c.dtype, c.experts, c.order, rows)
        found: list[Part] = []
        given: Between | None = None
        for i, key in enumerate(keys):
            known = (shape, key, bound, given)
            part = self._part(
                known, config, ranks, rows * c.data, layers=(i, i + 1), given=given, update=not bound
            )  # fmt: skip
            found.append(part)
            given = part.output
        return found

    # -------------------------------------------------------------------------------------------- estimates
    def estimate(self, c: Candidate) -> Planned:
        """Return about what a candidate takes, by traces of its distinct layers."""
        whole = self._layers(c, bound=False)
        spec, config = self._short(c)
        figures = [self._resting_figures(p, c) for p in whole]
        if c.zero == 3:  # a layer alone keeps the weights it gathered, of many layers few are gathered at once
            for figure, part, bare in zip(figures, whole, self._layers(c, bound=True), strict=True):
                figure["kept"] = max(0.0, figure["kept"] - max(0, part.kept - bare.kept))
        if c.pipeline == 1:
            one = _total(figures)
            one["message"] = 0
            passes = sum(f["forward"] + f["backward"] for f in figures)
            reduce = [max(0.0, f["end"] - f["forward"] - f["backward"] - f["update"]) for f in figures]
            asynchronous = self.machine.overlap.progress == "asynchronous"
            hidden = sum(f["backward"] for f in figures) if asynchronous else 0.0
            one["end"] = passes + max(*reduce, sum(reduce) - hidden) + sum(f["update"] for f in figures)
            return self._assembled(c, config, [one], None)
        schedule, counts = self._schedule(spec, config)
        return self._assembled(c, config, [_total(figures[a:b]) for a, b in _cuts(counts)], schedule)

    def _resting_figures(self, part: Part, c: Candidate, apart: bool = True) -> Figures:
        """Return the figures of a part with what a candidate offloads: ranks wait for the copies."""
        made = self._figures(part, c.pipeline == 1, apart).copy()
        if not c.offload:
            return made
        there = self._resting(part, c)
        for name in ("weights", "gradients", "states", "kept", "transient"):
            made[name] = getattr(there, name)
        if "activations" in dict(c.offload):
            made["away"], made["block"] = part.away, part.block
        for place in self.homes:
            made[place] = there.elsewhere[place]
            made[f"{place} kept"] = there.elsewhere_kept[place]
        for span, group in (("forward", "pass"), ("backward", "pass"), ("update", "update")):
            for cause, nbytes in there.moves[span].items():
                if not nbytes:
                    continue
                seconds = self.machine.kernel_seconds(Kernel(cause, nbytes, nbytes, "uint8"))
                made[span] += seconds
                for name in (group, *["end"] * (c.pipeline == 1)):
                    made[f"{name}: {cause}"] = made.get(f"{name}: {cause}", 0.0) + seconds
                if c.pipeline == 1:
                    made["end"] += seconds
        return made

    def _figures(self, part: Part, alone: bool, apart: bool = True) -> Figures:
        """Return the figures of a part; without a pipeline its end is the last microbatch with all that follows.

        What is launched ahead in the microbatch before hides launching; `apart` says that there is none before.
        """
        if (id(part), alone, apart) in self._known_figures:
            return self._known_figures[id(part), alone, apart]
        made: Figures = {
            "weights": part.weights, "gradients": part.gradients, "states": part.states, "kept": part.kept,
            "transient": part.transient, "message": part.message,
        }  # fmt: skip
        for span in ("forward", "backward", "reduce", "update", "end"):
            if span != "end" or alone:
                made[span], causes = self._run(part, span)
                for cause, seconds in causes.items():
                    key = f"{'pass' if span in ('forward', 'backward') else span}: {cause}"
                    made[key] = made.get(key, 0.0) + seconds
        if alone and not apart:
            run = timeline(part.trace, self.machine, on_node=self.node)
            made["end"] = run.seconds - made["forward"] - made["backward"]
            for cause, seconds in run.causes[run.slowest].items():
                made[f"end: {cause}"] = seconds - made.get(f"pass: {cause}", 0.0)
        ends = [part.span("end")] if alone else [part.span("reduce"), part.span("update")]
        for name, traces in (("pass", (part.span("forward"), part.span("backward"))), ("end", ends)):
            moved = self._moved([(1, _starts(*traces))])
            made |= {f"{what} in {name}": n for what, n in zip(("words", "across", "within"), moved, strict=True)}
        self._known_figures[id(part), alone, apart] = made
        return made

    def _assembled(
        self, c: Candidate, config: TrainingConfig, stages: Sequence[Figures], schedule: Schedule | None
    ) -> Planned:  # fmt: skip
        """Return what a candidate takes by the figures of its stages."""
        if schedule is None:
            (one,) = stages
            seconds = (c.microbatches - 1) * (one["forward"] + one["backward"]) + one["end"]
            memory = _memory(*(round(one[k]) for k in ("weights", "gradients", "states", "kept", "transient")))
            spent = _causes([(c.microbatches - 1, one, "pass"), (1, one, "end")])
            moved = _in_step([(c.microbatches - 1, one, "pass"), (1, one, "end")])
            away = {p: round(one.get(p, 0) + one.get(f"{p} kept", 0)) for p in self.homes}
            return self._planned(c, config, seconds, memory, moved, 0.0, _as_shares(spent, seconds), 0, False, **away)
        held = [[stages[k.stage] for k in chunks] for chunks in schedule.chunks]
        local = 1 if self.ranks > self.node else 2
        costs = Costs(
            forward=[f["forward"] for f in stages], backward=[f["backward"] for f in stages],
            weight=[f["backward"] / 2 for f in stages],
            latency=self._send(stages[0]["message"], local),
            reduce=[sum(f["reduce"] for f in own) + self._replicas(c, schedule, own, local) for own in held],
            step=[sum(f["update"] for f in own) for own in held],
        )  # fmt: skip
        run = dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks)
        seconds, work = run.bounds(costs)
        flight = list(map(float, run.held))
        if (more := c.microbatches - schedule.microbatches) > 0:  # each further round of microbatches takes as long
            rounds = more / schedule.ranks
            fewer = dependencies(schedule.name, schedule.ranks, schedule.microbatches - schedule.ranks, c.chunks)
            seconds += rounds * (seconds - fewer.bounds(costs)[0])
            flight = [n + rounds * (n - before) for n, before in zip(run.held, fewer.held, strict=True)]
            work += more * sum(f["forward"] + f["backward"] for f in stages)
        bubble = max(0.0, 1 - work / (schedule.ranks * seconds)) if seconds else 0.0
        memory, stage, away = {}, 0, dict.fromkeys(self.homes, 0)
        messages = AHEAD * max(f["message"] for f in stages)
        for r, own in enumerate(held):
            rest = [round(sum(f[k] for f in own)) for k in ("weights", "gradients", "states")]
            kept, buffers = flight[r] * max(f["kept"] for f in own), messages + max(f["transient"] for f in own)
            here = _memory(rest[0], rest[1], rest[2], round(kept), round(buffers))
            for p in away:
                there = sum(f.get(p, 0) for f in own) + flight[r] * max(f.get(f"{p} kept", 0) for f in own)
                away[p] = max(away[p], round(there))
            if sum(here.values()) > sum(memory.values()):
                memory, stage = here, r
        busiest = max(held, key=lambda own: sum(f["forward"] + f["backward"] for f in own))
        passes = c.microbatches / schedule.copies
        times: list[tuple[float, Figures, str]] = [(passes, f, "pass") for f in busiest]
        times += [(1, f, name) for f in busiest for name in ("reduce", "update")]
        spent = _causes(times)
        spent["idle"] = spent.get("idle", 0.0) + max(0.0, seconds - sum(spent.values()))
        words, across, within = _in_step([(n, f, name) for n, f, name in times if name == "pass"])
        ends = _in_step([(1, f, "end") for f in busiest])
        sends = round(2 * passes * sum(f["message"] for f in busiest))
        apart = local == 1 and c.width >= self.node
        moved = (words + ends[0] + sends // 4, across + ends[1] + sends * apart, within + ends[2] + sends * (not apart))
        shares = _as_shares(spent, seconds)
        return self._planned(c, config, seconds, memory, moved, bubble, shares, stage, False, **away)

    def _replicas(self, c: Candidate, schedule: Schedule, held: Sequence[Figures], local: int) -> float:
        """Return the seconds in which a rank sums the gradients of its stages over a schedule's replicas."""
        if schedule.copies == 1:
            return 0.0
        nbytes = sum(f["gradients"] for f in held) / (c.data if c.zero == 1 else 1)
        return self.machine.transfer("all_reduce", nbytes, schedule.copies, local, self.node, self.ranks).total

    def stretched(self, c: Candidate) -> Planned:
        """Return what a candidate takes, where stages have many equal layers: of those with few and with some more.

        What a stage takes grows evenly with its equal layers, from a few on, as they pass through the same buckets.
        """
        spec, config = self._short(c)
        keys = self.keys(c.dtype)
        schedule, cuts = None, [(0, len(keys))]
        if c.pipeline > 1:
            schedule, counts = self._schedule(spec, config)
            cuts = _cuts(counts)
        whole = self.batch // c.microbatches
        made: list[Figures] = []
        few_ = FEW_CUT if c.zero == 3 else FEW_ALONE if c.pipeline == 1 else FEW
        known: dict[Any, tuple[Figures, Between | None]] = {}
        given: Between | None = None
        for s, (a, b) in enumerate(cuts):
            key = tuple(keys[a:b]), given
            if key not in known:
                first, last = _alike(keys, a, b)
                figures = []
                for few in few_ if last - first > few_[-1] else (last - first,):
                    part = self._whole(
                        c, config, whole, layers=(a, b), skip=(first + few, last), given=given,
                        stage=0 if schedule is None else schedule.holder(s),
                    )  # fmt: skip
                    figures.append(self._resting_figures(part, c, apart=c.microbatches == 1))
                known[key] = _line(figures, few_, last - first), part.output
            made.append(known[key][0])
            given = known[key][1]
        return replace(self._assembled(c, config, made, schedule), traced=True)

    def _whole(self, c: Candidate, config: TrainingConfig, rows: int, **more: Any) -> Part:
        """Return the trace of a candidate's stage; those of the last candidate are known, whatever it offloads."""
        bare = replace(c, offload=())
        if self._last[0] != bare:
            self._last = bare, {}
        key = tuple(sorted(more.items()))
        if key not in self._last[1]:
            self._last[1][key] = self.trace(config, self.ranks, rows, **more)
            self._kept_alive.append(self._last[1][key])
        return self._last[1][key]

    def is_long(self, c: Candidate) -> bool:
        """Return True if a candidate has more equal layers or microbatches than are traced and simulated one by one."""
        return (self.depth - 2) / c.pipeline > LONG or self._rounds(c) < c.microbatches

    def _spec(self, c: Candidate) -> tuple[MeshSpec, TrainingConfig]:
        config = c.apply(self.config, self.batch)
        return resolve(config, self.ranks), config

    def _short(self, c: Candidate) -> tuple[MeshSpec, TrainingConfig]:
        """Return the mesh, with a schedule of so many microbatches that more of them repeat what is there."""
        spec, config = self._spec(replace(c, microbatches=self._rounds(c), data=c.data))
        return spec, c.apply(self.config, self.batch) if spec.schedule is not None else config

    def _rounds(self, c: Candidate) -> int:
        """Return the microbatches that are simulated: all, or a few times the ranks of the pipeline."""
        few = (3 if c.pipeline < 32 else 2) * c.pipeline
        return c.microbatches if c.pipeline == 1 or c.microbatches <= few else few

    def _schedule(self, spec: MeshSpec, config: TrainingConfig) -> tuple[Schedule, tuple[int, ...]]:
        assert spec.schedule is not None
        counts = spec.layer_counts(self.depth - 2)
        if counts is None:
            counts = replace(spec, partition="uniform").layer_counts(self.depth - 2)
        assert counts is not None
        return spec.schedule, counts

    # -------------------------------------------------------------------------------------------- in full
    def full(self, c: Candidate) -> Planned:
        """Return what a candidate takes, by traces of all its layers on every distinct stage."""
        rows = self.batch // c.data // c.microbatches
        spec, config = self._spec(c)
        whole = rows * c.data
        if c.pipeline == 1:
            part = self._resting(self._whole(c, config, whole), c)
            run = self._alone_run(part, c.microbatches)
            seconds = run[0]
            memory = _memory(part.weights, part.gradients, part.states, part.kept, part.transient)
            starts = _starts(part.span("forward"), part.span("backward")), _starts(part.span("end"))
            moved = self._moved([(c.microbatches - 1, starts[0]), (1, starts[1])])
            away = {p: part.elsewhere[p] + part.elsewhere_kept[p] for p in self.homes}
            return self._planned(c, config, seconds, memory, moved, 0.0, run[1], 0, True, **away)
        schedule, counts = self._schedule(spec, config)
        keys = self.keys(c.dtype)
        stages: list[Stage] = []
        parts: list[Part] = []
        given: Between | None = None
        known: dict[Any, Part] = {}
        for s, (a, b) in enumerate(_cuts(counts)):
            key = (tuple(keys[a:b]), given)
            if key not in known:
                part = self._whole(c, config, whole, layers=(a, b), given=given, stage=schedule.holder(s))
                known[key] = self._resting(part, c)
            parts.append(part := known[key])
            stages.append(Stage(part.span("forward"), part.span("backward"), None, part.message))
            given = part.output
        ends = [
            (
                _joined(*(parts[k.stage].span("reduce") for k in held)),
                _joined(*(parts[k.stage].span("update") for k in held)),
            )
            for held in schedule.chunks
        ]
        places = [spec.places[p][0] for p in range(c.pipeline)]
        if schedule.copies > 1:  # gradients are summed over the replicas
            for r, held in enumerate(schedule.chunks):
                nbytes = sum(parts[k.stage].gradients for k in held) // (c.data if c.zero == 1 else 1)
                others = sorted(
                    {places[schedule.holder(k.stage, copy)] for k in held for copy in range(schedule.copies)}
                )
                ends[r] = _joined(ends[r][0], _summed(ends[r][0], tuple(others), nbytes)), ends[r][1]
        made = pipeline_timeline(
            schedule, stages, self.machine, reduce=[r for r, _ in ends], step=[u for _, u in ends], places=places,
            on_node=self.node,
        )  # fmt: skip
        assert made.simulation is not None
        memory, stage, away = {}, 0, dict.fromkeys(self.homes, 0)
        messages = AHEAD * max(part.message for part in parts)
        for r, held in enumerate(schedule.chunks):
            of = [parts[k.stage] for k in held]
            for p in away:
                there = made.simulation.held[r] * max(part.elsewhere_kept[p] for part in of)
                away[p] = max(away[p], there + sum(part.elsewhere[p] for part in of))
            here = _memory(
                sum(p.weights for p in of), sum(p.gradients for p in of), sum(p.states for p in of),
                made.simulation.held[r] * max(p.kept for p in of), messages + max(p.transient for p in of),
            )  # fmt: skip
            if sum(here.values()) > sum(memory.values()):
                memory, stage = here, r
        passes = c.microbatches // schedule.copies
        busiest = max(
            range(c.pipeline),
            key=lambda r: sum(s.nbytes for k in schedule.chunks[r] for s in _starts(stages[k.stage].forward)),
        )
        groups = [
            (passes, _starts(stages[k.stage].forward, stages[k.stage].backward)) for k in schedule.chunks[busiest]
        ]
        groups.append((1, _starts(*ends[busiest])))
        moved = self._moved(groups)
        sends = passes * sum(parts[k.stage].message for k in schedule.chunks[busiest]) * 2
        apart = any(places[r] // self.node != places[r - 1] // self.node for r in range(1, c.pipeline))
        moved = (moved[0] + sends // 4, moved[1] + sends * apart, moved[2] + sends * (not apart))
        return self._planned(c, config, made.seconds, memory, moved, made.bubble, _shares(made), stage, True, **away)

    def _alone_run(self, part: Part, microbatches: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of a step without a pipeline, and the shares of its causes: equal microbatches repeat."""
        if microbatches == 1:
            run = timeline(part.span("end"), self.machine, on_node=self.node)
            return run.seconds, _shares(run)
        run = timeline(part.trace, self.machine, on_node=self.node)
        one = self.seconds(part, "forward") + self.seconds(part, "backward")
        return run.seconds + (microbatches - 2) * one, _shares(run)

    def _moved(self, groups: Sequence[tuple[int, Sequence[Start]]]) -> tuple[int, int, int]:
        """Return words, bytes across nodes, and bytes within them."""
        words = across = within = 0
        for times, starts in groups:
            for s in starts:
                words += times * s.nbytes // _itemsize(s.dtype)
                ends = s.ranks if s.peer is None else (*s.ranks, s.peer)
                if len({r // self.node for r in ends}) > 1:
                    across += times * s.nbytes
                else:
                    within += times * s.nbytes
        return words, across, within

    def _planned(
        self, c: Candidate, config: TrainingConfig, seconds: float, memory: Mapping[str, int],
        moved: tuple[int, int, int], bubble: float, causes: Mapping[str, float], stage: int, traced: bool = True,
        host: int = 0, disk: int = 0,
    ) -> Planned:  # fmt: skip
        units = self.batch * (self.inputs.length if self.inputs.language else 1)
        peak = self.machine.peak(c.dtype or self.config.dtype) / self.machine.crowd(self.node, self.ranks)
        rate = self.model_flops / (seconds * self.ranks)
        return Planned(
            c, config, seconds, memory, *moved, bubble, causes, units / seconds, rate / peak, rate, stage, traced, host,
            disk,
        )  # fmt: skip


class Guess(NamedTuple):
    """About what a frame takes at best, and with how many microbatches and what recomputed."""

    seconds: float
    microbatches: int
    recompute: str | None


class Guesses:
    """Guesses by formulas of a step in a frame: only the order in which frames are looked at follows from them.

    Of a transformer they add products at the best rate, the words of the scheme's table for each microbatch, those of
    attention between ranks of a sequence, the pipeline's bubble, and the reduction of gradients.  Of other models they
    are the products alone.
    """

    def __init__(self, looks: Looks) -> None:
        self.looks, self.machine, config = looks, looks.machine, looks.config
        self.dtype = config.precision.dtype
        self.part, flops = looks.alone(self.dtype), looks.linear_flops(self.dtype)
        self.layers = max(1, looks.depth - 2)
        self.products = flops / looks.ranks / best_rate(self.machine, self.dtype or config.dtype)
        self.itemsize = ITEMSIZE.get(self.dtype or config.dtype, 4)
        self.hidden = int(config.model.options.get("hidden_size", 0)) if config.model.name in LANGUAGE else 0
        self.length = looks.inputs.length
        self.kept: dict[str | None, tuple[float, float]] = {}
        self._words: dict[TensorConfig, tuple[float, float]] = {}
        self._byte: dict[tuple[str, int], float] = {}

    def __call__(self, frame: Frame, counts: Sequence[int], recompute: Sequence[str | None], limit: int) -> Guess:
        data, pipeline, sequence, ulysses, tensor = frame
        width, looks = sequence * (tensor.ranks or 1), self.looks
        weights = (self.part.weights + self.part.gradients) / pipeline / (tensor.ranks or 1)
        states = self.part.states / pipeline / (tensor.ranks or 1) / data
        fixed, per_row = self._tensor(tensor)
        each = looks.batch / data / sequence  # rows of a step
        layers = self.layers / pipeline
        byte = self.byte("all_gather", width) * self.itemsize
        attention = 0.0
        if self.hidden:
            own = each * self.length * self.hidden / (tensor.ranks or 1)
            if ulysses > 1:
                attention += 8 * own * self.byte("all_to_all", min(width, ulysses * (tensor.ranks or 1)))
            if sequence > ulysses:
                attention += 6 * own * (sequence // ulysses) * self.byte("send", width)
        reduce = 2 * (self.part.gradients / pipeline / (tensor.ranks or 1)) * self.byte("all_gather", looks.ranks)
        best = Guess(math.inf, counts[0], recompute[0])
        for again in recompute:
            if again not in self.kept:
                self.kept[again] = looks.kept_by(again)
            kept, output = self.kept[again]
            more = 4 / 3 if again == "block" else 1.03 if again == "attention" else 1.0
            for count in _few(counts, data, looks.batch):
                passes = max(self.products * more, 1e-12)
                moved = layers * (count * fixed + each * per_row) * byte * more + layers * attention * self.itemsize
                bubble = (pipeline - 1) / count
                seconds = (passes + moved) * (1 + bubble) + (reduce if data > 1 else 0.0) * 0.5
                flight = min(count, pipeline)
                held = looks.batch / data / count * layers * (kept if again != "block" else output) * flight / width
                if held + weights + states > limit:  # behind all that seem to fit
                    seconds *= 10 * (held + weights + states) / limit
                if seconds < best.seconds:
                    best = Guess(seconds, count, again)
        return best

    def _tensor(self, tensor: TensorConfig) -> tuple[float, float]:
        """Return the words that a rank receives in a layer: of a microbatch, and of each of its rows."""
        if tensor not in self._words:
            self._words[tensor] = 0.0, 0.0
            if self.hidden and (tensor.ranks or 1) > 1:
                module, axes = _mode_of(tensor)
                at = dict.fromkeys(axes, 0)
                found = []
                for rows in (64, 128):
                    words = scheme_words(module.SCHEME, (rows, self.length, self.hidden), 4 * self.hidden, axes, at)
                    found.append(1.5 * (sum(words.values()) + words["x"] + words["w"]))
                per_row = max(0.0, (found[1] - found[0]) / 64)
                self._words[tensor] = max(0.0, found[0] - 64 * per_row), per_row
        return self._words[tensor]

    def byte(self, op: str, ranks: int) -> float:
        """Return the seconds of a byte in an operation among ranks that are next to each other."""
        if (op, ranks) not in self._byte:
            looks, n = self.looks, 2 if op == "send" else ranks
            local = max(1, min(n, looks.node if ranks <= looks.node or op != "send" else 1))
            cost = self.machine.transfer(op, 1e7, n, local, looks.node, looks.ranks).total if ranks > 1 else 0.0
            self._byte[op, ranks] = cost / 1e7
        return self._byte[op, ranks]


def _few(counts: Sequence[int], data: int, batch: int) -> Sequence[int]:
    """Return the numbers of microbatches that are guessed with: those of a few samples a rank, and the fewest."""
    return counts if len(counts) < 6 else [counts[0], counts[len(counts) // 2], *counts[-4:]]


def on_node(machine: Machine, ranks: int) -> int:
    """Return how many of so many ranks are on one node: all where there is no network, else as many as it has."""
    return ranks if machine.network is None else min(ranks, machine.ranks_per_node)


def best_rate(machine: Machine, dtype: str) -> float:
    """Return operations a second that no product of a dtype on a machine exceeds.

    A rate is a formula, at most `rate`, times a correction, which is a weighted geometric mean of 1 and the ratios of
    measured points to the formula, or one of them: at most the largest of these.
    """
    found = machine._gemm_rate(dtype)[0]
    ratios = [rate / found._formula(m, n, k) for m, n, k, rate in found.points]
    return found.rate * max(1.0, *ratios) if ratios else found.rate


def _linear_flops(model: Any, batch: int, inputs: Inputs) -> float:
    """Return the operations of a step's products with weights: of f(s) = a s + b s² for s tokens, a."""
    if not inputs.language:
        return 0.75 * _flops(model, batch, inputs)  # the first layer's input takes no gradient
    one, two = model.flops(1, 1), model.flops(1, 2)
    return float(batch * inputs.length * (2 * one - two / 2))


def _flops(model: Any, batch: int, inputs: Inputs) -> float:
    if inputs.language:
        return float(model.flops(batch, inputs.length))
    return 6.0 * batch * sum(m.multiplications for m in model.modules())


@lru_cache(maxsize=64)
def dependencies(name: str, ranks: int, microbatches: int, chunks: int | None) -> Dependencies:
    """Return the dependencies of a schedule, by which it is simulated with many costs."""
    return replace(Dependencies.of(make_schedule(name, ranks, microbatches, chunks)), what=[])


Figures = dict[str, float]
"""Seconds, bytes and words of layers by name; those of causes as "pass: CAUSE", "end: CAUSE"."""


def _total(figures: Sequence[Figures]) -> Figures:
    """Return the figures of layers one after the other.

    When a layer goes back, those behind it keep nothing any more.  Of all layers' offloaded activations some blocks are
    on their way at once.
    """
    made: Figures = {}
    most = 0.0
    for figure in figures:
        for name, value in figure.items():
            made[name] = max(made.get(name, 0.0), value) if name == "block" else made.get(name, 0.0) + value
        own = on_their_way(figure.get("away", 0.0), figure.get("block", 0.0))
        most = max(most, made["kept"] + figure["transient"] - own)
    moving = on_their_way(made.get("away", 0.0), made.get("block", 0.0))
    made["transient"] = max(0.0, most - made.get("kept", 0.0)) + moving
    made["message"] = figures[-1]["message"] if figures else 0.0
    return made


def _line(figures: Sequence[Figures], few: tuple[int, int], count: int) -> Figures:
    """Return the figures for a number of equal layers, by those for two others, or for this one."""
    if len(figures) == 1:
        return figures[0]
    one, two = figures
    times = (count - few[0]) / (few[1] - few[0])
    names = dict.fromkeys((*one, *two))
    return {n: max(0.0, one.get(n, 0.0) + times * (two.get(n, 0.0) - one.get(n, 0.0))) for n in names}


def _alike(keys: Sequence[Any], a: int, b: int) -> tuple[int, int]:
    """Return the longest run of equal layers among those from a to b."""
    best = at = a
    most = 0
    for i in range(a, b + 1):
        if i == b or keys[i] != keys[at]:
            if i - at > most:
                best, most = at, i - at
            at = i
    return best, best + most


def _causes(times: Iterable[tuple[float, Figures, str]]) -> dict[str, float]:
    """Return the seconds of causes, of figures a number of times."""
    made: dict[str, float] = {}
    for count, figures, name in times:
        for key, seconds in figures.items():
            if key.startswith(f"{name}: "):
                cause = key.partition(": ")[2]
                made[cause] = made.get(cause, 0.0) + count * seconds
    return made


def _in_step(times: Iterable[tuple[float, Figures, str]]) -> tuple[int, int, int]:
    """Return words, bytes across nodes, and bytes within them, of figures a number of times."""
    made = [0.0, 0.0, 0.0]
    for count, figures, name in times:
        for i, what in enumerate(("words", "across", "within")):
            made[i] += count * figures[f"{what} in {name}"]
    return round(made[0]), round(made[1]), round(made[2])


def _as_shares(spent: Mapping[str, float], seconds: float) -> dict[str, float]:
    found = sorted(spent.items(), key=lambda x: (-x[1], x[0]))
    return {cause: s / seconds for cause, s in found if s > 0}


def _cuts(counts: Sequence[int]) -> list[tuple[int, int]]:
    found, at = [], 0
    for n in counts:
        found.append((at, at + n))
        at += n
    return found


def _joined(*traces: Trace) -> Trace:
    """Return traces one after the other, with calls numbered anew."""
    made = Trace(traces[0].rank, traces[0].size)
    offset = 0
    for trace in traces:
        most = 0
        for e in trace.events:
            call = getattr(e, "call", None)
            if call is None:
                made.events.append(e)
            else:
                most = max(most, call)
                made.events.append(replace(e, call=call + offset))
        offset += most
    return made


def _summed(like: Trace, ranks: tuple[int, ...], nbytes: int) -> Trace:
    """Return the trace of an all-reduce between ranks, among those of a trace."""
    start = Start(1, "all_reduce", ("pipeline",), ranks, nbytes, nbytes)
    return Trace(like.rank, like.size, [start, Wait(1)])


def _starts(*traces: Trace) -> list[Start]:
    return [e for trace in traces for e in trace.events if isinstance(e, Start)]


def _memory(weights: int, gradients: int, states: int, activations: int, buffers: int) -> dict[str, int]:
    return {
        "weights": weights, "gradients": gradients, "states": states, "activations": activations, "buffers": buffers,
    }  # fmt: skip


def _shares(run: Timeline) -> dict[str, float]:
    return dict(run.shares())


def _itemsize(dtype: str) -> int:
    return ITEMSIZE.get(dtype, 1)


# ------------------------------------------------------------------------------------------------ the plan
@dataclass(frozen=True)
class TrainingPlan:
    """The fastest ways to train a model on so many ranks of a machine, and why others lost.

    Attributes
    ----------
    machine : Machine
    ranks, memory, batch : int
        `memory` is the bytes a rank may use.
    best : tuple of Planned
        The fastest first.
    lost : tuple of (str, int, str)
        Groups of candidates that lost: what they have in common, how many they are, and why.
    candidates : int
        How many there are.
    traced : int
        How many were traced in full.
    proven : bool
        True if no candidate can be faster than the first, by its bound or its trace.
    seconds : float
        Of the search.
    given : dict
        The configuration that was searched.
    language : bool
    """

    machine: Machine
    ranks: int
    memory: int
    batch: int
    best: tuple[Planned, ...]
    lost: tuple[tuple[str, int, str], ...]
    candidates: int
    traced: int
    proven: bool
    seconds: float
    given: Mapping[str, Any] = field(repr=False, default_factory=dict)
    language: bool = True

    @property
    def configuration(self) -> dict[str, Any]:
        """The keys of the configuration that `parlinalg train` takes, with the best choices."""
        return self.best[0].candidate.values(self.given, self.batch)

    def write(self, path: str | PathLike[str]) -> None:
        """Write this configuration as a Python file.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        first = self.best[0]
        head = (
            f'"""Planned for {self.ranks} ranks of {self.machine.name}: {first.candidate}.\n\nA step of {self.batch} '
            f"samples is predicted to take {shown_time(first.seconds)}, and {format_bytes(first.bytes)} a rank."
            '\n"""\n\n'
        )
        body = "".join(f"{name} = {value!r}\n" for name, value in self.configuration.items())
        try:
            Path(path).write_text(head + body, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def explain(self) -> str:
        """Return the plan as text: the best with their figures, and the others with why they lost."""
        unit = "tokens/s" if self.language else "samples/s"
        first = self.best[0]
        lines = [
            f"{self.ranks} ranks of {self.machine.name} ({self.machine.about}), {format_bytes(self.memory)} a rank, "
            f"batches of {self.batch}",
            f"{self.candidates} candidates, {self.traced} of them traced in full, in {self.seconds:.1f} s; "
            + ("none can be faster than the first" if self.proven else "others may be faster than the first"),
            "",
        ]
        head = ("", "step", unit, "MFU", "memory", "words", "across nodes", "bubble", "")
        rows = [head]
        for i, p in enumerate(self.best, 1):
            rows.append((
                str(i), shown_time(p.seconds), f"{p.throughput:,.0f}", shown_share(p.mfu), format_bytes(p.bytes),
                f"{p.words:.3g}", format_bytes(p.across), f"{100 * p.bubble:.0f}%", str(p.candidate),
            ))  # fmt: skip
        wide = [max(len(row[k]) for row in rows) for k in range(len(head) - 1)]
        for row in rows:
            lines.append("  ".join([*(text.rjust(w) for text, w in zip(row, wide, strict=False)), row[-1]]).rstrip())
        held = {**first.memory, "in host memory": first.host, "on a disk": first.disk}
        held = {name: n for name, n in held.items() if n or name in first.memory}
        lines += ["", "memory     " + ", ".join(f"{name} {format_bytes(n)}" for name, n in held.items())]
        lines.append(
            "time       " + ", ".join(f"{cause} {100 * s:.0f}%" for cause, s in list(first.causes.items())[:6])
        )
        lines.append(
            f"speed      {first.throughput / self.ranks:,.{0 if first.throughput >= 100 * self.ranks else 1}f} {unit} "
            f"and {shown_rate(first.rate)} a rank; MFU is of {shown_rate(first.rate / first.mfu)}, what large products "
            f"reach"
        )
        if self.lost:
            lines += ["", "lost"]
            wide0 = max(len(what) for what, _, _ in self.lost)
            lines += [f"  {what:<{wide0}}  {count:>6}  {why}" for what, count, why in self.lost]
        return "\n".join(lines)

    __str__ = explain

    def why(self) -> str:
        """Return in a line why the next best lost, or why there is none."""
        if len(self.best) > 1:
            other = self.best[1]
            return f"next is {other.candidate}: {why_slower(other, self.best[0])}"
        return "no other form can be trained" if not self.lost else f"others: {self.lost[0][2]}"


def shown_time(seconds: float) -> str:
    """Return seconds as text.

    >>> shown_time(0.00123), shown_time(12.345), shown_time(4130)
    ('1.23 ms', '12.3 s', '4,130 s')
    """
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def shown_share(share: float) -> str:
    """Return a share in percent as text.

    >>> shown_share(0.413), shown_share(0.0042)
    ('41%', '0.42%')
    """
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.2g}%"


def shown_rate(flops: float) -> str:
    """Return operations a second as text.

    >>> shown_rate(5.312e14), shown_rate(3.4e9)
    ('531 TFLOP/s', '3.4 GFLOP/s')
    """
    name, unit = ("T", 1e12) if flops >= 1e12 else ("G", 1e9) if flops >= 1e9 else ("M", 1e6)
    return f"{flops / unit:.3g} {name}FLOP/s"


AS_FAST = 1.005
"""Times as long as the best up to which a plan is called as fast."""


def why_slower(other: Planned, best: Planned) -> str:
    """Return why a candidate lost against the best, in words: what costs the most of the difference."""
    times = other.seconds / best.seconds
    about = "" if other.traced else "about "
    if times < AS_FAST:
        more = other.bytes - best.bytes
        told = "as fast to half a percent" if other.traced or times > 0.995 else "about as fast, but not traced in full"
        return told + (f", with {format_bytes(more)} more memory" if more > 0 else "")
    reasons: list[tuple[float, str]] = []
    share = sum(s for cause, s in other.causes.items() if " over " in cause) * other.seconds
    own = sum(s for cause, s in best.causes.items() if " over " in cause) * best.seconds
    for name, mine, theirs in (
        ("across nodes", other.across, best.across), ("within nodes", other.within, best.within),
    ):  # fmt: skip
        if mine > 1.02 * theirs and share > own:
            ratio = mine / max(1, theirs)
            text = f"moves {ratio:.1f}× the bytes {name}" if ratio < 100 else f"moves {format_bytes(mine)} {name}"
            reasons.append(((share - own) * (1.0 if name == "across nodes" else 0.5), text))
    again = other.candidate.recompute
    for cause in {**other.causes, **best.causes}:
        more_seconds = other.causes.get(cause, 0.0) * other.seconds - best.causes.get(cause, 0.0) * best.seconds
        verb = "takes" if cause == "launching" else "take"
        why = f"{cause} {verb} {shown_time(max(0.0, more_seconds))} more"
        if cause == "idle":
            why = f"ranks idle {100 * other.causes.get(cause, 0.0):.0f}% of the step"
            if other.bubble > best.bubble:
                why = f"idles {100 * other.bubble:.0f}% in the pipeline's bubble"
        elif cause in OFFLOADS:
            what = _and([kind for kind, _ in other.candidate.offload or best.candidate.offload])
            why = f"{cause} ({what}) take {shown_time(max(0.0, more_seconds))} more"
        elif cause in ("products", "other kernels") and again and again != best.candidate.recompute:
            why = f"computes {'attention' if again == 'attention' else 'blocks'} again"
        reasons.append((more_seconds * 0.99, why))
    return f"{about}{times:.2f}× the time: {max(reasons)[1]}"


# ------------------------------------------------------------------------------------------------ the search
def plan_training(
    config: TrainingConfig | Mapping[str, Any] | str | Path, *, ranks: int,
    machine: Machine | str | PathLike[str] | None = None, memory: int | str | None = None,
    global_batch: int | None = None, best: int = 10, settings: Sequence[str] = (), exhaustive: bool = False,
    fused_attention: bool = False,
) -> TrainingPlan:  # fmt: skip
    """Return the fastest ways to train a model on so many ranks of a machine.  Pure: nothing is computed or sent.

    Searched are all sizes and shapes of data, pipeline, sequence and tensor parallelism, pipeline schedules,
    microbatches, ZeRO's stages, recomputation and the dtype, where the configuration leaves them open: what it gives
    stays as it is.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig
        A `TrainingConfig` leaves nothing but `parallel`, `zero`, `schedule` and `precision` at their defaults open.
    ranks : int
    machine : Machine, str or path, optional
        The name of a shipped machine, or a file; by default the configuration's `machine`.
    memory : int or str, optional
        Bytes that a rank may use, such as "80GiB"; by default the machine's.
    global_batch : int, optional
        Samples of a step, by default the configuration's `batch_size`.
    best : int
        How many to return.
    settings : sequence of str
        Values of the configuration to replace, as on the command line.
    exhaustive : bool
        Trace every candidate in full: for tests of the search.
    fused_attention : bool
        Count attention of 16-bit floats as one kernel of 16-bit products, by the rates in the machine's file.  Such
        kernels are what other systems of today run; the library's attention computes in float32.

    Raises
    ------
    ConfigError
        If the configuration, the machine or a number is wrong.
    PlanError
        If no candidate can split the batch, or none fits the memory; the message says the least that would do.
    """
    began = perf_counter()
    ranks, best = _whole("ranks", ranks), _whole("best", best)
    global_batch = None if global_batch is None else _whole("global_batch", global_batch)
    given = _values(config, settings)
    checked = parse(given)
    found = load_machine(_named(checked) if machine is None else machine)
    found = found.with_fused_attention() if fused_attention else found
    limit = _room(found, ranks) if memory is None else _bytes(memory)
    batch = checked.batch_size if global_batch is None else global_batch
    check_offload(checked, found)
    looks = Looks(checked, ranks, found, batch)
    space = Space(checked, given, ranks, batch, looks.depth, _dtypes(checked, given, found))
    search = _Search(looks, space, limit, best, exhaustive)
    if not search.candidates:
        raise PlanError(_no_split(checked, given, ranks, batch, looks.depth))
    planned = search.run()
    return TrainingPlan(
        found, ranks, limit, batch, tuple(planned), tuple(search.lost(planned)), search.candidates,
        search.traced, search.proven, perf_counter() - began, given, looks.inputs.language,
    )  # fmt: skip


def _named(config: TrainingConfig) -> str:
    if config.machine is None:
        raise ConfigError(
            "a plan needs a machine: give machine='a100', say, here or in the configuration (--machine a100); "
            "parlinalg doctor --machine FILE.toml measures this one"
        )
    return config.machine


def _room(machine: Machine, ranks: int) -> int:
    """Return the bytes a rank may use; more ranks than a node is meant for share its memory."""
    return machine.memory * machine.ranks_per_node // max(machine.ranks_per_node, on_node(machine, ranks))


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        raise ConfigError(f"{name}={value!r}: a plan takes a whole number of at least 1")
    return value.__index__()


def _bytes(value: int | str) -> int:
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found < 1:
        raise ConfigError(f"memory={value!r}: give the bytes that a rank may use, at least 1, such as 80GiB")
    return found


def _values(config: Any, settings: Sequence[str]) -> dict[str, Any]:
    given = config.given() if isinstance(config, TrainingConfig) else config
    values = override(dict(given) if isinstance(given, Mapping) else read(given), settings)
    parallel = values.get("parallel")
    if parallel == "auto":
        del values["parallel"]
    elif isinstance(parallel, Mapping) and "auto" in parallel:
        values["parallel"] = {name: value for name, value in parallel.items() if name != "auto"}
    return values


def _dtypes(config: TrainingConfig, given: Mapping[str, Any], machine: Machine) -> list[str]:
    """Return the dtypes of `precision` to search, "" for none: those that the machine multiplies faster."""
    if "precision" in given or "dtype" in given:
        return [config.precision.dtype or ""]
    faster = [d for d in ("bfloat16",) if d in machine.gemm and best_rate(machine, d) > best_rate(machine, "float32")]
    return [""] if not faster else ["", *faster]


def _no_split(config: TrainingConfig, given: Mapping[str, Any], ranks: int, batch: int, depth: int) -> str:
    own, parallel = config.parallel, given.get("parallel") or {}
    fixed = f" with parallel={dict(parallel)}" if parallel else ""
    sizes = {
        "data": own.data.size, "pipeline": own.pipeline.ranks, "sequence": own.sequence.ranks,
        "tensor": own.tensor.ranks,
    }  # fmt: skip
    product = math.prod(sizes[name] or 1 for name in parallel if name in sizes)
    if ranks % product or (product != ranks and {*sizes} <= {*parallel} and all(sizes.values())):
        what = " × ".join(f"{name} {sizes[name]}" for name in sizes if name in parallel and (sizes[name] or 1) > 1)
        return f"parallel has {what}, which {ranks} ranks cannot be cut into: the product of sizes should divide them"
    if own.pipeline.ranks > depth:
        return f"parallel.pipeline={own.pipeline.ranks}, but the model has {depth} layers: a stage takes at least one"
    count = config.microbatches(own.pipeline.ranks) if {"schedule", "gradient_accumulation"} & {*given} else 1
    cut = f" into {count} microbatches" if count > 1 else ""
    return (
        f"a batch of {batch} samples cannot be split evenly over {ranks} ranks{fixed}{cut}: the data parallel ranks "
        f"times the microbatches divide the batch; give a global batch with more divisors, such as {ranks * count}, or "
        "leave keys of parallel and schedule out"
    )


class _Search:
    """Candidates, and how far each was looked at."""

    def __init__(self, looks: Looks, space: Space, memory: int, best: int, exhaustive: bool) -> None:
        self.looks, self.space, self.memory, self.best, self.exhaustive = looks, space, memory, best, exhaustive
        self.candidates = len(space)
        self.limited = not exhaustive and (looks.ranks > ALL or self.candidates > MANY)
        self.done: list[Planned] = []
        self.estimated: dict[Candidate, Planned] = {}
        self.too_full: list[tuple[int, Candidate, int]] = []
        self.refused: Counter[str] = Counter()
        self.refused_of: dict[str, Candidate] = {}
        self.left: list[tuple[float, Candidate]] = []
        self.others: list[tuple[float, Frame, int]] = []  # frames of which no candidate was looked at
        self.offloading: dict[Candidate, Planned] = {}  # estimates with what is offloaded
        self.least: list[tuple[int, str, Planned]] = []  # what does not fit although it offloads
        self.no_room: list[tuple[int, str, Planned]] = []  # what would fit, but has no room for what it offloads
        self.crammed: list[tuple[int, Frame, int]] = []  # frames whose weights alone do not fit
        self.traced, self.proven = 0, True
        self.unknown = False  # whether some cannot be imagined

    def run(self) -> list[Planned]:
        """Return the best, the fastest first."""
        if self.limited:
            self._reach()
        else:
            fitting = []
            for n, c in enumerate(self.space):
                if (need := self.looks.memory_bound(c)) > self.memory:
                    self.too_full.append((need, c, -1))
                else:
                    fitting.append((self.looks.static_bound(c), n, c))
            if self.exhaustive:
                for _, _, c in fitting:
                    self._full(c)
            else:
                self._prove(fitting)
        if not self.done:
            raise PlanError(self._nothing_fits())
        self.proven = self.proven and not self.unknown
        return sorted(self.done, key=_order)[: self.best]

    def _prove(self, fitting: Sequence[tuple[float, int, Candidate]]) -> None:
        """Trace candidates in the order of their bounds, until none that is left can be among the best."""
        heap = [(bound, 0, n, c) for bound, n, c in fitting]
        heapq.heapify(heap)
        while heap:
            bound, look, n, c = heapq.heappop(heap)
            times = sorted(p.seconds for p in self.done)
            if len(times) >= self.best and bound > times[self.best - 1]:
                self.left = [(bound, c), *((b, other) for b, _, _, other in heap)]
                return
            if look:
                self._full(c)
            elif (found := self._asked(c, self.looks.time_bound)) is not None:
                heapq.heappush(heap, (found, 1, n, c))

    def _reach(self) -> None:
        """Estimate the likeliest candidates and those near the fastest of them, and trace the first in full.

        Forms of tensor and sequence parallelism, each with and without a pipeline, take turns, so that each comes up.
        """
        guessed: dict[Frame, Guess] = {}
        numbers: dict[Frame, int] = {}
        recompute = self.space.recompute
        for frame in self.space.frames():
            number = self.space.count(frame)
            if not number:
                continue
            sample = next(self.space.steps(frame))
            stages = self.space.stages(frame.data)
            if (need := min(self.looks.memory_bound(replace(sample, zero=z)) for z in stages)) > self.memory:
                self.crammed.append((need, frame, number))
            else:
                guessed[frame] = self.looks.guess(frame, self.space.counts(frame), recompute, self.memory)
                numbers[frame] = number
        turns: Counter[str] = Counter()
        order = []
        for i, frame in enumerate(sorted(guessed, key=lambda f: (guessed[f].seconds, f[:4], str(f.tensor)))):
            order.append((turns[_kind(frame)], i, frame))
            turns[_kind(frame)] += 1
        for _, _, frame in sorted(order, key=lambda x: x[:2]):
            if self.looks.traces >= (TRACES // 2 if self._fitting() else TRACES):
                break
            self._begin(frame, guessed[frame])
        self._climb(guessed)
        if self.looks.ranks <= ALL:  # beyond, traces and simulations take too long
            self._mend()
        for p in self._fitting()[: 4 * FULL]:
            if len(self.done) < max(FULL, min(self.best, 2 * FULL)):
                self._full(p.candidate)
        seen = {c.frame for c in self.estimated}
        self.others = [(guessed[f].seconds, f, numbers[f]) for f in guessed if f not in seen]
        self.proven = False

    def _fitting(self) -> list[Planned]:
        """Return what was estimated and fits, the fastest first."""
        return sorted((p for p in self.estimated.values() if self._fits(p)), key=_order)

    def _begin(self, frame: Frame, guess: Guess) -> None:
        """Estimate a frame: as guessed, then with what saves memory until it fits."""
        steps = list(self.space.steps(frame))
        counts = self.space.counts(frame)
        most = max(self.space.stages(frame.data))
        again = self.space.recompute[-1]
        one = min(1, most)
        tries = (one, guess.microbatches, guess.recompute), (one, counts[-1], again), (most, counts[-1], again)
        for zero, count, recompute in dict.fromkeys(tries):
            likely = [
                c for c in steps
                if c.microbatches == count and (c.zero == zero or len({x.zero for x in steps}) == 1)
                and c.recompute == recompute and (c.schedule, c.chunks) == (steps[0].schedule, steps[0].chunks)
            ]  # fmt: skip
            found = [(c, p) for c in likely if (p := self._estimate(c)) is not None]
            for c, p in found:
                self._reschedule(c, p, steps)
            if any(self._fits(p) and p.candidate.offload == self.space.offload for _, p in found):
                return

    def _enough(self) -> float:
        """Return the estimated seconds of the slowest of the best."""
        found = self._fitting()
        return found[self.best - 1].seconds if len(found) >= self.best else math.inf

    def _reschedule(self, c: Candidate, p: Planned, steps: Sequence[Candidate]) -> None:
        """Estimate a candidate with other schedules, unless none of them can be among the best.

        They have the same passes, so that their ranks work as long together.  A step takes at least the mean of a rank.
        """
        if c.pipeline == 1 or p.seconds * (1 - p.bubble) > self._enough():
            return
        for other in steps:
            if replace(other, schedule=c.schedule, chunks=c.chunks) == c:
                self._estimate(other)

    def _estimate(self, c: Candidate) -> Planned | None:
        """Return an estimate of a candidate; where it does not fit, of what it offloads for that.

        None if the library refuses it, or a bound says that it is not among the best.
        """
        if c not in self.offloading:
            if self.looks.static_bound(c) > self._enough():
                return None
            found: Planned | None = self._asked(c, self.looks.estimate)
            if found is None:
                return None
            self.estimated[c] = found
            other = None if self._fits(found) else self._offloaded(c, self.looks.estimate)
            if other is not None:
                self.estimated[other.candidate] = other
            self.offloading[c] = other or found
        return self.offloading[c]

    def _fits(self, p: Planned) -> bool:
        host, disk = self.looks.machine.host, self.looks.machine.disk
        beside = (not p.host or (host is not None and p.host <= host.memory)) and (
            not p.disk or (disk is not None and p.disk <= disk.size)
        )
        return p.bytes <= self.memory and beside

    def _offloaded(self, c: Candidate, look: Any) -> Planned | None:
        """Return the fastest way in which a candidate fits with something in host memory or on a disk.

        What comes and goes only adds to its time, the more the farther it goes.  So kinds need not be asked that hold
        kinds with which it fits, nor farther places where nearer ones have room.  None if none fits; the least that it
        takes is noted.
        """
        kinds, homes = self.looks.kinds(c), self.looks.homes
        sets = [
            chosen
            for n in range(1, len(kinds) + 1)
            for chosen in itertools.combinations(kinds, n)
            if not {"parameters", "gradients"} <= {*chosen}
        ]
        found: list[Planned] = []
        enough: list[set[str]] = []
        for chosen in sorted(sets, key=lambda chosen: len(_implied(chosen))):
            if any(less <= _implied(chosen) for less in enough):
                continue
            near: list[tuple[int, ...]] = []
            for places in sorted(itertools.product(range(len(homes)), repeat=len(chosen)), key=sum):
                if any(all(p <= q for p, q in zip(less, places, strict=True)) for less in near):
                    continue
                away = tuple((kind, homes[p]) for kind, p in zip(chosen, places, strict=True))
                made: Planned | None = self._asked(replace(c, offload=away), look)
                if made is None:
                    break
                if made.bytes > self.memory:  # wherever they are
                    self.least.append((made.bytes, str(made.candidate), made))
                    break
                if self._fits(made):
                    found.append(made)
                    near.append(places)
                else:
                    self.no_room.append((made.host + made.disk, str(made.candidate), made))
            if near:
                enough.append(_implied(chosen))
        return min(found, key=_order, default=None)

    def _climb(self, guessed: Mapping[Frame, Guess]) -> None:
        """Estimate those that differ in one choice from the fastest of a few frames, until these are all known."""
        varied: set[Candidate] = set()
        for _ in range(ROUNDS):
            first: dict[Frame, Planned] = {}
            for p in self._fitting():
                if len(first) < BEAM:
                    first.setdefault(p.candidate.frame, p)
            own = self.space.offload
            new = [p.candidate for p in first.values() if replace(p.candidate, offload=own) not in varied]
            if not new or self.looks.traces >= TRACES:
                return
            for i, chosen in enumerate(new):
                best = replace(chosen, offload=own)
                varied.add(best)
                steps = list(self.space.steps(best.frame))
                again = self.space.recompute
                for c in steps:
                    near = _one_apart(c, best, self.space.counts(c.frame)) and (i == 0 or c.order == best.order)
                    more = again.index(c.recompute) > again.index(best.recompute)  # slower, and not needed to fit
                    if not near or (more and chosen == best) or self.looks.traces >= TRACES:
                        continue
                    found = self._estimate(c)
                    if found is not None and (c.schedule, c.chunks) == (best.schedule, best.chunks):
                        self._reschedule(c, found, steps)
                known = {e.frame for e in self.estimated}
                frames = [f for f in guessed if f not in known and _near(f, best.frame)]
                for frame in sorted(frames, key=lambda f: (guessed[f].seconds, f[:4], str(f.tensor)))[:NEAR]:
                    if self.looks.traces < TRACES:
                        self._begin(frame, guessed[frame])

    def _mend(self) -> None:
        """Estimate, in each of the fastest frames with a pipeline, what differs from its fastest in one choice, until
        nothing is faster.

        A frame is begun with one schedule and number of microbatches; others may make it the fastest of all.
        """
        firsts: dict[Frame, Planned] = {}
        for p in self._fitting():
            if p.candidate.pipeline > 1:
                firsts.setdefault(p.candidate.frame, p)
        most = self.looks.traces + TRACES
        for frame, first in itertools.islice(firsts.items(), FULL):
            best: Planned | None = None
            while first is not best and self.looks.traces < most:
                best = first
                for c in self.space.steps(frame):
                    if _one_apart(c, best.candidate, self.space.counts(frame)) and self.looks.traces < most:
                        self._estimate(c)
                first = next(p for p in self._fitting() if p.candidate.frame == frame)

    def _asked(self, c: Candidate, look: Any) -> Any:
        """Return what a look finds; None if the library refuses the candidate, or cannot imagine it."""
        try:
            return look(c)
        except ValuesNeeded as error:
            self.unknown = True
            self._refuse(c, error)
            return None
        except (ConfigError, LayoutError, PlanError) as error:
            self._refuse(c, error)
            return None

    def _refuse(self, c: Candidate, error: ParlinalgError) -> None:
        first, *more = re.split(r": | \(at ", str(error))
        why = first if " " in first or not more else f"{first}: {more[0]}"  # "model: GPT cannot ..."
        self.refused[why] += 1
        self.refused_of.setdefault(why, c)

    def _full(self, c: Candidate) -> None:
        self.traced += 1
        look = self.looks.stretched if self.limited and self.looks.is_long(c) else self.looks.full
        found: Planned | None = self._asked(c, look)
        if found is None:
            return
        if not self._fits(found) and not c.offload:
            found = self._offloaded(c, look) or found
        if self._fits(found):
            self.done.append(found)
        else:
            self.too_full.append((found.bytes, c, found.stage))

    def _nothing_fits(self) -> str:
        for p in sorted(self.estimated.values(), key=lambda p: (p.bytes, str(p.candidate)))[:FULL]:
            self._full(p.candidate)
        if not self.too_full and self.crammed:
            need, frame, _ = min(self.crammed, key=lambda x: x[0])
            return (
                f"no configuration on {self.looks.ranks} ranks fits {format_bytes(self.memory)} a rank: the weights, "
                f"gradients and states alone need {format_bytes(need)}, in a form of {_kind(frame)}; give more memory "
                "or more ranks"
            )
        if not self.too_full:
            why, count = self.refused.most_common(1)[0]
            return f"no candidate can train this model on {self.looks.ranks} ranks; {count} of them: {why}"
        for _, c, stage in sorted(self.too_full, key=lambda x: (x[0], str(x[1])))[:MOST_LEAST]:
            if stage < 0:
                self._full(c)
        least = [(need, str(c), c) for need, c, stage in self.too_full if stage >= 0]
        least += [(need, name, p.candidate) for need, name, p in self.least if p.traced]
        if not least:
            why, count = self.refused.most_common(1)[0]
            return f"no candidate can train this model on {self.looks.ranks} ranks; {count} of them: {why}"
        need, _, c = min(least)
        of = f"none of the {self.traced} configurations traced" if self.limited else "no configuration"
        return (
            f"{of} on {self.looks.ranks} ranks fits {format_bytes(self.memory)} a rank: the least that "
            f"{'they need' if self.limited else 'would do'} is {format_bytes(need)}, by {c}; give that much memory, "
            f"more ranks or a smaller batch{self._no_room()}"
        )

    def _no_room(self) -> str:
        """Return what would fit if host memory and disks had more room, as a clause; empty if nothing would."""
        machine = self.looks.machine
        rooms = (
            ("host memory", "host", 0 if machine.host is None else machine.host.memory),
            ("the disk", "disk", 0 if machine.disk is None else machine.disk.size),
        )
        for _, name, p in sorted(self.no_room, key=lambda x: x[:2])[:1]:
            short = [
                f"{format_bytes(getattr(p, kind))} of {where}, which has {format_bytes(room)} a rank"
                for where, kind, room in rooms if getattr(p, kind) > room
            ]  # fmt: skip
            return f"; {name} would fit with {_and(short)}"
        return ""

    def lost(self, best: Sequence[Planned]) -> list[tuple[str, int, str]]:
        """Return groups of candidates that lost, with why."""
        chosen = {p.candidate for p in best}
        traced = {p.candidate for p in self.done}
        found: list[tuple[str, int, str]] = []
        groups: dict[str, list[Planned]] = {}
        known = [*self.done, *(p for p in self._fitting() if p.candidate not in traced)]
        for p in sorted(known, key=_order):
            if p.candidate not in chosen:
                groups.setdefault(_group(p.candidate), []).append(p)
        found += [(name, len(of), f"{why_slower(of[0], best[0])} ({of[0].candidate})") for name, of in groups.items()]
        full: dict[str, list[tuple[int, Candidate, int]]] = {}
        crowded = {c for _, c, _ in self.too_full}
        more = [
            (p.bytes, p.candidate, p.stage) for p in self.estimated.values()
            if not self._fits(p) and p.candidate not in crowded
        ]  # fmt: skip
        for each in sorted([*self.too_full, *more], key=lambda x: (x[0], str(x[1]))):
            full.setdefault(_group(each[1]), []).append(each)
        for name, of_ in full.items():
            need, c, stage = of_[0]
            where = f"stage {stage} needs" if stage >= 0 and c.pipeline > 1 else "a rank needs at least"
            found.append((name, len(of_), f"{where} {format_bytes(need)}, and has {format_bytes(self.memory)} ({c})"))
        slow: dict[str, list[tuple[float, str]]] = {}
        for bound, c in self.left:
            slow.setdefault(_group(c), []).append((bound, str(c)))
        for name, bounds in slow.items():
            bound, text = min(bounds)
            times = max(1.0, bound / best[0].seconds)
            found.append((name, len(bounds), f"the passes of its layers alone take {times:.2f}× the time ({text})"))
        found += [(_group(self.refused_of[why]), n, f"refused: {why}") for why, n in self.refused.items()]
        by_number = [sorted(x, key=lambda x: (-x[1], x[0])) for x in (found, self._unseen(best[0]))]
        return [*by_number[0][:40], *by_number[1][:20]]

    def _unseen(self, best: Planned) -> list[tuple[str, int, str]]:
        """Return groups of frames of which no candidate was traced, with why."""
        found = []
        full: dict[str, list[tuple[int, int]]] = {}
        for need, frame, number in self.crammed:
            full.setdefault(_kind(frame), []).append((need, number))
        for name, needs in full.items():
            least = format_bytes(min(need for need, _ in needs))
            why = f"weights, gradients and states need at least {least}, and a rank has {format_bytes(self.memory)}"
            found.append((name, sum(n for _, n in needs), why))
        mine = next((g for g, f, _ in self.others if f == best.candidate.frame), best.seconds)
        rest: dict[str, list[tuple[float, int]]] = {}
        for seconds, frame, number in self.others:
            rest.setdefault(_kind(frame), []).append((seconds, number))
        for name, guesses in rest.items():
            times = min(seconds for seconds, _ in guesses) / mine
            tried = [p for p in self.estimated.values() if _kind(p.candidate.frame) == name]
            why = f"not traced: products and words alone are guessed at {times:.1f}× the time"
            if tried:
                p = min(tried, key=_order)
                text = why_slower(p, best)
                verb = "is" if p.seconds < AS_FAST * best.seconds else "takes"
                why = f"not traced: the likeliest of them {verb} {text} ({p.candidate})"
            elif times < 1.05:
                why = "not traced: guessed to be slower than those that were"
            found.append((name, sum(n for _, n in guesses), why))
        return found


def _and(words: Sequence[str]) -> str:
    """Return words as an enumeration: "a, b and c"."""
    return " and ".join([*[", ".join(words[:-1])] * (len(words) > 1), *words[-1:]])


def _implied(kinds: Iterable[str]) -> set[str]:
    """Return kinds of what is offloaded with those that they take along."""
    return {each for kind in kinds for each in IMPLIED.get(kind, (kind,))}


def _one_apart(a: Candidate, b: Candidate, counts: Sequence[int]) -> bool:
    """Return True if candidates of one frame differ in one choice; numbers of microbatches by at most two steps."""

    def choices(c: Candidate) -> tuple[Any, ...]:
        return c.zero, c.microbatches, (c.schedule, c.chunks), c.recompute, c.dtype, c.experts, c.order

    if abs(counts.index(a.microbatches) - counts.index(b.microbatches)) > 2:
        return False
    return sum(x != y for x, y in zip(choices(a), choices(b), strict=True)) == 1


def _near(a: Frame, b: Frame) -> bool:
    """Return True if frames differ in the form of tensor parallelism, or in two sizes by a small factor."""
    mine, theirs = (
        (f.data, f.pipeline, f.sequence // f.ulysses, f.ulysses, f.tensor.ranks or 1) for f in (a, b)
    )  # fmt: skip
    if mine == theirs:
        return a != b
    apart = [max(x, y) / min(x, y) for x, y in zip(mine, theirs, strict=True) if x != y]
    return len(apart) == 2 and max(apart) <= 4


def _kind(frame: Frame) -> str:
    """Return the kinds of parallelism of a frame, without their sizes."""
    texts = ["pipeline"] * (frame.pipeline > 1)
    if (frame.tensor.ranks or 1) > 1:
        texts.append(str(frame.tensor.mode).upper())
    texts += ["Ulysses"] * (frame.ulysses > 1) + ["ring"] * (frame.sequence > frame.ulysses)
    return " × ".join(texts) or "data only"


def _order(p: Planned) -> tuple[float, int, str]:
    return p.seconds, p.bytes, str(p.candidate)


def _group(c: Candidate) -> str:
    return " × ".join(
        [*["pipeline"] * (c.pipeline > 1), c.form()] if c.form() else ["pipeline" if c.pipeline > 1 else "data only"]
    )


# ------------------------------------------------------------------------------------------------ single products
def product_seconds(plan: MatmulPlan, machine: Machine | str) -> Seconds:
    """Return a function from a grid (pm, pn, pk) to the seconds of a product on it, for `MatmulPlan.explain`.

    They are those of its largest block product and of its communication, one after the other.  Ranks stand in row-major
    order over m, n and k: those along k are next to each other.
    """
    found, itemsize = load_machine(machine), _itemsize(plan.dtype)

    def seconds(factors: Factors) -> tuple[float, float]:
        pm, pn, pk = factors
        m, n, k = (-(-extent // p) for extent, p in zip((plan.m, plan.n, plan.k), factors, strict=True))
        size = pm * pn * pk
        node = on_node(found, size)
        product = found.crowd(node, size) * found.gemm_seconds(Gemm(1, m, n, k, plan.dtype))
        moves = 0.0
        for op, elements, ranks, stride in (
            ("all_gather", m * k, pn, pk), ("all_gather", k * n, pm, pn * pk), ("reduce_scatter", m * n, pk, 1),
        ):  # fmt: skip
            if ranks > 1:
                local = max(1, min(ranks, node // stride))
                nbytes = elements * itemsize * (ranks - 1) / ranks
                moves += found.transfer(op, nbytes, ranks, local, node, size).total
        return product, moves

    return seconds
