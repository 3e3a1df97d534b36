"""The guards of a process that has opened a communicator: its monitor thread and its exit hooks, one of each."""

from __future__ import annotations

from mpi4py import MPI

from parlinalg.comm.exits import Exits
from parlinalg.comm.monitor import Monitor, time_limit, warn_without_threads
from parlinalg.comm.mpi import MpiComm
from parlinalg.comm.places import ranks_map

_monitors: list[Monitor] = []
"""The monitor of this process, once there is one."""


def guard(comm: MpiComm) -> None:
    """Watch the members of a communicator that was just opened.  Collective over them."""
    limit = time_limit()
    places = [f"host {place['host']}, pid {place['pid']}" for place in ranks_map(comm)]
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    if not _monitors:
        _monitors.append(Monitor(limit))
        Exits(_monitors[0]).install()
        if not threads:
            warn_without_threads()
    if threads:
        _monitors[0].add(comm.mpi, comm.world_ranks, places)
