"""Gathers and reduce-scatters that start together, as one call.

A ring of p ranks takes the latency of p - 1 messages for every call.  NCCL starts calls together in a group; elsewhere
their blocks are packed side by side into one, which costs a copy of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from parlinalg.backend import backend_of
from parlinalg.comm.base import Following, Handle

if TYPE_CHECKING:
    from parlinalg.comm.base import Block, Comm


class Call(NamedTuple):
    """The blocks of an all-gather or a reduce-scatter, and the elements of each rank's piece."""

    send: Block
    recv: Block
    counts: Sequence[int]


class Joined(Handle):
    """A call of a group.  Waiting for it starts the group."""

    __slots__ = ("_group", "_whole")

    def __init__(self, group: Group) -> None:
        self._group: Group | None = group
        self._whole: Handle | None = None

    def started(self, whole: Handle) -> None:
        """Take the handle of the call that this one has become a part of."""
        self._whole, self._group = whole, None

    def wait(self) -> None:
        if self._group is not None:
            self._group.start()
        if self._whole is not None:
            self._whole.wait()

    def test(self) -> bool:
        return self._group is None and (self._whole is None or self._whole.test())


class Group:
    """Nonblocking all-gathers and reduce-scatters that wait for each other, to start together.

    Give it as `group=` to `Comm.all_gather` and `Comm.reduce_scatter`, or to `parlinalg.redistribute.start`.  Those of
    one communicator, dtype and reduction are then one call, in the ledger too.  They start at the end of the `with`
    block, by `start()`, or when one of them is waited for: at the same point of the program on all ranks.

    Blocks that would have to be packed, and of which a rank has more than `tunables.GROUPED_PIECE` bytes, take no part:
    the copy would take longer than the messages that it saves.  These calls start at once.

    Attributes
    ----------
    nbytes : int
        Bytes that wait, as the caller adds them up; 0 again after `start()`.
    calls : int
        Calls that have been made of those that joined.
    """

    def __init__(self) -> None:
        self.nbytes = self.calls = 0
        self._waiting: dict[tuple[Comm, str, Any, str], list[tuple[Call, Joined]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(
        self, comm: Comm, op: str, send: Block, recv: Block, counts: Sequence[int], reduction: str = ""
    ) -> Handle:  # fmt: skip
        """Let a call wait for the others."""
        handle = Joined(self)
        self._waiting.setdefault((comm, op, send.dtype, reduction), []).append((Call(send, recv, counts), handle))
        return handle

    def start(self) -> None:
        """Start the calls that wait."""
        waiting, self._waiting, self.nbytes = self._waiting, {}, 0
        for (comm, op, _, reduction), joined in waiting.items():
            whole = comm.start_together(op, [call for call, _ in joined], reduction)
            self.calls += 1
            for _, handle in joined:
                handle.started(whole)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.start()


def start_packed(comm: Comm, op: str, calls: Sequence[Call], counts: Sequence[int], reduction: str) -> Handle:
    """Start all-gathers or reduce-scatters as one call on packed blocks, of which each rank has `counts` elements."""
    dtype, backend = calls[0].send.dtype, backend_of(calls[0].send)
    flat = backend.empty((sum(counts),), dtype)
    if op == "all_gather":
        start = sum(counts[: comm.rank])
        mine = flat[start : start + counts[comm.rank]]
        for here, send in _side_by_side(mine, [call.send for call in calls]):
            here[...] = send
        return _Gathered(comm._all_gather(mine, flat, counts, False), flat, calls)
    got = backend.empty((counts[comm.rank],), dtype)
    for here, there in _pieces(flat, [call.send for call in calls], calls):
        here[...] = there
    return _Reduced(comm._reduce_scatter(flat, got, counts, reduction, False), got, [call.recv for call in calls])


class _Gathered(Following):
    """A packed all-gather, of which each block gets its pieces when they have arrived."""

    __slots__ = ("_calls", "_flat")

    def __init__(self, inner: Handle, flat: Block, calls: Sequence[Call]) -> None:
        super().__init__(inner)
        self._flat, self._calls = flat, calls

    def _finish(self) -> None:
        for here, there in _pieces(self._flat, [call.recv for call in self._calls], self._calls):
            there[...] = here
        self._flat, self._calls = None, ()


class _Reduced(Following):
    """A packed reduce-scatter, of which each block gets its sums when they have arrived."""

    __slots__ = ("_blocks", "_got")

    def __init__(self, inner: Handle, got: Block, blocks: Sequence[Block]) -> None:
        super().__init__(inner)
        self._got, self._blocks = got, blocks

    def _finish(self) -> None:
        for here, block in _side_by_side(self._got, self._blocks):
            block[...] = here
        self._got, self._blocks = None, ()


def _side_by_side(flat: Block, blocks: Sequence[Block]) -> Iterator[tuple[Block, Block]]:
    """Yield the place of each block in `flat`, where they lie one after the other, and the block."""
    start = 0
    for block in blocks:
        yield flat[start : start + block.size], block.reshape(-1)
        start += block.size


def _pieces(flat: Block, wholes: Sequence[Block], calls: Sequence[Call]) -> Iterator[tuple[Block, Block]]:
    """Yield parts of `flat`, in which a rank's pieces of all blocks lie together, and the same parts of the blocks.

    Ranks with as many elements as their neighbours make one part.
    """
    starts, at = [0] * len(calls), 0
    flats = [whole.reshape(-1) for whole in wholes]
    for each, ranks in groupby(zip(*(call.counts for call in calls), strict=True)):
        n, width, column = len(list(ranks)), sum(each), 0
        rows = flat[at : at + n * width].reshape((n, width))
        for i, (whole, count) in enumerate(zip(flats, each, strict=True)):
            if count:
                yield rows[:, column : column + count], whole[starts[i] : starts[i] + n * count].reshape((n, count))
            starts[i], column = starts[i] + n * count, column + count
        at += n * width
