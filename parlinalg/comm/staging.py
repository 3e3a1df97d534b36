"""Blocks on a GPU travel through pinned host memory.

MPI cannot be asked whether it reads GPU memory, so by default it never sees any.  `PARLINALG_CUDA_AWARE_MPI=1` says
that it does: then blocks are handed over as they are, once the stream that computes them is synchronised.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from parlinalg.backend import backend_of
from parlinalg.comm.base import DONE, Following, Handle

direct: bool = os.environ.get("PARLINALG_CUDA_AWARE_MPI", "0") not in ("", "0")
"""True if MPI is given GPU memory."""


class Staged(Following):
    """An operation on host copies; when it is done, what it received is copied to the GPU."""

    __slots__ = ("_block", "_host")

    def __init__(self, inner: Handle, host: Any, block: Any) -> None:
        super().__init__(inner)
        self._host, self._block = host, block

    def _finish(self) -> None:
        if self._block is not None:
            backend_of(self._block).copy_from_host(self._host, self._block)
        self._host = self._block = None


def to_host(block: Any) -> Any:
    """Return a staging copy of `block`, complete on return."""
    backend = backend_of(block)
    host = backend.staging(block.size, block.dtype)
    backend.copy_to_host(block, host)
    return host


def through_host(read: Any, written: Any, run: Callable[[Any, Any], Handle], wait: bool) -> Handle:
    """Run `run(read, written)` on host copies of these blocks (None where there is none; one block may be both)."""
    host_read = None if read is None else to_host(read)
    if written is None:
        host_written = None
    elif written is read:
        host_written = host_read
    else:
        host_written = backend_of(written).staging(written.size, written.dtype)
    handle = Staged(run(host_read, host_written), (host_read, host_written)[written is not None], written)
    if wait:
        handle.wait()
        return DONE
    return handle
