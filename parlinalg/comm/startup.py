"""Starting MPI: who launched this process, where its ranks are, and the files in shared memory that dead runs leave.

MPICH 5 keeps a file in /dev/shm for the ranks of a node, about 1 MiB for each, and removes it when MPI is finalized,
so that every run that is killed or aborted leaves it behind.  Once all ranks have mapped it, its name serves nobody:
it is removed right after MPI has started, and the memory goes with the last process.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlinalg.comm.base import Comm
from parlinalg.comm.shared import FOLDER
from parlinalg.comm.streams import reserve
from parlinalg.errors import CommError
from parlinalg.units import format_bytes

OWN = "mpich_shm_"
"""The prefix of MPICH's files of a run."""

KNOWN = (OWN, "mpich_vci_", "ucx_shm_posix_", "sm_segment.", "vader_segment.", "parlinalg-")
"""The prefixes of the files that a run with MPICH, UCX or Open MPI may leave."""

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
    ranks = launcher_number(SIZE) or 1
    if launcher_number(RANK) in (None, 0):
        clean(leftovers())
    if mpi.get_vendor()[0] == "MPICH":
        # Ranks of a node talk through MPICH's own memory; UCX, which it has for the network, would take four times as
        # much for a way that is never used, and dies of a segmentation fault where some ranks get it and others do not.
        os.environ.setdefault("UCX_TLS", "^shm")
        if text := problem_of_room(ranks):
            time.sleep(0 if launcher_number(RANK) in (None, 0) else 2)  # the first rank tells it first
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
    """Return advice if MPICH has too little shared memory for so many ranks on this node; else an empty text."""
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
    """Return the memory that dead runs left and the command that removes it, as text."""
    which = f"{len(files)} file{'s' * (len(files) > 1)}"
    return f"dead runs left {which} there, {format_bytes(bytes_held(files))}; parlinalg doctor --clean removes them"


def bytes_held(files: Iterable[Path]) -> int:
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
            total += bytes_held([Path(path)])
    return total


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return -1


def _number(name: str, default: int) -> int:
    found = _number_in(os.environ, name)
    return default if found is None else found


#: Set by mpiexec of Open MPI, and of MPICH and its kin (Hydra); also where Slurm starts their daemons.
MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Launched:
    """The launcher of this process, and the process's place among those it started.

    Attributes
    ----------
    by : {"mpiexec", "srun", "one"}
        "one": alone.
    ranks, rank : int
        The number of processes started together, and this one's rank, as the launcher says (mpiexec does not say
        the rank alike everywhere: then −1).
    """

    by: str
    ranks: int = 1
    rank: int = 0


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """Return how this process was started, by the variables that launchers set.

    A script of sbatch is one process, though Slurm tells it how many tasks there may be; those that srun starts have a
    step of their own.

    >>> launched({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"})
    Launched(by='srun', ranks=8, rank=3)
    >>> launched({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).by
    'one'
    """
    env = os.environ if environ is None else environ
    if not any(name in env for name in MPIEXEC):
        tasks, rank = _number_in(env, "SLURM_STEP_NUM_TASKS"), _number_in(env, "SLURM_PROCID")
        if tasks is not None and rank is not None:
            return Launched("srun", tasks, rank)
    ranks = max((_number_in(env, name) or 1 for name in SIZES), default=1)
    return Launched("mpiexec", ranks, -1) if any(name in env for name in SIZES) else Launched("one")


def launch_problem(size: int, rank: int) -> str:
    """Return the contradiction between the launcher and MPI, for which this is `rank` of `size`, as text, or ""."""
    found = launched()
    if found.by != "srun":
        return ""
    if size == 1 and found.ranks > 1:
        return (
            f"srun started {found.ranks} processes, but each sees only itself: Slurm and MPI did not meet.  Start with "
            "srun --mpi=pmi2 (MPICH, Intel MPI) or srun --mpi=pmix (Open MPI; `srun --mpi=list` shows what there is), "
            "or with mpiexec in the job; one task alone is srun -n 1"
        )
    if (size, rank) != (found.ranks, found.rank):
        return (
            f"MPI says that this is rank {rank} of {size}, Slurm that it is task {found.rank} of {found.ranks}: start "
            "all tasks of the job step by one srun, with one --mpi, or use mpiexec in the job"
        )
    return ""


def _number_in(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    return int(text) if text.isdigit() else None


RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""The variables of Hydra (MPICH, Intel MPI), Open MPI, MVAPICH and Slurm."""


def place_on_node(comm: Comm) -> tuple[int, int]:
    """Return this process's number among the ranks started on its node, and how many they are.

    A communicator of some of the ranks does not know the others, who share the node's cores and GPUs all the same; the
    launcher does.
    """
    if comm.imagined:
        return comm.local_rank, comm.local_size
    rank, size = launcher_number(RANK), launcher_number(SIZE)
    return (
        comm.local_rank if rank is None else rank,
        comm.local_size if size is None else max(size, comm.local_size),
    )


def launcher_number(names: tuple[str, ...]) -> int | None:
    """Return the number that the launcher gave under the first of these names; None if it gave none."""
    return next((found for name in names if (found := _number_in(os.environ, name)) is not None), None)


def ranks_map(comm: Comm) -> list[dict[str, Any]]:
    """Return `{"rank", "host", "pid"}` of each rank, on every rank.  Collective.

    When a rank is killed the launcher names its process only; this list, printed at the start, says which rank it was.
    """
    mine = {"rank": comm.world_ranks[comm.rank], "host": socket.gethostname(), "pid": os.getpid()}
    return comm.share(mine, others="by rank")


def about_mpi() -> dict[str, str]:
    """Return facts about the MPI that mpi4py loads: `library`, `standard`, `mpi4py` and `threads`, or the `problem`."""
    from importlib.metadata import PackageNotFoundError, version  # takes long, and few programs ask

    try:
        own = version("mpi4py")
    except PackageNotFoundError:
        return {"problem": "mpi4py is not installed"}
    try:
        MPI = start_mpi()
    except CommError as error:
        return {"problem": str(error)}
    except (ImportError, RuntimeError) as error:
        return {"problem": f"mpi4py {own} cannot load an MPI library: {error}"}
    name, numbers = MPI.get_vendor()
    levels = {
        MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }  # fmt: skip
    return {
        "library": f"{name} {'.'.join(map(str, numbers))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": own,
        "threads": levels[MPI.Query_thread()],
    }


def try_gpu_buffers() -> None:
    """Send one GPU buffer to this process itself by MPI: the trial that `parlinalg doctor` runs in a child process.

    Prints "yes" if the values arrive; an MPI that does not know GPU memory fails, or ends the process.
    """
    import numpy as np
    from mpi4py import MPI

    from parlinalg.backend import select_backend

    backend = select_backend("cupy")
    sent = backend.from_host(np.arange(1000, dtype=np.float64))
    received = backend.zeros(1000, np.float64)
    backend.synchronize()
    request = MPI.COMM_SELF.Irecv((received, 1000, MPI.DOUBLE), 0, 7)
    MPI.COMM_SELF.Send((sent, 1000, MPI.DOUBLE), 0, 7)
    request.Wait()
    MPI.COMM_SELF.Allreduce(MPI.IN_PLACE, (received, 1000, MPI.DOUBLE), MPI.SUM)
    backend.synchronize()
    print("yes" if (backend.to_host(received) == np.arange(1000)).all() else "values are lost")
