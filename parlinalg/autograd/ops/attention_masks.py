"""Masks of attention: causal, windows, documents, padding, pairs and blocks, cut to this rank's queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.backend.kernels.attention.visibility import TokenPositions, Visible
from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout

Documents = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | DistArray


class SequenceMask:
    """The keys that the queries of a whole sequence see, for this rank's part of the batch; cut with `visible`.

    Parameters
    ----------
    queries, keys : int
        s and t.
    positions : array of int, optional
        Shape [s]: the permutation in which the tokens lie.
    documents : array of int, optional
        On the host, numbers from 0, shape [batch here or 1, s].
    padding : array of bool, optional
        Shape [batch here, t].
    causal, window
        As of `ops.attention`.
    """

    def __init__(
        self, queries: int, keys: int, *, causal: bool, window: int | None, positions: np.ndarray | None,
        documents: np.ndarray | None, padding: Block,
    ) -> None:  # fmt: skip
        self.causal, self.window = causal, window
        self.natural = positions is None
        self.queries = np.arange(queries) if positions is None else positions
        self.keys = self.queries if queries == keys else np.arange(keys)
        self.documents, self.padding = documents, padding

    def visible(self, queries: range, keys: range) -> Visible:
        """Return which of these keys these queries see."""
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        documents = None if self.documents is None else (self.documents[:, rows], self.documents[:, columns])
        return Visible(
            causal=self.causal, window=self.window,
            places=(TokenPositions(self.queries[rows]), TokenPositions(self.keys[columns])),
            documents=documents, keep=() if self.padding is None else (self.padding[:, None, None, None, columns],),
        )  # fmt: skip


def checked_positions(positions: Any, queries: int, keys: int) -> np.ndarray | None:
    """Return the positions after checking that they permute those of the queries, which are also the keys."""
    if positions is None:
        return None
    at = np.asarray(positions)
    if at.shape != (queries,) or at.dtype.kind not in "iu" or queries != keys:
        raise ValueError(
            f"attention: positions are ints of shape [s] = {(queries,)}, of queries and keys alike (there are {keys}), "
            f"not {at.dtype} of shape {at.shape}"
        )
    seen = np.zeros(queries, np.bool_)
    seen[at[(at >= 0) & (at < queries)]] = True
    if not seen.all():
        raise ValueError(
            f"attention: positions are a permutation of 0 to {queries - 1}, the place of each token in the sequence; "
            f"{int(np.argmin(seen))} is not among them"
        )
    return at.astype(np.int64, copy=False)


def document_numbers(x: DistArray, documents: Documents | None, keys: int, positions: np.ndarray | None) -> Any:
    """Return the documents of all tokens of this rank's part of the batch, numbered from 0: [batch here or 1, s].

    Parameters
    ----------
    x : DistArray
        The queries: b and s are its first dims, and cut as documents may be.
    documents : sequence of int, sequence of such, array or DistArray, optional
        Lengths in the order of the positions, of all items of the batch or of each; or numbers [b, s] by token.
    """
    if documents is None:
        return None
    b, s = x.shape[:2]
    if s != keys:
        raise ValueError(f"attention: documents are of queries and keys alike, but there are {s} and {keys}")
    if isinstance(documents, DistArray):
        numbers = _distributed(x, documents)
    elif isinstance(documents, np.ndarray) and documents.ndim == 2:
        if documents.shape != (b, s):
            raise ValueError(f"attention: documents have shape {documents.shape}, not [b, s] = {(b, s)}")
        numbers = documents[_items(x)]
    else:
        numbers = _from_lengths(x, documents)
        if positions is not None:
            numbers = numbers[:, positions]
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"attention: documents are ints, not {numbers.dtype}")
    return _dense(numbers)


def _from_lengths(x: DistArray, lengths: Any) -> np.ndarray:
    b, s = x.shape[:2]
    each = isinstance(lengths, Sequence) and any(isinstance(n, Sequence | np.ndarray) for n in lengths)
    items = [np.asarray(n) for n in (lengths if each else [lengths])]
    if each and len(items) != b:
        raise ValueError(f"attention: lengths of documents of {len(items)} items, but there are {b}")
    for i, item in enumerate(items):
        if item.ndim != 1 or item.dtype.kind not in "iu" or (item < 0).any() or item.sum() != s:
            raise ValueError(
                f"attention: documents{f' of item {i}' if each else ''} have the lengths {item.tolist()}, which do not "
                f"add up to the {s} tokens of the sequence"
            )
    rows = items[_items(x)] if each else items
    numbers = [np.repeat(np.arange(len(item)), item) for item in rows]
    return np.stack(numbers) if numbers else np.zeros((0, s), np.int64)


def _items(x: DistArray) -> slice:
    """Return this rank's part of the batch."""
    here = x.grid.block(Layout(*x.layout.dims), x.shape)[0]
    return slice(here.start, here.stop)


