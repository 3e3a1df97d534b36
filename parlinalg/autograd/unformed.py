"""Products that are formed where they go."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.blas import add_product
from parlinalg.matmul.local import gemm, is_half

Block = Any


class Unformed:
    """The product of two matrices of one dtype, as a block of this shape, not multiplied yet.

    A weight's gradient goes into its place in a bucket, and is added there to that of the microbatches before: where
    the BLAS does both at once, no array of its own is written and read again.
    """

    base = None  # nobody's view

    def __init__(self, a: Block, b: Block, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.a, self.b, self.dtype, self.shape = a, b, dtype, shape

    def formed(self) -> Block:
        """The product in an array of its own."""
        return gemm(self.a, self.b, self.dtype).reshape(self.shape)

    def put(self, out: Block, *, add: bool = False) -> None:
        """Write the product to an array of its shape, or add it to what that has."""
        straight = out.flags.c_contiguous and out.dtype == self.dtype == self.a.dtype == self.b.dtype
        if not straight or is_half(self.dtype):
            place(self.formed(), out, add=add)
            return
        target = out.reshape(self.a.shape[0], self.b.shape[1])
        if not add:
            namespace(out).matmul(self.a, self.b, out=target)
        elif isinstance(out, np.ndarray):
            add_product(target, self.a, self.b)
        else:
            target += self.a @ self.b


def place(block: Block | Unformed, out: Block, *, add: bool = False) -> None:
    """Write a block, formed or not, to an array of its shape, or add it to what that has."""
    if isinstance(block, Unformed):
        block.put(out, add=add)
    elif add:
        out += block
    else:
        out[...] = block
