"""What a nonblocking operation returns."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Handle(ABC):
    """An operation under way.  It keeps the operation's buffers alive until it is done.

    The buffers must not be touched before `wait` has returned, or `test` has returned True.  All ranks wait at the same
    point of their program: an operation may need them all to drive it on.
    """

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Return when the operation is done and its result is in the receiving block.  Any number of calls is fine."""

    @abstractmethod
    def test(self) -> bool:
        """Whether the operation is done; lets MPI make progress, and finishes the operation if it is."""


class _Done(Handle):
    __slots__ = ()

    def wait(self) -> None:
        pass

    def test(self) -> bool:
        return True


DONE: Handle = _Done()
"""The handle of an operation that finished before it returned."""
