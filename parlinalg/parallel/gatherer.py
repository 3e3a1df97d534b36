"""Weights that rest cut, gathered a block ahead of use and dropped after: ZeRO's stage 3.

A weight that rests cut by an axis that replicates it at work (`Scheme.with_weights_cut`) is gathered for each product,
in the forward pass and again in the backward pass.  Here the gathers of the next block's weights are in flight while
this block computes (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020;
the order is recorded as in Zhao et al., "PyTorch FSDP", 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from parlinalg import tunables
from parlinalg.autograd import Parameter
from parlinalg.autograd.gradients import GradientAccumulator
from parlinalg.autograd.tape import Node, tracing, walking
from parlinalg.comm.base import reduction_work
from parlinalg.comm.group import Group
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import AxisSpec, Cut, Layout, as_cut, span_of
from parlinalg.nn import Module, ModuleDict, ModuleList, Sequential
from parlinalg.nn.init import Declared
from parlinalg.nn.layer import layers_of
from parlinalg.parallel.buckets import largest
from parlinalg.parallel.handlers import ACCUMULATE
from parlinalg.redistribute import Move, redistribute, start

Block = Any


class Want(NamedTuple):
    """A parameter at work; the number is the parameter's place in the model."""

    number: int
    work: Layout


class Position(NamedTuple):
    """The position of a pass: its block, and the one before."""

    backward: bool
    before: int
    block: int


@dataclass(eq=False)
class Visit:
    """The weights that were asked for when a pass was at a place, in their order, and where it went from there."""

    wants: tuple[Want, ...] = ()
    then: Position | None = None


