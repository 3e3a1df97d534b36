"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019)."""

from __future__ import annotations

from typing import Any

from parlinalg.nn.activations import hidden_acts
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Row, places
from parlinalg.nn.pretrained.settings import Settings

#: Hugging Face's names of activations that have another one here.
NAMES = {"gelu_tanh": "gelu_new"}

# v vocabulary, p positions, h hidden, k heads, u query, key and value, e a head's dim, f the MLP's inside
_H = "transformer.h.{i}."
_ROWS = [
    Row("embedding.weight", "v h", Part("transformer.wte.weight", "v h")),
    Row("positions.weight", "p h", Part("transformer.wpe.weight", "p h")),
    Row("blocks.{i}.norm1.weight", "h", Part(_H + "ln_1.weight", "h")),
    Row("blocks.{i}.norm1.bias", "h", Part(_H + "ln_1.bias", "h")),
    Row("blocks.{i}.attention.qkv.weight", "h k u e", Part(_H + "attn.c_attn.weight", "h (u k e)")),
    Row("blocks.{i}.attention.qkv.bias", "k u e", Part(_H + "attn.c_attn.bias", "(u k e)")),
    Row("blocks.{i}.attention.out.weight", "k g e h", Part(_H + "attn.c_proj.weight", "(k g e) h")),
    Row("blocks.{i}.attention.out.bias", "h", Part(_H + "attn.c_proj.bias", "h")),
    Row("blocks.{i}.norm2.weight", "h", Part(_H + "ln_2.weight", "h")),
    Row("blocks.{i}.norm2.bias", "h", Part(_H + "ln_2.bias", "h")),
    Row("blocks.{i}.mlp.0.weight", "h f", Part(_H + "mlp.c_fc.weight", "h f")),
    Row("blocks.{i}.mlp.0.bias", "f", Part(_H + "mlp.c_fc.bias", "f")),
    Row("blocks.{i}.mlp.2.weight", "f h", Part(_H + "mlp.c_proj.weight", "f h")),
    Row("blocks.{i}.mlp.2.bias", "h", Part(_H + "mlp.c_proj.bias", "h")),
    Row("norm.weight", "h", Part("transformer.ln_f.weight", "h")),
    Row("norm.bias", "h", Part("transformer.ln_f.bias", "h")),
]
_HEAD = Row("head.weight", "h v", Part("lm_head.weight", "v h"))


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    a = arguments
    heads, hidden = a["num_attention_heads"], a["hidden_size"]
    sizes = {"v": a["vocab_size"], "p": a["max_position_embeddings"], "h": hidden, "k": heads, "g": 1, "u": 3,
             "e": hidden // heads, "f": a["intermediate_size"]}  # fmt: skip
    rows = _ROWS if a["tie_word_embeddings"] else [*_ROWS, _HEAD]
    return places(rows, sizes, a["num_hidden_layers"])


def _arguments(config: Settings) -> dict[str, Any]:
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    hidden = config.whole("n_embd", 768)
    return {
        "vocab_size": config.whole("vocab_size", 50257),
        "max_position_embeddings": config.whole("n_positions", 1024),
        "hidden_size": hidden,
        "num_hidden_layers": config.whole("n_layer", 12),
        "num_attention_heads": config.divides("n_head", config.whole("n_head", 12), "n_embd", hidden),
        "intermediate_size": config.whole("n_inner", 4 * hidden),
        "hidden_act": config.one_of("activation_function", hidden_acts(), "gelu_new"),
        "embd_pdrop": config.real("embd_pdrop", 0.1),
        "resid_pdrop": config.real("resid_pdrop", 0.1),
        "attn_pdrop": config.real("attn_pdrop", 0.1),
        "layer_norm_eps": config.real("layer_norm_epsilon", 1e-5),
        "initializer_range": config.real("initializer_range", 0.02),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


def _settings(arguments: Arguments) -> dict[str, Any]:
    a = arguments
    return {
        "vocab_size": a["vocab_size"],
        "n_positions": a["max_position_embeddings"],
        "n_embd": a["hidden_size"],
        "n_layer": a["num_hidden_layers"],
        "n_head": a["num_attention_heads"],
        "n_inner": a["intermediate_size"],
        "activation_function": NAMES.get(a["hidden_act"], a["hidden_act"]),
        "layer_norm_epsilon": a["layer_norm_eps"],
        **{name: a[name] for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop", "initializer_range")},
        "tie_word_embeddings": a["tie_word_embeddings"],
    }


ARCHITECTURE = Architecture(
    "gpt2", "GPT2LMHeadModel", "transformer.", _arguments, _settings, _table,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)  # fmt: skip
