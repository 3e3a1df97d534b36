"""Collectives that are made of other operations between ranks.

Reductions that ranks compute from terms they exchange: 16-bit floats travel in 16 bits and are added in 32; integers of
8 and 16 bits wrap around as NumPy's do, also where the MPI library would stop at the largest one (`mpi.SATURATES`).  A
reduce-scatter is an all-to-all of the terms, a sum in the order of the ranks and one rounding; an all-reduce adds an
all-gather.  The words are those of a plain reduction, and the result does not depend on how the MPI library combines
terms.

Sums of arrays in memory that all ranks share: each rank adds a part, and writes it to all.  A rank reads and writes as
many elements as the array has, whatever the number of ranks, and the result has the same bits on all.

Broadcasts of long blocks along a chain of ranks: every rank but the root receives the block once, in pieces, and passes
it on, so that all links are busy at once and the time is that of one block on one link.  MPI libraries scatter and
gather long blocks instead, and their ranks receive more than the block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from parlinalg import tunables
from parlinalg.backend import backend_of
from parlinalg.comm.base import DONE, Following, Handle, combine_terms
from parlinalg.comm.watch import slot

if TYPE_CHECKING:
    from parlinalg.comm.base import Block
    from parlinalg.comm.mpi import MpiComm


class TwoPhase(Handle):
    """An operation whose second phase starts when the first is done.

    When that is differs from rank to rank, so the second phases have a communicator of their own, on which they start
    in the order of the first ones: then no rank can pair one with another operation.  The second phase starts within
    `test` or `wait`: ranks should wait for it at one point of their program, none before a blocking call that others
    make first.
    """

    __slots__ = ("_comm", "_phase", "_second")

    def __init__(self, comm: MpiComm, first: Handle) -> None:
        self._comm = comm
        self._phase = first
        self._second = False
        comm.open_shadow()
        comm.first_phases.append(self)

    def wait(self) -> None:
        while not self._second:
            first = self._comm.first_phases[0]
            first._phase.wait()
            first._go_on()
        self._phase.wait()

    def test(self) -> bool:
        while not self._second:
            first = self._comm.first_phases[0]
            if not first._phase.test():
                return False
            first._go_on()
        return self._phase.test()

    def _go_on(self) -> None:
        self._phase = self._start_second(self._comm.open_shadow())
        self._comm.first_phases.popleft()
        self._second = True

    @abstractmethod
    def _start_second(self, comm: MpiComm) -> Handle:
        """Start the second phase, on this communicator."""


class _Scattered(Following):
    """An all-to-all of terms whose sum is formed when they have arrived."""

    __slots__ = ("_op", "_out", "_terms")

    def __init__(self, inner: Handle, terms: Any, out: Any, op: str) -> None:
        super().__init__(inner)
        self._terms, self._out, self._op = terms, out, op

    def _finish(self) -> None:
        combine_terms(self._terms, self._out, self._op)
        self._terms = self._out = None


def reduce_scatter_terms(comm: MpiComm, send: Any, recv: Any, counts: Sequence[int], op: str, wait: bool) -> Handle:
    own = counts[comm.rank]
    terms = np.empty((comm.size, own), send.dtype)
    inner = comm._all_to_all(send, counts, terms, [own] * comm.size, wait)
    handle = _Scattered(inner, terms, recv.reshape(-1), op)
    if wait:
        handle.wait()
        return DONE
    return handle


def all_reduce_in_two(comm: MpiComm, buffer: Any, op: str, wait: bool) -> Handle:
    """Reduce-scatter and all-gather: the words of an all-reduce."""
    flat, n, size = buffer.reshape(-1), buffer.size, comm.size
    counts = [n // size + (r < n % size) for r in range(size)]
    own = backend_of(buffer).empty((counts[comm.rank],), buffer.dtype)
    first = comm._reduce_scatter(flat, own, counts, op, wait)
    return comm._all_gather(own, flat, counts, True) if wait else _AllReduce(comm, first, flat, own, counts)


class _AllReduce(TwoPhase):
    """A nonblocking all-reduce: a reduce-scatter, then an all-gather."""

    __slots__ = ("_buffer", "_counts", "_own")

    def __init__(self, comm: MpiComm, first: Handle, buffer: Any, own: Any, counts: list[int]) -> None:
        self._buffer, self._own, self._counts = buffer, own, counts
        super().__init__(comm, first)

    def _start_second(self, comm: MpiComm) -> Handle:
        return comm._all_gather(self._own, self._buffer, self._counts, False)


_COMMON_SLICE = 1 << 15  # elements of shared memory added at a time, so that the sums stay in cache


class SumInPlace(TwoPhase):
    """The sum of the rows of an array, `terms[ranks, n]`, in each of them.

    Its phases are barriers: after the first all terms are there, and this rank adds its part; after the second all
    parts are.
    """

    __slots__ = ("_terms",)

    def __init__(self, comm: MpiComm, terms: Any) -> None:
        self._terms = terms
        super().__init__(comm, comm.barrier_of("all_reduce"))

    def _start_second(self, comm: MpiComm) -> Handle:
        size, rank = self._terms.shape[1], comm.rank
        start, stop = (size * r // comm.size for r in (rank, rank + 1))
        total = np.empty(min(_COMMON_SLICE, stop - start), self._terms.dtype)
        for at in range(start, stop, _COMMON_SLICE):
            part = self._terms[:, at : min(at + _COMMON_SLICE, stop)]
            sums = total[: part.shape[1]]
            np.add(part[0], part[1], out=sums)
            for term in part[2:]:
                sums += term
            part[...] = sums
        self._terms = None
        return comm.barrier_of("all_reduce")


FIRST_TAG, TAGS = 1 << 16, 1 << 12
"""Broadcasts in progress at once run over the same links, and are told apart by these tags; users' are smaller."""


