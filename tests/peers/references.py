"""What `transformers` computes: run on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

BATCH, SEQUENCE, NEW = 3, 7, 6
SMALL = {"vocab_size": 11, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa"}
GPT2 = {**SMALL, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "initializer_range": 0.3}  # fmt: skip
LLAMA = {**SMALL, "max_position_embeddings": 16, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "intermediate_size": 20, "initializer_range": 0.3}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}  # fmt: skip
#: For each case our model, the names of the configuration and of the model of `transformers`, and its settings.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": ("GPT", "GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2 untied": (
        "GPT", "GPT2Config", "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 20, "activation_function": "gelu"},
    ),
    "llama": ("Llama", "LlamaConfig", "LlamaForCausalLM", LLAMA),
    "llama tied": (
        "Llama", "LlamaConfig", "LlamaForCausalLM",
        {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 6, "head_dim": 6, "rope_parameters": LLAMA3},
    ),
    "llama with biases": (
        "Llama", "LlamaConfig", "LlamaForCausalLM",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_parameters":
         {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
    ),
}  # fmt: skip


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and targets."""
    ids = np.random.default_rng(0).integers(0, 11, (BATCH, SEQUENCE + 1))
    return ids[:, :-1], ids[:, 1:]


def make(torch: Any, case: str, folder: Path) -> None:
    """Leave a model in `folder`, and beside it what it computes in float32 and float64."""
    import transformers

    _, config, model, settings = CASES[case]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:  # norms and biases start from ones and zeros, which would hide a wrong place
                parameter.add_(0.3 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    for dtype in ("float32", "float64"):
        exact = in_dtype(torch, made, dtype)
        np.savez(folder.with_suffix(f".{dtype}.npz"), **computed(torch, exact))


def in_dtype(torch: Any, model: Any, dtype: str) -> Any:
    """The model in this dtype.  `transformers` has norms and angles in float32 in any dtype: in float64 they follow."""
    if dtype == "float32":
        return model
    model = model.double()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = _norm(torch, module)
        if type(module).__name__ == "LlamaRotaryEmbedding":
            module.forward = _rotary(torch, module)
    return model


def _norm(torch: Any, norm: Any) -> Any:
    return lambda x: norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def _rotary(torch: Any, module: Any) -> Any:
    from parlinalg.autograd.ops import rotary_frequencies

    rope = module.config.rope_parameters
    scale = {"default": None}.get(rope["rope_type"], rope)
    angles = torch.tensor(scaled(rotary_frequencies(module.config.head_dim, rope["rope_theta"]), scale))

    def forward(x: Any, position_ids: Any) -> Any:
        turned = position_ids[..., None].double() * angles
        turned = torch.cat([turned, turned], -1)
        return turned.cos(), turned.sin()

    return forward


def scaled(angles: np.ndarray, rope: dict[str, Any] | None) -> np.ndarray:
    """Angles of scaled rotary positions, as Llama 3.1 has them."""
    if rope is None:
        return angles
    if rope["rope_type"] == "linear":
        return angles / rope["factor"]
    wavelength, length = 2 * np.pi / angles, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((length / wavelength - low) / (high - low), 0, 1)
    return (1 - smooth) * angles / rope["factor"] + smooth * angles


def computed(torch: Any, model: Any) -> dict[str, np.ndarray]:
    """Logits, the loss's gradients, and what greedy generation writes."""
    ids, targets = (torch.tensor(a) for a in inputs())
    model.zero_grad()
    logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = {f"grad {name}": p.grad.numpy().copy() for name, p in model.named_parameters()}
    written = model.generate(ids[:, :4], max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return {"logits": logits.detach().numpy(), "written": written.numpy(), **found}
