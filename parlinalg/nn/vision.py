"""From images to a sequence, and from a sequence to classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor, as_tensor, ops
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import init
from parlinalg.nn.checks import placed
from parlinalg.nn.init import Declared, Initializer
from parlinalg.nn.linear import Linear
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme

Size = int | tuple[int, int]


class PatchEmbedding(Module):
    """A vector for every patch of an image, after a class token (Dosovitskiy et al., "An image is worth 16×16 words",
    2021).

    Parameters
    ----------
    image_size, patch_size : int or (int, int)
        Height and width; the image's are multiples of the patch's.
    channels, hidden : int
    scheme : Scheme or str
    grid : Grid
    dtype : dtype
    std : float
        The standard deviation of the normal distribution from which the class token and the projection start.

    Attributes
    ----------
    projection : Linear
        From patches, [channels · height · width], by the scheme's contract plan.
    class_token : Parameter
        Shape [hidden], cut as the residual stream's last dim.
    patches : int
        How many there are in an image.
    images_layout : Layout
        The layout of the images [batch, channels, height, width] it is called with, of any dtype.  The result,
        [batch, 1 + patches, hidden], has the residual stream's layout and the layer's dtype.
    """

    class_token: Parameter

    def __init__(
        self, image_size: Size, patch_size: Size, channels: int, hidden: int, scheme: Scheme | str, grid: Grid, *,
        std: float = 0.02, dtype: DTypeLike = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        scheme = placed(self, scheme, grid)
        self.image, self.patch, self.channels, self.scheme = _pair(image_size), _pair(patch_size), channels, scheme
        if any(p < 1 or n % p for n, p in zip(self.image, self.patch, strict=True)):
            raise ConfigError(
                f"images of {self.image[0]} × {self.image[1]} do not fall into patches of {self.patch[0]} × "
                f"{self.patch[1]}: an image's sides are multiples of a patch's"
            )
        self.patches = (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])
        self.images_layout = Layout(scheme.inner.dims[0], None, None, None)
        normal = init.Normal(std)
        self.projection = Linear(
            channels * self.patch[0] * self.patch[1], hidden, scheme, grid, "contract", dtype=dtype, weight_init=normal
        )
        token = Declared((hidden,), Layout(scheme.residual.dims[-1]), grid, dtype_named(dtype), normal)
        self.class_token = token  # type: ignore[assignment]

    def forward(self, images: Tensor | DistArray) -> Tensor:
        if images.shape[1:] != (self.channels, *self.image):
            raise ValueError(
                f"this layer takes images of shape [batch, {self.channels}, {self.image[0]}, {self.image[1]}], not "
                f"{images.shape}"
            )
        shown = as_tensor(images).astype(self.class_token.dtype)  # the model's arithmetic, not that of the images
        x = ops.patches(shown, self.patch, lead=1).redistribute(self.projection.plan(2).x)
        return ops.replace_first(self.projection(x), self.class_token)

    def extra_repr(self) -> str:
        return f"{self.image} in patches of {self.patch}"


class Classifier(Module):
    """Classes of a sequence, from its first item or the mean of all.

    Parameters
    ----------
    hidden, classes : int
    scheme : Scheme or str
    grid : Grid
    pool : {"first", "mean"}
    bias : bool
    dtype : dtype
    weight_init : callable, optional
        As of `Linear`.

    Attributes
    ----------
    head : Linear
    targets_layout : Layout
        The layout of the class ids [batch] that go with the logits [batch, classes].

    Call it with the residual stream [batch, sequence, hidden].
    """

    def __init__(
        self, hidden: int, classes: int, scheme: Scheme | str, grid: Grid, pool: str = "first", *, bias: bool = True,
        dtype: DTypeLike = np.float32, weight_init: Initializer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if pool not in ("first", "mean"):
            raise ConfigError(f"a classifier's pool is 'first' or 'mean', not {pool!r}")
        self.pool, scheme = pool, placed(self, scheme, grid)
        self.head = Linear(
            hidden, classes, scheme, grid, "expand", bias=bias, head=True, dtype=dtype, weight_init=weight_init
        )
        self.targets_layout = Layout(self.head.plan(1).y.dims[0])

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3 or not x.shape[1]:
            raise LayoutError(f"a classifier takes [batch, sequence, hidden] with a sequence, not {x.shape}")
        rest = self.head.plan(1).x
        if self.pool == "first":
            return self.head(ops.select(x, 1, 0).redistribute(rest))
        return self.head(x.sum(1, partial=True).redistribute(rest) * (1 / x.shape[1]))


def _pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)
