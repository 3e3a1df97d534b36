"""Predict the time and memory of a candidate on a machine: bounds, estimates by layers, and full traces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from parlinalg.errors import ParlinalgError
from parlinalg.pipeline.run import AHEAD
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.simulate import Costs, Dependencies, SharedCores
from parlinalg.planning.candidates import SCHEDULES, Candidate, Offload, offload_sets
from parlinalg.planning.machine import Machine
from parlinalg.planning.parts import (
    SPANS,
    Between,
    Inputs,
    Part,
    declared,
    in_transit,
    layer_keys,
    offload_moves,
    on_their_way,
    trace_part,
    warn,
)
from parlinalg.planning.timeline import COMPUTED, Stage, Timeline, pipeline_timeline, sharing, timeline
from parlinalg.planning.trace import Kernel, Start, Trace, Wait
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import OffloadConfig, TensorConfig, TrainingConfig
from parlinalg.train.mesh import MeshSpec, resolve
from parlinalg.train.recipes import SIZES
from parlinalg.units import ITEMSIZE

WHOLE = 4096  # microbatches × ranks of a pipeline up to which a bound simulates all of them
LONG = 12  # equal layers of a stage beyond which two traces, of a few of them and of some more, stand for all:
FEW, FEW_BESIDE = (4, 6), (6, 10)  # their layers; where reductions or gathers go on beside the passes
HEAVY, FEW_HEAVY = 8192, (1, 2)  # events of a layer beyond which that is done however few they are, and their layers
HOME = ("muon", "shampoo", "soap")  # optimizers with states that lie on one rank of many


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


class Held(NamedTuple):
    """Bytes that a candidate takes: of the fullest pipeline rank, which one that is, and the most in each place."""

    memory: Mapping[str, int]
    stage: int
    host: int = 0
    disk: int = 0
    traced: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


class Rest(NamedTuple):
    """Bytes of a model at rest."""

    weights: int
    gradients: int
    states: int


class Floor(NamedTuple):
    """Lower bounds of the bytes and seconds that a stage takes on a rank, if nothing is offloaded.

    Attributes
    ----------
    rest : Rest
    kept, ends : int
        Bytes of a microbatch's activations, and those of the model's first and last layer, which are not offloaded.
    transient, largest : int
        As of `Part`.
    forward, backward : float
        Seconds of a pass.
    """

    rest: Rest
    kept: int
    ends: int
    transient: int
    largest: int
    forward: float
    backward: float


Copies = tuple[float, float, float]
"""Seconds of what comes and goes in a stage's forward pass, in its backward pass and in its update."""


def one_rank(dtype: str | None, recompute: str | None = None) -> Candidate:
    """Return the candidate that uses one rank, without ZeRO and in one microbatch."""
    return Candidate(1, 1, 1, 1, TensorConfig(), 0, 1, None, None, recompute, dtype)


