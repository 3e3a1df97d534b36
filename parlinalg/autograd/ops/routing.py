"""Routing of tokens to experts and to places in their queues; pure bookkeeping on small host arrays.

All first choices stand in an expert's queue before all second ones, these before all third ones and so on, each in the
order of the sequence (Lepikhin et al., "GShard: scaling giant models with conditional computation and automatic
sharding", 2021).  A queue belongs to one sequence and one expert, and takes `capacity` tokens; others are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import mismatch
from parlinalg.backend import Backend, backend_of, namespace
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, coordinates, cut_lengths, index_of, span, span_of

Block = Any
Coords = Mapping[str, int]


@dataclass(frozen=True)
class Queues:
    """The layout of the experts' queues on a grid: the buffer [experts, groups, capacity, features] of a layer.

    Parameters
    ----------
    tokens : Layout
        The layout of the tokens that are sent and taken back, [batch, sequence, features].
    axis : tuple of str
        The axes that cut the experts, outermost first.
    experts, capacity : int
    shape : (int, int)
        Batch and sequence.
    grid : Grid

    Groups are the sequences, cut by the axes that cut the batch and not the experts.  Where these do not hold equally
    many once the others are taken from them, there are a few groups more, without tokens.
    """

    tokens: Layout
    axis: Cut
    experts: int
    capacity: int
    shape: tuple[int, int]
    grid: Grid

    @cached_property
    def batch_cut(self) -> Cut:
        """The axes that cut the groups."""
        return tuple(a for a in self.tokens.dims[0] if a not in self.axis)

    @cached_property
    def queue_cut(self) -> Cut:
        """The axes that cut the places of the queues."""
        return tuple(a for a in self.tokens.dims[1] if a not in self.axis)

    @cached_property
    def crossed(self) -> Cut:
        """The axes along which tokens travel."""
        lead = (*self.tokens.dims[0], *self.tokens.dims[1])
        scanned = self.tokens.dims[1]
        sizes = self.grid.sizes
        return tuple(a for a in self.grid.axes if sizes[a] > 1 and a in lead and (a in scanned or a in self.axis))

    @cached_property
    def replicating(self) -> Cut:
        """The axes that cut the experts and no tokens: each rank takes the tokens of its own experts."""
        lead = (*self.tokens.dims[0], *self.tokens.dims[1])
        return tuple(a for a in self.axis if a not in lead and self.grid.sizes[a] > 1)

    def layout(self, features: Cut) -> Layout:
        """Return the layout of the buffer whose features are cut so."""
        return Layout(self.axis, self.batch_cut, self.queue_cut, features)

    @cached_property
    def peers(self) -> list[dict[str, int]]:
        """The coordinates of the ranks that exchange tokens."""
        return [{**self.grid.coords, **at} for at in coordinates(self.crossed, self.grid.sizes)]

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """For each of them, which of the batch's cuts along the crossed axes it holds."""
        axes = [a for a in self.tokens.dims[0] if a in self.crossed]
        return [tuple(at[a] for a in axes) for at in self.peers]

    def rows(self, at: Coords) -> int:
        """Return the sequences of a rank."""
        return len(span(self.shape[0], self.tokens.dims[0], self.grid.sizes, at))

    @cached_property
    def groups(self) -> int:
        """The number of groups on all ranks together."""
        sizes, crossing = self.grid.sizes, [a for a in self.tokens.dims[0] if a in self.axis]
        held = [
            sum(self.rows({**at, **more}) for more in coordinates(tuple(crossing), sizes))
            for at in coordinates(self.batch_cut, sizes)
        ]
        even = held == cut_lengths(self.shape[0], self.batch_cut, sizes)
        return self.shape[0] if even else len(held) * max(held)

    @cached_property
    def buffer(self) -> tuple[int, int, int]:
        """Experts, groups and places."""
        return self.experts, self.groups, self.capacity

    def runs(self, at: Coords, positions: np.ndarray | None) -> Runs:
        """Return the tokens of a rank as runs of neighbours in their sequence."""
        here = span(self.shape[1], self.tokens.dims[1], self.grid.sizes, at)
        where = np.arange(here.start, here.stop) if positions is None else positions[here.start : here.stop]
        order = np.argsort(where, kind="stable")
        lined = where[order]
        starts = np.diff(lined, prepend=lined[:1] - 2) != 1
        run = np.empty(len(where), np.int64)
        run[order] = np.cumsum(starts) - 1
        return Runs(order, run, lined[starts])


