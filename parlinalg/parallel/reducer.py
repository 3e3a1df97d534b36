"""The gradient reducer: gradients of parameters summed in buckets, while the backward pass runs.

A gradient arrives with its parameter's cuts, partial over some of the axes that do not cut it: data parallelism is the
case where that set is the data axis.  Gradients partial over the same axes share a flat buffer, cut into buckets in the
order in which they arrive; a full bucket's all-reduce starts at once, and the walk back goes on (Li et al., "PyTorch
Distributed: experiences on accelerating data parallel training", 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter
from parlinalg.comm import Handle
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout
from parlinalg.redistribute import redistribute

Block = Any
MIB = 1 << 20


@dataclass(eq=False)
class Slot:
    """A parameter's place in a flat buffer of gradients."""

    parameter: Parameter
    bucket: Bucket
    gradient: DistArray


@dataclass(eq=False)
class Bucket:
    """Gradients that are all-reduced together, side by side in a flat buffer."""

    grid: Grid
    axes: Cut
    data: Block
    slots: list[Slot] = field(default_factory=list)
    missing: int = 0


class GradientReducer:
    """Settles the gradients of parameters, and keeps them as views into flat buffers.

    The first backward pass shows over which axes each gradient is partial, and in which order they arrive; the buckets
    are made at its end.  From the second on a bucket's nonblocking all-reduce starts as soon as its last gradient has
    arrived and the buckets before it have started: in the same order on every rank.  A parameter that a backward pass
    does not reach contributes zeros.

    Parameters
    ----------
    parameters : iterable of Parameter
        They take this reducer as theirs.
    first_bucket, bucket : int
        Bytes of the first bucket, small so that communication starts early, and of the others.

    Raises
    ------
    ConfigError
        If a parameter has a reducer already.

    Attributes
    ----------
    buckets : list of Bucket
        In the order in which they start.
    """

    def __init__(self, parameters: Iterable[Parameter], first_bucket: int = MIB, bucket: int = 25 * MIB) -> None:
        self.parameters = list({id(p): p for p in parameters}.values())
        for p in self.parameters:
            if p.reducer is not None:
                raise ConfigError(f"parameter {p.name!r} has a gradient reducer already; detach() that one first")
            p.reducer = self
        self.limits = (first_bucket, bucket)
        self.buckets: list[Bucket] = []
        self._axes: dict[int, Cut] = {}
        """For each parameter the axes over which its gradient has been partial."""
        self._slots: dict[int, Slot] = {}
        self._early: dict[int, tuple[Block, Layout]] = {}
        """Gradients that arrived before the buckets were made."""
        self._arrived: dict[int, Parameter] = {}
        self._started = 0
        self._pending: list[Handle] = []
        self._outdated = True

    def detach(self) -> None:
        """Leave the parameters: the backward pass settles their gradients one by one again."""
        for p in self.parameters:
            if p.reducer is self:
                p.reducer = None

    def ready(self, parameter: Parameter, block: Block, layout: Layout) -> None:
        """Take a gradient whose last term has arrived."""
        self._arrived[id(parameter)] = parameter
        seen = self._axes.get(id(parameter), ())
        new = tuple(a for a in layout.partial if a not in seen and parameter.grid.sizes[a] > 1)
        if new:
            self._axes[id(parameter)], self._outdated = tuple(sorted((*seen, *new))), True
        slot = self._slots.get(id(parameter))
        if slot is None:
            self._early[id(parameter)] = (block, layout)
            return
        self._place(slot, block, layout)
        self._start(complete_only=True)

    def poll(self) -> None:
        """Drive pending communication on: MPI progresses only within its calls."""
        while self._pending and self._pending[0].test():
            self._pending.pop(0)

    def finish(self) -> None:
        """Settle all gradients, those of parameters that were not reached as zeros."""
        if not self._slots:
            self._make_buckets()
        for p in self.parameters:
            slot = self._slots[id(p)]
            if id(p) in self._early:
                self._place(slot, *self._early.pop(id(p)))
            elif id(p) not in self._arrived:
                self._unreached(slot)
        self._start(complete_only=False)
        for handle in self._pending:
            handle.wait()
        self._pending.clear()
        if self._outdated:
            self._make_buckets()
        self._started = 0
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)

    def _unreached(self, slot: Slot) -> None:
        """What a parameter adds that this pass did not reach: zeros, or what `no_sync` left."""
        p, held = slot.parameter, slot.parameter.grad
        if held is not None and held.layout.partial:
            p.grad = None
            self._place(slot, held.block, held.layout)
        else:
            zeros = p.grid.backend.zeros(slot.gradient.block.shape, p.dtype)
            self._place(slot, zeros, p.layout)

    def _place(self, slot: Slot, block: Block, layout: Layout) -> None:
        """Add a gradient to its place, as a term that is partial over the bucket's axes."""
        p, axes, grid = slot.parameter, slot.bucket.axes, slot.bucket.grid
        view = slot.gradient.block
        extra = [a for a in layout.partial if a not in axes and grid.sizes[a] > 1]
        if extra:  # an axis seen for the first time: from the next pass on its bucket has it
            rest = layout.without(extra)
            block, layout = redistribute(block, layout, rest, p.shape, grid), rest
        held = p.grad
        if held is not None:
            if held is not slot.gradient:
                view[...] = held.block
            _once(view, axes, grid)
        if any(grid.coords.get(a) for a in axes if a not in layout.partial):  # a whole gradient counts once
            if held is None:
                view[...] = 0
        elif held is None:
            view[...] = block
        else:
            view += block
        p.grad = slot.gradient
        slot.bucket.missing -= 1

    def _start(self, *, complete_only: bool) -> None:
        """Start the all-reduces of buckets in their order, with `complete_only` to the first that lacks one."""
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            if complete_only and bucket.missing:
                return
            self._started += 1
            if bucket.axes and bucket.grid.inside:
                self._pending.append(bucket.grid.comm(bucket.axes).all_reduce(bucket.data, wait=False))

    def _make_buckets(self) -> None:
        """Flat buffers for all gradients; those in buffers already move."""
        groups: dict[tuple[int, Cut, str], list[Parameter]] = {}
        for p in (*self._arrived.values(), *(p for p in reversed(self.parameters) if id(p) not in self._arrived)):
            groups.setdefault((id(p.grid), self._axes.get(id(p), ()), p.dtype.str), []).append(p)
        place = {id(p): i for i, p in enumerate(self._arrived.values())}
        old, self._slots, self.buckets = self._slots, {}, []
        for (_, axes, _), group in groups.items():
            self._make_flat(group, axes, old)
        self.buckets.sort(key=lambda b: max(place.get(id(s.parameter), len(place)) for s in b.slots))
        self._outdated = False

    def _make_flat(self, group: list[Parameter], axes: Cut, old: dict[int, Slot]) -> None:
        grid = group[0].grid
        data = grid.backend.zeros(sum(p.block.size for p in group), group[0].dtype)
        first, limit = self.limits
        start = at = 0
        waiting: list[Parameter] = []
        for i, p in enumerate(group):
            waiting.append(p)
            at += p.block.size
            if (at - start) * data.itemsize >= (limit if start else first) or i == len(group) - 1:
                self._fill(Bucket(grid, axes, data[start:at], missing=len(waiting)), waiting, old)
                start, waiting = at, []

    def _fill(self, bucket: Bucket, parameters: list[Parameter], old: dict[int, Slot]) -> None:
        at = 0
        for p in parameters:
            view = bucket.data[at : at + p.block.size].reshape(p.block.shape)
            at += p.block.size
            slot = Slot(p, bucket, DistArray(view, p.shape, p.layout.with_partial(()), p.grid))
            if id(p) in old and p.grad is old[id(p)].gradient:
                view[...] = p.grad.block
                p.grad = slot.gradient
            bucket.slots.append(slot)
            self._slots[id(p)] = slot
        self.buckets.append(bucket)


def _once(view: Block, axes: Cut, grid: Grid) -> None:
    """Make a settled gradient a term of a sum over these axes: it counts on coordinate 0."""
    if any(grid.coords.get(a) for a in axes):
        view[...] = 0