class Predictor:
    """Predicts what candidates take, and keeps the traces that they have in common."""

    def __init__(self, config: TrainingConfig, ranks: int, machine: Machine, batch: int) -> None:
        self.config, self.ranks, self.batch = config, ranks, batch
        self.inputs = Inputs.of(config)
        self.node = machine.ranks_on_node(ranks)
        self.machine = machine.shared_by(self.node)
        self.target = "gpu" if machine.kernels.asynchronous else "cpu"
        self.traces = self.events = 0
        self._parts: dict[Any, Part] = {}
        self._runs: dict[tuple[int, str, bool, bool], tuple[float, Mapping[str, float]]] = {}
        self._timelines: dict[tuple[int, bool], tuple[Trace, Timeline]] = {}  # traces by identity stay
        self._known: dict[str | None, tuple[list[Any], Any]] = {}
        self._alone: dict[str | None, Rest] = {}
        self._of_model: dict[tuple[str | None, int], bool] = {}
        self._known_figures: dict[tuple[int, bool, bool], Figures] = {}
        self._offloaded: dict[tuple[int, Offload], Part] = {}
        self._schedules: dict[Any, tuple[Schedule, list[tuple[int, int]]]] = {}

    @cached_property
    def _quick(self) -> Machine:
        """The machine for bounds: launching is hidden by the device's earlier work, however much there was."""
        if not self.machine.kernels.asynchronous:
            return self.machine
        return replace(self.machine, kernels=replace(self.machine.kernels, overhead=0.0))

    # -------------------------------------------------------------------------------------------- the model
    def _declared(self, dtype: str | None, fewer: int = 0) -> tuple[list[Any], Any]:
        """Return the layers' keys of the model, or of one with fewer layers, and the model, declared on one rank."""
        config = one_rank(dtype).apply(self.config, 1)
        config = config if not fewer else self._with_fewer(config, fewer)
        model = declared(config, self.inputs)
        return layer_keys(model), model

    def _with_fewer(self, config: TrainingConfig, fewer: int) -> TrainingConfig:
        layers = int({**SIZES, **config.model.options}["num_hidden_layers"]) - fewer
        model = replace(config.model, options={**config.model.options, "num_hidden_layers": layers})
        return replace(config, model=model)

    def warn(self, c: Candidate) -> None:
        """Warn of what a candidate's model warns of when it is declared; one layer tells as much as all."""
        config = c.apply(self.config, self.batch)
        if config.model.name in LANGUAGE:
            model = replace(config.model, options={**config.model.options, "num_hidden_layers": 1})
            config = replace(config, model=model)
        warn(config, self.inputs, self.ranks)

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

        Of equal layers one and two are traced: each further one adds what the second added.
        """
        if dtype not in self._alone:
            keys = self.keys(dtype)
            first, last = _alike(keys, 0, len(keys))
            config = one_rank(dtype).apply(self.config, 1)
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

    def kept_by(self, recompute: str | None) -> tuple[float, float]:
        """Return the bytes that a sample keeps between its passes in a middle layer on one rank, and those of its
        output."""
        parts = self._on_one_rank(self.config.precision.dtype, recompute, update=False)
        part = parts[len(parts) // 2]
        return float(part.kept), float(part.message)

    def _on_one_rank(self, dtype: str | None, recompute: str | None, update: bool) -> list[Part]:
        """Return the parts of all layers on one rank, each with one sample; what layers share is in all of them."""
        config = one_rank(dtype, recompute).apply(self.config, 1)
        given: Between | None = None
        found = []
        for i, key in enumerate(self.keys(dtype)):
            known = "alone", dtype, recompute, update, key, given
            if known not in self._parts:
                fewer, layers = self._fewer(config, (i, i + 1), (0, 0)) or (config, (i, i + 1))
                self._parts[known] = trace_part(
                    fewer, self.inputs, 1, 1, layers=layers, given=given, node=1, target=self.target, update=update
                )
            found.append(self._parts[known])
            given = found[-1].output
        return found

    # -------------------------------------------------------------------------------------------- bounds
    def static_bound(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, without a trace.

        All ranks together make at least the products of the model with its weights, forward and twice backward: those
        of attention's pairs are left out, as masked ones may be skipped.  One rank makes at least the mean, each
        product no faster than the fastest of the machine.
        """
        flops = self.linear_flops(c.dtype)
        dtype = c.dtype or self.config.dtype
        return flops / self.ranks / self.machine.best_rate(dtype)

    def memory_bound(self, c: Candidate) -> int:
        """Return bytes that the fullest rank of a candidate cannot be below, without a trace.

        What may be offloaded aside, each weight, gradient and state is on at least one of the pipeline × tensor ranks
        of a copy of the model; ZeRO's stages share states, gradients and weights between the data parallel ranks, and
        experts and matrix-wise optimizers may share theirs between any.  The fullest rank holds at least the mean.
        """
        shares = (c.pipeline * n for n in self._sharing(c))
        rest = Rest(*(n // share for n, share in zip(self.alone(c.dtype), shares, strict=True)))
        return sum(self._left(c, rest, (*self.kinds(c), *dict(c.offload))))

    def _sharing(self, c: Candidate) -> Rest:
        """Return how many ranks share what a stage has at rest, at the most."""
        ranks, every = c.tensor.ranks or 1, self.ranks // c.pipeline
        if int(self.config.model.options.get("num_local_experts", 1)) > 1:
            ranks = every

        def share(stage: int) -> int:
            return min(every, ranks * c.data) if c.zero >= stage else ranks

        return Rest(share(3), share(2), every if self.config.optimizer.name in HOME else share(1))

    def _left(self, c: Candidate, rest: Rest, kinds: Collection[str]) -> Rest:
        """Return what is left at rest where kinds are offloaded, at the least."""
        gone = (self.settles(c) or c.data == 1) and not {"parameters", "gradients"}.isdisjoint(kinds)
        return Rest(
            0 if "parameters" in kinds else rest.weights, 0 if gone else rest.gradients,
            0 if "optimizer" in kinds else rest.states,
        )  # fmt: skip

    def bounds(self, c: Candidate, memory: int) -> tuple[float, int]:
        """Return seconds and bytes that no step of a candidate can be below in so much memory, by traces of its layers.

        Of all sets of kinds that it may offload, those count with which it may fit; the seconds are infinite if none
        does.  A rank waits for what comes and goes beside its passes.
        """
        stages = self._floors(c)
        own, flight, messages = [[0]], [1], 0
        if c.pipeline > 1:
            schedule, cuts = self._bounded(c)
            own = [[k.stage for k in chunks] for chunks in schedule.chunks]
            flight = list(dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks).held)
            parts = self._layers(c, bound=True)
            messages = AHEAD * max(parts[b - 1].message for _, b in cuts)
        seconds, least = math.inf, math.inf
        for kinds in [tuple(dict(c.offload))] if c.offload else [(), *offload_sets(self.kinds(c))]:
            away = self._away(c) if "activations" in kinds else [(0, 0)] * len(stages)
            left = [self._left(c, stage.rest, kinds) for stage in stages]
            kept = [stage.ends if "activations" in kinds else stage.kept for stage in stages]
            buffers = [self._buffers(c, kinds, *each) for each in zip(stages, away, strict=True)]
            need = max(
                sum(sum(left[s]) for s in held) + n * max(kept[s] for s in held) + max(buffers[s] for s in held)
                for n, held in zip(flight, own, strict=True)
            )  # fmt: skip
            least = min(least, need + messages)
            if need + messages <= memory:
                copies = [self._copies(c, kinds, stage.rest, n) for stage, (n, _) in zip(stages, away, strict=True)]
                seconds = min(seconds, self._least(c, stages, copies))
            if not kinds and seconds < math.inf:  # it fits
                break
        return seconds, int(least)

    def _buffers(self, c: Candidate, kinds: Collection[str], stage: Floor, away: tuple[int, int]) -> int:
        """Return the bytes of a stage that are neither at rest nor kept, at the least."""
        terms = stage.rest.gradients if self.settles(c) else 0
        kinds = {*kinds} - {"optimizer"}  # tiles are small
        return stage.transient + in_transit(kinds, stage.rest.weights, terms, 0, *away, stage.largest)

    def _copies(self, c: Candidate, kinds: Collection[str], rest: Rest, away: int) -> Copies:
        """Return the seconds in which what a stage offloads comes and goes, to the nearest places, at the least."""
        moves = offload_moves(kinds, rest.weights, rest.gradients if self.settles(c) else 0, rest.states, away)
        host, disk, places = self.machine.host, self.machine.disk, dict(c.offload)

        def seconds(come: int, go: int, place: str) -> float:
            made = (come + go) / host.bandwidth if host is not None and self.target == "gpu" else 0.0
            return made + (come / disk.read + go / disk.write if disk is not None and place == "disk" else 0.0)

        spent = dict.fromkeys(SPANS, 0.0)
        for (span, kind), moved in moves.items():
            spent[span] += min(seconds(*moved, p) for p in ([places[kind]] if places else self.homes))
        return spent["forward"], spent["backward"], spent["update"]

    def _floors(self, c: Candidate) -> list[Floor]:
        """Return what each stage takes at the least, by traces of the layers of one copy of the model."""
        parts, every, share = self._layers(c, bound=True), self._on_one_rank(c.dtype, None, True), self._sharing(c)
        alone = self.alone(c.dtype)
        ratio = alone.gradients / max(1, alone.weights)
        found = []
        for a, b in [(0, len(parts))] if c.pipeline == 1 else self._bounded(c)[1]:
            rest = alone  # layers of one stage may share parameters
            if c.pipeline > 1:
                rest = Rest(*(sum(getattr(part, name) for part in every[a:b]) for name in Rest._fields))
            own, last = parts[a:b], parts[b - 1]  # before its backward pass no gradient of the stage has its memory yet
            found.append(
                Floor(
                    Rest(*(n // ranks for n, ranks in zip(rest, share, strict=True))), sum(part.kept for part in own),
                    sum(part.kept for i, part in enumerate(own, a) if i in (0, len(parts) - 1)),
                    max(0, int(last.transient - ratio * sum(part.weights for part in own))),
                    max(part.largest for part in every[a:b]) // share.weights,
                    sum(self.seconds(part, "forward", quick=True) for part in own),
                    sum(self.seconds(part, "backward", quick=True) for part in own),
                )
            )  # fmt: skip
        return found

    def _away(self, c: Candidate) -> list[tuple[int, int]]:
        """Return the bytes of activations that are offloaded in each stage, and those of a block, at the least.

        Of equal blocks one and two are traced: what blocks share is offloaded once.
        """
        keys, bare = self.keys(c.dtype), self._layers(c, bound=True)
        config, ranks, rows, shape = self._one_copy(c)
        found: list[int] = []
        for i, key in enumerate(keys):
            alike = next((j for j in (i - 1, i) if 0 <= j < len(keys) - 1 and keys[j] == keys[j + 1] == key), None)
            if alike is None:
                found.append(0)
                continue
            given = bare[alike - 1].output if alike else None
            sizes = []
            for n in (1, 2):
                known = "away", n, shape, key, given
                sizes.append(self._part(known, config, ranks, rows, layers=(alike, alike + n), given=given).away)
            found.append(sizes[1] - sizes[0])
        cuts = [(0, len(keys))] if c.pipeline == 1 else self._bounded(c)[1]
        return [(sum(found[a:b]), max(found[a:b])) for a, b in cuts]

    def time_bound(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, by traces of its distinct layers.

        A rank runs its layers one after the other, forward and backward, once for each microbatch.  Within them it
        computes and waits as in a trace without other ranks' copies, ZeRO or reductions, which only add.  A pipeline's
        schedule is simulated with the sums of its stages' layers, without reductions and updates and with the quicker
        messages of those within and between nodes.  Each end in a simulation is the largest of sums of costs, so that
        it grows with every cost: one with costs that are too low is a bound of one with the costs as they are.  Where
        ranks of a pipeline leave their cores to others, only what all compute together is certain.
        """
        stages = self._floors(c)
        return self._least(c, stages, [(0.0, 0.0, 0.0)] * len(stages))

    def _least(self, c: Candidate, stages: Sequence[Floor], copies: Sequence[Copies]) -> float:
        """Return the bound of a candidate's time with what comes and goes in each stage."""
        rounds = c.microbatches
        copied = sum(rounds * (go + come) + update for go, come, update in copies) / c.pipeline
        crowd = replace(self.machine, bound=False).crowd(self.node, self.ranks)  # the mean, of unequal ranks
        if c.pipeline > 1 and crowd > 1 and self.machine.overlap.receiving < 1:
            return self.static_bound(c) * crowd + copied
        passes = rounds * sum(stage.forward + stage.backward for stage in stages) / c.pipeline
        least = max(self.static_bound(c), passes) + copied
        if c.pipeline == 1:
            return least
        schedule, _ = self._bounded(c)
        backward = [stage.backward + come for stage, (_, come, _) in zip(stages, copies, strict=True)]
        places = (2,) if self.machine.network is None else (1, 2)
        messages = [part.message for part in self._layers(c, bound=True)[:-1]]
        costs = Costs(
            forward=[stage.forward + go for stage, (go, _, _) in zip(stages, copies, strict=True)],
            backward=backward, weight=[seconds / 2 for seconds in backward],
            latency=min(self._send(nbytes, local) for nbytes in messages for local in places),
            step=[sum(copies[k.stage][2] for k in chunks) for chunks in schedule.chunks],
        )  # fmt: skip
        graph = dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks)
        return max(least, (1 - 1e-9) * graph.bounds(costs)[0])  # fewer microbatches than there are take no longer

    def _bounded(self, c: Candidate) -> tuple[Schedule, list[tuple[int, int]]]:
        """Return the schedule of a pipeline, or one of few microbatches of very many, and the layers of its stages."""
        key = c.pipeline, c.schedule, c.chunks, c.microbatches
        if key not in self._schedules:
            spec, config = self._spec(c) if c.microbatches * c.pipeline <= WHOLE else self._short(c)
            schedule, counts = self._schedule(spec, config)
            self._schedules[key] = schedule, _cuts(counts)
        return self._schedules[key]

    def _send(self, nbytes: float, local: int) -> float:
        """Return the seconds of a message within a node, `local` being 2, or between nodes."""
        return self.machine.transfer("send", nbytes, 2, local, self.node, self.ranks).total

    def seconds(self, part: Part, span: str, quick: bool = False) -> float:
        """Return the seconds of a span of a part."""
        return self._run(part, span, quick)[0]

    def _run(
        self, part: Part, span: str, quick: bool = False, pending: bool = False
    ) -> tuple[float, Mapping[str, float]]:
        """Return the seconds of a span of a part, and those of its causes; messages of others may be pending."""
        key = id(part), span, quick, pending
        if key not in self._runs:
            trace, machine = replace(part.span(span), size=self.ranks), self._quick if quick else self.machine
            run = timeline(trace, machine, on_node=self.node, pending=pending) if trace.events else None
            self._runs[key] = (0.0, {}) if run is None else (run.seconds, run.causes[run.slowest])
        return self._runs[key]

    def _timed(self, trace: Trace, pending: bool) -> Timeline:
        """Return the run of a trace, without its intervals: candidates with one form have many traces in common."""
        key = id(trace), pending
        if key not in self._timelines:
            run = timeline(trace, self.machine, on_node=self.node, pending=pending)
            self._timelines[key] = trace, replace(run, intervals=(), memory={})
        return self._timelines[key][1]

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

    def _offloading(self, part: Part, c: Candidate) -> Part:
        """Return a part with what a candidate offloads."""
        if not c.offload:
            return part
        key = id(part), c.offload
        if key not in self._offloaded:
            self._offloaded[key] = part.offloaded(dict(c.offload), self.target == "gpu")
        return self._offloaded[key]

    def _part(self, key: Any, config: TrainingConfig, ranks: int, rows: int, **more: Any) -> Part:
        if key not in self._parts:
            self._parts[key] = self.trace(config, ranks, rows, **more)
        return self._parts[key]

    def trace(
        self, config: TrainingConfig, ranks: int, rows: int, *, layers: tuple[int, int] | None = None,
        skip: tuple[int, int] = (0, 0), **more: Any,
    ) -> Part:  # fmt: skip
        """Return `trace_part` of a configuration on the machine's nodes; a subclass may put other kernels in it."""
        self.traces += 1
        config = replace(config, offload=OffloadConfig())  # `Part.offloaded` says what that changes
        if layers is not None and (found := self._fewer(config, layers, skip)) is not None:
            config, layers, skip = *found, (0, 0)
        made = trace_part(
            config, self.inputs, ranks, rows, layers=layers, skip=skip, node=self.node, target=self.target, **more
        )
        self.events += len(made.trace.events)
        return made

    def _layers(self, c: Candidate, bound: bool) -> list[Part]:
        """Return the parts of all layers of a candidate's model: passes of one copy of it for a bound, else its own."""
        config, ranks, rows, shape = self._one_copy(c) if bound else self._all_copies(c)
        found: list[Part] = []
        given: Between | None = None
        for i, key in enumerate(self.keys(c.dtype)):
            known = (shape, key, bound, given)
            part = self._part(known, config, ranks, rows, layers=(i, i + 1), given=given, update=not bound)
            found.append(part)
            given = part.output
        return found

    def _one_copy(self, c: Candidate) -> tuple[TrainingConfig, int, int, Any]:
        """Return the configuration of one copy of a candidate's model, its ranks and rows, and what tells it apart."""
        one = replace(c, data=1, pipeline=1, zero=0, microbatches=1, schedule=None, chunks=None)
        rows = self.batch // c.data // c.microbatches
        return one.apply(self.config, rows), one.width, rows, (*_form(one), rows)

    def _all_copies(self, c: Candidate) -> tuple[TrainingConfig, int, int, Any]:
        """Return the configuration of a candidate for a microbatch, its ranks and rows, and what tells it apart."""
        rows = self.batch // c.microbatches
        if c.pipeline > 1:  # a schedule is not asked for, and one of many microbatches takes long to make
            c = replace(c, microbatches=c.pipeline)
        return c.apply(self.config, rows), self.ranks, rows, (*_form(c), rows // c.data)

    # -------------------------------------------------------------------------------------------- estimates
    def estimate(self, c: Candidate) -> Planned:
        """Return about what a candidate takes, by traces of its distinct layers."""
        whole = self._layers(c, bound=False)
        spec, config = self._short(c)
        figures = [self._offloading_figures(p, c) for p in whole]
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
            return self._assembled(c, config, [one], spec)
        _, counts = self._schedule(spec, config)
        return self._assembled(c, config, [_total(figures[a:b]) for a, b in _cuts(counts)], spec)

    def _offloading_figures(self, part: Part, c: Candidate, apart: bool = True) -> Figures:
        """Return the figures of a part with what a candidate offloads: ranks wait for the copies."""
        made = self._figures(part, c.pipeline == 1, apart).copy()
        if not c.offload:
            return made
        there = self._offloading(part, c)
        made |= self._bytes(there)
        if "activations" in dict(c.offload):
            made["away"], made["block"] = part.away, part.block
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

    def _bytes(self, part: Part) -> Figures:
        """Return the figures of a part that are bytes, with those in each place for what is offloaded."""
        names = "weights", "gradients", "states", "kept", "transient", "message"
        made: Figures = {name: getattr(part, name) for name in names}
        for place in self.homes:
            made[place], made[f"{place} kept"] = part.elsewhere[place], part.elsewhere_kept[place]
        return made

    def _figures(self, part: Part, alone: bool, apart: bool = True) -> Figures:
        """Return the figures of a part; without a pipeline its end is the last microbatch with all that follows.

        What is launched ahead in the microbatch before hides launching; `apart` says that there is none before.
        """
        if (id(part), alone, apart) in self._known_figures:
            return self._known_figures[id(part), alone, apart]
        made = self._bytes(part)
        for span in ("forward", "backward", "reduce", "update", *["end"] * (alone and apart)):
            passes = span in ("forward", "backward")
            made[span], causes = self._run(part, span, pending=passes and not alone and self.ranks > self.node)
            for cause, seconds in causes.items():
                key = f"{'pass' if passes else span}: {cause}"
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
        self, c: Candidate, config: TrainingConfig, stages: Sequence[Figures], spec: MeshSpec
    ) -> Planned:  # fmt: skip
        """Return what a candidate takes by the figures of its stages, on a mesh with a schedule as of `_short`."""
        schedule = spec.schedule
        if schedule is None:
            (one,) = stages
            seconds = (c.microbatches - 1) * (one["forward"] + one["backward"]) + one["end"]
            memory = _memory(*(round(one[k]) for k in ("weights", "gradients", "states", "kept", "transient")))
            spent = _causes([(c.microbatches - 1, one, "pass"), (1, one, "end")])
            moved = _in_step([(c.microbatches - 1, one, "pass"), (1, one, "end")])
            away = {p: round(one[p] + one[f"{p} kept"]) for p in self.homes}
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
        shape = schedule.name, schedule.ranks, schedule.microbatches, c.chunks
        computing = [f"{span}: {cause}" for span in ("pass", "reduce", "update") for cause in COMPUTED]
        whole = sum(f[span] for f in stages for span in ("forward", "backward", "reduce", "update"))
        computed = sum(f.get(name, 0.0) for f in stages for name in computing) / max(1e-300, whole)
        faster = sharing(self.machine, self.node, self.ranks, spec.places, computed)
        seconds, work = _simulated(shape, costs, faster)
        pace = 1.0 if faster is None else work / dependencies(*shape).bounds(costs)[1]
        flight = list(map(float, dependencies(*shape).held))
        if (more := c.microbatches - schedule.microbatches) > 0:  # each further round of microbatches takes as long
            rounds, less = more / schedule.ranks, (*shape[:2], schedule.microbatches - schedule.ranks, c.chunks)
            before = _simulated(less, costs, faster)
            seconds, work = seconds + rounds * (seconds - before[0]), work + rounds * (work - before[1])
            flight = [n + rounds * (n - few) for n, few in zip(flight, dependencies(*less).held, strict=True)]
        bubble = max(0.0, 1 - work / (schedule.ranks * seconds)) if seconds else 0.0
        memory, stage, away = self._fullest(held, flight)
        busiest = max(held, key=lambda own: sum(f["forward"] + f["backward"] for f in own))
        passes = c.microbatches / schedule.copies
        times: list[tuple[float, Figures, str]] = [(passes, f, "pass") for f in busiest]
        times += [(1, f, name) for f in busiest for name in ("reduce", "update")]
        spent = {cause: s * pace for cause, s in _causes(times).items()}
        spent["idle"] = spent.get("idle", 0.0) + max(0.0, seconds - sum(spent.values()))
        words, across, within = _in_step([(n, f, name) for n, f, name in times if name == "pass"])
        ends = _in_step([(1, f, "end") for f in busiest])
        sends = round(2 * passes * sum(f["message"] for f in busiest))
        apart = local == 1 and c.width >= self.node
        moved = (words + ends[0] + sends // 4, across + ends[1] + sends * apart, within + ends[2] + sends * (not apart))
        shares = _as_shares(spent, seconds)
        return self._planned(c, config, seconds, memory, moved, bubble, shares, stage, False, **away)

    def _fullest(
        self, held: Sequence[Sequence[Figures]], flight: Sequence[float]
    ) -> tuple[dict[str, int], int, dict[str, int]]:  # fmt: skip
        """Return the memory of the fullest pipeline rank, which one it is, and the most that a rank has in each place.

        `held` are the figures of each rank's stages, `flight` the microbatches that it holds at once.
        """
        memory: dict[str, int] = {}
        stage, away = 0, dict.fromkeys(self.homes, 0)
        messages = AHEAD * max(f["message"] for own in held for f in own)
        for r, own in enumerate(held):
            rest = [round(sum(f[k] for f in own)) for k in ("weights", "gradients", "states")]
            kept, buffers = flight[r] * max(f["kept"] for f in own), messages + max(f["transient"] for f in own)
            here = _memory(rest[0], rest[1], rest[2], round(kept), round(buffers))
            for p in away:
                there = sum(f[p] for f in own) + flight[r] * max(f[f"{p} kept"] for f in own)
                away[p] = max(away[p], round(there))
            if sum(here.values()) > sum(memory.values()):
                memory, stage = here, r
        return memory, stage, away

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
        few_ = FEW_BESIDE if c.zero == 3 or c.pipeline == 1 else FEW
        if self.events_of_layer(c) > HEAVY:
            few_ = FEW_HEAVY
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
                    figures.append(self._offloading_figures(part, c, apart=c.microbatches == 1))
                known[key] = _line(figures, few_, last - first), part.output
            made.append(known[key][0])
            given = known[key][1]
        return replace(self._assembled(c, config, made, spec), traced=True)

    def _whole(self, c: Candidate, config: TrainingConfig, rows: int, **more: Any) -> Part:
        """Return the trace of a candidate's stage: the same for all schedules, and whatever is offloaded."""
        return self._part(("whole", *_form(c), rows, *sorted(more.items())), config, self.ranks, rows, **more)

    def is_long(self, c: Candidate) -> bool:
        """Return True if a candidate has more equal layers or microbatches than are traced and simulated one by one."""
        long = (self.depth - 2) / c.pipeline > LONG or self._rounds(c) < c.microbatches
        return long or self.events_of_layer(c) > HEAVY

    def events_of_layer(self, c: Candidate, bound: bool = False) -> int:
        """Return the events in the longest trace of a layer: a ring of 97 ranks has thousands in each."""
        return max(len(part.trace.events) for part in self._layers(c, bound))

    def _spec(self, c: Candidate) -> tuple[MeshSpec, TrainingConfig]:
        config = c.apply(self.config, self.batch)
        return resolve(config, self.ranks), config

    def _short(self, c: Candidate) -> tuple[MeshSpec, TrainingConfig]:
        """Return the mesh, with a schedule of so many microbatches that more of them repeat what is there, and the
        configuration with all of them."""
        return self._spec(replace(c, microbatches=self._rounds(c)))[0], c.apply(self.config, self.batch)

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
    def held(self, c: Candidate) -> Held:
        """Return the bytes that a candidate takes, by traces of all its layers on every distinct stage."""
        spec, parts = self._stages(c)
        if c.pipeline == 1:
            (part,) = parts
            memory = _memory(part.weights, part.gradients, part.states, part.kept, part.transient)
            host, disk = (part.elsewhere[p] + part.elsewhere_kept[p] for p in ("host", "disk"))
            return Held(memory, 0, host, disk)
        schedule = spec.schedule
        assert schedule is not None
        figures = [[self._bytes(parts[k.stage]) for k in chunks] for chunks in schedule.chunks]
        shape = schedule.name, schedule.ranks, schedule.microbatches, c.chunks
        memory, stage, away = self._fullest(figures, dependencies(*shape).held)
        return Held(memory, stage, away.get("host", 0), away.get("disk", 0))

    def _stages(self, c: Candidate) -> tuple[MeshSpec, list[Part]]:
        """Return the mesh of a candidate, and the traces of all its layers, by stage."""
        rows = self.batch // c.microbatches
        spec, config = self._spec(c)
        if c.pipeline == 1:
            return spec, [self._offloading(self._whole(c, config, rows), c)]
        schedule, counts = self._schedule(spec, config)
        keys = self.keys(c.dtype)
        parts: list[Part] = []
        given: Between | None = None
        known: dict[Any, Part] = {}
        for s, (a, b) in enumerate(_cuts(counts)):
            key = (tuple(keys[a:b]), given)
            if key not in known:
                part = self._whole(c, config, rows, layers=(a, b), given=given, stage=schedule.holder(s))
                known[key] = self._offloading(part, c)
            parts.append(known[key])
            given = known[key].output
        return spec, parts

    def full(self, c: Candidate) -> Planned:
        """Return what a candidate takes, by traces of all its layers on every distinct stage."""
        spec, parts = self._stages(c)
        config = c.apply(self.config, self.batch)
        memory, stage, host, disk, _ = self.held(c)
        if c.pipeline == 1:
            (part,) = parts
            seconds, shares = self._alone_run(part, c.microbatches)
            starts = _starts(part.span("forward"), part.span("backward")), _starts(part.span("end"))
            moved = self._moved([(c.microbatches - 1, starts[0]), (1, starts[1])])
            return self._planned(c, config, seconds, memory, moved, 0.0, shares, 0, True, host, disk)
        schedule = spec.schedule
        assert schedule is not None
        stages = [Stage(part.span("forward"), part.span("backward"), None, part.message) for part in parts]
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
            schedule, stages, self.machine, reduce=[r for r, _ in ends], step=[u for _, u in ends],
            places=spec.places, on_node=self.node, timed=self._timed,
        )  # fmt: skip
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
        shares = _shares(made)
        return self._planned(c, config, made.seconds, memory, moved, made.bubble, shares, stage, True, host, disk)

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


def _form(c: Candidate) -> tuple[Any, ...]:
    """Return the choices of a candidate by which a layer's trace differs; its microbatches are told by their rows."""
    cut = c.data, c.pipeline, c.sequence, c.ulysses, c.tensor
    return *cut, c.zero, c.recompute, c.dtype, c.experts, c.order


def _linear_flops(model: Any, batch: int, inputs: Inputs) -> float:
    """Return operations that a step's products with weights have at least.

    A language model's of s tokens are f(s) = a s + b s², of which a s are those with weights.
    """
    if not inputs.language:
        return _flops(model, batch, inputs) * 2 / 3  # the first layer, which may be nearly all, gives no gradient on
    one, two = model.flops(1, 1), model.flops(1, 2)
    return float(batch * inputs.length * (2 * one - two / 2))


def _flops(model: Any, batch: int, inputs: Inputs) -> float:
    if inputs.language:
        return float(model.flops(batch, inputs.length))
    return 6.0 * batch * sum(m.multiplications for m in model.modules())


Shape = tuple[str, int, int, int | None]
"""The name, ranks, microbatches and chunks of a schedule."""


def _simulated(shape: Shape, costs: Costs, faster: SharedCores | None) -> tuple[float, float]:
    """Return the makespan of a schedule, and the work of its ranks; where these share cores, `sharing` says how."""
    if faster is None:
        return dependencies(*shape).bounds(costs)
    graph = dependencies(*shape)
    begins, ends = graph.together(costs, faster)
    busy = [0.0] * shape[1]
    for rank, begin, end in zip(graph.ranks, begins, ends, strict=True):
        busy[rank] += end - begin
    return max(ends), sum(busy)


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
    """Return traces one after the other, with calls numbered anew; a single one as it is."""
    if len(traces) == 1:
        return traces[0]
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
