"""One rank's file of a checkpoint, written on a thread while training goes on.

What is in memory is copied before, so that the next step may change it; what rests on a disk is written at once, piece
by piece, and takes no memory.  The thread makes no MPI calls: that all ranks' files are written they agree on at a
later step.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.errors import CheckpointError, ParlinalgError
from parlinalg.nn.pretrained.tensorfile import Writer, read_header
from parlinalg.train.checkpoint_index import Chunk, File, checksums
from parlinalg.train.checkpoint_pieces import Corner, Piece
from parlinalg.units import format_bytes


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
        """Its elements, as they are now or as they were copied."""
        if self.copied is not None:
            return self.copied
        return self.piece.read(self.piece.where(self.corner)).reshape(self.corner[1])

    def copy(self) -> None:
        """Keep the elements as they are now."""
        self.copied = np.array(self.elements(), copy=True, order="C")


class Shard:
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
        self.chunks: list[tuple[str, Chunk]] = []
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
                raise CheckpointError(told_of(path, error)) from error
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
        """Whether it is still being written."""
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
        except Exception as error:  # told to all ranks when they next meet
            self.problem = told_of(self.path, error)
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
        self.chunks = [
            (part.piece.name, Chunk(self.path.name, found[part.key].offset, *part.corner, self._checksums[part.key]))
            for part in self._parts
        ]
        self.file = header_of(self.path)

    def told(self) -> dict[str, Any]:
        """What the index needs to know of it: JSON."""
        if self.file is None:
            return {"problem": self.problem, "file": None, "chunks": []}
        file = [self.file.nbytes, self.file.header, self.file.checksum]
        return {"problem": "", "file": file, "chunks": [[name, chunk.to_json()] for name, chunk in self.chunks]}

    def discard(self) -> None:
        """Take away what was written."""
        if self._writer is not None:
            self._writer.discard()
            self.path.unlink(missing_ok=True)


def told_of(path: Path, error: Exception) -> str:
    """Why a file cannot be written, and what would help."""
    text = f"{path} cannot be written: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            free = format_bytes(shutil.disk_usage(path.parent).free)
            text += f"; {free} are free in {path.parent}: make room there, or keep fewer (checkpoint.keep)"
    return text


def header_of(path: Path) -> File:
    """The length of a file, and of its header with the checksum."""
    with path.open("rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        return File(os.fstat(file.fileno()).st_size, length, zlib.crc32(file.read(length)))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can say so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _bytes(elements: np.ndarray) -> memoryview:
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data
