"""Files of a checkpoint: each rank's, written beside the training and read page by page; and folders of checkpoints.

A file is written on a thread while training goes on: under another name, synced and renamed.  What is in memory is
copied before, so that the next step may change it; what lies on a disk is written at once, piece by piece, and takes
no memory.  The thread makes no MPI calls: ranks agree at a later step that all files are written.  A rank reads the
pages of the files that it needs, each against its checksum.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.array.create import dtype_named
from parlinalg.errors import CheckpointError, ParlinalgError
from parlinalg.exchange import Corner, Rect, local, meet, rect_at, volume
from parlinalg.files import free_space, open_regular, read_bytes, sync_folder
from parlinalg.nn.pretrained.tensorfile import Writer, read_header
from parlinalg.train.checkpoint_index import INDEX, Entry, File, Index, Rectangle, checksums, name_of
from parlinalg.train.checkpoint_pieces import Piece


@dataclass(eq=False)
class Part:
    """A rectangle of a tensor to be written.

    Attributes
    ----------
    piece : Piece
        What the rank holds of the tensor.
    corner : tuple
        The rectangle's offsets and sizes.
    copied : array or None
        Its elements, once they are copied.
    """

    piece: Piece
    corner: Corner
    copied: np.ndarray | None = None

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's, and the range of each dim where it is not all of it."""
        offsets, sizes = self.corner
        if sizes == self.piece.shape:
            return self.piece.name
        return f"{self.piece.name}[{','.join(f'{a}:{a + n}' for a, n in zip(offsets, sizes, strict=True))}]"

    def elements(self) -> np.ndarray:
        """Return the elements, as they are now or as they were copied."""
        if self.copied is not None:
            return self.copied
        return self.piece.read(self.piece.where(self.corner)).reshape(self.corner[1])

    def copy(self) -> None:
        """Keep the elements as they are now."""
        self.copied = np.array(self.elements(), copy=True, order="C")


