"""Qwen2-MoE (Yang et al., "Qwen2 technical report", 2024): Llama's blocks with many small experts and a shared one."""

from __future__ import annotations

from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained import llama
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Row, places
from parlinalg.nn.pretrained.mixtral import MLP, experts, settings_of
from parlinalg.nn.pretrained.settings import Settings

_M = "model.layers.{i}.mlp."
#: What files that lack a key mean, as `transformers.Qwen2MoeConfig`.
_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 32768,
}  # fmt: skip


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    a = arguments
    # x experts, h hidden, f an expert's inside, n the shared one's, s gate and up, o its one score
    sizes = {"x": a["num_local_experts"], "h": a["hidden_size"], "f": a["intermediate_size"],
             "n": a["shared_expert_intermediate_size"], "s": 2, "o": 1}  # fmt: skip
    shared = _M + "shared_expert."
    rows = [
        *experts(a["num_local_experts"], _M, "gate_proj", "up_proj", "down_proj"),
        Row(
            MLP + "shared.0.weight", "h n s",
            Part(shared + "gate_proj.weight", "(n s) h", ("s", 0, 1)),
            Part(shared + "up_proj.weight", "(n s) h", ("s", 1, 2)),
        ),
        Row(MLP + "shared.2.weight", "n h", Part(shared + "down_proj.weight", "h n")),
        Row(MLP + "shared_gate", "h o", Part(_M + "shared_expert_gate.weight", "o h")),
    ]  # fmt: skip
    plain = {name: held for name, held in llama.ARCHITECTURE.table(a).items() if ".mlp." not in name}
    return {**plain, **places(rows, sizes, a["num_hidden_layers"])}


def _arguments(config: Settings) -> dict[str, Any]:
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    config.only("use_sliding_window", False)  # the width of the window then says nothing
    values = {**_DEFAULTS, **config.values, "intermediate_size": config.whole("moe_intermediate_size", 1408)}
    values.pop("sliding_window", None)
    return {
        **llama.ARCHITECTURE.arguments(Settings(values, config.path)),
        "qkv_bias": config.flag("qkv_bias", True),
        "num_local_experts": config.whole("num_experts", 60),
        "num_experts_per_tok": config.whole("num_experts_per_tok", 4),
        "norm_topk_prob": config.flag("norm_topk_prob", False),
        "shared_expert_intermediate_size": config.whole("shared_expert_intermediate_size", 5632),
        "shared_expert_gate": True,
        "router_aux_loss_coef": config.real("router_aux_loss_coef", 0.001),
        "capacity_factor": None,
    }


def _settings(arguments: Arguments) -> dict[str, Any]:
    if not arguments.get("shared_expert_gate"):
        raise ConfigError("`transformers` has no Qwen2-MoE without a shared expert, or with one that has no gate")
    found = settings_of("Qwen2-MoE", arguments, "attention_bias", "mlp_bias")
    del found["shared_expert_gate"]
    inside, number = found.pop("intermediate_size"), found.pop("num_local_experts")
    return {
        **found, "qkv_bias": arguments.get("qkv_bias", False), "num_experts": number, "moe_intermediate_size": inside,
        "intermediate_size": inside, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
    }  # fmt: skip


ARCHITECTURE = Architecture(
    "qwen2_moe", "Qwen2MoeForCausalLM", "model.", _arguments, _settings, _table,
    ignored=(r".*rotary_emb\.inv_freq",),
)  # fmt: skip
