"""Embeddings of token ids and of their positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor, ops
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import init
from parlinalg.nn.checks import placed
from parlinalg.nn.init import Declared
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme
from parlinalg.sequence import token_positions


class Embedding(Module):
    """A vector for every id of a vocabulary: the scheme's contract plan with a one-hot input that is never built.

    Parameters
    ----------
    vocabulary, hidden : int
    scheme : Scheme or str
    grid : Grid
    std : float
        The standard deviation of the normal distribution the weights start from.
    dtype : dtype

    Attributes
    ----------
    weight : Parameter
        Shape [vocabulary, hidden], in the layout in which the contract plan's w rests.

    Call it with integer ids of shape [batch, sequence], cut as the leading dims of `scheme.inner`; the result has
    shape [batch, sequence, hidden] and the residual stream's layout.
    """

    weight: Parameter

    def __init__(
        self, vocabulary: int, hidden: int, scheme: Scheme | str, grid: Grid, *, std: float = 0.02,
        dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        scheme = placed(self, scheme, grid)
        self.vocabulary, self.hidden, self.scheme = vocabulary, hidden, scheme
        self.weight = Declared(  # type: ignore[assignment]
            (vocabulary, hidden),
            scheme.plan("contract").w,
            grid,
            dtype_named(dtype),
            init.Normal(std),
            vocabulary,
            hidden,
        )

    def forward(self, ids: Tensor | DistArray) -> Tensor:
        return ops.embedding(ids, self.weight, self.scheme.plan("contract", leading=ids.ndim))

    def logits(self, x: Tensor) -> Tensor:
        """Return `x tableᵀ`, the head tied to the table, from the residual stream [..., hidden].

        It goes to the inside of a block, [..., vocabulary] (Press and Wolf, "Using the output embedding to improve
        language models", 2017).
        """
        return ops.matmul(x, self.weight.T, self.scheme.plan("contract", leading=x.ndim - 1).grad_x)

    def extra_repr(self) -> str:
        return f"{self.vocabulary} → {self.hidden}, {self.scheme.name}"


class Positions(Module):
    """A learned vector for every position of a sequence, added to the residual stream.

    Attributes
    ----------
    weight : Parameter
        Shape [positions, hidden], cut as the residual stream's last dim.

    A sequence that is longer is refused with a ValueError that names both.
    """

    weight: Parameter

    def __init__(
        self, positions: int, hidden: int, scheme: Scheme | str, grid: Grid, *, std: float = 0.02,
        dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.positions, self.hidden = positions, hidden
        layout = Layout(None, placed(self, scheme, grid).residual.dims[-1])
        self.weight = Declared(
            (positions, hidden), layout, grid, dtype_named(dtype), init.Normal(std), positions, hidden
        )  # type: ignore[assignment]

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Return x with the vectors of positions `start`, `start + 1`, … added, or of those of `sequence_positions`."""
        now = token_positions()
        now.check(*x.shape[1::-1])
        return ops.add_positions(x, self.weight, start, now.within(x.shape[1], start))

    def extra_repr(self) -> str:
        return f"{self.positions} × {self.hidden}"
