"""A file of tiles that goes from one generation to the next at once, or not at all.

Tiles move, not tensors (the chunks of Fang et al., "PatrickStar: parallel training of pre-trained models via
chunk-based memory management", 2021).  Every tile has two places in the file.  A tile is written to the place that its
last complete generation does not use, and `commit` writes which place of every tile counts, with its checksums: to one
of two tables in turn, under a checksum of its own, after the tiles are on the disk.  So a process may end at any
moment: what is found is the last generation that was complete, never a mixture.

The file: a head (sizes, and a label that says what the tiles hold), two tables, the tiles' first places, the second.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parlinalg.backend import Backend
from parlinalg.errors import OffloadError
from parlinalg.offload.disk import DiskFile, aligned, checksum, whole_pages

MAGIC = b"PLTILES1"
HEAD = np.dtype([("magic", "S8"), ("crc", "<u4"), ("label", "<u4"), ("count", "<u8"), ("parts", "<u8", 2)])
TABLE = np.dtype([("magic", "S8"), ("crc", "<u4"), ("note", "<u4"), ("generation", "<u8")])
ROW = np.dtype([("crcs", "<u4", 2), ("place", "u1")])
ZEROS = 255
"""The place of a tile that was never written: it is all zeros."""
NOTE = 1024  # bytes at most
CRC = 12  # where the bytes begin that a head's or a table's checksum is of


class TileFile:
    """Tiles of one size in a file, with generations.  One thread may read while another writes.

    Parameters
    ----------
    path : Path
    count : int
        The number of tiles, zeros at first.
    parts : tuple of two ints
        A tile's bytes: those of its first part, and of its second, which may be left alone when it is read or written.
        Multiples of the page of `parlinalg.offload.disk`.
    label : object
        JSON that says what the tiles hold.

    Attributes
    ----------
    generation : int
        The last complete one; 0 is a file never committed.
    note : dict
        What was committed with it.

    Raises
    ------
    OffloadError
        If the file cannot be made, written or read; see `DiskFile`.
    """

    def __init__(self, path: Path, count: int, parts: tuple[int, int], label: Any = None) -> None:
        text = json.dumps(label).encode()
        self._geometry(count, parts, len(text))
        self.label = label
        self.file = DiskFile(path, self._data + 2 * count * sum(parts))
        self.generation = 0
        self.note: dict[str, Any] = {}
        self._rows = np.zeros(count, ROW)
        self._rows["place"] = ZEROS
        head = aligned(self._head)
        head[HEAD.itemsize :][: len(text)] = np.frombuffer(text, np.uint8)
        head[: HEAD.itemsize].view(HEAD)[0] = (MAGIC, 0, len(text), count, parts)
        head[: HEAD.itemsize].view(HEAD)["crc"] = checksum(head[CRC:])
        self._guarded(lambda: self.file.write(head, 0))

    @classmethod
    def open(cls, path: Path) -> TileFile:
        """Open the file that an earlier process left, at its last complete generation.

        Raises
        ------
        OffloadError
            If it is cut short, no such file, or has no complete generation.
        """
        self = cls.__new__(cls)
        self.file = DiskFile(path, 0, existing=True)
        self._guarded(self._reopen)
        return self

    def _geometry(self, count: int, parts: tuple[int, int], label: int) -> None:
        self.count, self.parts = count, parts
        self._head = whole_pages(HEAD.itemsize + label)
        self._room = whole_pages(TABLE.itemsize + NOTE + count * ROW.itemsize)
        self._data = self._head + 2 * self._room
        self._table = aligned(self._room)
        self._pending: dict[int, tuple[int, int, int]] = {}

    def _guarded(self, function: Any) -> None:
        try:
            function()
        except BaseException:
            self.close(remove=False)
            raise

    @property
    def path(self) -> Path:
        return self.file.path

    def _reopen(self) -> None:
        size = self.file.nbytes
        first = aligned(whole_pages(1))
        self.file.read(first[: min(size, first.size)], 0)
        head = first[: HEAD.itemsize].view(HEAD)[0]
        length, count, parts = int(head["label"]), int(head["count"]), tuple(int(n) for n in head["parts"])
        whole = whole_pages(HEAD.itemsize + length)
        if head["magic"] != MAGIC or whole > size:
            raise OffloadError(f"{self.path} is not a file of tiles, or cut short: it has {size} bytes")
        text = aligned(whole)
        self.file.read(text, 0)
        if checksum(text[CRC:]) != head["crc"]:
            raise OffloadError(f"{self.path} is damaged: the checksum of its head differs")
        self._geometry(count, (parts[0], parts[1]), length)
        due = self._data + 2 * count * sum(parts)
        if size < due:
            raise OffloadError(f"{self.path} is cut short: it has {size} bytes of {due}; nothing of it is used")
        self.label = json.loads(bytes(text[HEAD.itemsize :][:length]))
        found = [t for t in map(self._read_table, (0, 1)) if t is not None]
        if not found:
            raise OffloadError(f"{self.path} has no complete generation: its run ended before the first step did")
        self.generation, self.note, self._rows = max(found, key=lambda t: t[0])

    def _read_table(self, which: int) -> tuple[int, dict[str, Any], np.ndarray] | None:
        """Return the generation, the note and the rows of a table; None if it is half written."""
        table = self._table
        self.file.read(table, self._head + which * self._room)
        head = table[: TABLE.itemsize].view(TABLE)[0]
        if head["magic"] != MAGIC or checksum(table[CRC:]) != head["crc"]:
            return None
        note = bytes(table[TABLE.itemsize :][: int(head["note"])])
        rows = table[TABLE.itemsize + NOTE :][: self.count * ROW.itemsize].view(ROW).copy()
        return int(head["generation"]), json.loads(note), rows

    def older(self) -> None:
        """Go back to the generation before: another rank did not complete the last one.  Once, before any write."""
        found = self._read_table((self.generation - 1) % 2)
        if found is None or found[0] != self.generation - 1:
            raise OffloadError(f"{self.path} no longer has generation {self.generation - 1}")
        self.generation, self.note, self._rows = found
        self._pending.clear()

    def read(self, tile: int, buffer: np.ndarray) -> None:
        """Fill a buffer, as long as the first part or as both, with a tile as it was last written.

        Raises
        ------
        OffloadError
            If the file is cut short, or holds other bytes than were written.
        """
        row = self._rows[tile]
        first, second, place = self._pending.get(tile) or (*map(int, row["crcs"]), int(row["place"]))
        if place == ZEROS:
            buffer[:] = 0
            return
        self.file.read(buffer, self._offset(tile, place))
        at = self.parts[0]
        if checksum(buffer[:at]) != first or (buffer.size > at and checksum(buffer[at:]) != second):
            raise OffloadError(
                f"tile {tile} in {self.path} is not what was written there (its checksum differs): the file was "
                "changed by someone else, or the disk fails; nothing of it is used"
            )

    def write(self, tile: int, buffer: np.ndarray) -> None:
        """Write a tile, its first part or both, for the next generation."""
        now = int(self._rows["place"][tile])
        place = 1 - now if now != ZEROS else (self.generation + 1) % 2
        self.file.write(buffer, self._offset(tile, place))
        at = self.parts[0]
        self._pending[tile] = (checksum(buffer[:at]), checksum(buffer[at:]), place)

    def _offset(self, tile: int, place: int) -> int:
        return self._data + (place * self.count + tile) * sum(self.parts)

    @property
    def changed(self) -> bool:
        """True if anything was written since the last generation."""
        return bool(self._pending)

    def commit(self, note: Mapping[str, Any]) -> None:
        """Make what was written the next generation: a process that ends before this returns leaves one or the other.

        Parameters
        ----------
        note : dict
            Kept with it: JSON of at most `NOTE` bytes.
        """
        rows = self._rows.copy()
        for tile, (first, second, place) in self._pending.items():
            rows[tile] = ((first, second), place)
        text, table = json.dumps(dict(note)).encode(), self._table
        if len(text) > NOTE:
            raise ValueError(f"a note of {len(text)} bytes; at most {NOTE} are kept")
        table[:] = 0
        table[TABLE.itemsize :][: len(text)] = np.frombuffer(text, np.uint8)
        table[TABLE.itemsize + NOTE :][: rows.nbytes] = rows.view(np.uint8)
        head = table[: TABLE.itemsize].view(TABLE)
        head[0] = (MAGIC, 0, len(text), self.generation + 1)
        head["crc"] = checksum(table[CRC:])
        self.file.flush()  # the tiles are there before the table says so
        self.file.write(table, self._head + (self.generation + 1) % 2 * self._room)
        self.file.flush()
        self.generation, self.note, self._rows = self.generation + 1, dict(note), rows
        self._pending.clear()

    def rollback(self) -> None:
        """Forget what was written since the last generation."""
        self._pending.clear()

    def close(self, *, remove: bool) -> None:
        """Close the file, and take it away or leave it to be opened again."""
        self.file.close(remove=remove)


class Medium(Protocol):
    """A file or the like that holds tiles."""

    def read(self, tile: int, buffer: np.ndarray) -> None:
        """Fill a buffer with a tile."""

    def write(self, tile: int, buffer: np.ndarray) -> None:
        """Write a tile."""


class Stream:
    """Passes over tiles: the next ones are being read and the last ones written while one is worked on.

    Parameters
    ----------
    medium : Medium
    nbytes : int
        The bytes of a tile.
    backend : Backend
        Makes the buffers.
    buffers : int
        How many tiles are in memory at a time, at least 2.
    """

    def __init__(self, medium: Medium, nbytes: int, backend: Backend, buffers: int = 4) -> None:
        self.medium = medium
        self.buffers = [aligned(nbytes, backend) for _ in range(max(2, buffers))]
        # Reads and writes have a thread each: a disk does both at once.
        self._readers = ThreadPoolExecutor(1, "parlinalg-offload-read")
        self._writers = ThreadPoolExecutor(1, "parlinalg-offload-write")

    def iterate_tiles(self, tiles: Sequence[int], read: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the tiles in this order, each once, in a buffer that is the caller's until the next is asked for.

        Its first `read` bytes are read; what it then holds is written.  A caller that breaks off leaves the tile it
        had unwritten.  At the end everything is written, or an error raised.
        """
        free = deque(self.buffers)
        ahead: deque[tuple[int, np.ndarray, Future[None]]] = deque()
        behind: deque[tuple[np.ndarray, Future[None]]] = deque()
        left = iter(tiles)
        try:
            while True:
                while behind and (behind[0][1].done() or not (free or ahead)):
                    buffer, future = behind.popleft()
                    future.result()
                    free.append(buffer)
                while free and (tile := next(left, None)) is not None:
                    buffer = free.popleft()
                    ahead.append((tile, buffer, self._readers.submit(self.medium.read, tile, buffer[:read])))
                if not ahead:
                    break
                tile, buffer, got = ahead.popleft()
                got.result()
                yield tile, buffer
                behind.append((buffer, self._writers.submit(self.medium.write, tile, buffer)))
            while behind:
                behind.popleft()[1].result()
        finally:  # buffers are not left to threads that still use them
            for future in (*(f for *_, f in ahead), *(f for _, f in behind)):
                if not future.cancel():
                    future.exception()

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers."""
        return sum(b.nbytes for b in self.buffers)

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown()
        self._writers.shutdown()
        self.buffers.clear()
