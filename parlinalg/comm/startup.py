"""Starting MPI, and the files in shared memory that it leaves when processes die.

MPICH 5 keeps a file in /dev/shm for the ranks of a node, about 1 MiB for each, and removes it when MPI is finalized,
so that every run that is killed or aborted leaves it behind.  Once all ranks have mapped it, its name serves nobody:
it is removed right after MPI has started, and the memory goes with the last process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from parlinalg.comm.place import RANK, SIZE, told
from parlinalg.comm.shared import FOLDER
from parlinalg.comm.streams import reserve
from parlinalg.errors import CommError
from parlinalg.units import format_bytes

OWN = "mpich_shm_"
"""What the names begin with that MPICH gives to the files of a run."""

KNOWN = (OWN, "mpich_vci_", "ucx_shm_posix_", "sm_segment.", "vader_segment.", "parlinalg-")
"""What the names begin with of all files that a run with MPICH, UCX or Open MPI may leave."""

AGE = 60.0
"""Seconds after which a file that no process holds is a leftover: processes of other containers cannot be seen here,
but the ranks of a run have all mapped its files by then."""

CELLS, CELL_BYTES = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS", "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_CELL_SIZE"


def start_mpi() -> Any:
    """Import mpi4py's `MPI`, and start MPI unless it runs already.

    Raises
    ------
    ImportError or RuntimeError
        If mpi4py is not installed, or finds no MPI.
    CommError
        If there is too little shared memory, which would end a process by SIGBUS.
    """
    reserve()
    import mpi4py

    rc: Any = getattr(mpi4py, "rc", None)
    automatic = rc is not None and rc.initialize
    if automatic and "mpi4py.MPI" not in sys.modules:
        rc.initialize, rc.finalize = False, rc.finalize is not False
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = True
    from mpi4py import MPI

    if automatic and not MPI.Is_initialized():
        _start(MPI, rc)
    if MPI.Is_initialized() and not MPI.Is_finalized():
        _unlink_own()
    return MPI


def _start(mpi: Any, rc: Any) -> None:
    """Initialize MPI as mpi4py would, where there is room for it."""
    ranks = told(SIZE) or 1
    if told(RANK) in (None, 0):
        clean(leftovers())
    if mpi.get_vendor()[0] == "MPICH":
        # Ranks of a node talk through MPICH's own memory; UCX, which it has for the network, would take four times as
        # much for a way that is never used, and dies of a segmentation fault where some ranks get it and others do not.
        os.environ.setdefault("UCX_TLS", "^shm")
        if text := problem_of_room(ranks):
            time.sleep(0 if told(RANK) in (None, 0) else 2)  # the first rank tells it, before the launcher ends all
            raise CommError(text)
    if rc.threads:
        levels = {"single": mpi.THREAD_SINGLE, "funneled": mpi.THREAD_FUNNELED, "serialized": mpi.THREAD_SERIALIZED}
        mpi.Init_thread(levels.get(rc.thread_level, mpi.THREAD_MULTIPLE))
    else:
        mpi.Init()


def _unlink_own() -> None:
    """Remove the names of MPICH's files that this process has mapped; MPI has started, so all ranks have."""
    with suppress(OSError):
        for path in {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}:
            if path.startswith(f"{FOLDER}/{OWN}") and not path.endswith(" (deleted)"):
                with suppress(OSError):  # another rank was first
                    os.unlink(path)


def problem_of_room(ranks: int) -> str:
    """Return what to do if MPICH has too little shared memory for so many ranks on this node; else an empty text."""
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return ""
    need = _need(ranks, _number(CELLS, 64))
    free = room.f_bavail * room.f_frsize
    if free < need:
        free += _taken_by_siblings()
    if free >= need:
        return ""
    left = leftovers(0)
    dead = f" ({report_left(left)})" if left else ""
    least = _need(ranks, 4)
    fewer = f", or set {CELLS}=4, which needs {format_bytes(least)} and is slower" if least < need else ""
    return (
        f"{FOLDER} has {format_bytes(free)} free of {format_bytes(room.f_blocks * room.f_frsize)}, but MPICH needs "
        f"{format_bytes(need)} there for {ranks} rank{'s' * (ranks > 1)}, and would die of SIGBUS{dead}: give the "
        f"container more (docker run --shm-size=1g){fewer}"
    )


def _need(ranks: int, cells: int) -> int:
    """Return the bytes of MPICH's file for so many ranks, each with so many cells."""
    return ranks * (cells * (_number(CELL_BYTES, 16384) + 64) + 16384)


def leftovers(age: float = AGE) -> list[Path]:
    """Return the files that dead runs of this user left in shared memory: none that any process has mapped or open."""
    found, now = [], time.time()
    with suppress(OSError, AttributeError):
        for entry in os.scandir(FOLDER):
            if entry.name.startswith(KNOWN):
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    own = entry.is_file(follow_symlinks=False) and facts.st_uid == os.getuid()
                    if own and now - facts.st_mtime >= age:
                        found.append(Path(entry.path))
    if not found:
        return []
    holders = _holders()
    return sorted(path for path in found if str(path) not in holders)


def clean(files: Iterable[Path]) -> None:
    """Remove these files."""
    for path in files:
        with suppress(OSError):
            path.unlink()


def report_left(files: list[Path]) -> str:
    """Return how much dead runs left, and what removes it."""
    which = f"{len(files)} file{'s' * (len(files) > 1)}"
    return f"dead runs left {which} there, {format_bytes(held(files))}; parlinalg doctor --clean removes them"


def held(files: Iterable[Path]) -> int:
    """Return the bytes of memory that these files hold."""
    total = 0
    for path in files:
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def _holders() -> dict[str, set[int]]:
    """Return the processes that have each file of shared memory mapped or open."""
    found: dict[str, set[int]] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        folder = f"/proc/{pid}"
        try:
            with open(f"{folder}/maps") as maps:
                paths = {line.split(maxsplit=5)[-1].strip() for line in maps if FOLDER in line}
            for descriptor in os.listdir(f"{folder}/fd"):
                with suppress(OSError):
                    paths.add(os.readlink(f"{folder}/fd/{descriptor}"))
        except OSError:  # it has ended, or is another user's; the files are this user's alone
            continue
        for path in paths:
            if path.startswith(FOLDER):
                found.setdefault(path, set()).add(pid)
    return found


def _taken_by_siblings() -> int:
    """Return the bytes that ranks of this run, which the same launcher started, hold already."""
    total = 0
    for path, pids in _holders().items():
        if Path(path).name.startswith(OWN) and any(_parent(pid) == os.getppid() for pid in pids):
            total += held([Path(path)])
    return total


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return -1


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
