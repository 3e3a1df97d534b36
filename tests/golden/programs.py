"""The golden runs as a PyTorch program of its own: models, losses, clipping and optimizers are written out from the
papers' formulas, derivatives are PyTorch's.  Nothing of parlinalg is imported; random numbers are those of `counted`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.golden import counted
from tests.golden.settings import (
    ADAMW,
    CLIP,
    DROPPED,
    MODELS,
    OPTIMIZERS,
    SEED,
    SMOOTHING,
    STEPS,
    batch,
    digest,
    start,
)

Weights = dict[str, Tensor]


# ------------------------------------------------------------------ models
def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes."""
    kind, a = MODELS[model]
    if kind == "MLP":
        every = 3 if "dropout" in a else 2
        pairs = list(zip(a["sizes"], a["sizes"][1:], strict=False))
        return {
            f"{every * i}.{n}": s for i, (k, m) in enumerate(pairs) for n, s in (("weight", (k, m)), ("bias", (m,)))
        }
    h, f, heads = a["hidden_size"], a["intermediate_size"], a["num_attention_heads"]
    keys, e = a.get("num_key_value_heads", heads), a.get("head_dim", h // heads)
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (a["vocab_size"], h), "norm.weight": (h,)}
    if kind == "GPT":
        found |= {"positions.weight": (a["max_position_embeddings"], h), "norm.bias": (h,)}
    else:
        found["head.weight"] = (h, a["vocab_size"])
    for i in range(a["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {"norm1.weight": (h,), "norm2.weight": (h,)}
        if kind == "Llama":
            layer |= {"attention.q.weight": (h, keys, heads // keys, e), "attention.kv.weight": (h, keys, 2, e)}
            layer |= {"attention.out.weight": (keys, heads // keys, e, h)}
            layer |= {"mlp.0.weight": (h, f, 2), "mlp.2.weight": (f, h)}
        else:
            layer |= {"norm1.bias": (h,), "norm2.bias": (h,), "attention.qkv.weight": (h, heads, 3, e)}
            layer |= {"attention.qkv.bias": (heads, 3, e), "attention.out.weight": (heads, 1, e, h)}
            layer["attention.out.bias"] = (h,)
            if n := a.get("num_local_experts"):
                layer |= {"mlp.router": (h, n), "mlp.expand": (n, h, f), "mlp.expand_bias": (n, f)}
                layer |= {"mlp.contract": (n, f, h), "mlp.contract_bias": (n, h)}
                if m := a.get("shared_expert_intermediate_size"):
                    layer |= {"mlp.shared.0.weight": (h, m), "mlp.shared.0.bias": (m,), "mlp.shared_gate": (h, 1)}
                    layer |= {"mlp.shared.2.weight": (m, h), "mlp.shared.2.bias": (h,)}
            else:
                layer |= {"mlp.0.weight": (h, f), "mlp.0.bias": (f,), "mlp.2.weight": (f, h), "mlp.2.bias": (h,)}
        found |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    return found


class Dropout:
    """The factors of a step, by the names of the layers."""

    def __init__(self, step: int, p: float) -> None:
        self.step, self.p = step, p

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return x * self.factors(name, tuple(x.shape)) if self.p else x

    def factors(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(counted.dropout(SEED, name, self.step, self.p, shape), dtype=torch.float64).reshape(shape)


def layer_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(q: Tensor, k: Tensor, v: Tensor, drop: Dropout, name: str) -> Tensor:
    """Causal attention of q [b, s, heads of keys, g, e], and k and v [b, s, heads of keys, e]."""
    scores = torch.einsum("bqhge,bkhe->bhgqk", q, k) / math.sqrt(q.shape[-1])
    later = torch.triu(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool), 1)
    weights = torch.softmax(scores.masked_fill(later, -math.inf), -1)
    return torch.einsum("bhgqk,bkhe->bqhge", drop(name, weights), v)


def turned(x: Tensor) -> Tensor:
    """Rotary positions of x [b, s, …, e]: the first half of the features is turned with the second."""
    e = x.shape[-1]
    angles = torch.arange(x.shape[1]).double()[:, None] * 10000.0 ** (-torch.arange(0, e, 2).double() / e)
    cos, sin = (f(angles).reshape(x.shape[1], *[1] * (x.ndim - 3), e // 2) for f in (torch.cos, torch.sin))
    a, b = x[..., : e // 2], x[..., e // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def experts(x: Tensor, w: Weights, name: str, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A mixture of experts, token by token in the order of their choices and of the sequence; and its balance loss."""
    n, k = a["num_local_experts"], a.get("num_experts_per_tok", 2)
    rows, length, _ = x.shape
    capacity = min(length, math.ceil(k * length * a["capacity_factor"] / n - 1e-9))
    p = torch.softmax(x @ w[f"{name}.router"], -1)
    choices = torch.argsort(p, dim=-1, descending=True, stable=True)[..., :k]
    gates = torch.gather(p, -1, choices)
    gates = gates / gates.sum(-1, keepdim=True) if a.get("norm_topk_prob", k > 1) else gates
    taken = torch.zeros(rows, length, k, n, dtype=torch.float64)
    for b in range(rows):
        queues = [0] * n
        for j in range(k):
            for t in range(length):
                e = int(choices[b, t, j])
                queues[e] += 1
                taken[b, t, j, e] = queues[e] <= capacity
    inner = gelu_tanh(torch.einsum("bth,ehf->btef", x, w[f"{name}.expand"]) + w[f"{name}.expand_bias"])
    out = torch.einsum("btef,efh->bteh", inner, w[f"{name}.contract"]) + w[f"{name}.contract_bias"]
    added = torch.einsum("btj,btje,bteh->bth", gates, taken, out)
    if f"{name}.shared_gate" in w:
        inner = gelu_tanh(x @ w[f"{name}.shared.0.weight"] + w[f"{name}.shared.0.bias"])
        out = inner @ w[f"{name}.shared.2.weight"] + w[f"{name}.shared.2.bias"]
        added = added + torch.sigmoid(x @ w[f"{name}.shared_gate"]) * out
    shares = torch.nn.functional.one_hot(choices, n).double().mean((1, 2))
    return added, n * (shares * p.mean(1)).sum(-1).mean()


def language_model(model: str, w: Weights, ids: Tensor, drop: Dropout) -> tuple[Tensor, Tensor]:
    """The logits, and the sum of the balance losses."""
    kind, a = MODELS[model]
    norm, balance = (layer_norm if kind == "GPT" else rms_norm), torch.zeros((), dtype=torch.float64)
    x = w["embedding.weight"][ids]
    if kind == "GPT":
        x = x + w["positions.weight"][: ids.shape[1]]
    x = drop("dropout", x)
    for i in range(a["num_hidden_layers"]):
        at = f"blocks.{i}"
        y = norm(x, w, f"{at}.norm1")
        if kind == "GPT":
            qkv = torch.einsum("bsh,hkue->bskue", y, w[f"{at}.attention.qkv.weight"]) + w[f"{at}.attention.qkv.bias"]
            q, k, v = qkv[..., :1, :], qkv[..., 1, :], qkv[..., 2, :]
        else:
            q = turned(torch.einsum("bsh,hkge->bskge", y, w[f"{at}.attention.q.weight"]))
            kv = torch.einsum("bsh,hkue->bskue", y, w[f"{at}.attention.kv.weight"])
            k, v = turned(kv[..., 0, :]), kv[..., 1, :]
        seen = attend(q, k, v, drop, f"{at}.attention")
        y = torch.einsum("bskge,kgeh->bsh", seen, w[f"{at}.attention.out.weight"])
        x = x + drop(f"{at}.dropout1", y + w[f"{at}.attention.out.bias"] if kind == "GPT" else y)
        y = norm(x, w, f"{at}.norm2")
        if "num_local_experts" in a:
            y, term = experts(y, w, f"{at}.mlp", a)
            balance = balance + term
        elif kind == "GPT":
            y = gelu_tanh(y @ w[f"{at}.mlp.0.weight"] + w[f"{at}.mlp.0.bias"]) @ w[f"{at}.mlp.2.weight"]
            y = y + w[f"{at}.mlp.2.bias"]
        else:
            both = torch.einsum("bsh,hfu->bsfu", y, w[f"{at}.mlp.0.weight"])
            y = (both[..., 0] * torch.sigmoid(both[..., 0]) * both[..., 1]) @ w[f"{at}.mlp.2.weight"]
        x = x + drop(f"{at}.dropout2", y)
    x = norm(x, w, "norm")
    return x @ (w["embedding.weight"].T if kind == "GPT" else w["head.weight"]), balance


def perceptron(model: str, w: Weights, x: Tensor, drop: Dropout) -> Tensor:
    every = 3 if drop.p else 2
    for i in range(len(w) // 2):
        if i:
            x = drop(str(every * i - 1), gelu(x))
        x = x @ w[f"{every * i}.weight"] + w[f"{every * i}.bias"]
    return x


def loss(model: str, w: Weights, step: int) -> Tensor:
    """The mean loss of a step's batch."""
    x, y = (torch.tensor(a) for a in batch(model, step))
    drop, smoothing, more = Dropout(step, DROPPED if "dropout" in model else 0.0), 0.0, torch.zeros(())
    if model.startswith("mlp"):
        logits, smoothing = perceptron(model, w, x, drop), SMOOTHING
    else:
        logits, balance = language_model(model, w, x, drop)
        more = MODELS[model][1].get("router_aux_loss_coef", 0.0) * balance
    counts = y != -100
    log = torch.log_softmax(logits, -1)[counts]
    each = (1 - smoothing) * log[torch.arange(len(log)), y[counts]] + smoothing * log.mean(-1)
    return -each.sum() / counts.sum() + more


# ------------------------------------------------------------------ optimizers
class Optimizer:
    """One of the papers' optimizers on dicts of arrays."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.steps = options, 0
        self.m: dict[str, np.ndarray] = {}
        self.v: dict[str, np.ndarray] = {}

    def step(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        self.steps += 1
        for name, p in weights.items():
            p -= getattr(self, self.options["name"])(name, p, gradients[name])

    def moments(self, name: str, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.m[name] = 0.9 * self.m.get(name, 0.0) + 0.1 * g
        self.v[name] = 0.999 * self.v.get(name, 0.0) + 0.001 * g * g
        return self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)

    def adam(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        m, v = self.moments(name, g + self.options["weight_decay"] * p)
        return self.options["lr"] * m / (np.sqrt(v) + 1e-8)

    def adamw(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        m, v = self.moments(name, g)
        return self.options["lr"] * (self.options["weight_decay"] * p + m / (np.sqrt(v) + 1e-8))

    def lamb(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        m, v = self.moments(name, g)
        u = m / (np.sqrt(v) + 1e-6) + self.options["weight_decay"] * p
        a, b = np.linalg.norm(p), np.linalg.norm(u)
        return self.options["lr"] * (a / b if a and b else 1.0) * u

    def sgd(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        g = g + self.options["weight_decay"] * p
        self.m[name] = self.options["momentum"] * self.m.get(name, 0.0) + g
        return self.options["lr"] * (g + self.options["momentum"] * self.m[name])

    def lars(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        decay, a, b = self.options["weight_decay"], np.linalg.norm(p), np.linalg.norm(g)
        rate = self.options["trust"] * a / (b + decay * a) if a and b else 1.0
        m = self.options["momentum"] * self.m.get(name, 0.0) + self.options["lr"] * rate * (g + decay * p)
        self.m[name] = m
        return m


# ------------------------------------------------------------------ runs
def pulled(model: str, weights: dict[str, np.ndarray], step: int) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a step, and its gradient by every parameter."""
    w = {name: torch.tensor(p, requires_grad=True) for name, p in weights.items()}
    value = loss(model, w, step)
    value.backward()
    return value.item(), {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in w.items()}


def begun(model: str) -> dict[str, np.ndarray]:
    return {name: start(name, shape) for name, shape in shapes(model).items()}


def train(model: str, options: dict[str, Any], steps: int = STEPS) -> list[list[float]]:
    """The losses of all steps, and the norms of the gradients before they are clipped."""
    weights, optimizer, found = begun(model), Optimizer(options), []
    for step in range(steps):
        value, gradients = pulled(model, weights, step)
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        found.append([value, norm])
        optimizer.step(weights, {name: g * min(1.0, CLIP / (norm + 1e-6)) for name, g in gradients.items()})
    return found


def golden(model: str) -> dict[str, Any]:
    """All that a file says of a model."""
    torch.set_num_threads(1)
    _, gradients = pulled(model, begun(model), 0)
    chosen = OPTIMIZERS if model == "mlp" else {"adamw": ADAMW}
    return {
        "gradients": {name: digest(g) for name, g in gradients.items()},
        "steps": {name: train(model, options) for name, options in chosen.items()},
    }
