"""Parts of a model as a plan reckons with them: the inputs of a model, and what the trace of some layers has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import zeros
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor
from parlinalg.backend.shapes import WhatIf
from parlinalg.datasets.tokens import tokenizer
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.offload.activations import WINDOW
from parlinalg.offload.parameters import LEAST
from parlinalg.offload.plan import BUFFERS, MOST_TILE
from parlinalg.parallel.buckets import Load
from parlinalg.planning.machine import DISK_READ, DISK_WRITE, HOST_COPY
from parlinalg.planning.trace import Event, Kernel, Span, Trace, cut
from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import TrainingConfig
from parlinalg.train.mesh import Mesh
from parlinalg.train.recipes import (
    dataset,
    declared_classifier,
    declared_language_model,
    length_of_sequences,
    require_vocabulary,
)
from parlinalg.units import parse_bytes

QUEUE = parse_bytes(WINDOW)
SMALL = parse_bytes(LEAST)
SPANS = ("forward", "backward", "update")
"""The spans of a part in which what is offloaded comes and goes."""
ASSUMED = WhatIf(finite=True, norm=1.0)
"""Gradients are finite and not clipped: a step in which nothing is left out."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model.

    Attributes
    ----------
    language : bool
        True if they are sequences of tokens; False if they are samples in classes.
    kinds : int
        The size of the vocabulary, or the number of classes.
    length : int
        Tokens of a sequence, or features of a sample.
    samples : int or None
        How many there are to train on; None of a text, of which there are always more windows.
    """

    language: bool
    kinds: int
    length: int
    samples: int | None = None

    def rows(self, batch_size: int) -> int:
        """Return the rows of a step: `batch_size`, or all samples where there are fewer, as training takes them."""
        return batch_size if self.samples is None else min(batch_size, self.samples)

    @classmethod
    def of(cls, config: TrainingConfig) -> Inputs:
        """Return those of a configuration; the data are read only where the model's sizes follow from them.

        Raises
        ------
        ConfigError
            If the model's `vocab_size` is less than the tokens of the tokenizer, where that is on this machine.
        """
        if config.model.name in LANGUAGE:
            known, path = config.model.options.get("vocab_size"), config.data.options.get("tokenizer")
            if known is None or path is None or Path(path).exists():
                tokens = int(tokenizer(path).vocab_size)
                known = tokens if known is None else int(known)
                require_vocabulary(known, tokens)
            return cls(True, int(known), length_of_sequences(config))
        data: Any = dataset(config)
        return cls(False, int(data.classes), int(data.features), len(data.x))

    def declare(self, config: TrainingConfig, mesh: Mesh) -> Any:
        """Return the declared model on a mesh."""
        if self.language:
            return declared_language_model(config, mesh, self.kinds, self.length)
        return declared_classifier(config, mesh, self.length, self.kinds)

    def first(self, model: Any, rows: int, grid: Grid, dtype: str) -> Any:
        """Return what the first layer takes."""
        if self.language:
            return zeros((rows, self.length), grid, model.ids_layout, np.int64)
        return Tensor(zeros((rows, self.length), grid, model.input_layout(), dtype_named(dtype)))

    def targets(self, model: Any, rows: int, grid: Grid) -> Any:
        """Return the targets of the last layer's output."""
        if self.language:
            return zeros((rows, self.length), grid, model.targets_layout, np.int64)
        return zeros((rows,), grid, Layout(model.output_layout().dims[0]), np.int64)


class NextPasses(NamedTuple):
    """The passes that may follow those of a stage on its pipeline rank.

    Attributes
    ----------
    again : tuple of two bools
        True if a forward pass may be followed by another one of the same stage; the same of a backward pass.
    other : frozenset
        By their keys, the layers with which a backward pass of another stage may begin that follows a backward pass.
    """

    again: tuple[bool, bool] = (False, False)
    other: frozenset[Hashable] = frozenset()


NO_PASSES = NextPasses()


class LayerOutput(NamedTuple):
    """An array that a layer gives to the next one."""

    shape: tuple[int, ...]
    layout: Layout
    dtype: str


class DeferredPeaks(NamedTuple):
    """The bytes at the peak of a pass where gradients of weights come last: of the forward pass and the one for the
    gradients of inputs beside what rests and is kept, of that for weights beside what rests and is pending.  The calm
    ones are the same while no gathers of another backward pass are in flight, nor weights stay for one."""

    forward: int = 0
    inputs: int = 0
    weights: int = 0
    calm_inputs: int = 0
    calm_weights: int = 0


