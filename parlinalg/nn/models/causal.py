"""Language models that tell the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor, ops
from parlinalg.grid import Grid
from parlinalg.nn.block import TransformerBlock
from parlinalg.nn.cache import KeyValueCache
from parlinalg.nn.containers import Sequential
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.embedding import Embedding, Positions
from parlinalg.nn.layer import Layer
from parlinalg.nn.linear import Linear
from parlinalg.nn.models.transformer import Transformer, check_ids, spread
from parlinalg.nn.module import Module
from parlinalg.nn.pretrained import Pretrained
from parlinalg.schemes import Scheme


class Cache(list[KeyValueCache]):
    """The keys and values of all blocks, for generation."""

    @property
    def length(self) -> int:
        """The number of tokens it holds."""
        return self[0].length


class CausalModel(Transformer, Pretrained):
    """An embedding, blocks in which no token sees a later one, and a head.

    Attributes
    ----------
    embedding : Embedding
    positions : Positions
        Where they are learned.
    dropout : Dropout
    blocks : Sequential of TransformerBlock
    norm : Module
    head : Linear
        Where it is not tied to the embedding.

    Call it with ids [batch, sequence] in `ids_layout`; the logits [batch, sequence, vocab_size] have the layout
    `scheme.inner`.
    """

    def __init__(
        self, config: Mapping[str, Any], unknown: Mapping[str, Any], scheme: Scheme | str, grid: Grid,
        dtype: DTypeLike, *, learned_positions: bool,
    ) -> None:  # fmt: skip
        super().__init__(config, unknown, scheme, grid, dtype)
        vocabulary, hidden = self.config["vocab_size"], self.config["hidden_size"]
        self.embedding = Embedding(vocabulary, hidden, scheme, grid, dtype=self.dtype)
        if learned_positions:
            most = self.config["max_position_embeddings"]
            self.positions = Positions(most, hidden, scheme, grid, dtype=self.dtype)
        self.dropout = Dropout(self.config["embd_pdrop"])

    def finish(
        self, blocks: Iterable[TransformerBlock], norm: Module, seed: int | None, *, divided: bool
    ) -> None:  # fmt: skip
        """Add the blocks, the last norm and the head, and make the values if there is a seed.

        Parameters
        ----------
        divided : bool
            Whether what is added to the residual stream starts from smaller weights, the more layers there are.
        """
        vocabulary, hidden = self.config["vocab_size"], self.config["hidden_size"]
        self.blocks = Sequential(*blocks)
        self.norm = norm
        if not self.tied:
            self.head = Linear(
                hidden, vocabulary, self.scheme, self.grid, "expand", bias=False, head=True, dtype=self.dtype
            )
        self.start_from(spread(self.config["initializer_range"], len(self.blocks) if divided else 0))
        if seed is not None:
            self.initialize(seed)

    @property
    def tied(self) -> bool:
        """True if the head is the embedding's table."""
        return bool(self.config["tie_word_embeddings"])

    def forward(self, ids: Tensor | DistArray, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        """Return the logits of the token after each.

        Parameters
        ----------
        ids : DistArray or Tensor
            Token ids [batch, sequence], in `ids_layout`.
        cache : Cache, optional
            Keys and values of the tokens before these, made by `cache()`; those of these tokens are added.
        last : bool
            Only those of the token after the last: [batch, vocab_size].

        Raises
        ------
        ValueError
            If the ids are not [batch, sequence], the sequence is longer than the positions, or an id is not in the
            vocabulary.
        """
        x = self.embed(ids, 0 if cache is None else cache.length)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=None if cache is None else cache[i])
        return self.logits(x, last=last)

    def cache(self, length: int) -> Cache:
        """Return an empty cache for so many tokens."""
        return Cache(KeyValueCache(length) for _ in self.blocks)

    def embed(self, ids: Tensor | DistArray, start: int = 0) -> Tensor:
        """Return the residual stream before the blocks; the first token is at position `start`."""
        check_ids(ids)
        length, most = start + ids.shape[1], self.config["max_position_embeddings"]
        if length > most:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's {most} positions; shorten it, or make the "
                f"model with max_position_embeddings={length}"
            )
        x = self.embedding(ids)
        if "positions" in self._modules:
            x = self.positions(x, start)
        out: Tensor = self.dropout(x)
        return out

    def logits(self, x: Tensor, *, last: bool = False) -> Tensor:
        """Return the logits, from the residual stream after the blocks."""
        if last:
            x = ops.select(x, 1, x.shape[1] - 1).redistribute(self.scheme.leading(1).residual)
        y = self.norm(x)
        z: Tensor = self.embedding.logits(y) if self.tied else self.head(y)
        return z

    def ends(self) -> tuple[Layer, Layer]:
        first = [m for name, m in self._modules.items() if name in ("embedding", "positions", "dropout")]
        head = self.embedding if self.tied else self.head
        return (
            Layer("embedding", self.embed, tuple(first), True, lambda ids, cache, start: self.embed(ids, start)),
            Layer("head", self.logits, (self.norm, head), True, lambda x, cache, start: self.logits(x, last=True)),
        )

    def layers(self) -> list[Layer]:
        first, *blocks, last = super().layers()
        return [first, *(b._replace(cached=partial(_with_cache, b.forward), caches=True) for b in blocks), last]


def _with_cache(block: Callable[..., Tensor], x: Tensor, cache: KeyValueCache, start: int) -> Tensor:
    """Return a block's outputs, where keys and values of the tokens before `start` are in its cache."""
    return block(x, cache=cache)
