"""Chunks read ahead of their use and written behind it, on threads, through a few buffers that are used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from parlinalg.backend import Backend
from parlinalg.offload.disk import aligned


class Medium(Protocol):
    """Where chunks rest."""

    def read(self, chunk: int, buffer: np.ndarray) -> None:
        """Fill a buffer with a chunk."""

    def write(self, chunk: int, buffer: np.ndarray) -> None:
        """Write a chunk."""


class Stream:
    """Passes over chunks: the next ones are being read and the last ones written while one is worked on.

    Parameters
    ----------
    medium : Medium
    nbytes : int
        Of a chunk.
    backend : Backend
        Makes the buffers.
    buffers : int
        How many chunks are in memory at a time, at least 2.
    """

    def __init__(self, medium: Medium, nbytes: int, backend: Backend, buffers: int = 4) -> None:
        self.medium = medium
        self.buffers = [aligned(nbytes, backend) for _ in range(max(2, buffers))]
        # Reads and writes have a thread each: a disk does both at once.
        self._readers = ThreadPoolExecutor(1, "parlinalg-offload-read")
        self._writers = ThreadPoolExecutor(1, "parlinalg-offload-write")

    def over(self, chunks: Sequence[int], read: int) -> Iterator[tuple[int, np.ndarray]]:
        """The chunks in this order, each once, in a buffer that is the caller's until the next is asked for.

        Its first `read` bytes are read; what it then holds is written.  A caller that breaks off leaves the chunk it
        had unwritten.  At the end everything is written, or an error raised.
        """
        free = deque(self.buffers)
        ahead: deque[tuple[int, np.ndarray, Future[None]]] = deque()
        behind: deque[tuple[np.ndarray, Future[None]]] = deque()
        left = iter(chunks)
        try:
            while True:
                while behind and (behind[0][1].done() or not (free or ahead)):
                    buffer, future = behind.popleft()
                    future.result()
                    free.append(buffer)
                while free and (chunk := next(left, None)) is not None:
                    buffer = free.popleft()
                    ahead.append((chunk, buffer, self._readers.submit(self.medium.read, chunk, buffer[:read])))
                if not ahead:
                    break
                chunk, buffer, got = ahead.popleft()
                got.result()
                yield chunk, buffer
                behind.append((buffer, self._writers.submit(self.medium.write, chunk, buffer)))
            while behind:
                behind.popleft()[1].result()
        finally:  # buffers are not left to threads that still use them
            for future in (*(f for *_, f in ahead), *(f for _, f in behind)):
                if not future.cancel():
                    future.exception()

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers."""
        return sum(b.nbytes for b in self.buffers)

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown()
        self._writers.shutdown()
        self.buffers.clear()
