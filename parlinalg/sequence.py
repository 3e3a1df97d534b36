"""Orders and positions of the tokens of a sequence, and the documents packed into it.

Query i of a causal sequence meets i + 1 keys, so that the last of P contiguous blocks has 2P - 1 times the work of the
first.  Other orders give every rank early and late tokens (`sequence_order`); within `sequence_positions` models take
them into account.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.layout import pieces

ORDERS = ("contiguous", "striped", "zigzag")


def sequence_order(length: int, ranks: int, name: str = "zigzag") -> np.ndarray:
    """Return the permutation of the tokens whose balanced pieces are the ranks' blocks.

    Parameters
    ----------
    length : int
        The tokens of the sequence; any number, also fewer than there are ranks.
    ranks : int
        Over how many the sequence is cut.
    name : {"contiguous", "striped", "zigzag"}
        "contiguous": as they come.  "striped": token i on rank i mod P (Brandon et al., "Striped attention", 2023).
        "zigzag": of 2P parts, rank r holds r and 2P - 1 - r.

    Returns
    -------
    array of int64
        Shape [length]: the position in the sequence of each token of the permuted one, `permuted = tokens[order]`; what
        `ops.attention` and `ops.ring_attention` take as `positions`.  `np.argsort(order)` brings the tokens back.

    Raises
    ------
    ConfigError
        If there is no such order.

    Examples
    --------
    >>> sequence_order(8, 2, "striped")
    array([0, 2, 4, 6, 1, 3, 5, 7])
    >>> sequence_order(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if length < 0 or ranks < 1:
        raise ConfigError(f"a sequence of {length} tokens over {ranks} ranks: at least 0 tokens and 1 rank are needed")
    if name == "contiguous":
        return np.arange(length, dtype=np.int64)
    if name == "striped":
        return np.concatenate([np.arange(r, length, ranks, dtype=np.int64) for r in range(ranks)])
    if name == "zigzag":
        return _zigzag(length, ranks)
    raise ConfigError(f"there is no order {name!r} of a sequence; the orders are {', '.join(map(repr, ORDERS))}")


def _zigzag(length: int, ranks: int) -> np.ndarray:
    blocks = pieces(length, ranks)
    late = [n // 2 for n in blocks]
    early = [n - m for n, m in zip(blocks, late, strict=True)]
    parts = np.split(np.arange(length, dtype=np.int64), np.cumsum(early + late[::-1])[:-1])
    return np.concatenate([part for r in range(ranks) for part in (parts[r], parts[-1 - r])])


@dataclass(frozen=True)
class BatchPositions:
    """The positions in their sequences, and the documents, of a batch's tokens; host arrays, the same on every rank.

    Attributes
    ----------
    positions : array of int, optional
        [sequence]: the place of each token in its sequence, where the tokens lie in another order.
    documents : array of int, optional
        [batch, sequence]: the number of the document that each belongs to, where several are packed into one sequence.
    """

    positions: np.ndarray | None = None
    documents: np.ndarray | None = None

    @property
    def arrays(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The arrays of which it is made, which recomputation saves."""
        return self.positions, self.documents

    @property
    def natural(self) -> bool:
        """True if the tokens lie in the order of their sequence, and that is one document."""
        return self.positions is None and self.documents is None

    def within(self, length: int, start: int = 0) -> np.ndarray | None:
        """Return the position of each of `length` tokens in its document.

        Shape [sequence], or [batch, sequence] with documents; None where they simply count up from `start`.
        """
        self.check(length)
        if self.documents is None:
            return None if self.positions is None else self.positions + start
        return within_documents(self.documents, self.positions)

    def check(self, length: int, batch: int | None = None) -> None:
        """Raise a ConfigError unless these are the tokens of such a batch."""
        for name, given in (("positions", self.positions), ("documents", self.documents)):
            if given is not None and given.shape[-1] != length:
                raise ConfigError(
                    f"sequence_positions: {given.shape[-1]} {name} are given for a sequence of {length} tokens; give "
                    "one a token, and call the model on that sequence within it"
                )
        if batch is not None and self.documents is not None and len(self.documents) != batch:
            raise ConfigError(
                f"sequence_positions: documents of {len(self.documents)} sequences are given for a batch of {batch}"
            )


_positions: ContextVar[BatchPositions | None] = ContextVar("token_positions", default=None)


def token_positions() -> BatchPositions:
    """Return the positions and documents of the tokens of the current batch."""
    return _positions.get() or BatchPositions()


@contextmanager
def using_positions(given: BatchPositions | None) -> Iterator[None]:
    """Within this context tokens have these positions and documents."""
    token = _positions.set(given)
    try:
        yield
    finally:
        _positions.reset(token)


@contextmanager
def sequence_positions(
    positions: np.ndarray | None = None, documents: np.ndarray | None = None
) -> Iterator[BatchPositions]:
    """Within this context models are called on tokens in another order than their sequence's, or on packed documents.

    Learned and rotary positions, causal masks, windows and dropout go by where the tokens come from, so that the values
    are those of the tokens in their order.  What is computed again in the backward pass sees what the first pass saw.

    Parameters
    ----------
    positions : array of int, optional
        A permutation of 0 to sequence - 1, such as `parlinalg.sequence_order` gives: token i of the batch is token
        `positions[i]` of its sequence.  By default the tokens lie in their order.
    documents : array of int, optional
        [batch, sequence]: the number of the document of each token as it lies.  A document is a run of the sequence;
        its tokens see each other only, and its learned positions count from 0.

    Both are host arrays, the same on every rank.

    Raises
    ------
    ConfigError
        If they are no such arrays.

    Examples
    --------
    >>> with sequence_positions(np.array([0, 3, 1, 2])) as tokens:
    ...     tokens.within(4)
    array([0, 3, 1, 2])
    """
    if positions is not None:
        positions = np.asarray(positions)
        if positions.ndim != 1 or not np.array_equal(np.sort(positions), np.arange(positions.size)):
            raise ConfigError(
                f"sequence_positions: positions of shape {positions.shape} are no permutation of 0 to length - 1; "
                "parlinalg.sequence_order makes one"
            )
    if documents is not None:
        documents = np.asarray(documents)
        if documents.ndim != 2 or documents.dtype.kind not in "iu":
            raise ConfigError(
                f"sequence_positions: documents are integers of shape [batch, sequence], not {documents.dtype} of "
                f"shape {documents.shape}"
            )
    found = BatchPositions(positions, documents)
    if positions is not None:
        found.check(positions.size)
    with using_positions(found):
        yield found


def positions_of(batch: Any) -> AbstractContextManager[BatchPositions]:
    """Return the context of `sequence_positions` for a batch; where it says nothing of its tokens they lie in order."""
    return sequence_positions(getattr(batch, "positions", None), getattr(batch, "documents", None))


def within_documents(documents: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    """Return the position of every token in its document; both are [batch, sequence], and a document is a run.

    >>> within_documents(np.array([[3, 3, 5, 5, 5]]))
    array([[0, 1, 0, 1, 2]])
    """
    batch, length = documents.shape
    order = np.arange(length) if positions is None else np.argsort(positions)
    lined = documents[:, order]
    first = np.ones((batch, length), np.bool_)
    first[:, 1:] = lined[:, 1:] != lined[:, :-1]
    here = np.arange(length)
    found = np.empty((batch, length), np.int64)
    found[:, order] = here - np.maximum.accumulate(np.where(first, here, 0), axis=1)
    return found
