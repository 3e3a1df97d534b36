"""Traces: when each operation between ranks was posted and done, and how long this rank waited for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from parlinalg.comm.base import DONE, Handle
from parlinalg.comm.ledger import Book, opened
from parlinalg.comm.together import together
from parlinalg.errors import FileError

if TYPE_CHECKING:
    from parlinalg.comm.base import Comm


class TraceSpan(NamedTuple):
    """Something that took time on this rank.

    Attributes
    ----------
    kind : {"operation", "wait", "span"}
        An operation between ranks, from its call to where it was seen to be done; the time in which this rank did
        nothing but wait for one; what the user marked.
    name : str
    axes : tuple of str
        The grid's axes that the operation's ranks differ in.
    start, stop : float
        Seconds since the trace began.
    nbytes : int
        Bytes that this rank received.
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    start: float
    stop: float
    nbytes: int = 0


class TimedBook(Book):
    """A ledger that also notes times.

    Attributes
    ----------
    spans : list of TraceSpan
        In the order in which they ended.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self.spans: list[TraceSpan] = []
        self._bytes = 0
        comm.barrier()
        self.began = monotonic()

    @property
    def waited(self) -> float:
        """Seconds in which this rank did nothing but wait for others: the communication that was not hidden."""
        return sum(s.stop - s.start for s in self.spans if s.kind == "wait")

    def note(self, op: str, axes: tuple[str, ...], words: int, size: int) -> None:
        super().note(op, axes, words, size)
        self._bytes = size

    def watch(self, op: str, axes: tuple[str, ...], began: float, handle: Handle) -> Handle:
        if handle is not DONE:
            return _Watched(self, op, axes, began, handle, self._bytes)
        now = monotonic()
        self.add("operation", op, axes, began, now, self._bytes)
        self.add("wait", op, axes, began, now)
        return handle

    def add(
        self, kind: str, name: str, axes: tuple[str, ...], start: float, stop: float, nbytes: int = 0
    ) -> None:  # fmt: skip
        """Note a span between two times of `time.monotonic`."""
        self.spans.append(TraceSpan(kind, name, axes, start - self.began, stop - self.began, nbytes))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Mark what happens within as a span with this name, such as "forward"."""
        start = monotonic()
        try:
            yield
        finally:
            self.add("span", name, (), start, monotonic())

    def chrome(self) -> list[dict[str, Any]]:
        """Return this rank's spans as events of Chrome's trace format, with a track for each kind and axes."""
        events: list[dict[str, Any]] = []
        for number, s in enumerate(self.spans):
            track = " ".join((s.kind, *s.axes)) if s.kind == "operation" else s.kind
            common = {"name": s.name, "cat": s.kind, "pid": self.comm.rank, "tid": track}
            reported = {"args": {"axes": " ".join(s.axes), "bytes": s.nbytes}}
            start, stop = 1e6 * s.start, 1e6 * s.stop
            if s.kind == "operation":  # several may be in flight at once
                events.append({**common, **reported, "ph": "b", "id": number, "ts": start})
                events.append({**common, "ph": "e", "id": number, "ts": stop})
            else:
                events.append({**common, **reported, "ph": "X", "ts": start, "dur": stop - start})
        return events

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all ranks' spans as one file for chrome://tracing or ui.perfetto.dev.  Collective; rank 0 writes.

        Raises
        ------
        FileError
            If the file cannot be written, on all ranks.
        """
        everyone = self.comm.share(self.chrome(), others="by rank")

        def written() -> None:
            if self.comm.rank == 0:
                with open(path, "w") as file:
                    json.dump({"traceEvents": [event for events in everyone for event in events]}, file)

        together(self.comm, written, "writing the trace", kinds=(FileError,))


class _Watched(Handle):
    """A handle that tells its trace when its operation is seen to be done, and how long this rank waited."""

    __slots__ = ("_about", "_handle", "_trace")

    def __init__(
        self, trace: TimedBook, op: str, axes: tuple[str, ...], began: float, handle: Handle, nbytes: int
    ) -> None:  # fmt: skip
        self._trace, self._handle = trace, handle
        self._about: tuple[str, tuple[str, ...], float, int] | None = (op, axes, began, nbytes)

    def wait(self) -> None:
        began = monotonic()
        self._handle.wait()
        if self._about is not None:
            self._trace.add("wait", self._about[0], self._about[1], began, monotonic())
            self._done()

    def test(self) -> bool:
        done = self._handle.test()
        if done:
            self._done()
        return done

    def _done(self) -> None:
        if self._about is not None:
            op, axes, began, nbytes = self._about
            self._about = None
            self._trace.add("operation", op, axes, began, monotonic(), nbytes)


@contextmanager
def trace(where: Any) -> Iterator[TimedBook]:
    """Note when what ranks send each other was posted and done, while the context is open.  Collective.

    Parameters
    ----------
    where : Grid or Comm
        A grid, or a communicator; everything made from the same communicator is noted.

    Yields
    ------
    TimedBook
        A ledger too; `.write("trace.json")` writes all ranks' spans in Chrome's format.  Times begin together on all
        ranks, at a barrier.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> grid = pla.Grid({"r": 1})
    >>> with pla.trace(grid) as spans:
    ...     with spans.span("product"):
    ...         a = pla.ones((4, 4), grid, pla.Layout("r", None))
    ...         b = a @ a
    >>> [(s.kind, s.name) for s in spans.spans]
    [('span', 'product')]
    """
    book = TimedBook(where if hasattr(where, "books") else where.world)
    with opened(where, book):
        yield book
