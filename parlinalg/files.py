"""Files that others may have written or changed, read within limits; and files that appear whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
from contextlib import suppress
from typing import Any

from parlinalg.units import format_bytes

MOST_JSON = 1 << 30
"""Bytes of the longest file that is read as JSON."""

Path = str | os.PathLike[str]


def open_regular(path: Path, *, follow: bool = True) -> int:
    """Return a descriptor to read a regular file by.

    Opening a FIFO would wait for a writer, and opening a device may change it: both are refused before they are opened.

    Parameters
    ----------
    path : str or path
    follow : bool
        True if a symbolic link stands for what it leads to; else it is refused.

    Raises
    ------
    OSError
        If the file cannot be opened, or is anything but a regular file; `strerror` says why.
    """
    found = os.stat(path, follow_symlinks=follow)
    _check_regular(found, path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _check_regular(os.fstat(descriptor), path)  # it may have been replaced
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path, most: int = MOST_JSON, *, follow: bool = True) -> bytes:
    """Return the contents of a regular file; arguments and errors as of `open_regular`.

    Raises
    ------
    OSError
        If it has more than `most` bytes, too.
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most}", os.fspath(path))
        return file.read(size)  # a larger number would be allocated first


def parse_json(text: str | bytes) -> Any:
    """Return the value of a text in JSON; bytes are UTF-8.

    Raises
    ------
    ValueError
        If it is not JSON, names a key twice in one object, or is nested too deep or too large to be held.
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except MemoryError:
        raise ValueError("it is too large to be held in memory") from None


def read_json(path: Path) -> Any:
    """Return the value of a file in JSON; errors as of `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, MOST_JSON))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the key {name[:80]!r} twice in one object")
    return found


def _check_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kinds = {
        stat.S_IFDIR: (errno.EISDIR, "a folder"),
        stat.S_IFIFO: (errno.EINVAL, "a FIFO"),
        stat.S_IFLNK: (errno.ELOOP, "a symbolic link"),
        stat.S_IFSOCK: (errno.EINVAL, "a socket"),
    }
    number, kind = kinds.get(stat.S_IFMT(found.st_mode), (errno.EINVAL, "a device"))
    raise OSError(number, f"it is {kind}, not a file", os.fspath(path))


# ---------------------------------------------------------------------------------------------- written aside


def replace(aside: Path, path: Path) -> None:
    """Give a file or folder that was written aside its name, in place of what has it.

    A file, and on Linux a folder too, takes the place of the old one in one step: at any time one of the two has the
    name.

    Raises
    ------
    OSError
        If it cannot be renamed; what had the name still has it.
    """
    if not os.path.isdir(aside) or not os.path.lexists(path):
        os.replace(aside, path)
    else:
        if not _exchanged(aside, path):
            old = f"{os.fspath(aside)}.old"
            os.rename(path, old)
            try:
                os.rename(aside, path)
            except OSError:
                os.rename(old, path)
                raise
            os.rename(old, aside)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(os.path.dirname(os.fspath(path)) or ".")


def _exchanged(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step; return False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until what was written to a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can say so."""
    with suppress(OSError):
        sync(folder)


def free_space(error: BaseException, folder: Path) -> str:
    """Return the free space of a folder as the end of a message, if the error is a full disk; else an empty text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            return f"; {format_bytes(shutil.disk_usage(folder).free)} are free in {os.fspath(folder)}"
    return ""
