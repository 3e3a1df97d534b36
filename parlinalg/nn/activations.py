"""Activations as modules."""

from __future__ import annotations

from collections.abc import Callable

from parlinalg.autograd import Tensor, ops
from parlinalg.errors import ConfigError
from parlinalg.nn.module import Module


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class GELU(Module):
    """x Φ(x), with Φ the normal distribution function; `approximate="tanh"` as in GPT-2."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, self.approximate)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class SiLU(Module):
    """x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class SwiGLU(Module):
    """silu(x[..., 0]) x[..., 1]: half as many elements come out as go in."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.swiglu(x)


_ACTIVATIONS: dict[str, Callable[[], Module]] = {
    "relu": ReLU, "gelu": GELU, "gelu_tanh": lambda: GELU("tanh"), "tanh": Tanh, "sigmoid": Sigmoid, "silu": SiLU,
    "swiglu": SwiGLU,
}  # fmt: skip


def activation(name: str) -> Module:
    """The activation called "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "silu" or "swiglu".

    Raises
    ------
    ConfigError
        If there is none of this name.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(f"there is no activation {name!r}; it is one of {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]()
