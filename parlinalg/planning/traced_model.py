"""A model on the ranks of a machine: its layers, its meshes, and the traces that candidates have in common.

`Bounds` and `Predictor` ask it for parts (`parlinalg.planning.parts`): a layer on one copy of the model or on all of
them, or all layers of a stage.  A part is traced and timed once, however many candidates have it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from parlinalg.errors import ParlinalgError
from parlinalg.layout import as_cut
from parlinalg.pipeline.schedule import FLUSHED, Op, Schedule, forward_then_backward
from parlinalg.pipeline.schedules import make_schedule, of_fewer
from parlinalg.pipeline.simulate import Dependencies
from parlinalg.planning.candidates import SCHEDULES, Candidate, Offload, given_offload
from parlinalg.planning.machine import Machine
from parlinalg.planning.part_traces import declared, elements_of_experts, layer_keys, ties, trace_part, warn
from parlinalg.planning.parts import Inputs, LayerOutput, NextPasses, Part, Rest
from parlinalg.planning.timeline import Timeline, timeline
from parlinalg.planning.trace import Trace
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import OffloadConfig, TensorConfig, TrainingConfig
from parlinalg.train.mesh import MeshSpec, resolve
from parlinalg.train.recipes import SIZES

HOME = ("muon", "shampoo", "soap")  # optimizers with states that lie on one rank of many
PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)  # they gather weights
Cut = tuple[int, int]
"""The first layer of a stage, and the one after its last."""


class Setup(NamedTuple):
    """A configuration as its layers are traced.

    Attributes
    ----------
    config : TrainingConfig
    ranks : int
    rows : int
        Rows of a microbatch on all of these ranks together.
    key : object
        A key by which traces of this setup are kept.
    ends : object
        The same of the model's first and last layer, which have no experts, and nothing that blocks compute again.
    """

    config: TrainingConfig
    ranks: int
    rows: int
    key: Any
    ends: Any = None


class TracedModel:
    """The model of a configuration on so many ranks of a machine, and what is known of it.

    Parameters
    ----------
    config : TrainingConfig
    ranks : int
    machine : Machine
    batch_size : int
        As in the configuration.

    Attributes
    ----------
    batch : int
        Samples of a step: `batch_size`, or all that there are to train on where these are fewer.
    all_samples : bool
        True if they are all that there are.  Then training cuts them as they come, evenly or not.
    machine : Machine
        As each rank of a node sees it: ranks share the host memory and the disk.
    node : int
        Ranks on a node.
    target : {"cpu", "gpu"}
    traces, events : int
        How many parts were traced so far, and the events in them: by these a search knows when to end.
    """

    def __init__(self, config: TrainingConfig, ranks: int, machine: Machine, batch_size: int) -> None:
        self.config, self.ranks = config, ranks
        self.inputs = Inputs.of(config)
        self.batch = self.inputs.rows(batch_size)
        self.all_samples = self.batch == self.inputs.samples
        self.node = machine.ranks_on_node(ranks)
        self.machine = machine.shared_by(self.node)
        self.target = "gpu" if machine.kernels.asynchronous else "cpu"
        self.traces = self.events = 0
        self._parts: dict[Any, Part] = {}
        self._offloading: dict[tuple[int, Offload], Part] = {}
        self._timelines: dict[tuple[int, bool, bool], tuple[Trace, Timeline]] = {}  # traces by identity stay
        self._declared: dict[str | None, tuple[list[Any], Any]] = {}
        self._ties: dict[str | None, list[frozenset[int]]] = {}
        self._alone: dict[str | None, Rest] = {}
        self._experts: dict[str | None, tuple[list[tuple[int, int]], tuple[int, int]]] = {}
        self._shortens: dict[tuple[str | None, int], bool] = {}
        self._following: dict[Any, list[NextPasses]] = {}
        given = given_offload(config)
        self._may_offload_activations = "activations" in dict(given) if given else bool(self.homes)

    # -------------------------------------------------------------------------------------------- the model
    def declared(self, dtype: str | None) -> tuple[list[Any], Any]:
        """Return the keys of the model's layers, and the model, declared on one rank."""
        if dtype not in self._declared:
            self._declared[dtype] = self._declare(self.on_one(dtype))
        return self._declared[dtype]

    def _declare(self, config: TrainingConfig) -> tuple[list[Any], Any]:
        model = declared(config, self.inputs)
        return layer_keys(model), model

    def keys(self, dtype: str | None) -> list[Any]:
        """Return the keys of the model's layers: layers with equal keys take equal work."""
        return self.declared(dtype)[0]

    def ties(self, dtype: str | None) -> list[frozenset[int]]:
        """Return for each parameter that several layers hold the numbers of these layers."""
        if dtype not in self._ties:
            self._ties[dtype] = ties(self.declared(dtype)[1])
        return self._ties[dtype]

    @property
    def depth(self) -> int:
        """The layers that a pipeline cuts."""
        return len(self.keys(self.config.precision.dtype))

    def experts(self, dtype: str | None, layers: Cut | None = None) -> Fraction:
        """Return the share that experts have of the parameters of some layers, or of the whole model."""
        if dtype not in self._experts:
            self._experts[dtype] = elements_of_experts(self.declared(dtype)[1])
        each, whole = self._experts[dtype]
        own, every = whole if layers is None else map(sum, zip(*each[slice(*layers)], strict=True))
        return Fraction(own, every or 1)

    def linear_flops(self, dtype: str | None) -> float:
        """Return the operations of a step's products with weights, at the least.

        A language model's of s tokens are f(s) = a s + b s², of which a s are those with weights.
        """
        model = self.declared(dtype)[1]
        if not self.inputs.language:
            return self._flops(model) * 2 / 3  # the first layer, which may be nearly all, gives no gradient on
        one, two = model.flops(1, 1), model.flops(1, 2)
        return float(self.batch * self.inputs.length * (2 * one - two / 2))

    @cached_property
    def flops(self) -> float:
        """Operations of a step that the model needs."""
        return self._flops(self.declared(None)[1])

    def _flops(self, model: Any) -> float:
        if self.inputs.language:
            return float(model.flops(self.batch, self.inputs.length))
        return 6.0 * self.batch * sum(m.multiplications for m in model.modules())

    def warn(self, c: Candidate) -> None:
        """Warn of what a candidate's model warns of when it is declared; one layer tells as much as all."""
        config = c.apply(self.config, self.batch)
        if config.model.name in LANGUAGE:
            config = _with_layers(config, 1)
        warn(config, self.inputs, self.ranks)

    def shortened(self, config: TrainingConfig, layers: Cut, skip: Cut = (0, 0)) -> tuple[TrainingConfig, Cut] | None:
        """Return a model without the layers that a trace would leave out, and where its layers are there.

        To declare 96 layers for the trace of one takes longer than the trace.  None if there is no such model: if the
        layers differ, or the model has no number of layers.
        """
        if config.model.name not in LANGUAGE:
            return None
        dtype = config.precision.dtype
        keys = self.keys(dtype)
        first, last = longest_run(keys, (0, len(keys)))
        (a, b), (c, d) = layers, skip
        own = [i for i in range(a, b) if not c <= i < d]
        count = sum(first <= i < last for i in own)
        whole = not count and a < last and b > first  # all of them are skipped
        if whole or any(not first <= i < last for i in range(max(a, c), min(b, d))):
            return None
        drop = last - first - max(1, count)
        if drop < 1 or last == len(keys):
            return None
        if (dtype, drop) not in self._shortens:
            try:
                fewer, _ = self._declare(_with_fewer(self.on_one(dtype), drop))
                self._shortens[dtype, drop] = fewer == [*keys[:first], *keys[first + drop :]]
            except ParlinalgError:
                self._shortens[dtype, drop] = False
        if not self._shortens[dtype, drop]:
            return None
        begin = a if a <= first else first if a < last else a - drop
        end = b if b <= first else first + count if b <= last else b - drop
        return _with_fewer(config, drop), (begin, end)

    # -------------------------------------------------------------------------------------------- one rank
    def on_one(self, dtype: str | None, recompute: str | None = None) -> TrainingConfig:
        """Return the configuration on one rank, with one sample.  No axis cuts experts there, whatever it names."""
        config = _one_rank(dtype, recompute).apply(self.config, 1)
        options = {name: value for name, value in config.model.options.items() if name != "expert_axis"}
        return replace(config, model=replace(config.model, options=options))

    def alone(self, dtype: str | None) -> Rest:
        """Return the bytes of the whole model at rest on one rank.

        Of equal layers one and two are traced: each further one adds what the second added.
        """
        if dtype not in self._alone:
            keys = self.keys(dtype)
            first, last = longest_run(keys, (0, len(keys)))
            config = self.on_one(dtype)
            found: list[Part] = []
            for few in (1, 2):
                skip = first + few, last
                fewer = self.shortened(config, (0, len(keys)), skip) if last - first > few else None
                if fewer is None:
                    found = [self._trace_alone(config)]
                    break
                found.append(self._trace_alone(fewer[0]))
            one, two, times = found[0], found[-1], last - first - 1
            pairs = ((one.weights, two.weights), (one.gradients, two.gradients), (one.states, two.states))
            self._alone[dtype] = Rest(*(x + times * (y - x) for x, y in pairs))
        return self._alone[dtype]

    def on_one_rank(self, dtype: str | None, recompute: str | None, update: bool) -> list[Part]:
        """Return the parts of all layers on one rank, each with one sample; what layers share is in all of them."""
        config = self.on_one(dtype, recompute)
        given: LayerOutput | None = None
        found = []
        for i, key in enumerate(self.keys(dtype)):
            known = "alone", dtype, recompute, update, key, given
            if known not in self._parts:
                fewer, layers = self.shortened(config, (i, i + 1)) or (config, (i, i + 1))
                self._parts[known] = self._trace_alone(fewer, layers=layers, given=given, update=update)
            found.append(self._parts[known])
            given = found[-1].output
        return found

    def _trace_alone(self, config: TrainingConfig, **more: Any) -> Part:
        return trace_part(config, self.inputs, 1, 1, node=1, target=self.target, probe=False, **more)

    def kept_by(self, recompute: str | None, dtype: str | None) -> tuple[float, float]:
        """Return the bytes that a sample keeps between its passes in a middle layer on one rank, and those of its
        output."""
        parts = self.on_one_rank(dtype, recompute, update=False)
        part = parts[len(parts) // 2]
        return float(part.kept), float(part.message)

    @property
    def elementwise(self) -> bool:
        """True if the optimizer's step is that of each layer alone."""
        return self.config.optimizer.name not in HOME

    @property
    def step_apart(self) -> dict[str, Any]:
        """The argument of `trace_part` for some layers of a stage, of which `steps` has the step if it is of all."""
        return {} if self.elementwise else {"step": False}

    # -------------------------------------------------------------------------------------------- offload
    @property
    def homes(self) -> tuple[str, ...]:
        """The places for what is offloaded, the faster first: what goes to a disk passes through the host's memory."""
        return tuple(place for place in ("host", "disk") if getattr(self.machine, place) is not None)

    def kinds(self, c: Candidate) -> tuple[str, ...]:
        """Return what a candidate may offload, where the configuration leaves that open and the machine has a place.

        Values rest elsewhere without ZeRO and with its stage 3: stages 1 and 2 hold them in buckets.  An asynchronous
        schedule keeps versions of them in memory.  States that lie whole on one rank come back together, and stay.
        """
        if not self.homes or self.config.offload:
            return ()
        found = ["optimizer"] * self.elementwise
        found += ["activations"] * (self.config.model.name in LANGUAGE)
        found += ["parameters"] * (c.zero in (0, 3) and c.schedule in (None, *SCHEDULES))
        return (*found, *["gradients"] * self.settles(c))

    def settles(self, c: Candidate) -> bool:
        """Return True if gradients may rest elsewhere: if their reducer sums whole ones in their own dtype."""
        precision = self.config.precision
        cast = precision.communicate if c.dtype == precision.dtype else None
        return c.zero == 0 and cast is None and not self.config.gradient_handler

    def gathering_again(self, c: Candidate) -> dict[str, Any]:
        """Return the argument of `trace_part` that says that products gather values again in the backward pass: those
        in two or three dims that rest elsewhere."""
        return {"elsewhere": True} if "parameters" in dict(c.offload) and c.tensor.mode not in (None, "1d") else {}

    def offloading(self, part: Part, c: Candidate) -> Part:
        """Return a part with what a candidate offloads."""
        if not c.offload:
            return part
        key = id(part), c.offload
        if key not in self._offloading:
            self._offloading[key] = part.offloaded(dict(c.offload), self.target == "gpu")
        return self._offloading[key]

    # -------------------------------------------------------------------------------------------- meshes
    def mesh(self, c: Candidate) -> MeshSpec:
        """Return the mesh of a candidate."""
        spec = resolve(c.apply(self.config, self.batch), self.ranks)
        if c.asked is not None and spec.schedule is not None:
            spec = replace(spec, schedule=of_fewer(spec.schedule, c.microbatches))
        return spec

    def short_mesh(self, c: Candidate) -> MeshSpec:
        """Return the mesh, with a schedule of so many microbatches that more of them repeat what is there."""
        return self.mesh(replace(c, microbatches=self.rounds(c)))

    def rounds(self, c: Candidate) -> int:
        """Return the microbatches that are simulated: all, or a few times the ranks of the pipeline."""
        few = (4 if c.schedule == "zb-v" else 3 if c.pipeline < 32 else 2) * c.pipeline  # ZB-V takes longer to repeat
        return c.microbatches if c.pipeline == 1 or c.asked is not None or c.microbatches <= few else few

    def cuts(self, spec: MeshSpec) -> list[Cut]:
        """Return the layers of each stage of a mesh; without a pipeline, all of them."""
        if spec.schedule is None:
            return [(0, self.depth)]
        counts = spec.layer_counts(self.depth - 2)
        if counts is None:
            counts = replace(spec, partition="uniform").layer_counts(self.depth - 2)
        assert counts is not None
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [(end - n, end) for n, end in zip(counts, ends, strict=True)]

    # -------------------------------------------------------------------------------------------- parts
    def trace(
        self, config: TrainingConfig, ranks: int, rows: int, *, layers: Cut | None = None, skip: Cut = (0, 0),
        **more: Any,
    ) -> Part:  # fmt: skip
        """Return `trace_part` of a configuration on the machine's nodes; a subclass may put other kernels in it."""
        self.traces += 1
        config = replace(config, offload=OffloadConfig())  # `Part.offloaded` says what that changes
        if layers is not None and (found := self.shortened(config, layers, skip)) is not None:
            config, layers, skip = *found, (0, 0)
        made = trace_part(
            config, self.inputs, ranks, rows, layers=layers, skip=skip, node=self.node, target=self.target,
            probe=self._may_offload_activations, **more,
        )  # fmt: skip
        self.events += len(made.trace.events)
        return made

    def part(self, key: Any, setup: Setup, **more: Any) -> Part:
        """Return the trace of layers in a setup; the one that is known by this key, if there is one."""
        if key not in self._parts:
            self._parts[key] = self.trace(setup.config, setup.ranks, setup.rows, **more)
        return self._parts[key]

    def rows(self, c: Candidate) -> int:
        """Return the rows of a candidate's largest microbatch, on all data parallel ranks together."""
        return -(-self.batch // c.microbatches)

    def one_copy(self, c: Candidate) -> Setup:
        """Return the setup of one copy of a candidate's model, or of as many as share experts."""
        copies = self.sharing_experts(c)
        one = replace(
            c, data=copies, pipeline=1, zero=0, microbatches=1, schedule=None, chunks=None, expert_ranks=None,
            within=None,
        )  # fmt: skip
        rows = copies * -(-self.rows(c) // c.data)  # the most of each data parallel rank
        return Setup(one.apply(self.config, rows), copies * one.width, rows, *self._keys(one, rows))

    def sharing_experts(self, c: Candidate) -> int:
        """Return the data parallel ranks over which a candidate's experts are cut."""
        options = self.config.model.options
        if int(options.get("num_local_experts", 1)) < 2:
            return 1
        axes = as_cut(options.get("expert_axis", "auto") if c.experts is None else c.expert_axis)
        within = (c.within or self.config.zero.within) if c.zero else None
        group = c.expert_ranks or within or c.data
        return group if {"data", "auto"} & {*axes} else 1

    def sharing_zero(self, c: Candidate) -> int:
        """Return the ranks over which ZeRO shards what none of them cuts; 1 where it shards nothing."""
        if not c.zero:
            return 1
        within = c.within or self.config.zero.within
        return c.mesh.copies if within is None else min(within, c.data)

    def layers_of_one_copy(self, c: Candidate) -> list[Part]:
        """Return the passes of all layers of one copy of a candidate's model, without updates."""
        return self._layers(c, self.one_copy(c), update=False)

    def layers(self, c: Candidate, ends: Collection[int] = ()) -> list[Part]:
        """Return the parts of all layers of a candidate's model, for a microbatch; `ends` are those without blocks on
        their rank, by number."""
        rows = self.rows(c)
        if c.pipeline > 1:  # a schedule is not asked for, and one of many microbatches takes long to make
            c = replace(c, microbatches=c.pipeline)
        setup = Setup(c.apply(self.config, rows), self.ranks, rows, *self._keys(c, rows))
        return self._layers(c, setup, update=True, ends=ends)

    def _keys(self, c: Candidate, rows: int) -> tuple[Any, Any]:
        """Return the keys of a setup."""
        bare = replace(c, recompute=None, experts=None) if self.config.model.name in LANGUAGE else c
        return (*_form(c), rows), (*_form(bare), rows)

    def _layers(self, c: Candidate, setup: Setup, update: bool, ends: Collection[int] = ()) -> list[Part]:
        found: list[Part] = []
        given: LayerOutput | None = None
        more = self.gathering_again(c) | self.step_apart if update else {}
        for i, key in enumerate(self.keys(c.dtype)):
            own = more | ({"ends": True} if i in ends else {})
            known = (setup.ends if i in (0, self.depth - 1) else setup.key, key, update, given, *own)
            several = c.zero == 3 and c.pipeline > 1 and i > 0  # as in a stage of several
            passes = NextPasses(other=frozenset([key] if several else ()))
            found.append(
                self.part(known, setup, layers=(i, i + 1), given=given, update=update, next_passes=passes, **own)
            )
            given = found[-1].output
        return found

    def steps(self, c: Candidate, spec: MeshSpec) -> list[Part]:
        """Return for each stage of a candidate the step of an optimizer that treats all its matrices together; none of
        an optimizer of which each layer's trace has its step."""
        if self.elementwise:
            return []
        setup, keys, found = self._step(c), self.keys(c.dtype), []
        for (a, b), tied in zip(self.cuts(spec), self.ties_of_stages(c, spec), strict=True):
            known = (*setup.key, *keys[a:b], *tied.values())
            found.append(self.part(known, setup, layers=(a, b), **tied))
        return found

    def _step(self, c: Candidate) -> Setup:
        """Return the setup of the optimizer's step alone."""
        one = replace(c, microbatches=c.pipeline, recompute=None)
        return Setup(one.apply(self.config, self.rows(c)), self.ranks, 0, ("step", *_form(one)))

    def beside_steps(self, c: Candidate, spec: MeshSpec) -> list[int]:
        """Return by pipeline rank the bytes beside what rests at the peak of a step that treats the matrices of several
        stages together; 0 of ranks with one stage, and of an optimizer of each layer alone.

        Of more than two stages the layers of those but the last are taken to be like those that follow the first one.
        """
        assert spec.schedule is not None
        setup, keys, cuts, found = self._step(c), self.keys(c.dtype), self.cuts(spec), []
        for chunks in spec.schedule.chunks:
            own = sorted(cuts[k.stage] for k in chunks)
            if self.elementwise or len(own) == 1:
                found.append(0)
                continue
            (first, _), (last, end) = own[0], own[-1]
            skip = first + sum(b - a for a, b in own[:-1]), last
            known = (*setup.key, *keys[first : skip[0]], *keys[last:end], "together")
            found.append(self.part(known, setup, layers=(first, end), skip=skip).last_peaks.whole)
        return found

    def whole(self, c: Candidate, **more: Any) -> Part:
        """Return the trace of a candidate's stage: the same for all schedules, and whatever is offloaded but values
        that products gather."""
        rows = self.rows(c)
        setup = Setup(c.apply(self.config, self.batch), self.ranks, rows, ("whole", *_form(c), rows))
        more |= self.gathering_again(c)
        return self.part((*setup.key, *sorted(more.items())), setup, **more)

    def stages(self, c: Candidate, spec: MeshSpec) -> list[Part]:
        """Return the traces of all layers of a candidate, by stage of its mesh, with what it offloads."""
        if spec.schedule is None:
            return [self.offloading(self.whole(c), c)]
        keys = self.keys(c.dtype)
        parts: list[Part] = []
        given: LayerOutput | None = None
        known: dict[Any, Part] = {}
        more = self.of_stages(c, spec)
        for s, (a, b) in enumerate(self.cuts(spec)):
            key = (tuple(keys[a:b]), given, *more[s].values())
            if key not in known:
                holder = spec.schedule.holder(s) if self.target == "cpu" or self.ranks > self.node else 0
                part = self.whole(c, layers=(a, b), given=given, stage=holder, **more[s])  # on one node all are alike
                known[key] = self.offloading(part, c)
            parts.append(known[key])
            given = known[key].output
        return parts

    def of_stages(self, c: Candidate, spec: MeshSpec) -> list[dict[str, Any]]:
        """Return for each stage what its trace takes of the others of its rank, by the arguments of `trace_part`."""
        if spec.schedule is None:
            return [{}]
        ties, cuts = self.ties_of_stages(c, spec), self.cuts(spec)
        if c.zero == 3:
            ties = [
                {**of, "next_passes": passes}
                for of, passes in zip(ties, self.following(c, spec.schedule, cuts), strict=True)
            ]
        ends = self.without_blocks(spec)
        return [{**of, "ends": True} if s in ends else of for s, of in enumerate(ties)]

    def without_blocks(self, spec: MeshSpec) -> set[int]:
        """Return the stages of a mesh's ranks without blocks: they have layers of the model's ends alone."""
        cuts = self.cuts(spec)
        if spec.schedule is None or min(b - a for a, b in cuts) > 1 or self.config.model.name not in LANGUAGE:
            return set()
        bare = [b - a <= (a == 0) + (b == self.depth) for a, b in cuts]
        on_rank = [[k.stage for k in chunks] for chunks in spec.schedule.chunks]
        return {s for s in range(len(cuts)) if all(all(bare[t] for t in own) for own in on_rank if s in own)}

    def following(self, c: Candidate, schedule: Schedule, cuts: Sequence[Cut]) -> list[NextPasses]:
        """Return for each stage the passes that may follow its own."""
        keys = self.keys(c.dtype)
        last = tuple(keys[b - 1] for _, b in cuts)
        known = schedule.name, schedule.ranks, schedule.microbatches, last
        if known not in self._following:
            self._following[known] = following(schedule, last)
        return self._following[known]

    def ties_of_stages(self, c: Candidate, spec: MeshSpec) -> list[dict[str, Any]]:
        """Return for each stage which of the tied parameters the stages of one rank share, as `trace_part` takes it.

        The first of them reduces and updates them.  Of stages on ranks of their own nothing is said.
        """
        schedule, cuts = spec.schedule, self.cuts(spec)
        if schedule is None:
            return [{}]
        on_rank = [{k.stage for k in chunks} for chunks in schedule.chunks]
        found: list[dict[str, Any]] = []
        for s in range(schedule.stages):
            shared, theirs = set(), set()
            for i, layers in enumerate(self.ties(c.dtype)):
                held = {n for n, (a, b) in enumerate(cuts) if any(a <= layer < b for layer in layers)}
                mates = {n for stages in on_rank if s in stages for n in stages & held} - {s} if s in held else set()
                shared |= {i} if mates else set()
                theirs |= {i} if any(n < s for n in mates) else set()
            found.append({"shared": frozenset(shared), "theirs": frozenset(theirs)} if shared else {})
        return found

    # -------------------------------------------------------------------------------------------- times
    def timed(self, trace: Trace, pending: bool = False, quick: bool = False) -> Timeline:
        """Return the run of a trace, without its intervals: candidates with one form have many traces in common.

        Parameters
        ----------
        trace : Trace
        pending : bool
            As of `timeline`.
        quick : bool
            For bounds: launching is hidden by the device's earlier work, however much there was.
        """
        key = id(trace), pending, quick
        if key not in self._timelines:
            machine = self._quick if quick else self.machine
            run = timeline(replace(trace, size=self.ranks), machine, on_node=self.node, pending=pending)
            self._timelines[key] = trace, replace(run, intervals=(), memory={})
        return self._timelines[key][1]

    @cached_property
    def _quick(self) -> Machine:
        if not self.machine.kernels.asynchronous:
            return self.machine
        return replace(self.machine, kernels=replace(self.machine.kernels, overhead=0.0))

    def seconds(self, part: Part, span: str, quick: bool = False) -> float:
        """Return the seconds of a span of a part."""
        trace = part.span(span)
        return self.timed(trace, quick=quick).seconds if trace.events else 0.0

    def send_seconds(self, nbytes: float, local: int) -> float:
        """Return the seconds of a message within a node, `local` being 2, or between nodes."""
        return self.machine.transfer("send", nbytes, 2, local, self.node, self.ranks).total


@lru_cache(maxsize=64)
def dependencies(name: str, ranks: int, microbatches: int, chunks: int | None) -> Dependencies:
    """Return the dependencies of a schedule, by which it is simulated with many costs."""
    if name.endswith(FLUSHED):
        made = forward_then_backward(make_schedule(name.removesuffix(FLUSHED), ranks, ranks, chunks), microbatches)
    else:
        made = make_schedule(name, ranks, microbatches, chunks)
    return replace(Dependencies.of(made), what=[])


def passes_of(schedule: Schedule, rank: int) -> list[tuple[bool, int]]:
    """Return the passes of a pipeline rank that gather weights, as `dropped` takes them."""
    return [(i.op is not Op.FORWARD, i.chunk) for i in schedule.orders[rank] if i.op in PASSES]


def following(schedule: Schedule, last: Sequence[Hashable]) -> list[NextPasses]:
    """Return for each stage the passes that may follow its own on a rank, by the last layer of each stage."""
    pairs = set[tuple[bool, int, int]]()
    for rank, chunks in enumerate(schedule.chunks):
        for (backward, one), (then, other) in pairwise(passes_of(schedule, rank)):
            if backward is then:
                pairs.add((backward, chunks[one].stage, chunks[other].stage))
    return [
        NextPasses(
            ((False, s, s) in pairs, (True, s, s) in pairs),
            frozenset(last[other] for backward, one, other in pairs if backward and one == s != other),
        )
        for s in range(schedule.stages)
    ]


def most_events(parts: Sequence[Part]) -> int:
    """Return the events in the longest trace of some layers: on a ring of 97 ranks each has thousands."""
    return max(len(part.trace.events) for part in parts)


def longest_run(keys: Sequence[Any], among: Cut) -> Cut:
    """Return the longest run of equal layers among some.

    >>> longest_run("abbbccd", (2, 7))
    (2, 4)
    """
    a, b = among
    best = at = a
    most = 0
    for i in range(a, b + 1):
        if i == b or keys[i] != keys[at]:
            if i - at > most:
                best, most = at, i - at
            at = i
    return best, best + most


def _one_rank(dtype: str | None, recompute: str | None = None) -> Candidate:
    """Return the candidate that uses one rank, without ZeRO and in one microbatch."""
    return Candidate(1, 1, 1, 1, TensorConfig(), 0, 1, None, None, recompute, dtype)


def _with_layers(config: TrainingConfig, layers: int) -> TrainingConfig:
    """Return the configuration with a model of so many layers."""
    model = replace(config.model, options={**config.model.options, "num_hidden_layers": layers})
    return replace(config, model=model)


def _with_fewer(config: TrainingConfig, fewer: int) -> TrainingConfig:
    return _with_layers(config, int({**SIZES, **config.model.options}["num_hidden_layers"]) - fewer)


def _form(c: Candidate) -> tuple[Any, ...]:
    """Return the choices of a candidate on which a layer's trace depends, beside the rows of a microbatch."""
    cut = c.data, c.pipeline, c.sequence, c.ulysses, c.tensor
    return *cut, c.zero, c.within, c.recompute, c.dtype, c.experts, c.expert_ranks, c.order
