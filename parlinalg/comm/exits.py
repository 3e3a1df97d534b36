"""What happens when one rank ends while others still talk: the whole run ends, with the reason.

An exception that nobody catches aborts the run with that rank's traceback.  A rank that ends its program waits, before
MPI is finalised, until all have, and aborts the run if another waits for it in an operation that can never complete.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from parlinalg.comm.monitor import LAST, Circle, Monitor, end_run
from parlinalg.comm.report import left_early, unreachable
from parlinalg.comm.watch import calls_on, slot, under_way, user_line

PERSISTENT = 5.0
"""Seconds after which a wait for a message from a rank that has left is in vain."""

_WINDOW = 64  # ranks asked at a time


class Exits:
    """The hooks of this process, which end the run on all ranks when this one ends out of turn."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._pid = os.getpid()
        self._code = 0
        self._how = "at the end of its program"
        self._interrupted = False
        self._exit, self._hook, self._thread_hook = sys.exit, sys.excepthook, threading.excepthook

    def install(self) -> None:
        """Take the place of `sys.exit` and the exception hooks, and register the exit hook."""
        sys.exit = self._leave
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        atexit.register(self._at_exit)

    def _leave(self, status: Any = None, /) -> NoReturn:
        """`sys.exit`, which remembers who called it with what."""
        self._code = status if isinstance(status, int) else 0 if status is None else 1
        self._how = f"sys.exit({'' if status is None else repr(status)}) at {user_line(sys._getframe(1))}"
        raise SystemExit(status)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or MPI.Is_finalized():
            self._hook(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            self._interrupted, self._code, self._how = True, 130, "interrupted from the keyboard"
        else:
            self._abort(kind, error, trace, "")

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self._pid or MPI.Is_finalized() or issubclass(args.exc_type, SystemExit):
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
        place = self.monitor.places.get(rank, f"pid {os.getpid()}")
        head = f"{mark}ended the run of {size} ranks by an uncaught {kind.__name__}{where} ({place}):"
        text = "\n".join([head, *(mark + line for line in text.splitlines())])
        slot.end = time.monotonic() + LAST, 1, text
        time.sleep(0.1)
        for circle in self.monitor.circles:
            told = circle.ask([r for r in circle.ranks if r < rank][:_WINDOW])
            if any(answer.get("left") == slot.left for answer in told.values()):
                time.sleep(2)  # an error that all ranks meet alike is told by the lowest, which now ends this process
        flush()
        end_run(text, 1)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or MPI.Is_finalized():
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
        patience = self.monitor.limit + 3 * len(others) / _WINDOW  # a turn of questions takes less than 3 s
        heard = self._hear(start, patience)
        pause, next_look, turn = 0.0005, start + 0.2, 0
        suspects: dict[int, tuple[str, int]] = {}
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            now = time.monotonic()
            if now < next_look:
                continue
            asked = others[turn : turn + _WINDOW] or others[:_WINDOW]
            turn = (turn + _WINDOW) % max(len(others), 1)
            told = circle.ask(asked)
            if any("left" not in answer for answer in told.values()):
                heard = self._hear(time.monotonic(), patience)
            elif now - heard > patience:
                silent = [rank for rank in asked if rank not in told]
                end_run(unreachable(me, self._how, silent, self.monitor.places, now - heard), self._code or 1)
            vain = {rank: answer for rank, answer in told.items() if _in_vain(answer, now - start)}
            seen = {rank: (answer["key"], answer["number"]) for rank, answer in vain.items()}
            confirmed = any(suspects.get(rank) == wait for rank, wait in seen.items())
            suspects = {rank: wait for rank, wait in suspects.items() if rank not in told} | seen
            if confirmed and not request.Test():
                self._end(me, vain, sum("left" in answer and rank < me for rank, answer in told.items()))
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


def flush() -> None:
    """Bring out what this rank printed: Abort would lose it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _in_vain(told: Mapping[str, Any], gone: float) -> bool:
    """Whether a rank that told this waits for this one, which left `gone` seconds ago, without hope.

    In a collective it does if this rank never began it.  One that this rank did begin may take as long as the network
    does.  A message that never was sent cannot be told from one on its way, but the latter soon arrives.
    """
    if not told.get("for_you"):
        return False
    calls = calls_on(told["key"])
    if told["number"] > 0 and calls is not None:
        return bool(calls < told["number"])
    return min(told["since"], gone) > PERSISTENT and not under_way()
