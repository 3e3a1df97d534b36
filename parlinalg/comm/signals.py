"""Stopping a run by a signal, between steps and on all ranks together.

A signal sets a flag and nothing else; the ranks agree on it where they ask for it, so that all stop at the same step.
Python's own handlers do not run while a rank waits inside MPI, so a thread reads the wake-up descriptor instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from parlinalg.comm.base import Comm
from parlinalg.comm.streams import say

DEFAULT = ("SIGTERM", "SIGINT", "SIGUSR1")

APART = 1.0
"""Seconds between two signals that are not one signal passed on twice."""


class StopSignals:
    """Turns signals into a request to stop, while the context is open.

    Parameters
    ----------
    names : iterable of str
        The signals; those that mpiexec passes on to its ranks by default.

    The first signal asks for a stop.  Another more than a second later ends the run at once (mpiexec may pass one
    signal on more than once).  Contexts are opened in the main thread.

    Examples
    --------
    >>> from parlinalg.comm import SingleComm
    >>> comm = SingleComm()
    >>> with StopSignals() as stop:
    ...     signal.raise_signal(signal.SIGUSR1)
    ...     stop.requested(comm)
    'SIGUSR1'
    """

    def __init__(self, names: Iterable[str] = DEFAULT) -> None:
        self._names = tuple(names)
        self._first: tuple[int, float] | None = None  # the signal, and when it came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for name in self._names:
            number = int(getattr(signal, name))
            self._before[number] = signal.signal(number, self._note)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="parlinalg signals", daemon=True)
        self._thread.start()
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid != os.getpid():  # a forked process leaves the context, not the one that opened it
            return
        _open.remove(self)
        self._restore()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    @property
    def pending(self) -> int:
        """The number of the signal that this rank has got; 0: none."""
        return 0 if self._first is None else self._first[0]

    def requested(self, comm: Comm) -> str | None:
        """Return the name of the signal that asked for a stop on some rank of `comm`, or None.  Collective.

        One small all-reduce, which the ledger does not count; call it once a step.
        """
        flag = np.array([self.pending], np.int32)
        with comm.uncounted():
            comm.all_reduce(flag, op="max")
        return signal.Signals(int(flag[0])).name if flag[0] else None

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        if self._first is None:
            self._first = (number, time.monotonic())

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number not in self._before:
                continue
            if self._first is not None and time.monotonic() - self._first[1] > APART:
                _end_now(number)
            self._note(number)


_open: list[StopSignals] = []
"""The contexts that are open, innermost last."""


def _forked() -> None:
    """Restore, in a forked process, the signal handlers of before, and do not wake the parent up."""
    while _open:
        _open.pop()._restore()


os.register_at_fork(after_in_child=_forked)


def _end_now(number: int) -> None:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    say(f"parlinalg: a second {signal.Signals(number).name} ends the run at once")
    time.sleep(0.2)  # the launcher brings it out before the end
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(128 + number)
    os._exit(128 + number)
