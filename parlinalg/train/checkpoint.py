"""Checkpoints of a training, which any other grid can load.

All ranks write at once, each element of each tensor once, by the rank that has the least to write of those that hold
it, as PyTorch's distributed checkpoints and Megatron's do.  A rank's file is written aside, synced and renamed; when
all ranks have agreed that theirs are there, the index is written, and with it the checkpoint is complete: a process may
end at any moment, and what is found is a whole checkpoint or none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from parlinalg import tunables
from parlinalg.autograd import Parameter
from parlinalg.comm import Comm
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import CheckpointError, ConfigError, brief
from parlinalg.exchange import Corner
from parlinalg.optim import Optimizer
from parlinalg.train import checkpoint_files as folders
from parlinalg.train.checkpoint_files import Part, RankFile, Reader, check_fits, read_index
from parlinalg.train.checkpoint_index import INDEX, Entry, File, Index, Rectangle, name_of
from parlinalg.train.checkpoint_pieces import description, pieces_of, rectangles_to_write
from parlinalg.train.config import CheckpointConfig
from parlinalg.train.lock import FolderLock
from parlinalg.train.schema import integer, refuse

__all__ = ["Checkpoints", "Entry", "File", "Index", "Loaded", "Reader", "Rectangle", "read_index"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes
    ----------
    step : int
    training : dict
        As it was given to `save`.
    path : Path
    bytes_read : int
        By this rank, beside the index.
    passed_over : list of str
        What is wrong with later checkpoints, where it was asked to fall back.
    """

    step: int
    training: dict[str, Any]
    path: Path
    bytes_read: int
    passed_over: tuple[str, ...] = ()


@dataclass(eq=False)
class _Pending:
    """A save in flight."""

    step: int
    training: dict[str, Any]
    file: RankFile
    tensors: dict[str, tuple[str, tuple[int, ...]]]


