"""The main job: a model trained as a configuration says, on all ranks there are."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from parlinalg import __version__
from parlinalg.comm import Book, Comm, ledger, open_comm
from parlinalg.comm.signals import StopSignals
from parlinalg.comm.streams import tell
from parlinalg.comm.together import together
from parlinalg.errors import CommError, ConfigError
from parlinalg.train import build, report
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh, launch
from parlinalg.train.lock import FolderLock
from parlinalg.train.loop import batches
from parlinalg.train.pipelines import microbatches_of
from parlinalg.train.plots import plot
from parlinalg.train.progress import Progress
from parlinalg.train.resume import FOLDER, Data, Saving
from parlinalg.train.shares import said


def train(
    config: Config | Mapping[str, Any] | str | Path,
    out: Path,
    settings: Sequence[str] = (),
    comm: object = None,
    *,
    resume: bool = False,
    fall_back: bool = False,
) -> int:
    """Train a model; leave `metrics.jsonl`, `metrics.png`, `ranks.json` and checkpoints in `out`.  Collective.

    Parameters
    ----------
    config : dict, str, Path or Config
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
    """
    try:
        world = open_comm(comm)
    except CommError as error:
        raise ConfigError(str(error)) from error
    with launch(config, world, settings=settings) as mesh:
        return Job(mesh, out, world).run(resume=resume, fall_back=fall_back)


class Job:
    """A training on a mesh."""

    def __init__(self, mesh: Mesh, out: Path, world: Comm) -> None:
        config = mesh.config
        self.mesh, self.out, self.world = mesh, out, world
        self.speaks = world.rank == 0
        self.lock: FolderLock | None = None
        self.data = together(world, lambda: build.dataset(config), "reading the data")
        together(world, self._make_out, "making the directory")
        self.task = build.task(config, mesh, self.data)
        self.steps = build.steps(config, self.task.loader)
        reducer = build.reducer(config, mesh.grid, self.task.model)
        optimizer = build.optimizer(config, self.task.model.parameters(), mesh.grid)
        scheduler = build.scheduler(config, optimizer, self.steps)
        self.trainer = build.trainer(config, mesh, self.task, optimizer, scheduler, reducer)
        self.parts = microbatches_of(config, mesh.place.size)
        self.offload = build.offload(config, mesh, self.task, optimizer, out / "offload", self.trainer.worker)
        place = Data(config.seed, config.batch_size, len(self.task.loader))
        self.saving = Saving(self.trainer, world, out, config.checkpoint, place, self.steps)
        mesh.ends.callback(self.saving.checkpoints.release)

    def _make_out(self) -> None:
        """Make the directory and lock it, on rank 0, unless that is so."""
        if not self.speaks or (self.lock is not None and self.lock.in_place):
            return
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(self.out)
        self.mesh.ends.callback(self.lock.release)

    def run(self, *, resume: bool = False, fall_back: bool = False) -> int:
        """Train, measure, and say how it went; the exit code."""
        self._open()
        start = perf_counter()
        away = nullcontext() if self.offload is None else self.offload.apply()
        with StopSignals() as stop, ledger(self.mesh.grid) as book, away:
            text = self.saving.resume(fall_back=fall_back) if resume else self.saving.fresh()
            if text and self.speaks:
                tell(f"{text}\n")
            begun = self.trainer.made
            progress = together(
                self.world, lambda: Progress(self.out, self.steps, self.speaks, begun), "opening metrics.jsonl"
            )
            with progress as told:
                name = self._steps(stop, told)
            lost = [*self.saving.close(), *told.lost]
        self._close(told.history, book, perf_counter() - start, name, begun, lost)
        return 128 + int(getattr(signal, name)) if name else 0

    def _steps(self, stop: StopSignals, progress: Progress) -> str | None:
        """Make the steps; the name of the signal that stopped them, if one did."""
        config, task = self.mesh.config, self.task
        before, begun = perf_counter(), self.trainer.made
        following = batches(task.loader, self.steps, self.parts, begun)
        for number, batch in enumerate(following, begun + 1):
            outcome = self.trainer.step(batch)
            metrics = {"step": number, **task.metrics(outcome, perf_counter() - before), "grad_norm": outcome.norm}
            if outcome.scale is not None:
                metrics["loss_scale"] = outcome.scale
            if outcome.scale is not None or config.skip_nonfinite:
                metrics["skipped_steps"] = self.trainer.skipped
            if number == self.steps or (config.validate_every and number % config.validate_every == 0):
                metrics |= task.held_metrics(self.trainer.test(task.held))
            before = perf_counter()
            progress.add(metrics, before)
            name = stop.requested(self.world)
            self.saving.after(number, metrics, stopped=name is not None)
            if name:
                return name
        return None

    def _open(self) -> None:
        config = self.mesh.config
        ranks = report.places(self.mesh)
        split = f" in {self.parts} microbatches" * (self.parts > 1)
        text = report.opening(
            self.mesh,
            ranks,
            dict(self.task.model.named_parameters()),
            {
                "layouts": self.task.layouts(),
                "data": self.data,
                "model": f"{config.model}, {config.model_dtype}",
                "training": f"{self.steps} steps of {config.batch_size} samples{split}, {config.optimizer}, "
                f"{config.lr_schedule}",
                **said(config, self.mesh.grid.sizes),
                **({} if self.offload is None else {"offload": report.by_stage(self.mesh, str(self.offload))}),
                "checkpoints": config.checkpoint,
                **self.task.opening(),
            },
        )
        if self.speaks:
            report.write_ranks(self.out, ranks)
            tell(f"parlinalg {__version__}\n{text}\n")

    def _close(
        self, history: Sequence[Mapping[str, Any]], book: Book, seconds: float, stopped: str | None, begun: int,
        lost: Sequence[str],
    ) -> None:  # fmt: skip
        """Leave the files of the end, and say how it went; raise an error if files were lost meanwhile."""
        task = self.task
        together(self.world, self._make_out, "making the directory")  # it may have been removed
        lines, files = task.leave(self.out, self.speaks, done=stopped is None)
        names = ["metrics.jsonl", "ranks.json", *files, *([f"{FOLDER}/"] if self.saving.options.on else [])]

        def draw() -> str:
            if not self.speaks:
                return ""
            title = f"{self.data.name}, {self.mesh.scheme.name}"
            return plot(self.out / "metrics.png", history, task.curves, title)

        def look() -> None:
            """Raise an error that names the files which are gone."""
            gone = [*lost, *(name for name in names if name not in lost and not (self.out / name).exists())]
            if self.speaks and gone:
                raise ConfigError(
                    f"{self.out} was removed or changed while the training ran: {', '.join(gone)} "
                    f"{'are' if len(gone) > 1 else 'is'} gone"
                )

        why = together(self.world, draw, "drawing metrics.png")
        if self.speaks:
            self._conclude(history, seconds, stopped, begun)
            for line in (*task.closing(history), *lines):
                tell(line)
            tell(f"\ncommunication of rank 0, what it received:\n{book}\n")
            names += [] if why else ["metrics.png"]
            there = ", ".join(name for name in names if name not in lost and (self.out / name).exists())
            tell(f"written to {self.out}: {there}" + (f"; no picture: {why}" if why else ""))
        together(self.world, look, "looking for what was written")

    def _conclude(
        self, history: Sequence[Mapping[str, Any]], seconds: float, stopped: str | None, begun: int
    ) -> None:  # fmt: skip
        made, task = self.trainer.made, self.task
        if stopped:
            tell(f"\nstopped by {stopped} after step {made} of {self.steps} ({seconds:.1f} s)")
            return
        new = made - begun
        tell(f"\n{new} steps in {seconds:.1f} s ({new / seconds:.3g} a second){f', {made} in all' * (begun > 0)}")
        if self.trainer.skipped:
            tell(f"{self.trainer.skipped} of them left out: the loss or the gradient was not finite")
        held = task.held_metrics(defaultdict(lambda: 1.0))
        if measured := [metrics for metrics in history if held.keys() <= metrics.keys()]:
            tell(task.held_line(measured[-1]))
