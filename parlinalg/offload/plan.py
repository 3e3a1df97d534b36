"""What is offloaded so that a rank's memory suffices.

A rank holds values, gradients, optimizer states, and what the tape keeps.  Where they are more than the limit, they are
offloaded in this order until the rest fits:

1. optimizer states, which a step reads and writes once, in the order in which they lie;
2. what the tape keeps, written and read once a microbatch;
3. values, read twice a microbatch and written once a step, with their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.autograd import Parameter, Tensor
from parlinalg.autograd.saved import saved
from parlinalg.backend.kernels_optim import work_dtype
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.nn import Module
from parlinalg.offload.activations import OffloadedActivations
from parlinalg.offload.agreement import worlds
from parlinalg.offload.disk_states import DiskStates
from parlinalg.offload.parameters import OffloadedParameters, replaceable
from parlinalg.offload.states import HostStates, bytes_of
from parlinalg.offload.weighing import Keeps
from parlinalg.optim import Optimizer, flat
from parlinalg.parallel import GradientReducer, Prefetch
from parlinalg.units import format_bytes

ORDER = ("optimizer", "activations", "parameters")
PLACES = ("disk", "host")
BUFFERS = 4
MOST_CHUNK, LEAST_CHUNK = 1 << 23, 1 << 12
NOTHING = Keeps(0)
HINT = '; with path="a folder on a disk" the rest would go there'


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
        What the first step takes besides values and gradients, which it moves to where they lie side by side.
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
        return left

    def most(self, offloaded: Iterable[str], chunk: int) -> int:
        """What stays in any step, the first too."""
        away = set(offloaded)
        first = 0 if "parameters" in away else self.values + self.older + self.gradients + self.first
        return max(self.rest(away, chunk), first)


def decide(table: Table, memory: int, movable: Iterable[str], chunk: int) -> tuple[str, ...] | None:
    """The first of what can be moved, in `ORDER`, without which the rest fits; None if it never does.  Pure.

    What would leave no less in memory stays.

    >>> table = Table(values=40, gradients=40, states=80, activations=30, largest=4, block=5)
    >>> decide(table, 200, ORDER, chunk=1), decide(table, 120, ORDER, chunk=1), decide(table, 60, ORDER, chunk=1)
    ((), ('optimizer',), ('optimizer', 'activations', 'parameters'))
    """
    chosen: list[str] = []
    left = [kind for kind in ORDER if kind in set(movable)]
    while table.most(chosen, chunk) > memory:
        if not left:
            return None
        kind = left.pop(0)
        if table.rest([*chosen, kind], chunk) < table.rest(chosen, chunk):
            chosen.append(kind)
    return tuple(chosen)


@dataclass
class OffloadPlan:
    """What is offloaded, to where.

    Attributes
    ----------
    table : Table
    places : dict of str to str
        "optimizer", "activations" and "parameters", those that are offloaded: "disk" or "host".
    memory : int or None
        The limit.
    path : Path or None
    chunk : int
        Bytes of a chunk of states.
    there : tuple of str
        What was to go to host memory and is there already, since NumPy computes in it.
    """

    model: Module
    optimizer: Optimizer
    table: Table
    places: dict[str, str]
    memory: int | None
    path: Path | None
    chunk: int
    there: tuple[str, ...] = ()

    def __str__(self) -> str:
        t = self.table
        held = (
            f"a rank holds {format_bytes(t.values)} of values, "
            + (f"{format_bytes(t.older)} of older versions of them, " if t.older else "")
            + f"{format_bytes(t.gradients)} of gradients, {format_bytes(t.states)} of optimizer states"
            + (f", {format_bytes(t.activations)} of activations" if t.activations else "")
            + (f", {format_bytes(t.moving)} on the way in a pass" if t.moving else "")
        )
        limit = "" if self.memory is None else f" for a limit of {format_bytes(self.memory)}"
        there = f"; {' and '.join(self.there)} rest in host memory in any case, since NumPy computes there"
        there *= bool(self.there)
        if not self.places:
            return f"nothing is offloaded{limit}: {held}{there}"
        what = ", ".join(f"{kind} to {self._where(place)}" for kind, place in self.places.items())
        return f"offloaded{limit}: {what}; {held}; {format_bytes(t.rest(self.places, self.chunk))} stay{there}"

    def _where(self, place: str) -> str:
        return "host memory" if place == "host" else f"{self.path}"

    def apply(self) -> Offload:
        """Do it, before the first step.  Collective; close what is returned when the training is over.

        Raises
        ------
        OffloadError
            On all ranks, those of other stages too, if a folder cannot be written or a disk is too small on any.
        """
        made = Offload(self)
        place = getattr(self.model, "place", None)
        everyone = [] if place is None else [place.world]
        try:
            together(everyone, made.start, "offloading its stages", (ConfigError, OffloadError))
        except BaseException:
            made.close()
            raise
        return made


@dataclass
class Offload:
    """What was offloaded; a context manager."""

    plan: OffloadPlan
    states: DiskStates | HostStates | None = None
    activations: OffloadedActivations | None = None
    parameters: OffloadedParameters | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Move everything that is to be moved."""
        plan = self.plan
        folder = {kind: plan.path if place == "disk" else None for kind, place in plan.places.items()}
        if "parameters" in plan.places:
            self.parameters = OffloadedParameters(folder["parameters"])
            self._stack.callback(self.parameters.close)
            self.parameters.place(plan.model.parameters())
        if "activations" in plan.places:
            window = max(LEAST_CHUNK, plan.table.block) if plan.memory is not None else "64MiB"
            blocks = blocks_of(plan.model)
            if blocks:  # a stage may have none
                self.activations = OffloadedActivations(folder["activations"], pending=window, ahead=window)
                self._stack.callback(self.activations.close)
                self.activations.place(blocks)
        if "optimizer" in plan.places:
            on_disk = plan.places["optimizer"] == "disk" and plan.path is not None
            states = DiskStates(plan.path, chunk=plan.chunk) if on_disk and plan.path else HostStates(plan.chunk)
            self._stack.callback(states.close)
            self.states = states
            plan.optimizer.place(states)

    def close(self) -> None:
        """End the threads and take the files away; values come back into memory, optimizer states are gone."""
        self._stack.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan(
    model: Module, optimizer: Optimizer, *, memory: SupportsIndex | str | None = None, path: str | Path | None = None,
    kept: Keeps | SupportsIndex | str = 0, **places: str | None,
) -> OffloadPlan:  # fmt: skip
    """Decide what is offloaded.  Collective; nothing is moved until `apply()`, before the optimizer's first step.

    The ranks of a pipeline's stage decide as one, those of another for themselves.

    Parameters
    ----------
    model : Module
        Initialized.
    optimizer : Optimizer
    memory : int or str, optional
        What values, gradients, states and activations of a rank may take, such as "4GiB"; what is above goes to `path`,
        or to host memory from a GPU.  The interpreter and its libraries are not counted.
    path : str or Path, optional
        A folder on a disk, of this run alone.
    kept : Keeps, int or str
        What the tape keeps in a step: `kept(loss)` after a forward pass, in bytes; in a pipeline `Worker.keeps`.
    optimizer_states, activations, parameters : {"disk", "host"}, optional
        Offloaded in any case.

    Raises
    ------
    ConfigError
        If the limit is too low even with everything offloaded: it names the least that would do.  In a pipeline on the
        ranks of all stages, if it is too low on any.
    """
    chosen = _chosen(places)
    cpu = all(p.grid.backend.xp is np for p in model.parameters())
    folder = None if path is None else Path(path)
    for kind, place in chosen.items():
        if place == "disk" and folder is None:
            raise ConfigError(f"offload: {kind} to the disk needs path=, a folder that every rank may write")
    keeps = kept if isinstance(kept, Keeps) else Keeps(bytes_of("kept", kept))
    table = table_of(model, optimizer, keeps)
    limit = None if memory is None else bytes_of("memory", memory)
    if limit is not None:
        where = "disk" if folder is not None else "host" if not cpu else None
        rests = not keeps.versions and table.fixed < table.values + table.gradients
        movable = {k for k in ORDER if where and (k != "parameters" or rests)} | set(chosen)
        found = decide(table, limit, movable, chunk_of(limit))
        _enough(model, table, limit, movable, found is None, "" if where else HINT)
        for kind in found or ():
            chosen.setdefault(kind, where or "host")
    there = tuple(kind for kind in ORDER if cpu and chosen.get(kind) == "host")
    ordered = {kind: chosen[kind] for kind in ORDER if kind in chosen and kind not in there}
    return OffloadPlan(model, optimizer, table, ordered, limit, folder, chunk_of(limit), there)


