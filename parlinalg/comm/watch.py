"""The waits of this process, and the reports on runs that hang."""

from __future__ import annotations

import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from parlinalg.errors import PACKAGE, user_line

if TYPE_CHECKING:
    from mpi4py import MPI

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


class WaitSlot:
    """One wait: set to a tuple before each call that may block, and to None after it.

    One assignment a call is all the monitoring costs; the line of the user's program is looked up only when a report is
    asked for.
    """

    __slots__ = ("between", "doing", "end", "left", "posted", "state")

    def __init__(self) -> None:
        self.state: State | None = None
        self.between = 0
        """The number of nonblocking operations in progress between nodes."""
        self.posted = threading.Event()
        """Set when there is one, for the monitor to progress it."""
        self.doing: str | None = None
        """The process's present task, such as "stage 2, microbatch 3, backward", if it is known."""
        self.left: str | None = None
        """The way in which the process left its program, once it has."""
        self.end: tuple[float, int, str] = float("inf"), 1, ""
        """When the process is to end in any case (time.monotonic), with what code, and what it says then."""

    def post(self) -> None:
        """Note that a nonblocking operation between nodes is in progress."""
        self.between += 1
        self.posted.set()


slot = WaitSlot()
"""The wait of this process (a process takes part in one collective at a time)."""

_alive: WeakValueDictionary[str, Comm] = WeakValueDictionary()
_made: Counter[str] = Counter()
_freed: dict[str, int] = {}


def enrol(comm: Comm) -> str:
    """Return a name for a new communicator, the same on all its members: axes, ranks, and a count."""
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
    """Return the number of operations begun on the communicator of that name; None if this process has none."""
    comm = _alive.get(key)
    return _freed.get(key) if comm is None else comm._calls


def under_way() -> bool:
    """Return True if nonblocking operations of this process are still in progress."""
    return any(not handle.test() for comm in list(_alive.values()) for handle in list(comm._under_way))


def process_state(asker: int, key: str | None) -> dict[str, Any]:
    """Return the state of this process, for the monitor of the world's rank `asker`.

    Returns
    -------
    dict
        `line`: where the main thread is.  `doing`: what it is at, where it says so.  `left`: how the process ended its
        program, if it has.  If it waits in an operation, `op`, `axes`, `number` and `key` say which, `since` for how
        many seconds, `for_you` whether for `asker` too, `ranks` for which ranks of the world, unless they are many, and
        `begun` how many operations it began on each communicator.  `calls`: those begun on the communicator `key`.
    """
    reported: dict[str, Any] = {"line": main_line()}
    if slot.doing is not None:
        reported["doing"] = slot.doing
    state = slot.state
    if slot.left is not None:
        reported["left"] = slot.left
    elif state is not None:
        start, comm, op, number = state
        ranks: Sequence[int] = comm.world_ranks if number >= 0 else (comm.world_ranks[-1 - number],)
        reported |= {"op": op, "axes": comm.axes, "number": number, "key": comm.key}
        reported |= {"since": monotonic() - start, "for_you": asker in ranks}
        if len(ranks) <= MANY:
            reported["ranks"] = ranks
        reported["begun"] = {other.key: other._calls for other in list(_alive.values())}
    if key is not None:
        reported["calls"] = calls_on(key)
    return reported


def library_site(frame: FrameType) -> str:
    """Return the function of this frame, such as `array.create.distribute`; empty if it is not parlinalg's."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return ""
    module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".")
    return f"{module}.{code.co_name}"


def main_line() -> str:
    """Return `file:line` where the main thread is in the user's program."""
    ident = threading.main_thread().ident
    return user_line(sys._current_frames().get(ident) if ident is not None else None)


PAUSES = 2e-5, 2e-4
"""Seconds between two looks: the first, and the longest after doubling for whoever has not waited long."""
PATIENCE, LONGEST = 1 / 64, 5e-3
"""Who has waited long takes longer pauses, in parts of the time waited, up to so many seconds."""
SELDOM = 4e-3
"""Seconds between two looks of whoever looks seldom: each takes others' cores some 30 microseconds."""
YIELDS = 2e-3
"""Seconds for which a core is yielded before it is given up."""


_give_way = getattr(os, "sched_yield", partial(sleep, 0))


def wait_asleep(request: MPI.Request) -> None:
    """Return when a request is done, leaving the core to others: where ranks outnumber cores, MPI polls against the
    ranks it waits for.
    """
    until(request.Test)


def until(done: Callable[[], bool], seldom: bool = False) -> None:
    """Return when `done` returns True, leaving the core to others.

    The core is yielded between two looks for a while, then given up: sleep takes far longer than it is asked to.
    Whoever looks `seldom` gives it up at once.
    """
    while seldom and not done():
        sleep(SELDOM)
    began = monotonic()
    while monotonic() - began < YIELDS:
        if done():
            return
        _give_way()
    pause, longest = PAUSES
    while not done():
        sleep(pause)
        pause = min(2 * pause, max(longest, min(PATIENCE * (monotonic() - began), LONGEST)))


