"""Attention on CPUs in compiled loops: which blocks of scores they compute, and when they are called.

The common cases run so: all keys, causal or windowed, positions in runs, dropout; on host blocks of float32 or float64,
where numba is installed and BLAS is the OpenBLAS in NumPy's wheel.  The plain form computes the others, and gives the
same results but for rounding (and for overflow in q k: here it is scaled after).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from parlinalg import tunables
from parlinalg.backend import namespace
from parlinalg.backend.blas import gemm_address
from parlinalg.backend.compiled import ready
from parlinalg.backend.kernels.attention import HOST, Dropped, Limits, Poll, count
from parlinalg.backend.kernels.attention.visibility import Visible, row_spans
from parlinalg.backend.shapes import ShapeArray, has_values
from parlinalg.backend.views import contiguous

Block = Any
Lines = tuple[np.ndarray, int, int, int, int]

_FEW = 8
"""Queries for which laying out the keys would cost more than their scores, as in generation."""


class Call(NamedTuple):
    """A call of the loops: heads of items (counted over batch × heads), blocks, and the factors of dropout there."""

    items: tuple[int, int]
    blocks: np.ndarray
    factor: Block
    fresh: bool
    """True for the first call for these heads."""


class Blocks:
    """Attention of host blocks by compiled loops.

    Parameters
    ----------
    q, k, v : array
        Shapes [batch, queries, kv heads, g, e] and [batch, keys, kv heads, e].
    table : array of int
        The blocks of scores of one head, as `loops` describes them.
    """

    def __init__(
        self, gemm: int, table: np.ndarray, q: Block, k: Block, v: Block, scale: float, limits: Limits
    ) -> None:  # fmt: skip
        self.gemm, self.table, self.limits = gemm, table, limits
        self.q, self.k = q, k
        self.inputs = [_lines(x) for x in (q, k, v)]
        self.scale = q.dtype.type(scale)
        self.nothing = _frozen(np.empty((0, 0, 0, 0), q.dtype))
        self.values = has_values(q)

    @staticmethod
    def of(
        q: Block, k: Block, v: Block, visible: Visible, scale: float, limits: Limits | None,
        into: tuple[Block, Block, Block] | None = None,
    ) -> Blocks | None:  # fmt: skip
        """Return the blocks of this attention, its gradients written to `into`; None if the loops cannot compute it."""
        if (
            not (ready(q, k, v) or ready(q, k, v, kind=ShapeArray))
            or not (q.size and k.size)
            or q.shape[1] < _FEW
            or not visible.by_places
            or not all(map(_plain, (q, k, v, *(into or ()))))
        ):
            return None
        gemm = gemm_address(q.dtype)
        if gemm is None:
            return None
        limits = limits or HOST
        table = _table(visible, q.shape[1], k.shape[1], limits.rows, limits.keys)
        return None if table is None else Blocks(gemm, table, q, k, v, scale, limits)

    def forward(self, dropped: Dropped | None, poll: Poll | None) -> tuple[Block, Block]:
        """Return the result, and the logarithms of the sums of exp(scores): as `attention.forward` returns them."""
        q = self.q
        batch, queries, heads, group, _ = q.shape
        xp = namespace(q)
        out = xp.empty(q.shape, q.dtype)
        lse, total = (xp.empty((batch, heads, group, queries), q.dtype) for _ in range(2))
        for call in self._calls(dropped, poll):
            self._compute("forward", call, _lines(out, True), lse, total)
        count(forward=self._pairs())
        return out, lse

    def backward(
        self, dout: Block, out: Block, lse: Block, into: tuple[Block, Block, Block], dropped: Dropped | None,
        add: tuple[bool, bool], poll: Poll | None,
    ) -> None:  # fmt: skip
        """Write the gradients, as `attention.backward` does."""
        known = self._read(out), _frozen(contiguous(lse)), self._read(dout)
        rest = (*(_lines(x, True) for x in into), self.k.shape[1], add[0])
        for call in self._calls(dropped, poll):
            self._compute("backward", call, *known, *rest, add[1] or not call.fresh)
        count(backward=self._pairs())

    def _compute(self, name: str, call: Call, *rest: Any) -> None:
        """Call the loop of a pass, unless blocks have no values."""
        if self.values:
            from parlinalg.backend.kernels.attention import loops

            getattr(loops, name)(
                self.gemm, call.blocks, call.items, *self.q.shape[3:], *self.inputs, self.scale, call.factor, *rest
            )

    def _read(self, x: Block) -> Lines:
        """Return an array that is only read, as the loops take it."""
        return _lines(x if x.dtype == self.q.dtype and _plain(x) else contiguous(x, self.q.dtype))

    def _sizes(self) -> np.ndarray:
        """Return the scores of each block."""
        return (self.table[:, 1] - self.table[:, 0]) * (self.table[:, 3] - self.table[:, 2])

    def _pairs(self) -> int:
        """Return the scores of all heads."""
        batch, _, heads, group, _ = self.q.shape
        return batch * heads * group * int(self._sizes().sum())

    def _calls(self, dropped: Dropped | None, poll: Poll | None) -> Iterator[Call]:
        """Yield the calls for all blocks of all heads: one, or several with a poll between them."""
        batch, _, heads, group, _ = self.q.shape
        if dropped is not None:
            yield from islice(self._thinned(dropped, poll), None if self.values else 2)
        elif poll is None:
            yield Call((0, batch * heads), self.table, self.nothing, True)
        else:
            for item in range(batch * heads):
                for i, part in enumerate(self._parts(max(1, tunables.ATTENTION_POLL // group))):
                    poll()
                    yield Call((item, item + 1), part, self.nothing, not i)

    def _parts(self, most: int) -> Iterator[np.ndarray]:
        """Yield the blocks in runs of about `most` scores of one query a head."""
        ends = np.flatnonzero(np.diff(np.cumsum(self._sizes()) // most)) + 1
        for start, stop in pairwise([0, *ends.tolist(), len(self.table)]):
            yield self.table[start:stop]

    def _thinned(self, dropped: Dropped, poll: Poll | None) -> Iterator[Call]:
        """Yield calls block by block, with the factors of dropout there, of as many heads as fit a core's cache."""
        batch, _, heads, group, _ = self.q.shape
        most = group * int(self._sizes().max())
        for b in range(batch):
            for h in row_spans(heads, max(1, self.limits.scores // max(1, most))):
                for i, (row, row_stop, key, key_stop) in enumerate(self.table[:, :4].tolist()):
                    if poll is not None:
                        poll()
                    factor = dropped(slice(b, b + 1), h, slice(row, row_stop), slice(key, key_stop))[0]
                    items = b * heads + h.start, b * heads + h.stop
                    factor = _frozen(contiguous(factor, self.q.dtype))
                    yield Call(items, self.table[i : i + 1], factor, not i)


def _frozen(x: Block) -> Block:
    """Return a view that cannot be written, so that loops are compiled for one kind of array."""
    view = x.view()
    view.flags.writeable = False
    return view


def _lines(x: Block, written: bool = False) -> Lines:
    """Return an array's values as they lie, and the steps from one item, token, head and query of a head to the next.

    Values can be written or not by what is done to them, as with `_frozen`.
    """
    steps = [step // x.itemsize for step in x.strides[:-1]]
    length = 1 + sum((size - 1) * step // x.itemsize for size, step in zip(x.shape, x.strides, strict=True))
    values = np.lib.stride_tricks.as_strided(x, (length,), (x.itemsize,), writeable=written) if has_values(x) else x
    return values, steps[0], steps[1], steps[2], steps[3] if x.ndim == 5 else 0


def _plain(x: Block) -> bool:
    """Return True if BLAS can be told where an array's rows lie: they are its last dim, along its second."""
    item = x.itemsize
    apart, across = x.strides[1], x.strides[-1]
    whole = all(step >= 0 and step % item == 0 for step in x.strides) and x.flags.aligned
    return whole and (across == item or x.shape[-1] == 1) and (apart >= x.shape[-1] * item or x.shape[1] == 1)


def _table(visible: Visible, queries: int, keys: int, rows: int, most: int) -> np.ndarray | None:
    """Return the blocks of scores; None if what is seen in one of them has no straight edges."""
    blocks = []
    everything = slice(None)
    for r in visible.rows(queries, rows):
        spans = [s for s in visible.spans(everything, everything, r, keys, most) if s[0] < s[1]]
        for i, (start, stop) in enumerate(spans or [(0, 0)]):
            edges = visible.edges(r, slice(start, stop)) if spans else (0, 0)
            if edges is None:
                return None
            blocks.append((r.start, r.stop, start, stop, *edges, i == 0, i == max(0, len(spans) - 1)))
    return np.array(blocks, np.int64)
