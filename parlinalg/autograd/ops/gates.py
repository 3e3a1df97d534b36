"""Gated units."""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import effective, mismatch
from parlinalg.array.reductions import summed
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.kernels import activations
from parlinalg.layout import Layout


def swiglu(x: Any) -> Tensor:
    """silu(x[..., 0]) x[..., 1]: a gate and what passes it lie side by side in the last dim (Shazeer, "GLU variants
    improve transformer", 2020).

    Raises
    ------
    ValueError, LayoutError
        If the last dim is not 2, or cut.
    """
    x = as_tensor(x)
    data = summed(x.data, "swiglu")
    if not x.ndim or x.shape[-1] != 2:
        raise ValueError(f"swiglu of shape {x.shape}; it takes [..., 2]: a gate and a value for each result")
    whole = data.layout.with_dim(-1, None)
    if effective(data.layout, data.grid) != effective(whole, data.grid):
        raise mismatch("swiglu: gates and values are cut apart", data.layout, whole)
    inside, rest = data.grid.inside, data.layout
    if inside:
        y = activations.swiglu(data.block)
    else:
        y = data.grid.backend.zeros((0,) * (x.ndim - 1), x.dtype)
    value = data.like(y, Layout(*rest.dims[:-1]), x.shape[:-1])
    part = Part(lambda g, z: (activations.swiglu_grad(z, g) if inside else z, rest), data.block)
    return record("swiglu", value, [x], [part])
