"""Sums of arrays that lie in memory all ranks have in common: each rank adds a part, and writes it to all.

A rank reads and writes as many elements as the array has, whatever the number of ranks; as messages they would be
copied twice on the way.  The result has the same bits on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.comm.handle import Handle
from parlinalg.comm.phases import TwoPhase

if TYPE_CHECKING:
    from parlinalg.comm.mpi import MpiComm

_SLICE = 1 << 15  # elements added at a time, so that the sums stay in cache


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
        total = np.empty(min(_SLICE, stop - start), self._terms.dtype)
        for at in range(start, stop, _SLICE):
            part = self._terms[:, at : min(at + _SLICE, stop)]
            sums = total[: part.shape[1]]
            np.add(part[0], part[1], out=sums)
            for term in part[2:]:
                sums += term
            part[...] = sums
        self._terms = None
        return comm.barrier_of("all_reduce")
