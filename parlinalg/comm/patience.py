"""Waiting without polling, where ranks outnumber cores: MPI polls, and takes turns with the ranks it waits for."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

PAUSES = 2e-5, 2e-4
"""Seconds between two looks: the first, and the longest after doubling."""


def wait_asleep(request: MPI.Request) -> None:
    """Return when a request is done."""
    pause, longest = PAUSES
    while not request.Test():
        sleep(pause)
        pause = min(2 * pause, longest)
