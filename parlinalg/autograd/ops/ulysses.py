"""Keys and values where ranks, not heads of keys, are many: each rank takes those that its queries meet."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from parlinalg.array import DistArray
from parlinalg.array.reductions import summed
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import Backend
from parlinalg.comm import Comm
from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout, cut_lengths, index_of, span

Block = Any


class _Shares(NamedTuple):
    """Who has which tokens, and who needs which heads, of the ranks over which heads are exchanged.

    Attributes
    ----------
    tokens, heads : list of slice
        Of every rank: its tokens before, and the local heads of keys it takes.
    takes : list of int
        For each of this rank's queries the head of keys it meets, among those taken.
    """

    comm: Comm
    backend: Backend
    rank: int
    tokens: list[slice]
    heads: list[slice]
    takes: list[int]

    def exchange(self, parts: list[Block], shapes: list[tuple[int, ...]]) -> list[Block]:
        """Send a part to every rank, and receive one of each shape."""
        xp, dtype = self.backend.xp, parts[0].dtype
        counts = [_size(shape) for shape in shapes]
        send = xp.concatenate([part.reshape(-1) for part in parts])
        recv = xp.empty(sum(counts), dtype)
        self.comm.all_to_all(send, [part.size for part in parts], recv, counts)
        ends = list(accumulate(counts))
        return [
            recv[end - n : end].reshape(shape) for end, n, shape in zip(ends, counts, shapes, strict=True)
        ]  # fmt: skip


def share_heads(kv: Any, group: int, axes: Cut) -> Tensor:
    """Return keys and values cut along the sequence, as the queries of whole sequences meet them.

    Their heads come once a query.

    The cut of the sequence by `axes` is exchanged for one of the heads of the queries, `group` to a head of keys; a
    rank receives the heads of keys that its queries meet, each once (grouped queries of Ainslie et al., GQA, 2023,
    under the exchange of Jacobs et al., DeepSpeed-Ulysses, 2023).

    Parameters
    ----------
    kv : Tensor
        Shape [b, s, kv heads, 2, e]; s is cut by `axes` innermost.
    group : int
    axes : tuple of str

    Returns
    -------
    Tensor
        Shape [b, s, kv heads × group, 2, e]: the heads cut by `axes` innermost, s no longer.

    Raises
    ------
    LayoutError
        If `axes` do not cut the sequence innermost, or the pieces of the heads of keys are no pieces of the heads.

    On P ranks each of which meets r heads of keys, one receives 2 r e N (1 - 1/P) words of a sequence of N tokens, and
    in the backward pass as many: as much as if there were r P heads of keys.
    """
    kv = as_tensor(kv)
    x = summed(kv.data, "share_heads")
    grid, rest = x.grid, x.layout
    b, s, heads, two, e = grid.effective(rest).dims
    axes = tuple(a for a in axes if grid.sizes[a] > 1)
    outer = s[: len(s) - len(axes)]
    shape = (*x.shape[:2], x.shape[2] * group, *x.shape[3:])
    layout = Layout(b, outer, heads + axes, two, e)
    whole = [n * group for n in cut_lengths(x.shape[2], heads, grid.sizes)]
    if s[len(outer) :] != axes or whole != cut_lengths(shape[2], heads, grid.sizes):
        raise LayoutError(
            f"share_heads: kv of shape {x.shape} is {rest!r}; its sequence is cut by {axes} innermost, and its heads "
            f"so that {group} times each piece is a piece of {shape[2]} heads"
        )
    if not grid.inside:
        return record("share_heads", DistArray(x.block, shape, layout, grid), [kv], [lambda g: (g, rest)])
    length = len(span(x.shape[1], outer, grid.sizes, grid.coords))
    shares = _shares(x, axes, length, group)
    batch, here, local, *last = x.block.shape
    mine = shares.heads[shares.rank]
    taken = mine.stop - mine.start
    found = shares.exchange(
        [x.block[:, :, part] for part in shares.heads],
        [(batch, t.stop - t.start, taken, *last) for t in shares.tokens],
    )
    xp = grid.backend.xp
    y = xp.take(xp.concatenate(found, axis=1), xp.asarray(shares.takes, dtype=int), axis=2)

    def part(g: Block) -> tuple[Block, Layout]:
        sums = xp.zeros((batch, length, taken, *last), g.dtype)
        for query, head in enumerate(shares.takes):
            sums[:, :, head] += g[:, :, query]
        back = shares.exchange(
            [sums[:, part] for part in shares.tokens],
            [(batch, here, part.stop - part.start, *last) for part in shares.heads],
        )
        d = xp.zeros((batch, here, local, *last), g.dtype)
        for heads_of, term in zip(shares.heads, back, strict=True):
            d[:, :, heads_of] += term
        return d, rest.with_partial(())

    return record("share_heads", DistArray(y, shape, layout, grid), [kv], [part])


def _shares(x: DistArray, axes: Cut, length: int, group: int) -> _Shares:
    grid = x.grid
    tokens = _slices(cut_lengths(length, axes, grid.sizes))
    queries = _slices(cut_lengths(x.block.shape[2] * group, axes, grid.sizes))
    heads = [slice(q.start // group, max(q.start // group, -(-q.stop // group))) for q in queries]
    heads = [h if q.stop > q.start else slice(0, 0) for h, q in zip(heads, queries, strict=True)]
    rank = index_of(axes, grid.sizes, grid.coords)
    mine = queries[rank]
    takes = [q // group - heads[rank].start for q in range(mine.start, mine.stop)]
    return _Shares(grid.comm(axes), grid.backend, rank, tokens, heads, takes)


def _slices(lengths: list[int]) -> list[slice]:
    ends = list(accumulate(lengths))
    return [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def narrow(x: Any, dim: int, start: int, stop: int) -> Tensor:
    """Return a view of items `start` to `stop - 1` of a whole dim."""
    x = as_tensor(x)
    data = summed(x.data, "narrow")
    if data.grid.effective(data.layout).dims[dim]:
        right = data.layout.with_dim(dim, None)
        raise LayoutError(
            f"narrow: dim {dim} of {data.layout!r} is cut; it must be whole: mend it by .redistribute({right!r})"
        )
    rest, where = data.layout, (slice(None),) * (dim % data.ndim) + (slice(start, stop),)
    shape = (*data.shape[:dim], stop - start, *data.shape[dim + 1 :])
    inside, local, zeros = data.grid.inside, data.block.shape, data.grid.backend.zeros

    def part(g: Block) -> tuple[Block, Layout]:
        d = zeros(local, g.dtype)
        if inside:
            d[where] = g
        return d, rest

    return record("narrow", data.like(data.block[where] if inside else data.block, shape=shape), [x], [part])
