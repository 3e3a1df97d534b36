"""Broadcast of a long block along a chain of ranks: every rank but the root receives it once, and passes it on.

The block travels in pieces, so that all links are busy at once: the time is that of one block on one link, whatever
the number of ranks.  MPI libraries scatter and gather long blocks instead, and their ranks receive more than the block.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from parlinalg import tunables
from parlinalg.comm.handle import Handle
from parlinalg.comm.watch import slot

if TYPE_CHECKING:
    from parlinalg.comm.base import Block
    from parlinalg.comm.mpi import MpiComm

FIRST_TAG, TAGS = 1 << 16, 1 << 12
"""Broadcasts under way at once run over the same links, and are told apart by these tags; users' are smaller."""


class Chain(Handle):
    """A broadcast under way.  Pieces are passed on in `wait` and `test`, so ranks should wait in the same order."""

    def __init__(self, comm: MpiComm, block: Block, root: int) -> None:
        flat = block.reshape(-1).view(np.uint8)
        pieces = [flat[at : at + tunables.CHAIN_PIECE] for at in range(0, flat.size, tunables.CHAIN_PIECE)]
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
