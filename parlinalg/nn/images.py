"""Convolution and pooling of images [batch, height, width, channels]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor, ops
from parlinalg.autograd.ops.images import images_layout
from parlinalg.backend.kernels.images import Band, KernelWindows, Pair
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.grid import Grid
from parlinalg.nn import init
from parlinalg.nn.checks import flag, placed, whole
from parlinalg.nn.init import Declared, Initializer
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme
from parlinalg.schemes import bias as bias_layout

Size = int | tuple[int, int]
Padding = str | Size


class Conv2d(Module):
    """A convolution of images, by any scheme: a product of their patches and a weight, as `Linear` is of pixels.

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size : int or (int, int)
        Height and width.
    scheme : Scheme or str
    grid : Grid
    kind : {"expand", "contract"}
        Into a block or out of it: which of the scheme's two plans.
    stride : int or (int, int)
    padding : int, (int, int), "valid" or "same"
        Rows above and below, and columns left and right, of zeros; "valid" is none, "same" so many that a convolution
        of stride 1 keeps height and width.
    dilation : int or (int, int)
        The distance of the kernel's elements on the image.
    groups : int
        Channels fall into so many groups, and of each group of features only one of them counts.  Weights of groups
        are at work whole in their channels.
    bias : bool
    dtype : dtype
        Of weight and bias.
    weight_init, bias_init : callable
        See `parlinalg.nn.init`; by default uniform within ±1/√(kernel's elements · channels of a group), and zeros.
    seed, name : optional
        With a seed the layer is initialized at once, under this name; else with the model it is in.

    Attributes
    ----------
    weight : Parameter
        Shape [*kernel_size, in_channels / groups, out_channels], in the layout in which the plan's w rests.  One of
        PyTorch's, [out, in / groups, *kernel], becomes this by `.transpose(2, 3, 1, 0)`.
    bias : Parameter or None
        Shape [out_channels], cut as the result's last dim.
    input_layout, output_layout : Layout
        The layouts of the images [batch, height, width, in_channels] it is called with, and of those it returns.
    keep : {"xw", "x", "w", ""}
        As of `Linear`.

    Images [batch, channels, height, width] become such as it takes by `x.transpose(0, 2, 3, 1)`.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, scheme: Scheme | str, grid: Grid,
        kind: str = "expand", *, stride: Size = 1, padding: Padding = 0, dilation: Size = 1, groups: int = 1,
        bias: bool = True, dtype: DTypeLike = np.float32, weight_init: Initializer | None = None,
        bias_init: Initializer = init.zeros, seed: int | None = None, name: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels = whole("a convolution's in_channels", in_channels)
        self.out_channels = whole("a convolution's out_channels", out_channels)
        self.groups = whole("a convolution's groups", groups)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ConfigError(
                f"a convolution from {in_channels} to {out_channels} channels does not fall into {groups} groups: both "
                "are multiples of the groups"
            )
        self.windows = _windows("a convolution", kernel_size, stride, padding, dilation)
        self.scheme, self.kind, self.keep = placed(self, scheme, grid), kind, "xw"
        self.plan = plan = self.scheme.convolution(kind)
        self.input_layout, self.output_layout = images_layout(plan.x), plan.y
        shape = (*self.windows.kernel, self.in_channels // self.groups, self.out_channels)
        area = math.prod(self.windows.kernel)
        fans = area * shape[2], area * self.out_channels // self.groups
        made = weight_init or init.Kaiming(gain=1 / math.sqrt(3))
        self.weight = Declared(shape, plan.w, grid, dtype_named(dtype), made, *fans, matrix=(0, 3))  # type: ignore[assignment]
        self.bias = None
        if flag("bias", bias):
            rest = bias_layout(plan)
            self.bias = Declared(shape[3:], rest, grid, dtype_named(dtype), bias_init, *fans)  # type: ignore[assignment]
        if seed is not None:
            self.initialize(seed, name)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(x, "ndim"):
            raise TypeError(
                f"this layer takes a Tensor of shape [batch, height, width, {self.in_channels}], not a "
                f"{type(x).__name__}"
            )
        if x.ndim != 4 or x.shape[3] != self.in_channels:
            turned = x.ndim == 4 and x.shape[1] == self.in_channels
            mend = "; mend [batch, channels, height, width] by x.transpose(0, 2, 3, 1)" if turned else ""
            raise LayoutError(
                f"this layer takes images of shape [batch, height, width, {self.in_channels}], not {x.shape}{mend}"
            )
        return ops.conv2d(x, self.weight, self.plan, self.windows, groups=self.groups, bias=self.bias, keep=self.keep)

    def from_torch(self, name: str, array: np.ndarray) -> np.ndarray:
        shape = (self.out_channels, self.in_channels // self.groups, *self.windows.kernel)
        return array.transpose(2, 3, 1, 0) if name == "weight" and array.shape == shape else array

    @property
    def multiplications(self) -> int:
        """Multiplications a pixel of the result."""
        return math.prod(self.windows.kernel) * self.in_channels // self.groups * self.out_channels

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels} → {self.out_channels}, kernel {self.windows.kernel}, stride {self.windows.stride}, "
            f"{self.scheme.name}: {self.kind}"
        )


class MaxPool2d(Module):
    """The largest element of every window of images, of any layout with whole height and width.

    Of equal elements the first has the gradient, as in PyTorch.

    Parameters
    ----------
    kernel_size : int or (int, int)
    stride : int or (int, int), optional
        By default the kernel's size.
    padding : int or (int, int)
        At most half of the kernel's size; it is less than any number.
    dilation : int or (int, int)
    """

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1
    ) -> None:  # fmt: skip
        super().__init__()
        self.windows = _windows(
            "max pooling", kernel_size, kernel_size if stride is None else stride, padding, dilation
        )
        _at_most_half("max pooling", self.windows)

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool2d(x, self.windows)

    def extra_repr(self) -> str:
        return f"{self.windows.kernel}, stride {self.windows.stride}"


