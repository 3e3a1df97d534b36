"""The transformer's block: attention and a perceptron on the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.autograd import Tensor
from parlinalg.autograd.ops.rotary import Frequencies
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn.attention import Attention
from parlinalg.nn.checks import placed
from parlinalg.nn.containers import MLP
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.module import Module
from parlinalg.nn.norms import LayerNorm, RMSNorm
from parlinalg.nn.recompute import recompute as recompute_module
from parlinalg.schemes import Scheme

RECOMPUTED = (None, "attention", "block")


class TransformerBlock(Module):
    """Attention, then a perceptron, each added to the residual stream; by any scheme.

    With `pre_norm` x + f(norm(x)), as in GPT-2, Llama and ViT; without, norm(x + f(x)), as in the first transformer
    (Vaswani et al., "Attention is all you need", 2017) and in BERT.

    Parameters
    ----------
    hidden, heads, inner : int
        The features of the residual stream, the heads of attention, the features inside of the perceptron.
    scheme : Scheme or str
    grid : Grid
    kv_heads, head_dim : int, optional
        As of `Attention`.
    norm : {"layer", "rms"}
    eps : float
        The eps of the norms.
    pre_norm : bool
    activation : str
        The activation of the perceptron, as of `MLP`.
    bias : bool
        Whether linear layers have a bias.
    attention_bias, qkv_bias : bool, optional
        The bias of attention's layers, by default `bias`; of the layers into it, by default `attention_bias`.
    causal, window, rotary, packed
        As of `Attention`.
    attention_dropout, dropout : float
        The probabilities of dropping an attention weight, and an element of what is added to the residual stream.
    cross : bool
        Attend to a context too, between the two.
    mlp : callable, optional
        Makes the perceptron from `hidden`, `inner` and the keywords `scheme`, `grid`, `activation`, `bias` and `dtype`,
        such as `partial(MixtureOfExperts, experts=8)`; by default an `MLP`.
    recompute : {None, "attention", "block"}
        What is computed again in the backward pass, keeping only its input: all of attention (whose scores are not
        kept in any case), or the block.
    dtype : dtype

    Attributes
    ----------
    norm1, attention, norm2, mlp : Module
    norm_cross, cross : Module
        With `cross`.

    Call it with the residual stream [batch, sequence, hidden], in the scheme's layout for it, which the result keeps.
    """

    def __init__(
        self, hidden: int, heads: int, inner: int, scheme: Scheme | str, grid: Grid, *, kv_heads: int | None = None,
        head_dim: int | None = None, norm: str = "layer", eps: float = 1e-5, pre_norm: bool = True,
        activation: str = "gelu_tanh", bias: bool = True, attention_bias: bool | None = None,
        qkv_bias: bool | None = None, causal: bool = False, window: int | None = None,
        rotary: Frequencies | None = None, attention_dropout: float = 0.0, dropout: float = 0.0, cross: bool = False,
        packed: bool = True, mlp: Callable[..., Module] | None = None, recompute: str | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        if norm not in ("layer", "rms"):
            raise ConfigError(f"a block's norm is 'layer' or 'rms', not {norm!r}")
        if recompute not in RECOMPUTED:
            raise ConfigError(f"recompute is None, 'attention' or 'block', not {recompute!r}")
        scheme = placed(self, scheme, grid)
        make_norm = LayerNorm if norm == "layer" else RMSNorm
        out_bias = bias if attention_bias is None else attention_bias
        options: dict[str, Any] = {
            "kv_heads": kv_heads, "head_dim": head_dim, "bias": out_bias if qkv_bias is None else qkv_bias,
            "out_bias": out_bias, "dropout": attention_dropout, "dtype": dtype,
        }  # fmt: skip
        self.pre_norm = pre_norm
        self.norm1 = make_norm(hidden, scheme, grid, eps, dtype=dtype)
        self.attention = Attention(
            hidden, heads, scheme, grid, causal=causal, window=window, rotary=rotary, packed=packed, **options
        )  # fmt: skip
        self.dropout1 = Dropout(dropout)
        if cross:
            self.norm_cross = make_norm(hidden, scheme, grid, eps, dtype=dtype)
            self.cross = Attention(hidden, heads, scheme, grid, cross=True, **options)
            self.dropout_cross = Dropout(dropout)
        self.norm2 = make_norm(hidden, scheme, grid, eps, dtype=dtype)
        form: dict[str, Any] = {
            "scheme": scheme, "grid": grid, "activation": activation, "bias": bias, "dtype": dtype
        }  # fmt: skip
        self.mlp: Module = (
            MLP((hidden, inner, hidden), head=False, **form) if mlp is None else mlp(hidden, inner, **form)
        )
        self.dropout2 = Dropout(dropout)
        for module in self.modules():
            chosen = module is self if recompute == "block" else isinstance(module, Attention)
            recompute_module(module, recompute is not None and chosen)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, mask: Any = None, key_padding: Any = None,
        context_padding: Any = None, cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """Return the residual stream after the block.

        Parameters
        ----------
        x : Tensor
        context : Tensor, optional
            What cross-attention attends to, [batch, others, hidden], laid out as x.
        mask, key_padding
            As of `Attention`, which keys are seen by each query, and at all.
        context_padding
            Which of the context's items are seen.
        cache : optional
            Keys and values of what came before, as of `Attention`.
        """
        x = self._add(x, self.norm1, self.dropout1, self.attention, mask=mask, key_padding=key_padding, cache=cache)
        if "cross" in self._modules:
            if context is None:
                raise ConfigError("a block with cross-attention is called with a context: block(x, context)")
            x = self._add(x, self.norm_cross, self.dropout_cross, self.cross, context, key_padding=context_padding)
        elif context is not None:
            raise ConfigError("a block is given a context, but has no cross-attention; make it with cross=True")
        return self._add(x, self.norm2, self.dropout2, self.mlp)

    def _add(self, x: Tensor, norm: Module, dropout: Module, branch: Module, *inputs: Any, **named: Any) -> Tensor:
        """Return the residual stream with a branch added."""
        if self.pre_norm:
            added: Tensor = x + dropout(branch(norm(x), *inputs, **named))
            return added
        after: Tensor = norm(x + dropout(branch(x, *inputs, **named)))
        return after

    def extra_repr(self) -> str:
        return "pre-norm" if self.pre_norm else "post-norm"
