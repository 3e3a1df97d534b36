"""The folder of a run, and what a training says at its start and at its end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from parlinalg.autograd import Parameter
from parlinalg.comm import Book, Comm, ledger
from parlinalg.comm.startup import ranks_map
from parlinalg.comm.streams import tell
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.layout import coordinates
from parlinalg.schemes import table_of_schemes
from parlinalg.train.hooks import Hook
from parlinalg.train.launch import Mesh
from parlinalg.train.lock import FolderLock
from parlinalg.train.map import rank_map
from parlinalg.train.progress import ProgressHook
from parlinalg.units import format_bytes

if TYPE_CHECKING:
    from parlinalg.train.trainer import Trainer

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")  # of a block
SHOWN = 64  # ranks named one by one


class RunHook(Hook):
    """Gives a training a folder of its own, and says on rank 0 what runs where, and how it went.

    The folder is locked: another training that is to write to it is refused.  `ranks.json` in it says which process is
    which rank.  At the end the hook tells the time, what hooks say (`Hook.finish`), the communication of rank 0, and
    the files that were written; it brings back what is offloaded, and raises an error if files were removed meanwhile.
    It is the first in the list of hooks.

    Parameters
    ----------
    folder : str or Path
        Made where it is missing.
    lines : dict of str to object, optional
        Further lines to say at the start: a head and a text each.
    """

    signals = True
    reports_lost = True

    def __init__(self, folder: str | Path, lines: Mapping[str, object] | None = None) -> None:
        self.folder = Path(folder)
        self.lines: dict[str, object] = dict(lines or {})
        self.files = [str(self.folder / "ranks.json")]
        self._lock: FolderLock | None = None
        self._book = Book()
        self._counting = ExitStack()
        self._start = self._last = 0.0
        self._begun: int | None = None

    def open(self, world: Comm) -> None:
        """Make the folder and lock it, unless that is so.  Collective; the training does it by itself."""
        together(world, lambda: self._make(world), "making the directory")

    def _make(self, world: Comm) -> None:
        if world.rank or (self._lock is not None and self._lock.in_place):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        before, self._lock = self._lock, None
        self._lock = FolderLock(self.folder)
        if before is not None:
            before.release()

    def before_train(self, trainer: Trainer) -> None:
        engine = trainer.engine
        mesh: Mesh | None = engine.grid.mesh
        if mesh is None:
            raise ConfigError("RunHook: the model's grid was made without a mesh; make it by parlinalg.launch")
        self.open(engine.world)
        ranks = places(mesh)
        text = opening(mesh, ranks, dict(engine.named_parameters()), self.lines)
        if not engine.world.rank:
            from parlinalg import __version__

            write_ranks(self.folder, ranks)
            tell(f"parlinalg {__version__}\n{text}\n")
        self._counting.close()
        self._counting = ExitStack()
        self._book = self._counting.enter_context(ledger(engine.grid))
        self._start = self._last = perf_counter()
        self._begun = None

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._begun = trainer.step if self._begun is None else self._begun

    def after_train(self, trainer: Trainer) -> None:
        seconds, world = perf_counter() - self._start, trainer.engine.world
        self._counting.close()
        trainer.engine.restore()
        self.open(world)  # it may have been removed
        lines = trainer.finish()
        lost = [name for hook in reversed(trainer.hooks) for name in hook.lost]
        names = [name for hook in trainer.hooks for name in hook.files]
        there = [name for name in names if name not in lost and Path(name).exists()]

        def look() -> None:
            """Raise an error that names the files which are gone."""
            gone = [self._named(name) for name in (*lost, *(n for n in names if n not in lost and n not in there))]
            if not world.rank and gone:
                raise ConfigError(
                    f"{self.folder} was removed or changed while the training ran: {', '.join(gone)} "
                    f"{'are' if len(gone) > 1 else 'is'} gone"
                )

        if not world.rank:
            for line in (*self._conclusion(trainer, seconds), *lines):
                tell(line)
            tell(f"\ncommunication of rank 0, what it received:\n{self._book}\n")
            drawn = [hook.no_picture for hook in trainer.hooks if isinstance(hook, ProgressHook) and hook.no_picture]
            remarks = "".join(f"; no picture: {why}" for why in drawn)
            tell(f"written to {self.folder}: {', '.join(map(self._named, there))}{remarks}")
        together(world, look, "looking for what was written")

    def _conclusion(self, trainer: Trainer, seconds: float) -> list[str]:
        made, last, skipped = trainer.step, trainer.last_step, trainer.engine.skipped
        if trainer.signal:
            return [f"\nstopped by {trainer.signal} after step {made} of {last} ({seconds:.1f} s)"]
        new = made - (made if self._begun is None else self._begun)
        all_ = f", {made} in all" if new < made else ""
        lines = [f"\n{new} steps in {seconds:.1f} s ({new / seconds:.3g} a second){all_}"]
        return lines + [f"{skipped} of them left out: the loss or the gradient was not finite"] * (skipped > 0)

    def _named(self, path: str) -> str:
        """Return a path as it is from the folder."""
        return os.path.relpath(path, self.folder) + "/" * path.endswith("/")

    def close(self, trainer: Trainer) -> None:
        self._counting.close()
        self.release()

    def release(self) -> None:
        """Leave the folder to others."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def places(mesh: Mesh) -> list[dict[str, Any]]:
    """For every rank its host, pid and coordinates, in a pipeline also its stages, on every rank.  Collective."""
    found = ranks_map(mesh.world)
    for p, ranks in enumerate(mesh.topology.ranks):
        sizes = mesh.topology.sizes[p]
        for rank, coords in zip(ranks, coordinates(tuple(sizes), sizes), strict=True):
            found[rank]["coords"] = coords
            if mesh.schedule is not None:
                found[rank]["coords"] = {"pipeline": p, **coords}
                found[rank]["stages"] = [chunk.stage for chunk in mesh.schedule.chunks[p]]
    return found


