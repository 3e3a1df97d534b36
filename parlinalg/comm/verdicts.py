"""Agreement of all ranks on failures, for tests: what fails on one rank fails on all, at the same point.

The verdicts travel on a communicator of their own, so that ranks whose other communication is out of step still agree.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from parlinalg.comm.startup import start_mpi
from parlinalg.comm.watch import grouped, ranks_text, wait_asleep
from parlinalg.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

NOTICE = 2.0
"""Seconds after which a failed rank whose peers have not come names the failure, in case somebody ends the run."""

MOST = 8000
"""Characters of a failure that are sent to other ranks."""


class Verdict(NamedTuple):
    """The part of one rank in an exchange.

    Attributes
    ----------
    level : int
        The rank's progress: ranks that have gone further wait for the others (see `Verdicts.exchange`).
    code : int
        Any number, such as the kind of an outcome.
    point : int
        A checksum of the name of the point.
    failure : str
        An empty string where nothing failed.
    """

    level: int
    code: int
    point: int
    failure: str


class Verdicts:
    """The exchange of verdicts among all ranks of `MPI.COMM_WORLD`.  Making one starts MPI, and is collective.

    Attributes
    ----------
    size, rank : int
    stderr : int
        The file descriptor that a rank writes to before it ends the run.
    deadline : float
        The time (of `time.monotonic`) at which somebody else ends the run, such as a limit of one test's time.
    before : list of str
        Names of earlier failures, reported when a rank ends the run.
    """

    def __init__(self) -> None:
        self.mpi = start_mpi().COMM_WORLD.Dup()
        self.size, self.rank = self.mpi.size, self.mpi.rank
        self.grace = grace()
        self.stderr = 2
        self.deadline = math.inf
        self.before: list[str] = []

    def exchange(self, failure: str, point: str, level: int = 0, code: int = 0) -> list[Verdict]:
        """Return every rank's verdict, in rank order.  Collective.

        A failed rank whose peers do not come, because they wait for it in another collective, names its failure after
        `NOTICE` seconds, and ends the run after `grace` seconds (`PARLINALG_TEST_GRACE`, 20 by default).

        Parameters
        ----------
        failure : str
            The failure on this rank; an empty string if there is none.
        point : str
            The name of the point, such as that of a test; told when the ranks do not meet.
        level, code : int
            Sent as they are.
        """
        mine = np.array([level, code, crc32(point.encode()), bool(failure)], np.int64)
        everyone = np.empty((self.size, len(mine)), np.int64)
        text = failure[:MOST] + " …" * (len(failure) > MOST)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self.mpi.isend(text, rank) for rank in others] if failure else []
        texts = {self.rank: failure}
        request = self.mpi.Iallgather(mine, everyone)
        if failure:
            self._wait(request, point, texts)
        else:
            wait_asleep(request)
        for rank in others:
            if everyone[rank, 3] and rank not in texts:
                texts[rank] = self.mpi.recv(source=rank)
        for send in sends:
            send.wait()
        return [Verdict(int(row[0]), int(row[1]), int(row[2]), texts.get(i, "")) for i, row in enumerate(everyone)]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order.  Collective."""
        return list(self.mpi.allgather(value))

    def _wait(self, request: MPI.Request, point: str, texts: dict[int, str]) -> None:
        """Return when all ranks have come; or end the run."""
        start = now = time.monotonic()
        notice = start + max(0.0, min(NOTICE, (self.deadline - start) / 2))
        end = max(notice + 0.5, min(start + self.grace, self.deadline - 1))
        reported = False
        while not request.Test():
            now = time.monotonic()
            if now > notice and not reported:
                reported = True
                self._hear(texts)
                self._name(point, texts)
            if now > end + (min(texts) != self.rank):  # the lowest failed rank ends the run
                known = len(texts)
                self._hear(texts)
                if len(texts) > known:
                    self._name(point, texts)
                self.end(f"rank {self.rank} waited {now - start:.1f} s for the others, and")
            time.sleep(0.001)

    def _hear(self, texts: dict[int, str]) -> None:
        """Receive what other ranks that failed have sent."""
        for rank in range(self.size):
            if rank not in texts and self.mpi.iprobe(source=rank):
                texts[rank] = self.mpi.recv(source=rank)

    def _name(self, point: str, texts: Mapping[int, str]) -> None:
        """Tell which ranks failed where; the lowest of them does."""
        if min(texts) == self.rank:
            absent = [rank for rank in range(self.size) if rank not in texts]
            late = f"{ranks_text(absent)} did not come to its end" if absent else "all ranks came"
            before = f"\nfailed before: {', '.join(self.before)}" * bool(self.before)
            failed = ranks_text(list(texts))
            self.say(
                f"\n{point} failed on {failed} of {self.size}; {late}:\n{failures_text(texts, self.size)}{before}\n"
            )

    def say(self, text: str) -> None:
        """Write to the real standard error, if that can be written."""
        data = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self.stderr, data) :]

    def end(self, why: str) -> None:
        """End the run on all ranks."""
        self.say(f"{why} ends the run\n")
        time.sleep(0.2)  # Abort may overtake what was said on its way through the launcher
        self.mpi.Abort(1)


def failures_text(texts: Mapping[int, str], size: int) -> str:
    """Return the failures of several ranks as one text, equal ones once."""
    return "\n".join(f"on {ranks_text(ranks)} of {size}:\n{text}" for ranks, text in grouped(texts))


def grace() -> float:
    """Return the seconds that a failed rank waits for the others (`PARLINALG_TEST_GRACE`)."""
    text = os.environ.get("PARLINALG_TEST_GRACE", "20")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"PARLINALG_TEST_GRACE={text!r} should be a number of seconds")
    return seconds
