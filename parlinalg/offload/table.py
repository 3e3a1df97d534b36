"""What a rank holds in training, in bytes, and what of it goes elsewhere so that the rest fits.

A rank holds values, gradients, optimizer states, and what the tape keeps.  Where they are more than the limit, they are
offloaded in this order until the rest fits:

1. optimizer states, which a step reads and writes once, in the order in which they lie;
2. what the tape keeps, written and read once a microbatch;
3. values, read twice a microbatch and written once a step, with their gradients.

Gradients alone, which the optimizer reads once a step, go where that is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from parlinalg.autograd import Parameter
from parlinalg.backend.halves import work_dtype
from parlinalg.nn import Module
from parlinalg.offload.agreement import worlds
from parlinalg.offload.parameters import replaceable
from parlinalg.offload.weighing import Keeps
from parlinalg.optim import Optimizer, flat
from parlinalg.parallel import GradientReducer, Prefetch

ORDER = ("optimizer", "activations", "parameters")
KINDS = (*ORDER, "gradients")
BUFFERS = 4
NOTHING = Keeps(0)


@dataclass(frozen=True)
class Table:
    """Bytes of a rank, the largest of all ranks.

    Attributes
    ----------
    values, gradients, states, activations : int
    largest : int
        The largest block of a parameter; of 16 bits, in the 32 that products and updates work in.
    block : int
        What one block of the model keeps for the backward pass, of one microbatch.
    fixed : int
        Bytes of values and gradients that stay in memory whatever is offloaded.
    stays : int
        Of activations, what stays in memory where those of blocks are offloaded.
    older : int
        Older versions of the values, of asynchronous schedules.
    moving : int
        What a pass takes besides: whole gradients and weights where parts of them rest, and what sums are formed in.
    settled : int
        Of it, what is not needed where gradients are settled one by one.
    updated : int
        Of the values, those that the rank has states of.
    first : int
        What the first step takes besides values and gradients, which it moves to where they lie side by side, a buffer
        at a time.
    """

    values: int
    gradients: int
    states: int
    activations: int = 0
    largest: int = 0
    block: int = 0
    fixed: int = 0
    stays: int = 0
    older: int = 0
    moving: int = 0
    settled: int = 0
    updated: int = 0
    first: int = 0

    @property
    def total(self) -> int:
        """All that a step holds with nothing offloaded."""
        return self.values + self.older + self.gradients + self.states + self.activations + self.moving

    def rest(self, offloaded: Iterable[str], chunk: int) -> int:
        """What stays in memory, the buffers of what is offloaded counted."""
        away = set(offloaded)
        left = self.total
        if "optimizer" in away:
            held = (BUFFERS + 1) * chunk * (self.states + self.updated)  # a chunk has the values of its states too
            left += min(0, -(-held // max(1, self.states)) - self.states)
        if "activations" in away:
            left += min(0, 3 * self.block + self.stays - self.activations)
        if "parameters" in away:
            left += min(0, 3 * self.largest + self.fixed - self.values - self.gradients - self.settled)
        elif "gradients" in away:
            left += min(0, 2 * self.largest - self.gradients - self.settled)
        return left

    def most(self, offloaded: Iterable[str], chunk: int) -> int:
        """What stays in any step, the first too."""
        away = set(offloaded)
        first = 0
        if "parameters" not in away:
            first = self.values + self.older + self.first + (0 if "gradients" in away else self.gradients)
        return max(self.rest(away, chunk), first)


def decide(
    table: Table, memory: int, movable: Iterable[str], chunk: int, given: Collection[str] = ()
) -> tuple[str, ...] | None:  # fmt: skip
    """The first of what can be moved, in `ORDER`, without which the rest fits; None if it never does.  Pure.

    What is `given` goes in any case.  What would leave no less in memory stays.

    >>> table = Table(values=40, gradients=40, states=80, activations=30, largest=4, block=5)
    >>> decide(table, 200, ORDER, chunk=1), decide(table, 120, ORDER, chunk=1), decide(table, 60, ORDER, chunk=1)
    ((), ('optimizer',), ('optimizer', 'activations', 'parameters'))
    """
    chosen = list(given)
    left = [kind for kind in ORDER if kind in set(movable) - set(given)]
    while table.most(chosen, chunk) > memory:
        if not left:
            return None
        kind = left.pop(0)
        if table.rest([*chosen, kind], chunk) < table.rest(chosen, chunk):
            chosen.append(kind)
    return tuple(chosen)


def table_of(model: Module, optimizer: Optimizer, keeps: Keeps = NOTHING) -> Table:
    """What a rank holds, the largest over all ranks of its grid.  Collective."""
    parameters = list(model.parameters())
    mine = dict.fromkeys((each.name for each in fields(Table)), 0)
    names, moves = len(optimizer.states), 0
    for p in parameters:
        dtype, more = flat.states_of(p.dtype, optimizer.master)
        value = p.block.size * p.dtype.itemsize
        part = p.block.size if p.shard is None else p.shard.stop - p.shard.start
        gradient = value if kept_whole(p) else part * p.dtype.itemsize
        mine["values"] += value
        mine["updated"] += part * p.dtype.itemsize
        mine["gradients"] += gradient
        mine["states"] += part * (names + more) * dtype.itemsize
        mine["largest"] = max(mine["largest"], p.block.size * work_dtype(p.dtype).itemsize)
        if p.shard is not None:
            mine["fixed"] += value + gradient
            continue
        moves += value
        mine["fixed"] += 0 if replaceable(p.reducer) else gradient
    mine["activations"], mine["stays"] = keeps.most, keeps.stays
    mine["block"] = keeps.block or -(-keeps.most // max(1, len(blocks_of(model))))
    mine["older"] = max(0, keeps.versions - 1) * mine["values"]
    reducers = {id(p.reducer): p.reducer for p in parameters if isinstance(p.reducer, GradientReducer)}
    gatherers = {id(p.gatherer): p.gatherer for p in parameters if isinstance(p.gatherer, Prefetch)}
    mine["moving"] = sum(r.moving for r in reducers.values()) + sum(f.moving for f in gatherers.values())
    settled = sum(r.moving for r in reducers.values() if replaceable(r))
    mine["settled"] = max(0, settled - 3 * mine["largest"] // 4)  # one gradient's sum in 16 bits remains
    bucket = max((r.limits[1] for r in reducers.values()), default=0) + mine["largest"]
    mine["first"] = min(moves, max(flat.BUFFER, bucket))
    rows = list(mine.values())
    for comm in worlds(p.grid for p in parameters):
        rows = [max(column) for column in zip(*comm.share(rows), strict=True)]
    return Table(*rows)


def kept_whole(parameter: Parameter) -> bool:
    """Whether a parameter's gradient is whole on this rank between steps."""
    reducer = parameter.reducer
    return parameter.shard is None or (isinstance(reducer, GradientReducer) and reducer.keeps(parameter))


def blocks_of(model: Module) -> list[Module]:
    """The modules whose activations are put away together: the layers of a transformer, else the members.

    Of a model in a pipeline those of this rank's stages, without the model's ends where there are others.
    """
    if hasattr(model, "chunks"):
        layers = [layer for stage in model.chunks for layer in stage.layers]
        inner = [layer for layer in layers if not layer.end] or layers
        modules = {id(m): m for layer in inner for m in layer.modules}
        return [m for m in modules.values() if any(isinstance(p, Parameter) for p in m.parameters())]
    blocks = list(_members(getattr(model, "blocks", None) if hasattr(model, "blocks") else model))
    return [b for b in blocks if any(isinstance(p, Parameter) for p in b.parameters())] or [model]


def _members(module: Any) -> Iterator[Module]:
    with suppress(TypeError):
        yield from (m for m in module if isinstance(m, Module))
        return
    yield from module._modules.values()