class RankFile:
    """A file of a checkpoint in the making.

    Parameters
    ----------
    path : Path
        Written aside, and given this name when it is on the disk.
    parts : sequence of Part
        What is not in memory is written now, the rest is copied.

    Raises
    ------
    ParlinalgError
        If the file cannot be made or written, or states cannot be read.
    """

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self.path = path
        self.problem = ""
        self.file: File | None = None
        self.rectangles: list[tuple[str, Rectangle]] = []
        self._parts = sorted(parts, key=lambda part: part.piece.resident)
        self._checksums: dict[str, tuple[int, ...]] = {}
        self._thread: threading.Thread | None = None
        self._writer: Writer | None = None
        if not parts:
            return
        shapes = {part.key: part.corner[1] for part in self._parts}
        try:
            self._writer = Writer(path, shapes, {part.key: part.piece.dtype for part in self._parts})
            for part in self._parts:
                if part.piece.resident:
                    part.copy()
                else:
                    self._write(part)
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError) and not isinstance(error, ParlinalgError):
                raise CheckpointError(error_text(path, error)) from error
            raise

    def start(self, background: bool) -> None:
        """Write the rest, on a thread or now."""
        if self._writer is None:
            return
        if background:
            self._thread = threading.Thread(target=self._run, name="parlinalg checkpoint", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def writing(self) -> bool:
        """True while it is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is written, or has failed: then `problem` says why."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            for part in self._parts:
                if part.copied is not None:
                    self._write(part)
                    part.copied = None
            self._finish()
        except Exception as error:  # reported to all ranks when they next meet
            self.problem = error_text(self.path, error)
            self.discard()

    def _write(self, part: Part) -> None:
        assert self._writer is not None
        elements = part.elements()
        self._checksums[part.key] = checksums(_bytes(elements), tunables.CHECKPOINT_PAGE)
        self._writer.write(part.key, elements)

    def _finish(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer.appear()
        sync_folder(self.path.parent)
        found = read_header(self.path)
        self.rectangles = [
            (p.piece.name, Rectangle(self.path.name, found[p.key].offset, *p.corner, self._checksums[p.key]))
            for p in self._parts
        ]
        self.file = header_of(self.path)

    def report(self) -> dict[str, Any]:
        """Return its entry in the index, as JSON."""
        if self.file is None:
            return {"problem": self.problem, "file": None, "rectangles": []}
        file = [self.file.nbytes, self.file.header, self.file.checksum]
        return {"problem": "", "file": file, "rectangles": [[name, r.to_json()] for name, r in self.rectangles]}

    def discard(self) -> None:
        """Take away what was written."""
        if self._writer is not None:
            self._writer.discard()
            self.path.unlink(missing_ok=True)


def error_text(path: Path, error: Exception) -> str:
    """Return why a file cannot be written, and what would help."""
    free = free_space(error, path.parent)
    return f"{path} cannot be written: {error}{free}" + (
        ": make room there, or keep fewer (checkpoint.keep)" if free else ""
    )


def header_of(path: Path) -> File:
    """Return the length of a file, and of its header with the checksum."""
    with path.open("rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        return File(os.fstat(file.fileno()).st_size, length, zlib.crc32(file.read(length)))


def _bytes(elements: np.ndarray) -> memoryview:
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data


def read_index(folder: str | Path) -> Index:
    """Return the index of a checkpoint: the tensors that are in it, and where.

    Parameters
    ----------
    folder : str or Path
        That of one step, such as "checkpoints/step-00000100".

    Raises
    ------
    CheckpointError
        If there is none, or it is damaged or foreign.
    """
    folder = Path(folder)
    path = folder / INDEX
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link: copy or move the checkpoint itself there")
    try:
        index = Index.parse(read_bytes(path, follow=False), path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint, or was not completed: it has no {INDEX}") from None
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if folder.name != name_of(index.step):
        raise CheckpointError(f"{path} is of step {index.step}, which would be in the folder {name_of(index.step)}")
    return index


def check_fits(index: Index, path: Path, pieces: Sequence[Piece], everyone: Sequence[Sequence[str]]) -> None:
    """Raise a CheckpointError that lists what is missing, unexpected or misshapen.

    Parameters
    ----------
    pieces : sequence of Piece
        What this rank wants.
    everyone : sequence
        The names of the tensors that each rank wants.
    """
    wanted = {name for names in everyone for name in names}
    parts = [p for p in ("model.", "optimizer.") if any(name.startswith(p) for name in wanted)]
    faults = {
        "missing": sorted(n for n in wanted if n not in index.tensors),
        "unexpected": [n for n in index.tensors if n not in wanted and n.startswith(tuple(parts))],
        "misshapen": [
            f"{p.name} {index.tensors[p.name].shape} instead of {p.shape}"
            for p in pieces
            if p.name in index.tensors and index.tensors[p.name].shape != p.shape
        ],
    }
    said = [f"{fault}: {_few(names)}" for fault, names in faults.items() if names]
    if said:
        raise CheckpointError(f"the checkpoint {path} does not fit this training: {'; '.join(said)}")


def _few(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


class Reader:
    """A reader of a checkpoint's tensors, or rectangles of them, on one rank alone.

    Parameters
    ----------
    folder : str or Path
        The folder of one step.
    index : Index, optional
        Its index, where it is read already.

    Attributes
    ----------
    index : Index
    bytes_read : int
        From files other than the index.

    Raises
    ------
    CheckpointError
        If the folder has no index, or the index is damaged or foreign.

    Examples
    --------
    ::

        with Reader("runs/first/checkpoints/step-00000100") as reader:
            print(list(reader.index.tensors))
            weight = reader.read("model.layers.0.weight")
    """

    def __init__(self, folder: str | Path, index: Index | None = None) -> None:
        self.folder = Path(folder)
        self.index = read_index(folder) if index is None else index
        self.bytes_read = 0
        self._open: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def fill(self, piece: Piece) -> np.ndarray:
        """Return the elements of a piece, flat.

        Raises
        ------
        CheckpointError
            Naming the file and the tensor: the file is missing, cut short, damaged or another one.
        """
        entry = self.index.tensors[piece.name]
        out = np.empty(piece.stop - piece.start, piece.dtype)
        for (offsets, sizes), place in piece.rectangles():
            self._fill(piece.name, entry, rect_at(offsets, sizes), out[place].reshape(sizes))
        return out

    def read(self, name: str, region: Rect | None = None) -> np.ndarray:
        """Return a tensor, or a rectangle of it.  No page of a file is read that has nothing of it.

        Parameters
        ----------
        name : str
            "model.NAME" of a parameter, "optimizer.NAME.STATE" of a state: one of `index.tensors`.
        region : tuple of range, optional
            The indices that are wanted, for each dim.  By default all.

        Raises
        ------
        CheckpointError
            If there is no such tensor or region, or a file is missing, cut short, damaged or another one.
        """
        entry = self.index.tensors.get(name)
        if entry is None:
            known = _few(list(self.index.tensors))
            raise CheckpointError(f"the checkpoint {self.folder} has no tensor {name!r}; it has {known}")
        wanted = tuple(map(range, entry.shape)) if region is None else tuple(region)
        within = len(wanted) == len(entry.shape)
        if not within or any(
            r.step != 1 or not 0 <= r.start <= r.stop <= n for r, n in zip(wanted, entry.shape, strict=True)
        ):
            raise CheckpointError(
                f"{name!r} has the shape {entry.shape}: the region {wanted} does not lie within it; give a range for "
                "each dim"
            )
        out = np.empty(tuple(map(len, wanted)), dtype_named(entry.dtype))
        self._fill(name, entry, wanted, out)
        return out

    def _fill(self, name: str, entry: Entry, region: Rect, out: np.ndarray) -> None:
        found = 0
        for rectangle in entry.rectangles:
            common = meet(region, rectangle.region)
            n = volume(common)
            if n:
                out[local(common, region)] = self._read(name, entry, rectangle, common)
                found += n
        if found != volume(region):
            raise CheckpointError(
                f"{self.folder / INDEX}: {name!r} lacks elements: {found} of {volume(region)} are there"
            )

    def _read(self, name: str, entry: Entry, rectangle: Rectangle, part: Rect) -> np.ndarray:
        """Return a part of a rectangle; no page of the file is read that has nothing of it."""
        dtype, page = dtype_named(entry.dtype), self.index.page
        descriptor = self._file(name, rectangle.file)
        nbytes = rectangle.size * dtype.itemsize
        buffer = np.empty(nbytes, np.uint8)  # of which only the pages that are read take memory
        for first, stop in _stretches(_pages(local(part, rectangle.region), rectangle.sizes, dtype.itemsize, page)):
            start, end = first * page, min(stop * page, nbytes)
            self._read_into(descriptor, buffer[start:end], rectangle.at + start, name, rectangle.file)
            for i in range(first, stop):
                if zlib.crc32(buffer[i * page : min((i + 1) * page, nbytes)].data) != rectangle.checksums[i]:
                    at = rectangle.at + i * page
                    raise CheckpointError(
                        f"{self.folder / rectangle.file} is damaged: what it has of {name!r} from byte {at} on is not "
                        "what was written there (its checksum differs)"
                    )
        view: np.ndarray = buffer.view(dtype).reshape(rectangle.sizes)[local(part, rectangle.region)]
        return view

    def _file(self, name: str, file: str) -> int:
        """Return an open file, whose length and header are those of the index."""
        if file in self._open:
            return self._open[file]
        path, known = self.folder / file, self.index.files[file]
        try:
            descriptor = open_regular(path, follow=False)
        except OSError as error:
            raise CheckpointError(f"{path}, which has {name!r}, cannot be read: {error.strerror}") from None
        self._open[file] = descriptor
        size = os.fstat(descriptor).st_size
        if size != known.nbytes:
            fault = "cut short" if size < known.nbytes else "longer than it was written"
            raise CheckpointError(
                f"{path} is {fault}: it has {size} bytes instead of {known.nbytes}; that concerns "
                f"{self.index.tensor_at(file, size)!r}"
            )
        header = np.empty(known.header, np.uint8)
        self._read_into(descriptor, header, 0, name, file)
        if zlib.crc32(header.data) != known.checksum:
            raise CheckpointError(
                f"{path}, which should have {name!r}, is damaged or another checkpoint's: its header is not the one "
                "that was written"
            )
        return descriptor

    def _read_into(self, descriptor: int, buffer: np.ndarray, at: int, name: str, file: str) -> None:
        done, view = 0, memoryview(buffer.data)
        while done < len(view):
            try:
                n = os.preadv(descriptor, [view[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"{self.folder / file}, reading {name!r}: {error.strerror}") from None
            if not n:
                raise CheckpointError(f"{self.folder / file} ends at byte {at + done}, within {name!r}")
            done += n
        self.bytes_read += done


def _pages(part: tuple[slice, ...], sizes: tuple[int, ...], itemsize: int, page: int) -> np.ndarray:
    """Return for each page of a rectangle whether a part of it has elements there."""
    whole = len(sizes)  # dims from here on are taken whole: elements without gaps
    while whole and part[whole - 1].stop - part[whole - 1].start == sizes[whole - 1]:
        whole -= 1
    lead = max(0, whole - 1)
    run = math.prod(sizes[lead + 1 :]) * (part[lead].stop - part[lead].start if part else 1) * itemsize
    starts = np.zeros(1, np.int64)
    for d in range(lead + 1 if part else 0):
        stride = math.prod(sizes[d + 1 :]) * itemsize
        steps = np.arange(part[d].start, part[d].stop if d < lead else part[d].start + 1) * stride
        starts = (starts[:, None] + steps).reshape(-1)
    count = -(-math.prod(sizes) * itemsize // page)
    edges = np.zeros(count + 1, np.int64)
    np.add.at(edges, starts // page, 1)
    np.add.at(edges, (starts + run - 1) // page + 1, -1)
    return np.cumsum(edges[:-1]) > 0


def _stretches(wanted: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of True: where each begins and stops."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.astype(np.int8), [0]])))
    found: list[Any] = edges.reshape(-1, 2).tolist()
    return [(a, b) for a, b in found]


_STEP = re.compile(r"step-([0-9]{8,19})")
_OURS = re.compile(r"\.?rank-[0-9]+\.[0-9a-f]+\.safetensors(\.\d+)?|\.?index\.json(\.\d+)?")


def file_of(rank: int, token: str) -> str:
    """Return a rank's file; each save has a token of its own, so that no save writes over another one's files."""
    return f"rank-{rank:05}.{token}.safetensors"


def complete(folder: Path) -> list[int]:
    """Return the steps whose checkpoints are complete, the last one last."""
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
    for step in folder.iterdir():
        if _STEP.fullmatch(step.name):
            if not (step / INDEX).exists():
                remove(step)
                continue
            with suppress(CheckpointError):
                remove(step, {INDEX, *read_index(step).files})


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
    """Return the metrics of a checkpoint's step; none if it cannot be read."""
    try:
        metrics = read_index(folder).training.get("metrics", {})
    except CheckpointError:
        return {}
    given = metrics.items() if isinstance(metrics, Mapping) else ()
    return {n: float(v) for n, v in given if isinstance(v, float) or (type(v) is int and abs(v) < 1 << 63)}