class Checkpoints:
    """Saves and loads the parameters and the optimizer's states of a training.

    From `open`, or the first `save`, to `finish` no other process can save to the folder.

    Parameters
    ----------
    folder : str or Path
        One that all ranks see.  Each checkpoint has a folder of its own in it.
    comm : Comm
        All ranks that hold parameters: of a pipeline, those of all stages.
    parameters : dict of str to Parameter
        Those that this rank holds, by their names in the whole model, and the buffers: `dict(model.named_state())`.
    optimizer : Optimizer, optional
        The optimizer of the parameters.  Without one only the parameters are saved or loaded.
    keep : int or None
        How many of the last checkpoints stay; None: all.
    best : str or None
        A metric: the checkpoint where it was best stays too.
    background : bool
        Write on a thread while training goes on.  A save then returns when what is to be written is copied (states on
        a disk are written at once), and counts once a later `poll`, `finish` or `save` finds all ranks done.

    Examples
    --------
    ::

        checkpoints = Checkpoints(out / "checkpoints", grid.world, dict(model.named_state()), optimizer)
        checkpoints.save(step, {"my": "state"})
        …
        checkpoints.poll()  # once a step
        …
        checkpoints.finish()
        found = checkpoints.load()  # on any grid; None if there is none
    """

    def __init__(
        self, folder: str | Path, comm: Comm, parameters: Mapping[str, Parameter], optimizer: Optimizer | None = None,
        *, keep: int | None = 3, best: str | None = None, background: bool = True,
    ) -> None:  # fmt: skip
        check_options(keep, best, background)
        if not isinstance(comm, Comm) or not isinstance(parameters, Mapping):
            raise ConfigError(
                f"Checkpoints takes a folder, a Comm such as grid.world or engine.world, and a dict such as "
                f"dict(model.named_state()), not {type(comm).__name__} and {type(parameters).__name__}"
            )
        self.folder, self.comm = Path(folder), comm
        self.parameters, self.optimizer = dict(parameters), optimizer
        self.keep, self.best, self.background = keep, best, background
        self._pending: _Pending | None = None
        self._measured: dict[int, float | None] = {}
        self._assignment: tuple[str, dict[str, list[Corner]], dict[str, tuple[str, tuple[int, ...]]]] | None = None
        self._lock: FolderLock | None = None  # on rank 0, as what follows
        self._kept: set[int] = set()  # the steps whose checkpoints are to be there
        self._removed = False  # whether the folder was, during the training

    def open(self, *, fresh: bool) -> str:
        """Make the folder, so that one that cannot be written is found before a training.  Collective.

        Parameters
        ----------
        fresh : bool
            Whether the training begins: checkpoints that are there are another one's, and set aside.

        Returns
        -------
        str
            What to say of it on rank 0, where there were some.

        Raises
        ------
        CheckpointError
            On all ranks, if it cannot be made or written, or another process saves to it, which the message names.
        """

        def make() -> str:
            self._keep_lock()
            old = folders.set_aside(self.folder) if fresh else None
            if old is not None and self._lock is not None:
                before, self._lock = self._lock, None
                before.moved(old)
                self._keep_lock()
                before.release()
            self._kept = set(folders.complete(self.folder))
            return "" if old is None else f"the checkpoints of an earlier training are in {old} now"

        return self._together(make, f"making {self.folder}", root=True) or ""

    def _keep_lock(self) -> None:
        """Make the folder and lock it, unless that is so; on rank 0.  A folder that was removed is made anew."""
        if self._lock is not None and self._lock.in_place:
            return
        folders.make(self.folder)
        was, self._lock = self._lock, None
        self._lock = FolderLock(self.folder)
        if was is None:
            self._kept = set(folders.complete(self.folder))
        else:
            was.release()
            self._removed = True

    # ------------------------------------------------------------------ saving
    def save(self, step: int, training: Mapping[str, Any] | None = None) -> None:
        """Save everything as it is now.  Collective.

        Parameters
        ----------
        step : int
            Names the checkpoint.  Those of later steps, which a training has gone back from, are set aside once it is
            complete.
        training : dict
            JSON that `load` gives back.  Its "metrics" are those of the step.

        Raises
        ------
        CheckpointError
            On all ranks, if a folder cannot be written or a disk is full on any, here or when the file is completed;
            earlier checkpoints stay as they are.
        """
        self._together(lambda: check_training(step, training), "saving")
        self.settle()
        pieces = pieces_of(self.parameters, self.optimizer)
        mine, tensors = self._assigned(description(pieces))
        parts = [Part(p, corner) for p in pieces for corner in mine.get(p.name, ())]
        folder = self.folder / name_of(step)
        token = self.comm.share(os.urandom(4).hex(), others="alike")[0]

        def make() -> None:
            self._keep_lock()
            folder.mkdir(parents=True, exist_ok=True)

        self._together(make, f"making {folder}", root=True)
        made: list[RankFile] = []
        try:
            self._together(
                lambda: made.append(RankFile(folder / folders.file_of(self.comm.rank, token), parts)),
                f"saving to {folder}",
            )
        except CheckpointError:
            for file in made:
                file.discard()
            self._take_away(folder)
            raise
        made[0].start(self.background)
        self._pending = _Pending(step, dict(training or {}), made[0], tensors)
        if not self.background:
            self.settle()

    def _assigned(self, held: list[Any]) -> tuple[dict[str, list[Corner]], dict[str, tuple[str, tuple[int, ...]]]]:
        """Return the parts that this rank writes, and all tensors; the same as before if no rank holds other parts."""
        digest = hashlib.blake2b(json.dumps(held).encode(), digest_size=16).hexdigest()
        known = self._assignment is not None and self._assignment[0] == digest
        if not all(self.comm.share(known, others="alike")) or self._assignment is None:
            everyone = self.comm.share(held, others="by rank")
            tensors = {name: (dtype, tuple(shape)) for theirs in everyone for name, dtype, shape, *_ in theirs}
            self._assignment = digest, rectangles_to_write(everyone, self.comm.rank), tensors
        return self._assignment[1:]

    def poll(self) -> None:
        """Complete a save whose files are written on all ranks; else do nothing.  Collective, once a step.

        Raises
        ------
        CheckpointError
            On all ranks, if a file could not be written on any.
        """
        if self._pending is None:
            return
        flag = np.array([self._pending.file.writing], np.int32)
        with self.comm.uncounted():
            self.comm.all_reduce(flag, op="max")
        if not flag[0]:
            self._complete()

    def settle(self) -> None:
        """Wait for a save in flight, and complete it.  Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if a file could not be written on any.
        """
        if self._pending is not None:
            self._pending.file.wait()
            self._complete()

    def finish(self) -> None:
        """Wait for a save in flight, complete it, and leave the folder to others.  Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if a file could not be written on any, or checkpoints were taken away meanwhile.
        """
        if lost := self.close():
            raise removal_error(str(self.folder), lost)

    def close(self) -> list[str]:
        """Wait for a save in flight, complete it, and leave the folder to others.  Collective.

        Returns
        -------
        list of str
            The checkpoints that others have taken away meanwhile.
        """
        self.settle()
        lost = self.lost()
        self.release()
        return lost

    def release(self) -> None:
        """Leave the folder to others."""
        if self._lock is not None:
            self._lock.release()
        self._lock, self._kept, self._removed = None, set(), False

    def lost(self) -> list[str]:
        """Return the names of checkpoints that were completed, and that others have taken away.  Collective.

        Where the folder has stayed in place, and the last checkpoint and the best in it, earlier ones may go.
        """

        def find() -> list[str]:
            there = set(folders.complete(self.folder))
            gone = sorted(self._kept - there)
            best = None if self.best is None else best_of(self.best, {s: self._measured.get(s) for s in self._kept})
            needed = self._removed or (self._lock is not None and not self._lock.in_place)
            return [name_of(s) for s in gone] if needed or {max(self._kept, default=None), best} & set(gone) else []

        found: list[str] = self.comm.share(
            self._together(find, f"looking into {self.folder}", root=True), others="alike"
        )[0]
        return found

    def _complete(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        folder = self.folder / name_of(pending.step)
        reports = self.comm.share(pending.file.report(), others="by rank")
        failed = [(rank, t["problem"]) for rank, t in enumerate(reports) if t["problem"]]
        try:
            if failed:
                raise CheckpointError(
                    f"rank {failed[0][0]}, saving step {pending.step}: {failed[0][1]}; earlier checkpoints are as they "
                    "were"
                )
            index = self._index(pending, reports)
            self._together(lambda: folders.write_index(folder, index), f"completing {folder}", root=True)
        except CheckpointError:
            pending.file.discard()
            self._take_away(folder)
            if not self._was_removed(pending.step):
                raise
            return
        if self.comm.rank == 0:
            with suppress(OSError):  # the checkpoint is complete all the same
                self._tidy(folder, index)

    def _was_removed(self, step: int) -> bool:
        """Return True if a save failed because the folder was removed: the training goes on, and `lost` says so."""
        if self.comm.rank == 0 and self._lock is not None and not self._lock.in_place:
            self._removed = True
            self._kept.add(step)
        found: bool = self.comm.share(self._removed, others="alike")[0]
        return found

    def _index(self, pending: _Pending, reports: list[Any]) -> Index:
        rectangles: dict[str, list[Rectangle]] = {name: [] for name in pending.tensors}
        files: dict[str, File] = {}
        for theirs in reports:
            for name, given in theirs["rectangles"]:
                rectangle = Rectangle.from_json(given)
                rectangles[name].append(rectangle)
                files[rectangle.file] = File(*theirs["file"])
        tensors = {n: Entry(*pending.tensors[n], tuple(rectangles[n])) for n in pending.tensors}
        return Index(pending.step, pending.training, files, tensors, tunables.CHECKPOINT_PAGE)

    def _tidy(self, folder: Path, index: Index) -> None:
        self._kept.add(index.step)
        folders.remove(folder, {INDEX, *index.files})
        folders.set_later_aside(self.folder, index.step)
        self._measured[index.step] = self._metric(index.training.get("metrics", {}))
        there = folders.complete(self.folder)
        for step in set(there) - set(self._measured):
            self._measured[step] = self._metric(folders.metrics_of(self.folder / name_of(step)))
        dropped = to_drop({s: self._measured[s] for s in there}, self.keep, self.best)
        self._kept = {s for s in self._kept if s <= index.step and s not in dropped}
        for step in dropped:
            folders.remove(self.folder / name_of(step))

    def _metric(self, metrics: Mapping[str, float]) -> float | None:
        return None if self.best is None else metrics.get(self.best)

    def _take_away(self, folder: Path) -> None:
        """Take away what an incomplete save has left, once all ranks have taken away theirs."""
        self.comm.barrier()
        if self.comm.rank == 0 and not (folder / INDEX).exists():
            folders.remove(folder)

    def remove_leftovers(self) -> None:
        """Take away what saves that were not completed left behind.  Collective."""
        self._together(lambda: folders.remove_leftovers(self.folder), "tidying up", root=True)

    # ------------------------------------------------------------------ loading
    def steps(self) -> list[int]:
        """Return the steps whose checkpoints are complete, the last one last.  Collective."""
        there = self._together(lambda: folders.complete(self.folder), f"looking into {self.folder}", root=True)
        found: list[int] = self.comm.share(there, others="alike")[0]
        return found

    def load(
        self, step: int | None = None, *, fall_back: bool = False,
        check: Callable[[Mapping[str, Any]], object] = lambda training: None,
    ) -> Loaded | None:  # fmt: skip
        """Take a checkpoint, of whatever grid, pipeline, ZeRO stage and number of ranks.  Collective.

        Each rank reads the index, and of the files the pages that have something of what it holds.  Arrays of another
        dtype are converted.

        Parameters
        ----------
        step : int, optional
            By default the last complete one.
        fall_back : bool
            Where that is damaged, take the last one that is not.
        check : callable
            Called with the `training` of a checkpoint before anything is changed; if it fails, the checkpoint counts as
            damaged.

        Returns
        -------
        Loaded or None
            None: there is no checkpoint.

        Raises
        ------
        CheckpointError
            On all ranks, if it is damaged, foreign, or does not fit, naming the file and the tensor.  If a file's
            contents are damaged, what was loaded is then partly the checkpoint's; if its index is, nothing has changed.
        """
        self.settle()
        if step is not None:
            self._together(lambda: check_training(step, None), "loading")
        steps = [s for s in self.steps() if step is None or s <= step]
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has {steps or 'none'}")
        passed_over: list[str] = []
        while steps:
            folder = self.folder / name_of(steps.pop())
            try:
                return self._load(folder, tuple(passed_over), check)
            except CheckpointError as error:
                passed_over.append(str(error))
                if not fall_back or not steps:
                    raise
        return None

    def _load(
        self, folder: Path, passed_over: tuple[str, ...], check: Callable[[Mapping[str, Any]], object]
    ) -> Loaded:  # fmt: skip
        def read() -> Index:
            index = read_index(folder)
            optimizer = index.training.get("optimizer", {})
            kind, was = type(self.optimizer).__name__, optimizer.get("kind") if isinstance(optimizer, Mapping) else None
            if self.optimizer is not None and was not in (None, kind):
                raise CheckpointError(f"the checkpoint {folder} has states of {was}, which {kind} cannot go on from")
            try:
                check(index.training)
            except CheckpointError as error:
                raise CheckpointError(f"the checkpoint {folder}: {error}") from None
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise CheckpointError(
                    f"{folder / INDEX}: what it says of the training cannot be understood "
                    f"({type(error).__name__}: {brief(error.args[0] if error.args else '')})"
                ) from None
            return index

        index = self._together(read, "reading")
        if (odd := odd_one_out(self.comm, index.digest.encode())) is not None:
            raise CheckpointError(
                f"rank {odd} reads another {folder / INDEX} than rank 0: it changes, or is not shared"
            )
        pieces = pieces_of(self.parameters, self.optimizer)
        everyone = self.comm.share([p.name for p in pieces], others="by rank")
        self._together(lambda: check_fits(index, folder, pieces, everyone), "reading")
        if self.optimizer is not None:
            self.optimizer.arrange()
            self.optimizer.flat.forget()  # also where a step has failed half-way
        with Reader(folder, index) as reader:

            def fill() -> None:
                for piece in pieces:
                    piece.write(reader.fill(piece))

            self._together(fill, "reading")
            return Loaded(index.step, dict(index.training), folder, reader.bytes_read, passed_over)

    # ------------------------------------------------------------------ agreement
    def _together(self, function: Callable[[], Result], what: str, *, root: bool = False) -> Result:
        """Call a function on every rank, or on rank 0 alone; if it fails on any, fail on all.  Collective."""
        call: Callable[[], Any] = function if not root or self.comm.rank == 0 else lambda: None
        try:
            return together(self.comm, call, what)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None


def removal_error(folder: str, gone: Sequence[str]) -> CheckpointError:
    """Return the error that says that files of a folder are gone."""
    return CheckpointError(
        f"{folder} was removed or changed while the training ran: {', '.join(gone)} {'are' if len(gone) > 1 else 'is'} "
        "gone"
    )


# ---------------------------------------------------------------------------------------------- rules
def check_options(keep: Any = 3, best: Any = None, background: Any = True) -> None:
    """Raise a ConfigError unless these say which checkpoints stay, and how they are written."""
    for name, value in (("keep", keep), ("best", best), ("background", background)):
        CheckpointConfig.check_key("checkpoints: ", name, value)


def check_training(step: Any, training: Any) -> None:
    """Raise a ConfigError unless a checkpoint can have this step, and this beside its arrays."""
    integer(0)("Checkpoints.save: step", step)
    if training is not None and not isinstance(training, Mapping):
        raise refuse("Checkpoints.save: training", training, "a dict of what JSON can carry")
    try:
        json.dumps(dict(training or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Checkpoints.save: what is saved beside the arrays is JSON, of texts, numbers, lists and dicts: {error}"
        ) from error


def better(name: str, new: float | None, old: float | None) -> bool:
    """Return True if a metric is better than before: an accuracy when it is larger, anything else when it is smaller.

    >>> better("validation_loss", 1.0, 2.0), better("test_accuracy", 0.5, None), better("loss", float("nan"), None)
    (True, True, False)
    """
    if new is None or not math.isfinite(new):
        return False
    if old is None:
        return True
    return new > old if name.endswith("accuracy") else new < old


def best_of(name: str, measured: Mapping[int, float | None]) -> int | None:
    """Return the step that measured best, the first of several; None where nothing was measured."""
    found: int | None = None
    for step in sorted(measured):
        if better(name, measured[step], None if found is None else measured[found]):
            found = step
    return found


def to_drop(measured: Mapping[int, float | None], keep: int | None, best: str | None) -> list[int]:
    """Return the steps whose checkpoints go: all but the last `keep`, and the one that measured best.

    Parameters
    ----------
    measured : dict of int to float or None
        For each checkpoint's step its value of the metric.
    keep : int or None
        None: all stay.
    best : str or None
        The metric's name.

    >>> to_drop({10: 2.0, 20: 1.0, 30: 3.0, 40: None, 50: 2.5}, 2, "validation_loss")
    [10, 30]
    """
    if keep is None:
        return []
    stay = set(sorted(measured)[-keep:])
    if best is not None and (step := best_of(best, measured)) is not None:
        stay.add(step)
    return [step for step in sorted(measured) if step not in stay]
