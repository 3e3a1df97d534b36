"""Ring attention: the sequence is cut, and keys and values go round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.reductions import summed
from parlinalg.autograd.ops.attention import Drop, Parts, checked, dropped, parts_of
from parlinalg.autograd.ops.attention_masks import (
    Documents,
    Mask,
    SequenceMask,
    check_window,
    checked_positions,
    document_numbers,
    padding,
    whole_sequence,
)
from parlinalg.autograd.ops.product import nothing
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import attention as kernel
from parlinalg.backend.kernels.attention import Dropped, merge
from parlinalg.backend.kernels.attention.visibility import Visible, row_spans
from parlinalg.comm.ring import Rotation, Sums
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, piece

Block = Any
#: A block's sums of gradients travel in so many parts, each while the others are worked on.
PARTS = 4


def ring_attention(
    q: Any, kv: Any = None, *, axis: str, causal: bool = False, window: int | None = None,
    key_padding: Mask | None = None, documents: Documents | None = None, positions: Any = None,
    scale: float | None = None, dropout: Drop | None = None,
) -> Tensor:  # fmt: skip
    """Return `attention` of a sequence that is cut: softmax(scale q kᵀ) v, where blocks of keys and values go round.

    Each rank attends to its own block, then to those that arrive from its left neighbour, while the next one is on its
    way, and merges what they give (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023).  In
    the backward pass the gradients of keys and values go round with them.

    Parameters
    ----------
    q, kv, causal, window, key_padding, documents, positions, scale, dropout
        As of `attention`.  `key_padding` and `documents` that are cut along the sequence are first gathered.
    axis : str
        The axis that cuts the sequence of q and of kv.

    Returns
    -------
    Tensor
        Shape [b, s, kv heads, g, e], cut as q.  Queries that see no key give zeros.

    Raises
    ------
    LayoutError
        If the sequence is not cut by `axis`, or another dim is cut than the batch and the heads.

    With P ranks a rank receives the keys and values of all others once, 2 (P - 1) (s / P) h of a row of h features, and
    in the backward pass once more and as much of their gradients.  Beside its own it holds two blocks of keys and
    values, and in the backward pass two of their gradients.

    Causal attention is the same work for all ranks where the tokens lie in the order of `parlinalg.sequence_order`, of
    which `positions` tells.  Blocks of which nothing is seen cost nothing but the transfer.
    """
    q = as_tensor(q)
    inputs = [q] if kv is None else [q, as_tensor(kv)]
    x = summed(q.data, "ring_attention")
    y = None if kv is None else summed(inputs[1].data, "ring_attention")
    grid = x.grid
    if axis not in grid.sizes:
        raise LayoutError(f"ring_attention: no axis {axis!r} in the grid, which has {grid.sizes}")
    ring: Cut = (axis,) if grid.sizes[axis] > 1 else ()
    grid, group = checked(x, y, "ring_attention", ring)
    shape = (*x.shape[:3], group, x.shape[4])
    keys = x.shape[1] if y is None else y.shape[1]
    check_window(window)
    at = checked_positions(positions, shape[1], keys)
    if isinstance(key_padding, DistArray):
        key_padding = whole_sequence(x, key_padding, "key_padding")
    numbers = document_numbers(x, documents, keys, at)
    rest = Layout(*x.layout.dims)
    if not grid.inside:
        empty = DistArray(grid.backend.zeros((0,) * 5, x.dtype), shape, rest, grid)
        return record("ring_attention", empty, inputs, [nothing(t) for t in inputs])
    factor = (x.shape[4] ** -0.5 if x.shape[4] else 1.0) if scale is None else float(scale)

    def call(q: Block, kv: Block, at: Block, numbers: Block, real: Block) -> _Call:
        tokens = SequenceMask(
            shape[1], keys, causal=causal, window=window, positions=at, documents=numbers, padding=real
        )  # fmt: skip
        return _Call(grid, q, kv, rest, shape, keys, ring, tokens, factor, dropout, at)

    def prepare(g: Block, out: Block, lse: Block, *arrays: Block) -> list[Block]:
        return call(*arrays).backward(g, out, lse)

    real = None if key_padding is None else padding(x, key_padding, keys)
    arrays = x.block, None if y is None else y.block, at, numbers, real
    out, lse = call(*arrays).forward()
    kept = Part(prepare, out, lse, *arrays)
    return record("ring_attention", DistArray(out, shape, rest, grid), inputs, parts_of(inputs), kept)


class _Call:
    """One call: this rank's blocks, and what both passes do with the ring."""

    def __init__(
        self, grid: Grid, x: Block, y: Block, rest: Layout, shape: tuple[int, ...], keys: int, ring: Cut,
        tokens: SequenceMask, scale: float, dropout: Drop | None, positions: np.ndarray | None,
    ) -> None:  # fmt: skip
        self.grid, self.x, self.y = grid, x, y
        self.tokens, self.scale = tokens, scale
        self.comm = self.grid.comm(ring)
        self.ranges = self.grid.block(rest, shape)
        self.spans = [piece(keys, self.comm.size, r) for r in range(self.comm.size)]
        self.dtype = x.dtype
        self.work = work_dtype(x.dtype)
        self.shape, self.dropout, self.positions = (*shape, keys), dropout, positions

    def rotation(self) -> Rotation:
        """Return the keys and values [batch, keys, kv heads, 2, e] of every rank."""
        own = self.x[..., -2:, :] if self.y is None else self.y
        b, _, h, _, e = own.shape
        shapes = [(b, len(span), h, 2, e) for span in self.spans]
        own = self.grid.backend.xp.ascontiguousarray(own)
        return Rotation(self.comm, own, shapes, self.empty, self.grid.ticket())

    def empty(self, n: int) -> Block:
        return self.grid.backend.empty(n, self.dtype)

    def sees(self, rank: int) -> Visible | None:
        """Return which of a rank's keys this rank's queries see; None where there are none."""
        mine, theirs = self.ranges[1], self.spans[rank]
        visible = self.tokens.visible(mine, theirs)
        every = slice(0, len(self.ranges[0])), slice(0, len(self.ranges[2])), slice(0, len(mine))
        n = len(theirs)
        return visible if n and len(mine) and visible.spans(*every, n, n) else None

    def dropped(self, rank: int) -> Dropped | None:
        """Return the factors of the probabilities of a rank's keys."""
        if self.dropout is None:
            return None
        return dropped(self.dropout, self.shape, self.ranges, self.positions, self.spans[rank].start)

    def forward(self) -> tuple[Block, Block]:
        """Return the result, and the logarithms of the sums."""
        queries = Parts.of(self.x, self.y).q
        rotation = self.rotation()
        out: Block = None
        lse: Block = None
        for rank, block in rotation:
            own = out is None
            if (visible := self.sees(rank)) is None and not own:
                continue
            _, k, v = Parts.of(queries, block)
            terms = kernel.forward(
                queries, k, v, visible or Visible(), self.scale, self.dropped(rank), wide=True, poll=rotation.poll
            )
            if own:
                out, lse, _ = terms
            else:
                merge(out, lse, *terms[:2])
        return out.astype(self.dtype, copy=False), lse

    def backward(self, g: Block, out: Block, lse: Block) -> list[Block]:
        """Return the gradients of q and kv, or of both packed."""
        backend = self.grid.backend
        grads = [backend.empty(b.shape, self.work) for b in (self.x, self.y) if b is not None]
        into = Parts.of(grads[0], None if self.y is None else grads[1])
        queries = Parts.of(self.x, self.y).q
        parts = _parts(len(self.ranges[0]), len(self.ranges[2]))
        shapes = [
            [(b.stop - b.start, len(span), h.stop - h.start, 2, queries.shape[-1]) for span in self.spans]
            for b, h in parts
        ]
        rotation = self.rotation()
        sums = Sums(self.comm, shapes, self.empty, self.grid.ticket())

        def poll() -> None:
            rotation.poll()
            sums.poll()

        for rank, block in rotation:
            own = rank == self.comm.rank
            visible = self.sees(rank) or (Visible() if own else None)
            drop = self.dropped(rank)
            for i, (b, h) in enumerate(parts):
                total: Block
                if own:
                    total, begun = None, False
                    dk, dv = into.k[b, :, h], into.v[b, :, h]
                else:
                    total, begun = sums.take(i, rank)
                    dk, dv = total[..., 0, :], total[..., 1, :]
                if visible is not None:
                    q, k, v = Parts.of(queries[b, :, h], block[b, :, h])
                    kernel.backward(
                        g[b, :, h], q, k, v, out[b, :, h], lse[b, h], visible.part(b, h), self.scale,
                        (into.q[b, :, h], dk, dv), _within(drop, b, h), add=(not own, begun), poll=poll,
                    )  # fmt: skip
                elif not begun:
                    total[...] = 0
                if not own:
                    sums.give(i, rank)
        for i, (b, h) in enumerate(parts if self.comm.size > 1 else []):
            total, _ = sums.take(i, self.comm.rank)
            for whole, part in ((into.k, total[..., 0, :]), (into.v, total[..., 1, :])):
                whole[b, :, h] = whole[b, :, h] + part
        sums.finish()
        return [grad.astype(self.dtype, copy=False) for grad in grads]


def _parts(batch: int, heads: int) -> list[tuple[slice, slice]]:
    """Return the batch and the heads in about PARTS parts."""
    items = row_spans(batch, max(1, math.ceil(batch / PARTS))) or [slice(0, 0)]
    each = max(1, PARTS // len(items))
    some = row_spans(heads, max(1, math.ceil(heads / each))) or [slice(0, 0)]
    return [(b, h) for b in items for h in some]


def _within(drop: Dropped | None, b: slice, h: slice) -> Dropped | None:
    """Return the factors of a part of the batch and of the heads."""
    if drop is None:
        return None
    return lambda batch, heads, rows, keys: drop(
        slice(b.start + batch.start, b.start + batch.stop), slice(h.start + heads.start, h.start + heads.stop), rows,
        keys,
    )  # fmt: skip
