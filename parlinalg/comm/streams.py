"""The standard streams of a process, which may be full, closed, stuck, or without a reader.

Whoever says why a run ends must end it all the same, and a training goes on without an audience.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

PATIENCE = 2.0
"""Seconds that the last words of a process wait for a reader."""

_PIECE = 4096  # bytes that a pipe takes at once if it takes any

_lost: list[OSError] = []


def reserve() -> None:
    """Open the null device in place of each closed standard stream.

    Otherwise the next file or socket that is opened, MPI's say, gets the number of standard error, and reads what is
    written there.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the least free number: this one


def say(text: str) -> None:
    """Write to standard error in one piece, so that ranks do not interleave; never raise, and never wait for long."""
    if sys.__stderr__ is None:  # closed before this program began: what has its number now is something else
        return
    data = (text.rstrip("\n") + "\n").encode(errors="replace")
    end = monotonic() + PATIENCE
    try:
        mode = os.fstat(2).st_mode
        piece = _PIECE if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else len(data)
        while data and _writable(2, end - monotonic()):
            data = data[os.write(2, data[:piece]) :]
    except (OSError, ValueError):
        pass


def flush() -> None:
    """Bring out what this process has printed; never raise, and never wait for long.

    What standard error does not take is dropped.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if _writable(stream.fileno(), PATIENCE):
                stream.flush()
        except (OSError, ValueError, AttributeError):  # full; closed or not a file; none
            if stream is not None and stream is sys.stderr:
                _empty(stream)


def _writable(descriptor: int, seconds: float) -> bool:
    """Return True once a write would not block (it may fail), or False after so many seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def complain(text: str) -> None:
    """Write a line to `sys.stderr`, if it can be written."""
    if sys.stderr is not None:
        stream = Quiet(sys.stderr)
        stream.write(f"{text}\n")
        stream.flush()


def tell(text: str = "", end: str = "\n") -> None:
    """Print to standard output at once.

    A reader who has seen enough (`| head`) may close the pipe.  What cannot be written is left out from then on; where
    the reason is another, such as a full disk, standard error says so once, and `lost` is true.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if error.errno != errno.EPIPE:
            _lost.append(error)
            complain(f"parlinalg: standard output cannot be written ({error}): going on without it")


def _empty(stream: TextIO) -> None:
    """Throw away what a stream could not write: Python tries again at its end, and then exits with 120."""
    try:
        descriptor = stream.fileno()
        kept = os.dup(descriptor)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, descriptor)
            stream.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(nowhere)
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        pass


def lost() -> bool:
    """Return True if something could not be written to standard output, though nobody closed it."""
    return bool(_lost)


class Lines:
    """Lines that are added to a log; a log that cannot be written does not end a training.

    What the file does not take is written before the next line.  Standard error reports the first failure.

    Parameters
    ----------
    path : Path
    file : FileIO, optional
        The open file.  By default it is opened for each line, and made where it is missing.

    Attributes
    ----------
    error : OSError or None
        Why lines are not written; None if all are.
    """

    def __init__(self, path: Path, file: FileIO | None = None) -> None:
        self.error: OSError | None = None
        self._waiting = b""
        self._path, self._file, self._complained = path, file, False

    def add(self, line: str = "") -> None:
        """Write what could not be written before, and this line."""
        self._waiting += line.encode()
        try:
            with self._path.open("ab", buffering=0) if self._file is None else nullcontext(self._file) as file:
                while self._waiting:
                    self._waiting = self._waiting[file.write(self._waiting) :]
            self.error = None
        except OSError as error:
            self.error = error
            if not self._complained:
                self._complained = True
                complain(f"parlinalg: {self._path} cannot be written ({error}): the training goes on")


class Quiet:
    """A text stream that drops what it cannot write, for a progress bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: Any = stream
        self._works = True

    def write(self, text: str) -> int:
        """Write the text, unless an earlier one could not be written."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try("flush")

    def _try(self, name: str, *arguments: Any) -> None:
        if self._works:
            try:
                getattr(self._stream, name)(*arguments)
            except (OSError, ValueError):
                self._works = False
                _empty(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