class Runs(NamedTuple):
    """Tokens of a rank: their order in the sequence, the run of each, and where each run begins."""

    order: np.ndarray
    run: np.ndarray
    first: np.ndarray


class Routing:
    """The place of every token in an expert's queue, and the exchanges that bring it there and back.

    Made by `route`.

    Attributes
    ----------
    queues : Queues
    choices : array
        [batch, sequence, k], this rank's part: the experts chosen, the first choice first.
    shares : array
        [batch, experts], of this rank's sequences: the fraction of the tokens' choices that an expert is, whether it
        takes them or not.
    kept : array
        [batch, sequence, k], of bools: whether the expert takes the token.
    sent, received : array
        How many tokens this rank exchanges with each rank along the crossed axes.
    """

    def __init__(self, queues: Queues, choices: np.ndarray, positions: np.ndarray | None) -> None:
        self.queues = queues
        grid = queues.grid
        self.choices, backend = choices, grid.backend
        self.positions = positions
        if not grid.inside:
            none = backend.from_host(np.zeros(0, np.int64))
            self.shares, self.kept = np.zeros((0, queues.experts)), np.zeros(choices.shape, np.bool_)
            self.sent = self.received = np.zeros(1, np.int64)
            self.tokens, self.by_choice, self.places = none, [(none, none)] * choices.shape[2], none
            return
        self._scan()
        self._plan_sends(backend)
        self._plan_receives(backend)

    # ------------------------------------------------------------------ queues
    def _scan(self) -> None:
        """Find the place of every token in its queue, by an exclusive scan of the counts of all runs."""
        q, choices = self.queues, self.choices
        batch, _, k = choices.shape
        runs = [q.runs(at, self.positions) for at in q.peers]
        mine = runs[self._me]
        j, b = np.arange(k)[None, None, :], np.arange(batch)[:, None, None]
        key, counted = _counted(mine, choices, q.experts)
        counts = counted.reshape(-1)
        lined = key[:, mine.order, :].ravel()
        at = np.argsort(lined, kind="stable")  # tokens of one key stay in their order
        rank = np.empty(lined.size, np.int64)
        rank[at] = np.arange(lined.size) - (np.cumsum(counts) - counts)[lined[at]]
        place = np.empty(choices.shape, np.int64)
        place[:, mine.order, :] = rank.reshape(choices.shape)
        self._line_up(runs, self._gathered(runs, counted))
        _, lined_up = self._lines[q.parts[self._me]]
        own = np.flatnonzero(lined_up[:, 0] == self._me)
        own = own[np.argsort(lined_up[own, 1])]
        if choices.size:
            place += self._starts[j, own[mine.run[None, :, None]], b, choices]
        self.places_of = place
        self.kept = place < q.capacity

    @property
    def _me(self) -> int:
        return index_of(self.queues.crossed, self.queues.grid.sizes, self.queues.grid.coords)

    def _gathered(self, runs: Sequence[Runs], mine: np.ndarray) -> list[np.ndarray]:
        """Return the counts [run, choice, sequence, expert] of all ranks that exchange tokens."""
        q = self.queues
        if len(q.peers) == 1:
            return [mine]
        grid, (_, k, _, experts) = q.grid, mine.shape
        shapes = [(len(r.first), k, q.rows(at), experts) for r, at in zip(runs, q.peers, strict=True)]
        sizes = [math.prod(s) for s in shapes]
        send = grid.backend.from_host(np.ascontiguousarray(mine, np.int32))
        got = grid.backend.empty((sum(sizes),), np.int32)
        grid.comm(q.crossed).all_gather(send, got, sizes)
        if not grid.backend.values:  # others' blocks may have other sizes
            known: dict[tuple[int, bytes], np.ndarray] = {}  # of ranks with as many tokens, in the same runs
            for r, at in zip(runs, q.peers, strict=True):
                rows, length, same = q.rows(at), len(r.run), (q.rows(at), r.run.tobytes())
                if same not in known:
                    choices = assumed_choices(grid.backend, rows * length, k, experts).reshape(rows, length, k)
                    known[same] = _counted(r, choices, experts)[1]
            return [known[q.rows(at), r.run.tobytes()] for r, at in zip(runs, q.peers, strict=True)]
        flat = np.split(grid.backend.to_host(got).astype(np.int64), np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]

    def _line_up(self, runs: Sequence[Runs], counts: Sequence[np.ndarray]) -> None:
        """Find where each run of this rank's part of the batch begins in the queues, and for every part how many tokens
        of each run this rank's experts take.

        Both are [choice, run, sequence, expert].  With them comes for every run whose it is, and which of its own.
        """
        q, mine = self.queues, self.queues.parts[self._me]
        here = q.grid.block(Layout(q.axis), (q.experts,))[0]
        self._lines: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        for part in dict.fromkeys(q.parts):
            peers = [p for p, theirs in enumerate(q.parts) if theirs == part]
            first = np.concatenate([runs[p].first for p in peers])
            who = np.array([(p, r) for p in peers for r in range(len(runs[p].first))], np.int64).reshape(-1, 2)
            order = np.argsort(first, kind="stable")
            theirs = [counts[p] for p in peers]
            each, ends = _queued([found[..., here.start : here.stop] for found in theirs], order)
            self._lines[part] = np.minimum(ends, q.capacity) - np.minimum(ends - each, q.capacity), who[order]
            if part == mine:
                every, ends = _queued(theirs, order)
                self._starts = ends - every
                self.shares = every.sum(axis=(0, 1)) / max(1, q.shape[1] * len(every))

    # ------------------------------------------------------------------ the exchange
    def _plan_sends(self, backend: Backend) -> None:
        """Find the tokens that this rank sends: by receiver, and for one receiver by expert, sequence and place."""
        q, (_, length, k) = self.queues, self.choices.shape
        of_expert = self._receivers(q.experts, q.axis)
        of_place = self._receivers(q.capacity, q.queue_cut)
        b, t, j = np.nonzero(self.kept & (of_expert[self.choices] >= 0))
        e, p = self.choices[b, t, j], self.places_of[b, t, j]
        to = of_expert[e] + of_place[p]
        order = np.lexsort((p, b, e, to))
        self.sent = np.bincount(to, minlength=len(q.peers))
        tokens, j = (b * length + t)[order], j[order]
        self.tokens = backend.from_host(tokens)
        rows = [np.flatnonzero(j == i) for i in range(k)]
        self.by_choice = [(backend.from_host(r), backend.from_host(tokens[r])) for r in rows]

    def _receivers(self, n: int, cut: Cut) -> np.ndarray:
        """Return for each of n items the part of its holder's number among the peers that this cut gives, or -1."""
        q = self.queues
        sizes, found = q.grid.sizes, np.zeros(n, np.int64)
        if not cut:
            return found
        owner = np.repeat(np.arange(span_of(cut, sizes)), cut_lengths(n, cut, sizes))
        elsewhere = np.zeros(n, np.bool_)
        for axis, at in zip(cut, np.unravel_index(owner, [sizes[a] for a in cut]), strict=True):
            if axis in q.crossed:
                found += at * span_of(q.crossed[q.crossed.index(axis) + 1 :], sizes)
            else:
                elsewhere |= at != q.grid.coords[axis]
        return np.where(elsewhere, -1, found)

    def _plan_receives(self, backend: Backend) -> None:
        """Find the places in the buffer of arriving tokens: by sender, and then by expert, sequence and place."""
        q = self.queues
        _, groups, c = q.grid.block(Layout(q.axis, q.batch_cut, q.queue_cut), q.buffer)
        senders, places, first = [], [], 0
        for taken, who in self._lines.values():
            rows = taken.shape[2]
            here = taken.transpose(3, 2, 0, 1)  # [expert, sequence, choice, run]
            counts = here.reshape(-1)
            lines = counts.size // max(1, len(who))
            sender = np.repeat(np.tile(who[:, 0], lines), counts)
            each = here.sum(axis=(2, 3)).reshape(-1)
            line = np.repeat(np.arange(each.size), each)
            p = np.arange(line.size) - np.repeat(np.cumsum(each) - each, each)
            mine = (p >= c.start) & (p < c.stop)
            expert, b = np.divmod(line, max(1, rows))
            senders.append(sender[mine])
            places.append(((expert * len(groups) + first + b) * len(c) + p - c.start)[mine])
            first += rows
        sender, place = np.concatenate(senders), np.concatenate(places)
        self.received = np.bincount(sender, minlength=len(q.peers))
        self.places = backend.from_host(place[np.lexsort((place, sender))])

    @property
    def exchange(self) -> Exchange:
        """The exchange of rows of tokens, which holds no arrays."""
        return Exchange(self.queues, tuple(self.sent.tolist()), tuple(self.received.tolist()))


