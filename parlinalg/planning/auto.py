"""The choice of the parallelism when a training starts: `parallel="auto"` in a configuration."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeVar

import numpy as np

from parlinalg.backend import select_backend
from parlinalg.backend.blas import cores
from parlinalg.comm import Comm
from parlinalg.comm.streams import tell
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import CheckpointError, ConfigError, PlanError
from parlinalg.planning.candidates import Candidate
from parlinalg.planning.machine import MOST_FILE, Machine, load_machine, machine_text, parse_machine
from parlinalg.planning.measure import measure_machine
from parlinalg.planning.search import plan_training
from parlinalg.planning.training_plan import TrainingPlan
from parlinalg.train.checkpoint_files import complete, read_index
from parlinalg.train.checkpoint_index import name_of
from parlinalg.train.config import TrainingConfig, override, parse, read
from parlinalg.units import format_bytes, format_seconds

__all__ = ["Choice", "cache_folder", "choose", "measured_machine"]

NOTE = "plan"
"""The key of the choice in a checkpoint."""
POLL = 0.02
"""Seconds between looks of the ranks that wait for the first one, which leaves it their cores."""
_FREE = ("epochs", "steps", "checkpoint", "sample", "validate_every", "lr_schedule", "seed", "parallel")
"""Keys that may change while a checkpoint's choice holds, and `parallel`, which is compared apart."""

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A configuration with its choice of parallelism.

    Attributes
    ----------
    config : TrainingConfig
    lines : dict of str to str
        What was chosen and why, for the console: a head and a text each.  Empty if nothing was left open.
    notes : dict
        What a checkpoint keeps of it.
    """

    config: TrainingConfig
    lines: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


def choose(
    config: TrainingConfig | Mapping[str, Any] | str | Path, comm: Comm, settings: Sequence[str] = (),
    checkpoints: Path | None = None,
) -> Choice:  # fmt: skip
    """Return a configuration whose `parallel` says how the ranks are used.  Collective.

    Where it says "auto", rank 0 searches (`plan_training`) for the shortest step on the machine that the configuration
    names, or on this one, measured by all ranks the first time; all ranks take its choice.  The arithmetic stays the
    configuration's: the dtype is not searched.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig
    comm : Comm
        The ranks of the training.
    settings : sequence of str
        Values to replace, as on the command line.
    checkpoints : Path, optional
        The folder of a training that goes on: the choice of its last checkpoint is taken again, where that was for as
        many ranks and the same model, data and batch.

    Raises
    ------
    ConfigError
        On all ranks, if the configuration or the machine is wrong on any, or configurations differ between ranks.
    PlanError
        On all ranks, if no candidate can split the batch or fits the memory.
    """
    parsed, given = together(comm, lambda: _read(config, settings), "reading the configuration")
    if not parsed.parallel.auto:
        return Choice(parsed)
    if (odd := odd_one_out(comm, repr(parsed).encode())) is not None:
        raise ConfigError(f"rank {odd} reads another configuration than rank 0; give all the same file and settings")
    given = {**given, "dtype": parsed.dtype}
    about = {"ranks": comm.size, "of": _fingerprint(parsed, given)}
    known = _on_first(comm, lambda: _kept(checkpoints, about))
    if known is not None:
        chosen = Candidate.from_note(known["choice"])
        lines = {"parallel": f"{chosen}, as in the last checkpoint"}
        return Choice(_applied(given, chosen, parsed), lines, {NOTE: known})
    machine = _machine(parsed, comm)
    note, lines = _on_first(comm, lambda: _planned(given, comm.size, machine, about))
    return Choice(_applied(given, Candidate.from_note(note["choice"]), parsed), lines, {NOTE: note})


def _read(
    config: TrainingConfig | Mapping[str, Any] | str | Path, settings: Sequence[str]
) -> tuple[TrainingConfig, dict[str, Any]]:
    """Return a configuration, parsed and as it was given."""
    if isinstance(config, TrainingConfig):
        if settings:
            raise ConfigError("settings replace values of a dict or a file, not of a TrainingConfig")
        return config, config.given()
    given = override(config if isinstance(config, Mapping) else read(config), settings)
    return parse(given), given


def _fingerprint(config: TrainingConfig, given: Mapping[str, Any]) -> str:
    """Return a digest of what a choice depends on."""
    default = TrainingConfig()
    same = replace(config, **{name: getattr(default, name) for name in _FREE})
    text = repr((same, config.parallel, sorted(name for name in given if name not in _FREE)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _kept(checkpoints: Path | None, about: Mapping[str, Any]) -> Any:
    """Return the choice of the last checkpoint if it was made for this; None if not, or there is none."""
    steps = [] if checkpoints is None else complete(checkpoints)
    if checkpoints is None or not steps:
        return None
    try:
        note = read_index(checkpoints / name_of(steps[-1])).training.get(NOTE)
        if isinstance(note, Mapping) and all(note.get(name) == value for name, value in about.items()):
            Candidate.from_note(note["choice"])
            return dict(note)
    except (CheckpointError, KeyError, TypeError, ValueError):  # loading it reports what is wrong
        pass
    return None


def _applied(given: Mapping[str, Any], chosen: Candidate, parsed: TrainingConfig) -> TrainingConfig:
    return parse(chosen.values(given, parsed.batch_size))


def _planned(
    given: Mapping[str, Any], ranks: int, machine: Machine, about: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Search; return the note for checkpoints, and the lines for the console."""
    plan = plan_training(given, ranks=ranks, machine=machine, best=2)
    chosen = plan.best[0].candidate
    return {**about, "candidate": str(chosen), "choice": chosen.note()}, summary(plan)


