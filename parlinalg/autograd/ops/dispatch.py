"""Tokens to their experts and back, and the terms of the loss that spread them evenly."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import mismatch
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.arithmetic import block_sum, multiply
from parlinalg.autograd.ops.reductions import mean, sum
from parlinalg.autograd.ops.routing import Routing, paired
from parlinalg.autograd.ops.softmax import log_softmax
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.views import matrix
from parlinalg.layout import Layout
from parlinalg.redistribute import redistribute

Block = Any


def dispatch(x: Any, routing: Routing) -> Tensor:
    """Return the experts' queues [experts, groups, capacity, hidden] with tokens of x [batch, sequence, hidden].

    x is brought to the layout of the tokens that the queues name, and then its tokens to the ranks of their experts, by
    one all-to-all.  Places that no token takes are zeros.  In the backward pass the gradients come back the same way,
    and are summed over axes that cut the products only when they are those of tokens, which are fewer.
    """
    x = as_tensor(x)
    data, queues = summed(x.data, "dispatch"), routing.queues
    grid, work = queues.grid, queues.tokens
    at = redistribute(data.block, data.layout, work, data.shape, grid, order=data.order)
    local, exchange = at.shape, routing.exchange
    rows = routing.exchange(matrix(at)[routing.tokens])
    shape, layout = (*queues.buffer, data.shape[2]), queues.layout(work.dims[2])
    y = grid.backend.zeros(grid.block_shape(layout, shape) if grid.inside else (0,) * 4, data.dtype)
    if grid.inside:
        matrix(y)[routing.places] = rows

    def part(term: Term, places: Block, *by_choice: Block) -> Term:
        g, there = term
        d = grid.backend.zeros(local, g.dtype)
        if grid.inside:
            got = exchange(matrix(g)[places], back=True)
            flat = matrix(d)
            for rows, tokens in paired(by_choice):
                flat[tokens] += got[rows]
        return d, work.with_partial((*there.partial, *queues.replicating))

    kept = Part(part, routing.places, *chain(*routing.by_choice))
    return record("dispatch", DistArray(y, shape, layout, grid), [x], [kept], takes_partial=True)


def combine(y: Any, gates: Any, routing: Routing, layout: Layout) -> Tensor:
    """Return `out[b, s, :] = sum over j of gates[b, s, j] * y[expert, group, place, :]`, without dropped choices j.

    Parameters
    ----------
    y : Tensor
        [experts, groups, capacity, hidden], in the queues' layout, cut in hidden by any axes; it may be partial.
    gates : Tensor
        [batch, sequence, k], cut as the tokens.
    routing : Routing
    layout : Layout
        The layout of the result, [batch, sequence, hidden].
    """
    y, gates = as_tensor(y), as_tensor(gates)
    queues = routing.queues
    grid, features, partial = queues.grid, y.layout.dims[3], y.layout.partial
    if grid.effective(y.layout) != grid.effective(want := queues.layout(features).with_partial(partial)):
        raise mismatch("combine: the experts' results do not lie as their queues", y.layout, want)
    if grid.effective(gates.layout) != grid.effective(want := Layout(*queues.tokens.dims[:2], None)):
        raise mismatch("combine: the gates are not cut as the tokens", gates.layout, want)
    width, shape = y.block.shape[-1], (*queues.shape, y.shape[3])
    terms = (*partial, *queues.replicating)
    work = Layout(*queues.tokens.dims[:2], features)
    unsummed, of_gates = work.with_partial(terms), Layout(*work.dims[:2], None, partial=(*features, *terms))
    weight = matrix(gates.block)
    got = routing.exchange(matrix(y.block)[routing.places], back=True) if grid.inside else y.block
    out = grid.backend.zeros(grid.block_shape(work, shape) if grid.inside else (0,) * 3, y.dtype)
    if grid.inside:
        flat = matrix(out)
        for j, (rows, tokens) in enumerate(routing.by_choice):
            flat[tokens] += (weight[tokens, j][:, None] * got[rows]).astype(y.dtype, copy=False)
    rest, local, cuts = layout.with_partial(()), y.block.shape, y.layout.with_partial(())

    def at_work(g: Block) -> Block:
        return redistribute(g, rest, work, shape, grid)

    def to_experts(g: Block, weight: Block, places: Block, *by_choice: Block) -> Term:
        d = grid.backend.zeros(local, g.dtype)
        if grid.inside:
            flat = matrix(g)
            sent = grid.backend.empty((many, width), g.dtype)
            for j, (rows, tokens) in enumerate(paired(by_choice)):
                sent[rows] = weight[tokens, j][:, None] * flat[tokens]
            matrix(d)[places] = exchange(sent)
        return d, cuts

    def to_gates(g: Block, got: Block, *by_choice: Block) -> Term:
        d = grid.backend.zeros(gates_shape, gates_dtype)
        if grid.inside:
            flat, each = matrix(g), matrix(d)
            for j, (rows, tokens) in enumerate(paired(by_choice)):
                each[tokens, j] = (got[rows] * flat[tokens]).sum(axis=-1, dtype=gates_dtype)
        return d, of_gates

    gates_shape, gates_dtype = gates.block.shape, gates.dtype
    many, exchange = routing.tokens.size, routing.exchange
    chosen_by = tuple(chain(*routing.by_choice))
    parts = [Part(to_experts, weight, routing.places, *chosen_by), Part(to_gates, got, *chosen_by)]
    block = redistribute(out, unsummed, layout, shape, grid, owned=True)
    return record("combine", DistArray(block, shape, layout, grid), [y, gates], parts, at_work)


def add_bias(y: Any, bias: Any) -> Tensor:
    """Return `y[e, g, c, *n] + bias[e, *n]`, each expert's results with its bias.

    Where results rest unsummed the bias is added to one of the terms; it is brought to where they lie.
    """
    y, bias = as_tensor(y), as_tensor(bias)
    data, dims, grid = y.data, y.layout.dims, y.grid
    want = Layout(dims[0], *dims[3:], partial=y.layout.partial)
    added = redistribute(bias.block, bias.layout, want, bias.shape, grid)
    block = data.block + added[:, None, None] if grid.inside else data.block
    rest, terms = data.layout.with_partial(()), Layout(dims[0], *dims[3:], partial=(*dims[1], *dims[2]))
    none, dtype = (0,) * bias.ndim, bias.dtype

    def to_bias(g: Block) -> Term:
        return block_sum(g, (1, 2)) if grid.inside else grid.backend.zeros(none, dtype), terms

    value = data.like(block.astype(data.dtype, copy=False))
    return record("add_bias", value, [y, bias], [lambda g: (g, rest), to_bias])


def chosen(x: Any, routing: Routing) -> Tensor:
    """Return `y[b, s, j] = x[b, s, choices[b, s, j]]` of x [batch, sequence, experts], cut as the tokens."""
    x = as_tensor(x)
    data = summed(x.data, "chosen")
    grid, xp = data.grid, data.xp
    index = grid.backend.from_host(routing.choices)
    k = index.shape[-1]
    y = xp.take_along_axis(data.block, index, axis=-1) if grid.inside else data.block
    rest, local, many = data.layout, data.block.shape, data.shape[-1]

    def part(g: Block, index: Block) -> Term:
        d = grid.backend.zeros(local, g.dtype)
        if grid.inside:
            experts = xp.arange(many)
            for j in range(k):
                d += xp.where(experts == index[..., j, None], g[..., j, None], g.dtype.type(0))
        return d, rest

    return record("chosen", DistArray(y, (*data.shape[:2], k), rest, grid), [x], [Part(part, index)])


def balance_loss(probabilities: Any, routing: Routing) -> Tensor:
    """Return the loss that grows as tokens choose experts unevenly: a number, the same on every rank; 1 where even.

    It is experts · Σ over experts of (fraction of choices · mean probability), averaged over sequences, where all
    choices of a token count alike (Dai et al., "DeepSeekMoE", 2024, and Megatron-LM; with one choice Fedus et al.,
    "Switch transformers", 2022).  Lepikhin et al., "GShard", 2021, count first choices only, and take the mean over
    experts.  Its gradient does not flow through the fractions.
    """
    p = as_tensor(probabilities)
    batch, length, experts = p.shape
    scale = experts / max(1, batch * length)
    shares = (routing.shares * scale).astype(p.dtype)[:, None, :] if p.grid.inside else np.zeros((0, 0, 0), p.dtype)
    rest = Layout(p.layout.dims[0], None, None)
    return sum(multiply(p, DistArray(p.grid.backend.from_host(shares), (batch, 1, experts), rest, p.grid)))


def z_loss(scores: Any) -> Tensor:
    """Return the mean square of log Σ exp(scores), which keeps scores small (Zoph et al., "ST-MoE", 2022)."""
    x = as_tensor(scores)
    shift = mean(x - log_softmax(x), -1)  # the same for all experts
    return mean(shift * shift)