class Exchange(NamedTuple):
    """The movement of tokens between the ranks that exchange them.

    Attributes
    ----------
    sent, received : tuple of int
        How many tokens this rank exchanges with each rank along the crossed axes.
    """

    queues: Queues
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def __call__(self, rows: Block, *, back: bool = False) -> Block:
        """Move rows of tokens, as sent, to rows as received; or back."""
        q = self.queues
        if len(q.peers) == 1 or not q.grid.inside:
            return rows
        out, into = (self.received, self.sent) if back else (self.sent, self.received)
        width = rows.shape[1]
        got = q.grid.backend.empty((sum(into), width), rows.dtype)
        q.grid.comm(q.crossed).all_to_all(rows, [n * width for n in out], got, [n * width for n in into])
        return got


def paired(arrays: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Return `Routing.by_choice` from its arrays one after the other."""
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def route(
    scores: DistArray, queues: Queues, top_k: int, positions: np.ndarray | None = None
) -> Routing:  # fmt: skip
    """Send every token to the experts with its highest scores.  Collective over the axes that tokens cross.

    Parameters
    ----------
    scores : DistArray
        [batch, sequence, experts], cut as the tokens, and whole in the experts.  Of equal scores the first counts.
    queues : Queues
    top_k : int
    positions : array of int, optional
        [sequence], on every rank: the place of each token in its sequence, where they lie in another order.
    """
    grid = queues.grid
    want = Layout(*queues.tokens.dims[:2], None)
    if grid.effective(scores.layout) != grid.effective(want):
        raise mismatch("route: the scores are not cut as the tokens", scores.layout, want)
    if scores.shape != (*queues.shape, queues.experts):
        raise LayoutError(f"route: scores of shape {scores.shape} for {(*queues.shape, queues.experts)}")
    if not 1 <= top_k <= queues.experts:
        raise ConfigError(f"a token goes to 1 to {queues.experts} experts, not {top_k}")
    block = scores.block
    if not grid.inside:
        return Routing(queues, np.zeros((0, 0, top_k), np.int64), positions)
    return Routing(queues, grid.backend.to_host(best(block, top_k)), positions)


def best(block: Block, k: int) -> Block:
    """Return the indices [..., k] of the k largest of the last dim, the largest first; of equal ones the first."""
    xp = namespace(block)
    found = []
    for _ in range(k):
        found.append(xp.argmax(block, axis=-1))
        taken = xp.arange(block.shape[-1]) == found[-1][..., None]
        block = xp.where(taken, block.dtype.type(-math.inf), block)
    backend, (*lead, experts) = backend_of(block), block.shape
    if not backend.values:
        return assumed_choices(backend, math.prod(lead), k, experts).reshape(*lead, k)
    return xp.stack(found, axis=-1).astype(np.int64)


def assumed_choices(backend: Any, tokens: int, k: int, experts: int) -> np.ndarray:
    """Return the choices [tokens, k] of the imagined tokens of a rank, as the backend's `WhatIf` has it."""
    routing = backend.assume("routing", "the experts that tokens are sent to")
    return in_turn(tokens, k, experts) if routing == "even" else by_load(tokens, k, experts, routing)


def in_turn(tokens: int, k: int, experts: int) -> np.ndarray:
    """Return choices [tokens, k] in turn: every expert gets as many tokens as any other, or one more.

    It is the first choice of about as many of them as the second, and so on.

    >>> in_turn(5, 2, 4).tolist()
    [[0, 1], [2, 3], [1, 0], [3, 2], [0, 1]]
    """
    given = (np.arange(tokens * k, dtype=np.int64) % experts).reshape(tokens, k)
    alike = math.gcd(k, experts)
    return _turned(given, np.arange(tokens) // (experts // alike) % alike)


def _turned(choices: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return choices [tokens, k] of which each token's begin with another one, so many further on."""
    k = choices.shape[1]
    return np.take_along_axis(choices, (np.arange(k) + by[:, None]) % k, axis=1)


def by_load(tokens: int, k: int, experts: int, load: Sequence[float]) -> np.ndarray:
    """Return choices [tokens, k] such that expert i has about the part `load[i]` of all of them.

    The choices of a token are k points, one apart, among the loads that lie side by side k long in all (systematic
    sampling; Madow 1949); where the first lies follows the golden ratio from token to token, which is even.  The tokens
    take turns in which of their points is the first choice.

    >>> np.bincount(by_load(100, 2, 3, (0.5, 0.25, 0.25)).ravel()).tolist()
    [100, 51, 49]

    Raises
    ------
    ConfigError
        If there are not as many loads as experts, or one is too large for k choices of a token that differ.
    """
    if len(load) != experts:
        raise ConfigError(f"routing assumes the load of {len(load)} experts, but the layer has {experts}")
    ends = np.cumsum(load) * (k / sum(load))
    if max(load) * k > sum(load) * (1 + 1e-9):
        raise ConfigError(
            f"routing assumes that an expert has {max(load) / sum(load):.3g} of all choices; a token that goes to {k} "
            f"experts goes to each once, which is 1/{k} at most"
        )
    first = np.arange(tokens) * (math.sqrt(5) - 1) / 2 % 1
    found = np.searchsorted(ends[:-1], first[:, None] + np.arange(k), side="right")
    return _turned(found.astype(np.int64), np.arange(tokens) % k)


def _queued(counts: Sequence[np.ndarray], order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [run, choice, sequence, expert] of several ranks as [choice, run, sequence, expert], their runs in
    this order, and how many tokens are in the queues after each."""
    each = np.concatenate(counts)[order].transpose(1, 0, 2, 3)
    flat = each.reshape(math.prod(each.shape[:2]), *each.shape[2:])
    return each, np.cumsum(flat, axis=0).reshape(each.shape)


def _counted(runs: Runs, choices: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every choice [sequence, token, k] the number of its run, rank of choice, sequence and expert, and how
    many there are of each, [run, choice, sequence, expert]."""
    batch, _, k = choices.shape
    j, b = np.arange(k)[None, None, :], np.arange(batch)[:, None, None]
    key = ((runs.run[None, :, None] * k + j) * batch + b) * experts + choices
    shape = (len(runs.first), k, batch, experts)
    return key, np.bincount(key.ravel(), minlength=math.prod(shape)).reshape(shape)