Report = Mapping[str, Any]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a message: `rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def wait_text(reported: Report) -> str:
    """Return a wait for a message: `all_reduce over ('r',) at train.py:12`."""
    return f"{reported['op']} over {tuple(reported['axes'])} at {reported['line']}{_at(reported)}"


def _at(reported: Report) -> str:
    return f" ({reported['doing']})" if "doing" in reported else ""


def grouped(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return the ranks of each different text, in the order of the lowest ranks."""
    of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        of.setdefault(texts[rank], []).append(rank)
    return [(ranks, text) for text, ranks in of.items()]


def stalled(
    me: int, state: State, asked: Iterable[int], reported: Mapping[int, Report], places: Mapping[int, str], limit: float
) -> str:
    """Return the report of rank `me` on a wait of more than `limit` seconds."""
    _, comm, op, number = state
    members = set(comm.world_ranks) if number >= 0 else {me, comm.world_ranks[-1 - number]}
    waiting, absent = {}, {}
    for rank in asked:
        answer = reported.get(rank)
        place = f" ({places[rank]})" if rank in places else ""
        if answer is None:
            absent[rank] = (
                f"did not answer{place}: it is stopped, its host cannot be reached, or it is in a call that "
                "does not let other threads run"
            )
        elif answer.get("key") == comm.key and answer.get("number") == number:
            waiting[rank] = f"wait in {wait_text(answer)}"
        elif rank not in members:
            if "op" in answer:
                absent[rank] = f"waits elsewhere, in {wait_text(answer)}"
        else:
            calls = answer.get("calls")
            came = number > 0 and calls is not None and calls >= number
            before = "took part and went on" if came else "never came"
            absent[rank] = f"{before}: it {_doing(answer)}{place}"
    lines = [f"parlinalg: rank {me} gives up after {limit:g} s in {op} over {comm.axes} (PARLINALG_TIMEOUT={limit:g}):"]
    lines += [f"  {ranks_text(ranks)} {_verb(text, ranks)}" for ranks, text in grouped(waiting)]
    lines += [f"  {ranks_text(ranks)} {text}" for ranks, text in grouped(absent)]
    cause = disagreement({rank: answer for rank, answer in reported.items() if "op" in answer})
    if cause:
        lines.append(f"  likely cause: {cause}")
        if not getattr(comm, "checked", False):
            lines.append("  PARLINALG_CHECK=1 compares the calls before they are made")
    elif not absent and len(set(waiting.values())) > 1:
        lines.append(
            "  all are in the same operation, but from different lines: a rank may have skipped or added a call"
        )
    elif not absent:
        lines.append("  all ranks are there: the transfer itself is slow or stuck")
    return "\n".join(lines)


def disagreement(waiting: Mapping[int, Report]) -> str:
    """Return the disagreement of ranks that wait for each other in different calls; empty if there is none.

    Parameters
    ----------
    waiting : dict of int to dict
        The states of the waiting ranks (see `process_state`), by their rank in the world.
    """

    def call(rank: int) -> tuple[str, int, str]:
        return waiting[rank]["key"], waiting[rank]["number"], waiting[rank]["op"]

    def in_vain(rank: int, other: int) -> bool:
        key, number, _ = call(rank)
        return number > 0 and other in waiting[rank].get("ranks", ()) and waiting[other]["begun"].get(key, 0) < number

    for one in sorted(waiting):
        for other in sorted(waiting):
            alike = call(one)[:2] == call(other)[:2] and call(one)[1] > 0
            apart = call(one) != call(other) and (alike or (in_vain(one, other) and in_vain(other, one)))
            if one < other and apart:
                sides = [[rank for rank in sorted(waiting) if call(rank) == call(side)] for side in (one, other)]
                few, many = sorted(sides, key=len)
                return (
                    f"the ranks make different calls: {_are_in(few, waiting)} while {_are_in(many, waiting)}; a rank "
                    "skipped or added a call, or branched on what it alone knows"
                )
    return ""


def _are_in(ranks: Sequence[int], waiting: Mapping[int, Report]) -> str:
    reported = waiting[ranks[0]]
    number = f" number {reported['number']}" if reported["number"] else ""
    lines = " and ".join(sorted({waiting[rank]["line"] for rank in ranks}))
    are = "are" if len(ranks) > 1 else "is"
    return f"{ranks_text(ranks)} {are} in {reported['op']} over {tuple(reported['axes'])}{number} at {lines}"


def _verb(text: str, ranks: Sequence[int]) -> str:
    return text if len(ranks) > 1 else "waits" + text.removeprefix("wait")


def _doing(reported: Report) -> str:
    if "left" in reported:
        return f"left early ({reported['left']})"
    if "op" in reported:
        return f"waits in {wait_text(reported)}"
    return f"is at {reported['line']}{_at(reported)}, in no collective"


def left_early(me: int, how: str, waiting: Mapping[int, Report]) -> str:
    """Return the report of the exit hook of rank `me` when others wait for it in vain."""
    texts = {rank: f"in {wait_text(reported)}" for rank, reported in waiting.items()}
    parts = [f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {text}" for ranks, text in grouped(texts)]
    return f"parlinalg: rank {me} left early ({how}) while {', '.join(parts)}"


def unreachable(me: int, how: str, silent: Sequence[int], places: Mapping[int, str], seconds: float) -> str:
    """Return the report of rank `me`'s exit hook when the ranks it waits for have not answered for so long."""
    texts = {rank: f"did not answer{f' ({places[rank]})' if rank in places else ''}" for rank in silent}
    parts = [f"{ranks_text(ranks)} {text}" for ranks, text in grouped(texts)] or ["the others ended, out of its reach"]
    return (
        f"parlinalg: rank {me} waited at its end ({how}) for the other ranks, and heard of none that still runs for "
        f"{seconds:.0f} s: {'; '.join(parts)}"
    )


def vanished(me: int, gone: Sequence[int], places: Mapping[int, str], doing: str) -> str:
    """Return the report of rank `me` about ranks of its host whose processes are gone."""
    texts = [f"rank {rank} is gone ({places.get(rank, 'its process')})" for rank in gone]
    return (
        f"parlinalg: {', '.join(texts)}: killed, or ended without Python's knowledge; rank {me}, {doing}, ends the run"
    )
