"""What this process is waiting for, as its monitor thread tells it when a run hangs."""

from __future__ import annotations

import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from parlinalg.comm.base import Comm


class Forming(NamedTuple):
    """A communicator that does not exist yet: its members wait for each other to make it."""

    axes: tuple[str, ...]
    world_ranks: tuple[int, ...]
    key: str = "new"


State = tuple[float, "Comm | Forming", str, int]
"""When the wait began (time.monotonic), on which communicator, in which operation, and which of the operations on it
that is, counted from 1; 0 if it is the making of a communicator, and −1 − rank if the wait is for that rank of it
alone."""

MANY = 64
"""Ranks that are listed one by one, or asked at a time."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Slot:
    """One wait: set to a tuple before each call that may block, and to None after it.

    One assignment a call is all the monitoring costs; the line of the user's program is looked up only when a report is
    asked for.
    """

    __slots__ = ("between", "doing", "end", "left", "posted", "state")

    def __init__(self) -> None:
        self.state: State | None = None
        self.between = 0
        """How many nonblocking operations between nodes are under way."""
        self.posted = threading.Event()
        """Set when there is one, for the monitor to drive it on."""
        self.doing: str | None = None
        """What the process is at, such as "stage 2, microbatch 3, backward", where it says so."""
        self.left: str | None = None
        """How the process left its program, once it has."""
        self.end: tuple[float, int, str] = float("inf"), 1, ""
        """When the process is to end in any case (time.monotonic), with what code, and what it says then."""

    def post(self) -> None:
        """A nonblocking operation between nodes is under way."""
        self.between += 1
        self.posted.set()


slot = Slot()
"""The wait of this process (a process takes part in one collective at a time)."""

_alive: WeakValueDictionary[str, Comm] = WeakValueDictionary()
_made: Counter[str] = Counter()
_freed: dict[str, int] = {}


def enrol(comm: Comm) -> str:
    """The name of a new communicator, the same on all its members: axes, ranks, and how many like it came before."""
    like = f"{comm.axes}/{zlib.crc32(repr(comm.world_ranks).encode()):08x}"
    _made[like] += 1
    key = f"{like}/{_made[like]}"
    _alive[key] = comm
    return key


def alive() -> list[Comm]:
    """Return the communicators of several ranks that this process has."""
    return list(_alive.values())


def strike(comm: Comm) -> None:
    """Remember how many operations began on a communicator that is being freed."""
    _freed[comm.key] = comm._calls


def calls_on(key: str) -> int | None:
    """How many operations this process has begun on the communicator of that name; None if it has none of that name."""
    comm = _alive.get(key)
    return _freed.get(key) if comm is None else comm._calls


def under_way() -> bool:
    """Whether operations that this process began without waiting for them are still going on."""
    return any(not handle.test() for comm in list(_alive.values()) for handle in list(comm._under_way))


def describe(asker: int, key: str | None) -> dict[str, Any]:
    """What this process is doing, for the monitor of the world's rank `asker`.

    Returns
    -------
    dict
        `line`: where the main thread is.  `doing`: what it is at, where it says so.  `left`: how the process ended its
        program, if it has.  If it waits in an operation, `op`, `axes`, `number` and `key` say which, `since` for how
        many seconds, `for_you` whether for `asker` too, `ranks` for which ranks of the world, unless they are many, and
        `begun` how many operations it began on each communicator.  `calls`: those begun on the communicator `key`.
    """
    told: dict[str, Any] = {"line": main_line()}
    if slot.doing is not None:
        told["doing"] = slot.doing
    state = slot.state
    if slot.left is not None:
        told["left"] = slot.left
    elif state is not None:
        start, comm, op, number = state
        ranks: Sequence[int] = comm.world_ranks if number >= 0 else (comm.world_ranks[-1 - number],)
        told |= {"op": op, "axes": comm.axes, "number": number, "key": comm.key}
        told |= {"since": monotonic() - start, "for_you": asker in ranks}
        if len(ranks) <= MANY:
            told["ranks"] = ranks
        told["begun"] = {other.key: other._calls for other in list(_alive.values())}
    if key is not None:
        told["calls"] = calls_on(key)
    return told


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame outside parlinalg, or of the outermost frame if all are inside."""
    last = "an unknown line"
    here = os.getcwd() + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        last = f"{name.removeprefix(here)}:{frame.f_lineno}"
        if not name.startswith((_PACKAGE, "<frozen ")):
            return last
        frame = frame.f_back
    return last


def library_site(frame: FrameType) -> str:
    """The function of this frame, such as `array.create.distribute`; empty if it is not parlinalg's."""
    code = frame.f_code
    if not code.co_filename.startswith(_PACKAGE):
        return ""
    module = code.co_filename.removeprefix(_PACKAGE).removesuffix(".py").replace(os.sep, ".")
    return f"{module}.{code.co_name}"


def main_line() -> str:
    """`file:line` where the main thread is in the user's program."""
    ident = threading.main_thread().ident
    return user_line(sys._current_frames().get(ident) if ident is not None else None)
