"""Files of offloaded data: made, read, written and removed, with errors that all ranks raise alike.

A file has its full size from the start, so that a full disk is met when it is made and not in the middle of a step.
Where the file system can, reads and writes go past the page cache: what is offloaded then takes no memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np

from parlinalg.backend import Backend
from parlinalg.backend.numpy import NUMPY
from parlinalg.backend.shapes import values_needed
from parlinalg.comm.base import Comm
from parlinalg.comm.together import together
from parlinalg.errors import OffloadError
from parlinalg.units import format_bytes

#: Places in files, lengths and memory are multiples of this, as reads and writes past the page cache ask for.
ALIGN = 4096


def whole_pages(n: int) -> int:
    """Return the least multiple of `ALIGN` that is at least n."""
    return -(-n // ALIGN) * ALIGN


def aligned(n: int, backend: Backend = NUMPY) -> np.ndarray:
    """Return a host buffer of n zero bytes that begins at a multiple of `ALIGN`.

    It is page-locked where copies are faster so.
    """
    spare = backend.staging(n + ALIGN, np.uint8)
    spare[:] = 0
    start = -spare.ctypes.data % ALIGN
    return spare[start : start + n]


def checksum(buffer: np.ndarray) -> int:
    """Return a number that changes with the bytes of a contiguous buffer."""
    return zlib.crc32(buffer.data)


class DiskFile:
    """A file of fixed size, open for this process alone.

    Parameters
    ----------
    path : Path
        Its folder is made if it is not there.
    nbytes : int
        Its size.
    existing : bool
        Open the file that is there, of whatever size, and do not make one.

    Raises
    ------
    OffloadError
        If the folder cannot be written, the disk or a limit on files is too small, or another process has the file; the
        message names the path, and the bytes needed and free.
    """

    def __init__(self, path: Path, nbytes: int, *, existing: bool = False) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fd = -1
        try:
            if not existing:
                path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if existing else os.O_CREAT)
            self._fd, self.direct = _open(path, flags)
        except OSError as error:
            if existing and error.errno == errno.ENOENT:
                raise OffloadError(f"{path} is not there, or was taken away: nothing can be resumed from it") from None
            raise OffloadError(
                f"the offload folder {path.parent} cannot be used: {error.strerror} ({error.filename or path}); "
                "give path= a folder that this user may write"
            ) from None
        self._lock()
        if existing:
            self.nbytes = os.fstat(self._fd).st_size
        else:
            self._allocate()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise OffloadError(f"{self.path} is in use by another process; give each run a path= of its own") from None
        except OSError:  # a file system without locks
            pass

    def _allocate(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            self.close()
            with suppress(OSError):
                self.path.unlink()
            fail(error, "made", self.path, self.nbytes)

    def grow(self, nbytes: int) -> None:
        """Make the file larger."""
        try:
            os.posix_fallocate(self._fd, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            fail(error, f"grown from {format_bytes(self.nbytes)}", self.path, nbytes - self.nbytes)
        self.nbytes = nbytes

    def check(self) -> None:
        """Raise an OffloadError if the file is shorter than it was made."""
        due = self.nbytes  # first: another thread may make the file larger after its size was asked
        size = os.fstat(self._fd).st_size
        if size < due:
            raise OffloadError(
                f"{self.path} was cut short by someone else: it has {size} bytes of {due}; none of it is used"
            )

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Fill a buffer of bytes from the file."""
        done, view = 0, memoryview(buffer.data)
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                fail(error, "read", self.path, len(view))
            if not n:
                self.check()
                raise OffloadError(f"{self.path} ends at byte {offset + done}, where {len(view) - done} more are due")
            done += n

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Write a buffer of bytes into the file."""
        self.check()
        done, view = 0, memoryview(buffer.data)
        while done < len(view):
            try:
                done += os.pwritev(self._fd, [view[done:]], offset + done)
            except OSError as error:
                fail(error, "written", self.path, len(view) - done)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            fail(error, "written", self.path, self.nbytes)

    def fileno(self) -> int:
        """Return the number by which the system knows the open file."""
        return self._fd

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and take it away if asked."""
        if self._fd >= 0:
            if remove:
                with suppress(OSError):
                    self.path.unlink()
            os.close(self._fd)
            self._fd = -1


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Return the file opened, past the page cache if the file system can."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600), False


def free_bytes(folder: Path) -> int:
    """Return the bytes free for this user on the disk of a folder."""
    return shutil.disk_usage(folder).free


def fail(error: OSError, done: str, path: Path, needed: int) -> NoReturn:
    """Raise an OffloadError that says what could not be done, why, and what would help."""
    text = f"{path} cannot be {done}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(path.parent)
        text += (
            f"; {needed} bytes ({format_bytes(needed)}) are needed, {free} ({format_bytes(free)}) are free in "
            f"{path.parent}: make room there, or give path= a folder on another disk"
        )
    elif error.errno == errno.EFBIG:
        text += f"; {needed} bytes are needed, which the file system or a limit (ulimit -f) does not allow"
    else:
        text += f" ({needed} bytes)"
    raise OffloadError(text) from error


def process_number(comms: Sequence[Comm]) -> int:
    """Return this process's number among all that were started together: files of several grids may share a folder.

    Raises
    ------
    ValuesNeeded
        If the ranks are imagined.
    """
    if comms[0].imagined:
        right = "leave it out of what is imagined, or let pla.plan_training count it"
        raise values_needed("offloading to a disk", right)
    return comms[0].world_ranks[comms[0].rank]


class Closing:
    """A context manager that closes at its end."""

    def close(self) -> None:
        """Release everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def raise_together(comms: Sequence[Comm], problem: OffloadError | None, what: str) -> None:
    """Raise an OffloadError on all ranks if one has a problem.  Collective.

    Raises
    ------
    OffloadError
        With the message of the first rank that has one.
    """

    def fail() -> None:
        if problem is not None:
            raise problem

    together(comms, fail, what, (OffloadError,))
