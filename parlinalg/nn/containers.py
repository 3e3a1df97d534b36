"""Modules made of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn.activations import activation as activation_module
from parlinalg.nn.checks import whole
from parlinalg.nn.declared import Initializer
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.layer import Layer
from parlinalg.nn.linear import Linear
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme


class Sequential(Module):
    """Modules one after the other, named "0", "1", …"""

    def __init__(self, *modules: Module) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            setattr(self, str(i), module)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> Module:
        return list(self._modules.values())[index]

    def layers(self) -> list[Layer]:
        """The modules as the layers that a pipeline cuts."""
        return [Layer(name, module, (module,)) for name, module in self._modules.items()]


class MLP(Sequential):
    """A perceptron: linear layers, alternately into a block and out of it, with an activation between two.

    Parameters
    ----------
    sizes : sequence of int
        The features of the input, of each hidden layer, and of the output.
    scheme : Scheme
    grid : Grid
    activation : {"relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "silu", "swiglu"}
        "gelu_tanh" is GPT-2's approximation; with "swiglu" a hidden layer of m features puts out (m, 2): gates and
        values.
    dropout : float
        The probability of dropping an element after an activation.
    bias : bool
    dtype : dtype
    weight_init : callable, optional
        As of `Linear`.
    seed : int, optional
        With a seed the model is initialized at once; else by `initialize(seed)`.

    The input is cut as the scheme's residual stream, and so is the output of an even number of layers; that of an odd
    number is cut as the inside of a block (`output_layout`).
    """

    def __init__(
        self, sizes: Sequence[int], scheme: Scheme, grid: Grid, activation: str = "relu", *, dropout: float = 0.0,
        bias: bool = True, dtype: DTypeLike = np.float32, weight_init: Initializer | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        if len(sizes) < 2:
            raise ConfigError(f"an MLP needs the sizes of its input and its output at least, not {list(sizes)}")
        sizes = [whole("a size of an MLP", n) for n in sizes]
        layers: list[Module] = []
        for i, (n, m) in enumerate(pairwise(sizes)):
            if i:
                layers.append(activation_module(activation))
                if dropout:
                    layers.append(Dropout(dropout))
            kind = "contract" if i % 2 else "expand"
            out = (m, 2) if activation == "swiglu" and i < len(sizes) - 2 else m
            layers.append(Linear(n, out, scheme, grid, kind, bias=bias, dtype=dtype, weight_init=weight_init))
        super().__init__(*layers)
        self.scheme = scheme
        self.products = len(sizes) - 1
        if seed is not None:
            self.initialize(seed)

    def input_layout(self, ndim: int = 2) -> Layout:
        """The layout of the input, of `ndim` dims."""
        return self.scheme.for_dims(ndim).residual

    def output_layout(self, ndim: int = 2) -> Layout:
        """The layout of the output."""
        scheme = self.scheme.for_dims(ndim)
        return scheme.inner if self.products % 2 else scheme.residual
