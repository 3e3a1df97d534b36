"""Messages of more elements than one MPI call may carry (`tunables.MAX_COUNT`).

A long operation becomes operations on slices of the same blocks, each short enough and all started at once, so nothing
is copied and a nonblocking operation stays nonblocking.  An all-gather becomes broadcasts and a reduce-scatter
reductions to one rank, because a concatenation of long pieces has displacements that an MPI of before version 4 cannot
express.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from parlinalg import tunables
from parlinalg.comm.base import Handle

if TYPE_CHECKING:
    from parlinalg.comm.mpi import MpiComm

TAG = 32767
"""The tag of the parts of a long all-to-all: the largest that every MPI has."""


class Several(Handle):
    """Operations that are done when all of them are."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Handle]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
        self._parts = []

    def test(self) -> bool:
        self._parts = [part for part in self._parts if not part.test()]
        return not self._parts


def slices(start: int, count: int) -> Iterator[slice]:
    """Yield the slices of at most `tunables.MAX_COUNT` elements that make up `count` elements from `start` on."""
    for at in range(start, start + count, tunables.MAX_COUNT):
        yield slice(at, min(at + tunables.MAX_COUNT, start + count))


def starts(counts: Sequence[int]) -> list[int]:
    """Return the index at which each rank's run begins."""
    return list(accumulate(counts[:-1], initial=0))


def all_gather(comm: MpiComm, send: Any, recv: Any, counts: Sequence[int], wait: bool) -> Handle:
    flat, begin = recv.reshape(-1), starts(counts)
    flat[begin[comm.rank] : begin[comm.rank] + send.size] = send.reshape(-1)
    return Several(
        [
            comm._broadcast(flat[part], root, wait)
            for root in range(comm.size)
            for part in slices(begin[root], counts[root])
        ]
    )


def reduce_scatter(comm: MpiComm, send: Any, recv: Any, counts: Sequence[int], op: str, wait: bool) -> Handle:
    flat, own, begin = send.reshape(-1), recv.reshape(-1), starts(counts)
    return Several(
        [
            comm._reduce(flat[part], own[part.start - begin[root] : part.stop - begin[root]], root, op, wait)
            for root in range(comm.size)
            for part in slices(begin[root], counts[root])
        ]
    )


def all_reduce(comm: MpiComm, buffer: Any, op: str, wait: bool) -> Handle:
    flat = buffer.reshape(-1)
    return Several([comm._all_reduce(flat[part], op, wait) for part in slices(0, flat.size)])


def broadcast(comm: MpiComm, buffer: Any, root: int, wait: bool) -> Handle:
    flat = buffer.reshape(-1)
    return Several([comm._broadcast(flat[part], root, wait) for part in slices(0, flat.size)])


def send(comm: MpiComm, buffer: Any, to: int, tag: int, wait: bool) -> Handle:
    flat = buffer.reshape(-1)
    return Several([comm._send(flat[part], to, tag, wait) for part in slices(0, flat.size)])


def receive(comm: MpiComm, buffer: Any, source: int, tag: int, wait: bool) -> Handle:
    flat = buffer.reshape(-1)
    return Several([comm._receive(flat[part], source, tag, wait) for part in slices(0, flat.size)])


def all_to_all(
    comm: MpiComm, send: Any, send_counts: Sequence[int], recv: Any, recv_counts: Sequence[int], wait: bool
) -> Handle:
    """Send long runs from rank to rank, and the others together; both ends of a run know whether it is long."""
    gives, gets, me = send.reshape(-1), recv.reshape(-1), comm.rank
    give_at, get_at = starts(send_counts), starts(recv_counts)
    gets[get_at[me] : get_at[me] + recv_counts[me]] = gives[give_at[me] : give_at[me] + send_counts[me]]
    parts: list[Handle] = []
    for peer in range(comm.size):
        if peer != me and recv_counts[peer] > tunables.MAX_COUNT:
            parts += [comm._receive(gets[p], peer, TAG, False) for p in slices(get_at[peer], recv_counts[peer])]
    for peer in range(comm.size):
        if peer != me and send_counts[peer] > tunables.MAX_COUNT:
            parts += [comm._send(gives[p], peer, TAG, False) for p in slices(give_at[peer], send_counts[peer])]
    short_gives = [0 if p == me or n > tunables.MAX_COUNT else n for p, n in enumerate(send_counts)]
    short_gets = [0 if p == me or n > tunables.MAX_COUNT else n for p, n in enumerate(recv_counts)]
    parts.append(comm._exchange_runs(send, (short_gives, give_at), recv, (short_gets, get_at), wait))
    whole = Several(parts)
    if wait:
        whole.wait()
    return whole
