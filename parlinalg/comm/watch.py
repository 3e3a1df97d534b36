"""What this process is waiting for, as its monitor thread reports it when a run hangs."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parlinalg.comm.base import Comm

State = tuple[float, "Comm", str, int]
"""When the wait began (time.monotonic), on which communicator, in which operation, and its number there."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Slot:
    """One wait: set to a tuple before each call that may block, and to None after it.

    One assignment a call is all the monitoring costs; the line of the user's program is looked up only when a report is
    asked for.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: State | None = None


slot = Slot()
"""The wait of this process (a process takes part in one collective at a time)."""


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame outside parlinalg, or of the outermost frame if all are inside."""
    last = "an unknown line"
    while frame is not None:
        name = frame.f_code.co_filename
        last = f"{os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name}:{frame.f_lineno}"
        if not name.startswith((_PACKAGE, "<frozen ")):
            return last
        frame = frame.f_back
    return last


def main_line() -> str:
    """`file:line` where the main thread is in the user's program."""
    ident = threading.main_thread().ident
    return user_line(sys._current_frames().get(ident) if ident is not None else None)
