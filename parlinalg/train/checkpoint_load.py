"""What a rank reads of a checkpoint: the pages of the files that it needs, each against its checksum."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from parlinalg.array.create import dtype_named
from parlinalg.errors import CheckpointError
from parlinalg.files import open_regular, read_bytes
from parlinalg.train.checkpoint_index import INDEX, Chunk, Entry, Index, Rect, inside, meet, name_of, volume
from parlinalg.train.checkpoint_pieces import Piece


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
        raise CheckpointError(f"{folder} is no checkpoint, or was not completed: it has no {INDEX}") from None
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
        """The elements of a piece, flat.

        Raises
        ------
        CheckpointError
            Naming the file and the tensor: the file is missing, cut short, damaged or another one.
        """
        entry = self.index.tensors[piece.name]
        out = np.empty(piece.stop - piece.start, piece.dtype)
        for (offsets, sizes), place in piece.rectangles():
            region = tuple(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            self._fill(piece.name, entry, region, out[place].reshape(sizes))
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
        for chunk in entry.chunks:
            common = meet(region, chunk.region)
            n = volume(common)
            if n:
                out[inside(common, region)] = self._read(name, entry, chunk, common)
                found += n
        if found != volume(region):
            raise CheckpointError(
                f"{self.folder / INDEX}: {name!r} lacks elements: {found} of {volume(region)} are there"
            )

    def _read(self, name: str, entry: Entry, chunk: Chunk, part: Rect) -> np.ndarray:
        """A part of a chunk; no page of the file is read that has nothing of it."""
        dtype, page = dtype_named(entry.dtype), self.index.page
        descriptor = self._file(name, chunk.file)
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        buffer = np.empty(nbytes, np.uint8)  # of which only the pages that are read take memory
        for first, stop in _stretches(_pages(inside(part, chunk.region), chunk.sizes, dtype.itemsize, page)):
            start, end = first * page, min(stop * page, nbytes)
            self._read_into(descriptor, buffer[start:end], chunk.at + start, name, chunk.file)
            for i in range(first, stop):
                if zlib.crc32(buffer[i * page : min((i + 1) * page, nbytes)].data) != chunk.checksums[i]:
                    at = chunk.at + i * page
                    raise CheckpointError(
                        f"{self.folder / chunk.file} is damaged: what it has of {name!r} from byte {at} on is not what "
                        "was written there (its checksum differs)"
                    )
        view: np.ndarray = buffer.view(dtype).reshape(chunk.sizes)[inside(part, chunk.region)]
        return view

    def _file(self, name: str, file: str) -> int:
        """An open file, whose length and header are those of the index."""
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
    """For each page of a chunk whether a part of it has elements there."""
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
    """The runs of True: where each begins and stops."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.astype(np.int8), [0]])))
    found: list[Any] = edges.reshape(-1, 2).tolist()
    return [(a, b) for a, b in found]
