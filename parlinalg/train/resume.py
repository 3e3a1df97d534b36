"""Checkpoints of a training as it goes: when one is made, what is in it beside the arrays, and going on from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parlinalg.comm import Comm
from parlinalg.comm.together import together
from parlinalg.errors import CheckpointError, ConfigError
from parlinalg.train import checkpoint_folder as folders
from parlinalg.train.checkpoint import Checkpoints
from parlinalg.train.checkpoint_keep import better
from parlinalg.train.checkpoint_options import Checkpointing, check_kept
from parlinalg.train.keys import listed, optional, real
from parlinalg.train.loop import Trainer

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Data:
    """What the place among the data depends on: a training goes on with the same only.

    Attributes
    ----------
    seed : int
    batch_size : int
    batches : int
        In an epoch.
    """

    seed: int
    batch_size: int
    batches: int


class Saving:
    """Makes a training's checkpoints, and has it go on from one.

    Parameters
    ----------
    trainer : Trainer
    comm : Comm
        All ranks.
    out : Path
        Checkpoints are in its folder "checkpoints".
    options : Checkpointing
    data : Data
    last : int
        The last step to make.

    Raises
    ------
    ConfigError
        If `options.best` is none of the metrics of the data kept out.
    """

    def __init__(
        self, trainer: Trainer, comm: Comm, out: Path, options: Checkpointing, data: Data, last: int
    ) -> None:  # fmt: skip
        self.trainer, self.comm, self.options = trainer, comm, options
        self.folder, self.data, self.last = out / FOLDER, data, last
        self.best: float | None = None
        known = trainer.task.held_metrics(defaultdict(lambda: 1.0))
        if options.best is not None and options.best not in known:
            raise ConfigError(
                f"checkpoint.best={options.best!r} is no metric of the data kept out; there are {listed(known)}"
            )
        self.checkpoints = Checkpoints(
            self.folder, comm, dict(trainer.task.model.named_state()), trainer.optimizer,
            keep=options.keep, best=options.best, background=options.background,
        )  # fmt: skip

    # ------------------------------------------------------------------ the start
    def fresh(self) -> str:
        """Begin from the start; earlier checkpoints are set aside.  Collective.

        Returns
        -------
        str
            What to say of it.
        """
        if not self.options.on:
            return ""
        return self.checkpoints.open(fresh=True)

    def resume(self, *, fall_back: bool = False) -> str:
        """Go on from the last checkpoint, if there is one.  Collective.

        Parameters
        ----------
        fall_back : bool
            Where it is damaged, from the last one that is not.

        Returns
        -------
        str
            What to say of it.

        Raises
        ------
        CheckpointError
            If it is damaged, or of another training.
        """
        if self.options.on:
            self.checkpoints.open(fresh=False)
        together(self.comm, lambda: folders.remove_leftovers(self.folder) if self._root else None, "tidying up")
        found = self.checkpoints.load(fall_back=fall_back, check=self._check)
        if found is None:
            return f"there is no checkpoint in {self.folder} yet: from the start"
        self._take(found.training)
        said = [f"{why}; passed over" for why in found.passed_over]
        return "\n".join([*said, f"going on after step {found.step}, from {found.path}"])

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise an error unless the training can go on from this."""
        was = state.get("data", {})
        for key, value in asdict(self.data).items():
            if was.get(key, value) != value:
                raise CheckpointError(
                    f"it is of a training with {key}={was[key]}, this one has {key}={value}: its batches would be "
                    "others; use the same, or train from the start (without --resume)"
                )
        scaled = self.trainer.scaler is not None and state["scaler"] is not None
        check_kept(state, ("made", "skipped"), ("optimizer", "scheduler", *(["scaler"] if scaled else [])))
        optional(real(-math.inf))("best", state["best"])

    def _take(self, state: Mapping[str, Any]) -> None:
        trainer = self.trainer
        trainer.optimizer.steps = int(state["optimizer"]["steps"])
        trainer.scheduler.load_state_dict(state["scheduler"])  # sets the rate of each group
        if trainer.scaler is not None and state["scaler"] is not None:
            trainer.scaler.load_state_dict(state["scaler"])
        trainer.made, trainer.skipped = int(state["made"]), int(state["skipped"])
        self.best = state["best"]

    # ------------------------------------------------------------------ the steps
    def after(self, step: int, metrics: Mapping[str, float], *, stopped: bool) -> None:
        """Make a checkpoint after a step if one is due, and complete one that is written.  Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if one cannot be written.
        """
        if not self.options.on:
            return
        self.checkpoints.poll()
        improved = False
        if self.options.best is not None:
            value = metrics.get(self.options.best)
            improved = better(self.options.best, value, self.best)
            self.best = value if improved else self.best
        due = self.options.every is not None and step % self.options.every == 0
        if due or improved or stopped or step == self.last:
            self.checkpoints.save(step, self.state(metrics))

    def close(self) -> list[str]:
        """Wait until everything is written, and leave the folder to others.  Collective.

        Returns
        -------
        list of str
            The checkpoints that others have taken away meanwhile.
        """
        self.checkpoints.settle()
        lost = self.checkpoints.lost()
        self.checkpoints.release()
        return [f"{FOLDER}/{name}" for name in lost]

    def state(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return what a checkpoint says of the training beside the arrays."""
        trainer = self.trainer
        optimizer, scaler = trainer.optimizer, trainer.scaler
        return {
            "made": trainer.made,
            "skipped": trainer.skipped,
            "optimizer": {"kind": type(optimizer).__name__, "steps": optimizer.steps, "lr": optimizer.lr},
            "scheduler": trainer.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "data": {**asdict(self.data), "epoch": trainer.made // self.data.batches,
                     "batch": trainer.made % self.data.batches},
            "best": self.best,
            "metrics": dict(metrics),
        }  # fmt: skip

    @property
    def _root(self) -> bool:
        return self.comm.rank == 0