class LastPeaks(NamedTuple):
    """The bytes beside what rests at the peak of a step's last microbatch in a pipeline, in which sums of gradients
    start, and of what follows it: `whole` where gradients of weights do not come later, `later` where they do.  `sums`
    are those of sums that may be in flight when the last pass of another stage begins."""

    whole: int = 0
    later: int = 0
    sums: int = 0


class Resident(NamedTuple):
    """The bytes of a microbatch in memory where the activations of blocks are offloaded: `kept`, `pending`,
    `transient`, `deferred` and `last_peaks` as of a `Part`.  `forward` and `backward` are those at the peak of each
    pass beside what rests, with ZeRO's stage 3 from the first gather on that the pass waits for.  `away` are those that
    are offloaded of what only gradients of weights need, where these come later."""

    kept: int
    pending: int
    transient: int
    deferred: DeferredPeaks
    last_peaks: LastPeaks
    forward: int
    backward: int
    away: int


class Rest(NamedTuple):
    """Bytes of a model at rest."""

    weights: int
    gradients: int
    states: int


class Tie(NamedTuple):
    """The bytes of a parameter on this rank: of its value, of its gradient, those that this rank updates, and the most
    that a rank updates that shares the update."""

    value: int
    gradient: int
    updated: int
    most: int

    @classmethod
    def of(cls, p: Parameter) -> Tie:
        """Return those of a parameter."""
        found, part = p.storage.nbytes(p.data), p.storage.partition(p.data)
        most = max(part.lengths, default=0) * p.dtype.itemsize
        return cls(int(found.value), int(found.gradient), int(found.updated), int(max(found.updated, most)))


