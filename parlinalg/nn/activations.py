"""Activations as modules, each registered under the names by which models and configurations ask for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from parlinalg.autograd import Tensor, ops
from parlinalg.errors import ConfigError
from parlinalg.nn.module import Module

#: The registered activations by name.
ACTIVATIONS: dict[str, partial[Activation]] = {}
#: Hugging Face's names of activations that are registered under others.
ALIASES = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


class Activation(Module):
    """The base of activations: `forward` takes and gives a tensor; a subclass registers itself by `register`.

    Attributes
    ----------
    gated : bool
        Whether it takes pairs in the last dim, gates and values, and gives one element for each pair.
    """

    gated: ClassVar[bool] = False


def register(name: str, **options: Any) -> Callable[[type[Activation]], type[Activation]]:
    """Return a class decorator that registers an activation, made with these options, under a name."""

    def add(cls: type[Activation]) -> type[Activation]:
        ACTIVATIONS[name] = partial(cls, **options)
        return cls

    return add


@register("relu")
class ReLU(Activation):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


@register("gelu")
@register("gelu_tanh", approximate="tanh")
class GELU(Activation):
    """x Φ(x), with Φ the normal distribution function; `approximate="tanh"` as in GPT-2."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, self.approximate)


@register("tanh")
class Tanh(Activation):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


@register("sigmoid")
class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


@register("silu")
class SiLU(Activation):
    """x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


@register("swiglu")
class SwiGLU(Activation):
    """silu(x[..., 0]) x[..., 1]: half as many elements come out as go in."""

    gated = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.swiglu(x)


def activation(name: str) -> Activation:
    """Make the activation that is registered under a name: "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "silu" or
    "swiglu".

    Raises
    ------
    ConfigError
        If there is none of this name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"there is no activation {name!r}; it is one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]()


def hidden_acts() -> dict[str, str]:
    """Return the names of activations in models' settings (`hidden_act`), ours and Hugging Face's, each with ours.

    Gated ones are none of them.
    """
    plain = [name for name, make in ACTIVATIONS.items() if not make.func.gated]  # type: ignore[attr-defined]
    return {name: name for name in plain} | ALIASES
