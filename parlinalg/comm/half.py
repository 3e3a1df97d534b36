"""Reductions that ranks compute themselves, from terms that they exchange.

16-bit floats travel in 16 bits and are added in 32.  Integers of 8 and 16 bits wrap around as NumPy's do, also where
the MPI library would stop at the largest one (`datatypes.SATURATES`).  A reduce-scatter is an all-to-all of the terms,
a sum in the order of the ranks and one rounding; an all-reduce adds an all-gather.  The words are those of a plain
reduction, and the result does not depend on how the MPI library combines terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.backend import backend_of, namespace
from parlinalg.comm.handle import DONE, Handle
from parlinalg.comm.phases import TwoPhase

if TYPE_CHECKING:
    from parlinalg.comm.mpi import MpiComm

_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}
_SLICE = 1 << 16  # elements added at a time, so that the sums stay in cache


def is_half(dtype: Any) -> bool:
    """Whether these are 16-bit floats."""
    return bool(dtype.itemsize == 2 and dtype.name in ("float16", "bfloat16"))


def combine(terms: Any, out: Any, op: str) -> None:
    """Reduce `terms[ranks, n]` over the ranks, in order, to `out[n]`; 16-bit floats in float32."""
    step = _SLICE if backend_of(out).cpu else max(out.size, 1)
    add, work = getattr(namespace(out), _COMBINE[op]), np.dtype(np.float32) if is_half(out.dtype) else out.dtype
    for at in range(0, out.size, step):
        part = slice(at, at + step)
        total = terms[0, part].astype(work)
        for term in terms[1:]:
            add(total, term[part].astype(work, copy=False), out=total)
        out[part] = total.astype(out.dtype, copy=False)


class _Scattered(Handle):
    """An all-to-all of terms whose sum is formed when they have arrived."""

    __slots__ = ("_inner", "_op", "_out", "_terms")

    def __init__(self, inner: Handle, terms: Any, out: Any, op: str) -> None:
        self._inner: Handle | None = inner
        self._terms, self._out, self._op = terms, out, op

    def wait(self) -> None:
        if self._inner is not None:
            self._inner.wait()
            self._finish()

    def test(self) -> bool:
        if self._inner is not None:
            if not self._inner.test():
                return False
            self._finish()
        return True

    def _finish(self) -> None:
        combine(self._terms, self._out, self._op)
        self._inner = self._terms = self._out = None


def reduce_scatter(comm: MpiComm, send: Any, recv: Any, counts: Sequence[int], op: str, wait: bool) -> Handle:
    own = counts[comm.rank]
    terms = np.empty((comm.size, own), send.dtype)
    inner = comm._all_to_all(send, counts, terms, [own] * comm.size, wait)
    handle = _Scattered(inner, terms, recv.reshape(-1), op)
    if wait:
        handle.wait()
        return DONE
    return handle


def all_reduce(comm: MpiComm, buffer: Any, op: str, wait: bool) -> Handle:
    n, size = buffer.size, comm.size
    counts = [n // size + (r < n % size) for r in range(size)]
    own = np.empty(counts[comm.rank], buffer.dtype)
    if not wait:
        return _AllReduce(comm, buffer, own, counts, op)
    reduce_scatter(comm, buffer, own, counts, op, True)
    return comm._all_gather(own, buffer, counts, True)


class _AllReduce(TwoPhase):
    """A nonblocking all-reduce: a reduce-scatter, then an all-gather."""

    __slots__ = ("_buffer", "_counts", "_own")

    def __init__(self, comm: MpiComm, buffer: Any, own: Any, counts: list[int], op: str) -> None:
        self._buffer, self._own, self._counts = buffer, own, counts
        super().__init__(comm, reduce_scatter(comm, buffer, own, counts, op, False))

    def _start_second(self, comm: MpiComm) -> Handle:
        return comm._all_gather(self._own, self._buffer, self._counts, False)
