"""ResNet (He et al., "Deep residual learning for image recognition", 2016), with torchvision's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Tensor, as_tensor, ops
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import init
from parlinalg.nn.checks import flag, placed, whole
from parlinalg.nn.containers import Sequential
from parlinalg.nn.images import AdaptiveAvgPool2d, Conv2d, MaxPool2d
from parlinalg.nn.layer import Layer
from parlinalg.nn.linear import Linear
from parlinalg.nn.module import Module
from parlinalg.nn.norms import BatchNorm2d
from parlinalg.schemes import Scheme


class ResNet(Module):
    """A classifier of images, on every grid; its parameters and buffers have torchvision's names.

    Parameters
    ----------
    block : {"basic", "bottleneck"}
        Two convolutions of 3 × 3, or three of 1 × 1, 3 × 3 and 1 × 1 that end in four times as many channels.
    blocks : sequence of int
        How many blocks there are of each width; the widths double and the images halve from one to the next.
    num_classes, channels : int
        Classes of an image, and its channels.
    width : int
        Channels of the first blocks.
    small_images : bool
        Begin with a convolution of 3 × 3 in place of 7 × 7 with stride 2 and max pooling, as for images of 32 × 32.
    scheme : Scheme or str
    grid : Grid
    dtype : dtype
    seed : int, optional
        With a seed the model is initialized at once; else by `initialize(seed)`.

    Attributes
    ----------
    conv1, bn1, maxpool, layer1, …, avgpool, fc : Module
        `layer1` and so on are Sequential, whose blocks have conv1, bn1, conv2, bn2, … and downsample.
    images_layout : Layout
        The layout of the images [batch, channels, height, width] it is called with, of any real dtype.
    targets_layout : Layout
        The layout of the class ids [batch] that go with the logits [batch, num_classes] it gives.

    A pipeline cuts it between blocks (`layers`).  `load_torch` takes the state of torchvision's.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> from parlinalg import nn, schemes
    >>> grid, scheme = pla.Grid({"r": 1, "c": 1}), schemes.for_mode("2d").SCHEME
    >>> model = nn.ResNet("basic", (1, 1), 10, width=8, small_images=True, scheme=scheme, grid=grid, seed=0)
    >>> images = pla.distribute(np.zeros((2, 3, 16, 16), "float32"), grid, model.images_layout)
    >>> model(images).shape
    (2, 10)
    """

    def __init__(
        self, block: str, blocks: Sequence[int], num_classes: int = 1000, *, channels: int = 3, width: int = 64,
        small_images: bool = False, scheme: Scheme | str, grid: Grid, dtype: DTypeLike = np.float32,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kinds = {"basic": BasicBlock, "bottleneck": Bottleneck}
        if block not in kinds:
            raise ConfigError(f"a ResNet's block is 'basic' or 'bottleneck', not {block!r}")
        counts = [whole("a ResNet's number of blocks", n) for n in blocks]
        if not counts:
            raise ConfigError("a ResNet's blocks are numbers, such as (2, 2, 2, 2), not none at all")
        kind, classes = kinds[block], whole("a ResNet's num_classes", num_classes)
        self.scheme, self.grid, self.dtype = placed(self, scheme, grid), grid, dtype_named(dtype)
        self.channels, self.width = whole("a ResNet's channels", channels), whole("a ResNet's width", width)
        here: dict[str, Any] = {"scheme": scheme, "grid": grid, "dtype": self.dtype}
        small = flag("small_images", small_images)
        size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        self.conv1 = conv(self.channels, self.width, size, "contract", stride=stride, padding=padding, **here)
        self.bn1 = BatchNorm2d(self.width, **here)
        self.maxpool = None if small else MaxPool2d(3, 2, 1)
        wide = self.width
        for i, count in enumerate(counts):
            out = self.width * 2**i
            made = []
            for j in range(count):
                made.append(kind(wide, out, 2 if i and not j else 1, **here))
                wide = out * kind.expansion
            setattr(self, f"layer{i + 1}", Sequential(*made))
        self.count = len(counts)
        self.avgpool = AdaptiveAvgPool2d(1)
        fan_in = 1 / math.sqrt(wide)
        self.fc = Linear(
            wide, classes, scheme, grid, "expand", head=True, dtype=self.dtype, bias_init=init.Uniform(-fan_in, fan_in)
        )
        self.images_layout = Layout(self.conv1.input_layout.dims[0], None, None, None)
        self.targets_layout = Layout(self.fc.plan(1).y.dims[0])
        if seed is not None:
            self.initialize(seed)

    def stem(self, images: Tensor | DistArray) -> Tensor:
        """Return the residual stream [batch, height, width, channels] before the first block."""
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise ValueError(
                f"this model takes images of shape [batch, {self.channels}, height, width], not {images.shape}"
            )
        shown = as_tensor(images).astype(self.dtype).transpose(0, 2, 3, 1)
        x: Tensor = ops.relu(self.bn1(self.conv1(shown.redistribute(self.conv1.input_layout))))
        return x if self.maxpool is None else self.maxpool(x)

    def head(self, x: Tensor) -> Tensor:
        """Return the logits [batch, num_classes] of the residual stream after the last block."""
        pooled = self.avgpool(x)
        return self.fc(pooled[:, 0, 0].redistribute(self.fc.plan(1).x))

    def forward(self, images: Tensor | DistArray) -> Tensor:
        x = self.stem(images)
        for stage in self._stages():
            x = stage(x)
        return self.head(x)

    def _stages(self) -> list[Sequential]:
        return [getattr(self, f"layer{i + 1}") for i in range(self.count)]

    def layers(self) -> list[Layer]:
        """Return the layers that a pipeline cuts: the stem, the blocks, and the head."""
        stem = [self.conv1, self.bn1, *([] if self.maxpool is None else [self.maxpool])]
        blocks = [
            Layer(f"layer{i + 1}.{j}", block, (block,))
            for i, stage in enumerate(self._stages())
            for j, block in enumerate(stage)
        ]
        head = Layer("head", self.head, (self.avgpool, self.fc), True)
        return [Layer("stem", self.stem, tuple(stem), True), *blocks, head]

    def load_torch(self, state: Mapping[str, Any]) -> None:
        """Take the parameters and buffers of torchvision's model, or of one with the same names.  Collective.

        Parameters
        ----------
        state : mapping of str to array or torch.Tensor
            Such as `torchvision.models.resnet18().state_dict()`, whole and the same on every rank.

        Raises
        ------
        ConfigError
            On all ranks, naming all that are missing, unexpected or misshapen; then nothing has changed.
        """
        self.load_state_dict({name: turned(np.asarray(value)) for name, value in state.items()})

    def layer_flops(self, batch: int, sequence: int) -> list[float]:
        """Return the floating-point operations of a forward and backward pass of each layer, for images of 64 × 64.

        Where a pipeline is cut by them only their ratios count, which are those of other images.
        """
        side, found = 64 // self.conv1.windows.stride[0], []
        found.append(6.0 * batch * side**2 * self.conv1.multiplications)
        side //= 1 if self.maxpool is None else 2
        for stage in self._stages():
            for block in stage:
                found.append(6.0 * batch * block.multiplications_of(side))
                side //= block.stride
        return [*found, 6.0 * batch * self.fc.multiplications]


def resnet18(num_classes: int = 1000, **options: Any) -> ResNet:
    """Return a ResNet of 18 layers: `ResNet("basic", (2, 2, 2, 2), num_classes, **options)`."""
    return ResNet("basic", (2, 2, 2, 2), num_classes, **options)


def resnet34(num_classes: int = 1000, **options: Any) -> ResNet:
    """Return a ResNet of 34 layers: `ResNet("basic", (3, 4, 6, 3), num_classes, **options)`."""
    return ResNet("basic", (3, 4, 6, 3), num_classes, **options)


def resnet50(num_classes: int = 1000, **options: Any) -> ResNet:
    """Return a ResNet of 50 layers: `ResNet("bottleneck", (3, 4, 6, 3), num_classes, **options)`."""
    return ResNet("bottleneck", (3, 4, 6, 3), num_classes, **options)


class _Block(Module):
    """Convolutions and norms, added to the residual stream.

    The convolutions go alternately into a block and out of it.  What is added comes from the last one's layout to the
    residual stream's.
    """

    expansion = 1
    kernels: tuple[int, ...]

    def __init__(
        self, channels: int, width: int, stride: int, *, scheme: Scheme | str, grid: Grid, dtype: np.dtype[Any]
    ) -> None:  # fmt: skip
        super().__init__()
        here: dict[str, Any] = {"scheme": scheme, "grid": grid, "dtype": dtype}
        self.stride, self.depth = stride, len(self.kernels)
        self.residual = placed(self, scheme, grid).images("contract")
        wide, strided = channels, self.kernels.index(3)
        for i, size in enumerate(self.kernels):
            out, kind = width * (self.expansion if i == self.depth - 1 else 1), "contract" if i % 2 else "expand"
            step = stride if i == strided else 1
            setattr(self, f"conv{i + 1}", conv(wide, out, size, kind, stride=step, padding=size // 2, **here))
            setattr(self, f"bn{i + 1}", BatchNorm2d(out, kind=kind, **here))
            wide = out
        self.downsample: Module | None = None
        if stride != 1 or channels != wide:
            shortcut = conv(channels, wide, 1, "expand", stride=stride, **here)
            self.downsample = Sequential(shortcut, BatchNorm2d(wide, kind="expand", **here))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i in range(1, self.depth + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            if i < self.depth:
                y = ops.relu(y)
        if self.downsample is not None:
            x = self.downsample(x).redistribute(self.residual)
        return ops.relu(y.redistribute(self.residual) + x)

    def multiplications_of(self, side: int) -> int:
        """Return the multiplications of its products for images of so many pixels a side."""
        total, found = 0, side
        for i in range(1, self.depth + 1):
            made = getattr(self, f"conv{i}")
            found //= made.windows.stride[0]
            total += found**2 * made.multiplications
        if self.downsample is not None:
            total += found**2 * self.downsample[0].multiplications  # type: ignore[index]
        return total


class BasicBlock(_Block):
    """Two convolutions of 3 × 3, the first with the stride."""

    kernels = (3, 3)


class Bottleneck(_Block):
    """Convolutions of 1 × 1, 3 × 3 with the stride, and 1 × 1 to four times as many channels."""

    expansion = 4
    kernels = (1, 3, 1)


def conv(
    channels: int, out: int, size: int, kind: str, *, stride: int = 1, padding: int = 0, scheme: Scheme | str,
    grid: Grid, dtype: np.dtype[Any],
) -> Conv2d:  # fmt: skip
    """Return a convolution without bias that starts as those of He et al. do."""
    start = init.Normal(math.sqrt(2 / (out * size**2)))
    return Conv2d(
        channels, out, size, scheme, grid, kind, stride=stride, padding=padding, bias=False, dtype=dtype,
        weight_init=start,
    )  # fmt: skip


def turned(array: np.ndarray) -> np.ndarray:
    """Return an array of PyTorch's with its dims in the order of this library's layers."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T
