"""What is offloaded, decided and done: see `parlinalg.offload.table` for what a limit of memory decides."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import SupportsIndex

from parlinalg.autograd import Tensor
from parlinalg.autograd.saved import saved
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.nn import Module
from parlinalg.offload.activations import OffloadedActivations
from parlinalg.offload.disk_states import DiskStates
from parlinalg.offload.parameters import OffloadedParameters
from parlinalg.offload.states import HostStates, bytes_of
from parlinalg.offload.table import BUFFERS, KINDS, ORDER, Table, blocks_of, decide, table_of
from parlinalg.offload.weighing import Keeps
from parlinalg.optim import Optimizer
from parlinalg.units import format_bytes

PLACES = ("disk", "host")
MOST_CHUNK, LEAST_CHUNK = 1 << 23, 1 << 12
HINT = '; with path="a folder on a disk" the rest would go there'


@dataclass
class OffloadPlan:
    """What is offloaded, to where.

    Attributes
    ----------
    table : Table
    places : dict of str to str
        "optimizer", "activations", "parameters" (their gradients too) and "gradients" (alone), those that are
        offloaded: "disk" or "host".
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
        topology = getattr(self.model, "topology", None)
        everyone = [] if topology is None else [topology.world]
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
        if kind := next((kind for kind in ("parameters", "gradients") if kind in plan.places), None):
            self.parameters = OffloadedParameters(folder[kind], values=kind == "parameters")
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
    optimizer_states, activations, parameters, gradients : {"disk", "host"}, optional
        Offloaded in any case.  Parameters take their gradients along; `gradients` is for these alone.

    Raises
    ------
    ConfigError
        If the limit is too low even with everything offloaded: it names the least that would do.  In a pipeline on the
        ranks of all stages, if it is too low on any.
    """
    chosen = _chosen(places)
    cpu = all(p.grid.backend.host_memory for p in model.parameters())
    folder = None if path is None else Path(path)
    for kind, place in chosen.items():
        if place == "disk" and folder is None:
            raise ConfigError(f"offload: {kind} to the disk needs path=, a folder that every rank may write")
    there = tuple(kind for kind in KINDS if cpu and chosen.get(kind) == "host")
    chosen = {kind: place for kind, place in chosen.items() if kind not in there}
    keeps = kept if isinstance(kept, Keeps) else Keeps(bytes_of("kept", kept))
    table = table_of(model, optimizer, keeps)
    limit = None if memory is None else bytes_of("memory", memory)
    if limit is not None:
        where = "disk" if folder is not None else "host" if not cpu else None
        rests = not keeps.versions and table.fixed < table.values + table.gradients
        movable = {k for k in ORDER if where and (k != "parameters" or rests)} - set(there) | set(chosen)
        found = decide(table, limit, movable, chunk_of(limit), chosen)
        _enough(model, table, limit, movable, found is None, "" if where else HINT)
        for kind in found or ():
            chosen.setdefault(kind, where or "host")
    ordered = {kind: chosen[kind] for kind in KINDS if kind in chosen}
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
    topology = getattr(model, "topology", None)
    told = [(least, text)] if topology is None else topology.world.share((least, text))
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
        if kind not in KINDS:
            raise ConfigError(f"offload: there is no {key!r} to offload; there are {', '.join(KINDS)}")
        if place is not None:
            if place not in PLACES:
                raise ConfigError(f"offload: {kind} goes to 'disk' or 'host', not to {place!r}")
            chosen[kind] = place
    return chosen


def kept(loss: Tensor) -> int:
    """The bytes that the backward pass from a loss holds on this rank."""
    return sum(row.nbytes for row in saved(loss))
