"""Tables of vectors: look-ups by a product's plan, and positions that are added."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import mismatch, same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.arithmetic import block_sum
from parlinalg.autograd.ops.losses import _first, any_of
from parlinalg.autograd.ops.product import gathered_weight
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.kernels.embeddings import look_up, look_up_grad
from parlinalg.errors import PlanError
from parlinalg.layout import Layout, span_of
from parlinalg.plan import Plan
from parlinalg.redistribute import redistribute

Block = Any


def embedding(ids: Any, table: Any, plan: Plan) -> Tensor:
    """Return `y[*m, *n] = table[ids[*m], *n]`: the plan's product with a one-hot x, which is never built.

    Parameters
    ----------
    ids : DistArray or Tensor
        Integers in 0 to vocabulary - 1, of shape [*m], cut as the leading dims of the plan's x.
    table : Tensor
        Shape [vocabulary, *n], in the layout of the plan's w.
    plan : Plan
        The plan of a product over k = vocabulary; a scheme's `plan("contract", leading=ids.ndim)`.

    Returns
    -------
    Tensor
        Shape [*m, *n], in the layout of the plan's y.

    Raises
    ------
    ValueError
        If an id is beyond the vocabulary; it names the id and where it stands.
    LayoutError
        If ids or table do not rest as the plan says.

    In the backward pass the gradient is brought to work as that of a product; the table's is partial over the axes that
    cut m at work (Narayanan et al., Megatron-LM, 2021, for the vocabulary cut).
    """
    table = as_tensor(table)
    tokens, weight = as_tensor(ids).data, summed(table.data, "embedding")
    grid = same_grid([tokens, weight])
    if len(plan.k) != 1 or plan.b:
        raise PlanError(f"embedding: a plan with {len(plan.b)} batch dims and {len(plan.k)} k; a table has one k, no b")
    _check_ids(tokens, weight, Layout(*plan.x.dims[: len(plan.m)]))
    if weight.ndim != 1 + len(plan.n):
        raise ValueError(f"embedding: a table of shape {weight.shape} for a plan with {len(plan.n)} n; right: [k, *n]")
    if grid.effective(weight.layout) != grid.effective(plan.w):
        raise mismatch("embedding: the table does not rest as the plan's w", weight.layout, plan.w)
    shape = (*tokens.shape, *weight.shape[1:])
    numbers = tokens.block_in(Layout(*plan.m))
    rows = grid.block(plan.w_work, weight.shape)[0]
    local = grid.block_shape(plan.w_work, weight.shape)
    gathered = gathered_weight(table)
    at = weight.block_in(plan.w_work) if gathered is None else gathered.at_work(plan.w_work).block
    width = math.prod(at.shape[1:])
    whole = span_of(plan.k[0], grid.sizes) == 1
    share = len(rows) / max(1, weight.shape[0])
    y = look_up(at.reshape((at.shape[0], width)), numbers, rows.start, whole, share)
    y = y.reshape((*numbers.shape, *at.shape[1:]))
    block = redistribute(y, plan.y_work, plan.y, shape, grid, owned=True)

    of_table = plan.grad_w

    def dy_at_work(g: Block) -> Block:
        return redistribute(g, of_table.w, of_table.w_work, shape, grid)

    def part(dy: Block, numbers: Block) -> Term:
        d = look_up_grad(dy.reshape((numbers.size, width)), numbers, rows.start, len(rows), share)
        return d.reshape(local), of_table.y_work

    return record("embedding", DistArray(block, shape, plan.y, grid), [table], [Part(part, numbers)], dy_at_work)


def _check_ids(ids: DistArray, table: DistArray, want: Layout) -> None:
    """Raise unless the ids are integers within the vocabulary that lie as the plan says."""
    vocabulary = table.shape[0]
    if ids.dtype.kind not in "iu":
        raise TypeError(f"embedding: ids are {ids.dtype}; they are integers: convert them by .astype('int64')")
    if ids.ndim != want.ndim:
        raise ValueError(f"embedding: ids of shape {ids.shape} for a plan with {want.ndim} leading dims")
    if ids.grid.effective(ids.layout) != ids.grid.effective(want):
        raise mismatch("embedding: ids do not rest as the leading dims of the plan's x", ids.layout, want)
    bad = (ids.block < 0) | (ids.block >= vocabulary)
    if any_of(bad, "whether ids are within the vocabulary"):
        where, value = _first(ids, bad), int(ids.block[bad][0])
        raise ValueError(
            f"embedding: id {value} at {where} (rank {ids.grid.rank}) is beyond the vocabulary of {vocabulary}; ids "
            f"are in 0 to {vocabulary - 1}"
        )


def add_positions(x: Any, table: Any, start: int = 0, positions: np.ndarray | None = None) -> Tensor:
    """Return `y[b, s, :] = x[b, s, :] + table[start + s, :]`, or `+ table[positions[s], :]`.

    Parameters
    ----------
    x : Tensor
        Shape [batch, sequence, hidden], in any layout.
    table : Tensor
        Shape [positions, hidden], whole in the first dim and cut as x in the second.
    start : int
        The position of the sequence's first token.
    positions : array of int, optional
        [s] or [b, s], on the host: the position of every token, where they do not count up from `start`.

    Raises
    ------
    ValueError
        If the sequence is longer than the table.
    LayoutError
        If the table's hidden dim is not cut as that of x, or its positions are cut.
    """
    x, table = as_tensor(x), as_tensor(table)
    data, weight = summed(x.data, "add_positions"), summed(table.data, "add_positions")
    grid = same_grid([data, weight])
    if x.ndim != 3 or table.ndim != 2 or x.shape[2] != table.shape[1]:
        raise ValueError(
            f"add_positions: x of shape {x.shape} and a table of shape {table.shape}; right are [batch, sequence, "
            "hidden] and [positions, hidden]"
        )
    most, length = table.shape[0], x.shape[1]
    last = start + length if positions is None else int(positions.max(initial=-1)) + 1
    if start < 0 or last > most:
        raise ValueError(
            f"a sequence of {length} tokens from position {start} is longer than the {most} positions there are"
            if positions is None
            else f"a token at position {last - 1} is beyond the {most} positions there are"
        )
    want = Layout(None, data.layout.dims[2])
    if grid.effective(weight.layout) != grid.effective(want):
        raise mismatch("add_positions: the table is not whole in positions and cut as x in hidden", weight.layout, want)
    batch, here = grid.block(data.layout, x.shape)[:2]
    rows: Any = slice(start + here.start, start + here.stop)
    if positions is not None:
        mine = positions[..., here.start : here.stop]
        rows = grid.backend.from_host(np.ascontiguousarray(mine if mine.ndim == 1 else mine[batch.start : batch.stop]))
    y = data.block + weight.block[rows] if grid.inside else data.block.copy()
    rest = data.layout
    terms = want.with_partial([a for dim in rest.dims[:2] for a in dim if grid.sizes[a] > 1])
    local, by_item = weight.block.shape, positions is not None and positions.ndim == 2

    def part(g: Block, rows: Any) -> Term:
        if by_item:  # one position stands for several tokens
            flat = g.reshape((rows.size, g.shape[2]))
            return look_up_grad(flat, rows, 0, local[0]), terms
        d = grid.backend.zeros(local, g.dtype)
        if grid.inside:
            d[rows] = block_sum(g, (0,))
        return d, terms

    value = data.like(y.astype(data.dtype, copy=False))
    return record("add_positions", value, [x, table], [lambda g: (g, rest), Part(part, rows)])
