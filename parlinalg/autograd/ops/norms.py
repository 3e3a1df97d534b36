"""Layer norm and RMS norm over the last dim, whole or cut, and batch norm over all dims but the last.

Over cut dims sums are all-reduced: the mean first, then the centred squares, a number a row each, or of a batch norm a
number a channel each; two numbers in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

from parlinalg.array.core import DistArray, mismatch, same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.softmax import Pieces
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tape import walking
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import norms as kernels
from parlinalg.grid import Grid
from parlinalg.layout import Layout

Block = Any


def layer_norm(x: Any, weight: Any, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Return `(x - mean) / √(variance + eps) weight + bias` over the last dim (Ba et al., "Layer normalization", 2016).

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
    """Return `x / √(mean of x² + eps) weight` over the last dim.

    This is Zhang and Sennrich, "Root mean square layer normalization", 2019; parameters as of `layer_norm`.
    """
    return _norm("rms_norm", x, weight, None, eps, centred=False)


def _norm(name: str, x: Any, weight: Any, bias: Any, eps: float, *, centred: bool) -> Tensor:
    x = as_tensor(x)
    inputs = [x, *(as_tensor(p) for p in (weight, bias) if p is not None)]
    data = summed(x.data, name)
    grid = same_grid([t.data for t in inputs])
    if not x.ndim:
        raise ValueError(f"{name} of a tensor without dims; it goes over the last dim")
    rest = _layout_of_vectors(name, data, {"weight": weight, "bias": bias}, grid)
    pieces, n, block, gain, whole = Pieces(data), x.shape[-1], data.block, inputs[1].block, data.layout
    total = pieces.sum if grid.inside and any(grid.sizes[a] > 1 for a in pieces.cut) else None
    y, moments = kernels.norm(
        block, gain, inputs[2].block if bias is not None else None, n, eps, centred=centred, total=total
    )
    terms = rest.with_partial([a for a in pieces.lead if grid.sizes[a] > 1])

    def gradients(g: Block, block: Block, gain: Block, mean: Block, scale: Block) -> tuple[Block, Block, Block]:
        return kernels.norm_grad(block, g, gain, kernels.Moments(mean, scale), n, total=total)

    def dx(grads: tuple[Block, Block, Block]) -> Term:
        return grads[0], whole

    def dw(grads: tuple[Block, Block, Block]) -> Term:
        return grads[1], terms

    def db(grads: tuple[Block, Block, Block]) -> Term:
        return grads[2], terms

    return record(name, data.like(y), inputs, [dx, dw, db][: len(inputs)], Part(gradients, block, gain, *moments))


def _layout_of_vectors(name: str, x: DistArray, vectors: dict[str, Any], grid: Grid) -> Layout:
    """Return the layout that vectors over the last dim of x must have; raise an error if one has not."""
    layout = Layout(x.layout.dims[-1])
    for what, p in vectors.items():
        if p is None:
            continue
        if p.shape != x.shape[-1:]:
            raise ValueError(f"{name}: {what} of shape {p.shape} for x of shape {x.shape}; right is {x.shape[-1:]}")
        if grid.effective(p.layout) != grid.effective(layout):
            raise mismatch(f"{name}: {what} is not cut as the last dim of x", p.layout, layout)
    return layout


def _update(running: Tensor | None, found: Block, momentum: Any) -> None:
    """Move a running mean or variance by `momentum` of the way to what a batch gave."""
    if running is not None:
        running.block[...] += (found.astype(running.dtype, copy=False) - running.block) * momentum


def batch_norm(
    x: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return `(x - mean) / √(variance + eps) weight + bias`, by channel, which is the last dim.

    See Ioffe and Szegedy, "Batch normalization", 2015.

    Parameters
    ----------
    x : Tensor
        Shape [..., channels], in any layout.
    running_mean, running_var : Tensor, optional
        Shape [channels], cut as the last dim of x.  In training they are written to: each becomes `1 - momentum` of
        itself and `momentum` of the batch's mean or unbiased variance; not when values are computed again in a backward
        pass.
    weight, bias : Tensor, optional
        The same shape and cuts.
    training : bool
        Whether mean and variance are those of x, over all dims but the last and all axes that cut these; else they are
        the running ones.
    momentum : float, or array of one element
    eps : float

    Raises
    ------
    ValueError
        In training, if there is one value a channel only.
    LayoutError
        If one of the vectors is not cut as the last dim of x; the message names the `redistribute` that mends it.
    """
    x = as_tensor(x)
    given = {"weight": weight, "bias": bias}
    inputs = [x, *(as_tensor(p) for p in given.values() if p is not None)]
    vectors = {"running_mean": running_mean, "running_var": running_var, **given}
    data = summed(x.data, "batch_norm")
    grid = same_grid([x.data, *(as_tensor(p).data for p in vectors.values() if p is not None)])
    if not x.ndim:
        raise ValueError("batch_norm of a tensor without dims; its channels are the last dim")
    rest = _layout_of_vectors("batch_norm", data, vectors, grid)
    n = math.prod(x.shape[:-1])
    if training and n == 1:
        raise ValueError(
            f"batch_norm: x of shape {x.shape} has one value a channel, whose variance is 0: training takes more than "
            "one; give a larger batch, or call eval()"
        )
    if not training and (running_mean is None or running_var is None):
        raise ValueError("batch_norm outside of training needs running_mean and running_var")
    lead = tuple(a for dim in data.layout.dims[:-1] for a in dim if grid.sizes[a] > 1)

    def total(numbers: Block) -> Block:
        if grid.inside and lead:
            grid.comm(lead).all_reduce(numbers, op="sum")
        return numbers

    whole, held, work = data.layout, data.block.shape, work_dtype(x.dtype)
    rows = data.block.reshape((math.prod(held[:-1]), held[-1]))
    if training:
        mean, variance = kernels.column_moments(rows, n, total)
        if n and walking() is None:
            _update(running_mean, mean, momentum)
            _update(running_var, variance * (n / (n - 1)), momentum)
    else:
        mean, variance = (p.block.astype(work, copy=True) for p in (running_mean, running_var) if p is not None)
    scale = 1 / data.xp.sqrt(variance + eps)
    gain, shift = (None if p is None else as_tensor(p).block for p in (weight, bias))
    y = kernels.column_norm(rows, mean, scale, gain, shift)
    terms = rest.with_partial(lead)

    def sums(g: Block, rows: Block, mean: Block, scale: Block) -> tuple[Block, Block]:
        # sums over rows of g and of g (x - mean) scale: the gradients of bias and weight
        grads = g.reshape(rows.shape)
        return grads, kernels.column_sums_grad(rows, grads, mean, scale)

    def dx(found: tuple[Block, Block], rows: Block, mean: Block, scale: Block, gain: Block) -> Term:
        grads, local = found
        means = total(local.copy()) / max(1, n) if training else None
        return kernels.column_norm_grad(rows, grads, mean, scale, gain, means).reshape(held), whole

    def dw(found: tuple[Block, Block]) -> Term:
        return found[1][1].copy(), terms

    def db(found: tuple[Block, Block]) -> Term:
        return found[1][0].copy(), terms

    kept = rows, mean, scale
    parts = [Part(dx, *kept, gain), *(Part(rule) for rule, p in ((dw, weight), (db, bias)) if p is not None)]
    return record("batch_norm", data.like(y.reshape(held)), inputs, parts, Part(sums, *kept))
