"""Mixtral (Jiang et al., "Mixtral of experts", 2024): Llama's blocks with a mixture of experts."""

from __future__ import annotations

from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained import llama
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Row, places
from parlinalg.nn.pretrained.settings import Settings

_M, _O = "model.layers.{i}.block_sparse_moe.", "blocks.{i}.mlp."


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    a, experts = arguments, range(arguments["num_local_experts"])
    # x experts, h hidden, f an expert's inside, s gate and up
    sizes = {"x": len(experts), "h": a["hidden_size"], "f": a["intermediate_size"], "s": 2}
    rows = [
        Row(_O + "router", "h x", Part(_M + "gate.weight", "x h")),
        Row(
            _O + "expand", "x h f s",
            *(
                Part(f"{_M}experts.{j}.{name}.weight", "(x f s) h", (("x", j, j + 1), ("s", s, s + 1)))
                for j in experts
                for s, name in enumerate(("w1", "w3"))
            ),
        ),
        Row(
            _O + "contract", "x f h",
            *(Part(f"{_M}experts.{j}.w2.weight", "h (x f)", (("x", j, j + 1),)) for j in experts),
        ),
    ]  # fmt: skip
    plain = {name: held for name, held in llama.ARCHITECTURE.table(a).items() if ".mlp." not in name}
    return {**plain, **places(rows, sizes, a["num_hidden_layers"])}


def _arguments(config: Settings) -> dict[str, Any]:
    return {
        **llama.ARCHITECTURE.arguments(config),
        "num_local_experts": config.whole("num_local_experts", 8),
        "num_experts_per_tok": config.whole("num_experts_per_tok", 2),
        "norm_topk_prob": True,
        "router_aux_loss_coef": config.real("router_aux_loss_coef", 0.001),
        "capacity_factor": None,
    }


def _settings(arguments: Arguments) -> dict[str, Any]:
    if biased := [name for name in ("attention_bias", "mlp_bias") if arguments[name]]:
        raise ConfigError(f"`transformers` has no Mixtral with {biased[0]}=True: it has no biases")
    if arguments.get("shared_expert_intermediate_size"):
        raise ConfigError("`transformers` has no Mixtral with a shared expert")
    if not arguments["norm_topk_prob"]:
        raise ConfigError("`transformers` has no Mixtral with norm_topk_prob=False: its gates are divided by their sum")
    ours = ("attention_bias", "mlp_bias", "capacity_factor", "norm_topk_prob")
    return {name: value for name, value in llama.ARCHITECTURE.settings(arguments).items() if name not in ours}


ARCHITECTURE = Architecture(
    "mixtral", "MixtralForCausalLM", "model.", _arguments, _settings, _table,
    ignored=(r".*rotary_emb\.inv_freq",),
)  # fmt: skip