class WeightGatherer:
    """Brings a model's weights to work: those of the next block while this one computes, of two blocks at most at once.

    The first training step records which weights each block asks for and which block follows, in the forward and in the
    backward pass; each of its gathers is awaited.  From the second step on, when a block asks for its first weight, the
    gathers of the next block's start, nonblocking and in one order on all ranks.  What is asked for is checked against
    the record: where it differs, gathers in flight are awaited and dropped, weights are gathered one by one, and the
    record is corrected; the program is the same on all ranks, so all of them do that together.

    The gathers of one block over the same axes, in one dtype, are one call, as FSDP's are, which gathers a block's flat
    parameter: a ring of p ranks takes the latency of p - 1 messages once.  Between GPUs these calls form one of NCCL's
    groups.  Elsewhere weights have to be packed for it, and only those are of which each rank has at most
    `tunables.GROUPED_PIECE` bytes: a larger one has a call of its own, where it is gathered in place.

    A weight is dropped when the last product of the block that asks for it in this pass is done, also where a block is
    recomputed and asks twice.  Nothing is gathered ahead beyond the end of a backward pass, after which weights change.
    Their gradients' reduce-scatters are started and not awaited, at most one block's bytes at once.  They wait for each
    other, to start as one call when they have half of these bytes or the pass leaves the block: two calls a block.

    Parameters
    ----------
    model : Module
        Its parameters take this as their weight gatherer.
    blocks : iterable of Module, optional
        The parts whose weights are gathered together; by default the layers that the model lists by `layers()`, and of
        a model that lists none its members, those in a `Sequential`, `ModuleList` or `ModuleDict` one by one.  A
        parameter of two of them counts with the first, one of none is a block of its own.
    axes : str or tuple of str
        Axes by which weights of the model are to rest cut, to be checked.
    accumulate : {"reduce-scatter", "whole"}
        What microbatches within `no_sync` do: reduce-scatter each one's gradients, or hold them whole until the last,
        as `ZeRO` does with stage 2.

    Raises
    ------
    ConfigError
        If a parameter has a weight gatherer already, or no weight of the model rests cut by one of these axes.

    Attributes
    ----------
    limit : int
        Bytes of the largest block's weights at work, as far as they are known; the same on all ranks.
    missed : int
        How often what was gathered ahead was not what was asked for.
    """

    def __init__(
        self, model: Module, blocks: Iterable[Module] | None = None, *, axes: AxisSpec = (),
        accumulate: str = "reduce-scatter",
    ) -> None:  # fmt: skip
        self.parameters = list(model.parameters())
        if accumulate not in ACCUMULATE:
            raise ConfigError(f"gradients are accumulated by {' or '.join(map(repr, ACCUMULATE))}, not {accumulate!r}")
        self.axes = as_cut(axes)
        check_cut(self.parameters, self.axes)
        taken = [p.name for p in self.parameters if p.storage.gatherer is not None]
        if taken:
            raise ConfigError(f"parameter {taken[0]!r} has a weight gatherer already; detach() that one first")
        parts = _blocks(model) if blocks is None else [(b,) for b in blocks]
        self.block_of: dict[int, int] = {}
        self.number: dict[int, int] = {id(p): i for i, p in enumerate(self.parameters)}
        for i, modules in enumerate(parts):
            for p in (p for module in modules for p in module.parameters()):
                self.block_of.setdefault(self.number[id(p)], i)
        for i in range(len(self.parameters)):
            self.block_of.setdefault(i, len(parts) + i)
        self.known: dict[Position, Visit] = {}
        self.whole = accumulate == "whole"
        self.kept: dict[int, tuple[Node, GradientAccumulator]] = {}
        self.scatters = Group()
        self.limit = self._packed = 0
        self.missed = 0
        self._place: Position | None = None
        self._seen: list[Want] = []
        self._learning = self._retained = False
        self._moves: dict[Want, Move] = {}
        """Gathers in flight that the current layer will ask for."""
        self._ahead: tuple[Position | None, dict[Want, Move]] = (None, {})
        """The next place, and the gathers in flight for it."""
        self._held: dict[Want, Block] = {}
        """Gathered weights that the current layer will ask for again."""
        self._calls: dict[tuple[Want, ...], int] = {}
        """The calls by which a block's weights are gathered together."""
        self._grids: list[Grid] = list({id(p.grid): p.grid for p in self.parameters}.values())
        for p in self.parameters:
            p.storage.gatherer = self
        for grid in self._grids:
            grid.polled.append(self)

    def detach(self) -> None:
        """Leave the parameters: each product gathers its weight again.  Collective where gathers are in flight."""
        self._forget()
        for p in self.parameters:
            if p.storage.gatherer is self:
                p.storage.gatherer = None
        for grid in self._grids:
            grid.polled[:] = [each for each in grid.polled if each is not self]

    def gather(self, parameter: Parameter, work: Layout) -> Block:
        """Return the parameter's block at work.  Collective; all ranks ask for the same in the same order."""
        want = Want(self.number[id(parameter)], work)
        block, backward = self.block_of[want.number], walking() is not None
        if self._place is None or (self._place.backward, self._place.block) != (backward, block):
            self.enter(backward, block)
        self._seen.append(want)
        found = self._held.get(want)
        if found is None:
            move = self._moves.pop(want, None)
            if move is None and self._moves:  # not what the record says
                self._forget()
            found = self._gather(want) if move is None else move.wait()
        if self._again(want):
            self._held[want] = found
        else:
            self._held.pop(want, None)
        return found

    @property
    def first_gathers(self) -> int:
        """The calls that gather for the first block of a forward pass, after a backward pass, as far as it is known."""
        first = next((v.wants for at, v in self.known.items() if not at.backward and at.before < 0), ())
        return self._calls.get(first, len(set(first)))

    @property
    def ahead(self) -> bool:
        """True if gathers are in flight for the next block."""
        return bool(self._ahead[1])

    @property
    def transient_bytes(self) -> int:
        """The most bytes that a pass takes: two layers' gathered weights, one layer's gradients on their way to where
        they are stored, and the parts of them that arrive; what is packed for one call counts twice.

        As far as `limit` is known, or by the axes that were named.
        """
        blocks, packed = Counter[int](), Counter[int]()
        for number, p in enumerate(self.parameters):
            nbytes, block = self.at_work([p]), self.block_of[number]
            blocks[block] += nbytes
            packed[block] += _packed(p, nbytes)
        most = max(self.limit, *blocks.values(), 0)
        summing = max((reduction_work(most, p.dtype, scatter=True) for p in self.parameters), default=0)
        most += max(self._packed, *packed.values(), 0)
        return 3 * most + summing + most // 2 + self.whole * blocks.total()

    def at_work(self, parameters: Iterable[Parameter | Declared]) -> int:
        """Return the bytes at work of weights, of this model or another, that rest cut by the axes that were named.

        What these axes cut of experts, the dims before those of a product, stays cut.
        """
        found = 0
        for p in {id(p): p for p in parameters}.values():
            axes = {a for a in self.axes if p.grid.sizes.get(a, 1) > 1}
            apart = (p.matrix or (0,))[0]
            work = Layout(*p.layout.dims[:apart], *p.layout.without(axes).dims[apart:])
            found += largest(p, work) if work != p.layout else 0
        return found

    def retain(self) -> None:
        """Keep the weights of the current layer for its next pass, until `drop` or another layer."""
        self._retained = True

    def drop(self) -> None:
        """Drop the weights that are kept for a later product of this layer; that one gathers them again."""
        self._held.clear()
        self._retained = False

    def poll(self) -> None:
        """Progress pending gathers: MPI progresses only within its calls."""
        for moves in (self._moves, self._ahead[1]):
            for move in moves.values():
                if not move.test():
                    return

    # ------------------------------------------------------------------ one block after the other
    def enter(self, backward: bool, block: int) -> None:
        """Enter another layer: take over the gathers in flight for it, and start the next layer's gathers."""
        last = self._place
        after_walk = last is not None and last.backward and not backward
        place = Position(backward, -1 if last is None or after_walk else last.block, block)
        self.scatters.start()
        self._leave(None if after_walk else place)
        self._place, self._seen, self._learning = place, [], tracing() or backward
        goal, moves = self._ahead
        if goal == place:
            self._moves, self._ahead = moves, (None, {})
        elif moves:
            del moves  # nothing holds what was gathered in vain while other weights are gathered
            self._forget()
        visit = self.known.get(place)
        if visit is None:
            return
        if not self._moves:
            self._moves = self.begin(visit.wants)
        then = visit.then
        if then is not None and then in self.known and (self._learning or not then.backward):
            self._ahead = then, self.begin(self.known[then].wants)

    def _leave(self, then: Position | None) -> None:
        """Record the visit that ends."""
        self.drop()
        if self._moves:
            self._forget()
        if self._place is None:
            return
        if self._learning:
            visit = self.known.setdefault(self._place, Visit())
            visit.wants = tuple(self._seen)
            visit.then = then
            each = [(self.parameters[want.number], self._nbytes(want)) for want in set(visit.wants)]
            self.limit = max(self.limit, sum(nbytes for _, nbytes in each))
            self._packed = max(self._packed, sum(_packed(p, nbytes) for p, nbytes in each))

    def _again(self, want: Want) -> bool:
        """Return True if the record says that this block will ask for this once more, or its weights are retained."""
        visit = self.known.get(self._place) if self._place is not None else None
        return visit is not None and (self._retained or visit.wants.count(want) > self._seen.count(want))

    def _forget(self) -> None:
        """Await the gathers in flight, and drop them."""
        self.missed += bool(self._moves or self._ahead[1])
        moves, (_, ahead) = self._moves, self._ahead
        self._moves, self._ahead = {}, (None, {})
        for move in (*moves.values(), *ahead.values()):
            move.wait()

    # ------------------------------------------------------------------ gathers
    def begin(self, wants: Sequence[Want]) -> dict[Want, Move]:
        """Start the gathers of a block's weights."""
        with Group() as group:
            moves = {want: self._gather(want, group) for want in dict.fromkeys(wants)}
            joined = len(group)
        self._calls[tuple(wants)] = len(moves) - joined + group.calls
        return moves

    def _gather(self, want: Want, group: Group | None = None) -> Any:
        """Gather a weight, and wait for it; with a group start to, as soon as the group does."""
        p = self.parameters[want.number]
        if group is None:
            return redistribute(p.block, p.layout, want.work, p.shape, p.grid, order=p.data.order)
        return start(p.block, p.layout, want.work, p.shape, p.grid, order=p.data.order, group=group)

    def _nbytes(self, want: Want) -> int:
        return largest(self.parameters[want.number], want.work)


