"""Where this process stands among the ranks of its node, as far as the launcher or the communicator tells."""

from __future__ import annotations

import os

from parlinalg.comm.base import Comm

RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""What Hydra (MPICH, Intel MPI), Open MPI, MVAPICH and Slurm tell each process."""


def place_on_node(comm: Comm) -> tuple[int, int]:
    """This process's number among the ranks started on its node, and how many they are.

    A communicator of some of the ranks does not know the others, who share the node's cores and GPUs all the same; the
    launcher does.
    """
    rank, size = told(RANK), told(SIZE)
    return (
        comm.local_rank if rank is None else rank,
        comm.local_size if size is None else max(size, comm.local_size),
    )


def told(names: tuple[str, ...]) -> int | None:
    """Return the number that the launcher gave under the first of these names; None if it gave none."""
    return next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdigit()), None)
