"""Who started this process: mpiexec, srun, or nobody; and whether MPI agrees with it.  Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

#: Set by mpiexec of Open MPI, and of MPICH and its kin (Hydra); also where Slurm starts their daemons.
MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Launched:
    """How this process was started.

    Attributes
    ----------
    by : {"mpiexec", "srun", "one"}
        "one": alone.
    ranks, rank : int
        How many processes were started together, and which of them this is, as the launcher says (mpiexec does not say
        the rank alike everywhere: then −1).
    """

    by: str
    ranks: int = 1
    rank: int = 0


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """How this process was started, by the variables that launchers set.

    A script of sbatch is one process, though Slurm tells it how many tasks there may be; those that srun starts have a
    step of their own.

    >>> launched({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"})
    Launched(by='srun', ranks=8, rank=3)
    >>> launched({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).by
    'one'
    """
    env = os.environ if environ is None else environ
    if not any(name in env for name in MPIEXEC):
        tasks, rank = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_PROCID")
        if tasks is not None and rank is not None:
            return Launched("srun", tasks, rank)
    ranks = max((_number(env, name) or 1 for name in SIZES), default=1)
    return Launched("mpiexec", ranks, -1) if any(name in env for name in SIZES) else Launched("one")


def problem(size: int, rank: int, environ: Mapping[str, str] | None = None) -> str:
    """What is wrong where MPI says that this is `rank` of `size`; an empty text if nothing is."""
    found = launched(environ)
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


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    return int(text) if text.isdigit() else None
