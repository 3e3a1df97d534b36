"""Guesses, without a trace, of how long a step takes: they order the meshes of a search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from parlinalg.planning.candidates import MeshShape, Space, mode_of
from parlinalg.planning.trace import Gemm
from parlinalg.planning.traced_model import TracedModel
from parlinalg.schemes.words import scheme_words
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import TensorConfig
from parlinalg.train.mesh import resolve
from parlinalg.units import ITEMSIZE


class Guess(NamedTuple):
    """The estimated seconds of a step on a mesh at best, with its microbatches, recomputation, stage of ZeRO, and what
    cuts experts, as of `Space.experts`."""

    seconds: float
    microbatches: int
    recompute: str | None
    zero: int
    experts: tuple[str | None, int | None] = (None, None)


class Guesses:
    """Guesses by formulas of a step on a mesh: only the order in which meshes are looked at follows from them.

    Of a transformer they add products at the best rate, the words of the scheme's table for each microbatch, those of
    attention between ranks of a sequence, the pipeline's bubble, the idle time of its stages with fewer layers, the
    reduction of gradients, and the gathers of ZeRO 3 where nothing else fits.  Of other models they are the products
    and the pipeline's idle time alone.
    """

    def __init__(self, model: TracedModel, space: Space) -> None:
        self.model, self.space, self.machine, config = model, space, model.machine, model.config
        self.dtype = max(space.dtypes, key=lambda name: self.machine.best_rate(name or config.dtype)) or None
        self.part, flops = model.alone(self.dtype), model.linear_flops(self.dtype)
        self.layers = max(1, model.depth - 2)
        self.products = flops / model.ranks / self.machine.best_rate(self.dtype or config.dtype)
        self.itemsize = ITEMSIZE.get(self.dtype or config.dtype, 4)
        self.hidden = int(config.model.options.get("hidden_size", 0)) if config.model.name in LANGUAGE else 0
        self.length = model.inputs.length
        self.experts = float(model.experts(self.dtype))
        self.choices = int(config.model.options.get("num_experts_per_tok", 2)) if self.experts else 0
        self.kept: dict[str | None, tuple[float, float]] = {}
        parts = model.on_one_rank(self.dtype, None, update=False)
        self.work = [sum(e.flops for e in part.trace.events if isinstance(e, Gemm)) for part in parts]
        """Operations of the products of each layer, of one sample."""
        self._words: dict[TensorConfig, tuple[float, float]] = {}
        self._byte: dict[tuple[str, int, int], float] = {}
        self._work: dict[int, float] = {}

    def __call__(self, mesh: MeshShape, counts: Sequence[int], recompute: Sequence[str | None], limit: int) -> Guess:
        data, pipeline, sequence, ulysses, tensor = mesh
        width, model, cut = mesh.width, self.model, tensor.ranks or 1
        weights, gradients, states = (n / pipeline / cut for n in self.part)
        fixed, per_row = self._tensor(tensor)
        each = model.batch / data / sequence  # rows of a step
        layers = self.layers / pipeline
        uneven = self.unevenness(mesh)
        byte = self.byte("all_gather", cut) * self.itemsize
        attention = 0.0
        if self.hidden:
            own = each * self.length * self.hidden / cut
            if ulysses > 1:
                attention += 8 * own * self.byte("all_to_all", min(width, ulysses * cut))
            if sequence > ulysses:
                attention += 6 * own * (sequence // ulysses) * self.byte("send", width)
        arriving = self.byte("all_gather", model.ranks) * (mesh.copies > 1)
        stages = self.space.stages(mesh)
        best = Guess(math.inf, counts[0], recompute[0], stages[0])
        choices = self.space.experts(mesh)
        experts = [(self._ranks(mesh, *choice), choice) for choice in choices] if self.choices else [(1, choices[0])]
        tokens = layers * 4 * self.choices * each * self.length * self.hidden / cut * self.itemsize
        for again in recompute:
            if again not in self.kept:
                self.kept[again] = model.kept_by(again, self.dtype)
            kept, output = self.kept[again]
            more = 4 / 3 if again == "block" else 1.03 if again == "attention" else 1.0
            passes = max(self.products * more, 1e-12)
            for count, (spread, choice) in itertools.product(_few(counts), experts):
                moved = layers * (count * fixed + each * per_row) * byte * more + layers * attention * self.itemsize
                apart = width if (choice[0] or "data") == "data" else width * ulysses // sequence
                moved += tokens * (1 - 1 / spread) * self.byte("all_to_all", spread, apart)
                here = 1 - self.experts * (1 - 1 / spread)  # of weights, by those of a rank that has all experts
                bubble = (pipeline - 1) / count
                computed = (passes + moved) * (1 + bubble) * uneven
                flight = min(count, pipeline)
                held = model.batch / data / count * layers * uneven * (kept if again != "block" else output)
                held *= flight / width
                for zero in dict.fromkeys((min(1, max(stages)), max(stages))):
                    at_rest = states / mesh.copies if zero else states * here
                    if zero == 3:  # gathered twice and reduced in each microbatch, beside half of the passes
                        at_rest += (weights + gradients) / mesh.copies
                        sent = count * (2 * weights + gradients) * here * arriving
                        seconds = computed + max(0.0, sent - computed / 2)
                    else:
                        at_rest += (weights + gradients) * here
                        seconds = computed + gradients * here * arriving
                    if held + at_rest > limit:  # behind all that seem to fit
                        seconds *= 10 * (held + at_rest) / limit
                    if seconds < best.seconds:
                        best = Guess(seconds, count, again, zero, choice)
        return best

    def _ranks(self, mesh: MeshShape, axis: str | None, group: int | None) -> int:
        """Return over how many ranks an axis cuts experts, but for those of tensor parallelism, which cut them in any
        case."""
        ranks = {"data": group or mesh.data, "s": mesh.sequence // mesh.ulysses}.get(axis or "data", 1)
        return min(ranks, int(self.model.config.model.options.get("num_local_experts", 1)))

    def unevenness(self, mesh: MeshShape) -> float:
        """Return the work of the pipeline rank that has the most of the layers, by the mean of all: the others wait."""
        pipeline = mesh.pipeline
        if pipeline not in self._work:
            c = replace(
                next(self.space.steps(mesh)), data=1, sequence=1, ulysses=1, tensor=TensorConfig(), zero=0,
                microbatches=pipeline, asked=None, expert_ranks=None, within=None,
            )  # fmt: skip
            spec = resolve(c.apply(self.model.config, pipeline), pipeline)
            work = [sum(self.work[a:b]) for a, b in self.model.cuts(spec)]
            if spec.schedule is not None:
                work = [sum(work[k.stage] for k in chunks) for chunks in spec.schedule.chunks]
            self._work[pipeline] = max(1.0, max(work) * pipeline / max(1, sum(self.work)))
        return self._work[pipeline]

    def _tensor(self, tensor: TensorConfig) -> tuple[float, float]:
        """Return the words that a rank receives in a layer: of a microbatch, and of each of its rows."""
        if tensor not in self._words:
            self._words[tensor] = 0.0, 0.0
            if self.hidden and (tensor.ranks or 1) > 1:
                module, axes = mode_of(tensor)
                at = dict.fromkeys(axes, 0)
                found = []
                for rows in (64, 128):
                    words = scheme_words(module.SCHEME, (rows, self.length, self.hidden), 4 * self.hidden, axes, at)
                    found.append(1.5 * (sum(words.values()) + words["x"] + words["w"]))
                per_row = max(0.0, (found[1] - found[0]) / 64)
                self._words[tensor] = max(0.0, found[0] - 64 * per_row), per_row
        return self._words[tensor]

    def byte(self, op: str, ranks: int, apart: int = 1) -> float:
        """Return the seconds of a byte in an operation among ranks that are next to each other, or so many apart."""
        if (op, ranks, apart) not in self._byte:
            model, n = self.model, 2 if op == "send" else ranks
            local = max(1, min(n, model.node // apart if ranks <= model.node or op != "send" else 1))
            cost = self.machine.transfer(op, 1e7, n, local, model.node, model.ranks).total if ranks > 1 else 0.0
            self._byte[op, ranks, apart] = cost / 1e7
        return self._byte[op, ranks, apart]


def _few(counts: Sequence[int]) -> Sequence[int]:
    """Return the numbers of microbatches to guess with: the fewest, a middle one, and the four largest."""
    return counts if len(counts) < 6 else [counts[0], counts[len(counts) // 2], *counts[-4:]]
