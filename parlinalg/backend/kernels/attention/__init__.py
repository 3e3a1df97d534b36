"""Attention in blocks of queries: scores are never held beyond one block of a few heads.

Forward, for a block of queries: scores = q kᵀ over the keys it may see, the softmax in place with a running maximum and
sum over runs of keys, out = softmax v.  Only out and the logarithm of the sums are kept.  Backward, for the same
blocks: P = exp(scores - lse), D = the row sums of dout ∘ out, dS = P ∘ (dout vᵀ - D), dq = dS k, dk = dSᵀ q, dv = Pᵀ
dout (Dao et al., "FlashAttention", 2022; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

Where no score can exceed `CALM`, since |q| |k| does not, exponentials are taken of the scores as they are: no maximum
is sought, and in the backward pass dout is divided by the sums, in place of the scores' block.

Queries that share a key and value head are rows of one product.  Blocks of 16-bit floats are computed in float32.

On CPUs `blocks` computes the common cases in compiled loops; `device` has the form for GPUs, where cuDNN computes what
it can (`backend.cudnn`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, cuda, cudnn, namespace
from parlinalg.backend.compiled import exp, loop, ready
from parlinalg.backend.halves import is_half, work_dtype
from parlinalg.backend.kernels import example, kernel
from parlinalg.backend.kernels.attention.visibility import Visible, row_spans
from parlinalg.backend.shapes import ShapeArray, ShapesBackend, has_values
from parlinalg.backend.views import contiguous_rows, flat

Block = Any
Poll = Callable[[], object]
Dropped = Callable[[slice, slice, slice, slice], Block]
"""For slices of batch, kv heads, rows and keys, what probabilities are multiplied by: [batch, heads, g, rows, keys]."""

CALM = 40.0
"""Scores up to this are exponentiated as they are: e^±40 and sums of them are far from the ends of float32."""


@dataclass(frozen=True)
class Limits:
    """The sizes of what is computed at a time.

    Attributes
    ----------
    rows : int
        Queries of all heads that share a key.
    keys : int
        Keys of one run.
    scores : int
        Scores of all heads taken together.
    """

    rows: int
    keys: int
    scores: int


HOST = Limits(rows=64, keys=1024, scores=1 << 16)
"""Blocks that stay in a CPU core's cache while they are computed."""
DEVICE = Limits(rows=1024, keys=1 << 14, scores=1 << 26)


@dataclass
class Work:
    """The scores that were computed in forward and in backward passes, with those that were then hidden."""

    forward: int = 0
    backward: int = 0

    def flops(self, width: int) -> int:
        """Return the floating-point operations of their products, with heads of so many features."""
        return width * (4 * self.forward + 10 * self.backward)


_counted: ContextVar[Work | None] = ContextVar("counted", default=None)


@contextmanager
def counting() -> Iterator[Work]:
    """Count the scores that this rank computes while the context is open."""
    work = Work()
    token = _counted.set(work)
    try:
        yield work
    finally:
        _counted.reset(token)


def count(forward: int = 0, backward: int = 0) -> None:
    """Count scores that were computed."""
    if (work := _counted.get()) is not None:
        work.forward += forward
        work.backward += backward


class _Room:
    """Arrays that are used again from block to block."""

    def __init__(self, xp: Any, dtype: np.dtype[Any]) -> None:
        self.xp = xp
        self.dtype = dtype
        self._held: dict[str, Block] = {}

    def get(self, name: str, *shape: int) -> Block:
        """Return an array with arbitrary values, valid until the next one of this name."""
        n = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.size < n:
            held = self._held[name] = self.xp.empty(n, self.dtype)
        return held[:n].reshape(shape)


