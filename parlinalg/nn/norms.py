"""Norms over the hidden dim."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor, ops
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import init
from parlinalg.nn.checks import real
from parlinalg.nn.declared import Declared
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme


class LayerNorm(Module):
    """`(x - mean) / √(variance + eps) weight + bias` over the hidden dim, of any scheme's residual stream.

    Parameters
    ----------
    hidden : int
    scheme : Scheme
    grid : Grid
    eps : float
    bias : bool
    dtype : dtype

    Attributes
    ----------
    weight : Parameter
        Shape [hidden], cut as the residual stream's last dim; from ones.
    bias : Parameter or None
        The same, from zeros.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self, hidden: int, scheme: Scheme, grid: Grid, eps: float = 1e-5, *, bias: bool = True,
        dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden, self.eps = hidden, real("a norm's eps", eps)
        layout = Layout(scheme.residual.dims[-1])
        self.weight = Declared((hidden,), layout, grid, dtype_named(dtype), init.ones)  # type: ignore[assignment]
        if bias:
            self.bias = Declared((hidden,), layout, grid, dtype_named(dtype), init.zeros)  # type: ignore[assignment]
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"


class RMSNorm(Module):
    """`x / √(mean of x² + eps) weight` over the hidden dim, of any scheme's residual stream.

    Attributes
    ----------
    weight : Parameter
        Shape [hidden], cut as the residual stream's last dim; from ones.
    """

    weight: Parameter

    def __init__(
        self, hidden: int, scheme: Scheme, grid: Grid, eps: float = 1e-6, *, dtype: DTypeLike = np.float32
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, real("a norm's eps", eps)
        layout = Layout(scheme.residual.dims[-1])
        self.weight = Declared((hidden,), layout, grid, dtype_named(dtype), init.ones)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"
