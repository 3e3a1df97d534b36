"""Llama (Touvron et al., "LLaMA: open and efficient foundation language models", 2023, and its successors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.nn.checks import real
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Range, Row, places
from parlinalg.nn.pretrained.settings import Settings

#: The kinds of scaled rotary positions, and the keys that each needs.
ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
#: Arguments that our model has alone: they are written where they say something, and others pass over them.
_OURS = ("resid_pdrop", "embd_pdrop")
_L = "model.layers.{i}."


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    a = arguments
    heads, k = a["num_attention_heads"], a["num_key_value_heads"]
    g = heads // k
    # v vocabulary, h hidden, k groups of heads, g a group's queries, u these, its key and its value, p the latter two,
    # e a head's dim, f the MLP's inside, s gate and up
    sizes = {"v": a["vocab_size"], "h": a["hidden_size"], "k": k, "g": g, "u": g + 2, "p": 2, "e": a["head_dim"],
             "f": a["intermediate_size"], "s": 2}  # fmt: skip
    rows = [
        Row("embedding.weight", "v h", Part("model.embed_tokens.weight", "v h")),
        Row("blocks.{i}.norm1.weight", "h", Part(_L + "input_layernorm.weight", "h")),
        *_into_attention("weight", "h k {} e", "(k {} e) h", g, a.get("packed", True)),
        Row("blocks.{i}.attention.out.weight", "k g e h", Part(_L + "self_attn.o_proj.weight", "h (k g e)")),
        Row("blocks.{i}.norm2.weight", "h", Part(_L + "post_attention_layernorm.weight", "h")),
        Row(
            "blocks.{i}.mlp.0.weight", "h f s",
            Part(_L + "mlp.gate_proj.weight", "(f s) h", ("s", 0, 1)),
            Part(_L + "mlp.up_proj.weight", "(f s) h", ("s", 1, 2)),
        ),
        Row("blocks.{i}.mlp.2.weight", "f h", Part(_L + "mlp.down_proj.weight", "h f")),
        Row("norm.weight", "h", Part("model.norm.weight", "h")),
    ]  # fmt: skip
    if a.get("qkv_bias", a["attention_bias"]):
        rows += _into_attention("bias", "k {} e", "(k {} e)", g, a.get("packed", True))
    if a["attention_bias"]:
        rows.append(Row("blocks.{i}.attention.out.bias", "h", Part(_L + "self_attn.o_proj.bias", "h")))
    if a["mlp_bias"]:
        rows += [
            Row(
                "blocks.{i}.mlp.0.bias", "f s",
                Part(_L + "mlp.gate_proj.bias", "(f s)", ("s", 0, 1)),
                Part(_L + "mlp.up_proj.bias", "(f s)", ("s", 1, 2)),
            ),
            Row("blocks.{i}.mlp.2.bias", "h", Part(_L + "mlp.down_proj.bias", "h")),
        ]  # fmt: skip
    if not a["tie_word_embeddings"]:
        rows.append(Row("head.weight", "h v", Part("lm_head.weight", "v h")))
    return places(rows, sizes, a["num_hidden_layers"])


def _into_attention(kind: str, dims: str, file: str, g: int, packed: bool) -> list[Row]:
    """Return the rows of the weights or biases into attention, whose dim {} has queries, keys and values.

    In one parameter if they are packed, else in two.
    """

    def row(name: str, dim: str, *parts: tuple[str, Range | None]) -> Row:
        stored = (Part(f"{_L}self_attn.{part}_proj.{kind}", file.format(dim), of) for part, of in parts)
        return Row(f"blocks.{{i}}.attention.{name}.{kind}", dims.format(dim), *stored)

    if packed:
        return [row("qkv", "u", ("q", ("u", 0, g)), ("k", ("u", g, g + 1)), ("v", ("u", g + 1, g + 2)))]
    return [row("q", "g", ("q", None)), row("kv", "p", ("k", ("p", 0, 1)), ("v", ("p", 1, 2)))]


def _arguments(config: Settings) -> dict[str, Any]:
    hidden, heads = config.whole("hidden_size", 4096), config.whole("num_attention_heads", 32)
    config.one_of("hidden_act", {"silu": None, "swish": None}, "silu")
    config.only("partial_rotary_factor", 1.0)
    config.only("sliding_window", None)
    theta, scaling = _rope(config)
    return {
        "vocab_size": config.whole("vocab_size", 32000),
        "max_position_embeddings": config.whole("max_position_embeddings", 2048),
        "hidden_size": hidden,
        "num_hidden_layers": config.whole("num_hidden_layers", 32),
        "num_attention_heads": heads,
        "num_key_value_heads": config.divides(
            "num_key_value_heads", config.whole("num_key_value_heads", heads), "num_attention_heads", heads
        ),
        "intermediate_size": config.whole("intermediate_size", 11008),
        "head_dim": config.whole("head_dim", hidden // heads),
        "rms_norm_eps": config.real("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": config.flag("attention_bias", False),
        "mlp_bias": config.flag("mlp_bias", False),
        "attention_dropout": config.real("attention_dropout", 0.0),
        **{name: config.real(name, 0.0) for name in _OURS},
        "initializer_range": config.real("initializer_range", 0.02),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
    }


def _rope(config: Settings) -> tuple[float, dict[str, Any] | None]:
    """Return the base of the rotary positions and their scaling, as any version of `transformers` has written them."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    where, given = f"{config.path}: {key}", config.get(key)
    theta, scaling = config.get("rope_theta", 10000.0), given
    if isinstance(given, Mapping):
        theta = theta if given.get("rope_theta") is None else given["rope_theta"]
        scaling = {name: value for name, value in given.items() if name != "rope_theta"} or None
    return real(f"{config.path}: rope_theta", theta, above=True), rope_scaling(where, scaling)


