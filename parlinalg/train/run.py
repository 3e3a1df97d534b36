"""A run: a training of a configuration in a folder of its own, with a report at its start and its end."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from parlinalg.autograd import Parameter
from parlinalg.comm import Book, Comm, ledger, open_comm
from parlinalg.comm.streams import tell
from parlinalg.comm.together import together
from parlinalg.datasets import Loader
from parlinalg.errors import CommError, ConfigError
from parlinalg.schemes import table_of_schemes
from parlinalg.train.choices import make_scheduler
from parlinalg.train.config import TrainingConfig
from parlinalg.train.feed import Feed
from parlinalg.train.hooks import CheckpointHook, EvaluateHook, Hook
from parlinalg.train.initialize import initialize, memory_lines
from parlinalg.train.lock import FolderLock
from parlinalg.train.map import rank_map
from parlinalg.train.mesh import Mesh, launch
from parlinalg.train.progress import ProgressHook
from parlinalg.train.recipes import Recipe, recipe
from parlinalg.train.schedules import in_microbatches
from parlinalg.train.schema import listed
from parlinalg.train.trainer import Trainer
from parlinalg.units import format_bytes

FOLDER = "checkpoints"
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")  # of a block
SHOWN = 64  # ranks named one by one


def train(
    config: TrainingConfig | Mapping[str, Any] | str | Path, out: Path, settings: Sequence[str] = (),
    comm: object = None, *, resume: bool = False, fall_back: bool = False,
) -> int:  # fmt: skip
    """Train a model; leave `metrics.jsonl`, `metrics.png`, `ranks.json` and checkpoints in `out`.  Collective.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig
    out : Path
        A directory; made where it is missing.
    settings : sequence of str
        Values to replace, such as "parallel.tensor.mode=2d".
    comm : mpi4py communicator, Comm or None
        The ranks, by default all of `MPI.COMM_WORLD`.
    resume : bool
        Go on from the last checkpoint in `out`, if there is one, as if the training had not been interrupted.
    fall_back : bool
        Where that one is damaged, go on from the last that is not.

    Returns
    -------
    int
        0, or 128 + the number of the signal that stopped the training.

    Raises
    ------
    ConfigError
        On all ranks, if the configuration, the data or the directory is wrong on any.
    PlanError
        On all ranks, if `parallel="auto"` finds no way to train that fits the memory.
    """
    try:
        world = open_comm(comm)
    except CommError as error:
        raise ConfigError(str(error)) from error
    from parlinalg.planning.auto import choose  # it plans with what is here

    chosen = choose(config, world, settings, out / FOLDER if resume else None)
    with launch(chosen.config, world) as mesh:
        made, run = recipe(mesh.config, mesh, out), RunHook(out, chosen.lines)
        mesh.ends.callback(run.release)
        run.open(world)
        hooks = hooks_of(mesh, made, out, resume, fall_back, chosen.notes)
        trainer, feed = trainer_of(mesh, made, out, [run, *hooks])
        steps = mesh.config.steps_of(len(made.train))
        run.lines |= lines_of(mesh, made, trainer, steps)
        trainer.fit(feed, steps=steps)
        return 128 + int(getattr(signal, trainer.signal)) if trainer.signal else 0


def hooks_of(
    mesh: Mesh, made: Recipe, out: Path, resume: bool = False, fall_back: bool = False,
    notes: Mapping[str, Any] | None = None,
) -> list[Hook]:  # fmt: skip
    """Return the hooks of a configuration, which measure, show and save; `notes` are saved with each checkpoint."""
    config, options = mesh.config, mesh.config.checkpoint
    if options.best is not None and options.best not in made.test_columns:
        raise ConfigError(
            f"checkpoint.best={options.best!r} is not a metric of the held-out data; there are "
            f"{listed(made.test_columns)}"
        )
    return [
        EvaluateHook(made.test, config.validate_every, name=made.test_name, last=True, describe=made.describe),
        *made.hooks,
        ProgressHook(
            out, columns=(*made.columns, *made.test_columns), curves=made.curves,
            title=f"{made.name}, {mesh.scheme.name}",
        ),
        CheckpointHook(
            out / FOLDER, options.every, keep=options.keep, best=options.best, background=options.background,
            resume=resume, fall_back=fall_back, saves=options.on, notes=notes,
        ),
    ]  # fmt: skip


def trainer_of(mesh: Mesh, made: Recipe, out: Path, hooks: Sequence[Hook] = ()) -> tuple[Trainer, Feed]:
    """Return the trainer of a recipe, and its data.  Collective.

    `gradient_accumulation` of the configuration cuts the batch of a step into microbatches here.
    """
    config, schedule = in_microbatches(mesh.config.writing_to(out), mesh)
    steps = config.steps_of(len(made.train))
    engine, train, _, rate = initialize(
        made.model, None, made.criterion, made.train, None,
        lambda optimizer: make_scheduler(config.lr_schedule, optimizer, steps), mesh=mesh, config=config,
        schedule=schedule, sample=made.sample, metrics=made.metrics, test_criterion=made.test_criterion,
    )  # fmt: skip
    assert train is not None
    return Trainer(engine, lr_scheduler=rate, hooks=hooks), train


def lines_of(mesh: Mesh, made: Recipe, trainer: Trainer, steps: int) -> dict[str, object]:
    """Return the lines that describe a training at its start: a head and a text each.  Collective."""
    config, parts = mesh.config, mesh.config.microbatches(mesh.topology.size)
    split = f" in {parts} microbatches" * (parts > 1)
    return {
        **made.lines,
        "model": f"{config.model}, {config.model_dtype}",
        "training": f"{steps} steps of {_samples(made.train)}{split}, {config.optimizer}, {config.lr_schedule}",
        **memory_lines(mesh, trainer.engine),
        "checkpoints": config.checkpoint,
        **made.measure(),
    }


def _samples(loader: Any) -> str:
    """Return a text that says how many samples the steps of a recipe's loader have."""
    batch, all_ = loader.batch_size, len(loader.sampler) if isinstance(loader, Loader) else 0  # windows never run out
    if 0 < all_ < batch:
        return f"{all_} samples, all that there are to train on (batch_size={batch} is more)"
    return f"{batch} samples" + f" (the last of an epoch: {all_ % batch})" * (all_ % batch > 0)


