"""The search for the fastest way to train a model on so many ranks of a machine.

Each candidate is judged in up to four steps (`Bounds`, `Predictor`):

1. A bound without a trace.  Products of a step are at least the model's linear ones, which the ranks share, at the
   machine's best rate.  Bytes at rest are at least the mean of what the ranks hold together.
2. A bound by parts: the model's distinct layers are traced on one copy of the model, without ZeRO.  A rank runs its
   layers one after the other for each microbatch, so that their times add up to less than the step (`Bounds.seconds`).
   With what the layers hold follows what must be offloaded at least, and how long its copies take (`Bounds.within`).
3. An estimate by parts, with reductions, updates and the pipeline's simulation.  Where an optimizer treats matrices of
   all layers together, its step is a part of all layers of a stage.
4. The trace of all layers of every distinct stage, timed by `timeline` or `pipeline_timeline` if it fits: this decides.

Candidates are looked at in the order of their bounds.  Where all are within reach the search ends when no bound is
below the time of the last of the best, so that its answer is that of tracing everything (`TrainingPlan.proven`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, SupportsIndex, TypeVar

from parlinalg.errors import ConfigError, LayoutError, ParlinalgError, PlanError, ValuesNeeded, counted, enumerated
from parlinalg.planning.bounds import Bounds
from parlinalg.planning.candidates import Candidate, MeshShape, Space, given_offload, implied, offload_sets
from parlinalg.planning.guesses import Guess, Guesses
from parlinalg.planning.machine import Machine, load_machine
from parlinalg.planning.predictor import Held, Planned, Predictor
from parlinalg.planning.traced_model import TracedModel, most_events
from parlinalg.planning.training_plan import AS_FAST, TrainingPlan, shown_ratio, why_slower
from parlinalg.train.config import MOST_RANKS, TrainingConfig, override, parse, read
from parlinalg.units import format_bytes, parse_bytes

__all__ = ["plan_training"]

ALL, MANY = 64, 400  # ranks and candidates up to which every one is within reach
TRACES = 320  # of parts, for more than that
EVENTS = 800_000  # that they have at most, beyond which no further one is begun: those of long rings are many
EVENTS_FULL = 400_000  # likewise of traces in full
PROOF = 1_500_000  # events that a proof is foreseen to trace, beyond which it is beyond reach too
PROVE = 1_000_000  # events after which it ends, if it takes more than was foreseen: about a minute
BEAM = 4  # of the fastest meshes that are varied in a round
CLOSE = 1.25  # the fastest mesh of a kind is varied too if it is at most so many times slower than the fastest
NEAR = 8  # neighbours of the fastest that are estimated in a round
FULL = 6  # candidates that are traced there in full
ROUNDS = 6  # of those near the fastest
SLOW = 1.5  # a kind gets no further turn where it was so many times slower than the fastest in its turns before
SEEN, UNSEEN = 40, 20  # kinds of which a plan says why they lost: of those looked at, and of the others
MOST_LEAST = 40  # candidates that are traced to say the least memory that would do
T = TypeVar("T")
Predict = Callable[[Candidate], Planned]
Hold = Callable[[Candidate], Held]


def plan_training(
    config: TrainingConfig | Mapping[str, Any] | str | Path, *, ranks: int,
    machine: Machine | str | PathLike[str] | None = None, memory: int | str | None = None,
    global_batch: int | None = None, best: int = 10, settings: Sequence[str] = (), exhaustive: bool = False,
    fused_attention: bool | str = False,
) -> TrainingPlan:  # fmt: skip
    """Return the fastest ways to train a model on so many ranks of a machine.  Pure: nothing is computed or sent.

    The search covers all sizes and shapes of data, pipeline, sequence and tensor parallelism, pipeline schedules,
    microbatches, ZeRO's stages, recomputation, the axis of experts, the dtype of products, and offloading, where the
    configuration does not set them: what it sets stays as it is.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig
        A configuration as a dict, the path of its file, or a parsed one.  Of a parsed one the keys `parallel`, `zero`,
        `schedule` and `precision` are searched if they have their defaults, and all others are kept.
    ranks : int
    machine : Machine, str or path, optional
        The name of a shipped machine, or a file; by default the configuration's `machine`.
    memory : int or str, optional
        Bytes that a rank may use, such as "80GiB"; by default the machine's.
    global_batch : int, optional
        Samples of a step, by default the configuration's `batch_size`.  Where there are fewer samples to train on, a
        step takes all of them, as in training, and its data parallel ranks and microbatches may differ by a sample: a
        plan then counts the largest.
    best : int
        How many plans to return at most.
    settings : sequence of str
        Values of the configuration to replace, as by `--set` on the command line, such as "batch_size=64".
    exhaustive : bool
        True to trace every candidate in full, which takes far longer; for tests of the search.
    fused_attention : bool or "library"
        Which attention of 16-bit floats counts as one fused kernel, by the rates in the machine's file: with True all
        of it, as in other systems; with "library" what this library gives to cuDNN where its package is installed (no
        dropout, masks given as tables, documents or zigzag rings); with False what the machine's file says.  Other
        attention writes blocks of scores to memory.

    Returns
    -------
    TrainingPlan
        `best` has the plans, the fastest first; `configuration` and `write(path)` give the best one to
        `parlinalg train`; `str(plan)` is a report, which also says why other candidates lost.

    Raises
    ------
    ConfigError
        If the configuration or the machine is wrong, or `ranks`, `best`, `memory` or `global_batch` is no such number.
    PlanError
        If no candidate can split the batch, or none fits the memory; the message says the least that would do.
    """
    began = perf_counter()
    ranks, best = _whole("ranks", ranks, MOST_RANKS), _whole("best", best)
    global_batch = None if global_batch is None else _whole("global_batch", global_batch, 1 << 53)
    given = _values(config, settings)
    checked = parse(given)
    found = load_machine(_named(checked) if machine is None else machine)
    found = found if fused_attention is False else found.with_fused_attention(fused_attention)
    limit = _room(found, ranks) if memory is None else _bytes(memory)
    batch = checked.batch_size if global_batch is None else global_batch
    _check_places(checked, found)
    if checked.parallel.pipeline.tensor is not None:
        raise ConfigError(
            "parallel.pipeline.tensor gives each rank of the pipeline a grid of its own, and a plan has one grid for "
            "all: give it as parallel.tensor, or leave it out; parlinalg train takes it as it is"
        )
    model = TracedModel(checked, ranks, found, batch)
    space = Space(
        checked,
        given,
        ranks,
        model.batch,
        model.depth,
        _dtypes(checked, given, found),
        uneven=model.all_samples,
        node=model.node,
    )
    search = _Search(model, space, limit, best, exhaustive)
    if not search.candidates:
        raise PlanError(_no_split(checked, given, ranks, batch, model.depth))
    planned = search.run()
    model.warn(planned[0].candidate)
    return TrainingPlan(
        found, ranks, limit, model.batch, batch, tuple(planned), tuple(search.lost(planned)), search.candidates,
        search.traced, search.proven, perf_counter() - began, given, model.inputs.language,
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
    return machine.memory * machine.ranks_per_node // max(machine.ranks_per_node, machine.ranks_on_node(ranks))


def _check_places(config: TrainingConfig, machine: Machine) -> None:
    """Raise a ConfigError if a machine has no place for what a configuration lets rest elsewhere."""
    for kind, place in given_offload(config):
        if getattr(machine, place) is None:
            raise ConfigError(
                f"offload.{kind}={place!r}, but the machine {machine.name} has no table [{place}], which says how fast "
                "and how large that is: add one to its file, or leave this key out"
            )


def _whole(name: str, value: object, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        raise ConfigError(f"{name}={value!r}: a plan takes a whole number of at least 1")
    if most is not None and value.__index__() > most:
        raise ConfigError(f"{name}={value!r}: a plan takes at most {most:,}")
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
    faster = [d for d in ("bfloat16",) if d in machine.gemm and machine.best_rate(d) > machine.best_rate("float32")]
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
        return (
            f"parallel has {what}, which {counted(ranks, 'rank')} cannot be cut into: the product of sizes should "
            "divide them"
        )
    if own.pipeline.ranks > depth:
        return (
            f"parallel.pipeline={own.pipeline.ranks}, but the model has {counted(depth, 'layer')}: a stage takes at "
            "least one"
        )
    every = {(mesh.data, mesh.pipeline) for mesh in Space(config, given, ranks, 0, depth, [""]).meshes()}
    if not every:
        return (
            f"{counted(ranks, 'rank')} cannot be used{fixed}: the model has {counted(depth, 'layer')}, so that a "
            f"pipeline has at most {counted(depth, 'rank')}; leave another key of parallel out, or give fewer ranks"
        )
    held = bool({"schedule", "gradient_accumulation"} & {*given})
    counts = {pipeline: config.microbatches(pipeline) if held else 1 for _, pipeline in every}
    most = max(counts.values())
    cut = f" into {most} microbatches" if most > 1 else ""
    near: set[int] = set()
    for data, pipeline in every:
        unit = data * counts[pipeline]
        least = unit if held else data * pipeline
        near |= {n for n in (batch // unit * unit, -(-batch // unit) * unit, least) if n >= least}
    below, above = max((n for n in near if n < batch), default=None), min(n for n in near if n > batch)
    right = f"{above}" if below is None else f"{below} or {above}"
    rounds = "" if held or max(p for _, p in every) == 1 else ", and a pipeline takes one a rank at least"
    return (
        f"a batch of {counted(batch, 'sample')} cannot be split evenly over {counted(ranks, 'rank')}{fixed}{cut}: the "
        f"data parallel ranks times the microbatches divide the batch{rounds}; give a global batch such as {right}, or "
        "leave keys of parallel and schedule out"
    )


def endless(model: TracedModel, space: Space, best: int) -> bool:
    """Return True if a proof would trace too much: each candidate's layers, and about two times the best in full.

    A layer takes the most where the most ranks share a copy of it; one candidate of a kind stands for the others.
    """
    meshes = list(space.meshes())
    width = max((mesh.width for mesh in meshes), default=1)
    kinds: dict[str, MeshShape] = {}
    for mesh in meshes:
        if mesh.width == width and space.count(mesh):
            kinds.setdefault(_kind(mesh), mesh)
    most = 0
    for mesh in kinds.values():
        with suppress(ParlinalgError):  # told when the candidate comes up
            most = max(most, most_events(model.layers_of_one_copy(next(space.steps(mesh)))))
    return most * (len(space) + 4 * best * model.depth) > PROOF


def reason(error: ParlinalgError) -> str:
    """Return why the library refuses a candidate, without what the message says of the way out.

    >>> reason(ConfigError("model: GPT cannot be cut: 3 heads")), reason(ConfigError("3 tokens: give 4 (at x.py:3)"))
    ('model: GPT cannot be cut', '3 tokens')
    """
    first, *more = re.split(r": | \(at ", str(error))
    return first if " " in first or not more else f"{first}: {more[0]}"  # "model: GPT cannot ..."


class _Search:
    """Candidates, and how far each was judged."""

    def __init__(self, model: TracedModel, space: Space, memory: int, best: int, exhaustive: bool) -> None:
        self.model, self.space, self.memory, self.best, self.exhaustive = model, space, memory, best, exhaustive
        self.bounds, self.predictor = Bounds(model), Predictor(model)
        self.candidates = len(space)
        self.done: list[Planned] = []
        self.estimated: dict[Candidate, Planned] = {}
        self.too_full: list[tuple[int, Candidate, int]] = []
        self.refused: Counter[str] = Counter()
        self.refused_of: dict[str, Candidate] = {}
        self.left: list[tuple[float, Candidate]] = []
        self.others: list[tuple[float, MeshShape, int]] = []  # meshes of which no candidate was looked at
        self.offloading: dict[Candidate, Planned] = {}  # estimates with what is offloaded
        self.least: list[tuple[int, str, Candidate]] = []  # what was traced and does not fit although it offloads
        self.no_room: list[tuple[int, str, Held]] = []  # what would fit, but has no room for what it offloads
        self.crammed: list[tuple[int, MeshShape, int]] = []  # meshes whose weights alone do not fit
        self.in_full: set[Candidate] = set()  # those traced so, whatever became of them
        self.proven = True
        self.unknown = False  # whether some cannot be imagined
        self.limited = not exhaustive and (model.ranks > ALL or self.candidates > MANY or endless(model, space, best))

    def run(self) -> list[Planned]:
        """Return the best, the fastest first."""
        if self.limited:
            self._reach()
        else:
            fitting = []
            for n, c in enumerate(self.space):
                if (need := self.bounds.static_memory(c)) > self.memory:
                    self.too_full.append((need, c, -1))
                else:
                    fitting.append((self.bounds.static_seconds(c), n, c))
            if self.exhaustive:
                for _, _, c in fitting:
                    self._full(c)
            else:
                self._prove(fitting)
        if not self.done and (why := self._nothing_fits()):
            raise PlanError(why)
        self.proven = self.proven and not self.unknown
        return sorted(self.done, key=_order)[: self.best]

    def _tired(self, share: float = 1.0) -> bool:
        """Return True if estimates have taken this share of the traces that they may take."""
        return self.model.traces >= share * TRACES or self.model.events >= share * EVENTS

    def _prove(self, fitting: Sequence[tuple[float, int, Candidate]]) -> None:
        """Trace candidates in the order of their bounds, until none that is left can be among the best, or too much."""
        heap = [(bound, 0, n, c) for bound, n, c in fitting]
        heapq.heapify(heap)
        while heap:
            bound, traced, n, c = heapq.heappop(heap)
            times = sorted(p.seconds for p in self.done)
            proven = len(times) >= self.best and bound > times[self.best - 1]
            if not self.done and self.model.events > PROOF // 3:  # hardly anything fits, or nothing
                self.limited, self.model.traces, self.model.events = True, 0, 0
                self._reach()
                return
            if proven or self.model.events > PROVE:  # more had to be traced than was foreseen
                self.proven = proven
                self.left = [(bound, c), *((b, other) for b, _, _, other in heap)]
                return
            if traced:  # in parts, for its bound
                before = self.model.traces
                if self._full(c) is None and self.model.traces == before:  # others' traces say that it does not fit
                    self.in_full.discard(c)
            elif (found := self._asked(c, lambda c: self.bounds.within(c, self.memory))) is not None:
                seconds, need = found
                if need > self.memory:
                    self.too_full.append((need, c, -1))
                else:
                    heapq.heappush(heap, (seconds, 1, n, c))

    def _reach(self) -> None:
        """Estimate the likeliest candidates and those near the fastest of them, and trace the first in full.

        Forms of tensor and sequence parallelism, each with and without a pipeline, take turns, so that each comes up.
        """
        guess = Guesses(self.model, self.space)
        guessed: dict[MeshShape, Guess] = {}
        numbers: dict[MeshShape, int] = {}
        recompute = self.space.recompute
        for mesh in self.space.meshes():
            number = self.space.count(mesh)
            if not number:
                continue
            sample = next(self.space.steps(mesh))
            stages = self.space.stages(mesh)
            if (need := min(self.bounds.static_memory(replace(sample, zero=z)) for z in stages)) > self.memory:
                self.crammed.append((need, mesh, number))
            else:
                guessed[mesh] = guess(mesh, self.space.counts(mesh), recompute, self.memory)
                numbers[mesh] = number
        turns: Counter[str] = Counter()
        order = []
        for i, mesh in enumerate(_by_guess(guessed, guessed)):
            order.append((turns[_kind(mesh)], i, mesh))
            turns[_kind(mesh)] += 1
        fastest: dict[str, float] = {}
        for _, _, mesh in sorted(order, key=lambda x: x[:2]):
            if self._tired(0.5 if self._fitting() else 1.0):
                break
            kind, least = _kind(mesh), min(fastest.values(), default=math.inf)
            if fastest.get(kind, 0.0) <= SLOW * least:
                self._begin(mesh, guessed[mesh])
                own = min((p.seconds for p in self._fitting() if _kind(p.candidate.mesh) == kind), default=math.inf)
                fastest[kind] = own
        self._climb(guessed)
        if self.model.ranks <= ALL:  # beyond, traces and simulations take too long
            self._mend()
        before = self.model.events
        for p in self._fitting()[: 4 * FULL]:
            if self.done and self.model.events - before > EVENTS_FULL:
                break
            if len(self.done) < max(FULL, min(self.best, 2 * FULL)):
                self._full(p.candidate)
        seen = {c.mesh for c in self.estimated}
        self.others = [(guessed[m].seconds, m, numbers[m]) for m in guessed if m not in seen]
        self.proven = False

    def _fitting(self) -> list[Planned]:
        """Return what was estimated and fits, the fastest first."""
        return sorted((p for p in self.estimated.values() if self._fits(p)), key=_order)

    def _begin(self, mesh: MeshShape, guess: Guess) -> None:
        """Estimate a mesh: as guessed, then with what saves memory until it fits."""
        steps = list(self.space.steps(mesh))
        counts = self.space.counts(mesh)
        most = max(self.space.stages(mesh))
        again = self.space.recompute[-1]
        one = min(1, most)
        first = steps[0].experts, steps[0].expert_ranks
        tries = (
            (guess.zero, guess.microbatches, guess.recompute, guess.experts), (one, counts[-1], again, first),
            (most, counts[-1], again, first),
        )  # fmt: skip
        for zero, count, recompute, experts in dict.fromkeys(tries):
            if self.model.events >= EVENTS:
                return
            likely = [
                c for c in steps
                if c.microbatches == count and (c.zero == zero or len({x.zero for x in steps}) == 1)
                and c.recompute == recompute and (c.experts, c.expert_ranks, c.within) == (*experts, None)
                and (c.schedule, c.chunks) == (steps[0].schedule, steps[0].chunks)
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
            if self.bounds.static_seconds(c) > self._enough():
                return None
            found = self._asked(c, self.predictor.estimate)
            if found is None:
                return None
            self.estimated[c] = found
            other = None if self._fits(found) else self._offloaded(c, *[self.predictor.estimate] * 2)
            if other is not None:
                self.estimated[other.candidate] = other
            self.offloading[c] = other or found
        return self.offloading[c]

    def _fits(self, p: Held) -> bool:
        host, disk = self.model.machine.host, self.model.machine.disk
        beside = (not p.host or (host is not None and p.host <= host.memory)) and (
            not p.disk or (disk is not None and p.disk <= disk.size)
        )
        return p.bytes <= self.memory and beside

    def _offloaded(self, c: Candidate, hold: Hold, predict: Predict) -> Planned | None:
        """Return the fastest way in which a candidate fits with something in host memory or on a disk.

        Copies only add to its time, and those to a disk more than those to host memory.  So sets of kinds that contain
        one with which it fits are not tried, nor farther places where nearer ones have room.  Only what fits is timed.
        None if nothing fits; the least memory that it takes is noted.
        """
        homes = self.model.homes
        found: list[tuple[Candidate, Held]] = []
        enough: list[set[str]] = []
        for chosen in offload_sets(self.model.kinds(c)):
            if any(less <= implied(chosen) for less in enough):
                continue
            near: list[tuple[int, ...]] = []
            for places in sorted(itertools.product(range(len(homes)), repeat=len(chosen)), key=sum):
                if any(all(p <= q for p, q in zip(less, places, strict=True)) for less in near):
                    continue
                away = tuple((kind, homes[p]) for kind, p in zip(chosen, places, strict=True))
                other = replace(c, offload=away)
                made = self._asked(other, hold)
                if made is None:
                    break
                if made.bytes > self.memory:  # wherever they are
                    if made.traced:
                        self.least.append((made.bytes, str(other), other))
                    break
                if self._fits(made):
                    found.append((other, made))
                    near.append(places)
                else:
                    self.no_room.append((made.host + made.disk, str(other), made))
            if near:
                enough.append(implied(chosen))
        planned = (made if isinstance(made, Planned) else self._asked(other, predict) for other, made in found)
        return min((p for p in planned if p is not None), key=_order, default=None)

    def _climb(self, guessed: Mapping[MeshShape, Guess]) -> None:
        """Estimate those that differ in one choice from the fastest of a few meshes, until these are all known."""
        varied: set[Candidate] = set()
        for _ in range(ROUNDS):
            first: dict[MeshShape, Planned] = {}
            kinds: set[str] = set()
            for p in (fitting := self._fitting()):
                kind = _kind(p.candidate.mesh)
                if len(first) < BEAM or (kind not in kinds and p.seconds <= CLOSE * fitting[0].seconds):
                    first.setdefault(p.candidate.mesh, p)
                kinds.add(kind)
            own = self.space.offload
            new = [p.candidate for p in first.values() if replace(p.candidate, offload=own) not in varied]
            if not new or self._tired():
                return
            for i, chosen in enumerate(new):
                varied.add(replace(chosen, offload=own))
                self._vary(chosen, orders=i == 0)
            for chosen in new:
                known = {e.mesh for e in self.estimated}
                likely = self._corrected(
                    {m: g for m, g in guessed.items() if m not in known and _near(m, chosen.mesh)}, guessed
                )
                for mesh in _by_guess(likely, likely)[:NEAR]:
                    if not self._tired():
                        self._begin(mesh, guessed[mesh])

    def _vary(self, chosen: Candidate, orders: bool) -> None:
        """Estimate those of a candidate's mesh that differ from it in one choice, of tokens' order only if `orders`."""
        best = replace(chosen, offload=self.space.offload)
        steps = list(self.space.steps(best.mesh))
        again = self.space.recompute
        for c in steps:
            near = _one_apart(c, best, self.space.counts(c.mesh)) and (orders or c.order == best.order)
            more = again.index(c.recompute) > again.index(best.recompute)  # slower, and not needed to fit
            if not near or (more and chosen == best) or self._tired():
                continue
            found = self._estimate(c)
            if found is not None and (c.schedule, c.chunks) == (best.schedule, best.chunks):
                self._reschedule(c, found, steps)

    def _corrected(self, some: Mapping[MeshShape, Guess], guessed: Mapping[MeshShape, Guess]) -> dict[MeshShape, Guess]:
        """Return guesses as many times longer as the best estimate of their kind is than its guess; of a kind without
        one, as the least of all kinds."""
        times: dict[str, float] = {}
        for p in self._fitting():
            mesh = p.candidate.mesh
            more = p.seconds / guessed[mesh].seconds
            times[_kind(mesh)] = min(more, times.get(_kind(mesh), more))
        least = min(times.values(), default=1.0)
        return {m: g._replace(seconds=g.seconds * times.get(_kind(m), least)) for m, g in some.items()}

    def _mend(self) -> None:
        """Estimate, in each of the fastest meshes with a pipeline, what differs from its fastest in one choice, until
        nothing is faster.

        A mesh is begun with one schedule and number of microbatches; others may make it the fastest of all.
        """
        firsts: dict[MeshShape, Planned] = {}
        for p in self._fitting():
            if p.candidate.pipeline > 1:
                firsts.setdefault(p.candidate.mesh, p)
        most = self.model.traces + TRACES
        for mesh, first in itertools.islice(firsts.items(), FULL):
            best: Planned | None = None
            while first is not best and self._more(most):
                best = first
                for c in self.space.steps(mesh):
                    if _one_apart(c, best.candidate, self.space.counts(mesh)) and self._more(most):
                        self._estimate(c)
                first = next(p for p in self._fitting() if p.candidate.mesh == mesh)

    def _more(self, most: int) -> bool:
        return self.model.traces < most and self.model.events < EVENTS

    def _asked(self, c: Candidate, predict: Callable[[Candidate], T]) -> T | None:
        """Return what is predicted of a candidate; None if the library refuses the candidate, or cannot imagine it."""
        try:
            return predict(c)
        except ValuesNeeded as error:
            self.unknown = True
            self._refuse(c, error)
            return None
        except (ConfigError, LayoutError, PlanError) as error:
            self._refuse(c, error)
            return None

    def _refuse(self, c: Candidate, error: ParlinalgError) -> None:
        why = reason(error)
        self.refused[why] += 1
        self.refused_of.setdefault(why, c)

    @property
    def traced(self) -> int:
        """The number of candidates that were traced in full."""
        return len(self.in_full)

    def _full(self, c: Candidate) -> Planned | None:
        """Trace a candidate in full, unless it was; return what it takes if it fits."""
        if c in self.in_full:
            return None
        self.in_full.add(c)
        hold: Hold = self.predictor.held
        predict: Predict = self.predictor.full
        if self.limited and self.predictor.is_long(c):
            hold = predict = self.predictor.stretched
        held = self._asked(c, hold)
        if held is None:
            return None
        found = None
        if self._fits(held):
            found = self._asked(c, predict)
        elif c.offload == self.space.offload:
            found = self._offloaded(c, hold, predict)
        else:  # by its estimate it fitted: it may have to offload more
            self._full(replace(c, offload=self.space.offload))
        if found is not None:
            if all(found.candidate != p.candidate for p in self.done):
                self.done.append(found)
        elif not self._fits(held):
            self.too_full.append((held.bytes, c, held.stage))
        return found

    def _nothing_fits(self) -> str:
        """Return why nothing fits, and the least memory that would do.  Empty if what is traced for that does fit."""
        before, ranks = self.model.events, counted(self.model.ranks, "rank")
        for p in sorted(self.estimated.values(), key=lambda p: (p.bytes, str(p.candidate)))[:FULL]:
            if self.model.events - before < EVENTS_FULL:
                self._full(p.candidate)
        if self.done:
            return ""
        if not self.too_full and self.crammed:
            need, mesh, _ = min(self.crammed, key=lambda x: x[0])
            return (
                f"no configuration on {ranks} fits {format_bytes(self.memory)} a rank: the "
                f"weights, gradients and states alone need {format_bytes(need, up=True)}, in a candidate of the kind "
                f"{_kind(mesh)}; give more memory or more ranks"
            )
        if not self.too_full:
            why, count = self.refused.most_common(1)[0]
            return f"no candidate can train this model on {ranks}; {count} of them: {why}"
        part, before, tried = self.limited, self.model.events, 0
        for bound, c, stage in sorted(self.too_full, key=lambda x: (x[0], str(x[1]))):
            if stage >= 0:
                continue
            if bound > min(self._needed(), default=(math.inf,))[0]:  # and all that follow
                break
            if tried == MOST_LEAST or (not self.limited and self.model.events - before > EVENTS):
                part = True
                break
            tried += 1
            self._full(c)
            if self.done:
                return ""
        least = self._needed()
        if not least:
            why, count = self.refused.most_common(1)[0]
            return f"no candidate can train this model on {ranks}; {count} of them: {why}"
        need, _, c = min(least)
        room, least_of = format_bytes(self.memory), format_bytes(need, up=True)
        if not part:
            text = f"no configuration on {ranks} fits {room} a rank: the least that would do is {least_of}, by {c}"
        elif self.traced == 1:
            text = f"the only configuration traced on {ranks} does not fit {room} a rank: it needs {least_of}, by {c}"
        else:
            text = (
                f"none of the {self.traced} configurations traced on {ranks} fits {room} a rank: the least that they "
                f"need is {least_of}, by {c}"
            )
        return f"{text}; give that much memory, more ranks or a smaller batch{self._no_room()}"

    def _needed(self) -> list[tuple[int, str, Candidate]]:
        """Return the bytes that what does not fit takes, by traces in full."""
        return [*((need, str(c), c) for need, c, stage in self.too_full if stage >= 0), *self.least]

    def _no_room(self) -> str:
        """Return what would fit if host memory and disks had more room, as a clause; empty if nothing would."""
        machine = self.model.machine
        rooms = (
            ("host memory", "host", 0 if machine.host is None else machine.host.memory),
            ("the disk", "disk", 0 if machine.disk is None else machine.disk.size),
        )
        for _, name, p in sorted(self.no_room, key=lambda x: x[:2])[:1]:
            short = [
                f"{format_bytes(getattr(p, kind), up=True)} of {where}, which has {format_bytes(room)} a rank"
                for where, kind, room in rooms if getattr(p, kind) > room
            ]  # fmt: skip
            return f"; {name} would fit with {enumerated(short)}"
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
            found.append(
                (name, len(of_), f"{where} {format_bytes(need, up=True)}, and has {format_bytes(self.memory)} ({c})")
            )
        slow: dict[str, list[tuple[float, str]]] = {}
        for bound, c in self.left:
            slow.setdefault(_group(c), []).append((bound, str(c)))
        for name, bounds in slow.items():
            bound, text = min(bounds)
            times = max(1.0, bound / best[0].seconds)
            found.append(
                (name, len(bounds), f"its passes and what must be copied take {shown_ratio(times)} the time ({text})")
            )
        found += [(_group(self.refused_of[why]), n, f"refused: {why}") for why, n in self.refused.items()]
        seen, unseen = (sorted(x, key=lambda x: (-x[1], x[0])) for x in (found, self._unseen(best[0])))
        kept, few = [*seen[:SEEN], *unseen[:UNSEEN]], [*seen[SEEN:], *unseen[UNSEEN:]]
        if few:
            kept.append(
                (counted(len(few), "more kind"), sum(count for _, count, _ in few), "lost for reasons like these")
            )
        left = self.candidates - len(best) - sum(count for _, count, _ in kept)
        if left > 0:
            why = "not traced: others that differ from them in a choice or two, and use the ranks alike, were estimated"
            kept.append(("more choices of these kinds", left, why))
        return kept

    def _unseen(self, best: Planned) -> list[tuple[str, int, str]]:
        """Return groups of meshes of which no candidate was traced, with why."""
        found = []
        full: dict[str, list[tuple[int, int]]] = {}
        for need, mesh, number in self.crammed:
            full.setdefault(_kind(mesh), []).append((need, number))
        for name, needs in full.items():
            least = format_bytes(min(need for need, _ in needs))
            why = f"weights, gradients and states need at least {least}, and a rank has {format_bytes(self.memory)}"
            found.append((name, sum(n for _, n in needs), why))
        mine = next((g for g, m, _ in self.others if m == best.candidate.mesh), best.seconds)
        rest: dict[str, list[tuple[float, int]]] = {}
        for seconds, mesh, number in self.others:
            rest.setdefault(_kind(mesh), []).append((seconds, number))
        for name, guesses in rest.items():
            times = min(seconds for seconds, _ in guesses) / mine
            tried = [p for p in self.estimated.values() if _kind(p.candidate.mesh) == name]
            why = f"not traced: products and words alone are guessed at {shown_ratio(times)} the time"
            if tried and not any(map(self._fits, tried)):
                p = min(tried, key=lambda p: (p.bytes, str(p.candidate)))
                least, room = format_bytes(p.bytes, up=True), format_bytes(self.memory)
                why = f"not traced: the smallest that was estimated needs {least}, and has {room} ({p.candidate})"
            elif tried:
                p = min(filter(self._fits, tried), key=_order)
                text = why_slower(p, best)
                verb = "is" if p.seconds < AS_FAST * best.seconds else "takes"
                why = f"not traced: the likeliest of them {verb} {text} ({p.candidate})"
            elif times < 1.05:
                why = "not traced: guessed to be slower than those that were"
            found.append((name, sum(n for _, n in guesses), why))
        return found


def _one_apart(a: Candidate, b: Candidate, counts: Sequence[int]) -> bool:
    """Return True if candidates of one mesh differ in one choice; numbers of microbatches by at most two steps."""

    def choices(c: Candidate) -> tuple[Any, ...]:
        experts = c.experts, c.expert_ranks
        zero = c.zero, c.within
        return zero, c.microbatches, (c.schedule, c.chunks), c.recompute, c.dtype, experts, c.order

    if abs(counts.index(a.microbatches) - counts.index(b.microbatches)) > 2:
        return False
    return sum(x != y for x, y in zip(choices(a), choices(b), strict=True)) == 1


def _by_guess(meshes: Iterable[MeshShape], guessed: Mapping[MeshShape, Guess]) -> list[MeshShape]:
    """Return meshes in the order of their guesses, the fastest first."""
    return sorted(meshes, key=lambda m: (guessed[m].seconds, m[:4], str(m.tensor)))


def _near(a: MeshShape, b: MeshShape) -> bool:
    """Return True if meshes differ in the form of tensor parallelism, or in two sizes by a small factor."""
    mine, theirs = (
        (m.data, m.pipeline, m.sequence // m.ulysses, m.ulysses, m.tensor.ranks or 1) for m in (a, b)
    )  # fmt: skip
    if mine == theirs:
        return a != b
    apart = [max(x, y) / min(x, y) for x, y in zip(mine, theirs, strict=True) if x != y]
    return len(apart) == 2 and max(apart) <= 4


def _kind(mesh: MeshShape) -> str:
    """Return the kinds of parallelism of a mesh, without their sizes."""
    texts = ["pipeline"] * (mesh.pipeline > 1)
    if (mesh.tensor.ranks or 1) > 1:
        texts.append(str(mesh.tensor.mode).upper())
    texts += ["Ulysses"] * (mesh.ulysses > 1) + ["ring"] * (mesh.sequence > mesh.ulysses)
    return " × ".join(texts) or "data only"


def _order(p: Planned) -> tuple[float, int, str]:
    return p.seconds, p.bytes, str(p.candidate)


def _group(c: Candidate) -> str:
    return " × ".join(
        [*["pipeline"] * (c.pipeline > 1), c.form()] if c.form() else ["pipeline" if c.pipeline > 1 else "data only"]
    )
