"""The main job: a model trained as a configuration says, on all ranks there are."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from parlinalg import __version__
from parlinalg.comm import Book, Comm, ledger, open_comm
from parlinalg.comm.signals import StopSignals
from parlinalg.comm.together import together
from parlinalg.errors import CommError, ConfigError
from parlinalg.parallel import GradientReducer
from parlinalg.train import build, report
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh, launch
from parlinalg.train.loop import Trainer, batches
from parlinalg.train.plots import plot
from parlinalg.train.progress import Progress


def train(
    config: Config | Mapping[str, Any] | str | Path,
    out: Path,
    settings: Sequence[str] = (),
    comm: object = None,
) -> int:
    """Train a model, and leave `metrics.jsonl`, `metrics.png` and `ranks.json` in `out`.  Collective.

    Parameters
    ----------
    config : dict, str, Path or Config
    out : Path
        A directory; made where it is missing.
    settings : sequence of str
        Values to replace, such as "parallel.tensor.mode=2d".
    comm : mpi4py communicator, Comm or None
        The ranks, by default all of `MPI.COMM_WORLD`.

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
        return Job(mesh, out, world).run()


class Job:
    """A training on a mesh."""

    def __init__(self, mesh: Mesh, out: Path, world: Comm) -> None:
        config = mesh.config
        self.mesh, self.out, self.world = mesh, out, world
        self.speaks = world.rank == 0
        self.data = together(world, lambda: build.dataset(config), "reading the data")
        together(world, self._make_out, "making the directory")
        self.model = build.model(config, mesh, self.data)
        self.loader, self.test_loader = build.loaders(config, mesh, self.data, self.model)
        self.steps = build.steps(config, self.loader)
        parameters = list(self.model.parameters())
        GradientReducer(parameters)
        optimizer = build.optimizer(config, parameters)
        scheduler = build.scheduler(config, optimizer, self.steps)
        self.trainer = Trainer(self.model, optimizer, scheduler, build.criterion(config), config.clip_grad_norm)

    def _make_out(self) -> None:
        if self.speaks:
            self.out.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Train, test, and say how it went; the exit code."""
        self._open()
        start = perf_counter()
        with StopSignals() as stop, ledger(self.mesh.grid) as book:
            with Progress(self.out, self.steps, self.speaks) as progress:
                name = self._steps(stop, progress)
            seconds = perf_counter() - start
            accuracy = None if name else self.trainer.test(self.test_loader)
        self._close(progress.history, book, seconds, accuracy, name)
        return 128 + int(getattr(signal, name)) if name else 0

    def _steps(self, stop: StopSignals, progress: Progress) -> str | None:
        """Make the steps; the name of the signal that stopped them, if one did."""
        before = perf_counter()
        parts = self.mesh.config.gradient_accumulation
        for number, batch in enumerate(batches(self.loader, self.steps, parts), 1):
            outcome = self.trainer.step(batch)
            now = perf_counter()
            metrics = {
                "step": number,
                "loss": outcome.loss,
                "accuracy": outcome.accuracy,
                "lr": outcome.lr,
                "samples_per_s": outcome.samples / (now - before),
            }
            progress.add(metrics, now)
            before = now
            if name := stop.requested(self.world):
                return name
        return None

    def _open(self) -> None:
        config = self.mesh.config
        ranks = report.places(self.mesh)
        split = f" in {config.gradient_accumulation} microbatches" * (config.gradient_accumulation > 1)
        layouts = f"x {self.loader.x_layout!r}, labels {self.loader.y_layout!r}, logits {self.model.output_layout()!r}"
        text = report.opening(
            self.mesh,
            ranks,
            dict(self.model.named_parameters()),
            {
                "layouts": layouts,
                "data": self.data,
                "model": f"{config.model}, {config.dtype}",
                "training": f"{self.steps} steps of {config.batch_size} samples{split}, {config.optimizer}, "
                f"{config.lr_schedule}",
            },
        )
        if self.speaks:
            report.write_ranks(self.out, ranks)
            print(f"parlinalg {__version__}\n{text}\n", flush=True)

    def _close(
        self,
        history: Sequence[Mapping[str, Any]],
        book: Book,
        seconds: float,
        accuracy: float | None,
        stopped: str | None,
    ) -> None:
        if not self.speaks:
            return
        made = history[-1]["step"] if history else 0
        why = plot(self.out / "metrics.png", history, accuracy, f"{self.data.name}, {self.mesh.scheme.name}")
        if stopped:
            print(f"\nstopped by {stopped} after step {made} of {self.steps} ({seconds:.1f} s)")
        else:
            print(f"\n{made} steps in {seconds:.1f} s ({made / seconds:.0f} a second)")
            print(f"test accuracy {accuracy:.4f} ({len(self.data.x_test)} samples)")
        print(f"\ncommunication of rank 0, what it received:\n{book}\n")
        files = "metrics.jsonl, ranks.json" + ("" if why else ", metrics.png")
        print(f"written to {self.out}: {files}" + (f"; no picture: {why}" if why else ""), flush=True)
