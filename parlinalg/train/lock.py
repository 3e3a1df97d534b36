"""The lock of a folder that one training at a time writes to.

It is a file in the folder that its holder locks by flock(2) and describes itself in.  The kernel drops the lock when
the process ends, however it ends, so that a killed training never blocks the next one.

Where a file system has no locks, the description counts alone: it is void once that process has ended.  One that was
left on another host cannot be judged, and blocks until the file is removed.

On NFS, Linux (2.6.12 and later) makes it a lock of the server, which holds between hosts, and which the server drops
some time after a host is lost (with NFS 4, after its lease of 90 seconds).  Mounted with `nolock`, or with `local_lock`
as `all` or `flock`, it holds between the processes of one host only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlinalg.errors import CheckpointError
from parlinalg.files import parse_json, read_bytes

NAME = ".parlinalg.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TRIES, _PAUSE = 40, 0.025  # while another process is about to write its description
_MOST = 4096  # bytes of a description


@dataclass(eq=False)
class _Held:
    """A lock of this process, which several objects may share."""

    path: Path
    descriptor: int
    token: str
    count: int = 1


_held: dict[tuple[int, int], _Held] = {}


def _forget() -> None:
    """Drop what a forked process has of its parent's locks, which would keep them when the parent has ended."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


class FolderLock:
    """The right to write to a folder, which one process has at a time.

    Several objects of one process share it: what they do there comes one after the other.  It is for rank 0 of a
    training; the others ask that one.

    Parameters
    ----------
    folder : Path
        One that exists.

    Raises
    ------
    CheckpointError
        If another process has it, naming that process and its host; or if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._key = _acquire(folder / NAME)
        self._end = weakref.finalize(self, _release, self._key)

    @property
    def in_place(self) -> bool:
        """True if the folder still has this lock: it has not been removed, moved or replaced."""
        held = _held.get(self._key)
        return held is not None and _described(held.path).get("token") == held.token

    def moved(self, folder: Path) -> None:
        """Record the new name of the folder."""
        _held[self._key].path = folder / NAME

    def release(self) -> None:
        """Give the right back."""
        self._end()


def _acquire(path: Path) -> tuple[int, int]:
    """Lock the file, or count one more who shares the lock; return the key of the lock."""
    for left in reversed(range(_TRIES)):
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            key = _identity(os.fstat(descriptor))
            if key in _held:
                os.close(descriptor)
                _held[key].count += 1
                return key
            taken = _take(path, descriptor)
            if taken and _same(path, key):
                _held[key] = _Held(path, descriptor, _describe(descriptor))
                return key
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise CheckpointError(f"the folder {path.parent} cannot be locked: {path}: {error.strerror}") from None
        os.close(descriptor)
        if not taken:
            holder = _described(path)
            if (holder and not _ended(holder)) or not left:
                raise CheckpointError(_refusal(path, holder))
            time.sleep(_PAUSE)  # its holder is about to describe itself, or to remove it
    raise CheckpointError(f"the folder {path.parent} cannot be locked: others replace {path} again and again")


def _take(path: Path, descriptor: int) -> bool:
    """Return True if this process has the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _described(path)
        return not holder or _ended(holder)


def _release(key: tuple[int, int]) -> None:
    held = _held.get(key)
    if held is None:  # a forked process: the lock is its parent's
        return
    held.count -= 1
    if held.count:
        return
    del _held[key]
    with suppress(OSError):
        if _same(held.path, key):
            held.path.unlink()
    os.close(held.descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _same(path: Path, key: tuple[int, int]) -> bool:
    try:
        return _identity(path.lstat()) == key
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------- who has it


def _describe(descriptor: int) -> str:
    """Write who has the lock; return its token."""
    token = os.urandom(8).hex()
    values = {
        "token": token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "system": _system(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(values).encode(), 0)
    return token


def _described(path: Path) -> Mapping[str, Any]:
    """Return the description of a lock's holder; nothing if it cannot be understood."""
    try:
        values = parse_json(read_bytes(path, _MOST, follow=False))
    except (OSError, ValueError):
        return {}
    known = isinstance(values, dict) and type(values.get("pid")) is int and 0 < values["pid"] < 1 << 31
    return values if known else {}


def _ended(holder: Mapping[str, Any]) -> bool:
    """Return True if the process that is described has certainly ended."""
    return bool(holder) and holder.get("system") == _system() and _began(holder["pid"]) != holder.get("began")


def _system() -> str:
    """Return the scope of process numbers: this host since it was started, and in it this container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _began(pid: int) -> str | None:
    """Return when a process began, in whatever units; None if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # somebody else's
        pass
    return "alive"


def _refusal(path: Path, holder: Mapping[str, Any]) -> str:
    who = "another process, which has not left its name"
    if holder:
        who = f"process {holder['pid']} on host {str(holder.get('host'))[:80]!r}, since {str(holder.get('since'))[:40]}"
    text = (
        f"the folder {path.parent} is in use by another training ({who}): wait for its end, stop it, or give this one "
        "another folder; nothing in it was changed"
    )
    if holder and holder.get("system") != _system():
        text += f".  If it has certainly ended, remove {path}"
    return text
