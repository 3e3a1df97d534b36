"""Where the tensors of encoders of `transformers` lie in our parameters."""

from __future__ import annotations

from typing import Any

from parlinalg.nn.pretrained.architecture import Part, Place, Row, places


def _linear(ours: str, theirs: str, inner: str, outer: str) -> list[Row]:
    return [
        Row(f"{ours}.weight", f"{inner} {outer}", Part(f"{theirs}.weight", f"{outer} {inner}")),
        Row(f"{ours}.bias", outer, Part(f"{theirs}.bias", outer)),
    ]


def _norm(ours: str, theirs: str) -> list[Row]:
    return [Row(f"{ours}.{name}", "h", Part(f"{theirs}.{name}", "h")) for name in ("weight", "bias")]


def _attention(layer: str, names: tuple[str, str, str], out: str) -> list[Row]:
    own = [(f"{layer}.{name}", ("u", i, i + 1)) for i, name in enumerate(names)]
    qkv = "blocks.{i}.attention.qkv"
    return [
        Row(f"{qkv}.weight", "h k u e", *(Part(f"{name}.weight", "(k u e) h", of) for name, of in own)),
        Row(f"{qkv}.bias", "k u e", *(Part(f"{name}.bias", "(k u e)", of) for name, of in own)),
        Row("blocks.{i}.attention.out.weight", "k g e h", Part(f"{layer}.{out}.weight", "h (k g e)")),
        Row("blocks.{i}.attention.out.bias", "h", Part(f"{layer}.{out}.bias", "h")),
    ]


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    heads = config["num_attention_heads"]
    return {"1": 1, "h": config["hidden_size"], "k": heads, "u": 3, "g": 1, "e": config["hidden_size"] // heads,
            "f": config["intermediate_size"]}  # fmt: skip


def bert(config: dict[str, Any]) -> dict[str, list[Place]]:
    layer = "encoder.layer.{i}"
    rows = [
        Row("embedding.weight", "v h", Part("embeddings.word_embeddings.weight", "v h")),
        Row("types.weight", "t h", Part("embeddings.token_type_embeddings.weight", "t h")),
        Row("positions.weight", "p h", Part("embeddings.position_embeddings.weight", "p h")),
        *_norm("norm", "embeddings.LayerNorm"),
        *_attention(f"{layer}.attention", ("self.query", "self.key", "self.value"), "output.dense"),
        *_norm("blocks.{i}.norm1", f"{layer}.attention.output.LayerNorm"),
        *_linear("blocks.{i}.mlp.0", f"{layer}.intermediate.dense", "h", "f"),
        *_linear("blocks.{i}.mlp.2", f"{layer}.output.dense", "f", "h"),
        *_norm("blocks.{i}.norm2", f"{layer}.output.LayerNorm"),
    ]
    sizes = {"v": config["vocab_size"], "t": config["type_vocab_size"], "p": config["max_position_embeddings"]}
    return places(rows, {**_sizes(config), **sizes}, config["num_hidden_layers"])


def vit(config: dict[str, Any]) -> dict[str, list[Place]]:
    layer, patch = "vit.layers.{i}", "vit.embeddings.patch_embeddings.projection"
    height, width = config["patch_size"]
    rows = [
        Row("patches.projection.weight", "x h", Part(f"{patch}.weight", "h x", file="h c y z")),
        Row("patches.projection.bias", "h", Part(f"{patch}.bias", "h")),
        Row("patches.class_token", "h", Part("vit.embeddings.cls_token", "h", file="1 1 h")),
        Row("positions.weight", "p h", Part("vit.embeddings.position_embeddings", "p h", file="1 p h")),
        *_attention(f"{layer}.attention", ("q_proj", "k_proj", "v_proj"), "o_proj"),
        *_norm("blocks.{i}.norm1", f"{layer}.layernorm_before"),
        *_norm("blocks.{i}.norm2", f"{layer}.layernorm_after"),
        *_linear("blocks.{i}.mlp.0", f"{layer}.mlp.fc1", "h", "f"),
        *_linear("blocks.{i}.mlp.2", f"{layer}.mlp.fc2", "f", "h"),
        *_norm("norm", "vit.layernorm"),
        *_linear("classifier.head", "classifier", "h", "l"),
    ]
    channels, patches = config["num_channels"], (config["image_size"][0] // height) * (config["image_size"][1] // width)
    sizes = {"c": channels, "y": height, "z": width, "x": channels * height * width, "p": 1 + patches,
             "l": config["num_labels"]}  # fmt: skip
    return places(rows, {**_sizes(config), **sizes}, config["num_hidden_layers"])
