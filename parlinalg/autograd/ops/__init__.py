"""Operations on tensors, each with its derivative."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.autograd.ops.arithmetic import add, divide, maximum, minimum, multiply, negative, power, subtract, where
from parlinalg.autograd.ops.attention import attention
from parlinalg.autograd.ops.attention_masks import BlockMask
from parlinalg.autograd.ops.dispatch import balance_loss, chosen, combine, dispatch, z_loss
from parlinalg.autograd.ops.elementwise import (
    abs,
    cos,
    erf,
    exp,
    gelu,
    log,
    relu,
    sigmoid,
    silu,
    sin,
    sqrt,
    swiglu,
    tanh,
)
from parlinalg.autograd.ops.embedding import add_positions, embedding
from parlinalg.autograd.ops.images import band_means, conv2d, max_pool2d, patches
from parlinalg.autograd.ops.items import replace_first, select
from parlinalg.autograd.ops.losses import count_targets, cross_entropy, cross_entropy_sum, mse_loss, mse_sum
from parlinalg.autograd.ops.norms import batch_norm, layer_norm, rms_norm
from parlinalg.autograd.ops.product import matmul
from parlinalg.autograd.ops.reductions import max, mean, min, sum
from parlinalg.autograd.ops.ring import ring_attention
from parlinalg.autograd.ops.rotary import rotary, rotary_frequencies
from parlinalg.autograd.ops.routing import Queues, Routing, route
from parlinalg.autograd.ops.shapes import astype, redistribute, reshape, transpose
from parlinalg.autograd.ops.softmax import log_softmax, softmax
from parlinalg.autograd.ops.ulysses import narrow, share_heads

__all__ = [
    "BlockMask", "Queues", "Routing", "abs", "add", "add_positions", "astype", "attention", "balance_loss",
    "band_means", "batch_norm", "chosen", "combine", "conv2d", "cos", "count_targets", "cross_entropy",
    "cross_entropy_sum", "dispatch", "divide", "embedding", "erf", "exp", "gelu", "layer_norm", "log", "log_softmax",
    "matmul", "max", "max_pool2d", "maximum", "mean", "min", "minimum", "mse_loss", "mse_sum", "multiply", "narrow",
    "negative", "patches", "power", "redistribute", "relu", "replace_first", "reshape", "ring_attention", "rms_norm",
    "rotary", "rotary_frequencies", "route", "select", "share_heads", "sigmoid", "silu", "sin", "softmax", "sqrt",
    "subtract", "sum", "swiglu", "tanh", "transpose", "where", "z_loss",
]  # fmt: skip

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
