"""Ranks talking: one protocol (`Comm`) over MPI, over one rank without MPI, and over NCCL.

`import parlinalg.comm` neither needs nor starts MPI; `open_comm` does.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from parlinalg.backend import Backend
from parlinalg.comm.base import Comm, Handle
from parlinalg.comm.check import check_replicas
from parlinalg.comm.imagined import ImaginedComm, imagined_world
from parlinalg.comm.ledger import Book, ledger
from parlinalg.comm.signals import StopSignals
from parlinalg.comm.single import SingleComm
from parlinalg.comm.startup import launch_problem, launched, ranks_map, start_mpi
from parlinalg.comm.together import together
from parlinalg.comm.trace import TimedBook, trace
from parlinalg.errors import CommError, ConfigError
from parlinalg.settings import unknown_settings, wrong_setting

__all__ = [
    "Book",
    "Comm",
    "Handle",
    "ImaginedComm",
    "SingleComm",
    "StopSignals",
    "TimedBook",
    "between_gpus",
    "check_replicas",
    "ledger",
    "open_comm",
    "ranks_map",
    "together",
    "trace",
]


def open_comm(comm: Any = None) -> Comm:
    """Return the communicator to build on.

    Parameters
    ----------
    comm : None, mpi4py.MPI.Comm or Comm
        None: a duplicate of `MPI.COMM_WORLD`, or a single rank where there is one, mpi4py is not installed or
        `PARLINALG_MPI=0`; within `parlinalg.imagine` the imagined ranks.  An mpi4py communicator: a duplicate of it.
        A `Comm` is returned as it is.

    Raises
    ------
    CommError
        If the process was started among several by an mpiexec whose MPI this process does not have, there is too little
        shared memory for MPI, or the process was forked from a rank.
    ConfigError
        On all ranks, if a variable of the environment has a value on any that it cannot have.
    """
    if isinstance(comm, Comm):
        return comm
    if (world := imagined_world()) is not None:
        if comm is not None:
            raise CommError(f"comm={comm!r}: a program that is imagined has no communicator of MPI; leave comm out")
        return world
    wrong = wrong_setting()
    if comm is None and os.environ.get("PARLINALG_MPI") == "0":
        return _single(wrong)
    try:
        MPI = start_mpi()
    except (ImportError, RuntimeError) as error:
        if isinstance(error, CommError):
            raise
        _check_launcher(1, f"mpi4py cannot be used here ({error})")
        return _single(wrong)
    from parlinalg.comm.exits import guard, guard_children
    from parlinalg.comm.mpi import MpiComm, nodes_of

    guard_children()

    if comm is None:
        comm = MPI.COMM_WORLD
        _check_launcher(comm.size, f"mpi4py uses {MPI.Get_library_version().splitlines()[0]!r}")
        if comm.size > 1 and launched().by == "srun":
            for reported in comm.allgather(launch_problem(comm.size, comm.rank)):
                if reported:
                    raise CommError(reported)
    if not isinstance(comm, MPI.Intracomm):
        raise CommError(f"comm is an mpi4py communicator, such as MPI.COMM_WORLD, or None for that, not {comm!r}")
    if comm.size == 1:
        return _single(wrong)
    for rank, reported in enumerate(comm.allgather(wrong)):
        if reported:
            raise ConfigError(f"{reported} (the environment of rank {rank})")
    if comm.rank == 0:
        _warn_of_unknown()
    own = comm.Dup()
    made = MpiComm(own, (), nodes_of(own), [], os.environ.get("PARLINALG_CHECK", "0") not in ("", "0"))
    guard(made)
    return made


def _single(wrong: str) -> SingleComm:
    if wrong:
        raise ConfigError(wrong)
    _warn_of_unknown()
    return SingleComm()


def _warn_of_unknown() -> None:
    for sentence in unknown_settings():
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def between_gpus(comm: Comm, backend: Backend) -> Comm:
    """Return the communicator of a grid's blocks: over NCCL where every rank has its own GPU, else `comm`.

    `PARLINALG_NCCL=0` leaves all to MPI; `PARLINALG_NCCL=1` raises a CommError where NCCL cannot be used, which "auto",
    the default, passes over.  Collective.
    """
    wish = os.environ.get("PARLINALG_NCCL") or "auto"
    if wish not in ("auto", "0", "1"):
        raise CommError(f"PARLINALG_NCCL={wish!r}: use 0 (never), 1 (always) or auto (where every rank has a GPU)")
    if comm.imagined or not backend.cuda or wish == "0" or comm.size == 1:
        return comm
    try:
        from parlinalg.comm.nccl import nccl_over

        problem = ""
    except ImportError as error:
        problem = f"CuPy's NCCL cannot be loaded: {error}"
    try:
        for rank, theirs in enumerate(comm.share(problem, others="alike")):
            if theirs:
                raise CommError(f"rank {rank}: {theirs}; PARLINALG_NCCL=0 leaves the blocks to MPI")
        return nccl_over(comm)
    except CommError:
        if wish == "1":
            raise
        return comm


def _check_launcher(size: int, why: str) -> None:
    """Raise if a launcher started several processes that would not see one another."""
    if size == 1 and (reported := launch_problem(1, 0)):
        raise CommError(f"{reported} ({why})")
    started = launched().ranks
    if size == 1 and started > 1:
        raise CommError(
            f"{started} processes were started together, but each sees only itself: {why}; "
            "use the mpiexec of the MPI that mpi4py loads"
        )
