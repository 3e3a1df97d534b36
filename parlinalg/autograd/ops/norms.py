"""Layer norm and RMS norm over the last dim, whole or cut.

Over a cut dim the sums of a row are all-reduced: the mean first, then the centred squares, a number a row each; two
numbers a row in the backward pass.
"""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import effective, mismatch, same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.arrivals import Term
from parlinalg.autograd.ops.softmax import Pieces
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import kernels_rows
from parlinalg.layout import Layout

Block = Any


def layer_norm(x: Any, weight: Any, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean) / √(variance + eps) weight + bias` over the last dim (Ba et al., "Layer normalization", 2016).

    Parameters
    ----------
    x : Tensor
        Shape [..., hidden], in any layout.
    weight, bias : Tensor
        Shape [hidden], cut as the last dim of x.
    eps : float

    Raises
    ------
    LayoutError
        If weight or bias are not cut as the last dim of x; the message names the `redistribute` that mends it.
    """
    return _norm("layer_norm", x, weight, bias, eps, centred=True)


def rms_norm(x: Any, weight: Any, eps: float = 1e-6) -> Tensor:
    """`x / √(mean of x² + eps) weight` over the last dim (Zhang and Sennrich, "Root mean square layer normalization",
    2019); parameters as of `layer_norm`.
    """
    return _norm("rms_norm", x, weight, None, eps, centred=False)


def _norm(name: str, x: Any, weight: Any, bias: Any, eps: float, *, centred: bool) -> Tensor:
    x = as_tensor(x)
    inputs = [x, *(as_tensor(p) for p in (weight, bias) if p is not None)]
    data = summed(x.data, name)
    grid = same_grid([t.data for t in inputs])
    if not x.ndim:
        raise ValueError(f"{name} of a tensor without dims; it goes over the last dim")
    rest = Layout(data.layout.dims[-1])
    for what, p in zip(("weight", "bias"), inputs[1:], strict=False):
        if p.shape != x.shape[-1:]:
            raise ValueError(f"{name}: {what} of shape {p.shape} for x of shape {x.shape}; right is {x.shape[-1:]}")
        if effective(p.layout, grid) != effective(rest, grid):
            raise mismatch(f"{name}: {what} is not cut as the last dim of x", p.layout, rest)
    pieces, n, block, gain = Pieces(data), x.shape[-1], data.block, inputs[1].block
    total = pieces.sum if grid.inside and any(grid.sizes[a] > 1 for a in pieces.cut) else None
    y, moments = kernels_rows.norm(
        block, gain, inputs[2].block if bias is not None else None, n, eps, centred=centred, total=total
    )
    terms = rest.with_partial([a for a in pieces.lead if grid.sizes[a] > 1])

    def gradients(g: Block) -> tuple[Block, Block, Block]:
        return kernels_rows.norm_grad(block, g, gain, moments, n, total=total)

    def dx(grads: tuple[Block, Block, Block]) -> Term:
        return grads[0], data.layout

    def dw(grads: tuple[Block, Block, Block]) -> Term:
        return grads[1], terms

    def db(grads: tuple[Block, Block, Block]) -> Term:
        return grads[2], terms

    return record(data.like(y), inputs, [dx, dw, db][: len(inputs)], gradients)
