"""The monitor: a thread of every process that says what the process waits for, and ends a run that hangs.

It polls slowly on communicators of its own and costs the main thread nothing measurable.  A watchdog of nonblocking
collectives would slow every collective a hundredfold on crowded cores.

While nonblocking operations between nodes are in progress it polls faster: MPI progresses only within its calls, and
the main thread may be in a product for long.  In a node nothing is gained, since what moves there is a copy by a core.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from parlinalg.comm.base import Comm
from parlinalg.comm.streams import say
from parlinalg.comm.watch import MANY, State, process_state, slot, stalled, vanished, wait_text
from parlinalg.errors import ConfigError

POLL = 0.05
"""Seconds between two looks at the mail."""

DRIVING = 0.001
"""Seconds between two calls that let operations between nodes progress."""

PATIENCE = 0.5
"""Seconds within which the others answer, unless they cannot."""

GRACE = 3.0
"""Seconds that the launcher has to end this process, once it has been told to."""

LAST = 7.0
"""Seconds beyond the limit after which a process that still waits ends itself, whatever its monitor does."""

GONE = 2.0
"""Seconds that the launcher has to end a run of which a process is gone, before a process beside it does."""

_NEAR = 64  # processes of its host that one has an eye on
_ASK, _ANSWER = 1, 2

exit_now = os._exit
"""Ends this process; `os._exit` itself is watched."""


def time_limit() -> float:
    """Return the seconds that a wait may take (PARLINALG_TIMEOUT); infinite if that is 0."""
    text = os.environ.get("PARLINALG_TIMEOUT") or "1800"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"PARLINALG_TIMEOUT={text!r} should be a number of seconds, or 0 for no limit")
    return seconds or float("inf")


class Circle:
    """The ranks of one opened communicator, over which their monitors talk.

    Attributes
    ----------
    mpi : mpi4py.MPI.Intracomm
    ranks : tuple of int
        The members' ranks in COMM_WORLD.
    """

    def __init__(self, mpi: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self.mpi = mpi
        self.ranks = ranks
        self._asked = 0
        self._sent: list[tuple[MPI.Request, Any]] = []
        self._lock = threading.Lock()

    def answer(self) -> None:
        """Answer the questions that have come."""
        while (got := self._receive(_ASK)) is not None:
            source, question = got
            reported = process_state(self.ranks[source], question["key"])
            self._send(reported | {"nonce": question["nonce"]}, source, _ANSWER)
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]

    def ask(self, ranks: Iterable[int], key: str | None = None) -> dict[int, dict[str, Any]]:
        """Return the states of these ranks of COMM_WORLD; those that do not answer within PATIENCE are missing."""
        with self._lock:
            self._asked += 1
            nonce = f"{self.mpi.rank}.{self._asked}"
            wanted = {r for r in ranks if r != self.ranks[self.mpi.rank]}
            for rank in wanted:
                self._send({"nonce": nonce, "key": key}, self.ranks.index(rank), _ASK)
            reported: dict[int, dict[str, Any]] = {}
            end = time.monotonic() + PATIENCE
            while len(reported) < len(wanted) and time.monotonic() < end:
                if (got := self._receive(_ANSWER)) is None:
                    self.answer()
                    time.sleep(0.005)
                elif got[1].pop("nonce") == nonce:
                    reported[self.ranks[got[0]]] = got[1]
            return reported

    def _send(self, message: dict[str, Any], to: int, tag: int) -> None:
        data = np.frombuffer(json.dumps(message).encode(), np.uint8)
        self._sent.append((self.mpi.Isend((data, data.size, MPI.UINT8_T), to, tag), data))

    def _receive(self, tag: int) -> tuple[int, dict[str, Any]] | None:
        status = MPI.Status()
        message = self.mpi.Improbe(MPI.ANY_SOURCE, tag, status)
        if message is None:
            return None
        data = np.empty(status.Get_count(MPI.UINT8_T), np.uint8)
        message.Recv((data, data.size, MPI.UINT8_T))
        return status.Get_source(), json.loads(data.tobytes())


class Monitor:
    """The monitor thread of this process.

    Parameters
    ----------
    limit : float
        Seconds after which a wait ends the run.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rank = MPI.COMM_WORLD.rank
        self.circles: list[Circle] = []
        self.places: dict[int, str] = {}
        """For each rank of COMM_WORLD in a circle its host and process, such as "host a, pid 12"."""
        self._neighbours: dict[int, int] = {}  # by their descriptors the ranks of processes on this host
        self._exits = select.poll()
        self._gone: dict[int, float] = {}  # ranks whose processes have ended, and when that was seen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parlinalg monitor", daemon=True)
        self._last = threading.Thread(target=self._last_resort, name="parlinalg last resort", daemon=True)

    def add(
        self, mpi: MPI.Intracomm, ranks: tuple[int, ...], places: Iterable[str], near: Mapping[int, int]
    ) -> None:  # fmt: skip
        """Serve the members of `mpi`, unless a circle of the same ranks is there already.  Collective over them.

        `places` says of each where it is, and `near` gives descriptors of the processes among them on this host.
        """
        self.places.update(zip(ranks, places, strict=True))
        for rank, descriptor in near.items():
            if rank in self._neighbours.values():
                os.close(descriptor)
            else:
                self._neighbours[descriptor] = rank
                self._exits.register(descriptor, select.POLLIN)
        if any(circle.ranks == ranks for circle in self.circles):
            return
        group = mpi.Get_group()
        own = mpi.Create_group(group)
        group.Free()
        self.circles.append(Circle(own, ranks))
        if not self._thread.is_alive():
            self._thread.start()
            self._last.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2)

    def _run(self) -> None:
        pid, looked = os.getpid(), time.monotonic()
        while not self._stop.is_set() and os.getpid() == pid and not MPI.Is_finalized():
            if slot.between:
                self.circles[0].mpi.Iprobe(MPI.ANY_SOURCE, _ASK)
                time.sleep(DRIVING)
            else:
                slot.posted.wait(POLL)
                slot.posted.clear()
            if time.monotonic() - looked < POLL:
                continue
            looked = time.monotonic()
            for circle in self.circles:
                circle.answer()
            self._look_for_gone(looked)
            state = slot.state
            if state is not None and time.monotonic() - state[0] > self.limit:
                self._give_up(state)

    def gone_for_long(self) -> list[int]:
        """Return the ranks on this host whose processes have been gone for so long that the launcher passes over it."""
        now = time.monotonic()
        return sorted(rank for rank, seen in list(self._gone.items()) if now - seen > GONE)

    def _look_for_gone(self, now: float) -> None:
        """End the run if a process beside this one is gone, though none can leave before all have come to their end."""
        for descriptor, _ in self._exits.poll(0):
            self._gone.setdefault(self._neighbours[descriptor], now)
            self._exits.unregister(descriptor)
        gone = self.gone_for_long()
        if not gone or slot.left is not None:
            return
        me = self.rank
        reported = process_state(me, None)
        doing = f"waiting in {wait_text(reported)}" if "op" in reported else f"at {reported['line']}"
        first = min({me, *self._neighbours.values()} - self._gone.keys())
        if me == first or now - min(self._gone.values()) > GONE + 2:
            end_run(vanished(me, gone, self.places, doing), 1)

    def _give_up(self, state: State) -> None:
        """Report the wait and end the run, unless it ends in the meantime or a lower rank, stuck likewise, reports."""
        start, comm, _, _ = state
        me = self.rank
        circle = next((c for c in self.circles if set(comm.world_ranks) <= set(c.ranks)), None)
        if circle is None:
            return
        asked = circle.ranks if len(circle.ranks) <= MANY else comm.world_ranks
        reported = circle.ask(asked, comm.key)
        if slot.state is not state:
            return
        lower = any(rank < me and t.get("since", 0) > self.limit for rank, t in reported.items())
        if lower and time.monotonic() - start < self.limit + 4 * PATIENCE:
            return
        reported[me] = json.loads(json.dumps(process_state(me, comm.key)))
        end_run(stalled(me, state, asked, reported, self.places, self.limit), 1)

    def _last_resort(self) -> None:
        """End this process where nothing else did.  Calls no MPI, which may itself be what hangs.

        The launcher cannot end the processes of a host that it does not reach: there MPICH's Abort returns, and a
        message to such a host may block its sender.
        """
        pid = os.getpid()
        while not self._stop.wait(0.5) and os.getpid() == pid:
            now, state = time.monotonic(), slot.state
            when, code, text = slot.end
            if now > when:
                leave(text, code)
            if state is not None and now - state[0] > self.limit + LAST:
                _, comm, op, _ = state
                leave(
                    f"parlinalg: rank {self.rank} ends itself: it waited more than {self.limit:g} s in {op} over "
                    f"{comm.axes} (PARLINALG_TIMEOUT={self.limit:g}), and its monitor could not end the run",
                    1,
                )