def summary(plan: TrainingPlan) -> dict[str, str]:
    """Return the choice of a plan and its reason, in two lines, each with its head."""
    first = plan.best[0]
    return {
        "parallel": f"{first.candidate}: {format_seconds(first.seconds)} a step on {plan.machine.name}, "
        f"{format_bytes(first.bytes)} a rank; "
        + ("the only candidate" if plan.candidates == 1 else f"the fastest of {plan.candidates} candidates")
        + f", found in {plan.seconds:.1f} s",
        "because": plan.why(),
    }


# ------------------------------------------------------------------------------------------------ the machine
def _machine(config: TrainingConfig, comm: Comm) -> Machine:
    """Return the machine that a configuration names, or this one.  Collective."""
    if config.machine is not None:
        named = config.machine
        text = _on_first(comm, lambda: machine_text(load_machine(named)))
        return parse_machine(text, named)
    return measured_machine(comm, config.backend)


def measured_machine(comm: Comm, backend: str = "auto") -> Machine:
    """Return this machine as its ranks see it, measured once and then read from a file of the user's.  Collective.

    The file is in `cache_folder()`.  Its name stands for the processors, cores, memory and ranks of the nodes, the
    backend and the versions of parlinalg and NumPy: where one of them changes, the machine is measured again.
    """
    device = together(comm, lambda: select_backend(backend, comm.local_rank).device, "choosing its backend")
    facts = [_processor(), len(cores()), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), device]
    everyone = comm.share([comm.nodes[comm.rank], *facts], others="alike")
    from parlinalg import __version__

    key = json.dumps([everyone, backend, __version__, np.__version__])
    path = cache_folder() / "machines" / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.toml"
    if text := _on_first(comm, lambda: _cached(path)):
        return parse_machine(text, str(path))
    if not comm.rank:
        tell("parallel='auto': measuring this machine, once, in about a minute")
    start = perf_counter()
    found = measure_machine(comm, "this machine", backend)
    text = _on_first(comm, lambda: _store(path, machine_text(found), perf_counter() - start))
    return parse_machine(text, str(path))


def cache_folder() -> Path:
    """Return the folder of what is measured once: `parlinalg` in XDG_CACHE_HOME, by default `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "parlinalg"


def _processor() -> str:
    with suppress(OSError, StopIteration, IndexError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cached(path: Path) -> str:
    """Return the text of a machine that was measured; empty if there is none, or it cannot be understood."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_FILE)
        parse_machine(text, str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return ""
    return text


def _store(path: Path, text: str, seconds: float) -> str:
    """Write a measured machine where it will be found again, if that is possible; return its text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
        tell(f"measured in {seconds:.0f} s, kept in {path}\n")
    except OSError as error:
        tell(f"measured in {seconds:.0f} s, not kept: cannot write {path}: {error.strerror}\n")
    return text


# ------------------------------------------------------------------------------------------------ agreement
def _on_first(comm: Comm, function: Callable[[], T]) -> T:
    """Return on all ranks what a function that does not communicate returns on rank 0; its error is all ranks' too.

    What it returns is what JSON can carry.  The other ranks sleep meanwhile: inside a collective they would take its
    cores.
    """

    def call() -> Any:
        try:
            return function() if comm.rank == 0 else None
        finally:
            if comm.size > 1:
                handle = comm.all_reduce(np.zeros(1), wait=False)
                while not handle.test():
                    sleep(POLL)
                handle.wait()

    made = together(comm, call, "planning", (ConfigError, PlanError))
    found: T = comm.share(made if comm.rank == 0 else None, others="alike")[0]
    return found