def chunk_of(limit: int | None) -> int:
    """Bytes of a chunk of states."""
    return MOST_CHUNK if limit is None else min(MOST_CHUNK, max(LEAST_CHUNK, limit // (32 * BUFFERS)))


def _enough(model: Module, table: Table, limit: int, movable: set[str], short: bool, hint: str) -> None:
    """Raise a ConfigError on the ranks of all stages if the limit is too low on any.  Collective."""
    least, text = 0, ""
    if short:
        least = table.most(movable, chunk_of(limit))
        while (more := table.most(movable, chunk_of(least))) > least:  # larger limits have larger chunks
            least = more
        text = (
            f"memory={format_bytes(limit)} is too little: a rank{_stages(model)} holds {format_bytes(table.total)}, "
            f"and {format_bytes(least)} with all offloaded that can be; the least limit that works is {least} bytes"
            f"{hint}"
        )
    place = getattr(model, "place", None)
    told = [(least, text)] if place is None else place.world.share((least, text))
    if any(text for _, text in told):
        raise ConfigError(max(told, key=lambda each: each[0])[1])


def _stages(model: Module) -> str:
    """Of a model in a pipeline, which stages a rank has."""
    numbers = [str(stage.number) for stage in getattr(model, "chunks", ())]
    return f" of stage{'s' * (len(numbers) > 1)} {' and '.join(numbers)}" if numbers else ""


def _chosen(places: dict[str, str | None]) -> dict[str, str]:
    chosen = {}
    for key, place in places.items():
        kind = "optimizer" if key == "optimizer_states" else key
        if kind not in ORDER:
            raise ConfigError(f"offload: there is no {key!r} to offload; there are {', '.join(ORDER)}")
        if place is not None:
            if place not in PLACES:
                raise ConfigError(f"offload: {kind} goes to 'disk' or 'host', not to {place!r}")
            chosen[kind] = place
    return chosen


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
        moves += value  # a buffer at a time, but buckets are made all at once
        mine["first"] += value if p.reducer is not None and p.grid.size > 1 else 0
        mine["fixed"] += 0 if replaceable(p.reducer) else gradient
    mine["activations"], mine["stays"] = keeps.most, keeps.stays
    mine["block"] = keeps.block or -(-keeps.most // max(1, len(blocks_of(model))))
    mine["older"] = max(0, keeps.versions - 1) * mine["values"]
    reducers = {id(p.reducer): p.reducer for p in parameters if isinstance(p.reducer, GradientReducer)}
    fetchers = {id(p.fetcher): p.fetcher for p in parameters if isinstance(p.fetcher, Prefetch)}
    mine["moving"] = sum(r.moving for r in reducers.values()) + sum(f.moving for f in fetchers.values())
    settled = sum(r.moving for r in reducers.values() if replaceable(r))
    mine["settled"] = max(0, settled - 3 * mine["largest"] // 4)  # one gradient's sum in 16 bits remains
    mine["first"] = max(mine["first"], min(moves, max(flat.BUFFER, mine["largest"])))
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


def kept(loss: Tensor) -> int:
    """The bytes that the backward pass from a loss holds on this rank."""
    return sum(row.nbytes for row in saved(loss))
