"""Ways to train a model on so many ranks: what a configuration leaves open, as candidates of a search.

A candidate is a configuration: data × pipeline × sequence × tensor ranks in all shapes, with a schedule, microbatches,
ZeRO, recomputation and dtype where the given configuration leaves them open.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from parlinalg.errors import ScheduleError, counted, enumerated
from parlinalg.grid import factorizations
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.schemes import for_mode
from parlinalg.sequence import ORDERS
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import (
    MOST_MICROBATCHES,
    DataParallelConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ScheduleConfig,
    TensorConfig,
    TrainingConfig,
)

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "gpipe")
"""All synchronous ones; pipedream and pipedream-2bw step with weights that are older than the gradients' microbatches,
which is another training, so that they are planned only where the configuration names one.  GPipe holds all
microbatches, but waits for no answer from later stages: where messages take long it is faster than 1F1B."""
RING_ORDERS = ("zigzag", *(order for order in ORDERS if order != "zigzag"))
Offload = tuple[tuple[str, str], ...]
IMPLIED = {"parameters": ("parameters", "gradients")}
"""The kinds of what is offloaded that take others along."""


class MeshShape(NamedTuple):
    """The sizes of a mesh as in the configuration, and the form of tensor parallelism."""

    data: int
    pipeline: int
    sequence: int
    ulysses: int
    tensor: TensorConfig

    @property
    def width(self) -> int:
        """The ranks that share one copy of a stage."""
        return self.sequence * (self.tensor.ranks or 1)

    @property
    def copies(self) -> int:
        """The ranks that hold the same weights without ZeRO: all data parallel ranks and those of a sequence."""
        return self.data * self.sequence


@dataclass(frozen=True)
class Candidate:
    """One way to use the ranks.

    Attributes
    ----------
    data, pipeline, sequence, ulysses : int
        As in the configuration.
    tensor : TensorConfig
    zero : int
        The stage of ZeRO.
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
    asked : int or None
        The microbatches that the configuration gives, where the samples are fewer and the schedule cannot take their
        number: as in training, each step then has all forward passes before all backward passes.
    expert_ranks : int or None
        The data parallel ranks over which experts are cut, where these are groups of them.
    within : int or None
        The data parallel ranks of a group within which ZeRO shards; None for all with those that share a sequence, or
        what the configuration gives.
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
    asked: int | None = None
    expert_ranks: int | None = None
    within: int | None = None

    @property
    def mesh(self) -> MeshShape:
        """The shape of the mesh."""
        return MeshShape(self.data, self.pipeline, self.sequence, self.ulysses, self.tensor)

    @property
    def width(self) -> int:
        """The ranks that share one copy of a stage."""
        return self.mesh.width

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
            how = f", {self.chunks} chunks" if self.chunks else ""
            how += "" if self.asked is None else ", all forward passes first"
            parts.append(f"pipeline {self.pipeline} ({self.schedule}{how})")
        parts += [self.form()] if self.form() else []
        text = " × ".join(parts) or "one rank"
        shared = f" within groups of {self.within}" if self.within else ""
        options = [f"ZeRO {self.zero}{shared}"] * bool(self.zero)
        options += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        options += [f"recompute {self.recompute}"] * (self.recompute is not None)
        options += [str(self.dtype)] * (self.dtype is not None)
        if self.expert_ranks is not None:
            options.append(f"experts on {counted(self.expert_ranks, 'data rank')}")
        elif self.experts not in (None, "none"):
            options.append(f"experts on {self.experts}")
        options += [f"{self.order} order"] * (self.order not in (None, "zigzag"))
        for place, where in (("host", "in host memory"), ("disk", "on a disk")):
            kinds = [kind for kind, to in self.offload if to == place]
            options += [f"{enumerated(kinds)} {where}"] * bool(kinds)
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
            replace(config.parallel.sequence, size=self.sequence, ulysses=self.ulysses), self.tensor, self.expert_ranks,
        )  # fmt: skip
        if self.order is not None:
            parallel = replace(parallel, sequence=replace(parallel.sequence, order=self.order))
        offload = config.offload
        if self.offload:
            away: dict[str, Any] = dict(self.offload)
            offload = replace(offload, **away)
        schedule = None
        if self.pipeline > 1:
            schedule = ScheduleConfig(str(self.schedule), self.asked or self.microbatches, self.chunks)
        precision = config.precision
        if self.dtype != precision.dtype:
            precision = PrecisionConfig.parse("precision", self.dtype)
        return replace(
            config, parallel=parallel, model=model, schedule=schedule, batch_size=batch, precision=precision,
            gradient_accumulation=1 if self.pipeline > 1 else self.microbatches,
            zero=replace(config.zero, stage=self.zero, within=self.within or config.zero.within), offload=offload,
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
        if self.expert_ranks is not None:
            parallel["experts"] = self.expert_ranks
        values["parallel"] = parallel
        values["batch_size"] = batch
        values.pop("schedule", None)
        values.pop("gradient_accumulation", None)
        if self.pipeline > 1:
            chunks = {"chunks": self.chunks} if self.chunks else {}
            values["schedule"] = {"name": self.schedule, "microbatches": self.asked or self.microbatches, **chunks}
        elif self.microbatches > 1:
            values["gradient_accumulation"] = self.microbatches
        if "zero" not in given and self.zero:
            values["zero"] = {"stage": self.zero, "within": self.within} if self.within else self.zero
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


def mode_of(tensor: TensorConfig) -> tuple[Any, dict[str, int]]:
    """Return the module of a form of tensor parallelism, and the sizes of its axes."""
    module = for_mode(tensor.mode, depth_on=tensor.depth_on, sequence_parallel=tensor.sequence_parallel or None)
    return module, dict(module.sizes(tensor.ranks or 1, tensor.shape, tensor.depth))


@cache
def divisors(n: int, most: int | None = None) -> list[int]:
    """Return the numbers that divide n, up to `most` if given, ascending."""
    return [d for d in range(1, min(n, most or n) + 1) if n % d == 0]


def given_offload(config: TrainingConfig) -> Offload:
    """Return what a configuration lets rest elsewhere, by its kinds, and where."""
    kinds = ("optimizer", "activations", "parameters", "gradients")
    places = ((kind, getattr(config.offload, kind)) for kind in kinds)
    return tuple((kind, place) for kind, place in places if place is not None)


def implied(kinds: Iterable[str]) -> set[str]:
    """Return kinds of what is offloaded with those that they take along."""
    return {each for kind in kinds for each in IMPLIED.get(kind, (kind,))}


def offload_sets(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all sets of kinds that may be offloaded together, those that take the fewest along first."""
    sets = (chosen for n in range(1, len(kinds) + 1) for chosen in itertools.combinations(kinds, n))
    found = [chosen for chosen in sets if not {"parameters", "gradients"} <= {*chosen}]
    return sorted(found, key=lambda chosen: len(implied(chosen)))


class Space:
    """The candidates that a configuration leaves open."""

    def __init__(
        self, config: TrainingConfig, given: Mapping[str, Any], ranks: int, batch: int, depth: int,
        dtypes: Sequence[str], uneven: bool = False, node: int | None = None,
    ) -> None:  # fmt: skip
        parallel = given.get("parallel") or {}
        self.parallel = dict(parallel) if isinstance(parallel, Mapping) else {}
        self.config, self.given, self.ranks, self.batch, self.depth = config, given, ranks, batch, depth
        self.dtypes = dtypes
        self.uneven = uneven
        """True if the batch need not split evenly, as where it is all samples that there are."""
        self.node = ranks if node is None else node
        """Ranks on a node, within which ZeRO may shard."""
        self._numbers: dict[tuple[int, int], int] = {}
        schedule = given.get("schedule")  # a configuration without a pipeline has none
        self.schedule = None if schedule is None else ScheduleConfig.parse("schedule", schedule)
        self.offload = given_offload(config)
        """The parts of the state that the configuration offloads, and where to: the same for all candidates."""

    def __iter__(self) -> Iterator[Candidate]:
        for mesh in self.meshes():
            yield from self.steps(mesh)

    def __len__(self) -> int:
        """The number of candidates; `len` of 10 million is as quick as of ten."""
        return sum(self.count(mesh) for mesh in self.meshes())

    def meshes(self) -> Iterator[MeshShape]:
        """Yield the meshes of these ranks."""
        ranks, own = self.ranks, self.config.parallel
        for pipeline in [own.pipeline.ranks] if "pipeline" in self.parallel else divisors(ranks):
            if ranks % pipeline or pipeline > self.depth:
                continue
            for sequence, ulysses in self._sequences(ranks // pipeline):
                left = ranks // pipeline // sequence
                for data, tensor in self._data_and_tensor(left):
                    if (self.uneven or self.batch % data == 0) and data % (own.experts or 1) == 0:
                        yield MeshShape(data, pipeline, sequence, ulysses, tensor)

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

    def steps(self, mesh: MeshShape) -> Iterator[Candidate]:
        """Yield the candidates on a mesh."""
        data, pipeline, sequence, ulysses, tensor = mesh
        for count in self.counts(mesh):
            for name, chunks in self._schedules(pipeline, count):
                asked = self._asked(pipeline, count, name, chunks)
                choices = [(*cut, *zero) for cut in self.experts(mesh) for zero in self.zeros(mesh, cut[1])]
                for again, dtype, (experts, group, zero, within), order in itertools.product(
                    self.recompute, self.dtypes, choices, self._orders(mesh)
                ):
                    yield Candidate(
                        data, pipeline, sequence, ulysses, tensor, zero, count, name, chunks, again, dtype or None,
                        experts, order, self.offload, asked, group, within,
                    )  # fmt: skip

    def count(self, mesh: MeshShape) -> int:
        """Return the number of candidates on a mesh."""
        key = mesh.data, mesh.pipeline
        if key not in self._numbers:
            others = len(self.recompute) * len(self.dtypes)
            schedules = sum(len(list(self._schedules(mesh.pipeline, n))) for n in self.counts(mesh))
            self._numbers[key] = others * schedules
        choices = sum(len(self.zeros(mesh, group)) for _, group in self.experts(mesh))
        return self._numbers[key] * choices * len(self._orders(mesh))

    def counts(self, mesh: MeshShape) -> list[int]:
        """Return the numbers of microbatches that split the batch evenly, or nearly so where it is `uneven`."""
        each, pipeline = self.batch // mesh.data, mesh.pipeline
        if self.uneven:
            return self._uneven_counts(each, pipeline)
        if "schedule" in self.given or "gradient_accumulation" in self.given:
            count = self.config.microbatches(pipeline)
            return [count] if each % count == 0 else []
        return [n for n in divisors(each, MOST_MICROBATCHES) if n >= pipeline or pipeline == 1]

    def _uneven_counts(self, each: int, pipeline: int) -> list[int]:
        """Return the numbers of microbatches of a batch that need not split evenly, of so many samples a data rank.

        Microbatches differ by a sample.  Those of powers of two are looked at beside those that divide: the number of
        all samples may be a prime.
        """
        least = min(self.config.microbatches(pipeline), self.batch)  # training makes no microbatch without a sample
        if "schedule" in self.given or "gradient_accumulation" in self.given:
            return [least]
        powers = (1 << k for k in range(MOST_MICROBATCHES.bit_length()))
        return sorted({least, *(n for n in (*divisors(self.batch, MOST_MICROBATCHES), *powers) if least < n <= each)})

    def stages(self, mesh: MeshShape) -> list[int]:
        """Return the stages of ZeRO on a mesh: 0 alone where no ranks hold the same weights."""
        if "zero" in self.given:
            return [self.config.zero.stage]
        away = dict(self.offload)  # stages 1 and 2 hold values in buckets, and all but 0 share gradients out
        found = [0] if "gradients" in away else [0, 3] if "parameters" in away else [0, 1, 2, 3]
        return found if mesh.copies > 1 else [0]

    def zeros(self, mesh: MeshShape, group: int | None = None) -> list[tuple[int, int | None]]:
        """Return the stages of ZeRO, over all data parallel ranks and those that share a sequence, and within groups of
        the data parallel ranks that lie on a node.

        Where so many data parallel ranks share experts, these groups are the same.
        """
        apart = mesh.width * (1 if group else mesh.pipeline)
        within = self.node // apart
        found: list[tuple[int, int | None]] = [(stage, None) for stage in self.stages(mesh)]
        if "zero" in self.given or not 1 < within < mesh.data or mesh.data % within or group not in (None, within):
            return found
        return [*found, *((stage, within) for stage, _ in found if stage)]

    @cached_property
    def recompute(self) -> list[Any]:
        model = self.config.model
        open_ = model.name in LANGUAGE and "recompute" not in model.options
        return [None, "attention", "block"] if open_ else [model.options.get("recompute")]

    def experts(self, mesh: MeshShape) -> Sequence[tuple[str | None, int | None]]:
        """Return what may cut the experts of a model that has several: an axis, and of data parallel ranks the number.
        No axis is named where experts are as the configuration has them.

        Numbers of ranks that share experts evenly are looked at; where there is none, all data parallel ranks.
        """
        model, given = self.config.model, self.config.parallel.experts
        count = int(model.options.get("num_local_experts", 1))
        if given is not None or "expert_axis" in model.options or count < 2:
            return [(None, given)]
        found: list[tuple[str | None, int | None]] = []
        found += [("data", n) for n in reversed(divisors(mesh.data)) if n > 1 and count % n == 0]
        axes = ["data"] * (mesh.data > 1 and not found) + ["s"] * (mesh.sequence > mesh.ulysses)
        if (mesh.tensor.ranks or 1) > 1:
            axes += [axis for axis, n in mode_of(mesh.tensor)[1].items() if n > 1]
        return [*found, *((axis, None) for axis in (*axes, "none"))]

    def _orders(self, mesh: MeshShape) -> Sequence[str | None]:
        """Return the orders of tokens; without a ring every order is the same work for all."""
        return RING_ORDERS if mesh.sequence > mesh.ulysses and "sequence" not in self.parallel else (None,)

    def _asked(self, pipeline: int, count: int, name: str | None, chunks: int | None) -> int | None:
        """Return the microbatches that the configuration gives, if the schedule cannot take as few as there are."""
        if self.uneven and name is not None and count < (given := self.config.microbatches(pipeline)):
            try:
                make_schedule(name, pipeline, count, chunks)
            except ScheduleError:
                return given
        return None

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
