"""Nonblocking operations of two phases, of which the second starts when the first is done."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from parlinalg.comm.handle import Handle

if TYPE_CHECKING:
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
