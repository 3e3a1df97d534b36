"""Attention on GPUs: between the products of a block, one pass over its scores.

The blocks are those of the plain form.  Products of 16-bit floats run on tensor cores and are summed in float32; the
probabilities and the gradients of the scores are rounded to 16 bits for the next product, as FlashAttention does (Dao,
"FlashAttention-2", 2023).  A kernel reads a block of scores once for its maximum and once for the exponentials, or once
for both operands of the backward pass's products, and hides what causality and a window hide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.backend import cuda
from parlinalg.backend.kernels.attention import Dropped, Limits, Poll, _Room, _Task, count
from parlinalg.backend.kernels.attention.visibility import Visible

Block = Any


def multiply(a: Block, b: Block, out: Block, scale: float = 1.0, *, add: bool = False) -> Block:
    """Write `scale * a @ b` to `out`, or add it there, and return `out`: by cuBLAS."""
    from parlinalg.backend import cublas  # CuPy need not be there

    return cublas.multiply(a, b, out, scale, add=add)


class DeviceTask(_Task):
    """Attention of blocks of one dtype on a GPU; arguments as of `attention.forward`."""

    def __init__(self, q: Block, k: Block, visible: Visible, scale: float, limits: Limits | None) -> None:
        super().__init__(q, k, visible, scale, limits)
        self.cast = q.dtype != self.work
        self.small = _Room(self.xp, q.dtype)

    def turned(self, name: str, part: Block, dtype: Any = None) -> Block:
        """Return [batch, n, heads, …, e] as contiguous [batch, heads, … × n, e], in the blocks' dtype or another."""
        order = (0, 2, 1, 3) if part.ndim == 4 else (0, 2, 3, 1, 4)
        room = self.small if dtype is None else self.room
        out = room.get(name, *(part.shape[i] for i in order))
        out[...] = part.transpose(*order)
        return out.reshape(*out.shape[:2], -1, part.shape[-1])

    def block(self, name: str, b: slice, h: slice, rows: slice, n: int) -> Block:
        """Return room for the scores of a block, in the working dtype."""
        m = self.group * (rows.stop - rows.start)
        return self.room.get(name, b.stop - b.start, h.stop - h.start, m, n)

    def rounded(self, name: str, scores: Block) -> Block:
        """Return room for numbers of the blocks' dtype in the place of these scores: theirs, if it is the same."""
        return self.small.get(name, *scores.shape) if self.cast else scores

    def hidden(self, scores: Block, b: slice, h: slice, rows: slice, keys: slice) -> tuple[np.int64, ...]:
        """Return the arguments by which the kernels hide keys; what has no straight edges is hidden here."""
        n, m = rows.stop - rows.start, keys.stop - keys.start
        edges = self.visible.edges(rows, keys) if self.visible.by_places else None
        if edges is None:
            self.visible.hide(self.apart(scores, rows), b, h, rows, keys)
            edges = m, -n
        self.pairs += scores.size
        return np.int64(m), np.int64(n), np.int64(edges[0]), np.int64(edges[1])

    def thin(self, scores: Block, factor: Block, rows: slice) -> None:
        """Multiply numbers of a block by the factors of dropout, in place."""
        here = self.apart(scores, rows)
        here *= factor.astype(here.dtype, copy=False)

    def column(self, like: Block) -> Block:
        """Return an array with a number for each row."""
        return self.xp.empty((*like.shape[:-1], 1), self.work)

    def forward(
        self, q: Block, k: Block, v: Block, dropped: Dropped | None, wide: bool, poll: Poll | None
    ) -> tuple[Block, Block]:  # fmt: skip
        """Return the result, and the logarithms of the sums of exp(scores): as `attention.forward` returns them."""
        xp, work = self.xp, self.work
        out = xp.empty(q.shape, work if wide else q.dtype)
        lse = xp.empty((self.batch, self.heads, self.group, self.queries), work)
        least, tiny = xp.finfo(work).min, xp.finfo(work).tiny
        for b, h in self.units():
            ks, vs = self.turned("k", k[b, :, h]), self.turned("v", v[b, :, h])
            for rows in self.rows:
                if poll is not None:
                    poll()
                qs = self.turned("q", q[b, rows, h])
                top = xp.full((*qs.shape[:-1], 1), least, work)  # finite where nothing is seen
                total, o = None, None
                for at, stop in self.spans(b, h, rows):
                    keys = slice(at, stop)
                    s = self.block("scores", b, h, rows, stop - at)
                    multiply(qs, ks[..., keys, :].swapaxes(-1, -2), s, float(self.scale))
                    edges = self.hidden(s, b, h, rows, keys)
                    p, new, sums = self.rounded("p", s), self.column(s), self.column(s)
                    cuda.launch_kernel("attention_softmax", q, (new.size,), s, top, p, new, sums, *edges)
                    if dropped is not None:
                        self.thin(p, dropped(b, h, rows, keys), rows)
                    if first := o is None:
                        o, total = self.room.get("out", *qs.shape), sums
                    else:
                        top -= new
                        xp.exp(top, out=top)
                        o *= top
                        total *= top
                        total += sums
                    multiply(p, vs[..., keys, :], o, add=not first)
                    top = new
                target = out[b, rows, h].transpose(0, 2, 3, 1, 4)
                if o is None:
                    target[...] = 0
                    lse[b, h, :, rows] = -math.inf
                    continue
                o /= xp.maximum(total, tiny)
                target[...] = self.apart(o, rows)
                with np.errstate(divide="ignore"):  # -inf where nothing is seen
                    xp.log(total, out=total)
                total += top
                lse[b, h, :, rows] = self.apart(total, rows)[..., 0]
        count(forward=self.pairs)
        return out, lse

    def backward(
        self, dout: Block, q: Block, k: Block, v: Block, out: Block, lse: Block, into: tuple[Block, Block, Block],
        dropped: Dropped | None, add: tuple[bool, bool], poll: Poll | None,
    ) -> None:  # fmt: skip
        """Write the gradients, as `attention.backward` does."""
        xp, work, scale = self.xp, self.work, float(self.scale)
        dq, dk, dv = into
        for b, h in self.units():
            ks, vs = self.turned("k", k[b, :, h]), self.turned("v", v[b, :, h])
            dks, dvs = self.room.get("dk", *ks.shape), self.room.get("dv", *vs.shape)
            dks[...] = 0
            dvs[...] = 0
            for rows in self.rows:
                if poll is not None:
                    poll()
                qs, do = self.turned("q", q[b, rows, h]), self.turned("dout", dout[b, rows, h])
                shift = lse[b, h, :, rows].reshape(*qs.shape[:-1], 1)
                shift = xp.where(shift == -math.inf, work.type(math.inf), shift)  # exp(-inf) is 0: nothing is seen
                dots = self.turned("o", out[b, rows, h], work)
                dots *= self.turned("do", dout[b, rows, h], work)
                dot = dots.sum(axis=-1)
                dqs = None
                for at, stop in self.spans(b, h, rows):
                    keys = slice(at, stop)
                    s, dp = (self.block(name, b, h, rows, stop - at) for name in ("scores", "dp"))
                    multiply(qs, ks[..., keys, :].swapaxes(-1, -2), s, scale)
                    multiply(do, vs[..., keys, :].swapaxes(-1, -2), dp)
                    edges = self.hidden(s, b, h, rows, keys)
                    factor = None if dropped is None else dropped(b, h, rows, keys)
                    if factor is not None:
                        self.thin(dp, factor, rows)
                    p, ds = self.rounded("p", s), self.rounded("ds", dp)
                    cuda.launch_kernel("attention_scores_grad", q, (shift.size,), s, dp, shift, dot, p, ds, *edges)
                    if factor is not None:
                        self.thin(p, factor, rows)
                    multiply(p.swapaxes(-1, -2), do, dvs[..., keys, :], add=True)
                    multiply(ds.swapaxes(-1, -2), qs, dks[..., keys, :], scale, add=True)
                    first = dqs is None
                    dqs = self.room.get("dq", *qs.shape) if first else dqs
                    multiply(ds, ks[..., keys, :], dqs, scale, add=not first)
                target = dq[b, rows, h].transpose(0, 2, 3, 1, 4)
                if dqs is None:
                    if not add[0]:
                        target[...] = 0
                elif add[0]:
                    target += self.apart(dqs, rows)
                else:
                    target[...] = self.apart(dqs, rows)
            for whole, part in ((dk, dks), (dv, dvs)):
                part = part.transpose(0, 2, 1, 3)
                whole[b, :, h] = part + whole[b, :, h] if add[1] else part
        count(backward=self.pairs)
