"""What encoders of `transformers` compute: run on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.nn.pretrained.tensorfile import Writer

BATCH, SEQUENCE = 3, 7
COMMON = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20,
          "initializer_range": 0.3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**COMMON, "vocab_size": 11, "max_position_embeddings": 9, "type_vocab_size": 2},
    "vit": {**COMMON, "image_size": (6, 9), "patch_size": (3, 3), "num_channels": 2, "num_labels": 5},
}


def inputs(kind: str) -> dict[str, np.ndarray]:
    """What the models are called with, and what their result is multiplied with to have a loss."""
    rng = np.random.default_rng(0)
    if kind == "vit":
        return {"pixel_values": rng.normal(size=(BATCH, 2, 6, 9)), "weights": rng.normal(size=(BATCH, 5))}
    return {
        "input_ids": rng.integers(0, 11, (BATCH, SEQUENCE)),
        "token_type_ids": rng.integers(0, 2, (BATCH, SEQUENCE)),
        "attention_mask": (np.arange(SEQUENCE) < [[7], [3], [5]]).astype(np.int64),
        "weights": rng.normal(size=(BATCH, SEQUENCE, 24)),
    }


def make(torch: Any, kind: str, path: Path) -> None:
    """Leave a model's weights in a file at `path`, and beside it what it computes."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig if kind == "bert" else transformers.ViTConfig
    model = transformers.BertModel if kind == "bert" else transformers.ViTForImageClassification
    options = {"add_pooling_layer": False} if kind == "bert" else {}
    made = model(config(**ENCODERS[kind], attn_implementation="sdpa", pad_token_id=None), **options).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # norms and biases start from ones and zeros, which would hide a wrong place
                parameter.add_(0.3 * torch.randn_like(parameter))
    state = {name: p.detach().numpy() for name, p in made.named_parameters()}
    writer = Writer(path, {n: a.shape for n, a in state.items()}, {n: a.dtype for n, a in state.items()})
    for name, array in state.items():
        writer.write(name, array)
    writer.close()
    writer.appear()
    given = {name: torch.tensor(a) for name, a in inputs(kind).items()}
    weights = given.pop("weights")
    output = made(**given)
    result = output.last_hidden_state if kind == "bert" else output.logits
    (result * weights).sum().backward()
    gradients = {f"grad {name}": p.grad.numpy() for name, p in made.named_parameters()}
    np.savez(path.with_suffix(".npz"), result=result.detach().numpy(), **gradients)
