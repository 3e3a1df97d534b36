"""ViT (Dosovitskiy et al., "An image is worth 16×16 words: transformers for image recognition at scale", 2021)."""

from __future__ import annotations

from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.nn.checks import whole
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Row, places
from parlinalg.nn.pretrained.bert import attention, common_arguments, linear, norm, sizes_of
from parlinalg.nn.pretrained.gpt2 import NAMES
from parlinalg.nn.pretrained.settings import Settings

_L, _PATCH = "vit.encoder.layer.{i}", "vit.embeddings.patch_embeddings.projection"


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    a = arguments
    (height, width), (y, z) = _pair(a["image_size"]), _pair(a["patch_size"])
    names = ("attention.query", "attention.key", "attention.value")
    rows = [
        Row("patches.projection.weight", "x h", Part(f"{_PATCH}.weight", "h x", file="h c y z")),
        Row("patches.projection.bias", "h", Part(f"{_PATCH}.bias", "h")),
        Row("patches.class_token", "h", Part("vit.embeddings.cls_token", "h", file="1 1 h")),
        Row("positions.weight", "p h", Part("vit.embeddings.position_embeddings", "p h", file="1 p h")),
        *attention(f"{_L}.attention", names, "output.dense", bias=a["qkv_bias"]),
        *norm("blocks.{i}.norm1", f"{_L}.layernorm_before"),
        *norm("blocks.{i}.norm2", f"{_L}.layernorm_after"),
        *linear("blocks.{i}.mlp.0", f"{_L}.intermediate.dense", "h", "f"),
        *linear("blocks.{i}.mlp.2", f"{_L}.output.dense", "f", "h"),
        *norm("norm", "vit.layernorm"),
        *linear("classifier.head", "classifier", "h", "l"),
    ]
    channels, patches = a["num_channels"], (height // y) * (width // z)
    sizes = {"c": channels, "y": y, "z": z, "x": channels * y * z, "p": 1 + patches, "l": a["num_labels"]}
    return places(rows, {**sizes_of(a), **sizes}, a["num_hidden_layers"])


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _sides(config: Settings, name: str, default: int) -> int | tuple[int, int]:
    """Return a side, or height and width."""
    value = config.get(name, default)
    if not isinstance(value, list):
        return config.whole(name, default)
    if len(value) != 2:
        raise ConfigError(f"{config.path}: {name} is a whole number or two, not {value!r}")
    return whole(f"{config.path}: {name}", value[0]), whole(f"{config.path}: {name}", value[1])


def _arguments(config: Settings) -> dict[str, Any]:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.whole("num_labels", 2)
    hidden = config.whole("hidden_size", 768)
    return {
        "image_size": _sides(config, "image_size", 224),
        "patch_size": _sides(config, "patch_size", 16),
        "num_channels": config.whole("num_channels", 3),
        "num_labels": count,
        "hidden_size": hidden,
        "num_hidden_layers": config.whole("num_hidden_layers", 12),
        "num_attention_heads": config.divides(
            "num_attention_heads", config.whole("num_attention_heads", 12), "hidden_size", hidden
        ),
        "intermediate_size": config.whole("intermediate_size", 3072),
        "qkv_bias": config.flag("qkv_bias", True),
        **common_arguments(config),
    }


def _settings(arguments: Arguments) -> dict[str, Any]:
    a = {name: value for name, value in arguments.items() if name not in ("pool", "num_labels")}
    if arguments.get("pool", "first") != "first":
        raise ConfigError(f"`transformers` has no ViT with pool={arguments['pool']!r}: its pool is 'first'")
    labels = {str(i): f"LABEL_{i}" for i in range(arguments["num_labels"])}
    back = {label: int(i) for i, label in labels.items()}
    return {**a, "hidden_act": NAMES.get(a["hidden_act"], a["hidden_act"]), "id2label": labels, "label2id": back}


ARCHITECTURE = Architecture(
    "vit", "ViTForImageClassification", "vit.", _arguments, _settings, _table, ignored=(r"(vit\.)?pooler\..*",),
)  # fmt: skip