def _packed(parameter: Parameter, nbytes: int) -> int:
    """Return how many of a weight's bytes at work are packed with those of others, for one call: all or none."""
    grid = parameter.grid
    most = tunables.GROUPED_PIECE * span_of(parameter.layout.cut_axes, grid.sizes)
    return nbytes if nbytes <= most and grid.everyone.packs else 0


def dropped(passes: Sequence[tuple[bool, int]]) -> Counter[tuple[bool, int]]:
    """Return how often a step starts the gathers of a pass's first block in vain.  Pure.

    While a pass is in its last block, the gathers of the pass start that followed it the last time; none do if that was
    a forward pass after a backward pass.  Where another pass is next in a pipeline's order, they are dropped.

    Parameters
    ----------
    passes : sequence of (bool, int)
        Those of a rank in a step, in their order: True for a backward pass, and the number of its chunk.

    Examples
    --------
    >>> forward, backward = (False, 0), (True, 0)
    >>> dropped([forward, backward] * 3)
    Counter()
    >>> dropped([forward, forward, backward, backward])
    Counter({(True, 0): 2, (False, 0): 1})
    """
    then: dict[tuple[bool, int], tuple[bool, int] | None] = {}
    found: Counter[tuple[bool, int]] = Counter()
    for step in range(3):
        for i, one in enumerate(passes):
            if (before := passes[i - 1] if step or i else None) is None:
                continue
            if step == 2 and (goal := then.get(before)) not in (None, one):
                found[goal] += 1
            then[before] = None if before[0] and not one[0] else one
    return found


def _blocks(model: Module) -> list[tuple[Module, ...]]:
    """Return the modules of each block: those of the layers that the model lists, else its members, and of members that
    are lists or dicts of modules theirs.
    """
    layers = layers_of(model)
    if layers is not None:
        return [layer.modules for layer in layers]
    found: list[tuple[Module, ...]] = []
    for member in model._modules.values():
        found += _blocks(member) if type(member) in (ModuleList, ModuleDict, Sequential) else [(member,)]
    return found


def rest_cut(parameters: Iterable[Parameter], axis: str) -> bool:
    """Return True if some of the parameters rest cut by an axis."""
    return any(p.layout.where(axis) is not None for p in parameters)


def check_cut(parameters: Iterable[Parameter], axes: Cut) -> None:
    """Raise a ConfigError unless some of the parameters rest cut by each of these axes."""
    each = list(parameters)
    for axis in axes:
        if not rest_cut(each, axis):
            raise ConfigError(
                f"ZeRO's stage 3 over {axis!r}: no weight of this model rests cut by it; make the model with "
                f"scheme.with_weights_cut({axis!r})"
            )
