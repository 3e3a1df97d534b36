"""Single items of a dim that may be cut."""

from __future__ import annotations

from typing import Any

from parlinalg.array.core import mismatch, same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.arithmetic import block_sum
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.layout import Layout

Block = Any


def select(x: Any, dim: int, index: int) -> Tensor:
    """Return item `index` of a dim, which is dropped; the dim may be cut.

    Where it is cut the result is partial over the axes that cut it: the rank that has the item holds it, the others
    hold zeros; `.redistribute` settles it together with the next move.

    Raises
    ------
    IndexError
        If there is no such item.
    """
    x = as_tensor(x)
    data = summed(x.data, "select")
    if not -x.ndim <= dim < x.ndim or not -x.shape[dim] <= index < x.shape[dim]:
        raise IndexError(f"select: there is no item {index} in dim {dim} of a tensor of shape {x.shape}")
    grid, dim = x.grid, dim % x.ndim
    index %= x.shape[dim]
    rest, local = data.layout, data.block.shape
    here = grid.block(rest, x.shape)[dim]
    at = (*(slice(None),) * dim, index - here.start)
    over = [a for a in rest.dims[dim] if grid.sizes[a] > 1]
    layout = Layout(*rest.dims[:dim], *rest.dims[dim + 1 :], partial=over)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    mine = grid.inside and index in here
    backend = grid.backend
    if mine:
        block = data.block[at].copy()
    else:
        block = backend.zeros((*local[:dim], *local[dim + 1 :]), data.dtype)

    def part(g: Block) -> Term:
        d = backend.zeros(local, g.dtype)
        if mine:
            d[at] = g
        return d, rest

    return record("select", data.like(block, layout, shape), [x], [part])


def replace_first(x: Any, token: Any) -> Tensor:
    """Return x with item 0 of dim 1 replaced by one vector: a class token (Devlin et al., BERT, 2019).

    Parameters
    ----------
    x : Tensor
        Shape [batch, sequence, hidden], in any layout.
    token : Tensor
        Shape [hidden], cut as the last dim of x.
    """
    x, token = as_tensor(x), as_tensor(token)
    data, first = summed(x.data, "replace_first"), summed(token.data, "replace_first")
    grid = same_grid([data, first])
    if x.ndim != 3 or token.shape != x.shape[2:] or not x.shape[1]:
        raise ValueError(
            f"replace_first: x of shape {x.shape} and a token of shape {token.shape}; right are [batch, sequence, "
            "hidden], with a sequence of at least 1, and [hidden]"
        )
    rest, want = data.layout, Layout(data.layout.dims[2])
    if grid.effective(first.layout) != grid.effective(want):
        raise mismatch("replace_first: the token is not cut as the last dim of x", first.layout, want)
    mine = grid.inside and 0 in grid.block(rest, x.shape)[1]
    terms = want.with_partial([a for dim in rest.dims[:2] for a in dim if grid.sizes[a] > 1])
    local, dtype = first.block.shape, first.dtype
    block = data.block.copy()
    if mine:
        block[:, 0] = first.block

    def dx(g: Block) -> Term:
        d = g.copy()
        if mine:
            d[:, 0] = 0
        return d, rest

    def dtoken(g: Block) -> Term:
        return block_sum(g[:, 0], (0,)) if mine else grid.backend.zeros(local, dtype), terms

    return record("replace_first", data.like(block), [x, token], [dx, dtoken])
