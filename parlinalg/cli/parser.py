"""A parser of command lines that speaks once, not once a rank."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import IO, Any

RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")

Commands = Any  # what ArgumentParser.add_subparsers returns


def speaks() -> bool:
    """Return True on the rank that prints for all; known before MPI is started."""
    rank = next((os.environ[name] for name in RANK if name in os.environ), "0")
    return rank == "0"


def mpiexec() -> str | None:
    """Return the path of the mpiexec beside Python, else of that on PATH; None if there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


class Parser(argparse.ArgumentParser):
    """A parser whose usage and errors come from rank 0 alone."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if speaks():
            super()._print_message(message, file)