def write_ranks(out: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write `ranks.json`: when a rank is killed the launcher names its pid, and this says which rank it was."""
    (out / "ranks.json").write_text(json.dumps(ranks, indent=1) + "\n")


def opening(
    mesh: Mesh, ranks: Sequence[Mapping[str, Any]], parameters: Mapping[str, Parameter], settings: Mapping[str, object]
) -> str:
    """What runs where: scheme, grid, layouts, backend, ranks, and the bytes of parameters a rank holds.  Collective.

    Parameters
    ----------
    ranks : list of dict
        Those of `places`.
    parameters : dict of str to Parameter
        By name.
    settings : dict of str to object
        Further lines: a head and a text each.
    """
    grid = mesh.grid
    held = mesh.world.share(sum(p.block.nbytes for p in parameters.values()))
    first = mesh.world.rank == mesh.topology.ranks[mesh.topology.rank][0]
    mine = {name: [p.size, p.data.nbytes] for name, p in parameters.items()} if first else {}
    whole: dict[str, list[int]] = {}
    for theirs in mesh.world.share(mine) if mesh.topology.size > 1 else [mine]:
        whole |= theirs
    count, total = (sum(of[i] for of in whole.values()) for i in (0, 1))
    each = format_bytes(min(held)) + (f" to {format_bytes(max(held))}" if max(held) > min(held) else "")
    axes = " × ".join(f"{a}={n}" for a, n in grid.sizes.items())
    threads = f"{grid.threads} BLAS thread{'s' * (grid.threads > 1)} a rank"
    rows = {
        "grid": f"{axes}: {grid.size} rank{'s' * (grid.size > 1)}",
        "backend": f"{grid.backend.name} ({grid.backend.device}), {threads}",
        "scheme": mesh.scheme.name,
        **settings,
        "parameters": f"{count:,} ({format_bytes(total)}); a rank holds {each}",
    }
    lines = [f"{head:<12}{text}" for head, text in rows.items()]
    lines += _parameters(parameters)
    lines += ["", table_of_schemes({"": mesh.scheme}), ""]
    lines += _ranks(ranks)
    if mesh.world.size > 1:
        hosts = [place["host"] for place in ranks]
        lines += ["", rank_map(mesh.parallel, mesh.schedule, [hosts.index(host) for host in hosts])]
    return "\n".join(lines)


def by_stage(mesh: Mesh, text: str) -> str:
    """What each stage of a pipeline has to say, in a line each; of those that say the same in one.  Collective."""
    if mesh.schedule is None:
        return text
    everyone = mesh.world.share(text)
    said: dict[str, list[int]] = {}
    for held, ranks in zip(mesh.schedule.chunks, mesh.topology.ranks, strict=True):
        said.setdefault(everyone[ranks[0]], []).extend(chunk.stage for chunk in held)
    lines = []
    for each, stages in said.items():
        numbers = sorted(set(stages))
        lines.append(f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {each}")
    return f"\n{'':<12}".join(lines)


def _parameters(parameters: Mapping[str, Parameter]) -> list[str]:
    """A line for each parameter; for those of like blocks one line for all."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, p in parameters.items():
        before, number, after = (*_NUMBER.split(name, maxsplit=1), "", "")[:3]
        alike.setdefault((f"{before}{{}}{after} {list(p.shape)}", repr(p.layout)), []).append(number)
    heads = [name.format("…".join(dict.fromkeys((i[0], i[-1])))) for (name, _), i in alike.items()]
    wide = max(map(len, heads), default=0)
    return [f"  {head:<{wide}}  {layout}" for head, (_, layout) in zip(heads, alike, strict=True)]


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    hosts: dict[str, list[str]] = {}
    for rank, place in enumerate(ranks):
        hosts.setdefault(place["host"], []).append(f"{rank} (pid {place['pid']})")
    if len(ranks) > SHOWN:
        return [f"ranks       {len(ranks)} on {len(hosts)} hosts: see ranks.json"]
    heads = ["ranks", *[""] * (len(hosts) - 1)]
    lines = [f"on {host}: {', '.join(texts)}" for host, texts in hosts.items()]
    return [f"{head:<12}{line}" for head, line in zip(heads, lines, strict=True)]
