"""Norms over the hidden dim, and over the batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.autograd import Buffer, Parameter, Tensor, ops
from parlinalg.autograd.tape import walking
from parlinalg.backend.halves import work_dtype
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import init
from parlinalg.nn.checks import flag, placed, real, whole
from parlinalg.nn.init import Declared
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme


class LayerNorm(Module):
    """`(x - mean) / √(variance + eps) weight + bias` over the hidden dim, of any scheme's residual stream.

    Parameters
    ----------
    hidden : int
    scheme : Scheme or str
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
        self, hidden: int, scheme: Scheme | str, grid: Grid, eps: float = 1e-5, *, bias: bool = True,
        dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden, self.eps = hidden, real("a norm's eps", eps)
        layout = Layout(placed(self, scheme, grid).residual.dims[-1])
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
        self, hidden: int, scheme: Scheme | str, grid: Grid, eps: float = 1e-6, *, dtype: DTypeLike = np.float32
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, real("a norm's eps", eps)
        layout = Layout(placed(self, scheme, grid).residual.dims[-1])
        self.weight = Declared((hidden,), layout, grid, dtype_named(dtype), init.ones)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"


class BatchNorm1d(Module):
    """`(x - mean) / √(variance + eps) weight + bias` by channel, the last dim, over all other dims (Ioffe and Szegedy,
    "Batch normalization", 2015).

    In training, mean and variance are those of the whole batch, over all ranks that have parts of it: what PyTorch
    calls SyncBatchNorm.  Each microbatch has its own, as in PyTorch.  In `eval()` they are running means of those of
    training.

    Parameters
    ----------
    channels : int
    scheme : Scheme or str
    grid : Grid
    kind : {"contract", "expand"}
        The kind of the layer before it, whose output it takes: the residual stream, or what is inside of a block.
    eps : float
    momentum : float or None
        What a batch counts in the running means; None: as much as each batch before it.
    affine : bool
        Whether there are a weight and a bias.
    track_running_stats : bool
        Whether there are running means; if not, mean and variance are always those of the batch.
    dtype : dtype
        Of weight and bias; running means have at least 32 bits.

    Attributes
    ----------
    weight, bias : Parameter or None
        Shape [channels], cut as the last dim of what it takes; from ones and zeros.
    running_mean, running_var : Buffer or None
        The same, from zeros and ones.
    num_batches_tracked : Buffer or None
        Shape [], int64.

    Call it with [batch, channels] or [batch, length, channels].

    Raises
    ------
    ValueError
        When it is called in training with one value a channel.
    """

    weight: Parameter | None
    bias: Parameter | None
    running_mean: Buffer | None
    running_var: Buffer | None
    num_batches_tracked: Buffer | None
    dims: tuple[int, ...] = (2, 3)
    shapes = "[batch, channels] or [batch, length, channels]"

    def __init__(
        self, channels: int, scheme: Scheme | str, grid: Grid, kind: str = "contract", *, eps: float = 1e-5,
        momentum: float | None = 0.1, affine: bool = True, track_running_stats: bool = True,
        dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.channels, self.eps = whole("a batch norm's channels", channels), real("a norm's eps", eps)
        self.momentum = None if momentum is None else real("a batch norm's momentum", momentum)
        self.tracks = flag("track_running_stats", track_running_stats)
        self.kind = kind
        layout, given = Layout(placed(self, scheme, grid).images(kind).dims[-1]), dtype_named(dtype)
        shape, wide = (self.channels,), work_dtype(given)
        self.weight = self.bias = self.running_mean = self.running_var = self.num_batches_tracked = None
        if flag("affine", affine):
            self.weight = Declared(shape, layout, grid, given, init.ones)  # type: ignore[assignment]
            self.bias = Declared(shape, layout, grid, given, init.zeros)  # type: ignore[assignment]
        if self.tracks:
            self.running_mean = Declared(shape, layout, grid, wide, init.zeros, buffer=True)  # type: ignore[assignment]
            self.running_var = Declared(shape, layout, grid, wide, init.ones, buffer=True)  # type: ignore[assignment]
            count = Declared((), Layout(), grid, np.dtype(np.int64), init.zeros, buffer=True)
            self.num_batches_tracked = count  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in self.dims or x.shape[-1] != self.channels:
            raise LayoutError(
                f"this batch norm takes {self.shapes} with {self.channels} channels, not an array of shape {x.shape}; "
                "channels are the last dim"
            )
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None and walking() is None:
            self.num_batches_tracked.block[...] += 1
        if self.training and self.num_batches_tracked is not None and momentum is None:
            momentum = 1 / self.num_batches_tracked.block
        return ops.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training or not self.tracks,
            momentum, self.eps,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm2d(BatchNorm1d):
    """The same for images [batch, height, width, channels]; see `BatchNorm1d`."""

    dims = (4,)
    shapes = "images [batch, height, width, channels]"
