"""The base of all transformers: settings under Hugging Face's names, layouts of inputs, layers, and FLOPs."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import init
from parlinalg.nn.activations import hidden_acts
from parlinalg.nn.checks import flag, placed, real, whole
from parlinalg.nn.containers import Sequential
from parlinalg.nn.init import Declared, Initializer
from parlinalg.nn.layer import Layer
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme

DTYPES = ("float64", "float32", "float16", "bfloat16")


class Transformer(Module):
    """A model: something that embeds its inputs, blocks, and what is made of the residual stream after them.

    Attributes
    ----------
    scheme : Scheme
    grid : Grid
    config : dict
        The model's arguments, under Hugging Face's names.
    blocks : Sequential
        The blocks, named "blocks.0", "blocks.1", …
    ids_layout : Layout
        In which token ids, [batch, sequence], are to rest.
    targets_layout : Layout
        In which targets are to rest: as the leading dims of what the model gives.
    """

    scheme: Scheme
    grid: Grid
    config: dict[str, Any]
    blocks: Sequential
    dtype: np.dtype[Any]

    def __init__(
        self, config: Mapping[str, Any], unknown: Mapping[str, Any], scheme: Scheme | str, grid: Grid, dtype: DTypeLike
    ) -> None:  # fmt: skip
        super().__init__()
        refuse(type(self), unknown)
        scheme = placed(self, scheme, grid)
        self.config = checked(type(self).__name__, config)
        self.scheme, self.grid = scheme, grid
        self.dtype = floating(type(self).__name__, dtype)
        self.ids_layout = Layout(*scheme.inner.dims[:2])
        self.targets_layout = self.ids_layout

    # ------------------------------------------------------------------ layers
    def layers(self) -> list[Layer]:
        """Return the layers in their order: the model is one after the other."""
        first, last = self.ends()
        blocks = [Layer(f"blocks.{i}", block, (block,)) for i, block in enumerate(self.blocks)]
        return [first, *blocks, last]

    def ends(self) -> tuple[Layer, Layer]:
        """Return the layers before and after the blocks."""
        raise NotImplementedError(f"{type(self).__name__} defines no ends()")

    # ------------------------------------------------------------------ counts
    def flops(self, batch: int, sequence: int) -> int:
        """Return the floating-point operations of a forward and backward pass over a batch, on all ranks together.

        Those of the products, and of all pairs of queries and keys, masked or not, as is usual (Chowdhery et al.,
        "PaLM", 2022, appendix B); what is computed again does not count.
        """
        return sum(self.layer_flops(batch, sequence))

    def layer_flops(self, batch: int, sequence: int) -> list[int]:
        """Return what `flops` does, of each of the `layers`."""
        pairs = 2 * sequence * self.config["num_attention_heads"] * self.head_dim
        first, last = self.outside(batch, sequence)
        linear = [sum(m.multiplications for m in block.modules()) for block in self.blocks]
        blocks = [batch * sequence * (n + pairs) for n in linear]
        return [6 * n for n in (first, *blocks, last)]

    def outside(self, batch: int, sequence: int) -> tuple[int, int]:
        """Return the multiplications of the forward pass before the blocks, and after them: of the head."""
        return 0, batch * sequence * int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        config = self.config
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.config.items())


# ------------------------------------------------------------------ initial values
def spread(std: float, layers: int = 0) -> Callable[[str, Declared], Initializer | None]:
    """Return the rule of GPT-2's initial weights: normal with this standard deviation.

    With `layers`, what is added to the residual stream is divided by √(2 layers), so that its variance does not grow
    with them (Radford et al., "Language models are unsupervised multitask learners", 2019).  Biases and norms stay.
    """

    def rule(name: str, declared: Declared) -> Initializer | None:
        if isinstance(declared.init, init.Constant):
            return None
        added = layers and name.endswith(
            ("attention.out.weight", "mlp.2.weight", "mlp.contract", "mlp.shared.2.weight")
        )
        return init.Normal(std / math.sqrt(2 * layers) if added else std)

    return rule


# ------------------------------------------------------------------ errors
def refuse(model: type[Module], unknown: Mapping[str, Any]) -> None:
    """Raise a ConfigError about arguments that the model does not have."""
    if unknown:
        has = [p for p in inspect.signature(model).parameters if p != "unknown"]
        near = {u: difflib.get_close_matches(u, has, 1) for u in unknown}
        meant = [f"{u}: {n[0]} perhaps" for u, n in near.items() if n]
        raise ConfigError(
            f"{model.__name__} has no argument {', '.join(map(repr, unknown))}"
            f"{f' ({chr(44).join(meant)})' if meant else ''}; it has {', '.join(has)}"
        )


def checked(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as plain numbers.

    Raises
    ------
    ConfigError
        Unless sizes are whole numbers above 0, the other numbers and flags are what they can be, and heads divide what
        they are to divide.
    """
    config = {name: _argument(f"{model}: {name}", name, value) for name, value in config.items()}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config and hidden % heads:
        raise ConfigError(
            f"{model}: hidden_size={hidden} does not fall into num_attention_heads={heads} heads; their number may be "
            f"{', '.join(str(n) for n in range(1, hidden + 1) if hidden % n == 0)}"
        )
    groups = config.get("num_key_value_heads", heads)
    if heads % groups:
        raise ConfigError(
            f"{model}: num_attention_heads={heads} does not fall into num_key_value_heads={groups} groups; their "
            f"number may be {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )
    return config


def _argument(what: str, name: str, value: Any) -> Any:
    """Return an argument as a plain number, by what its name says it is."""
    if name.startswith("num_") or name.endswith(("_size", "position_embeddings", "head_dim")):
        return tuple(whole(what, n) for n in value) if isinstance(value, tuple) else whole(what, value)
    if name.endswith(("_pdrop", "_dropout", "_dropout_prob")):
        return real(what, value, below=1)
    if name.endswith(("_eps", "_coef")) or name == "initializer_range":
        return real(what, value)
    if name.endswith("_bias") or name in ("tie_word_embeddings", "packed", "norm_topk_prob", "shared_expert_gate"):
        return flag(what, value)
    return value


def check_ids(ids: Any) -> None:
    """Raise a ValueError unless token ids are [batch, sequence]."""
    if len(ids.shape) != 2:
        raise ValueError(f"token ids have the shape [batch, sequence], not {tuple(ids.shape)}")


def floating(model: str, dtype: DTypeLike) -> np.dtype[Any]:
    """Return a model's dtype, by its name or as it is."""
    try:
        found = dtype_named(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.name not in DTYPES:
        raise ConfigError(f"{model}: dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    return found


def activation(model: str, name: str) -> str:
    """Return the name under which an activation is registered, from it or from Hugging Face's name."""
    names = hidden_acts()
    if not isinstance(name, str) or name not in names:
        raise ConfigError(f"{model}: hidden_act is one of {', '.join(map(repr, names))}, not {name!r}")
    return names[name]