class _Task:
    """The part that forward and backward have in common: shapes, units of work, and the scores of one block.

    Parameters
    ----------
    kept : array, optional
        The array for the scores of all blocks, one after the other.
    """

    def __init__(
        self, q: Block, k: Block, visible: Visible, scale: float, limits: Limits | None, kept: Block = None
    ) -> None:
        self.xp, self.cpu = namespace(q), backend_of(q).cpu
        self.batch, self.queries, self.heads, self.group, self.width = q.shape
        self.keys = k.shape[1]
        self.visible = visible = visible.part(slice(None), slice(None))  # what it makes for its use goes with it
        self.work = work_dtype(q.dtype)
        self.scale = self.work.type(scale)
        self.limits = limits or (HOST if self.cpu else DEVICE)
        self.room = _Room(self.xp, self.work)
        self.kept, self.used = kept, 0
        self.pairs = 0
        self._spans: dict[tuple[int | None, ...], list[tuple[int, int]]] = {}
        most = self.limits.rows * (4 if visible.alike else 1)  # small blocks waste less where queries see other keys
        rows = max(1, min(self.queries, max(16, most // max(1, self.group))))
        size = visible.size
        if size:  # blocks of queries that meet few rows of the table
            rows = rows // size * size if rows >= size else -(-size // -(-size // rows))
        self.rows = visible.rows(self.queries, rows)
        self.step = rows
        self.loops = ready(q) or ready(q, kind=ShapeArray)
        self.several, self.sampled = len(self.rows) > 1, False
        self.ones = self.xp.ones((min(self.keys, self.limits.keys), 1), self.work)

    def sample(self) -> None:
        """Compute only the block of queries with the most keys and the one before it, of arrays without values.

        The others take as much room, or less: it grows from block to block.
        """
        for b, h in self.units():
            keys = [sum(stop - at for at, stop in self.spans(b, h, rows)) for rows in self.rows]
            most = keys.index(max(keys))
            self.rows, self.sampled = self.rows[max(0, most - 1) : most + 1], True
            break

    def units(self) -> Iterator[tuple[slice, slice]]:
        """Yield slices of the batch and of the heads that are computed together."""
        if not (self.batch and self.heads and self.queries and self.group):
            return
        each = self.group * self.step * max(1, min(self.keys, self.limits.keys))
        heads = 1 if self.visible.by_head else max(1, min(self.heads, self.limits.scores // each))
        most = self.limits.scores // (each * heads) if heads == self.heads else 1
        items = max(1, min(self.batch, most))
        for b in row_spans(self.batch, items):
            for h in row_spans(self.heads, heads):
                yield b, h
                if self.sampled:
                    return

    def places(self) -> int:
        """Return how many scores all blocks have together."""
        return sum(
            (b.stop - b.start) * (h.stop - h.start) * self.group * (rows.stop - rows.start) * (stop - at)
            for b, h in self.units() for rows in self.rows for at, stop in self.spans(b, h, rows)
        )  # fmt: skip

    def calm(self, q: Block, ks: Block) -> bool:
        """Return True if no score of queries q and keys ks can be large, by the norms of their rows (Cauchy-Schwarz).

        Not asked for a few queries, as in generation: the norms of the keys would cost more than their scores.
        """
        if not self.cpu or q.dtype != self.work or not ks.size or self.queries * self.group < 16 or self.sampled:
            return False
        most = self.xp.einsum("bnhge,bnhge->bnhg", q, q).max() * self.xp.einsum("bhne,bhne->bhn", ks, ks).max()
        return bool(most * self.scale**2 <= CALM**2)

    def by_head(self, name: str, part: Block) -> Block:
        """Return [batch, keys, heads, e] as [batch, heads, keys, e], in the working dtype.

        It is contiguous if it is used often.
        """
        b, n, h, e = part.shape
        if not self.several and part.dtype == self.work and part.strides[-1] == part.itemsize:
            return part.transpose(0, 2, 1, 3)
        out = self.room.get(name, b, h, n, e)
        out[...] = part.transpose(0, 2, 1, 3)
        return out

    def rows_by_head(self, name: str, part: Block, scale: Any = None) -> Block:
        """Return [batch, rows, heads, g, e] as contiguous [batch, heads, g * rows, e], times scale, in the working
        dtype.

        The scale is a number, or an array that broadcasts to [batch, heads, g, rows, e].
        """
        b, n, h, g, e = part.shape
        out = self.room.get(name, b, h, g, n, e)
        turned = part.transpose(0, 2, 3, 1, 4)
        if scale is None:
            out[...] = turned
        elif part.dtype == self.work:
            self.xp.multiply(turned, scale, out=out)
        else:
            out[...] = turned
            out *= scale
        return out.reshape(b, h, g * n, e)

    def product(self, name: str, a: Block, b: Block) -> Block:
        """Return a @ b in an array of this name."""
        return self.xp.matmul(a, b, out=self.room.get(name, *a.shape[:-1], b.shape[-1]))

    def place(self, *shape: int) -> Block:
        """Return the next block's scores: kept, or in an array that is used again."""
        self.pairs += math.prod(shape)
        if self.kept is None:
            return self.room.get("scores", *shape)
        at, self.used = self.used, self.used + math.prod(shape)
        return self.kept[at : self.used].reshape(shape)

    def scores(self, qs: Block, kt: Block, b: slice, h: slice, rows: slice, keys: slice) -> Block:
        """Return the scaled scores of a block, -inf where a key is not seen: [batch, heads, g * rows, keys]."""
        s = self.xp.matmul(qs, kt, out=self.place(*qs.shape[:-1], kt.shape[-1]))
        self.visible.hide(self.apart(s, rows), b, h, rows, keys)
        return s

    def apart(self, s: Block, rows: slice) -> Block:
        """Return [batch, heads, g * rows, n] as [batch, heads, g, rows, n]."""
        return s.reshape(*s.shape[:2], self.group, rows.stop - rows.start, s.shape[-1])

    def spans(self, b: slice, h: slice, rows: slice) -> list[tuple[int, int]]:
        """Return the runs of keys that queries `rows` of these items and heads see."""
        key: tuple[int | None, ...] = rows.start, rows.stop  # the same for all items and heads, but for these:
        if self.visible.documents is not None:
            key += b.start, b.stop
        if self.visible.table is not None:
            key += h.start, h.stop
        if key not in self._spans:
            self._spans[key] = self.visible.spans(b, h, rows, self.keys, self.limits.keys)
        return self._spans[key][:2] if self.sampled else self._spans[key]

    def sums(self, s: Block) -> Block:
        """Return the sums of the rows of s, as columns."""
        return self.xp.matmul(s, self.ones[: s.shape[-1]])

    def exponentiate(self, s: Block, shift: Block = None) -> Block:
        """Replace s by exp(s - shift) in place; return the sums of its rows, as columns."""
        if self.loops and s.size:
            sums = self.xp.empty((*s.shape[:-1], 1), s.dtype)
            tops = sums.reshape(-1)[:0] if shift is None else flat(shift)
            _exp_and_sum_loop(contiguous_rows(s), tops, sums.reshape(-1))
            return sums
        if shift is not None:
            s -= shift
        self.xp.exp(s, out=s)
        return self.sums(s)

    def through_softmax(self, dp: Block, p: Block, dot: Block) -> None:
        """Replace dp by (dp - dot) p in place: the gradient of scores from that of probabilities."""
        if self.loops and p.size:
            _softmax_grad_loop(contiguous_rows(p), contiguous_rows(dp), flat(dot))
            return
        dp -= dot
        dp *= p

    def write_dq(self, target: Block, dqs: Block | None, rows: slice, add: bool) -> None:
        """Write the scaled gradient of queries `rows`, or add it to, [batch, heads, g, rows, e]; None where it is 0."""
        if dqs is None:
            if not add:
                target[...] = 0
        elif add:
            dqs *= self.scale
            target += self.apart(dqs, rows)
        elif target.dtype == self.work:
            self.xp.multiply(self.apart(dqs, rows), self.scale, out=target)
        else:
            dqs *= self.scale
            target[...] = self.apart(dqs, rows)

    def thinned(self, s: Block, factor: Block, rows: slice) -> Block:
        """Return s times the factors of dropout, in an array of its own."""
        out = self.room.get("thinned", *s.shape)
        self.xp.multiply(self.apart(s, rows), factor, out=self.apart(out, rows))
        return out


@loop(sums=True)
def _exp_and_sum_loop(s: Any, top: Any, sums: Any) -> None:
    """s = exp(s - top) in place, with no top (empty) exp(s), and the sums of the rows."""
    for i in range(s.shape[0]):
        m = top[i] if top.size else s.dtype.type(0)
        t = s.dtype.type(0)
        for j in range(s.shape[1]):
            e = exp(s[i, j] - m)
            s[i, j] = e
            t += e
        sums[i] = t


@loop()
def _softmax_grad_loop(p: Any, dp: Any, dot: Any) -> None:
    """dp = (dp - dot) p in place."""
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            dp[i, j] = (dp[i, j] - dot[i]) * p[i, j]


@kernel()
def forward(
    q: Block, k: Block, v: Block, visible: Visible, scale: float, dropped: Dropped | None = None,
    limits: Limits | None = None, keep: bool = False, wide: bool = False, poll: Poll | None = None,
) -> tuple[Block, Block, Block]:  # fmt: skip
    """Return softmax(scale q kᵀ) v over the keys that each query sees; zeros where it sees none.

    Parameters
    ----------
    q : array
        Shape [batch, queries, kv heads, g, e]: each of g queries a head meets the same keys.
    k, v : array
        Shape [batch, keys, kv heads, e].  All three may be views with any strides of the leading dims.
    visible : Visible
    scale : float
    dropped : callable, optional
        Factors of the probabilities: 0, or one over the probability that they stay.
    keep : bool
        Keep the exponentials of all scores for the backward pass.
    wide : bool
        Return the result in the working dtype, as a term to be merged with others.
    poll : callable, optional
        Called now and then, to progress pending communication.

    Returns
    -------
    out : array
        As q, contiguous.
    lse : array
        Shape [batch, kv heads, g, queries], in the working dtype: the logarithms of the sums of exp(scores), or of what
        is kept; -inf where a query sees no key.
    kept : array or None
    """
    task = _Task(q, k, visible, scale, limits)
    xp, work = task.xp, task.work
    if keep:
        task.kept = xp.empty(task.places(), work)
    if not has_values(q):
        task.sample()
    out = xp.empty(q.shape, work if wide else q.dtype)
    lse = xp.empty((task.batch, task.heads, task.group, task.queries), work)
    least, tiny = xp.finfo(work).min, xp.finfo(work).tiny
    for b, h in task.units():
        ks, vs = task.by_head("k", k[b, :, h]), task.by_head("v", v[b, :, h])
        kt = ks.swapaxes(-1, -2)
        calm = task.calm(q[b, :, h], ks)
        for rows in task.rows:
            if poll is not None:
                poll()
            qs = task.rows_by_head("q", q[b, rows, h], task.scale)
            top, total, o = None, None, None
            done: list[Block] = []
            for at, stop in task.spans(b, h, rows):
                keys = slice(at, stop)
                s = task.scores(qs, kt[..., keys], b, h, rows, keys)
                new = None
                if not calm:
                    new = s.max(axis=-1, keepdims=True)
                    xp.maximum(new, least if top is None else top, out=new)  # finite where nothing is seen
                    if top is not None:
                        top -= new
                        xp.exp(top, out=top)
                        for past in (o, total, *done):
                            past *= top
                    top = new
                sums = task.exponentiate(s, new)
                if keep:
                    done.append(s)
                p = s if dropped is None else task.thinned(s, dropped(b, h, rows, keys), rows)
                if total is None:
                    o, total = task.product("out", p, vs[..., keys, :]), sums
                else:
                    o += task.product("more", p, vs[..., keys, :])
                    total += sums
            target = out[b, rows, h].transpose(0, 2, 3, 1, 4)
            if total is None:
                target[...] = 0
                lse[b, h, :, rows] = -math.inf
                continue
            empty = total == 0
            xp.maximum(total, tiny, out=total)
            if out.dtype == work:
                xp.divide(task.apart(o, rows), task.apart(total, rows), out=target)
            else:
                o /= total
                target[...] = task.apart(o, rows)
            xp.log(total, out=total)
            if top is not None and not keep:
                total += top
            total[empty] = -math.inf
            lse[b, h, :, rows] = task.apart(total, rows)[..., 0]
    count(forward=task.pairs)
    return out, lse, task.kept


@kernel()
def backward(
    dout: Block, q: Block, k: Block, v: Block, out: Block, lse: Block, visible: Visible, scale: float,
    into: tuple[Block, Block, Block], dropped: Dropped | None = None, limits: Limits | None = None,
    kept: Block = None, add: tuple[bool, bool] = (False, False), poll: Poll | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v from that of out to the arrays `into`, which have their shapes.

    Arguments as of `forward`, whose results are `out`, `lse` and `kept`; with these keys among others, those of all.

    Parameters
    ----------
    add : (bool, bool)
        True to add to the values of `into`, for q and for k and v.
    """
    task = _Task(q, k, visible, scale, limits, kept)
    xp, work = task.xp, task.work
    dq, dk, dv = into
    if not has_values(q):
        task.sample()
    if not (task.queries and task.group) and not add[1]:
        dk[...] = 0
        dv[...] = 0
    for b, h in task.units():
        ks, vs = task.by_head("k", k[b, :, h]), task.by_head("v", v[b, :, h])
        kt, vt = ks.swapaxes(-1, -2), vs.swapaxes(-1, -2)
        plain = kept is not None or task.calm(q[b, :, h], ks)
        dks, dvs = task.room.get("dk", *ks.shape), task.room.get("dv", *vs.shape)
        dks[...] = 0
        dvs[...] = 0
        for rows in task.rows:
            if poll is not None:
                poll()
            qs = task.rows_by_head("q", q[b, rows, h], task.scale)
            shift = lse[b, h, :, rows][..., None]
            shift = xp.where(shift == -math.inf, work.type(math.inf), shift)  # exp(-inf) is 0 where nothing is seen
            if plain:  # a row whose sum is less sees none of these keys
                xp.maximum(shift, -CALM - 1, out=shift)
            # P = exp(scores - lse), or exp(scores) with dout in its stead divided by the sums
            do = task.rows_by_head("dout", dout[b, rows, h], xp.exp(-shift) if plain else None)
            shift = shift.reshape(*qs.shape[:-1], 1)
            dot = xp.einsum("bhij,bhij->bhi", do, task.rows_by_head("o", out[b, rows, h]))[..., None]
            dqs = None
            for at, stop in task.spans(b, h, rows):
                keys = slice(at, stop)
                if kept is None:
                    p = task.scores(qs, kt[..., keys], b, h, rows, keys)
                    task.exponentiate(p, None if plain else shift)
                else:
                    p = task.place(*qs.shape[:-1], stop - at)
                dp = task.product("dp", do, vt[..., keys])
                if dropped is None:
                    dvs[..., keys, :] += task.product("more", p.swapaxes(-1, -2), do)
                else:
                    factor = dropped(b, h, rows, keys)
                    dvs[..., keys, :] += task.product("more", task.thinned(p, factor, rows).swapaxes(-1, -2), do)
                    spread = task.apart(dp, rows)
                    spread *= factor
                task.through_softmax(dp, p, dot)
                dks[..., keys, :] += task.product("more", dp.swapaxes(-1, -2), qs)
                if dqs is None:
                    dqs = task.product("dq", dp, ks[..., keys, :])
                else:
                    dqs += task.product("more", dp, ks[..., keys, :])
            task.write_dq(dq[b, rows, h].transpose(0, 2, 3, 1, 4), dqs, rows, add[0])
        for whole, part in ((dk, dks), (dv, dvs)):
            part = part.transpose(0, 2, 1, 3)
            whole[b, :, h] = part + whole[b, :, h] if add[1] else part
    count(backward=task.pairs)


@forward.compiled
def _(
    q: Block, k: Block, v: Block, visible: Visible, scale: float, dropped: Dropped | None = None,
    limits: Limits | None = None, keep: bool = False, wide: bool = False, poll: Poll | None = None,
) -> tuple[Block, Block, Block]:  # fmt: skip
    from parlinalg.backend.kernels.attention.blocks import Blocks

    blocks = None if keep else Blocks.of(q, k, v, visible, scale, limits)
    return NotImplemented if blocks is None else (*blocks.forward(dropped, poll), None)


@backward.compiled
def _(
    dout: Block, q: Block, k: Block, v: Block, out: Block, lse: Block, visible: Visible, scale: float,
    into: tuple[Block, Block, Block], dropped: Dropped | None = None, limits: Limits | None = None,
    kept: Block = None, add: tuple[bool, bool] = (False, False), poll: Poll | None = None,
) -> None:  # fmt: skip
    from parlinalg.backend.kernels.attention.blocks import Blocks

    blocks = None if kept is not None else Blocks.of(q, k, v, visible, scale, limits, into)
    if blocks is None:
        return NotImplemented
    blocks.backward(dout, out, lse, into, dropped, add, poll)
    return None


@forward.cuda(r"""
__device__ inline W block_max(W v) {
    // as block_sum
    __shared__ W warps[32];
    for (int step = 16; step > 0; step >>= 1) {
        W other = __shfl_xor_sync(0xffffffffu, v, step);
        v = other > v ? other : v;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
    __syncthreads();
    W most = warps[0];
    for (int i = 1; i < (int)(blockDim.x >> 5); ++i) most = warps[i] > most ? warps[i] : most;
    return most;
}

#define SEEN(j, i, after, upto) (j <= i + after && j > i + upto)

// A row of n scores: p = exp(s - m), where m is the most of the scores that are seen and of `past`, and their sum.  Of
// each run of `queries` rows, row i sees its keys j with i + upto < j <= i + after.  s and p may be one array.
extern "C" __global__ void pla_attention_softmax(const W* s, const W* past, T* p, W* top, W* sum, Int n, Int queries,
                                                 Int after, Int upto) {
    Int row = blockIdx.x, i = row % queries;
    W m = past[row], t = 0;
    for (Int j = threadIdx.x; j < n; j += blockDim.x)
        if (SEEN(j, i, after, upto)) { W x = s[row * n + j]; m = x > m ? x : m; }
    m = block_max(m);
    for (Int j = threadIdx.x; j < n; j += blockDim.x) {
        W e = SEEN(j, i, after, upto) ? exp(s[row * n + j] - m) : (W)0;
        t += e;
        p[row * n + j] = (T)e;
    }
    t = block_sum(t);
    if (threadIdx.x == 0) { top[row] = m; sum[row] = t; }
}
""")
def _(
    q: Block, k: Block, v: Block, visible: Visible, scale: float, dropped: Dropped | None = None,
    limits: Limits | None = None, keep: bool = False, wide: bool = False, poll: Poll | None = None,
) -> tuple[Block, Block, Block]:  # fmt: skip
    from parlinalg.backend.kernels.attention.device import DeviceTask

    if keep or not cuda.ready(q, k, v) or not k.size:
        return NotImplemented
    if (band := _fused_band((q, k, v), visible, dropped, limits, keep)) is not None:
        found = cudnn.attention(q, k, v, band, scale)
        if found is not None:
            count(forward=_pairs_seen(q, k, visible))
            return found[0].astype(work_dtype(q.dtype)) if wide else found[0], found[1], None
    return (*DeviceTask(q, k, visible, scale, limits).forward(q, k, v, dropped, wide, poll), None)


@backward.cuda(r"""
// A row of n scores, and of the gradients of its probabilities: p = exp(s - shift), ds = p (dp - dot).  Which are seen,
// and what may be one array, as above: s and p, dp and ds.
extern "C" __global__ void pla_attention_scores_grad(const W* s, const W* dp, const W* shift, const W* dot, T* p, T* ds,
                                                     Int n, Int queries, Int after, Int upto) {
    Int row = blockIdx.x, i = row % queries;
    W m = shift[row], d = dot[row];
    for (Int j = threadIdx.x; j < n; j += blockDim.x) {
        W e = SEEN(j, i, after, upto) ? exp(s[row * n + j] - m) : (W)0, g = e * (dp[row * n + j] - d);
        p[row * n + j] = (T)e;
        ds[row * n + j] = (T)g;
    }
}
""")
def _(
    dout: Block, q: Block, k: Block, v: Block, out: Block, lse: Block, visible: Visible, scale: float,
    into: tuple[Block, Block, Block], dropped: Dropped | None = None, limits: Limits | None = None,
    kept: Block = None, add: tuple[bool, bool] = (False, False), poll: Poll | None = None,
) -> None:  # fmt: skip
    from parlinalg.backend.kernels.attention.device import DeviceTask

    if kept is not None or not cuda.ready(q, k, v) or not k.size:
        return NotImplemented
    band = _fused_band((q, k, v, dout, out), visible, dropped, limits, kept is not None)
    if band is not None and cudnn.attention_grad(dout, q, k, v, out, lse, into, band, scale, add):
        count(backward=_pairs_seen(q, k, visible))
        return None
    DeviceTask(q, k, visible, scale, limits).backward(dout, q, k, v, out, lse, into, dropped, add, poll)
    return None


def _fused_band(
    blocks: tuple[Block, ...], visible: Visible, dropped: Dropped | None, limits: Limits | None, kept: bool
) -> tuple[int, int] | None:  # fmt: skip
    """Return the band of pairs that a fused kernel is to compute, where cuDNN's package is; None where products do.

    `blocks` are q, k and v, of a backward pass with the gradient of the result and the result; `kept` says that scores
    are kept.  A few queries, as in generation, are not worth a kernel: each size has its own, and sizes change from
    call to call.
    """
    q, k = blocks[:2]
    few = q.shape[1] < tunables.FUSED_QUERIES
    if kept or few or dropped is not None or limits is not None or not (is_half(q.dtype) and cuda.ready(*blocks)):
        return None
    band = visible.band(q.shape[1], k.shape[1])
    return band if band is not None and cudnn.takes(q, k, band) else None


def _pairs_seen(q: Block, k: Block, visible: Visible) -> int:
    """Return how many scores a fused kernel computes: those that are seen."""
    return math.prod((q.shape[0], *q.shape[2:4])) * visible.pairs(0, q.shape[1], 0, k.shape[1])


def _tell(
    device: ShapesBackend, task: _Task, products: int, name: str, blocks: tuple[Block, ...], given: np.dtype[Any],
    kept: bool, fused: bool,
) -> None:  # fmt: skip
    """Tell a device of a pass: so many products of each block of queries and its keys, and a kernel of the scores.

    On a GPU, unless scores are kept, the products of 16-bit floats are such, and the kernel reads their scores, in the
    backward pass also their gradients, and writes them in the blocks' dtype (`device`): a fused kernel would not.
    `fused` says that such a kernel is to compute them, where there is one.
    """
    width, scores, seen = task.width, 0, 0
    apart = device.cuda and not kept
    dtype = given if apart else task.work
    pairs = cache(task.visible.pairs)
    shapes: Counter[tuple[int, int]] = Counter()
    calls: Counter[tuple[int, int]] = Counter()
    for b, h in task.units():
        heads = (b.stop - b.start) * (h.stop - h.start)
        for rows in task.rows:
            m, spans = task.group * (rows.stop - rows.start), task.spans(b, h, rows)
            n = sum(stop - at for at, stop in spans)
            shapes[m, n] += heads
            calls[m, n] += heads * len(spans)
            scores += heads * m * n
            seen += heads * task.group * sum(pairs(rows.start, rows.stop, at, stop) for at, stop in spans)
    for (m, n), batch in shapes.items():
        for i in range(products):  # of both kinds in turn: scores by features, features by scores
            columns, inner = (n, width) if i % 2 == 0 else (width, n)
            device.product(batch, m, columns, inner, dtype, calls[m, n], given, fused)
    task.pairs += scores
    nbytes, more = sum(x.nbytes for x in blocks if x is not None), 0
    if apart:  # and copies: of the blocks by heads, and of results and their gradients in the working dtype
        size, others = math.prod((task.batch, task.queries, task.heads, task.group, width)), task.batch * task.keys
        others *= 2 * task.heads * width
        copies, wide = (size + others, 3 * size) if products == 2 else (2 * size + others, 6 * size + 2 * others)
        more = copies * given.itemsize + wide * task.work.itemsize
        more += products // 2 * scores * (task.work.itemsize + given.itemsize)
    device.attention(name, nbytes, scores, task.work, 2 * products * width * seen, width, given, more, fused)


@forward.shapes
def _(
    device: ShapesBackend, q: Block, k: Block, v: Block, visible: Visible, scale: float,
    dropped: Dropped | None = None, limits: Limits | None = None, keep: bool = False, wide: bool = False,
    poll: Poll | None = None,
) -> tuple[Block, Block, Block]:  # fmt: skip
    with device.unseen():
        task = _Task(q, k, visible, scale, limits)
        task.ones = None
        fused = _fused_band((q, k, v), visible, dropped, limits, keep) is not None
    if device.cpu:
        with counting():
            out, lse, kept = forward.imitate(device, q, k, v, visible, scale, dropped, limits, keep, wide)
    else:
        kept = device.empty((task.places(),), task.work) if keep else None
        out = device.empty(q.shape, task.work if wide else q.dtype)
        lse = device.empty((task.batch, task.heads, task.group, task.queries), task.work)
    if poll is not None:
        poll()
    _tell(device, task, 2, "attention.forward", (q, k, v, out, lse, kept), q.dtype, keep, fused)
    count(forward=task.pairs)
    return out, lse, kept


@backward.shapes
def _(
    device: ShapesBackend, dout: Block, q: Block, k: Block, v: Block, out: Block, lse: Block, visible: Visible,
    scale: float, into: tuple[Block, Block, Block], dropped: Dropped | None = None, limits: Limits | None = None,
    kept: Block = None, add: tuple[bool, bool] = (False, False), poll: Poll | None = None,
) -> None:  # fmt: skip
    with device.unseen():
        task = _Task(q, k, visible, scale, limits)
        task.ones = None
        fused = _fused_band((q, k, v, dout, out), visible, dropped, limits, kept is not None) is not None
    if device.cpu:
        with counting():
            backward.imitate(device, dout, q, k, v, out, lse, visible, scale, into, dropped, limits, kept, add)
    if poll is not None:
        poll()
    blocks = dout, q, k, v, out, lse, kept, *into
    products = 4 if kept is not None else 5
    _tell(device, task, products, "attention.backward", blocks, q.dtype, kept is not None, fused)
    count(backward=task.pairs)


@kernel()
def merge(out: Block, lse: Block, more: Block, more_lse: Block) -> None:
    """Add attention over more keys to the results over some keys, in place; `more` is used up.

    Shapes as `forward` gives them, in the working dtype: out += σ(more_lse - lse) (more - out), and
    lse is the logarithm of the sum of both sums, written so that nothing overflows (Liu et al., "Ring attention",
    2023).
    """
    xp = namespace(out)
    nothing = more_lse == -math.inf
    ahead = xp.where(nothing, more_lse.dtype.type(0), more_lse) - lse  # inf where no key was seen before
    ahead[nothing] = -math.inf
    small = xp.exp(-xp.abs(ahead))
    share = xp.where(ahead >= 0, small.dtype.type(1), small) / (1 + small)
    xp.maximum(lse, more_lse, out=lse)
    lse += xp.log1p(small)
    more -= out
    more *= share.transpose(0, 3, 1, 2)[..., None]
    out += more


def _try_attention(q: Block, k: Block, v: Block) -> tuple[Block, Block]:
    return forward(q[..., None, :], k, v, Visible(causal=True), 1 / math.sqrt(q.shape[-1]))[:2]


def _try_attention_grad(q: Block, k: Block, v: Block, d: Block) -> tuple[Block, ...]:
    q, d, scale = q[..., None, :], d[..., None, :], 1 / math.sqrt(q.shape[-1])
    out, lse, _ = forward(q, k, v, Visible(causal=True), scale)
    into = tuple(namespace(q).empty(block.shape, block.dtype) for block in (q, k, v))
    backward(d, q, k, v, out, lse, Visible(causal=True), scale, into)
    return into


def _try_merge(q: Block, k: Block, v: Block) -> Block:
    half, q = k.shape[1] // 2, q[..., None, :]
    (out, lse, _), (more, more_lse, _) = (
        forward(q, k[:, part], v[:, part], Visible(), 0.1, wide=True) for part in (slice(half), slice(half, None))
    )
    merge(out, lse, more, more_lse)
    return out.astype(q.dtype)


example("attention, causal", _try_attention, "q", "k", "v")
example("attention, gradient", _try_attention_grad, "q", "k", "v", "d")
example("attention, merged", _try_merge, "q", "k", "v")