class AvgPool2d(Module):
    """The mean of every window of images, of any layout with whole height and width.

    Parameters
    ----------
    kernel_size, stride, padding
        As of `MaxPool2d`; padding is of zeros.
    count_include_pad : bool
        Whether the elements of the padding count in the mean.
    """

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, count_include_pad: bool = True
    ) -> None:
        super().__init__()
        self.windows = _windows("average pooling", kernel_size, kernel_size if stride is None else stride, padding, 1)
        _at_most_half("average pooling", self.windows)
        self.counts_padding = flag("count_include_pad", count_include_pad)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and min(self.windows.sizes(x.shape[1], x.shape[2])) < 1:
            raise ValueError(
                f"average pooling: images of {x.shape[1]} × {x.shape[2]} are smaller than windows of "
                f"{self.windows.kernel}"
            )
        return ops.band_means(x, *(self._bands(dim, n) for dim, n in enumerate(x.shape[1:3])))

    def _bands(self, dim: int, n: int) -> list[Band]:
        kernel, stride, (before, _) = self.windows.kernel[dim], self.windows.stride[dim], self.windows.padding[dim]
        found = []
        for i in range(self.windows.size(dim, n)):
            start = i * stride - before
            first, stop = max(0, start), min(n, start + kernel)
            found.append(Band(first, stop, kernel if self.counts_padding else stop - first))
        return found

    def extra_repr(self) -> str:
        return f"{self.windows.kernel}, stride {self.windows.stride}"


class AdaptiveAvgPool2d(Module):
    """The means of so many rectangles that images fall into; of one, the default, the mean of the image.

    Parameters
    ----------
    output_size : int or (int, int)
        Rectangle i of n along a dim of m elements has elements ⌊i m / n⌋ to ⌈(i + 1) m / n⌉, as in PyTorch.
    """

    def __init__(self, output_size: Size = 1) -> None:
        super().__init__()
        self.sizes = _pair("adaptive pooling's output_size", output_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and not min(x.shape[1:3]):
            raise ValueError(f"adaptive pooling of images of shape {x.shape}, which have no pixels")
        return ops.band_means(x, *(_rectangles(m, n) for m, n in zip(x.shape[1:3], self.sizes, strict=False)))

    def extra_repr(self) -> str:
        return f"{self.sizes}"


def _rectangles(m: int, n: int) -> Sequence[Band]:
    edges = [(i * m // n, -(-(i + 1) * m // n)) for i in range(n)]
    return [Band(first, stop, stop - first) for first, stop in edges]


def _windows(what: str, kernel: Size, stride: Size, padding: Padding, dilation: Size) -> KernelWindows:
    """Return the windows of a layer, checked."""
    size = _pair(f"{what}'s kernel_size", kernel, 1)
    step, spread = _pair(f"{what}'s stride", stride, 1), _pair(f"{what}'s dilation", dilation, 1)
    if padding == "same":
        if step != (1, 1):
            raise ConfigError(f"{what} with padding='same' has stride 1, not {stride!r}: give the padding in numbers")
        reach = [d * (k - 1) for d, k in zip(spread, size, strict=True)]
        (top, left), (down, right) = (n // 2 for n in reach), (n - n // 2 for n in reach)
        return KernelWindows(size, step, ((top, down), (left, right)), spread)
    if isinstance(padding, str) and padding != "valid":
        raise ConfigError(f"{what}'s padding is a whole number, two of them, 'valid' or 'same', not {padding!r}")
    rows, columns = (0, 0) if isinstance(padding, str) else _pair(f"{what}'s padding", padding, 0)
    return KernelWindows(size, step, ((rows, rows), (columns, columns)), spread)


def _at_most_half(what: str, windows: KernelWindows) -> None:
    if any(2 * p > k for (p, _), k in zip(windows.padding, windows.kernel, strict=True)):
        raise ConfigError(
            f"{what} with windows of {windows.kernel} and padding of {tuple(p for p, _ in windows.padding)}: padding "
            "is at most half of a window"
        )


def _pair(name: str, given: Size, least: int) -> Pair:
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    if len(pair) != 2:
        raise ConfigError(f"{name} is a whole number, or two for height and width, not {given!r}")
    return whole(name, pair[0], least), whole(name, pair[1], least)