@dataclass(frozen=True)
class Part:
    """The trace of layers on one rank, and the bytes it holds.

    Attributes
    ----------
    trace : Trace
        A microbatch whose gradients stay where they are, in spans "forward" and "backward"; then in a span "end" the
        last microbatch of a step and the span "update".  Without a pipeline gradients are reduced while the last
        microbatch goes backward; with one after it, in a span "reduce".
    weights, gradients, states : int
        Bytes at rest.
    kept : int
        Bytes that a microbatch keeps from its forward to its backward pass: what is given too, if layers keep it, the
        output aside, and weights that are gathered ahead, once whatever is in flight.
    pending : int
        Bytes that a microbatch keeps where a pipeline's schedule defers the gradients of weights: from the part of its
        backward pass for the inputs to that for the weights.  0 of what has an update and no pipeline.
    peak : int
        The most bytes at once, with one microbatch in flight; in a pipeline before the last one of a step.
    calm : int
        The same, while no gathers of another backward pass are in flight.
    last_peaks : LastPeaks
    output : LayerOutput or None
        None of the last layer.
    message : int
        Bytes of the output's block.
    away, array : int
        Bytes that a microbatch puts away where the activations of blocks are offloaded, and those of the largest array.
    deferred : DeferredPeaks
    resident : Resident or None
        What stays then, by a pass that offloads them, to a store that brings back no array before it is in use; None
        of a stage without blocks on a rank that has some, or where activations are not offloaded.
    largest, small : int
        Bytes of the largest block of a parameter, and of those that are too small to be offloaded.
    count : int
        The number of parameters.
    recorded : int
        Bytes of the values that a disk keeps beside the states, to undo a step; none if a state is their master.
    summed : int
        Bytes of the gradients of what this rank updates.
    together, apart : int
        Of these the bytes of the small ones, which pipeline ranks that share them sum together, as `TiedParameters`
        does, and those of the largest other one.
    ties : tuple of Tie
        For each parameter that several layers of the model hold, in the order of `tied`, its bytes; zeros if none of
        these layers is here.
    first_gathers : int
        Of weights that are gathered ahead of use: the gathers with which a forward pass begins.
    gathered : tuple of two ints
        Of weights that are gathered ahead of use, of one layer: bytes that a forward and a backward pass take for it
        from the start of its gathers on.
    settled : bool
        True if gradients may be settled one by one, and rest elsewhere: their reducer does no more than sum them.
    elsewhere, elsewhere_kept : dict of str to int
        Bytes by place, "host" and "disk": at rest and of a microbatch.
    moves : dict of str to dict of str to int
        By span, "forward", "backward" and "update", the bytes that come and go, by the kernel of `machine.OFFLOADS`.
    queue : tuple of three ints
        `away`, that of `resident`, and `array`, if they wait for a disk in this memory.
    tiled : tuple of two ints
        Bytes of the states that come and go in tiles, and of those tiles that a rank has room for in this memory.
    loads : tuple of (int or None, Load)
        The gradients that wait in buckets for the sums of a backward pass, in its order, with the numbers of `ties`.
    lone : bool
        True if weights are gathered ahead, of one layer alone: they may stay for another pass.
    """

    trace: Trace
    weights: int
    gradients: int
    states: int
    kept: int
    pending: int
    peak: int
    output: LayerOutput | None
    message: int
    away: int = 0
    array: int = 0
    largest: int = 0
    small: int = 0
    count: int = 0
    recorded: int = 0
    settled: bool = True
    summed: int = 0
    together: int = 0
    apart: int = 0
    ties: tuple[Tie, ...] = ()
    first_gathers: int = 0
    gathered: tuple[int, int] = (0, 0)
    calm: int = 0
    deferred: DeferredPeaks = field(default_factory=DeferredPeaks)
    last_peaks: LastPeaks = field(default_factory=LastPeaks)
    resident: Resident | None = None
    elsewhere: Mapping[str, int] = field(default_factory=Counter)
    elsewhere_kept: Mapping[str, int] = field(default_factory=Counter)
    moves: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    queue: tuple[int, int, int] = (0, 0, 0)
    tiled: tuple[int, int] = (0, 0)
    loads: tuple[tuple[int | None, Load], ...] = ()
    lone: bool = False
    _spans: dict[tuple[str, tuple[Kernel, ...]], Trace] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def rest(self) -> int:
        """Bytes at rest between microbatches."""
        return self.weights + self.gradients + self.states

    def tied_at_rest(self) -> list[tuple[int, int, int]]:
        """Return the bytes of weights, gradients and states of each of the `ties`; none of what is offloaded."""
        share = self.states / max(1, self.summed)
        return [
            (tie.value * (self.weights > 0), tie.gradient * (self.gradients > 0), round(tie.updated * share))
            for tie in self.ties
        ]

    @property
    def transient(self) -> int:
        """Bytes at the peak that are neither at rest nor kept of a microbatch."""
        return max(0, self.peak - self.rest - self.kept)

    @property
    def unfollowed(self) -> int:
        """The same of a backward pass while no gathers of another one are in flight."""
        return max(0, self.calm - self.rest - self.kept)

    def span(self, name: str) -> Trace:
        """Return the part of the trace in the first span of a name; empty if there is none.

        It is the same object each time, by which a search knows what was timed.
        """
        return self._span(name)

    def _span(self, name: str, more: tuple[Kernel, ...] = ()) -> Trace:
        """Return a span with more kernels at its end."""
        if (name, more) not in self._spans:
            found = cut(self.trace, name, most=1)
            rank, size = self.trace.rank, self.trace.size
            self._spans[name, more] = Trace(rank, size, [*found[0].events, *more] if found else [])
        return self._spans[name, more]

    def offloaded(self, places: Mapping[str, str], device: bool) -> Part:
        """Return the part with some of what it holds in host memory or on a disk, as `parlinalg.offload` does it.

        What comes and goes is waited for: an update brings its states in tiles and takes them back, a forward pass
        takes away what blocks save, the backward pass brings it back.  Values come for the forward and for the backward
        pass.  Gradients, which rest with the values or alone, come and go with each microbatch's terms: the first are
        only taken away, and the update brings them once more.

        Parameters
        ----------
        places : dict of str to str
            "host" or "disk" for each of "optimizer", "activations", "parameters" (with the gradients, if they are
            `settled`) and "gradients" that is offloaded.
        device : bool
            True if blocks are in a device's memory: what a disk holds passes through the host's.

        Raises
        ------
        ConfigError
            If gradients alone are to rest elsewhere, and are not `settled`.
        """
        if "gradients" in places and not self.settled:
            raise ConfigError("gradients that a reducer shares out or sends in 16 bits do not rest elsewhere alone")
        weights, held, states, transient = self.weights, self.gradients, self.states, self.transient
        unfollowed = self.unfollowed
        kept, pending, deferred, last_peaks = self.kept, self.pending, self.deferred, self.last_peaks
        values = weights - self.small
        terms = round(held * values / max(1, weights)) if self.settled else 0
        if "activations" in places and self.resident is not None:
            kept, pending, transient, deferred, last_peaks, *_ = self.resident
            unfollowed = transient
        moving = in_transit(places, values, terms, self.largest)
        transient, unfollowed = transient + moving, unfollowed + moving
        deferred = DeferredPeaks(*(n + moving for n in deferred))
        last_peaks = LastPeaks(last_peaks.whole + moving, last_peaks.later + moving, last_peaks.sums)
        rest, each, queue, tiled = Counter[str](), Counter[str](), (0, 0, 0), (0, 0)
        moves = {span: Counter[str]() for span in SPANS}
        for (span, kind), (come, go) in offload_moves(places, values, terms, states, self.away).items():
            to_disk = places[kind] == "disk"
            go += self.recorded if kind == "optimizer" and to_disk else 0
            moves[span] += Counter({HOST_COPY: come + go} if device else {})
            moves[span] += Counter({DISK_READ: come, DISK_WRITE: go} if to_disk else {})
        if (place := places.get("optimizer")) is not None:
            rest[place] += 2 * (states + self.recorded) if place == "disk" else states  # a file has two for each tile
            tiled = states, MOST_TILE if device else host_tiles(states, weights)
            states = 0
        if (place := places.get("activations")) is not None:
            each[place] += self.away
            if not device and self.resident is not None:  # a device's copies are waited for
                queue = self.away, self.resident.away, self.array
        if (place := places.get("parameters")) is not None:
            rest[place] += values + terms
            weights, held = weights - values, held - terms
        elif (place := places.get("gradients")) is not None:
            rest[place] += terms
            held -= terms
        copies = {
            span: tuple(Kernel(name, n, n, "uint8") for name, n in found.items() if n) for span, found in moves.items()
        }
        events: list[Event] = []
        for event in self.trace.events:
            if isinstance(event, Span) and not event.begins:
                events += copies.get(event.name, ())
            events.append(event)
        made = replace(
            self, trace=Trace(self.trace.rank, self.trace.size, events, self.trace.stands_for), weights=weights,
            gradients=held, states=states, kept=kept, pending=pending, deferred=deferred, last_peaks=last_peaks,
            peak=weights + held + states + kept + transient,
            calm=weights + held + states + kept + unfollowed, elsewhere=rest, elsewhere_kept=each, moves=moves,
            queue=queue, tiled=tiled,
        )  # fmt: skip
        for span in (*moves, "reduce"):  # other sets of what is offloaded have some of them too
            made._spans[span, ()] = self._span(span, copies.get(span, ()))
        return made


