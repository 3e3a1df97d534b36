"""The decision what to offload so that the rest fits into a limit of memory.

A rank holds values, gradients, optimizer states, and what the tape keeps (see `parlinalg.parallel.memory`).  Where they
are more than the limit, they are offloaded in this order until the rest fits:

1. optimizer states, which a step reads and writes once, in the order in which they lie;
2. what the tape keeps, written and read once a microbatch;
3. values, read twice a microbatch and written once a step, with their gradients.

Gradients alone, which the optimizer reads once a step, go where that is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import SupportsIndex

from parlinalg.autograd import Tensor
from parlinalg.autograd.saved import saved
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError, ValuesNeeded
from parlinalg.nn import Module
from parlinalg.offload.activations import WINDOW, OffloadedActivations
from parlinalg.offload.disk import Closing
from parlinalg.offload.disk_states import DiskStates
from parlinalg.offload.parameters import OffloadedParameters
from parlinalg.offload.probe import blocks_of
from parlinalg.offload.states import HostStates, bytes_of
from parlinalg.optim import Optimizer
from parlinalg.parallel.memory import ActivationMemory, MemoryTable, estimate
from parlinalg.units import format_bytes

ORDER = ("optimizer", "activations", "parameters")
KINDS = (*ORDER, "gradients")
PLACES = ("disk", "host")
BUFFERS = 4
MOST_TILE, LEAST_TILE = 1 << 23, 1 << 12
HINT = '; with path="a folder on a disk" the rest would go there'


def bytes_left(table: MemoryTable, offloaded: Iterable[str], tile: int) -> int:
    """Return the bytes that stay in memory, the buffers of what is offloaded counted."""
    t, away = table, set(offloaded)
    left, during, step = t.values + t.older + t.gradients + t.states, t.activations + t.transient, t.step
    if "optimizer" in away:
        step += t.home
        held = (BUFFERS + 1) * tile * (t.states + t.updated)  # a tile has the values of its states too
        left += min(0, -(-held // max(1, t.states)) - t.states)
    if "activations" in away:
        during += min(0, 3 * t.block + t.stays - t.activations)
    freed = 0
    if "parameters" in away:
        freed = t.values + t.gradients + t.transient_buckets - 3 * t.largest - t.fixed
    elif "gradients" in away:
        freed = t.gradients + t.transient_buckets - 2 * t.largest
    if freed > 0:
        left, during = left - freed + t.transient_buckets, during - t.transient_buckets
    return left + max(during, step)


def peak_bytes(table: MemoryTable, offloaded: Iterable[str], tile: int) -> int:
    """Return the most bytes that stay in memory in any step, including the first."""
    away = set(offloaded)
    first_step = 0
    if "parameters" not in away:
        first_step = table.values + table.older + table.first_step + (0 if "gradients" in away else table.gradients)
    return max(bytes_left(table, away, tile), first_step)


def decide(
    table: MemoryTable, memory: int, movable: Iterable[str], tile: int, always: Collection[str] = ()
) -> tuple[str, ...] | None:  # fmt: skip
    """Return what to offload, the fewest kinds in `ORDER` with which the rest fits; None if it never does.  Pure.

    The kinds in `always` are offloaded in any case.  A kind that would free no memory stays.

    >>> table = MemoryTable(values=40, gradients=40, states=80, activations=30, largest=4, block=5)
    >>> decide(table, 200, ORDER, tile=1), decide(table, 120, ORDER, tile=1), decide(table, 60, ORDER, tile=1)
    ((), ('optimizer',), ('optimizer', 'activations', 'parameters'))
    """
    chosen = list(always)
    left = [kind for kind in ORDER if kind in set(movable) - set(always)]
    while peak_bytes(table, chosen, tile) > memory:
        if not left:
            return None
        kind = left.pop(0)
        if bytes_left(table, [*chosen, kind], tile) < bytes_left(table, chosen, tile):
            chosen.append(kind)
    return tuple(chosen)


@dataclass
class OffloadPlan:
    """A decision what to offload, and where to.

    Attributes
    ----------
    table : MemoryTable
    places : dict of str to str
        "optimizer", "activations", "parameters" (their gradients too) and "gradients" (alone), those that are
        offloaded: "disk" or "host".
    memory : int or None
        The limit.
    path : Path or None
    tile : int
        Bytes of a tile of states.
    there : tuple of str
        What was to go to host memory and is there already, since NumPy computes in it.
    """

    model: Module
    optimizer: Optimizer
    table: MemoryTable
    places: dict[str, str]
    memory: int | None
    path: Path | None
    tile: int
    there: tuple[str, ...] = ()

    def __str__(self) -> str:
        t = self.table
        held = (
            f"a rank holds {format_bytes(t.values)} of values, "
            + (f"{format_bytes(t.older)} of older versions of them, " if t.older else "")
            + f"{format_bytes(t.gradients)} of gradients, {format_bytes(t.states)} of optimizer states"
            + (f", {format_bytes(t.activations)} of activations" if t.activations else "")
            + (f", {format_bytes(t.transient)} in transit during a pass" if t.transient else "")
            + (f", {format_bytes(t.step)} during a step of the optimizer" if t.step else "")
        )
        limit = "" if self.memory is None else f" for a limit of {format_bytes(self.memory)}"
        there = f"; {' and '.join(self.there)} rest in host memory in any case, since NumPy computes there"
        there *= bool(self.there)
        if not self.places:
            return f"nothing is offloaded{limit}: {held}{there}"
        what = ", ".join(f"{kind} to {self._where(place)}" for kind, place in self.places.items())
        return f"offloaded{limit}: {what}; {held}; {format_bytes(self.rest)} stay{there}"

    @property
    def rest(self) -> int:
        """The bytes that stay in memory."""
        return bytes_left(self.table, self.places, self.tile)

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
        topology = getattr(self.model, "topology", None)
        everyone = [] if topology is None else [topology.world]
        try:
            together(everyone, made.start, "offloading its stages", (ConfigError, OffloadError, ValuesNeeded))
        except BaseException:
            made.close()
            raise
        return made


@dataclass
class Offload(Closing):
    """The offloaded parts of a training; a context manager."""

    plan: OffloadPlan
    states: DiskStates | HostStates | None = None
    activations: OffloadedActivations | None = None
    parameters: OffloadedParameters | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Move everything that is to be moved."""
        plan = self.plan
        folder = {kind: plan.path if place == "disk" else None for kind, place in plan.places.items()}
        if kind := next((kind for kind in ("parameters", "gradients") if kind in plan.places), None):
            parameters = list(plan.model.parameters())
            if parameters:  # a stage may have none
                self.parameters = OffloadedParameters(folder[kind], values=kind == "parameters")
                self._stack.callback(self.parameters.close)
                self.parameters.place(parameters)
        if "activations" in plan.places:
            window = max(LEAST_TILE, plan.table.block) if plan.memory is not None else WINDOW
            blocks = blocks_of(plan.model)
            if blocks:  # a stage may have none
                self.activations = OffloadedActivations(folder["activations"], pending=window, ahead=window)
                self._stack.callback(self.activations.close)
                self.activations.place(blocks)
        if "optimizer" in plan.places:
            on_disk = plan.places["optimizer"] == "disk" and plan.path is not None
            states = DiskStates(plan.path, tile=plan.tile) if on_disk and plan.path else HostStates(plan.tile)
            self._stack.callback(states.close)
            self.states = states
            plan.optimizer.place(states)

    def close(self) -> None:
        """End the threads and take the files away; values come back into memory, optimizer states are gone."""
        self._stack.close()


