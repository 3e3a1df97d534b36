"""The main job: a model trained as a configuration says, on all ranks there are."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parlinalg.comm import open_comm
from parlinalg.errors import CommError, ConfigError
from parlinalg.train import build
from parlinalg.train.config import Config
from parlinalg.train.feed import Feed
from parlinalg.train.hooks import CheckpointHook, EvaluateHook, Hook
from parlinalg.train.initialize import initialize
from parlinalg.train.keys import listed
from parlinalg.train.launch import Mesh, launch
from parlinalg.train.parallel import DATA, REPLICA
from parlinalg.train.pipeline_schedules import NonPipelineSchedule
from parlinalg.train.pipelines import microbatches_of
from parlinalg.train.progress import ProgressHook
from parlinalg.train.recipes import Recipe, recipe
from parlinalg.train.report import RunHook, by_stage
from parlinalg.train.trainer import Trainer

FOLDER = "checkpoints"


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
        made, run = recipe(mesh.config, mesh, out), RunHook(out)
        mesh.ends.callback(run.release)
        run.open(world)
        trainer, feed = trainer_of(mesh, made, out, [run, *hooks_of(mesh, made, out, resume, fall_back)])
        steps = build.steps(mesh.config, made.train)
        run.lines |= lines_of(mesh, made, trainer, steps)
        trainer.fit(feed, steps=steps)
        return 128 + int(getattr(signal, trainer.signal)) if trainer.signal else 0


def hooks_of(mesh: Mesh, made: Recipe, out: Path, resume: bool = False, fall_back: bool = False) -> list[Hook]:
    """Return the hooks that measure, show and save as a configuration says."""
    config, options = mesh.config, mesh.config.checkpoint
    if options.best is not None and options.best not in made.test_columns:
        raise ConfigError(
            f"checkpoint.best={options.best!r} is no metric of the data kept out; there are {listed(made.test_columns)}"
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
            resume=resume, fall_back=fall_back, saves=options.on,
        ),
    ]  # fmt: skip


def trainer_of(mesh: Mesh, made: Recipe, out: Path, hooks: Sequence[Hook] = ()) -> tuple[Trainer, Feed]:
    """Return the trainer of a recipe, and its data.  Collective.

    `gradient_accumulation` of the configuration cuts the batch of a step into microbatches here.
    """
    config, schedule = mesh.config, None
    if mesh.topology.size == 1:
        schedule = NonPipelineSchedule(microbatches_of(config, 1))
        config = replace(config, gradient_accumulation=1)
    if config.offload:
        config = replace(config, offload={"path": out / "offload", **config.offload})
    steps = build.steps(config, made.train)
    engine, train, _, rate = initialize(
        made.model, None, made.criterion, made.train, None, lambda optimizer: build.scheduler(config, optimizer, steps),
        mesh=mesh, config=config, schedule=schedule, sample=made.sample, metrics=made.metrics,
        test_criterion=made.test_criterion,
    )  # fmt: skip
    assert train is not None
    return Trainer(engine, lr_scheduler=rate, hooks=hooks), train


def lines_of(mesh: Mesh, made: Recipe, trainer: Trainer, steps: int) -> dict[str, object]:
    """Return what to say of a training at its start: a head and a text each.  Collective."""
    config, offload, parts = mesh.config, trainer.engine.offload, microbatches_of(mesh.config, mesh.topology.size)
    split = f" in {parts} microbatches" * (parts > 1)
    return {
        **made.lines,
        "model": f"{config.model}, {config.model_dtype}",
        "training": f"{steps} steps of {config.batch_size} samples{split}, {config.optimizer}, {config.lr_schedule}",
        **_zero_line(config, mesh.grid.sizes),
        **({} if offload is None else {"offload": by_stage(mesh, str(offload))}),
        "checkpoints": config.checkpoint,
        **made.measure(),
    }


def _zero_line(config: Config, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return what is said of ZeRO at the start: a head and a text."""
    zero = config.zero
    if not zero.stage:
        return {}
    ranks, copies = sizes.get(DATA, 1), sizes.get(REPLICA, 1)
    shared = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
    if ranks == 1:
        return {"zero": f"stage {zero.stage}: nothing to share, there is one data parallel rank in a group"}
    groups = f", in {copies} groups that hold copies" if copies > 1 else ""
    return {"zero": f"stage {zero.stage}: {shared[zero.stage - 1]} shared by {ranks} ranks{groups}"}
