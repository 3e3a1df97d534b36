"""The folder of a training's checkpoints: one folder a step, of which those with an index are complete."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from parlinalg.errors import CheckpointError
from parlinalg.train.checkpoint_index import INDEX, Index, name_of
from parlinalg.train.checkpoint_load import read_index
from parlinalg.train.checkpoint_writer import sync_folder

_STEP = re.compile(r"step-([0-9]{8,19})")
_OURS = re.compile(r"\.?rank-[0-9]+\.[0-9a-f]+\.safetensors(\.\d+)?|\.?index\.json(\.\d+)?")


def file_of(rank: int, token: str) -> str:
    """A rank's file; each save has a token of its own, so that no save writes over another one's files."""
    return f"rank-{rank:05}.{token}.safetensors"


def complete(folder: Path) -> list[int]:
    """The steps whose checkpoints are complete, the last one last."""
    if not folder.is_dir():
        return []
    steps = {p.name: int(m[1]) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name)) and (p / INDEX).exists()}
    return sorted(step for name, step in steps.items() if name == name_of(step))


def write_index(folder: Path, index: Index) -> None:
    """Make a checkpoint complete: its files are on the disk already."""
    path = folder / INDEX
    aside = path.with_name(f".{INDEX}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(index.text())
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(folder)
    sync_folder(folder.parent)


def remove(folder: Path, but: Collection[str] = ()) -> None:
    """Take away a checkpoint, or what a save left behind: the index first, so that it never counts half removed.

    Parameters
    ----------
    but : collection of str
        Files that stay, and the folder with them.
    """
    if folder.is_symlink() or not folder.is_dir():  # what a link leads to is not ours
        return
    names = [p.name for p in folder.iterdir() if _OURS.fullmatch(p.name) and p.name not in but]
    for name in sorted(names, key=lambda name: name != INDEX):
        if (folder / name).is_symlink() or not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's files are in it
        folder.rmdir()


def remove_leftovers(folder: Path) -> None:
    """Take away what saves that were not completed left behind."""
    if not folder.is_dir():
        return
    for inside in folder.iterdir():
        if _STEP.fullmatch(inside.name):
            if not (inside / INDEX).exists():
                remove(inside)
                continue
            with suppress(CheckpointError):
                remove(inside, {INDEX, *read_index(inside).files})


def set_aside(folder: Path) -> Path | None:
    """Give the checkpoints of an earlier training another name, in place of those of the one before it.

    Returns
    -------
    Path or None
        Where they are; None if there were none.
    """
    if not complete(folder):
        remove_leftovers(folder)
        return None
    old = folder.with_name(f"{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    folder.replace(old)
    return old


def set_later_aside(folder: Path, step: int) -> None:
    """Put the checkpoints of later steps with those that are set aside: a training has gone back from them."""
    old = folder.with_name(f"{folder.name}.old")
    for later in (s for s in complete(folder) if s > step):
        old.mkdir(exist_ok=True)
        if (old / name_of(later)).exists():
            shutil.rmtree(old / name_of(later))
        (folder / name_of(later)).replace(old / name_of(later))


def make(folder: Path) -> None:
    """Make a folder that can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = "it is a file" if folder.is_file() else error.strerror
        raise CheckpointError(f"checkpoints cannot be written to the folder {folder}: {what}") from error


def metrics_of(folder: Path) -> dict[str, float]:
    """The metrics of a checkpoint's step; none if it cannot be read."""
    try:
        metrics = read_index(folder).training.get("metrics", {})
    except CheckpointError:
        return {}
    given = metrics.items() if isinstance(metrics, Mapping) else ()
    return {n: float(v) for n, v in given if isinstance(v, float) or (type(v) is int and abs(v) < 1 << 63)}
