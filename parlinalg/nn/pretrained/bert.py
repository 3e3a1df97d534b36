"""BERT's encoder (Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2019)."""

from __future__ import annotations

from typing import Any

from parlinalg.nn.activations import hidden_acts
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Row, places
from parlinalg.nn.pretrained.gpt2 import NAMES
from parlinalg.nn.pretrained.settings import Settings

_SIZES = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
          "intermediate_size", "type_vocab_size")  # fmt: skip
_DEFAULTS = (30522, 512, 768, 12, 12, 3072, 2)
_L = "encoder.layer.{i}"


def linear(ours: str, theirs: str, inner: str, outer: str) -> list[Row]:
    """Return the rows of a linear layer's weight and bias."""
    return [
        Row(f"{ours}.weight", f"{inner} {outer}", Part(f"{theirs}.weight", f"{outer} {inner}")),
        Row(f"{ours}.bias", outer, Part(f"{theirs}.bias", outer)),
    ]


def norm(ours: str, theirs: str) -> list[Row]:
    """Return the rows of a layer norm."""
    return [Row(f"{ours}.{name}", "h", Part(f"{theirs}.{name}", "h")) for name in ("weight", "bias")]


def attention(layer: str, names: tuple[str, str, str], out: str, *, bias: bool = True) -> list[Row]:
    """Return the rows of attention, whose queries, keys and values are three layers in the file."""
    own = [(f"{layer}.{name}", ("u", i, i + 1)) for i, name in enumerate(names)]
    qkv = "blocks.{i}.attention.qkv"
    rows = [Row(f"{qkv}.weight", "h k u e", *(Part(f"{name}.weight", "(k u e) h", of) for name, of in own))]
    if bias:
        rows.append(Row(f"{qkv}.bias", "k u e", *(Part(f"{name}.bias", "(k u e)", of) for name, of in own)))
    return [
        *rows,
        Row("blocks.{i}.attention.out.weight", "k g e h", Part(f"{layer}.{out}.weight", "h (k g e)")),
        Row("blocks.{i}.attention.out.bias", "h", Part(f"{layer}.{out}.bias", "h")),
    ]


def sizes_of(arguments: Arguments) -> dict[str, int]:
    """Return the sizes of the dims of an encoder's blocks."""
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    return {"1": 1, "h": hidden, "k": heads, "u": 3, "g": 1, "e": hidden // heads, "f": arguments["intermediate_size"]}


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    rows = [
        Row("embedding.weight", "v h", Part("bert.embeddings.word_embeddings.weight", "v h")),
        Row("types.weight", "t h", Part("bert.embeddings.token_type_embeddings.weight", "t h")),
        Row("positions.weight", "p h", Part("bert.embeddings.position_embeddings.weight", "p h")),
        *norm("norm", "bert.embeddings.LayerNorm"),
        *attention(f"bert.{_L}.attention", ("self.query", "self.key", "self.value"), "output.dense"),
        *norm("blocks.{i}.norm1", f"bert.{_L}.attention.output.LayerNorm"),
        *linear("blocks.{i}.mlp.0", f"bert.{_L}.intermediate.dense", "h", "f"),
        *linear("blocks.{i}.mlp.2", f"bert.{_L}.output.dense", "f", "h"),
        *norm("blocks.{i}.norm2", f"bert.{_L}.output.LayerNorm"),
    ]
    a = arguments
    sizes = {"v": a["vocab_size"], "t": a["type_vocab_size"], "p": a["max_position_embeddings"]}
    return places(rows, {**sizes_of(a), **sizes}, a["num_hidden_layers"])


def common_arguments(config: Settings) -> dict[str, Any]:
    """Return the arguments that encoders of text and of images share."""
    return {
        "hidden_act": config.one_of("hidden_act", hidden_acts(), "gelu"),
        "hidden_dropout_prob": config.real("hidden_dropout_prob", 0.0),
        "attention_probs_dropout_prob": config.real("attention_probs_dropout_prob", 0.0),
        "layer_norm_eps": config.real("layer_norm_eps", 1e-12),
        "initializer_range": config.real("initializer_range", 0.02),
    }


def _arguments(config: Settings) -> dict[str, Any]:
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    config.only("position_embedding_type", "absolute")
    found = {name: config.whole(name, default) for name, default in zip(_SIZES, _DEFAULTS, strict=True)}
    config.divides("num_attention_heads", found["num_attention_heads"], "hidden_size", found["hidden_size"])
    return {**found, **common_arguments(config)}


def _settings(arguments: Arguments) -> dict[str, Any]:
    return {**arguments, "hidden_act": NAMES.get(arguments["hidden_act"], arguments["hidden_act"])}


#: The heads of `transformers`' models, and the pooler, are not part of the encoder: they are left in the file.
ARCHITECTURE = Architecture(
    "bert", "BertModel", "bert.", _arguments, _settings, _table,
    ignored=(r"(bert\.)?pooler\..*", r"(bert\.)?embeddings\.position_ids", r"(cls|classifier|qa_outputs)\..*"),
)  # fmt: skip
