"""Llama (Touvron et al., "LLaMA: open and efficient foundation language models", 2023, and its successors)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.autograd.ops.rotary import rotary_frequencies
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import AxisSpec
from parlinalg.nn.block import TransformerBlock
from parlinalg.nn.checks import placed, real
from parlinalg.nn.experts import perceptrons
from parlinalg.nn.models.causal import CausalModel
from parlinalg.nn.norms import RMSNorm
from parlinalg.nn.pretrained import llama, mixtral, qwen2_moe
from parlinalg.schemes import Scheme


class Llama(CausalModel):
    """A language model of Llama's shape, on every grid: RMS norms, rotary positions, SwiGLU, grouped queries.

    Parameters
    ----------
    vocab_size, max_position_embeddings, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size : int
        As in `transformers.LlamaConfig`; the defaults are those of Llama 7B.
    num_key_value_heads : int, optional
        How many groups the heads fall into, each with one key and value; by default as many as heads.
    head_dim : int, optional
        By default `hidden_size / num_attention_heads`.
    rms_norm_eps, initializer_range : float
    rope_theta : float
        The base of the rotary positions.
    rope_scaling : dict, optional
        How they are scaled for longer sequences: {"rope_type": "linear" or "llama3", "factor": …, …}; the older "type"
        in place of "rope_type" will do.
    packed : bool
        As of `Attention`: False where ranks that cut heads are more than `num_key_value_heads`.  It is the model's, on
        every grid, and no setting of folders of weights, which are read and written either way.
    attention_bias, mlp_bias : bool
    qkv_bias : bool, optional
        The biases of the products into attention alone, which Qwen2 has; by default as `attention_bias`.
    attention_dropout : float
        The probability of dropping an attention weight.
    resid_pdrop, embd_pdrop : float
        Dropout of what is added to the residual stream, and after the embedding, as in GPT-2; Llama has none.
    tie_word_embeddings : bool
        Whether the head is the embedding's table.
    num_local_experts, num_experts_per_tok, norm_topk_prob, shared_expert_intermediate_size, shared_expert_gate
        As of `GPT`, as are `router_aux_loss_coef`, `capacity_factor` and `expert_axis`, and `scheme`, `grid`, `dtype`,
        `seed` and `recompute`.

    Members, calls and what they give are those of `CausalModel`.
    """

    architecture = llama.ARCHITECTURE

    def __init__(
        self, *, vocab_size: int = 32000, max_position_embeddings: int = 2048, hidden_size: int = 4096,
        num_hidden_layers: int = 32, num_attention_heads: int = 32, num_key_value_heads: int | None = None,
        intermediate_size: int = 11008, head_dim: int | None = None, rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0, rope_scaling: Mapping[str, Any] | None = None, packed: bool = True,
        attention_bias: bool = False, qkv_bias: bool | None = None, mlp_bias: bool = False,
        attention_dropout: float = 0.0, resid_pdrop: float = 0.0, embd_pdrop: float = 0.0,
        initializer_range: float = 0.02, tie_word_embeddings: bool = False,
        num_local_experts: int | None = None, num_experts_per_tok: int = 2, norm_topk_prob: bool | None = None,
        shared_expert_intermediate_size: int | None = None, shared_expert_gate: bool = False,
        router_aux_loss_coef: float = 0.01, capacity_factor: float | None = 1.25, expert_axis: AxisSpec = "auto",
        scheme: Scheme | str, grid: Grid, dtype: DTypeLike = np.float32, seed: int | None = None,
        recompute: str | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        scheme = placed(self, scheme, grid)
        theta = real("Llama: rope_theta", rope_theta, above=True)
        scaling = llama.rope_scaling("Llama: rope_scaling", rope_scaling)
        if rope_scaling is not None and rope_scaling.get("rope_theta", theta) != theta:
            raise ConfigError(
                f"Llama: rope_theta={rope_scaling['rope_theta']} of rope_scaling is not that of the argument "
                f"rope_theta, {theta}: give it as the argument"
            )
        config: dict[str, Any] = {
            "vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings, "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers, "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_attention_heads if num_key_value_heads is None else num_key_value_heads,
            "intermediate_size": intermediate_size, "rms_norm_eps": rms_norm_eps, "rope_theta": theta,
            "rope_scaling": scaling, "attention_bias": attention_bias, "mlp_bias": mlp_bias,
            "attention_dropout": attention_dropout, "resid_pdrop": resid_pdrop, "embd_pdrop": embd_pdrop,
            "initializer_range": initializer_range, "tie_word_embeddings": tie_word_embeddings,
            "packed": packed,
        }  # fmt: skip
        settings, mlp = perceptrons(
            grid, num_local_experts, num_experts_per_tok=num_experts_per_tok, norm_topk_prob=norm_topk_prob,
            shared_expert_intermediate_size=shared_expert_intermediate_size, shared_expert_gate=shared_expert_gate,
            router_aux_loss_coef=router_aux_loss_coef, capacity_factor=capacity_factor, expert_axis=expert_axis,
        )  # fmt: skip
        config |= settings
        if head_dim is not None:
            config["head_dim"] = head_dim
        if qkv_bias is not None:
            config["qkv_bias"] = qkv_bias
        super().__init__(config, unknown, scheme, grid, dtype, learned_positions=False)
        c, hidden, eps = self.config, self.config["hidden_size"], self.config["rms_norm_eps"]
        width = c.setdefault("head_dim", self.head_dim)
        rotary = frequencies(width, theta, scaling)
        blocks = [
            TransformerBlock(
                hidden, c["num_attention_heads"], c["intermediate_size"], scheme, grid,
                kv_heads=c["num_key_value_heads"], head_dim=width, norm="rms", eps=eps, activation="swiglu",
                bias=c["mlp_bias"], attention_bias=c["attention_bias"], qkv_bias=qkv_bias, causal=True, rotary=rotary,
                packed=c["packed"],
                attention_dropout=attention_dropout, dropout=resid_pdrop, mlp=mlp,
                recompute=recompute, dtype=self.dtype,
            )
            for _ in range(c["num_hidden_layers"])
        ]  # fmt: skip
        self.finish(blocks, RMSNorm(hidden, scheme, grid, eps, dtype=self.dtype), seed, divided=False)


class Mixtral(Llama):
    """A language model of Mixtral's shape (Jiang et al., "Mixtral of experts", 2024): a Llama whose perceptrons are
    `MixtureOfExperts`, on every grid.

    Parameters
    ----------
    num_local_experts, num_experts_per_tok, router_aux_loss_coef, rope_theta, rms_norm_eps
        As in `transformers.MixtralConfig`, with its defaults.
    capacity_factor : float, optional
        By default experts take every token, as Mixtral's do.
    **options
        As of `Llama`.
    """

    architecture = mixtral.ARCHITECTURE

    def __init__(
        self, *, num_local_experts: int = 8, num_experts_per_tok: int = 2, norm_topk_prob: bool = True,
        router_aux_loss_coef: float = 0.001, capacity_factor: float | None = None, rope_theta: float = 1e6,
        rms_norm_eps: float = 1e-5, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_local_experts=num_local_experts, num_experts_per_tok=num_experts_per_tok, norm_topk_prob=norm_topk_prob,
            router_aux_loss_coef=router_aux_loss_coef, capacity_factor=capacity_factor, rope_theta=rope_theta,
            rms_norm_eps=rms_norm_eps, **options,
        )  # fmt: skip


class Qwen2Moe(Llama):
    """A language model of Qwen2-MoE's shape (Yang et al., "Qwen2 technical report", 2024): a Llama of many small
    experts beside a shared one with a gate, and with biases into attention; on every grid.

    Parameters
    ----------
    num_local_experts, intermediate_size : int
        The experts and their width inside: `num_experts` and `moe_intermediate_size` of `transformers.Qwen2MoeConfig`,
        with the defaults of Qwen1.5-MoE-A2.7B.
    num_experts_per_tok, norm_topk_prob, shared_expert_intermediate_size, router_aux_loss_coef, qkv_bias, rope_theta
        As there.
    shared_expert_gate : bool
    capacity_factor : float, optional
        By default experts take every token.
    **options
        As of `Llama`.
    """

    architecture = qwen2_moe.ARCHITECTURE

    def __init__(
        self, *, num_local_experts: int = 60, intermediate_size: int = 1408, num_experts_per_tok: int = 4,
        norm_topk_prob: bool = False, shared_expert_intermediate_size: int = 5632, shared_expert_gate: bool = True,
        router_aux_loss_coef: float = 0.001, capacity_factor: float | None = None, qkv_bias: bool = True,
        rope_theta: float = 1e6, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_local_experts=num_local_experts, intermediate_size=intermediate_size,
            num_experts_per_tok=num_experts_per_tok, norm_topk_prob=norm_topk_prob,
            shared_expert_intermediate_size=shared_expert_intermediate_size, shared_expert_gate=shared_expert_gate,
            router_aux_loss_coef=router_aux_loss_coef, capacity_factor=capacity_factor, qkv_bias=qkv_bias,
            rope_theta=rope_theta, **options,
        )  # fmt: skip


def frequencies(width: int, base: float, scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Return the angles a position of a head's pairs of features, scaled for longer sequences than the training's.

    Parameters
    ----------
    scaling : dict, optional
        With all its numbers.  "rope_type" "linear" divides all by "factor".  "llama3" (Grattafiori et al., "The Llama 3
        herd of models", 2024) divides those that turn less than "low_freq_factor" times in
        "original_max_position_embeddings" positions, leaves those that turn more than "high_freq_factor" times, and
        goes from one to the other between.
    """
    angles = rotary_frequencies(width, base)
    if scaling is None:
        return angles
    slow = angles / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * angles / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return share * angles + (1 - share) * slow