def plan(
    model: Module, optimizer: Optimizer, *, memory: SupportsIndex | str | None = None, path: str | Path | None = None,
    kept: ActivationMemory | SupportsIndex | str = 0, **places: str | None,
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
    kept : ActivationMemory, int or str
        What the tape keeps in a step: `kept(loss)` after a forward pass, in bytes; in a pipeline
        `Worker.activation_memory`.
    optimizer_states, activations, parameters, gradients : {"disk", "host"}, optional
        Offloaded in any case.  Parameters take their gradients along; `gradients` is for these alone.

    Raises
    ------
    ConfigError
        If the limit is too low even with everything offloaded: it names the lowest that works.  In a pipeline on the
        ranks of all stages, if it is too low on any.  Also if optimizer states are to be offloaded that stay in memory.
    """
    chosen = _chosen(places)
    cpu = all(p.grid.backend.host_memory for p in model.parameters())
    folder = None if path is None else Path(path)
    for kind, place in chosen.items():
        if place == "disk" and folder is None:
            raise ConfigError(f"offload: {kind} to the disk needs path=, a folder that every rank may write")
    there = tuple(kind for kind in KINDS if cpu and chosen.get(kind) == "host")
    chosen = {kind: place for kind, place in chosen.items() if kind not in there}
    activations = kept if isinstance(kept, ActivationMemory) else ActivationMemory(bytes_of("kept", kept))
    if not activations.block:
        activations = replace(activations, block=-(-activations.most // max(1, len(blocks_of(model)))))
    table = estimate(model, optimizer, activations)
    limit = None if memory is None else bytes_of("memory", memory)
    if limit is not None:
        where = "disk" if folder is not None else "host" if not cpu else None
        rests = not activations.versions and table.fixed < table.values + table.gradients
        movable = {k for k in ORDER if where and (k != "parameters" or rests)} - set(there) | set(chosen)
        found = decide(table, limit, movable, tile_of(limit), chosen)
        _enough(model, table, limit, movable, found is None, "" if where else HINT)
        for kind in found or ():
            chosen.setdefault(kind, where or "host")
    ordered = {kind: chosen[kind] for kind in KINDS if kind in chosen}
    return OffloadPlan(model, optimizer, table, ordered, limit, folder, tile_of(limit), there)


def tile_of(limit: int | None) -> int:
    """Return the bytes of a tile of states."""
    return MOST_TILE if limit is None else min(MOST_TILE, max(LEAST_TILE, limit // (32 * BUFFERS)))


def _enough(model: Module, table: MemoryTable, limit: int, movable: set[str], short: bool, hint: str) -> None:
    """Raise a ConfigError on the ranks of all stages if the limit is too low on any.  Collective."""
    least, text = 0, ""
    if short:
        least = peak_bytes(table, movable, tile_of(limit))
        while (more := peak_bytes(table, movable, tile_of(least))) > least:  # larger limits have larger tiles
            least = more
        text = (
            f"memory={format_bytes(limit)} is too little: a rank{_stages(model)} holds {format_bytes(table.total)}, "
            f"and {format_bytes(least)} with all offloaded that can be; the least limit that works is {least} bytes"
            f"{hint}"
        )
    topology = getattr(model, "topology", None)
    reports = [(least, text)] if topology is None else topology.world.share((least, text), others="by rank")
    if any(text for _, text in reports):
        raise ConfigError(max(reports, key=lambda each: each[0])[1])


def _stages(model: Module) -> str:
    numbers = list(map(str, getattr(model, "stage_numbers", ())))
    return f" of stage{'s' * (len(numbers) > 1)} {' and '.join(numbers)}" if numbers else ""


def _chosen(places: dict[str, str | None]) -> dict[str, str]:
    chosen = {}
    for key, place in places.items():
        kind = "optimizer" if key == "optimizer_states" else key
        if kind not in KINDS:
            raise ConfigError(f"offload: there is no {key!r} to offload; there are {', '.join(KINDS)}")
        if place is not None:
            if place not in PLACES:
                raise ConfigError(f"offload: {kind} goes to 'disk' or 'host', not to {place!r}")
            chosen[kind] = place
    return chosen


def kept(loss: Tensor) -> int:
    """Return the bytes that the backward pass from a loss holds on this rank."""
    return sum(row.nbytes for row in saved(loss))
