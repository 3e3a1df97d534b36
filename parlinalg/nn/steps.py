"""Where training is, for layers that draw random numbers; and where the tokens of a batch come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from parlinalg.errors import ConfigError


@dataclass
class Draws:
    """What random numbers depend on beside a layer's name and an element's index.

    Attributes
    ----------
    step : int
        The training step.
    start : int
        Where in the step's batch the rows of this microbatch begin.
    calls : Counter
        How often each layer has drawn already, by name.  A recomputation starts from a copy of what it was.
    """

    step: int = 0
    start: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def call(self, name: str) -> int:
        """The number of this call of the layer, from 0."""
        self.calls[name] += 1
        return self.calls[name] - 1

    def copy(self) -> Draws:
        return Draws(self.step, self.start, Counter(self.calls))


_current: ContextVar[Draws | None] = ContextVar("draws", default=None)


def current() -> Draws | None:
    """The draws of the training step under way, if one is."""
    return _current.get()


@contextmanager
def drawing(draws: Draws | None) -> Iterator[None]:
    """Within it layers draw from these; None: each from its own, as outside of any training step."""
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def training_step(step: int, start: int = 0) -> Iterator[Draws]:
    """Within it dropout depends on the step's number, and on nothing that came before it.

    Parameters
    ----------
    step : int
    start : int
        Where in the step's batch the rows of this forward pass begin: a microbatch drops what the whole batch would.

    Without it every call of a layer draws anew, and a run that is resumed does not repeat another.
    """
    draws = Draws(step, start)
    with drawing(draws):
        yield draws


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of a batch come from; host arrays, the same on every rank.

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
    def natural(self) -> bool:
        """Whether the tokens lie in the order of their sequence, which is one document."""
        return self.positions is None and self.documents is None

    def within(self, length: int, start: int = 0) -> np.ndarray | None:
        """The place in its document of each of `length` tokens, as they lie: [sequence], or [batch, sequence] where
        documents are packed; None where they simply count up from `start`."""
        self.check(length)
        if self.documents is None:
            return None if self.positions is None else self.positions + start
        return within_documents(self.documents, self.positions)

    def check(self, length: int, batch: int | None = None) -> None:
        """Raise unless these are the tokens of such a batch."""
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


_tokens: ContextVar[Tokens | None] = ContextVar("tokens", default=None)


def tokens() -> Tokens:
    """Where the tokens of the batch under way come from."""
    return _tokens.get() or Tokens()


@contextmanager
def placing(given: Tokens | None) -> Iterator[None]:
    """Within it the tokens come from there."""
    token = _tokens.set(given)
    try:
        yield
    finally:
        _tokens.reset(token)


@contextmanager
def sequence_positions(positions: np.ndarray | None = None, documents: np.ndarray | None = None) -> Iterator[Tokens]:
    """Within it models are called on tokens that do not lie in the order of their sequence, or on packed documents.

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
    found = Tokens(positions, documents)
    if positions is not None:
        found.check(positions.size)
    with placing(found):
        yield found


def within_documents(documents: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    """The place of every token in its document, a run of its sequence; both [batch, sequence], as the tokens lie.

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
