"""Attention: its heads and its batch may be cut, its sequence is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from parlinalg.array import DistArray
from parlinalg.array.core import same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.ops.attention_masks import BlockMask, Documents, Mask, checked_positions, visible
from parlinalg.autograd.ops.product import nothing
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tape import recording
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import namespace
from parlinalg.backend.kernels import attention as kernel
from parlinalg.backend.kernels.attention import Dropped
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout
from parlinalg.random import Indices

Block = Any
Drop = Callable[[tuple[int, ...], tuple[Indices, ...]], Block]


class Parts(NamedTuple):
    """Queries [batch, queries, kv heads, g, e], and keys and values [batch, keys, kv heads, e]; views."""

    q: Block
    k: Block
    v: Block

    @staticmethod
    def of(q: Block, kv: Block | None) -> Parts:
        """Return the parts of one packed block, or of two."""
        if kv is None:
            return Parts(q[..., :-2, :], q[..., -2, :], q[..., -1, :])
        return Parts(q, kv[..., 0, :], kv[..., 1, :])


def attention(
    q: Any, kv: Any = None, *, causal: bool = False, window: int | None = None, mask: Mask | BlockMask | None = None,
    key_padding: Mask | None = None, documents: Documents | None = None, positions: Any = None, start: int = 0,
    scale: float | None = None, dropout: Drop | None = None, keep_scores: bool = False,
) -> Tensor:  # fmt: skip
    """Return softmax(scale q kᵀ) v, head by head (Vaswani et al., "Attention is all you need", 2017).

    Parameters
    ----------
    q : Tensor
        Queries, keys and values of all heads, packed: shape [b, s, kv heads, g + 2, e], where each head has g queries,
        then its key, then its value (g = 1: multi-head attention; else grouped queries, Ainslie et al., 2023).  With
        `kv`, the queries alone: [b, s, kv heads, g, e].
    kv : Tensor, optional
        Keys and values, [b, t, kv heads, 2, e].
    causal : bool
        A query sees no key after its own position.
    window : int, optional
        It sees only keys less than so many positions away from its own.
    mask : array of bool or BlockMask, optional
        Which pairs are seen, broadcastable to [b, heads, s, t] with heads = kv heads × g: a NumPy array that all ranks
        have alike, or a DistArray whose dims are each whole or cut as those of q.
    key_padding : array of bool, optional
        Shape [b, t]: which keys are real, and seen; otherwise as `mask`.
    documents : optional
        Where several documents are packed into a sequence, which is whose: no query sees a key of another one.  Their
        lengths, for all items of the batch or a list of them for each; or their numbers [b, s] by token, as an array
        that all ranks have alike or a DistArray whose dims are each whole or cut as those of q.
    positions : array of int, optional
        Shape [s], a permutation: the place in the sequence of each token, where they lie in another order (see
        `parlinalg.sequence_order`).  `causal`, `window`, the lengths of documents, and dropout go by it.
    start : int
        The position of the first query among the keys.
    scale : float, optional
        By default 1/√e.
    dropout : callable, optional
        Draws what probabilities are multiplied by; `parlinalg.nn.Attention` makes it.
    keep_scores : bool
        Keep the probabilities for the backward pass, in place of computing them again in it.  Alone the two passes are
        a fifth faster so; within a training step what they gain is lost again on memory.

    Returns
    -------
    Tensor
        Shape [b, s, kv heads, g, e].  Queries that see no key give zeros.

    Raises
    ------
    LayoutError
        If a dim other than the batch and the heads is cut; the message names the `redistribute` that mends it.  The g
        queries of a head may be cut by axes that do not cut its key and value: the gradient of `kv` is partial over
        them.

    Not more than one block of scores of a few heads is held at a time.
    """
    q = as_tensor(q)
    inputs = [q] if kv is None else [q, as_tensor(kv)]
    x = summed(q.data, "attention")
    y = None if kv is None else summed(inputs[1].data, "attention")
    grid, group = checked(x, y, "attention")
    shape = (*x.shape[:3], group, x.shape[4])
    keys = x.shape[1] if y is None else y.shape[1]
    rest = Layout(*x.layout.dims)
    if not grid.inside:
        empty = DistArray(grid.backend.zeros((0,) * 5, x.dtype), shape, rest, grid)
        return record("attention", empty, inputs, [nothing(t) for t in inputs])
    at = checked_positions(positions, shape[1], keys)
    seen, masks = visible(
        x, shape, keys, causal=causal, window=window, start=start, mask=mask, key_padding=key_padding,
        documents=documents, positions=at,
    )  # fmt: skip
    factor = (x.shape[4] ** -0.5 if x.shape[4] else 1.0) if scale is None else float(scale)
    blocks = x.block, None if y is None else y.block
    here = grid.block(rest, shape)

    def drop(at: Block) -> Dropped | None:
        return None if dropout is None else dropped(dropout, (*shape, keys), here, at)

    keep = keep_scores and recording() and any(t.requires_grad for t in inputs)
    out, lse, scores = kernel.forward(*Parts.of(*blocks), seen(*masks), factor, drop(at), keep=keep)

    def prepare(
        g: Block, q: Block, kv: Block, out: Block, lse: Block, scores: Block, at: Block, *masks: Block
    ) -> list[Block]:
        grads = [namespace(q).empty(b.shape, q.dtype) for b in (q, kv) if b is not None]
        into = Parts.of(grads[0], None if kv is None else grads[1])
        kernel.backward(g, *Parts.of(q, kv), out, lse, seen(*masks), factor, into, drop(at), kept=scores)
        return grads

    kept = Part(prepare, *blocks, out, lse, scores, at, *masks)
    return record("attention", DistArray(out, shape, rest, grid), inputs, parts_of(inputs), kept)


def parts_of(inputs: list[Tensor]) -> list[Part]:
    """Return the parts of the rule of q, and of kv if there is one, where the gradients of both are prepared."""
    grid, queries = inputs[0].grid, inputs[0].layout
    split = tuple(a for a in queries.dims[3] if grid.sizes[a] > 1)
    layouts = [x.layout.with_partial(split if i else ()) for i, x in enumerate(inputs)]
    return [Part(lambda grads, i=i, rest=rest: (grads[i], rest)) for i, rest in enumerate(layouts)]


def checked(x: DistArray, y: DistArray | None, name: str, ring: Cut = ()) -> tuple[Grid, int]:
    """Return the grid, and how many queries share a key; errors unless shapes and layouts are as attention takes them.

    The sequence is cut by `ring`.
    """
    arrays = [x] if y is None else [x, y]
    grid = same_grid(arrays)
    form = "q[b, s, kv heads, g + 2, e]" if y is None else "q[b, s, kv heads, g, e] and kv[b, t, kv heads, 2, e]"
    shapes = " and ".join(str(a.shape) for a in arrays)
    least = 3 if y is None else 1
    if x.ndim != 5 or x.shape[3] < least or (y is not None and (y.ndim != 5 or y.shape[3] != 2)):
        raise ValueError(f"{name} takes {form}, not {shapes}")
    if y is not None and (x.shape[0], x.shape[2], x.shape[4]) != (y.shape[0], y.shape[2], y.shape[4]):
        raise ValueError(f"{name} takes {form}: b, kv heads and e are equal in both; the shapes are {shapes}")
    group = x.shape[3] - 2 if y is None else x.shape[3]
    b, _, heads, g, _ = (tuple(a for a in cut if a not in ring) for cut in grid.effective(x.layout).dims)
    want = Layout(b, ring, heads, None if y is None else g, None)
    for what, array, right in (("q", x, want), ("kv", y, Layout(b, ring, heads, None, None))):
        if array is not None and grid.effective(array.layout) != right:
            also = f"the sequence by {ring[0]!r}, and else " if ring else ""
            raise LayoutError(
                f"{name}: {what} of shape {array.shape} is {array.layout!r}; {also}only the batch and the heads are "
                f"cut, alike in q and kv{', and the queries of a head' if y is not None else ''}: mend it by "
                f".redistribute({_mended(array.layout, right)!r})"
            )
    return grid, group


def _mended(have: Layout, right: Layout) -> Layout:
    """Return a layout that attention takes: axes that cut the sequence cut the heads instead."""
    lost: Cut = tuple(a for a in have.dims[1] if a not in right.axes)
    return right.with_dim(2, (*right.dims[2], *lost))


def dropped(
    draw: Drop, shape: tuple[int, ...], ranges: tuple[range, ...], positions: Any = None, first: int = 0
) -> Dropped:
    """Return the factors of the probabilities of a block, from those of global indices [b, heads, s, t].

    Parameters
    ----------
    draw : callable
        From a global shape [b, kv heads, g, s, t] and the indices of a part of it, the part's factors; with positions
        those of queries and keys are arrays, else ranges.
    shape : tuple of int
        (b, s, kv heads, g, e, t).
    ranges : tuple of range
        Those of this rank's block of [b, s, kv heads, g, e].
    positions : array of int, optional
        Where all tokens stand: what the factors of queries and keys go by.
    first : int
        The first of the keys.
    """
    b, s, heads, g, _, t = shape

    def factors(batch: slice, kv: slice, rows: slice, keys: slice) -> Block:
        tokens = ranges[1][rows], range(first + keys.start, first + keys.stop)
        places: tuple[Indices, ...] = tokens
        if positions is not None:
            places = tuple(positions[r.start : r.stop] for r in tokens)
        return draw((b, heads, g, s, t), (ranges[0][batch], ranges[2][kv], ranges[3], *places))

    return factors
