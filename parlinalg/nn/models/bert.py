"""BERT's encoder (Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn.block import TransformerBlock
from parlinalg.nn.containers import Sequential
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.embedding import Embedding, Positions
from parlinalg.nn.layer import Layer
from parlinalg.nn.models.transformer import Transformer, activation, check_ids, spread
from parlinalg.nn.norms import LayerNorm
from parlinalg.nn.pretrained import Pretrained, bert
from parlinalg.schemes import Scheme


class BertEncoder(Transformer, Pretrained):
    """An encoder of BERT's shape, on every grid: post-norm blocks in which every token sees all that are no padding.

    Parameters
    ----------
    vocab_size, max_position_embeddings, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size : int
        As in `transformers.BertConfig`; the defaults are those of BERT base.
    type_vocab_size : int
        How many types of tokens (sentences) there are.
    hidden_act : str
        As of `GPT`.
    hidden_dropout_prob, attention_probs_dropout_prob : float
        The probabilities of dropout: after the embedding and of what is added to the residual stream; of attention's
        weights.  BERT was trained with 0.1.
    layer_norm_eps, initializer_range : float
    scheme, grid, dtype, seed, recompute
        As of `GPT`.

    Attributes
    ----------
    embedding, types, positions, norm, dropout, blocks : Module

    Call it with ids [batch, sequence] in `ids_layout`; the hidden states [batch, sequence, hidden_size] have the
    layout `scheme.residual`.  `model.logits(model(ids))` are those of the tokens, through the embedding's table.

    `from_pretrained` reads the encoder of any of `transformers`' BERTs; pooler and heads are left out.
    """

    architecture = bert.ARCHITECTURE

    def __init__(
        self, *, vocab_size: int = 30522, max_position_embeddings: int = 512, hidden_size: int = 768,
        num_hidden_layers: int = 12, num_attention_heads: int = 12, intermediate_size: int = 3072,
        type_vocab_size: int = 2, hidden_act: str = "gelu", hidden_dropout_prob: float = 0.0,
        attention_probs_dropout_prob: float = 0.0, layer_norm_eps: float = 1e-12, initializer_range: float = 0.02,
        scheme: Scheme | str, grid: Grid, dtype: DTypeLike = np.float32, seed: int | None = None,
        recompute: str | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        config: dict[str, Any] = {
            "vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings, "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers, "num_attention_heads": num_attention_heads,
            "intermediate_size": intermediate_size, "type_vocab_size": type_vocab_size,
            "hidden_act": activation("BertEncoder", hidden_act), "hidden_dropout_prob": hidden_dropout_prob,
            "attention_probs_dropout_prob": attention_probs_dropout_prob, "layer_norm_eps": layer_norm_eps,
            "initializer_range": initializer_range,
        }  # fmt: skip
        super().__init__(config, unknown, scheme, grid, dtype)
        c = self.config
        own: dict[str, Any] = {"scheme": scheme, "grid": grid, "dtype": self.dtype}
        hidden, eps = c["hidden_size"], c["layer_norm_eps"]
        self.embedding = Embedding(c["vocab_size"], hidden, **own)
        self.types = Embedding(c["type_vocab_size"], hidden, **own)
        self.positions = Positions(c["max_position_embeddings"], hidden, **own)
        self.norm = LayerNorm(hidden, eps=eps, **own)
        self.dropout = Dropout(hidden_dropout_prob)
        self.blocks = Sequential(*(
            TransformerBlock(
                hidden, c["num_attention_heads"], c["intermediate_size"], eps=eps, pre_norm=False,
                activation=c["hidden_act"], attention_dropout=attention_probs_dropout_prob,
                dropout=hidden_dropout_prob, recompute=recompute, **own,
            )
            for _ in range(c["num_hidden_layers"])
        ))  # fmt: skip
        self.start_from(spread(initializer_range))
        if seed is not None:
            self.initialize(seed)

    def forward(
        self, ids: Tensor | DistArray, attention_mask: Any = None, token_type_ids: Tensor | DistArray | None = None
    ) -> Tensor:  # fmt: skip
        """Return the hidden states.

        Parameters
        ----------
        ids : DistArray or Tensor
            Token ids [batch, sequence], in `ids_layout`.
        attention_mask : DistArray or array, optional
            The shape of `ids`: 0 where a token is padding, which no other token sees.
        token_type_ids : DistArray or Tensor, optional
            The types of the tokens, laid out as the ids; by default all 0.
        """
        x = self.embed(ids, token_type_ids)
        padding = key_padding(attention_mask)
        for block in self.blocks:
            x = block(x, key_padding=padding)
        return x

    def embed(self, ids: Tensor | DistArray, token_type_ids: Tensor | DistArray | None = None) -> Tensor:
        """Return the residual stream before the blocks."""
        check_ids(ids)
        if token_type_ids is None:
            token_type_ids = (ids.data if isinstance(ids, Tensor) else ids) * 0
        elif token_type_ids.shape != ids.shape:
            raise ConfigError(f"token types of shape {token_type_ids.shape} are given with ids of shape {ids.shape}")
        x: Tensor = self.dropout(self.norm(self.positions(self.embedding(ids) + self.types(token_type_ids))))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the tokens, [batch, sequence, vocab_size] in `scheme.inner`, from the hidden states."""
        return self.embedding.logits(x)

    def ends(self) -> tuple[Layer, Layer]:
        first = (self.embedding, self.types, self.positions, self.norm, self.dropout)
        return Layer("embedding", self.embed, first, True), Layer("head", self.logits, (self.embedding,), True)

    def layers(self) -> list[Layer]:
        """Return the layers in their order; the first takes ids, or a dict of the arguments of `forward`.

        With an attention mask pairs of hidden states and mask go from layer to layer.
        """
        first, *blocks, last = super().layers()
        return [
            first._replace(forward=self._enter),
            *(block._replace(forward=partial(_padded, block.forward)) for block in blocks),
            last._replace(forward=lambda x: self.logits(x[0] if isinstance(x, tuple) else x)),
        ]

    def _enter(self, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return self.embed(given)
        unknown = set(given) - {"ids", "attention_mask", "token_type_ids"}
        if unknown or "ids" not in given:
            raise ConfigError(
                f"BertEncoder takes ids, or a dict with ids and maybe attention_mask and token_type_ids, not one with "
                f"{', '.join(map(repr, given))}"
            )
        x, mask = self.embed(given["ids"], given.get("token_type_ids")), given.get("attention_mask")
        return x if mask is None else (x, mask)


def _padded(block: Callable[..., Tensor], x: Any) -> Any:
    """Return a block's outputs, beside the mask of padding where there is one."""
    if not isinstance(x, tuple):
        return block(x)
    hidden, mask = x
    return block(hidden, key_padding=key_padding(mask)), mask


def key_padding(attention_mask: Any) -> Any:
    """Return the mask of keys that are seen, bools, from one of ones and zeros."""
    if attention_mask is None:
        return None
    mask = attention_mask.data if isinstance(attention_mask, Tensor) else attention_mask
    if not isinstance(mask, np.ndarray | DistArray):
        raise TypeError(f"attention_mask is an array or DistArray [batch, sequence], not a {type(mask).__name__}")
    return mask if mask.dtype == np.bool_ else mask != 0