def offload_moves(
    kinds: Collection[str], weights: int, terms: int, states: int, away: int
) -> dict[tuple[str, str], tuple[int, int]]:  # fmt: skip
    """Return by span and kind the bytes that come and go: of values, gradients, states and a microbatch's activations.

    `terms` are the gradients that rest with the values or alone.
    """
    alone = 0 if "parameters" in kinds else terms
    moves = {
        "optimizer": {"update": (states, states)},
        "activations": {"forward": (0, away), "backward": (away, 0)},
        "parameters": {"forward": (weights, 0), "backward": (weights + terms, terms), "update": (weights, weights)},
        "gradients": {"backward": (alone, alone)},
    }
    return {(span, kind): moved for kind in kinds for span, moved in moves[kind].items()}


def in_transit(kinds: Collection[str], weights: int, terms: int, largest: int) -> int:
    """Return the bytes of values and gradients that come or go at once at the most, beside what stays.

    A product takes its values, and a gradient is added to the one that rests elsewhere.
    """
    most = {"parameters": min(weights + terms, 2 * largest), "gradients": min(terms, largest)}
    return max((most.get(kind, 0) for kind in kinds), default=0)


def host_tiles(states: int, weights: int) -> int:
    """Return the bytes of tiles of states that are read ahead and written behind, with the values that they change."""
    return (BUFFERS + 1) * MOST_TILE * (states + weights) // states if states else 0


def queued(away: float, array: float, others: float = 0, later: float = 0, forward: bool = False) -> int:
    """Return the most bytes of offloaded activations that wait for a disk, or came from it ahead of their use.

    So many are away of the microbatch that is computed, in the largest array, and of other microbatches; of these the
    forward pass of so many came later.  Arrays are written in the order in which they were saved, but for those that
    nobody needs any more, as soon as those that wait have more than `QUEUE` bytes, or are one array: so that the last
    ones wait.  Those read ahead have at most so many before the last of them; they come in the reverse order, so that
    of this microbatch those that wait are the first of them.
    """
    most = max(QUEUE, array)
    if forward:
        return round(min(away + others, most))
    return round(min(away, QUEUE + array) + min(others, most, max(later, most - away)))
