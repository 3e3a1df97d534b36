"""What is known of the tokens of a sequence: their positions, documents, and which are padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import effective
from parlinalg.backend.visible import TokenPositions, Visible
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout

Block = Any
Documents = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | DistArray


class Tokens:
    """The queries and keys of a sequence, whole on every rank but for the batch.

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
        """Which of these keys these queries see."""
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        documents = None if self.documents is None else (self.documents[:, rows], self.documents[:, columns])
        return Visible(
            causal=self.causal, window=self.window,
            places=(TokenPositions(self.queries[rows]), TokenPositions(self.keys[columns])),
            documents=documents, keep=() if self.padding is None else (self.padding[:, None, None, None, columns],),
        )  # fmt: skip


def checked_positions(positions: Any, queries: int, keys: int) -> np.ndarray | None:
    """The positions, once they are a permutation of those of the queries, which are also the keys."""
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
    """The documents of all tokens of this rank's part of the batch, numbered from 0: [batch here or 1, s].

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
    """This rank's part of the batch."""
    here = x.grid.block(Layout(*x.layout.dims), x.shape)[0]
    return slice(here.start, here.stop)


def _distributed(x: DistArray, documents: DistArray) -> np.ndarray:
    whole = whole_sequence(x, documents, "documents")
    block: np.ndarray = x.grid.backend.to_host(whole.block)
    return block if effective(whole.layout, x.grid).dims[0] or not x.layout.dims[0] else block[_items(x)]


def whole_sequence(x: DistArray, array: DistArray, name: str) -> DistArray:
    """An array [b, s], each dim of which is whole or cut as that of the queries x, with s whole."""
    grid = x.grid
    if array.ndim != 2 or array.shape[0] != x.shape[0]:
        raise ValueError(f"attention: {name} has shape {array.shape}, not [b, s] = {x.shape[:2]}")
    have, want = effective(array.layout, grid), effective(x.layout, grid)
    if have.partial or any(h not in ((), w) for h, w in zip(have.dims, want.dims[:2], strict=True)):
        raise LayoutError(
            f"attention: {name} is {array.layout!r}, and q is {x.layout!r}; each dim is whole or cut as that of q: "
            f"mend it by .redistribute({Layout(*x.layout.dims[:2])!r})"
        )
    return array.redistribute(Layout(array.layout.dims[0], None)) if have.dims[1] else array


def _dense(numbers: np.ndarray) -> np.ndarray:
    """The same documents numbered from 0, without great gaps."""
    if not numbers.size:
        return numbers.astype(np.int64)
    least = numbers.min()
    if numbers.max() - least < 4 * numbers.size:
        return (numbers - least).astype(np.int64)
    return np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)