class Chain(Handle):
    """A broadcast in progress.  Pieces are passed on in `wait` and `test`, so ranks should wait in the same order.

    Each link carries all the block once.  There are about twice as many pieces as ranks, so that the last rank, which
    gets its first piece when it has passed all other links, does not wait long for it.
    """

    def __init__(self, comm: MpiComm, block: Block, root: int) -> None:
        flat = block.reshape(-1).view(np.uint8)
        size = min(tunables.CHAIN_PIECE, max(tunables.CHAIN_LEAST, flat.size // (2 * comm.size)))
        pieces = [flat[at : at + size] for at in range(0, flat.size, size)]
        place = (comm.rank - root) % comm.size
        comm.chains += 1
        self._comm, self._number, self._mpi = comm, comm._calls, comm.mpi
        self._tag = FIRST_TAG + comm.chains % TAGS
        self._next = (comm.rank + 1) % comm.size if place < comm.size - 1 else None
        self._pieces = pieces
        self._passed = 0
        """The pieces that are here, and on their way to the next rank."""
        self._sends: list[MPI.Request] = []
        self._receives: list[MPI.Request] = []
        if place:
            source = (comm.rank - 1) % comm.size
            self._receives = [self._mpi.Irecv((p, p.size, MPI.BYTE), source, self._tag) for p in pieces]
        else:
            for _ in pieces:
                self._pass_on()
        comm._under_way[self] = None

    def _pass_on(self) -> None:
        if self._next is not None:
            piece = self._pieces[self._passed]
            self._sends.append(self._mpi.Isend((piece, piece.size, MPI.BYTE), self._next, self._tag))
        self._passed += 1

    def test(self) -> bool:
        while self._passed < len(self._pieces):
            if not self._receives[self._passed].Test():
                return False
            self._pass_on()
        if self._sends and not MPI.Request.Testall(self._sends):
            return False
        self._done()
        return True

    def wait(self) -> None:
        slot.state = (monotonic(), self._comm, "broadcast", self._number)
        try:
            while self._passed < len(self._pieces):
                self._receives[self._passed].Wait()
                self._pass_on()
            MPI.Request.Waitall(self._sends)
        finally:
            slot.state = None
        self._done()

    def _done(self) -> None:
        self._sends, self._receives = [], []
        self._comm._under_way.pop(self, None)
