"""One rank, without MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parlinalg.comm.base import Block, Comm, Handle
from parlinalg.comm.ledger import Book
from parlinalg.errors import CommError


class SingleComm(Comm):
    """The communicator of one rank: every operation is a copy, made by the base class before it gets here."""

    def __init__(
        self, axes: tuple[str, ...] = (), world_rank: int = 0, node: int = 0, books: list[Book] | None = None
    ) -> None:
        super().__init__(1, 0, axes, (world_rank,), (node,), [] if books is None else books, False)

    def sub(self, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        if tuple(ranks) != (0,):
            raise CommError(f"there is no communicator of the ranks {tuple(ranks)}: this program has one rank, 0")
        return SingleComm(axes, self.world_ranks[0], self.nodes[0], self.books)

    def cartesian(self, sizes: Mapping[str, int]) -> Comm | None:
        need = math.prod(sizes.values())
        if need != 1:
            raise CommError(f"the axes {dict(sizes)} need {need} ranks, but there is one; start with mpiexec -n {need}")
        return self.sub((0,), tuple(sizes))

    def free(self) -> None:
        pass

    def _all_gather(self, send: Block, recv: Block, counts: Sequence[int], wait: bool) -> Handle:
        raise self._unreachable()

    def _reduce_scatter(self, send: Block, recv: Block, counts: Sequence[int], op: str, wait: bool) -> Handle:
        raise self._unreachable()

    def _all_reduce(self, buffer: Block, op: str, wait: bool) -> Handle:
        raise self._unreachable()

    def _broadcast(self, buffer: Block, root: int, wait: bool) -> Handle:
        raise self._unreachable()

    def _all_to_all(
        self, send: Block, send_counts: Sequence[int], recv: Block, recv_counts: Sequence[int], wait: bool
    ) -> Handle:
        raise self._unreachable()

    def _send(self, buffer: Block, to: int, tag: int, wait: bool) -> Handle:
        raise self._unreachable()

    def _receive(self, buffer: Block, source: int, tag: int, wait: bool) -> Handle:
        raise self._unreachable()

    def _barrier(self) -> None:
        raise self._unreachable()

    def _exchange(self, payload: bytes) -> list[bytes]:
        raise self._unreachable()

    def _unreachable(self) -> CommError:
        return CommError("one rank has nobody to talk to")
