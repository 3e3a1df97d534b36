"""Predict what a candidate takes on a machine: estimates by its layers, and full traces of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from parlinalg.comm.base import bytes_of_terms
from parlinalg.parallel.buckets import Load, bytes_in_buckets
from parlinalg.parallel.gatherer import dropped
from parlinalg.pipeline.schedule import Op, Schedule
from parlinalg.pipeline.simulate import Costs, Dependencies, Moment, SharedCores
from parlinalg.pipeline.tied import BUCKET
from parlinalg.planning.candidates import Candidate
from parlinalg.planning.parts import LayerOutput, Part, queued
from parlinalg.planning.pipeline_timeline import Stage, pipeline_timeline, sharing
from parlinalg.planning.timeline import COMPUTED
from parlinalg.planning.trace import Kernel, Start, Trace, Wait
from parlinalg.planning.traced_model import TracedModel, dependencies, longest_run, most_events, passes_of
from parlinalg.train.config import TrainingConfig
from parlinalg.train.mesh import MeshSpec
from parlinalg.units import ITEMSIZE

LONG = 12  # equal layers of a stage beyond which two traces, of a few of them and of some more, stand for all:
FEW, FEW_BESIDE = (4, 6), (6, 10)  # their layers; where reductions or gathers go on beside the passes
HEAVY, FEW_HEAVY = 8192, (1, 2)  # events of a layer beyond which that is done however few they are, and their layers
RESTS = ("weights", "gradients", "states")
HELD = ("kept", "pending", "transient", "unfollowed")  # of a microbatch
SUMMED = ("summed", "together", "apart")  # of gradients
LATE = {Op.FORWARD: "late forward", Op.BACKWARD: "late inputs", Op.BACKWARD_WEIGHT: "late weights"}
CALM = {Op.BACKWARD: "calm inputs", Op.BACKWARD_WEIGHT: "calm weights"}
"""The bytes that pass in computations of a schedule in which gradients of weights come later, as of `Part.deferred`;
the calm ones where no backward pass follows."""
Figures = dict[str, float]
"""Seconds, bytes and words of layers by name; those of causes as "pass: CAUSE", "end: CAUSE"."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a candidate takes.

    Attributes
    ----------
    memory : dict of str to int
        Bytes of the fullest rank: weights, gradients, states, activations (all microbatches in flight), buffers.
    stage : int
        The pipeline rank whose memory is the fullest.
    host, disk : int
        Bytes of host memory and on a disk that the rank with the most offloaded takes.
    traced : bool
        False of an estimate by single layers.
    """

    memory: Mapping[str, int]
    stage: int = 0
    host: int = 0
    disk: int = 0
    traced: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True)
class Planned(Held):
    """A candidate and what it takes.

    Attributes
    ----------
    candidate : Candidate
    config : TrainingConfig
    seconds : float
        Of a step.
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

    The bytes are as of `Held`.
    """

    candidate: Candidate
    config: TrainingConfig
    seconds: float
    words: int
    across: int
    within: int
    bubble: float
    causes: Mapping[str, float]
    throughput: float
    mfu: float
    rate: float


class Moved(NamedTuple):
    """Words that a rank receives, and their bytes from groups that span nodes and from others."""

    words: int
    across: int
    within: int

    def plus(self, words: float, nbytes: float, apart: bool) -> Moved:
        """Return this with what else a rank receives, from another node if that is `apart`."""
        return Moved(
            self.words + round(words), self.across + round(nbytes * apart), self.within + round(nbytes * (not apart))
        )


class Predictor:
    """Predicts what candidates of a model take.

    Parameters
    ----------
    model : TracedModel
    """

    def __init__(self, model: TracedModel) -> None:
        self.model = model
        self._known_figures: dict[tuple[int, bool, bool], Figures] = {}
        self._known_gradients: dict[tuple[int, ...], list[int]] = {}

    # -------------------------------------------------------------------------------------------- estimates
    def estimate(self, c: Candidate) -> Planned:
        """Return about what a candidate takes, by traces of its distinct layers."""
        spec = self.model.short_mesh(c)
        cuts = self.model.cuts(spec)
        ends: set[int] = set()
        if "activations" in dict(c.offload):  # a rank without blocks offloads those of the model's ends
            ends = {layer for s in self.model.without_blocks(spec) for layer in range(*cuts[s])}
        layers = self.model.layers(c, ends)
        figures = [self._offloading_figures(part, c) for part in layers]
        beside = [0] * len(cuts)
        if c.zero == 3 and spec.schedule is not None and min(b - a for a, b in cuts) < 3:
            first = {key: part.gathered[1] for key, part in zip(self.model.keys(c.dtype), layers, strict=True)}
            following = self.model.following(c, spec.schedule, cuts)
            beside = [max((first[key] for key in each.other), default=0) * each.again[True] for each in following]
        stages = [
            _total(self._in_stage(figures[a:b], layers[a:b], c, more))
            for (a, b), more in zip(cuts, beside, strict=True)
        ]
        stages = self._with_steps(stages, c, spec)
        if c.pipeline == 1:
            (one,) = stages
            one["message"] = 0
            passes = sum(f["forward"] + f["backward"] for f in figures)
            reduce = [max(0.0, f["end"] - f["forward"] - f["backward"] - f["update"]) for f in figures]
            asynchronous = self.model.machine.overlap.progress == "asynchronous"
            hidden = sum(f["backward"] for f in figures) if asynchronous else 0.0
            one["end"] = passes + max(*reduce, sum(reduce) - hidden) + one["update"]
        return self._by_figures(c, stages, spec)

    def _with_steps(self, stages: Sequence[Figures], c: Candidate, spec: MeshSpec) -> list[Figures]:
        """Return the figures of stages with those of their optimizer's steps, where layers are traced without these."""
        optimizer = replace(c, offload=tuple(away for away in c.offload if away[0] == "optimizer"))
        known: Figures = {"weights": 0, "gradients": 0}  # which the stages have
        steps = [self._offloading_figures(part, optimizer) | known for part in self.model.steps(c, spec)]
        return [_total(each) for each in zip(steps, stages, strict=True)] if steps else list(stages)

    def _in_stage(
        self, figures: Sequence[Figures], layers: Sequence[Part], c: Candidate, beside: int
    ) -> Sequence[Figures]:  # fmt: skip
        """Return the figures of a stage's layers, each with what it holds beside the others.

        With ZeRO's stage 2 gradients of several layers fill buckets together, with stage 1 their sums at the end of a
        step.  With stage 3 those of the layer behind arrive while the weights of two layers are gathered.  Weights of a
        stage's only layer stay for another pass, while so many bytes are gathered for a pass of another stage.
        """
        if not any(part.loads for part in layers):
            return figures
        key = tuple(map(id, layers))
        if key not in self._known_gradients:
            self._known_gradients[key] = _beside_gradients(layers)
        gathering = [i for i, part in enumerate(layers) if part.gathered[1]]
        beside *= len(gathering) == 1
        offloaded = "activations" in dict(c.offload)
        alike = len(gathering) < 2 or offloaded  # as in plans
        made = []
        for i, (figure, more) in enumerate(zip(figures, self._known_gradients[key], strict=True)):
            part = layers[i]
            each_pass = more * (c.pipeline == 1 or any(load.transient for _, load in part.loads))
            transient, later = figure["transient"] + each_pass, figure["late weights"] + each_pass
            unfollowed = figure["unfollowed"] + each_pass
            if c.zero == 3 and (own := part.gathered[1]):
                arriving = sum(behind.gathered[1] + behind.gradients for behind in layers[i + 1 : i + 2])
                if c.pipeline == 1:  # the trace has no other layer's weights
                    transient += arriving + sum(other.gathered[1] for other in layers[max(0, i - 1) : i])
                else:
                    transient, unfollowed = max(transient, 2 * own + arriving), max(unfollowed, own + arriving)
                if beside:
                    transient, later = max(transient, 2 * own + beside + part.gradients), later + beside
            ending = {name: figure[name] + more for name in ("ending", "late ending")}
            calm = {"calm inputs": figure["calm inputs"], "calm weights": figure["calm weights"] + each_pass}
            if alike or i > gathering[0]:  # what is gathered beside is no other pass's
                unfollowed = transient
            if offloaded or i > min(gathering, default=i):
                calm = {"calm inputs": figure["late inputs"], "calm weights": later}
            passing = {"transient": transient, "unfollowed": unfollowed, "late weights": later}
            made.append({**figure, **ending, **passing, **calm})
        return made

    def stretched(self, c: Candidate) -> Planned:
        """Return what a candidate takes, where stages have many equal layers: of those with few and with some more.

        What a stage takes grows evenly with its equal layers, from a few on, as they pass through the same buckets.
        """
        model = self.model
        spec = model.short_mesh(c)
        keys = model.keys(c.dtype)
        heavy = most_events(model.layers(c)) > HEAVY
        counts = FEW_HEAVY if heavy else FEW_BESIDE if c.zero == 3 or c.pipeline == 1 else FEW
        stages: list[Figures] = []
        known: dict[Any, tuple[Figures, LayerOutput | None]] = {}
        given: LayerOutput | None = None
        more = [{**of, **model.step_apart} for of in model.of_stages(c, spec)]
        for s, (a, b) in enumerate(model.cuts(spec)):
            key = tuple(keys[a:b]), given, *more[s].values()
            if key not in known:
                first, last = longest_run(keys, (a, b))
                holder = 0 if spec.schedule is None else spec.schedule.holder(s)
                figures = []
                for few in counts if last - first > counts[-1] else (last - first,):
                    part = model.whole(c, layers=(a, b), skip=(first + few, last), given=given, stage=holder, **more[s])
                    figures.append(self._offloading_figures(part, c, apart=c.microbatches == 1))
                known[key] = _line(figures, counts, last - first), part.output
            figure, given = known[key]
            stages.append(figure)
        return replace(self._by_figures(c, self._with_steps(stages, c, spec), spec), traced=True)

    def is_long(self, c: Candidate) -> bool:
        """Return True if a candidate has more equal layers or microbatches than are traced and simulated one by one."""
        model = self.model
        long = (model.depth - 2) / c.pipeline > LONG or model.rounds(c) < c.microbatches
        return long or most_events(model.layers(c)) > HEAVY

    def _by_figures(self, c: Candidate, stages: Sequence[Figures], spec: MeshSpec) -> Planned:
        """Return what a candidate takes by the figures of its stages, on a mesh as of `TracedModel.short_mesh`."""
        if spec.schedule is None:
            return self._in_turn(c, *stages)
        return self._in_pipeline(c, stages, spec, spec.schedule)

    def _in_turn(self, c: Candidate, one: Figures) -> Planned:
        """Return what a candidate without a pipeline takes: its microbatches follow each other."""
        before = c.microbatches - 1
        seconds = before * (one["forward"] + one["backward"]) + one["end"]
        times = [(before, one, "pass"), (1, one, "end")]
        transient = one["transient"] + queued(one["away"], one["array"]) + min(one["tiled"], one["tiles"])
        memory = _memory(*(round(n) for n in (*(one[k] for k in (*RESTS, "kept")), transient)))
        away = {p: round(one[p] + one[f"{p} kept"]) for p in self.model.homes}
        held = Held(memory=memory, traced=False, **away)
        return self._planned(c, seconds, held, _moved_in_step(times), 0.0, _shares(_causes(times), seconds))

    def _in_pipeline(self, c: Candidate, stages: Sequence[Figures], spec: MeshSpec, schedule: Schedule) -> Planned:
        """Return what a candidate with a pipeline takes, by the simulation of its schedule."""
        model = self.model
        own = [[stages[k.stage] for k in chunks] for chunks in schedule.chunks]
        local = 1 if model.ranks > model.node else 2
        sums = self._sums(c, spec, schedule, stages)
        costs = Costs(
            forward=[f["forward"] for f in stages], backward=[f["backward"] for f in stages],
            weight=[f["backward"] / 2 for f in stages],
            latency=model.send_seconds(stages[0]["message"], local),
            reduce=[
                sum(f["reduce"] for f in each) + sum(self._sum_seconds(*each_sum) for each_sum in of_rank)
                for each, of_rank in zip(own, sums, strict=True)
            ],
            step=[sum(f["update"] for f in each) for each in own],
        )  # fmt: skip
        computing = [f"{span}: {cause}" for span in ("pass", "reduce", "update") for cause in COMPUTED]
        whole = sum(f[span] for f in stages for span in ("forward", "backward", "reduce", "update"))
        computed = sum(f.get(name, 0.0) for f in stages for name in computing) / max(1e-300, whole)
        faster = sharing(model.machine, model.node, model.ranks, spec.places, computed)
        seconds, work, flight, pace = _simulated(schedule, c, costs, faster)
        bubble = max(0.0, 1 - work / (schedule.ranks * seconds)) if seconds else 0.0
        passes = [_passes(schedule, rank, c.microbatches) for rank in range(schedule.ranks)]
        in_passes = [
            [(times, f, "pass") for times, f in zip(*each, strict=True)] for each in zip(passes, own, strict=True)
        ]
        busiest = max(
            range(schedule.ranks), key=lambda r: sum(n * (f["forward"] + f["backward"]) for n, f, _ in in_passes[r])
        )
        after = [(1, f, name) for f in own[busiest] for name in ("reduce", "update")]
        spent = {cause: s * pace for cause, s in _causes([*in_passes[busiest], *after]).items()}
        spent["idle"] = spent.get("idle", 0.0) + max(0.0, seconds - sum(spent.values()))
        moved = []
        for rank, each in enumerate(own):
            found = _moved_in_step([*in_passes[rank], *((1, f, "end") for f in each)])
            for ranks, nbytes in sums[rank]:
                found = found.plus(nbytes / self._itemsize(c), nbytes, self._across_nodes(ranks))
            moved.append(Moved(*map(sum, zip(found, self._received(c, spec, schedule, rank, stages), strict=True))))
        held = self._fullest(own, flight, self._after(c, spec, schedule, stages), traced=False)
        return self._planned(c, seconds, held, max(moved), bubble, _shares(spent, seconds))

    def _sums(
        self, c: Candidate, spec: MeshSpec, schedule: Schedule, stages: Sequence[Figures]
    ) -> list[list[tuple[tuple[int, ...], float]]]:  # fmt: skip
        """Return by pipeline rank the sums of gradients of what several of them hold, as `TiedParameters` makes them:
        the ranks of the world that take part, and the bytes that this one receives.

        Of tied parameters the ranks with their stages have copies, and of all parameters those with replicas.
        """

        ties, shared = self.model.ties(c.dtype), []
        for s, figures in enumerate(stages):
            alone = figures["summed"] - sum(figures[f"tie {i} own"] for i in range(len(ties)))
            shared.append((_holders([s], schedule), alone))
        for i, held in enumerate(self._stages_of_ties(c, spec)):
            shared.append((_holders(held, schedule), stages[held[0]][f"tie {i}"]))
        found: list[dict[tuple[int, ...], float]] = [{} for _ in range(schedule.ranks)]
        for ranks, nbytes in shared:
            places = tuple(sorted(spec.places[r][0] for r in ranks))
            for r in ranks if len(ranks) > 1 else ():  # those of the same ranks are summed together
                found[r][places] = found[r].get(places, 0.0) + 2 * nbytes * (len(ranks) - 1) / len(ranks)
        return [list(sums.items()) for sums in found]

    def _stages_of_ties(self, c: Candidate, spec: MeshSpec) -> list[list[int]]:
        """Return for each tied parameter the stages that have a layer with it."""
        cuts = self.model.cuts(spec)
        return [
            [s for s, (a, b) in enumerate(cuts) if any(a <= layer < b for layer in layers)]
            for layers in self.model.ties(c.dtype)
        ]

    def _after(
        self, c: Candidate, spec: MeshSpec, schedule: Schedule, stages: Sequence[Figures]
    ) -> list[float]:  # fmt: skip
        """Return by pipeline rank the bytes that pass in what all its stages do together once their passes are over."""
        sums = self._beside_sums(c, spec, schedule, stages)
        return [max(each) for each in zip(sums, self.model.beside_steps(c, spec), strict=True)]

    def _beside_sums(
        self, c: Candidate, spec: MeshSpec, schedule: Schedule, stages: Sequence[Figures]
    ) -> list[float]:  # fmt: skip
        """Return by pipeline rank the bytes that pass in those sums, where all holders update the same elements: small
        gradients in one array, large ones where they lie, and the terms of 16-bit sums."""
        small: list[dict[tuple[int, ...], list[float]]] = [{} for _ in range(schedule.ranks)]
        most = [0.0] * schedule.ranks
        itemsize, cpu = self._itemsize(c), self.model.target == "cpu"

        def beside(nbytes: float, ranks: int) -> float:
            return bytes_of_terms(nbytes, ranks, cpu=cpu) if itemsize == 2 else 0.0

        shared = [(_holders([s], schedule), f["together"], f["apart"]) for s, f in enumerate(stages)]
        shared *= schedule.copies > 1  # else stages share ties alone
        for i, held in enumerate(self._stages_of_ties(c, spec) if schedule.copies == 1 else ()):
            tie = stages[held[0]][f"tie {i} own"]
            shared.append((_holders(held, schedule), *((tie, 0.0) if tie < BUCKET else (0.0, tie))))
        for ranks, together, apart in shared:
            for r in ranks if len(ranks) > 1 else ():
                small[r].setdefault(tuple(sorted(ranks)), []).append(together)
                most[r] = max(most[r], beside(apart, len(ranks)))
        for r, groups in enumerate(small):
            for ranks, found in groups.items():
                bucket = min(sum(found), BUCKET)
                copied = bucket if len(found) > 1 or schedule.copies > 1 else 0.0
                most[r] = max(most[r], copied + beside(bucket, len(ranks)))
        return most

    def _sum_seconds(self, ranks: Sequence[int], nbytes: float) -> float:
        """Return the seconds of a sum over ranks of the world of which each receives so many bytes."""
        model = self.model
        local = max(Counter(r // model.node for r in ranks).values())
        return model.machine.transfer("all_reduce", nbytes, len(ranks), local, model.node, model.ranks).total

    def _across_nodes(self, ranks: Iterable[int]) -> bool:
        return len({r // self.model.node for r in ranks}) > 1

    def _received(
        self, c: Candidate, spec: MeshSpec, schedule: Schedule, rank: int, stages: Sequence[Figures]
    ) -> Moved:  # fmt: skip
        """Return what a pipeline rank receives of its neighbours in a step, by the messages of each stage."""
        found = Moved(0, 0, 0)
        for chunk, times in zip(schedule.chunks[rank], _passes(schedule, rank, c.microbatches), strict=True):
            for other in (chunk.stage - 1, chunk.stage + 1):
                if not 0 <= other < schedule.stages or (peer := schedule.holder(other, chunk.copy)) == rank:
                    continue
                output = stages[min(other, chunk.stage)]
                apart = self._across_nodes(spec.places[r][0] for r in (rank, peer))
                found = found.plus(times * output["message words"], times * output["message"], apart)
        return found

    def _dropped(self, schedule: Schedule, rank: int, parts: Sequence[Part]) -> Moved:
        """Return what a pipeline rank receives of weights that it gathers ahead and another pass comes next."""
        found = []
        for (backward, chunk), times in dropped(passes_of(schedule, rank)).items():
            part = parts[schedule.chunks[rank][chunk].stage]
            forward = _starts(part.span("forward"))
            ahead = {id(e) for e in _starts(part.span("backward"))}  # those that it awaits and the forward pass started
            found.append((times, [e for e in forward if id(e) in ahead] if backward else forward[: part.first_gathers]))
        return self._moved(found)

    # -------------------------------------------------------------------------------------------- figures
    def _offloading_figures(self, part: Part, c: Candidate, apart: bool = True) -> Figures:
        """Return the figures of a part with what a candidate offloads: ranks wait for the copies."""
        made = self._figures(part, c.pipeline == 1, apart).copy()
        if not c.offload:
            return made
        there = self.model.offloading(part, c)
        made |= self._bytes(there)
        for span, group in (("forward", "pass"), ("backward", "pass"), ("update", "update")):
            for cause, nbytes in there.moves[span].items():
                if not nbytes:
                    continue
                seconds = self.model.machine.kernel_seconds(Kernel(cause, nbytes, nbytes, "uint8"))
                made[span] += seconds
                for name in (group, *["end"] * (c.pipeline == 1)):
                    made[f"{name}: {cause}"] = made.get(f"{name}: {cause}", 0.0) + seconds
                if c.pipeline == 1:
                    made["end"] += seconds
        return made

    def _figures(self, part: Part, alone: bool, apart: bool = True) -> Figures:
        """Return the figures of a part; without a pipeline its end is the last microbatch with all that follows.

        Launching is hidden by what was launched ahead in the microbatch before; `apart` is True if there is none.
        """
        if (id(part), alone, apart) in self._known_figures:
            return self._known_figures[id(part), alone, apart]
        model = self.model
        made = self._bytes(part)
        for span in ("forward", "backward", "reduce", "update", *["end"] * (alone and apart)):
            passes = span in ("forward", "backward")
            made[span], trace = 0.0, part.span(span)
            if not trace.events:
                continue
            run = model.timed(trace, pending=passes and not alone and model.ranks > model.node)
            made[span] = run.seconds
            for cause, seconds in run.causes[run.slowest].items():
                key = f"{'pass' if passes else span}: {cause}"
                made[key] = made.get(key, 0.0) + seconds
        if alone and not apart:
            run = model.timed(part.trace)
            made["end"] = run.seconds - made["forward"] - made["backward"]
            for cause, seconds in run.causes[run.slowest].items():
                made[f"end: {cause}"] = seconds - made.get(f"pass: {cause}", 0.0)
        ends = [part.span("end")] if alone else [part.span("reduce"), part.span("update")]
        for name, traces in (("pass", (part.span("forward"), part.span("backward"))), ("end", ends)):
            moved = self._moved([(1, _starts(*traces))])
            made |= {f"{what} in {name}": n for what, n in zip(Moved._fields, moved, strict=True)}
        self._known_figures[id(part), alone, apart] = made
        return made

    def _bytes(self, part: Part) -> Figures:
        """Return the figures of a part that are bytes, with those in each place for what is offloaded."""
        made: Figures = {
            name: getattr(part, name) for name in (*RESTS, *HELD, "message", "summed", "together", "apart")
        }
        made |= zip((*LATE.values(), *CALM.values()), part.deferred, strict=True)
        made["lone"] = part.lone
        made["ending"], made["late ending"] = part.last_peaks.whole - part.kept, part.last_peaks.later - part.pending
        made["sums"] = part.last_peaks.sums
        made["away"], made["away late"], made["array"] = part.queue
        made["tiled"], made["tiles"] = part.tiled
        made["message words"] = 0 if part.output is None else part.message // ITEMSIZE[part.output.dtype]
        for i, (tie, rest) in enumerate(zip(part.ties, part.tied_at_rest(), strict=True)):
            made |= {f"tie {i}": tie.most, f"tie {i} own": tie.updated}
            made |= {f"tie {i} {name}": nbytes for name, nbytes in zip(RESTS, rest, strict=True)}
        for place in self.model.homes:
            made[place], made[f"{place} kept"] = part.elsewhere[place], part.elsewhere_kept[place]
        return made

    # -------------------------------------------------------------------------------------------- in full
    def held(self, c: Candidate) -> Held:
        """Return the bytes that a candidate takes, by traces of all its layers on every distinct stage."""
        spec = self.model.mesh(c)
        return self._held(c, spec, self.model.stages(c, spec))

    def _held(self, c: Candidate, spec: MeshSpec, parts: Sequence[Part]) -> Held:
        if spec.schedule is None:
            (part,) = parts
            transient = part.transient + queued(part.away, part.array) * (part.queue[0] > 0) + min(part.tiled)
            memory = _memory(part.weights, part.gradients, part.states, part.kept, transient)
            host, disk = (part.elsewhere[p] + part.elsewhere_kept[p] for p in ("host", "disk"))
            return Held(memory=memory, host=host, disk=disk)
        schedule = spec.schedule
        stages = [self._bytes(part) for part in parts]
        figures = [[stages[k.stage] for k in chunks] for chunks in schedule.chunks]
        graph = dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks)
        return self._fullest(figures, _InFlight(graph), self._after(c, spec, schedule, stages))

    def full(self, c: Candidate) -> Planned:
        """Return what a candidate takes, by traces of all its layers on every distinct stage."""
        spec = self.model.mesh(c)
        parts = self.model.stages(c, spec)
        held = self._held(c, spec, parts)
        if spec.schedule is None:
            return self._full_in_turn(c, parts[0], held)
        return self._full_in_pipeline(c, spec, spec.schedule, parts, held)

    def _full_in_turn(self, c: Candidate, part: Part, held: Held) -> Planned:
        """Return what a candidate without a pipeline takes: equal microbatches repeat."""
        passes = part.span("forward"), part.span("backward")
        run = self.model.timed(part.span("end") if c.microbatches == 1 else part.trace)
        seconds, spent = run.seconds, dict(run.causes[run.slowest])
        for trace in passes if c.microbatches > 2 else ():
            again = self.model.timed(trace)
            seconds += (c.microbatches - 2) * again.seconds
            for cause, each in again.causes[again.slowest].items():
                spent[cause] = spent.get(cause, 0.0) + (c.microbatches - 2) * each
        moved = self._moved([(c.microbatches - 1, _starts(*passes)), (1, _starts(part.span("end")))])
        return self._planned(c, seconds, held, moved, 0.0, _shares(spent, seconds))

    def _full_in_pipeline(
        self, c: Candidate, spec: MeshSpec, schedule: Schedule, parts: Sequence[Part], held: Held
    ) -> Planned:  # fmt: skip
        """Return what a candidate with a pipeline takes, by the simulation of its schedule."""
        model = self.model
        stages = [Stage(part.span("forward"), part.span("backward"), None, part.message) for part in parts]
        figures = [self._bytes(part) for part in parts]
        sums = self._sums(c, spec, schedule, figures)
        reduce, step = [], []
        for rank, chunks in enumerate(schedule.chunks):
            reduce.append(_joined(*(parts[k.stage].span("reduce") for k in chunks)))
            step.append(_joined(*(parts[k.stage].span("update") for k in chunks)))
            found = [_summed(reduce[-1], *each, c.apply(model.config, model.batch).model_dtype) for each in sums[rank]]
            reduce[-1] = _joined(reduce[-1], *found)
        made = pipeline_timeline(
            schedule, stages, model.machine, reduce=reduce, step=step, places=spec.places, on_node=model.node,
            timed=model.timed,
        )  # fmt: skip
        in_pass = [self._moved([(1, _starts(stage.forward, stage.backward))]) for stage in stages]
        moved = []
        for rank, chunks in enumerate(schedule.chunks):
            after = self._moved([(1, _starts(reduce[rank], step[rank]))])
            times = zip(_passes(schedule, rank, c.microbatches), chunks, strict=True)
            every = [Moved(*(n * x for x in in_pass[k.stage])) for n, k in times]
            every += [after, self._received(c, spec, schedule, rank, figures), self._dropped(schedule, rank, parts)]
            moved.append(Moved(*map(sum, zip(*every, strict=True))))
        return self._planned(c, made.seconds, held, max(moved), made.bubble, dict(made.shares()))

    # -------------------------------------------------------------------------------------------- what both share
    def _fullest(
        self, held: Sequence[Sequence[Figures]], flight: _InFlight, after: Sequence[float], traced: bool = True
    ) -> Held:  # fmt: skip
        """Return the bytes of the fullest pipeline rank, and the most that a rank has in each place.

        `held` are the figures of each rank's stages, `flight` tells the microbatches that it holds at once,
        `after` is as of `_after`.
        """
        memory: dict[str, int] = {}
        stage, away = 0, dict.fromkeys(self.model.homes, 0)
        message, sums = max(f["message"] for own in held for f in own), _tied_sums(held)
        for r, own in enumerate(held):
            weights, gradients, states = (round(sum(f[k] for f in own) - _twice(own, k)) for k in RESTS)
            late = any(m.op is Op.BACKWARD_WEIGHT for m in flight.graph.moments[r])
            beside = partial(_passing, own, message, late)
            kept, transient = flight.most(r, [f["kept"] for f in own], [f["pending"] for f in own], beside)
            kept, transient = max((kept, transient), *_ends(own, late), (0.0, max(sums[r], after[r])), key=sum)
            transient += min(sum(f["tiled"] for f in own), max(f["tiles"] for f in own))
            here = _memory(weights, gradients, states, round(kept), round(transient))
            for p in away:
                each = [f[f"{p} kept"] for f in own]  # until the gradients of weights are computed
                there = sum(f[p] for f in own) + flight.most(r, each, each, lambda _: 0.0)[0]
                away[p] = max(away[p], round(there))
            if sum(here.values()) > sum(memory.values()):
                memory, stage = here, r
        return Held(memory=memory, stage=stage, traced=traced, **away)

    def _moved(self, groups: Sequence[tuple[int, Sequence[Start]]]) -> Moved:
        """Return what a rank receives by operations, each group of them a number of times."""
        words = across = within = 0
        for times, starts in groups:
            for s in starts:
                words += times * s.nbytes // ITEMSIZE.get(s.dtype, 1)
                ends = s.ranks if s.peer is None else (*s.ranks, s.peer)
                if len({r // self.model.node for r in ends}) > 1:
                    across += times * s.nbytes
                else:
                    within += times * s.nbytes
        return Moved(words, across, within)

    def _itemsize(self, c: Candidate) -> int:
        """Return the bytes of an element of a gradient."""
        return ITEMSIZE[c.apply(self.model.config, self.model.batch).model_dtype]

    def _planned(
        self, c: Candidate, seconds: float, held: Held, moved: Moved, bubble: float, causes: Mapping[str, float]
    ) -> Planned:  # fmt: skip
        model = self.model
        units = model.batch * (model.inputs.length if model.inputs.language else 1)
        peak = model.machine.peak(c.dtype or model.config.dtype) / model.machine.crowd(model.node, model.ranks)
        rate = model.flops / (seconds * model.ranks)
        return Planned(
            candidate=c, config=c.apply(model.config, model.batch), seconds=seconds, bubble=bubble, causes=causes,
            throughput=units / seconds, mfu=rate / peak, rate=rate, **moved._asdict(), **vars(held),
        )  # fmt: skip


def _passes(schedule: Schedule, rank: int, microbatches: int) -> list[int]:
    """Return how many of so many microbatches pass through each chunk of a pipeline rank."""
    return [len(range(chunk.copy, microbatches, schedule.copies)) for chunk in schedule.chunks[rank]]


class _InFlight(NamedTuple):
    """The microbatches that the ranks of a pipeline hold at once, by a schedule that may have fewer than there are.

    Attributes
    ----------
    graph : Dependencies
    fewer : Dependencies or None
        Of the same schedule with a round less.
    rounds : float
        The number of rounds beyond those of `graph`, each of which adds what its last one did.
    """

    graph: Dependencies
    fewer: Dependencies | None = None
    rounds: float = 0.0

    def most(
        self, rank: int, kept: Sequence[float], pending: Sequence[float], beside: Callable[[Moment], float]
    ) -> tuple[float, float]:  # fmt: skip
        """Return the bytes of activations, and those that pass while a chunk computes, at a rank's fullest moment.

        Those of one microbatch are given, by the chunks of the rank: kept between its passes, and pending as of a
        `Part`; and what passes at a moment.
        """

        def fullest(graph: Dependencies) -> Moment | None:
            return max(graph.moments[rank], key=lambda m: m.nbytes(kept, pending) + beside(m), default=None)

        most = fullest(self.graph)
        if most is None:
            return 0.0, 0.0
        if self.fewer is not None and (before := fullest(self.fewer)) is not None:
            names = ("held", "pending", *["later"] * (len(most.later) == len(before.later)))
            more: dict[str, Any] = {}
            for name in names:
                both = zip(getattr(most, name), getattr(before, name), strict=True)
                more[name] = tuple(n + self.rounds * (n - m) for n, m in both)
            most = most._replace(**more)
        return most.nbytes(kept, pending), beside(most)


def _passing(figures: Sequence[Figures], message: float, late: bool, m: Moment) -> float:
    """Return the bytes that pass at a moment of a rank with these stages, beside what it keeps.

    Messages have so many bytes; `late` says whether gradients of weights come later.
    """
    own = figures[m.chunk]
    if late:
        more = m.stays if own["lone"] else m.followed
        name = LATE[m.op] if more else CALM.get(m.op, LATE[m.op])
    else:
        name = "transient" if m.followed else "unfollowed"
    passing = m.ahead * message + own[name]
    if not any(f["away"] for f in figures):  # nothing waits for a disk
        return passing
    away, left = ([f[name] for f in figures] for name in ("away", "away late"))
    here = (left if m.op is Op.BACKWARD_WEIGHT else away)[m.chunk]
    others = m.nbytes(away, left) - here
    later = sum(n * nbytes for n, nbytes in zip(m.later, away, strict=True)) if m.later else others
    queue = queued(here, max(f["array"] for f in figures), others, later, m.op is Op.FORWARD)
    return passing + queue


def _holders(stages: Iterable[int], schedule: Schedule) -> tuple[int, ...]:
    """Return the pipeline ranks that have one of these stages, or a copy of it."""
    return tuple(dict.fromkeys(schedule.holder(s, copy) for copy in range(schedule.copies) for s in stages))


def _ends(figures: Sequence[Figures], late: bool) -> list[tuple[float, float]]:
    """Return for each stage of a rank what it keeps and what passes where the rank's last pass is one of it.

    Sums of the gradients of the others are in flight when it begins.
    """
    held, ending, passing = ("pending", "late ending", "late weights") if late else ("kept", "ending", "transient")
    sums = [max((f["sums"] for f in figures if f is not own), default=0.0) for own in figures]
    return [(f[held], max(f[ending], f[passing] + n)) for f, n in zip(figures, sums, strict=True)]


def _tied_sums(held: Sequence[Sequence[Figures]]) -> list[float]:
    """Return by pipeline rank the bytes that pass where the gradients of a tied parameter are summed, by the figures of
    its stages: where holders update unlike parts of it, the whole one, one that comes, and what that is made of."""
    most = [0.0] * len(held)
    for tie in (key.removesuffix(" own") for key in held[0][0] if key.startswith("tie ") and key.endswith(" own")):
        holders = [r for r, own in enumerate(held) if any(f[tie] for f in own)]
        if len({max(f[f"{tie} own"] for f in held[r]) for r in holders}) > 1:
            for r in holders:
                most[r] = max(most[r], 3 * max(f[f"{tie} weights"] for f in held[r]))
    return most


def _simulated(
    schedule: Schedule, c: Candidate, costs: Costs, faster: SharedCores | None
) -> tuple[float, float, _InFlight, float]:
    """Return a step's seconds, the work of all ranks, the microbatches that each rank holds at once, and the pace.

    `schedule` may have fewer microbatches than the candidate: each further round of them takes as long.  Where ranks
    share cores, `faster` says how; the pace is the work as a share of that without.
    """
    name, ranks, count = schedule.name, schedule.ranks, schedule.microbatches

    def run(count: int) -> tuple[float, float]:
        graph = dependencies(name, ranks, count, c.chunks)
        if faster is None:
            return graph.bounds(costs)
        begins, ends = graph.together(costs, faster)
        busy = [0.0] * ranks
        for rank, begin, end in zip(graph.ranks, begins, ends, strict=True):
            busy[rank] += end - begin
        return max(ends), sum(busy)

    seconds, work = run(count)
    graph = dependencies(name, ranks, count, c.chunks)
    pace = 1.0 if faster is None else work / graph.bounds(costs)[1]
    flight = _InFlight(graph)
    if (more := c.microbatches - count) > 0:
        rounds, before = more / ranks, run(count - ranks)
        seconds, work = seconds + rounds * (seconds - before[0]), work + rounds * (work - before[1])
        flight = _InFlight(graph, dependencies(name, ranks, count - ranks, c.chunks), rounds)
    return seconds, work, flight, pace


def _total(figures: Sequence[Figures]) -> Figures:
    """Return the figures of layers one after the other.

    When a layer goes back, those behind it keep nothing any more, or what is pending.
    """
    made: Figures = {}
    for figure in figures:
        for name, value in figure.items():
            before, once = made.get(name, 0.0), name in ("array", "tiles", "apart") or name.startswith("tie ")
            made[name] = max(before, value) if once else before + value
    for name in RESTS if figures else ():
        made[name] -= _twice(figures, name)
    for name, held, passed in (
        ("transient", "kept", None), ("unfollowed", "kept", None), ("late forward", "kept", None),
        ("late inputs", "kept", "pending"), ("calm inputs", "kept", "pending"), ("late weights", "pending", None),
        ("calm weights", "pending", None), ("ending", "kept", None), ("late ending", "pending", None),
    ):  # fmt: skip
        made[name] = _beside(figures, name, held, passed)
    for name in ("message", "message words"):
        made[name] = figures[-1][name] if figures else 0.0
    return made


def _beside(figures: Sequence[Figures], transient: str, held: str, passed: str | None) -> float:
    """Return the bytes beside those held of all layers while one computes, at the most.

    Those behind it hold nothing, or what they have once they are passed.
    """
    most = behind = 0.0
    for figure in reversed(figures):
        most = max(most, behind + figure[transient])
        behind += (0.0 if passed is None else figure[passed]) - figure[held]
    return most


def _beside_gradients(layers: Sequence[Part]) -> list[int]:
    """Return the bytes of gradients in buckets that each layer of a stage has beside its own.

    Those of a tied parameter are complete in the first of its layers.
    """
    seen: set[int] = set()
    loads: list[list[Load]] = []
    for part in layers:
        loads.append([load for tie, load in part.loads if tie not in seen])
        seen |= {tie for tie, _ in part.loads if tie is not None}
    every = bytes_in_buckets(loads[::-1])[::-1]
    alone = [bytes_in_buckets([[load for _, load in part.loads]])[0] for part in layers]
    return [max(0, n - own) for n, own in zip(every, alone, strict=True)]


def _twice(figures: Sequence[Figures], name: str) -> float:
    """Return the bytes of what is tied that is in more than one of these figures, and on their rank once."""
    ties = [key for key in figures[0] if key.startswith("tie ") and key.endswith(f" {name}")]
    return sum(sum(f[key] for f in figures) - max(f[key] for f in figures) for key in ties)


def _line(figures: Sequence[Figures], few: tuple[int, int], count: int) -> Figures:
    """Return the figures for a number of equal layers, by those for two others, or for this one."""
    if len(figures) == 1:
        return figures[0]
    one, two = figures
    times = (count - few[0]) / (few[1] - few[0])
    names = dict.fromkeys((*one, *two))
    return {n: max(0.0, one.get(n, 0.0) + times * (two.get(n, 0.0) - one.get(n, 0.0))) for n in names}


def _causes(times: Iterable[tuple[float, Figures, str]]) -> dict[str, float]:
    """Return the seconds of causes, of figures a number of times."""
    made: dict[str, float] = {}
    for count, figures, name in times:
        for key, seconds in figures.items():
            if key.startswith(f"{name}: "):
                cause = key.partition(": ")[2]
                made[cause] = made.get(cause, 0.0) + count * seconds
    return made


def _moved_in_step(times: Iterable[tuple[float, Figures, str]]) -> Moved:
    """Return what a rank receives, of figures a number of times."""
    made = [0.0, 0.0, 0.0]
    for count, figures, name in times:
        for i, what in enumerate(Moved._fields):
            made[i] += count * figures[f"{what} in {name}"]
    return Moved(*map(round, made))


def _shares(spent: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the seconds of causes as shares of a step, the largest first."""
    found = sorted(spent.items(), key=lambda x: (-x[1], x[0]))
    return {cause: s / seconds for cause, s in found if s > 0}


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


def _summed(like: Trace, ranks: tuple[int, ...], nbytes: float, dtype: str) -> Trace:
    """Return the trace of an all-reduce between ranks, among those of a trace, of which each receives so many bytes."""
    start = Start(1, "all_reduce", ("pipeline",), ranks, round(nbytes), round(nbytes), dtype=dtype)
    return Trace(like.rank, like.size, [start, Wait(1)])


def _starts(*traces: Trace) -> list[Start]:
    """Return what starts in the spans of a trace, once: a span begins with what it waits for of those before."""
    return list({id(e): e for trace in traces for e in trace.events if isinstance(e, Start)}.values())


def _memory(weights: int, gradients: int, states: int, activations: int, buffers: int) -> dict[str, int]:
    return {
        "weights": weights, "gradients": gradients, "states": states, "activations": activations, "buffers": buffers,
    }  # fmt: skip