def _distributed(x: DistArray, documents: DistArray) -> np.ndarray:
    whole = whole_sequence(x, documents, "documents")
    block: np.ndarray = x.grid.backend.to_host(whole.block)
    return block if x.grid.effective(whole.layout).dims[0] or not x.layout.dims[0] else block[_items(x)]


def whole_sequence(x: DistArray, array: DistArray, name: str) -> DistArray:
    """Return an array [b, s], each dim of which is whole or cut as that of the queries x, with s whole."""
    grid = x.grid
    if array.ndim != 2 or array.shape[0] != x.shape[0]:
        raise ValueError(f"attention: {name} has shape {array.shape}, not [b, s] = {x.shape[:2]}")
    have, want = grid.effective(array.layout), grid.effective(x.layout)
    if have.partial or any(h not in ((), w) for h, w in zip(have.dims, want.dims[:2], strict=True)):
        raise LayoutError(
            f"attention: {name} is {array.layout!r}, and q is {x.layout!r}; each dim must be whole or cut as that of "
            f"q: mend it by .redistribute({Layout(*x.layout.dims[:2])!r})"
        )
    return array.redistribute(Layout(array.layout.dims[0], None)) if have.dims[1] else array


def _dense(numbers: np.ndarray) -> np.ndarray:
    """Return the same documents numbered from 0, without great gaps."""
    if not numbers.size:
        return numbers.astype(np.int64)
    least = numbers.min()
    if numbers.max() - least < 4 * numbers.size:
        return (numbers - least).astype(np.int64)
    return np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)


Block = Any
Mask = np.ndarray | DistArray


@dataclass(frozen=True)
class BlockMask:
    """Blocks of queries and keys that are seen; the others are skipped, and cost nothing.  A `mask` of attention.

    Parameters
    ----------
    table : array of bool
        Shape [n, m], or [heads, n, m] where heads differ: entry i, j says whether queries `size` i and following see
        keys `size` j and following.  On every rank alike.
    size : int
        Queries and keys of a block.

    Examples
    --------
    >>> local = BlockMask(np.eye(4, dtype=bool), 16)  # 64 queries, each sees the 16 keys of its own block
    """

    table: np.ndarray
    size: int

    def __post_init__(self) -> None:
        table = np.asarray(self.table)
        if table.dtype != np.bool_ or table.ndim not in (2, 3) or self.size < 1:
            raise ValueError(
                f"a BlockMask takes bools of shape [n, m] or [heads, n, m] and a size of at least 1, not {table.dtype} "
                f"of shape {table.shape} and {self.size}"
            )
        object.__setattr__(self, "table", table)


def visible(
    x: DistArray, shape: tuple[int, ...], keys: int, *, causal: bool, window: int | None, start: int,
    mask: Mask | BlockMask | None, key_padding: Mask | None, documents: Documents | None,
    positions: np.ndarray | None,
) -> tuple[Callable[..., Visible], tuple[Block, ...]]:  # fmt: skip
    """Return what makes of arrays a description of the keys that this rank's queries see, and these arrays.

    The arrays are saved for the backward pass; the function holds none.

    Parameters
    ----------
    x : DistArray
        The queries, cut as the result.
    shape : tuple of int
        The shape of the result: (b, s, kv heads, g, e).
    keys : int
        t.
    """
    check_window(window)
    if positions is not None and (isinstance(mask, BlockMask) or start):
        raise ValueError("attention: positions go with neither a BlockMask nor a start, which count places")
    keep: tuple[Block, ...] = ()
    if key_padding is not None:
        keep = (padding(x, key_padding, keys)[:, None, None, None, :],)
    table, size = None, 0
    if isinstance(mask, BlockMask):
        table, size = _table(x, mask, shape, keys), mask.size
    elif mask is not None:
        keep = (_pairs(x, mask, shape, keys), *keep)
    numbers = document_numbers(x, documents, keys, positions)

    def seen(positions: Block, numbers: Block, table: Block, *keep: Block) -> Visible:
        places = None if positions is None else TokenPositions(positions)
        return Visible(
            causal=causal, window=window, start=start, table=table, size=size, keep=keep,
            places=None if places is None else (places, places),
            documents=None if numbers is None else (numbers, numbers),
        )  # fmt: skip

    return seen, (positions, numbers, table, *keep)


def check_window(window: Any) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, Integral) or window < 1):
        raise ValueError(
            f"attention's window is a whole number of at least 1 (the query's own position), not {window!r}"
        )