def rope_scaling(where: str, given: Any) -> dict[str, Any] | None:
    """Return the scaling of rotary positions, "rope_type" and the numbers it needs; None without one.

    Parameters
    ----------
    where : str
        Whose they are, for messages.
    given : dict, optional
        As any version of `transformers` has it: "rope_type", or "type" in its place, and numbers.

    Raises
    ------
    ConfigError
        If it is no dict, its type is missing or not one of `ROPE`, or a number is missing or out of range.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is an object such as {{'rope_type': 'linear', 'factor': 2.0}}, not {given!r}")
    kind = given.get("type") if given.get("rope_type") is None else given["rope_type"]
    if kind is None:
        raise ConfigError(f"{where} has no rope_type, which is one of {', '.join(ROPE)}: {dict(given)}")
    if not isinstance(kind, str) or kind not in ROPE:
        raise ConfigError(f"{where} of type {kind!r} is not supported; it may be {', '.join(ROPE)}")
    if missing := [name for name in ROPE[kind] if given.get(name) is None]:
        raise ConfigError(f"{where} of type {kind!r} lacks {', '.join(missing)}")
    numbers: dict[str, Any] = {name: real(f"{where}: {name}", given[name], above=True) for name in ROPE[kind]}
    if kind == "llama3" and not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
        raise ConfigError(
            f"{where}: low_freq_factor is below high_freq_factor, not {numbers['low_freq_factor']} and "
            f"{numbers['high_freq_factor']}"
        )
    length = "original_max_position_embeddings"
    if length in numbers and numbers[length].is_integer():  # `transformers` takes no 8192.0
        numbers[length] = int(numbers[length])
    return {"rope_type": kind, **numbers} if numbers else None


def _settings(arguments: Arguments) -> dict[str, Any]:
    a = {name: value for name, value in arguments.items() if name != "packed" and (value or name not in _OURS)}
    rope = a.pop("rope_scaling")
    if rope is None:
        return {**a, "hidden_act": "silu", "rope_parameters": {"rope_theta": a["rope_theta"], "rope_type": "default"}}
    # Before version 5 of transformers it was rope_scaling, and without it they would compute without scaling.
    scaled = {"rope_theta": a["rope_theta"], **rope}
    return {**a, "hidden_act": "silu", "rope_parameters": scaled, "rope_scaling": scaled}


ARCHITECTURE = Architecture(
    "llama", "LlamaForCausalLM", "model.", _arguments, _settings, _table,
    ignored=(r".*rotary_emb\.inv_freq",),
)  # fmt: skip