def leave(text: str, code: int) -> NoReturn:
    """End this process, and say why where that does not block."""
    if text:
        say(text)
    _abort(code, 1.0)


def neighbours(comm: Comm) -> dict[int, int]:
    """Return descriptors of the other processes on this host, by their ranks in COMM_WORLD; few of them.  Collective.

    A descriptor becomes readable when the process has ended.  A process counts as on this host if it has the same
    kernel and the same numbering of processes.
    """
    try:
        own = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino]
    except OSError:
        own = []
    everyone = comm.share([*own, os.getpid()], others="by rank")
    found: dict[int, int] = {}
    for rank, (*where, pid) in zip(comm.world_ranks, everyone, strict=True):
        if own and where == own and pid != os.getpid() and len(found) < _NEAR:
            with suppress(OSError, AttributeError):
                found[rank] = os.pidfd_open(pid)
    return found


def end_run(text: str, code: int) -> NoReturn:
    """Report the reason, and end all processes of the run; this one even if the launcher cannot be reached."""
    slot.end = time.monotonic() + GRACE + 1, code, ""
    say(text)
    time.sleep(0.2)  # Abort may overtake what was said on its way through the launcher
    _abort(code, GRACE)


def _abort(code: int, grace: float) -> NoReturn:
    """Ask the launcher to end all processes; end this one after so many seconds."""
    with suppress(OSError, RuntimeError, ValueError):  # other threads do not run while Abort blocks
        faulthandler.dump_traceback_later(grace + 1, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    world: Any = MPI.COMM_WORLD  # mpi4py has it that Abort never returns; MPICH's asks the launcher, and does
    world.Abort(code)
    time.sleep(grace)
    exit_now(code)


def warn_without_threads() -> None:
    """Warn once if MPI was started without thread support, and say what will be missing."""
    if MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            "MPI was started without MPI_THREAD_MULTIPLE, so no monitor can end this run if it hangs; "
            "leave mpi4py.rc.thread_level at 'multiple'",
            RuntimeWarning,
            stacklevel=4,
        )
