"""Blocks that go round: every rank passes what it holds to its right neighbour and takes what its left one held.

`Rotation` shows every rank's block to every rank; `Sums` collects a sum for each block on the way around.  All is
posted before it is needed, so that it travels while something is computed; `poll` drives it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from parlinalg.comm.base import DONE, Comm, Handle

Block = Any
Shape = tuple[int, ...]
Empty = Callable[[int], Block]
"""Makes a flat block of so many elements."""


class Rotation:
    """Every rank's block, the own one first, then those from the left, nearest first: (rank, block).

    Parameters
    ----------
    comm : Comm
    own : array
        This rank's block, C-contiguous.
    shapes : sequence of tuple of int
        The shapes of all ranks' blocks.
    empty : callable
    tag : int
        The tag of its messages, the same on all ranks.

    Not more than two foreign blocks are held: the one that is shown, while it is passed on, and the next one.
    """

    def __init__(self, comm: Comm, own: Block, shapes: Sequence[Shape], empty: Empty, tag: int) -> None:
        self.comm, self.shapes, self.empty, self.tag = comm, shapes, empty, tag
        self._own = own
        self._under_way: list[Handle] = []

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        comm, current = self.comm, self._own
        self._own = None
        most = max(math.prod(s) for s in self.shapes)
        buffers = [self.empty(most) for _ in range(min(2, comm.size - 1))]
        for step in range(comm.size):
            following = None
            if step + 1 < comm.size:
                shape = self.shapes[(comm.rank - step - 1) % comm.size]
                following = buffers[step % 2][: math.prod(shape)].reshape(shape)
                self._under_way = [
                    comm.receive(following, (comm.rank - 1) % comm.size, tag=self.tag, wait=False),
                    comm.send(current, (comm.rank + 1) % comm.size, tag=self.tag, wait=False),
                ]
            yield (comm.rank - step) % comm.size, current
            for handle in self._under_way:
                handle.wait()
            current = following

    def poll(self) -> None:
        """Make the messages progress."""
        for handle in self._under_way:
            handle.test()


class Sums:
    """For each rank's block a sum of terms of all other ranks, which starts at its right neighbour and comes home.

    Parameters
    ----------
    comm : Comm
    shapes : sequence of sequence of tuple of int
        For each part of a block its shape, by rank.  A part travels as soon as its term is added, and is needed again
        one round later: so the transfer of one is hidden behind the work on the others.
    empty, tag
        As in `Rotation`.

    In round t = 1, 2, …, P - 1, for each part in order: `take` the sum of block rank - t, add to it, and `give` it.
    Not more than two sums are held: one on its way out, and one that is worked on or on its way in.
    """

    def __init__(self, comm: Comm, shapes: Sequence[Sequence[Shape]], empty: Empty, tag: int) -> None:
        self.comm, self.shapes, self.empty, self.tag = comm, shapes, empty, tag
        self._here: list[Block] = [None] * len(shapes)
        self._coming: list[Handle] = [DONE] * len(shapes)
        self._spare: list[Block] = [None] * len(shapes)
        self._leaving: list[Handle] = [DONE] * len(shapes)

    def take(self, part: int, rank: int) -> tuple[Block, bool]:
        """Return the sum of a part of a rank's block so far, and whether there is one; else its values are arbitrary.

        That of the own block is complete after the last round, and lacks the own term.
        """
        self._coming[part].wait()
        if self._here[part] is not None:
            return self._view(part, rank, self._here[part]), True
        self._here[part] = self._room(part)
        return self._view(part, rank, self._here[part]), False

    def give(self, part: int, rank: int) -> None:
        """Pass the sum of a part of a rank's block on, and begin to receive that of the block on its left."""
        comm = self.comm
        self._leaving[part].wait()
        target = self._room(part) if self._spare[part] is None else self._spare[part]
        source = self._here[part]
        self._coming[part] = comm.receive(
            self._view(part, (rank - 1) % comm.size, target), (comm.rank - 1) % comm.size, tag=self.tag, wait=False
        )
        self._leaving[part] = comm.send(
            self._view(part, rank, source), (comm.rank + 1) % comm.size, tag=self.tag, wait=False
        )
        self._here[part], self._spare[part] = target, source

    def poll(self) -> None:
        """Make the messages progress."""
        for handle in (*self._leaving, *self._coming):
            handle.test()

    def finish(self) -> None:
        """Return when all is sent."""
        for handle in self._leaving:
            handle.wait()

    def _room(self, part: int) -> Block:
        return self.empty(max(math.prod(s) for s in self.shapes[part]))

    def _view(self, part: int, rank: int, buffer: Block) -> Block:
        shape = self.shapes[part][rank]
        return buffer[: math.prod(shape)].reshape(shape)