class RunHook(Hook):
    """Gives a training a folder of its own, and reports on rank 0 what runs where, and how it went.

    The folder is locked: another training that is to write to it is refused.  `ranks.json` in it has the process of
    every rank.  At the end the hook reports the time, the lines of other hooks (`Hook.finish`), the communication of
    rank 0, and the files that were written; it restores what is offloaded, and raises an error if files were removed
    meanwhile, or lack lines.
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
        ranks = mesh.where()
        text = opening(mesh, ranks, dict(engine.named_parameters()), self.lines)

        def write() -> None:
            if not engine.world.rank:
                write_ranks(self.folder, ranks)

        together(engine.world, write, "writing ranks.json")
        if not engine.world.rank:
            from parlinalg import __version__

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
        progress = [hook for hook in trainer.hooks if isinstance(hook, ProgressHook)]
        unwritten = next((hook.unwritten for hook in progress if hook.unwritten), "")

        def look() -> None:
            """Raise an error that names the files which are gone, or lack lines."""
            gone = [self._named(name) for name in (*lost, *(n for n in names if n not in lost and n not in there))]
            if not world.rank and gone:
                raise ConfigError(
                    f"{self.folder} was removed or changed while the training ran: {', '.join(gone)} "
                    f"{'are' if len(gone) > 1 else 'is'} gone"
                )
            if unwritten:
                raise ConfigError(
                    f"the training has ended, and lines of {self.folder / 'metrics.jsonl'} are missing: {unwritten}"
                )

        if not world.rank:
            for line in (*self._conclusion(trainer, seconds), *lines):
                tell(line)
            tell(f"\ncommunication of rank 0, what it received:\n{self._book}\n")
            remarks = "".join(f"; no picture: {hook.no_picture}" for hook in progress if hook.no_picture)
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


def write_ranks(out: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write `ranks.json`, which tells the rank of a pid: launchers name the pid of a process that was killed."""
    (out / "ranks.json").write_text(json.dumps(ranks, indent=1) + "\n")


def opening(
    mesh: Mesh, ranks: Sequence[Mapping[str, Any]], parameters: Mapping[str, Parameter], settings: Mapping[str, object]
) -> str:
    """Return what runs where: scheme, grid, layouts, backend, ranks, and the bytes of parameters.  Collective.

    Parameters
    ----------
    ranks : list of dict
        Those of `Mesh.where`.
    parameters : dict of str to Parameter
        By name.
    settings : dict of str to object
        Further lines: a head and a text each.
    """
    grid = mesh.grid
    held = mesh.world.share(sum(p.block.nbytes for p in parameters.values()), others="by rank")
    first = mesh.world.rank == mesh.topology.ranks[mesh.topology.rank][0]
    mine = {name: [p.size, p.data.nbytes] for name, p in parameters.items()} if first else {}
    unsharded: dict[str, list[int]] = {}
    for theirs in mesh.world.share(mine, others="by rank") if mesh.topology.size > 1 else [mine]:
        unsharded |= theirs
    count, total = (sum(of[i] for of in unsharded.values()) for i in (0, 1))
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
        lines += ["", rank_map(mesh.spec, [hosts.index(host) for host in hosts])]
    return "\n".join(lines)


def _parameters(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return a line for each parameter, and one line for equal parameters of repeated blocks."""
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
