"""What the golden runs are of: models, their first values, batches; and how gradients are compared.

Both sides take it, the independent programs that made the files and the tests of the library, so that it knows neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

FOLDER = Path(__file__).parent
STEPS, SEED = 10, 5
ROWS, LENGTH, VOCABULARY, FEATURES, CLASSES = 7, 6, 11, 7, 5
DROPPED = 0.1
SMOOTHING = 0.1  # of the labels, for perceptrons
#: AdamW's rate and what its gradients are clipped to.
RATE, CLIP = 0.01, 0.4
AUXILIARY = 0.3
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH + 1, "hidden_size": 12, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 10}  # fmt: skip
_DROPS = {"embd_pdrop": DROPPED, "resid_pdrop": DROPPED, "attn_pdrop": DROPPED}
_EXPERTS = {"num_local_experts": 3, "router_aux_loss_coef": AUXILIARY, "capacity_factor": 1.25}
#: Names of our models, and their arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("MLP", {"sizes": (FEATURES, 9, 8, 6, CLASSES), "activation": "gelu"}),
    "mlp, dropout": ("MLP", {"sizes": (FEATURES, 9, 8, 6, CLASSES), "activation": "gelu", "dropout": DROPPED}),
    "gpt": ("GPT", _TEXT),
    "gpt, dropout": ("GPT", {**_TEXT, **_DROPS}),
    "experts": ("GPT", {**_TEXT, **_EXPERTS}),
    "experts, dropout": ("GPT", {**_TEXT, **_EXPERTS, **_DROPS, "num_experts_per_tok": 1}),
    "fine experts": ("GPT", {**_TEXT, **_EXPERTS, "num_local_experts": 7, "num_experts_per_tok": 4,
                             "norm_topk_prob": False, "shared_expert_intermediate_size": 6,
                             "shared_expert_gate": True}),
    "llama": ("Llama", {**_TEXT, "num_key_value_heads": 2, "head_dim": 6, "packed": False}),
}  # fmt: skip
#: Optimizers of the perceptron's runs, as a configuration names them; those of the other models are AdamW's.
ADAMW: dict[str, Any] = {"name": "adamw", "lr": RATE, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adam": {"name": "adam", "lr": RATE, "weight_decay": 0.1},
    "adamw": ADAMW,
    "lamb": {"name": "lamb", "lr": RATE, "weight_decay": 0.1},
    "lars": {"name": "lars", "lr": 1.0, "momentum": 0.9, "weight_decay": 0.1, "trust": 0.01},
}


def arguments(model: str) -> dict[str, Any]:
    return MODELS[model][1]


def start(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter's first values: even numbers of a generator that NumPy never changes, the same on every machine."""
    drawn = np.random.RandomState(crc32(name.encode())).random_sample(shape)
    centre = float(name.endswith(("norm.weight", "norm1.weight", "norm2.weight")))
    return centre + 0.8 * (drawn - 0.5)


def batch(model: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a step; some tokens have none."""
    rng = np.random.RandomState(step % 3)
    if model.startswith("mlp"):
        return 4 * rng.random_sample((ROWS, FEATURES)) - 2, rng.randint(0, CLASSES, ROWS)
    ids, targets = rng.randint(0, VOCABULARY, (2, ROWS, LENGTH))
    targets[rng.random_sample(targets.shape) < 0.2] = -100
    return ids, targets


def digest(gradient: np.ndarray) -> list[float]:
    """Numbers that tell one array from another: its norm, its sum, and its products with three rows of signs."""
    flat = np.asarray(gradient, np.float64).reshape(-1)
    signs = np.random.RandomState(flat.size).randint(0, 2, (3, flat.size)) * 2 - 1
    return [float(np.sqrt(flat @ flat)), float(flat.sum()), *map(float, signs @ flat)]


def differs(found: Mapping[str, np.ndarray], want: Mapping[str, list[float]], tol: float = 1e-12) -> list[str]:
    """The parameters whose gradients are not those of a file, to so much of their norm."""
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    wrong = []
    for name, numbers in want.items():
        mine = digest(found[name])
        bound = tol * numbers[0] * np.sqrt(max(1, found[name].size))
        if not all(abs(a - b) <= bound for a, b in zip(mine, numbers, strict=True)):
            wrong.append(f"{name}: {mine}, not {numbers}")
    return wrong


def load(name: str) -> dict[str, Any]:
    """A golden file."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found