def padding(x: DistArray, key_padding: Mask, keys: int) -> Block:
    """Return the keys that are real in this rank's part of the batch: bools [batch here, t]."""
    full = (x.shape[0], keys)
    _is_array(key_padding, "key_padding", "[b, t]")
    if tuple(key_padding.shape) != full:
        raise ValueError(f"attention: key_padding has shape {tuple(key_padding.shape)}, not [b, t] = {full}")
    return _part(x, key_padding, (x.layout.dims[0], ()), full, "key_padding")


def _pairs(x: DistArray, mask: Mask, shape: tuple[int, ...], keys: int) -> Block:
    """Return a mask of [b, heads, s, t] as this rank's part of [b, kv heads, g, s, t]."""
    _is_array(mask, "mask", "[b, heads, s, t], or a BlockMask")
    b, s, heads, g, _ = shape
    full, given = (b, heads * g, s, keys), tuple(mask.shape)
    if len(given) > 4 or any(n not in (1, f) for n, f in zip(given[::-1], full[::-1])):
        raise ValueError(
            f"attention: the mask has shape {given}, which does not broadcast to [b, heads, s, t] = {full}"
        )
    if isinstance(mask, DistArray) and mask.ndim != 4:
        raise ValueError(f"attention: a distributed mask has 4 dims, [b, heads, s, t], not the shape {given}")
    cuts = (x.layout.dims[0], x.layout.dims[2] if g == 1 else (), (), ())
    if isinstance(mask, np.ndarray):
        mask = _once(mask.reshape((1,) * (4 - len(given)) + given))
    block = _part(x, mask, cuts, full, "mask")
    if g == 1 or mask.shape[1] == 1:
        return block[:, :, None]
    here = x.grid.block(Layout(*x.layout.dims), (*x.shape[:3], g, x.shape[4]))
    apart = block.reshape((block.shape[0], heads, g, *block.shape[2:]))
    return apart[:, here[2].start : here[2].stop, here[3].start : here[3].stop]


def _is_array(given: Any, name: str, dims: str) -> None:
    if not isinstance(given, np.ndarray | DistArray):
        raise TypeError(
            f"attention: the {name} is an array or DistArray of bools, {dims}, not a {type(given).__name__}"
        )


def _once(mask: np.ndarray) -> np.ndarray:
    """Return a mask with dims of size 1 where it is repeated, as by `np.broadcast_to`."""
    return mask[tuple(slice(None) if step or n <= 1 else slice(1) for step, n in zip(mask.strides, mask.shape))]


def _part(x: DistArray, mask: Mask, cuts: tuple[Cut, ...], full: tuple[int, ...], name: str) -> Block:
    """Return this rank's part of a mask that is to be cut so; dims of size 1 that stand for more stay whole."""
    if mask.dtype != np.bool_:
        raise TypeError(f"attention: {name} has bools, True where a key is seen, not {mask.dtype}")
    grid = x.grid
    sizes = zip(cuts, mask.shape, full, strict=True)
    want = grid.effective(Layout(*(c if n == whole else () for c, n, whole in sizes)))
    have = Layout.replicated(len(cuts))
    if isinstance(mask, DistArray):
        have = grid.effective(mask.layout)
        if have.partial or any(h not in ((), w) for h, w in zip(have.dims, want.dims, strict=True)):
            raise LayoutError(
                f"attention: the {name} is {mask.layout!r}, and q is {x.layout!r}; each dim must be whole or cut as "
                f"that of q: mend it by .redistribute({Layout(*want.dims)!r})"
            )
    lacking = Layout(*(() if h else w for h, w in zip(have.dims, want.dims, strict=True)))
    part = tuple(slice(r.start, r.stop) for r in grid.block(lacking, mask.shape))
    if isinstance(mask, DistArray):
        return mask.block[tuple(slice(None) if h else p for h, p in zip(have.dims, part, strict=True))]
    return grid.backend.from_host(mask[part])


def _table(x: DistArray, mask: BlockMask, shape: tuple[int, ...], keys: int) -> np.ndarray:
    """Return a table of blocks as this rank's part of [kv heads, g, n, m]."""
    _, s, heads, g, _ = shape
    table = mask.table if mask.table.ndim == 3 else mask.table[None]
    want = (-(-s // mask.size), -(-keys // mask.size))
    if table.shape[1:] != want or table.shape[0] not in (1, heads * g):
        raise ValueError(
            f"attention: a BlockMask of {s} queries and {keys} keys in blocks of {mask.size} has a table of shape "
            f"{want}, or {(heads * g, *want)} by head, not {mask.table.shape}"
        )
    if table.shape[0] == 1:
        return table[None]
    here = x.grid.block(Layout(*x.layout.dims), (*x.shape[:3], g, x.shape[4]))
    return table.reshape(heads, g, *want)[here[2].start : here[2].stop, here[3].start : here[3].stop]
