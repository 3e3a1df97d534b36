"""The end of the run when one rank ends while others still communicate, with the reason.

An exception that nobody catches aborts the run with that rank's traceback.  A rank that ends its program waits, before
MPI is finalised, until all have, and aborts the run if another waits for it in an operation that can never complete.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from parlinalg.comm.monitor import (
    LAST,
    Circle,
    Monitor,
    end_run,
    exit_now,
    neighbours,
    time_limit,
    warn_without_threads,
)
from parlinalg.comm.mpi import MpiComm
from parlinalg.comm.startup import ranks_map
from parlinalg.comm.streams import flush, say
from parlinalg.comm.watch import MANY, alive, calls_on, left_early, slot, under_way, unreachable, vanished
from parlinalg.errors import CommError, user_line

PERSISTENT = 5.0
"""Seconds after which a wait for a message from a rank that has left is in vain."""

_ENDED = "at the end of its program"


class Exits:
    """The hooks of this process: they end the run on all ranks when this one ends out of turn, and have processes that
    are forked from it end by themselves.

    Attributes
    ----------
    monitor : Monitor
    pid : int
        The process whose hooks they are; forked processes inherit them.
    several : bool
        True if the process has opened a communicator of several ranks.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.pid = os.getpid()
        self.several = False
        self._code = 0
        self._how = _ENDED
        self._asked: tuple[Any, str] | None = None  # of the last sys.exit, which somebody may catch: status and line
        self._interrupted = False
        self._reads_codes = False
        self._exit, self._hook, self._thread_hook = sys.exit, sys.excepthook, threading.excepthook

    def install(self) -> None:
        """Take the place of `sys.exit`, and follow the codes by which this process and those forked from it end."""
        self._reads_codes = on_system_exit(self._ends)
        sys.exit = self._leave
        os.register_at_fork(after_in_child=self._forked)

    def install_for_several(self) -> None:
        """Take the place of `os._exit` and the exception hooks, and register the exit hook."""
        self.several = True
        os._exit = self._leave_now
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        atexit.register(self._at_exit)

    def _leave(self, status: Any = None, /) -> NoReturn:
        """Call `sys.exit`, and remember who called it with what."""
        self._asked = status, user_line(sys._getframe(1))
        if not self._reads_codes:
            self._ends(status)
        raise SystemExit(status)

    def _ends(self, status: Any, trace: TracebackType | None = None) -> None:
        """Note that an uncaught SystemExit of this status is about to end this process."""
        self._code = status if isinstance(status, int) else 0 if status is None else 1
        written = "" if status is None else repr(status)
        if self._asked is not None and self._asked[0] is status:
            self._how = f"sys.exit({written}) at {self._asked[1]}"
        else:
            self._how = f"SystemExit({written})"
            if trace is not None:
                while trace.tb_next is not None:
                    trace = trace.tb_next
                self._how += f" at {user_line(trace.tb_frame)}"

    def _leave_now(self, status: int) -> NoReturn:
        """Call `os._exit`, by which a rank passes every other hook, and the launcher ends the rest without a word."""
        if os.getpid() == self.pid and not MPI.Is_finalized():
            me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
            slot.left = f"os._exit({status}) at {user_line(sys._getframe(1))}"
            text = f"parlinalg: rank {me} of {size} ends the run by {slot.left} ({self._place()})"
            if status:
                end_run(text, status)  # the launcher might give the code of another rank, which it kills
            say(text)
            time.sleep(0.2)
        exit_now(status)

    def _place(self) -> str:
        return self.monitor.places.get(MPI.COMM_WORLD.rank, f"pid {os.getpid()}")

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self.pid or MPI.Is_finalized():
            self._hook(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            self._interrupted, self._code, self._how = True, 130, "interrupted from the keyboard"
        else:
            self._abort(kind, error, trace, "")

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self.pid or MPI.Is_finalized() or issubclass(args.exc_type, SystemExit):
            self._thread_hook(args)
        else:
            name = args.thread.name if args.thread is not None else "unknown"
            self._abort(args.exc_type, args.exc_value, args.exc_traceback, f" in thread {name!r}")

    def _abort(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, where: str
    ) -> None:
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        slot.left = f"uncaught {kind.__name__}: {error}"[:200]
        text = "".join(traceback.format_exception(kind, error, trace))
        mark = f"[rank {rank}] "
        head = f"{mark}ended the run of {size} ranks by an uncaught {kind.__name__}{where} ({self._place()}):"
        text = "\n".join([head, *(mark + line for line in text.splitlines())])
        slot.end = time.monotonic() + LAST, 1, text
        time.sleep(0.1)
        for circle in self.monitor.circles:
            reported = circle.ask([r for r in circle.ranks if r < rank][:MANY])
            if any(answer.get("left") == slot.left for answer in reported.values()):
                time.sleep(2)  # an error that all ranks meet alike is told by the lowest, which now ends this process
        flush()
        end_run(text, 1)

    # ------------------------------------------------------------------------------------------ forked processes

    def _forked(self) -> None:
        """Keep away from MPI in a process that was just forked from this one: MPI is the parent's."""
        self._code, self._interrupted, self._asked = 0, False, None
        slot.state, slot.left, slot.between, slot.end = None, None, 0, (float("inf"), 1, "")
        vars(sys).pop("last_value", None)
        why = f"in process {os.getpid()}, which was forked from it; communicate in process {self.pid} itself"
        for comm in alive():
            if isinstance(comm, MpiComm):
                comm.lose(why)
        if self._reads_codes:
            atexit.register(self._leave_forked)

    def _leave_forked(self) -> None:
        """End a forked process before MPI is finalized there, which would wait for all ranks.

        What it registered itself with `atexit` has run already; what its parent registered is the parent's.
        """
        error = getattr(sys, "last_value", None)
        flush()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        exit_now((1 if error is not None else self._code) & 0xFF)

    # ------------------------------------------------------------------------------------------ the end of a program

    def _at_exit(self) -> None:
        if os.getpid() != self.pid or MPI.Is_finalized():
            return
        flush()
        slot.state, slot.left = None, self._how
        for circle in self.monitor.circles:
            self._part(circle)
        self.monitor.stop()
        if self.monitor.limit < float("inf"):  # Finalize waits for the others too, when no thread runs any more
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.monitor.limit + LAST)

    def _part(self, circle: Circle) -> None:
        """Wait until every member of the circle has come to its end, or one waits for this rank in vain."""
        request = circle.mpi.Ibarrier()
        me = MPI.COMM_WORLD.rank
        others = [rank for rank in circle.ranks if rank != me]
        start = time.monotonic()
        patience = self.monitor.limit + 3 * len(others) / MANY  # a turn of questions takes less than 3 s
        heard = self._hear(start, patience)
        pause, next_look, turn = 0.0005, start + 0.2, 0
        suspects: dict[int, tuple[str, int]] = {}
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            now = time.monotonic()
            if now < next_look:
                continue
            if (gone := self.monitor.gone_for_long()) and not request.Test():
                end_run(vanished(me, gone, self.monitor.places, self._how), self._code or 1)
            asked = others[turn : turn + MANY] or others[:MANY]
            turn = (turn + MANY) % max(len(others), 1)
            reported = circle.ask(asked)
            if any("left" not in answer for answer in reported.values()):
                heard = self._hear(time.monotonic(), patience)
            elif now - heard > patience:
                silent = [rank for rank in asked if rank not in reported]
                end_run(unreachable(me, self._how, silent, self.monitor.places, now - heard), self._code or 1)
            vain = {rank: answer for rank, answer in reported.items() if _in_vain(answer, now - start)}
            seen = {rank: (answer["key"], answer["number"]) for rank, answer in vain.items()}
            confirmed = any(suspects.get(rank) == wait for rank, wait in seen.items())
            suspects = {rank: wait for rank, wait in suspects.items() if rank not in reported} | seen
            if confirmed and not request.Test():
                self._end(me, vain, sum("left" in answer and rank < me for rank, answer in reported.items()))
            next_look = time.monotonic() + min(max(0.1, (now - start) / 4), 2.0)
        slot.end = float("inf"), 1, ""

    def _hear(self, now: float, patience: float) -> float:
        """Note that another rank still runs; without such a sign this process ends soon after its patience."""
        text = f"parlinalg: rank {self.monitor.rank} ends itself: at its end ({self._how}) it could not ask the others"
        slot.end = now + patience + LAST, self._code or 1, text
        return now

    def _end(self, me: int, vain: dict[int, Any], earlier: int) -> None:
        time.sleep(0.3 * min(earlier, 5))  # a lower rank that has left tells it
        if self._interrupted:
            MPI.COMM_WORLD.Abort(self._code)
        end_run(left_early(me, self._how, vain), self._code or 1)


