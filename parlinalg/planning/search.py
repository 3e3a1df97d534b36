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
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

from parlinalg.errors import ConfigError, LayoutError, ParlinalgError, PlanError, ValuesNeeded
from parlinalg.grid import factorizations
from parlinalg.matmul.planner import Factors, MatmulPlan, Seconds
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.simulate import Costs, simulate
from parlinalg.planning.machine import Machine, load_machine
from parlinalg.planning.parts import Between, Inputs, Part, layer_keys, trace_part
from parlinalg.planning.timeline import Stage, Timeline, pipeline_timeline, timeline
from parlinalg.planning.trace import Gemm, Start, Trace
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import (
    DataParallelConfig,
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
from parlinalg.units import ITEMSIZE, format_bytes, parse_bytes

__all__ = ["Candidate", "Planned", "TrainingPlan", "plan_training"]

ALL, MANY = 64, 400  # ranks and candidates up to which every one is within reach
TRACES = 160  # of parts, for more than that
FULL = 6  # candidates that are traced in full there, before those near the fastest
ROUNDS = 4  # of those near the fastest
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
HOME = ("muon", "shampoo", "soap")  # optimizers with states that lie on one rank of many


# ------------------------------------------------------------------------------------------------ candidates
@dataclass(frozen=True, order=True)
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
    """

    data: int
    pipeline: int
    sequence: int
    ulysses: int
    tensor: TensorConfig = field(compare=False)
    zero: int
    microbatches: int
    schedule: str | None = field(compare=False)
    chunks: int | None = field(compare=False)
    recompute: str | None = field(compare=False)
    dtype: str | None = field(compare=False)

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
        return ", ".join([text, *options])

    def apply(self, config: TrainingConfig, batch: int) -> TrainingConfig:
        """Return the configuration of this candidate."""
        model = config.model
        if model.name in LANGUAGE:
            options = {k: v for k, v in model.options.items() if k != "recompute"}
            model = replace(model, options={**options, "recompute": self.recompute} if self.recompute else options)
        pipeline = replace(config.parallel.pipeline, size=self.pipeline)
        parallel = ParallelConfig(
            DataParallelConfig(self.data), pipeline if self.pipeline > 1 else PipelineConfig(),
            replace(config.parallel.sequence, size=self.sequence, ulysses=self.ulysses), self.tensor,
        )  # fmt: skip
        schedule = None
        if self.pipeline > 1:
            schedule = ScheduleConfig(str(self.schedule), self.microbatches, self.chunks)
        precision = config.precision
        if self.dtype != precision.dtype:
            precision = PrecisionConfig.parse("precision", self.dtype)
        return replace(
            config, parallel=parallel, model=model, schedule=schedule, batch_size=batch, precision=precision,
            gradient_accumulation=1 if self.pipeline > 1 else self.microbatches,
            zero=replace(config.zero, stage=self.zero),
        )  # fmt: skip

    def values(self, given: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """Return the keys of a configuration file with this candidate's choices in place."""
        values = dict(given)
        parallel: dict[str, Any] = {"data": self.data}
        if self.pipeline > 1:
            before = given.get("parallel", {})
            before = before.get("pipeline") if isinstance(before, Mapping) else None
            partition = (
                {"partition": before["partition"]} if isinstance(before, Mapping) and "partition" in before else {}
            )
            parallel["pipeline"] = {"size": self.pipeline, **partition}
        if self.sequence > 1:
            before = given.get("parallel", {})
            before = before.get("sequence") if isinstance(before, Mapping) else None
            order = {"order": before["order"]} if isinstance(before, Mapping) and "order" in before else {}
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
        if self.recompute is not None:
            model = given.get("model", "gpt")
            model = {"name": model} if isinstance(model, str) else dict(model)
            values["model"] = {**model, "recompute": self.recompute}
        return values


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


def divisors(n: int) -> list[int]:
    """Return the numbers that divide n, ascending."""
    return sorted({a for a, _ in factorizations(n, 2)})


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

    def __iter__(self) -> Iterator[Candidate]:
        config, ranks = self.config, self.ranks
        own = config.parallel
        for pipeline in [own.pipeline.ranks] if "pipeline" in self.parallel else divisors(ranks):
            if ranks % pipeline or pipeline > self.depth:
                continue
            for sequence, ulysses in self._sequences(ranks // pipeline):
                left = ranks // pipeline // sequence
                for data, tensor in self._data_and_tensor(left):
                    yield from self._steps(data, pipeline, sequence, ulysses, tensor)

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

    def _steps(
        self, data: int, pipeline: int, sequence: int, ulysses: int, tensor: TensorConfig
    ) -> Iterator[Candidate]:  # fmt: skip
        config = self.config
        stages = [config.zero.stage] if "zero" in self.given else [0, 1, 2, 3] if data > 1 else [0]
        fixed = "schedule" in self.given or "gradient_accumulation" in self.given
        if self.batch % data:
            return
        counts = [config.microbatches(pipeline)] if fixed else divisors(self.batch // data)
        model = config.model.options
        recompute: list[Any] = [model.get("recompute")]
        if config.model.name in LANGUAGE and "recompute" not in model:
            recompute = [None, "attention", "block"]
        for count in counts:
            if self.batch % (data * count) or (pipeline > 1 and not fixed and count < pipeline):
                continue
            for name, chunks in self._schedules(pipeline, count):
                for zero in stages:
                    for again in recompute:
                        for dtype in self.dtypes:
                            yield Candidate(
                                data, pipeline, sequence, ulysses, tensor, zero, count, name, chunks, again,
                                dtype or None,
                            )  # fmt: skip

    def _schedules(self, pipeline: int, count: int) -> Iterator[tuple[str | None, int | None]]:
        if pipeline == 1:
            yield None, None
        elif "schedule" in self.given and self.config.schedule is not None:
            yield self.config.schedule.name, self.config.schedule.chunks
        else:
            for name in SCHEDULES:
                if name != "interleaved":
                    if name != "zb-v" or 2 * pipeline <= self.depth:
                        yield name, None
                    continue
                for chunks in divisors(max(1, self.depth // pipeline)):
                    if chunks > 1 and count % pipeline == 0:
                        yield name, chunks


# ------------------------------------------------------------------------------------------------ looks
@dataclass(frozen=True)
class Planned:
    """A candidate that was traced in full.

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
    stage : int
        The pipeline rank whose memory is the fullest.
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
    stage: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


class Looks:
    """The looks at candidates, with the traces they have in common."""

    def __init__(self, config: TrainingConfig, ranks: int, machine: Machine, batch: int) -> None:
        self.config, self.ranks, self.machine, self.batch = config, ranks, machine, batch
        self.inputs = Inputs.of(config)
        self.node = on_node(machine, ranks)
        self.target = "gpu" if machine.kernels.asynchronous else "cpu"
        self.traces = 0
        self._parts: dict[Any, Part] = {}
        self._seconds: dict[tuple[int, str, bool], float] = {}
        self._alone: dict[str | None, tuple[Part, list[Any], float]] = {}

    @cached_property
    def _quick(self) -> Machine:
        """The machine for bounds: launching is hidden by the device's earlier work, however much there was."""
        if not self.machine.kernels.asynchronous:
            return self.machine
        return replace(self.machine, kernels=replace(self.machine.kernels, overhead=0.0))

    # -------------------------------------------------------------------------------------------- the model
    def alone(self, dtype: str | None) -> tuple[Part, list[Any], float]:
        """Return the whole model's part on one rank, its layers' keys and the operations of its linear products."""
        if dtype not in self._alone:
            config = Candidate(1, 1, 1, 1, TensorConfig(), 0, 1, None, None, None, dtype).apply(self.config, 1)
            seen: list[Any] = []
            part = trace_part(config, self.inputs, 1, 1, node=1, target=self.target, seen=seen.append)
            model = seen[0]
            self._alone[dtype] = part, layer_keys(model), _linear_flops(model, self.batch, self.inputs)
        return self._alone[dtype]

    @cached_property
    def model_flops(self) -> float:
        """Operations of a step that the model needs."""
        config = Candidate(1, 1, 1, 1, TensorConfig(), 0, 1, None, None, None, None).apply(self.config, 1)
        seen: list[Any] = []
        trace_part(config, self.inputs, 1, 1, layers=(0, 1), node=1, target=self.target, update=False, seen=seen.append)
        return _flops(seen[0], self.batch, self.inputs)

    @property
    def depth(self) -> int:
        """The layers that a pipeline cuts."""
        return len(self.alone(self.config.precision.dtype)[1])

    # -------------------------------------------------------------------------------------------- bounds
    def static_bound(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, without a trace.

        All ranks together make at least the products of the model with its weights, forward and twice backward: those
        of attention's pairs are left out, as masked ones may be skipped.  One rank makes at least the mean, each
        product no faster than the fastest of the machine.
        """
        flops = self.alone(c.dtype)[2]
        dtype = c.dtype or self.config.dtype
        return flops / self.ranks / best_rate(self.machine, dtype)

    def memory_bound(self, c: Candidate) -> int:
        """Return bytes that the fullest rank of a candidate cannot be below, without a trace.

        Each weight, gradient and state is on at least one of the pipeline × tensor ranks of a copy of the model; ZeRO's
        stages share states, gradients and weights between the data parallel ranks, and experts and matrix-wise
        optimizers may share theirs between any.  The fullest rank holds at least the mean.
        """
        part = self.alone(c.dtype)[0]
        options = self.config.model.options
        ranks = c.pipeline * (c.tensor.ranks or 1)
        if int(options.get("num_local_experts", 1)) > 1:
            ranks = self.ranks

        def share(stage: int) -> int:
            return min(self.ranks, ranks * c.data) if c.zero >= stage else ranks

        states = self.ranks if self.config.optimizer.name in HOME else share(1)
        return part.weights // share(3) + part.gradients // share(2) + part.states // states

    def time_bound(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, by traces of its distinct layers.

        A rank runs its layers one after the other, forward and backward, once for each microbatch.  Within them it
        computes and waits as in a trace without other ranks' copies, ZeRO or reductions, which only add.  The busiest
        rank of a pipeline has at least the mean of all ranks' work, and the first layer alone passes before the second
        stage begins.
        """
        total = 0.0
        for part in self._layers(c, bound=True):
            total += self.seconds(part, "forward", quick=True) + self.seconds(part, "backward", quick=True)
        return max(self.static_bound(c), c.microbatches * total / c.pipeline)

    def seconds(self, part: Part, span: str, quick: bool = False) -> float:
        """Return the seconds of a span of a part."""
        key = id(part), span, quick
        if key not in self._seconds:
            trace = part.span(span)
            trace.size = self.ranks
            machine = self._quick if quick else self.machine
            self._seconds[key] = timeline(trace, machine, on_node=self.node).seconds if trace.events else 0.0
        return self._seconds[key]

    # -------------------------------------------------------------------------------------------- parts
    def _part(self, key: Any, config: TrainingConfig, ranks: int, rows: int, **more: Any) -> Part:
        if key not in self._parts:
            self._parts[key] = self.trace(config, ranks, rows, **more)
        return self._parts[key]

    def trace(self, config: TrainingConfig, ranks: int, rows: int, **more: Any) -> Part:
        """Return `trace_part` of a configuration on the machine's nodes; another software's kernels may replace its."""
        self.traces += 1
        return trace_part(config, self.inputs, ranks, rows, node=self.node, target=self.target, **more)

    def _layers(self, c: Candidate, bound: bool) -> list[Part]:
        """Return the parts of all layers of a candidate's model: passes of one copy of it for a bound, else its own."""
        rows = self.batch // c.data // c.microbatches
        if bound:
            c = replace(c, data=1, pipeline=1, zero=0, microbatches=1, schedule=None, chunks=None)
        ranks = c.width if bound else self.ranks
        config = c.apply(self.config, rows * c.data)
        keys = self.alone(c.dtype)[1]
        shape = (c.data, c.pipeline, c.sequence, c.ulysses, c.tensor, c.zero, c.recompute, c.dtype, rows)
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
    def estimate(self, c: Candidate) -> tuple[float, int]:
        """Return about how many seconds a step takes, and how many bytes the fullest rank holds, by traced layers."""
        parts = self._layers(c, bound=False)
        forward = [self.seconds(p, "forward") for p in parts]
        backward = [self.seconds(p, "backward") for p in parts]
        update = [self.seconds(p, "update") for p in parts]
        transient = max(p.transient for p in parts)
        if c.pipeline == 1:
            one = sum(forward) + sum(backward)
            ends = [self.seconds(p, "end") for p in parts]
            reduce = [max(0.0, e - f - b - u) for e, f, b, u in zip(ends, forward, backward, update, strict=True)]
            hidden = sum(backward) if self.machine.overlap.progress == "asynchronous" else 0.0
            exposed = max(*reduce, sum(reduce) - hidden)
            return c.microbatches * one + exposed + sum(update), sum(p.rest + p.kept for p in parts) + transient
        spec, config = self._spec(c)
        schedule, counts = self._schedule(spec, config)
        cuts = _cuts(counts)
        stage = [range(a, b) for a, b in cuts]
        reduce = [self.seconds(p, "reduce") for p in parts]
        own = [[i for chunk in held for i in stage[chunk.stage]] for held in schedule.chunks]
        costs = Costs(
            forward=[sum(forward[i] for i in s) for s in stage],
            backward=[sum(backward[i] for i in s) for s in stage],
            weight=[sum(backward[i] for i in s) / 2 for s in stage],
            latency=self.machine.transfer("send", parts[0].message, 2, 1 if self.ranks > self.node else 2, self.node,
                                          self.ranks).total,
            reduce=[sum(reduce[i] for i in held) for held in own],
            step=[sum(update[i] for i in held) for held in own],
        )  # fmt: skip
        run = simulate(schedule, costs)
        most = 0
        for r, held in enumerate(own):
            kept = max((sum(parts[i].kept for i in stage[c.stage]) for c in schedule.chunks[r]), default=0)
            most = max(most, sum(parts[i].rest for i in held) + run.held[r] * kept + transient)
        return run.makespan, most

    def _spec(self, c: Candidate) -> tuple[MeshSpec, TrainingConfig]:
        config = c.apply(self.config, self.batch)
        return resolve(config, self.ranks), config

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
            part = self.trace(config, self.ranks, whole)
            run = self._alone_run(part, c.microbatches)
            seconds = run[0]
            memory = _memory(part.weights, part.gradients, part.states, part.kept, part.transient)
            starts = _starts(part.span("forward"), part.span("backward")), _starts(part.span("end"))
            moved = self._moved([(c.microbatches - 1, starts[0]), (1, starts[1])])
            return self._planned(c, config, seconds, memory, moved, 0.0, run[1], 0)
        schedule, counts = self._schedule(spec, config)
        keys = self.alone(c.dtype)[1]
        stages: list[Stage] = []
        parts: list[Part] = []
        given: Between | None = None
        known: dict[Any, Part] = {}
        for s, (a, b) in enumerate(_cuts(counts)):
            key = (tuple(keys[a:b]), given)
            if key not in known:
                known[key] = self.trace(config, self.ranks, whole, layers=(a, b), given=given, stage=schedule.holder(s))
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
        made = pipeline_timeline(
            schedule, stages, self.machine, reduce=[r for r, _ in ends], step=[u for _, u in ends], places=places,
            on_node=self.node,
        )  # fmt: skip
        assert made.simulation is not None
        memory, stage = {}, 0
        for r, held in enumerate(schedule.chunks):
            of = [parts[k.stage] for k in held]
            here = _memory(
                sum(p.weights for p in of), sum(p.gradients for p in of), sum(p.states for p in of),
                made.simulation.held[r] * max(p.kept for p in of), max(p.transient for p in of),
            )  # fmt: skip
            if sum(here.values()) > sum(memory.values()):
                memory, stage = here, r
        passes = c.microbatches
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
        return self._planned(c, config, made.seconds, memory, moved, made.bubble, _shares(made), stage)

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
        moved: tuple[int, int, int], bubble: float, causes: Mapping[str, float], stage: int,
    ) -> Planned:  # fmt: skip
        units = self.batch * (self.inputs.length if self.inputs.language else 1)
        peak = self.machine.peak(c.dtype or self.config.dtype) / self.machine.crowd(self.node, self.ranks)
        mfu = self.model_flops / (seconds * self.ranks * peak)
        return Planned(c, config, seconds, memory, *moved, bubble, causes, units / seconds, mfu, stage)


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
        """Write this configuration as a Python file."""
        first = self.best[0]
        head = (
            f'"""Planned for {self.ranks} ranks of {self.machine.name}: {first.candidate}.\n\nA step of {self.batch} '
            f'samples is predicted to take {_time(first.seconds)}, and {format_bytes(first.bytes)} a rank.\n"""\n\n'
        )
        body = "".join(f"{name} = {value!r}\n" for name, value in self.configuration.items())
        Path(path).write_text(head + body, encoding="utf-8")

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
                str(i), _time(p.seconds), f"{p.throughput:,.0f}", f"{100 * p.mfu:.0f}%", format_bytes(p.bytes),
                f"{p.words:.3g}", format_bytes(p.across), f"{100 * p.bubble:.0f}%", str(p.candidate),
            ))  # fmt: skip
        wide = [max(len(row[k]) for row in rows) for k in range(len(head) - 1)]
        for row in rows:
            lines.append("  ".join([*(text.rjust(w) for text, w in zip(row, wide, strict=False)), row[-1]]).rstrip())
        lines += ["", "memory     " + ", ".join(f"{name} {format_bytes(n)}" for name, n in first.memory.items())]
        lines.append(
            "time       " + ", ".join(f"{cause} {100 * s:.0f}%" for cause, s in list(first.causes.items())[:6])
        )
        if self.lost:
            lines += ["", "lost"]
            wide0 = max(len(what) for what, _, _ in self.lost)
            lines += [f"  {what:<{wide0}}  {count:>6}  {why}" for what, count, why in self.lost]
        return "\n".join(lines)

    __str__ = explain


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def why_slower(other: Planned, best: Planned) -> str:
    """Return why a candidate lost against the best, in words: what costs the most of the difference."""
    times = other.seconds / best.seconds
    if times < 1.005:
        return "is as fast"
    reasons: list[tuple[float, str]] = []
    for name, mine, theirs in (
        ("across nodes", other.across, best.across), ("within nodes", other.within, best.within),
    ):  # fmt: skip
        share = sum(s for cause, s in other.causes.items() if " over " in cause) * other.seconds
        own = sum(s for cause, s in best.causes.items() if " over " in cause) * best.seconds
        if mine > 1.02 * theirs and share > own:
            text = f"moves {mine / theirs:.1f}× the bytes {name}" if theirs else f"moves {format_bytes(mine)} {name}"
            reasons.append(((share - own) * (1.0 if name == "across nodes" else 0.5), text))
    bubble = other.bubble * other.seconds - best.bubble * best.seconds
    reasons.append((bubble, f"idles {100 * other.bubble:.0f}% in the pipeline's bubble"))
    for cause in ("products", "other kernels"):
        more = other.causes.get(cause, 0.0) * other.seconds - best.causes.get(cause, 0.0) * best.seconds
        why = f"{cause} take {_time(max(0.0, more))} more"
        if other.candidate.recompute and not best.candidate.recompute:
            why = f"computes {other.candidate.recompute}s again"
        reasons.append((more, why))
    most = max(reasons)
    return f"{times:.2f}× the time: {most[1]}" if most[0] > 0 else f"{times:.2f}× the time"


# ------------------------------------------------------------------------------------------------ the search
def plan_training(
    config: TrainingConfig | Mapping[str, Any] | str | Path, *, ranks: int, machine: Machine | str | PathLike[str],
    memory: int | str | None = None, global_batch: int | None = None, best: int = 10, settings: Sequence[str] = (),
    exhaustive: bool = False,
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
    machine : Machine, str or path
        The name of a shipped machine, or a file.
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

    Raises
    ------
    ConfigError
        If the configuration, the machine or a number is wrong.
    PlanError
        If no candidate can split the batch, or none fits the memory; the message says the least that would do.
    """
    began = perf_counter()
    _whole("ranks", ranks)
    _whole("best", best)
    if global_batch is not None:
        _whole("global_batch", global_batch)
    given = _values(config, settings)
    checked = parse(given)
    found = load_machine(machine)
    limit = _room(found, ranks) if memory is None else _bytes(memory)
    batch = checked.batch_size if global_batch is None else global_batch
    looks = Looks(checked, ranks, found, batch)
    space = Space(checked, given, ranks, batch, looks.depth, _dtypes(checked, given, found))
    search = _Search(looks, list(space), limit, best, exhaustive)
    if not search.candidates:
        raise PlanError(_no_split(checked, given, ranks, batch))
    planned = search.run()
    return TrainingPlan(
        found, ranks, limit, batch, tuple(planned), tuple(search.lost(planned)), len(search.candidates),
        search.traced, search.proven, perf_counter() - began, given, looks.inputs.language,
    )  # fmt: skip


def _room(machine: Machine, ranks: int) -> int:
    """Return the bytes a rank may use; more ranks than a node is meant for share its memory."""
    return machine.memory * machine.ranks_per_node // max(machine.ranks_per_node, on_node(machine, ranks))


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: a plan takes a whole number of at least 1")


def _bytes(value: int | str) -> int:
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"memory: {error}") from None
    if found < 1:
        raise ConfigError(f"memory={value!r}: a rank needs some, such as 80GiB")
    return found


def _values(config: Any, settings: Sequence[str]) -> dict[str, Any]:
    given = config.given() if isinstance(config, TrainingConfig) else config
    values = override(dict(given) if isinstance(given, Mapping) else read(given), settings)
    if values.get("parallel") == "auto":
        del values["parallel"]
    return values


def _dtypes(config: TrainingConfig, given: Mapping[str, Any], machine: Machine) -> list[str]:
    """Return the dtypes of `precision` to search, "" for none: those that the machine multiplies faster."""
    if "precision" in given or "dtype" in given:
        return [config.precision.dtype or ""]
    faster = [d for d in ("bfloat16",) if d in machine.gemm and best_rate(machine, d) > best_rate(machine, "float32")]
    return [""] if not faster else ["", *faster]


def _no_split(config: TrainingConfig, given: Mapping[str, Any], ranks: int, batch: int) -> str:
    parallel = given.get("parallel") or {}
    fixed = f" with parallel={dict(parallel)}" if parallel else ""
    return (
        f"a batch of {batch} samples cannot be split evenly over {ranks} ranks{fixed}: the data parallel ranks times "
        f"the microbatches divide the batch; give a global batch with more divisors, such as a multiple of {ranks}, or "
        "leave keys of parallel and schedule out"
    )


class _Search:
    """Candidates, and how far each was looked at."""

    def __init__(self, looks: Looks, candidates: Sequence[Candidate], memory: int, best: int, exhaustive: bool) -> None:
        self.looks, self.candidates, self.memory, self.best = looks, candidates, memory, best
        self.exhaustive = exhaustive
        self.limited = not exhaustive and (looks.ranks > ALL or len(candidates) > MANY)
        self.done: list[Planned] = []
        self.too_full: list[tuple[int, Candidate, int]] = []
        self.refused: Counter[str] = Counter()
        self.refused_of: dict[str, Candidate] = {}
        self.left: list[tuple[float, Candidate]] = []
        self.traced, self.proven = 0, True
        self.unknown = False  # whether some cannot be imagined

    def run(self) -> list[Planned]:
        """Return the best, the fastest first."""
        fitting = []
        for n, c in enumerate(self.candidates):
            if (need := self.looks.memory_bound(c)) > self.memory:
                self.too_full.append((need, c, -1))
            else:
                fitting.append((self.looks.static_bound(c), _guess(c, self.looks.node), n, c))
        if self.exhaustive:
            for _, _, _, c in fitting:
                self._full(c)
        elif self.limited:
            self._reach(fitting)
        else:
            self._prove(fitting)
        if not self.done:
            raise PlanError(self._nothing_fits())
        self.proven = self.proven and not self.unknown
        return sorted(self.done, key=_order)[: self.best]

    def _prove(self, fitting: Sequence[tuple[float, Any, int, Candidate]]) -> None:
        """Trace candidates in the order of their bounds, until none that is left can be among the best."""
        heap = [(bound, 0, n, c) for bound, _, n, c in fitting]
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

    def _reach(self, fitting: Sequence[tuple[float, Any, int, Candidate]]) -> None:
        """Estimate as many candidates as there are traces for, and trace the first of them in full.

        Forms and lengths of the pipeline take turns, so that each comes up before any has all its candidates looked at.
        """
        turns: Counter[tuple[str, int]] = Counter()
        ranked = []
        for i, each in enumerate(sorted(fitting, key=lambda x: (x[1], x[0], x[2]))):
            group = each[3].form(), each[3].pipeline
            ranked.append((turns[group], i, each))
            turns[group] += 1
        order = [each for _, _, each in sorted(ranked)]
        bounds = {n: bound for bound, _, n, _ in fitting}
        seen: set[int] = set()  # what is refused, too full or traced
        near: list[tuple[float, int, Candidate]] = []
        for _, _, n, c in order:
            if self.looks.traces >= TRACES // 2:
                break
            if (bound := self._asked(c, self.looks.time_bound)) is None:
                seen.add(n)
            else:
                bounds[n] = bound
                near.append((bound, n, c))
        estimates: list[tuple[float, int, Candidate]] = []
        for bound, n, c in sorted(near, key=lambda x: x[:2]):
            least = sorted(e for e, _, _ in estimates)
            if self.looks.traces >= TRACES or (len(least) >= self.best and bound > least[self.best - 1]):
                break
            if (found := self._asked(c, self.looks.estimate)) is None:
                seen.add(n)
            elif found[1] <= self.memory:
                estimates.append((found[0], n, c))
        for _, n, c in sorted(estimates, key=lambda x: x[:2])[: 4 * FULL]:
            if len(self.done) < FULL:
                seen.add(n)
                self._full(c)
        self._climb(fitting, seen)
        self.left = [(bounds[n], c) for _, _, n, c in fitting if n not in seen]
        least_time = min((p.seconds for p in self.done), default=math.inf)
        self.proven = all(bound >= least_time for bound, _ in self.left)

    def _climb(self, fitting: Sequence[tuple[float, Any, int, Candidate]], seen: set[int]) -> None:
        """Trace those that differ from the fastest in one choice, as long as one of them is faster."""
        best: Planned | None = None
        for _ in range(ROUNDS):
            fastest = min(self.done, key=_order, default=None)
            if fastest is None or fastest is best:
                return
            best = fastest
            for _, _, n, c in fitting:
                if n not in seen and _one_apart(c, best.candidate):
                    seen.add(n)
                    self._full(c)

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
        why = re.split(r":| \(at ", str(error))[0]
        self.refused[why] += 1
        self.refused_of.setdefault(why, c)

    def _full(self, c: Candidate) -> None:
        self.traced += 1
        found: Planned | None = self._asked(c, self.looks.full)
        if found is None:
            return
        if found.bytes > self.memory:
            self.too_full.append((found.bytes, c, found.stage))
        else:
            self.done.append(found)

    def _nothing_fits(self) -> str:
        if not self.too_full:
            why, count = self.refused.most_common(1)[0]
            return f"no candidate can train this model on {self.looks.ranks} ranks; {count} of them: {why}"
        least: list[tuple[int, Candidate]] = []
        for need, c, stage in sorted(self.too_full, key=lambda x: (x[0], str(x[1])))[:40]:
            if stage >= 0:
                least.append((need, c))
            elif (found := self._asked(c, self.looks.full)) is not None:
                least.append((found.bytes, c))
        if not least:
            why, count = self.refused.most_common(1)[0]
            return f"no candidate can train this model on {self.looks.ranks} ranks; {count} of them: {why}"
        need, c = min(least, key=lambda x: x[0])
        of = f"none of the {self.traced + len(least)} configurations traced" if self.limited else "no configuration"
        return (
            f"{of} on {self.looks.ranks} ranks fits {format_bytes(self.memory)} a rank: the least that "
            f"{'they need' if self.limited else 'would do'} is {format_bytes(need)}, by {c}; give that much memory, "
            "more ranks or a smaller batch"
        )

    def lost(self, best: Sequence[Planned]) -> list[tuple[str, int, str]]:
        """Return groups of candidates that lost, with why."""
        chosen = {id(p) for p in best}
        found: list[tuple[str, int, str]] = []
        groups: dict[str, list[Planned]] = {}
        for p in sorted(self.done, key=_order):
            if id(p) not in chosen:
                groups.setdefault(_group(p.candidate), []).append(p)
        found += [(name, len(of), f"{why_slower(of[0], best[0])} ({of[0].candidate})") for name, of in groups.items()]
        full: dict[str, list[tuple[int, Candidate, int]]] = {}
        for each in sorted(self.too_full, key=lambda x: (x[0], str(x[1]))):
            full.setdefault(_group(each[1]), []).append(each)
        for name, of_ in full.items():
            need, c, stage = of_[0]
            where = f"stage {stage} needs" if stage >= 0 and c.pipeline > 1 else "a rank needs at least"
            found.append((name, len(of_), f"{where} {format_bytes(need)} of {format_bytes(self.memory)} ({c})"))
        slow: dict[str, list[float]] = {}
        for bound, c in self.left:
            slow.setdefault(_group(c), []).append(bound)
        for name, bounds in slow.items():
            times = min(bounds) / best[0].seconds
            found.append((name, len(bounds), f"not traced: at least {times:.2f}× the time"))
        found += [(_group(self.refused_of[why]), n, f"refused: {why}") for why, n in self.refused.items()]
        return sorted(found, key=lambda x: (-x[1], x[0]))[:40]


def _one_apart(a: Candidate, b: Candidate) -> bool:
    """Return True if candidates use the ranks alike and differ in one other choice."""

    def ranks(c: Candidate) -> tuple[Any, ...]:
        return c.data, c.pipeline, c.sequence, c.ulysses, c.tensor

    def choices(c: Candidate) -> tuple[Any, ...]:
        return c.zero, c.microbatches, (c.schedule, c.chunks), c.recompute, c.dtype

    return ranks(a) == ranks(b) and sum(x != y for x, y in zip(choices(a), choices(b), strict=True)) == 1


def _order(p: Planned) -> tuple[float, int, str]:
    return p.seconds, p.bytes, str(p.candidate)


def _group(c: Candidate) -> str:
    return " × ".join(
        [*["pipeline"] * (c.pipeline > 1), c.form()] if c.form() else ["pipeline" if c.pipeline > 1 else "data only"]
    )


def _guess(c: Candidate, node: int) -> tuple[Any, ...]:
    """Return a key by which likely candidates come first: groups within a node, few axes, few stages, no work twice."""
    axes = {None: 0, "1d": 1, "2d": 2, "2.5d": 3, "3d": 3}.get(c.tensor.mode, 1) + (c.sequence > 1) + (c.ulysses > 1)
    return (
        c.width > node,
        axes,
        {None: 0, "attention": 1, "block": 1}[c.recompute],
        c.zero == 3,
        c.width,
        abs(math.log2(max(1, c.pipeline))),
        -c.microbatches,
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
