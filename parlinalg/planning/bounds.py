"""Bounds of the time and memory of a candidate: what no step of it can be below."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from parlinalg.pipeline.schedule import Op, Schedule
from parlinalg.pipeline.simulate import Costs, Moment
from parlinalg.planning.candidates import Candidate, mode_of, offload_sets
from parlinalg.planning.parts import SMALL, SPANS, Part, Rest, offload_moves
from parlinalg.planning.traced_model import HOME, Cut, TracedModel, dependencies

WHOLE = 4096  # microbatches × ranks of a pipeline up to which a bound simulates all of them


class Floor(NamedTuple):
    """Lower bounds of the bytes and seconds that a stage takes on a rank, if nothing is offloaded.

    Attributes
    ----------
    rest : Rest
    kept, ends : int
        Bytes of a microbatch's activations, and those of the model's first and last layer, which are not offloaded by a
        rank that has others.
    transient : int
        Bytes beside what rests and is kept, at the peak of a forward or backward pass of a layer.
    small : int
        More bytes than there are of values too small to be offloaded.
    forward, backward : float
        Seconds of a pass.
    pending, made : int
        All of `Part.pending`, and what of it the backward pass makes new.
    ties : tuple of Rest
        Bytes at rest of each parameter that several layers of the model hold: a rank with two of these has it once.
    """

    rest: Rest
    kept: int
    ends: int
    transient: int
    small: int
    forward: float
    backward: float
    pending: int
    made: int
    ties: tuple[Rest, ...]


class Copies(NamedTuple):
    """Seconds of what is offloaded as it comes and goes in a stage's forward pass, backward pass and update."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0