def on_system_exit(ends: Callable[[Any, TracebackType | None], None]) -> bool:
    """Call a function with status and traceback when the interpreter is about to end by a SystemExit.

    `raise SystemExit(4)` passes no hook of Python's.  But the interpreter reads the exception's `code` before it ends
    the process, and is then called by no function of Python: what reads it knows.

    Returns
    -------
    bool
        True if that can be had in this interpreter.
    """

    class Code:
        """`SystemExit.code` as it was, which also calls `ends` where the interpreter reads it."""

        def __get__(self, error: Any, kind: Any = None) -> Any:
            if error is None:
                return self
            status = plain.__get__(error, kind)
            try:
                sys._getframe(1)
            except ValueError:
                ends(status, error.__traceback__)
            return status

        def __set__(self, error: Any, status: Any) -> None:
            plain.__set__(error, status)

        def __delete__(self, error: Any) -> None:
            plain.__delete__(error)

    try:
        attributes: Any = gc.get_referents(vars(SystemExit))[0]
        plain = attributes["code"]
        attributes["code"] = Code()
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    except (AttributeError, IndexError, KeyError, TypeError):  # another Python than CPython
        return False
    return True


def _in_vain(reported: Mapping[str, Any], gone: float) -> bool:
    """Return True if a rank waits without hope for this one, which left `gone` seconds ago.

    In a collective it does if this rank never began it.  One that this rank did begin may take as long as the network
    does.  A message that never was sent cannot be told from one on its way, but the latter soon arrives.
    """
    if not reported.get("for_you"):
        return False
    calls = calls_on(reported["key"])
    if reported["number"] > 0 and calls is not None:
        return bool(calls < reported["number"])
    return min(reported["since"], gone) > PERSISTENT and not under_way()


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
