"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.grid import Grid
from parlinalg.layout import AxisSpec
from parlinalg.nn.block import TransformerBlock
from parlinalg.nn.checks import placed, whole
from parlinalg.nn.experts import perceptrons
from parlinalg.nn.models.causal import CausalModel
from parlinalg.nn.models.transformer import activation
from parlinalg.nn.norms import LayerNorm
from parlinalg.nn.pretrained import gpt2
from parlinalg.schemes import Scheme


class GPT(CausalModel):
    """A language model of GPT-2's shape, on every grid.

    Parameters
    ----------
    vocab_size, max_position_embeddings, hidden_size, num_hidden_layers, num_attention_heads : int
        As in `transformers.GPT2Config`; the defaults are GPT-2's.
    intermediate_size : int, optional
        Inside of the perceptrons; by default four times `hidden_size`.
    hidden_act : str
        "gelu_tanh" (Hugging Face's "gelu_new"), "gelu", "relu", "silu" or "tanh".
    embd_pdrop, resid_pdrop, attn_pdrop : float
        The probabilities of dropout: after the embedding, of what is added to the residual stream, of attention's
        weights.  GPT-2 was trained with 0.1.
    layer_norm_eps, initializer_range : float
        The residual stream's projections start from `initializer_range` / √(2 layers).
    tie_word_embeddings : bool
        Whether the head is the embedding's table.
    num_local_experts : int, optional
        With it perceptrons are `MixtureOfExperts` of so many; without it they are plain.
    num_experts_per_tok, norm_topk_prob, router_aux_loss_coef, capacity_factor
        Its `top_k`, `normalize_gates`, `aux_loss_coef` and `capacity_factor`; what is added to the loss comes by
        `added_losses`.
    shared_expert_intermediate_size, shared_expert_gate
        Its `shared` and `shared_gate`; None is no shared expert.
    expert_axis : str, tuple of str or None
        The axes that cut the experts; "auto": "data" where the grid has it, else none.
    scheme : Scheme or str
    grid : Grid
    dtype : dtype
    seed : int, optional
        With a seed the model is initialized at once; else by `initialize(seed)`.
    recompute : {None, "attention", "block"}
        As of `TransformerBlock`.

    Members, calls and what they give are those of `CausalModel`.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> from parlinalg import nn, schemes
    >>> grid, scheme = pla.Grid({"r": 1, "c": 1}), schemes.for_mode("2d").SCHEME
    >>> model = nn.GPT(vocab_size=11, max_position_embeddings=8, hidden_size=12, num_hidden_layers=2,
    ...                num_attention_heads=4, scheme=scheme, grid=grid, seed=0)
    >>> ids = pla.distribute(np.zeros((5, 7), int), grid, model.ids_layout)
    >>> model(ids).shape
    (5, 7, 11)
    """

    architecture = gpt2.ARCHITECTURE

    def __init__(
        self, *, vocab_size: int = 50257, max_position_embeddings: int = 1024, hidden_size: int = 768,
        num_hidden_layers: int = 12, num_attention_heads: int = 12, intermediate_size: int | None = None,
        hidden_act: str = "gelu_tanh", embd_pdrop: float = 0.0, resid_pdrop: float = 0.0, attn_pdrop: float = 0.0,
        layer_norm_eps: float = 1e-5, initializer_range: float = 0.02, tie_word_embeddings: bool = True,
        num_local_experts: int | None = None, num_experts_per_tok: int = 2, norm_topk_prob: bool | None = None,
        shared_expert_intermediate_size: int | None = None, shared_expert_gate: bool = False,
        router_aux_loss_coef: float = 0.01, capacity_factor: float | None = 1.25, expert_axis: AxisSpec = "auto",
        scheme: Scheme | str, grid: Grid, dtype: DTypeLike = np.float32, seed: int | None = None,
        recompute: str | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        scheme = placed(self, scheme, grid)
        hidden_size = whole("GPT: hidden_size", hidden_size)
        config: dict[str, Any] = {
            "vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings, "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers, "num_attention_heads": num_attention_heads,
            "intermediate_size": 4 * hidden_size if intermediate_size is None else intermediate_size,
            "hidden_act": activation("GPT", hidden_act), "embd_pdrop": embd_pdrop, "resid_pdrop": resid_pdrop,
            "attn_pdrop": attn_pdrop, "layer_norm_eps": layer_norm_eps, "initializer_range": initializer_range,
            "tie_word_embeddings": tie_word_embeddings,
        }  # fmt: skip
        settings, mlp = perceptrons(
            grid, num_local_experts, num_experts_per_tok=num_experts_per_tok, norm_topk_prob=norm_topk_prob,
            shared_expert_intermediate_size=shared_expert_intermediate_size, shared_expert_gate=shared_expert_gate,
            router_aux_loss_coef=router_aux_loss_coef, capacity_factor=capacity_factor, expert_axis=expert_axis,
        )  # fmt: skip
        config |= settings
        super().__init__(config, unknown, scheme, grid, dtype, learned_positions=True)
        c, eps = self.config, self.config["layer_norm_eps"]
        blocks = [
            TransformerBlock(
                hidden_size, c["num_attention_heads"], c["intermediate_size"], scheme, grid, eps=eps,
                activation=c["hidden_act"], causal=True, attention_dropout=attn_pdrop, dropout=resid_pdrop,
                mlp=mlp, recompute=recompute, dtype=self.dtype,
            )
            for _ in range(c["num_hidden_layers"])
        ]  # fmt: skip
        self.finish(blocks, LayerNorm(hidden_size, scheme, grid, eps, dtype=self.dtype), seed, divided=True)
