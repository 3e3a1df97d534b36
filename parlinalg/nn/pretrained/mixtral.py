"""Mixtral (Jiang et al., "Mixtral of experts", 2024): Llama's blocks with a mixture of experts."""

from __future__ import annotations

from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained import llama
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Part, Place, Row, places
from parlinalg.nn.pretrained.settings import Settings

#: What the names of the parameters of a layer's perceptron begin with.
MLP = "blocks.{i}.mlp."


def _table(arguments: Arguments) -> dict[str, list[Place]]:
    a = arguments
    # x experts, h hidden, f an expert's inside, s gate and up
    sizes = {"x": a["num_local_experts"], "h": a["hidden_size"], "f": a["intermediate_size"], "s": 2}
    plain = {name: held for name, held in llama.ARCHITECTURE.table(a).items() if ".mlp." not in name}
    rows = experts(a["num_local_experts"], "model.layers.{i}.block_sparse_moe.", "w1", "w3", "w2")
    return {**plain, **places(rows, sizes, a["num_hidden_layers"])}


def experts(number: int, at: str, gate: str, up: str, down: str) -> list[Row]:
    """Return the rows of a router and its experts, whose tensors begin with `at` and are called so."""

    def tensor(j: int, name: str) -> str:
        return f"{at}experts.{j}.{name}.weight"

    return [
        Row(MLP + "router", "h x", Part(at + "gate.weight", "x h")),
        Row(
            MLP + "expand", "x h f s",
            *(
                Part(tensor(j, name), "(x f s) h", (("x", j, j + 1), ("s", s, s + 1)))
                for j in range(number)
                for s, name in enumerate((gate, up))
            ),
        ),
        Row(
            MLP + "contract", "x f h",
            *(Part(tensor(j, down), "h (x f)", (("x", j, j + 1),)) for j in range(number)),
        ),
    ]  # fmt: skip


def _arguments(config: Settings) -> dict[str, Any]:
    return {
        **llama.ARCHITECTURE.arguments(config),
        "num_local_experts": config.whole("num_local_experts", 8),
        "num_experts_per_tok": config.whole("num_experts_per_tok", 2),
        "norm_topk_prob": True,
        "router_aux_loss_coef": config.real("router_aux_loss_coef", 0.001),
        "capacity_factor": None,
    }


def settings_of(model: str, arguments: Arguments, *biases: str) -> dict[str, Any]:
    """Return the settings that a model with experts shares with Llama's; it has none of these biases."""
    if biased := [name for name in biases if arguments.get(name)]:
        raise ConfigError(f"`transformers` has no {model} with {biased[0]}=True: it has no such biases")
    ours = ("attention_bias", "qkv_bias", "mlp_bias", "capacity_factor")
    return {name: value for name, value in llama.ARCHITECTURE.settings(arguments).items() if name not in ours}


def _settings(arguments: Arguments) -> dict[str, Any]:
    if arguments.get("shared_expert_intermediate_size"):
        raise ConfigError("`transformers` has no Mixtral with a shared expert")
    if not arguments["norm_topk_prob"]:
        raise ConfigError("`transformers` has no Mixtral with norm_topk_prob=False: its gates are divided by their sum")
    found = settings_of("Mixtral", arguments, "attention_bias", "qkv_bias", "mlp_bias")
    del found["norm_topk_prob"]
    return found


ARCHITECTURE = Architecture(
    "mixtral", "MixtralForCausalLM", "model.", _arguments, _settings, _table,
    ignored=(r".*rotary_emb\.inv_freq",),
)  # fmt: skip
