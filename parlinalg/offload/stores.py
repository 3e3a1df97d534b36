"""Stores of bytes that are offloaded for a while: on a disk, by threads, or in page-locked host memory."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from parlinalg.backend import Backend
from parlinalg.errors import OffloadError
from parlinalg.offload.disk import DiskFile, aligned, checksum, whole_pages

BOUNCE = 1 << 22  # bytes copied at a time at most, through a buffer that may be read and written past the page cache
GROWTH = 1 << 26  # bytes by which the file grows at least


class OffloadedBytes:
    """Offloaded bytes; their place is given up when nobody refers to this any more.

    Attributes
    ----------
    nbytes : int
    """

    __slots__ = ("__weakref__", "got", "hold", "nbytes", "offset", "written")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.offset = 0
        self.hold: np.ndarray | None = None
        self.written: Future[int] | None = None
        self.got: Future[np.ndarray] | None = None


class Store(Protocol):
    """A store of offloaded bytes."""

    def put(self, raw: np.ndarray) -> OffloadedBytes:
        """Take bytes; the array may be let go, and is not written to."""

    def soon(self, away: OffloadedBytes) -> None:
        """Begin to bring bytes back."""

    def get(self, away: OffloadedBytes) -> np.ndarray:
        """Return the bytes, which are not to be written to."""

    def close(self) -> None:
        """End it."""


class DiskStore:
    """A file that grows as needed; places of the same size are used again.

    Parameters
    ----------
    path : Path
    pending : int
        Bytes that wait to be written at most; beyond, `put` waits.
    """

    def __init__(self, path: Path, pending: int) -> None:
        self.file = DiskFile(path, 0)
        self.pending = pending
        self._at_a_time = min(BOUNCE, whole_pages(max(1, pending // 8)))
        self._bounce = aligned(self._at_a_time), aligned(self._at_a_time)
        self._writer = ThreadPoolExecutor(1, "parlinalg-offload-write")
        self._reader = ThreadPoolExecutor(1, "parlinalg-offload-read")
        self._under_way: deque[tuple[Future[int], int]] = deque()
        self._waiting = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0
        self._lock = threading.RLock()  # places are given up wherever the last reference goes

    def put(self, raw: np.ndarray) -> OffloadedBytes:
        self._settle(self.pending - raw.nbytes)
        away = OffloadedBytes(raw.nbytes)
        room = whole_pages(raw.nbytes)
        away.offset = self._take(room)
        away.hold = raw
        away.written = self._writer.submit(self._write, weakref.ref(away))
        self._under_way.append((away.written, room))
        self._waiting += room
        weakref.finalize(away, self._give, away.offset, room).atexit = False
        return away

    def _settle(self, most: int) -> None:
        """Take in what was written, and wait until at most so many bytes wait."""
        while self._under_way and (self._under_way[0][0].done() or self._waiting > max(0, most)):
            future, room = self._under_way.popleft()
            self._waiting -= room
            future.result()

    def _take(self, room: int) -> int:
        with self._lock:
            if self._free[room]:
                return self._free[room].pop()
            offset = self._end
            if offset + room > self.file.nbytes:
                self.file.grow(offset + max(room, GROWTH if offset else room))
            self._end = offset + room
            return offset

    def _give(self, offset: int, room: int) -> None:
        with self._lock:
            self._free[room].append(offset)

    def _write(self, away: weakref.ref[OffloadedBytes]) -> int:
        """Write bytes, unless nobody needs them any more; gives their checksum."""
        if (found := away()) is None:
            return 0
        raw, offset = found.hold, found.offset
        assert raw is not None
        del found  # its place may be given up, and is then another's after
        crc = checksum(raw)
        for at in range(0, raw.size, self._at_a_time):
            part = raw[at : at + self._at_a_time]
            buffer = self._bounce[0][: whole_pages(part.size)]
            buffer[: part.size] = part
            self.file.write(buffer, offset + at)
        if (found := away()) is not None:
            found.hold = None
        return crc

    def soon(self, away: OffloadedBytes) -> None:
        if away.got is None and away.hold is None:
            assert away.written is not None
            away.got = self._reader.submit(self._read, away.offset, away.nbytes, away.written)

    def get(self, away: OffloadedBytes) -> np.ndarray:
        held = away.hold
        if held is not None:
            return held
        self.soon(away)
        assert away.got is not None
        raw = away.got.result()
        away.got = None
        return raw

    def _read(self, offset: int, nbytes: int, written: Future[int]) -> np.ndarray:
        """Return the bytes, once they are written; their place, on which the thread has no hand, is free once used."""
        crc = written.result()
        raw = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, self._at_a_time):
            part = raw[at : at + self._at_a_time]
            buffer = self._bounce[1][: whole_pages(part.size)]
            self.file.read(buffer, offset + at)
            part[:] = buffer[: part.size]
        if checksum(raw) != crc:
            raise OffloadError(
                f"{self.file.path}: {nbytes} bytes at {offset} are not what was written (their checksum differs): the "
                "file was changed by someone else, or the disk fails"
            )
        return raw

    def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self.file.close(remove=True)


class InMemory:
    """A store whose arrays have their bytes at hand."""

    def soon(self, away: OffloadedBytes) -> None:
        """Do nothing: it is there."""

    def get(self, away: OffloadedBytes) -> np.ndarray:
        assert away.hold is not None
        return away.hold


class HostStore(InMemory):
    """Page-locked host memory; buffers of the same size are used again."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def put(self, raw: np.ndarray) -> OffloadedBytes:
        away = OffloadedBytes(raw.nbytes)
        free = self._free[raw.nbytes]
        buffer = free.pop() if free else self.backend.staging(raw.nbytes, np.uint8)
        buffer[:] = raw
        away.hold = buffer
        weakref.finalize(away, free.append, buffer).atexit = False
        return away

    def close(self) -> None:
        self._free.clear()
