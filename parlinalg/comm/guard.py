"""The guards of a process that has opened a communicator: its monitor thread and its exit hooks, one of each."""

from __future__ import annotations

import os

from mpi4py import MPI

from parlinalg.comm.exits import Exits
from parlinalg.comm.monitor import Monitor, neighbours, time_limit, warn_without_threads
from parlinalg.comm.mpi import MpiComm
from parlinalg.comm.places import ranks_map
from parlinalg.errors import CommError

_exits: list[Exits] = []
"""The exit hooks of this process, once there are some."""


def guard_children() -> None:
    """Keep MPI out of the processes that this one forks.

    Raises
    ------
    CommError
        In such a process.
    """
    if not _exits:
        _exits.append(Exits(Monitor(time_limit())))
        _exits[0].install()
    elif _exits[0].pid != os.getpid():
        raise CommError(
            f"process {os.getpid()} was forked from a rank of MPI, process {_exits[0].pid}, and cannot talk to others; "
            "communicate in the rank, or start ranks by mpiexec"
        )


def guard(comm: MpiComm) -> None:
    """Watch the members of a communicator that was just opened.  Collective over them."""
    places = [f"host {place['host']}, pid {place['pid']}" for place in ranks_map(comm)]
    exits = _exits[0]
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    near = neighbours(comm)
    if not exits.several:
        exits.install_for_several()
        if not threads:
            warn_without_threads()
    if threads:
        exits.monitor.add(comm.mpi, comm.world_ranks, places, near)
