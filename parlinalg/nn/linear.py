"""The one linear layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor, ops
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Cut
from parlinalg.nn import init
from parlinalg.nn.checks import placed, whole
from parlinalg.nn.init import Declared, Initializer
from parlinalg.nn.module import Module
from parlinalg.plan import Plan
from parlinalg.schemes import Scheme, shared, spread_axes
from parlinalg.schemes import bias as bias_layout

Features = int | tuple[int, ...]


class Linear(Module):
    """`y = x w + b`, by any scheme: its plan says how the three are cut, and what moves.

    Parameters
    ----------
    in_features, out_features : int or tuple of int
        A tuple is a group of dims, cut on the first of them: attention's heads are `(heads, 3 * head_dim)`.
    scheme : Scheme or str
    grid : Grid
    kind : {"expand", "contract"}
        Into a block or out of it: which of the scheme's two plans.
    bias : bool
    dtype : dtype
        Of weight and bias.
    spread, shared : tuple of str
        Axes of the scheme's inside that cut the second dim of the group there in place of the first, or, of an
        "expand", none (`schemes.spread_axes`, `schemes.shared`).
    head : bool
        Whether it is the last layer of a model, whose outputs are scores; optimizers of hidden matrices, such as Muon,
        leave it to AdamW.
    weight_init, bias_init : callable
        See `parlinalg.nn.init`; by default uniform within ±1/√in_features, and zeros.
    seed, name : optional
        With a seed the layer is initialized at once, under this name; else with the model it is in.

    Attributes
    ----------
    weight : Parameter
        Shape [*in_features, *out_features], in the layout in which the plan's w rests.
    bias : Parameter or None
        Shape [*out_features], cut as y rests.
    keep : {"xw", "x", "w", ""}
        Which of input and weight stay gathered for the backward pass (`ops.matmul`): "xw", the default, moves the
        fewest words; "" keeps both as they rest, the least memory.

    Call it with a tensor of shape [*lead, *in_features], of any number of leading dims, in the layout in which the
    plan's x rests; the result has shape [*lead, *out_features] and the layout in which its y rests.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self, in_features: Features, out_features: Features, scheme: Scheme | str, grid: Grid, kind: str = "expand", *,
        bias: bool = True, spread: Cut = (), shared: Cut = (), head: bool = False, dtype: DTypeLike = np.float32,
        weight_init: Initializer | None = None, bias_init: Initializer = init.zeros, seed: int | None = None,
        name: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.spread, self.shared = spread, shared
        self.inputs, self.outputs = _dims("in", in_features), _dims("out", out_features)
        self.scheme, self.kind, self.keep = placed(self, scheme, grid), kind, "xw"
        plan = self.plan(2)
        fans = math.prod(self.inputs), math.prod(self.outputs)
        made = weight_init or init.Kaiming(gain=1 / math.sqrt(3))
        shape = (*self.inputs, *self.outputs)
        matrix = None if head else (0, len(self.inputs))
        self.weight = Declared(shape, plan.w, grid, dtype_named(dtype), made, *fans, matrix=matrix)  # type: ignore[assignment]
        if bias:
            self.bias = Declared(self.outputs, bias_layout(plan), grid, dtype_named(dtype), bias_init, *fans)  # type: ignore[assignment]
        else:
            self.bias = None
        if seed is not None:
            self.initialize(seed, name)

    def plan(self, leading: int) -> Plan:
        """Return the product's plan for inputs with this many leading dims."""
        plan = self.scheme.plan(self.kind, leading=leading, k=len(self.inputs), n=len(self.outputs))
        if self.spread:
            plan = spread_axes(plan, "n" if self.kind == "expand" else "k", self.spread)
        return shared(plan, self.shared) if self.shared else plan

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(x, "ndim"):
            raise TypeError(f"this layer takes a Tensor of shape [..., {_text(self.inputs)}], not a {type(x).__name__}")
        leading = x.ndim - len(self.inputs)
        if leading < 0 or x.shape[leading:] != self.inputs:
            raise LayoutError(f"this layer takes inputs of shape [..., {_text(self.inputs)}], not {x.shape}")
        return ops.matmul(x, self.weight, self.plan(leading), bias=self.bias, keep=self.keep)

    def from_torch(self, name: str, array: np.ndarray) -> np.ndarray:
        fans = math.prod(self.outputs), math.prod(self.inputs)
        if name == "bias" and array.shape == fans[:1]:
            return array.reshape(self.outputs)
        if name != "weight" or array.shape != fans:
            return array
        outs, dims = len(self.outputs), len(self.outputs) + len(self.inputs)
        return array.reshape(*self.outputs, *self.inputs).transpose(*range(outs, dims), *range(outs))

    @property
    def multiplications(self) -> int:
        return math.prod(self.inputs) * math.prod(self.outputs)

    def extra_repr(self) -> str:
        return f"{_text(self.inputs)} → {_text(self.outputs)}, {self.scheme.name}: {self.kind}"


def _dims(which: str, features: Any) -> tuple[int, ...]:
    given = features if isinstance(features, tuple) else (features,)
    return tuple(whole(f"a linear layer's {which}_features", n, None) for n in given)


def _text(dims: tuple[int, ...]) -> str:
    return ", ".join(map(str, dims))