class Bounds:
    """Lower bounds of candidates: without a trace, and by traces of the layers of one copy of the model."""

    def __init__(self, model: TracedModel) -> None:
        self.model = model
        self._schedules: dict[tuple[int, str | None, int | None, int], tuple[Schedule | None, list[Cut]]] = {}

    # -------------------------------------------------------------------------------------------- without a trace
    def static_seconds(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, without a trace.

        All ranks together make at least the products of the model with its weights, forward and twice backward: those
        of attention's pairs are left out, as masked ones may be skipped.  One rank makes at least the mean, each
        product no faster than the fastest of the machine.
        """
        model = self.model
        dtype = c.dtype or model.config.dtype
        return model.linear_flops(c.dtype) / model.ranks / model.machine.best_rate(dtype)

    def static_memory(self, c: Candidate) -> int:
        """Return bytes that the fullest rank of a candidate cannot be below, without a trace.

        Unless it is offloaded, each weight, gradient and state is on at least one of the pipeline × tensor ranks of a
        copy of the model.  ZeRO's stages share states, gradients and weights between the ranks that hold the same
        ones, and matrix-wise optimizers may share theirs between any; of experts see `_experts`.  The fullest rank
        holds at least the mean.
        """
        whole = Rest(*(n // c.pipeline for n in self.model.alone(c.dtype)))
        rest = self._at_rest(c, whole, self.model.experts(c.dtype))
        return sum(self._left(c, rest, (*self.model.kinds(c), *dict(c.offload))))

    def _sharing(self, c: Candidate) -> Rest:
        """Return how many ranks share what a stage has at rest, but for experts, at the most."""
        ranks, every = c.tensor.ranks or 1, self.model.ranks // c.pipeline

        def share(stage: int) -> int:
            return min(every, ranks * self.model.sharing_zero(c)) if c.zero >= stage else ranks

        return Rest(share(3), share(2), every if self.model.config.optimizer.name in HOME else share(1))

    def _experts(self, c: Candidate) -> tuple[Fraction, ...]:
        """Return which share of the weights, gradients and states of a stage's experts the fullest rank has, at the
        least.

        The axis that cuts experts leaves some rank along it the most of them, and these are cut over the other axes of
        tensor parallelism at the most.  ZeRO's stages share them between the ranks that have the same.
        That rank is the first along the axis, where uneven pieces of all else are the largest too.
        """
        options = self.model.config.model.options
        count, every = int(options.get("num_local_experts", 1)), self.model.ranks // c.pipeline
        least, ranks, cut, copies = Fraction(1, every), c.tensor.ranks or 1, 1, self.model.sharing_zero(c)
        if c.experts == "data" or (c.experts is None and options.get("expert_axis", "data") == "data"):
            cut = self.model.sharing_experts(c)
            copies = 1 if c.within else max(1, copies // cut)
        elif c.experts is None:  # several axes, say
            return least, least, least
        elif c.experts == "s":
            cut = c.sequence // c.ulysses
            copies = copies if c.within or self.model.config.zero.within else max(1, copies // cut)
        elif c.experts != "none":
            cut = mode_of(c.tensor)[1][c.experts]
            ranks //= cut
        here = Fraction(-(-count // cut), count * ranks)
        weights, gradients, states = (here / copies if c.zero >= stage else here for stage in (3, 2, 1))
        return weights, gradients, least if self.model.config.optimizer.name in HOME else states

    def _at_rest(self, c: Candidate, rest: Rest, experts: Fraction) -> Rest:
        """Return what the fullest rank has at rest of a stage, at the least, if experts are such a share of it."""
        if not experts:
            return Rest(*(n // ranks for n, ranks in zip(rest, self._sharing(c), strict=True)))
        both = zip(rest, self._sharing(c), self._experts(c), strict=True)
        return Rest(*(int((1 - experts) * n / ranks + experts * n * share) for n, ranks, share in both))

    def _left(self, c: Candidate, rest: Rest, kinds: Collection[str]) -> Rest:
        """Return what is left at rest where kinds are offloaded, at the least."""
        settles = self.model.settles(c) or self.model.sharing_zero(c) == 1
        gone = settles and not {"parameters", "gradients"}.isdisjoint(kinds)
        return Rest(
            0 if "parameters" in kinds else rest.weights, 0 if gone else rest.gradients,
            0 if "optimizer" in kinds else rest.states,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------- by layers
    def seconds(self, c: Candidate) -> float:
        """Return seconds that no step of a candidate can be below, by traces of its distinct layers.

        A rank runs its layers one after the other, forward and backward, once for each microbatch.  Within them it
        computes and waits as in a trace without other ranks' copies, ZeRO or reductions, which only add.  A pipeline's
        schedule is simulated with the sums of its stages' layers, without reductions and updates and with the quicker
        messages of those within and between nodes.  Each end in a simulation is the largest of sums of costs, so that
        it grows with every cost: one with costs that are too low is a bound of one with the costs as they are.  Where
        ranks of a pipeline leave their cores to others, only what all compute together is certain.
        """
        stages = self.floors(c)
        return self._least_seconds(c, stages, [Copies()] * len(stages))

    def within(self, c: Candidate, memory: int) -> tuple[float, int]:
        """Return seconds and bytes that no step of a candidate can be below in so much memory, by traces of its layers.

        The seconds are the least over the sets of kinds to offload with which it may fit, and infinite if it fits with
        none.  A rank waits for what comes and goes beside its passes.
        """
        model, own, message = self.model, [[0]], 0
        layers = model.layers_of_one_copy(c)
        moments: Sequence[Sequence[Moment]] = [[Moment(0, op, (1,), (0,)) for op in (Op.FORWARD, Op.BACKWARD)]]
        schedule, cuts = self._pipeline(c)
        if schedule is not None:
            own = [[k.stage for k in chunks] for chunks in schedule.chunks]
            moments = dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks).moments
            message = min(layers[b - 1].message for _, b in cuts[:-1])
        stages = self.floors(c)
        inner = [b - a > (a == 0) + (b == self.model.depth) for a, b in cuts]
        seconds, least = math.inf, math.inf
        for kinds in [tuple(dict(c.offload))] if c.offload else [(), *offload_sets(self.model.kinds(c))]:
            away = self._away(c) if "activations" in kinds else [0] * len(stages)
            left = [self._left(c, stage.rest, kinds) for stage in stages]
            again = [self._gathered_again(c, kinds, layers[slice(*cut)]) for cut in cuts]
            kept = [[max(0, stages[s].kept - again[s]) for s in held] for held in own]
            if "activations" in kinds:
                ends = [max(0, stage.ends - more) for stage, more in zip(stages, again, strict=True)]
                kept = [[ends[s] * any(inner[t] for t in held) for s in held] for held in own]
            pending = [stage.made if "activations" in kinds else stage.pending for stage in stages]
            pending = [max(0, nbytes - more) for nbytes, more in zip(pending, again, strict=True)]
            absent = [0] * len(stages)
            if self._shares(c):
                absent = [max(sum(left[t].gradients for t in of) for of in own if s in of) for s in range(len(stages))]
            needed = [self._needed(c, kinds, lack, *cut) for lack, cut in zip(absent, cuts, strict=True)]
            buffers = [stage.transient for stage in stages]
            tied = [[sum(self._left(c, tie, kinds)) for tie in stage.ties] for stage in stages]
            rest = [sum(sum(left[s]) for s in held) - _more_than_once([tied[s] for s in held]) for held in own]
            need = max(
                here + _activations(
                    of_rank, message, held, [pending[s] for s in of], [buffers[s] for s in of], [needed[s] for s in of]
                )
                for here, of_rank, held, of in zip(rest, moments, kept, own, strict=True)
            )  # fmt: skip
            least = min(least, need)
            if need <= memory:
                copies = [self._copies(c, kinds, stage, n) for stage, n in zip(stages, away, strict=True)]
                seconds = min(seconds, self._least_seconds(c, stages, copies))
            if not kinds and seconds < math.inf:  # it fits
                break
        return seconds, int(least)

    def floors(self, c: Candidate) -> list[Floor]:
        """Return what each stage takes at the least, by traces of the layers of one copy of the model.

        A stage keeps at least what its layers keep.  A part's `kept` is what its rules save and its output is, less the
        output.  A layer gets from those before it nothing but their output (weights are not counted, and positions are
        on the host), and what its operations make is new memory.  So two layers save nothing in common but an output
        between them: it is left out of the first one's bytes, and is among the second one's once, if that saves it.
        Then no byte is in the sum that the stage does not keep, whatever the layers recompute or share of weights.
        Copies, and ZeRO's gathered weights, only add.  What is pending of a layer counts without its output and the
        gradient of its input, which other layers may keep too.  If activations are offloaded, what is kept from the
        forward pass on may not be back.  Where gradients of weights come later, what is kept may
        be gone by then, so that only the pass for those of inputs counts.

        This takes outputs that fill their memory, as those of the library's layers do.  An output that is a view of
        something larger would count the rest of it as kept, though nothing keeps it where the next layer does not save
        the output.  Experts have as many places on each rank as on one copy, or more where they are cut unevenly, as
        their queues are by sequence; where tokens could go by either of two ways (2D with experts on another axis) the
        way is chosen by words, so that one copy may take another one: there this is not shown.
        """
        model, share = self.model, self._sharing(c)
        parts = model.layers_of_one_copy(c)
        every = model.on_one_rank(c.dtype, None, True)
        passed = [0, *(part.message for part in parts)]
        later = [max(0, part.pending - given - part.message) for given, part in zip(passed, parts, strict=False)]
        made = [max(0, nbytes - part.kept) for nbytes, part in zip(later, parts, strict=True)]
        alone, ratio, split = model.alone(c.dtype), self._ratio(c), self._weights_later(c)
        peaks = [max(part.deferred.forward, part.deferred.inputs) if split else part.transient for part in parts]
        found = []
        for a, b in self._pipeline(c)[1]:
            rest = alone  # layers of one stage may share parameters
            if c.pipeline > 1:
                rest = Rest(*(sum(getattr(part, name) for part in every[a:b]) for name in Rest._fields))
            own, transient, behind = parts[a:b], 0, 0
            absent = sum(part.weights for part in own) if self._shares(c) else 0
            # gradients may go as they are made; those that rest stay in their buckets
            for part, peak in zip(reversed(own), reversed(peaks[a:b]), strict=True):
                transient = max(transient, peak - math.ceil(ratio * max(part.weights, absent)) - behind)
                behind += part.kept
            found.append(
                Floor(
                    self._at_rest(c, rest, model.experts(c.dtype, (a, b) if c.pipeline > 1 else None)),
                    sum(part.kept for part in own),
                    sum(part.kept for i, part in enumerate(own, a) if i in (0, len(parts) - 1)),
                    transient, SMALL * sum(part.count for part in own),
                    sum(model.seconds(part, "forward", quick=True) for part in own),
                    sum(model.seconds(part, "backward", quick=True) for part in own),
                    sum(later[a:b]), sum(made[a:b]),
                    tuple(_shared(tie, share) for tie in zip(*map(Part.tied_at_rest, every[a:b]), strict=True)),
                )
            )  # fmt: skip
        return found

    def _copies(self, c: Candidate, kinds: Collection[str], stage: Floor, away: int) -> Copies:
        """Return the seconds in which what a stage offloads comes and goes, to the nearest places, at the least."""
        model, rest = self.model, stage.rest
        share = max(0.0, 1 - stage.small / max(1, rest.weights))
        terms = int(share * rest.gradients) if model.settles(c) else 0
        moves = offload_moves(kinds, int(share * rest.weights), terms, rest.states, away)
        host, disk, places = model.machine.host, model.machine.disk, dict(c.offload)

        def seconds(come: int, go: int, place: str) -> float:
            made = (come + go) / host.bandwidth if host is not None and model.target == "gpu" else 0.0
            return made + (come / disk.read + go / disk.write if disk is not None and place == "disk" else 0.0)

        spent = dict.fromkeys(SPANS, 0.0)
        for (span, kind), moved in moves.items():
            spent[span] += min(seconds(*moved, p) for p in ([places[kind]] if places else model.homes))
        return Copies(**spent)

    def _away(self, c: Candidate) -> list[int]:
        """Return the bytes of activations that are offloaded in each stage, at the least.

        Of equal blocks one and two are traced: what blocks share is offloaded once.
        """
        keys, bare = self.model.keys(c.dtype), self.model.layers_of_one_copy(c)
        setup = self.model.one_copy(c)
        found: list[int] = []
        for i, key in enumerate(keys):
            alike = next((j for j in (i - 1, i) if 0 <= j < len(keys) - 1 and keys[j] == keys[j + 1] == key), None)
            if alike is None:
                found.append(0)
                continue
            given = bare[alike - 1].output if alike else None
            known = "two", setup.key, key, given
            both = self.model.part(known, setup, layers=(alike, alike + 2), given=given, update=False)
            found.append(both.away - bare[alike].away)
        return [sum(found[a:b]) for a, b in self._pipeline(c)[1]]

    def _needed(self, c: Candidate, kinds: Collection[str], absent: int, a: int, b: int) -> tuple[int, int]:
        """Return the bytes of a stage that a forward and a backward pass need beside what rests and is kept; so many of
        what rests may be absent.

        Of offloaded activations none need be in memory but those in use.  The trace of a block alone has no array of
        other layers, and its own ones only while they are made or in use, so that all it holds at its peak is held in
        the stage too, but for an output, which the trace keeps throughout, and gradients, which may be gone as they are
        made.  As the last layer may keep nothing of the microbatch yet, or no more, that is subtracted.

        With ZeRO's stage 3 the weights of a layer, and those of the one that the pass comes to next, are in memory or
        on their way from the layer's first gather on.  What a layer alone has in flight of its gradients the stage has
        too, as it awaits none earlier.  In its forward pass it gathers its own weights ahead, and not the next one's.

        Where gradients of weights come later, what is in use for them is not in use for those of inputs.
        """
        later = self._weights_later(c)
        bare, away = self.model.layers_of_one_copy(c), "activations" in kinds
        gathering = self.model.layers(c) if c.zero == 3 and self.model.sharing_zero(c) > 1 else None
        ends = bare[-1].kept if b == len(bare) else 0
        ratio = self._ratio(c)
        forward = backward = 0
        for i in range(a, b) if away or gathering else ():
            part = bare[i]
            if away and part.resident is not None:
                again = self._gathered_again(c, kinds, [part])
                made = part.message + max(absent, math.ceil(ratio * part.weights))
                forward = max(forward, part.resident.forward - absent - ends - again)
                backward = max(backward, (0 if later else part.resident.backward - made) - ends - again)
            if gathering is None:
                continue
            own, resident = gathering[i].gathered, gathering[i].resident
            next_one = gathering[i + 1].gathered[0] if i + 1 < b else 0
            before = gathering[i - 1].gathered[1] if i > a else 0
            if not away:
                behind = sum(each.kept for each in bare[i + 1 : b])
                forward = max(forward, own[0] + next_one - absent - behind - part.kept)
                backward = max(backward, own[1] + before - absent - behind)
            elif resident is not None:
                made = part.message + absent + 2 * gathering[i].small
                forward = max(forward, resident.forward - own[1] + next_one - absent - ends)
                backward = max(backward, (0 if later else resident.backward + before - made) - ends)
        return forward, backward

    def _weights_later(self, c: Candidate) -> bool:
        """Return True if a backward pass leaves the gradients of weights for later."""
        schedule, _ = self._pipeline(c)
        return schedule is not None and any(i.op is Op.BACKWARD_WEIGHT for i in schedule.orders[0])

    def _shares(self, c: Candidate) -> bool:
        """Return True if buckets of gradients may be in memory that ranks of one host share."""
        alone = c.sequence * (c.tensor.ranks or 1) == 1 and (c.zero > 0 or c.data == 1)
        return self.model.target == "cpu" and not alone

    def _gathered_again(self, c: Candidate, kinds: Collection[str], parts: Sequence[Part]) -> int:
        """Return the bytes of weights, at the most, that layers keep at work in the traces and that are gathered again
        where they rest elsewhere."""
        more = "parameters" in kinds and c.tensor.mode not in (None, "1d")
        return more * (c.tensor.ranks or 1) * sum(part.weights for part in parts)

    def _ratio(self, c: Candidate) -> float:
        """Return the bytes of gradients by those of values."""
        alone = self.model.alone(c.dtype)
        return alone.gradients / max(1, alone.weights)

    def _least_seconds(self, c: Candidate, stages: Sequence[Floor], copies: Sequence[Copies]) -> float:
        """Return the bound of a candidate's time with what comes and goes in each stage."""
        model, rounds = self.model, c.microbatches
        copied = sum(rounds * (own.forward + own.backward) + own.update for own in copies) / c.pipeline
        crowd = replace(model.machine, bound=False).crowd(model.node, model.ranks)  # the mean, of unequal ranks
        if c.pipeline > 1 and crowd > 1 and model.machine.overlap.receiving < 1:
            return self.static_seconds(c) * crowd + copied
        passes = rounds * sum(stage.forward + stage.backward for stage in stages) / c.pipeline
        least = max(self.static_seconds(c), passes) + copied
        schedule, _ = self._pipeline(c)
        if schedule is None:
            return least
        backward = [stage.backward + own.backward for stage, own in zip(stages, copies, strict=True)]
        places = (2,) if model.machine.network is None else (1, 2)
        messages = [part.message for part in model.layers_of_one_copy(c)[:-1]]
        costs = Costs(
            forward=[stage.forward + own.forward for stage, own in zip(stages, copies, strict=True)],
            backward=backward, weight=[seconds / 2 for seconds in backward],
            latency=min(model.send_seconds(nbytes, local) for nbytes in messages for local in places),
            step=[sum(copies[k.stage].update for k in chunks) for chunks in schedule.chunks],
        )  # fmt: skip
        graph = dependencies(schedule.name, schedule.ranks, schedule.microbatches, c.chunks)
        return max(least, (1 - 1e-9) * graph.bounds(costs)[0])  # fewer microbatches than there are take no longer

    def _pipeline(self, c: Candidate) -> tuple[Schedule | None, list[Cut]]:
        """Return the schedule of a pipeline, or one of few microbatches of very many, and the layers of its stages."""
        if c.pipeline == 1:
            return None, [(0, self.model.depth)]
        key = c.pipeline, c.schedule, c.chunks, c.microbatches
        if key not in self._schedules:
            few = c.microbatches * c.pipeline <= WHOLE
            spec = self.model.mesh(c) if few else self.model.short_mesh(c)
            self._schedules[key] = spec.schedule, self.model.cuts(spec)
        return self._schedules[key]


def _shared(layers: Sequence[tuple[int, int, int]], share: Rest) -> Rest:
    """Return the bytes at rest of a tied parameter on one of the ranks that share it, by those in a stage's layers."""
    return Rest(*(-(-max(nbytes) // ranks) for nbytes, ranks in zip(zip(*layers, strict=True), share, strict=True)))


def _more_than_once(tied: Sequence[Sequence[int]]) -> int:
    """Return the bytes of tied parameters beyond those of one, by those in each stage of a rank."""
    return sum(sum(nbytes) - max(nbytes) for nbytes in zip(*tied, strict=True))


def _activations(
    moments: Sequence[Moment], message: int, kept: Sequence[int], pending: Sequence[int], buffers: Sequence[int],
    needed: Sequence[tuple[int, int]] = (),
) -> int:  # fmt: skip
    """Return the bytes that a pipeline rank cannot be below beside what is at rest, by those of its chunks.

    What a chunk needs while it computes may be needed in its forward passes or in its backward ones; of what is
    `needed` it is known in which.  Messages of other ranks, of at least so many bytes, have memory before they are due.
    """

    def held(m: Moment) -> int:
        return int(m.ahead * message + m.nbytes(kept, pending))

    found = [max(map(held, moments), default=0)]
    for chunk, nbytes in enumerate(buffers):
        passes = [[held(m) for m in moments if m[:2] == (chunk, op)] for op in (Op.FORWARD, Op.BACKWARD)]
        if all(passes):  # a replica of Chimera's may get no microbatch
            found.append(int(min(map(max, passes))) + nbytes)
        found += [max(each) + n for each, n in zip(passes, needed[chunk] if needed else (), strict=False) if each]
    return max(found)
